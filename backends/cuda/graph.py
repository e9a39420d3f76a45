"""CUDA graphs: warm up, capture, replay."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from g4ir.errors import EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")
#: captures a function's work; returns the function that replays it
Record = Callable[[Callable[[], None]], Callable[[], None]]
#: lock: one thread captures a step at a time
_RECORDING = threading.Lock()


class Captured(Generic[T]):
    """A step captured by `record`, with its static input and output tensors.

    The warm-up writes the same values to the same cache slots as the first replay, so running the
    step twice changes nothing.
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
        """Copy the inputs, run the step, and return its outputs, which the next replay
        overwrites."""
        for name, t in feeds.items():
            self._feeds[name].copy_(t)
        self._play()
        return self._outputs


class WithFallback:
    """Captures steps by `record` until one raises EngineError; that one and all later ones run
    launch by launch, with one warning. Other errors are raised."""

    def __init__(self, record: Record) -> None:
        self.record: Record | None = record

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.record is not None:
            try:
                return self.record(work)
            except EngineError as e:
                self.record = None
                log.warning("steps run launch by launch, which is slower: %s", e)
        return work


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """Run `work` once (warm-up), capture it as a CUDA graph and return the replay function.

    Raises EngineError with the reason if the work cannot be captured.
    """
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        work()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # The warm-up's stream: libraries may have created events and workspaces for it. Work of
        # other sessions' threads must not abort the capture (thread_local). The outer context
        # restores the stream even after a failure, when torch's does not.
        capture = torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local")
        with torch.cuda.stream(current), _RECORDING, capture:
            work()
    except RuntimeError as e:
        raise EngineError(
            f"a step cannot be recorded as a CUDA graph: {str(e)[:300]}; load the engine with "
            f"cuda_graph=False (--set cuda_graph=off) to skip the attempt and this warning"
        ) from e
    return graph.replay
