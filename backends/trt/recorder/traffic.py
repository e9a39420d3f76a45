"""Bytes that a network moves, where layers are fused by a rule that is stated here."""

from __future__ import annotations

from collections.abc import Mapping

from .enums import TORCH
from .layers import IConstantLayer, ITensor, Layer, Shape, volume
from .network import INetworkDefinition, bound
from .record import held

#: layers that are kernels; all others are done within those that read them
KERNELS = frozenset(
    {
        *("matrix multiply", "softmax", "reduce", "top-k", "gather"),
        *("concatenation", "KV cache update", "attention", "distributed collective", "plugin"),
    }
)

#: tensors that lie in memory -> bytes of them that are read
Read = dict[ITensor, int]


def traffic(
    network: INetworkDefinition, inputs: Mapping[str, Shape], parts: Mapping[str, float]
) -> tuple[int, int]:
    """Return the bytes that are read and written, and the number of kernels, where inputs have
    these shapes. A kernel reads what it needs of inputs, constants and other kernels' results, no
    more than the smallest tensor on the way; an update writes what is new. `parts`: by name, how
    much of the constants is read."""
    with bound(network, inputs):
        read: dict[ITensor, Read] = {t: {t: _bytes(t)} for t in network._inputs}
        moved = kernels = 0
        for layer in network._layers:
            needed = _needed(layer, read)
            ends = layer._kind in KERNELS
            for t in layer._outputs:
                share = parts.get(str(held(layer, "name")).removesuffix("/weights"), 1)
                if isinstance(layer, IConstantLayer):
                    read[t] = {t: int(share * _bytes(t))}
                elif ends or t._is_output:
                    moved += _written(layer, t)
                    read[t] = {t: _bytes(t)}
                else:
                    read[t] = {x: min(n, _bytes(t)) for x, n in needed.items()}
            if ends or any(t._is_output for t in layer._outputs):
                moved += sum(needed.values())
                kernels += 1
    return moved, kernels


def _needed(layer: Layer, read: Mapping[ITensor, Read]) -> Read:
    """Return what a layer reads. Entries of a table are as many as come out; an update reads no
    cache."""
    first = 1 if layer._kind == "KV cache update" else 0
    found: Read = {}
    for t in (t for t in layer._inputs[first:] if t is not None):
        for x, n in read[t].items():
            found[x] = max(found.get(x, 0), n)
    if layer._kind == "gather":
        found = {x: min(n, _bytes(layer._outputs[0])) for x, n in found.items()}
    return found


def _written(layer: Layer, t: ITensor) -> int:
    return _bytes(layer._in(1) if layer._kind == "KV cache update" else t)


def _bytes(t: ITensor) -> int:
    return volume(t._dims) * TORCH[t._dtype].itemsize
