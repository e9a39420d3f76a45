"""Values inside the plain graph: those of transformers, of a quantised engine's dense form, in all
phases; and what is refused. The model as an nn.Module: a transformers model with the weights of any
MODEL.

`g4ir prove` passes on a right engine, finds each of eight planted faults, and refuses what it
cannot do. Faults are planted in the runtime; the interpreter beside it is the definition.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import g4ir
from g4ir import Engine, G4Error, load_spec
from g4ir.check import prove
from g4ir.check.haystack import haystack
from g4ir.check.modes import compare_modes
from g4ir.check.prove import Prover, check_contexts, check_logits, compare_weights, read_context
from g4ir.engine import scheduler
from g4ir.engine import values as values_module
from g4ir.engine.prefill import PrefixCache
from g4ir.errors import MissingError
from g4ir.ir.graph import Node
from g4ir.ir.interpret import run_node
from tests.cases import TABLES
from tests.cli_tools import g4ir as command
from tests.cli_tools import ok
from tests.configs import cut
from tests.engines import random_checkpoint
from tests.gguf_files import bare_file
from tests.oracle import random_tokens, relative

NAMES = ["L*.out", "L*.attn.probs", "final.norm", "logits", "L*.k.next"]
LIMITS: dict[str, Any] = {"max_seq": 64, "prefill_chunk": 16, "draft_tokens": 3}


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe", "tiny-ple", "tiny-gemma3"])
def test_values_are_those_of_transformers(name: str, phase: str, make_engine: Any) -> None:
    spec, engine = load_spec(name), make_engine(name, **LIMITS)
    ids = random_tokens(spec, 1, 37)
    module = g4ir.module(spec, random_weights=0)
    with torch.no_grad():
        out = module(ids, output_hidden_states=True, output_attentions=True)
    got = engine.values(ids, NAMES, phase)
    want = {f"L{i}.out": t for i, t in enumerate(out.hidden_states[1:-1])}
    want |= {"final.norm": out.hidden_states[-1], "logits": out.logits}
    want |= {f"L{i}.attn.probs": t.transpose(1, 2) for i, t in enumerate(out.attentions)}
    assert all((got[k] - t).abs().max() < 1e-4 for k, t in want.items())
    assert {t.shape[:2] for t in got.values()} == {(1, 37)}


@pytest.mark.parametrize(
    "options", [{"quant": "int4"}, {"quant": "int8", "kv_dtype": "int8", "backend": "torch"}]
)
def test_quantised_engines_have_the_values_of_their_dense_forms(
    options: dict[str, Any], make_engine: Any
) -> None:
    engine = make_engine("tiny-ple", **LIMITS, **options)
    ids = random_tokens(engine.spec, 1, 29)
    with torch.no_grad():
        want = g4ir.module(engine.path)(ids, output_hidden_states=True).hidden_states
    names = [*(f"L{i}.out" for i in range(7)), "final.norm"]
    got = engine.values(ids[0], names)
    assert all((got[k] - t).abs().max() < 1e-4 for k, t in zip(names, want[1:], strict=True))


def test_all_values_into_a_file(tmp_path: Path, make_engine: Any) -> None:
    engine, file = make_engine("tiny-ple", **LIMITS), tmp_path / "v.safetensors"
    ids = [2, 5, 7, *range(20, 40)]
    words = ("run", engine.path, "--tokens", ",".join(map(str, ids)), "--dump-to", file)
    shown = json.loads(ok(*words, "--dump", "**", "--json"))
    want = engine.values(ids, ["**"])
    with safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["tokens"]) == ids
        assert {*opened.keys()} == {*want} == {*shown} and len(want) > 200
        assert all(torch.equal(opened.get_tensor(k), t) for k, t in want.items())
    for name in ("embeds", "L0.ple", "L7.v.next", "L5.attn.q.rope", "ple.stacked"):
        assert want[name].shape[:2] == (1, 23) and shown[name]["shape"] == [*want[name].shape]
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(("tokens", "names", "phase", "message"), TABLES["values"])
def test_refused(tokens: Any, names: Any, phase: str, message: str, make_engine: Any) -> None:
    with pytest.raises(G4Error, match=message):
        make_engine("tiny-ple", **LIMITS).values(tokens, names, phase)


def test_more_than_memory_is_refused(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values_module, "free_memory", lambda: 100)
    with pytest.raises(G4Error, match="name fewer, or write them to a file"):
        make_engine("tiny-ple", **LIMITS).values([2, 3], ["L*.out"])


#: passes that would hide an op inside another; rings and quantised caches stay
FUSED = ["fuse_qkv", "fuse_norm_rope", "fuse_norm_residual", "fuse_glu", "fuse_gate_up"]
PROVED: dict[str, Any] = {
    "max_seq": 288,
    "prefill_chunk": 64,
    "max_batch": 3,
    "draft_tokens": 4,
    "all_logits": True,
    "skip": [*FUSED, "fuse_cache_write"],
}
#: the same, computed faster
FAST = {**PROVED, "skip": (), "backend": "torch"}
#: what rounding may change in fp32
FP32 = {"row": 1e-4, "gap": 2e-4, "kl": 1e-8}
Run = Callable[[Node, list[Any]], Any]


# --- planted faults ---------------------------------------------------------------------------


def planted(op: str, change: Callable[[Node, list[Any]], tuple[Node, list[Any]]]) -> Run:
    """Run nodes of an op as others, or on other operands."""
    return lambda n, args: run_node(*change(n, args) if n.op == op else (n, args))


def forget_first_slot(n: Node, args: list[Any]) -> tuple[Node, list[Any]]:
    """Of a ring."""
    cache = args[0].clone()
    if isinstance(n.inputs[0].type.shape[0], int):
        cache[0] = 0
    return n, [cache, *args[1:]]


def scale_of_another_head(n: Node, args: list[Any]) -> tuple[Node, list[Any]]:
    """The last two bytes of a quantised row are its scale (ops/kv_quant.py)."""
    cache = args[3].clone()
    cache[..., -2:] = cache[..., -2:].roll(1, dims=2)
    return n, [*args[:3], cache, *args[4:]]


def with_window(n: Node, window: int) -> Node:
    return Node(n.op, n.inputs, n.outputs, {**n.attrs, "window": window})


def quantised_head(n: Node, args: list[Any]) -> tuple[Node, list[Any]]:
    if n.inputs[1].name == "embed.table":
        scale = args[1].abs().amax(-1, keepdim=True) / 127
        args = [args[0], (args[1] / scale).round() * scale]
    return n, args


#: full attention sees the newest 128 tokens alone
FAR = planted("attention", lambda n, args: (with_window(n, n.integer("window") or 128), args))
QUANTISED = {"kv_dtype": "int8"}
#: what is wrong, and options of the engine
SHOWN: dict[str, tuple[Run, dict[str, str]]] = {
    "row off by one": (
        planted(
            "cache_write",
            lambda n, args: (n, [*args[:2], args[2] + n.out.name.endswith(".k.next"), args[3]]),
        ),
        {},
    ),
    "forgetful ring": (planted("cache_write", forget_first_slot), {}),
    "scale of another head": (planted("attention", scale_of_another_head), QUANTISED),
    "wrong window": (
        planted(
            "attention", lambda n, args: (with_window(n, max(0, n.integer("window") - 1)), args)
        ),
        {},
    ),
    "quantised head": (planted("linear", quantised_head), {}),
}


def faulty(engine: Engine, run: Run, patch: pytest.MonkeyPatch) -> Engine:
    patch.setattr(engine.runtime, "_run", run)
    patch.setattr(engine.runtime, "_cached", {})
    return engine


@pytest.mark.parametrize("options", [{}, QUANTISED])
def test_a_right_engine(options: dict[str, Any], make_engine: Any) -> None:
    ok, summary, _ = check_logits(make_engine("tiny-ple", **PROVED, **options))
    assert ok, summary


@pytest.mark.parametrize("fault", SHOWN)
def test_faults_that_the_logits_show(
    fault: str, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, options = SHOWN[fault]
    engine = make_engine("tiny-ple", **PROVED, **options)
    ok, summary, data = check_logits(faulty(engine, run, monkeypatch))
    assert ok is False and max(data["relative"]) > data["limits"]["row"], summary


def test_a_loss_beyond_the_short_text_is_found_by_the_needles(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short text ends before it; the early needles are lost, and the late ones are not."""
    engine = make_engine("tiny-ple", **PROVED)
    text = haystack(engine, 288)
    assert read_context(engine, text, FP32)[0]
    faulty(engine, FAR, monkeypatch)
    assert check_logits(engine)[0]
    ok, summary, data = read_context(engine, text, FP32)
    assert ok is False and "differ" in summary, summary
    assert all(b["kl"] < data["limit"] for b in data["buckets"][:4])
    assert all(n["kl"] > data["limit"] for n in data["needles"])


def test_a_draft_accepted_wrongly(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("tiny-ple", **FAST)
    monkeypatch.setattr(scheduler, "_matches_draft", lambda sequence, choice, drafts: bool(drafts))
    ok, summary, data = compare_modes(engine, FP32)
    assert ok is False and [k for k, d in data.items() if d["ok"] is False] == ["drafts"], summary


def test_a_stale_prefix(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that looks up a prefix by its length alone."""

    def lookup(self: PrefixCache, salt: str, keys: Any) -> Any:
        found = [(len(k), s) for (_, k), (s, _) in self._entries.items() if len(k) < len(keys)]
        return found[0] if found else (0, None)

    engine = make_engine("tiny-ple", **FAST)
    ok, summary, data = compare_modes(engine, FP32)
    assert ok and {d["ok"] for d in data.values()} == {True}, summary
    monkeypatch.setattr(PrefixCache, "lookup", lookup)
    monkeypatch.setattr("g4ir.engine.speculative.NgramProposer.propose", lambda *_: [])
    ok, summary, data = compare_modes(engine, FP32)
    assert ok is data["prefix cache"]["ok"] is False and "no n-gram draft" in summary, summary


# --- the report -------------------------------------------------------------------------------


def test_the_report(tmp_path: Path, make_engine: Any, own_home: Any) -> None:
    """JSON and HTML of a command; the second time nothing is computed."""
    engine = make_engine("tiny-ple", **FAST | {"backend": "reference", "quant": "int8"})
    words = ("prove", engine.path, "--ctx", "256")
    first = command(*words, "--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    assert first.code == 0 and "needles found" in first.out, first
    assert "0 of 10 needles found" in first.out and first.out.endswith("\nok\n")
    page = (tmp_path / "a.html").read_text()
    assert page.count("<svg") == 1 and "no part failed" in page and "<script" not in page
    report = json.loads((tmp_path / "a.json").read_text())
    names = ["logits", "modes", "quantisation", "context 256"]
    assert [p["name"] for p in report["parts"]] == names and report["ok"]
    assert report["parts"][2]["data"]["kl"] > 0
    start = time.process_time()
    assert command(*words).out.count("cached") == 3 and time.process_time() - start < 6


def test_a_quantised_file_is_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values, which the engine has too, under its whole path; never without a file."""
    monkeypatch.chdir(tmp_path)
    file = bare_file(tmp_path / "tiny.gguf", load_spec("tiny-dense"), kind="Q8_0")
    limits = {"max_seq": 64, "all_logits": True, "backend": "reference", "dtype": "float32"}
    with g4ir.build(None, tmp_path / "engine", checkpoint=file, **limits) as engine:
        _, summary, data = compare_weights(engine, "tiny.gguf")
        assert summary.endswith(f"against the values of {file}") and abs(data["kl"]) < 1e-9
        assert "give --checkpoint DIR with the original" in compare_weights(engine, None)[1]


def test_the_weights_of_a_hub_id_are_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_home: Any
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--some--tiny"
    random_checkpoint(repo / "snapshots" / "ab12", "tiny-dense")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("ab12")
    for part in ("check_logits", "read_context"):
        monkeypatch.setattr(prove, part, lambda *words: (None, "", {}))
    words = "--quant int8 --ctx 256 --backend reference"
    done = command("prove", "some/tiny", *words.split())
    assert f"against the values of {repo / 'snapshots' / 'ab12'}" in done.out, done


def test_what_is_not_run_is_said(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("tiny-dense", max_seq=288, all_logits=True, backend="torch")
    parts = [*Prover([256], deadline=time.monotonic()).parts("x", engine, True)]
    assert {(p.ok, p.summary.split(":")[0]) for p in parts} == {(None, "not run")}
    parts = [*Prover([]).parts("x", engine, True)]
    modes = parts[1].data
    assert [k for k, d in modes.items() if d["ok"] is None] == ["company", "drafts"]
    assert "max-batch" in parts[1].summary and parts[2].summary == "nothing is quantised"
    now = time.monotonic
    monkeypatch.setattr(prove.time, "monotonic", lambda: now() * 1e3)
    with pytest.raises(prove.OutOfTimeError, match="reached at token"):
        read_context(engine, haystack(engine, 256), FP32, deadline=now() * 1e3 + 0.1)


def test_what_prove_refuses(make_engine: Any) -> None:
    engine = make_engine("tiny-dense", max_seq=288, all_logits=True)
    with pytest.raises(G4Error, match="as much other text and a question take 189 tokens; give"):
        check_contexts(engine, [188])
    with pytest.raises(G4Error, match=r"--ctx 512: .* --max-seq 288; give a shorter one"):
        check_contexts(engine, [512])
    with pytest.raises(G4Error, match="without --all-logits"):
        check_contexts(make_engine("tiny-dense", max_seq=64), [64])
    assert torch.equal(haystack(engine, 256).ids, haystack(engine, 256).ids)


def test_a_short_document_has_all_its_needles(make_engine: Any) -> None:
    engine = make_engine("tiny-dense", max_seq=288, all_logits=True)
    for length in range(189, 216):
        text = haystack(engine, length)
        words = " ".join(map(str, text.ids.tolist()))
        assert all(" ".join(map(str, (*n.key, *n.value))) in words for n in text.needles), length


# --- the module -------------------------------------------------------------------------------

BUDGET = 1e-4
LOGITS: dict[str, Any] = {"backend": "reference", "all_logits": True, "max_seq": 64}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return relative(a, b).max().item()


@pytest.mark.parametrize(
    "name", ["tiny-dense", "tiny-moe", "tiny-ple", "tiny-gemma3", "tiny-media", "tiny-unified"]
)
def test_logits_of_a_module_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    spec = load_spec(name)
    ids = random_tokens(spec, 1, 2 * (spec.text.sliding.window or 8) + 5)
    module = g4ir.module(spec, random_weights=3)
    options = {**LOGITS, "dtype": "float32", "random_weights": 3}
    with g4ir.build(spec, tmp_path / "e", **options) as engine:
        want = engine.session().prefill(ids, all_logits=True)
    out = module(ids, labels=ids, output_hidden_states=True, output_attentions=True)
    assert distance(out.logits, want) < BUDGET
    assert len(out.hidden_states) == len(out.attentions) + 1 == spec.text.num_hidden_layers + 1
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    twin = copy.deepcopy(module)
    assert module.spec == spec and torch.equal(twin(ids).logits, out.logits)


def test_a_module_of_a_checkpoint_and_a_quantised_gguf_file(tmp_path: Path) -> None:
    """The logits of an engine of the same file; codes are the numbers that they stand for."""
    spec = load_spec("tiny-gemma3")
    ids = random_tokens(spec, 1, 30)
    checkpoint = random_checkpoint(tmp_path / "c", spec)
    files = (checkpoint, bare_file(tmp_path / "a.gguf", spec, kind="Q8_0"))
    for i, file in enumerate(files):
        options = {**LOGITS, "dtype": "float32", "checkpoint": file}
        with g4ir.build(None, tmp_path / str(i), **options) as engine:
            want = engine.session().prefill(ids, all_logits=True)
        for model in (file, tmp_path / str(i)):
            assert distance(g4ir.module(model)(ids).logits, want) < BUDGET
    half = g4ir.module(files[0], dtype="bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["tiny-dense", pytest.param("tiny-moe", marks=pytest.mark.full)])
def test_a_module_compiles_without_graph_breaks_and_exports(name: str) -> None:
    module = g4ir.module(cut(load_spec(name), 2))
    if name == "tiny-moe":  # which experts compute which tokens depends on data
        module.set_experts_implementation("batched_mm")
    ids = random_tokens(module.spec, 2, 21)
    want = module(ids, labels=ids)
    got = torch.compile(module, fullgraph=True, backend="aot_eager")(ids, labels=ids)
    assert distance(got.logits, want.logits) < BUDGET
    got.loss.backward()
    length = torch.export.Dim("S", min=2, max=64)
    program = torch.export.export(module, (ids,), dynamic_shapes=({1: length},)).module()
    assert distance(program(ids[:, :9]).logits, module(ids[:, :9]).logits) < BUDGET


def test_a_module_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingError, match=r"g4ir\.module needs transformers.*g4ir\[hf\]"):
        g4ir.module(load_spec("tiny-dense"))
