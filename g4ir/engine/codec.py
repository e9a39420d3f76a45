"""Text to tokens and back, by the checkpoint's own tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from g4ir.errors import InputError
from g4ir.weights.tensorfile import parse_json

from .engine import Engine

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Codec:
    """The checkpoint's own tokenizer, as transformers would use it."""

    def __init__(self, engine: Engine) -> None:
        self.tokenizer = engine.tokenizer()
        config = _tokenizer_config(engine.path)
        self.bos, self.adds_bos = engine.spec.tokens.bos, config.get("add_bos_token") is True
        template = engine.path / "chat_template.jinja"
        #: whether the checkpoint has a chat template
        self.instructed = template.is_file() or bool(config.get("chat_template"))

    def encode(self, text: str, what: str) -> list[int]:
        """Return token ids, special ones as tokenizer.json and its config add them; one that begins
        the text is not added again."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"{what}: not UTF-8 at character {e.start}") from None
        ids = self._ids(text, what, True)
        if self.bos is None:
            return ids
        if self.adds_bos and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids[1:] if ids[:2] == [self.bos] * 2 else ids

    def has_turns(self, ids: Sequence[int]) -> bool:
        """Whether there are special tokens behind the first, as a chat template would put."""
        special = {i for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special}
        return not special.isdisjoint(ids[1:])

    def plain(self, text: str) -> list[int]:
        """Return token ids of a part of a text, nothing added."""
        return self._ids(text, "a part of the prompt", False)

    def _ids(self, text: str, what: str, special: bool) -> list[int]:
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        except BaseException as e:
            # What the library's own code stumbles over is no Exception.
            if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
                raise
            raise InputError(f"{what}: tokenizer.json does not take this text: {e}") from e
        return ids

    def spell(self, token: int) -> str:
        """Return the string of a special token, which encodes to it alone."""
        text: str | None = self.tokenizer.id_to_token(token)
        if not text or self.plain(text) != [token]:
            raise InputError(
                f"the engine's tokenizer.json has no special token {token}, which "
                f"text with media needs: give token ids"
            )
        return text

    def decode(self, ids: list[int]) -> str:
        """Return the text without special tokens."""
        text: str = self.tokenizer.decode(ids)
        return text

    def is_byte(self, token: int) -> bool:
        """Whether a token stands for one byte of a character that has no token."""
        return _BYTE.fullmatch(self.tokenizer.id_to_token(token) or "") is not None


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; empty where there is none."""
    path = folder / "tokenizer_config.json"
    return parse_json(path, path.read_bytes()) if path.is_file() else {}


class TextStream:
    """Token ids in, text out as soon as it is certain; together it is the text of all ids.

    A character may be spread over several tokens, and how a token reads may depend on the one
    before it: a piece is the difference of two decodings from the last piece on. Byte tokens wait
    for the end of their run, which special tokens do not end, because one that is wrong makes all
    of it unreadable.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._ids: list[int] = []  # the last piece's tokens, then those not yet shown
        self._known = 0  # how many of them are the last piece's

    def push(self, token: int) -> str:
        """Return the text that this token completes, or nothing yet."""
        self._ids.append(token)
        if self.codec.is_byte(token) or not self.codec.decode([token]):  # a special one
            return ""
        piece = self._piece()
        if not piece or piece.endswith("\ufffd"):  # an incomplete character decodes to U+FFFD
            return ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return piece

    def rest(self) -> str:
        """Return the text that was held back, at the end."""
        return self._piece() if len(self._ids) > self._known else ""

    def _piece(self) -> str:
        before = self.codec.decode(self._ids[: self._known])
        return self.codec.decode(self._ids)[len(before) :]
