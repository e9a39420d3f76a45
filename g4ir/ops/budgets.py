"""Tolerances between two computations of one op on the same inputs.

The error of a value is relative to the larger of the value and its row's RMS (near zero, to 1e-3
of the tensor's RMS). Two correct computations differ in two ways. A result may be rounded to the
model's dtype in the other direction: one unit in the last place, and about sqrt(n) units after n
successive roundings. A sum may be reordered: its terms are fp32 or wider, and n of them in two
orders differ by about sqrt(n) fp32 units of their RMS, a few times that at worst.
"""

from __future__ import annotations

from dataclasses import dataclass

#: largest relative spacing of adjacent values
UNIT = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True)
class Budget:
    """Tolerance of an op, the sum of three: `rounded` units in the last place of the model's dtype,
    for roundings; `summed` units of fp32, for reordered sums; `grid`, the relative step of a
    quantisation grid coarser than the dtype."""

    rounded: int
    summed: int
    reason: str
    grid: float = 0.0

    def at(self, dtype: str) -> float:
        """Return the largest relative error that passes in a model of this dtype."""
        return self.rounded * UNIT[dtype] + self.summed * UNIT["f32"] + self.grid


MOVES = Budget(0, 0, "moves data: bit for bit")
POINTWISE = Budget(
    2, 0, "a vector loop and its scalar tail may round an elementwise function differently"
)
GATED = Budget(3, 0, "as an elementwise function, then a product")
PRODUCT = Budget(
    1, 256, "packing and other batch sizes change the order of sums of up to 2^15 terms"
)
