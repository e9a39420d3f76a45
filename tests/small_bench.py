"""Benches for tests that do not look at speed."""

from __future__ import annotations

import pytest

from g4ir.bench import measure, roof


def small_bench(patch: pytest.MonkeyPatch) -> None:
    """Small operands for the roof, and one request a round."""
    patch.setattr(roof, "BUFFER_BYTES", 1 << 16)
    patch.setattr(roof, "SIDES", {"cpu": (16, 32)})
    patch.setattr(measure, "ROUND_S", 0.0)
