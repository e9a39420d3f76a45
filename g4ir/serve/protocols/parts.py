"""Formats of answers: the base class of all, and that of formats whose answers are a sequence of
parts (reasoning, text, tool calls)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from g4ir.chat import Event as ChatEvent
from g4ir.chat.reader import ARGUMENTS
from g4ir.engine.output import AnswerStream
from g4ir.engine.requests import RequestHandle

from ..http_errors import Refused
from .translation import Body

THOUGHT, CONTENT, CALL = "thought", "content", "call"


class AnswerFormat(Protocol):
    """Format of the answers to one request, complete or as the JSON values of a stream."""

    #: Content-Type of a stream
    content_type: str = "text/event-stream"
    #: keepalive, and end of a stream
    alive: str = ": keepalive\n\n"
    end: str = "data: [DONE]\n\n"

    def submitted(self, handles: list[RequestHandle]) -> None:
        """Store the handles of the requests, for their timings."""

    def first(self, count: int) -> list[Body]:
        """Return the values before the first token, for `count` answers."""
        return []

    def chunks(self, a: AnswerStream, new: Iterable[ChatEvent]) -> list[Body]:
        """Return the values of new events of an answer, and its end if it is over."""

    def last(self, answers: list[AnswerStream], usage: Mapping[str, Any]) -> list[Body]:
        """Return the values after the last token, such as the usage."""

    def complete(self, answers: Iterable[AnswerStream], usage: Mapping[str, Any]) -> Body | str:
        """Return the body of a response without `stream`: an object, or plain text."""

    def failed(self, error: Refused) -> list[Body]:
        """Return the last values of a failed stream."""
        return [error.body()]

    def frame(self, value: Body, text: str) -> str:
        """Return a value of the stream, with its JSON `text`, as a server-sent event."""
        return f"data: {text}\n\n"


class PartsFormat(AnswerFormat, Protocol):
    """Format of one answer as parts: typed events open, fill and close each."""

    end: str = ""
    #: first event of the open part; None: no part is open
    part: ChatEvent | None = None

    @property
    def kind(self) -> str:
        """The kind of the part that is open: THOUGHT, CONTENT or CALL."""
        assert self.part
        return CALL if self.part.kind == ARGUMENTS else self.part.kind

    def chunks(self, a: AnswerStream, new: Iterable[ChatEvent]) -> list[Body]:
        out = list[Body]()
        for event in new:
            kind = CALL if event.kind == ARGUMENTS else event.kind
            if not self.part or (self.kind, self.part.index) != (kind, event.index):
                out += self.closed()
                self.part = event
                out += self.opened(event)
            out += self.more("" if event.kind == CALL and event.streamed else event.text, a)
        return out + (self.closed(a.finish == "length") if a.over else [])

    def opened(self, part: ChatEvent) -> list[Body]:
        """Return the events that open a part."""

    def more(self, text: str, a: AnswerStream) -> list[Body]:
        """Return the events that append a text (possibly empty) to the open part."""

    def closed(self, cut: bool = False) -> list[Body]:
        """Close the open part, if there is one; return its events. `cut`: it was truncated."""
        out = self.ended(cut) if self.part else []
        self.part = None
        return out

    def ended(self, cut: bool) -> list[Body]:
        """Return the closing events of the open part; `cut`: it was truncated."""

    def message(self, a: AnswerStream, usage: Mapping[str, Any]) -> Body:
        """Return the complete answer from its parts."""

    def complete(self, answers: Iterable[AnswerStream], usage: Mapping[str, Any]) -> Body:
        (a,) = answers
        self.chunks(a, a.said)
        return self.message(a, usage)

    def frame(self, value: Body, text: str) -> str:
        return f"event: {value['type']}\n{super().frame(value, text)}"


#: complete characters of a JSON string (no partial escapes)
_CHARACTERS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')


class JsonText:
    """Incrementally decodes the string of a JSON object {"NAME": "string"}."""

    def __init__(self, name: str) -> None:
        self._head = re.compile(r'\{\s*"' + re.escape(name) + r'"\s*:\s*"')
        self._raw, self._inside, self._over = "", False, False

    def feed(self, piece: str) -> str:
        """Add a piece of JSON; return the new decoded text."""
        self._raw += piece
        if not self._inside and (match := self._head.match(self._raw)):
            self._inside, self._raw = True, self._raw[match.end() :]
        if not self._inside or self._over:
            return ""
        end = _CHARACTERS.match(self._raw)
        assert end
        self._raw = self._raw[end.end() :]
        self._over = self._raw.startswith('"')
        return str(json.loads(f'"{end[0]}"', strict=False))

    def remainder(self) -> str:
        """Return the raw JSON if it does not begin an object {"NAME": "..., else ""."""
        return "" if self._inside else self._raw
