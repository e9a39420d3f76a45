"""Gated activations of the MLP and of per-layer embeddings, alone and fused after a linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Sample, cases, op, per_result, require
from .budgets import GATED, POINTWISE, Budget
from .types import Type, torch

ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu", "relu")


def activate(x: Any, act: str) -> Any:
    """Apply the activation by its Hugging Face name."""
    f = torch.nn.functional
    if act == "gelu_pytorch_tanh":
        return f.gelu(x, approximate="tanh")
    functions: dict[str, Callable[[Any], Any]] = {"gelu": f.gelu, "silu": f.silu, "relu": f.relu}
    return functions[act](x)


@op
class activation:
    """act(x), with one of ACTIVATIONS (rules 33, 34)"""

    budget = POINTWISE
    rows = (0,)

    @staticmethod
    def infer(x: Type, *, act: str) -> Type:
        require(act in ACTIVATIONS, f"activation: act {act!r}: expected {', '.join(ACTIVATIONS)}")
        return x

    @staticmethod
    def reference(x: Any, *, act: str) -> Any:
        return activate(x, act)

    flops = per_result(8)
    samples = [Sample(("f32[2,3,16]",), {"act": a}) for a in ACTIVATIONS]


@op
class glu:
    """act(gate) * up, two roundings (rule 11; also rule 8 with the per-layer row as up)"""

    budget = GATED
    rows = (0, 1)

    @staticmethod
    def infer(gate: Type, up: Type, *, act: str) -> Type:
        require(gate == up, f"glu: gate {gate} and up {up} differ")
        require(act in ACTIVATIONS, f"glu: act {act!r}: expected {', '.join(ACTIVATIONS)}")
        return gate

    @staticmethod
    def reference(gate: Any, up: Any, *, act: str) -> Any:
        return activate(gate, act) * up

    flops = per_result(8)
    samples = [Sample(("f32[2,3,16]",) * 2, {"act": a}) for a in ACTIVATIONS]


@op
class glu_packed:
    """act(first half of x) * second half of x"""

    budget = GATED
    rows = (0,)

    @staticmethod
    def expand(b: Any, x: Any, *, act: str) -> Any:
        size = x.type.shape[-1]
        require(isinstance(size, int) and size % 2 == 0, f"last dim of {x.type} is no even int")
        half = size // 2
        gate, up = b.emit_all("split", x, sizes=(half, half))
        return b.emit("glu", gate, up, act=act)

    flops = per_result(8)
    samples = cases("f32[2,3,32]", act="gelu_pytorch_tanh")


@op
class linear_glu:
    """act(x w^T) * up; without up, act(first half of x w^T) * second half

    w holds the gate rows first, then the up rows (rule 11); or the gate rows alone, with `up` a
    row of per-layer embeddings (rule 8). Rounded as `linear`, then as `glu`.
    """

    budget = Budget(4, 256, "as linear, then as glu")
    rows = (0, 2)

    @staticmethod
    def expand(b: Any, x: Any, w: Any, up: Any = None, *, act: str) -> Any:
        y = b.emit("linear", x, w)
        return b.emit("glu", y, up, act=act) if up else b.emit("glu_packed", y, act=act)

    samples = cases(
        "f32[2,3,16] f32[24,16] {act='gelu_pytorch_tanh'}",
        "f32[2,3,16] f32[8,16] f32[2,3,8] {act='silu'}",
    )
