"""How long do decode steps and prompts take, and do logits agree with the interpreter?

KV caches have random values.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.engines import (
    CARD,
    DRY,
    ROWS,
    Scale,
    agreement_cell,
    build_all,
    decode_cell,
    open_engine,
    prefill_cell,
)
from g4ir.bench.roof import Meter

__all__ = ["CARD", "DRY"]


@pytest.mark.limit(1500)
@pytest.mark.parametrize("rows", ROWS)
def test_engines_are_built(
    measure: Any, scale: Scale, out: Path, rows: int, pytestconfig: pytest.Config
) -> None:
    todo = [v for v in pytestconfig.option.variants or scale.variants if v not in measure.found]
    if todo:
        build_all(measure, scale, todo, rows, out)


@pytest.mark.parametrize("rows", ROWS)
def test_decode(measure: Any, scale: Scale, out: Path, variant: str, rows: int) -> None:
    engine = open_engine(out, variant, rows)
    rates = Meter(scale.device, torch.bfloat16).measure()
    for c in scale.contexts:
        measure(f"decode c{c}", partial(decode_cell, engine, scale, rows, c, rates))
    measure("agreement", partial(agreement_cell, engine, rows))
    for n in scale.prompts if rows == 1 else ():
        measure(f"prefill {n}", partial(prefill_cell, engine, n, rates))
