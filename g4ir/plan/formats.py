"""Counts bytes of weights in a format and of KV caches, before anything is allocated.

f32, bf16 and f16 hold every element in that type; any other format is a quantisation config
(quant/recipe.py). FORMATS estimates the built-in ones, for costs of graphs that are not quantised
yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4ir.errors import InputError
from g4ir.ir.graph import Program
from g4ir.ops.types import ITEMSIZE, Type
from g4ir.spec import parts
from g4ir.spec.record import Spec

#: what engines compute in, the most common first, and run on
DTYPES = ("bf16", "f32")
DEVICES = ("cpu", "cuda")
#: what caches may hold, as a user says it -> dtype of their rows (ops/kv_quant.py)
KV_DTYPES = {"bfloat16": "bf16", "float8": "f8e4m3", "int8": "i8"}
KV_NAMES = {short: name for name, short in KV_DTYPES.items()}


@dataclass(frozen=True)
class Format:
    """Bytes per element of matrices of the layers, of tables and the head, of everything else.
    Scales of whole rows, 0.1 % of the bytes, are left out; `nominal` is the usual estimate, which
    knows neither scales nor tables."""

    matrix: float
    table: float
    vector: float = 2
    nominal: float = 0.0


FORMATS = {
    **{d: Format(n, n, n, n) for d, n in ITEMSIZE.items() if d in parts.DTYPES},
    "fp8": Format(1, 1, nominal=1),
    "int8": Format(1, 1, nominal=1),
    "int4": Format(0.5 + 2 / 32, 1, nominal=0.5),  # a scale of 2 bytes for 32
}
#: narrow formats that a plan shows beside the engine's dtype
INTEGERS = ("int8", "int4")


def find_format(name: str) -> Format:
    """Return the format of a name; InputError lists the formats."""
    if name not in FORMATS:
        raise InputError(f"unknown weight format {name!r}: one of {', '.join(FORMATS)}")
    return FORMATS[name]


def nominal(parameters: int) -> int:
    """Return a parameter count as it is quoted: two digits (31,273,088,876 -> 31,000,000,000)."""
    return int(float(f"{parameters:.1e}"))


#: contexts are rounded up, so that few distinct sizes occur: (up to, step)
_STEPS = ((512, 64), (1 << 62, 256))


def context_slots(tokens: int, capacity: int) -> int:
    """Return the slots of a full-length cache that a step reads for this many tokens."""
    step = next(step for upto, step in _STEPS if tokens <= upto)
    return min(capacity, -(-tokens // step) * step)


def capacity(max_seq: int) -> int:
    """Return the slots of a full-length cache."""
    return context_slots(max_seq, 1 << 62)


def cache_types(program: Program, batch: int, max_seq: int) -> dict[str, Type]:
    """Return the caches of a session with their sizes."""
    dims = {"B": batch, "C": capacity(max_seq)}
    return {name: v.type.bind(dims) for name, v in program.state().items()}


def cache_bytes(program: Program, batch: int, max_seq: int) -> int:
    """Return the bytes of the caches of a session."""
    return sum(t.nbytes() for t in cache_types(program, batch, max_seq).values())


def naive_bytes(spec: Spec, dtype: str, ranks: int = 1) -> int:
    """Return the cache bytes of one token in all layers that own K and V; on one of some ranks,
    which has at least one KV head."""
    owners = (layer.attention for layer in spec.layers() if layer.donor is None)
    heads = ((max(1, a.num_key_value_heads // ranks), a.head_dim) for a in owners)
    return sum(2 * count * size for count, size in heads) * ITEMSIZE[dtype]
