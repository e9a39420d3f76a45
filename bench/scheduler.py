"""The scheduler: its overhead a step, tokens/s by batch size, and the cost of a prompt meanwhile.

    python bench/scheduler.py ENGINE [--active 1,2,4,8] [--context 256] [--new 48] [--late 1024]
                          [--chunk-tokens N] [--rounds 3] [--save]

Overhead: a step of the scheduler, greedy, over a `Session.decode` and its argmax on the same batch,
in turns; and tokens/s of `Engine.generate` for one prompt. Then the same requests (random tokens,
greedy, all of one length) are answered in one batch and one by one, in rounds A-B-A-B; prompts are
computed before the clock starts. Then, while sequences decode, a prompt of --late tokens comes: its
chunks add to the time between two tokens. Last, the cost of a copy of a sequence, which is done
once for a request and when the batch size changes. --overhead: nothing but the first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from common import save, seconds

import g4ir
from g4ir.backends.sampling import SamplingParams
from g4ir.bench.stats import Stat, median, stat
from g4ir.bench.system import environment
from g4ir.bench.text import machine
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

    def request(self, seed: int, tokens: int, new: int) -> Request:
        g = torch.Generator().manual_seed(seed)
        high = self.engine.spec.text.readable_ids
        ids = torch.randint(3, high, (tokens,), generator=g).tolist()
        holders = {*placeholders(self.engine.spec.tokens, self.engine.media.kinds).values()}
        prompt = tuple(3 if t in holders else t for t in ids)
        return Request(prompt, new, GREEDY, reuse=False)

    def started(self, count: int, new: int) -> None:
        """Have so many rows decode, past the first steps."""
        for i in range(count):
            self.scheduler.submit(
                self.request(i, self.context, new + WARM + count * self._chunks(self.context))
            )
        while self.scheduler.active < count or self.scheduler.waiting:
            self.scheduler.step()
        for _ in range(WARM):
            self.scheduler.step()

    def _chunks(self, tokens: int) -> int:
        """Count the steps that a prompt may take, and one."""
        size = self.scheduler.config.chunk_tokens or self.engine.limits.prefill_chunk
        return -(-tokens // size) + 1

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
        tokens = [self.request(i, self.context, 1).tokens for i in range(active)]
        newest = session.prefill(torch.tensor(tokens)).argmax(-1)
        times = []
        for i in range(WARM + self.new):
            begun = time.perf_counter()
            newest = session.decode(newest).argmax(-1)
            newest.tolist()
            if i >= WARM:
                times.append(time.perf_counter() - begun)
        return times

    def generated(self) -> float:
        """Return tokens/s of `generate`, its prompt included."""
        prompt = [*self.request(0, self.context, 1).tokens]
        return self.new / seconds(lambda: self.engine.generate(prompt, self.new, stop_ids=()))

    def one_by_one(self, count: int) -> list[float]:
        """Return seconds of steps of the same requests, one after another."""
        return [t for _ in range(count) for t in self.steps(1)]

    def beside_a_prompt(self, active: int) -> list[float]:
        """Return seconds of steps, each with a chunk of another prompt."""
        self.started(active, self.new + self._chunks(self.late))
        handle = self.scheduler.submit(self.request(99, self.late, 1))
        times = []
        while handle.state in (QUEUED, PREFILLING):
            times.append(seconds(self.scheduler.step))
        self.ended()
        return times

    def copies(self) -> tuple[float, int]:
        """Return seconds of a copy of a row of `context` tokens, and its bytes."""
        source, target = self.engine.session(1), self.engine.session(self.scheduler.max_batch)
        source.prefill(torch.tensor([self.request(0, self.context, 1).tokens]))
        target.copy_row(source, 0, self.scheduler.max_batch - 1)

        def copy() -> None:
            target.copy_row(source, 0, self.scheduler.max_batch - 1)
            if self.engine.device == "cuda":
                torch.cuda.synchronize()

        return median([seconds(copy) for _ in range(9)]), source.nbytes(self.context)


def overhead(bench: Bench, sizes: list[int], rounds: int) -> list[list[str]]:
    """Return a table of ms a step: of the scheduler, of a bare session, and their difference."""
    lines = [["sequences", "scheduler ms", "session ms", "overhead ms"]]
    for active in sizes:
        ours, bare = list[float](), list[float]()
        for _ in range(rounds):
            bare += bench.bare_steps(active)
            ours += bench.steps(active)
        a, b = median(ours) * 1e3, median(bare) * 1e3
        lines.append([str(active), f"{a:.3f}", f"{b:.3f}", f"{a - b:.3f}"])
    return lines


def measured(bench: Bench, sizes: list[int], rounds: int) -> Iterator[list[str]]:
    """Yield a line for each number of active rows."""
    for active in sizes:
        rows: list[list[float]] = []
        single: list[list[float]] = []
        for _ in range(rounds):
            rows.append([active / t for t in bench.steps(active)])
            single.append([1 / t for t in bench.one_by_one(active)])
        fast, slow = stat(rows, median), stat(single, median)
        yield [str(active), shown(fast), shown(slow), f"{fast.value / slow.value:.2f}"]


def shown(s: Stat) -> str:
    return f"{s.value:.2f} ± {s.spread:.2f}"


def gaps(bench: Bench, active: int) -> list[list[str]]:
    """Return a table of the time between two tokens, alone and beside a prompt, in ms."""
    alone, beside = bench.steps(active), bench.beside_a_prompt(active)
    added, chunks = [t - median(alone) for t in beside], bench.beside_a_prompt(0)
    head = [f"{active} rows", "median ms", "longest ms"]
    lines = [("a step", alone), (f"with a chunk ({len(beside)})", beside), ("added", added)]
    lines += [("a chunk alone, the bound", chunks)]
    return [head, *([name, f"{median(t) * 1e3:.1f}", f"{max(t) * 1e3:.1f}"] for name, t in lines)]


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine")
    parser.add_argument("--active", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--late", type=int, default=1024, help="tokens of the prompt beside rows")
    parser.add_argument("--chunk-tokens", type=int, help="of it between two steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overhead", action="store_true", help="measure nothing else")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    begun = time.perf_counter()
    engine = g4ir.load_engine(args.engine)
    scheduler = Scheduler(engine, SchedulerConfig(chunk_tokens=args.chunk_tokens))
    late = min(args.late, engine.limits.max_seq)
    bench = Bench(engine, scheduler, args.context, args.new, late)
    sizes = [n for n in args.active if n <= scheduler.max_batch]
    print(engine, machine(environment(engine.device)), sep="\n", flush=True)
    bench.generated()
    rate = median([bench.generated() for _ in range(args.rounds)])
    cost = aligned(overhead(bench, sizes, args.rounds), indent=0)
    print(cost, f"generate, one prompt: {rate:.1f} tokens/s", sep="\n", flush=True)
    if args.overhead:
        engine.close()
        return
    table = [["sequences", "tokens/s", "one by one", "gain"]]
    for line in measured(bench, sizes, args.rounds):
        table.append(line)
        print(*line, flush=True)
    active = max([n for n in sizes if n < scheduler.max_batch], default=0)
    beside = gaps(bench, active) if active else [["one row: nothing runs beside a prompt"]]
    took, size = bench.copies()
    facts = [
        f"{engine.spec.name}, {engine.facts.backend} on {engine.device}, {engine.dtype}; "
        f"context {args.context}, {args.new} new tokens",
        f"a prompt of {late} tokens in chunks of "
        f"{args.chunk_tokens or engine.limits.prefill_chunk}; a copy of a row of {args.context} "
        f"tokens: {size_text(size)}, {took * 1e3:.2f} ms",
    ]
    text = "\n".join(
        [facts[0], "", cost, "", aligned(table, indent=0), facts[1], "", aligned(beside, 0)]
    )
    print(f"\n{text}\n{time.perf_counter() - begun:.0f} s")
    if args.save:
        save("scheduler", text, engine.device)
    engine.close()


if __name__ == "__main__":
    main()
