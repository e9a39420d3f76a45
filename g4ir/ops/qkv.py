"""The op behind a packed projection: norms, rotation, and the update of the caches."""

from __future__ import annotations

from typing import Any

from .base import Sample, op, require
from .budgets import Budget
from .latent import PARTS

#: caches of K and V, or one of the forms of one projection (see ops/latent.py)
FORMS = ("plain", *PARTS)


def _held_as(b: Any, cache: Any, row: Any) -> Any:
    """Emit what makes rows what their cache holds, where that has fewer bits."""
    to = cache.type.dtype
    return row if row.type.dtype == to else b.emit("narrow_row", row, to=to)


#: of the samples below: norms' weights, rope tables, starts and lengths; attrs
_OTHERS = ("f32[8]", "f32[8]", "f32[2,1,8]", "f32[2,1,8]", "i64[2]", "i64[2]")
_PLAIN: dict[str, Any] = {
    "heads": 4,
    "kv_heads": 2,
    "values": True,
    "form": "plain",
    "pairs": 0,
    "eps": 1e-6,
}
_AT = {5: (3, 9), 6: (0, 2)}


@op
class qkv_write:
    """Q normed and rotated, and the caches after the chunk, from one packed projection

    qkv [B,S,(heads + kv_heads * (1 + values)) * d]: q, k and, with `values`, v, else v = k.
    norm_q, norm_k [d]; cos, sin [B,S,d]; start, lengths i64[B] and the caches as in `cache_write`.
    K = norm_rope(k, norm_k), V = rms_norm(v) (rules 12, 13). Results: q [B,S,heads,d], then the
    caches. Form `plain` has caches of K and V; `value` one, of `latent_row` with this many pairs;
    `raw` two, of k itself and its `inverse_rms`, for which norm_k is not used. Caches of the first
    two may hold rows in fewer bits, of `narrow_row`.
    """

    budget = Budget(2, 16, "as norm_rope or rms_norm; what follows moves data")
    kind = "kv"
    updates = ((1, 7), (2, 8))

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
        *caches: Any,
        heads: int,
        kv_heads: int,
        values: bool,
        form: str,
        pairs: int,
        eps: float,
    ) -> tuple[Any, ...]:
        require(form in FORMS, f"form {form!r}: one of {', '.join(FORMS)}")
        require(form == "plain" or not values, f"form {form} has K and V of one projection")
        require(form == "value" or pairs == 0, f"form {form} has no rotated pairs apart")
        norms = (norm_q.type, norm_k.type)
        require(norms[0] == norms[1] and norms[0].rank == 1, f"norms {norms[0]}, {norms[1]}")
        d = norms[0].shape[0]
        require(isinstance(d, int), f"norms {norms[0]} of a named dim")
        sizes = (heads * d, *(kv_heads * d,) * (1 + values))
        q, *kv = b.emit_all("split", qkv, sizes=sizes)
        q = b.emit("norm_rope", b.emit("heads", q, n=heads), norm_q, cos, sin, eps=eps)
        kv = [b.emit("heads", x, n=kv_heads) for x in kv]
        k, v = kv[0], kv[-1]
        if form == "raw":
            rows = [k, b.emit("inverse_rms", k, eps=eps)]
        else:
            rows = [
                b.emit("norm_rope", k, norm_k, cos, sin, eps=eps),
                b.emit("rms_norm", v, eps=eps),
            ]
        if form == "value":
            rows = [b.emit("latent_row", *rows[::-1], pairs=pairs)]
        require(len(caches) == len(rows), f"{len(caches)} caches, form {form} has {len(rows)}")
        if form != "raw":
            rows = [_held_as(b, c, row) for c, row in zip(caches, rows, strict=True)]
        pairs_of = zip(caches, rows, strict=True)
        return q, *(b.emit("cache_write", cache, row, start, lengths) for cache, row in pairs_of)

    samples = [
        Sample(("f32[2,1,64]", *_OTHERS, *["f32[4,2,2,8]"] * 2), _PLAIN, _AT),
        Sample(
            ("f32[2,1,40]", *_OTHERS, *["f32[9,2,1,8]"] * 2),
            {**_PLAIN, "kv_heads": 1, "values": False},
            _AT,
        ),
        Sample(
            ("f32[2,1,48]", *_OTHERS, "f32[9,2,2,12]"),
            {**_PLAIN, "values": False, "form": "value", "pairs": 2},
            _AT,
        ),
        Sample(
            ("f32[2,1,48]", *_OTHERS, "f32[9,2,2,8]", "f32[9,2,2,1]"),
            {**_PLAIN, "values": False, "form": "raw"},
            _AT,
        ),
        *(
            Sample(("f32[2,1,64]", *_OTHERS, *[f"{held}[4,2,2,{width}]"] * 2), _PLAIN, _AT)
            for held, width in (("f8e4m3", 8), ("i8", 10))
        ),
    ]
