"""`g4ir chat` in pipes and at a terminal, and `g4ir run --chat`."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from g4ir.chat import Event
from g4ir.cli.chat import COMMANDS, from_pipe, read_message
from g4ir.cli.talking import Screen
from g4ir.errors import InputError
from tests.cli_tools import Outcome, g4ir, refused
from tests.media_tools import png
from tests.serve.running import chat_engine
from tests.talking import CALLING, THINKING, TOOLS, dictate
from tests.test_docs import FILES, ROOT, blocks, run_python

CASES = yaml.safe_load((ROOT / "tests" / "chat" / "cli.yaml").read_text())
WORDS = ["w1_ w2_"]
WAIT = 60.0
ROOM = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_engine(tmp_path_factory.mktemp("chat") / "engine", ROOM)


@pytest.fixture
def piped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """`g4ir chat` with these lines; other answers than those dictated are short."""

    def run(lines: str | bytes, *words: str, answers: Sequence[Sequence[str]] = ()) -> Outcome:
        raw = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        dictate(monkeypatch.setattr, answers)
        short = () if answers else ("--max-new-tokens", "3")
        return g4ir("chat", folder, *short, *words)

    return run


# --- messages of lines ------------------------------------------------------------------------


def messages(text: str) -> list[str]:
    """The messages of lines."""
    lines, out = from_pipe(io.BytesIO(text.encode())), list[str]()
    while (found := read_message(lines, ">>> ")) is not None:
        out.append(found)
    return out


@pytest.mark.parametrize(("text", "found"), CASES["lines"])
def test_messages_of_lines(text: str, found: list[str]) -> None:
    assert messages(text) == found


@given(st.lists(st.text(st.sampled_from("ab \\€/")), max_size=6))
def test_a_text_in_quotes_is_itself(parts: list[str]) -> None:
    text = "\n".join(parts)
    assert messages(f'"""\n{text}\n"""\nend')[-1] == "end"
    assert messages(f'"""\n{text}\n"""')[0] == text


def test_quotes_that_do_not_end() -> None:
    with pytest.raises(InputError, match="was not sent"):
        messages('"""a\nb')


# --- what is shown ----------------------------------------------------------------------------


def shown(events: Sequence[Event], terminal: bool) -> str:
    screen, out = Screen(terminal), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        for event in events:
            screen(event)
        screen.end()
    return out.getvalue()


EVENTS = [
    Event("thought", "hm\x1b[1m"),
    Event("thought", "."),
    Event("content", "a\n"),
    Event("arguments", '{"a": '),  # a piece of the call, which is shown whole
    Event("call", '{"a": "é"}', "f", {"a": "é"}, 0),
    Event("content", "b"),
]


def test_what_a_terminal_is_shown() -> None:
    """No order of the model reaches it."""
    call = '{"name": "f", "arguments": {"a": "é"}}\n'
    assert shown(EVENTS, True) == f"\x1b[2mhm\\x1b[1m.\x1b[0m\na\n{call}b\n"
    assert shown(EVENTS[:1], True) == "\x1b[2mhm\\x1b[1m\x1b[0m\n"


# --- pipes ------------------------------------------------------------------------------------


def test_lines_are_answered(piped: Callable[..., Outcome]) -> None:
    done = piped('hello\n\n"""again\nand again"""\n', answers=[THINKING, WORDS])
    assert (done.code, done.out) == (0, "hi €\nw1_ w2_\n")
    assert "\x1b" not in done.out + done.err and ">>>" not in done.out + done.err


def test_lines_are_answered_as_json(piped: Callable[..., Outcome], tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    lines = "rain?\n7 degrees\n/show\n/nothing\n"
    done = piped(lines, "--json", "--tools", str(tools), answers=[CALLING, THINKING])
    asked, told, wrong = map(json.loads, done.out.splitlines())
    assert done.code == 1 and wrong["error"].startswith("no command /nothing;")
    assert asked["finish_reason"] == "tool_calls"
    assert asked["tool_calls"][0]["function"]["arguments"] == '{"city": "oslo"}'
    assert (told["reasoning"], told["content"], told["finish_reason"]) == ("hm", "hi €", "stop")
    assert told["cached_tokens"] >= asked["prompt_tokens"] and told["reasoning_tokens"] > 0
    assert told["new_tokens"] > told["reasoning_tokens"] and told["tokens_per_second"] > 0
    assert "weather" in done.err  # of /show


WRONG: list[tuple[str | bytes, str]] = [
    *CASES["wrong"],
    ("x" * (ROOM + 1), "the context is full"),
    (b"\xff\xfe", "a line is not UTF-8 at byte 0"),
]


def wrong_line(line: str | bytes, folder: Path, tmp_path: Path) -> bytes:
    files = {"WRONG": ("wrong.json", b"nothing"), "BYTES": ("bytes.txt", b"a\xff")}
    files |= {"LONG": ("long.txt", b"x" * 1024), "LARGE": ("large.txt", b"x" * 400_000)}
    raw = line if isinstance(line, bytes) else line.encode()
    for word, (name, held) in files.items():
        (tmp_path / name).write_bytes(held)
        raw = raw.replace(word.encode(), bytes(tmp_path / name))
    return raw.replace(b"ENGINE", bytes(folder))


def test_what_is_wrong_is_one_line(
    piped: Callable[..., Outcome], folder: Path, tmp_path: Path
) -> None:
    """And what follows is answered."""
    lines = [wrong_line(line, folder, tmp_path) + b"\n" for line, _ in WRONG]
    done = piped(b"".join(lines) + b"hello\n")
    errors = [x for x in done.err.splitlines() if "error:" in x]
    for (line, said), error in zip(WRONG, errors, strict=True):
        assert said in error, line
    assert done.code == 1 and done.out and "Traceback" not in done.err


def test_each_command(piped: Callable[..., Outcome], tmp_path: Path) -> None:
    png(tmp_path / "a.png")
    (tmp_path / "a.py").write_text("print('```')")
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    done = piped(CASES["commands"].replace("TMP", str(tmp_path)))
    assert done.code == 0, done.err
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["messages"][0]["content"] == "be\nshort" and saved["tools"] == TOOLS
    picture, text, said = saved["messages"][1]["content"]
    assert picture["type"] == "image_url" and said["text"] == "what is this?"
    assert text["text"] == "a.py\n````\nprint('```')\n````\n\n"
    before, after = re.findall(r"(?s)engine .*?settings  .*?\n", done.err)
    for text in ("system    be\nshort", "tools     weather", '"temperature": 0.5'):
        assert text in before and text in after
    assert "at most 5 tokens" in before and "thinking  off" in after
    assert all(f"{name} " in done.err for name in COMMANDS)


@pytest.mark.parametrize(("verb", "words", "said"), CASES["flags"], ids=lambda x: str(x)[:30])
def test_wrong_flags(folder: Path, verb: str, words: list[str], said: str) -> None:
    assert said in refused(verb, folder, *words)


# --- one message ------------------------------------------------------------------------------


def test_run_chat(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    dictate(monkeypatch.setattr, [THINKING, CALLING, THINKING])
    one = ("run", folder, "--chat", "--prompt", "hello")
    plain = g4ir(*one, "--think")
    assert plain.out == "hi €\n" and "ended by stop" in plain.err
    called = g4ir(*one, "--tools", tmp_path / "tools.json")
    assert json.loads(called.out) == {"name": "weather", "arguments": {"city": "oslo"}}
    parts = json.loads(g4ir(*one, "--json", "--system", "be short").out)
    assert (parts["reasoning"], parts["content"]) == ("hm", "hi €")
    png(tmp_path / "a.png")
    image = ("--image", tmp_path / "a.png", "--max-new-tokens", "2", "--json")
    seen = json.loads(g4ir(*one, "--set", "image_budget=70", *image).out)
    assert seen["prompt_tokens"] > 70 and seen["new_tokens"] == 2
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"what is this?\n")))
    words = ("--system", "be short", "--think", "--think-budget", "4", "--seed", "3")
    said = json.loads(g4ir("chat", folder, *image, *words).out)
    assert said["prompt_tokens"] > 64


# --- a terminal -------------------------------------------------------------------------------


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, words: Sequence[Any]) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *map(str, words)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def until(self, end: str) -> str:
        """What it prints up to a text, which is read away."""
        limit = time.monotonic() + WAIT
        while end not in self.text:
            ready, _, _ = select.select([self.master], [], [], limit - time.monotonic())
            assert ready, self.text
            try:
                read = os.read(self.master, 4096).decode(errors="replace")
            except OSError:  # it has gone
                read = ""
            assert read, self.text
            self.text += read
        before, _, self.text = self.text.partition(end)
        return before

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def ask(self, text: str, *ends: str) -> None:
        """Type a line at the prompt, and wait for what is printed."""
        self.until(">>> ")
        self.type(f"{text}\r")
        for end in ends:
            self.until(end)

    def interrupt(self) -> None:
        """Press Ctrl-C at a prompt. Python misses one that comes before its readline waits."""
        time.sleep(0.2)
        self.type("\x03")

    def end(self) -> int:
        code = self.process.wait(WAIT)
        os.close(self.master)
        return code


@pytest.fixture
def at_terminal(folder: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def start(answers: Sequence[Sequence[str]], *words: Any) -> Terminal:
        script = json.dumps({"answers": answers, "pause_s": 0.003})
        made.append(Terminal(["tests.talking", script, "chat", folder, *words]))
        return made[-1]

    yield start
    for t in made:
        t.process.kill()
        t.process.wait()


UP = "\x1b[A"


def test_a_terminal(at_terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    long = ["w1_" * 150]
    answers = [THINKING, WORDS, long, WORDS, CALLING, WORDS, CALLING, WORDS]
    t = at_terminal(answers, "--tools", tmp_path / "tools.json")
    t.until("Ctrl-D leaves")
    t.ask("hello", "\x1b[2mhm\x1b[0m")
    assert "hi €\r\n" in t.until("\x1b[2m")
    assert re.search(r"\d tokens/s; .*; context: \d+ of \d+ tokens$", t.until("\x1b[0m"))
    t.ask('"""one', "... ")
    t.type('two"""\r')
    t.until("w1_ w2_\r\n")
    t.until(">>> ")
    t.type("garbage")
    t.interrupt()  # ends the line alone
    t.ask("tell", "w1_w1_w1_")
    t.type("\x03")  # ends the answer alone
    t.until("; interrupted; ")
    t.ask(f"{UP * 4}", "w1_ w2_\r\n")  # hello
    t.ask("rain?", '{"name": "weather", "arguments": {"city": "oslo"}}')
    t.until("weather answers> ")
    t.type('{"degrees": 7}\r')
    t.until("w1_ w2_\r\n")
    t.ask("rain?", "weather answers> ")
    t.interrupt()  # nobody answers the call
    t.ask("well?", "w1_ w2_\r\n")
    t.ask(f"/save {tmp_path}/talk.json", ">>> ")
    t.type("\x04")
    assert t.end() == 0
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    asked = [m["content"] for m in saved if m["role"] == "user"]
    assert asked == ["hello", "one\ntwo", "tell", "hello", "rain?", "rain?", "well?"]
    cut = saved[5]["content"]
    assert cut.startswith("w1_w1_w1_") and len(cut) < len(long[0])
    told = [m["content"] for m in saved if m["role"] == "tool"]
    assert told[0] == '{"degrees": 7}' and "not run" in told[1]


def test_lines_of_a_terminal(at_terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """Pasted lines are one message, and paths are completed."""
    t = at_terminal([WORDS])
    t.ask("\x1b[200~def f():\r    return 1\r\r/bye\x1b[201~", "w1_ w2_\r\n")
    (tmp_path / "one.txt").write_text("x")
    t.ask(f"/file {tmp_path}/on\t", "tokens, for the next message")
    t.ask(f"/save {tmp_path}/talk.json", f"saved 2 messages to {tmp_path}/talk.json")
    for command, told in CASES["told"].items():
        t.ask(command, told)
    t.ask("exit")
    assert t.end() == 0
    saved = [m["content"] for m in json.loads((tmp_path / "talk.json").read_text())["messages"]]
    assert saved == ["def f():\n    return 1\n\n/bye", "w1_ w2_"]


def test_the_examples_of_the_guide(
    piped: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is typed in docs/chat.md is taken; every command is there."""
    monkeypatch.chdir(tmp_path)
    png(tmp_path / "photo.png")
    (tools,), (session,) = blocks("chat.md", "json"), blocks("chat.md", "text")
    Path("weather.json").write_text(tools)
    typed = re.findall(r"^(?:>>> |\.\.\. |weather answers> )(.*)$", session, re.M)
    done = piped("\n".join(typed), answers=[WORDS, CALLING, WORDS, WORDS])
    assert done.code == 0, done.err
    assert Path("talk.json").is_file() and len(typed) >= 8
    assert {*COMMANDS} <= {*re.findall(r"`(/\w+)", FILES["chat.md"].read_text())}


def test_the_python_example_of_the_guide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    code, _ = blocks("chat.md", "python")
    names, _ = run_python(code, "chat.md")
    assert len(names["tokens"]) <= 16 and names["answer"].content == names["turn"].content
