"""Token ids in, text out as soon as it is certain. Needs no engine and no torch."""

from __future__ import annotations

import re
from typing import Any, Protocol

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Decoder(Protocol):
    """Knows the text of tokens."""

    def decode(self, ids: list[int]) -> str:
        """Return the text without special tokens."""

    def is_byte(self, token: int) -> bool:
        """Whether a token stands for one byte of a character that has no token."""


def is_byte(tokenizer: Any, token: int) -> bool:
    """Whether a token of a tokenizer (library `tokenizers`) stands for one byte."""
    return _BYTE.fullmatch(tokenizer.id_to_token(token) or "") is not None


class TextStream:
    """Token ids in, text out as soon as it is certain; together it is the text of all ids.

    A character may be spread over several tokens, and how a token reads may depend on the one
    before it: a piece is the difference of two decodings from the last piece on. Byte tokens wait
    for the end of their run, which special tokens do not end, because one that is wrong makes all
    of it unreadable.
    """

    def __init__(self, codec: Decoder) -> None:
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

    def cut(self) -> str:
        """Return the text that was held back, where a token comes between that is no text."""
        piece = self.rest()
        if piece:
            # Bytes of a character that was never complete must not join with those to come.
            wrong = self.codec.is_byte(self._ids[-1])
            self._ids = [] if wrong else self._ids[self._known :]
            self._known = len(self._ids)
        return piece

    def _piece(self) -> str:
        before = self.codec.decode(self._ids[: self._known])
        return self.codec.decode(self._ids)[len(before) :]
