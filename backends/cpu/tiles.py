"""Quantised weights of products in tiles of 16 rows (kernels/tiles.h), for processors that multiply
tiles.

A weight lies in tiles where products alone take it, and a table that is also the head; a table that
is only gathered from keeps its rows, which are read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from g4ir.backends.host_cpu import cpu_flags
from g4ir.ir.graph import Builder, Graph, Node, Program
from g4ir.ops.codecs import FORM_OF, fits_tiles

from .isa import FROM

#: op on codes and scales -> the same of tiles
OF_TILES = {"dequantize": "dequantize_tiles", "embedding_quantized": "embedding_tiles"}
#: sets of extensions of a CPU with any of which it multiplies tiles: of most forms, and of others
_EXTENSIONS = ({"avx512_vnni", "avx512bw"}, {"avx2", "fma"}, {"asimddp"})
_OF_FORM = {"fp8": ({"avx512_vnni", "avx512bw", "avx512_bf16", "avx512vbmi"},)}


def multiplies_tiles(form: str) -> bool:
    """Whether this CPU has instructions for products of tiles of a form."""
    return any(need <= {*cpu_flags()} for need in _OF_FORM.get(form, _EXTENSIONS))


def in_tiles(program: Program) -> Program:
    """Return a program whose large quantised weights lie in tiles, made once at build."""
    graphs = program.graphs.values()
    tiled = {n["codes"].name for g in graphs for n in g.find("dequantize") if _fits(n)}
    return program.map(lambda g: replace(g, nodes=tuple(_nodes(g, tiled))))


def _fits(n: Node) -> bool:
    codes, scales = n["codes"].type, n["scales"].type
    fits = n.out.type.numel() >= FROM and fits_tiles(codes, scales)
    return fits and multiplies_tiles(FORM_OF[codes.dtype])


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
