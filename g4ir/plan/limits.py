"""What an engine is built for."""

from __future__ import annotations

from dataclasses import dataclass

from g4ir.spec.reader import Count


@dataclass(frozen=True)
class Limits:
    """What an engine is built for. `max_seq` counts the tokens of a row, generated ones too."""

    max_batch: Count = 1
    max_seq: Count = 8192
    prefill_chunk: Count = 1024
