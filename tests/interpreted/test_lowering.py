"""Whole steps of a model through the kernels that a Hopper GPU would run, under the interpreter.

Each compiled piece is given what the graph's interpreter has at that point, so that an error is
seen where it is made. bf16 throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from g4ir import interpret, parse_graph
from g4ir.backends.cuda.lowerings import lowered
from g4ir.backends.cuda.schedule import schedule
from g4ir.backends.inductor.lower import SegmentModule
from g4ir.backends.inductor.segment import graph_steps
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node
from g4ir.ir.rewrite import bind
from g4ir.ops.codecs import FORMAT_OF, FORMATS
from g4ir.ops.types import torch_dtype
from g4ir.weights.pack import split_program
from tests.cases import TABLES
from tests.configs import spec_called
from tests.runner import built_program

#: of the rms of a value: a few roundings of bf16, one after the other, in another order
BUDGET = 5e-2
#: the largest single element, in the same unit: a probability or a product near a rounding edge
WORST = 0.4
#: tokens for which a router may choose otherwise, between scores that lie a rounding apart
SPARED = 0.2
#: name, form of latent caches, and the recipe of weights in fewer bits behind a +
MODELS = tuple(map(tuple, TABLES["lowering"]["models"]))
SLOTS = 40


def graph_of(name: str, form: str, phase: str, rows: int) -> Graph:
    model, _, quant = name.partition("+")
    how = {"latent_kv": form, "dtype": "bf16", "quant": quant}
    program = split_program(built_program(spec_called(model), **how)).program
    return bind(program.graphs[phase], B=rows) if rows == 1 else program.graphs[phase]


def drawn(g: Graph, rows: int, chunk: int, held: list[int]) -> tuple[dict[str, Any], ...]:
    """Feeds, params and caches; caches hold normal values, unread slots of linear ones NaN."""
    random = torch.Generator().manual_seed(3)
    dims = {"B": rows, "S": chunk, "C": SLOTS}
    sizes = {n["scales"].name: size_of_scales(n) for n in g.find("dequantize")}

    def draw(v: Any) -> torch.Tensor:
        shape = [int(d) for d in v.type.bind(dims).shape]
        if v.type.dtype in ("i8", "u8"):
            codes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
            return codes.view(torch_dtype(v.type.dtype))
        if v.type.dtype == "f8e4m3":
            return (torch.randn(shape, generator=random) * 99).to(torch.float8_e4m3fn)
        if v.name in sizes:
            return (torch.rand(shape, generator=random) + 0.5).mul_(sizes[v.name]).bfloat16()
        scale = 1 / shape[-1] ** 0.5 if len(shape) in (2, 3) and v in g.params else 1.0
        t = torch.randn(shape, generator=random) * scale
        return t if v.type.dtype == "f32" else t.to(torch.bfloat16)

    feeds = {v.name: draw(v) for v in g.inputs if v.type.dtype != "i64"}
    start = torch.tensor(held)
    feeds["positions"] = start[:, None] + torch.arange(chunk)
    feeds["lengths"] = torch.tensor([chunk, *[max(1, chunk - 2)] * (rows - 1)])
    caches = {v.name: draw(v) for v in g.state}
    return feeds, {v.name: draw(v) for v in g.params}, caches


def size_of_scales(n: Node) -> float:
    """With which a weight keeps the size of what it multiplies."""
    largest = FORMATS[FORMAT_OF[n["codes"].type.dtype]].largest
    return 2 / largest * int(n.out.type.shape[-1]) ** -0.5


ROWS = {"one": [19], "ragged": [0, 25, 7]}
#: what is run by default; the rest is `full`
QUICK = {
    ("combined", "off", "decode", "one"),
    ("31b-small", "value", "prefill", "ragged"),
    ("tiny-moe+int4", "off", "decode", "ragged"),
}


def steps() -> Iterator[Any]:
    for name, form in MODELS:
        for phase in ("decode", "prefill"):
            for rows in ROWS:
                marks = () if (name, form, phase, rows) in QUICK else pytest.mark.full
                yield pytest.param(
                    name, form, phase, ROWS[rows], marks=marks, id=f"{name}-{form}-{phase}-{rows}"
                )


@pytest.mark.parametrize(("name", "form", "phase", "held"), [*steps()])
def test_every_step(name: str, form: str, phase: str, held: list[int]) -> None:
    rows = len(held)
    g = graph_of(name, form, phase, rows)
    target = Target("cpu", "h200", rows)
    chunk = 1 if phase == "decode" else 11
    feeds, params, caches = drawn(g, rows, chunk, held)
    known: dict[str, torch.Tensor] = {**feeds, **params, **caches}
    _, after = interpret(g, feeds, params, caches, lambda v, t: known.__setitem__(v.name, t))
    written = {v.name: cache for cache, v in g.next.items()}
    started, seen = 0, set[str]()
    for step in graph_steps(g):
        if step.node or step.text in seen:  # layers of one kind are one program
            continue
        seen.add(step.text)
        own = {c: known[c].clone() for c in step.state}
        operands = [
            own.get(n, after[written[n]] if n in written else known[n])
            for n in (*step.inputs, *step.params, *step.state)
        ]
        s = schedule(parse_graph(step.text), target)
        started += sum(s.find(n) is not None for n in s.graph.nodes)
        made = SegmentModule(lowered(s))(*operands)
        spared = SPARED if any(s.graph.find("router", "moe_mlp")) else 0.0
        for value, got in zip(step.outputs, made, strict=True):
            near(got, known[value], value, spared)
        for cache in step.writes:
            near(own[cache], after[cache], cache)
    assert started > 0


def near(got: torch.Tensor, want: torch.Tensor, what: str, spared: float = 0.0) -> None:
    """Every token's values, but for a share of the tokens."""
    assert got.shape == want.shape and got.dtype == want.dtype, what
    size = want.double().pow(2).mean().sqrt()
    error = ((got.double() - want.double()).abs() / size).reshape(-1, want.shape[-1])
    rms, worst = error.pow(2).mean(-1).sqrt(), error.amax(-1)
    bad = (rms > BUDGET) | (worst > WORST)
    assert bad.double().mean() <= spared, f"{what}: {rms.tolist()}, largest {worst.tolist()}"
