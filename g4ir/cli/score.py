"""`g4ir score` and `g4ir verify --text`: probabilities that an engine gives to texts."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError
from g4ir.ui import console
from g4ir.ui.units import parse_count

from .common import find_engines, load, strict

if TYPE_CHECKING:
    from g4ir.check.documents import Window
    from g4ir.check.score import Score, Sums
    from g4ir.engine.engine import Engine

#: columns of the table: key of `Sums.means`, heading, format
COLUMNS = (
    ("tokens", "tokens", "8d"),
    ("nll", "NLL", "10.4f"),
    ("ppl", "perplexity", "12.2f"),
    ("baseline_nll", "baseline", "10.4f"),
    ("kl", "KL", "12.6f"),
    ("same_top", "same top", "10.1%"),
)
UNQUANTISED = "the unquantised weights"


def score(args: argparse.Namespace) -> int:
    """Print the log-probabilities of given texts."""
    most = _checked(args)
    find_engines(args, all_logits=True)

    def row(one: Score) -> dict[str, Any]:
        return {**_means(one), "token_ids": one.ids, "logprobs": one.logprobs}

    with console.Progress() as progress, closing(_loaded(args, args.engine, progress)) as engine:
        return _report(args, [engine], most, {}, row, progress)


def verify_text(args: argparse.Namespace) -> int:
    """Compare an engine with its unquantised weights, or another engine, on texts."""
    from g4ir.artefact.directory import read_manifest
    from g4ir.check.logits import AGAINST
    from g4ir.check.stage_report import engine_name

    if args.against in AGAINST:
        raise InputError(
            f"--against {args.against} is for token ids: with --text give an engine directory, or "
            f"leave it out to compare with {UNQUANTISED}"
        )
    most = _checked(args)
    if args.against is not None:
        read_manifest(Path(args.against))
    find_engines(args, all_logits=True)
    with (
        console.Progress() as progress,
        closing(_loaded(args, args.engine, progress)) as engine,
        _baseline(args, engine, progress) as (other, name),
    ):
        if other is None:
            console.say(f"note: no KL divergence: {name}")
        head = {"engine": engine_name(engine), "against": name if other else None}
        engines = [engine, other] if other else [engine]
        return _report(args, engines, most, head, _means, progress)


def _checked(args: argparse.Namespace) -> int:
    """Check files and the number of tokens before an engine is loaded; return the number."""
    from g4ir.chat.text_files import check_files

    lines = vars(args).get("jsonl")
    check_files([lines] if lines else args.text, "--jsonl" if lines else "--text")
    return parse_count(args.tokens, "--tokens") if args.tokens else sys.maxsize


def _loaded(args: argparse.Namespace, path: str, progress: console.Progress) -> Engine:
    from g4ir.check.score import require_all_logits

    engine = load(path, progress, trust=args.trust, threads=args.threads)
    require_all_logits(engine)
    return engine


@contextmanager
def _baseline(
    args: argparse.Namespace, engine: Engine, progress: console.Progress
) -> Iterator[tuple[Engine | None, str]]:
    """A context with what an engine is compared with, and its name; or None, and why not."""
    from g4ir.check.reference import is_quantised, param_bytes, unquantised

    with ExitStack() as stack:
        if args.against is None and not is_quantised(engine):
            yield None, "nothing is quantised; --against ENGINE compares with another engine"
        elif args.against is None:
            progress("opening the unquantised weights")
            held = param_bytes(engine)
            found = stack.enter_context(unquantised(engine, args.checkpoint, held))
            yield (None, found) if isinstance(found, str) else (found, UNQUANTISED)
        else:
            other = stack.enter_context(_loaded(args, args.against, progress))
            if (sizes := [e.spec.text.vocab_size for e in (engine, other)])[0] != sizes[1]:
                said = "vocabularies of {} and {}: no common tokens".format(*sizes)
                raise InputError(f"--against {args.against}: {said}")
            if engine.tokenizer().get_vocab() != other.tokenizer().get_vocab():
                raise InputError(f"--against {args.against}: its tokenizer has other tokens")
            yield other, args.against


def _report(
    args: argparse.Namespace,
    engines: list[Engine],
    most: int,
    head: dict[str, Any],
    row: Callable[[Score], dict[str, Any]],
    progress: console.Progress,
) -> int:
    """Print the scores as they come, then their totals; exit code 1 if one is not finite."""
    from g4ir.check.documents import Reader
    from g4ir.check.score import Sums, score_windows

    reader = Reader(engines[0], min(e.limits.max_seq for e in engines), most)
    lines = vars(args).get("jsonl")
    windows: Iterator[Window] = reader.lines(lines) if lines else reader.files(args.text)
    total, count = Sums(), 0
    for one in score_windows(engines, windows, progress):
        console.Progress.clear()
        if args.json:
            print(
                ", " if count else '{"documents": [', json.dumps(strict(row(one))), sep="", end=""
            )
        else:
            print("" if count else _heading(head, one), _line(one.name, one.sums), sep="")
        total, count = total + one.sums, count + 1
        sys.stdout.flush()
    if not count:
        raise InputError(f"{lines}: no documents among its lines")
    if args.json:
        print(f"], {json.dumps(strict({**head, **total.means()}))[1:]}")
    elif count > 1:
        print(_line("all", total))
    return 0 if all(math.isfinite(x) for x in (total.nll, *(total.against or ()))) else 1


def _means(one: Score) -> dict[str, Any]:
    return {"id": one.document, "part": one.part, **one.sums.means()}


def _heading(head: dict[str, Any], one: Score) -> str:
    means = one.sums.means()
    names = "".join(f"{name:>{_width(form)}}" for key, name, form in COLUMNS if key in means)
    against = f" against {head['against']}" if head.get("against") else ""
    title = f"{head['engine']}{against}\n" if head else ""
    return f"{title}  {'document':22}{names}\n"


def _line(name: str, sums: Sums) -> str:
    means = sums.means()
    cells = "".join(
        f"{'-':>{_width(form)}}" if means[key] is None else f"{means[key]:{form}}"
        for key, _, form in COLUMNS
        if key in means
    )
    return f"  {name:22}{cells}"


def _width(form: str) -> str:
    return form.rstrip("df%").partition(".")[0]
