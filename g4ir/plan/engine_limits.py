"""Limits of an engine: batch, sequence length, chunk size."""

from __future__ import annotations

from dataclasses import dataclass

from g4ir.spec.reader import Count


@dataclass(frozen=True)
class Limits:
    """Limits that an engine is built for. `max_seq`: tokens of a sequence, prompt and generated."""

    max_batch: Count = 1
    max_seq: Count = 8192
    prefill_chunk: Count = 1024
