"""Several models in one server: who is loaded, who waits, and that no request is lost.

Adapters over HTTP: names of models, and adapters loaded and removed while answers stream.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

import g4ir
from g4ir import load_engine, load_spec
from g4ir.cli.serve import named_models
from g4ir.errors import EngineError, InputError
from g4ir.serve.http_errors import Refused
from g4ir.serve.pool import READY, UNLOADED, ModelPool, PooledModel
from g4ir.serve.router import Router, merged_metrics
from tests.cases import TABLES
from tests.serve.running import (
    LOADING,
    NAME,
    WAIT,
    Running,
    chat_engine,
    eventually,
    ready,
    running,
)
from tests.serve.test_media import BUSY, GAP_S
from tests.test_adapter import of_text, write_adapter
from tests.test_embeddings import folder_of

CHAT = "/v1/chat/completions"


class Fake:
    """A worker that takes some turns of the loop to load and to end."""

    port = 1

    def __init__(self, fails: bool = False) -> None:
        self.alive, self.fails = False, fails

    async def load(self) -> None:
        await asyncio.sleep(0.001)
        if self.fails:
            raise EngineError("no such file")
        self.alive = True

    async def stop(self) -> None:
        await asyncio.sleep(0.001)
        self.alive = False

    def end(self) -> None:
        self.alive = False


def pool(capacity: int, *needs: int, fails: str = "", **settings: Any) -> ModelPool:
    models = [PooledModel(n, Path(n), need) for n, need in zip("abcdef", needs)]
    return ModelPool(models, lambda m: Fake(m.name == fails), capacity, **settings)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("needs", [(1, 1, 1), (2, 1, 3, 2)])
def test_requests_in_random_order(seed: int, needs: tuple[int, ...]) -> None:
    """All are answered, and never do the models loaded at a time need more than there is."""
    draw, p, answered = random.Random(seed), pool(3, *needs, max_loaded=2, max_waiting=999), []

    async def ask(i: int) -> None:
        await asyncio.sleep(draw.random() * 0.05)
        model = draw.choice(p.models)
        async with p.lease(model) as worker:
            resident = [m for m in p.models if m.resident]
            assert worker.alive and model.state == READY and len(resident) <= 2
            assert sum(m.need for m in resident) <= 3
            await asyncio.sleep(draw.random() * 0.01)
        answered.append(i)

    async def all_of_them() -> None:
        await asyncio.gather(*map(ask, range(200)))

    asyncio.run(asyncio.wait_for(all_of_them(), 60))
    assert len(answered) == 200 and not p.line and not any(m.active for m in p.models)


def test_the_least_recently_used_goes_and_a_busy_one_stays() -> None:
    async def story() -> None:
        p = pool(2, 1, 1, 1, wait_s=0.3)
        a, b, c = p.models
        for model in (a, b, a):
            async with p.lease(model):
                pass
        async with p.lease(c):  # b was used before a
            assert [m.state for m in p.models] == [READY, UNLOADED, READY]
            async with p.lease(a), p.lease(c):
                with pytest.raises(
                    Refused,
                    match=r"'b' needs .*running requests keep 'a' loaded.*limit: .*no other model",
                ) as e:
                    async with p.lease(b):
                        pass
                assert e.value.status == 503 and e.value.headers["Retry-After"]
                waiting = asyncio.ensure_future(p.lease(b).__aenter__())
                await asyncio.sleep(0.01)
                waiting.cancel()  # its client leaves: a is no longer to go
                await asyncio.sleep(0.01)
                async with p.lease(a):
                    pass
        async with p.lease(b):
            assert a.state == UNLOADED or c.state == UNLOADED

    asyncio.run(asyncio.wait_for(story(), 20))


def test_models_that_cannot_be_loaded() -> None:
    async def story() -> None:
        p = pool(2, 1, 1, 9, fails="b", max_waiting=1)
        p.models[2].advice = "c needs 9 bytes: --max-batch 1 fits"
        for model, says in zip(
            p.models[1:], ("cannot be loaded: no such file", "--max-batch 1 fits")
        ):
            with pytest.raises(Refused, match=says) as e:
                async with p.lease(model):
                    pass
            assert e.value.status == 503
        first = asyncio.ensure_future(p.lease(p.models[0]).__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(Refused) as e:
            async with p.lease(p.models[0]):
                pass
        assert e.value.status == 429
        worker = await first
        worker.end()  # it died: the next request starts another
        p._release(p.models[0])
        async with p.lease(p.models[0]) as other:
            assert other is not worker and other.alive

    asyncio.run(asyncio.wait_for(story(), 20))


def test_the_router_logs_what_no_worker_answers() -> None:
    lines, models = list[str](), pool(2, 1, 1, fails="b")
    router = Router("a", log=lambda message, **values: lines.append(values["end"]), pool=models)

    async def story() -> None:
        app = httpx.ASGITransport(app=router.app())
        async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
            for model in "ab":
                got = await client.post(CHAT, json={"model": model, "messages": []})
                assert got.status_code == 503

    asyncio.run(asyncio.wait_for(story(), 20))
    assert lines == ["worker_ended", "not_loaded"]


@pytest.mark.parametrize(("words", "result"), TABLES["server"]["models"])
def test_names_of_models(
    words: list[str], result: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("all/x", "all/y", "other/x"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").touch()
    if isinstance(result, dict):
        assert named_models(words) == result
        return
    with pytest.raises(InputError, match=result):
        named_models(words)


def test_metrics_of_several_models() -> None:
    own = "# HELP g4ir_x X.\n# TYPE g4ir_x gauge\ng4ir_x 1.0\n"
    text = own + '# HELP g4ir_y Y.\n# TYPE g4ir_y counter\ng4ir_y_total{le="2"} 3.0\n'
    merged = merged_metrics([(None, own), ("a", text), ('b"', text)]).decode().splitlines()
    assert merged[:5] == [*own.splitlines(), 'g4ir_x{model="a"} 1.0', 'g4ir_x{model="b\\""} 1.0']
    assert 'g4ir_y_total{le="2",model="a"} 3.0' in merged
    assert sum(line.startswith("# HELP g4ir_x") for line in merged) == 1


# --- processes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def routed(engine_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of three models and an encoder, of which two are loaded at a time."""
    folder = tmp_path_factory.mktemp("models")
    for name in "abc":
        shutil.copytree(engine_folder, folder / name)
    checkpoint = folder_of(tmp_path_factory.mktemp("encoder") / "c")
    g4ir.build(None, out=folder / "e", checkpoint=checkpoint).close()
    words = ["--max-loaded", "2", "--port", "0", "--log-format", "json", "--log-requests"]
    command = [sys.executable, "-m", "g4ir.cli", "serve", str(folder), *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = list[dict[str, Any]]()
    reading = threading.Thread(
        target=lambda: lines.extend(map(json.loads, process.stderr or ())), daemon=True
    )
    assert process.stderr
    url = json.loads(process.stderr.readline())["message"].removeprefix("listening at ")
    reading.start()
    try:
        eventually(lambda: httpx.get(f"{url}/readyz").is_success, LOADING)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        reading.join(10)
        said = [line["message"] for line in lines]
        assert {"loading", "request", "draining", "ended"} <= {*said}
        assert {line.get("model") for line in lines if line["message"] == "request"} >= {*"abc"}
    finally:
        process.kill()


def asked(url: str, model: str, stream: bool, count: int = 5) -> bool:
    """Whether an answer is complete and the model's."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": count}
    with httpx.Client(base_url=url, timeout=LOADING) as client:
        if not stream:
            got = client.post(CHAT, json=body)
            return got.is_success and got.json()["model"] == model
        with client.stream("POST", CHAT, json=body | {"stream": True, "ignore_eos": True}) as s:
            lines = [line for line in s.iter_lines() if line]
            return lines[-1] == "data: [DONE]" and len(lines) >= count


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.full)])
def test_no_request_is_lost(routed: str, count: int) -> None:
    draw = random.Random(0)
    wanted = [("abc"[i % 3], draw.random() < 0.5) for i in range(count)]
    draw.shuffle(wanted)
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(lambda w: asked(routed, *w), wanted))
    listed = httpx.get(f"{routed}/v1/models").json()["data"]
    assert [m["id"] for m in listed] == [*"abce"] and sum(m["loaded"] for m in listed) == 2
    metrics = httpx.get(f"{routed}/metrics").text
    assert metrics.count("g4ir_slots{model=") == 2 and "g4ir_build_info{" in metrics
    got = httpx.post(f"{routed}/v1/embeddings", json={"model": "a", "input": "Hi"})
    assert got.status_code == 400 and "--embed" in got.text
    body = {"model": "e", "input": ["ab", "w7"]}
    got = httpx.post(f"{routed}/v1/embeddings", json=body, timeout=LOADING).json()
    assert [len(d["embedding"]) for d in got["data"]] == [64, 64] and got["model"] == "e"
    tags = httpx.get(f"{routed}/api/tags").json()["models"]
    assert [m["name"] for m in tags] == [*"abce"]
    body = {"model": "b:latest", "prompt": "Hi", "options": {"num_predict": 2}}
    lines = httpx.post(f"{routed}/api/generate", json=body, timeout=LOADING).text.splitlines()
    assert json.loads(lines[-1])["eval_count"] == 2
    assert "b" in {m["name"] for m in httpx.get(f"{routed}/api/ps").json()["models"]}
    got = httpx.post(f"{routed}{CHAT}", json={"model": "d", "messages": []})
    assert got.status_code == 404 and "'a', 'b', 'c', 'e'" in got.text


def test_a_stream_goes_on_while_another_model_is_loaded(routed: str) -> None:
    assert asked(routed, "a", False) and asked(routed, "b", False)
    body = {"model": "a", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    body |= {"max_tokens": 500, "ignore_eos": True}
    times = list[float]()
    with httpx.Client(base_url=routed, timeout=LOADING) as client, ThreadPoolExecutor(1) as pool:
        with client.stream("POST", CHAT, json=body) as s:
            for line in s.iter_lines():
                times += [time.monotonic()] if line else []
                if len(times) == 10:
                    other = pool.submit(asked, routed, "c", False)
                if len(times) > 10 and other.done():
                    break
        assert other.result()
    assert len(times) > 12
    assert max(b - a for a, b in pairwise(times)) < GAP_S * BUSY


MODULES = [f"layers.{i}.self_attn.q_proj" for i in (0, 1)] + ["layers.1.mlp.down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("adapters")
    for seed in range(3):
        write_adapter(out / f"a{seed}", load_spec("tiny-media"), of_text(MODULES), seed=seed)
    return out


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose steps take a thirtieth of the interpreter's."""
    return chat_engine(tmp_path_factory.mktemp("quick") / "engine", backend="torch")


@pytest.fixture(scope="module")
def adapted(quick: Path, folder: Path) -> Iterator[Running]:
    loader = partial(load_engine, quick, adapters={"a0": folder / "a0"}, adapter_slots=2)
    with running(loader, options={"adapter_folders": (folder,), "aliases": ("other",)}) as r:
        with r.client() as client:
            r.process.loading.join(WAIT)
            assert client.get("/health").is_success
        yield r


def said(client: httpx.Client, model: str | None = None, **more: Any) -> Any:
    body = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    got = client.post("/v1/completions", json=body | ({"model": model} if model else {}))
    return got.json()["choices"][0]["text"] if got.is_success else got


def test_adapters_are_models(adapted: Running, quick: Path) -> None:
    with adapted.client() as client, ready(quick) as base, base.client() as plain:
        ids = client.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
        want = adapted.service.engine.generate(ids, 12, stop_ids=(), adapter="a0")
        ids = [m["id"] for m in client.get("/v1/models").json()["data"]]
        assert ids == [NAME, "other", f"{NAME}:a0", "other:a0"]
        assert client.get(f"/v1/models/{NAME}:a0").json()["id"] == f"{NAME}:a0"
        assert client.get("/server_info").json()["adapters"] == ["a0"]
        texts = [said(client, name) for name in (None, NAME, f"{NAME}:a0", "a0")]
        assert texts[0] == texts[1] == said(plain) != texts[2] == texts[3]
        vocabulary = adapted.server.prompts.vocabulary  # type: ignore[union-attr]
        assert said(client, "other:a0") == texts[2] == vocabulary.decode(want)
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "model": "a0"}
        assert client.post("/v1/chat/completions", json=chat).json()["model"] == "a0"
        error = said(client, f"{NAME}:b").json()["error"]
        assert error["code"] == "model_not_found" and "'tiny:a0' and 'other:a0'" in error["message"]


def test_loaded_and_removed_while_answers_stream(adapted: Running, folder: Path) -> None:
    with adapted.client() as client:
        want = said(client, "a0")
        body = {"prompt": "abc", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        whole = client.post("/v1/completions", json={**body, "model": "a0"}).json()
        stream = {**body, "model": "a0", "stream": True}
        with client.stream("POST", "/v1/completions", json=stream) as events:
            lines = events.iter_lines()
            next(lines)
            for i in range(3):
                name = {"lora_name": f"n{i}"}
                load = {**name, "lora_path": str(folder / f"a{i}")}
                assert client.post("/v1/load_lora_adapter", json=load).is_success
                text = said(client, f"n{i}")
                assert (text == want) == (i == 0)
                assert client.post("/v1/unload_lora_adapter", json=name).is_success
                assert said(client, f"n{i}").status_code == 404

            pieces = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
        streamed = "".join(p["choices"][0]["text"] for p in pieces if p["choices"])
        assert whole["choices"][0]["text"].endswith(streamed) and len(streamed) > 100


@pytest.mark.parametrize(("verb", "body", "status", "message"), TABLES["server"]["adapters"])
def test_what_is_refused(
    adapted: Running, folder: Path, verb: str, body: dict[str, Any], status: int, message: str
) -> None:
    if isinstance(path := body.get("lora_path"), str):
        body = {**body, "lora_path": path.replace("DIR", str(folder))}
    with adapted.client() as client:
        got = client.post(f"/v1/{verb}_lora_adapter", json=body)
        assert got.status_code == status and message in got.json()["error"]["message"]
        assert client.get("/server_info").json()["adapters"] == ["a0"]
