"""RMS normalisation, alone and fused with the residual adds around it."""

from __future__ import annotations

from typing import Any

from .base import cases, op, per_result, require, upcast
from .budgets import Budget
from .types import FLOATS, Type, Types, torch

#: attributes of a block's final norm; `scaled`: a layer scalar follows; `weighted`: one entry per
#: pre-norm that follows, whether it has a weight
NORM = {"eps": "float", "scaled": "bool", "weighted": "tuple[bool, ...]"}


def reciprocal_rms(h: Any, eps: float) -> Any:
    """Return (mean(h^2) + eps)^-0.5 over the last dim, kept as size 1 (rule 10)."""
    return (h.pow(2).mean(-1, keepdim=True) + eps).pow(-0.5)


@op
class one_plus:
    """1 + w in fp32: the weight of a norm that is stored as w

    Not in w's dtype: bf16 1 + w would drop low bits of a w near 0.
    """

    budget = Budget(1, 0, "one sum, rounded once")
    kind = "other"

    @staticmethod
    def infer(w: Type) -> Type:
        require(w.rank == 1 and w.dtype in FLOATS, f"one_plus: {w} is no weight of a norm")
        return Type("f64" if w.dtype == "f64" else "f32", w.shape)

    @staticmethod
    def reference(w: Any) -> Any:
        return 1 + upcast(w)

    samples = cases("f32[8]")


@op
class rms_norm:
    """y = x * (mean(x^2) + eps)^-0.5 [* w] over the last dim, in fp32, rounded once (rule 10)

    w is in x's dtype or in fp32; the product is computed in fp32.
    """

    budget = Budget(1, 16, "a mean of squares in fp32, then one rounding")
    kind = "other"
    rows = (0,)

    @staticmethod
    def infer(x: Type, w: Type | None = None, *, eps: float) -> Type:
        require(eps > 0, f"rms_norm: eps {eps} is not positive")
        if w is not None:
            fits = w.shape == x.shape[-1:] and w.dtype in (x.dtype, "f32")
            require(fits, f"rms_norm: weight {w} does not fit {x}")
        return x

    @staticmethod
    def reference(x: Any, w: Any = None, *, eps: float) -> Any:
        h = upcast(x)
        h = h * reciprocal_rms(h, eps)
        if w is not None:
            h = h * upcast(w)
        return h.to(x.dtype)

    flops = per_result(4)
    samples = cases("f32[2,3,33] f32[33]", "f32[2,3,4,8]", eps=1e-06)


@op
class norm_residual:
    """h = (residual + rms_norm(x, w_post)) [* scalar]; n_i = rms_norm(h [, w_i])

    One op from the end of a block to the input of the next (rules 6 to 9). Inputs after w_post: the
    scalar if `scaled`, then one weight for each True in `weighted`, which has an entry per pre-norm
    that follows. Results: h, then the pre-norms.
    """

    budget = Budget(2, 16, "norm, sum, scalar and the next norm, each rounded")
    kind = "other"
    rows = (0, 1)
    operands = "x residual w_post *rest"
    attrs = NORM

    @staticmethod
    def expand(
        b: Any, x: Any, residual: Any, w_post: Any, *weights: Any, eps: float, **norm: Any
    ) -> tuple[Any, ...]:
        scaled, weighted = norm["scaled"], norm["weighted"]
        want = scaled + sum(weighted)
        require(len(weights) == want, f"{len(weights)} inputs after w_post, expected {want}")
        h = b.emit("add", residual, b.emit("rms_norm", x, w_post, eps=eps))
        if scaled:
            scalar = weights[0].type
            require(scalar.shape == (1,), f"scalar {scalar} is not one value for {x.type}")
            h = b.emit("mul", h, weights[0])
        pre_norms = iter(weights[scaled:])
        return h, *(
            b.emit("rms_norm", h, *([next(pre_norms)] if has else []), eps=eps) for has in weighted
        )

    @staticmethod
    def flops(ins: Types, outs: Types, **_: Any) -> int:
        return 4 * sum(t.numel() for t in outs) + 2 * outs[0].numel()

    samples = cases(
        "2*f32[2,3,16] f32[16] f32[1] f32[16] {scaled=True, weighted=(True,)}",
        "2*f32[2,3,16] 3*f32[16] {scaled=False, weighted=(True, True, False)}",
        "2*f32[2,3,16] f32[16] {scaled=False, weighted=()}",
        eps=1e-06,
    )


@op
class layer_norm:
    """(x - mean) / sqrt(var + eps) * w (+ b) over the last dim, rounded once (rules 33, 42)"""

    budget = Budget(1, 32, "a mean and a variance in fp32, then one rounding")
    kind = "other"
    rows = (0,)

    @staticmethod
    def infer(x: Type, w: Type, b: Type | None = None, *, eps: float) -> Type:
        fits = w == x.with_shape(x.shape[-1]) and b in (None, w)
        require(fits, f"layer_norm: weight {w}, bias {b} do not fit {x}")
        return x

    @staticmethod
    def reference(x: Any, w: Any, b: Any = None, *, eps: float) -> Any:
        return torch.nn.functional.layer_norm(x, w.shape, w, b, eps)

    flops = per_result(8)
    samples = cases("f32[2,3,8] f32[8] {eps=1e-06}", "f32[2,3,8] 2*f32[8] {eps=1e-05}")
