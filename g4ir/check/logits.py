"""Compares an engine with a peer: the interpreter on the same weights, or transformers.

Both get the same tokens in several turns and single steps (and, with speculative decoding, these as
draft tokens). Compared are logits, 16 greedy tokens, and the layers' outputs at the end of each
chunk. Where fp32 logits are out of tolerance, four times the rounding error that the interpreter
makes on this very model is allowed; in 16 bits the reference's own rounding is the budget
(ir/distance.py), and against transformers each layer is also computed in float64 on what the engine
gave it. Where something differs, the first value inside that does is named. Media are compared with
the interpreter's (media.py), quantised engines also with the weights as they were: numbers to read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import methodcaller
from pathlib import Path

import torch

from g4ir.engine.engine import Engine
from g4ir.errors import InputError
from g4ir.ir.distance import ROUNDED, Anchor, Errors, Tolerance, budget_of, row_errors, widened
from g4ir.ui.progress import Progress, no_progress

from .compare import CHUNK, first_difference, first_not_finite
from .hf import text_bytes
from .media import check_media
from .peers import FINAL, EnginePeer, HfPeer, Peer, Rows, find_peer
from .reference import (
    coarse,
    float64_refusal,
    is_quantised,
    param_bytes,
    reference_engine,
    unquantised,
)
from .report import (
    SATURATED,
    Greedy,
    LayerError,
    LocalError,
    Position,
    Quality,
    Saturation,
    VerifyReport,
)
from .score import score_rows
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
    report = _compare(engine, peer, given, checkpoint, progress)
    report = replace(report, random_ids=tokens is None)
    if not report.ok:
        progress("looking for the first difference")
        report = replace(report, first_difference=_first(engine, peer, given, report))
    if not engine.media.kinds:
        return report
    reference = peer.engine if isinstance(peer, EnginePeer) else None
    return replace(report, media=check_media(engine, reference, progress))


def check_against(name: str) -> None:
    """Raise InputError for something else than what logits are compared with."""
    if name not in AGAINST:
        raise InputError(f"--against {name!r}: expected {' or '.join(AGAINST)}, or --text")


def _compare(
    engine: Engine, peer: Peer, given: Turns, checkpoint: str | Path | None, progress: Progress
) -> VerifyReport:
    own, text, count = EnginePeer(engine), engine.spec.text, f"{len(given.ids)} tokens"
    ids, where = given.ids, given.where
    ends = [n - 1 for n in accumulate(map(len, given.chunks(engine.limits.prefill_chunk)))]
    shown = range(len(ids)) if engine.dtype in ROUNDED else ends
    mine: Rows = {}
    theirs: Rows = {}
    progress(f"{count} through the engine")
    got = own.logits(given, shown, mine)
    progress(f"{count} through {peer.name}")
    want = peer.logits(given, shown, theirs)
    steps = given.steps if engine.draft_tokens else 0
    # Rows of single steps as rounds make them, where the engine has such.
    rounds = torch.cat((got[: len(got) - steps], own.in_rounds(given))) if steps else got
    budget, (errors, again) = _judged(engine, peer, given, (got, rounds), want, progress)
    local: tuple[LocalError, ...] = ()
    if isinstance(peer, HfPeer) and budget.rounding and not budget.rounding.reason:
        progress("each layer in float64 on the engine's own inputs")
        local = peer.local(given, (got, mine), (want, theirs), engine.dtype)
    progress("greedy tokens")
    likelihoods = nll(got, ids, where), nll(want, ids, where)
    only = {name: {i: held[i] for i in held.keys() & {*ends}} for name, held in mine.items()}
    taken = _taken(engine, peer)
    return VerifyReport(
        engine_name(engine),
        peer.name,
        budget,
        tuple(given.sizes),
        _positions(where, errors, budget),
        _compare_greedy(own, peer, ids, engine.limits.max_seq, text.readable_ids, budget),
        likelihoods if len(where) > 1 else None,
        None,
        _layer_errors(text.num_hidden_layers, only, theirs),
        _saturation(text.final_logit_softcapping, got, want),
        local=local,
        rounds=_positions(where, again, budget)[len(where) - steps :],
        quality=find_quality(engine, got, given, checkpoint, taken, progress),
    )


def _judged(
    engine: Engine,
    peer: Peer,
    given: Turns,
    many: tuple[Tensor, Tensor],
    want: Tensor,
    progress: Progress,
) -> tuple[Tolerance, list[Errors]]:
    """Return the tolerance, measured where the dtype or the rounding asks for it, and the errors of
    each of `many`."""
    dtype, count = engine.dtype, f"{len(given.ids)} tokens"
    budget = budget_of(dtype, peer.name, *coarse(engine))
    errors = [row_errors(rows, want) for rows in many]
    if dtype in ROUNDED:
        device = engine.device if isinstance(peer, EnginePeer) else "cpu"
        refused = float64_refusal(engine, len(given.ids), len(given.where), device)
        progress(f"{count} through {peer.name} {'again' if refused else 'in float64'}")
        if anchor := find_anchor(peer, [given], want, refused):
            budget = Tolerance(rounding=anchor.rounding(want, dtype))
            errors = [anchor.errors(rows, want) for rows in many]
    if budget.relative is not None and not all(bool(budget.holds(e).all()) for e in errors):
        progress(f"{count} through the reference in float64")
        budget = widened(budget, rounding_error(engine, given))
    return budget, errors


def _positions(where: Sequence[int], errors: Errors, budget: Tolerance) -> tuple[Position, ...]:
    parts = [errors.absolute, errors.relative, errors.cosine, budget.holds(errors)]
    parts += [errors.distance] * (budget.rounding is not None)
    return tuple(Position(*row) for row in zip(where, *(t.tolist() for t in parts), strict=True))


def _taken(engine: Engine, peer: Peer) -> int:
    """Count the bytes of weights that engine and peer hold where the engine runs."""
    if isinstance(peer, EnginePeer):
        return 2 * param_bytes(engine)
    return param_bytes(engine) + text_bytes(engine) * (engine.device == "cpu")


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


def _layer_errors(count: int, mine: Rows, theirs: Rows) -> tuple[LayerError, ...]:
    out = []
    for layer in range(count):
        names = [f"L{layer}.out"] + [FINAL] * (layer + 1 == count)
        name = next((n for n in names if n in mine and n in theirs), None)
        at = sorted(mine[name].keys() & theirs[name].keys()) if name else []
        if name and at:
            errors = row_errors(*(torch.stack([x[name][i] for i in at]) for x in (mine, theirs)))
            relative, cosine = errors.relative.max(), errors.cosine.min()
            out.append(LayerError(layer, name, float(relative), float(cosine)))
    return tuple(out)


def _saturation(cap: float | None, got: Tensor, want: Tensor) -> Saturation | None:
    if not cap:
        return None
    shares = [float((t.abs().amax(-1) > SATURATED * cap).float().mean()) for t in (got, want)]
    return Saturation(cap, *shares)


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
    chunks = given.chunks(min(engine.limits.prefill_chunk, CHUNK))
    steps = [methodcaller("prefill", piece[None]) for piece in chunks]
    odd = any(math.isnan(p.absolute) for p in report.positions)
    if odd and (found := first_not_finite(engine, steps)):
        return found
    if report.plain_ok and not all(p.ok for p in report.rounds):
        return ROUNDS_ALONE
    reference = peer.engine if isinstance(peer, EnginePeer) else reference_engine(engine)
    inside = first_difference(engine, reference, steps, len(given.ids))
    if isinstance(peer, EnginePeer):
        return inside.place() if inside else "none inside; the logits differ"
    if inside:
        return f"{inside.place()}, against reference"
    return "none against reference: the graph or the weights are not what transformers computes"


def find_quality(
    engine: Engine,
    got: Tensor,
    given: Turns,
    checkpoint: str | Path | None,
    taken: int,
    progress: Progress,
) -> Quality | None:
    """Return the quality of a quantised engine whose logits are `got`; None for another engine. The
    rest is of `unquantised`."""
    if not is_quantised(engine):
        return None
    with unquantised(engine, checkpoint, taken) as plain:
        if isinstance(plain, str):
            return Quality(reason=plain)
        progress(f"{len(given.ids)} tokens through the weights as they were")
        return measured(got, EnginePeer(plain).logits(given), given.ids, given.where)


def measured(got: Tensor, want: Tensor, ids: Tensor, where: Sequence[int]) -> Quality:
    """Return the quality of logits [N, vocab] after the tokens `where` of `ids`."""
    # The last token has no next one: its row counts for the divergence alone.
    rows = score_rows(got, ids[[min(at + 1, len(ids) - 1) for at in where]], want)
    known = -rows[:2, [at + 1 < len(ids) for at in where]]
    divergence, same = rows[2:].mean(1).tolist()
    nll = (float(known[0].mean()), float(known[1].mean())) if known.shape[1] else None
    return Quality(len(where), divergence, same, nll)


def nll(logits: Tensor, ids: Tensor, where: Sequence[int]) -> float:
    """Return the mean of -log p(next token) over the positions that have a next token."""
    rows = [i for i, at in enumerate(where) if at + 1 < len(ids)]
    return -float(score_rows(logits[rows], ids[[where[i] + 1 for i in rows]]).mean())
