"""`verify --each-pass`: sound pipelines pass in every dtype, broken passes are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir import Engine, Spec
from g4ir import passes as pipeline
from g4ir.backends.cpu import step_program
from g4ir.check import compare
from g4ir.check.compare import Comparison, ForcedRuntime
from g4ir.check.passes import verify_each_pass
from g4ir.check.reference import reference_engine
from g4ir.check.stage_report import StageReport, StagesReport
from g4ir.check.stages import (
    BACKEND,
    STORED,
    StageRun,
    StageWeights,
    chunks_of_tokens,
    plain_params,
    stages_of,
)
from g4ir.errors import EngineError
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.rewrite import rebuild
from g4ir.model.names import checkpoint_name
from g4ir.ops import OPS
from g4ir.ops.base import Sample, op
from g4ir.ops.budgets import MOVES, Budget
from g4ir.ops.types import Type
from g4ir.weights.checkpoint import Checkpoint
from tests import cli_tools as cli
from tests.cases import TABLES, read_table
from tests.configs import spec_called
from tests.engines import random_checkpoint

PASSES = pipeline.PASSES

Breaker = Callable[[Graph], Graph]


LIMITS: dict[str, Any] = {"backend": "reference", "max_seq": 64, "prefill_chunk": 16}


def built(folder: Path, spec: Spec | None, dtype: str, **options: Any) -> Engine:
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
    sound(built(tmp_path / "e", None if packed else spec, dtype, **options))


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
        engine = built(tmp_path / "e", None, "bfloat16", checkpoint=checkpoint)
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

    def faulty(phase: str, feeds: Any, state: Any, *rest: Any) -> Any:
        out = run(phase, feeds, state, *rest)
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
    engine = built(tmp_path / "e", None, "bfloat16", checkpoint=checkpoint)
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
    said = "tiny-ple (reference, cpu, bf16), pass by pass on 6 tokens in chunks of "
    assert lines[0].startswith(said)
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
