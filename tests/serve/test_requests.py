"""Each kind of request, good and bad, by its status; and bodies of noise."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from g4ir.chat import prompt
from g4ir.generate import tokenizer as engine_tokenizer
from g4ir.serve import request_schema
from g4ir.serve.auth import Auth
from g4ir.serve.http_errors import Refused
from g4ir.serve.request_schema import CHAT, COMPLETIONS, parsed, read_fields
from tests.cases import read_table
from tests.serve.running import MAX_SEQ, NAME, Running, chat_tokenizer, ready
from tests.spies import spy

CASES = read_table("serve/requests.yaml")
BASE = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
KEY = b"open-sesame"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def keyed(engine_folder: Path) -> Iterator[Running]:
    """A server with a key and small limits."""
    gate = Auth((b"another", KEY), ("localhost",), max_body=4096)
    with ready(engine_folder, gate) as r:
        yield r


def content(case: dict[str, Any]) -> bytes:
    """The body of a case."""
    if "raw" in case:
        raws = {"LARGE": b" " * ((32 << 20) + 1), "NOT UTF-8": b"\xff\xfe"}
        raw: str = case["raw"]
        return raws.get(raw) or raw.replace("MODEL", NAME).encode()
    body = case["body"] if "body" in case else case.get("completion") or BASE | case["chat"]
    text = json.dumps({k: v for k, v in body.items() if v is not None})
    longest = "some words, " * 20_000
    words = {"MODEL": NAME, "LONG": "long " * MAX_SEQ}
    words |= {"LONGEST": longest, "FLAMINGO": f"🦩{longest}"}
    for word, value in words.items():
        text = text.replace(f'"{word}"', f'"{value}"')
    return text.encode()


def answer(r: Running, case: dict[str, Any]) -> httpx.Response:
    given = {**JSON, **case.get("headers", {})}
    headers = {name: value.encode() for name, value in given.items()}
    with r.client() as client:
        if path := case.get("get"):
            return client.get(path.replace("MODEL", NAME), headers=headers)
        path = "/v1/completions" if "completion" in case else "/v1/chat/completions"
        return client.post(case.get("post", path), content=content(case), headers=headers)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_request(
    case: dict[str, Any],
    served: Running,
    keyed: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    where = case.get("server")
    if where == "draining":
        monkeypatch.setattr(served.server, "draining", True)
    got = answer(keyed if where == "keyed" else served, case)
    assert got.status_code == case["status"] and "sesame" not in caplog.text, got.text
    if got.status_code == 200:
        assert '"error"' not in got.text
        return
    error = got.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    assert "Traceback" not in error["message"] and "/tmp" not in error["message"]
    for name in {"param", "code", "message"} & case.keys():
        assert error[name] == case[name], error
    assert ("retry-after" in got.headers) == (got.status_code == 503)


def test_the_numbers_of_a_prompt_that_is_too_long(served: Running) -> None:
    body = BASE | {"messages": [{"role": "user", "content": "x" * 700}], "stream": True}
    with served.client() as client:
        error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert f"has {MAX_SEQ} tokens" in error["message"] and " 4 new ones" in error["message"]
    with served.client() as client:
        body = {"prompt": [5] * MAX_SEQ, "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 400
        assert client.post("/v1/completions", json=body | {"max_tokens": 1}).status_code == 200


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


@pytest.mark.parametrize("case", [c for c in CASES if c["name"].startswith("too_long")], ids=str)
def test_long_texts(case: dict[str, Any], served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    for module in (prompt, engine_tokenizer):
        spy(monkeypatch, module, "text_ids", lambda _, texts, *__: seen.extend(map(len, texts)))
    said = answer(served, case).json()["error"]["message"]
    assert f"than {MAX_SEQ} tokens can have" in said and max(seen, default=0) < 1000


@settings(max_examples=30)
@given(st.text(), st.integers(1, 4))
def test_a_text_of_as_many_tokens_as_fit_has_a_length_that_fits(text: str, room: int) -> None:
    tokenizer = chat_tokenizer()
    (ids,) = prompt.text_ids(tokenizer, [text])
    if len(ids) <= room + 1:
        prompt.Vocabulary(tokenizer).check_length(len(text), room, "a text", cheap=0)


MANY = {"[]": 70_000, "{}": 70_000, '""': 300_000, "1": 2_200_000}


@pytest.mark.parametrize("value", MANY)
def test_too_many_values(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", None)
    body = f'{{"messages": [{",".join([value] * MANY[value])}]}}'
    with pytest.raises(Refused, match="the body has more than"):
        parsed(body.encode())


@pytest.mark.parametrize("text", ["[{," * 100_000, '"' * 600_000, "\\" * 300_000 + '"[' * 99_999])
def test_brackets_inside_a_text_are_text(text: str) -> None:
    assert parsed(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_tokens_and_their_text(served: Running) -> None:
    with served.client() as client:
        got = client.post("/tokenize", json={"model": NAME, "prompt": "ab c"}).json()
        assert got["count"] == len(got["tokens"]) > 3 and got["max_model_len"] == MAX_SEQ
        text = client.post("/detokenize", json={"tokens": got["tokens"]}).json()["prompt"]
        assert text.endswith("ab c") and text.count("<bos>") == 1
        bare = {"prompt": "ab c", "add_special_tokens": False}
        assert client.post("/tokenize", json=bare).json()["tokens"] == got["tokens"][1:]
        for asked, count in ((bare, got["count"] - 1), ({"prompt": "<bos>ab c"}, got["count"])):
            body = {"model": NAME, "max_tokens": 1, **asked}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            assert usage["prompt_tokens"] == count
        chat = client.post("/tokenize", json={"messages": BASE["messages"]}).json()
        asked = client.post("/v1/chat/completions", json=BASE).json()
        assert chat["count"] == asked["usage"]["prompt_tokens"]
        text = client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
        assert text.startswith("<bos><|turn>user\nHi<turn|>")


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
