"""Values of the plain text graphs, by name: hidden states, attention outputs and probabilities.

The graphs are those of the model as written, before any pass, in the engine's dtype; their weights
are the engine's, dequantised. The KV cache is not quantised. Weights are unpacked one at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g4ir.errors import InputError
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.interpret import empty_state, interpret, run_node
from g4ir.ir.rewrite import drop_dead
from g4ir.model.decoder import CHUNK, VERIFY
from g4ir.model.text import build_graph
from g4ir.ops.attention import probabilities
from g4ir.ops.types import Type, torch_dtype
from g4ir.spec.reader import did_you_mean
from g4ir.ui.files import check_disk_space, new_version
from g4ir.ui.memory import free_memory
from g4ir.ui.units import size_text
from g4ir.weights.tensorfile import FileTensor, bytes_of, code_of, file_layout

from .parts import EngineParts
from .prompts import checked_ids

Tensor = torch.Tensor
#: dims of tokens and of cache slots, of which the plain graphs have one per token
TOKEN_DIMS = (CHUNK, "M", "C")
#: callback(name, first token, values [1, tokens, ...])
Sink = Callable[[str, int, Tensor], None]
#: bytes of dequantised weights that are kept from one chunk to the next
CACHED_BYTES = 2 << 30


@dataclass(frozen=True)
class Inspection:
    """Named values to compute for a text. `types`: value name -> its type for the whole text,
    [1, tokens, ...]; `chunk`: tokens per run of the graph."""

    engine: EngineParts
    graph: Graph
    ids: Tensor
    chunk: int
    types: Mapping[str, Type]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes() for t in self.types.values())

    def run(self, sink: Sink) -> None:
        """Compute the values; `sink` receives them chunk by chunk, caches after the last one."""
        engine, graph, count = self.engine, self.graph, len(self.ids)
        state = empty_state(graph, {"B": 1, "C": count})
        state = {name: t.to(engine.device) for name, t in state.items()}
        inputs = {v.name: v for v in graph.inputs}
        weights = Weights(engine)
        params = {v.name: partial(weights, v.name) for v in graph.params}
        for start in range(0, count, self.chunk):
            tokens = self.ids[None, start : start + self.chunk]
            feeds = {"tokens": tokens, "lengths": torch.tensor([tokens.shape[1]])}
            feeds["positions"] = start + torch.arange(tokens.shape[1])[None]
            feeds |= engine.embed_tokens(tokens)
            feeds = {name: t.to(engine.device) for name, t in feeds.items() if name in inputs}
            watch, last = partial(self._take, sink, start), start + self.chunk >= count
            for name, t in feeds.items():
                watch(inputs[name], t)
            run = partial(self._run, watch)
            _, state = interpret(graph, feeds, params, state, watch, run)
            for name, v in graph.next.items() if last else ():
                if v.name in self.types:
                    sink(v.name, 0, state[name].transpose(0, 1))

    def _take(self, sink: Sink, start: int, v: Value, t: Tensor) -> None:
        if v.name in self.types and "C" not in v.type.shape:
            axes = v.type.shape.index("B"), token_axis(v.type) or 0
            sink(v.name, start, t.movedim(axes, (0, 1)))

    def _run(self, watch: Callable[[Value, Tensor], None], n: Node, args: list[Any]) -> Any:
        args = [x if isinstance(x, Tensor) else x() for x in args]
        if n.op == "attention" and (name := probs_name(n)) in self.types:
            probs = probabilities(*args, **n.attrs)
            watch(Value(name, n.out.type), probs)
        return run_node(n, args)


class Weights:
    """Dequantised weights of an engine, on its device; up to CACHED_BYTES stay in memory."""

    def __init__(self, engine: EngineParts) -> None:
        self.engine, self.cached, self.free = engine, dict[str, Tensor](), CACHED_BYTES

    def __call__(self, name: str) -> Tensor:
        if name not in self.cached:
            weight = self.engine.param(name).to(self.engine.device)
            if weight.nbytes > self.free:
                return weight
            self.cached[name], self.free = weight, self.free - weight.nbytes
        return self.cached[name]


def inspect_values(
    engine: EngineParts, tokens: Any, names: Sequence[str], phase: str = "prefill"
) -> Inspection:
    """Plan the values of one text. tokens: ids [S] or [1, S]; names: of values, in which `*` stands
    for any characters but dots and `**` for any; phase: prefill (in the engine's chunks), decode
    (token by token) or verify (as draft tokens, if the engine has them). Raises InputError for
    other tokens, another phase, and a name without a value (with the nearest one)."""
    ids = torch.as_tensor(tokens)
    ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
    if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
        raise InputError(f"values: tokens {list(ids.shape)}: expected one sequence of token ids")
    checked_ids(ids.tolist(), engine.spec.text.readable_ids, "values")
    if len(ids) > engine.limits.max_seq:
        problem = f"values: {len(ids)} tokens do not fit the engine's --max-seq"
        raise InputError(f"{problem} {engine.limits.max_seq}")
    sizes = {"prefill": engine.limits.prefill_chunk, "decode": 1}
    sizes |= {VERIFY: engine.draft_tokens + 1} if engine.draft_tokens else {}
    if phase not in sizes:
        raise InputError(f"values: phase {phase!r}: this engine has {', '.join(sizes)}")
    # A decode step is a verification step of one token, in which that dim has a name.
    name = phase if phase == "prefill" else VERIFY
    graph = build_graph(engine.spec, name, True, engine.dtype)
    graph, types = _selected(graph, names, len(ids))
    return Inspection(engine, graph, ids, sizes[phase], types)


def _selected(graph: Graph, names: Sequence[str], count: int) -> tuple[Graph, dict[str, Type]]:
    """Return the part of a graph that computes the named values, and their types."""
    values = [*graph.inputs, *(v for n in graph.nodes for v in n.outputs)]
    shapes = {v.name: _full_type(v.type, count) for v in values if token_axis(v.type) is not None}
    makers = {v.name: v for v in values}
    for n in graph.find("attention"):
        q, name = n.out.type, probs_name(n)
        shapes[name] = Type(q.dtype, (1, count, q.shape[2], count))
        makers[name] = n.out
    picked = [name for pattern in _texts(names) for name in _matching(pattern, shapes)]
    outputs = tuple(makers[name] for name in dict.fromkeys(picked))
    live = drop_dead(replace(graph, outputs=outputs, next={}))
    read = {v.name for v in live.state}
    updates = {k: v for k, v in graph.next.items() if k in read}
    graph = drop_dead(replace(graph, outputs=outputs, next=updates))
    return replace(graph, outputs=()), {name: shapes[name] for name in dict.fromkeys(picked)}


def token_axis(t: Type) -> int | None:
    """Return the axis of a value's tokens (or cache slots); None if it has none."""
    return next((i for i, d in enumerate(t.shape) if d in TOKEN_DIMS), None)


def _full_type(t: Type, count: int) -> Type:
    """Return the type [1, tokens, ...] of a value for the whole text."""
    dims = [d for d in t.shape if d != "B" and d not in TOKEN_DIMS]
    return Type(t.dtype, (1, count, *dims))


def probs_name(n: Node) -> str:
    """Return the name of an attention node's probabilities: %L3.attn.out -> %L3.attn.probs."""
    return f"{n.out.name.removesuffix('.out')}.probs"


def _texts(names: Sequence[str]) -> Sequence[str]:
    if isinstance(names, str) or not names or {*map(type, names)} != {str}:
        raise InputError(f"values: names {names!r}: expected a list such as ['L*.out']")
    return names


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    words = re.split(r"(\*+)", pattern.removeprefix("%"))
    globs = {"*": "[^.]*"}
    text = "".join(globs.get(w, ".*") if w[:1] == "*" else re.escape(w) for w in words)
    if found := [name for name in names if re.fullmatch(text, name)]:
        return found
    plain = pattern.removeprefix("%").replace("*", "0")
    near = did_you_mean(plain, names)
    raise InputError(f"values: no value of the plain graph is called {pattern!r}{near}")


def compute_values(plan: Inspection) -> dict[str, Tensor]:
    """Return the values on the host, name -> [1, tokens, ...]; InputError if they would not fit in
    free memory."""
    if plan.nbytes > (free := free_memory()):
        sizes = f"values: {size_text(plan.nbytes)}, and {size_text(free)} of memory are free"
        raise InputError(f"{sizes}; name fewer, or write them to a file (g4ir run --dump-to)")
    out = {
        name: torch.empty([int(d) for d in t.shape], dtype=torch_dtype(t.dtype))
        for name, t in plan.types.items()
    }

    def store(name: str, start: int, t: Tensor) -> None:
        out[name][:, start : start + t.shape[1]] = t

    with torch.no_grad():
        plan.run(store)
    return out


def write_values(path: Path, plan: Inspection) -> dict[str, Type]:
    """Write the values to a safetensors file, a chunk at a time; its metadata have the token ids.
    The file appears whole, or not at all. InputError if the disk has no room."""
    tensors = {
        name: FileTensor(code_of(torch_dtype(t.dtype)), tuple(map(int, t.shape)), ())
        for name, t in plan.types.items()
    }
    names, header, size = file_layout(tensors, {"tokens": json.dumps(plan.ids.tolist())})
    check_disk_space(path, size)
    offsets, at = dict[str, int](), len(header)
    for name in names:
        offsets[name], at = at, at + tensors[name].nbytes
    with new_version(path) as file, torch.no_grad():
        file.write(header)
        file.truncate(size)

        def store(name: str, start: int, t: Tensor) -> None:
            file.seek(offsets[name] + start * (tensors[name].nbytes // len(plan.ids)))
            file.write(bytes_of(t))

        plan.run(store)
    return dict(plan.types)
