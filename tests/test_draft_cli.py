"""Drafting where it is used: `run`, `chat` and `serve`, and what they tell of it."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from g4ir.chat.detokenizer import Detokenizer
from g4ir.cli.talking import tally_text
from g4ir.engine.load import load_engine
from g4ir.engine.offline import OfflineEngine
from g4ir.engine.scheduler import SchedulerConfig
from g4ir.engine.speculative import AcceptanceStats, SpeculativeConfig
from g4ir.errors import InputError
from tests.cli_tools import Outcome, g4ir, refused
from tests.serve.running import Running, chat_engine, eventually, running
from tests.talking import dictate

MOST = 4
#: what an answer of a server or of a conversation is made to say
SAID = "abcdef" * 5
TOLD = re.compile(r"; (\d\.\d\d) tokens a round \((\d+( \d+)*) % of drafts accepted\)")
#: a prompt that a random model repeats pieces of
PROMPT = "2,5,7,9,5,7,9,5,7,9"
GREEDY = ("--temperature", "0", "--max-new-tokens", "40")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with a tokenizer of chats, that verifies."""
    return chat_engine(tmp_path_factory.mktemp("draft") / "engine", draft_tokens=MOST)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that does not."""
    return chat_engine(tmp_path_factory.mktemp("draft") / "plain")


# --- run ----------------------------------------------------------------------------------------


def test_run_tells_its_rounds(folder: Path) -> None:
    words = ("run", folder, "--tokens", PROMPT, *GREEDY)
    want, got = g4ir(*words), g4ir(*words, "--draft", "ngram")
    assert got.code == 0 and got.out == want.out
    told = TOLD.search(got.err)
    assert told and float(told[1]) > 1 and "tokens a round" not in want.err
    assert len(told[2].split()) == MOST


@pytest.mark.parametrize(
    "off", [(), ("--draft", "none"), ("--draft", "ngram", "--draft-tokens", 0)]
)
def test_run_without_drafts_tells_of_none(folder: Path, off: tuple[Any, ...]) -> None:
    """On an engine that could draft, and for an engine that could not it is no error."""
    got = g4ir("run", folder, "--tokens", PROMPT, *GREEDY, *map(str, off), "--json")
    assert got.code == 0 and "drafts" not in json.loads(got.err)


def test_run_tells_its_rounds_as_json(folder: Path) -> None:
    words = ("run", folder, "--tokens", PROMPT, *GREEDY, "--json")
    want, got = g4ir(*words), g4ir(*words, "--draft", "ngram", "--draft-tokens", "2")
    assert got.out == want.out
    told = json.loads(got.err)["drafts"]
    assert told["rounds"] < 39 and len(told["accepted"]) == 2
    assert told["tokens_per_round"] == pytest.approx(39 / told["rounds"], abs=1e-4)


@pytest.mark.parametrize("rows", [(), ("--draft-rows", "1"), ("--draft-rows", "4")])
def test_run_of_lines(
    folder: Path, tmp_path: Path, rows: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn ones too: the same seed gives the same text, however many rows draft."""
    ids = [int(t) for t in PROMPT.split(",")]
    lines = [
        {"tokens": ids[: 4 + i] * 2, "max_new_tokens": 20 + i, "temperature": i % 2, "seed": i}
        for i in range(5)
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    want = g4ir("run", folder, "--input-jsonl", file)
    got = g4ir("run", folder, "--input-jsonl", file, "--draft", "ngram", *rows)
    assert got.code == 0 and got.out == want.out
    told = [json.loads(line).get("drafts") for line in got.err.splitlines()]
    assert sum(bool(t) for t in told) >= (5 if rows == ("--draft-rows", "4") else 1)


def test_one_request_after_another(folder: Path) -> None:
    """Each continues the text of the one before, with drafts and without the same."""
    engine = load_engine(folder)
    offline = OfflineEngine(
        engine, {"max_new_tokens": 30}, SchedulerConfig(draft=SpeculativeConfig("ngram"))
    )
    tokens = [int(t) for t in PROMPT.split(",")]
    for _ in range(3):
        got = offline.answer(offline.request({"tokens": tokens}, "x"))
        want = engine.generate(tokens, 30)
        assert list(got.tokens) == want and got.tally.tokens == len(want) - 1
        tokens = [*tokens, *want, 5]
    engine.close()


# --- chat ---------------------------------------------------------------------------------------


def test_chat_tells_its_rounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*words: str) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\nhi\n")))
        with monkeypatch.context() as patch:
            dictate(patch.setattr, [[SAID], [SAID]])
            return g4ir("chat", folder, "--json", *words)

    want, got = said(), said("--draft", "ngram")
    for a, b in zip(want.out.splitlines(), got.out.splitlines(), strict=True):
        plain, drafted = json.loads(a), json.loads(b)
        told = drafted["drafts"]
        assert plain["content"] == drafted["content"] == SAID and "drafts" not in plain
        assert told["tokens_per_round"] > 2 and len(told["accepted"]) == MOST


def test_run_of_a_chat_tells_its_rounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dictate(monkeypatch.setattr, [[SAID]])
    got = g4ir("run", folder, "--chat", "--prompt", "hi", "--draft", "ngram")
    told = TOLD.search(got.err)
    assert got.out.strip() == SAID and told and float(told[1]) > 2


def test_what_is_told_of_rounds() -> None:
    tally = AcceptanceStats()
    assert tally_text(tally) == tally_text(None) == ""
    tally.add(0, 1)
    assert tally_text(tally) == "; 1.00 tokens a round"
    for drafted, tokens in ((2, 3), (2, 1), (2, 2)):
        tally.add(drafted, tokens)
    assert tally_text(tally) == "; 1.75 tokens a round (67 33 % of drafts accepted)"


# --- serve --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Running]:
    config = SchedulerConfig(draft=SpeculativeConfig("ngram"))
    with running(lambda: load_engine(folder), config=config) as r:
        eventually(lambda: r.server.service)
        yield r


def test_usage_and_counts_of_a_server(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    served.dictate(monkeypatch, SAID)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": len(SAID)}
    with served.client() as client:
        got = client.post("/v1/chat/completions", json=body).json()
        metrics = client.get("/metrics").text
    assert got["choices"][0]["message"]["content"] == SAID
    told = got["usage"]["completion_tokens_details"]
    right, wrong = told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]
    assert right > len(SAID) / 2 and wrong >= 0

    def count(name: str) -> float:
        found = re.findall(rf"^g4ir_{name}_total(?:{{.*}})? (\S+)$", metrics, re.M)
        return sum(map(float, found))

    assert count("draft_accepted_tokens") == right
    assert count("draft_tokens") == right + wrong
    assert count("draft_round_tokens") == count("generation_tokens") - 1
    assert count("draft_rounds") == count("draft_round_tokens") - right
    assert 'g4ir_draft_tokens_total{position="1"}' in metrics


def test_streams_have_the_text_of_single_steps(served: Running, folder: Path) -> None:
    """The same tokens one by one, and their usage at the end."""
    asked = {"prompt": [int(t) for t in PROMPT.split(",")], "max_tokens": 30, "ignore_eos": True}
    body = {**asked, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    with served.client() as client:
        lines = client.post("/v1/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    engine = load_engine(folder)
    tokens = engine.generate(asked["prompt"], 30, stop_ids=())
    want = Detokenizer(engine.tokenizer()).decode(tokens)
    engine.close()
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == want
    details = chunks[-1]["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0


# --- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        ("--draft magic", "--draft magic: expected one of none, ngram"),
        ("--draft-tokens 3", "--draft-tokens 3: nothing is drafted; give --draft too"),
        ("--draft none --draft-tokens 3", "--draft-tokens 3: nothing is drafted"),
        ("--draft ngram --draft-tokens 5", "draft-tokens 5: expected 1 to 4, which this engine"),
        ("--draft ngram --draft-tokens -1", "draft-tokens -1: expected 1 to 4, which this engine"),
    ],
)
@pytest.mark.parametrize("verb", ["run --tokens 2,5", "chat", "serve --port 0"])
def test_flags_that_are_wrong(folder: Path, verb: str, words: str, said: str) -> None:
    name, *rest = verb.split()
    assert said in refused(name, folder, *rest, *words.split())


@pytest.mark.parametrize(
    "verb, words, said",
    [
        ("serve", "--draft-rows 2", "--draft-rows 2: nothing is drafted; give --draft too"),
        ("serve", "--draft ngram --draft-rows 0", "draft_rows 0: expected at least 1"),
        ("run", "--draft ngram --draft-rows 2 --tokens 2", "--draft-rows is for --input-jsonl"),
        ("chat", "--draft ngram --draft-rows 2", "unrecognized arguments: --draft-rows"),
    ],
)
def test_rows_of_drafts_that_are_wrong(folder: Path, verb: str, words: str, said: str) -> None:
    assert said in refused(verb, folder, *words.split())


@pytest.mark.parametrize("verb", ["run --tokens 2,5", "serve --port 0", "chat"])
def test_an_engine_that_verifies_nothing(plain: Path, verb: str) -> None:
    name, *rest = verb.split()
    message = refused(name, plain, *rest, "--draft", "ngram")
    assert "verifies no drafted tokens; build the engine again with --draft-tokens K" in message


def test_a_scheduler_knows_what_an_engine_can_do(folder: Path) -> None:
    engine = load_engine(folder)
    made: Callable[..., Any] = OfflineEngine
    offline = made(engine, {}, SchedulerConfig(draft=SpeculativeConfig("ngram")))
    assert offline.scheduler.config.draft == SpeculativeConfig("ngram", MOST)
    with pytest.raises(InputError, match="expected 1 to 4"):
        made(engine, {}, SchedulerConfig(draft=SpeculativeConfig("ngram", 9)))
    engine.close()
