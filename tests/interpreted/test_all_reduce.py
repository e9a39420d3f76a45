"""Sums over ranks in a kernel: the programs of all ranks live at once and take turns at each access
to memory, message after message, against the definition in lockstep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from g4ir.backends.torch_compile.kernels import all_reduce_triton as module
from g4ir.backends.torch_compile.kernels.all_reduce_triton import (
    all_reduce_norm_residual,
    buffer_bytes,
)
from g4ir.ir.graph import Builder, Graph
from g4ir.ops.types import Type
from tests.lockstep import lockstep

from .orders import Grid, Started, Turns, _stepping

Tensor = torch.Tensor
EPS, D = 1e-6, 24
#: messages one after the other, of one and of two sums: more than there are halves
MESSAGES = (False, True, False, False, True)


def graph(dual: bool, rows: int, ranks: int) -> Graph:
    b, x, w = Builder(), Type("bf16", (rows, 1, D)), Type("bf16", (D,))
    names = ("a", "w_a", "b", "w_b", "w", "r") if dual else ("x", "r", "w")
    given = [b.input(n, w if n[0] == "w" else x) for n in names]
    given += [b.input("s", Type("bf16", (1,))), b.input("w1", w)]
    op = "all_reduce_dual_norm_residual" if dual else "all_reduce_norm_residual"
    attrs = {"eps": EPS, "scaled": True, "weighted": (True, False), "ranks": ranks}
    return b.graph(*b.emit_all(op, *given, name=["h", "n1", "n2"], **attrs))


def drawn(g: Graph, ranks: int, seed: int) -> list[dict[str, Tensor]]:
    """Of each rank: what is summed is its own, the rest is the same."""
    random = torch.Generator().manual_seed(seed)

    def one(shape: Sequence[Any]) -> Tensor:
        return torch.randn([int(d) for d in shape], generator=random).bfloat16()

    alike = {v.name: one(v.type.shape) for v in g.inputs}
    own = [n for n in ("a", "b", "x") if n in alike]
    return [{**alike, **{n: one(alike[n].shape) for n in own}} for _ in range(ranks)]


def call(dual: bool, given: dict[str, Tensor], peers: Tensor, ranks: int) -> list[Tensor]:
    *tensors, scalar, w1 = given.values()
    both = dict(zip(("w_x", "b", "w_b"), (given[n] for n in ("w_a", "b", "w_b")))) if dual else {}
    first = (given["a"], given["r"], given["w"]) if dual else tensors
    end = (scalar, [w1, None], EPS, peers, ranks, 1)
    made: list[Tensor] = all_reduce_norm_residual(*first, *end, **both)
    return made


def run_ranks(rows: int, ranks: int, seed: int, messages: Sequence[bool] = MESSAGES) -> Any:
    """What each rank makes of each message, and what it should. A program of the grid is a row of a
    rank, which goes through its messages as a stream does."""
    buffers = [torch.zeros(buffer_bytes(ranks), dtype=torch.uint8) for _ in range(ranks)]
    at = [b.data_ptr() for b in buffers]
    streams: list[list[Started]] = [[] for _ in range(ranks)]
    draw, got, want = Random(seed), [], []

    for i, dual in enumerate(messages):
        g = graph(dual, rows, ranks)
        given = drawn(g, ranks, 100 * seed + i)
        made = []
        for rank in range(ranks):
            peers = torch.tensor([rank, *at])
            with patch.object(interpreter.GridExecutor, "__call__", started(streams[rank], draw)):
                made.append(call(dual, given[rank], peers, ranks))
        got.append(made)
        out = [[*o.values()] for o, _ in each_rank(g, given)]
        want.append(out)
    run_streams(streams, rows, draw)
    return got, want


def each_rank(g: Graph, given: list[dict[str, Tensor]]) -> Any:
    """The definition, of inputs of which ranks have their own."""
    weights = Graph(g.name, (), g.inputs, (), g.nodes, g.outputs)
    return lockstep(weights, {}, given, [{}] * len(given))


def started(stream: list[Started], draw: Random) -> Callable[..., None]:
    """Put a kernel into a stream in the place of running it."""

    def start(self: Any, *args: Any, **given: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        named = {k: v for k, v in given.items() if k in names}
        stream.append(Started(self, inspect.getcallargs(self.fn, *args, **named), draw))

    return start


def run_streams(streams: list[list[Started]], rows: int, draw: Random) -> None:
    with ExitStack() as stack:
        for fn in {id(s.executor.fn): s.executor.fn for many in streams for s in many}.values():
            stack.callback(interpreter._patch_lang(fn).restore)
        grids = [[dict(s.grid().programs) for s in many] for many in streams]

        def program(rank: int, row: int) -> Callable[[], None]:
            def run() -> None:
                for grid in grids[rank]:
                    grid[row, 0, 0]()

            return run

        programs = [
            ((row, 0, 0), program(rank, row)) for rank in range(len(streams)) for row in range(rows)
        ]
        draw.shuffle(programs)
        turns = Turns(draw)
        with _stepping([turns]):
            turns.run([Grid((rows, 1, 1), programs)])


def agree(made: Any) -> bool:
    """Whether all ranks have the same bits, as defined but for the few that a norm in another order
    of sums rounds apart."""
    return all(
        torch.equal(x, first) and (x != y).float().mean() < 0.05 and torch.allclose(x, y, 2**-6)
        for ranks, wanted in zip(*made, strict=True)
        for mine, due in zip(ranks, wanted, strict=True)
        for x, first, y in zip(mine, ranks[0], due, strict=True)
    )


CASES = [(1, 2, 0), (1, 4, 1), (3, 2, 2), (2, 4, 3)]


@pytest.mark.parametrize(("rows", "ranks", "seed"), CASES)
def test_ranks_take_turns(rows: int, ranks: int, seed: int) -> None:
    assert agree(run_ranks(rows, ranks, seed))


# --- what would be found ------------------------------------------------------------------------


SEEDS = range(12)
ROWS, SLOT = module.ROWS, module.SLOT_BYTES


@triton.jit
def _no_wait(peers, me, row, epoch, RANKS):
    return 1.0


@triton.jit
def _one_half(peers, of, row, epoch, like, RANKS):
    at = 4 * ROWS * (1 + RANKS) + row * SLOT
    return (tl.load(peers + 1 + of) + at).to(tl.pointer_type(like.dtype.element_ty))


@triton.jit
def _no_flags(peers, me, row, epoch, RANKS):
    pass


@pytest.mark.parametrize(
    ("part", "other"), [("_wait", _no_wait), ("_slot", _one_half)], ids=["no wait", "one half"]
)
def test_races_are_found(part: str, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait, or with one half in the place of two, some order is wrong."""
    assert all(agree(run_ranks(1, 2, seed)) for seed in SEEDS)
    monkeypatch.setattr(module, part, other)
    assert not all(agree(run_ranks(1, 2, seed)) for seed in SEEDS)


def test_a_rank_that_does_not_come_makes_rows_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_raise_flags", _no_flags)
    monkeypatch.setattr(module, "LOOKS", tl.constexpr(3))
    got, _ = run_ranks(1, 2, 0, (False, True))
    assert all(torch.isnan(t).all() for message in got for mine in message for t in mine)
