"""`g4ir plan`: memory and speed of models, and what fits on a GPU, before any download."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from g4ir.artefact.directory import refuse_options
from g4ir.backends import find_backend
from g4ir.errors import InputError
from g4ir.plan.count import counts
from g4ir.plan.gpus import GPUS, Gpu, find_gpu, gpu_names
from g4ir.plan.options import BuildOptions
from g4ir.plan.plan import make_plan, plan_engine
from g4ir.plan.presets import find_preset
from g4ir.plan.records import SCHEMA, Plan
from g4ir.plan.table import comparison_text, plan_text
from g4ir.spec.record import load_spec, spec_names

from .common import Source, output
from .models import Model, named_model, without_quant
from .verb import ANY_MODEL, PRESET, Counts, Verb, argument, flag, flag_of, json_flag, options

ALL = "all"
#: a smaller --gpu size is refused, since its unit is probably missing
MIN_GPU_BYTES = 1 << 20


class PlanModels(Verb):
    """Print estimated memory and speed of models, and what fits on a GPU."""

    models: list[str] = argument(f"{ANY_MODEL} (default: published variants)", "MODEL", "*")
    source: Source
    ctx: Counts | None = flag("context lengths (default: 4K to 256K, if supported)", None, "4K,32K")
    batch: Counts | None = flag("batch sizes, such as 1,8 (default 1)", None, "N,..")
    gpu: str | None = flag(f"all, sizes such as 24GiB, or a GPU: {gpu_names()}", None, "G,..")
    preset: str | None = flag(PRESET, None, "NAME")
    options: BuildOptions = options(
        "backend device dtype quant kv_dtype media tp settings",
        "drafter draft_tokens prefill_chunk latent_kv quant_activations ple_placement ep skip "
        "all_logits",
        device="cuda (default with --gpu), or cpu, whose memory is the RAM",
        media="include the towers: all, or some of image,video,audio",
        tp="tensor-parallel size: memory of each of N cards",
    )
    json: bool = json_flag()

    def __call__(self) -> int:
        models, gpus = self._models(), _gpus(self.gpu)
        several = len(models) > 1
        plans = [[self._plan(m, gpu, several) for gpu in gpus] for m in models]
        first, *more = [plan for group in plans for plan in group]
        if not more:
            return output(self.json, first.to_dict(), plan_text(first))
        report = {"schema": SCHEMA, "plans": [p.to_dict() for p in (first, *more)]}
        return output(self.json, report, comparison_text(plans))

    def _models(self) -> list[Model]:
        """Return the requested models; default: all variants with published weights."""
        variant, spec = self.source.variant, self.source.spec
        named = [("MODEL", self.models), ("--variant", variant), ("--spec", spec)]
        if len(sources := [flag for flag, value in named if value]) > 1:
            raise InputError(f"give either {sources[0]} or {sources[1]}, not both")
        if spec is not None:
            return [Model(load_spec(Path(spec)))]
        words = self.models or (variant or ALL).split(",")
        if words == [ALL]:
            shipped = [load_spec(name) for name in spec_names()]
            return [Model(s) for s in sorted(shipped, key=lambda s: counts(s).loaded) if s.hub]
        models = [named_model(word) for word in dict.fromkeys(words)]
        if len(models) > 1 and (engine := next((m.engine for m in models if m.engine), None)):
            raise InputError(f"{engine.path} is an engine, with limits of its own: plan it alone")
        return models

    def _plan(self, model: Model, gpu: Gpu | None, several: bool) -> Plan:
        """Return the plan of a model on a GPU. `several`: contexts of --ctx that are longer than
        the model's are left out, unless all are."""
        ctx, batch, longest = self.ctx, self.batch, model.spec.text.max_position_embeddings
        if model.engine:
            build_options = {"preset", *(f.name for f in fields(BuildOptions))}
            refuse_options(model.engine.path, [*map(flag_of, self.explicit & build_options)])
            built = model.engine.config
            backend = find_backend(built.backend)
            return plan_engine(built, backend, ctx=ctx, batch=batch, memory=gpu)
        if several and ctx:
            ctx = [c for c in ctx if c <= longest] or ctx
        kinds: Any = self.options.media if "media" in self.explicit else "none"
        kinds = model.origin.kinds(kinds, model.spec) if model.origin else kinds
        options = replace(self.options, media=kinds)
        if self.preset:
            options = without_quant(options, find_preset(self.preset), model)
            ctx = ctx or [min(options.max_seq or longest, longest)]
            batch = batch or [options.max_batch]
        if options.device is None and gpu and "cuda" in find_backend(options.backend).devices:
            options = replace(options, device="cuda")
        return plan_model(model, options, ctx=ctx, batch=batch or 1, memory=gpu)


def plan_model(model: Model, options: BuildOptions, **sizes: Any) -> Plan:
    """Plan a model that is not built yet, as its backend would store it; sizes: see `make_plan`."""
    backend = find_backend(options.backend).aimed(options.target)
    card = sizes.get("memory")
    if (options.device or backend.devices[0]) == "cpu" and card and card.name in GPUS:
        why = "names a GPU, and the device is the CPU"
        raise InputError(f"--gpu {card.name}: {why}; give the size of the RAM, such as 24GiB")
    return make_plan(model.spec, options, stored=model.quant, backend=backend, **sizes)


def _gpus(text: str | None) -> Sequence[Gpu | None]:
    if text is None:
        return [None]
    named = GPUS.values() if text == ALL else map(find_gpu, text.split(","))
    gpus = list(dict.fromkeys(named))
    if small := next((g for g in gpus if g.memory_bytes < MIN_GPU_BYTES), None):
        reason = f"{small.memory_bytes} bytes, which hold nothing"
        raise InputError(f"--gpu {small.name}: {reason}; give the unit too, such as 16GiB")
    return gpus
