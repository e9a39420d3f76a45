"""glu_packed(x @ w)  ->  linear_glu(x, w)
glu(x @ w, up)    ->  linear_glu(x, w, up)

The gate and its product in one op: of a gated MLP whose two halves are packed, and of a per-layer
embedding.
"""

from __future__ import annotations

from .join import Join

AFTER = "quantize_activations"  # products have their last operands

JOINS = (Join("linear_glu"),)
