"""Token ids of an answer to pieces for the reader, and the limit on reasoning tokens."""

from __future__ import annotations

from itertools import chain

from g4ir.errors import InputError

from .detokenizer import REPLACEMENT, TextStream
from .prompt import Piece, Vocabulary
from .special_tokens import CHANNEL, CHANNEL_END


class TokenStream:
    """Token ids in, pieces out: control tokens as such, other text as soon as it is certain, never
    part of a character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._text = TextStream(vocabulary.detokenizer)

    def push(self, token: int) -> list[Piece]:
        """Return the pieces that this token completes."""
        control = self.vocabulary.strings.get(token)
        if control is None:
            return _pieces(self._text.push(token))
        return [*self.rest(), Piece(control, True)]

    def rest(self) -> list[Piece]:
        """Return the text that was held back, at the end."""
        return _pieces(self._text.rest())


def spelled(vocabulary: Vocabulary, ids: list[int]) -> str:
    """Return the text of ids with control tokens spelled out."""
    decode = vocabulary.tokenizer.decode_batch  # releases the interpreter's lock
    text: str = decode([ids], skip_special_tokens=False)[0]
    if REPLACEMENT not in text:
        return text
    stream = TokenStream(vocabulary)
    pieces = [*chain.from_iterable(map(stream.push, ids)), *stream.rest()]
    return "".join(p.text for p in pieces)


def _pieces(text: str) -> list[Piece]:
    return [Piece(text)] if text else []


class ReasoningBudget:
    """Ends reasoning over `limit` tokens, counted over the whole answer.

        budget = ReasoningBudget(vocabulary, 512, inside=reader.thinking)
        token = budget.forced()                 # what must come next, or None: the model is free
        budget.push(token)                      # what came next

    The end is a newline and the token that closes a channel. It waits for whole characters.
    """

    def __init__(self, vocabulary: Vocabulary, limit: int, inside: bool = False) -> None:
        if limit < 0:
            raise InputError(f"thinking budget {limit}: expected 0 or more tokens")
        self.limit, self.used, self.inside = limit, 0, inside
        self._open, self._close = (_id(vocabulary, text) for text in (CHANNEL, CHANNEL_END))
        newline = vocabulary.plain("\n")
        self._newline = newline[0] if len(newline) == 1 else None
        self._vocabulary = vocabulary
        self._last: int | None = None

    def push(self, token: int) -> None:
        """Take a token of the answer, forced or not."""
        if token in (self._open, self._close):
            self.inside = token == self._open
        elif self.inside:
            self.used += 1
        self._last = token

    def forced(self) -> int | None:
        """Return the token that must come next, or None where the model is free."""
        if not self.inside or self.used < self.limit:
            return None
        if self._last is not None and self._inside(self._last) and self.used < self.limit + 4:
            return None  # a character has four bytes at most
        # Reasoning that has just begun or ends with a newline needs none.
        begun = self._last not in (None, self._open, self._newline)
        return self._newline if begun and self._newline is not None else self._close

    def _inside(self, token: int) -> bool:
        """Whether a character may go on behind a token: it is one of its bytes."""
        return self._vocabulary.detokenizer.bytes.get(token, 0) >= 0x80


def _id(vocabulary: Vocabulary, text: str) -> int:
    if text not in vocabulary.controls:
        raise InputError(f"the tokenizer has no {text}: reasoning cannot be ended by force")
    return vocabulary.controls[text]
