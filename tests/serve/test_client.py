"""The Python client of OpenAI against a served engine, with words that the model is dictated.

It sees no more of a server than `Served` has: g4ir-vllm/tests/ runs the same tests over vLLM's.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.cases import read_table
from tests.serve.running import NAME, Served, eventually

HI = [{"role": "user", "content": "Hi"}]
CASES = read_table("serve/dictated.yaml")
TOOL, CALL = CASES[1]["fields"]["tools"][0], CASES[1]["words"][:-1]


def ask(client: openai.OpenAI, **given: Any) -> Any:
    return client.chat.completions.create(
        **{"model": NAME, "messages": HI, "max_tokens": 8, "temperature": 0, **given}
    )


def joined(chunks: Any, index: int = 0) -> dict[str, Any]:
    """What the deltas of one choice make together, and how it ended."""
    out: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index == index:
                out["content"] += choice.delta.content or ""
                out["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
                for part in choice.delta.tool_calls or []:
                    _add_call(out["calls"], part)
                out["finish"] = choice.finish_reason or out["finish"]
    return out


def _add_call(calls: list[Any], part: Any) -> None:
    """Add a part of a call, which may come at once or in pieces."""
    if part.index == len(calls):
        calls.append(part.model_copy(deep=True))
        return
    whole = calls[part.index].function
    whole.arguments = (whole.arguments or "") + (part.function.arguments or "")


def test_a_chat(client: openai.OpenAI) -> None:
    got = ask(client)
    assert got.object == "chat.completion" and got.id.startswith("chatcmpl-") and got.model == NAME
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].finish_reason in ("stop", "length")
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert got.usage.completion_tokens == 8 or got.choices[0].finish_reason == "stop"
    assert [m.id for m in client.models.list()] == [NAME]


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=24)
    chunks = [*ask(client, max_tokens=24, stream=True, stream_options={"include_usage": True})]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert joined(chunks)["content"] == whole.choices[0].message.content
    assert joined(chunks)["finish"] == whole.choices[0].finish_reason
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1]) and len({c.id for c in chunks}) == 1


def said(got: Any, stream: bool, index: int = 0) -> dict[str, Any]:
    """What one choice says, whole or joined."""
    if stream:
        return joined(got, index)
    choice = got.choices[index]
    return {
        "content": choice.message.content or "",
        "reasoning_content": getattr(choice.message, "reasoning_content", None) or "",
        "calls": choice.message.tool_calls or [],
        "finish": choice.finish_reason,
    }


@pytest.mark.parametrize(
    ("case", "stream"),
    [
        pytest.param(case, stream, id=f"{case['name']}-{stream}")
        for case in CASES
        for stream in ([False] if "whole" in case else [False, True])
    ],
)
def test_what_is_dictated(
    client: openai.OpenAI,
    served: Served,
    case: dict[str, Any],
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served.dictate(monkeypatch, *case["words"])
    got = ask(client, **{"max_tokens": 90, "stream": stream, **case["fields"]})
    found = said(got, stream)
    assert len({c.id for c in found["calls"]}) == len(found["calls"])
    assert not stream or [c.index for c in found["calls"]] == [*range(len(found["calls"]))]
    found["calls"] = [[c.function.name, json.loads(c.function.arguments)] for c in found["calls"]]
    empty: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish": "stop"}
    assert found == {name: case.get(name, default) for name, default in empty.items()}
    if found["reasoning_content"] and not stream:
        reasoning = got.usage.completion_tokens_details.reasoning_tokens
        assert 0 < reasoning < got.usage.completion_tokens
    eventually(lambda: not served.busy)


LONG = ("call:f{a:", "3", ",text:", '<|"|>', "some words of a text", " and more" * 3, '<|"|>', "}")


def test_arguments(client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("<|tool_call>", *LONG, "<tool_call|>", "<|tool_response>")
    served.dictate(monkeypatch, *words)
    (whole,) = ask(client, max_tokens=90, tools=[TOOL]).choices[0].message.tool_calls
    served.dictate(monkeypatch, *words)
    chunks = [*ask(client, max_tokens=90, tools=[TOOL], stream=True)]
    deltas = [c.choices[0].delta.tool_calls for c in chunks]
    parts = [part for found in deltas for part in found or []]
    assert parts[0].id and parts[0].function.name == "f"
    assert len(parts) > 6 and not any(p.id or p.function.name for p in parts[1:])
    assert "".join(p.function.arguments for p in parts) == whole.function.arguments
    assert joined(chunks)["finish"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut(
    client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """At each length: no control tokens in the content, and the head of the arguments."""
    whole = '{"a": 3, "text": "some words of a text and more and more and more"}'
    for most in (2, 9, 14, 20, 40):
        served.dictate(monkeypatch, "<|tool_call>", *LONG, "<tool_call|>", "<|tool_response>")
        found = said(ask(client, max_tokens=most, tools=[TOOL], stream=stream), stream)
        assert (found["content"], found["finish"]) == ("", "length")
        assert [c.function.name for c in found["calls"]] == ["f"] * (most > 8)
        assert all(whole.startswith(c.function.arguments) for c in found["calls"])


def test_stop_ids(client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    b = served.ids("b")
    served.dictate(monkeypatch, "aabaa")
    got = ask(client, max_tokens=60, extra_body={"stop_token_ids": b})
    assert got.usage.completion_tokens == 3 and got.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client: openai.OpenAI, stream: bool) -> None:
    got = ask(client, logprobs=True, top_logprobs=3, stream=stream, extra_body={"ignore_eos": True})
    if stream:
        entries = [e for c in got if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    else:
        entries = got.choices[0].logprobs.content
    assert len(entries) == 8
    for e in entries:
        assert len(e.top_logprobs) == 3 and e.logprob <= 0
        assert e.top_logprobs[0].logprob == pytest.approx(e.logprob)  # greedy
        assert e.bytes == e.top_logprobs[0].bytes


def test_several_answers_and_seeds(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        got = ask(client, n=3, seed=seed, temperature=1.5, max_tokens=12)
        assert [c.index for c in got.choices] == [0, 1, 2]
        return [c.message.content for c in got.choices]

    first = texts(5)
    assert first == texts(5) != texts(6) and len({*first}) == 3
    chunks = [*ask(client, n=3, seed=5, temperature=1.5, max_tokens=12, stream=True)]
    assert [joined(chunks, i)["content"] for i in range(3)] == first


def test_biases_and_penalties(client: openai.OpenAI, served: Served) -> None:
    (q,) = served.ids("q")
    got = ask(client, logit_bias={str(q): 100})
    assert got.choices[0].message.content == "q" * 8
    got = ask(client, logit_bias={str(q): 100}, frequency_penalty=2, presence_penalty=2)
    assert got.choices[0].message.content.startswith("q")
    body = {"repetition_penalty": 1.2, "top_k": 5, "min_p": 0.1, "min_tokens": 8}
    assert ask(client, top_p=0.9, extra_body=body).usage.completion_tokens == 8


GREEDY = {"model": NAME, "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_completions(client: openai.OpenAI) -> None:
    one = client.completions.create(prompt="ab", logprobs=2, **GREEDY)
    assert one.object == "text_completion" and one.id.startswith("cmpl-")
    read = one.choices[0].logprobs
    assert len(read.tokens) == len(read.token_logprobs) == len(read.text_offset) == 6
    assert all(1 <= len(t) <= 2 for t in read.top_logprobs) and read.text_offset[0] == 0
    stream = client.completions.create(prompt="ab", stream=True, **GREEDY)
    assert "".join(c.choices[0].text for c in stream) == one.choices[0].text


def test_several_answers_to_several_prompts(client: openai.OpenAI) -> None:
    one = client.completions.create(prompt="ab", **GREEDY).choices[0].text
    several = client.completions.create(prompt=["cd", "ab"], n=2, **GREEDY)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.choices[2].text == several.choices[3].text == one


def test_what_is_known_of_a_prompt_is_told(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "cached words " * 9}, *HI]
    first = ask(client, messages=messages).usage
    again = ask(client, messages=messages).usage
    assert again.prompt_tokens == first.prompt_tokens
    assert again.prompt_tokens_details.cached_tokens >= first.prompt_tokens // 2


NUMBER, LETTER = {"type": "integer", "maximum": 99, "minimum": 0}, {"enum": ["x", "y"]}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": NUMBER, "b": LETTER}}
SCHEMA |= {"required": ["a", "b"], "additionalProperties": False}


def formed(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
