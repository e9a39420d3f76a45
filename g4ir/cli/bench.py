"""`g4ir bench` and `g4ir bench-compare`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError
from g4ir.ui import console

from .common import add_load, add_verb, emit, load, strict
from .drafting import add_draft, check_draft, given_draft

if TYPE_CHECKING:
    from g4ir.bench.schema import BenchReport
    from g4ir.bench.workload import Workload
    from g4ir.engine.engine import Engine

STDOUT = "-"


def add_bench(verbs: Any) -> None:
    p = add_verb(verbs, "bench", _bench, "latency and throughput benchmark", json=False)
    p.add_argument(
        "engines",
        metavar="ENGINE",
        nargs="*",
        help="an engine directory, or two of the same variant to compare (alternating runs)",
    )
    p.add_argument(
        "--input-len",
        metavar="N",
        type=int,
        help="prompt length in tokens (default 512, or what fits)",
    )
    p.add_argument(
        "--output-len",
        metavar="N",
        type=int,
        help="generated tokens per sequence, exactly (default 64, or what fits)",
    )
    p.add_argument("--batch", metavar="N", type=int, default=1, help="batch size (default 1)")
    p.add_argument(
        "--context",
        metavar="N",
        type=int,
        default=0,
        help="tokens already in the KV cache of each sequence (default 0)",
    )
    p.add_argument(
        "--peer",
        metavar="NAME",
        action="append",
        default=[],
        help="baseline in the same run: transformers as hf (eager, dynamic cache),\n"
        "hf-static (static cache) or hf-compile (and torch.compile) (repeat)",
    )
    p.add_argument("--checkpoint", metavar="DIR", help="checkpoint of the baseline")
    p.add_argument(
        "--text", metavar="FILE", help="text to take prompts from, instead of random tokens"
    )
    p.add_argument(
        "--seed", metavar="N", type=int, default=0, help="seed of the random tokens (default 0)"
    )
    p.add_argument("--rounds", metavar="N", type=int, default=5, help="measured rounds (default 5)")
    p.add_argument(
        "--warmup",
        metavar="N",
        type=int,
        default=2,
        help="warm-up requests (default 2)",
    )
    p.add_argument(
        "--json",
        metavar="FILE",
        help="write the report to FILE; `-`: to stdout",
    )
    p.add_argument("--plot", metavar="FILE", help="plot the results, .png or .svg")
    add_draft(p)
    add_load(p)


def add_bench_compare(verbs: Any) -> None:
    p = add_verb(verbs, "bench-compare", _compare, "comparison of two benchmark reports")
    p.add_argument("a", metavar="A.json", help="report of the baseline")
    p.add_argument("b", metavar="B.json", help="report to compare with it")
    p.add_argument("--all", action="store_true", help="show every statistic")
    p.add_argument(
        "--check", action="store_true", help="exit 1 if a metric differs by more than both spreads"
    )
    p.add_argument("--plot", metavar="FILE", help="plot both reports, .png or .svg")


def _bench(args: argparse.Namespace) -> int:
    _check_arguments(args)
    report = _measured(args, _planned(args))
    _write(args, report)
    return 0 if report.outputs_agree else 1


def _check_arguments(args: argparse.Namespace) -> None:
    if not 1 <= len(args.engines) <= 2:
        raise InputError(f"bench takes one engine or two, not {len(args.engines)}")
    if args.json not in (None, STDOUT) and not Path(args.json).absolute().parent.is_dir():
        raise InputError(f"--json {args.json}: no such directory")
    if args.text and not Path(args.text).is_file():
        raise InputError(f"--text {args.text}: no such file")
    if args.plot:
        from g4ir.ui.plots import check_plot

        check_plot(args.plot)
    from g4ir.bench.report import check_options

    check_draft(args)
    check_options(args.peer, args.rounds, args.warmup)


def _planned(args: argparse.Namespace) -> Workload:
    """Return the workload that the engines' manifests allow."""
    from g4ir.bench.report import check_specs
    from g4ir.bench.workload import plan_workload
    from g4ir.engine.artefact import read_manifest

    manifests = {path: read_manifest(Path(path)) for path in args.engines}
    check_specs({path: vars(m) for path, m in manifests.items()})
    return plan_workload(
        list(manifests.values()),
        args.input_len,
        args.output_len,
        args.batch,
        args.context,
        args.seed,
        args.text,
    )


def _measured(args: argparse.Namespace, workload: Workload) -> BenchReport:
    from g4ir.bench.report import run_bench

    draft = given_draft(args)["draft"]
    engines: list[Engine] = []
    seconds = []
    with console.Progress() as progress:
        try:
            for path in args.engines:
                start = time.perf_counter()
                engines.append(load(path, progress, args.cuda_graph, args.trust, args.threads))
                seconds.append(time.perf_counter() - start)
            return run_bench(
                engines,
                workload,
                peers=args.peer,
                rounds=args.rounds,
                warmup=args.warmup,
                checkpoint=args.checkpoint,
                load_s=seconds,
                progress=progress,
                draft=draft.source,
                draft_tokens=draft.tokens or None,
            )
        finally:
            for engine in engines:
                engine.close()


def _write(args: argparse.Namespace, report: BenchReport) -> None:
    from g4ir.bench.plot import plot_bench
    from g4ir.bench.schema import plain
    from g4ir.bench.text import text
    from g4ir.ui.files import write_file

    values = strict(plain(report))
    if args.json == STDOUT:
        emit(values)
    else:
        print(text(report))
    if args.json and args.json != STDOUT:
        write_file(Path(args.json), [(json.dumps(values, indent=1) + "\n").encode()])
    if args.plot:
        plot_bench(args.plot, {"": report})


def _compare(args: argparse.Namespace) -> int:
    from g4ir.bench.compare import compare_reports, compare_text
    from g4ir.bench.plot import plot_bench
    from g4ir.bench.schema import plain, read_report
    from g4ir.ui.plots import check_plot

    if args.plot:
        check_plot(args.plot)
    a, b = read_report(args.a), read_report(args.b)
    result = compare_reports(a, b, args.all)
    emit(plain(result)) if args.json else print(compare_text(result))
    if args.plot:
        plot_bench(args.plot, {"A": a, "B": b})
    return 1 if args.check and result.differ else 0
