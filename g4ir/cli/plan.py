"""`g4ir plan`: says what a variant needs and what fits, before anything is downloaded."""

from __future__ import annotations

import argparse
from dataclasses import replace

from g4ir.model.images import image_plan_text, parse_budgets, parse_sizes, plan_image
from g4ir.model.media import offered
from g4ir.plan.count import counts
from g4ir.plan.gpus import GPUS, Gpu, find_gpu
from g4ir.plan.plan import cache_lines, make_plan
from g4ir.plan.records import SCHEMA, Plan
from g4ir.plan.table import comparison_text, plan_text
from g4ir.spec.record import Spec, load_spec, spec_names
from g4ir.ui import console
from g4ir.ui.plots import check_plot, plot_caches
from g4ir.ui.units import parse_counts

from .common import given_options, given_spec, output

ALL = "all"


def plan(args: argparse.Namespace) -> int:
    """Print what variants need."""
    if args.image is not None:
        return _images(args)
    specs = _specs(args)
    gpus = _gpus(args.gpu)
    if args.plot:
        check_plot(args.plot)
    plans = [_made(spec, args, gpus, several=len(specs) > 1) for spec in specs]
    if args.plot:
        lines = [cache_lines(p) for p in plans]
        plot_caches(args.plot, lines, f"K and V caches, one row, {plans[0].dtype}")
    if len(plans) == 1:
        return output(args, plans[0].to_dict(), plan_text(plans[0], args.nominal))
    several = {"schema": SCHEMA, "plans": [p.to_dict() for p in plans]}
    return output(args, several, comparison_text(plans, args.nominal))


def _images(args: argparse.Namespace) -> int:
    sizes = parse_sizes(args.image, "--image")
    budgets = parse_budgets(args.budget, "--budget")
    several = args.spec is None and args.variant in (None, ALL)
    plans = [
        plan_image(spec, *size, budget)
        for spec in _specs(args)
        if spec.vision or not several
        for size in sizes
        for budget in budgets
    ]
    found = {"schema": SCHEMA, "images": [p.to_dict() for p in plans]}
    return output(args, found, image_plan_text(plans))


def _specs(args: argparse.Namespace) -> list[Spec]:
    if args.spec is not None and (spec := given_spec(args)):
        return [spec]
    if args.variant in (None, ALL):
        shipped = [load_spec(name) for name in spec_names()]
        return sorted((s for s in shipped if s.hub), key=lambda s: counts(s).loaded)
    return [load_spec(name) for name in dict.fromkeys(args.variant.split(","))]


def _gpus(text: str | None) -> list[Gpu]:
    if text is None:
        return []
    named = GPUS.values() if text == ALL else map(find_gpu, text.split(","))
    return list(dict.fromkeys(named))


def _made(spec: Spec, args: argparse.Namespace, gpus: list[Gpu], several: bool) -> Plan:
    """Make the plan of a variant; of several, each takes only what it has a use for."""
    from .kernels import CARDS, step_model

    longest = spec.text.max_position_embeddings
    ctx = parse_counts(args.ctx, "--ctx") if args.ctx else None
    if several and ctx:
        ctx = [c for c in ctx if c <= longest] or ctx
    options = given_options(args)
    if several:
        placement = options.ple_placement if spec.text.ple else None
        media = options.media if offered(spec) else "none"
        options = replace(options, ple_placement=placement, media=media)
    batch = parse_counts(args.batch, "--batch")
    how = {"tp": args.tp, "ep": args.ep, "steps": None if args.tp == 1 else step_model(gpus)}
    if args.tp != 1 and how["steps"] is None:
        names = ", ".join(gpu.name for gpu in gpus)
        console.say(f"note: steps are predicted for {' and '.join(CARDS)}, not for {names}")
    return make_plan(spec, options, ctx=ctx, batch=batch, memory=gpus, **how)
