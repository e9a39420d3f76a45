"""Predicts the time of a decode step on a GPU from bytes and launches.

Each kernel of a step needs the one before. So it costs its bytes, and latencies that no bytes hide:
the gap before it starts, its first load, its last reduction. Within the layers a kernel starts
before the one in front has ended and prefetches its first weights while that one reduces; so does
one after an attention, which leaves memory idle most of its time. All constants are in
step_model.yaml, each as an optimistic and a pessimistic number, and so is the prediction. Needs no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from math import isqrt
from pathlib import Path
from typing import Annotated

import yaml

from g4ir.backends.cuda.kernels.base import (
    SHARE_KEYS,
    SHARES,
    ZEROS,
    Choice,
    Schedule,
    added_together,
)
from g4ir.backends.cuda.schedule import OTHER
from g4ir.errors import InputError
from g4ir.ir.graph import Node
from g4ir.ir.names import layer_of
from g4ir.ops.base import nothing
from g4ir.ops.collective import COLLECTIVES
from g4ir.spec.reader import Count, Length, build, read_tree

TABLE = Path(__file__).with_suffix(".yaml")
#: what is counted as one row of the table beside kernels of ours
AROUND, LIBRARY = "around the graph", "library"
#: partial results above this many are added in groups
FAN = 32

#: an optimistic and a pessimistic number
Pair = tuple[float, float]
InFile = Annotated[tuple[float, float], Length(2, 2)]


@dataclass(frozen=True)
class Card:
    """A GPU: bytes a microsecond of a copy, multiprocessors, and their cycles a microsecond."""

    copy: float
    processors: Count
    cycles: float


@dataclass(frozen=True)
class Part:
    """A kernel's part of its node's bytes, microseconds beside them, those that are added where it
    does not begin early, its share of the rate, and the share of its bytes that it asks for before
    it waits, where its shape does not tell."""

    part: float = 1.0
    extra: float = 0.0
    late: float = 0.0
    share: float = 1.0
    asks: float = 0.0


@dataclass(frozen=True)
class Attending:
    """Cycles of a block of keys, bytes a microsecond of a multiprocessor, microseconds of a partial
    result and of adding them up by counters, and of adding some that were handed on in words."""

    chain: float
    softmax: float
    rate: float
    partial: float
    merge: float
    added: float


@dataclass(frozen=True)
class Reached:
    """The share of the copy rate that the library reaches where it reads so many bytes."""

    nbytes: int
    share: float


@dataclass(frozen=True)
class Message:
    """Microseconds that ranks take to exchange so many bytes of each."""

    ranks: Count
    nbytes: Count
    us: float


@dataclass(frozen=True)
class Early:
    """Gap and first load of kernels that begin early, and how many blocks of a product lie on a
    multiprocessor."""

    gap: InFile
    first_load: InFile
    blocks: Count


@dataclass(frozen=True)
class Constants:
    """The file."""

    gpus: dict[str, Card]
    gap: InFile
    first_load: InFile
    last_sum: InFile
    early: Early
    handed_on: InFile
    stream: InFile
    block_rate: InFile
    around: Count
    pointwise: InFile
    library: dict[str, Count]
    library_time: InFile
    library_rate: tuple[Reached, ...]
    attention: Attending
    kernels: dict[str, Part]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Launch:
    """A kernel of a step: microseconds from the end of the one before to its own."""

    kernel: str
    node: str
    nbytes: int
    us: Pair


@dataclass(frozen=True)
class Prediction:
    """A step's kernels in order, and bytes a microsecond of the roofline that it is held to."""

    launches: tuple[Launch, ...]
    nbytes: int
    rate: float
    gpu: str

    @property
    def us(self) -> Pair:
        """Microseconds of the step."""
        return _sum(*(x.us for x in self.launches))

    @property
    def roof_us(self) -> float:
        """Microseconds of reading weights and caches once at the rate of a copy."""
        return self.nbytes / self.rate

    @property
    def share(self) -> Pair:
        """Share of the roofline that is reached, the pessimistic number first."""
        fast, slow = self.us
        return self.roof_us / slow, self.roof_us / fast


def measured_text(gpu: str, copy: float, kernel: Pair, early: Pair, path: Path = TABLE) -> str:
    """Return the constants of a file with what was measured on a GPU in their place: bytes a
    microsecond of a copy, and the best and typical microseconds of a kernel of nearly no work in a
    chain of dependent ones, and in one where each begins early."""
    read_constants(path)
    values = yaml.safe_load(path.read_text())
    values["gpus"][gpu]["copy"] = round(copy)
    own = sum(values["pointwise"]) / 2
    values["gap"] = [round(max(0.0, us - own), 3) for us in kernel]
    # What such a kernel loads first comes sooner, too.
    own -= (sum(values["first_load"]) - sum(values["early"]["first_load"])) / 2
    values["early"]["gap"] = [round(max(0.0, us - own), 3) for us in early]
    head = f"# Copy rate and gaps as measured on {gpu}; the rest as in {path.name} of g4ir.\n"
    return head + yaml.safe_dump(values, sort_keys=False)


@cache
def read_constants(path: Path = TABLE) -> Constants:
    """Return the constants of a file; SpecError with the line of what is wrong."""
    made: Constants = build(Constants, read_tree(path))
    return made


def predict(
    s: Schedule,
    moved: Mapping[str, int],
    context: int,
    path: Path = TABLE,
    early: bool = True,
) -> Prediction:
    """Return the predicted step by the constants of a file; `moved`: bytes of weights and caches by
    a node's first result; `early`: whether kernels of layers begin before those in front have
    ended. InputError for a GPU or a number of ranks without constants."""
    c = read_constants(path)
    if s.target.gpu not in c.gpus:
        known = ", ".join(c.gpus)
        raise InputError(f"{path}: nothing on {s.target.gpu or 'this device'}, only on {known}")
    card = c.gpus[s.target.gpu]
    model = _Model(c, card, s, moved, context, path)
    works = [*model.works()]
    launches = tuple(
        Launch(w.kernel, w.node, w.nbytes, model.us(w, front if early else None))
        for front, w in zip([None, *works], works)
    )
    return Prediction(launches, sum(moved.values()), card.copy, s.target.gpu)


def message_us(c: Constants, n: Node, dims: Mapping[str, int], path: Path = TABLE) -> float:
    """Return the microseconds of a message with these sizes of named dims: those of the file, with
    straight lines in between. InputError where it says nothing of so many ranks."""
    size, ranks = sum(v.type.bind(dims).nbytes() for v in n.inputs), n.whole("ranks")
    found = min((m.ranks for m in c.messages if m.ranks >= ranks), default=None)
    if found is None:
        raise InputError(f"{path}: nothing on messages among {ranks} ranks")
    return _between(sorted((m.nbytes, m.us) for m in c.messages if m.ranks == found), size)


@dataclass(frozen=True)
class _Work:
    """A kernel by what its time is made of: `own` microseconds, which of one of ours are beside
    gap, first load, last sum and the reading of its bytes at a rate (0: it is in `own`). It asks
    for `ahead` bytes before it waits for the kernel in front; while it leaves memory `idle`, the
    next one may ask for its own."""

    kernel: str
    node: str
    nbytes: int
    own: Pair
    ours: bool = False
    rate: float = 0.0
    ahead: float = 0.0
    rests: bool = False  # makes its row while its first tiles arrive, begun early or not
    late: float = 0.0  # microseconds more where it does not begin early
    idle: Pair = (0.0, 0.0)

    @property
    def chained(self) -> bool:
        return self.ours and layer_of(self.node) is not None


@dataclass(frozen=True)
class _Model:
    c: Constants
    card: Card
    s: Schedule
    moved: Mapping[str, int]
    context: int
    path: Path

    def us(self, w: _Work, front: _Work | None) -> Pair:
        if not w.ours:
            return w.own
        early = front if front is not None and front.chained and w.chained else None
        start = (self.c.early.gap, self.c.early.first_load)
        if not early:
            start = (self.c.gap, self.c.first_load)
        late = 0.0 if early else w.late

        def body(i: int) -> float:
            window = w.own[i] * w.rests
            if early:
                window = w.own[i] + self.c.last_sum[i] + early.idle[i] + start[0][i] + start[1][i]
            rate = w.rate * self.c.stream[i]
            there = min(w.ahead, window * rate) if rate else 0.0
            return w.own[i] + late + ((w.nbytes - there) / rate if rate else 0.0)

        return _sum(*start, self.c.last_sum, (body(0), body(1)))

    def works(self) -> Iterator[_Work]:
        yield from [_Work(AROUND, "", 0, self._times(self.c.pointwise))] * self.c.around
        known = (*self.c.library, *COLLECTIVES)
        nodes = [
            n for n in self.s.graph.nodes if self.s.find(n) or n.definition.traffic is not nothing
        ]
        for other, found in groupby(nodes, lambda n: not self.s.find(n) and n.op not in known):
            if other:  # the compiler makes one kernel of neighbours
                names = [n.outputs[0].name for n in found]
                nbytes = sum(self.moved.get(name, 0) for name in names)
                yield _Work(OTHER, names[0], nbytes, self._times(self.c.pointwise, nbytes))
            else:
                for n in found:
                    yield from self._node(n)

    def _node(self, n: Node) -> Iterator[_Work]:
        name, choice = n.outputs[0].name, self.s.find(n)
        nbytes = self.moved.get(name, 0)
        if n.op in COLLECTIVES:
            us = message_us(self.c, n, {"B": self.s.target.rows}, self.path)
            yield _Work(n.op, name, 0, (us, us))
        elif choice is None:
            yield from self._library(n.op, name, nbytes)
        else:
            for kernel, starts in choice.kernel.starts.items():
                part = self.c.kernels.get(kernel, Part())
                yield self._kernel(n, choice, kernel, part, int(nbytes * part.part))
                for _ in range(starts - 1):
                    yield self._kernel(n, choice, kernel, part, 0)

    def _library(self, op: str, name: str, nbytes: int) -> Iterator[_Work]:
        share = max(r.share for r in self.c.library_rate if nbytes >= r.nbytes)
        for own in (nbytes, *[0] * (self.c.library[op] - 1)):
            yield _Work(LIBRARY, name, own, self._times(self.c.library_time, own, share))

    def _kernel(self, n: Node, choice: Choice, kernel: str, part: Part, nbytes: int) -> _Work:
        name, use, shape = n.outputs[0].name, choice.uses[kernel], choice.shape
        own = (part.extra, part.extra)
        if "splits" in use:
            own = _sum(own, self._attention(shape, use, nbytes))
            read = self._read(nbytes)
            idle = own[0] - read[0], own[1] - read[1]
            own = _sum(own, self._zeros(n, use))
            return _Work(kernel, name, nbytes, own, True, idle=idle, late=part.late)
        rate, ahead = self.card.copy * part.share, nbytes * part.asks
        rests = "programs" in use and "n" in shape
        if "n" in shape and "block_n" in use:
            tiles = -(-shape["n"] // use["block_n"]) * use.get("split", 1)
            blocks = min(tiles, use.get("programs", tiles))
            rate = min(rate, blocks * self.c.block_rate[use.get("block_m", 1) > 1])
            ahead = nbytes * self._asked(shape, use, tiles, blocks)
        return _Work(kernel, name, nbytes, own, True, rate, ahead, rests, part.late)

    def _zeros(self, n: Node, use: Mapping[str, int]) -> Pair:
        if "merges" not in use:
            return 0.0, 0.0
        return self._read(8 * self.s.target.rows * ZEROS[n.op](n, use))

    def _asked(
        self, shape: Mapping[str, int], use: Mapping[str, int], tiles: int, blocks: int
    ) -> float:
        if "programs" in use:
            return min(1.0, blocks * (use["stages"] - 1) / tiles)
        there = min(blocks, self.c.early.blocks * self.card.processors) / blocks
        chunk = -(-shape["k"] // use.get("split", 1))
        return there * min(1.0, use["stages"] * use["block_k"] / chunk)

    def _attention(self, shape: Mapping[str, int], use: Mapping[str, int], nbytes: int) -> Pair:
        """Return the times of attention over a cache: blocks of keys one after the other, by cycles
        or by bytes, and the sum of what the shares have made."""
        a, block = self.c.attention, use["block_n"]
        keys = min(self.context, shape["window"] or self.context)
        splits = use["splits"]
        if splits > SHARES and keys < splits * SHARE_KEYS:
            splits = SHARES
        each = max(-(-keys // splits), block)
        shares = -(-keys // each)
        programs = shares * shape["programs"]
        live, rounds = min(programs, self.card.processors), -(-programs // self.card.processors)
        size = nbytes / max(1, keys * shape["programs"]) * block
        chains = 2 if "merges" in use else 1
        cycles = (shape["d"] / 16 / chains * a.chain + a.softmax) / self.card.cycles

        def body(i: int) -> float:
            read = max(size * live / (self.card.copy * self.c.stream[i]), size / a.rate)
            return rounds * -(-each // block) * max(cycles, read)

        return _sum((body(0), body(1)), self._merged(shape, use, shares))

    def _merged(self, shape: Mapping[str, int], use: Mapping[str, int], shares: int) -> Pair:
        a = self.c.attention
        if shares == 1:
            return 0.0, 0.0
        if "merges" in use:
            _, together = added_together(use, shape["group"], shape["d"])
            us = -(-shares // together) * a.added
            return _sum(self.c.handed_on, (us, us))
        fan = shares if shares <= FAN else isqrt(shares - 1) + 1
        us = a.merge + fan * a.partial
        us += a.merge + -(-shares // fan) * a.partial if fan < shares else 0.0
        return us, us

    def _times(self, own: Pair, nbytes: int = 0, share: float = 1.0) -> Pair:
        return _sum(self.c.gap, own, self._read(nbytes, share))

    def _read(self, nbytes: float, share: float = 1.0) -> Pair:
        """Return the times of reading at a share of the copy rate."""
        fast, slow = (nbytes / (self.card.copy * share * x) for x in self.c.stream)
        return fast, slow


def _sum(*pairs: Pair) -> Pair:
    return sum(p[0] for p in pairs), sum(p[1] for p in pairs)


def _between(points: list[tuple[int, float]], x: float) -> float:
    """Return y at x by ascending points (x, y): as at the first before it, and in proportion behind
    the last."""
    (first, y), (last, most) = points[0], points[-1]
    if x <= first:
        return y
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return most * x / last
