"""The printed graph: the exact round trip, what the reader refuses, and mutated texts."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g4ir.errors import ParseError, VerifyError
from g4ir.ir.graph import Graph
from g4ir.ir.rewrite import split_prologue
from g4ir.ir.text import parse_graph, print_graph
from g4ir.model.text import PHASES, build_graph
from g4ir.passes import PASSES, run_passes
from g4ir.spec.record import load_spec, spec_names
from tests.cases import TABLES


def same(g: Graph) -> None:
    """The text reads back to an equal graph, and that prints to the same text."""
    text = print_graph(g)
    assert (again := parse_graph(text)) == g and print_graph(again) == text


@pytest.mark.covering
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", spec_names())
def test_round_trip_after_every_pass(name: str, phase: str) -> None:
    g = build_graph(load_spec(name), phase)
    stages = [g]
    run_passes(g, dump=lambda _, after: stages.append(after))
    assert len(stages) == 1 + len(PASSES)
    same(g)
    for before, after in pairwise(stages):
        if after is not before:
            same(after)
    for part in split_prologue(stages[-1]):
        same(part)


SMALL = TABLES["graphs"]["small"]


def test_the_text_of_a_small_graph() -> None:
    g = parse_graph(SMALL)
    assert print_graph(g) == str(g) == SMALL
    assert [n.op for n in g.nodes] == ["linear", "split", "heads", "glu", "cache_write"]


def test_comments_blank_lines_and_spaces_are_ignored() -> None:
    loose = "# a graph\n\n" + SMALL.replace("\n", "   # why\n\n").replace("  %", "\t%")
    assert parse_graph(loose) == parse_graph(SMALL)


def test_attributes_keep_their_kinds() -> None:
    text = """graph g {
      input %x: f32[2,3,16]
      param %w: f32[16]
      param %s: f32[1]
      %h, %n = norm_residual(%x, %x, %w, %s) {eps=1e-06, scaled=True, weighted=(False,)}: """
    text += "f32[2,3,16], f32[2,3,16]\n output %n\n }"
    (node,) = parse_graph(text).nodes
    assert node.attrs == {"eps": 1e-06, "scaled": True, "weighted": (False,)}
    assert node.attrs["scaled"] is True and "weighted=(False,)" in str(parse_graph(text))


def one_layer(name: str, phase: str) -> Graph:
    spec = load_spec(name)
    text = replace(spec.text, num_hidden_layers=1, num_kv_shared_layers=0)
    return build_graph(replace(spec, text=text), phase)


SEEDS = [
    SMALL,
    print_graph(one_layer("tiny-ple", "embed")),
    print_graph(one_layer("tiny-ple", "decode")),
    print_graph(run_passes(one_layer("tiny-moe", "prefill"))),
]
#: words that stand where another word may, beside those of the graphs
ODD = "0 -1 10**9 1e999 () (1,) None '' {} } % f32[] i64[0] f32[B,B,B] \\ é * # {eps=-1} {n=0}"
WORDS = {w for text in SEEDS for line in text.splitlines() for w in line.split()}
TOKENS = sorted(WORDS | {*ODD.split(), "{n=2.0}", "{axis=-1}", "\x00", "\n"})
#: values of attributes
VALUES = ("0", "-1", "2", "2.0", "True", "None", "'x'", "'f16'", "()", "(3,)", "(-2, 14)", "[1]")
VALUES += ("1e999", "10**9", "1j", "9" * 400)
NUMBERS = re.compile(r"\b(?:[0-9]+|[BSC]|[fi][0-9]+)\b")


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A text with lines dropped, doubled or swapped; words, numbers, attributes or characters are
    replaced in others."""
    lines = draw(st.sampled_from(SEEDS)).splitlines()
    for _ in range(draw(st.integers(1, 2))):
        i, j = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        line, words = lines[i], lines[i].split(" ")
        at = draw(st.integers(0, len(line)))
        words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(TOKENS))
        number = NUMBERS.findall(line)[:1] or ["B"]
        attribute = rf"={draw(st.sampled_from(VALUES))}\1"
        changes = (
            [],
            [line, line],
            [lines[j]],
            [" ".join(words)],
            [line[:at] + draw(st.sampled_from("0%()[]{}=,:'\"-*\\#eBS \t")) + line[at + 1 :]],
            [line[:at]],
            [re.sub(r"=[^,={}()%]+([,}])", attribute, line, count=1)],
            [line.replace(*number, draw(st.sampled_from(("0", "1", "63", "B", "S", "f64"))))],
        )
        lines[i : i + 1] = draw(st.sampled_from(changes))
        lines = lines or [""]
    return "\n".join(lines)


@given(mutated())
def test_a_mutated_text_is_a_graph_or_an_error_of_ours(text: str) -> None:
    try:
        g = parse_graph(text)
    except (ParseError, VerifyError) as e:
        assert str(e)
    else:
        same(g)
