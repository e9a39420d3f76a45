"""Ops of the vision tower: patches, their 2D positions, pooling (rules 26 to 29).

Patches are [B,P,D] with positions i64[B,P,2], (x, y), x the column; padding is at (-1, -1).
"""

from __future__ import annotations

from typing import Any

from .attention import attend, require_groups
from .base import Traffic, cases, op, per_input, per_result, require, upcast
from .budgets import MOVES, Budget
from .rope import inverse_frequencies, rotate_half
from .types import FLOATS, ITEMSIZE, Type, Types, torch, torch_dtype


def _require_positions(name: str, positions: Type, x: Type | None = None) -> None:
    fits = positions.dtype == "i64" and positions.rank == 3 and positions.shape[2] == 2
    require(fits, f"{name}: {positions} is not i64[B,P,2]; {x or ''}")
    fits = x is None or positions.shape[:2] == x.shape[:2]
    require(fits, f"{name}: positions {positions} do not fit {x}")


@op
class centre_pixels:
    """2 * (pixels - 0.5) in fp32, then cast to `dtype` (rule 26)"""

    budget = Budget(1, 0, "a product and a difference in fp32, rounded once")
    kind = "embed"

    @staticmethod
    def infer(x: Type, *, dtype: str) -> Type:
        fits = x.dtype in FLOATS and dtype in FLOATS
        require(fits, f"centre_pixels: {x} to {dtype}: expected floats")
        return Type(dtype, x.shape)

    @staticmethod
    def reference(x: Any, *, dtype: str) -> Any:
        return (2 * (upcast(x) - 0.5)).to(torch_dtype(dtype))

    samples = cases("f32[1,5,12]", dtype="f64")


@op
class valid_patches:
    """bool [B, P]: False for padding"""

    budget = MOVES
    kind = "other"

    @staticmethod
    def infer(positions: Type) -> Type:
        _require_positions("valid_patches", positions)
        return Type("bool", positions.shape[:2])

    @staticmethod
    def reference(positions: Any) -> Any:
        return (positions != -1).any(-1)

    samples = cases("i64[1,7,2]@-1:3")


@op
class axial_embedding:
    """table_x[x] + table_y[y], rounded to their dtype; 0 for padding (rules 26, 42)

    The table holds both axes: [2, N, D] with `axis` 0, [N, 2, D] with `axis` 1.
    """

    budget = Budget(1, 0, "one sum of two rows, rounded once")
    kind = "embed"
    fold = False

    @staticmethod
    def infer(table: Type, positions: Type, *, axis: int) -> Type:
        fits = axis in (0, 1) and table.rank == 3 and table.shape[axis] == 2
        require(fits, f"axial_embedding: {table} has no two tables along axis {axis}")
        out = Type(table.dtype, (*positions.shape[:2], table.shape[2]))
        _require_positions("axial_embedding", positions, out)
        return out

    @staticmethod
    def reference(table: Any, positions: Any, *, axis: int) -> Any:
        at = positions.clamp(min=0)
        x, y = (t[at[..., i]] for i, t in enumerate(table.unbind(axis)))
        return (x + y).masked_fill((positions == -1).all(-1)[..., None], 0)

    @staticmethod
    def traffic(ins: Types, outs: Types, **_: Any) -> Traffic:
        """Count only the gathered rows."""
        rows = outs[0].nbytes()
        return (2 * rows, ins[1].nbytes()), (rows,)

    samples = cases("f32[2,9,8] i64[1,7,2]@-1:9 {axis=0}", "f32[9,2,8] i64[1,7,2]@0:9 {axis=1}")


@op
class axial_rope_table:
    """cos, sin [B, P, dim] of x and y times inverse frequencies over dim / 2; fp32, then cast

    Laid out x x y y, each a quarter of the head; padding keeps its position -1 (rule 28).
    """

    budget = Budget(1, 4, "cos and sin in fp32, rounded once")
    kind = "other"

    @staticmethod
    def infer(positions: Type, *, theta: float, dim: int, dtype: str) -> tuple[Type, Type]:
        _require_positions("axial_rope_table", positions)
        require(dim > 0 and dim % 4 == 0, f"axial_rope_table: dim {dim}: expected a multiple of 4")
        require(theta > 0, f"axial_rope_table: theta {theta} is not positive")
        table = Type(dtype, (*positions.shape[:2], dim))
        return table, table

    @staticmethod
    def reference(positions: Any, *, theta: float, dim: int, dtype: str) -> tuple[Any, Any]:
        table = inverse_frequencies("default", theta, dim // 2, 1.0, 1.0).to(positions.device)
        x, y = (positions[..., i].float()[..., None] * table for i in (0, 1))
        angles = torch.cat((x, x, y, y), -1)
        return angles.cos().to(torch_dtype(dtype)), angles.sin().to(torch_dtype(dtype))

    samples = cases("i64[1,5,2]@-1:60", theta=100.0, dim=8, dtype="f32")


@op
class axial_rope:
    """RoPE of each half of the head by one axis: x * cos + rotate_half(x) * sin, three roundings;
    x is [B, P, n, d] (rule 28)"""

    budget = Budget(2, 0, "two products and their sum, each rounded")
    kind = "other"
    rows = (0, 1, 2)

    @staticmethod
    def infer(x: Type, cos: Type, sin: Type) -> Type:
        want = x.with_shape(*x.shape[:2], x.shape[-1])
        fits = x.rank == 4 and cos == sin == want
        require(fits, f"axial_rope: tables {cos}, {sin} do not fit {x}")
        return x

    @staticmethod
    def reference(x: Any, cos: Any, sin: Any) -> Any:
        turned = torch.cat([rotate_half(half) for half in x.chunk(2, -1)], -1)
        return x * cos.unsqueeze(2) + turned * sin.unsqueeze(2)

    flops = per_result(3)
    samples = cases("f32[1,3,4,8] 2*f32[1,3,8]")


@op
class encoder_attention:
    """softmax(q k^T * scale over valid keys) v, every query (rule 27)

    q [B,P,nq,d]; k, v [B,P,n,d]; valid bool[B,P]. Scores, probabilities and output are rounded to
    q's dtype, softmax is fp32. A query without a valid key yields a finite value, never read.
    """

    budget = Budget(4, 512, "scores, weights and output are rounded, sums reordered")
    kind = "kv"

    @staticmethod
    def infer(q: Type, k: Type, v: Type, valid: Type, *, scale: float) -> Type:
        require(q.rank == k.rank == 4 and k == v, f"encoder_attention: {q}, {k}, {v} do not fit")
        b, p, heads, d = q.shape
        n = k.shape[2]
        fits = k == Type(q.dtype, (b, p, n, d)) and valid == Type("bool", (b, p))
        require(fits, f"encoder_attention: k {k}, valid {valid} do not fit q {q}")
        require_groups("encoder_attention", heads, n)
        return q

    @staticmethod
    def reference(q: Any, k: Any, v: Any, valid: Any, *, scale: float) -> Any:
        return attend(q, k, v, valid[:, None, None, None], scale)

    @staticmethod
    def flops(ins: Types, outs: Types, **_: Any) -> int:
        """Count two matmuls over all keys."""
        return 4 * outs[0].numel() * int(ins[1].shape[1])

    samples = cases(
        "3*f32[1,6,4,8] bool[1,6] {scale=1.0}", "f32[2,6,4,8] 2*f32[2,6,2,8] bool[2,6] {scale=0.5}"
    )


@op
class pool_patches:
    """The mean of every k x k square of patches, times `root`: fp32 [B, P / k^2, D] (rule 29)

    x [B,P,D] with zeros for padding. Squares are in row-major order of an image whose width is its
    largest x + 1; those beyond the image are 0. Sums are fp32, means are rounded to x's dtype, and
    the product is fp32 again.
    """

    budget = Budget(2, 64, "a mean in fp32, rounded once; the product with the root is fp32")
    kind = "other"

    @staticmethod
    def infer(x: Type, positions: Type, *, k: int, root: float) -> Type:
        _require_positions("pool_patches", positions, x)
        size = x.shape[1]
        fits = x.rank == 3 and isinstance(size, int) and k > 0 and int(size) % k**2 == 0
        require(fits, f"pool_patches: {x} is not made of squares of {k} x {k}")
        dtype = "f64" if x.dtype == "f64" else "f32"
        return Type(dtype, (x.shape[0], int(size) // k**2, x.shape[2]))

    @staticmethod
    def reference(x: Any, positions: Any, *, k: int, root: float) -> Any:
        at = positions.clamp(min=0)
        width = at[..., 0].amax(-1, keepdim=True) + 1
        square = at[..., 0] // k + width // k * (at[..., 1] // k)
        squares = torch.arange(x.shape[1] // k**2, device=x.device)
        share = upcast(x.new_zeros(())).new_full((), 1 / k**2)
        weights = torch.where(square[:, None] == squares[:, None], share, 0)
        return upcast((weights @ upcast(x)).to(x.dtype)) * root

    flops = per_input(1)

    @staticmethod
    def workspace(ins: Types, outs: Types, *, k: int, **_: Any) -> int:
        """Count the pooling matrix and the patches in fp32."""
        _batch, patches, width = map(int, ins[0].shape)
        return ITEMSIZE["f32"] * patches * (patches // k**2 + width)

    samples = cases(
        "f32[1,16,8] i64[1,16,2]@-1:4 {k=2, root=2.0}", "f32[2,9,8] i64[2,9,2]@0:3 {k=3, root=1.0}"
    )


@op
class standardize:
    """(x - bias) * scale, all in fp32; x [..., D], bias and scale [D] (rule 29)"""

    budget = Budget(0, 8, "a difference and a product, all in fp32")
    kind = "other"

    @staticmethod
    def infer(x: Type, bias: Type, scale: Type) -> Type:
        fits = bias == scale and bias.shape == x.shape[-1:] and x.dtype in FLOATS
        require(fits, f"standardize: {bias}, {scale} do not fit {x}")
        return Type("f64" if x.dtype == "f64" else "f32", x.shape)

    @staticmethod
    def reference(x: Any, bias: Any, scale: Any) -> Any:
        return (upcast(x) - upcast(bias)) * upcast(scale)

    samples = cases("f32[1,3,8] 2*f32[8]")
