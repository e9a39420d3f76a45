"""Dtypes, devices, and the bytes of KV caches before anything is allocated."""

from __future__ import annotations

from g4ir.ir.graph import Program
from g4ir.ops.types import ITEMSIZE, Type
from g4ir.spec.record import Spec

#: dtypes that engines compute in, the most common first
DTYPES = ("bf16", "f32")
#: devices that engines run on
DEVICES = ("cpu", "cuda")
#: --kv-dtype value -> dtype of the KV cache's rows (ops/kv_quant.py)
KV_DTYPES = {"bfloat16": "bf16", "float8": "f8e4m3", "int8": "i8"}
KV_NAMES = {short: name for name, short in KV_DTYPES.items()}


#: contexts are rounded up, so that few distinct sizes occur: (contexts up to, multiple of)
_STEPS = ((512, 64), (1 << 62, 256))


def context_slots(tokens: int, capacity: int) -> int:
    """Return the slots of a full-length cache that a step reads for this many tokens."""
    step = next(step for upto, step in _STEPS if tokens <= upto)
    return min(capacity, -(-tokens // step) * step)


def capacity(max_seq: int) -> int:
    """Return the slots of a full-length cache for sequences of up to `max_seq` tokens."""
    return context_slots(max_seq, 1 << 62)


def cache_types(program: Program, batch: int, max_seq: int) -> dict[str, Type]:
    """Return name -> type of each cache of a session, with the batch size and slots filled in."""
    dims = {"B": batch, "C": capacity(max_seq)}
    return {name: v.type.bind(dims) for name, v in program.state().items()}


def cache_bytes(program: Program, batch: int, max_seq: int) -> int:
    """Return the bytes of the caches of a session."""
    return sum(t.nbytes() for t in cache_types(program, batch, max_seq).values())


def naive_bytes(spec: Spec, dtype: str, ranks: int = 1) -> int:
    """Return the bytes of K and V of one token in all layers that own them; with several ranks
    those of one rank, which has at least one KV head."""
    owners = (layer.attention for layer in spec.layers() if layer.donor is None)
    heads = ((max(1, a.num_key_value_heads // ranks), a.head_dim) for a in owners)
    return sum(2 * count * size for count, size in heads) * ITEMSIZE[dtype]
