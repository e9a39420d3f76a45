"""Translates Hugging Face config.json <-> fields of a Spec, from raw JSON, without transformers.

Never through a config object: transformers 5.15 and later move `global_head_dim` and
`num_global_key_value_heads` into `per_layer_config` when they load a file. Defaults of missing
keys are those of transformers 5.17 (`models/gemma4/configuration_gemma4.py` and
`models/gemma4_unified/configuration_gemma4_unified.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from g4ir.errors import SpecError
from g4ir.spec.reader import (
    Where,
    convert,
    did_you_mean,
    fail,
    hints_of,
    join,
    json_object,
    shown,
    tree_of,
)

from .parts import (
    ASSISTANT,
    DTYPE_ALIASES,
    DTYPES,
    FULL,
    SLIDING,
    TOWERS,
    AttentionKind,
    Audio,
    Centroids,
    Drafter,
    Layers,
    Moe,
    Ple,
    Rope,
    Text,
    Tokens,
    UnifiedAudio,
    UnifiedVision,
    Variant,
    Vision,
    slug,
)
from .rules import canonical, problems

MAX_BYTES = 4 * 2**20
REQUIRED: Any = object()

log = logging.getLogger(__name__)

# config model_type -> (model_type of the spec, whether the file is a composite with towers)
MODEL_TYPES = {
    "gemma4": ("gemma4", True),
    "gemma4_text": ("gemma4", False),
    "gemma4_unified": ("gemma4_unified", True),
    "gemma4_unified_text": ("gemma4_unified", False),
    "gemma4_assistant": ("gemma4_assistant", True),
    "gemma4_unified_assistant": ("gemma4_unified_assistant", True),
}
ARCHITECTURES = {
    ("gemma4", True): "Gemma4ForConditionalGeneration",
    ("gemma4", False): "Gemma4ForCausalLM",
    ("gemma4_unified", True): "Gemma4UnifiedForConditionalGeneration",
    ("gemma4_unified", False): "Gemma4UnifiedForCausalLM",
    ("gemma4_assistant", True): "Gemma4AssistantForCausalLM",
    ("gemma4_unified_assistant", True): "Gemma4UnifiedAssistantForCausalLM",
}
KINDS = {"sliding_attention": SLIDING, "full_attention": FULL}
HF_KINDS = {kind: name for name, kind in KINDS.items()}

# Keys that change no value of the forward pass: bookkeeping, training, and generation settings
# that transformers itself drops when it loads a config.
_HOUSEKEEPING = """
    _name_or_path name_or_path _commit_hash architectures transformers_version auto_map
    initializer_range use_cache attention_dropout id2label label2id num_labels problem_type
    output_attentions output_hidden_states return_dict return_dict_in_generate output_scores
    _attn_implementation _attn_implementation_autoset attn_implementation cache_implementation
    _experts_implementation experts_implementation finetuning_task task_specific_params
    tokenizer_class torchscript use_bfloat16 tf_legacy_loss prefix sep_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens
    begin_suppress_tokens bad_words_ids max_length min_length max_new_tokens do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    num_return_sequences exponential_decay_length_penalty remove_invalid_values
    unsloth_fixed unsloth_version
"""
HOUSEKEEPING = frozenset(_HOUSEKEEPING.split())
# Keys that are known, and legal only with a value that means "nothing".
NEUTRAL = (
    "is_encoder_decoder",
    "is_decoder",
    "add_cross_attention",
    "cross_attention_hidden_size",
    "chunk_size_feed_forward",
    "pruned_heads",
    "tie_encoder_decoder",
    "quantization_config",  # of a part; that of the whole is read with the weights
    "attention_bias",
    "attn_logit_softcapping",
)
NOTHING: tuple[Any, ...] = (None, False, 0, 0.0, {}, [], "")

TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": None,
}
BY_MODEL: dict[str, dict[str, Any]] = {
    "gemma4": {
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
    },
    "gemma4_unified": {
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
}
ROPE_DEFAULTS: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
# HF defaults of the fields that the dataclass itself leaves without one
PART_DEFAULTS: dict[type, dict[str, Any]] = {
    Vision: {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10240,
    },
    Audio: {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "output_proj_dims": 1536,
    },
    UnifiedVision: {"mm_embed_dim": 3840, "mm_posemb_size": 1120},
    UnifiedAudio: {"audio_embed_dim": 640},
}
PART_TYPES: dict[type, str] = {
    Vision: "gemma4_vision",
    Audio: "gemma4_audio",
    UnifiedVision: "gemma4_unified_vision",
    UnifiedAudio: "gemma4_unified_audio",
}
# field of Tokens -> its key in a composite config, older spellings after it, and the default
MEDIA: dict[str, tuple[tuple[str, ...], int]] = {
    "image": (("image_token_id",), 258880),
    "video": (("video_token_id",), 258884),
    "audio": (("audio_token_id",), 258881),
    "boi": (("boi_token_id",), 255999),
    "eoi": (("eoi_token_id",), 258882),
    "boa": (("boa_token_id",), 256000),
    "eoa": (("eoa_token_index", "eoa_token_id"), 258883),
}
AUDIO_MEDIA = ("audio", "boa", "eoa")

# field of Centroids -> its key and default
CENTROIDS = {"count": ("num_centroids", 2048), "top_k": ("centroid_intermediate_top_k", 32)}

# key path of the spec -> key of the text config, for messages about rules that join fields
HF_NAMES = {
    "text.sliding.head_dim": "head_dim",
    "text.sliding.num_key_value_heads": "num_key_value_heads",
    "text.sliding.window": "sliding_window",
    "text.full.head_dim": "global_head_dim",
    "text.full.num_key_value_heads": "num_global_key_value_heads",
    "text.moe.top_k_experts": "top_k_experts",
    "text.sliding.rope.rotary_fraction": "rope_parameters.sliding_attention",
    "text.full.rope.rotary_fraction": "rope_parameters.full_attention",
    "drafter.centroids.count": "num_centroids",
    "drafter.centroids.top_k": "centroid_intermediate_top_k",
}


# --- reading ----------------------------------------------------------------------------------


class Keys:
    """A JSON object that remembers which keys were read; every message names the key path."""

    def __init__(self, values: Any, path: str, where: Where) -> None:
        if not isinstance(values, dict):
            raise fail(where, path, f"expected an object, found {shown(str(type(values)))}")
        self.values: dict[Any, Any] = values
        self.path = path
        self.where = where
        self.seen: set[str] = set(HOUSEKEEPING)

    def raw(self, key: str, default: Any = None) -> Any:
        """Return the unconverted value."""
        self.seen.add(key)
        return self.values.get(key, default)

    def take(self, key: str, hint: Any, default: Any = REQUIRED) -> Any:
        """Return the value as the annotation wants it, or the default where the key is missing."""
        if key not in self.values and default is REQUIRED:
            raise self.fail(key, "is missing; add it")
        value = self.raw(key, default)
        node = tree_of(value, self.where)
        return convert(node, hint, join(self.path, key)) if key in self.values else value

    def same(self, names: tuple[str, ...], hint: Any, default: Any) -> Any:
        """Return the value under any of several names; they must agree where several are given."""
        given = {name: self.take(name, hint) for name in names if name in self.values}
        given = {name: value for name, value in given.items() if value is not None} or given
        if len(set(given.values())) > 1:
            pairs = ", ".join(f"{name} {value}" for name, value in given.items())
            raise self.fail(names[0], f"contradicts another name of it ({pairs}); keep one")
        return next(iter(given.values()), default)

    def section(self, key: str) -> Keys | None:
        """Return a nested object, or None where it is missing or null."""
        value = self.raw(key)
        return None if value is None else Keys(value, join(self.path, key), self.where)

    def only(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Raise SpecError unless the key is missing or has one of the allowed values."""
        value = self.raw(key, allowed[0])
        if not any(value == a and type(value) is type(a) for a in allowed):
            raise self.fail(key, f"{shown(str(value))} is not supported: {why}")

    def done(self) -> None:
        """Raise SpecError for the first key that nothing has read."""
        for key in (k for k in NEUTRAL if k not in self.seen):
            self.only(key, NOTHING, "it changes the forward pass; use a checkpoint without it")
        for key in self.values:
            if key not in self.seen:
                near = did_you_mean(str(key), self.seen - HOUSEKEEPING)
                raise self.fail(
                    str(key),
                    f"unknown key, which may change the forward pass{near}; remove it from the "
                    "config if it does not",
                )

    def fail(self, key: str, message: str) -> SpecError:
        return fail(self.where, join(self.path, key), message)


def read_config(source: str | Path | dict[str, Any], name: str | None = None) -> Variant:
    """Read a config: see `Spec.from_hf`."""
    values, where, found = _read(source)
    keys = Keys(values, "", where)
    for key in ("quantization_config", "quantization"):
        keys.raw(key)  # how weights are stored: weights/formats
    given = keys.take("model_type", str)
    if given not in MODEL_TYPES:
        near = did_you_mean(given, MODEL_TYPES)
        raise keys.fail(
            "model_type", f"{shown(given)} is not one of {', '.join(MODEL_TYPES)}{near}"
        )
    model_type, composite = MODEL_TYPES[given]
    read = _assistant if model_type.endswith(ASSISTANT) else _composite if composite else _text_only
    parts = read(keys, model_type)
    keys.done()
    spec = Variant(name=slug(name or found), model_type=model_type, **parts)
    for path, message, _ in problems(spec):
        hf = HF_NAMES.get(path)
        raise fail(where, f"{path} ({hf})" if hf else path, message)
    return canonical(spec)


def _read(source: str | Path | dict[str, Any]) -> tuple[Any, Where, str]:
    """Return the raw config, where it came from, and a name for the spec."""
    if isinstance(source, dict):
        return source, Where("config", 0), "from-hf"
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    return _parse(_bytes(file), file), Where(str(file), 0), file.absolute().parent.name


def _bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as err:  # ValueError: a NUL in the name
        reason = err.strerror if isinstance(err, OSError) else str(err)
        raise SpecError(
            f"{file}: cannot be read ({reason}); give a checkpoint directory with config.json"
        ) from None
    if len(data) > MAX_BYTES:
        raise SpecError(f"{file}: larger than {MAX_BYTES} bytes; a config.json is small")
    return data


def _parse(data: bytes, file: Path) -> Any:
    try:
        return json_object(data)
    except ValueError as err:
        raise SpecError(f"{file}: {err}; fix it") from None


def _composite(keys: Keys, model_type: str) -> dict[str, Any]:
    """Return fields of Variant from a config with text_config and towers."""
    text_keys = keys.section("text_config") or Keys({}, "text_config", keys.where)
    text_keys.only("model_type", (f"{model_type}_text", None), f"expected {model_type}_text")
    tied = keys.take("tie_word_embeddings", bool, True)
    if text_keys.take("tie_word_embeddings", bool, tied) != tied:
        log.warning("%s: tie_word_embeddings of the whole model counts: %s", keys.where, tied)
    text = replace(_text(text_keys, model_type), tie_word_embeddings=tied)
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
    tokens = replace(_tokens(text_keys, keys), **_media(keys, text.vocab_size, have))
    dtypes = [_dtype(keys), _dtype(text_keys), "f32"]
    dtype = next(d for d in dtypes if d is not None)
    text_keys.done()
    return {"text": text, "tokens": tokens, "vision": vision, "audio": audio, "dtype": dtype}


def _assistant(keys: Keys, model_type: str) -> dict[str, Any]:
    """Return fields of Variant from the config of a drafter; ids of media say nothing here."""
    base = model_type.removesuffix(ASSISTANT)
    text_keys = keys.section("text_config") or Keys({}, "text_config", keys.where)
    text_keys.only("model_type", (f"{base}_text", None), f"expected {base}_text")
    tied = keys.take("tie_word_embeddings", bool, True)
    text_keys.raw("tie_word_embeddings")
    text = replace(_text(text_keys, base), tie_word_embeddings=tied)
    if not text.num_kv_shared_layers:  # as the reference fills it in
        text = replace(text, num_kv_shared_layers=text.num_hidden_layers)
    keys.seen.update(name for names, _ in MEDIA.values() for name in names)
    dtypes = [_dtype(keys), _dtype(text_keys), "f32"]
    parts = {
        "text": text,
        "tokens": _tokens(text_keys, keys),
        "dtype": next(d for d in dtypes if d is not None),
        "drafter": _drafter(keys),
    }
    text_keys.done()
    return parts


def _drafter(keys: Keys) -> Drafter:
    """Return what the reference calls ordered embeddings as centroids."""
    hints, size = hints_of(Centroids), hints_of(Drafter)["backbone_hidden_size"]
    backbone = keys.take("backbone_hidden_size", size, 1536)
    found = {f: keys.take(key, hints[f], d) for f, (key, d) in CENTROIDS.items()}
    ordered = keys.take("use_ordered_embeddings", bool, False)
    return Drafter(backbone, Centroids(**found) if ordered else None)


def _text_only(keys: Keys, model_type: str) -> dict[str, Any]:
    """Return fields of Variant from a config of the text tower alone."""
    tied = keys.take("tie_word_embeddings", bool, True)
    text = replace(_text(keys, model_type), tie_word_embeddings=tied)
    return {"text": text, "tokens": _tokens(keys, keys), "dtype": _dtype(keys) or "f32"}


def _dtype(keys: Keys) -> str | None:
    given = [keys.take(k, str | None, None) for k in ("dtype", "torch_dtype")]
    word = given[0] or given[1]
    if word is None:
        return None
    word = dict(DTYPE_ALIASES).get(word.removeprefix("torch."), word)
    if word not in DTYPES:
        names = ", ".join(hf for hf, _ in DTYPE_ALIASES)
        raise keys.fail("dtype", f"{shown(word)} is not one of {names}")
    return word


def _text(keys: Keys, model_type: str) -> Text:
    hints = hints_of(Text)
    defaults = TEXT_DEFAULTS | BY_MODEL[model_type]
    layers = keys.take("num_hidden_layers", Layers, 30)
    bidirectional = keys.take(
        "use_bidirectional_attention", str | None, defaults["use_bidirectional_attention"]
    )
    if bidirectional not in (None, "vision"):
        raise keys.fail(
            "use_bidirectional_attention",
            f"{shown(bidirectional)} is not supported; only null or vision",
        )
    kinds = _layer_types(keys, layers)
    sliding, full = _attention(keys, kinds, defaults["sliding_window"])
    plain = [*TEXT_DEFAULTS, "max_position_embeddings"]
    return Text(
        num_hidden_layers=layers,
        pattern=kinds,
        sliding=sliding,
        full=full,
        moe=_moe(keys, model_type),
        ple=_ple(keys, model_type),
        use_bidirectional_attention=bidirectional,
        **{name: keys.take(name, hints[name], defaults[name]) for name in plain},
    )


def _layer_types(keys: Keys, layers: int) -> tuple[str, ...]:
    """Return kinds of all layers; every sixth is full by default."""
    given = keys.take("layer_types", tuple[str, ...] | None, None)
    if given is None:
        return tuple(SLIDING if (i + 1) % 6 else FULL for i in range(layers))
    keys.seen |= {
        "sliding_window_pattern",
        "_sliding_window_pattern",
    }  # what layer_types spells out
    if len(given) != layers:
        raise keys.fail("layer_types", f"has {len(given)} entries for num_hidden_layers {layers}")
    wrong = [kind for kind in given if kind not in KINDS]
    if wrong:
        raise keys.fail("layer_types", f"{shown(wrong[0])} is not one of {', '.join(KINDS)}")
    return tuple(KINDS[kind] for kind in given)


def _attention(
    keys: Keys, kinds: tuple[str, ...], window: int
) -> tuple[AttentionKind, AttentionKind]:
    """Return the geometry of sliding and full layers, from older keys or per_layer_config."""
    hints = hints_of(AttentionKind)
    tied = keys.take("attention_k_eq_v", bool, False)
    base = {name: keys.take(name, hints[name], d) for name, d in BASE_GEOMETRY.items()}
    overrides = _per_layer(keys, kinds)
    if overrides is None:
        overrides = {SLIDING: {}, FULL: _global_geometry(keys, tied)}
    else:  # the older keys have no effect beside per_layer_config
        keys.seen |= {"global_head_dim", "num_global_key_value_heads"}
    ropes = _ropes(keys, set(kinds) | {FULL})
    sliding = AttentionKind(
        **base | overrides[SLIDING],
        rope=ropes[SLIDING],
        window=keys.take("sliding_window", hints["window"], window),
    )
    return sliding, AttentionKind(**base | overrides[FULL], rope=ropes[FULL], k_eq_v=tied)


BASE_GEOMETRY = {"head_dim": 256, "num_key_value_heads": 4}


def _global_geometry(keys: Keys, tied: bool) -> dict[str, int]:
    """Return overrides of full layers. KV heads of their own count only with attention_k_eq_v."""
    hints = hints_of(AttentionKind)
    dim = keys.take("global_head_dim", hints["head_dim"] | None, 512)
    heads = keys.take("num_global_key_value_heads", hints["num_key_value_heads"] | None, None)
    out = {"head_dim": dim, "num_key_value_heads": heads if tied else None}
    return {name: value for name, value in out.items() if value is not None}


def _per_layer(keys: Keys, kinds: tuple[str, ...]) -> dict[str, dict[str, int]] | None:
    """kind -> overrides, from per_layer_config; None where the file has none."""
    section = keys.section("per_layer_config")
    if section is None:
        return None
    by_layer: dict[int, dict[str, int]] = {i: {} for i in range(len(kinds))}
    for key in section.values:
        if not str(key).isdecimal() or len(str(key)) > 8 or int(key) not in by_layer:
            raise section.fail(str(key), f"is not a layer; 0..{len(kinds) - 1}")
        by_layer[int(key)] = _overrides(section, key)
    resolved = (*kinds[:-1], FULL)  # the reference makes the last layer a full one
    out: dict[str, dict[str, int]] = {SLIDING: {}, FULL: {}}
    for kind in set(resolved):
        layers = [by_layer[i] for i, k in enumerate(resolved) if k == kind]
        if any(layer != layers[0] for layer in layers):
            raise keys.fail(
                "per_layer_config", f"{kind} layers differ from each other; one geometry per kind"
            )
        out[kind] = layers[0]
    return out


def _overrides(section: Keys, key: Any) -> dict[str, int]:
    hints = hints_of(AttentionKind)
    layer = Keys(section.values[key], join(section.path, str(key)), section.where)
    layer.only("skip", ([], None), "no layer part can be left out")
    out = {n: layer.take(n, hints[n]) for n in BASE_GEOMETRY if n in layer.values}
    layer.done()
    return out


def _ropes(keys: Keys, used: set[str]) -> dict[str, Rope]:
    section = keys.section("rope_parameters")
    if section is None:
        section = Keys({HF_KINDS[k]: v for k, v in ROPE_DEFAULTS.items()}, "", keys.where)
    out = {}
    for kind, name in HF_KINDS.items():
        part = section.section(name)
        if part is None and kind in used:
            raise section.fail(name, "is missing; add rope_type and rope_theta")
        out[kind] = _rope(part or Keys(ROPE_DEFAULTS[kind], name, keys.where))
    section.done()
    return out


def _rope(keys: Keys) -> Rope:
    hints = hints_of(Rope)
    kind = keys.same(("rope_type", "type"), str, "default")
    if kind not in ("default", "proportional"):
        raise keys.fail("rope_type", f"{shown(kind)} is not supported; default or proportional")
    fraction = keys.take("partial_rotary_factor", hints["rotary_fraction"], 1.0)
    factor = keys.take("factor", hints["factor"], None)
    if kind == "default" and (fraction != 1.0 or factor is not None):
        log.warning(
            "%s: %s: rope_type default ignores partial_rotary_factor and factor,"
            " as in the reference",
            keys.where,
            keys.path,
        )
        fraction, factor = 1.0, None
    rope = Rope(kind, keys.take("rope_theta", hints["theta"]), fraction)
    keys.done()
    return rope if factor in (None, 1.0) else replace(rope, factor=factor)


def _moe(keys: Keys, model_type: str) -> Moe | None:
    hints = hints_of(Moe)
    names = {
        "num_experts": ("num_experts",),
        "top_k_experts": ("top_k_experts", "num_experts_per_tok"),
        "intermediate_size": ("moe_intermediate_size",),
    }
    on = keys.take("enable_moe_block", bool, False)
    given = {f: keys.same(n, hints[f] | None, None) for f, n in names.items()}
    if not on:
        return None
    _not_unified(keys, model_type, "enable_moe_block", "experts")
    missing = [names[f][0] for f, value in given.items() if value is None]
    if missing:
        raise keys.fail(missing[0], "is missing; enable_moe_block needs it")
    return Moe(**given)


def _ple(keys: Keys, model_type: str) -> Ple | None:
    default = 256 if model_type == "gemma4" else 0
    dim = keys.take("hidden_size_per_layer_input", int | None, default)
    vocab = keys.take("vocab_size_per_layer_input", int | None, 262144)
    if not dim:
        return None
    _not_unified(keys, model_type, "hidden_size_per_layer_input", "per-layer embeddings")
    hints = hints_of(Ple)
    for key, hint in (
        ("hidden_size_per_layer_input", "dim"),
        ("vocab_size_per_layer_input", "vocab_size"),
    ):
        keys.take(key, hints[hint], 1)  # now in range as well
    return Ple(dim, vocab)


def _not_unified(keys: Keys, model_type: str, key: str, what: str) -> None:
    if model_type == "gemma4_unified":
        raise keys.fail(
            key, f"gemma4_unified has no {what} in the reference; use model_type gemma4"
        )


def _tokens(text: Keys, top: Keys) -> Tokens:
    """Return bos, eos and pad; the whole model's values count before those of text_config."""
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
    """Return ids of soft tokens. Where there is no tower, an id outside a small vocabulary is
    dropped: transformers writes its defaults into every composite config."""
    out: dict[str, Any] = {}
    for name, (names, default) in MEDIA.items():
        value = keys.same(names, hints_of(Tokens)[name], default)
        tower = have["audio" if name in AUDIO_MEDIA else "vision"]
        out[name] = value if tower or value is None or value < vocab else None
    return out


def _part(keys: Keys, name: str, cls: type) -> Any:
    """Return the dataclass of `vision_config` or `audio_config`, or None without one."""
    part = keys.section(f"{name}_config")
    if part is None:
        return None
    part.only("model_type", (PART_TYPES[cls], None), f"expected {PART_TYPES[cls]}")
    special = PART_READERS.get(cls, lambda part: {})(part)
    part.seen |= {"dtype", "torch_dtype", "tie_word_embeddings"}
    hints = hints_of(cls)
    out = {}
    for f in fields(cls):
        default = PART_DEFAULTS[cls].get(f.name, f.default)
        out[f.name] = (
            special[f.name] if f.name in special else part.take(f.name, hints[f.name], default)
        )
    part.done()
    return cls(**out)


def _vision_extras(part: Keys) -> dict[str, Any]:
    rope = part.section("rope_parameters") or Keys({}, "rope_parameters", part.where)
    kind = rope.same(("rope_type", "type"), str, "default")
    if kind not in ("default", "axial"):
        raise rope.fail("rope_type", f"{shown(kind)} is not supported; default or axial")
    theta = rope.take("rope_theta", hints_of(Vision)["rope_theta"], 100.0)
    rope.done()
    dim = part.values.get("head_dim", PART_DEFAULTS[Vision]["head_dim"])
    part.only("global_head_dim", (dim, None), f"expected head_dim {shown(str(dim))}")
    part.only("per_layer_config", ({}, None), "the vision layers are alike")
    return {"rope_theta": theta}


def _unified_vision_extras(part: Keys) -> dict[str, Any]:
    sizes = [part.values.get(k, d) for k, d in (("patch_size", 16), ("pooling_kernel_size", 3))]
    if all(type(s) is int and 0 < s < 2**15 for s in sizes):
        side = sizes[0] * sizes[1]
        part.only("model_patch_size", (side, None), f"expected patch_size * pooling {side}")
    return {}


def _unified_audio_extras(part: Keys) -> dict[str, Any]:
    names = ("audio_embed_dim", "audio_samples_per_token", "hidden_size", "output_proj_dims")
    default = PART_DEFAULTS[UnifiedAudio]["audio_embed_dim"]
    return {"audio_embed_dim": part.same(names, hints_of(UnifiedAudio)["audio_embed_dim"], default)}


PART_READERS = {
    Vision: _vision_extras,
    UnifiedVision: _unified_vision_extras,
    UnifiedAudio: _unified_audio_extras,
}


# --- writing ----------------------------------------------------------------------------------


def config_of(spec: Variant) -> dict[str, Any]:
    """Return the config of a spec: see `Spec.to_hf`. Without towers and media ids it is the config
    of the text tower alone."""
    for path, why in _inexpressible(spec):
        raise SpecError(f"spec {spec.name}: {path}: a Hugging Face config cannot say {why}")
    media = {keys[0]: getattr(spec.tokens, name) for name, (keys, _) in MEDIA.items()}
    composite = bool(
        spec.vision or spec.audio or spec.drafter or any(v is not None for v in media.values())
    )
    dtype = {short: long for long, short in DTYPE_ALIASES}[spec.dtype]
    head = {"architectures": [ARCHITECTURES[spec.model_type, composite]], "dtype": dtype}
    text = _text_to_hf(spec, dtype)
    if not composite:
        return head | text
    if spec.drafter:
        return {
            **head,
            "model_type": spec.model_type,
            "tie_word_embeddings": spec.text.tie_word_embeddings,
            **_drafter_to_hf(spec.drafter),
            "text_config": text,
        }
    return {
        **head,
        "model_type": spec.model_type,
        "tie_word_embeddings": spec.text.tie_word_embeddings,
        "eos_token_id": list(spec.tokens.eos),
        **media,
        "text_config": text,
        "vision_config": _part_to_hf(spec.vision, dtype),
        "audio_config": _part_to_hf(spec.audio, dtype),
    }


def _drafter_to_hf(drafter: Drafter) -> dict[str, Any]:
    found = drafter.centroids
    return {
        "backbone_hidden_size": drafter.backbone_hidden_size,
        "use_ordered_embeddings": found is not None,
        **{key: getattr(found, f) if found else d for f, (key, d) in CENTROIDS.items()},
    }


def _inexpressible(spec: Variant) -> Iterator[tuple[str, str]]:
    text, kinds = spec.text, spec.text.layer_types
    if text.sliding.k_eq_v and SLIDING in kinds:
        yield "text.sliding.k_eq_v", "that sliding layers have K=V; set it to false"
    if spec.drafter and spec.drafter.position != "next":
        yield "drafter.position", "where a drafted token stands; leave it out"
    if text.attn_logit_softcapping is not None:
        yield "text.attn_logit_softcapping", "that attention is softcapped; leave it out"
    if text.moe and text.moe.layers not in (None, tuple(range(len(kinds)))):
        yield "text.moe.layers", "that only some layers have experts; leave it out"
    if spec.model_type.startswith("gemma4_unified"):
        for name in ("moe", "ple"):
            if getattr(text, name) is not None:
                yield f"text.{name}", f"that gemma4_unified has {name}; use model_type gemma4"


def _text_to_hf(spec: Variant, dtype: str) -> dict[str, Any]:
    text, tokens, base = spec.text, spec.tokens, spec.model_type.removesuffix(ASSISTANT)
    plain = [*TEXT_DEFAULTS, "max_position_embeddings", "use_bidirectional_attention"]
    return {
        "model_type": f"{base}_text",
        "dtype": dtype,
        **{name: getattr(text, name) for name in plain},
        "num_hidden_layers": text.num_hidden_layers,
        "layer_types": [HF_KINDS[kind] for kind in text.layer_types],
        **_geometry_to_hf(text),
        "rope_parameters": {HF_KINDS[k]: _rope_to_hf(getattr(text, k).rope) for k in HF_KINDS},
        "attention_bias": False,
        "tie_word_embeddings": text.tie_word_embeddings,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos[0] if len(tokens.eos) == 1 else list(tokens.eos),
        "pad_token_id": tokens.pad,
        **(_blocks_to_hf(text, bool(spec.drafter)) if base == "gemma4" else {}),
    }


def _geometry_to_hf(text: Text) -> dict[str, Any]:
    """Return the older keys where they can say it; per_layer_config where full layers have KV heads
    of their own without K=V."""
    sliding, full = text.sliding, text.full
    out: dict[str, Any] = {
        "head_dim": sliding.head_dim,
        "num_key_value_heads": sliding.num_key_value_heads,
        "sliding_window": sliding.window,
        "attention_k_eq_v": full.k_eq_v,
    }
    if full.k_eq_v or full.num_key_value_heads == sliding.num_key_value_heads:
        heads = full.num_key_value_heads if full.k_eq_v else None
        return out | {"global_head_dim": full.head_dim, "num_global_key_value_heads": heads}
    own = {name: getattr(full, name) for name in BASE_GEOMETRY}
    layers = {str(i): own for i, kind in enumerate(text.layer_types) if kind == FULL}
    return out | {"per_layer_config": layers}


def _rope_to_hf(rope: Rope) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    out |= {"partial_rotary_factor": rope.rotary_fraction} if rope.kind == "proportional" else {}
    return out if rope.factor is None else out | {"factor": rope.factor}


def _blocks_to_hf(text: Text, drafts: bool) -> dict[str, Any]:
    moe, ple = text.moe, text.ple
    return {
        "enable_moe_block": moe is not None,
        "num_experts": moe.num_experts if moe else None,
        "top_k_experts": moe.top_k_experts if moe else None,
        "moe_intermediate_size": moe.intermediate_size if moe else None,
        "hidden_size_per_layer_input": ple.dim if ple else 0,
        "vocab_size_per_layer_input": ple.vocab_size if ple else 0 if drafts else text.vocab_size,
    }


def _part_to_hf(part: Any, dtype: str) -> dict[str, Any] | None:
    if part is None:
        return None
    out = {f.name: getattr(part, f.name) for f in fields(part)}
    out = {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}
    if isinstance(part, Vision):
        out["rope_parameters"] = {"rope_type": "default", "rope_theta": out.pop("rope_theta")}
    return {"model_type": PART_TYPES[type(part)], "dtype": dtype, **out}
