"""A stand-in for the `tensorrt` module: it records calls, keeps TensorRT's rules, and executes.

TensorRT's builder runs on machines with a GPU only. `recorder(version)` has the classes, methods,
arguments and enum members that this project uses of the real module of that version, and
  - writes every use down in `module.calls` (see record.Call), to be held against the signatures
    of the real bindings;
  - raises RuleError where a network breaks what NVIDIA documents: types, ranks, shapes, aliasing;
  - runs a network in torch (see execute.py), each layer by its own documented meaning.

It has read the same documentation as the lowering: what it says of kernels, memory and speed is
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import engine, enums, network, plugin
from .record import Call, Recorded, RuleError

VERSIONS = tuple(network.NAMES)

#: modules whose NAMES (version -> name -> class, enum or value) make up the module
_PARTS = (enums, network, engine)


class Recorder(ModuleType):
    """The module: its names, and `calls`, everything that was asked of them."""

    calls: list[Call]
    #: bytes of dynamic shared memory that a launch may ask for; another number stands for a
    #: TensorRT that sets a kernel's attribute first
    _shared_memory: int
    #: whether a CUDA graph is being recorded
    _capturing: bool


def recorder(version: str = "11.4.0") -> Any:
    """The module as of one of VERSIONS; each call gives a new one with an empty record."""
    if version not in VERSIONS:
        raise ValueError(f"recorder {version!r}: one of {', '.join(VERSIONS)}")
    module = Recorder("tensorrt")
    module.calls, module._shared_memory, module._capturing = [], 48 * 1024, False
    vars(module)["__version__"] = version
    for part in _PARTS:
        for name, thing in part.NAMES[version].items():
            vars(module)[name] = _bound(name, thing, module)
    vars(module)["plugin"] = plugin.plugin_module()
    return module


def recording(module: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """What records a step on the CPU: as torch_compile/cuda_graph.py, it is run, and then run again
    under the rules of a CUDA graph."""

    def recorded(work: Callable[[], None]) -> Callable[[], None]:
        work()
        module._capturing = True
        try:
            work()
        finally:
            module._capturing = False
        return work

    return recorded


def _bound(name: str, thing: Any, module: Recorder) -> Any:
    """A class that records into this module; other things as they are."""
    if not (isinstance(thing, type) and issubclass(thing, Recorded)):
        return thing
    return type(name, (thing,), {"_calls": module.calls, "_module": module, "_api_name": name})


__all__ = ["VERSIONS", "Call", "Recorder", "RuleError", "recorder", "recording"]
