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
    #: a file of which the first answer stops after so many bytes, until `go_on`
    stops: tuple[str, int] | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    #: file and first byte of each answer
    sent: list[tuple[str, int]] = field(default_factory=list)


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
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        given = self.headers.get("Range")
        first = int(given.removeprefix("bytes=").partition("-")[0]) if given else 0
        if self.command == "GET":
            self.hub.sent.append((name, first))
        if given:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._answer(206 if given else 200, content[first:], headers, name)

    def _answer(
        self, code: int, body: bytes = b"", headers: Mapping[str, str] = {}, name: str = ""
    ) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.stops and self.hub.stops[0] == name and not self.hub.stopped.is_set():
            self.wfile.write(body[: self.hub.stops[1]])
            self.wfile.flush()
            self.hub.stopped.set()
            self.hub.go_on.wait(60)
            self.close_connection = True
            return
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
        hub.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
