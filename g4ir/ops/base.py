"""Defines an op: one class that holds everything the program knows about it.

  infer(*types, **attrs)        result types from operand types; ValueError names those that do not
                                fit
  reference(*tensors, **attrs)  results, computed by torch; the op's definition
or, for a fused op,
  expand(b, *values, **attrs)   the op in simpler ops. `infer` follows from it; `expand` itself only
                                rejects operands that the simpler ops would accept
The parameters of `infer` or `expand` are the op's operands, then, keyword-only with their types as
annotations, its attributes. A long signature may leave these to
  operands   "x w bias? *rest", if the function takes `*inputs`
  attrs      attribute -> its type, if the function takes `**attrs`
Costs, of types whose dims are all ints:
  flops(ins, outs, **attrs)     multiply and add count as two; default: one per output element
  traffic(ins, outs, **attrs)   bytes read of each input and written to each result; default:
                                every operand once
  workspace(ins, outs, **attrs) bytes allocated besides the results; default: none
A cache's slot dim is the number of slots in use (plan/cost.py). A fused op with neither flops nor
traffic has the cost of its expansion, without the traffic of intermediate values.

Other fields; `budget` and `samples` are required:
  rows          indices of inputs that act token by token: token [b, s] of every output depends on
                no other token of these inputs (in attention: if there are no block ids)
  updates       (result, input) pairs of indices: the result is the new contents of that cache
  cache_range   (first, last + 1): indices of the caches among an attention's inputs, or a function
                of the attributes; the chunk that is not in them yet follows, and its block ids
  glue          a view, a gather or a collective, which the torch backend runs between compiled
                regions
  fold          whether it may run in the weight prologue, the graph that packs weights
  budget        tolerance between two correct computations of it, with the reason (budgets.py)
  kind          the part of the model that it belongs to wherever it occurs, one of KINDS; by
                default, the name of a node's first result decides
  samples       inputs and attributes from which tests are generated (`cases`)
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial
from inspect import Parameter
from typing import Any, TypeVar

from .budgets import Budget
from .types import Types, parse_type

#: parts of the model by which costs are reported. attention: the projections; kv: attention itself
#: and cache writes; ple: per-layer embeddings; other: norms, residuals
KINDS = ("attention", "kv", "mlp", "experts", "ple", "head", "embed", "other")
#: (bytes per input, bytes per result)
Traffic = tuple[tuple[int, ...], tuple[int, ...]]
Operand = TypeVar("Operand")


@dataclass(frozen=True)
class Sample:
    """One generated test: input types as text, attributes, and index of an integer input -> its
    range [low, high)."""

    inputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    ints: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def types(self) -> Types:
        return tuple(parse_type(t) for t in self.inputs)


_OPERAND = re.compile(r"(?:(\d+)\*)?([^@]+)(?:@(-?\d+):(-?\d+))?")


def cases(*texts: str, **attrs: Any) -> list[Sample]:
    """Return a sample per text. `2*f32[2,8] i64[2]@3:9 {eps=1e-06}`: two float operands, one of
    integers in [3, 9), and an attribute; `attrs` are common to all samples."""
    return [_case(text, attrs) for text in texts]


def _case(text: str, attrs: Mapping[str, Any]) -> Sample:
    words, _, local = text.removesuffix("}").partition("{")
    inputs: list[str] = []
    ints: dict[int, tuple[int, int]] = {}
    for word in words.split():
        match = _OPERAND.fullmatch(word)
        assert match
        for _ in range(int(match[1] or 1)):
            if match[3]:
                ints[len(inputs)] = int(match[3]), int(match[4])
            inputs.append(match[2])
    return Sample(tuple(inputs), {**attrs, **dict(parse_attrs(local))}, ints)


@lru_cache(maxsize=4096)  # layers of a printed graph repeat each other's attributes
def parse_attrs(text: str) -> tuple[tuple[str, Any], ...]:
    """Parse `eps=1e-06, form='value'` into (name, value) pairs; raises as `ast.literal_eval`."""
    call = ast.parse(f"f({text})", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        raise ValueError("not a list of keywords")
    attrs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    if len(attrs) < len(call.keywords):
        raise ValueError("an attribute is given twice")
    return tuple(attrs.items())


@dataclass(frozen=True)
class Op:
    """An op, as `@op` builds it from a class; the module's docstring describes the fields."""

    name: str
    doc: str
    budget: Budget
    samples: tuple[Sample, ...]
    parameters: tuple[Parameter, ...]
    attrs: Mapping[str, str]
    infer: Callable[..., Any] | None = None  # None until ops/__init__.py derives it from `expand`
    reference: Callable[..., Any] | None = None
    expand: Callable[..., Any] | None = None
    flops: Callable[..., int] | None = None  # None, also of `traffic`: the expansion's
    traffic: Callable[..., Traffic] | None = None
    workspace: Callable[..., int] | None = None
    rows: tuple[int, ...] = ()
    updates: tuple[tuple[int, int], ...] = ()
    cache_range: Callable[..., tuple[int, int]] | None = None
    glue: bool = False
    fold: bool = True
    kind: str | None = None

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the inputs in order, except a variadic one."""
        return tuple(p.name for p in self.parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    def infer_types(self, types: Types, attrs: Mapping[str, Any]) -> Types:
        """Return the result types as a tuple. Attributes or operands that do not fit raise the
        errors that `infer` of ir/graph.py converts."""
        unknown = f"unknown; the op has {', '.join(self.attrs) or 'none'}"
        for name, value in attrs.items():
            kind = self.attrs.get(name)
            fits = kind is not None and _KINDS[kind](value)
            why = f"expected {kind}" if kind else unknown
            require(fits, f"attribute {name}={value!r}: {why}")
        self._require_count(len(types))
        assert self.infer
        return as_tuple(self.infer(*types, **attrs))

    def updated(
        self, inputs: Sequence[Operand], outputs: Sequence[Operand]
    ) -> tuple[tuple[Operand, Operand], ...]:
        """Return the (old, new) values of each cache that a node with these operands updates."""
        return tuple((inputs[i], outputs[o]) for o, i in self.updates if o < len(outputs))

    def _require_count(self, count: int) -> None:
        tensors = [p for p in self.parameters if p.kind is not p.KEYWORD_ONLY]
        min_count = sum(p.name in self.operands and p.default is p.empty for p in tensors)
        max_count = len(self.operands) if len(self.operands) == len(tensors) else count
        names = ", ".join(p.name for p in tensors)
        require(min_count <= count <= max_count, f"{count} inputs, expected {names}")


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


#: kind of an attribute, as annotated -> whether a value is of that kind
_KINDS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": lambda x: _is_int(x) or (isinstance(x, float) and math.isfinite(x)),
    "str": lambda x: isinstance(x, str),
    "bool": lambda x: isinstance(x, bool),
    "tuple[int, ...]": lambda x: isinstance(x, tuple) and all(map(_is_int, x)),
    "tuple[bool, ...]": lambda x: isinstance(x, tuple) and all(isinstance(i, bool) for i in x),
}


def _parameters(op: str, function: Callable[..., Any], cls: Mapping[str, Any]) -> list[Parameter]:
    """Return operands, then attributes, from the signature or the class's own lists."""
    parameters = list(inspect.signature(function).parameters.values())
    if "operands" in cls:
        parameters = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        parameters[:0] = map(_operand, cls["operands"].split())
    if "attrs" in cls:
        attrs = cls["attrs"].items()
        parameters = [
            p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in cls["attrs"]
        ]
        parameters += [Parameter(k, Parameter.KEYWORD_ONLY, annotation=kind) for k, kind in attrs]
    kinds_of = {str(p.annotation) for p in parameters if p.kind is p.KEYWORD_ONLY}
    unknown = kinds_of - _KINDS.keys()
    if unknown or any(p.kind is p.VAR_KEYWORD for p in parameters):
        kinds = ", ".join(sorted(unknown)) or "**"
        raise TypeError(f"op {op}: attribute of kind {kinds}; expected {', '.join(_KINDS)}")
    return parameters


def _operand(word: str) -> Parameter:
    """Return the parameter of `x`, `x?` or `*xs`."""
    if word.startswith("*"):
        return Parameter(word[1:], Parameter.VAR_POSITIONAL)
    default = None if word.endswith("?") else Parameter.empty
    return Parameter(word.rstrip("?"), Parameter.POSITIONAL_OR_KEYWORD, default=default)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def per_result(count: int) -> Callable[..., int]:
    """Return a `flops` function that counts `count` per element of the results."""
    return lambda ins, outs, **attrs: count * sum(t.numel() for t in outs)


free = per_result(0)


def per_input(count: int) -> Callable[..., int]:
    """Return a `flops` function that counts `count` per element of the first input."""
    return lambda ins, outs, **attrs: count * ins[0].numel()


def dot_products(operand: int) -> Callable[..., int]:
    """Return a `flops` function for results that are dot products with rows of input number
    `operand`: two per element of the first result and element of a row."""
    return lambda ins, outs, **attrs: 2 * outs[0].numel() * int(ins[operand].shape[-1])


def every_operand(ins: Types, outs: Types, **attrs: Any) -> Traffic:
    """Return the traffic of an op that reads and writes each operand once."""
    return tuple(t.nbytes() for t in ins), tuple(t.nbytes() for t in outs)


def nothing(ins: Types, outs: Types, **attrs: Any) -> Traffic:
    """Return the traffic of a view: no bytes."""
    return (0,) * len(ins), (0,) * len(outs)


#: flops and traffic of a view, or of an op whose cost is counted with the op that reads its result
VIEW = free, nothing


def gathered(ins: Types, outs: Types, **attrs: Any) -> Traffic:
    """Return the traffic of a gather: it reads the returned rows of its first input, and the
    indices."""
    return (outs[0].nbytes(), ins[1].nbytes()), (outs[0].nbytes(),)


def op(cls: type) -> Op:
    """Check an op class and return its `Op`; TypeError names the missing or invalid field."""
    parts: dict[str, Any] = {
        k: v.__func__ if isinstance(v, staticmethod) else v for k, v in vars(cls).items()
    }
    infer, expand = parts.get("infer"), parts.get("expand")
    documented = cls.__doc__ or sys.flags.optimize > 1  # -OO removes docstrings
    missing = {
        "a docstring, and infer or expand": not documented or not (infer or expand),
        "exactly one of reference and expand": (parts.get("reference") is None) == (expand is None),
        "samples": not parts.get("samples"),
        "a budget": not isinstance(parts.get("budget"), Budget),
        f"a kind of {', '.join(KINDS)}": parts.get("kind") not in (None, *KINDS),
    }
    if any(missing.values()):
        requirement = next(part for part, lacks in missing.items() if lacks)
        raise TypeError(f"op {cls.__name__} needs {requirement}")
    record: dict[str, Any] = {f.name: parts[f.name] for f in fields(Op) if f.name in parts}
    if expand is None or parts.keys() & {"flops", "traffic"}:
        record = {"flops": per_result(1), "traffic": every_operand, **record}
    if isinstance(cache_range := record.get("cache_range"), tuple):
        record["cache_range"] = lambda **_: cache_range
    # After the builder, `expand` has the parameters that `infer` would have.
    function = infer or partial(parts["expand"], None)
    parameters = tuple(_parameters(cls.__name__, function, parts))
    attrs = {p.name: str(p.annotation) for p in parameters if p.kind is p.KEYWORD_ONLY}
    record |= {"samples": tuple(parts["samples"]), "parameters": parameters, "attrs": attrs}
    return Op(name=cls.__name__, doc=cls.__doc__ or "", **record)


def require(condition: object, message: str) -> None:
    """Raise ValueError(message) unless the condition holds; the verifier adds the node."""
    if not condition:
        raise ValueError(message)


def upcast(x: Any) -> Any:
    """Return x in fp32, or unchanged if its elements have 4 bytes or more; for the parts of 16-bit
    models that the reference computes in fp32."""
    return x if x.element_size() >= 4 else x.float()
