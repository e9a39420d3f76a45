"""How many slots the caches of a session have, and their bytes, before anything is allocated."""

from __future__ import annotations

from g4ir.ir.graph import Program
from g4ir.ops.types import Type

#: contexts are rounded up, so that few distinct sizes occur: (up to, step)
_STEPS = ((512, 64), (1 << 62, 256))


def context_slots(tokens: int, capacity: int) -> int:
    """Slots of a full-length cache that a step reads for this many tokens."""
    step = next(step for upto, step in _STEPS if tokens <= upto)
    return min(capacity, -(-tokens // step) * step)


def capacity(max_seq: int) -> int:
    """Slots of a full-length cache."""
    return context_slots(max_seq, 1 << 62)


def cache_types(program: Program, batch: int, max_seq: int) -> dict[str, Type]:
    """The caches of a session with their sizes."""
    dims = {"B": batch, "C": capacity(max_seq)}
    return {name: v.type.bind(dims) for name, v in program.state().items()}


def cache_bytes(program: Program, batch: int, max_seq: int) -> int:
    """Bytes of the caches of a session."""
    return sum(t.nbytes() for t in cache_types(program, batch, max_seq).values())
