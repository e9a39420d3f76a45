"""Checks the pipeline pass by pass: each stage against the one before, the last with the backend.

All stages are run by the interpreter, on the engine's own weights and the same tokens. Comparing
whole runs would say little: rounding grows from layer to layer. So a stage is forced by the one
before it: a value's name is its identity under passes, and a node takes its inputs from the values
that the earlier stage gave those names. An error of a node is then its own doing, and is held to
its op's budget. Values that only the new stage has (a packed projection, a shared table) are its
own, and so are its caches, which go on from chunk to chunk; the first value after them that both
stages have shows what they are worth.

The same with a backend: after each compiled program its results are compared and replaced by the
interpreter's, and so are the caches after each chunk. Where several ranks share the model they
are interpreted side by side, and shown to the first rank with what each has made itself.

Where an engine verifies drafted tokens, the last ones are given in such rounds too, each with
drafts that are wrong: the next round is computed over what they have left in the caches.

Where an engine takes media, the chunks go through `prefill_media` too, with a block in each, and
the smallest tower of each part runs once. A backend shows nothing inside a tower: its soft tokens
are held to the joint budget of all that it does.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.backends import find_backend
from g4ir.engine.engine import Engine
from g4ir.engine.leader import run_watched, watch_held
from g4ir.engine.trace import See, slots_of
from g4ir.errors import CheckError
from g4ir.ir.flatten import inner_nodes
from g4ir.ir.graph import Graph, Node, Program, Value
from g4ir.ir.interpret import empty_state, interpret, run_node
from g4ir.ir.rewrite import bind
from g4ir.model.decoder import BLOCKS, HIDDEN, VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.text import TEXT_GRAPHS, build_program
from g4ir.model.towers import build_towers, is_tower
from g4ir.ops.kv_quant import comparable
from g4ir.ops.types import Type, torch_dtype
from g4ir.parallel.shard import shard_program
from g4ir.parallel.share import Share
from g4ir.parallel.unroll import own_name, unroll
from g4ir.passes import CHANGES_MEANING, run_program
from g4ir.quant.rewrite import from_codes, quantised
from g4ir.ui.progress import Progress, no_progress
from g4ir.weights.pack import Packing, own_params, split_program

from .media import Item, smallest_items
from .params import Plain, StageWeights, plain_params, unpacked
from .pass_report import CLOSE_EXPERTS, Comparison, Made, StageReport, StagesReport
from .report import engine_name
from .tokens import given_tokens, random_tokens
from .watch import first_not_finite

if TYPE_CHECKING:
    import torch

#: single steps at the end of the tokens
STEPS = 4
#: invalid tokens at the end of each longer chunk: a pass must not take them for the last
PADDING = 2
#: what comes before a tower
NOTHING = Graph("nothing", (), (), (), (), ())
BACKEND, STORED, MODEL, SHARD = "backend", "stored graphs", "model", "shard"


# ---- the way through --------------------------------------------------------------------------


def verify_each_pass(
    engine: Engine,
    tokens: Sequence[int] | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress = no_progress,
) -> StagesReport:
    """Run the engine's pipeline again, pass by pass, and compare each stage with the one before;
    at the end the engine's backend with the last. Stops at the first stage that fails.

    tokens: ids to compare on, at least 2; default: drawn from a fixed seed, enough for a chunk
    longer than the window after a shorter one, and single steps (as far as max_seq goes).
    checkpoint: where the weights before packing are, should the engine no longer tell. Raises
    InputError for a wrong request, PassError where a pass breaks its contract, CheckError where
    values are NaN or infinite before it.
    """
    window = _window(engine)
    ids = given_tokens(engine, tokens)
    if ids is None:
        ids = random_tokens(engine, min(engine.limits.max_seq, _wanted(window)))
    chunks = [*_chunks(ids, window, engine.limits.prefill_chunk)]
    plain = plain_params(engine, checkpoint)
    items = smallest_items(engine)
    known = [i for i in items if _is_known(plain, engine, i.tower)]
    series = [*_series(engine, chunks, known)]
    graphs = tuple(dict.fromkeys((*TEXT_GRAPHS, *(c.phase for part in series for c in part))))
    reports: list[StageReport] = []
    stages = _stages(engine, StageWeights(plain, engine.device), graphs)
    old = next(stages)
    for new in stages:
        if new.packing == old.packing:
            reports.append(StageReport(new.name, 0, (), None))
            continue
        if new.name in CHANGES_MEANING:
            reports.append(StageReport(new.name, 0, (), None, meant=True))
            old = new
            continue
        progress(f"{new.name}: against {old.name}")
        try:
            reports.append(_against(old, new, series, engine))
        except CheckError:  # the first value that was compared need not be the first
            if found := first_not_finite(engine, ids, [c.valid for c in chunks]):
                raise CheckError(f"{engine_name(engine)}: {found}") from None
            raise
        if not reports[-1].ok:
            break
        old = new
    else:
        progress(f"{engine.facts.backend} backend")
        reports.append(_backend(engine, old, series))
    sizes = tuple(c.valid for c in chunks)
    unknown = tuple(i.tower for i in items if i not in known)
    ran = ("embed", *graphs, *unknown)
    return StagesReport(
        engine_name(engine),
        len(ids),
        sizes,
        tuple(reports),
        media=tuple(g for g in graphs if g not in (*TEXT_GRAPHS, VERIFY, DRAFT)),
        rounds=tuple(c.valid for part in series for c in part if c.phase == VERIFY),
        unknown=unknown,
        left_out=tuple(g for g in engine.program.graphs if g not in ran),
    )


def _is_known(plain: Plain, engine: Engine, tower: str) -> bool:
    """Whether the params of a tower before all passes can be had: a packed engine may hold only
    what was made of them."""
    held = unpacked(plain)
    if held is None:
        return True
    graph = build_towers(engine.spec, engine.media, engine.dtype)[tower]
    return all(held.holds(v) for v in graph.params)


def _window(engine: Engine) -> int:
    """Return the longest window of an attention; 1 where all see all the past."""
    return max(
        (
            w
            for g in engine.program.graphs.values()
            for n in g.nodes
            if isinstance(w := n.attrs.get("window"), int) and w
        ),
        default=1,
    )


def _wanted(window: int) -> int:
    return min(window // 2, 64) + 1 + window + 1 + 3 + STEPS


@dataclass(frozen=True)
class Chunk:
    """Tokens i64[1, S], on the host, of which the first `valid` count, after `at` others. With
    `block_ids`, i64[1, S], some of them are seen both ways; those that are `judged` may be taken
    back."""

    at: int
    tokens: torch.Tensor
    valid: int
    block_ids: torch.Tensor | None = None
    judged: bool = False

    @property
    def phase(self) -> str:
        if self.judged:
            return VERIFY
        if self.block_ids is not None:
            return BLOCKS
        return "decode" if self.tokens.shape[1] == 1 else "prefill"

    @property
    def end(self) -> int:
        return self.at + self.valid

    def feeds(self, device: str) -> dict[str, torch.Tensor]:
        """Return what the embedding and the text graphs take, but for rows of the embedding: those
        are gathered where the tables are, from ids on the host."""
        import torch

        positions = self.at + torch.arange(self.tokens.shape[1], device=device)[None]
        lengths = torch.tensor([self.valid], device=device)
        feeds = {"tokens": self.tokens, "positions": positions, "lengths": lengths}
        if self.block_ids is not None:
            feeds["block_ids"] = self.block_ids.to(device)
        return feeds

    def rows(self, t: torch.Tensor, of: Type) -> torch.Tensor:
        """Return the rows of `t` without those of padding."""
        of_tokens = "M" if self.judged else "S"
        if of_tokens not in of.shape:
            return t
        return t.narrow(of.shape.index(of_tokens), 0, self.valid)


@dataclass(frozen=True, eq=False)
class TowerRun:
    """The inputs of a tower, in the place of a chunk."""

    item: Item
    at = 0
    #: slots of caches, which it has none of
    end = 1

    @property
    def phase(self) -> str:
        return self.item.tower

    @property
    def valid(self) -> int:
        return self.item.rows

    def feeds(self, device: str) -> dict[str, torch.Tensor]:
        """Return the tower's inputs."""
        return {name: t.to(device) for name, t in self.item.feeds.items()}

    def rows(self, t: torch.Tensor, of: Type) -> torch.Tensor:
        """Return the rows of `t` without certain padding: soft tokens behind the item's own."""
        size = self.item.size
        return t[:, : self.valid] if of.rank > 1 and of.shape[1] == size else t


@dataclass(frozen=True, eq=False)
class DraftStep:
    """A step of the drafter behind so many tokens, from a token's row and a state, [1,1,hidden]."""

    at: int
    row: torch.Tensor
    hidden: torch.Tensor
    phase = DRAFT
    valid = 1

    @property
    def end(self) -> int:
        return self.at

    def feeds(self, device: str) -> dict[str, torch.Tensor]:
        """Return the inputs of its graph."""
        import torch

        at = torch.tensor([[self.at]])
        feeds = {"positions": at, "last": at - 1, "written": at[0]}
        feeds |= {"embeds": self.row, HIDDEN: self.hidden}
        return {name: t.to(device) for name, t in feeds.items()}

    def rows(self, t: torch.Tensor, of: Type) -> torch.Tensor:
        """Return all rows: there is no padding."""
        return t


Step = Chunk | TowerRun | DraftStep
#: what follows on each other, over the same caches
Series = Sequence[Step]


def _series(engine: Engine, chunks: Sequence[Chunk], items: Sequence[Item]) -> Iterator[Series]:
    """Yield the text, with a drafter's step behind it, the same in rounds and with blocks, each
    where the engine has it, and each tower alone."""
    yield [*chunks, *_drafted(engine, chunks[-1].end)]
    if VERIFY in engine.program.graphs:
        yield [*_rounds(chunks, engine.draft_tokens + 1, engine.limits.max_seq)]
    if BLOCKS in engine.program.graphs and (blocked := [*_blocked(chunks)]):
        yield blocked
    for item in items:
        yield [TowerRun(item)]


def _drafted(engine: Engine, at: int) -> Iterator[DraftStep]:
    import torch

    if engine.drafter:
        shape = (2, 1, 1, engine.spec.text.hidden_size)
        rows = torch.randn(shape, generator=torch.Generator().manual_seed(at))
        yield DraftStep(at, *rows.to(torch_dtype(engine.dtype)))


def _rounds(chunks: Sequence[Chunk], width: int, room: int) -> Iterator[Chunk]:
    """Yield the chunks before the single steps at the end, then these in two rounds of up to
    `width` tokens, which end with wrong ones; the second has padding too."""
    import torch

    begun = max((i for i, c in enumerate(chunks, 1) if c.phase != "decode"), default=0)
    yield from chunks[:begun]
    right = torch.cat([c.tokens for c in chunks[begun:]], 1)
    half = min(width, right.shape[1] + 1) // 2
    wrong = right.flip(1).repeat(1, width)
    for first, padding in ((0, 0), (half, 1)):
        at = chunks[begun].at + first
        given = torch.cat((right[:, first : first + half], wrong), 1)[:, : min(width, room - at)]
        yield Chunk(at, given, max(1, given.shape[1] - padding), judged=True)


def _blocked(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """Yield the longer chunks one by one, each with a block of all but its first token."""
    import torch

    at = 0
    for c in chunks:
        if c.phase == "prefill":
            ids = torch.full_like(c.tokens, -1)
            ids[:, 1 : c.valid] = at + 1
            yield replace(c, at=at, block_ids=ids)
            at += c.valid


def _chunks(ids: torch.Tensor, window: int, limit: int) -> Iterator[Chunk]:
    """Yield a chunk, one a little longer than the window, a short one, single steps; each cut where
    an engine would cut it."""
    import torch

    padding = PADDING if limit > 2 * PADDING else 0
    at = 0
    for size in _turns(len(ids), window):
        for start in range(0, size, limit - padding):
            valid = min(limit - padding, size - start)
            tokens = ids[None, at : at + valid]
            if size > 1:
                tokens = torch.nn.functional.pad(tokens, (0, padding))
            yield Chunk(at, tokens, valid)
            at += valid


def _turns(count: int, window: int) -> list[int]:
    steps = min(STEPS, count // 3)
    rest = count - steps
    short = min(3, rest // 4)
    long = min(window + 1, max(rest - short - 1, 0))
    return [n for n in (rest - short - long, long, short, *[1] * steps) if n]


# ---- stages -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """The graphs that one chunk of a phase goes through: that of the embedding, then that of the
    text; or nothing, then a tower.

    `nodes` has every value that a node makes, in order; `types` those and the inputs; `kept` the
    values that become caches.
    """

    graphs: tuple[Graph, Graph]
    params: tuple[Mapping[str, Any], Mapping[str, Any]]
    prologue: Graph

    @cached_property
    def nodes(self) -> dict[str, Node]:
        return {k: n for g in self.graphs for k, n in g.producers().items()}

    @cached_property
    def place(self) -> dict[int, int]:
        return {id(n): i for i, n in enumerate(n for g in self.graphs for n in g.nodes)}

    @cached_property
    def types(self) -> dict[str, Type]:
        inputs = {v.name: v.type for g in self.graphs for v in g.inputs}
        return inputs | {v.name: v.type for n in self.nodes.values() for v in n.outputs}

    @cached_property
    def kept(self) -> set[str]:
        return {v.name for v in self.graphs[1].next.values()}

    def cone(self, name: str, given: Container[str]) -> tuple[Node, ...]:
        """Return the nodes between a value and values that are given, in order."""
        found: dict[int, Node] = {}
        queue = [name]
        while queue:
            n = self.nodes.get(queue.pop())
            if n and id(n) not in found:
                found[id(n)] = n
                queue += [v.name for v in n.inputs if v.name not in given]
        return tuple(sorted(found.values(), key=lambda n: self.place[id(n)]))

    def makers(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Return the nodes, after those that make their params."""
        made = self.prologue.producers()
        early = {v.name: made[v.name] for n in nodes for v in n.inputs if v.name in made}
        return (*early.values(), *nodes)


@dataclass(frozen=True)
class Stage:
    """The graphs as they are after a pass, and their params by graph."""

    name: str
    packing: Packing
    params: Mapping[str, Mapping[str, Any]]

    @cached_property
    def recordings(self) -> dict[str, Recording]:
        graphs = self.packing.program.graphs
        embed = (graphs["embed"], self.params["embed"])
        # Values of both graphs have one type by name.
        judged = (bind(embed[0], S="M"), embed[1])
        recordings = {}
        for name in self.params.keys() - {"embed"}:
            rows = judged if name == VERIFY else embed
            first, given = (NOTHING, {}) if is_tower(name) or name == DRAFT else rows
            own = (given, self.params[name])
            recordings[name] = Recording((first, graphs[name]), own, self.packing.prologue)
        return recordings

    def caches(self, slots: int, device: str) -> dict[str, torch.Tensor]:
        """Empty caches for one row."""
        state = tuple(self.packing.program.state().values())
        empty = empty_state(Graph("caches", (), (), state, (), ()), {"B": 1, "C": slots})
        return {name: t.to(device) for name, t in empty.items()}


def _stages(
    engine: Engine, weights: StageWeights, graphs: Sequence[str] = TEXT_GRAPHS
) -> Iterator[Stage]:
    """Yield the model as it is written, of several ranks as they share it, then after each pass;
    then the engine's own graphs, should they be others (an engine of an older version). Only
    `graphs` can be run."""
    m = engine.facts
    stored = functools.partial(find_backend(m.backend).stored, device=m.device)
    plain = _written(engine)
    held = unpacked(weights.plain) is not None
    if held:
        plain = plain.map(from_codes)
    after: dict[str, dict[str, Graph]] = {MODEL: dict(plain.graphs)}
    if engine.ranks > 1:
        if engine.recipe and not engine.recipe.held:
            after.clear()  # each rank made codes of its part, with scales of their own
        plain = shard_program(plain, engine.spec, engine.ranks, m.ep)
        after[SHARD] = dict(plain.graphs)

    def keep(name: str, g: Graph) -> None:
        after.setdefault(name, {})[g.name] = g

    run_program(
        plain,
        skip=m.skipped_passes,
        dump=keep,
        options=m.options,
    )
    packing = None
    for name, made in after.items():
        packing = split_program(stored(Program(made)))
        yield _stage(engine, name, packing, weights, graphs)
    prologue = from_codes(engine.prologue) if held else engine.prologue
    own = Packing(engine.program, prologue)
    if packing != own:
        yield _stage(engine, STORED, own, weights, graphs)


def _written(engine: Engine) -> Program:
    """Return the model as it is written, its weights as the engine's recipe says."""
    verifies = VERIFY in engine.program.graphs
    plain = build_program(
        spec=engine.spec,
        all_logits=engine.all_logits,
        dtype=engine.dtype,
        media=engine.media,
        verifies=verifies,
        drafter=engine.drafter,
    )
    return quantised(plain, engine.spec, engine.recipe, engine.dtype)


def _stage(
    engine: Engine, name: str, packing: Packing, weights: StageWeights, graphs: Sequence[str]
) -> Stage:
    if engine.ranks > 1 and name != MODEL:
        packing = _side_by_side(packing, engine.share)
    params: dict[str, Mapping[str, Any]] = {"embed": engine.tables}
    for graph in graphs:
        params[graph] = weights.params(packing, packing.program.graphs[graph])
    return Stage(name, packing, params)


def _side_by_side(packing: Packing, share: Share) -> Packing:
    """Return what all ranks run as one."""
    own = own_params(packing, share)
    cut = {v.name for v in packing.prologue.params if share.cuts(v.name)}
    program = packing.program.map(lambda g: unroll(g, own, share.ranks) if g.state else g)
    return Packing(program, unroll(packing.prologue, cut, share.ranks))


@dataclass(frozen=True)
class Trace:
    """Every value of a stage in one chunk, and its caches before it."""

    values: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]

    def in_float64(self, recording: Recording, cone: Iterable[Node], name: str) -> torch.Tensor:
        """Return what `name` would be without rounding in the nodes of the cone."""
        known = {**recording.params[0], **recording.params[1], **self.state, **self.values}
        own: dict[str, Any] = {}
        for n in cone:
            inputs = [own[v.name] if v.name in own else _double(known[v.name]) for v in n.inputs]
            made = [_double(t) for t in run_node(n, inputs)]
            own |= {v.name: t for v, t in zip(n.outputs, made, strict=True)}
        out: torch.Tensor = own[name]
        return out


def _double(t: Any) -> Any:
    import torch

    return t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t


class Run:
    """A stage on its own, chunk after chunk."""

    def __init__(self, stage: Stage, slots: int, device: str) -> None:
        self.stage, self.device = stage, device
        self.state = stage.caches(slots, device)

    def trace(self, chunk: Step) -> Trace:
        """Run one chunk."""
        values, before = chunk.feeds(self.device), self.state
        recording = self.stage.recordings[chunk.phase]

        def keep(v: Value, t: torch.Tensor) -> None:
            values[v.name] = t.to(self.device)

        for graph, params in zip(recording.graphs, recording.params, strict=True):
            state = {v.name: self.state[v.name] for v in graph.state}
            _, after = interpret(graph, dict(values), params, state, keep)
            self.state = {**self.state, **after}
        return Trace(values, before)


# ---- one stage forced by another ----------------------------------------------------------------


def _against(old: Stage, new: Stage, series: Sequence[Series], engine: Engine) -> StageReport:
    """Compare the stage `new` with `old`, whose values it is given."""
    comparison = Comparison(new.name, engine.dtype)
    for chunks in series:
        slots = max(c.end for c in chunks)
        run = Run(old, slots, engine.device)
        forced = ForcedChoices(
            old, new, new.caches(slots, engine.device), comparison, engine.device
        )
        for chunk in chunks:
            forced.follow(chunk, run.trace(chunk))
            if comparison.first:
                return comparison.report()
    return comparison.report()


class ForcedChoices:
    """A stage whose nodes take their inputs from another stage's values of the same names."""

    def __init__(
        self,
        old: Stage,
        new: Stage,
        state: dict[str, torch.Tensor],
        comparison: Comparison,
        device: str,
    ) -> None:
        self.old, self.new, self.comparison, self.device = old, new, comparison, device
        self.state = state

    def follow(self, chunk: Step, trace: Trace) -> None:
        """Compare what the new stage makes of a chunk with what the old one made of it."""
        self.chunk, self.trace = chunk, trace
        self.was, self.now = self.old.recordings[chunk.phase], self.new.recordings[chunk.phase]
        self.given = {k for k, t in self.now.types.items() if self._guide(k, t) is not None}
        self.own: dict[str, torch.Tensor] = {}
        for graph, params, before in zip(
            self.now.graphs, self.now.params, self.was.params, strict=True
        ):
            self.params = params
            same = {k for k in params if params[k] is before.get(k)} | self.given
            for n in graph.nodes:
                if self.comparison.first:
                    return
                if not self._is_unchanged(n, same):
                    self._evaluate(n)
            self.state = self.state | {k: self._look(v) for k, v in graph.next.items()}

    def _guide(self, name: str, t: Type) -> torch.Tensor | None:
        """Return the old stage's value in the new one's shape; None where it has none."""
        if name not in self.was.types:
            return None
        old, value = self.was.types[name], self.trace.values[name]
        if old == t:
            return value
        axis = _narrowed(old, t)
        return None if axis is None else self._last(value, axis)

    def _last(self, t: torch.Tensor, axis: int) -> torch.Tensor:
        return t.narrow(axis, self.chunk.valid - 1, 1)

    def _look(self, v: Value) -> torch.Tensor:
        if v.name in self.state:
            return self.state[v.name]
        if v.name in self.given:
            found = self._guide(v.name, v.type)
            assert found is not None
            return found
        out: torch.Tensor = self.params[v.name] if v.name in self.params else self.own[v.name]
        return out

    def _is_unchanged(self, n: Node, same: set[str]) -> bool:
        """Whether this is the same node on the same values: nothing to compare."""
        return self.was.nodes.get(n.outputs[0].name) == n and all(v.name in same for v in n.inputs)

    def _evaluate(self, n: Node) -> None:
        inputs = [self._look(v) for v in n.inputs]
        for v, t in zip(n.outputs, run_node(n, inputs), strict=True):
            self.own[v.name] = t.to(self.device)
            if v.name in self.was.types:
                self._compare(n, v, self.own[v.name], inputs)

    def _compare(self, n: Node, v: Value, got: torch.Tensor, inputs: list[Any]) -> None:
        want = self._guide(v.name, v.type)
        cone = self.now.cone(v.name, self.given)
        before = self.was.makers(self.was.cone(v.name, self.given))
        made = Made(v, self.chunk.phase, self.chunk.at, cone, before, self.now.makers(cone))
        if want is None:
            # A cache may be laid out anew: those who read it show what it is worth.
            if v.name not in self.was.kept:
                self.comparison.decide(made, math.inf, 0.0)
            return
        got, want = (comparable(self.chunk.rows(t, v.type)) for t in (got, want))
        if want.is_floating_point():
            self.comparison.compare(made, got, want, lambda: self._wide(made))
            return

        def chances() -> torch.Tensor:
            return self.chunk.rows(expert_chances(n, inputs), v.type)

        _compare_whole(self.comparison, made, got, want, chances)

    def _wide(self, made: Made) -> torch.Tensor:
        """Return the old stage's value without rounding, from what the new one was given."""
        name, given = made.value.name, {v.name for n in made.cone for v in n.inputs}
        out = self.trace.in_float64(self.was, self.was.cone(name, given & self.given), name)
        axis = _narrowed(self.was.types[name], made.value.type)
        if axis is not None:
            return self._last(out, axis)
        return comparable(self.chunk.rows(out, made.value.type))


def _narrowed(old: Type, new: Type) -> int | None:
    """Return the axis along which only the last row is left, or None."""
    if old.dtype != new.dtype or old.rank != new.rank:
        return None
    axes = [i for i, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)) if a != b]
    fits = len(axes) == 1 and (old.shape[axes[0]], new.shape[axes[0]]) == ("S", 1)
    return axes[0] if fits else None


# ---- a backend forced by the interpreter --------------------------------------------------------


def _backend(engine: Engine, stage: Stage, series: Sequence[Series]) -> StageReport:
    """Compare the engine's runtime: after each of its programs the interpreter's values go on."""
    comparison = Comparison(BACKEND, engine.dtype)
    for chunks in series:
        run = Run(stage, max(c.end for c in chunks), engine.device)
        state = None if is_tower(chunks[0].phase) else engine.runtime.new_state(1)
        for chunk in chunks:
            _show(engine, run, state, chunk, comparison)
            if comparison.first:
                return comparison.report()
    return comparison.report()


def _show(engine: Engine, run: Run, state: Any, chunk: Step, comparison: Comparison) -> None:
    """Compare one chunk, and the caches after it; or a tower's soft tokens."""
    trace, recording = run.trace(chunk), run.stage.recordings[chunk.phase]
    feeds = {v.name: trace.values[v.name].clone() for v in recording.graphs[1].inputs}
    shown = Shown(recording, chunk, trace, comparison, set(feeds))
    if state is None:
        (soft,) = recording.graphs[1].outputs
        made = engine.runtime.encode(chunk.phase, feeds)
        shown.compare(soft, made, trace.values[soft.name])
        return
    run_watched(engine.runtime, chunk.phase, feeds, state, chunk.end, shown.watch)
    for name in engine.program.graphs[chunk.phase].next:
        watch_held(state, name, shown.held(name, run.state), shown.cache(run.state))


@dataclass
class Shown:
    """Compares what a runtime shows of one chunk, and puts the interpreter's values there."""

    recording: Recording
    chunk: Step
    trace: Trace
    comparison: Comparison
    names: set[str]

    def watch(self, rank: int, name: str, got: torch.Tensor) -> None:
        """Compare one value of a rank's runtime, in order. Caches come after the chunk."""
        name = self._named(name, rank, self.recording.nodes)
        if name in self.recording.kept:
            return
        want = self.trace.values[name]
        v = next(v for v in self.recording.nodes[name].outputs if v.name == name)
        self.compare(v, got, want)
        got.copy_(want)
        self.names.add(name)

    def held(self, name: str, state: Mapping[str, torch.Tensor]) -> range:
        """Return the positions that a cache holds after the chunk. Nobody reads what a backend
        leaves in others, such as those of padding."""
        slots = len(state[self._named(name, 0, state)])
        return range(max(self.chunk.end - slots, 0), self.chunk.end)

    def cache(self, state: Mapping[str, torch.Tensor]) -> See:
        """Return what compares these positions of a rank's cache with those of `state`."""

        def see(rank: int, name: str, got: torch.Tensor) -> None:
            own = self._named(name, rank, state)
            want = state[own][slots_of(self.held(name, state), state[own])]
            self.compare(self.recording.graphs[1].next[own], got, want)
            got.copy_(want)

        return see

    def _named(self, name: str, rank: int, known: Container[str]) -> str:
        """Return how a value of a rank is called where all are side by side."""
        own = own_name(name, rank)
        return own if own in known else name

    def compare(self, v: Value, got: torch.Tensor, want: torch.Tensor) -> None:
        cone = self.recording.cone(v.name, self.names)
        made = Made(v, self.chunk.phase, self.chunk.at, cone, (), cone[-1:])
        got, want = (comparable(self.chunk.rows(t, v.type)) for t in (got, want))
        if not want.is_floating_point():
            _compare_whole(self.comparison, made, got, want, lambda: self._chances(cone[-1]))
            return

        def wide() -> torch.Tensor:
            out = self.trace.in_float64(self.recording, cone, v.name)
            return comparable(self.chunk.rows(out, v.type))

        self.comparison.compare(made, got, want, wide, lambda: self._close(cone))

    def _close(self, cone: Iterable[Node]) -> torch.Tensor | None:
        """Return bool[B, S]: rows in which a router of the cone, alone or in a fused op, chose by
        next to nothing."""
        rows = [self._near(m) for n in cone for m in inner_nodes(n) if m.op == "router"]
        return functools.reduce(operator.or_, rows) if rows else None

    def _near(self, router: Node) -> torch.Tensor:
        """Return bool[B, S]: the last expert chosen hardly beats the first that is not."""
        k = router.outputs[1].type.shape[-1]
        assert isinstance(k, int)
        best = self._chances(router).sort(-1, descending=True).values
        # Where all are chosen, none is left that could have been.
        last, rest = best[..., k - 1 : k], best[..., k : k + 1]
        return ((last - rest) / last <= CLOSE_EXPERTS[self.comparison.dtype]).any(-1)

    def _chances(self, router: Node) -> torch.Tensor:
        known = {**self.recording.params[1], **self.trace.values}
        chances = expert_chances(router, [known[v.name] for v in router.inputs])
        return self.chunk.rows(chances, router.outputs[1].type)


def _compare_whole(
    comparison: Comparison,
    made: Made,
    got: torch.Tensor,
    want: torch.Tensor,
    chances: Callable[[], torch.Tensor],
) -> None:
    """Compare whole numbers: they are equal, but for experts that are as probable."""
    if made.cone[-1].op == "router" and not got.equal(want):
        comparison.decide_experts(made, got, want, chances())
    else:
        comparison.decide(made, 0.0 if got.equal(want) else math.inf, 0.0)


def expert_chances(n: Node, inputs: Sequence[Any]) -> torch.Tensor:
    """f32[B, S, experts]: a router node's probabilities of all experts."""
    import torch

    x, scale, proj, per_expert = inputs
    reference = n.definition.reference
    assert reference
    count = proj.shape[0]
    ones = torch.ones_like(per_expert)
    weights, index = reference(x, scale, proj, ones, **{**n.attrs, "top_k": count})
    out: torch.Tensor = torch.zeros_like(weights).scatter(-1, index, weights)
    return out
