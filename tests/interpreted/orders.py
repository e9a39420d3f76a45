"""The programs of a grid in other orders than one after the other, as a GPU may run them.

Triton's interpreter runs the first program to its end, then the second. So a program that reads
what another has not written yet, or counts itself before it has stored its part, is right there
and wrong on a GPU. Here many of them live at once, as threads of which one runs, and whenever it is
about to touch memory another one, drawn, goes on (`interleaved`). What a program does between two
accesses is seen by nobody, so that these are all orders that matter, but for those within one
program: its threads are not modelled.

`overlapping` has programs of several kernels live at once: a kernel begins when all programs of the
one in front have let it, and a program that waits goes on when that one has ended. A program that
writes before it has waited, or ends so, is an error; one that reads too early finds what is not
there yet.

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime import interpreter

from g4ir.backends.cuda.kernels.launch import ahead

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
WRITES = ("create_masked_store", "create_atomic_rmw", "create_atomic_cas")
#: kernels whose programs wait for those before them in the grid, which a GPU begins first
IN_ORDER = ("_qkv_decode",)
Index = tuple[int, ...]
Program = Callable[[], None]


class _Stopped(BaseException):
    """Ends the programs that are left when one has failed."""


@dataclass
class Grid:
    """A started kernel: its programs that have not begun, the next one last, and how many have yet
    to let the next kernel begin, and to end. Only one with `ahead` begins before the one in front
    has ended."""

    size: Index
    programs: list[tuple[Index, Program]]
    ahead: bool = False

    def __post_init__(self) -> None:
        self.holding = self.running = len(self.programs)


@dataclass
class Live:
    """A program that has begun: what it waits for, if it does, and where it lies in its kernel."""

    number: int
    kernel: int
    index: Index
    lock: threading.Lock
    front: bool = False  # waits for the end of the kernel in front
    waited: bool = False
    holding: bool = True


class Turns:
    """Programs as threads of which one runs; `step` lets another one, drawn, go on."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.waiting: dict[int, Live] = {}
        self.mine = threading.local()
        self.error: BaseException | None = None
        self.steps = self.live = 0

    def run(self, grids: list[Grid]) -> None:
        """All programs of all kernels to their ends; raises what one of them raises."""
        self.grids = grids
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        self._admit()
        self._wake()
        self.over.wait()
        for thread in self.threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def step(self, writes: bool = False) -> None:
        """Called by the program that runs, before an access."""
        me: Live | None = getattr(self.mine, "live", None)
        if me is None:
            return
        if writes and self.grids[me.kernel].ahead and not me.waited:
            raise AssertionError("a program writes before it has waited")
        self._pause(me)

    def let(self) -> None:
        """Called by a program that lets the next kernel begin."""
        self._release(self.mine.live)
        self._admit()
        self._pause(self.mine.live)

    def wait(self) -> None:
        """Called by a program that waits for the end of the kernel in front."""
        self.mine.live.front = True
        self._pause(self.mine.live)
        self.mine.live.front, self.mine.live.waited = False, True

    def _pause(self, me: Live) -> None:
        self.steps += 1
        self.waiting[me.number] = me
        me.lock = threading.Lock()
        me.lock.acquire()
        self._wake()
        self._go_on(me)

    def _go_on(self, me: Live) -> None:
        me.lock.acquire()
        if self.error is not None:
            raise _Stopped
        interpreter.interpreter_builder.set_grid_dim(*self.grids[me.kernel].size)
        interpreter.interpreter_builder.set_grid_idx(*me.index)

    def _release(self, me: Live) -> None:
        self.grids[me.kernel].holding -= me.holding
        me.holding = False

    def _admit(self) -> None:
        """Begin programs, while there is room, of the first kernel with such as have not begun."""
        while self.live < LIVE and self.error is None:
            at = next((i for i, g in enumerate(self.grids) if g.programs), None)
            if at is None or (at and not self._may_begin(at)):
                return
            lock = threading.Lock()
            lock.acquire()
            index, program = self.grids[at].programs.pop()
            me = Live(len(self.threads), at, index, lock)
            self.waiting[me.number] = me
            thread = threading.Thread(target=self._program, args=(me, program))
            self.threads.append(thread)
            self.live += 1
            thread.start()

    def _may_begin(self, at: int) -> bool:
        front = self.grids[at - 1]
        if self.grids[at].ahead:
            return front.holding == 0
        return all(g.running == 0 for g in self.grids[:at])

    def _can_go_on(self, me: Live) -> bool:
        return not (me.front and me.kernel and self.grids[me.kernel - 1].running)

    def _wake(self) -> None:
        """One of those that can go on; the end, if there is none."""
        if self.error is not None:
            ready = sorted(self.waiting)
        else:
            ready = sorted(n for n, me in self.waiting.items() if self._can_go_on(me))
        if not ready:
            self.over.set()
            return
        self.waiting.pop(self.draw.choice(ready)).lock.release()

    def _program(self, me: Live, run: Program) -> None:
        self.mine.live = me
        try:
            self._go_on(me)
            run()
            if self.grids[me.kernel].ahead and not me.waited:
                raise AssertionError("a program ends that has not waited")
        except _Stopped:
            pass
        except BaseException as e:
            self.error = e
        self._release(me)
        self.grids[me.kernel].running -= 1
        self.live -= 1
        self._admit()
        self._wake()


def _in_turns(draw: random.Random, seen: list[Turns]) -> Callable[[list[Grid]], None]:
    def run(grids: list[Grid]) -> None:
        seen[:] = [Turns(draw)]
        seen[0].run(grids)

    return run


@contextmanager
def interleaved(seed: int) -> Iterator[None]:
    """Within it the programs of a grid take turns at each access to memory."""
    seen: list[Turns] = []
    draw = random.Random(seed)
    with _stepping(seen), _grids(draw, _in_turns(draw, seen)):
        yield


@contextmanager
def overlapping(seed: int) -> Iterator[Queue]:
    """As `interleaved`, of kernels that begin before the ones in front have ended. They run when
    torch touches what they do, or at the end: as on a GPU, whose queue the host does not see."""
    seen: list[Turns] = []
    draw = random.Random(seed)
    queue = Queue(_in_turns(draw, seen))
    listed = patch.object(torch.Tensor, "tolist", queue.listed)  # which torch does not dispatch
    with _stepping(seen), _grids(draw, queue.run, queue.add), ahead(), listed, queue:
        yield queue
        queue.drain()


@contextmanager
def _stepping(seen: list[Turns]) -> Iterator[None]:
    """Within it the last of `seen` hears of each access, and of what kernels say to each other."""

    def stepping(access: Callable[..., Any], writes: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if seen:
                seen[0].step(writes)
            return access(*args, **kwargs)

        return call

    def said(asm: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, text: str, *operands: Any) -> Any:
            if seen and text.startswith("griddepcontrol"):
                (seen[0].wait if ".wait" in text else seen[0].let)()
            return asm(self, text, *operands)

        return call

    builder = interpreter.InterpreterBuilder
    with ExitStack() as stack:
        for name in ACCESSES:
            access = stepping(getattr(builder, name), name in WRITES)
            stack.enter_context(patch.object(builder, name, access))
        asm = said(builder.create_inline_asm)
        stack.enter_context(patch.object(builder, "create_inline_asm", asm))
        yield


class Queue(TorchDispatchMode):
    """Kernels that have been started and not run; torch's own work on what they touch runs them
    first. What the ops of kernels do beside starting them is to make room. `late`: the names of
    those that do not begin early."""

    def __init__(self, run: Callable[[list[Grid]], None]) -> None:
        super().__init__()
        self.run, self.started, self.late = run, list[Started](), set[str]()

    def add(self, started: Started) -> None:
        self.started.append(started)
        if not started.operands.get("AHEAD"):
            self.late.add(started.executor.fn.__name__)

    def drain(self) -> None:
        todo, self.started = self.started, []
        run_kernels(todo, self.run)

    @property
    def listed(self) -> Callable[[torch.Tensor], Any]:
        tolist = torch.Tensor.tolist

        def call(t: torch.Tensor) -> Any:
            self.drain()
            return tolist(t)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makes_room = func.is_view or func.namespace == "g4ir" or "empty" in func.name()
        if not makes_room and self.started:
            touched = {i for s in self.started for i in s.storages}
            given = tree_flatten((args, kwargs))[0]
            if any(isinstance(t, torch.Tensor) and storage(t) in touched for t in given):
                self.drain()
        return func(*args, **(kwargs or {}))


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Started:
    """A kernel with its operands, which live as long as it has not run."""

    executor: Any
    operands: dict[str, Any]
    draw: random.Random

    @property
    def storages(self) -> set[int]:
        return {storage(t) for t in self.operands.values() if isinstance(t, torch.Tensor)}

    def grid(self) -> Grid:
        fn, fixed = self.executor.fn, self.executor.constexprs
        operands = {
            k: v if k in fixed else interpreter._implicit_cvt(v) for k, v in self.operands.items()
        }
        grid = self.executor.grid
        size = (*(grid(operands) if callable(grid) else grid), 1, 1)[:3]
        programs = [(index, lambda: fn(**operands)) for index in product(*map(range, size))]
        if fn.__name__ in IN_ORDER:
            programs.sort(key=lambda program: program[0][::-1], reverse=True)
        else:
            self.draw.shuffle(programs)
        return Grid(size, programs, bool(self.operands.get("AHEAD")))


def run_kernels(started: list[Started], run: Callable[[list[Grid]], None]) -> None:
    """All of them, one after the other or overlapping, as `run` does."""
    with ExitStack() as stack:
        for s in started:
            stack.callback(interpreter._patch_lang(s.executor.fn).restore)
        run([s.grid() for s in started])


@contextmanager
def _grids(
    draw: random.Random,
    run: Callable[[list[Grid]], None],
    add: Callable[[Started], None] | None = None,
) -> Iterator[None]:
    """Within it kernels are started by `run`, which gets their programs in an order drawn, at once
    or, with `add`, by whoever has been given them."""

    def start(self: Any, *args: Any, **given: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        named = {k: v for k, v in given.items() if k in names}
        started = Started(self, inspect.getcallargs(self.fn, *args, **named), draw)
        if add:
            add(started)
        else:
            run_kernels([started], run)

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
ORDERS: dict[str, Callable[[int], Any]] = {"interleaved": interleaved, "overlapping": overlapping}
