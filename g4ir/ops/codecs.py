"""Quantised weights: codes, and a scale for each row or each group of a row.

One definition serves every format: w = round(code * scale), rounded once to the model's dtype.
Codes are `i8` [.., K], `f8e4m3` [.., K], or lie in blocks as layouts.py has them, each in as many
elements of a dtype of its own. Scales are [.., G]: each serves K/G codes in a row.

Codes of `int6` are products: of a value of 6 bits and an integer of 8, which 16 codes share.

`uint4` and `uint5` have minima: w = round(code * scale - integer * minimum). A code is a product
here too, of a value from 0 on and an integer of 6 bits; 32 codes share that one and the integer of
their minimum. Scales are pairs, [.., 2G]: a scale and a minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .base import wide
from .layouts import LAYOUTS, Layout, in_six_bits, six_bits
from .types import ITEMSIZE, dtype_name, torch, torch_dtype

#: elements that `quantize` looks at together: few enough to stay in a core's cache
PIECE = 1 << 18


@dataclass(frozen=True)
class Form:
    """A quantised format: dtype of the codes, the largest code, codes that a group is a multiple
    of, its scales (one, or two if the second is a minimum), and how codes lie in bytes."""

    codes: str
    largest: float
    layout: Layout
    share: int = 1
    scales: int = 1

    @property
    def packed(self) -> int:
        """Values of a block."""
        return self.layout.values

    @property
    def elements(self) -> int:
        """Elements of a block."""
        return self.layout.nbytes // ITEMSIZE[self.codes]

    def held(self, numbers: int) -> int:
        """Return the elements that hold so many numbers."""
        return numbers // self.packed * self.elements

    def numbers(self, held: int) -> int:
        """Return the numbers that so many elements hold; 0 where they are no whole ones."""
        return 0 if held % self.elements else held // self.elements * self.packed


#: of `int6`: codes that share an integer, the largest value and integer
SHARE, NUMBER, INTEGER = 16, 31, 127
#: of formats with minima: codes that share integers, the largest integer
EIGHTH, MOST = 32, 63
FORMS = {
    "int8": Form("i8", 127, LAYOUTS["int8"]),
    "int6": Form("i64", NUMBER * INTEGER, LAYOUTS["int6"], SHARE),
    "int5": Form("u16", 15, LAYOUTS["int5"]),
    "uint5": Form("i16", 31, LAYOUTS["uint5"], EIGHTH, 2),
    "int4": Form("u8", 8, LAYOUTS["int4"]),
    "uint4": Form("i32", 15, LAYOUTS["uint4"], EIGHTH, 2),
    "fp8": Form("f8e4m3", 448, LAYOUTS["fp8"]),
}
#: dtype of codes -> form
FORM_OF = {f.codes: name for name, f in FORMS.items()}
#: dtype of codes of one byte -> codes in it
PACKED = {f.codes: f.packed for f in FORMS.values() if f.elements == 1}
#: form that rows of a model may be rounded to -> numbers of a row that share a scale, 0: all
ACTIVATIONS = {"int8": 32, "fp8": 0}
#: forms whose scales are chosen by weighted error where a weight is calibrated
CALIBRATED = ("int4", "uint4", "uint5")
#: forms that become codes of 8 bits for products that do not take them
AS_BYTES = ("int6", "int5")
#: form -> the form that holds the same codes as integers of 8 bits
SAME_CODES = {"int5": "int8"}
#: of two codes in a byte, between code + 8 and two's complement
COMPLEMENT = 0x88


def numbers_in(codes: Any) -> int:
    """Return the numbers of a row of a tensor of codes."""
    return _form_of(codes).numbers(codes.shape[-1])


# --- codes to numbers --------------------------------------------------------------------------


def dequantized(codes: Any, scales: Any, dtype: Any) -> Any:
    """Return the numbers of codes in a dtype; float64 where scales are."""
    form = _form_of(codes)
    values, factors, minima = unpacked(codes), wide(scales), None
    least: list[Any] = []
    if form.scales > 1:
        factors, minima = factors.unflatten(-1, (-1, 2)).unbind(-1)
    if "integers" in form.layout.fields:
        integers, *least = shared_integers(codes)
        values = scaled(values.to(torch.int16), integers)
    w = scaled(values.to(factors.dtype), factors)
    for integers in least:
        below = scaled(integers.to(w.dtype), minima)
        w = (w.unflatten(-1, (-1, EIGHTH)) - below[..., None]).flatten(-2)
    return w if w.dtype == torch.float64 else w.to(dtype)


def scaled(numbers: Any, factors: Any) -> Any:
    """Return numbers [.., K] times the factors [.., G] that groups of them share."""
    return (numbers.unflatten(-1, (factors.shape[-1], -1)) * factors[..., None]).flatten(-2)


def fake_quantized(x: Any, form: str) -> Any:
    """Compute the op `fake_quantize`."""
    width = x.shape[-1]
    group = ACTIVATIONS[form] or width
    whole = torch.nn.functional.pad(x, (0, -width % group)) if width % group else x
    codes, scales = quantized(whole, form, group, "f32")
    return dequantized(codes, scales, x.dtype)[..., :width]


def packed(values: Any, form: str, integers: Any = None) -> Any:
    """Return codes of a format [.., K / block * elements] of values [.., K] and the bytes of the
    integers that they share [.., bytes], if the format has such."""
    layout = FORMS[form].layout
    data = (values + layout.zero).to(torch.uint8).unflatten(-1, (-1, layout.values))
    fields = {} if integers is None else {"integers": integers.unflatten(-1, (data.shape[-2], -1))}
    return layout.write(data, **fields).flatten(-2).view(torch_dtype(FORMS[form].codes))


def unpacked(codes: Any) -> Any:
    """Return the values of codes [.., K]: i8, u8 for formats with minima; of int8 and fp8 the codes
    themselves."""
    form = _form_of(codes)
    if form.packed == 1:
        return codes
    values = form.layout.read(_blocks(codes, form)).flatten(-2)
    return values.to(torch.int8) - form.layout.zero if form.layout.zero else values


def shared_integers(codes: Any) -> tuple[Any, ...]:
    """Return the integers that values share: i8 [.., K/16] of int6; of formats with minima u8
    [.., K/32], and as many of their minima."""
    form = _form_of(codes)
    data = form.layout.split(_blocks(codes, form))["integers"].flatten(-2)
    return six_bits(data) if form.scales > 1 else (data.view(torch.int8),)


def _form_of(codes: Any) -> Form:
    return FORMS[FORM_OF.get(dtype_name(codes.dtype), "fp8")]


def _blocks(codes: Any, form: Form) -> Any:
    return codes.view(torch.uint8).unflatten(-1, (-1, form.layout.nbytes))


def by_columns(x: Any) -> Any:
    """Return codes or scales [.., N, K] as [.., K, N]; see the op `columns`."""
    if x.dtype != torch.uint8:
        return x.mT.contiguous()
    return packed(unpacked(x).mT, "int4") ^ COMPLEMENT


def by_rows(x: Any) -> Any:
    """Return what `by_columns` was given."""
    return packed(unpacked(x ^ COMPLEMENT).mT, "int4") if x.dtype == torch.uint8 else x.mT


#: rows of a weight that lie together in tiles, and bytes of each that lie side by side
TILE, WORD = 16, 4


def fits_tiles(codes: Any, scales: Any) -> bool:
    """Whether a weight whose codes and scales have these types can lie in tiles: whole tiles, and
    scales that serve whole blocks of 32."""
    form = FORM_OF.get(codes.dtype, "")
    if not form or not all(isinstance(d, int) for d in codes.shape):
        return False
    *_, rows, held = codes.shape
    groups = int(scales.shape[-1]) // FORMS[form].scales
    numbers = FORMS[form].numbers(held)
    return rows % TILE == 0 and numbers > 0 and numbers % (EIGHTH * groups) == 0


def to_tiles(x: Any) -> Any:
    """Return codes or scales [.., N, E] in tiles: of each 16 rows the first words of 4 bytes (of
    scales the first ones), then the second ones, and so on. Shape and dtype stay."""
    parts = _tile_parts(x)
    return parts.unflatten(-2, (-1, TILE)).mT.contiguous().view(parts.shape).view(x.dtype)


def from_tiles(x: Any) -> Any:
    """Return what `to_tiles` was given."""
    parts = _tile_parts(x)
    *lead, rows, words = parts.shape
    tiles = parts.view(*lead, rows // TILE, words, TILE)
    return tiles.mT.contiguous().view(parts.shape).view(x.dtype)


def rows_from_tiles(x: Any, ids: Any) -> Any:
    """Return rows `ids` of codes or scales [N, E] that lie in tiles: [*ids.shape, E]."""
    parts = _tile_parts(x)
    tiles = parts.view(parts.shape[0] // TILE, parts.shape[1], TILE)
    return tiles[ids // TILE, :, ids % TILE].contiguous().view(x.dtype)


def _tile_parts(x: Any) -> Any:
    """Return codes as words, scales as they are."""
    import torch

    return x.contiguous().view(torch.int32) if dtype_name(x.dtype) in FORM_OF else x.contiguous()


# --- numbers to codes --------------------------------------------------------------------------


def quantized(w: Any, form: str, group: int, scale: str, moments: Any = None) -> tuple[Any, Any]:
    """Return codes and scales of rows [.., K]. float64 stays float64, but for codes in integers.
    Forms of 4 bits and those with minima weight the error of each column by its `moments` [K], if
    there are any; other forms have no use for them."""
    x = wide(w).unflatten(-1, (-1, group))
    dtype = torch_dtype(scale)
    if moments is not None:
        moments = moments.to(x.dtype).unflatten(-1, (-1, group))
    if FORMS[form].scales > 1:
        kept = torch.float64 if w.dtype == torch.float64 else dtype
        return _with_minima(x, form, kept, dtype, moments)
    if form == "int4":
        scales = int4_scales(x, dtype, moments)
    else:
        scales = _rounded(x.abs().amax(-1) / FORMS[form].largest, dtype)
    y = x / scales[..., None]
    kept = scales if w.dtype == torch.float64 else scales.to(dtype)
    codes = _CODES[form](y).flatten(-2)
    return (codes.to(w.dtype) if form == "fp8" and w.dtype == torch.float64 else codes), kept


def _int6(y: Any) -> Any:
    """Return codes of groups y [n, G, g]: those of a row as of one group."""
    shared = y.flatten(-2).unflatten(-1, (-1, SHARE))
    integers = (shared.abs().amax(-1) / NUMBER).ceil().clamp(1, INTEGER)
    numbers = (shared / integers[..., None]).round().clamp(-NUMBER - 1, NUMBER)
    shared = integers.to(torch.int8).view(torch.uint8)
    return packed(numbers.flatten(-2), "int6", shared)[:, None]


_CODES: dict[str, Callable[[Any], Any]] = {
    "int8": lambda y: y.round().clamp(-127, 127).to(torch.int8),
    "int6": _int6,
    "int5": lambda y: packed(y.round().clamp(-16, 15).flatten(-2), "int5")[:, None],
    "int4": lambda y: packed(y.round().clamp(-8, 7).flatten(-2), "int4")[:, None],
    "fp8": lambda y: y.clamp(-448, 448).to(torch.float8_e4m3fn),
}


def _with_minima(x: Any, form: str, kept: Any, dtype: Any, moments: Any = None) -> tuple[Any, Any]:
    """Return codes of groups x [n, G, g], and their scales and minima as `dtype` has them."""
    parts, most = x.unflatten(-1, (-1, EIGHTH)), FORMS[form].largest
    if moments is None:
        wanted = _above_least(parts, most)
    else:
        wanted = _weighted_above_least(parts, most, moments.unflatten(-1, (-1, EIGHTH)))
    pairs = [_rounded(t.amax(-1) / MOST, dtype) for t in wanted]
    integers = [
        (t / p[..., None]).round().clamp(0, MOST) for t, p in zip(wanted, pairs, strict=True)
    ]
    step, least = (i * p[..., None] for i, p in zip(integers, pairs, strict=True))
    numbers = _numbers_above(parts, step, least, most)
    six = in_six_bits(*(i.flatten(1) for i in integers))
    return packed(numbers.flatten(1), form, six), torch.stack(pairs, -1).flatten(1).to(kept)


def _numbers_above(x: Any, step: Any, least: Any, most: float) -> Any:
    """Return the numbers 0 to `most` for which number * step - least is nearest to x [.., 32]."""
    whole = step.where(step > 0, 1.0)
    return ((x + least[..., None]) / whole[..., None]).round().clamp(0, most)


def _above_least(x: Any, most: float, share: float = 1.0, moments: Any = None) -> tuple[Any, Any]:
    """Return a scale and a minimum [..] for the numbers of x [.., 32]: those that just hold `share`
    of their range, bettered by least squares with the numbers held fixed, a few times; weighted by
    `moments` [.., 32] if there are any."""

    def mean(t: Any) -> Any:
        return t.mean(-1) if moments is None else (t * moments).mean(-1) / moments.mean(-1)

    low, high = x.amin(-1), x.amax(-1)
    margin = (high - low) * (1 - share) / 2
    least = (-low - margin).clamp(min=0)
    step = (high - margin + least).clamp(min=0) / most
    mean_x = mean(x)
    for _ in range(3):
        q = _numbers_above(x, step, least, most)
        mean_q, dot, square = mean(q), mean(q * x), mean(q * q)
        spread = square - mean_q * mean_q
        slope = (dot - mean_q * mean_x) / spread.where(spread > 0, 1.0)
        least = slope * mean_q - mean_x
        through = dot / square.where(square > 0, 1.0)  # where the best minimum has the other sign
        step = slope.where(least > 0, through).clamp(min=0)
        least = least.clamp(min=0)
    return step, least


def _weighted_above_least(x: Any, most: float, moments: Any) -> tuple[Any, Any]:
    """Return the scale and minimum of least weighted error of those that begin with shares of the
    range: where a column counts little, the ends may be cut."""
    steps, minima = zip(*(_above_least(x, most, share, moments) for share in _SHARES), strict=True)
    pairs = zip(steps, minima, strict=True)
    errors = [_squared_error_above(x, *pair, most, moments) for pair in pairs]
    best = torch.stack(errors).argmin(0, keepdim=True)
    step, least = (torch.stack(t).gather(0, best)[0] for t in (steps, minima))
    return step, least


def _squared_error_above(x: Any, step: Any, least: Any, most: float, moments: Any) -> Any:
    made = _numbers_above(x, step, least, most).mul_(step[..., None]).sub_(least[..., None])
    return made.sub_(x).square_().mul_(moments).sum(-1)


def _rounded(scales: Any, dtype: Any) -> Any:
    """Return scales as `dtype` holds them; 1 where that is zero, so that its codes are."""
    made = scales.to(dtype).to(scales.dtype)
    return made.where(made != 0, 1.0)


#: on the grid of weights trained for 4 bits, a group's extremum has one of these codes
_EXTREMES = (-8, 7, -7, 6, -6, 5, -5, 4, -4, 3, -3, 2, -2, 1, -1)
#: elsewhere the extremum is divided by these first
_STARTS = (-8.0, -7.0, 7.4)
#: and by these where errors are weighted: an extremum that counts little may be cut, or lie low
_WEIGHTED_STARTS = tuple(-2.8 - 0.8 * i for i in range(12))
#: shares of a range that scales and minima of weighted error begin with
_SHARES = (1.0, 0.9, 0.8, 0.7)
#: numbers of a group that are looked at first
_FIRST = 3
#: how far a number of the grid and what bf16 makes of it and of its scale lie apart at most
_NEAR = 2.0**-6


def int4_scales(x: Any, dtype: Any, moments: Any = None) -> Any:
    """Return one scale [n, G] for each group of x [n, G, g].

    Where bf16(code * scale) of some scale are the numbers of a group, bit for bit, that scale;
    elsewhere the best of a few, each bettered by least squares with its codes held fixed. With
    `moments` [G, g] the best of more, by the sum of squared errors times moments.
    """
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = _fitted(x, extreme, dtype)
    if moments is not None:
        scales = _weighted(x, extreme, dtype, moments, scales)
    on, found = grid_scales(x, extreme, dtype)
    return torch.where(on, found, scales)


def grid_scales(x: Any, extreme: Any, dtype: Any) -> tuple[Any, Any]:
    """Return whether each group of x [n, G, g] lies on a 4-bit grid, and its scale there."""
    groups, ends = x.flatten(0, 1), extreme.flatten()
    on, found = ends == 0, torch.ones_like(ends)
    tried = ends[:, None] / torch.tensor(_EXTREMES).to(ends)
    # Few groups that are off it come near in their first numbers: the rest need no look.
    first = groups[:, :_FIRST].t()[..., None]
    near = (_on_grid_of(tried, first) - first).abs_() <= first.abs() * _NEAR
    group, nth = near.all(0).nonzero().unbind(-1)
    for d in _neighbours(tried[group, nth], dtype):
        good = _matches(groups[group], d) & ~on[group]
        # Of several candidates that fit, the first: the lowest of a group.
        best = torch.full_like(ends, len(_EXTREMES)).long()
        best.scatter_reduce_(0, group[good], nth[good], "amin")
        good &= best[group] == nth
        found[group[good]], on[group[good]] = d[good], True
    return on.view_as(extreme), found.view_as(extreme)


def _on_grid_of(d: Any, w: Any) -> Any:
    return (w / d).round_().clamp_(-8, 7).mul_(d)


def _matches(w: Any, d: Any) -> Any:
    """Return whether the numbers of each row of w [n, k] are bf16(code * d) for its d [n]."""
    return (_on_grid_of(d[:, None], w).to(torch.bfloat16).to(w.dtype) == w).all(-1) & (d != 0)


def _neighbours(d: Any, dtype: Any) -> list[Any]:
    """Return numbers as a dtype holds them, then those above and below each."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    near = d.to(dtype).view(ints)
    return [n.view(dtype).to(d.dtype) for n in (near, near + 1, near - 1)]


def _fitted(x: Any, extreme: Any, dtype: Any) -> Any:
    best = error = None
    for start in _STARTS:
        d = _rounded(extreme / start, dtype)
        for _ in range(2):
            q = (x / d[..., None]).round_().clamp_(-8, 7)
            dot, square = (x * q).sum(-1), (q * q).sum(-1)
            d = _rounded(torch.where(square > 0, dot / square.clamp(min=1), d), dtype)
        q = (x / d[..., None]).round_().clamp_(-8, 7)
        e = (q.mul_(d[..., None]).sub_(x)).square_().sum(-1)
        best = d if best is None else torch.where(e < error, d, best)
        error = e if error is None else torch.minimum(e, error)
    return best


def _weighted(x: Any, extreme: Any, dtype: Any, moments: Any, plain: Any) -> Any:
    """Return scales of less weighted error than the `plain` ones where the search finds such.

    The codes of a start are scored by their own best scale, dot / square, of which the error is the
    sum of x^2 less dot^2 / square: one rounding for each start.
    """
    weighed, inverse = x * moments, 1 / extreme.where(extreme != 0, 1.0)

    def best_for(factor: Any) -> tuple[Any, Any]:
        """Return the best scale of the codes round(x * factor), and what it gains."""
        q = (x * factor[..., None]).round_().clamp_(-8, 7)
        dot = (q * weighed).sum(-1)
        scale = dot / q.square_().mul_(moments).sum(-1).clamp(min=1e-30)
        return scale, dot * scale

    best, most = plain, torch.zeros_like(plain)
    for start in _WEIGHTED_STARTS:
        scale, gain = best_for(start * inverse)
        best, most = torch.where(gain > most, scale, best), torch.maximum(gain, most)
    best = _rounded(best_for(1 / _rounded(best, dtype))[0], dtype)
    errors = [_squared_error(x, d, moments) for d in (best, plain)]
    return torch.where(errors[0] < errors[1], best, plain)


def _squared_error(x: Any, scales: Any, moments: Any) -> Any:
    return _on_grid_of(scales[..., None], x).sub_(x).square_().mul_(moments).sum(-1)
