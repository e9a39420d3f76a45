"""Compares an engine with a reference: the interpreter on the same weights, or transformers.

The engine and the interpreter process the same tokens in several prefills and decode steps (with
speculative decoding, the engine also in verification steps), transformers in one forward pass.
Logits and 16 greedy tokens are compared (ir/distance.py). If fp32 logits are out of tolerance, up
to four times the interpreter's own rounding error on this model is allowed; in 16 bits the
reference's own rounding is the tolerance. That hides small faults, so in 16 bits against
transformers the graphs are also compared in float64, and intermediate values with the
interpreter's. On a failure the report names the first intermediate value that differs. Towers and a
prompt with media are compared with the interpreter (media.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import methodcaller
from pathlib import Path

import torch

from g4ir.engine.engine import Engine
from g4ir.errors import CheckError, InputError
from g4ir.ir.distance import (
    Anchor,
    Tolerance,
    compare_choices,
    compare_rows,
    row_errors,
    tolerance_of,
)
from g4ir.ir.flatten import inner_nodes
from g4ir.ui.progress import Progress, no_progress

from .compare import CHUNK, Step, compare_session
from .encoder import chosen_texts, verify_texts
from .media import check_media
from .peers import EnginePeer, HfPeer, Peer, find_anchor, find_peer, rounding_error
from .reference import coarse, reference_engine
from .report import Greedy, VerifyReport, positions_of
from .stage_report import engine_name
from .tokens import Turns, chosen_tokens, default_count, plain_ids, plan_turns

Tensor = torch.Tensor
AGAINST = ("reference", "hf")

GREEDY = 16


def verify_engine(
    engine: Engine,
    against: str = "reference",
    tokens: Sequence[int] | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress = no_progress,
) -> VerifyReport:
    """Compare an engine with `reference` (the interpreter on the engine's own weights) or with
    `hf` (transformers on weights of the checkpoint: the argument, else the one that the engine
    refers to, else that of the local hub cache; or on weights of the engine's seed).

    tokens: ids to compare on, at least 2, none of them a placeholder of media; default: drawn from
    a fixed seed, enough for several chunks and, up to max_seq, more than a window. Raises
    InputError for wrong arguments and MissingError if transformers is missing; a failed comparison
    is in the report.
    """
    check_against(against)
    if engine.spec.embedding:
        texts = chosen_texts(engine, tokens)
        peer = find_peer(engine, against, checkpoint, progress)
        return verify_texts(engine, peer, texts, progress, with_media=tokens is None)
    turns = plan_turns(engine, chosen_tokens(engine, tokens, default_count(engine)))
    peer = find_peer(engine, against, checkpoint, progress)
    report = _compare(engine, peer, turns, progress)
    if not report.ok or report.float64:
        progress("intermediate values against the interpreter's")
        report = _with_inside(engine, peer, turns, report)
    if not engine.media.kinds:
        return report
    reference = peer.engine if isinstance(peer, EnginePeer) else None
    return replace(report, media=check_media(engine, reference, progress))


def check_against(name: str) -> None:
    """Raise InputError for an unknown reference."""
    if name not in AGAINST:
        fix = "to compare the scores of texts give --text instead"
        raise InputError(f"--against {name!r}: expected {' or '.join(AGAINST)}; {fix}")


def _compare(engine: Engine, peer: Peer, turns: Turns, progress: Progress) -> VerifyReport:
    local, count, where = EnginePeer(engine), f"{len(turns.ids)} tokens", turns.where
    progress(f"{count} through the engine")
    got = local.logits(turns)
    progress(f"{count} through {peer.name}")
    want = peer.logits(turns)
    steps = turns.steps if engine.draft_tokens else 0
    # The same rows, but those of the decode steps are recomputed by verification steps.
    rounds = torch.cat((got[: len(got) - steps], local.in_rounds(turns))) if steps else got
    graphs: tuple[float, float] | None = None

    def anchor() -> Anchor | None:
        nonlocal graphs
        origin = find_anchor(engine, peer, turns, want, progress)
        if origin and not origin.reason and isinstance(peer, HfPeer):
            progress(f"{count} through the graphs in float64")
            rows = EnginePeer(engine).in_float64(turns).cpu()
            limit = tolerance_of("f32", "hf", *coarse(engine)).relative or 0.0
            graphs = float(row_errors(rows, origin.rows).relative.max()), limit
        return origin

    def rounding() -> float:
        progress(f"{count} through the reference in float64")
        return rounding_error(engine, turns)

    budget = tolerance_of(engine.dtype, peer.name, *coarse(engine))
    plain, again = compare_rows(
        budget, engine.dtype, [got, rounds], want, anchor=anchor, rounding=rounding
    )
    progress("greedy tokens")
    limit, choices = engine.limits.max_seq, plain_ids(engine)
    return VerifyReport(
        engine_name(engine),
        peer.name,
        plain.tolerance,
        tuple(turns.sizes),
        positions_of(where, plain),
        _compare_greedy(local, peer, turns.ids, limit, choices, plain.tolerance),
        rounds=positions_of(where, again)[len(where) - steps :],
        float64=graphs,
    )


def _compare_greedy(
    local: Peer, peer: Peer, ids: Tensor, max_seq: int, choices: Tensor, tolerance: Tolerance
) -> Greedy:
    prompt = ids[: max(1, max_seq - GREEDY + 1)]
    count = min(GREEDY, max_seq - len(prompt) + 1)
    got, _ = local.greedy(prompt, count, choices)
    want, logits = peer.greedy(prompt, count, choices)
    first = next((i for i in range(count) if got[i] != want[i]), count)
    if first == count:
        return Greedy(count, first, None)
    chosen = (choices == got[first]).nonzero()[0].to(logits.device)
    _, close = compare_choices(chosen, logits[first : first + 1], tolerance)
    return Greedy(count, first, None if close else first)


def _with_inside(engine: Engine, peer: Peer, turns: Turns, report: VerifyReport) -> VerifyReport:
    """Return the report with the first intermediate value that differs. In 16 bits a router may
    choose either of two nearly tied experts, which changes the logits of that token and of later
    ones by far more than rounding: if no intermediate value differs except at near ties, such rows
    are excused."""
    inside, visible = _inside(engine, peer, turns)
    if inside or report.ok:
        return replace(report, first_difference=inside)
    rounding = report.budget.rounding
    if rounding and not rounding.reason and visible and _has_routers(engine):
        return replace(report, near_ties=not report.rows_ok)
    reason = "no intermediate value that the backend exposes, only logits or greedy tokens"
    if not isinstance(peer, EnginePeer):
        reason = "none against the interpreter: transformers has another graph or other weights"
    return replace(report, first_difference=reason)


def _has_routers(engine: Engine) -> bool:
    nodes = (m for g in engine.program.graphs.values() for n in g.nodes for m in inner_nodes(n))
    return any(n.op == "router" for n in nodes)


def _inside(engine: Engine, peer: Peer, turns: Turns) -> tuple[str | None, bool]:
    """Return the first intermediate value that differs from the interpreter's (or is NaN or
    infinite in it), in prefill chunks and decode steps, then in verification steps; and, if none
    does, whether the backend exposes the intermediate values of every graph that ran."""
    reference = peer.engine if isinstance(peer, EnginePeer) else reference_engine(engine)
    size = min(engine.limits.prefill_chunk, CHUNK)
    runs: list[list[Step]] = [[methodcaller("prefill", t[None]) for t in turns.chunks(size)]]
    if engine.draft_tokens:
        runs.append([*EnginePeer(engine).round_steps(turns)])
    aside, visible = "" if isinstance(peer, EnginePeer) else ", against reference", True
    for steps in runs:
        try:
            report = compare_session(engine, reference, steps, len(turns.ids))
        except CheckError as e:
            return str(e), True
        if report.first:
            return f"{report.first.line()}{aside}", True
        visible = visible and all(report.phases.values())
    return None, visible
