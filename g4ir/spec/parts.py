"""Parts of a variant as frozen dataclasses. Field names follow the upstream configuration where it
has one name for the thing."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from g4ir.ui.files import read_table

from .reader import MAX_INT, Count, Fraction, Index, Length, OneOf, Positive, Range, Shaped

SLIDING, FULL = "sliding", "full"
MAX_LAYERS = 1024
DTYPES = ("bf16", "f16", "f32")
DTYPE_ALIASES = (("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32"))
#: name of a chat format -> its strings and template
CHAT_FORMATS: dict[str, dict[str, Any]] = read_table(Path(__file__).with_name("chat_formats.yaml"))
CHAT_FORMS = tuple(CHAT_FORMATS)
#: suffix of a draft model's model_type, after that of its target
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
    """Rotary embedding of one attention kind: `default` rotates all of head_dim; `proportional`
    rotates the first int(rotary_fraction * head_dim // 2) pairs, with the frequencies of `default`
    divided by `factor`."""

    #: default: rotate all of head_dim; proportional: rotate rotary_fraction of it
    kind: Annotated[str, OneOf(("default", "proportional"))]
    #: base of the frequencies, such as 10000
    theta: Positive
    #: fraction of head_dim that is rotated; below 1 with kind proportional only
    rotary_fraction: Fraction = 1.0
    #: divisor of the inverse frequencies, for longer contexts; none by default
    factor: Positive | None = None

    def pairs(self, head_dim: int) -> int:
        """Return how many of the head_dim/2 pairs are rotated; the others have frequency 0."""
        return int(self.rotary_fraction * head_dim // 2)


@dataclass(frozen=True)
class AttentionKind:
    """Geometry of one attention kind. `window` counts keys including the query itself."""

    #: elements of one head; even
    head_dim: Count
    #: key and value heads; a divisor of num_attention_heads
    num_key_value_heads: Count
    #: rotary position embedding of these layers
    rope: Rope
    #: keys a query sees, itself included; of an encoder, on each side; sliding layers only
    window: Count | None = None
    #: V is the K projection before norm and rotation; there is no v_proj tensor
    k_eq_v: bool = False


@dataclass(frozen=True)
class Moe:
    """Routed experts in parallel with the dense MLP; `layers` None: in every layer."""

    #: routed experts per layer
    num_experts: Annotated[int, Range(1, 65536)]
    #: experts that run per token
    top_k_experts: Count
    #: inner width of one expert's MLP
    intermediate_size: Count
    #: indices from 0 of the layers with experts; every layer by default
    layers: tuple[Index, ...] | None = None


@dataclass(frozen=True)
class Ple:
    """Per-layer embeddings: one row of num_hidden_layers * dim per token id; without a table
    (`vocab_size` None) they are projected from the token embeddings alone."""

    #: width of one layer's embedding; a table row has num_hidden_layers * dim elements
    dim: Count
    #: rows of the table: token ids from 0 that have per-layer embeddings; null: no table
    vocab_size: Count | None


#: fields of Text that some families' configs have no key for: they have the value of the family
#: (model_types.yaml) or their default
LATER_TEXT = (
    *("query_pre_attn_scalar", "value_norm", "layer_scalar", "norms_about_zero", "last_layer_full"),
)


@dataclass(frozen=True)
class Text:
    """Sizes and settings of the decoder, or of an encoder's transformer."""

    #: rows of the token table, and logits per position
    vocab_size: Count
    #: width of the residual stream
    hidden_size: Count
    #: inner width of the dense MLP
    intermediate_size: Count
    #: decoder layers
    num_hidden_layers: Layers
    #: query heads of every layer
    num_attention_heads: Count
    #: attention kind of each layer, repeated and cut to num_hidden_layers; see last_layer_full
    pattern: Annotated[tuple[Kind, ...], Length(1, MAX_LAYERS)]
    #: attention of sliding-window layers
    sliding: AttentionKind
    #: attention of full (global) layers
    full: AttentionKind
    #: maximum context length in tokens
    max_position_embeddings: Count
    #: number of last layers that read an earlier layer's KV cache
    num_kv_shared_layers: Index = 0
    #: layers with shared K and V have twice the intermediate_size
    use_double_wide_mlp: bool = False
    #: routed experts in addition to the dense MLP; none by default
    moe: Moe | None = None
    #: per-layer embeddings; none by default
    ple: Ple | None = None
    #: epsilon of the RMS norms
    rms_norm_eps: Positive = 1e-6
    #: activation of the gated MLPs
    hidden_activation: Activation = "gelu_pytorch_tanh"
    #: soft cap c of the logits: c * tanh(x / c); none by default
    final_logit_softcapping: Positive | None = None
    #: soft cap of the attention scores; none by default
    attn_logit_softcapping: Positive | None = None
    #: attention scores are divided by its square root; by default they are not
    query_pre_attn_scalar: Count | None = None
    #: V is RMS-normed, without weight
    value_norm: bool = True
    #: each layer's output is multiplied by a learned scalar
    layer_scalar: bool = True
    #: norm weights w are stored about zero, and a norm multiplies by 1 + w
    norms_about_zero: bool = False
    #: the last layer is full, whatever the pattern says
    last_layer_full: bool = True
    #: vision: soft tokens of one image see each other on sliding layers
    use_bidirectional_attention: Annotated[str, OneOf(("vision",))] | None = None
    #: the token table is also the output matrix
    tie_word_embeddings: bool = True

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Kind of each layer; with `last_layer_full` the last one is full, whatever the pattern."""
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
    """Special token ids. `eos` ends generation if generation_config.json has no ids that do; soft
    tokens replace `image`, `video` and `audio`."""

    #: token id at the start of a text
    bos: Index | None = None
    #: token ids that end a text
    eos: tuple[Index, ...] = ()
    #: token id of padding
    pad: Index | None = None
    #: token id replaced by soft tokens of an image
    image: Index | None = None
    #: token id replaced by soft tokens of a video frame
    video: Index | None = None
    #: token id replaced by soft tokens of audio
    audio: Index | None = None
    #: token id before an image
    boi: Index | None = None
    #: token id after an image
    eoi: Index | None = None
    #: token id before audio
    boa: Index | None = None
    #: token id after audio
    eoa: Index | None = None


@dataclass(frozen=True)
class Vision:
    """The vision tower of `gemma4`: patches -> transformer -> pooling by position."""

    #: width of the tower
    hidden_size: Count
    #: inner width of its MLPs
    intermediate_size: Count
    #: layers of the tower
    num_hidden_layers: Layers
    #: query heads
    num_attention_heads: Count
    #: key and value heads
    num_key_value_heads: Count
    #: elements of one head; a multiple of 4
    head_dim: Count
    #: side of a patch in pixels
    patch_size: Count
    #: patches per side that are pooled into one soft token
    pooling_kernel_size: Count
    #: rows per axis of the position table
    position_embedding_size: Count
    #: base of the two-dimensional rotary frequencies
    rope_theta: Positive = 100.0
    #: epsilon of the RMS norms
    rms_norm_eps: Positive = 1e-6
    #: activation of the gated MLPs
    hidden_activation: Activation = "gelu_pytorch_tanh"
    #: max_position_embeddings of the config.json; has no effect
    max_position_embeddings: Count = 131072
    #: maximum soft tokens per image, if neither build nor request chooses another
    default_output_length: Count = 280
    #: linears clip their inputs and outputs to ranges from the checkpoint
    use_clipped_linears: bool = False
    #: soft tokens are shifted and scaled by tensors of the checkpoint
    standardize: bool = False


@dataclass(frozen=True)
class Audio:
    """The audio tower of `gemma4`: mel frames -> two strided convolutions -> conformer."""

    #: width of the conformer
    hidden_size: Count
    #: conformer layers
    num_hidden_layers: Layers
    #: attention heads
    num_attention_heads: Count
    #: width of the tower's output
    output_proj_dims: Count
    #: channels of the two strided convolutions
    subsampling_conv_channels: Annotated[tuple[Count, ...], Length(2, 2)] = (128, 32)
    #: frames of the depthwise convolution's kernel
    conv_kernel_size: Count = 5
    #: factor of the feed-forward blocks in the residual sum
    residual_weight: Positive = 0.5
    #: frames per attention block
    attention_chunk_size: Count = 12
    #: 1 + the frames that a query sees to its left, itself included
    attention_context_left: Annotated[int, Range(2, MAX_INT)] = 13
    #: frames to the right of a block that are read for it; if any, a query sees one fewer to its
    #: right
    attention_context_right: Index = 0
    #: soft cap of the attention scores
    attention_logit_cap: Positive = 50.0
    #: score of a masked position
    attention_invalid_logits_value: Annotated[float, Range(-1e30, 0)] = -1e9
    #: activations are clamped to plus or minus this
    gradient_clipping: Positive = 1e10
    #: activation of the feed-forward and convolution blocks
    hidden_act: Annotated[str, OneOf(("silu",))] = "silu"
    #: epsilon of the RMS norms
    rms_norm_eps: Positive = 1e-6
    #: linears clip their inputs and outputs to ranges from the checkpoint
    use_clipped_linears: bool = True


@dataclass(frozen=True)
class UnifiedVision:
    """The image path of `gemma4_unified`: merged patches through one linear, no tower."""

    #: width of a patch's embedding
    mm_embed_dim: Count
    #: rows per axis of the position table
    mm_posemb_size: Count
    #: side of a patch in pixels
    patch_size: Count = 16
    #: patches per side that are merged into one soft token
    pooling_kernel_size: Count = 3
    #: width of the output; equals mm_embed_dim
    output_proj_dims: Count = 3840
    #: maximum soft tokens per image, if neither build nor request chooses another
    num_soft_tokens: Count = 280
    #: epsilon of the RMS norms
    rms_norm_eps: Positive = 1e-6


@dataclass(frozen=True)
class UnifiedAudio:
    """The audio path of `gemma4_unified`: raw frames of `audio_embed_dim` samples, one linear."""

    #: samples of audio per soft token
    audio_embed_dim: Count
    #: epsilon of the RMS norms
    rms_norm_eps: Positive = 1e-6


@dataclass(frozen=True)
class Centroids:
    """Clustered LM head: logits only for the tokens of the `top_k` best of `count` clusters of
    equal size."""

    #: clusters; a divisor of text.vocab_size
    count: Count
    #: clusters whose tokens have logits
    top_k: Count


@dataclass(frozen=True)
class Drafter:
    """A draft model's interface to its target model."""

    #: hidden_size of the target model
    backbone_hidden_size: Count
    #: clustered output head; a logit for every token by default
    centroids: Centroids | None = None
    #: RoPE position of all draft steps; next: the first that is not in the KV cache; last: that of
    #: the newest token in it
    position: Annotated[str, OneOf(("next", "last"))] = "next"


@dataclass(frozen=True)
class EmbeddingHead:
    """The head of an encoder, whose attention is bidirectional: `projection` of every token, mean
    over the tokens, `dense` layers, L2 normalisation. `dims`: sizes to which an embedding may be
    cut."""

    #: sizes of embeddings that the model was trained for, the full one included
    dims: Annotated[tuple[Count, ...], Length(1, 32)]
    #: width to which every token is projected before the mean; none by default
    projection: Count | None = None
    #: widths of the dense layers after the mean; none by default
    dense: Annotated[tuple[Count, ...], Length(0, 8)] = ()


@dataclass(frozen=True)
class Prefixes:
    """Alternative prefixes of each part's tensor names in a checkpoint: for text, the one with the
    most tensors is used; for other parts, the first one present."""

    #: prefixes of the decoder's tensors
    text: TensorPrefixes = ("model.language_model.", "language_model.", "model.", "")
    #: names of the untied output matrix
    head: TensorPrefixes = ("lm_head.weight",)
    #: prefixes of the vision tower
    vision: TensorPrefixes = ("model.vision_tower.", "vision_tower.")
    #: prefixes of the audio tower
    audio: TensorPrefixes = ("model.audio_tower.", "audio_tower.")
    #: prefixes of a unified model's patch embedder; the last two are the module names of
    #: transformers 5.17
    vision_embedder: TensorPrefixes = (
        "model.vision_embedder.",
        "vision_embedder.",
        "model.embed_vision.",
        "embed_vision.",
    )
    #: prefixes of the projection from image features to hidden_size
    embed_vision: TensorPrefixes = (
        "model.embed_vision.",
        "embed_vision.",
        "model.embed_vision.multimodal_embedder.",
        "embed_vision.multimodal_embedder.",
    )
    #: prefixes of the projection from audio features to hidden_size
    embed_audio: TensorPrefixes = ("model.embed_audio.", "embed_audio.")
    #: prefixes of a draft model's tensors outside its layers
    drafter: TensorPrefixes = ("",)


@dataclass(frozen=True)
class Layer:
    """A resolved decoder layer; `donor`: index of the layer whose KV cache it reads; None if that
    is its own, or a draft model's target's."""

    index: int
    kind: str
    attention: AttentionKind
    intermediate_size: int
    donor: int | None
    has_moe: bool


@dataclass(frozen=True)
class Variant:
    """A model variant, such as Gemma 4 E2B, as data: sizes, towers, token ids; and its resolved
    layers."""

    #: name of the variant; the file's name by default
    name: Annotated[str, Shaped(NAME, "my-variant")]
    #: kind of model: that of the config.json without _text, or an encoder's (gemma3_embedding)
    model_type: Annotated[str, OneOf(MODEL_TYPES)]
    #: dtype of weights and activations
    dtype: Annotated[str, OneOf(DTYPES, DTYPE_ALIASES)]
    #: the decoder
    text: Text
    #: special token ids
    tokens: Tokens
    #: Hugging Face repository of the weights, such as google/gemma-4-E2B-it
    hub: Annotated[str, Shaped(f"{NAME}/{NAME}", "google/gemma-4-E2B-it")] | None = None
    #: chat format, whose built-in template is for a checkpoint without one
    chat: Annotated[str, OneOf(CHAT_FORMS)] = CHAT_FORMS[0]
    #: image tower; none by default
    vision: Vision | UnifiedVision | None = None
    #: audio tower; none by default
    audio: Audio | UnifiedAudio | None = None
    #: tensor name prefixes in a checkpoint
    prefixes: Prefixes = field(default_factory=Prefixes)
    #: set if this is a draft model (MTP), whose layers read the target's KV cache
    drafter: Drafter | None = None
    #: head of an encoder; none by default: the model generates text
    embedding: EmbeddingHead | None = None

    @property
    def embedding_size(self) -> int:
        """Elements of an encoder's embedding; 0 for a decoder."""
        if not (e := self.embedding):
            return 0
        return e.dense[-1] if e.dense else e.projection or self.text.hidden_size

    def owners(self) -> dict[str, int]:
        """Return layer kind -> index of the last layer of that kind with its own KV cache, which
        KV-shared layers of the kind and draft models read."""
        kinds = self.text.layer_types[: self.text.first_kv_shared_layer]
        return {kind: i for i, kind in enumerate(kinds)}  # the last owner wins

    def layers(self) -> tuple[Layer, ...]:
        """Return the resolved decoder layers, in order. A draft model's have no donor."""
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
        return json.loads(json.dumps(asdict(self)))


_RECORDS = {cls.__name__: cls for cls in (Vision, Audio, UnifiedVision, UnifiedAudio)}
# model_type -> dataclasses of `vision` and `audio`, if it has towers
TOWERS: dict[str, dict[str, type]] = {
    name: {part: _RECORDS[cls] for part, cls in family["towers"].items()}
    for name, family in FAMILIES.items()
    if "towers" in family
}


def slug(text: str) -> str:
    """Make a legal spec name from a file or directory name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:96] or "spec"
