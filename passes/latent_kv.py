"""A cache of K and a cache of V that come from one projection  ->  one cache that says both

K = rope(rms_norm(raw, w)), V = rms_norm(raw); every attention(K, V) becomes attention_latent

  form "value":  states k, v [C,B,n,d]   ->   state latent [C,B,n,d + 2p]: V, K's rotated dims
  form "raw":    states k, v [C,B,n,d]   ->   states raw [C,B,n,d], rms f32[C,B,n,1]

for p rotated pairs. "value" leaves a layer whose dims are all rotated, "off" leaves every layer.
Those in `keep` stay as they are, since a drafter reads them too.
K and V die where nothing else reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from g4ir.errors import InputError
from g4ir.ir.graph import RESULT, Attr, Builder, Graph, Node, Value
from g4ir.ir.names import layer_of
from g4ir.ir.rewrite import drop_dead, splice_all
from g4ir.ops.attention import split_chunk
from g4ir.ops.latent import PARTS
from g4ir.ops.rope import rotated_pairs

from .match import Left, Note, ignore

AFTER = "last_token_only"  # its readers are those that are left
CHANGES_STATE = True

#: the form in which K and V are cached
PLAIN = "off"
FORMS = (PLAIN, *PARTS)


@dataclass(frozen=True)
class LatentOptions:
    """The form of the caches, one of FORMS, and layers that keep K and V."""

    form: str = PLAIN
    keep: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InputError(f"latent_kv: form {self.form!r}: expected one of {', '.join(FORMS)}")


OPTIONS = LatentOptions()


def latent_kv(g: Graph, note: Note = ignore, options: LatentOptions = OPTIONS) -> Graph:
    """Make one cache for each layer where K = V."""
    form = options.form
    edits: list[tuple[list[Node], list[Node]]] = []
    written: dict[str, list[Node]] = {}
    for pair in _pairs(g):
        try:
            if layer_of(pair.k) in options.keep:
                raise Left("a drafter reads it as K and V")
            found = _match(g, pair)
            _check_form(found, form)
        except Left as reason:
            note(pair.k, f"left: {reason}")
            continue
        new = found.writes(form)
        writes = [n for n in new if n.op == "cache_write"]
        edits.append(([found.write_k, found.write_v], new))
        edits += [([n], [found.read(n, form, writes)]) for n in pair.readers]
        written |= {pair.k: writes, pair.v: []}
        note(pair.k, f"kept with %{pair.v} as {' and '.join(str(w['cache']) for w in writes)}")
    return _with_states(splice_all(g, edits), written) if edits else g


@dataclass(frozen=True)
class _Pair:
    """Names of two states that attentions read as K and V."""

    k: str
    v: str
    readers: tuple[Node, ...]


@dataclass(frozen=True)
class _Key:
    """The parts that K is made of."""

    raw: Value
    weight: Value
    eps: Attr
    tables: tuple[Value, ...]


@dataclass(frozen=True)
class _Match:
    """A pair whose tensors come from one projection."""

    pair: _Pair
    write_k: Node
    write_v: Node
    key: _Key
    table: Node

    @property
    def dim(self) -> int:
        dim = self.table.attrs["dim"]
        assert isinstance(dim, int)
        return dim

    @property
    def rotated(self) -> int:
        """Rotated pairs of dims."""
        kind, fraction = self.table.attrs["kind"], self.table.attrs["fraction"]
        assert isinstance(kind, str) and isinstance(fraction, int | float)
        return rotated_pairs(kind, self.dim, fraction)

    def writes(self, form: str) -> list[Node]:
        """Return the nodes that make the chunk's rows and write them."""
        b, scope = Builder(), self.pair.k[: self.pair.k.rfind(".") + 1]
        if form == "value":
            v, k = self.write_v["new"], self.write_k["new"]
            rows = [b.emit("latent_row", v, k, pairs=self.rotated, name=f"{scope}latent.new")]
        else:
            raw, eps = self.key.raw, self.key.eps
            rows = [raw, b.emit("inverse_rms", raw, eps=eps, name=f"{scope}rms.new")]
        slots = self.write_k["cache"].type.shape[0]
        for part, row in zip(PARTS[form], rows, strict=True):
            batch, _, *rest = row.type.shape
            state = Value(f"{scope}{part}", row.type.with_shape(slots, batch, *rest))
            b.emit("cache_write", state, row, *self.write_k.inputs[2:], name=f"{state.name}.next")
        return b.nodes

    def read(self, n: Node, form: str, writes: list[Node]) -> Node:
        """Return a reader over the new caches, before or after their write as before."""
        b, rotation = Builder(), {k: v for k, v in self.table.attrs.items() if k != "dim"}
        after = n.caches[0] == self.write_k.out
        fresh, block_ids = split_chunk(n.chunk, 2)
        held = [w.out if after else w["cache"] for w in writes]
        held += [w["new"] for w in writes] if fresh else []
        held += [] if block_ids is None else [block_ids]
        b.emit(
            "attention_latent",
            *n.inputs[:3],
            self.key.weight,
            *held,
            form=form,
            **n.attrs,
            **rotation,
            name=n.out.name,
        )
        return b.nodes[0]


def _pairs(g: Graph) -> list[_Pair]:
    """Return the states that attentions read together, in order of their first reader."""
    origin = {v.name: v.name for v in g.state} | {v.name: name for name, v in g.next.items()}
    found: dict[tuple[str, str], list[Node]] = {}
    for n in g.find("attention"):
        k, v = (origin.get(x.name) for x in n.caches)
        if k is not None and v is not None:
            found.setdefault((k, v), []).append(n)
    return [_Pair(k, v, tuple(readers)) for (k, v), readers in found.items()]


def _match(g: Graph, pair: _Pair) -> _Match:
    made = g.producers()
    write_k, write_v = (_write(g, state, made) for state in (pair.k, pair.v))
    key, v = _key(write_k["new"], made), made.get(write_v["new"].name)
    if key is None or v is None or v.op != "rms_norm" or v.inputs != (key.raw,):
        raise Left("K and V do not come from one projection")
    if v.attrs["eps"] != key.eps:
        raise Left("the norms of K and V differ in eps")
    table = made.get(key.tables[0].name)
    if table is None or table.op != "rope_table" or table.outputs != key.tables:
        raise Left("K is rotated by a table that is not made here")
    start = made.get(write_k["start"].name)
    starts = start is not None and start.op == "row_start" and start.inputs == table.inputs
    if not starts or write_k.inputs[2:] != write_v.inputs[2:]:
        raise Left("K and V are not written at the positions of the rotation")
    match = _Match(pair, write_k, write_v, key, table)
    _check_readers(g, match)
    return match


def _write(g: Graph, state: str, made: Mapping[str, Node]) -> Node:
    write = made.get(g.next[state].name) if state in g.next else None
    if write is None or write.op != "cache_write" or write["cache"].name != state:
        raise Left(f"%{state} is not written here")
    return write


def _key(k: Value, made: Mapping[str, Node]) -> _Key | None:
    """Return the parts of K = rope(rms_norm(raw, weight), cos, sin), fused or not."""
    n = made.get(k.name)
    if n is not None and n.op == "norm_rope":
        return _Key(n["x"], n["w"], n.attrs["eps"], n.inputs[2:])
    norm = made.get(n["x"].name) if n is not None and n.op == "rope" else None
    if n is None or norm is None or norm.op != "rms_norm" or len(norm.inputs) != 2:
        return None
    return _Key(norm["x"], norm["w"], norm.attrs["eps"], n.inputs[1:])


def _check_readers(g: Graph, m: _Match) -> None:
    """Check that the two caches are read together, and by these attentions alone."""
    users, writes = g.users(), (m.write_k, m.write_v)
    known = [*writes, *m.pair.readers, RESULT]
    for w in writes:
        others = [n for v in (w["cache"], w.out) for n in users.get(v.name, []) if n not in known]
        if others or w["cache"] in g.results() or w.out in g.outputs:
            raise Left(f"{w['cache']} has another reader")
    fresh = tuple(w["new"] for w in writes)
    for n in m.pair.readers:
        together = [(w["cache"], w.out).index(v) for w, v in zip(writes, n.caches)]
        chunk, _ = split_chunk(n.chunk, 2)
        if len(set(together)) > 1 or chunk not in ((), fresh):
            raise Left(f"{n.out} reads K and V of different moments")
        if chunk and n.inputs[1:2] != m.table.inputs:
            raise Left(f"{n.out} is at other positions than the rotation")


def _check_form(m: _Match, form: str) -> None:
    if form == PLAIN:
        raise Left("the form `off` keeps K and V")
    if form == "value" and 2 * m.rotated == m.dim:
        raise Left("every dim of K is rotated, so that V says nothing of them")


def _with_states(g: Graph, written: dict[str, list[Node]]) -> Graph:
    """Put the new states in the place of the old ones."""
    state: list[Value] = []
    after: dict[str, Value] = {}
    for v in g.state:
        state += [w["cache"] for w in written[v.name]] if v.name in written else [v]
    for name, v in g.next.items():
        after |= {w["cache"].name: w.out for w in written[name]} if name in written else {name: v}
    return drop_dead(replace(g, state=tuple(state), next=after))
