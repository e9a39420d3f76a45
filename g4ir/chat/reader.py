"""Parses model output into reasoning, content and tool calls, in pieces of any size.

    reader = Reader(tools, prompt.tail, stop=["\\n\\n"])
    for text in stream:
        for event in reader.feed(text): ...        # event.kind: thought, content, arguments or call
    answer = reader.finish("stop")                  # answer.events: what was held back

A state machine over marked text: the result does not depend on how the stream is cut, and takes
linear time. Text that turns out to be no call is content, with its control tokens spelled out. A
call's arguments are streamed while they are generated; if the remainder turns out to be unparsable,
it is streamed as generated.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from g4ir.errors import InputError

from . import special_tokens as control
from .calls import BROKEN, DONE, WRONG, CallBody, Schemas, begins_head, head_name
from .prompt import Piece
from .tools import lower, read_tools

_CALL, _CALL_END = control.MARKS[control.CALL], control.MARKS[control.CALL_END]
_CHANNEL, _CHANNEL_END = control.MARKS[control.CHANNEL], control.MARKS[control.CHANNEL_END]
_NAME = control.THOUGHT.rstrip("\n")
#: maximum stop strings of a request, and characters of each
MAX_STOPS, LONGEST_STOP = 64, 4096
#: re-parses of an answer after malformed calls; after more, calls are parsed as `plain` (CallBody)
MAX_RETRIES = 16
#: maximum characters of a call's head (`call:NAME{`), and of the space between two calls
LONGEST_HEAD, LONGEST_GAP = 512, 64
#: kind of the events that are pieces of a call's arguments
ARGUMENTS = "arguments"

_WORD = "call:"
_BRACE = re.compile("[{(]")

#: states of the machine: before any text, in content, after CHANNEL, in reasoning, in a call's
#: head, in its arguments, after a call, in or after a malformed call
START, CONTENT, OPENING, THINKING, HEAD, BODY, BEHIND, BAD = range(8)


@dataclass(frozen=True)
class Event:
    """A piece of an answer; `text`: of reasoning (kind `thought`) or content.

    Kind `call`, at the end of call number `index`: `text` is all of its arguments as JSON,
    `arguments` their value, or None for a truncated or unparsable call. If it was `streamed`, it
    follows events of kind `arguments`, whose `text` is the next piece of that JSON; only the first
    of them has the `name`.
    """

    kind: str
    text: str
    name: str | None = None
    arguments: dict[str, Any] | None = None
    index: int | None = None
    streamed: bool = False


@dataclass(frozen=True)
class Answer:
    """A complete answer; `events`: those that `finish` produced. Arguments of a truncated or
    unparsable call are a string."""

    reasoning: str
    content: str
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    events: tuple[Event, ...] = ()


def call_id() -> str:
    """Return a random id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


class Reader:
    """Parser of one answer. `tools`: declarations, for the types of arguments; `prompt_tail`: end
    of the prompt, which may be within reasoning; `stop`: strings that end the content. `calls`
    False: tool calls are content, without control tokens. `thinking` False: `thought` at the start
    without its control token does not begin reasoning. InputError for invalid tools or stops.
    """

    def __init__(
        self,
        tools: Any = None,
        prompt_tail: str = control.TURN + control.MODEL,
        stop: str | Sequence[str] | None = (),
        *,
        calls: bool = True,
        thinking: bool | None = None,
    ) -> None:
        functions = [t["function"] for t in lower(read_tools(tools or None), reading=True)[0]]
        self._schemas: Schemas = {f["name"]: f.get("parameters") or {} for f in functions}
        self._stops, self._lexer = Stops(stop), control.Lexer(prompt_tail)
        self._calls, self._unmarked_reasoning = calls, thinking is not False
        self._state, self._pending, self._opener = START, "", control.CALL
        self._retries = self._sent = 0
        self._texts = defaultdict[str, list[str]](list)  # all text by kind
        self._new: list[Event] = []
        self._read: list[dict[str, Any]] = []
        self._over = False  # whether the last token ended the answer
        self._answer: Answer | None = None
        # Parse the prompt's tail to get the initial state.
        marked = control.Lexer(prompt_tail).feed(prompt_tail)
        at = marked.rfind(_CHANNEL)
        if at >= 0 and not control.MARK.search(marked, at + 1):
            self._take(marked[at:])
        elif marked.endswith(_CHANNEL_END):
            self._state = CONTENT
        self._texts.clear()
        self._new = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer, so that generation can stop."""
        return self._stops.hit is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._stops.hit

    @property
    def thinking(self) -> bool:
        """Whether reasoning is open."""
        return self._state in (OPENING, THINKING)

    @property
    def speaking(self) -> bool:
        """Whether the next text is content, outside of reasoning and of well-formed and malformed
        calls, unless it begins one of these."""
        return self._state in (START, CONTENT)

    def feed(self, text: str) -> list[Event]:
        """Parse text with spelled-out control tokens; return the new events."""
        return self._take(self._lexer.feed(text))

    def feed_tokens(self, pieces: Iterable[Piece]) -> list[Event]:
        """Parse pieces that are flagged as control tokens or text; text that spells a control token
        stays text."""
        marks, clean = control.MARKS, control.replace_surrogates
        marked = [marks.get(p.text, "") if p.control else clean(p.text) for p in pieces]
        return self._take(self._lexer.flush() + "".join(marked))

    def finish(self, reason: str = "stop") -> Answer:
        """Return the answer. `reason`: why generation ended (stop, length, ...). The finish reason
        is `stop` after a stop string or an end token, whatever `reason` is, and `tool_calls`
        instead of `stop` if there are calls."""
        if self._answer is None:
            self._take(self._lexer.flush())
            self._end(reason != "length" or self._over)
            reason = "stop" if self._over or self.stopped else reason
            reason = "tool_calls" if reason == "stop" and self._read else reason
            thought, content = ("".join(self._texts[kind]) for kind in ("thought", "content"))
            self._answer = Answer(thought, content, self._read, reason, (*self._new,))
        return self._answer

    def _take(self, marked: str) -> list[Event]:
        if self._answer is not None:
            raise InputError("this answer is finished: make another Reader for the next")
        self._new = []
        self._run(marked)
        return self._new

    def _run(self, marked: str) -> None:
        """Parse marked text; text of a malformed call is parsed again."""
        waiting = [marked]
        while waiting:
            text, at = waiting.pop(), 0
            while at < len(text) and not self.stopped:
                if self._state == BODY:
                    at, again = self._in_body(text, at)
                    if again:
                        waiting.append(text[at:])
                        text, at = again, 0
                    continue
                match = control.MARK.search(text, at)
                end = match.start() if match else len(text)
                if end > at:
                    self._over = False
                    at = self._text(text, at, end)
                elif match:
                    self._over = match[0] in control.END_MARKS
                    self._mark(match[0])
                    at += 1

    def _end(self, complete: bool) -> None:
        """Flush pending text; `complete` is False if the length limit cut the answer."""
        while self._state == BODY and not self.stopped:
            self._run(self._end_body(complete))
        if self._state == HEAD and not complete and self._opener and begins_head(self._pending):
            self._pending = ""  # a call that was cut before its name was known
        elif self._state == HEAD:
            self._give_up("")
        elif not (self._state == OPENING and self._pending == _NAME):
            self._release()
        if pending := self._stops.flush():
            self._emit(Event("content", pending))

    def _text(self, text: str, at: int, end: int) -> int:
        """Parse text[at:end], which has no control tokens; return the index after the consumed
        text."""
        if self._state == HEAD:
            return self._in_head(text, at, end)
        run, before = self._pending + text[at:end], len(self._pending)
        self._pending = ""
        if self._state == BEHIND:
            return at + self._behind(run) - before
        if self._state in (START, OPENING):
            run = self._unnamed(run)
        if self._state == THINKING and run.endswith("\n"):  # reasoning ends before its last newline
            self._pending, run = "\n", run[:-1]
        self._emit_text("thought" if self._state == THINKING else "content", run)
        return end

    def _unnamed(self, run: str) -> str:
        """Strip the `thought` header that opens reasoning, even if its control token is missing;
        buffer a partial header."""
        opened = self._state == OPENING
        named = opened or self._unmarked_reasoning
        if named and run != control.THOUGHT and control.THOUGHT.startswith(run):
            self._pending = run
            return ""
        thinks = opened or (named and run.startswith(control.THOUGHT))
        self._state = THINKING if thinks else CONTENT
        return run.removeprefix(control.THOUGHT) if thinks else run

    def _behind(self, run: str) -> int:
        """After a call (its end token may be missing), look for another one without a begin token;
        return the number of consumed characters."""
        text = run.lstrip()
        near = len(run) - len(text) <= LONGEST_GAP
        if near and _WORD.startswith(text):
            self._pending = run
        elif near and text.startswith(_WORD):
            self._state, self._opener, self._pending = HEAD, "", _WORD
            return len(run) - len(text) + len(_WORD)
        else:
            self._state = CONTENT
            self._emit_text("content", run)
        return len(run)

    def _mark(self, mark: str) -> None:
        if self._state == HEAD:
            self._give_up(mark)
        elif self._state == BAD and mark not in (_CALL, _CHANNEL, *control.END_MARKS):
            self._emit_text("content", control.spelled(mark))
            self._state = CONTENT if mark == _CALL_END else BAD
        elif mark == _CHANNEL:
            self._release()
            self._state = OPENING
        elif mark == _CALL and self._calls:
            self._close()
            self._state, self._opener = HEAD, control.CALL
        elif mark in (_CHANNEL_END, _CALL_END, *control.END_MARKS):
            self._close(mark)

    def _close(self, mark: str = _CALL) -> None:
        """Leave the state that a control token ends, such as reasoning, for CONTENT. A token that
        does not end the state is ignored."""
        state, named = self._state, self._pending == _NAME
        if mark == {OPENING: _CALL_END, THINKING: _CALL_END, BEHIND: _CHANNEL_END}.get(state):
            return
        if state == START and mark != _CALL and not (mark == _CHANNEL_END and named):
            return
        # The newline before the end token, or a header without its newline, is not reasoning.
        opened = state == OPENING and not named
        if opened or state == BEHIND or (state == START and mark == _CALL):
            self._release()
        self._state, self._pending = CONTENT, ""

    def _release(self) -> None:
        """Emit pending text as reasoning or content, by the current state; white space after a call
        is dropped."""
        pending, self._pending = self._pending, ""
        if self._state != BEHIND or pending.strip():
            self._emit_text("thought" if self._state in (OPENING, THINKING) else "content", pending)

    def _in_head(self, text: str, at: int, end: int) -> int:
        """Parse a call's name up to its opening brace; return the index after the consumed text."""
        match = _BRACE.search(text, at, end)
        stop = match.end() if match else end
        self._pending += text[at:stop]
        name = head_name(self._pending) if match else None
        if len(self._pending) > LONGEST_HEAD or (match and name is None):
            self._give_up("")
            self._state = BAD
        elif name is not None:
            schema = self._schemas.get(name, {})
            self._body = CallBody(self._pending, name, schema, self._retries > MAX_RETRIES)
            self._state, self._pending, self._sent = BODY, "", 0
        return stop

    def _give_up(self, mark: str) -> None:
        """Emit the head of a malformed call as content and resume after it."""
        pending, self._pending = self._pending, ""
        if pending.strip():
            self._emit_text("content", self._opener + pending)
        self._state = BAD if pending.strip() else CONTENT
        if mark == _CALL:
            self._state, self._opener = HEAD, control.CALL
        elif mark:
            self._mark(mark)

    def _in_body(self, text: str, at: int) -> tuple[int, str]:
        """Parse a call's arguments. Return the index after the consumed text, and text to parse
        again before the rest ("": none)."""
        end, ended = self._body.scan(text, at)
        if ended == BROKEN:
            return end, self._end_body()
        if ended == DONE:
            self._end_call(self._body.json, valid=True)
        elif ended == WRONG:
            self._give_content(self._body.raw)
        elif self._body.streams:
            self._send(self._body.new_json())
        return end, ""

    def _end_body(self, complete: bool = True) -> str:
        """End a call without an end token; `complete` False: the length limit cut it. Return the
        text to parse again: from the control token on, if one in its open string ended the call
        (`CallBody.end`); else ""."""
        body, raw = self._body, self._body.raw
        end = body.end
        if body.close():
            self._end_call(body.json, valid=True)
        elif not complete:
            end = len(raw)
            self._end_call(body.cut_off())
        elif body.streams:
            self._end_call(body.as_written(raw[:end]))
        else:
            self._give_content(raw[:end])
        self._retries += end < len(raw)
        return raw[end:]

    def _give_content(self, raw: str) -> None:
        """Emit an unparsable call as content, with its control tokens spelled out."""
        self._emit_text("content", self._opener + control.spelled(raw))
        self._state = BAD

    def _end_call(self, text: str, valid: bool = False) -> None:
        """Emit the rest of a call; `text` is all of its arguments, `valid` if they are JSON."""
        arguments = json.loads(text) if valid else None
        if self._sent:
            self._send(text[self._sent :])
        name, index = self._body.name, len(self._read)
        self._read.append({"name": name, "arguments": text if arguments is None else arguments})
        self._emit(Event("call", text, name, arguments, index, self._sent > 0))
        self._state = BEHIND

    def _send(self, piece: str) -> None:
        if piece:
            name = None if self._sent else self._body.name
            self._emit(Event(ARGUMENTS, piece, name, None, len(self._read)))
            self._sent += len(piece)

    def _emit_text(self, kind: str, text: str) -> None:
        if text := self._stops.feed(text) if kind == "content" else text:
            self._emit(Event(kind, text))

    def _emit(self, event: Event) -> None:
        """Append an event; any but content first flushes text that may begin a stop string."""
        pending = "" if event.kind == "content" else self._stops.flush()
        for new in (Event("content", pending), event) if pending else (event,):
            self._new.append(new)
            self._texts[new.kind].append(new.text)


class Stops:
    """Matches stop strings incrementally; the first complete one ends the content, ties go to the
    longest."""

    def __init__(self, stop: str | Sequence[str] | None) -> None:
        strings = [stop] if isinstance(stop, str) else [*(stop or ())]
        if len(strings) > MAX_STOPS:
            raise InputError(f"stop: at most {MAX_STOPS} strings, found {len(strings)}")
        for i, text in enumerate(strings):
            if not isinstance(text, str) or not 0 < len(text) <= LONGEST_STOP:
                raise InputError(f"stop[{i}]: must be a text of 1 to {LONGEST_STOP} characters")
        #: string -> length of its prefix that the text ends with
        self._matched = dict.fromkeys(strings, 0)
        self._pending = ""
        #: the stop string that matched
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Append text of the content; return what cannot be part of a stop string, up to the stop
        string if there is one."""
        if not self._matched or self.hit is not None:
            return text if self.hit is None else ""
        text, start, ends = self._pending + text, len(self._pending), []
        for stop, matched in self._matched.items():
            at = start - matched  # earlier text cannot be part of it
            if (position := text.find(stop, at)) >= 0:
                ends.append((position + len(stop), -len(stop)))
                continue
            at = max(at, len(text) - len(stop) + 1)
            while not stop.startswith(text[at:]):
                at += 1
            self._matched[stop] = len(text) - at
        if ends:
            end, length = min(ends)
            self.hit, self._pending = text[end + length : end], ""
            return text[: end + length]
        certain = len(text) - max(self._matched.values())
        self._pending = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return the buffered text, which may begin a stop string; called at the end of the content
        and before an event of another kind."""
        pending, self._pending = self._pending, ""
        self._matched = dict.fromkeys(self._matched, 0)
        return pending
