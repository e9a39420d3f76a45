"""linear(x, w)  ->  linear(fake_quantize(x), w), for quantised weights

The pass changes what a graph computes: it rounds activations, since a matmul of int8 (or fp8)
operands needs fewer instructions than one that converts weights to floats. Routed experts are not
changed; "off": no change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from g4ir.ir.graph import Builder, Graph, Value
from g4ir.ops.codecs import ACTIVATIONS

from .match import OFF, Note, ignore, producer_of, require_one_of

AFTER = "narrow_kv"  # linears are packed, but not fused yet
CHANGES_MEANING = True

FORMS = (OFF, *ACTIVATIONS)


@dataclass(frozen=True)
class ActivationOptions:
    """Format of the activations, one of FORMS."""

    to: str = OFF

    def __post_init__(self) -> None:
        require_one_of("quantize_activations: to", self.to, FORMS)


OPTIONS = ActivationOptions()


def quantize_activations(
    g: Graph, note: Note = ignore, options: ActivationOptions = OPTIONS
) -> Graph:
    """Quantise the inputs of linears with quantised weights."""
    to = options.to
    if to == OFF:
        return g
    b, rounded = Builder(g.name), dict[str, Value]()
    for n in g.nodes:
        if n.op == "experts" and producer_of(g, n["gate_up"], "dequantize"):
            note(n.out.name, "left: inputs of routed experts are not quantised")
        if n.op == "linear" and producer_of(g, n["w"], "dequantize"):
            x, w = n.inputs
            if x.name not in rounded and not producer_of(g, x, "fake_quantize"):
                rounded[x.name] = b.emit("fake_quantize", x, form=to, name=f"{x.name}.rounded")
                note(x.name, f"rounded to {to}")
            n = replace(n, inputs=(rounded.get(x.name, x), w))
        b.nodes.append(n)
    return replace(g, nodes=tuple(b.nodes))
