"""The ops, one file per family; `OPS` maps each name to its op.

A fused op without `infer` gets one that runs its `expand` on types alone.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, replace
from typing import Any

from .base import Op, Sample, as_tuple
from .types import Type


@dataclass(frozen=True)
class _Typed:
    """A value that has only a type."""

    type: Type


class _TypeBuilder:
    """Infers types through `expand`, with the interface of ir.graph.Builder."""

    def emit(self, op: str, *inputs: _Typed, **attrs: Any) -> _Typed:
        (output,) = self.emit_all(op, *inputs, **attrs)
        return output

    def emit_all(self, op: str, *inputs: _Typed, **attrs: Any) -> tuple[_Typed, ...]:
        types = OPS[op].infer_types(tuple(v.type for v in inputs), attrs)
        return tuple(map(_Typed, types))


def with_infer(o: Op) -> Op:
    """Return the op with `infer`, derived from `expand` if the class has none. A ValueError of a
    derived one begins with the op's name."""
    expand = o.expand
    if o.infer or not expand:
        return o

    def infer(*types: Type, **attrs: Any) -> tuple[Type, ...]:
        try:
            outputs = expand(_TypeBuilder(), *map(_Typed, types), **attrs)
        except ValueError as e:
            raise ValueError(f"{o.name}: {e}") from e
        return tuple(v.type for v in as_tuple(outputs))

    return replace(o, infer=infer)


_FAMILIES = [
    importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
]
OPS: dict[str, Op] = {
    o.name: with_infer(o) for f in _FAMILIES for o in vars(f).values() if isinstance(o, Op)
}

__all__ = ["OPS", "Op", "Sample"]
