"""Quantise and dequantise weights: codes, and a scale per row or per group of a row.

w = round(code * scale), rounded once to the model's dtype. Codes are `i8` [.., K], `f8e4m3`
[.., K], or packed into blocks (layouts.py) of elements of a dtype that identifies the format.
Scales are [.., G]: one for K/G consecutive codes.

A code of `int6`, `int3k` and `fp4` is the product of a value and a factor that 16 values share: an
8-bit integer, in `fp4` an e4m3 float. The bits of `fp4` and `iq4` are indices of a table of values,
as are those of `nl4`, `nl3` and `nl2`: there, a group of 32 values shares a 7-bit integer and a bit
that adds a constant shift to each value, and a code is the shifted value times the integer
(grids.py).

Formats with minima: w = round(code * scale - integer * minimum). A code is the product of an
unsigned value and an integer; the values that share it share the integer of their minimum too (32
in `uint4` and `uint5`, 16 in `uint2`; `min4` and `min5` have no integers). Scales are pairs,
[.., 2G]: a scale and a minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .base import upcast
from .grids import (
    GROUP,
    INTEGER_MAX,
    fit_groups,
    group_bytes,
    integers_of,
    level_indices,
    nearest_level,
)
from .layouts import LAYOUTS, Layout, in_nibble_pairs, in_six_bits, nibble_pairs, six_bits
from .types import ITEMSIZE, dtype_name, torch, torch_dtype

#: elements that `quantize` processes at once: they fit into a core's cache
PIECE = 1 << 18


@dataclass(frozen=True)
class QuantFormat:
    """A quantised format: dtype of its codes, largest code (with minima: largest value), bit
    layout. `share`: group sizes are multiples of it; `scales`: number per group, 1, or 2 with a
    minimum; `shared`: number of values that share an integer (`fp4`: an e4m3 scale) of at most
    `max_integer`, 0: none; `table`: the value of each index that is stored, ascending but in `fp4`;
    `shift`: a constant that a group of values with a shared integer may add to each value."""

    codes: str
    largest: float
    layout: Layout
    share: int = 1
    scales: int = 1
    shared: int = 0
    max_integer: int = 1
    table: tuple[int, ...] = ()
    shift: int = 0

    @property
    def block_values(self) -> int:
        return self.layout.values

    @property
    def block_elements(self) -> int:
        return self.layout.nbytes // ITEMSIZE[self.codes]

    def elements_for(self, values: int) -> int:
        """Return the number of elements of the codes' dtype that store `values` values, whole
        blocks."""
        return values // self.block_values * self.block_elements

    def values_in(self, elements: int) -> int:
        """Return the number of values in `elements` elements of the codes' dtype; 0 if these are
        not whole blocks."""
        blocks, partial = divmod(elements, self.block_elements)
        return 0 if partial else blocks * self.block_values


#: values of `iq4`, ggml's IQ4_NL
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: values of `fp4`, twice those of e2m1 (OCP Microscaling Formats 1.0)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
#: values of the nonuniform formats, dense near zero, as weights are; and their shift
_NONUNIFORM = {
    "nl4": (_IQ4, 4),
    "nl3": ((-63, -40, -23, -10, 1, 13, 28, 47), 4),
    "nl2": ((-31, -13, 1, 17), 5),
}
#: values per block of the C kernels; groups of tiled weights are multiples of it
MINIMA_GROUP = 32
FORMATS = {
    "int8": QuantFormat("i8", 127, LAYOUTS["int8"]),
    "int6": QuantFormat("i64", 31 * 127, LAYOUTS["int6"], 16, shared=16, max_integer=127),
    "int5": QuantFormat("u16", 15, LAYOUTS["int5"]),
    "uint5": QuantFormat("i16", 31, LAYOUTS["uint5"], 32, 2, 32, 63),
    "min5": QuantFormat("b1", 31, LAYOUTS["min5"], 32, 2),
    "int4": QuantFormat("u8", 8, LAYOUTS["int4"]),
    "int3": QuantFormat("u32", 3, LAYOUTS["int3"]),
    "int2": QuantFormat("u64", 1, LAYOUTS["int2"]),
    "uint4": QuantFormat("i32", 15, LAYOUTS["uint4"], 32, 2, 32, 63),
    "min4": QuantFormat("b4", 15, LAYOUTS["min4"], 32, 2),
    "iq4": QuantFormat("b8", 127, LAYOUTS["iq4"], 32, table=_IQ4),
    "fp4": QuantFormat("f4", 12 * 448, LAYOUTS["fp4"], 16, shared=16, max_integer=448, table=_FP4),
    "int3k": QuantFormat("b2", 3 * 31, LAYOUTS["int3k"], 16, shared=16, max_integer=31),
    "uint2": QuantFormat("b16", 3, LAYOUTS["uint2"], 16, 2, 16, 15),
    "fp8": QuantFormat("f8e4m3", 448, LAYOUTS["fp8"]),
    **{
        name: QuantFormat(
            *(name, -table[0] * INTEGER_MAX, LAYOUTS[name], GROUP),
            shared=GROUP,
            max_integer=INTEGER_MAX,
            table=table,
            shift=shift,
        )
        for name, (table, shift) in _NONUNIFORM.items()
    },
}
#: dtype of codes -> name of the format
FORMAT_OF = {f.codes: name for name, f in FORMATS.items()}
#: dtype of codes whose blocks are one byte -> values in it
PACKED = {f.codes: f.block_values for f in FORMATS.values() if f.layout.nbytes == 1}
#: format of quantised activations -> values that share a scale, 0: the row
ACTIVATIONS = {"int8": 32, "fp8": 0}
#: formats that are converted to int8 for matmuls that do not support them
AS_BYTES = ("int6", "int5", "iq4", "int3k", "int3", "int2", "fp4", "nl4", "nl3", "nl2")
#: formats that are converted to int8 to be packed with a weight of a different format
JOINED_AS_BYTES = ("int6", "int5", "iq4", "int3k")
#: format -> format with the same codes as 8-bit integers
SAME_CODES = dict.fromkeys(("int5", "iq4", "int3", "int2"), "int8")
#: xor that converts both codes of a byte between code + 8 and two's complement
COMPLEMENT = 0x88


def values_per_row(codes: Any) -> int:
    """Return the number of quantised values per row of a tensor of codes."""
    return _format_of(codes).values_in(codes.shape[-1])


# --- codes to values ---------------------------------------------------------------------------


def dequantize_codes(codes: Any, scales: Any, dtype: Any) -> Any:
    """Return the dequantised weight in a torch dtype; in float64 if the scales are."""
    fmt = _format_of(codes)
    values, factors, minima = unpack_codes(codes), upcast(scales), None
    if fmt.scales > 1:
        factors, minima = factors.unflatten(-1, (-1, 2)).unbind(-1)
    integers = shared_integers(codes)
    if integers:
        exact = torch.float32 if integers[0].is_floating_point() else torch.int16
        values = apply_scales(values.to(exact), integers[0].to(exact))
    w = apply_scales(values.to(factors.dtype), factors)
    if minima is not None:
        below = apply_scales(integers[1].to(w.dtype), minima) if integers else minima
        w = (w.unflatten(-1, (below.shape[-1], -1)) - below[..., None]).flatten(-2)
    return w if w.dtype == torch.float64 else w.to(dtype)


def apply_scales(values: Any, factors: Any) -> Any:
    """Multiply values [.., K] by factors [.., G], one per group of K/G."""
    return (values.unflatten(-1, (factors.shape[-1], -1)) * factors[..., None]).flatten(-2)


def fake_quantize_values(x: Any, fmt: str) -> Any:
    width = x.shape[-1]
    group = ACTIVATIONS[fmt] or width
    padded = torch.nn.functional.pad(x, (0, -width % group)) if width % group else x
    codes, scales = quantize_values(padded, fmt, group, "f32")
    return dequantize_codes(codes, scales, x.dtype)[..., :width]


def pack_codes(values: Any, fmt: str, integers: Any = None) -> Any:
    """Pack values [.., K] (`fp4`: indices of its table), and the bytes of their shared integers if
    the format has them, into codes [.., K / block_values * block_elements]."""
    layout = FORMATS[fmt].layout
    if FORMATS[fmt].table and fmt != "fp4":
        values = level_indices(values, FORMATS[fmt].table)
    data = (values + layout.zero).to(torch.uint8).unflatten(-1, (-1, layout.values))
    fields = {} if integers is None else {"integers": integers.unflatten(-1, (data.shape[-2], -1))}
    return layout.write(data, **fields).flatten(-2).view(torch_dtype(FORMATS[fmt].codes))


def integer_format(bits: int, width: int, group: int = 0) -> str:
    """Return the format of the fewest bits for integers of `bits` bits in rows of `width` values,
    in groups of `group` that share a scale (0: the row); int8 if no narrower one fits."""
    for name in ("int2", "int3", "int4", "int5", "int6"):
        layout = FORMATS[name].layout
        fits = name != "int6" or (group or width) % layout.values == 0
        if 1 << bits - 1 <= layout.zero and width % layout.values == 0 and fits:
            return name
    return "int8"


def pack_integers(values: Any, fmt: str) -> Any:
    """Pack integers i8 [.., K] into a format that `integer_format` returns."""
    if fmt == "int8":
        return values
    integers = torch.ones_like(values[..., :: FORMATS[fmt].shared or 1]).view(torch.uint8)
    return pack_codes(values, fmt, integers if FORMATS[fmt].shared else None)


def unpack_codes(codes: Any) -> Any:
    """Unpack codes to values [.., K]: i8, or u8 for formats with minima; int8 and fp8 unchanged."""
    fmt = _format_of(codes)
    if fmt.block_values == 1:
        return codes
    values = fmt.layout.read(_blocks(codes, fmt)).flatten(-2)
    if fmt.table:
        table = torch.tensor(fmt.table, dtype=torch.int8, device=codes.device)
        levels = table.index_select(0, values.int().flatten()).view_as(values)
        return _add_shift(levels, codes) if fmt.shift else levels
    return values.to(torch.int8) - fmt.layout.zero if fmt.layout.zero else values


def shared_integers(codes: Any) -> tuple[Any, ...]:
    """Return a tuple of factors [.., K/shared] that `shared` values have in common: one of i8, for
    fp4 of f32; for formats with minima two of u8, of scales and of minima; () for formats without
    shared integers."""
    fmt = _format_of(codes)
    if not fmt.shared:
        return ()
    data = _integer_bytes(codes)
    if fmt.scales > 1:
        return PAIRS_OF_INTEGERS[fmt.shared][0](data)
    if fmt is FORMATS["fp4"]:
        return (data.view(torch.float8_e4m3fn).float(),)
    return (data.view(torch.int8) >> 1 if fmt.shift else data.view(torch.int8),)


def _integer_bytes(codes: Any) -> Any:
    fmt = _format_of(codes)
    return fmt.layout.split(_blocks(codes, fmt))["integers"].flatten(-2)


def shifts_of(codes: Any) -> Any:
    """Return the shift that each group of 32 adds to its values, i8 [.., K/32]."""
    return (_integer_bytes(codes) & 1).to(torch.int8) * _format_of(codes).shift


def _add_shift(values: Any, codes: Any) -> Any:
    return (values.unflatten(-1, (-1, GROUP)) + shifts_of(codes)[..., None]).flatten(-2)


#: values that share a pair of integers (scale, minimum) -> functions that unpack and pack pairs
PAIRS_OF_INTEGERS = {32: (six_bits, in_six_bits), 16: (nibble_pairs, in_nibble_pairs)}


def steps_of(codes: Any, scales: Any) -> tuple[Any, Any]:
    """Return step and shift, f32 [.., G], for each group of values that share them, in a format
    without minima: w = step * (value + shift). Steps of 0 become 1."""
    fmt, steps = _format_of(codes), upcast(scales)
    for integers in shared_integers(codes):
        steps = apply_scales(integers, steps)
    shift = shifts_of(codes).to(steps.dtype) if fmt.shift else torch.zeros_like(steps)
    return steps.where(steps != 0, 1.0), shift


def round_to_grid(x: Any, step: Any, shift: Any, name: str) -> Any:
    """Return for each element of x [..] the nearest step * (value + shift), where value is one of
    the format `name`."""
    y, table = x / step - shift, FORMATS[name].table
    values = nearest_level(y, table) if table else y.round().clamp(*integer_range(name))
    return (values + shift) * step


def integer_range(name: str) -> tuple[int, int]:
    """Return the smallest and largest value of a format whose stored bits are integers."""
    zero = FORMATS[name].layout.zero
    return (-zero, zero - 1) if zero else (-127, 127)


def with_values(codes: Any, values: Any) -> Any:
    """Return the codes with other values [N, K] (`fp4`: indices), and the same shared integers."""
    integers = _integer_bytes(codes) if _format_of(codes).shared else None
    return pack_codes(values.to(torch.int16), FORMAT_OF[dtype_name(codes.dtype)], integers)


def take_rows(codes: Any, ids: Any) -> Any:
    """Gather rows of codes [N, E], as bytes, since torch cannot index some of the codes' dtypes. A
    table that is no tensor (RowTable in weights/pack.py, read by rows) is indexed as it is."""
    if not isinstance(codes, torch.Tensor):
        return codes[ids]
    return codes.view(torch.uint8)[ids].view(codes.dtype)


def _format_of(codes: Any) -> QuantFormat:
    return FORMATS[FORMAT_OF.get(dtype_name(codes.dtype), "fp8")]


def _blocks(codes: Any, fmt: QuantFormat) -> Any:
    return codes.view(torch.uint8).unflatten(-1, (-1, fmt.layout.nbytes))


def by_columns(x: Any) -> Any:
    """Transpose codes or scales [.., N, K] to [.., K, N]; see the op `columns`."""
    if x.dtype != torch.uint8:
        return x.mT.contiguous()
    return pack_codes(unpack_codes(x).mT, "int4") ^ COMPLEMENT


def by_rows(x: Any) -> Any:
    """Invert `by_columns`."""
    return pack_codes(unpack_codes(x ^ COMPLEMENT).mT, "int4") if x.dtype == torch.uint8 else x.mT


#: rows of a tile, consecutive bytes of each row
TILE, WORD = 16, 4


def fits_tiles(codes: Any, scales: Any) -> bool:
    """Return whether a weight with these types of codes and scales can be tiled: the rows fill
    tiles, and groups are multiples of 32."""
    fmt = FORMAT_OF.get(codes.dtype, "")
    if not fmt or not all(isinstance(d, int) for d in codes.shape):
        return False
    *_, rows, elements = codes.shape
    groups = int(scales.shape[-1]) // FORMATS[fmt].scales
    values = FORMATS[fmt].values_in(elements)
    return rows % TILE == 0 and values > 0 and values % (MINIMA_GROUP * groups) == 0


def to_tiles(x: Any) -> Any:
    """Interleave codes or scales [.., N, E]: the first 4-byte words (or scales) of each 16 rows,
    then the second ones, and so on. Shape and dtype stay."""
    parts = _tile_parts(x)
    return parts.unflatten(-2, (-1, TILE)).mT.contiguous().view(parts.shape).view(x.dtype)


def from_tiles(x: Any) -> Any:
    """Invert `to_tiles`."""
    parts = _tile_parts(x)
    *lead, rows, words = parts.shape
    tiles = parts.view(*lead, rows // TILE, words, TILE)
    return tiles.mT.contiguous().view(parts.shape).view(x.dtype)


def rows_from_tiles(x: Any, ids: Any) -> Any:
    """Gather rows `ids` of tiled codes or scales [N, E]: [*ids.shape, E]."""
    parts = _tile_parts(x)
    tiles = parts.view(parts.shape[0] // TILE, parts.shape[1], TILE)
    return tiles[ids // TILE, :, ids % TILE].contiguous().view(x.dtype)


def _tile_parts(x: Any) -> Any:
    """Return codes as 4-byte words, scales unchanged."""
    return x.contiguous().view(torch.int32) if dtype_name(x.dtype) in FORMAT_OF else x.contiguous()


# --- values to codes ---------------------------------------------------------------------------


def quantize_values(
    w: Any, fmt: str, group: int, scale: str, moments: Any = None, fit: Any = fit_groups
) -> tuple[Any, Any]:
    """Quantise rows [.., K] to codes and scales: `group` values share a scale of IR dtype `scale`.
    For float64, scales are rounded to that dtype too, but they and fp8 codes stay float64.
    `moments` [K] weight the squared error of each column in int4, nl4, nl3 and nl2; other formats
    ignore them. `fit`: an implementation of `fit_groups`."""
    x = upcast(w).unflatten(-1, (-1, group))
    dtype = torch_dtype(scale)
    if moments is not None:
        moments = moments.to(x.dtype).unflatten(-1, (-1, group))
    if FORMATS[fmt].scales > 1:
        stored = torch.float64 if w.dtype == torch.float64 else dtype
        return _quantize_with_minima(x, fmt, stored, dtype)
    if FORMATS[fmt].shift:
        codes, scales = _quantize_nonuniform(x, fmt, dtype, moments, fit)
        return codes, scales if w.dtype == torch.float64 else scales.to(dtype)
    if fmt == "int4":
        scales = int4_scales(x, dtype, moments)
    else:
        scales = _round_scales(x.abs().amax(-1) / FORMATS[fmt].largest, dtype)
    y = x / scales[..., None]
    stored = scales if w.dtype == torch.float64 else scales.to(dtype)
    codes = _CODES[fmt](y).flatten(-2)
    return (codes.to(w.dtype) if fmt == "fp8" and w.dtype == torch.float64 else codes), stored


def _with_integers(name: str, y: Any) -> Any:
    """Return the codes of y [n, G, g], already divided by its scales, with the smallest shared
    integers that avoid clipping; packed row by row, [n, 1, elements]."""
    fmt = FORMATS[name]
    max_value = fmt.largest // fmt.max_integer
    shared = y.flatten(-2).unflatten(-1, (-1, fmt.shared))
    integers = (shared.abs().amax(-1) / max_value).ceil().clamp(1, fmt.max_integer)
    values = (shared / integers[..., None]).round().clamp(-max_value - 1, max_value)
    shared = integers.to(torch.int8).view(torch.uint8)
    return pack_codes(values.flatten(-2), name, shared)[:, None]


def _fp4(y: Any) -> Any:
    """Return fp4 codes of y [n, G, g], already divided by its scales, packed [n, 1, bytes]: an e4m3
    factor per 16 values, which maps their absolute maximum to about 12, the table's; then the
    nearest values of the table, of two equally near the one nearer to 0."""
    shared = y.flatten(-2).unflatten(-1, (-1, FORMATS["fp4"].shared))
    scales = (shared.abs().amax(-1) / max(_FP4)).to(torch.float8_e4m3fn)
    x = shared / scales.to(y.dtype).clamp(min=2.0**-9)[..., None]
    table = torch.tensor(_FP4[:8]).to(y)
    nibbles = torch.bucketize(x.abs(), (table[1:] + table[:-1]) / 2) + 8 * (x < 0)
    return pack_codes(nibbles.flatten(-2), "fp4", scales.view(torch.uint8))[:, None]


def _from_table(y: Any) -> Any:
    """Return iq4 codes of y [n, G, g], already divided by its scales: the nearest values."""
    table = torch.tensor(_IQ4).to(y)
    nearest = torch.bucketize(y.flatten(-2), (table[1:] + table[:-1]) / 2)
    return pack_codes(table[nearest], "iq4")[:, None]


def _integers(form: str, y: Any) -> Any:
    """Return the codes of y [n, G, g], already divided by its scales, packed [n, 1, elements]."""
    zero = FORMATS[form].layout.zero
    return pack_codes(y.round().clamp(-zero, zero - 1).flatten(-2), form)[:, None]


_CODES: dict[str, Callable[[Any], Any]] = {
    "int8": lambda y: y.round().clamp(-127, 127).to(torch.int8),
    **{form: partial(_with_integers, form) for form in ("int6", "int3k")},
    **{form: partial(_integers, form) for form in ("int5", "int4", "int3", "int2")},
    "iq4": _from_table,
    "fp4": _fp4,
    "fp8": lambda y: y.clamp(-448, 448).to(torch.float8_e4m3fn),
}


def _quantize_nonuniform(x: Any, name: str, dtype: Any, moments: Any, fit: Any) -> tuple[Any, Any]:
    """Return the codes of groups x [n, G, g], and their scales rounded to `dtype`."""
    fmt, parts = FORMATS[name], x.unflatten(-1, (-1, GROUP))
    by = None if moments is None else moments.unflatten(-1, (-1, GROUP))
    scales, shift = fit(parts, fmt.table, fmt.shift, by)
    integers, rows = integers_of(scales, dtype)
    step = (integers * rows).where(integers != 0, 1.0)[..., None]
    values = nearest_level(parts / step - shift[..., None], fmt.table)
    codes = pack_codes(values.flatten(1), name, group_bytes(integers, shift).flatten(1))
    return codes, rows.flatten(1)


def _quantize_with_minima(x: Any, fmt: str, scale_dtype: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the codes of groups x [n, G, g], and pairs of scale and minimum [n, 2 G], rounded to
    `dtype` and stored in `scale_dtype`."""
    max_value, max_integer = FORMATS[fmt].largest, FORMATS[fmt].max_integer
    shared = FORMATS[fmt].shared or x.shape[-1]
    parts = x.unflatten(-1, (-1, shared))
    targets = _fit_scale_minimum(parts, max_value)
    if not FORMATS[fmt].shared:
        pairs = [t.squeeze(-1).to(dtype).to(t.dtype) for t in targets]
        step, minimum = (p[..., None] for p in pairs)
        values, packed = _values_above(parts, step, minimum, max_value), None
    else:
        pairs = [_round_scales(t.amax(-1) / max_integer, dtype) for t in targets]
        integers = [
            (t / p[..., None]).round().clamp(0, max_integer)
            for t, p in zip(targets, pairs, strict=True)
        ]
        step, minimum = (i * p[..., None] for i, p in zip(integers, pairs, strict=True))
        values = _values_above(parts, step, minimum, max_value)
        packed = PAIRS_OF_INTEGERS[shared][1](*(i.flatten(1) for i in integers))
    codes = pack_codes(values.flatten(1), fmt, packed)
    return codes, torch.stack(pairs, -1).flatten(1).to(scale_dtype)


def _values_above(x: Any, step: Any, minimum: Any, max_value: float) -> Any:
    """Return the values in 0..max_value with value * step - minimum nearest to x [.., n]."""
    divisor = step.where(step > 0, 1.0)
    return ((x + minimum[..., None]) / divisor[..., None]).round().clamp(0, max_value)


def _fit_scale_minimum(x: Any, max_value: float) -> tuple[Any, Any]:
    """Return a scale and a minimum [..] for x [.., n]: those that cover its range, refined by a few
    least squares fits with fixed values."""
    minimum = (-x.amin(-1)).clamp(min=0)
    step = (x.amax(-1) + minimum).clamp(min=0) / max_value
    mean_x = x.mean(-1)
    for _ in range(3):
        q = _values_above(x, step, minimum, max_value)
        mean_q, dot, square = q.mean(-1), (q * x).mean(-1), (q * q).mean(-1)
        spread = square - mean_q * mean_q
        slope = (dot - mean_q * mean_x) / spread.where(spread > 0, 1.0)
        minimum = slope * mean_q - mean_x
        # The fit through zero, if the best minimum has the wrong sign.
        through_zero = dot / square.where(square > 0, 1.0)
        step = slope.where(minimum > 0, through_zero).clamp(min=0)
        minimum = minimum.clamp(min=0)
    return step, minimum


def _round_scales(scales: Any, dtype: Any) -> Any:
    """Round scales to `dtype`; zeros become 1, so that their codes are zero."""
    rounded = scales.to(dtype).to(scales.dtype)
    return rounded.where(rounded != 0, 1.0)


#: candidate codes of a group's extremum in weights trained for a 4-bit grid (QAT)
_EXTREMES = (-8, 7, -7, 6, -6, 5, -5, 4, -4, 3, -3, 2, -2, 1, -1)
#: weights not trained for a grid: divisors of the extremum that start the search for a scale
_STARTS = (-8.0, -7.0, 7.4)
#: the same with weighted errors: an extremum of small weight may be clipped, or get a small code
_WEIGHTED_STARTS = tuple(-2.8 - 0.8 * i for i in range(12))
#: number of leading values of a group that are tested first: they exclude most groups that are on
#: no 4-bit grid
_FIRST = 3
#: largest relative error of a grid value after its scale and the value are rounded to bf16
_NEAR = 2.0**-6


def int4_scales(x: Any, dtype: Any, moments: Any = None) -> Any:
    """Return a scale [n, G] for each group of x [n, G, g].

    If `grid_scales` finds one that reproduces the group, that scale; else the best of a few
    candidates, refined by least squares with fixed codes. With `moments` [G, g], more candidates,
    judged by squared errors times moments.
    """
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = _fit_scales(x, extreme, dtype)
    if moments is not None:
        scales = _fit_weighted_scales(x, extreme, dtype, moments, scales)
    on, grid = grid_scales(x, extreme, dtype)
    return torch.where(on, grid, scales)


def grid_scales(x: Any, extreme: Any, dtype: Any) -> tuple[Any, Any]:
    """Return whether a scale was found with which each group of x [n, G, g] equals bf16(code *
    scale) bit for bit, and that scale (1 if none was found, and for zeros)."""
    groups, ends = x.flatten(0, 1), extreme.flatten()
    on, scales = ends == 0, torch.ones_like(ends)
    tried = ends[:, None] / torch.tensor(_EXTREMES).to(ends)
    # The first values already exclude most groups that are not on a grid.
    first = groups[:, :_FIRST].t()[..., None]
    near = (_on_grid_of(tried, first) - first).abs_() <= first.abs() * _NEAR
    group, nth = near.all(0).nonzero().unbind(-1)
    for d in _neighbours(tried[group, nth], dtype):
        good = _matches(groups[group], d) & ~on[group]
        # If several candidates match, take the first.
        best = torch.full_like(ends, len(_EXTREMES)).long()
        best.scatter_reduce_(0, group[good], nth[good], "amin")
        good &= best[group] == nth
        scales[group[good]], on[group[good]] = d[good], True
    return on.view_as(extreme), scales.view_as(extreme)


def _on_grid_of(d: Any, w: Any) -> Any:
    return (w / d).round_().clamp_(-8, 7).mul_(d)


def _matches(w: Any, d: Any) -> Any:
    """Return whether each row of w [n, k] equals bf16(code * d) for its scale d [n]."""
    return (_on_grid_of(d[:, None], w).to(torch.bfloat16).to(w.dtype) == w).all(-1) & (d != 0)


def _neighbours(d: Any, dtype: Any) -> list[Any]:
    """Return d rounded to a dtype, and its neighbours of larger and of smaller magnitude."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    near = d.to(dtype).view(ints)
    return [n.view(dtype).to(d.dtype) for n in (near, near + 1, near - 1)]


def _fit_scales(x: Any, extreme: Any, dtype: Any) -> Any:
    best = error = None
    for start in _STARTS:
        d = _round_scales(extreme / start, dtype)
        for _ in range(2):
            q = (x / d[..., None]).round_().clamp_(-8, 7)
            dot, square = (x * q).sum(-1), (q * q).sum(-1)
            d = _round_scales(torch.where(square > 0, dot / square.clamp(min=1), d), dtype)
        q = (x / d[..., None]).round_().clamp_(-8, 7)
        e = (q.mul_(d[..., None]).sub_(x)).square_().sum(-1)
        best = d if best is None else torch.where(e < error, d, best)
        error = e if error is None else torch.minimum(e, error)
    return best


def _fit_weighted_scales(x: Any, extreme: Any, dtype: Any, moments: Any, plain: Any) -> Any:
    """Return for each group a scale of less weighted error than its `plain` one, or else that one.

    The codes of each start are judged with their optimal scale, dot / square, whose error is the
    sum of x^2 minus dot^2 / square: one rounding per start.
    """
    weighed, inverse = x * moments, 1 / extreme.where(extreme != 0, 1.0)

    def best_for(factor: Any) -> tuple[Any, Any]:
        """Return the optimal scale of the codes round(x * factor), and its gain."""
        q = (x * factor[..., None]).round_().clamp_(-8, 7)
        dot = (q * weighed).sum(-1)
        scale = dot / q.square_().mul_(moments).sum(-1).clamp(min=1e-30)
        return scale, dot * scale

    best, best_gain = plain, torch.zeros_like(plain)
    for start in _WEIGHTED_STARTS:
        scale, gain = best_for(start * inverse)
        best, best_gain = torch.where(gain > best_gain, scale, best), torch.maximum(gain, best_gain)
    best = _round_scales(best_for(1 / _round_scales(best, dtype))[0], dtype)
    errors = [
        _on_grid_of(d[..., None], x).sub_(x).square_().mul_(moments).sum(-1) for d in (best, plain)
    ]
    return torch.where(errors[0] < errors[1], best, plain)
