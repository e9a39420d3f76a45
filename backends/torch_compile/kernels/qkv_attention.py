"""Attention of one new token per row over its cache, from its projection on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4ir.ir.graph import Graph, Node

from ..target import Target
from .base import Choice, Kernel, Sample, Shape, given_zeros, is_row, kv_heads, masking, size

if TYPE_CHECKING:
    from ..run import Run


def _shape(g: Graph, n: Node, target: Target) -> Shape | None:
    """Return the shape; None for several tokens, and where rows are held in fewer bits."""
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


def _use(splits: int, block_n: int = 4, merges: int = 2) -> dict[str, int]:
    return {"splits": splits, "merges": merges, "block_n": block_n, "warps": 4, "stages": 2}


#: heads, heads of K, d, slots, window, tokens in the caches before, new ones (0: a row that is at
#: its end), softcap, settings: first tokens, rings that wrap, lists, shares of one key alone
CASES: list[tuple[int, int, int, int, int, tuple[int, ...], tuple[int, ...], float, Any]] = [
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


def _common(b: int, d: int) -> tuple[str, str]:
    return f"T[{b},1,{d}]", f"T[{b},1,{d}]"


def _attrs(window: int, softcap: float) -> dict[str, Any]:
    return {"eps": 1e-6, "window": window, "scale": 0.3, "softcap": softcap}


def _sample(values: bool, case: Any) -> Sample:
    heads, kv, d, slots, window, before, new, softcap, use = case
    b = len(before)
    return Sample(
        (
            f"T[{b},1,{(heads + kv * (1 + values)) * d}]",
            *(f"*T[{d}]", f"*T[{d}]", *_common(b, d)),
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


def _of_queries(case: Any) -> Sample:
    heads, kv, d, slots, window, before, _, softcap, use = case
    b = len(before)
    held = [max(1, at) for at in before]
    return Sample(
        (
            f"T[{b},1,{heads},{d}]",
            *(f"*T[{d}]", *_common(b, d)),
            *(f"i64[{b},1]", f"i64[{b}]"),
            *[f"T[{slots},{b},{kv},{d}]"] * 2,
        ),
        _attrs(window, softcap),
        use,
        {4: [[at - 1] for at in held], 5: held},
    )


KERNELS = (
    Kernel(
        op="qkv_attention",
        starts={"qkv_attention": 1},
        rule=_shape,
        call=_qkv_attention,
        samples=tuple(_sample(i % 3 != 1, case) for i, case in enumerate(CASES)),
        error=2e-5,
        differ=None,
    ),
    Kernel(
        op="q_attention",
        starts={"q_attention": 1},
        rule=_shape,
        call=_q_attention,
        samples=tuple(map(_of_queries, CASES)),
        error=2e-5,
        differ=None,
    ),
)
