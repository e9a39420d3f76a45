"""Builds an engine directory (artefact.py says what is in one).

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
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from g4ir import __version__
from g4ir.backends.base import Prepared, Task
from g4ir.errors import EngineError
from g4ir.ops.finite import TOO_LARGE
from g4ir.plan.options import BuildOptions, Resolved, options_text
from g4ir.spec.reader import Line, on_one_line
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.files import new_folder, write_file
from g4ir.ui.progress import Progress, no_progress, prefixed
from g4ir.ui.units import size_text
from g4ir.weights import pack as packings
from g4ir.weights.checkpoint import sha256

from . import artefact
from .artefact import Grid, LinkedWeights, Manifest, PackedWeights, RandomWeights, StoredFile
from .digests import remembered_digest
from .engine import Engine
from .float16_trial import try_float16, why_untried
from .load import described, load_engine
from .prepare import prepare as prepare
from .trust import record_built

#: disk space for the files of an engine that are no weights
OTHER_BYTES = 64 << 20

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


def _shows_options(function: F) -> F:
    """Show the fields of BuildOptions in the signature and docstring of a function that takes them
    as `**options`, for help() and editors."""
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
    """Build an engine directory, load it, and return the engine; an engine of several ranks, which
    several processes load together, refuses to run.

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
    # A recorded build needs no trust, so that a directory put in its place by now has none.
    return load_engine(out, trust=not written.known, progress=progress)


def check_absent(out: Path) -> None:
    """Raise EngineError if the output path exists."""
    if out.exists() or out.is_symlink():
        raise EngineError(f"{out} exists; remove it or choose another --out")


@dataclass(frozen=True)
class Written:
    """Facts of a build that are not in the manifest, which is the same for equal builds: seconds of
    compilation, whether it was recorded as this user's; and the fit of 4-bit weights."""

    compile_s: float
    known: bool
    grid: Grid | None


def write_engine(p: Prepared, out: Path, progress: Progress) -> Written:
    """Write the directory under a temporary name, then rename it."""
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
        # After compiling, which fails sooner, unless that needs them.
        if isinstance(p.weights, PackedWeights) and not packed:
            grid = _pack(p, folder, progress)
        texts = {**artefact.graph_texts(p.packing), artefact.SPEC: p.spec.to_yaml()}
        if p.drafter:
            texts[artefact.DRAFTER] = p.drafter.to_yaml()
        for name, raw in {**{n: t.encode() for n, t in texts.items()}, **p.side_files}.items():
            write_file(folder / name, [raw])
        manifest = _manifest(p, compiled, grid, folder)
        artefact.require_readable(manifest)
        write_file(folder / artefact.MANIFEST, [manifest.text().encode()])
    return Written(seconds, record_built(manifest, out), grid)


def _pack(p: Prepared, folder: Path, progress: Progress) -> Grid | None:
    """Write the params; return the fit of 4-bit weights, if any were made."""
    grids: dict[str, tuple[int, int]] = {}
    params = packings.MadeParams(p.packing, p.source, grids, p.share(0))
    packings.write_shares(p.packing, params, p.ranks, folder, progress)
    exact, groups = (sum(n) for n in zip(*grids.values(), strict=True)) if grids else (0, 0)
    return Grid(groups, exact) if groups else None


def _params_of(p: Prepared, folder: Path) -> packings.ParamSource:
    files = packings.rank_files(folder.glob("*.safetensors"), 0)
    made = packings.MadeParams(p.packing, p.source, share=p.share(0))
    return packings.StoredParams.open(files) if files else made


def _stored(file: Path) -> StoredFile:
    large = file.name.endswith(artefact.WEIGHT_FILES)
    return StoredFile((remembered_digest if large else sha256)(file), file.stat().st_size)


def _manifest(
    p: Prepared,
    compiled: Mapping[str, Any] = MappingProxyType({}),
    grid: Grid | None = None,
    folder: Path | None = None,
) -> Manifest:
    """Return the manifest of the files in a folder; before compilation of `p` alone."""
    import torch

    files = sorted(f for f in folder.rglob("*") if f.is_file()) if folder else []
    known = {f.name for f in fields(Manifest)}
    return Manifest(
        g4ir=__version__,
        variant=p.spec.name,
        spec_digest=p.spec.digest(),
        drafter_digest=p.drafter.digest() if p.drafter else None,
        backend=p.backend.name,
        machine=Line(p.backend.machine(p.device)),
        skipped_passes=p.skip,
        settings=dict(p.settings),
        quant=p.recipe,
        **{f.name: getattr(p, f.name) for f in fields(Resolved) if f.name in known},
        graphs=tuple(p.packing.program.graphs),
        weights=p.weights,
        compiled=dict(compiled),
        versions=artefact.Versions(torch.__version__, platform.python_version()),
        notes=artefact.Notes(
            {on_one_line(k): Line(v) for k, v in p.source.ignored.items()},
            {Line(k): f"{v:g}" for k, v in p.source.defaults.items()},
            grid,
        ),
        files={f.relative_to(folder).as_posix(): _stored(f) for f in files if folder},
    )


def disk_bytes(p: Prepared) -> int:
    """Return the bytes of weights in the engine directory."""
    if isinstance(p.weights, RandomWeights | LinkedWeights):
        return 0
    return p.written_bytes() + p.backend.repeated_bytes(p.packing.program, p.settings)


def free_bytes(out: Path) -> int:
    """Return the free disk space at `out`, bytes."""
    above = (p for p in out.absolute().parents if p.is_dir())
    return shutil.disk_usage(next(above)).free


def check_space(p: Prepared, out: Path) -> None:
    """Raise EngineError if the weights do not fit the disk."""
    weights, free = disk_bytes(p), free_bytes(out)
    need = weights + OTHER_BYTES
    if weights and free < need:
        link = "" if p.backend.packs_weights or p.drafter else ", use --link-weights"
        raise EngineError(
            f"{out.parent}: the engine needs {size_text(need)} ({size_text(weights)} of weights), "
            f"{size_text(free)} are free; make room{link} or choose another --out"
        )


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A context with a temporary folder that becomes `out` at the end, or is removed."""
    folder = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = new_folder(out.parent, f".{out.name}{artefact.BUILDING}")
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
