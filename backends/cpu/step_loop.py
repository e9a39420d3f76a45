"""Decode steps on the CPU from token ids to chosen tokens: one step program that embeds the tokens,
decodes, chooses and notes what it chose, so that several steps are one call.

Steps run on a thread of their own, as on a GPU: the host reads the tokens of one call while the
next one runs. Greedy rows are chosen within the program. Other rows are drawn after each step by
the host's own sampler, row by row, so that a text is the same in any company.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch

from g4ir.backends import sampling
from g4ir.backends.base import Tensors
from g4ir.ir.graph import Program
from g4ir.weights.pack import RowTable

from . import pyops
from .arena import ROWS, Arena
from .step_program import Code, NoInstruction, Recorder, StepProgram, bound, record_step

Tensor = torch.Tensor

#: stop tokens of a sequence that the program looks for; of a sequence with more the host does
STOPS = 32
#: seconds after which the host looks at what was chosen, if that is more than one step: requests
#: that join or are cancelled wait for it
LOOK_S = 1e-2
#: most steps between two looks, and steps whose tokens are kept
STEPS, KEPT = 32, 128
#: `pace` of a program that has ended, and steps done after a failure: see kernels/step.c
ENDED, FAILED = -1, 1 << 62


@dataclass(frozen=True, eq=False)
class LoopProgram:
    """A recorded step. All i64: tokens that are fed next, lengths and active rows, [B]; stops
    [B, STOPS]; what the last steps chose, [KEPT, B], -1 for logits that are not finite and -2 for a
    row that rests; and pace [3]: steps wanted, and done. The last instruction, `end`, takes the
    chosen tokens."""

    code: Code
    end: int
    tokens: Tensor
    lengths: Tensor
    active: Tensor
    stops: Tensor
    made: Tensor
    pace: Tensor
    logits: Tensor
    chosen: Tensor
    suppress: Tensor


def record_loop(
    program: Program,
    tables: Tensors,
    weights: Tensors,
    caches: Tensors,
    batch: int,
    suppress: Sequence[int],
) -> LoopProgram:
    """Record embedding, decode step and choice for these caches; NoInstruction where a table or an
    op has none. `suppress`: ids that no row gets."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    tokens, lengths, active, positions = zeros(batch), zeros(batch), zeros(batch), zeros(batch, 1)
    stops, made, pace = zeros(batch, STOPS), zeros(KEPT, batch), zeros(3)
    r, given = Recorder(Arena("cpu")), {"tokens": tokens[:, None]}
    # A row that rests is at position 0, so that its attention has nothing to read.
    r.emit("mul_integers", lengths, active, positions)
    for name, params in (("embed", tables), ("decode", weights)):
        g = program.graphs[name]
        state = {v.name: caches[v.name] for v in g.state}
        g = bound(g, {n: t.shape for n, t in (*given.items(), *state.items())})
        own = {v.name: params[v.name] for v in g.params}
        given = r.record(g, {**given, **own, **state}) | {"positions": positions, "lengths": active}
    logits = given["logits"]
    never = torch.tensor(suppress, dtype=torch.int64)
    chosen, flaws = r.greedy(logits, never)
    end = len(r.instructions)
    r.emit("end_step", chosen, flaws, tokens, lengths, active, stops, made, pace)
    code = r.code(())  # weights and tables too: steps may still run when their engine is dropped
    return LoopProgram(code, end, tokens, lengths, active, stops, made, pace, logits, chosen, never)


class StepThread:
    """The one thread that runs steps of an engine, in the order of `submit`."""

    def __init__(self) -> None:
        self._pool, self._lock = ThreadPoolExecutor(1, "g4ir-steps"), Lock()
        #: calls that it has not begun
        self.waiting = 0

    def submit(self, call: Callable[[], None]) -> Future[None]:
        self._count(1)

        def begin() -> None:
            self._count(-1)
            call()

        return self._pool.submit(begin)

    def _count(self, more: int) -> None:
        with self._lock:
            self.waiting += more

    def close(self) -> None:
        """Wait for all calls."""
        self._pool.shutdown()


class StepLoop:
    """Runs a LoopProgram, with the interface of TokenLoop. Not safe for use from several threads at
    once."""

    #: whether its steps take the whole device, so that a chunk of a prompt should not run meanwhile
    exclusive = True

    def __init__(self, program: LoopProgram, worker: StepThread) -> None:
        self.program, self._worker = program, worker
        self._made, self._pace = program.made.numpy(), program.pace.numpy()
        self._draws = torch.ones(len(program.tokens), 4, dtype=torch.float64)
        self._drawn: tuple[int, ...] = ()
        self._unread: deque[int] = deque()
        #: what the worker was given last, and more than may be unread; steps read, and when
        self._calls: deque[Future[None]] = deque(maxlen=8)
        self._read, self._read_at = 0, 0.0
        #: seconds that a step of the last look took
        self._step_s = LOOK_S

    @property
    def steps_per_call(self) -> int:
        """Number of steps between two looks of the host."""
        return max(1, min(STEPS, int(LOOK_S / self._step_s)))

    @property
    def unread(self) -> int:
        """Number of calls of `advance` whose tokens are still to be read."""
        return len(self._unread)

    def start(
        self,
        tokens: Tensor,
        lengths: Tensor,
        active: Tensor,
        draws: Tensor,
        stops: Sequence[Sequence[int]],
    ) -> None:
        """Set the rows: tokens to feed, tokens held, bool of the active ones, settings of draws,
        and the tokens after which a row rests."""
        wait(self._calls)  # steps of a scheduler that was left
        self._calls.clear()
        self._unread.clear()
        p = self.program
        for own, t in ((p.tokens, tokens), (p.lengths, lengths), (p.active, active)):
            own.copy_(t)
        self._pace[:] = ENDED, 0, 0
        p.stops.fill_(-1)
        for row, ids in enumerate(stops):
            if len(ids) <= STOPS:
                p.stops[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self._draws.copy_(draws)
        greedy = sampling.WAYS.index(sampling.GREEDY)
        drawn = active & (draws[:, sampling.WAY] != greedy)
        self._drawn = tuple(drawn.nonzero()[:, 0].tolist())
        self._read, self._read_at = 0, time.perf_counter()

    def advance(self, count: int, uniforms: Tensor | None) -> None:
        """Have `count` more steps run, after `start`; `uniforms` f64[count, B] are their random
        numbers."""
        p, threads = self.program, torch.get_num_threads()  # the worker's may be another
        if self._drawn:
            assert uniforms is not None
            self._calls.append(self._worker.submit(partial(self._run_drawn, uniforms, threads)))
        # A call that runs goes on, unless another session's waits.
        elif self._worker.waiting or not pyops.want_steps(p.pace, count):
            wanted = self._read + sum(self._unread) + count
            self._calls.append(self._worker.submit(partial(self._run, wanted, threads)))
        self._unread.append(count)

    def read(self) -> list[list[int | None]]:
        """Return for each row the tokens of the oldest unread `advance`, until it rests; None: its
        logits were not finite."""
        steps = range(self._read, self._read + self._unread[0])
        pyops.wait_steps(self.program.pace, steps.stop)
        if self._pace[1] >= FAILED:
            for call in self._calls:
                call.result()
        self._unread.popleft()
        self._read, before, self._read_at = steps.stop, self._read_at, time.perf_counter()
        # Tokens that lay ready, because the host was late, say nothing of a step.
        self._step_s = max((self._read_at - before) / len(steps), self._step_s / 2)
        made = [self._made[step % KEPT].tolist() for step in steps]
        return [[None if t == -1 else t for t in row if t != -2] for row in zip(*made)]

    def _run(self, wanted: int, threads: int) -> None:
        if self._pace[1] < FAILED:  # of a call before
            self._pace[0] = wanted
            self.program.code.run_steps(self.program.pace, threads)

    def _run_drawn(self, uniforms: Tensor, threads: int) -> None:
        p = self.program
        if self._pace[1] >= FAILED:  # steps before
            return
        try:
            for numbers in uniforms:
                if bool(p.active.any()):
                    p.code.run(0, p.end, threads)
                    self._draw(numbers)
                p.code.run(p.end, None, threads)
        except BaseException:
            self._pace[1] = FAILED  # `read` raises the reason
            raise

    def _draw(self, numbers: Tensor) -> None:
        """Choose for rows that are not greedy."""
        p = self.program
        for row in self._drawn:
            one, draws = slice(row, row + 1), self._draws[row : row + 1]
            logits = p.logits[one, 0].float().index_fill(-1, p.suppress, float("-inf"))
            way = sampling.WAYS[int(draws[0, sampling.WAY])]
            p.chosen[one] = sampling.choose(logits, numbers[one], draws, way)


def mapped_tables(program: Program, tables: Mapping[str, Any]) -> Tensors | None:
    """Return the embedding tables as tensors, those that are read by row as mappings of their
    files; None if one has to be made."""
    found = {v.name: tables[v.name] for v in program.graphs["embed"].params}
    found |= {n: t.mapped() for n, t in found.items() if isinstance(t, RowTable)}
    return found if all(isinstance(t, Tensor) for t in found.values()) else None


class Embedding:
    """Embeds a few tokens by a step program, in a tenth to a third of the time of torch's ops."""

    def __init__(self, program: Program, tables: Mapping[str, Any]) -> None:
        self._graph, self._tables = program.graphs["embed"], mapped_tables(program, tables)
        #: ids that every table has
        self._ids = min(int(v.type.shape[0]) for v in self._graph.params)
        #: tokens -> the program; all share the arena, so they run one after the other
        self._steps: dict[int, StepProgram] = {}
        self._arena, self._lock = Arena("cpu"), Lock()

    def __call__(self, tokens: Tensor) -> Tensors | None:
        """Return the outputs of the embed graph for tokens i64[B,S]; None for none, for more than
        a step program has, for ids that a table lacks, and where an op has no instruction."""
        given, count = {"tokens": tokens.reshape(1, -1)}, tokens.numel()
        if not 0 < count <= ROWS or not 0 <= int(tokens.min()) <= int(tokens.max()) < self._ids:
            return None
        with self._lock:
            if self._tables is None:
                return None
            try:
                if count not in self._steps:
                    step = record_step(self._graph, self._tables, {}, given, self._arena)
                    self._steps[count] = step
            except NoInstruction:
                self._tables = None
                return None
            made = self._steps[count].run(given)
        return {name: t.view(*tokens.shape, -1) for name, t in made.items()}
