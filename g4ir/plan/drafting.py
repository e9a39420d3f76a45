"""How much drafting is expected to gain, by the cost of graphs (plan/cost.py).

A round drafts k tokens and verifies them with the one before in one step of k + 1 tokens. Where
each is accepted with probability a, whatever came before it, 1 + a + .. + a^k tokens come of a
round. So drafting is faster by that number over what the step costs, in steps of one token. Both
costs are floors under a roof; without one they are bytes of weights and caches. A drafter costs its
step k times; prompt lookup is taken to cost nothing, as it nearly does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from g4ir.ui.table import Line, aligned

from .cost import Cost, Roof, floor

#: shares of drafted tokens that are right
ACCEPTANCE = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
#: numbers of drafted tokens that a table has, up to the most
DRAFTED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def tokens_per_round(acceptance: float, drafted: int) -> float:
    """Return the expected number of tokens of a round."""
    return sum(acceptance**i for i in range(drafted + 1))


@dataclass(frozen=True)
class Gain:
    """The expected gain of drafting so many tokens a round. `cost` is that of a round in steps
    of one token."""

    drafted: int
    cost: float

    def speedup(self, acceptance: float) -> float:
        """Return how much faster tokens come."""
        return tokens_per_round(acceptance, self.drafted) / self.cost

    @property
    def pays_from(self) -> float | None:
        """The acceptance from which on it is faster than single steps, to a hundredth; None where
        it never is."""
        return next((a / 100 for a in range(101) if self.speedup(a / 100) > 1), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "drafted": self.drafted,
            "cost": round(self.cost, 4),
            "pays_from": self.pays_from,
            "speedup": [round(self.speedup(a), 4) for a in ACCEPTANCE],
        }


def gains(
    cost: Callable[[int], Cost], most: int, roof: Roof | None, draft: Cost | None = None
) -> tuple[Gain, ...]:
    """Return the gains of up to `most` drafted tokens; `cost` is that of a step of so many tokens a
    row, `draft` that of a drafter's step."""

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
