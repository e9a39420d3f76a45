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
        self._outputs: T
        self._feeds = {name: t.clone() for name, t in feeds.items()}
        self._step = step
        self._play = record(self._run)

    def _run(self) -> None:
        self._outputs = self._step(self._feeds)

    def replay(self, feeds: dict[str, torch.Tensor]) -> T:
        """Do the step once; what it returns the next one writes over."""
        for name, t in feeds.items():
            self._feeds[name].copy_(t)
        self._play()
        return self._outputs


class WithFallback:
    """Records steps, until one cannot be recorded: from then on all run launch by launch, which is
    said once. A fault of the work itself shows when it runs."""

    def __init__(self, record: Record) -> None:
        self.record: Record | None = record

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.record is not None:
            try:
                return self.record(work)
            except EngineError as e:
                self.record = None
                log.warning("decode steps run launch by launch, which is slower: %s", e)
        return work


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """Do the work once to warm up, then record it; return what replays it.

    Raises EngineError with the reason where it cannot be recorded.
    """
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        work()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # The stream of the warm-up: what works on it may have made events and streams for it.
        # What other threads do meanwhile, in sessions of their own, must not end the recording.
        # The outer context leaves the stream also where torch's own, after a failure, does not.
        capture = torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local")
        with torch.cuda.stream(current), _RECORDING, capture:
            work()
    except RuntimeError as e:
        raise EngineError(
            f"the decode step cannot be recorded as a CUDA graph: {str(e)[:300]}; load the engine "
            f"with cuda_graph=False (--no-cuda-graph) to run it launch by launch"
        ) from e
    return graph.replay
