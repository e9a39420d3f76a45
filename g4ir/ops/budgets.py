"""Says how far two computations of the same op on the same inputs may lie apart.

The error of a value is measured against the larger of the value itself and its row's rms. Two
right ways to compute an op differ in two respects. A result that is rounded to the model's dtype
may fall to the other side: one unit in the last place, and about sqrt(n) units after n roundings
in a row. A sum may be taken in another order: its terms are fp32 or wider, and n of them in two
orders lie about sqrt(n) fp32 units of their rms apart, a few times that at worst.
"""

from __future__ import annotations

from dataclasses import dataclass

#: largest distance of neighbouring numbers, relative to them
UNIT = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True)
class Budget:
    """`rounded`: units of the model's dtype; `summed`: fp32 units that a new order may cost;
    `grid`: a step of a grid coarser than any dtype of a model, relative to the numbers."""

    rounded: int
    summed: int
    reason: str
    grid: float = 0.0

    def at(self, dtype: str) -> float:
        """Return the allowed error in a model of this dtype."""
        return self.rounded * UNIT[dtype] + self.summed * UNIT["f32"] + self.grid


MOVES = Budget(0, 0, "moves data: bit for bit")
POINTWISE = Budget(
    2, 0, "a vector loop and its tail may round a function of one number differently"
)
GATED = Budget(3, 0, "as a function of one number, then a product")
PRODUCT = Budget(1, 256, "packing and fewer rows change the library's order of up to 2^15 terms")
