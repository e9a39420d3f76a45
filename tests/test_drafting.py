"""Speculative decoding: texts are those of single steps, in `generate`, sessions, the scheduler,
`run`, `chat` and `serve`; what `verify` and `bench` say of it."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from g4ir.backends.sampling import SamplingParams
from g4ir.builder.load import load_engine
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.check.stages import BACKEND, chunks_of_tokens, rounds_of
from g4ir.engine import speculative
from g4ir.engine.engine import Engine
from g4ir.engine.requests import Event, Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.speculative import AcceptanceStats, NgramProposer, SpeculativeConfig, StepCosts
from g4ir.errors import InputError
from g4ir.model.decoder import VERIFY
from tests.cli_tools import g4ir as command
from tests.cli_tools import refused
from tests.contract.session import AnyOrder
from tests.engines import some_tokens
from tests.serve.running import chat_engine, eventually, running
from tests.test_stages import break_pass, smaller_rings
from tests.test_verify import turned

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def made(make_engine: Make) -> Make:
    limits = {"max_seq": 96, "prefill_chunk": 16, "max_batch": 3, "draft_tokens": 8}
    return partial(make_engine, random_weights=3, dtype="float32", **limits)


def prompts(*lengths: int) -> list[list[int]]:
    return [some_tokens(1, n, n)[0].tolist() for n in lengths]


DRAWN = {"temperature": 0.6, "seed": 5, "top_p": 0.7}


@pytest.mark.parametrize("variant, how", [("tiny-ple", DRAWN), ("tiny-moe", {})])
def test_text_is_that_of_single_steps(
    made: Make, monkeypatch: pytest.MonkeyPatch, variant: str, how: dict[str, Any]
) -> None:
    """Rows of different lengths, past three windows, some of whose drafts are right; a stop ends
    a row within a round."""
    engine, given, rng = made(variant), prompts(9, 21), random.Random(1)
    want = engine.generate(given, 40, stop_ids=(), **how)
    whole = [[*p, *w] for p, w in zip(given, want, strict=True)]

    def propose(text: NgramProposer, count: int) -> list[int]:
        right = whole[int(text._ids[0] != given[0][0])][text._count :][: rng.randint(0, count)]
        return [t if rng.random() < 0.7 else rng.randrange(3, 500) for t in right]

    monkeypatch.setattr(NgramProposer, "propose", propose)
    monkeypatch.setattr(speculative.Pace, "count", lambda *_: 4)
    tally, seen = AcceptanceStats(), list[tuple[int, int]]()
    options = {"draft": "ngram", "tally": tally, **how}
    got = engine.generate(
        given, 40, stop_ids=(), on_token=lambda row, t: seen.append((row, t)), **options
    )
    assert got == want
    assert [[t for row, t in seen if row == i] for i in (0, 1)] == want
    assert tally.tokens == 2 * 39 and tally.rounds < 60
    stops = {want[0][7], want[1][12]}
    ends = [1 + next(i for i, t in enumerate(row) if t in stops) for row in want]
    got = engine.generate(given, 40, stop_ids=stops, **options)
    assert got == [row[:end] for row, end in zip(want, ends, strict=True)]


def test_rows_as_slots(made: Make) -> None:
    """Penalties, seeds, masks and ends are by row; drafts are off while many rows decode."""
    engine, every = made("tiny-moe", backend="torch"), prompts(7, 12, 18, 9, 25)
    ways: list[dict[str, Any]] = [{"logprobs": 2}, {"temperature": 0.7, "top_k": 5}]
    ways += [{"presence_penalty": 0.3}, {"temperature": 1.0, "top_k": 4}, {"ignore_eos": False}]
    params = [
        SamplingParams(seed=i, min_tokens=12, **{"ignore_eos": True, **w})
        for i, w in enumerate(ways)
    ]
    jobs = [Request(tuple(p * 2), 40, s) for p, s in zip(every, params, strict=True)]

    def texts(settings: SchedulerConfig) -> tuple[list[list[int]], Scheduler]:
        scheduler = Scheduler(engine, settings)
        handles, events = [scheduler.submit(job) for job in jobs], list[Event]()
        while scheduler.busy:
            events += scheduler.step()
        for t in handles:
            own = [e for e in events if e.handle is t]
            assert [e.token for e in own] == t.answers[0].tokens
            assert [bool(e.finish) for e in own] == [False] * (len(own) - 1) + [True]
        assert sum(e.logprobs is not None for e in events) == len(handles[0].answers[0].tokens)
        return [t.answers[0].tokens for t in handles], scheduler

    want, _ = texts(SchedulerConfig())
    got, scheduler = texts(SchedulerConfig(draft=SpeculativeConfig("ngram", 4), draft_rows=3))
    tally = scheduler.totals.tally
    assert got == want and tally.tokens > tally.rounds > 0
    off, scheduler = texts(SchedulerConfig(draft=SpeculativeConfig("ngram", 4), draft_rows=1))
    assert off == want and scheduler.totals.tally.rounds < tally.rounds


@pytest.mark.parametrize("variant", ["tiny-ple", "tiny-moe"])
def test_sessions_in_any_order_equal_full_recomputation(made: Make, variant: str) -> None:
    """Rounds too, beside what tests/contract/session.py does in any order."""
    engine = made(variant)
    acts = AnyOrder(engine, lambda text: engine.session(1).prefill(text[None])[0], 0)
    acts.run(60, ["verify"] * 5)


def test_verify_refuses(made: Make) -> None:
    session = made("tiny-ple").session(2)
    with pytest.raises(InputError, match="10 tokens; an engine of --draft-tokens 8 takes 9"):
        session.verify(some_tokens(2, 10))
    with pytest.raises(InputError, match="outside the vocabulary"):
        session.verify([[5, -1], [5, 6]])
    plain = made("tiny-ple", draft_tokens=0)
    with pytest.raises(InputError, match="build the engine again with --draft-tokens K"):
        plain.session(1).verify([[5, 6]])


words = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(words, st.integers(1, 12), st.integers(0, 59))
def test_lookup_finds_the_longest_match(ids: list[int], count: int, cut: int) -> None:
    """As a search through every earlier place does; pieces make no difference."""
    text = NgramProposer(ids[:cut])
    text.extend(ids[cut:])
    matches = []
    for end in range(len(ids) - 1):
        size = 0
        while size <= end and size < speculative.MAX_MATCH and ids[end - size] == ids[-1 - size]:
            size += 1
        matches.append((size, end))
    size, end = max(matches, default=(0, 0))
    behind = ids[end + 1 :]
    want = [behind[i % len(behind)] for i in range(count)] if size >= speculative.MIN_MATCH else []
    assert text.propose(count) == want
    assert NgramProposer(ids).propose(count) == want


#: of steps that are not measured
COSTS = StepCosts().of(1, 9)


def paced(chance: float, costs: list[float], rounds: int = 400) -> tuple[float, list[int]]:
    """Steps of one token that a text takes, by each of its tokens, whose drafts are right with this
    chance; and the counts of drafts."""
    pace, rng, took, tokens, counts = speculative.Pace(8), random.Random(0), 0.0, 0, list[int]()
    for _ in range(rounds):
        counts.append(count := pace.count(costs))
        right = next((i for i in range(count) if rng.random() >= chance), count)
        pace.record(count, right, costs)
        took, tokens = took + costs[count], tokens + right + 1
    return took / tokens, counts[rounds // 2 :]


def test_pace_follows_what_is_right_and_what_steps_cost() -> None:
    """Wrong drafts cost next to nothing; right ones are as many as steps make cheap."""
    cheap, dear = [1 + 0.02 * i for i in range(9)], [1 + 0.6 * i for i in range(9)]
    assert paced(0, COSTS)[0] < 1.03 and paced(0, dear)[0] < 1.1
    assert {*paced(1, COSTS)[1]} == {*paced(1, dear)[1]} == {8}
    assert paced(0.2, cheap)[0] < 0.87 and paced(0.2, dear)[0] < 1.1
    steps = [1, 1.02, 1.04, 1.1, 2, 3, 4, 5, 6]
    took, counts = paced(0.8, steps)
    assert took < 0.5 and max(counts) == 3
    assert median(paced(0.8, cheap)[1]) > median(paced(0.5, cheap)[1]) >= 1


@given(
    st.lists(st.floats(0, 1.5), min_size=1, max_size=8),
    st.lists(st.integers(0, 8), max_size=200),
    st.integers(32, 400),
)
def test_drafts_never_make_a_text_slower(
    more: list[float], accepted: list[int], tokens: int
) -> None:
    """By more than 3 %, whatever is right and whatever the steps of this machine cost."""
    costs = [1 + x for x in itertools.accumulate(more, initial=0.0)]
    pace, took, made, told = speculative.Pace(len(more)), 0.0, 0, iter(accepted)
    while made < tokens:
        count = min(pace.count(costs), tokens - made - 1)
        right = min(next(told, 0), count)
        pace.record(count, right, costs)
        took, made = took + costs[count], made + right + 1
    assert took <= 1.03 * made


def test_costs_of_steps() -> None:
    """The median of the newest ones, by batch; what is not measured costs a little more."""
    costs = StepCosts()
    for batch, tokens, times in ((1, 1, (9, 2, 2)), (1, 3, (90, 3, 99, 3)), (1, 4, (5, 2.8))):
        for seconds in times:
            costs.add(batch, tokens, seconds)
    cost = speculative.COST
    assert costs.of(1, 6) == pytest.approx([1, 1 + cost, 1.4, 1.4, 1.4 + cost, 1.4 + 2 * cost])
    assert costs.of(2, 3) == pytest.approx([1, 1 + cost, 1 + 2 * cost])
    for _ in range(99):
        costs.add(1, 1, 1.4)
    assert costs.of(1, 3) == pytest.approx([1, 1 + cost, 2])


#: what an answer of a server or of a conversation is made to say
SAID = "abcdef" * 5
TOLD = re.compile(r"; (\d\.\d\d) tokens per step; ended by")
#: a prompt that a random model repeats pieces of
PROMPT = "2,5,7,9,5,7,9,5,7,9"
GREEDY = ("--temperature", "0", "--max-new-tokens", "40")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with a tokenizer of chats, that verifies 4 tokens."""
    return chat_engine(tmp_path_factory.mktemp("draft") / "engine", draft_tokens=4)


def test_run_tells_its_rounds(folder: Path) -> None:
    words = ("run", folder, "--tokens", PROMPT, *GREEDY)
    want, got = command(*words), command(*words, "--draft", "ngram")
    assert got.code == 0 and got.out == want.out
    told = TOLD.search(got.err)
    assert told and float(told[1]) > 1 and "tokens per step" not in want.err
    (told,) = counts(command(*words, "--json", "--draft", "ngram", "--draft-tokens", "2").err)
    drafts = told["drafts"]
    assert drafts["rounds"] < 39 and len(drafts["accepted"]) == 2
    assert drafts["tokens_per_round"] == pytest.approx(39 / drafts["rounds"], abs=1e-4)
    for off in ("--draft none", "--draft ngram --draft-tokens 0"):
        (told,) = counts(command(*words, "--json", *off.split()).err)
        assert "drafts" not in told


def counts(err: str) -> list[dict[str, Any]]:
    """What is told in JSON; a slow machine is told of the progress beside it."""
    return [json.loads(line) for line in err.splitlines() if line.startswith("{")]


def test_usage_and_counts_of_a_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": len(SAID)}
    config = SchedulerConfig(draft=SpeculativeConfig("ngram"))
    with running(lambda: load_engine(folder), config=config) as served:
        eventually(lambda: served.server.service)
        served.dictate(monkeypatch, SAID)
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


def test_drafts_that_an_engine_cannot_verify(made: Make) -> None:
    """More than it was built for, or those of a drafter that it has not."""
    few = made("tiny-ple")
    with pytest.raises(InputError, match="build it again with --draft-tokens 9 for more"):
        few.generate([2, 5, 7], 4, draft="ngram", draft_tokens=9)
    with pytest.raises(InputError, match=r"has no drafter; .* with --drafter"):
        few.generate([2, 5, 7], 4, draft="mtp")
    told = refused("run", few.path, "--tokens", "2,5", "--draft", "ngram", "--draft-tokens", "-1")
    assert "draft-tokens -1: expected 1 to 8, which this engine was built for" in told


#: as many as a ring of 8 slots and more
IDS = [*range(5, 26)]


@pytest.fixture(scope="module")
def checked(made: Make) -> Engine:
    return made("tiny-dense", max_seq=48, max_batch=1, draft_tokens=4)


def test_the_steps_are_verified_in_rounds(checked: Engine) -> None:
    report = verify_engine(checked)
    steps = [n for n in report.turns if n == 1]
    assert report.ok and len(report.rounds) == len(steps) > 8
    assert [p.at for p in report.rounds] == [p.at for p in report.positions][-len(steps) :]
    assert f"{len(steps)} of {len(steps)} within it, verified as drafts" in report.text()
    told = command("verify", checked.path, "--tokens", "5,6,7,8,9,5,6,7", "--json")
    assert told.code == 0 and len(json.loads(told.out)["rounds"]) == 2


def test_each_pass_is_seen_in_rounds(checked: Engine) -> None:
    report = verify_each_pass(checked)
    assert report.ok and report.rounds == (5, 4), report.text()
    assert "also in rounds of 5, 4" in report.text()
    assert report.to_dict()["rounds"] == (5, 4) and not report.media


def test_rounds_that_pass_an_engines_end(made: Make) -> None:
    engine = made("tiny-ple", all_logits=True, max_seq=32, max_batch=1, draft_tokens=31)
    report, stages = verify_engine(engine), verify_each_pass(engine)
    assert report.ok and report.rounds, report.text()
    assert stages.ok and max(stages.rounds) <= 32, stages.text()


def test_rounds_that_are_wrong(checked: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    turned(checked, VERIFY, monkeypatch)
    report = verify_engine(checked, tokens=IDS)
    assert not report.ok and not any(p.ok for p in report.rounds)
    assert all(p.ok for p in report.positions)
    assert "(rope_table)" in (report.first_difference or ""), "positions are those of another token"
    assert "0 of 7 within it" in report.text()
    culprit = verify_each_pass(checked, IDS).culprit
    assert culprit and culprit.name == BACKEND and culprit.first
    assert culprit.first.phase == VERIFY


def test_rounds_end_with_wrong_tokens() -> None:
    ids = torch.arange(20, 41)
    rounds = [c for c in rounds_of([*chunks_of_tokens(ids, 8, 16)], 5, 48) if c.phase == VERIFY]
    assert [c.at for c in rounds] == [17, 19] and [c.valid for c in rounds] == [5, 4]
    for c in rounds:
        right, tokens = ids[c.at : c.at + 2], c.inputs["tokens"][0]
        assert tokens[:2].equal(right) and tokens[2] != c.at + 22


def test_rings_of_less_slack_are_named(checked: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot less is enough for prompts and single steps."""
    break_pass(monkeypatch, "plan_cache", smaller_rings)
    culprit = verify_each_pass(checked).culprit
    assert culprit and culprit.name == "plan_cache" and culprit.first
    assert (culprit.first.phase, culprit.first.at) == (VERIFY, 17)
    assert "attention" in culprit.first.ops
