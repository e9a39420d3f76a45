"""linear(x, w)  ->  linear(fake_quantize(x), w), for quantised weights

This pass changes what a graph computes, by a rounding that the user asked for: a product of two
quantised matrices takes fewer instructions than one of codes and floats. Routed experts take their
rows as they are; "off" leaves everything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from g4ir.ir.graph import Builder, Graph, Value
from g4ir.ops.codecs import ACTIVATIONS

from .match import OFF, Note, ignore, maker, require_one_of

AFTER = "narrow_kv"  # products are packed, and no part of another op yet
CHANGES_MEANING = True

FORMS = (OFF, *ACTIVATIONS)


@dataclass(frozen=True)
class ActivationOptions:
    """The format of the activations, one of FORMS."""

    to: str = OFF

    def __post_init__(self) -> None:
        require_one_of("quantize_activations: to", self.to, FORMS)


OPTIONS = ActivationOptions()


def quantize_activations(
    g: Graph, note: Note = ignore, options: ActivationOptions = OPTIONS
) -> Graph:
    """Quantise the activations of products with quantised weights."""
    to = options.to
    if to == OFF:
        return g
    b, made = Builder(g.name), dict[str, Value]()
    for n in g.nodes:
        if n.op == "experts" and maker(g, n["gate_up"], "dequantize"):
            note(n.out.name, "left: routed experts take their rows as they are")
        if n.op == "linear" and maker(g, n["w"], "dequantize"):
            x, w = n.inputs
            if x.name not in made and not maker(g, x, "fake_quantize"):
                made[x.name] = b.emit("fake_quantize", x, form=to, name=f"{x.name}.rounded")
                note(x.name, f"rounded to {to}")
            n = replace(n, inputs=(made.get(x.name, x), w))
        b.nodes.append(n)
    return replace(g, nodes=tuple(b.nodes))
