"""A cache of K and a cache of V that come from one projection  ->  one cache that says both

K = rope(rms_norm(raw, w)), V = rms_norm(raw); every attention(K, V) becomes attention_latent

  form "value":  states k, v [C,B,n,d]   ->   state latent [C,B,n,d + 2p]: V, K's rotated dims
  form "raw":    states k, v [C,B,n,d]   ->   states raw [C,B,n,d], rms f32[C,B,n,1]

for p rotated pairs. "value" leaves a layer whose dims are all rotated, "off" leaves every layer.
Those in `keep` stay as they are, since a drafter reads them too.
K and V die where nothing else reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from g4ir.ir.graph import RESULT, Builder, Graph, Node, Value
from g4ir.ir.names import layer_of
from g4ir.ir.rewrite import drop_dead, splice_all
from g4ir.ops.attention import split_chunk
from g4ir.ops.latent import PARTS
from g4ir.ops.rope import rotated_pairs

from .match import Left, Note, ignore, require_one_of

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
        require_one_of("latent_kv: form", self.form, FORMS)


OPTIONS = LatentOptions()


def latent_kv(g: Graph, note: Note = ignore, options: LatentOptions = OPTIONS) -> Graph:
    """Make one cache for each layer where K = V."""
    edits: list[tuple[list[Node], list[Node]]] = []
    written: dict[str, list[Node]] = {}
    for (k, v), readers in _pairs(g).items():
        try:
            if layer_of(k) in options.keep:
                raise Left("a drafter reads it as K and V")
            found = _match(g, k, v, readers)
            _check_form(found, options.form)
        except Left as reason:
            note(k, f"left: {reason}")
            continue
        new = found.writes(options.form)
        writes = [n for n in new if n.op == "cache_write"]
        edits.append(([found.write_k, found.write_v], new))
        edits += [([n], [found.read(n, options.form, writes)]) for n in readers]
        written |= {k: writes, v: []}
        note(k, f"kept with %{v} as {' and '.join(str(w['cache']) for w in writes)}")
    return _with_states(splice_all(g, edits), written) if edits else g


@dataclass(frozen=True)
class _Match:
    """Two states whose tensors come from one projection, and the parts that K is made of."""

    write_k: Node
    write_v: Node
    norm: Node  # of K, fused with its rotation or not
    table: Node

    @property
    def rotated(self) -> int:
        """Rotated pairs of dims."""
        t = self.table
        return rotated_pairs(t.word("kind"), t.whole("dim"), t.number("fraction"))

    def writes(self, form: str) -> list[Node]:
        """Return the nodes that make the chunk's rows and write them."""
        b, k = Builder(), self.write_k["cache"]
        scope = k.name[: k.name.rfind(".") + 1]
        if form == "value":
            kv = self.write_v["new"], self.write_k["new"]
            rows = [b.emit("latent_row", *kv, pairs=self.rotated, name=f"{scope}latent.new")]
        else:
            raw, eps = self.norm["x"], self.norm.attrs["eps"]
            rows = [raw, b.emit("inverse_rms", raw, eps=eps, name=f"{scope}rms.new")]
        for part, row in zip(PARTS[form], rows, strict=True):
            batch, _, *rest = row.type.shape
            state = Value(f"{scope}{part}", row.type.with_shape(k.type.shape[0], batch, *rest))
            b.emit("cache_write", state, row, *self.write_k.inputs[2:], name=f"{state.name}.next")
        return b.nodes

    def read(self, n: Node, form: str, writes: list[Node]) -> Node:
        """Return a reader over the new caches, before or after their write as before."""
        rotation = {k: v for k, v in self.table.attrs.items() if k != "dim"}
        after = n.caches[0] == self.write_k.out
        fresh, block_ids = split_chunk(n.chunk, 2)
        held = [w.out if after else w["cache"] for w in writes]
        held += [w["new"] for w in writes] if fresh else []
        held += [] if block_ids is None else [block_ids]
        inputs = (*n.inputs[:3], self.norm["w"], *held)
        return Node("attention_latent", inputs, n.outputs, {"form": form, **n.attrs, **rotation})


def _pairs(g: Graph) -> dict[tuple[str, str], list[Node]]:
    """Return the states that attentions read together, in order of their first reader."""
    origin = {v.name: v.name for v in g.state} | {v.name: name for name, v in g.next.items()}
    found: dict[tuple[str, str], list[Node]] = {}
    for n in g.find("attention"):
        k, v = (origin.get(x.name) for x in n.caches)
        if k is not None and v is not None:
            found.setdefault((k, v), []).append(n)
    return found


def _match(g: Graph, k: str, v: str, readers: list[Node]) -> _Match:
    made = g.producers()
    write_k, write_v = (_write(g, state) for state in (k, v))
    norm, tables = _key(g, write_k["new"])
    value = made.get(write_v["new"].name)
    if not norm or not value or value.op != "rms_norm" or value.inputs != (norm["x"],):
        raise Left("K and V do not come from one projection")
    if value.attrs["eps"] != norm.attrs["eps"]:
        raise Left("the norms of K and V differ in eps")
    table = made.get(tables[0].name)
    if table is None or table.op != "rope_table" or table.outputs != tables:
        raise Left("K is rotated by a table that is not made here")
    start = made.get(write_k["start"].name)
    starts = start is not None and start.op == "row_start" and start.inputs == table.inputs
    if not starts or write_k.inputs[2:] != write_v.inputs[2:]:
        raise Left("K and V are not written at the positions of the rotation")
    match = _Match(write_k, write_v, norm, table)
    _check_readers(g, match, readers)
    return match


def _write(g: Graph, state: str) -> Node:
    write = g.producers().get(g.next[state].name) if state in g.next else None
    if write is None or write.op != "cache_write" or write["cache"].name != state:
        raise Left(f"%{state} is not written here")
    return write


def _key(g: Graph, k: Value) -> tuple[Node | None, tuple[Value, ...]]:
    """Return the norm and the tables of K = rope(rms_norm(raw, weight), cos, sin), fused or not."""
    n = g.producers().get(k.name)
    if n is not None and n.op == "norm_rope":
        return n, n.inputs[2:]
    norm = g.producers().get(n["x"].name) if n is not None and n.op == "rope" else None
    if n is None or norm is None or norm.op != "rms_norm" or len(norm.inputs) != 2:
        return None, ()
    return norm, n.inputs[1:]


def _check_readers(g: Graph, m: _Match, readers: list[Node]) -> None:
    """Check that the two caches are read together, and by these attentions alone."""
    users, writes = g.users(), (m.write_k, m.write_v)
    known = [*writes, *readers, RESULT]
    for w in writes:
        others = [n for v in (w["cache"], w.out) for n in users.get(v.name, []) if n not in known]
        if others or w["cache"] in g.results() or w.out in g.outputs:
            raise Left(f"{w['cache']} has another reader")
    fresh = tuple(w["new"] for w in writes)
    for n in readers:
        together = [(w["cache"], w.out).index(v) for w, v in zip(writes, n.caches)]
        chunk, _ = split_chunk(n.chunk, 2)
        if len(set(together)) > 1 or chunk not in ((), fresh):
            raise Left(f"{n.out} reads K and V of different moments")
        if chunk and n.inputs[1:2] != m.table.inputs:
            raise Left(f"{n.out} is at other positions than the rotation")


def _check_form(m: _Match, form: str) -> None:
    if form == PLAIN:
        raise Left("the form `off` keeps K and V")
    if form == "value" and 2 * m.rotated == m.table.attrs["dim"]:
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
