"""Each kernel of a model on its own: the node it stands for, with operands of the true sizes.

A case serves to check a kernel against the op's reference, to time it against the bytes that it
has to move, and to compile it for a GPU that is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from g4ir.backends.cuda.kernels.base import Choice, Schedule, byte_params
from g4ir.backends.cuda.kernels.launch import Launch, recorded
from g4ir.backends.cuda.lowerings import lowered
from g4ir.backends.cuda.schedule import schedule
from g4ir.backends.inductor.lower import SegmentModule
from g4ir.backends.inductor.segment import canonical, part
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Graph, Node, Program, Value
from g4ir.ir.interpret import interpret
from g4ir.ir.rewrite import bind
from g4ir.ir.text import print_graph
from g4ir.ops import OPS
from g4ir.ops.codecs import FORMAT_OF, FORMATS
from g4ir.ops.kv_quant import dequantized_width
from g4ir.ops.types import FLOATS, torch_dtype
from g4ir.plan.cost import graph_costs

Tensor = torch.Tensor

#: tolerance of a kernel's RMS error, relative to the RMS of the result: one or two bf16 roundings
BUDGET = 1e-2
#: tolerance if the op references in bf16 have a larger error, as a multiple of it
LEEWAY = 1.25
#: default number of new tokens of a sequence in prefill
CHUNK = 64


@dataclass(frozen=True)
class Case:
    """A graph of one node, after the `dequantize` nodes of its weights."""

    choice: Choice
    schedule: Schedule
    tokens: int  # in a sequence's KV cache after the step

    @property
    def graph(self) -> Graph:
        return self.schedule.graph

    @property
    def target(self) -> Target:
        return self.schedule.target

    @property
    def name(self) -> str:
        shape = " ".join(f"{k}={v}" for k, v in self.choice.shape.items())
        return f"{self.choice.name} {shape}"


def find_cases(
    p: Program, phase: str, target: Target, tokens: int, chunk: int = CHUNK
) -> list[Case]:
    """Return one case for each distinct node for which a kernel was chosen, all dims bound;
    `tokens` in the KV cache, `chunk` new ones in prefill."""
    dims = {"B": target.rows, "C": tokens, "S": 1 if phase == "decode" else chunk}
    s = schedule(bind(p.graphs[phase], **dims), target)
    found: dict[str, Case] = {}
    for n in s.graph.nodes:
        choice = s.find(n)
        if choice:
            g = _alone(s.graph, _with_weights(s.graph, n))
            alone = Schedule(g, target, {**schedule(g, target).choices, **s.choices})
            key = f"{choice.name}\n{print_graph(canonical(alone.graph))}"
            found.setdefault(key, Case(choice, alone, tokens))
    return list(found.values())


def all_cases(
    programs: Iterable[Program], targets: Sequence[Target], tokens: int, chunk: int = CHUNK
) -> Iterator[Case]:
    """Yield the different cases of both phases of many programs for many targets."""
    seen: set[tuple[str, str]] = set()
    for program in programs:
        for target in targets:
            for phase in ("decode", "prefill"):
                for case in find_cases(program, phase, target, tokens, chunk):
                    key = f"{case.name} {case.target}", print_graph(canonical(case.graph))
                    if key not in seen:
                        seen.add(key)
                        yield case


def _with_weights(g: Graph, n: Node) -> list[Node]:
    """Return the `dequantize` nodes of a node's weights, then the node."""
    made = [g.producers[v.name] for v in n.inputs if v.name in g.producers]
    return [*(m for m in made if m.op == "dequantize"), n]


def _alone(g: Graph, nodes: list[Node]) -> Graph:
    written = replace(g, state=(*g.state, *g.next.values()))  # which are caches here as well
    return part(written, "case", nodes, nodes[-1].outputs)


def operands(case: Case, device: str, seed: int = 0) -> dict[str, Tensor]:
    """Return random values by name: activations and KV caches of RMS 1, weights scaled so that a
    matmul's result has about RMS 1."""
    random = torch.Generator(device="cpu" if device == "meta" else device).manual_seed(seed)
    return {v.name: _value(case, v, device, random) for v in case.graph.sources()}


def _value(case: Case, v: Value, device: str, random: torch.Generator) -> Tensor:
    shape, dtype = [int(d) for d in v.type.shape], torch_dtype(v.type.dtype)
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    if v in case.graph.state and v.type.dtype in ("i8", "f8e4m3"):
        rows = torch.randn(
            (*shape[:-1], dequantized_width(v.type)), device=device, generator=random
        )
        return OPS["narrow_row"].reference(rows, to=v.type.dtype)  # type: ignore[misc]
    if v.name in byte_params(case.graph):
        return _codes(shape, dtype, device, random)
    if v.type.dtype not in FLOATS:
        return _whole_numbers(case, v, shape, device)
    t = torch.randn(shape, dtype=dtype, device=device, generator=random)
    for n in case.graph.find("dequantize"):
        if v == n["scales"]:
            largest = FORMATS[FORMAT_OF[n["codes"].type.dtype]].largest
            return t.mul_(2 / largest * int(n.out.type.shape[-1]) ** -0.5)
    weight = v in case.graph.params and len(shape) > 1
    return t.mul_(shape[-1] ** -0.5) if weight else t


def _codes(shape: list[int], dtype: torch.dtype, device: str, random: torch.Generator) -> Tensor:
    """Return random quantised values, none of them NaN."""
    if dtype == torch.float8_e4m3fn:
        return torch.randn(shape, device=device, generator=random).mul_(99).to(dtype)
    shape[-1] *= dtype.itemsize
    draw = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=random)
    return draw.view(dtype)


def _whole_numbers(case: Case, v: Value, shape: list[int], device: str) -> Tensor:
    """Return positions and lengths of full sequences, by their names in the graphs."""
    new = next((int(x.type.shape[1]) for x in case.graph.inputs if x.name == "positions"), 1)
    first = case.tokens - new
    start = {
        "lengths": new,
        "start": first,
        "end": case.tokens,
        "positions": first,
        "positions.last": case.tokens - 1,
    }[v.name]
    step = torch.arange(shape[-1], device=device) if len(shape) == 2 else 0
    return torch.full(shape, start, dtype=torch.int64, device=device) + step


def run_case(case: Case, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Run a case through the kernel."""
    module = SegmentModule(lowered(case.schedule))
    return module(*(given[v.name] for v in case.graph.sources()))


def reference_case(case: Case, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Run a case by the ops' references, in the dtype of the given tensors."""
    g = _widened_graph(case.graph, given)
    inputs, params, state = (
        {v.name: given[v.name] for v in vs} for vs in (g.inputs, g.params, g.state)
    )
    return tuple(interpret(g, inputs, params, state)[0].values())


def _widened_graph(g: Graph, given: dict[str, Tensor]) -> Graph:
    """Return the graph in which `dequantize` yields fp32 where the given scales are fp32."""
    nodes = [
        replace(n, attrs={"to": "f32"})
        if n.op == "dequantize" and given[n["scales"].name].dtype == torch.float32
        else n
        for n in g.nodes
    ]
    return replace(g, nodes=tuple(nodes))


@dataclass(frozen=True)
class Errors:
    """Errors against the op references in fp32, relative to the result's RMS: RMS and largest error
    of the kernel, RMS error of the references in the case's dtype."""

    rms: float
    largest: float
    reference_rms: float

    @property
    def ok(self) -> bool:
        """Whether the kernel is as exact as the references, up to the order of sums."""
        return self.rms <= max(BUDGET, LEEWAY * self.reference_rms)


def errors_of_case(case: Case, device: str, seed: int = 0) -> Errors:
    """Return the errors of a case on random operands."""
    given = operands(case, device, seed)
    exact = reference_case(case, {k: _widened(t) for k, t in given.items()})
    rounded = reference_case(case, given)
    pairs = [_difference(a, b) for a, b in zip(run_case(case, given), exact, strict=True)]
    others = [_difference(a, b)[0] for a, b in zip(rounded, exact, strict=True)]
    return Errors(max(p[0] for p in pairs), max(p[1] for p in pairs), max(others))


def _widened(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() and t.element_size() > 1 else t


def _difference(got: Tensor, want: Tensor) -> tuple[float, float]:
    got, want = got.double(), want.double()
    size = want.pow(2).mean().sqrt().clamp(min=1e-30)
    error = (got - want).abs() / size
    return float(error.pow(2).mean().sqrt()), float(error.max())


def launches_of_case(case: Case) -> list[Launch]:
    """Return the kernels that a case launches, without running them."""
    with recorded() as seen:
        run_case(case, operands(case, "meta"))
    return seen


def bytes_of_case(case: Case) -> int:
    """Count the bytes that the case's nodes must read and write by the cost model; if that counts
    none (a `dequantize` alone), the bytes of operands and results."""
    found = sum(c.cost.nbytes for c in graph_costs(case.graph, B=1, S=1, C=case.tokens))
    return found or sum(v.type.nbytes() for v in (*case.graph.sources(), *case.graph.outputs))
