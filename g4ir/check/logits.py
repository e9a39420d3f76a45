"""Compares an engine with a peer: the interpreter on the same weights, or transformers.

Both get the same tokens in several turns and single steps (and, with speculative decoding, these as
draft tokens). Compared are logits and 16 greedy tokens. Where fp32 logits are out of tolerance,
four times the rounding error that the interpreter makes on this very model is allowed; in 16 bits
the reference's own rounding is the budget (ir/distance.py). That hides small faults, so against
transformers the graphs are also compared with it in float64, and the values inside with the
interpreter's. Where something differs, the first value inside that does is named. Media are
compared with the interpreter's (media.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import methodcaller
from pathlib import Path

import torch

from g4ir.engine.engine import Engine
from g4ir.errors import CheckError, InputError
from g4ir.ir.distance import Anchor, Errors, Tolerance, budget_of, judge, row_errors
from g4ir.ui.progress import Progress, no_progress

from .compare import CHUNK, first_difference
from .media import check_media
from .peers import EnginePeer, HfPeer, Peer, find_peer
from .reference import coarse, float64_refusal, reference_engine
from .report import Greedy, Position, VerifyReport
from .stage_report import engine_name
from .tokens import Turns, chosen_tokens, plan_turns, wanted_tokens

Tensor = torch.Tensor
AGAINST = ("reference", "hf")

GREEDY = 16
#: what is said where prompts and single steps are right
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
    a fixed seed, enough for several chunks and, as far as max_seq goes, more than a window. Raises
    InputError for a wrong request and MissingError where transformers is missing; a failed
    comparison is in the report.
    """
    check_against(against)
    given = plan_turns(engine, chosen_tokens(engine, tokens, wanted_tokens(engine)))
    peer = find_peer(engine, against, checkpoint, progress)
    report = _compare(engine, peer, given, progress)
    if not report.ok:
        progress("looking for the first difference")
        report = replace(report, first_difference=_first(engine, peer, given, report))
    elif report.float64:
        progress("values inside beside the interpreter's")
        report = replace(report, first_difference=_inside(engine, peer, given))
    if not engine.media.kinds:
        return report
    reference = peer.engine if isinstance(peer, EnginePeer) else None
    return replace(report, media=check_media(engine, reference, progress))


def check_against(name: str) -> None:
    """Raise InputError for something else than what logits are compared with."""
    if name not in AGAINST:
        raise InputError(f"--against {name!r}: expected {' or '.join(AGAINST)}, or --text")


def _compare(engine: Engine, peer: Peer, given: Turns, progress: Progress) -> VerifyReport:
    own, count = EnginePeer(engine), f"{len(given.ids)} tokens"
    ids, where = given.ids, given.where
    progress(f"{count} through the engine")
    got = own.logits(given)
    progress(f"{count} through {peer.name}")
    want = peer.logits(given)
    steps = given.steps if engine.draft_tokens else 0
    # Rows of single steps as rounds make them, where the engine has such.
    rounds = torch.cat((got[: len(got) - steps], own.in_rounds(given))) if steps else got
    graphs: tuple[float, float] | None = None

    def anchor() -> Anchor | None:
        nonlocal graphs
        device = engine.device if isinstance(peer, EnginePeer) else "cpu"
        refused = float64_refusal(engine, len(ids), len(where), device)
        progress(f"{count} through {peer.name} {'again' if refused else 'in float64'}")
        origin = find_anchor(peer, [given], want, refused)
        if origin and not refused and isinstance(peer, HfPeer):
            progress(f"{count} through the graphs in float64")
            graphs = _graph_error(engine, given, origin.rows)
        return origin

    def rounding() -> float:
        progress(f"{count} through the reference in float64")
        return rounding_error(engine, given)

    budget = budget_of(engine.dtype, peer.name, *coarse(engine))
    budget, (errors, again) = judge(
        budget, engine.dtype, [got, rounds], want, anchor=anchor, rounding=rounding
    )
    progress("greedy tokens")
    room, readable = engine.limits.max_seq, engine.spec.text.readable_ids
    return VerifyReport(
        engine_name(engine),
        peer.name,
        budget,
        tuple(given.sizes),
        _positions(where, errors, budget),
        _compare_greedy(own, peer, ids, room, readable, budget),
        rounds=_positions(where, again, budget)[len(where) - steps :],
        float64=graphs,
    )


def _graph_error(engine: Engine, given: Turns, want: Tensor) -> tuple[float, float]:
    """Return the largest relative error of the engine's graphs in float64, and what is allowed."""
    rows = EnginePeer(engine).wide(given).cpu()
    limit = budget_of("f32", "hf", *coarse(engine)).relative or 0.0
    return float(row_errors(rows, want).relative.max()), limit


def _positions(where: Sequence[int], errors: Errors, budget: Tolerance) -> tuple[Position, ...]:
    parts = [errors.absolute, errors.relative, errors.cosine, budget.holds(errors)]
    parts += [errors.distance] * (budget.rounding is not None)
    return tuple(Position(*row) for row in zip(where, *(t.tolist() for t in parts), strict=True))


def find_anchor(
    peer: Peer, rows: Sequence[Turns], want: Tensor, refusal: str | None
) -> Anchor | None:
    """Return what distances of a batch are measured from: the peer in float64, rows of logits one
    request after the other; where that is refused its own rows `want`, and the other mode alone.
    None where the other mode says nothing: the interpreter's makes nearly the same roundings."""
    if refusal and isinstance(peer, EnginePeer):
        return None
    other = torch.cat([peer.other(given).cpu() for given in rows])
    if refusal:
        return Anchor("its other mode", want, [other], refusal)
    return Anchor("float64", torch.cat([peer.wide(given).cpu() for given in rows]), [other])


def rounding_error(engine: Engine, given: Turns) -> float:
    """Return how far rounding alone moves this model's logits (relative to the row's rms): the
    interpreter in fp32 against the interpreter in float64. Random weights can make a model in which
    it grows from layer to layer. Where it was asked to round to a coarse grid, also token by token:
    each mode rounds other numbers to the other side."""
    reference = EnginePeer(reference_engine(engine))
    wide = reference.wide(given)
    modes = [reference.logits, *([reference.other] if coarse(engine) else [])]
    return max(float(row_errors(mode(given), wide).relative.max()) for mode in modes)


def _compare_greedy(
    own: Peer, peer: Peer, ids: Tensor, room: int, readable: int, budget: Tolerance
) -> Greedy:
    prompt = ids[: max(1, room - GREEDY + 1)]
    count = min(GREEDY, room - len(prompt) + 1)
    got, _ = own.greedy(prompt, count, readable)
    want, logits = peer.greedy(prompt, count, readable)
    equal = next((i for i in range(count) if got[i] != want[i]), count)
    if equal == count:
        return Greedy(count, equal, None)
    row = logits[equal]
    best = row.topk(2).values
    close = bool(best[0] - best[1] <= budget.gap * row.pow(2).mean().sqrt())
    return Greedy(count, equal, None if close else equal)


def _first(engine: Engine, peer: Peer, given: Turns, report: VerifyReport) -> str:
    """Name the first value inside that differs, or say where the difference is."""
    if report.plain_ok and not all(p.ok for p in report.rounds):
        return ROUNDS_ALONE
    if inside := _inside(engine, peer, given):
        return inside
    if isinstance(peer, EnginePeer):
        return "none inside; the logits differ"
    return "none against reference: the graph or the weights are not what transformers computes"


def _inside(engine: Engine, peer: Peer, given: Turns) -> str | None:
    """Name the first value inside that differs from the interpreter's, or is no number there."""
    reference = peer.engine if isinstance(peer, EnginePeer) else reference_engine(engine)
    chunks = given.chunks(min(engine.limits.prefill_chunk, CHUNK))
    steps = [methodcaller("prefill", piece[None]) for piece in chunks]
    try:
        found = first_difference(engine, reference, steps, len(given.ids))
    except CheckError as e:
        return str(e)
    aside = "" if isinstance(peer, EnginePeer) else ", against reference"
    return f"{found.place()}{aside}" if found else None
