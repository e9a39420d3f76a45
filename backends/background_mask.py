"""Logits masks computed in threads, so that other sequences do not wait for a slow one.

The scheduler starts the masks of a step together and waits until PATIENCE_S after the start; a
sequence whose mask is not ready by then skips steps until it is. A mask that takes more than MAX_S
of CPU time fails its sequence. (CPU time, not wall time: a busy machine must not fail requests.)
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from g4ir.errors import InputError

#: seconds after the start of a mask during which decode steps wait for it
PATIENCE_S = 0.02
#: CPU seconds of one mask: beyond LOW_S its thread gets a low priority, beyond MAX_S its sequence
#: fails
LOW_S, MAX_S = 0.1, 1.0
#: niceness of a low-priority thread, which gets about a tenth of a normal thread's CPU time. With
#: less CPU time it would hold the GIL, for which all others wait, for longer
NICE = 10


def lower_priority(thread: int) -> None:
    """Lower the priority of a thread, by its native id. Does nothing except on Linux, where
    priorities are per thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, NICE)


class LogitsMask(Protocol):
    """Restricts the next token of one sequence, for example to a grammar; called before each
    sampling step. The sampler of each sequence makes a shallow copy (`copy.copy`)."""

    def mask(self, generated: Sequence[int]) -> Any:
        """Return the tokens allowed after the `generated` ones: booleans [vocab], or int32 words
        with a bit for each token, the lowest bit first; a torch or numpy array. None: all."""


class _Computation:
    """One logits mask, computed in a thread."""

    def __init__(self, mask: LogitsMask, generated: Sequence[int]) -> None:
        self.count, self.words, self.error = len(generated), None, None
        self._mask, self._generated = mask, generated
        #: time.monotonic() until which decode steps wait for this mask
        self.patience_end = time.monotonic() + PATIENCE_S
        self._lock, self._arrived = threading.Lock(), threading.Event()
        #: the thread's CPU-time clock and its value at the start; None before the thread runs
        self._clock: tuple[int, float] | None = None
        #: CPU seconds of the whole computation; None before its end
        self._cpu_s: float | None = None
        self._lowered = False
        self._thread = threading.Thread(target=self._run, name="g4ir-mask", daemon=True)
        self._thread.start()

    words: Any
    error: Exception | None

    def _run(self) -> None:
        begin = time.thread_time()
        self._clock = time.pthread_getcpuclockid(threading.get_ident()), begin
        try:
            self.words = self._mask.mask(self._generated)
        except Exception as e:
            self.error = e
        with self._lock:
            self._cpu_s = time.thread_time() - begin
        self._arrived.set()

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; return whether the computation has ended."""
        return self._arrived.wait(timeout)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the computation so far; lowers the thread's priority once they
        exceed LOW_S."""
        with self._lock:  # the thread cannot end meanwhile, so its clock exists
            if self._cpu_s is not None or self._clock is None:
                return self._cpu_s or 0.0
            clock, begin = self._clock
            took = time.clock_gettime(clock) - begin
            if took > LOW_S and not self._lowered and self._thread.native_id is not None:
                self._lowered = True
                lower_priority(self._thread.native_id)
            return took


@dataclass
class BackgroundMask:
    """The logits mask `inner`, each computation of which runs in a thread. `named`: the request's
    field that set the mask, for errors."""

    inner: LogitsMask
    named: str
    _newest: _Computation | None = field(default=None, init=False)

    def __copy__(self) -> BackgroundMask:
        return BackgroundMask(copy(self.inner), self.named)

    def start(self, generated: Sequence[int]) -> _Computation:
        """Start to compute the mask of the next token, unless it is started already; return the
        computation."""
        if self._newest is None or self._newest.count != len(generated):
            self._newest = _Computation(self.inner, generated)
        return self._newest

    def ready(self, generated: Sequence[int], timeout: float) -> bool:
        """Wait for the mask of the next token, up to `timeout` seconds or until PATIENCE_S after
        its start, if that is later; return whether `mask` now returns (or raises) at once."""
        newest = self.start(generated)
        remaining = newest.patience_end - time.monotonic()
        return newest.wait(max(timeout, remaining, 0.0)) or newest.cpu_s() > MAX_S

    def mask(self, generated: Sequence[int]) -> Any:
        """Wait for the mask of the next token and return it, or raise the error of its computation;
        InputError if that takes more than MAX_S of CPU time."""
        newest = self.start(generated)
        while not self.ready(generated, PATIENCE_S):
            pass
        if (took := newest.cpu_s()) > MAX_S:
            raise InputError(
                f"{self.named}: the mask of the next token, after {len(generated)} tokens, took "
                f"{took:.1f} s of CPU time; at most {MAX_S:g} s is allowed: simplify the constraint"
            )
        if newest.error is not None:
            raise newest.error
        return newest.words
