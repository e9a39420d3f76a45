"""Grammar of tool calls in the model's native format, from the JSON Schemas of the functions.

The grammar is Lark text for llguidance. Keys are bare, strings are enclosed in the delimiter token,
and there is no white space, so that a value has one spelling. The whole schema constrains a value:
an unsupported keyword is refused by name. Undeclared keys are never generated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

from g4ir.chat.messages import shown
from g4ir.chat.special_tokens import CALL, CALL_END, QUOTE
from g4ir.chat.tools import MOST_SCHEMAS, NOTES, TYPES, check_schema, target
from g4ir.chat.values import is_bare_key
from g4ir.errors import MissingError
from g4ir.ui.files import read_table

from .http_errors import Refused, missing

TABLES = read_table(Path(__file__).with_name("schemas.yaml"))
FORMATS: Mapping[str, str] = TABLES["formats"]
#: type -> the keywords that say something about its values
OF_KIND: Mapping[str, list[str]] = TABLES["of_kind"]
OF_ANY = frozenset(keyword for keywords in OF_KIND.values() for keyword in keywords)
FORMS, LIMITS, SILENT = {*TABLES["forms"]}, OF_KIND["number"], NOTES | {*TABLES["silent"]}
#: the largest minLength, maxLength, minItems and maxItems
MOST_COUNTED = 1 << 14
#: whole numbers have at most 18 digits, and so has what stands before and behind a point
MOST_NUMBER = 10**18 - 1
#: the largest multipleOf: llguidance holds each remainder, fails beyond 9000, may take all memory
MOST_STEP = 1 << 12
#: limits that are left out themselves -> on which side of them the numbers are
EDGES = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}
#: how deep a value may lie of which nothing is said
ANY_DEPTH = 4
#: keyword of a string that is a text of a grammar in Lark: that of a custom tool
LARK = "x-g4ir-lark"

_NUMBERS = {
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/",
}
_COMMA, _KEY = ' "," ', "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
Node = Mapping[str, Any]
Refs = tuple[str, ...]

_ESCAPE = r"\\[^bBAZzkpP0-9]"
#: escapes and classes of characters in a pattern
_LITERAL = re.compile(rf"{_ESCAPE}|\[(?:{_ESCAPE}|[^\]\\])*\]", re.S)
#: what a pattern cannot have beside them: it looks around, repeats what was matched, or is
#: anchored inside
_ODD = re.compile(r"\\|\(\?(?!:)|[\^$]")


@dataclass(frozen=True)
class Called:
    """A callable function: `held` constrains its arguments to the schema, otherwise to the call
    syntax alone. Only a `strict` one is refused for an unsupported schema."""

    name: str
    schema: Mapping[str, Any]
    where: str
    held: bool = True
    strict: bool = False


def called(
    tools: Sequence[Mapping[str, Any]], names: Collection[str] | None, strict: bool
) -> list[Called]:
    """Return those of checked tools that have the names, or all. Where only `strict` ones are held
    to their schemas, the others are not."""
    out = []
    for i, tool in enumerate(tools):
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        if names is None or name in names:
            own = tool["function"].get("strict") is True
            where = f"tools[{i}].function.parameters"
            out.append(Called(name, schema, where, own or not strict, own))
    return out


def grammar_of(
    functions: Sequence[Called],
    controls: Mapping[str, int],
    *,
    many: bool = True,
    content: str | None = None,
) -> str:
    """Return the grammar of an answer that is a call of one of the functions, or `many`; or, where
    a schema is given, JSON of `content` instead. `controls` are ids of control tokens."""
    if absent := next((c for c in (CALL, CALL_END, QUOTE) if c not in controls), None):
        raise missing("tools", f"the tokenizer of this model has no {absent}: it makes no calls")
    rules = _Rules({c: f"<[{i}]>" for c, i in controls.items()})
    begin, end = rules.marks[CALL], rules.marks[CALL_END]
    forms = " | ".join(_form(rules, f) for f in functions)
    call = rules.rule(f'{begin} "call:" ({forms}) {end}')
    start = (f"{call}+" if many else call) + (f" | %json {content}" if content else "")
    lines = [f"{name}: {body}" for body, name in rules.names.items()]
    return "\n".join([f"start: {start}", *lines])


def _form(rules: _Rules, function: Called) -> str:
    """Return the rule of a call; an unsupported schema of a function that is not strict is
    ignored: only the call syntax is constrained."""
    before = dict(rules.names)
    try:
        return _Schema(rules, function.schema).call(function)
    except Refused:
        if function.strict:
            raise
        rules.names = before
        return _Schema(rules, {}).call(replace(function, held=False))


def texts_of(schema: Any, listed: bool = False) -> Iterator[str]:
    """Yield the texts that values of a schema have as they are: names, and what is `listed`."""
    if isinstance(schema, str) and listed:
        yield schema
    for inner in schema if isinstance(schema, list) else ():
        yield from texts_of(inner, listed)
    for key, inner in schema.items() if isinstance(schema, dict) else ():
        if listed:
            yield key
        elif key == "properties" and isinstance(inner, dict):
            yield from inner
        elif key == "pattern" and isinstance(inner, str):
            yield re.sub(r"\\(.)", r"\1", inner)
        yield from texts_of(inner, listed or key in ("const", "enum", "required"))


def refused(where: str, why: str) -> Refused:
    """Return the refusal of a schema."""
    return Refused(400, f"{where[:200]}: {why}", param="tools")


@dataclass
class _Rules:
    """The rules of one grammar, each once. `marks` are control tokens as the grammar has them."""

    marks: Mapping[str, str]
    names: dict[str, str] = field(default_factory=dict)
    #: schemas that were read
    count: int = 0

    def rule(self, body: str, prefix: str = "r") -> str:
        """Return the name of a rule; names of terminals are in upper case."""
        return self.names.setdefault(body, f"{prefix}{len(self.names)}")

    def terminal(self, *regexes: str) -> str:
        """Return the name of a terminal that all of some expressions match."""
        return self.rule(" & ".join(regexes), "T")

    def string(self, inner: str) -> str:
        return self.rule(f"{self.marks[QUOTE]} {inner} {self.marks[QUOTE]}")

    def nested(self, grammar: str, where: str) -> str:
        if error := llguidance().LLMatcher.validate_grammar(grammar, None):
            raise refused(where, f"is no grammar in Lark: {' '.join(error.split())[:200]}")
        self.plain(re.sub(r"\\(.)", r"\1", grammar))
        return self.rule(f"%lark {{\n{grammar}\n}}")

    def plain(self, text: str) -> str:
        """Return a text that is given. Where only one text can follow, llguidance takes a control
        token for what is its spelling: such a text is refused."""
        if found := next((c for c in self.marks if c in text), None):
            raise refused("tools", f"{found} in the text {shown(text)} is not supported")
        return json.dumps(text, ensure_ascii=False)

    def key(self, name: str) -> str:
        """Return what stands before a value: its name, bare where that can be read back."""
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
        """Return any value, of limited depth."""
        text, number = self.terminal("/(?s:.+)/"), self.terminal(_NUMBERS["number"])
        plain = f'{self.string(f"{text}?")} | {number} | "true" | "false" | "null"'
        if not depth:
            return self.rule(plain)
        inner = self.anything(depth - 1)
        return self.rule(f"{plain} | {self.array(inner, 0, None)} | {self.mapping(inner)}")

    def mapping(self, value: str) -> str:
        """Return an object with keys of any name."""
        entry = self.rule(f'{self.terminal(_KEY)} ":" {value}')
        return self.rule(f'"{{" ({entry} ("," {entry})*)? "}}"')

    def array(self, item: str, least: int, most: int | None) -> str:
        """Return a list of so many items."""
        if most == 0:
            return self.rule('"[" "]"')
        more = f"{{{max(least, 1) - 1},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f'{item} ("," {item}){more}'
        return self.rule(f'"[" {items} "]"' if least else f'"[" ({items})? "]"')


class _Schema:
    """The schema of one function. Each method returns the name of a rule; `refs` led to a node."""

    def __init__(self, rules: _Rules, root: Mapping[str, Any]) -> None:
        self.rules, self.root = rules, root

    def call(self, function: Called) -> str:
        """Return the call of a function behind its opener."""
        schema = {"type": "object", **function.schema, "nullable": False}
        if not function.held:
            arguments = self.rules.mapping(self.rules.anything())
        else:
            said = {k for k in schema if k in OF_ANY or k in FORMS} - {"type", "nullable"}
            if not said or (said == {"properties"} and not schema["properties"]):
                schema["additionalProperties"] = False  # it takes no arguments
            arguments = self.value(schema, function.where, ())
        return f"{json.dumps(function.name)} {arguments}"

    def value(self, given: Any, where: str, refs: Refs) -> str:
        given = {} if given is True else given
        if not isinstance(given, Mapping):
            raise refused(where, "allows nothing" if given is False else "must be a schema")
        node, refs = self._flat(given, where, refs)
        self.rules.count += 1
        if self.rules.count > MOST_SCHEMAS:
            raise refused(where, "the schemas of all tools are too large for one grammar")
        known = SILENT | OF_ANY | FORMS
        if odd := next((k for k in node if k not in known and not k.startswith("x-")), None):
            raise refused(f"{where}.{odd}", "this keyword is not supported; leave it out")
        if "anyOf" in node or "oneOf" in node:
            found = self._union(node, where, refs)
        elif "const" in node or "enum" in node:
            found = self._listed(node, where)
        elif kinds := _kinds(node):
            found = [self._of_kind(kind, node, where, refs) for kind in kinds]
        else:
            return self.rules.anything()
        if node.get("nullable") is True:
            found = [*found, '"null"']
        return self.rules.rule(" | ".join(found))

    def _flat(self, given: Node, where: str, refs: Refs) -> tuple[dict[str, Any], Refs]:
        """Return a schema together with what it refers to, and with all that it must be too."""
        node = dict(given)
        while "$ref" in node or "allOf" in node:
            parts = node.pop("allOf", [])
            if (ref := node.pop("$ref", None)) is not None:
                found = target(self.root, ref)
                if found is None or ref in refs:
                    why = "names nothing in this schema" if found is None else "refers to itself"
                    raise refused(f"{where}.$ref", f"{shown(ref)} {why}")
                check_schema(found, where)
                parts, refs = [found, *parts], (*refs, ref)
            for part in parts:
                node = _merged(node, part, where)
        return node, refs

    def _union(self, node: Node, where: str, refs: Refs) -> list[str]:
        name = "anyOf" if "anyOf" in node else "oneOf"
        where = f"{where}.{name}"
        beside = node.keys() - SILENT - {name, "nullable", "type"}
        if beside or not node[name]:
            raise refused(where, f"is not supported beside {min(beside, default='nothing')}")
        outer = {k: v for k, v in node.items() if k == "type"}
        forms = [_merged(outer, form, where) for form in node[name]]
        if name == "oneOf":
            flat = [self._flat(form, where, refs)[0] for form in forms]
            if not all(_apart(a, b) for a, b in combinations(flat, 2)):
                raise refused(where, "two of its forms may hold at once; give anyOf")
        return [self.value(f, f"{where}[{i}]", refs) for i, f in enumerate(forms)]

    def _listed(self, node: Node, where: str) -> list[str]:
        name = "const" if "const" in node else "enum"
        kinds = _kinds(node, inferred=False)
        limits = {k for kind in kinds or OF_KIND for k in OF_KIND.get(kind, ())}
        if beside := node.keys() & (limits | {"const", "enum"}) - {name}:
            raise refused(f"{where}.{min(beside)}", f"is not supported beside {name}")
        values = [node[name]] if name == "const" else node[name]
        fit = [v for v in values if not kinds or any(_is(v, k) for k in kinds)]
        if not fit:
            raise refused(f"{where}.{name}", "has no value of its type")
        return [self.rules.literal(v) for v in fit]

    def _of_kind(self, kind: str, node: Node, where: str, refs: Refs) -> str:
        if kind in ("integer", "number"):
            return self._number(kind, node, where)
        if kind == "string":
            return self._string(node, where)
        if kind in ("array", "object"):
            return (self._array if kind == "array" else self._object)(node, where, refs)
        return {"null": '"null"', "boolean": '"true" | "false"'}[kind]

    def _string(self, node: Node, where: str) -> str:
        if LARK in node:
            return self.rules.string(self.rules.nested(node[LARK], f"{where}.{LARK}"))
        least, most = _counts(node, "minLength", "maxLength", where)
        if most == 0:
            return self.rules.string("")
        held = [f"/(?s:.{{{max(least, 1)},{'' if most is None else most}}})/"]
        if (form := node.get("format")) is not None:
            if form not in FORMATS:
                raise refused(f"{where}.format", f"{shown(form)} is not supported; leave it out")
            held.append(f"/{FORMATS[form]}/")
        empty = not least and form is None
        if (pattern := node.get("pattern")) is not None:
            expression, may_be_empty = _pattern(pattern, f"{where}.pattern")
            self.rules.plain(re.sub(r"\\(.)", r"\1", pattern))
            held.append(expression)
            empty = empty and may_be_empty
        return self.rules.string(self.rules.terminal(*held) + "?" * empty)

    def _number(self, kind: str, node: Node, where: str) -> str:
        limits = {k: node[k] for k in LIMITS if k in node}
        if not limits:
            return self.rules.terminal(_NUMBERS[kind])
        if wrong := next((k for k in limits if not _is(limits[k], "number")), None):
            raise refused(f"{where}.{wrong}", f"must be a number, found {shown(limits[wrong])}")
        step = limits.get("multipleOf", 1)
        whole = kind == "integer" or "multipleOf" not in limits
        if not whole or not _is(step, "integer") or not 0 < step <= MOST_STEP:
            why = f"must be a whole number of 1 to {MOST_STEP}, of integers"
            raise refused(f"{where}.multipleOf", why)
        limits = {k: max(-MOST_NUMBER, min(v, MOST_NUMBER)) for k, v in limits.items()}
        for key in EDGES if kind == "number" else ():
            if key in limits:
                limits[key] = _inside(limits[key], EDGES[key])
        between = {"type": kind, "minimum": -MOST_NUMBER, "maximum": MOST_NUMBER, **limits}
        rule = "%json " + json.dumps(between)
        known = rule in self.rules.names
        if not known and llguidance().LLMatcher.validate_grammar(f"start: {rule}", None):
            raise refused(where, "its limits leave no number")
        return self.rules.rule(rule)

    def _array(self, node: Node, where: str, refs: Refs) -> str:
        least, most = _counts(node, "minItems", "maxItems", where)
        items = node.get("items", True)
        if isinstance(items, list):
            raise refused(f"{where}.items", "a list of schemas is not supported; give one")
        item = "" if most == 0 else self.value(items, f"{where}.items", refs)
        return self.rules.array(item, least, most)

    def _object(self, node: Node, where: str, refs: Refs) -> str:
        more = node.get("additionalProperties", True)
        known, required = dict(node.get("properties", {})), node.get("required", [])
        for name in required:
            if name not in known and more is False:
                raise refused(f"{where}.required", f"{shown(name)} is no property")
            known.setdefault(name, more)
        if not known and more is not False:
            return self.rules.mapping(self.value(more, f"{where}.additionalProperties", refs))
        # Members come in order, each there or, unless required, not. Of what may follow there are
        # two rules: for the first member, and behind one.
        first = behind = self.rules.rule('""')
        for name, inner in reversed(known.items()):
            if inner is False and name not in required:
                continue
            value = self.value(inner, f"{where}.properties.{name}", refs)
            member = self.rules.rule(f"{self.rules.key(name)} {value}")
            left, right = ("", "") if name in required else (f" | {first}", f" | {behind}")
            first = self.rules.rule(f"{member} {behind}{left}")
            behind = self.rules.rule(f'"," {member} {behind}{right}')
        return self.rules.rule(f'"{{" {first} "}}"')


def _kinds(node: Node, inferred: bool = True) -> list[str]:
    """Return the types of a schema; those of which it has keywords, where it says none."""
    given = node.get("type")
    if given is None:
        found = [k for k, keywords in OF_KIND.items() if inferred and node.keys() & {*keywords}]
        return [k for k in found if k != "integer"]
    kinds = [k.lower() for k in (given if isinstance(given, list) else [given])]
    return [*dict.fromkeys(k for k in kinds if not (k == "integer" and "number" in kinds))]


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (whole or kind == "number")
    kinds = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, kinds[kind])


def _merged(node: Node, part: Any, where: str) -> dict[str, Any]:
    """Return the intersection of two schemas whose keywords do not meet."""
    if part is True:
        return dict(node)
    if not isinstance(part, Mapping):
        raise refused(where, "allows nothing")
    said = node.keys() - SILENT
    if "additionalProperties" in {*node, *part} and said & part.keys() & {"properties"}:
        raise refused(f"{where}.additionalProperties", "is not supported beside other properties")
    out = {**part, **node}
    for key in said & part.keys():
        a, b = node[key], part[key]
        if key == "required":
            out[key] = [*dict.fromkeys([*b, *a])]
        elif key == "properties" and not any(a[k] != b[k] for k in a.keys() & b.keys()):
            out[key] = {**b, **a}
        elif a != b:
            raise refused(f"{where}.{key}", "is said twice, in two ways; say it once")
    return out


def _apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether no value matches both of two schemas, judged by types and listed values."""
    left, right = _values(a), _values(b)
    if left is not None and right is not None:
        return not any(
            x == y and isinstance(x, bool) == isinstance(y, bool) for x in left for y in right
        )
    one, two = _types(a), _types(b)
    both = one & two
    if one | two >= {"integer", "number"} or both - {"object"}:
        return False
    needed = {*a.get("required", ())} & {*b.get("required", ())}
    inner = [n.get("properties", {}) for n in (a, b)]
    pairs = [(inner[0].get(k), inner[1].get(k)) for k in needed]
    listed = [p for p in pairs if all(isinstance(n, Mapping) and _values(n) for n in p)]
    return not both or any(_apart(*pair) for pair in listed)


def _types(node: Node) -> set[str]:
    own = {"null"} if node.get("nullable") is True else set()
    return {*(_kinds(node) or TYPES), *own}


def _values(node: Node) -> list[Any] | None:
    found = [node["const"]] if "const" in node else node.get("enum")
    return [*found, None] if found and node.get("nullable") is True else found


def _counts(node: Node, low: str, high: str, where: str) -> tuple[int, int | None]:
    for key in {low, high} & node.keys():
        if not _is(node[key], "integer") or not 0 <= node[key] <= MOST_COUNTED:
            what = f"must be a whole number of 0 to {MOST_COUNTED}, found {node[key]!r}"
            raise refused(f"{where}.{key}", what)
    least, most = int(node.get(low, 0)), int(node[high]) if high in node else None
    if most is not None and most < least:
        raise refused(f"{where}.{high}", f"is less than {low}")
    return least, most


def _inside(edge: float, side: int) -> float:
    """Return an edge moved so far to one side that no long decimal beyond is read as the edge."""
    return edge + side * 1e-9 if abs(edge) < 1e6 else math.nextafter(edge, side * math.inf)


def _pattern(given: Any, where: str) -> tuple[str, bool]:
    """Return a regular expression of whole strings, and whether it matches the empty one."""
    odd = refused(where, "this regular expression is not supported; leave it out")
    if not isinstance(given, str) or len(given) > MOST_COUNTED:
        raise odd
    begin, inner, end = re.findall(r"(\^?)((?:\\.|.)*?)(\$?)\Z", given, re.S)[0]
    bare = _LITERAL.sub("", inner)
    depths = accumulate((c == "(") - (c == ")") for c in bare)
    outside = any(c == "|" and not depth for c, depth in zip(bare, depths, strict=True))
    if _ODD.search(bare) or (outside and (begin or end)):
        raise odd
    try:
        text = llguidance().regex_to_lark(inner, "dws")
        empty = re.fullmatch(inner, "") is not None
    except (ValueError, re.error, RecursionError):
        raise odd from None
    around = ["" if anchor else "(?s:.*)" for anchor in (begin, end)]
    whole = f"/{around[0]}({text}){around[1]}/"
    if llguidance().LLMatcher.validate_grammar(f"start: {whole}", None):
        raise odd
    return whole, empty


def llguidance() -> Any:
    """Return the library; MissingError if it is not installed."""
    try:
        import llguidance as library
    except ImportError as e:
        raise MissingError("forms of answers need llguidance: pip install 'g4ir[serve]'") from e
    return library
