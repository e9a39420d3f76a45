"""CPU runtime: runs every graph as a step program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from g4ir.backends.base import DeviceChoice, Embed, GraphRun, Task, Tensors
from g4ir.backends.inductor.programs import EMBED
from g4ir.backends.inductor.runtime import ProgramRuntime
from g4ir.backends.kv_cache import Caches
from g4ir.errors import EngineError
from g4ir.ir.interpret import run_node
from g4ir.ir.rewrite import bind
from g4ir.model.decoder import CHUNK, TOKENS, VERIFY
from g4ir.model.encoder import ENCODE
from g4ir.weights.lora import ADAPTERS
from g4ir.weights.pack import ParamSource, StoredParams
from g4ir.weights.tensorfile import ALIGNED, on_huge_pages, read_pages

from . import pyops
from .arena import ROWS, Arena
from .step_loop import Embedding, StepLoop, StepThread, mapped_tables, record_loop
from .step_program import CHUNKS, NoInstruction, StepProgram, of_tokens, record_step, step_arena

Tensor = torch.Tensor

log = logging.getLogger(__name__)


class CpuRuntime(ProgramRuntime):
    """A loaded engine on the CPU."""

    def __init__(self, task: Task) -> None:
        #: step programs of the embed graph; created at the first use
        self.embedding: Embedding | None = None
        #: the last tower that ran, and its program
        self._tower: tuple[str, Any] = ("", None)
        #: the thread that runs steps while the host reads the tokens of earlier ones
        self.worker = StepThread()
        pyops.load_kernels(progress=task.progress)
        super().__init__(task, {})

    def _param_names(self, steps: Any) -> Iterable[str]:
        graphs = (g for phase, g in self.program.graphs.items() if phase != EMBED)
        return dict.fromkeys(v.name for g in graphs for v in g.params)

    def _open_params(self, task: Task) -> tuple[ParamSource, Callable[[Tensor], Tensor]]:
        """Return the source of params and a function that places a param in memory: one of the
        engine's files stays memory-mapped if it is aligned, others are copied; with `huge_pages`
        all are copied to huge pages."""
        params = task.params
        source = params.apart() if isinstance(params, StoredParams) else params
        if task.huge_pages:
            return source, on_huge_pages
        return source, partial(_placed, mapped=source is not params)

    def run(self, step: GraphRun, state: Caches) -> Tensors | None:
        if not self.weights:
            raise EngineError("the engine is closed")
        outputs = self._run_program(step, state)
        return outputs if step.logits else None

    def _run_program(self, step: GraphRun, state: Caches) -> Tensors:
        """Run a step program over the full caches, of which it reads only the slots in use.

        A verification step of more than ROWS rows runs in pieces of fewer tokens, so that its
        logits are bit-equal to those of decode steps; not with a watch, or if the batch alone
        exceeds ROWS.
        """
        batch, tokens = step.feeds["positions"].shape
        width = ROWS // batch
        if step.phase == VERIFY and tokens > width > 0 and step.watch is None:
            parts = (_piece(step.feeds, at, width) for at in range(0, tokens, width))
            pieces = [self._run_program(replace(step, feeds=part), state) for part in parts]
            return {name: torch.cat([p[name] for p in pieces], 1) for name in pieces[0]}
        if (step.phase, tokens) == (VERIFY, 1):
            step = replace(step, phase="decode")
        return self._program(step, state).run(step.feeds, step.watch, step.logits)

    def _program(self, step: GraphRun, state: Caches) -> StepProgram:
        """Return the program of a step. That of more than three tokens per sequence is extrapolated
        from the programs of two and of three tokens, unless values are watched."""
        phase, feeds = step.phase, step.feeds
        batch, tokens = feeds["positions"].shape
        batch = len(feeds["ends"]) if phase == ENCODE else batch
        graph, captured = self.program.graphs[phase], state.captured
        views, dim = state.views(self.limits.max_seq), str(TOKENS.get(phase, CHUNK))
        # 0: all decode and verification steps of at most ROWS sequences share one arena
        max_tokens = 0 if phase not in CHUNKS and batch <= ROWS else self._max_tokens(phase, tokens)

        def memory() -> Arena:
            return step_arena(graph, {"B": batch}, dim, max_tokens) if max_tokens else Arena("cpu")

        arena = captured.get(Arena, (phase, max_tokens) if max_tokens else "", memory)

        def recorded(count: int) -> StepProgram:
            def record() -> StepProgram:
                run = self.group.run_node if self.group else run_node
                g = bind(graph, **{dim: count})
                return record_step(g, self.weights, views, feeds, arena, run)

            return captured.get(StepProgram, (phase, max_tokens, count), record)

        if tokens <= 3 or step.watch:
            return recorded(tokens)

        def follows() -> StepProgram:
            return of_tokens(recorded(2), recorded(3), tokens)

        # not cached for chunks (each prompt has another length), nor for more than ROWS sequences
        return follows() if max_tokens else captured.get(StepProgram, (phase, tokens), follows)

    def encode(self, tower: str, feeds: Tensors) -> Tensor:
        name, program = self._tower
        with torch.no_grad():
            if name != tower:
                graph = self.program.graphs[tower]
                program = record_step(graph, self.weights, {}, feeds, Arena("cpu"))
                self._tower = tower, program
            return program.run(feeds)["soft"]

    def _max_tokens(self, phase: str, tokens: int) -> int:
        """Return the tokens per sequence for which a step's arena is sized: in prefill and encoder
        graphs (CHUNKS) those of the longest chunk, at least the 3 of the recorded programs
        (`_program`); in others the step's."""
        return max(tokens, self.limits.prefill_chunk, 3) if phase in CHUNKS else tokens

    def embed(self, tokens: Tensor, tables: Mapping[str, Any]) -> Tensors | None:
        if not self.weights:
            return None
        embedding = self.embedding = self.embedding or Embedding(self.program, tables)
        return embedding(tokens)

    def token_loop(
        self,
        embed: Embed,
        state: Caches,
        batch: int,
        choice: DeviceChoice,
        tables: Mapping[str, Any],
    ) -> StepLoop | None:
        """Return a loop of steps that also embed and sample, on the engine's step thread; None if
        the host has to do that. It is cached with the session's caches."""
        make: Any = partial(self._step_loop, state, batch, choice.suppress, tables)
        return state.captured.get(StepLoop, choice.suppress, make)

    def _step_loop(
        self, state: Caches, batch: int, suppress: tuple[int, ...], tables: Mapping[str, Any]
    ) -> StepLoop | None:
        """Return a loop of step programs; None with several ranks, or if a table cannot be
        memory-mapped or an op has no instruction."""
        mapped = mapped_tables(self.program, tables)
        if mapped is None or self.group:
            return None
        views = state.views(self.limits.max_seq)
        try:
            feeds = {ADAPTERS: state.adapters}
            program = record_loop(self.program, mapped, self.weights, views, feeds, suppress)
        except NoInstruction as e:
            log.info("the host embeds and samples tokens: no instruction for %s", e)
            return None
        return StepLoop(program, self.worker)

    def close(self) -> None:
        self.worker.close()
        self.embedding, self._tower = None, ("", None)
        super().close()


def _piece(feeds: Tensors, at: int, width: int) -> dict[str, Tensor]:
    """Return the inputs of a step on tokens `at` to `at + width` (exclusive) of each sequence."""
    piece = {name: t[:, at : at + width] if t.dim() > 1 else t for name, t in feeds.items()}
    return piece | {"lengths": (feeds["lengths"] - at).clamp(0, width)}


def _placed(t: Tensor, mapped: bool) -> Tensor:
    """Return the param itself, with its pages read, if it is `mapped` and aligned; else a copy."""
    if mapped and t.is_contiguous() and t.data_ptr() % ALIGNED == 0:
        read_pages(t)
        return t
    return t.clone().contiguous()
