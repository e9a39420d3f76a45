"""Media of messages: data URLs of each kind, and what is fetched from where."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import json
import os
import random
import socket
import threading
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from g4ir.chat.messages import Medium
from g4ir.engine import multimodal
from g4ir.errors import InputError
from g4ir.serve import media_fetch
from g4ir.serve.media_fetch import Fetching, Sources, is_public, setting
from tests.serve.running import NAME, Running, chat_engine, ready

SECONDS = 0.6
CASES = yaml.safe_load(Path(__file__).with_name("media.yaml").read_text())


def picture() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (96, 48), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()


def sound(seconds: float = 0.5) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as w:
        w.setnchannels(1)
        w.setsampwidth(2)
        w.setframerate(16_000)
        w.writeframes(b"\x10\x00" * int(seconds * 16_000))
    return file.getvalue()


def data(kind: str, raw: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def ask(r: Running, part: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "what"}]}]
    with r.client() as client:
        body = {"model": NAME, "messages": messages, "max_tokens": 2, **fields}
        return client.post("/v1/chat/completions", json=body)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of an engine that hears two seconds."""
    folder = chat_engine(tmp_path_factory.mktemp("short") / "engine", audio_seconds=[2])
    with ready(folder) as r:
        yield r


def urls() -> dict[str, str]:
    """The data URLs of parts."""
    from PIL import Image

    file, whole = io.BytesIO(), data("audio/wav", sound(2))
    frames = [Image.new("RGB", (96, 48), (i * 40, 30, 30)) for i in range(3)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=500)
    video, junk = data("image/gif", file.getvalue()), data("image/gif", b"junk")
    made = {"SOUND": whole, "RAW": whole.partition(",")[2], "VIDEO": video, "JUNK": junk}
    made |= {"LONG": data("audio/wav", sound(2.5)), "CUT": data("audio/wav", sound()[:30])}
    made |= {"UNTYPED": data("", picture()), "STARRED": data("image/*", picture())}
    return made | {"PICTURE": data("image/png", picture())}


@pytest.mark.parametrize("case", CASES["parts"], ids=lambda case: case["name"])
def test_parts(short: Running, case: dict[str, Any]) -> None:
    """A sound is cut only where that is asked for, and usage counts media by their kind."""
    text = json.dumps(case["part"])
    for word, url in urls().items():
        text = text.replace(f'"{word}"', f'"{url}"')
    got = ask(short, json.loads(text), **case.get("fields", {}))
    if "tokens" in case:
        found = got.json()["usage"]["prompt_tokens_details"]
        assert {k: v for k, v in found.items() if k != "cached_tokens"} == case["tokens"], got.text
    else:
        error = got.json()["error"]
        assert got.status_code == 400 and case["says"] in error["message"], error
        assert error["param"] == case.get("param", error["param"])


def test_base64_in_slices_is_base64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is none: padding within, other characters, lengths that are no multiple of 4."""
    monkeypatch.setattr(multimodal, "SLICE", 8)
    draw = random.Random(0)
    for _ in range(20_000):
        text = base64.b64encode(draw.randbytes(draw.randrange(40))).decode()
        at = draw.randrange(len(text) + 1)
        text = draw.choice([text, text[:at] + draw.choice("=A+ é") + text[at:], text[:at]])
        try:
            expected = base64.b64decode(text, validate=True)
        except ValueError:
            expected = None
        if expected is None or len(text) % 4:
            with pytest.raises(ValueError):
                multimodal.decode_base64(f"data:{text}", 5)
        else:
            assert multimodal.decode_base64(f"data:{text}", 5) == expected


def test_the_detail_of_an_image_chooses_its_budget() -> None:
    engine: Any = SimpleNamespace(media=SimpleNamespace(budgets=(70, 140, 280)))
    for detail, budget in (("low", 70), ("high", 280), ("original", 280), ("auto", 0), (None, 0)):
        medium = Medium("image", {"type": "image_url", "image_url": {"detail": detail}}, "here")
        assert setting(engine, medium, {}) == ({"budget": budget} if budget else {})
        assert setting(engine, medium, {"image_budget": 140}) == {"budget": 140}


class Site(http.server.BaseHTTPRequestHandler):
    """Paths of a site, most of them bad ones."""

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].strip("/")
        if name in ("endless", "slow"):
            self._drip(name)
            return
        status, raw, headers = {
            "picture": (200, picture(), {}),
            "moved": (302, b"", {"Location": "/picture"}),
            "junk": (200, b"no picture", {}),
            "packed": (200, picture(), {"Content-Encoding": "gzip"}),
            "large": (200, b"x" * 9000, {}),
            "cut": (200, b"x", {"Content-Length": "50"}),
        }.get(name, (404, b"secret words", {}))
        self.send_response(status)
        for key, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        pass

    def _drip(self, name: str) -> None:
        """A body without an end, or a head whose pieces each come in time."""
        self.send_response(200)
        self.end_headers() if name == "endless" else self.flush_headers()
        with contextlib.suppress(OSError):
            for _ in range(1000 if name == "endless" else 60):
                self.wfile.write(b"x" * 100 if name == "endless" else b"X-Slow: 1\r\n")
                self.wfile.flush()
                time.sleep(0.0 if name == "endless" else 0.05)


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[str, int]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield str(server.server_address[0]), server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def sources(site: tuple[str, int], **given: Any) -> Sources:
    return Sources(frozenset([site]), **{"most": 8000, "seconds": SECONDS, **given})


def test_a_picture_from_a_named_host(
    served: Running, site: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://{site[0]}:{site[1]}"
    got = ask(served, image(f"{address}/picture"))
    assert got.status_code == 400 and "--media-hosts" in got.json()["error"]["message"]
    monkeypatch.setattr(served.server, "sources", sources(site))
    got = ask(served, image(f"{address}/picture?size=1"))
    assert got.status_code == 200, got.text
    assert got.json()["usage"]["prompt_tokens"] > 30
    got = ask(served, image(f"{address}/junk"))
    assert got.status_code == 400 and "messages[0]" in got.json()["error"]["message"]


@pytest.mark.parametrize("name", CASES["answers"])
def test_answers_that_are_not_taken(site: tuple[str, int], name: str) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match=CASES["answers"][name]) as e:
        Fetching(sources(site)).read(f"http://{site[0]}:{site[1]}/{name}", "messages[0]")
    assert time.monotonic() - began < SECONDS + 2
    assert "secret" not in str(e.value) and str(e.value).startswith("messages[0]: ")


def test_the_media_of_a_request_share_its_limits(site: tuple[str, int]) -> None:
    size = len(picture())
    fetching = Fetching(sources(site, most=2 * size))
    url = f"http://{site[0]}:{site[1]}/picture"
    assert fetching.read(url, "a") == fetching.read(url, "b") == picture()
    with pytest.raises(InputError, match="more than"):
        fetching.read(url, "c")


def test_addresses_that_are_not_asked(
    site: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was asked")

    monkeypatch.setattr(media_fetch.socket, "create_connection", never)
    for url in (*CASES["not_asked"], "http://HOST/" + "a" * 9000):
        address = url.replace("HOST", f"{site[0]}:{site[1]}").replace("PORT", str(site[1]))
        with pytest.raises(InputError) as e:
            Fetching(sources(site)).read(address, "messages[0]")
        assert len(str(e.value)) < 300


def test_a_name_must_lead_to_public_addresses(
    site: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, found = list[Any](), ["10.0.0.1", "8.8.8.8"]

    def connected(address: tuple[str, int], timeout: float) -> Any:
        asked.append(address)
        made = socket.socket()
        made.connect(site)
        return made

    def resolved(name: str, port: int, **_: Any) -> Any:
        return [(0, 0, 0, "", (address, port)) for address in found]

    named = Sources(frozenset([("pics.example", None)]))
    monkeypatch.setattr(media_fetch.socket, "create_connection", connected)
    monkeypatch.setattr(media_fetch.socket, "getaddrinfo", resolved)
    assert Fetching(named).read("http://pics.example/picture", "a") == picture()
    assert asked == [("8.8.8.8", 80)]
    found[1] = "::1"
    with pytest.raises(InputError, match="no public address"):
        Fetching(named).read("http://pics.example/picture", "a")
    assert len(asked) == 1


def test_which_addresses_are_public() -> None:
    assert all(map(is_public, CASES["public"])) and not any(map(is_public, CASES["not_public"]))


def test_names_of_hosts() -> None:
    for name in CASES["no_hosts"]:
        with pytest.raises(InputError, match="--media-hosts"):
            Sources.named([name], None, 1)
    made = Sources.named(["Pics.Example", "10.0.0.1:8080", "::1", "[::1]:81"], None, 1)
    assert made.hosts == {("pics.example", None), ("10.0.0.1", 8080), ("::1", None), ("::1", 81)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "media"
    (inner / "sub").mkdir(parents=True)
    (tmp_path / "media-2").mkdir()
    for path in (inner / "a b.png", inner / "sub" / "b.png", tmp_path / "media-2" / "c.png"):
        path.write_bytes(picture())
    (inner / "out.png").symlink_to(tmp_path / "media-2" / "c.png")
    (inner / "in.png").symlink_to(inner / "sub" / "b.png")
    (inner / "round").symlink_to(inner / "round")
    os.mkfifo(inner / "pipe")
    return inner


def test_files_below_a_folder(
    served: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (folder / "a b.png").as_uri()
    got = ask(served, image(url))
    assert got.status_code == 400 and "--media-dir" in got.json()["error"]["message"]
    monkeypatch.setattr(served.server, "sources", Sources.named((), folder, 1 << 20))
    for name in ("a b.png", "sub/b.png", "in.png"):
        assert ask(served, image((folder / name).as_uri())).status_code == 200
    assert ask(served, image(f"file://localhost{folder}/in.png")).status_code == 200


def test_files_that_are_not_read(folder: Path) -> None:
    made = Fetching(Sources.named((), folder, 1 << 20))
    for url in CASES["no_files"]:
        with pytest.raises(InputError, match="is no file that lies below --media-dir"):
            made.read(url.replace("FOLDER", str(folder)), "messages[0]")


def test_limits_of_files(folder: Path) -> None:
    made = Fetching(Sources.named((), folder, len(picture()) - 1))
    with pytest.raises(InputError, match="more than"):
        made.read((folder / "in.png").as_uri(), "messages[0]")
    with pytest.raises(InputError, match="--media-dir"):
        Sources.named((), folder / "in.png", 1)
