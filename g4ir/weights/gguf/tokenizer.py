"""Makes the files that an engine keeps beside its weights from the metadata of a GGUF file:
tokenizer.json as transformers builds Gemma's (models/gemma/tokenization_gemma.py), the chat
template, and the defaults of generation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from g4ir.errors import WeightsError
from g4ir.weights.tensorfile import quoted

from .container import CONVERT, Array, Container, shortest
from .tables import TABLES

#: values of `tokenizer.ggml.model`: byte-pair merges, and SentencePiece, whose merges may be given
#: by scores alone
MODELS = SCORED, _ = ("llama", "gemma4")
PREFIX = "tokenizer.ggml."
#: token types of added tokens, which are matched before any merge
CONTROL, USER_DEFINED = 3, 4
#: token types that merges make: normal and user-defined ones, and not control tokens or bytes
JOINED = (1, USER_DEFINED)
#: a USER_DEFINED token of this shape is a control token of the chat format; all others are text
MARK = re.compile(r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>")
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
    if not all(isinstance(t, str) for t in tokens):
        raise file.wrong(key, "expected texts", tokens[0])
    known = {*tokens}
    # llama.cpp's converter writes the spaces of user-defined tokens as they are in a text.
    texts = [t if (s := t.replace(" ", SPACE)) in known else s for t in tokens]
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) != len(tokens):
        twice = next(t for i, t in enumerate(texts) if ids[t] != i)
        raise file.wrong(key, "expected texts, each once", twice)
    return ids


def _tokenizer(file: Container, ids: Mapping[str, int]) -> dict[str, Any]:
    model = file.values[f"{PREFIX}model"]
    if model not in MODELS:
        raise file.wrong(
            f"{PREFIX}model",
            f"expected {' or '.join(MODELS)}",
            model,
            "fix: this is the tokenizer of another family; take a conversion of a Gemma 4 model",
        )
    rows = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    if not 0 < len(ids) <= rows:
        raise file.wrong(f"{PREFIX}tokens", f"expected 1 to {rows} tokens", len(ids))
    kinds = _kinds(file, ids)
    scored = model == SCORED and f"{PREFIX}merges" not in file.values
    merges = _merges_by_score(file, ids, kinds) if scored else list(_merges(file, ids))
    own = {"unk_token": _unknown(file, ids), "vocab": ids, "merges": merges}
    added = [
        _added(i, text, kind)
        for (text, i), kind in zip(ids.items(), kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED) or text in ENDS
    ]
    model = {**TABLES["tokenizer_model"], **own}
    return {**TABLES["tokenizer"], "added_tokens": added, "model": model}


def _added(i: int, text: str, kind: int) -> dict[str, Any]:
    """Return an added token; decoding skips only `special` ones. Spaces are matched as the
    normalizer leaves them."""
    special = kind == CONTROL or text in ENDS or MARK.fullmatch(text) is not None
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": i, "content": text, **flags, "normalized": SPACE in text, "special": special}


def _kinds(file: Container, ids: Mapping[str, int]) -> list[Any]:
    """Return the type of each token; all are normal in a file without types."""
    key = f"{PREFIX}token_type"
    kinds = file.items(key) if key in file.values else [1] * len(ids)
    if len(kinds) != len(ids):
        raise file.wrong(key, f"expected {len(ids)} items, one for each token", len(kinds))
    return kinds


def _unknown(file: Container, ids: Mapping[str, int]) -> str | None:
    given = _id(file, "unknown_token_id")
    named = (text for text, i in ids.items() if i == given)
    return next(named, UNKNOWN if UNKNOWN in ids else None)


def _merges_by_score(
    file: Container, ids: Mapping[str, int], kinds: list[Any]
) -> list[tuple[str, str]]:
    """Return SentencePiece's merges: every split of a token into two tokens, in descending order
    of the token's score; those of user-defined tokens come before all others."""
    key = f"{PREFIX}scores"
    scores = file.items(key)
    if len(scores) != len(ids) or not all(type(score) is float for score in scores):
        raise file.wrong(key, f"expected {len(ids)} numbers, one for each token", len(scores))

    def rank(text: str) -> tuple[bool, float, int, int]:
        i = ids[text]
        defined = kinds[i] == USER_DEFINED
        return not defined, 0.0 if defined else -scores[i], -len(text), i

    joined = sorted((t for t, i in ids.items() if kinds[i] in JOINED), key=rank)
    halves = ((t[:at], t[at:]) for t in joined for at in range(len(t) - 1, 0, -1))
    return [pair for pair in halves if pair[0] in ids and pair[1] in ids]


def _merges(file: Container, ids: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the pairs that are joined, first those that count first."""
    for i, merge in enumerate(file.items(f"{PREFIX}merges")):
        pair = merge.split(" ") if isinstance(merge, str) else []
        pair = [p if p in ids else p.replace(MERGED_SPACE, SPACE) for p in pair]
        if len(pair) != 2 or any(p not in ids for p in (*pair, "".join(pair))):
            raise WeightsError(
                f"{file.path}: {PREFIX}merges: item {i}, {quoted(merge)}, is not two tokens that "
                f"are a third together; {CONVERT}"
            )
        yield pair
