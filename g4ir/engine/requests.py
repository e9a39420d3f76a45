"""Requests to the scheduler, the state of their answers, and the events of a step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from g4ir.backends.sampling import Logprobs, Sampler, SamplingParams, read_logprobs
from g4ir.errors import InputError
from g4ir.media.soft import Soft

from .speculative import AcceptanceStats, RowDrafts

#: states of a request
QUEUED, PREFILLING, DECODING = "queued", "prefilling", "decoding"
#: states in which it ends; an answer ends with the last two, or with STOP or LENGTH
FINISHED, CANCELLED, FAILED = "finished", "cancelled", "failed"
STOP, LENGTH = "stop", "length"


def check_least(given: Mapping[str, Any], **least: float) -> None:
    """Raise InputError for a number that is less than this; None is none."""
    for name, number in least.items():
        value = given.get(name)
        if value is not None and not value >= number:
            raise InputError(f"{name} {value}: expected at least {number}")


@dataclass(frozen=True)
class Request:
    """`n` answers to one prompt, each of at most `max_new_tokens`.

    `soft` stand for the placeholders, as in `Session.prefill`. `marks` are numbers of tokens after
    which the prefix is cached for other prompts that begin with it and have the same `salt`;
    without `reuse` nothing is cached and nothing cached is used. With `prompt_logprobs` the
    log-probabilities of the prompt's own tokens are read, and so many of the likeliest: such a
    prompt is not cached either.
    """

    tokens: tuple[int, ...]
    max_new_tokens: int = 64
    sampling: SamplingParams = field(default_factory=SamplingParams)
    soft: tuple[Soft, ...] = ()
    n: int = 1
    marks: tuple[int, ...] = ()
    reuse: bool = True
    salt: str = ""
    prompt_logprobs: int | None = None


@dataclass
class Counts:
    """Tokens of a prompt and its answers; seconds since it was submitted, None: not yet."""

    prompt: int
    cached: int = 0
    generated: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of the tokens after the first; None where there was one token only."""
        rest, seconds = self.generated - 1, (self.total_s or 0.0) - (self.first_token_s or 0.0)
        return round(rest / seconds, 3) if rest > 0 and seconds > 0 else None

    def output(self) -> dict[str, Any]:
        """Return them as values of JSON."""
        times = {"time_to_first_token_s": self.first_token_s, "total_s": self.total_s}
        return {
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "new_tokens": self.generated,
            **{k: v if v is None else round(v, 6) for k, v in times.items()},
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(eq=False)
class SequenceState:
    """One of a request's answers. `slot` is -1 while it has none; `finish`: why it ended."""

    index: int
    handle: RequestHandle
    sampler: Sampler
    slot: int = -1
    finish: str | None = None
    #: tokens that its reader was given
    emitted: int = 0
    #: whether its reader wants no more of it
    enough: bool = False
    #: from its first draft on
    drafter: RowDrafts | None = None

    @property
    def tokens(self) -> list[int]:
        return self.sampler.generated

    @property
    def room(self) -> int:
        """Number of tokens that it may still get."""
        return self.handle.request.max_new_tokens - len(self.tokens)

    @property
    def unwanted(self) -> bool:
        return self.enough or self.handle.cancelled

    @property
    def over(self) -> bool:
        """Whether its newest token is its last."""
        return self.room < 1 or self.tokens[-1] in self.sampler.stops


class RequestHandle:
    """A submitted request."""

    def __init__(
        self, request: Request, keys: tuple[int, ...], samplers: Sequence[Sampler]
    ) -> None:
        self.request, self.keys = request, keys
        self.answers = tuple(SequenceState(i, self, s) for i, s in enumerate(samplers))
        self.state = QUEUED
        self.counts, self.tally = Counts(len(request.tokens)), AcceptanceStats()
        self.cancelled = False
        #: whether its prompt may be computed together with others, each in a row
        self.joins = not request.soft and request.n == 1 and request.prompt_logprobs is None
        #: of the prompt's tokens, as far as it is computed; the first has none
        self.prompt_logprobs: list[Logprobs | None] = [None]
        self._begun = time.perf_counter()

    def read_prompt(self, logits: torch.Tensor) -> None:
        """Keep the log-probabilities of the next tokens of the prompt, by their logits [1, S,
        vocab]."""
        count = self.request.prompt_logprobs
        assert count is not None
        rest = self.request.tokens[len(self.prompt_logprobs) :]
        self.prompt_logprobs += (read_logprobs(row, t, count) for row, t in zip(logits[0], rest))

    def cancel(self) -> None:
        """End it before the next step. From any thread, at any time."""
        self.cancelled = True

    def stop(self, index: int) -> None:
        """End one answer before the next step, as a stop token does. From any thread."""
        self.answers[index].enough = True

    @property
    def done(self) -> bool:
        return self.state in (FINISHED, CANCELLED, FAILED)

    @property
    def started(self) -> bool:
        """Whether its prefill has begun, or never will."""
        return self.state != QUEUED

    def age(self) -> float:
        """Return seconds since it was submitted."""
        return time.perf_counter() - self._begun


@dataclass(frozen=True)
class Event:
    """A token of an answer, its end, or both: `finish` is STOP, LENGTH, CANCELLED or FAILED."""

    handle: RequestHandle
    index: int
    token: int | None = None
    logprobs: Logprobs | None = None
    finish: str | None = None
    error: Exception | None = None


@dataclass
class Totals:
    """Counts since the beginning: `steps` by number of sequences that decoded, their seconds by
    bucket; `ended` by why an answer ended."""

    computed: int = 0
    cached: int = 0
    generated: int = 0
    chunks: int = 0
    chunk_s: float = 0.0
    steps: Counter[int] = field(default_factory=Counter)
    step_s: dict[int, float] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    #: seconds that a request keeps its slots, times their number: a moving average
    row_s: float = 0.0
    tally: AcceptanceStats = field(default_factory=AcceptanceStats)
