"""Shared by the verbs that generate: flags of sampling and of a conversation, and the output of
answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError
from g4ir.generate.jsonl import named
from g4ir.ui import console

from .common import Draft, OnDisk
from .verb import Part, flag

if TYPE_CHECKING:
    from g4ir.chat import Event
    from g4ir.engine.engine import Engine
    from g4ir.engine.requests import Counts
    from g4ir.engine.speculative import AcceptanceStats
    from g4ir.generate.conversation import ChatSession, Turn

#: ANSI codes: dim text, and reset
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Talk(Part, title="conversation"):
    """Flags of a conversation."""

    system: str | None = flag("system prompt", None, "TEXT")
    tools: str | None = flag("JSON file of tool definitions in OpenAI's format", None, "FILE")
    think: bool = flag("enable reasoning before the answer", False)
    think_budget: int | None = flag("with --think: maximum reasoning tokens", None, "N")

    def __post_init__(self) -> None:
        if self.think_budget is not None and not self.think:
            raise InputError("--think-budget is for --think, which is not given")
        if (self.think_budget or 0) < 0:
            raise InputError(f"--think-budget {self.think_budget}: expected 0 or more tokens")


class Sampling(Part, title="sampling"):
    """Flags of sampling."""

    max_new_tokens: int | None = flag("maximum tokens to generate", None, "N")
    temperature: float | None = flag("sampling temperature; 0: greedy", None, "T")
    top_k: int | None = flag("sample from the K most likely tokens; 0 or -1: all", None, "K")
    top_p: float | None = flag("nucleus sampling: cumulative probability to keep", None, "P")
    seed: int | None = flag("sampling seed (default: random)", None, "N")

    def settings(self) -> dict[str, Any]:
        """Return field -> value; None: the flag was not given."""
        return {k: v for k, v in vars(self).items() if k != "explicit"}


@contextmanager
def open_chat(
    engine: Engine, draft: Draft, disk: OnDisk, talk: Talk, sampling: Sampling
) -> Iterator[ChatSession]:
    """Context with a new conversation that has the flags' settings; closes it at the end."""
    from g4ir.engine.scheduler import SchedulerConfig
    from g4ir.generate.conversation import ChatSession

    config = SchedulerConfig(prefix_disk=disk.prefix_disk, **draft.scheduler())
    with closing(ChatSession(engine, config)) as session:
        if session.template.note:
            console.say(f"note: {session.template.note}")
        session.set_system(talk.system or "")
        if talk.tools:
            declare(session, talk.tools)
        session.set_thinking(talk.think, talk.think_budget)
        session.choose(sampling.settings())
        yield session


def declare(talk: ChatSession, path: str) -> None:
    """Declare the tools of a file; warn about schema keywords that the prompt format drops."""
    from g4ir.chat.messages import decoded
    from g4ir.chat.text_files import read_text

    path = str(Path(path))
    with named(path):
        tools = decoded("".join(read_text(Path(path))), path)
        for note in talk.set_tools(tools):
            console.say(f"note: {path}: {note}")


class Screen:
    """Prints answers while they are generated: content, and calls as lines of JSON; on a terminal
    also reasoning, dimmed."""

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal
        self._kind = ""
        self._at_start = True

    def __call__(self, event: Event) -> None:
        """Show a piece of an answer; output of another kind begins on a new line."""
        kind, text = event.kind, event.text
        if kind not in (("content", "call", "thought") if self.terminal else ("content", "call")):
            return
        if kind == "call":
            arguments = text if event.arguments is None else event.arguments
            call = {"name": event.name, "arguments": arguments}
            text = json.dumps(call, ensure_ascii=not self.terminal) + "\n"
        if kind != self._kind:
            self._line()
            self._kind = kind
            print(DIM if kind == "thought" else "", end="")
        self._print(text)

    def _line(self) -> None:
        if self._kind == "thought":
            print(PLAIN, end="")
        if not self._at_start:
            self._print("\n")

    def _print(self, text: str) -> None:
        if self.terminal:
            text = "".join(map(_harmless, text))
        print(text, end="", flush=True)
        self._at_start = text.endswith("\n") if text else self._at_start

    def end(self) -> None:
        """End an answer: reset colours, and begin a new line if needed."""
        self._line()
        self._kind, self._at_start = "", True
        sys.stdout.flush()


def _harmless(c: str) -> str:
    """Return a character, with control characters escaped for the terminal."""
    return c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else f"\\x{ord(c):02x}"


def chat_summary(turn: Turn, talk: ChatSession) -> str:
    """Return `answer_summary`, and the tokens of the conversation in the KV cache."""
    max_seq = talk.engine.limits.max_seq
    summary = answer_summary(turn.counts, turn.tally, turn.finish_reason)
    return f"{summary}; context: {min(talk.held, max_seq)} of {max_seq} tokens"


def answer_summary(c: Counts, tally: AcceptanceStats | None, reason: str | None) -> str:
    """Return an answer's summary line: prompt tokens (cached: from the prefix cache), new tokens,
    TTFT, tokens/s, tokens per step if drafts were on, finish reason."""
    cached = f" ({c.cached} cached)" if c.cached else ""
    first = "" if c.first_token_s is None else f"; first after {c.first_token_s:.3f} s"
    speed = f", then {c.tokens_per_second:.1f} tokens/s" if c.tokens_per_second else ""
    drafted: Any = tally.to_dict() if tally and tally.rounds else {}
    rounds = f"; {drafted['tokens_per_round']:.2f} tokens per step" if drafted else ""
    end = "; interrupted" if reason == "interrupted" else f"; ended by {reason}"
    return f"{c.prompt} prompt tokens{cached}, {c.generated} new ones{first}{speed}{rounds}{end}"
