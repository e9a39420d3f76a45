"""More than one token per step: what a verification of so many tokens costs over a single step.

    python bench/verify.py ENGINE [--context 256,1024] [--rounds 5] [--save]

For an engine built with --draft-tokens. All counts take turns. `of the read` is the time over that
of reading the weights once; a drafted token is timed too where the engine has a draft model. What
drafts gain on a text is measured by `g4ir bench ENGINE --draft SOURCE`. --save writes
bench/results/verify.txt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import arguments, finish, medians, seconds

import g4ir
from g4ir.bench.roof import Meter
from g4ir.engine.engine import Engine
from g4ir.ops.types import torch_dtype
from g4ir.ui.table import aligned


def curve(engine: Engine, context: int, rounds: int) -> dict[str, float]:
    """Return median seconds of a step, a drafted token, and verifications by number of tokens."""
    session = engine.session(1)
    high = min(engine.spec.text.readable_ids, 200_000)  # below the ids of media
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, high, (context,), generator=g).tolist()
    session.prefill([tokens])

    def verified(given: list[int]) -> float:
        """Return the seconds of a step whose tokens the host chooses, of which it keeps one."""

        def run() -> None:
            logits = session.verify([given])
            for place in range(len(given)):
                logits[:, place].argmax(-1).tolist()
            if len(given) > 1:
                session.truncate(context + 1)

        took = seconds(run)
        session.truncate(context)
        return took

    runs: dict[str, Callable[[], float]] = {"1 (a step)": lambda: verified([5])}
    for count in range(2, engine.draft_tokens + 2):
        runs[str(count)] = lambda count=count: verified(tokens[:count])  # type: ignore[misc]
    if not engine.drafter:
        return medians(rounds, runs)
    # First of all, while the state is known that a drafter goes on from.
    draft = {"a drafted one": lambda: seconds(lambda: session.draft({0: 7}, {0: 1}))}
    return medians(rounds, draft) | medians(rounds, runs)


def main() -> None:
    args = arguments(__doc__, "engine", context=(256, 1024), rounds=5)
    with g4ir.load_engine(args.engine) as engine:
        params = {v.name: v for v in engine.program.graphs["decode"].params}
        rate = Meter(engine.device, torch_dtype(engine.dtype)).measure().read
        floor = sum(v.type.nbytes() for v in params.values()) / rate
        parts = [
            f"{engine.spec.name}, {engine.facts.backend} on {engine.device}, {engine.dtype}, "
            f"{engine.draft_tokens} drafted tokens; reading the weights once: {floor * 1e3:.1f} ms"
        ]
        for context in args.context:
            found = curve(engine, context, args.rounds)
            lines = [["tokens", "ms", "of a step", "of the read"]]
            for name, took in found.items():
                share = f"{took / found['1 (a step)']:.3f}"
                lines.append([name, f"{took * 1e3:.1f}", share, f"{took / floor:.2f}"])
            parts.append(f"context {context}\n\n{aligned(lines, indent=0)}")
        finish(args, "verify", "\n\n".join(parts), engine.device)


if __name__ == "__main__":
    main()
