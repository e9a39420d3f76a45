"""h, n1, n2, n3 = norm_residual(..); moe_mlp(n1, n2, n3, ..)  ->  dense, moe, h = norm_moe_mlp(..)

For steps that are one kernel graph on a GPU, one token of one sequence: the router computes its
input row itself, and those of the experts and of the dense MLP.
"""

from __future__ import annotations

from .join import Join

AFTER = "fuse_norm_linear"  # products have what is theirs
GPU_ROWS = 1

JOINS = (Join("norm_moe_mlp", one_token=True),)
