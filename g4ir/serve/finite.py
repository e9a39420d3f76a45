"""Refuses JSON schemas of which no value ends: references that lead round."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from g4ir.chat.messages import shown
from g4ir.chat.tools import target

from .http_errors import bad

MOST_ROUNDS = 64


def check_finite(schema: Mapping[str, Any], field: str) -> None:
    """Refuse a schema if a part of it, which an answer could begin, has no finite value. Parts that
    are known to end are found in rounds, until a round finds none."""
    parts = _parts(schema)
    order, ends = [*parts.values()], set[int]()
    for _ in range(MOST_ROUNDS):
        before = len(ends)
        order.reverse()
        for part in order:
            if id(part) not in ends and _ends(part, schema, ends):
                ends.add(id(part))
        if len(ends) == before:
            break
    if endless := [part for i, part in parts.items() if i not in ends]:
        named = next((p["$ref"] for p in endless if "$ref" in p), endless[0])
        raise bad(field, f"the schema has no value that ends: {shown(named)} leads round to itself")


def _parts(schema: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return all schemas that a value can meet, by identity."""
    found: dict[int, Mapping[str, Any]] = {}
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping) and id(part) not in found:
            found[id(part)] = part
            waiting += _inner(part, schema)
    return found


def _listed(part: Mapping[str, Any], *keys: str) -> list[Any]:
    found = [part.get(key) for key in keys]
    return [x for f in found for x in (f if isinstance(f, list) else [])]


def _inner(part: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
    yield from _listed(part, "allOf", "anyOf", "oneOf", "prefixItems", "items")
    yield from (part.get(key) for key in ("items", "additionalProperties"))
    for key in ("properties", "patternProperties"):
        held = part.get(key)
        yield from held.values() if isinstance(held, Mapping) else ()
    if "$ref" in part:
        yield target(root, part["$ref"])


def _ends(part: Mapping[str, Any], root: Mapping[str, Any], ends: Collection[int]) -> bool:
    """Whether a part has a finite value, given the parts that are known to have one."""

    def known(inner: Any) -> bool:
        return not isinstance(inner, Mapping) or id(inner) in ends

    needed = _listed(part, "allOf")
    if "$ref" in part:
        needed.append(target(root, part["$ref"]))
    if part.get("type") in ("object", ["object"]):
        members = part.get("properties")
        members = members if isinstance(members, Mapping) else {}
        needed += [members.get(name) for name in _listed(part, "required")]
    if part.get("type") in ("array", ["array"]) and part.get("minItems"):
        needed += [part.get("items"), *_listed(part, "prefixItems")]
    unions = [u for key in ("anyOf", "oneOf") if (u := _listed(part, key))]
    return all(map(known, needed)) and all(any(map(known, u)) for u in unions)
