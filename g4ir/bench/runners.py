"""One way to run a workload: an engine, or the interpreter on the params that an engine holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from g4ir.check.reference import reference_engine
from g4ir.engine.engine import Engine

from .workload import Workload


class BenchRunner(Protocol):
    """Rows that take tokens. `role` names it in a report, `label` says what it is."""

    role: str
    label: str

    def hold(self, tokens: torch.Tensor) -> None:
        """Hold exactly i64[B, n], n possibly 0, and remember that."""

    def rewind(self) -> None:
        """Hold again what was last given to `hold`."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append i64[B, n]; return logits [B, vocab] after the last one, left on the device that
        made them. They are good until the next step."""


class EngineRunner:
    """An engine's session."""

    def __init__(self, engine: Engine, batch: int, role: str = "engine") -> None:
        self.role, self.engine = role, engine
        backend = engine.facts.backend
        self.label = f"{engine.path} ({engine.spec.name}, {backend}, {engine.device})"
        self.session = engine.session(batch)
        self._kept = self.session.snapshot()

    def hold(self, tokens: torch.Tensor) -> None:
        self.session.reset()
        if tokens.shape[1]:
            self.session.prefill(tokens)
        self._kept = self.session.snapshot()

    def rewind(self) -> None:
        self.session.restore(self._kept)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        *_, logits = self.session.prefill_steps(tokens)
        assert logits is not None
        return logits


def prepare(runner: BenchRunner, w: Workload, tokens: torch.Tensor) -> None:
    """Bring every row to its depth."""
    runner.hold(tokens[:, : w.context])


def pieces(w: Workload, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the steps of a request: the prompt, then single tokens."""
    start = w.context + w.input_len
    yield tokens[:, w.context : start]
    for at in range(start, w.fed):
        yield tokens[:, at : at + 1]


def reference_runner(engine: Engine, batch: int) -> EngineRunner:
    """Return the interpreter on the same graphs and params."""
    runner = EngineRunner(reference_engine(engine, held=True), batch, "reference")
    runner.label = "the interpreter on the engine's params"
    return runner
