"""Rules that no document has: builders were seen to refuse what breaks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import layers as kinds
from .enums import ElementWiseOperation
from .layers import Layer
from .network import INetworkDefinition
from .record import held, need

#: layers that give each number its own, or put it elsewhere
_KEEPING = (
    kinds.IActivationLayer,
    kinds.ICastLayer,
    kinds.IElementWiseLayer,
    kinds.IIdentityLayer,
    kinds.ISelectLayer,
    kinds.IShuffleLayer,
    kinds.IUnaryLayer,
)


def taken_for_attention(network: INetworkDefinition) -> list[str]:
    """Return names of the layers that TensorRT takes for an attention with a mask: an IAttention
    that has one, and each softmax between two products into which a mask comes."""
    readers: dict[int, list[Layer]] = {}
    for layer in network._layers:
        for tensor in layer._inputs:
            readers.setdefault(id(tensor), []).append(layer)
    return [str(held(x, "name")) for x in network._layers if _is_masked(x, readers)]


def check_wrapped(network: INetworkDefinition, least: int | None) -> None:
    """Refuse networks of that many layers or more as builders of 10.16 to 11.2 were seen to
    (NVIDIA/TensorRT-Model-Connect, issues 245 and 955): the wrapper of such an attention expects
    queries, keys and values, and finds the mask beside them."""
    if least is not None and len(network._layers) >= least:
        found = taken_for_attention(network)
        need(not found, f"wrap_attention: {', '.join(found[:1])} has a mask, 3 inputs are expected")


def _is_masked(layer: Layer, readers: dict[int, list[Layer]]) -> bool:
    if isinstance(layer, kinds.IAttention):
        return held(layer, "mask") is not None
    if not isinstance(layer, kinds.ISoftMaxLayer):
        return False
    before, after = [*_before(layer)], [*_after(layer, readers)]
    between = all(
        any(isinstance(x, kinds.IMatrixMultiplyLayer) for x in s) for s in (before, after)
    )
    return between and any(map(_masks, before))


def _masks(layer: Layer) -> bool:
    """Whether a layer chooses by a mask, or adds one."""
    if isinstance(layer, kinds.IElementWiseLayer):
        varying = all(t and not isinstance(t._layer, kinds.IConstantLayer) for t in layer._inputs)
        return varying and held(layer, "op") is ElementWiseOperation.SUM
    return isinstance(layer, kinds.ISelectLayer)


def _before(layer: Layer) -> Iterator[Layer]:
    """Yield what a layer is made of, back to the layers that keep no number apart."""
    yield from _along(layer, lambda x: [t._layer for t in x._inputs if t and t._layer])


def _after(layer: Layer, readers: dict[int, list[Layer]]) -> Iterator[Layer]:
    yield from _along(layer, lambda x: [r for t in x._outputs for r in readers.get(id(t), [])])


def _along(layer: Layer, beside: Callable[[Layer], list[Layer]]) -> Iterator[Layer]:
    seen, rest = set[Layer](), beside(layer)
    while rest:
        found = rest.pop()
        if found in seen:
            continue
        seen.add(found)
        yield found
        if isinstance(found, _KEEPING):
            rest += beside(found)
