"""Media of messages: data URLs of each kind, and files of a folder.

Transcripts of audio, by OpenAI's own client: whole, as a text, as a stream; what is refused.
"""

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
import openai
import pytest
import soundfile

from g4ir.chat.messages import Medium
from g4ir.errors import InputError
from g4ir.serve.media_sources import MediaFolder, setting
from g4ir.serve.prompts import Prompts
from tests.cases import read_table
from tests.media_tools import wav
from tests.serve.running import NAME, Running, chat_engine, ready
from tests.spies import spy

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


END = "<turn|>"
CLIP = ("clip.wav", sound(), "audio/wav")


def transcribe(client: openai.OpenAI, **given: Any) -> Any:
    return client.audio.transcriptions.create(**{"model": NAME, "file": CLIP, **given})


@pytest.mark.parametrize("kind", ["json", "text"])
def test_transcripts(
    served: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    served.dictate(monkeypatch, " Good day.", END)
    if kind == "text":
        assert transcribe(client, response_format="text", language="", prompt="") == "Good day.\n"
        return
    raw, rate = soundfile.read(io.BytesIO(sound()))
    soundfile.write(file := io.BytesIO(), raw, rate, format="FLAC")
    done = transcribe(client, file=("clip.flac", file.getvalue()))
    assert done.text == "Good day."
    counts = done.usage
    assert counts.input_token_details.audio_tokens == 13  # of half a second
    assert counts.total_tokens == counts.input_tokens + counts.output_tokens


def test_hints_are_part_of_the_prompt(
    served: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    sampling = {"temperature": 0.25, "seed": 7, "top_p": 0.5, "max_completion_tokens": 9}

    def request(given: Prompts, fields: Any) -> None:
        seen.append(str(fields["messages"][0]["content"][0]["text"]))
        assert {name: fields[name] for name in sampling} == sampling

    spy(monkeypatch, Prompts, "render", request)
    served.dictate(monkeypatch, "ok", END)
    transcribe(client, language="de", prompt="Ada Lovelace", extra_body={**sampling, "new": "x"})
    assert "language is de." in seen[0] and "Ada Lovelace" in seen[0]


@pytest.mark.parametrize("case", CASES["transcriptions"], ids=lambda case: case["name"])
def test_refused(client: openai.OpenAI, case: dict[str, Any]) -> None:
    files = {"EMPTY": b"", "JUNK": b"RIFF junk", "LONG": sound(60)}
    given = case["given"]
    if "file" in given:
        given = {"file": ("a.wav", files[given["file"]])}
    with pytest.raises(openai.BadRequestError) as e:
        transcribe(client, **given)
    assert e.value.param == case["param"] and case["says"] in e.value.message
    assert "messages" not in e.value.message


@pytest.mark.parametrize("case", CASES["forms"], ids=lambda case: case["says"])
def test_forms_that_are_none(served: Running, case: dict[str, Any]) -> None:
    path, headers = "/v1/audio/transcriptions", {"Content-Type": case["type"]}
    body = "".join(text * times for text, times in case["body"]).encode()
    with served.client() as http:
        answer = http.post(path, content=body, headers=headers)
        assert answer.status_code == case.get("status", 400)
        assert case["says"] in answer.json()["error"]["message"]


def test_forms_of_other_sites(served: Running) -> None:
    """A browser sends them without asking first."""
    with served.client() as http:
        for origin, status in (("http://evil.example", 403), ("null", 403), (served.url, 400)):
            headers = {"Origin": origin}
            answer = http.post("/v1/audio/transcriptions", files={"other": b"x"}, headers=headers)
            assert answer.status_code == status, origin


def test_an_engine_that_does_not_hear(tmp_path: Path) -> None:
    with (
        ready(chat_engine(tmp_path / "engine", media=["image"])) as r,
        openai.OpenAI(base_url=f"{r.url}/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="no audio") as e,
    ):
        transcribe(client)
    assert e.value.param == "file"
