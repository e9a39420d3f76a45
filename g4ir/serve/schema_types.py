"""Intersects the constraints that schemas put on numbers, strings, arrays and objects.

Every constraint is judged by llguidance before it is added. One that a grammar cannot keep, or that
contradicts those before it, is dropped alone.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from g4ir.chat.messages import shown

from .http_errors import Refused
from .schema_dialect import FORMATS, LIMITS, Dialect, Node, Schema, is_contradiction, judge
from .schema_values import has_type, matches, step_coefficient, strings_in, tighter_limit

#: largest multipleOf, without its power of ten: llguidance has a state for each remainder
MAX_STEP = 1 << 12
#: largest minLength, maxLength, minItems and maxItems
MAX_COUNT = 1 << 24


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


@dataclass
class Reader(ABC):
    """Reads one schema of a request. `dropped` collects path -> reason of the dropped constraints;
    `controls` are texts that cannot be generated."""

    root: Any
    where: str
    dialect: Dialect
    strict: bool
    controls: Collection[str]
    refuse: Callable[[str, str], Refused]
    dropped: dict[str, str] = field(default_factory=dict, init=False)

    @abstractmethod
    def schema(self, parts: Sequence[Source], exact: bool = False) -> Schema:
        """Return the intersection of schemas. Constraints that contradict each other are dropped;
        if `exact`, as in an alternative of a union, they allow nothing."""

    def drop(self, where: str, reason: str) -> None:
        """Log a constraint that does not hold; refused if the schema is strict."""
        if self.strict:
            raise self.refuse(where, f"{reason}; leave it out, or strict")
        self.dropped.setdefault(where, reason)

    def control_in(self, value: Any) -> str | None:
        """Return a control token that a value contains."""
        return next((c for t in strings_in(value) for c in self.controls if c in t), None)


class Contradiction(Exception):
    """The constraints on one type allow no value of it."""


@dataclass(frozen=True)
class TypeConstraints:
    """The constraints of `parts`, schemas without references and unions, on values of one type.

    Each method returns the keywords of the intersection, or raises Contradiction; unless `exact`,
    a keyword that contradicts those before it is dropped if it can be.
    """

    reader: Reader
    parts: Sequence[Source]
    exact: bool

    def _keywords(self, *names: str) -> Iterator[tuple[str, Any, str]]:
        """Yield the keywords that are given, their values and their paths."""
        for part in self.parts:
            yield from ((k, part.node[k], f"{part.where}.{k}") for k in names if k in part.node)

    def _tighten(
        self, constraints: dict[str, Any], tried: dict[str, Any], error: str, where: str
    ) -> dict[str, Any]:
        """Return `tried`, or `constraints` without the keyword at `where` if it has an error."""
        if not error:
            return tried
        if self.exact and is_contradiction(error):
            raise Contradiction
        self.reader.drop(where, error)
        return constraints

    def _judge(self, leaf: Node) -> str:
        return judge(self.reader.dialect.adapt(leaf))

    # --- numbers ---

    def number(self, kind: str) -> dict[str, Any]:
        """Intersect the limits of numbers; `kind` is number or integer."""
        out = dict[str, Any]()
        for name, value, where in self._keywords(*LIMITS):
            if not has_type(value, "number"):
                self.reader.drop(where, f"must be a number, found {shown(value)}")
            elif name == "multipleOf" and not 0 < step_coefficient(value) <= MAX_STEP:
                self.reader.drop(where, f"must be 1 to {MAX_STEP}, times a power of ten below 1")
            else:
                tried = out | {name: tighter_limit(name, out.get(name, value), value)}
                out = self._tighten(out, tried, self._judge({"type": kind, **tried}), where)
        return out

    def _counts(self, low: str, high: str) -> dict[str, Any]:
        """Return the stricter of all lower and upper counts."""
        out = dict[str, int]()
        for name, value, where in self._keywords(low, high):
            if not has_type(value, "integer") or not 0 <= value <= MAX_COUNT:
                why = f"must be a whole number of 0 to {MAX_COUNT}, found {shown(value)}"
                self.reader.drop(where, why)
                continue
            tighter = max if name == low else min
            limits = out | {name: tighter(int(value), out.get(name, int(value)))}
            if limits.get(low, 0) <= limits.get(high, MAX_COUNT):
                out = limits
            elif self.exact:
                raise Contradiction
            else:
                self.reader.drop(where, f"{low} is more than {high}")
        return {k: v for k, v in out.items() if not (k == low and v == 0)}

    # --- strings ---

    def string(self, kind: str) -> dict[str, Any]:
        """Intersect lengths, patterns and, if they allow it, one format."""
        out = self._counts("minLength", "maxLength")
        out |= {k: v for k, v, _ in self._keywords(*self.reader.dialect.string_keywords)}
        for _, pattern, where in self._keywords("pattern"):
            if not self._takes_pattern(pattern, where) or pattern == out.get("pattern"):
                continue
            more = {"allOf": [*out.get("allOf", []), {"pattern": pattern}]}
            tried = out | (more if "pattern" in out else {"pattern": pattern})
            out = self._tighten(out, tried, self._judge({"type": kind, **tried}), where)
        for _, name, where in self._keywords(
            "format"
        ):  # an annotation: it gives way to constraints
            if name == out.get("format"):
                continue
            tried = out | {"format": name}
            usable = isinstance(name, str) and name in FORMATS and "format" not in out
            if usable and not self._judge({"type": kind, **tried}):
                out = tried
            else:
                self.reader.dropped.setdefault(where, "this format is taken as an annotation")
        return out

    def _takes_pattern(self, pattern: Any, where: str) -> bool:
        if not isinstance(pattern, str):
            why = f"must be a regular expression, found {shown(pattern)}"
        elif control := self.reader.control_in(re.sub(r"\\(.)", r"\1", pattern)):
            why = f"{control} in a literal text is not supported"
        elif not self.reader.dialect.takes_pattern(pattern):
            why = "this regular expression is not supported"
        else:
            return True
        self.reader.drop(where, why)
        return False

    # --- arrays ---

    def array(self, kind: str) -> dict[str, Any]:
        """Intersect the counts and the schemas of items."""
        out = self._counts("minItems", "maxItems")
        for _, items, where in self._keywords("prefixItems"):
            if not isinstance(items, list):
                raise self.reader.refuse(where, "must be a list of schemas")
        length = max(len(p.node.get("prefixItems", [])) for p in self.parts)
        prefix = list[Schema]()
        for i in range(length):
            prefix.append(self.reader.schema([*self._item(i)], self.exact))
            if prefix[-1] is False:
                break
        min_items, max_items = out.get("minItems", 0), out.get("maxItems", MAX_COUNT)
        more: Schema | None = None
        if prefix and prefix[-1] is False:
            prefix, max_items = prefix[:-1], min(max_items, len(prefix) - 1)
        elif items := [*self._item(None)]:
            more = True if max_items <= length else self.reader.schema(items, self.exact)
            if more is False:
                max_items = min(max_items, length)
        if min_items > max_items:
            raise Contradiction
        if max_items < MAX_COUNT:
            out["maxItems"] = max_items
        if prefix := prefix[:max_items]:
            out["prefixItems"] = prefix
        if more not in (None, True, False, {}):
            out["items"] = more
        return out

    def _item(self, index: int | None) -> Iterator[Source]:
        """Yield the schemas of an item; None: of items after the prefix."""
        for part in self.parts:
            if index is not None and index < len(part.node.get("prefixItems", ())):
                yield part.at("prefixItems", index)
            elif "items" in part.node:
                yield part.at("items")

    # --- objects ---

    def object(self, kind: str) -> dict[str, Any]:
        """Intersect the schemas of members, `required` and the counts of members."""
        self._check_object()
        reader, dialect = self.reader, self.reader.dialect
        required = [*dict.fromkeys(k for p in self.parts for k in p.node.get("required", ()))]
        declared = [k for p in self.parts for k in p.node.get("properties", ())]
        properties, excluding = dict[str, Any](), set[str]()
        for name in dict.fromkeys([*declared, *required]):
            requiring = (p.where for p in self.parts if name in p.node.get("required", ()))
            where = f"{next(requiring, reader.where)}.required"
            if (control := reader.control_in(name)) is not None:
                if name in required:
                    why = f"{control} in the name {shown(name)} is not supported"
                    raise reader.refuse(where, why)
                why = f"{control} in a name is not supported"
                reader.drop(f"{self.parts[0].where}.properties", why)
                properties[name] = False
                continue
            value = reader.schema([*self._member(name)], self.exact)
            if value is False and name in required:
                declaring = [p for p in self.parts if name in p.node.get("properties", {})]
                value = reader.schema([p.at("properties", name) for p in declaring])
                if self.exact or value is False:
                    raise Contradiction
                if not declaring:
                    reader.drop(where, f"{shown(name)} is no property")
                    required.remove(name)
                    continue
                excluding |= self._drop_exclusions(name)
            properties[name] = value
        out = dict[str, Any]()
        if properties:
            out["properties"] = {k: v for k, v in properties.items() if v is not False}
            if dialect.undeclared_keys or not out["properties"]:
                out["properties"] = properties
        if required:
            out["required"] = required
        if extra := [*self._undeclared()]:
            more = reader.schema(extra, self.exact)
            if more != {}:
                out["additionalProperties"] = more
        return self._judge_object(out, excluding)

    def _check_object(self) -> None:
        for _, members, where in self._keywords("properties", "patternProperties"):
            if not isinstance(members, Mapping):
                raise self.reader.refuse(where, "must be an object of schemas")
        for _, required, where in self._keywords("required"):
            if not isinstance(required, list) or not all(isinstance(k, str) for k in required):
                raise self.reader.refuse(where, "must be a list of names")

    def _member(self, name: str) -> Iterator[Source]:
        """Yield the schemas of a member with this name."""
        for part in self.parts:
            patterns = [p for p in part.node.get("patternProperties", {}) if matches(p, name)]
            yield from (part.at("patternProperties", p) for p in patterns)
            if name in part.node.get("properties", {}):
                yield part.at("properties", name)
            elif not patterns and "additionalProperties" in part.node:
                yield part.at("additionalProperties")
            elif "unevaluatedProperties" in part.node and not any(
                _evaluates(p.node, name) for p in self.parts
            ):
                yield part.at("unevaluatedProperties")

    def _drop_exclusions(self, name: str) -> set[str]:
        """Drop constraints that allow no value of a required member besides its declaration.
        Return the patterns among them."""
        out = set[str]()
        for part in self.parts:
            keyword = "additionalProperties"
            if patterns := {p for p in part.node.get("patternProperties", {}) if matches(p, name)}:
                keyword = "patternProperties"
                out |= patterns
            elif name in part.node.get("properties", {}) or keyword not in part.node:
                continue
            why = f"allows no {shown(name)}, which is required"
            self.reader.drop(f"{part.where}.{keyword}", why)
        return out

    def _undeclared(self) -> Iterator[Source]:
        """Yield the schemas of members that no schema declares."""
        closed = any("additionalProperties" in p.node for p in self.parts)
        for part in self.parts:
            if "additionalProperties" in part.node:
                yield part.at("additionalProperties")
            elif "unevaluatedProperties" in part.node and not closed:
                yield part.at("unevaluatedProperties")

    def _judge_object(self, out: dict[str, Any], excluding: Collection[str]) -> dict[str, Any]:
        """Add the constraints of an object that llguidance decides on."""
        dialect = self.reader.dialect
        required = len(out.get("required", ()))
        closed = out.get("additionalProperties") is False
        undeclared = dialect.undeclared_keys or not out.get("properties")
        for part in self.parts:
            for name in ("patternProperties", "minProperties", "maxProperties"):
                if name not in part.node:
                    continue
                value, where = part.node[name], f"{part.where}.{name}"
                if name == "patternProperties":
                    if undeclared:
                        out = self._add_patterns(part, out, excluding)
                    continue
                if not has_type(value, "integer") or value < 0:
                    self.reader.drop(where, f"must be a whole number, found {shown(value)}")
                    continue
                bound = len(out.get("properties", ())) if closed or not undeclared else math.inf
                if value <= required if name == "minProperties" else value >= bound:
                    continue
                tighter = max if name == "minProperties" else min
                tried = out | {name: tighter(value, out.get(name, value))}
                error = "is not supported"
                if name in dialect.object_keywords:
                    error = judge(_outline(tried, closed))
                out = self._tighten(out, tried, error, where)
        return out

    def _add_patterns(
        self, part: Source, out: dict[str, Any], excluding: Collection[str]
    ) -> dict[str, Any]:
        """Add the schemas of members whose names match a pattern, one after another."""
        where = f"{part.where}.patternProperties"
        for pattern in part.node["patternProperties"]:
            if pattern in excluding or not self._takes_pattern(pattern, where):
                continue
            patterns = out.get("patternProperties", {})
            if error := self._pattern_error(out, [*patterns, pattern]):
                self.reader.drop(where, error)
                continue
            inner = [part.at("patternProperties", pattern)]
            for sibling in self.parts:
                if sibling is part:
                    continue
                if pattern in sibling.node.get("patternProperties", {}):
                    inner.append(sibling.at("patternProperties", pattern))
                elif "additionalProperties" in sibling.node:
                    inner.append(sibling.at("additionalProperties"))
            patterns = patterns | {pattern: self.reader.schema(inner, self.exact)}
            out = {**out, "patternProperties": patterns}
        return out

    def _pattern_error(self, out: Node, patterns: Sequence[str]) -> str:
        """Return why the last of these patterns cannot be kept; empty if it can."""
        dialect = self.reader.dialect
        if "patternProperties" in dialect.object_keywords:
            names, matched = _any_of(out.get("properties", ())), _any_of(patterns)
            return judge({"type": "object", "properties": names, "patternProperties": matched})
        if len(dict.fromkeys(patterns)) > 1:
            return "is not supported beside another pattern"
        return self._judge({"type": "string", "pattern": patterns[-1], **dialect.key})


def _outline(node: Node, closed: bool) -> dict[str, Any]:
    """Return the schema of an object whose members may have any value."""
    keywords = {k: v for k, v in node.items() if k != "patternProperties"}
    more = not closed or bool(node.get("patternProperties"))
    names = _any_of(node.get("properties", ()))
    return {"type": "object", **keywords, "properties": names, "additionalProperties": more}


def _any_of(names: Collection[str]) -> dict[str, Any]:
    """Return members of any value."""
    return {name: {} for name in names}


def _evaluates(node: Node, name: str) -> bool:
    patterns = node.get("patternProperties", {})
    listed = name in node.get("properties", {}) or any(matches(p, name) for p in patterns)
    return listed or "additionalProperties" in node
