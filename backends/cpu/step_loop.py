"""Decode loop on the CPU: one step program embeds the tokens, decodes, samples and records the
sampled tokens, so that several steps are one call.

Steps run on a separate thread, as on a GPU: the host reads the tokens of one call while the next
one runs. Greedy sequences are sampled within the program; others by the functions of sampling.py
after each step, one by one, so that sampling does not depend on the rest of the batch.
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

#: max stop tokens of a sequence that the program checks; with more of them the host checks
STOPS = 32
#: target seconds between two reads of the host (at least one step): new and cancelled requests
#: wait for the next read
LOOK_S = 1e-2
#: STEPS: max steps between two reads. HISTORY: steps whose tokens the program stores
STEPS, HISTORY = 32, 128
#: ENDED: pace[0] of a program that has ended. FAILED: pace[1] after a failure (kernels/step.c)
ENDED, FAILED = -1, 1 << 62


@dataclass(frozen=True, eq=False)
class LoopProgram:
    """A recorded step, and the tensors that the host reads or writes: next input tokens, lengths
    and active sequences, i64 [B]; stops i64 [B, STOPS]; history i64 [HISTORY, B]: tokens of the
    last steps, -1 for logits that are not finite and -2 for an inactive sequence; pace i64 [3]:
    steps requested, steps done, the step count that a sleeping reader waits for (0: none). For
    sequences that are not greedy, the host samples from `logits` [B, 1, vocab] into `chosen`
    i64 [B] before it runs the last instruction, at index `end`. Ids in `suppress` are never
    sampled. While `exact` i64[1] is 0, only logits are exact that may be the maximum."""

    code: Code
    end: int
    tokens: Tensor
    lengths: Tensor
    active: Tensor
    stops: Tensor
    history: Tensor
    pace: Tensor
    logits: Tensor
    chosen: Tensor
    suppress: Tensor
    exact: Tensor


def record_loop(
    program: Program,
    tables: Tensors,
    weights: Tensors,
    caches: Tensors,
    fixed: Tensors,
    suppress: Sequence[int],
) -> LoopProgram:
    """Record embedding, decode step and greedy sampling for these caches; NoInstruction if an op or
    a table has no instruction. fixed: i64 [B] inputs of the decode graph that are read in place.
    suppress: ids that are never sampled."""
    (batch,) = {len(t) for t in fixed.values()}

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    tokens, lengths, active, positions = zeros(batch), zeros(batch), zeros(batch), zeros(batch, 1)
    stops, history, pace = zeros(batch, STOPS), zeros(HISTORY, batch), zeros(3)
    r, feeds = Recorder(Arena("cpu")), {"tokens": tokens[:, None]}
    # An inactive sequence is at position 0, so that its attention reads nothing.
    r.emit("mul_integers", lengths, active, positions)
    for name, tensors in (("embed", tables), ("decode", weights)):
        g = program.graphs[name]
        state = {v.name: caches[v.name] for v in g.state}
        g = bound(g, {n: t.shape for n, t in (*feeds.items(), *state.items())})
        params = {v.name: tensors[v.name] for v in g.params}
        outputs = r.record(g, {**feeds, **params, **state})
        feeds = outputs | {"positions": positions, "lengths": active, **fixed}
    logits = feeds["logits"]
    never, exact = torch.tensor(suppress, dtype=torch.int64), zeros(1)
    r.screen_logits(never, exact)
    chosen, flaws = r.greedy(logits, never)
    if r.torch_ops:
        raise NoInstruction("an op that torch runs")
    end = len(r.instructions)
    r.emit("end_step", chosen, flaws, tokens, lengths, active, stops, history, pace)
    code = r.code(())  # owns weights and tables: steps may outlive their engine
    rows = tokens, lengths, active, stops
    return LoopProgram(code, end, *rows, history, pace, logits, chosen, never, exact)


class StepThread:
    """The thread that runs an engine's steps, in the order of `submit`."""

    def __init__(self) -> None:
        self._pool, self._lock = ThreadPoolExecutor(1, "g4ir-steps"), Lock()
        #: calls not started yet
        self.waiting = 0

    def submit(self, call: Callable[[], None]) -> Future[None]:
        self._count(1)

        def start() -> None:
            self._count(-1)
            call()

        return self._pool.submit(start)

    def _count(self, more: int) -> None:
        with self._lock:
            self.waiting += more

    def close(self) -> None:
        """Wait for all calls and end the thread."""
        self._pool.shutdown()


class StepLoop:
    """Runs a LoopProgram, with the interface of TokenLoop (cuda/token_loop.py). Not safe for use
    from several threads at once."""

    #: whether steps use the whole device, so that no prefill chunk should run at the same time
    exclusive = True

    def __init__(self, program: LoopProgram, worker: StepThread) -> None:
        self.program, self._worker = program, worker
        self._history, self._pace = program.history.numpy(), program.pace.numpy()
        self._draws = torch.ones(len(program.tokens), 4, dtype=torch.float64)
        self._drawn: tuple[int, ...] = ()
        self._unread: deque[int] = deque()
        #: the worker's latest calls, more than may be unread
        self._calls: deque[Future[None]] = deque(maxlen=8)
        #: steps read since `start`, and the time of the last read
        self._read, self._read_at = 0, 0.0
        #: estimate of the seconds per step, updated by each read
        self._step_s = LOOK_S

    @property
    def steps_per_call(self) -> int:
        """Number of steps of one `advance` for which the host's reads are LOOK_S apart, at most
        STEPS."""
        return max(1, min(STEPS, int(LOOK_S / self._step_s)))

    @property
    def unread(self) -> int:
        """Number of `advance` calls whose tokens are not read yet."""
        return len(self._unread)

    def start(
        self,
        tokens: Tensor,
        lengths: Tensor,
        active: Tensor,
        draws: Tensor,
        stops: Sequence[Sequence[int]],
    ) -> None:
        """Set the batch: input tokens, lengths and active sequences (bool), [B]; sampling settings
        f64[B, 4]; and stop tokens of each sequence, ignored if they are more than STOPS."""
        wait(self._calls)  # steps that an earlier scheduler started
        self._calls.clear()
        self._unread.clear()
        p = self.program
        for target, t in ((p.tokens, tokens), (p.lengths, lengths), (p.active, active)):
            target.copy_(t)
        self._pace[:] = ENDED, 0, 0
        p.stops.fill_(-1)
        for row, ids in enumerate(stops):
            if len(ids) <= STOPS:
                p.stops[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self._draws.copy_(draws)
        greedy = sampling.METHODS.index(sampling.GREEDY)
        drawn = active & (draws[:, sampling.METHOD] != greedy)
        self._drawn = tuple(drawn.nonzero()[:, 0].tolist())
        p.exact.fill_(bool(self._drawn))
        self._read, self._read_at = 0, time.perf_counter()

    def advance(self, count: int, uniforms: Tensor | None) -> None:
        """Start `count` more steps, after `start`; `uniforms` f64[count, B]: the steps' random
        numbers, None if all sequences are greedy."""
        p, threads = self.program, torch.get_num_threads()  # torch's number is per thread
        if self._drawn:
            assert uniforms is not None
            self._calls.append(self._worker.submit(partial(self._run_drawn, uniforms, threads)))
        # A running call takes more steps, unless another session waits for the thread.
        elif self._worker.waiting or not pyops.request_steps(p.pace, count):
            total = self._read + sum(self._unread) + count
            self._calls.append(self._worker.submit(partial(self._run, total, threads)))
        self._unread.append(count)

    def read(self) -> list[list[int | None]]:
        """Wait for the oldest unread `advance`; return each sequence's tokens, up to a stop token
        that the program checks; None: logits that are not finite, which end a sequence too. Raises
        the error of a step that failed."""
        steps = range(self._read, self._read + self._unread[0])
        pyops.wait_steps(self.program.pace, steps.stop)
        if self._pace[1] >= FAILED:
            for call in self._calls:
                call.result()
        self._unread.popleft()
        self._read, before, self._read_at = steps.stop, self._read_at, time.perf_counter()
        # If the host was late the tokens were ready, and the time says nothing about a step.
        self._step_s = max((self._read_at - before) / len(steps), self._step_s / 2)
        tokens = [self._history[step % HISTORY].tolist() for step in steps]
        return [[None if t == -1 else t for t in row if t != -2] for row in zip(*tokens)]

    def _run(self, total: int, threads: int) -> None:
        if self._pace[1] < FAILED:  # no earlier call failed
            self._pace[0] = total
            self.program.code.run_steps(self.program.pace, threads)

    def _run_drawn(self, uniforms: Tensor, threads: int) -> None:
        p = self.program
        if self._pace[1] >= FAILED:  # an earlier step failed
            return
        try:
            for step_uniforms in uniforms:
                if bool(p.active.any()):
                    p.code.run((0, 0), (p.end, 0), threads)
                    self._draw(step_uniforms)
                p.code.run((p.end, 0), None, threads)
        except BaseException:
            self._pace[1] = FAILED  # `read` raises the reason
            raise

    def _draw(self, uniforms: Tensor) -> None:
        """Sample the sequences that are not greedy from the program's logits."""
        p = self.program
        for row in self._drawn:
            one, draws = slice(row, row + 1), self._draws[row : row + 1]
            logits = p.logits[one, 0].float().index_fill(-1, p.suppress, float("-inf"))
            method = sampling.METHODS[int(draws[0, sampling.METHOD])]
            p.chosen[one] = sampling.choose(logits, uniforms[one], draws, method)


def mapped_tables(program: Program, tables: Mapping[str, Any]) -> Tensors | None:
    """Return the embed graph's params as tensors: those in `tables`, or memory-mapped ones in place
    of tables that are read row by row; None if one cannot be mapped."""
    tensors = {v.name: tables[v.name] for v in program.graphs["embed"].params}
    tensors |= {n: t.mapped() for n, t in tensors.items() if isinstance(t, RowTable)}
    return tensors if all(isinstance(t, Tensor) for t in tensors.values()) else None


class Embedding:
    """Embeds up to ROWS tokens by a step program: 3 to 10 times as fast as torch's ops."""

    def __init__(self, program: Program, tables: Mapping[str, Any]) -> None:
        self._graph, self._tables = program.graphs["embed"], mapped_tables(program, tables)
        #: vocabulary size that every table covers
        self._ids = min(int(v.type.shape[0]) for v in self._graph.params)
        #: token count -> program; all share the arena, so they run one after the other
        self._steps: dict[int, StepProgram] = {}
        self._arena, self._lock = Arena("cpu"), Lock()

    def __call__(self, tokens: Tensor) -> Tensors | None:
        """Return the outputs of the embed graph [B,S,width] for tokens i64[B,S]; None for 0 or more
        than ROWS tokens, ids outside a table, or a table that cannot be memory-mapped."""
        feeds, count = {"tokens": tokens.reshape(1, -1)}, tokens.numel()
        if not 0 < count <= ROWS or not 0 <= int(tokens.min()) <= int(tokens.max()) < self._ids:
            return None
        with self._lock:
            if self._tables is None:
                return None
            if count not in self._steps:
                step = record_step(self._graph, self._tables, {}, feeds, self._arena)
                self._steps[count] = step
            outputs = self._steps[count].run(feeds)
        return {name: t.view(*tokens.shape, -1) for name, t in outputs.items()}
