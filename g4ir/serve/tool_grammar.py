"""Grammar of tool calls in the model's native format, from the JSON Schemas of the functions.

The grammar is Lark text for llguidance. Keys are bare if they can be read back so, strings are
enclosed in the delimiter token, and there is no white space: only numbers have several spellings.
Schemas are read by `read_schema`, which drops unsupported constraints, or refuses a strict schema
that has one. If an enforced schema declares keys, no others are generated; more than one member of
a `oneOf` may match.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from g4ir.chat.calls import is_bare_key
from g4ir.chat.special_tokens import CALL, CALL_END, QUOTE
from g4ir.chat.tools import TYPES, resolve_ref

from .http_errors import Refused, missing
from .json_schema import LARK, UNIONS, Schema, judge, llguidance, read_pattern, read_schema

#: maximum schemas and subschemas in one grammar, over all functions
MAX_SCHEMAS = 1 << 14
#: max depth of a value without a schema
ANY_DEPTH = 4

_NUMERIC = {
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/",
}
_COMMA, _KEY = ' "," ', "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: type -> keywords that imply it in a schema without `type`
IMPLIED = {
    "number": LIMITS,
    "string": ("minLength", "maxLength", "pattern", LARK),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
#: keywords by which a function without `properties` still has arguments
OPEN = {"additionalProperties", "patternProperties", "required", "$ref", "allOf", *UNIONS}


@dataclass(frozen=True)
class Called:
    """A callable function. `constrained`: its arguments follow the schema, otherwise only the call
    syntax. A constraint of the schema that cannot be enforced is refused if `strict`, else dropped.
    `where`: path of the schema in the request, for errors."""

    name: str
    schema: Mapping[str, Any]
    where: str
    constrained: bool = True
    strict: bool = False


def called(tools: Sequence[Mapping[str, Any]], only: str | None, strict: bool) -> list[Called]:
    """Return the tool with the name `only`, or all for None. With `strict`, only tools that are
    declared strict are constrained by their schemas."""
    out = []
    for i, tool in enumerate(tools):
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        if only in (None, name):
            is_strict = tool["function"].get("strict") is True
            where = f"tools[{i}].function.parameters"
            out.append(Called(name, schema, where, is_strict or not strict, is_strict))
    return out


def grammar_of(
    functions: Sequence[Called],
    controls: Mapping[str, int],
    *,
    many: bool = True,
    content: str | None = None,
) -> str:
    """Return the grammar of an answer that is one function call, or with `many` one or more. With
    `content`, a JSON schema, the answer may also be JSON of that schema. `controls`: ids of control
    tokens."""
    if absent := next((c for c in (CALL, CALL_END, QUOTE) if c not in controls), None):
        raise missing("tools", f"the tokenizer lacks {absent}, which tool calls need")
    rules = _Rules({c: f"<[{i}]>" for c, i in controls.items()})
    begin, end = rules.marks[CALL], rules.marks[CALL_END]
    calls = " | ".join(_call(rules, f) for f in functions)
    call = rules.rule(f'{begin} "call:" ({calls}) {end}')
    start = (f"{call}+" if many else call) + (f" | %json {content}" if content else "")
    bodies = [*rules.recursive.items(), *((name, body) for body, name in rules.names.items())]
    return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in bodies)])


def _call(rules: _Rules, function: Called) -> str:
    """Return the rule's text for a call of a function: name and arguments, without `call:` and the
    control tokens."""
    if not function.constrained:
        arguments = rules.mapping(rules.anything())
    else:
        arguments = _Schema(rules, _parameters(function), function.where).arguments()
    return f"{json.dumps(function.name)} {arguments}"


def _parameters(function: Called) -> dict[str, Any]:
    """Return the schema of a function's arguments. A function without a schema takes no
    arguments."""
    schema = {"type": "object", **function.schema, "nullable": False}
    if not schema.keys() & OPEN and not schema.get("properties"):
        schema["additionalProperties"] = False
    return read_schema(schema, function.where, strict=function.strict, refuse=refused)


def refused(where: str, why: str) -> Refused:
    """Return the error for an unsupported schema."""
    return Refused(400, f"{where[:200]}: {why}", param="tools")


@dataclass
class _Rules:
    """Deduplicated rules of one grammar. `marks`: control tokens in the grammar's syntax; `names`:
    body -> name of a rule."""

    marks: Mapping[str, str]
    names: dict[str, str] = field(default_factory=dict)
    #: name -> body of possibly recursive rules
    recursive: dict[str, str] = field(default_factory=dict)
    #: schemas and subschemas translated so far, for all functions; at most MAX_SCHEMAS
    count: int = 0

    def rule(self, body: str, prefix: str = "r") -> str:
        """Return the name of the rule with this body, added if it is new. Names of terminals begin
        with a capital letter."""
        return self.names.setdefault(body, f"{prefix}{len(self.names)}")

    def terminal(self, *regexes: str) -> str:
        """Return a terminal for the intersection of regular expressions."""
        return self.rule(" & ".join(regexes), "T")

    def string(self, inner: str) -> str:
        return self.rule(f"{self.marks[QUOTE]} {inner} {self.marks[QUOTE]}")

    def nested(self, grammar: str, where: str) -> str:
        if error := llguidance().LLMatcher.validate_grammar(grammar, None):
            raise refused(where, f"is no grammar in Lark: {' '.join(error.split())[:200]}")
        return self.rule(f"%lark {{\n{grammar}\n}}")

    def plain(self, text: str) -> str:
        """Return a text as a Lark string literal."""
        return json.dumps(text, ensure_ascii=False)

    def key(self, name: str) -> str:
        """Return the Lark text of a key and its colon, without delimiters if the key can be read
        back without them."""
        return self.plain(f"{name}:") if is_bare_key(name) else f'{self.literal(name)} ":"'

    def literal(self, value: Any) -> str:
        if isinstance(value, str):
            return self.string(self.plain(value) if value else "")
        if isinstance(value, dict):
            parts = [f"{self.key(k)} {self.literal(v)}" for k, v in value.items()]
            return self.rule(f'"{{" {_COMMA.join(parts)} "}}"')
        if isinstance(value, list):
            return self.rule(f'"[" {_COMMA.join(map(self.literal, value))} "]"')
        return f'"{json.dumps(value)}"'

    def anything(self, depth: int = ANY_DEPTH) -> str:
        """Return the name of the rule for any value that is nested at most `depth` deep."""
        text, number = self.terminal("/(?s:.+)/"), self.terminal(_NUMERIC["number"])
        plain = f'{self.string(f"{text}?")} | {number} | "true" | "false" | "null"'
        if not depth:
            return self.rule(plain)
        inner = self.anything(depth - 1)
        return self.rule(f"{plain} | {self.array(inner, 0, None)} | {self.mapping(inner)}")

    def mapping(self, value: str) -> str:
        """Return the name of the rule for an object with any keys, values by the rule `value`."""
        entry = self.rule(f'{self.terminal(_KEY)} ":" {value}')
        return self.rule(f'"{{" ({entry} ("," {entry})*)? "}}"')

    def array(self, item: str, min_items: int, max_items: int | None) -> str:
        """Return the name of the rule for a list of min_items to max_items items (None: any number)
        of the rule `item`."""
        if max_items == 0:
            return self.rule('"[" "]"')
        more = f"{{{max(min_items, 1) - 1},{'' if max_items is None else max_items - 1}}}"
        items = item if max_items == 1 else f'{item} ("," {item}){more}'
        return self.rule(f'"[" {items} "]"' if min_items else f'"[" ({items})? "]"')


class _Schema:
    """A schema from `read_schema`. Methods return the name or the body of a rule for the
    intersection of schemas; "" if it has no values."""

    def __init__(self, rules: _Rules, root: Mapping[str, Any], where: str) -> None:
        self.rules, self.root, self.where = rules, root, where
        self._names: dict[str, str] = {}

    def arguments(self) -> str:
        """Return the name of the rule for a function's arguments; refused if no value is valid."""
        try:
            rule = self.value(self.root)
        except RecursionError:
            raise refused(self.where, "the schema is too deep") from None
        if not rule:
            raise refused(self.where, "the schema allows nothing")
        return rule

    def value(self, *nodes: Schema) -> str:
        self.rules.count += 1
        if self.rules.count > MAX_SCHEMAS:
            raise refused(self.where, "the tools' schemas are together too large; simplify them")
        parts = [*_flat(nodes)]
        if False in parts:
            return ""
        if any("$ref" in part for part in parts):
            return self._reference(parts)
        for i, part in enumerate(parts):
            for key in (k for k in UNIONS if k in part):
                others = [*parts[:i], {k: v for k, v in part.items() if k != key}, *parts[i + 1 :]]
                return self._union(self.value(*others, branch) for branch in part[key])
        if any(part.keys() & {"enum", "const"} for part in parts):
            return self._union(map(self.rules.literal, self._values(parts)))
        kinds = _kinds(parts)
        return (
            self.rules.anything()
            if kinds is None
            else self._union(getattr(self, f"_{kind}")(parts) for kind in kinds)
        )

    def _union(self, rules: Iterable[str]) -> str:
        return self.rules.rule(" | ".join(allowed)) if (allowed := [*filter(None, rules)]) else ""

    def _reference(self, parts: Sequence[Any]) -> str:
        """Return the name of the rule for an intersection with `$ref`s; it may be recursive."""
        key = json.dumps(parts, sort_keys=True)
        if key not in self._names:
            self._names[key] = name = f"d{self.rules.count}"
            nodes = [{k: v for k, v in part.items() if k != "$ref"} for part in parts]
            nodes += [resolve_ref(self.root, part["$ref"]) for part in parts if "$ref" in part]
            if body := self.value(*filter(lambda node: node != {}, nodes)):
                self.rules.recursive[name] = body
            else:
                self._names[key] = ""
        return self._names[key]

    def _values(self, parts: Sequence[Any]) -> list[Any]:
        """Return the values of an enum or const that all parts allow."""
        first = next(part for part in parts if part.keys() & {"enum", "const"})
        values = [first["const"]] if "const" in first else first["enum"]
        if len(parts) == 1 and len(first) == 1:
            return list(values)
        defs = {k: self.root[k] for k in ("$defs", "definitions") if k in self.root}
        return [v for v in values if not judge({**defs, "allOf": [{"const": v}, *parts]})[0]]

    def _null(self, parts: Sequence[Any]) -> str:
        return '"null"'

    def _boolean(self, parts: Sequence[Any]) -> str:
        return '"true" | "false"'

    def _string(self, parts: Sequence[Any]) -> str:
        for part in parts:
            if LARK in part:
                return self.rules.string(self.rules.nested(part[LARK], f"{self.where}.{LARK}"))
        low, high = _bounds(parts, "minLength", "maxLength")
        leaf = [{k: p[k] for k in IMPLIED["string"] if k in p} for p in parts]
        if judge({"type": "string", "allOf": leaf})[0]:
            return ""
        if high == 0:
            return self.rules.string("")
        read = [read_pattern(p["pattern"]) for p in parts if "pattern" in p]
        terms = [f"/(?s:.{{{max(low, 1)},{'' if high is None else high}}})/"]
        terms += [expression for expression, _ in filter(None, read)]
        empty = not low and all(may for _, may in filter(None, read))
        return self.rules.string(self.rules.terminal(*terms) + "?" * empty)

    def _integer(self, parts: Sequence[Any]) -> str:
        return self._number(parts, "integer")

    def _number(self, parts: Sequence[Any], kind: str = "number") -> str:
        limits = [{k: p[k] for k in LIMITS if k in p} for p in parts]
        if not any(limits):
            return self.rules.terminal(_NUMERIC[kind])
        leaf = {"type": kind, "allOf": limits}
        return "" if judge(leaf)[0] else self.rules.rule(f"%json {json.dumps(leaf)}")

    def _array(self, parts: Sequence[Any]) -> str:
        low, high = _bounds(parts, "minItems", "maxItems")
        length = max(len(_prefix(p)) for p in parts)
        first = list[str]()
        for i in range(length if high is None else min(length, high)):
            if not (item := self.value(*_items(parts, i))):
                high = i
                break
            first.append(item)
        more = "" if high is not None and high <= length else self.value(*_items(parts, length))
        high = high if more else min(length, length if high is None else high)
        if high is not None and low > high:
            return ""
        if not first:
            return self.rules.array(more, low, high)
        min_more, max_more = max(low - len(first), 0), "" if high is None else high - len(first)
        tail = f'("," {more}){{{min_more},{max_more}}}' if more else ""
        for i, item in reversed([*enumerate(first)]):
            tail = f"{item} {tail}" if i == 0 else f'"," {item} {tail}'
            if i >= low:
                tail = f"({tail})?"
        return self.rules.rule(f'"[" {tail} "]"')

    def _object(self, parts: Sequence[Any]) -> str:
        rules, required = self.rules, {k for p in parts for k in p.get("required", ())}
        names = dict.fromkeys(k for p in parts for k in p.get("properties", ()))
        names |= dict.fromkeys(sorted(required - names.keys()))
        more = [p["additionalProperties"] for p in parts if "additionalProperties" in p]
        if not names and (rule := self.value(*more)):
            return rules.mapping(rule)
        # Members are in declared order; each is optional unless required. Two rules for the
        # remainder: as the first member, and after another one (with a comma).
        first = behind = rules.rule('""')
        for name in reversed(names):
            value = self.value(*_members(parts, name))
            if not value and name in required:
                return ""
            if value:
                member = rules.rule(f"{rules.key(name)} {value}")
                skips = ("", "") if name in required else (f" | {first}", f" | {behind}")
                first = rules.rule(f"{member} {behind}{skips[0]}")
                behind = rules.rule(f'"," {member} {behind}{skips[1]}')
        return rules.rule(f'"{{" {first} "}}"')


def _flat(nodes: Iterable[Schema]) -> Iterator[Any]:
    """Yield the schemas whose intersection is that of `nodes`, without allOf and true."""
    for node in nodes:
        if isinstance(node, dict) and "allOf" in node:
            yield from _flat([{k: v for k, v in node.items() if k != "allOf"}, *node["allOf"]])
        elif node not in (True, {}):
            yield node


def _kinds(parts: Sequence[Any]) -> list[str] | None:
    """Return the types that all parts allow, or those that their keywords imply; None: any."""
    kinds, typed = {*TYPES}, False
    for listed in (part["type"] for part in parts if "type" in part):
        allowed, typed = {listed} if isinstance(listed, str) else {*listed}, True
        kinds &= allowed | ({"integer"} if "number" in allowed else set())
    if not typed:
        kinds = {k for k, words in IMPLIED.items() if any(p.keys() & {*words} for p in parts)}
        return [k for k in TYPES if k in kinds] or None
    return [k for k in TYPES if k in kinds and not (k == "integer" and "number" in kinds)]


def _bounds(parts: Sequence[Any], low: str, high: str) -> tuple[int, int | None]:
    """Return the strictest bounds of a length over all parts, from the keywords `low` and `high`; 0
    and None if no part has them."""
    lows, highs = ([int(p[k]) for p in parts if k in p] for k in (low, high))
    return max(lows, default=0), min(highs, default=None)


def _prefix(part: Mapping[str, Any]) -> Sequence[Schema]:
    """Return the schemas of the first items; before draft 2020-12 `items` could be their list."""
    prefix = part.get("prefixItems", part.get("items"))
    return prefix if isinstance(prefix, list) else ()


def _items(parts: Sequence[Any], index: int) -> Iterator[Schema]:
    """Yield each part's schema of the array item at an index."""
    for part in parts:
        prefix, items = _prefix(part), part.get("items", True)
        items = part.get("additionalItems", True) if isinstance(items, list) else items
        yield prefix[index] if index < len(prefix) else items


def _members(parts: Sequence[Any], name: str) -> Iterator[Schema]:
    """Yield each part's schema of the property `name`."""
    for part in parts:
        declared = part.get("properties", {})
        yield declared[name] if name in declared else part.get("additionalProperties", True)
