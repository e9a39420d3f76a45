"""Elementwise ops, softcap, and the selection of tokens of a chunk."""

from __future__ import annotations

from typing import Any

from .base import cases, free, gathered, op, require
from .budgets import MOVES, Budget
from .types import FLOATS, Type, torch, torch_dtype


@op
class add:
    """a + b, rounded to their dtype"""

    budget = Budget(1, 0, "one sum, rounded once")
    kind = "other"
    rows = (0, 1)

    @staticmethod
    def infer(a: Type, b: Type) -> Type:
        require(a == b, f"add: {a} and {b} differ")
        return a

    @staticmethod
    def reference(a: Any, b: Any) -> Any:
        return a + b

    samples = cases("2*f32[2,3,8]")


@op
class mul:
    """x * w, w [1] or [D] for x [..., D] (layer scalar: rule 9)"""

    budget = Budget(1, 0, "one product, rounded once")
    kind = "other"
    rows = (0,)

    @staticmethod
    def infer(x: Type, w: Type) -> Type:
        fits = w.rank == 1 and w.shape[0] in (1, x.shape[-1]) and w.dtype == x.dtype
        require(fits, f"mul: {w} does not fit {x}")
        return x

    @staticmethod
    def reference(x: Any, w: Any) -> Any:
        return x * w

    samples = cases("f32[2,3,8] f32[1]", "f32[2,3,8] f32[8]")


@op
class scale:
    """x * value: a Python float, so the factor is not rounded to x's dtype first (rules 3, 4)"""

    budget = Budget(1, 0, "one product, rounded once")
    rows = (0,)

    @staticmethod
    def infer(x: Type, *, value: float) -> Type:
        return x

    @staticmethod
    def reference(x: Any, *, value: float) -> Any:
        return x * value

    samples = cases("f32[2,3,8]", value=0.7071067811865476)


@op
class softcap:
    """tanh(x / cap) * cap in x's dtype, three roundings (rule 22)"""

    budget = Budget(2, 0, "quotient, tanh and product, each rounded")
    rows = (0,)

    @staticmethod
    def infer(x: Type, *, cap: float) -> Type:
        require(cap > 0, f"softcap: cap {cap} is not positive")
        return x

    @staticmethod
    def reference(x: Any, *, cap: float) -> Any:
        return torch.tanh(x / cap) * cap

    samples = cases("f32[2,3,8]", cap=30.0)


@op
class clip:
    """clamp(x, low, high); bounds are 0-d tensors in x's dtype (rule 27)"""

    budget = MOVES
    kind = "other"
    rows = (0,)

    @staticmethod
    def infer(x: Type, low: Type, high: Type) -> Type:
        require(low == high == x.with_shape(), f"clip: bounds {low}, {high} do not fit {x}")
        return x

    @staticmethod
    def reference(x: Any, low: Any, high: Any) -> Any:
        return x.clamp(low, high)

    samples = cases("f32[2,3,8] 2*f32[]")


@op
class limit:
    """clamp(x, -bound, bound), bound = min(most, largest finite value of x's dtype) (rule 34)"""

    budget = MOVES
    kind = "other"
    rows = (0,)

    @staticmethod
    def infer(x: Type, *, most: float) -> Type:
        require(
            x.dtype in FLOATS and most > 0,
            f"limit: expected floats and a bound above 0, found {x} and {most}",
        )
        return x

    @staticmethod
    def reference(x: Any, *, most: float) -> Any:
        bound = min(most, torch.finfo(x.dtype).max)
        return x.clamp(-bound, bound)

    samples = cases("f32[2,3,8]", most=0.5)


@op
class cast:
    """x in another dtype"""

    budget = Budget(1, 0, "one rounding and nothing else")
    kind = "other"
    rows = (0,)

    @staticmethod
    def infer(x: Type, *, dtype: str) -> Type:
        require(x.dtype in FLOATS and dtype in FLOATS, f"cast: {x} to {dtype}: expected floats")
        return Type(dtype, x.shape)

    @staticmethod
    def reference(x: Any, *, dtype: str) -> Any:
        return x.to(torch_dtype(dtype))

    flops = free
    samples = cases("f32[2,3,8]", dtype="f64")


@op
class last_row:
    """y[b, 0] = x[b, lengths[b] - 1], the last valid token; x[b, 0] if the sequence
    is empty (unused)"""

    budget = MOVES
    glue = True

    @staticmethod
    def infer(x: Type, lengths: Type) -> Type:
        fits = x.rank >= 2 and lengths == Type("i64", (x.shape[0],))
        require(fits, f"last_row: lengths {lengths} do not fit {x}")
        return x.with_shape(x.shape[0], 1, *x.shape[2:])

    @staticmethod
    def reference(x: Any, lengths: Any) -> Any:
        row = torch.arange(x.shape[0], device=x.device)
        return x[row, (lengths - 1).clamp(min=0)].unsqueeze(1)

    flops = free
    traffic = gathered
    samples = cases("f32[2,5,8] i64[2]@0:6")


@op
class pick_rows:
    """y[b, j] = x[b, rows[b, j]]"""

    budget = MOVES
    glue = True

    @staticmethod
    def infer(x: Type, rows: Type) -> Type:
        fits = x.rank >= 2 and rows.rank == 2 and rows.shape[0] == x.shape[0]
        require(fits and rows.dtype == "i64", f"pick_rows: rows {rows} do not fit {x}")
        return x.with_shape(*rows.shape, *x.shape[2:])

    @staticmethod
    def reference(x: Any, rows: Any) -> Any:
        return x[torch.arange(x.shape[0], device=x.device)[:, None], rows]

    flops = free
    traffic = gathered
    samples = cases("f32[2,5,8] i64[2,3]@0:5")


@op
class row_start:
    """start[b] = positions[b, 0]: cached tokens before this chunk"""

    budget = MOVES
    kind = "other"

    @staticmethod
    def infer(positions: Type) -> Type:
        require(
            positions.dtype == "i64" and positions.rank == 2,
            f"row_start: expected positions i64[B,S], found {positions}",
        )
        return positions.with_shape(positions.shape[0])

    @staticmethod
    def reference(positions: Any) -> Any:
        return positions[:, 0].contiguous()

    flops = free
    samples = cases("i64[2,5]@0:9")
