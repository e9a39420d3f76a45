"""Work on CUDA as one graph launch: run once, recorded, replayed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from g4ir.errors import EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")
#: makes of work what repeats it
Record = Callable[[Callable[[], None]], Callable[[], None]]
#: what is recorded, in messages: one of them, and all of them
STEP, STEPS = "the decode step", "decode steps"
CHUNK, CHUNKS = "a full chunk of a prompt", "full chunks of prompts"
#: held while a step is recorded, which one thread does at a time
_RECORDING = threading.Lock()


class Captured(Generic[T]):
    """A recorded step, with the tensors that it reads, writes and makes.

    Warming up and recording write the same values to the same cache slots, so running a step
    twice changes nothing.
    """

    def __init__(
        self,
        step: Callable[[dict[str, torch.Tensor]], T],
        feeds: dict[str, torch.Tensor],
        record: Record,
    ) -> None:
        self._made: T
        self._feeds = {name: t.clone() for name, t in feeds.items()}
        self._step = step
        self._play = record(self._run)

    def _run(self) -> None:
        self._made = self._step(self._feeds)

    def replay(self, feeds: dict[str, torch.Tensor]) -> T:
        """Do the step once; what it returns the next one writes over."""
        for name, t in feeds.items():
            self._feeds[name].copy_(t)
        self._play()
        return self._made


class CaptureArena:
    """A stream beside the current one, on which work is done, and memory of its own, in which it is
    recorded: recordings of one place share that, so only one of them may run at a time, and what
    one made is gone when another runs."""

    def __init__(self, what: str = STEP) -> None:
        self.what = what
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def launch(self, work: Callable[[], None]) -> None:
        """Do the work as it is; what follows on the current stream waits for it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record work that was done here before, without doing it; return what replays it.
        EngineError with the reason where it cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        try:
            # The stream of the warm-up: what works on it may have made events and streams for it.
            # What other threads do meanwhile, in sessions of their own, must not end the recording.
            # The outer context leaves the stream also where torch's own, after a failure, does not.
            capture = torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            )
            with torch.cuda.stream(torch.cuda.current_stream()), _RECORDING, capture:
                work()
        except RuntimeError as e:
            raise EngineError(
                f"{self.what} cannot be recorded as a CUDA graph: {str(e)[:300]}; load the engine "
                f"with cuda_graph=False (--no-cuda-graph) to run it launch by launch"
            ) from e
        return graph.replay


class LazyCapture:
    """Work that may not be done twice, since it writes over what it reads: it is launched the first
    time, recorded the second, and replayed from then on.

    A recording costs about as much as some launches save. So work that is done once is spared it.
    """

    def __init__(
        self,
        work: Callable[[], None],
        place: CaptureArena,
        record: Callable[[Callable[[], None], CaptureArena], Callable[[], None]],
    ) -> None:
        self._runs, self._play = 0, lambda: place.launch(work)
        self._record = lambda: record(work, place)

    def __call__(self) -> None:
        self._runs += 1
        if self._runs == 2:
            self._play = self._record()
        self._play()


class WithFallback:
    """Records work, until some cannot be recorded: from then on all of it runs launch by launch,
    which is said once, of `what`. A fault of the work itself shows when it runs."""

    def __init__(self, record: Callable[..., Callable[[], None]], what: str = STEPS) -> None:
        self.record: Callable[..., Callable[[], None]] | None = record
        self.what = what

    def __call__(self, work: Callable[[], None], *where: CaptureArena) -> Callable[[], None]:
        if self.record is not None:
            try:
                return self.record(work, *where)
            except EngineError as e:
                self.record = None
                log.warning("%s run launch by launch, which is slower: %s", self.what, e)
        return work


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """Do the work once to warm up, then record it; return what replays it.

    Raises EngineError with the reason where it cannot be recorded.
    """
    place = CaptureArena()
    place.launch(work)
    return place.record(work)
