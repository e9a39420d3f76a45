"""`verify_engine`: sound engines pass, disturbed ones fail with the value that differs. Values that
are not finite: no token is drawn from them, and checks name the first.
`verify --each-pass`: sound pipelines pass in every dtype, broken passes are named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir import Engine, Spec, build, export, load_spec
from g4ir import passes as pipeline
from g4ir.backends.base import GraphRun
from g4ir.backends.cpu import step_program
from g4ir.bench.runners import hf_runner
from g4ir.check import compare, peers
from g4ir.check import logits as check_logits
from g4ir.check.compare import Comparison, ForcedRuntime
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.check.reference import reference_engine
from g4ir.check.stage_report import StageReport, StagesReport, describe_value
from g4ir.check.stages import (
    BACKEND,
    STORED,
    StageRun,
    StageWeights,
    chunks_of_tokens,
    plain_params,
    stages_of,
)
from g4ir.check.tokens import Turns, plain_ids, random_ids
from g4ir.errors import CheckError, EngineError, InputError, MissingError, SpecError, WeightsError
from g4ir.ir.distance import TOLERANCES, Tolerance, row_errors
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.rewrite import rebuild
from g4ir.model.names import checkpoint_name
from g4ir.ops import OPS
from g4ir.ops.base import Sample, op
from g4ir.ops.budgets import MOVES, Budget
from g4ir.ops.types import Type
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests import cli_tools as cli
from tests.cases import TABLES, read_table
from tests.cli_tools import g4ir as command
from tests.configs import short, spec_called
from tests.engines import MAX_SEQ, changed, random_checkpoint, rewrite, some_tokens
from tests.oracle import find_oracle


def disturbed(engine: Engine, param: str, factor: float = 0.3) -> Engine:
    """The engine on the reference backend, with one weight changed after loading (not by a
    factor, which the next norm would take out)."""
    return changed(engine, {param: lambda t: t + factor * t.flip(0)})


@pytest.mark.covering
def test_given_tokens(engines: Any) -> None:
    report = verify_engine(engines("reference", "tiny-ple"), tokens=[*range(5, 5 + MAX_SEQ)])
    assert report.ok and sum(report.turns) == MAX_SEQ


@pytest.mark.parametrize("spec", ["tiny-ple", "tiny-moe"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("against", ["reference", "hf"])
def test_sound_engine(engines: Any, backend: str, spec: str, against: str) -> None:
    engine, said = engines(backend, spec), list[str]()
    checkpoint = engines.checkpoint(spec)
    report = verify_engine(engine, against, checkpoint=checkpoint, progress=said.append)
    assert report.ok and report.first_difference is None
    assert report.budget == TOLERANCES["f32", against]
    assert sum(report.turns) == 96 and report.turns[-24:] == (1,) * 24
    assert len(report.positions) == (96 if engine.all_logits else len(report.turns))
    assert report.greedy.equal == report.greedy.count == 16
    assert any("through the engine" in s for s in said)


@pytest.mark.parametrize(
    ("backend", "quant"), short(("onnx", "int8"), of=[("reference", "none"), ("onnx", "int8")])
)
def test_random_weights_against_hf(backend: str, quant: str, tmp_path: Path) -> None:
    """Transformers gets those of the seed, which an engine keeps that stores its weights too."""
    options: dict[str, Any] = {"backend": backend, "quant": quant, "max_seq": 32}
    engine = g4ir.build("tiny-moe", tmp_path / "e", random_weights=3, **options)
    assert engine.manifest["weights"]["seed"] == 3
    report = verify_engine(engine, "hf")
    assert report.ok, report.text()
    passes = verify_each_pass(engine)
    assert passes.ok and "--checkpoint" not in passes.text()


def test_a_config_that_transformers_refuses(make_engine: Any, monkeypatch: Any) -> None:
    """Its strict classes have errors of their own."""
    engine = make_engine("tiny-moe", max_seq=64)
    broken = {**engine.spec.to_hf(), "head_dim": 32.5}
    monkeypatch.setattr(type(engine.spec), "to_hf", lambda spec: broken)
    said = r"transformers cannot load the config of spec tiny-moe: .*head_dim"
    with pytest.raises(InputError, match=said):
        verify_engine(engine, "hf")


def test_linked_checkpoint_is_found(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "tiny-dense")
    options: dict[str, Any] = {"checkpoint": checkpoint, "backend": "reference", "max_seq": 64}
    linked = g4ir.build(None, tmp_path / "linked", link_weights=True, **options)
    assert verify_engine(linked, "hf", tokens=[5, 6, 7]).ok
    packed = g4ir.build(None, tmp_path / "packed", **options)
    with pytest.raises(InputError, match="give it with --checkpoint"):
        verify_engine(packed, "hf")


@pytest.mark.covering
@pytest.mark.parametrize("param, value, against", TABLES["verify"]["disturbed"])
def test_disturbed_weight_is_found(engines: Any, against: str, param: str, value: str) -> None:
    engine = disturbed(engines("reference", "tiny-ple"), param)
    checkpoint, ids = engines.checkpoint("tiny-ple"), some_tokens(1, 20)[0].tolist()
    report = verify_engine(engine, against, ids, checkpoint)
    assert not report.ok
    assert report.first_difference and f"%{value}" in report.first_difference
    assert ("outside the layers" in report.first_difference) == (param == "ple.w")
    assert "FAILED" in report.text() and report.first_difference in report.text()


def test_a_wrong_product_is_named(engines: Any) -> None:
    """Step programs show what stands between layers, and are forced there: what is wrong before is
    not that of the layers behind."""
    engine = engines("torch", "tiny-moe")
    weight = engine.runtime.resident("L2.attn.wo")
    assert weight is not None
    before = weight.clone()
    weight.copy_(before + 0.3 * before.flip(0))
    try:
        report = verify_engine(engine, tokens=some_tokens(1, 20)[0].tolist())
    finally:
        weight.copy_(before)
    assert not report.ok and report.first_difference
    assert report.first_difference.startswith(
        "%L2.attn.o (layer 2) in the chunk at token 0: error "
    )


def test_a_place_is_that_of_its_layer() -> None:
    for name, layer in (("L3.out", "layer 3"), ("final.norm", "outside the layers")):
        assert describe_value(name, 7) == f"%{name} ({layer}) in the chunk at token 7"
    assert "(layer 1)" in describe_value("r0.L1.attn.o.part", 0)


def turned(engine: Engine, turned_phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of a phase see other positions."""
    run: Callable[..., Any] = engine.runtime.run

    def faulty(step: GraphRun, state: Any) -> Any:
        moved = {**step.feeds, "positions": step.feeds["positions"] + 1}
        return run(replace(step, feeds=moved) if step.phase == turned_phase else step, state)

    monkeypatch.setattr(engine.runtime, "run", faulty)


def test_a_fault_of_decoding_only(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns end in single steps: a fault there shows, and where."""
    engine = reference_engine(engines("reference", "tiny-ple"))
    turned(engine, "decode", monkeypatch)
    report = verify_engine(engine)
    assert not report.ok
    assert next(p.at for p in report.positions if not p.ok) == 72
    assert report.first_difference and "at token 72" in report.first_difference


def test_measured_rounding(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 on this very model, with sound weights; four times as much is allowed."""
    monkeypatch.setitem(TOLERANCES, ("f32", "reference"), Tolerance(relative=1e-9))
    assert not verify_engine(disturbed(engines("reference", "tiny-ple"), "L3.attn.wo", 0.01)).ok
    engine = engines("torch", "tiny-ple")
    report = verify_engine(engine)
    given = Turns(random_ids(engine, (96,)), report.turns, engine.all_logits)
    rounding = check_logits.rounding_error(engine, given)
    assert 1e-7 < rounding < 1e-4 and report.budget == Tolerance(relative=4 * rounding)


def test_report(engines: Any) -> None:
    report = verify_engine(engines("reference", "tiny-ple"))
    values = json.loads(json.dumps(report.to_dict()))
    assert values["ok"] is True and len(values["positions"]) == 96
    assert values["budget"] == {"relative": 1e-4, "cosine": None, "rounding": None}
    assert values["positions"][0].keys() == vars(report.positions[0]).keys()
    text = report.text()
    lines = text.splitlines()
    assert lines[0].endswith("against reference, 96 tokens in 63 + 9 + 24 single steps")
    assert lines[-1] == "ok" and len(lines) <= 10 and all(len(x) <= 100 for x in lines)
    for word in ("max abs", "relative", "cosine", "greedy", "16 of 16 equal", "1.0e-04"):
        assert word in text
    assert not replace(report, greedy=replace(report.greedy, differs=4)).ok
    worse = replace(report.positions[3], ok=False)
    assert not replace(report, positions=(*report.positions[:3], worse)).ok


class Fixed:
    """A peer that writes these tokens; the two best of its logits are 1e-3 apart, 16 times their
    rms of 0.0625 is 1."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = [*tokens, *[1] * 30]

    def greedy(self, prompt: torch.Tensor, count: int, ids: torch.Tensor) -> Any:
        logits = torch.zeros(count, 512)
        logits[:, 1], logits[:, 2] = 1.0, 1.0 - 1e-3
        return self.tokens[:count], logits


@pytest.mark.parametrize("tokens, budget, equal, differs", TABLES["verify"]["close calls"])
def test_close_calls_may_go_either_way(
    tokens: list[int], budget: dict[str, float], equal: int, differs: int | None
) -> None:
    both: Any = Fixed(*tokens), Fixed()
    found = check_logits._compare_greedy(
        *both, torch.arange(9), 40, torch.arange(512), Tolerance(**budget)
    )
    assert (found.equal, found.differs) == (equal, differs)


def test_greedy_tokens_are_no_placeholders_of_media(make_engine: Any) -> None:
    """Their embeddings are those of media: transformers' text model has others."""
    engine = make_engine("tiny-media")
    ids, image = plain_ids(engine), engine.spec.tokens.image
    assert image not in ids.tolist() and len(ids) == engine.spec.text.readable_ids - 3
    logits = torch.arange(512.0)[None] + 1e3 * (torch.arange(512) == image)
    tokens, chosen = peers._greedy(logits, lambda token: logits, 2, ids)
    assert tokens == [int(ids[-1])] * 2 and chosen.shape == (2, len(ids))


def test_checkpoint_of_another_shape(engines: Any) -> None:
    with pytest.raises(SpecError, match=r"text\.num_hidden_layers"):
        engine = engines("reference", "tiny-moe")
        verify_engine(engine, "hf", checkpoint=engines.checkpoint("tiny-ple"))


def test_last_rows_of_layers_that_share_keys_without_per_layer_embeddings() -> None:
    """Transformers 5.24 fails there unless rows are asked for by index: verify and bench do."""
    oracle = find_oracle(spec_called("random-14"))
    text, prompt = oracle.spec.text, oracle.tokens[0, :9]
    assert text.num_kv_shared_layers and not text.ple
    tokens, _ = peers.HfPeer(oracle.model).greedy(prompt, 3, torch.arange(text.vocab_size))
    whole = oracle.run(torch.cat((prompt, torch.tensor(tokens)))[None])
    assert tokens == whole[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    for mode in ("hf", "hf-static"):
        runner = hf_runner(oracle.model, 16, mode)
        assert runner.step(prompt[None]).argmax().item() == tokens[0]
        assert runner.step(torch.tensor([tokens[:1]])).argmax().item() == tokens[1]


def test_without_transformers(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    engine = engines("reference", "tiny-moe")
    with pytest.raises(MissingError, match=r"pip install 'g4ir\[hf\]'"):
        verify_engine(engine, "hf", checkpoint=engines.checkpoint("tiny-moe"))
    assert verify_engine(engine, tokens=[5, 6, 7]).ok


NORM = "layers.2.post_feedforward_layernorm.weight"
ADVICE = "bfloat16 rarely overflows: look for damaged weights"


def large_checkpoint(folder: Path, value: float) -> Path:
    """One norm's weight is large: what it makes is up to a few times as large."""
    spec = load_spec("tiny-dense")
    write_checkpoint(folder, spec, random_weights(spec, 0, torch.float32))
    return rewrite(folder, lambda tensors: tensors[f"model.{NORM}"].fill_(value))


def built(folder: Path, value: float) -> Engine:
    options = {"backend": "reference", "dtype": "bfloat16", "max_seq": 64, "prefill_chunk": 16}
    checkpoint = large_checkpoint(folder / "checkpoint", value)
    return build(load_spec("tiny-dense"), folder / "engine", checkpoint=checkpoint, **options)


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Its weights are finite, what layer 2 adds up is not."""
    return built(tmp_path_factory.mktemp("overflowing"), 3e38)


def test_bf16_has_the_range(tmp_path: Path) -> None:
    """Of values beyond float16's, as trained models have them."""
    engine = built(tmp_path, 60_000.0)
    assert len(engine.generate([2, 5, 7], max_new_tokens=4)) == 4
    ids = some_tokens(1, 20)[0].tolist()
    assert verify_engine(engine, tokens=ids).ok and verify_each_pass(engine, ids).ok


def test_no_token_is_drawn_from_nan(overflowing: Engine, tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"logits after 3 tokens: NaN or infinite") as refused:
        overflowing.generate([2, 5, 7], max_new_tokens=4)
    assert ADVICE in str(refused.value) and str(overflowing.path) in str(refused.value)
    done = command("run", overflowing.path, "--tokens", "2,5,7")
    assert done.code == 1 and ADVICE in done.message and not done.out
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"tokens": [2, 5, 7]}\n{"tokens": []}\n')
    done = command("run", overflowing.path, "--input-jsonl", lines)
    first, second = (json.loads(line)["error"] for line in done.out.splitlines())
    assert ADVICE in first and "prompt is empty" in second


def test_verify_fails_and_names_the_value(overflowing: Engine) -> None:
    """Though the interpreter, on the same weights, makes the same."""
    report = verify_engine(overflowing, tokens=some_tokens(1, 20)[0].tolist())
    assert not report.ok and not any(p.ok for p in report.positions)
    assert report.first_difference is not None
    assert report.first_difference.startswith("%L2.out (layer 2) in the chunk at token 0: NaN or")
    assert ADVICE in report.text() and report.text().endswith("FAILED")


def test_no_pass_is_blamed(overflowing: Engine) -> None:
    with pytest.raises(CheckError, match=r"%L2\.\S+ \(layer 2\).*NaN or infinite"):
        verify_each_pass(overflowing)


def test_float16_becomes_bfloat16(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without --dtype, and says so; float32 is taken if asked for, and rounds nothing."""
    spec = replace(load_spec("tiny-dense"), dtype="f16")
    write_checkpoint(tmp_path / "c", spec, random_weights(spec, 0, torch.float16))
    for dtype, name in ((None, "bf16"), ("float32", "f32")):
        caplog.clear()
        options = {"backend": "reference", "max_seq": 32, "dtype": dtype}
        engine = build(None, tmp_path / name, checkpoint=tmp_path / "c", **options)
        assert engine.dtype == name and len(engine.generate([2, 5, 7], 2)) == 2
        assert ("is float16, and becomes bfloat16; --dtype float32" in caplog.text) is not dtype


def test_a_weight_that_does_not_fit_an_export(tmp_path: Path) -> None:
    checkpoint = large_checkpoint(tmp_path / "c", 1e6)
    rewrite(checkpoint, lambda tensors: tensors[f"model.{NORM}"][:1].fill_(torch.nan))
    with pytest.raises(WeightsError, match=rf"{NORM}: 1e\+06 does not fit float16.*bfloat16"):
        export(checkpoint, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_never_equal(value: float) -> None:
    rows = torch.randn(3, 8)
    rows[1, 2] = value
    errors = row_errors(rows, rows.clone())
    for found in (errors.absolute, errors.relative, errors.cosine):
        assert found[1].isnan()


PASSES = pipeline.PASSES

Breaker = Callable[[Graph], Graph]


LIMITS: dict[str, Any] = {"backend": "reference", "max_seq": 64, "prefill_chunk": 16}


def build_engine(folder: Path, spec: Spec | None, dtype: str, **options: Any) -> Engine:
    weights = {} if "checkpoint" in options else {"random_weights": 1}
    return g4ir.build(spec, folder, dtype=dtype, **LIMITS, **weights, **options)


@pytest.fixture(scope="module")
def ple(make_engine: Any) -> Engine:
    """Per-layer embeddings, shared caches, a narrow tail; in bf16."""
    return make_engine("tiny-ple", dtype="bfloat16", random_weights=1, **LIMITS)


@pytest.fixture(scope="module")
def moe(make_engine: Any) -> Engine:
    """Experts, K=V; in fp32."""
    return make_engine("tiny-moe", dtype="float32", random_weights=1, **LIMITS)


def sound(engine: Engine) -> StagesReport:
    report = verify_each_pass(engine)
    assert report.ok and report.culprit is None, report.text()
    skipped = engine.config.skip
    assert [s.name for s in report.stages] == [p for p in PASSES if p not in skipped] + [BACKEND]
    assert all(s.excused == 0 for s in report.stages)
    still = {s.name for s in report.stages if not s.values}
    routed = {"fuse_moe"}
    asked = {"latent_kv", "narrow_kv", "quantize_activations"}
    assert still <= {"last_token_only", "fuse_cache_write", *asked, *routed}
    assert still & routed == (set() if engine.spec.text.moe else routed)
    assert ("fuse_cache_write" in still) == ("fuse_qkv" in skipped), "it needs packed projections"
    for s in report.stages:
        assert all(w.error <= w.budget for w in s.worst)
    return report


#: spec, dtype, whether it holds packed weights of a checkpoint, options of the build
SOUND, SOUND_TOO = ([(*row,) for row in TABLES["stages"][kind]] for kind in ("sound", "sound too"))


@pytest.mark.parametrize(
    "case", [*SOUND, *(pytest.param(c, marks=pytest.mark.full) for c in SOUND_TOO)], ids=str
)
def test_no_false_alarm(tmp_path: Path, case: tuple[str, str, bool, dict[str, Any]]) -> None:
    """A packed engine holds concatenated weights; what they were is read off its prologue."""
    name, dtype, packed, options = case
    spec = spec_called(name)
    if packed:
        options = {**options, "checkpoint": random_checkpoint(tmp_path / "c", name)}
    sound(build_engine(tmp_path / "e", None if packed else spec, dtype, **options))


@pytest.mark.parametrize("name", ["tiny-moe", pytest.param("tiny-ple", marks=pytest.mark.full)])
def test_compiled_backend(engines: Any, name: str) -> None:
    report = sound(engines("torch", name))
    assert report.stages[-1].values > 100
    assert 0 < max(w.error for w in report.stages[-1].worst) < 1e-4


def test_chunks(engines: Any) -> None:
    """A chunk longer than the window after a shorter one, then single steps; chunks are cut to
    the engine's size, and end in padding."""
    engine = engines("reference", "tiny-ple")
    report = sound(engine)
    assert report.chunks == (5, 9, 3, 1, 1, 1, 1) and report.tokens == 21
    assert verify_each_pass(engine, tokens=[5, 6, 7]).chunks == (1, 1, 1)
    ids = torch.arange(40)
    chunks = [*chunks_of_tokens(ids, 8, 8)]
    assert [c.valid for c in chunks] == [6, 6, 6, 6, 6, 3, 3] + [1] * 4
    assert all(c.inputs["tokens"].shape[1] == c.valid + 2 <= 8 for c in chunks[:7])
    assert torch.cat([c.inputs["tokens"][0, : c.valid] for c in chunks]).equal(ids)
    assert [c.at for c in chunks] == [sum(c.valid for c in chunks[:i]) for i in range(11)]
    assert {c.phase for c in chunks_of_tokens(ids, 8, 1)} == {"decode"}


def break_pass(monkeypatch: pytest.MonkeyPatch, name: str, breaker: Breaker) -> None:
    """The pass, with its result altered."""
    found = pipeline.find_pass

    def find(asked: str) -> Any:
        function = found(asked)
        if asked != name:
            return function
        return lambda g, note, **options: breaker(function(g, note, **options))

    monkeypatch.setattr(pipeline, "find_pass", find)


def nodes(change: Callable[[Node], Node], *values: str) -> Breaker:
    """Alter the nodes that make these values (or every node)."""

    def broken(g: Graph) -> Graph:
        def one(n: Node) -> Node:
            return change(n) if not values or n.outputs[0].name in values else n

        return rebuild(replace(g, nodes=tuple(map(one, g.nodes))))

    return broken


def attrs(op: str = "", **new: Any) -> Callable[[Node], Node]:
    def change(n: Node) -> Node:
        return replace(n, attrs={**n.attrs, **new}) if op in ("", n.op) else n

    return change


def swapped(i: int, j: int) -> Callable[[Node], Node]:
    """Two inputs in each other's place."""

    def change(n: Node) -> Node:
        ins = list(n.inputs)
        ins[i], ins[j] = ins[j], ins[i]
        return replace(n, inputs=tuple(ins))

    return change


def only(op: str, change: Callable[[Node], Node]) -> Callable[[Node], Node]:
    """In a graph that has the value from another op it stays as it is."""
    return lambda n: change(n) if n.op == op else n


def unscaled(n: Node) -> Node:
    """A fused norm that forgets the layer scalar."""
    return replace(n, inputs=(*n.inputs[:3], *n.inputs[4:]), attrs={**n.attrs, "scaled": False})


def reading(name: str, other: str) -> Callable[[Node], Node]:
    """A node that reads another layer's values."""

    def change(n: Node) -> Node:
        ins = (replace(v, name=v.name.replace(name, other)) for v in n.inputs)
        return replace(n, inputs=tuple(ins))

    return change


def smaller_rings(g: Graph) -> Graph:
    """Off by one: W - 1 slots for a window of W keys."""

    def ring(v: Value) -> Value:
        slots = v.type.shape[0]
        if not isinstance(slots, int):
            return v
        return replace(v, type=v.type.with_shape(slots - 1, *v.type.shape[1:]))

    return rebuild(replace(g, state=tuple(map(ring, g.state))))


def without_next(g: Graph) -> Graph:
    """A cache that is never updated."""
    return replace(g, next={k: v for k, v in g.next.items() if k != "L1.v"})


def crossed_next(g: Graph) -> Graph:
    """K's cache takes V's contents."""
    return replace(g, next={**g.next, "L1.k": g.next["L1.v"]} if "L1.v" in g.next else g.next)


@op
class last_column:
    """The last row of the chunk, padding or not."""

    budget = MOVES

    infer = staticmethod(lambda x, lengths: x.with_shape(x.shape[0], 1, *x.shape[2:]))
    reference = staticmethod(lambda x, lengths: x[:, -1:])
    samples = [Sample(("f32[2,5,8]", "i64[2]"))]


#: what each change of faults.yaml is
CHANGES: dict[str, Callable[..., Any]] = {
    "attrs": attrs,
    "swapped": swapped,
    "swapped in": lambda op, i, j: only(op, swapped(i, j)),
    "reading": reading,
    "last column": lambda: only("last_row", lambda n: replace(n, op="last_column")),
    "unscaled": lambda: unscaled,
    "reversed": lambda: lambda n: replace(n, outputs=(n.outputs[0], *n.outputs[:0:-1])),
}
GRAPHS: dict[str, Breaker] = {
    "smaller rings": smaller_rings,
    "without next": without_next,
    "crossed next": crossed_next,
}


@dataclass(frozen=True)
class Fault:
    """A pass whose result is changed; the first value that moves, and the op that makes it; whether
    the passes before it run too, which takes longer."""

    of: str
    breaker: Breaker
    moves: str
    by: str
    whole: bool = False


def faults(name: str) -> Iterator[Any]:
    listed = read_table("faults.yaml")[name]
    for what, f in listed.items():
        if f["change"] in GRAPHS:
            breaker = GRAPHS[f["change"]]
        else:
            words = f.get("with", [])
            named = words.pop() if words and isinstance(words[-1], dict) else {}
            breaker = nodes(CHANGES[f["change"]](*words, **named), *f.get("at", []))
        fault = Fault(f["pass"], breaker, f["moves"], f["by"], f.get("whole", False))
        marks = pytest.mark.full if "full" in f else ()
        yield pytest.param(name, fault, id=what, marks=marks)


@pytest.mark.parametrize("model, fault", [*faults("ple"), *faults("moe")])
def test_broken_pass_is_named(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, model: str, fault: Fault
) -> None:
    """At the node that is wrong. In fp32 much less is out of budget, and indices of experts are
    compared too."""
    engine: Engine = request.getfixturevalue(model)
    monkeypatch.setitem(OPS, last_column.name, last_column)
    break_pass(monkeypatch, fault.of, fault.breaker)
    before = PASSES[: PASSES.index(fault.of)] if fault.whole else ()
    skip = tuple(p for p in PASSES if p != fault.of and p not in before)
    report = verify_each_pass(engine.configured(skip=skip))
    assert not report.ok and report.culprit
    assert [s.name for s in report.stages] == [*before, fault.of]
    assert [s.ok for s in report.stages] == [True] * len(before) + [False]
    first = report.culprit.first
    assert first and (report.culprit.name, first.value) == (fault.of, fault.moves), report.text()
    assert first.error > first.budget and f" = {fault.by}(" in first.after[-1]
    assert first.after[-1].startswith("%") and f"%{fault.moves}" in first.after[-1]
    assert first.before and f"%{fault.moves}" in first.before[-1]


def test_engine_of_other_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine holds is compared with what the pipeline makes today."""
    with monkeypatch.context() as m:
        break_pass(m, "fuse_gate_up", nodes(swapped(0, 1), "L2.mlp.w_gate_up"))
        checkpoint = random_checkpoint(tmp_path / "c", "tiny-dense")
        engine = build_engine(tmp_path / "e", None, "bfloat16", checkpoint=checkpoint)
    report = verify_each_pass(engine)
    assert report.culprit and report.culprit.name == STORED and report.culprit.first
    assert report.culprit.first.value == "L2.mlp.act"
    assert any("concat(%L2.mlp.w_up, %L2.mlp.w_gate)" in x for x in report.culprit.first.after)


def test_broken_lowering(engines: Any, monkeypatch: pytest.MonkeyPatch, layer: int = 5) -> None:
    """An instruction of one layer that makes its result 1 % wrong."""
    engine, right = engines("torch", "tiny-ple"), step_program.LOWERINGS["mul"]

    def wrong(r: Any, n: Any, *given: torch.Tensor) -> torch.Tensor:
        made = right(r, n, *given)
        if n.out.name.startswith(f"L{layer}.out/"):
            r.emit("scale", made, made, f=1.01)
        return made

    monkeypatch.setitem(step_program.LOWERINGS, "mul", wrong)
    culprit = verify_each_pass(engine).culprit
    assert culprit and culprit.name == BACKEND and culprit.first
    assert (culprit.first.value, culprit.first.phase) == (f"L{layer}.out", "prefill")


def test_wrong_cache_of_a_backend(ple: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are compared after each chunk, also where no value of theirs is shown."""
    engine = reference_engine(ple)
    run = engine.runtime.run

    def faulty(step: GraphRun, state: Any) -> Any:
        out = run(step, state)
        state.tensors["L1.v"].mul_(1.1)
        return out

    monkeypatch.setattr(engine.runtime, "run", faulty)
    culprit = verify_each_pass(engine).culprit
    assert culprit and culprit.name == BACKEND and culprit.first
    assert culprit.first.value == "L1.v.next"


def shown(engine: Engine, after: str = PASSES[-1]) -> tuple[ForcedRuntime, StageReport]:
    """The first chunk of an engine as it is after a pass, of which a backend has shown all up to
    layer 1."""
    stages = stages_of(engine, StageWeights(plain_params(engine), "cpu"))
    stage = next(s for s in stages if s.name == after)
    chunk, report = next(chunks_of_tokens(torch.arange(20), 8, 16)), StageReport(BACKEND)
    trace = StageRun(stage, 20, engine).trace(chunk)
    given = {v.name for v in trace.recording.graph.inputs} | {"L1.out", "L2.in"}
    return ForcedRuntime(trace, Comparison(report, engine.dtype), given), report


@pytest.mark.parametrize("after", ["fuse_glu", "fuse_moe"])
@pytest.mark.parametrize("close, ok", [(1.0, True), (0.0, False)])
def test_close_call_of_a_router(
    moe: Engine, monkeypatch: pytest.MonkeyPatch, close: float, ok: bool, after: str
) -> None:
    """A compiled layer may send a row to another expert that is as good; only such rows may
    differ, and they are counted. The router is seen in a fused op too."""
    monkeypatch.setitem(compare.CLOSE_EXPERTS, "f32", close)
    one, comparison = shown(moe, after)
    want = one.trace.values["L2.out"]
    got = want.clone()
    got[0, 1] *= 1.5
    one.watch(0, "L2.out", got)
    assert (comparison.first is None, comparison.excused) == (ok, int(ok))
    assert got.equal(want) and "L2.out" in one.names


@pytest.mark.parametrize("close, ok", [(1.0, True), (1e-6, False)])
def test_experts(moe: Engine, monkeypatch: pytest.MonkeyPatch, close: float, ok: bool) -> None:
    """Another expert in the list is right only if it is as probable; rows that no router touched
    have no excuse."""
    monkeypatch.setitem(compare.CLOSE_EXPERTS, "f32", close)
    one, comparison = shown(moe, after="fuse_glu")
    index = one.trace.values["L2.moe.index"].clone()
    index[0, 1] = index[0, 1].flip(0)
    one.watch(0, "L2.moe.index", index)
    assert comparison.values == 1 and (comparison.first is None) == ok
    one, comparison = shown(moe)
    one.watch(0, "L2.attn.out", one.trace.values["L2.attn.out"] * 1.5)
    assert comparison.first and comparison.excused == 0


def test_weights_that_are_gone(tmp_path: Path) -> None:
    """A packed engine whose prologue did more than join: the checkpoint is asked for."""
    checkpoint = random_checkpoint(tmp_path / "c", "tiny-dense")
    engine = build_engine(tmp_path / "e", None, "bfloat16", checkpoint=checkpoint)
    nodes = [n for n in engine.prologue.nodes if n.out.name != "L3.attn.wqkv"]
    engine = replace(engine, prologue=replace(engine.prologue, nodes=tuple(nodes)))
    with pytest.raises(EngineError, match=r"no longer holds %L3.attn.wq, .*--checkpoint DIR"):
        verify_each_pass(engine)
    v = Value("L3.attn.wq", Type("bf16", (128, 64)))
    want = Checkpoint.open(checkpoint, engine.spec).tensor(checkpoint_name(v.name))
    assert plain_params(engine, checkpoint)(v).equal(want.to(torch.bfloat16))


def test_amplified_rounding_is_measured(ple: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of the table's budget, a value may still be off by a few times its own rounding."""
    changed = replace(OPS["attention"], budget=Budget(0, 1, "next to nothing"))
    monkeypatch.setitem(OPS, "attention", changed)
    report = verify_each_pass(ple)
    assert report.ok, report.text()
    break_pass(monkeypatch, "plan_cache", nodes(attrs(scale=1.25), "L3.attn.out"))
    assert not verify_each_pass(ple).ok


def test_command(ple: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = cli.g4ir("verify", ple.path, "--each-pass", "--tokens", "5,6,7,8,9,10")
    lines = outcome.out.splitlines()
    assert outcome.code == 0 and lines[-1] == "ok" and all(len(x) <= 100 for x in lines)
    said = "tiny-ple (reference, cpu, bf16), pass by pass on 2 + 1 + 1 + 1 + 1 tokens"
    assert lines[0] == said
    # An engine of other passes than those of now is refused; here the pass breaks after loading.
    monkeypatch.setattr("g4ir.builder.load.load_engine", lambda *_, **__: ple)
    monkeypatch.setattr(type(ple), "close", lambda _: None)
    break_pass(monkeypatch, "fuse_gate_up", nodes(swapped(0, 1), "L2.mlp.w_gate_up"))
    outcome = cli.g4ir("verify", ple.path, "--each-pass")
    assert outcome.code == 1
    assert "fuse_gate_up moves %L2.mlp.act (linear + glu_packed), in prefill" in outcome.out
    assert "  + %L2.mlp.w_gate_up = concat(%L2.mlp.w_up, %L2.mlp.w_gate)" in outcome.out
    outcome = cli.g4ir("verify", ple.path, "--each-pass", "--json")
    found = json.loads(outcome.out)
    assert outcome.code == 1 and (found["ok"], found["failed"]) == (False, "fuse_gate_up")
    assert found["stages"][-1]["first"]["value"] == "L2.mlp.act"
    assert set(found["stages"][1]["worst"][0]) == {"ops", "error", "budget", "value"}
