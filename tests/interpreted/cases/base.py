"""What a kernel is tested with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from g4ir.backends.cuda.kernels.base import Use
from g4ir.ops.kv_quant import quantized_width


@dataclass(frozen=True)
class Sample:
    """A test case of a kernel: a node, run once in fp32 and once in bf16.

    inputs  types as text: `T` is the dtype, a leading * marks a weight
    attrs   the node's attributes; "T" is the dtype
    use     launch settings; by kernel name if there are several
    given   input index -> integer values
    packed  whether inputs must not be views of larger tensors
    coded   input index -> quantised format, and codes per scale (0: a full row)
    """

    inputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    use: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[int, Any] = field(default_factory=dict)
    packed: bool = False
    coded: Mapping[int, tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """The samples of a kernel, and the errors that it may make on them.

    error    tolerance of fp32 outputs against float64, as a fraction of their rms
    differ   maximum fraction of bf16 outputs that may differ from the op's reference; None: the
             error against float64 is compared with the reference's instead
    """

    samples: tuple[Sample, ...]
    error: float
    differ: float | None = 0.01


def attention_sample(
    lengths: tuple[int, ...],
    slots: int,
    window: int,
    use: Use,
    tokens: int = 0,
    heads: tuple[int, int] = (4, 2),
    d: int = 32,
    scale: float = 0.3,
    softcap: float = 0.0,
    pairs: int | None = None,
    kv_dtype: str = "",
) -> Sample:
    """Return a test case with `lengths` tokens per sequence in caches of `slots` slots; the query
    is the newest token, or a chunk of `tokens` that follows. `heads`: query and KV heads; `pairs`:
    rotated pairs of a latent cache; `kv_dtype`: the cache's format, if not the sample's dtype."""
    b, s, (nq, n) = len(lengths), tokens or 1, heads
    widths = [d, d] if pairs is None else [d + 2 * pairs]
    layouts = [(kv_dtype or "T", quantized_width(w, kv_dtype) if kv_dtype else w) for w in widths]
    attrs: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap}
    if pairs is not None:
        attrs["pairs"] = pairs
    first = [length - (tokens == 0) for length in lengths]
    return Sample(
        (
            f"T[{b},{s},{nq},{d}]",
            f"i64[{b},{s}]",
            f"i64[{b}]",
            *[f"*T[{d}]"] * (pairs is not None),
            *(f"{t}[{slots},{b},{n},{w}]" for t, w in layouts),
            *(f"{t}[{b},{tokens},{n},{w}]" for t, w in layouts * bool(tokens)),
        ),
        attrs,
        use,
        {1: [[*range(at, at + s)] for at in first], 2: lengths},
    )
