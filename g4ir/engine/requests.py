"""Requests, the state of their sequences, and the events of a scheduler step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from g4ir.backends.sampling import Logprobs, Sampler, SamplingParams, read_logprobs
from g4ir.errors import InputError
from g4ir.media.soft import Soft

from .speculative import AcceptanceStats, RowDrafts

#: states of a request
QUEUED, PREFILLING, DECODING = "queued", "prefilling", "decoding"
#: final states of a request; an answer's finish reason is CANCELLED, FAILED, STOP or LENGTH
FINISHED, CANCELLED, FAILED = "finished", "cancelled", "failed"
STOP, LENGTH = "stop", "length"


def check_minimums(values: Mapping[str, Any], **minimums: float) -> None:
    """Raise InputError for a value below its minimum; None passes."""
    for name, minimum in minimums.items():
        value = values.get(name)
        if value is not None and not value >= minimum:
            raise InputError(f"{name} {value}: expected at least {minimum}")


@dataclass(frozen=True)
class Request:
    """`n` answers to one prompt, each of at most `max_new_tokens`.

    `soft`: soft tokens for the placeholders, as in `Session.prefill`. `marks`: prefix lengths at
    which to cache the prompt, for other prompts with the same prefix, `salt` and adapter; without
    `reuse` the prefix cache is neither read nor written. `prompt_logprobs`: number of most likely
    tokens to report at each position of the prompt; turns `reuse` off.
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
    #: name of a loaded adapter; empty: the model itself
    adapter: str = ""


@dataclass
class Counts:
    """Token counts of a request; times in seconds since submission, None: not yet."""

    prompt: int
    cached: int = 0
    generated: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate, without the first token; None before the end, and for fewer than two
        tokens."""
        tokens, seconds = self.generated - 1, (self.total_s or 0.0) - (self.first_token_s or 0.0)
        return round(tokens / seconds, 3) if tokens > 0 and seconds > 0 else None

    def output(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
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
    """One answer of a request. `slot`: -1 while it has none; `finish`: the finish reason."""

    index: int
    handle: RequestHandle
    sampler: Sampler
    slot: int = -1
    finish: str | None = None
    #: number of tokens published as events
    emitted: int = 0
    #: set by `RequestHandle.stop`
    stop_requested: bool = False
    #: state of speculative decoding; None until it is first on for this sequence
    drafter: RowDrafts | None = None

    @property
    def tokens(self) -> list[int]:
        return self.sampler.generated

    @property
    def remaining(self) -> int:
        """Number of tokens it may still generate."""
        return self.handle.request.max_new_tokens - len(self.tokens)

    @property
    def aborted(self) -> bool:
        return self.stop_requested or self.handle.cancelled

    @property
    def complete(self) -> bool:
        """Whether its newest token is its last one."""
        return self.remaining < 1 or self.tokens[-1] in self.sampler.stops


class RequestHandle:
    """A submitted request: its state, answers, token counts and times."""

    def __init__(
        self, request: Request, keys: tuple[int, ...], samplers: Sequence[Sampler]
    ) -> None:
        self.request, self.keys = request, keys
        self.answers = tuple(SequenceState(i, self, s) for i, s in enumerate(samplers))
        self.state = QUEUED
        self.counts, self.tally = Counts(len(request.tokens)), AcceptanceStats()
        self.cancelled = False
        #: whether its prompt may be prefilled together with others, one per row
        self.batchable = not request.soft and request.n == 1 and request.prompt_logprobs is None
        #: slot of its adapter (-1: none), and the function that ends the adapter's use
        self.adapter_slot, self.release = -1, lambda: None
        #: callback of AsyncEngine, called with the request's events
        self.callback: Callable[[Event], None] = lambda event: None
        #: log-probabilities of the prompt tokens computed so far; None for the first
        self.prompt_logprobs: list[Logprobs | None] = [None]
        self._submitted = time.perf_counter()

    def record_prompt_logprobs(self, logits: torch.Tensor) -> None:
        """Append the log-probabilities of the prompt's next tokens; logits [1, S, vocab]."""
        count = self.request.prompt_logprobs
        assert count is not None
        following = self.request.tokens[len(self.prompt_logprobs) :]
        self.prompt_logprobs += (
            read_logprobs(row, t, count) for row, t in zip(logits[0], following)
        )

    def cancel(self) -> None:
        """Cancel the request before the next step. Thread-safe."""
        self.cancelled = True

    def stop(self, index: int) -> None:
        """End one answer before the next step, as if by a stop token. Thread-safe."""
        self.answers[index].stop_requested = True

    @property
    def done(self) -> bool:
        return self.state in (FINISHED, CANCELLED, FAILED)

    @property
    def started(self) -> bool:
        """Whether its prefill has started, or it has ended."""
        return self.state != QUEUED

    def age(self) -> float:
        """Return seconds since submission."""
        return time.perf_counter() - self._submitted


@dataclass(frozen=True)
class Event:
    """A token of answer `index`, the answer's end, or both: `finish` is STOP, LENGTH, CANCELLED,
    FAILED, or None before the end; `error` is set with FAILED."""

    handle: RequestHandle
    index: int
    token: int | None = None
    logprobs: Logprobs | None = None
    finish: str | None = None
    error: Exception | None = None


@dataclass
class Totals:
    """Counts since start-up or warm-up: prompt tokens `computed` or `cached` (reused), tokens
    `generated`; prefill `chunks` and their seconds; decode `steps` by number of running sequences,
    `step_s` their seconds by bucket; answers `ended` by finish reason."""

    computed: int = 0
    cached: int = 0
    generated: int = 0
    chunks: int = 0
    chunk_s: float = 0.0
    steps: Counter[int] = field(default_factory=Counter)
    step_s: dict[int, float] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    #: moving average of a request's slot-seconds
    row_s: float = 0.0
    tally: AcceptanceStats = field(default_factory=AcceptanceStats)
