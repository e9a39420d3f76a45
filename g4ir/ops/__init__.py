"""The ops: one file per family, every op in this one table."""

from __future__ import annotations

from typing import Any

from . import attention, elementwise, embed, latent, linear, mlp, moe, norm, qkv, rope, sample
from .base import Op, Sample

_FAMILIES: tuple[tuple[Any, ...], ...] = (
    (linear.linear, linear.concat, linear.split, linear.heads, linear.merge_heads),
    (elementwise.add, elementwise.mul, elementwise.scale, elementwise.softcap),
    (elementwise.last_row, elementwise.row_start),
    (norm.rms_norm, norm.norm_residual, norm.dual_norm_residual),
    (rope.rope_table, rope.rope, rope.norm_rope),
    (attention.attention, attention.cache_write),
    (latent.attention_latent, latent.latent_row, latent.inverse_rms),
    (qkv.qkv_write,),
    (mlp.glu, mlp.glu_packed, mlp.linear_glu),
    (moe.router, moe.experts, moe.moe_mlp),
    (embed.embedding, embed.stack_layers, embed.unstack_layers),
    (sample.greedy, sample.candidates),
)

OPS: dict[str, Op] = {o.name: o for family in _FAMILIES for o in family}

__all__ = ["OPS", "Op", "Sample"]
