"""More than one token per step: what verifying m tokens costs, and what drafts give.

    python bench/verify.py ENGINE [--context 256,1024] [--new 160] [--every 40] [--right 0.8]
                           [--rounds 5] [--save]

First the curve: a step of one token (with its choice) against verifications of 1 to K + 1 at the
same context, in turns, beside the time of reading the weights once. Then tasks with a scripted
answer, since random weights repeat no text: logits are computed and chosen from as ever, and then
the script's token takes the place of the choice. `edit`: the answer is the prompt with one token in
--every another one; drafts are looked up in the text (ngram). `drafter`: an engine with a drafter
drafts by it, and the script says what was drafted, each token with probability --right. Each task
runs beside the same engine without drafts, and beside what the curve says that it should gain.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from common import medians, save, seconds

import g4ir
from g4ir.backends.sampling import SamplingParams, sample
from g4ir.bench.roof import Meter
from g4ir.bench.stats import median
from g4ir.bench.system import environment
from g4ir.bench.text import machine
from g4ir.engine import scheduler as scheduling
from g4ir.engine.engine import Engine
from g4ir.engine.requests import Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.session import Session
from g4ir.engine.speculative import (
    MTP,
    NGRAM,
    NO_DRAFT,
    AcceptanceStats,
    SpeculativeConfig,
)
from g4ir.model.draft import DRAFT
from g4ir.ops.types import torch_dtype
from g4ir.ui.table import aligned


@contextmanager
def scripted(script: Callable[[int], int]) -> Any:
    """A context in which a token is chosen as ever, and then replaced by the script's:
    `script(i)` for the i-th choice."""
    count = 0

    def choose(logits: torch.Tensor, samplers: Any) -> Any:
        nonlocal count
        made = sample(logits, samplers)
        for row, sampler in samplers.items():
            sampler.generated[-1] = script(count)
            made[row] = scheduling.Choice(sampler.generated[-1])
            count += 1
        return made

    with patch.object(scheduling, "sample", choose):
        yield


@dataclass
class Agreeing:
    """A script that says what the session's drafter drafted last, each token with a probability,
    and after a wrong one anything."""

    session: Session
    right: float
    high: int
    rng: random.Random = field(default_factory=lambda: random.Random(5))
    waiting: list[int] = field(default_factory=list)
    #: tokens that each round drafted
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        drafted = self.session.draft

        def watched(*args: object) -> dict[int, list[int]]:
            made = drafted(*args)  # type: ignore[arg-type]
            self.waiting = [*made[0]]
            self.counts.append(len(self.waiting))
            return made

        self.session.draft = watched  # type: ignore[method-assign]

    def __call__(self, _: int) -> int:
        if self.waiting and self.rng.random() < self.right:
            return self.waiting.pop(0)
        self.waiting.clear()
        return self.rng.randrange(3, self.high)


@dataclass(frozen=True)
class Bench:
    engine: Engine
    rounds: int

    @property
    def high(self) -> int:
        return min(self.engine.spec.text.readable_ids, 200_000)  # below the ids of media

    @property
    def most(self) -> int:
        return self.engine.draft_tokens + 1

    def ids(self, count: int, seed: int) -> list[int]:
        g = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.high, (count,), generator=g).tolist()

    def curve(self, context: int) -> dict[str, float]:
        """Return median seconds of `step`, `draft` and verifications by number of tokens."""
        session, tokens = self.engine.session(1), self.ids(context, 1)
        session.prefill([tokens])

        def step() -> float:
            took = seconds(lambda: session.verify([[5]])[:, 0].argmax(-1).tolist())
            session.truncate(context)
            return took

        def verified(count: int) -> float:
            def run() -> None:
                logits = session.verify([tokens[:count]])
                for place in range(count):
                    logits[:, place].argmax(-1).tolist()
                session.truncate(context + 1)

            took = seconds(run)
            session.truncate(context)
            return took

        runs = {"step": step}
        runs |= {str(m): lambda m=m: verified(m) for m in range(2, self.most + 1)}  # type: ignore[misc]
        if not self.engine.drafter:
            return medians(self.rounds, **runs)
        # First of all, while the state is known that a drafter goes on from.
        drafts = medians(self.rounds, draft=lambda: seconds(lambda: session.draft({0: 7}, {0: 1})))
        return drafts | medians(self.rounds, **runs)

    def answered(
        self,
        prompt: Sequence[int],
        new: int,
        draft: SpeculativeConfig,
        script: Callable[[Session], Callable[[int], int]],
        tally: AcceptanceStats,
    ) -> float:
        """Return tokens/s of a scripted answer."""
        config = SchedulerConfig(prefix_bytes=0, draft=draft)
        scheduler = Scheduler(self.engine, config)
        params = SamplingParams(ignore_eos=True)
        handle = scheduler.submit(Request(tuple(prompt), new, params, reuse=False))
        with scripted(script(scheduler.prefiller.session)):
            while not handle.counts.generated:
                scheduler.step()
            took = seconds(lambda: [*scheduler.run(handle)])
        tally.join(handle.tally)
        scheduler.close()
        return new / took

    def plain(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Return tokens/s of an answer without drafts."""
        script = answer.__getitem__
        tally = AcceptanceStats()
        return self.answered(prompt, len(answer), NO_DRAFT, lambda _: script, tally)

    def edited(self, prompt: Sequence[int], answer: Sequence[int], tally: AcceptanceStats) -> float:
        """Return tokens/s with n-gram drafts."""
        draft, script = SpeculativeConfig(NGRAM, self.most - 1), answer.__getitem__
        return self.answered(prompt, len(answer), draft, lambda _: script, tally)

    def drafted(
        self,
        prompt: Sequence[int],
        new: int,
        right: float,
        tally: AcceptanceStats,
        counts: list[int],
    ) -> float:
        """Return tokens/s with a draft model; `counts` are how many tokens each round drafted."""
        made: list[Agreeing] = []

        def script(session: Session) -> Callable[[int], int]:
            made.append(Agreeing(session, right, self.high))
            return made[0]

        draft = SpeculativeConfig(MTP, self.most - 1)
        rate = self.answered(prompt, new, draft, script, tally)
        counts += made[0].counts
        return rate


def with_changes(text: Sequence[int], every: int, high: int) -> list[int]:
    """Return a text with one token in `every` another one, at places that are not regular."""
    rng, out = random.Random(3), [*text]
    for i in range(0, len(out), every):
        out[min(i + rng.randrange(every), len(out) - 1)] = rng.randrange(3, high)
    return out


def read_floor(engine: Engine) -> float:
    """Return seconds of reading the weights of a step once."""
    params = {v.name: v for v in engine.program.graphs["decode"].params}
    rate = Meter(engine.device, torch_dtype(engine.dtype)).measure().read
    return sum(v.type.nbytes() for v in params.values()) / rate


def curve_table(found: dict[str, float], floor: float) -> list[list[str]]:
    step = found["step"]
    lines = [["tokens", "ms", "of a step", "of the read"]]
    for name, took in found.items():
        word = {"step": "1 (a step)", "draft": "a drafted one"}.get(name, name)
        lines.append([word, f"{took * 1e3:.1f}", f"{took / step:.3f}", f"{took / floor:.2f}"])
    return lines


def expected(found: dict[str, float], counts: Sequence[int], tokens: int) -> float:
    """Return the gain that the curve gives for rounds that drafted so many."""
    drafts = found.get("draft", 0.0)
    took = sum(found[str(k + 1)] if k else found["step"] for k in counts) + drafts * sum(counts)
    return tokens * found["step"] / took


def shares(tally: AcceptanceStats) -> str:
    found = tally.to_dict()["accepted"]
    assert isinstance(found, list)
    return " ".join(f"{share:.2f}" for share in found)


def tasks(bench: Bench, found: dict[str, float], context: int, args: argparse.Namespace) -> str:
    """Return the table of the tasks."""
    head = ["task", "tokens/s", "without", "gain", "by the curve", "tokens a round", "accepted"]
    prompt = bench.ids(context, 2)
    answer = with_changes((prompt * (args.new // context + 1))[: args.new], args.every, bench.high)
    lines, kinds = [head], [NGRAM, *([MTP] if DRAFT in bench.engine.program.graphs else [])]
    for kind in kinds:
        rates: dict[str, list[float]] = {"with": [], "without": []}
        tally, counts = AcceptanceStats(), list[int]()
        for _ in range(args.rounds):
            rates["without"].append(bench.plain(prompt, answer))
            if kind == NGRAM:
                rates["with"].append(bench.edited(prompt, answer, tally))
            else:
                rates["with"].append(bench.drafted(prompt, args.new, args.right, tally, counts))
        fast, slow = (median(rates[name]) for name in ("with", "without"))
        by_curve = f"{expected(found, counts, tally.tokens):.2f}" if kind == MTP else ""
        per_round = f"{tally.tokens / tally.rounds:.2f}"
        name = {NGRAM: "edit, ngram", MTP: f"drafter, {args.right:g} right"}[kind]
        cells = [f"{fast:.2f}", f"{slow:.2f}", f"{fast / slow:.2f}", by_curve, per_round]
        lines.append([name, *cells, shares(tally)])
    return aligned(lines, indent=0)


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine")
    parser.add_argument("--context", type=numbers, default=[256, 1024])
    parser.add_argument("--new", type=int, default=160)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--right", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    begun = time.perf_counter()
    engine = g4ir.load_engine(args.engine)
    bench, floor = Bench(engine, args.rounds), read_floor(engine)
    print(engine, machine(environment(engine.device)), sep="\n", flush=True)
    parts = [
        f"{engine.spec.name}, {engine.facts.backend} on {engine.device}, {engine.dtype}, "
        f"{engine.draft_tokens} drafted tokens; reading the weights once: {floor * 1e3:.1f} ms"
    ]
    curves = {context: bench.curve(context) for context in args.context}
    for context, found in curves.items():
        parts += [f"context {context}", aligned(curve_table(found, floor), indent=0)]
        print("\n\n".join(parts[-2:]), flush=True)
    context = args.context[0]
    parts += [f"answers of {args.new} tokens behind prompts of {context}"]
    parts += [tasks(bench, curves[context], context, args)]
    text = "\n\n".join(part.rstrip() for part in parts)
    print(f"\n{text}\n{time.perf_counter() - begun:.0f} s")
    if args.save:
        save("verify", text, engine.device)
    engine.close()


if __name__ == "__main__":
    main()
