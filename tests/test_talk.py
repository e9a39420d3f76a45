"""Conversations: what is computed again, what an interrupted answer leaves, calls, and files."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from g4ir.builder.load import load_engine
from g4ir.chat import Event, Reader, make_prompt
from g4ir.chat.special_tokens import CHANNEL, CHANNEL_END, TURN_END
from g4ir.cli.talking import declare
from g4ir.engine.engine import Engine
from g4ir.engine.prompts import Defaults
from g4ir.engine.scheduler import Scheduler
from g4ir.errors import InputError
from g4ir.generate.conversation import INTERRUPTED, NOT_RUN, ChatSession
from g4ir.generate.offline import OfflineEngine
from g4ir.serve.prompts import Prompts
from tests.engines import CASES
from tests.media_tools import png
from tests.serve.running import chat_engine
from tests.spies import spy
from tests.talking import CALLING, THINKING, TOOLS, dictate, ids

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
        with pytest.raises(InputError, match="no message yet"):
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
    with pytest.raises(InputError, match="half a character"):
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
