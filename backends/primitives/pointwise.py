"""Norms, activations and scaling in tensor primitives, with the roundings of the ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from .emitter import Emitter, Operand


def in_fp32(e: Emitter, x: Operand, f: Callable[[Operand], Operand]) -> Operand:
    """Compute `f` in fp32, rounded once to x's dtype."""
    return e.cast(f(e.cast(x, "f32")), x.dtype)


def times(e: Emitter, x: Operand, value: float) -> Operand:
    """Return x * value, the factor not rounded to x's dtype first."""
    return x if value == 1 else in_fp32(e, x, lambda h: e.mul(h, value))


def capped(e: Emitter, x: Operand, cap: float) -> Operand:
    """Return tanh(x / cap) * cap, each of the three steps in fp32 and rounded to x's dtype; x if
    cap is 0."""
    if not cap:
        return x
    x = in_fp32(e, x, lambda h: e.div(h, cap))
    return times(e, in_fp32(e, x, lambda h: e.unary("tanh", h)), cap)


def weight_like(e: Emitter, w: Operand, x: Operand) -> Operand:
    """Reshape a 1-d weight to the rank of x."""
    return e.unsqueeze(w, *range(x.rank - 1)) if x.rank > 1 else w


def reciprocal_rms(e: Emitter, h: Operand, eps: float) -> Operand:
    """Return (mean(h^2) + eps)^-0.5 over the last dim (rule 10)."""
    mean = e.reduce("mean", e.mul(h, h), h.rank - 1)
    return e.binary("pow", e.add(mean, eps), -0.5)


def normed(e: Emitter, h: Operand, eps: float) -> Operand:
    """Return fp32 h times its reciprocal_rms. Sqrt and division would be as many layers, but round
    differently from the op."""
    return e.mul(h, reciprocal_rms(e, h, eps))


def weighed(e: Emitter, h: Operand, w: Operand | None, dtype: str) -> Operand:
    """Return fp32 h times a weight of its last dim, rounded once."""
    if w is not None:
        h = e.mul(h, e.cast(weight_like(e, w, h), "f32"))
    return e.cast(h, dtype)


def layer_norm(e: Emitter, x: Operand, w: Operand, b: Operand | None, eps: float) -> Operand:
    """Return the layer norm of x, computed in fp32, rounded once (rules 33, 42)."""
    h = e.cast(x, "f32")
    h = e.sub(h, e.reduce("mean", h, h.rank - 1))
    h = e.mul(normed(e, h, eps), e.cast(weight_like(e, w, x), "f32"))
    if b is not None:
        h = e.add(h, e.cast(weight_like(e, b, x), "f32"))
    return e.cast(h, x.dtype)


def activate(e: Emitter, x: Operand, act: str) -> Operand:
    """Apply the activation by its Hugging Face name, in fp32, rounded once."""
    return in_fp32(e, x, lambda h: e.activation(act, h) or _ACTIVATIONS[act](e, h))


def _gelu_tanh(e: Emitter, h: Operand) -> Operand:
    cube = e.mul(e.mul(h, e.mul(h, h)), 0.044715)
    inner = e.mul(e.add(h, cube), math.sqrt(2 / math.pi))
    return e.mul(e.mul(h, 0.5), e.add(e.unary("tanh", inner), 1))


def _gelu(e: Emitter, h: Operand) -> Operand:
    inner = e.unary("erf", e.mul(h, math.sqrt(0.5)))
    return e.mul(e.mul(h, 0.5), e.add(inner, 1))


def _silu(e: Emitter, h: Operand) -> Operand:
    gate = e.activation("sigmoid", h)
    return e.mul(h, gate) if gate else e.div(h, _one_more(e, h))


def sigmoid(e: Emitter, h: Operand) -> Operand:
    """Return 1 / (1 + exp(-h)) of fp32."""
    return e.activation("sigmoid", h) or e.binary("pow", _one_more(e, h), -1)


def _one_more(e: Emitter, h: Operand) -> Operand:
    return e.add(e.unary("exp", e.unary("neg", h)), 1)


def softplus(e: Emitter, x: Operand) -> Operand:
    """Return log(1 + exp(x)) as max(x, 0) + log(1 + exp(-|x|)), which does not overflow, in fp32,
    rounded once."""

    def f(h: Operand) -> Operand:
        size = e.binary("max", h, e.unary("neg", h))
        return e.add(e.binary("max", h, 0), e.unary("log", _one_more(e, size)))

    return in_fp32(e, x, f)


def _relu(e: Emitter, h: Operand) -> Operand:
    return e.binary("max", h, 0)


_ACTIVATIONS: Mapping[str, Callable[[Emitter, Operand], Operand]] = {
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu": _gelu,
    "silu": _silu,
    "relu": _relu,
}
