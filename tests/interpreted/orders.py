"""The programs of a grid in other orders than one after the other, as a GPU may run them.

Triton's interpreter runs the first program to its end, then the second. So a program that reads
what another has not written yet, or counts itself before it has stored its part, is right there
and wrong on a GPU. Here many of them live at once, as threads of which one runs, and whenever it is
about to touch memory another one, drawn, goes on (`interleaved`). What a program does between two
accesses is seen by nobody, so that these are all orders that matter, but for those within one
program: its threads are not modelled.

`poisoned` fills fresh memory with what no sum survives.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime import interpreter

#: programs that live at a time
LIVE = 12
#: where a program touches what others see
WORDS = ("masked_load", "masked_store", "atomic_rmw", "atomic_cas", "barrier")
ACCESSES = tuple(f"create_{word}" for word in WORDS)
Index = tuple[int, ...]
Program = Callable[[], None]


class _Stopped(BaseException):
    """Ends the programs that are left when one has failed."""


@dataclass
class Live:
    """A program that has begun."""

    number: int
    index: Index
    lock: threading.Lock


class Turns:
    """Programs of a grid as threads of which one runs; `step` lets another one, drawn, go on.
    `programs`: those that have not begun, the next one last."""

    def __init__(
        self, draw: random.Random, size: Index, programs: list[tuple[Index, Program]]
    ) -> None:
        self.draw, self.size, self.programs = draw, size, programs
        self.waiting: dict[int, Live] = {}
        self.mine = threading.local()
        self.error: BaseException | None = None
        self.live = 0
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []

    def run(self) -> None:
        """All programs to their ends; raises what one of them raises."""
        self._admit()
        self._wake()
        self.over.wait()
        for thread in self.threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def step(self) -> None:
        """Called by the program that runs, before an access."""
        me: Live | None = getattr(self.mine, "live", None)
        if me is not None:
            self.waiting[me.number] = me
            me.lock = threading.Lock()
            me.lock.acquire()
            self._wake()
            self._go_on(me)

    def _go_on(self, me: Live) -> None:
        me.lock.acquire()
        if self.error is not None:
            raise _Stopped
        interpreter.interpreter_builder.set_grid_dim(*self.size)
        interpreter.interpreter_builder.set_grid_idx(*me.index)

    def _admit(self) -> None:
        """Begin programs, up to LIVE at a time."""
        while self.programs and self.live < LIVE and self.error is None:
            lock = threading.Lock()
            lock.acquire()
            index, program = self.programs.pop()
            me = Live(len(self.threads), index, lock)
            self.waiting[me.number] = me
            thread = threading.Thread(target=self._program, args=(me, program))
            self.threads.append(thread)
            self.live += 1
            thread.start()

    def _wake(self) -> None:
        """Let one of those that wait go on; the end, if there is none."""
        if self.waiting:
            self.waiting.pop(self.draw.choice(sorted(self.waiting))).lock.release()
        else:
            self.over.set()

    def _program(self, me: Live, run: Program) -> None:
        self.mine.live = me
        try:
            self._go_on(me)
            run()
        except _Stopped:
            pass
        except BaseException as e:
            self.error = e
        self.live -= 1
        self._admit()
        self._wake()


@contextmanager
def interleaved(seed: int) -> Iterator[None]:
    """Within it kernels start with their programs in an order drawn, which take turns at each
    access to memory."""
    running: list[Turns] = []
    draw = random.Random(seed)

    def stepping(access: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if running:
                running[0].step()
            return access(*args, **kwargs)

        return call

    def start(self: Any, *args: Any, **given: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        named = {k: v for k, v in given.items() if k in names}
        operands = {
            k: v if k in self.constexprs else interpreter._implicit_cvt(v)
            for k, v in inspect.getcallargs(self.fn, *args, **named).items()
        }
        grid = self.grid(operands) if callable(self.grid) else self.grid
        size = (*grid, 1, 1)[:3]
        programs = [(index, lambda: self.fn(**operands)) for index in product(*map(range, size))]
        draw.shuffle(programs)
        running[:] = [Turns(draw, size, programs)]
        with ExitStack() as stack:
            stack.callback(interpreter._patch_lang(self.fn).restore)
            running[0].run()

    with ExitStack() as stack:
        for name in ACCESSES:
            access = stepping(getattr(interpreter.InterpreterBuilder, name))
            stack.enter_context(patch.object(interpreter.InterpreterBuilder, name, access))
        stack.enter_context(patch.object(interpreter.GridExecutor, "__call__", start))
        yield


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it new tensors that torch does not fill hold NaN, or numbers out of all ranges."""

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            if made.is_floating_point():
                return made.fill_(float("nan"))
            return made.fill_(torch.iinfo(made.dtype).max // 3) if made.dtype in WHOLE else made

        return call

    with (
        patch.object(torch, "empty", filled(torch.empty)),
        patch.object(torch, "empty_like", filled(torch.empty_like)),
        patch.object(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty)),
    ):
        yield


WHOLE = (torch.int32, torch.int64)
