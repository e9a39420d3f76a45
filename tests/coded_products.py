"""The CPU kernels for tests, and a product of a weight in codes through a fused op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from g4ir.backends.cpu import pyops
from g4ir.ops import OPS
from g4ir.ops.codecs import FORMATS, dequantize_codes, fits_tiles, to_tiles
from g4ir.ops.types import Type, dtype_name
from g4ir.ui.processor import ISA, SETS, architecture, cpu_flags, instruction_set
from tests.cases import TABLES

Kernel = Callable[..., torch.Tensor]
QUANTIZE: Any = OPS["quantize"].reference
#: error, relative to the largest result: one rounding
BUDGET = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
#: format, values that share a scale, dtype of the scales; 704 is no multiple of what is read at a
#: time
GROUPS = [(*row,) for row in TABLES["groups and scales"]]


def with_outliers(
    rows: int, n: int, k: int, weight: tuple[str, int, str], dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Return x, codes and scales of a weight [n, k], and what these mean in float64. Some numbers
    of x are 3,000 times the others, in one row all but one are tiny."""
    (form, group, scale), g = weight, torch.Generator().manual_seed(n + k)
    k += -k % (group or FORMATS[form].block_values)
    x, w = torch.randn(rows, k, generator=g), torch.randn(n, k, generator=g)
    x[1, :: k // 5] *= 3000
    x[2, 1:] *= 2.0**-20
    x[3] = 0
    codes, scales = QUANTIZE(w, form=form, group=group, scale=scale)
    return x.to(dtype), codes, scales, dequantize_codes(codes, scales.double(), torch.float64)


@pytest.fixture(scope="module")
def cpu_kernels() -> Iterator[None]:
    """The CPU kernels; other tests keep what they have loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyops, "_kernels", {})
        pyops.load_kernels()
        yield


#: instruction sets of this architecture but for the best of this CPU
OTHERS = [s for s in SETS if s.machine == architecture() and s != instruction_set()]


#: sets that every run compiles; the others need --full
EVERY_RUN = ("avx2", "neon")


@pytest.fixture(
    name="other_cpu",
    params=[
        pytest.param(s, marks=() if s.name in EVERY_RUN else pytest.mark.full, id=s.name)
        for s in OTHERS
    ],
)
def kernels_of_other_cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """A process that is held to an instruction set below that of its CPU, by name."""
    if lacking := request.param.flags - {*cpu_flags()}:
        pytest.skip(f"this CPU has no {min(lacking)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA, request.param.name)
        patch.setattr(pyops, "_kernels", {})
        pyops.load_kernels()
        yield request.param.name


def layouts(codes: torch.Tensor, scales: torch.Tensor) -> Iterator[tuple[Any, Any, bool]]:
    """A weight in rows, and in tiles where it can lie so."""
    yield codes, scales, False
    if fits_tiles(*(Type(dtype_name(t.dtype), tuple(t.shape)) for t in (codes, scales))):
        yield to_tiles(codes), to_tiles(scales), True
