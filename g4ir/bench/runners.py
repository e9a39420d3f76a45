"""Ways to run a workload: an engine, the interpreter on its params, or transformers on its weights.

A transformers model has the same weights, process and threads, and computes last logits only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from g4ir.backends.torch_compile.compile import toolchain
from g4ir.backends.torch_compile.programs import phase_steps
from g4ir.backends.torch_compile.segment import Segment
from g4ir.check.hf import cache_argument, hf_model, rows_kept
from g4ir.check.peers import known_checkpoint, need_transformers
from g4ir.check.reference import reference_engine
from g4ir.engine.build import agreed_spec
from g4ir.engine.engine import Engine
from g4ir.engine.load import open_weights
from g4ir.errors import InputError, check_all
from g4ir.ops.types import torch_dtype
from g4ir.weights.checkpoint import WeightSource
from g4ir.weights.origin import existing_origin
from g4ir.weights.random import RandomCheckpoint

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


def pieces(w: Workload, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the steps of a request: the prompt, then single tokens."""
    start = w.context + w.input_len
    yield tokens[:, w.context : start]
    yield from tokens[:, start : w.fed].split(1, dim=1)


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


def reference_runner(engine: Engine, batch: int) -> EngineRunner:
    """Return the interpreter on the same graphs and params."""
    runner = EngineRunner(reference_engine(engine, held=True), batch, "reference")
    runner.label = "the interpreter on the engine's params"
    return runner


def calls_per_step(engine: Engine) -> dict[str, int]:
    """Count compiled regions and the eager ops between them; nodes if the backend is not torch."""
    if engine.facts.backend != "torch":
        return {"nodes": len(engine.program.graphs["decode"].nodes)}
    steps = phase_steps(engine.program, engine.limits)["decode"]
    regions = sum(isinstance(s, Segment) for s in steps)
    return {"programs": regions, "glue": len(steps) - regions}


def kernels_per_step(step: Callable[[], Any]) -> dict[str, float]:
    """Count the CUDA kernels of a step, and their milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    kernels = [
        e for e in profiler.events() if e.device_type == cuda and not e.name.startswith("Mem")
    ]
    return {"kernels": len(kernels), "device_ms": sum(e.device_time for e in kernels) / 1e3}


# ---- transformers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """How transformers runs."""

    label: str
    static: bool
    compiled: bool


MODES = {
    "hf": Mode("eager, growing cache", static=False, compiled=False),
    "hf-static": Mode("eager, static cache", static=True, compiled=False),
    "hf-compile": Mode("decode compiled, static cache", static=True, compiled=True),
}


class HfRunner:
    """A transformers model in one mode. A static cache has room for `max_len` tokens a row and no
    more, since its cost follows its size; it is emptied in place, since compiled code is bound to
    its tensors."""

    def __init__(self, model: Any, max_len: int, mode: str) -> None:
        import transformers

        self.role, self.mode, self.model, self.max_len = mode, MODES[mode], model, max_len
        self.label = f"transformers {transformers.__version__} {self.mode.label}"
        self.single = model.forward
        if self.mode.compiled:
            # As transformers' generate does: single tokens compiled, with CUDA graphs where there
            # are any, and prompts eager, since every length would be compiled anew.
            self.single = torch.compile(model.forward, mode="reduce-overhead")
        self.argument, self.kept = cache_argument(model.forward), rows_kept(model)
        self.cache = self._new_cache()
        self._held, self._length = torch.empty(0, 0, dtype=torch.int64), 0

    def _new_cache(self) -> Any:
        from transformers import DynamicCache, StaticCache

        if self.mode.static:
            return StaticCache(config=self.model.config, max_cache_len=self.max_len)
        return DynamicCache(config=self.model.config)

    def hold(self, tokens: torch.Tensor) -> None:
        self._held = tokens
        self.rewind()

    def rewind(self) -> None:
        self._length = 0
        if self.mode.static:
            self.cache.reset()
        else:
            self.cache = self._new_cache()
        if self._held.shape[1]:
            # Waits for the device, so that no time of the context counts as that of a request.
            self.step(self._held).argmax(-1).tolist()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        device = self.model.device
        n = tokens.shape[1]
        position = torch.arange(self._length, self._length + n, device=device)
        with torch.no_grad():
            out = (self.single if n == 1 else self.model.forward)(
                input_ids=tokens.to(device),
                use_cache=True,
                position_ids=position[None].expand(len(tokens), -1),
                **{self.argument: self.cache, "logits_to_keep": self.kept},
            )
        self._length += n
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def check_peers(names: Sequence[str]) -> None:
    """Raise InputError for an unknown peer, MissingError for one that is not installed."""
    for name in names:
        if name not in MODES:
            raise InputError(f"--peer {name!r}: expected one of {', '.join(MODES)}")
    if names:
        need_transformers(f"--peer {names[0]}")


def check_compiler(names: Sequence[str], device: str) -> None:
    """Raise MissingError where a peer is to be compiled and cannot be."""
    if any(MODES[name].compiled for name in names):
        check_all(*toolchain(device))


def peer_model(engine: Engine, checkpoint: str | Path | None = None) -> Any:
    """Return the transformers text model on an engine's weights, in its dtype and on its device."""
    seed, dtype = engine.facts.seed, torch_dtype(engine.dtype)
    source: WeightSource
    if seed is not None and checkpoint is None:
        source = RandomCheckpoint(engine.spec, seed, dtype, engine.device)
    else:
        origin = existing_origin(known_checkpoint(engine, checkpoint, "bench --peer"))
        agreed_spec(engine.spec, origin)
        source = open_weights(engine, origin, ())
    try:
        return hf_model(engine.spec, source, dtype, engine.device)
    finally:
        source.close()
