"""Primitives, ops and whole models as TensorRT layers, run by the recorder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4ir.backends.base import Prepared
from g4ir.backends.primitives.graph import network_graph
from g4ir.backends.primitives.network import TURNED, Network, stored_type
from g4ir.backends.reference import ReferenceRuntime
from g4ir.backends.trt import dry_run as dry
from g4ir.backends.trt import experts
from g4ir.backends.trt import lowerings as lowered
from g4ir.backends.trt.emitter import TrtEmitter
from g4ir.backends.trt.recorder import execute, scratch_bytes
from g4ir.backends.trt.runtime import TrtRuntime
from g4ir.builder.build import prepare
from g4ir.errors import LowerError
from g4ir.ir.graph import Graph, Node, Value, infer
from g4ir.ir.interpret import interpret
from g4ir.ops import Sample
from g4ir.ops.types import Type, parse_type
from g4ir.plan.engine_limits import Limits
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import check_spec, load_spec
from g4ir.weights.pack import MadeParams
from tests.configs import spec_called
from tests.engines import BUDGET
from tests.network_session import (
    as_declared,
    as_stored,
    cache_inputs,
    in_network,
    in_range,
    tokens_held,
)
from tests.oracle import relative
from tests.runner import built_program
from tests.test_ops import IN_NETWORKS, sample, tensors
from tests.trt.running import Emitted, computed, emit, new_emitter, prepared

#: suffix of specs whose attention scores are capped
CAPPED = "-capped"
full = pytest.mark.full


# --- constants, weights, names ----------------------------------------------------------------


def test_no_conditionals() -> None:
    """Who would write one hears why not."""
    e = new_emitter()
    e.scope = "L3.mlp.experts"
    x = e.input("x", parse_type("f32[B,S,4]"))
    with pytest.raises(LowerError, match=r"L3\.mlp\.experts: a conditional.*CUDA graph"):
        e.when_one(x, 1, lambda: x, lambda: x)


def test_weights_are_not_copied() -> None:
    w = torch.randn(4, 4).bfloat16()
    e = new_emitter({"w": w}.__getitem__)
    x = e.input("x", parse_type("bf16[B,4]"))
    e.output("y", e.linear(x, e.param(Value("w", parse_type("bf16[4,4]")))))
    made = [c for c in e.trt.calls if (c.owner, c.member) == ("Weights", "__init__")]
    assert [c.args for c in made] == [(e.trt.DataType.BF16, w.data_ptr(), 16)]
    assert e.held[0].data_ptr() == w.data_ptr()


def test_weights_of_another_type() -> None:
    e = new_emitter({"w": torch.zeros(4, 4)}.__getitem__)
    x = e.input("x", parse_type("bf16[B,4]"))
    with pytest.raises(LowerError, match=r"%w is f32\[4,4\], the graph says bf16"):
        e.linear(x, e.param(Value("w", parse_type("bf16[4,4]"))))


def test_names_and_notes() -> None:
    e = new_emitter()
    x = e.input("x", parse_type("f32[B,S,4]"))
    e.scope = "L3.mlp.gate"
    y = e.mul(e.mul(x, 2.0), 2.0)
    assert [x._title.split()[0] for x in e.network._layers] == [
        "constant.0/weights",
        "L3.mlp.gate/mul",
        "L3.mlp.gate/mul.2",
    ]
    assert y.handle.name == "" and tuple(y.handle.shape) == (-1, -1, 4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda e: e.input("x", parse_type("f64[B]")), "networks have no f64"),
        (lambda e: e.input("x", Type("f32", (1,) * 9)), "at most 8 dims"),
        (lambda e: e.topk(e.input("x", parse_type("f32[B,5000]")), 4000), "at most 3840"),
    ],
)
def test_what_cannot_be_taken(build: Callable[[TrtEmitter], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(new_emitter())


def test_refused_layer() -> None:
    """The real builder answers None."""
    e = new_emitter()
    x = e.input("x", parse_type("f32[B,4]"))
    e.scope = "L7.attn"
    e.network = SimpleNamespace(add_softmax=lambda x: None)
    e.said = lambda: "no such axis"
    with pytest.raises(LowerError, match=r"refused L7\.attn/softmax: no such axis"):
        e.softmax(x)


def test_shape_that_tensorrt_does_not_find() -> None:
    """Its binding raises, where a tensor has -1 dims; its own words come last."""
    e = new_emitter()
    e.said = lambda: "dims do not match"
    refused = e.network.add_softmax(e.tensor(e.input("x", parse_type("i32[2,4]"))))
    refused.name = "L1.attn/softmax"
    with pytest.raises(LowerError, match=r"L1\.attn/softmax: .*no shape: dims do not match"):
        e.checked(refused, parse_type("f32[2,4]"))


def test_type_that_tensorrt_sees_differently() -> None:
    e = new_emitter()
    x = e.input("x", parse_type("f32[2,4]"))
    layer = e.network.add_identity(e.tensor(x))
    with pytest.raises(LowerError, match=r"expected f32\[2,5\], TensorRT says .*\(2, 4\)"):
        e.made(layer, "softmax", parse_type("f32[2,5]"))


# --- ops --------------------------------------------------------------------------------------


#: tokens of the largest chunk: no chunk of a sample then crosses the end of a ring
ROOM = 16


def in_float32(s: Sample) -> Sample:
    """There is no f64 in TensorRT."""
    return replace(s, attrs={k: "f32" if v == "f64" else v for k, v in s.attrs.items()})


@pytest.mark.parametrize("case", [c for c in IN_NETWORKS if in_network(c)], ids=str)
def test_op(case: tuple[str, int]) -> None:
    """A graph of one op; caches are rings."""
    s = in_float32(sample(case))
    inputs = tuple(Value(f"x{i}", t) for i, t in enumerate(s.types()))
    made = infer(case[0], inputs, s.attrs, "y")
    n = Node(case[0], inputs, tuple(Value(f"y{i}", t) for i, t in enumerate(made)), s.attrs)
    state = tuple(inputs[i] for i in cache_inputs(n))
    given = in_range(case[0], tensors(s.types(), s))
    following = dict(n.definition.updated(inputs, n.outputs))
    graph = Graph(
        "prefill",
        tuple(v for v in inputs if v not in state),
        (),
        state,
        (n,),
        tuple(v for v in n.outputs if v not in following.values()),
        {old.name: new for old, new in following.items()},
    )
    longest = max([int(t.max()) for t in given if not t.is_floating_point()], default=0)
    limits = Limits(4, longest + 1, ROOM)
    emitted = emit(graph, limits, None)
    plain = {v.name: t for v, t in zip(inputs, given, strict=True)}
    kinds = {v.name: stored_type(v.type, limits) for v in state}
    before, tokens = tokens_held(n, given)
    rings = {k: as_stored(plain[k], before, int(t.shape[2])) for k, t in kinds.items()}
    turned = {TURNED: torch.zeros_like(before)} if state else {}
    out = execute(emitted.network, plain | rings | turned)
    want, after = interpret(graph, plain, {}, plain)
    for v in graph.outputs:
        assert torch.allclose(out[v.name], want[v.name], atol=1e-4, rtol=1e-4), v
    for name in graph.next:
        made = as_declared(out[f"{name}.next"], tokens, plain[name])
        assert torch.allclose(made, after[name], atol=1e-5), name


# --- models -----------------------------------------------------------------------------------


def planned(name: str, latent_kv: str = "off", quant: str = "none", **settings: str) -> Prepared:
    """A build with random weights."""
    spec = spec_called(name.removesuffix(CAPPED))
    if name.endswith(CAPPED):
        text = replace(spec.text, attn_logit_softcapping=20.0)
        spec = check_spec(replace(spec, name=name, text=text))
    how = {"dtype": "float32", "media": "none", "latent_kv": latent_kv, "settings": settings}
    how |= {"quant": quant}
    return prepare(spec, BuildOptions(backend="trt", random_weights=0, **how), dry=True)  # type: ignore[arg-type]


def compare(p: Prepared) -> tuple[float, TrtRuntime]:
    """The largest error beside the reference, of a ragged prompt in chunks and of steps over each
    span; and the runtime."""
    program, params = p.packing.program, MadeParams(p.packing, p.source)
    runtime = dry.emulated(dry.emulator(), program, dry.SMALL, params, p.config.settings)
    reference = ReferenceRuntime(program, dry.SMALL, "cpu", params)
    with dry.one_thread():
        got, want = (dry.run_small(program, params, r) for r in (runtime, reference))
    return relative(got["logits"], want["logits"]).max().item(), runtime


def network_of(name: str) -> Emitted:
    return emit(network_graph(planned(name).packing.program), Limits(2, 64, 11), None)


MODELS: list[tuple[str, dict[str, str]]] = [
    ("e2b-small", {}),
    ("combined", {"attention": "fused"}),
    ("31b-small", {"attention": "plain"}),
    ("12b-small", {"latent_kv": "value", "attention": "fused"}),
    ("26b-a4b-small", {"experts": "all"}),
    ("gemma3-4b-small", {"attention": "fused"}),
    ("random-1003", {"attention": "fused"}),
]
MORE: list[tuple[str, dict[str, str]]] = [
    ("31b-small", {"latent_kv": "value", "attention": "fused"}),
    ("combined", {"latent_kv": "value", "experts": "gather", "attention": "plain"}),
    ("tiny-ple", {"attention": "fused"}),
    ("tiny-moe", {"experts": "gather"}),
    ("random-1", {"attention": "plain"}),
    ("random-4", {"attention": "fused"}),
    ("random-1002", {"attention": "plain"}),
]


def ident(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(value.values()) or "plain"


@pytest.mark.parametrize(
    ("name", "options"), [*MODELS, *(pytest.param(*m, marks=full) for m in MORE)], ids=ident
)
def test_model(name: str, options: dict[str, str]) -> None:
    """As the interpreter in fp32."""
    worst, _ = compare(planned(name, **options))
    assert worst < BUDGET, f"{worst:.1e}"


def test_no_softmax_layer_in_plain_attention() -> None:
    """Nothing for TensorRT to recognise; the router's softmax stays."""
    program = built_program(spec_called("12b-small"))
    for attention, count in (("plain", 0), ("explicit", 4)):
        made = emit(prepared(program), Limits(2, 64, 9), None, attention=attention)
        assert any(x._kind == "softmax" for x in made.network._layers) == (count > 0)


def test_queries_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that would take more than they may are made block by block, each row as before; of a
    short chunk the last blocks have nothing."""

    def scratch() -> int:
        """What a chunk takes."""
        worst, runtime = compare(planned("12b-small", attention="plain"))
        assert worst < BUDGET
        io = runtime.io
        shapes = {name: io.shapes(name, "prefill")[2] for name in io.dynamic()}
        return scratch_bytes(runtime.engine._network, shapes)

    whole = scratch()
    monkeypatch.setattr(lowered, "MOST_SCORE_BYTES", 3 * 4 * dry.SMALL.max_seq * 6 * 4)
    assert scratch() < whole


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_mlps_in_blocks(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chunk; each product has codes of its own scale."""
    p = planned("12b-small", quant=quant)
    assert compare(p)[0] < BUDGET
    monkeypatch.setattr(lowered, "GATED_ROWS", 4)
    monkeypatch.setattr(lowered, "MOST_GATED_BYTES", 0)
    worst, runtime = compare(p)
    assert worst < BUDGET
    names = [x.name for x in runtime.engine._network._layers]
    assert "L0.mlp.down/linear.6" in names and "L0.mlp.down/linear.7" not in names


def routed(choices: torch.Tensor, sizes: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """Experts' sums of these choices [B,S,K]: by the network, and one token after the other; and
    the network."""
    (batch, chunk, k), (count, width, inner) = choices.shape, sizes
    g = torch.Generator().manual_seed(0)
    held = {
        "gate_up": torch.randn(count, 2 * inner, width, generator=g),
        "down": torch.randn(count, width, inner, generator=g),
    }
    x, weights = (torch.randn(batch, chunk, n, generator=g) for n in (width, k))
    positions = 7 + torch.arange(chunk).expand(batch, -1)
    feeds = {"x": x, "weights": weights, "index": choices, "positions": positions}
    e = new_emitter(held.__getitem__)
    kinds = (f"f32[B,S,{width}]", f"f32[B,S,{k}]", f"i64[B,S,{k}]", "i64[B,S]")
    given = {n: e.input(n, parse_type(t)) for n, t in zip(feeds, kinds, strict=True)}
    net = Network(e, None, Limits(batch, 64, 13), {}, "auto", given)  # type: ignore[arg-type]
    params = [e.param(Value(n, Type("f32", tuple(t.shape)))) for n, t in held.items()]
    e.scope = "L0.experts"
    node: Any = SimpleNamespace(word=lambda _: "gelu_pytorch_tanh")
    inputs = (given[n] for n in ("x", "weights", "index"))
    e.output("y", experts.experts(net, node, *inputs, *params))
    gate_up, down = held.values()
    gate, up = torch.einsum("bsh,bskih->bski", x, gate_up[choices]).chunk(2, -1)
    made = torch.nn.functional.gelu(gate, approximate="tanh") * up
    want = torch.einsum("bski,bskhi,bsk->bsh", made, down[choices], weights)
    return computed(e, feeds)["y"], want, e.network


def sort_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sort tokens of any chunk, in blocks of 3."""
    monkeypatch.setattr(experts, "MOVED", 0)
    monkeypatch.setattr(experts, "block_rows", lambda *_: 3)
    monkeypatch.setattr(experts, "sorted_rows", lambda *_: 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"quant": "int4"}, {"quant": "int8"}, {"quant": "fp8"}, {"tp": 2, "ep": True}],
    ids=str,
)
def test_models_whose_tokens_are_sorted(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding, experts of every form, and those of several ranks."""
    sort_all(monkeypatch)
    how = BuildOptions(backend="trt", random_weights=0, dtype="float32", media="none", **options)
    p = prepare(load_spec("tiny-moe"), how, dry=True)
    assert dry.check_small(dry.emulator(), p, "f32")["logits"] < BUDGET


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 13])
def test_tokens_of_a_chunk_by_expert(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all tokens choose the same experts, and where experts have a token more than a
    block, which need the most spare blocks."""
    sort_all(monkeypatch)
    any_two = torch.rand(2, tokens, 8, generator=torch.Generator().manual_seed(1)).topk(2).indices
    four_each = (torch.arange(-1, tokens - 1).clamp(0)[:, None] // 4 * 2 + torch.arange(2)) % 8
    same = torch.tensor([6, 1]).expand(2, tokens, 2)
    for choices in (any_two, same, four_each.expand(2, -1, -1)):
        got, want, network = routed(choices, (8, 16, 12))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert any("L0.experts/gather_rows" in x.name for x in network._layers)


def test_rows_of_a_chunk_by_expert() -> None:
    """26b-a4b's of 1024 tokens: less than a third of all tokens times all experts."""
    assert experts.block_rows(1024, 8, 128) == 256
    assert experts.sorted_rows(1024, 8, 128) * 3 < 1024 * 128


def test_softcapped_attention_is_explicit_and_noted() -> None:
    """IAttention cannot cap its scores."""
    p = planned("12b-small" + CAPPED, attention="fused")
    assert compare(p)[0] < BUDGET
    graph = network_graph(p.packing.program)
    made = emit(graph, Limits(2, 64, 11), None, attention="fused")
    assert len(made.notes) == p.config.spec.text.num_hidden_layers
    assert "IAttention has no softcap" in made.notes[0]
    assert not any(x._kind == "attention" for x in made.network._layers)


# --- size -------------------------------------------------------------------------------------


def test_rings_are_never_copied() -> None:
    """A ring is read by the layer that writes it, which alone moves rows of K and V: two products
    take all query heads of a group, and two sums those of the first token."""
    made = network_of("e2b-small")
    names = "L0.attn.q.rope/", "L0.attn.out/"
    own = [x for x in made.network._layers if x._title.startswith(names)]
    kinds = Counter(x._kind for x in own if "/shared/" not in x._title)
    assert kinds["KV cache update"] == kinds["matrix multiply"] == kinds["select"] == 2
    assert "gather" not in kinds and kinds["concatenation"] == 1
    assert [x._title for x in own if x._kind == "reduce" and x._op.name == "SUM"] == [
        "L0.attn.out/sum (reduce)",
        "L0.attn.out/sum.2 (reduce)",
    ]
    for x in own:
        assert x._kind != "matrix multiply" or len(x._in()._dims) == 4


def test_layers_of_a_layer() -> None:
    """One norm and one rotation for all heads, a rotation without a copy of both halves, weights of
    norms in fp32 as constants, one layer for each change of layout."""
    made = network_of("31b-small")
    own = [x for x in made.network._layers if x._title.startswith("L1.")]
    kinds = Counter(x._kind for x in own)
    heads = Counter(x._kind for x in own if x._title.startswith("L1.attn.q.rope/"))
    want = {"shuffle": 1, "elementwise": 8, "reduce": 1, "constant": 1, "slice": 5}
    assert heads == {**want, "KV cache update": 2}
    assert kinds["shuffle"] == 13 and kinds["concatenation"] == 1
    assert sum(kinds.values()) - kinds["constant"] == 77


def test_constants_are_made_of_constants() -> None:
    """Casts of small weights, and weights side by side, take no layer; they are kept beside a plan
    that has no weights."""
    w = {"a": torch.tensor([1.0, 2.5]).bfloat16(), "b": torch.tensor([3.0]).bfloat16()}
    e = new_emitter(w.__getitem__)
    a, b = (e.param(Value(k, Type("bf16", tuple(t.shape)))) for k, t in w.items())
    e.output(
        "y",
        e.add(e.input("x", Type("f32", (3,))), e.concat([e.cast(a, "f32"), e.cast(b, "f32")], 0)),
    )
    out = execute(e.network, {"x": torch.ones(3)})["y"]
    assert out.tolist() == [2.0, 3.5, 4.0]
    assert [x._kind for x in e.network._layers] == ["constant", "elementwise"]
    (kept,) = e.constants.values()
    assert kept.tolist() == [1.0, 2.5, 3.0] and e.weights.keys() == e.constants.keys()


def test_changes_of_layout_are_one_layer() -> None:
    """What is undone takes none; what one layer cannot do takes two."""
    e = new_emitter()
    x = e.input("x", Type("f32", ("B", "S", 6)))
    heads = e.transpose(e.reshape(x, "B", "S", 3, 2), 0, 2, 1, 3)
    assert e.reshape(e.transpose(heads, 0, 2, 1, 3), "B", "S", 6).handle is x.handle
    e.output("y", e.unary("neg", heads))
    assert e.network.num_layers == 2
    e.output("z", e.unary("neg", e.reshape(heads, "B", 3, "2S")))
    assert e.network.num_layers == 4
    given = torch.arange(24.0).view(2, 2, 6)
    made = execute(e.network, {"x": given})
    want = given.view(2, 2, 3, 2).transpose(1, 2)
    assert torch.equal(made["y"], -want) and torch.equal(made["z"], -want.reshape(2, 3, 4))
