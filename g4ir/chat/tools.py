"""Checks declared tools and lowers their JSON schemas to the keywords of a function declaration.

A declaration has types, descriptions, enums of strings, items, properties, required and nullable.
Templates drop all other keywords silently, so schemas are lowered first and losses are reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from g4ir.errors import InputError

from .messages import KINDS, MAX_DEPTH, an_object, expect, function_of, json_value, kind_of, shown

TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
NAME = re.compile(r"[\w.-]{1,128}")
#: keys of a function that templates read
OF_FUNCTION = ("name", "description", "parameters", "response")
#: keywords that are dropped without notice, since they constrain no value: annotations,
#: identifiers, and definitions (references are resolved before)
NOTES = {"title", "$schema", "$id", "$comment", "$defs", "definitions", "examples", "deprecated"}
#: keywords of a function declaration, in their order in a lowered schema
KEYWORDS = ("description", "type", "enum", "nullable", "items", "properties", "required")
#: keywords whose values are data, and those whose values map names to schemas
DATA = {"const", "default", "enum", "example", "examples"}
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
#: maximum schemas in a tool's parameters (and in its response) after references are resolved
MAX_SCHEMAS = 4096

#: a schema, and the `$ref`s followed to reach it
Led = tuple[dict[str, Any], tuple[str, ...]]


def read_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Check tools in OpenAI's format; keep the keys that templates read. InputError names the field
    and the fix."""
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple) or not tools:
        actual = kind_of(tools) if tools else "none"
        cure = "leave it out if there are none"
        raise InputError(f"tools: must be a list of tools, found {actual}; {cure}")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InputError(f"tools[{i}].function.name: {name!r} is declared twice")
    return tools


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function, where = function_of(tool, where), f"{where}.function"
    out = {k: function[k] for k in OF_FUNCTION if function.get(k) is not None}
    name = out.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problem = f"must be 1 to 128 letters, digits and _ - ., found {shown(name)}"
        raise InputError(f"{where}.name: {problem}")
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
    """Drop keywords with value null, which some clients send for absent ones; not `const` and
    `default`, whose value may be null."""
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
    """Raise InputError for values that templates would render wrongly."""
    if isinstance(schema, bool):
        return
    for kind in _list(an_object(schema, where).get("type", [])):
        if not isinstance(kind, str) or kind.lower() not in TYPES:
            allowed = ", ".join(TYPES)
            raise InputError(f"{where}.type: must be one of {allowed}, found {shown(kind)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(k, str) for k in required):
        raise InputError(f"{where}.required: must be a list of names")
    for key, expected in (("enum", list), ("description", str), ("properties", dict)):
        if key in schema and not isinstance(schema[key], expected):
            problem = f"must be {KINDS[expected]}, found {kind_of(schema[key])}"
            raise InputError(f"{where}.{key}: {problem}")
    inner = {f"properties.{key}": value for key, value in schema.get("properties", {}).items()}
    for key in ("anyOf", "oneOf", "allOf"):
        if not isinstance(branches := schema.get(key, []), list):
            raise InputError(f"{where}.{key}: must be a list of schemas")
        inner |= {f"{key}[{i}]": value for i, value in enumerate(branches)}
    for key, value in (*inner.items(), *(("items", v) for v in _list(schema.get("items", [])))):
        check_schema(value, f"{where}.{key}")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def lower(
    tools: Sequence[Mapping[str, Any]], reading: bool = False
) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """Lower the schemas of checked tools; return the tools, and the dropped keywords as
    `FIELD: KEYWORD`.

    Local `$ref`s are resolved; `anyOf [T, null]` becomes a nullable T; a union of plain types
    becomes a list of types, one of string constants an enum, any other union its first member;
    `allOf` is merged; a string `const` becomes an enum. With `reading` (parsing of generated
    values) any other union allows every value.
    """
    out, lost = [], list[str]()
    for tool in tools:
        function = dict(tool["function"])
        for key in ("parameters", "response"):
            if function.get(key):
                label = f"{function['name']}.{key}"
                lowering = _Lowering(function[key], label, lost, reading)
                function[key] = lowering.schema(function[key], label, ())
        out.append({**tool, "function": function})
    return tuple(out), tuple(dict.fromkeys(lost))


def resolve_ref(root: Mapping[str, Any], ref: Any) -> Any:
    """Resolve a local `$ref` (`#` or `#/` and a JSON pointer) in a root schema; None if it is no
    such reference, or there is no schema at it."""
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
    """Lowers one schema: `$ref`s point into `root`; dropped keywords are appended to `lost`.
    `label`: the schema's path, `NAME.parameters` or `NAME.response`; `refs` of the methods:
    references already followed; `count`: schemas lowered so far."""

    root: Mapping[str, Any]
    label: str
    lost: list[str]
    reading: bool = False
    count: int = 0

    def schema(self, schema: Any, where: str, refs: tuple[str, ...]) -> dict[str, Any]:
        """Return a schema with KEYWORDS alone, recursively; `where`: its path, for errors."""
        self.count += 1
        if self.count > MAX_SCHEMAS:
            problem = f"the schema {self.label} has more than {MAX_SCHEMAS} subschemas"
            raise InputError(f"tools: {problem}; simplify it")
        if where.count(".") > MAX_DEPTH:
            problem = f"the schema {self.label} has more than {MAX_DEPTH} levels"
            raise InputError(f"tools: {problem}; flatten it")
        if not isinstance(schema, Mapping):  # true and false are valid schemas
            return {}
        node, refs = self._flat(schema, where, refs)
        self.lost += [f"{where}: {key}" for key in node if key not in (*KEYWORDS, *NOTES)]
        out = {k: node[k] for k in KEYWORDS if node.get(k) is not None}
        if "enum" in out and (out.get("type") not in ("string", "STRING") or not out["enum"]):
            self.lost.append(f"{where}: enum")
            del out["enum"]
        if isinstance(items := out.get("items"), list):
            self.lost.append(f"{where}: a list of items")
            out["items"] = items[0] if items else {}
        if self.reading and (isinstance(items, list) or "prefixItems" in node):
            out["items"] = {}  # the items may differ in type
        if "items" in out:
            out["items"] = self.schema(out["items"], f"{where}.items", refs)
        if "properties" in out:
            inner = out["properties"].items()
            out["properties"] = {k: self.schema(v, f"{where}.{k}", refs) for k, v in inner}
        return out

    def _flat(self, schema: Mapping[str, Any], where: str, refs: tuple[str, ...]) -> Led:
        """Resolve top-level `$ref`, `allOf` and unions, and normalise the type."""
        node = dict(schema)
        while True:
            if (ref := node.pop("$ref", None)) is not None:
                resolved = None if ref in refs else resolve_ref(self.root, ref)
                if resolved is None:
                    self.lost.append(f"{where}: $ref {shown(ref)}")
                else:
                    check_schema(resolved, where)
                    inner = resolved if isinstance(resolved, Mapping) else {}
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
        if "$ref" in node and "$ref" in branch:  # only one is resolved: the second is dropped
            self.lost.append(f"{where}: $ref {shown(branch['$ref'])}")
            branch = {k: v for k, v in branch.items() if k != "$ref"}
        out = {**branch, **node}
        if properties := {**branch.get("properties", {}), **node.get("properties", {})}:
            out["properties"] = properties
        if required := [*node.get("required", []), *branch.get("required", [])]:
            out["required"] = [*dict.fromkeys(required)]
        return out

    def _union(self, branches: Sequence[Any], where: str) -> dict[str, Any]:
        """Return a union as one schema, exact if the keywords allow it, else its first member, or
        (`reading`) any value."""
        full = [dict(b) if isinstance(b, Mapping) else {} for b in branches]
        members = [b for b in full if b.get("type") != "null"]
        null = {"nullable": True} if len(members) < len(full) else {}
        if all(isinstance(b.get("const"), str) for b in members) and len(members) > 1:
            return {"type": "string", "enum": [b["const"] for b in members], **null}
        types = [b.get("type") for b in members if b.keys() <= {"type", *NOTES}]
        if len(members) > 1 and sum(isinstance(t, str) for t in types) == len(members):
            return {"type": [*dict.fromkeys(types)], **null}
        if self.reading and len(members) > 1:
            return null  # branches may differ in type
        if len(members) > 1:
            self.lost.append(f"{where}: {len(members) - 1} of {len(members)} members of a union")
        return {**(members[0] if members else {}), **null}


def _normalise(node: dict[str, Any]) -> None:
    """Turn a type list with null into nullable, infer a missing type, turn a string `const` into an
    enum."""
    kinds = node.get("type")
    if isinstance(kinds, list):
        types = [k for k in kinds if k.lower() != "null"]
        if len(types) < len(kinds):
            node["nullable"] = True
        node["type"] = types[0] if len(types) == 1 else types or "null"
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
