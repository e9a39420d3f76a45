"""Defines an op: one class that holds everything the program knows about it.

An op class gives
  infer(*types, **attrs)      types in -> types out, or ValueError that names both
  reference(*tensors, **attrs)  torch; the definition
or, for a fused op,
  expand(b, *values, **attrs)   the op in simpler ops; `infer` follows from it (ops/__init__.py),
                              so it only checks what the simpler ops would accept
  flops(ins, outs, **attrs)     multiply and add count as two; default: one per output element
  traffic(ins, outs, **attrs)   bytes read of each input and written to each result, as two
                                tuples; default: every operand once
  rows       inputs whose row [b, s] alone decides row [b, s] of every output
  updates    (result, input) pairs: the result is the new contents of that cache
  held(**attrs)  where the caches lie among the inputs that attention reads, first and last + 1; the
             chunk that is not in them yet follows, and its block ids
  glue       a view, a gather or an exchange of ranks, which backends run between compiled programs
  fold       may run in the weight prologue
  budget     how far two right computations of it may lie apart, and why (budgets.py)
  kind       the part of the model that it belongs to wherever it occurs, one of KINDS; others by
             the name of their first result
  workspace(ins, outs, **attrs)  bytes that it allocates beside its results; default: none
  samples    inputs and attrs from which tests are generated

`flops`, `traffic` and `workspace` see types whose dims are all ints. A cache comes with as many
slots as hold a token at that point, so its size says what an op can read of it (plan/cost.py). A
fused op with neither costs what its expansion costs, without the values in between.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from .budgets import Budget
from .types import Type, parse_type

#: parts of the model. attention: the projections; kv: attention itself and the cache writes;
#: other: norms, residuals
KINDS = ("attention", "kv", "mlp", "experts", "ple", "head", "embed", "other")
#: bytes per input, bytes per result
Traffic = tuple[tuple[int, ...], tuple[int, ...]]
Operand = TypeVar("Operand")


@dataclass(frozen=True)
class Sample:
    """One generated test: input types as text, attrs, and [low, high) for integer inputs."""

    inputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    ints: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def types(self) -> tuple[Type, ...]:
        return tuple(parse_type(t) for t in self.inputs)


@dataclass(frozen=True)
class Op:
    """The record that `@op` makes of an op class."""

    name: str
    doc: str
    infer: Callable[..., Any] | None  # None until ops/__init__.py derives it from `expand`
    reference: Callable[..., Any] | None
    expand: Callable[..., Any] | None
    flops: Callable[..., int] | None  # None: those of the expansion; the same for `traffic`
    traffic: Callable[..., Traffic] | None
    rows: tuple[int, ...]
    updates: tuple[tuple[int, int], ...]
    held: Callable[..., tuple[int, int]] | None
    glue: bool
    fold: bool
    budget: Budget
    kind: str | None
    workspace: Callable[..., int] | None
    samples: tuple[Sample, ...]
    parameters: tuple[inspect.Parameter, ...]
    attrs: Mapping[str, str]

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the inputs in order, without a variadic one."""
        return tuple(p.name for p in self.parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    def infer_types(self, types: tuple[Type, ...], attrs: Mapping[str, Any]) -> tuple[Type, ...]:
        """Run `infer`, always for a tuple; ValueError where an attribute is not of its kind."""
        for name, value in attrs.items():
            kind = self.attrs.get(name)
            fits = kind is not None and _KINDS[kind](value)
            require(fits, f"attribute {name}={value!r}: expected {kind or self._expected()}")
        assert self.infer
        return as_tuple(self.infer(*types, **attrs))

    def updated(
        self, inputs: Sequence[Operand], outputs: Sequence[Operand]
    ) -> tuple[tuple[Operand, Operand], ...]:
        """Return (old, new) contents of each cache that a node with these operands writes."""
        return tuple((inputs[i], outputs[o]) for o, i in self.updates if o < len(outputs))

    def _expected(self) -> str:
        return f"one of {', '.join(self.attrs)}" if self.attrs else "none"


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


#: annotation of an attribute -> whether a value is one
_KINDS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": lambda x: _is_int(x) or (isinstance(x, float) and math.isfinite(x)),
    "str": lambda x: isinstance(x, str),
    "bool": lambda x: isinstance(x, bool),
    "tuple[int, ...]": lambda x: isinstance(x, tuple) and all(map(_is_int, x)),
    "tuple[bool, ...]": lambda x: isinstance(x, tuple) and all(isinstance(i, bool) for i in x),
}


def _attributes(op: str, parameters: Sequence[inspect.Parameter]) -> dict[str, str]:
    """Return keyword-only parameter -> its annotation, a key of `_KINDS`."""
    kinds = {p.name: str(p.annotation) for p in parameters if p.kind is p.KEYWORD_ONLY}
    unknown = {k for k in kinds.values() if k not in _KINDS}
    if unknown or any(p.kind is p.VAR_KEYWORD for p in parameters):
        found = ", ".join(sorted(unknown)) or "**"
        raise TypeError(f"op {op}: attribute of kind {found}; one of {', '.join(_KINDS)}")
    return kinds


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _default_flops(ins: tuple[Type, ...], outs: tuple[Type, ...], **attrs: Any) -> int:
    return sum(t.numel() for t in outs)


def every_operand(ins: tuple[Type, ...], outs: tuple[Type, ...], **attrs: Any) -> Traffic:
    """Return the traffic of an op that reads and writes each operand once."""
    return tuple(t.nbytes() for t in ins), tuple(t.nbytes() for t in outs)


def nothing(ins: tuple[Type, ...], outs: tuple[Type, ...], **attrs: Any) -> Traffic:
    """Return the traffic of a view."""
    return (0,) * len(ins), (0,) * len(outs)


def op(cls: type) -> Op:
    """Check an op class and turn it into its record."""
    parts = vars(cls)

    def part(name: str, default: Any = None) -> Any:
        value = parts.get(name, default)
        return value.__func__ if isinstance(value, staticmethod) else value

    infer, expand = part("infer"), part("expand")
    if not cls.__doc__ or not (infer or expand):
        raise TypeError(f"op {cls.__name__} needs a docstring, and infer or expand")
    if (part("reference") is None) == (expand is None):
        raise TypeError(f"op {cls.__name__} needs exactly one of reference and expand")
    if not parts.get("samples") or not isinstance(parts.get("budget"), Budget):
        raise TypeError(f"op {cls.__name__} needs samples and a budget")
    if parts.get("kind") not in (None, *KINDS):
        raise TypeError(f"op {cls.__name__}: kind {parts['kind']!r}: one of {', '.join(KINDS)}")
    counted = expand is None or bool(parts.keys() & {"flops", "traffic"})
    # Behind the builder, `expand` has the parameters that `infer` would have.
    parameters = tuple(inspect.signature(infer or expand).parameters.values())[infer is None :]
    return Op(
        name=cls.__name__,
        doc=cls.__doc__,
        infer=infer,
        reference=part("reference"),
        expand=expand,
        flops=part("flops", _default_flops) if counted else None,
        traffic=part("traffic", every_operand) if counted else None,
        rows=parts.get("rows", ()),
        updates=parts.get("updates", ()),
        held=part("held"),
        glue=parts.get("glue", False),
        fold=parts.get("fold", True),
        budget=parts["budget"],
        kind=parts.get("kind"),
        workspace=part("workspace"),
        samples=tuple(parts["samples"]),
        parameters=parameters,
        attrs=_attributes(cls.__name__, parameters),
    )


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds; the verifier adds the node."""
    if not condition:
        raise ValueError(message)


def wide(x: Any) -> Any:
    """Return fp32, or wider where the input is wider: the fp32 islands of the reference model."""
    return x if x.element_size() >= 4 else x.float()
