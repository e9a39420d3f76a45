"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

from .base import cases, op, per_result, require
from .budgets import Budget
from .types import Type, torch, torch_dtype

#: attributes of RoPE: which pairs of dims are rotated, the base of the frequencies, the fraction of
#: pairs, the divisor of frequencies, the dtype of the tables
ROTATION = {"kind": "str", "theta": "float", "fraction": "float", "factor": "float", "dtype": "str"}


def rotated_pairs(kind: str, dim: int, fraction: float) -> int:
    """Count the pairs (j, j + dim / 2) that are rotated, the first ones: all of them, or
    int(fraction * dim // 2) for kind `proportional` (rule 14)."""
    return int(fraction * dim // 2) if kind == "proportional" else dim // 2


def inverse_frequencies(kind: str, theta: float, dim: int, fraction: float, factor: float) -> Any:
    """Return fp32 [dim / 2]: theta^(-2j/dim) / factor; zero for the pairs that are not rotated
    (rule 14)."""
    j = torch.arange(0, dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / (theta ** (j / dim))
    frequencies[rotated_pairs(kind, dim, fraction) :] = 0.0
    return frequencies / factor


@op
class rope_table:
    """cos, sin of positions * inverse_frequencies, [B, S, dim]; fp32, then cast to `dtype`"""

    budget = Budget(1, 4, "cos and sin in fp32, rounded once")
    kind = "other"
    rows = (0,)
    attrs = ROTATION | {"dim": "int"}

    @staticmethod
    def infer(positions: Type, *, dim: int, **rotation: Any) -> tuple[Type, Type]:
        kind, theta, _, factor, dtype = (rotation[name] for name in ROTATION)
        require(
            positions.dtype == "i64" and positions.rank == 2,
            f"rope_table: expected positions i64[B,S], found {positions}",
        )
        kinds = ("default", "proportional")
        require(kind in kinds, f"rope_table: kind {kind!r}: expected {' or '.join(kinds)}")
        require(dim > 0 and dim % 2 == 0, f"rope_table: dim {dim} is not even and positive")
        bounds = f"rope_table: theta {theta}, factor {factor}: expected more than 0"
        require(theta > 0 and factor > 0, bounds)
        table = Type(dtype, (*positions.shape, dim))
        return table, table

    @staticmethod
    def reference(positions: Any, *, dim: int, **rotation: Any) -> tuple[Any, Any]:
        kind, theta, fraction, factor, dtype = (rotation[name] for name in ROTATION)
        table = inverse_frequencies(kind, theta, dim, fraction, factor).to(positions.device)
        angles = positions.float()[..., None] * table
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(torch_dtype(dtype)), angles.sin().to(torch_dtype(dtype))

    samples = cases(
        "i64[2,5]@0:4000 {kind='default', theta=10000.0, dim=8, fraction=1.0, factor=1.0}",
        "i64[2,5]@0:4000 {kind='proportional', theta=1000000.0, dim=32, fraction=0.25, factor=2.0}",
        dtype="f32",
    )


def rotate_half(x: Any) -> Any:
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)


@op
class rope:
    """x * cos + rotate_half(x) * sin in x's dtype, three roundings; x is [B, S, n, d] (rule 14)"""

    budget = Budget(2, 0, "two products and their sum, each rounded")
    kind = "other"
    rows = (0, 1, 2)

    @staticmethod
    def infer(x: Type, cos: Type, sin: Type) -> Type:
        want = x.with_shape(*x.shape[:2], x.shape[-1])
        require(x.rank == 4 and cos == sin == want, f"rope: tables {cos}, {sin} do not fit {x}")
        return x

    @staticmethod
    def reference(x: Any, cos: Any, sin: Any) -> Any:
        return x * cos.unsqueeze(2) + rotate_half(x) * sin.unsqueeze(2)

    flops = per_result(3)
    samples = cases("f32[2,3,4,8] 2*f32[2,3,8]")


@op
class norm_rope:
    """rope(rms_norm(x, w), cos, sin): the per-head norm of Q or K and its rotation (rule 12)"""

    budget = Budget(2, 16, "as rms_norm, then as rope")
    kind = "other"
    rows = (0, 2, 3)

    @staticmethod
    def expand(b: Any, x: Any, w: Any, cos: Any, sin: Any, *, eps: float) -> Any:
        return b.emit("rope", b.emit("rms_norm", x, w, eps=eps), cos, sin)

    flops = per_result(7)
    samples = cases("f32[2,3,4,8] f32[8] 2*f32[2,3,8]", eps=1e-06)
