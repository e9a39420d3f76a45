"""Constraints of an answer's text under every field's name, over both paths; schemas that have no
end or are large; a head that is continued; a budget of reasoning tokens."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import jsonschema
import llguidance
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g4ir.backends import background_mask
from g4ir.serve import grammar
from g4ir.serve.http_errors import Refused
from g4ir.serve.request_schema import CONSTRAINTS, JSON, Constraint
from tests.cases import read_table
from tests.serve.running import NAME, Running, eventually
from tests.serve.test_calls import ENDS, free, grammars, names, tool, vocabulary, walk
from tests.serve.test_client import HI, ask, joined
from tests.spies import spy

DIGITS = "[0-9]{3}"
CASES = read_table("serve/constraints.yaml")
#: field, value, and a regular expression of the texts that it allows
HELD: list[tuple[str, Any, str]] = CASES["held"]
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
    text: str = vocabulary().tokenizer.decode([t for t in tokens if t not in vocabulary().strings])
    return text


WRONG: list[tuple[dict[str, Any], str]] = [
    *CASES["wrong"],
    ({"grammar": "root ::= " + "(" * 5000}, "Lark or GBNF"),
    ({"grammar": "x" * 70_000}, "too long"),
    ({"guided_json": '{"a":' * 5000}, "levels"),
    ({"json_schema": {"enum": ["x" * 70_000]}}, "more than 65536 characters"),
]


@pytest.mark.parametrize(("body", "says"), WRONG)
def test_constraints_that_are_refused(served: Running, body: dict[str, Any], says: str) -> None:
    for path, base in (("chat/completions", {"messages": HI}), ("completions", {"prompt": "a"})):
        with served.client() as client:
            text = json.dumps({**base, "stream": True, **body})  # half a character as its escape
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
    with pytest.raises(openai.BadRequestError, match="forced call"):
        ask(client, **given, tool_choice="required")


def members(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def test_schemas_without_an_end(client: openai.OpenAI) -> None:
    for schema in CASES["endless"]:
        with pytest.raises(openai.BadRequestError, match="leads round to itself"):
            ask(client, extra_body={"guided_json": schema})
    for schema in CASES["ending"]:
        for seed in range(3):
            mask = grammars().text(Constraint("f", JSON, schema), thinking=False, inside=False)
            json.loads(said(walk(mask, seed, patience=5)))


NODES = st.sampled_from([{"$ref": f"#/$defs/{i}"} for i in range(4)] + [{"type": "null"}])
DEFS = st.one_of(
    NODES,
    st.lists(NODES, min_size=1, max_size=2).map(lambda u: {"anyOf": u}),
    NODES.map(lambda n: {**members(x=n), "required": ["x"]}),
    NODES.map(lambda n: {"type": "array", "items": n, "minItems": 1, "maxItems": 1}),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(DEFS, min_size=4, max_size=4), st.integers(0, 1 << 20))
def test_no_reference_breaks_an_answer_off(defs: list[Any], seed: int) -> None:
    """Whatever refers to what: refused, or followed without an error of the grammar."""
    schema = {"$ref": "#/$defs/0", "$defs": {str(i): d for i, d in enumerate(defs)}}
    try:
        mask = grammars().text(Constraint("f", JSON, schema), thinking=False, inside=False)
    except Refused as e:
        assert "leads round" in e.message
        return
    row, ends = list[int](), {vocabulary().controls[t] for t in ENDS}
    while len(row) < 40 and not ends & {*row[-1:]}:
        tokens = free(mask, row)
        row.append(tokens[seed % len(tokens)])
    if ends & {*row[-1:]}:
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

    def slow(mask: Any, row: Any) -> None:
        time.sleep(0.5 if row.started else 0)

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
