"""The layers that move entries without computing: shapes, slices, gathers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .enums import DataType
from .layers import INDEXES, ITensor, Known, Layer, Output, Shape, Tensors, agree, volume
from .record import Attribute


class IShuffleLayer(Layer):
    _kind = "shuffle"
    first_transpose = Attribute()
    reshape_dims = Attribute()
    second_transpose = Attribute()

    def _infer(self) -> list[Output]:
        x, target = self._in(), self._reshape_dims
        dims = self._permuted(x._dims, self._first_transpose)
        dims = dims if target is None else self._reshaped(dims, tuple(target))
        return [(x._type[0], self._permuted(dims, self._second_transpose))]

    def _permuted(self, dims: Shape, order: Sequence[int] | None) -> Shape:
        return dims if order is None else tuple(dims[i] for i in order)

    def _reshaped(self, dims: Shape, target: Shape) -> Shape:
        self._need(target.count(-1) <= 1, f"reshape to {list(target)}: at most one dim is -1")
        wrong = f"reshape {list(dims)} to {list(target)}: volumes differ"
        taken = [i for i, d in enumerate(target) if d == 0]
        self._need(all(i < len(dims) for i in taken), wrong)
        out = [dims[i] if i in taken else d for i, d in enumerate(target)]
        # What both sides keep cancels, so that dims which are not known yet may drop out.
        rest = math.prod(out[i] for i in range(len(out)) if i not in taken and out[i] != -1)
        given = volume(tuple(d for i, d in enumerate(dims) if i not in taken))
        if -1 in target:
            self._need(given == -1 or (rest and given % rest == 0), wrong)
            out[target.index(-1)] = -1 if given == -1 else given // rest
        else:
            self._need(given in (-1, rest), wrong)
        return tuple(out)

    def _known(self) -> Known:
        return self._in()._known() if len(self._types[0][1]) <= 1 else None

    def _run(self, *ins: torch.Tensor) -> Tensors:
        x, target = ins[0], self._reshape_dims
        x = x.permute(tuple(self._first_transpose or range(x.dim())))
        if target is not None:
            x = x.reshape([x.shape[i] if d == 0 else d for i, d in enumerate(target)])
        return [x.permute(tuple(self._second_transpose or range(x.dim())))]


class IConcatenationLayer(Layer):
    _kind = "concatenation"
    axis = Attribute(0)

    def _infer(self) -> list[Output]:
        tensors = [self._in(i) for i in range(len(self._inputs))]
        texts = ", ".join(t._text for t in tensors)
        self._same(*tensors)
        self._need(len({len(t._dims) for t in tensors}) == 1, f"{texts}: ranks must be equal")
        dims = []
        for i, sizes in enumerate(zip(*(t._dims for t in tensors))):
            known = {d for d in sizes if d != -1}
            self._need(i == self._axis or len(known) <= 1, f"{texts}: dim {i} differs")
            total = -1 if -1 in sizes else sum(sizes)
            dims.append(total if i == self._axis else known.pop() if known else -1)
        return [(tensors[0]._type[0], tuple(dims))]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        return [torch.cat(ins, self._axis)]


class ISliceLayer(Layer):
    """Of some axes, by steps of 1. In the mode that wraps, what is beyond the end is at the
    start."""

    _kind = "slice"
    mode = Attribute()
    axes = Attribute()

    @property
    def _wraps(self) -> bool:
        return self._mode is not None and self._mode.name == "WRAP"

    def _parts(self) -> list[Any]:
        given = [*self._inputs[1:], None, None]
        return [h if t is None else t for t, h in zip(given, (self._start, self._shape))]

    def _numbers(self, part: Any) -> list[int | None]:
        known = part._known() if isinstance(part, ITensor) else [*part]
        self._need(known is not None, "start and size are shape tensors")
        return known or []

    def _infer(self) -> list[Output]:
        x, axes = self._in(), self._axes
        parts = [self._numbers(p) for p in self._parts()]
        fit = {len(p) for p in parts} == {len(axes)} and set(self._stride) == {1}
        fit = fit and all(0 <= axis < len(x._dims) for axis in axes)
        self._need(fit, f"{x._text}: start and shape {parts} are of axes {axes}")
        out = [*x._dims]
        for axis, first, count in zip(axes, *parts):
            size, out[axis] = x._dims[axis], -1 if count is None else count
            if not self._wraps and first is not None and count is not None and size != -1:
                inside = 0 <= first <= first + count <= size
                self._need(inside, f"{x._text}: {count} from {first} are out of bounds")
        return [(x._type[0], tuple(out))]

    def _known(self) -> Known:
        known, (start, count) = self._in()._known(), map(self._numbers, self._parts())
        if known is None or start[0] is None or count[0] is None:
            return None
        return known[start[0] : start[0] + count[0]]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        x, given = ins[0], iter(ins[1:])
        parts = [next(given).tolist() if isinstance(p, ITensor) else p for p in self._parts()]
        for axis, first, count in zip(self._axes, *parts):
            size = x.shape[axis]
            inside = self._wraps or 0 <= first <= first + count <= size
            self._need(inside, f"{count} from {first} of {list(x.shape)}, dim {axis}")
            at = torch.arange(first, first + count) % max(size, 1)
            x = x.index_select(axis, at) if self._wraps else x.narrow(axis, first, count)
        return [x]


class IShapeLayer(Layer):
    _kind = "shape"

    def _infer(self) -> list[Output]:
        return [(DataType.INT64, (len(self._in()._dims),))]

    def _known(self) -> Known:
        return [None if d == -1 else d for d in self._in()._dims]

    def _run(self, *ins: torch.Tensor) -> Tensors:
        return [torch.tensor(ins[0].shape, dtype=torch.int64)]


class IGatherLayer(Layer):
    """Entries along an axis (DEFAULT), or at tuples in the index's last dim (ND), which may have
    leading dims of both in common."""

    _kind = "gather"
    _axis, _mode = 0, None
    num_elementwise_dims = Attribute(0)

    @property
    def _tuples(self) -> bool:
        return self._mode is not None and self._mode.name == "ND"

    def _infer(self) -> list[Output]:
        x, index, shared = self._in(0), self._in(1), self._num_elementwise_dims
        text = f"{x._text} at {index._text}"
        self._takes(index, INDEXES, "an index")
        if not self._tuples:
            axis = self._axis
            self._need(0 <= axis < len(x._dims) and not shared, f"{text}: no axis {axis}")
            return [(x._type[0], (*x._dims[:axis], *index._dims, *x._dims[axis + 1 :]))]
        count = index._dims[-1]
        fits = shared + count <= len(x._dims) and shared < len(index._dims)
        fits = fits and agree(x._dims[:shared], index._dims[:shared])
        self._need(fits, f"{text}: {shared} elementwise dims")
        return [(x._type[0], (*index._dims[:-1], *x._dims[shared + count :]))]

    def _at(self, index: torch.Tensor, size: int) -> torch.Tensor:
        inside = not index.numel() or 0 <= int(index.min()) <= int(index.max()) < size
        self._need(inside, f"index outside of {size}")
        return index.long()

    def _run(self, *ins: torch.Tensor) -> Tensors:
        x, index = ins
        axis, shared = self._axis, self._num_elementwise_dims
        if not self._tuples:
            rows = x.index_select(axis, self._at(index, x.shape[axis]).reshape(-1))
            return [rows.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])]
        places = [self._at(t, x.shape[shared + i]) for i, t in enumerate(index.unbind(-1))]
        for i in range(shared):
            shape = [-1 if j == i else 1 for j in range(index.dim() - 1)]
            places.insert(i, torch.arange(x.shape[i]).reshape(shape))
        return [x[tuple(places)]]
