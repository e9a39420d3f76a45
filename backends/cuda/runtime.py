"""NVIDIA GPU runtime: steps as CUDA graphs, and decode loops that sample on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from g4ir.backends import sampling
from g4ir.backends.base import DeviceChoice, GraphRun, Task, Tensors
from g4ir.backends.inductor.programs import EMBED, Steps
from g4ir.backends.inductor.runtime import ProgramRuntime
from g4ir.backends.kv_cache import Caches
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT

from .graph import Captured, WithFallback, recorded
from .kernels.base import byte_params
from .schedule import any_length, schedule
from .target import find_target
from .token_loop import Choose, Embed, TokenLoop

Tensor = torch.Tensor
#: graphs of a few tokens per sequence, which are captured
STEPS = ("decode", VERIFY, DRAFT)


class CudaRuntime(ProgramRuntime):
    """A loaded engine on a GPU."""

    def __init__(self, task: Task, steps: Steps, cuda_graph: bool = True) -> None:
        decode, rows = task.program.graphs.get("decode"), task.limits.max_batch
        #: captures a step of STEPS as a CUDA graph; None: steps run launch by launch
        self.record = WithFallback(recorded) if cuda_graph else None
        #: whether a decode step costs no more over all slots than over those in use
        #: (schedule.any_length)
        self.any_length = bool(decode and any_length(schedule(decode, find_target(rows))))
        self.device_index = torch.cuda.current_device()
        super().__init__(task, steps)

    def _operands(self, params: Mapping[str, Any]) -> Tensors:
        packed = frozenset[str]().union(*map(byte_params, self.program.graphs.values()))
        return {n: t.view(torch.uint8) if n in packed else t for n, t in params.items()}

    def embed(self, tokens: Tensor, tables: Mapping[str, Any]) -> Tensors | None:
        """Run the embed graph on the device. Return None, so that the host gathers rows, if the
        graph is not compiled or a table is not on the device."""
        plan = self.plans.get((EMBED, True))
        if plan is None or not all(getattr(t, "is_cuda", False) for t in tables.values()):
            return super().embed(tokens, tables)
        feeds = {"tokens": tokens.to(self.device), **self._operands(tables)}
        return self._results(EMBED, self._run_plan(plan, feeds, {}))

    def run(self, step: GraphRun, state: Caches) -> Tensors | None:
        if step.phase in STEPS and self.any_length:
            step = replace(step, context=self.limits.max_seq)
        if self.record and step.phase in STEPS and step.logits and step.watch is None:
            return self._replay(step.phase, step.feeds, state, state.views(step.context))
        return super().run(step, state)

    def _step(self, phase: str, state: Caches) -> Callable[[Tensors], Tensors]:
        """Return a function that runs a graph over the full caches, and returns all outputs."""
        return self._plan_step(phase, state.views(self.limits.max_seq))

    def _plan_step(self, phase: str, views: Tensors) -> Callable[[Tensors], Tensors]:
        plan = self.plans[phase, True]
        return lambda feeds: self._results(phase, self._run_plan(plan, feeds, views))

    def _replay(
        self, phase: str, feeds: dict[str, Tensor], state: Caches, views: Tensors
    ) -> Tensors:
        """Replay a step that `record` captures at the first call for these cache views and tokens
        per sequence."""
        assert self.record
        step, record = self._plan_step(phase, views), self.record
        key = phase, id(views), feeds["positions"].shape[1]
        captured = state.captured.get(Captured, key, lambda: Captured(step, feeds, record))
        return captured.replay(feeds)

    def token_loop(
        self,
        embed: Embed,
        state: Caches,
        batch: int,
        choice: DeviceChoice,
        tables: Mapping[str, Any],
    ) -> TokenLoop | None:
        """Return a loop of steps that sample on the device; None without CUDA graphs, or if a
        step's cost depends on the slots in its views. It is cached with the session's caches."""
        if self.record is None or not self.any_length:
            return None
        record = self.record
        run = self._step("decode", state)

        def step(feeds: dict[str, Tensor]) -> Tensor:
            return run(feeds)["logits"]

        def make() -> TokenLoop:
            choose = self._chooser(choice)
            return TokenLoop(embed, step, choose, batch, self.device, record)

        return state.captured.get(TokenLoop, choice, make)

    def _chooser(self, choice: DeviceChoice) -> Choose:
        """Return the sampling function of a step, which reads nothing from the host."""
        never = torch.tensor(choice.suppress, dtype=torch.int64, device=self.device)

        def choose(logits: Tensor, uniforms: Tensor, draws: Tensor) -> Tensor:
            allowed = logits[:, 0].float()
            if choice.suppress:
                allowed = allowed.index_fill(-1, never, float("-inf"))
            tokens: Tensor | None = None
            for method in choice.methods:
                sampled = sampling.choose(allowed, uniforms, draws, method)
                selected = draws[:, sampling.METHOD] == sampling.METHODS.index(method)
                tokens = sampled if tokens is None else torch.where(selected, sampled, tokens)
            assert tokens is not None
            return tokens

        return choose
