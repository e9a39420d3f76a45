"""Builds an engine directory (layout: artefact/directory.py). `prepare` validates a build up to
compilation and resolves all options, `write_engine` compiles and writes.

The directory is written under a temporary name and renamed at the end, with the manifest as the
last file, so that a killed build never leaves a loadable engine.
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
from pathlib import Path
from typing import Any, TypeVar

from g4ir import __version__
from g4ir.artefact import directory
from g4ir.artefact.digests import file_digest
from g4ir.artefact.trust import record_built
from g4ir.backends import find_backend
from g4ir.backends.base import Backend, Prepared, Task
from g4ir.backends.cpu.packing import quantized
from g4ir.engine.engine import Engine
from g4ir.errors import EngineError, InputError, PlanError, check_all
from g4ir.model.names import checkpoint_name
from g4ir.model.text import text_graphs
from g4ir.ops.kv_quant import NARROW
from g4ir.ops.types import torch
from g4ir.passes import Dump, PassCounts
from g4ir.passes.match import OFF
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.plan import resolve
from g4ir.plan.fit import device_memory, fitted
from g4ir.plan.footprint import Footprint
from g4ir.plan.options import BuildConfig, BuildOptions, flags_of, options_text
from g4ir.quant.recipe import MEASURED, QUANT_FILE, choose_config, find_quant_config
from g4ir.quant.rewrite import checkpoint_quant_config
from g4ir.spec.reader import Line, to_line
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.files import free_bytes, new_folder, write_file
from g4ir.ui.progress import Progress, no_progress, prefixed
from g4ir.ui.units import size_text
from g4ir.weights import pack as packings
from g4ir.weights.adapter import Adapter
from g4ir.weights.checkpoint import Checkpoint, sha256

from .bits import MAX_BITS, MIN_BITS, bits_config
from .calibration import DEFAULT as DEFAULT_TEXT
from .calibration import CalibrationText, calibrate, calibrated_schemes
from .load import described, engine_of, linked_files, open_runtime
from .sources import Sources, find_sources

DEFAULTS = BuildOptions()
#: disk space reserved for an engine's files other than weights
OTHER_BYTES = 64 << 20

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


def shows_options(function: F) -> F:
    """Decorator: add the fields of BuildOptions to the signature and docstring of a function that
    takes them as `**options`, for help() and editors."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    option_parameters = inspect.signature(BuildOptions).parameters.values()
    options = [p.replace(kind=p.KEYWORD_ONLY) for p in option_parameters]
    vars(function)["__signature__"] = signature.replace(parameters=[*parameters, *options])
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
    """Build an engine directory, load it, and return the engine. An engine of several ranks, or for
    a GPU that this machine does not have, is returned but raises when run.

    spec: a Spec, a name, a path, or None to take it from the checkpoint. Options:

    {options}

    A build whose engine would need more than `memory` bytes of its device (default: all it has) is
    refused before its weights are packed. A failed build raises a G4Error and leaves nothing at
    `out`.
    """
    if isinstance(spec, str | Path):
        spec = load_spec(spec)
    out = Path(out)
    check_absent(out)
    prepared = prepare(spec, BuildOptions(**options), progress=progress)
    written = write_engine(prepared, out, progress)
    prepared.source.close()
    artefact, c = written.artefact, prepared.config
    if c.ranks > 1 or not prepared.backend.has_device(c.device):
        return described(artefact)
    return engine_of(artefact, open_runtime(artefact, progress, trust=True))


def check_absent(out: Path) -> None:
    """Raise EngineError if the output path exists."""
    if out.exists() or out.is_symlink():
        raise EngineError(f"{out} exists; remove it or choose another --out")


# --- resolving and validating a build --------------------------------------


def prepare(
    spec: Spec | None,
    options: BuildOptions = DEFAULTS,
    *,
    dry: bool = False,
    dump: Dump | None = None,
    progress: Progress = no_progress,
) -> Prepared:
    """Validate a build up to compilation; return the input of `write_engine`. `dry`: a missing
    device, missing weights or too little memory are no error. `dump`: called with each graph after
    each pass. With `bits`, the divergence of weight formats is measured (unless it is cached)."""
    backend = find_backend(options.backend).aimed(options.target)
    _check_linked(options, backend)
    _check_bits(options, dry)
    sources = find_sources(spec, options, dry)
    config = resolve.resolved(
        sources.spec,
        options,
        backend,
        media=sources.media(options),
        quant=find_quant_config(options.quant),
        drafter=sources.drafter.spec if sources.drafter else None,
    )
    if dry:
        sources.side_files.result()
    else:
        check_all(*backend.needs(config.device), *sources.absent())
    checkpoint = sources.checkpoint(config)
    if options.requantize:
        if not (checkpoint and checkpoint.forms and (config.quant or options.bits)):
            why = "it needs a quantised checkpoint, and --quant or --bits"
            raise InputError(f"--set requantize=on: {why}; leave it out")
        checkpoint = checkpoint.dequantised()
    config = _with_recipe(config, checkpoint, sources, options.bits)
    text = _calibration(options, config, sources)
    source = sources.weights(config, checkpoint)
    weights = _weights(checkpoint, options, backend.packs_weights or bool(text), sources.adapters)
    if options.bits is not None and text:
        args = options.bits, config, source, weights, text, progress
        config = replace(config, quant=bits_config(*args))
    acted = PassCounts()
    packing = config.packing(backend, dump=dump, acted=acted)
    config, short = _fitted(Footprint(config, backend, packing), options, backend, dry)
    if weights is not None:
        _check_range(config, source)
    return Prepared(
        config,
        backend,
        packing,
        acted,
        source,
        weights,
        side_files=sources.side_files,
        short=short,
        memory=options.memory,
        calibration=text,
    )


#: options that exclude --link-weights -> why
UNLINKED = {
    "random_weights": "weights are linked to a checkpoint's files, and random ones have none",
    "mmproj": "an engine is linked to one checkpoint, and the towers are in another",
    "drafter": "an engine is linked to one checkpoint, and the draft model is another",
    "adapter": "linked weights are the checkpoint's own, without an adapter",
    "calibrate": "linked weights are quantised at load, without the text",
    "requantize": "linked weights are the checkpoint's own, quantised as they are there",
    "bits": "linked weights are quantised at load, without a calibration text",
}


def _check_bits(o: BuildOptions, dry: bool) -> None:
    """Raise InputError for options that exclude --bits, and for bits out of range."""
    if o.bits is None:
        return
    flag = f"--bits {o.bits:g}"
    if not MIN_BITS <= o.bits <= MAX_BITS:
        raise InputError(f"{flag}: expected a number from {MIN_BITS:g} to {MAX_BITS:g}")
    if o.quant is not None:
        raise InputError(f"{flag} with --quant {o.quant}: --bits chooses formats; leave one out")
    if dry:
        why = "formats are measured with the weights"
        raise InputError(f"{flag} with --dry-run: {why}; leave one out")


def _check_linked(o: BuildOptions, backend: Backend) -> None:
    """Raise InputError for options that exclude --link-weights."""
    if not o.link_weights:
        return
    for name, why in UNLINKED.items():
        value = getattr(o, name)
        if value is not False and value not in (*resolve.NO_DRAFTER, (), []):
            flag = " ".join(flags_of({name: value}))
            raise InputError(f"{flag} with --link-weights: {why}; leave one out")
    if backend.packs_weights:
        reason = f"programs of backend {backend.name} refer to packed weights"
        raise InputError(f"--link-weights: {reason}; leave the option out")


def _with_recipe(
    config: BuildConfig, opened: Checkpoint | None, sources: Sources, bits: float | None
) -> BuildConfig:
    """Return the config with the requested quantisation config, or the checkpoint's own. InputError
    for more than one of these and `bits`, or for quantised activations without any of them."""
    checkpoint_quant = checkpoint_quant_config(config.spec, opened.forms) if opened else None
    quant = choose_config(config.quant, checkpoint_quant, sources.origin and sources.origin.path)
    dtype = config.activations
    if quant and bits is not None:
        why = "the checkpoint is quantised already"
        raise InputError(f"--bits {bits:g}: {why}; add --set requantize=on, or give its original")
    if dtype != OFF and not quant and bits is None:
        why = "only matmuls with quantised weights quantise their input"
        fix = "give --quant int8, int4 or fp8 too"
        raise InputError(f"--quant-activations {dtype}: {why}; {fix}")
    return replace(config, quant=quant)


def _calibration(o: BuildOptions, config: BuildConfig, sources: Sources) -> CalibrationText | None:
    """Return the calibration text of --calibrate, or with --bits alone the default one; else None.
    InputError if no scheme is calibrated, or as by `CalibrationText.read`."""
    paths = (o.calibrate,) if isinstance(o.calibrate, str | Path) else (*o.calibrate,)
    paths = paths or ((DEFAULT_TEXT,) if o.bits is not None else ())
    if not paths:
        return None
    recipe = config.quant
    fitted = o.bits is not None or (
        recipe and not recipe.from_checkpoint and calibrated_schemes(recipe, config.spec)
    )
    if not fitted:
        why = "this build quantises no matrix of the layers to a format that is calibrated"
        fix = "give --quant, such as int4, and --set requantize=on if the weights are quantised"
        raise InputError(f"--calibrate {', '.join(map(str, paths))}: {why}; {fix}")
    return CalibrationText.read(paths, config.spec, sources.side_files.result())


def _fitted(
    footprint: Footprint, o: BuildOptions, backend: Backend, dry: bool
) -> tuple[BuildConfig, str]:
    """Return the config and, if the engine does not fit its device, the reason (PlanError unless
    `dry`). The per-layer embedding table is memory-mapped if not everything fits on the device,
    unless its placement was requested. Without the device and --memory nothing is checked."""
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
    """Return the manifest's record of the weights (one of directory.WEIGHTS); None in a dry run
    without weights."""
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
    """Warn, naming the worst layer, if K may saturate a float8 cache: after an RMS norm with weight
    w [d] (stored as w - 1 with `norms_about_zero`), elements are at most sqrt(d) * max |w|."""
    if (max_value := NARROW.get(config.options.of(NarrowOptions).to)) is None:
        return
    names = [f"L{x.index}.attn.norm_k" for x in config.spec.layers() if x.donor is None]
    one = int(config.spec.text.norms_about_zero)
    weights = {name: source.tensor(checkpoint_name(name)) + one for name in names}
    reach = {name: len(w) ** 0.5 * float(w.abs().max()) for name, w in weights.items()}
    worst = max(reach, key=reach.__getitem__)
    if reach[worst] > max_value:
        message = "--kv-dtype float8: K may reach %.0f in %s, and values beyond %.0f are clamped"
        log.warning(f"{message}; int8 has no such limit", reach[worst], worst, max_value)


# --- writing ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A written engine, as `open_artefact` returns it. `compile_s`: seconds of compilation;
    `recorded`: whether the build was recorded as this user's, so that --trust is not needed."""

    artefact: directory.Artefact
    compile_s: float
    recorded: bool


def write_engine(p: Prepared, out: Path, progress: Progress) -> Written:
    """Compile an engine and write its directory under a temporary name, then rename that to `out`.
    EngineError if `out` exists or the disk has no room, PlanError if compiling needs more memory
    than the machine has."""
    check_absent(out)
    check_space(p, out)
    if short := p.backend.short(p.packing.program):
        raise PlanError(short)
    for graph in text_graphs(p.config.spec):
        progress(f"passes of {graph}: {p.acted.text(graph) or 'none acted'}")
    with _new_directory(out) as folder:
        params: packings.ParamSource = packings.MadeParams(p.packing, p.source, share=p.share(0))
        digests: Mapping[Path, str] = {}
        if packed := isinstance(p.weights, directory.PackedWeights):
            digests = _pack(p, folder, progress)
            params = packings.stored_params(folder, 0)
        side_files = p.side_files.result()
        c, start, report = p.config, time.perf_counter(), prefixed(progress, "build")
        task = Task(p.packing.program, c.limits, c.device, folder, params, report, memory=p.memory)
        compiled = p.backend.compile(task, c.settings)
        seconds = time.perf_counter() - start
        texts = {**directory.graph_texts(p.packing), directory.SPEC: c.spec.to_yaml()}
        texts |= {directory.DRAFTER: c.drafter.to_yaml()} if c.drafter else {}
        texts |= {QUANT_FILE: c.quant.to_yaml()} if c.quant and c.quant.name == MEASURED else {}
        side = {**{name: text.encode() for name, text in texts.items()}, **side_files}
        for name, raw in side.items():
            write_file(folder / name, [raw])
        manifest = _manifest(p, compiled, folder, digests)
        directory.require_readable(manifest)
        write_file(folder / directory.MANIFEST, [manifest.text().encode()])
    stored = packings.stored_params(out, 0) if packed else None
    artefact = directory.Artefact(out, manifest, p.packing, stored, check_weights=False, rank=0)
    return Written(artefact, seconds, record_built(manifest, out))


def _pack(p: Prepared, folder: Path, progress: Progress) -> dict[Path, str]:
    """Write the packed params of all ranks, quantised on the calibration text if there is one;
    return the SHA-256 of each file."""
    calibrated, files = calibrate(p, progress) if p.calibration else ({}, None)
    params = packings.MadeParams(p.packing, p.source, p.share(0), calibrated, quantized)
    written = packings.write_shares(p.packing, params, p.config.ranks, folder, progress)
    if files:
        shutil.rmtree(files, ignore_errors=True)
    return written


def _manifest(
    p: Prepared, compiled: Mapping[str, Any], folder: Path, digests: Mapping[Path, str]
) -> directory.Manifest:
    ignored = {to_line(k): Line(v) for k, v in p.source.ignored.items()}
    defaults = {Line(k): f"{v:g}" for k, v in p.source.defaults.items()}
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    stored = (directory.StoredFile(file_digest(p, digests.get(p)), p.stat().st_size) for p in paths)
    files = dict(zip((path.relative_to(folder).as_posix() for path in paths), stored))
    return directory.Manifest(
        g4ir=__version__,
        config=p.config,
        machine=Line(p.backend.machine_of(p.config.device, compiled)),
        graphs=tuple(p.packing.program.graphs),
        weights=p.weights,
        compiled=dict(compiled),
        versions=directory.Versions(torch.__version__, platform.python_version()),
        notes=directory.Notes(ignored, defaults, p.calibration.records if p.calibration else ()),
        files=files,
    )


def disk_bytes(p: Prepared) -> int:
    """Return the bytes of weights in the engine directory; copies in compiled files count too."""
    if isinstance(p.weights, directory.RandomWeights | directory.LinkedWeights):
        return 0
    return p.written_bytes() + p.backend.repeated_bytes(p.packing.program, p.config.settings)


def check_space(p: Prepared, out: Path) -> None:
    """Raise EngineError if the weights do not fit on the disk."""
    weights, free = disk_bytes(p), free_bytes(out)
    if weights and free < (need := weights + OTHER_BYTES):
        packs = p.backend.packs_weights or p.config.drafter or p.calibration
        packs = packs or isinstance(p.weights, directory.MergedWeights)
        needs = f"the engine needs {size_text(need)} ({size_text(weights)} of weights)"
        fix = f"make room{'' if packs else ', try --link-weights'} or choose another --out"
        raise EngineError(f"{out.parent}: {needs}, {size_text(free)} are free; {fix}")


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A context with a temporary folder that becomes `out` at the end, or is removed after an
    error. EngineError for any OSError in it."""
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
