"""What networks of tensor primitives have whatever the target: ONNX and TensorRT compute each op's
decomposition, and whole models, in tests of their own."""

from __future__ import annotations

import torch

from g4ir.backends.primitives.lowerings import LOWERINGS, OUTSIDE
from g4ir.backends.primitives.network import turn
from g4ir.ops import OPS


def test_every_op_is_lowered_or_expands() -> None:
    """An op without both would fail a build."""
    whole = {name for name, op in OPS.items() if op.expand is None}
    assert whole <= LOWERINGS.keys() | OUTSIDE <= OPS.keys()


def test_rings_are_turned_before_a_chunk_crosses_their_end() -> None:
    """Each row by itself; every position stays in slot (p + turned) mod R. Single tokens fit."""
    held, turned = torch.tensor([5, 8, 14]), torch.tensor([0, 0, 2])
    slot = (torch.arange(40)[:, None] + turned) % 10
    ring = torch.zeros(3, 1, 10, 1)
    for row, count in enumerate(held.tolist()):
        for p in range(count):
            ring[row, 0, slot[p, row]] = p + 1
    turn(held[:, None] + 1, turned, [ring])
    assert turned.tolist() == [0, 0, 2]
    turn(held[:, None] + torch.arange(4), turned, [ring])
    assert turned.tolist() == [0, 2, 2]
    for row, count in enumerate(held.tolist()):
        assert (count + int(turned[row])) % 10 + 4 <= 10
        for p in range(max(0, count - 10), count):
            assert ring[row, 0, (p + int(turned[row])) % 10] == p + 1
