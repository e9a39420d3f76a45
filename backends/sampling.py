"""Sampling: from logits to the next token."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from g4ir.errors import InputError

if TYPE_CHECKING:
    import torch

#: of a choice by top_p alone, the host sorts so many first: they nearly always hold enough
FEW = 1024


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. `suppress` are token ids that are never chosen."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    suppress: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= sys.float_info.max:
            raise InputError(f"temperature {self.temperature}: expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k {self.top_k}: expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p}: expected a share in (0, 1]")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise InputError(f"seed {self.seed}: expected 0 to 2^63 - 1")


class Sampler:
    """Draws tokens; two samplers of the same seed draw the same. Each draw of a row uses up one
    random number, so that a device that is given the numbers draws the same as the host."""

    def __init__(self, settings: Sampling) -> None:
        import torch

        self.settings = settings
        self.generator = torch.Generator()
        if settings.seed is not None:
            self.generator.manual_seed(settings.seed)
        else:
            self.generator.seed()

    def uniforms(self, rows: int) -> torch.Tensor:
        """Return the next random numbers, float64 [rows] in [0, 1)."""
        import torch

        return torch.rand(rows, dtype=torch.float64, generator=self.generator)

    def next(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose tokens, [B, vocab] -> int64 [B], chosen where the logits lie. Greedy takes the
        lowest of equal maxima."""
        greedy = self.settings.temperature == 0
        return self.pick(logits, None if greedy else self.uniforms(len(logits)))

    def pick(self, logits: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
        """Choose tokens as `next`, with a random number for each row; None: greedily."""
        import torch

        s = self.settings
        logits = logits.float()
        if s.suppress:
            never = torch.tensor(s.suppress, device=logits.device)
            logits = logits.index_fill(-1, never, float("-inf"))
        if uniforms is None:
            return logits.argmax(-1)
        return choose(logits, uniforms.to(logits.device), s)


def choose(logits: torch.Tensor, uniforms: torch.Tensor, s: Sampling) -> torch.Tensor:
    """Choose a token for each row of float32 [B, vocab], int64 [B], with its random number in [0,
    1). Nothing is looked at by the host where the logits lie on a device."""
    vocab = logits.shape[-1]
    if s.top_k is not None:
        return draw(*largest(logits, min(s.top_k, vocab)), uniforms, s)
    if s.top_p is None:  # no need to know which are the largest
        return draw(logits, None, uniforms, s)
    if not logits.is_cuda and vocab > FEW:
        whole = weights_of(logits, s).sum(-1, keepdim=True)
        values, index = largest(logits, FEW)
        if bool((weights_of(values, s).sum(-1, keepdim=True) >= s.top_p * whole).all()):
            return draw(values, index, uniforms, s, whole)
    return draw(*largest(logits, vocab), uniforms, s)


def largest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of each row of float32 [B, vocab] in descending order, equal ones by
    lower token first: values [B, k] and tokens int64 [B, k]."""
    import torch

    vocab = logits.shape[-1]
    if k > vocab // 8:
        values, index = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :k], index[:, :k]
    if k and not logits.is_cuda:
        values, index = logits.topk(k)
        if bool(((logits >= values[:, -1:]).sum(-1) == k).all()):  # it is clear which they are
            index = index.sort(-1).values
            values, order = logits.gather(-1, index).sort(dim=-1, descending=True, stable=True)
            return values, index.gather(-1, order)
    # topk promises no order of equal values, so a key holds value and token. Bits of floats are in
    # order as whole numbers, negative ones backwards; adding 0 makes -0 the 0 that it equals.
    bits = (logits + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) + torch.arange(vocab - 1, -1, -1, device=logits.device)
    index = vocab - 1 - (keys.topk(k).values & 0xFFFFFFFF)
    return logits.gather(-1, index), index


def draw(
    values: torch.Tensor,
    index: torch.Tensor | None,
    uniforms: torch.Tensor,
    s: Sampling,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one of the candidates of each row, int64 [B]: the first at which the sum of
    probabilities exceeds the row's random number in [0, 1).

    values [B, k] are logits, at least one of them finite; index int64 [B, k] their ids (default:
    their places). top_p wants them in descending order. The probabilities are those of the k
    candidates alone; `whole` [B, 1] counts more of them for top_p (see `weights_of`).
    """
    import torch

    weights = weights_of(values, s)
    edges = weights.cumsum(-1)
    if s.top_p is not None:
        whole = edges[:, -1:] if whole is None else whole
        edges = weights.where(edges - weights < s.top_p * whole, 0.0).cumsum(-1)
    # A number next to 1 may round to the last edge: it means the last token that can be drawn.
    end = edges[:, -1:]
    wanted = (uniforms[:, None] * end).minimum(torch.nextafter(end, torch.zeros_like(end)))
    at = torch.searchsorted(edges, wanted, right=True)
    at = at.clamp(max=values.shape[-1] - 1)  # of logits that are not numbers
    return at[:, 0] if index is None else index.gather(-1, at)[:, 0]


def weights_of(values: torch.Tensor, s: Sampling) -> torch.Tensor:
    """Return probabilities in float64 up to a factor, which is the same for all that begin with, or
    contain, the largest."""
    # The largest becomes 0 before the division, so that no temperature overflows.
    return ((values - values.amax(-1, keepdim=True)).double() / float(s.temperature)).exp()
