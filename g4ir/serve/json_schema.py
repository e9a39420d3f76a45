"""Reads JSON Schemas of requests: of tools, `response_format` and the fields like it.

`read_schema` returns an equivalent schema in the few keywords that grammars are written from:

    {}, {"$ref": "#/$defs/N"}, {"anyOf": [...]}, {"enum": [...]}, or a `type` and its constraints

Older drafts are translated; `allOf` and keywords next to `$ref` and unions are merged. Annotations
and unknown keywords and formats are ignored. A constraint that grammars do not support is dropped
and logged, or refused with its path if the schema is strict. Types, declared names and `required`
are always enforced: a schema without valid values is refused.
"""

from __future__ import annotations

import json
import logging
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import Any

from g4ir.chat.messages import shown
from g4ir.chat.tools import NOTES, TYPES, resolve_ref, without_nulls

from .http_errors import Refused
from .schema_leaves import (
    FORMATS,
    LIMITS,
    MATCHED_KEY,
    OF_TYPE,
    UNSUPPORTED,
    Node,
    is_contradiction,
    judge,
    read_pattern,
    written,
)

log = logging.getLogger(__name__)
#: maximum schemas of one root, after unions are multiplied out
MAX_SCHEMAS = 1 << 13
#: maximum nesting at which two schemas are tested for disjointness
MAX_DEPTH = 8
#: maximum multipleOf, without its power of ten: llguidance has a state per remainder
MAX_STEP = 1 << 12
#: maximum of minLength, maxLength, minItems and maxItems
MAX_COUNT = 1 << 24
ANNOTATIONS = NOTES | {"description", "default"}
UNIONS = ("anyOf", "oneOf")
LENGTHS, COUNTS = ("minLength", "maxLength"), ("minItems", "maxItems")
#: keywords other than `type` that constrain a value
CONSTRAINTS = {*OF_TYPE["object"], *UNIONS, *UNSUPPORTED, "allOf", "$ref", "enum", "const"}

#: a schema in the keywords that `read_schema` returns; False allows nothing
Schema = Any


@dataclass(frozen=True)
class Source:
    """A schema of the request, and its path."""

    node: Any
    where: str

    def at(self, *path: str | int) -> Source:
        """Return the subschema at a path."""
        node, where = self.node, self.where
        for step in path:
            node, where = node[step], where + (f"[{step}]" if type(step) is int else f".{step}")
        return Source(node, where)


def read_schema(
    schema: Any,
    where: str,
    *,
    strict: bool,
    controls: Collection[str],
    refuse: Callable[[str, str], Refused],
) -> dict[str, Any]:
    """Normalise a schema to the keywords above, with its `$defs`. `refuse(path, reason)` creates an
    error; names and values that contain one of the control tokens `controls` cannot be
    generated."""
    root = without_nulls(schema)
    reader = _Reader(root, where, strict, controls, refuse)
    try:
        body = reader.schema([Source(root, where)])
    except RecursionError:
        raise refuse(where, "the schema is too deep") from None
    if body is False:
        path, reason = (*reader.contradictions, (where, "it is false"))[0]
        raise refuse(path, f"the schema allows nothing: {reason}")
    reader.check_ends()
    for path, reason in reader.dropped.items():
        log_dropped(f"{path[-200:]}: {reason}")
    return {**body, **({"$defs": reader.defs} if reader.defs else {})}


@lru_cache(maxsize=4096)
def log_dropped(line: str) -> None:
    """Log a dropped constraint, once: agents resend the same schemas."""
    log.warning("a constraint of a schema is not kept: %s", line)


@dataclass
class _Reader:
    """Normalises one schema. `dropped`: path -> reason of unsupported constraints;
    `contradictions`: why parts of the schema have no valid value."""

    root: Any
    where: str
    strict: bool
    controls: Collection[str]
    refuse: Callable[[str, str], Refused]
    dropped: dict[str, str] = field(default_factory=dict, init=False)
    contradictions: list[tuple[str, str]] = field(default_factory=list, init=False)
    #: bodies of references, and where each is defined
    defs: dict[str, Schema] = field(default_factory=dict, init=False)
    _paths: dict[str, str] = field(default_factory=dict, init=False)
    _names: dict[Any, str] = field(default_factory=dict, init=False)
    _count: int = field(default=0, init=False)

    def schema(self, parts: Sequence[Source]) -> Schema:
        """Return the intersection of schemas."""
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise self.refuse(self.where, "the schema is too large for a grammar")
        parts = [p for part in parts for p in self._flatten(part)]
        if any(p.node is not False and "$ref" in p.node for p in parts):
            return self._reference(parts)
        return self._intersection(parts)

    def drop(self, where: str, reason: str) -> None:
        """Record a dropped constraint; refused if the schema is strict."""
        if self.strict:
            raise self.refuse(where, f"{reason}; leave it out, or strict")
        self.dropped.setdefault(where, reason)

    def _contradicts(self, where: str, reason: str) -> Schema:
        """Record a contradiction, and return the schema without valid values."""
        self.contradictions.append((where, reason))
        return False

    def _control_in(self, value: Any) -> str | None:
        """Return a control token that a value contains."""
        return next((c for t in _strings_in(value) for c in self.controls if c in t), None)

    # --- older drafts ---

    def _flatten(self, part: Source) -> Iterator[Source]:
        """Yield a schema in draft 2020-12, and the branches of its `allOf` before or after it."""
        if isinstance(part.node, bool):
            yield Source({} if part.node else False, part.where)
            return
        if not isinstance(part.node, Mapping):
            raise self.refuse(part.where, f"must be a schema, found {shown(part.node)}")
        node = self._modernise(part)
        branches = node.pop("allOf", [])
        if not isinstance(branches, list):
            raise self.refuse(f"{part.where}.allOf", "must be a list of schemas")
        names, whole = [*part.node], [Source(node, part.where)] if node or not branches else []
        # keeps the order of properties as written
        first = "allOf" not in names or "properties" in names[: names.index("allOf")]
        yield from whole if first else []
        for i, branch in enumerate(branches):
            yield from self._flatten(Source(branch, f"{part.where}.allOf[{i}]"))
        yield from [] if first else whole

    def _modernise(self, part: Source) -> dict[str, Any]:
        """Translate a schema to draft 2020-12."""
        node = {k: v for k, v in part.node.items() if k not in ANNOTATIONS}
        if node.get("not") in ({}, True) and "not" in node:
            return {"allOf": [False]}
        for edge, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(node.get(edge), bool) and node.pop(edge) and limit in node:  # of draft 4
                node[edge] = node.pop(limit)
        if "const" in node:
            node["allOf"] = [*node.get("allOf", []), {"enum": [node.pop("const")]}]
        if isinstance(node.get("items"), list):  # before 2020-12
            older = {"prefixItems": node.pop("items"), "items": node.pop("additionalItems", True)}
            if "prefixItems" in node:
                node["allOf"] = [*node.get("allOf", []), older]
            else:
                node |= older
        if node.pop("nullable", None) is True:
            node = _nullable(node)
        return node

    # --- references ---

    def _reference(self, parts: Sequence[Source]) -> Schema:
        """Return a reference to the intersection of schemas of which some are references."""
        key = frozenset(json.dumps(p.node, sort_keys=True) for p in parts)
        if (name := self._names.get(key)) is None:
            name = self._names[key] = str(len(self._names))
            self.defs[name] = {"$ref": f"#/$defs/{name}"}  # placeholder while it is being read
            self._paths[name] = parts[0].where
            self.defs[name] = self._intersection(self._resolve(parts))
        return False if self.defs[name] is False else {"$ref": f"#/$defs/{name}"}

    def _resolve(self, parts: Sequence[Source]) -> list[Source]:
        """Resolve top-level references; a self-reference adds nothing."""
        out, visited, pending = list[Source](), set[str](), [*parts]
        while pending:
            part = pending.pop(0)
            if part.node is False or "$ref" not in part.node:
                out.append(part)
                continue
            siblings = dict(part.node)
            ref = str(siblings.pop("$ref"))
            inner = [Source(siblings, part.where)] if siblings else []
            if ref not in visited:
                visited.add(ref)
                if (goal := resolve_ref(self.root, ref)) is None:
                    self.drop(f"{part.where}.$ref", f"{shown(ref)} names nothing in this schema")
                    goal = {}
                path = ref.removeprefix("#").replace("/", ".")
                inner = [*self._flatten(Source(goal, self.where + path)), *inner]
            pending = [*inner, *pending]
        if not out:
            why = "the schema has no value that ends: it leads round to itself"
            raise self.refuse(f"{parts[0].where}.$ref", why)
        return out

    def check_ends(self) -> None:
        """Refuse reachable schemas without finite values (endless recursion). Schemas with finite
        values are found by fixed-point iteration."""
        finite = set[str]()
        while added := {k for k in self.defs.keys() - finite if _ends(self.defs[k], finite)}:
            finite |= added
        if endless := [*self.defs.keys() - finite]:
            path = self._paths[endless[0]]
            why = f"the schema has no value that ends: {path} leads round to itself"
            raise self.refuse(self.where, why)

    # --- unions ---

    def _intersection(self, parts: Sequence[Source]) -> Schema:
        """Return the intersection of schemas without top-level references."""
        if any(p.node is False for p in parts):
            return False
        for i, part in enumerate(parts):
            for name in UNIONS:
                if name in part.node:
                    node = {k: v for k, v in part.node.items() if k != name}
                    siblings = [*parts[:i], Source(node, part.where), *parts[i + 1 :]]
                    return self._union(part.at(name), siblings, single=name == "oneOf")
        return self._leaf(parts)

    def _union(self, union: Source, siblings: Sequence[Source], single: bool) -> Schema:
        """Return a union's branches, each intersected with `siblings`. `single` (oneOf): exactly
        one branch may match."""
        if not isinstance(union.node, list):
            raise self.refuse(union.where, "must be a list of schemas")
        if not union.node:
            self.drop(union.where, "has no schema")
            return self._intersection(siblings)
        schemas = [self.schema([*siblings, union.at(i)]) for i in range(len(union.node))]
        if single and not all(self._are_disjoint(a, b) for a, b in combinations(schemas, 2)):
            self.drop(union.where, "two of its schemas may hold at once; give anyOf")
        allowed = [s for s in schemas if s is not False]
        unique = [s for i, s in enumerate(allowed) if s not in allowed[:i]]
        if not unique:
            return self._contradicts(union.where, "no schema of it is allowed beside the others")
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    def _are_disjoint(self, a: Schema, b: Schema, depth: int = MAX_DEPTH) -> bool:
        """Whether types and enums prove that no value matches both schemas."""
        if a is False or b is False or not depth:
            return bool(depth)
        for one, other in ((a, b), (b, a)):
            if "$ref" in one:
                body = self.defs[one["$ref"].rpartition("/")[2]]
                return self._are_disjoint(body, other, depth - 1)
            if "anyOf" in one:
                return all(self._are_disjoint(schema, other, depth - 1) for schema in one["anyOf"])
        if {"enum"} <= a.keys() & b.keys():
            return not any(_equal(x, y) for x in a["enum"] for y in b["enum"])
        common = _types_of(a) & _types_of(b)
        names = {*a.get("required", ())} & {*b.get("required", ())}
        return not common or (
            common == {"object"}
            and any(
                self._are_disjoint(a["properties"][k], b["properties"][k], depth - 1) for k in names
            )
        )

    # --- types and listed values ---

    def _leaf(self, parts: Sequence[Source]) -> Schema:
        """Return the intersection of schemas without unions."""
        types = {*TYPES}
        for part in parts:
            types &= self._types(part)
        for part in parts:
            self._drop_unsupported(part, types)
        if any("enum" in p.node for p in parts):
            return self._listed(parts, types)
        out = dict[str, Any]()
        for kind, intersect in (
            ("number", self._limits),
            ("string", self._limits),
            ("array", self._array),
            ("object", self._object),
        ):
            kinds = types & ({"integer", "number"} if kind == "number" else {kind})
            if not kinds or not any({*OF_TYPE[kind]} & p.node.keys() for p in parts):
                continue
            keywords = intersect(parts, "integer" if kinds == {"integer"} else kind)
            if keywords is None:
                types -= kinds
                continue
            more = [*out.get("allOf", ()), *keywords.get("allOf", ())]
            out |= {**keywords, **({"allOf": more} if more else {})}
        if not types:
            where = parts[0].where if parts else self.where
            return self._contradicts(where, "its types exclude each other")
        if types == {*TYPES}:
            return out
        names = [k for k in TYPES if k in types and not (k == "integer" and "number" in types)]
        return {"type": names[0] if len(names) == 1 else names, **out}

    def _types(self, part: Source) -> set[str]:
        kinds = part.node.get("type", [*TYPES])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        for kind in kinds:
            if not isinstance(kind, str) or kind.lower() not in TYPES:
                why = f"must be of {', '.join(TYPES)}, found {shown(kind)}"
                raise self.refuse(f"{part.where}.type", why)
        out = {k.lower() for k in kinds}
        return out | {"integer"} if "number" in out else out

    def _drop_unsupported(self, part: Source, types: Collection[str]) -> None:
        for name in UNSUPPORTED.keys() & part.node.keys():
            kinds, *neutral = UNSUPPORTED[name]
            vacuous = name == "if" and not part.node.keys() & {"then", "else"}
            if {*kinds} & {*types} and part.node[name] not in neutral and not vacuous:
                self.drop(f"{part.where}.{name}", "is not supported")

    def _listed(self, parts: Sequence[Source], types: Collection[str]) -> Schema:
        """Return the enum values that all schemas allow."""
        lists = [p for p in parts if "enum" in p.node]
        for part in lists:
            if not isinstance(part.node["enum"], list):
                raise self.refuse(f"{part.where}.enum", "must be a list of values")
        first, *others = (p.node["enum"] for p in lists)
        values = [
            v
            for v in first
            if all(any(_equal(v, w) for w in listed) for listed in others)
            and any(has_type(v, kind) for kind in types)
        ]
        if any(isinstance(v, dict | list) for v in values):
            for part in parts:
                if ignored := part.node.keys() & {*OF_TYPE["array"], *OF_TYPE["object"]}:
                    self.drop(f"{part.where}.{min(ignored)}", "is not supported beside enum")
        limits = {kind: self._limits(parts, kind) for kind in ("number", "string")}
        values = [v for v in values if _is_within(v, limits)]
        where = f"{lists[0].where}.enum"
        if not values:
            return self._contradicts(where, "has no value of its type and within its limits")
        usable = [v for v in values if self._control_in(v) is None]
        if len(usable) < len(values):
            control = next(c for c in map(self._control_in, values) if c)
            self.drop(where, f"{control} in a literal text is not supported")
        return {"enum": usable} if usable else False

    # --- numbers and strings ---

    def _limits(
        self, parts: Sequence[Source], kind: str, names: Collection[str] = ()
    ) -> dict[str, Any] | None:
        """Return the merged limits of a type; None if they contradict each other. A format is an
        annotation, dropped in favour of constraints."""
        out: dict[str, Any] = {}
        for name in names or OF_TYPE[kind]:
            for value, where in (
                (p.node[name], f"{p.where}.{name}") for p in parts if name in p.node
            ):
                if name == "format":
                    usable = isinstance(value, str) and value in FORMATS and name not in out
                    if usable and not judge(written({"type": kind, **out, name: value})):
                        out[name] = value
                    elif value != out.get(name):
                        self.dropped.setdefault(where, "this format is taken as an annotation")
                    continue
                if why := self._unusable(name, value):
                    self.drop(where, why)
                    continue
                tried = _with(out, name, value)
                if not (error := judge(written({"type": kind, **tried}))):
                    out = tried
                elif is_contradiction(error):
                    self._contradicts(where, error)
                    return None
                else:
                    self.drop(where, error)
        return out

    def _unusable(self, name: str, value: Any) -> str:
        """Return why a grammar does not support a limit; "" if it does."""
        if name == "pattern":
            if not isinstance(value, str):
                return f"must be a regular expression, found {shown(value)}"
            if control := self._control_in(re.sub(r"\\(.)", r"\1", value)):
                return f"{control} in a literal text is not supported"
            return "" if read_pattern(value) else "this regular expression is not supported"
        if name in (*LENGTHS, *COUNTS) and not (
            has_type(value, "integer") and 0 <= value <= MAX_COUNT
        ):
            return f"must be a whole number of 0 to {MAX_COUNT}, found {shown(value)}"
        if name in LIMITS and not has_type(value, "number"):
            return f"must be a number, found {shown(value)}"
        if name == "multipleOf" and not 0 < _coefficient(value) <= MAX_STEP:
            return f"must be 1 to {MAX_STEP}, times a power of ten below 1"
        return ""

    # --- arrays ---

    def _array(self, parts: Sequence[Source], kind: str) -> dict[str, Any] | None:
        """Return the keywords of arrays: counts and item schemas; None if no array is valid."""
        for part in parts:
            if not isinstance(part.node.get("prefixItems", []), list):
                raise self.refuse(f"{part.where}.prefixItems", "must be a list of schemas")
        out = self._limits(parts, kind, COUNTS)
        if out is None:
            return None
        length = max(len(p.node.get("prefixItems", ())) for p in parts)
        min_items, max_items = out.get("minItems", 0), out.get("maxItems", MAX_COUNT)
        prefix = list[Schema]()
        for i in range(min(length, max_items)):
            item = self.schema([*_items(parts, i)])
            if item is False:
                max_items = i
                break
            prefix.append(item)
        if max_items > length and (more := [*_items(parts, length)]):
            item = self.schema(more)
            if item is False:
                max_items = length
            elif item:
                out["items"] = item
        if min_items > max_items:
            return None
        if max_items < MAX_COUNT:
            out["maxItems"] = max_items
        return {**out, **({"prefixItems": prefix} if prefix else {})}

    # --- objects ---

    def _object(self, parts: Sequence[Source], kind: str) -> dict[str, Any] | None:
        """Return the keywords of objects: property schemas and `required`; None if no object is
        valid."""
        for part in parts:
            for name in ("properties", "patternProperties"):
                if not isinstance(part.node.get(name, {}), Mapping):
                    raise self.refuse(f"{part.where}.{name}", "must be an object of schemas")
            names = part.node.get("required", [])
            if not isinstance(names, list) or not all(isinstance(k, str) for k in names):
                raise self.refuse(f"{part.where}.required", "must be a list of names")
        required = [*dict.fromkeys(k for p in parts for k in p.node.get("required", ()))]
        declared = [k for p in parts for k in p.node.get("properties", ())]
        out, properties = dict[str, Any](), dict[str, Any]()
        for name in dict.fromkeys([*declared, *required]):
            if (control := self._control_in(name)) is not None:
                why = f"{control} in the name {shown(name)} is not supported"
                if name in required:
                    raise self.refuse(f"{parts[0].where}.required", why)
                self.drop(f"{parts[0].where}.properties", why)
                properties[name] = False
                continue
            properties[name] = self.schema([*_members(parts, name)])
            if properties[name] is False and name in required:
                self._contradicts(f"{parts[0].where}.required", f"no {shown(name)} is allowed")
                return None
        out = {"properties": properties} if properties else {}
        out |= {"required": required} if required else {}
        out |= self._matched(parts, bool(properties))
        if undeclared := [p.at(MORE) for p in parts if MORE in p.node]:
            more = self.schema(undeclared)
            out |= {MORE: more} if more != {} else {}
        return out

    def _matched(self, parts: Sequence[Source], declared: bool) -> dict[str, Any]:
        """Return the schema of patternProperties, if it is supported."""
        patterns = [(p, k) for p in parts for k in p.node.get("patternProperties", ())]
        if not patterns:
            return {}
        (part, pattern), *more = patterns
        error = "is not supported beside declared members, or another pattern"
        if not declared and not more:
            key = {"type": "string", "pattern": pattern, "allOf": [{"pattern": f"^{MATCHED_KEY}$"}]}
            if not (error := self._unusable("pattern", pattern) or judge(key)):
                members = [p.at(MORE) for p in parts if p is not part and MORE in p.node]
                value = self.schema([part.at("patternProperties", pattern), *members])
                if value is not False:
                    return {"patternProperties": {pattern: value}}
                error = "allows nothing"
        for part, _ in patterns:
            self.drop(f"{part.where}.patternProperties", error)
        return {}


MORE = "additionalProperties"


def _items(parts: Sequence[Source], index: int) -> Iterator[Source]:
    """Yield the schemas that apply to an item."""
    for part in parts:
        if index < len(part.node.get("prefixItems", ())):
            yield part.at("prefixItems", index)
        elif "items" in part.node:
            yield part.at("items")


def _members(parts: Sequence[Source], name: str) -> Iterator[Source]:
    """Yield the schemas that apply to a property."""
    for part in parts:
        if name in part.node.get("properties", {}):
            yield part.at("properties", name)
        elif MORE in part.node:
            yield part.at(MORE)


def _nullable(node: dict[str, Any]) -> dict[str, Any]:
    """Expand OpenAPI 3.0's `nullable`."""
    if node.keys() & {"allOf", "$ref", *UNIONS}:
        return {"anyOf": [node, {"type": "null"}]}
    if "type" in node:
        kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
        node["type"] = [*kinds, "null"]
    if isinstance(node.get("enum"), list):
        node["enum"] = [*node["enum"], None]
    return node


def _with(limits: Node, name: str, value: Any) -> dict[str, Any]:
    """Add a limit; of two bounds the stricter one is kept."""
    if name not in limits:
        return {**limits, name: value}
    if name in ("pattern", "multipleOf"):
        return {**limits, "allOf": [*limits.get("allOf", ()), {name: value}]}
    stricter = max if "min" in name.lower() else min
    return {**limits, name: stricter(value, limits[name])}


def _ends(node: Schema, finite: Collection[str]) -> bool:
    """Whether a schema has a finite value, given the set of `finite` references."""
    if node is False:
        return True
    if "$ref" in node:
        return node["$ref"].rpartition("/")[2] in finite
    if "anyOf" in node:
        return any(_ends(schema, finite) for schema in node["anyOf"])
    count = node.get("minItems", 0) if node.get("type") == "array" else 0
    items = [*node.get("prefixItems", ()), *[node.get("items", {})] * count][:count]
    required = node.get("required", ()) if node.get("type") == "object" else ()
    return all(_ends(x, finite) for x in (*items, *(node["properties"][k] for k in required)))


# --- values -----------------------------------------------------------------------------------


def _equal(a: Any, b: Any) -> bool:
    """JSON equality: true differs from 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    return bool(a == b)


def has_type(value: Any, kind: str) -> bool:
    """Whether a value is of a JSON type; 2.0 is an integer too."""
    if kind in ("integer", "number"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or value == int(value))
    kinds = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, kinds[kind])


def _types_of(node: Node) -> set[str]:
    """Return a schema's types; "number" includes "integer"."""
    if "enum" in node:
        return {kind for v in node["enum"] for kind in TYPES if has_type(v, kind)}
    kinds = node.get("type", [*TYPES])
    out = {*(kinds if isinstance(kinds, list) else [kinds])}
    return out | {"integer"} if "number" in out else out


#: keyword -> predicate (number, limit); exact, whereas llguidance computes in floats
_WITHIN: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "multipleOf": lambda value, step: not Fraction(str(value)) % Fraction(str(step)),
}


def _is_within(value: Any, limits: Mapping[str, dict[str, Any] | None]) -> bool:
    """Whether an enum value satisfies the limits of numbers and strings."""
    kind = "number" if has_type(value, "number") else "string"
    if not has_type(value, kind):
        return True
    if (limit := limits[kind]) is None:
        return False
    if kind == "string":
        limits_alone = {k: v for k, v in limit.items() if k != "format"}
        return not is_contradiction(judge({**limits_alone, "const": value}))
    each = [*limit.items(), *(pair for more in limit.get("allOf", ()) for pair in more.items())]
    return all(_WITHIN[k](value, limit) for k, limit in each if k in _WITHIN)


def _strings_in(value: Any) -> Iterator[str]:
    """Yield the strings in a value, property names included."""
    if isinstance(value, str):
        yield value
    for inner in value if isinstance(value, list) else ():
        yield from _strings_in(inner)
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key
        yield from _strings_in(inner)


def _coefficient(step: float) -> int:
    """Return a multipleOf scaled to an integer (25 for 2.5): the number of remainders."""
    _, digits, exponent = Decimal(str(step)).normalize().as_tuple()
    number = int("".join(map(str, digits)))
    return 0 if step <= 0 else number * 10 ** min(max(int(exponent), 0), 18)
