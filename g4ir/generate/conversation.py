"""A conversation with an engine: messages, tools, settings, and the next answer.

    with ChatSession(engine) as talk:
        talk.attach("image", "photo.png")
        turn = talk.say("What is this?", callback) # callback(event) gets each piece of the answer

Each answer is a request to a scheduler with a prefix cache, so only the new part of the next prompt
is computed. A conversation may fill the engine's --max-seq; nothing is dropped to make room.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from g4ir.backends.sampling import LogitsMask, SamplingParams
from g4ir.chat import Event as Said
from g4ir.chat import Prompt, Reader, ReasoningBudget, make_prompt
from g4ir.chat.messages import an_object, check_pairs, decoded, media_of, read_messages
from g4ir.chat.prompt import with_media
from g4ir.chat.template import open_chat
from g4ir.chat.text_files import read_text
from g4ir.chat.tools import lower, read_tools
from g4ir.engine.engine import Engine
from g4ir.engine.multimodal import read_local
from g4ir.engine.output import AnswerStream
from g4ir.engine.prompts import sampling_params
from g4ir.engine.requests import CANCELLED, Counts, Request, RequestHandle, check_minimums
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.speculative import AcceptanceStats
from g4ir.errors import InputError, RankError
from g4ir.media.prompt import expansion
from g4ir.media.soft import Soft
from g4ir.model.media import check_file
from g4ir.ui.files import write_file

from .jsonl import INTEGER, SETTINGS, named

#: finish reason of an answer that `stop` ended
INTERRUPTED = "interrupted"
#: tool result sent to the model for calls without results
NOT_RUN = "the call was not run"
OnEvent = Callable[[Said], None]


@dataclass(frozen=True)
class Turn:
    """An answer: `message` in OpenAI's format, why it ended, token counts and times."""

    message: dict[str, Any]
    finish_reason: str
    counts: Counts
    thought_tokens: int
    #: whether it ended because the context was full
    full: bool = False
    #: acceptance stats of speculative decoding, if it was on
    tally: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def nothing(self) -> bool:
        """Whether the answer was interrupted before its first token."""
        return self.finish_reason == INTERRUPTED and not self.counts.generated

    @property
    def content(self) -> str:
        return self.message["content"] or ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls, in OpenAI's format."""
        return list(self.message.get("tool_calls", ()))

    def output(self) -> dict[str, Any]:
        """Return the answer as JSON values: text, tool calls, finish reason, token counts and
        times."""
        return {
            "reasoning": self.message.get("reasoning_content", ""),
            "content": self.content,
            "tool_calls": self.calls,
            "finish_reason": self.finish_reason,
            "reasoning_tokens": self.thought_tokens,
            **self.counts.output(),
            **({"drafts": self.tally.to_dict()} if self.tally.rounds else {}),
        }


@dataclass
class Thinking:
    """Whether reasoning is on, and its token budget (None: unlimited)."""

    on: bool = False
    budget: int | None = None


class ChatSession:
    """One conversation. Not thread-safe, except for `stop`, which signal handlers may call too."""

    def __init__(self, engine: Engine, config: SchedulerConfig | None = None) -> None:
        self.engine, self.defaults = engine, engine.defaults()
        tokenizer = engine.text_tokenizer()
        how = tokenizer, engine.spec.chat, engine.label
        self.template, self.vocabulary = open_chat(engine.path, *how)
        self.messages: list[dict[str, Any]] = []
        #: parts of the next message
        self.attached: list[dict[str, Any]] = []
        self.tools: list[Any] | None = None
        self.thinking = Thinking()
        self.settings: dict[str, int | float] = {}
        #: additional stop ids
        self.stop_ids: frozenset[int] = frozenset()
        #: number of tokens of the last answer and its prompt; 0 before the first answer
        self.held = 0
        #: False once closed or after a rank has failed
        self.alive = True
        self._scheduler = Scheduler(engine, config)
        #: id() of a message part -> (the part, which keeps that id in use, its soft tokens)
        self._soft: dict[int, tuple[Any, Soft]] = {}
        self._handle: RequestHandle | None = None
        self._stopped = False

    def __enter__(self) -> ChatSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the KV caches."""
        self.alive = False
        self._scheduler.close()

    def set_system(self, text: str) -> None:
        """Set the system prompt; an empty text removes it."""
        messages = self.messages[1:] if self.system is not None else self.messages
        self.messages = [*([{"role": "system", "content": text}] if text else []), *messages]

    @property
    def system(self) -> str | None:
        """The system prompt, or None."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") in ("system", "developer") else None

    def attach(self, kind: str, path: str | Path, **options: Any) -> Soft:
        """Read an image, audio or a video for the next message; `options`: keywords of
        `Engine.encode`. InputError for a missing file, one of another kind, or a kind that the
        engine does not take."""
        check_file(kind, path)
        soft = self.engine.encode(kind, path, **options)
        part = {"type": f"{kind}_url", f"{kind}_url": {"url": Path(path).absolute().as_uri()}}
        self._soft[id(part)] = part, soft
        self.attached.append(part)
        return soft

    def attach_text(self, path: str | Path) -> int:
        """Prepend a text file, in a code block with its name, to the next message; return its token
        count. InputError for a file that is missing, not UTF-8 or too long."""
        check_file("text", path)
        path, max_seq = Path(path), self.engine.limits.max_seq
        min_characters = path.stat().st_size // 4  # a character has at most 4 bytes
        self.vocabulary.check_length(min_characters, max_seq, str(path))
        text = "".join(read_text(path))
        fence = "`" * max((3, *(len(run) + 1 for run in re.findall("`+", text))))
        part = {"type": "text", "text": f"{path.name}\n{fence}\n{text}\n{fence}\n\n"}
        tokens = self.vocabulary.plain(part["text"])
        if len(tokens) > max_seq:
            why = f"{len(tokens)} tokens do not fit the context of {max_seq}; shorten it"
            raise InputError(f"{path}: {why}")
        self.attached.append(part)
        return len(tokens)

    def set_tools(self, tools: Any) -> tuple[str, ...]:
        """Set tools in OpenAI's format, or None; return the schema parts that the prompt format
        drops. InputError, without a change, if they are invalid or the template has no tools."""
        lost = () if tools is None else lower(read_tools(tools))[1]
        self._check_template(tools, self.thinking.on)
        self.tools = tools
        return lost

    def set_thinking(self, on: bool, budget: int | None = None) -> None:
        """Turn reasoning on or off, with a token budget. InputError, without a change, if the
        template refuses it."""
        self._check_template(self.tools, on)
        self.thinking = Thinking(on, budget)

    def _check_template(self, tools: list[Any] | None, thinking: bool) -> None:
        """Raise InputError if the template refuses these settings with any message."""
        if tools or thinking:
            message = {"role": "user", "content": "?"}
            make_prompt([message], tools, self.template, enable_thinking=thinking)

    def set(self, name: str, text: str) -> None:
        """Set a setting (a key of SETTINGS) from text; `default` removes it, so that the
        checkpoint's value applies. InputError for an unknown name or an invalid value."""
        if (kind := SETTINGS.get(name)) is None:
            raise InputError(f"setting {name!r}: expected one of {', '.join(SETTINGS)}")
        try:
            value = None if text == "default" else (int if kind is INTEGER else float)(text)
        except ValueError:
            raise InputError(f"{name} {text!r}: expected {kind[1]}, or default") from None
        self.choose({name: value})

    def choose(self, settings: Mapping[str, int | float | None]) -> None:
        """Set settings by name; None removes one, so that the checkpoint's value applies.
        InputError, without a change, if one is invalid."""
        values = {k: v for k, v in {**self.settings, **settings}.items() if v is not None}
        check_minimums(values, max_new_tokens=1)
        self._sampling(values)
        self.settings = values

    def clear(self) -> None:
        """Delete all messages and attachments; the system prompt, tools and settings stay."""
        self.messages = self.messages[:1] if self.system is not None else []
        self.attached, self._soft, self.held = [], {}, 0

    def save(self, path: str | Path) -> None:
        """Write messages and tools as JSON, as in the body of an OpenAI chat request. InputError
        for a lone surrogate."""
        value = {"messages": self.messages, **({"tools": self.tools} if self.tools else {})}
        text = json.dumps(value, ensure_ascii=False, indent=1)
        try:
            write_file(Path(path), [f"{text}\n".encode()])
        except UnicodeEncodeError:
            problem = "a message has a lone surrogate, which UTF-8 cannot encode"
            raise InputError(f"{path}: {problem}") from None

    def load(self, path: str | Path) -> None:
        """Load a conversation from a file of `save`, or a JSON list of messages; read its media.
        InputError, without a change, if anything is invalid."""
        with named(str(Path(path))):
            value = decoded("".join(read_text(Path(path))), str(Path(path)))
            conversation: dict[str, Any] = {"messages": value}
            if not isinstance(value, list):
                conversation = an_object(value, "the file")
            if unknown := conversation.keys() - {"messages", "tools"}:
                has = "a conversation has messages and tools"
                raise InputError(f"{min(unknown)}: unknown key; {has}")
            messages: Any = conversation.get("messages")
            tools = conversation.get("tools")
            read = read_messages(messages)
            if read:
                check_pairs(read, may_wait=True)
            read_tools(tools)
            soft = {id(m.part): (m.part, read_local(self.engine, m)) for m in media_of(read)}
        self.messages, self.tools, self._soft = messages, tools, soft
        self.attached, self.held = [], 0

    @property
    def open_calls(self) -> list[dict[str, Any]]:
        """The tool calls of the last answer that have no result yet."""
        return check_pairs(self.messages, may_wait=True) if self.messages else []

    def answer_call(self, text: str) -> None:
        """Set the result of the first open call: JSON or any text. InputError if none is open."""
        if not self.open_calls:
            raise InputError("no tool call waits for a result")
        self.messages.append(_call_answer(self.open_calls[0], text))

    def leave_calls(self) -> None:
        """Set the result of all open tool calls to NOT_RUN."""
        self.messages += [_call_answer(c, NOT_RUN) for c in self.open_calls]

    def say(self, text: str, on_event: OnEvent = lambda event: None) -> Turn:
        """Send a message with the attachments, and return the answer. If it fails, or is stopped
        before its first token, the conversation is unchanged."""
        attached = self.attached
        message = {"role": "user", "content": with_media(text, attached)}
        turn = self._asked([*self.messages, message], on_event)
        self.attached = attached if turn.nothing else []
        return turn

    def retry(self, on_event: OnEvent = lambda event: None) -> Turn:
        """Answer the last user message again; the answer replaces all that followed it. If it fails
        or is stopped before its first token, the conversation is unchanged. InputError without a
        user message."""
        return self._asked(self.messages[: self._last_message() + 1], on_event)

    def undo(self) -> None:
        """Remove the last user message and everything after it. InputError if there is none."""
        self.messages = self.messages[: self._last_message()]

    def _last_message(self) -> int:
        indices = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not indices:
            raise InputError("there is no user message yet")
        return indices[-1]

    def _asked(self, messages: list[dict[str, Any]], on_event: OnEvent) -> Turn:
        before, self.messages = self.messages, messages
        turn: Turn | None = None
        try:
            turn = self.reply(on_event)
        finally:
            if turn is None or turn.nothing:
                self.messages = before
        return turn

    def reply(self, on_event: OnEvent = lambda piece: None) -> Turn:
        """Generate the answer to the current messages and append it; `on_event` gets its pieces.
        InputError if the messages are too long or cannot be answered."""
        self._stopped = False
        request, prompt = self._request()
        reader = Reader(self.tools, prompt.tail, calls=bool(self.tools), thinking=self.thinking.on)
        answer = AnswerStream(self.vocabulary, reader)
        self._handle = handle = self._scheduler.submit(request)
        if self._stopped:
            handle.cancel()
        try:
            for event in self._scheduler.run(handle):
                for piece in answer.take(event):
                    on_event(piece)
        except BaseException as e:
            self.alive = self.alive and not isinstance(e, RankError)
            if not isinstance(e, Exception):  # KeyboardInterrupt: a step may be incomplete
                self._scheduler.close()
            raise
        finally:
            self._handle = None
        return self._add_answer(answer, handle)

    def stop(self) -> None:
        """End the current answer. Thread-safe; signal handlers may call it."""
        self._stopped = True
        if handle := self._handle:
            handle.cancel()

    def _add_answer(self, answer: AnswerStream, handle: RequestHandle) -> Turn:
        """Append an answer to the conversation, without truncated or invalid tool calls, and
        return it; one that was cancelled before its first token is not appended. After a cancelled
        answer its tool calls are answered with NOT_RUN."""
        counts, message = handle.counts, answer.message()
        cancelled, reason = handle.state == CANCELLED, answer.finish or ""
        self.held = counts.prompt + counts.generated
        if counts.generated or not cancelled:
            self.messages.append(answer.history(message))
        if cancelled:
            self.leave_calls()
            reason = INTERRUPTED
        full = reason == "length" and self.held > self.engine.limits.max_seq
        return Turn(message, reason, counts, answer.reasoning, full, handle.tally)

    def _request(self) -> tuple[Request, Prompt]:
        prompt = make_prompt(
            self.messages, self.tools, self.template, enable_thinking=self.thinking.on
        )
        for m in prompt.media:  # each is read once
            if id(m.part) not in self._soft:
                self._soft[id(m.part)] = m.part, read_local(self.engine, m)
        soft = [self._soft[id(m.part)][1] for m in prompt.media]
        special, max_seq = self.engine.spec.tokens, self.engine.limits.max_seq
        tokens = self.vocabulary.encode(prompt, [[*expansion(s, special)] for s in soft])
        remaining = max_seq + 1 - len(tokens)  # the last one is never in the KV cache
        if remaining < 1:
            raise InputError(
                f"the context is full: the prompt has {len(tokens)} tokens, of at most {max_seq}; "
                f"nothing was dropped: start a new conversation, shorten the message, or build "
                f"with a larger --max-seq"
            )
        count = min(int(self.settings.get("max_new_tokens", remaining)), remaining)
        marks = self.vocabulary.marks(tokens, self.system is not None)
        sampling = self._sampling(self.settings, prompt)
        return Request(tuple(tokens), count, sampling, tuple(soft), marks=marks), prompt

    def _sampling(
        self, settings: Mapping[str, int | float], prompt: Prompt | None = None
    ) -> SamplingParams:
        values: dict[str, Any] = {k: v for k, v in settings.items() if k != "max_new_tokens"}
        values["stop"] = self.vocabulary.ends | self.stop_ids
        if prompt and self.thinking.budget is not None:
            inside = Reader(prompt_tail=prompt.tail).thinking
            budget = ReasoningBudget(self.vocabulary, self.thinking.budget, inside)
            values["allowed"] = Bounded(budget, self.engine.spec.text.vocab_size)
        return sampling_params(self.defaults, values)


class Bounded:
    """Logits mask that ends reasoning after its token budget. While the budget forces no token, the
    mask is that of `inner`. `size`: of the vocabulary."""

    def __init__(self, budget: ReasoningBudget, size: int, inner: LogitsMask | None = None) -> None:
        self.budget, self.size, self.inner = budget, size, inner
        #: number of generated tokens counted so far
        self._seen = 0

    def __copy__(self) -> Bounded:
        return Bounded(copy(self.budget), self.size, copy(self.inner))

    def mask(self, generated: Sequence[int]) -> Any:
        """Return the mask of allowed tokens, bool [size], or what `inner` returns; None: all."""
        for token in generated[self._seen :]:
            self.budget.push(token)
        self._seen = len(generated)
        if (forced := self.budget.forced()) is None:
            return self.inner.mask(generated) if self.inner else None
        return np.arange(self.size) == forced


def _call_answer(call: Mapping[str, Any], text: str) -> dict[str, Any]:
    named = {"tool_call_id": call["id"]} if call.get("id") is not None else {}
    return {"role": "tool", **named, "name": call["function"]["name"], "content": text}
