"""The Responses API by the client of OpenAI, and the Messages API as its documents say it.

Each kind of request, good and bad, by its status; and bodies of noise.

Ollama's API, whole and as lines of JSON; its own clients are in tests/clients.

Log-probabilities of prompts: echo, prompt_logprobs and no new tokens, as evaluators ask them.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import g4ir
from g4ir.chat import TokenStream, prompt
from g4ir.engine import prefill
from g4ir.generate import tokenizer as engine_tokenizer
from g4ir.serve import request_schema
from g4ir.serve.auth import Auth
from g4ir.serve.http_errors import Refused
from g4ir.serve.protocols import messages, ollama, responses
from g4ir.serve.protocols.parts import JsonText
from g4ir.serve.request_schema import CHAT, COMPLETIONS, parsed, read_fields
from tests.cases import read_table
from tests.serve.exchange import BASE, JSON, answer, cases, check
from tests.serve.running import (
    MAX_SEQ,
    NAME,
    Running,
    chat_engine,
    chat_tokenizer,
    eventually,
    ready,
)
from tests.serve.test_calls import vocabulary
from tests.serve.test_media import data, picture
from tests.spies import spy

CASES = read_table("serve/protocols.yaml")
EVENTS = TypeAdapter[Any](ResponseStreamEvent)


def asked(client: openai.OpenAI, **given: Any) -> Any:
    return client.responses.create(
        **{"model": NAME, "input": "Hi", "max_output_tokens": 90, "temperature": 0, **given}
    )


def bare(item: Any) -> dict[str, Any]:
    """An item without ids."""
    return {k: v for k, v in item.items() if k not in ("id", "call_id", "encrypted_content")}


@pytest.mark.parametrize("case", cases(CASES["responses"]))
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
        return client.post(path, content=json.dumps(body))  # lone surrogates as escapes


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


@pytest.mark.parametrize("case", cases(CASES["messages"]))
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
    the descriptions of a namespace and its tools; a grammar in the schema of its tool; no turn of
    an empty instruction."""
    readers = {"messages": messages.read, "responses": responses.read, "ollama": ollama.chat}
    found = readers[case["protocol"]](case["given"])
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


STATUSES = read_table("serve/requests.yaml")
KEY = b"open-sesame"


@pytest.fixture(scope="module")
def keyed(engine_folder: Path) -> Iterator[Running]:
    """A server with a key and small limits."""
    gate = Auth((b"another", KEY), ("localhost",), max_body=4096)
    with ready(engine_folder, gate) as r:
        yield r


@pytest.mark.parametrize("case", cases([*STATUSES, *CASES["refused"]]))
def test_a_request(
    case: dict[str, Any],
    served: Running,
    keyed: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if case.get("server") == "draining":
        monkeypatch.setattr(served.server, "draining", True)
    check(keyed if case.get("server") == "keyed" else served, case)
    assert "sesame" not in caplog.text


def test_fields_of_other_servers() -> None:
    for name, (neutral, way) in request_schema.REFUSED.items():
        asks = next(value for value in (True, False, "on", 3) if value not in neutral)
        for table, base in ((CHAT, BASE), (COMPLETIONS, {"prompt": "a"})):
            for value in (None, *neutral):
                assert read_fields({**base, name: value}, table).keys() == base.keys()
            with pytest.raises(Refused) as e:
                read_fields({**base, name: asks}, table)
            assert (e.value.status, e.value.param, e.value.code) == (400, name, "not_supported")
            assert way in e.value.message


def test_unknown_fields(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_schema, "_LOGGED", set())
    for _ in range(2):
        read_fields({**BASE, "temprature": 2, "store": True, "n": 1}, CHAT)
    assert [r.args for r in caplog.records] == [("'temprature'",)]


def test_a_body_in_parts_is_measured_too(keyed: Running) -> None:
    headers = {**JSON, "Authorization": f"Bearer {KEY.decode()}"}
    with keyed.client() as client:
        got = client.post("/v1/chat/completions", content=iter([b" " * 1024] * 64), headers=headers)
    assert got.status_code == 413


@pytest.mark.parametrize(("head", "status"), [("", 200), ("Host: evil.example\r\n", 403)])
def test_a_health_check_of_http_1_0(served: Running, head: str, status: int) -> None:
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 30) as s:
        s.sendall(f"GET /health HTTP/1.0\r\n{head}\r\n".encode())
        assert s.recv(64).startswith(f"HTTP/1.1 {status}".encode())


LONG = [c for c in STATUSES if c["name"].startswith("too_long")]


@pytest.mark.parametrize("case", cases(LONG))
def test_long_texts(case: dict[str, Any], served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    for module in (prompt, engine_tokenizer):
        spy(monkeypatch, module, "text_ids", lambda _, texts, *__: seen.extend(map(len, texts)))
    said = answer(served, case).json()["error"]["message"]
    assert f"the context of {MAX_SEQ} tokens" in said and max(seen, default=0) < 1000


@settings(max_examples=30)
@given(st.text(), st.integers(1, 4))
def test_a_text_of_as_many_tokens_as_fit_has_a_length_that_fits(text: str, room: int) -> None:
    tokenizer = chat_tokenizer()
    (ids,) = prompt.text_ids(tokenizer, [text])
    if len(ids) <= room + 1:
        prompt.Vocabulary(tokenizer).check_length(len(text), room, "a text", cheap=0)


MANY = {"[]": (70_000, "objects and lists"), "{}": (70_000, "objects and lists")}
MANY |= {'""': (300_000, "strings"), "1": (2_200_000, "values")}


@pytest.mark.parametrize("value", MANY)
def test_too_many_values(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", None)
    count, words = MANY[value]
    body = f'{{"messages": [{",".join([value] * count)}]}}'
    with pytest.raises(Refused, match=rf"the body has more than \d+ {words}'"):
        parsed(body.encode())


@pytest.mark.parametrize("text", ["[{," * 100_000, '"' * 600_000, "\\" * 300_000 + '"[' * 99_999])
def test_brackets_inside_a_text_are_text(text: str) -> None:
    assert parsed(json.dumps({"prompt": text}).encode()) == {"prompt": text}


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(["auto", "user", "json_schema", "\ud800", "data:image/png;base64,AA=="]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["role", "content", "type", "function", "url"]), inner),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*CHAT, *COMPLETIONS, "odd"]), VALUES, max_size=6))
def test_any_values_are_read_or_refused(body: dict[str, Any]) -> None:
    for table in (CHAT, COMPLETIONS):
        try:
            found = read_fields(body, table)
        except Refused as e:
            assert e.status == 400 and json.dumps(e.body())
        else:
            assert {*found} <= {*table}


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from([*CHAT, "odd"]), VALUES, max_size=4), st.integers(0, 400))
def test_noise_is_refused_and_the_server_lives(
    served: Running, body: dict[str, Any], cut: int
) -> None:
    whole = json.dumps(BASE | body, allow_nan=True).encode()
    with served.client() as client:
        for raw in (whole, whole[:cut]):
            got = client.post("/v1/chat/completions", content=raw, headers=JSON)
            assert got.status_code in (200, 400, 404), (raw, got.text)
        assert client.get("/health").status_code == 200


DEEP = 100_000
NONE = ("[" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, '{"a":' + "[" * 80 + "]" * 80 + "}")
NONE += ('{"temperature": 1e999}', '{"seed": ' + "9" * 5000 + "}", '{"a": Infinity}', "", '"a"')


def test_bodies_that_are_no_object() -> None:
    for raw in NONE:
        with pytest.raises(Refused) as e:
            parsed(raw.encode())
        assert e.value.status == 400 and len(e.value.message) < 300


HI = [{"role": "user", "content": "Hi"}]
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration")


def send(r: Running, path: str, **body: Any) -> httpx.Response:
    """Ask as curl -d does, whose Content-Type is that of a form."""
    with r.client(headers={"content-type": "application/x-www-form-urlencoded"}) as client:
        return client.post(f"/api/{path}", content=json.dumps({"model": NAME, **body}))


def streamed(r: Running, path: str, **body: Any) -> list[Any]:
    got = send(r, path, **body)
    assert got.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in got.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all(datetime.fromisoformat(line["created_at"]) for line in lines)
    return lines


@pytest.mark.parametrize("case", cases(CASES["ollama"]))
def test_chats(served: Running, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    served.dictate(monkeypatch, *case["words"])
    body = {"messages": HI, **case["fields"]}
    whole = send(served, "chat", stream=False, **body).json()
    assert whole["message"] == {"role": "assistant", **case["message"]}
    *lines, last = streamed(served, "chat", **body)
    said = [line["message"] for line in lines]
    for field in ("content", "thinking"):
        assert "".join(m.get(field, "") for m in said) == case["message"].get(field, "")
    calls = [c for m in said for c in m.get("tool_calls", ())]
    assert calls == case["message"].get("tool_calls", [])
    for end in (whole, last):
        assert end["model"] == NAME and end["done_reason"] == case.get("reason", "stop")
        assert end["eval_count"] > 0 and all(end[name] >= 0 for name in COUNTS)
        assert end["total_duration"] >= end["prompt_eval_duration"] > 0


def test_generate(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is a turn of a chat; `raw` is a completion: texts of OpenAI's paths."""
    options = {"temperature": 0, "num_predict": 12, "num_ctx": 512, "repeat_last_n": 64}
    with served.client() as client:
        body = {"messages": [{"role": "system", "content": "s"}, *HI], "max_tokens": 12}
        chat = client.post("/v1/chat/completions", json=body | {"temperature": 0}).json()
        raw = client.post(
            "/v1/completions", json={"prompt": "Hi", "max_tokens": 12, "temperature": 0}
        )
    whole = send(served, "generate", prompt="Hi", system="s", stream=False, options=options).json()
    assert whole["response"] == chat["choices"][0]["message"]["content"]
    assert whole["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
    lines = streamed(served, "generate", prompt="Hi", raw=True, options=options)
    assert "".join(x["response"] for x in lines) == raw.json()["choices"][0]["text"]
    for path, empty in (
        ("generate", {"response": ""}),
        ("chat", {"message": {"role": "assistant", "content": ""}}),
    ):
        loaded = send(served, path, keep_alive=0).json()
        assert (
            loaded["done_reason"] == "load" and loaded["done"] and empty.items() <= loaded.items()
        )


# --- log-probabilities of prompts --------------------------------------------------------------

TEXTS = ["some words of a text and more", "ünï🦩"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "engine"
    return chat_engine(folder, all_logits=True)


@pytest.fixture(scope="module")
def evaluated(folder: Path) -> Iterator[Running]:
    with ready(folder) as r:
        yield r


def complete(r: Running, **given: Any) -> Any:
    with r.client() as client:
        got = client.post("/v1/completions", json={"model": NAME, "max_tokens": 0, **given})
    assert got.status_code == 200, got.text
    return got.json()


def check_offsets(read: Any, text: str) -> None:
    """Each token begins in the text where its offset says; tokens of bytes, where their character
    does."""
    starts, tokens = read["text_offset"], read["tokens"]
    assert starts == sorted(starts) and starts[0] >= 0 and starts[-1] <= len(text)
    for i, (start, token) in enumerate(zip(starts, tokens)):
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            continue
        visible = text.startswith(token, start)
        hidden = token in vocabulary().controls and start == [*starts, len(text)][i + 1]
        assert visible or hidden, (token, start)


def test_scores_of_echo(evaluated: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of `score`, in chunks of any size, with a generated token behind them or not,
    by text and by ids."""
    with g4ir.load_engine(folder) as engine:
        scores = g4ir.score(engine, TEXTS)
    ids = [list(s.ids) for s in scores]
    for most in (1 << 25, 512 * 5):
        monkeypatch.setattr(prefill, "CHUNK_LOGITS", most)
        for given_as in (TEXTS, ids):
            for count in (0, 1):
                more = {"echo": True, "logprobs": 2, "max_tokens": count}
                got = complete(evaluated, prompt=given_as, **more)
                assert got["usage"]["completion_tokens"] == count * 2
                for choice, s, text in zip(got["choices"], scores, TEXTS):
                    read = choice["logprobs"]
                    assert text in choice["text"] and choice["finish_reason"] == "length"
                    size = len(s.ids)
                    check_offsets(read, choice["text"])
                    assert len(read["tokens"]) == len(read["text_offset"]) == size + count
                    found = read["token_logprobs"][:size]
                    assert found[0] is None and read["top_logprobs"][0] is None
                    assert found[1:] == pytest.approx(s.logprobs[1:], abs=1e-4)
                    assert all(len(top) == 2 for top in read["top_logprobs"][1:])


def units() -> st.SearchStrategy[tuple[str, list[int]]]:
    """One character, or none, and the tokens that it is of."""
    index = vocabulary().tokenizer.token_to_id
    letters = st.sampled_from([(c, [index(c)]) for c in "abc:{"])
    controls = st.sampled_from([("", [i]) for i in sorted(vocabulary().strings)])
    wholes = st.characters(exclude_categories=["Cs"]).map(str.encode)
    broken = st.sampled_from([b"\xc2", b"\xe2\x82", b"\xf0\x9f\xa6", b"\xff"])
    raw = st.one_of(wholes, broken)
    tokens = raw.map(lambda r: (r.decode(errors="replace"), [index(f"<0x{b:02X}>") for b in r]))
    return st.one_of(letters, controls, tokens)


@given(st.lists(units(), max_size=12))
def test_offsets_of_any_tokens(drawn: list[tuple[str, list[int]]]) -> None:
    """Each token begins where its character does; a control token of an answer has none."""
    stream, starts, expected, pieces = TokenStream(vocabulary()), [], [], []
    for i, (_, ids) in enumerate(drawn):
        expected += [sum(len(c) for c, _ in drawn[:i])] * len(ids)
        for token in ids:
            pieces += stream.push(token)
            starts.append(stream.start)
    text = "".join(p.text for p in [*pieces, *stream.flush()] if not p.control)
    assert starts == expected and text == "".join(c for c, _ in drawn)


def test_prompt_logprobs(evaluated: Running) -> None:
    """By token id, as vLLM has them, in completions and in chats."""
    choice = complete(evaluated, prompt=TEXTS[0], prompt_logprobs=3)["choices"][0]
    assert choice["text"] == "" and choice["logprobs"] is None
    echoed = complete(evaluated, prompt=TEXTS[0], echo=True, logprobs=3)["choices"][0]
    rows, read = choice["prompt_logprobs"], echoed["logprobs"]
    assert rows[0] is None and len(rows) == len(read["tokens"])
    for row, token, value in zip(rows[1:], read["tokens"][1:], read["token_logprobs"][1:]):
        assert 3 <= len(row) <= 4
        assert [r["rank"] for r in row.values()][:3] == [1, 2, 3]
        assert any(r["decoded_token"] == token and r["logprob"] == value for r in row.values())
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "prompt_logprobs": 0}
    with evaluated.client() as client:
        got = client.post("/v1/chat/completions", json=body).json()
    assert len(got["prompt_logprobs"]) == got["usage"]["prompt_tokens"]
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_echo_of_a_text_alone(served: Running) -> None:
    """That needs no log-probabilities, and so no engine with --all-logits."""
    assert complete(served, prompt="some words", echo=True)["choices"][0]["text"] == "some words"
    got = complete(served, prompt="some words", echo=True, max_tokens=3, temperature=0)
    plain = complete(served, prompt="some words", max_tokens=3, temperature=0)
    assert got["choices"][0]["text"] == "some words" + plain["choices"][0]["text"]
