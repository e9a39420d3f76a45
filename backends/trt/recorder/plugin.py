"""A stand-in for `tensorrt.plugin`: what plugins that are compiled ahead of time need of it.

The real one is Python as well, in the wheel of the bindings; the checks of signatures, the
arithmetic without reflected operators, and what may be assigned to what are as there. Sizes that
are not known are None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, get_args, get_origin

from .record import need

ATTRIBUTES = (int, float, bytes, bool, str)
RESERVED = ("", "trt", "tensorrt", "std")
GRID = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem")
Described = tuple[Any, tuple[int, ...]]
#: (name of a plugin, its attributes, *tensors) -> what it computes of them, in torch
Meaning = Callable[..., tuple[Any, ...]]


class SymIntExpr:
    """A whole number that follows from the dims of inputs."""

    def __init__(self, value: Any = None) -> None:
        self.value: int | None = value.value if isinstance(value, SymIntExpr) else value

    def _op(self, f: Callable[[int, int], int], other: Any) -> Any:
        if not isinstance(other, int | SymIntExpr):
            raise TypeError(f"{other!r} is no whole number and no expression")
        second = other.value if isinstance(other, SymIntExpr) else other
        known = self.value is not None and second is not None
        return type(self)(f(self.value, second) if known else None)  # type: ignore[arg-type]

    def __add__(self, other: Any) -> Any:
        return self._op(lambda a, b: a + b, other)

    def __sub__(self, other: Any) -> Any:
        return self._op(lambda a, b: a - b, other)

    def __mul__(self, other: Any) -> Any:
        return self._op(lambda a, b: a * b, other)

    def __floordiv__(self, other: Any) -> Any:
        return self._op(lambda a, b: a // b, other)


class SymInt32(SymIntExpr):
    pass


class ShapeExpr(SymInt32):
    """A dim."""


class SymIntExprs:
    """So many whole numbers for a kernel."""

    def __init__(self, length: int) -> None:
        self._exprs: list[Any] = [None] * length

    def __setitem__(self, index: int, expr: Any) -> None:
        if not isinstance(expr, int | SymIntExpr):
            raise ValueError(f"{expr!r} is no whole number and no expression")
        self._exprs[index] = expr if isinstance(expr, SymIntExpr) else SymIntExpr(expr)

    def __getitem__(self, index: int) -> Any:
        return self._exprs[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._exprs)

    def __len__(self) -> int:
        return len(self._exprs)


class ShapeExprs(SymIntExprs):
    """The dims of a tensor."""

    @classmethod
    def from_tuple(cls, dims: Sequence[Any]) -> ShapeExprs:
        made = cls(len(dims))
        made._exprs = [d if isinstance(d, ShapeExpr) else ShapeExpr(d) for d in dims]
        return made


class TensorDesc:
    def __init__(self, shape_expr: Any = None, dtype: Any = None) -> None:
        self.shape_expr, self.dtype = shape_expr, dtype


class KernelLaunchParams:
    def __init__(self) -> None:
        for name in GRID:
            setattr(self, name, 0 if name == "shared_mem" else 1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in GRID:
            raise AttributeError(f"KernelLaunchParams object has no attribute {name!r}")
        self.__dict__[name] = SymInt32(value)


def _of_two(f: Callable[[int, int], int]) -> Callable[[Any, Any], Any]:
    def apply(first: Any, second: Any) -> Any:
        if isinstance(first, int):
            if isinstance(second, int):
                raise ValueError("Both arguments cannot be ints")
            first = ShapeExpr(first)
        return first._op(f, second)

    return apply


def from_shape_expr(shape_expr: Any, dtype: Any) -> TensorDesc:
    if isinstance(shape_expr, tuple):
        shape_expr = ShapeExprs.from_tuple(shape_expr)
    return TensorDesc(shape_expr, dtype)


class Registered:
    """A plugin's functions; called with tensors and attributes it gives what `add_plugin` takes."""

    def __init__(self, plugin_id: str, describe: Callable[..., Any], module: Any) -> None:
        self.plugin_id, self.describe, self.module = plugin_id, describe, module
        self.implement: Callable[..., Any] | None = None
        self.tensors, self.attributes, self.outputs = _parsed(describe)

    def __call__(self, *tensors: Any, **attributes: Any) -> Callable[..., Any]:
        for t in tensors:
            if type(t).__name__ != "ITensor":
                raise ValueError(f"Expected trt.ITensor but got input of type {type(t)}")
        given = {n: type(a) for n, a in attributes.items()}
        if len(tensors) != len(self.tensors) or list(given.items()) != [*self.attributes.items()]:
            raise ValueError(f"{self.plugin_id}: {len(tensors)} tensors and {given}")

        def create(request: Any = None) -> tuple[list[Any], list[Any], Instance]:
            return [*tensors], [], Instance(self, attributes)

        return create


class Instance:
    """A plugin with its attributes, as a layer holds it."""

    def __init__(self, of: Registered, attributes: dict[str, Any]) -> None:
        self.of, self.attributes = of, attributes

    def output_types(self, inputs: Sequence[Described]) -> list[Described]:
        """Return (dtype, dims) of the outputs; -1 are dims that are not known."""
        return [
            (x.dtype, tuple(-1 if d.value is None else d.value for d in x.shape_expr))
            for x in self._described(_descriptions(inputs))
        ]

    def launch(self, inputs: Sequence[Described], tactic: int = 0) -> SimpleNamespace:
        """Return name, ptx, params (by name) and whole numbers for inputs of these sizes."""
        if self.of.implement is None:
            raise ValueError(f"{self.of.plugin_id} has no ahead-of-time implementation")
        given = _descriptions(inputs)
        name, ptx, params, whole = self.of.implement(
            *given, *self.attributes.values(), self._described(given), tactic
        )
        if not all(isinstance(n, SymInt32) for n in whole):
            raise TypeError("Extra args must be a 'tensorrt.plugin.SymInt32'")
        numbers = {n: getattr(params, n).value for n in GRID}
        return SimpleNamespace(name=name, ptx=ptx, params=numbers, whole=[n.value for n in whole])

    def run(self, *tensors: Any) -> tuple[Any, ...]:
        """Compute the outputs as whoever made the module says that they are."""
        meaning: Meaning | None = self.of.module.meaning
        need(meaning, f"{self.of.plugin_id}: say what it computes, recorder(meaning=...)")
        assert meaning
        return meaning(self.of.plugin_id, self.attributes, *tensors)

    def _described(self, inputs: Sequence[TensorDesc]) -> tuple[TensorDesc, ...]:
        made = self.of.describe(*inputs, **self.attributes)
        return made if isinstance(made, tuple) else (made,)


def _descriptions(inputs: Sequence[Described]) -> list[TensorDesc]:
    return [
        from_shape_expr(tuple(ShapeExpr(None if d == -1 else d) for d in dims), dtype)
        for dtype, dims in inputs
    ]


def _parsed(describe: Callable[..., Any]) -> tuple[list[str], dict[str, Any], int]:
    """Return names of tensors, attributes with their types, and how many outputs; ValueError on
    other signatures."""
    tensors: list[str] = []
    attributes: dict[str, Any] = {}
    signature = inspect.signature(describe)
    for name, p in signature.parameters.items():
        if p.kind is not p.POSITIONAL_OR_KEYWORD or p.default is not p.empty:
            raise ValueError(f"Argument {name}: neither defaults nor variable arguments")
        if inspect.isclass(p.annotation) and issubclass(p.annotation, TensorDesc):
            if attributes:
                raise ValueError(f"Argument {name}: tensors come before attributes")
            tensors.append(name)
        elif p.annotation in ATTRIBUTES and name not in ("outputs", "stream", "tactic"):
            attributes[name] = p.annotation
        else:
            raise ValueError(f"Argument {name}: {p.annotation} is no type of attributes")
    return tensors, attributes, _count(signature.return_annotation)


def _count(annotation: Any) -> int:
    args = get_args(annotation) if get_origin(annotation) is tuple else (annotation,)
    if not all(inspect.isclass(a) and issubclass(a, TensorDesc) for a in args):
        raise ValueError(f"{annotation}: expected TensorDesc or Tuple[TensorDesc]")
    return len(args)


def plugin_module(meaning: Meaning | None = None) -> Any:
    """Return a module like `tensorrt.plugin`, in which nothing is registered."""
    module: Any = ModuleType("tensorrt.plugin")
    module.op, module.meaning = SimpleNamespace(), meaning

    def register(plugin_id: str, lazy_register: bool = False) -> Callable[..., Any]:
        space, name = plugin_id.split("::")
        if space in RESERVED or "." in plugin_id:
            raise ValueError(f"{plugin_id}: not allowed as a name")

        def decorator(describe: Callable[..., Any]) -> Callable[..., Any]:
            known = vars(module.op).setdefault(space, SimpleNamespace())
            if name in vars(known):
                raise ValueError(f"already has a definition for {name!r}")
            vars(known)[name] = Registered(plugin_id, describe, module)
            return describe

        return decorator

    def aot_impl(plugin_id: str) -> Callable[..., Any]:
        space, name = plugin_id.split("::")

        def decorator(implement: Callable[..., Any]) -> Callable[..., Any]:
            plugin = vars(vars(module.op)[space])[name]
            _check_implementation(plugin, implement)
            plugin.implement = implement
            return implement

        return decorator

    names = (SymIntExpr, SymInt32, ShapeExpr, SymIntExprs, ShapeExprs, TensorDesc)
    vars(module).update({c.__name__: c for c in (*names, KernelLaunchParams)})
    module.register, module.aot_impl, module.from_shape_expr = register, aot_impl, from_shape_expr
    module.cdiv = _of_two(lambda a, b: -(-a // b))
    module.min, module.max = _of_two(min), _of_two(max)
    return module


def _check_implementation(plugin: Registered, implement: Callable[..., Any]) -> None:
    """Raise ValueError where the signature does not follow from the plugin's."""
    signature = inspect.signature(implement)
    expected = [*plugin.tensors, *plugin.attributes, "outputs", "tactic"]
    if list(signature.parameters) != expected:
        raise ValueError(f"{signature} does not match {expected}")
    results = get_args(signature.return_annotation)
    if get_origin(signature.return_annotation) is not tuple or len(results) != 4:
        raise ValueError(f"{signature.return_annotation}: expected a tuple of four")
    if results[2] is not KernelLaunchParams or results[3] is not SymIntExprs:
        raise ValueError(f"{results}: expected KernelLaunchParams and SymIntExprs at the end")
