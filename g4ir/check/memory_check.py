"""Checks whether a computation fits in the memory that loaded weights leave."""

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


def param_bytes(engine: Engine) -> int:
    """Return the bytes of an engine's params, as stored."""
    return sum(v.type.nbytes() for v in engine.program.params().values())


def refusal(what: str, needed: int, device: str, held: int) -> str | None:
    """Return why `needed` bytes have no room on a device of which `held` are taken, or None."""
    free = max(device_memory(device) - held, 0)
    if needed <= free:
        return None
    return what.format(size_text(needed)) + f", and {size_text(free)} are free"


def float64_refusal(engine: Engine, tokens: int, rows: int, device: str) -> str | None:
    """Return why a pass in float64 over so many tokens, with so many rows of logits, has no room on
    a device beside the weights of engine and peer, or None. It counts sizes that are known before a
    peer is loaded."""
    types = cache_types(engine.program, 1, engine.limits.max_seq).values()
    caches = sum(t.numel() * (8 if t.dtype in FLOATS else ITEMSIZE[t.dtype]) for t in types)
    needed = wide_bytes(engine.spec, tokens, rows) + caches
    held = 2 * param_bytes(engine)
    return refusal("float64 takes {} beside the weights", needed, device, held)


def wide_bytes(spec: Spec, tokens: int, rows: int) -> int:
    """Bytes of a pass in float64 without a cache: one block of a weight, scores of one layer (raw,
    masked, weights, and those rounded), a layer's activations, and every layer's output."""
    text = spec.text
    widest = max(2 * text.intermediate_size * 2, text.hidden_size)
    scores = 4 * text.num_attention_heads * tokens * tokens
    activations = tokens * (3 * widest + (text.num_hidden_layers + 8) * text.hidden_size)
    return 8 * (BLOCK + scores + activations + 3 * rows * text.vocab_size)
