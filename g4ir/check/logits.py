"""Compares an engine with a peer: the interpreter on the same weights, or transformers.

Both read the same tokens in several turns and single steps (and, with speculative decoding, these
as draft tokens). Compared are logits and 16 greedy tokens (ir/distance.py). If fp32 logits are out
of tolerance, four times the rounding error that the interpreter makes on this model is allowed; in
16 bits the reference's own rounding is the tolerance (ir/distance.py). That hides small faults, so
against transformers the graphs are also compared with it in float64, and the values inside with the
interpreter's. If something differs, the first value inside that does is named. Media are compared
with the interpreter's (media.py)."""

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
from g4ir.ui.progress import Progress, no_progress

from .compare import CHUNK, first_difference
from .encoder import chosen_texts, verify_texts
from .media import check_media
from .peers import EnginePeer, HfPeer, Peer, find_anchor, find_peer, rounding_error
from .reference import coarse, reference_engine
from .report import Greedy, VerifyReport, positions_of
from .routing import equal_experts
from .stage_report import engine_name
from .tokens import Turns, chosen_tokens, default_count, plan_turns

Tensor = torch.Tensor
AGAINST = ("reference", "hf")

GREEDY = 16
#: the first difference where prompts and single steps are right
ROUNDS_ALONE = "in rounds of drafts alone, which `g4ir verify ENGINE --each-pass` looks into"


def verify_engine(
    engine: Engine,
    against: str = "reference",
    tokens: Sequence[int] | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress = no_progress,
) -> VerifyReport:
    """Compare an engine with `reference` (the interpreter on the engine's own weights) or with
    `hf` (transformers on the checkpoint: the argument, else the one that the engine refers to,
    else the local hub cache; random weights are written to a temporary one).

    tokens: ids to compare on, at least 2, none of them a placeholder of media; default: drawn from
    a fixed seed, enough for several chunks and, up to max_seq, more than a window. Raises
    InputError for wrong arguments and MissingError if transformers is missing; a failed comparison
    is in the report.
    """
    check_against(against)
    if engine.spec.embedding:
        texts = chosen_texts(engine, tokens)
        return verify_texts(
            engine, find_peer(engine, against, checkpoint, progress), texts, progress
        )
    turns = plan_turns(engine, chosen_tokens(engine, tokens, default_count(engine)))
    peer = find_peer(engine, against, checkpoint, progress)
    report = _compare(engine, peer, turns, progress)
    if not report.ok:
        progress("looking for the first difference")
        report = replace(report, first_difference=_first(engine, peer, turns, report))
    elif report.float64 or report.routing:
        progress("values inside beside the interpreter's")
        report = replace(report, first_difference=_inside(engine, peer, turns))
    if not engine.media.kinds:
        return report
    reference = peer.engine if isinstance(peer, EnginePeer) else None
    return replace(report, media=check_media(engine, reference, progress))


def check_against(name: str) -> None:
    """Raise InputError for an unknown reference."""
    if name not in AGAINST:
        raise InputError(f"--against {name!r}: expected {' or '.join(AGAINST)}, or --text")


def _compare(engine: Engine, peer: Peer, turns: Turns, progress: Progress) -> VerifyReport:
    local, count, where = EnginePeer(engine), f"{len(turns.ids)} tokens", turns.where
    progress(f"{count} through the engine")
    got = local.logits(turns)
    progress(f"{count} through {peer.name}")
    want = peer.logits(turns)
    steps = turns.steps if engine.draft_tokens else 0
    # Rows of single steps as verification steps compute them.
    rounds = torch.cat((got[: len(got) - steps], local.in_rounds(turns))) if steps else got
    graphs: tuple[float, float] | None = None

    def anchor() -> Anchor | None:
        nonlocal graphs
        origin = find_anchor(engine, peer, [turns], want, progress)
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
    limit, readable = engine.limits.max_seq, engine.spec.text.readable_ids
    report = VerifyReport(
        engine_name(engine),
        peer.name,
        plain.tolerance,
        tuple(turns.sizes),
        positions_of(where, plain),
        _compare_greedy(local, peer, turns.ids, limit, readable, plain.tolerance),
        rounds=positions_of(where, again)[len(where) - steps :],
        float64=graphs,
    )
    if report.rows_ok or not plain.tolerance.rounding:
        return report
    progress("the same with equal experts")
    routed = equal_experts(engine, turns, got, rounds, plain.tolerance.rounding)
    if not routed:
        return report
    plain, again, routing = routed
    rows = positions_of(where, plain), positions_of(where, again)[len(where) - steps :]
    report = replace(report, budget=plain.tolerance, routing=routing)
    return replace(report, positions=rows[0], rounds=rows[1])


def _compare_greedy(
    local: Peer, peer: Peer, ids: Tensor, max_seq: int, readable: int, tolerance: Tolerance
) -> Greedy:
    prompt = ids[: max(1, max_seq - GREEDY + 1)]
    count = min(GREEDY, max_seq - len(prompt) + 1)
    got, _ = local.greedy(prompt, count, readable)
    want, logits = peer.greedy(prompt, count, readable)
    first = next((i for i in range(count) if got[i] != want[i]), count)
    if first == count:
        return Greedy(count, first, None)
    token = torch.tensor(got[first : first + 1], device=logits.device)
    _, close = compare_choices(token, logits[first : first + 1], tolerance)
    return Greedy(count, first, None if close else first)


def _first(engine: Engine, peer: Peer, turns: Turns, report: VerifyReport) -> str:
    """Name the first value inside that differs, or say where the difference is."""
    if report.plain_ok and not all(p.ok for p in report.rounds):
        return ROUNDS_ALONE
    if inside := _inside(engine, peer, turns):
        return inside
    if isinstance(peer, EnginePeer):
        return "none inside; the logits differ"
    return "none against reference: the graph or the weights are not what transformers computes"


def _inside(engine: Engine, peer: Peer, turns: Turns) -> str | None:
    """Name the first value inside that differs from the interpreter's, or is NaN or infinite
    there."""
    reference = peer.engine if isinstance(peer, EnginePeer) else reference_engine(engine)
    chunks = turns.chunks(min(engine.limits.prefill_chunk, CHUNK))
    steps = [methodcaller("prefill", chunk[None]) for chunk in chunks]
    try:
        difference = first_difference(engine, reference, steps, len(turns.ids))
    except CheckError as e:
        return str(e)
    aside = "" if isinstance(peer, EnginePeer) else ", against reference"
    return f"{difference.line()}{aside}" if difference else None
