"""Schemas of tools and of answers: whatever a grammar allows is valid against all of a schema but
the constraints that the log names."""

from __future__ import annotations

import copy
import json
import logging
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import extend

from g4ir.serve.http_errors import Refused
from g4ir.serve.json_schema import log_dropped, read_schema
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


VALIDATOR = extend(jsonschema.Draft202012Validator, {"multipleOf": _multiple})


@pytest.fixture(autouse=True)
def forget() -> None:
    """A drop is logged once, and so in each test."""
    log_dropped.cache_clear()


def without(schema: Any, paths: list[str]) -> Any:
    """The schema without the keywords at some paths; alternatives of `oneOf` stay as `anyOf`."""
    out = copy.deepcopy(schema)
    for path in paths:
        steps = [int(s[1:-1]) if s[0] == "[" else s for s in re.findall(r"\[\d+\]|[^.\[]+", path)]
        node = out
        for step in steps[1:-1]:
            node = node[step]
        dropped = node.pop(steps[-1], None)
        if steps[-1] == "oneOf" and dropped:
            node["allOf"] = [*node.get("allOf", []), {"anyOf": dropped}]
    return out


def dropped(schema: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The paths that the log names when a schema is read."""
    log_dropped.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "g4ir.serve.json_schema"):
        read_schema(
            schema,
            "schema",
            strict=False,
            controls=vocabulary().controls,
            refuse=lambda where, why: Refused(400, f"{where}: {why}"),
        )
    return [r.args[0].partition(": ")[0] for r in caplog.records]  # type: ignore[index,union-attr]


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


def check_value(schema: Any, use: str, seed: int, against: Any) -> None:
    """A random answer that a grammar of the schema allows is valid, or its calls are."""
    mask = mask_of(schema, use)
    if use == "response_format":
        row = walk(mask, seed, patience=30, closing=(*CLOSING, "<0x22>"))
        valid(json.loads(vocabulary().tokenizer.decode([*row[:-1]])), against)
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
        valid(call["arguments"], against)


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
            minimum=[-3, 0, 2.5], maximum=[7, 1000, 1], exclusiveMinimum=[-1, 0.5],
            exclusiveMaximum=[9.5, 2, 12], multipleOf=[2, 0.5, 0.01, 7, 5000],
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


#: refusals of a schema that has no value at all
NOTHING = r"allows nothing|no value that ends"


def check(seed: int, caplog: pytest.LogCaptureFixture) -> str:
    """Try one random schema in each use; return why it was refused, if it was."""
    schema = Schemas(seed).root()
    for use in (*USES, "many", "among"):
        try:
            paths = dropped(schema, caplog)
        except Refused as e:
            assert re.search(NOTHING, e.message), e.message
            return e.message
        constraints = [p for p in paths if not p.endswith(".format")]
        if use in STRICT and constraints:
            with pytest.raises(Refused) as e:
                mask_of(schema, use)
            path = e.value.message.partition(": ")[0]
            assert path.replace("tools[0].function.parameters", "schema") in constraints
            continue
        reduced = without(schema, paths)
        for i in range(2):
            check_value(schema, use, 7 * seed + i, reduced)
    return ""


def test_random_schemas(full: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Forced, strict and as a format of the answer."""
    seeds = range(300) if full else range(40)
    refused = [why for seed in seeds if (why := check(seed, caplog))]
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
    """They are named in the log; a strict schema is refused by their path."""
    schema = around(inner)
    paths = dropped(schema, caplog)
    assert paths == [f"schema.properties.a.{keyword}"]
    if use == "strict":
        with pytest.raises(Refused, match=re.escape(f"properties.a.{keyword}: ")) as e:
            mask_of(schema, use)
        assert (e.value.status, e.value.param) == (400, "tools")
        return
    reduced = without(schema, paths)
    for seed in range(3):
        check_value(schema, use, seed, reduced)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("notes", CASES["annotations"])
def test_annotations(notes: dict[str, Any], use: str, caplog: pytest.LogCaptureFixture) -> None:
    schema = around({"type": ["string", "integer"], "maxLength": 60, **notes})
    reduced = around({"type": ["string", "integer"], "maxLength": 60})
    for seed in range(2):
        check_value(schema, use, seed, reduced)
    paths = dropped(schema, caplog)
    assert {p.rpartition(".")[2] for p in paths} <= {"format"}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("inner", "modern"), CASES["translated"])
def test_other_spellings(inner: Any, modern: Any, use: str) -> None:
    """They hold as the same in today's spelling; nothing is dropped."""
    for seed in range(4):
        check_value(around(inner), use, seed, around(modern))
    assert not log_dropped.cache_info().currsize


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("inner", "why"), CASES["impossible"])
def test_schemas_that_allow_nothing(inner: Any, why: str, use: str) -> None:
    with pytest.raises(Refused, match=re.escape(why)) as e:
        mask_of(around(inner), use)
    assert e.value.status == 400


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
            assert f"{where}.properties.a.uniqueItems: " in got.json()["error"]["message"]
        named = ".properties.a.uniqueItems: " in caplog.text
        assert named == (schema is wrong and not strict)
