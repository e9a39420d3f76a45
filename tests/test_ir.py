"""The IR: types, builder, verifier, the rewrite primitives, binding and the weight prologue."""

from __future__ import annotations

from dataclasses import replace
from operator import is_

import pytest
import torch

from g4ir.errors import InputError, VerifyError
from g4ir.ir.graph import RESULT, Builder, Graph, Program, Value
from g4ir.ir.interpret import interpret
from g4ir.ir.rewrite import bind, drop_dead, order, rebuild, splice, split_prologue
from g4ir.ir.text import parse_graph
from g4ir.ir.verify import verify
from g4ir.model.text import build_graph, build_program
from g4ir.ops.types import ITEMSIZE, TORCH_NAMES, Type, dtype_name, parse_type, torch_dtype
from g4ir.passes import run_passes
from g4ir.spec.record import load_spec
from tests.cases import TABLES

X = Type("f32", ("B", 4))


def chain(length: int = 3) -> Graph:
    """x -> n0 -> n1 -> ..., each a norm of the one before."""
    b = Builder("chain")
    v = b.input("x", X)
    for i in range(length):
        v = b.emit("rms_norm", v, eps=1e-6, name=f"n{i}")
    return b.graph(v)


def cached() -> Graph:
    """A graph with a param, a state and its next."""
    b = Builder("cached")
    new = b.input("new", Type("bf16", ("B", "S", 2, 8)))
    start, lengths = (b.input(n, Type("i64", ("B",))) for n in ("start", "lengths"))
    cache = b.cache("k", Type("bf16", ("C", "B", 2, 8)))
    w = b.param("w", Type("bf16", (8,)))
    x = b.emit("rms_norm", new, w, eps=1e-6, name="y")
    b.next["k"] = b.emit("cache_write", cache, new, start, lengths, name="k.next")
    return b.graph(x)


# --- types ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["f32[]", "bf16[B,S,64]", "i64[2]", "u8[4096,1,C_2]", "f8e4m3[8]"])
def test_a_type_prints_as_it_reads(text: str) -> None:
    assert str(parse_type(text)) == text


WRONG = ";f32;f32[;f32[,4];f32[4,];f32[4,,4];f32[-1];f32[4x];f32[2.0];f33[4];f32 [4];f32[4] junk"


@pytest.mark.parametrize("text", WRONG.split(";"))
def test_a_wrong_type_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a type such as|unknown dtype"):
        parse_type(text)


def test_binding_a_type_and_its_bytes() -> None:
    t = Type("bf16", ("B", "S", 64))
    assert t.bind({"B": 2}) == Type("bf16", (2, "S", 64))
    assert t.bind({"B": 2, "S": 3, "Z": 9}).nbytes() == 2 * 3 * 64 * 2
    assert (t.rank, t.with_shape("B"), Type("f32", ()).numel()) == (3, Type("bf16", ("B",)), 1)
    with pytest.raises(ValueError, match=r"bf16\[2,S,64\] has the unbound dim S"):
        t.bind({"B": 2}).numel()


def test_dtype_names_and_sizes_are_torch_s() -> None:
    assert ITEMSIZE.keys() == TORCH_NAMES.keys()
    for short, long in TORCH_NAMES.items():
        assert torch_dtype(short).itemsize == ITEMSIZE[short]
        assert {dtype_name(torch_dtype(short)), dtype_name(short), dtype_name(long)} == {short}
    with pytest.raises(ValueError, match=r"unknown dtype 'complex64'; one of f64"):
        dtype_name(torch.complex64)


# --- builder and graph ------------------------------------------------------------------------


def test_the_builder_infers_types_and_names_what_it_is_not_told() -> None:
    b = Builder(scope="L0.")
    x = b.input("x", Type("f32", ("B", "S", 8)))
    y = b.emit("linear", x, b.param("w", Type("f32", (4, 8))))
    left, right = b.emit_all("split", y, sizes=(1, 3))
    assert str(y) == "%L0.linear1" and y.type == Type("f32", ("B", "S", 4))
    assert [v.name for v in (left, right)] == ["L0.split2.0", "L0.split2.1"]
    g = b.graph(left)
    verify(g)
    assert g.producers["L0.split2.1"].outputs == (left, right)
    assert g.users[left.name] == [RESULT] and right.name not in g.users
    assert [n.op for n in g.find("split", "linear")] == ["linear", "split"]


def test_the_builder_names_the_node_it_could_not_type() -> None:
    b = Builder()
    x, w = b.input("x", Type("f32", (2, 8))), b.param("w", Type("f32", (4, 9)))
    with pytest.raises(VerifyError, match=r"y: linear\(%x: f32\[2,8\], %w: f32\[4,9\]\)"):
        b.emit("linear", x, w, name="y")
    with pytest.raises(VerifyError, match="unknown op 'lineer'"):
        b.emit("lineer", x, w)


def test_a_program_unifies_state_and_params() -> None:
    program = build_program(load_spec("tiny-ple"))
    assert list(program.state()) == [f"L{i}.{c}" for i in range(8) for c in "kv"]
    assert {"embed.table", "ple.table", "L7.attn.wq"} <= program.params().keys()
    other = replace(cached(), name="other", state=(Value("k", Type("f32", ("C", "B", 2, 8))),))
    with pytest.raises(VerifyError, match=r"state %k is f32.* in graph other .*bf16"):
        Program({"a": cached(), "b": other}).state()


# --- verifier ---------------------------------------------------------------------------------


def _with_node(g: Graph, at: int, **changes: object) -> Graph:
    nodes = list(g.nodes)
    nodes[at] = replace(nodes[at], **changes)  # type: ignore[arg-type]
    return replace(g, nodes=tuple(nodes))


F16 = Type("f16", ("B", 4))
ONE, TWO = Value("n0", X), Value("m", X)
#: changes of the second node of `chain` (others are in refused/graph.yaml)
BROKEN_NODES: list[tuple[dict[str, object], str]] = [
    ({"outputs": (Value("n1", F16),)}, r"chain: %n1 = rms_norm: declared f16.*, inferred f32\[B"),
    ({"outputs": (Value("n1", X), TWO)}, r"%n1, %m = rms_norm: declared .*, f32\[B,4\], inferred"),
    ({"outputs": ()}, r"declared , inferred f32\[B,4\]"),
    ({"inputs": (Value("n0", F16),)}, r"input of rms_norm %n0 is used as f16.*, defined as f32"),
    ({"inputs": (Value("n2", X),)}, "chain: input of rms_norm %n2 is not defined before its use"),
    ({"outputs": (ONE,)}, "graph chain: %n0 is defined twice"),
    ({"op": "norm"}, "graph chain: %n1: unknown op 'norm'"),
    ({"attrs": {}}, r"%n1: rms_norm\(%n0: .*eps"),
    ({"attrs": {"eps": 1e-6, "epsilon": 1}}, r"%n0: .*: attribute epsilon=1: expected one of eps"),
]
#: changes of `cached`
BROKEN_ENDS: list[tuple[dict[str, object], str]] = [
    ({"params": (Value("new", X),)}, "graph cached: %new is defined twice"),
    ({"outputs": (TWO,)}, "output %m is not defined"),
    ({"next": {"k": TWO}}, "next of k %m is not defined"),
    ({"next": {"n": cached().outputs[0]}}, "next of %n, which is no state"),
    ({"next": {"k": cached().outputs[0]}}, r"next of %k is bf16\[B,S,2,8\], the state bf16\[C,B,2"),
]


def test_the_verifier_names_node_and_types() -> None:
    broken = [(_with_node(chain(), 1, **changes), said) for changes, said in BROKEN_NODES]
    broken += [(replace(cached(), **changes), said) for changes, said in BROKEN_ENDS]  # type: ignore[arg-type]
    for g, said in broken:
        with pytest.raises(VerifyError, match=said):
            verify(g)


# --- rewrite primitives -----------------------------------------------------------------------


def test_splice_defines_the_same_values() -> None:
    g = chain(3)
    b = Builder()
    mid = b.emit("scale", g.inputs[0], value=2.0, name="mid")
    b.emit("rms_norm", mid, eps=1e-5, name="n1")
    out = splice(g, g.nodes[:2], b.nodes)
    verify(out)
    assert [n.out.name for n in out.nodes] == ["mid", "n1", "n2"]
    assert out.nodes[-1] is g.nodes[-1] and out.outputs == g.outputs


def test_splice_moves_a_node_behind_what_it_needs() -> None:
    g = parse_graph(TABLES["graphs"]["splice"])
    b = Builder()
    b.emit("add", g.nodes[0].out, g.nodes[2].out, name="b")
    out = splice(g, [g.nodes[1]], b.nodes)
    verify(out)
    assert [n.out.name for n in out.nodes] == ["a", "c", "b", "d"]


def test_order_keeps_a_correct_order_and_repairs_any_other() -> None:
    for g in (chain(5), build_graph(load_spec("tiny-ple"), "prefill")):
        assert order(g) == g
        mixed = order(replace(g, nodes=g.nodes[::-1]))
        verify(mixed)
        assert sorted(map(str, mixed.producers)) == sorted(map(str, g.producers))


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_cycle_is_named(length: int) -> None:
    g = chain(length)
    looped = _with_node(g, 0, inputs=(g.nodes[-1].out,))
    with pytest.raises(VerifyError, match=r"graph chain: cycle at %n\d"):
        order(looped)
    with pytest.raises(VerifyError, match="cycle"):
        splice(looped, looped.nodes[-1:], looped.nodes[-1:])


def test_rebuild_infers_types_downstream_of_a_rename() -> None:
    g = build_graph(load_spec("tiny-dense"), "prefill", all_logits=True)
    one = Value("embeds", Type("f32", ("B", 1, 64)))
    positions = Value("positions", Type("i64", ("B", 1)))
    g = replace(g, inputs=(one, positions, *g.inputs[2:]))
    out = rebuild(g)
    verify(out)
    assert out.outputs[0].type == Type("f32", ("B", 1, 512))
    assert "S" not in str(out)


def test_rebuild_keeps_nodes_that_do_not_change() -> None:
    """Types are inferred again of the others alone: a plan builds and edits thousands of nodes."""
    g = build_graph(load_spec("tiny-dense"), "prefill")
    first = next(n for n in g.nodes if n.op == "rms_norm")
    other = Value("other", first.out.type)
    out = rebuild(replace(g, params=(*g.params, other)), {first.out.name: other})
    changed = [n for n, m in zip(g.nodes, out.nodes, strict=True) if n is not m]
    assert changed == [n for n in g.nodes if first.out in n.inputs]
    assert rebuild(g).nodes == g.nodes and all(map(is_, rebuild(g).nodes, g.nodes))


def test_bind_replaces_dims_everywhere() -> None:
    g = build_graph(load_spec("tiny-ple"), "prefill")
    out = bind(g, B=2, S=5, C=32)
    verify(out)
    values = [*out.sources(), *(v for n in out.nodes for v in n.outputs), *out.results()]
    assert all(isinstance(d, int) for v in values for d in v.type.shape)
    assert bind(bind(g, B=2), S=5, C=32) == out
    with pytest.raises(VerifyError, match=r"%ple.sum: add\(.*f32\[5,5,8,16\]"):
        bind(replace(g, inputs=(Value("embeds", Type("f32", ("S", "S", 64))), *g.inputs[1:])), S=5)


def test_drop_dead_keeps_what_results_need() -> None:
    b = Builder()
    x, _unused = b.input("x", X), b.input("unused", X)
    keep, gone = b.param("keep", Type("f32", (4,))), b.param("gone", Type("f32", (4,)))
    b.cache("old", X)
    y = b.emit("rms_norm", x, keep, eps=1e-6, name="y")
    b.emit("rms_norm", y, gone, eps=1e-6, name="dead")
    out = drop_dead(b.graph(y))
    assert [n.out for n in out.nodes] == [y] and out.params == (keep,) and not out.state
    assert [v.name for v in out.inputs] == ["x", "unused"], "inputs are the interface"
    assert drop_dead(cached()) == cached()


# --- prologue ---------------------------------------------------------------------------------


def test_the_prologue_holds_what_depends_on_params_alone() -> None:
    g = run_passes(build_graph(load_spec("tiny-dense"), "decode"))
    prologue, main = split_prologue(g)
    for part in (prologue, main):
        verify(part)
    assert {n.op for n in prologue.nodes} == {"concat"} and not list(main.find("concat"))
    assert not prologue.inputs and not prologue.state and prologue.name == "decode.prologue"
    assert set(prologue.outputs) <= set(main.params)
    assert {v.name for v in prologue.params}.isdisjoint(v.name for v in main.params)
    assert (main.inputs, main.state, main.outputs) == (g.inputs, g.state, g.outputs)


def test_a_weight_read_by_both_parts_stays_in_both() -> None:
    b = Builder("g")
    x = b.input("x", Type("f32", (2, 4)))
    w, u = b.param("w", Type("f32", (3, 4))), b.param("u", Type("f32", (5, 4)))
    both = b.emit("concat", w, u, axis=0, name="both")
    g = b.graph(b.emit("linear", x, both, name="y"), b.emit("linear", x, w, name="z"))
    prologue, main = split_prologue(g)
    assert prologue.params == (w, u) and main.params == (w, both)
    values = {v.name: torch.randn([int(d) for d in v.type.shape]) for v in (x, w, u)}
    made, _ = interpret(prologue, {}, values, {})
    ours, _ = interpret(main, values, {**values, **made}, {})
    want, _ = interpret(g, values, values, {})
    assert all(torch.equal(ours[k], want[k]) for k in want)


# --- interpreter ------------------------------------------------------------------------------


def test_the_interpreter_names_what_was_not_given() -> None:
    with pytest.raises(InputError, match=r"graph chain: input %x \(f32\[B,4\]\) was not given"):
        interpret(chain(), {}, {}, {})
    with pytest.raises(InputError, match="state %k"):
        interpret(cached(), dict.fromkeys(("new", "start", "lengths")), {"w": 0}, {})


def test_the_interpreter_shows_every_value_and_changes_nothing_given() -> None:
    g = cached()
    new, old = torch.randn(2, 3, 2, 8), torch.zeros(4, 2, 2, 8)
    given = {"new": new, "start": torch.tensor([0, 0]), "lengths": torch.tensor([3, 2])}
    seen: dict[str, torch.Size] = {}
    outs, state = interpret(
        g, given, {"w": torch.ones(8)}, {"k": old}, lambda v, t: seen.update({v.name: t.shape})
    )
    assert seen == {"y": new.shape, "k.next": old.shape}
    assert outs.keys() == {"y"} and torch.equal(state["k"][:3, 0], new[0])
    assert not old.any() and given.keys() == {"new", "start", "lengths"}
