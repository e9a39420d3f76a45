"""Incremental detokenizer: token ids in, text out as soon as it is final. Needs no engine and no
torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of token ids (library `tokenizers`).

    Byte tokens are decoded here as UTF-8: one that begins or continues no character becomes U+FFFD
    and leaves its neighbours as they are, where the library replaces the whole run.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        #: id of a byte token -> its byte
        self.bytes: dict[int, int] = {}
        for byte in range(256):
            name = f"<0x{byte:02X}>"
            token = tokenizer.token_to_id(name)
            if token is not None and tokenizer.decode([token]) not in ("", name):
                self.bytes[token] = byte

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text without special tokens."""
        ids = list(ids)
        text = self.text(ids)
        if REPLACEMENT not in text or self.bytes.keys().isdisjoint(ids):
            return text
        stream = TextStream(self)
        return "".join([*map(stream.push, ids), stream.rest()])

    def text(self, ids: list[int]) -> str:
        """Return the text as the library decodes it."""
        text: str = self.tokenizer.decode(ids)
        return text

    def spells(self, token: int) -> bool:
        """Whether U+FFFD is part of a token itself, and no sign of an incomplete character."""
        return REPLACEMENT in (self.tokenizer.id_to_token(token) or "")


class TextStream:
    """Token ids in, text out as soon as it is final; the pieces concatenate to `decode(ids)`.

    A token's text may depend on the token before it, so a piece is the difference of two
    decodings, with the last piece's tokens as context. Special tokens do not end a character.
    """

    def __init__(self, codec: Detokenizer) -> None:
        self.codec = codec
        self._ids: list[int] = []  # the last piece's tokens, then those not yet final
        self._known = 0  # how many of them are the last piece's
        self._bytes = b""  # of a character that is not complete

    def push(self, token: int) -> str:
        """Return the text that becomes final with this token."""
        byte = self.codec.bytes.get(token)
        if byte is not None:
            return self._byte(token, byte)
        if not self.codec.text([token]):  # a special one
            self._ids += [] if self._bytes else [token]
            return ""
        wrong = self._wrong()
        self._ids.append(token)
        return wrong + self._piece(ends=self.codec.spells(token))

    def _byte(self, token: int, byte: int) -> str:
        self._bytes += bytes([byte])
        self._ids.append(token)
        state = _utf8(self._bytes)
        if state is None:
            return ""
        if state:
            self._bytes = b""
            return self._piece()
        if len(self._bytes) == 1:
            return self._wrong()
        self._bytes, last = self._bytes[:-1], self._ids.pop()
        return self._wrong() + self._byte(last, byte)

    def _wrong(self) -> str:
        """Emit the incomplete character as U+FFFD, if there is one."""
        if not self._bytes:
            return ""
        self._ids = self._ids[: -len(self._bytes)]
        self._bytes = b""
        return REPLACEMENT

    def rest(self) -> str:
        """Return the text held back, at the end or before a token that is no text."""
        wrong = self._wrong()
        return (self._piece() if len(self._ids) > self._known else "") + wrong

    def _piece(self, ends: bool = True) -> str:
        """Return the text behind the last piece. Unless it `ends` a character, tokens of a
        byte-level vocabulary may end within one."""
        before = self.codec.text(self._ids[: self._known])
        piece = self.codec.text(self._ids)[len(before) :]
        if not ends and piece.endswith(REPLACEMENT):
            return ""
        if piece:
            self._ids = self._ids[self._known :]
            self._known = len(self._ids)
        return piece


def _utf8(raw: bytes) -> bool | None:
    """Whether bytes are one character of UTF-8; None: the beginning of one."""
    try:
        raw.decode()
    except UnicodeDecodeError as e:
        return None if e.reason == "unexpected end of data" else False
    return True
