"""Attention with what comes before it, from the projection on, as one op."""

from __future__ import annotations

from typing import Any

from .base import Sample, op
from .budgets import Budget


def _plain(heads: int, kv_heads: int, values: bool, eps: float) -> dict[str, Any]:
    """Return the attributes of `qkv_write` into caches of K and V."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "values": values}
    return {**sizes, "form": "plain", "pairs": 0, "eps": eps}


def _masking(window: int, scale: float, softcap: float) -> dict[str, Any]:
    return {"window": window, "scale": scale, "softcap": softcap}


_MASKING = {"window": 0, "scale": 0.3, "softcap": 0.0}
_AT = {5: (3, 4), 6: (1, 2), 7: (3, 4), 8: (4, 5)}


@op
class qkv_attention:
    """q, caches = qkv_write(qkv, ..) of form `plain`; attention(q, .., caches), then the caches

    positions i64[B,S] of the queries, written i64[B] tokens in the caches after the write.
    """

    budget = Budget(5, 512, "as qkv_write, then as attention over what was written")
    kind = "kv"
    updates = ((1, 9), (2, 10))

    @staticmethod
    def held(**_: Any) -> tuple[int, int]:
        return 9, 11

    @staticmethod
    def expand(
        b: Any,
        qkv: Any,
        norm_q: Any,
        norm_k: Any,
        cos: Any,
        sin: Any,
        start: Any,
        lengths: Any,
        positions: Any,
        written: Any,
        cache_k: Any,
        cache_v: Any,
        *,
        heads: int,
        kv_heads: int,
        values: bool,
        eps: float,
        window: int,
        scale: float,
        softcap: float,
    ) -> tuple[Any, Any, Any]:
        given = (qkv, norm_q, norm_k, cos, sin, start, lengths, cache_k, cache_v)
        q, k, v = b.emit_all("qkv_write", *given, **_plain(heads, kv_heads, values, eps))
        masking = _masking(window, scale, softcap)
        return b.emit("attention", q, positions, written, k, v, **masking), k, v

    samples = [
        Sample(
            (
                "f32[2,1,64]",
                *("f32[8]", "f32[8]", "f32[2,1,8]", "f32[2,1,8]"),
                *("i64[2]", "i64[2]", "i64[2,1]", "i64[2]"),
                *["f32[9,2,2,8]"] * 2,
            ),
            {"heads": 4, "kv_heads": 2, "values": True, "eps": 1e-6, **_MASKING},
            _AT,
        ),
        Sample(
            (
                "f32[2,1,40]",
                *("f32[8]", "f32[8]", "f32[2,1,8]", "f32[2,1,8]"),
                *("i64[2]", "i64[2]", "i64[2,1]", "i64[2]"),
                *["f32[3,2,1,8]"] * 2,
            ),
            {"heads": 4, "kv_heads": 1, "values": False, "eps": 1e-6, **_MASKING, "window": 3},
            _AT,
        ),
    ]


@op
class q_attention:
    """attention(norm_rope(x, norm_q, cos, sin), ..) over caches that another layer has written

    positions i64[B,S] of the queries, written i64[B] tokens in the caches.
    """

    budget = Budget(5, 512, "as norm_rope, then as attention")
    kind = "kv"

    @staticmethod
    def held(**_: Any) -> tuple[int, int]:
        return 6, 8

    @staticmethod
    def expand(
        b: Any,
        x: Any,
        norm_q: Any,
        cos: Any,
        sin: Any,
        positions: Any,
        written: Any,
        cache_k: Any,
        cache_v: Any,
        *,
        eps: float,
        window: int,
        scale: float,
        softcap: float,
    ) -> Any:
        q = b.emit("norm_rope", x, norm_q, cos, sin, eps=eps)
        masking = _masking(window, scale, softcap)
        return b.emit("attention", q, positions, written, cache_k, cache_v, **masking)

    samples = [
        Sample(
            (
                "f32[2,1,4,8]",
                *("f32[8]", "f32[2,1,8]", "f32[2,1,8]"),
                *("i64[2,1]", "i64[2]"),
                *["f32[9,2,2,8]"] * 2,
            ),
            {"eps": 1e-6, **_MASKING},
            {4: (6, 7), 5: (7, 8)},
        ),
    ]
