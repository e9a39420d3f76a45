"""Predicates on values and on the schemas that `read_schema` returns: equality, types, limits, and
whether two schemas have a common value or a schema has a finite one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

from g4ir.chat.tools import TYPES, target

from .schema_dialect import OF_TYPE, Node, Schema, is_contradiction, judge

#: nesting that `are_disjoint` looks at
MAX_DEPTH = 8
#: rounds of the search for parts with finite values
MAX_ROUNDS = 64


# --- values -----------------------------------------------------------------------------------


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return bool(a == b)


def has_type(value: Any, kind: str) -> bool:
    """Return whether a value is of a JSON type; 2.0 is an integer too."""
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (whole or kind == "number")
    kinds = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, kinds[kind])


#: keyword -> whether a value is within its limit
_WITHIN: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "multipleOf": lambda value, limit: not limit or not Fraction(str(value)) % Fraction(str(limit)),
    "minLength": lambda value, limit: len(value) >= limit,
    "maxLength": lambda value, limit: len(value) <= limit,
}


def is_within_limits(value: Any, node: Node) -> bool:
    """Return whether a listed value satisfies the limits of numbers and strings in a schema."""
    kind = "number" if has_type(value, "number") else "string" if isinstance(value, str) else ""
    pattern = node.get("pattern")
    if kind == "string" and isinstance(pattern, str) and not matches(pattern, value):
        return False
    limits = [k for k in OF_TYPE.get(kind, ()) if k in _WITHIN and has_type(node.get(k), "number")]
    return all(_WITHIN[k](value, node[k]) for k in limits)


def matches(pattern: str, text: str) -> bool:
    """Return whether a pattern of names or strings matches in a text; True if llguidance cannot
    read the pattern. In linear time, which Python's regular expressions do not promise."""
    literal = "".join(f"\\x{{{ord(c):X}}}" for c in text)
    both = {"type": "string", "pattern": pattern, "allOf": [{"pattern": f"^(?:{literal})$"}]}
    return not is_contradiction(judge(both))


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings in a value, names of members included."""
    if isinstance(value, str):
        yield value
    for inner in value if isinstance(value, list) else ():
        yield from strings_in(inner)
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key
        yield from strings_in(inner)


def step_coefficient(step: float) -> int:
    """Return a multipleOf without its decimal point, 25 for 2.5: the number of remainders."""
    _, digits, exponent = Decimal(str(step)).normalize().as_tuple()
    number = int("".join(map(str, digits)))
    return 0 if step <= 0 else number * 10 ** min(max(int(exponent), 0), 18)


def tighter_limit(name: str, a: Any, b: Any) -> Any:
    """Return the stricter of two limits of numbers."""
    if name != "multipleOf":
        return max(a, b) if name in ("minimum", "exclusiveMinimum") else min(a, b)
    x, y = Fraction(str(a)), Fraction(str(b))
    both = Fraction(math.lcm(x.numerator, y.numerator), math.gcd(x.denominator, y.denominator))
    return int(both) if both.denominator == 1 else float(both)


# --- schemas of the output --------------------------------------------------------------------


def are_disjoint(a: Schema, b: Schema, root: Node, depth: int = MAX_DEPTH) -> bool:
    """Return whether types and listed values show that no value matches both schemas; `root` has
    the `$defs`."""
    if a is False or b is False:
        return True
    if not depth:
        return False
    alternatives = [[*_alternatives(s, root)] for s in (a, b)]
    if any(len(x) != 1 for x in alternatives):
        return all(are_disjoint(x, y, root, depth - 1) for x, y in product(*alternatives))
    (first,), (second,) = alternatives
    if first is True or second is True:
        return False
    if {"enum"} <= first.keys() & second.keys():
        return not any(equal(x, y) for x in first["enum"] for y in second["enum"])
    common = _types_of(first) & _types_of(second)
    if common - {"object"}:
        return False
    names = {*first.get("required", ())} & {*second.get("required", ())}
    inner = [node.get("properties", {}) for node in (first, second)]
    pairs = [(inner[0][k], inner[1][k]) for k in names if k in inner[0] and k in inner[1]]
    return not common or any(are_disjoint(x, y, root, depth - 1) for x, y in pairs)


def _alternatives(schema: Schema, root: Node, depth: int = MAX_DEPTH) -> Iterator[Any]:
    """Yield the alternatives of a schema."""
    if isinstance(schema, dict) and "$ref" in schema and depth:
        yield from _alternatives(target(root, schema["$ref"]), root, depth - 1)
    elif isinstance(schema, dict) and "anyOf" in schema:
        yield from schema["anyOf"]
    elif schema is not False:
        yield True if isinstance(schema, bool) or "$ref" in schema else schema


def _types_of(node: Node) -> set[str]:
    """Return the types of a schema; a number may be an integer."""
    if "enum" in node:
        return {kind for v in node["enum"] for kind in TYPES if has_type(v, kind)}
    kinds = node.get("type", [*TYPES])
    out = {*(kinds if isinstance(kinds, list) else [kinds])}
    return out | {"integer"} if "number" in out else out


def endless_part(schema: Node) -> Node | None:
    """Return a part of a schema that an answer could enter and that has no finite value. Parts
    with finite values are collected in rounds, until a round adds none."""
    parts: dict[int, Node] = {}
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping) and id(part) not in parts:
            parts[id(part)] = part
            pending += _inner(part, schema)
    order, finite = [(i, _requirements(part, schema)) for i, part in parts.items()], set[int]()
    for _ in range(MAX_ROUNDS):
        before = len(finite)
        order.reverse()
        for i, requirements in order:
            if all(any(id(x) in finite for x in choices) for choices in requirements):
                finite.add(i)
        if len(finite) == before:
            break
    endless = [part for i, part in parts.items() if i not in finite]
    return next((p for p in endless if "$ref" in p), endless[0] if endless else None)


def _inner(part: Node, root: Node) -> Iterator[Any]:
    """Yield the schemas that apply to values of a schema or to values inside them."""
    yield from (*part.get("anyOf", ()), *part.get("prefixItems", ()))
    yield from (part.get("items"), part.get("additionalProperties"))
    for members in (part.get("properties", {}), part.get("patternProperties", {})):
        yield from members.values()
    if "$ref" in part:
        yield target(root, part["$ref"])


def _requirements(part: Node, root: Node) -> list[list[Any]]:
    """Return lists of schemas: a part has a finite value if one schema of each list has one."""
    needed = [target(root, part["$ref"])] if "$ref" in part else []
    if part.get("type") == "object":
        needed += [part["properties"][name] for name in part.get("required", ())]
    if part.get("type") == "array" and (count := part.get("minItems", 0)):
        needed += [*part.get("prefixItems", ())][:count]
        needed += [part.get("items")] if count > len(part.get("prefixItems", ())) else []
    lists = [*([n] for n in needed), *([part["anyOf"]] if "anyOf" in part else [])]
    return [choices for choices in lists if all(isinstance(x, Mapping) for x in choices)]
