"""Counts bytes of weights in a format and of KV caches, before anything is allocated.

f32, bf16 and f16 hold every element in that type; any other format is a quantisation config
(quant/recipe.py). FORMATS estimates the built-in ones, for costs of graphs that are not quantised
yet; `weight_sizes` is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from g4ir.errors import InputError
from g4ir.ir.graph import Program
from g4ir.model.names import HEAD, PLE_TABLE, TOKEN_TABLE, checkpoint_name
from g4ir.model.tensors import text_tensors
from g4ir.ops.types import ITEMSIZE, Type
from g4ir.quant.recipe import Recipe, find_recipe
from g4ir.quant.rewrite import weights_of
from g4ir.spec import parts
from g4ir.spec.record import Spec

#: what engines compute in, the most common first
DTYPES = ("bf16", "f32")


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


def weight_sizes(spec: Spec, form: str | Recipe, dtype: str | None = None) -> WeightSizes:
    """Return sizes in a format, a dtype or a recipe; `dtype` is the engine's (default: the spec's).
    InputError for a format that there is not."""
    plain = form in parts.DTYPES
    recipe = None if plain else form if isinstance(form, Recipe) else find_recipe(form)
    own = (dtype or spec.dtype) if recipe else str(form)
    sizes = {n: math.prod(s) * ITEMSIZE[own] for n, s in text_tensors(spec).items()}
    if recipe:
        weights = weights_of(spec)
        for name, scheme in recipe.schemes(weights).items():
            sizes[checkpoint_name(name)] = scheme.nbytes(weights[name], own)
    tables = [sizes.pop(name, 0) for name in (TOKEN_TABLE, HEAD, PLE_TABLE)]
    return WeightSizes(recipe.name if recipe else own, sum(sizes.values()), *tables)


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


def naive_bytes(spec: Spec, dtype: str) -> int:
    """Return the cache bytes of one token in all layers that own K and V."""
    owners = (layer.attention for layer in spec.layers() if layer.donor is None)
    return sum(2 * a.num_key_value_heads * a.head_dim for a in owners) * ITEMSIZE[dtype]
