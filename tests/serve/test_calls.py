"""Forced calls are read back as those that are declared (random schemas are in test_schemas.py)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import copy
from functools import cache
from typing import Any

import jsonschema
import openai
import pytest

from g4ir.chat import Reader, TokenStream, Vocabulary
from g4ir.serve.grammar import FullMask, Grammars, LazyMask, Mask
from g4ir.serve.http_errors import Refused
from g4ir.serve.request_schema import JSON, Constraint
from g4ir.serve.tool_grammar import called, grammar_of
from tests.cases import read_table
from tests.serve.running import chat_tokenizer
from tests.serve.test_client import SCHEMA, ask, formed, said

CASES = read_table("serve/calls.yaml")
SIZE = 512
ENDS = ("<eos>", "<turn|>", "<|tool_response>")
#: what a walk that has become long takes first
CLOSING = (*ENDS, "<tool_call|>", '<|"|>', "}", "]", "channel")


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(chat_tokenizer())


@cache
def grammars() -> Grammars:
    return Grammars(vocabulary(), SIZE, [vocabulary().controls[t] for t in ENDS])


def tool(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def free(mask: Mask, row: Sequence[int]) -> list[int]:
    """The tokens that may follow."""
    words = copy(mask).mask(row)
    if words is None:
        return [*range(SIZE)]
    view = words.view("uint32")
    return [i for i in range(SIZE) if view[i // 32] >> (i % 32) & 1]


def walk(
    mask: Mask,
    seed: int,
    begun: Sequence[int] = (),
    patience: int = 60,
    ends: Sequence[str] = ENDS,
    closing: Sequence[str] = CLOSING,
) -> list[int]:
    """A random answer, which after some tokens hurries to its end."""
    draw, row = random.Random(seed), [*begun]
    word = vocabulary().tokenizer.id_to_token
    stops = {vocabulary().controls[t] for t in ends}
    while not stops & {*row[-1:]}:
        tokens = free(mask, row)
        assert tokens and len(row) < 4000, row
        final = [t for t in tokens if word(t) in closing and (len(word(t)) > 1 or len(tokens) < 99)]
        hurry = final and (len(row) > patience or draw.random() < 0.2)
        first = min(final, key=lambda t: closing.index(word(t)), default=0)
        row.append(first if hurry else draw.choice(tokens))
    return row


def read(tokens: Sequence[int], tools: Any) -> Any:
    """What a reader makes of an answer."""
    stream, reader = TokenStream(vocabulary()), Reader(tools)
    for token in tokens:
        reader.feed_tokens(stream.push(token))
    reader.feed_tokens(stream.flush())
    return reader.finish()


NEEDS = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}


def held(schema: Any = NEEDS, thinking: bool = False, inside: bool = False, **more: Any) -> Mask:
    functions = called([tool("f", schema, strict=True)], None, False)
    return grammars().calls(functions, thinking, inside, **{"many": True, **more})


def ids(*words: str) -> list[int]:
    controls, plain = vocabulary().controls, vocabulary().plain
    parts = [[controls[word]] if word in controls else plain(word) for word in words]
    return [i for part in parts for i in part]


def names(mask: Mask, *words: str) -> set[str]:
    found = {vocabulary().tokenizer.id_to_token(i) for i in free(mask, ids(*words))}
    return {chr(int(w[3:5], 16)) if w.startswith("<0x") else w for w in found}


def test_control_tokens_are_not_their_characters() -> None:
    head = ("<|tool_call>", "call:f{s:")
    inside = names(held(), *head, '<|"|>')
    assert not inside & (vocabulary().controls.keys() - {'<|"|>'}) and {"{", "}", "a"} <= inside
    spelled = (*head, '<|"|>', "<tool_call|>"[:-1], ">", '<|"|>', "}", "<tool_call|>")
    answer = read(ids(*spelled), [tool("f", NEEDS)])
    assert answer.tool_calls == [{"name": "f", "arguments": {"s": "<tool_call|>"}}]


def test_a_thought_is_free_of_all_but_control_tokens() -> None:
    thought = names(held(thinking=True), "<|channel>", "a")
    assert thought & vocabulary().controls.keys() == {"<channel|>"} and {"z", "}"} <= thought
    assert "<channel|>" in names(held(inside=True), "a")


def masks() -> dict[str, Mask]:
    flags = {k: {"type": "boolean"} for k in "abc"}
    one = {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]}
    tools = [tool("one", {}), tool("two", NEEDS), tool("three", NEEDS, strict=True)]
    return {
        "needs": held(),
        "one": held(many=False),
        "thinking": held(thinking=True),
        "members": held({"type": "object", "properties": flags, "required": ["b"]}),
        "empty": held({}),
        "untyped": held({"properties": {}}),
        "object": held({"type": "object"}),
        "json": held(content=Constraint("response_format", JSON, one)),
        "some": grammars().some_calls(called(tools[::2], None, True)),
    }


def test_what_may_follow() -> None:
    """Members come in their order, and a function without arguments has none."""
    made = masks()
    for name, words, follow in CASES["follow"]:
        assert names(made[name], *words) == {*follow}, (name, words)
    assert "▁" in names(made["json"], '{"k":') and "▁" not in names(made["json"], '{"k": ')
    assert isinstance(made["some"], LazyMask) and len(free(made["some"], ids("abc"))) == SIZE
    assert isinstance(made["needs"], FullMask)


@pytest.mark.parametrize("forms", CASES["one_of"])
def test_forms_of_which_one_holds(forms: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"oneOf": forms}}, "required": ["a"]}
    for seed in range(8):
        answer = read(walk(held(schema), seed), [tool("f", schema)])
        assert answer.tool_calls and not answer.content
        for call in answer.tool_calls:
            jsonschema.validate(call["arguments"], schema)


def test_schemas_that_are_too_large() -> None:
    tower: Any = {"type": "boolean"}
    for _ in range(14):
        tower = {"type": "object", "properties": dict.fromkeys("ab", tower)}
    leaves = {"enum": ["x" * (1 << 20)]}, {"pattern": "(" * 3000 + ")" * 3000}
    for schema in (tower, *({"properties": {"a": leaf}} for leaf in leaves)):
        with pytest.raises(Refused) as e:
            held(schema)
        assert e.value.status == 400 and len(e.value.message) < 400


def test_a_tokenizer_without_calls() -> None:
    with pytest.raises(Refused) as e:
        grammar_of(called([tool("f", {})], None, False), {"<|tool_call>": 1})
    assert e.value.status == 400 and "<tool_call|>" in e.value.message
    assert json.dumps(e.value.body())


@pytest.mark.parametrize("number", range(len(CASES["forced"])))
def test_forced_calls(client: openai.OpenAI, number: int) -> None:
    """Random weights say anything, and still they call what is declared, as it is declared."""
    word = {"type": "string", "maxLength": 6}
    parameters = {"type": "object", "properties": {"w": word}, "required": ["w"]}
    schemas = {"f": SCHEMA, "g": parameters}
    _, fields, functions, count = CASES["forced"][number]
    stream, thinking = number % 2 == 0, number in (1, 2)
    body = {"chat_template_kwargs": {"enable_thinking": thinking}}
    given: dict[str, Any] = {"tools": [tool(n, s) for n, s in schemas.items()]}
    given |= {"max_tokens": 300, "n": 3}
    bias = {"logit_bias": {str(i): 10 for i in range(7, 9)}} if thinking else {}
    given |= {**fields, **bias, "temperature": 1.2, "seed": 4, "stream": stream}
    got = ask(client, **given, extra_body=body)
    chunks = [*got] if stream else got
    found = [f for i in range(3) if (f := said(chunks, stream, i))["finish"] != "length"]
    for f in found:
        calls = [(c.function.name, c.function.arguments) for c in f["calls"]]
        assert (f["finish"], f["content"]) == ("tool_calls", "") and calls
        assert len(calls) == 1 or count == "many"
        for function, arguments in calls:
            assert function in functions
            jsonschema.validate(json.loads(arguments), schemas[function])
    assert found


@pytest.mark.parametrize("word", ["{", "<|tool_call>"])
def test_a_schema_beside_tools(client: openai.OpenAI, word: str) -> None:
    """The answer is JSON of the schema or a call."""
    given: dict[str, Any] = {"response_format": formed(SCHEMA), "parallel_tool_calls": False}
    given |= {"tools": [tool("f", SCHEMA, strict=True)], "logit_bias": {str(ids(word)[0]): 100}}
    (choice,) = ask(client, **given, max_tokens=400, temperature=1.2).choices
    called = choice.message.tool_calls
    text = called[0].function.arguments if called else choice.message.content
    jsonschema.validate(json.loads(text), SCHEMA)
    assert choice.finish_reason == ("stop" if word == "{" else "tool_calls")
