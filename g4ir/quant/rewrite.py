"""w  ->  dequantize(quantize(w)), for the weights of a quantisation config.

`quantize` depends on params alone and runs at build; `dequantize` stays in the graph, before its
matmul. Tables are gathered as codes: `embedding` becomes `embedding_quantized`. If the checkpoint
is already quantised, codes and scales are params.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from g4ir.ir.graph import Builder, Graph, Node, Program, Value
from g4ir.model.names import CODES, SCALES, checkpoint_name
from g4ir.model.text import build_graph, complete_graphs
from g4ir.ops.codecs import AS_BYTES, FORMAT_OF, FORMATS
from g4ir.ops.types import Type
from g4ir.spec.record import Spec

from .recipe import ENGINE, FROM_CHECKPOINT, QuantConfig, Rule, Scheme

#: op -> its operands that may be quantised
WEIGHTS = {"linear": ("w",), "experts": ("gate_up", "down"), "embedding": ("table",)}
#: ops that read codes and scales row by row, neither transposed nor in tiles
QUANTISED_OPS = ("dequantize", "embedding_quantized")
#: suffixes in the names of dequantised weights, and of those converted to int8
DENSE, BYTES = ".dense", ".bytes"


@lru_cache(maxsize=32)
def weights_of(spec: Spec) -> Mapping[str, Type]:
    """Return the params of the text model that can be quantised."""
    graphs = [build_graph(spec, phase, all_logits=True) for phase in complete_graphs(spec)]
    used = [v for g in graphs for n in g.nodes for v in _weights(n)]
    return {v.name: v.type for v in used}


@lru_cache(maxsize=32)
def schemes_of(config: QuantConfig | None, spec: Spec) -> Mapping[str, Scheme]:
    """Return weight -> scheme of a spec's text model, empty without a config; InputError if the
    config does not fit the spec."""
    return config.schemes(weights_of(spec), bool(spec.embedding)) if config else {}


def quantise(program: Program, spec: Spec, config: QuantConfig | None, dtype: str) -> Program:
    """Return the program with its weights quantised by `config`, if there is one. InputError if the
    config does not fit the spec."""
    if config is None:
        return program
    schemes = schemes_of(config, spec)
    out = program.map(lambda g: _quantise_graph(g, schemes, dtype))
    return out.map(codes_as_params) if config.from_checkpoint else out


def checkpoint_quant_config(spec: Spec, forms: Mapping[str, Scheme]) -> QuantConfig | None:
    """Return the quantisation config of a checkpoint with quantised weights; `forms`: their names
    in the checkpoint -> schemes. None if none of the text model's weights is quantised."""
    names: dict[Scheme, list[str]] = {}
    for param in weights_of(spec):
        if scheme := forms.get(checkpoint_name(param)):
            names.setdefault(scheme, []).append(param)
    rules = (
        Rule(tuple(params), s.form, None, s.group, s.scale or ENGINE) for s, params in names.items()
    )
    return QuantConfig(tuple(rules), FROM_CHECKPOINT) if names else None


def _weights(n: Node) -> list[Value]:
    return [n[operand] for operand in WEIGHTS.get(n.op, ())]


def _quantise_graph(g: Graph, schemes: Mapping[str, Scheme], dtype: str) -> Graph:
    chosen = [v for v in g.params if v.name in schemes]
    b = Builder(g.name)
    parts = {v.name: _parts(b, v, schemes[v.name], dtype) for v in chosen}
    dense: dict[str, Value] = {}

    def dequantized(v: Value) -> Value:
        if v.name not in dense:
            name = f"{v.name}{DENSE}"
            dense[v.name] = b.emit("dequantize", *parts[v.name], to=dtype, name=name)
        return dense[v.name]

    for n in g.nodes:
        names = {v.name for v in _weights(n)} & parts.keys()
        if n.op == "embedding" and names:
            codes, scales = parts[n["table"].name]
            ids, scale = n["ids"], n.number("scale")
            b.emit(
                "embedding_quantized", codes, scales, ids, scale=scale, to=dtype, name=n.out.name
            )
        else:
            inputs = tuple(dequantized(v) if v.name in names else v for v in n.inputs)
            b.nodes.append(replace(n, inputs=inputs))
    return replace(g, nodes=tuple(b.nodes))


def _parts(b: Builder, v: Value, scheme: Scheme, dtype: str) -> tuple[Value, ...]:
    """Emit codes and scales of a weight."""
    names = [f"{v.name}{CODES}", f"{v.name}{SCALES}"]
    return b.emit_all("quantize", v, name=names, **scheme.attrs(dtype))


def simplify_formats(g: Graph, reads: Callable[[Node], bool] = lambda n: False) -> Graph:
    """Return a graph for targets that read only int8, int4 and fp8: at build, weights in other
    formats are dequantised if they have minima, else converted to int8. Nodes (QUANTISED_OPS) that
    `reads` accepts stay."""
    b = Builder(g.name)
    for n in g.nodes:
        quantised = n.op in QUANTISED_OPS and not reads(n)
        fmt = FORMAT_OF[n["codes"].type.dtype] if quantised else ""
        if fmt in AS_BYTES:
            _to_int8(b, n)
        elif fmt and FORMATS[fmt].scales > 1:
            _to_dense(b, n)
        else:
            b.nodes.append(n)
    return replace(g, nodes=tuple(b.nodes))


def _to_int8(b: Builder, n: Node) -> None:
    codes, scales, *ids = n.inputs
    names = [f"{codes.name.removesuffix(CODES)}{BYTES}{part}" for part in (CODES, SCALES)]
    codes_scales = _emit_once(b, "as_bytes", (codes, scales), names)
    b.nodes.append(replace(n, inputs=(*codes_scales, *ids)))


def _to_dense(b: Builder, n: Node) -> None:
    codes, scales, *ids = n.inputs
    name, to = f"{codes.name.removesuffix(CODES)}{DENSE}", n.word("to")
    weight = _emit_once(b, "dense", (codes, scales), [name if ids else n.out.name], to=to)
    if ids:
        b.emit("embedding", *weight, *ids, scale=n.number("scale"), name=n.out.name)


def _emit_once(
    b: Builder, op: str, inputs: tuple[Value, ...], names: list[str], **attrs: str
) -> tuple[Value, ...]:
    """Emit a node, or return the outputs of the one emitted under its name."""
    nodes = (n for n in b.nodes if n.op == op and n.outputs[0].name == names[0])
    node = next(nodes, None)
    return node.outputs if node else b.emit_all(op, *inputs, name=names, **attrs)


def codes_as_params(g: Graph) -> Graph:
    """Return the graph with codes and scales as params instead of the weights, without `quantize`,
    for engines that store only quantised weights."""
    codes = tuple(v for n in g.find("quantize") for v in n.outputs)
    nodes = tuple(n for n in g.nodes if n.op != "quantize")
    outputs = tuple(v for v in g.outputs if v not in codes)
    read = {v.name for n in nodes for v in n.inputs} | {v.name for v in g.results()}
    params = tuple(v for v in (*g.params, *codes) if v.name in read)
    return replace(g, params=params, nodes=nodes, outputs=outputs)
