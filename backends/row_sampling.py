"""Sampling by row: each row has its own settings, random numbers and history.

A row's logits go through, in this order: log-probabilities are read, which are raw; biases and
what may not be chosen; penalties; temperature; min_p; top_k; top_p; the draw.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from g4ir.errors import InputError

from .sampling import Sampler, Sampling, choose, largest, weights_of

if TYPE_CHECKING:
    import torch


#: by how much settings may change a logit, so that float32 holds what becomes of it
MOST = 1e9


class Allowed(Protocol):
    """Says before each draw which tokens may follow, a grammar for example."""

    def mask(self, generated: Sequence[int]) -> Any:
        """Return booleans [vocab], or int32 words whose bits are they, the lowest bit first; as
        torch or numpy. None: every token may follow."""


@dataclass(frozen=True)
class RowSampling(Sampling):
    """The settings of one row.

    presence_penalty is subtracted from the logits of tokens that were generated, frequency_penalty
    once for each time; repetition_penalty divides positive logits of tokens of the prompt and of
    generated ones, and multiplies negative ones. min_p: the least probability of a token that can
    be drawn, as a share of the largest. logit_bias: (token, what is added). The row ends with one
    of `stop`, and with the checkpoint's own unless `ignore_eos`; before `min_tokens` are generated
    none of them is chosen. logprobs: how many of the most probable tokens are told with each.
    """

    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed: Allowed | None = field(default=None, compare=False)
    stop: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError(f"min_p {self.min_p}: expected a share in [0, 1]")
        added = {name: getattr(self, name) for name in ("presence_penalty", "frequency_penalty")}
        added |= {f"logit_bias of token {token}": bias for token, bias in self.logit_bias}
        for name, value in added.items():
            if not -MOST <= value <= MOST:
                raise InputError(f"{name}: {_shown(value)}: expected -{MOST:g} to {MOST:g}")
        if not 1 / MOST <= self.repetition_penalty <= MOST:
            value = _shown(self.repetition_penalty)
            raise InputError(f"repetition_penalty {value}: expected {1 / MOST:g} to {MOST:g}")
        for name in ("min_tokens", "logprobs"):
            if (getattr(self, name) or 0) < 0:
                raise InputError(f"{name} {getattr(self, name)}: expected 0 or more")

    @property
    def penalises(self) -> bool:
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0, 0, 1)

    @property
    def changes(self) -> bool:
        """Whether more than `suppress` and `min_tokens` changes which logit is the largest."""
        return self.penalises or bool(self.logit_bias) or self.allowed is not None


@dataclass(frozen=True)
class Logprobs:
    """Raw log-probabilities: of the chosen token, and (token, log-probability) of the most
    probable ones, the most probable first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Choice:
    token: int
    logprobs: Logprobs | None = None


class RowSampler:
    """Keeps what one row has generated, and shapes its logits. `stops` end the row."""

    def __init__(self, s: RowSampling, prompt: Sequence[int], stops: Collection[int] = ()) -> None:
        self.settings, self.prompt, self.stops = s, prompt, frozenset(stops)
        self.generated: list[int] = []
        self._sampler, self._never = Sampler(s), frozenset(s.suppress)
        self._history: _History | None = None

    def uniforms(self) -> torch.Tensor:
        """Return the row's next random number, float64 [1]."""
        return self._sampler.uniforms(1)

    def takes(self, largest: int) -> bool:
        """Whether the token of the largest logit is the choice, so that nothing need be copied."""
        s = self.settings
        if s.temperature > 0 or s.changes or largest in self._never:
            return False
        return not (self._is_short and largest in self.stops)

    @property
    def _is_short(self) -> bool:
        return len(self.generated) < self.settings.min_tokens

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy of logits [vocab] as they are drawn from, float32. InputError where nothing
        is left."""
        import torch

        s, row = self.settings, logits.to(torch.float32, copy=True)
        if self._biased is not None:
            row.index_add_(0, self._biased.to(row.device), self._biases.to(row.device))
        for ids in (self._suppressed, self._stopping if self._is_short else None):
            if ids is not None:
                row[ids.to(row.device)] = -math.inf
        allowed = s.allowed.mask(self.generated) if s.allowed else None
        if allowed is not None:
            row.masked_fill_(~bits(allowed, len(row)).to(row.device), -math.inf)
        if s.penalises:
            self._penalise(row)
        if float(row.amax()) == -math.inf:
            raise InputError(
                f"after {len(self.generated)} tokens none may be chosen: the mask allows none but "
                f"those that are suppressed or would end the row before min_tokens {s.min_tokens}"
            )
        if s.min_p and s.temperature > 0:
            row.masked_fill_(weights_of(row[None], s)[0] < s.min_p, -math.inf)
        return row

    @cached_property
    def _biased(self) -> torch.Tensor | None:
        return _index([token for token, _ in self.settings.logit_bias])

    @cached_property
    def _biases(self) -> torch.Tensor:
        import torch

        return torch.tensor([bias for _, bias in self.settings.logit_bias], dtype=torch.float32)

    @cached_property
    def _suppressed(self) -> torch.Tensor | None:
        return _index(self.settings.suppress)

    @cached_property
    def _stopping(self) -> torch.Tensor | None:
        return _index(sorted(self.stops))

    def _penalise(self, row: torch.Tensor) -> None:
        if self._history is None:
            self._history = _History(row, self.prompt)
        self._history.follow(self.generated)
        s, h = self.settings, self._history
        factor = s.repetition_penalty
        if factor != 1:
            row.copy_((row / factor).where(row > 0, row * factor).where(h.seen, row))
        row -= s.frequency_penalty * h.counts + s.presence_penalty * (h.counts > 0)


class _History:
    """Which tokens a row has seen, and how often it generated each; where its logits lie."""

    def __init__(self, row: torch.Tensor, prompt: Sequence[int]) -> None:
        import torch

        self.counts = torch.zeros_like(row)
        self.seen = torch.zeros_like(row, dtype=torch.bool)
        self.seen[torch.tensor(prompt, dtype=torch.int64, device=row.device)] = True
        self.followed = 0

    def follow(self, generated: Sequence[int]) -> None:
        """Count what is new."""
        for token in generated[self.followed :]:
            self.counts[token] += 1
            self.seen[token] = True
        self.followed = len(generated)


def choose_rows(
    logits: torch.Tensor, samplers: Mapping[int, RowSampler]
) -> dict[int, Choice | Exception | None]:
    """Choose a token for some rows of logits [B, vocab], as each alone would. None for a row whose
    logits are NaN or infinite; an exception where a row's own settings leave nothing, or its mask
    raised it."""
    import torch

    # NaN goes through both; much faster than to look at each.
    finite_rows = logits.amin(-1).isfinite() & logits.amax(-1).isfinite()
    best, finite = torch.stack((logits.argmax(-1), finite_rows.long())).tolist()
    out: dict[int, Choice | Exception | None] = {}
    groups: dict[Any, dict[int, torch.Tensor]] = {}
    tokens: dict[int, int] = {}
    for i, sampler in samplers.items():
        out[i] = None
        if finite[i] and sampler.takes(best[i]):
            tokens[i] = best[i]
        elif finite[i]:
            try:
                groups.setdefault(_group(i, sampler.settings), {})[i] = sampler.shaped(logits[i])
            except Exception as e:  # the mask is the caller's
                out[i] = e
    for rows in groups.values():
        tokens |= _drawn(rows, samplers)
    for i, token in tokens.items():
        count = samplers[i].settings.logprobs
        read = None if count is None else read_logprobs(logits[i], token, count)
        samplers[i].generated.append(token)
        out[i] = Choice(token, read)
    return out


def _group(row: int, s: RowSampling) -> tuple[Any, ...]:
    """Return what rows that are drawn together have in common. Without top_k a row is alone: the
    sum of a whole row is rounded in another way beside others."""
    alone = s.temperature > 0 and s.top_k is None
    return (s.temperature, s.top_k, s.top_p, row if alone else None)


def _drawn(rows: Mapping[int, torch.Tensor], samplers: Mapping[int, RowSampler]) -> dict[int, int]:
    """Return the tokens of rows of one group."""
    import torch

    logits = torch.stack([*rows.values()])
    s = samplers[next(iter(rows))].settings
    if s.temperature == 0:
        found = logits.argmax(-1)
    else:
        numbers = torch.cat([samplers[i].uniforms() for i in rows])
        found = choose(logits, numbers.to(logits.device), s)
    return dict(zip(rows, found.tolist(), strict=True))


def read_logprobs(logits: torch.Tensor, token: int, count: int) -> Logprobs:
    """Return log-probabilities of raw logits [vocab]: the token's and the `count` largest."""
    import torch

    row = logits.float()
    whole = row.double().logsumexp(-1)
    values, index = largest(row[None], min(count, len(row)))
    read = (torch.cat((row[token][None], values[0])).double() - whole).tolist()
    return Logprobs(read[0], tuple(zip(index[0].tolist(), read[1:], strict=True)))


def bits(mask: Any, vocab: int) -> torch.Tensor:
    """Return bool [vocab] of what `Allowed.mask` returns; InputError where it is neither."""
    import torch

    t = torch.as_tensor(mask)
    words = -(-vocab // 32)
    if t.dtype == torch.bool and t.shape == (vocab,):
        return t
    if t.dtype == torch.int32 and t.dim() == 1 and len(t) >= words:
        each = t[:words, None] >> torch.arange(32, dtype=torch.int32, device=t.device)
        return (each & 1).bool().reshape(-1)[:vocab]
    raise InputError(
        f"mask: found {str(t.dtype).removeprefix('torch.')} {list(t.shape)}; expected bool "
        f"[{vocab}], or int32 [{words}] with a bit for each token"
    )


def _shown(value: float) -> str:
    return str(value)[:20]


def _index(ids: Sequence[int]) -> torch.Tensor | None:
    import torch

    return torch.tensor(ids, dtype=torch.int64) if ids else None
