"""A served tiny engine with a tokenizer of chats, in a thread, and answers that are dictated."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import httpx

import g4ir
from g4ir import Engine, load_engine
from g4ir.backends.sampling import SamplingParams
from g4ir.chat.special_tokens import ALIASES, CONTROLS
from g4ir.engine.async_engine import AsyncEngine, AsyncEngineConfig
from g4ir.engine.scheduler import SchedulerConfig
from g4ir.serve.app import Server
from g4ir.serve.auth import Auth
from g4ir.serve.server import Address, ServerProcess
from tests.cli_tools import bpe
from tests.engines import add_file
from tests.talking import Dictated

NAME = "tiny"
MAX_SEQ = 640
#: seconds for what should take none, and for an engine of any size
WAIT, LOADING = 30.0, 600.0


def chat_tokenizer() -> Any:
    """512 tokens: control tokens, those of media where tiny-media has them, and every byte."""
    media = ("<|image|>", "<|video|>", "<|audio|>", "<|image>", "<image|>", "<|audio>", "<audio|>")
    first = ("<pad>", "<eos>", "<bos>", "<unk>")
    controls = [c for c in CONTROLS if c not in (*media, *first, *ALIASES)]
    words = [*first, *controls, *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    words += [*"abcdefghijklmnopqrstuvwxyz0123456789:{}\n", *(f"w{i}_" for i in range(512))]
    words = [*words[:500], *media, *words[500:505]]
    return bpe(words, [], [*first, *controls, *media])


def chat_engine(
    folder: Path, max_seq: int = MAX_SEQ, spec: str | Path = "tiny-media", **options: Any
) -> Path:
    """An engine directory with it, that takes pictures and sounds."""
    limits: dict[str, Any] = {"prefill_chunk": 128, "max_batch": 4, "image_budgets": [70]}
    limits |= {"max_seq": max_seq, "backend": "torch", **options}
    g4ir.build(spec, folder, random_weights=0, **limits).close()
    return add_file(folder, "tokenizer.json", chat_tokenizer().to_str())


class Served(Protocol):
    """A server, as tests of clients see it."""

    url: str

    @property
    def busy(self) -> int:
        """Number of requests that have not ended."""

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""

    def dictate(self, patch: Any, *texts: str) -> None:
        """Let the model say these words, whatever it is asked."""


@dataclass
class Running:
    """A server that runs in a thread."""

    server: Server
    process: ServerProcess
    url: str

    @property
    def service(self) -> AsyncEngine:
        assert self.server.service
        return self.server.service

    @property
    def scheduler(self) -> Any:
        return self.service.scheduler

    def client(self, **given: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT, **given)

    @property
    def busy(self) -> int:
        return self.scheduler.num_running + len(self.process.server_state.tasks)

    def ids(self, text: str) -> list[int]:
        assert self.server.prompts
        return self.server.prompts.vocabulary.plain(text)

    def dictate(self, patch: Any, *texts: str) -> None:
        prompts = self.server.prompts
        assert prompts
        controls, made, script = prompts.vocabulary.controls, prompts._sampling, list[int]()
        for text in texts:
            script += [controls[text]] if text in controls else self.ids(text)

        def dictated(*given: Any) -> SamplingParams:
            return replace(made(*given), allowed=Dictated(script, 512, 0.0, None))

        patch.setattr(prompts, "_sampling", dictated)


@contextlib.contextmanager
def running(
    loader: Callable[[], Engine],
    gate: Auth | None = None,
    config: SchedulerConfig | None = None,
    address: Address | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """A context with a server at a free port; `options` are more of the server's own."""
    gate, made = gate or Auth(hosts=("localhost",)), AsyncEngineConfig(**settings)
    server = Server(NAME, gate, made, config or SchedulerConfig(), **(options or {}))
    said: list[str] = []
    log = lambda line, **values: said.append(line)  # noqa: E731
    process = ServerProcess(server, address or Address(port=0), log, loader)
    thread = threading.Thread(target=process.run)
    thread.start()
    eventually(lambda: process.started or process.should_exit)
    try:
        yield Running(server, process, process.url)
    finally:
        process.loading.join(WAIT)
        process.drain(0.0)
        thread.join(WAIT)
        assert not thread.is_alive()


@contextlib.contextmanager
def ready(folder: Path, gate: Auth | None = None, **settings: Any) -> Iterator[Running]:
    """As `running`, of an engine that has been loaded."""
    with running(lambda: load_engine(folder), gate, **settings) as r:
        eventually(lambda: r.server.ready, LOADING)
        yield r


def eventually(holds: Callable[[], Any], wait_s: float = WAIT) -> None:
    end = time.monotonic() + wait_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)
