"""Adapters over HTTP: names of models, and adapters loaded and removed while answers stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from g4ir.builder.load import load_engine
from g4ir.serve.app import ANY_NAME, Server
from g4ir.spec.record import load_spec
from tests.cases import TABLES
from tests.cli_tools import refused
from tests.serve.running import NAME, WAIT, Running, chat_engine, ready, running
from tests.test_adapter import of_text, write_adapter

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


def test_a_server_without_adapters(served: Running, folder: Path) -> None:
    body = {"lora_name": "n", "lora_path": str(folder / "a0")}
    with served.client() as client:
        got = client.post("/v1/load_lora_adapter", json=body)
        message = got.json()["error"]["message"]
        assert got.status_code == 501 and "start one of this model alone with --adapter" in message
    assert Server(NAME, aliases=(ANY_NAME,))._check_model("x:y") == ""


def test_flags(engine_folder: Path, folder: Path) -> None:
    good, model = f"a={folder / 'a0'}", str(engine_folder)
    for words, message in {
        ("--adapter", "a"): "--adapter a: expected NAME=DIR, each name once",
        ("--adapter", good, "--adapter", good): "each name once",
        ("--adapter", f"a={folder}"): "has no adapter_config.json",
        ("b=tiny-dense", "--adapter", good): "--adapter is for one model",
        ("b=tiny-dense", "--set", "adapter_rank=8"): "--adapter is for one model",
    }.items():
        assert message in refused("serve", model, *words)
