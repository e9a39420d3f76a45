"""The scheduler: its overhead a step, tokens/s by batch size, and the cost of a prompt meanwhile.

    python bench/scheduler.py ENGINE [--active 1,2,4,8] [--context 256] [--new 48] [--late 1024]
                          [--chunk-tokens N] [--rounds 3] [--save]

A step of the scheduler, greedy, beside a `Session.decode` and its argmax on the same batch, in
turns, and the gain in tokens/s over one sequence; tokens/s of `Engine.generate` for one prompt.
Requests are random tokens, all of one length, and prompts are computed before the clock starts.
Then, while sequences decode, a prompt of --late tokens comes: its chunks add to the time between
two tokens. Last, the cost of a copy of a sequence, which is done once for a request and when the
batch size changes. --save writes bench/results/scheduler.txt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from common import arguments, finish, seconds

import g4ir
from g4ir.backends.sampling import SamplingParams
from g4ir.bench.roof import synchronize
from g4ir.bench.stats import median, stat
from g4ir.engine.engine import Engine
from g4ir.engine.requests import PREFILLING, QUEUED, Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.model.media import placeholders
from g4ir.ui.table import aligned
from g4ir.ui.units import size_text

GREEDY = SamplingParams(ignore_eos=True)
#: steps before the clock starts
WARM = 4


@dataclass(frozen=True)
class Bench:
    engine: Engine
    scheduler: Scheduler
    context: int
    new: int
    late: int

    def prompt(self, seed: int, tokens: int) -> tuple[int, ...]:
        g = torch.Generator().manual_seed(seed)
        high = self.engine.spec.text.readable_ids
        ids = torch.randint(3, high, (tokens,), generator=g).tolist()
        holders = {*placeholders(self.engine.spec.tokens, self.engine.media.kinds).values()}
        return tuple(3 if t in holders else t for t in ids)

    def chunks(self, tokens: int) -> int:
        """Count the steps that a prompt may take, and one."""
        size = self.scheduler.config.chunk_tokens or self.engine.limits.prefill_chunk
        return -(-tokens // size) + 1

    def started(self, count: int, new: int) -> None:
        """Have so many rows decode, past the first steps."""
        new += WARM + count * self.chunks(self.context)
        for i in range(count):
            request = Request(self.prompt(i, self.context), new, GREEDY, reuse=False)
            self.scheduler.submit(request)
        while self.scheduler.active < count or self.scheduler.waiting:
            self.scheduler.step()
        for _ in range(WARM):
            self.scheduler.step()

    def ended(self) -> None:
        """Take all rows away."""
        for answer in self.scheduler.batch.holders:
            answer.handle.cancel()
        while self.scheduler.busy:
            self.scheduler.step()

    def steps(self, active: int) -> list[float]:
        """Return seconds of steps in which so many rows decode."""
        self.started(active, self.new)
        times = [seconds(self.scheduler.step) for _ in range(self.new - 1)]
        assert self.scheduler.active == active
        self.ended()
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

    def generated(self) -> float:
        """Return tokens/s of `generate`, its prompt included."""
        prompt = [*self.prompt(0, self.context)]
        return self.new / seconds(lambda: self.engine.generate(prompt, self.new, stop_ids=()))

    def beside_a_prompt(self, active: int) -> list[float]:
        """Return seconds of steps, each with a chunk of another prompt."""
        self.started(active, self.new + self.chunks(self.late))
        request = Request(self.prompt(99, self.late), 1, GREEDY, reuse=False)
        handle, times = self.scheduler.submit(request), []
        while handle.state in (QUEUED, PREFILLING):
            times.append(seconds(self.scheduler.step))
        self.ended()
        return times

    def copy(self) -> str:
        """Return the bytes and the time of a copy of a row of `context` tokens."""
        last = self.scheduler.max_batch - 1
        source, target = self.engine.session(1), self.engine.session(last + 1)
        source.prefill(torch.tensor([self.prompt(0, self.context)]))

        def copied() -> None:
            target.copy_row(source, 0, last)
            synchronize(self.engine.device)

        took = median([seconds(copied) for _ in range(10)][1:])
        return f"{size_text(source.nbytes(self.context))}, {took * 1e3:.2f} ms"


def batches(bench: Bench, sizes: list[int], rounds: int) -> list[list[str]]:
    """Return a table of ms a step, of the scheduler and of a bare session, and tokens/s."""
    lines = [["sequences", "scheduler ms", "session ms", "overhead ms", "tokens/s", "gain"]]
    rates: list[float] = []
    for active in sizes:
        ours, bare = list[list[float]](), list[float]()
        for _ in range(rounds):
            bare += bench.bare_steps(active)
            ours.append(bench.steps(active))
        a, b = stat(ours, median), median(bare)
        rate = stat([[active / t for t in many] for many in ours], median)
        rates.append(rate.value)
        ms = (f"{t * 1e3:.3f}" for t in (a.value, b, a.value - b))
        gain = f"{rate.value / rates[0]:.2f}"
        lines.append([str(active), *ms, f"{rate.value:.2f} ± {rate.spread:.2f}", gain])
        print(*lines[-1], flush=True)
    return lines


def gaps(bench: Bench, active: int) -> list[list[str]]:
    """Return a table of the time between two tokens, alone and beside a prompt, in ms."""
    alone, beside = bench.steps(active), bench.beside_a_prompt(active)
    added, chunks = [t - median(alone) for t in beside], bench.beside_a_prompt(0)
    head = [f"{active} rows", "median ms", "longest ms"]
    lines = [("a step", alone), (f"with a chunk ({len(beside)})", beside), ("added", added)]
    lines += [("a chunk alone, the bound", chunks)]
    return [head, *([name, f"{median(t) * 1e3:.1f}", f"{max(t) * 1e3:.1f}"] for name, t in lines)]


def main() -> None:
    sizes = {"context": 256, "new": 48, "late": 1024, "chunk_tokens": 0, "rounds": 3}
    args = arguments(__doc__, "engine", active=(1, 2, 4, 8), **sizes)
    with g4ir.load_engine(args.engine) as engine:
        scheduler = Scheduler(engine, SchedulerConfig(chunk_tokens=args.chunk_tokens or None))
        late = min(args.late, engine.limits.max_seq)
        bench = Bench(engine, scheduler, args.context, args.new, late)
        active = [n for n in args.active if n <= scheduler.max_batch]
        bench.generated()
        rate = median([bench.generated() for _ in range(args.rounds)])
        table = aligned(batches(bench, active, args.rounds), indent=0)
        most = max([n for n in active if n < scheduler.max_batch], default=0)
        beside = gaps(bench, most) if most else [["one row: nothing runs beside a prompt"]]
        chunk = args.chunk_tokens or engine.limits.prefill_chunk
        text = (
            f"{engine.spec.name}, {engine.facts.backend} on {engine.device}, {engine.dtype}; "
            f"context {args.context}, {args.new} new tokens\n\n{table}\n"
            f"generate, one prompt: {rate:.1f} tokens/s; a prompt of {late} tokens in chunks of "
            f"{chunk}; a copy of a row of {args.context} tokens: {bench.copy()}\n\n"
            f"{aligned(beside, indent=0)}"
        )
        finish(args, "scheduler", text, engine.device)


if __name__ == "__main__":
    main()
