"""Grammar of tool calls in the model's native format, from the JSON Schemas of the functions.

The grammar is Lark text for llguidance. Keys are bare, strings are enclosed in the delimiter token,
and there is no white space, so that each value has one spelling. Schemas are read by `read_schema`,
which drops unsupported constraints. Undeclared keys are never generated if keys are declared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from g4ir.chat.calls import is_bare_key
from g4ir.chat.messages import shown
from g4ir.chat.special_tokens import CALL, CALL_END, QUOTE

from .http_errors import Refused, missing
from .json_schema import CONSTRAINTS, read_schema
from .schema_leaves import (
    FORMATS,
    LARK,
    LIMITS,
    MATCHED_KEY,
    OF_TYPE,
    Node,
    llguidance,
    read_pattern,
    written,
)

#: maximum schemas in one grammar, over all functions
MAX_SCHEMAS = 1 << 14
#: max depth of a value without a schema
ANY_DEPTH = 4

_NUMERIC = {
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/",
}
_COMMA, _KEY = ' "," ', "[A-Za-z_][A-Za-z0-9_.-]{0,63}"


@dataclass(frozen=True)
class Called:
    """A callable function. `constrained`: its arguments follow the schema, otherwise only the call
    syntax. Unsupported schemas are refused only if `strict`."""

    name: str
    schema: Mapping[str, Any]
    where: str
    constrained: bool = True
    strict: bool = False


def called(
    tools: Sequence[Mapping[str, Any]], names: Collection[str] | None, strict: bool
) -> list[Called]:
    """Return the tools with these names, or all. With `strict`, only strict tools are constrained
    by their schemas."""
    out = []
    for i, tool in enumerate(tools):
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        if names is None or name in names:
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
    """Return the grammar of an answer that is one function call, or `many`; or, if given, JSON of
    the schema `content`. `controls`: ids of control tokens."""
    if absent := next((c for c in (CALL, CALL_END, QUOTE) if c not in controls), None):
        raise missing("tools", f"the tokenizer of this model has no {absent}: it makes no calls")
    rules = _Rules({c: f"<[{i}]>" for c, i in controls.items()})
    begin, end = rules.marks[CALL], rules.marks[CALL_END]
    calls = " | ".join(_call(rules, f) for f in functions)
    call = rules.rule(f'{begin} "call:" ({calls}) {end}')
    start = (f"{call}+" if many else call) + (f" | %json {content}" if content else "")
    bodies = [*rules.recursive.items(), *((name, body) for body, name in rules.names.items())]
    return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in bodies)])


def _call(rules: _Rules, function: Called) -> str:
    """Return the rule of a function's call after its opening token."""
    if not function.constrained:
        arguments = rules.mapping(rules.anything())
    else:
        schema = _parameters(function, rules.marks)
        arguments = _Schema(rules, schema, function.where).arguments()
    return f"{json.dumps(function.name)} {arguments}"


def _parameters(function: Called, controls: Collection[str]) -> dict[str, Any]:
    """Return the schema of a function's arguments. A function without a schema has none."""
    schema = {"type": "object", **function.schema, "nullable": False}
    keywords = schema.keys() & CONSTRAINTS
    if not keywords or (keywords == {"properties"} and not schema["properties"]):
        schema["additionalProperties"] = False
    return read_schema(
        schema, function.where, strict=function.strict, controls=controls, refuse=refused
    )


def refused(where: str, why: str) -> Refused:
    """Return the error for an unsupported schema."""
    return Refused(400, f"{where[:200]}: {why}", param="tools")


@dataclass
class _Rules:
    """Deduplicated rules of one grammar. `marks`: control tokens in the grammar's syntax."""

    marks: Mapping[str, str]
    names: dict[str, str] = field(default_factory=dict)
    #: name -> body of possibly recursive rules
    recursive: dict[str, str] = field(default_factory=dict)
    #: number of schemas so far
    count: int = 0

    def rule(self, body: str, prefix: str = "r") -> str:
        """Return the name of a rule; names of terminals are in upper case."""
        return self.names.setdefault(body, f"{prefix}{len(self.names)}")

    def terminal(self, *regexes: str) -> str:
        """Return a terminal for the intersection of regular expressions."""
        return self.rule(" & ".join(regexes), "T")

    def string(self, inner: str) -> str:
        return self.rule(f"{self.marks[QUOTE]} {inner} {self.marks[QUOTE]}")

    def nested(self, grammar: str, where: str) -> str:
        if error := llguidance().LLMatcher.validate_grammar(grammar, None):
            raise refused(where, f"is no grammar in Lark: {' '.join(error.split())[:200]}")
        self.plain(re.sub(r"\\(.)", r"\1", grammar))
        return self.rule(f"%lark {{\n{grammar}\n}}")

    def plain(self, text: str) -> str:
        """Return a literal. If it contains the spelling of a control token it is refused, since
        llguidance would accept the token for a forced text."""
        if token := next((c for c in self.marks if c in text), None):
            raise refused("tools", f"{token} in the text {shown(text)} is not supported")
        return json.dumps(text, ensure_ascii=False)

    def key(self, name: str) -> str:
        """Return the rule of a key, without delimiters if it can be read back."""
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
        """Return the rule of any value of limited depth."""
        text, number = self.terminal("/(?s:.+)/"), self.terminal(_NUMERIC["number"])
        plain = f'{self.string(f"{text}?")} | {number} | "true" | "false" | "null"'
        if not depth:
            return self.rule(plain)
        inner = self.anything(depth - 1)
        return self.rule(f"{plain} | {self.array(inner, 0, None)} | {self.mapping(inner)}")

    def mapping(self, value: str, *keys: str) -> str:
        """Return the rule of an object with any keys, or keys that match expressions."""
        entry = self.rule(f'{self.terminal(*(keys or [f"/{_KEY}/"]))} ":" {value}')
        return self.rule(f'"{{" ({entry} ("," {entry})*)? "}}"')

    def array(self, item: str, min_items: int, max_items: int | None) -> str:
        """Return the rule of a list with min_items to max_items items."""
        if max_items == 0:
            return self.rule('"[" "]"')
        more = f"{{{max(min_items, 1) - 1},{'' if max_items is None else max_items - 1}}}"
        items = item if max_items == 1 else f'{item} ("," {item}){more}'
        return self.rule(f'"[" {items} "]"' if min_items else f'"[" ({items})? "]"')


class _Schema:
    """One schema as `read_schema` returns it. Each method returns the name of a rule."""

    def __init__(self, rules: _Rules, root: Node, where: str) -> None:
        self.rules, self.root, self.where = rules, root, where
        self._names: dict[str, str] = {}

    def arguments(self) -> str:
        """Return the rule of a function's arguments."""
        rule = self.value(self.root)
        waiting = [*self._names]
        while waiting:
            ref = waiting.pop()
            before = {*self._names}
            body = self.root["$defs"][ref.rpartition("/")[2]]
            self.rules.recursive[self._names[ref]] = self.value(body)
            waiting += self._names.keys() - before
        return rule

    def value(self, node: Any) -> str:
        rules = self.rules
        rules.count += 1
        if rules.count > MAX_SCHEMAS:
            raise refused(self.where, "the schemas of all tools are too large for one grammar")
        if node is False:
            raise refused(self.where, "the schema allows nothing")
        if "$ref" in node:
            return self._names.setdefault(node["$ref"], f"d{rules.count}")
        if "anyOf" in node:
            return rules.rule(" | ".join(map(self.value, node["anyOf"])))
        if "enum" in node:
            return rules.rule(" | ".join(map(rules.literal, node["enum"])))
        if kinds := _kinds(node):
            return rules.rule(" | ".join(self._of_kind(kind, node) for kind in kinds))
        return rules.anything()

    def _of_kind(self, kind: str, node: Node) -> str:
        if kind in ("integer", "number"):
            return self._number(kind, node)
        if kind == "string":
            return self._string(node)
        if kind in ("array", "object"):
            return (self._array if kind == "array" else self._object)(node)
        return {"null": '"null"', "boolean": '"true" | "false"'}[kind]

    def _string(self, node: Node) -> str:
        if LARK in node:
            return self.rules.string(self.rules.nested(node[LARK], f"{self.where}.{LARK}"))
        min_len, max_len = node.get("minLength", 0), node.get("maxLength")
        if max_len == 0:
            return self.rules.string("")
        terms = [f"/(?s:.{{{max(min_len, 1)},{'' if max_len is None else max_len}}})/"]
        more = [part for part in node.get("allOf", ()) if "pattern" in part]
        patterns = [part["pattern"] for part in ([node] if "pattern" in node else []) + more]
        read = [read_pattern(pattern) for pattern in patterns]
        terms += [expression for expression, _ in filter(None, read)]
        if "format" in node:
            terms.append(f"/{FORMATS[node['format']]}/")
        empty = not min_len and "format" not in node and all(may for _, may in filter(None, read))
        return self.rules.string(self.rules.terminal(*terms) + "?" * empty)

    def _number(self, kind: str, node: Node) -> str:
        limits = {k: node[k] for k in LIMITS if k in node}
        if not limits:
            return self.rules.terminal(_NUMERIC[kind])
        more = [part for part in node.get("allOf", ()) if "multipleOf" in part]
        leaf = {"type": kind, **limits, "allOf": more}
        return self.rules.rule("%json " + json.dumps(written(leaf)))

    def _array(self, node: Node) -> str:
        min_items, max_items = node.get("minItems", 0), node.get("maxItems")
        first = [self.value(item) for item in node.get("prefixItems", ())]
        if not first:
            item = "" if max_items == 0 else self.value(node.get("items", {}))
            return self.rules.array(item, min_items, max_items)
        tail = ""
        if max_items is None or max_items > len(first):
            item = self.value(node.get("items", {}))
            high = "" if max_items is None else max_items - len(first)
            tail = f'("," {item}){{{max(min_items - len(first), 0)},{high}}}'
        for i, item in reversed([*enumerate(first)]):
            tail = f"{item} {tail}" if i == 0 else f'"," {item} {tail}'
            if i >= min_items:
                tail = f"({tail})?"
        return self.rules.rule(f'"[" {tail} "]"')

    def _object(self, node: Node) -> str:
        rules, properties, required = (
            self.rules,
            node.get("properties", {}),
            node.get("required", ()),
        )
        for pattern, inner in node.get("patternProperties", {}).items():
            expression, _ = read_pattern(pattern) or ("", False)
            return rules.mapping(self.value(inner), f"/{MATCHED_KEY}/", expression)
        more = node.get("additionalProperties", {})
        if not properties and more is not False:
            return rules.mapping(self.value(more))
        # Members are in declared order; each is optional unless required. Two rules for the
        # remainder: as the first member, and after another one (with a comma).
        first = behind = rules.rule('""')
        for name, inner in reversed(properties.items()):
            if inner is False:
                continue
            member = rules.rule(f"{rules.key(name)} {self.value(inner)}")
            skips = ("", "") if name in required else (f" | {first}", f" | {behind}")
            first = rules.rule(f"{member} {behind}{skips[0]}")
            behind = rules.rule(f'"," {member} {behind}{skips[1]}')
        return rules.rule(f'"{{" {first} "}}"')


def _kinds(node: Node) -> list[str]:
    """Return a schema's types, inferred from its keywords if it has none."""
    kinds = node.get("type")
    if kinds is None:
        return [k for k, names in OF_TYPE.items() if k != "integer" and node.keys() & {*names}]
    return kinds if isinstance(kinds, list) else [kinds]
