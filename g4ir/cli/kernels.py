"""`g4ir kernels` and `g4ir tune`: the GPU kernel of each node, its settings, and which are
fastest on the GPU at hand."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from g4ir.backends.cuda.kernels.base import Schedule
from g4ir.backends.cuda.schedule import Row, kernel_rows, schedule
from g4ir.backends.cuda.target import find_target
from g4ir.backends.cuda.toolkit import toolchain
from g4ir.backends.inductor.target import Target
from g4ir.errors import InputError, MissingError, check_all
from g4ir.ir.graph import Graph, Program
from g4ir.ir.rewrite import split_prologue
from g4ir.model.text import build_program
from g4ir.passes import PassOptions, run_program
from g4ir.passes.latent_kv import FORMS, LatentOptions
from g4ir.plan.cost import Step, graph_costs
from g4ir.plan.gpus import Gpu, find_gpu
from g4ir.quant.recipe import find_recipe
from g4ir.quant.rewrite import quantised
from g4ir.spec.record import Spec
from g4ir.ui import console
from g4ir.ui.table import Line, aligned
from g4ir.ui.units import count_text, parse_count, si
from g4ir.weights.pack import split_program

from .common import given_spec, output
from .cost import step_of
from .graphs import check_graph, chosen_graph, spec_of

if TYPE_CHECKING:
    from g4ir.backends.cuda.tune import Tuned

#: the GPU whose settings are shown where none is named
GPU = "h200"
#: and those that kernels are written for
CARDS = ("h100", "h200")


def kernels(args: argparse.Namespace) -> int:
    """Print the kernels of a graph for a GPU and a maximum batch size, and the bytes of weights and
    caches that a step moves: codes and scales of quantised weights."""
    check_graph(args)
    graph, spec = chosen_graph(args), spec_of(args)
    s, step, moved = _scheduled(args, graph, spec)
    found, context, nbytes = kernel_rows(s, moved), step.C + step.S, sum(moved.values())
    facts = {"phase": graph.name, "gpu": s.target.gpu, "batch": s.target.rows}
    facts |= {"starts": sum(r.starts for r in found), "context": context, "bytes": nbytes}
    text = "{phase} on {gpu}, up to {batch} rows: {starts} kernels of our own\n".format(**facts)
    text += f"weights and caches to move at {count_text(context)}: {si(nbytes, 'B')}\n"
    head = ("op", "nodes", "kernel", "shape", "bytes", "settings", "")
    rows = [_plain(r) for r in found]
    return output(args, facts | {"rows": rows}, text + aligned([head, *map(_line, found)]))


def _scheduled(
    args: argparse.Namespace, graph: Graph, spec: Spec
) -> tuple[Schedule, Step, dict[str, int]]:
    """Return the kernels of a graph, the step that the options describe, and the bytes of weights
    and caches that it moves by a node's first result."""
    step = step_of(args, spec)
    gpu = _short(find_gpu(args.gpu or GPU))
    if gpu not in CARDS:
        raise InputError(f"--gpu {args.gpu}: the kernels are for h100 and h200")
    costs = graph_costs(graph, B=step.B, S=step.S, C=step.C)
    moved = {c.node: c.cost.needed_bytes for c in costs}
    return schedule(split_prologue(graph)[1], Target("cuda", gpu, step.B)), step, moved


def _short(gpu: Gpu) -> str:
    """h200-141gb -> h200"""
    return gpu.name.partition("-")[0]


def _plain(r: Row) -> dict[str, Any]:
    row = {**asdict(r), "shape": dict(r.shape), "use": dict(r.use)}
    return row | {"bytes": row.pop("nbytes")}


def _line(r: Row) -> tuple[str, ...]:
    source = "" if not r.use else "measured" if r.measured else "estimated"
    moved = si(r.nbytes, "B") if r.nbytes else ""
    return r.op, str(r.nodes), r.kernel, _pairs(r.shape), moved, _pairs(r.use), source


def _pairs(values: Iterable[tuple[str, int]]) -> str:
    return " ".join(f"{k}={v}" for k, v in values)


def tune(args: argparse.Namespace) -> int:
    """Measure the settings of a variant's kernels, and keep the fastest."""
    rows, tokens = parse_count(args.batch, "--batch"), parse_count(args.context, "--context")
    program = _program(args, rows)
    import torch

    from g4ir.backends.cuda import tune as tuning
    from g4ir.bench.roof import Meter

    check_all(*toolchain())
    target = find_target(rows)
    if not target.gpu:
        raise MissingError(f"tune: {torch.cuda.get_device_name()}: the kernels need a Hopper GPU")
    found: list[Tuned] = []

    def keep(t: Tuned) -> None:
        found.append(t)
        if not args.dry_run:
            tuning.keep_in_table(t)

    with console.Progress() as progress, torch.no_grad():
        bandwidth = Meter("cuda", torch.bfloat16).measure().bandwidth
        tuning.tune(program, args.phase, target, tokens, bandwidth, keep, progress)
    report = tuning.report(found)
    return output(args, report, _tuned_text(report))


def _program(args: argparse.Namespace, rows: int) -> Program:
    spec = given_spec(args)
    if spec is None:
        raise InputError("tune: give --variant or --spec")
    if args.latent_kv not in FORMS:
        raise InputError(f"--latent-kv {args.latent_kv}: expected one of {', '.join(FORMS)}")
    options = PassOptions((LatentOptions(args.latent_kv),))
    plain = build_program(spec, args.all_logits, "bf16")
    plain = quantised(plain, spec, find_recipe(args.quant), "bf16")
    return split_program(run_program(plain, skip=args.skip, options=options)).program


def _tuned_text(rows: list[dict[str, Any]]) -> str:
    lines: list[Line] = [("kernel", "shape", "settings", "us", "before", "of bandwidth")]
    for r in rows:
        used = _pairs(r["shape"].items()), _pairs(r["use"].items())
        times = f"{r['us']:.1f}", f"{r['before_us']:.1f}", f"{r['share_of_bandwidth']:.0%}"
        lines.append((r["kernel"], *used, *times))
    return aligned(lines)
