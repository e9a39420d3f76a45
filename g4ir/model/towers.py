"""Graphs of the vision and audio towers (rules 26 to 37, 42).

    build_towers(spec, media)   # {"vision_280": Graph, "audio_250": Graph}

A tower encodes one image, frame or audio clip to soft tokens [1,N,hidden], padding included. All
shapes are static; N is part of the name. Inputs are prepared by `g4ir/media`:

    vision   patches f32[1,P,D], positions i64[1,P,2]
    audio    features f32[1,T,F], mask bool[1,T] (no mask in gemma4_unified)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.graph import Builder, Graph, Value
from g4ir.ops.types import Type
from g4ir.spec.parts import Audio, UnifiedAudio, UnifiedVision, Vision
from g4ir.spec.record import Spec

from .media import AUDIO, IMAGE, Media, find_media

#: default eps of the reference's RMSNorm, which parts of the audio tower use regardless of the spec
CLASS_EPS = 1e-6
#: default eps of torch's LayerNorm, which the reference's unified patch embedder uses
LAYER_NORM_EPS = 1e-5
#: frames per soft token of the audio tower
STRIDE = 4
#: prefixes of the towers' graph names
PARTS = ("vision", "audio")


def build_towers(spec: Spec, media: Media, dtype: str | None = None) -> dict[str, Graph]:
    """Return the towers' graphs for these media, by name."""
    kind = dtype or spec.dtype
    towers = [build_vision(spec, n, kind) for n in media.grids]
    towers += [build_audio(spec, n, kind) for n in media.lengths]
    return {g.name: g for g in towers}


def vision_name(soft: int) -> str:
    """Return the name of the graph of images of at most `soft` soft tokens."""
    return f"vision_{soft}"


def audio_name(soft: int) -> str:
    """Return the name of the graph of audio clips of at most `soft` soft tokens."""
    return f"audio_{soft}"


def is_tower(name: str) -> bool:
    """Return whether a graph of this name is a tower."""
    return name.startswith(tuple(f"{part}_" for part in PARTS))


def default_tower(spec: Spec, part: str, dtype: str | None = None) -> Graph:
    """Return the tower `part` (of PARTS) for the variant's default image budget, or for the longest
    default audio clip."""
    # A spec may lack placeholder ids, on which towers do not depend.
    ids: dict[str, Any] = {k: 0 for k in (IMAGE, AUDIO) if getattr(spec.tokens, k) is None}
    spec = replace(spec, tokens=replace(spec.tokens, **ids))
    media = find_media(spec, (IMAGE,) if part == "vision" else (AUDIO,))
    return list(build_towers(spec, media, dtype).values())[-1]


def build_vision(spec: Spec, soft: int, dtype: str) -> Graph:
    """Build a tower of images of at most `soft` soft tokens. InputError without vision."""
    classes: dict[type, Callable[..., _Tower]] = {Vision: _Vision, UnifiedVision: _UnifiedVision}
    return _built(spec, spec.vision, classes, vision_name(soft), soft, dtype)


def build_audio(spec: Spec, soft: int, dtype: str) -> Graph:
    """Build a tower of audio clips of at most `soft` soft tokens. InputError without audio."""
    classes: dict[type, Callable[..., _Tower]] = {Audio: _Audio, UnifiedAudio: _UnifiedAudio}
    return _built(spec, spec.audio, classes, audio_name(soft), soft, dtype)


def _built(
    spec: Spec,
    part: Any,
    classes: dict[type, Callable[..., _Tower]],
    name: str,
    soft: int,
    dtype: str,
) -> Graph:
    if part is None:
        raise InputError(f"{spec.name} has no tower for {name}; use a variant that has one")
    return classes[type(part)](spec, part, name, dtype).build(soft)


class _Tower:
    """Base of all towers: prefixes names with `part`, and projects into the text model."""

    part = ""

    def __init__(self, spec: Spec, config: Any, name: str, dtype: str) -> None:
        self.spec, self.config, self.dtype = spec, config, dtype
        self.b = Builder(name)
        self.eps = config.rms_norm_eps

    def build(self, soft: int) -> Graph:
        raise NotImplementedError

    def weight(self, name: str, *shape: int) -> Value:
        return self.b.param(f"{self.part}.{name}", Type(self.dtype, shape))

    def emit(self, op: str, *inputs: Value, name: str, **attrs: Any) -> Value:
        return self.b.emit(op, *inputs, name=f"{self.part}.{name}", **attrs)

    def norm(self, x: Value, name: str, weight: str | None, eps: float | None = None) -> Value:
        weights = () if weight is None else (self.weight(weight, _last(x)),)
        return self.emit("rms_norm", x, *weights, eps=self.eps if eps is None else eps, name=name)

    def project(self, x: Value, name: str, weight: str, out: int) -> Value:
        return self.emit("linear", x, self.weight(weight, out, _last(x)), name=name)

    def clippable(self, x: Value, name: str, weight: str, out: int) -> Value:
        """Apply a linear; its input and output are clamped if the spec has clipped linears."""
        if not self.config.use_clipped_linears:
            return self.project(x, name, weight, out)
        bounds = [self.weight(f"{weight}.{bound}") for bound in CLIP]
        return self.emit(
            "linear_clipped", x, self.weight(weight, out, _last(x)), *bounds, name=name
        )

    def into_text(self, x: Value) -> Graph:
        """Apply a norm without weight, and project to the text model's width (rules 30, 37)."""
        x = self.norm(x, "out.norm", None)
        if x.type.dtype != self.dtype:
            x = self.emit("cast", x, dtype=self.dtype, name="out.rounded")
        w = self.weight("embed", self.spec.text.hidden_size, _last(x))
        return self.b.graph(self.b.emit("linear", x, w, name="soft"))


#: the bounds of a clipped linear, in the order of the op's operands
CLIP = ("in_min", "in_max", "out_min", "out_max")


def _last(x: Value) -> int:
    size = x.type.shape[-1]
    assert isinstance(size, int)
    return size


class _Vision(_Tower):
    """Patches -> transformer -> pooling by position (rules 26 to 30)."""

    part = "vision"
    config: Vision

    def build(self, soft: int) -> Graph:
        b, c = self.b, self.config
        count = soft * c.pooling_kernel_size**2
        patches = b.input("patches", Type("f32", (1, count, 3 * c.patch_size**2)))
        self.positions = b.input("positions", Type("i64", (1, count, 2)))
        self.valid = self.emit("valid_patches", self.positions, name="valid")
        self.tables = b.emit_all(
            "axial_rope_table",
            self.positions,
            theta=c.rope_theta,
            dim=c.head_dim,
            dtype=self.dtype,
            name=[f"{self.part}.cos", f"{self.part}.sin"],
        )
        h = self.embedded(patches)
        for i in range(c.num_hidden_layers):
            h = self.block(f"L{i}", h, first=i == 0)
        return self.into_text(self.pooled(h))

    def embedded(self, patches: Value) -> Value:
        c = self.config
        x = self.emit("centre_pixels", patches, dtype=self.dtype, name="pixels")
        x = self.project(x, "patch", "w_patch", c.hidden_size)
        table = self.weight("places", 2, c.position_embedding_size, c.hidden_size)
        position = self.emit("axial_embedding", table, self.positions, axis=0, name="place")
        return self.emit("add", x, position, name="in")

    def block(self, p: str, h: Value, first: bool) -> Value:
        x = self.norm(h, "pre.norm" if first else f"{p}.in", f"{p}.norm_in")
        x = self.norm(self.attention(p, x), f"{p}.attn.post", f"{p}.norm_attn")
        h = self.emit("add", h, x, name=f"{p}.mid")
        x = self.mlp(p, self.norm(h, f"{p}.mlp.in", f"{p}.norm_mlp"))
        x = self.norm(x, f"{p}.ffn.post", f"{p}.norm_ffn")
        return self.emit("add", h, x, name=f"{p}.out")

    def attention(self, p: str, x: Value) -> Value:
        c, p = self.config, f"{p}.attn"
        q = self.heads(p, x, "q", c.num_attention_heads)
        k = self.heads(p, x, "k", c.num_key_value_heads)
        v = self.heads(p, x, "v", c.num_key_value_heads)
        q, k = (self.turned(p, y, which) for y, which in ((q, "q"), (k, "k")))
        v = self.norm(v, f"{p}.v.norm", None)
        x = self.emit("encoder_attention", q, k, v, self.valid, scale=1.0, name=f"{p}.out")
        x = self.emit("merge_heads", x, name=f"{p}.merged")
        return self.clippable(x, f"{p}.o", f"{p}.wo", c.hidden_size)

    def heads(self, p: str, x: Value, which: str, n: int) -> Value:
        x = self.clippable(x, f"{p}.{which}", f"{p}.w{which}", n * self.config.head_dim)
        return self.emit("heads", x, n=n, name=f"{p}.{which}.heads")

    def turned(self, p: str, x: Value, which: str) -> Value:
        x = self.norm(x, f"{p}.{which}.norm", f"{p}.norm_{which}")
        return self.emit("axial_rope", x, *self.tables, name=f"{p}.{which}.rope")

    def mlp(self, p: str, x: Value) -> Value:
        c, p = self.config, f"{p}.mlp"
        gate = self.clippable(x, f"{p}.gate", f"{p}.w_gate", c.intermediate_size)
        up = self.clippable(x, f"{p}.up", f"{p}.w_up", c.intermediate_size)
        x = self.emit("glu", gate, up, act=c.hidden_activation, name=f"{p}.act")
        return self.clippable(x, f"{p}.down", f"{p}.w_down", c.hidden_size)

    def pooled(self, h: Value) -> Value:
        c = self.config
        x = self.emit("mask_rows", h, self.valid, name="kept")
        x = self.emit(
            "pool_patches",
            x,
            self.positions,
            k=c.pooling_kernel_size,
            root=c.hidden_size**0.5,
            name="pooled",
        )
        if c.standardize:
            bias, scale = (self.weight(n, c.hidden_size) for n in ("std_bias", "std_scale"))
            x = self.emit("standardize", x, bias, scale, name="standard")
        return self.emit("cast", x, dtype=self.dtype, name="rounded")


class _UnifiedVision(_Tower):
    """One linear over merged patches, with three norms and a position embedding (rule 42)."""

    part = "patches"
    config: UnifiedVision

    def build(self, soft: int) -> Graph:
        b, c = self.b, self.config
        side = c.patch_size * c.pooling_kernel_size
        patches = b.input("patches", Type("f32", (1, soft, 3 * side**2)))
        positions = b.input("positions", Type("i64", (1, soft, 2)))
        x = self.emit("cast", patches, dtype=self.dtype, name="pixels")
        x = self.layer_norm(x, "patch.norm", "norm_patch")
        w = self.weight("w_patch", c.mm_embed_dim, _last(x))
        x = self.emit("linear_bias", x, w, self.weight("b_patch", c.mm_embed_dim), name="patch")
        x = self.layer_norm(x, "patch.post", "norm_embed")
        table = self.weight("places", c.mm_posemb_size, 2, c.mm_embed_dim)
        position = self.emit("axial_embedding", table, positions, axis=1, name="place")
        x = self.emit("add", x, position, name="in")
        return self.into_text(self.layer_norm(x, "place.norm", "norm_place"))

    def layer_norm(self, x: Value, name: str, weight: str) -> Value:
        weights = [self.weight(f"{weight}.{part}", _last(x)) for part in ("weight", "bias")]
        return self.emit("layer_norm", x, *weights, eps=LAYER_NORM_EPS, name=name)


class _Audio(_Tower):
    """Mel frames -> two strided convolutions -> conformer -> projection (rules 33 to 37)."""

    part = "audio"
    config: Audio

    def build(self, soft: int) -> Graph:
        b, c = self.b, self.config
        frames, bins = soft * STRIDE, c.subsampling_conv_channels[0] // 4 * STRIDE
        x = b.input("features", Type("f32", (1, frames, bins)))
        mask = b.input("mask", Type("bool", (1, frames)))
        x, self.mask = self.subsampled(x, mask)
        for i in range(c.num_hidden_layers):
            x = self.block(f"L{i}", x)
        w = self.weight("w_out", c.output_proj_dims, c.hidden_size)
        bias = self.weight("b_out", c.output_proj_dims)
        return self.into_text(self.emit("linear_bias", x, w, bias, name="last"))

    def subsampled(self, x: Value, mask: Value) -> tuple[Value, Value]:
        """Reduce frames [1,T,bins] to [1,T/4,hidden] by the strided convolutions; return them and
        their mask bool [1,T/4]."""
        x = self.emit("heads", x, n=_last(x), name="bins")  # one channel
        x = self.emit("cast", x, dtype=self.dtype, name="features")
        for i, channels in enumerate(self.config.subsampling_conv_channels):
            p = f"conv{i}"
            x = self.emit("mask_rows", x, mask, name=f"{p}.in")
            w = self.weight(f"{p}.w", channels, _last(x), 3, 3)
            x = self.emit("conv_halve", x, w, name=f"{p}.out")
            w = self.weight(f"{p}.norm", channels)
            x = self.emit("layer_norm", x, w, eps=self.eps, name=f"{p}.normed")
            x = self.emit("activation", x, act="relu", name=f"{p}.act")
            mask = self.emit("halve_mask", mask, name=f"{p}.mask")
        x = self.emit("merge_heads", x, name="merged")
        return self.project(x, "in", "w_in", self.config.hidden_size), mask

    def block(self, p: str, x: Value) -> Value:
        """Apply half a step of MLP, attention, convolution, half a step of MLP (rule 34)."""
        x = self.feed_forward(f"{p}.ff1", x)
        y = self.normed(self.limited(x, f"{p}.attn.limit"), f"{p}.attn.in", f"{p}.norm_attn_in")
        y = self.limited(self.attention(f"{p}.attn", y), f"{p}.attn.limited")
        y = self.normed(y, f"{p}.attn.post", f"{p}.norm_attn")
        x = self.emit("add", y, x, name=f"{p}.mid")
        x = self.feed_forward(f"{p}.ff2", self.convolution(f"{p}.conv", x))
        return self.normed(self.limited(x, f"{p}.limit"), f"{p}.out", f"{p}.norm_out")

    def limited(self, x: Value, name: str) -> Value:
        return self.emit("limit", x, most=self.config.gradient_clipping, name=name)

    def normed(self, x: Value, name: str, weight: str) -> Value:
        return self.norm(x, name, weight, CLASS_EPS)

    def feed_forward(self, p: str, h: Value) -> Value:
        size = self.config.hidden_size
        x = self.normed(self.limited(h, f"{p}.limit"), f"{p}.in", f"{p}.norm_in")
        x = self.clippable(x, f"{p}.up", f"{p}.w_up", 4 * size)
        x = self.emit("activation", x, act=self.config.hidden_act, name=f"{p}.act")
        x = self.limited(self.clippable(x, f"{p}.down", f"{p}.w_down", size), f"{p}.limited")
        x = self.normed(x, f"{p}.post", f"{p}.norm_post")
        x = self.emit("scale", x, value=self.config.residual_weight, name=f"{p}.part")
        return self.emit("add", x, h, name=f"{p}.out")

    def attention(self, p: str, x: Value) -> Value:
        c, size = self.config, self.config.hidden_size
        heads = []
        for which in "qkv":
            y = self.clippable(x, f"{p}.{which}", f"{p}.w{which}", size)
            heads.append(self.emit("heads", y, n=c.num_attention_heads, name=f"{p}.{which}.heads"))
        past, right = c.attention_context_left, c.attention_context_right
        count = (c.attention_chunk_size + past - 1 + right) // 2 + 1
        w = self.weight(f"{p}.w_relative", size, size)
        relative = self.emit("relative_keys", w, count=count, name=f"{p}.relative")
        scale = self.weight(f"{p}.dim_scale", size // c.num_attention_heads)
        x = self.emit(
            "chunked_attention",
            *heads,
            relative,
            scale,
            self.mask,
            chunk=c.attention_chunk_size,
            left=past,
            right=right,
            cap=c.attention_logit_cap,
            invalid=c.attention_invalid_logits_value,
            name=f"{p}.out",
        )
        x = self.emit("merge_heads", x, name=f"{p}.merged")
        return self.clippable(x, f"{p}.o", f"{p}.wo", size)

    def convolution(self, p: str, h: Value) -> Value:
        size = self.config.hidden_size
        x = self.norm(h, f"{p}.in", f"{p}.norm_in")
        x = self.clippable(x, f"{p}.start", f"{p}.w_start", 2 * size)
        x = self.emit("sigmoid_glu", x, name=f"{p}.gated")
        w = self.weight(f"{p}.w_time", size, 1, self.config.conv_kernel_size)
        x = self.limited(self.emit("causal_conv", x, w, name=f"{p}.time"), f"{p}.limit")
        x = self.norm(x, f"{p}.normed", f"{p}.norm")
        x = self.emit("activation", x, act=self.config.hidden_act, name=f"{p}.act")
        x = self.clippable(x, f"{p}.end", f"{p}.w_end", size)
        return self.emit("add", x, h, name=f"{p}.out")


class _UnifiedAudio(_Tower):
    """Raw frames of samples, each a soft token (rule 42)."""

    part = "audio"
    config: UnifiedAudio

    def build(self, soft: int) -> Graph:
        x = self.b.input("features", Type("f32", (1, soft, self.config.audio_embed_dim)))
        return self.into_text(self.emit("cast", x, dtype=self.dtype, name="features"))
