"""The latent KV cache that is fastest on a device: a shipped table of measurements.

`python bench/latent.py --save` writes latent.yaml: for each device, dtype, shape of the layer and
context, the form whose decode step was fastest. Where nothing was measured, K and V are cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from math import log2
from pathlib import Path
from typing import Annotated

from g4ir.errors import SpecError
from g4ir.ops.rope import rotated_pairs
from g4ir.passes.latent_kv import FORMS, PLAIN
from g4ir.spec.reader import Count, OneOf, build, read_tree
from g4ir.spec.record import Spec

TABLE = Path(__file__).with_suffix(".yaml")
#: a measurement speaks for contexts up to this factor away
REACH = 2.0
_HEADER = """\
# The fastest form of the K=V caches, by measurement: `python bench/latent.py --save` wrote it.
# `off` is K and V. What is not here was not measured, and is cached plainly.
"""


@dataclass(frozen=True)
class LatentMeasurement:
    """The fastest form of one layer at one context."""

    device: str  # cpu, cuda
    dtype: str  # bf16, f32
    head_dim: Count
    rotated: Count  # dims that are rotated
    group: Count  # query heads for each KV head
    context: Count  # tokens
    form: Annotated[str, OneOf(FORMS)]


@dataclass(frozen=True)
class Table:
    """The file."""

    measured: tuple[LatentMeasurement, ...]


def choose_form(spec: Spec, device: str, dtype: str, max_seq: int) -> str:
    """Return the form for an engine of rows of up to `max_seq` tokens: `off`, `value` or `raw`.

    The measurement at the nearest context counts, at most a factor of two away; `off` where there
    is none, or where the layers of the spec would want different forms.
    """
    kinds = {x.attention for x in spec.layers() if x.donor is None and x.attention.k_eq_v}
    found = set()
    for kind in kinds:
        pairs = rotated_pairs(kind.rope.kind, kind.head_dim, kind.rope.rotary_fraction)
        group = spec.text.num_attention_heads // kind.num_key_value_heads
        found.add(_nearest((device, dtype, kind.head_dim, 2 * pairs, group), max_seq))
    return found.pop() if len(found) == 1 else PLAIN


def _nearest(key: tuple[object, ...], context: int) -> str:
    """Return the form of a key (device, dtype, head_dim, rotated, group) nearest a context."""

    def away(row: LatentMeasurement) -> float:
        return abs(log2(row.context / context))

    rows = [r for r in read_table() if (r.device, r.dtype, r.head_dim, r.rotated, r.group) == key]
    near = min(rows, key=away, default=None)
    return near.form if near and away(near) <= log2(REACH) else PLAIN


@cache
def read_table(path: Path = TABLE) -> tuple[LatentMeasurement, ...]:
    """Read the measurements of a file. Raises SpecError where it is not such a table."""
    try:
        table: Table = build(Table, read_tree(path))
    except SpecError as e:
        raise SpecError(f"{e}: no table of measured forms; restore the file") from None
    return table.measured


def write_table(rows: Iterable[LatentMeasurement], path: Path = TABLE) -> None:
    """Replace the table; rows in order of their keys."""
    import yaml

    from g4ir.ui.files import write_file

    ordered = sorted((asdict(r) for r in rows), key=lambda r: tuple(r.values()))
    body = yaml.safe_dump({"measured": ordered}, sort_keys=False, width=100)
    write_file(path, [(_HEADER + body).encode()])
    read_table.cache_clear()
