"""caches of K and V from one projection  ->  one latent cache

K = rope(rms_norm(x, w)), V = rms_norm(x); every attention(K, V) becomes attention_latent

  form "value":  states k, v [C,B,n,d]   ->   state latent [C,B,n,d + 2p]: V, K's rotated dims

for p rotated pairs. "value" does not apply to layers whose dims are all rotated; "off" changes no
layer. Layers in `keep` are not changed, since a draft model reads their K and V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from g4ir.ir.graph import RESULT, Builder, Graph, Node, Value
from g4ir.ir.names import layer_of
from g4ir.ir.rewrite import drop_dead, splice_all
from g4ir.ops.attention import split_chunk
from g4ir.ops.rope import rotated_pairs

from .match import NoMatch, Note, cache_names, ignore, produced_by, producer_of, require_one_of

AFTER = "last_token_only"  # which handles `attention` only, not `attention_latent`
CHANGES_STATE = True
#: form with separate caches of K and V
PLAIN = "off"
FORMS = (PLAIN, "value")


@dataclass(frozen=True)
class LatentOptions:
    """Format of the caches, one of FORMS, and layers that keep K and V."""

    form: str = PLAIN
    keep: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_one_of("latent_kv: form", self.form, FORMS)


OPTIONS = LatentOptions()


def latent_kv(g: Graph, note: Note = ignore, options: LatentOptions = OPTIONS) -> Graph:
    """Merge the caches of K and V in layers that compute both from one projection."""
    edits: list[tuple[list[Node], list[Node]]] = []
    replaced: dict[str, list[Node]] = {}
    written = {n["cache"].name: n for n in g.find("cache_write") if n.out in g.next.values()}
    for (k, v), readers in _readers(g).items():
        try:
            if layer_of(k) in options.keep:
                raise NoMatch("a draft model reads its K and V as separate caches")
            match = _match(g, written, k, v)
            _check_readers(g, match, readers)
            if options.form == PLAIN:
                raise NoMatch("the form `off` keeps K and V")
            if 2 * match.rotated == match.table.attrs["dim"]:
                raise NoMatch("every dim of K is rotated: a latent row would be as long as K and V")
        except NoMatch as reason:
            note(k, f"left: {reason}")
            continue
        row, write = match.write()
        edits.append(([match.write_k, match.write_v], [row, write]))
        edits += [([n], [match.read(n, write)]) for n in readers]
        replaced |= {k: [write], v: []}
        note(k, f"cached together with %{v} as {write['cache']}")
    if not edits:
        return g
    caches = {name: [w["cache"] for w in writes] for name, writes in replaced.items()}
    state = chain(*(caches.get(v.name, [v]) for v in g.state))
    later = {name: v for name, v in g.next.items() if name not in replaced}
    later |= {w["cache"].name: w.out for writes in replaced.values() for w in writes}
    return drop_dead(replace(splice_all(g, edits), state=tuple(state), next=later))


def _readers(g: Graph) -> dict[tuple[str, str], list[Node]]:
    """Return (name of the cache of K, of V) -> the attentions that read both, in order of the
    graph."""
    names = cache_names(g)
    readers: dict[tuple[str, str], list[Node]] = {}
    for n in g.find("attention"):
        k, v = (names.get(cache.name) for cache in n.caches)
        if k and v:
            readers.setdefault((k, v), []).append(n)
    return readers


@dataclass(frozen=True)
class _Match:
    """The writes of a cache of K and one of V that come from one projection, and the norm and RoPE
    table of K."""

    write_k: Node
    write_v: Node
    norm: Node  # of K: rms_norm, or norm_rope if RoPE is fused with it
    table: Node

    @property
    def rotated(self) -> int:
        """Number of pairs of K's dims that RoPE rotates."""
        t = self.table
        return rotated_pairs(t.word("kind"), t.integer("dim"), t.number("fraction"))

    def write(self) -> list[Node]:
        """Return the nodes that compute the chunk's latent rows and write them to the cache."""
        b, k = Builder(), self.write_k["cache"]
        scope = k.name[: k.name.rfind(".") + 1]
        kv = self.write_v["new"], self.write_k["new"]
        row = b.emit("latent_row", *kv, pairs=self.rotated, name=f"{scope}latent.new")
        batch, _, *dims = row.type.shape
        state = Value(f"{scope}latent", row.type.with_shape(k.type.shape[0], batch, *dims))
        b.emit("cache_write", state, row, *self.write_k.inputs[2:], name=f"{state.name}.next")
        return b.nodes

    def read(self, n: Node, write: Node) -> Node:
        """Return the node that replaces the attention `n`. It reads the cache before or after the
        write, as `n` does."""
        after = n.caches[0] == self.write_k.out
        fresh, block_ids = split_chunk(n.chunk, 2)
        operands = [write.out if after else write["cache"], *[write["new"]] * bool(fresh)]
        operands += [] if block_ids is None else [block_ids]
        inputs = (*n.inputs[:3], self.norm["w"], *operands)
        return Node("attention_latent", inputs, n.outputs, {**n.attrs, "pairs": self.rotated})


def _match(g: Graph, writes: dict[str, Node], k: str, v: str) -> _Match:
    for state in (k, v):
        if state not in writes:
            raise NoMatch(f"%{state} is not written here")
    write_k, write_v = writes[k], writes[v]
    apart = "K and V are not norms of one projection"
    value = produced_by(g, write_v["new"], "rms_norm", apart)
    key = producer_of(g, write_k["new"], "norm_rope", "rope")
    norm = producer_of(g, key["x"], "rms_norm") if key and key.op == "rope" else key
    if not key or not norm or len(norm.inputs) < 2 or value.inputs != (norm["x"],):
        raise NoMatch(apart)
    if norm["w"].type.dtype != norm.out.type.dtype:
        raise NoMatch("the weight of K's norm has another dtype than the cache")
    if value.attrs["eps"] != norm.attrs["eps"]:
        raise NoMatch("the norms of K and V differ in eps")
    table = producer_of(g, key["cos"], "rope_table")
    if not table or table.outputs != (key["cos"], key["sin"]):
        raise NoMatch("the RoPE tables of K are not computed in this graph")
    start = producer_of(g, write_k["start"], "row_start")
    if not start or start.inputs != table.inputs or write_k.inputs[2:] != write_v.inputs[2:]:
        raise NoMatch("K and V are not both written to the KV cache at RoPE's positions")
    return _Match(write_k, write_v, norm, table)


def _check_readers(g: Graph, m: _Match, readers: list[Node]) -> None:
    """Raise NoMatch unless the two caches are read together, and only by these attentions."""
    writes = (m.write_k, m.write_v)
    expected = [*writes, *readers, RESULT]
    for w in writes:
        unexpected = [n for v in (w["cache"], w.out) for n in g.readers(v) if n not in expected]
        if unexpected or w["cache"] in g.results() or w.out in g.outputs:
            raise NoMatch(f"{w['cache']} has another reader, or is an output")
    for n in readers:
        after = {v == w.out for w, v in zip(writes, n.caches, strict=True)}
        chunk, _ = split_chunk(n.chunk, 2)
        if len(after) > 1 or chunk not in ((), tuple(w["new"] for w in writes)):
            raise NoMatch(f"{n.out} reads only one of K and V after its write, or another chunk")
        if chunk and n.inputs[1:2] != m.table.inputs:
            raise NoMatch(f"{n.out} has queries at other positions than RoPE's")
