"""`show --diff`: what changed, and where."""

from __future__ import annotations

from itertools import pairwise

import pytest

from g4ir.ir.diff import Change, diff_graphs, diff_text
from g4ir.ir.graph import Graph
from g4ir.ir.text import parse_graph
from g4ir.model.text import build_graph
from g4ir.passes import run_passes
from g4ir.spec.record import load_spec
from tests.cases import TABLES

BEFORE = TABLES["graphs"]["layers"]


def changed(*pairs: tuple[str, str]) -> Graph:
    text = BEFORE
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return parse_graph(text)


def test_types_are_shown_side_by_side() -> None:
    g = changed(
        ("%L1.w: f32[4,8]", "%L1.w: f32[5,8]"),
        ("linear(%x, %L1.w): f32[B,S,4]", "linear(%x, %L1.w): f32[B,S,5]"),
    )
    changes = diff_graphs(parse_graph(BEFORE), g)
    assert changes[0] == Change(1, "param %L1.w: f32[4,8]", "param %L1.w: f32[5,8]")
    assert diff_text(changes) == (
        "@@ L1 @@\n~ param %L1.w: f32[4->5,8]\n~ %L1.y = linear(%x, %L1.w): f32[B,S,4->5]\n"
    )


def test_layers_alike_are_told_once() -> None:
    g = changed(
        *(
            (
                f"%L{i}.y = linear(%x, %L{i}.w): f32[B,S,4]",
                f"%L{i}.z = linear(%x, %L{i}.w): f32[B,S,4]\n"
                f"  %L{i}.y = scale(%L{i}.z) {{value=2.0}}: f32[B,S,4]",
            )
            for i in (0, 1, 2, 9)
        )
    )
    assert diff_text(diff_graphs(parse_graph(BEFORE), g)) == (
        "@@ L0 to L2, L9 @@\n"
        "- %L0.y = linear(%x, %L0.w): f32[B,S,4]\n"
        "+ %L0.z = linear(%x, %L0.w): f32[B,S,4]\n"
        "+ %L0.y = scale(%L0.z) {value=2.0}: f32[B,S,4]\n"
    )


def test_order_means_nothing() -> None:
    """What a node makes, not where it stands."""
    lines = BEFORE.splitlines(keepends=True)
    lines[6], lines[7] = lines[7], lines[6]
    assert diff_graphs(parse_graph(BEFORE), parse_graph("".join(lines))) == []


@pytest.mark.parametrize("variant", ["e2b", "26b-a4b", "31b"])
def test_changes_rebuild_the_graph(variant: str) -> None:
    """Take the changed lines out, put the new ones in: the graph after the pass."""
    stages = [build_graph(load_spec(variant), "prefill")]
    run_passes(stages[0], dump=lambda _, g: stages.append(g))
    for before, after in pairwise(stages):
        changes = diff_graphs(before, after)
        old, new = ([x.strip() for x in str(g).splitlines()[1:-1]] for g in (before, after))
        gone = {c.before for c in changes}
        got = [x for x in old if x not in gone] + [c.after for c in changes if c.after]
        assert sorted(got) == sorted(new)
