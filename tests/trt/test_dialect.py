"""Networks as NVIDIA's parser is given them: what they compute, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from g4ir.backends.primitives.weights import QuantizedWeight, linear
from g4ir.backends.trt.dialect import Dialect
from g4ir.backends.trt.parse import Addresses, parse
from g4ir.errors import LowerError
from g4ir.ir.graph import Value
from g4ir.ops.codecs import dequantize_codes
from g4ir.ops.quant import quantize
from g4ir.ops.types import parse_type
from tests.cases import TABLES
from tests.configs import short
from tests.trt.execute import with_weights
from tests.trt.small import check_row

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


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (
            {"parse_model_proto": lambda: False},
            r"the network of prefill: node L7\.attn/Softmax \(Softmax\): no such axis$",
        ),
        ({"load_model_proto": lambda data: False, "num_errors": 0}, "of prefill: it is no model$"),
        ({"load_initializer": lambda *_: False, "num_errors": 0}, "of prefill: it is no model$"),
    ],
    ids=["a node", "the model", "a weight"],
)
def test_refused(answers: dict[str, Any], says: str) -> None:
    """In the parser's words, with the node; without one, in those of the log."""
    params: Any = SimpleNamespace(tensor=lambda name: torch.zeros(64, 64))
    e = Dialect(Addresses(params))
    x = e.input("x", parse_type("f32[B,64]"))
    e.output("y", e.linear(x, e.param(Value("w", parse_type("f32[64,64]")))))
    log = SimpleNamespace(reason=lambda: "it is no model")
    parse(parser(), None, e, "prefill", log)
    with pytest.raises(LowerError, match=says):
        parse(parser(**answers), None, e, "prefill", log)
