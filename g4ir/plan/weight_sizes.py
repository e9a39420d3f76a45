"""Bytes of the decoder's weights in a format, tensor by tensor.

f32, bf16 and f16 hold every element in that type. The integer formats hold matrices smaller and
keep everything else (norm weights, scalars, routers) in the engine's dtype:

    int8   one byte an element, one 16-bit scale for each row of the last dim
    int4   32 elements of 4 bits and one 16-bit scale (18 bytes); token tables and head as int8
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from g4ir.errors import InputError
from g4ir.model.tensors import HEAD, Shape, numel, text_tensors, tower_tensors
from g4ir.spec.record import Spec

from .count import DTYPE_BYTES

INTEGERS = ("int8", "int4")
FORMATS = (*DTYPE_BYTES, *INTEGERS)
SCALE, GROUP = 2, 32
TOKEN_TABLE, PLE_TABLE = "embed_tokens.weight", "embed_tokens_per_layer.weight"
TABLES = (TOKEN_TABLE, PLE_TABLE, HEAD)


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of the decoder in one format; a tied head is the token table and counted once."""

    format: str
    layers: int  # with norms and the shared parts of the per-layer embeddings
    token_table: int
    head: int  # 0 where it is tied
    ple_table: int

    @property
    def total(self) -> int:
        return self.layers + self.token_table + self.head + self.ple_table

    @property
    def tables(self) -> int:
        """Tables that are only gathered from, without the one for per-layer embeddings."""
        return self.token_table if self.head else 0


def weight_sizes(spec: Spec, form: str, dtype: str | None = None) -> WeightSizes:
    """Sizes in a format; `dtype` is the engine's (default: the spec's). InputError for a format
    that is not in FORMATS."""
    if form not in FORMATS:
        raise InputError(f"weights {form!r}: expected one of {', '.join(FORMATS)}")
    sizes = {
        name: tensor_bytes(name, shape, form, dtype or spec.dtype)
        for name, shape in text_tensors(spec).items()
    }
    tables = [sizes.pop(name, 0) for name in (TOKEN_TABLE, HEAD, PLE_TABLE)]
    return WeightSizes(form, sum(sizes.values()), *tables)


def tensor_bytes(name: str, shape: Shape, form: str, dtype: str) -> int:
    """Bytes of one tensor of the checkpoint."""
    if form not in INTEGERS:
        return math.prod(shape) * DTYPE_BYTES[form]
    if len(shape) < 2 or ".router." in name:
        return math.prod(shape) * DTYPE_BYTES[dtype]
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if form == "int8" or name in TABLES:
        return rows * (columns + SCALE)
    return rows * math.ceil(columns / GROUP) * (GROUP // 2 + SCALE)


def tower_bytes(spec: Spec, dtype: str | None = None) -> int:
    """Bytes of what lies outside the decoder: towers and the projections from them."""
    return numel(tower_tensors(spec)) * DTYPE_BYTES[dtype or spec.dtype]


def nominal(parameters: int) -> int:
    """A parameter count as it is quoted: two digits (31,273,088,876 -> 31,000,000,000)."""
    return int(float(f"{parameters:.1e}"))


#: bytes per parameter of the usual estimate, which knows neither scales nor tables
NOMINAL = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "int8": 1.0, "int4": 0.5}
