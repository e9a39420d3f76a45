"""Whole decode steps as an engine for a GPU records them: chains of kernels, started by a driver,
which begin before the ones in front have ended; against the same steps kernel by kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir.backends.cuda.kernels.launch import Launch, start
from g4ir.backends.cuda.kernels.resources import Assembled, signature
from g4ir.backends.cuda.schedule import schedule
from g4ir.backends.cuda.token_loop import end_by_torch
from g4ir.backends.experimental import kernel_graph as module
from g4ir.backends.experimental.kernel_graph import (
    LoadedChain,
    chained,
    end_text,
    followers,
    read_chain,
    recorded_chain,
    recorded_end,
    write_chain,
)
from g4ir.backends.inductor.lower import SegmentModule
from g4ir.backends.inductor.segment import Glue, Segment, Step, graph_steps
from g4ir.backends.inductor.target import Target
from g4ir.errors import EngineError
from g4ir.ir.interpret import run_node
from g4ir.ir.text import parse_graph
from tests.cases import TABLES

from .orders import Queue, overlapping, poisoned
from .test_lowering import ROWS, SLOTS, drawn, graph_of

Tensors = dict[str, torch.Tensor]
Run = Callable[[int, Segment, list[torch.Tensor]], Sequence[torch.Tensor]]


class Interpreting:
    """A driver whose kernels are interpreted; what they are given comes as addresses alone."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.early: list[bool] = []
        self.queue: Queue

    def assemble(self, launch: Launch) -> Assembled:
        self.launches.append(launch)
        return Assembled(launch[0].__name__, 1, 0, str(len(self.launches) - 1).encode())

    def load(self, cubin: bytes, name: str, shared: int) -> Launch:
        found = self.launches[int(cubin)]
        assert found[0].__name__ == name and not shared
        return found

    def start(
        self,
        function: Launch,
        grid: Sequence[int],
        threads: int,
        shared: int,
        values: Sequence[Any],
        early: bool,
    ) -> None:
        kernel, _, args, meta = function
        assert threads == 32
        given = dict(zip((i for i, _ in signature(function).operands), values, strict=True))
        operands = tuple(
            a if i not in given else self.number(given[i].value, a) for i, a in enumerate(args)
        )
        if not early:
            self.queue.drain()
        self.early.append(early)
        start(kernel, tuple(grid), operands, **meta)

    @staticmethod
    def number(value: Any, like: Any) -> Any:
        if not isinstance(like, torch.Tensor):
            return value
        memory = (ctypes.c_uint8 * like.element_size()).from_address(value)
        return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)


def run_steps(steps: Sequence[Step], env: Tensors, written: dict[str, str], run: Run) -> Tensors:
    """All values of a step; caches are written in place."""
    env = {k: v.clone() for k, v in env.items()}
    for i, step in enumerate(steps):
        names = step.inputs if isinstance(step, Glue) else (*step.inputs, *step.params, *step.state)
        operands = [env[written.get(n, n)] for n in names]
        made = run_node(step.node, operands) if isinstance(step, Glue) else run(i, step, operands)
        env.update(zip(step.outputs, made, strict=True))
    return env


def by_kernels(target: Target) -> Run:
    def run(i: int, s: Segment, operands: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        made: Sequence[torch.Tensor] = SegmentModule(schedule(parse_graph(s.text), target))(
            *operands
        )
        return made

    return run


@pytest.mark.full
@pytest.mark.parametrize(("name", "rows"), TABLES["kernel graph"])
def test_steps(name: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = ROWS[rows]
    g, target = graph_of(name, "off", "decode", len(held)), Target("cpu", "h200", len(held))
    feeds, params, caches = drawn(g, len(held), 1, held)
    written = {v.name: cache for cache, v in g.next.items()}
    steps, env = graph_steps(g), {**feeds, **params, **caches}
    plain = by_kernels(target)
    want = run_steps(steps, env, written, plain)
    driver, chains = Interpreting(), dict[int, LoadedChain]()
    dims = {"B": len(held), "C": SLOTS}
    for i, s in enumerate(steps):
        if isinstance(s, Segment) and (
            made := recorded_chain(s.text, target, dims, driver.assemble)
        ):
            write_chain(tmp_path / str(i), s.text, *made)
            chains[i] = LoadedChain(*read_chain(tmp_path / str(i), s.text), driver, "cpu")
    layers = {n.outputs[0].name.split(".")[0] for n in g.nodes if n.outputs[0].name[0] == "L"}
    assert len(chains) == len(layers)
    early = followers(steps, chains)
    assert len(early) == len(chains) - 1
    alive: list[torch.Tensor] = []  # what kernels use that have not run
    monkeypatch.setattr(module, "room", lambda *given: alive.append(poison(*given)) or alive[-1])

    def run(i: int, s: Segment, operands: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if i in chains:
            assert chains[i].fits(operands)
            return chains[i].run(operands, i in early)
        driver.queue.drain()
        return plain(i, s, operands)

    with overlapping(7) as queue, poisoned():
        driver.queue = queue
        got = run_steps(steps, env, written, run)
        queue.drain()
    assert driver.early.count(False) == 1 < len(driver.early)
    for value in (*g.outputs, *g.state):
        assert torch.equal(got[value.name], want[value.name]), value.name


def test_the_end_of_a_step(tmp_path: Path) -> None:
    """As torch has it, by an engine's chain; other numbers of rows are torch's."""
    driver, path = Interpreting(), tmp_path / "end.chain"
    write_chain(path, end_text(3), *recorded_end(3, driver.assemble))
    loaded = LoadedChain(*read_chain(path, end_text(3)), driver, "cpu")
    rows = [torch.tensor(x) for x in ([7, 3, 5], [1, 2, 3], [5, 6, 7], [1, 1, 0])]
    for count in (3, 2):
        given = [torch.tensor([1.5, torch.nan, torch.inf]), *rows, torch.zeros(3)]
        given = [t[:count] for t in given]
        got, want = ([t.clone() for t in given] for _ in range(2))
        end_by_torch(want)
        with overlapping(7) as queue:
            driver.queue = queue
            chained(loaded, False, end_by_torch)(got)
            queue.drain()
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert driver.early == [False]
    with pytest.raises(EngineError, match="another segment"):
        read_chain(path, end_text(4))


def poison(size: int, device: str) -> torch.Tensor:
    return torch.full((size,), 255, dtype=torch.uint8, device=device)
