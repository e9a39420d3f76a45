"""An index of tokenizer.json, to encode short texts without parsing the file.

The library `tokenizers` takes 0.4 s to parse a vocabulary of 262,144 tokens, and holds the GIL. BPE
of one text uses few of them: every token of the result but fallbacks, and every intermediate merge,
is a substring of the normalised text. So a tokenizer with only those tokens, the fallbacks and the
merges among them gives the same result, and is built in a millisecond. The index finds a text's
substrings that are tokens: hashes of all tokens by length, in a memory-mapped file of the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from g4ir.errors import EngineError
from g4ir.ops.types import torch
from g4ir.weights.tensorfile import FileTensor, map_file, read_header, tensor_file, view
from g4ir.weights.token_splits import BASE, HashedTokens, code_points

INDEX = "tokenizer.index"
#: maximum characters that one tokenizer encodes by the index, summed over its calls; beyond them
#: parsing the full file is faster
FEW = 1 << 13
#: maximum characters of a token: a merge's split position within it is stored in one byte
LONGEST = 255


def index_file(raw: bytes, size: int) -> bytes | None:
    """Return the content of the index file of a tokenizer.json; None if it is invalid, has more
    than `size` tokens or no merges, if its tokens need not be substrings of the text, if two tokens
    have the same hash, or if the library refuses it."""
    try:
        arrays = index_of(json.loads(raw), size)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return as_file(arrays) if arrays else None


def as_file(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return an index's arrays as the bytes of a safetensors file."""
    tensors = {k: FileTensor.of(torch.from_numpy(a)) for k, a in arrays.items()}
    return b"".join(tensor_file(tensors))


def index_of(frame: dict[str, Any], size: int) -> dict[str, np.ndarray] | None:
    """Return the arrays of an index from the values of a tokenizer.json, or None as `index_file`;
    raises KeyError, TypeError, ValueError or AttributeError for invalid values. Removes vocabulary
    and merges from `frame`.

    frame         JSON of the file without vocabulary and merges
    text, ends    UTF-8 of all tokens, concatenated, and the offset of each token's end in it
    hashes, ids   of the tokens, sorted by (number of characters, hash)
    lengths       number of tokens of 0, 1, 2, ... characters
    cuts, ranks   of the merges, sorted by the token that they yield: length of the left part in
                  characters, and rank
    merges        cumulative number of merges up to each token
    """
    model = frame["model"]
    vocab, listed = model.pop("vocab", None), model.pop("merges", None)
    texts = sorted(vocab, key=vocab.__getitem__) if isinstance(vocab, dict) else []
    frame["added_tokens"] = frame.get("added_tokens") or []
    local = listed and len(texts) <= size and _is_local(frame, vocab)
    if not local or not _library_accepts(frame, vocab):
        return None
    tokens = HashedTokens(texts)
    merges = _merge_results(listed, vocab, tokens, [*_fallbacks(model)])
    if merges is None or tokens.collide:
        return None
    order = np.lexsort((tokens.hashes, tokens.characters))
    results, cuts = merges
    by_token = np.argsort(results, kind="stable")
    raw = [text.encode() for text in texts]
    return {
        "frame": np.frombuffer(json.dumps(frame).encode(), np.uint8).copy(),
        "text": np.frombuffer(b"".join(raw), np.uint8).copy(),
        "ends": np.cumsum([*map(len, raw)]),
        "hashes": tokens.hashes[order].view(np.int64),
        "ids": order.astype(np.int32),
        "lengths": np.bincount(tokens.characters),
        "cuts": cuts[by_token].astype(np.uint8),
        "ranks": by_token.astype(np.int32),
        "merges": np.cumsum(np.bincount(results, minlength=len(texts))),
    }


def _is_local(frame: Mapping[str, Any], vocab: Mapping[str, int]) -> bool:
    """Whether an index suffices for this tokenizer, because all tokens of a text are substrings of
    its normalised form: a BPE without dropout and affixes, with ids 0 .. N - 1 and at most LONGEST
    characters per token; the normaliser, if any, replaces one character wherever it occurs, the
    pre-tokeniser, if any, is a Split; added tokens are in the vocabulary, and the normaliser
    changes none of them."""
    model, normalizer, split = frame["model"], frame.get("normalizer"), frame.get("pre_tokenizer")
    pattern = ""
    if normalizer is not None:
        pattern = (normalizer.get("pattern") or {}).get("String", "")
        if normalizer["type"] != "Replace" or len(pattern) != 1:
            return False
    added = frame["added_tokens"]
    return (
        model.get("type") == "BPE"
        and not any(model.get(k) for k in ("dropout", *AFFIXES))
        and (split is None or split["type"] == "Split")
        and {*map(type, vocab.values())} == {int}
        and sorted(vocab.values()) == [*range(len(vocab))]
        and max(map(len, vocab)) <= LONGEST
        and all(vocab.get(t["content"]) == t["id"] for t in added)
        and not any(t["normalized"] and pattern and pattern in t["content"] for t in added)
    )


def _library_accepts(frame: Mapping[str, Any], vocab: Mapping[str, int]) -> bool:
    """Whether the library accepts the file without merges and with only the added and fallback
    tokens."""
    from tokenizers import Tokenizer

    small = {t["content"]: t["id"] for t in frame["added_tokens"]}
    small |= {t: vocab[t] for t in _fallbacks(frame["model"]) if t in vocab}
    try:
        Tokenizer.from_str(_subset(frame, small, []))
    except Exception:  # the library raises plain Exception
        return False
    return True


def _subset(
    frame: Mapping[str, Any], vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]
) -> str:
    """Return the text of a tokenizer.json with this vocabulary and these merges only, without
    truncation and padding."""
    added = [t for t in frame["added_tokens"] if t["content"] in vocab]
    model = {**frame["model"], "vocab": vocab, "merges": merges}
    changed = {"truncation": None, "padding": None, "added_tokens": added, "model": model}
    return json.dumps({**frame, **changed})


AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")


def _merge_results(
    merges: Sequence[Any], vocab: Mapping[str, int], tokens: HashedTokens, fallbacks: Sequence[str]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return each merge's result token, and the length of its left part in characters; None if a
    merge is invalid, its result or an operand is not a token, or an operand is a byte-fallback or
    unknown token, which stands for other characters than its string."""
    kinds = {*map(type, merges)}
    if kinds == {str} and sum(m.count(" ") for m in merges) == len(merges):
        cuts = [m.index(" ") for m in merges]
        joined = [m.replace(" ", "") for m in merges]
    elif kinds != {list}:
        return None
    else:
        cuts = [len(first) for first, _ in merges]
        joined = [first + second for first, second in merges]
    results, cut = np.array([vocab.get(t, -1) for t in joined]), np.array(cuts)
    splits = tokens.splits()
    keys, expected = splits.token << 8 | splits.cut, results << 8 | cut
    at = np.minimum(np.searchsorted(keys, expected), len(keys) - 1)
    other = [vocab[t] for t in fallbacks if t in vocab]
    if (
        not len(keys)
        or (keys[at] != expected).any()
        or np.isin([splits.head[at], splits.tail[at]], other).any()
    ):
        return None
    return results, cut


def _fallbacks(model: Mapping[str, Any]) -> list[str]:
    """Return the strings of the unknown and byte-fallback tokens, which encode characters that have
    no token."""
    unknown = [model["unk_token"]] if model.get("unk_token") else []
    return [*unknown, *(f"<0x{byte:02X}>" for byte in range(256))]


class IndexedTokenizer:
    """A tokenizer with the methods that `chat.prompt` calls, backed by the index. Other methods,
    and texts of more than FEW characters in sum, open and use the full tokenizer."""

    def __init__(self, path: Path, open_full: Any) -> None:
        """`open_full` returns the full tokenizer. EngineError or WeightsError for an invalid index
        file."""
        from tokenizers import Tokenizer

        self._open_full, self._budget = open_full, FEW
        header = read_header(path)
        mapped = map_file(header)
        arrays = {name: view(mapped, entry).numpy() for name, entry in header.entries.items()}
        try:
            _check(arrays)
            self._frame = json.loads(arrays["frame"].tobytes())
            self._empty = Tokenizer.from_str(_subset(self._frame, {}, []))
        except Exception as e:  # of the library too
            problem = f"is no index of a tokenizer: {e}"
            raise EngineError(f"{path} {problem}; build the engine again") from None
        self._text, self._ends = arrays["text"], arrays["ends"]
        self._hashes, self._ids = arrays["hashes"].view(np.uint64), arrays["ids"]
        self._lengths = [0, *np.cumsum(arrays["lengths"]).tolist()]
        self._cuts, self._ranks, self._merges = (arrays[k] for k in ("cuts", "ranks", "merges"))
        self._added = {t["id"]: t for t in self._frame["added_tokens"]}
        self._special = {i for i, t in self._added.items() if t["special"]}
        self._known: dict[str, int | None] = {}
        self._known = {t: self.token_to_id(t) for t in _fallbacks(self._frame["model"])}
        self._fallbacks = {i for i in self._known.values() if i is not None}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._full, name)

    @cached_property
    def _full(self) -> Any:
        return self._open_full()

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> Any:
        """As in `tokenizers.Tokenizer`."""
        self._budget -= sum(map(len, texts))
        tokenizer = self._full if self._budget < 0 else self._of(texts)
        return tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """As in `tokenizers.Tokenizer`."""
        skip = self._special if skip_special_tokens else ()
        texts = [self.id_to_token(i) for i in ids if i not in skip]
        tokens = [text for text in texts if text is not None]
        decoder = self._empty.decoder
        return decoder.decode(tokens) if decoder else " ".join(tokens)

    def decode_batch(self, rows: Iterable[Sequence[int]], skip_special_tokens: bool = True) -> Any:
        """As in `tokenizers.Tokenizer`."""
        return [self.decode(ids, skip_special_tokens) for ids in rows]

    def id_to_token(self, token: int) -> str | None:
        """As in `tokenizers.Tokenizer`."""
        if not 0 <= token < len(self._ends):
            return None
        start = self._ends[token - 1] if token else 0
        return self._text[start : self._ends[token]].tobytes().decode()

    def token_to_id(self, text: str) -> int | None:
        """As in `tokenizers.Tokenizer`."""
        if text in self._known:
            return self._known[text]
        matches = (i for i in self._within(text, len(text)) if self.id_to_token(i) == text)
        return next(matches, None)

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """As in `tokenizers.Tokenizer`."""
        from tokenizers import AddedToken

        return {
            i: AddedToken(**{k: v for k, v in t.items() if k != "id"})
            for i, t in self._added.items()
        }

    def _of(self, texts: Sequence[str]) -> Any:
        """Return a tokenizer restricted to the fallbacks and the tokens in the texts."""
        from tokenizers import Tokenizer

        normalizer, ids = self._empty.normalizer, {*self._fallbacks}
        for text in texts:
            ids |= self._within(text)
            ids |= self._within(normalizer.normalize_str(text)) if normalizer else set()
        vocab = {self.id_to_token(i) or "": i for i in sorted(ids)}
        merges = [p for p in self._merges_of(ids) if vocab.keys() >= {*p}]
        return Tokenizer.from_str(_subset(self._frame, vocab, merges))

    def _within(self, text: str, min_length: int = 1) -> set[int]:
        """Return the ids of tokens of at least `min_length` characters that occur in a text; rarely
        a false positive (hash collision)."""
        codes, out = code_points(text), set[int]()
        hashes = np.zeros(len(codes) + 1, np.uint64)
        for length, (start, end) in enumerate(pairwise(self._lengths)):
            if length > len(codes):
                break
            if length:
                hashes = hashes[:-1] * BASE + codes[length - 1 :]
            if length >= min_length and end > start:
                part = self._hashes[start:end]
                at = np.minimum(np.searchsorted(part, hashes), len(part) - 1)
                out.update(self._ids[start + at[part[at] == hashes]].tolist())
        return out

    def _merges_of(self, ids: Iterable[int]) -> list[tuple[str, str]]:
        """Return the merges whose results are among `ids`, by rank."""
        merges = list[tuple[int, str, str]]()
        for i in ids:
            text = self.id_to_token(i) or ""
            for k in range(self._merges[i - 1] if i else 0, self._merges[i]):
                cut = int(self._cuts[k])
                merges.append((int(self._ranks[k]), text[:cut], text[cut:]))
        return [(a, b) for _, a, b in sorted(merges)]


def _check(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError for inconsistent index arrays."""
    tokens, merges = len(arrays["ids"]), len(arrays["ranks"])
    ends = {"ends": len(arrays["text"]), "merges": merges}
    rules = {
        "ids": tokens and arrays["ids"].min() >= 0 and arrays["ids"].max() < tokens,
        "hashes": len(arrays["hashes"]) == tokens,
        "cuts": len(arrays["cuts"]) == merges,
        "lengths": arrays["lengths"].sum() == tokens and (arrays["lengths"] >= 0).all(),
        **{
            k: len(a := arrays[k]) == tokens and a[-1] == end and (np.diff(a, prepend=0) >= 0).all()
            for k, end in ends.items()
        },
    }
    if wrong := next((name for name, holds in rules.items() if not holds), None):
        raise ValueError(f"array {wrong!r} is invalid, or inconsistent with the others")
