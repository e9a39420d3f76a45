"""Downloads by huggingface_hub from a hub on this machine: asked for, resumed, refused."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import HfApi, constants

import g4ir
from g4ir.weights.hub import look_up
from g4ir.weights.origin import hub_snapshot
from tests.cases import TABLES
from tests.cli_tools import g4ir as command
from tests.cli_tools import refused, text_checkpoint

# --- a hub on this machine, as huggingface_hub asks one -------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Models by id, each a folder of files, and what the server does and has seen."""

    models: Mapping[str, Path]
    url: str = ""
    #: of these ids files need the token; of others of no interest
    gated: tuple[str, ...] = ()
    token: str = "hf_of_tests"
    #: the files of all answers
    sent: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *given: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        if words[:2] == ["api", "models"]:
            self._model("/".join(words[2:4]), words[5] if words[4:5] == ["revision"] else "main")
        else:
            self._file("/".join(words[:2]), "/".join(words[4:]))

    def _model(self, name: str, revision: str) -> None:
        if name not in self.hub.models:
            self._answer(404, headers={"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", COMMIT):
            self._answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            files = sorted(p for p in self.hub.models[name].iterdir() if p.is_file())
            listed = [{"rfilename": p.name, "size": p.stat().st_size} for p in files]
            gated = "manual" if name in self.hub.gated else False
            facts = {"id": name, "modelId": name, "sha": COMMIT, "gated": gated, "siblings": listed}
            self._answer(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def _file(self, model: str, name: str) -> None:
        asked = self.headers.get("Authorization")
        if model in self.hub.gated and asked != f"Bearer {self.hub.token}":
            self._answer(403, headers={"X-Error-Code": "GatedRepo"})
            return
        if model not in self.hub.models:  # what else libraries ask for
            self._answer(404)
            return
        content = (self.hub.models[model] / name).read_bytes()
        tag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
        if self.command == "GET":
            self.hub.sent.append(name)
        self._answer(200, content, headers)

    def _answer(self, code: int, body: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serving(models: Mapping[str, Path]) -> Iterator[Hub]:
    """A hub of these models, until the end of the context."""
    hub = Hub(models)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# --- downloads ------------------------------------------------------------------------------------

WEIGHTS = "model-00002-of-00002.safetensors"
RUN = ("--backend", "reference", "--max-seq", "64", "--tokens", "2,5", "--max-new-tokens", "3")
RUN = (*RUN, "--temperature", "0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture
def hub(checkpoint: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a checkpoint and a folder of GGUF files, and a home without anything in it."""
    (own_home / "gguf").mkdir()
    for name in ("tiny-Q4_0.gguf", "tiny-Q8_0.gguf"):
        (own_home / "gguf" / name).touch()
    monkeypatch.setenv("HF_HOME", str(own_home / "HF_HOME"))
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with serving({"some/tiny": checkpoint, "some/gguf": own_home / "gguf"}) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(own_home / "token"))
        yield served


def test_download(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, said before; the same words as from the directory; found without the hub later."""
    want = command("run", checkpoint, *RUN).out
    done = command("run", "some/tiny", *RUN, "--download")
    assert done.code == 0 and done.out == want
    said = done.err.splitlines()[0]
    assert said.startswith("g4ir: some/tiny (main): 2.") and f"licence: {hub.url}/some/tiny" in said
    assert " MiB to download, " in said and f"free in {os.environ['HF_HOME']}/hub" in said
    files = sorted(p.name for p in checkpoint.iterdir())
    assert sorted(hub.sent) == files
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert command("run", "some/tiny", *RUN).out == want
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert command("run", "some/tiny", *RUN, "--download", "--set", "revision=v1").out == want
    assert len(hub.sent) == len(files)  # another name of the same commit
    assert hub_snapshot("some/tiny", "v1") == hub_snapshot("some/tiny", COMMIT)


def test_python(hub: Hub) -> None:
    asked: list[Any] = []
    with pytest.raises(g4ir.G4Error, match="some/tiny is absent, and its download was declined"):
        g4ir.load("some/tiny", backend="reference", download=lambda found: asked.append(found))
    assert [d.hub_id for d in asked] == ["some/tiny"] and not hub.sent
    with g4ir.load("some/tiny", backend="reference", max_seq=64, download=True) as engine:
        assert len(engine.generate([2, 5], 3)) == 3


def test_an_interrupted_download_goes_on(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files that are absent; until it ends the model counts as absent."""

    def interrupted(api: HfApi, model: str, name: str, **more: Any) -> Any:
        if name == WEIGHTS:
            raise KeyboardInterrupt
        return download(api, model, name, **more)

    download = HfApi.hf_hub_download
    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "hf_hub_download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            look_up("some/tiny").fetch()
    assert hub_snapshot("some/tiny") is None and hub_snapshot("some/tiny", COMMIT) is None
    before = len(hub.sent)
    assert command("run", "some/tiny", *RUN, "--download").code == 0
    assert hub.sent[before:] == [WEIGHTS]


def test_gated(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = ("some/tiny",)
    told = command("run", "some/tiny", *RUN, "--download")
    assert told.code == 3 and told.message.endswith(
        f"some/tiny is gated: accept its licence at {hub.url}/some/tiny, and give HF_TOKEN, or run "
        "`hf auth login`\n"
    )
    assert "to be accepted there first" in told.err
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert command("run", "some/tiny", *RUN, "--download").code == 0


@pytest.mark.parametrize("words, code, says", TABLES["hub"]["refused"])
def test_refused(words: list[str], code: int, says: str, hub: Hub, checkpoint: Path) -> None:
    names = {"url": hub.url, "here": str(checkpoint)}
    told = command("run", *(w.format(**names) for w in words), *RUN)
    assert told.code == code and says.format(**names) in told.message and not hub.sent


FULL = Mock(side_effect=OSError(28, "No space left on device"))
ROOM = "make room, or give HF_HOME a folder with more"
#: what is replaced by what, and what is said
NO_DOWNLOAD: dict[str, tuple[Any, str, Any, str]] = {
    "offline": (constants, "HF_HUB_OFFLINE", True, "HF_HUB_OFFLINE forbids downloads: unset it"),
    "unreachable": (constants, "ENDPOINT", "http://127.0.0.1:9", "Connection refused); try again"),
    "full": (shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1), f"; {ROOM}"),
    "fills up": (HfApi, "hf_hub_download", FULL, f"/hub is full: {ROOM}"),
}


@pytest.mark.parametrize("case", [*NO_DOWNLOAD, "no library"])
def test_no_download_here(case: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "no library":
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        says = "some/tiny: a download needs the package huggingface_hub: pip install hugg"
    else:
        *patch, says = NO_DOWNLOAD[case]
        monkeypatch.setattr(*patch)
    assert says in refused("run", "some/tiny", *RUN, "--download", code=3) and not hub.sent


@pytest.mark.parametrize("answer, code", (("y", 0), ("", 3)))
def test_the_question_at_a_terminal(answer: str, code: int, hub: Hub) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    words = [sys.executable, "-m", "g4ir", "run", "some/tiny", *RUN]
    done = subprocess.run(words, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, timeout=120)
    os.close(theirs)
    told = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == code, told
    assert told.index("to download") < told.index("download it? [y/N]")
    assert bool(hub.sent) == bool(done.stdout) == (code == 0)
