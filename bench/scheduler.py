"""The scheduler: its overhead a step, tokens/s by batch size, and the cost of a prompt meanwhile.

    python bench/scheduler.py ENGINE [--active 1,2,4,8] [--context 256] [--new 48] [--late 1024]
                          [--chunk-tokens N] [--rounds 3] [--save]

A decode step under the scheduler, greedy (several may be one call), beside a `Session.decode` and
its argmax on the same batch, in turns, and the gain in tokens/s over one sequence. Then, while
sequences decode, a prompt of --late tokens comes: its chunks add to the time between two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from common import arguments, finish, seconds

import g4ir
from g4ir.backends.cpu.step_loop import STEPS
from g4ir.backends.sampling import SamplingParams
from g4ir.bench.measure import median, stat
from g4ir.check.tokens import random_ids
from g4ir.engine.engine import Engine
from g4ir.engine.requests import PREFILLING, QUEUED, Request, RequestHandle
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.ui.table import aligned

GREEDY = SamplingParams(ignore_eos=True)
#: calls before the clock starts, and tokens that they and the last ones may make of a sequence
WARM = 4
SPARE = (WARM + 2) * STEPS


@dataclass(frozen=True)
class Bench:
    engine: Engine
    scheduler: Scheduler
    context: int
    new: int
    late: int

    def prompt(self, seed: int, tokens: int) -> list[int]:
        return random_ids(self.engine, (tokens,), seed).tolist()

    def chunks(self, tokens: int) -> int:
        """Count the steps that a prompt may take, and one."""
        size = self.scheduler.config.chunk_tokens or self.engine.limits.prefill_chunk
        return -(-tokens // size) + 1

    def submit(self, seed: int, tokens: int, new: int) -> RequestHandle:
        prompt = tuple(self.prompt(seed, tokens))
        return self.scheduler.submit(Request(prompt, new, GREEDY, reuse=False))

    @contextmanager
    def decoding(self, count: int, new: int) -> Iterator[None]:
        """A context in which so many rows decode, past the first steps."""
        for i in range(count):
            self.submit(i, self.context, new + SPARE + count * self.chunks(self.context))
        while self.scheduler.active < count or self.scheduler.waiting:
            self.scheduler.step()
        for _ in range(WARM):
            self.scheduler.step()
        yield
        for answer in self.scheduler.batch.holders:
            answer.handle.cancel()
        while self.scheduler.busy:
            self.scheduler.step()

    def steps(self, active: int) -> list[float]:
        """Return seconds of steps in which so many rows decode."""
        times, made = list[float](), self.scheduler.totals.steps
        with self.decoding(active, self.new):
            while len(times) < self.new:
                before = made[active]
                call = seconds(self.scheduler.step)
                count = made[active] - before
                times += count * [call / count]
            assert self.scheduler.active == active
        return times

    def bare_steps(self, active: int) -> list[float]:
        """Return seconds of steps of a session, each with its argmax on the host."""
        session = self.engine.session(active)
        tokens = [self.prompt(i, self.context) for i in range(active)]
        newest = [session.prefill(torch.tensor(tokens)).argmax(-1)]

        def step() -> None:
            newest[0] = session.decode(newest[0]).argmax(-1)
            newest[0].tolist()

        return [seconds(step) for _ in range(WARM + self.new)][WARM:]

    def beside_a_prompt(self, active: int) -> list[float]:
        """Return seconds of steps, each with a chunk of another prompt."""
        times = list[float]()
        with self.decoding(active, self.new + self.chunks(self.late)):
            handle = self.submit(99, self.late, 1)
            while handle.state in (QUEUED, PREFILLING):
                times.append(seconds(self.scheduler.step))
        return times


def batches(bench: Bench, sizes: list[int], rounds: int) -> str:
    """Return a table of ms a step, of the scheduler and of a bare session, and tokens/s."""
    lines = [["sequences", "scheduler ms", "session ms", "overhead ms", "tokens/s", "gain"]]
    first = 0.0
    for active in sizes:
        ours, bare = list[list[float]](), list[float]()
        for _ in range(rounds):
            bare += bench.bare_steps(active)
            ours.append(bench.steps(active))
        a, b = stat(ours, median).value, median(bare)
        rate = stat([[active / t for t in many] for many in ours], median)
        first = first or rate.value
        ms = (f"{t * 1e3:.3f}" for t in (a, b, a - b))
        gain = f"{rate.value / first:.2f}"
        lines.append([str(active), *ms, f"{rate.value:.2f} ± {rate.spread:.2f}", gain])
    return aligned(lines, indent=0)


def gaps(bench: Bench, active: int) -> str:
    """Return a table of the time between two tokens, alone and beside a prompt, in ms."""
    if not active:
        return "one row: nothing runs beside a prompt"
    alone, beside = bench.steps(active), bench.beside_a_prompt(active)
    lines = {
        "a step": alone,
        f"with a chunk ({len(beside)})": beside,
        "added": [t - median(alone) for t in beside],
        "a chunk alone, the bound": bench.beside_a_prompt(0),
    }
    rows = [[k, f"{median(t) * 1e3:.1f}", f"{max(t) * 1e3:.1f}"] for k, t in lines.items()]
    return aligned([[f"{active} rows", "median ms", "longest ms"], *rows], indent=0)


def main() -> None:
    sizes = {"context": 256, "new": 48, "late": 1024, "chunk_tokens": 0, "rounds": 3}
    args = arguments(__doc__, "engine", active=(1, 2, 4, 8), **sizes)
    with g4ir.load_engine(args.engine) as engine:
        scheduler = Scheduler(engine, SchedulerConfig(chunk_tokens=args.chunk_tokens or None))
        late = min(args.late, engine.limits.max_seq)
        bench = Bench(engine, scheduler, args.context, args.new, late)
        active = [n for n in args.active if n <= scheduler.max_batch]
        table = batches(bench, active, args.rounds)
        beside = gaps(bench, max([n for n in active if n < scheduler.max_batch], default=0))
        chunk = args.chunk_tokens or engine.limits.prefill_chunk
        text = (
            f"{engine.spec.name}, {engine.config.backend} on {engine.device}, {engine.dtype}; "
            f"context {args.context}, {args.new} new tokens\n\n{table}\n"
            f"a prompt of {late} tokens in chunks of {chunk}\n\n{beside}"
        )
        finish(args, "scheduler", text, engine.device)


if __name__ == "__main__":
    main()
