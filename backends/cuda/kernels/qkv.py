"""The steps from a projection to attention: per-head norms, rotation, the write into the caches;
and with the attention of one new token per row."""

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
    given_zeros,
    is_row,
    kv_heads,
    masking,
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


def _attention_shape(g: Graph, n: Node, target: Target) -> Shape | None:
    """Return the shape; None for several tokens, and where rows are quantised."""
    out, heads = n.outputs[0].type, kv_heads(n)
    if not is_row(out) or n.caches[0].type.dtype != out.dtype:
        return None
    sizes = {"d": size(out, -1), "kv_heads": heads, "group": size(out, 2) // heads}
    return sizes | {"window": n.whole("window"), "programs": target.rows * heads}


def _qkv_attention(
    run: Run, n: Node, choice: Choice, qkv: Any, *given: Any
) -> tuple[Any, Any, Any]:
    """Return the result and the caches, which follow nine other inputs, written in place."""
    from .qkv_attention_triton import qkv_attention

    *rest, _, written, k, v = given
    zeros = given_zeros(run, n, choice, n["qkv"], qkv)
    attrs = {name: n.attrs[name] for name in ("heads", "kv_heads", "values", "eps")}
    options = {**attrs, **masking(n), **choice.use}
    return qkv_attention(qkv, *rest, written, [k, v], zeros, **options), k, v


def _q_attention(run: Run, n: Node, choice: Choice, x: Any, *given: Any) -> Any:
    from .qkv_attention_triton import q_attention

    *rest, _, written, k, v = given
    zeros = given_zeros(run, n, choice, n["x"], x)
    options = {"eps": n.number("eps"), **masking(n), **choice.use}
    return q_attention(x, *rest, written, [k, v], zeros, **options)


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
FORMS = [("plain", True), ("plain", False), ("unnormed", True), ("value", False), ("raw", False)]


def _heads(b: int, d: int) -> tuple[str, ...]:
    return f"*T[{d}]", f"T[{b},1,{d}]", f"T[{b},1,{d}]"


def _sample(form: str, values: bool, case: tuple[Any, ...]) -> Sample:
    heads, kv, d, slots, start, lengths, pairs = case
    b, pairs = len(start), pairs if form == "value" else 0
    sizes = {"heads": heads, "kv_heads": kv, "values": values, "pairs": pairs}
    caches = {"value": ("T", d + 2 * pairs), "raw": ("T", d, "f32", 1)}
    held = caches.get(form, ("T", d, "T", d))
    rows = zip(held[::2], held[1::2], strict=True)
    return Sample(
        (
            f"T[{b},1,{(heads + kv * (1 + values)) * d}]",
            f"*T[{d}]",
            *_heads(b, d),
            *[f"i64[{b}]"] * 2,
            *(f"{t}[{slots},{b},{kv},{w}]" for t, w in rows),
        ),
        {"form": form, "eps": 1e-6, **sizes},
        {"warps": 1},
        {5: start, 6: lengths},
    )


def _queries(heads: int, d: int, b: int, eps: float) -> Sample:
    return Sample((f"T[{b},1,{heads},{d}]", *_heads(b, d)), {"eps": eps}, {"warps": 1})


def _use(splits: int, block_n: int = 4, merges: int = 2) -> dict[str, int]:
    return {"splits": splits, "merges": merges, "block_n": block_n, "warps": 4, "stages": 2}


#: heads, heads of K, d, slots, window, tokens in the caches before, new ones (0: a row that is at
#: its end), softcap, settings: first tokens, rings that wrap, lists, shares of one key alone
ATTENTIONS: list[tuple[int, int, int, int, int, tuple[int, ...], tuple[int, ...], float, Any]] = [
    (4, 2, 16, 5, 5, (0, 4, 5, 23), (1, 1, 1, 1), 0.0, _use(2)),
    (2, 1, 8, 13, 13, (12, 13, 41), (1, 0, 1), 0.0, _use(4)),
    (3, 3, 32, 18, 13, (40, 3), (1, 1), 3.0, _use(3)),
    (4, 1, 22, 64, 0, (8, 31), (1, 1), 0.0, _use(7)),
    (2, 2, 16, 64, 0, (4, 16), (1, 1), 0.0, _use(1)),
    (8, 1, 64, 64, 13, (50,), (1,), 0.0, _use(4, merges=8)),
    (6, 2, 10, 9, 9, (300_001, 8), (1, 1), 0.0, _use(3, 8)),
    (2, 1, 256, 32, 0, (20, 1), (0, 1), 20.0, _use(5)),
    (6, 1, 16, 1024, 0, (700,), (1,), 0.0, _use(128, merges=1)),
    (2, 1, 16, 1, 1, (0, 7), (1, 1), 0.0, _use(2)),
]


def _attrs(window: int, softcap: float) -> dict[str, Any]:
    return {"eps": 1e-6, "window": window, "scale": 0.3, "softcap": softcap}


def _attention_sample(values: bool, case: Any) -> Sample:
    heads, kv, d, slots, window, before, new, softcap, use = case
    b = len(before)
    return Sample(
        (
            f"T[{b},1,{(heads + kv * (1 + values)) * d}]",
            f"*T[{d}]",
            *_heads(b, d),
            *(f"i64[{b}]", f"i64[{b}]", f"i64[{b},1]", f"i64[{b}]"),
            *[f"T[{slots},{b},{kv},{d}]"] * 2,
        ),
        {"heads": heads, "kv_heads": kv, "values": values, **_attrs(window, softcap)},
        use,
        {
            5: before,
            6: new,
            7: [[at - 1 + n] for at, n in zip(before, new, strict=True)],
            8: [at + n for at, n in zip(before, new, strict=True)],
        },
    )


def _attention_of_queries(case: Any) -> Sample:
    heads, kv, d, slots, window, before, _, softcap, use = case
    b = len(before)
    held = [max(1, at) for at in before]
    return Sample(
        (
            f"T[{b},1,{heads},{d}]",
            *_heads(b, d),
            *(f"i64[{b},1]", f"i64[{b}]"),
            *[f"T[{slots},{b},{kv},{d}]"] * 2,
        ),
        _attrs(window, softcap),
        use,
        {4: [[at - 1] for at in held], 5: held},
    )


KERNELS = (
    Kernel(
        op="qkv_write",
        starts={"qkv_write": 1},
        rule=_write_shape,
        call=_qkv_write,
        samples=tuple(_sample(*form, case) for case in CASES for form in FORMS),
        error=1e-6,
        differ=2**-9,
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
    ),
    Kernel(
        op="qkv_attention",
        starts={"qkv_attention": 1},
        rule=_attention_shape,
        call=_qkv_attention,
        samples=tuple(_attention_sample(i % 3 != 1, case) for i, case in enumerate(ATTENTIONS)),
        error=2e-5,
        differ=None,
    ),
    Kernel(
        op="q_attention",
        starts={"q_attention": 1},
        rule=_attention_shape,
        call=_q_attention,
        samples=tuple(map(_attention_of_queries, ATTENTIONS)),
        error=2e-5,
        differ=None,
    ),
)
