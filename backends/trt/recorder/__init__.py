"""A stand-in for the `tensorrt` module: it records calls, keeps TensorRT's rules, and executes.

TensorRT's builder runs on machines with a GPU only. `recorder(version)` has the classes, methods,
arguments and enum members that networks are written with here, as the real module of that version
has them, and
  - writes every use down in `module.calls` (see record.Call), to be held against the signatures
    of the real bindings;
  - raises RuleError where a network breaks what NVIDIA documents: types, ranks, shapes, aliasing;
  - runs a network in torch (see execute.py), each layer by its own documented meaning.

It needs torch and nothing else. README.md says how it is used, and what it cannot say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from . import engine, enums, layers, network
from .execute import execute
from .limits import MAX_DIMS, MAX_TOP_K, MAX_VOLUME, SHARED_BYTES
from .network import aliases, check, sizes, volumes
from .plugin import Meaning, plugin_module
from .ranks import Exchange, communicator, side_by_side
from .record import Call, Recorded, RuleError
from .refusals import taken_for_attention
from .traffic import traffic

#: version -> names of its own; all others are the same
_OWN: Mapping[str, Mapping[str, Any]] = {
    "10.16.1": {
        "BuilderFlag": enums.BuilderFlag10,
        "PreviewFeature": enums.PreviewFeature10,
        "NetworkDefinitionCreationFlag": enums.NetworkDefinitionCreationFlag10,
    },
    "11.4.0": {
        "BuilderFlag": enums.BuilderFlag11,
        "PreviewFeature": enums.PreviewFeature11,
        "NetworkDefinitionCreationFlag": enums.NetworkDefinitionCreationFlag11,
        "CausalMaskKind": enums.CausalMaskKind,
        "INetworkDefinition": network.INetworkDefinition11,
        "IAttention": layers.IAttention11,
    },
}
VERSIONS = tuple(_OWN)
#: no names of the real module, or of one version alone
_HIDDEN = {"ApiEnum", "Layer", "Severity", "CausalMaskKind"}


class Recorder(ModuleType):
    """The module: its names, and `calls`, everything that was asked of them."""

    calls: list[Call]
    #: bytes of dynamic shared memory that a launch may ask for; another number stands for a
    #: TensorRT that sets a kernel's attribute first
    _shared_memory: int
    #: layers from which on networks with an attention that is masked are refused, as builders of
    #: some versions did; None: none is
    _wraps_from: int | None
    #: whether a CUDA graph is being recorded
    _capturing: bool


def recorder(version: str = "11.4.0", meaning: Meaning | None = None) -> Any:
    """Return the module as of one of VERSIONS; each call gives a new one with an empty record.
    `meaning` says what plugins compute; without it their networks can be checked, not run."""
    if version not in VERSIONS:
        raise ValueError(f"recorder {version!r}: one of {', '.join(VERSIONS)}")
    module = Recorder("tensorrt")
    module.calls, module._shared_memory, module._capturing = [], SHARED_BYTES, False
    module._wraps_from = None
    names = {**_common(), **enums.SHORT, **_OWN[version]}
    vars(module).update({name: _bound(name, thing, module) for name, thing in names.items()})
    vars(module).update(__version__=version, plugin=plugin_module(meaning))
    return module


def _common() -> dict[str, Any]:
    """Return the classes and enums that both versions have, by name."""
    return {
        name: thing
        for part in (enums, layers, network, engine)
        for name, thing in vars(part).items()
        if isinstance(thing, type) and thing.__module__ == part.__name__
        if issubclass(thing, Recorded | enums.ApiEnum)
        if name not in _HIDDEN and not name[-1].isdigit()
    }


def recording(module: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a recorder of steps on the CPU: a step is run, and then run again under the rules of a
    CUDA graph."""

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
    """Return a class that records into this module; other things as they are."""
    if not (isinstance(thing, type) and issubclass(thing, Recorded)):
        return thing
    return type(name, (thing,), {"_calls": module.calls, "_module": module, "_api_name": name})


__all__ = [
    "MAX_DIMS",
    "MAX_TOP_K",
    "MAX_VOLUME",
    "SHARED_BYTES",
    "VERSIONS",
    "Call",
    "Exchange",
    "Meaning",
    "Recorder",
    "RuleError",
    "aliases",
    "check",
    "communicator",
    "execute",
    "recorder",
    "recording",
    "side_by_side",
    "sizes",
    "taken_for_attention",
    "traffic",
    "volumes",
]
