"""Blocks of media in attention: graphs, passes, and every lowering of the op. That it sees what
transformers does: test_media_models.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from g4ir import Graph, Program, Spec, load_spec
from g4ir.backends.cuda.kernels.base import reads_blocks
from g4ir.backends.cuda.schedule import schedule
from g4ir.backends.inductor.lower import COMMON, SegmentModule
from g4ir.backends.inductor.lowered import lowered_by_op
from g4ir.backends.inductor.target import Target
from g4ir.errors import InputError
from g4ir.ir.interpret import run_node
from g4ir.model.decoder import BLOCKS
from g4ir.model.media import Media, placeholders
from g4ir.model.text import PHASES, build_graph
from g4ir.ops import OPS
from g4ir.ops.types import Type
from g4ir.passes import PassOptions, run_passes, run_program
from g4ir.passes.latent_kv import LatentOptions
from g4ir.spec.parts import SLIDING
from tests.cases import TABLES
from tests.configs import check_spec, spec_called
from tests.test_ops import node, tensors

OPS_OF_CACHES = ("attention", "attention_latent")
ATTENTIONS = [(op, i) for op in OPS_OF_CACHES for i, _ in enumerate(OPS[op].samples)]


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", ATTENTIONS)
def test_torch_lowerings(case: tuple[str, int], rows: int, softcap: float) -> None:
    """Per head (one row behind a window), grouped, with a softcap, over quantised caches."""
    s = OPS[case[0]].samples[case[1]]
    types = s.types()
    if rows == 1 and types[0].shape[0] == 2:
        types = tuple(map(one_row, types))
    n = node(case[0], types, {**s.attrs, "softcap": softcap})
    g = Graph("segment", n.inputs, (), (), (n,), n.outputs, {})
    given = tensors(types, s)
    (got,) = SegmentModule(lowered_by_op(g, COMMON))(*given)
    torch.testing.assert_close(got, run_node(n, given)[0], rtol=1e-5, atol=1e-5)


def one_row(t: Type) -> Type:
    """A batch of one; the batch is the first dim of 2 but in a weight."""
    return t.with_shape(
        *(1 if d == 2 and i == t.shape.index(2) else d for i, d in enumerate(t.shape))
    )


def test_kernels_are_not_chosen() -> None:
    spec, target = load_spec("26b-a4b"), Target("cuda", "h200", 1)
    for phase in ("prefill", BLOCKS):
        g = run_passes(build_graph(spec, phase, dtype="bf16"))
        s = schedule(g, target)
        nodes = [n for n in g.find("attention") if n.out.type.shape[1] == "S"]
        assert len(nodes) > 20
        for n in nodes:
            assert reads_blocks(n) == (phase == BLOCKS and bool(n.attrs["window"]))
            assert (s.find(n) is None) == reads_blocks(n)


def odd(name: str, **text: Any) -> Spec:
    spec = spec_called(name)
    text = {"use_bidirectional_attention": "vision"} | text
    tokens = replace(spec.tokens, pad=3, image=100, video=101, audio=102)
    return check_spec(replace(spec, tokens=tokens, text=replace(spec.text, **text)))


def spec_of(name: str) -> Spec:
    if name != "tied":
        return odd(name if name.startswith("random") else f"{name}-small")
    base = odd("combined")
    return odd("combined", sliding=replace(base.text.sliding, k_eq_v=True))


SPECS = ("12b", "26b-a4b", "31b", "e2b", "tied", "random-2", "random-5", "random-11")


def program(spec: Spec, all_logits: bool = False) -> Program:
    media = Media(("image", "video"))
    return Program({p: build_graph(spec, p, all_logits, media=media) for p in (*PHASES, BLOCKS)})


CASES = [*product(SPECS, ["off"], [False]), *map(tuple, TABLES["blocks"])]


@pytest.mark.parametrize(("name", "form", "all_logits"), CASES)
def test_passes_agree_on_the_state(name: str, form: str, all_logits: bool) -> None:
    """The graphs share caches and params; every layer that reads blocks has a window."""
    spec = spec_of(name)
    p = run_program(program(spec, all_logits), options=PassOptions((LatentOptions(form),)))
    plain, blocks = p.graphs["prefill"], p.graphs[BLOCKS]
    assert [n.op for n in plain.nodes] == [n.op for n in blocks.nodes]
    assert plain.state == blocks.state and plain.params == blocks.params
    narrow = 0
    for n in blocks.find("attention", "attention_latent"):
        chunk = n.out.type.shape[1] == "S"
        narrow += not chunk
        assert reads_blocks(n) == (chunk and bool(n.attrs["window"]))
    assert bool(narrow) != all_logits


def test_graphs_with_media() -> None:
    spec = spec_of("31b")
    inputs = {v.name for v in build_graph(spec, BLOCKS).inputs}
    assert inputs == {"embeds", "positions", "lengths", "block_ids"}
    assert build_graph(spec, "embed") == build_graph(spec, "embed", media=Media())
    (n,) = build_graph(spec, "embed", media=Media(("video", "audio"))).find("mask_ids")
    assert n.attrs == {"ids": (101, 102), "pad": 3}
    assert placeholders(spec.tokens) == {"image": 100, "video": 101, "audio": 102}
    assert placeholders(spec.tokens, ("video",)) == {"video": 101}


def test_no_blocks_without_pictures_or_windows() -> None:
    plain = spec_called("e2b-small")
    with pytest.raises(InputError, match="e2b-small has no prefill_media"):
        build_graph(plain, BLOCKS)
    full = odd("31b-small", pattern=("full",))
    assert SLIDING not in full.text.layer_types
    with pytest.raises(InputError, match="no prefill_media"):
        build_graph(full, BLOCKS)
