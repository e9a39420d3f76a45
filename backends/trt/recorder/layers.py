"""Tensors, weights and layers, with the rules that NVIDIA documents for each layer.

A layer's `_infer` checks its inputs and works out the types of its outputs: element type, and dims
that are -1 where they are known at run time only. README.md says where the rules are
written.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .enums import (
    TORCH,
    AttentionNormalizationOp,
    CollectiveOperation,
    DataType,
    ElementWiseOperation,
    GatherMode,
    KVCacheMode,
    MatrixOperation,
    ReduceOperation,
    SampleMode,
    UnaryOperation,
)
from .limits import MAX_DIMS, MAX_ENTERING, MAX_TOP_K
from .record import Attribute, Recorded, RuleError, api, held, keep, need

Shape = tuple[int, ...]
Output = tuple[Any, Shape]

FLOATS = {DataType.FLOAT, DataType.HALF, DataType.BF16}
INDEXES = {DataType.INT32, DataType.INT64}
NUMBERS = FLOATS | INDEXES
CASTABLE = {*NUMBERS, DataType.BOOL, DataType.INT8, DataType.UINT8}
#: of what the operator page of If takes; no int64
BRANCHED = {DataType.BOOL, DataType.INT32, *FLOATS}
#: elementwise operations on sizes
ON_SIZES: dict[str, Callable[[Any, Any], int]] = {
    "SUM": operator.add,
    "SUB": operator.sub,
    "MIN": min,
    "MAX": max,
}


class Dims(Recorded, tuple[int, ...]):
    """Behaves like a tuple."""

    MAX_DIMS = MAX_DIMS

    def __new__(cls, shape: Iterable[int] = ()) -> Dims:
        return super().__new__(cls, shape)


class Permutation(Dims):
    """Output dim i is input dim `self[i]`."""


class Weights(Recorded):
    """Memory that is not copied. A null pointer with a count stands for weights that are not there:
    their network can be checked, not run."""

    @api
    def __init__(self, type: DataType, ptr: int, count: int) -> None:
        self._dtype, self._pointer, self._count = type, int(ptr), int(count)

    dtype = Attribute(None, read=lambda w: w._dtype)
    size = Attribute(None, read=lambda w: w._count)
    nbytes = Attribute(None, read=lambda w: w._bytes())

    def _bytes(self) -> int:
        return self._count * int(TORCH[self._dtype].itemsize)

    def _tensor(self) -> torch.Tensor:
        """Return the numbers that lie in that memory now."""
        need(self._pointer, "weights without memory: this network can be checked, not run")
        return memory_at(self._pointer, self._dtype, (self._count,))


def memory_at(address: int, kind: Any, shape: Shape) -> torch.Tensor:
    """Return the tensor that lies there; it is not copied."""
    dtype, count = TORCH[kind], math.prod(shape)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


class ITensor(Recorded):
    """A tensor of a network: an input, or an output of a layer."""

    def __init__(
        self,
        network: Any,
        layer: Layer | None,
        index: int,
        name: str = "",
        given: Output | None = None,
    ) -> None:
        self._calls, self._network = network._calls, network
        self._layer, self._index, self._given = layer, index, given
        self._is_output = False
        self._dimension_names: dict[int, str] = {}
        if name:
            keep(self, "name", name)

    name = Attribute("str", "")
    dtype = Attribute(None, read=lambda t: t._dtype)
    shape = Attribute(None, read=lambda t: Dims(t._dims))
    location = Attribute("TensorLocation")
    is_network_input = Attribute(None, read=lambda t: t._layer is None)
    is_network_output = Attribute(None, read=lambda t: t._is_output)

    @api
    def set_dimension_name(self, index: int, name: str) -> None:
        need(self._layer is None, f"{self._title}: dims of network inputs alone can be named")
        self._dimension_names[int(index)] = name

    # What follows is not the real class's.

    def _agree(self, shape: Sequence[int], sizes: dict[str, int]) -> None:
        """Check that dims of one name are equal in all inputs, and add those of this one."""
        for i, dim in self._dimension_names.items():
            equal = sizes.setdefault(dim, shape[i]) == shape[i]
            need(equal, f"input {held(self, 'name')}: {dim} is {shape[i]}, elsewhere {sizes[dim]}")

    @property
    def _title(self) -> str:
        return str(held(self, "name")) or f"an output of {self._layer._title}"  # type: ignore[union-attr]

    @property
    def _type(self) -> Output:
        if self._layer is None:
            assert self._given
            bound = self._network._bound.get(held(self, "name"))
            return self._given if bound is None else (self._given[0], bound)
        return self._layer._types[self._index]

    @property
    def _dtype(self) -> Any:
        return self._type[0]

    @property
    def _dims(self) -> Shape:
        return self._type[1]

    @property
    def _text(self) -> str:
        return f"{self._title}: {self._dtype.name}{list(self._dims)}"

    def _known(self) -> list[int | None] | None:
        """Return the numbers of a shape tensor, None where they are known at run time only."""
        return self._layer._values() if self._layer and self._index == 0 else None


class Layer(Recorded):
    """The common part of ILayer and IAttention: inputs, outputs, a name."""

    #: name of what it is in messages
    _kind = ""
    #: attributes are set after it is made, so that its first look is left to its first use
    _lazy = False

    def __init__(self, network: Any, inputs: Sequence[ITensor | None], outputs: int = 1) -> None:
        self._calls, self._network = network._calls, network
        self._index = len(network._layers)
        self._inputs: list[ITensor | None] = list(inputs)
        self._outputs = [ITensor(network, self, i) for i in range(outputs)]
        self._cached: tuple[int, list[Output]] | None = None
        network._layers.append(self)

    name = Attribute("str", "")
    metadata = Attribute("str", "")

    @api
    def get_output(self, index: int) -> Any:
        return self._outputs[int(index)] if int(index) < len(self._outputs) else None

    @api
    def set_input(self, index: int, tensor: ITensor) -> Any:
        self._inputs += [None] * (int(index) + 1 - len(self._inputs))
        self._inputs[int(index)] = tensor
        self._changed("")

    def _changed(self, member: str) -> None:
        self._cached = None

    @property
    def _title(self) -> str:
        return f"{held(self, 'name') or f'layer {self._index}'} ({self._kind})"

    @property
    def _types(self) -> list[Output]:
        epoch = self._network._epoch
        if self._cached is None or self._cached[0] != epoch:
            try:
                self._cached = (epoch, self._checked())
            except RuleError as e:
                self._network._tell(str(e))
                raise
        return self._cached[1]

    def _checked(self) -> list[Output]:
        found = self._infer()
        for _, dims in found:
            self._need(len(dims) <= MAX_DIMS, f"{list(dims)} has more than {MAX_DIMS} dims")
        return found

    def _look(self) -> None:
        """Check the layer's rules, where they were not looked at before."""
        assert self._types is not None

    def _infer(self) -> list[Output]:
        raise NotImplementedError

    def _values(self) -> list[int | None] | None:
        return None

    def _need(self, condition: Any, message: str) -> None:
        if not condition:
            raise RuleError(f"{self._title}: {message}")

    def _in(self, index: int = 0) -> ITensor:
        tensor = self._inputs[index]
        assert tensor is not None
        return tensor

    def _kinds(self, tensor: ITensor, kinds: set[Any], rule: str = "") -> None:
        names = ", ".join(sorted(k.name for k in kinds))
        self._need(tensor._dtype in kinds, f"{tensor._text}: {rule or 'it'} takes {names}")

    def _same(self, *tensors: ITensor) -> None:
        texts = ", ".join(t._text for t in tensors)
        same = len({t._dtype for t in tensors}) == 1
        self._need(same, f"{texts}: strong typing, nothing is cast")

    def _broadcast(self, *tensors: ITensor) -> Shape:
        texts = ", ".join(t._text for t in tensors)
        ranks = {len(t._dims) for t in tensors}
        self._need(len(ranks) == 1, f"{texts}: ranks must be equal")
        return tuple(self._joined(dims, texts) for dims in zip(*(t._dims for t in tensors)))

    def _joined(self, dims: Sequence[int], texts: str) -> int:
        """Return one dim of a result: equal ones, and ones that are 1."""
        sizes = {d for d in dims if d not in (1, -1)}
        self._need(len(sizes) <= 1, f"{texts}: {list(dims)} cannot be broadcast")
        return sizes.pop() if sizes else -1 if -1 in dims else 1


class ILayer(Layer):
    """Base of the layers."""

    type = Attribute(None, read=lambda x: x._kind)
    num_ranks = Attribute("int", 1)

    def _changed(self, member: str) -> None:
        super()._changed(member)
        if member == "num_ranks":
            self._check_ranks(int(held(self, member)))

    def _check_ranks(self, ranks: int) -> None:
        self._need(ranks == 1, f"num_ranks = {ranks}: it runs on one rank")


def _bits(mask: int, rank: int) -> list[int]:
    return [i for i in range(rank) if mask >> i & 1]


def volume(dims: Shape) -> int:
    """Count the elements, -1 where a dim is not known."""
    return -1 if -1 in dims else math.prod(dims)


class IConstantLayer(ILayer):
    _kind = "constant"
    weights = Attribute("Weights")
    shape = Attribute("Dims")

    def _infer(self) -> list[Output]:
        dims, weights = tuple(held(self, "shape")), held(self, "weights")
        refused = {DataType.BOOL, DataType.UINT8}
        self._need(weights._dtype not in refused, f"{weights._dtype.name}: no constant has it")
        kinds = {*CASTABLE, DataType.FP8}  # of the operator page
        self._need(weights._dtype in kinds, f"{weights._dtype.name} is not supported here")
        count = volume(dims)
        self._need(count == weights._count, f"{weights._count} weights for {list(dims)}")
        return [(weights._dtype, dims)]

    def _values(self) -> list[int | None] | None:
        kind, dims = self._types[0]
        if kind not in INDEXES or len(dims) > 1 or volume(dims) > 2 * MAX_DIMS:
            return None
        weights = held(self, "weights")
        return weights._tensor().tolist() if weights._pointer else None


class IIdentityLayer(ILayer):
    _kind = "identity"

    def _infer(self) -> list[Output]:
        return [self._in()._type]


class ICastLayer(ILayer):
    _kind = "cast"
    to_type = Attribute("DataType")

    def _infer(self) -> list[Output]:
        to = held(self, "to_type")
        self._kinds(self._in(), CASTABLE)
        self._need(to in CASTABLE, f"no cast to {to.name}")
        return [(to, self._in()._dims)]

    def _values(self) -> list[int | None] | None:
        return self._in()._known() if held(self, "to_type") in INDEXES else None


class IDequantizeLayer(ILayer):
    _kind = "dequantize"
    _lazy = True
    axis = Attribute("int", -1)
    to_type = Attribute("DataType")

    def _infer(self) -> list[Output]:
        (x, scale), to = (self._in(0), self._in(1)), held(self, "to_type")
        self._kinds(x, {DataType.INT8, DataType.FP8}, "here it")
        self._kinds(scale, FLOATS, "the scale")
        self._need(scale._dtype == to, f"{scale._text}: the result, {to.name}, has its type")
        self._need(isinstance(scale._layer, IConstantLayer), f"{scale._text}: not a constant")
        if scale._dims:
            axis = int(held(self, "axis"))
            axis += len(x._dims) if axis < 0 else 0
            fits = 0 <= axis < len(x._dims) and scale._dims == (x._dims[axis],)
            self._need(fits, f"{scale._text}: one for each entry of axis {axis} of {x._text}")
        self._need(self._positive(scale), f"{scale._text}: scales are positive")
        return [(to, x._dims)]

    def _positive(self, scale: ITensor) -> bool:
        """Whether scales are, as far as their numbers are there."""
        weights = held(scale._layer, "weights")  # type: ignore[arg-type]
        return not weights._pointer or bool((weights._tensor() > 0).all())


class IUnaryLayer(ILayer):
    _kind = "unary"
    op = Attribute("UnaryOperation")

    def _infer(self) -> list[Output]:
        op, signed = held(self, "op"), ("ABS", "NEG", "SIGN")
        whole = {*INDEXES, DataType.INT8} if op.name in signed else set()
        kinds = {DataType.BOOL} if op is UnaryOperation.NOT else FLOATS | whole
        self._kinds(self._in(), kinds, op.name)
        return [self._in()._type]


class IActivationLayer(ILayer):
    _kind = "activation"
    type = Attribute("ActivationType")

    def _infer(self) -> list[Output]:
        self._kinds(self._in(), FLOATS, held(self, "type").name)
        return [self._in()._type]


class IElementWiseLayer(ILayer):
    _kind = "elementwise"
    op = Attribute("ElementWiseOperation")

    def _infer(self) -> list[Output]:
        op, (a, b) = held(self, "op"), (self._in(0), self._in(1))
        self._same(a, b)
        logic, compares = ("AND", "OR", "XOR"), ("EQUAL", "GREATER", "LESS")
        kinds = {DataType.BOOL} if op.name in logic else NUMBERS
        # Whole powers are new in 11; neither version needs them.
        self._kinds(a, FLOATS if op is ElementWiseOperation.POW else kinds, op.name)
        return [(DataType.BOOL if op.name in compares else a._dtype, self._broadcast(a, b))]

    def _values(self) -> list[int | None] | None:
        """Return the numbers of shape tensors, for what is done with sizes."""
        f = ON_SIZES.get(held(self, "op").name)
        one, two = self._in(0)._known(), self._in(1)._known()
        if f is None or one is None or two is None or len(one) != len(two):
            return None
        return [None if a is None or b is None else f(a, b) for a, b in zip(one, two)]


class IMatrixMultiplyLayer(ILayer):
    _kind = "matrix multiply"
    op0 = Attribute("MatrixOperation")
    op1 = Attribute("MatrixOperation")

    def _infer(self) -> list[Output]:
        a, b = self._in(0), self._in(1)
        ops = held(self, "op0"), held(self, "op1")
        self._need(MatrixOperation.VECTOR not in ops, "vectors are not recorded here")
        self._same(a, b)
        self._kinds(a, FLOATS)
        text = f"{a._text}, {b._text}"
        self._need(len(a._dims) == len(b._dims) >= 2, f"{text}: ranks must be equal, 2 or more")
        lead = tuple(self._joined(d, text) for d in zip(a._dims[:-2], b._dims[:-2]))
        (m, inner), (other, n) = (
            t._dims[:-3:-1] if op is MatrixOperation.TRANSPOSE else t._dims[-2:]
            for t, op in zip((a, b), ops)
        )
        self._need(inner == other or -1 in (inner, other), f"{text}: {inner} times {other}")
        return [(a._dtype, (*lead, m, n))]


class ISoftMaxLayer(ILayer):
    _kind = "softmax"
    _lazy = True
    axes = Attribute("int", None)

    def _infer(self) -> list[Output]:
        self._kinds(self._in(), FLOATS)
        self._need(len(_bits(self._axes(), len(self._in()._dims))) == 1, "one axis")
        return [self._in()._type]

    def _axes(self) -> int:
        """Return the mask of axes, by default of the axis three from the end."""
        axes = held(self, "axes")
        return 1 << max(len(self._in()._dims) - 3, 0) if axes is None else int(axes)


class IReduceLayer(ILayer):
    _kind = "reduce"
    op = Attribute("ReduceOperation")
    axes = Attribute("int")
    keep_dims = Attribute("bool")

    def _infer(self) -> list[Output]:
        x, kept = self._in(), held(self, "keep_dims")
        self._kinds(x, NUMBERS, held(self, "op").name)
        axes = _bits(int(held(self, "axes")), len(x._dims))
        self._need(axes and int(held(self, "axes")) >> len(x._dims) == 0, f"{x._text}: axes")
        dims = [1 if i in axes else d for i, d in enumerate(x._dims) if kept or i not in axes]
        return [(x._dtype, tuple(dims))]


class ITopKLayer(ILayer):
    _kind = "top-k"
    op = Attribute("TopKOperation")
    k = Attribute("int")
    axes = Attribute("int")
    indices_type = Attribute("DataType", DataType.INT32)

    def _infer(self) -> list[Output]:
        x, k = self._in(), int(held(self, "k"))
        self._kinds(x, NUMBERS)
        axes = _bits(int(held(self, "axes")), len(x._dims))
        last = len(axes) == 1 and axes[0] >= len(x._dims) - 4
        self._need(last, f"{x._text}: one axis, of the last four")
        size = x._dims[axes[0]]
        self._need(0 < k <= MAX_TOP_K, f"k is {k}, at most {MAX_TOP_K} are taken")
        self._need(size == -1 or k <= size, f"{x._text}: k is {k}")
        self._need(held(self, "indices_type") in INDEXES, "indices are INT32 or INT64")
        dims = tuple(k if i in axes else d for i, d in enumerate(x._dims))
        return [(x._dtype, dims), (held(self, "indices_type"), dims)]


class IShuffleLayer(ILayer):
    _kind = "shuffle"
    _lazy = True
    first_transpose = Attribute("Permutation")
    reshape_dims = Attribute("Dims")
    second_transpose = Attribute("Permutation")
    zero_is_placeholder = Attribute("bool", True)

    def _infer(self) -> list[Output]:
        x = self._in()
        dims = self._permuted(x._dims, held(self, "first_transpose"))
        target = held(self, "reshape_dims")
        if target is not None:
            dims = self._reshaped(dims, tuple(map(int, target)))
        return [(x._dtype, self._permuted(dims, held(self, "second_transpose")))]

    def _permuted(self, dims: Shape, order: Sequence[int] | None) -> Shape:
        if order is None:
            return dims
        fits = sorted(order) == list(range(len(dims)))
        self._need(fits, f"{list(order)} is no permutation of {list(dims)}")
        return tuple(dims[i] for i in order)

    def _reshaped(self, dims: Shape, target: Shape) -> Shape:
        self._need(target.count(-1) <= 1, f"reshape to {list(target)}: at most one dim is -1")
        self._need(min(target, default=1) >= -1, f"reshape to {list(target)}")
        held_zeros = held(self, "zero_is_placeholder")
        taken = [i for i, d in enumerate(target) if d == 0 and held_zeros]
        self._need(all(i < len(dims) for i in taken), f"reshape {list(dims)} to {list(target)}")
        out = [dims[i] if i in taken else d for i, d in enumerate(target)]
        # What both sides keep cancels, so that dims which are not known yet may drop out.
        rest = math.prod(out[i] for i in range(len(out)) if i not in taken and out[i] != -1)
        given = volume(tuple(d for i, d in enumerate(dims) if i not in taken))
        wrong = f"reshape {list(dims)} to {list(target)}: volumes differ"
        if -1 in target:
            self._need(given == -1 or (rest and given % rest == 0), wrong)
            out[target.index(-1)] = -1 if given == -1 else given // rest
        else:
            self._need(given in (-1, rest), wrong)
        return tuple(out)

    def _values(self) -> list[int | None] | None:
        return self._in()._known() if len(self._types[0][1]) <= 1 else None


class IConcatenationLayer(ILayer):
    _kind = "concatenation"
    _lazy = True
    axis = Attribute("int", None)

    def _axis(self) -> int:
        """Return the axis, by default the dim three from the end."""
        axis, rank = held(self, "axis"), len(self._in()._dims)
        return max(rank - 3, 0) if axis is None else int(axis)

    def _infer(self) -> list[Output]:
        tensors = [self._in(i) for i in range(len(self._inputs))]
        texts = ", ".join(t._text for t in tensors)
        self._same(*tensors)
        rank, axis = len(tensors[0]._dims), self._axis()
        self._need({len(t._dims) for t in tensors} == {rank}, f"{texts}: ranks must be equal")
        self._need(0 <= axis < rank, f"{texts}: no axis {axis}")
        dims = []
        for i, sizes in enumerate(zip(*(t._dims for t in tensors))):
            known = {d for d in sizes if d != -1}
            self._need(i == axis or len(known) <= 1, f"{texts}: dim {i} differs")
            total = -1 if -1 in sizes else sum(sizes)
            dims.append(total if i == axis else known.pop() if known else -1)
        return [(tensors[0]._dtype, tuple(dims))]

    def _values(self) -> list[int | None] | None:
        parts = [self._in(i)._known() for i in range(len(self._inputs))]
        if any(p is None for p in parts):
            return None
        return [v for p in parts for v in p or ()]


class ISliceLayer(ILayer):
    _kind = "slice"
    _lazy = True
    start = Attribute("Dims")
    shape = Attribute("Dims")
    stride = Attribute("Dims")
    mode = Attribute("SampleMode", SampleMode.STRICT_BOUNDS)
    #: inputs that may stand for what was given when the layer was made
    _MEMBERS = (1, "start"), (2, "shape"), (3, "stride")
    axes = Attribute("Dims")

    def _parts(self) -> list[list[int | None]]:
        return [self._part(i, member) for i, member in self._MEMBERS]

    def _part(self, index: int, member: str) -> list[int | None]:
        """Return start, shape or stride: an input, or what was given when the layer was made."""
        tensor = self._inputs[index] if index < len(self._inputs) else None
        if tensor is None:
            return list(held(self, member))
        self._kinds(tensor, INDEXES, member)
        self._need(len(tensor._dims) == 1, f"{tensor._text}: {member} is of rank 1")
        known = tensor._known()
        self._need(known is not None, f"{tensor._text}: {member} is no shape tensor")
        return known or []

    def _sliced_axes(self) -> tuple[int, ...]:
        """Return the axes that start, shape and stride are of; all, where none are given."""
        rank, given = len(self._in()._dims), held(self, "axes")
        axes = tuple(range(rank)) if given is None else tuple(given)
        right = len({*axes}) == len(axes) and all(0 <= a < rank for a in axes)
        self._need(right, f"{self._in()._text}: axes {axes} are different axes of it")
        return axes

    def _infer(self) -> list[Output]:
        x, axes = self._in(), self._sliced_axes()
        wraps = held(self, "mode") is SampleMode.WRAP
        known = wraps or held(self, "mode") is SampleMode.STRICT_BOUNDS
        self._need(known, "modes but STRICT_BOUNDS and WRAP are not recorded here")
        parts = self._parts()
        fit = {len(p) for p in parts} == {len(axes)}
        self._need(fit, f"{x._text}: start, shape and stride {parts} are of axes {axes}")
        out = [*x._dims]
        for axis, first, count, step in zip(axes, *parts):
            size, out[axis] = x._dims[axis], -1 if count is None else count
            if wraps or None in (first, count, step) or size == -1:
                continue
            assert first is not None and count is not None and step is not None
            inside = count == 0 or (first >= 0 and first + (count - 1) * step < size)
            self._need(inside, f"{x._text}: {count} from {first} by {step} are out of bounds")
        return [(x._dtype, tuple(out))]

    def _values(self) -> list[int | None] | None:
        known, (_, dims) = self._in()._known(), self._types[0]
        start, _, stride = self._parts()
        if known is None or None in (*start, *stride) or -1 in dims or len(dims) != 1:
            return None
        return [known[start[0] + i * stride[0]] for i in range(dims[0])]  # type: ignore[operator]


class ISelectLayer(ILayer):
    _kind = "select"

    def _infer(self) -> list[Output]:
        condition, a, b = (self._in(i) for i in range(3))
        self._kinds(condition, {DataType.BOOL}, "a condition")
        self._same(a, b)
        return [(a._dtype, self._broadcast(condition, a, b))]


class IShapeLayer(ILayer):
    _kind = "shape"

    def _infer(self) -> list[Output]:
        return [(DataType.INT64, (len(self._in()._dims),))]

    def _values(self) -> list[int | None] | None:
        return [None if d == -1 else d for d in self._in()._dims]


class IGatherLayer(ILayer):
    _kind = "gather"
    _lazy = True
    axis = Attribute("int", 0)
    mode = Attribute("GatherMode")
    num_elementwise_dims = Attribute("int", 0)

    def _infer(self) -> list[Output]:
        x, index = self._in(0), self._in(1)
        self._kinds(index, INDEXES, "an index")
        self._need(len(x._dims) >= 1, f"{x._text}: rank 1 or more")
        mode, shared = held(self, "mode"), int(held(self, "num_elementwise_dims"))
        self._need(mode is not GatherMode.ELEMENT, "mode ELEMENT is not recorded here")
        made = self._rows(x, index, shared) if mode is GatherMode.DEFAULT else None
        return [(x._dtype, made or self._tuples(x, index, shared))]

    def _rows(self, x: ITensor, index: ITensor, shared: int) -> Shape:
        axis = int(held(self, "axis"))
        self._need(shared == 0, "elementwise dims of mode DEFAULT are not recorded here")
        self._need(0 <= axis < len(x._dims), f"{x._text}: no axis {axis}")
        return (*x._dims[:axis], *index._dims, *x._dims[axis + 1 :])

    def _tuples(self, x: ITensor, index: ITensor, shared: int) -> Shape:
        text = f"{x._text} at {index._text}"
        self._need(len(index._dims) >= 1, f"{text}: the index is of rank 1 or more")
        count = index._dims[-1]
        self._need(count != -1, f"{text}: the index's last dim is known at build")
        self._need(0 <= shared < max(len(x._dims) - 1, 1), f"{text}: {shared} elementwise dims")
        self._need(shared < len(index._dims), f"{text}: {shared} elementwise dims")
        self._need(count <= len(x._dims) - shared, f"{text}: too long tuples")
        pairs = zip(x._dims[:shared], index._dims[:shared])
        fits = all(a == b or -1 in (a, b) for a, b in pairs)
        self._need(fits, f"{text}: elementwise dims are not broadcast")
        return (*index._dims[:-1], *x._dims[shared + count :])

    def _values(self) -> list[int | None] | None:
        known, at = self._in(0)._known(), self._in(1)._known()
        if known is None or at is None or len(self._in(0)._dims) != 1 or None in at:
            return None
        return [known[i] for i in at if i is not None]


class IKVCacheUpdateLayer(ILayer):
    """`_check` in network.py has the rest: its output is an output of the network."""

    _kind = "KV cache update"
    cache_mode = Attribute("KVCacheMode")

    def _infer(self) -> list[Output]:
        cache, new, at = (self._in(i) for i in range(3))
        text = f"{new._text} at {at._text} of {cache._text}"
        self._need(held(self, "cache_mode") is KVCacheMode.LINEAR, "mode LINEAR alone exists")
        self._need(cache._layer is None, f"{cache._text}: a cache is a network input")
        self._kinds(cache, FLOATS, "a cache")
        self._same(cache, new)
        self._kinds(at, INDEXES, "write_indices")
        ranks = len(cache._dims), len(new._dims), len(at._dims)
        self._need(ranks == (4, 4, 1), f"{text}: [B,N,S_max,H], [B,N,S,H] and [B]")
        self._need(cache._dims[2] != -1, f"{cache._text}: S_max is static")
        pairs = [(new._dims[i], cache._dims[i]) for i in (0, 1, 3)] + [
            (at._dims[0], cache._dims[0])
        ]
        fits = all(a == b or -1 in (a, b) for a, b in pairs)
        self._need(fits and new._dims[2] <= cache._dims[2], f"{text} does not fit")
        return [cache._type]


class IDistCollectiveLayer(ILayer):
    """An exchange with the other ranks; `network.add_dist_collective` says which."""

    _kind = "distributed collective"
    _lazy = True
    _operation: CollectiveOperation
    _reduce: ReduceOperation
    _root: int
    _groups: Sequence[int]
    _ranks = 1

    def _check_ranks(self, ranks: int) -> None:
        self._need(self._ranks in (1, ranks), f"num_ranks is {self._ranks} and cannot be changed")
        self._ranks = ranks

    @property
    def _gathers(self) -> bool:
        return self._operation is CollectiveOperation.ALL_GATHER

    def _infer(self) -> list[Output]:
        x, op, ranks = self._in(), self._operation, self._ranks
        known = {CollectiveOperation.ALL_REDUCE, CollectiveOperation.ALL_GATHER}
        self._need(op in known, f"{op.name} is not recorded here")
        reduce = ReduceOperation.NONE if self._gathers else ReduceOperation.SUM
        self._need(self._reduce is reduce, f"{op.name} with {self._reduce.name}, not {reduce.name}")
        self._need(self._root == -1, f"{op.name} has no root: it is -1, not {self._root}")
        self._need(ranks > 1, f"num_ranks is {ranks}: at least two exchange something")
        every = [*self._groups] == [*range(ranks)]
        self._need(every, f"groups {[*self._groups]}: all of {ranks} ranks, in order")
        self._kinds(x, FLOATS, "an exchange here")
        self._need(len(x._dims) >= 1, f"{x._text}: rank 1 or more")
        if not self._gathers:
            return [x._type]
        first = -1 if x._dims[0] == -1 else ranks * x._dims[0]
        return [(x._dtype, (first, *x._dims[1:]))]


class IAttention(Layer):
    """No layer of the real network either: a helper that stands for several."""

    _kind = "attention"
    _lazy = True
    norm_op = Attribute("AttentionNormalizationOp")
    causal = Attribute("bool", False)
    mask = Attribute("ITensor | None")
    decomposable = Attribute("bool", False)

    def _changed(self, member: str) -> None:
        super()._changed(member)
        if member == "mask":
            self._inputs = [*self._inputs[:3], held(self, "mask")]

    def _is_causal(self) -> bool:
        return bool(held(self, "causal"))

    def _infer(self) -> list[Output]:
        q, k, v = (self._in(i) for i in range(3))
        text = f"{q._text}, {k._text}, {v._text}"
        self._same(q, k, v)
        self._kinds(q, FLOATS, "attention")
        self._need({len(t._dims) for t in (q, k, v)} == {4}, f"{text}: [B,N,S,H] each")
        heads = {t._dims[i] for t in (q, k, v) for i in (1, 3)}
        self._need(-1 not in heads, f"{text}: counts and sizes of heads are static")
        fits = k._dims[1] == v._dims[1] and q._dims[1] % k._dims[1] == 0
        fits = fits and len({t._dims[3] for t in (q, k, v)}) == 1
        self._need(fits, f"{text}: heads do not fit")
        self._joined([t._dims[0] for t in (q, k, v)], text)
        self._joined([k._dims[2], v._dims[2]], text)
        self._need(
            held(self, "norm_op") is AttentionNormalizationOp.SOFTMAX or held(self, "decomposable"),
            "without a norm it must be decomposable",
        )
        self._check_mask(q, k, held(self, "mask"))
        return [q._type]

    def _check_mask(self, q: ITensor, k: ITensor, mask: ITensor | None) -> None:
        self._need(not (mask and self._is_causal()), "a mask and a causal kind exclude each other")
        if mask is None:
            return
        self._kinds(mask, {DataType.BOOL, q._dtype}, "a mask")
        want = (q._dims[0], q._dims[1], q._dims[2], k._dims[2])
        text = f"{mask._text}: a mask is {list(want)}, 1 instead of the first two"
        self._need(len(mask._dims) == 4, text)
        for i, (have, wanted) in enumerate(zip(mask._dims, want)):
            ones = (1,) if i < 2 else ()
            self._need(have == wanted or -1 in (have, wanted) or have in ones, text)


class IAttention11(IAttention):
    """IAttention of version 11: the causal kind is an enum."""

    _api_name = "IAttention"
    causal_kind = Attribute("CausalMaskKind")

    def _is_causal(self) -> bool:
        kind = held(self, "causal_kind")
        return super()._is_causal() or (kind is not None and kind.name != "NONE")

    def _infer(self) -> list[Output]:
        kind = held(self, "causal_kind")
        wrong = kind is not None and kind.name == "UPPER_LEFT"
        self._need(not wrong, "UPPER_LEFT hides what lies before the chunk")
        return super()._infer()


class IPluginV3Layer(ILayer):
    """A plugin that is compiled ahead of time, see plugin.py."""

    _kind = "plugin"
    plugin = Attribute(None)

    def _infer(self) -> list[Output]:
        types = [self._in(i)._type for i in range(len(self._inputs))]
        return [(kind, tuple(dims)) for kind, dims in held(self, "plugin").output_types(types)]


class IIfConditionalBoundaryLayer(ILayer):
    def __init__(self, conditional: Any, inputs: Sequence[ITensor], outputs: int = 1) -> None:
        self._conditional = conditional
        super().__init__(conditional._network, inputs, outputs)

    conditional = Attribute(None, read=lambda x: x._conditional)


class IConditionLayer(IIfConditionalBoundaryLayer):
    _kind = "condition"

    def _infer(self) -> list[Output]:
        x = self._in()
        self._kinds(x, {DataType.BOOL}, "a condition")
        self._need(x._dims == (), f"{x._text}: a condition is of rank 0")
        return []


class IIfConditionalInputLayer(IIfConditionalBoundaryLayer):
    _kind = "conditional input"

    def _infer(self) -> list[Output]:
        x = self._in()
        self._kinds(x, BRANCHED, "a branch")
        if isinstance(x._layer, IConstantLayer):
            count = volume(x._dims) * TORCH[x._dtype].itemsize
            self._need(count <= MAX_ENTERING, f"{count} bytes of constants are copied at each step")
        return [x._type]

    def _values(self) -> list[int | None] | None:
        return self._in()._known()


class IIfConditionalOutputLayer(IIfConditionalBoundaryLayer):
    _kind = "conditional output"

    def _infer(self) -> list[Output]:
        a, b = self._in(0), self._in(1)
        self._same(a, b)
        self._kinds(a, BRANCHED, "a branch")
        same = len(a._dims) == len(b._dims) and all(
            m == n or -1 in (m, n) for m, n in zip(a._dims, b._dims)
        )
        self._need(same, f"{a._text}, {b._text}: branches have one type and shape")
        dims = tuple(n if m == -1 else m for m, n in zip(a._dims, b._dims))
        return [(a._dtype, dims)]
