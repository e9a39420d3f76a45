"""Reads JSON Schemas of requests: of tools, `response_format` and the fields like it.

llguidance reads and checks schemas. `read_schema` translates what llguidance lacks: OpenAPI's
`nullable`, types in upper case, null keywords, and the formats of schemas.yaml. A constraint that
a grammar cannot enforce is dropped and logged, or refused if the schema is strict. Types and
`required` are never dropped: a schema without valid values is refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from g4ir.chat.messages import shown
from g4ir.chat.tools import NAMED, resolve_ref, without_nulls
from g4ir.errors import MissingError
from g4ir.ui.files import read_table

from .http_errors import Refused

log = logging.getLogger(__name__)
#: format of a string -> a regular expression
FORMATS: Mapping[str, str] = read_table(Path(__file__).with_name("schemas.yaml"))["formats"]
UNIONS = ("anyOf", "oneOf")
#: keywords whose value is one schema (SINGLE) or a list of them (LISTS); `items` may be either
SINGLE = ("items", "additionalItems", "additionalProperties")
LISTS = (*UNIONS, "allOf", "prefixItems", "items")
#: DIALECT: keywords removed from schemas, since they change how llguidance reads them; UNKEPT:
#: keywords that the grammar of tool calls cannot enforce: they are dropped from every schema, with
#: a log line, and a strict schema that has one is refused
DIALECT, UNKEPT = {"$schema", "$id"}, ("patternProperties", "minProperties", "maxProperties")
#: keyword of a string that follows a Lark grammar (custom tools)
LARK = "x-g4ir-lark"
#: generated JSON has at most one blank, or one new line with indentation, between two tokens
WHITESPACE = "( |\\n {0,24})"
#: maximum characters of a pattern
MAX_PATTERN = 1 << 14

#: a JSON Schema: an object, true or false
Schema = Any

_ESCAPE = r"\\[^bBAZzkpP0-9]"
#: escapes and character classes in a pattern
_LITERAL = re.compile(rf"{_ESCAPE}|\[(?:{_ESCAPE}|[^\]\\])*\]", re.S)
#: unsupported in the rest of a pattern: other escapes (backreferences, \b), groups `(?...)` other
#: than `(?:` (lookaround, names, flags), inner anchors
_ODD = re.compile(r"\\|\(\?(?!:)|[\^$]")


def llguidance() -> Any:
    """Import and return the module llguidance; MissingError if it is not installed."""
    try:
        import llguidance as library
    except ImportError as e:
        raise MissingError("structured output needs llguidance: pip install 'g4ir[serve]'") from e
    return library


def read_schema(
    schema: Any, where: str, *, strict: bool, refuse: Callable[[str, str], Refused]
) -> dict[str, Any]:
    """Return a schema as llguidance and the grammar of tool calls read it. Refused if it is invalid
    or has no finite value, or with `strict` if a constraint cannot be enforced. `where`: the
    schema's path, for errors; `refuse(path, reason)` creates the error."""
    reader = _Reader(where, strict, refuse)
    try:
        root = reader.read(without_nulls(schema), where)
        root = root if isinstance(root, dict) else {"allOf": [root]}
        options = {"whitespace_pattern": WHITESPACE, "coerce_one_of": True, "lenient": not strict}
        root["x-guidance"] = options
        error, messages = judge(root)
        if error:
            raise refuse(where, f"the schema {error}")
        for ref in ("#", *reader.refs):  # also refs of properties that an object may omit
            if not _ends({"$ref": ref}, root):
                why = f"the schema has no finite value: {shown(ref)} always leads to itself"
                raise refuse(where, why)
    except RecursionError:
        raise refuse(where, "the schema is too deep") from None
    for message in messages:
        log_dropped(f"{where}: {message}")
    return root


def judge(schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return (why llguidance does not accept a schema, []), or ("", its warnings)."""
    matcher = llguidance().LLMatcher
    grammar = matcher.grammar_from_json_schema(json.dumps(schema))
    failed, messages = matcher.validate_grammar_with_warnings(grammar)
    messages = [" ".join(m.split())[:160] for m in messages if not m.startswith("oneOf not")]
    if not failed:
        return "", messages
    why = messages[-1]
    nothing = why.startswith("Unsatisfiable")
    return f"allows nothing: {why}" if nothing else f"is not supported: {why}", []


@lru_cache(maxsize=4096)
def log_dropped(line: str) -> None:
    """Log a dropped constraint, once: agents resend the same schemas."""
    log.warning("a schema constraint is not enforced: %s", line[-300:])


@dataclass
class _Reader:
    """Translates one schema, keyword by keyword: local references stay valid."""

    where: str
    strict: bool
    refuse: Callable[[str, str], Refused]
    #: all `$ref`s of the schema
    refs: set[str] = field(default_factory=set, init=False)

    def drop(self, where: str, reason: str) -> None:
        """Log that a constraint is not enforced; refused if the schema is strict."""
        if self.strict:
            raise self.refuse(where, f"{reason}; leave it out, or set strict to false")
        log_dropped(f"{where}: {reason}")

    def read(self, node: Schema, where: str) -> Schema:
        """Return a schema translated for llguidance, recursively; `where`: its path."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise self.refuse(where, f"must be a schema, found {shown(node)}")
        out = {k: self._inner(k, v, f"{where}.{k}") for k, v in node.items() if k not in DIALECT}
        self.refs |= {out["$ref"]} if isinstance(out.get("$ref"), str) else set()
        kinds = out.get("type")
        if isinstance(kinds, str | list):
            lower = [k.lower() if isinstance(k, str) else k for k in _listed(kinds)]
            out["type"] = lower if isinstance(kinds, list) else lower[0]
        self._drop_unkept(out, where)
        if (name := out.pop("format", None)) in [*FORMATS]:
            out["allOf"] = [*out.get("allOf", []), {"pattern": f"^({FORMATS[name]})$"}]
        return {"anyOf": [out, {"type": "null"}]} if out.pop("nullable", None) is True else out

    def _inner(self, key: str, value: Any, where: str) -> Any:
        if key in NAMED and isinstance(value, dict):
            return {name: self.read(inner, f"{where}.{name}") for name, inner in value.items()}
        if key in LISTS and isinstance(value, list):
            return [self.read(inner, f"{where}[{i}]") for i, inner in enumerate(value)]
        return self.read(value, where) if key in SINGLE else value

    def _drop_unkept(self, node: dict[str, Any], where: str) -> None:
        if isinstance(pattern := node.get("pattern"), str) and not read_pattern(pattern):
            self.drop(f"{where}.pattern", "this regular expression is not supported")
            del node["pattern"]
        for name in UNKEPT:
            value = node.pop(name, 0)
            if value not in (0, {}):
                self.drop(f"{where}.{name}", "is not supported")
            if name == "patternProperties" and value and "additionalProperties" in node:
                branches = [*value.values(), node["additionalProperties"]]
                node["additionalProperties"] = {"anyOf": branches}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _ends(node: Schema, root: Mapping[str, Any], refs: frozenset[str] = frozenset()) -> bool:
    """Whether a schema has a finite value that uses none of `refs`, the references followed to
    reach it (so recursion has a base case)."""
    if isinstance(node, bool | None):  # None: an unresolved reference that is not used
        return node is not False
    ref = node.get("$ref")
    if ref and (ref in refs or not _ends(resolve_ref(root, ref), root, refs | {ref})):
        return False
    for key in UNIONS:
        if key in node and not any(_ends(branch, root, refs) for branch in node[key]):
            return False
    kinds, properties = _listed(node.get("type")), node.get("properties", {})
    inner = [*node.get("allOf", ())]
    if kinds == ["object"]:
        inner += [properties[k] for k in node.get("required", ()) if k in properties]
    if kinds == ["array"] and node.get("minItems", 0):
        inner += [x for x in (*node.get("prefixItems", ()), node.get("items")) if x is not None]
    return all(_ends(x, root, refs) for x in inner if not isinstance(x, list))


def read_pattern(pattern: str) -> tuple[str, bool] | None:
    """Return (a pattern as a regular expression of Lark for full strings, whether it matches "");
    None if the pattern is not supported."""
    if len(pattern) > MAX_PATTERN:
        return None
    begin, inner, end = re.findall(r"(\^?)((?:\\.|.)*?)(\$?)\Z", pattern, re.S)[0]
    bare = _LITERAL.sub("", inner)
    depths = accumulate((c == "(") - (c == ")") for c in bare)
    outside = any(c == "|" and not depth for c, depth in zip(bare, depths, strict=True))
    if _ODD.search(bare) or (outside and (begin or end)):
        return None
    try:
        text = llguidance().regex_to_lark(inner, "dws")
        empty = re.fullmatch(inner, "") is not None
    except (ValueError, re.error, RecursionError):
        return None
    around = ["" if anchor else "(?s:.*)" for anchor in (begin, end)]
    regex = f"/{around[0]}({text}){around[1]}/"
    error = llguidance().LLMatcher.validate_grammar(f"start: {regex}", None)
    return None if error else (regex, empty)
