"""`verify` and `verify --each-pass` of engines that verify drafted tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.check.logits import ROUNDS_ALONE, verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.check.stages import BACKEND
from g4ir.check.steps import chunks_of_tokens, rounds_of
from g4ir.engine.engine import Engine
from g4ir.model.decoder import VERIFY
from tests import cli_tools
from tests.test_stages import break_pass, smaller_rings

MOST = 4
#: as many as a ring of 8 slots and more
IDS = [*range(5, 26)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return made(tmp_path_factory.mktemp("draft") / "e")


def made(folder: Path, spec: str = "tiny-dense", **options: Any) -> Engine:
    limits = {"max_seq": 48, "prefill_chunk": 16, "draft_tokens": MOST, "dtype": "float32"}
    return g4ir.build(spec, folder, backend="reference", random_weights=1, **limits | options)


def turned(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let its rounds see other positions."""
    run: Callable[..., Any] = engine.runtime.run

    def broken(phase: str, feeds: dict[str, torch.Tensor], *rest: Any) -> Any:
        if phase == VERIFY:
            feeds = {**feeds, "positions": feeds["positions"] + 1}
        return run(phase, feeds, *rest)

    monkeypatch.setattr(engine.runtime, "run", broken)


def test_the_steps_are_verified_in_rounds(engine: Engine) -> None:
    report = verify_engine(engine)
    steps = [n for n in report.turns if n == 1]
    assert report.ok and len(report.rounds) == len(steps) > 2 * MOST
    assert [p.at for p in report.rounds] == [p.at for p in report.positions][-len(steps) :]
    assert f"{len(steps)} of {len(steps)} within it, verified as drafts" in report.text()
    assert len(report.to_dict()["rounds"]) == len(steps)
    few = verify_engine(engine, tokens=[5, 6])
    assert few.ok and len(few.rounds) == 2


@pytest.mark.parametrize(
    "spec, options",
    [
        pytest.param("tiny-moe", {"dtype": "bfloat16"}, marks=pytest.mark.full),
        ("tiny-ple", {"all_logits": True, "max_seq": 32, "draft_tokens": 31}),
    ],
)
def test_rounds_of_other_engines(tmp_path: Path, spec: str, options: dict[str, Any]) -> None:
    """In 16 bits; drafts that would pass the engine's end."""
    engine = made(tmp_path / "e", spec, **options)
    report = verify_engine(engine)
    assert report.ok and report.rounds, report.text()
    stages = verify_each_pass(engine)
    assert stages.ok and max(stages.rounds) <= engine.draft_tokens + 1, stages.text()


def test_rounds_that_are_wrong(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    turned(engine, monkeypatch)
    report = verify_engine(engine, tokens=IDS)
    assert not report.ok and not any(p.ok for p in report.rounds)
    assert all(p.ok for p in report.positions) and report.first_difference == ROUNDS_ALONE
    assert "0 of 7 within it" in report.text()


# --- pass by pass -------------------------------------------------------------------------------


def test_each_pass_is_seen_in_rounds(engine: Engine) -> None:
    report = verify_each_pass(engine)
    assert report.ok and report.rounds == (MOST + 1, MOST), report.text()
    assert "also in rounds of 5, 4" in report.text()
    assert report.to_dict()["rounds"] == (5, 4) and not report.media
    assert verify_each_pass(engine, tokens=[5, 6]).ok


def test_rounds_end_with_wrong_tokens() -> None:
    ids = torch.arange(20, 41)
    chunks = [*chunks_of_tokens(ids, 8, 16)]
    rounds = [c for c in rounds_of(chunks, MOST + 1, 48) if c.phase == VERIFY]
    assert [c.at for c in rounds] == [17, 19] and [c.valid for c in rounds] == [5, 4]
    for c in rounds:
        right = ids[c.at : c.at + 2]
        tokens = c.inputs["tokens"][0]
        assert tokens[:2].equal(right) and tokens[2] != c.at + 22
    assert [c.valid for c in rounds_of(chunks, 33, 23) if c.phase == VERIFY] == [6, 3]


def test_rings_of_less_slack_are_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot less is enough for prompts and single steps."""
    break_pass(monkeypatch, "plan_cache", smaller_rings)
    culprit = verify_each_pass(engine).culprit
    assert culprit and culprit.name == "plan_cache" and culprit.first
    assert (culprit.first.phase, culprit.first.at) == (VERIFY, 17)
    assert "attention" in culprit.first.ops


def test_a_backend_whose_rounds_are_wrong(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    turned(engine, monkeypatch)
    culprit = verify_each_pass(engine, IDS).culprit
    assert culprit and culprit.name == BACKEND and culprit.first
    assert culprit.first.phase == VERIFY


def test_the_command_tells_of_rounds(engine: Engine) -> None:
    told = cli_tools.g4ir("verify", engine.path, "--tokens", "5,6,7,8,9,5,6,7", "--json")
    assert told.code == 0 and len(json.loads(told.out)["rounds"]) == 2
    told = cli_tools.g4ir("verify", engine.path, "--each-pass", "--tokens", "5,6,7,8,9")
    assert told.code == 0 and "also in rounds of" in told.out
