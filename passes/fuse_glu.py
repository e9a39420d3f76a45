"""glu_packed(x @ w)  ->  linear_glu(x, w)
glu(x @ w, up)    ->  linear_glu(x, w, up)

Fuses a gated activation with the linear before it: of a packed gated MLP, and of per-layer
embeddings.
"""

from __future__ import annotations

from .join import Join

AFTER = "quantize_activations"  # linears have their final operands

JOINS = (Join("linear_glu"),)
