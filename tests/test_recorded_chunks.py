"""Full chunks of prompts, recorded: here without a CUDA graph, by a stand-in that notes what is
launched, recorded and replayed, on the CPU's compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from g4ir.backends.torch_compile import cuda_graph
from g4ir.backends.torch_compile.cuda_graph import (
    CHUNKS,
    CaptureArena,
    LazyCapture,
    WithFallback,
    recorded_at,
)
from g4ir.backends.torch_compile.schedule import any_length
from g4ir.backends.torch_compile.target import Target
from g4ir.engine.engine import Engine
from g4ir.errors import EngineError
from tests.contract.flows import CHUNK
from tests.engines import some_tokens
from tests.test_kernel_ops import program

Work = Callable[[], None]


class StandIn:
    """A place that keeps what happens there; recording does nothing yet, as on a GPU."""

    def __init__(self, what: str = "", fails: bool = False) -> None:
        self.said: list[str] = []
        self.fails = fails

    def launch(self, work: Work) -> None:
        self.said.append("launch")
        work()

    def record(self, work: Work) -> Work:
        self.said.append("record")
        if self.fails:
            raise EngineError("not permitted when stream is capturing")

        def replay() -> None:
            self.said.append("replay")
            work()

        return replay


def over(engine: Engine, patch: pytest.MonkeyPatch, fails: bool = False) -> list[StandIn]:
    """Turns recording on; returns the places of sessions that are made from now on."""
    places: list[StandIn] = []

    def place(what: str) -> StandIn:
        places.append(StandIn(what, fails))
        return places[-1]

    patch.setattr(engine.runtime, "place", place, raising=False)
    patch.setattr(engine.runtime, "record_chunk", WithFallback(recorded_at, CHUNKS))
    return places


@pytest.fixture
def engine(engines: Any) -> Engine:
    """It has rings, lists and layers that only a prompt's last chunk runs."""
    made: Engine = engines("torch", "tiny-ple")
    return made


def test_a_prompt_of_several_chunks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, with rings that each chunk writes over; chunks that end no prompt and those
    that do are two recordings in one place, and what is shorter is launched."""
    rows = engine.limits.max_batch
    prompts = [some_tokens(rows, width) for width in (3 * CHUNK + 5, CHUNK, CHUNK)]
    session = engine.session(rows)
    want = [session.prefill(tokens) for tokens in prompts]
    places = over(engine, monkeypatch)
    session = engine.session(rows)
    got = [session.prefill(tokens) for tokens in prompts]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
    (place,) = places
    early, last = ["launch", "record", "replay", "replay"], ["launch", "record", "replay"]
    assert place.said == [*early, *last]


def test_ragged_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ends within a recorded chunk, one has no token in it: lengths are the chunk's."""
    tokens, lengths = some_tokens(3, 3 * CHUNK), torch.tensor([3 * CHUNK, CHUNK + 3, 0])

    def both() -> list[torch.Tensor]:
        session = engine.session(3)
        return [session.prefill(tokens, lengths), session.decode(torch.tensor([1, 2, 3]))]

    want = both()
    places = over(engine, monkeypatch)
    for g, w in zip(both(), want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
    assert places[0].said == ["launch", "launch", "record", "replay"]


def test_chunks_that_cannot_be_recorded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are launched, each once, and that is said once, whatever session it is."""
    tokens = some_tokens(1, 4 * CHUNK)
    want = engine.session(1).prefill(tokens)
    places = over(engine, monkeypatch, fails=True)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            torch.testing.assert_close(
                engine.session(1).prefill(tokens), want, rtol=1e-4, atol=1e-4
            )
    (said,) = caplog.messages
    assert (
        said.startswith("full chunks of prompts run launch by launch") and "not permitted" in said
    )
    assert [p.said for p in places] == [["launch", "record", "launch"], ["launch", "launch"]]


def test_what_is_recorded_is_not_run_twice() -> None:
    """Each run is of what it is given; its result is the recording's own."""
    place, total = StandIn(), torch.zeros(2)
    doubled = torch.zeros(2)

    def step(feeds: dict[str, torch.Tensor]) -> torch.Tensor:
        total.add_(feeds["x"])
        return torch.mul(feeds["x"], 2, out=doubled)

    given = {"x": torch.ones(2)}
    chunk = LazyCapture(step, given, place, recorded_at)  # type: ignore[arg-type]
    for i in range(4):
        assert torch.equal(chunk.run({"x": torch.full((2,), float(i))}), torch.full((2,), 2.0 * i))
    assert total.tolist() == [6, 6] and given["x"].tolist() == [1, 1]
    assert place.said == ["launch", "record", *["replay"] * 3]


def test_recordings_of_a_place_share_its_stream_and_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first run of each is on the stream on which it is recorded."""
    seen: list[Any] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            seen.append(("waits", self, other))

    class On:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            seen.append(("on", self.stream))

        def __exit__(self, *_: Any) -> None:
            pass

    def capture(graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> On:
        assert capture_error_mode == "thread_local"
        seen.append(("capture", pool))
        return On(stream)

    class Graph:
        def replay(self) -> None:
            seen.append("replay")

    main = Stream()
    for name, value in (
        ("CUDAGraph", Graph),
        ("Stream", Stream),
        ("graph", capture),
        ("stream", On),
        ("current_stream", lambda: main),
        ("graph_pool_handle", lambda: "pool"),
    ):
        monkeypatch.setattr(cuda_graph.torch.cuda, name, value)
    place = CaptureArena("a chunk")
    place.launch(lambda: seen.append("work"))
    waits, (_, side), work, after = seen
    assert waits == ("waits", side, main) and after == ("waits", main, side) and work == "work"
    seen.clear()
    for _ in range(2):
        place.record(lambda: seen.append("work"))()
    assert seen == [("capture", "pool"), ("on", main), ("on", side), "work", "replay"] * 2


@pytest.mark.parametrize(
    ("name", "form", "held", "same"),
    [
        ("tiny-moe", "off", "", True),
        ("tiny-ple", "off", "", True),
        ("31b-small", "value", "", True),
        ("31b-small", "raw", "", False),  # K and V of all slots are made again
        ("tiny-moe", "off", "f8e4m3", False),  # the library's attention, over all slots
    ],
)
def test_chunks_that_one_recording_serves(name: str, form: str, held: str, same: bool) -> None:
    """Those whose attention goes by what rows hold, in kernels of ours."""
    g = program(f"{name}@{held}" if held else name, form).graphs["prefill"]
    assert any_length(g, Target("cuda", "h100", 1)) == same
    assert not any_length(g, Target("cpu"))
