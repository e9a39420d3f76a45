"""Ops, routed experts and blocks as TensorRT's lowerings write them, computed by onnxruntime."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from g4ir.backends.base import Prepared
from g4ir.backends.onnx_graph.export import NullStorage
from g4ir.backends.primitives.graph import network_graph
from g4ir.backends.primitives.network import Network
from g4ir.backends.primitives.weights import QuantizedWeight, linear
from g4ir.backends.trt import dry_run as dry
from g4ir.backends.trt import experts
from g4ir.backends.trt import lowerings as lowered
from g4ir.backends.trt.dialect import Dialect, emitted
from g4ir.backends.trt.parse import Addresses, parse
from g4ir.builder.build import prepare
from g4ir.errors import LowerError
from g4ir.ir.graph import Value
from g4ir.ops.codecs import dequantize_codes
from g4ir.ops.quant import quantize
from g4ir.ops.types import Type, parse_type
from g4ir.plan.engine_limits import Limits
from g4ir.plan.options import BuildOptions
from tests.cases import TABLES
from tests.configs import check_spec, short, spec_called
from tests.network_session import check_op, in_network
from tests.test_ops import IN_NETWORKS
from tests.trt.compiled import planned
from tests.trt.segments import new_emitter, outputs_of, with_weights
from tests.trt.small import check, check_row

#: of networks that are looked at
SMALL = Limits(max_batch=3, max_seq=4200, prefill_chunk=11)


# --- ops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in IN_NETWORKS if in_network(c)], ids=str)
def test_op(case: tuple[str, int]) -> None:
    check_op(case, new_emitter(), lowered.lowerings(), outputs_of, 1e-4)


# --- attention and MLPs in blocks -------------------------------------------------------------


def nodes_of(p: Prepared) -> Counter[str]:
    """How often each operator is in the text model's network, with a layer's own as `L0/...`."""
    e, _ = emitted(network_graph(p.packing.program), SMALL, NullStorage(), p.config.settings)
    return Counter(n.op_type for n in e.nodes)


def test_no_softmax_layer_in_plain_attention() -> None:
    """Nothing for TensorRT to recognise."""
    for form, some in (("plain", False), ("explicit", True)):
        p = planned(f"tiny-dense attention={form} dtype=float32")
        assert bool(nodes_of(p)["Softmax"]) == some


def test_queries_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that would take more than they may are made block by block, each row as before; of a
    short chunk the last blocks have nothing."""
    p = planned("12b attention=plain dtype=float32")
    whole = nodes_of(p)["TRT_Slice"]
    monkeypatch.setattr(lowered, "MAX_SCORE_BYTES", 3 * 4 * SMALL.max_seq * 6 * 4)
    assert nodes_of(p)["TRT_Slice"] > whole
    check_row("12b attention=plain", tmp_path)


@pytest.mark.parametrize("quant", ["none", pytest.param("int8", marks=pytest.mark.full)])
def test_mlps_in_blocks(quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chunk; each product has codes of its own scale."""
    p = planned(f"12b quant={quant} dtype=float32")
    whole = nodes_of(p)["MatMul"]
    monkeypatch.setattr(lowered, "GATED_ROWS", 4)
    monkeypatch.setattr(lowered, "MAX_GATED_BYTES", 0)
    # In each layer but the last, of single tokens, three blocks of two products.
    assert nodes_of(p)["MatMul"] == whole + 4 * (p.config.spec.text.num_hidden_layers - 1)
    check_row(f"12b quant={quant}", tmp_path)


def test_softcapped_attention_is_explicit_and_noted(tmp_path: Path) -> None:
    """IAttention cannot cap its scores."""
    spec = spec_called("tiny-dense")
    text = replace(spec.text, attn_logit_softcapping=20.0)
    spec = check_spec(replace(spec, name="capped", text=text))
    how: dict[str, Any] = {"dtype": "float32", "settings": {"attention": "fused"}}
    p = prepare(spec, BuildOptions(backend="trt", random_weights=0, **how), dry=True)
    check(spec, tmp_path, settings=how["settings"])
    notes = dry.full_size(p)["notes"]
    assert len(notes) == spec.text.num_hidden_layers
    assert "IAttention has no softcap" in notes[0]
    assert not nodes_of(p)["TRT_Attention"]


# --- routed experts ---------------------------------------------------------------------------


def routed(
    choices: torch.Tensor, sizes: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, Dialect]:
    """Experts' sums of these choices [B,S,K]: by the network, and one token after the other; and
    the network."""
    (batch, chunk, k), (count, width, inner) = choices.shape, sizes
    g = torch.Generator().manual_seed(0)
    held = {
        "gate_up": torch.randn(count, 2 * inner, width, generator=g),
        "down": torch.randn(count, width, inner, generator=g),
    }
    x, weights = (torch.randn(batch, chunk, n, generator=g) for n in (width, k))
    positions = 7 + torch.arange(chunk).repeat(batch, 1)
    feeds = {"x": x, "weights": weights, "index": choices, "positions": positions}
    e = new_emitter(held.__getitem__)
    kinds = (f"f32[B,S,{width}]", f"f32[B,S,{k}]", f"i64[B,S,{k}]", "i64[B,S]")
    given = {n: e.input(n, parse_type(t)) for n, t in zip(feeds, kinds, strict=True)}
    net = Network(e, None, Limits(batch, 64, 13), {}, given)  # type: ignore[arg-type]
    params = [e.param(Value(n, Type("f32", tuple(t.shape)))) for n, t in held.items()]
    e.scope = "L0.experts"
    node: Any = SimpleNamespace(word=lambda _: "gelu_pytorch_tanh")
    inputs = (given[n] for n in ("x", "weights", "index"))
    e.output("y", experts.experts(net, node, *inputs, *params))
    gate_up, down = held.values()
    gate, up = torch.einsum("bsh,bskih->bski", x, gate_up[choices]).chunk(2, -1)
    made = torch.nn.functional.gelu(gate, approximate="tanh") * up
    want = torch.einsum("bski,bskhi,bsk->bsh", made, down[choices], weights)
    return outputs_of(e, feeds)["y"], want, e


@pytest.fixture
def sort_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sort tokens of any chunk, in blocks of 3."""
    monkeypatch.setattr(experts, "MOVED", 0)
    monkeypatch.setattr(experts, "block_rows", lambda *_: 3)
    monkeypatch.setattr(experts, "sorted_rows", lambda *_: 0)


SORTED = [f"tiny-moe {words}" for words in ("quant=int4", "", "quant=int8", "quant=fp8")]


@pytest.mark.parametrize("row", short(SORTED[0], of=SORTED))
@pytest.mark.usefixtures("sort_all")
def test_models_whose_tokens_are_sorted(row: str, tmp_path: Path) -> None:
    """With padding, experts of every form."""
    check_row(row, tmp_path)


@pytest.mark.usefixtures("sort_all")
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 13])
def test_tokens_of_a_chunk_by_expert(tokens: int) -> None:
    """Also where all tokens choose the same experts, and where experts have a token more than a
    block, which need the most spare blocks."""
    any_two = torch.rand(2, tokens, 8, generator=torch.Generator().manual_seed(1)).topk(2).indices
    four_each = (torch.arange(-1, tokens - 1).clamp(0)[:, None] // 4 * 2 + torch.arange(2)) % 8
    same = torch.tensor([6, 1]).expand(2, tokens, 2)
    for choices in (any_two, same, four_each.expand(2, -1, -1)):
        got, want, e = routed(choices, (8, 16, 12))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert any(n.op_type == "GatherND" for n in e.nodes)


def test_rows_of_a_chunk_by_expert() -> None:
    """26b-a4b's of 1024 tokens: less than a third of all tokens times all experts."""
    assert experts.block_rows(1024, 8, 128) == 256
    assert experts.sorted_rows(1024, 8, 128) * 3 < 1024 * 128


#: build -> tensors that are compared
NETWORKS, MORE = TABLES["trt dialect"]["networks"], TABLES["trt dialect"]["more"]


@pytest.mark.parametrize("row", short(*NETWORKS, of=[*NETWORKS, *MORE]))
def test_numbers(row: str, tmp_path: Path) -> None:
    """By onnxruntime in fp32 as the interpreter: prompts in chunks, decode over each span, drafts,
    and the soft tokens of towers."""
    assert check_row(row, tmp_path).keys() >= {*NETWORKS.get(row, ["logits"])}


def test_no_conditionals() -> None:
    e = Dialect(None)
    e.scope = "L3.mlp.experts"
    x = e.input("x", parse_type("f32[B,S,4]"))
    with pytest.raises(LowerError, match=r"L3\.mlp\.experts: a conditional.*CUDA graph"):
        e.when_one(x, 1, lambda: x, lambda: x)


def test_weights_are_not_copied() -> None:
    """Those of a param in another shape, too, lie where they were."""
    w = torch.randn(64, 64).bfloat16()
    params: Any = SimpleNamespace(tensor={"w": w}.__getitem__)
    e = Dialect(Addresses(params))
    v = Value("w", parse_type("bf16[64,64]"))
    x = e.input("x", parse_type("bf16[B,64]"))
    e.output("y", e.linear(x, e.param(v)))
    assert e.storage.tensors["w"].data_ptr() == w.data_ptr()
    assert len(e.model("network", "", {}).SerializeToString()) < w.nbytes
    e.reshape(e.param(v), 1, 64, 64)
    assert len(e.storage.tensors) == 1


def test_nvfp4_is_e2m1() -> None:
    """In blocks of 16, by the evaluator of the package `onnx`."""
    w = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    stored = quantize.reference(w, form="fp4", group=0, scale="f32")
    types = [parse_type(t) for t in ("f4[32,72]", "f32[32,1]")]
    names = ("w.codes", "w.scales")
    params: Any = SimpleNamespace(tensor=dict(zip(names, stored, strict=True)).__getitem__)
    e = Dialect(Addresses(params))
    codes, scales = (e.param(Value(*v)) for v in zip(names, types, strict=True))
    weight = QuantizedWeight(parse_type("f32[32,128]"), None, codes, scales, False)
    e.output("y", linear(e, e.input("x", parse_type("f32[4,128]")), weight))
    model, x = with_weights(e, "network"), torch.randn(4, 128)
    assert {"w.codes": TensorProto.FLOAT4E2M1}.items() <= {
        t.name: t.data_type for t in model.graph.initializer
    }.items()
    (y,) = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    want = x @ dequantize_codes(*stored, torch.float32).T
    torch.testing.assert_close(torch.from_numpy(y), want, rtol=1e-5, atol=1e-4)


def test_weights_of_another_type() -> None:
    params: Any = SimpleNamespace(tensor=lambda name: torch.zeros(4, 4))
    with pytest.raises(LowerError, match=r"%w is f32\[4,4\], the graph says bf16"):
        Dialect(Addresses(params)).param(Value("w", parse_type("bf16[4,4]")))


def parser(**answers: Any) -> Any:
    """A library whose parser gives these answers."""
    error = SimpleNamespace(desc=lambda: "no such\n    axis", node_operator=lambda: "Softmax")
    error.node_name = lambda: "L7.attn/Softmax"
    given = {
        "load_model_proto": lambda data: True,
        "load_initializer": lambda name, address, nbytes: True,
        "parse_model_proto": lambda: True,
        "num_errors": 1,
        "get_error": lambda i: error,
    }
    return SimpleNamespace(
        trt=SimpleNamespace(OnnxParser=lambda *_: SimpleNamespace(**{**given, **answers}))
    )


NODE = r"the network of prefill: node L7\.attn/Softmax \(Softmax\): no such axis$"


@pytest.mark.parametrize(
    ("call", "errors", "says"),
    [
        ("parse_model_proto", 1, NODE),
        ("load_model_proto", 0, "of prefill: it is no model$"),
        ("load_initializer", 0, "of prefill: it is no model$"),
    ],
)
def test_refused(call: str, errors: int, says: str) -> None:
    """In the parser's words, with the node; without one, in those of the log."""
    params: Any = SimpleNamespace(tensor=lambda name: torch.zeros(64, 64))
    e = Dialect(Addresses(params))
    x = e.input("x", parse_type("f32[B,64]"))
    e.output("y", e.linear(x, e.param(Value("w", parse_type("f32[64,64]")))))
    log = SimpleNamespace(reason=lambda: "it is no model")
    parse(parser(), None, e, "prefill", log)
    with pytest.raises(LowerError, match=says):
        parse(parser(**{call: lambda *_: False, "num_errors": errors}), None, e, "prefill", log)
