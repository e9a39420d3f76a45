"""Output of one answer: reasoning, content and tool calls, parsed while tokens arrive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from g4ir.backends.sampling import Logprobs
from g4ir.chat import Event as Said
from g4ir.chat import Reader, TokenStream, Vocabulary, call_id
from g4ir.chat.reader import Stops
from g4ir.errors import EngineError

from .requests import CANCELLED, FAILED, LENGTH, STOP, Event

#: log-probability of a zero probability, since JSON has no -inf (as OpenAI)
MIN_LOGPROB = -9999.0


class AnswerStream:
    """Output stream of one answer. `take` returns the events that each token completes. Without a
    `reader` all text is content, ended by the strings of `stop` (a reader has its own). `single`:
    the first tool call ends the answer; `silent`: generated tokens are ignored (max_tokens 0).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        reader: Reader | None,
        *,
        index: int = 0,
        stop: Sequence[str] = (),
        single: bool = False,
        silent: bool = False,
    ) -> None:
        self.index, self.vocabulary, self.reader = index, vocabulary, reader
        self.tokens = self.reasoning = 0
        self.finish: str | None = None
        #: whether the answer has ended, possibly before its sequence
        self.over = False
        #: log-probabilities not returned yet: (whether the token is content, its offset in the
        #: text, its entry)
        self.logprobs: list[tuple[bool, int, dict[str, Any]]] = []
        #: all output events so far
        self.said: list[Said] = []
        self._single, self._silent = single, silent
        #: prompt's token ids with their log-probabilities, if requested; None for the first
        self.prompt: list[tuple[int, Logprobs | None]] = []
        self._stream = TokenStream(vocabulary)
        self._stops = Stops(stop)

    def take(self, event: Event) -> list[Said]:
        """Return the output events that a scheduler event completes. Raises the event's error if
        the sequence failed, EngineError if it has none."""
        if self.over:
            return []
        if event.finish == FAILED:
            raise event.error or EngineError("the sequence failed")
        out: list[Said] = []
        asked = event.handle.request
        if not self.prompt and asked.prompt_logprobs is not None:
            self.prompt = [*zip(asked.tokens, event.handle.prompt_logprobs)]
        if event.token is not None and not self._silent:
            self.tokens += 1
            self.reasoning += bool(self.reader and self.reader.thinking)
            spoken = not self.reader or self.reader.speaking
            pieces = self._stream.push(event.token)
            if self.reader:
                out = self._record(self.reader.feed_tokens(pieces))
            else:
                text = "".join(p.text for p in pieces if not p.control)
                out = self._record(_content(self._stops.feed(text)))
            if event.finish != STOP and event.logprobs:
                plain = event.token not in self.vocabulary.strings
                spoken = plain and spoken and (not self.reader or self.reader.speaking)
                entry = self.entry(event.token, event.logprobs)
                self.logprobs.append((spoken, self._stream.start, entry))
        stopped = self.stopped_by is not None
        if event.finish or stopped or self._called_once:
            out += self._end(event.finish or STOP)
        return out

    def entry(self, token: int, read: Logprobs | None) -> dict[str, Any]:
        """Return a token's entry in OpenAI's format, with its log-probability and the most likely
        tokens; both are None without `read` (first token of a prompt)."""
        if read is None:
            return self._entry(token, 0.0) | {"logprob": None, "top_logprobs": None}
        top = [self._entry(other, value) for other, value in read.top]
        return self._entry(token, read.chosen) | {"top_logprobs": top}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        """Return a token's text, log-probability, and bytes, which may be part of a character."""
        tokenizer = self.vocabulary.tokenizer
        if (byte := self.vocabulary.bytes.get(token)) is not None:
            text, raw = tokenizer.id_to_token(token) or "", [byte]
        else:
            text = self.vocabulary.strings.get(token)
            text = text or tokenizer.decode([token], skip_special_tokens=False)
            raw = [*text.encode()]
        logprob = value if math.isfinite(value) else MIN_LOGPROB
        return {"token": text, "logprob": logprob, "bytes": raw}

    def _end(self, finish: str) -> list[Said]:
        """Flush the pending text and set `finish`. After LENGTH or CANCELLED an incomplete call is
        returned as truncated (`arguments` None)."""
        self.over = True
        pieces, reason = self._stream.flush(), LENGTH if finish in (LENGTH, CANCELLED) else STOP
        if not self.reader:
            text = self._stops.feed("".join(p.text for p in pieces)) + self._stops.flush()
            self.finish = STOP if self._stops.hit is not None else reason
            return self._record(_content(text))
        out = [] if self.stopped_by is not None else self.reader.feed_tokens(pieces)
        answer = self.reader.finish(reason)
        self.finish = answer.finish_reason
        return self._record([*out, *answer.events])

    @property
    def _called_once(self) -> bool:
        return self._single and any(map(is_call, self.said))

    def _record(self, new: Iterable[Said]) -> list[Said]:
        out = []
        for event in new:
            if not self._called_once:
                self.said.append(event)
                out.append(event)
        return out

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self.reader.stopped_by if self.reader else self._stops.hit

    def text(self, kind: str) -> str:
        """Return the text of one kind: thought (reasoning) or content."""
        return "".join(s.text for s in self.said if s.kind == kind)

    def message(self) -> dict[str, Any]:
        """Return the answer as a message in OpenAI's format."""
        content, calls = self.text("content"), [as_call(s, s.text) for s in self.said if is_call(s)]
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if thought := self.text("thought"):
            message["reasoning_content"] = thought
        return message

    def history(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message for the conversation's history, without truncated or invalid tool
        calls."""
        pairs = zip(message.get("tool_calls", ()), filter(is_call, self.said))
        calls = [call for call, event in pairs if event.arguments is not None]
        fields = {k: v for k, v in message.items() if k != "tool_calls"}
        return fields | ({"tool_calls": calls} if calls else {"content": fields["content"] or ""})

    def take_logprobs(self, content: bool = False) -> list[dict[str, Any]]:
        """Return and clear the new log-probabilities, of all tokens or of content only."""
        out, self.logprobs = self.logprobs, []
        return [entry for spoken, _, entry in out if spoken or not content]

    def take_offsets(self) -> tuple[list[int], list[dict[str, Any]]]:
        """Return and clear the new tokens' offsets in the text, and their log-probabilities. Tokens
        of a stop string start at the end of the text."""
        out, self.logprobs = self.logprobs, []
        end = len(self.text("content")) if self.over else None
        starts = [start if end is None else min(start, end) for _, start, _ in out]
        return starts, [entry for *_, entry in out]


def is_call(event: Said) -> bool:
    """Whether an event is a tool call."""
    return event.kind == "call"


def _content(text: str) -> list[Said]:
    return [Said("content", text)] if text else []


def as_call(event: Said, arguments: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's format, with a new id."""
    function = {"name": event.name, "arguments": arguments}
    return {"id": call_id(), "type": "function", "function": function}
