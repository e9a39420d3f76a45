"""Benches for tests that do not look at speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from g4ir.bench import measure, roof
from g4ir.engine.engine import Engine


def small_bench(patch: pytest.MonkeyPatch) -> None:
    """Small operands for the roof, and one request a round."""
    patch.setattr(roof, "BUFFER_BYTES", 1 << 16)
    patch.setattr(roof, "SIDES", {"cpu": 32})
    patch.setattr(measure, "ROUND_S", 0.0)


class Shifted:
    """A runtime that computes something else."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine.runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, *args: Any) -> Any:
        out = self.inner.run(*args)
        return None if out is None else {"logits": out["logits"].roll(1, -1)}


def shifted(engine: Engine) -> Engine:
    return replace(engine, runtime=Shifted(engine))  # type: ignore[arg-type]
