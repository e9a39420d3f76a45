"""Ollama's API, whole and as lines of JSON; its own clients are in tests/clients."""

from __future__ import annotations

import base64
import json
from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.cases import read_table
from tests.serve.running import NAME, Running
from tests.serve.test_media import picture

CASES = read_table("serve/protocols.yaml")
HI = [{"role": "user", "content": "Hi"}]
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration")


def post(r: Running, path: str, **body: Any) -> httpx.Response:
    """Ask as curl -d does, whose Content-Type is that of a form."""
    with r.client(headers={"content-type": "application/x-www-form-urlencoded"}) as client:
        return client.post(f"/api/{path}", content=json.dumps({"model": NAME, **body}))


def streamed(r: Running, path: str, **body: Any) -> list[Any]:
    got = post(r, path, **body)
    assert got.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in got.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all(datetime.fromisoformat(line["created_at"]) for line in lines)
    return lines


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in CASES["ollama"]])
def test_chats(served: Running, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    served.dictate(monkeypatch, *case["words"])
    body = {"messages": HI, **case["fields"]}
    whole = post(served, "chat", stream=False, **body).json()
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
    whole = post(served, "generate", prompt="Hi", system="s", stream=False, options=options).json()
    assert whole["response"] == chat["choices"][0]["message"]["content"]
    assert whole["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
    lines = streamed(served, "generate", prompt="Hi", raw=True, options=options)
    assert "".join(x["response"] for x in lines) == raw.json()["choices"][0]["text"]
    for path, empty in (
        ("generate", {"response": ""}),
        ("chat", {"message": {"role": "assistant", "content": ""}}),
    ):
        loaded = post(served, path, keep_alive=0).json()
        assert (
            loaded["done_reason"] == "load" and loaded["done"] and empty.items() <= loaded.items()
        )


def test_a_schema_an_image_and_answers_of_tools(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    for format in (schema, "json"):
        options = {"num_predict": 60, "temperature": 0}
        got = post(served, "chat", messages=HI, format=format, stream=False, options=options).json()
        if format is schema:
            assert json.loads(got["message"]["content"])["a"] in (1, 2)
        else:
            assert got["message"]["content"].lstrip().startswith("{")
    image = base64.b64encode(picture()).decode()
    plain = post(served, "generate", prompt="Hi", stream=False, options={"num_predict": 1}).json()
    with_image = post(
        served, "generate", prompt="Hi", images=[image], stream=False, options={"num_predict": 1}
    ).json()
    assert with_image["prompt_eval_count"] > plain["prompt_eval_count"] + 20
    call = {"function": {"name": "f", "arguments": {"a": 3}}}
    asked = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call, call], "thinking": "so"},
    ]
    answers = [
        {"role": "tool", "content": "12", "tool_name": "f"},
        {"role": "tool", "content": "13"},
    ]
    options = {"num_predict": 1}
    assert post(served, "chat", messages=[*asked, *answers], options=options).is_success
    got = post(served, "chat", messages=[*asked, *answers, answers[0]], options=options)
    assert got.status_code == 400 and "messages[4]: answers no tool call" in got.json()["error"]


@pytest.mark.parametrize(("path", "body", "status", "says"), CASES["ollama refused"])
def test_refused(served: Running, path: str, body: dict[str, Any], status: int, says: str) -> None:
    got = post(served, path, **body)
    assert (got.status_code, says in got.json()["error"]) == (status, True), got.text


def test_models(served: Running) -> None:
    with served.client() as client:
        assert client.get("/api/version").json()["version"]
        (tag,) = client.get("/api/tags").json()["models"]
        shown = client.post("/api/show", json={"model": f"{NAME}:latest"}).json()
        assert client.post("/api/show", json={"model": "other"}).status_code == 404
        form = {"origin": "https://evil.example"}
        got = client.post("/api/chat", json={"messages": HI}, headers=form)
        assert got.status_code == 403
    assert tag["name"] == tag["model"] == NAME and tag["size"] > 1000 and len(tag["digest"]) == 64
    assert shown["details"] == tag["details"] and shown["template"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 640
    assert {"completion", "tools", "thinking", "vision"} <= {*shown["capabilities"]}
