"""The model as an nn.Module, beside transformers: logits, gradients, names, compilers."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.builder.module import TextModule
from g4ir.errors import G4Error
from g4ir.spec.record import Spec, load_spec
from tests.configs import random_spec
from tests.engines import random_checkpoint
from tests.gguf_files import bare_file
from tests.oracle import hf_model, random_tokens

#: dense with K=V, experts, per-layer embeddings with shared K and V, Gemma 3, the text models of
#: media; softcap of attention, untied head
SPECS = {
    name: load_spec(name)
    for name in ("tiny-dense", "tiny-moe", "tiny-ple", "tiny-gemma3", "tiny-media", "tiny-unified")
}
SPECS |= {f"random-{seed}": random_spec(seed) for seed in (2, 7, 1001)}
BUDGET = 1e-4


@cache
def small(name: str) -> Spec:
    """A variant with two layers: a sliding and a full one."""
    spec = load_spec(name)
    text = replace(spec.text, num_hidden_layers=2, pattern=("sliding", "full"))
    return replace(spec, text=text)


def tokens(spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [2, S] longer than a window, and labels, some of which are left out."""
    ids = random_tokens(spec, 2, 2 * (spec.text.sliding.window or 8) + 5)
    labels = ids.clone()
    labels[0, :3] = labels[1, -6:] = -100
    return ids, labels


def gradients(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest of b."""
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


@pytest.mark.parametrize("name", SPECS)
def test_logits_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    spec = SPECS[name]
    wanted, made = hf_model(spec), g4ir.module(spec)
    state = wanted.state_dict()  # of a random spec also experts of layers that have none
    made.load_state_dict({name: state[name] for name in made.state_dict()})
    ids, labels = tokens(spec)
    got, want = made(ids, labels=labels), wanted(ids, labels=labels, use_cache=False)
    assert distance(got.logits, want.logits) < BUDGET
    assert abs(got.loss.item() - want.loss.item()) < BUDGET
    got.loss.backward()
    want.loss.backward()
    own, theirs = gradients(made), gradients(wanted)
    assert own.keys() == theirs.keys() and len(own) > 20
    assert max(distance(own[n], theirs[n]) for n in own) < BUDGET


@pytest.mark.parametrize("name", ("tiny-moe", "tiny-ple", "tiny-gemma3"))
def test_names_are_those_of_transformers(name: str) -> None:
    """Both ways, parameters and buffers; K and V that no layer reads are ignored."""
    spec = load_spec(name)
    wanted, made = hf_model(spec), g4ir.module(spec)
    assert {n for n, _ in made.named_parameters()} == {n for n, _ in wanted.named_parameters()}
    wanted.load_state_dict(made.state_dict())
    state = wanted.state_dict()
    dead = f"model.layers.{spec.text.num_hidden_layers - 1}.self_attn.k_proj.weight"
    state.setdefault(dead, torch.zeros(3))
    made.load_state_dict(state)
    with pytest.raises(RuntimeError, match="other"):
        made.load_state_dict({**state, "other": torch.zeros(1)})
    assert all(torch.equal(t, state[n]) for n, t in made.state_dict().items())


@pytest.mark.parametrize("name", ("tiny-moe", "tiny-ple"))
def test_it_compiles_without_graph_breaks_and_exports(name: str) -> None:
    """Also what is data-dependent without a compiler: which experts compute which tokens."""
    module = g4ir.module(small(name))
    ids, labels = tokens(module.spec)
    module(ids, labels=labels).loss.backward()
    plain = gradients(module)
    module.zero_grad()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(ids, labels=labels)
    compiled.loss.backward()
    assert max(distance(p, plain[n]) for n, p in gradients(module).items()) < BUDGET
    length = torch.export.Dim("S", min=2, max=64)
    program = torch.export.export(module, (ids,), dynamic_shapes=({1: length},)).module()
    shorter = ids[:, :9]
    assert distance(program(shorter).logits, module(shorter).logits) < BUDGET


@pytest.mark.full
def test_the_default_compiler_takes_it() -> None:
    module = g4ir.module(small("tiny-dense"))
    ids, _ = tokens(module.spec)
    got = torch.compile(module, fullgraph=True)(ids).logits
    assert distance(got, module(ids).logits) < BUDGET


def test_projections_can_be_hooked_replaced_and_copied() -> None:
    module = g4ir.module(load_spec("tiny-dense"))
    ids, _ = tokens(module.spec)
    want, seen = module(ids).logits, []
    other = copy.deepcopy(module)
    layer: Any = other.model.layers[2]  # type: ignore[union-attr,index]
    layer.self_attn.o_proj.register_forward_hook(lambda m, given, out: seen.append(out.shape))
    width = layer.self_attn.o_proj.out_features
    assert torch.equal(other(ids).logits, want) and seen == [(*ids.shape, width)]
    layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Dropout(1.0))
    assert not torch.equal(other(ids).logits, want) and torch.equal(module(ids).logits, want)


def test_weights_of_a_checkpoint_and_a_quantised_gguf_file(tmp_path: Path) -> None:
    """The logits of an engine of the same file; codes are the numbers that they stand for."""
    spec = load_spec("tiny-gemma3")
    ids, _ = tokens(spec)
    files = (
        random_checkpoint(tmp_path / "c", spec),
        bare_file(tmp_path / "a.gguf", spec, kind="Q8_0"),
    )
    options = {"backend": "reference", "dtype": "float32", "all_logits": True, "max_seq": 64}
    for i, file in enumerate(files):
        with g4ir.build(None, tmp_path / str(i), checkpoint=file, **options) as engine:
            (want,) = engine.session().prefill(ids[:1], all_logits=True)
        assert distance(g4ir.module(file)(ids[:1]).logits[0], want) < BUDGET
        same = g4ir.module(tmp_path / str(i))  # of an engine directory
        assert distance(same(ids[:1]).logits[0], want) < BUDGET
    half = g4ir.module(files[0], dtype="bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    module = _tiny()
    ids, _ = tokens(module.spec)
    padded = torch.nn.functional.pad(ids, (0, 7))
    assert distance(module(padded).logits[:, : ids.shape[1]], module(ids).logits) < BUDGET


@pytest.mark.parametrize(
    "make, says",
    (
        (lambda: g4ir.module("tiny-moe"), "variant tiny-moe has no hub id"),
        (lambda: g4ir.module("absent.gguf"), r"absent\.gguf: no such file"),
        (lambda: g4ir.module("tiny-mo"), "did you mean tiny-moe"),
        (lambda: g4ir.module("some/model"), "Hugging Face cache; download it with"),
        (lambda: g4ir.export("some/model", "out"), "Hugging Face cache; download it with"),
        (lambda: g4ir.export(load_spec("tiny-moe"), "out"), "spec tiny-moe has no weights; give"),
        (lambda: copy.deepcopy(_tiny()).half()(torch.ones(1, 3).long()), "give dtype= to g4ir.mod"),
        (lambda: g4ir.module("absent", random_weights=0), "goes with a variant or a spec"),
        (lambda: g4ir.module("tiny-moe", dtype="int8", random_weights=0), "expected float32"),
        (lambda: g4ir.module(load_spec("tiny-moe-assistant")), "is a drafter"),
        (lambda: _tiny()(torch.zeros(3, dtype=torch.long)), r"input_ids: expected int64 \[batch"),
        (lambda: _tiny()(torch.zeros(1, 3)), r"found torch\.float32 \[1, 3\]"),
        (
            lambda: _tiny()(torch.ones(1, 3).long(), labels=torch.ones(1, 2).long()),
            r"labels: expected the shape of input_ids, \[1, 3\]; found \[1, 2\]",
        ),
    ),
)
def test_refused(make: Any, says: str) -> None:
    with pytest.raises(G4Error, match=says):
        make()


@cache
def _tiny() -> TextModule:
    return g4ir.module(small("tiny-dense"))
