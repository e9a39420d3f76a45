"""How a server is run: names, origins, a proxy's prefix, ids of requests, TLS."""

from __future__ import annotations

import http.client
import socket
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from g4ir.errors import InputError
from g4ir.serve.app import ANY_NAME, Server
from g4ir.serve.auth import Auth
from g4ir.serve.server import Address
from tests.cases import TABLES
from tests.serve.running import NAME, WAIT, Running, eventually, ready
from tests.serve.test_media import sound

Lines = list[dict[str, Any]]
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
KEY = b"open-sesame"
BEARER = {"Authorization": f"Bearer {KEY.decode()}"}
ORIGIN = "https://chat.example"


@pytest.fixture(scope="module")
def lines() -> Lines:
    return []


@pytest.fixture(scope="module")
def operated(engine_folder: Path, lines: Lines) -> Iterator[Running]:
    options = {"aliases": ("other",), "origins": (ORIGIN,), "root_path": "/llm"}
    gate = Auth((b"another", KEY), ("localhost",))
    log = lambda _, **values: lines.append(values)  # noqa: E731
    with ready(engine_folder, gate, options={**options, "log": log}) as r:
        yield r


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_prefix_needs_a_key_too(operated: Running, prefix: str) -> None:
    """A proxy may take its prefix away, or leave it."""
    with operated.client() as client:
        for path in ("/v1/models", "/metrics", "/server_info", "/v1/models/x"):
            assert client.get(prefix + path).status_code == 401, path
        assert client.post(f"{prefix}/v1/chat/completions", json=CHAT).status_code == 401
        assert client.post(f"{prefix}/v1/chat/completions", json=CHAT, headers=BEARER).is_success
        assert client.get(f"{prefix}/health").is_success and client.get(f"{prefix}/").is_success
        error = client.post(f"{prefix}/v1/messages", json={}, headers=BEARER).json()
        assert error["type"] == "error"  # in the form of its API


def test_the_head_of_a_request_is_bounded(operated: Running) -> None:
    host, port = operated.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as s:
        s.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(OSError):
            for i in range(4000):
                s.sendall(b"X-%d: %s\r\n" % (i, b"a" * 1000))
    with operated.client() as client:
        assert client.get("/health", headers={"X-Long": "a" * 30000}).is_success


def test_the_model_has_several_names(operated: Running) -> None:
    with operated.client(headers=BEARER) as client:
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == [NAME, "other"]
        assert client.get("/v1/models/other").json()["id"] == "other"
        for name, status in ((NAME, 200), ("other", 200), ("third", 404)):
            got = client.post("/v1/chat/completions", json={**CHAT, "model": name})
            assert got.status_code == status
            assert status != 200 or got.json()["model"] == name  # clients compare it
    other = Server(NAME, aliases=(ANY_NAME,))
    other._check_model("gpt-4o")
    assert other.names == [NAME]


@pytest.mark.parametrize(("path", "headers", "status"), TABLES["server"]["keys"])
def test_kinds_of_keys(operated: Running, path: str, headers: dict[str, str], status: int) -> None:
    with operated.client(headers=headers) as client:
        got = client.post(path, json=CHAT)
    assert got.status_code == status
    if status == 401:
        wanted = "Authorization: Bearer KEY" + (", or x-api-key: KEY" if "messages" in path else "")
        assert got.json()["error"]["message"].endswith(wanted)
        assert ("two different keys" in got.text) == (len(headers) == 2)


def test_pages_of_other_sites(operated: Running) -> None:
    asks = {"Access-Control-Request-Method": "POST"}
    asks |= {"Access-Control-Request-Headers": "authorization,content-type"}
    with operated.client() as client:
        path, own = "/v1/chat/completions", {"Origin": ORIGIN}
        got = client.options(path, headers={**own, **asks})
        assert got.is_success and got.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in got.headers["access-control-allow-headers"]
        got = client.post(path, json=CHAT, headers={**own, **BEARER})
        assert got.headers["access-control-allow-origin"] == ORIGIN
        other = {"Origin": "https://evil.example"}
        assert client.options(path, headers={**other, **asks}).status_code == 400
        got = client.post(path, json=CHAT, headers={**other, **BEARER})
        assert "access-control-allow-origin" not in got.headers


def test_requests_have_ids_and_a_line(operated: Running, lines: Lines) -> None:
    lines.clear()
    with operated.client(headers=BEARER) as client:
        got = client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine-1"})
        assert got.headers["x-request-id"] == got.headers["request-id"] == "mine-1"
        ids = set()
        for given in ("two words", "x" * 200, "é".encode()):
            body, own = {"input": "x", "background": True}, {"X-Request-Id": given}
            got = client.post("/v1/responses", json=body, headers=own)
            ids.add(got.headers["x-request-id"])
        assert len(ids) == 3 and all(i.startswith("req_") for i in ids)
        client.get("/health")
    said, *rest = lines
    head = ("id", "method", "path", "status")
    assert [said[k] for k in head] == ["mine-1", "POST", "/v1/chat/completions", 200]
    assert said["generated"] == 2 and said["prompt"] > 2
    assert said["end"] in ("length", "stop")
    assert {"cached", "queued_s", "first_token_s", "sent", "seconds"} <= said.keys()
    refused = ["POST", "/v1/responses", 400, "not_supported"]
    assert [[line[k] for k in (*head[1:], "end")] for line in rest] == [refused] * 3
    assert "Hi" not in str(lines)


class Held:
    """Allows any token, once the client has left."""

    def __init__(self) -> None:
        self.begun, self.left = Event(), Event()

    def mask(self, generated: Sequence[int]) -> None:
        self.begun.set()
        assert self.left.wait(WAIT)


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"json": CHAT},
    "/v1/completions": {"json": {"prompt": "Hi"}},
    "/v1/messages": {"json": CHAT},
    "/v1/responses": {"json": {"input": "Hi"}},
    "/v1/audio/transcriptions": {"data": {}, "files": {"file": ("clip.wav", sound())}},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_client_that_leaves(
    operated: Running, lines: Lines, path: str, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request ends before the next token, and the log says so."""
    prompts, held = operated.server.prompts, Held()
    assert prompts
    made = prompts._sampling
    monkeypatch.setattr(prompts, "_sampling", lambda *a: replace(made(*a), allowed=held))
    body, *files = ASKED[path].items()
    fields = {"stream": stream} if files else {"stream": stream == "true"}
    url, given = httpx.URL(operated.url + path), {body[0]: body[1] | fields, **dict(files)}
    asked = httpx.Request("POST", url, headers=BEARER, **given)
    lines.clear()
    there = http.client.HTTPConnection(url.host, url.port)
    there.request("POST", path, asked.read(), dict(asked.headers))
    assert held.begun.wait(WAIT)
    there.close()
    eventually(lambda: not operated.process.server_state.tasks)
    held.left.set()
    eventually(lambda: not operated.busy)
    (line,) = lines
    assert (line["method"], line["path"], line["end"]) == ("POST", path, "cancelled")
    assert line["status"] == (200 if stream == "true" else 499)


def test_what_tools_ask(operated: Running) -> None:
    with operated.client(headers=BEARER) as client:
        info = client.get("/server_info").json()
        assert info["names"] == [NAME, "other"] and info["limits"]["max_batch"] == 4
        assert info["build"]["backend"] == "reference" and info["media"]
        tokens = client.get("/tokenizer_info").json()
        assert (tokens["bos_token"], tokens["vocab_size"]) == ("<bos>", 512)
        rendered = client.post("/render", json={"messages": CHAT["messages"]}).json()
        same = client.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
        assert rendered["token_ids"] == same
        assert rendered["prompt"].startswith("<bos><|turn>user\nHi")
        assert client.post("/render", json={"prompt": "Hi"}).status_code == 400


def test_a_certificate(engine_folder: Path, tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    with ready(engine_folder, address=Address(port=0, tls=(cert, key))) as r:
        assert r.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=cert)
        assert httpx.get(f"{r.url}/health", verify=trusting).is_success
    for wrong in ((cert, None), (None, key), (cert, cert), (f"{cert}.none", key)):
        with pytest.raises(InputError, match="--tls-cert"):
            Address(tls=wrong)
