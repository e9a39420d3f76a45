"""`bench --draft`: the same text with drafts and without, in one run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import g4ir
from g4ir.bench.drafts import DRAFTED, PIECE, PLAIN, Writer, repeated
from g4ir.bench.report import run_bench
from g4ir.bench.schema import plain, read_report
from g4ir.bench.text import text
from g4ir.bench.workload import Workload, draw_tokens
from g4ir.engine.engine import Engine
from g4ir.engine.speculative import SpeculativeConfig, find_draft
from tests import cli_tools
from tests.cli_tools import refused
from tests.small_bench import small_bench

SMALL = Workload(60, 24, batch=2, context=4)
FLAGS = ("--input-len", "60", "--output-len", "24", "--rounds", "2", "--warmup", "0")


def made(folder: Path, draft_tokens: int) -> Engine:
    limits = {"max_seq": 128, "prefill_chunk": 32, "max_batch": 2}
    return g4ir.build(
        "tiny-dense",
        folder,
        backend="reference",
        dtype="float32",
        random_weights=1,
        draft_tokens=draft_tokens,
        **limits,
    )


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Nothing here looks at speed."""
    with pytest.MonkeyPatch.context() as patch:
        small_bench(patch)
        yield


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with made(tmp_path_factory.mktemp("draft") / "e", 4) as e:
        yield e


@pytest.fixture(scope="module")
def told(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """What a command prints and writes."""
    file = tmp_path_factory.mktemp("draft") / "report.json"
    done = cli_tools.g4ir("bench", engine.path, *FLAGS, "--draft", "ngram", "--json", file)
    assert done.code == 0, done.err
    return done.out, json.loads(file.read_text())


def test_a_prompt_repeats_a_piece(engine: Engine) -> None:
    tokens = draw_tokens(SMALL, engine)
    prompt = repeated(SMALL, tokens)
    assert prompt.shape == (2, 64) and prompt[:, PIECE : 2 * PIECE].equal(tokens[:, :PIECE])
    given = Workload(60, 24, batch=2, context=4, text="file")
    assert repeated(given, tokens).equal(tokens[:, :64])


def test_both_ways_write_the_same_text(engine: Engine) -> None:
    prompt = repeated(SMALL, draw_tokens(SMALL, engine))
    writer = Writer(engine, SpeculativeConfig("ngram", 3), SMALL, prompt)
    requests = {role: [turn()] for role, turn in writer.turns(2).items()}
    want = engine.generate(prompt, 24, stop_ids=())
    assert writer.texts == {PLAIN: want, DRAFTED: want}
    assert all(len(r.itl) == 1 for many in requests.values() for r in many[0])
    facts = writer.facts(requests)
    assert facts.same_tokens == facts.all_tokens == 48 and facts.tokens == 3
    assert writer.tally.tokens == 46 and facts.tokens_per_round == 46 / writer.tally.rounds
    times = [sum(r.itl[0] for r in requests[role][0]) for role in (PLAIN, DRAFTED)]
    rates = [facts.decode_per_s[role].value for role in (PLAIN, DRAFTED)]
    assert rates[1] / rates[0] == pytest.approx(times[0] / times[1])
    assert facts.speedup.value == pytest.approx(times[0] / times[1], rel=0.5)


def test_the_report_tells_of_drafts(told: tuple[str, Any], tmp_path: Path) -> None:
    out, report = told
    drafts = report["drafts"]
    assert drafts["source"] == "ngram" and drafts["tokens"] == 4
    assert f"{PIECE} random tokens again and again" in drafts["prompt"]
    assert drafts["tokens_per_round"] >= 1 and len(drafts["accepted"]) <= 4
    assert drafts["same_tokens"] == drafts["all_tokens"] == 24
    assert drafts["speedup"]["value"] > 0 and set(drafts["decode_per_s"]) == {PLAIN, DRAFTED}
    assert "drafts of ngram" in out and "tokens a round of 4 drafted at most" in out
    assert "24 of 24 tokens are the same" in out
    (file := tmp_path / "r.json").write_text(json.dumps(report))
    read = read_report(file)
    assert plain(read)["drafts"] == drafts and text(read) in out


def test_without_drafts_nothing_is_told(engine: Engine) -> None:
    report = run_bench([engine], Workload(8, 4), rounds=2, warmup=0)
    assert report.drafts is None
    assert "drafts of" not in text(report)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--draft magic", "--draft magic: expected one of none, ngram"),
        ("--draft-tokens 3", "--draft-tokens 3: nothing is drafted; give --draft too"),
        ("--draft ngram --draft-tokens 5", "draft-tokens 5: expected 1 to 4"),
    ],
)
def test_flags_that_are_wrong(engine: Engine, words: str, said: str) -> None:
    assert said in refused("bench", engine.path, *FLAGS, *words.split())


def test_an_engine_that_verifies_nothing(tmp_path: Path) -> None:
    with made(tmp_path / "e", 0) as plain_engine:
        message = refused("bench", plain_engine.path, *FLAGS, "--draft", "ngram")
        assert "build the engine again with --draft-tokens K" in message
        assert not find_draft(plain_engine, "none")
