"""glu_packed(x @ w)  ->  linear_glu(x, w)
glu(x @ w, up)    ->  linear_glu(x, w, up)

Fuses a gated activation with the linear before it: of a packed gated MLP, and of per-layer
embeddings.
"""

from __future__ import annotations

AFTER = "quantize_activations"  # linears have their final operands

JOINS = ("linear_glu",)
