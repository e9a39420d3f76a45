"""`show --diff`, `show --against` and `show --why`: what changed, where, and why not."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from g4ir.ir.diff import Change, diff_graphs, diff_text
from g4ir.ir.graph import Graph
from g4ir.ir.text import parse_graph
from g4ir.model.text import build_graph
from g4ir.passes import run_passes
from g4ir.spec.record import load_spec
from tests.cases import TABLES
from tests.cli_tools import g4ir

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


@pytest.mark.parametrize("name", ["narrow_kv", "fuse_qkv", "plan_cache"])
def test_diff_of_a_pass(name: str) -> None:
    """Exit 0: a pass is there to change something."""
    outcome = g4ir("show", "--variant", "e2b", "--phase", "prefill", "--after", name, "--diff")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert all(x[:2] in ("- ", "+ ", "~ ", "@@") for x in lines)
    if name == "narrow_kv":
        assert not lines
        assert outcome.err == f"g4ir: {name} changes nothing in graph prefill\n"
    elif name == "fuse_qkv":
        assert [x for x in lines if x[0] == "@"] == [
            "@@ L0 @@",
            "@@ L1 to L3, L5 to L8, L10 to L13 @@",
            "@@ L4, L9, L14 @@",
        ]
    elif name == "plan_cache":
        assert "~ state %L0.k: bf16[C->512,B,1,256]" in lines
        assert "- state %L15.k: bf16[C,B,1,256]" in lines
    assert len(lines) < 500


def test_diff_of_an_engines_pass(tmp_path: Path) -> None:
    """With the options that the engine was built with."""
    words = ("--variant", "tiny-dense", "--random-weights", "1", "--backend", "reference")
    out = tmp_path / "e"
    built = g4ir("build", *words, "--max-seq", "64", "--latent-kv", "raw", "--out", out)
    assert built.code == 0, built.err
    outcome = g4ir("show", out, "--after", "latent_kv", "--diff")
    assert outcome.code == 0 and "- state %L5.k: f32[C,B,1,64]" in outcome.out


def test_two_variants() -> None:
    """Exit 1 where they differ, as `specs diff`."""
    outcome = g4ir("show", "--variant", "31b", "--against", "26b-a4b")
    lines = outcome.out.splitlines()
    assert outcome.code == 1
    assert "~ state %L5.k: bf16[C,B,4->2,512]" in lines
    assert any(x.startswith("+ %L0.mlp.down, %L0.moe.out = moe_mlp(") for x in lines)
    assert "@@ L1 to L4, L6 to L10, L12 to L16, L18 to L22, L24 to L28 @@" in lines
    same = g4ir("show", "--variant", "31b", "--against", "31b")
    assert (same.code, same.out) == (0, "")
    one = g4ir("show", "--variant", "e2b", "--against", "e4b", "--after", "none", "--layer", "7")
    assert one.code == 1 and one.out.splitlines()[0] == "@@ L7 @@"
    assert "~ param %L7.norm_in: bf16[1536->2560]" in one.out


#: what a pass says about layer 6 of tiny-ple, which reads the cache of layer 2
WHY = {
    "fuse_gate_up": ["%L6.mlp.act: packed", "%L6.ple.act: left: %L6.ple is no projection"],
    "plan_cache": ["%L6.k: reads %L2.k", "%L6.v: reads %L2.v"],
}


@pytest.mark.parametrize("name", WHY)
def test_why_of_a_layer(name: str) -> None:
    words = ("--variant", "tiny-ple", "--phase", "prefill", "--why", name, "--layer", "6")
    assert g4ir("show", *words).out.splitlines() == WHY[name]
