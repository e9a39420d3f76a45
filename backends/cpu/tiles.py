"""Quantised matmul weights in tiles of 16 rows (kernels/layout.h).

Large weights of matmuls are tiled, and so is an embedding table that is also the LM head; a table
for lookups only keeps its row layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from g4ir.ir.graph import Builder, Graph, Node, Program
from g4ir.ops.codecs import fits_tiles

from .isa import FROM

#: op on codes and scales -> the op on tiles
OF_TILES = {"dequantize": "dequantize_tiles", "embedding_quantized": "embedding_tiles"}


def in_tiles(program: Program) -> Program:
    """Return the program with quantised matmul weights of at least FROM elements in tiles, if they
    fit."""
    graphs = program.graphs.values()
    tiled = {n["codes"].name for g in graphs for n in g.find("dequantize") if _fits(n)}
    return program.map(lambda g: replace(g, nodes=tuple(_nodes(g, tiled))))


def _fits(n: Node) -> bool:
    return n.out.type.numel() >= FROM and fits_tiles(n["codes"].type, n["scales"].type)


def _nodes(g: Graph, tiled: set[str]) -> Iterator[Node]:
    for n in g.nodes:
        if n.op not in OF_TILES or n["codes"].name not in tiled:
            yield n
            continue
        b = Builder(g.name)
        codes, scales, *operands = n.inputs
        parts = [b.emit("tiles", v, name=_named(v.name)) for v in (codes, scales)]
        b.emit(OF_TILES[n.op], *parts, *operands, name=n.out.name, **n.attrs)
        yield from b.nodes


def _named(part: str) -> str:
    """`L0.attn.wq.codes` -> `L0.attn.wq.tiles.codes`"""
    weight, _, kind = part.rpartition(".")
    return f"{weight}.tiles.{kind}"
