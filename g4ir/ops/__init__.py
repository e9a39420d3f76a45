"""The ops: one file per family, every op in this one table."""

from __future__ import annotations

from typing import Any

from . import (
    attention,
    audio,
    elementwise,
    embed,
    latent,
    linear,
    mlp,
    moe,
    norm,
    qkv,
    rope,
    sample,
    vision,
)
from .base import Op, Sample

_FAMILIES: tuple[tuple[Any, ...], ...] = (
    (linear.linear, linear.linear_bias, linear.linear_clipped, linear.concat),
    (linear.split, linear.heads, linear.merge_heads),
    (elementwise.add, elementwise.mul, elementwise.scale, elementwise.softcap),
    (elementwise.clip, elementwise.limit, elementwise.cast),
    (elementwise.last_row, elementwise.row_start),
    (norm.rms_norm, norm.norm_residual, norm.dual_norm_residual, norm.layer_norm),
    (rope.rope_table, rope.rope, rope.norm_rope),
    (attention.attention, attention.cache_write),
    (latent.attention_latent, latent.latent_row, latent.inverse_rms),
    (qkv.qkv_write,),
    (mlp.activation, mlp.glu, mlp.glu_packed, mlp.linear_glu),
    (moe.router, moe.experts, moe.moe_mlp),
    (embed.embedding, embed.mask_ids, embed.stack_layers, embed.unstack_layers),
    (vision.centre_pixels, vision.valid_patches, vision.axial_embedding),
    (vision.axial_rope_table, vision.axial_rope, vision.encoder_attention),
    (vision.pool_patches, vision.standardize),
    (audio.mask_rows, audio.conv_halve, audio.halve_mask, audio.sigmoid_glu, audio.causal_conv),
    (audio.relative_keys, audio.chunked_attention),
    (sample.greedy, sample.candidates),
)

OPS: dict[str, Op] = {o.name: o for family in _FAMILIES for o in family}

__all__ = ["OPS", "Op", "Sample"]
