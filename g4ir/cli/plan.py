"""`g4ir plan`: says what a variant needs and what fits, before anything is downloaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.backends import find_backend
from g4ir.errors import InputError
from g4ir.model.images import image_plan_text, parse_budgets, parse_sizes, plan_image
from g4ir.model.media import offered
from g4ir.passes.latent_kv import PLAIN
from g4ir.plan.count import counts
from g4ir.plan.gpus import GPUS, Gpu, find_gpu
from g4ir.plan.options import BuildOptions
from g4ir.plan.plan import cache_lines, make_plan, plan_engine
from g4ir.plan.presets import find_preset
from g4ir.plan.records import SCHEMA, Plan
from g4ir.plan.resolve import has_latent
from g4ir.plan.table import comparison_text, plan_text
from g4ir.spec.record import Spec, load_spec, spec_names
from g4ir.ui.plots import check_plot, plot_caches
from g4ir.ui.units import parse_counts

from .common import flag_of, given_options, output
from .models import Model, named_model, without_quant

if TYPE_CHECKING:
    from g4ir.artefact.directory import Artefact

ALL = "all"
#: bytes below which a size lacks its unit
LEAST = 1 << 20


def plan(args: argparse.Namespace) -> int:
    """Print what variants need."""
    models = _models(args)
    if args.image is not None:
        return _images(args, [m.spec for m in models])
    gpus = _gpus(args.gpu, args.device)
    if args.plot:
        check_plot(args.plot)
    plans = [_made(m, args, gpus, several=len(models) > 1) for m in models]
    if args.plot:
        lines = [cache_lines(p) for p in plans]
        plot_caches(args.plot, lines, f"K and V caches, one row, {plans[0].config.dtype}")
    if len(plans) == 1:
        return output(args, plans[0].to_dict(), plan_text(plans[0], args.nominal))
    several = {"schema": SCHEMA, "plans": [p.to_dict() for p in plans]}
    return output(args, several, comparison_text(plans, args.nominal))


def _images(args: argparse.Namespace, specs: Sequence[Spec]) -> int:
    sizes = parse_sizes(args.image, "--image")
    budgets = parse_budgets(args.budget, "--budget")
    plans = [
        plan_image(spec, *size, budget)
        for spec in specs
        if spec.vision or len(specs) == 1
        for size in sizes
        for budget in budgets
    ]
    found = {"schema": SCHEMA, "images": [p.to_dict() for p in plans]}
    return output(args, found, image_plan_text(plans))


def _models(args: argparse.Namespace) -> list[Model]:
    """Return what is named: by default the variants with published weights."""
    named = [("MODEL", args.models), ("--variant", args.variant), ("--spec", args.spec)]
    if len(given := [flag for flag, value in named if value]) > 1:
        raise InputError(f"give either {given[0]} or {given[1]}, not both")
    if args.spec is not None:
        return [Model(load_spec(Path(args.spec)))]
    words = args.models or (args.variant or ALL).split(",")
    if words == [ALL]:
        shipped = [load_spec(name) for name in spec_names()]
        return [Model(s) for s in sorted(shipped, key=lambda s: counts(s).loaded) if s.hub]
    found = [named_model(word) for word in dict.fromkeys(words)]
    if len(found) > 1 and (engine := next((m.engine for m in found if m.engine), None)):
        raise InputError(f"{engine.path} is an engine, with limits of its own: plan it alone")
    return found


def _gpus(text: str | None, device: str | None) -> list[Gpu]:
    if text is None:
        return []
    named = GPUS.values() if text == ALL else map(find_gpu, text.split(","))
    found = list(dict.fromkeys(named))
    if small := next((g for g in found if g.memory_bytes < LEAST), None):
        what = f"{small.memory_bytes} bytes, which hold nothing"
        raise InputError(f"--gpu {small.name}: {what}; give the unit too, such as 16GiB")
    _check_memory(found, device)
    return found


def _check_memory(gpus: Sequence[Gpu], device: str | None) -> None:
    """Raise InputError for a card where the device is the CPU."""
    if device == "cpu" and (card := next((g for g in gpus if g.name in GPUS), None)):
        why = "a GPU, and the device is the CPU"
        raise InputError(f"--gpu {card.name}: {why}; give the size of the RAM, such as 24GiB")


def _made(model: Model, args: argparse.Namespace, gpus: list[Gpu], several: bool) -> Plan:
    """Make the plan of a model; of several, each takes only what it has a use for."""
    spec, longest = model.spec, model.spec.text.max_position_embeddings
    ctx = parse_counts(args.ctx, "--ctx") if args.ctx else None
    batch = parse_counts(args.batch, "--batch") if args.batch else None
    if model.engine:
        return _of_engine(model.engine, args, ctx=ctx, batch=batch, memory=gpus)
    if several and ctx:
        ctx = [c for c in ctx if c <= longest] or ctx
    kinds = "none" if args.media is None else args.media
    kinds = model.origin.kinds(kinds, spec) if model.origin else kinds
    options = replace(given_options(args), media=kinds)
    if args.preset:
        options = without_quant(options, find_preset(args.preset), model)
        ctx = ctx or [min(args.max_seq or longest, longest)]
        batch = batch or [args.max_batch]
    if several:
        placement = options.ple_placement if spec.text.ple else None
        media = options.media if offered(spec) else "none"
        latent = options.latent_kv if has_latent(spec) else PLAIN
        options = replace(options, ple_placement=placement, media=media, latent_kv=latent)
    backend = find_backend(options.backend).aimed(options.target)
    if options.device is None and gpus and "cuda" in backend.devices:
        options = replace(options, device="cuda")
    _check_memory(gpus, options.device or backend.devices[0])
    how = {"tp": args.tp, "ep": args.ep, "held": model.held, "backend": backend}
    return make_plan(spec, options, ctx=ctx, batch=batch or 1, memory=gpus, **how)


def _of_engine(found: Artefact, args: argparse.Namespace, **sizes: Any) -> Plan:
    if given := sorted(args.given & {"preset", *(f.name for f in fields(BuildOptions))}):
        flags = ", ".join(map(flag_of, given))
        raise InputError(f"{found.path} is an engine, and has its own settings: leave out {flags}")
    return plan_engine(found.config, find_backend(found.config.backend), **sizes)
