"""Running compiled segments: bind operands once, then call one program after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g4ir.backends import sampling
from g4ir.errors import EngineError
from g4ir.ir.interpret import run_node
from g4ir.ir.rewrite import bind
from g4ir.model.decoder import TOKENS, VERIFY
from g4ir.model.draft import DRAFT
from g4ir.parallel.group import Group
from g4ir.ui.paths import unpacking
from g4ir.weights.pack import StoredParams
from g4ir.weights.tensorfile import ALIGNED, on_huge_pages, read_pages

from ..base import DeviceChoice, Task, Tensors, Watch
from ..kv_cache import Caches
from . import pyops
from .arena import ROWS, Arena
from .cuda_graph import (
    CHUNK,
    CHUNKS,
    CaptureArena,
    Captured,
    LazyCapture,
    WithFallback,
    recorded,
)
from .programs import KERNELS_FILE
from .schedule import any_length, schedule
from .segment import Glue, Segment, Step, state_steps
from .step_loop import Embedding, StepLoop, StepThread, mapped_tables, record_loop
from .step_program import NoInstruction, StepProgram, of_tokens, record_step
from .target import find_target
from .token_loop import Choose, Embed, RoundLoop, TokenLoop

Tensor = torch.Tensor

log = logging.getLogger(__name__)

#: stands for an operand that is bound when its step runs
NOTHING = torch.empty(0)
Call = Callable[[list[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class BoundStep:
    """A step with its params in place: `slots` says which operand comes from which value, `last`
    which values no later step reads. All sessions share it."""

    call: Call
    operands: tuple[Tensor, ...]
    slots: tuple[tuple[int, str], ...]
    outputs: tuple[str, ...]
    last: tuple[str, ...] = ()

    def run(self, env: dict[str, Tensor], watch: Watch | None = None) -> None:
        operands = [*self.operands]  # of this run alone: sessions of other threads run it too
        for i, name in self.slots:
            operands[i] = env[name]
        for name, t in zip(self.outputs, self.call(operands)):
            env[name] = t
            if watch:
                watch(name, t)
        for name in self.last:
            del env[name]


class TorchRuntime:
    """A loaded engine of the torch backend."""

    #: makes the place where a session's chunks are recorded
    place = CaptureArena

    def __init__(
        self,
        task: Task,
        steps: Mapping[str, Sequence[Step]],
        files: Mapping[str, Sequence[str | None]],
        cuda_graph: bool = True,
    ) -> None:
        self.program, self.limits, self.device = task.program, task.limits, task.device
        self.source, self.group = task.params, task.group
        program, limits, device, group = self.program, self.limits, self.device, self.group
        folder = task.folder / "programs"
        records, target = device == "cuda" and cuda_graph, find_target(device, limits.max_batch)
        #: makes of a decode step what replays it; None: steps run launch by launch
        self.record = WithFallback(recorded) if records else None
        self.any_length = any_length(schedule(program.graphs["decode"], target))
        #: the same for full chunks of prompts, where a recorded one serves every length
        records &= any_length(schedule(program.graphs["prefill"], target))
        chunks = WithFallback(lambda work, place: place.record(work), CHUNKS)
        self.record_chunk = chunks if records else None
        names = dict.fromkeys(f for many in files.values() for f in many if f)
        if device == "cpu":  # programs call them
            _load_kernels(folder / KERNELS_FILE)
        with unpacking() as self.unpacked:
            calls = {name: _load_program(folder / name, device) for name in names}
        if device == "cpu":  # on a GPU kernels are read when they are first used
            self.unpacked.close()
        #: op that chooses -> its program, on a GPU
        self.choosers = {
            op: calls[files[op][0] or ""] for op in ("greedy", "candidates") if op in files
        }
        #: what embeds a few tokens, once it was asked for
        self.embedding: Embedding | None = None
        #: the thread that runs steps while the host reads the tokens of others
        self.worker = StepThread()
        #: phases that run as programs recorded for a session
        self.recorded_phases = program.graphs.keys() - steps.keys() - {"embed"}
        self.weights = self._load_params(steps, task)
        self.plans: dict[tuple[str, bool], list[BoundStep]] = {}
        for phase, many in steps.items():
            alias = {v.name: n for n, v in program.graphs[phase].next.items()}
            bound = {
                id(s): _bind(s, calls.get(f or ""), self.weights, alias, group)
                for s, f in zip(many, files[phase], strict=True)
            }
            feeds = {v.name for v in program.graphs[phase].inputs}
            keep = {v.name for v in program.graphs[phase].outputs} | feeds
            for logits, chosen in ((True, many), (False, state_steps(many))):
                plan = [bound[id(s)] for s in chosen]
                self.plans[phase, logits] = _freeing(plan, keep)

    def _load_params(self, steps: Mapping[str, Sequence[Step]], task: Task) -> dict[str, Tensor]:
        """Load each param once, tensor by tensor; on a CPU the engine's own files are mapped."""
        params = task.params
        names = dict.fromkeys(
            name
            for many in steps.values()
            for s in many
            if isinstance(s, Segment)
            for name in s.params
        )
        graphs = (self.program.graphs[phase] for phase in self.recorded_phases)
        names |= {v.name: None for g in graphs for v in g.params}
        loaded: dict[str, Tensor] = {}
        on_cpu = self.device == "cpu"
        source = params.apart() if isinstance(params, StoredParams) and on_cpu else params
        mapped = source is not params
        for i, name in enumerate(names):
            found = source.tensor(name)
            huge = task.huge_pages
            loaded[name] = on_huge_pages(found) if huge else _placed(found, self.device, mapped)
            if not mapped:
                source.release(name)
            task.progress(f"weights {i + 1}/{len(names)}")
        return loaded

    def resident(self, param: str) -> Tensor | None:
        return self.weights.get(param)

    def new_state(self, batch: int) -> Caches:
        caches = Caches(self.program, batch, self.limits.max_seq, self.device)
        check_aligned(caches.tensors)
        return caches

    def run(
        self,
        phase: str,
        feeds: dict[str, Tensor],
        state: Caches,
        context: int,
        logits: bool,
        watch: Watch | None = None,
    ) -> Tensors | None:
        if phase in self.recorded_phases:
            made = self._run_program(phase, feeds, state, watch)
            return made if logits else None
        if watch is None and self._is_full(phase, feeds):
            return self._chunk(feeds, state, logits)
        if phase == "decode" and self.any_length:
            context = self.limits.max_seq
        views = state.views(context)
        if self.record and phase == "decode" and logits and watch is None:
            return self._replay(feeds, state, views)
        env = self._run_plan(self.plans[phase, logits], feeds, views, watch)
        return self._results(phase, env) if logits else None

    def _run_program(
        self, phase: str, feeds: Tensors, state: Caches, watch: Watch | None
    ) -> Tensors:
        """Run a step program over all slots of the session's caches: it reads those in use. More
        rows than a step has are pieces of fewer tokens, one after the other, but for a watch."""
        if not self.weights:
            raise EngineError("the engine is closed")
        batch, tokens = feeds["positions"].shape
        width = ROWS // batch
        if tokens > width and watch is None:
            pieces = [
                self._run_program(phase, _piece(feeds, at, width), state, watch)
                for at in range(0, tokens, width)
            ]
            return {name: torch.cat([p[name] for p in pieces], 1) for name in pieces[0]}
        phase = phase if tokens > 1 else "decode"
        views, captured = state.views(self.limits.max_seq), state.captured
        arena = captured.get(Arena, "", lambda: Arena("cpu"))

        def record(count: int) -> StepProgram:
            g = bind(self.program.graphs[phase], **{str(TOKENS[VERIFY]): count})
            return record_step(g, self.weights, views, feeds, arena)

        def recorded(count: int) -> StepProgram:
            return captured.get(StepProgram, (phase, count), lambda: record(count))

        if tokens <= 3 or watch:
            return recorded(tokens).run(feeds, watch)
        key = ("linear", tokens)
        step = captured.get(StepProgram, key, lambda: of_tokens(recorded(2), recorded(3), tokens))
        return step.run(feeds)

    def _results(self, phase: str, env: Tensors) -> Tensors:
        return {v.name: env[v.name] for v in self.program.graphs[phase].outputs}

    def embed(self, tokens: Tensor, tables: Mapping[str, Any]) -> Tensors | None:
        if "decode" not in self.recorded_phases or not self.weights:
            return None
        embedding = self.embedding = self.embedding or Embedding(self.program, tables)
        return embedding(tokens)

    def encode(self, tower: str, feeds: Tensors) -> Tensor:
        return self._run_plan(self.plans[tower, True], feeds, {})["soft"]

    def _run_plan(
        self, plan: Sequence[BoundStep], feeds: Tensors, views: Tensors, watch: Watch | None = None
    ) -> dict[str, Tensor]:
        env = {**feeds, **views}
        for step in plan:
            step.run(env, watch)
        return env

    def _step(self, phase: str, state: Caches) -> Callable[[Tensors], Tensors]:
        """Return a step that makes all results of a graph, over all slots of these caches."""
        if phase in self.recorded_phases:
            return lambda feeds: self._run_program(phase, feeds, state, None)
        return self._plan_step(phase, state.views(self.limits.max_seq))

    def _plan_step(self, phase: str, views: Tensors) -> Callable[[Tensors], Tensors]:
        plan = self.plans[phase, True]
        return lambda feeds: self._results(phase, self._run_plan(plan, feeds, views))

    def _is_full(self, phase: str, feeds: Tensors) -> bool:
        """Whether it is a chunk of a prompt that may be recorded: of as many tokens as one has."""
        full = phase == "prefill" and feeds["positions"].shape[1] == self.limits.prefill_chunk
        return full and self.record_chunk is not None

    def _chunk(self, feeds: dict[str, Tensor], state: Caches, logits: bool) -> Tensors | None:
        """Run a full chunk, recorded for the session's caches, with logits and without apart."""
        assert self.record_chunk
        record, captured = self.record_chunk, state.captured
        views, plan = state.views(self.limits.max_seq), self.plans["prefill", logits]

        def step(given: Tensors) -> Tensors | None:
            env = self._run_plan(plan, given, views)
            return self._results("prefill", env) if logits else None

        def make() -> Captured[Tensors | None]:
            arena = captured.get(CaptureArena, CHUNK, lambda: self.place(CHUNK))
            return Captured(step, feeds, lambda work: LazyCapture(work, arena, record))

        return captured.get(Captured, (CHUNK, logits), make).replay(feeds)

    def _replay(self, feeds: dict[str, Tensor], state: Caches, views: Tensors) -> Tensors:
        """Replay a step in one launch; the graph is of the session's caches and so many slots."""
        assert self.record
        step, record = self._plan_step("decode", views), self.record
        captured = state.captured.get(Captured, id(views), lambda: Captured(step, feeds, record))
        return captured.replay(feeds)

    def token_loop(
        self,
        embed: Embed,
        state: Caches,
        batch: int,
        choice: DeviceChoice,
        tables: Mapping[str, Any],
    ) -> TokenLoop | StepLoop | None:
        """Return steps that choose their own tokens; None if a step depends on how much of the
        caches is in use. It belongs to the session's caches."""
        if self.record is None and "decode" in self.recorded_phases:
            make_loop: Any = partial(self._step_loop, state, batch, choice.suppress, tables)
            return state.captured.get(StepLoop, choice.suppress, make_loop)
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

    def _step_loop(
        self, state: Caches, batch: int, suppress: tuple[int, ...], tables: Mapping[str, Any]
    ) -> StepLoop | None:
        """Return a loop of step programs; None where the host has to embed tokens."""
        mapped = mapped_tables(self.program, tables)
        if mapped is None or self.group:
            return None
        views = state.views(self.limits.max_seq)
        try:
            made = record_loop(self.program, mapped, self.weights, views, batch, suppress)
        except NoInstruction as e:
            log.info("tokens are embedded and chosen by the host: %s", e)
            return None
        return StepLoop(made, self.worker)

    def round_loop(
        self, embed: Embed, state: Caches, batch: int, choice: DeviceChoice, last: bool
    ) -> RoundLoop | None:
        """Return verification steps that draft and choose by themselves; None as `token_loop`, or
        without a draft model. It belongs to the session's caches."""
        if self.record is None or not self.any_length or DRAFT not in self.program.graphs:
            return None
        record = self.record

        def make() -> RoundLoop:
            return RoundLoop(
                embed,
                self._step(DRAFT, state),
                self._step(VERIFY, state),
                self._chooser(choice),
                last,
                self.device,
                record,
            )

        return state.captured.get(RoundLoop, choice, make)

    def _chooser(self, choice: DeviceChoice) -> Choose:
        """Return how a step chooses tokens; a recorded step takes nothing from the host."""
        never = torch.tensor(choice.suppress, dtype=torch.int64, device=self.device)
        ways = {way: self._way(way) for way in choice.ways}

        def choose(logits: Tensor, uniforms: Tensor, draws: Tensor) -> Tensor:
            allowed = logits.index_fill(-1, never, float("-inf")) if choice.suppress else logits
            tokens: Tensor | None = None
            for way, find in ways.items():
                found = find(allowed, uniforms, draws)
                mine = draws[:, sampling.WAY] == sampling.WAYS.index(way)
                tokens = found if tokens is None else torch.where(mine, found, tokens)
            assert tokens is not None
            return tokens

        return choose

    def _way(self, way: str) -> Choose:
        """Return one of the sampler's WAYS; largest logits are found by compiled ops."""
        if way == sampling.GREEDY:
            greedy = self.choosers["greedy"]
            return lambda logits, uniforms, draws: greedy([logits])[0]
        if way == sampling.TOP:
            candidates = self.choosers["candidates"]
            return lambda logits, *rest: sampling.draw(*candidates([logits]), *rest)
        return lambda logits, uniforms, draws: sampling.choose(
            logits[:, 0].float(), uniforms, draws, way
        )

    def close(self) -> None:
        self.worker.close()
        self.plans.clear()
        self.weights.clear()
        self.embedding = None
        self.source.close()
        self.unpacked.close()


def check_aligned(caches: Tensors) -> None:
    """Raise EngineError for a cache not aligned to 16 bytes: a program would write to a copy."""
    for name, t in caches.items():
        if t.data_ptr() % 16:
            raise EngineError(
                f"cache {name} lies at {t.data_ptr():#x}, which is no multiple of 16: a program "
                f"would write to a copy; use an allocator that aligns its memory"
            )


def _piece(feeds: Tensors, at: int, width: int) -> dict[str, Tensor]:
    """Return the feeds of `width` tokens, from `at` on, of each row."""
    piece = {name: t[:, at : at + width] for name, t in feeds.items() if name != "lengths"}
    return piece | {"lengths": (feeds["lengths"] - at).clamp(0, width)}


def _placed(t: Tensor, device: str, mapped: bool) -> Tensor:
    """Return a param on the device: the mapped file itself if it may be, else a copy."""
    if mapped and t.is_contiguous() and t.data_ptr() % ALIGNED == 0:
        read_pages(t)
        return t
    return t.to(device, copy=True).contiguous()


def _load_program(path: Path, device: str) -> Call:
    """Load a program, ready to be called. EngineError where the system does not load it.

    It unpacks itself; on a GPU it reads its kernels from there when they are first used.
    """
    # It warns about every package that it did not write in this very process.
    logging.getLogger("torch._inductor.package.package").setLevel(logging.ERROR)
    index = torch.cuda.current_device() if device == "cuda" else -1
    try:
        # Not `torch._inductor.aoti_load_package`: it probes the instruction set with a compiler.
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
    except RuntimeError as e:
        raise EngineError(f"{path} cannot be loaded: {_reason(e)}") from e
    call: Call = loader.run
    return call


def _load_kernels(path: Path) -> None:
    try:
        pyops.load_kernels(path)
    except (OSError, ValueError, AttributeError) as e:  # no library, or one without our kernels
        raise EngineError(f"{path} cannot be loaded: {_reason(e)}") from e


def _reason(error: Exception) -> str:
    """Return the system's own words, and what they mean where nothing may be run from a folder."""
    text = str(error).splitlines()[0][:300]
    if "failed to map segment" in text:
        return f"{text}: that folder is mounted noexec; give XDG_CACHE_HOME another one"
    if "extract" in text or "temporary" in text:
        return f"{text}: make room there, or give XDG_CACHE_HOME another folder"
    return text


def _freeing(plan: Sequence[BoundStep], keep: set[str]) -> list[BoundStep]:
    """Return each step with the values that die there; caches and `keep` live on."""
    made = {name for b in plan for name in b.outputs} - keep
    out: list[BoundStep] = []
    for b in reversed(plan):
        touched = {*(name for _, name in b.slots), *b.outputs} & made
        out.append(replace(b, last=tuple(sorted(touched))))
        made -= touched
    return out[::-1]


def _bind(
    s: Step,
    call: Call | None,
    weights: Mapping[str, Tensor],
    alias: Mapping[str, str],
    group: Group | None = None,
) -> BoundStep:
    """Bind a step; `alias` maps a written cache's value to the cache, written in place."""
    names = s.inputs
    if isinstance(s, Glue):
        call = partial(group.run_node if group else run_node, s.node)
    else:
        names += s.params + s.state
    assert call
    operands = tuple(weights.get(n, NOTHING) for n in names)
    slots = tuple((i, alias.get(n, n)) for i, n in enumerate(names) if n not in weights)
    return BoundStep(call, operands, slots, s.outputs)
