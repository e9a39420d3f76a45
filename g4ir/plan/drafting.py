"""Expected speed-up of speculative decoding, from the cost of graphs (plan/cost.py).

A verification step takes k draft tokens and the one before. If each is accepted with probability a,
independently, it yields 1 + a + .. + a^k tokens; the speed-up is that number over the step's cost
in steps of one token. Costs are roofline times, or without a roofline bytes of weights and caches.
A draft model costs its step k times; n-gram drafts are taken as free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from g4ir.ui.table import Line, aligned

from .cost import Cost, Roof, floor

#: acceptance rates of a table
ACCEPTANCE = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
#: draft tokens of a table's rows, up to the maximum
DRAFTED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def tokens_per_round(acceptance: float, drafted: int) -> float:
    """Return the expected tokens of a verification step."""
    return sum(acceptance**i for i in range(drafted + 1))


@dataclass(frozen=True)
class Gain:
    """The expected gain of `drafted` tokens per step, which cost `cost` steps of one token."""

    drafted: int
    cost: float

    def speedup(self, acceptance: float) -> float:
        return tokens_per_round(acceptance, self.drafted) / self.cost

    @property
    def pays_from(self) -> float | None:
        """The least acceptance rate that gains, to a hundredth; None if none does."""
        return next((a / 100 for a in range(101) if self.speedup(a / 100) > 1), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "drafted": self.drafted,
            "cost": round(self.cost, 4),
            "pays_from": self.pays_from,
            "speedup": [round(self.speedup(a), 4) for a in ACCEPTANCE],
        }


def gains(
    cost: Callable[[int], Cost], most: int, roof: Roof | None, draft: Cost | None = None
) -> tuple[Gain, ...]:
    """Return the gains of up to `most` draft tokens; cost: of a step by its tokens per sequence;
    draft: of a draft model's step."""

    def size(found: Cost) -> float:
        return floor(found, roof).seconds if roof else float(found.needed_bytes)

    one, each = size(cost(1)), size(draft) if draft else 0.0
    counts = sorted({*(k for k in DRAFTED if k < most), most})
    return tuple(Gain(k, (size(cost(k + 1)) + k * each) / one) for k in counts)


def gains_text(found: Sequence[Gain], indent: int = 2) -> str:
    """Return a table: drafted tokens down, acceptance across."""
    lines: list[Line] = [
        ["draft tokens", "cost, steps", *(f"{100 * a:.0f} %" for a in ACCEPTANCE), "pays from"]
    ]
    for g in found:
        pays = "never" if g.pays_from is None else f"{100 * g.pays_from:.0f} %"
        speeds = (f"{g.speedup(a):.2f}x" for a in ACCEPTANCE)
        lines.append([str(g.drafted), f"{g.cost:.2f}", *speeds, pays])
    return aligned(lines, indent=indent)
