"""Checks a build up to compilation, and resolves every option that is not given."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from g4ir.backends import find_backend
from g4ir.backends.base import Backend, Prepared, checked_settings
from g4ir.errors import InputError, PlanError, SpecError, check_all
from g4ir.ir.graph import Program
from g4ir.model.draft import layers_read, shipped_drafter
from g4ir.model.media import Media, find_media
from g4ir.model.names import checkpoint_name
from g4ir.model.text import has_blocks
from g4ir.ops.kv_quant import NARROW
from g4ir.ops.types import TORCH_NAMES, torch_dtype
from g4ir.passes import Acted, Dump, PassOptions
from g4ir.passes.match import OFF
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.plan_cache import RingOptions
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.plan import resolve
from g4ir.plan.engine_limits import Limits
from g4ir.plan.fit import device_memory, fitting_placement, require_fit
from g4ir.plan.formats import cache_bytes
from g4ir.plan.options import BuildOptions, Resolved
from g4ir.quant.recipe import Recipe, find_recipe
from g4ir.quant.rewrite import held_recipe
from g4ir.spec.reader import Line
from g4ir.spec.record import Spec, diff_specs
from g4ir.weights.adapter import Adapter, lies_in, with_adapters
from g4ir.weights.checkpoint import GENERATION, Checkpoint, WeightSource
from g4ir.weights.origin import Origin, existing_origin, find_origin, need_snapshot, snapshot_of
from g4ir.weights.pack import make_packing
from g4ir.weights.random import RandomCheckpoint, WithDrafter

from .artefact import LinkedWeights, MergedAdapter, MergedWeights, PackedWeights, RandomWeights
from .digests import remembered_digest
from .drafters import find_drafter
from .engine import TOKENIZER, read_tokenizer
from .load import linked_files
from .prompts import read_defaults

DEFAULTS = BuildOptions()
#: resolved options that no graph depends on
NOT_OF_GRAPHS = ("device", "limits", "ple_placement")
log = logging.getLogger(__name__)


def prepare(
    spec: Spec | None,
    options: BuildOptions = DEFAULTS,
    *,
    dry: bool = False,
    dump: Dump | None = None,
) -> Prepared:
    """Check a build as far as it goes without compiling; returns what `write_engine` needs. `dry`
    also goes without what the environment lacks, a device or weights; `dump` sees each graph after
    each pass."""
    backend = find_backend(options.backend)
    device = options.device or backend.devices[0]
    if device not in backend.devices:
        runs = ", ".join(backend.devices)
        raise InputError(f"backend {backend.name} runs on {runs}, not {device!r}")
    settings = checked_settings(backend, options.settings or {})
    _check_weights_given(spec, options)
    needs = () if dry else backend.needs(device, options.tp)
    if absent := _absent_weights(spec, options, dry):
        check_all(*needs, *absent)
    origin = _origin(spec, options)
    _check_link(options.link_weights, origin, backend)
    agreed = agreed_spec(spec, origin)
    drafter = find_drafter(agreed, options, dry)
    side = _side_files(agreed, origin) if origin else {}
    r = _resolved(agreed, options, backend, device, origin, drafter.spec if drafter else None)
    check_all(*needs)
    checkpoint = origin.open(agreed, r.media.kinds, r.dtype) if origin else None
    adapters = _adapters(options, origin)
    if checkpoint:
        checkpoint = with_adapters(checkpoint, agreed, adapters)
    r = replace(r, recipe=_recipe(r, checkpoint, origin))
    acted = Acted()
    of_graphs = {k: v for k, v in vars(r).items() if k not in NOT_OF_GRAPHS}
    stored = partial(backend.stored, device=device)
    packing = make_packing(**of_graphs, stored=stored, dump=dump, acted=acted)
    r, short = _fitted(r, options, backend, settings, packing.program, dry)
    seed = options.random_weights
    source: WeightSource = checkpoint or RandomCheckpoint(r.spec, seed or 0, torch_dtype(r.dtype))
    weights = _weights(source, options, backend.packs_weights, adapters)
    if weights is not None:
        _check_range(r, source)
    if drafter:
        source = WithDrafter(source, drafter.open(r.dtype, seed or 0))
    return Prepared(
        **vars(r),
        backend=backend,
        settings=settings,
        packing=packing,
        acted=acted,
        source=source,
        weights=weights,
        side_files=side,
        short=short,
    )


def _resolved(
    spec: Spec,
    o: BuildOptions,
    backend: Backend,
    device: str,
    origin: Origin | None,
    drafter: Spec | None,
) -> Resolved:
    dtype = _dtype(backend, o.dtype, spec)
    asked = o.media if isinstance(o.media, str) else tuple(o.media)
    kinds, extractor = (origin.kinds(asked, spec), origin.extractor()) if origin else (asked, None)
    media = find_media(spec, kinds, o.image_budgets, o.audio_seconds, extractor)
    _check_towers(spec, origin, media)
    limits = _widened(_limits(spec, o), spec, media)
    kv = resolve.find_kv_dtype(o.kv_dtype, dtype)
    form = resolve.find_latent(o.latent_kv, spec, device, dtype, limits.max_seq, kv)
    options = resolve.pass_options(
        form,
        kv,
        activations=resolve.find_activations(o.quant_activations),
        drafted=resolve.find_draft_tokens(o.draft_tokens, limits.max_seq, drafter is not None),
        keep=layers_read(spec, drafter),
        gpu_rows=backend.fused_rows(limits.max_batch, device, o.settings or {}),
        divisor=resolve.find_divisor(o.residual_scale),
    )
    _check_supported(backend, o, options, limits)
    return Resolved(
        spec=spec,
        device=device,
        dtype=dtype,
        limits=limits,
        all_logits=o.all_logits,
        skip=tuple(o.skip),
        options=options,
        ple_placement=resolve.find_placement(o.ple_placement, spec, device),
        media=media,
        recipe=find_recipe(o.quant),
        drafter=drafter,
        ranks=o.tp,
        ep=o.ep,
    )


def _check_supported(b: Backend, o: BuildOptions, options: PassOptions, limits: Limits) -> None:
    kv, count = options.of(NarrowOptions).to, options.of(RingOptions).slack
    if kv != OFF and kv not in b.kv_dtypes:
        other = " or ".join(resolve.KV_NAMES[d] for d in b.kv_dtypes) or "the dtype: leave it out"
        raise InputError(
            f"--kv-dtype {o.kv_dtype}: backend {b.name} cannot: {b.kv_reason}; it holds caches "
            f"in {other}"
        )
    if options.of(ActivationOptions).to != OFF and not b.rounds_activations:
        raise InputError(
            f"--quant-activations {o.quant_activations}: backend {b.name} does not round rows as "
            f"it runs; leave the option out"
        )
    if count and b.verifies_in_chunks and count >= limits.prefill_chunk:
        raise InputError(
            f"--draft-tokens {count}: backend {b.name} verifies {count + 1} tokens as it "
            f"reads a chunk of a prompt; give --prefill-chunk {count + 1} or more"
        )
    if o.tp != 1 and not b.shares:
        raise InputError(
            f"--tp {o.tp}: engines of backend {b.name} run as one rank; leave the option "
            f"out, or build with --backend torch"
        )


def _fitted(
    r: Resolved,
    o: BuildOptions,
    backend: Backend,
    settings: Mapping[str, str],
    program: Program,
    dry: bool,
) -> tuple[Resolved, str]:
    """Place the per-layer embedding table in the memory where it fits; return that, and why the
    engine does not fit its device: PlanError, unless it is a dry run."""
    import torch

    if o.memory is None and dry and r.device == "cuda" and not torch.cuda.is_available():
        return r, ""
    memory, limits = o.memory if o.memory is not None else device_memory(r.device), r.limits
    more = backend.cache_bytes(program, limits)
    more -= cache_bytes(program, limits.max_batch, limits.max_seq)
    scratch = backend.scratch_bytes(program, limits, r.device, settings)
    if o.ple_placement is None and r.ple_placement == "device":
        r = replace(r, ple_placement=fitting_placement(program, r, memory, more + scratch))
    try:
        require_fit(program, r, memory, more, scratch, partial(backend.stored, device=r.device))
    except PlanError as e:
        if not dry:
            raise
        return r, str(e)
    return r, ""


def _weights(
    source: WeightSource, o: BuildOptions, packs: bool, adapters: tuple[Adapter, ...]
) -> Any:
    if adapters:
        merged = (
            MergedAdapter(Line(a.path.resolve()), a.factor, remembered_digest(a.weights))
            for a in adapters
        )
        return MergedWeights(adapters=tuple(merged))
    if isinstance(source, Checkpoint) and o.link_weights:
        files = {name: remembered_digest(p) for name, p in linked_files(source).items()}
        return LinkedWeights("linked", Line(source.directory.resolve()), files)
    seed = o.random_weights
    if isinstance(source, Checkpoint) or (packs and seed is not None):
        return PackedWeights(seed=seed)
    return None if seed is None else RandomWeights("random", seed)


def _recipe(r: Resolved, opened: Checkpoint | None, origin: Origin | None) -> Recipe | None:
    """Return the quantisation config that was given, or that of a quantised checkpoint; InputError
    for both, or for quantised activations without either."""
    held = held_recipe(r.spec, opened.forms) if opened else None
    if held and r.recipe:
        raise InputError(
            f"--quant {r.recipe.name}: {origin and origin.path} is quantised already; leave "
            f"--quant out, or give the checkpoint that it was made from"
        )
    form = r.options.of(ActivationOptions).to
    if form != OFF and not (held or r.recipe):
        raise InputError(
            f"--quant-activations {form}: no weight is in codes, and only products with such "
            f"weights round what they take; give --quant int8, int4 or fp8 too"
        )
    return held or r.recipe


def _check_range(r: Resolved, source: WeightSource) -> None:
    """Warn of the layer whose K may be farthest beyond the range of a float8 cache: after a norm of
    weight w no element of d is larger than sqrt(d) * max |w|. Such elements saturate."""
    most = NARROW.get(r.options.of(NarrowOptions).to)
    if most is None:
        return
    names = [f"L{x.index}.attn.norm_k" for x in r.spec.layers() if x.donor is None]
    weights = {name: source.tensor(checkpoint_name(name)) for name in names}
    reach = {name: len(w) ** 0.5 * float(w.abs().max()) for name, w in weights.items()}
    worst = max(reach, key=reach.__getitem__)
    if reach[worst] > most:
        what = "kv-dtype float8: K may reach %.0f in %s, and numbers beyond %.0f are cut to it"
        log.warning(f"{what}; int8 has no such limit", reach[worst], worst, most)


def _check_weights_given(spec: Spec | None, o: BuildOptions) -> None:
    checkpoint, seed = o.checkpoint, o.random_weights
    if o.mmproj is not None and (checkpoint is None or spec is None):
        raise InputError(
            f"--mmproj {o.mmproj}: it goes with --checkpoint FILE.gguf and, as no file says how "
            f"towers compute, with --variant or --spec"
        )
    if o.mmproj is not None and o.link_weights:
        raise InputError("--link-weights refers to one checkpoint, and --mmproj is another")
    if checkpoint is not None and seed is not None:
        raise InputError("give either a checkpoint or --random-weights, not both")
    if seed is not None and not 0 <= seed < 1 << 63:
        raise InputError(f"--random-weights {seed}: expected a seed from 0 to 2^63 - 1")
    if spec is None and checkpoint is None and seed is None:
        raise InputError("give a variant, a spec or a checkpoint")


def _absent_weights(spec: Spec | None, o: BuildOptions, dry: bool) -> list[Callable[[], object]]:
    """Return checks for weights that are to come from the local hub cache and are not there."""
    if dry or spec is None or o.random_weights is not None:
        return []
    found = [partial(need_snapshot, spec)] if o.checkpoint is None else []
    if o.drafter == resolve.DEFAULT:
        found.append(partial(need_snapshot, shipped_drafter(spec), "--drafter"))
    return [check for check in found if snapshot_of(*check.args[:1]) is None]


def _origin(spec: Spec | None, o: BuildOptions) -> Origin | None:
    """Return the checkpoint; None for random weights, and in a dry run that has none."""
    if o.random_weights is not None:
        return None
    if o.checkpoint is not None:
        return existing_origin(o.checkpoint, o.mmproj)
    found = snapshot_of(spec) if spec else None
    return find_origin(found) if found else None


def _adapters(o: BuildOptions, origin: Origin | None) -> tuple[Adapter, ...]:
    """Return the adapters to merge; InputError if there is nothing to merge them into. Warns of one
    in the checkpoint's directory that is not merged."""
    given = (o.adapter,) if isinstance(o.adapter, str | Path) else o.adapter
    adapters = tuple(map(Adapter.of, given))
    if adapters and o.random_weights is not None:
        raise InputError("--adapter goes with a checkpoint, and not with --random-weights")
    if adapters and o.link_weights:
        raise InputError("--link-weights refers to the checkpoint's files, which --adapter changes")
    folder = origin.path if origin and origin.path.is_dir() else None
    beside = lies_in(folder) if folder else None
    if beside and folder not in [a.path for a in adapters]:
        what = "%s: holds a LoRA adapter (%s), which is not merged; give --adapter %s to merge it"
        log.warning(what, folder, beside, folder)
    return adapters


def _check_link(link: bool, origin: Origin | None, backend: Backend) -> None:
    if link and origin is None:
        raise InputError("--link-weights refers to a checkpoint's files; random weights have none")
    if link and backend.packs_weights:
        raise InputError(
            f"--link-weights: what backend {backend.name} writes refers to packed weights; leave "
            f"the option out"
        )


def _side_files(spec: Spec, origin: Origin) -> dict[str, bytes]:
    """Return a checkpoint's side files by name; an error if one cannot be read later."""
    side = origin.side_files()
    if TOKENIZER in side:
        read_tokenizer(origin.path / TOKENIZER, side[TOKENIZER])
    if GENERATION in side:
        read_defaults(origin.path / GENERATION, spec.text.vocab_size, side[GENERATION])
    return side


def _dtype(backend: Backend, given: str | None, spec: Spec) -> str:
    kind = resolve.find_dtype(given or spec.dtype)
    if kind in backend.dtypes:
        return kind
    if given is None:
        return backend.dtypes[0]
    can = ", ".join(TORCH_NAMES[d] for d in backend.dtypes)
    raise InputError(f"--dtype {given}: backend {backend.name} computes in {can}")


#: kind of media -> keys of a spec that its soft tokens follow from
OF_MEDIA = {
    "image": ("vision.", "tokens.image", "tokens.boi", "tokens.eoi", "tokens.pad"),
    "video": ("vision.", "tokens.video", "tokens.boi", "tokens.eoi", "tokens.pad"),
    "audio": ("audio.", "tokens.audio", "tokens.boa", "tokens.eoa", "tokens.pad"),
}


def _check_towers(spec: Spec, origin: Origin | None, media: Media) -> None:
    """Raise SpecError if a checkpoint's config.json disagrees on the media that are taken."""
    if origin is None or not media.kinds or not origin.says_towers:
        return
    keys = tuple(key for kind in media.kinds for key in OF_MEDIA[kind])
    rows = [r for r in diff_specs(spec, origin.spec()) if r[0].startswith(keys)]
    _refuse_differences(spec, origin, rows)


#: fields of the text model that only images use
OF_PICTURES = ("text.use_bidirectional_attention",)


def agreed_spec(spec: Spec | None, origin: Origin | None, pictures: bool = True) -> Spec:
    """Return the spec, after comparing its text part with what the checkpoint says; fields of
    images alone only with `pictures`."""
    if origin is None:
        if spec is None:
            raise InputError("--random-weights needs --variant or --spec")
        return spec
    found = origin.spec()
    if spec is None:
        return found
    free = (*origin.spec_only, *(() if pictures else OF_PICTURES))
    text = [r for r in diff_specs(spec, found) if r[0].startswith("text.") and r[0] not in free]
    _refuse_differences(spec, origin, text)
    return spec


def _refuse_differences(spec: Spec, origin: Origin, rows: list[tuple[str, Any, Any]]) -> None:
    if rows:
        lines = "\n".join(f"  {key}: spec {a!r}, checkpoint {b!r}" for key, a, b in rows)
        raise SpecError(
            f"spec {spec.name} and {origin.stated} differ; leave out the variant to "
            f"build what the checkpoint says, or correct one of them:\n{lines}"
        )


def _limits(spec: Spec, o: BuildOptions) -> Limits:
    longest = spec.text.max_position_embeddings
    for name in ("max_batch", "max_seq", "prefill_chunk"):
        value = getattr(o, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: expected at least 1")
    if o.max_seq is not None and o.max_seq > longest:
        raise InputError(f"--max-seq {o.max_seq}: {spec.name} has {longest} positions")
    seq = min(Limits.max_seq, longest) if o.max_seq is None else o.max_seq
    return Limits(o.max_batch, seq, min(o.prefill_chunk, seq))


def _widened(limits: Limits, spec: Spec, media: Media) -> Limits:
    """Widen the prefill chunk to the largest image whose tokens see each other, which is never cut
    (media/merge.py). Warns if the user gave a smaller one, and of images longer than max_seq."""
    largest = max(media.grids, default=0)
    if largest > limits.max_seq:
        what = "max-seq %d: an image of %d soft tokens, as built for, does not fit"
        log.warning(what, limits.max_seq, largest)
    chunk = min(largest, limits.max_seq)
    if not has_blocks(spec) or limits.prefill_chunk >= chunk:
        return limits
    what = "prefill-chunk %d is raised to %d: an image's tokens are computed together"
    log.warning(what, limits.prefill_chunk, chunk)
    return replace(limits, prefill_chunk=chunk)
