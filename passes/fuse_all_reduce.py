"""norm_residual(all_reduce(x), residual, w_post, ..)  ->  all_reduce_norm_residual(..)
dual_norm_residual of a, b = all_reduce(a, b)  ->  all_reduce_dual_norm_residual(..)

For steps that are one kernel graph on a GPU, one token of each sequence: ranks read each other's
partial results in a kernel of ours, which sums them and computes the norms too. On one rank there
is no sum. It comes before norms are joined to products: a product after a sum then loads its
weights while the ranks wait for one another.
"""

from __future__ import annotations

from g4ir.ops.reduce_norm import MOST_ROWS, NORM_OF

from .join import Join

AFTER = "fuse_cache_write"  # the norms of a layer are what they will be
GPU_ROWS = MOST_ROWS

JOINS = tuple(Join(op, one_token=True) for op in NORM_OF)
