"""The Responses API by the client of OpenAI, and the Messages API as its documents say it."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from g4ir.serve.protocols import messages, responses
from g4ir.serve.protocols.parts import JsonText
from tests.cases import read_table
from tests.serve.running import NAME, Running, eventually
from tests.serve.test_client import ask
from tests.serve.test_media import data, picture

CASES = read_table("serve/protocols.yaml")
EVENTS = TypeAdapter[Any](ResponseStreamEvent)


def asked(client: openai.OpenAI, **given: Any) -> Any:
    return client.responses.create(
        **{"model": NAME, "input": "Hi", "max_output_tokens": 90, "temperature": 0, **given}
    )


def bare(item: Any) -> dict[str, Any]:
    """An item without ids."""
    return {k: v for k, v in item.items() if k not in ("id", "call_id", "encrypted_content")}


def cases(protocol: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in CASES[protocol]]


@pytest.mark.parametrize("case", cases("responses"))
def test_responses(
    client: openai.OpenAI, served: Running, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and as a stream: the same items; each event is one of the client's types."""
    served.dictate(monkeypatch, *case["words"])
    whole = asked(client, **case["fields"])
    assert [bare(i) for i in whole.model_dump(exclude_unset=True)["output"]] == case["output"]
    assert whole.status == case.get("status", "completed")
    kinds = [tool["type"] for tool in case["fields"].get("tools", ())]
    assert [tool.type for tool in whole.tools] == [k for k in kinds if k != "web_search"]
    events = [*asked(client, stream=True, **case["fields"])]
    assert [e.sequence_number for e in events] == [*range(len(events))]
    dumped = [EVENTS.validate_python(e.model_dump(exclude_unset=True)).type for e in events]
    assert dumped[:2] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    last = events[-1].response.model_dump(exclude_unset=True)
    Response.model_validate(last)
    assert [bare(i) for i in last["output"]] == case["output"]
    check_events(events, last["output"])
    usage = whole.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    thought = any(i["type"] == "reasoning" for i in case["output"])
    assert (usage.output_tokens_details.reasoning_tokens > 0) == thought
    eventually(lambda: not served.busy)


def check_events(events: list[Any], output: list[Any]) -> None:
    """Every item is opened, said in pieces and closed, in this order, and is what is said last."""
    for index, item in enumerate(output):
        own = [e for e in events if getattr(e, "output_index", None) == index]
        assert own[0].type == "response.output_item.added" and own[0].item.id == item["id"]
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item.model_dump(exclude_unset=True) == item
        held = item["content"][0]["text"] if "content" in item else None
        text = held if held is not None else item.get("arguments", item.get("input"))
        assert "".join(e.delta for e in own if e.type.endswith(".delta")) == text


def test_responses_say_what_chats_say(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 1, "top_p": 0.9, "extra_body": {"seed": 7}}
    chat = ask(client, max_tokens=20, **fields)
    whole = asked(client, max_output_tokens=20, **fields)
    assert whole.output_text == chat.choices[0].message.content
    include = ["message.output_text.logprobs"]
    logprobs = asked(client, max_output_tokens=4, top_logprobs=2, include=include)
    found = logprobs.output[0].content[0].logprobs
    assert 0 < len(found) <= 4 and all(len(p.top_logprobs) == 2 for p in found)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_text(
    client: openai.OpenAI, served: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Not those of the reasoning before it, nor of control tokens."""
    served.dictate(monkeypatch, "<|channel>", "thought\nabc\n", "<channel|>", "xyz", "<turn|>")
    given: dict[str, Any] = {"include": ["message.output_text.logprobs"], "stream": stream}
    got = asked(client, reasoning={"effort": "low"}, **given)
    got = [*got][-1].response if stream else got
    assert [p.token for p in got.output[1].content[0].logprobs] == ["x", "y", "z"]


def test_a_call_that_was_cut_goes_back(client: openai.OpenAI) -> None:
    call = {"type": "function_call", "name": "f", "call_id": "c1", "arguments": '{"a": "so'}
    answer = {"type": "function_call_output", "call_id": "c1", "output": "cut"}
    items = [{"role": "user", "content": "Hi"}, {**call, "status": "incomplete"}, answer]
    assert asked(client, input=items, max_output_tokens=1).usage.output_tokens == 1


def test_a_schema_and_a_grammar_of_a_tool(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    assert json.loads(asked(client, text=form).output_text)["a"] in (1, 2)
    grammars = {"lark": 'start: "add " NUMBER\nNUMBER: /[0-9]{2}/', "regex": "add [0-9]{2}"}
    for syntax, definition in grammars.items():
        form = {"type": "grammar", "syntax": syntax, "definition": definition}
        tool = {"type": "custom", "name": "sum", "format": form}
        got = asked(client, tools=[tool], tool_choice={"type": "custom", "name": "sum"})
        assert got.output[0].type == "custom_tool_call" and got.output[0].name == "sum"
        head, number = got.output[0].input.split(" ")
        assert head == "add" and len(number) == 2 and number.isdigit()


@pytest.mark.parametrize("cut", [*range(1, 12)])
def test_the_text_of_a_json_object_in_pieces(cut: int) -> None:
    value = 'a "quoted"\n\ttext \\ of ünï🦩 {"input": 1}\x01'
    for text in (json.dumps({"input": value}, ensure_ascii=False), '{"input":"x", "b": 1}'):
        reader = JsonText("input")
        pieces = [reader.feed(text[i : i + cut]) for i in range(0, len(text), cut)]
        assert "".join(pieces) == json.loads(text)["input"] and reader.remainder() == ""
    assert JsonText("input").feed('{"other": 1}') == ""


def post(served: Running, path: str, **body: Any) -> httpx.Response:
    headers = {"anthropic-version": "2023-06-01", "content-type": "application/json"}
    with served.client(headers=headers) as client:
        return client.post(path, content=json.dumps(body))  # half a character as its escape


def message(served: Running, **given: Any) -> Any:
    base = {"model": NAME, "max_tokens": 90, "messages": [{"role": "user", "content": "Hi"}]}
    got = post(served, "/v1/messages", **{**base, "temperature": 0, **given})
    assert got.status_code == 200, got.text
    return got


def events_of(text: str) -> list[Any]:
    out = []
    for event in text.strip().split("\n\n"):
        kind, data = event.split("\n")
        out.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {out[-1]['type']}"
    return out


@pytest.mark.parametrize("case", cases("messages"))
def test_messages(served: Running, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and as a stream: the same blocks, from events in their order."""
    served.dictate(monkeypatch, *case["words"])
    whole = message(served, **case["fields"]).json()
    assert [bare(block) for block in whole["content"]] == case["content"]
    reason, by = case.get("reason", "end_turn"), case.get("stopped_by")
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, by)
    assert whole["type"] == "message" and whole["role"] == "assistant" and whole["model"] == NAME
    first, *events, delta, last = events_of(message(served, stream=True, **case["fields"]).text)
    assert first["type"] == "message_start" and first["message"]["content"] == []
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": by}
    assert last == {"type": "message_stop"}
    used = whole["usage"], delta["usage"]
    read, output = ([u[k] for u in used] for k in ("input_tokens", "output_tokens"))
    read = [n + u["cache_read_input_tokens"] for n, u in zip(read, used)]
    assert read == [first["message"]["usage"]["input_tokens"]] * 2 and output[0] == output[1]
    assert [bare(block) for block in together(events)] == case["content"]
    eventually(lambda: not served.busy)


def together(events: list[Any]) -> list[Any]:
    """The blocks that events make."""
    blocks, open_at, written = list[Any](), -1, ""
    for event in events:
        if event["type"] == "content_block_start":
            assert open_at < 0 and event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            open_at, written = event["index"], ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_at
            kind, text = event["delta"].popitem()
            if kind == "partial_json":
                written += text
            else:
                blocks[-1][kind] += text
        else:
            assert event == {"type": "content_block_stop", "index": open_at}
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(written)
            open_at = -1
    assert open_at < 0
    return blocks


@pytest.mark.parametrize("case", CASES["translated"], ids=lambda case: case["protocol"])
def test_bodies_as_chats(case: dict[str, Any]) -> None:
    """What a body becomes: tools' answers first, thoughts beside the text, a text to go on from;
    the descriptions of a namespace and its tools; a grammar in the schema of its tool."""
    read = {"messages": messages.read, "responses": responses.read}[case["protocol"]]
    found = read(case["given"])
    assert (found.body, found.positions) == (case["becomes"], case["places"])


def test_tokens_are_counted(served: Running) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    counted = post(served, "/v1/messages/count_tokens", model=NAME, messages=chat).json()
    many = post(served, "/v1/messages/count_tokens", model=NAME, messages=chat, max_tokens=32000)
    assert many.json() == counted
    whole = message(served, max_tokens=1).json()["usage"]
    assert counted == {"input_tokens": whole["input_tokens"] + whole["cache_read_input_tokens"]}


def test_a_picture(served: Running, client: openai.OpenAI) -> None:
    url = data("image/png", picture())
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    block = [{"type": "text", "text": "Hi"}, {"type": "image", "source": source}]
    seen = message(served, messages=[{"role": "user", "content": block}], max_tokens=2).json()
    part = {"type": "input_image", "image_url": url}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}, part]}]
    got = asked(client, input=items, max_output_tokens=2)
    usage = seen["usage"]
    assert got.usage.input_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"] > 60


@pytest.mark.parametrize("case", cases("refused"))
def test_refused(served: Running, case: dict[str, Any]) -> None:
    base: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]}
    base |= {"max_tokens": 4}
    base = {"/v1/responses": {"input": "Hi"}, "/v1/completions": {}}.get(case["path"], base)
    body = {k: v for k, v in {**base, **case["body"]}.items() if v is not None}
    got = post(served, case["path"], **body)
    error = got.json()["error"]
    assert (got.status_code, error["message"]) == (case.get("status", 400), case["message"])
    if case["path"] == "/v1/messages":
        kind = "not_found_error" if got.status_code == 404 else "invalid_request_error"
        assert got.json()["type"] == "error" and error["type"] == kind
    elif "param" in case:
        assert error["param"] == case["param"]


def test_failing_streams(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for form in (responses.ResponsesFormat, messages.MessageFormat):
        monkeypatch.setattr(form, "chunks", Mock(side_effect=RuntimeError("secret")))
    path, body = "/v1/responses", {"model": NAME, "input": "Hi", "stream": True}
    last = events_of(post(served, path, **body).text)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    last = events_of(message(served, stream=True).text)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert "secret" not in json.dumps(last)


def test_an_empty_instruction_is_no_turn(served: Running) -> None:
    """An empty text, an empty list and empty blocks say nothing."""
    turn = [{"role": "user", "content": "Hi"}]
    counts = set()
    block = {"type": "text", "text": ""}
    for system in (None, "", [], [block], [block, block]):
        body = {"messages": turn} | ({} if system is None else {"system": system})
        got = post(served, "/v1/messages/count_tokens", model=NAME, **body)
        counts.add(got.json()["input_tokens"])
    assert len(counts) == 1
    base = {"model": NAME, "input": "Hi", "max_output_tokens": 1}
    usages = [
        post(served, "/v1/responses", **base, **more).json()["usage"]["input_tokens"]
        for more in ({}, {"instructions": ""}, {"instructions": None})
    ]
    assert {*usages} == counts
