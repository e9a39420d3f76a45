"""How far two computations of the same op on the same inputs may lie apart: one table.

The error of a value is measured against the larger of the value itself and its row's rms. Two
right ways to compute an op differ in two respects. A result that is rounded to the model's dtype
may fall to the other side: one unit in the last place, and about sqrt(n) units after n roundings
in a row. A sum may be taken in another order: its terms are fp32 or wider, and n of them in two
orders lie about sqrt(n) fp32 units of their rms apart, a few times that at worst.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: largest distance of neighbouring numbers, relative to them
UNIT = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True)
class Rule:
    """`rounded`: units of the model's dtype; `summed`: fp32 units that a new order may cost."""

    rounded: int
    summed: int
    reason: str


_MOVES = Rule(0, 0, "moves data: bit for bit")
_POINT = Rule(2, 0, "a vector loop and its tail may round a function of one number differently")
_PRODUCT = Rule(1, 256, "packing and fewer rows change the library's order of up to 2^15 terms")

RULES = {
    "linear": _PRODUCT,
    "concat": _MOVES,
    "split": _MOVES,
    "heads": _MOVES,
    "merge_heads": _MOVES,
    "last_row": _MOVES,
    "row_start": _MOVES,
    "stack_layers": _MOVES,
    "unstack_layers": _MOVES,
    "cache_write": _MOVES,
    "latent_row": _MOVES,
    "greedy": _MOVES,
    "candidates": _MOVES,
    "mask_ids": _MOVES,
    "mask_rows": _MOVES,
    "halve_mask": _MOVES,
    "valid_patches": _MOVES,
    "clip": _MOVES,
    "limit": _MOVES,
    "cast": Rule(1, 0, "one rounding and nothing else"),
    "embedding": Rule(1, 0, "one product, rounded once"),
    "add": Rule(1, 0, "one sum, rounded once"),
    "mul": Rule(1, 0, "one product, rounded once"),
    "scale": Rule(1, 0, "one product, rounded once"),
    "softcap": Rule(2, 0, "quotient, tanh and product, each rounded"),
    "linear_bias": Rule(1, 256, "as linear; the bias is added before the rounding"),
    "linear_clipped": Rule(1, 256, "as linear, which clamping only brings nearer"),
    "activation": _POINT,
    "sigmoid_glu": _POINT,
    "glu": _POINT,
    "glu_packed": _POINT,
    "linear_glu": Rule(3, 256, "as linear, then as glu"),
    "rms_norm": Rule(1, 16, "a mean of squares in fp32, then one rounding"),
    "inverse_rms": Rule(0, 16, "a mean of squares in fp32, which is not rounded"),
    "norm_residual": Rule(2, 16, "norm, sum, scalar and the next norm, each rounded"),
    "dual_norm_residual": Rule(3, 24, "as rms_norm, then as norm_residual twice"),
    "rope_table": Rule(1, 4, "cos and sin in fp32, rounded once"),
    "rope": Rule(2, 0, "two products and their sum, each rounded"),
    "norm_rope": Rule(2, 16, "as rms_norm, then as rope"),
    "qkv_write": Rule(2, 16, "as norm_rope or rms_norm; what follows moves data"),
    "attention": Rule(
        4, 512, "scores, weights and output are rounded; a cache of other slots, or keys read "
        "after they were written, change the order of both products",
    ),
    "attention_latent": Rule(8, 512, "as attention, on keys that were made again and rounded"),
    "layer_norm": Rule(1, 32, "a mean and a variance in fp32, then one rounding"),
    "centre_pixels": Rule(1, 0, "a product and a difference in fp32, rounded once"),
    "axial_embedding": Rule(1, 0, "one sum of two rows, rounded once"),
    "axial_rope_table": Rule(1, 4, "cos and sin in fp32, rounded once"),
    "axial_rope": Rule(2, 0, "two products and their sum, each rounded"),
    "encoder_attention": Rule(4, 512, "scores, weights and output are rounded, sums reordered"),
    "pool_patches": Rule(2, 64, "a mean in fp32, rounded once; the product with the root is fp32"),
    "standardize": Rule(0, 8, "a difference and a product, all in fp32"),
    "conv_halve": Rule(1, 256, "sums of up to nine times the channels, rounded once"),
    "causal_conv": Rule(1, 16, "sums of as many terms as the kernel has, rounded once"),
    "relative_keys": Rule(1, 256, "sines and cosines rounded, then as linear"),
    "chunked_attention": Rule(1, 512, "all in fp32, rounded once; sums reordered"),
    "router": Rule(8, 256, "scores of up to 8 are rounded, and a weight moves by what they move"),
    "experts": Rule(2, 512, "two products and the activation between them, each rounded"),
    "moe_mlp": Rule(9, 576, "as router, then as experts; the dense MLP is off by less"),
}  # fmt: skip
#: for an op that the table does not know yet
UNKNOWN = Rule(4, 512, "not in the table: as much as the most that an op has there")
#: what a value out of budget may still differ by: this many times its own rounding, measured
#: against float64 on the same inputs. Two computations are off by one such error each; rounding
#: is a matter of luck, and where it is amplified (softmax over large scores) the luck varies.
MEASURED = 4.0
#: two experts whose probabilities lie this close (relative) may change places: four times what
#: moves a score. Scores of a segment are rounded where the backend's fused ops keep more digits.
CLOSE_EXPERTS = {"f32": 1e-3, "f16": 2.0**-5, "bf16": 2.0**-2}


def budget(op: str, dtype: str) -> float:
    """Allowed error of one op's results in a model of this dtype."""
    rule = RULES.get(op, UNKNOWN)
    return rule.rounded * UNIT[dtype] + rule.summed * UNIT["f32"]


def joint_budget(ops: Iterable[str], dtype: str) -> float:
    """Of a value that is made by several ops in a row: their errors are independent."""
    return sum((budget(op, dtype) ** 2 for op in ops), 0.0) ** 0.5
