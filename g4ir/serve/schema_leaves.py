"""Numbers and strings in schemas: the constraints that grammars support, and llguidance's check of
a schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from g4ir.errors import MissingError
from g4ir.ui.files import read_table

TABLES = read_table(Path(__file__).with_name("schemas.yaml"))
FORMATS: Mapping[str, str] = TABLES["formats"]
#: type -> the keywords that constrain its values
OF_TYPE: Mapping[str, list[str]] = TABLES["of_type"]
#: unsupported keyword -> types that it constrains, and its neutral values
UNSUPPORTED: Mapping[str, list[Any]] = TABLES["unsupported"]
LIMITS = OF_TYPE["number"]
#: keyword of a string that follows a Lark grammar (custom tools)
LARK = OF_TYPE["string"][0]
#: numbers have at most 18 digits before and after the decimal point
MAX_NUMBER = 10**18 - 1
#: exclusive limit -> sign of the direction of valid numbers
EDGES = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}
#: maximum characters of a pattern
MAX_PATTERN = 1 << 14
#: expression for property names that match a patternProperties key
MATCHED_KEY = "[A-Za-z0-9_.-]{1,64}"

Node = Mapping[str, Any]

_ESCAPE = r"\\[^bBAZzkpP0-9]"
#: escapes and character classes in a pattern
_LITERAL = re.compile(rf"{_ESCAPE}|\[(?:{_ESCAPE}|[^\]\\])*\]", re.S)
#: unsupported elsewhere in a pattern: lookaround, backreferences, inner anchors
_ODD = re.compile(r"\\|\(\?(?!:)|[\^$]")


def judge(schema: Node) -> str:
    """Return llguidance's error for a schema; "" if it is accepted."""
    return _verdict(json.dumps(schema))


@lru_cache(maxsize=4096)
def _verdict(schema: str) -> str:
    matcher = llguidance().LLMatcher
    error = matcher.validate_grammar(matcher.grammar_from_json_schema(schema))
    return " ".join(error.split())[:160]


def is_contradiction(error: str) -> bool:
    """Whether llguidance's error means that the schema has no valid value."""
    return error.startswith("Unsatisfiable")


def llguidance() -> Any:
    """Return the library; MissingError if it is not installed."""
    try:
        import llguidance as library
    except ImportError as e:
        raise MissingError("structured output needs llguidance: pip install 'g4ir[serve]'") from e
    return library


def written(leaf: Node) -> dict[str, Any]:
    """Return llguidance's schema for a leaf: numbers with at most 18 digits, formats as regular
    expressions."""
    more = list[Any](leaf.get("allOf", ()))
    out = {k: v for k, v in leaf.items() if k not in ("format", "allOf", LARK)}
    if "format" in leaf:
        more.append({"pattern": f"^({FORMATS[leaf['format']]})$"})
    elif leaf["type"] in ("integer", "number"):
        limits = {k: _clamped(k, out[k], leaf["type"]) for k in LIMITS if k in out}
        out |= {"minimum": -MAX_NUMBER, "maximum": MAX_NUMBER, **limits}
    return out | ({"allOf": more} if more else {})


def _clamped(name: str, limit: Any, kind: str) -> Any:
    """Clamp a limit to the generated numbers. An exclusive limit moves inwards, so that no long
    decimal rounds to the limit."""
    if name == "multipleOf":
        return limit
    edge = max(-MAX_NUMBER, min(limit, MAX_NUMBER))
    if name not in EDGES or kind == "integer":
        return edge
    side = EDGES[name]
    return edge + side * 1e-9 if abs(edge) < 1e6 else math.nextafter(edge, side * math.inf)


def read_pattern(pattern: str) -> tuple[str, bool] | None:
    """Convert a pattern to a regular expression for full strings, and whether that matches ""; None
    if it is not supported."""
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
