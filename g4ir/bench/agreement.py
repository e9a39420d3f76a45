"""Whether runners compute the same: logits and the choice at every step of a short request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from g4ir.engine.engine import Engine
from g4ir.ir.distance import row_errors

from .report import Values
from .runners import BenchRunner, HfRunner, Workload, reference_runner, request_steps

#: prompt and choices of the request that outputs are compared on: the interpreter takes as long for
#: a token as some engines for a thousand
CHECKED_INPUT, CHECKED_OUTPUT = 32, 4
#: minimum cosine of the median row of logits. Each runner rounds and quantises in its own way, and
#: routers in 16 bits take other experts in some rows; `g4ir verify` compares exactly
AGREE = 0.98


def shortened(w: Workload) -> Workload:
    """Return the beginning of a request, on which outputs are compared."""
    lengths = min(w.input_len, CHECKED_INPUT), min(w.output_len, CHECKED_OUTPUT)
    return replace(w, input_len=lengths[0], output_len=lengths[1])


def compare_outputs(
    engine: Engine, w: Workload, tokens: torch.Tensor, runners: Sequence[BenchRunner]
) -> list[Values]:
    """Compare each runner with the first one of transformers, or without one with the interpreter
    of `engine`; return their agreements as JSON values."""
    hf = next((r for r in runners if isinstance(r, HfRunner)), None)
    base: BenchRunner = hf or reference_runner(engine, w.batch)
    tokens = tokens[:, : w.max_len]
    base.set_context(tokens[:, : w.context])
    want = request_logits(base, w, tokens)
    return [
        {"role": r.role, "base": base.role, **agreement(request_logits(r, w, tokens), want)}
        for r in runners
        if r is not base
    ]


def request_logits(runner: BenchRunner, w: Workload, tokens: torch.Tensor) -> torch.Tensor:
    """Return f32[batch * output_len, vocab] of one request."""
    runner.rewind()
    steps = [runner.step(step).float().cpu() for step in request_steps(w, tokens)]
    return torch.stack(steps, 1).flatten(0, 1)


def agreement(got: torch.Tensor, want: torch.Tensor) -> Values:
    """Return JSON values: the worst `cosine` and `relative` error of `count` rows of logits; how
    many choose an `equal` token; whether the rows agree (`ok`)."""
    errors, equal = row_errors(got, want), got.argmax(-1) == want.argmax(-1)
    return {
        "count": len(want),
        "cosine": float(errors.cosine.min()),
        "relative": float(errors.relative.max()),
        "equal": int(equal.sum()),
        "ok": float(errors.cosine.median()) >= AGREE,
    }
