"""One way to run a workload: an engine, or the interpreter on the params that an engine holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch

from g4ir.check.reference import text_graphs
from g4ir.engine.engine import Engine

from ..backends.base import Runtime, Watch
from ..backends.reference import ReferenceRuntime, Resident
from .workload import Workload


class Runner(Protocol):
    """Rows that take tokens. `role` names it in a report, `label` says what it is."""

    role: str
    label: str

    def hold(self, tokens: torch.Tensor) -> None:
        """Hold exactly i64[B, n], n possibly 0, and remember that."""

    def rewind(self) -> None:
        """Hold again what was last given to `hold`."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append i64[B, n]; logits [B, vocab] after the last one, left on the device that made
        them. They are good until the next step."""


class EngineRunner:
    """An engine's session."""

    def __init__(self, engine: Engine, batch: int, role: str = "engine") -> None:
        self.role, self.engine = role, engine
        m = engine.manifest
        self.label = f"{engine.path} ({engine.spec.name}, {m['backend']}, {engine.device})"
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
        return self.session.append(tokens)


def prepare(runner: Runner, w: Workload, tokens: torch.Tensor) -> None:
    """Bring every row to its depth."""
    runner.hold(tokens[:, : w.context])


def pieces(w: Workload, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """The steps of a request: the prompt, then single tokens."""
    start = w.context + w.input_len
    yield tokens[:, w.context : start]
    for at in range(start, w.fed):
        yield tokens[:, at : at + 1]


# ---- the interpreter --------------------------------------------------------------------------


def reference_runner(engine: Engine, batch: int) -> EngineRunner:
    """The interpreter on the same graphs and params."""
    runner = EngineRunner(replace(engine, runtime=interpreter(engine)), batch, "reference")
    runner.label = "the interpreter on the engine's params"
    return runner


def interpreter(engine: Engine) -> ReferenceRuntime:
    """Runs an engine's text graphs on the params that the engine holds."""
    source = Resident(engine.runtime)
    return ReferenceRuntime(text_graphs(engine.program), engine.limits, engine.device, source)


class Watched:
    """A runtime whose values are shown to `watch` as they are made."""

    def __init__(self, runtime: Runtime, watch: Watch) -> None:
        self.runtime, self.watch, self.source = runtime, watch, runtime.source
        self.new_state, self.resident = runtime.new_state, runtime.resident
        self.encode, self.close = runtime.encode, runtime.close

    def token_loop(self, *_: object) -> None:
        """Values are shown to the host, which chooses too."""

    def run(
        self,
        phase: str,
        feeds: dict[str, torch.Tensor],
        state: object,
        context: int,
        logits: bool,
        watch: Watch | None = None,
    ) -> torch.Tensor | None:
        return self.runtime.run(phase, feeds, state, context, logits, self.watch)
