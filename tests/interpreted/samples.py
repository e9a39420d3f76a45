"""A kernel tried on one of its samples, against the op that it stands for.

In fp32 the op is computed in float64, so that only the order of sums is left; in bf16 few results
may differ from those of the op, or, of an attention, the error may not be larger than the op's.
Caches lie in larger rooms of which nothing else may change; slots that no query sees, and what
lies behind an operand, are NaN; and operands are views where the kernel takes such.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import torch

from g4ir.backends.cuda.kernels import KERNELS
from g4ir.backends.cuda.kernels.base import Choice, Kernel, PackedWeight
from g4ir.backends.inductor.lower import dense
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.interpret import interpret
from g4ir.ops import OPS
from g4ir.ops.attention import slot_positions, visible
from g4ir.ops.base import as_tuple
from g4ir.ops.kv_quant import dequantized_width
from g4ir.ops.types import parse_type, torch_dtype

from .cases import BUDGETS
from .cases.base import Budget, Sample

Tensor = torch.Tensor
#: of an attention in bf16: its rms error, as a multiple of the op's, or one rounding of the result
BF16, ROUNDING = 1.5, 2.0**-9
#: what means NaN in e4m3, and in rows of codes, as a code and as a scale's bytes
NAN_BITS = -1
#: results that may differ where a share of them is less
FEW = 2


def kernel_called(name: str) -> Kernel:
    """The first kernel that starts this one."""
    return next(k for k in KERNELS if name in k.starts)


def budget_of(kernel: Kernel) -> Budget:
    return BUDGETS[next(iter(kernel.starts))]


def node_of(kernel: Kernel, s: Sample, dtype: str) -> Node:
    """The node of a sample, with inputs x0, x1, ..."""
    types = [parse_type(t.lstrip("*").replace("T[", f"{dtype}[")) for t in s.inputs]
    attrs = {k: dtype if v == "T" else v for k, v in s.attrs.items()}
    outs = OPS[kernel.op].infer_types(tuple(types), attrs)
    values = [
        tuple(Value(f"{c}{i}", t) for i, t in enumerate(ts)) for c, ts in zip("xy", (types, outs))
    ]
    return Node(kernel.op, *values, attrs)


def draw(n: Node, s: Sample, size: float) -> list[Tensor]:
    """Normal values of a size; weights that keep the size of what they multiply; given numbers."""
    random = torch.Generator().manual_seed(crc32(str(s).encode()))
    caches = range(*n.definition.cache_range(**n.attrs)) if n.definition.cache_range else range(0)

    def one(i: int, text: str) -> Tensor:
        if i in s.given:
            return torch.tensor(s.given[i])
        shape, dtype = [int(d) for d in n.inputs[i].type.shape], n.inputs[i].type.dtype
        if i in caches and dtype in ("i8", "f8e4m3"):
            x = size * torch.randn(
                (*shape[:-1], dequantized_width(n.inputs[i].type)), generator=random
            )
            return OPS["narrow_row"].reference(x, to=dtype)  # type: ignore[misc,no-any-return]
        if dtype in ("i8", "u8"):  # codes: every byte is one
            codes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
            return codes.view(torch_dtype(dtype))
        x = torch.randn(shape, generator=random)
        if text.startswith("*"):
            x = x * shape[-1] ** -0.5 if len(shape) > 1 else 1 + x / 2
        elif text.startswith("f32"):
            x = x.abs() + 0.1  # a reciprocal rms
        else:
            x *= size
        return x.to(torch_dtype(dtype))

    return [one(i, text) for i, text in enumerate(s.inputs)]


#: form -> significant bits of a scale with which a number is exact in bf16
SCALE_BITS = {"int8": 0, "int4": 3, "fp8": 3}


def in_codes(w: Tensor, form: str, group: int) -> PackedWeight:
    """Codes of about these numbers. In bf16 they mean what bf16 holds, so that the op, which rounds
    a weight once, and a kernel that does not compute the same."""
    scale = "f32" if w.dtype == torch.float32 else "bf16"
    codes, scales = OPS["quantize"].reference(w, form=form, group=group, scale=scale)  # type: ignore[misc]
    if w.dtype == torch.bfloat16:
        kept, exponent = torch.frexp(scales.float())
        steps = 2.0 ** (1 + SCALE_BITS[form])
        scales = torch.ldexp((kept * steps).trunc() / steps, exponent).bfloat16()
    return PackedWeight(codes.view(torch.uint8), before_nan(scales)[0], w.dtype, form=form)


def seen(n: Node, given: list[Tensor]) -> Tensor:
    """[B,S,C] of an attention: the slots that each query sees."""
    cache = given[n.definition.cache_range(**n.attrs)[0]]
    positions, written = (given[n.definition.operands.index(x)] for x in ("positions", "written"))
    keys = slot_positions(written, cache.shape[0])
    return visible(keys, positions, n.integer("window"))  # type: ignore[no-any-return]


def filled(x: Tensor, hidden: Tensor, zero: bool = False) -> Tensor:
    """x with zeros, or what means NaN, where it is hidden."""
    if x.element_size() > 1:
        return x.masked_fill(hidden, 0 if zero else torch.nan)
    return x.view(torch.int8).masked_fill(hidden, 0 if zero else NAN_BITS).view(x.dtype)


def in_a_room(x: Tensor) -> tuple[Tensor, Tensor]:
    """A view of the same values in something larger, and the whole, NaN elsewhere. Rows of bytes,
    in which scales lie, begin at even addresses."""
    more = 1 if x.element_size() > 1 else 2
    room = x.new_empty([d + more for d in x.shape])
    room = filled(room, torch.ones(room.shape, dtype=torch.bool))
    inner = room[tuple(slice(i % 2 * more, d + i % 2 * more) for i, d in enumerate(x.shape))]
    return inner.copy_(x), room


def before_nan(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same values in a row, NaN behind them."""
    room = x.new_full([x.numel() + 4096], torch.nan)
    return room[: x.numel()].view(x.shape).copy_(x), room


def meaning(n: Node, given: list[Tensor]) -> tuple[Tensor, ...]:
    """The op's results on these operands, in their dtype."""
    g = Graph("one", n.inputs, (), (), (n,), n.outputs)
    names = [v.name for v in n.inputs]
    return tuple(interpret(g, dict(zip(names, given, strict=True)), {}, {})[0].values())


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN and all."""
    if a.element_size() == 1:
        return torch.equal(a.view(torch.int8), b.view(torch.int8))
    return torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))


def parts(x: Any) -> list[Tensor]:
    """A tensor, or the codes and scales of a weight."""
    return [t.float() for t in ((x.codes, x.scales) if isinstance(x, PackedWeight) else (x,))]


def copied(x: Any) -> Any:
    if isinstance(x, PackedWeight):
        return replace(x, codes=x.codes.clone(), scales=x.scales.clone())
    return x.clone()


def rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()


class Try:
    """A sample's operands as the kernel gets them (`ours`) and as the op does (`given`), and what
    has to come of them: in the dtype of the operands, and in float64."""

    def __init__(
        self, kernel: Kernel, s: Sample, dtype: str, views: bool = False, size: float = 1.0
    ) -> None:
        self.kernel, self.sample, self.node = kernel, s, (n := node_of(kernel, s, dtype))
        self.given = draw(n, s, size)
        ours = list(self.given)
        for i, how in s.coded.items():
            ours[i] = in_codes(self.given[i], *how)
            self.given[i] = dense(ours[i])
        caches_of = n.definition.cache_range
        self.held = range(*caches_of(**n.attrs)) if caches_of else range(0)
        for i in self.held:
            hidden = ~seen(n, self.given).any(1).t()[:, :, None, None]
            ours[i] = filled(ours[i], hidden)
            self.given[i] = filled(self.given[i], hidden, zero=True)
        caches = {*self.held}
        loose = {i for i, t in enumerate(s.inputs) if not t.startswith(("*", "i64"))}
        chosen = set() if s.packed else caches | (loose if views else set())
        self.rooms = {
            i: in_a_room(x) if i in chosen else before_nan(x)
            for i, x in enumerate(ours)
            if i in caches or (i not in s.coded and x.is_floating_point() and x.element_size() > 1)
        }
        self.ours = [self.rooms[i][0] if i in self.rooms else x for i, x in enumerate(ours)]

    def expect(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The op's results, and those in float64."""
        wide = [x.double() if x.is_floating_point() else x for x in self.given]
        return meaning(self.node, self.given), meaning(self.node, wide)

    def call(self, given: list[Tensor], **use: Any) -> tuple[Tensor, ...]:
        """The results on these operands."""
        got = as_tuple(self.kernel.call(*self.arguments(**use), *given))
        assert len(got) == len(self.node.outputs)
        return got

    def arguments(self, **use: Any) -> tuple[Node, Choice]:
        """What the kernel's call takes before the operands."""
        starts, s = self.kernel.starts, self.sample
        uses = s.use if len(starts) > 1 else {name: {**s.use, **use} for name in starts}
        choice = Choice(self.kernel, {}, {name: uses[name] for name in starts})
        return self.node, choice

    def run(self, **use: Any) -> tuple[Tensor, ...]:
        """The kernel's results; nothing else has changed."""
        before = [copied(x) for x in self.ours]
        around = {i: room.clone() for i, (_, room) in self.rooms.items()}
        got = self.call(self.ours, **use)
        for x, old in zip(self.ours, before, strict=True):
            assert all(map(same, parts(x), parts(old)))
        assert all(same(room, around[i]) for i, (_, room) in self.rooms.items())
        return got

    def check(self, got: tuple[Tensor, ...]) -> None:
        """Each result against the op's; AssertionError beyond the kernel's budget."""
        for result, want, exact in zip(got, *self.expect(), strict=True):
            rows: Any = slice(None)
            if self.held:
                assert result.isfinite().all()
                rows = seen(self.node, self.given).any(-1) | bool(self.node.chunk)  # [B,S]
            self._check(result, want, exact, rows)

    def _check(self, got: Tensor, want: Tensor, exact: Tensor, rows: Any) -> None:
        budget = budget_of(self.kernel)
        assert got.dtype == want.dtype and got.shape == want.shape
        got, want, exact = got[rows], want[rows], exact[rows]
        assert got.isfinite().all()
        error = (got.double() - exact).abs()
        if not got.is_floating_point():
            assert torch.equal(got, want)
        elif got.dtype == torch.float32:
            unit = rms(exact) if budget.differ is None else exact.abs().maximum(rms(exact))
            assert (error <= budget.error * unit).all(), float((error / unit).max())
        elif budget.differ is None:
            usual = rms(want.double() - exact)
            assert rms(error) <= max(BF16 * usual, ROUNDING * rms(exact)), float(rms(error) / usual)
        else:
            row = want.double().square().mean(-1, keepdim=True).sqrt().maximum(want.double().abs())
            apart = (got.double() - want.double()).abs()
            assert (apart <= self.node.definition.budget.at("bf16") * row).all()
            differ = int((got != want).sum())
            assert differ <= max(FEW, budget.differ * got.numel()), differ
