"""The stages of a pipeline: the graphs after each pass, their params, and their runs.

A step is one run of a graph. A text, longer than the window if max_seq permits, runs in prefill
chunks, then in decode steps; if the engine has the graphs, also in verification steps with some
wrong draft tokens, and with blocks of bidirectional attention.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from g4ir.backends import find_backend
from g4ir.backends.reference import text_graphs
from g4ir.engine.engine import Engine
from g4ir.ir.graph import Graph, Node, Program, Value
from g4ir.ir.interpret import empty_state, interpret, run_node
from g4ir.ir.rewrite import bind, drop_dead
from g4ir.ir.wide import in_float64
from g4ir.model.decoder import BLOCKS, HIDDEN, VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.encoder import ENCODE
from g4ir.model.names import checkpoint_name
from g4ir.model.text import TEXT_GRAPHS, build_program
from g4ir.model.towers import is_tower
from g4ir.ops.finite import require_finite
from g4ir.ops.kv_quant import to_comparable
from g4ir.ops.types import Type, torch_dtype
from g4ir.parallel.shard import shard_program, split_name, unroll
from g4ir.parallel.table import Share
from g4ir.passes import run_program
from g4ir.quant.rewrite import codes_as_params, quantise
from g4ir.weights.pack import Packing, UnpackedWeights, local_params, split_program

from .items import Item
from .reference import original_weights
from .stage_report import describe_value
from .tokens import draft_rounds, turn_sizes

Tensor = torch.Tensor
#: empty embedding graph, for steps without one
NO_EMBEDDING = Graph("nothing", (), (), (), (), ())
#: names of stages that are not named after a pass
BACKEND, STORED, MODEL, SHARD = "backend", "stored graphs", "model", "shard"
#: phase -> dims of the embedding graph that the phase renames or fixes
DIMS: Mapping[str, Mapping[str, int | str]] = {VERIFY: {"S": "M"}, ENCODE: {"B": 1}}
#: max decode steps at the end of the tokens, and max tokens of the chunk before them
STEPS, SHORT = 4, 3
#: padding tokens at the end of each chunk of several tokens; a pass must not mistake the last of
#: them for the last token
PADDING = 2
#: maximum bytes of a trace that is stored for the next stage
MAX_TRACE = 1 << 26


@dataclass(frozen=True)
class PlainParams:
    """Params of the graph before all passes, of the model or of a rank (parallel/shard.py): read by
    `read`, or joined from `shards`, the unpacked weights of each of several ranks."""

    share: Share
    read: Callable[[Value], Tensor]
    shards: Sequence[UnpackedWeights] = ()

    @property
    def unpacked(self) -> UnpackedWeights | None:
        """The unpacked weights of the engine, if params come from them; else None."""
        return self.read if isinstance(self.read, UnpackedWeights) else None

    def __call__(self, v: Value) -> Tensor:
        """Return the tensor of a param of the model, or of a rank by its `r0.` name."""
        rank, name = split_name(v.name)
        if rank is not None:
            return self._of_rank(rank, replace(v, name=name))
        return self.share.join_parts(v, self._of_rank) if self.shards else self.read(v)

    def _of_rank(self, rank: int, v: Value) -> Tensor:
        if self.shards:
            return self.shards[rank](v)
        share = replace(self.share, rank=rank)
        return share.read_part(v.name, lambda name: self.read(replace(v, name=name)))


def plain_params(engine: Engine, checkpoint: str | Path | None = None) -> PlainParams:
    """Return the unpacked params, in the engine's dtype: computed from weights of `checkpoint`, of
    the engine's linked checkpoint or of its seed; else recovered from the engine's packed params.

    Raises WeightsError if the checkpoint does not fit the engine's spec; calling the result raises
    EngineError for a param that cannot be recovered from a packed engine.
    """
    source = original_weights(engine, checkpoint)
    if source is None:
        ranks = range(engine.ranks) if engine.ranks > 1 else ()
        return PlainParams(engine.share, engine.unpacked(), [*map(engine.unpacked, ranks)])

    def read(v: Value) -> Tensor:
        return source.tensor(checkpoint_name(v.name)).to(torch_dtype(v.type.dtype))

    return PlainParams(engine.share, read)


@dataclass
class StageWeights:
    """Params of any stage of the pipeline on one device. Stages that compute a param in the same
    way share its tensor."""

    plain: PlainParams
    device: str
    _computed: dict[str, tuple[Graph, Tensor]] = field(default_factory=dict)
    _plain: dict[str, Tensor] = field(default_factory=dict)

    def params(self, packing: Packing, graph: Graph) -> dict[str, Tensor]:
        """Return name -> tensor of the params of a graph of the packing's program."""
        prologue, packed = packing.prologue, packing.prologue.producers
        return {
            v.name: self._packed(prologue, v) if v.name in packed else self._unpacked(v)
            for v in graph.params
        }

    def _packed(self, prologue: Graph, v: Value) -> Tensor:
        cone = drop_dead(replace(prologue, outputs=(v,)))
        if v.name not in self._computed or self._computed[v.name][0] != cone:
            params = {x.name: self._unpacked(x) for x in cone.params}
            self._computed[v.name] = cone, interpret(cone, {}, params, {})[0][v.name]
        return self._computed[v.name][1]

    def _unpacked(self, v: Value) -> Tensor:
        if v.name not in self._plain:
            self._plain[v.name] = self.plain(v).to(self.device)
        return self._plain[v.name]


@dataclass(frozen=True)
class Recording:
    """The graphs of one phase: the embedding (empty if the phase takes no token ids), then the
    phase's graph; `params` are those of both."""

    embed: Graph
    graph: Graph
    params: Mapping[str, Any]
    prologue: Graph

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return (*self.embed.nodes, *self.graph.nodes)

    @cached_property
    def makers(self) -> dict[str, int]:
        """The index in `nodes` of the producer of each value."""
        return {v.name: at for at, n in enumerate(self.nodes) for v in n.outputs}

    def has(self, n: Node) -> bool:
        return self.nodes[self.makers.get(n.outputs[0].name, 0)] == n

    @cached_property
    def types(self) -> dict[str, Type]:
        """Types of inputs and of nodes' outputs."""
        outputs = (v for n in self.nodes for v in n.outputs)
        return {v.name: v.type for v in (*self.embed.inputs, *self.graph.inputs, *outputs)}

    @cached_property
    def cached(self) -> set[str]:
        """The values that become the KV cache."""
        return {v.name for v in self.graph.next.values()}

    def cone(self, name: str, stops: Container[str]) -> tuple[Node, ...]:
        """Return the nodes between a value and the values in `stops`, in order."""
        visited, queue = set[int](), [name]
        while queue:
            at = self.makers.get(queue.pop())
            if at is not None and at not in visited:
                visited.add(at)
                queue += [v.name for v in self.nodes[at].inputs if v.name not in stops]
        return tuple(self.nodes[at] for at in sorted(visited))

    def with_params(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Return the nodes, preceded by the prologue's nodes that compute their params."""
        producers = self.prologue.producers
        early = {v.name: producers[v.name] for n in nodes for v in n.inputs if v.name in producers}
        return (*early.values(), *nodes)


@dataclass(frozen=True)
class Stage:
    """The graphs after a pass, and their params by graph. `traces`: step -> its last trace, at
    first an earlier stage's, whose values are reused if node and inputs are equal."""

    name: str
    packing: Packing
    params: Mapping[str, Mapping[str, Any]]
    traces: dict[GraphStep, Trace] = field(default_factory=dict)

    @cached_property
    def recordings(self) -> dict[str, Recording]:
        graphs = self.packing.program.graphs
        recordings = {}
        for name in self.params.keys() - {"embed"}:
            embed, tables = graphs["embed"], self.params.get("embed")
            if name in DIMS:  # so that a value has the same type in both graphs
                embed = bind(embed, **DIMS[name])
            if is_tower(name) or name == DRAFT or tables is None:
                embed, tables = NO_EMBEDDING, {}
            params = {**tables, **self.params[name]}
            recordings[name] = Recording(embed, graphs[name], params, self.packing.prologue)
        return recordings

    def caches(self, slots: int, device: str) -> dict[str, Tensor]:
        """Return empty KV caches for one sequence."""
        state = tuple(self.packing.program.state().values())
        empty = empty_state(replace(NO_EMBEDDING, state=state), {"B": 1, "C": slots})
        return {name: t.to(device) for name, t in empty.items()}


def stages_of(
    engine: Engine, weights: StageWeights, graphs: Sequence[str] = TEXT_GRAPHS
) -> Iterator[Stage]:
    """Yield the stages: the model's graphs (unless each rank quantised its shard), with several
    ranks the sharded graphs, the graphs after each pass, then the engine's stored graphs if they
    differ. Only `graphs` can be run."""
    config, is_unpacked = engine.config, weights.plain.unpacked is not None
    stored = partial(find_backend(config.backend).stored, device=config.device)
    plain = _model_program(engine)
    if is_unpacked:
        plain = plain.map(codes_as_params)
    after: dict[str, dict[str, Graph]] = {MODEL: dict(plain.graphs)}
    if engine.ranks > 1:
        if engine.config.quant and not engine.config.quant.from_checkpoint:
            after.clear()  # each rank quantised its shard with its own scales
        plain = shard_program(plain, config.sharding)
        after[SHARD] = dict(plain.graphs)

    def stage(name: str, packing: Packing) -> Stage:
        if engine.ranks > 1 and name != MODEL:
            packing = _side_by_side(packing, engine.share)
        params = {g: weights.params(packing, packing.program.graphs[g]) for g in graphs}
        return Stage(name, packing, {"embed": engine.tables, **params})

    def store(name: str, g: Graph) -> None:
        after.setdefault(name, {})[g.name] = g

    run_program(plain, skip=config.skip, dump=store, options=config.options)
    packing = None
    for name, program in after.items():
        packing = split_program(stored(Program(program)))
        yield stage(name, packing)
    prologue = codes_as_params(engine.prologue) if is_unpacked else engine.prologue
    if packing != (engines := Packing(engine.program, prologue)):
        yield stage(STORED, engines)


def stored_stage(engine: Engine, reference: Engine) -> Stage:
    """Return an engine's stored text graphs without the embedding, on the params of the interpreter
    `reference`; for an engine of several ranks the last stage of `stages_of`, on params computed
    from `plain_params` (EngineError as there)."""
    names = [name for name in text_graphs(engine.program).graphs if name != "embed"]
    if engine.ranks > 1:
        *_, last = stages_of(engine, StageWeights(plain_params(engine), engine.device), names)
        return replace(last, params={name: last.params[name] for name in names})
    runtime: Any = reference.runtime
    graphs = {name: engine.program.graphs[name] for name in names}
    params = {key: {v.name: runtime.params[v.name] for v in g.params} for key, g in graphs.items()}
    return Stage(STORED, Packing(engine.program, engine.prologue), params)


def _model_program(engine: Engine) -> Program:
    plain = build_program(
        engine.spec,
        engine.all_logits,
        engine.dtype,
        media=engine.media,
        verifies=VERIFY in engine.program.graphs,
        drafter=engine.drafter,
    )
    return quantise(plain, engine.spec, engine.config.quant, engine.dtype)


def _side_by_side(packing: Packing, share: Share) -> Packing:
    local, ranks = local_params(packing, share), share.sharding.ranks
    sharded = {v.name for v in packing.prologue.params if share.cuts(v.name)}
    program = packing.program.map(lambda g: unroll(g, local, ranks) if g.state else g)
    return Packing(program, unroll(packing.prologue, sharded, ranks))


@dataclass(frozen=True)
class Trace:
    """Every value of a stage in one step, and its KV cache before and after it."""

    recording: Recording
    step: GraphStep
    values: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Params, caches before the step, and values by name."""
        return {**self.recording.params, **self.state, **self.values}

    def equal(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the tensors that are bit-equal to those of this trace."""
        return {k for k, t in tensors.items() if _equal(t, self.tensors.get(k))}

    def in_float64(self, cone: Sequence[Node], name: str) -> Tensor:
        """Recompute `name` in float64 through the nodes of the cone."""
        outputs = {v.name for n in cone for v in n.outputs}
        inputs = {v.name for n in cone for v in n.inputs} - outputs
        graph = replace(NO_EMBEDDING, nodes=tuple(cone))
        return in_float64(graph, {k: self.tensors[k] for k in inputs}, {})[name]


def _equal(a: Tensor, b: Tensor | None) -> bool:
    same_type = b is not None and (a.dtype, a.device) == (b.dtype, b.device)
    return a is b or (same_type and torch.equal(to_comparable(a), to_comparable(b)))


class StageRun:
    """Runs a stage step by step. CheckError names the first value that is NaN or infinite: no fault
    of the stage that is compared with it."""

    def __init__(self, stage: Stage, slots: int, engine: Engine) -> None:
        self.stage, self.device, self.dtype = stage, engine.device, engine.dtype
        self.state = stage.caches(slots, engine.device)

    def trace(self, step: GraphStep) -> Trace:
        """Run a step. A node of the step's trace in an earlier stage, on equal inputs, is not
        computed again."""
        values, before = step.feeds(self.device), self.state
        recording, earlier = self.stage.recordings[step.phase], self.stage.traces.pop(step, None)
        equal = earlier.equal({**recording.params, **before, **values}) if earlier else set()

        def run(n: Node, inputs: list[Any]) -> tuple[Any, ...]:
            if earlier and earlier.recording.has(n) and equal.issuperset(v.name for v in n.inputs):
                equal.update(v.name for v in n.outputs)
                return tuple(earlier.values[v.name] for v in n.outputs)
            return run_node(n, inputs)

        def store(v: Value, t: Tensor) -> None:
            values[v.name] = t.to(self.device)
            if v.name not in equal:
                valid = to_comparable(step.without_padding(t, v.type))
                require_finite(valid, describe_value(v.name, step.at), self.dtype)
                equal.update(earlier.equal({v.name: values[v.name]}) if earlier else ())

        for graph in (recording.embed, recording.graph):
            _, after = interpret(graph, values, recording.params, before, store, run)
            self.state = {**self.state, **after}
        trace = Trace(recording, step, values, before, self.state)
        if sum(t.nbytes for t in values.values()) <= MAX_TRACE:
            self.stage.traces[step] = trace
        return trace


@dataclass(frozen=True, eq=False)
class GraphStep:
    """One run of graph `phase`, after `at` tokens. end: tokens in the KV cache afterwards; padded:
    the dim (a name, or the size of axis 1) of which all but the first `valid` entries are
    padding."""

    phase: str
    at: int
    end: int
    inputs: Mapping[str, Tensor]
    valid: int = 1
    padded: str | int | None = None

    @property
    def texts(self) -> int:
        """Batch size of the step: max_batch for an encoder, else 1."""
        return len(self.inputs["ends"]) if "ends" in self.inputs else 1

    def feeds(self, device: str) -> dict[str, Tensor]:
        """Return the inputs on a device; token ids stay on the host, with the embedding tables."""
        return {k: t if k == "tokens" else t.to(device) for k, t in self.inputs.items()}

    def without_padding(self, t: Tensor, of: Type) -> Tensor:
        if isinstance(self.padded, int):
            padded = of.rank > 1 and of.shape[1] == self.padded
            return t[:, : self.valid] if padded else t
        if self.padded not in of.shape:
            return t
        return t.narrow(of.shape.index(self.padded), 0, self.valid)


#: steps over the same KV cache
Series = Sequence[GraphStep]


def text_step(
    at: int, tokens: Tensor, valid: int, block_ids: Tensor | None = None, verify: bool = False
) -> GraphStep:
    """Return the step of tokens i64[1, S], all but the first `valid` of them padding. block_ids:
    i64[1, S], blocks of bidirectional attention; verify: run them in a verification step."""
    count = tokens.shape[1]
    inputs = {
        "tokens": tokens,
        "positions": at + torch.arange(count)[None],
        "lengths": torch.tensor([valid]),
    }
    phase = VERIFY if verify else "decode" if count == 1 else "prefill"
    if block_ids is not None:
        inputs["block_ids"], phase = block_ids, BLOCKS
    return GraphStep(phase, at, at + valid, inputs, valid, "M" if verify else "S")


def series_of(
    engine: Engine, chunks: Sequence[GraphStep], items: Sequence[Item]
) -> Iterator[Series]:
    """Yield series of steps: the text's chunks, then a step of the draft model if there is one; if
    the engine has the graphs, the text in verification steps and the text with bidirectional
    blocks; and each item through its tower."""
    drafted = [_draft_step(engine, chunks[-1].end)] if engine.drafter else []
    yield [*chunks, *drafted]
    if VERIFY in engine.program.graphs:
        yield [*rounds_of(chunks, engine.draft_tokens + 1, engine.limits.max_seq)]
    if BLOCKS in engine.program.graphs and (blocks := [*_block_steps(chunks)]):
        yield blocks
    for item in items:
        yield [GraphStep(item.tower, 0, 1, item.feeds, item.rows, item.size)]


def _draft_step(engine: Engine, at: int) -> GraphStep:
    """Return a step of the draft model after `at` tokens, on a random embedding and hidden
    state."""
    shape = (2, 1, 1, engine.spec.text.hidden_size)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(at))
    embeds, hidden = rows.to(torch_dtype(engine.dtype))
    position = torch.tensor([[at]])
    inputs = {"positions": position, "last": position - 1, "written": position[0]}
    return GraphStep(DRAFT, at, at, {**inputs, "embeds": embeds, HIDDEN: hidden})


def rounds_of(chunks: Sequence[GraphStep], width: int, max_seq: int) -> Iterator[GraphStep]:
    """Yield the prefill chunks, then the last tokens in at most two verification steps of up to
    `width` tokens, the last of which are wrong draft tokens if they fit; the last token of the
    second step is padding if it has several."""
    prefill = max((i for i, c in enumerate(chunks, 1) if c.phase != "decode"), default=0)
    yield from chunks[:prefill]
    ids = torch.cat([c.inputs["tokens"][0, : c.valid] for c in chunks])
    rounds = draft_rounds(ids, chunks[prefill].at, width, max_seq)
    for padding, (at, draft, _) in enumerate(islice(rounds, 2)):
        yield text_step(at, draft[None], max(1, len(draft) - padding), verify=True)


def _block_steps(chunks: Sequence[GraphStep]) -> Iterator[GraphStep]:
    """Yield the chunks of several tokens, each with a bidirectional block of all but its first
    token."""
    at = 0
    for c in chunks:
        if c.phase == "prefill":
            ids = torch.full_like(c.inputs["tokens"], -1)
            ids[:, 1 : c.valid] = at + 1
            yield text_step(at, c.inputs["tokens"], c.valid, block_ids=ids)
            at += c.valid


def chunks_of_tokens(ids: Tensor, window: int, limit: int) -> Iterator[GraphStep]:
    """Yield the steps of the turns of `turn_sizes`: a chunk, one a little longer than the window, a
    short one, single steps; each cut into chunks of at most `limit` tokens, padding included."""
    padding = PADDING if limit > 2 * PADDING else 0
    at = 0
    for size in turn_sizes(len(ids), window, STEPS, SHORT):
        for start in range(0, size, limit - padding):
            valid = min(limit - padding, size - start)
            tokens = ids[None, at : at + valid]
            if size > 1:
                tokens = torch.nn.functional.pad(tokens, (0, padding))
            yield text_step(at, tokens, valid)
            at += valid
