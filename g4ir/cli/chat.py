"""`g4ir chat`: a conversation with an engine."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import G4Error, InputError
from g4ir.model.media import KINDS
from g4ir.spec.reader import did_you_mean
from g4ir.ui import console
from g4ir.ui.files import read_table

from . import talking
from .common import Draft, Load, OnDisk, OnEngine, emit, folder_drafts
from .verb import json_flag

if TYPE_CHECKING:
    from g4ir.generate.conversation import ChatSession, Turn

PROMPT, MORE = ">>> ", "... "
#: delimiter of a message of several lines, also after a command
QUOTES = '"""'
TABLE = read_table(Path(__file__).with_suffix(".yaml"))
#: command -> arguments (in brackets: optional) and help. It calls the method of Repl of its name,
#: or `attach` if it names a kind of media.
COMMANDS: dict[str, list[str]] = TABLE["commands"]
_BLOCK = re.compile(rf"\s*(/\w+\s+)?{QUOTES}")


class Chat(OnEngine):
    """Chat with an engine at a terminal, or read messages from a pipe."""

    json: bool = json_flag()
    load: Load
    talk: talking.Talk
    sampling: talking.Sampling
    draft: Draft
    disk: OnDisk

    def __call__(self) -> int:
        if sys.stdin is None:
            raise InputError("stdin is closed, and messages are read from it")
        draft = folder_drafts(self.engine, self.draft)
        path = self.engine_path(draft)
        with (
            console.Progress() as progress,
            closing(self.load.to_generate(path, progress)) as engine,
            talking.open_chat(engine, draft, self.disk, self.talk, self.sampling) as talk,
        ):
            progress.stop()
            return self._with(talk)

    def _with(self, talk: ChatSession) -> int:
        terminal = sys.stdin.isatty() and sys.stdout.isatty() and not self.json
        repl = Repl(talk, talking.Screen(terminal), self.json)
        if not terminal:
            repl.run(from_pipe(sys.stdin.buffer))
            return int(repl.failed)
        name, max_seq = talk.engine.spec.name, talk.engine.limits.max_seq
        console.say(f"{name}, {max_seq} tokens; /help lists commands, Ctrl-D leaves")
        edit_lines()
        repl.run(typed)
        return 0


#: (prompt) -> the next input line; None at the end
Lines = Callable[[str], str | None]


def edit_lines() -> None:
    """Enable readline: line editing, history, completion of paths, and bracketed paste."""
    with suppress(ImportError):  # not in every build of Python
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off
        readline.parse_and_bind("tab: complete")
        readline.set_completer_delims(" ")


def typed(prompt: str) -> str | None:
    """Read a line from the terminal; None at its end (Ctrl-D)."""
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


def from_pipe(stream: Any) -> Lines:
    """Return a reader of the lines of a file or a pipe, in UTF-8."""

    def line(prompt: str) -> str | None:
        raw: bytes = stream.readline()
        if not raw:
            return None
        try:
            return raw.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as e:
            raise InputError(f"a line is not UTF-8 at byte {e.start}") from None

    return line


def read_message(lines: Lines, prompt: str) -> str | None:
    '''Return the next message, None after the last: a line, or the text between """ at a line's
    beginning and the next """, without the line breaks next to them; a command before it and text
    after it are kept. InputError if the second """ is missing.'''
    line = lines(prompt)
    if line is None or not (begin := _BLOCK.match(line)):
        return line
    head, text = line[: begin.end() - len(QUOTES)], line[begin.end() :]
    while QUOTES not in text:
        more = lines(MORE)
        if more is None:
            raise InputError(f"the message has no {QUOTES} that ends it; it was not sent")
        text += f"\n{more}"
    text, _, tail = text.partition(QUOTES)
    return head + text.removeprefix("\n").removesuffix("\n") + tail


class Repl:
    """Processes input lines: messages, commands and tool results."""

    def __init__(self, talk: ChatSession, screen: talking.Screen, json: bool = False) -> None:
        self.talk, self.screen, self.json = talk, screen, json
        self.terminal = screen.terminal
        #: whether an input failed, which sets the exit code
        self.failed = False
        self._leaves = False

    def run(self, lines: Lines) -> None:
        """Process all lines. An error in one is reported, and the next is processed, unless stdout
        cannot be written or the engine has ended."""
        while not self._leaves:
            try:
                text = read_message(lines, self._prompt())
                if text is None:
                    return
                self._take(text)
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                self.talk.leave_calls()
                print()
            except (G4Error, OSError, UnicodeError) as e:
                no_file = isinstance(e, OSError) and e.filename is None  # stdout is full or closed
                if no_file or not self.talk.alive:
                    raise
                self._refuse(e)

    def _prompt(self) -> str:
        calls = self.talk.open_calls
        return f"{calls[0]['function']['name']} answers> " if calls else PROMPT

    def _refuse(self, error: Exception) -> None:
        self.failed = True
        text = " ".join(console.error_text(error).split())
        emit({"error": text}) if self.json else console.say(f"error: {text}")

    def _tell(self, text: str) -> None:
        """Print a notice: to stdout at a terminal, else to stderr."""
        print(text, file=sys.stdout if self.terminal else sys.stderr, flush=True)

    def _take(self, text: str) -> None:
        if text.startswith("/") or (self.terminal and text in TABLE["aliases"]):
            self.command(text)
        elif self.talk.open_calls:
            self.talk.answer_call(text)
            if not self.talk.open_calls:
                self._answer(self.talk.reply)
        elif text.strip():
            self._answer(lambda callback: self.talk.say(text, callback))

    def command(self, text: str) -> None:
        """Execute a command, and on a terminal print what it did."""
        name, *operands = text.split(maxsplit=1)
        name = TABLE["aliases"].get(name, name)
        if name not in COMMANDS:
            raise InputError(
                f"no command {name}; /help lists them; to send a message that begins with /, put a "
                f"space before it{did_you_mean(name, COMMANDS)}"
            )
        usage, word, command = COMMANDS[name][0], "".join(operands).strip(), name.removeprefix("/")
        if not (word or usage == "" or usage.startswith("[")):
            raise InputError(f"{name}: give {usage}")
        run = partial(self.attach, command) if command in KINDS else getattr(self, command)
        if (done := run(word)) and self.terminal:
            self._tell(f"{talking.DIM}{done}{talking.PLAIN}")

    def _answer(self, ask: Callable[[Any], Turn]) -> None:
        """Show an answer; at a terminal Ctrl-C ends it."""
        stop = {signal.SIGINT: lambda number, frame: self.talk.stop()} if self.terminal else {}
        with console.handled(stop):
            try:
                turn = ask((lambda event: None) if self.json else self.screen)
            finally:
                self.screen.end()
        if self.json:
            emit(turn.output())
        if not self.terminal:
            return
        self._tell(f"{talking.DIM}{talking.chat_summary(turn, self.talk)}{talking.PLAIN}")
        if turn.full:
            self._tell("the context is full: /save FILE keeps the conversation, /clear begins anew")
        elif turn.nothing:
            self._tell("no answer was generated: the conversation is as before")

    def attach(self, kind: str, path: str) -> str:
        """Attach a media file to the next message; return a notice with its soft tokens."""
        return f"{self.talk.attach(kind, _path(path)).count} tokens, for the next message"

    def file(self, path: str) -> str:
        """Put a text file before the next message; return a notice with its tokens."""
        return f"{self.talk.attach_text(_path(path))} tokens, for the next message"

    def system(self, text: str) -> str:
        self.talk.set_system(text)
        return "system prompt set" if text else "no system prompt"

    def tools(self, text: str) -> str:
        if text == "off":
            self.talk.set_tools(None)
        else:
            talking.declare(self.talk, _path(text))
        return f"tools: {self._tools()}"

    def _tools(self) -> str:
        return ", ".join(t["function"]["name"] for t in self.talk.tools or ()) or "none"

    def think(self, text: str) -> str:
        if not re.fullmatch("on|off|[0-9]{1,9}", text):
            raise InputError(f"/think {text!r}: expected on, off or a number of tokens")
        self.talk.set_thinking(text != "off", int(text) if text.isdigit() else None)
        return f"reasoning {self._thinking()}"

    def _thinking(self) -> str:
        thinking = self.talk.thinking
        budget = "on" if thinking.budget is None else f"at most {thinking.budget} tokens"
        return budget if thinking.on else "off"

    def set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        self.talk.set(name, value.strip())
        return f"{name} {self.talk.settings.get(name, 'as the checkpoint says')}"

    def undo(self, text: str) -> str:
        self.talk.undo()
        return f"removed; {self._messages()} left"

    def _messages(self) -> str:
        return f"{(count := len(self.talk.messages))} message{'s' * (count != 1)}"

    def retry(self, text: str) -> None:
        self._answer(self.talk.retry)

    def clear(self, text: str) -> str:
        self.talk.clear()
        return "cleared; system prompt, tools and settings stay"

    def save(self, text: str) -> str:
        self.talk.save(_path(text))
        return f"saved {self._messages()} to {_path(text)}"

    def load(self, text: str) -> str:
        self.talk.load(_path(text))
        return self._messages()

    def show(self, text: str) -> None:
        talk, max_seq = self.talk, self.talk.engine.limits.max_seq
        lines = {
            "engine": talk.engine.path,
            "template": talk.template.origin,
            "system": talk.system or "none",
            "messages": f"{len(talk.messages)}, {min(talk.held, max_seq)} of {max_seq} tokens",
            "attached": len(talk.attached),
            "tools": self._tools(),
            "thinking": self._thinking(),
            "settings": json.dumps({**talk.defaults.sampling, **talk.settings}),
        }
        self._tell("\n".join(f"{name:<9} {value}" for name, value in lines.items()))

    def help(self, text: str) -> None:
        rows = {f"{name} {usage}".strip(): meaning for name, (usage, meaning) in COMMANDS.items()}
        rows |= TABLE["keys"]
        self._tell("\n".join(f"{key:<18}  {meaning}" for key, meaning in rows.items()))

    def bye(self, text: str) -> None:
        self._leaves = True


def _path(text: str) -> str:
    """Return the path for typed text: quotes are removed, ~ is the user's home."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        raise InputError(f"{text}: no such user") from None
