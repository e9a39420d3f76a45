"""The cost of quantisation: next tokens of an engine beside those of the same model with its
weights as they were. Numbers to read; nothing passes or fails by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from g4ir.engine.engine import Engine
from g4ir.ui.progress import Progress
from g4ir.weights.pack import MadeParams

from .memory_check import refusal
from .peers import EnginePeer
from .reference import original_weights, plain_engine, plain_packing
from .tokens import Turns

#: rows of logits whose chances are worked out together
ROWS = 16


@dataclass(frozen=True)
class Quality:
    """The distance of the engine's next tokens to those of the weights as they were: the mean
    Kullback-Leibler divergence of theirs from the engine's (nats), the share of positions with the
    same best token, and the mean negative log likelihood of the given text, the engine's first.
    Without numbers, the `reason` why there are none."""

    positions: int = 0
    divergence: float | None = None
    same_top: float | None = None
    nll: tuple[float, float] | None = None
    reason: str | None = None

    def lines(self) -> list[str]:
        """Return the lines of a report."""
        if self.divergence is None or self.same_top is None:
            return [f"  {'quality':10}  not measured: {self.reason}"]
        lines = [
            f"  {'quality':10}{self.divergence:>12.2e} of KL divergence from the weights as they "
            f"were, same top token {self.same_top:.1%} of {self.positions}"
        ]
        if self.nll:
            lines.append("  {:10}{:>12.6f} of NLL, and {:.6f} of those".format("", *self.nll))
        return lines


def find_quality(
    engine: Engine,
    got: torch.Tensor,
    given: Turns,
    checkpoint: str | Path | None,
    taken: int,
    progress: Progress,
) -> Quality | None:
    """Return the quality of a quantised engine whose logits are `got`; None for another engine.

    The weights as they were come from `checkpoint`, else from where the engine makes its own.
    `taken`: bytes of the device that others hold.
    """
    if engine.recipe is None:
        return None
    source = original_weights(engine, checkpoint)
    if source is None:
        return Quality(reason="give --checkpoint DIR, the weights that it was made of")
    try:
        if source.forms:
            return Quality(reason="the checkpoint holds codes, and not what they were made of")
        packing = plain_packing(engine)
        need = sum(v.type.nbytes() for v in packing.program.params().values())
        said = "the weights as they were take {} beside what is loaded"
        if reason := refusal(said, need, engine.device, taken):
            return Quality(reason=reason)
        progress(f"{len(given.ids)} tokens through the weights as they were")
        peer = EnginePeer(plain_engine(engine, MadeParams(packing, source)))
        return measured(got, peer.logits(given), given.ids, given.where)
    finally:
        if checkpoint is not None:
            source.close()


def measured(
    got: torch.Tensor, want: torch.Tensor, ids: torch.Tensor, where: Sequence[int]
) -> Quality:
    """Return the quality of logits [N, vocab] after the tokens `where` of `ids`."""
    pairs = [*zip(got.split(ROWS), want.split(ROWS), strict=True)]
    divergence = torch.cat([divergences(*pair) for pair in pairs])
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in pairs])
    known = nll(got, ids, where), nll(want, ids, where)
    return Quality(
        len(where),
        float(divergence.mean()),
        float(same.double().mean()),
        known if any(at + 1 < len(ids) for at in where) else None,
    )


def divergences(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return the sum of p (log p - log q) of each row, p of `want` and q of `got`, in nats."""
    log_p, log_q = (t.cpu().double().log_softmax(-1) for t in (want, got))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def nll(logits: torch.Tensor, ids: torch.Tensor, where: Sequence[int]) -> float:
    """Return the mean of -log p(next token) over the positions that have a next token."""
    rows = [i for i, at in enumerate(where) if at + 1 < len(ids)]
    following = ids[[where[i] + 1 for i in rows]]
    chances = logits[rows].double().log_softmax(-1)
    return -float(chances.gather(1, following[:, None]).mean())
