"""Media of messages: data URLs of each kind, and files of a folder.

Transcripts of audio, by OpenAI's own client: whole, as a text, as a stream; what is refused.

What takes long in one request holds up no other: films, also of clients that leave, and grammars
beside a stream.
"""

from __future__ import annotations

import base64
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from g4ir.chat.messages import Medium
from g4ir.engine import multimodal
from g4ir.errors import InputError
from g4ir.media import limits, videos
from g4ir.serve.media_queue import VIDEO
from g4ir.serve.media_sources import MediaFolder, setting
from g4ir.serve.prompts import Prompts
from tests.cases import read_table
from tests.media_tools import wav
from tests.serve.running import NAME, Running, chat_engine, eventually, ready
from tests.serve.test_schemas import AMBIGUOUS
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


# --- what takes long ---------------------------------------------------------------------------

PATH, JSON = "/v1/chat/completions", {"Content-Type": "application/json"}
#: seconds between two tokens of a stream, and of a text request, whatever runs beside them: on a
#: machine of two cores that does nothing else
GAP_S, TEXT_S = 0.3, 1.0
#: and where other tests run too
BUSY = 2.5
#: of anyio, in which an application's functions run
THREADS = 40


@cache
def film(frames: int, width: int, height: int, noise: int = 0) -> str:
    """The data URL of an H.264 film, black, or with noise of this many levels."""
    av = pytest.importorskip("av")
    file, draw = io.BytesIO(), np.random.default_rng(0)
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for _ in range(frames):
            pixels = draw.integers(0, noise + 1, (height, width, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return data("video/mp4", file.getvalue())


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def body(part: Any = None, **more: Any) -> bytes:
    """A request. A test writes it before it measures: it shares the interpreter with the server."""
    content = [part, {"type": "text", "text": "what"}] if part else "hi"
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": NAME, "messages": messages, "max_tokens": 2, **more}).encode()


def post(r: Running, given: bytes, path: str = PATH, wait: float = 120.0) -> Any:
    with r.client() as client:
        return client.post(path, content=given, headers=JSON, timeout=wait)


class Stream:
    """A stream that goes on until it is left, and when its pieces came."""

    def __init__(self, r: Running) -> None:
        self.times, self._over, self._r = list[float](), False, r
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        while not self._over:
            given = body(max_tokens=500, stream=True, ignore_eos=True)
            with (
                self._r.client() as client,
                client.stream("POST", PATH, content=given, headers=JSON) as answer,
            ):
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.times.append(time.monotonic())
                    if self._over:
                        return

    def __enter__(self) -> Stream:
        self._thread.start()
        eventually(lambda: len(self.times) > 10)
        del self.times[:5]
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()

    @property
    def gap(self) -> float:
        return max(b - a for a, b in pairwise(self.times))


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with ready(chat_engine(tmp_path_factory.mktemp("films") / "engine")) as r:
        yield r


@pytest.mark.parametrize(
    ("frames", "width", "height", "count", "times"),
    [(24, 1920, 1080, 2, BUSY), pytest.param(90, 3840, 2160, 5, 1.0, marks=pytest.mark.full)],
)
def test_films_and_a_grammar_hold_up_no_stream(
    films: Running, frames: int, width: int, height: int, count: int, times: float
) -> None:
    url = film(frames, width, height)
    given = [body(video(url), frames=2) for _ in range(count)]
    given.append(body(max_tokens=300, grammar=AMBIGUOUS.replace("start: s", 'start: s "!"')))
    with ThreadPoolExecutor(len(given)) as pool, Stream(films) as stream:
        answers = [pool.submit(post, films, each) for each in given]
        took = []
        while not all(a.done() for a in answers[:count]) or len(took) < 3:
            begin = time.monotonic()
            assert post(films, body()).status_code == 200
            took.append(time.monotonic() - begin)
        assert [a.result().status_code for a in answers[:count]] == [200] * count
        assert stream.gap < GAP_S * times and max(took) < TEXT_S * times


@pytest.mark.parametrize(
    ("frames", "noise"), [(60, 0), pytest.param(10, 60, marks=pytest.mark.full)]
)
def test_client_leaves(
    films: Running, frames: int, noise: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decoding ends between two frames, and its thread is free for others."""
    url, looks = film(frames, 3840, 2160, noise), list[float]()
    check = limits.check_limit
    monkeypatch.setattr(videos, "check_limit", lambda: (looks.append(0), check()))
    given = body(video(url), frames=8)
    with Stream(films) as stream:
        with pytest.raises(httpx.ReadTimeout):
            post(films, given, wait=0.3)
        eventually(lambda: not films.server._media.count)
        films.server._media._threads[VIDEO].submit(int).result()
        assert post(films, body()).status_code == 200
    assert stream.gap < GAP_S * BUSY and len(looks) < frames + frames * 7 // 8


@pytest.mark.parametrize("path", [PATH, "/tokenize", "/render"])
def test_slow_media_are_refused(films: Running, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_S", 0.05)
    got = post(films, body(video(film(60, 1280, 720)), frames=8), path)
    assert got.status_code == 400, got.text
    assert "messages[0].content[0]: takes more than 0.05 seconds" in got.json()["error"]["message"]


def test_more_media_than_the_queue_takes(films: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(films.server._media, "limit", 0)
    got = post(films, body(image(data("image/png", picture()))))
    assert got.status_code == 429 and int(got.headers["Retry-After"]) >= 1
    assert post(films, body()).status_code == 200


def test_images_that_wait_hold_up_no_text(films: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """More images than the server has threads for texts wait for one that takes long."""
    go = threading.Event()

    def waiting(*args: Any) -> Any:
        go.wait()
        raise InputError("took long")

    monkeypatch.setattr(multimodal, "prepare_image", waiting)
    part, texts = image(data("image/png", picture())), list[int]()
    with ThreadPoolExecutor(THREADS + 5) as pool:
        answers = [pool.submit(post, films, body(part)) for _ in range(THREADS + 5)]
        try:
            begin = time.monotonic()
            while time.monotonic() - begin < 1.5:
                texts.append(post(films, body(), wait=TEXT_S * BUSY).status_code)
        finally:
            go.set()
    assert {*texts} == {200} and {a.result().status_code for a in answers} <= {400, 429}
