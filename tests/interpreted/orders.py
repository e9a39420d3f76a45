"""The programs of a grid in other orders than one after the other, as a GPU may run them.

Triton's interpreter runs the first program to its end, then the second. So a program that reads
what another has not written yet, or counts itself before it has stored its part, is right there
and wrong on a GPU. Here the programs run in an order that is drawn (`shuffled`), or many of them
live at once, as threads of which one runs, and whenever it is about to touch memory another one
goes on (`interleaved`). What a program does between two accesses is seen by nobody, so that these
are all orders that matter, but for those within one program: its threads are not modelled.

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
ACCESSES = (
    "create_masked_load",
    "create_masked_store",
    "create_atomic_rmw",
    "create_atomic_cas",
    "create_barrier",
)
Index = tuple[int, ...]
Program = Callable[[], None]


class _Stopped(BaseException):
    """Ends the programs that are left when one has failed."""


class Turns:
    """Programs as threads of which one runs; `step` lets another one, drawn, go on."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.waiting: dict[int, threading.Lock] = {}
        self.mine = threading.local()
        self.error: BaseException | None = None
        self.steps = 0

    def run(self, programs: list[tuple[Index, Program]]) -> None:
        """All of them to their ends; raises what one of them raises."""
        self.left = list(programs)
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        for _ in range(min(LIVE, len(self.left))):
            self._admit()
        self._wake()
        self.over.wait()
        for thread in self.threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def step(self) -> None:
        """Called by the program that runs, before an access."""
        me: int | None = getattr(self.mine, "number", None)
        if me is None:
            return
        self.steps += 1
        self.waiting[me] = lock = threading.Lock()
        lock.acquire()
        self._wake()
        self._go_on(lock)

    def _go_on(self, lock: threading.Lock) -> None:
        lock.acquire()
        if self.error is not None:
            raise _Stopped
        interpreter.interpreter_builder.set_grid_idx(*self.mine.index)

    def _admit(self) -> None:
        number, lock = len(self.threads), threading.Lock()
        lock.acquire()
        self.waiting[number] = lock
        index, program = self.left.pop()
        thread = threading.Thread(target=self._program, args=(number, lock, index, program))
        self.threads.append(thread)
        thread.start()

    def _wake(self) -> None:
        """One of those that wait; the end, if there is none."""
        if not self.waiting:
            self.over.set()
            return
        self.waiting.pop(self.draw.choice(sorted(self.waiting))).release()

    def _program(self, number: int, lock: threading.Lock, index: Index, run: Program) -> None:
        self.mine.number, self.mine.index = number, index
        try:
            self._go_on(lock)
            run()
        except _Stopped:
            pass
        except BaseException as e:
            self.error = e
        if self.left and self.error is None:
            self._admit()
        self._wake()


def _in_turns(draw: random.Random, seen: list[Turns]) -> Callable[..., None]:
    def run(programs: list[tuple[Index, Program]]) -> None:
        seen[:] = [Turns(draw)]
        seen[0].run(programs)

    return run


def _one_by_one(programs: list[tuple[Index, Program]]) -> None:
    for index, program in programs:
        interpreter.interpreter_builder.set_grid_idx(*index)
        program()


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Within it the programs of a grid run one after the other, in an order that is drawn."""
    with _grids(random.Random(seed), _one_by_one):
        yield


@contextmanager
def interleaved(seed: int) -> Iterator[None]:
    """Within it the programs of a grid take turns at each access to memory."""
    seen: list[Turns] = []
    draw = random.Random(seed)

    def stepping(access: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if seen:
                seen[0].step()
            return access(*args, **kwargs)

        return call

    with ExitStack() as stack:
        builder = interpreter.InterpreterBuilder
        for name in ACCESSES:
            access = stepping(getattr(builder, name))
            stack.enter_context(patch.object(builder, name, access))
        stack.enter_context(_grids(draw, _in_turns(draw, seen)))
        yield


@contextmanager
def _grids(
    draw: random.Random, run: Callable[[list[tuple[Index, Program]]], None]
) -> Iterator[None]:
    """Within it kernels are started by `run`, which gets their programs in an order drawn."""

    def start(self: Any, *args: Any, **given: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        held, named = self._init_args_hst(args, {k: v for k, v in given.items() if k in names})
        scope = interpreter._patch_lang(self.fn)
        try:
            operands = inspect.getcallargs(self.fn, *held, **named)
            operands = {
                k: v if k in self.constexprs else interpreter._implicit_cvt(v)
                for k, v in operands.items()
            }
            grid = self.grid(operands) if callable(self.grid) else self.grid
            grid = (*grid, 1, 1)[:3]
            interpreter.interpreter_builder.set_grid_dim(*grid)
            programs = [
                (index, lambda: self.fn(**operands)) for index in product(*map(range, grid))
            ]
            draw.shuffle(programs)
            run(programs)
        finally:
            scope.restore()
        self._restore_args_dev(args, held, {}, {})

    with patch.object(interpreter.GridExecutor, "__call__", start):
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
ORDERS: dict[str, Callable[[int], Any]] = {"shuffled": shuffled, "interleaved": interleaved}
