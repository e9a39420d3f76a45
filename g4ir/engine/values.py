"""Values of the plain graphs, by name: hidden states, attention outputs and probabilities of the
text model; of its towers (`vision.L0.out`) and of its draft model (`draft.L0.out`).

The graphs are those of the model as written, before any pass, in the engine's dtype; their weights
are the engine's, dequantised. The KV cache is not quantised. Weights are unpacked one at a time.
Towers run as the engine's graphs, after its passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from g4ir.backends.base import GraphRun
from g4ir.backends.reference import WatchedRuntime, probs_of
from g4ir.errors import InputError
from g4ir.ir.graph import Graph, Value
from g4ir.ir.interpret import empty_state
from g4ir.ir.rewrite import pruned
from g4ir.media.soft import Soft
from g4ir.model.decoder import BLOCKS, CHUNK, VERIFY
from g4ir.model.draft import DRAFT, build_draft
from g4ir.model.names import DRAFTER_PREFIX
from g4ir.model.text import build_graph
from g4ir.model.towers import PARTS
from g4ir.ops.types import Type, zeros
from g4ir.spec.reader import did_you_mean
from g4ir.ui.memory import free_memory
from g4ir.ui.units import size_text

from .inputs import row_prompt
from .parts import EngineParts
from .session import Session

Tensor = torch.Tensor
#: dims that count tokens: of a chunk, of a verification step, and cache slots (one per token in
#: plain graphs)
TOKEN_DIMS = (CHUNK, "M", "C")
#: callback(name, index of the first token, values [1, tokens, ...])
Sink = Callable[[str, int, Tensor], None]


class TowerValues(WatchedRuntime):
    """Runs towers and collects their values whose names match a pattern of `names`; those of a
    second image, frame or clip are named `vision.L0.out[1]`. InputError for invalid `names`."""

    def __init__(self, engine: EngineParts, names: Sequence[str]) -> None:
        source = engine.runtime.source
        super().__init__(engine.device, self._take, source.tensor, {}, source)
        if isinstance(names, str) or not names or {*map(type, names)} != {str}:
            raise InputError(f"values: names {names!r}: expected a list such as ['L*.out']")
        self.engine, self.patterns = engine, [*names]
        self.values, self.types = dict[str, Tensor](), dict[str, Type]()

    def encode(self, tower: str, feeds: Mapping[str, Tensor]) -> Tensor:
        graph = self.engine.program.graphs[tower]
        return torch.no_grad()(self.interpret)(graph, feeds, {})["soft"]

    def _take(self, v: Value, t: Any) -> None:
        name, named = v.name, v.name.startswith(tuple(f"{part}." for part in PARTS))
        if named and t.dim() > 1 and any(re.fullmatch(_regex(p), name) for p in self.patterns):
            before = sum(k.partition("[")[0] == name for k in self.values)
            name += f"[{before}]" * bool(before)
            self.values[name], self.types[name] = t.cpu(), Type(v.type.dtype, tuple(t.shape))


class TextValues(WatchedRuntime):
    """Runs the text graphs and the draft model for one text; `sink` receives the named values chunk
    by chunk, caches after the last one."""

    def __init__(self, plan: Inspection, sink: Sink) -> None:
        engine = plan.towers.engine
        source, folded = engine.runtime.source, engine.program.params()
        super().__init__(engine.device, self._take, engine.param, folded, source)
        self.plan, self.sink, self.start, self.drafted = plan, sink, 0, 0

    def new_state(self, batch: int) -> dict[str, Tensor]:
        dims = {"B": batch, "C": len(self.plan.ids)}
        caches = [empty_state(g, dims) for g in self.plan.graphs.values()]
        return {name: t.to(self.device) for c in caches for name, t in c.items()}

    def run(self, step: GraphRun, state: Any) -> Any:
        graph, self.start = self.plan.graphs[step.phase], int(step.feeds["positions"][0, 0])
        if step.phase == DRAFT:
            self.start, self.drafted = self.drafted, self.drafted + 1
        outputs = self.interpret(graph, step.feeds, state)
        for name, v in graph.next.items() if step.context == len(self.plan.ids) else ():
            if v.name in self.plan.types:
                self.sink(v.name, 0, state[name].transpose(0, 1))
        return {"logits": torch.zeros(1, 1, 1), **outputs}

    def _take(self, v: Value, t: Any) -> None:
        if v.name not in self.plan.types or "C" in v.type.shape:
            return
        t = t if isinstance(t, Tensor) else t()
        if _drafts(v.name):
            t = t.reshape(1, 1, *t.shape[2:])
        else:
            t = t.movedim((v.type.shape.index("B"), token_axis(v.type) or 0), (0, 1))
        self.sink(v.name, self.start, t)


@dataclass(frozen=True)
class Inspection:
    """Named values to compute for a text. `types`: value name -> its type for the whole text,
    [1, tokens or draft steps, ...]; `chunk`: tokens per decode or verification step; None: prefill
    in the engine's chunks."""

    towers: TowerValues
    ids: Sequence[int]
    soft: Sequence[Soft]
    chunk: int | None
    #: phase -> plain graph
    graphs: Mapping[str, Graph]
    types: Mapping[str, Type]

    def run(self, sink: Sink) -> None:
        """Compute the values; `sink` receives them."""
        for name, t in self.towers.values.items():
            sink(name, 0, t)
        engine, ids = self.towers.engine, torch.tensor([self.ids])
        runtime: Any = TextValues(self, sink)
        session = Session(replace(engine, runtime=runtime, adapters=None))
        if self.chunk is None:
            logits = session.prefill(ids, soft=self.soft)
        for step in ids.split(self.chunk, 1) if self.chunk else ():
            session.verify(step)
        if DRAFT in self.graphs:
            session.draft({0: int(logits.argmax())}, {0: engine.draft_tokens})


def inspect_values(
    towers: TowerValues, ids: Sequence[int], phase: str, soft: Sequence[Soft] = ()
) -> Inspection:
    """Plan the values of one text that match the names of `towers`: `*` matches any characters but
    dots, `**` any. ids: token ids, with a placeholder for each of the `soft` tokens, which `towers`
    encoded; phase: prefill (in the engine's chunks; the only one with media), decode (token by
    token) or verify (in verification steps, if the engine has them). InputError for tokens that a
    session would refuse, another phase, and a name that matches no value (with the nearest one)."""
    engine = towers.engine
    row_prompt(engine, ids, soft)
    chunks = {"prefill": None, "decode": 1}
    chunks |= {VERIFY: engine.draft_tokens + 1} if engine.draft_tokens else {}
    if phase not in chunks or (soft and chunks[phase]):
        names = ", ".join(chunks)
        raise InputError(f"values: phase {phase!r}: expected one of {names}; with media, prefill")
    graphs = _plain_graphs(engine, phase)
    values = {p: _named_values(g, len(ids), engine.draft_tokens) for p, g in graphs.items()}
    types = {name: t for named in values.values() for name, (_, t) in named.items()} | towers.types
    picked = dict.fromkeys(name for p in towers.patterns for name in _matching(p, types))
    if not any(map(_drafts, picked)):
        graphs.pop(DRAFT, None)
        graphs = {
            p: pruned(g, [v for name, (v, _) in values[p].items() if name in picked])
            for p, g in graphs.items()
        }
    return Inspection(towers, ids, soft, chunks[phase], graphs, {k: types[k] for k in picked})


def _plain_graphs(engine: EngineParts, phase: str) -> dict[str, Graph]:
    """Return the graph of each phase of a session. Decode steps run the graph of `phase` too
    (prefill or verification, with one token), since its token dim has a name."""
    hidden = engine.drafter is not None and phase == "prefill"
    build = partial(build_graph, engine.spec, all_logits=True, dtype=engine.dtype, hidden=hidden)
    graphs = dict.fromkeys((phase, "decode"), build("prefill" if phase == "prefill" else VERIFY))
    if BLOCKS in engine.program.graphs:
        graphs[BLOCKS] = build(BLOCKS)
    if engine.drafter and hidden:
        graphs[DRAFT] = build_draft(engine.spec, engine.drafter, engine.dtype)
    return graphs


def _named_values(graph: Graph, count: int, steps: int) -> dict[str, tuple[Value, Type]]:
    """Return name -> the graph's value, and its type for the whole text: `count` tokens, or `steps`
    draft steps."""
    out, drafts = dict[str, tuple[Value, Type]](), graph.name == DRAFT
    head = (1, steps if drafts else count)
    for v in (*graph.inputs, *(v for n in graph.nodes for v in n.outputs)):
        dims = [d for d in v.type.shape if d != "B" and d not in TOKEN_DIMS][drafts:]
        if _drafts(v.name) and "B" in v.type.shape if drafts else token_axis(v.type) is not None:
            out[v.name] = v, Type(v.type.dtype, (*head, *dims))
    for n in graph.find("attention"):
        v = probs_of(n)
        out[v.name] = n.out, Type(v.type.dtype, (*head, v.type.shape[2], count))
    return out


def _drafts(name: str) -> bool:
    return name.startswith(DRAFTER_PREFIX)


def token_axis(t: Type) -> int | None:
    """Return the axis of a value's tokens (or cache slots); None if it has none."""
    return next((i for i, d in enumerate(t.shape) if d in TOKEN_DIMS), None)


def _regex(pattern: str) -> str:
    words = re.split(r"(\*+)", pattern.removeprefix("%"))
    globs = {"*": "[^.]*"}
    return "".join(globs.get(w, ".*") if w[:1] == "*" else re.escape(w) for w in words)


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    if matches := [name for name in names if re.fullmatch(_regex(pattern), name.partition("[")[0])]:
        return matches
    near = did_you_mean(pattern.removeprefix("%").replace("*", "0"), names)
    raise InputError(f"values: no value of the engine matches {pattern!r}{near}")


def compute_values(plan: Inspection) -> dict[str, Tensor]:
    """Return the values on the host, name -> [1, tokens, ...]; InputError if they would not fit in
    free memory."""
    nbytes, free = sum(t.nbytes() for t in plan.types.values()), free_memory()
    if nbytes > free:
        sizes = f"values: {size_text(nbytes)}, and {size_text(free)} of memory are free"
        raise InputError(f"{sizes}; name fewer, or write them to a file (g4ir run --dump-to)")
    out = {name: zeros(t) for name, t in plan.types.items()}

    def store(name: str, start: int, t: Tensor) -> None:
        out[name][:, start : start + t.shape[1]] = t

    with torch.no_grad():
        plan.run(store)
    return out
