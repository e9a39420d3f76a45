"""A stand-in for `tensorrt.plugin`: what plugins that are compiled ahead of time need of it.

The real one is Python as well, in the wheel of the bindings, where the tests run plugins too: its
checks of signatures are not here. The arithmetic is, without reflected operators. Sizes that are
not known are None.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

from .record import need

GRID = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem")
#: element type and dims
Described = tuple[Any, tuple[int, ...]]
#: (name of a plugin, its attributes, *tensors) -> what it computes of them, in torch
Meaning = Callable[..., tuple[Any, ...]]


class SymIntExpr:
    """A whole number that follows from the dims of inputs."""

    def __init__(self, value: Any = None) -> None:
        self.value: int | None = value.value if isinstance(value, SymIntExpr) else value


class SymInt32(SymIntExpr):
    pass


class ShapeExpr(SymInt32):
    """A dim."""


def _operator(f: Callable[[int, int], int]) -> Callable[[Any, Any], Any]:
    def apply(first: Any, second: Any) -> Any:
        kind = type(first if isinstance(first, SymIntExpr) else second)
        values = [SymIntExpr(x).value for x in (first, second)]
        return kind(None if None in values else f(*values))  # type: ignore[arg-type]

    return apply


for _name in ("add", "sub", "mul", "floordiv"):
    setattr(SymIntExpr, f"__{_name}__", _operator(getattr(operator, _name)))


class SymIntExprs(list[Any]):
    """So many whole numbers for a kernel."""

    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class TensorDesc:
    def __init__(self, shape_expr: Any = None, dtype: Any = None) -> None:
        self.shape_expr, self.dtype = shape_expr, dtype


class KernelLaunchParams:
    def __init__(self) -> None:
        for name in GRID:
            setattr(self, name, 0 if name == "shared_mem" else 1)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in GRID
        self.__dict__[name] = SymInt32(value)


def from_shape_expr(shape_expr: Any, dtype: Any) -> TensorDesc:
    return TensorDesc([ShapeExpr(d) for d in shape_expr], dtype)


class Registered:
    """A plugin's functions; called with tensors and attributes it gives what `add_plugin` takes."""

    implement: Callable[..., Any]

    def __init__(self, plugin_id: str, describe: Callable[..., Any], module: Any) -> None:
        self.plugin_id, self.describe, self.module = plugin_id, describe, module
        returned: Any = describe.__signature__.return_annotation  # type: ignore[attr-defined]
        self.outputs = len(get_args(returned))

    def __call__(self, *tensors: Any, **attributes: Any) -> Callable[..., Any]:
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
            for x in self.of.describe(*_descriptions(inputs), **self.attributes)
        ]

    def launch(self, inputs: Sequence[Described], tactic: int = 0) -> SimpleNamespace:
        """Return name, ptx, params (by name) and whole numbers for inputs of these sizes."""
        given = _descriptions(inputs)
        made = self.of.describe(*given, **self.attributes)
        name, ptx, params, whole = self.of.implement(
            *given, *self.attributes.values(), made, tactic
        )
        numbers = {n: getattr(params, n).value for n in GRID}
        return SimpleNamespace(name=name, ptx=ptx, params=numbers, whole=[n.value for n in whole])

    def run(self, *tensors: Any) -> tuple[Any, ...]:
        """Compute the outputs as whoever made the module says that they are."""
        meaning: Meaning | None = self.of.module.meaning
        need(meaning, f"{self.of.plugin_id}: say what it computes, recorder(meaning=...)")
        assert meaning
        return meaning(self.of.plugin_id, self.attributes, *tensors)


def _descriptions(inputs: Sequence[Described]) -> list[TensorDesc]:
    return [
        from_shape_expr([None if d == -1 else d for d in dims], dtype) for dtype, dims in inputs
    ]


def plugin_module(meaning: Meaning | None = None) -> Any:
    """Return a module like `tensorrt.plugin`, in which nothing is registered."""
    module: Any = ModuleType("tensorrt.plugin")
    module.op, module.meaning = SimpleNamespace(), meaning

    def register(plugin_id: str, lazy_register: bool = False) -> Callable[..., Any]:
        space, name = plugin_id.split("::")

        def decorator(describe: Callable[..., Any]) -> Callable[..., Any]:
            known = vars(module.op).setdefault(space, SimpleNamespace())
            setattr(known, name, Registered(plugin_id, describe, module))
            return describe

        return decorator

    def aot_impl(plugin_id: str) -> Callable[..., Any]:
        space, name = plugin_id.split("::")

        def decorator(implement: Callable[..., Any]) -> Callable[..., Any]:
            getattr(getattr(module.op, space), name).implement = implement
            return implement

        return decorator

    names = (SymIntExpr, SymInt32, ShapeExpr, SymIntExprs, TensorDesc, KernelLaunchParams)
    vars(module).update({c.__name__: c for c in names})
    module.register, module.aot_impl, module.from_shape_expr = register, aot_impl, from_shape_expr
    module.cdiv = _operator(lambda a, b: -(-a // b))
    module.min, module.max = _operator(min), _operator(max)
    return module
