"""Tensors, weights, and what all layers have. A layer's `_infer` checks its inputs and works out
the types of its outputs: element type, and dims that are -1 where they are known at run time only.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from .enums import TORCH, DataType
from .record import Attribute, Recorded, RuleError, api, need

#: `Dims.MAX_DIMS`; the operator page of TopK
MAX_DIMS, MAX_TOP_K = 8, 3840
#: largest heads, in 16 bits, for which a builder of TensorRT-RTX had an attention kernel
MAX_HEAD = 256

Shape = tuple[int, ...]
Tensors = list[torch.Tensor]
#: element type and dims
Output = tuple[Any, Shape]
#: numbers of a shape tensor, None where they are known at run time only
Known = list[int | None] | None

FLOATS = {DataType.FLOAT, DataType.HALF, DataType.BF16}
INDEXES = {DataType.INT32, DataType.INT64}
NUMBERS = FLOATS | INDEXES
CASTABLE = {*NUMBERS, DataType.BOOL, DataType.INT8, DataType.UINT8}
#: what inputs here may be; constants of codes, which a layer dequantises
HELD = {*CASTABLE, DataType.FP8}
CODES = {DataType.INT8, DataType.FP8, DataType.INT4}


class Weights(Recorded):
    """Memory that is not copied; none (a null pointer) in a network that is checked, not run."""

    @api
    def __init__(self, type: Any, ptr: int, count: int) -> None:
        self._dtype, self._pointer, self._count = type, int(ptr), int(count)

    dtype = Attribute(read=lambda w: w._dtype)

    def _tensor(self) -> torch.Tensor:
        need(self._pointer, "weights without memory: this network can be checked, not run")
        if self._dtype != DataType.INT4:
            return memory_at(self._pointer, self._dtype, (self._count,))
        pairs = memory_at(self._pointer, DataType.INT8, (self._count // 2, 1))
        return torch.cat((pairs << 4 >> 4, pairs >> 4), 1).flatten()


def memory_at(address: int, kind: Any, shape: Shape) -> torch.Tensor:
    """Return the tensor that lies there; it is not copied."""
    dtype, count = TORCH[kind], math.prod(shape)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def volume(dims: Shape) -> int:
    """Count the elements, -1 where a dim is not known."""
    return -1 if -1 in dims else math.prod(dims)


def agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether dims are equal where both are known."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other))


class ITensor(Recorded):
    """A tensor of a network: an input, or an output of a layer."""

    def __init__(
        self, network: Any, layer: Layer | None, index: int, given: Output | None = None
    ) -> None:
        self._calls, self._network = network._calls, network
        self._layer, self._index, self._given = layer, index, given
        self._is_output = False
        self._dimension_names: dict[int, str] = {}

    name = Attribute("")
    dtype = Attribute(read=lambda t: t._type[0])
    shape = Attribute(read=lambda t: t._dims)
    is_network_input = Attribute(read=lambda t: t._layer is None)
    is_network_output = Attribute(read=lambda t: t._is_output)

    def set_dimension_name(self, index: int, name: str) -> None:
        need(self._layer is None, f"{self._title}: dims of network inputs alone can be named")
        self._dimension_names[int(index)] = name

    def _agree(self, shape: Sequence[int], sizes: dict[str, int]) -> None:
        """Check that dims of one name are equal in all inputs, and add those of this one."""
        for i, dim in self._dimension_names.items():
            equal = sizes.setdefault(dim, shape[i]) == shape[i]
            need(equal, f"input {self._name}: {dim} is {shape[i]}, elsewhere {sizes[dim]}")

    @property
    def _title(self) -> str:
        return str(self._name) or f"an output of {self._layer._title if self._layer else ''}"

    @property
    def _type(self) -> Output:
        if self._given:
            return self._given[0], self._network._bound.get(self._name, self._given[1])
        assert self._layer
        return self._layer._types[self._index]

    _dims = property(lambda t: t._type[1])
    _text = property(lambda t: f"{t._title}: {t._type[0].name}{list(t._dims)}")

    def _known(self) -> Known:
        return self._layer._known() if self._layer and self._index == 0 else None

    def _check(self, value: torch.Tensor) -> None:
        kind, dims = self._type
        fits = value.dtype == TORCH[kind] and agree(dims, value.shape)
        need(fits, f"{self._text}: found {value.dtype}{list(value.shape)}")


class Layer(Recorded):
    """Its rules are looked at when its outputs are first asked for their types, or its network is
    checked. `_kind`: what it is in messages, `_count`: of its outputs."""

    _kind, _count = "", 1

    def __init__(self, network: Any, inputs: Sequence[ITensor | None]) -> None:
        self._calls, self._network = network._calls, network
        self._index = len(network._layers)
        self._inputs: list[ITensor | None] = list(inputs)
        self._outputs = [ITensor(network, self, i) for i in range(self._count)]
        self._cached: tuple[int, list[Output]] | None = None
        network._layers.append(self)

    name = Attribute("")

    def get_output(self, index: int) -> Any:
        return self._outputs[int(index)] if int(index) < len(self._outputs) else None

    def set_input(self, index: int, tensor: ITensor) -> Any:
        self._inputs += [None] * (int(index) + 1 - len(self._inputs))
        self._inputs[int(index)] = tensor
        self._changed("")

    def _changed(self, member: str) -> None:
        self._cached = None

    @property
    def _title(self) -> str:
        return f"{self._name or f'layer {self._index}'} ({self._kind})"

    @property
    def _types(self) -> list[Output]:
        epoch = self._network._epoch
        if self._cached is None or self._cached[0] != epoch:
            try:
                found = self._infer()
                longest = max((len(dims) for _, dims in found), default=0)
                self._need(longest <= MAX_DIMS, f"{longest} dims are more than {MAX_DIMS} dims")
                self._cached = epoch, found
            except RuleError as e:
                self._network._tell(str(e))
                raise
        return self._cached[1]

    @property
    def _given(self) -> list[ITensor]:
        return [t for t in self._inputs if t is not None]

    def _check(self) -> None:
        """Check what only a builder refuses: constants of codes are dequantised."""
        for t in self._given:
            codes = t._layer and t._layer._kind == "constant" and t._type[0] in CODES
            self._need(not codes, f"{t._text}: constants of codes are dequantised, nothing else")

    def _infer(self) -> list[Output]:
        raise NotImplementedError

    def _known(self) -> Known:
        return None

    def _run(self, *ins: torch.Tensor) -> Tensors:
        raise NotImplementedError

    def _need(self, condition: Any, message: str) -> None:
        need(condition, f"{self._title}: {message}")

    def _in(self, index: int = 0) -> ITensor:
        tensor = self._inputs[index]
        assert tensor is not None
        return tensor

    def _takes(self, tensor: ITensor, kinds: set[Any], rule: str = "it") -> None:
        names = ", ".join(sorted(k.name for k in kinds))
        self._need(tensor._type[0] in kinds, f"{tensor._text}: {rule} takes {names}")

    def _same(self, *tensors: ITensor) -> None:
        texts = ", ".join(t._text for t in tensors)
        same = len({t._type[0] for t in tensors}) == 1
        self._need(same, f"{texts}: strong typing, nothing is cast")

    def _broadcast(self, *tensors: ITensor) -> Shape:
        texts = ", ".join(t._text for t in tensors)
        ranks = {len(t._dims) for t in tensors}
        self._need(len(ranks) == 1, f"{texts}: ranks must be equal")
        return tuple(self._joined(dims, texts) for dims in zip(*(t._dims for t in tensors)))

    def _joined(self, dims: Sequence[int], texts: str) -> int:
        sizes = {d for d in dims if d not in (1, -1)}
        self._need(len(sizes) <= 1, f"{texts}: {list(dims)} cannot be broadcast")
        return sizes.pop() if sizes else -1 if -1 in dims else 1
