"""How the towers' ops are computed where the reference's form is not the fast one."""

from __future__ import annotations

import torch

from g4ir.ir.graph import Node

from . import pyops
from .kernels.base import Run

Tensor = torch.Tensor


def encoder_attention(m: Run, n: Node, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
    """Attend by the library, which never holds the scores [B,nq,P,P]; on the CPU without a mask
    where padding comes last."""
    scale = n.number("scale")
    if m.device == "cpu":
        out: Tensor = torch.ops.g4ir.encoder_attention(q, k, v, valid, scale)
        return out
    return pyops.masked_attention(q, k, v, valid, scale)
