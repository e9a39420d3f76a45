"""Lowerings of a compiled region's nodes: the device's kernel, else the op's reference, else the
op's expansion. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from g4ir.ir.graph import Graph, Node
from g4ir.ops.codecs import dequantize_codes, from_tiles


@dataclass(frozen=True)
class Coded:
    """A quantised weight, for lowerings that read codes; `dtype`: that of the dequantised
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

    call   (run, node, *tensors) -> the node's results, caches written in place
    takes  types of operands that it accepts in addition to tensors
    """

    call: Callable[..., Any]
    takes: tuple[type, ...] = ()


class Lowered(Protocol):
    """A graph and the lowerings of its nodes."""

    @property
    def graph(self) -> Graph: ...

    def lowering(self, n: Node) -> Lowering | None:
        """Return the lowering of a node of the graph or of an expansion; None: the op's
        reference."""


@dataclass(frozen=True)
class LoweredByOp:
    """A graph and the lowerings of its ops."""

    graph: Graph
    table: Mapping[str, Lowering]

    def lowering(self, n: Node) -> Lowering | None:
        return self.table.get(n.op)


@dataclass(frozen=True)
class Run:
    """One pass over a segment: lowerings read and add values by name in `env`."""

    lowered: Any
    env: dict[str, Any]

    @property
    def graph(self) -> Graph:
        return self.lowered.graph
