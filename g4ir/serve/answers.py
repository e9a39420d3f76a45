"""Reads the events of one answer and says them in OpenAI's form, whole or in pieces."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from g4ir.chat import Event as Said
from g4ir.chat import TokenStream, Vocabulary, call_id
from g4ir.chat.reader import Stops
from g4ir.engine.slots import FAILED, LENGTH, STOP, Event
from g4ir.engine.stream import is_byte
from g4ir.errors import EngineError

from .prompts import Asked

#: what is said of a probability of nought, which JSON has no number for
LEAST = -9999.0


def token_text(vocabulary: Vocabulary, token: int) -> tuple[str, list[int]]:
    """Return the text of one token and its bytes, which may be part of a character."""
    word = vocabulary.tokenizer.id_to_token(token) or ""
    if is_byte(vocabulary.tokenizer, token):
        return word, [int(word[3:5], 16)]
    text = vocabulary.strings.get(token) or vocabulary.tokenizer.decode(
        [token], skip_special_tokens=False
    )
    return text, [*text.encode()]


class Answer:
    """One answer while it comes. `take` returns what is certain with each token."""

    def __init__(self, asked: Asked, vocabulary: Vocabulary, index: int) -> None:
        self.index, self.vocabulary = index, vocabulary
        self.reader = asked.reader()
        self.tokens = self.reasoning = 0
        self.finish: str | None = None
        #: whether it has ended before its row did
        self.over = False
        #: log-probabilities that no piece has carried yet
        self.logprobs: list[dict[str, Any]] = []
        self.said: list[Said] = []
        #: characters of text that log-probabilities were told of
        self.offset = 0
        self._single = asked.fields.get("parallel_tool_calls") is False
        self._stream = TokenStream(vocabulary)
        self._stops = Stops(asked.fields.get("stop", ()))

    def take(self, event: Event) -> list[Said]:
        """Return the pieces that an event completes. EngineError where the row failed."""
        if self.over:
            return []
        if event.finish == FAILED:
            raise event.error or EngineError("a row failed")
        out: list[Said] = []
        if event.token is not None:
            self.tokens += 1
            self.reasoning += bool(self.reader and self.reader.thinking)
            if event.finish != STOP:
                self._note(event)
            out = self._read(event.token, event.finish == STOP)
        if event.finish or self._stopped or (self._single and any(map(_is_call, self.said))):
            out += self._end(event.finish or STOP)
        return out

    @property
    def _stopped(self) -> bool:
        return self.reader.stopped if self.reader else self._stops.hit

    def _note(self, event: Event) -> None:
        read = event.logprobs
        if read is None or event.token is None:
            return
        entry = self._entry(event.token, read.chosen)
        top = [self._entry(token, value) for token, value in read.top]
        self.logprobs.append(entry | {"top_logprobs": top})

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text, raw = token_text(self.vocabulary, token)
        return {"token": text, "logprob": value if math.isfinite(value) else LEAST, "bytes": raw}

    def _read(self, token: int, ends: bool) -> list[Said]:
        pieces = self._stream.push(token)
        if self.reader:
            return self._kept(self.reader.feed_tokens(pieces))
        text = "".join(p.text for p in pieces if not p.control)
        return self._kept(_content(self._stops.feed(text)))

    def _end(self, finish: str) -> list[Said]:
        """Give out what was held back."""
        self.over = True
        rest, reason = self._stream.rest(), LENGTH if finish == LENGTH else STOP
        if not self.reader:
            text = self._stops.feed("".join(p.text for p in rest)) + self._stops.rest()
            self.finish = STOP if self._stops.hit else reason
            return self._kept(_content(text))
        out = [] if self.reader.stopped else self.reader.feed_tokens(rest)
        answer = self.reader.finish(reason)
        self.finish = answer.finish_reason
        return self._kept([*out, *answer.events])

    def _kept(self, new: Iterable[Said]) -> list[Said]:
        out = []
        for said in new:
            if not (self._single and any(map(_is_call, self.said))):
                self.said.append(said)
                out.append(said)
        return out

    def text(self, kind: str) -> str:
        """Return what was said of one kind: thought or content."""
        return "".join(s.text for s in self.said if s.kind == kind)

    def taken_logprobs(self) -> list[dict[str, Any]]:
        """Return the log-probabilities that are new."""
        out, self.logprobs = self.logprobs, []
        return out


def _is_call(said: Said) -> bool:
    return said.kind == "call"


def _content(text: str) -> list[Said]:
    return [Said("content", text)] if text else []


@dataclass
class Form:
    """The words of one answer to a request: chats and completions differ in them."""

    asked: Asked
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        return self.asked.prompt is not None

    def _head(self, chunk: bool) -> dict[str, Any]:
        prefix, name = (
            ("chatcmpl-", "chat.completion") if self.chat else ("cmpl-", "text_completion")
        )
        return {
            "id": f"{prefix}{self.id}",
            "object": f"{name}.chunk" if chunk and self.chat else name,
            "created": self.created,
            "model": self.model,
        }

    def whole(self, answers: Iterable[Answer], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request that asked for no stream."""
        choices = [self._choice(a) for a in answers]
        return self._head(False) | {"choices": choices, "usage": usage}

    def _choice(self, a: Answer) -> dict[str, Any]:
        out = {"index": a.index, "finish_reason": a.finish, "logprobs": self._logprobs(a)}
        if not self.chat:
            return out | {"text": a.text("content")}
        calls = [_call(s) for s in a.said if _is_call(s)]
        content = a.text("content")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if thought := a.text("thought"):
            message["reasoning_content"] = thought
        return out | {"message": message}

    def _logprobs(self, a: Answer) -> dict[str, Any] | None:
        given = self.asked.fields.get("logprobs")
        if given is None or given is False:
            return None
        entries = a.taken_logprobs()
        if self.chat:
            return {"content": entries}
        offset, offsets = a.offset, []
        for e in entries:
            offsets.append(offset)
            offset += len(e["token"])
        a.offset = offset
        return {
            "tokens": [e["token"] for e in entries],
            "token_logprobs": [e["logprob"] for e in entries],
            "top_logprobs": [
                {t["token"]: t["logprob"] for t in e["top_logprobs"]} for e in entries
            ],
            "text_offset": offsets,
        }

    # --- streams ------------------------------------------------------------------------------

    def first(self, count: int) -> list[dict[str, Any]]:
        """Return the chunks before the first token: who speaks."""
        if not self.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(i, {"delta": delta}, None) for i in range(count)]

    def chunks(self, a: Answer, new: Iterable[Said]) -> list[dict[str, Any]]:
        """Return the chunks of new pieces, and the last one where the answer is over."""
        out = []
        part: dict[str, Any]
        for said in new:
            part = {"delta": _delta(said)} if self.chat else {"text": said.text}
            out.append(self._chunk(a.index, part, self._logprobs(a)))
        if a.over:
            part = {"delta": {}} if self.chat else {"text": ""}
            rest = self._logprobs(a) if a.logprobs else None
            out.append(self._chunk(a.index, part, rest, a.finish))
        return out

    def _chunk(
        self, index: int, part: Mapping[str, Any], logprobs: Any, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self.asked.fields.get("stream_options") else {}
        return self._head(True) | {"choices": [choice]} | usage

    def last(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chunk of the usage."""
        return self._head(True) | {"choices": [], "usage": usage}


def _call(said: Said) -> dict[str, Any]:
    function = {"name": said.name, "arguments": said.text}
    return {"id": call_id(), "type": "function", "function": function}


def _delta(said: Said) -> dict[str, Any]:
    if _is_call(said):
        return {"tool_calls": [{"index": said.index, **_call(said)}]}
    return {"reasoning_content" if said.kind == "thought" else "content": said.text}


def usage_of(prompt: int, cached: int, answers: Iterable[Answer]) -> dict[str, Any]:
    """Return how many tokens a request took."""
    made = [*answers]
    new = sum(a.tokens for a in made)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(a.reasoning for a in made)},
    }
