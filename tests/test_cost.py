"""The cost model against a counter that watches torch, and against itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from g4ir import build_graph, interpret, load_spec
from g4ir.errors import InputError
from g4ir.ir.flatten import flatten
from g4ir.ir.graph import Graph, Value
from g4ir.ir.rewrite import split_prologue
from g4ir.ops import OPS
from g4ir.ops.attention import slot_positions, visible, visible_pairs
from g4ir.ops.moe import distinct_experts
from g4ir.ops.types import torch_dtype
from g4ir.passes import PASSES, run_passes
from g4ir.plan.cost import (
    KINDS,
    Cost,
    NodeCost,
    Roof,
    Step,
    by_kind,
    floor,
    graph_costs,
    step_costs,
    total,
)
from g4ir.plan.count import counts
from g4ir.plan.gpus import GPUS, find_gpu, parse_bytes
from tests.cases import read_table
from tests.configs import TINY, VARIANTS

CASES = read_table("plan_cases.yaml")
#: ops whose FLOPs are those of matrix products alone, as the counter sees them
PRODUCTS = ("linear", "router", "experts")


@cache
def graph(
    name: str, phase: str = "decode", all_logits: bool = False, skip: tuple[str, ...] = ()
) -> Graph:
    return run_passes(build_graph(load_spec(name), phase, all_logits), skip=skip)


# --- against torch's own counter --------------------------------------------------------------


def tensor(v: Value, dims: Mapping[str, int], seed: int) -> torch.Tensor:
    t = v.type.bind(dims)
    shape = [int(d) for d in t.shape]
    if t.dtype == "i64":
        return torch.zeros(shape, dtype=torch.int64)
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(torch_dtype(t.dtype))


def counted(g: Graph, B: int, S: int, C: int, slots: int) -> dict[str, int]:
    """First result of each node -> FLOPs that torch counted while the interpreter ran it."""
    dims = {"B": B, "S": S, "C": slots}
    groups = (g.inputs, g.params, g.state)
    given = [{v.name: tensor(v, dims, i) for i, v in enumerate(group)} for group in groups]
    given[0]["positions"] = C + torch.arange(S).expand(B, S)
    given[0]["lengths"] = torch.full((B,), S)
    seen, before = dict[str, int](), 0
    first = {v.name: n.outputs[0].name for n in g.nodes for v in n.outputs}

    def watch(v: Value, _: Any) -> None:
        nonlocal before
        now = counter.get_total_flops()
        seen[first[v.name]] = seen.get(first[v.name], 0) + now - before
        before = now

    with FlopCounterMode(display=False) as counter:
        interpret(g, *given, watch)
    return seen


@pytest.mark.covering
@pytest.mark.parametrize("skip", [(), PASSES, ("last_token_only",), ("fuse_qkv", "plan_cache")])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", TINY)
def test_products_are_what_torch_counts(name: str, phase: str, skip: tuple[str, ...]) -> None:
    g = flatten(split_prologue(graph(name, phase, skip=skip))[1])
    B, S, C = 3, (5 if phase == "prefill" else 1), 11
    seen = counted(g, B, S, C, slots=C + S)
    costs = graph_costs(g, B=B, S=S, C=C)
    assert [c.node for c in costs] == list(seen)
    for c in costs:
        if c.op in PRODUCTS:
            assert c.cost.flops == seen[c.node] > 0, c
        elif c.op != "attention":
            assert seen[c.node] == 0, c
    kinds = {c.kind for c in costs if c.op in PRODUCTS}
    own = {"tiny-moe": {"experts"}, "tiny-ple": {"ple"}}.get(name, set())
    assert kinds == set(KINDS[:6]) - {"kv"} - ({"experts", "ple"} - own)


@pytest.mark.parametrize("name", TINY)
def test_attention_is_what_torch_counts_where_every_slot_is_seen(name: str) -> None:
    """A single query over caches that are full: a ring of its window and as many slots as tokens.
    The reference works on every slot, so a chunk or an empty slot costs it more than is needed."""
    g = graph(name)
    seen = counted(split_prologue(g)[1], 2, 1, 30, slots=31)
    exact = {c.node: c.cost.flops for c in graph_costs(g, B=2, C=30) if c.op == "attention"}
    assert exact == {node: seen[node] for node in exact} and exact
    empty = counted(split_prologue(g)[1], 2, 1, 3, slots=31)
    some = [c for c in graph_costs(g, B=2, C=3) if c.op == "attention"]
    assert all(c.cost.flops < empty[c.node] for c in some)


# --- attention and caches ---------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 12), st.booleans())
def test_visible_pairs_against_the_mask(queries: int, held: int, window: int, after: bool) -> None:
    """The keys that the op's own mask shows, for a chunk beside a cache and for the newest token
    over the cache after its write; a ring of the window's slots or a full-length cache."""
    for slots in {window or held + queries, held + queries}:
        position = held + torch.arange(queries)[None]
        if after:
            position, queries = position[:, -1:], 1
            written = position[0, -1:] + 1
            keys = slot_positions(written, slots)
            count = min(slots, int(written))
        else:
            keys = slot_positions(torch.tensor([held]), slots)
            keys = torch.cat((keys, position.t()))
            count = min(slots, held) + queries
        want = int(visible(keys, position, window).sum())
        assert visible_pairs(queries, count, window) == want


@pytest.mark.parametrize("name", ["e2b", "26b-a4b", "tiny-ple"])
@given(tokens=st.integers(1, 3000), chunk=st.integers(1, 1500))
@settings(max_examples=5)
def test_a_prompt_costs_the_same_in_any_chunks(name: str, tokens: int, chunk: int) -> None:
    """Where every row is an output: FLOPs are exact, so they add up. Weights are read again."""
    g = graph(name, "prefill", True)
    cost, whole = step_costs(g), total(graph_costs(g, S=tokens))
    steps = (Step(1, min(chunk, tokens - at), at) for at in range(0, tokens, chunk))
    together = sum(map(cost, steps), Cost())
    assert together.flops == whole.flops and together.weight_bytes >= whole.weight_bytes


# --- what passes may change -------------------------------------------------------------------


def products(g: Graph, step: Mapping[str, int]) -> dict[str, int]:
    """FLOPs of matrix products by kind."""
    table = dict.fromkeys(KINDS, 0)
    for c in graph_costs(flatten(g), **step):
        table[c.kind] += c.cost.flops if c.op in (*PRODUCTS, "attention") else 0
    return table


@pytest.mark.covering
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@given(skip=st.sets(st.sampled_from(PASSES)), size=st.integers(2, 20), held=st.integers(0, 20))
@settings(max_examples=25)
def test_fusion_keeps_products(phase: str, name: str, skip: set[str], size: int, held: int) -> None:
    chosen = tuple(sorted(skip | {"last_token_only"}))
    step = {"B": 2, "S": size, "C": held}
    graphs = build_graph(load_spec(name), phase), graph(name, phase, skip=chosen)
    want, got = (products(g, step) for g in graphs)
    assert got == want
    plain, fused = (graph_costs(g, **step) for g in graphs)
    assert total(fused).other_bytes <= total(plain).other_bytes
    assert total(fused).state_bytes <= total(plain).state_bytes
    if phase == "prefill":
        short = products(graph(name, phase), step)
        assert all(short[k] <= n for k, n in want.items())
        assert short["head"] * size == want["head"]
    else:
        assert total(fused).weight_bytes == total(plain).weight_bytes


def test_operands_of_a_fused_op_move_once() -> None:
    """A K=V layer's packed projection: its k is normed twice, and read once."""
    g = graph("31b")
    n = next(n for n in g.find("qkv_write") if not n.attrs["values"])
    (cost,) = (c.cost for c in graph_costs(g, B=4, C=100) if c.node == n.outputs[0].name)
    sizes = [v.type.bind({"B": 4}).nbytes() for v in (*n.inputs[:7], n.outputs[0])]
    assert cost.other_bytes == sum(sizes) - sizes[1] - sizes[2]
    assert cost.weight_bytes == sizes[1] + sizes[2]
    row = n.inputs[7].type
    assert cost.state_bytes == 2 * 4 * int(row.shape[2]) * int(row.shape[3]) * 2


# --- weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_reads_the_active_parameters(name: str) -> None:
    """Once each, with the scalars of the layers; the token's table row is the embed graph's."""
    spec = load_spec(name)
    count = counts(spec)
    read = total(graph_costs(graph(name))).weight_bytes
    assert read == 2 * (count.active + count.layer_scalars + count.final_norm)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=30)
def test_expected_distinct_experts_by_enumeration(count: int, top_k: int, tokens: int) -> None:
    top_k = min(top_k, count)
    choices = list(itertools.combinations(range(count), top_k))
    tokens = min(tokens, 2 if len(choices) > 8 else 3)
    drawn = [len(set().union(*some)) for some in itertools.product(choices, repeat=tokens)]
    assert distinct_experts(count, top_k, tokens) == pytest.approx(sum(drawn) / len(drawn))


# --- the roof ---------------------------------------------------------------------------------


def test_a_floor_is_the_longer_of_bytes_and_flops() -> None:
    roof = Roof(100.0, 10.0)
    slow = floor(Cost(flops=50, weight_bytes=200, state_bytes=100, other_bytes=10**9), roof)
    assert (slow.memory_s, slow.compute_s, slow.seconds, slow.bound) == (3, 5, 5, "compute")
    assert floor(Cost(flops=20, weight_bytes=300), roof).bound == "memory"
    costs = [NodeCost("a", "linear", "mlp", Cost(50, 0)), NodeCost("b", "x", "kv", Cost(0, 0, 500))]
    kinds = {kind: floor(cost, roof).seconds for kind, cost in by_kind(costs).items()}
    assert kinds == {"kv": 5, "mlp": 5}
    assert floor(total(costs), roof).seconds == 5, "one overlaps the other"


# --- GPUs -------------------------------------------------------------------------------------


def test_the_cards() -> None:
    for name, gpu in GPUS.items():
        sold = int(re.fullmatch(r".*-(\d+)gb", name)[1])  # type: ignore[index]
        assert gpu.name == name and gpu.source
        assert 0.99 * sold * 1e9 <= gpu.memory_bytes <= 1.001 * sold * 2**30
        assert gpu.step_roof and gpu.step_roof.name == name
        if gpu.bf16_flops_per_s:
            assert gpu.roof.name == name and 10 < gpu.roof.flops_per_s / gpu.roof.bytes_per_s < 500
        else:
            with pytest.raises(InputError, match="FLOP/s are not published"):
                _ = gpu.roof


TEXTS = CASES["gpus"]


@pytest.mark.parametrize(("text", "name"), [*((n, n) for n in GPUS), *TEXTS["cards"].items()])
def test_a_card_by_name(text: str, name: str) -> None:
    assert find_gpu(text) is GPUS[name]


@pytest.mark.parametrize(("text", "size"), TEXTS["sizes"].items())
def test_a_device_by_size(text: str, size: int) -> None:
    gpu = find_gpu(text)
    assert (gpu.memory_bytes, gpu.bytes_per_s) == (size, None)
    with pytest.raises(InputError, match="name a card"):
        _ = gpu.roof


LONG = {"9" * 5000: "expected bytes above 0"}


@pytest.mark.parametrize(("text", "message"), [*TEXTS["refused"].items(), *LONG.items()])
def test_bad_gpus(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as e:
        find_gpu(text)
    assert len(str(e.value)) < 400


@given(st.text(max_size=30) | st.from_regex(r"[0-9.e+-]{1,12}[kmgtiKMGTI]{0,3}[bB]?"))
def test_any_text_is_a_size_or_an_error(text: str) -> None:
    try:
        assert 1 <= parse_bytes(text, "--gpu") <= 10**18
        assert find_gpu(text).memory_bytes
    except InputError as e:
        assert str(e).startswith(("--gpu ", "GPU ", "unknown GPU "))


def test_every_op_has_a_kind() -> None:
    """Those that serve several parts, by the name of their result."""
    others = {name for name, op in OPS.items() if not op.kind}
    named = [c for v in TINY for c in graph_costs(graph(v)) if c.op in others]
    assert named and all(c.kind != "other" for c in named)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 40])
def test_a_ring_is_written_where_it_keeps_the_tokens(tokens: int) -> None:
    """Of a chunk longer than the ring, the last tokens alone."""
    spec = load_spec("tiny-dense")
    g = graph("tiny-dense", "prefill")
    writes = [c for c in graph_costs(g, B=2, S=tokens, C=5) if c.op == "cache_write"]
    written = {c.node: c.cost.state_bytes for c in writes}
    for layer in spec.layers():
        kind = layer.attention
        row = 2 * 4 * kind.num_key_value_heads * kind.head_dim
        kept = min(tokens, kind.window or tokens)
        assert written[f"L{layer.index}.k.next"] == written[f"L{layer.index}.v.next"] == row * kept
