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
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

from g4ir.chat.messages import shown
from g4ir.chat.tools import NOTES, TYPES, target, without_nulls
from g4ir.errors import MissingError
from g4ir.ui.files import read_table

from .http_errors import Refused

log = logging.getLogger(__name__)
#: drops that were logged; forgotten when there are too many, so that none is dropped unsaid
_LOGGED: set[str] = set()
MAX_LOGGED = 4096

TABLES = read_table(Path(__file__).with_name("schemas.yaml"))
FORMATS: Mapping[str, str] = TABLES["formats"]
#: type -> the keywords that constrain its values
OF_TYPE: Mapping[str, list[str]] = TABLES["of_type"]
#: keywords that no grammar keeps -> values by which they constrain nothing
UNSUPPORTED: Mapping[str, list[Any]] = TABLES["unsupported"]
LIMITS = OF_TYPE["number"]
#: schemas of one root, combinations of unions beside each other, and levels that `_apart` looks at
MAX_SCHEMAS, MAX_UNIONS, MAX_DEPTH = 1 << 13, 64, 8
#: largest multipleOf, without its power of ten: llguidance has a state for each remainder
MAX_STEP = 1 << 12
#: largest minLength, maxLength, minItems and maxItems
MAX_COUNT = 1 << 24
#: rounds in which finite values of a schema are looked for
MAX_ROUNDS = 64
ANNOTATIONS = NOTES | {"description", "default"}
UNIONS = ("anyOf", "oneOf")
#: keywords that constrain an object beside its type
CONSTRAINTS = {*OF_TYPE["object"], *UNIONS, *UNSUPPORTED, "allOf", "$ref", "enum", "const"}

Node = Mapping[str, Any]
#: a schema as it is written; False allows nothing
Schema = dict[str, Any] | bool


@dataclass(frozen=True)
class Dialect:
    """The constraints that one writer of grammars keeps.

    `takes_pattern`: whether it can write a regular expression. `adapted` returns the schema in
    llguidance's JSON that allows what the writer makes of a string or a number. `judged`: keywords
    of objects that llguidance itself decides on; `strings`: further keywords of strings.
    """

    takes_pattern: Callable[[str], bool]
    adapted: Callable[[Node], Node]
    judged: Collection[str] = ()
    strings: Collection[str] = ()
    #: whether it writes keys that are not declared beside those that are
    undeclared: bool = False
    #: constrains the names of such keys, as a string
    key: Node = field(default_factory=dict)


#: llguidance's own grammar of JSON
JSON_TEXT = Dialect(
    takes_pattern=lambda pattern: True,
    adapted=lambda node: node,
    judged=("patternProperties", "minProperties", "maxProperties"),
    undeclared=True,
)


@dataclass(frozen=True)
class Source:
    """A schema of the request, and its path."""

    node: Any
    where: str

    def at(self, *path: str | int) -> Source:
        """Return the schema at a path inside."""
        node, where = self.node, self.where
        for step in path:
            node, where = node[step], where + (f"[{step}]" if type(step) is int else f".{step}")
        return Source(node, where)


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
    out = {**_as_dict(body), **({"$defs": reader.defs} if reader.defs else {})}
    if part := endless(out):
        named = reader.paths.get(str(part.get("$ref")), where)
        why = f"the schema has no value that ends: {named} leads round to itself"
        raise refuse(where, why)
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


def _as_dict(schema: Schema) -> dict[str, Any]:
    return {} if isinstance(schema, bool) else schema


@dataclass
class _Reader:
    """One schema. `defs` are the bodies of references."""

    root: Any
    where: str
    dialect: Dialect
    strict: bool
    controls: Collection[str]
    refuse: Callable[[str, str], Refused]
    defs: dict[str, Any] = field(default_factory=dict)
    #: `$ref` of the output -> where the schema is defined
    paths: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    _names: dict[Any, str] = field(default_factory=dict)
    _count: int = 0

    def drop(self, where: str, reason: str) -> None:
        """Note a constraint that does not hold; refused if the schema is strict."""
        if self.strict:
            raise self.refuse(where, f"{reason}; leave it out, or strict")
        self.dropped.setdefault(where, reason)

    def schema(self, parts: Sequence[Source], exact: bool = False) -> Schema:
        """Return the intersection of schemas. Constraints that contradict each other are dropped;
        if `exact`, as in an alternative of a union, they allow nothing."""
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise self.refuse(self.where, "the schema is too large for a grammar")
        parts = [p for part in parts for p in self._flat(part)]
        if any(p.node is False for p in parts):
            return False
        if any("$ref" in p.node for p in parts):
            return self._reference(parts, exact)
        return self._intersection(parts, exact)

    def _flat(self, part: Source) -> Iterator[Source]:
        """Yield a schema in today's spelling, and what its `allOf` adds before or after it."""
        if part.node is True:
            return
        if part.node is False:
            yield part
            return
        if not isinstance(part.node, Mapping):
            raise self.refuse(part.where, f"must be a schema, found {shown(part.node)}")
        node = self._modern(part)
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
            yield from self._flat(Source(branch, f"{part.where}.allOf[{i}]"))
        yield from [] if first else [whole]

    def _modern(self, part: Source) -> dict[str, Any] | Any:
        """Return a schema in the spelling of 2020-12; False: it allows nothing."""
        node = {k: v for k, v in part.node.items() if k not in ANNOTATIONS}
        if node.get("not") in ({}, True) and "not" in node:
            return False
        for edge, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(node.get(edge), bool) and node.pop(edge) and limit in node:  # of draft 4
                node[edge] = node.pop(limit)
        if "const" in node:
            value, listed = node.pop("const"), node.get("enum")
            both = isinstance(listed, list) and not any(_same(value, v) for v in listed)
            node["enum"] = [] if both else [value]
            if both:
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

    def _reference(self, parts: Sequence[Source], exact: bool) -> Schema:
        """Return a reference to the intersection of schemas of which some are references."""
        key = (exact, frozenset(json.dumps(p.node, sort_keys=True) for p in parts))
        if (name := self._names.get(key)) is None:
            name = self._names[key] = str(len(self._names))
            self.defs[name] = {"$ref": f"#/$defs/{name}"}  # while it is read
            self.paths[f"#/$defs/{name}"] = parts[0].where
            self.defs[name] = self._intersection(self._resolved(parts), exact)
        return False if self.defs[name] is False else {"$ref": f"#/$defs/{name}"}

    def _resolved(self, parts: Sequence[Source]) -> list[Source]:
        """Return schemas without references; one that leads to itself adds nothing."""
        out, seen, around = list[Source](), set[str](), False
        waiting = [(part, frozenset[str]()) for part in parts]
        while waiting:
            part, refs = waiting.pop(0)
            if part.node is False or "$ref" not in part.node:
                out += [part] if part.node is False or part.node else []
                continue
            node = dict(part.node)
            ref = str(node.pop("$ref"))
            goal = target(self.root, ref)
            if goal is None:
                self.drop(f"{part.where}.$ref", f"{shown(ref)} names nothing in this schema")
            inner = list[Source]()
            if goal is not None and ref not in seen:
                place = ref.removeprefix("#").replace("/", ".")
                inner = [*self._flat(Source(goal, self.where + place))]
            around, led = around or ref in refs, refs | {ref}
            seen.add(ref)
            both = [*((p, led) for p in inner), (Source(node, part.where), refs)]
            waiting = [*both, *waiting]
        if around and not out:
            why = "the schema has no value that ends: it leads round to itself"
            raise self.refuse(f"{parts[0].where}.$ref", why)
        return out

    def _intersection(self, parts: Sequence[Source], exact: bool) -> Schema:
        """Return the intersection of schemas without references at their top."""
        if any(p.node is False for p in parts):
            return False
        base, unions = list[Source](), list[tuple[str, list[Source]]]()
        for part in parts:
            base.append(Source({k: v for k, v in part.node.items() if k not in UNIONS}, part.where))
            for name in UNIONS:
                if name in part.node:
                    unions += self._alternatives(part, name)
        if not unions:
            return self._leaf(base, exact)
        total = 1
        for i, (_, forms) in enumerate(unions):
            total *= len(forms)
            if i and total > MAX_UNIONS:
                for name, dropped in unions[i:]:
                    where = dropped[0].where.rpartition("[")[0]
                    self.drop(where, f"{name} is too large beside another union")
                unions = unions[:i]
                break
        return self._union(base, unions, exact)

    def _alternatives(self, part: Source, name: str) -> list[tuple[str, list[Source]]]:
        forms, where = part.node[name], f"{part.where}.{name}"
        if not isinstance(forms, list):
            raise self.refuse(where, "must be a list of schemas")
        if not forms:
            self.drop(where, "has no schema")
            return []
        return [(name, [Source(f, f"{where}[{i}]") for i, f in enumerate(forms)])]

    def _union(
        self, base: Sequence[Source], unions: Sequence[tuple[str, list[Source]]], exact: bool
    ) -> Schema:
        choices = [*product(*(forms for _, forms in unions))]
        read = [self.schema([*base, *choice], True) for choice in choices]
        if all(s is False for s in read) and not exact:
            read = [self.schema([*base, *choice]) for choice in choices]
        for name, forms in unions:
            if name != "oneOf":
                continue
            alone = read
            if len(unions) > 1:
                alone = [self.schema([*base, form], True) for form in forms]
            if not all(self._apart(a, b) for a, b in combinations(alone, 2)):
                where = forms[0].where.rpartition("[")[0]
                self.drop(where, "two of its schemas may hold at once; give anyOf")
        allowed = [s for s in read if s is not False]
        if not allowed:
            return False
        unique = [s for i, s in enumerate(allowed) if s not in allowed[:i]]
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    def _leaf(self, parts: Sequence[Source], exact: bool) -> Schema:
        """Return the intersection of schemas without unions."""
        types = {*TYPES}
        for part in parts:
            types &= self._types(part)
        if not types:
            return False
        for part in parts:
            self._note_unsupported(part, types)
        if any("enum" in p.node for p in parts):
            listed = self._listed(parts, types, exact)
            if listed is not None:
                return listed
        out = dict[str, Any]()
        for kind, read in (
            ("number", self._number),
            ("string", self._string),
            ("array", self._array),
            ("object", self._object),
        ):
            kinds = types & ({"integer", "number"} if kind == "number" else {kind})
            keywords = {*OF_TYPE[kind], *(self.dialect.strings if kind == "string" else ())}
            if not kinds or not any(keywords & p.node.keys() for p in parts):
                continue
            name = "number" if kind == "number" and "number" in kinds else min(kinds)
            constraints = read(parts, name, exact)
            if constraints is None:
                types -= kinds
            else:
                out |= constraints
        if not types:
            return False
        if types == {*TYPES}:
            return out
        names = [k for k in TYPES if k in types and not (k == "integer" and "number" in types)]
        return {"type": names[0] if len(names) == 1 else names, **out}

    def _types(self, part: Source) -> set[str]:
        given = part.node.get("type", [*TYPES])
        kinds = given if isinstance(given, list) else [given]
        for kind in kinds:
            if not isinstance(kind, str) or kind.lower() not in TYPES:
                why = f"must be of {', '.join(TYPES)}, found {shown(kind)}"
                raise self.refuse(f"{part.where}.type", why)
        out = {k.lower() for k in kinds}
        return out | {"integer"} if "number" in out else out

    def _note_unsupported(self, part: Source, types: Collection[str]) -> None:
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
            if all(any(_same(v, w) for w in p.node["enum"]) for p in lists[1:])
            and any(_is(v, kind) for kind in types)
        ]
        if not values:
            if not exact:
                self.drop(where, "has no value of its type")
            return False if exact else None
        if any(isinstance(v, dict | list) for v in values):
            for part in parts:
                if beside := part.node.keys() & {*OF_TYPE["array"], *OF_TYPE["object"]}:
                    self.drop(f"{part.where}.{min(beside)}", "is not supported beside enum")
        fit = [v for v in values if all(_fits(v, p.node) for p in parts)]
        if not fit:
            if not exact:
                self.drop(where, "has no value within its limits")
            return False if exact else None
        spoken = [v for v in fit if self._control(v) is None]
        if len(spoken) < len(fit):
            bad = next(c for c in map(self._control, fit) if c)
            self.drop(where, f"{bad} in a literal text is not supported")
        return {"enum": spoken} if spoken else None

    def _control(self, value: Any) -> str | None:
        """Return a control token that a value contains."""
        return next((c for t in _texts(value) for c in self.controls if c in t), None)

    def _counts(self, parts: Sequence[Source], low: str, high: str, exact: bool) -> Any:
        """Return the stricter of all lower and upper counts; None: they exclude each other."""
        out = dict[str, int]()
        for part in parts:
            for name, tighter in ((low, max), (high, min)):
                if name not in part.node:
                    continue
                value, where = part.node[name], f"{part.where}.{name}"
                if not _is(value, "integer") or not 0 <= value <= MAX_COUNT:
                    why = f"must be a whole number of 0 to {MAX_COUNT}, found {shown(value)}"
                    self.drop(where, why)
                    continue
                limits = out | {name: tighter(int(value), out.get(name, int(value)))}
                if limits.get(low, 0) <= limits.get(high, MAX_COUNT):
                    out = limits
                elif exact:
                    return None
                else:
                    self.drop(where, f"{low} is more than {high}")
        return {k: v for k, v in out.items() if not (k == low and v == 0)}

    def _string(self, parts: Sequence[Source], kind: str, exact: bool) -> Any:
        out = self._counts(parts, "minLength", "maxLength", exact)
        if out is None:
            return None
        for part in parts:
            out |= {k: part.node[k] for k in self.dialect.strings if k in part.node}
            if "pattern" not in part.node:
                continue
            pattern, where = part.node["pattern"], f"{part.where}.pattern"
            if not self._takes_pattern(pattern, where) or pattern == out.get("pattern"):
                continue
            more = {"allOf": [*out.get("allOf", []), {"pattern": pattern}]}
            tried = out | (more if "pattern" in out else {"pattern": pattern})
            error = self._judged({"type": kind, **tried})
            if not error:
                out = tried
            elif exact and _contradicts(error):
                return None
            else:
                self.drop(where, error)
        for part in parts:  # formats are annotations: they give way to constraints
            if (form := part.node.get("format")) is None or form == out.get("format"):
                continue
            tried = out | {"format": form}
            usable = isinstance(form, str) and form in FORMATS and "format" not in out
            if usable and not self._judged({"type": kind, **tried}):
                out = tried
            else:
                where = f"{part.where}.format"
                self.dropped.setdefault(where, "this format is taken as an annotation")
        return out

    def _takes_pattern(self, pattern: Any, where: str) -> bool:
        if not isinstance(pattern, str):
            self.drop(where, f"must be a regular expression, found {shown(pattern)}")
        elif control := self._control(re.sub(r"\\(.)", r"\1", pattern)):
            self.drop(where, f"{control} in a literal text is not supported")
        elif not self.dialect.takes_pattern(pattern):
            self.drop(where, "this regular expression is not supported")
        else:
            return True
        return False

    def _judged(self, leaf: Node) -> str:
        return judged(json.dumps(self.dialect.adapted(leaf)))

    def _number(self, parts: Sequence[Source], kind: str, exact: bool) -> Any:
        out = dict[str, Any]()
        for part in parts:
            for name in LIMITS:
                if name not in part.node:
                    continue
                value, where = part.node[name], f"{part.where}.{name}"
                if not _is(value, "number"):
                    self.drop(where, f"must be a number, found {shown(value)}")
                    continue
                if name == "multipleOf" and not 0 < _coefficient(value) <= MAX_STEP:
                    self.drop(where, f"must be 1 to {MAX_STEP}, times a power of ten below 1")
                    continue
                tried = out | {name: _tighter(name, out.get(name, value), value)}
                error = self._judged({"type": kind, **tried})
                if not error:
                    out = tried
                elif exact and _contradicts(error):
                    return None
                else:
                    self.drop(where, error)
        return out

    def _array(self, parts: Sequence[Source], kind: str, exact: bool) -> Any:
        out = self._counts(parts, "minItems", "maxItems", exact)
        if out is None:
            return None
        for part in parts:
            if not isinstance(part.node.get("prefixItems", []), list):
                raise self.refuse(f"{part.where}.prefixItems", "must be a list of schemas")
        length = max(len(p.node.get("prefixItems", [])) for p in parts)
        first = list[Schema]()
        for i in range(length):
            first.append(self.schema([*_item(parts, i)], exact))
            if first[-1] is False:
                break
        least, most = out.get("minItems", 0), out.get("maxItems", MAX_COUNT)
        more: Schema | None = None
        if first and first[-1] is False:
            first, most = first[:-1], min(most, len(first) - 1)
        elif items := [*_item(parts, None)]:
            more = True if most <= length else self.schema(items, exact)
            if more is False:
                most = min(most, length)
        if least > most:
            return None
        if most < MAX_COUNT:
            out["maxItems"] = most
        if first := first[:most]:
            out["prefixItems"] = first
        if more not in (None, True, False, {}):
            out["items"] = more
        return out

    def _object(self, parts: Sequence[Source], kind: str, exact: bool) -> Any:
        for part in parts:
            for name in ("properties", "patternProperties"):
                if not isinstance(part.node.get(name, {}), Mapping):
                    raise self.refuse(f"{part.where}.{name}", "must be an object of schemas")
            required = part.node.get("required", [])
            if not isinstance(required, list) or not all(isinstance(k, str) for k in required):
                raise self.refuse(f"{part.where}.required", "must be a list of names")
        required = [*dict.fromkeys(k for p in parts for k in p.node.get("required", ()))]
        declared = [k for p in parts for k in p.node.get("properties", ())]
        properties, excluding = dict[str, Any](), set[str]()
        for name in dict.fromkeys([*declared, *required]):
            where = next((p.where for p in parts if name in p.node.get("required", ())), self.where)
            if (control := self._control(name)) is not None:
                if name in required:
                    why = f"{control} in the name {shown(name)} is not supported"
                    raise self.refuse(f"{where}.required", why)
                self.drop(f"{parts[0].where}.properties", f"{control} in a name is not supported")
                properties[name] = False
                continue
            value = self.schema([*self._member(parts, name)], exact)
            if value is False and name in required:
                named = [p for p in parts if name in p.node.get("properties", {})]
                value = self.schema([p.at("properties", name) for p in named])
                if exact or value is False:
                    return None
                if not named:
                    self.drop(f"{where}.required", f"{shown(name)} is no property")
                    required.remove(name)
                    continue
                excluding |= self._drop_exclusions(parts, name)
            properties[name] = value
        out = dict[str, Any]()
        if properties:
            out["properties"] = {k: v for k, v in properties.items() if v is not False}
            if self.dialect.undeclared or not out["properties"]:
                out["properties"] = properties
        if required:
            out["required"] = required
        if extra := [*self._undeclared(parts)]:
            more = self.schema(extra, exact)
            if more != {}:
                out["additionalProperties"] = more
        return self._judge_object(parts, out, exact, excluding)

    def _member(self, parts: Sequence[Source], name: str) -> Iterator[Source]:
        """Yield the schemas of a member with this name."""
        for part in parts:
            patterns = [p for p in part.node.get("patternProperties", {}) if _matches(p, name)]
            yield from (part.at("patternProperties", p) for p in patterns)
            if name in part.node.get("properties", {}):
                yield part.at("properties", name)
            elif not patterns and "additionalProperties" in part.node:
                yield part.at("additionalProperties")
            elif "unevaluatedProperties" in part.node and not any(
                _evaluates(p.node, name) for p in parts
            ):
                yield part.at("unevaluatedProperties")

    def _drop_exclusions(self, parts: Sequence[Source], name: str) -> set[str]:
        """Drop what allows no value of a required member, beside its declaration. Return the
        patterns among it."""
        out = set[str]()
        for part in parts:
            keyword = "additionalProperties"
            if patterns := {p for p in part.node.get("patternProperties", {}) if _matches(p, name)}:
                keyword = "patternProperties"
                out |= patterns
            elif name in part.node.get("properties", {}) or keyword not in part.node:
                continue
            self.drop(f"{part.where}.{keyword}", f"allows no {shown(name)}, which is required")
        return out

    def _undeclared(self, parts: Sequence[Source]) -> Iterator[Source]:
        """Yield the schemas of members that no schema declares."""
        closed = any("additionalProperties" in p.node for p in parts)
        for part in parts:
            if "additionalProperties" in part.node:
                yield part.at("additionalProperties")
            elif "unevaluatedProperties" in part.node and not closed:
                yield part.at("unevaluatedProperties")

    def _judge_object(
        self,
        parts: Sequence[Source],
        out: dict[str, Any],
        exact: bool,
        excluding: Collection[str],
    ) -> Any:
        """Add the constraints of an object that llguidance decides on."""
        required = len(out.get("required", ()))
        closed = out.get("additionalProperties") is False
        undeclared = self.dialect.undeclared or not out.get("properties")
        for part in parts:
            for name in ("patternProperties", "minProperties", "maxProperties"):
                if name not in part.node:
                    continue
                value, where = part.node[name], f"{part.where}.{name}"
                if name == "patternProperties":
                    if undeclared:
                        out = self._patterns(parts, part, out, exact, excluding)
                    continue
                if not _is(value, "integer") or value < 0:
                    self.drop(where, f"must be a whole number, found {shown(value)}")
                    continue
                most = len(out.get("properties", ())) if closed or not undeclared else math.inf
                if value <= required if name == "minProperties" else value >= most:
                    continue
                tighter = max if name == "minProperties" else min
                tried = out | {name: tighter(value, out.get(name, value))}
                error = "is not supported"
                if name in self.dialect.judged:
                    shape = {k: v for k, v in tried.items() if k != "patternProperties"}
                    names: dict[str, Any] = {"properties": _free(out.get("properties", ()))}
                    more: Schema = not closed or bool(out.get("patternProperties"))
                    names["additionalProperties"] = more
                    error = judged(json.dumps({"type": "object", **shape, **names}))
                if not error:
                    out = tried
                elif exact and _contradicts(error):
                    return None
                else:
                    self.drop(where, error)
        return out

    def _patterns(
        self,
        parts: Sequence[Source],
        part: Source,
        out: dict[str, Any],
        exact: bool,
        excluding: Collection[str],
    ) -> dict[str, Any]:
        """Add the schemas of members whose names match a pattern, one after another."""
        for pattern in part.node["patternProperties"]:
            where = f"{part.where}.patternProperties"
            if pattern in excluding or not self._takes_pattern(pattern, where):
                continue
            inner = [part.at("patternProperties", pattern)]
            for other in parts:
                if other is not part and pattern in other.node.get("patternProperties", {}):
                    inner.append(other.at("patternProperties", pattern))
                elif other is not part and "additionalProperties" in other.node:
                    inner.append(other.at("additionalProperties"))
            patterns = _free([*out.get("patternProperties", {}), pattern])
            names = _free(out.get("properties", ()))
            if "patternProperties" in self.dialect.judged:
                shape = {"type": "object", "properties": names, "patternProperties": patterns}
                error = judged(json.dumps(shape))
            elif len(patterns) > 1:
                error = "is not supported beside another pattern"
            else:
                error = self._judged({"type": "string", "pattern": pattern, **self.dialect.key})
            if error:
                self.drop(where, error)
                continue
            patterns = {**out.get("patternProperties", {}), pattern: self.schema(inner, exact)}
            out = {**out, "patternProperties": patterns}
        return out

    def _apart(self, a: Schema, b: Schema, depth: int = MAX_DEPTH) -> bool:
        """Whether no value matches two schemas of the output, by types and listed values."""
        if a is False or b is False:
            return True
        if not depth:
            return False
        forms = [[*self._forms(s)] for s in (a, b)]
        if len(forms[0]) > 1 or len(forms[1]) > 1:
            return all(self._apart(x, y, depth - 1) for x, y in product(*forms))
        (left,), (right,) = forms
        if left is True or right is True:
            return False
        if {"enum"} <= left.keys() & right.keys():
            return not any(_same(x, y) for x in left["enum"] for y in right["enum"])
        both = _types_of(left) & _types_of(right)
        if both - {"object"}:
            return False
        names = {*left.get("required", ())} & {*right.get("required", ())}
        inner = [n.get("properties", {}) for n in (left, right)]
        pairs = [(inner[0][k], inner[1][k]) for k in names if k in inner[0] and k in inner[1]]
        return not both or any(self._apart(x, y, depth - 1) for x, y in pairs)

    def _forms(self, schema: Schema, depth: int = MAX_DEPTH) -> Iterator[Any]:
        """Yield the alternatives of a schema of the output."""
        if isinstance(schema, dict) and "$ref" in schema and depth:
            yield from self._forms(self.defs[schema["$ref"].rpartition("/")[2]], depth - 1)
        elif isinstance(schema, dict) and "anyOf" in schema:
            yield from schema["anyOf"]
        elif schema is not False:
            yield True if isinstance(schema, bool) or "$ref" in schema else schema


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


def _free(names: Collection[str]) -> dict[str, Any]:
    """Return members of any value."""
    return {name: {} for name in names}


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one in JSON, where true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return bool(a == b)


def _is(value: Any, kind: str) -> bool:
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


def _fits(value: Any, node: Node) -> bool:
    """Whether a listed value keeps the limits of numbers and strings beside it."""
    kind = "number" if _is(value, "number") else "string" if isinstance(value, str) else ""
    pattern = node.get("pattern")
    if kind == "string" and isinstance(pattern, str) and not _matches(pattern, value):
        return False
    limits = [k for k in OF_TYPE.get(kind, ()) if k in _WITHIN and _is(node.get(k), "number")]
    return all(_WITHIN[k](value, node[k]) for k in limits)


def _matches(pattern: str, text: str) -> bool:
    """Whether a pattern of names or strings is in a text; one that llguidance cannot read is. In
    linear time, which Python's own expressions do not promise."""
    literal = "".join(f"\\x{{{ord(c):X}}}" for c in text)
    both = {"type": "string", "pattern": pattern, "allOf": [{"pattern": f"^(?:{literal})$"}]}
    return not _contradicts(judged(json.dumps(both)))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a literal value."""
    if isinstance(value, str):
        yield value
    for inner in value if isinstance(value, list) else ():
        yield from _texts(inner)
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key
        yield from _texts(inner)


def _coefficient(value: float) -> int:
    """Return a number without its point, 25 of 2.5: so many remainders have its multiples."""
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    number = int("".join(map(str, digits)))
    return 0 if value <= 0 else number * 10 ** min(max(int(exponent), 0), 18)


def _tighter(name: str, a: Any, b: Any) -> Any:
    """Return the stricter of two limits of numbers."""
    if name != "multipleOf":
        return max(a, b) if name in ("minimum", "exclusiveMinimum") else min(a, b)
    x, y = Fraction(str(a)), Fraction(str(b))
    both = Fraction(math.lcm(x.numerator, y.numerator), math.gcd(x.denominator, y.denominator))
    return int(both) if both.denominator == 1 else float(both)


def _item(parts: Sequence[Source], index: int | None) -> Iterator[Source]:
    """Yield the schemas of an item; None: of those behind the first ones."""
    for part in parts:
        if index is not None and index < len(part.node.get("prefixItems", ())):
            yield part.at("prefixItems", index)
        elif "items" in part.node:
            yield part.at("items")


def _evaluates(node: Node, name: str) -> bool:
    patterns = node.get("patternProperties", {})
    listed = name in node.get("properties", {}) or any(_matches(p, name) for p in patterns)
    return listed or "additionalProperties" in node


def _types_of(node: Node) -> set[str]:
    """Return the types of a schema of the output; a number may be an integer."""
    if "enum" in node:
        return {kind for v in node["enum"] for kind in TYPES if _is(v, kind)}
    kinds = node.get("type", [*TYPES])
    out = {*(kinds if isinstance(kinds, list) else [kinds])}
    return out | {"integer"} if "number" in out else out


def endless(schema: Node) -> Node | None:
    """Return a part of a schema of the output that an answer could begin and that has no finite
    value. Parts that end are looked for in rounds, until a round has none."""
    parts: dict[int, Node] = {}
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping) and id(part) not in parts:
            parts[id(part)] = part
            waiting += _inner(part, schema)
    order, ends = [(i, _needs(part, schema)) for i, part in parts.items()], set[int]()
    for _ in range(MAX_ROUNDS):
        before = len(ends)
        order.reverse()
        for i, needs in order:
            if all(any(id(x) in ends for x in needed) for needed in needs):
                ends.add(i)
        if len(ends) == before:
            break
    without = [part for i, part in parts.items() if i not in ends]
    return next((p for p in without if "$ref" in p), without[0] if without else None)


def _inner(part: Node, root: Node) -> Iterator[Any]:
    """Yield the schemas that the values of a schema of the output meet."""
    yield from (*part.get("anyOf", ()), *part.get("prefixItems", ()))
    yield from (part.get("items"), part.get("additionalProperties"))
    for members in (part.get("properties", {}), part.get("patternProperties", {})):
        yield from members.values()
    if "$ref" in part:
        yield target(root, part["$ref"])


def _needs(part: Node, root: Node) -> list[list[Any]]:
    """Return lists of schemas: a part has a finite value if one of each list has."""
    needed = [target(root, part["$ref"])] if "$ref" in part else []
    if part.get("type") == "object":
        needed += [part["properties"][name] for name in part.get("required", ())]
    if part.get("type") == "array" and (least := part.get("minItems", 0)):
        needed += [*part.get("prefixItems", ())][:least]
        needed += [part.get("items")] if least > len(part.get("prefixItems", ())) else []
    lists = [*([n] for n in needed), *([part["anyOf"]] if "anyOf" in part else [])]
    return [choices for choices in lists if all(isinstance(x, Mapping) for x in choices)]


@lru_cache(maxsize=4096)
def judged(schema: str) -> str:
    """Return why llguidance cannot write a schema; empty: it can."""
    library = llguidance()
    error = library.LLMatcher.validate_grammar(library.LLMatcher.grammar_from_json_schema(schema))
    return " ".join(error.split())[:160]


def _contradicts(error: str) -> bool:
    return error.startswith("Unsatisfiable")


def llguidance() -> Any:
    """Return the library; MissingError if it is not installed."""
    try:
        import llguidance as library
    except ImportError as e:
        raise MissingError("forms of answers need llguidance: pip install 'g4ir[serve]'") from e
    return library
