"""How long do decode steps and prompts take, and do logits agree with the interpreter?

Steps run over caches of noise, in each choice of the setting `decode_step`.
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
    take_carried,
)
from g4ir.bench.roof import Meter

__all__ = ["CARD", "DRY"]


@pytest.mark.limit(1500)
@pytest.mark.parametrize("rows", ROWS)
def test_engines_are_built(
    measure: Any,
    scale: Scale,
    out: Path,
    carry: Path | None,
    rows: int,
    step: str,
    pytestconfig: pytest.Config,
) -> None:
    take_carried(carry)
    todo = [v for v in pytestconfig.option.variants or scale.variants if v not in measure.found]
    if todo:
        build_all(measure, scale, todo, rows, step, out)


@pytest.mark.parametrize("rows", ROWS)
def test_decode(measure: Any, scale: Scale, out: Path, variant: str, rows: int, step: str) -> None:
    engine = open_engine(out, variant, rows, step)
    rates = Meter(scale.device, torch.bfloat16).measure()
    for c in scale.contexts:
        measure(f"decode c{c}", partial(decode_cell, engine, scale, rows, c, rates))
    measure("agreement", partial(agreement_cell, engine, rows))
    for n in scale.prompts if rows == 1 and step == "plain" else ():
        measure(f"prefill {n}", partial(prefill_cell, engine, n, rates))
