"""Media of messages: data URLs of each kind, and files of a folder."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from g4ir.chat.messages import Medium
from g4ir.errors import InputError
from g4ir.serve.media_sources import MediaFolder, setting
from tests.cases import read_table
from tests.media_tools import wav
from tests.serve.running import NAME, Running, chat_engine, ready

CASES = read_table("serve/media.yaml")


def picture() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (96, 48), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()


def sound(seconds: float = 0.5) -> bytes:
    wav(file := io.BytesIO(), int(seconds * 16_000))
    return file.getvalue()


def data(kind: str, raw: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def ask(r: Running, part: Any, again: bool = False, **fields: Any) -> httpx.Response:
    parts = [part] * (1 + again)
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what"}]}]
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


def test_the_detail_of_an_image_chooses_its_budget() -> None:
    engine: Any = SimpleNamespace(media=SimpleNamespace(budgets=(70, 140, 280)))
    for detail, budget in (("low", 70), ("high", 280), ("original", 280), ("auto", 0), (None, 0)):
        medium = Medium("image", {"type": "image_url", "image_url": {"detail": detail}}, "here")
        assert setting(engine, medium, {}) == ({"budget": budget} if budget else {})
        assert setting(engine, medium, {"image_budget": 140}) == {"budget": 140}


@pytest.mark.parametrize("url", CASES["not_read"])
def test_addresses_that_are_not_read(url: str) -> None:
    with pytest.raises(InputError, match=r"^messages\[0\]: .*(data URL|--media-dir)"):
        MediaFolder().read(url, "messages[0]")


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


def test_files_in_a_folder(served: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = (folder / "a b.png").as_uri()
    got = ask(served, image(url))
    assert got.status_code == 400 and "--media-dir" in got.json()["error"]["message"]
    monkeypatch.setattr(served.server, "folder", MediaFolder.named(str(folder), 1 << 20))
    for name in ("a b.png", "sub/b.png", "in.png"):
        assert ask(served, image((folder / name).as_uri())).status_code == 200
    assert ask(served, image(f"file://localhost{folder}/in.png")).status_code == 200


def test_files_that_are_not_read(folder: Path) -> None:
    made = MediaFolder.named(str(folder), 1 << 20)
    for url in CASES["no_files"]:
        with pytest.raises(InputError, match="is no file that lies below --media-dir"):
            made.read(url.replace("FOLDER", str(folder)), "messages[0]")


def test_limits_of_files(served: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a request share them."""
    for size, status in ((2 * len(picture()), 200), (2 * len(picture()) - 1, 400)):
        monkeypatch.setattr(served.server, "folder", MediaFolder.named(str(folder), size))
        got = ask(served, image((folder / "in.png").as_uri()), again=True)
        assert got.status_code == status and ("more than" in got.text) == (status == 400)
    with pytest.raises(InputError, match="--media-dir"):
        MediaFolder.named(str(folder / "in.png"), 1)
