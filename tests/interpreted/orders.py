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


class Turns:
    """Threads of which one runs, each with one program of a grid after the other; `step` lets
    another one, drawn, go on. `programs`: those that have not begun, the next one last."""

    def __init__(self, draw: random.Random, size: Index, run: Callable[[], None]) -> None:
        self.draw, self.size, self.run = draw, size, run
        self.programs = [*product(*map(range, size))]
        draw.shuffle(self.programs)
        self.waiting = [threading.Semaphore(0) for _ in self.programs[:LIVE]]
        self.mine = threading.local()
        self.errors: list[BaseException] = []

    def run_all(self) -> None:
        """All programs to their ends; raises what one of them raises."""
        threads = [threading.Thread(target=self._work, args=(gate,)) for gate in self.waiting]
        for thread in threads:
            thread.start()
        self._wake()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def step(self) -> None:
        """Called by the program that runs, before an access."""
        if gate := getattr(self.mine, "gate", None):
            self.waiting.append(gate)
            self._wake()
            gate.acquire()
            self._go_on()

    def _go_on(self) -> None:
        if self.errors:
            raise self.errors[0]
        interpreter.interpreter_builder.set_grid_dim(*self.size)
        interpreter.interpreter_builder.set_grid_idx(*self.mine.index)

    def _wake(self) -> None:
        """Let one of those that wait go on."""
        if self.waiting:
            self.waiting.pop(self.draw.randrange(len(self.waiting))).release()

    def _work(self, gate: threading.Semaphore) -> None:
        gate.acquire()
        self.mine.gate = gate
        try:
            while self.programs:
                self.mine.index = self.programs.pop()
                self._go_on()
                self.run()
        except BaseException as e:
            self.errors.append(e)
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
        running[:] = [Turns(draw, size, lambda: self.fn(**operands))]
        with ExitStack() as stack:
            stack.callback(interpreter._patch_lang(self.fn).restore)
            running[0].run_all()

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
