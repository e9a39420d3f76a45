"""`g4ir plan`: says what a variant needs and what fits, before anything is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

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

from .common import Source, output
from .models import Model, named_model, without_quant
from .verb import Counts, Verb, argument, flag_of, options

ALL = "all"
#: bytes below which a size lacks its unit
LEAST = 1 << 20


class PlanModels(Verb):
    """Print what variants need.

    models MODEL: {described};
        several are compared (default: all variants with published weights)
    preset NAME: options of a build by name, the backend among them (see `g4ir presets`); flags win:
        {presets}
    ctx N,..: context lengths, such as 4K,32K (default: up
        to the model's limit)
    batch N,..: batch sizes, such as 1,8 (default 1; of an engine: its limit)
    gpu G,..: all, sizes such as 24GiB (with --device cpu: of the RAM), or a GPU:
        {gpus}
    device D: device of the engine: cuda (default with --gpu), or cpu, whose memory is the RAM
        (default: as of `g4ir build`)
    media KINDS: include the towers: all, or some of image,video,audio
    tp N: number of cards that share the model: memory of each, and collectives
    nominal: also show the usual estimate: bytes x the quoted count
    plot FILE: plot KV cache size over context length, PNG or SVG
    image WxH,..: only: resized size, patches and soft tokens of
        images of these sizes in pixels
    budget N,..: maximum soft tokens per image: 70, 140,
        280, 560 or 1120 (default: the variant's own)
    """

    json: bool = False
    models: list[str] = argument("*")
    source: Source
    preset: str | None = None
    ctx: Counts | None = None
    batch: Counts | None = None
    gpu: str | None = None
    options: BuildOptions = options(
        "backend device dtype quant kv_dtype prefill_chunk drafter draft_tokens latent_kv "
        "ple_placement media tp ep settings skip all_logits"
    )
    nominal: bool = False
    plot: str | None = None
    image: str | None = None
    budget: str | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.image is None:
            raise InputError("--budget is of images: give their sizes with --image WxH")

    def __call__(self) -> int:
        models = self._models()
        if self.image is not None:
            return self._images(self.image, [m.spec for m in models])
        gpus = _gpus(self.gpu)
        _check_memory(gpus, self.options.device)
        if self.plot:
            check_plot(self.plot)
        plans = [self._plan(m, gpus, several=len(models) > 1) for m in models]
        if self.plot:
            lines = [cache_lines(p) for p in plans]
            plot_caches(self.plot, lines, f"K and V caches, one row, {plans[0].config.dtype}")
        if len(plans) == 1:
            return output(self.json, plans[0].to_dict(), plan_text(plans[0], self.nominal))
        several = {"schema": SCHEMA, "plans": [p.to_dict() for p in plans]}
        return output(self.json, several, comparison_text(plans, self.nominal))

    def _images(self, sizes: str, specs: Sequence[Spec]) -> int:
        plans = [
            plan_image(spec, *size, budget)
            for spec in specs
            if spec.vision or len(specs) == 1
            for size in parse_sizes(sizes, "--image")
            for budget in parse_budgets(self.budget, "--budget")
        ]
        found = {"schema": SCHEMA, "images": [p.to_dict() for p in plans]}
        return output(self.json, found, image_plan_text(plans))

    def _models(self) -> list[Model]:
        """Return what is named: by default the variants with published weights."""
        variant, spec = self.source.variant, self.source.spec
        named = [("MODEL", self.models), ("--variant", variant), ("--spec", spec)]
        if len(given := [flag for flag, value in named if value]) > 1:
            raise InputError(f"give either {given[0]} or {given[1]}, not both")
        if spec is not None:
            return [Model(load_spec(Path(spec)))]
        words = self.models or (variant or ALL).split(",")
        if words == [ALL]:
            shipped = [load_spec(name) for name in spec_names()]
            return [Model(s) for s in sorted(shipped, key=lambda s: counts(s).loaded) if s.hub]
        found = [named_model(word) for word in dict.fromkeys(words)]
        if len(found) > 1 and (engine := next((m.engine for m in found if m.engine), None)):
            raise InputError(f"{engine.path} is an engine, with limits of its own: plan it alone")
        return found

    def _plan(self, model: Model, gpus: list[Gpu], several: bool) -> Plan:
        """Make the plan of a model; of several, each takes only what it has a use for."""
        spec, longest = model.spec, model.spec.text.max_position_embeddings
        ctx, batch = self.ctx, self.batch
        if model.engine:
            if given := sorted(self.given & {"preset", *(f.name for f in fields(BuildOptions))}):
                flags, path = ", ".join(map(flag_of, given)), model.engine.path
                what = f"{path} is an engine, and has its own settings"
                raise InputError(f"{what}: leave out {flags}")
            built = model.engine.config
            return plan_engine(
                built, find_backend(built.backend), ctx=ctx, batch=batch, memory=gpus
            )
        if several and ctx:
            ctx = [c for c in ctx if c <= longest] or ctx
        kinds: Any = self.options.media if "media" in self.given else "none"
        kinds = model.origin.kinds(kinds, spec) if model.origin else kinds
        options = replace(self.options, media=kinds)
        if self.preset:
            options = without_quant(options, find_preset(self.preset), model)
            ctx = ctx or [min(options.max_seq or longest, longest)]
            batch = batch or [options.max_batch]
        if several:
            placement = options.ple_placement if spec.text.ple else None
            media = options.media if offered(spec) else "none"
            latent = options.latent_kv if has_latent(spec) else PLAIN
            options = replace(options, ple_placement=placement, media=media, latent_kv=latent)
        backend = find_backend(options.backend).aimed(options.target)
        if options.device is None and gpus and "cuda" in backend.devices:
            options = replace(options, device="cuda")
        _check_memory(gpus, options.device or backend.devices[0])
        return make_plan(
            spec,
            options,
            ctx=ctx,
            batch=batch or 1,
            memory=gpus,
            tp=options.tp,
            ep=options.ep,
            held=model.held,
            backend=backend,
        )


def _gpus(text: str | None) -> list[Gpu]:
    if text is None:
        return []
    named = GPUS.values() if text == ALL else map(find_gpu, text.split(","))
    found = list(dict.fromkeys(named))
    if small := next((g for g in found if g.memory_bytes < LEAST), None):
        what = f"{small.memory_bytes} bytes, which hold nothing"
        raise InputError(f"--gpu {small.name}: {what}; give the unit too, such as 16GiB")
    return found


def _check_memory(gpus: Sequence[Gpu], device: str | None) -> None:
    """Raise InputError for a card where the device is the CPU."""
    if device == "cpu" and (card := next((g for g in gpus if g.name in GPUS), None)):
        why = "a GPU, and the device is the CPU"
        raise InputError(f"--gpu {card.name}: {why}; give the size of the RAM, such as 24GiB")
