"""A product of a weight in codes, through a fused op, and one thing more that takes its operand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from g4ir.backends.torch_compile import pyops
from g4ir.backends.torch_compile.lower import SegmentModule
from g4ir.backends.torch_compile.schedule import schedule
from g4ir.backends.torch_compile.target import Target
from g4ir.ir.graph import Builder
from g4ir.ir.interpret import interpret
from g4ir.ir.rewrite import split_prologue
from g4ir.ops.codecs import fits_tiles, to_tiles
from g4ir.ops.types import Type, dtype_name

Kernel = Callable[..., torch.Tensor]


def asked_of(
    name: str, kernel: Kernel, form: str, rows_to: str | None, patch: pytest.MonkeyPatch
) -> tuple[list[torch.dtype], torch.dtype]:
    """Return the dtypes of codes with which the CPU asked for a kernel, and that of the weight's
    codes; results are as the definition has them. `rows_to`: rows are rounded to a format too."""
    b = Builder()
    x, weight = b.input("x", Type("f32", (1, 1, 64))), b.param("w", Type("f32", (96, 64)))
    parts = b.emit_all("quantize", weight, form=form, group=0, scale="f32")
    w = b.emit("dequantize", *parts, to="f32", name="w.dense")
    rows = b.emit("fake_quantize", x, form=rows_to, name="rows") if rows_to else x
    h = b.emit("linear_glu", rows, w, act="silu", name="h")
    other = b.emit("heads", rows if rows_to else w, n=2, name="as it is")
    prologue, g = split_prologue(b.graph(h, other))
    made = {**interpret(prologue, {}, {"w": torch.randn(96, 64)}, {})[0]}
    made["x"] = torch.randn(1, 1, 64)
    want, _ = interpret(g, {"x": made["x"]}, {v.name: made[v.name] for v in g.params}, {})
    asked = []

    def counted(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, tiles: bool) -> Any:
        asked.append(codes.dtype)
        return kernel(x, codes, scales, tiles)

    patch.setattr(pyops, "FROM", 1)
    patch.setattr(torch.ops.g4ir, name, counted)
    got = SegmentModule(schedule(g, Target("cpu")))(*(made[v.name] for v in g.sources()))
    for v, t in zip(g.outputs, got, strict=True):
        torch.testing.assert_close(t, want[v.name], rtol=1e-5, atol=1e-4)
    return asked, made[parts[0].name].dtype


def layouts(codes: torch.Tensor, scales: torch.Tensor) -> Iterator[tuple[Any, Any, bool]]:
    """A weight in rows, and in tiles where it can lie so."""
    yield codes, scales, False
    if fits_tiles(*(Type(dtype_name(t.dtype), tuple(t.shape)) for t in (codes, scales))):
        yield to_tiles(codes), to_tiles(scales), True
