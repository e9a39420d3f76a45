"""A compiled engine against transformers: a Hugging Face directory in, logits out.

The chain has the rest: the reference backend is compared with transformers (test_numerics.py), each
backend with the reference backend (tests/contract), compiled engines in 16 bits with transformers
in test_rounding.py.
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
from g4ir.engine.engine import Engine
from g4ir.ir.graph import Builder
from g4ir.ir.interpret import interpret
from g4ir.ir.text import print_graph
from g4ir.model.tensors import dead_tensors
from g4ir.ops import OPS
from g4ir.ops.kv_quant import as_held, comparable
from g4ir.ops.types import ITEMSIZE, Type
from g4ir.plan.formats import capacity, weight_sizes
from g4ir.plan.options import BuildOptions
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.write import write_checkpoint
from tests import engines, parity
from tests.configs import NAMES, few, spec_called
from tests.oracle import find_oracle, save_checkpoint
from tests.parity import MAX_SEQ, Case, agrees, built


def shared(name: str) -> Case:
    """The case of an engine of `tests/engines.py`: nothing more is compiled for it."""
    options = engines.limits_of("torch", name)
    return Case(name, options["max_batch"], options["all_logits"], chunk=engines.CHUNK)


@pytest.mark.parametrize("name", ["tiny-moe", pytest.param("tiny-ple", marks=pytest.mark.full)])
def test_an_engine(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Logits of a prompt in chunks and of its text, of ragged rows, and the greedy text; the caches
    that a session allocates are those of the plan."""
    for subject in built(shared(name), tmp_path_factory, "torch"):
        for rows in {1, subject.batch}:
            caches_are_planned(subject.engine, rows)
        for chunk in ("W-1", "W+1", "prime", "all"):
            if subject.engine.all_logits:
                parity.prefill_in_chunks(subject, chunk)
            parity.last_tokens(subject, chunk)
        parity.ragged_rows(subject)
        parity.greedy_text(subject)


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


def caches_are_planned(engine: Engine, rows: int) -> None:
    """Rings of a window's size, the context for full layers, nothing for layers that share."""
    session, most = engine.session(rows), capacity(engine.limits.max_seq)
    owners = [layer.attention for layer in engine.spec.layers() if layer.donor is None]
    slots = [min(a.window or most, most) * a.num_key_value_heads * a.head_dim for a in owners]
    planned = 2 * sum(slots) * rows * ITEMSIZE[engine.dtype]
    allocated = sum(t.untyped_storage().nbytes() for t in session.state.tensors.values())
    assert session.nbytes() == allocated == planned


@pytest.mark.parametrize("name", few(NAMES))
def test_planned_cache_bytes(tmp_path: Path, name: str) -> None:
    engine = build(
        spec_called(name),
        tmp_path / "engine",
        random_weights=0,
        backend="reference",
        max_batch=3,
        max_seq=100,
    )
    for rows in (1, 3):
        caches_are_planned(engine, rows)


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
