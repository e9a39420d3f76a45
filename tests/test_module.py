"""The model as an nn.Module: a transformers model with the weights of any MODEL."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.errors import MissingError
from g4ir.spec.record import load_spec
from tests.configs import cut
from tests.engines import random_checkpoint
from tests.gguf_files import bare_file
from tests.oracle import random_tokens, relative

BUDGET = 1e-4
LIMITS: dict[str, Any] = {"backend": "reference", "all_logits": True, "max_seq": 64}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return relative(a, b).max().item()


@pytest.mark.parametrize(
    "name", ["tiny-dense", "tiny-moe", "tiny-ple", "tiny-gemma3", "tiny-media", "tiny-unified"]
)
def test_logits_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    spec = load_spec(name)
    ids = random_tokens(spec, 1, 2 * (spec.text.sliding.window or 8) + 5)
    module = g4ir.module(spec, random_weights=3)
    options = {**LIMITS, "dtype": "float32", "random_weights": 3}
    with g4ir.build(spec, tmp_path / "e", **options) as engine:
        want = engine.session().prefill(ids, all_logits=True)
    out = module(ids, labels=ids, output_hidden_states=True, output_attentions=True)
    assert distance(out.logits, want) < BUDGET
    assert len(out.hidden_states) == len(out.attentions) + 1 == spec.text.num_hidden_layers + 1
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    twin = copy.deepcopy(module)
    assert module.spec == spec and torch.equal(twin(ids).logits, out.logits)
    with pytest.warns(UserWarning, match="nothing calls a list of modules"):
        twin.model.layers.register_forward_hook(print)
    assert [len(m.model.layers._forward_hooks) for m in (module, twin)] == [0, 1]


def test_weights_of_a_checkpoint_and_a_quantised_gguf_file(tmp_path: Path) -> None:
    """The logits of an engine of the same file; codes are the numbers that they stand for."""
    spec = load_spec("tiny-gemma3")
    ids = random_tokens(spec, 1, 30)
    checkpoint = random_checkpoint(tmp_path / "c", spec)
    files = (checkpoint, bare_file(tmp_path / "a.gguf", spec, kind="Q8_0"))
    for i, file in enumerate(files):
        options = {**LIMITS, "dtype": "float32", "checkpoint": file}
        with g4ir.build(None, tmp_path / str(i), **options) as engine:
            want = engine.session().prefill(ids, all_logits=True)
        for model in (file, tmp_path / str(i)):
            assert distance(g4ir.module(model)(ids).logits, want) < BUDGET
    half = g4ir.module(files[0], dtype="bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ("tiny-dense", "tiny-moe"))
def test_it_compiles_without_graph_breaks_and_exports(name: str) -> None:
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


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingError, match=r"g4ir\.module needs transformers.*g4ir\[hf\]"):
        g4ir.module(load_spec("tiny-dense"))
