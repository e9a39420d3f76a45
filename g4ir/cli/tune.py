"""`g4ir tune`: find the fastest settings of a variant's kernels on the GPU at hand."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError, MissingError, check_all
from g4ir.model.text import TEXT_GRAPHS
from g4ir.ui import console
from g4ir.ui.units import parse_count

from .common import PASS_OPTIONS, add_options, add_source, add_verb, emit, given_spec

if TYPE_CHECKING:
    from g4ir.backends.torch_compile.tune import Tuned
    from g4ir.ir.graph import Program


def add_tune(verbs: Any) -> None:
    p = add_verb(verbs, "tune", _tune, "autotuning of a variant's kernels on this GPU")
    add_source(p)
    add_options(p, ("quant",))
    p.add_argument(
        "--phase", choices=TEXT_GRAPHS, default="decode", help="phase to tune (default decode)"
    )
    p.add_argument("--batch", metavar="N", default="1", help="maximum batch size (default 1)")
    p.add_argument(
        "--context", metavar="N", default="4K", help="tokens in the KV cache (default 4K)"
    )
    p.add_argument(
        "--latent-kv",
        metavar="FORM",
        default="off",
        help="latent KV cache of layers with K=V: off (default), value or raw",
    )
    p.add_argument("--dry-run", action="store_true", help="do not write the tuning table")
    add_options(p, PASS_OPTIONS)


def _tune(args: argparse.Namespace) -> int:
    rows, tokens = parse_count(args.batch, "--batch"), parse_count(args.context, "--context")
    program = _program(args, rows)
    import torch

    from g4ir.backends.torch_compile.compile import toolchain
    from g4ir.backends.torch_compile.target import find_target
    from g4ir.backends.torch_compile.tune import keep_in_table, report, tune
    from g4ir.bench.roof import Meter

    check_all(*toolchain("cuda"))
    target = find_target("cuda", rows)
    if not target.gpu:
        raise MissingError(f"tune: {torch.cuda.get_device_name()}: the kernels need a Hopper GPU")
    found: list[Tuned] = []

    def keep(t: Tuned) -> None:
        found.append(t)
        if not args.dry_run:
            keep_in_table(t)

    with console.Progress() as progress, torch.no_grad():
        bandwidth = Meter("cuda", torch.bfloat16).measure().bandwidth
        tune(program, args.phase, target, tokens, bandwidth, keep, progress)
    rows_of_table = report(found)
    emit(rows_of_table) if args.json else _print(rows_of_table)
    return 0


def _program(args: argparse.Namespace, rows: int) -> Program:
    from g4ir.model.text import build_program
    from g4ir.passes import PassOptions, run_program
    from g4ir.passes.latent_kv import FORMS, LatentOptions
    from g4ir.quant.recipe import find_recipe
    from g4ir.quant.rewrite import quantised
    from g4ir.weights.pack import split_program

    spec = given_spec(args)
    if spec is None:
        raise InputError("tune: give --variant or --spec")
    if args.latent_kv not in FORMS:
        raise InputError(f"--latent-kv {args.latent_kv}: expected one of {', '.join(FORMS)}")
    options = PassOptions((LatentOptions(args.latent_kv),), gpu_rows=rows)
    plain = build_program(spec, args.all_logits, "bf16")
    plain = quantised(plain, spec, find_recipe(args.quant), "bf16")
    return split_program(run_program(plain, skip=args.skip, options=options)).program


def _print(rows: list[dict[str, Any]]) -> None:
    from g4ir.ui.table import aligned

    head = ("kernel", "shape", "settings", "us", "before", "of bandwidth")
    lines = [
        (
            r["kernel"],
            _pairs(r["shape"]),
            _pairs(r["use"]),
            f"{r['us']:.1f}",
            f"{r['before_us']:.1f}",
            f"{r['share_of_bandwidth']:.0%}",
        )
        for r in rows
    ]
    print(aligned([head, *lines]), end="")


def _pairs(values: dict[str, int]) -> str:
    return " ".join(f"{k}={v}" for k, v in values.items())
