"""fp32 logits against transformers, at every position: variants, random specs, chunks, rows.

The budget of each comparison is measured on the reference itself in the same run, see
`tests/oracle.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir.ir.graph import Graph, Node, Program
from g4ir.ir.rewrite import rebuild
from g4ir.model.text import build_program
from g4ir.ops.attention import visible
from g4ir.spec.record import load_spec
from tests import parity
from tests.configs import FEATURES, FEW, NAMES, RANDOM_SEEDS, SMALL, few, random_spec, spec_called
from tests.oracle import Oracle, find_oracle, relative
from tests.parity import CHUNKS, agrees, interpreted, prefill_then_decode
from tests.runner import Session, built_program, open_session

MORE_SEEDS = range(len(RANDOM_SEEDS), 10 * len(RANDOM_SEEDS))
FEWER = 24  # greedy tokens of the short run


def oracle_of(name: str) -> Oracle:
    return find_oracle(spec_called(name))


# --- every position ---------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", few(NAMES))
def test_prefill_in_chunks(name: str, chunk: str) -> None:
    parity.prefill_in_chunks(interpreted(oracle_of(name)), chunk)


@pytest.mark.parametrize("name", few(NAMES))
def test_decode_past_three_windows(name: str) -> None:
    parity.decode_past_three_windows(interpreted(oracle_of(name)))


@pytest.mark.full
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_more_random_specs(seed: int) -> None:
    oracle = find_oracle.__wrapped__(random_spec(seed))  # not kept
    for size in (CHUNKS[c](oracle.window, oracle.prompt) for c in CHUNKS):
        session = open_session(oracle, 2, size, True)
        agrees(prefill_then_decode(session, oracle.tokens, oracle.prompt), oracle.logits, oracle)


def test_random_specs_have_every_feature() -> None:
    texts = [random_spec(seed).text for seed in RANDOM_SEEDS]
    for feature, has in FEATURES.items():
        found = {bool(has(text)) for text in texts}
        assert found == {True, False}, f"no random spec differs in {feature!r}"


@pytest.mark.parametrize("name", few(NAMES))
def test_oracle_is_strict(name: str) -> None:
    """Seeds are chosen so that the reference agrees with itself to 1e-4 of a row's rms."""
    assert oracle_of(name).budget < 4e-4


# --- the last token only ----------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("size", [5, 9, 64])
@pytest.mark.parametrize("name", few(NAMES))
def test_last_token_graphs(name: str, size: int) -> None:
    parity.last_tokens(interpreted(oracle_of(name), all_logits=False), size, steps=3)


# --- ragged rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(NAMES))
def test_ragged_rows_equal_single_rows(name: str) -> None:
    parity.ragged_rows(interpreted(oracle_of(name), 5, all_logits=False))


@pytest.mark.parametrize("name", SMALL)
def test_empty_row_is_untouched(name: str) -> None:
    oracle = oracle_of(name)
    session = open_session(oracle, 2, 5)
    session.prefill(oracle.tokens[:, :20])
    before = {k: v[:, 0].clone() for k, v in session.state.items()}
    session.prefill(oracle.tokens[:, 20:33], torch.tensor([0, 13]))
    session.decode(oracle.tokens[:, 33], torch.tensor([False, True]))
    assert all(torch.equal(before[k], v[:, 0]) for k, v in session.state.items())
    assert session.length.tolist() == [20, 34]
    got = session.decode(oracle.tokens[:, 20])
    agrees(got[:1], oracle.logits[:1, 20], oracle)


# --- greedy text ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(NAMES))
def test_greedy_text_is_identical(name: str, full: bool) -> None:
    s = interpreted(oracle_of(name), all_logits=False)
    parity.greedy_text(s, parity.GREEDY if full else FEWER)


# --- KV sharing -------------------------------------------------------------------------------


# --- what happens when a feature is dropped -----------------------------------------------------

Change = Callable[[Graph], Graph]


def without(*suffixes: str) -> Change:
    """Pass the first input of nodes of this name through."""

    def change(g: Graph) -> Graph:
        gone = [n for n in g.nodes if n.outputs[0].name.endswith(suffixes)]
        rename = {n.out.name: n.inputs[0] for n in gone}
        kept = tuple(n for n in g.nodes if n not in gone)
        return rebuild(replace(g, nodes=kept), rename)

    return change


def with_attrs(op: str, **changed: Callable[[Any], Any]) -> Change:
    """Recompute attributes of all nodes of an op."""

    def one(n: Node) -> Node:
        new = {k: f(n.attrs[k]) for k, f in changed.items()} if n.op == op else {}
        return replace(n, attrs={**n.attrs, **new})

    return lambda g: replace(g, nodes=tuple(map(one, g.nodes)))


def normed_keys(g: Graph) -> Graph:
    """V from K after its norm, where V is the raw K."""
    normed = {n.inputs[0].name: n.out for n in g.nodes if n.outputs[0].name.endswith(".k.norm")}

    def one(n: Node) -> Node:
        raw = n.outputs[0].name.endswith(".v.norm") and normed.get(n.inputs[0].name)
        return replace(n, inputs=(raw,)) if raw else n

    return rebuild(replace(g, nodes=tuple(map(one, g.nodes))))


def first_donor(g: Graph) -> Graph:
    """Layer 10 and on read layer 0's keys, not the last sliding owner's."""
    made = {v.name: v for n in g.nodes for v in n.outputs}

    def one(n: Node) -> Node:
        layer = n.outputs[0].name.partition(".")[0].removeprefix("L")
        if n.op not in ("cache_write", "attention") or int(layer) < 10:
            return n
        names = (v.name.replace("L8.attn", "L0.attn") for v in n.inputs)
        return replace(n, inputs=tuple(made.get(x, v) for x, v in zip(names, n.inputs)))

    return replace(g, nodes=tuple(map(one, g.nodes)))


#: what is dropped -> (a spec that has it, the change)
ABLATIONS: dict[str, tuple[str, Change]] = {
    "V norm": ("e2b-small", without(".v.norm")),
    "K norm": ("e2b-small", without(".k.norm")),
    "Q norm": ("e2b-small", without(".q.norm")),
    "input norm": ("e2b-small", without(".in", "pre.norm")),
    "post-attention norm": ("e2b-small", without(".attn.post")),
    "post-feedforward norm": ("e2b-small", without(".ffn.post")),
    "dense norm beside experts": ("26b-a4b-small", without(".mlp.post")),
    "expert norm": ("26b-a4b-small", without(".moe.post")),
    "router norm": ("26b-a4b-small", without(".router_in")),
    "router root": ("26b-a4b-small", with_attrs("router", root=lambda r: 1.0)),
    "one expert less": ("26b-a4b-small", with_attrs("router", top_k=lambda k: k - 1)),
    "embedding scale": ("31b-small", with_attrs("embedding", scale=lambda s: 1.0)),
    "per-layer scale": ("e2b-small", with_attrs("embedding", scale=lambda s: s if s > 4 else 1.0)),
    "per-layer context norm": ("e2b-small", without("ple.context")),
    "per-layer post norm": ("e2b-small", without(".ple.post")),
    "layer scalar": ("31b-small", without(*(f"L{i}.out" for i in range(12)))),
    "window of W - 1": ("31b-small", with_attrs("attention", window=lambda w: w and w - 1)),
    "window of W + 1": ("31b-small", with_attrs("attention", window=lambda w: w and w + 1)),
    "no window": ("31b-small", with_attrs("attention", window=lambda w: 0)),
    "attention scale": ("31b-small", with_attrs("attention", scale=lambda s: 0.5)),
    "partial rotation": ("31b-small", with_attrs("rope_table", kind=lambda k: "default")),
    "theta by kind": ("31b-small", with_attrs("rope_table", theta=lambda t: 1e4)),
    "final norm": ("31b-small", without("final.norm")),
    "final softcap": ("31b-small", with_attrs("softcap", cap=lambda c: 1e6)),
    "attention softcap": ("CAPPED", with_attrs("attention", softcap=lambda c: 0.0)),
    "raw K as V": ("31b-small", normed_keys),
    "last owner as donor": ("e2b-small", first_donor),
    "rope factor": ("FACTOR", with_attrs("rope_table", factor=lambda f: 1.0)),
}


def random_name(has: Callable[[Any], Any]) -> str:
    """The first of few random specs with a feature."""
    return next(n for n in FEW if has(spec_called(n).text))


STANDING_FOR = {
    "CAPPED": random_name(FEATURES["attention softcap"]),
    "FACTOR": random_name(FEATURES["rope factor"]),
}


def ablated_error(oracle: Oracle, change: Change) -> float:
    program = build_program(oracle.spec, all_logits=True).map(change)
    return program_error(oracle, program, oracle.tensors)


def program_error(oracle: Oracle, program: Program, tensors: Any) -> float:
    session = Session(program, tensors, 2, 128, 128, True)
    return relative(session.prefill(oracle.tokens, all_logits=True), oracle.logits).max().item()


@pytest.mark.parametrize("dropped", ABLATIONS)
def test_a_dropped_feature_shows(dropped: str) -> None:
    name, change = ABLATIONS[dropped]
    oracle = oracle_of(STANDING_FOR.get(name, name))
    assert ablated_error(oracle, lambda g: g) <= oracle.budget
    assert ablated_error(oracle, change) > 30 * oracle.budget


def test_every_kind_of_tensor_is_used() -> None:
    """Each tensor of a layer, disturbed in all layers, changes the logits: none is inert."""
    oracle = oracle_of("combined")
    program = built_program(oracle.spec, all_logits=True)
    kinds = {re.sub(r"layers\.\d+\.", "", k) for k in oracle.tensors} - {"lm_head.weight"}
    for kind in sorted(kinds):
        own = kind.removeprefix("model.")
        changed = {k: v * 1.5 + 0.1 if k.endswith(own) else v for k, v in oracle.tensors.items()}
        assert program_error(oracle, program, changed) > 30 * oracle.budget, kind


# --- experts ----------------------------------------------------------------------------------


# --- the window -------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 4, 11, 12, 13])
def test_window_truth_table(window: int) -> None:
    """Exactly `window` keys, the query's own included, as in the reference's mask."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    length = 12
    at = torch.arange(length)[None]
    got = visible(at.t(), at, window)[0]
    rule = sliding_window_causal_mask_function(window)
    want = torch.tensor(
        [[bool(rule(0, 0, at[0, q], at[0, k])) for k in range(length)] for q in range(length)]
    )
    assert torch.equal(got, want)
    assert got.sum(-1).tolist() == [min(q + 1, window) for q in range(length)]


# --- a variant nobody shipped -------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 64])
def test_new_variant_is_one_yaml_file(size: int) -> None:
    oracle = find_oracle(load_spec(Path(__file__).with_name("new_variant.yaml")))
    session = open_session(oracle, 2, size, True)
    agrees(prefill_then_decode(session, oracle.tokens, oracle.prompt), oracle.logits, oracle)
