"""Whether runners compute the same: logits and the choice at every step of the workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from g4ir.check.peers import EnginePeer, HfPeer, find_anchor, rounding_error
from g4ir.check.reference import reference_engine
from g4ir.check.tokens import Turns
from g4ir.engine.engine import Engine
from g4ir.ir.distance import TOLERANCES, Agreement, Anchor, compare_choices, compare_rows

from .report import Values
from .runners import BenchRunner, HfRunner, Workload, reference_runner, request_steps

#: prompt and choices of the request that outputs are compared on: the interpreter takes as long for
#: a token as some engines for a thousand
CHECKED_INPUT, CHECKED_OUTPUT = 32, 4


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
    sizes = [w.context + w.input_len, *[1] * (w.output_len - 1)]
    turns = [Turns(ids, sizes) for ids in tokens]

    @cache
    def anchor() -> Anchor | None:
        peer = HfPeer(hf.model) if hf else EnginePeer(reference_engine(engine, resident=True))
        return find_anchor(engine, peer, turns, want)

    values = []
    for runner in runners:
        if runner is base:
            continue
        dtypes = {engine.dtype, (runner.engine or engine).dtype}
        budgets = [TOLERANCES[dtype, "hf" if hf else "reference"] for dtype in dtypes]
        # Rounding is measured if it is of one dtype; else the wider tolerance is that of 16 bits.
        is_measured = runner.tolerance is None and len(dtypes) == 1
        got = request_logits(runner, w, tokens)
        (agreement,) = compare_rows(
            runner.tolerance or min(budgets, key=lambda b: b.cosine is None),
            engine.dtype,
            [got],
            want,
            anchor=anchor if is_measured else lambda: None,
            rounding=partial(rounding_error, engine, turns[0]),
        )
        pair = {"role": runner.role, "base": base.role}
        values.append({**pair, **agreement_values(agreement, got, want)})
    return values


def request_logits(runner: BenchRunner, w: Workload, tokens: torch.Tensor) -> torch.Tensor:
    """Return f32[batch * output_len, vocab] of one request."""
    runner.rewind()
    steps = [runner.step(step).float().cpu() for step in request_steps(w, tokens)]
    return torch.stack(steps, 1).flatten(0, 1)


def agreement_values(agreement: Agreement, got: torch.Tensor, want: torch.Tensor) -> Values:
    """Return JSON values: the worst `cosine` and `relative` error of `count` rows of logits; how
    many choose an `equal` token, or another one in a `close` call; whether all is `ok`."""
    choices = compare_choices(got.argmax(-1), want, agreement.tolerance)
    equal, close = (int(t.sum()) for t in choices)
    worst, count = agreement.worst(), len(want)
    ok = agreement.ok and equal + close == count
    values = {"count": count, "cosine": worst["cosine"], "relative": worst["relative"]}
    return {**values, "equal": equal, "close": close, "ok": ok, "budget": str(agreement.tolerance)}


def void_roles(agreements: Sequence[Values]) -> set[str]:
    """Return the roles that agree with no other: their speed is that of another computation."""
    ok = {a[side] for a in agreements if a["ok"] for side in ("role", "base")}
    return {a[side] for a in agreements for side in ("role", "base")} - ok
