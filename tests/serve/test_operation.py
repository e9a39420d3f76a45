"""How a server is run: names, origins, a proxy's prefix, ids of requests, TLS.

Flags of `serve` from the command line, the environment and a file; formats of its log. API keys of
a file: limits of requests and tokens, and reading it again at a signal.

What /metrics tells, and that the documentation and the Grafana board know it. The load script
against a served tiny engine.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from g4ir.cli import parse
from g4ir.cli.serve import Serve
from g4ir.engine.scheduler import Scheduler
from g4ir.errors import InputError
from g4ir.serve.app import ANY_NAME, Server
from g4ir.serve.auth import Auth, read_keys, salt_of
from g4ir.serve.http_errors import Refused
from g4ir.serve.rate_limits import KeyLimits, RateLimits
from g4ir.serve.server import Address
from g4ir.ui import console
from tests.cases import TABLES, read_table
from tests.cli_tools import refused
from tests.serve.exchange import cases, check
from tests.serve.running import LOADING, NAME, WAIT, Running, eventually, ready
from tests.serve.test_media import sound
from tests.spies import spy

ROOT = Path(__file__).parents[2]
Lines = list[dict[str, Any]]
PATH = "/v1/chat/completions"
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


@pytest.mark.parametrize("case", cases(read_table("serve/operation.yaml")))
def test_a_request(operated: Running, case: dict[str, Any]) -> None:
    check(operated, case)


def test_any_name_is_none_of_the_models_own() -> None:
    server = Server(NAME, aliases=(ANY_NAME,))
    server._check_model("gpt-4o")
    assert server.names == [NAME] and server._check_model("x:y") == ""


def test_the_head_of_a_request_is_bounded(operated: Running) -> None:
    host, port = operated.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as s:
        s.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(OSError):
            for i in range(4000):
                s.sendall(b"X-%d: %s\r\n" % (i, b"a" * 1000))
    with operated.client() as client:
        assert client.get("/health", headers={"X-Long": "a" * 30000}).is_success


def test_requests_have_ids_and_a_line(operated: Running, lines: Lines) -> None:
    lines.clear()
    with operated.client(headers=BEARER) as client:
        got = client.post(PATH, json=CHAT, headers={"X-Request-Id": "mine-1"})
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
    assert [said[k] for k in head] == ["mine-1", "POST", PATH, 200]
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
    PATH: {"json": CHAT},
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
    if stream == "true" and path == "/v1/audio/transcriptions":
        return  # not streamed
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


#: option -> the default of its flag, and another value; of a switch, a list, a setting, a number
OPTIONS: dict[str, tuple[Any, Any]] = {
    "max-gap": (100.0, 7.5),
    "log-requests": (False, True),
    "served-name": (["a"], ["b", "c"]),
    "drain": (60.0, 3.0),
}
MEANS = ("flag", "environment", "file", "default")


def values_of(verb: Any) -> Any:
    """The fields of a verb and its parts, but which of them were given, and where."""

    def clean(value: Any) -> Any:
        items = value.items() if isinstance(value, dict) else ()
        skip = ("explicit", "config")
        return {k: clean(v) for k, v in items if k not in skip} if items else value

    return clean(asdict(verb))


def text(value: Any) -> str:
    listed = ",".join(value) if isinstance(value, list) else value
    return str(listed).lower() if isinstance(value, bool) else str(listed)


def parsed(
    tmp_path: Path, patch: pytest.MonkeyPatch, given: dict[str, dict[str, Any]], *words: str
) -> Serve:
    """`serve` with these values by each means."""
    flags = []
    for name, value in given.get("flag", {}).items():
        if name == "drain":
            flags += ["--set", f"drain={value}"]
        elif isinstance(value, list):
            flags += [w for v in value for w in (f"--{name}", v)]
        else:
            flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    for name, value in given.get("environment", {}).items():
        patch.setenv(f"G4IR_{name.replace('-', '_').upper()}", text(value))
    path = tmp_path / "serve.yaml"
    path.write_text("\n".join(f"{k}: {json.dumps(v)}" for k, v in given.get("file", {}).items()))
    file = ["--config", str(path)] if given.get("file") else []
    parser, values = parse(["serve", "engine", *flags, *file, *words])
    verb = parser.flags.make(values)
    assert isinstance(verb, Serve)
    return verb


@pytest.mark.parametrize("order", [*permutations(MEANS)], ids=" ".join)
def test_every_configuration_gives_the_same_server(
    order: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option gets its default by one of the means; all lower ones have another value."""
    names = [n for n in OPTIONS if n != "served-name" or order[2] != "default"]
    given: dict[str, dict[str, Any]] = {means: {} for means in MEANS}
    for name, means in zip(OPTIONS, order, strict=True):
        right, other = OPTIONS[name]
        switch = isinstance(right, bool) and means == "flag"  # no flag turns it off
        if means != "default" and name in names and not switch:
            given[means][name] = right
            for lower in MEANS[MEANS.index(means) + 1 : -1]:
                given[lower][name] = other
    plain = parsed(tmp_path, monkeypatch, {"flag": {"served-name": ["a"]}})
    words = () if "served-name" in names else ("--served-name", "a")
    assert values_of(parsed(tmp_path, monkeypatch, given, *words)) == values_of(plain)


def test_variables_and_keys_of_flags_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = {"host": "0.0.0.0", "max_body": "1", "page": "off", "random-weights": "7"}
    for name, value in tested.items():
        file = tmp_path / "c.yaml"
        file.write_text(f"{name}: {value}\n")
        _, by_file = parse(["serve", "engine", "--config", str(file)])
        with monkeypatch.context() as patch:
            patch.setenv(f"G4IR_{name.replace('-', '_').upper()}", value)
            _, by_variable = parse(["serve", "engine"])
        assert by_variable == {k: v for k, v in by_file.items() if k != "config"}
        assert len(by_variable) == 2


@pytest.mark.parametrize(("content", "message"), TABLES["server"]["config files"])
def test_files_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    assert message in refused("serve", "engine", "--config", path)


@pytest.mark.parametrize(("variable", "value", "message"), TABLES["server"]["variables"])
def test_variables_that_are_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=re.escape(message)):
        parse(["serve", "engine"])


def test_variables_that_are_not_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is spelled wrong is named; those of Kubernetes and of other parts are not."""
    for name in ("G4IR_ISA", "G4IR_SERVICE_HOST", "G4IR_PORT_8000_TCP", "G4IR_MAX_GPA"):
        monkeypatch.setenv(name, "1")
    _, values = parse(["serve", "engine"])
    assert values == {"models": ["engine"]}
    (line,) = [record.message for record in caplog.records]
    assert line == "G4IR_MAX_GPA: unknown key; did you mean G4IR_MAX_GAP?"


def test_formats_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        for name in ("text", "json", None):
            console.use_format(name)
            console.say("draining", "warning", running=2, path='a"b')
    finally:
        console.use_format(None)
    text, line, plain = capsys.readouterr().err.splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf'{time} WARNING draining running=2 path=a"b', text)
    values = json.loads(line)
    assert re.fullmatch(time, values.pop("time"))
    assert values == {"level": "warning", "message": "draining", "running": 2, "path": 'a"b'}
    assert plain == 'g4ir: warning: draining running=2 path=a"b'


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
            return client.post(PATH, json=CHAT)

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


# --- metrics ----------------------------------------------------------------------------------

LONG = CHAT | {"max_tokens": 400, "ignore_eos": True, "stream": True}


def families(r: Running) -> dict[str, Any]:
    with r.client() as client:
        text = client.get("/metrics").text
    return {f.name: f for f in text_string_to_metric_families(text)}


def samples(r: Running, name: str) -> dict[tuple[str, ...], float]:
    return {(*s.labels.values(),): s.value for s in families(r)[name].samples}


def test_every_metric_has_help_and_a_row_in_the_documentation(served: Running) -> None:
    """And none is of when a series began."""
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (?:gauge|counter|histogram) \| .* \| (.*) \|$", page, re.M)
    )
    names = dict[str, str]()
    for name, family in families(served).items():
        end = {"counter": "_total"}.get(family.type, "")
        assert len(family.documentation.split()) > 1
        assert not [s for s in family.samples if s.name.endswith("_created")]
        if name.startswith("g4ir_"):
            names[name.removeprefix("g4ir_") + end] = family.documentation
    assert names == rows


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool")
def test_promtool_accepts_the_metrics(served: Running) -> None:
    with served.client() as client:
        text = client.get("/metrics").text
    check = ["promtool", "check", "metrics"]
    done = subprocess.run(check, input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_board_asks_for_metrics_that_exist(served: Running) -> None:
    board = json.loads((ROOT / "docker" / "grafana.json").read_text())
    asked = {t["expr"] for p in board["panels"] for t in p["targets"]}
    named = {n for expr in asked for n in re.findall(r"(?:g4ir|process)_\w+", expr)}
    known = {f"{n}{end}" for n in families(served) for end in ("", "_total", "_bucket")}
    assert len(named) > 15 and named <= known


def test_the_kv_cache_and_responses(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's tokens are in use while it runs; responses count by path and status."""
    spy(monkeypatch, Scheduler, "step", lambda *_: time.sleep(0.02))
    with served.client() as client:
        before = samples(served, "g4ir_http_responses")
        client.post("/no/such/path")
        with client.stream("POST", PATH, json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            eventually(lambda: samples(served, "g4ir_kv_cache_tokens")[()] > 15)
            ratio = samples(served, "g4ir_kv_cache_usage_ratio")[()]
            assert 0 < ratio <= 1
        eventually(lambda: samples(served, "g4ir_kv_cache_tokens")[()] == 0)
        for key in (("other", "404"), (PATH, "200")):
            now = lambda key=key: samples(served, "g4ir_http_responses")[key]  # noqa: E731
            eventually(lambda key=key, now=now: now() == before.get(key, 0) + 1)
    (model,) = families(served)["g4ir_model_info"].samples
    assert (model.labels["name"], model.labels["max_batch"]) == (NAME, "4")


def load(*words: str) -> str:
    command = [sys.executable, str(ROOT / "bench" / "load.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_every_request_is_answered_and_counted(served: Running) -> None:
    lengths = ("--input", "4-40", "--output", "3-6")
    text = load(served.url, "--requests", "9", "--rate", "0", *lengths)
    assert re.match(r"9 requests in [\d.]+ s \(9 x 200\)\n", text)
    found = re.search(r"([\d.]+) sequences decoded at a time \((\d+) steps\)", text)
    assert found and 1 < float(found[1]) <= 4 and int(found[2]) >= 6
    for line in ("first text", "between texts", "whole answer"):
        assert re.search(rf"{line} +\d+ +\d+ +\d+", text), text
