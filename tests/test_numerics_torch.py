"""Engines of checkpoints: a compiled chunk over quantised caches, packed weights, and the layouts
that a checkpoint may have.

Logits of compiled engines against transformers are in test_verify.py, in 16 bits in
test_rounding.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir.backends.torch_compile.compile import compile_program
from g4ir.backends.torch_compile.runtime import _load_program
from g4ir.backends.torch_compile.target import Target
from g4ir.engine.build import build, prepare
from g4ir.ir.graph import Builder
from g4ir.ir.interpret import interpret
from g4ir.ir.text import print_graph
from g4ir.model.tensors import dead_tensors
from g4ir.ops import OPS
from g4ir.ops.kv_quant import as_held, comparable
from g4ir.ops.types import Type
from g4ir.plan.formats import weight_sizes
from g4ir.plan.options import BuildOptions
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.write import write_checkpoint
from tests.configs import NAMES, few, spec_called
from tests.oracle import find_oracle, save_checkpoint
from tests.parity import MAX_SEQ, agrees


@pytest.mark.parametrize("to", ["i8", pytest.param("f8e4m3", marks=pytest.mark.full)])
def test_a_compiled_chunk(tmp_path: Path, to: str) -> None:
    """Rows are made, attended to beside a ring, and written into it in place."""
    b = Builder("segment")
    q = b.input("q", Type("f32", (2, "S", 4, 40)))
    k, v = (b.input(name, Type("f32", (2, "S", 2, 40))) for name in "kv")
    positions = b.input("positions", Type("i64", (2, "S")))
    start, lengths = (b.input(name, Type("i64", (2,))) for name in ("start", "lengths"))
    rows = [b.emit("narrow_row", x, to=to) for x in (k, v)]
    ring = as_held(Type("f32", (8, 2, 2, 40)), to)
    old = [b.cache(x, ring) for x in "KV"]
    attrs = {"window": 8, "scale": 0.2, "softcap": 0.0}
    out = b.emit("attention", q, positions, start, *old, *rows, **attrs)
    for cache, new in zip(old, rows, strict=True):
        b.next[cache.name] = b.emit("cache_write", cache, new, start, lengths)
    graph = b.graph(out)
    path = tmp_path / "segment.pt2"
    compile_program(print_graph(graph), Target("cpu"), path)
    g = torch.Generator().manual_seed(0)
    first = torch.tensor([11, 3])
    feeds = {x: torch.randn(2, 5, 4 if x == "q" else 2, 40, generator=g) for x in "qkv"}
    feeds |= {"positions": first[:, None] + torch.arange(5), "start": first}
    feeds |= {"lengths": torch.tensor([5, 2])}
    narrow = OPS["narrow_row"].reference
    state = {x.name: narrow(torch.randn(8, 2, 2, 40, generator=g), to=to) for x in graph.state}
    outputs, after = interpret(graph, feeds, {}, state)
    held = [t.clone() for t in state.values()]
    made = _load_program(path, "cpu")([*feeds.values(), *held])
    for got, want in zip(made, outputs.values(), strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(held, after.values(), strict=True):
        assert torch.equal(comparable(got), comparable(want))


@pytest.mark.parametrize("name", few(NAMES))
def test_packed_weights_have_no_padding(name: str) -> None:
    """What an engine stores is every tensor once: a layer with K=V packs Q and K alone."""
    spec = spec_called(name)
    prepared = prepare(spec, BuildOptions(random_weights=0))
    assert prepared.param_bytes() == weight_sizes(spec, spec.dtype).total
    packs = {
        n.out.name.split(".")[0]: n
        for n in prepared.packing.prologue.find("concat")
        if ".attn." in n.inputs[0].name
    }
    for layer in spec.layers():
        found = packs.get(f"L{layer.index}")
        parts = [v.name.rsplit(".", 1)[1] for v in found.inputs] if found else ["wq"]
        tied = layer.attention.k_eq_v
        assert parts == (
            ["wq"] if layer.donor is not None else ["wq", "wk"] if tied else ["wq", "wk", "wv"]
        )


#: how a checkpoint of KV-shared layers may look
FORMS: dict[str, dict[str, Any]] = {
    "without dead K and V": {},
    "with dead K and V": {"dead": True},
    "under the prefix of the hub": {"prefix": "model.language_model.", "dead": True},
    "under another prefix": {"prefix": "language_model."},
    "under no prefix": {"prefix": "", "dead": True},
    "in shards": {"shards": 3, "dead": True},
}


def test_all_forms_of_a_checkpoint_are_one_engine(tmp_path: Path) -> None:
    oracle = find_oracle(spec_called("tiny-ple"))
    spec, tokens = oracle.spec, oracle.tokens[:1]
    theirs = save_checkpoint(oracle, tmp_path / "theirs")
    found = {"as transformers writes it": reference_logits(theirs, tokens)}
    for i, (form, options) in enumerate(FORMS.items()):
        source = Checkpoint.open(theirs, spec)
        folder = write_checkpoint(tmp_path / f"form{i}", spec, source, **options)
        assert len(Checkpoint.open(folder, spec).ignored) == (
            len(dead_tensors(spec)) if options.get("dead") else 0
        )
        found[form] = reference_logits(folder, tokens)
    want = found["as transformers writes it"]
    agrees(want, oracle.logits[:1, -1], oracle)
    assert all(torch.equal(logits, want) for logits in found.values())


def reference_logits(checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The last logits of an engine of the reference backend."""
    out = checkpoint.with_name(f"{checkpoint.name}-engine")
    engine = build(None, out, checkpoint=checkpoint, backend="reference", max_seq=MAX_SEQ)
    return engine.session().prefill(tokens)
