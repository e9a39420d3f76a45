"""`INetworkDefinition`, the rules that concern a network as a whole, and its execution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from . import kinds, layout
from .enums import TORCH, DataType, Severity
from .layers import HELD, MAX_DIMS, ITensor, Layer, Shape, volume
from .ranks import Exchange
from .record import Attribute, Recorded, method, need

_COLLECTIVE = "input dist_collective_op reduce_op root groups"
#: method -> the layer that it adds, and its parameters
ADDED: Mapping[str, tuple[type[Layer], str]] = {
    "add_constant": (kinds.IConstantLayer, "shape weights"),
    "add_identity": (kinds.IIdentityLayer, "input"),
    "add_cast": (kinds.ICastLayer, "input to_type"),
    "add_dequantize": (kinds.IDequantizeLayer, "input scale output_type"),
    "add_unary": (kinds.IUnaryLayer, "input op"),
    "add_activation": (kinds.IActivationLayer, "input type"),
    "add_elementwise": (kinds.IElementWiseLayer, "input1 input2 op"),
    "add_matrix_multiply": (kinds.IMatrixMultiplyLayer, "input0 op0 input1 op1"),
    "add_softmax": (kinds.ISoftMaxLayer, "input"),
    "add_reduce": (kinds.IReduceLayer, "input op axes keep_dims"),
    "add_topk": (kinds.ITopKLayer, "input op k axes indices_type"),
    "add_select": (kinds.ISelectLayer, "condition then_input else_input"),
    "add_shuffle": (layout.IShuffleLayer, "input"),
    "add_slice": (layout.ISliceLayer, "input start shape stride"),
    "add_shape": (layout.IShapeLayer, "input"),
    "add_gather": (layout.IGatherLayer, "input indices axis"),
    "add_gather_v2": (layout.IGatherLayer, "input indices mode"),
    "add_kv_cache_update": (kinds.IKVCacheUpdateLayer, "cache update write_indices cache_mode"),
    "add_dist_collective": (kinds.IDistCollectiveLayer, _COLLECTIVE),
    "add_attention": (kinds.IAttention, "query key value norm_op causal"),
    "add_attention_v2": (kinds.IAttention, "query key value norm_op causal_kind"),
}


def _adder(name: str, kind: type[Layer], parameters: str) -> Any:
    def added(network: INetworkDefinition, **given: Any) -> Layer:
        """Add a layer of these tensors; other arguments become attributes."""
        layer = kind(network, [x for x in given.values() if isinstance(x, ITensor)])
        for n, x in given.items():
            if not isinstance(x, ITensor):
                setattr(layer, f"_{n}", x)
        return layer

    return method(name, parameters.split(), added)


class INetworkDefinition(Recorded):
    """Made by `Builder.create_network`."""

    def __init__(self, flags: int = 0, builder: Any = None) -> None:
        self._flags, self._builder = int(flags), builder
        self._inputs: list[ITensor] = []
        self._outputs: list[ITensor] = []
        self._layers: list[Layer] = []
        self._bound: Mapping[str, Shape] = {}
        self._epoch = 0
        #: of an execution: constants by layer, and what gives the tensors of all ranks
        self._constants: dict[int, torch.Tensor] = {}
        self._exchange: Exchange | None = None
        self._weight_names: dict[int, str] = {}

    def _tell(self, message: str) -> None:
        """Write an error into the builder's log, where TensorRT says why it refuses a layer."""
        if self._builder:
            self._builder._logger.log(Severity.ERROR, message)

    num_inputs = Attribute(read=lambda n: len(n._inputs))
    num_layers = Attribute(read=lambda n: len(n._layers))

    def get_layer(self, index: int) -> Layer:
        return self._layers[int(index)]

    def set_weights_name(self, weights: Any, name: str) -> bool:
        self._weight_names[id(weights)] = name
        return any(x._weights is weights for x in self._constant_layers())

    def _constant_layers(self) -> list[Any]:
        return _of_kind(self, kinds.IConstantLayer)

    def add_input(self, name: str, dtype: Any, shape: Sequence[int]) -> ITensor:
        dims = tuple(int(d) for d in shape)
        need(dtype in HELD, f"input {name}: {dtype.name} is not supported here")
        need(name and name not in _names(self), f"input {name!r}: a name of its own")
        need(len(dims) <= MAX_DIMS, f"input {name}: {list(dims)} has too many dims")
        tensor = ITensor(self, None, len(self._inputs), (dtype, dims))
        tensor._name = name
        self._inputs.append(tensor)
        return tensor

    def mark_output(self, tensor: ITensor) -> None:
        need(not tensor._is_output, f"{tensor._title} is an output already")
        need(tensor._layer is not None, f"{tensor._title}: an input cannot be an output")
        tensor._is_output = True
        self._outputs.append(tensor)

    def add_concatenation(self, inputs: Sequence[ITensor]) -> Layer:
        return layout.IConcatenationLayer(self, inputs)


for _name, _row in ADDED.items():
    setattr(INetworkDefinition, _name, _adder(_name, *_row))


# --- a network as a whole ---------------------------------------------------------------------


def _names(network: INetworkDefinition) -> list[str]:
    return [t._name for t in (*network._inputs, *network._outputs)]


def check(network: INetworkDefinition) -> None:
    """Check a network as the builder does before it builds; RuleError."""
    for layer in network._layers:
        assert layer._types is not None  # a look at its rules
    need(network._outputs, "the network has no output")
    names = _names(network)
    need(all(names), "every output of the network has a name")
    twice = sorted({n for n in names if names.count(n) > 1})
    need(not twice, f"several inputs or outputs are called {', '.join(twice)}")
    for layer in _of_kind(network, kinds.IKVCacheUpdateLayer):
        layer._need(layer._outputs[0]._is_output, "its output is no output of the network")
    for layer in network._layers:
        layer._check()
    ranks = {x._num_ranks for x in _of_kind(network, kinds.IDistCollectiveLayer)}
    need(len(ranks) <= 1, f"collectives of {sorted(ranks)} ranks in one network")


def _of_kind(network: INetworkDefinition, kind: type[Layer]) -> list[Any]:
    return [x for x in network._layers if isinstance(x, kind)]


def ranks_of(network: INetworkDefinition) -> int:
    """Return how many ranks run a network together."""
    return max((x._num_ranks for x in _of_kind(network, kinds.IDistCollectiveLayer)), default=1)


def aliases(network: INetworkDefinition) -> dict[str, str]:
    """Return, by output, the input whose memory it is."""
    updates = _of_kind(network, kinds.IKVCacheUpdateLayer)
    return {x._outputs[0]._name: x._in(0)._name for x in updates}


def execute(
    network: INetworkDefinition,
    feeds: Mapping[str, torch.Tensor],
    exchange: Exchange | None = None,
) -> dict[str, torch.Tensor]:
    """Return outputs by name; caches that are updated share the memory of what was fed. `exchange`
    gives the tensors of all ranks. RuleError where a tensor is not what the network says."""
    network._exchange = exchange
    known, sizes = {t._name: t for t in network._inputs}, dict[str, int]()
    wrong = ", ".join(sorted(known.keys() ^ feeds.keys()))
    need(not wrong, f"not fed, or fed and no input of this network: {wrong}")
    values: dict[ITensor, torch.Tensor] = {}
    for name, tensor in known.items():
        tensor._check(feeds[name])
        tensor._agree(feeds[name].shape, sizes)
        values[tensor] = feeds[name]
    for layer in network._layers:
        made = layer._run(*(values[t] for t in layer._given))
        for tensor, value in zip(layer._outputs, made, strict=True):
            tensor._check(value)
            values[tensor] = value
    return {t._name: values[t] for t in network._outputs}


# --- what a network takes ---------------------------------------------------------------------


@contextmanager
def _bound(network: INetworkDefinition, inputs: Mapping[str, Shape]) -> Iterator[None]:
    network._bound = inputs
    network._epoch += 1
    for layer in network._layers:  # in order: else a layer asks all before it on one stack
        assert layer._types is not None
    try:
        yield
    finally:
        network._bound = {}
        network._epoch += 1


def scratch_bytes(network: INetworkDefinition, inputs: Mapping[str, Shape]) -> int:
    """Return the most bytes at a time of tensors between layers, where inputs have these shapes,
    nothing is fused but what is reduced, and each tensor is there up to its last reader."""
    with _bound(network, inputs):
        roots: dict[ITensor, ITensor] = {}
        last: dict[ITensor, int] = {}
        until = _reduced(network)
        for i, layer in enumerate(network._layers):
            for t in layer._given:
                root = roots.get(t, t)
                last[root] = max(last.get(root, 0), until.get(layer, i))
            if _is_view(layer):
                roots[layer._outputs[0]] = roots.get(layer._in(), layer._in())
        ends: dict[int, int] = {}
        live = most = 0
        for i, layer in enumerate(network._layers):
            made = [t for t in layer._outputs if t in last and not t._is_output]
            beside = layer._kind == "constant" or _is_view(layer) or layer in until
            for t in [] if beside else made:
                live += _bytes(t)
                ends[last[t]] = ends.get(last[t], 0) + _bytes(t)
            most = max(most, live)
            live -= ends.pop(i, 0)
        return most


def _bytes(t: ITensor) -> int:
    bits = 4 if t._type[0] == DataType.INT4 else 8 * TORCH[t._type[0]].itemsize
    return volume(t._dims) * bits // 8


def _reduced(network: INetworkDefinition) -> dict[Layer, int]:
    """Return the layers that are done within the sums that alone read them, and how far in the
    network these are."""
    readers: dict[ITensor, list[Layer]] = {}
    for layer in network._layers:
        for t in layer._given:
            readers.setdefault(t, []).append(layer)
    found: dict[Layer, int] = {}
    for layer in reversed(network._layers):
        after = readers.get(layer._outputs[0], [])
        within = all(x._kind == "reduce" or x in found for x in after)
        if layer._kind in POINTWISE and after and within and not layer._outputs[0]._is_output:
            found[layer] = max(found.get(x, x._index) for x in after)
    return found


def _is_view(layer: Layer) -> bool:
    if layer._kind == "shuffle":
        return layer._first_transpose is None and layer._second_transpose is None
    return layer._kind in ("identity", "KV cache update")


#: layers that a sum of what they make does as it reads
POINTWISE = ("cast", "elementwise", "unary", "activation", "select")
