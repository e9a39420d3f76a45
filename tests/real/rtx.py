"""`make test-real`: trained weights, Gemma 3 270M in Q4_K_M, through NVIDIA's own builder for RTX
GPUs, which needs none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import g4ir
from tests.real.real import MODEL
from tests.trt.test_rtx import builder

pytestmark = builder

#: scheme -> at most: bytes of a plan for each byte of weights in bf16, kernels of a decode step
QUANTS = {None: (1.3, 189), "int8": (0.65, 190), "int4": (0.55, 208)}
#: span of a decode step -> caches that it copies: those of three layers of full attention, where
#: TensorRT's own layer is given a part of them
COPIED = {"1024": "3.00 MiB", "4096": "12.0 MiB", "9216": "0.00 KiB"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file's weights in bf16, to be quantised anew."""
    return g4ir.export(MODEL, tmp_path_factory.mktemp("real") / "hf", dtype="bfloat16")


@pytest.mark.parametrize("quant", QUANTS)
def test_plan(quant: str | None, checkpoint: Path, tmp_path: Path) -> None:
    """Weights are held in their codes; neither kernels nor copies of a step grow."""
    options: dict[str, Any] = {"backend": "trt", "target": "rtx", "dtype": "bfloat16"}
    g4ir.build(None, tmp_path / "engine", checkpoint=checkpoint, quant=quant, **options)
    said = json.loads((tmp_path / "engine" / "manifest.json").read_text())["compiled"]["notes"]
    steps = re.findall(r"decode\.(\d+): (\d+) kernels, (\S+ \w+) of", "\n".join(said))
    share, most = QUANTS[quant]
    assert {span: copied for span, _, copied in steps} == COPIED
    assert max(int(kernels) for _, kernels, _ in steps) <= most
    assert (tmp_path / "engine" / "engine.plan").stat().st_size < share * 536.3e6
