"""An embedding model beside a chat: /v1/embeddings, /v1/rerank, /api/embed, and both in one
process."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

import g4ir
from g4ir import Engine, load_spec
from g4ir.serve.embedding_model import EmbeddingModel
from g4ir.serve.media_sources import MediaFolder
from g4ir.serve.protocols.embeddings import MAX_TEXTS, METHOD
from tests.cases import TABLES
from tests.media_tools import media_files
from tests.serve.running import NAME, Running, eventually, running
from tests.serve.test_media import urls
from tests.test_embeddings import folder_of, media_checkpoint

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
    import re

    assert re.search(says, world.refused(path, body))


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


def test_media_for_an_encoder_of_texts(world: World) -> None:
    body = addressed({"input": [{"type": "image_url", "image_url": {"url": "PICTURE"}}]})
    says = world.refused("/v1/embeddings", {"model": "emb", **body})
    assert says == "input: this engine takes no image (text 0[0])"


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
        shown = client.post("/api/show", json={"model": NAME}).json()
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
