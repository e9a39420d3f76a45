"""Quantised weights of products in tiles of 16 rows (kernels/layout.h).

A weight lies in tiles where products alone take it, and a table that is also the head; a table that
is only gathered from keeps its rows, which are read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from g4ir.ir.graph import Builder, Graph, Node, Program
from g4ir.ops.codecs import fits_tiles

from .isa import FROM

#: op on codes and scales -> the same of tiles
OF_TILES = {"dequantize": "dequantize_tiles", "embedding_quantized": "embedding_tiles"}


def in_tiles(program: Program) -> Program:
    """Return a program whose large quantised weights lie in tiles, made once at build."""
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
        codes, scales, *rest = n.inputs
        parts = [b.emit("tiles", v, name=_named(v.name)) for v in (codes, scales)]
        b.emit(OF_TILES[n.op], *parts, *rest, name=n.out.name, **n.attrs)
        yield from b.nodes


def _named(part: str) -> str:
    """`L0.attn.wq.codes` -> `L0.attn.wq.tiles.codes`"""
    weight, _, kind = part.rpartition(".")
    return f"{weight}.tiles.{kind}"
