"""The interpreter as a backend: slow, and correct by definition."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from g4ir.errors import MissingError
from g4ir.ir.distance import ROUNDED
from g4ir.ir.graph import Graph, Node, Program, Value
from g4ir.ir.interpret import Run, interpret, run_node
from g4ir.ir.wide import Float64Matmuls, in_float64
from g4ir.model.towers import is_tower
from g4ir.ops.attention import probabilities
from g4ir.ops.types import is_float
from g4ir.plan.engine_limits import Limits
from g4ir.plan.formats import DTYPES
from g4ir.weights.pack import ParamSource

from .base import Backend, GraphRun, Runtime, Task, Tensors
from .kv_cache import Caches

#: max bytes that an interpreter caches between steps: dequantised weights (ReferenceRuntime on a
#: CPU), or weights (WatchedRuntime)
MAX_CACHED_BYTES = 2 << 30


class ReferenceRuntime(Runtime):
    """Interprets the graphs: runs each op's reference implementation."""

    def __init__(
        self,
        program: Program,
        limits: Limits,
        device: str,
        params: ParamSource,
        run: Run | None = None,
        added: Tensors = MappingProxyType({}),
    ) -> None:
        self.program, self.limits, self.device, self.source = program, limits, device, params
        #: runs a node; with tensor parallelism also its collectives
        self._run = run or run_node
        self._cached: dict[str, tuple[torch.Tensor, ...]] = {}
        self._budget = MAX_CACHED_BYTES if device == "cpu" else 0
        # not the embed graph's tables: the engine gathers embeddings
        graphs = [g for name, g in program.graphs.items() if name != "embed"]
        names = {v.name for g in graphs for v in g.params}
        self.params = {n: params.tensor(n).to(device) for n in names - added.keys()} | {**added}

    def new_state(self, batch: int) -> Caches:
        return Caches(self.program, batch, self.limits.max_seq, self.device)

    def run(self, step: GraphRun, state: Caches) -> Tensors | None:
        views, watch = state.views(step.context), step.watch
        show = (lambda v, t: watch(v.name, t)) if watch else None
        g = self.program.graphs[step.phase]
        outputs, after = interpret(g, step.feeds, self.params, views, show, self._run_node)
        for name, t in after.items():
            views[name].copy_(t)
        return outputs if step.logits else None

    def _run_node(self, n: Node, operands: list[Any]) -> tuple[Any, ...]:
        """Run a node. On a CPU, outputs of a node that reads params alone and cannot be folded at
        build (dequantised weights: nearly all work of a step) are cached while all together fit
        into MAX_CACHED_BYTES."""
        names = [v.name for v in n.inputs]
        if n.definition.fold or not self.params.keys() >= {*names}:
            return self._run(n, operands)
        key = f"{n.op} {names} {n.attrs}"
        if (outputs := self._cached.get(key)) is None:
            outputs = self._run(n, operands)
            if (size := sum(t.nbytes for t in outputs)) <= self._budget:
                self._cached[key], self._budget = outputs, self._budget - size
        return outputs

    def encode(self, tower: str, feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        outputs, _ = interpret(self.program.graphs[tower], dict(feeds), self.params, {})
        return outputs["soft"]

    def resident(self, param: str) -> torch.Tensor | None:
        return self.params.get(param)

    def close(self) -> None:
        self.source.close()


class WatchedRuntime:
    """Interprets graphs; `read` returns one weight by name, and up to MAX_CACHED_BYTES of weights
    stay in memory. `watch` is called with the inputs and each node's outputs, in order, and before
    an attention node with a function that returns its probabilities. Values named in `folded` are
    not computed: the build stored them as params of `source`."""

    def __init__(
        self,
        device: str,
        watch: Callable[[Value, Any], None],
        read: Callable[[str], torch.Tensor],
        folded: Container[str],
        source: ParamSource,
    ) -> None:
        self.device, self.watch, self.read = device, watch, read
        self.folded, self.source = folded, source
        self._cached, self._budget = dict[str, torch.Tensor](), MAX_CACHED_BYTES

    def embed(self, *_: Any) -> None:
        """Return None: the host embeds tokens."""

    def interpret(self, graph: Graph, feeds: Mapping[str, Any], state: dict[str, Any]) -> Tensors:
        """Run a graph and return its outputs; update the caches in `state`."""
        for v in graph.inputs:
            self.watch(v, feeds[v.name])
        params = {v.name: partial(self._weight, v.name) for v in graph.params}
        outputs, after = interpret(graph, feeds, params, state, self.watch, self._run_node)
        state.update(after)
        return outputs

    def _weight(self, name: str) -> torch.Tensor:
        if name in self._cached:
            return self._cached[name]
        weight = self.read(name).to(self.device)
        if weight.nbytes <= self._budget:
            self._cached[name], self._budget = weight, self._budget - weight.nbytes
        return weight

    def _run_node(self, n: Node, operands: list[Any]) -> tuple[Any, ...]:
        if (name := n.outputs[0].name) in self.folded:
            return (self.source.tensor(name).to(self.device),)
        operands = [x if isinstance(x, torch.Tensor) else x() for x in operands]
        if n.op == "attention":
            self.watch(probs_of(n), partial(probabilities, *operands, **n.attrs))
        return run_node(n, operands)


def probs_of(n: Node) -> Value:
    """Return a value that names an attention node's probabilities: %L3.attn.out ->
    %L3.attn.probs. Its type is that of the node's output."""
    return Value(f"{n.out.name.removesuffix('.out')}.probs", n.out.type)


class Float64Runtime(ReferenceRuntime):
    """Interprets the graphs in float64 on the engine's params: inputs and matmuls of text graphs
    are float64, and so are the values computed from them. Towers' params are converted too."""

    def __init__(self, program: Program, *args: Any) -> None:
        super().__init__(_float64_program(program), *args)

    def new_state(self, batch: int) -> Caches:
        state = super().new_state(batch)
        state.tensors = _to_float64(state.tensors)
        return state

    def run(self, step: GraphRun, state: Caches) -> Tensors | None:
        with Float64Matmuls():
            return super().run(replace(step, feeds=_to_float64(step.feeds)), state)

    def encode(self, tower: str, feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return in_float64(self.program.graphs[tower], feeds, self.params)["soft"]


def _float64_program(program: Program) -> Program:
    """Return a program in which ops with a 16-bit float `dtype` output float64. Declared types of
    values stay: the interpreter does not read them."""

    def convert(g: Graph) -> Graph:
        nodes = (
            replace(n, attrs={**n.attrs, "dtype": "f64"}) if n.attrs.get("dtype") in ROUNDED else n
            for n in g.nodes
        )
        return replace(g, nodes=tuple(nodes))

    return Program({name: convert(g) for name, g in program.graphs.items()})


def _to_float64(tensors: dict[str, Any]) -> dict[str, Any]:
    return {k: t.double() if is_float(t) else t for k, t in tensors.items()}


@dataclass(frozen=True)
class Resident:
    """A source of a runtime's params: the tensors in the runtime's memory, without copies; for
    params that it does not expose, and for rows, the runtime's `source`."""

    runtime: Runtime

    def tensor(self, param: str) -> torch.Tensor:
        resident = self.runtime.resident(param)
        return self.runtime.source.tensor(param) if resident is None else resident

    def rows(self, param: str, ids: torch.Tensor) -> torch.Tensor:
        return self.runtime.source.rows(param, ids)

    def release(self, param: str) -> None:
        self.runtime.source.release(param)

    def close(self) -> None: ...


def text_graphs(program: Program) -> Program:
    """Return the program without towers."""
    return Program({name: g for name, g in program.graphs.items() if not is_tower(name)})


#: kind of interpreter -> its class, and a function from the engine's runtime to the params that it
#: reads: those of the runtime's `source`, or those in its memory (`Resident`)
INTERPRETERS: dict[str, tuple[type[ReferenceRuntime], Callable[[Any], ParamSource]]] = {
    "stored": (ReferenceRuntime, lambda runtime: runtime.source),
    "resident": (ReferenceRuntime, Resident),
    "float64": (Float64Runtime, Resident),
}


def interpreter(
    kind: str,
    runtime: Runtime,
    program: Program,
    limits: Limits,
    device: str,
    run: Run | None = None,
) -> ReferenceRuntime:
    """Return an interpreter of a runtime's text graphs; `kind`: a key of INTERPRETERS; `run`:
    replaces `run_node`."""
    runtime_class, source = INTERPRETERS[kind]
    return runtime_class(text_graphs(program), limits, device, source(runtime), run)


class ReferenceBackend(Backend):
    """`--backend reference`: compiles nothing; interprets the graphs."""

    name = "reference"
    devices = ("cpu", "cuda")
    dtypes = DTYPES
    shares = True

    def needs(self, device: str) -> tuple[Callable[[], object], ...]:
        return (_require_gpu,) if device == "cuda" else ()

    def load(self, task: Task, record: Any, cuda_graph: bool = True) -> ReferenceRuntime:
        run = task.group.run_node if task.group else None
        how = task.device, task.params, run, task.added
        return ReferenceRuntime(task.program, task.limits, *how)

    def takes_adapters(self, device: str, settings: Mapping[str, str]) -> bool:
        return True


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise MissingError("--device cuda: this torch sees no CUDA device; use --device cpu")


BACKEND = ReferenceBackend()
