"""Sampling: from logits to the next token, by the settings of each sequence.

The order: biases, suppressed tokens and the logits mask; penalties; temperature; min_p; top_k;
top_p; the draw. Reported log-probabilities are those of the raw logits. The draw's random number is
a function of the sequence's seed and the token's index in the answer, so sampling from given logits
depends (but for rounding) neither on the rest of the batch, nor on speculative decoding, nor on
whether the host or the device does it.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch

from g4ir.errors import InputError

from .background_mask import BackgroundMask
from .background_mask import LogitsMask as LogitsMask  # re-exported

#: seeds are below this; a request without a seed gets a random one
SEEDS = 1 << 63
#: max top_k of the method TOP, which always selects and sorts this many logits
CANDIDATES = 64
#: for top_p without top_k, the host first sorts this many logits only: nearly always their
#: probabilities add up to top_p
FEW = 1024
#: SHORT: up to this many logits in a batch, a full sort is the fastest top-k. GROUP: tokens per
#: group of an argmax on a CPU
SHORT, GROUP = 4096, 512
#: max repetition penalty, and max absolute value of a bias and the other penalties: no logit
#: overflows float32
MAX_FACTOR = 1e9
#: sampling methods: argmax; from the top CANDIDATES; from all in order of id; from all, sorted
GREEDY, TOP, UNSORTED, SORTED = "greedy", "top", "unsorted", "sorted"
METHODS = (GREEDY, TOP, UNSORTED, SORTED)
#: columns of a `draws` tensor (`SamplingParams.draw`)
TEMPERATURE, TOP_K, TOP_P, METHOD = range(4)
#: top_p that keeps every token: 1 would drop tokens whose probability is lost in the cumulative
#: sum's rounding
ALL = 2.0
#: (min, max, text for errors) of biases and additive penalties
ADDED = (-MAX_FACTOR, MAX_FACTOR, f"-{MAX_FACTOR:g} to {MAX_FACTOR:g}")
#: (setting, min, max, text for errors). An additive penalty has a colon after the name, which the
#: error prints: `presence_penalty: -2e9`
LIMITS: tuple[tuple[Any, ...], ...] = (
    ("temperature", 0, sys.float_info.max, "0 (greedy) or more, finite"),
    ("top_k", -1, math.inf, "at least 1, or 0 or -1 for no limit"),
    ("top_p", math.nextafter(0, 1), 1, "a share in (0, 1]"),
    ("seed", 0, SEEDS - 1, "0 to 2^63 - 1"),
    ("min_p", 0, 1, "a share in [0, 1]"),
    ("presence_penalty:", *ADDED),
    ("frequency_penalty:", *ADDED),
    ("repetition_penalty", 1 / MAX_FACTOR, MAX_FACTOR, f"{1 / MAX_FACTOR:g} to {MAX_FACTOR:g}"),
    ("min_tokens", 0, math.inf, "0 or more"),
    ("logprobs", 0, math.inf, "0 or more"),
)
#: values with which a setting limits nothing, as if it were not set
UNLIMITED = {"top_k": (0, -1), "top_p": (1,)}
#: settings that are whole numbers
INTEGERS = ("top_k", "seed", "min_tokens", "logprobs")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one sequence; None: not set. InputError if a setting of LIMITS or a bias
    has another type or is out of range. temperature 0 is greedy; `suppress` are token ids that are
    never chosen.

    presence_penalty is subtracted from the logits of generated tokens, frequency_penalty once for
    each occurrence; repetition_penalty divides positive logits of tokens of prompt and answer, and
    multiplies negative ones. min_p: min probability, as a share of the largest. logit_bias:
    (token, bias), the bias is added to the token's logit. `allowed` is a logits mask. The sequence
    ends at a stop token: one of `stop`, or unless `ignore_eos` one of the checkpoint's stop ids; no
    stop token is chosen before `min_tokens` are generated. logprobs: how many of the most probable
    tokens are reported, besides the chosen one.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    suppress: tuple[int, ...] = ()
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed: LogitsMask | None = field(default=None, compare=False)
    stop: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        settings = [(name, getattr(self, name.rstrip(":")), *limits) for name, *limits in LIMITS]
        settings += [(f"logit_bias of token {t}:", bias, *ADDED) for t, bias in self.logit_bias]
        for name, value, low, high, expected in settings:
            if value is None and getattr(SamplingParams, name.rstrip(":"), 0) is None:
                continue  # not set
            kind, text = (Integral, "a whole number") if name in INTEGERS else (Real, "a number")
            if not isinstance(value, kind):
                raise InputError(f"{name} {value!r:.20}: expected {text}")
            if not low <= value <= high:
                raise InputError(f"{name} {str(value)[:20]}: expected {expected}")
        for name, values in UNLIMITED.items():
            if getattr(self, name) in values:
                object.__setattr__(self, name, None)

    @property
    def penalises(self) -> bool:
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0, 0, 1)

    @property
    def changes(self) -> bool:
        """Whether a setting other than `suppress` and `min_tokens` can change the argmax."""
        return self.penalises or bool(self.logit_bias) or self.allowed is not None

    @property
    def method(self) -> str:
        """The sampling method, one of METHODS."""
        if self.temperature == 0:
            return GREEDY
        if self.top_k is not None and self.top_k <= CANDIDATES:
            return TOP
        return UNSORTED if self.top_k is None and self.top_p is None else SORTED

    @property
    def draw(self) -> tuple[float, float, float, float]:
        """Settings of a sequence's draw: a row of the `draws` tensor [B, 4]."""
        top_k = math.inf if self.top_k is None else self.top_k
        return (self.temperature or 1.0, top_k, self.top_p or ALL, METHODS.index(self.method))


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the raw logits: the chosen token's, and (token, log-probability) of the
    most probable ones, the largest first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Choice:
    token: int
    logprobs: Logprobs | None = None


#: a sampled token; the exception that the sequence's settings or logits mask raised; None: logits
#: are NaN or infinite
Drawn = Choice | Exception | None


_WORD = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) of a sequence's token `index`: SplitMix64, twice."""
    return (_mixed(_mixed(seed) + index) >> 11) * 2.0**-53


def _mixed(x: int) -> int:
    x = (x + 1) * 0x9E3779B97F4A7C15 & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def random_seed() -> int:
    """Return a seed for a request that has none; short enough to be typed again."""
    return secrets.randbits(32)


class Sampler:
    """Logits processors of one sequence and its generated tokens. `stops`: its stop tokens."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int] = (), stops: Collection[int] = ()
    ) -> None:
        self.params, self.prompt, self.stops = params, prompt, frozenset(stops)
        self.seed = random_seed() if params.seed is None else params.seed
        self.generated: list[int] = []
        self._mask = copy(params.allowed)
        self._never = frozenset(params.suppress)
        self._greedy = params.temperature == 0 and not params.changes
        self._biases = [torch.tensor(column) for column in zip(*params.logit_bias)]
        self._suppressed = torch.tensor(params.suppress, dtype=torch.int64)
        self._stopping = torch.tensor(sorted(self.stops), dtype=torch.int64)
        #: count of each token in the answer, [vocab] on the device of the logits; set with `_seen`
        #: (bool [vocab]: whether a token is in prompt or answer) when penalties are first applied
        self._counts: torch.Tensor | None = None
        #: number of generated tokens that `_counts` and `_seen` include
        self._followed = 0
        #: whether only `suppress`, temperature, top_k and top_p matter, so that a device can sample
        plain = not params.changes and params.logprobs is None and not params.min_p
        self.plain = plain and params.min_tokens == 0

    def uniform(self, ahead: int = 0) -> float:
        """Return the random number in [0, 1) of the token `ahead` positions after the next one."""
        return uniform(self.seed, len(self.generated) + ahead)

    def start_mask(self) -> None:
        """Start to compute the next token's mask, if it is computed in a thread."""
        if isinstance(self._mask, BackgroundMask):
            self._mask.start(self.generated)

    def mask_ready(self, timeout: float = 0.0) -> bool:
        """Whether the next token can be sampled without waiting for a thread that computes its
        logits mask, after the wait of `BackgroundMask.ready`."""
        mask = self._mask
        return not isinstance(mask, BackgroundMask) or mask.ready(self.generated, timeout)

    def takes(self, largest: int) -> bool:
        """Whether `largest`, the argmax of the raw logits, is sampled without processing the
        logits: greedy, and no processor could change it."""
        if not self._greedy or largest in self._never:
            return False
        return not (self._is_short and largest in self.stops)

    @property
    def _is_short(self) -> bool:
        return len(self.generated) < self.params.min_tokens

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [vocab] after all processors except temperature, top_k and top_p.
        InputError if no token is allowed; exceptions of the logits mask pass through."""
        if self.plain and not self._never:
            return logits.float()
        s, row = self.params, logits.to(torch.float32, copy=True)
        if self._biases:
            tokens, biases = self._biases
            row.index_add_(0, tokens.to(row.device), biases.to(row))
        row[self._suppressed.to(row.device)] = -math.inf
        if self._is_short:
            row[self._stopping.to(row.device)] = -math.inf
        allowed = self._mask.mask(self.generated) if self._mask else None
        if allowed is not None:
            row.masked_fill_(~bits(allowed, len(row)).to(row.device), -math.inf)
        if s.penalises:
            self._penalise(row)
        if float(row.amax()) == -math.inf:
            raise InputError(
                f"after {len(self.generated)} tokens no token is allowed: each is suppressed, "
                f"excluded by the logits mask, or a stop token before min_tokens "
                f"({s.min_tokens}): relax one of these"
            )
        if s.min_p and s.temperature > 0:
            weights = weights_of(row[None], s.temperature)[0]
            row.masked_fill_(weights < s.min_p, -math.inf)
        return row

    def _penalise(self, row: torch.Tensor) -> None:
        if self._counts is None:
            self._counts, self._seen = torch.zeros_like(row), torch.zeros_like(row).bool()
            self._seen[torch.tensor(self.prompt, dtype=torch.int64, device=row.device)] = True
        for token in self.generated[self._followed :]:
            self._counts[token] += 1
            self._seen[token] = True
        self._followed = len(self.generated)
        s, factor = self.params, self.params.repetition_penalty
        if factor != 1:
            row.copy_((row / factor).where(row > 0, row * factor).where(self._seen, row))
        row -= s.frequency_penalty * self._counts + s.presence_penalty * (self._counts > 0)


def sample(logits: torch.Tensor, samplers: Mapping[int, Sampler]) -> dict[int, Drawn]:
    """Sample a token for each sequence of `samplers` (row of the logits [B, vocab] -> sampler), and
    append it to the sampler's generated tokens. A row that fails appends none (see `Drawn`)."""
    # One NaN or infinite logit makes a row's sum NaN or infinite; one transfer from a device for
    # sums and argmax.
    sums = logits.sum(-1, dtype=torch.float32)
    best, sums = torch.stack((greatest(logits).double(), sums.double())).tolist()
    out: dict[int, Drawn] = dict.fromkeys(samplers)
    tokens: dict[int, int] = {}
    shaped: dict[int, torch.Tensor] = {}
    for i, sampler in samplers.items():
        if not math.isfinite(sums[i]):
            continue
        if sampler.takes(int(best[i])):
            tokens[i] = int(best[i])
            continue
        try:
            shaped[i] = sampler.shaped(logits[i])
        except Exception as e:  # a caller's mask may raise anything
            out[i] = e
    if shaped:
        tokens |= _drawn(shaped, samplers)
    for i, token in tokens.items():
        count = samplers[i].params.logprobs
        samplers[i].generated.append(token)
        out[i] = Choice(token, None if count is None else read_logprobs(logits[i], token, count))
    return out


def _drawn(shaped: Mapping[int, torch.Tensor], samplers: Mapping[int, Sampler]) -> dict[int, int]:
    """Sample from each sequence's processed logits [vocab]. Rows of the methods GREEDY and TOP are
    batched; others run alone, since the sum of a long row may round differently in a batch."""
    groups: dict[Any, list[int]] = {}
    for i in shaped:
        method = samplers[i].params.method
        groups.setdefault(method if method in (GREEDY, TOP) else i, []).append(i)
    out: dict[int, int] = {}
    for rows in groups.values():
        logits = torch.stack([shaped[i] for i in rows])
        uniforms, draws = (
            torch.tensor(values, dtype=torch.float64).to(logits.device)
            for values in zip(*((samplers[i].uniform(), samplers[i].params.draw) for i in rows))
        )
        sampled = choose(logits, uniforms, draws, samplers[rows[0]].params.method)
        out |= zip(rows, sampled.tolist(), strict=True)
    return out


def read_logprobs(logits: torch.Tensor, token: int, count: int) -> Logprobs:
    """Return log-probabilities from raw logits [vocab]: the token's and the `count` largest."""
    row = logits.float()
    values, index = largest(row[None], min(count, len(row)))
    both = torch.cat((row[token][None], values[0])).double()
    read = (both - row.double().logsumexp(-1)).tolist()
    return Logprobs(read[0], tuple(zip(index[0].tolist(), read[1:], strict=True)))


def bits(mask: Any, vocab: int) -> torch.Tensor:
    """Convert a mask that `LogitsMask.mask` returned to bool [vocab]; InputError for another dtype
    or shape."""
    t, words = torch.as_tensor(mask), -(-vocab // 32)
    if t.dtype == torch.bool and t.shape == (vocab,):
        return t
    if t.dtype == torch.int32 and t.dim() == 1 and len(t) >= words:
        each = t[:words, None] >> torch.arange(32, dtype=torch.int32, device=t.device)
        return (each & 1).bool().reshape(-1)[:vocab]
    expected = f"expected bool [{vocab}], or int32 [{words}] with a bit for each token"
    raise InputError(
        f"mask: found {str(t.dtype).removeprefix('torch.')} {list(t.shape)}; {expected}"
    )


def choose(
    logits: torch.Tensor, uniforms: torch.Tensor, draws: torch.Tensor, method: str
) -> torch.Tensor:
    """Sample a token int64 [B] for each row of float32 [B, vocab] by one of METHODS; `uniforms`
    f64[B]: random numbers, `draws` f64[B, 4]: settings (`SamplingParams.draw`). Greedy takes the
    lowest token of equal maxima. No synchronisation with the host if the logits are on a GPU."""
    vocab = logits.shape[-1]
    if method == GREEDY:
        return greatest(logits)
    if method == TOP:
        return draw(*largest(logits, min(CANDIDATES, vocab)), uniforms, draws)
    if method == UNSORTED:
        return draw(logits, None, uniforms, draws)
    if logits.is_cuda or vocab <= FEW:
        return draw(*largest(logits, vocab), uniforms, draws)
    if bool((draws[:, TOP_K] < vocab).any()):
        return draw(*largest(logits, int(draws[:, TOP_K].clamp(max=vocab).max())), uniforms, draws)
    temperature = draws[:, TEMPERATURE, None]
    total = weights_of(logits, temperature).sum(-1, keepdim=True)
    values, index = largest(logits, FEW)
    few = weights_of(values, temperature).sum(-1, keepdim=True)
    if bool((few >= draws[:, TOP_P, None] * total).all()):
        return draw(values, index, uniforms, draws, total)
    return draw(*largest(logits, vocab), uniforms, draws)


def greatest(logits: torch.Tensor) -> torch.Tensor:
    """Return the token of the largest logit of each row [B, vocab], the lowest of equal ones. On a
    CPU by groups of tokens, since amax is many times as fast as argmax."""
    if logits.is_cuda or logits.shape[-1] <= GROUP:
        return logits.argmax(-1)
    groups = _groups(logits, GROUP)
    group = groups.amax(-1).argmax(-1)
    return group * GROUP + groups[torch.arange(len(logits)), group].argmax(-1)


def largest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of each row of float32 [B, vocab] in descending order, of equal ones the
    lower token first: values [B, k] and tokens int64 [B, k]."""
    vocab = logits.shape[-1]
    if vocab <= 8 * k or logits.numel() <= SHORT:
        values, index = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :k], index[:, :k]
    if logits.is_cuda or not k:
        index = _first(logits, k)
        return logits.gather(-1, index), index
    # The k largest logits are in the k groups with the largest maxima.
    each = 1 << (vocab // k).bit_length() // 2
    groups = _groups(logits, each)
    nearby = _first(groups.amax(-1), k).sort(-1).values
    candidates = groups[torch.arange(len(logits))[:, None], nearby].flatten(1)
    index = _first(candidates, k)
    return candidates.gather(-1, index), nearby.gather(-1, index // each) * each + index % each


def _groups(logits: torch.Tensor, each: int) -> torch.Tensor:
    """Split rows [B, vocab] into groups of neighbours [B, groups, each]; the last is padded."""
    if padding := -logits.shape[-1] % each:
        logits = torch.nn.functional.pad(logits, (0, padding), value=-math.inf)
    return logits.unflatten(-1, (-1, each))


def _first(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the k largest values of each row of float32 in descending order, of
    equal values the lower index first."""
    # topk does not define the order of equal values, so a key holds value and index. Float bits are
    # ordered as integers, negative ones in reverse; adding 0 turns -0 into 0.
    bits = (values + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = values.shape[-1] - 1
    keys = (ordered << 32) + torch.arange(last, -1, -1, device=values.device)
    return last - (keys.topk(k).values & 0xFFFFFFFF)


def draw(
    values: torch.Tensor,
    index: torch.Tensor | None,
    uniforms: torch.Tensor,
    draws: torch.Tensor,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one of the candidates of each row, int64 [B]: the first at which the cumulative
    probability exceeds the row's random number in [0, 1).

    values [B, k] are logits in descending order, at least one of them finite, and index int64
    [B, k] their ids. Without `index` all tokens are candidates in the order of their ids, and top_k
    and top_p of `draws` f64[B, 4] are ignored. `total` [B, 1] is the sum of weights (`weights_of`)
    of which top_p is a share; default: that of the candidates that top_k leaves.
    """
    weights = weights_of(values, draws[:, TEMPERATURE, None])
    if index is not None:
        ranks = torch.arange(values.shape[-1], device=values.device)
        weights = weights.where(ranks < draws[:, TOP_K, None], 0.0)
    edges = weights.cumsum(-1)
    if index is not None:
        total = edges[:, -1:] if total is None else total
        edges = weights.where(edges - weights < draws[:, TOP_P, None] * total, 0.0).cumsum(-1)
    # A random number close to 1 may round to the last edge: take the last possible token.
    end = edges[:, -1:]
    targets = (uniforms[:, None] * end).minimum(torch.nextafter(end, torch.zeros_like(end)))
    at = torch.searchsorted(edges, targets, right=True)
    at = at.clamp(max=values.shape[-1] - 1)  # NaN logits
    return at[:, 0] if index is None else index.gather(-1, at)[:, 0]


def weights_of(values: torch.Tensor, temperature: Any) -> torch.Tensor:
    """Return unnormalised probabilities in float64, relative to the largest of `values`.
    `temperature`: a number, or f64[B, 1]."""
    # The largest becomes 0 before the division, so that no low temperature makes it infinite.
    return ((values - values.amax(-1, keepdim=True)).double() / temperature).exp()
