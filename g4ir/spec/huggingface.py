"""Read a Hugging Face config.json into fields of a Spec, from raw JSON, without transformers.

Config objects of transformers would not do: from 5.15 on they move `global_head_dim` and
`num_global_key_value_heads` into `per_layer_config` when they load a file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from g4ir.errors import SpecError
from g4ir.spec.reader import (
    Where,
    convert,
    did_you_mean,
    fail,
    hints_of,
    join,
    json_object,
    quote,
    read_bytes,
    tree_of,
)

from . import huggingface_tables as hf
from .parts import (
    ASSISTANT,
    DTYPE_ALIASES,
    DTYPES,
    FULL,
    SLIDING,
    TOWERS,
    AttentionKind,
    Centroids,
    Drafter,
    EmbeddingHead,
    Layers,
    Moe,
    Ple,
    Prefixes,
    Rope,
    Text,
    Tokens,
    UnifiedAudio,
    UnifiedVision,
    Variant,
    Vision,
    relative,
    slug,
)
from .rules import canonical, problems
from .sentence_transformers import read_modules

MAX_BYTES = 4 * 2**20
REQUIRED: Any = object()
#: without layer_types and sliding_window_pattern every 6th layer has full attention
PERIOD = 6

log = logging.getLogger(__name__)
V = TypeVar("V", bound=Variant)

# --- reading ----------------------------------------------------------------------------------


class Keys:
    """A JSON object that tracks which keys were read; every error has the key path."""

    def __init__(self, values: Any, path: str, where: Where) -> None:
        if not isinstance(values, dict):
            raise fail(where, path, f"expected an object, found {type(values).__name__}")
        self.values: dict[Any, Any] = values
        self.path = path
        self.where = where
        self.seen: set[str] = set(hf.HOUSEKEEPING)

    def raw(self, key: str, default: Any = None) -> Any:
        """Return the unconverted value and mark the key as read."""
        self.seen.add(key)
        return self.values.get(key, default)

    def take(self, key: str, hint: Any, default: Any = REQUIRED) -> Any:
        """Return the value converted to the annotated type, or the default if it is missing;
        SpecError if there is no default."""
        if key not in self.values and default is REQUIRED:
            raise self.fail(key, "is missing; add it")
        value = self.raw(key, default)
        node = tree_of(value, self.where)
        return convert(node, hint, join(self.path, key)) if key in self.values else value

    def same(self, names: tuple[str, ...], hint: Any, default: Any) -> Any:
        """Return the value of a setting under any of several names, or the default; SpecError if
        names have different values."""
        values = {name: self.take(name, hint) for name in names if name in self.values}
        values = {name: value for name, value in values.items() if value is not None} or values
        if len(set(values.values())) > 1:
            pairs = ", ".join(f"{name} {value}" for name, value in values.items())
            raise self.fail(
                names[0], f"has several names with different values ({pairs}); keep one"
            )
        return next(iter(values.values()), default)

    def section(self, key: str) -> Keys | None:
        """Return a nested object, or None if it is missing or null."""
        value = self.raw(key)
        return None if value is None else Keys(value, join(self.path, key), self.where)

    def only(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Raise SpecError unless the key is missing or has one of the allowed values."""
        value = self.raw(key, allowed[0])
        if not any(value == a and type(value) is type(a) for a in allowed):
            raise self.fail(key, f"{quote(str(value))} is not supported: {why}")

    def done(self) -> None:
        """Raise SpecError for the first key that was not read, unless it is of `hf.NEUTRAL` and has
        no effect (null, false, 0 or empty)."""
        for key in (k for k in hf.NEUTRAL if k not in self.seen):
            self.only(key, hf.NOTHING, "it changes the forward pass; use a checkpoint without it")
        for key in self.values:
            if key not in self.seen:
                near = did_you_mean(str(key), self.seen - hf.HOUSEKEEPING)
                raise self.fail(
                    str(key),
                    f"unknown key, which may change the forward pass{near}; remove it from the "
                    "config if it does not",
                )

    def fail(self, key: str, message: str) -> SpecError:
        return fail(self.where, join(self.path, key), message)


def read_config(source: str | Path | dict[str, Any], name: str | None = None) -> Variant:
    """Return the fields of a spec from a Hugging Face config; see `Spec.from_hf`."""
    values, where, folder_name = _read(source)
    keys = Keys(values, "", where)
    for key in ("quantization_config", "quantization"):
        keys.raw(key)  # known, but not part of the spec: weights/formats reads it
    config_type = keys.take("model_type", str)
    if config_type not in hf.MODEL_TYPES:
        near = did_you_mean(config_type, hf.MODEL_TYPES)
        other = f"{quote(config_type)} is not one of {', '.join(hf.MODEL_TYPES)}{near}"
        raise keys.fail("model_type", relative(config_type) or other)
    model_type, composite = hf.MODEL_TYPES[config_type]
    key, other_type = hf.VARIANTS.get(config_type, ("", ""))
    model_type = other_type if key and keys.take(key, bool | None, False) else model_type
    read = _assistant if model_type.endswith(ASSISTANT) else _composite if composite else _text_only
    parts = read(keys, model_type)
    keys.done()
    family = hf.family(model_type)
    prefixes = {part: tuple(names) for part, names in family.prefixes.items()}
    spec = Variant(
        name=slug(name or folder_name),
        model_type=model_type,
        chat=family.chat,
        prefixes=replace(Prefixes(), **prefixes),
        **parts,
    )
    folder = None if isinstance(source, dict) else Path(where.file).parent
    if spec.embedding and folder and (layers := read_modules(folder)) is not None:
        spec = with_dense(spec, (layer.width for layer in layers))
    for path, message in problems(spec):
        theirs = hf.HF_NAMES.get(path)
        raise fail(where, f"{path} ({theirs})" if theirs else path, message)
    return canonical(spec)


def with_dense(spec: V, widths: Iterable[int]) -> V:
    """Return an encoder with dense layers of these widths, which a config does not state; of its
    `dims` those above the embedding's size are dropped."""
    assert spec.embedding
    head = replace(spec.embedding, dense=tuple(widths))
    sized = replace(spec, embedding=head)
    return replace(sized, embedding=replace(head, dims=_dims(head.dims, sized.embedding_size)))


def _dims(trained: Iterable[int], size: int) -> tuple[int, ...]:
    return (size, *sorted((d for d in trained if d < size), reverse=True))


def _read(source: str | Path | dict[str, Any]) -> tuple[Any, Where, str]:
    """Return the raw config, its file, and a name for the spec."""
    if isinstance(source, dict):
        return source, Where("config", 0), "from-hf"
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    return _parse(file), Where(str(file), 0), file.absolute().parent.name


def _parse(file: Path) -> Any:
    data = read_bytes(file, MAX_BYTES, "give a checkpoint directory with config.json")
    if len(data) > MAX_BYTES:
        raise SpecError(f"{file}: larger than {MAX_BYTES} bytes; a config.json is small")
    try:
        return json_object(data)
    except ValueError as err:
        raise SpecError(f"{file}: {err}; fix it") from None


def _text_section(keys: Keys, base: str) -> tuple[Keys, Text, str]:
    """Return text_config's keys, its `Text`, and the model's dtype: the top level's, else
    text_config's, else f32."""
    section = keys.section("text_config") or Keys({}, "text_config", keys.where)
    section.only("model_type", (f"{base}_text", None), f"expected {base}_text")
    tied = keys.take("tie_word_embeddings", bool, True)
    if section.take("tie_word_embeddings", bool, tied) != tied:
        note = "%s: text_config.tie_word_embeddings ignored: the top level's (default true) is %s"
        log.warning(note, keys.where, tied)
    dtypes = [_dtype(keys), _dtype(section), "f32"]
    text = replace(_text(section, base), tie_word_embeddings=tied)
    return section, text, next(d for d in dtypes if d is not None)


def _composite(keys: Keys, model_type: str) -> dict[str, Any]:
    """Return the fields of Variant from a config with a text_config and sections of towers; Gemma
    3's image tower is left out."""
    section, text, dtype = _text_section(keys, model_type)
    if model_type not in TOWERS:
        _leave_out_parts(keys, model_type)
        tokens = _tokens(section, keys)
        section.done()
        return {"text": text, "tokens": tokens, "dtype": dtype}
    embedding = _embedding(section, text, hf.family(model_type))
    soft = keys.take("vision_soft_tokens_per_image", int | None, None)
    vision, audio = (_part(keys, name, TOWERS[model_type][name]) for name in ("vision", "audio"))
    if soft is not None and isinstance(vision, Vision):
        if "default_output_length" not in keys.values["vision_config"]:
            vision = replace(vision, default_output_length=soft)
        if vision.default_output_length != soft:
            raise keys.fail(
                "vision_soft_tokens_per_image",
                f"{soft} contradicts vision_config.default_output_length "
                f"{vision.default_output_length}; keep one",
            )
    have = {"vision": vision is not None, "audio": audio is not None}
    tokens = replace(_tokens(section, keys), **_media(keys, text.vocab_size, have))
    section.done()
    parts = {"text": text, "tokens": tokens, "vision": vision, "audio": audio, "dtype": dtype}
    return parts | {"embedding": embedding}


def _leave_out_parts(keys: Keys, model_type: str) -> None:
    keys.seen.update(hf.family(model_type).ignored.split())
    if keys.values.get("vision_config") is not None:
        note = "%s: vision_config: images are not supported for %s; only its text model is used"
        log.warning(note, keys.where, model_type)


def _assistant(keys: Keys, model_type: str) -> dict[str, Any]:
    """Return the fields of Variant from the config of a draft model, ignoring media token ids."""
    section, text, dtype = _text_section(keys, model_type.removesuffix(ASSISTANT))
    if not text.num_kv_shared_layers:  # in the reference, too, 0 stands for all layers
        text = replace(text, num_kv_shared_layers=text.num_hidden_layers)
    keys.seen.update(name for names, _ in hf.MEDIA.values() for name in names)
    tokens, drafter = _tokens(section, keys), _drafter(keys)
    section.done()
    return {"text": text, "tokens": tokens, "dtype": dtype, "drafter": drafter}


def _drafter(keys: Keys) -> Drafter:
    """Return the draft model's fields; the reference calls its centroids ordered embeddings."""
    hints, size = hints_of(Centroids), hints_of(Drafter)["backbone_hidden_size"]
    backbone = keys.take("backbone_hidden_size", size, 1536)
    centroids = {f: keys.take(key, hints[f], d) for f, (key, d) in hf.CENTROIDS.items()}
    ordered = keys.take("use_ordered_embeddings", bool, False)
    return Drafter(backbone, Centroids(**centroids) if ordered else None)


def _text_only(keys: Keys, model_type: str) -> dict[str, Any]:
    tied = keys.take("tie_word_embeddings", bool, True)
    text = replace(_text(keys, model_type), tie_word_embeddings=tied)
    head = _embedding(keys, text, hf.family(model_type))
    parts = {"text": text, "tokens": _tokens(keys, keys), "dtype": _dtype(keys) or "f32"}
    return parts | {"embedding": head}


def _embedding(keys: Keys, text: Text, family: hf.Family) -> EmbeddingHead | None:
    """Return an encoder's head, with the family's dense layers; None for a decoder."""
    rule, hints = family.embedding, hints_of(EmbeddingHead)
    if not rule:
        return None
    key, width = rule.get("projection", ""), None
    if key:
        width = keys.take(key, hints["projection"], family.keys[key])
    dense = tuple(n * text.hidden_size for n in rule.get("dense", ()))
    size = dense[-1] if dense else width or text.hidden_size
    trained = keys.take("matryoshka_dimensions", hints["dims"] | None, None)
    return EmbeddingHead(_dims(trained or rule["dims"], size), width, dense)


def _dtype(keys: Keys) -> str | None:
    names = [keys.take(k, str | None, None) for k in ("dtype", "torch_dtype")]
    word = names[0] or names[1]
    if word is None:
        return None
    word = dict(DTYPE_ALIASES).get(word.removeprefix("torch."), word)
    if word not in DTYPES:
        valid = ", ".join(name for name, _ in DTYPE_ALIASES)
        key = "dtype" if names[0] else "torch_dtype"
        raise keys.fail(key, f"{quote(word)} is not one of {valid}")
    return word


def _text(keys: Keys, model_type: str) -> Text:
    hints, family = hints_of(Text), hf.family(model_type)
    for key, feature in family.without.items():
        if key == family.when:
            continue
        keys.only(key, hf.NOTHING, f"{model_type} has no {feature}")
    layers = keys.take("num_hidden_layers", Layers, family.keys["num_hidden_layers"])
    kinds = _layer_types(keys, layers, family)
    sliding, full = _attention(keys, kinds, family)
    return Text(
        num_hidden_layers=layers,
        pattern=kinds,
        sliding=sliding,
        full=full,
        moe=_moe(keys),
        ple=_ple(keys, family),
        **{name: keys.take(name, hints[name], family.keys[name]) for name in family.plain},
        **family.fixed,
    )


def _layer_types(keys: Keys, layers: int, family: hf.Family) -> tuple[str, ...]:
    listed = keys.take("layer_types", tuple[str, ...] | None, None)
    if listed is None:
        older = family.older.get("pattern")
        every = keys.take(older, Layers, PERIOD) if older else PERIOD
        return tuple(SLIDING if (i + 1) % every else FULL for i in range(layers))
    # layer_types overrides these older keys.
    keys.seen |= {"sliding_window_pattern", "_sliding_window_pattern"}
    if len(listed) != layers:
        raise keys.fail("layer_types", f"has {len(listed)} entries for num_hidden_layers {layers}")
    wrong = [kind for kind in listed if kind not in hf.KINDS]
    if wrong:
        raise keys.fail("layer_types", f"{quote(wrong[0])} is not one of {', '.join(hf.KINDS)}")
    return tuple(hf.KINDS[kind] for kind in listed)


def _attention(
    keys: Keys, kinds: tuple[str, ...], family: hf.Family
) -> tuple[AttentionKind, AttentionKind]:
    """Return the attention geometry of sliding and full layers, from older keys or
    per_layer_config."""
    hints = hints_of(AttentionKind)
    tied = keys.take("attention_k_eq_v", bool, False)
    base = {n: keys.take(n, hints[n], family.keys[n]) for n in hf.BASE_GEOMETRY}
    overrides = _per_layer(keys, kinds)
    if overrides is None:
        overrides = {SLIDING: {}, FULL: _global_geometry(keys, tied, family)}
    else:  # per_layer_config overrides the older keys
        keys.seen |= {"global_head_dim", "num_global_key_value_heads"}
    ropes = _ropes(keys, set(kinds) | {FULL}, family)
    window = keys.take("sliding_window", hints["window"], family.keys["sliding_window"])
    if window and (reach := family.embedding.get("reach")):
        window = window // reach + 1
    sliding = AttentionKind(**base | overrides[SLIDING], rope=ropes[SLIDING], window=window)
    return sliding, AttentionKind(**base | overrides[FULL], rope=ropes[FULL], k_eq_v=tied)


def _global_geometry(keys: Keys, tied: bool, family: hf.Family) -> dict[str, int]:
    """Return the overrides of full layers; num_global_key_value_heads has an effect only with
    attention_k_eq_v, or in a family that has a default for it."""
    if "global_head_dim" not in family.keys:
        return {}
    hints = hints_of(AttentionKind)
    dim = keys.take("global_head_dim", hints["head_dim"] | None, family.keys["global_head_dim"])
    key = "num_global_key_value_heads"
    heads = keys.take(key, hints["num_key_value_heads"] | None, family.keys.get(key))
    counts = tied or key in family.keys
    out = {"head_dim": dim, "num_key_value_heads": heads if counts else None}
    return {name: value for name, value in out.items() if value is not None}


def _per_layer(keys: Keys, kinds: tuple[str, ...]) -> dict[str, dict[str, int]] | None:
    """Return layer kind -> overrides from per_layer_config; None if it is missing or null."""
    section = keys.section("per_layer_config")
    if section is None:
        return None
    by_layer: dict[int, dict[str, int]] = {i: {} for i in range(len(kinds))}
    for key in section.values:
        if not str(key).isdecimal() or len(str(key)) > 8 or int(key) not in by_layer:
            raise section.fail(str(key), f"is not a layer; expected 0..{len(kinds) - 1}")
        by_layer[int(key)] = _overrides(section, key)
    resolved = (*kinds[:-1], FULL)  # the reference makes the last layer a full one
    out: dict[str, dict[str, int]] = {SLIDING: {}, FULL: {}}
    for kind in set(resolved):
        layers = [by_layer[i] for i, k in enumerate(resolved) if k == kind]
        if any(layer != layers[0] for layer in layers):
            raise keys.fail(
                "per_layer_config", f"{kind} layers differ; expected one geometry per layer kind"
            )
        out[kind] = layers[0]
    return out


def _overrides(section: Keys, key: Any) -> dict[str, int]:
    hints = hints_of(AttentionKind)
    layer = Keys(section.values[key], join(section.path, str(key)), section.where)
    layer.only("skip", ([], None), "no layer part can be left out")
    out = {n: layer.take(n, hints[n]) for n in hf.BASE_GEOMETRY if n in layer.values}
    layer.done()
    return out


def _ropes(keys: Keys, used: set[str], family: hf.Family) -> dict[str, Rope]:
    defaults = {kind: family.ropes[kind] for kind in hf.HF_KINDS}
    older, section = _older_ropes(keys, family), keys.section("rope_parameters")
    ropes = section or Keys({}, "rope_parameters", keys.where)
    out = {}
    for kind, name in hf.HF_KINDS.items():
        part = ropes.section(name)
        if part is None and section and not older and kind in used:
            raise ropes.fail(name, "is missing; add rope_type and rope_theta")
        if part is None or older:
            values = part.values if part else {}
            part = Keys({**(older or defaults)[kind], **values}, join(ropes.path, name), keys.where)
        out[kind] = _rope(part, family.ropes["types"])
    ropes.done()
    return out


def _older_ropes(keys: Keys, family: hf.Family) -> dict[str, dict[str, Any]]:
    """Return RoPE parameters by layer kind from older keys; empty if the family has none."""
    out = {}
    for kind, key in family.older.get("thetas", {}).items():
        default = family.ropes[kind]
        theta = keys.take(key, hints_of(Rope)["theta"], default["rope_theta"])
        out[kind] = {**default, "rope_theta": theta}
    if out and (scaling := keys.section(family.older["scaling"])):
        kind = scaling.same(("rope_type", "type"), str, "default")
        out[FULL] |= {**scaling.values, "rope_type": kind}
        out[FULL].pop("type", None)
    return out


def _rope(keys: Keys, types: list[str]) -> Rope:
    hints = hints_of(Rope)
    kind = keys.same(("rope_type", "type"), str, "default")
    if kind not in types:
        expected = " or ".join(types)
        raise keys.fail("rope_type", f"{quote(kind)} is not supported; expected {expected}")
    kind = "proportional" if kind == "linear" else kind
    fraction = keys.take("partial_rotary_factor", hints["rotary_fraction"], 1.0)
    factor = keys.take("factor", hints["factor"], None)
    if kind == "default":  # the reference too ignores fraction and factor for this type
        fraction, factor = 1.0, None
    rope = Rope(kind, keys.take("rope_theta", hints["theta"]), fraction)
    keys.done()
    return rope if factor in (None, 1.0) else replace(rope, factor=factor)


def _moe(keys: Keys) -> Moe | None:
    hints = hints_of(Moe)
    names = {
        "num_experts": ("num_experts",),
        "top_k_experts": ("top_k_experts", "num_experts_per_tok"),
        "intermediate_size": ("moe_intermediate_size",),
    }
    on = keys.take("enable_moe_block", bool, False)
    sizes = {f: keys.same(n, hints[f] | None, None) for f, n in names.items()}
    if not on:
        return None
    missing = [names[f][0] for f, value in sizes.items() if value is None]
    if missing:
        raise keys.fail(missing[0], "is missing; enable_moe_block needs it")
    return Moe(**sizes)


def _ple(keys: Keys, family: hf.Family) -> Ple | None:
    names, hints = ("hidden_size_per_layer_input", "vocab_size_per_layer_input"), hints_of(Ple)
    if names[0] not in family.keys:
        return None
    dim = keys.take(names[0], int | None, family.keys[names[0]])
    vocab = None
    if names[1] in family.keys:
        vocab = keys.take(names[1], int | None, family.keys[names[1]])
        vocab = keys.take(names[1], hints["vocab_size"], vocab) if dim else vocab
    return Ple(keys.take(names[0], hints["dim"], dim), vocab) if dim else None


def _tokens(text: Keys, top: Keys) -> Tokens:
    defaults = {"bos": 2, "eos": 1, "pad": 0}
    out: dict[str, Any] = {}
    for name, default in defaults.items():
        key = f"{name}_token_id"
        texts = text.raw(key, default)
        tops = top.raw(key)
        value = texts if tops is None else tops
        path = text if tops is None else top
        node = tree_of([value] if isinstance(value, int) and name == "eos" else value, path.where)
        hint = hints_of(Tokens)[name]
        out[name] = convert(node, hint | None, join(path.path, key))
    return Tokens(bos=out["bos"], eos=out["eos"] or (), pad=out["pad"])


def _media(keys: Keys, vocab: int, have: dict[str, bool]) -> dict[str, Any]:
    """Return the token ids of media. An id outside the vocabulary is dropped if the model has no
    tower for its medium: transformers writes its defaults into every composite config."""
    out: dict[str, Any] = {}
    for name, (names, default) in hf.MEDIA.items():
        value = keys.same(names, hints_of(Tokens)[name], default)
        tower = have["audio" if name in hf.AUDIO_MEDIA else "vision"]
        out[name] = value if tower or value is None or value < vocab else None
    return out


def _part(keys: Keys, name: str, cls: type) -> Any:
    part = keys.section(f"{name}_config")
    if part is None:
        return None
    part.only("model_type", (hf.PART_TYPES[cls], None), f"expected {hf.PART_TYPES[cls]}")
    special = PART_READERS.get(cls, lambda part: {})(part)
    part.seen |= {"dtype", "torch_dtype", "tie_word_embeddings"}
    hints = hints_of(cls)
    out = {}
    for f in fields(cls):
        name, default = f.name, hf.PART_DEFAULTS[cls].get(f.name, f.default)
        out[name] = special[name] if name in special else part.take(name, hints[name], default)
    part.done()
    return cls(**out)


def _vision_extras(part: Keys) -> dict[str, Any]:
    rope = part.section("rope_parameters") or Keys({}, "rope_parameters", part.where)
    kind = rope.same(("rope_type", "type"), str, "default")
    if kind not in ("default", "axial"):
        raise rope.fail("rope_type", f"{quote(kind)} is not supported; expected default or axial")
    theta = rope.take("rope_theta", hints_of(Vision)["rope_theta"], 100.0)
    rope.done()
    dim = part.values.get("head_dim", hf.PART_DEFAULTS[Vision]["head_dim"])
    part.only("global_head_dim", (dim, None), f"expected head_dim {quote(str(dim))}")
    part.only(
        "per_layer_config", ({}, None), "all layers of the vision tower have the same geometry"
    )
    return {"rope_theta": theta}


def _unified_vision_extras(part: Keys) -> dict[str, Any]:
    sizes = [part.values.get(k, d) for k, d in (("patch_size", 16), ("pooling_kernel_size", 3))]
    if all(type(s) is int and 0 < s < 2**15 for s in sizes):
        side = sizes[0] * sizes[1]
        why = f"expected patch_size * pooling_kernel_size, {side}"
        part.only("model_patch_size", (side, None), why)
    return {}


def _unified_audio_extras(part: Keys) -> dict[str, Any]:
    names = ("audio_embed_dim", "audio_samples_per_token", "hidden_size", "output_proj_dims")
    default = hf.PART_DEFAULTS[UnifiedAudio]["audio_embed_dim"]
    return {"audio_embed_dim": part.same(names, hints_of(UnifiedAudio)["audio_embed_dim"], default)}


PART_READERS = {
    Vision: _vision_extras,
    UnifiedVision: _unified_vision_extras,
    UnifiedAudio: _unified_audio_extras,
}
