"""Makes the files that an engine keeps beside its weights from the metadata of a GGUF file:
tokenizer.json as transformers builds Gemma's (models/gemma/tokenization_gemma.py), the chat
template, and the defaults of generation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from g4ir.errors import WeightsError
from g4ir.weights.tensorfile import DOWNLOAD, quoted

from .container import Array, Container, shortest

MODEL = "gemma4"
PREFIX = "tokenizer.ggml."
#: types of tokens that stand for themselves: control, and defined by the user
SPECIAL = (3, 4)
#: tokens that end a text or a turn; not every converter says that they are special
ENDS = ("<eos>", "<turn|>", "<|tool_response>")
UNKNOWN = "<unk>"
#: what a space is within a token; of merges, what a space within a piece is
SPACE, MERGED_SPACE = "\u2581", "\u0120"
#: key of the file -> key of generation_config.json
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
}


def token_ids(file: Container, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the ids of special tokens as a config has them, with those of the texts that end a
    turn; those that the file does not name are left out."""
    keys = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
    found = {name: _id(file, key) for name, key in keys.items()}
    ends = [_id(file, key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    named = [ids.get(text) for text in ENDS]
    eos = sorted({i for i in (*ends, *named) if i is not None})
    return {k: v for k, v in found.items() if v is not None} | (
        {"eos_token_id": eos} if eos else {}
    )


def side_files(file: Container) -> dict[str, bytes]:
    """Return the files by name. WeightsError names file, key and item."""
    ids = vocabulary(file)
    out = {"generation_config.json": _json(_generation(file, ids))}
    if (template := file.values.get("tokenizer.chat_template")) is not None:
        if not isinstance(template, str):
            raise file.wrong("tokenizer.chat_template", "expected a text", template)
        out["chat_template.jinja"] = template.encode()
    if file.values.get(f"{PREFIX}model") not in (None, "none", "no_vocab"):
        out["tokenizer.json"] = _json(_tokenizer(file, ids))
        add = file.values.get(f"{PREFIX}add_bos_token", True)
        out["tokenizer_config.json"] = _json({"add_bos_token": add is True})
    return out


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _generation(file: Container, ids: Mapping[str, int]) -> dict[str, Any]:
    out: dict[str, Any] = token_ids(file, ids)
    drawn = {to: _number(file, k) for k, to in SAMPLING.items() if k in file.values}
    out |= {"do_sample": True, **drawn} if drawn else {}
    if isinstance(file.values.get(f"{PREFIX}suppress_tokens"), Array):
        out["suppress_tokens"] = file.items(f"{PREFIX}suppress_tokens")
    return out


def _number(file: Container, key: str) -> Any:
    found = file.values[key]
    if type(found) not in (int, float):
        raise file.wrong(key, "expected a number", found)
    return shortest(found)


def _id(file: Container, name: str) -> int | None:
    """Return a token id; None where the file has none."""
    key = f"{PREFIX}{name}"
    found = file.values.get(key)
    if found is not None and type(found) is not int:
        raise file.wrong(key, "expected a token id", found)
    return found


def vocabulary(file: Container) -> dict[str, int]:
    """Return text -> id of all tokens; none in a file without a vocabulary."""
    key = f"{PREFIX}tokens"
    if key not in file.values:
        return {}
    tokens = file.items(key)
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens) or not all(isinstance(t, str) for t in tokens):
        twice = next((t for i, t in enumerate(tokens) if ids[t] != i), tokens[0])
        raise file.wrong(key, "expected texts, each once", twice)
    return ids


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


#: what a tokenizer.json says of every file: characters are merged, those that have no token become
#: bytes, and spaces are U+2581
FIXED: Mapping[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "normalizer": _replace(" ", SPACE),
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    },
    "post_processor": None,
    "decoder": {
        "type": "Sequence",
        "decoders": [_replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}],
    },
}
#: and of its merges
FIXED_MODEL: Mapping[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": True,
    "byte_fallback": True,
    "ignore_merges": False,
}


def _tokenizer(file: Container, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a tokenizer.json."""
    if file.values[f"{PREFIX}model"] != MODEL:
        raise file.wrong(f"{PREFIX}model", f"expected {MODEL}", file.values[f"{PREFIX}model"])
    rows = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    if not 0 < len(ids) <= rows:
        raise file.wrong(f"{PREFIX}tokens", f"expected 1 to {rows} tokens", len(ids))
    own = {
        "unk_token": _unknown(file, ids),
        "vocab": ids,
        "merges": list(_merges(file, ids)),
    }
    added = [_added(i, text) for i, text in _special(file, ids)]
    return {**FIXED, "added_tokens": added, "model": {**FIXED_MODEL, **own}}


def _added(i: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": text, **flags, "special": True}


def _special(file: Container, ids: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Yield ids and texts of the tokens that are found before any merge."""
    key = f"{PREFIX}token_type"
    kinds = file.items(key) if key in file.values else [1] * len(ids)
    if len(kinds) != len(ids):
        raise file.wrong(key, f"expected {len(ids)} items, one for each token", len(kinds))
    for (text, i), kind in zip(ids.items(), kinds, strict=True):
        if kind in SPECIAL or text in ENDS:
            yield i, text


def _unknown(file: Container, ids: Mapping[str, int]) -> str | None:
    """Return the text of the token for what has none."""
    given = _id(file, "unknown_token_id")
    named = (text for text, i in ids.items() if i == given)
    return next(named, UNKNOWN if UNKNOWN in ids else None)


def _merges(file: Container, ids: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the pairs that are joined, first those that count first."""
    for i, merge in enumerate(file.items(f"{PREFIX}merges")):
        pair = merge.split(" ") if isinstance(merge, str) else []
        pair = [p if p in ids else p.replace(MERGED_SPACE, " ") for p in pair]
        if len(pair) != 2 or any(p not in ids for p in (*pair, "".join(pair))):
            raise WeightsError(
                f"{file.path}: {PREFIX}merges: item {i}, {quoted(merge)}, is not two tokens that "
                f"are a third together; {DOWNLOAD}"
            )
        yield pair
