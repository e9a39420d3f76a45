"""Builds an engine directory (artefact.py says what lies in one).

It is written under a temporary name and renamed at the end; the manifest is the last file, so
that a build killed at any moment leaves nothing that loads.
"""

from __future__ import annotations

import inspect
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from g4ir import __version__
from g4ir.backends import find_backend
from g4ir.backends.base import Backend, Prepared, Task, checked_settings
from g4ir.errors import EngineError, InputError, PlanError, SpecError, check_all
from g4ir.ir.graph import Program
from g4ir.model.draft import layers_read, shipped_drafter
from g4ir.model.media import Media, find_media
from g4ir.model.names import checkpoint_name
from g4ir.model.text import has_blocks
from g4ir.ops.finite import TOO_LARGE
from g4ir.ops.kv_quant import NARROW
from g4ir.ops.types import TORCH_NAMES, torch_dtype
from g4ir.passes import Acted, Dump
from g4ir.passes.match import OFF
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.plan.engine_limits import Limits
from g4ir.plan.fit import device_memory, fitting_placement, require_fit
from g4ir.plan.formats import cache_bytes
from g4ir.plan.options import BuildOptions, Resolved, options_text
from g4ir.plan.resolve import (
    DEFAULT,
    KV_NAMES,
    find_activations,
    find_divisor,
    find_draft_tokens,
    find_dtype,
    find_kv_dtype,
    find_latent,
    find_placement,
    pass_options,
)
from g4ir.quant.recipe import Recipe, find_recipe
from g4ir.quant.rewrite import held_recipe
from g4ir.spec.reader import Line, on_one_line
from g4ir.spec.record import Spec, diff_specs, load_spec
from g4ir.ui.files import new_folder, write_file
from g4ir.ui.progress import Progress, no_progress, prefixed
from g4ir.ui.units import size_text
from g4ir.weights import pack as packings
from g4ir.weights.adapter import Adapter, lies_in, with_adapters
from g4ir.weights.checkpoint import (
    GENERATION,
    Checkpoint,
    WeightSource,
    sha256,
)
from g4ir.weights.drafter import WithDrafter
from g4ir.weights.hub import need_snapshot, snapshot_of
from g4ir.weights.origin import Origin, existing_origin, find_origin
from g4ir.weights.pack import make_packing
from g4ir.weights.random import RandomCheckpoint

from .artefact import (
    BUILDING,
    DRAFTER,
    MANIFEST,
    SPEC,
    WEIGHT_FILES,
    Grid,
    LinkedWeights,
    Manifest,
    MergedAdapter,
    MergedWeights,
    Notes,
    PackedWeights,
    RandomWeights,
    StoredFile,
    Versions,
    graph_texts,
    require_readable,
)
from .digests import remembered_digest
from .drafters import find_drafter
from .engine import TOKENIZER, Engine, read_tokenizer
from .float16_trial import try_float16, why_untried
from .load import described, linked_files, load_engine
from .prompts import read_defaults
from .trust import record_built

#: room for what an engine directory holds beside weights
OTHER_BYTES = 64 << 20

DEFAULTS = BuildOptions()
F = TypeVar("F", bound=Callable[..., Any])
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
    device = _device(backend, options.device)
    settings = checked_settings(backend, options.settings or {})
    _check_weights_given(spec, options)
    needs = () if dry else backend.needs(device, options.tp)
    if absent := _absent_weights(spec, options, dry):
        check_all(*needs, *absent)
    origin = _origin(spec, options, dry)
    _check_link(options.link_weights, origin, backend)
    agreed = agreed_spec(spec, origin)
    drafter = find_drafter(agreed, options, dry)
    side = _side_files(agreed, origin) if origin else {}
    resolved = _resolved(
        agreed, options, backend, device, origin, drafter.spec if drafter else None
    )
    check_all(*needs)
    checkpoint = origin.open(agreed, resolved.media.kinds, resolved.dtype) if origin else None
    adapters = _adapters(options, origin)
    if checkpoint:
        checkpoint = with_adapters(checkpoint, agreed, adapters)
    r = resolved = replace(resolved, recipe=_recipe(resolved, checkpoint, origin))
    _check_activations(resolved)
    stored, acted = partial(backend.stored, device=device), Acted()
    packing = make_packing(
        spec=r.spec,
        all_logits=r.all_logits,
        dtype=r.dtype,
        media=r.media,
        skip=r.skip,
        options=r.options,
        recipe=r.recipe,
        stored=stored,
        dump=dump,
        acted=acted,
        drafter=r.drafter,
        ranks=r.ranks,
        ep=r.ep,
    )
    resolved, short = _fitted(resolved, options, backend, settings, packing.program, dry)
    source = checkpoint or _random(resolved, options)
    weights = _kept(source, options, backend.packs_weights, adapters)
    if weights is not None:
        _check_range(resolved, source)
    if drafter:
        source = WithDrafter(source, drafter.open(resolved.dtype, options.random_weights or 0))
    return Prepared(
        **vars(resolved),
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
    """Return every option that follows from spec, backend and checkpoint."""
    dtype = _dtype(backend, o.dtype, spec)
    asked = o.media if isinstance(o.media, str) else tuple(o.media)
    kinds, extractor = (origin.kinds(asked, spec), origin.extractor()) if origin else (asked, None)
    media = find_media(spec, kinds, o.image_budgets, o.audio_seconds, extractor)
    _check_towers(spec, origin, media)
    limits = _widened(_limits(spec, o), spec, media)
    kv = _kv_dtype(backend, o.kv_dtype, dtype)
    form = find_latent(o.latent_kv, spec, device, dtype, limits.max_seq, kv)
    options = pass_options(
        form,
        kv,
        activations=_activations(backend, o.quant_activations),
        drafted=_draft_tokens(backend, o.draft_tokens, limits, drafter),
        keep=layers_read(spec, drafter),
        gpu_rows=backend.fused_rows(limits.max_batch, device, o.settings or {}),
        divisor=find_divisor(o.residual_scale),
    )
    return Resolved(
        spec=spec,
        device=device,
        dtype=dtype,
        limits=limits,
        all_logits=o.all_logits,
        skip=tuple(o.skip),
        options=options,
        ple_placement=find_placement(o.ple_placement, spec, device),
        media=media,
        recipe=find_recipe(o.quant),
        drafter=drafter,
        ranks=_ranks(backend, o.tp),
        ep=o.ep,
    )


def _fitted(
    r: Resolved,
    o: BuildOptions,
    backend: Backend,
    settings: Mapping[str, str],
    program: Program,
    dry: bool,
) -> tuple[Resolved, str]:
    """Place the table of per-layer embeddings where it fits; return that, and why the engine does
    not fit its device. Only a dry run may go on then: PlanError otherwise."""
    memory = o.memory if o.memory is not None else _memory(r.device, dry)
    if memory is None:
        return r, ""
    limits = r.limits
    more = backend.cache_bytes(program, limits)
    more -= cache_bytes(program, limits.max_batch, limits.max_seq)
    scratch = backend.scratch_bytes(program, limits, r.device, settings)
    if o.ple_placement is None and r.ple_placement == "device":
        r = replace(r, ple_placement=fitting_placement(program, r, memory, more + scratch))
    try:
        stored = partial(backend.stored, device=r.device)
        require_fit(program, r, memory, more, scratch, stored)
    except PlanError as e:
        if not dry:
            raise
        return r, str(e)
    return r, ""


def _random(r: Resolved, o: BuildOptions) -> WeightSource:
    return RandomCheckpoint(r.spec, o.random_weights or 0, torch_dtype(r.dtype))


def _kept(source: WeightSource, o: BuildOptions, packs: bool, adapters: Sequence[Adapter]) -> Any:
    """Return what the manifest says of the weights; `packs`: random ones are written too."""
    if adapters:
        return MergedWeights(
            "merged",
            adapters=tuple(
                MergedAdapter(Line(a.path.resolve()), a.factor, remembered_digest(a.weights))
                for a in adapters
            ),
        )
    if isinstance(source, Checkpoint):
        return _linked(source) if o.link_weights else PackedWeights("packed")
    if o.random_weights is None:
        return None
    seed = o.random_weights
    return PackedWeights("packed", seed) if packs else RandomWeights("random", seed)


def _recipe(r: Resolved, opened: Checkpoint | None, origin: Origin | None) -> Recipe | None:
    """Return the recipe that was given, or that of a checkpoint in codes; InputError for both."""
    held = held_recipe(r.spec, opened.forms) if opened else None
    if held and r.recipe:
        raise InputError(
            f"--quant {r.recipe.name}: {origin and origin.path} is quantised already; leave "
            f"--quant out, or give the checkpoint that it was made from"
        )
    return held or r.recipe


def _check_range(r: Resolved, source: WeightSource) -> None:
    """Warn of the layer whose K may be farthest beyond the range of a narrowed cache: behind a norm
    of weight w no number of d is larger than sqrt(d) * max |w|. Such numbers saturate."""
    most = NARROW.get(r.options.of(NarrowOptions).to)
    if most is None:
        return
    names = [f"L{x.index}.attn.norm_k" for x in r.spec.layers() if x.donor is None]
    weights = {name: source.tensor(checkpoint_name(name)) for name in names}
    reach = {name: len(w) ** 0.5 * float(w.abs().max()) for name, w in weights.items()}
    worst = max(reach, key=reach.__getitem__)
    if reach[worst] > most:
        log.warning(
            "kv-dtype float8: K may reach %.0f in %s, and numbers beyond %.0f are cut to it; int8 "
            "has no such limit",
            reach[worst],
            worst,
            most,
        )


def _shows_options(function: F) -> F:
    """Show in a function's signature and docstring the names, types, defaults and help of the
    BuildOptions that it makes of its `**options`, for help() and editors."""
    own = inspect.signature(function)
    kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    given = inspect.signature(BuildOptions).parameters.values()
    options = [p.replace(kind=p.KEYWORD_ONLY) for p in given]
    vars(function)["__signature__"] = own.replace(parameters=[*kept, *options])
    function.__doc__ = (function.__doc__ or "").format(options=options_text().strip())
    return function


@_shows_options
def build(
    spec: Spec | str | Path | None,
    out: str | Path,
    *,
    progress: Progress = no_progress,
    **options: Any,
) -> Engine:
    """Build an engine directory, load it, and return the engine; one of several ranks only tells
    what it is, since several processes load it together.

    spec: a Spec, a name, a path, or None to take it from the checkpoint. Options:

    {options}

    A build that would need more than `memory` bytes of its device is refused before anything is
    loaded. Raises a G4Error for anything wrong, before anything is left at `out`.
    """
    if isinstance(spec, str | Path):
        spec = load_spec(spec)
    out = Path(out)
    check_absent(out)
    prepared = prepare(spec, BuildOptions(**options))
    written = write_engine(prepared, out, progress)
    prepared.source.close()
    if prepared.ranks > 1:
        return described(out)
    # Where it is kept what was built, something else that lies there by now is not believed.
    return load_engine(out, trust=not written.known, progress=progress)


def check_absent(out: Path) -> None:
    """Raise EngineError where something is at the output path."""
    if out.exists() or out.is_symlink():
        raise EngineError(f"{out} exists; remove it or choose another --out")


@dataclass(frozen=True)
class Written:
    """Facts of a build: seconds that compiling took, and whether it could be kept that this user
    built the engine, which the manifest does not say, as that is the same for equal builds; how
    4-bit codes fit the weights."""

    compile_s: float
    known: bool
    grid: Grid | None


def write_engine(p: Prepared, out: Path, progress: Progress) -> Written:
    """Write the directory under a temporary name, then rename it; returns what the manifest does
    not say."""
    check_absent(out)
    check_space(p, out)
    for graph in ("prefill", "decode"):
        progress(f"passes of {graph}: {p.acted.text(graph) or 'none acted'}")
    with _new_directory(out) as folder:
        untried = why_untried(p)
        tries = p.dtype == "f16" and untried is None
        packed = p.backend.packs_weights or (tries and isinstance(p.weights, PackedWeights))
        grid = _pack(p, folder, progress) if packed else None
        if tries:
            progress("trying float16 on a text")
            try_float16(p, folder, _params_of(p, folder), _manifest(p))
        elif untried:
            log.warning("%s, and no text was tried: %s", TOO_LARGE, untried)
        start = time.perf_counter()
        params, told = _params_of(p, folder), prefixed(progress, "build")
        task = Task(p.packing.program, p.limits, p.device, folder, params, told)
        compiled = p.backend.compile(task, p.settings)
        seconds = time.perf_counter() - start
        # After compiling where that needs none of them: it fails sooner.
        if isinstance(p.weights, PackedWeights) and not packed:
            grid = _pack(p, folder, progress)
        for name, text in graph_texts(p.packing).items():
            _write_text(folder / name, text)
        _write_text(folder / SPEC, p.spec.to_yaml())
        if p.drafter:
            _write_text(folder / DRAFTER, p.drafter.to_yaml())
        for name, raw in p.side_files.items():
            write_file(folder / name, [raw])
        manifest = _manifest(p, compiled, grid, _stored_files(folder))
        require_readable(manifest)
        _write_text(folder / MANIFEST, manifest.text())
    return Written(seconds, record_built(manifest, out), grid)


def _pack(p: Prepared, folder: Path, progress: Progress) -> Grid | None:
    """Write the params; return how 4-bit codes fit the weights, where any were made."""
    grids: dict[str, tuple[int, int]] = {}
    params = packings.MadeParams(p.packing, p.source, grids, p.share(0))
    packings.write_shares(p.packing, params, p.ranks, folder, progress)
    exact, groups = (sum(n) for n in zip(*grids.values(), strict=True)) if grids else (0, 0)
    return Grid(groups, exact) if groups else None


def _params_of(p: Prepared, folder: Path) -> packings.ParamSource:
    """Return the params as they will be found at load."""
    files = packings.rank_files(folder.glob("*.safetensors"), 0)
    made = packings.MadeParams(p.packing, p.source, share=p.share(0))
    return packings.StoredParams.open(files) if files else made


def _stored_files(folder: Path) -> dict[str, StoredFile]:
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return {
        f.relative_to(folder).as_posix(): StoredFile(_digest(f), f.stat().st_size) for f in files
    }


def _manifest(
    p: Prepared,
    compiled: Mapping[str, Any] = MappingProxyType({}),
    grid: Grid | None = None,
    files: Mapping[str, StoredFile] = MappingProxyType({}),
) -> Manifest:
    """Return the manifest; what is known before compiling with `p` alone."""
    import torch

    return Manifest(
        g4ir=__version__,
        variant=p.spec.name,
        spec_digest=p.spec.digest(),
        drafter_digest=p.drafter.digest() if p.drafter else None,
        backend=p.backend.name,
        device=p.device,
        machine=Line(p.backend.machine(p.device)),
        dtype=p.dtype,
        ranks=p.ranks,
        ep=p.ep,
        limits=p.limits,
        all_logits=p.all_logits,
        skipped_passes=p.skip,
        options=p.options,
        settings=dict(p.settings),
        ple_placement=p.ple_placement,
        media=p.media,
        quant=p.recipe,
        graphs=tuple(p.packing.program.graphs),
        weights=p.weights,
        compiled=dict(compiled),
        versions=Versions(torch.__version__, platform.python_version()),
        notes=Notes(
            {on_one_line(k): Line(v) for k, v in p.source.ignored.items()},
            {Line(k): f"{v:g}" for k, v in p.source.defaults.items()},
            grid,
        ),
        files=dict(files),
    )


def _digest(file: Path) -> str:
    return (remembered_digest if file.name.endswith(WEIGHT_FILES) else sha256)(file)


def _linked(source: Checkpoint) -> LinkedWeights:
    files = {name: remembered_digest(p) for name, p in linked_files(source).items()}
    return LinkedWeights("linked", Line(source.directory.resolve()), files)


def _check_weights_given(spec: Spec | None, o: BuildOptions) -> None:
    """Raise InputError if the options about weights contradict each other, or there are none."""
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
    if o.drafter == DEFAULT:
        found.append(partial(need_snapshot, shipped_drafter(spec), "--drafter"))
    return [check for check in found if snapshot_of(*check.args[:1]) is None]


def _origin(spec: Spec | None, o: BuildOptions, dry: bool) -> Origin | None:
    """Return the checkpoint, or None for random weights, or where a dry run has none."""
    if o.random_weights is not None:
        return None
    if o.checkpoint is not None:
        return existing_origin(o.checkpoint, o.mmproj)
    found = snapshot_of(spec) if spec else None
    return find_origin(found) if found else None


def _adapters(o: BuildOptions, origin: Origin | None) -> tuple[Adapter, ...]:
    """Return the adapters to merge; InputError where there is nothing to merge them into. Warns of
    one beside the checkpoint that is not merged."""
    given = (o.adapter,) if isinstance(o.adapter, str | Path) else o.adapter
    adapters = tuple(map(Adapter.of, given))
    if adapters and o.random_weights is not None:
        raise InputError("--adapter goes with a checkpoint, and not with --random-weights")
    if adapters and o.link_weights:
        raise InputError("--link-weights refers to the checkpoint's files, which --adapter changes")
    folder = origin.path if origin and origin.path.is_dir() else None
    beside = lies_in(folder) if folder else None
    if beside and folder not in [a.path for a in adapters]:
        log.warning(
            "%s: holds a LoRA adapter (%s), which is not merged; give --adapter %s to merge it",
            folder,
            beside,
            folder,
        )
    return adapters


def _check_link(link: bool, origin: Origin | None, backend: Backend) -> None:
    """Raise InputError where there is nothing to link to, or it could not be used."""
    if link and origin is None:
        raise InputError("--link-weights refers to a checkpoint's files; random weights have none")
    if link and backend.packs_weights:
        raise InputError(
            f"--link-weights: what backend {backend.name} writes refers to packed weights; leave "
            f"the option out"
        )


def _side_files(spec: Spec, origin: Origin) -> dict[str, bytes]:
    """Return a checkpoint's side files by name; those that are used later can be read."""
    side = origin.side_files()
    if TOKENIZER in side:
        read_tokenizer(origin.path / TOKENIZER, side[TOKENIZER])
    if GENERATION in side:
        read_defaults(origin.path / GENERATION, spec.text.vocab_size, side[GENERATION])
    return side


def _device(backend: Backend, given: str | None) -> str:
    """Return the device asked for, else the backend's first."""
    device = given or backend.devices[0]
    if device not in backend.devices:
        runs = ", ".join(backend.devices)
        raise InputError(f"backend {backend.name} runs on {runs}, not {device!r}")
    return device


def _dtype(backend: Backend, given: str | None, spec: Spec) -> str:
    """Return the dtype asked for, else the spec's, else the backend's where it lacks the spec's."""
    kind = find_dtype(given or spec.dtype)
    if kind in backend.dtypes:
        return kind
    if given is None:
        return backend.dtypes[0]
    can = ", ".join(TORCH_NAMES[d] for d in backend.dtypes)
    raise InputError(f"--dtype {given}: backend {backend.name} computes in {can}")


def _kv_dtype(backend: Backend, given: str | None, dtype: str) -> str:
    """Return what caches are narrowed to, or OFF; InputError where the backend has none such."""
    kv = find_kv_dtype(given, dtype)
    if kv == OFF or kv in backend.kv_dtypes:
        return kv
    other = " or ".join(KV_NAMES[d] for d in backend.kv_dtypes) or "the dtype: leave it out"
    raise InputError(
        f"--kv-dtype {given}: backend {backend.name} cannot: {backend.kv_reason}; it holds caches "
        f"in {other}"
    )


def _activations(backend: Backend, given: str | None) -> str:
    """Return what rows are rounded to, or OFF; InputError where the backend does not."""
    form = find_activations(given)
    if form != OFF and not backend.rounds_activations:
        raise InputError(
            f"--quant-activations {given}: backend {backend.name} does not round rows as it runs; "
            f"leave the option out"
        )
    return form


def _draft_tokens(backend: Backend, given: int | None, limits: Limits, drafter: Spec | None) -> int:
    """Return how many tokens are drafted at a time; InputError for what the backend cannot do."""
    count = find_draft_tokens(given, limits.max_seq, drafter is not None)
    if count and backend.verifies_in_chunks and count >= limits.prefill_chunk:
        raise InputError(
            f"--draft-tokens {count}: backend {backend.name} verifies {count + 1} tokens as it "
            f"reads a chunk of a prompt; give --prefill-chunk {count + 1} or more"
        )
    return count


def _check_activations(r: Resolved) -> None:
    """Raise InputError where rows are to be rounded and no weight is in codes."""
    form = r.options.of(ActivationOptions).to
    if form != OFF and r.recipe is None:
        raise InputError(
            f"--quant-activations {form}: no weight is in codes, and only products with such "
            f"weights round what they take; give --quant int8, int4 or fp8 too"
        )


def _ranks(backend: Backend, given: int) -> int:
    """Return how many ranks share the model; InputError where the backend has one alone."""
    if given != 1 and not backend.shares:
        raise InputError(
            f"--tp {given}: engines of backend {backend.name} run as one rank; leave the option "
            f"out, or build with --backend torch"
        )
    return given


def _memory(device: str, dry: bool) -> int | None:
    """Return the bytes that the device has; None in a dry run without one."""
    import torch

    absent = dry and device == "cuda" and not torch.cuda.is_available()
    return None if absent else device_memory(device)


#: kind of media -> keys of a spec that its soft tokens follow from
OF_MEDIA = {
    "image": ("vision.", "tokens.image", "tokens.boi", "tokens.eoi", "tokens.pad"),
    "video": ("vision.", "tokens.video", "tokens.boi", "tokens.eoi", "tokens.pad"),
    "audio": ("audio.", "tokens.audio", "tokens.boa", "tokens.eoa", "tokens.pad"),
}


def _check_towers(spec: Spec, origin: Origin | None, media: Media) -> None:
    """Raise SpecError where a checkpoint's config.json disagrees on the media that are taken."""
    if origin is None or not media.kinds or not origin.says_towers:
        return
    keys = tuple(key for kind in media.kinds for key in OF_MEDIA[kind])
    rows = [r for r in diff_specs(spec, origin.spec()) if r[0].startswith(keys)]
    _refuse_differences(spec, origin, rows)


#: fields of the text model that pictures alone ask
OF_PICTURES = ("text.use_bidirectional_attention",)


def agreed_spec(spec: Spec | None, origin: Origin | None, pictures: bool = True) -> Spec:
    """Return the spec, after comparing its text part with what the checkpoint says; without
    `pictures` what only they ask may differ."""
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
    """Widen the prefill chunk to the largest image whose tokens see each other: it is never cut
    (see media/merge.py). Warns where that was not asked for, and of images that no row has room
    for."""
    largest = max(media.grids, default=0)
    if largest > limits.max_seq:
        log.warning(
            "max-seq %d: an image of %d soft tokens, as built for, does not fit",
            limits.max_seq,
            largest,
        )
    chunk = min(largest, limits.max_seq)
    if not has_blocks(spec) or limits.prefill_chunk >= chunk:
        return limits
    log.warning(
        "prefill-chunk %d is raised to %d: an image's tokens are computed together",
        limits.prefill_chunk,
        chunk,
    )
    return replace(limits, prefill_chunk=chunk)


def disk_bytes(p: Prepared) -> int:
    """Return the bytes of weights that the engine directory will hold."""
    if isinstance(p.weights, RandomWeights | LinkedWeights):
        return 0
    return p.written_bytes() + p.backend.repeated_bytes(p.packing.program, p.settings)


def free_bytes(out: Path) -> int:
    """Return the free space where `out` will lie, bytes."""
    above = (p for p in out.absolute().parents if p.is_dir())
    return shutil.disk_usage(next(above)).free


def check_space(p: Prepared, out: Path) -> None:
    """Raise EngineError where the weights do not fit the disk."""
    weights, free = disk_bytes(p), free_bytes(out)
    need = weights + OTHER_BYTES
    if weights and free < need:
        other = ["make room", "choose another --out"]
        if not (p.backend.packs_weights or p.drafter):
            other.append("use --link-weights")
        raise EngineError(
            f"{out.parent}: the engine needs {size_text(need)} ({size_text(weights)} of weights), "
            f"{size_text(free)} are free; {', '.join(other[:-1])} or {other[-1]}"
        )


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A context with a temporary sibling of `out` that becomes `out` at the end, or vanishes."""
    folder = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = new_folder(out.parent, f".{out.name}{BUILDING}")
        yield folder
        os.rename(folder, out)
    except OSError as e:
        where = e.filename or folder or out
        raise EngineError(
            f"cannot write the engine: {where}: {e.strerror or e}; make room or choose another "
            f"--out"
        ) from e
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    write_file(path, [text.encode()])
