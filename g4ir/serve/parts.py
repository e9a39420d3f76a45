"""The pieces of an answer as parts that follow each other: a thought, a text, a call."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from g4ir.chat import Event as Said
from g4ir.chat.reader import ARGUMENTS

THOUGHT, CONTENT, CALL = "thought", "content", "call"


@dataclass(frozen=True, eq=False)
class Part:
    """One part; `name` and `index` are those of a call."""

    kind: str
    name: str | None = None
    index: int | None = None


def split(said: Said, part: Part | None) -> tuple[Part, str]:
    """Return the part that a piece belongs to, which is `part` or a new one, and its text."""
    if said.kind not in (CALL, ARGUMENTS):
        return (part if part and part.kind == said.kind else Part(said.kind)), said.text
    same = part if part and part.kind == CALL and part.index == said.index else None
    text = "" if said.kind == CALL and said.streamed else said.text
    return same or Part(CALL, said.name, said.index), text


#: whole characters of a JSON string, which has no halves of characters
_WHOLE = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')


class JsonText:
    """The text that is the one member of an object, while the JSON of that is written."""

    def __init__(self, name: str) -> None:
        self._head = re.compile(r'\{\s*"' + re.escape(name) + r'"\s*:\s*"')
        self._raw, self._inside, self._over = "", False, False

    def feed(self, piece: str) -> str:
        """Take a piece of JSON; return what is certain of the text."""
        self._raw += piece
        if not self._inside and (found := self._head.match(self._raw)):
            self._inside, self._raw = True, self._raw[found.end() :]
        if not self._inside or self._over:
            return ""
        end = _WHOLE.match(self._raw)
        assert end
        self._raw = self._raw[end.end() :]
        self._over = self._raw.startswith('"')
        return str(json.loads(f'"{end[0]}"', strict=False))

    def rest(self) -> str:
        """Return all that came, where it is no such object."""
        return "" if self._inside else self._raw
