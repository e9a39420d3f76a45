"""What takes long in one request holds up no other: films, also of clients that leave, and grammars
beside a stream."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest

from g4ir.engine import multimodal
from g4ir.errors import InputError
from g4ir.media import limits, videos
from g4ir.serve.media_queue import VIDEO
from tests.serve.running import NAME, Running, chat_engine, eventually, ready
from tests.serve.test_media import data, image, picture
from tests.serve.test_schemas import AMBIGUOUS

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
