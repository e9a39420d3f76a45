"""A tiny engine, its prepared folder, and vLLM's server over it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import g4ir
from g4ir.builder.load import load_engine
from g4ir_vllm.prepare import prepare
from tests.engines import add_file
from tests.serve.running import MAX_SEQ, NAME, chat_tokenizer

HERE = Path(__file__).parent
ROWS, CHUNK, VOCAB = 4, 64, 512
#: seconds for two processes to import vLLM, on a slow machine
START = 240.0
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
}


def chat_engine(folder: Path, variant: str = "tiny-ple", **limits: Any) -> Path:
    """Build an engine of random weights, a tokenizer and a chat template; return its directory."""
    sizes = {"max_seq": MAX_SEQ, "prefill_chunk": CHUNK, "max_batch": ROWS, **limits}
    g4ir.build(variant, folder, backend="reference", random_weights=0, **sizes).close()
    add_file(folder, "tokenizer.json", chat_tokenizer().to_str())
    tokens = chat_tokenizer().token_to_id
    ends = {"eos_token_id": [tokens(word) for word in ("<eos>", "<turn|>", "<|tool_response>")]}
    add_file(folder, "generation_config.json", json.dumps(ends))
    add_file(folder, "tokenizer_config.json", json.dumps(TOKENIZER))
    return add_file(folder, "chat_template.jinja", (HERE / "template.jinja").read_text())


@dataclass
class Served:
    """vLLM's server in a process of its own."""

    url: str
    engine: Path
    script: Path

    def client(self, **given: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **given)

    def metric(self, name: str) -> float:
        """Return the value of one of its metrics, summed over labels."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.findall(rf"^vllm:{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M)
        assert found, name
        return sum(map(float, found))

    @property
    def busy(self) -> int:
        return int(self.metric("num_requests_running") + self.metric("num_requests_waiting"))

    def ids(self, text: str) -> list[int]:
        with load_engine(self.engine) as engine:
            return list(engine.tokenizer().encode(text, add_special_tokens=False).ids)

    def dictate(self, patch: Any, *texts: str) -> None:
        """Let new requests generate these texts (see `Dictated`). `patch` is unused: tests of both
        servers pass it."""
        self.say([i for text in texts for i in self.ids(text)])

    def say(self, tokens: list[int]) -> None:
        """Write these token ids to the script atomically: the server may read it at any time."""
        whole = self.script.with_suffix(".new")
        whole.write_text(json.dumps(tokens))
        whole.replace(self.script)


@contextlib.contextmanager
def served(engine: Path, folder: Path, *words: str) -> Iterator[Served]:
    """Context with vLLM's server over an engine, once it answers health checks. `words`: further
    arguments of `vllm serve`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = folder / "script.json"
    script.write_text("[]")
    out, log = prepare(engine, folder / "prepared"), folder / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(out)]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--tool-call-parser", "gemma4", "--reasoning-parser", "gemma4"]
    command += ["--enable-auto-tool-choice", "--logits-processors", "dictated:Dictated", *words]
    command += ["--structured-outputs-config.backend", "guidance"]
    command += ["--structured-outputs-config.disable_any_whitespace", "true"]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = os.environ | {"G4IR_TEST_SCRIPT": str(script), "PYTHONPATH": paths}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START
        while not _healthy(url):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.2)
        yield Served(url, engine, script)
        assert process.poll() is None, log.read_text()[-4000:]
    finally:
        process.terminate()
        process.wait(60)
    text = log.read_text().partition("[shutdown]")[0]  # at the end vLLM kills its own processes
    assert "Traceback" not in text, text[text.index("Traceback") :][:4000]


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
