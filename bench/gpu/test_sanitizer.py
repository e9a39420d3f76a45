"""Do small engines access memory as they may? They run under compute-sanitizer."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.engines import CARD, DRY, Scale, build, engine_path, g4ir_said
from g4ir.errors import MissingError

__all__ = ["CARD", "DRY"]
SANITIZER, TOOLS = "compute-sanitizer", ("memcheck", "racecheck")


@pytest.mark.limit(600)
@pytest.mark.parametrize("small", DRY.variants)
def test_sanitizer(measure: Any, scale: Scale, out: Path, small: str) -> None:
    scale = replace(scale, contexts=(128,), chunk=16)
    measure("build", partial(build, scale, small, 2, out))
    for tool in TOOLS:
        measure(tool, partial(sanitized, engine_path(out, small, 2), tool, scale))


def sanitized(path: Path, tool: str, scale: Scale) -> dict[str, Any]:
    words = ["run", str(path), "--tokens", "2,5,7", "--max-new-tokens", "4"]
    if scale.device == "cpu":
        return {"ok": bool(g4ir_said(words))}
    if shutil.which(SANITIZER) is None:
        raise MissingError(f"no {SANITIZER} here: it comes with the CUDA toolkit")
    front = [SANITIZER, "--tool", tool, "--error-exitcode", "9"]
    return {"ok": bool(g4ir_said([*words, "--set", "cuda_graph=off"], front))}
