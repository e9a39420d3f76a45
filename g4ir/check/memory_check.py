"""Whether a pass in float64 has room beside what is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from g4ir.ir.wide import BLOCK
from g4ir.ops.types import FLOATS, ITEMSIZE
from g4ir.plan.fit import device_memory
from g4ir.plan.formats import cache_types
from g4ir.ui.units import size_text

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine
    from g4ir.spec.record import Spec


def float64_refusal(engine: Engine, tokens: int, rows: int, device: str) -> str | None:
    """Return why a pass in float64 over so many tokens, with so many rows of logits, has no room on
    a device beside the weights of engine and peer, or None. It counts sizes that are known before a
    peer is loaded."""
    params = sum(v.type.nbytes() for v in engine.program.params().values())
    free = device_memory(device) - 2 * params
    types = cache_types(engine.program, 1, engine.limits.max_seq).values()
    caches = sum(t.numel() * (8 if t.dtype in FLOATS else ITEMSIZE[t.dtype]) for t in types)
    needed = wide_bytes(engine.spec, tokens, rows) + caches
    if needed <= free:
        return None
    return (
        f"float64 takes {size_text(needed)} beside the weights, and {size_text(max(free, 0))} are "
        f"free"
    )


def wide_bytes(spec: Spec, tokens: int, rows: int) -> int:
    """Bytes of a pass in float64 without a cache: one block of a weight, scores of one layer (raw,
    masked, weights, and those rounded), a layer's activations, and every layer's output."""
    text = spec.text
    heads = text.num_attention_heads
    widest = max(2 * text.intermediate_size * 2, text.hidden_size)
    scores = 4 * heads * tokens * tokens
    activations = tokens * (3 * widest + (text.num_hidden_layers + 8) * text.hidden_size)
    return 8 * (BLOCK + scores + activations + 3 * rows * text.vocab_size)
