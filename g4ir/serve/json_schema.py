"""Reads JSON Schemas of requests: of tools, `response_format` and the fields like it.

`read_schema` returns an equivalent schema in the few keywords that grammars are written from:

    {}, {"$ref": "#/$defs/N"}, {"anyOf": [...]}, {"enum": [...]}, or a `type` and its constraints

Older spellings are translated, `allOf` and keywords beside `$ref` and `anyOf` are merged.
Annotations, and keywords and formats that nobody defines, are ignored. A constraint that a grammar
cannot keep is dropped alone and logged, or refused by its path if the schema is strict. Types,
declared names and `required` always hold: a schema that allows nothing is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

from g4ir.chat.messages import shown
from g4ir.chat.tools import NOTES, TYPES, target, without_nulls

from .http_errors import Refused
from .schema_dialect import OF_TYPE, UNIONS, UNSUPPORTED, Dialect, Schema
from .schema_types import Contradiction, Reader, Source, TypeConstraints
from .schema_values import are_disjoint, endless_part, equal, has_type, is_within_limits

log = logging.getLogger(__name__)
#: lines that were logged; cleared when there are too many, so that each drop is logged once or more
_LOGGED: set[str] = set()
MAX_LOGGED = 4096

#: schemas of one root, and combinations of unions beside each other
MAX_SCHEMAS, MAX_UNIONS = 1 << 13, 64
ANNOTATIONS = NOTES | {"description", "default"}

#: a union's keyword and its alternatives
Union = tuple[str, list[Source]]


def read_schema(
    schema: Any,
    where: str,
    dialect: Dialect,
    *,
    strict: bool,
    controls: Collection[str],
    refuse: Callable[[str, str], Refused],
) -> dict[str, Any]:
    """Return a schema in the keywords above, with its `$defs`. `refuse` makes the error of a path
    and a reason; names and values that contain one of `controls` cannot be generated."""
    root = without_nulls(schema)
    reader = _Reader(root, where, dialect, strict, controls, refuse)
    try:
        body = reader.schema([Source(root, where)])
    except RecursionError:
        raise refuse(where, "the schema is too deep") from None
    if body is False:
        raise refuse(where, "the schema allows nothing")
    keywords = {} if isinstance(body, bool) else body
    out = {**keywords, **({"$defs": reader.defs} if reader.defs else {})}
    if part := endless_part(out):
        path = reader.paths.get(str(part.get("$ref")), where)
        raise refuse(where, f"the schema has no value that ends: {path} leads round to itself")
    _log_dropped(reader.dropped)
    return out


def _log_dropped(dropped: Mapping[str, str]) -> None:
    for path, reason in dropped.items():
        line = f"{path[-200:]}: {reason}"
        if line not in _LOGGED:
            if len(_LOGGED) >= MAX_LOGGED:
                _LOGGED.clear()
            _LOGGED.add(line)
            log.warning("a constraint of a schema is not kept: %s", line)


@dataclass
class _Reader(Reader):
    """Reads schemas of any nesting. `defs` are the bodies of references."""

    defs: dict[str, Any] = field(default_factory=dict, init=False)
    #: `$ref` of the output -> where the schema is defined
    paths: dict[str, str] = field(default_factory=dict, init=False)
    _names: dict[Any, str] = field(default_factory=dict, init=False)
    _count: int = field(default=0, init=False)

    def schema(self, parts: Sequence[Source], exact: bool = False) -> Schema:
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise self.refuse(self.where, "the schema is too large for a grammar")
        parts = [p for part in parts for p in self._flatten(part)]
        if any(p.node is False for p in parts):
            return False
        if any("$ref" in p.node for p in parts):
            return self._reference(parts, exact)
        return self._intersection(parts, exact)

    # --- spelling ---

    def _flatten(self, part: Source) -> Iterator[Source]:
        """Yield a schema in today's spelling, and the branches of its `allOf` before or after."""
        if part.node is True:
            return
        if part.node is False:
            yield part
            return
        if not isinstance(part.node, Mapping):
            raise self.refuse(part.where, f"must be a schema, found {shown(part.node)}")
        node = self._modernise(part)
        if node is False:
            yield Source(False, part.where)
            return
        branches = node.pop("allOf", [])
        if not isinstance(branches, list):
            raise self.refuse(f"{part.where}.allOf", "must be a list of schemas")
        whole, names = Source(node, part.where), [*part.node]
        # members come in the order in which they are written
        first = "allOf" not in names or "properties" in names[: names.index("allOf")]
        yield from [whole] if first else []
        for i, branch in enumerate(branches):
            yield from self._flatten(Source(branch, f"{part.where}.allOf[{i}]"))
        yield from [] if first else [whole]

    def _modernise(self, part: Source) -> dict[str, Any] | Any:
        """Return a schema in the spelling of 2020-12; False: it allows nothing."""
        node = {k: v for k, v in part.node.items() if k not in ANNOTATIONS}
        if node.get("not") in ({}, True) and "not" in node:
            return False
        for edge, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(node.get(edge), bool) and node.pop(edge) and limit in node:  # of draft 4
                node[edge] = node.pop(limit)
        if "const" in node:
            value, listed = node.pop("const"), node.get("enum")
            if isinstance(listed, list) and not any(equal(value, v) for v in listed):
                self.drop(f"{part.where}.enum", "does not have the value of const")
            node["enum"] = [value]
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

    def _reference(self, parts: Sequence[Source], exact: bool) -> Schema:
        """Return a reference to the intersection of schemas of which some are references."""
        key = (exact, frozenset(json.dumps(p.node, sort_keys=True) for p in parts))
        if (name := self._names.get(key)) is None:
            name = self._names[key] = str(len(self._names))
            self.defs[name] = {"$ref": f"#/$defs/{name}"}  # while it is read
            self.paths[f"#/$defs/{name}"] = parts[0].where
            self.defs[name] = self._intersection(self._resolve(parts), exact)
        return False if self.defs[name] is False else {"$ref": f"#/$defs/{name}"}

    def _resolve(self, parts: Sequence[Source]) -> list[Source]:
        """Return schemas without references; one that leads to itself adds nothing."""
        out, visited, circular = list[Source](), set[str](), False
        pending = [(part, frozenset[str]()) for part in parts]
        while pending:
            part, refs = pending.pop(0)
            if part.node is False or "$ref" not in part.node:
                out += [part] if part.node is False or part.node else []
                continue
            node = dict(part.node)
            ref = str(node.pop("$ref"))
            goal = target(self.root, ref)
            if goal is None:
                self.drop(f"{part.where}.$ref", f"{shown(ref)} names nothing in this schema")
            inner = list[Source]()
            if goal is not None and ref not in visited:
                path = ref.removeprefix("#").replace("/", ".")
                inner = [*self._flatten(Source(goal, self.where + path))]
            circular = circular or ref in refs
            visited.add(ref)
            expanded = [(p, refs | {ref}) for p in inner]
            pending = [*expanded, (Source(node, part.where), refs), *pending]
        if circular and not out:
            why = "the schema has no value that ends: it leads round to itself"
            raise self.refuse(f"{parts[0].where}.$ref", why)
        return out

    # --- unions ---

    def _intersection(self, parts: Sequence[Source], exact: bool) -> Schema:
        """Return the intersection of schemas without references at their top."""
        if any(p.node is False for p in parts):
            return False
        base, unions = list[Source](), list[Union]()
        for part in parts:
            base.append(Source({k: v for k, v in part.node.items() if k not in UNIONS}, part.where))
            for name in UNIONS:
                if name in part.node:
                    unions += self._alternatives(part, name)
        if not unions:
            return self._leaf(base, exact)
        total = 1
        for i, (_, alternatives) in enumerate(unions):
            total *= len(alternatives)
            if i and total > MAX_UNIONS:
                for union in unions[i:]:
                    self.drop(_path(union), f"{union[0]} is too large beside another union")
                unions = unions[:i]
                break
        return self._union(base, unions, exact)

    def _alternatives(self, part: Source, name: str) -> list[Union]:
        schemas, where = part.node[name], f"{part.where}.{name}"
        if not isinstance(schemas, list):
            raise self.refuse(where, "must be a list of schemas")
        if not schemas:
            self.drop(where, "has no schema")
            return []
        return [(name, [Source(s, f"{where}[{i}]") for i, s in enumerate(schemas)])]

    def _union(self, base: Sequence[Source], unions: Sequence[Union], exact: bool) -> Schema:
        choices = [*product(*(alternatives for _, alternatives in unions))]
        schemas = [self.schema([*base, *choice], True) for choice in choices]
        if all(s is False for s in schemas) and not exact:
            schemas = [self.schema([*base, *choice]) for choice in choices]
        for name, alternatives in unions:
            if name != "oneOf":
                continue
            single = schemas
            if len(unions) > 1:
                single = [self.schema([*base, part], True) for part in alternatives]
            root = {"$defs": self.defs}
            if not all(are_disjoint(a, b, root) for a, b in combinations(single, 2)):
                why = "two of its schemas may hold at once; give anyOf"
                self.drop(_path((name, alternatives)), why)
        allowed = [s for s in schemas if s is not False]
        if not allowed:
            return False
        unique = [s for i, s in enumerate(allowed) if s not in allowed[:i]]
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    # --- types and listed values ---

    def _leaf(self, parts: Sequence[Source], exact: bool) -> Schema:
        """Return the intersection of schemas without unions."""
        types = {*TYPES}
        for part in parts:
            types &= self._types(part)
        if not types:
            return False
        for part in parts:
            self._drop_unsupported(part, types)
        if any("enum" in p.node for p in parts):
            listed = self._listed(parts, types, exact)
            if listed is not None:
                return listed
        out, constraints = dict[str, Any](), TypeConstraints(self, parts, exact)
        for kind, intersect in (
            ("number", constraints.number),
            ("string", constraints.string),
            ("array", constraints.array),
            ("object", constraints.object),
        ):
            kinds = types & ({"integer", "number"} if kind == "number" else {kind})
            keywords = {*OF_TYPE[kind]}
            if kind == "string":
                keywords |= {*self.dialect.string_keywords}
            if not kinds or not any(keywords & p.node.keys() for p in parts):
                continue
            try:
                out |= intersect("integer" if kinds == {"integer"} else kind)
            except Contradiction:
                types -= kinds
        if not types:
            return False
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

    def _listed(
        self, parts: Sequence[Source], types: Collection[str], exact: bool
    ) -> Schema | None:
        """Return the listed values that all schemas allow; None: their list was dropped."""
        lists = [p for p in parts if "enum" in p.node]
        for part in lists:
            if not isinstance(part.node["enum"], list):
                raise self.refuse(f"{part.where}.enum", "must be a list of values")
        where = f"{lists[0].where}.enum"
        values = [
            v
            for v in lists[0].node["enum"]
            if all(any(equal(v, w) for w in p.node["enum"]) for p in lists[1:])
            and any(has_type(v, kind) for kind in types)
        ]
        if any(isinstance(v, dict | list) for v in values):
            for part in parts:
                if ignored := part.node.keys() & {*OF_TYPE["array"], *OF_TYPE["object"]}:
                    self.drop(f"{part.where}.{min(ignored)}", "is not supported beside enum")
        allowed = [v for v in values if all(is_within_limits(v, p.node) for p in parts)]
        if not allowed:
            if not exact:
                self.drop(where, f"has no value {'within its limits' if values else 'of its type'}")
            return False if exact else None
        usable = [v for v in allowed if self.control_in(v) is None]
        if len(usable) < len(allowed):
            control = next(c for c in map(self.control_in, allowed) if c)
            self.drop(where, f"{control} in a literal text is not supported")
        return {"enum": usable} if usable else None


def _path(union: Union) -> str:
    """Return the path of a union's keyword."""
    return union[1][0].where.rpartition("[")[0]


def _nullable(node: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also allows null, as OpenAPI 3.0 says it."""
    if node.keys() & {"allOf", "$ref", *UNIONS}:
        return {"anyOf": [node, {"type": "null"}]}
    if "type" in node:
        kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
        node["type"] = [*kinds, "null"]
    if isinstance(node.get("enum"), list):
        node["enum"] = [*node["enum"], None]
    return node
