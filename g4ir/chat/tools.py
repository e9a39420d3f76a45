"""Checks declared tools, and brings their schemas to what a declaration can say.

A declaration has types, descriptions, enums of strings, items, properties, required and nullable.
Templates leave out the rest without a word, so it is lowered first, and what is lost is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from g4ir.errors import InputError

from .messages import MOST_DEPTH, an_object, expect, function_of, json_value, kind_of, shown

TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
NAME = re.compile(r"[\w.-]{1,128}")
#: the keys of a function that a template reads
OF_FUNCTION = ("name", "description", "parameters", "response")
#: keywords that say nothing about a value
NOTES = {"title", "$schema", "$id", "$comment", "$defs", "definitions", "examples", "deprecated"}
#: keywords that a declaration has, in the order in which they are read
KEPT = ("description", "type", "enum", "nullable", "items", "properties", "required")
#: keywords whose values are data, and those whose values have a schema for each name
DATA = {"const", "default", "enum", "example", "examples"}
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
#: how many schemas one tool may have once its references are resolved
MOST_SCHEMAS = 4096

#: a schema, and the references that led to it
Led = tuple[dict[str, Any], tuple[str, ...]]


def read_tools(given: Any) -> tuple[dict[str, Any], ...]:
    """Return tools of the OpenAI form with the keys that a template reads. InputError names the
    place and the fix."""
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or not given:
        found = kind_of(given) if given else "none"
        cure = "leave it out where there are none"
        raise InputError(f"tools: must be a list of tools, found {found}; {cure}")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))
    names = [tool["function"]["name"] for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InputError(f"tools[{i}].function.name: {name!r} is declared twice")
    return tools


def _tool(given: Any, where: str) -> dict[str, Any]:
    function, where = function_of(given, where), f"{where}.function"
    out = {k: function[k] for k in OF_FUNCTION if function.get(k) is not None}
    name = out.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        what = f"must be 1 to 128 letters, digits and _ - ., found {shown(name)}"
        raise InputError(f"{where}.name: {what}")
    expect(out.setdefault("description", ""), str, f"{where}.description", "text")
    for key in [key for key in ("parameters", "response") if key in out]:
        out[key] = without_nulls(an_object(json_value(out[key], at := f"{where}.{key}"), at))
        check_schema(out[key], at)
    if out.get("parameters"):
        out["parameters"] = {"type": "object", **out["parameters"]}
        if (kind := out["parameters"]["type"]) not in ("object", "OBJECT"):
            raise InputError(f"{where}.parameters.type: must be object, found {shown(kind)}")
    return {"type": "function", "function": out}


def without_nulls(schema: Any) -> Any:
    """Return a schema without keywords that are null: some languages write so what is not there."""
    if isinstance(schema, list):
        return [without_nulls(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    out = dict[str, Any]()
    for key, value in schema.items():
        if key in DATA:
            if value is not None or key in ("const", "default"):
                out[key] = value
        elif key in NAMED and isinstance(value, dict):
            out[key] = {name: without_nulls(inner) for name, inner in value.items()}
        elif value is not None:
            out[key] = without_nulls(value)
    return out


def check_schema(schema: Any, where: str) -> None:
    """Raise InputError for values that a template would print as something else."""
    if isinstance(schema, bool):
        return
    for kind in _list(an_object(schema, where).get("type", [])):
        if not isinstance(kind, str) or kind.lower() not in TYPES:
            raise InputError(f"{where}.type: must be of {', '.join(TYPES)}, found {shown(kind)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(k, str) for k in required):
        raise InputError(f"{where}.required: must be a list of names")
    for key, form in (("enum", list), ("description", str), ("properties", dict)):
        if key in schema and not isinstance(schema[key], form):
            raise InputError(f"{where}.{key}: must not be {kind_of(schema[key])}")
    inner = {f"properties.{key}": value for key, value in schema.get("properties", {}).items()}
    for key in ("anyOf", "oneOf", "allOf"):
        if not isinstance(branches := schema.get(key, []), list):
            raise InputError(f"{where}.{key}: must be a list of schemas")
        inner |= {f"{key}[{i}]": value for i, value in enumerate(branches)}
    for key, value in (*inner.items(), *(("items", v) for v in _list(schema.get("items", [])))):
        check_schema(value, f"{where}.{key}")


def _list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def lower(
    tools: Sequence[Mapping[str, Any]], reading: bool = False
) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """Return checked tools with schemas that a declaration can say, and what was lost, by place.

    References inside of a schema are resolved; `anyOf [T, null]` becomes a T that may be null; a
    union of plain types becomes their list, any other its first; `allOf` is merged; texts that are
    `const` become an enum. For `reading` values any other union allows all.
    """
    out, said = [], list[str]()
    for tool in tools:
        function = dict(tool["function"])
        for key in ("parameters", "response"):
            if function.get(key):
                lowering = _Lowering(function[key], said, reading)
                function[key] = lowering.schema(function[key], f"{function['name']}.{key}", ())
        out.append({**tool, "function": function})
    return tuple(out), tuple(dict.fromkeys(said))


def target(root: Mapping[str, Any], ref: Any) -> Any:
    """Return the schema in a root that a reference names, `#` or a pointer; None where there is
    none."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return None
    node: Any = root
    for step in unquote(ref).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(key)] if key.isdecimal() and int(key) < len(node) else None
        else:
            node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping | bool) else None


@dataclass
class _Lowering:
    """One schema: `root` is what its references point into; `refs` are those that led to a node."""

    root: Mapping[str, Any]
    said: list[str]
    reading: bool = False
    count: int = 0

    def schema(self, given: Any, where: str, refs: tuple[str, ...]) -> dict[str, Any]:
        """Return a schema in the keywords of a declaration."""
        self.count += 1
        if self.count > MOST_SCHEMAS or where.count(".") > MOST_DEPTH:
            raise InputError(f"tools: the schema of {where[:80]} is too large or too deep")
        if not isinstance(given, Mapping):  # true and false are schemas
            return {}
        node, refs = self._flat(given, where, refs)
        self.said += [f"{where}: {key}" for key in node if key not in (*KEPT, *NOTES)]
        out = {k: node[k] for k in KEPT if node.get(k) is not None}
        if "enum" in out and (out.get("type") not in ("string", "STRING") or not out["enum"]):
            self.said.append(f"{where}: enum")
            del out["enum"]
        if isinstance(items := out.get("items"), list):
            self.said.append(f"{where}: a list of items")
            out["items"] = items[0] if items else {}
        if self.reading and (isinstance(items, list) or "prefixItems" in node):
            out["items"] = {}  # each may have a type of its own
        if "items" in out:
            out["items"] = self.schema(out["items"], f"{where}.items", refs)
        if "properties" in out:
            inner = out["properties"].items()
            out["properties"] = {k: self.schema(v, f"{where}.{k}", refs) for k, v in inner}
        return out

    def _flat(self, given: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> Led:
        """Return a schema without references and unions at its top, its type normalised."""
        node = dict(given)
        while True:
            if (ref := node.pop("$ref", None)) is not None:
                found = None if ref in refs else target(self.root, ref)
                if found is None:
                    self.said.append(f"{where}: $ref {shown(ref)}")
                else:
                    check_schema(found, where)
                    inner = found if isinstance(found, Mapping) else {}
                    node, refs = {**inner, **node}, (*refs, ref)
            elif all_of := node.pop("allOf", None):
                for branch in all_of:
                    node = self._merged(node, branch, where)
            elif union := node.pop("anyOf", None) or node.pop("oneOf", None):
                node = {**self._union(union, where), **node}
            else:
                _normalise(node)
                return node, refs

    def _merged(self, node: dict[str, Any], branch: Any, where: str) -> dict[str, Any]:
        if not isinstance(branch, Mapping):
            return node
        if "$ref" in node and "$ref" in branch:  # the second one waits behind the first
            self.said.append(f"{where}: $ref {shown(branch['$ref'])}")
            branch = {k: v for k, v in branch.items() if k != "$ref"}
        out = {**branch, **node}
        if properties := {**branch.get("properties", {}), **node.get("properties", {})}:
            out["properties"] = properties
        if required := [*node.get("required", []), *branch.get("required", [])]:
            out["required"] = [*dict.fromkeys(required)]
        return out

    def _union(self, branches: Sequence[Any], where: str) -> dict[str, Any]:
        """Return a union as one schema: exactly where it can be said, else with a loss."""
        full = [dict(b) if isinstance(b, Mapping) else {} for b in branches]
        known = [b for b in full if b.get("type") != "null"]
        null = {"nullable": True} if len(known) < len(full) else {}
        if all(isinstance(b.get("const"), str) for b in known) and len(known) > 1:
            return {"type": "string", "enum": [b["const"] for b in known], **null}
        plain = all(b.keys() <= {"type", *NOTES} and isinstance(b.get("type"), str) for b in known)
        if plain and len(known) > 1:
            return {"type": [*dict.fromkeys(b["type"] for b in known)], **null}
        if self.reading and len(known) > 1:
            return null  # each form may have a type of its own
        if len(known) > 1:
            self.said.append(f"{where}: {len(known) - 1} of {len(known)} forms of a union")
        return {**(known[0] if known else {}), **null}


def _normalise(node: dict[str, Any]) -> None:
    """Make a list of types with null nullable, find a type where none is said, and make a text that
    is `const` an enum."""
    kinds = node.get("type")
    if isinstance(kinds, list):
        rest = [k for k in kinds if k.lower() != "null"]
        if len(rest) < len(kinds):
            node["nullable"] = True
        node["type"] = rest[0] if len(rest) == 1 else rest or "null"
    elif kinds is None:
        texts = [*node.get("enum", []), *([node["const"]] if "const" in node else [])]
        if "properties" in node:
            node["type"] = "object"
        elif "items" in node:
            node["type"] = "array"
        elif texts and all(isinstance(t, str) for t in texts):
            node["type"] = "string"
    if isinstance(node.get("const"), str):
        node.setdefault("enum", [node.pop("const")])
