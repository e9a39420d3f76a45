"""Converts a GGUF file's metadata to a spec (through a Hugging Face config) and to an engine's side
files: tokenizer.json as transformers builds Gemma's (models/gemma/tokenization_gemma.py), the chat
template, the generation defaults. Facts without a key are derived from tensors.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from g4ir.errors import SpecError
from g4ir.spec.huggingface import with_dense
from g4ir.spec.parts import ASSISTANT, CHAT_FORMATS, CHAT_FORMS, FAMILIES, FULL, SLIDING, relative
from g4ir.spec.reader import did_you_mean
from g4ir.spec.record import Spec
from g4ir.weights.tensorfile import broken, quoted

from .container import (
    CLIP,
    CONVERT,
    IMATRIX,
    KIND,
    ROPE,
    SPACE,
    TABLES,
    Array,
    Container,
    architecture,
    shortest,
)

log = logging.getLogger(__name__)

#: layer kind -> suffix of its keys, name in a config
KINDS = {SLIDING: ("_swa", "sliding_attention"), FULL: ("", "full_attention")}
#: key of the head dim of full layers, in some files of its rotated dims
COUNT = "rope.dimension_count"
#: key -> its name in files of other converters
OTHER_NAMES = {
    "rope.freq_base_swa": "rope.local.freq_base",
    "rope.freq_base": "rope.global.freq_base",
}
#: keys of towers in the same file (as ollama writes it), ignored
OF_TOWERS = ("vision.", "audio.", "mm.")
#: tensors of an encoder's dense layers; the key pooling_type's value for mean pooling
DENSE, POOLED_BY_MEAN = ("dense_2.weight", "dense_3.weight"), 1
#: sides of an encoder's window: files store the sum of both
BOTH_WAYS = 2
#: divisor of the frequency of a pair that is not rotated
UNROTATED = 1e30
MAX_PAIRS = 1 << 15
#: spec fields without a GGUF key, or derived by llama.cpp
UNSAID = ("text.use_bidirectional_attention", "text.hidden_activation")
#: fields whose value in the spec overrides the file's
SPEC_ONLY = (*UNSAID, "text.query_pre_attn_scalar")


def read_spec(file: Container) -> Spec:
    """Return the spec of a file's text model, in bfloat16. SpecError for another architecture,
    missing or contradicting keys, and any unknown key of the architecture: it may change the
    forward pass."""
    keys = _Keys(file)
    keys.check_architecture()
    config = _config(keys)
    if keys.rules.get("drafter"):
        config = _drafter(keys, config)
    keys.check_unread()
    try:
        spec = Spec.from_hf(config, file.name)
        widths = [file.tensors[name].shape[0] for name in DENSE if name in file.tensors]
        return with_dense(spec, widths) if spec.embedding and widths else spec
    except SpecError as error:
        raise SpecError(f"{file.path}: metadata as a {error}") from None


#: general.type of files that are no models -> what they are, and the fix
NO_MODELS = {
    "adapter": (
        "a LoRA adapter",
        "give the model's file, and the adapter as PEFT's directory (--adapter DIR)",
    ),
    "imatrix": (IMATRIX, "give the model's file; nothing here reads importance matrices"),
}


class _Keys:
    def __init__(self, file: Container) -> None:
        self.file, self.seen = file, set[str]()
        self.kind, self.rules = file.values.get(KIND), architecture(file)

    def fail(self, key: str, msg: str) -> SpecError:
        return SpecError(f"{self.file.path}: {key}: {msg}")

    def error(self, name: str, msg: str) -> SpecError:
        return self.fail(f"{self.kind}.{name}", msg)

    def contradiction(self, name: str, value: object, source: str, other: object) -> SpecError:
        msg = f"{quoted(value)}, and {source} {quoted(other)}"
        return self.error(name, f"{msg}; use another conversion of the model")

    def get(self, name: str) -> Any:
        key = f"{self.kind}.{name}"
        self.seen.add(key)
        value = self.file.values.get(key)
        other = self.get(OTHER_NAMES[name]) if name in OTHER_NAMES else None
        if None not in (value, other) and value != other:
            raise self.contradiction(name, value, f"{self.kind}.{OTHER_NAMES[name]} is", other)
        return other if value is None else value

    def need(self, name: str, default: Any = None) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing; use a newer conversion")
        return value

    def number(self, name: str, default: Any = None) -> Any:
        value = self.need(name, default)
        if type(value) not in (int, float):
            raise self.error(name, f"expected a number, found {quoted(value)}")
        return shortest(value)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if type(value) is not int:
            raise self.error(name, f"expected an integer, found {value}")
        return value

    def by_layer(self, name: str, layers: int, kind: type = int) -> list[Any]:
        """Return a value per layer, from an array or one scalar for all."""
        value = self.need(name)
        values = [value] * layers
        if isinstance(value, Array):
            values = self.file.items(f"{self.kind}.{name}") if value.count == layers else []
        if len(values) != layers or any(type(v) is not kind for v in values):
            expected = f"expected {layers} values of type {kind.__name__}, one for each layer"
            raise self.error(name, f"{expected}, or one for all")
        return values

    def one(self, name: str, values: list[int]) -> int:
        if len(set(values)) != 1:
            distinct = sorted(set(values))[:8]
            raise self.error(name, f"layers that must be alike have {distinct}")
        return values[0]

    def rows(self, name: str) -> int:
        tensor = self.file.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2:
            actual = list(tensor.shape) if tensor else "none"
            msg = f"expected a matrix, found {actual}; download the file again"
            raise self.fail(f"tensor {name}", msg)
        return tensor.shape[0]

    def check_architecture(self) -> None:
        kind = self.file.values.get("general.type")
        for other, (what, fix) in NO_MODELS.items():
            if kind == other:
                raise self.fail("general.type", f"{quoted(kind)}: {what} and no model; {fix}")
        if not self.rules:
            other = "a file of towers (mmproj)" if self.kind == CLIP else quoted(self.kind)
            msg = f"expected {' or '.join(map(quoted, TABLES['architectures']))}, found {other}"
            msg += "; give the file of such a text model"
            raise self.fail(KIND, relative(str(self.kind)) or msg)

    def check_unread(self) -> None:
        for key in self.file.values:
            name = key.removeprefix(f"{self.kind}.")
            if name != key and key not in self.seen and not name.startswith(OF_TOWERS):
                near = did_you_mean(key, self.seen)
                msg = f"unknown key, which may change the forward pass{near}"
                raise self.fail(quoted(key), f"{msg}; use another conversion of the model")


def _config(keys: _Keys) -> dict[str, Any]:
    layers = keys.integer("block_count")
    sliding = _pattern(keys, layers)
    heads, window = "attention.head_count", "attention.sliding_window"
    default = keys.rules["defaults"].get(window)
    if default and keys.get(window) is None:
        message = "%s: %s.%s is missing: %d is used, as in other readers"
        log.warning(message, keys.file.path, keys.kind, window, default)
    config: dict[str, Any] = {
        "model_type": f"{keys.rules.get('drafter', keys.kind)}_text",
        "dtype": "bfloat16",
        "vocab_size": keys.rows("token_embd.weight"),
        "hidden_size": keys.integer("embedding_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "num_hidden_layers": layers,
        "layer_types": [KINDS[SLIDING if s else FULL][1] for s in sliding],
        "num_attention_heads": keys.one(heads, keys.by_layer(heads, layers)),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0) or None,
        "sliding_window": _window(keys, default),
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
        **(_layers_alike(keys, layers) if keys.rules.get("alike") else _layers(keys, sliding)),
        **token_ids(keys.file, keys.file.vocabulary),
        **{field: keys.integer(key) for field, key in keys.rules.get("keys", {}).items()},
        **keys.rules.get("config", {}),
    }
    _check_encoder(keys)
    stated, rows = keys.get("vocab_size"), config["vocab_size"]
    if stated not in (None, rows):
        raise keys.error("vocab_size", f"{quoted(stated)}, and token_embd.weight has {rows} rows")
    return config


def _window(keys: _Keys, default: int | None) -> int:
    """Return the window of sliding layers, in the convention of config.json."""
    window = keys.integer("attention.sliding_window", default)
    if "of" not in keys.rules:
        return window
    reach: int = FAMILIES[keys.rules["of"]]["embedding"]["reach"]
    return window // BOTH_WAYS * reach


#: keys with the hidden size of a draft model's target, under the names of several converters
BACKBONE = ("embedding_length_out", "n_embd_backbone")


def _drafter(keys: _Keys, text: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a draft model; converters omit its clusters."""
    size = next((n for n in BACKBONE if keys.get(n) is not None), BACKBONE[0])
    layers = text["num_hidden_layers"]
    if (stated := keys.integer("nextn_predict_layers", layers)) != layers:
        expected = f"expected {layers}, the value of block_count, found {stated}"
        raise keys.error("nextn_predict_layers", expected)
    return {
        "model_type": f"{keys.rules['drafter']}{ASSISTANT}",
        "dtype": "bfloat16",
        "text_config": text,
        "backbone_hidden_size": keys.integer(size),
        "use_ordered_embeddings": False,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def _check_encoder(keys: _Keys) -> None:
    """Raise SpecError if an encoder has another pooling than the mean, causal attention, or dense
    layers of other sizes than its keys say. Does nothing for other models."""
    if "config" not in keys.rules:
        return
    for name, value in (("pooling_type", POOLED_BY_MEAN), ("attention.causal", False)):
        if (stated := keys.get(name)) not in (None, value):
            raise keys.error(name, f"{quoted(stated)} is not supported, only {value}")
    for name in DENSE:
        stem = name.removesuffix(".weight")
        tensor = keys.file.tensors.get(name)
        for key, axis in (("feat_out", 0), ("feat_in", 1)):
            size = keys.get(f"{stem}_{key}")
            if tensor and size not in (None, tensor.shape[axis]):
                raise keys.contradiction(
                    f"{stem}_{key}", size, f"tensor {name} has", tensor.shape[axis]
                )


def _layers(keys: _Keys, sliding: list[bool]) -> dict[str, Any]:
    """Return the config of models whose sliding and full layers differ in geometry (Gemma 4), with
    experts and per-layer embeddings."""
    sizes, experts = (
        {field: keys.integer(*key) for field, key in TABLES[table].items()}
        for table in ("config", "experts")
    )
    if sizes["hidden_size_per_layer_input"] and "config" not in keys.rules:
        sizes["vocab_size_per_layer_input"] = keys.rows("per_layer_token_embd.weight")
    return {
        **sizes,
        **(experts if experts["num_experts"] else {}),
        "enable_moe_block": experts["num_experts"] > 0,
        **_feed_forward(keys, len(sliding)),
        **_attention(keys, sliding),
    }


def _layers_alike(keys: _Keys, layers: int) -> dict[str, Any]:
    """Return the config of models whose layers differ only in window and RoPE (Gemma 3)."""
    dim = _head_dim(keys, "attention.key_length", [*range(layers)])
    for other in ("attention.value_length", COUNT):
        if (size := keys.integer(other, dim)) != dim:
            raise keys.error(other, f"expected {dim}, the head dim, found {size}")
    widths = "feed_forward_length", "attention.head_count_kv"
    width, heads = (keys.one(name, keys.by_layer(name, layers)) for name in widths)
    defaults = keys.rules["defaults"]
    ropes = {}
    for end, name in KINDS.values():
        theta = keys.number(f"rope.freq_base{end}", defaults[f"rope.freq_base{end}"])
        ropes[name] = {"rope_type": "default", "rope_theta": theta}
    if (kind := keys.get("rope.scaling.type")) not in (None, "none"):
        ropes[KINDS[FULL][1]] |= {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    return {
        "intermediate_size": width,
        "num_key_value_heads": heads,
        "head_dim": dim,
        "query_pre_attn_scalar": keys.rules["scores"].get(layers, dim),
        "rope_parameters": ropes,
    }


def _pattern(keys: _Keys, layers: int) -> list[bool]:
    name, period = "attention.sliding_window_pattern", keys.rules.get("period")
    pattern = keys.get(name) if period else keys.need(name)
    if period and not isinstance(pattern, Array):
        every = keys.integer(name, period)
        return [(i + 1) % max(every, 1) != 0 for i in range(layers)]
    if not isinstance(pattern, Array) or pattern.count != layers:
        raise keys.error(name, f"expected an array of {layers} bools, one for each layer")
    sliding = keys.by_layer(name, layers, bool)
    if not layers or (sliding[-1] and not period):
        raise keys.error(name, "the last value must be false: the last layer uses full attention")
    return sliding


def _feed_forward(keys: _Keys, layers: int) -> dict[str, Any]:
    """Return the config.json keys of the MLP: its width, the number of layers with shared KV, and
    (except for draft models) whether those have twice the width."""
    name = "feed_forward_length"
    sizes, shared = keys.by_layer(name, layers), keys.integer("attention.shared_kv_layers", 0)
    if keys.rules.get("drafter"):
        return {"intermediate_size": keys.one(name, sizes), "num_kv_shared_layers": layers}
    unshared = layers - shared
    if not 0 < unshared <= layers:
        msg = f"{shared} of {layers} layers, expected 0 to {layers - 1}"
        raise keys.error("attention.shared_kv_layers", msg)
    width = keys.one(name, sizes[:unshared])
    shared_width = keys.one(name, sizes[unshared:] or sizes[:1])
    if shared_width not in (width, 2 * width):
        expected = f"expected {width} or {2 * width}"
        raise keys.error(name, f"{shared_width} in layers with shared KV, {expected}")
    double = shared > 0 and shared_width == 2 * width
    sizes_of = {"intermediate_size": width, "num_kv_shared_layers": shared}
    return {**sizes_of, "use_double_wide_mlp": double}


def _attention(keys: _Keys, sliding: list[bool]) -> dict[str, Any]:
    """Return the attention geometry: sliding layers globally, full layers in `per_layer_config`."""
    heads = _kv_heads(keys, sliding)
    kinds: dict[str, dict[str, int]] = {}
    ropes: dict[str, dict[str, Any]] = {}
    for kind, (end, name) in KINDS.items():
        layers = [i for i, s in enumerate(sliding) if s == (kind == SLIDING)]
        dim = _head_dim(keys, f"attention.key_length{end}", layers)
        kv_heads = [heads[i] for i in layers] or heads[:1]
        count = keys.one("attention.head_count_kv", kv_heads)
        kinds[kind] = {"head_dim": dim, "num_key_value_heads": count}
        for other in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
            size = keys.integer(other, dim)
            if size != dim and (other != COUNT or "rope" in keys.rules):
                raise keys.error(other, f"expected {dim}, the head dim, found {size}")
        theta = keys.number(f"rope.freq_base{end}")
        ropes[name] = {"rope_type": "default", "rope_theta": theta}
    if "rope" not in keys.rules:
        ropes["full_attention"] |= {
            "rope_type": "proportional",
            "partial_rotary_factor": _rotated(keys, kinds[FULL]["head_dim"] // 2),
        }
    full = {str(i): kinds[FULL] for i, s in enumerate(sliding) if not s}
    return {
        **kinds[SLIDING],
        "per_layer_config": full,
        "attention_k_eq_v": _shares_values(keys, sliding),
        "rope_parameters": ropes,
    }


def _kv_heads(keys: _Keys, sliding: list[bool]) -> list[int]:
    name = "attention.head_count_kv"
    heads = keys.by_layer(name, len(sliding))
    full = keys.integer("attention.global_head_count_kv", 0)
    if not full:
        return heads
    full_heads = {h for h, s in zip(heads, sliding, strict=True) if not s}
    if isinstance(keys.get(name), Array) and full_heads != {full}:
        source = f"{keys.kind}.{name} of the full layers is"
        raise keys.contradiction("attention.global_head_count_kv", full, source, min(full_heads))
    return [h if s else full for h, s in zip(heads, sliding, strict=True)]


def _head_dim(keys: _Keys, name: str, layers: list[int]) -> int:
    norms = (f"blk.{i}.attn_q_norm.weight" for i in layers)
    norm = next((n for n in norms if n in keys.file.tensors), None)
    size = keys.file.tensors[norm].shape[-1] if norm else keys.rules["defaults"][name]
    dim = keys.integer(name, size)
    if norm and dim != size:
        raise keys.contradiction(name, dim, f"tensor {norm} has", size)
    return dim


def _shares_values(keys: _Keys, sliding: list[bool]) -> bool:
    """Whether there are full layers with a K projection, and none of them has a V projection
    (K = V)."""
    tensors = keys.file.tensors
    names = [f"blk.{i}.attn" for i, s in enumerate(sliding) if not s]
    with_keys = [n for n in names if f"{n}_k.weight" in tensors]
    return bool(with_keys) and all(f"{n}_v.weight" not in tensors for n in with_keys)


def _rotated(keys: _Keys, pairs: int) -> float:
    """Return the rotated fraction of a full layer's head, from the tensor of frequencies or from a
    key with the fraction or the dim count; all that are present must agree."""
    counts: dict[str, int] = {}
    if ROPE in keys.file.tensors:
        counts[f"tensor {ROPE}"] = 2 * _rotated_by_tensor(keys, pairs)
    share, dims = keys.number("rope.partial_rotary_factor", 0), keys.integer(COUNT, 2 * pairs)
    if share:
        if not 0 < share <= 1:
            expected = f"expected a fraction above 0 and up to 1, found {share}"
            raise keys.error("rope.partial_rotary_factor", expected)
        counts[f"{keys.kind}.rope.partial_rotary_factor"] = 2 * int(share * pairs)
    if dims != 2 * pairs:
        counts[f"{keys.kind}.{COUNT}"] = dims
    if not counts:
        raise keys.fail(f"tensor {ROPE}", f"expected F32 [{pairs}], found none")
    (name, count), *remaining = counts.items()
    for other, its in remaining:
        if its != count:
            msg = f"{its} dims of a full layer's head are rotated, but {count} according to {name}"
            raise keys.fail(other, msg)
    return count / (2 * pairs)


def _rotated_by_tensor(keys: _Keys, pairs: int) -> int:
    """Return the number of rotated pairs: the tensor has 1 for each of them, then 1e30. SpecError
    for other values."""
    tensor = keys.file.tensors[ROPE]
    if tensor.stored.dtype != "F32" or tensor.shape != (pairs,):
        actual = f"{tensor.stored} {list(tensor.shape)}"
        raise keys.fail(f"tensor {ROPE}", f"expected F32 [{pairs}], found {quoted(actual)}")
    values = keys.file.floats(tensor) if pairs <= MAX_PAIRS else []
    count = values.count(1.0)
    if not count or list(map(shortest, values)) != [1.0] * count + [UNROTATED] * (pairs - count):
        msg = "expected ones, then 1e30: another scaling of frequencies is not supported"
        raise keys.fail(f"tensor {ROPE}", msg)
    return count


#: values of `tokenizer.ggml.model`: SentencePiece, of which a file may have only scores, no merges;
#: BPE
SCORED = "llama"
MODELS = (SCORED, "gemma4")
PREFIX = "tokenizer.ggml."
#: the default chat template; named ones are stored under TEMPLATE.NAME
TEMPLATE = "tokenizer.chat_template"
ADD_EOS = "add_eos_token"
READ = {TEMPLATE, *(f"{PREFIX}{name}" for name in TABLES["tokenizer_keys"])}
SAMPLING = "general.sampling."
LAST_N = f"{SAMPLING}penalty_last_n"
#: key -> its name in a generation_config.json
SETTINGS: dict[str, str] = TABLES["sampling"]
#: name in a generation_config.json -> key
GENERATION_KEYS = {
    **{name: key for key, name in SETTINGS.items()},
    "suppress_tokens": f"{PREFIX}suppress_tokens",
}
#: settings that imply sampling if one is present
DRAWN = {"temperature", "top_k", "top_p", "min_p"}
#: llama.cpp reads top_k as int32: from this value on it is negative, and top-k is off
NO_TOP_K = 1 << 31
#: token types of added tokens, matched before any merge
CONTROL, USER_DEFINED = 3, 4
#: token types that merges may produce: normal and user-defined, not control tokens or bytes
JOINED = (1, USER_DEFINED)
#: USER_DEFINED tokens of this shape are control tokens of the chat format; all others are text
MARK = re.compile(r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>")
UNKNOWN = "<unk>"
#: stands for a space inside a token of a merge: a plain space separates its two tokens
MERGED_SPACE = "\u0120"


def token_ids(file: Container, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the special token ids under their config keys; EOS includes end-of-turn tokens."""
    ends = [_id(file, key) for key in TABLES["stops"]]
    eos = {i for i in (*ends, *map(ids.get, _ends(file))) if i is not None}
    special_ids = {
        "bos_token_id": _id(file, "bos_token_id"),
        "pad_token_id": _id(file, "padding_token_id"),
        "eos_token_id": sorted(eos) or None,
    }
    return {name: value for name, value in special_ids.items() if value is not None}


def _ends(file: Container) -> list[str]:
    """Return the tokens that end an answer; some converters do not mark them as special."""
    chat_format = FAMILIES.get(str(file.values.get(KIND)), {}).get("chat", CHAT_FORMS[0])
    return CHAT_FORMATS[chat_format]["ends"]


def side_files(file: Container) -> dict[str, bytes]:
    """Return tokenizer, chat template and generation config files by name; logs keys that are not
    applied. WeightsError names file, key and item."""
    ids = file.vocabulary
    out = {"generation_config.json": _json(_generation(file, ids))}
    template = file.values.get(TEMPLATE, "")
    if not isinstance(template, str):
        raise file.error(TEMPLATE, "expected a text", template)
    if template:
        out["chat_template.jinja"] = template.encode()
    if file.values.get(f"{PREFIX}model") not in (None, "none", "no_vocab"):
        if unused := [*_not_applied(file)]:
            log.warning("%s: these keys are not applied: %s", file.path, ", ".join(unused))
        add = file.values.get(f"{PREFIX}add_bos_token", True)
        if type(add) is not bool:
            raise file.error(f"{PREFIX}add_bos_token", "expected a bool", add)
        encodes = "config" in architecture(file)
        end = encodes and file.values.get(f"{PREFIX}{ADD_EOS}", True)
        out["tokenizer.json"] = _json(
            _tokenizer(file, ids) | {"post_processor": _added_ids(file, ids, add, end is True)}
        )
        out["tokenizer_config.json"] = _json({"add_bos_token": add, "add_eos_token": end is True})
    return out


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _not_applied(file: Container) -> Iterator[str]:
    """Yield tokenizer and template keys that may affect the text but are not supported."""
    for key, value in file.values.items():
        name = key.removeprefix(PREFIX)
        if name == ADD_EOS and "config" in architecture(file):
            continue
        if name in TABLES["tokenizer_values"]:
            if value not in TABLES["tokenizer_values"][name]:
                yield f"{key} {quoted(value)}"
        elif key.startswith("tokenizer.") and key not in READ:
            yield key


def _generation(file: Container, ids: Mapping[str, int]) -> dict[str, Any]:
    suppressed = file.values.get(f"{PREFIX}suppress_tokens")
    if isinstance(suppressed, Array):
        suppressed = file.items(f"{PREFIX}suppress_tokens")
    return {
        **token_ids(file, ids),
        **_sampling(file),
        **({} if suppressed is None else {"suppress_tokens": suppressed}),
    }


def _sampling(file: Container) -> dict[str, Any]:
    """Return the general.sampling settings under generation_config.json names. Settings without
    such a name, if they have an effect, keep their key: the reader of the defaults reports them."""
    values = {key: _setting(file, key) for key in file.values if key.startswith(SAMPLING)}
    out = {name: values[key] for key, name in SETTINGS.items() if key in values}
    if out.get("top_k", 0) >= NO_TOP_K or out.get("top_k", 0) < 0:  # -1 as uint32 or int32: off
        out["top_k"] = 0
    if out.get("temperature") == 0:  # greedy: other sampling settings have no effect
        out = {name: out[name] for name in out.keys() - DRAWN}
    if not out.keys().isdisjoint(DRAWN):
        out["do_sample"] = True
    if values.get(LAST_N) == 0:  # penalises no token
        out.pop("repetition_penalty", None)
        del values[LAST_N]
    return out | {key: values[key] for key in values if key not in SETTINGS and _acts(key, values)}


def _setting(file: Container, key: str) -> Any:
    value = file.values[key]
    if isinstance(value, Array):
        value = file.items(key)
    if key in SETTINGS and type(value) not in (int, float):
        raise file.error(key, "expected a number", value)
    if isinstance(value, float) and not isfinite(value):
        raise file.error(key, "expected a finite number", value)
    return shortest(value)


def _acts(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a general.sampling key changes llama.cpp's sampling."""
    neutral, *other = TABLES["sampling_others"].get(key, [None])
    return values.get(key) not in (None, neutral) and all(_acts(k, values) for k in other)


def _id(file: Container, name: str) -> int | None:
    key = f"{PREFIX}{name}"
    token = file.values.get(key)
    if token is not None and type(token) is not int:
        raise file.error(key, "expected a token id", token)
    return token


def _tokenizer(file: Container, ids: Mapping[str, int]) -> dict[str, Any]:
    model = file.values[f"{PREFIX}model"]
    if model not in MODELS:
        expected = f"expected {' or '.join(MODELS)}"
        fix = "fix: this is the tokenizer of another family; take a conversion of a Gemma model"
        raise file.error(f"{PREFIX}model", expected, model, fix)
    table = file.tensors.get("token_embd.weight")
    rows = table.shape[0] if table else 0
    if not 0 < len(ids) <= rows:
        raise file.error(f"{PREFIX}tokens", f"expected 1 to {rows} tokens", len(ids))
    key = f"{PREFIX}token_type"
    kinds = file.items(key) if key in file.values else [1] * len(ids)
    if len(kinds) != len(ids):
        raise file.error(key, f"expected {len(ids)} items, one for each token", len(kinds))
    scored = model == SCORED and f"{PREFIX}merges" not in file.values
    merges = _merges_by_score(file, ids, kinds) if scored else list(_merges(file, ids))
    unknown_id, ends = _id(file, "unknown_token_id"), _ends(file)
    named = (text for text, i in ids.items() if i == unknown_id)
    unknown = next(named, UNKNOWN if UNKNOWN in ids else None)
    added = [
        _added(i, text, CONTROL if text in ends else kind)
        for (text, i), kind in zip(ids.items(), kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED) or text in ends
    ]
    # The library tokenizers reads merges that are one string each in two thirds of the time, but
    # splits them at spaces, and takes one that begins with #version as a comment.
    texts = "\n".join(ids)
    plain = " " not in texts and "#version" not in texts
    pairs = [" ".join(pair) for pair in merges] if plain else merges
    fields = {"unk_token": unknown, "vocab": ids, "merges": pairs}
    bpe = {**TABLES["tokenizer_model"], **fields}
    return {**TABLES["tokenizer"], "added_tokens": added, "model": bpe}


def _added_ids(
    file: Container, ids: Mapping[str, int], start: bool, end: bool
) -> dict[str, Any] | None:
    """Return the post-processor that adds <bos> at the `start` of a text, <eos> at the `end`; None
    for neither, or if the file does not name the tokens."""
    added = {"bos_token_id": start, "eos_token_id": end}
    tokens = [_id(file, key) if add else None for key, add in added.items()]
    texts = [next((t for t, i in ids.items() if i == token), None) for token in tokens]
    if texts == [None, None]:
        return None

    def parts(name: str, kind: int) -> list[dict[str, Any]]:
        first, last = ([{"SpecialToken": {"id": t, "type_id": kind}}] if t else [] for t in texts)
        return [*first, {"Sequence": {"id": name, "type_id": kind}}, *last]

    special = {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in zip(texts, tokens) if t}
    return {
        "type": "TemplateProcessing",
        "single": parts("A", 0),
        "pair": parts("A", 0) + parts("B", 1),
        "special_tokens": special,
    }


def _added(i: int, text: str, kind: int) -> dict[str, Any]:
    """Return an `added_tokens` entry; spaces are matched after normalisation."""
    special = kind == CONTROL or MARK.fullmatch(text) is not None
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": i, "content": text, **flags, "normalized": SPACE in text, "special": special}


def _merges_by_score(
    file: Container, ids: Mapping[str, int], kinds: list[Any]
) -> list[tuple[str, str]]:
    """Return SentencePiece's merges: every split of a token into two tokens, by descending score of
    the token, user-defined tokens first."""
    import numpy as np  # here: it would add 0.1 s to every start

    from ..token_splits import HashedTokens

    key = f"{PREFIX}scores"
    scores = file.items(key)
    if len(scores) != len(ids):
        raise file.error(key, f"expected {len(ids)} items, one for each token", len(scores))
    if scores and type(scores[0]) is not float:  # an array has items of one type
        raise file.error(key, "expected floats", scores[0])

    tokens = HashedTokens([*ids])
    splits, texts = tokens.splits(), tokens.texts
    kind, score = np.array(kinds)[splits.token], np.array(scores)[splits.token]
    defined = kind == USER_DEFINED
    descending, longer = np.where(defined, 0.0, -score), -tokens.characters[splits.token]
    order = np.lexsort((-splits.cut, splits.token, longer, descending, ~defined))
    merges = splits.take(order[np.isin(kind[order], JOINED)])
    pairs = zip(merges.head.tolist(), merges.tail.tolist())
    return [(texts[first], texts[second]) for first, second in pairs]


def _merges(file: Container, ids: Mapping[str, int]) -> Iterator[list[str]]:
    for i, merge in enumerate(file.items(f"{PREFIX}merges")):
        pair = merge.split(" ") if isinstance(merge, str) else []
        pair = [p if p in ids else p.replace(MERGED_SPACE, SPACE) for p in pair]
        if len(pair) != 2 or any(p not in ids for p in (*pair, "".join(pair))):
            msg = f"item {i}, {quoted(merge)}, is not two tokens that form a third when joined"
            raise broken(file.path, f"{PREFIX}merges: {msg}", CONVERT)
        yield pair
