"""The tensor primitives as layers of an `INetworkDefinition`, strongly typed.

Each layer is named after the IR value that it is made for and its primitive, so that what the
builder says can be read. Weights are handed over by address: nothing is copied, and bf16 needs no
numpy dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from g4ir.backends.primitives.emitter import Emitter, Operand, reshape_spec
from g4ir.errors import LowerError
from g4ir.ir.graph import Value
from g4ir.ops.types import FLOATS, Type, dtype_name, torch_dtype

from .host import data_type
from .recorder import MAX_DIMS, MAX_TOP_K

Made = TypeVar("Made")
#: most numbers of a constant that is made of others
MOST_FOLDED = 1 << 18
#: the root of a collective in which all ranks are alike
NO_ROOT = -1
#: factor of the codes of rows before a product: codes with one scale, and their product, are one
#: kernel. Not 1, which is no scale to a builder.
PART = 2.0**-7
#: constants of these do not exist: they are stored as the second and cast
STORED_AS = {"bool": "i32"}
ACTIVATIONS = {
    "gelu_pytorch_tanh": "GELU_TANH",
    "gelu": "GELU_ERF",
    "sigmoid": "SIGMOID",
    "tanh": "TANH",
}
#: primitives that TensorRT calls otherwise
NAMES = {"add": "SUM", "mul": "PROD", "eq": "EQUAL", "gt": "GREATER", "lt": "LESS", "mean": "AVG"}
#: op among ranks -> operation, and how it joins what they have
COLLECTIVES = {"all_reduce": ("ALL_REDUCE", "SUM"), "all_gather": ("ALL_GATHER", "NONE")}


@dataclass(eq=False)
class Stored:
    """The numbers of a param or of a constant, None where they are not there; and the tensors of
    the network that are these in a shape: the first is their layer's."""

    name: str
    dtype: str
    count: int
    numbers: Callable[[], torch.Tensor | None]
    param: bool = False
    tensors: dict[tuple[int, ...], Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Constant:
    """A handle: stored numbers in a shape, for which there need not be a layer yet."""

    stored: Stored
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Dequantized:
    """A handle: codes in a shape, whose scales are one number, or have the codes' rank: a scale for
    each group of neighbours along a dim. There is a layer for each product that takes them."""

    codes: Constant
    scales: Operand


@dataclass(frozen=True, eq=False)
class Laid:
    """A handle: a tensor in another layout, for which there need not be a layer yet: transposed,
    then reshaped, then transposed, which one layer does."""

    source: Operand
    order: tuple[int, ...]
    reshaped: Type
    second: tuple[int, ...]
    primitive: str
    #: the output of its layer, once it is read
    tensors: list[Any] = field(default_factory=list)


class TrtEmitter(Emitter):
    """Writes into `network`. `trt` is the `tensorrt` module, or what stands for it."""

    gathers_codes = False

    def __init__(
        self,
        trt: Any,
        network: Any,
        params: Callable[[str], torch.Tensor] | None = None,
        said: Callable[[], str] = lambda: "its log says why",
        whole_attention: bool = False,
    ) -> None:
        self.trt, self.network = trt, network
        #: name of a param -> its tensor, which is not copied; without it weights have no memory,
        #: and the network is looked at, not built
        self.params = params
        #: TensorRT's last errors
        self.said = said
        #: whether an attention layer that is not one kernel is to be refused
        self.whole_attention = whole_attention
        #: tensors whose memory the network points to, until it is built
        self.held: list[torch.Tensor] = []
        #: by name: weights that have a layer, and the tensors of constants among them
        self.weights: dict[str, Any] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self._counts: Counter[str] = Counter()
        #: of params and of what is made of constants, by name; of constants, by what is in them
        self._known: dict[str, Stored] = {}
        self._small: dict[Any, Stored] = {}
        self._shared: dict[Any, Any] = {}
        #: name of a dim -> an input that has it, and where
        self._inputs: dict[str, tuple[Operand, int]] = {}
        #: an input of whole numbers; stacks of 4-bit weights of which entries are gathered
        self._integers: Operand | None = None
        self._gathered: set[Stored] = set()

    # --- names and checks ---------------------------------------------------------------------

    def _name(self, primitive: str) -> str:
        base = f"{self.scope}/{primitive}"
        self._counts[base] += 1
        count = self._counts[base]
        return base if count == 1 else f"{base}.{count}"

    def named(self, layer: Any, primitive: str) -> Any:
        """Name a layer after what it is for. LowerError where TensorRT did not make it."""
        name = self._name(primitive)
        if layer is None:
            raise LowerError(f"TensorRT refused {name}: {self.said()}")
        layer.name = name
        return layer

    def made(self, layer: Any, primitive: str, t: Type, **attributes: Any) -> Operand:
        """Return the output of a new layer, which is given these attributes first."""
        self.named(layer, primitive)
        for name, value in attributes.items():
            setattr(layer, name, value)
        return self.checked(layer, t)

    def _add(self, kind: str, primitive: str, t: Type, *given: Any, **attributes: Any) -> Operand:
        """Add a layer (`add_KIND`) of what it is given, operands among it; return its output."""
        tensors = (self.tensor(x) if isinstance(x, Operand) else x for x in given)
        layer = getattr(self.network, f"add_{kind}")(*tensors)
        return self.made(layer, primitive, t, **attributes)

    def _once(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return what several layers read, made for the first of them."""
        if key not in self._shared:
            self._shared[key] = make()
        found: Made = self._shared[key]
        return found

    def checked(self, layer: Any, t: Type, index: int = 0) -> Operand:
        """Return an output of a layer, whose type TensorRT must see as we do."""
        tensor, kind = layer.get_output(index), data_type(self.trt, t.dtype)
        try:
            dtype, dims = tensor.dtype, tuple(tensor.shape)
        except ValueError as e:  # a shape of -1 dims: TensorRT could not infer it
            raise LowerError(
                f"{layer.name}: expected {t}, TensorRT finds no shape: {self.said()}"
            ) from e
        if dtype != kind or not _agree(_dims(t), dims):
            raise LowerError(
                f"{layer.name}: expected {t}, TensorRT says {dtype}{dims}: {self.said()}"
            )
        return Operand(t, tensor)

    def tensor(self, x: Operand) -> Any:
        """Return the network's tensor."""
        if isinstance(x.handle, Dequantized):
            return self._dequantized(x.handle, x.type)
        if isinstance(x.handle, Laid):
            return self._laid(x.handle)
        return self._stored(x.handle) if isinstance(x.handle, Constant) else x.handle

    def _dequantized(self, d: Dequantized, t: Type) -> Any:
        """Return the tensor of codes in their shape: nothing may lie between them and the layer."""
        s, scope, shape = d.codes.stored, self.scope, _dims(t)
        if shape not in s.tensors:
            self.scope, of = s.name, Type(s.dtype, shape)
            weights = self.weights.get(s.name) or self._weights(s, t.numel())
            s.tensors[shape] = self._add("constant", "codes", of, shape, weights).handle
        self.scope = scope
        codes, kind = s.tensors[shape], data_type(self.trt, t.dtype)
        return self._add("dequantize", "dequantize", t, codes, d.scales, kind).handle

    # --- sources ------------------------------------------------------------------------------

    def input(self, name: str, t: Type) -> Operand:
        tensor = self.network.add_input(name, data_type(self.trt, t.dtype), _dims(t))
        if tensor is None:
            raise LowerError(f"TensorRT refused the input {name}: {t}: {self.said()}")
        x = Operand(t, tensor)
        if t.dtype == "i64" and self._integers is None:
            self._integers = x
        for i, d in enumerate(t.shape):
            if isinstance(d, str):
                tensor.set_dimension_name(i, d)
                self._inputs.setdefault(d, (x, i))
        return x

    def param(self, v: Value) -> Operand:
        """Return a weight; LowerError, when it is read, for another type."""

        def numbers() -> torch.Tensor | None:
            if self.params is None:
                return None
            t = self.params(v.name)
            found = Type(dtype_name(t.dtype), tuple(t.shape))
            if found != v.type:
                raise LowerError(f"param {v} is {found}, the graph says {v.type}")
            return t.flatten()

        return self._called(v.name, v.type, numbers, param=True)

    def _called(
        self, name: str, t: Type, numbers: Callable[[], torch.Tensor | None], param: bool = False
    ) -> Operand:
        """Return what is stored under a name: a param, or a constant that is made of others when
        the network is written. A plan without weights has the latter from the constants beside it.
        """
        new = Stored(name, t.dtype, t.numel(), numbers, param)
        return Operand(t, Constant(self._known.setdefault(name, new), _dims(t)))

    def constant(self, tensor: torch.Tensor) -> Operand:
        dtype, t = dtype_name(tensor.dtype), tensor.detach().contiguous()
        if dtype in STORED_AS:
            return self.cast(self.constant(t.to(torch_dtype(STORED_AS[dtype]))), dtype)
        # Sizes are constants of rank 1, which a view of other ranks is not to TensorRT.
        sizes = dtype == "i64" and t.dim() == 1
        small = t.numel() <= MAX_DIMS
        key = (dtype, sizes, tuple(t.flatten().tolist())) if small else len(self._small)
        if key not in self._small:
            self._small[key] = Stored(f"constant.{len(self._small)}", dtype, t.numel(), t.flatten)
        shape = tuple(t.shape)
        return Operand(Type(dtype, shape), Constant(self._small[key], shape))

    def _weights(self, s: Stored, count: int) -> Any:
        """Return `trt.Weights` of so many stored numbers, by address."""
        numbers, address = s.numbers(), 0
        if numbers is not None:
            numbers = numbers.contiguous()
            address = numbers.data_ptr()
            self.held.append(numbers)
            if not s.param:
                self.constants[s.name] = numbers
        self.weights[s.name] = self.trt.Weights(data_type(self.trt, s.dtype), address, count)
        return self.weights[s.name]

    def _stored(self, c: Constant) -> Any:
        """Return a constant layer, made where it is read first; other shapes of it are shuffles."""
        s, scope = c.stored, self.scope
        if c.shape not in s.tensors:
            self.scope, t = s.name, Type(s.dtype, c.shape)
            if s.tensors:
                first = next(iter(s.tensors.values()))
                made = self._add("shuffle", "view", t, first, reshape_dims=c.shape)
            else:
                made = self._add("constant", "weights", t, c.shape, self._weights(s, s.count))
            self.scope = scope
            s.tensors[c.shape] = made.handle
        return s.tensors[c.shape]

    def output(self, name: str, x: Operand) -> None:
        tensor = self.tensor(x)
        if tensor.is_network_input or tensor.is_network_output:
            tensor = self._add("identity", "output", x.type, tensor).handle
        tensor.name = name
        self.network.mark_output(tensor)

    # --- pointwise ----------------------------------------------------------------------------

    def activation(self, name: str, x: Operand) -> Operand | None:
        if name not in ACTIVATIONS:
            return None
        kind = getattr(self.trt.ActivationType, ACTIVATIONS[name])
        return self._add("activation", name, x.type, x, kind)

    def _unary(self, kind: str, x: Operand, t: Type) -> Operand:
        if found := self.activation(kind, x):
            return found
        op = getattr(self.trt.UnaryOperation, kind.upper())
        return self._add("unary", kind, t, x, op)

    def _binary(self, kind: str, a: Operand, b: Operand, t: Type) -> Operand:
        op = getattr(self.trt.ElementWiseOperation, _operation(kind))
        return self._add("elementwise", kind, t, a, b, op)

    def _where(self, condition: Operand, a: Operand, b: Operand, t: Type) -> Operand:
        return self._add("select", "where", t, condition, a, b)

    def _cast(self, x: Operand, t: Type) -> Operand:
        if _is_small(x) and x.dtype in FLOATS and t.dtype in FLOATS:
            source = x.handle.stored.numbers

            def numbers() -> torch.Tensor | None:
                held = source()
                return None if held is None else held.to(torch_dtype(t.dtype))

            return self._called(f"{x.handle.stored.name}.{t.dtype}", t, numbers)
        return self._add("cast", f"to_{t.dtype}", t, x, data_type(self.trt, t.dtype))

    # --- products and sums --------------------------------------------------------------------

    def _linear(self, x: Operand, w: Operand, columns: bool, t: Type) -> Operand:
        """Return x w^T, the weight as [1, ..., out, in]: ranks are equal, x is not transposed."""
        lead = range(x.rank - 2)
        w = self.unsqueeze(w, *lead) if lead else w
        return self._product("linear", x, w, not columns, t)

    def _dequantize(self, codes: Operand, scales: Operand, axis: int, t: Type) -> Operand:
        """Return codes times the scales of groups, rounded once: in fp32 first, where scales have
        another dtype than the result, which no builder was seen to make one kernel of."""
        wide = t.dtype if scales.dtype == t.dtype else "f32"
        handle = Dequantized(codes.handle, self.cast(scales, wide))
        return self.cast(Operand(replace(t, dtype=wide), handle), t.dtype)

    def part(self, codes: Operand, dtype: str, reader: int) -> tuple[Operand, float] | None:
        power = PART / 2**reader
        small = self.constant(torch.tensor(power, dtype=torch_dtype(dtype)))
        t = Type(dtype, codes.shape)
        return Operand(t, Dequantized(codes.handle, small)), 1 / power

    def _bits(self, codes: Operand, t: Type) -> Operand:
        raise ValueError(f"{codes.type}: TensorRT's constants have one type")

    def _matmul(self, a: Operand, b: Operand, transpose_b: bool, t: Type) -> Operand:
        return self._product("matmul", a, b, transpose_b, t)

    def _product(self, primitive: str, a: Operand, b: Operand, turned: bool, t: Type) -> Operand:
        ops = self.trt.MatrixOperation
        op = ops.TRANSPOSE if turned else ops.NONE
        return self._add("matrix_multiply", primitive, t, a, ops.NONE, b, op)

    def _softmax(self, x: Operand, t: Type) -> Operand:
        return self._add("softmax", "softmax", t, x, axes=1 << (x.rank - 1))

    def _reduce(self, kind: str, x: Operand, axis: int, t: Type) -> Operand:
        op = getattr(self.trt.ReduceOperation, _operation(kind))
        return self._add("reduce", kind, t, x, op, 1 << axis, True)

    def _topk(self, x: Operand, k: int, values: Type, index: Type) -> tuple[Operand, Operand]:
        if k > MAX_TOP_K:
            raise ValueError(f"topk: {k} of {x.type}; TensorRT takes at most {MAX_TOP_K}")
        best, kind = self.trt.TopKOperation.MAX, data_type(self.trt, index.dtype)
        layer = self.network.add_topk(self.tensor(x), best, k, 1 << (x.rank - 1), kind)
        return self.made(layer, "topk", values), self.checked(layer, index, 1)

    def _exchange(self, op: str, x: Operand, ranks: int, t: Type) -> Operand:
        """Add an op of COLLECTIVES. Nothing says which rank this is."""
        kind, join = COLLECTIVES[op]
        operation = getattr(self.trt.CollectiveOperation, kind)
        by, every = getattr(self.trt.ReduceOperation, join), [*range(ranks)]
        layer = self.network.add_dist_collective(self.tensor(x), operation, by, NO_ROOT, every)
        return self.made(layer, op, t, num_ranks=ranks)

    def _attention(
        self, q: Operand, keys: Operand, values: Operand, mask: Operand, t: Type
    ) -> Operand:
        """Return one IAttention; never a causal kind beside the mask."""
        *rows, seen = map(self.tensor, (q, keys, values, mask))
        norm = self.trt.AttentionNormalizationOp.SOFTMAX
        layer = self.network.add_attention_v2(*rows, norm, self.trt.CausalMaskKind.NONE)
        decomposable = not self.whole_attention
        return self.made(layer, "attention", t, mask=seen, decomposable=decomposable)

    # --- layout -------------------------------------------------------------------------------

    def _reshape(self, x: Operand, t: Type) -> Operand:
        h = x.handle
        if isinstance(h, Constant):
            return Operand(t, replace(h, shape=_dims(t)))
        if isinstance(h, Laid) and _is_order(h.second):
            turned = _permuted(h.source.type, h.order)
            if reshape_spec(turned, t).count(-1) <= 1:
                return self._as_laid("reshape", h.source, h.order, t)
        return self._as_laid("reshape", x, range(x.rank), t)

    def _transpose(self, x: Operand, order: Sequence[int], t: Type) -> Operand:
        h = x.handle
        if not isinstance(h, Laid):
            return self._as_laid("transpose", x, order, t)
        second = [h.second[i] for i in order]
        if _permuted(h.source.type, h.order) != h.reshaped:
            return self._as_laid("transpose", h.source, h.order, h.reshaped, second)
        return self._as_laid("transpose", h.source, [h.order[i] for i in second], t)

    def _as_laid(
        self,
        primitive: str,
        x: Operand,
        order: Sequence[int],
        reshaped: Type,
        second: Sequence[int] | None = None,
    ) -> Operand:
        second = range(reshaped.rank) if second is None else second
        if reshaped == x.type and _is_order(order) and _is_order(second):
            return x
        laid = Laid(x, tuple(order), reshaped, tuple(second), primitive)
        return Operand(_permuted(reshaped, second), laid)

    def _laid(self, h: Laid) -> Any:
        if not h.tensors:
            turned = _permuted(h.source.type, h.order)
            how: dict[str, Any] = {}
            if not _is_order(h.order):
                how["first_transpose"] = h.order
            if h.reshaped != turned:
                how["reshape_dims"] = tuple(reshape_spec(turned, h.reshaped))
            if not _is_order(h.second):
                how["second_transpose"] = h.second
            t = _permuted(h.reshaped, h.second)
            h.tensors.append(self._add("shuffle", h.primitive, t, h.source, **how).handle)
        return h.tensors[0]

    def _unsqueeze(self, x: Operand, axes: Sequence[int], t: Type) -> Operand:
        """Add dims, by transposes where more than one of them would be -1."""
        if isinstance(x.handle, Dequantized):
            scales = x.handle.scales
            scales = self.unsqueeze(scales, *axes) if scales.rank else scales
            return Operand(t, replace(x.handle, scales=scales))
        if isinstance(x.handle, Constant) or reshape_spec(x.type, t).count(-1) <= 1:
            return self._reshape(x, t)
        front = x.type.with_shape(*x.shape, *[1] * len(axes))
        back, ones = iter(range(x.rank)), iter(range(x.rank, t.rank))
        order = [next(ones) if i in axes else next(back) for i in range(t.rank)]
        return self._as_laid("unsqueeze", x, range(x.rank), front, order)

    def _concat(self, xs: Sequence[Operand], axis: int, t: Type) -> Operand:
        if all(map(_is_small, xs)):
            return self._called(f"{self._name('concat')}.weights", t, lambda: _joined(xs, axis))
        return self._add("concatenation", "concat", t, [*map(self.tensor, xs)], axis=axis)

    def _slice(self, x: Operand, axis: int, start: int, stop: int, t: Type) -> Operand:
        return self._sliced(x, axis, start, stop - start, "slice", t)

    def swap_halves(self, x: Operand) -> Operand:
        """Slice from the middle on, around the end."""
        last, size, wrap = x.rank - 1, int(x.shape[-1]), self.trt.SampleMode.WRAP
        layer = self.network.add_slice(self.tensor(x), (size // 2,), (size,), (1,))
        return self.made(layer, "swap_halves", x.type, axes=(last,), mode=wrap)

    def _prefix(self, x: Operand, axis: int, like: Operand, t: Type) -> Operand:
        return self._sliced(x, axis, 0, self._dim(like, 0), "prefix", t)

    def _block(self, x: Operand, axis: int, first: int, count: int, t: Type) -> Operand:
        def place() -> tuple[Any, Any]:
            whole = Operand(Type("i64", (1,)), self._dim(x, axis))
            ends = (self.constant(torch.tensor([n])) for n in (first, first + count))
            start, stop = (self.binary("min", whole, end) for end in ends)
            # A builder bounds each of these alone: without a bound of its own the size, and all
            # that has it, would be taken to be as large as `stop` is.
            size = self.binary("min", self.sub(stop, start), self.constant(torch.tensor([count])))
            return self.tensor(start), self.tensor(size)

        start, size = self._once(("block", t.shape[axis]), place)
        return self._sliced(x, axis, start, size, "block", t)

    def _sliced(
        self, x: Operand, axis: int, start: Any, size: Any, primitive: str, t: Type
    ) -> Operand:
        """Slice one axis, the others whole. Its start and size are numbers, or i64[1]."""
        first, count = (n if isinstance(n, int) else 0 for n in (start, size))
        layer = self.network.add_slice(self.tensor(x), (first,), (count,), (1,))
        self.named(layer, primitive).axes = (axis,)
        for i, given in ((1, start), (2, size)):
            if not isinstance(given, int):
                layer.set_input(i, given)
        return self.checked(layer, t)

    def _dim(self, x: Operand, axis: int) -> Any:
        """Return i64[1]: the size of one dim. Dims of one name are equal, so one tensor says it for
        all, an input's where one has it."""
        name = x.shape[axis]

        def make() -> Any:
            source, at = self._inputs.get(str(name)) or (x, axis)
            shape = self._add("shape", "shape", Type("i64", (source.rank,)), source)
            layer = self.network.add_slice(shape.handle, (at,), (1,), (1,))
            return self.made(layer, "dim", Type("i64", (1,)), axes=(0,)).handle

        return self._once(("dim", name), make)

    # --- by index -----------------------------------------------------------------------------

    def stack(self, x: Operand) -> Operand:
        """Return a stack of weights, as a product with all of them takes it. If entries of one of 4
        bits are gathered too, all are gathered: products of such constants have a layout of their
        own, and a plan would hold the codes twice."""
        h, number = x.handle, self._integers
        if not isinstance(h, Dequantized) or h.codes.stored not in self._gathered or not number:
            return x
        count = int(x.shape[0])
        return self.gather(x, self._once(("places", count), lambda: self._places(count, number)), 0)

    def _places(self, count: int, number: Operand) -> Operand:
        """Return i64[count], 0, 1, 2 and so on, plus min(number, 0): 0, which only a run knows. A
        builder would take a gather by a constant away."""
        with self.apart():
            for axis in range(number.rank):
                number = self.slice(number, axis, 0, 1)
            zero = self.binary("min", self.reshape(number, 1), 0)
            return self.add(self.constant(torch.arange(count)), zero)

    def _gather(self, x: Operand, index: Operand, axis: int, t: Type) -> Operand:
        if isinstance(x.handle, Dequantized) and x.handle.codes.stored.dtype == "u8":
            self._gathered.add(x.handle.codes.stored)
        return self._add("gather", "gather", t, x, index, axis)

    def _gather_rows(self, x: Operand, index: Operand, t: Type) -> Operand:
        """Gather rows. The batch is an elementwise dim, so that an index is of a row alone."""
        at = self._once(("row", index.handle), lambda: self.unsqueeze(index, 2))
        mode = self.trt.GatherMode.ND
        return self._add("gather_v2", "gather_rows", t, x, at, mode, num_elementwise_dims=1)

    def _append(self, cache: Operand, new: Operand, start: Operand, t: Type) -> Operand:
        at = self._once(("slot", start.handle), lambda: self.tensor(self.cast(start, "i32")))
        mode = self.trt.KVCacheMode.LINEAR
        return self._add("kv_cache_update", "append", t, cache, new, at, mode)

    # --- control ------------------------------------------------------------------------------

    def when_one(
        self, x: Operand, axis: int, then: Callable[[], Operand], otherwise: Callable[[], Operand]
    ) -> Operand:
        """Raise LowerError: TensorRT asks the host which side to launch, so a step with a
        conditional cannot be recorded as a CUDA graph."""
        raise LowerError(
            f"{self.scope}: a conditional, whose step could not be recorded as a CUDA graph; give "
            f"the op one form for every number of tokens (backends/trt/lowerings.py)"
        )


def _operation(kind: str) -> str:
    return NAMES.get(kind, kind.upper())


def _is_small(x: Operand) -> bool:
    return isinstance(x.handle, Constant) and x.type.numel() <= MOST_FOLDED


def _joined(xs: Sequence[Operand], axis: int) -> torch.Tensor | None:
    parts = [x.handle.stored.numbers() for x in xs]
    if any(p is None for p in parts):
        return None
    return torch.cat([p.view(*map(int, x.shape)) for p, x in zip(parts, xs, strict=True)], axis)


def _is_order(order: Sequence[int]) -> bool:
    return [*order] == sorted(order)


def _permuted(t: Type, order: Sequence[int]) -> Type:
    return t.with_shape(*(t.shape[i] for i in order))


def _dims(t: Type) -> tuple[int, ...]:
    """Return the dims, -1 where one is known at run time only."""
    if t.rank > MAX_DIMS:
        raise ValueError(f"{t}: TensorRT takes at most {MAX_DIMS} dims")
    return tuple(d if isinstance(d, int) else -1 for d in t.shape)


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether ranks are equal, and dims where both are known."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other))
