"""w  ->  dequantize(quantize(w)), for the weights that a recipe names.

`quantize` depends on params alone and runs at build; `dequantize` stays in the graph, before the
product that takes it. A table is gathered from as codes: `embedding` becomes `embedding_quantized`.
Where the checkpoint holds codes already, they and their scales are params.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from g4ir.ir.graph import Builder, Graph, Node, Program, Value
from g4ir.model.names import CODES, SCALES, checkpoint_name
from g4ir.model.text import build_graph
from g4ir.ops.codecs import AS_BYTES, FORMAT_OF, FORMATS
from g4ir.ops.types import Type
from g4ir.spec.record import Spec

from .recipe import ENGINE, HELD, Recipe, Rule, Scheme

#: op -> its operands that may be quantised
WEIGHTS = {"linear": ("w",), "experts": ("gate_up", "down"), "embedding": ("table",)}
#: ops that take codes and scales
TAKERS = ("dequantize", "embedding_quantized")
#: what codes and scales of a weight are made into
DENSE, BYTES = ".dense", ".bytes"


@lru_cache(maxsize=32)
def weights_of(spec: Spec) -> Mapping[str, Type]:
    """Return the params of the text model that a recipe may name."""
    graphs = [build_graph(spec, phase, all_logits=True) for phase in ("embed", "prefill")]
    used = [v for g in graphs for n in g.nodes for v in _weights(n)]
    return {v.name: v.type for v in used}


def quantised(program: Program, spec: Spec, recipe: Recipe | None, dtype: str) -> Program:
    """Return the program of a spec with weights as the recipe says; as it is without one. Rows of
    tables are gathered as codes. InputError where the recipe does not fit the spec."""
    if recipe is None:
        return program
    schemes = recipe.schemes(weights_of(spec))
    made = program.map(lambda g: _rewritten(g, schemes, dtype))
    return made.map(from_codes) if recipe.held else made


def held_recipe(spec: Spec, forms: Mapping[str, Scheme]) -> Recipe | None:
    """Return the recipe of a checkpoint whose weights `forms` (by the checkpoint's names) are in
    codes already; None where no weight that a recipe may name is."""
    names: dict[Scheme, list[str]] = {}
    for param in weights_of(spec):
        if scheme := forms.get(checkpoint_name(param)):
            names.setdefault(scheme, []).append(param)
    rules = (
        Rule(tuple(found), s.form, None, s.group, s.scale or ENGINE) for s, found in names.items()
    )
    return Recipe(tuple(rules), HELD) if names else None


def _weights(n: Node) -> list[Value]:
    return [n[operand] for operand in WEIGHTS.get(n.op, ())]


def _rewritten(g: Graph, schemes: Mapping[str, Scheme], dtype: str) -> Graph:
    chosen = [v for v in g.params if v.name in schemes]
    b = Builder(g.name)
    parts = {v.name: _parts(b, v, schemes[v.name], dtype) for v in chosen}
    dense: dict[str, Value] = {}

    def taken(v: Value) -> Value:
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
            inputs = tuple(taken(v) if v.name in names else v for v in n.inputs)
            b.nodes.append(replace(n, inputs=inputs))
    return replace(g, nodes=tuple(b.nodes))


def _parts(b: Builder, v: Value, scheme: Scheme, dtype: str) -> tuple[Value, ...]:
    """Emit codes and scales of a weight."""
    names = [f"{v.name}{CODES}", f"{v.name}{SCALES}"]
    return b.emit_all("quantize", v, name=names, **scheme.attrs(dtype))


def simplified(g: Graph) -> Graph:
    """Return a graph for targets that take neither int6, int5 nor forms with minima: codes of 8
    bits are made of the former at build, and of the others what they mean."""
    b = Builder(g.name)
    for n in g.nodes:
        form = FORMAT_OF[n["codes"].type.dtype] if n.op in TAKERS else ""
        if form in AS_BYTES:
            _in_bytes(b, n)
        elif form and FORMATS[form].scales > 1:
            _made_dense(b, n)
        else:
            b.nodes.append(n)
    return replace(g, nodes=tuple(b.nodes))


def _in_bytes(b: Builder, n: Node) -> None:
    codes, scales, *rest = n.inputs
    names = [f"{codes.name.removesuffix(CODES)}{BYTES}{part}" for part in (CODES, SCALES)]
    made = _once(b, "as_bytes", (codes, scales), names)
    b.nodes.append(replace(n, inputs=(*made, *rest)))


def _made_dense(b: Builder, n: Node) -> None:
    codes, scales, *ids = n.inputs
    name, to = f"{codes.name.removesuffix(CODES)}{DENSE}", n.word("to")
    made = _once(b, "dense", (codes, scales), [name if ids else n.out.name], to=to)
    if ids:
        b.emit("embedding", *made, *ids, scale=n.number("scale"), name=n.out.name)


def _once(
    b: Builder, op: str, inputs: tuple[Value, ...], names: list[str], **attrs: str
) -> tuple[Value, ...]:
    """Emit a node, or find what was emitted under its names."""
    found = (n for n in b.nodes if n.op == op and n.outputs[0].name == names[0])
    node = next(found, None)
    return node.outputs if node else b.emit_all(op, *inputs, name=names, **attrs)


def from_codes(g: Graph) -> Graph:
    """Return a graph that takes codes and scales in the place of the weights they are made of: one
    for an engine that holds nothing else."""
    made = tuple(v for n in g.find("quantize") for v in n.outputs)
    nodes = tuple(n for n in g.nodes if n.op != "quantize")
    outputs = tuple(v for v in g.outputs if v not in made)
    read = {v.name for n in nodes for v in n.inputs} | {v.name for v in g.results()}
    params = tuple(v for v in (*g.params, *made) if v.name in read)
    return replace(g, params=params, nodes=nodes, outputs=outputs)
