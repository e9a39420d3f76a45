"""A stand-in for the `tensorrt` module: it records calls, to be held against the signatures of the
real bindings; raises RuleError where a network breaks what NVIDIA documents; and runs networks in
torch, each layer by its documented meaning. README.md says how it is used, and what it cannot say.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import engine, kinds, layers, layout, network
from .enums import ENUMS, VERSIONED
from .layers import MAX_DIMS as MAX_DIMS
from .layers import MAX_HEAD as MAX_HEAD
from .layers import MAX_TOP_K as MAX_TOP_K
from .network import aliases as aliases
from .network import check as check
from .network import execute as execute
from .network import scratch_bytes as scratch_bytes
from .ranks import Exchange as Exchange
from .ranks import communicator as communicator
from .ranks import side_by_side as side_by_side
from .record import Call as Call
from .record import Recorded
from .record import RuleError as RuleError

VERSIONS = tuple(VERSIONED)


def recorder(version: str = "11.4.0") -> Any:
    """Return the module as of one of VERSIONS, with `calls`, everything that is asked of it; each
    call gives a new one with an empty record."""
    if version not in VERSIONS:
        raise ValueError(f"recorder {version!r}: one of {', '.join(VERSIONS)}")
    module: Any = ModuleType("tensorrt")
    module.calls, module._capturing = [], False
    bound = {"_calls": module.calls, "_module": module}
    for part in (engine, kinds, layers, layout, network):
        for name, thing in vars(part).items():
            own = isinstance(thing, type) and thing.__module__ == part.__name__
            if own and issubclass(thing, Recorded) and name not in ("Layer", "Callback"):
                setattr(module, name, type(name, (thing,), {**bound, "_api_name": name}))
    vars(module).update({**ENUMS, **VERSIONED[version]}, __version__=version)
    return module


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
