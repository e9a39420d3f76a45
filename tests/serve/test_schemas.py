"""Schemas of tools and of answers: whatever a grammar allows is valid against all of a schema but
the constraints that no grammar keeps.

Constraints of an answer's text under every field's name, over both paths; schemas that have no end
or are large; a head that is continued; a budget of reasoning tokens.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise
from typing import Any

import jsonschema
import llguidance
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.validators import extend

from g4ir.backends import background_mask
from g4ir.serve import grammar
from g4ir.serve.http_errors import Refused
from g4ir.serve.json_schema import log_dropped
from g4ir.serve.request_schema import CONSTRAINTS, JSON, Constraint
from g4ir.serve.tool_grammar import called
from tests.cases import read_table
from tests.serve.running import NAME, Running, eventually
from tests.serve.test_calls import (
    CLOSING,
    ENDS,
    SIZE,
    free,
    grammars,
    ids,
    names,
    read,
    tool,
    vocabulary,
    walk,
)
from tests.serve.test_client import HI, ask, joined
from tests.spies import spy

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
NOTHING, UNKEPT = r"allows nothing|no finite value", r"is not supported"


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


DIGITS = "[0-9]{3}"
TABLE = read_table("serve/constraints.yaml")
#: field, value, and a regular expression of the texts that it allows
HELD: list[tuple[str, Any, str]] = TABLE["held"]
MORE = {"temperature": 1.3, "max_tokens": 40, "n": 2, "seed": 7}
PATHS = ("chat", "thinking", "completions", "stream")


@pytest.mark.parametrize(
    ("path", "name", "value", "allowed"), [(PATHS[i % 4], *held) for i, held in enumerate(HELD)]
)
def test_constraints(client: openai.OpenAI, path: str, name: str, value: Any, allowed: str) -> None:
    """Random weights say anything, and still only what the constraint allows."""
    body = {name: value}
    if path == "completions":
        got = client.completions.create(model=NAME, prompt="ab", extra_body=body, **MORE)
        found = [(c.text, c.finish_reason) for c in got.choices]
    elif path == "stream":
        chunks = [*ask(client, extra_body=body, **{**MORE, "stream": True})]
        found = [(j["content"], j["finish"]) for j in (joined(chunks, i) for i in range(2))]
    else:
        thinking = {"chat_template_kwargs": {"enable_thinking": path == "thinking"}}
        got = ask(client, extra_body={**body, **thinking}, **MORE)
        found = [(c.message.content, c.finish_reason) for c in got.choices]
    for text, finish in found:
        assert finish in ("stop", "length")
        assert finish == "length" or re.fullmatch(allowed, text, re.S), text


def test_the_bytes_of_tokens() -> None:
    """As llguidance reads them of tokenizer.json; ids without a token have none."""
    size = 520
    ours = grammar.Grammars(vocabulary(), size, [1])._tables
    library = llguidance.LLTokenizer(vocabulary().tokenizer.to_str(), n_vocab=size, eos_token=[1])
    assert [ours.decode_bytes([i]) for i in range(size)] == [
        library.decode_bytes([i]) for i in range(size)
    ]
    special = {i for i in range(size) if ours.is_special_token(i)}
    assert {*vocabulary().strings} <= special
    assert special <= {i for i in range(size) if library.is_special_token(i)}


@pytest.mark.parametrize(("name", "value", "allowed"), HELD)
def test_every_walk_is_allowed(name: str, value: Any, allowed: str) -> None:
    constraint = CONSTRAINTS[name](value, name)
    for seed in range(3):
        mask = grammars().text(constraint, thinking=False, inside=False)
        assert re.fullmatch(allowed, said(walk(mask, seed)), re.S)


def said(tokens: list[int]) -> str:
    return vocabulary().tokenizer.decode([t for t in tokens if t not in vocabulary().strings])


WRONG: list[tuple[dict[str, Any], str]] = [
    *TABLE["wrong"],
    ({"grammar": "root ::= " + "(" * 5000}, "Lark or GBNF"),
    ({"grammar": "x" * 70_000}, "more than 16384 characters"),
    ({"guided_json": '{"a":' * 5000}, "levels"),
    ({"json_schema": {"enum": ["x" * 70_000]}}, "more than 65536 characters"),
]


@pytest.mark.parametrize(("body", "says"), WRONG)
def test_constraints_that_are_refused(served: Running, body: dict[str, Any], says: str) -> None:
    for path, base in (("chat/completions", {"messages": HI}), ("completions", {"prompt": "a"})):
        with served.client() as client:
            text = json.dumps({**base, "stream": True, **body})  # lone surrogates as escapes
            kind = {"Content-Type": "application/json"}
            got = client.post(f"/v1/{path}", content=text, headers=kind)
        assert got.status_code == 400 and says in got.json()["error"]["message"], got.text
        assert got.json()["error"]["param"].partition(".")[0] in body


def test_constraints_beside_tools(client: openai.OpenAI) -> None:
    """Those of JSON allow a call instead; others need tools that cannot be called."""
    given: dict[str, Any] = {"tools": [tool("f", {})], "extra_body": {"regex": DIGITS}}
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        ask(client, **given)
    got = ask(client, **given, tool_choice="none")
    assert re.fullmatch(DIGITS, got.choices[0].message.content)
    with pytest.raises(openai.BadRequestError, match="forces a call"):
        ask(client, **given, tool_choice="required")


def members(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def test_schemas_without_an_end(client: openai.OpenAI) -> None:
    for schema in TABLE["endless"]:
        with pytest.raises(openai.BadRequestError, match="always leads to itself"):
            ask(client, extra_body={"guided_json": schema})
    for schema in TABLE["ending"]:
        for seed in range(3):
            mask = grammars().text(Constraint("f", JSON, schema), thinking=False, inside=False)
            json.loads(said(walk(mask, seed, patience=5)))


NODES = st.sampled_from([{"$ref": f"#/$defs/{i}"} for i in range(4)] + [{"type": "null"}])
PARTS = st.one_of(
    NODES,
    st.lists(NODES, min_size=1, max_size=2).map(lambda u: {"anyOf": u}),
    NODES.map(lambda n: {**members(x=n), "required": ["x"]}),
    NODES.map(lambda n: {"type": "array", "items": n, "minItems": 1, "maxItems": 1}),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(PARTS, min_size=4, max_size=4), st.integers(0, 1 << 20))
def test_no_reference_breaks_an_answer_off(defs: list[Any], seed: int) -> None:
    """Whatever refers to what: refused, or followed without an error of the grammar."""
    schema = {"$ref": "#/$defs/0", "$defs": {str(i): d for i, d in enumerate(defs)}}
    try:
        mask = grammars().text(Constraint("f", JSON, schema), thinking=False, inside=False)
    except Refused as e:
        assert "leads to itself" in e.message
        return
    row, ends = list[int](), {vocabulary().controls[t] for t in ENDS}
    while len(row) < 40 and not ends & {*row[-1:]}:
        tokens = free(mask, row)
        row.append(tokens[seed % len(tokens)])
    if ends & {*row[-1:]}:
        with suppress(RecursionError):  # jsonschema follows an `anyOf` with a reference to itself
            jsonschema.validate(json.loads(said(row)), schema)


def optional(count: int) -> dict[str, Any]:
    return members(**{f"p{i}": {"type": "boolean"} for i in range(count)})


def opened(served: Running) -> dict[str, int]:
    """Biases by which an object is not ended at once."""
    return {str(served.ids("}")[0]): -100, str(served.ids('"')[0]): 100}


def test_many_optional_properties(client: openai.OpenAI, served: Running) -> None:
    count = 1500
    body = {"json_schema": optional(count)}
    got = ask(client, extra_body=body, max_tokens=12, logit_bias=opened(served), temperature=1)
    answer = got.choices[0]
    assert re.match(r'\{\s*"p[0-9]', answer.message.content)
    assert answer.finish_reason == "length" or json.loads(answer.message.content)
    mask = grammars().text(Constraint("f", JSON, optional(count)), thinking=False, inside=False)
    assert names(mask, '{"p3":true,"p9":') >= {"t", "f"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_is_given_up(
    client: openai.OpenAI, served: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The answer ends with an error, and not as if it were complete."""
    monkeypatch.setattr(grammar, "MAX_ITEMS", 100)
    body = {"json_schema": optional(300)}
    given = {"extra_body": body, "max_tokens": 20, "logit_bias": opened(served)}
    with pytest.raises(openai.APIError, match=r"json_schema: the grammar fails after \d+") as e:
        [*ask(client, **given, stream=True)] if stream else ask(client, **given)
    assert e.value.param == "json_schema"


@pytest.mark.parametrize("body", [{}, {"regex": DIGITS}])
@pytest.mark.parametrize("limit", [0, 5])
def test_thoughts_end_at_their_budget(
    client: openai.OpenAI, served: Running, limit: int, body: dict[str, Any]
) -> None:
    begins = served.server.prompts.vocabulary.controls["<|channel>"]  # type: ignore[union-attr]
    given = {"thinking_token_budget": limit, "chat_template_kwargs": {"enable_thinking": True}}
    bias = {str(begins): 60, **{str(i): 30 for i in served.ids("z")}}
    more = {"logit_bias": bias, "extra_body": {**given, **body}}
    for choice in ask(client, max_tokens=40, n=2, temperature=1, **more).choices:
        thought = choice.message.model_extra.get("reasoning_content") or ""
        assert len(thought) <= limit
        assert not body or re.fullmatch(DIGITS, choice.message.content)


AMBIGUOUS = "start: s\ns: s s | s s s | /[a-z]/\n"


def test_slow_mask(client: openai.OpenAI, served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside masks of half a second each, other answers come as ever."""

    def slow(mask: grammar.FullMask) -> None:
        time.sleep(0.5 if mask.matcher else 0)

    spy(monkeypatch, grammar.FullMask, "_words", slow)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(lambda: ask(client, extra_body={"grammar": AMBIGUOUS}, max_tokens=6))
        eventually(lambda: served.scheduler.num_running)
        times = [time.monotonic() for _ in ask(client, stream=True, max_tokens=40)]
        assert max(b - a for a, b in pairwise(times)) < 0.4
        assert len(held.result().choices[0].message.content) == 6


def test_timeouts(client: openai.OpenAI, served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_mask, "MAX_S", 0.01)
    with pytest.raises(openai.APIError, match=r"grammar: the mask .* after \d+ tokens.*simplify"):
        body = {"grammar": AMBIGUOUS.replace("start: s", 'start: s "!"')}
        ask(client, extra_body=body, max_tokens=500, logit_bias={str(served.ids("!")[0]): -100})
    assert ask(client, extra_body={"regex": DIGITS}, max_tokens=8).choices[0].message.content
