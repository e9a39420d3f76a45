"""Requests of a table, and how they are answered (requests.yaml says what a row has)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from tests.cases import covers
from tests.serve.running import MAX_SEQ, NAME, Running

BASE = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
JSON = {"Content-Type": "application/json"}
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
#: what `fields` of a path are beside; those of others are beside a chat's
BESIDE: dict[str, dict[str, Any]] = {"/v1/responses": {"input": "Hi"}, "/v1/completions": {}}
LONGEST = "some words, " * 20_000
#: what stands for a value
WORDS = {"MODEL": NAME, "XS": "x" * 700, "LONG": "long " * MAX_SEQ, "FIVES": [5] * MAX_SEQ}
WORDS |= {"LONGEST": LONGEST, "FLAMINGO": f"🦩{LONGEST}"}
RAW = {"LARGE": b" " * ((32 << 20) + 1), "NOT UTF-8": b"\xff\xfe"}


def cases(rows: Iterable[dict[str, Any]]) -> list[Any]:
    """The rows as parameters of a test; `chat` and `completion` are fields of their paths."""
    out = []
    for row in rows:
        short = next((name for name in PATHS if name in row), None)
        more = {"post": PATHS[short], "fields": row[short]} if short else {}
        out.append(pytest.param(more | row, id=row["name"]))
    return out


def content(case: dict[str, Any]) -> bytes:
    """The body of a case."""
    if raw := case.get("raw"):
        return RAW.get(raw) or raw.replace("MODEL", NAME).encode()
    body = case["body"] if "body" in case else BESIDE.get(case["post"], BASE) | case["fields"]
    text = json.dumps({k: v for k, v in body.items() if v is not None})
    for word, value in WORDS.items():
        text = text.replace(f'"{word}"', json.dumps(value))
    return text.encode()


def answer(r: Running, case: dict[str, Any]) -> httpx.Response:
    """What a server answers."""
    method = next(m for m in ("get", "options", "post") if m in case)
    headers = {name: value.encode() for name, value in (JSON | case.get("headers", {})).items()}
    path, body = case[method].replace("MODEL", NAME), content(case) if method == "post" else None
    with r.client() as client:
        return client.request(method, path, content=body, headers=headers)


def check(r: Running, case: dict[str, Any]) -> None:
    """The answer has all that the case says of it; an error is one in the form of its API."""
    got, status, path = answer(r, case), case.get("status", 200), case.get("post", "")
    assert got.status_code == status, got.text
    assert not [text for text in case.get("says", ()) if not re.search(text, got.text)], got.text
    for name, value in case.get("sent", {}).items():
        assert re.fullmatch(value, got.headers.get(name, "")), got.headers
    assert "has" not in case or covers(got.json(), case["has"]), got.text
    if status == 200 or "options" in case:  # a preflight's refusal is plain text
        assert '"error"' not in got.text
        return
    error, names = got.json()["error"], {"message", "type", "param", "code"}
    if path.startswith("/api/"):  # Ollama's
        error, names = {"message": error}, {"message"}
    elif "/v1/messages" in path:
        assert got.json()["type"] == "error"
        names = {"message", "type"}
    assert error.keys() == names and error["message"]
    assert "Traceback" not in error["message"] and "/tmp" not in error["message"]
    for name in {"type", "param", "code", "message"} & case.keys():
        assert error[name] == case[name], error
    assert ("retry-after" in got.headers) == (status == 503)
