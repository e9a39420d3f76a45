"""A variant as data: frozen dataclasses read from YAML or from a Hugging Face config.json.

The YAML says what varies; how a block is wired is written once in `g4ir/model.py`.
Field names follow the upstream configuration where it has one name for the thing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml

from g4ir.errors import SpecError
from g4ir.schema import (
    Count,
    Fraction,
    Index,
    Length,
    Map,
    OneOf,
    Positive,
    Range,
    Scalar,
    Shaped,
    Where,
    build,
    convert,
    did_you_mean,
    fail,
    hints_of,
    is_null,
    join,
    merge,
    read_tree,
    schema_defs,
    violations,
)

SLIDING, FULL = "sliding", "full"
SCHEMA = 1
MAX_LAYERS = 1024
MAX_EXTENDS = 8
SUFFIXES = (".yaml", ".yml")
DTYPES = ("bf16", "f16", "f32")
DTYPE_ALIASES = (("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32"))

NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,95}"

Layers = Annotated[int, Range(1, MAX_LAYERS)]
Kind = Annotated[str, OneOf((SLIDING, FULL))]
Activation = Annotated[str, OneOf(("gelu_pytorch_tanh",))]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one attention kind (semantics: `default` rotates all of head_dim;
    `proportional` rotates int(rotary_fraction * head_dim // 2) pairs, exponent over head_dim)."""

    kind: Annotated[str, OneOf(("default", "proportional"))]
    theta: Positive
    rotary_fraction: Fraction = 1.0
    factor: Positive | None = None  # divides the inverse frequencies

    def pairs(self, head_dim: int) -> int:
        """Rotated pairs; the other head_dim/2 - pairs have frequency zero."""
        return int(self.rotary_fraction * head_dim // 2)


@dataclass(frozen=True)
class AttentionKind:
    """Geometry of one attention kind. `window` counts keys including the query itself."""

    head_dim: Count
    num_key_value_heads: Count
    rope: Rope
    window: Count | None = None  # set on sliding, None on full
    k_eq_v: bool = False  # V is the raw K projection; there is no v_proj tensor


@dataclass(frozen=True)
class Moe:
    """Routed experts beside the dense MLP. `layers` None means every layer."""

    num_experts: Annotated[int, Range(1, 65536)]
    top_k_experts: Count
    intermediate_size: Count
    layers: tuple[Index, ...] | None = None


@dataclass(frozen=True)
class Ple:
    """Per-layer embeddings: one row of num_hidden_layers * dim per token id."""

    dim: Count
    vocab_size: Count


@dataclass(frozen=True)
class Text:
    """The decoder."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    # repeated and cut to num_hidden_layers
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
    # None | vision: soft tokens of one image see each other on sliding layers
    use_bidirectional_attention: Annotated[str, OneOf(("vision",))] | None = None
    tie_word_embeddings: bool = True

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Kind of each layer; the reference turns a sliding last layer into a full one."""
        kinds = [self.pattern[i % len(self.pattern)] for i in range(self.num_hidden_layers)]
        return (*kinds[:-1], FULL)

    @property
    def readable_ids(self) -> int:
        """How many ids, from 0, a step can read: those that every table has a row for."""
        return min(self.vocab_size, self.ple.vocab_size) if self.ple else self.vocab_size

    @property
    def first_kv_shared_layer(self) -> int:
        return self.num_hidden_layers - self.num_kv_shared_layers


@dataclass(frozen=True)
class Tokens:
    """Ids with a meaning. `eos` lists every id that ends a text; media ids mark soft tokens."""

    bos: Index | None = None
    eos: tuple[Index, ...] = ()
    pad: Index | None = None
    image: Index | None = None
    video: Index | None = None
    audio: Index | None = None
    boi: Index | None = None  # begin, end of an image
    eoi: Index | None = None
    boa: Index | None = None  # begin, end of a sound
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
    patch_size: Count  # pixels
    pooling_kernel_size: Count  # patches per side that become one soft token
    position_embedding_size: Count  # rows per axis of the position table
    rope_theta: Positive = 100.0
    rms_norm_eps: Positive = 1e-6
    hidden_activation: Activation = "gelu_pytorch_tanh"
    max_position_embeddings: Count = 131072
    default_output_length: Count = 280  # soft tokens per image unless asked otherwise
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
    mm_posemb_size: Count  # rows per axis of the position table
    patch_size: Count = 16
    pooling_kernel_size: Count = 3
    output_proj_dims: Count = 3840  # equals mm_embed_dim
    num_soft_tokens: Count = 280
    rms_norm_eps: Positive = 1e-6


@dataclass(frozen=True)
class UnifiedAudio:
    """The audio path of `gemma4_unified`: raw frames of `audio_embed_dim` samples, one linear."""

    audio_embed_dim: Count
    rms_norm_eps: Positive = 1e-6


#: one place at least, or a part could be nowhere
Places = Annotated[tuple[str, ...], Length(1, 16)]


@dataclass(frozen=True)
class Prefixes:
    """Where a checkpoint may keep each part; the first prefix that is present counts.

    `text` is tried on `embed_tokens.weight`; `head` is the untied output matrix.
    """

    text: Places = ("model.language_model.", "language_model.", "model.", "")
    head: Places = ("lm_head.weight",)
    vision: Places = ("model.vision_tower.", "vision_tower.")
    audio: Places = ("model.audio_tower.", "audio_tower.")
    # the last two of these are the module names of transformers 5.17
    vision_embedder: Places = (
        "model.vision_embedder.", "vision_embedder.", "model.embed_vision.", "embed_vision.",
    )  # fmt: skip
    embed_vision: Places = (
        "model.embed_vision.", "embed_vision.",
        "model.embed_vision.multimodal_embedder.", "embed_vision.multimodal_embedder.",
    )  # fmt: skip
    embed_audio: Places = ("model.embed_audio.", "embed_audio.")


@dataclass(frozen=True)
class Layer:
    """One decoder layer with everything resolved; `donor` is the layer whose K and V it reads."""

    index: int
    kind: str
    attention: AttentionKind
    intermediate_size: int
    donor: int | None
    has_moe: bool


@dataclass(frozen=True)
class Spec:
    """One variant."""

    name: Annotated[str, Shaped(NAME, "my-variant")]
    model_type: Annotated[str, OneOf(("gemma4", "gemma4_unified"))]
    dtype: Annotated[str, OneOf(DTYPES, DTYPE_ALIASES)]
    text: Text
    tokens: Tokens
    # where the weights are published
    hub: Annotated[str, Shaped(f"{NAME}/{NAME}", "google/gemma-4-E2B-it")] | None = None
    vision: Vision | UnifiedVision | None = None
    audio: Audio | UnifiedAudio | None = None
    prefixes: Prefixes = field(default_factory=Prefixes)

    def __repr__(self) -> str:
        media = {"vision": self.vision, "audio": self.audio}
        parts = "".join(f", {k}" for k, v in media.items() if v is not None)
        return (
            f"<Spec {self.name}: {self.model_type}, {self.text.num_hidden_layers} layers, "
            f"hidden {self.text.hidden_size}, {self.dtype}{parts}>"
        )

    def layers(self) -> tuple[Layer, ...]:
        """The decoder layers, resolved."""
        text, kinds = self.text, self.text.layer_types
        first = text.first_kv_shared_layer
        owners = {kind: i for i, kind in enumerate(kinds[:first])}  # the last owner wins
        out = []
        for i, kind in enumerate(kinds):
            shared = i >= first
            wide = shared and text.use_double_wide_mlp
            moe = text.moe
            out.append(
                Layer(
                    index=i,
                    kind=kind,
                    attention=text.sliding if kind == SLIDING else text.full,
                    intermediate_size=text.intermediate_size * (2 if wide else 1),
                    donor=owners[kind] if shared else None,
                    has_moe=moe is not None and (moe.layers is None or i in moe.layers),
                )
            )
        return tuple(out)

    @classmethod
    def from_hf(cls, source: str | Path | dict[str, Any], name: str | None = None) -> Spec:
        """The spec of a Hugging Face config: a config.json, its directory, or the parsed dict.

        Raises SpecError naming the key. `name` defaults to the directory's name.
        """
        from g4ir.hf_config import spec_from_hf

        return spec_from_hf(source, name)

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this spec; SpecError names a field that it cannot express."""
        from g4ir.hf_config import spec_to_hf

        return spec_to_hf(self)

    def to_dict(self) -> dict[str, Any]:
        """Every field, defaults included, as plain JSON values."""
        out: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return out

    def to_yaml(self) -> str:
        """A spec file that loads to this spec; fields that equal their default are left out."""
        body = {"schema": SCHEMA, **_pruned(self)}
        return yaml.safe_dump(body, sort_keys=False, width=100, default_flow_style=None)

    def digest(self) -> str:
        """SHA-256 of the canonical JSON of every field."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _pruned(value: Any) -> Any:
    """A dataclass as a dict without the fields that equal their default."""
    if isinstance(value, tuple):
        return [_pruned(v) for v in value]
    if not is_dataclass(value):
        return value
    kept = ((f.name, getattr(value, f.name), f) for f in fields(value))
    return {name: _pruned(v) for name, v, f in kept if v != _default(f)}


def _default(f: Any) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


# --- rules that join several fields -----------------------------------------------------------


class Problem(NamedTuple):
    """A broken rule: the key path, the message with the fix, the other keys it looks at."""

    path: str
    message: str
    others: tuple[str, ...] = ()


def problems(spec: Spec) -> Iterator[Problem]:
    """Every broken rule of a spec; fields are assumed to be in range."""
    yield from _pattern_problems(spec.text)
    for name in (SLIDING, FULL):
        yield from _kind_problems(spec.text, name)
    yield from _feed_forward_problems(spec.text)
    yield from _token_problems(spec)
    yield from _tower_problems(spec)


def _pattern_problems(text: Text) -> Iterator[Problem]:
    shared, layers = text.num_kv_shared_layers, text.num_hidden_layers
    if shared >= layers:
        yield Problem(
            "text.num_kv_shared_layers",
            f"{shared} of {layers} layers share K and V, so none owns them; at most {layers - 1}",
            ("text.num_hidden_layers",),
        )
        return
    kinds, first = text.layer_types, text.first_kv_shared_layer
    for kind in sorted(set(kinds[first:]) - set(kinds[:first])):
        yield Problem(
            "text.num_kv_shared_layers",
            f"layers {first}..{layers - 1} share K and V but no {kind} layer below {first} owns "
            f"them (layer {first + kinds[first:].index(kind)} needs one); share fewer layers",
            ("text.num_hidden_layers", "text.pattern"),
        )


def _kind_problems(text: Text, name: str) -> Iterator[Problem]:
    kind: AttentionKind = getattr(text, name)
    path, heads, kv = f"text.{name}", text.num_attention_heads, kind.num_key_value_heads
    if name in text.layer_types and heads % kv:
        yield Problem(
            f"{path}.num_key_value_heads",
            f"{kv} does not divide text.num_attention_heads {heads}; use a divisor",
            ("text.num_attention_heads", "text.pattern"),
        )
    if kind.head_dim % 2:
        yield Problem(
            f"{path}.head_dim", f"{kind.head_dim} is odd, rotary needs pairs; use an even number"
        )
    if name == SLIDING and kind.window is None:
        yield Problem(
            f"{path}.window", "is missing; a sliding layer needs the number of keys it sees"
        )
    if name == FULL and kind.window is not None:
        yield Problem(f"{path}.window", "a full layer has no window; leave it out")
    yield from _rope_problems(kind, f"{path}.rope")


def _rope_problems(kind: AttentionKind, path: str) -> Iterator[Problem]:
    rope = kind.rope
    if rope.kind == "default" and rope.rotary_fraction != 1.0:
        yield Problem(
            f"{path}.rotary_fraction",
            f"{rope.rotary_fraction:g} has no effect on kind default; use kind proportional",
            (f"{path}.kind",),
        )
    if rope.kind == "default" and rope.factor is not None:
        yield Problem(
            f"{path}.factor", "has no effect on kind default; use kind proportional",
            (f"{path}.kind",),
        )  # fmt: skip
    if rope.kind == "proportional" and rope.pairs(kind.head_dim) < 1:
        yield Problem(
            f"{path}.rotary_fraction",
            f"{rope.rotary_fraction:g} of head_dim {kind.head_dim} rotates no pair; raise it",
            (f"{path.rpartition('.')[0]}.head_dim", f"{path}.kind"),
        )


def _feed_forward_problems(text: Text) -> Iterator[Problem]:
    moe = text.moe
    if moe is None:
        return
    if moe.top_k_experts > moe.num_experts:
        yield Problem(
            "text.moe.top_k_experts",
            f"{moe.top_k_experts} of {moe.num_experts} experts; at most num_experts",
            ("text.moe.num_experts",),
        )
    if moe.layers is None:
        return
    outside = [i for i in moe.layers if i >= text.num_hidden_layers]
    if outside:
        yield Problem(
            "text.moe.layers",
            f"{outside[0]} is not a layer; 0..{text.num_hidden_layers - 1}",
            ("text.num_hidden_layers",),
        )
    if not moe.layers or list(moe.layers) != sorted(set(moe.layers)):
        yield Problem(
            "text.moe.layers", "must be rising, without repeats, not empty; or leave moe out"
        )


def _token_problems(spec: Spec) -> Iterator[Problem]:
    vocab = spec.text.vocab_size
    for f in fields(Tokens):
        value = getattr(spec.tokens, f.name)
        ids = value if isinstance(value, tuple) else () if value is None else (value,)
        for i in ids:
            if i >= vocab:
                yield Problem(
                    f"tokens.{f.name}", f"{i} is outside the vocabulary; 0..{vocab - 1}",
                    ("text.vocab_size",),
                )  # fmt: skip


def _tower_problems(spec: Spec) -> Iterator[Problem]:
    for name in ("vision", "audio"):
        part = getattr(spec, name)
        if part is not None and not isinstance(part, TOWERS[spec.model_type][name]):
            found = type(part).__name__
            yield Problem(
                name, f"a {spec.model_type} spec has no {found}; use the keys of its model_type",
                ("model_type",),
            )  # fmt: skip
    if isinstance(spec.vision, Vision):
        yield from _vision_problems(spec.vision)
    if (
        isinstance(spec.vision, UnifiedVision)
        and spec.vision.output_proj_dims != spec.vision.mm_embed_dim
    ):
        yield Problem(
            "vision.output_proj_dims",
            f"{spec.vision.output_proj_dims} is not vision.mm_embed_dim "
            f"{spec.vision.mm_embed_dim}; make them equal",
            ("vision.mm_embed_dim",),
        )
    if isinstance(spec.audio, Audio) and spec.audio.hidden_size % spec.audio.num_attention_heads:
        yield Problem(
            "audio.num_attention_heads",
            f"{spec.audio.num_attention_heads} does not divide audio.hidden_size "
            f"{spec.audio.hidden_size}; use a divisor",
            ("audio.hidden_size",),
        )


def _vision_problems(vision: Vision) -> Iterator[Problem]:
    if vision.num_attention_heads % vision.num_key_value_heads:
        yield Problem(
            "vision.num_key_value_heads",
            f"{vision.num_key_value_heads} does not divide vision.num_attention_heads "
            f"{vision.num_attention_heads}; use a divisor",
            ("vision.num_attention_heads",),
        )
    if vision.head_dim % 4:
        yield Problem(
            "vision.head_dim",
            f"{vision.head_dim} is not a multiple of 4, and rotary splits it into pairs per axis",
        )


def check_spec(spec: Spec) -> Spec:
    """The spec itself if it breaks no rule; SpecError with the first problem otherwise.

    For specs built in Python; `load_spec` and `Spec.from_hf` have checked theirs.
    """
    for path, message, *_ in list(violations(spec, Spec)) or problems(spec):
        raise SpecError(f"spec {spec.name}: {path}: {message}")
    return spec


# --- files ------------------------------------------------------------------------------------

# the dataclass that each model_type has under `vision` and `audio`
TOWERS: dict[str, dict[str, type]] = {
    "gemma4": {"vision": Vision, "audio": Audio},
    "gemma4_unified": {"vision": UnifiedVision, "audio": UnifiedAudio},
}
NOT_INHERITED = ("name", "hub")  # a relative of a variant is another model with other weights


def specs_dir() -> Path:
    """The folder of the shipped specs: the package `g4ir.specs`, or `specs/` beside the source."""
    found = importlib.util.find_spec("g4ir.specs")
    if found is not None and found.submodule_search_locations:
        return Path(next(iter(found.submodule_search_locations)))
    return Path(__file__).resolve().parent.parent / "specs"


def spec_names() -> tuple[str, ...]:
    """Names of the shipped specs, sorted."""
    return tuple(sorted(p.stem for p in specs_dir().glob("*.yaml")))


def load_spec(name_or_path: str | Path) -> Spec:
    """The spec of a shipped variant (`e2b`) or of a YAML file (`my/variant.yaml`).

    Raises SpecError naming file, line, key and the fix.
    """
    path = spec_path(name_or_path)
    return _spec_from_tree(_with_bases(read_tree(path), path, ()), path.stem)


def spec_path(name_or_path: str | Path) -> Path:
    """The file behind a spec's name or path. SpecError if the name is not shipped."""
    text = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or "/" in text or "\\" in text
    if is_path or text.endswith(SUFFIXES):
        return Path(text)
    names = spec_names()
    if text in names:
        return specs_dir() / f"{text}.yaml"
    near = did_you_mean(text, names)
    raise SpecError(
        f"no spec is called {text[:80]!r}{near or '; one of ' + ', '.join(names)}"
        " (or give the path of a .yaml file)"
    )


def _with_bases(tree: Map, path: Path, seen: tuple[Path, ...]) -> Map:
    """The tree laid over what it extends, `schema` and `extends` removed."""
    _check_schema(tree)
    entries = {k: v for k, v in tree.entries.items() if k not in ("schema", "extends")}
    own = Map(entries, tree.keys, tree.where)
    if "extends" not in tree.entries:
        return own
    where = tree.keys["extends"]
    base_path = _base_path(convert(tree.entries["extends"], str, "extends"), path, where)
    seen = (*seen, path.resolve())
    if base_path.resolve() in seen or len(seen) > MAX_EXTENDS:
        raise fail(where, "extends", f"{base_path.name} leads back here or too deep; cut the chain")
    base = _with_bases(read_tree(base_path), base_path, seen)
    inherited = {k: v for k, v in base.entries.items() if k not in NOT_INHERITED}
    return merge(Map(inherited, base.keys, base.where), own)


def _base_path(base: str, path: Path, where: Where) -> Path:
    if base.endswith(SUFFIXES):
        return path.parent / base
    try:
        return spec_path(base)
    except SpecError as err:
        raise fail(where, "extends", str(err)) from None


def _check_schema(tree: Map) -> None:
    if "schema" not in tree.entries:
        raise fail(tree.where, "schema", f"is missing; begin the file with `schema: {SCHEMA}`")
    if convert(tree.entries["schema"], int, "schema") != SCHEMA:
        raise fail(tree.keys["schema"], "schema", f"this version reads schema {SCHEMA}")


def _spec_from_tree(tree: Map, stem: str) -> Spec:
    hints = _spec_hints(tree)
    if "name" not in tree.entries:
        name = Scalar(slug(stem), False, tree.where)
        tree = Map({"name": name, **tree.entries}, tree.keys, tree.where)
    spec = canonical(build(Spec, tree, hints=hints))
    for problem in problems(spec):
        raise fail(_place_of(tree, problem), problem.path, problem.message)
    return spec


def slug(text: str) -> str:
    """A legal spec name made from a file or directory name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:96] or "spec"


def _spec_hints(tree: Map) -> dict[str, Any]:
    """Annotations of Spec with the towers that this model_type has."""
    hints = hints_of(Spec)
    node = tree.entries.get("model_type")
    if node is None or is_null(node):
        return hints | _towers("gemma4")  # `build` reports the missing key
    return hints | _towers(convert(node, hints["model_type"], "model_type"))


def _towers(model_type: str) -> dict[str, Any]:
    return {name: cls | None for name, cls in TOWERS[model_type].items()}


def _place_of(tree: Map, problem: Problem) -> Where:
    """Where the first of the keys that break a rule together is set by this file itself, for a file
    that it extends is right on its own; otherwise as near to the key as the files get."""
    reached = [(path, _reached(tree, path)) for path in (problem.path, *problem.others)]
    for path, places in reached:
        if len(places) > path.count(".") and places[-1].file == tree.where.file:
            return places[-1]
    return [tree.where, *reached[0][1]][-1]


def _reached(tree: Map, path: str) -> list[Where]:
    """The places of the keys along a key path, as far as they are given."""
    places: list[Where] = []
    node: Any = tree
    for key in path.split("."):
        if not isinstance(node, Map) or key not in node.entries:
            break
        places.append(node.keys[key])
        node = node.entries[key]
    return places


def canonical(spec: Spec) -> Spec:
    """The spec with `pattern` and `moe.layers` in their shortest form, so that equal variants
    compare equal.

    Warns where the last layer was sliding: the reference turns it into a full one.
    """
    text = spec.text
    moe = text.moe
    if moe is not None and moe.layers == tuple(range(text.num_hidden_layers)):
        moe = replace(moe, layers=None)
    last = text.pattern[(text.num_hidden_layers - 1) % len(text.pattern)]
    if last != FULL:
        log.warning(
            "%s: the last of %d layers is %s; it becomes a full one, as in the reference",
            spec.name, text.num_hidden_layers, last,
        )  # fmt: skip
    return replace(spec, text=replace(text, pattern=shortest_pattern(text.layer_types), moe=moe))


def shortest_pattern(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest list that, repeated and cut, gives `kinds`."""
    for period in range(1, len(kinds)):
        if kinds[period:] == kinds[:-period]:
            return kinds[:period]
    return kinds


# --- views ------------------------------------------------------------------------------------


def diff_specs(a: Spec, b: Spec) -> list[tuple[str, Any, Any]]:
    """Fields that differ as (key path, value in a, value in b), in field order."""
    left, right = _flat(a.to_dict()), _flat(b.to_dict())
    keys = [*left, *(k for k in right if k not in left)]
    return [(k, left.get(k), right.get(k)) for k in keys if left.get(k) != right.get(k)]


def _flat(value: dict[str, Any], path: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        out |= _flat(item, join(path, key)) if isinstance(item, dict) else {join(path, key): item}
    return out


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a spec file, for editors; generated from the dataclasses."""
    defs: dict[str, Any] = {}
    whole, patch = (schema_defs(Spec, partial, defs) for partial in (False, True))
    for name in (whole, patch):
        head = {"schema": {"const": SCHEMA}}
        defs[name]["properties"] = head | defs[name]["properties"]
    defs[whole]["required"] = ["schema", *(k for k in defs[whole]["required"] if k != "name")]
    defs[patch]["properties"]["extends"] = {"type": "string"}
    defs[patch]["required"] = ["schema", "extends"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "g4ir variant",
        "anyOf": [{"$ref": f"#/$defs/{whole}"}, {"$ref": f"#/$defs/{patch}"}],
        "$defs": defs,
    }
