"""The ops: one file per family. Every op of every file of this folder is in the table.

The table completes fused ops: their `infer` runs `expand` on types alone.
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
    """What an expansion reads of a value."""

    type: Type


class _TypeBuilder:
    """The builder that an expansion sees when only types are needed (else ir.graph.Builder)."""

    def emit(self, op: str, *inputs: _Typed, **attrs: Any) -> _Typed:
        (made,) = self.emit_all(op, *inputs, **attrs)
        return made

    def emit_all(self, op: str, *inputs: _Typed, **attrs: Any) -> tuple[_Typed, ...]:
        types = OPS[op].infer_types(tuple(v.type for v in inputs), attrs)
        return tuple(map(_Typed, types))


def completed(o: Op) -> Op:
    """Return an op with `infer`, derived from `expand` if the class has none. Its errors name the
    ops from the fused one to the one that refuses its operands."""
    expand = o.expand
    if o.infer or not expand:
        return o

    def infer(*types: Type, **attrs: Any) -> tuple[Type, ...]:
        try:
            made = expand(_TypeBuilder(), *map(_Typed, types), **attrs)
        except ValueError as e:
            raise ValueError(f"{o.name}: {e}") from e
        return tuple(v.type for v in as_tuple(made))

    return replace(o, infer=infer)


_FAMILIES = [
    importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
]
OPS: dict[str, Op] = {
    o.name: completed(o) for f in _FAMILIES for o in vars(f).values() if isinstance(o, Op)
}

__all__ = ["OPS", "Op", "Sample"]
