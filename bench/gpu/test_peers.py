"""How fast is transformers, with a static cache and compiled, in turn with the engine?"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.engines import CARD, DRY, Scale, engine_path, g4ir_said

__all__ = ["CARD", "DRY"]


@pytest.mark.limit(600)
@pytest.mark.parametrize("rows", [1, 8])
def test_transformers(measure: Any, scale: Scale, out: Path, variant: str, rows: int) -> None:
    for mode in ("hf-static", "hf-compile") if scale.device == "cuda" else ("hf-static",):
        for c in scale.contexts[:2]:
            words = ["--peer", mode, "--context", str(c), "--batch", str(rows)]
            words += ["--input-len", "1", "--output-len", str(scale.steps + 1), "--rounds", "3"]
            command = ["bench", str(engine_path(out, variant, rows)), *words, "--json", "-"]
            measure(f"{mode} c{c}", partial(peer, command))


def peer(command: list[str]) -> dict[str, Any]:
    """Return the steps of engine and peer, in milliseconds, and how their logits agree."""
    said = json.loads(g4ir_said(command))
    steps = {run["role"]: run["metrics"]["itl_p50"]["value"] for run in said["runs"]}
    return {"step_ms": steps, "ok": said["outputs_agree"], **said["agreement"][0]}
