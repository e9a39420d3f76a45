"""`g4ir bench`: numbers and their spread, agreement, the report and its form. No timings.
`g4ir compare` against `verify --text`, `score` and the bytes of the weights.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir as g4ir_
from g4ir import Engine, load_spec
from g4ir.bench import comparison, roof, run
from g4ir.bench.comparison import weight_size
from g4ir.bench.measure import FLOOR, STATISTICS, Stat, around, speeds, stat
from g4ir.bench.report import SWEEP_KIND, Values, machine_shares, request_costs, speedup, void_roles
from g4ir.bench.roof import Meter, Rates
from g4ir.bench.run import ENGINE_ROLES, agreement, check_specs, run_bench
from g4ir.bench.runners import (
    MODES,
    BenchRunner,
    EngineRunner,
    RequestTiming,
    Workload,
    draw_tokens,
    hf_runner,
    peer_model,
    plan_workload,
    reference_runner,
)
from g4ir.bench.text import (
    ROWS,
    compare_reports,
    compare_text,
    markdown,
    read_reports,
    stat_text,
    text,
)
from g4ir.builder.library import cached_engines
from g4ir.check import llama
from g4ir.check.llama import LlamaSession
from g4ir.engine.speculative import StepCosts
from g4ir.errors import InputError, MissingError
from g4ir.ir.rewrite import drop_dead
from g4ir.plan.cost import Cost, graph_costs, total
from g4ir.plan.count import counts
from g4ir.weights.origin import GgufFile
from tests.cases import TABLES
from tests.cli_tools import PROMPT, built, g4ir, ok, refused, text_checkpoint
from tests.cli_tools import g4ir as command
from tests.engines import CHUNK, MAX_SEQ, random_checkpoint
from tests.gguf_files import bare_file
from tests.llama_double import LlamaDouble
from tests.small_bench import shifted, small_bench
from tests.spies import spy

pytestmark = pytest.mark.usefixtures("own_home")
BENCH = Path(__file__).parents[1] / "bench"
SMALL = Workload(input_len=30, output_len=5, context=0)
DEEP = Workload(input_len=30, output_len=5, batch=3, context=26)
FLAGS = ("--input-len", "6", "--output-len", "4", "--rounds", "2", "--warmup", "0")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """For the fixtures of the module too."""
    with pytest.MonkeyPatch.context() as patch:
        small_bench(patch)
        patch.setattr(comparison, "ROUNDS", 2)
        patch.setattr(comparison, "MAX_OUTPUT", 2)
        yield


@pytest.fixture(scope="module")
def moe(engines: Any) -> Engine:
    return engines("torch", "tiny-moe")


@pytest.fixture(scope="module")
def ple(engines: Any) -> Engine:
    return engines("torch", "tiny-ple")


@pytest.fixture(scope="module")
def report(moe: Engine) -> Values:
    """Of one engine against the interpreter."""
    return run_bench([moe], [SMALL], rounds=3, warmup=1)[0]


def test_a_value_and_its_spread() -> None:
    assert around(5.0, [5.0, 5.0]) == stat([[5.0], [5.0]], max) == Stat(5.0, 5 * FLOOR)
    assert not Stat(10, 1).differs(Stat(12, 1)) and Stat(10, 1).differs(Stat(12.1, 1))
    assert stat_text(Stat(0.00123, 0.0004), 1e3) == "1.23 ± 0.4"
    assert stat_text(Stat(0.25, 0.0125), 1e3) == "250 ± 12"


def test_what_follows_from_samples() -> None:
    w = Workload(4, 3, batch=2)
    slow = [[RequestTiming(0.2, (0.1, 0.3))]] * 2
    rates = {name: s.value for name, s in speeds(w, slow).items()}
    assert rates["prefill_throughput"] == pytest.approx(40)
    assert rates["decode_throughput"] == pytest.approx(10)
    one, two = BenchRunner("engine", "", None), BenchRunner("hf", "", None)
    one.rounds, two.rounds = [[RequestTiming(0.1, (0.05, 0.15))]] * 2, slow
    ratios = speedup(one, two, ())
    assert ratios and [s.value for s in ratios.values()] == pytest.approx([2.0] * 3)
    assert speedup(one, two, {"hf"}) is None
    costs = {"prefill": Cost(400, 50), "decode": Cost(10, 60, 40)}
    shares = machine_shares(slow, [Rates(1e3, 1.0, 1e4)] * 2, costs)
    assert [s.value for s in shares.values()] == pytest.approx([0.5, 0.2])


def test_lengths_left_open_fit(moe: Engine) -> None:
    w = plan_workload([moe.limits])
    assert w.max_len == MAX_SEQ and w.output_len == MAX_SEQ // 4
    assert plan_workload([moe.limits], input_len=MAX_SEQ - 1).output_len == 2
    assert plan_workload([moe.limits], context=MAX_SEQ - 2).max_len == MAX_SEQ


def test_tokens_of_a_text(tmp_path: Path) -> None:
    out = built(tmp_path / "e", "--checkpoint", text_checkpoint(tmp_path / "c"))
    file = tmp_path / "t"
    file.write_text(f"{PROMPT} " * 20)
    flags = ("--text", file, "--json", "-", *FLAGS)
    outcome = g4ir("bench", out, *flags)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["workload"]["text"] == str(file)
    file.write_text("ab")
    assert "1 tokens; 9 are needed" in refused("bench", out, *flags)
    file.write_bytes(b"\xff\xfe\xff")
    assert "not UTF-8" in refused("bench", out, *flags)


SLOW = pytest.param("hf-compile", marks=pytest.mark.full)  # a minute to compile


@pytest.mark.parametrize("mode", ["engine", "reference", "hf", "hf-static", SLOW])
def test_a_runner_goes_back_to_its_depth(engines: Any, ple: Engine, mode: str) -> None:
    """What the rings overwrote since is back: the depth is beyond the window of 8. Each agrees with
    the interpreter."""
    tokens, base = draw_tokens(DEEP, ple), reference_runner(ple, 3)
    if mode in MODES:
        peer = peer_model(ple, engines.checkpoint("tiny-ple"))
        runner: BenchRunner = hf_runner(peer, DEEP.max_len, mode)
    else:
        runner = EngineRunner(ple, 3) if mode == "engine" else base
    for each in (base, runner):
        each.set_context(tokens[:, : DEEP.context])
    want, first, again = (run.request_logits(r, DEEP, tokens) for r in (base, runner, runner))
    torch.testing.assert_close(first, again, rtol=1e-5, atol=1e-5)
    found = agreement(first, want)
    assert found["ok"] and found["cosine"] > 0.9999 and found["count"] == 3 * 5
    runner.set_context(tokens[:, :0])
    empty = run.request_logits(runner, DEEP, tokens)
    assert float((empty - first)[0].abs().max()) > 0.1, "empty rows see no context"


@pytest.mark.parametrize("base, other, equal, ok", TABLES["agreement"])
def test_outputs_are_compared(base: Any, other: Any, equal: int, ok: bool) -> None:
    """Few rows may be far, by a router's choice; what is not a number agrees with nothing."""
    got, want = (torch.tensor(rows, dtype=torch.float32) for rows in (other, base))
    found = agreement(got, want)
    assert (found["equal"], found["ok"]) == (equal, ok)


def test_void_is_who_agrees_with_nobody() -> None:
    def row(role: str, ok: bool) -> Values:
        return {"role": role, "base": "hf", "ok": ok}

    assert void_roles([row("engine", True)]) == set()
    assert void_roles([row("engine", True), row("engine-b", False)]) == {"engine-b"}
    assert void_roles([row("engine", False)]) == {"engine", "hf"}


def test_numbers_of_a_wrong_engine_are_void(moe: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a failed check."""
    (both,) = run_bench([moe, shifted(moe)], [SMALL], rounds=2, warmup=0)
    assert not both["outputs_agree"]
    assert [r["void"] for r in both["runs"]] == [False, True]
    assert both["speedup"] == {"engine-b": None} and both["output_throughput"] > 0
    shown = text(both)
    assert "engine-b against reference: same token" in shown and "DISAGREES" in shown
    assert shown.count("VOID") == len([x for x in shown.splitlines() if "VOID" in x]) > 5
    broken = replace(shifted(moe), path=moe.path)
    monkeypatch.setattr("g4ir.builder.load.load_engine", lambda *_, **__: broken)
    monkeypatch.setattr(Engine, "close", lambda self: None)
    outcome = g4ir("bench", moe.path, *FLAGS, "--json", "-")
    keys = json.loads(outcome.out)
    assert outcome.code == 1 and keys["runs"][0]["void"]
    assert [keys[k] for k in ("output_throughput", "mean_ttft_ms", "p99_itl_ms")] == [None] * 3


def test_drafts_are_measured_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those of the source: drafts that are all rejected, and 70 % right ones."""
    # Measured costs decide how many tokens are drafted: on a busy machine any number.
    monkeypatch.setattr(StepCosts, "add", lambda *_: None)
    monkeypatch.setattr(StepCosts, "is_measured", lambda *_: True)
    options: dict[str, Any] = {"random_weights": 0, "backend": "torch", "max_seq": 64}
    engine = g4ir_.build("tiny-dense", tmp_path / "e", draft_tokens=4, **options)
    words = ("--input-len", "8", "--output-len", "32", "--rounds", "2", "--warmup", "0")
    words += ("--draft", "ngram")
    shown = g4ir("bench", engine.path, *words, "--json", tmp_path / "r.json").out
    drafts = read_reports(tmp_path / "r.json")[0]["drafts"]
    kinds = drafts["by_kind"]
    assert drafts["same_text"] and drafts["draft_tokens"] == 4
    assert [*kinds] == ["none", "ngram", "rejected", "right_70"]
    assert kinds["rejected"]["tokens_per_round"] == kinds["none"]["tokens_per_round"] == 1
    assert kinds["rejected"]["accepted"][0] == 0 and kinds["right_70"]["tokens_per_round"] > 1.5
    assert all(k["tokens_per_second"] > 0 and k["speedup"] > 0 for k in kinds.values())
    assert re.search(r"tokens/s without; ngram x.*; rejected x.*; right_70 x", shown)
    plain = g4ir_.build("tiny-dense", tmp_path / "p", **options)
    outcome = g4ir("bench", plain.path, *words)
    assert outcome.code == 2 and "verifies no drafted tokens" in outcome.err


def test_work_is_the_sum_of_its_chunks(ple: Engine) -> None:
    w = replace(DEEP, batch=2)
    work, g = request_costs(ple, w), ple.program.graphs["prefill"]
    first = graph_costs(drop_dead(replace(g, outputs=())), B=2, S=CHUNK, C=26)
    last = graph_costs(g, B=2, S=30 - CHUNK, C=26 + CHUNK)
    skipped = {n.kind for n in last} - {n.kind for n in first}
    assert skipped == {"head"}, "only the last chunk computes logits"
    assert work["prefill"] == total(first) + total(last)
    steps = [total(graph_costs(ple.program.graphs["decode"], B=2, C=56 + i)) for i in range(4)]
    assert work["decode"].flops == sum(s.flops for s in steps) // 4


def test_the_text_shows_agreement_before_any_speed(report: Values) -> None:
    lines = text(report).splitlines()
    outputs = next(i for i, x in enumerate(lines) if x.startswith("outputs"))
    speed = next(i for i, x in enumerate(lines) if "TTFT" in x)
    assert "same token 4 of 4" in lines[outputs] and outputs < speed
    busy = {**report, "env": {**report["env"], "load_average": 99.0, "busy": True}}
    assert "load 99.0 (busy: times are too long)" in text(busy).splitlines()[0]
    for word in ("MBU", "MFU", "roofline", "tokens/s a user"):
        assert any(word in x for x in lines), word


def saved(folder: Path, values: dict[str, Any], name: str = "r.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("path, value, says", TABLES["damaged reports"], ids=str)
def test_damaged_reports(
    report: Values, tmp_path: Path, path: list[Any], value: Any, says: str
) -> None:
    at = values = json.loads(json.dumps(report))
    assert read_reports(saved(tmp_path, values)) == [report]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    if value == "gone":
        del at[path[-1]]
    file = saved(tmp_path, values)
    message = refused("bench-compare", file, file)
    assert str(file) in message and says in message


def steady(report: Values, ms: float) -> Values:
    """The report with steps that all take as long."""
    run, times = report["runs"][0], {"value": ms, "spread": 0.02 * ms}
    metrics = {**run["metrics"], **{f"itl_{name}": times for name in STATISTICS}}
    return {**report, "runs": [{**run, "metrics": metrics}]}


def test_differences_beyond_the_spreads_are_marked(report: Values, tmp_path: Path) -> None:
    same = compare_reports(report, report)
    assert same["differ"] == 0 and not same["notes"] and len(same["rows"]) == len(ROWS)
    report, other = steady(report, 1.0), steady(report, 100.0)
    found = compare_reports(report, other)
    marked = [r["metric"] for r in found["rows"] if r["differs"]]
    assert marked == [f"itl_{name}" for name in ("p50", "p90", "p99")]
    assert "differs" in compare_text(found)
    a, b = (saved(tmp_path, r, f"{i}.json") for i, r in enumerate((report, other)))
    assert json.loads(g4ir("bench-compare", a, b, "--json").out)["differ"] == 3
    assert g4ir("bench-compare", a, b).code == 0
    assert g4ir("bench-compare", a, b, "--check").code == 1
    assert g4ir("bench-compare", a, a, "--check").code == 0
    for count in (0, 2):
        sweep = saved(tmp_path, {"kind": SWEEP_KIND, "reports": count * [report]}, "s.json")
        said = f"{sweep}: expected one workload, found {count}"
        assert said in refused("bench-compare", a, sweep)


def test_bench_writes_all_its_files(moe: Engine, tmp_path: Path) -> None:
    files = {flag: tmp_path / f"r.{end}" for flag, end in (("--json", "json"), ("--plot", "png"))}
    words = [w for pair in files.items() for w in pair]
    outcome = g4ir("bench", moe.path, *FLAGS, "--context", "9", *words)
    assert outcome.code == 0, outcome.err
    (made,) = read_reports(files["--json"])
    assert made["workload"]["context"] == 9
    assert text(made).splitlines() == outcome.out.splitlines()
    table = g4ir("bench", files["--json"], files["--json"], "--table").out.splitlines()
    assert table[0].startswith("|  | input | batch | TTFT, ms |") and len(table) == 4
    assert table[2] == table[3] and table[2].startswith(f"| {moe.path.name} | ")
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")


def test_several_sizes_are_one_table(
    ple: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are compared on the first tokens, once for each batch size; a report's table is that
    of its run, and its spreads are in it."""
    calls = list[Any]()
    spy(monkeypatch, run, "compare_outputs", lambda *given: calls.append(given))
    words = ("--input-len", "33,40", "--batch", "1,2", *FLAGS[2:], "--json", tmp_path / "s.json")
    done = g4ir("bench", ple.path, *words, "--plot", tmp_path / "s.svg")
    assert done.code == 0 and len(calls) == 2, done.err
    rows = [line.split(" | ") for line in done.out.splitlines()]
    assert [row[1:3] for row in rows[2:]] == [["33", "1"], ["40", "1"], ["33", "2"], ["40", "2"]]
    assert all("±" in cell for row in rows[2:] for cell in row[3:])
    reports = read_reports(tmp_path / "s.json")
    assert [a["count"] for r in reports for a in r["agreement"]] == [4, 4, 8, 8]
    assert [r["max_concurrency"] for r in reports] == [r["num_prompts"] / 2 for r in reports]
    assert g4ir("bench", tmp_path / "s.json", "--table").out == done.out


def test_two_engines_and_a_peer_in_one_run(engines: Any, moe: Engine, tmp_path: Path) -> None:
    """A compiled engine, the interpreter and transformers agree and are told apart."""
    reference = engines("reference", "tiny-moe")
    peers = ("--peer", "hf", "--peer", "hf-static", "--checkpoint", engines.checkpoint("tiny-moe"))
    outcome = g4ir("bench", moe.path, reference.path, *FLAGS, *peers, "--json", "-")
    assert outcome.code == 0, outcome.err
    made = json.loads(outcome.out)
    assert [r["role"] for r in made["runs"]] == ["engine", "engine-b", "hf", "hf-static"]
    names = [moe.path.name, reference.path.name]
    if names[0] == names[1]:
        names = [f"{name} ({role})" for name, role in zip(names, ENGINE_ROLES, strict=True)]
    assert [r["name"] for r in made["runs"]] == [*names, None, None]
    heads = text(made)
    assert any(line.split()[:2] == names for line in heads.splitlines())
    assert f"{names[0]} over {names[1]}" in heads
    rows = markdown([made]).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {n}" for n in (*names, "hf", "hf-static")]
    assert {a["base"] for a in made["agreement"]} == {"hf"}
    assert all(a["ok"] and a["cosine"] > 0.9999 for a in made["agreement"])
    assert made["speedup"].keys() == {"engine-b", "hf", "hf-static"}


def test_engines_of_two_variants_cannot_agree(moe: Engine, ple: Engine) -> None:
    assert "their outputs cannot agree" in refused("bench", moe.path, ple.path)
    spec = load_spec("tiny-moe")  # files of one model may have other names
    check_specs({"a": spec, "b": replace(spec, name="other", hub="some/other")})


@pytest.fixture
def gguf(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, LlamaDouble]]:
    """A GGUF file, and a llama.cpp that computes as the interpreter does; a home of its own."""
    file = bare_file(own_home / "tiny.gguf", load_spec("tiny-moe"), kind="Q8_0")
    words = ("--backend", "reference", "--checkpoint", file, "--max-batch", "2", "--max-seq", "64")
    engine = g4ir_.load_engine(built(own_home / "own", *words))
    double = LlamaDouble(engine)
    monkeypatch.setitem(sys.modules, "llama_cpp", double)
    llama.binding.cache_clear()
    yield file, double
    engine.close()
    llama.binding.cache_clear()


@pytest.mark.parametrize("off", [0.0, 30.0])
def test_llama_cpp_on_the_same_file(off: float, gguf: tuple[Path, LlamaDouble]) -> None:
    """In one command from the file; two rows at a depth that is held again for each request."""
    file, double = gguf
    double.off = off
    build = ("--backend", "reference", "--max-seq", "64", "--max-batch", "2")
    words = ("--batch", "2", "--context", "5", "--peer", "llama.cpp", "--json", "-")
    outcome = g4ir("bench", file, *build, *FLAGS, *words)
    assert outcome.code == (off > 0), outcome
    made = json.loads(outcome.out)
    peer = made["runs"][1]
    assert [r["role"] for r in made["runs"]] == ["engine", "llama.cpp"]
    assert peer["label"] == "llama-cpp-python 0.0 (tiny.gguf)"
    assert len(double.threads) == 1 and threading.get_ident() not in double.threads
    agree = {a["role"]: a["ok"] for a in made["agreement"]}
    assert agree == {"engine": True, "llama.cpp": off == 0}
    assert (made["speedup"]["llama.cpp"] is None) == peer["void"] == (off > 0)
    assert ("| llama.cpp | 6 | 2 | VOID " in markdown([made])) == (off > 0)


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_a_script_measures_what_agrees(
    gguf: Any, off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """bench/peer_llama.py refuses an engine whose logits are not llama.cpp's."""
    file, double = gguf
    double.off = off
    out = built(tmp_path / "e", "--checkpoint", file, "--max-seq", "64", "--max-batch", "1")
    monkeypatch.syspath_prepend(BENCH)
    words = ("--input-len", "40", "--steps", "2", "--rounds", "1")
    monkeypatch.setattr(sys, "argv", ["peer_llama.py", str(out), str(file), *words])
    refused = importlib.import_module("peer_llama").main()
    if off:
        assert "cosine to llama.cpp's is 0." in refused and "expected 0.98 or more" in refused
    assert (refused is None) == ("prompt of 40, tokens/s" in capsys.readouterr().out) == (not off)


def test_files_that_llama_cpp_does_not_read(
    gguf: tuple[Path, LlamaDouble], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, double = gguf
    peer = (*FLAGS, "--peer", "llama.cpp")
    seeded = built(tmp_path / "seeded", "--variant", "tiny-moe", "--random-weights", "0")
    assert "random weights, no GGUF file; bench one" in refused("bench", seeded, *peer)
    folder = random_checkpoint(tmp_path / "checkpoint", "tiny-moe")
    words = ("bench", seeded, *peer, "--checkpoint", folder)
    assert f"{folder} is no GGUF file; bench one" in refused(*words)
    with pytest.raises(MissingError, match="runs on CPUs alone"):
        LlamaSession(file, 1, 8, "cuda")
    (tmp_path / "other").write_bytes(b"....")
    with pytest.raises(InputError, match=r"llama.cpp: cannot load .*other: not GGUF"):
        LlamaSession(tmp_path / "other", 1, 8)
    monkeypatch.setattr(double, "llama_decode", lambda *_: 1)
    runner = LlamaSession(file, 1, 8)
    with pytest.raises(InputError, match="llama_decode of 1 x 2 tokens failed with code 1"):
        runner.step(torch.tensor([[2, 5]]))


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    llama.binding.cache_clear()
    for module, words, extra in (
        ("transformers", ("--peer", "hf"), "pip install 'g4ir[hf]'"),
        ("llama_cpp", ("--peer", "llama.cpp"), "pip install llama-cpp-python"),
        ("matplotlib.figure", ("--plot", "x.png"), "g4ir[plot]"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        assert extra in refused("bench", "engine", *words, code=3)


#: shapes of engines that are built on first use
BUILD = ("--backend", "reference", "--max-seq", "24")
TEXT = "ab w3 a€ w7 w12\nw9 ab a w3\n" * 12


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    (tmp_path / "t.txt").write_text(TEXT)
    return tmp_path / "t.txt"


def rows_of(*words: str | Path) -> dict[str, dict[str, Any]]:
    report = json.loads(ok("compare", *words, *BUILD, "--json"))
    return {row["name"]: row for row in report["rows"]}


def test_formats_of_a_checkpoint(tmp_path: Path, text_file: Path) -> None:
    """Quality is that of `verify --text --checkpoint`; a second run builds nothing."""
    model = text_checkpoint(tmp_path / "c")
    words = (model, "--quant", "none,int4,int4", "--text", text_file, "--tokens", "40")
    rows = rows_of(*words)
    assert [*rows] == ["c", "int4"]
    scored = (e for e in cached_engines() if "all_logits" in e.options)
    engines = {e.options.get("quant", "c"): e.path for e in scored}
    against = ("--text", text_file, "--tokens", "40", "--checkpoint", model)
    other = json.loads(ok("verify", engines["int4"], *against, "--json"))
    got, want = ([r[k] for k in ("nll", "ppl", "kl", "same_top")] for r in (rows["int4"], other))
    assert got == pytest.approx(want, rel=1e-6)
    assert rows["c"]["nll"] == pytest.approx(other["baseline_nll"], rel=1e-6)
    with g4ir_.load_engine(engines["c"]) as engine:
        elements = counts(engine.spec).text
    assert {r["elements"] for r in rows.values()} == {elements}
    bits = {name: r["bits_per_weight"] for name, r in rows.items()}
    assert bits["c"] == 32 and 4 < bits["int4"] < 10
    assert rows["c"]["kl"] is None and rows["int4"]["kl"] > 0
    assert all(r[rate]["value"] > 0 for r in rows.values() for rate in comparison.RATES)
    built = {e.path: e.path.stat().st_mtime_ns for e in cached_engines()}
    table = ok("compare", *words, *BUILD).splitlines()
    assert {e.path: e.path.stat().st_mtime_ns for e in cached_engines()} == built
    assert table[0].startswith("|  | weights | bits a weight | NLL | perplexity | KL |")
    assert len(table) == 4 and table[2].startswith("| c | ") and " | - | - | " in table[2]


def test_quant_is_for_the_first_model(tmp_path: Path) -> None:
    """An engine as a further row has no --quant; here it refuses other flags of its build."""
    file = bare_file(tmp_path / "a.gguf", load_spec("tiny-moe"))
    with g4ir_.build("tiny-moe", tmp_path / "e", backend="reference", random_weights=0) as e:
        message = refused("compare", file, e.path, *BUILD, "--quant", "int4")
    assert "/e is an engine, and --backend, --max-seq belong to its build" in message


def test_a_quantised_file_and_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats of its dequantised weights; the same file as a further model; llama.cpp."""
    file = bare_file(tmp_path / "a.gguf", load_spec("tiny-moe"), kind="Q8_0")
    other = tmp_path / "b.gguf"
    other.write_bytes(file.read_bytes())
    engine = g4ir_.load(file, backend="reference", max_seq=24, all_logits=True)
    monkeypatch.setitem(sys.modules, "llama_cpp", LlamaDouble(engine, 0.5))
    llama.binding.cache_clear()
    rows = rows_of(file, "--quant", "int4", other, "--peer", "llama.cpp", "--tokens", "40")
    llama.binding.cache_clear()
    stored = GgufFile(file).open(engine.spec, (), "f32").headers[0].entries.values()
    assert [*rows] == ["a", "int4", "b", "llama.cpp, a", "llama.cpp, b"]
    same, double = rows["b"], rows["llama.cpp, a"]
    assert abs(same["kl"]) < 1e-12 and same["same_top"] == 1 and rows["int4"]["kl"] > 1e-4
    assert (rows["a"]["bytes"], rows["a"]["elements"]) == weight_size(engine)
    # Equal shifts of all logits change no probability.
    assert double["nll"] == pytest.approx(rows["a"]["nll"], abs=1e-5) and double["same_top"] == 1
    assert double["bytes"] == sum(e.nbytes for e in stored)


def test_without_a_tokenizer_and_as_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "p.svg"
    words = ("compare", "tiny-moe", "--random-weights", "0", *BUILD, "--quant", "int8")
    outcome = command(*words, "--plot", plot)
    assert outcome.code == 0 and "no tokenizer: scored on random tokens" in outcome.err
    assert "tiny-moe" in plot.read_text() or plot.stat().st_size > 1000
    assert "has no tokenizer.json" in refused(*words, "--text", __file__)
    report = json.loads(ok(*words, "--json"))
    assert report["tokens"] == 24 and [report["text"]] == report["notes"]


@pytest.mark.parametrize(("rate", "best"), [(0.5, torch.float32), (2, torch.bfloat16)])
def test_the_dtype_of_products_is_chosen_by_small_ones(
    rate: float, best: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large product in bf16 takes 40 s on a CPU without such instructions."""
    tried = list[torch.Size]()

    def flop_rate(_: Meter, matrix: torch.Tensor) -> float:
        tried.append(matrix.shape)
        return rate if matrix.dtype == torch.bfloat16 else 1

    monkeypatch.setattr(roof, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setitem(roof.SIDES, "cpu", 1024)
    monkeypatch.setattr(Meter, "_flop_rate", flop_rate)
    meter = Meter("cpu", torch.bfloat16)
    assert meter.matrix.dtype == best and meter.matrix.shape == (1024, 1024)
    assert len(tried) == 2 and max(map(max, tried)) <= 256
