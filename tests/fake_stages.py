"""A script of stages without a GPU, for tests: what its cells do is said by the stage."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from stages import Cells, Kind, Script, Stage, common_parser, drive  # noqa: E402

from g4ir.errors import InputError  # noqa: E402


def refuse() -> dict[str, Any]:
    raise InputError("no room")


def fail() -> dict[str, Any]:
    raise ValueError("odd")


def crash() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hang() -> dict[str, Any]:
    time.sleep(600)
    return {}


def wait() -> dict[str, Any]:
    time.sleep(0.3)
    return {"us": 2}


DOES = {
    "right": lambda: {"us": 1, "ok": True, "time": time.time()},
    "wrong": lambda: {"us": 1, "ok": False},
    "refuse": refuse,
    "fail": fail,
    "crash": crash,
    "hang": hang,
    "wait": wait,
}


def run(cells: Cells, args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    for i, word in enumerate(given["cells"].split(",")):
        if word == "die":
            sys.exit(7)
        cells.cell(f"{i} {word}", DOES[word], 0.3 if word == "hang" else None)


def stages(args: argparse.Namespace) -> list[Stage]:
    return [Stage("fake", {"cells": words}) for words in args.variants[0].split("/")]


def main(words: list[str]) -> int:
    sys.argv[1:] = words
    args = common_parser(__doc__).parse_args()
    args.variants = [",".join(args.variants)]
    kinds = {"fake": Kind(run, limit=20.0)}
    return drive(Script(Path(__file__), kinds, stages, lambda args: {"machine": "none"}), args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
