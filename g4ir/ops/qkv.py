"""The op after a packed QKV projection: norms, RoPE and KV cache update."""

from __future__ import annotations

from typing import Any

from .base import cases, op, require
from .budgets import Budget

#: forms with separate caches of K and V; V is RMS-normed, except in `unnormed`
SEPARATE_CACHES = ("plain", "unnormed")
#: `value`: one latent cache (see ops/latent.py)
CACHE_FORMS = (*SEPARATE_CACHES, "value")
#: attributes: query heads, KV heads, whether V has a separate projection, eps of the norms
PACKED = {"heads": "int", "kv_heads": "int", "values": "bool", "eps": "float"}


#: in samples: types of norm weights, RoPE tables, starts and lengths
_INPUTS = "2*f32[8] 2*f32[2,1,8] i64[2]@3:9 i64[2]@0:2"
_PLAIN = "kv_heads=2, values=True, form='plain', pairs=0"


@op
class qkv_write:
    """Q after norm and RoPE, and the updated KV caches, from one packed projection

    qkv [B,S,(heads + kv_heads * (1 + values)) * d]: q, k and, with `values`, v, else v = k.
    norm_q, norm_k [d]; cos, sin [B,S,d]; start, lengths i64[B] and the caches as in `cache_write`.
    K = norm_rope(k, norm_k), V = rms_norm(v) (rules 12, 13). Results: q [B,S,heads,d], then the
    caches. Forms `plain` and `unnormed` (V = v) have caches of K and V; `value` has one, of
    `latent_row` with `pairs` pairs. Caches may be quantised (`narrow_row`).
    """

    budget = Budget(2, 16, "as norm_rope or rms_norm; the rest moves data")
    kind = "kv"
    updates = ((1, 7), (2, 8))
    operands = "qkv norm_q norm_k cos sin start lengths *caches"
    attrs = PACKED | {"form": "str", "pairs": "int"}

    @staticmethod
    def expand(b: Any, *inputs: Any, form: str, pairs: int, **sizes: Any) -> tuple[Any, ...]:
        heads, kv_heads, values, eps = (sizes[name] for name in PACKED)
        qkv, norm_q, norm_k, cos, sin, start, lengths, *caches = inputs
        require(form in CACHE_FORMS, f"form {form!r}: expected one of {', '.join(CACHE_FORMS)}")
        separate = form in SEPARATE_CACHES
        require(separate or not values, f"form {form} takes no V projection; give values=False")
        require(form == "value" or pairs == 0, f"form {form} takes no pairs; give 0")
        norm, other = norm_q.type, norm_k.type
        require(norm == other and norm.rank == 1, f"norms {norm}, {other} differ or are not rank 1")
        d = norm.shape[0]
        require(isinstance(d, int), f"the dim of norms {norm} must be an int")
        widths = (heads * d, *(kv_heads * d,) * (1 + values))
        q, *kv = b.emit_all("split", qkv, sizes=widths)
        q = b.emit("norm_rope", b.emit("heads", q, n=heads), norm_q, cos, sin, eps=eps)
        kv = [b.emit("heads", x, n=kv_heads) for x in kv]
        k, v = kv[0], kv[-1]
        k = b.emit("norm_rope", k, norm_k, cos, sin, eps=eps)
        rows = [k, v if form == "unnormed" else b.emit("rms_norm", v, eps=eps)]
        if form == "value":
            rows = [b.emit("latent_row", rows[1], k, pairs=pairs)]
        require(len(caches) == len(rows), f"{len(caches)} caches, form {form} has {len(rows)}")
        for i, (cache, row) in enumerate(zip(caches, rows, strict=True)):
            if row.type.dtype != cache.type.dtype:
                rows[i] = b.emit("narrow_row", row, to=cache.type.dtype)
        writes = zip(caches, rows, strict=True)
        return q, *(b.emit("cache_write", cache, row, start, lengths) for cache, row in writes)

    samples = cases(
        f"f32[2,1,64] {_INPUTS} 2*f32[4,2,2,8] {{{_PLAIN}}}",
        f"f32[2,1,40] {_INPUTS} 2*f32[9,2,1,8] {{kv_heads=1, values=False, form='plain', pairs=0}}",
        f"f32[2,1,64] {_INPUTS} 2*f32[4,2,2,8] {{{_PLAIN.replace('plain', 'unnormed')}}}",
        f"f32[2,1,48] {_INPUTS} f32[9,2,2,12] {{kv_heads=2, values=False, form='value', pairs=2}}",
        f"f32[2,1,64] {_INPUTS} 2*f8e4m3[4,2,2,8] {{{_PLAIN}}}",
        f"f32[2,1,64] {_INPUTS} 2*i8[4,2,2,10] {{{_PLAIN}}}",
        heads=4,
        eps=1e-6,
    )
