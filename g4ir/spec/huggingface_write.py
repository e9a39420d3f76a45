"""Write a Spec as a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from g4ir.errors import SpecError

from . import huggingface_tables as hf
from .parts import (
    ASSISTANT,
    DTYPE_ALIASES,
    FULL,
    MODEL_TYPES,
    SLIDING,
    Drafter,
    Rope,
    Text,
    Variant,
    Vision,
)


def config_of(spec: Variant) -> dict[str, Any]:
    """Return the config.json of a spec: see `Spec.to_hf`. A spec with neither towers, media ids nor
    `drafter` has a text-only config."""
    for path, why in _inexpressible(spec):
        raise SpecError(f"spec {spec.name}: {path}: a Hugging Face config cannot express {why}")
    media = {keys[0]: getattr(spec.tokens, name) for name, (keys, _) in hf.MEDIA.items()}
    composite = bool(
        spec.vision or spec.audio or spec.drafter or any(v is not None for v in media.values())
    )
    dtype = {short: long for long, short in DTYPE_ALIASES}[spec.dtype]
    name = hf.ARCHITECTURES[spec.model_type, composite]
    head: dict[str, Any] = {"architectures": [name], "dtype": dtype}
    text = _text_to_hf(spec, dtype)
    if not composite:
        return head | text
    head["model_type"] = spec.model_type
    head["tie_word_embeddings"] = spec.text.tie_word_embeddings
    if spec.drafter:
        return {**head, **_drafter_to_hf(spec.drafter), "text_config": text}
    return {
        **head,
        "eos_token_id": list(spec.tokens.eos),
        **media,
        "text_config": text,
        "vision_config": _part_to_hf(spec.vision, dtype),
        "audio_config": _part_to_hf(spec.audio, dtype),
    }


def _drafter_to_hf(drafter: Drafter) -> dict[str, Any]:
    centroids = drafter.centroids
    return {
        "backbone_hidden_size": drafter.backbone_hidden_size,
        "use_ordered_embeddings": centroids is not None,
        **{key: getattr(centroids, f) if centroids else d for f, (key, d) in hf.CENTROIDS.items()},
    }


#: optional field of Text -> its key in `Family.without`
_PARTS = {
    "moe": "enable_moe_block",
    "ple": "hidden_size_per_layer_input",
    "num_kv_shared_layers": "num_kv_shared_layers",
    "use_bidirectional_attention": "use_bidirectional_attention",
}


def _inexpressible(spec: Variant) -> Iterator[tuple[str, str]]:
    text, kinds = spec.text, spec.text.layer_types
    if text.sliding.k_eq_v and SLIDING in kinds:
        yield "text.sliding.k_eq_v", "that sliding layers have K=V; set it to false"
    if spec.drafter and spec.drafter.position != "next":
        yield "drafter.position", "the position of draft tokens; leave it out"
    if text.attn_logit_softcapping is not None:
        yield "text.attn_logit_softcapping", "that attention is softcapped; leave it out"
    if text.moe and text.moe.layers not in (None, tuple(range(len(kinds)))):
        yield "text.moe.layers", "that only some layers have experts; leave it out"
    family = hf.family(spec.model_type)
    for name, key in _PARTS.items():
        if key in family.without and getattr(text, name):
            feature = f"that {spec.model_type} has {family.without[key]}"
            yield f"text.{name}", f"{feature}; use model_type {MODEL_TYPES[0]}"
    for name, value in family.fixed.items():
        if getattr(text, name) != value:
            yield f"text.{name}", f"a {name} of {spec.model_type} other than {value}"
    for name, rope in ((SLIDING, text.sliding.rope), (FULL, text.full.rope)):
        written = rope.kind in family.ropes["types"]
        if not written and rope.rotary_fraction != 1:
            why = f"that {spec.model_type} rotates only a part of each head"
            yield f"text.{name}.rope.rotary_fraction", why
        if not written and rope.factor is not None and "linear" not in family.ropes["types"]:
            yield f"text.{name}.rope.factor", f"a rope factor of {spec.model_type}; leave it out"
    if "per_layer_config" in family.without:
        yield from _inexpressible_kinds(spec)


def _inexpressible_kinds(spec: Variant) -> Iterator[tuple[str, str]]:
    """Yield attention geometry that the configs of a family with one geometry for all layers cannot
    have."""
    full, sliding = spec.text.full, spec.text.sliding
    if full.k_eq_v:
        yield "text.full.k_eq_v", f"that {spec.model_type} has layers with K=V; set it to false"
    for name in hf.BASE_GEOMETRY:
        if getattr(full, name) != (value := getattr(sliding, name)):
            why = f"a {name} other than text.sliding's for {spec.model_type}; give {value}"
            yield f"text.full.{name}", why


def _text_to_hf(spec: Variant, dtype: str) -> dict[str, Any]:
    text, tokens, base = spec.text, spec.tokens, spec.model_type.removesuffix(ASSISTANT)
    family = hf.family(base)
    names = {kind: name for name, (kind, composite) in hf.MODEL_TYPES.items() if not composite}
    names |= {kind: name for name, (_, kind) in hf.VARIANTS.items()}
    return {
        "model_type": names[base],
        **_embedding_to_hf(spec, family),
        "dtype": dtype,
        **{name: getattr(text, name) for name in family.plain},
        "num_hidden_layers": text.num_hidden_layers,
        "layer_types": [hf.HF_KINDS[kind] for kind in text.layer_types],
        **_geometry_to_hf(text, family),
        "rope_parameters": {
            hf.HF_KINDS[k]: _rope_to_hf(getattr(text, k).rope, family) for k in hf.HF_KINDS
        },
        "attention_bias": False,
        "tie_word_embeddings": text.tie_word_embeddings,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos[0] if len(tokens.eos) == 1 else list(tokens.eos),
        "pad_token_id": tokens.pad,
        **({} if "enable_moe_block" in family.without else _blocks_to_hf(text, bool(spec.drafter))),
    }


def _embedding_to_hf(spec: Variant, family: hf.Family) -> dict[str, Any]:
    """Return more keys of an encoder, {} for a decoder; modules.json, not the config, states dense
    layers."""
    head = spec.embedding
    if not head:
        return {}
    out: dict[str, Any] = {family.when: True} if family.when else {}
    if key := family.embedding.get("projection"):
        out[key] = head.projection
    if spec.text.ple:
        out["hidden_size_per_layer_input"] = spec.text.ple.dim
    return out | {"matryoshka_dimensions": list(head.dims)}


def _geometry_to_hf(text: Text, family: hf.Family) -> dict[str, Any]:
    """Return the config's keys of the attention geometry. That of full layers, if it may differ, is
    in global_* keys, or in per_layer_config if they have a different number of KV heads without
    K=V."""
    sliding, full = text.sliding, text.full
    out: dict[str, Any] = {
        "head_dim": sliding.head_dim,
        "num_key_value_heads": sliding.num_key_value_heads,
        "sliding_window": sliding.window,
    }
    if sliding.window and (reach := family.embedding.get("reach")):
        out["sliding_window"] = (sliding.window - 1) * reach
    if "per_layer_config" in family.without:
        return out
    out["attention_k_eq_v"] = full.k_eq_v
    if full.k_eq_v or full.num_key_value_heads == sliding.num_key_value_heads:
        stated = full.k_eq_v or "num_global_key_value_heads" in family.keys
        heads = full.num_key_value_heads if stated else None
        return out | {"global_head_dim": full.head_dim, "num_global_key_value_heads": heads}
    geometry = {name: getattr(full, name) for name in hf.BASE_GEOMETRY}
    layers = {str(i): geometry for i, kind in enumerate(text.layer_types) if kind == FULL}
    return out | {"per_layer_config": layers}


def _rope_to_hf(rope: Rope, family: hf.Family) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind not in family.ropes["types"]:  # all pairs rotate, with or without a factor
        out["rope_type"] = "linear" if rope.factor else "default"
    elif rope.kind == "proportional":
        out["partial_rotary_factor"] = rope.rotary_fraction
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
    return {"model_type": hf.PART_TYPES[type(part)], "dtype": dtype, **out}
