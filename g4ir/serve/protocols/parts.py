"""How answers are written: the base of all formats, and that of formats whose answers are parts
which follow each other: a thought, a text, a call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from g4ir.chat import Event as Said
from g4ir.chat.reader import ARGUMENTS
from g4ir.engine.output import Answer

from ..http_errors import Refused
from .translation import Body

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


class AnswerFormat(Protocol):
    """Writes the answers to one request, whole or as the values of a stream."""

    #: what a silent stream says, and what ends one
    alive: str = ": keepalive\n\n"
    end: str = "data: [DONE]\n\n"

    def first(self, count: int) -> list[Body]:
        """Return what comes before the first token of so many answers."""
        return []

    def chunks(self, a: Answer, new: Iterable[Said]) -> list[Body]:
        """Return what new pieces of an answer add, and its end where it is over."""

    def last(self, answers: list[Answer], usage: Mapping[str, Any]) -> list[Body]:
        """Return what comes behind the last token."""

    def whole(self, answers: Iterable[Answer], usage: Mapping[str, Any]) -> Body | str:
        """Return all answers at once."""

    def failed(self, error: Refused) -> list[Body]:
        """Return the end of a stream that failed."""
        return [error.body()]

    def frame(self, value: Body, text: str) -> str:
        """Return a value of the stream, whose JSON is given, as it is sent."""
        return f"data: {text}\n\n"


class PartsFormat(AnswerFormat, Protocol):
    """Writes one answer as parts, which typed events open, fill and close."""

    end: str = ""
    #: the one that is open
    part: Part | None = None

    def chunks(self, a: Answer, new: Iterable[Said]) -> list[Body]:
        out = list[Body]()
        for said in new:
            part, text = split(said, self.part)
            if part is not self.part:
                out += self.closed() + self.opened(part)
            out += self.more(part, text, a)
        return out + (self.closed(a.finish == "length") if a.over else [])

    def opened(self, part: Part) -> list[Body]:
        """Begin a part."""

    def more(self, part: Part, text: str, a: Answer) -> list[Body]:
        """Add a text, which may be empty, to the open part."""

    def closed(self, cut: bool = False) -> list[Body]:
        """End the open part, if there is one."""
        part, self.part = self.part, None
        return self.ended(part, cut) if part else []

    def ended(self, part: Part, cut: bool) -> list[Body]:
        """Return the events of a part that has ended, or was cut."""

    def message(self, a: Answer, usage: Mapping[str, Any]) -> Body:
        """Return the whole answer, whose parts are written."""

    def whole(self, answers: Iterable[Answer], usage: Mapping[str, Any]) -> Body:
        (a,) = answers
        self.chunks(a, a.said)
        return self.message(a, usage)

    def frame(self, value: Body, text: str) -> str:
        return f"event: {value['type']}\n{super().frame(value, text)}"


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
