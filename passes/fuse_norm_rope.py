"""rope(rms_norm(x, w), cos, sin)  ->  norm_rope(x, w, cos, sin)"""

from __future__ import annotations

AFTER = "fuse_gate_up"  # heads are already split from packed matmuls

JOINS = ("norm_rope",)
