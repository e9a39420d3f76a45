"""The comparator: values of two computations, and the tokens that their logits choose.

`verify` judges positions, verification steps, greedy tokens and media by it, `bench` the logits of
a request, on one rank or several; `--each-pass` measures values inside by `local_errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from g4ir.engine.engine import Engine
from g4ir.ir.distance import Anchor, Errors, Tolerance, judge, row_errors

from .peers import EnginePeer, Peer
from .reference import coarse, reference_engine
from .tokens import Turns

Tensor = torch.Tensor
#: values compared at once, in float64
BLOCK = 1 << 24


@dataclass(frozen=True, eq=False)
class Agreement:
    """Errors of rows [N, n] of one side against the reference's, and their tolerance."""

    errors: Errors
    tolerance: Tolerance

    @property
    def ok(self) -> bool:
        """Whether each row is within the tolerance, and the rows as a whole."""
        return self.tolerance.all_hold(self.errors)

    def worst(self) -> dict[str, Any]:
        """Return `relative` and `cosine` of the worst rows, the tolerance as `budget`, and `ok`."""
        relative, cosine = float(self.errors.relative.max()), float(self.errors.cosine.min())
        return {"relative": relative, "cosine": cosine, "budget": self.tolerance, "ok": self.ok}


def compare_rows(
    tolerance: Tolerance,
    dtype: str,
    sides: Sequence[Tensor],
    want: Tensor,
    *,
    anchor: Callable[[], Anchor | None],
    rounding: Callable[[], float],
) -> list[Agreement]:
    """Compare each side's rows [N, n] with the reference's `want`, all within one tolerance: the
    given one, or what `judge` measures with `anchor` and `rounding` (ir/distance.py)."""
    tolerance, errors = judge(tolerance, dtype, sides, want, anchor=anchor, rounding=rounding)
    return [Agreement(e, tolerance) for e in errors]


def compare_choices(tokens: Tensor, want: Tensor, tolerance: Tolerance) -> tuple[Tensor, Tensor]:
    """Compare chosen tokens i64[N] with the best ones of the reference's logits [N, vocab]. Return
    bool[N] equal, and bool[N] close: differs, but the reference's logits of the two tokens lie
    within the tolerance of each other."""
    best, chosen = want.argmax(-1, keepdim=True), tokens[:, None]
    gap = (want.gather(1, best) - want.gather(1, chosen))[:, 0]
    equal = (chosen == best)[:, 0]
    return equal, ~equal & (gap <= tolerance.gap * want.pow(2).mean(-1).sqrt())


def find_anchor(
    peer: Peer, requests: Sequence[Turns], want: Tensor, refusal: str | None
) -> Anchor | None:
    """Return what distances of a batch are measured from: the peer in float64, rows of logits one
    request after the other; if that is refused its own rows `want`, and the other mode alone. None
    where the other mode says nothing: the interpreter's makes nearly the same roundings."""
    if refusal and isinstance(peer, EnginePeer):
        return None
    other = torch.cat([peer.other(turns).cpu() for turns in requests])
    if refusal:
        return Anchor("its other mode", want, [other], refusal)
    exact = torch.cat([peer.in_float64(turns).cpu() for turns in requests])
    return Anchor("float64", exact, [other])


def rounding_error(engine: Engine, turns: Turns) -> float:
    """Return how far rounding alone moves this model's logits (relative to the row's rms): the
    interpreter in fp32 against the interpreter in float64. Random weights can make a model in which
    it grows from layer to layer. An engine that rounds to a coarse grid is also run token by token:
    each mode rounds other values to the other side."""
    reference = EnginePeer(reference_engine(engine))
    exact = reference.in_float64(turns)
    modes = [reference.logits, *([reference.other] if coarse(engine) else [])]
    return max(float(row_errors(mode(turns), exact).relative.max()) for mode in modes)


def local_errors(got: Tensor, want: Tensor) -> Tensor:
    """[..., n] -> f64[...]: largest difference of each row, relative to the larger of the wanted
    value and its row's rms. Rows near zero count relative to the whole tensor. NaN stays NaN."""
    size = want.shape[-1]
    rows = max(1, BLOCK // size)
    blocks, wanted = (t.detach().reshape(-1, size).split(rows) for t in (got, want))
    squares = sum(float(t.double().pow(2).sum()) for t in wanted)
    floor = 1e-3 * math.sqrt(squares / want.numel()) + 1e-30
    errors = [_block_errors(a, b, floor) for a, b in zip(blocks, wanted, strict=True)]
    return torch.cat(errors).view(want.shape[:-1])


def _block_errors(got: Tensor, want: Tensor, floor: float) -> Tensor:
    got, want = got.cpu().double(), want.cpu().double()
    rms = want.pow(2).mean(-1, keepdim=True).sqrt()
    return ((got - want).abs() / want.abs().maximum(rms).clamp(min=floor)).amax(-1)
