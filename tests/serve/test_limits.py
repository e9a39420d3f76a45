"""API keys of a file: limits of requests and tokens, and reading it again at a signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from g4ir.errors import InputError
from g4ir.serve.auth import Auth, read_keys, salt_of
from g4ir.serve.http_errors import Refused
from g4ir.serve.rate_limits import KeyLimits, RateLimits
from tests.cases import TABLES
from tests.cli_tools import refused
from tests.serve.running import LOADING, Running, eventually, ready

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.mark.parametrize(("content", "result"), TABLES["server"]["key files"])
def test_key_files(content: str, result: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    if isinstance(result, dict):
        keys = {k.encode(): KeyLimits(**v) for k, v in result.items()}
        assert read_keys(path) == keys
        return
    with pytest.raises(InputError, match=result):
        read_keys(path)


def test_a_minute() -> None:
    """Both refill steadily; other keys do not count; other limits begin anew, the same do not."""
    now = 0.0
    limits = RateLimits({"a": KeyLimits(requests=6), "b": KeyLimits(tokens=60)}, lambda: now)

    def wait(salt: str) -> str:
        with pytest.raises(Refused) as e:
            limits.check(salt)
        assert (e.value.status, e.value.code) == (429, "rate_limit_exceeded")
        return e.value.headers["Retry-After"]

    for _ in range(6):
        limits.check("a")
    assert wait("a") == "10"
    limits.check("b")
    limits.charge("b", 99)  # the last request may take more than is left
    assert wait("b") == "40"
    now = 9.0
    assert (wait("a"), wait("b")) == ("1", "31")
    now = 10.0
    limits.check("a")
    limits.replace({"a": KeyLimits(requests=6), "b": KeyLimits(tokens=61)})
    limits.check("b")
    assert wait("a") == "10"
    limits.check("nobody")


@pytest.fixture
def limited(engine_folder: Path, tmp_path: Path) -> Any:
    path = tmp_path / "keys"
    path.write_text("few requests=2\nsome tokens=30\nfree\n")
    options = {"key_file": str(path), "key_limits": KeyLimits(requests=1000)}
    with ready(engine_folder, Auth(hosts=("localhost",)), options=options) as r:
        r.server.read_keys()
        yield r


def test_limits_of_a_server(limited: Running) -> None:
    def ask(key: str) -> httpx.Response:
        with limited.client(headers={"Authorization": f"Bearer {key}"}) as client:
            assert client.get("/v1/models").is_success  # only requests with a body count
            return client.post(CHAT, json=BODY)

    limited.server.draining = True
    assert ask("few").status_code == 503  # does not count
    limited.server.draining = False
    assert [ask("few").status_code for _ in range(3)] == [200, 200, 429]
    for _ in range(2):  # 18 tokens of the prompt, 2 of the answer
        assert ask("some").is_success
    eventually(lambda: not limited.busy)
    got = ask("some")
    assert got.status_code == 429 and "30 tokens a minute" in got.text
    assert 1 <= int(got.headers["retry-after"]) <= 30
    assert ask("free").is_success
    assert limited.server.limits.limits[salt_of(b"free")] == KeyLimits(requests=1000)


def test_a_signal_reads_the_keys_again(engine_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old\n")
    words = ["--port", "0", "--api-key-file", str(path), "--log-format", "json"]
    command = [sys.executable, "-m", "g4ir.cli", "serve", str(engine_folder), *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    lines = (json.loads(line) for line in process.stderr)

    def said(word: str) -> dict[str, Any]:
        return next(line for line in lines if word in line["message"])

    try:
        url = said("listening")["message"].removeprefix("listening at ")
        said("ready")

        def allowed(key: str) -> bool:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.get(f"{url}/v1/models", headers=headers, timeout=LOADING).is_success

        assert allowed("old") and not allowed("new")
        path.write_text("new requests=5\nnewer\n")
        process.send_signal(signal.SIGHUP)
        assert said("keys read again")["keys"] == 2
        assert allowed("new") and not allowed("old")
        path.write_text("new request=5\n")
        process.send_signal(signal.SIGHUP)
        line = said("the keys stay as they are")
        assert line["level"] == "error" and f"{path}: key 1: expected requests=N" in line["message"]
        assert allowed("newer")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_limits_without_keys() -> None:
    said = refused("serve", "tiny-ple", "--set", "key_tokens=5")
    assert "give --api-key-file" in said
