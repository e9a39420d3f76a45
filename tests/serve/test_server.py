"""The life of a server: loading, a full queue, signals, and what it counts and logs.
An embedding model beside a chat: /v1/embeddings, /v1/rerank, /api/embed, and both in one
process.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import openai
import pytest
import torch

import g4ir
from g4ir import Engine, Session, load_engine, load_spec
from g4ir.backends.reference import ReferenceBackend
from g4ir.errors import CheckError, InputError, MissingError, TrustError
from g4ir.serve import server
from g4ir.serve.auth import Auth, allowed_hosts
from g4ir.serve.embedding_model import EmbeddingModel
from g4ir.serve.http_errors import refusal
from g4ir.serve.media_sources import MediaFolder
from g4ir.serve.protocols.embeddings import MAX_TEXTS, METHOD
from tests.cases import TABLES
from tests.cli_tools import refused, tokenizer
from tests.engines import add_file
from tests.media_tools import media_files
from tests.serve.running import NAME, WAIT, Running, chat_tokenizer, eventually, ready, running
from tests.serve.test_client import HI, ask
from tests.serve.test_media import urls
from tests.spies import spy
from tests.test_embeddings import folder_of, media_checkpoint

CHAT = "/v1/chat/completions"
LONG = {"messages": HI, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
SHORT = LONG | {"max_tokens": 3}


@pytest.fixture
def narrow(engine_folder: Path) -> Iterator[Running]:
    """A server in whose queue one request may wait."""
    with ready(engine_folder, waiting=1) as r:
        yield r


@pytest.fixture
def gate(narrow: Running, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What steps of the narrow server wait for."""
    event, step = threading.Event(), narrow.scheduler.step
    monkeypatch.setattr(narrow.scheduler, "step", lambda: event.wait(WAIT) and step())
    return event


def failed(got: httpx.Response, status: int, code: str) -> httpx.Response:
    assert (got.status_code, got.json()["error"]["code"]) == (status, code), got.text
    return got


def connected(r: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(r.url.rpartition(":")[2])), WAIT)


def built(folder: Path, variant: str, tokenizer: str | None) -> Path:
    g4ir.build(variant, folder, backend="reference", random_weights=0, max_seq=64).close()
    return add_file(folder, "tokenizer.json", tokenizer) if tokenizer else folder


def test_while_the_engine_is_loading(engine_folder: Path) -> None:
    go = threading.Event()

    def loader() -> Engine:
        assert go.wait(WAIT)
        return load_engine(engine_folder)

    with running(loader) as r, r.client() as client:
        for got in (client.get("/health"), client.post(CHAT, json=SHORT)):
            assert failed(got, 503, "loading").headers["retry-after"] == "1"
        r.server.progress = "building e: 40 %"
        assert "40 %" in failed(client.get("/readyz"), 503, "loading").text
        assert client.get("/livez").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == NAME
        assert client.get("/metrics").status_code == 200
        go.set()
        eventually(lambda: client.get("/health").status_code == 200)
        assert client.get("/readyz").json() == client.get("/livez").json() == {"status": "ok"}
        assert client.post(CHAT, json=SHORT).status_code == 200


def test_a_full_queue(narrow: Running, gate: threading.Event) -> None:
    """A wait is told from the rate; several prompts are all taken, or none."""
    service = narrow.service
    with narrow.client() as client, ThreadPoolExecutor() as other:
        several = {"prompt": ["a", "b"], "max_tokens": 400}
        assert client.post("/v1/completions", json=several).status_code == 429
        gate.set()
        eventually(lambda: not service.waiting and not narrow.scheduler.busy)
        client.post(CHAT, json=SHORT)
        assert 0 < service.totals.row_s < WAIT
        gate.clear()
        waiting = other.submit(httpx.post, f"{narrow.url}{CHAT}", json=SHORT, timeout=WAIT)
        eventually(lambda: service.waiting == 1)
        for stream, row_s, told in ((False, 0.0, "1"), (True, 30.0, "8"), (True, 1e6, "60")):
            service.totals.row_s = row_s
            got = client.post(CHAT, json=SHORT | {"stream": stream})
            assert failed(got, 429, "queue_full").headers["retry-after"] == told
        gate.set()
        assert waiting.result().status_code == 200
        assert 'g4ir_rejected_total{reason="queue_full"} 4.0' in client.get("/metrics").text


def count(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)
    return float(found[1]) if found else 0.0


def test_the_tables_of_grammars_are_made_before_a_request(served: Running) -> None:
    """They hold the interpreter's lock for seconds."""
    prompts = served.server.prompts
    assert prompts and "_tables" in vars(prompts.grammars)


def test_counts(served: Running) -> None:
    with served.client() as client:
        before = client.get("/metrics").text
        client.post(CHAT, json=SHORT)
        after = client.get("/metrics").text

    grown = TABLES["server"]["grown"]
    for name, by in grown.items():
        assert count(after, name) - count(before, name) == by, name
    assert count(after, "g4ir_num_requests_running") == 0


def test_no_prompt_is_logged(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with served.client(headers={"Authorization": "Bearer mykey"}) as client:
        for body in (SHORT, {"messages": "xyzzy"}, SHORT | {"tools": [{"type": "xyzzy"}]}):
            client.post(CHAT, json=body | {"user": "xyzzy"})
    assert "xyzzy" not in caplog.text and "mykey" not in caplog.text


def test_a_head_that_never_ends(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the second request of a connection; one that is used stays open."""
    monkeypatch.setattr(server, "HEAD_S", 1.5)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for first in (b"", whole):
        with connected(served) as half:
            if first:
                half.sendall(first)
                answer = half.recv(4096)
                answer += b"" if answer.endswith(b"}") else half.recv(4096)
                assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"}")
            half.sendall(whole[:25])
            assert half.recv(64) == b""
    with served.client() as client, client.stream("POST", CHAT, json=LONG | {"stream": True}) as s:
        assert [line for line in s.iter_lines() if line][-1] == "data: [DONE]"


def test_more_connections_than_fit(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have asked nothing for longest go; others are served."""
    monkeypatch.setattr(served.process, "most_connections", 8)
    with contextlib.ExitStack() as held:
        for _ in range(20):
            held.enter_context(connected(served)).sendall(b"GET /health HT")
        eventually(lambda: len(served.process.server_state.connections) <= 8)
        assert served.client().post(CHAT, json=SHORT).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "again", "logged"),
    [
        (MissingError("needs a library"), 400, None, ""),
        (CheckError("logits: NaN"), 500, "false", "CheckError: logits: NaN"),
        (RuntimeError("xyzzy"), 500, None, "RuntimeError"),
        (IndexError("index 8192"), 500, None, "IndexError: index 8192"),
    ],
)
def test_errors(
    error: Exception, status: int, again: str | None, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a client and the log are told, without texts of requests, and whether it asks again."""
    found = refusal(error, {})
    assert (found.status, found.headers.get("x-should-retry")) == (status, again)
    assert "xyzzy" not in found.message + caplog.text
    assert f": {logged}\n" in caplog.text or not logged


def test_errors_name_no_file_of_the_server() -> None:
    error = InputError("/home/a/m.gguf: no adapters; /cache/m-1: see it")
    hidden = ("/cache/m-1", "/home/a/m.gguf")
    assert refusal(error, {}, hidden).message == "the engine: no adapters; the engine: see it"


def test_extra_tokens(
    engine_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fine-tune may add some: no answer has them, and no grammar."""
    folder = tmp_path / "more"
    shutil.copytree(engine_folder, folder)
    made = chat_tokenizer()
    made.add_special_tokens(["<odd|>", "<|image_soft_token>"])
    made.add_tokens(["plain_word"])
    add_file(folder, "tokenizer.json", made.to_str())
    with ready(folder) as r, r.client() as client:
        assert "3 tokens with ids beyond the vocabulary size 512 are left out" in caplog.text
        form = {"response_format": {"type": "json_object"}}
        text = "a <|image_soft_token> plain_word"
        said = {"messages": [{"role": "user", "content": text}]}
        assert client.post(CHAT, json={"max_tokens": 3} | form | said).status_code == 200
        body = {"prompt": text, "add_special_tokens": False}
        ids = client.post("/tokenize", json=body).json()["tokens"]
        assert max(ids) < 512
        got = client.post("/detokenize", json={"tokens": ids}).json()
        assert got["prompt"] == text


def test_a_body_that_never_ends(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.server, "gate", Auth(hosts=("localhost",), body_s=0.2))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
    with connected(served) as half:
        half.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())
        assert half.recv(64).startswith(b"HTTP/1.1 408")


def launched(*words: str) -> Any:
    return subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)


def test_a_signal_lets_answers_end(engine_folder: Path, tmp_path: Path) -> None:
    """And a second one ends what is left."""
    keys = tmp_path / "keys"
    keys.write_text("k1\n\nk2\n")
    words = ("--api-key-file", str(keys), "--served-name", "mine", "--set", "drain=50")
    words = (*words, "--root-path", "/llm/", "--allow-origin", "*")
    process = launched("-m", "g4ir.cli", "serve", str(engine_folder), "--port", "0", *words)
    url = process.stderr.readline().partition("listening at ")[2].strip()
    next(line for line in process.stderr if line.startswith("g4ir: ready"))
    key = {"Authorization": "Bearer k2"}
    body = LONG | {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.Client(base_url=url, timeout=WAIT, headers=key) as client:
        listed = client.get("/llm/v1/models", headers={"Origin": "https://chat.example"})
        assert listed.json()["data"][0]["id"] == "mine"
        assert listed.headers["access-control-allow-origin"] == "*"
        with (
            client.stream("POST", CHAT, json=body | {"max_tokens": 600}) as longer,
            client.stream("POST", CHAT, json=body | {"max_tokens": 50}) as shorter,
        ):
            process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{url}/health", headers=key).status_code == 503)
            got = [line for line in shorter.iter_lines() if line]
            process.send_signal(signal.SIGTERM)
            cut = [line for line in longer.iter_lines() if line]
    assert got[-1] == "data: [DONE]"
    assert json.loads(got[-2][6:])["usage"]["completion_tokens"] == 50
    assert json.loads(cut[-1][6:])["error"]["code"] == "shutting_down"
    assert process.wait(WAIT) == 0
    assert "Traceback" not in process.stderr.read()


BUILDING = """
import sys, time
from g4ir.cli import main
from g4ir.cli.common import FirstUse

def engines(self, models, draft=None, progress=None, **how):
    while True:
        progress("building tiny: weights")
        time.sleep(0.01)

FirstUse.engines = engines
sys.exit(main(["serve", "tiny-ple", "--port", "0", "--log-format", "json"]))
"""


def test_while_an_engine_is_built() -> None:
    """The port is open, and a signal ends the build; every line of the log is JSON."""
    process = launched("-c", BUILDING)
    url = json.loads(process.stderr.readline())["message"].removeprefix("listening at ")
    with httpx.Client(base_url=url, timeout=WAIT) as client:
        eventually(lambda: "building tiny: weights" in client.get("/readyz").text)
        assert client.get("/livez").status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT) == 0
    (line,) = map(json.loads, process.stderr)
    assert line["message"] == "ended while the engine was being loaded"


def test_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no engine, one without a tokenizer, and one that is not trusted."""
    folder = built(tmp_path / "bare", "tiny-ple", None)
    for path, words in ((tmp_path, ""), (tmp_path / "none", ""), (folder, "tokenizer.json")):
        said = refused("serve", path, "--port", "0")
        assert "listening" not in said and str(path) in said and words in said
    add_file(folder, "tokenizer.json", chat_tokenizer().to_str())
    monkeypatch.setattr(ReferenceBackend, "has_native_code", lambda *_: True)
    monkeypatch.setattr("g4ir.artefact.trust.find_decision", lambda digest: None)
    with pytest.raises(TrustError, match="--trust"):
        server.check_engine(folder)
    server.check_engine(folder, trust=True)


def test_a_tokenizer_without_turns(tmp_path: Path) -> None:
    folder = built(tmp_path / "raw", "tiny-ple", tokenizer().to_str())
    with ready(folder) as r, r.client() as client:
        failed(client.post(CHAT, json=SHORT), 400, "not_supported")
        body = {"prompt": "ab", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(("flags", "says"), TABLES["server"]["addresses"])
def test_an_address_to_listen_at(
    served: Running, engine_folder: Path, caplog: pytest.LogCaptureFixture, flags: str, says: str
) -> None:
    """The cause and the fix are one line, which uvicorn does not log too."""
    words = {"port": served.url.rpartition(":")[2]}
    message = refused("serve", engine_folder, *flags.format(**words).split())
    assert f"cannot listen at {says.format(**words)}" in message and message.count("\n") == 1
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_hosts() -> None:
    assert allowed_hosts("0.0.0.0") is None
    assert allowed_hosts("::1", ["Box.Local"]) == ("localhost", "box.local")


@pytest.mark.parametrize("name", ["starlette", "uvicorn", "prometheus_client"])
def test_missing_libraries(engine_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.startswith(("g4ir.serve", name))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    said = refused("serve", engine_folder, "--port", "0", code=3)
    assert name in said and "pip install 'g4ir[serve]'" in said


def test_stop_strings_free_rows(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on: they are not cancelled, and say what they would have said."""
    rows, service = list[int](), served.service
    monkeypatch.setattr(Engine, "chooses_on_device", False)
    spy(monkeypatch, Session, "verify", lambda *given: rows.append(int((given[-1] > 0).sum())))
    body = LONG | {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 120}
    cancelled = service.totals.ended["cancelled"]
    with served.client() as client:
        whole = [c["message"]["content"] for c in client.post(CHAT, json=body).json()["choices"]]
        letters = sorted(c for c in {*"".join(whole)} if c.isascii())
        stop = next(c for c in letters if c.isalnum() and 0 < sum(c in t for t in whole) < 3)
        rows.clear()
        client.post(CHAT, json=body | {"stop": stop, "stream": True})
        choices = client.post(CHAT, json=body | {"stop": stop}).json()["choices"]
    assert [c["message"]["content"] for c in choices] == [t.partition(stop)[0] for t in whole]
    ends = [c["finish_reason"] for c in choices]
    assert ends == ["stop" if stop in t else "length" for t in whole]
    assert rows[0] == 3 and min(rows) < 3
    eventually(lambda: not served.scheduler.num_running)
    assert service.totals.ended["cancelled"] == cancelled


def test_a_client_that_leaves_before_the_first_piece(narrow: Running) -> None:
    """Nobody asks for a piece then; its row is freed all the same."""
    body = json.dumps(LONG | {"stream": True}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}}
    scope |= {"method": "POST", "path": CHAT, "query_string": b"", "headers": headers}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        raise OSError("the client has gone")

    with pytest.raises(OSError, match="the client has gone"):
        asyncio.run(narrow.server.app()(scope, receive, send))
    ended = narrow.service.totals.ended
    eventually(lambda: ended["cancelled"] == 1 and not narrow.service.scheduler.num_running)


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_that_fails(
    client: openai.OpenAI, served: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "chooses_on_device", False)
    monkeypatch.setattr(Session, "verify", Mock(side_effect=RuntimeError("secret words")))
    with pytest.raises(openai.APIError) as e:
        [*ask(client, stream=True)] if stream else ask(client)
    assert "secret" not in str(e.value) and "the server's log has it under the id" in str(e.value)
    monkeypatch.undo()
    assert ask(client).choices


TEXTS = ["ab w7", "w9", "a b ab w3 w3"]
#: path, body, and what the error says
REFUSED = [
    *TABLES["server"]["embeddings"],
    ("/v1/embeddings", {"input": ["a"] * 100_000}, f"and a request may have {MAX_TEXTS}"),
]


@dataclass
class World:
    served: Running
    engine: Engine

    def post(self, path: str, body: Any) -> Any:
        with self.served.client() as client:
            return client.post(path, json=body)

    def refused(self, path: str, body: Any, status: int = 400) -> str:
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        return str(answer.json()["error"]["message"])


@pytest.fixture(scope="module")
def world(engine_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("embeddings")
    g4ir.build(None, out=folder / "e", checkpoint=folder_of(folder / "c")).close()

    def loader() -> Engine:
        r.server.embeddings = EmbeddingModel("emb", g4ir.load_engine(folder / "e"))
        return g4ir.load_engine(engine_folder)

    started = threading.Event()

    def wait() -> Engine:  # until `r` is bound
        started.wait()
        return loader()

    with running(wait, options={"embedder": "emb"}) as r:
        started.set()
        eventually(lambda: r.server.service, 60)
        assert r.server.embeddings
        yield World(r, r.server.embeddings.engine)


def test_embeddings_by_the_client_of_openai(world: World) -> None:
    want = world.engine.embed(TEXTS)
    with openai.OpenAI(base_url=f"{world.served.url}/v1", api_key="x", max_retries=0) as client:
        answer = client.embeddings.create(model="emb", input=TEXTS, encoding_format="float")
        assert [d.index for d in answer.data] == [0, 1, 2] and answer.model == "emb"
        assert torch.equal(torch.tensor([d.embedding for d in answer.data]), want)
        embedder = world.engine.embedder
        ids = [t.ids for t in embedder.tokenize(TEXTS, embedder.prompt(None))]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        packed = client.embeddings.create(model="emb", input=TEXTS[0])  # base64 inside
        assert np.allclose(packed.data[0].embedding, want[0])
        cut = client.embeddings.create(model="emb", input=TEXTS, dimensions=16, user="me")
        assert torch.allclose(
            torch.tensor(cut.data[2].embedding), world.engine.embed(TEXTS, dims=16)[2]
        )
        tokens = client.embeddings.create(
            model="emb", input=[ids[1], ids[0]], encoding_format="float"
        )
        assert torch.equal(torch.tensor([d.embedding for d in tokens.data]), want[[1, 0]])
        one = client.embeddings.create(model="emb", input=ids[1], encoding_format="float")
        assert torch.equal(torch.tensor(one.data[0].embedding), want[1])
        assert {m.id for m in client.models.list()} == {NAME, "emb"}
        assert client.models.retrieve("emb").to_dict()["embedding_sizes"] == [64, 32, 16]
    raw = world.post("/v1/embeddings", {"input": "w9", "encoding_format": "base64"}).json()
    got = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    assert np.array_equal(got, want[1].numpy())


def test_rerank_and_ollama(world: World) -> None:
    body = {"query": "w9", "documents": [*TEXTS, {"text": "w9 w9"}], "top_n": 2}
    answer = world.post("/v1/rerank", body | {"return_documents": True}).json()
    query = world.engine.embed("w9", "query")[0]
    scores = (world.engine.embed([*TEXTS, "w9 w9"], "document") @ query).tolist()
    best = sorted(range(4), key=lambda i: -scores[i])[:2]
    assert [r["index"] for r in answer["results"]] == best and answer["method"] == METHOD
    assert np.allclose([r["relevance_score"] for r in answer["results"]], [scores[i] for i in best])
    assert answer["results"][0]["document"]["text"] == [*TEXTS, "w9 w9"][best[0]]
    body = {"model": "emb:latest", "input": [TEXTS[0], "ab " * 300]}
    made = world.post("/api/embed", body).json()
    want = world.engine.embed([TEXTS[0], "ab " * 300], truncate=True)
    assert made["embeddings"] == want.tolist() and made["prompt_eval_count"] > 256


@pytest.mark.parametrize(("path", "body", "says"), REFUSED)
def test_refused_bodies(path: str, body: Any, says: str, world: World) -> None:
    assert re.search(says, world.refused(path, addressed(body)))


@pytest.fixture(scope="module")
def with_media(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server of an encoder of media, alone."""
    folder = tmp_path_factory.mktemp("media")
    checkpoint = media_checkpoint(folder / "c", load_spec("tiny-embedding-2"))
    options: Any = {"image_budgets": [70, 280], "audio_seconds": [2.0]}
    g4ir.build(None, out=folder / "e", checkpoint=checkpoint, **options).close()
    media = MediaFolder.named(str(media_files(folder / "m")), 1 << 20)
    with (
        g4ir.load_engine(folder / "e") as engine,
        running(lambda: g4ir.load_engine(folder / "e"), options={"folder": media}) as r,
    ):
        eventually(lambda: r.server.ready, 60)
        yield World(r, engine)


def addressed(value: Any) -> Any:
    """A body with data URLs in the place of their names."""
    text = json.dumps(value)
    for word, url in urls().items():
        text = text.replace(f'"{word}"', f'"{url}"')
    return json.loads(text)


@pytest.mark.parametrize("body", TABLES["server"]["media embeddings"])
def test_media_are_those_of_the_engine(body: Any, with_media: World) -> None:
    """Inputs of every form, alone and in company, as the engine embeds them."""
    body = addressed(body)
    want = with_media.engine.embed(body.pop("want"), dims=body.get("dimensions"))
    answer = with_media.post("/v1/embeddings", body).json()
    assert [d["embedding"] for d in answer["data"]] == want.tolist(), body
    assert answer["usage"]["prompt_tokens"] > 5


def test_a_file_of_the_media_folder(with_media: World) -> None:
    folder = with_media.served.server.folder.path
    assert folder
    part = {"type": "image_url", "image_url": {"url": (folder / "a.png").as_uri()}}
    got = with_media.post("/v1/embeddings", {"input": [part]}).json()["data"][0]["embedding"]
    assert [got] == with_media.engine.embed([part]).tolist()
    part["image_url"]["url"] = "file:///etc/passwd"
    assert "below --media-dir" in with_media.refused("/v1/embeddings", {"input": [part]})


@pytest.mark.parametrize(("body", "says"), TABLES["server"]["refused media embeddings"])
def test_refused_media(body: Any, says: str, with_media: World) -> None:
    assert says in with_media.refused("/v1/embeddings", addressed(body))


def test_no_such_model(world: World) -> None:
    body = {"model": "other", "input": "a"}
    assert "this server has 'tiny' and 'emb'" in world.refused("/v1/embeddings", body, 404)


def test_an_encoder_alone(world: World) -> None:
    loader, options = lambda: g4ir.load_engine(world.engine.path), {"aliases": ("two", "*")}
    with running(loader, options=options) as r, r.client() as client:
        eventually(lambda: client.get("/health").status_code == 200, 60)
        answer = client.post("/v1/embeddings", json={"input": TEXTS, "model": NAME}).json()
        assert [d["embedding"] for d in answer["data"]] == world.engine.embed(TEXTS).tolist()
        for name in ("two", "text-embedding-3-small"):
            body = {"input": "a", "model": name}
            assert client.post("/v1/embeddings", json=body).json()["model"] == name
            shown = client.post("/api/show", json={"model": name}).json()
            assert shown["capabilities"] == ["embedding"] and not shown["template"]
        model, _ = client.get("/v1/models").json()["data"]
        assert model == client.get(f"/v1/models/{NAME}").json() and model["id"] == NAME
        assert model["embedding_sizes"] == [64, 32, 16] and "media" not in model
        assert [m["name"] for m in client.get("/api/tags").json()["models"]] == [NAME, "two"]
        for path in ("/v1/chat/completions", "/tokenize", "/v1/load_lora_adapter"):
            refusal = client.post(path, json={"messages": [], "prompt": "a"})
            assert "embeds texts and generates none" in refusal.text, path
    assert r.process.error is None


def test_a_client_that_leaves_ends_its_texts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = 0
    embedder = world.engine.embedder
    plain = embedder._run

    def counted(texts: Any) -> Any:
        nonlocal chunks
        chunks += 1
        time.sleep(0.02)
        return plain(texts)

    monkeypatch.setattr(embedder, "_run", counted)
    with pytest.raises(Exception, match="timed out"), world.served.client() as client:
        client.post("/v1/embeddings", json={"input": [[5] * 200] * 4000}, timeout=3)
    time.sleep(0.3)
    seen = chunks
    time.sleep(0.3)
    assert 0 < seen == chunks < 1300


def test_a_stream_beside_thousands_of_texts(world: World) -> None:
    """Neither starves the other: tokens arrive while texts are embedded, and both end."""
    done: list[float] = []

    def embed() -> None:
        world.post(
            "/v1/embeddings", {"input": ["ab w3 w7 " * 5] * 1000, "encoding_format": "base64"}
        )
        done.append(time.monotonic())

    thread = threading.Thread(target=embed)
    thread.start()
    times = [time.monotonic()]
    body = {"prompt": "ab", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with world.served.client() as client, client.stream("POST", "/v1/completions", json=body) as s:
        for line in s.iter_lines():
            if line.startswith("data: {"):
                json.loads(line[6:])
                times.append(time.monotonic())
    thread.join(60)
    assert done and len(times) > 20
