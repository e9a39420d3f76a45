"""Lowerings of a compiled region's nodes: the device's kernel, else the op's reference, else the
op's expansion. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from g4ir.ir.graph import Graph, Node
from g4ir.ops.codecs import dequantize_codes, from_tiles


@dataclass(frozen=True)
class Coded:
    """A quantised weight, for lowerings that read codes; `dtype`: dtype of the dequantised
    weight."""

    codes: Any
    scales: Any
    dtype: Any
    #: whether codes and scales are tiled
    tiles: bool = False

    def dense(self) -> Any:
        """Return the weight, dequantised."""
        parts = self.codes, self.scales
        if self.tiles:
            parts = from_tiles(self.codes), from_tiles(self.scales)
        return dequantize_codes(*parts, self.dtype)


@dataclass(frozen=True)
class Lowering:
    """Lowering of an op.

    call   (node, *tensors) -> the node's results, caches written in place
    takes  types of operands that it accepts in addition to tensors
    """

    call: Callable[..., Any]
    takes: tuple[type, ...] = ()


@dataclass(frozen=True)
class Lowered:
    """A graph and its lowerings.

    lowering  node of the graph or of an expansion -> its lowering; None: the op's reference, or
              without one its expansion
    """

    graph: Graph
    lowering: Callable[[Node], Lowering | None]


def lowered_by_op(g: Graph, table: Mapping[str, Lowering]) -> Lowered:
    """Return a graph whose nodes are lowered by `table`: op -> lowering."""
    return Lowered(g, lambda n: table.get(n.op))
