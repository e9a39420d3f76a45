"""A process of several that builds the same engine as the others, on fake.py, and runs it with
them: prints what was generated. Started as torchrun does, in a folder of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import g4ir
from g4ir.check.logits import verify_engine
from tests.trt.emulated import build, emulated, use
from tests.trt.small import one_thread

PROMPTS = [[2, 5, 7, 9, 11, 13, 4, 3, 8, 21, 34, 55], [2, 33]]


def main() -> int:
    with pytest.MonkeyPatch.context() as patch, one_thread():
        use(patch, emulated(Path()))
        build(Path("engine"), "tiny-moe", tp=2, ep=True, media="none", drafter="default")
        with g4ir.join(timeout_s=60) as group:
            if group.rank:
                g4ir.follow(group)
                return 0
            with g4ir.load_engine("engine", trust=True) as engine:
                found = {
                    "tokens": engine.generate(PROMPTS, 8),
                    "drafted": engine.generate(PROMPTS, 8, draft="mtp"),
                    "verified": verify_engine(engine).ok,
                }
            print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
