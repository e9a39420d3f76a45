"""Attention over one cache instead of two, on layers whose K and V come from one projection.

There K = rope(rms_norm(raw, w)) and V = rms_norm(raw) (rule 13), so what a cache holds of one
tensor says both. A row of such a cache comes in one of two forms:

  value   V and the rotated dims of K, d + 2p elements for p rotated pairs; the other dims of K
          are V * w. V is rounded before w multiplies it, so below fp32 they differ from the
          plain K by a rounding.
  raw     the projection itself, d elements, and its reciprocal rms in fp32. K and V are made
          again with the roundings of the first time: the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .attention import MASKING, attention, attention_workspace, slot_positions, split_chunk
from .base import cases, free, op, per_input, require, wide
from .budgets import MOVES, Budget
from .kv_quant import as_read, held_width, numbers
from .norm import reciprocal_rms
from .rope import ROTATION, rope, rope_table, rotated_pairs
from .types import FLOATS, Type, Types, torch

#: form -> its tensors in the order in which `attention_latent` takes them
PARTS = {"value": ("latent",), "raw": ("raw", "rms")}


@op
class inverse_rms:
    """(mean(x^2) + eps)^-0.5 over the last dim, [..., 1]: the factor of rms_norm, not rounded

    fp32 where x is narrower; float64 stays.
    """

    budget = Budget(0, 16, "a mean of squares in fp32, which is not rounded")
    kind = "kv"
    rows = (0,)

    @staticmethod
    def infer(x: Type, *, eps: float) -> Type:
        require(eps > 0, f"inverse_rms: eps {eps} is not positive")
        require(x.rank > 0, f"inverse_rms: {x} has no last dim")
        return Type("f64" if x.dtype == "f64" else "f32", (*x.shape[:-1], 1))

    @staticmethod
    def reference(x: Any, *, eps: float) -> Any:
        return reciprocal_rms(wide(x), eps)

    flops = per_input(2)
    samples = cases("f32[2,3,4,8]", "f32[2,3,33]", eps=1e-06)


@op
class latent_row:
    """V and the rotated dims of K, one row: concat(v, k[:pairs], k[d/2 : d/2 + pairs])

    v, k [B,S,n,d]; the result, [B,S,n,d + 2 pairs], is the `value` form of both.
    """

    budget = MOVES
    kind = "kv"
    rows = (0, 1)

    @staticmethod
    def infer(v: Type, k: Type, *, pairs: int) -> Type:
        d = v.shape[-1]
        require(v.rank == 4 and v == k, f"latent_row: v {v} and k {k} differ or are not rank 4")
        fits = isinstance(d, int) and d % 2 == 0 and 0 <= pairs <= d // 2
        require(fits, f"latent_row: {pairs} pairs in {v}")
        return v.with_shape(*v.shape[:-1], int(d) + 2 * pairs)

    @staticmethod
    def reference(v: Any, k: Any, *, pairs: int) -> Any:
        half = k.shape[-1] // 2
        return torch.cat((v, k[..., :pairs], k[..., half : half + pairs]), -1)

    flops = free
    samples = cases("2*f32[2,3,2,8] {pairs=1}", "2*f32[2,3,2,8] {pairs=0}")


def keys_values_of_value(row: Any, w: Any) -> tuple[Any, Any]:
    """Return K and V [..., d] of rows [..., d + 2p] in the `value` form; K's unrotated dims are V *
    w, rounded once."""
    d = w.shape[0]
    half, pairs = d // 2, (row.shape[-1] - d) // 2
    v, low, high = row.split([d, pairs, pairs], -1)
    k = v * w
    return torch.cat((low, k[..., pairs:half], high, k[..., half + pairs :]), -1), v


def keys_values(
    form: str, row: tuple[Any, ...], w: Any, positions: Any, **rotation: Any
) -> tuple[Any, Any]:
    """Return K and V of rows in either form: `raw`, [X,Y,n,d] and rms^-1 [X,Y,n,1] at `positions`
    i64[X,Y], with the roundings of `rms_norm`, `rope_table` (its attributes but dim) and `rope`."""
    if form == "value":
        return keys_values_of_value(row[0], w)
    raw, rms = row
    h = wide(raw) * rms
    cos, sin = rope_table.reference(positions, dim=w.shape[0], **rotation)
    k = rope.reference((h * wide(w)).to(raw.dtype), cos, sin)
    return k.to(raw.dtype), h.to(raw.dtype)


def _as_keys(form: str, given: Sequence[Type], d: int, pairs: int, dtype: str) -> list[Type]:
    """Return the types of the keys in the cache and, where given, in the chunk."""
    held = [as_read(t, dtype) if form == "value" else t for t in given]
    require(len({t.dtype for t in given[:: len(PARTS[form])]}) < 2, f"attention_latent: {given}")
    parts = len(PARTS[form])
    widths = {"value": (d + 2 * pairs,), "raw": (d, 1)}[form]
    fits = len(held) in (parts, 2 * parts)
    require(fits, f"attention_latent: form {form} has {parts} caches, found {len(held)} tensors")
    require(0 <= pairs <= d // 2, f"attention_latent: {pairs} rotated pairs in {d} dims")
    for i, t in enumerate(held):
        first, width = held[i // parts * parts], widths[i % parts]
        fits = t.rank == 4 and t.shape == (*first.shape[:3], width) and t.dtype in FLOATS
        require(fits, f"attention_latent: {t} of form {form} does not fit {first}, width {width}")
    return [t.with_shape(*t.shape[:3], d) for t in held[::parts]]


def _parted(attrs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes of `attention` and those of `rope_table` without dim."""
    return {k: attrs[k] for k in MASKING}, {k: attrs[k] for k in ROTATION}


def _split(form: str, held: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the caches with the chunk's rows, and the block ids where there are any."""
    parts = len(PARTS[form])
    rows, block_ids = split_chunk(held[parts:], parts)
    return (*held[:parts], *rows), () if block_ids is None else (block_ids,)


#: of the samples: queries, their positions, tokens in the cache and the weight of K's norm
_QUERY = "f32[2,5,4,8] i64[2,5]@9:14 i64[2]@9:10 f32[8]"
_VALUE = (
    "form='value', window=4, softcap=0.0, kind='proportional', theta=1e4, fraction=0.5, factor=1.0"
)
_RAW = "form='raw', window=4, softcap=0.0, kind='default', theta=1e4, fraction=1.0, factor=2.0"
_RAW_ROWS = "f32[7,2,2,8] f32[7,2,2,1] f32[2,5,2,8] f32[2,5,2,1]"


@op
class attention_latent:
    """`attention` over K and V that are made again from rows in one of two forms

    q [B,S,nq,d], positions, written, window, scale, softcap as in `attention`; w [d] the weight
    of K's norm; kind, theta, fraction, factor, dtype as in the `rope_table` that rotated K.
    Then the caches and, for a chunk that is not yet in them, its rows [B,S,...]: `value` one
    tensor [C,B,n,d + 2p], p = rotated_pairs(kind, d, fraction); `raw` two, [C,B,n,d] and
    [C,B,n,1], the result of `inverse_rms`. With a chunk there may be block_ids, as in `attention`.
    Roundings as in `attention`; those of K and V are stated above, at the forms. Rows of the form
    `value` may be quantised, as in `attention`.
    """

    budget = Budget(8, 512, "as attention, on keys that were made again and rounded")
    kind = "kv"
    rows = (0, 1)

    @staticmethod
    def held(*, form: str, **_: Any) -> tuple[int, int]:
        return 4, 4 + len(PARTS[form])

    operands = "q positions written w *held"
    attrs = MASKING | ROTATION | {"form": "str"}

    @staticmethod
    def infer(
        q: Type, positions: Type, written: Type, w: Type, *held: Type, form: str, **attrs: Any
    ) -> Type:
        require(form in PARTS, f"attention_latent: form {form!r}: one of {', '.join(PARTS)}")
        fits = q.rank == 4 and isinstance(q.shape[-1], int) and w == Type(q.dtype, q.shape[-1:])
        require(fits, f"attention_latent: weight {w} does not fit q {q}")
        d = int(q.shape[-1])
        masking, rotation = _parted(attrs)
        rope_table.infer(positions, dim=d, **rotation)
        rows, block_ids = _split(form, held)
        pairs = rotated_pairs(rotation["kind"], d, rotation["fraction"])
        keys = [t for t in _as_keys(form, rows, d, pairs, q.dtype) for _ in "kv"]
        attention.infer(q, positions, written, *keys, *block_ids, **masking)
        return q

    @staticmethod
    def reference(
        q: Any, positions: Any, written: Any, w: Any, *held: Any, form: str, **attrs: Any
    ) -> Any:
        masking, rotation = _parted(attrs)
        parts = len(PARTS[form])
        rows, block_ids = _split(form, held)
        key_pos = slot_positions(written, held[0].shape[0])
        if form == "value":
            rows = tuple(numbers(row, q.dtype) for row in rows)
        both = [*keys_values(form, rows[:parts], w, key_pos, **rotation)]
        if len(rows) > parts:
            both += keys_values(form, rows[parts:], w, positions, **rotation)
        return attention.reference(q, positions, written, *both, *block_ids, **masking)

    @staticmethod
    def flops(ins: Types, outs: Types, *, form: str, **attrs: Any) -> int:
        """Count FLOPs as `attention` does; a key of the `value` form is d + 2p long. `raw`: also 5
        for each element of K and V that is made again."""
        q, parts = ins[0], len(PARTS[form])
        held = _split(form, ins[4:])[0]
        d = int(q.shape[-1])
        rows = [x.with_shape(*x.shape[:-1], d) for x in held[::parts] for _ in "kv"]
        count: int = attention.flops((*ins[:3], *rows), outs, **attrs)
        if form == "value":
            return count * (d + held_width(held[0])) // (2 * d)
        return count + 5 * sum(x.numel() for x in held[::parts])

    @staticmethod
    def workspace(ins: Types, outs: Types, *, form: str, softcap: float, **_: Any) -> int:
        raw = form == "raw"
        return attention_workspace(ins[0], ins[4:], len(PARTS[form]), softcap, raw)

    samples = cases(
        f"{_QUERY} f32[7,2,2,12] f32[2,5,2,12] {{{_VALUE}}}",
        f"{_QUERY} {_RAW_ROWS} {{{_RAW}}}",
        f"{_QUERY} f32[7,2,2,12] f32[2,5,2,12] i64[2,5]@-1:2 {{{_VALUE}}}",
        f"{_QUERY} {_RAW_ROWS} i64[2,5]@-1:2 {{{_RAW}}}",
        "f32[2,1,4,8] i64[2,1]@6:7 i64[2]@7:8 f32[8] f32[16,2,1,10] {form='value', window=0,"
        " softcap=20.0, kind='proportional', theta=1e6, fraction=0.25, factor=1.0}",
        "f32[1,1,4,8] i64[1,1]@29:30 i64[1]@30:31 f32[8] f32[8,1,2,8] f32[8,1,2,1] {form='raw',"
        " window=8, softcap=0.0, kind='proportional', theta=1e6, fraction=0.5, factor=1.0}",
        f"{_QUERY} f8e4m3[7,2,2,12]@1:64 f8e4m3[2,5,2,12]@1:64 {{{_VALUE}}}",
        f"{_QUERY} i8[7,2,2,14]@1:64 i8[2,5,2,14]@1:64 {{{_VALUE}}}",
        scale=1.0,
        dtype="f32",
    )
