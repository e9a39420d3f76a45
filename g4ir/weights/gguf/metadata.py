"""Makes of a GGUF file's metadata its spec, by way of a Hugging Face config, and the files that an
engine keeps: tokenizer.json as transformers builds Gemma's (models/gemma/tokenization_gemma.py),
the chat template, the defaults of generation. What no key says follows from tensors.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from g4ir.errors import SpecError
from g4ir.spec.parts import CHAT_FORMATS, CHAT_FORMS, FAMILIES, FULL, SLIDING, relative
from g4ir.spec.reader import did_you_mean
from g4ir.spec.record import Spec
from g4ir.weights.tensorfile import broken, quoted

from .container import (
    CONVERT,
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

#: kind of layer -> what its keys end in, and its name in a config
KINDS = {SLIDING: ("_swa", "sliding_attention"), FULL: ("", "full_attention")}
#: the dims of a full layer's head, or those of them that are rotated
COUNT = "rope.dimension_count"
OTHER_NAMES = {
    "rope.freq_base_swa": "rope.local.freq_base",
    "rope.freq_base": "rope.global.freq_base",
}
#: keys of towers in the same file, as ollama writes it, which are left out
OF_TOWERS = ("vision.", "audio.", "mm.")
UNROTATED = 1e30
MOST_PAIRS = 1 << 15
#: what a GGUF file cannot say; and what llama.cpp computes by itself
UNSAID = ("text.use_bidirectional_attention", "text.hidden_activation")
#: where only these differ from a file, the spec is right
SPEC_ONLY = (*UNSAID, "text.query_pre_attn_scalar")


def read_spec(file: Container) -> Spec:
    """Return the spec of the text model in a file, in bfloat16. SpecError for another architecture,
    what is missing or contradicts, and any unknown key: it may change the forward pass."""
    keys = _Keys(file)
    keys.check_architecture()
    config = _config(keys)
    keys.check_rest()
    try:
        return Spec.from_hf(config, file.name)
    except SpecError as error:
        raise SpecError(f"{file.path}: metadata as a {error}") from None


class _Keys:
    def __init__(self, file: Container) -> None:
        self.file, self.seen = file, set[str]()
        self.kind, self.rules = file.values.get(KIND), architecture(file)

    def fail(self, key: str, what: str) -> SpecError:
        return SpecError(f"{self.file.path}: {key}: {what}")

    def wrong(self, name: str, what: str) -> SpecError:
        return self.fail(f"{self.kind}.{name}", what)

    def contradiction(self, name: str, found: object, where: str, other: object) -> SpecError:
        what = f"{quoted(found)}, and {where} {quoted(other)}"
        return self.wrong(name, f"{what}; take another conversion of the model")

    def get(self, name: str) -> Any:
        key = f"{self.kind}.{name}"
        self.seen.add(key)
        found = self.file.values.get(key)
        other = self.get(OTHER_NAMES[name]) if name in OTHER_NAMES else None
        if None not in (found, other) and found != other:
            raise self.contradiction(name, found, f"{self.kind}.{OTHER_NAMES[name]} is", other)
        return other if found is None else found

    def need(self, name: str, default: Any = None) -> Any:
        found = self.get(name)
        found = default if found is None else found
        if found is None:
            raise self.wrong(name, "is missing; take a newer conversion")
        return found

    def number(self, name: str, default: Any = None) -> Any:
        found = self.need(name, default)
        if type(found) not in (int, float):
            raise self.wrong(name, f"expected a number, found {quoted(found)}")
        return shortest(found)

    def integer(self, name: str, default: int | None = None) -> int:
        found = self.number(name, default)
        if type(found) is not int:
            raise self.wrong(name, f"expected an integer, found {found}")
        return found

    def by_layer(self, name: str, layers: int, kind: type = int) -> list[Any]:
        """Return a value for each layer, from an array or from one for all."""
        found = self.need(name)
        values = [found] * layers
        if isinstance(found, Array):
            values = self.file.items(f"{self.kind}.{name}") if found.count == layers else []
        if len(values) != layers or any(type(v) is not kind for v in values):
            expected = f"expected {layers} values of type {kind.__name__}, one for each layer"
            raise self.wrong(name, expected)
        return values

    def one(self, name: str, values: list[int]) -> int:
        if len(set(values)) != 1:
            shown = sorted(set(values))[:8]
            raise self.wrong(name, f"layers of one kind must be alike, found {shown}")
        return values[0]

    def rows(self, name: str) -> int:
        tensor = self.file.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2:
            what = "expected a matrix, found none; download the file again"
            raise self.fail(f"tensor {name}", what)
        return tensor.shape[0]

    def check_architecture(self) -> None:
        if not self.rules:
            other = "its towers alone" if self.kind == "clip" else quoted(self.kind)
            what = f"expected {' or '.join(map(quoted, TABLES['architectures']))}, found {other}"
            what += "; give the file of such a text model"
            raise self.fail(KIND, relative(str(self.kind)) or what)
        if (kind := self.file.values.get("general.type")) == "adapter":
            what = f"{quoted(kind)}: a LoRA adapter and no model"
            fix = "give the model's file, and the adapter as PEFT's directory (--adapter DIR)"
            raise self.fail("general.type", f"{what}; {fix}")

    def check_rest(self) -> None:
        for key in self.file.values:
            name = key.removeprefix(f"{self.kind}.")
            if name != key and key not in self.seen and not name.startswith(OF_TOWERS):
                what = (
                    f"unknown key, which may change the forward pass{did_you_mean(key, self.seen)}"
                )
                raise self.fail(quoted(key), what)


def _config(keys: _Keys) -> dict[str, Any]:
    layers = keys.integer("block_count")
    sliding = _pattern(keys, layers)
    heads, window = "attention.head_count", "attention.sliding_window"
    default = keys.rules["defaults"].get(window)
    if default and keys.get(window) is None:
        what = "%s: %s.%s is missing: %d is taken, as other readers do"
        log.warning(what, keys.file.path, keys.kind, window, default)
    config: dict[str, Any] = {
        "model_type": f"{keys.kind}_text",
        "dtype": "bfloat16",
        "vocab_size": keys.rows("token_embd.weight"),
        "hidden_size": keys.integer("embedding_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "num_hidden_layers": layers,
        "layer_types": [KINDS[SLIDING if s else FULL][1] for s in sliding],
        "num_attention_heads": keys.one(heads, keys.by_layer(heads, layers)),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0) or None,
        "sliding_window": keys.integer(window, default),
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
        **(_layers_alike(keys, layers) if keys.rules.get("alike") else _layers(keys, sliding)),
        **token_ids(keys.file, keys.file.vocabulary),
    }
    stated, rows = keys.get("vocab_size"), config["vocab_size"]
    if stated not in (None, rows):
        raise keys.wrong("vocab_size", f"{quoted(stated)}, and token_embd.weight has {rows} rows")
    return config


def _layers(keys: _Keys, sliding: list[bool]) -> dict[str, Any]:
    """Return what layers of two geometries have, experts and per-layer embeddings too."""
    sizes, experts = (
        {field: keys.integer(*key) for field, key in TABLES[table].items()}
        for table in ("config", "experts")
    )
    if sizes["hidden_size_per_layer_input"]:
        sizes["vocab_size_per_layer_input"] = keys.rows("per_layer_token_embd.weight")
    return {
        **sizes,
        **(experts if experts["num_experts"] else {}),
        "enable_moe_block": experts["num_experts"] > 0,
        **_feed_forward(keys, len(sliding)),
        **_attention(keys, sliding),
    }


def _layers_alike(keys: _Keys, layers: int) -> dict[str, Any]:
    """Return what layers of one geometry have: rotations alone differ by kind."""
    dim = _head_dim(keys, "attention.key_length", [*range(layers)])
    for other in ("attention.value_length", COUNT):
        if keys.integer(other, dim) != dim:
            raise keys.wrong(other, f"expected {dim}, as key_length is")
    widths = "feed_forward_length", "attention.head_count_kv"
    width, heads = (keys.one(name, keys.by_layer(name, layers)) for name in widths)
    defaults = keys.rules["defaults"]
    ropes = {}
    for end, name in KINDS.values():
        theta = keys.number(f"rope.freq_base{end}", defaults[f"rope.freq_base{end}"])
        ropes[name] = {"rope_type": "default", "rope_theta": theta}
    if (form := keys.get("rope.scaling.type")) not in (None, "none"):
        ropes[KINDS[FULL][1]] |= {"rope_type": form, "factor": keys.number("rope.scaling.factor")}
    return {
        "intermediate_size": width,
        "num_key_value_heads": heads,
        "head_dim": dim,
        "query_pre_attn_scalar": keys.rules["scores"].get(layers, dim),
        "rope_parameters": ropes,
    }


def _pattern(keys: _Keys, layers: int) -> list[bool]:
    name, period = "attention.sliding_window_pattern", keys.rules.get("period")
    found = keys.get(name) if period else keys.need(name)
    if period and not isinstance(found, Array):
        every = keys.integer(name, period)
        return [(i + 1) % max(every, 1) != 0 for i in range(layers)]
    if not isinstance(found, Array) or found.count != layers:
        raise keys.wrong(name, f"expected an array of {layers} bools, one for each layer")
    sliding = keys.by_layer(name, layers, bool)
    if not layers or (sliding[-1] and not period):
        raise keys.wrong(name, "the last layer must be a full one, false")
    return sliding


def _feed_forward(keys: _Keys, layers: int) -> dict[str, Any]:
    """Return the width of the MLP, and whether it is twice as wide where K and V are shared."""
    name = "feed_forward_length"
    sizes, shared = keys.by_layer(name, layers), keys.integer("attention.shared_kv_layers", 0)
    own = layers - shared
    if not 0 < own <= layers:
        raise keys.wrong("attention.shared_kv_layers", f"{shared} of {layers} layers")
    width, wide = keys.one(name, sizes[:own]), keys.one(name, sizes[own:] or sizes[:1])
    if wide not in (width, 2 * width):
        expected = f"expected {width} or {2 * width}"
        raise keys.wrong(name, f"{wide} where K and V are shared, {expected}")
    double = shared > 0 and wide == 2 * width
    sizes_of = {"intermediate_size": width, "num_kv_shared_layers": shared}
    return {**sizes_of, "use_double_wide_mlp": double}


def _attention(keys: _Keys, sliding: list[bool]) -> dict[str, Any]:
    """Return the geometry of both kinds of layers; that of the full ones layer by layer."""
    heads = _kv_heads(keys, sliding)
    kinds: dict[str, dict[str, int]] = {}
    ropes: dict[str, dict[str, Any]] = {}
    for kind, (end, name) in KINDS.items():
        layers = [i for i, s in enumerate(sliding) if s == (kind == SLIDING)]
        dim = _head_dim(keys, f"attention.key_length{end}", layers)
        own = [heads[i] for i in layers] or heads[:1]
        count = keys.one("attention.head_count_kv", own)
        kinds[kind] = {"head_dim": dim, "num_key_value_heads": count}
        for other in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
            if keys.integer(other, dim) != dim and other != COUNT:
                raise keys.wrong(other, f"expected {dim}, as key_length{end} is")
        theta = keys.number(f"rope.freq_base{end}")
        ropes[name] = {"rope_type": "default", "rope_theta": theta}
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
    own = {h for h, s in zip(heads, sliding, strict=True) if not s}
    if isinstance(keys.get(name), Array) and own != {full}:
        where = f"{keys.kind}.{name} of the full layers is"
        raise keys.contradiction("attention.global_head_count_kv", full, where, min(own))
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
    """Whether the full layers that have keys of their own have no values."""
    tensors = keys.file.tensors
    names = [f"blk.{i}.attn" for i, s in enumerate(sliding) if not s]
    own = [n for n in names if f"{n}_k.weight" in tensors]
    return bool(own) and all(f"{n}_v.weight" not in tensors for n in own)


def _rotated(keys: _Keys, pairs: int) -> float:
    """Return the share of a full layer's head that is rotated: what the tensor of frequencies says,
    or a key that says the share or the count of dims; all of them must agree."""
    said: dict[str, int] = {}
    if ROPE in keys.file.tensors:
        said[f"tensor {ROPE}"] = 2 * _rotated_by_tensor(keys, pairs)
    share, dims = keys.number("rope.partial_rotary_factor", 0), keys.integer(COUNT, 2 * pairs)
    if share:
        if not 0 < share <= 1:
            expected = f"expected a share from 0 to 1, found {share}"
            raise keys.wrong("rope.partial_rotary_factor", expected)
        said[f"{keys.kind}.rope.partial_rotary_factor"] = 2 * int(share * pairs)
    if dims != 2 * pairs:
        said[f"{keys.kind}.{COUNT}"] = dims
    if not said:
        raise keys.fail(f"tensor {ROPE}", f"expected F32 [{pairs}], found none")
    (name, count), *others = said.items()
    for other, its in others:
        if its != count:
            what = f"{its} dims of a full layer's head are rotated, and by {name} {count}"
            raise keys.fail(other, what)
    return count / (2 * pairs)


def _rotated_by_tensor(keys: _Keys, pairs: int) -> int:
    """Return how many pairs are rotated: the tensor holds 1 for each of them, then 1e30."""
    tensor = keys.file.tensors[ROPE]
    if tensor.stored.dtype != "F32" or tensor.shape != (pairs,):
        found = f"{tensor.stored} {list(tensor.shape)}"
        raise keys.fail(f"tensor {ROPE}", f"expected F32 [{pairs}], found {quoted(found)}")
    values = keys.file.floats(tensor) if pairs <= MOST_PAIRS else []
    count = values.count(1.0)
    if not count or list(map(shortest, values)) != [1.0] * count + [UNROTATED] * (pairs - count):
        what = "expected ones, then 1e30: another scaling of frequencies is not read"
        raise keys.fail(f"tensor {ROPE}", what)
    return count


#: values of `tokenizer.ggml.model`: merges of SentencePiece may be given by scores alone
SCORED = "llama"
MODELS = (SCORED, "gemma4")
PREFIX = "tokenizer.ggml."
#: the chat template; names of others, each under TEMPLATE.NAME
TEMPLATE, TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
READ = {TEMPLATE, TEMPLATES, *(f"{PREFIX}{name}" for name in TABLES["tokenizer_keys"])}
SAMPLING = "general.sampling."
#: key -> its name in a generation_config.json
SETTINGS: dict[str, str] = TABLES["sampling"]
#: name in a generation_config.json -> key
GENERATION_KEYS = {
    **{name: key for key, name in SETTINGS.items()},
    "suppress_tokens": f"{PREFIX}suppress_tokens",
}
#: settings of which one says that tokens are drawn
DRAWN = {"temperature", "top_k", "top_p", "min_p"}
#: a top_k from which on llama.cpp, which takes 32 bits with a sign, has none
NO_TOP_K = 1 << 31
#: token types of added tokens, which are matched before any merge
CONTROL, USER_DEFINED = 3, 4
#: token types that merges make: normal and user-defined ones, and not control tokens or bytes
JOINED = (1, USER_DEFINED)
#: a USER_DEFINED token of this shape is a control token of the chat format; all others are text
MARK = re.compile(r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>")
UNKNOWN = "<unk>"
#: stands for a space within a piece of merges
MERGED_SPACE = "\u0120"


def token_ids(file: Container, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the ids of special tokens as a config has them, with those that end a turn."""
    ends = [_id(file, key) for key in TABLES["stops"]]
    eos = {i for i in (*ends, *map(ids.get, _ends(file))) if i is not None}
    found = {
        "bos_token_id": _id(file, "bos_token_id"),
        "pad_token_id": _id(file, "padding_token_id"),
        "eos_token_id": sorted(eos) or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _ends(file: Container) -> list[str]:
    """Return the tokens that end a text or a turn of its chat format; not every converter says that
    they are special."""
    form = FAMILIES.get(str(file.values.get(KIND)), {}).get("chat", CHAT_FORMS[0])
    ends: list[str] = CHAT_FORMATS[form]["ends"]
    return ends


def side_files(file: Container) -> dict[str, bytes]:
    """Return the files by name; log the keys that are not applied. WeightsError names file, key and
    item."""
    ids = file.vocabulary
    out = {"generation_config.json": _json(_generation(file, ids))}
    template = file.values.get(TEMPLATE, "")
    if not isinstance(template, str):
        raise file.wrong(TEMPLATE, "expected a text", template)
    if template:
        out["chat_template.jinja"] = template.encode()
    if file.values.get(f"{PREFIX}model") not in (None, "none", "no_vocab"):
        if unused := [*_not_applied(file)]:
            log.warning("%s: not applied: %s", file.path, ", ".join(unused))
        add = file.values.get(f"{PREFIX}add_bos_token", True)
        if type(add) is not bool:
            raise file.wrong(f"{PREFIX}add_bos_token", "expected a bool", add)
        out["tokenizer.json"] = _json(
            _tokenizer(file, ids) | {"post_processor": _first(file, ids, add)}
        )
        out["tokenizer_config.json"] = _json({"add_bos_token": add})
    return out


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _not_applied(file: Container) -> Iterator[str]:
    """Yield the keys of the tokenizer and of templates that change a text and are not applied."""
    for key, value in file.values.items():
        name = key.removeprefix(PREFIX)
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
    """Return the settings of general.sampling by their names in a generation_config.json; those
    without such a name keep their key, so that the reader of defaults reports them."""
    values = {key: _setting(file, key) for key in file.values if key.startswith(SAMPLING)}
    out = {name: values[key] for key, name in SETTINGS.items() if key in values}
    if out.get("top_k", 0) >= NO_TOP_K or out.get("top_k", 0) < 0:  # -1, of either sign
        out["top_k"] = 0
    if out.get("temperature") == 0:  # greedy: what narrows a draw does not count
        out = {name: out[name] for name in out.keys() - DRAWN}
    if not out.keys().isdisjoint(DRAWN):
        out["do_sample"] = True
    if values.get(f"{SAMPLING}penalty_last_n") == 0:  # of no token
        out.pop("repetition_penalty", None)
        return out
    return out | {key: values[key] for key in values if key not in SETTINGS and _acts(key, values)}


def _setting(file: Container, key: str) -> Any:
    value = file.values[key]
    if isinstance(value, Array):
        value = file.items(key)
    if key in SETTINGS and type(value) not in (int, float):
        raise file.wrong(key, "expected a number", value)
    if isinstance(value, float) and not isfinite(value):
        raise file.wrong(key, "expected a finite number", value)
    return shortest(value)


def _acts(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a key of general.sampling changes what llama.cpp draws."""
    neutral, *other = TABLES["sampling_others"].get(key, [None])
    return values.get(key) not in (None, neutral) and all(_acts(k, values) for k in other)


def _id(file: Container, name: str) -> int | None:
    key = f"{PREFIX}{name}"
    found = file.values.get(key)
    if found is not None and type(found) is not int:
        raise file.wrong(key, "expected a token id", found)
    return found


def _tokenizer(file: Container, ids: Mapping[str, int]) -> dict[str, Any]:
    model = file.values[f"{PREFIX}model"]
    if model not in MODELS:
        expected = f"expected {' or '.join(MODELS)}"
        fix = "fix: this is the tokenizer of another family; take a conversion of a Gemma model"
        raise file.wrong(f"{PREFIX}model", expected, model, fix)
    table = file.tensors.get("token_embd.weight")
    rows = table.shape[0] if table else 0
    if not 0 < len(ids) <= rows:
        raise file.wrong(f"{PREFIX}tokens", f"expected 1 to {rows} tokens", len(ids))
    key = f"{PREFIX}token_type"
    kinds = file.items(key) if key in file.values else [1] * len(ids)
    if len(kinds) != len(ids):
        raise file.wrong(key, f"expected {len(ids)} items, one for each token", len(kinds))
    scored = model == SCORED and f"{PREFIX}merges" not in file.values
    merges = _merges_by_score(file, ids, kinds) if scored else list(_merges(file, ids))
    given, ends = _id(file, "unknown_token_id"), _ends(file)
    named = (text for text, i in ids.items() if i == given)
    unknown = next(named, UNKNOWN if UNKNOWN in ids else None)
    added = [
        _added(i, text, CONTROL if text in ends else kind)
        for (text, i), kind in zip(ids.items(), kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED) or text in ends
    ]
    # The library reads pairs in one text in two thirds of the time; it splits them at spaces, and
    # one that begins with #version is a comment to it.
    texts = "\n".join(ids)
    plain = " " not in texts and "#version" not in texts
    pairs = [" ".join(pair) for pair in merges] if plain else merges
    own = {"unk_token": unknown, "vocab": ids, "merges": pairs}
    made = {**TABLES["tokenizer_model"], **own}
    return {**TABLES["tokenizer"], "added_tokens": added, "model": made}


def _first(file: Container, ids: Mapping[str, int], added: bool) -> dict[str, Any] | None:
    """Return the post-processor that begins every text with <bos>, for libraries that add it."""
    bos = _id(file, "bos_token_id")
    text = next((text for text, i in ids.items() if i == bos), None)
    if not added or text is None:
        return None

    def parts(name: str, kind: int) -> list[dict[str, Any]]:
        token = {"SpecialToken": {"id": text, "type_id": kind}}
        return [token, {"Sequence": {"id": name, "type_id": kind}}]

    return {
        "type": "TemplateProcessing",
        "single": parts("A", 0),
        "pair": parts("A", 0) + parts("B", 1),
        "special_tokens": {text: {"id": text, "ids": [bos], "tokens": [text]}},
    }


def _added(i: int, text: str, kind: int) -> dict[str, Any]:
    """Return an added token; spaces are matched as the normalizer leaves them."""
    special = kind == CONTROL or MARK.fullmatch(text) is not None
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": i, "content": text, **flags, "normalized": SPACE in text, "special": special}


def _merges_by_score(
    file: Container, ids: Mapping[str, int], kinds: list[Any]
) -> list[tuple[str, str]]:
    """Return SentencePiece's merges: every split of a token into two tokens, in descending order
    of the token's score; those of user-defined tokens come before all others."""
    import numpy as np  # which takes a tenth of a second of every start

    from ..token_splits import HashedTokens

    key = f"{PREFIX}scores"
    scores = file.items(key)
    if len(scores) != len(ids) or not all(type(score) is float for score in scores):
        raise file.wrong(key, f"expected {len(ids)} numbers, one for each token", len(scores))

    tokens = HashedTokens([*ids])
    splits, texts = tokens.splits(), tokens.texts
    kind, score = np.array(kinds)[splits.whole], np.array(scores)[splits.whole]
    defined = kind == USER_DEFINED
    descending, longer = np.where(defined, 0.0, -score), -tokens.characters[splits.whole]
    order = np.lexsort((-splits.cut, splits.whole, longer, descending, ~defined))
    kept = splits.take(order[np.isin(kind[order], JOINED)])
    pairs = zip(kept.left.tolist(), kept.right.tolist())
    return [(texts[left], texts[right]) for left, right in pairs]


def _merges(file: Container, ids: Mapping[str, int]) -> Iterator[list[str]]:
    for i, merge in enumerate(file.items(f"{PREFIX}merges")):
        pair = merge.split(" ") if isinstance(merge, str) else []
        pair = [p if p in ids else p.replace(MERGED_SPACE, SPACE) for p in pair]
        if len(pair) != 2 or any(p not in ids for p in (*pair, "".join(pair))):
            what = f"item {i}, {quoted(merge)}, is not two tokens that are a third together"
            raise broken(file.path, f"{PREFIX}merges: {what}", CONVERT)
        yield pair
