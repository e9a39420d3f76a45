"""JSON Schemas from the annotations and docstrings of dataclasses."""

from __future__ import annotations

import re
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from .reader import Line, hints_of, required

_FIELD_DOC = re.compile(r"^ {4}(\w+): (.+)$", re.MULTILINE)
JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", Line: "string"}


def schema_defs(cls: type, partial: bool, defs: dict[str, Any]) -> str:
    """Add the JSON Schema of a dataclass and its parts to `defs`; return its name there.

    `partial` drops the required keys: a file with `extends` gives only what differs.
    """
    name = cls.__name__ + ("Patch" if partial else "")
    if name not in defs:
        defs[name] = {}  # keeps a recursive type from looping
        hints, docs = hints_of(cls), field_docs(cls)
        defs[name] = {
            "type": "object",
            "description": " ".join((cls.__doc__ or "").split("\n\n")[0].split()),
            "additionalProperties": False,
            "properties": {
                f.name: schema_of(hints[f.name], partial, defs) | docs.get(f.name, {})
                for f in fields(cls)
            },
            "required": [] if partial else [f.name for f in fields(cls) if required(f)],
        }
    return name


def field_docs(cls: type) -> dict[str, dict[str, str]]:
    """Return field -> its description, from the lines `field: text` of the docstrings of a
    dataclass and its bases."""
    docs = (c.__doc__ or "" for c in reversed(cls.__mro__) if is_dataclass(c))
    lines = (match for doc in docs for match in _FIELD_DOC.findall(doc))
    return {name: {"description": text} for name, text in lines}


def schema_of(hint: Any, partial: bool, defs: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of one annotation."""
    if hint is Any:
        return {}
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        out = schema_of(args[0], partial, defs)
        for rule in args[1:]:
            out |= rule.schema()
        return out
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(a, partial, defs) for a in args]}
    if origin is tuple:
        return {"type": "array", "items": schema_of(args[0], partial, defs)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(args[1], partial, defs)}
    if hint is type(None):
        return {"type": "null"}
    if is_dataclass(hint):
        return {"$ref": f"#/$defs/{schema_defs(typing.cast(type, hint), partial, defs)}"}
    return {"type": JSON_TYPES[hint]}
