"""Tensors and parameter counts of a variant, from its spec alone.

`text_tensors` is the one table of decoder tensor names and shapes: the checkpoint reader, the
random weights and the counts all use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from g4ir.spec import Audio, Layer, Ple, Spec, Text, UnifiedAudio, UnifiedVision, Vision

Shape = tuple[int, ...]
Tensors = dict[str, Shape]

HEAD = "lm_head.weight"


def text_tensors(spec: Spec) -> Tensors:
    """Name -> shape of every live decoder tensor, in file order, without the text prefix.

    K and V of layers that share another layer's are not live (see `dead_tensors`). An untied
    head is `lm_head.weight`; it lies outside the text prefix (`spec.prefixes.head`).
    """
    text = spec.text
    out: Tensors = {"embed_tokens.weight": (text.vocab_size, text.hidden_size)}
    out |= _ple_tables(text, text.ple) if text.ple else {}
    for layer in spec.layers():
        out |= {f"layers.{layer.index}.{k}": v for k, v in layer_tensors(text, layer).items()}
    out["norm.weight"] = (text.hidden_size,)
    out |= {} if text.tie_word_embeddings else {HEAD: (text.vocab_size, text.hidden_size)}
    return out


def dead_tensors(spec: Spec) -> Tensors:
    """Name -> shape of the K and V tensors that a checkpoint may hold for shared layers."""
    shared = [layer for layer in spec.layers() if layer.donor is not None]
    return {
        f"layers.{layer.index}.{name}": shape
        for layer in shared
        for name, shape in _kv(spec.text, layer).items()
    }


def _ple_tables(text: Text, ple: Ple) -> Tensors:
    packed = text.num_hidden_layers * ple.dim
    return {
        "embed_tokens_per_layer.weight": (ple.vocab_size, packed),
        "per_layer_model_projection.weight": (packed, text.hidden_size),
        "per_layer_projection_norm.weight": (ple.dim,),
    }


def layer_tensors(text: Text, layer: Layer) -> Tensors:
    """Name -> shape of one layer's live tensors, without `layers.N.`."""
    hidden, wide = text.hidden_size, layer.intermediate_size
    out = {
        "input_layernorm.weight": (hidden,),
        **_query(text, layer),
        **(_kv(text, layer) if layer.donor is None else {}),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "post_feedforward_layernorm.weight": (hidden,),
    }
    out |= _moe(text) if layer.has_moe else {}
    out |= _ple_layer(hidden, text.ple.dim) if text.ple else {}
    return {**out, "layer_scalar": (1,)}


def _query(text: Text, layer: Layer) -> Tensors:
    dim = layer.attention.head_dim
    width = text.num_attention_heads * dim
    return {
        "self_attn.q_proj.weight": (width, text.hidden_size),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.o_proj.weight": (text.hidden_size, width),
    }


def _kv(text: Text, layer: Layer) -> Tensors:
    kind = layer.attention
    shape = (kind.num_key_value_heads * kind.head_dim, text.hidden_size)
    value = {} if kind.k_eq_v else {"self_attn.v_proj.weight": shape}
    return {"self_attn.k_proj.weight": shape, **value, "self_attn.k_norm.weight": (kind.head_dim,)}


def _moe(text: Text) -> Tensors:
    moe, hidden = text.moe, text.hidden_size
    assert moe is not None
    experts, inner = moe.num_experts, moe.intermediate_size
    return {
        "router.proj.weight": (experts, hidden),
        "router.scale": (hidden,),
        "router.per_expert_scale": (experts,),
        "experts.gate_up_proj": (experts, 2 * inner, hidden),  # gate rows, then up rows
        "experts.down_proj": (experts, hidden, inner),
        "pre_feedforward_layernorm_2.weight": (hidden,),
        "post_feedforward_layernorm_1.weight": (hidden,),
        "post_feedforward_layernorm_2.weight": (hidden,),
    }


def _ple_layer(hidden: int, dim: int) -> Tensors:
    return {
        "per_layer_input_gate.weight": (dim, hidden),
        "per_layer_projection.weight": (hidden, dim),
        "post_per_layer_input_norm.weight": (hidden,),
    }


# --- towers and embedders ---------------------------------------------------------------------


def part_tensors(spec: Spec) -> dict[str, Tensors]:
    """Part (a field of Prefixes) -> name -> shape of its tensors, for all parts but the decoder.

    Names are the hub's, which for gemma4_unified differ from the reference's module names.
    """
    hidden, out = spec.text.hidden_size, dict[str, Tensors]()
    if isinstance(spec.vision, Vision):
        out["vision"] = _vision(spec.vision)
        out["embed_vision"] = _embedder(hidden, spec.vision.hidden_size)
    if isinstance(spec.vision, UnifiedVision):
        out["vision_embedder"] = _unified_vision(spec.vision)
        out["embed_vision"] = _embedder(hidden, spec.vision.output_proj_dims)
    if isinstance(spec.audio, Audio):
        out["audio"] = _audio(spec.audio)
        out["embed_audio"] = _embedder(hidden, spec.audio.output_proj_dims)
    if isinstance(spec.audio, UnifiedAudio):
        out["embed_audio"] = _embedder(hidden, spec.audio.audio_embed_dim)
    return out


def tower_tensors(spec: Spec) -> Tensors:
    """Name -> shape of every tensor outside the decoder, under its checkpoint name."""
    out: Tensors = {}
    for part, tensors in part_tensors(spec).items():
        out |= _under(getattr(spec.prefixes, part)[0], tensors)
    return out


#: parts that images and frames go through; the others are sound's
SIGHT = ("vision", "vision_embedder", "embed_vision")


def media_tensors(spec: Spec, kinds: Iterable[str]) -> Tensors:
    """`PART.NAME` -> shape of the tensors that these kinds of media need."""
    # Imported late: it needs the budgets of images, which need this module.
    from g4ir.media.choice import AUDIO, PICTURES

    kinds = set(kinds)
    out: Tensors = {}
    for part, tensors in part_tensors(spec).items():
        if kinds.intersection(PICTURES if part in SIGHT else (AUDIO,)):
            out |= _under(f"{part}.", tensors)
    return out


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: shape for name, shape in tensors.items()}


def _embedder(hidden: int, width: int) -> Tensors:
    return {"embedding_projection.weight": (hidden, width)}


def _clippable(name: str, out: int, inner: int, clipped: bool) -> Tensors:
    """A linear inside the towers; a clipped one carries its four bounds as 0-d tensors."""
    bounds = CLIP_BOUNDS if clipped else ()
    weight: Tensors = {f"{name}.linear.weight": (out, inner)}
    return weight | {f"{name}.{bound}": () for bound in bounds}


def _vision(v: Vision) -> Tensors:
    hidden = v.hidden_size
    out: Tensors = {
        "patch_embedder.input_proj.weight": (hidden, 3 * v.patch_size**2),
        "patch_embedder.position_embedding_table": (2, v.position_embedding_size, hidden),
    }
    for i in range(v.num_hidden_layers):
        out |= _under(f"encoder.layers.{i}.", _vision_layer(v))
    return out | ({"std_bias": (hidden,), "std_scale": (hidden,)} if v.standardize else {})


def _vision_layer(v: Vision) -> Tensors:
    hidden, inner = v.hidden_size, v.intermediate_size
    query, kv = v.num_attention_heads * v.head_dim, v.num_key_value_heads * v.head_dim
    linears = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    out: Tensors = {f"self_attn.{name}_norm.weight": (v.head_dim,) for name in "qk"}
    out |= {f"{name}.weight": (hidden,) for name in SANDWICH}
    for name, (rows, columns) in linears.items():
        out |= _clippable(name, rows, columns, v.use_clipped_linears)
    return out


def _audio(a: Audio) -> Tensors:
    hidden, (first, second) = a.hidden_size, a.subsampling_conv_channels
    out: Tensors = {
        "subsample_conv_projection.layer0.conv.weight": (first, 1, 3, 3),
        "subsample_conv_projection.layer0.norm.weight": (first,),
        "subsample_conv_projection.layer1.conv.weight": (second, first, 3, 3),
        "subsample_conv_projection.layer1.norm.weight": (second,),
        "subsample_conv_projection.input_proj_linear.weight": (hidden, first // 4 * second),
        "output_proj.weight": (a.output_proj_dims, hidden),
        "output_proj.bias": (a.output_proj_dims,),
    }
    for i in range(a.num_hidden_layers):
        out |= _under(f"layers.{i}.", _audio_layer(a))
    return out


def _audio_layer(a: Audio) -> Tensors:
    hidden = a.hidden_size
    linears = {
        **{f"feed_forward{n}.ffw_layer_1": (4 * hidden, hidden) for n in (1, 2)},
        **{f"feed_forward{n}.ffw_layer_2": (hidden, 4 * hidden) for n in (1, 2)},
        **{f"self_attn.{n}": (hidden, hidden) for n in ("q_proj", "k_proj", "v_proj", "post")},
        "lconv1d.linear_start": (2 * hidden, hidden),
        "lconv1d.linear_end": (hidden, hidden),
    }
    out: Tensors = {f"{name}.weight": (hidden,) for name in CONFORMER_NORMS}
    out["self_attn.relative_k_proj.weight"] = (hidden, hidden)
    out["self_attn.per_dim_scale"] = (hidden // a.num_attention_heads,)
    out["lconv1d.depthwise_conv1d.weight"] = (hidden, 1, a.conv_kernel_size)
    for name, (rows, columns) in linears.items():
        out |= _clippable(name, rows, columns, a.use_clipped_linears)
    return out


def _unified_vision(v: UnifiedVision) -> Tensors:
    patch, dim = 3 * (v.patch_size * v.pooling_kernel_size) ** 2, v.mm_embed_dim
    widths = {"patch_ln1": patch, "patch_dense": dim, "patch_ln2": dim, "pos_norm": dim}
    out: Tensors = {f"{n}.{part}": (w,) for n, w in widths.items() for part in ("weight", "bias")}
    return out | {
        "patch_dense.weight": (dim, patch),
        "pos_embedding": (v.mm_posemb_size, 2, dim),
    }


CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
CONFORMER_NORMS = (
    "feed_forward1.pre_layer_norm",
    "feed_forward1.post_layer_norm",
    "feed_forward2.pre_layer_norm",
    "feed_forward2.post_layer_norm",
    "lconv1d.pre_layer_norm",
    "lconv1d.conv_norm",
    "norm_pre_attn",
    "norm_post_attn",
    "norm_out",
)


# --- counts -----------------------------------------------------------------------------------


def numel(tensors: Tensors) -> int:
    """Elements in all tensors; a 0-d tensor has one."""
    return sum(math.prod(shape) for shape in tensors.values())


@dataclass(frozen=True)
class Counts:
    """Elements of one variant by part. 0-d clip bounds are counted apart (`*_scalars`)."""

    embed: int  # token table, also the head where it is tied
    head: int  # 0 where it is tied
    ple_table: int
    ple_other: int  # projections, gates and norms of the per-layer embeddings
    layers: int  # decoder layers without experts and per-layer embeddings
    experts: int
    final_norm: int
    vision: int
    vision_scalars: int
    audio: int
    audio_scalars: int
    embed_vision: int
    embed_audio: int
    dead: int  # K and V of shared layers, in published files only
    dead_tensors: int
    live_tensors: int
    layer_scalars: int  # within `layers`
    top_k: int
    num_experts: int

    @property
    def text(self) -> int:
        """The decoder as it runs."""
        tables = self.embed + self.head + self.ple_table + self.ple_other
        return tables + self.layers + self.experts + self.final_norm

    @property
    def loaded(self) -> int:
        """Every element that the reference keeps after loading."""
        towers = self.vision + self.vision_scalars + self.audio + self.audio_scalars
        return self.text + towers + self.embed_vision + self.embed_audio

    @property
    def hub(self) -> int:
        """Elements in the published files, 0-d tensors included."""
        return self.loaded + self.dead

    @property
    def hub_parameters(self) -> int:
        """What the hub shows as the parameter count: 0-d tensors count as nothing."""
        return self.hub - self.vision_scalars - self.audio_scalars

    @property
    def hub_tensors(self) -> int:
        """Tensors in the published files."""
        return self.live_tensors + self.dead_tensors

    @property
    def active(self) -> int:
        """Weights that one token multiplies with, head included (the lookup tables are not)."""
        used = self.experts * self.top_k // max(self.num_experts, 1)
        return self.layers + self.ple_other - self.layer_scalars + used + (self.head or self.embed)


def counts(spec: Spec) -> Counts:
    """Parameter counts of a variant, to the unit, from the tensor tables."""
    live, dead, towers = text_tensors(spec), dead_tensors(spec), tower_tensors(spec)
    by_part: dict[str, Tensors] = {}
    for name, shape in live.items():
        by_part.setdefault(_text_part(name), {})[name] = shape
    for name, shape in towers.items():
        by_part.setdefault(_tower_part(spec, name, shape), {})[name] = shape
    scalars = sum(name.endswith(".layer_scalar") for name in live)
    moe = spec.text.moe
    return Counts(
        **{part: numel(by_part.get(part, {})) for part in PARTS},
        dead=numel(dead),
        dead_tensors=len(dead),
        live_tensors=len(live) + len(towers),
        layer_scalars=scalars,
        top_k=moe.top_k_experts if moe else 0,
        num_experts=moe.num_experts if moe else 0,
    )


PARTS = tuple(f.name for f in fields(Counts) if f.name not in (
    "dead", "dead_tensors", "live_tensors", "layer_scalars", "top_k", "num_experts"))  # fmt: skip


def _text_part(name: str) -> str:
    if name in TOP_PARTS:
        return TOP_PARTS[name]
    if "per_layer_" in name:
        return "ple_other"
    return "experts" if ".experts." in name else "layers"


TOP_PARTS = {
    "embed_tokens.weight": "embed",
    "embed_tokens_per_layer.weight": "ple_table",
    "norm.weight": "final_norm",
    HEAD: "head",
}


def _tower_part(spec: Spec, name: str, shape: Shape) -> str:
    if name.startswith(spec.prefixes.embed_audio[0]):
        return "embed_audio"
    if name.startswith((spec.prefixes.embed_vision[0], spec.prefixes.vision_embedder[0])):
        return "embed_vision"
    tower = "audio" if name.startswith(spec.prefixes.audio[0]) else "vision"
    return tower if shape else f"{tower}_scalars"


# --- bytes ------------------------------------------------------------------------------------

DTYPE_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


def weight_bytes(spec: Spec, dtype: str | None = None) -> int:
    """Bytes of the decoder's weights as they run, in the spec's dtype unless another is given."""
    return numel(text_tensors(spec)) * DTYPE_BYTES[dtype or spec.dtype]


@dataclass(frozen=True)
class KvBytes:
    """Bytes of the K and V caches. Layers that share another's K and V have none."""

    per_token: int  # one more token where no layer forgets
    per_token_full: int  # one more token once all windows are full
    window: int  # what the windows hold at most
    naive: int  # every owning layer keeps the whole context
    planned: int  # sliding layers keep their window


def kv_bytes(spec: Spec, ctx: int, batch: int = 1, dtype: str | None = None) -> KvBytes:
    """Cache bytes at a context of `ctx` tokens for `batch` rows."""
    size = 2 * batch * DTYPE_BYTES[dtype or spec.dtype]  # K and V
    full = window = held = per_token = 0
    for layer in spec.layers():
        if layer.donor is not None:
            continue
        slot = layer.attention.num_key_value_heads * layer.attention.head_dim * size
        slots = layer.attention.window
        per_token += slot
        full += slot if slots is None else 0
        window += 0 if slots is None else slot * slots
        held += 0 if slots is None else slot * min(slots, ctx)
    return KvBytes(per_token, full, window, per_token * ctx, held + full * ctx)
