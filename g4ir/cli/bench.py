"""`g4ir bench` and `g4ir bench-compare`."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from g4ir.artefact.directory import is_engine, read_manifest
from g4ir.bench.llama import LLAMA, gguf_file, gguf_path
from g4ir.bench.report import check_options, check_specs, run_bench
from g4ir.bench.runners import Workload, plan_workload
from g4ir.bench.schema import BenchReport, plain, read_report
from g4ir.bench.text import compare_reports, compare_text, markdown, plot_bench, text
from g4ir.builder.load import described
from g4ir.engine.engine import Engine
from g4ir.errors import InputError
from g4ir.spec.record import SUFFIXES
from g4ir.ui import console
from g4ir.ui.files import write_file
from g4ir.ui.plots import check_plot
from g4ir.weights.origin import AbsentWeights, existing_origin, find_model

from .common import emit, find_engines, flag_of, how_to_load, load, strict
from .models import named_model
from .talking import check_draft, given_draft

STDOUT = "-"


def bench(args: argparse.Namespace) -> int:
    """Measure engines, and report; or print the table of reports."""
    if args.table and args.engines and all(Path(m).suffix == ".json" for m in args.engines):
        if others := ", ".join(map(flag_of, sorted(args.given - {"table", "trace"}))):
            raise InputError(f"{others}: of reports the table alone is printed; leave it out")
        print(markdown([read_report(m) for m in args.engines]))
        return 0
    _check_arguments(args)
    if len(args.engines) == 2:
        with suppress(AbsentWeights):  # whose spec comes with them
            check_specs({m: named_model(m).spec for m in args.engines})
    if LLAMA in args.peer:
        with suppress(AbsentWeights):  # which come before the engine
            _check_llama(args)
    find_engines(args)
    report = _measured(args, _planned(args))
    _write(args, report)
    return 0 if report.outputs_agree else 1


def _check_arguments(args: argparse.Namespace) -> None:
    if not 1 <= len(args.engines) <= 2:
        raise InputError(f"bench takes one engine or two, not {len(args.engines)}")
    if args.json not in (None, STDOUT):
        if args.out:
            raise InputError(f"--json {args.json} and --out {args.out}: give one file")
        if Path(args.json).is_file() and Path(args.json).suffix != ".json":
            raise InputError(f"--json {args.json}: a file that is there, and no report: give --out")
        args.out, args.json = args.json, None
    if args.out and not Path(args.out).absolute().parent.is_dir():
        raise InputError(f"{args.out}: no such directory to write the report to")
    if args.out and Path(args.out).is_dir():
        raise InputError(f"{args.out} is a directory, and no file for the report: give --json last")
    if args.text and not Path(args.text).is_file():
        raise InputError(f"--text {args.text}: no such file")
    if args.plot:
        check_plot(args.plot)
    check_draft(args)
    check_options(args.peer, args.rounds, args.warmup)


def _check_llama(args: argparse.Namespace) -> None:
    """Refuse a MODEL that llama.cpp does not read before it is built or loaded."""
    model = args.engines[0]
    if is_engine(Path(model)):
        gguf_file(described(Path(model)), args.checkpoint)
    else:
        found = _checkpoint(args, model)
        gguf_path(existing_origin(found) if found else None, model)


def _planned(args: argparse.Namespace) -> Workload:
    manifests = {path: read_manifest(Path(path)) for path in args.engines}
    names = ("input_len", "output_len", "batch", "context", "seed", "text")
    sizes = {name: vars(args)[name] for name in names}
    return plan_workload([m.config.limits for m in manifests.values()], **sizes)


def _measured(args: argparse.Namespace, workload: Workload) -> BenchReport:
    draft = given_draft(args)["draft"]
    engines: list[Engine] = []
    seconds = []
    with console.Progress() as progress, ExitStack() as opened:
        for path in args.engines:
            start = time.perf_counter()
            engines.append(load(path, progress, **how_to_load(args)))
            opened.callback(engines[-1].close)
            seconds.append(time.perf_counter() - start)
        return run_bench(
            engines,
            workload,
            peers=args.peer,
            rounds=args.rounds,
            warmup=args.warmup,
            checkpoint=_checkpoint(args, args.models[0]),
            load_s=seconds,
            progress=progress,
            draft=draft.source,
            draft_tokens=draft.tokens or None,
        )


def _checkpoint(args: argparse.Namespace, model: str) -> str | None:
    """Return what a baseline loads: --checkpoint, or the weights that MODEL names."""
    given = args.checkpoint or args.random_weights is not None
    if given or is_engine(Path(model)) or Path(model).suffix in SUFFIXES:
        return args.checkpoint
    return str(find_model(model, "", args.revision)[1])


def _write(args: argparse.Namespace, report: BenchReport) -> None:
    values = strict(plain(report))
    if args.json == STDOUT:
        emit(values)
    else:
        print(markdown([report]) if args.table else text(report))
    for warning in report.warnings:
        console.say(f"warning: {warning}")
    if args.out:
        write_file(Path(args.out), [(json.dumps(values, indent=1) + "\n").encode()])
    if args.plot:
        plot_bench(args.plot, {"": report})


def compare(args: argparse.Namespace) -> int:
    """Set two reports side by side."""
    if args.plot:
        check_plot(args.plot)
    a, b = read_report(args.a), read_report(args.b)
    result = compare_reports(a, b, args.all)
    emit(plain(result)) if args.json else print(compare_text(result))
    if args.plot:
        plot_bench(args.plot, {"A": a, "B": b})
    return 1 if args.check and result.differ else 0
