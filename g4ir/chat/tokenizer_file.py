"""Reads a checkpoint's tokenizer.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from g4ir.errors import EngineError, MissingError

log = logging.getLogger(__name__)


def read_tokenizer(path: Path, raw: bytes) -> Any:
    """Parse a tokenizer.json, without its truncation and padding. EngineError if it is invalid,
    MissingError without the library `tokenizers`."""
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise MissingError("text prompts need `pip install tokenizers`") from e
    try:
        tokenizer = Tokenizer.from_buffer(raw)
        # Truncation and padding are for training; prompts are never truncated.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    except Exception as e:  # the library raises plain Exception
        raise EngineError(f"{path} is no tokenizer file: {e}; download or save it again") from e


def within_vocabulary(tokenizer: Any, size: int, path: Path) -> Any:
    """Return the tokenizer without tokens that have no embedding: some fine-tunes add tokens and do
    not resize the table."""
    added = tokenizer.get_added_tokens_decoder()
    if tokenizer.get_vocab_size(with_added_tokens=False) <= size > max(added, default=-1):
        return tokenizer  # `get_vocab` takes 0.2 s
    beyond = sorted((i, text) for text, i in tokenizer.get_vocab().items() if i >= size)
    if not beyond:  # get_vocab_size counts tokens, several of which may share an id
        return tokenizer
    (first, text), names = beyond[0], {text for _, text in beyond}
    message = "%s: %d tokens with ids beyond the vocabulary size %d are left out, first %r (%d)"
    log.warning(message, path, len(beyond), size, text, first)
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = [t for t in values["added_tokens"] if t["id"] < size]
    model = values["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {t: i for t, i in model["vocab"].items() if i < size}
        pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges", ()))
        merges = [p for p in pairs if not names & {*p, "".join(p)}]
        model |= {"merges": merges} if "merges" in model else {}
    else:
        model["vocab"] = model["vocab"][:size]
    return read_tokenizer(path, json.dumps(values).encode())
