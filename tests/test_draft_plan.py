"""What drafting is expected to gain: `plan --draft-tokens` and `show --phase verify`."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from g4ir.engine.build import Prepared, prepare
from g4ir.ir.text import parse_graph as parse
from g4ir.model.decoder import VERIFY
from g4ir.model.text import build_graph
from g4ir.passes import PassOptions, run_passes
from g4ir.passes.plan_cache import RingOptions
from g4ir.plan.cost import Cost, Roof, graph_costs, total
from g4ir.plan.drafting import ACCEPTANCE, Gain, gains, gains_text, tokens_per_round
from g4ir.plan.plan import PLANNED, make_plan
from g4ir.plan.records import Drafts
from g4ir.spec.record import load_spec
from tests.cli_tools import built, g4ir, refused

#: tokens verified -> bytes beside a step of one, of experts that are drawn independently
EXPERTS = {2: 1.35, 3: 1.68, 4: 1.99, 5: 2.27, 9: 3.26}


def moved(name: str, phase: str, tokens: int, context: int = 1) -> Cost:
    g = run_passes(build_graph(load_spec(name), phase), options=PassOptions((RingOptions(8),)))
    return total(graph_costs(g, S=tokens, C=context))


@pytest.mark.parametrize(("tokens", "times"), EXPERTS.items())
def test_tokens_choose_experts_of_their_own(tokens: int, times: float) -> None:
    one = moved("26b-a4b", "decode", 1).needed_bytes
    assert moved("26b-a4b", VERIFY, tokens).needed_bytes / one == pytest.approx(times, abs=0.005)


def test_a_dense_model_reads_its_weights_once() -> None:
    one, five = moved("12b", "decode", 1, 4096), moved("12b", VERIFY, 5, 4096)
    assert five.weight_bytes == one.weight_bytes
    assert five.flops == pytest.approx(5 * one.flops, rel=0.01)
    assert one.state_bytes < five.state_bytes < 1.1 * one.state_bytes


def test_verify_costs_what_decode_costs_for_one_token() -> None:
    for name in ("tiny-moe", "tiny-ple"):
        one, same = moved(name, "decode", 1, 100), moved(name, VERIFY, 1, 100)
        assert (one.flops, one.weight_bytes) == (same.flops, same.weight_bytes)


def test_tokens_of_a_round() -> None:
    """As many as rounds that are drawn have."""
    rng = random.Random(0)
    for share, drafted in ((0.0, 3), (0.3, 5), (0.8, 4), (1.0, 6)):
        count = 0
        for _ in range(20000):
            right = 0
            while right < drafted and rng.random() < share:
                right += 1
            count += right + 1
        assert tokens_per_round(share, drafted) == pytest.approx(count / 20000, rel=0.02)


def test_gains() -> None:
    def cost(tokens: int) -> Cost:
        return Cost(10 * tokens, 90 + 10 * tokens)

    found = gains(cost, 5, None)
    assert [g.drafted for g in found] == [1, 2, 3, 4, 5]
    assert found[0].cost == pytest.approx(1.1) and found[0].speedup(1.0) == pytest.approx(2 / 1.1)
    assert found[0].pays_from == 0.11
    slow = gains(cost, 1, Roof(1e9, 1.0))[0]  # FLOPs alone: nothing is gained
    assert slow.cost == pytest.approx(2) and slow.pays_from is None
    assert [g.drafted for g in gains(cost, 9, None)] == [1, 2, 3, 4, 6, 8, 9]
    table = gains_text([Gain(2, 1.5), slow]).splitlines()
    assert table[1].split() == [
        "2",
        "1.50",
        "0.67x",
        "0.83x",
        "1.04x",
        "1.31x",
        "1.63x",
        "2.00x",
        "37",
        "%",
    ]
    assert table[2].endswith("never")


# --- plan ---------------------------------------------------------------------------------------


def planned(spec: str, k: int, **sizes: int) -> Drafts:
    found = make_plan(load_spec(spec), replace(PLANNED, draft_tokens=k), **sizes).drafts
    assert found
    return found


def test_plan_counts_the_slack_and_what_it_gains() -> None:
    spec = load_spec("tiny-moe")
    plain = make_plan(spec, ctx=64, batch=3)
    made = make_plan(spec, replace(PLANNED, draft_tokens=4), ctx=64, batch=3)
    assert plain.drafts is None and plain.to_dict()["drafts"] is None
    assert made.drafts and made.drafts.slack_bytes > 0
    assert made.rows[0].built - plain.rows[0].built == 3 * made.drafts.slack_bytes
    table = made.to_dict()["drafts"]
    assert table["acceptance"] == list(ACCEPTANCE) and table["tables"][0]["batch"] == 3
    rounds = table["tables"][0]["rounds"]
    assert [r["drafted"] for r in rounds] == [1, 2, 3, 4]
    assert all(r["speedup"] == sorted(r["speedup"]) for r in rounds)
    assert planned("tiny-moe", 4, ctx=2).tables[0][1][0].drafted == 1


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-ple"])
def test_plan_counts_a_drafter(name: str, tmp_path: Path) -> None:
    """As many bytes as an engine gets for it; a round costs its steps too."""
    spec, sizes = load_spec(name), {"ctx": 64, "memory": 1 << 30}
    options = replace(PLANNED, drafter="default", device="cpu")
    plain = make_plan(spec, replace(options, drafter=None, draft_tokens=4), **sizes)
    made = make_plan(spec, options, **sizes)
    assert plain.drafts and made.drafts and made.drafts.drafter == f"{name}-assistant"
    held = [
        param_bytes(prepare(spec, replace(options, drafter=d, random_weights=0)))
        for d in ("default", None)
    ]
    assert made.drafts.drafter_bytes == held[0] - held[1] > 0
    more = made.fits[0].weight_bytes - plain.fits[0].weight_bytes
    assert more == made.drafts.drafter_bytes
    pairs = zip(made.drafts.tables[0][1], plain.drafts.tables[0][1], strict=True)
    extra = [a.cost - b.cost for a, b in pairs]
    assert extra == pytest.approx([extra[0] * k for k in (1, 2, 3, 4)]) and extra[0] > 0
    words = ("plan", "--variant", name, "--drafter")
    assert f"draft model {name}-assistant: " in g4ir(*words, "default").out
    assert "no directory with config.json" in refused(*words, str(tmp_path / "none"))


def param_bytes(p: Prepared) -> int:
    """The bytes of all packed params."""
    return sum(v.type.nbytes() for v in p.packing.program.params().values())


def test_plan_prints_what_drafting_gains() -> None:
    words = ("plan", "--variant", "tiny-moe", "--ctx", "64", "--draft-tokens", "2")
    told = g4ir(*words, "--gpu", "h100-80gb").out
    assert "up to 2 draft tokens: " in told and "at the rates of h100-80gb" in told
    found = json.loads(g4ir(*words, "--json").out)["drafts"]
    assert found["tokens"] == 2 and found["device"] is None
    assert "speculative" not in g4ir(*words[:5]).out
    assert "draft-tokens 33: expected 0 (no drafting) to 32" in refused(
        *words[:5], "--draft-tokens", "33"
    )


# --- show ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("draft") / "e"
    return built(out, "--variant", "tiny-moe", "--random-weights", "0", "--draft-tokens", "3")


def test_show_prints_the_graph(engine: Path) -> None:
    shown = parse(g4ir("show", engine, "--phase", "verify").out)
    assert shown.name == VERIFY and {v.type.shape[0] for v in shown.state} == {"C", 11}
    spec = ("show", "--variant", "tiny-moe", "--phase", "verify")
    assert {v.type.shape[0] for v in parse(g4ir(*spec).out).state} == {"C", 12}
    asked = parse(g4ir(*spec, "--draft-tokens", "7").out)
    assert {v.type.shape[0] for v in asked.state} == {"C", 15}
    plain = parse(g4ir(*spec, "--after", "none").out)
    assert plain == build_graph(load_spec("tiny-moe"), VERIFY)


def test_show_prints_what_it_gains(engine: Path) -> None:
    told = json.loads(g4ir("cost", engine, "--phase", "verify", "--json").out)
    assert told["new_tokens"] == 4 and [r["drafted"] for r in told["drafts"]["rounds"]] == [1, 2, 3]
    assert told["drafts"]["rounds"][2]["cost"] > told["drafts"]["rounds"][0]["cost"] > 1
    text = g4ir("cost", engine, "--phase", "verify", "--gpu", "h100-80gb").out
    assert "speed-up by share of drafts that are right, each by itself, by time" in text
    assert "speed-up" not in g4ir("cost", engine, "--phase", "verify", "--layer", "1").out
    assert "drafts" not in json.loads(g4ir("cost", engine, "--json").out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--phase verify --cost --chunk 4", "--prefill-chunk means nothing in phase verify"),
        ("--phase verify --draft-tokens 0", "shows a step over 1 drafted token or more"),
        ("--ops --draft-tokens 2", "leave out --draft-tokens"),
        ("--phase verify --draft-tokens 40", "draft-tokens 40: expected 0 (no drafting) to 32"),
        ("--phase verify --cost --context 3", "--draft-tokens 4 and one is more than --context 3"),
    ],
)
def test_show_refuses(words: str, said: str) -> None:
    spec = () if "--ops" in words else ("--variant", "tiny-moe")
    assert said in refused("show", *spec, *words.split())


def test_show_of_an_engine_refuses(engine: Path, tmp_path: Path) -> None:
    assert "leave out" in refused("show", engine, "--phase", "verify", "--draft-tokens", "2")
    plain = built(tmp_path / "e", "--variant", "tiny-moe", "--random-weights", "0")
    message = refused("show", plain, "--phase", "verify")
    assert "this engine has embed, prefill, decode; build it with --draft-tokens K" in message
