"""Runs one prompt in every mode (alone, batched, with draft tokens, after truncation, from a
restored prefix) and checks that the results are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from g4ir.backends.sampling import SamplingParams
from g4ir.engine.engine import Engine
from g4ir.engine.requests import Request, RequestHandle
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.session import Session
from g4ir.engine.speculative import NGRAM, SpeculativeConfig
from g4ir.ir.distance import row_errors

from .haystack import text_of
from .tokens import window_of

Tensor = torch.Tensor
#: generated tokens, and tokens that are appended and then truncated
NEW, DROPPED = 24, 4
#: requests that run together
COMPANY = 3
#: scheduler without a prefix cache
ALONE = SchedulerConfig(prefix_bytes=0)
#: generated tokens, each with its log-probability
Answer = list[tuple[int, float]]


@dataclass(frozen=True, eq=False)
class Baseline:
    """A prompt's greedy answer, computed alone: the reference of all modes. limits: see
    `prove.limits_of`."""

    engine: Engine
    prompt: tuple[int, ...]
    limits: Mapping[str, float]

    def request(self, tokens: Sequence[int] | None = None, **options: Any) -> Request:
        """Return a greedy request for NEW tokens after this prompt, or after `tokens`."""
        sampling = SamplingParams(ignore_eos=True, logprobs=1)
        return Request(tuple(self.prompt if tokens is None else tokens), NEW, sampling, **options)

    @cached_property
    def tokens(self) -> list[int]:
        (answer,), _ = answers(Scheduler(self.engine, ALONE), [self.request(reuse=False)])
        return [token for token, _ in answer]

    @cached_property
    def rows(self) -> Tensor:
        """The logits f32[NEW, vocab] from which the answer's tokens are chosen."""
        session = self.engine.session()
        return self.decode(session, session.prefill([[*self.prompt]]))

    def decode(self, session: Session, first: Tensor) -> Tensor:
        """Append the answer's tokens one by one; return the logits from which they are chosen."""
        return torch.cat([first, *(session.decode([t]) for t in self.tokens[:-1])])

    def wrong_rows(self, rows: Tensor) -> str | None:
        """Return the first token at which logits differ by more than rounding, as text; None if
        none does."""
        distance = row_errors(rows, self.rows).distance
        at = int((~(distance <= self.limits["row"])).double().argmax())
        if float(distance[at]) <= self.limits["row"]:
            return None
        return f"logits of new token {at} differ by {float(distance[at]):.1e} of their RMS"

    def wrong_answer(self, answer: Answer) -> str | None:
        """Return the first token at which an answer or its log-probability differs, as text; None
        if none does. After a choice between two nearly equal logits the answers may differ."""
        for at, ((token, logprob), want) in enumerate(zip(answer, self.tokens)):
            row = self.rows[at].double()
            gap = self.limits["gap"] * float(row.pow(2).mean().sqrt())
            if token != want:
                close = float(row[want] - row[token]) <= gap
                return None if close else f"new token {at} is {token}, alone {want}"
            expected = float(row.log_softmax(-1)[token])
            if not abs(expected - logprob) <= gap:
                return f"log-probability of new token {at} is {logprob:.4f}, alone {expected:.4f}"
        return None if len(answer) == len(self.tokens) else f"{len(answer)} tokens, not {NEW}"


def answers(
    scheduler: Scheduler, requests: Sequence[Request]
) -> tuple[list[Answer], list[RequestHandle]]:
    """Run requests together; return their answers and handles."""
    handles = [scheduler.submit(r) for r in requests]
    out: dict[RequestHandle, Answer] = {handle: [] for handle in handles}
    for event in scheduler.run(*handles):
        if event.error:
            raise event.error
        if event.token is not None and event.logprobs:
            out[event.handle].append((event.token, event.logprobs.chosen))
    return [*out.values()], handles


#: a mode: runs the baseline's prompt in one way; returns None if the results are equal, else the
#: difference, or `-` and why the mode cannot run
Mode = Callable[[Baseline], "str | None"]


def alone(base: Baseline) -> str | None:
    """Generate without log-probabilities, so that the device loop is used if there is one."""
    new = base.engine.generate([*base.prompt], NEW, stop_ids=())
    rows = base.rows.log_softmax(-1)
    return base.wrong_answer([(t, float(rows[i, t])) for i, t in enumerate(new)])


def in_company(base: Baseline) -> str | None:
    """Generate in a batch with prompts of other lengths."""
    if base.engine.limits.max_batch < 2:
        return "-the engine has one slot; build it with --max-batch 3"
    prompts = [base.prompt[::-1][: len(base.prompt) // i] for i in range(2, COMPANY + 1)]
    requests = [base.request(p, reuse=False) for p in (base.prompt, *prompts)]
    (answer, *_), _ = answers(Scheduler(base.engine, ALONE), requests)
    return base.wrong_answer(answer)


def with_drafts(base: Baseline) -> str | None:
    """Generate with n-gram drafts. The prompt contains its own end and the answer, so that the
    proposer has matches; most of its drafts are wrong."""
    if not base.engine.draft_tokens:
        return "-the engine verifies no draft tokens; build it with --draft-tokens 4"
    tail = base.prompt[-8:]
    again = (*base.prompt[: -NEW - 16], *tail, *base.tokens, *tail)
    other = Baseline(base.engine, again[-len(base.prompt) :], base.limits)
    scheduler = Scheduler(base.engine, replace(ALONE, draft=SpeculativeConfig(NGRAM)))
    (answer,), (handle,) = answers(scheduler, [other.request(reuse=False)])
    if not handle.tally.drafted:
        return "-no n-gram draft was verified"
    return other.wrong_answer(answer)


def after_truncation(base: Baseline) -> str | None:
    """Prefill part of the prompt and some other tokens, truncate to that part, prefill the
    remainder; compare logits."""
    slots = min((s for _, s in base.engine.rings), default=len(base.prompt))
    cut = max(1, min(len(base.prompt) // 2, slots - DROPPED))
    session = base.engine.session()
    session.prefill([[*base.prompt[:cut]]])
    session.prefill([[*base.prompt[-DROPPED:][::-1]]])
    session.truncate(cut)
    return base.wrong_rows(base.decode(session, session.prefill([[*base.prompt[cut:]]])))


def from_prefix_cache(base: Baseline) -> str | None:
    """Answer after two other prompts; the first half of one is that of this prompt, and cached."""
    cut, scheduler = len(base.prompt) // 2, Scheduler(base.engine)
    shared, flipped = base.prompt[:cut], base.prompt[::-1]
    for tokens in (flipped, (*shared, *flipped[cut:])):
        answers(scheduler, [base.request(tokens, marks=(cut,))])
    (answer,), (handle,) = answers(scheduler, [base.request(marks=(cut,))])
    if not handle.counts.cached:
        return "-no prefix was found in the cache; too little memory may be free for one"
    return base.wrong_answer(answer)


MODES: Mapping[str, Mode] = {
    "alone": alone,
    "company": in_company,
    "drafts": with_drafts,
    "truncation": after_truncation,
    "prefix cache": from_prefix_cache,
}


def compare_modes(
    engine: Engine, limits: Mapping[str, float]
) -> tuple[bool | None, str, dict[str, Any]]:
    """Compute a text, longer than the sliding window if max_seq permits, in every mode; return
    whether none differs, a summary, and the result of each."""
    size = min(window_of(engine) + 2 * NEW, engine.limits.max_seq - NEW)
    base = Baseline(engine, tuple(text_of(engine, max(size, 2))), limits)
    data: dict[str, Any] = {}
    for name, mode in MODES.items():
        wrong = mode(base)
        ok = None if wrong and wrong[0] == "-" else wrong is None
        data[name] = {"ok": ok, "why": (wrong or "").lstrip("-")}
    words = {True: "the same", False: "DIFFERENT", None: "not run"}
    why = {name: f" ({d['why']})" if d["why"] else "" for name, d in data.items()}
    summary = "; ".join(f"{name} {words[d['ok']]}{why[name]}" for name, d in data.items())
    return all(d["ok"] is not False for d in data.values()), summary, data
