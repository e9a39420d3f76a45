"""`g4ir compare` against `verify --text`, `score` and the bytes of the weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import g4ir
from g4ir import load_spec
from g4ir.bench import comparison
from g4ir.bench.comparison import weight_size
from g4ir.builder.library import cached_engines
from g4ir.check import llama
from g4ir.plan.count import counts
from g4ir.weights.origin import GgufFile
from tests.cli_tools import g4ir as command
from tests.cli_tools import ok, refused, text_checkpoint
from tests.gguf_files import bare_file
from tests.llama_double import LlamaDouble
from tests.small_bench import small_bench

#: shapes of engines that are built on first use
BUILD = ("--backend", "reference", "--max-seq", "24")
TEXT = "ab w3 a€ w7 w12\nw9 ab a w3\n" * 12


@pytest.fixture(autouse=True)
def small(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_bench(monkeypatch)
    monkeypatch.setattr(comparison, "ROUNDS", 2)
    monkeypatch.setattr(comparison, "MAX_OUTPUT", 2)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "t.txt").write_text(TEXT)
    return tmp_path / "t.txt"


def rows_of(*words: str | Path) -> dict[str, dict[str, Any]]:
    report = json.loads(ok("compare", *words, *BUILD, "--json"))
    return {row["name"]: row for row in report["rows"]}


def test_formats_of_a_checkpoint(tmp_path: Path, text: Path) -> None:
    """Quality is that of `verify --text --checkpoint`; a second run builds nothing."""
    model = text_checkpoint(tmp_path / "c")
    words = (model, "--quant", "none,int4,int4", "--text", text, "--tokens", "40")
    rows = rows_of(*words)
    assert [*rows] == ["c", "int4"]
    scored = (e for e in cached_engines() if "all_logits" in e.options)
    engines = {e.options.get("quant", "c"): e.path for e in scored}
    against = ("--text", text, "--tokens", "40", "--checkpoint", model)
    other = json.loads(ok("verify", engines["int4"], *against, "--json"))
    got, want = ([r[k] for k in ("nll", "ppl", "kl", "same_top")] for r in (rows["int4"], other))
    assert got == pytest.approx(want, rel=1e-6)
    assert rows["c"]["nll"] == pytest.approx(other["baseline_nll"], rel=1e-6)
    with g4ir.load_engine(engines["c"]) as engine:
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


def test_a_quantised_file_and_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats of its dequantised weights; the same file as a further model; llama.cpp."""
    file = bare_file(tmp_path / "a.gguf", load_spec("tiny-moe"), kind="Q8_0")
    other = tmp_path / "b.gguf"
    other.write_bytes(file.read_bytes())
    engine = g4ir.load(file, backend="reference", max_seq=24, all_logits=True)
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
    assert outcome.code == 0 and "no tokenizer: it is compared on random tokens" in outcome.err
    assert "tiny-moe" in plot.read_text() or plot.stat().st_size > 1000
    assert "has no tokenizer.json" in refused(*words, "--text", __file__)
    report = json.loads(ok(*words, "--json"))
    assert report["tokens"] == 24 and report["notes"]
