"""A server on this machine that answers what huggingface_hub asks of the hub for a download."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
