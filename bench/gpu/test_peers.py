"""How fast is transformers, with a static cache and compiled, in the same process?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.engines import open_engine
from bench.gpu.steps import (
    AGREED,
    AGREED_STEPS,
    CARD,
    DRY,
    Scale,
    agreement,
    random_tokens,
    step_times,
)
from g4ir.bench.runners import EngineRunner, HfRunner, peer_model
from g4ir.bench.stats import percentile
from g4ir.engine.engine import Engine

__all__ = ["CARD", "DRY"]


@pytest.mark.limit(600)
@pytest.mark.parametrize("rows", [1, 8])
def test_transformers(measure: Any, scale: Scale, out: Path, variant: str, rows: int) -> None:
    engine = open_engine(out, variant, rows)
    model = peer_model(engine)
    for mode in ("hf-static", "hf-compile") if scale.device == "cuda" else ("hf-static",):
        for c in scale.contexts[:2]:
            measure(f"{mode} c{c}", partial(peer, engine, model, scale, rows, c, mode))


def peer(
    engine: Engine, model: Any, scale: Scale, batch: int, context: int, mode: str
) -> dict[str, Any]:
    """Time the steps of transformers, and compare its logits with the engine's."""
    torch._dynamo.reset()  # another cache size is another program, not a dynamic one
    room = context + AGREED_STEPS + scale.warmup + scale.steps + 8
    runner = HfRunner(model, room, mode)
    found = agreement(EngineRunner(engine, batch), runner, random_tokens(engine, batch, AGREED))
    for at in range(AGREED + AGREED_STEPS, context, scale.chunk):
        runner.step(random_tokens(engine, batch, min(scale.chunk, context - at)))
    step = partial(runner.step, torch.full((batch, 1), 5))
    for _ in range(scale.warmup):
        step()
    times, host = step_times(step, scale)
    p50 = percentile(times, 50)
    return {"step_ms": p50, "host_ms": host, "tokens_per_second": batch / p50 * 1e3, **found}
