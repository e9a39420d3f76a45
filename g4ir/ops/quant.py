"""Ops on quantised weights and activations; the formats are in codecs.py."""

from __future__ import annotations

from typing import Any

from .base import VIEW, Sample, Traffic, cases, free, op, require, upcast
from .budgets import MOVES, Budget
from .codecs import (
    ACTIVATIONS,
    AS_BYTES,
    FORMAT_OF,
    FORMATS,
    PACKED,
    PIECE,
    TILE,
    WORD,
    apply_scales,
    by_columns,
    by_rows,
    dequantize_codes,
    fake_quantize_values,
    fits_tiles,
    from_tiles,
    quantize_values,
    rows_from_tiles,
    shared_integers,
    take_rows,
    to_tiles,
    unpack_codes,
)
from .grids import fit_groups
from .types import FLOATS, ITEMSIZE, Type, Types, torch, torch_dtype


def _values(codes: Type) -> int:
    """Return the number of quantised values per row; codes may hold several per element."""
    return FORMATS[FORMAT_OF[codes.dtype]].values_in(int(codes.shape[-1]))


def _require_fit(name: str, codes: Type, scales: Type) -> None:
    ints = codes.rank and all(isinstance(t.shape[-1], int) for t in (codes, scales))
    fits = bool(ints) and codes.dtype in FORMAT_OF and codes.shape[:-1] == scales.shape[:-1]
    fmt = FORMATS[FORMAT_OF.get(codes.dtype, "int8")]
    count, values = (int(scales.shape[-1]), _values(codes)) if fits else (0, 0)
    fits = count > 0 and values > 0 and count % fmt.scales == 0
    fits = fits and values % (count // fmt.scales * fmt.share) == 0
    require(fits, f"{name}: scales {scales} do not fit codes {codes}")


@op
class quantize:
    """codes, scales of a weight: `group` consecutive values share a scale; group 0: the row

    Scales are rounded to the dtype `scale` before codes are computed. A scale is the group's
    absolute maximum divided by the largest code, except in int4, which takes a scale that
    reproduces the weight exactly, if it finds one (weights trained on that grid), else one of small
    squared error (codecs.py: `int4_scales`); in nl4, nl3 and nl2, which fit scales and shifts by
    least squares (grids.py); and in formats with minima, which fit scales and minima by least
    squares, then, with shared integers, round them to integers times the group's stored pair.
    int6 and int3k take the smallest shared integers that avoid clipping; iq4 and fp4 take the
    nearest values of their tables.
    """

    budget = MOVES

    @staticmethod
    def infer(w: Type, *, form: str, group: int, scale: str) -> tuple[Type, Type]:
        expected = f"expected one of {', '.join(FORMATS)}"
        require(form in FORMATS, f"quantize: form {form!r}: {expected}")
        size = w.shape[-1]
        require(isinstance(size, int), f"quantize: rows of {w} have no known size")
        each = group or int(size)
        fits = group >= 0 and int(size) % each == 0 and int(size) % FORMATS[form].block_values == 0
        fits = fits and each % FORMATS[form].share == 0
        require(fits, f"quantize: {form} in groups of {each} does not fit rows of {w}")
        codes = Type(FORMATS[form].codes, (*w.shape[:-1], FORMATS[form].elements_for(int(size))))
        scales = int(size) // each * FORMATS[form].scales
        return codes, Type(scale, (*w.shape[:-1], scales))

    @staticmethod
    def reference(
        w: Any, *, form: str, group: int, scale: str, moments: Any = None, fit: Any = fit_groups
    ) -> tuple[Any, Any]:
        """`moments` [.., 1, K]: second moments of the inputs of a calibrated weight, as in
        `quantize_values`; for w [E, N, K] optionally per expert. `fit`: implementation of
        `fit_groups`."""
        if moments is not None and w.ndim > 2:
            pairs = zip(w, moments.expand(*w.shape[:-2], 1, -1), strict=True)
            attrs: dict[str, Any] = {"form": form, "group": group, "scale": scale, "fit": fit}
            each = [quantize.reference(one, **attrs, moments=moment) for one, moment in pairs]
            codes, scales = (torch.stack(parts) for parts in zip(*each, strict=True))
            return codes, scales
        rows = w.reshape(-1, w.shape[-1])
        pieces = rows.split(max(1, PIECE // w.shape[-1]))
        by = None if moments is None else moments.flatten()
        results = [quantize_values(x, form, group or w.shape[-1], scale, by, fit) for x in pieces]
        codes, scales = (torch.cat(parts) for parts in zip(*results, strict=True))
        return codes.view(*w.shape[:-1], -1), scales.view(*w.shape[:-1], -1)

    flops = free
    samples = cases(
        "f32[6,64] {form='int8', group=0, scale='f32'}",
        "f32[2,3,64] {form='int4', group=32, scale='bf16'}",
        "f32[3,256] {form='int6', group=128, scale='f32'}",
        "f32[3,512] {form='uint4', group=256, scale='f32'}",
        "f32[2,256] {form='uint5', group=128, scale='f16'}",
        "f32[4,48] {form='fp8', group=0, scale='f32'}",
        "f32[4,96] {form='int5', group=32, scale='f16'}",
        "f32[4,96] {form='int3', group=32, scale='f16'}",
        "f32[4,96] {form='int2', group=0, scale='bf16'}",
        "f32[2,256] {form='nl4', group=0, scale='bf16'}",
        "f32[2,256] {form='nl3', group=128, scale='f32'}",
        "f32[2,128] {form='nl2', group=0, scale='f16'}",
        "f32[4,96] {form='iq4', group=32, scale='f16'}",
        "f32[4,192] {form='fp4', group=64, scale='f32'}",
        "f32[2,256] {form='int3k', group=128, scale='f16'}",
        "f32[2,256] {form='uint2', group=256, scale='f32'}",
        "f32[2,64] {form='min4', group=32, scale='f32'}",
        "f32[2,64] {form='min5', group=0, scale='f16'}",
    )


@op
class dequantize:
    """w = round(codes * scales [- minima]) in the dtype `to`; products are exact unless scales are
    fp32, a difference is rounded to fp32 first"""

    budget = Budget(1, 0, "one product, rounded once")
    fold = False

    @staticmethod
    def infer(codes: Type, scales: Type, *, to: str) -> Type:
        _require_fit("dequantize", codes, scales)
        return Type(to, (*codes.shape[:-1], _values(codes)))

    @staticmethod
    def reference(codes: Any, scales: Any, *, to: str) -> Any:
        return dequantize_codes(codes, scales, torch_dtype(to))

    # Counted with the matmul that reads it (plan/cost.py).
    flops, traffic = VIEW
    samples = cases(
        "i8[6,64]@-127:128 f32[6,1]",
        "u8[2,3,16]@0:256 f32[2,3,1]",
        "i64[3,26]@-4611686018427387904:4611686018427387904 f32[3,2]",
        "i32[3,70]@-2147483648:2147483648 f32[3,4]",
        "i16[2,86]@-32768:32768 f16[2,4]",
        "u16[2,30]@0:65536 f16[2,3]",
        "u32[2,9]@0:4294967296 f16[2,3]",
        "u64[2,3]@0:9223372036854775807 f16[2,3]",
        "f8e4m3[4,48] f32[4,2]",
        "nl4[2,136]@0:256 bf16[2,1]",
        "nl3[2,104]@0:256 f32[2,2]",
        "nl2[2,72]@0:256 f32[2,1]",
        to="f32",
    )


@op
class dense:
    """dequantize(codes, scales), in the weight prologue, for matmuls without a quantised kernel"""

    budget = Budget(1, 0, "one product, rounded once")

    @staticmethod
    def expand(b: Any, codes: Any, scales: Any, *, to: str) -> Any:
        return b.emit("dequantize", codes, scales, to=to)

    samples = cases("i8[6,64]@-127:128 f32[6,1]", to="f32")


@op
class as_bytes:
    """int6, int3k and fp4 to int8 with a scale per 16 values, nl4, nl3 and nl2 with one per 32;
    int5, int3, int2 and iq4 with the same scales; in the weight prologue, for targets without
    these formats"""

    budget = Budget(1, 0, "a scale is one product, exact unless scales are fp32")

    @staticmethod
    def infer(codes: Type, scales: Type) -> tuple[Type, Type]:
        _require_fit("as_bytes", codes, scales)
        fmt, size = FORMAT_OF[codes.dtype], _values(codes)
        expected = f"expected one of {', '.join(AS_BYTES)}"
        require(fmt in AS_BYTES, f"as_bytes: codes {codes} are {fmt}: {expected}")
        *lead, _ = codes.shape
        shared = FORMATS[fmt].shared
        return Type("i8", (*lead, size)), Type("f32", (*lead, size // shared)) if shared else scales

    @staticmethod
    def reference(codes: Any, scales: Any) -> tuple[Any, Any]:
        values = unpack_codes(codes)
        for integers in shared_integers(codes):
            scales = apply_scales(integers, upcast(scales))
        return values, scales

    flops = free
    samples = cases(
        "nl4[2,136]@0:256 bf16[2,1]",
        "nl3[2,52]@0:256 f32[2,1]",
        "i64[2,3,26]@-4611686018427387904:4611686018427387904 f32[2,3,2]",
        "u16[2,3,20]@0:65536 f32[2,3,2]",
        "u32[2,3,6]@0:4294967296 f32[2,3,2]",
        "u64[2,3,2]@0:9223372036854775807 f32[2,3,2]",
    )


@op
class columns:
    """Codes or scales of w [.., N, K] transposed to [.., K, N]

    4-bit codes become two's complement, with two rows of w in a byte: [.., K, N/2].
    """

    budget = MOVES

    @staticmethod
    def infer(x: Type) -> Type:
        *lead, n, k = x.shape
        require(
            x.dtype in (*FLOATS, *PACKED),
            f"columns: {x} holds neither floats nor codes packed in bytes",
        )
        packed = PACKED.get(x.dtype, 1)
        fits = isinstance(n, int) and isinstance(k, int) and n % packed == 0
        require(fits, f"columns: {x} has an odd number of rows, or dims that are not known")
        return x.with_shape(*lead, int(k) * packed, int(n) // packed)

    @staticmethod
    def reference(x: Any) -> Any:
        return by_columns(x)

    flops = free
    samples = cases("i8[3,6,64]@-127:128", "u8[6,32]@0:256", "f32[6,2]")


@op
class dequantize_columns:
    """w [.., N, K] from codes and scales that `columns` transposed to [.., K, N] (4-bit codes:
    [.., K, N/2]) and [.., G, N]"""

    budget = Budget(1, 0, "one product, rounded once")
    fold = False

    @staticmethod
    def infer(codes: Type, scales: Type, *, to: str) -> Type:
        fits = codes.rank == scales.rank >= 2 and codes.dtype in PACKED
        require(fits, f"dequantize_columns: scales {scales} do not fit codes {codes}")
        (*lead, k, n), (*scale_lead, groups, count) = codes.shape, scales.shape
        rows = int(n) * PACKED[codes.dtype]
        fits = (
            lead == scale_lead and rows == count and int(groups) > 0 and int(k) % int(groups) == 0
        )
        require(fits, f"dequantize_columns: scales {scales} do not fit codes {codes}")
        return Type(to, (*lead, rows, k))

    @staticmethod
    def reference(codes: Any, scales: Any, *, to: str) -> Any:
        return dequantize_codes(by_rows(codes), scales.mT, torch_dtype(to))

    flops, traffic = VIEW
    samples = cases(
        "i8[64,6]@-127:128 f32[1,6]",
        "u8[2,32,3]@0:256 f32[2,2,6]",
        "f8e4m3[48,4] f32[1,4]",
        to="f32",
    )


@op
class tiles:
    """Codes or scales of w [.., N, K] interleaved in tiles of 16 rows, by 4-byte words (or single
    scales), so that a SIMD vector has one lane per row"""

    budget = MOVES

    @staticmethod
    def infer(x: Type) -> Type:
        row = int(x.shape[-1]) * ITEMSIZE[x.dtype]
        fits = int(x.shape[-2]) % TILE == 0 and (x.dtype in FLOATS or row % WORD == 0)
        require(fits, f"tiles: {x} has no whole tiles of {TILE} rows and {WORD} bytes")
        return x

    @staticmethod
    def reference(x: Any) -> Any:
        return to_tiles(x)

    flops = free
    samples = cases(
        "i8[3,16,64]@-127:128", "u8[32,32]@0:256", "i16[16,86]@-32768:32768", "f32[16,2]"
    )


@op
class dequantize_tiles:
    """dequantize(codes, scales), both in the layout of `tiles`"""

    budget = Budget(1, 0, "one product, rounded once")
    fold = False

    @staticmethod
    def infer(codes: Type, scales: Type, *, to: str) -> Type:
        _require_fit("dequantize_tiles", codes, scales)
        require(fits_tiles(codes, scales), f"dequantize_tiles: {codes}, {scales} fit no tiles")
        return Type(to, (*codes.shape[:-1], _values(codes)))

    @staticmethod
    def reference(codes: Any, scales: Any, *, to: str) -> Any:
        return dequantize_codes(from_tiles(codes), from_tiles(scales), torch_dtype(to))

    flops, traffic = VIEW
    samples = cases(
        "i8[16,64]@-127:128 f32[16,1]",
        "u8[2,32,32]@0:256 f32[2,32,2]",
        "i32[16,70]@-2147483648:2147483648 f32[16,4]",
        to="f32",
    )


@op
class embedding_quantized:
    """embedding(dequantize(codes, scales), ids); reads only the gathered rows"""

    budget = Budget(2, 0, "two products, each rounded once")
    kind = "embed"
    rows = (2,)
    fold = False

    @staticmethod
    def infer(codes: Type, scales: Type, ids: Type, *, scale: float, to: str) -> Type:
        _require_fit("embedding_quantized", codes, scales)
        why = f"expected codes of rank 2 and ids i64, found {codes}, ids {ids}"
        require(codes.rank == 2 and ids.dtype == "i64", f"embedding_quantized: {why}")
        return Type(to, (*ids.shape, _values(codes)))

    @staticmethod
    def reference(codes: Any, scales: Any, ids: Any, *, scale: float, to: str) -> Any:
        rows = dequantize_codes(take_rows(codes, ids), scales[ids], torch_dtype(to))
        return rows * torch.tensor(scale).to(rows.dtype)

    @staticmethod
    def traffic(ins: Types, outs: Types, **_: Any) -> Traffic:
        """Count only the gathered rows."""
        codes, scales, ids = ins
        per_row = (int(t.shape[1]) * ITEMSIZE[t.dtype] for t in (codes, scales))
        return (*(n * ids.numel() for n in per_row), ids.nbytes()), (outs[0].nbytes(),)

    samples = cases(
        "i8[11,64]@-127:128 f32[11,1] i64[2,3]@0:11 {scale=39.191835884530846}",
        "u8[11,32]@0:256 f32[11,2] i64[2,3]@0:11 {scale=16.0}",
        "i64[11,13]@-4611686018427387904:4611686018427387904 f32[11,1] i64[2,3]@0:11 {scale=16.0}",
        "i16[11,86]@-32768:32768 f32[11,2] i64[2,3]@0:11 {scale=16.0}",
        "u16[11,20]@0:65536 f16[11,2] i64[2,3]@0:11 {scale=16.0}",
        "u32[11,6]@0:4294967296 f16[11,2] i64[2,3]@0:11 {scale=16.0}",
        "u64[11,2]@0:9223372036854775807 f16[11,1] i64[2,3]@0:11 {scale=16.0}",
        "nl4[11,68]@0:256 bf16[11,1] i64[2,3]@0:11 {scale=16.0}",
        to="f32",
    )


@op
class embedding_tiles:
    """embedding_quantized(codes, scales, ids) of codes and scales in tiles"""

    budget = Budget(2, 0, "two products, each rounded once")
    kind = "embed"
    rows = (2,)
    fold = False

    @staticmethod
    def infer(codes: Type, scales: Type, ids: Type, *, scale: float, to: str) -> Type:
        require(fits_tiles(codes, scales), f"embedding_tiles: {codes}, {scales} fit no tiles")
        return embedding_quantized.infer(codes, scales, ids, scale=scale, to=to)

    @staticmethod
    def reference(codes: Any, scales: Any, ids: Any, *, scale: float, to: str) -> Any:
        rows = rows_from_tiles(codes, ids), rows_from_tiles(scales, ids)
        out = dequantize_codes(*rows, torch_dtype(to))
        return out * torch.tensor(scale).to(out.dtype)

    traffic = embedding_quantized.traffic
    samples = cases("u8[32,32]@0:256 f32[32,2] i64[2,3]@0:32", scale=16.0, to="f32")


@op
class fake_quantize:
    """x quantised dynamically to 8 bits and dequantised: code * scale, rounded once

    `int8`: a scale per 32 values, the last group may be shorter; `fp8` (e4m3): one per row. A
    scale is the absolute maximum divided by the largest code, in fp32.
    """

    budget = Budget(1, 0, "a value may be rounded the other way, by one step", grid=2.0**-3)
    rows = (0,)

    @staticmethod
    def infer(x: Type, *, form: str) -> Type:
        names = ", ".join(ACTIVATIONS)
        require(form in ACTIVATIONS, f"fake_quantize: form {form!r}: expected one of {names}")
        fits = x.dtype in FLOATS and x.rank > 0 and isinstance(x.shape[-1], int)
        require(fits, f"fake_quantize: {x} has no rows of a known size")
        return x

    @staticmethod
    def reference(x: Any, *, form: str) -> Any:
        return fake_quantize_values(x, form)

    samples = [Sample(("f32[2,3,80]",), {"form": form}) for form in ACTIVATIONS]
