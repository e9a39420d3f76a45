"""Builds an engine directory (directory.py says what is in one): `prepare` checks a build up to
compilation and resolves every option that is not given, `write_engine` does it.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from g4ir import __version__
from g4ir.artefact import directory
from g4ir.artefact.trust import record_built
from g4ir.backends import find_backend
from g4ir.backends.base import Backend, Prepared, Task
from g4ir.engine.engine import TOKENIZER, Engine, read_tokenizer
from g4ir.engine.prompts import read_defaults
from g4ir.errors import EngineError, InputError, PlanError, SpecError, check_all
from g4ir.model.draft import shipped_drafter
from g4ir.model.media import Media, find_media
from g4ir.model.names import checkpoint_name
from g4ir.model.text import has_blocks
from g4ir.ops.codecs import CALIBRATED
from g4ir.ops.kv_quant import NARROW
from g4ir.ops.types import torch_dtype
from g4ir.passes import Acted, Dump
from g4ir.passes.match import OFF
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.plan import resolve
from g4ir.plan.backend import checked_settings
from g4ir.plan.engine_limits import Limits
from g4ir.plan.fit import device_memory, fitted
from g4ir.plan.footprint import Footprint
from g4ir.plan.options import BuildConfig, BuildOptions, options_text, words_of
from g4ir.quant.recipe import Recipe, find_recipe, one_recipe
from g4ir.quant.rewrite import held_recipe, weights_of
from g4ir.spec.reader import Line, on_one_line
from g4ir.spec.record import SUFFIXES, Spec, diff_specs, load_spec
from g4ir.ui.files import free_bytes, new_folder, write_file
from g4ir.ui.progress import Progress, no_progress, prefixed
from g4ir.ui.units import size_text
from g4ir.weights import pack as packings
from g4ir.weights.adapter import Adapter, lies_in, with_adapters
from g4ir.weights.checkpoint import GENERATION, Checkpoint, sha256
from g4ir.weights.origin import Origin, existing_origin, find_origin, need_snapshot, snapshot_of
from g4ir.weights.random import random_weights

from .calibration import CalibrationText, column_moments
from .load import described, engine_of, linked_files, open_runtime

DEFAULTS = BuildOptions()
#: disk space for the files of an engine that are no weights
OTHER_BYTES = 64 << 20

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


def shows_options(function: F) -> F:
    """Show the fields of BuildOptions in the signature and docstring of a function that takes them
    as `**options`, for help() and editors."""
    own = inspect.signature(function)
    kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    given = inspect.signature(BuildOptions).parameters.values()
    options = [p.replace(kind=p.KEYWORD_ONLY) for p in given]
    vars(function)["__signature__"] = own.replace(parameters=[*kept, *options])
    function.__doc__ = (function.__doc__ or "").format(options=options_text().strip())
    return function


@shows_options
def build(
    spec: Spec | str | Path | None,
    out: str | Path,
    *,
    progress: Progress = no_progress,
    **options: Any,
) -> Engine:
    """Build an engine directory, load it, and return the engine. One of several ranks, or for a GPU
    that this machine does not have, refuses to run.

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
    found, c = written.artefact, prepared.config
    if c.ranks > 1 or not prepared.backend.has_device(c.device):
        return described(found)
    return engine_of(found, open_runtime(found, progress, trust=True))


def check_absent(out: Path) -> None:
    """Raise EngineError if the output path exists."""
    if out.exists() or out.is_symlink():
        raise EngineError(f"{out} exists; remove it or choose another --out")


# --- what a build resolves to, checked up to compilation --------------------------------------


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
    backend, seed = find_backend(options.backend).aimed(options.target), options.random_weights
    device = resolve.device_of(backend, options.device)
    _check_given(spec, options, backend)
    checked_settings(backend, options.settings or {})
    needs = () if dry else backend.needs(device, options.tp)
    if absent := _absent_weights(spec, options, dry):
        check_all(*needs, *absent)
    origin = _origin(spec, options)
    agreed = agreed_spec(spec, origin) if origin else spec
    assert agreed
    drafter = _drafter(agreed, options, dry)
    side = checked_side_files(agreed, origin) if origin else {}
    config = _resolved(agreed, options, backend, origin, drafter[0] if drafter else None)
    check_all(*needs)
    checkpoint = origin.open(agreed, config.media.kinds, config.dtype) if origin else None
    adapters = _adapters(options, origin)
    if checkpoint:
        checkpoint = with_adapters(checkpoint, agreed, adapters)
    config = replace(config, quant=_recipe(config, checkpoint, origin))
    calibration = _calibration(options, config.quant, agreed, side)
    acted = Acted()
    packing = config.packing(backend, dump=dump, acted=acted)
    config, short = _fitted(Footprint(config, backend, packing), options, backend, dry)
    dtype = torch_dtype(config.dtype)
    source = checkpoint or random_weights(agreed, seed or 0, dtype)
    weights = _weights(checkpoint, options, backend.packs_weights, adapters)
    if weights is not None:
        _check_range(config, source)
    if drafter:
        known, path = drafter
        source = source.with_drafter(
            Checkpoint.open(path, known, (), config.dtype)
            if path
            else random_weights(known, seed or 0, dtype)
        )
    return Prepared(
        config,
        backend,
        packing,
        acted,
        source,
        weights,
        side_files=side,
        short=short,
        memory=options.memory,
        calibration=calibration,
    )


def _calibration(
    o: BuildOptions, recipe: Recipe | None, spec: Spec, side: Mapping[str, bytes]
) -> CalibrationText | None:
    """Return the text to calibrate on, if one is given; InputError if it would change nothing, or
    is no text of enough tokens."""
    if o.calibrate is None:
        return None
    schemes = recipe.schemes(weights_of(spec)).values() if recipe and not recipe.held else ()
    if not any(s.form in CALIBRATED for s in schemes):
        why = f"no weight is quantised to {' or '.join(CALIBRATED)}, which alone it is for"
        raise InputError(f"--calibrate {o.calibrate}: {why}; give --quant int4 or int4-mixed too")
    return CalibrationText.read(Path(o.calibrate), spec, side)


#: options that do not go with --link-weights
UNLINKED = {
    "random_weights": "it refers to a checkpoint's files, and random weights have none",
    "mmproj": "it refers to one checkpoint, and this is another",
    "drafter": "it refers to one checkpoint, and this is another",
    "adapter": "it refers to the checkpoint's files, which this changes",
    "calibrate": "the engine makes its weights at load, without the text",
}


def _check_given(spec: Spec | None, o: BuildOptions, backend: Backend) -> None:
    """Raise InputError for options of weights that exclude each other."""
    checkpoint, seed = o.checkpoint, o.random_weights
    if o.mmproj is not None and (checkpoint is None or spec is None):
        why = "it goes with --checkpoint FILE.gguf and, as no file says how towers compute"
        raise InputError(f"--mmproj {o.mmproj}: {why}, with --variant or --spec")
    if checkpoint is not None and seed is not None:
        raise InputError("give either a checkpoint or --random-weights, not both")
    if seed is not None and not 0 <= seed < 1 << 63:
        raise InputError(f"--random-weights {seed}: expected a seed from 0 to 2^63 - 1")
    if spec is None and checkpoint is None:
        needs = "give a variant, a spec or a checkpoint"
        raise InputError(needs if seed is None else "--random-weights needs --variant or --spec")
    if o.adapter and seed is not None:
        raise InputError("--adapter goes with a checkpoint, and not with --random-weights")
    if o.link_weights:
        for name, why in UNLINKED.items():
            if (value := getattr(o, name)) not in (*resolve.NO_DRAFTER, (), []):
                given = f"--{name.replace('_', '-')} {words_of(value)}"
                raise InputError(f"{given} with --link-weights: {why}; leave one out")
        if backend.packs_weights:
            what = f"what backend {backend.name} writes refers to packed weights"
            raise InputError(f"--link-weights: {what}; leave the option out")


def _absent_weights(spec: Spec | None, o: BuildOptions, dry: bool) -> list[Callable[[], object]]:
    """Return checks for weights that are to come from the local hub cache and are not there."""
    if dry or spec is None or o.random_weights is not None:
        return []
    absent: list[Callable[[], object]] = []
    if o.checkpoint is None and snapshot_of(spec) is None:
        absent.append(partial(need_snapshot, spec))
    if o.drafter == resolve.DEFAULT and snapshot_of(shipped_drafter(spec)) is None:
        absent.append(partial(need_snapshot, shipped_drafter(spec), "--drafter DIR"))
    return absent


def _drafter(model: Spec, o: BuildOptions, dry: bool) -> tuple[Spec, Path | None] | None:
    """Return the spec of the drafter that was asked for, and the directory of its checkpoint, None
    if its weights are random; InputError or SpecError where there is none such, or it drafts for
    another model. A `dry` run needs no weights."""
    if o.drafter in resolve.NO_DRAFTER:
        return None
    random, path = o.random_weights is not None, Path(str(o.drafter))
    is_spec, found = path.suffix in SUFFIXES, None
    if is_spec and not random and not dry:
        fix = "give its checkpoint's directory, or --random-weights SEED"
        raise InputError(f"--drafter {o.drafter}: a spec has no weights; {fix}")
    if o.drafter == resolve.DEFAULT and not random:
        own = shipped_drafter(model)
        found = snapshot_of(own) if dry else need_snapshot(own, "--drafter DIR")
    elif o.drafter != resolve.DEFAULT and not is_spec:
        if random:
            why = "beside --random-weights the drafter's are random too"
            raise InputError(f"--drafter {o.drafter}: {why}; give `default` or its spec FILE.yaml")
        found = path
    return resolve.drafter_spec(model, o.drafter), found


def _origin(spec: Spec | None, o: BuildOptions) -> Origin | None:
    """Return the checkpoint; None for random weights, and in a dry run that has none."""
    if o.random_weights is not None:
        return None
    if o.checkpoint is not None:
        return existing_origin(o.checkpoint, o.mmproj)
    found = snapshot_of(spec) if spec else None
    return find_origin(found) if found else None


#: fields of the text model that only images use
OF_PICTURES = ("text.use_bidirectional_attention",)
_SEEN = ("vision.", "tokens.boi", "tokens.eoi", "tokens.pad")
#: kind of media -> keys of a spec that its soft tokens follow from
OF_MEDIA = {
    "image": (*_SEEN, "tokens.image"),
    "video": (*_SEEN, "tokens.video"),
    "audio": ("audio.", "tokens.audio", "tokens.boa", "tokens.eoa", "tokens.pad"),
}


def agreed_spec(spec: Spec | None, origin: Origin, images: bool = True) -> Spec:
    """Return the spec, after comparing its text part with what the checkpoint says; fields of
    images alone only with `pictures`."""
    if spec is None:
        return origin.spec()
    _check_agreed(spec, origin, ("text.",), origin.spec_only + (() if images else OF_PICTURES))
    return spec


def _check_agreed(
    spec: Spec, origin: Origin, keys: tuple[str, ...], free: tuple[str, ...] = ()
) -> None:
    """Raise SpecError if a checkpoint says something else of these keys."""
    rows = diff_specs(spec, origin.spec())
    rows = [r for r in rows if r[0].startswith(keys) and r[0] not in free]
    if rows:
        lines = "\n".join(f"  {key}: spec {a!r}, checkpoint {b!r}" for key, a, b in rows)
        fix = "leave out the variant to build what the checkpoint says, or correct one of them"
        raise SpecError(f"spec {spec.name} and {origin.stated} differ; {fix}:\n{lines}")


def checked_side_files(spec: Spec, origin: Origin) -> dict[str, bytes]:
    """Return a checkpoint's side files by name; an error if one cannot be read later."""
    side = origin.side_files()
    if TOKENIZER in side:
        read_tokenizer(origin.stated_at(TOKENIZER), side[TOKENIZER])
    if GENERATION in side:
        path, keys = origin.stated_at(GENERATION), origin.generation_keys
        read_defaults(path, spec.text.vocab_size, side[GENERATION], keys)
    return side


def _resolved(
    spec: Spec,
    o: BuildOptions,
    backend: Backend,
    origin: Origin | None,
    drafter: Spec | None,
) -> BuildConfig:
    asked = o.media if isinstance(o.media, str) else tuple(o.media)
    kinds, extractor = (origin.kinds(asked, spec), origin.extractor()) if origin else (asked, None)
    media = find_media(spec, kinds, o.image_budgets, o.audio_seconds, extractor)
    if origin and media.kinds and origin.says_towers:
        _check_agreed(spec, origin, tuple(key for kind in media.kinds for key in OF_MEDIA[kind]))
    return resolve.resolved(
        spec,
        o,
        backend,
        limits=_limits(spec, o, media),
        media=media,
        quant=find_recipe(o.quant),
        drafter=drafter,
    )


def _limits(spec: Spec, o: BuildOptions, media: Media) -> Limits:
    """Return the limits; the prefill chunk is widened to the largest image whose tokens see each
    other, which is never cut (media/merge.py). Warns if the user gave a smaller one, and of images
    longer than max_seq."""
    longest = spec.text.max_position_embeddings
    for name in ("max_batch", "max_seq", "prefill_chunk"):
        value = getattr(o, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: expected at least 1")
    if o.max_seq is not None and o.max_seq > longest:
        raise InputError(f"--max-seq {o.max_seq}: {spec.name} has {longest} positions")
    seq = min(Limits.max_seq, longest) if o.max_seq is None else o.max_seq
    chunk, largest = min(o.prefill_chunk, seq), max(media.grids, default=0)
    if largest > seq:
        what = "--max-seq %d: an image of %d soft tokens, as built for, does not fit"
        log.warning(what, seq, largest)
    if has_blocks(spec) and chunk < min(largest, seq):
        what = "--prefill-chunk %d is raised to %d: an image's tokens are computed together"
        log.warning(what, chunk, min(largest, seq))
        chunk = min(largest, seq)
    return Limits(o.max_batch, seq, chunk)


def _adapters(o: BuildOptions, origin: Origin | None) -> tuple[Adapter, ...]:
    """Return the adapters to merge. Warns of one in the checkpoint's directory that is not."""
    given = (o.adapter,) if isinstance(o.adapter, str | Path) else o.adapter
    adapters = tuple(map(Adapter.of, given))
    folder = origin.path if origin and origin.path.is_dir() else None
    beside = lies_in(folder) if folder else None
    if beside and folder not in [a.path for a in adapters]:
        what = "%s: holds a LoRA adapter (%s), which is not merged; give --adapter %s to merge it"
        log.warning(what, folder, beside, folder)
    return adapters


def _recipe(config: BuildConfig, opened: Checkpoint | None, origin: Origin | None) -> Recipe | None:
    """Return the quantisation config that was given, or that of a quantised checkpoint; InputError
    for both, or for quantised activations without either."""
    held = held_recipe(config.spec, opened.forms) if opened else None
    found = one_recipe(config.quant, held, origin and origin.path)
    form = config.activations
    if form != OFF and not found:
        why = "no weight is quantised, and only products with such weights round what they take"
        raise InputError(f"--quant-activations {form}: {why}; give --quant int8, int4 or fp8 too")
    return found


def _fitted(
    footprint: Footprint, o: BuildOptions, backend: Backend, dry: bool
) -> tuple[BuildConfig, str]:
    """Place the per-layer embedding table in the memory where it fits; return that, and why the
    engine does not fit its device: PlanError, unless it is a dry run."""
    config = footprint.config
    if o.memory is None and not backend.has_device(config.device):
        return config, ""
    memory = o.memory if o.memory is not None else device_memory(config.device)
    free = o.ple_placement is None and config.ple_placement == "device"
    config, short = fitted(footprint, memory, free)
    if short and not dry:
        raise PlanError(short)
    return config, short


def _weights(
    checkpoint: Checkpoint | None, o: BuildOptions, packs: bool, adapters: tuple[Adapter, ...]
) -> Any:
    """Return one of directory.WEIGHTS; None without weights."""
    seed = o.random_weights
    if adapters:
        merged = (
            directory.MergedAdapter(Line(a.path.resolve()), a.factor, sha256(a.weights))
            for a in adapters
        )
        return directory.MergedWeights(adapters=tuple(merged))
    if checkpoint and o.link_weights:
        files = {name: sha256(p) for name, p in linked_files(checkpoint).items()}
        return directory.LinkedWeights("linked", Line(checkpoint.directory.resolve()), files)
    if checkpoint or (packs and seed is not None):
        return directory.PackedWeights(seed=seed)
    return None if seed is None else directory.RandomWeights("random", seed)


def _check_range(config: BuildConfig, source: Checkpoint) -> None:
    """Warn of the layer whose K may be farthest beyond the range of a float8 cache: after a norm of
    weight w no element of d is larger than sqrt(d) * max |w|. Such elements saturate."""
    most = NARROW.get(config.options.of(NarrowOptions).to)
    if most is None:
        return
    names = [f"L{x.index}.attn.norm_k" for x in config.spec.layers() if x.donor is None]
    weights = {name: source.tensor(checkpoint_name(name)) for name in names}
    reach = {name: len(w) ** 0.5 * float(w.abs().max()) for name, w in weights.items()}
    worst = max(reach, key=reach.__getitem__)
    if reach[worst] > most:
        what = "--kv-dtype float8: K may reach %.0f in %s, and numbers beyond %.0f are cut to it"
        log.warning(f"{what}; int8 has no such limit", reach[worst], worst, most)


# --- writing ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """What was written, as `open_artefact` reads it; seconds of compilation; and whether the build
    was recorded as this user's."""

    artefact: directory.Artefact
    compile_s: float
    known: bool


def write_engine(p: Prepared, out: Path, progress: Progress) -> Written:
    """Write the directory under a temporary name, then rename it."""
    check_absent(out)
    check_space(p, out)
    if short := p.backend.short(p.packing.program):
        raise PlanError(short)
    for graph in ("prefill", "decode"):
        progress(f"passes of {graph}: {p.acted.text(graph) or 'none acted'}")
    with _new_directory(out) as folder:
        params: packings.ParamSource = packings.MadeParams(p.packing, p.source, share=p.share(0))
        if packed := isinstance(p.weights, directory.PackedWeights):
            _pack(p, folder, progress)
            params = packings.stored_params(folder, 0)
        c, start, told = p.config, time.perf_counter(), prefixed(progress, "build")
        task = Task(p.packing.program, c.limits, c.device, folder, params, told, memory=p.memory)
        compiled = p.backend.compile(task, c.settings)
        seconds = time.perf_counter() - start
        texts = {**directory.graph_texts(p.packing), directory.SPEC: c.spec.to_yaml()}
        texts |= {directory.DRAFTER: c.drafter.to_yaml()} if c.drafter else {}
        side = {**{name: text.encode() for name, text in texts.items()}, **p.side_files}
        for name, raw in side.items():
            write_file(folder / name, [raw])
        manifest = _manifest(p, compiled, folder)
        directory.require_readable(manifest)
        write_file(folder / directory.MANIFEST, [manifest.text().encode()])
    stored = packings.stored_params(out, 0) if packed else None
    artefact = directory.Artefact(out, manifest, p.packing, stored, whole=False, rank=0)
    return Written(artefact, seconds, record_built(manifest, out))


def _pack(p: Prepared, folder: Path, progress: Progress) -> None:
    """Write the params."""
    from g4ir.backends.cpu.packing import quantized

    moments = column_moments(p, progress) if p.calibration else {}
    params = packings.MadeParams(p.packing, p.source, p.share(0), moments, quantized)
    packings.write_shares(p.packing, params, p.config.ranks, folder, progress)


def _stored(file: Path) -> directory.StoredFile:
    return directory.StoredFile(sha256(file), file.stat().st_size)


def _manifest(p: Prepared, compiled: Mapping[str, Any], folder: Path) -> directory.Manifest:
    import torch

    ignored = {on_one_line(k): Line(v) for k, v in p.source.ignored.items()}
    defaults = {Line(k): f"{v:g}" for k, v in p.source.defaults.items()}
    names = (f.relative_to(folder).as_posix() for f in sorted(folder.rglob("*")) if f.is_file())
    return directory.Manifest(
        g4ir=__version__,
        config=p.config,
        machine=Line(p.backend.machine(p.config.device)),
        graphs=tuple(p.packing.program.graphs),
        weights=p.weights,
        compiled=dict(compiled),
        versions=directory.Versions(torch.__version__, platform.python_version()),
        notes=directory.Notes(ignored, defaults, p.calibration and p.calibration.record),
        files={name: _stored(folder / name) for name in names},
    )


def disk_bytes(p: Prepared) -> int:
    """Return the bytes of weights in the engine directory."""
    if isinstance(p.weights, directory.RandomWeights | directory.LinkedWeights):
        return 0
    return p.written_bytes() + p.backend.repeated_bytes(p.packing.program, p.config.settings)


def check_space(p: Prepared, out: Path) -> None:
    """Raise EngineError if the weights do not fit the disk."""
    weights, free = disk_bytes(p), free_bytes(out)
    need = weights + OTHER_BYTES
    if weights and free < need:
        link = "" if p.backend.packs_weights or p.config.drafter else ", use --link-weights"
        needs = f"the engine needs {size_text(need)} ({size_text(weights)} of weights)"
        fix = f"make room{link} or choose another --out"
        raise EngineError(f"{out.parent}: {needs}, {size_text(free)} are free; {fix}")


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A context with a temporary folder that becomes `out` at the end, or is removed."""
    folder = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = new_folder(out.parent, f".{out.name}{directory.BUILDING}")
        yield folder
        os.rename(folder, out)
    except OSError as e:
        why = f"cannot write the engine: {e.filename or folder or out}: {e.strerror or e}"
        raise EngineError(f"{why}; make room or choose another --out") from e
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
