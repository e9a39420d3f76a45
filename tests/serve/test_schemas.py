"""Schemas of tools and of answers: whatever a grammar allows is valid against all of a schema but
the constraints that no grammar keeps."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import extend

from g4ir.serve.http_errors import Refused
from g4ir.serve.json_schema import log_dropped
from g4ir.serve.request_schema import JSON, Constraint
from g4ir.serve.tool_grammar import called
from tests.cases import read_table
from tests.serve.running import NAME, Running
from tests.serve.test_calls import CLOSING, SIZE, free, grammars, ids, read, tool, vocabulary, walk
from tests.serve.test_client import HI

CASES = read_table("serve/schemas.yaml")
FORMATS = jsonschema.FormatChecker(["date", "uuid", "ipv4", "ipv6", "email"])
#: how a schema is used
USES = ("forced", "strict", "response_format")
#: where all of it must hold
STRICT = ("strict", "among")
#: a text before a call among free text
BEFORE = "so: {"


def _multiple(validator: Any, step: Any, value: Any, schema: Any) -> Iterator[Any]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and Fraction(str(value)) % Fraction(str(step)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")


def _pattern(validator: Any, pattern: Any, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, str) and pattern not in CASES["odd"] and not re.search(pattern, value):
        yield jsonschema.ValidationError(f"{value} does not match {pattern}")


def _more(validator: Any, more: Any, value: Any, schema: Any) -> Iterator[Any]:
    if "patternProperties" not in schema:  # whose schemas are allowed beside `more`
        yield from DRAFT.VALIDATORS["additionalProperties"](validator, more, value, schema)


def _ignored(*_: Any) -> Iterator[Any]:
    yield from ()


DRAFT = jsonschema.Draft202012Validator
KEYWORDS: dict[str, Any] = {
    "multipleOf": _multiple,
    "pattern": _pattern,
    "additionalProperties": _more,
}
KEYWORDS |= {"oneOf": DRAFT.VALIDATORS["anyOf"]}
#: JSON Schema without the constraints that are dropped
VALIDATOR = extend(DRAFT, KEYWORDS | dict.fromkeys(CASES["unkept"], _ignored))


@pytest.fixture(autouse=True)
def forget() -> None:
    """A drop is logged once, and so in each test."""
    log_dropped.cache_clear()


def mask_of(schema: Any, use: str) -> Any:
    if use == "response_format":
        constraint = Constraint("f", JSON, schema)
        return grammars().text(constraint, thinking=False, inside=False)
    if use == "among":
        return grammars().some_calls(called(tools_of(schema, use), None, True))
    functions = called(tools_of(schema, use), None, False)
    return grammars().calls(functions, False, False, many=use == "many")


def tools_of(schema: Any, use: str) -> list[Any]:
    names = ("f.0-x", "f.1-x") if use == "many" else ("f.0-x",)
    return [tool(name, schema, strict=use in STRICT) for name in names]


def check_value(schema: Any, use: str, seed: int) -> None:
    """A random answer that a grammar of the schema allows is valid, or its calls are."""
    mask = mask_of(schema, use)
    if use == "response_format":
        row = walk(mask, seed, patience=30, closing=(*CLOSING, "<0x22>"))
        valid(json.loads(vocabulary().tokenizer.decode([*row[:-1]])), schema)
        return
    if use == "among":
        row = walk(mask, seed, ids(BEFORE, "<|tool_call>"), 40, ends=["<tool_call|>"])
        assert len(free(mask, row)) == SIZE
    else:
        row = walk(mask, seed, patience=30)
    answer = read(row, tools_of(schema, use))
    assert answer.content == (BEFORE if use == "among" else "")
    assert len(answer.tool_calls) == 1 or (use == "many" and answer.tool_calls)
    for call in answer.tool_calls:
        valid(call["arguments"], schema)


def valid(value: Any, schema: Any) -> None:
    VALIDATOR(schema, format_checker=FORMATS).validate(value)


class Schemas:
    """Random schemas, most of which a language model could be asked with."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def root(self) -> dict[str, Any]:
        schema = self.object(3)
        schema["$defs"] = {
            "leaf": self.leaf(),
            "node": {
                "type": "object",
                "properties": {"v": self.leaf(), "next": {"$ref": "#/$defs/node"}},
                "additionalProperties": False,
            },
        }
        return schema

    def some(self, **keywords: Any) -> dict[str, Any]:
        """Some of the keywords."""
        share = self.draw.choice((0.0, 0.2, 0.5))
        out = {k: v for k, v in keywords.items() if self.draw.random() < share}
        return {k.removesuffix("_"): self.draw.choice(v) for k, v in out.items()}

    def noted(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A schema with what says nothing about a value."""
        return schema | {
            k.replace("__", "-"): v
            for k, v in self.some(
                title="T", description="d", markdownDescription="m", x__order=[3],
                deprecated=[True],
                contentMediaType=["a/b"], default=[None], readOnly=[False], nonsense=[{"a": 1}],
                enumDescriptions=[["x"]],
            ).items()
        }  # fmt: skip

    def leaf(self) -> Any:
        kinds = (self.string, self.number, lambda: self.draw.choice(CASES["leaves"]))
        return self.noted(self.draw.choice(kinds)())

    def string(self) -> dict[str, Any]:
        return {"type": "string"} | self.some(
            minLength=[0, 1, 3], maxLength=[3, 5, 40000], pattern=CASES["patterns"],
            format=CASES["formats"], contentEncoding=["base64"],
        )  # fmt: skip

    def number(self) -> dict[str, Any]:
        return {"type": self.draw.choice(["integer", "number"])} | self.some(
            minimum=[-3, 0, 2.5], maximum=[7, 1000, 1], exclusiveMinimum=[-1, 5],
            exclusiveMaximum=[9, 2, 12], multipleOf=[2, 0.5, 0.01, 7],
            format=["int64", "double"],
        )  # fmt: skip

    def value(self, depth: int) -> Any:
        if depth == 0 or self.draw.random() < 0.4:
            return self.leaf()
        ways = (self.object, self.array, self.array, self.union, self.merged, self.reference)
        return self.noted(self.draw.choice(ways)(depth - 1))

    def object(self, depth: int) -> dict[str, Any]:
        count = self.draw.randint(2, 4) if depth == 3 else self.draw.randint(0, 3)
        names = self.draw.sample(CASES["names"], count)
        properties = {name: self.value(depth) for name in names}
        required = [name for name in names if self.draw.random() < 0.5]
        out: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
        return self.noted(out) | self.some(
            additionalProperties=[False, False, True, {"type": "integer"}], minProperties=[0, 1],
            maxProperties=[4], propertyNames=[{"maxLength": 30}], dependentRequired=[{"a": ["b"]}],
            patternProperties=[{"^x": {"type": ["string", "integer"]}}],
            not_=[{"required": ["zz"]}], if_=[{"required": ["a"]}], then=[{"required": ["b"]}],
        )  # fmt: skip

    def array(self, depth: int) -> dict[str, Any]:
        return {"type": "array", "items": self.value(depth)} | self.some(
            minItems=[1, 2, 3], maxItems=[3], uniqueItems=[True, False], contains=[{"const": 1}],
            prefixItems=[[{"type": "boolean"}]],
        )  # fmt: skip

    def union(self, depth: int) -> dict[str, Any]:
        forms = [self.value(depth) for _ in range(self.draw.randint(1, 3))]
        return {self.draw.choice(["anyOf", "oneOf"]): forms}

    def merged(self, depth: int) -> dict[str, Any]:
        return {"allOf": [self.object(depth)], "properties": {"own": self.leaf()}}

    def reference(self, depth: int) -> dict[str, Any]:
        return {"$ref": self.draw.choice(["#/$defs/leaf", "#/$defs/node"])}


#: refusals of a schema that has no value at all, and of a strict one with other constraints
NOTHING, UNKEPT = r"allows nothing|no value that ends", r"is not supported"


def check(seed: int) -> str:
    """Try one random schema in each use; return why it was refused, if it was."""
    schema, why = Schemas(seed).root(), ""
    for use in (*USES, "many", "among"):
        try:
            for i in range(2):
                check_value(schema, use, 7 * seed + i)
        except Refused as e:
            why = e.message
            assert re.search(UNKEPT if use in STRICT else NOTHING, why) or re.search(NOTHING, why)
            if re.search(NOTHING, why):
                return why
    return ""


def test_random_schemas(full: bool) -> None:
    """Forced, strict and as a format of the answer."""
    seeds = range(300) if full else range(40)
    refused = [why for seed in seeds if (why := check(seed))]
    assert len(refused) <= len(seeds) // 4, refused


DEFS = CASES["definitions"]


def around(inner: Any) -> dict[str, Any]:
    """A schema with a member `a` of a schema, and a member whose declaration must hold."""
    properties = {"a": inner, "n": {"type": "boolean"}}
    required = {"required": ["n", "a"], "additionalProperties": False}
    return {"type": "object", "properties": properties, **required, **DEFS}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("keyword", "inner"), CASES["dropped"])
def test_constraints_that_are_dropped_alone(
    keyword: str, inner: Any, use: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They are named in the log; a strict schema is refused by their name."""
    schema = around(inner)
    if use == "strict":
        with pytest.raises(Refused, match=re.escape(keyword)) as e:
            mask_of(schema, use)
        assert (e.value.status, e.value.param) == (400, "tools")
        return
    for seed in range(3):
        check_value(schema, use, seed)
    assert keyword in caplog.text


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("inner", "modern"), CASES["translated"])
def test_other_spellings(
    inner: Any, modern: Any, use: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They hold as the same in today's spelling; nothing is dropped."""
    for seed in range(4):
        row = walk(mask_of(around(inner), use), seed, patience=30, closing=(*CLOSING, "<0x22>"))
        if use == "response_format":
            found = json.loads(vocabulary().tokenizer.decode([*row[:-1]]))
        else:
            found = read(row, tools_of(around(modern), use)).tool_calls[0]["arguments"]
        valid(found, around(modern))
    assert not caplog.text


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("inner", CASES["impossible"])
def test_schemas_that_are_refused(inner: Any, use: str) -> None:
    with pytest.raises(Refused) as e:
        mask_of(around(inner), use)
    assert e.value.status == 400 and len(e.value.message) < 400


def asked(key: str, schema: Any, strict: bool) -> dict[str, Any]:
    """What a request has around a schema."""
    named = {"name": "f", "strict": strict}
    flat = {"type": "function", "parameters": schema, **named}
    form = {"type": "json_schema", "json_schema": {"schema": schema, **named}}
    anthropic = {"input_schema": schema, **named}
    bodies: dict[str, dict[str, Any]] = {
        "function": {"tool_choice": "required", "tools": [tool("f", schema, strict=strict)]},
        "response_format": {"response_format": form},
        "flat": {"tool_choice": "required", "tools": [flat]},
        "text": {"text": {"format": {"type": "json_schema", "schema": schema, **named}}},
        "input_schema": {"tool_choice": {"type": "any"}, "tools": [anthropic]},
    }
    return bodies[key]


@pytest.mark.parametrize(("path", "key", "where"), CASES["paths"])
def test_schemas_over_http(
    served: Running, path: str, key: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each protocol reads a schema the same way, and names the client's field."""
    base: dict[str, Any] = {"model": NAME, "temperature": 1.2, "seed": 3}
    base |= {"input": "Hi", "max_output_tokens": 300} if path == "responses" else {}
    base |= {"messages": HI, "max_tokens": 300} if path != "responses" else {}
    wrong = around({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True})
    noted = around({"type": "boolean", "format": "ipv6", "contentEncoding": "x"})
    for schema, strict, status in ((wrong, True, 400), (wrong, False, 200), (noted, True, 200)):
        log_dropped.cache_clear()
        caplog.clear()
        with served.client() as client:
            got = client.post(f"/v1/{path}", json={**base, **asked(key, schema, strict)})
        assert got.status_code == status, got.text
        if status == 400:
            message = got.json()["error"]["message"]
            assert message.startswith(f"{where}: ") and "uniqueItems" in message
        named = "uniqueItems" in caplog.text
        assert named == (schema is wrong and not strict)
