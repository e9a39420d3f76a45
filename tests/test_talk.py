"""Conversations: what is computed again, what an interrupted answer leaves, calls, and files.

`g4ir chat` in pipes and at a terminal, and `g4ir run --chat`.
"""

from __future__ import annotations

import base64
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
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from g4ir import Engine, load_engine
from g4ir.chat import Event, Reader, make_prompt
from g4ir.chat.special_tokens import CHANNEL, CHANNEL_END, TURN_END
from g4ir.cli.chat import COMMANDS, Repl, from_pipe, read_message
from g4ir.cli.talking import Screen, declare
from g4ir.engine.prompts import Defaults
from g4ir.engine.scheduler import Scheduler
from g4ir.errors import InputError
from g4ir.generate.conversation import INTERRUPTED, NOT_RUN, ChatSession
from g4ir.generate.offline import OfflineEngine
from g4ir.serve.prompts import Prompts
from tests.cases import read_table
from tests.cli_tools import Outcome, g4ir, refused
from tests.engines import CASES
from tests.media_tools import png
from tests.serve.running import chat_engine
from tests.spies import spy
from tests.talking import CALLING, THINKING, TOOLS, dictate, ids
from tests.test_docs import FILES, ROOT, blocks, run_python

WORDS = ["w1_ w2_"]
ROOM = 1024


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with load_engine(chat_engine(tmp_path_factory.mktemp("talk") / "engine", ROOM)) as made:
        yield made


@pytest.fixture
def talk(engine: Engine) -> Iterator[ChatSession]:
    with ChatSession(engine) as made:
        yield made


def stopping(talk: ChatSession, after: int) -> Callable[[Event], None]:
    """Sees pieces, and stops the answer with one of them."""
    seen = count(1)
    return lambda event: talk.stop() if next(seen) == after else None


@pytest.mark.parametrize("form, answer", [("small", THINKING), ("large", WORDS)])
def test_a_turn_computes_what_is_new(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, form: str, answer: Sequence[str]
) -> None:
    """All before the generation prompt is known, also where a thought is dropped from history."""
    dictate(monkeypatch.setattr, [answer] * 3)
    with ChatSession(engine) as talk:
        talk.template = type(talk.template).built_in(form)
        talk.choose({"max_new_tokens": 40})
        talk.set_system("be short")
        turns = [talk.say("hello") for _ in range(3)]
        begun = 1 + len("model\n") + (2 + len("thought\n")) * (form == "large")
        before = [c.counts.prompt - begun for c in turns]
        for turn, known in zip(turns[1:], before, strict=False):
            assert turn.counts.cached >= known and turn.finish_reason == "stop"
            assert turn.counts.prompt - turn.counts.cached < 75
        assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 3]


def test_a_full_context(talk: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    dictate(monkeypatch.setattr, [["w1_" * 100]])
    turn = talk.say("x" * (ROOM - 100))
    assert turn.finish_reason == "length" and turn.full and talk.held == ROOM + 1
    before = [*talk.messages]
    with pytest.raises(InputError, match=rf"full: .* [0-9]+ tokens, .* at most {ROOM};.*dropped"):
        talk.say("more")
    assert talk.messages == before
    talk.clear()
    assert talk.say("hello").counts.generated


def test_checkpoint_defaults(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """generation_config.json: in chat, JSON lines and the server alike; a request goes before."""
    values = {"temperature": 0.5, "min_p": 0.05, "repetition_penalty": 1.1}
    monkeypatch.setattr(Engine, "defaults", lambda self: Defaults(sampling=values))
    served, lines = Prompts(engine), OfflineEngine(engine)
    with ChatSession(engine) as talk:
        for given in ({}, {"repetition_penalty": 1.0}, {"min_p": 0.5}, {"temperature": 0.0}):
            found = [talk._sampling(given), served._sampling(given, None)]
            found += [lines.request({"tokens": [2], **given}, "x").sampling]
            for sampling in found:
                assert {k: getattr(sampling, k) for k in values} == values | given


def test_a_retry_that_is_stopped(talk: ChatSession, monkeypatch: Any, capsys: Any) -> None:
    dictate(monkeypatch.setattr, [WORDS, WORDS])
    talk.say("hello")
    spy(monkeypatch, ChatSession, "_request", ChatSession.stop)  # before the first token
    Repl(talk, Screen(True)).command("/retry")
    assert "the conversation is as before" in capsys.readouterr().out and len(talk.messages) == 2


def test_cut_calls(talk: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    dictate(monkeypatch.setattr, [["hi ", *CALLING], WORDS])
    talk.set_tools(TOOLS)
    talk.choose({"max_new_tokens": 12})
    turn = talk.say("hello")
    assert turn.finish_reason == "length" and turn.content == "hi "
    for call in turn.calls:
        assert not call["function"]["arguments"].endswith("}")
    assert not talk.open_calls and talk.messages[-1] == {"role": "assistant", "content": "hi "}
    assert talk.say("and now?").counts.generated


def test_undo_and_retry(talk: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    dictate(monkeypatch.setattr, [WORDS, CALLING, THINKING])
    talk.set_tools(TOOLS)
    talk.say("hello")
    talk.say("rain?")
    assert talk.open_calls
    talk.retry()
    assert [m["content"] for m in talk.messages] == ["hello", "w1_ w2_", "rain?", "hi €"]
    talk.undo()
    assert [m["content"] for m in talk.messages] == ["hello", "w1_ w2_"]
    talk.undo()
    for act in (talk.undo, talk.retry):
        with pytest.raises(InputError, match="no user message yet"):
            act()
    assert not talk.messages


def test_a_stopped_answer_stays(talk: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    thought = [CHANNEL, "thought\n" + "w1_" * 300]
    dictate(monkeypatch.setattr, [["w1_" * 300], WORDS, thought], pause_s=0.002)
    turn = talk.say("hello", stopping(talk, 3))
    assert turn.finish_reason == INTERRUPTED and 3 <= turn.counts.generated < 300
    assert turn.content == ("w1_" * 300)[: turn.counts.generated]
    assert talk.messages[-1] == {"role": "assistant", "content": turn.content}
    known = talk.say("hello").counts
    assert known.cached > 0 and talk.messages[-1]["content"] == "w1_ w2_"
    turn = talk.say("hello", stopping(talk, 3))
    assert turn.message["reasoning_content"].startswith("w1_") and not turn.content


def test_an_answer_that_was_stopped_before_it_began(talk: ChatSession, tmp_path: Path) -> None:
    """What was sent is taken back, files too."""
    png(tmp_path / "a.png")
    talk.attach("image", tmp_path / "a.png")
    with pytest.MonkeyPatch.context() as patch:
        spy(patch, talk._scheduler, "submit", lambda *_: talk.stop())
        turn = talk.say("hello")
    assert turn.finish_reason == INTERRUPTED and not turn.counts.generated
    assert not talk.messages and len(talk.attached) == 1
    talk.choose({"max_new_tokens": 2})
    assert talk.say("hello").counts.generated == 2
    assert not talk.attached and len(talk.messages) == 2


def test_calls_and_their_answers(talk: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    dictate(monkeypatch.setattr, [CALLING[:-1] + CALLING, WORDS])
    talk.set_tools(TOOLS)
    turn = talk.say("rain?")
    assert turn.finish_reason == "tool_calls" and len(turn.calls) == 2
    assert turn.calls[0]["function"] == {"name": "weather", "arguments": '{"city": "oslo"}'}
    with pytest.raises(InputError, match="no answer"):
        talk.say("well?")
    assert len(talk.messages) == 2
    for i in (0, 1):
        assert [c["id"] for c in talk.open_calls] == [c["id"] for c in turn.calls[i:]]
        talk.answer_call('{"degrees": 7}')
    with pytest.raises(InputError, match="no tool call waits"):
        talk.answer_call("x")
    told = talk.reply()
    assert told.content == "w1_ w2_" and told.counts.cached
    assert make_prompt(talk.messages, TOOLS).text.count("degrees") == 2


def test_calls_of_a_stopped_answer(talk: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    dictate(monkeypatch.setattr, [[*CALLING[:-1], "w1_" * 300], WORDS], pause_s=0.002)
    talk.set_tools(TOOLS)
    turn = talk.say("rain?", stopping(talk, 1))
    assert turn.finish_reason == INTERRUPTED and len(turn.calls) == 1
    assert talk.messages[-1]["content"] == NOT_RUN and not talk.open_calls


PIECES = st.sampled_from(["w1_", "w2_ ", "€", CHANNEL, CHANNEL_END, "thought\n", *CALLING, "}"])
ACT = st.tuples(st.sampled_from(["say", "stop", "answer", "leave", "file"]), st.lists(PIECES))
ACTS = st.lists(ACT, min_size=1, max_size=5)


@settings(
    max_examples=16, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(acts=ACTS)
def test_every_conversation_renders(engine: Engine, tmp_path: Path, acts: Any) -> None:
    """Whatever the model says and wherever it is stopped: what was said is a conversation."""
    with pytest.MonkeyPatch.context() as patch, ChatSession(engine) as talk:
        talk.set_tools(TOOLS)
        talk.choose({"max_new_tokens": 12})
        dictate(patch.setattr, [texts for act, texts in acts if act in ("say", "stop")])
        for act, texts in acts:
            if act in ("say", "stop"):
                talk.leave_calls()
                talk.say("hello", stopping(talk, len(texts) // 2 if act == "stop" else -1))
            elif act == "answer" and talk.open_calls:
                talk.answer_call("7")
            elif act == "leave":
                talk.leave_calls()
            elif act == "file":
                talk.save(tmp_path / "talk.json")
                before = talk.messages
                talk.load(tmp_path / "talk.json")
                assert talk.messages == before
        talk.leave_calls()
        if talk.messages:
            assert make_prompt(talk.messages, TOOLS).text.endswith(("model\n", "}<tool_response|>"))


def test_settings(talk: ChatSession) -> None:
    given = {"temperature": "0.5", "top_k": "3", "seed": "-1", "min_p": "0.1"}
    for name, value in {**given, "presence_penalty": "1"}.items():
        talk.set(name, value)
    assert talk.settings["top_k"] == 3 and talk.say("x").counts.generated
    talk.set("top_k", "default")
    before = dict(talk.settings)
    assert "top_k" not in before
    for name, value, said in CASES["settings"]:
        with pytest.raises(InputError) as e:
            talk.set(name, value)
        assert said in str(e.value) and talk.settings == before


def test_media_of_a_message(talk: ChatSession, tmp_path: Path) -> None:
    """A file is read once, when it is named; pictures stand before the text, sounds behind it."""
    place = tmp_path / "a picture.png"
    png(place)
    soft, asked = talk.attach("image", place), Mock(side_effect=KeyError)
    talk.attached.append({"type": "audio_url", "audio_url": {"url": "b.wav"}})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(talk, "_asked", asked)
        talk.say("x")
    kinds = [p["type"] for p in asked.call_args.args[0][-1]["content"]]
    assert kinds == ["image_url", "text", "audio_url"]
    talk.attached.pop()
    talk.choose({"max_new_tokens": 3})
    first = talk.say("what is this?")
    assert first.counts.prompt > soft.count
    talk.save(tmp_path / "talk.json")
    raw = place.read_bytes()
    place.unlink()
    again = talk.say("and now?")
    assert again.counts.cached > soft.count
    with pytest.raises(InputError, match=r"talk.json: .*no such image file"):
        talk.load(tmp_path / "talk.json")
    assert len(talk.messages) == 4
    url = "data:image/png;base64," + base64.b64encode(raw).decode()
    text = (tmp_path / "talk.json").read_text().replace(place.as_uri(), url)
    (tmp_path / "talk.json").write_text(text)
    talk.load(tmp_path / "talk.json")
    assert talk.say("and now?").counts.prompt == again.counts.prompt


def test_wrong_files(talk: ChatSession, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    talk.set_system("stays")
    for text, said in CASES["conversations"].items():
        path.write_text(text)
        with pytest.raises(InputError) as e:
            talk.load(path)
        assert str(e.value).startswith(f"{path}: ") and said in str(e.value)
        assert talk.system == "stays" and talk.tools is None
    path.write_bytes(b"\xff")
    for reads in (talk.load, partial(declare, talk)):
        with pytest.raises(InputError, match=rf"^{path}: not UTF-8 at byte 0"):
            reads(f"{tmp_path}/./{path.name}")  # named once


def test_a_file_that_cannot_be_written(talk: ChatSession, tmp_path: Path) -> None:
    talk.messages = [{"role": "user", "content": "\udcff"}]
    with pytest.raises(InputError, match="a lone surrogate"):
        talk.save(tmp_path / "a.json")
    assert not [*tmp_path.iterdir()]


def test_generate_takes_what_users_say(engine: Engine, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    said = engine.generate("hello", 6, chat=True)
    assert said == engine.generate(messages, 6, chat=True) and len(said) == 6
    longer = [*messages, {"role": "assistant", "content": "hi"}, *messages]
    both = engine.generate(["hello", messages, longer], 6, chat=True)
    assert both[:2] == [said, said] and len(both) == 3
    with ChatSession(engine) as talk:
        talk.choose({"max_new_tokens": 6})
        prompt = make_prompt(messages, None, talk.template)
        answer = Reader(prompt_tail=prompt.tail).feed(talk.vocabulary.decode(said))
        assert talk.say("hello").content == "".join(e.text for e in answer)
    png(tmp_path / "a.png")
    seen = engine.generate("what is this?", 4, chat=True, images=[tmp_path / "a.png"])
    parts = [{"type": "image"}, {"type": "text", "text": "what is this?"}]
    asked = [{"role": "user", "content": parts}]
    assert seen == engine.generate(asked, 4, chat=True, images=[tmp_path / "a.png"])
    assert seen != engine.generate("what is this?", 4, chat=True)


def test_generate_ends_with_the_turn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat ends where the model ends its turn, whatever generation_config says."""
    with ChatSession(engine) as talk:
        ends = talk.vocabulary.ends
        assert ids(talk.vocabulary, [])[0] in ends and TURN_END in talk.vocabulary.controls
    seen: list[set[int]] = []
    spy(monkeypatch, Scheduler, "submit", lambda _, asked: seen.append({*asked.sampling.stop}))
    engine.generate("hello", 2, chat=True)
    engine.generate("hello", 2, chat=True, stop_ids=[7])
    assert seen == [{*engine.stop_ids(), *ends}, {7}]


TOLD_CASES = read_table("chat/cli.yaml")
WAIT = 60.0


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


@pytest.mark.parametrize(("text", "found"), TOLD_CASES["lines"])
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
    *TOLD_CASES["wrong"],
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
    done = piped(TOLD_CASES["commands"].replace("TMP", str(tmp_path)))
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


@pytest.mark.parametrize(("verb", "words", "said"), TOLD_CASES["flags"], ids=lambda x: str(x)[:30])
def test_wrong_flags(folder: Path, verb: str, words: list[str], said: str) -> None:
    assert said in refused(verb, folder, *words)


def test_a_full_stdout_ends_the_chat(folder: Path) -> None:
    words = [sys.executable, "-m", "g4ir.cli", "chat", str(folder), "--max-new-tokens", "1"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, input="a\nb\n", text=True, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and done.stderr.count("No space left on device") == 1


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
    typed = f"/image {tmp_path / 'a.png'}\nwhat is this?\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    words = ("--system", "be short", "--think", "--think-budget", "4", "--seed", "3")
    said = json.loads(g4ir("chat", folder, *image[2:], *words).out)
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
    for command, told in TOLD_CASES["told"].items():
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
