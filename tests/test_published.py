"""Plans and costs of the variants against published numbers (golden/published.yaml)."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from g4ir import Graph, Program, build_graph, load_spec, run_passes
from g4ir.model.tensors import numel, text_tensors, tower_tensors
from g4ir.plan.cost import NodeCost, by_kind, graph_costs, total
from g4ir.plan.plan import PLANNED, make_plan
from g4ir.plan.records import Plan
from g4ir.quant.recipe import find_quant_config
from g4ir.quant.rewrite import quantise
from tests.cases import read_table

TABLES = read_table("golden/published.yaml")
VARIANTS = TABLES["variants"]
CONTEXTS = (1024, 8192, 32768, 131072)
GIB = 2**30
FLOP_RATE = 790e12


def of(name: str, table: str) -> dict[str, Any]:
    """Return one variant's column of a table."""
    return {key: row[VARIANTS.index(name)] for key, row in TABLES[table].items()}


def printed(value: float, digits: int = 1) -> Any:
    """Within 1 % of a printed figure, plus half of its last digit."""
    return pytest.approx(value, rel=0, abs=0.01 * value + 0.5 * 10**-digits)


def digits(value: float) -> int:
    return 0 if isinstance(value, int) else 1


@cache
def planned(name: str) -> Plan:
    return make_plan(load_spec(name))


# --- parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters(name: str) -> None:
    expected, found = of(name, "parameters"), planned(name).counts
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_reported_sums(name: str) -> None:
    towers, count = tower_tensors(load_spec(name)), planned(name).counts
    parts = {"position_table": ".position_embedding_table", "buffers": (".std_bias", ".std_scale")}
    found = {f: getattr(count, f) for f in ("active", *vars(count))} | {
        f"vision_{part}": numel({k: v for k, v in towers.items() if k.endswith(ending)})
        for part, ending in parts.items()
    }
    for terms, millions in of(name, "reported").items():
        signed = re.findall(r"(-?) ?(\w+)", terms)
        value = sum(-found[key] if sign else found[key] for sign, key in signed)
        assert value / 1e6 == pytest.approx(millions, abs=0.051), terms


@pytest.mark.parametrize("name", TABLES["blocks"])
def test_blocks(name: str) -> None:
    spec = load_spec(name)
    share = spec.text.moe.top_k_experts / spec.text.moe.num_experts if spec.text.moe else 0
    for index, expected in TABLES["blocks"][name].items():
        matrices = Counter[str]()
        for key, shape in text_tensors(spec).items():
            if key.startswith(f"layers.{index}."):
                matrices[key.split(".")[2]] += math.prod(shape) / 1e6 * (len(shape) > 1)
        attention, experts = matrices["self_attn"], matrices["experts"]
        dense = matrices["mlp"] + matrices["router"]
        ffn, active = dense + experts, dense + experts * share
        blocks = attention + ffn, attention + active
        parts = attention, matrices["mlp"], matrices["router"], experts, experts * share
        assert [round(n, 1) for n in (*parts, ffn, active, *blocks)] == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_layers(name: str) -> None:
    layers, expected = load_spec(name).layers(), TABLES["layers"][name]
    first = layers[0].intermediate_size
    assert expected == {
        "full": [x.index for x in layers if x.kind == "full"],
        "donors": sorted({x.donor for x in layers} - {None}),
        "wide": [x.index for x in layers if x.intermediate_size != first],
    }


# --- the KV cache -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_cache(name: str) -> None:
    table = TABLES["cache"][name]
    naive, per_token, window = table["bytes"]
    contexts = (4096, 32768, 131072, 262144)[: len(table["gib"])]
    rows = [r for r in planned(name).rows if r.weights == "bf16"]
    assert [r.ctx for r in rows] == list(contexts)
    for found, gib, public in zip(rows, table["gib"], table.get("naive_gib", [None] * 4)):
        assert found.planned == window + per_token * found.ctx
        assert found.planned / GIB == pytest.approx(gib, abs=5.1e-4)
        assert found.naive == naive * found.ctx
        assert public in (None, round(found.naive / GIB, 2 if (public or 1) < 0.1 else 1))


def test_latent_forms_of_the_largest() -> None:
    """31b at 256K: 220 GiB naive, 20.8 planned, 13.3 as latent rows."""
    forms = [replace(PLANNED, latent_kv=form) for form in ("off", "value")]
    found = [make_plan(load_spec("31b"), form, ctx=262144).rows[0] for form in forms]
    assert {round(r.naive / GIB) for r in found} == {220}
    assert [round(r.planned / GIB, 1) for r in found] == [20.8, 13.3]
    plain, value = (r.planned - TABLES["cache"]["31b"]["bytes"][2] for r in found)
    assert value / plain == 5 / 8


# --- cost ---------------------------------------------------------------------------------------


@cache
def graph(name: str, phase: str = "decode", skip: tuple[str, ...] = ()) -> Graph:
    return run_passes(build_graph(load_spec(name), phase), skip=skip)


@cache
def stored(name: str, weights: str) -> Graph:
    """A decode step with quantised weights."""
    spec, recipe = load_spec(name), None if weights == "bf16" else find_quant_config(weights)
    program = Program({"decode": build_graph(spec, "decode")})
    return run_passes(quantise(program, spec, recipe, spec.dtype).graphs["decode"])


def body(name: str, tokens: int) -> list[NodeCost]:
    """Every row through every layer, without the head: what the table counts."""
    costs = graph_costs(graph(name, "prefill", ("last_token_only",)), S=tokens)
    return [c for c in costs if c.kind != "head"]


@pytest.mark.parametrize(
    "name, weights", [(name, w) for name, table in TABLES["decode"].items() for w in table]
)
def test_decode_reads_what_the_table_says(name: str, weights: str) -> None:
    for batch, expected in TABLES["decode"][name][weights].items():
        for context, gb in zip(CONTEXTS, expected, strict=True):
            cost = total(graph_costs(stored(name, weights), C=context - 1, B=batch))
            assert cost.needed_bytes / 1e9 == printed(gb), (batch, context)


@pytest.mark.parametrize("name", TABLES["prefill"])
def test_prefill_takes_the_flops_of_the_table(name: str) -> None:
    table = TABLES["prefill"][name]
    for tokens, each, ms in zip(CONTEXTS, table["gflop"], table["ms"], strict=True):
        flops = total(body(name, tokens)).flops
        assert flops / tokens / 1e9 == printed(each, digits(each))
        assert flops / FLOP_RATE * 1e3 == printed(ms, digits(ms))
    for tokens, percent in zip(CONTEXTS[2:], table["attention"], strict=True):
        costs = body(name, tokens)
        share = 100 * by_kind(costs)["kv"].flops / total(costs).flops
        assert share == pytest.approx(percent, abs=0.5)
