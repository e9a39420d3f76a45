"""vLLM's server over an engine, as clients see it; tests of both servers are in test_client.py."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import jsonschema
import openai
import pytest
from serving import CHUNK, ROWS, Served

from tests.serve.running import MAX_SEQ, NAME, eventually
from tests.serve.test_client import CALL, SCHEMA, TOOL, ask, formed, joined, said

IGNORE = {"ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(
    client: openai.OpenAI, served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("<|channel>", "thought\n", "hmm\n", "<channel|>", "hello", "<turn|>")
    served.dictate(monkeypatch, *words)
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    got = ask(client, max_tokens=60, stream=stream, extra_body=body)
    if stream:
        deltas = [c.choices[0].delta for c in got if c.choices]
        thought = "".join(getattr(d, "reasoning", None) or "" for d in deltas)
        content = "".join(d.content or "" for d in deltas)
    else:
        message = got.choices[0].message
        thought, content = message.model_extra["reasoning"], message.content
    assert (thought.strip(), content) == ("hmm", "hello")


def test_a_call_end_to_end(
    client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's tool call is parsed, its result is sent, and the model answers."""
    served.dictate(monkeypatch, *CALL, "<|tool_response>")
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    got = ask(client, messages=messages, tools=[TOOL], max_tokens=60).choices[0]
    (call,) = got.message.tool_calls
    assert (got.finish_reason, call.function.name) == ("tool_calls", "f")
    assert json.loads(call.function.arguments) == {"a": 3}
    served.dictate(monkeypatch, "four", "<turn|>")
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "4"},
    ]
    got = ask(client, messages=messages, tools=[TOOL], max_tokens=60).choices[0]
    assert (got.finish_reason, got.message.content) == ("stop", "four")


#: Lark grammar of a call in the model's native format, with control tokens by name
NATIVE = """start: <|tool_call> "call:f{a:" NUMBER "}" <tool_call|> <|tool_response>
NUMBER: /[1-9][0-9]?/
"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_grammar(client: openai.OpenAI, stream: bool) -> None:
    """A grammar, not the script, makes random weights generate a call; vLLM's parser reads it."""
    body = {"structured_outputs": {"grammar": NATIVE}}
    given = {"tools": [TOOL], "max_tokens": 60, "temperature": 1, "extra_body": body}
    numbers = set()
    for seed in range(4):
        found = said(ask(client, **given, seed=seed, stream=stream), stream)
        (call,) = found["calls"]
        assert (found["finish"], call.function.name) == ("tool_calls", "f")
        numbers.add(json.loads(call.function.arguments)["a"])
    assert numbers <= {*range(1, 100)} and len(numbers) > 1


def test_calls_are_not_forced(client: openai.OpenAI) -> None:
    """vLLM's parser of this format treats `required` as `auto` (docs/vllm.md)."""
    got = ask(client, tools=[TOOL], tool_choice="required", max_tokens=8).choices[0]
    assert not got.message.tool_calls and got.message.content


def test_schemas_beside_texts(client: openai.OpenAI) -> None:
    """The grammar of one sequence does not constrain others of the batch."""
    alone = ask(client, max_tokens=40, extra_body=IGNORE).choices[0].message.content
    found: dict[int, Any] = {}

    def one(i: int) -> None:
        given = {"response_format": formed(SCHEMA), "temperature": 1.5, "seed": i} if i % 2 else {}
        limit = 300 if i % 2 else 40
        body = {} if i % 2 else IGNORE
        found[i] = ask(client, max_tokens=limit, extra_body=body, **given).choices[0]

    _all(one, 8)
    for i, choice in found.items():
        if i % 2 == 0:
            assert choice.message.content == alone
        elif choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert any(found[i].finish_reason == "stop" for i in (1, 3, 5, 7))


def test_a_long_prompt_beside_streams(client: openai.OpenAI, served: Served) -> None:
    """While a prompt of many chunks is prefilled, a stream gets a token for each chunk; tokens that
    are part of a character give no event."""
    words = "ab" * (MAX_SEQ // 2 - 40)
    chunks = len(served.ids(words)) // CHUNK
    times: list[float] = []
    stop = threading.Event()

    def stream() -> None:
        with ask(client, stream=True, max_tokens=500, extra_body=IGNORE) as chunks:
            for _ in chunks:
                times.append(time.monotonic())
                if stop.is_set():
                    return

    thread = threading.Thread(target=stream)
    thread.start()
    eventually(lambda: len(times) > 3)
    begun = time.monotonic()
    given = {"model": NAME, "prompt": words, "max_tokens": 1, "temperature": 0}
    client.completions.create(**given)
    ended = time.monotonic()
    stop.set()
    thread.join()
    assert chunks >= 8 and sum(begun < t < ended for t in times) >= chunks // 2


def test_readers_that_leave_free_their_rows(client: openai.OpenAI, served: Served) -> None:
    """Clients of ROWS streams disconnect, twice; all slots are free afterwards."""
    for _ in range(2):
        streams = [ask(client, stream=True, max_tokens=600, extra_body=IGNORE) for _ in range(ROWS)]
        for s in streams:
            next(iter(s))
        for s in streams:
            s.close()
    eventually(lambda: not served.busy)
    assert served.metric("kv_cache_usage_perc") == 0
    assert ask(client).choices


def test_streams_say_what_wholes_do(client: openai.OpenAI) -> None:
    found: dict[int, str] = {}

    def one(i: int) -> None:
        given = {"seed": i, "temperature": 1, "max_tokens": 30}
        found[i] = joined(ask(client, stream=True, **given))["content"]

    _all(one, 2 * ROWS)
    for i, text in found.items():
        got = ask(client, seed=i, temperature=1, max_tokens=30).choices[0].message.content
        assert text == got


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
#: path, fields, and the accepted statuses
REFUSED: tuple[tuple[str, dict[str, Any], tuple[int, ...]], ...] = (
    ("/v1/completions", {"prompt": "ab", "prompt_logprobs": 1}, (400,)),
    ("/v1/completions", {"prompt": "ab", "cache_salt": "mine"}, (400,)),
    ("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 1}, (400,)),
    ("/v1/completions", {"prompt": "a" * MAX_SEQ * 2}, (400,)),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}]}, (400,)),
    ("/v1/embeddings", {"input": "ab"}, (400, 404, 501)),
    ("/pooling", {"input": "ab"}, (400, 404, 501)),
    ("/classify", {"input": "ab"}, (400, 404, 501)),
)


def test_what_is_refused(served: Served) -> None:
    with served.client() as client:
        for path, fields, statuses in REFUSED:
            given = {} if "input" in fields else {"max_tokens": 2, "temperature": 0}
            got = client.post(path, json={"model": NAME, **given, **fields})
            assert got.status_code in statuses, got.text
            assert "messages" not in fields or "multimodal" in got.text.lower(), got.text
        body = {"model": NAME, "prompt": "ab", "max_tokens": 2, "temperature": 0}
        assert client.post("/v1/completions", json=body).status_code == 200


def _all(one: Any, count: int) -> None:
    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
