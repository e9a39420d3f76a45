"""The steps from a projection to attention: per-head norms, rotation, the write into the caches."""

from __future__ import annotations

from typing import Any

from g4ir.backends.inductor.lowered import Run
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import RESULT, Graph, Node

from .base import (
    Choice,
    Kernel,
    Sample,
    Shape,
    arrivals,
    is_row,
    kv_heads,
    size,
)


def _write_shape(g: Graph, n: Node, target: Target) -> Shape | None:
    """Return the shape; None where rows are quantised."""
    q, cache = (v.type for v in n.outputs[:2])
    return {"d": size(q, -1)} if cache.dtype == q.dtype else None


def _query_shape(g: Graph, n: Node, target: Target) -> Shape | None:
    """Return the shape of Q in a layer that reads another layer's cache."""
    x = n["x"].type
    return {"d": size(x, -1)} if is_row(x) and _reader(g, n) else None


def _reader(g: Graph, n: Node) -> Node | None:
    """Return the attention over a cache alone that reads a node's result as its queries."""
    users = g.users.get(n.out.name, [])
    found = [u for u in users if u != RESULT and u.definition.held and u.inputs[0] == n.out]
    return found[0] if len(found) == 1 and not found[0].chunk else None


def _qkv_write(run: Run, n: Node, choice: Choice, *given: Any) -> tuple[Any, ...]:
    """Return the queries and the caches, which follow seven other inputs, written in place."""
    from .qkv_triton import qkv_write

    held = given[7:]
    q, zeros = qkv_write(*given[:7], list(held), **n.attrs, **choice.use)
    run.env[arrivals(n.outputs[0].name)] = zeros
    return q, *held


def _q_heads(run: Run, n: Node, choice: Choice, x: Any, w: Any, cos: Any, sin: Any) -> Any:
    from .qkv_triton import q_heads

    user, heads = _reader(run.graph, n), x.shape[-2]
    counters = kv_heads(user) if user else heads
    eps = n.number("eps")
    q, zeros = q_heads(x.flatten(-2), w, cos, sin, heads, counters, eps, **choice.use)
    run.env[arrivals(n.out.name)] = zeros
    return q


#: heads, heads of K, d, slots, first position and number of tokens of each row, rotated pairs of
#: the form `value`: rings that wrap and lists, rows without a token, odd halves, one slot, one pair
CASES = [
    (4, 2, 16, 5, (3, 5, 23), (1, 1, 1), 8),
    (4, 2, 16, 5, (7, 4, 9), (0, 1, 0), 4),
    (3, 3, 8, 32, (0,), (1,), 1),
    (4, 1, 32, 9, (8, 0), (1, 0), 4),
    (2, 2, 8, 1, (0, 6), (1, 1), 4),
    (2, 1, 8, 4, (3,), (0,), 2),
    (6, 2, 16, 7, (6, 7), (1, 1), 0),
    (4, 2, 22, 6, (2, 300_001), (1, 1), 5),
    (2, 1, 2, 3, (2, 3), (1, 1), 1),
    (4, 2, 256, 3, (5, 1023), (1, 1), 64),
]
#: form of the caches, and whether V has a projection of its own
FORMS = [("plain", True), ("plain", False), ("unnormed", True), ("value", False)]


def _heads(b: int, d: int) -> tuple[str, ...]:
    return f"*T[{d}]", f"T[{b},1,{d}]", f"T[{b},1,{d}]"


def _sample(form: str, values: bool, case: tuple[Any, ...]) -> Sample:
    heads, kv, d, slots, start, lengths, pairs = case
    b, pairs = len(start), pairs if form == "value" else 0
    sizes = {"heads": heads, "kv_heads": kv, "values": values, "pairs": pairs}
    widths = [d + 2 * pairs] if form == "value" else [d, d]
    return Sample(
        (
            f"T[{b},1,{(heads + kv * (1 + values)) * d}]",
            f"*T[{d}]",
            *_heads(b, d),
            *[f"i64[{b}]"] * 2,
            *(f"T[{slots},{b},{kv},{w}]" for w in widths),
        ),
        {"form": form, "eps": 1e-6, **sizes},
        {"warps": 1},
        {5: start, 6: lengths},
    )


def _queries(heads: int, d: int, b: int, eps: float) -> Sample:
    return Sample((f"T[{b},1,{heads},{d}]", *_heads(b, d)), {"eps": eps}, {"warps": 1})


KERNELS = (
    Kernel(
        op="qkv_write",
        starts={"qkv_write": 1},
        rule=_write_shape,
        call=_qkv_write,
        samples=tuple(_sample(*form, case) for case in CASES for form in FORMS),
        error=1e-6,
        differ=2**-9,
        uses={"qkv_write": {"warps": 1}},
    ),
    Kernel(
        op="norm_rope",
        starts={"q_heads": 1},
        rule=_query_shape,
        call=_q_heads,
        samples=tuple(
            _queries(case[0], case[2], len(case[4]), eps)
            for case, eps in zip(CASES, (1e-6, 0.3) * 5, strict=True)
        ),
        error=1e-6,
        differ=2**-9,
        uses={"q_heads": {"warps": 1}},
    ),
)
