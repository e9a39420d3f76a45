"""Parts of a variant as frozen dataclasses. Field names follow the upstream configuration where it
has one name for the thing; parts.yaml describes the fields."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from g4ir.ui.files import read_table

from .reader import Count, Fraction, Index, Length, OneOf, Positive, Range, Shaped

SLIDING, FULL = "sliding", "full"
MAX_LAYERS = 1024
DTYPES = ("bf16", "f16", "f32")
DTYPE_ALIASES = (("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32"))
#: name of a chat format -> its strings and its template
CHAT_FORMATS: dict[str, dict[str, Any]] = read_table(Path(__file__).with_name("chat_formats.yaml"))
CHAT_FORMS = tuple(CHAT_FORMATS)
#: end of the model_type of a drafter: that of the models it drafts for comes before
ASSISTANT = "_assistant"
#: model_type -> properties of its models
FAMILIES: dict[str, dict[str, Any]] = read_table(Path(__file__).with_name("model_types.yaml"))
MODEL_TYPES = tuple(FAMILIES)
#: model_type of a related unsupported model -> its name, and the reason
RELATIVES: dict[str, list[str]] = read_table(Path(__file__).with_name("relatives.yaml"))
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
Layers = Annotated[int, Range(1, MAX_LAYERS)]
Kind = Annotated[str, OneOf((SLIDING, FULL))]
Activation = Annotated[str, OneOf(("gelu_pytorch_tanh",))]
#: alternative prefixes of a part's tensors in a checkpoint
TensorPrefixes = Annotated[tuple[str, ...], Length(1, 16)]


def relative(kind: str) -> str | None:
    """Return why a related model_type is not supported, and the fix; None for unknown ones."""
    if not (row := RELATIVES.get(kind.replace("-", "_"))):
        return None
    name, why = row
    fix = "give a checkpoint of Gemma 3 or Gemma 4"
    return f"'{kind}' is {name}, which is not supported: {why}; {fix}"


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one attention kind (semantics: `default` rotates all of head_dim;
    `proportional` rotates int(rotary_fraction * head_dim // 2) pairs, exponent over head_dim)."""

    kind: Annotated[str, OneOf(("default", "proportional"))]
    theta: Positive
    rotary_fraction: Fraction = 1.0
    factor: Positive | None = None

    def pairs(self, head_dim: int) -> int:
        """Return the rotated pairs; the other head_dim/2 - pairs have frequency zero."""
        return int(self.rotary_fraction * head_dim // 2)


@dataclass(frozen=True)
class AttentionKind:
    """Geometry of one attention kind. `window` counts keys including the query itself."""

    head_dim: Count
    num_key_value_heads: Count
    rope: Rope
    window: Count | None = None
    k_eq_v: bool = False


@dataclass(frozen=True)
class Moe:
    """Routed experts in parallel with the dense MLP; `layers` None: in every layer."""

    num_experts: Annotated[int, Range(1, 65536)]
    top_k_experts: Count
    intermediate_size: Count
    layers: tuple[Index, ...] | None = None


@dataclass(frozen=True)
class Ple:
    """Per-layer embeddings: one row of num_hidden_layers * dim per token id; without a table
    (`vocab_size` None) they are projected from the token embeddings alone."""

    dim: Count
    vocab_size: Count | None


#: fields of Text that came with other families: a digest counts them where they are set
LATER_TEXT = (
    *("query_pre_attn_scalar", "value_norm", "layer_scalar", "norms_about_zero", "last_layer_full"),
)


@dataclass(frozen=True)
class Text:
    """The decoder."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    pattern: Annotated[tuple[Kind, ...], Length(1, MAX_LAYERS)]
    sliding: AttentionKind
    full: AttentionKind
    max_position_embeddings: Count
    num_kv_shared_layers: Index = 0
    use_double_wide_mlp: bool = False
    moe: Moe | None = None
    ple: Ple | None = None
    rms_norm_eps: Positive = 1e-6
    hidden_activation: Activation = "gelu_pytorch_tanh"
    final_logit_softcapping: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    query_pre_attn_scalar: Count | None = None
    value_norm: bool = True
    layer_scalar: bool = True
    norms_about_zero: bool = False
    last_layer_full: bool = True
    use_bidirectional_attention: Annotated[str, OneOf(("vision",))] | None = None
    tie_word_embeddings: bool = True

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Kind of each layer; with `last_layer_full` the last one is full, after any pattern."""
        period, last = len(self.pattern), self.num_hidden_layers - 1
        kinds = tuple(self.pattern[i % period] for i in range(last))
        return (*kinds, FULL if self.last_layer_full else self.pattern[last % period])

    @property
    def readable_ids(self) -> int:
        """Number of token ids with a row in every embedding table."""
        rows = self.ple.vocab_size if self.ple else None
        return self.vocab_size if rows is None else min(self.vocab_size, rows)

    @property
    def first_kv_shared_layer(self) -> int:
        return self.num_hidden_layers - self.num_kv_shared_layers


@dataclass(frozen=True)
class Tokens:
    """Special token ids. `eos` has every id that ends generation; media ids mark soft tokens."""

    bos: Index | None = None
    eos: tuple[Index, ...] = ()
    pad: Index | None = None
    image: Index | None = None
    video: Index | None = None
    audio: Index | None = None
    boi: Index | None = None
    eoi: Index | None = None
    boa: Index | None = None
    eoa: Index | None = None


@dataclass(frozen=True)
class Vision:
    """The vision tower of `gemma4`: patches -> transformer -> pooling by position."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    patch_size: Count
    pooling_kernel_size: Count
    position_embedding_size: Count
    rope_theta: Positive = 100.0
    rms_norm_eps: Positive = 1e-6
    hidden_activation: Activation = "gelu_pytorch_tanh"
    max_position_embeddings: Count = 131072
    default_output_length: Count = 280
    use_clipped_linears: bool = False
    standardize: bool = False


@dataclass(frozen=True)
class Audio:
    """The audio tower of `gemma4`: mel frames -> two strided convolutions -> conformer."""

    hidden_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    output_proj_dims: Count
    subsampling_conv_channels: Annotated[tuple[Count, ...], Length(2, 2)] = (128, 32)
    conv_kernel_size: Count = 5
    residual_weight: Positive = 0.5
    attention_chunk_size: Count = 12
    attention_context_left: Count = 13
    attention_context_right: Index = 0
    attention_logit_cap: Positive = 50.0
    attention_invalid_logits_value: Annotated[float, Range(-1e30, 0)] = -1e9
    gradient_clipping: Positive = 1e10
    hidden_act: Annotated[str, OneOf(("silu",))] = "silu"
    rms_norm_eps: Positive = 1e-6
    use_clipped_linears: bool = True


@dataclass(frozen=True)
class UnifiedVision:
    """The image path of `gemma4_unified`: merged patches through one linear, no tower."""

    mm_embed_dim: Count
    mm_posemb_size: Count
    patch_size: Count = 16
    pooling_kernel_size: Count = 3
    output_proj_dims: Count = 3840
    num_soft_tokens: Count = 280
    rms_norm_eps: Positive = 1e-6


@dataclass(frozen=True)
class UnifiedAudio:
    """The audio path of `gemma4_unified`: raw frames of `audio_embed_dim` samples, one linear."""

    audio_embed_dim: Count
    rms_norm_eps: Positive = 1e-6


@dataclass(frozen=True)
class Centroids:
    """Clustered LM head: logits only for the tokens of the `top_k` best of `count` clusters of
    equal size."""

    count: Count
    top_k: Count


@dataclass(frozen=True)
class Drafter:
    """A draft model's interface to its target model."""

    backbone_hidden_size: Count
    centroids: Centroids | None = None
    position: Annotated[str, OneOf(("next", "last"))] = "next"


@dataclass(frozen=True)
class EmbeddingHead:
    """The head of an encoder, whose attention is bidirectional: `projection` of every token, mean
    over the tokens, `dense` layers, L2 norm. `dims`: sizes to which an embedding may be cut."""

    dims: Annotated[tuple[Count, ...], Length(1, 32)]
    projection: Count | None = None
    dense: Annotated[tuple[Count, ...], Length(0, 8)] = ()


@dataclass(frozen=True)
class Prefixes:
    """Tensor name prefixes of each part in a checkpoint; the first one that is present is used."""

    text: TensorPrefixes = ("model.language_model.", "language_model.", "model.", "")
    head: TensorPrefixes = ("lm_head.weight",)
    vision: TensorPrefixes = ("model.vision_tower.", "vision_tower.")
    audio: TensorPrefixes = ("model.audio_tower.", "audio_tower.")
    # the last two of these are the module names of transformers 5.17
    vision_embedder: TensorPrefixes = (
        "model.vision_embedder.",
        "vision_embedder.",
        "model.embed_vision.",
        "embed_vision.",
    )
    embed_vision: TensorPrefixes = (
        "model.embed_vision.",
        "embed_vision.",
        "model.embed_vision.multimodal_embedder.",
        "embed_vision.multimodal_embedder.",
    )
    embed_audio: TensorPrefixes = ("model.embed_audio.", "embed_audio.")
    # a draft model's tensors outside its layers
    drafter: TensorPrefixes = ("",)


@dataclass(frozen=True)
class Layer:
    """A resolved decoder layer; `donor` is the layer whose KV cache it reads."""

    index: int
    kind: str
    attention: AttentionKind
    intermediate_size: int
    donor: int | None
    has_moe: bool


@dataclass(frozen=True)
class Variant:
    """The fields of a variant, and its layers."""

    name: Annotated[str, Shaped(NAME, "my-variant")]
    model_type: Annotated[str, OneOf(MODEL_TYPES)]
    dtype: Annotated[str, OneOf(DTYPES, DTYPE_ALIASES)]
    text: Text
    tokens: Tokens
    hub: Annotated[str, Shaped(f"{NAME}/{NAME}", "google/gemma-4-E2B-it")] | None = None
    chat: Annotated[str, OneOf(CHAT_FORMS)] = CHAT_FORMS[0]
    vision: Vision | UnifiedVision | None = None
    audio: Audio | UnifiedAudio | None = None
    prefixes: Prefixes = field(default_factory=Prefixes)
    drafter: Drafter | None = None
    embedding: EmbeddingHead | None = None

    @property
    def embedding_size(self) -> int:
        """Elements of an encoder's embedding; 0 for a decoder."""
        if not (e := self.embedding):
            return 0
        return e.dense[-1] if e.dense else e.projection or self.text.hidden_size

    def owners(self) -> dict[str, int]:
        """Return layer kind -> the layer whose KV cache KV-shared layers of that kind and draft
        models read."""
        kinds = self.text.layer_types[: self.text.first_kv_shared_layer]
        return {kind: i for i, kind in enumerate(kinds)}  # the last owner wins

    def layers(self) -> tuple[Layer, ...]:
        """Return the resolved decoder layers. A draft model's have no donor."""
        return self._layers

    @cached_property
    def _layers(self) -> tuple[Layer, ...]:
        text, owners, moe = self.text, self.owners(), self.text.moe
        out = []
        for i, kind in enumerate(text.layer_types):
            shared = i >= text.first_kv_shared_layer
            double = shared and text.use_double_wide_mlp
            layer = Layer(
                index=i,
                kind=kind,
                attention=text.sliding if kind == SLIDING else text.full,
                intermediate_size=text.intermediate_size * (2 if double else 1),
                donor=owners.get(kind) if shared else None,
                has_moe=moe is not None and (moe.layers is None or i in moe.layers),
            )
            out.append(layer)
        return tuple(out)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, defaults included, as JSON values."""
        out: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return out


_RECORDS = {cls.__name__: cls for cls in (Vision, Audio, UnifiedVision, UnifiedAudio)}
# the dataclass that each model_type has under `vision` and `audio`, if it has towers
TOWERS: dict[str, dict[str, type]] = {
    name: {part: _RECORDS[cls] for part, cls in family["towers"].items()}
    for name, family in FAMILIES.items()
    if "towers" in family
}


def slug(text: str) -> str:
    """Make a legal spec name from a file or directory name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:96] or "spec"
