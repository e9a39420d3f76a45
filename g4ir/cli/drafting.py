"""Flags of drafting (engine/speculative.py), and how its rounds are told."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError

from .common import flag_of

if TYPE_CHECKING:
    from g4ir.engine.speculative import AcceptanceStats

    from .common import Parser


def add_draft(p: Parser, rows: str | None = None) -> None:
    """Add the flags of drafts; `rows` says what shares them, where something does."""
    p.add_argument(
        "--draft",
        metavar="SOURCE",
        default="none",
        help="speculative decoding, for an engine built with --draft-tokens: ngram (prompt\n"
        "lookup), mtp (its draft model), or none (default)",
    )
    p.add_argument(
        "--draft-tokens",
        metavar="K",
        type=int,
        help="maximum draft tokens per step (default: the engine's; 0: no speculative decoding)",
    )
    if rows:
        p.add_argument(
            "--draft-rows",
            metavar="N",
            type=int,
            help=f"speculate only while at most N {rows} are decoded concurrently (default 2)",
        )


def check_draft(args: argparse.Namespace) -> None:
    """Raise InputError for flags of drafts that are wrong, or would do nothing, whatever the
    engine."""
    from g4ir.engine.speculative import DRAFTS, NONE

    if args.draft not in DRAFTS:
        raise InputError(f"--draft {args.draft}: expected one of {', '.join(DRAFTS)}")
    if args.draft != NONE:
        return
    for name in ("draft_tokens", "draft_rows"):
        value = getattr(args, name, None)
        if value is not None and (name, value) != ("draft_tokens", 0):
            flag = flag_of(name)
            raise InputError(f"{flag} {value}: nothing is drafted; give --draft too")


def given_draft(args: argparse.Namespace) -> dict[str, Any]:
    """Return fields of SchedulerConfig; the scheduler checks them against an engine."""
    from g4ir.engine.speculative import NO_DRAFT, SpeculativeConfig

    off = args.draft_tokens == 0
    rows = getattr(args, "draft_rows", None)
    return {
        "draft": NO_DRAFT if off else SpeculativeConfig(args.draft, args.draft_tokens or 0),
        **({} if rows is None else {"draft_rows": rows}),
    }


def tally_text(tally: AcceptanceStats | None) -> str:
    """Return how many tokens came of a round, and how many of 100 drafted ones were accepted, by
    place; nothing where nothing was drafted."""
    if not tally or not tally.rounds:
        return ""
    told: Any = tally.to_dict()
    shares = " ".join(f"{100 * share:.0f}" for share in told["accepted"])
    right = f" ({shares} % of drafts accepted)" if shares else ""
    return f"; {told['tokens_per_round']:.2f} tokens a round{right}"
