"""`g4ir chat`: talk with an engine."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import G4Error, InputError
from g4ir.model.media import KINDS, check_there
from g4ir.spec.reader import did_you_mean
from g4ir.ui import console
from g4ir.ui.files import read_table
from g4ir.ui.paths import cache_root, private

from . import talking
from .common import Draft, Load, OnEngine, emit
from .verb import flag

if TYPE_CHECKING:
    from g4ir.generate.conversation import ChatSession, Turn

PROMPT, MORE = ">>> ", "... "
#: lines that are remembered for the next time
MOST_LINES = 1000
#: what begins and ends a message of several lines, which a command may have too
QUOTES = '"""'
TABLE = read_table(Path(__file__).with_suffix(".yaml"))
#: command, a method of Repl -> usage, help, and what is allowed
COMMANDS: dict[str, list[str]] = TABLE["commands"]
_BLOCK = re.compile(rf"\s*(/\w+\s+)?{QUOTES}")


class Chat(OnEngine):
    """Talk with an engine.

    media FILE: KIND file of the first message (repeat)
    hide_reasoning: hide the reasoning
    max_new_tokens N: maximum number of generated tokens per answer (default: what fits)
    """

    json: bool = False
    talk: talking.Talk
    media: list[tuple[str, str]] = flag((), each=KINDS)
    hide_reasoning: bool = False
    sampling: talking.Sampling
    draft: Draft
    load: Load

    def __post_init__(self) -> None:
        self.talk.check()

    def __call__(self) -> int:
        if sys.stdin is None:
            raise InputError("stdin is closed, and messages are read from it")
        for kind, path in self.media:
            check_there(kind, path)
        path = self.with_engine(self.draft).engine
        talking.check_turns(Path(path))
        with (
            console.Progress() as progress,
            closing(self.load.to_generate(path, progress)) as engine,
            talking.begun(engine, self.draft, self.talk, self.sampling) as talk,
        ):
            progress.stop()
            return self._with(talk)

    def _with(self, talk: ChatSession) -> int:
        terminal = sys.stdin.isatty() and sys.stdout.isatty() and not self.json
        repl = Repl(talk, terminal, self.json)
        repl.screen.hides_reasoning = self.hide_reasoning
        for kind, path in self.media:
            repl.attach(kind, path)
        if not terminal:
            repl.run(from_pipe(sys.stdin.buffer))
            return int(repl.failed)
        name, room = talk.engine.spec.name, talk.engine.limits.max_seq
        console.say(f"{name}, {room} tokens; /help lists commands, Ctrl-D leaves")
        with history():
            repl.run(typed)
        return 0


#: returns a line for a prompt, None after the last
Lines = Callable[[str], str | None]


def typed(prompt: str) -> str | None:
    """Lines that somebody types."""
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


def from_pipe(stream: Any) -> Lines:
    """Lines of a file or a pipe, in UTF-8."""

    def line(prompt: str) -> str | None:
        raw: bytes = stream.readline()
        if not raw:
            return None
        try:
            return raw.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as e:
            raise InputError(f"a line is not UTF-8 at byte {e.start}") from None

    return line


def whole(lines: Lines, prompt: str) -> str | None:
    '''Return a message, None after the last. It goes on behind a backslash at the end of a line,
    and from """ at the beginning to the next """. InputError where that does not come.'''
    line = lines(prompt)
    if line is None:
        return None
    if begin := _BLOCK.match(line):
        head = line[: begin.end() - len(QUOTES)]
        return head + _quoted(lines, line[begin.end() :])
    while line.endswith("\\"):
        more = lines(MORE)
        line = line[:-1] + ("" if more is None else f"\n{more}")
    return line


def _quoted(lines: Lines, text: str) -> str:
    """Return a text up to the quotes that end it; line breaks next to the quotes are no part."""
    while QUOTES not in text:
        more = lines(MORE)
        if more is None:
            raise InputError(f"the message has no {QUOTES} that ends it; it was not sent")
        text += f"\n{more}"
    text, _, rest = text.partition(QUOTES)
    return text.removeprefix("\n").removesuffix("\n") + rest


def completions(line: str) -> list[str]:
    """Return what Tab can put in place of the last word of a line: a command, a word or a setting
    that it takes, or a path."""
    name, space, rest = line.partition(" ")
    if not space:
        return [f"{c} " if row[0] else c for c, row in COMMANDS.items() if c.startswith(line)]
    usage = COMMANDS.get(name, [""])[0]
    found = [word for word in usage.split("|") if word.islower()]
    if "NAME" in usage:
        from g4ir.generate.conversation import SETTINGS

        found = [f"{setting} " for setting in SETTINGS]
    elif "PATH" in usage or "FILE" in usage:
        quote = rest[:1] if rest.startswith(("'", '"')) else ""
        found += [f"{quote}{p}{quote * (p[-1] != '/')}" for p in _paths(rest.removeprefix(quote))]
    begins = rest.rpartition(" ")[0]
    cut = len(begins) + bool(begins)
    return [word[cut:] for word in found if word.startswith(rest) and word[cut:]]


def _paths(begun: str) -> list[str]:
    """Return the paths that begin with a text, folders with a slash at the end."""
    folder = os.path.dirname(begun)
    with suppress(OSError), os.scandir(os.path.expanduser(folder) or ".") as there:
        shown = [e for e in there if begun.endswith(".") or not e.name.startswith(".")]
        return sorted(os.path.join(folder, e.name) + "/" * e.is_dir() for e in shown)
    return []


def _complete(text: str, state: int) -> str | None:
    import readline

    line = readline.get_line_buffer()[: readline.get_endidx()]
    return (*completions(line), None)[state] if line.startswith("/") else None


@contextmanager
def history() -> Iterator[None]:
    """A context in which lines can be edited, completed and called back, those of the last time
    too; several pasted lines are one."""
    try:
        import readline
    except ImportError:  # a Python without it reads plain lines
        yield
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off
    readline.parse_and_bind("tab: complete")
    readline.set_completer_delims(" ")
    readline.set_completer(_complete)
    place: Path | None = None
    with suppress(OSError, G4Error):
        place = private(cache_root()) / "chat-history"
        readline.read_history_file(place)
    readline.set_history_length(MOST_LINES)
    try:
        yield
    finally:
        if place:
            with suppress(OSError):
                readline.write_history_file(place)
                place.chmod(0o600)


class Repl:
    """Takes messages, commands and answers of tools, one after the other."""

    def __init__(self, talk: ChatSession, terminal: bool, json: bool = False) -> None:
        self.talk, self.terminal, self.json = talk, terminal, json
        self.screen = talking.Screen(terminal)
        #: whether something was refused
        self.failed = False
        self._stats, self._leaves = "short", False

    def run(self, lines: Lines) -> None:
        """Take all of the lines. What is wrong with one is said, and the next is taken."""
        while not self._leaves:
            try:
                text = whole(lines, self._prompt())
                if text is None:
                    return
                self._take(text)
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                self.talk.leave_calls()
                print()
            except (G4Error, OSError, UnicodeError) as e:
                if isinstance(e, BrokenPipeError | console.OutputError):
                    raise
                if not self.talk.alive:
                    raise
                self._refuse(e)

    def _prompt(self) -> str:
        calls = self.talk.open_calls
        return f"{calls[0]['function']['name']} answers> " if calls else PROMPT

    def _refuse(self, error: Exception) -> None:
        self.failed = True
        text = " ".join(console.worded(error).split())
        emit({"error": text}) if self.json else console.say(f"error: {text}")

    def _tell(self, text: str) -> None:
        """Print a message that is not an answer of the model."""
        print(text, file=sys.stdout if self.terminal else sys.stderr, flush=True)

    def _take(self, text: str) -> None:
        if text.startswith("/"):
            self._command(text)
        elif self.talk.open_calls:
            self.talk.answer_call(text)
            if not self.talk.open_calls:
                self._answer(self.talk.reply)
        elif text.strip():
            self._answer(lambda told: self.talk.say(text, told))

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        name, _, below = name.partition("\n")
        rest = f"{below}{rest}".strip()
        command = name.removeprefix("/")
        if name not in COMMANDS:
            raise InputError(
                f"no command {name}; /help lists them, and a message that begins with / has a "
                f"space before it{did_you_mean(name, COMMANDS)}"
            )
        allowed = COMMANDS[name][2:]
        if allowed and not re.fullmatch(allowed[0], rest):
            raise InputError(allowed[1].format(text=rest))
        if command in KINDS:
            self.attach(command, rest)
        else:
            getattr(self, command)(rest)

    def _answer(self, ask: Callable[[Any], Turn]) -> None:
        """Show an answer; Ctrl-C ends it."""
        stop = {signal.SIGINT: lambda number, frame: self.talk.stop()} if self.terminal else {}
        with console.handled(stop):
            try:
                turn = ask((lambda said: None) if self.json else self.screen)
            finally:
                self.screen.end()
        if self.json:
            emit(turn.output())
        if not self.terminal:
            return
        if made := STATS[self._stats]:
            print(f"{talking.DIM}{made(turn, self.talk.engine.limits.max_seq)}{talking.PLAIN}")
        elif turn.finish_reason == "interrupted":
            self._tell("interrupted")
        if turn.full:
            self._tell("the context is full: /save FILE keeps the conversation, /clear begins anew")
        elif turn.nothing:
            self._tell("nothing was said yet: your message was taken back")

    def attach(self, kind: str, path: str) -> None:
        """Read a file for the next message."""
        soft = self.talk.attach(kind, _path(path))
        if self.terminal:
            self._tell(f"{soft.count} tokens, for the next message")

    def file(self, path: str) -> None:
        """Put a text file before the next message."""
        count = self.talk.attach_text(_path(path))
        if self.terminal:
            self._tell(f"{count} tokens, for the next message")

    def system(self, text: str) -> None:
        self.talk.set_system(text)

    def tools(self, text: str) -> None:
        if text == "off":
            self.talk.set_tools(None)
        else:
            talking.declare(self.talk, _path(text))

    def think(self, text: str) -> None:
        self.talk.set_thinking(text != "off", int(text) if text.isdigit() else None)

    def reasoning(self, text: str) -> None:
        self.screen.hides_reasoning = text == "hide"

    def stats(self, text: str) -> None:
        self._stats = text

    def set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        from g4ir.generate.conversation import SETTINGS

        if value.strip():
            self.talk.set(name, value.strip())
            return
        if name and name not in SETTINGS:
            raise InputError(f"setting {name!r}: one of {', '.join(SETTINGS)}")
        chosen, default = self.talk.settings, self.talk.defaults.sampling
        for key in [name] if name else SETTINGS:
            found = chosen.get(key, default.get(key, "default"))
            source = " (checkpoint)" if key in default.keys() - chosen.keys() else ""
            self._tell(f"{key:<18}  {found}{source}")

    def undo(self, text: str) -> None:
        self.talk.undo()

    def retry(self, text: str) -> None:
        self._answer(self.talk.retry)

    def clear(self, text: str) -> None:
        self.talk.clear()

    def save(self, text: str) -> None:
        self.talk.save(_path(text))

    def load(self, text: str) -> None:
        self.talk.load(_path(text))
        if self.terminal:
            self._tell(f"{len(self.talk.messages)} messages")

    def show(self, text: str) -> None:
        talk = self.talk
        names = [t["function"]["name"] for t in talk.tools or ()]
        thinking = "on" if talk.thinking.on else "off"
        if talk.thinking.on and talk.thinking.budget is not None:
            thinking = f"at most {talk.thinking.budget} tokens"
        given = {**talk.defaults.sampling, **talk.settings}
        room = talk.engine.limits.max_seq
        lines = {
            "engine": str(talk.engine.path),
            "template": talk.template.origin,
            "system": talk.system or "none",
            "messages": f"{len(talk.messages)}, {min(talk.held, room)} of {room} tokens",
            "attached": str(len(talk.attached)),
            "tools": ", ".join(names) or "none",
            "thinking": thinking,
            "settings": json.dumps(given),
        }
        self._tell("\n".join(f"{name:<9} {value}" for name, value in lines.items()))

    def help(self, text: str) -> None:
        rows = {f"{name} {usage}".strip(): what for name, (usage, what, *_) in COMMANDS.items()}
        rows |= TABLE["keys"]
        width = max(map(len, rows))
        self._tell("\n".join(f"{left:<{width}}  {what}" for left, what in rows.items()))

    def bye(self, text: str) -> None:
        self._leaves = True


def _path(text: str) -> str:
    """Return a path as it was typed: in quotes, or with ~ for the user's home."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        raise InputError(f"{text}: no such user") from None


#: what is shown after an answer
STATS: dict[str, Callable[[Turn, int], str] | None] = {
    "on": talking.summary,
    "short": talking.short_summary,
    "off": None,
}
