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

from g4ir import build_program, load_spec
from g4ir.engine.inputs import padded
from g4ir.ir.graph import Graph, Node, Program
from g4ir.ir.rewrite import rebuild
from tests.cases import read_table
from tests.configs import (
    ALL_SEEDS,
    FEATURES,
    GEMMA3_SEEDS,
    NAMES,
    RANDOM_SEEDS,
    few,
    random_spec,
    spec_called,
)
from tests.oracle import Oracle, find_oracle, random_tokens, relative
from tests.runner import Session, built_program, open_session, prefill_then_decode

MORE_SEEDS = (
    *range(len(RANDOM_SEEDS), 10 * len(RANDOM_SEEDS)),
    *range(GEMMA3_SEEDS.stop, GEMMA3_SEEDS.stop + 40),
)
#: chunk sizes by window and prompt length
CHUNKS: dict[str, Callable[[int, int], int]] = {
    "1": lambda w, n: 1,
    "W-1": lambda w, n: w - 1,
    "W": lambda w, n: w,
    "W+1": lambda w, n: w + 1,
    "2W": lambda w, n: 2 * w,
    "prime": lambda w, n: 11,
    "all": lambda w, n: n,
}


def oracle_of(name: str) -> Oracle:
    return find_oracle(spec_called(name))


def agrees(got: torch.Tensor, want: torch.Tensor, oracle: Oracle) -> None:
    """Every row of logits within the tolerance."""
    error = relative(got, want).max().item()
    assert error <= oracle.budget, f"{error:.2e} of rms, budget {oracle.budget:.2e}"


@pytest.mark.covering
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", few(NAMES))
def test_prefill_in_chunks(name: str, chunk: str) -> None:
    """Every position of a prompt, and two decode steps after it."""
    oracle = oracle_of(name)
    tokens = oracle.tokens[:, : oracle.prompt + 2]
    session = open_session(oracle, 2, CHUNKS[chunk](oracle.window, oracle.prompt), True)
    got = prefill_then_decode(session, tokens, oracle.prompt)
    agrees(got, oracle.logits[:, : tokens.shape[1]], oracle)


@pytest.mark.parametrize("name", few(NAMES))
def test_decode_past_three_windows(name: str) -> None:
    oracle = oracle_of(name)
    assert oracle.tokens.shape[1] > 3 * oracle.window
    got = prefill_then_decode(open_session(oracle, 2, 8, True), oracle.tokens, 3)
    agrees(got, oracle.logits, oracle)


@pytest.mark.full
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_more_random_specs(seed: int) -> None:
    oracle = find_oracle.__wrapped__(random_spec(seed))  # not kept
    for size in (CHUNKS[c](oracle.window, oracle.prompt) for c in CHUNKS):
        session = open_session(oracle, 2, size, True)
        agrees(prefill_then_decode(session, oracle.tokens, oracle.prompt), oracle.logits, oracle)


def test_random_specs_have_every_feature() -> None:
    texts = [random_spec(seed).text for seed in ALL_SEEDS]
    for feature, has in FEATURES.items():
        found = {bool(has(text)) for text in texts}
        assert found == {True, False}, f"no random spec differs in {feature!r}"


@pytest.mark.covering
@pytest.mark.parametrize("size", [5, 64])
@pytest.mark.parametrize("name", few(NAMES))
def test_last_token_graphs(name: str, size: int) -> None:
    """The last position of a prompt, then decode steps."""
    oracle = oracle_of(name)
    n, session = oracle.prompt, open_session(oracle, 2, size)
    got = [session.prefill(oracle.tokens[:, :n])]
    got += [session.decode(column) for column in oracle.tokens[:, n : n + 3].unbind(1)]
    agrees(torch.stack(got, 1), oracle.logits[:, n - 1 : n + 3], oracle)


@pytest.mark.parametrize("name", few(NAMES))
def test_ragged_rows_equal_single_rows(name: str) -> None:
    """Sequences that end in different chunks, an empty one, a second turn, then decoding."""
    oracle = oracle_of(name)
    w, session = oracle.window, open_session(oracle, 5, oracle.window + 1)
    tokens = random_tokens(oracle.spec, 5, 5 * w, seed=9)
    held = [row[:0] for row in tokens]

    def alone(rows: list[int]) -> torch.Tensor:
        """The reference's last logits of each sequence, run alone."""
        return torch.stack([oracle.run(held[i][None])[0, -1] for i in rows])

    first, second = (3 * w + 1, 0, w + 3, 1, 2 * w + 2), (3, 2 * w, 0, 1, w + 4)
    for rows, lengths in ((tokens, first), (tokens.flip(1), second)):
        turn = [row[:n] for row, n in zip(rows, lengths, strict=True)]
        got = session.prefill(*padded(dict(enumerate(t.tolist() for t in turn)), 5))
        held = [torch.cat(pair) for pair in zip(held, turn, strict=True)]
        live = [i for i, n in enumerate(lengths) if n]
        agrees(got[live], alone(live), oracle)
        assert session.length.tolist() == [len(row) for row in held]
    held = [torch.cat((row, t[None])) for row, t in zip(held, tokens[:, -1], strict=True)]
    agrees(session.decode(tokens[:, -1]), alone([*range(5)]), oracle)


def without(g: Graph, suffixes: tuple[str, ...]) -> Graph:
    """Pass the first input of nodes of this name through."""
    gone = [n for n in g.nodes if n.outputs[0].name.endswith(suffixes)]
    rename = {n.out.name: n.inputs[0] for n in gone}
    return rebuild(replace(g, nodes=tuple(n for n in g.nodes if n not in gone)), rename)


def with_attrs(g: Graph, change: dict[str, Any]) -> Graph:
    def one(n: Node) -> Node:
        if n.op != change["op"] or not n.outputs[0].name.startswith(change.get("at", "")):
            return n
        added = {k: n.attrs[k] and n.attrs[k] + by for k, by in change.get("add", {}).items()}
        return replace(n, attrs={**n.attrs, **change.get("set", {}), **added})

    return replace(g, nodes=tuple(map(one, g.nodes)))


def program_error(oracle: Oracle, program: Program, tensors: Any) -> float:
    session = Session(program, tensors, 2, 128, 128, True)
    return relative(session.prefill(oracle.tokens, all_logits=True), oracle.logits).max().item()


ABLATIONS = read_table("ablations.yaml")


@pytest.mark.parametrize("dropped", ABLATIONS)
def test_a_dropped_feature_shows(dropped: str) -> None:
    change = ABLATIONS[dropped]
    oracle = oracle_of(change["spec"])
    program = build_program(oracle.spec, all_logits=True)
    if "op" in change:
        less = program.map(lambda g: with_attrs(g, change))
    else:
        less = program.map(lambda g: without(g, tuple(change["without"])))
    assert program_error(oracle, program, oracle.tensors) <= oracle.budget
    assert program_error(oracle, less, oracle.tensors) > 30 * oracle.budget


def test_every_kind_of_tensor_is_used() -> None:
    """Each tensor of a layer, disturbed in all layers, changes the logits: none is inert."""
    oracle = oracle_of("combined")
    program = built_program(oracle.spec, all_logits=True)
    kinds = {re.sub(r"layers\.\d+\.", "", k) for k in oracle.tensors} - {"lm_head.weight"}
    for kind in sorted(kinds):
        own = kind.removeprefix("model.")
        changed = {k: v * 1.5 + 0.1 if k.endswith(own) else v for k, v in oracle.tensors.items()}
        assert program_error(oracle, program, changed) > 30 * oracle.budget, kind


@pytest.mark.parametrize("size", [1, 5, 64])
def test_new_variant_is_one_yaml_file(size: int) -> None:
    oracle = find_oracle(load_spec(Path(__file__).with_name("new_variant.yaml")))
    session = open_session(oracle, 2, size, True)
    agrees(prefill_then_decode(session, oracle.tokens, oracle.prompt), oracle.logits, oracle)
