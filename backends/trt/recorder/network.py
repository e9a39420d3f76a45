"""`INetworkDefinition`, the conditional, and the rules that concern a network as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from . import layers as kinds
from .enums import (
    TORCH,
    ActivationType,
    AttentionNormalizationOp,
    CausalMaskKind,
    CollectiveOperation,
    DataType,
    ElementWiseOperation,
    GatherMode,
    KVCacheMode,
    MatrixOperation,
    ReduceOperation,
    Severity,
    TopKOperation,
    UnaryOperation,
)
from .layers import Dims, ITensor, Layer, Shape, Weights, volume
from .limits import MAX_DIMS
from .ranks import Exchange
from .record import Attribute, Recorded, api, held, keep, need

L = TypeVar("L", bound=Layer)


class INetworkDefinition(Recorded):
    """Made by `Builder.create_network`."""

    _api_name = "INetworkDefinition"
    _attention: type[kinds.IAttention] = kinds.IAttention

    def __init__(self, module: Any, flags: int = 0, builder: Any = None) -> None:
        self._calls, self._module, self._flags = module.calls, module, int(flags)
        self._builder = builder
        self._inputs: list[ITensor] = []
        self._outputs: list[ITensor] = []
        self._layers: list[Layer] = []
        self._conditionals: list[IIfConditional] = []
        self._bound: Mapping[str, Shape] = {}
        self._epoch = 0
        #: of an execution: constants by layer, and what gives the tensors of all ranks
        self._constants: dict[int, Any] = {}
        self._exchange: Exchange | None = None
        self._weight_names: dict[int, str] = {}

    def _tell(self, message: str) -> None:
        """Write an error into the builder's log, where TensorRT says why it refuses a layer."""
        if self._builder:
            self._builder._logger.log(Severity.ERROR, message)

    name = Attribute("str", "")
    builder = Attribute(None, read=lambda n: n._builder)
    flags = Attribute(None, read=lambda n: n._flags)
    num_inputs = Attribute(None, read=lambda n: len(n._inputs))
    num_layers = Attribute(None, read=lambda n: len(n._layers))

    @api
    def get_layer(self, index: int) -> Layer:
        return self._layers[int(index)]

    @api
    def set_weights_name(self, weights: Weights, name: str) -> bool:
        used = [x for x in self._layers if isinstance(x, kinds.IConstantLayer)]
        if not any(held(x, "weights") is weights for x in used):
            return False
        self._weight_names[id(weights)] = name
        return True

    # --- inputs and outputs -------------------------------------------------------------------

    @api
    def add_input(self, name: str, dtype: DataType, shape: Dims) -> ITensor:
        dims = tuple(int(d) for d in shape)
        allowed = {*kinds.CASTABLE, DataType.FP8}
        need(dtype in allowed, f"input {name}: {dtype.name} is not supported here")
        need(name and name not in _names(self), f"input {name!r}: a name of its own")
        need(len(dims) <= MAX_DIMS, f"input {name}: {list(dims)} has too many dims")
        need(all(d >= -1 for d in dims), f"input {name}: {list(dims)}")
        tensor = ITensor(self, None, len(self._inputs), name, (dtype, dims))
        self._inputs.append(tensor)
        return tensor

    @api
    def mark_output(self, tensor: ITensor) -> None:
        need(not tensor._is_output, f"{tensor._title} is an output already")
        need(tensor._layer is not None, f"{tensor._title}: an input cannot be an output")
        tensor._is_output = True
        self._outputs.append(tensor)

    # --- layers -------------------------------------------------------------------------------

    def _add(self, kind: type[L], inputs: Sequence[ITensor], outputs: int = 1, **members: Any) -> L:
        layer = kind(self, inputs, outputs)
        for member, value in members.items():
            keep(layer, member, value)
        if not layer._lazy:
            layer._look()
        return layer

    @api
    def add_constant(self, shape: Dims, weights: Weights) -> kinds.IConstantLayer:
        return self._add(kinds.IConstantLayer, (), shape=tuple(shape), weights=weights)

    @api
    def add_identity(self, input: ITensor) -> kinds.IIdentityLayer:
        return self._add(kinds.IIdentityLayer, [input])

    @api
    def add_cast(self, input: ITensor, to_type: DataType) -> kinds.ICastLayer:
        return self._add(kinds.ICastLayer, [input], to_type=to_type)

    @api
    def add_dequantize(
        self, input: ITensor, scale: ITensor, output_type: DataType
    ) -> kinds.IDequantizeLayer:
        return self._add(kinds.IDequantizeLayer, [input, scale], to_type=output_type)

    @api
    def add_unary(self, input: ITensor, op: UnaryOperation) -> kinds.IUnaryLayer:
        return self._add(kinds.IUnaryLayer, [input], op=op)

    @api
    def add_activation(self, input: ITensor, type: ActivationType) -> kinds.IActivationLayer:
        return self._add(kinds.IActivationLayer, [input], type=type)

    @api
    def add_elementwise(
        self, input1: ITensor, input2: ITensor, op: ElementWiseOperation
    ) -> kinds.IElementWiseLayer:
        return self._add(kinds.IElementWiseLayer, [input1, input2], op=op)

    @api
    def add_matrix_multiply(
        self,
        input0: ITensor,
        op0: MatrixOperation,
        input1: ITensor,
        op1: MatrixOperation,
    ) -> kinds.IMatrixMultiplyLayer:
        return self._add(kinds.IMatrixMultiplyLayer, [input0, input1], op0=op0, op1=op1)

    @api
    def add_softmax(self, input: ITensor) -> kinds.ISoftMaxLayer:
        return self._add(kinds.ISoftMaxLayer, [input])

    @api
    def add_reduce(
        self, input: ITensor, op: ReduceOperation, axes: int, keep_dims: bool
    ) -> kinds.IReduceLayer:
        return self._add(kinds.IReduceLayer, [input], op=op, axes=axes, keep_dims=keep_dims)

    @api
    def add_topk(
        self,
        input: ITensor,
        op: TopKOperation,
        k: int,
        axes: int,
        indices_type: DataType = DataType.INT32,
    ) -> kinds.ITopKLayer:
        return self._add(
            kinds.ITopKLayer, [input], 2, op=op, k=k, axes=axes, indices_type=indices_type
        )

    @api
    def add_shuffle(self, input: ITensor) -> kinds.IShuffleLayer:
        return self._add(kinds.IShuffleLayer, [input])

    @api
    def add_concatenation(self, inputs: Sequence[ITensor]) -> kinds.IConcatenationLayer:
        return self._add(kinds.IConcatenationLayer, inputs)

    @api
    def add_slice(
        self, input: ITensor, start: Dims, shape: Dims, stride: Dims
    ) -> kinds.ISliceLayer:
        return self._add(
            kinds.ISliceLayer, [input], start=tuple(start), shape=tuple(shape), stride=tuple(stride)
        )

    @api
    def add_select(
        self, condition: ITensor, then_input: ITensor, else_input: ITensor
    ) -> kinds.ISelectLayer:
        return self._add(kinds.ISelectLayer, [condition, then_input, else_input])

    @api
    def add_shape(self, input: ITensor) -> kinds.IShapeLayer:
        return self._add(kinds.IShapeLayer, [input])

    @api
    def add_gather(self, input: ITensor, indices: ITensor, axis: int) -> kinds.IGatherLayer:
        return self._add(
            kinds.IGatherLayer, [input, indices], mode=kinds.GatherMode.DEFAULT, axis=axis
        )

    @api
    def add_gather_v2(
        self, input: ITensor, indices: ITensor, mode: GatherMode
    ) -> kinds.IGatherLayer:
        return self._add(kinds.IGatherLayer, [input, indices], mode=mode)

    @api
    def add_kv_cache_update(
        self,
        cache: ITensor,
        update: ITensor,
        write_indices: ITensor,
        cache_mode: KVCacheMode,
    ) -> kinds.IKVCacheUpdateLayer:
        inputs = [cache, update, write_indices]
        return self._add(kinds.IKVCacheUpdateLayer, inputs, cache_mode=cache_mode)

    @api
    def add_dist_collective(
        self,
        input: ITensor,
        dist_collective_op: CollectiveOperation,
        reduce_op: ReduceOperation,
        root: int,
        groups: Sequence[int],
    ) -> kinds.IDistCollectiveLayer:
        layer = self._add(kinds.IDistCollectiveLayer, [input])
        layer._operation, layer._reduce = dist_collective_op, reduce_op
        layer._root, layer._groups = root, tuple(groups)
        return layer

    @api
    def add_attention(
        self,
        query: ITensor,
        key: ITensor,
        value: ITensor,
        norm_op: AttentionNormalizationOp,
        causal: bool,
    ) -> kinds.IAttention:
        need(not causal, "attention: causal is UPPER_LEFT, which hides what lies before a chunk")
        return self._add(self._attention, [query, key, value], norm_op=norm_op, causal=causal)

    @api
    def add_plugin(self, func: Callable, aot: bool) -> kinds.IPluginV3Layer:
        """Add a plugin that is compiled ahead of time; `func` as `tensorrt.plugin.op` gives it."""
        need(aot, "add_plugin: only plugins that are compiled ahead of time")
        inputs, shapes, plugin = func()
        need(not shapes, "add_plugin: no shape inputs")
        count = plugin.of.outputs
        return self._add(kinds.IPluginV3Layer, inputs, count, plugin=plugin)

    @api
    def add_if_conditional(self) -> IIfConditional:
        self._conditionals.append(IIfConditional(self))
        return self._conditionals[-1]


class INetworkDefinition11(INetworkDefinition):
    """INetworkDefinition of version 11."""

    _attention = kinds.IAttention11

    @api
    def add_attention_v2(
        self,
        query: ITensor,
        key: ITensor,
        value: ITensor,
        norm_op: AttentionNormalizationOp,
        causal_kind: CausalMaskKind,
    ) -> kinds.IAttention:
        return self._add(
            self._attention, [query, key, value], norm_op=norm_op, causal_kind=causal_kind
        )


class IIfConditional(Recorded):
    """Branches are told from the layers that lead to its outputs."""

    def __init__(self, network: INetworkDefinition) -> None:
        self._calls, self._network = network._calls, network
        self._condition: kinds.IConditionLayer | None = None
        self._ends: list[kinds.IIfConditionalOutputLayer] = []

    name = Attribute("str", "")

    @api
    def set_condition(self, condition: ITensor) -> kinds.IConditionLayer:
        self._condition = kinds.IConditionLayer(self, [condition], 0)
        self._condition._look()
        return self._condition

    @api
    def add_input(self, input: ITensor) -> kinds.IIfConditionalInputLayer:
        layer = kinds.IIfConditionalInputLayer(self, [input])
        layer._look()
        return layer

    @api
    def add_output(
        self, true_subgraph_output: ITensor, false_subgraph_output: ITensor
    ) -> kinds.IIfConditionalOutputLayer:
        ends = [true_subgraph_output, false_subgraph_output]
        self._ends.append(kinds.IIfConditionalOutputLayer(self, ends))
        self._ends[-1]._look()
        return self._ends[-1]


# --- a network as a whole ---------------------------------------------------------------------


def _names(network: INetworkDefinition) -> set[str]:
    return {held(t, "name") for t in (*network._inputs, *network._outputs)}


def check(network: INetworkDefinition) -> None:
    """Check a network as the builder does before it builds; RuleError."""
    typed = network._module.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    always = not network._module.__version__.startswith("10.")
    need(always or network._flags >> int(typed) & 1, "the network is not STRONGLY_TYPED")
    for layer in network._layers:
        layer._look()
    need(network._outputs, "the network has no output")
    names = [held(t, "name") for t in (*network._inputs, *network._outputs)]
    need(all(names), "every output of the network has a name")
    twice = sorted({n for n in names if names.count(n) > 1})
    need(not twice, f"several inputs or outputs are called {', '.join(twice)}")
    for layer in network._layers:
        if isinstance(layer, kinds.IKVCacheUpdateLayer):
            _check_cache(network, layer)
    need(len(_ranks(network)) <= 1, f"collectives of {_ranks(network)} ranks in one network")
    interiors(network)


def _ranks(network: INetworkDefinition) -> list[int]:
    found = (x for x in network._layers if isinstance(x, kinds.IDistCollectiveLayer))
    return sorted({x._ranks for x in found})


def ranks_of(network: INetworkDefinition) -> int:
    """Return how many ranks run a network together."""
    return max(_ranks(network), default=1)


def _check_cache(network: INetworkDefinition, layer: Layer) -> None:
    """Check that nobody else looks at an update's input: input and output are one memory."""
    layer._need(layer._outputs[0]._is_output, "its output is no output of the network")
    cache = layer._inputs[0]
    readers = [x for x in network._layers if x is not layer and cache in x._inputs]
    others = ", ".join(x._title for x in readers)
    layer._need(not readers, f"{others} also reads {cache._title}")  # type: ignore[union-attr]


def aliases(network: INetworkDefinition) -> dict[str, str]:
    """Return, by output, the input whose memory it is."""
    updates = [x for x in network._layers if isinstance(x, kinds.IKVCacheUpdateLayer)]
    return {held(x._outputs[0], "name"): held(x._in(0), "name") for x in updates}


Branches = dict[kinds.IIfConditionalOutputLayer, tuple[list[Layer], list[Layer]]]


def interiors(network: INetworkDefinition) -> Branches:
    """Return the layers of both branches of each conditional output; RuleError where a branch reads
    what did not come in through an input layer, or something else reads what is inside."""
    found: Branches = {}
    for conditional in network._conditionals:
        name = held(conditional, "name") or "a conditional"
        need(conditional._condition, f"{name} has no condition")
        need(conditional._ends, f"{name} has no output")
        for end in conditional._ends:
            then, other = (_interior(conditional, end._in(i)) for i in (0, 1))
            both = [x for x in then if x in other and x._inputs]
            need(not both, f"{name}: both branches hold {both[0]._title if both else ''}")
            found[end] = (sorted(then, key=_place), sorted(other, key=_place))
    _check_enclosed(network, found)
    return found


def _place(layer: Layer) -> int:
    return layer._index


def _interior(conditional: IIfConditional, end: ITensor) -> set[Layer]:
    seen: set[Layer] = set()
    rest = [end]
    while rest:
        tensor = rest.pop()
        layer = tensor._layer
        name = held(conditional, "name") or "a conditional"
        need(layer, f"{name}: a branch reads {tensor._title}, which did not come in as an input")
        assert layer
        mine = isinstance(layer, kinds.IIfConditionalInputLayer) and (
            layer._conditional is conditional
        )
        if layer in seen or mine:
            continue
        seen.add(layer)
        rest += [t for t in layer._inputs if t is not None]
    return seen


def _check_enclosed(network: INetworkDefinition, found: Branches) -> None:
    inside = {x: end for end, sides in found.items() for side in sides for x in side}
    for layer in network._layers:
        for tensor in layer._inputs:
            maker = tensor._layer if tensor else None
            end = inside.get(maker) if maker and maker._inputs else None
            fits = end is None or layer is end or inside.get(layer) is end
            layer._need(fits, f"reads {tensor._title if tensor else ''}, inside a conditional")
    for tensor in network._outputs:
        maker = tensor._layer
        hidden = maker in inside and maker not in found
        need(not hidden, f"output {tensor._title} lies inside a conditional")


@contextmanager
def bound(network: INetworkDefinition, inputs: Mapping[str, Shape]) -> Iterator[None]:
    """A context in which inputs have these shapes."""
    network._bound = inputs
    network._epoch += 1
    try:
        yield
    finally:
        network._bound = {}
        network._epoch += 1


def volumes(network: INetworkDefinition, inputs: Mapping[str, Shape]) -> dict[str, int]:
    """Count the elements of each tensor, by name or layer name, where inputs have these shapes."""
    with bound(network, inputs):
        return _volumes(network)


def _volumes(network: INetworkDefinition) -> dict[str, int]:
    return {
        held(t, "name") or f"{layer._title} {i}": volume(t._dims)
        for layer in network._layers
        for i, t in enumerate(layer._outputs)
    }


def sizes(network: INetworkDefinition, inputs: Mapping[str, Shape]) -> tuple[dict[str, int], int]:
    """Return `volumes`, and the most bytes of tensors that exist at a time, where no two layers are
    fused and each tensor is there from its layer to its last reader. Inputs, outputs and constants
    lie elsewhere."""
    with bound(network, inputs):
        return _volumes(network), _live_bytes(network)


def _live_bytes(network: INetworkDefinition) -> int:
    roots: dict[ITensor, ITensor] = {}
    last: dict[ITensor, int] = {}
    for i, layer in enumerate(network._layers):
        ins = [t for t in layer._inputs if t is not None]
        for t in ins:
            last[roots.get(t, t)] = i
        if _is_view(layer):
            roots[layer._outputs[0]] = roots.get(ins[0], ins[0])
    ends: dict[int, int] = {}
    live = most = 0
    for i, layer in enumerate(network._layers):
        size = sum(_own_bytes(layer, t) for t in layer._outputs if t in last)
        for t in layer._outputs:
            if t in last:
                ends[last[t]] = ends.get(last[t], 0) + _own_bytes(layer, t)
        live += size
        most = max(most, live)
        live -= ends.pop(i, 0)
    return most


def _is_view(layer: Layer) -> bool:
    """Whether the output of a layer is its input's memory."""
    if isinstance(layer, kinds.IShuffleLayer):
        return held(layer, "first_transpose") is None and held(layer, "second_transpose") is None
    return isinstance(layer, kinds.IIdentityLayer | kinds.IKVCacheUpdateLayer)


def _own_bytes(layer: Layer, t: ITensor) -> int:
    elsewhere = isinstance(layer, kinds.IConstantLayer) or t._is_output or _is_view(layer)
    return 0 if elsewhere else volume(t._dims) * TORCH[t._dtype].itemsize
