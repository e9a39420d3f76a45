"""h = residual + rms_norm(x, w); [h = h * scalar]; n_i = rms_norm(h [, w_i])  ->  norm_residual

Crosses the layer boundary: the pre-norm of the next block is made with the residual it norms.
The three norms of one residual in a layer with experts share their rsqrt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from g4ir.ir.graph import Builder, Graph, Node, Value
from g4ir.ir.rewrite import splice_all

from .match import Note, ignore

AFTER = "fuse_norm_rope"  # the norms of Q and K are no norms of a residual


def fuse_norm_residual(g: Graph, note: Note = ignore) -> Graph:
    """Fuse post-norm, residual add, layer scalar and the following pre-norms into one op."""
    producers, users = g.producers(), g.users()
    edits: list[tuple[list[Node], list[Node]]] = []
    for add in g.find("add"):
        match = _match(add, producers, users, note)
        if match:
            edits.append((match.nodes(), match.fused()))
            note(add.out.name, f"fused with {len(match.pre)} pre-norms")
    return splice_all(g, edits)


@dataclass(frozen=True)
class _Match:
    add: Node
    post: Node
    scalar: Node | None
    pre: tuple[Node, ...]

    @property
    def residual(self) -> Value:
        return next(v for v in self.add.inputs if v != self.post.out)

    @property
    def result(self) -> Value:
        return (self.scalar or self.add).out

    def nodes(self) -> list[Node]:
        return [self.post, self.add, *([self.scalar] if self.scalar else []), *self.pre]

    def fused(self) -> list[Node]:
        b = Builder()
        extra = [self.scalar["w"]] if self.scalar else []
        extra += [n["w"] for n in self.pre if len(n.inputs) > 1]
        b.emit_all(
            "norm_residual",
            self.post["x"],
            self.residual,
            self.post["w"],
            *extra,
            eps=self.post.attrs["eps"],
            scaled=self.scalar is not None,
            weighted=tuple(len(n.inputs) > 1 for n in self.pre),
            name=[self.result.name, *(n.out.name for n in self.pre)],
        )
        return b.nodes


def _match(
    add: Node, producers: Mapping[str, Node], users: Mapping[str, list[Node]], note: Note
) -> _Match | None:
    name = add.out.name
    # The second input is the branch; where both are norms, the first stays the residual.
    post = next(
        (p for v in reversed(add.inputs) if (p := producers.get(v.name)) and _is_post(p)), None
    )
    if post is None:
        note(name, "left: adds no weighted norm")
        return None
    if len(users[post.out.name]) > 1 or add["a"] == add["b"]:
        note(name, f"left: {post.out} has another user")
        return None
    after = users.get(name, [])
    scaled = [n.op for n in after] == ["mul"] and after[0]["x"] == add.out
    scalar = after[0] if scaled and after[0]["w"].type.shape == (1,) else None
    result = (scalar or add).out
    pre = tuple(
        n
        for n in users.get(result.name, [])
        if n.op == "rms_norm"
        and n["x"] == result
        and n.attrs == post.attrs
        and not _feeds_add(n, users)
    )
    return _Match(add, post, scalar, pre)


def _is_post(n: Node) -> bool:
    return n.op == "rms_norm" and len(n.inputs) == 2


def _feeds_add(norm: Node, users: Mapping[str, list[Node]]) -> bool:
    """Whether a norm is the post-norm of its own residual add."""
    return [u.op for u in users.get(norm.out.name, [])] == ["add"]
