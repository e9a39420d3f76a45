"""Lowerings for graphs on the CPU that do not run as step programs: large matmuls call the C
kernels."""

from __future__ import annotations

import torch
from torch.nn import functional

from g4ir.backends.inductor.lower import COMMON
from g4ir.backends.inductor.lowered import Lowered, Lowering, lowered_by_op
from g4ir.ir.graph import Graph, Node

from . import pyops
from .isa import FROM

Tensor = torch.Tensor


def lowered(g: Graph) -> Lowered:
    """Return a graph with the CPU's lowerings."""
    return lowered_by_op(g, LOWERINGS)


def _clip(n: Node, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Clamp by scalars: ten times as fast as by tensors."""
    return x.clamp(float(low), float(high))


def _linear(n: Node, x: Tensor, w: Tensor) -> Tensor:
    return pyops.linear(x, w) if w.numel() >= FROM else functional.linear(x, w)


#: op -> lowering; default: its reference
LOWERINGS: dict[str, Lowering] = {**COMMON, "clip": Lowering(_clip), "linear": Lowering(_linear)}
