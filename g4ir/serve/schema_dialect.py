"""Keywords of JSON Schema that a grammar keeps, by dialect, and llguidance's verdict on schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from g4ir.errors import MissingError
from g4ir.ui.files import read_table

TABLES = read_table(Path(__file__).with_name("schemas.yaml"))
FORMATS: Mapping[str, str] = TABLES["formats"]
#: type -> the keywords that constrain its values
OF_TYPE: Mapping[str, list[str]] = TABLES["of_type"]
#: keywords that no grammar keeps -> the types that they constrain, and values that do not constrain
UNSUPPORTED: Mapping[str, list[Any]] = TABLES["unsupported"]
LIMITS = OF_TYPE["number"]
UNIONS = ("anyOf", "oneOf")
#: keywords that constrain an object beside its type
CONSTRAINTS = {*OF_TYPE["object"], *UNIONS, *UNSUPPORTED, "allOf", "$ref", "enum", "const"}

Node = Mapping[str, Any]
#: a schema in the keywords that `read_schema` returns; False allows nothing
Schema = dict[str, Any] | bool


@dataclass(frozen=True)
class Dialect:
    """The constraints that a grammar can express.

    `takes_pattern` tells whether it can express a regular expression; `adapt` returns the
    llguidance JSON schema of a string or a number that allows what the grammar allows;
    `object_keywords` are keywords of objects on which llguidance decides; `string_keywords`
    are further keywords of strings.
    """

    takes_pattern: Callable[[str], bool]
    adapt: Callable[[Node], Node]
    object_keywords: Collection[str] = ()
    string_keywords: Collection[str] = ()
    #: whether undeclared keys are generated besides declared ones
    undeclared_keys: bool = False
    #: constrains the names of undeclared keys, as a string
    key: Node = field(default_factory=dict)


#: llguidance's native grammar of JSON
JSON_TEXT = Dialect(
    takes_pattern=lambda pattern: True,
    adapt=lambda node: node,
    object_keywords=("patternProperties", "minProperties", "maxProperties"),
    undeclared_keys=True,
)


def judge(schema: Node) -> str:
    """Return llguidance's error for a schema; empty if it has none."""
    return _verdict(json.dumps(schema))


@lru_cache(maxsize=4096)
def _verdict(schema: str) -> str:
    matcher = llguidance().LLMatcher
    error = matcher.validate_grammar(matcher.grammar_from_json_schema(schema))
    return " ".join(error.split())[:160]


def is_contradiction(error: str) -> bool:
    """Return whether llguidance's error says that a schema has no value."""
    return error.startswith("Unsatisfiable")


def llguidance() -> Any:
    """Return the library; MissingError if it is not installed."""
    try:
        import llguidance as library
    except ImportError as e:
        raise MissingError("structured output needs llguidance: pip install 'g4ir[serve]'") from e
    return library
