"""NVIDIA's own `tensorrt.plugin`, which is Python, out of the bindings wheels, on a small stand-in
for the classes that it derives from: the path from a layer to PTX and launch runs in its code."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from g4ir.backends.experimental.trt_plugins.table import PLUGINS, Plan, Shapes, Whole
from tests.recorder.bindings import WHEELS, find_wheel

Described = tuple[Any, tuple[int, ...]]
_BASES = (
    "IPluginV3",
    "IPluginV3QuickCore",
    "IPluginV3QuickBuild",
    "IPluginV3QuickRuntime",
    "IPluginV3QuickAOTBuild",
    "IPluginCreatorV3Quick",
    "IPluginResource",
    "ISymExpr",
    "ITensor",
    "PluginTensorDesc",
)
_ENUMS = {
    "DimensionOperation": "SUM PROD MAX MIN SUB EQUAL LESS FLOOR_DIV CEIL_DIV",
    "PluginFieldType": "FLOAT16 FLOAT32 FLOAT64 INT8 INT16 INT32 CHAR INT64 UNKNOWN",
    "PluginArgType": "INT",
    "PluginArgDataType": "INT8 INT16 INT32",
    "QuickPluginCreationRequest": "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT",
    "TensorRTPhase": "BUILD RUNTIME",
    "TensorFormat": "LINEAR",
    "DataType": "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64 INT4",
}
_OPERATIONS = {
    "SUM": lambda a, b: a + b,
    "PROD": lambda a, b: a * b,
    "MAX": max,
    "MIN": min,
    "SUB": lambda a, b: a - b,
    "FLOOR_DIV": lambda a, b: a // b,
    "CEIL_DIV": lambda a, b: -(-a // b),
}


class Dims(tuple[int, ...]):
    MAX_DIMS = 8


class DimensionExpr:
    def __init__(self, value: int) -> None:
        self.value = value

    def is_constant(self) -> bool:
        return False

    def get_constant_value(self) -> int:
        raise AssertionError("a plugin must not look at sizes")


class ExprBuilder:
    def constant(self, value: int) -> DimensionExpr:
        assert type(value) is int
        return DimensionExpr(value)

    def operation(self, op: Enum, a: Any, b: Any) -> DimensionExpr:
        return DimensionExpr(_OPERATIONS[op.name](a.value, b.value))  # type: ignore[no-untyped-call]


class Field:
    def __init__(self, name: str, data: Any, kind: Any) -> None:
        self.name, self.type = name, kind
        self.data = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data


class DynamicDesc:
    def __init__(self, dtype: Any, dims: Sequence[int], layout: Any) -> None:
        self.desc = SimpleNamespace(type=dtype, dims=Dims(dims), format=layout, scale=1.0)
        self.opt = self.min = self.max = Dims(dims)


class Registry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> None:
        self.creators[creator.name, namespace] = creator

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        # The real registry asks the creator for its name; this one calls itself by an attribute.
        return self.creators.get((name, namespace)) or next(iter(self.creators.values()))


def _stand_in(version: str) -> Any:
    trt: Any = ModuleType("tensorrt")
    trt.__spec__, trt.__path__, trt.__version__ = ModuleSpec("tensorrt", None), [], version
    for name in _BASES:
        setattr(trt, name, type(name, (), {"__init__": lambda self, *args: None}))
    for name, members in _ENUMS.items():
        setattr(trt, name, Enum(name, members))  # type: ignore[misc]
    for name, member in {"float32": "FLOAT", "float16": "HALF", "int32": "INT32"}.items():
        setattr(trt, name, trt.DataType[member])
    trt.Dims, trt.IDimensionExpr, trt.DynamicPluginTensorDesc = Dims, DimensionExpr, DynamicDesc
    trt.PluginField, trt.PluginFieldCollection = Field, list
    trt.DimsExprs = lambda n: [None] * n
    registry = Registry()
    trt.get_plugin_registry = lambda: registry
    trt.Logger = type("Logger", (), {"WARNING": 0, "log": lambda *args: None})
    return trt


@contextmanager
def real_plugins(version: str, folder: Path) -> Iterator[Any]:
    """A `tensorrt` module of the recorder's version whose `plugin` is the real one."""
    with zipfile.ZipFile(find_wheel(WHEELS[version][0])) as wheel:
        names = [n for n in wheel.namelist() if n.startswith("tensorrt_bindings/plugin/")]
        wheel.extractall(folder, names)
    trt = _stand_in(version)
    place = folder / "tensorrt_bindings" / "plugin"
    spec = importlib.util.spec_from_file_location(
        "tensorrt.plugin", place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert spec and spec.loader
    with patch.dict(sys.modules, {"tensorrt": trt}):
        trt.plugin = sys.modules["tensorrt.plugin"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(trt.plugin)
        yield trt


def grid_of(plan: Plan, shapes: Shapes) -> tuple[int, ...]:
    """The programs that TensorRT starts for inputs of these sizes."""
    return PLUGINS[plan.plugin].grid(Whole(), shapes, plan.constants)


class RealLayer:
    """A plugin as the builder would use it; the interface of recorder.plugin.Instance."""

    def __init__(self, trt: Any, name: str, plan: str, inputs: int) -> None:
        self.trt = trt
        definition = getattr(trt.plugin.op.g4ir, name)
        create = definition(*(trt.ITensor() for _ in range(inputs)), plan=plan)
        _, _, self.plugin = create(trt.QuickPluginCreationRequest.PREFER_AOT)

    def output_types(self, inputs: Sequence[Described]) -> list[Described]:
        kinds = self.plugin.get_output_data_types(
            [t for t, _ in inputs], [len(d) for _, d in inputs]
        )
        shapes = self.plugin.get_output_shapes(self._dims(inputs), [], ExprBuilder())
        return [
            (kind, tuple(d.value for d in dims)) for kind, dims in zip(kinds, shapes, strict=True)
        ]

    def launch(self, inputs: Sequence[Described]) -> SimpleNamespace:
        layout = self.trt.TensorFormat.LINEAR
        both = [DynamicDesc(t, d, layout) for t, d in (*inputs, *self.output_types(inputs))]
        found = self.plugin.get_supported_format_combinations(both, len(inputs))
        assert [x.type for x in found] == [x.desc.type for x in both]
        self.plugin.configure_plugin(both[: len(inputs)], both[len(inputs) :])
        self.plugin.set_tactic(0)
        params, whole = SimpleNamespace(), _Numbers()
        self.plugin.get_launch_params(
            self._dims(inputs), both, len(inputs), params, whole, ExprBuilder()
        )
        descs = [x.desc for x in both]
        name, ptx = self.plugin.get_kernel(descs[: len(inputs)], descs[len(inputs) :])
        numbers = {n: x.expr.value for n, x in vars(params).items()}
        return SimpleNamespace(
            name=name,
            ptx=ptx.decode(),
            params=numbers,
            whole=[whole[i].expr.value for i in range(whole.nbSymExprs)],
        )

    @staticmethod
    def _dims(inputs: Sequence[Described]) -> list[list[DimensionExpr]]:
        return [[*map(DimensionExpr, dims)] for _, dims in inputs]


class _Numbers(dict[int, Any]):
    """Takes the whole numbers of a kernel."""

    nbSymExprs = 0
