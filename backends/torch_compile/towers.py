"""How the towers' ops are computed where the reference's form is not the fast one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from g4ir.ir import Node

if TYPE_CHECKING:
    from .lower import Run

Tensor = torch.Tensor


def encoder_attention(m: Run, n: Node, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
    """The library's attention, which never holds the scores [B,nq,P,P]."""
    bias = torch.zeros(valid.shape, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill(~valid, torch.finfo(q.dtype).min)[:, None, None]
    heads, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        heads, keys, values, attn_mask=bias.expand(*bias.shape[:2], q.shape[1], -1),
        scale=n.number("scale"), enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)
