"""`g4ir run` and `g4ir verify`: use a built engine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.chat.prompt import TextStream
from g4ir.errors import InputError
from g4ir.generate.jsonl import named
from g4ir.model.media import MEDIA_SETTINGS, check_there
from g4ir.ui import console

from .common import emit, find_engines, flag_of, load, load_to_generate, output, token_ids
from .score import verify_text
from .talking import answer_once, answer_summary, check_draft, check_talk, given_draft

if TYPE_CHECKING:
    from g4ir.engine.scheduler import SchedulerConfig
    from g4ir.generate.offline import Failure, OfflineEngine, OfflineRequest, Result

#: setting of media -> the kind that it is for
SETTING_KINDS = {setting: kind for kind, names in MEDIA_SETTINGS.items() for setting in names}
FLAGS = ("bos", "max_new_tokens", "temperature", "top_k", "top_p", *SETTING_KINDS)


def run(args: argparse.Namespace) -> int:
    """Answer a prompt, or the lines of a file."""
    from g4ir.engine.scheduler import SchedulerConfig
    from g4ir.generate.offline import check_flags

    _check_media(args)
    check_draft(args)
    config = SchedulerConfig(**given_draft(args))
    flags = {k: getattr(args, k) for k in FLAGS}
    flags |= {"seed": args.seed, "stop": token_ids(args.stop, "--stop")}
    check_flags(flags)
    asked = None if args.input_jsonl else _one_request(args)
    with _opened(args.input_jsonl) as lines:  # before a MODEL is built
        check_talk(args)
        return _answered(args, lines, flags, config, asked)


def _answered(
    args: argparse.Namespace,
    lines: Any,
    flags: dict[str, Any],
    config: SchedulerConfig,
    asked: tuple[str, dict[str, Any]] | None,
) -> int:
    from g4ir.generate.offline import OfflineEngine

    with (
        console.Progress() as progress,
        closing(load_to_generate(args, progress)) as engine,
    ):
        if args.chat:
            progress.stop()
            answer_once(engine, args, flags["stop"])
            return 0
        offline = OfflineEngine(engine, flags, config)
        if asked is None:
            progress.stop()
            source = "stdin" if args.input_jsonl == "-" else args.input_jsonl
            answers = map(_log_and_emit, offline.answer_lines(lines, source))
            return 1 if sum(a.failed for a in answers) else 0
        where, fields = asked
        request = offline.request(fields, where, args.media)
        if args.json:
            progress.stop()
            _log_and_emit(offline.answer(request))
        else:
            progress("reading the prompt")
            _say_summary(_stream(offline, request, progress), args.seed)
        return 0


def _check_media(args: argparse.Namespace) -> None:
    kinds = {kind for kind, _ in args.media}
    if args.input_jsonl and kinds:
        raise InputError(
            f"--{min(kinds)}: with --input-jsonl each request names its own files, "
            f'such as {{"prompt": "...", "images": ["a.png"]}}'
        )
    for setting, kind in SETTING_KINDS.items():
        if getattr(args, setting) is not None and not args.input_jsonl and kind not in kinds:
            raise InputError(f"{flag_of(setting)} is for --{kind}, which is not given")
    for kind, path in args.media:
        with named(f"--{kind}"):
            check_there(kind, path)


def _opened(source: str | None) -> Any:
    if source == "-":
        return nullcontext(sys.stdin.buffer)
    return nullcontext() if source is None else Path(source).open("rb")


def _one_request(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    if args.tokens is None:
        return "--prompt", {"prompt": args.prompt}
    return "--tokens", {"tokens": token_ids(args.tokens, "--tokens")}


def _log_and_emit(result: Result | Failure) -> Result | Failure:
    emit(result.output())
    print(json.dumps(result.log()), file=sys.stderr, flush=True)
    return result


def _stream(offline: OfflineEngine, request: OfflineRequest, progress: console.Progress) -> Result:
    """Print each piece as it comes: text, or ids without a tokenizer."""
    text = TextStream(offline.codec.vocabulary) if offline.codec else None
    begun, count = time.perf_counter(), 0

    def told(token: int) -> None:
        nonlocal count
        progress.stop()
        print(text.push(token) if text else f"{' ' if count else ''}{token}", end="", flush=True)
        count += 1

    try:
        result = offline.answer(request, told)
    except (KeyboardInterrupt, console.Ended):
        print(text.rest() if text else "", flush=True)
        console.say(f"{count} new tokens in {time.perf_counter() - begun:.3f} s")
        raise
    print(text.rest() if text else "", flush=True)
    for note in result.request.notes:
        console.say(f"note: {note}")
    return result


def _say_summary(r: Result, given: int | None) -> None:
    seed = r.request.sampling.seed
    drawn = f"; drawn with --seed {seed}" if seed not in (None, given) else ""
    console.say(f"{answer_summary(r.counts, r.handle.tally, r.finish_reason)}{drawn}")


def verify(args: argparse.Namespace) -> int:
    """Compare an engine with a reference, or on texts."""
    from g4ir.check.logits import check_against

    if args.text:
        return verify_text(args)
    tokens = token_ids(args.tokens, "--tokens")
    against = args.against or "reference"
    check_against(against)
    find_engines(args)
    return verified(args.engine, args, against, tokens, args.trust, args.each_pass)


def verified(
    engine: str,
    args: argparse.Namespace,
    against: str = "reference",
    tokens: list[int] | None = None,
    trust: bool = False,
    each_pass: bool = False,
) -> int:
    """Run `verify` on an engine directory; `build --verify` does this too."""
    from g4ir.check.logits import check_against, verify_engine
    from g4ir.check.passes import verify_each_pass

    check_against(against)
    logits = partial(verify_engine, against=against)
    check: Callable[..., Any] = verify_each_pass if each_pass else logits
    threads = vars(args).get("threads")
    with (
        console.Progress() as progress,
        closing(load(engine, progress, trust=trust, threads=threads)) as loaded,
    ):
        report = check(loaded, tokens=tokens, checkpoint=args.checkpoint, progress=progress)
    output(args, report.to_dict(), f"{report.text()}\n")
    return 0 if report.ok else 1
