"""Exports the model of an engine or a checkpoint to Hugging Face or GGUF files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from g4ir.artefact.directory import is_engine, refuse_options
from g4ir.engine.engine import Engine
from g4ir.engine.prompts import SETTINGS, Defaults, read_defaults
from g4ir.errors import InputError
from g4ir.ir.graph import Value
from g4ir.model.media import AUDIO, PICTURES, find_media
from g4ir.model.names import CODES, SCALES, checkpoint_name
from g4ir.model.tensors import media_tensors
from g4ir.model.text import build_program
from g4ir.ops import OPS
from g4ir.ops.codecs import dequantize_codes
from g4ir.ops.types import torch, torch_dtype
from g4ir.plan.resolve import find_dtype
from g4ir.quant.rewrite import schemes_of, weights_of
from g4ir.spec.parts import DTYPES, Tokens
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.progress import Progress, no_progress
from g4ir.weights.adapter import Adapter, with_adapters
from g4ir.weights.checkpoint import GENERATION, SIDE_FILES, TOKENIZER, Checkpoint
from g4ir.weights.checkpoint import GGUF as GGUF_SUFFIX
from g4ir.weights.formats.base import StoredWeight
from g4ir.weights.gguf.write import WRITTEN, write_gguf
from g4ir.weights.origin import GgufFile, existing_origin, find_model
from g4ir.weights.write import check_empty, write_checkpoint

from .load import open_for_weights
from .sources import agreed_spec, checked_side_files

FORMATS = (HF, GGUF) = ("hf", "gguf")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """A model to export: `spec` without the towers that are left out; `kinds` of media that it
    keeps."""

    spec: Spec
    source: Checkpoint
    kinds: tuple[str, ...]
    side_files: Mapping[str, bytes]
    dtype: str


def engine_weights(engine: Engine) -> Checkpoint:
    """Return an engine's weights as a Checkpoint, with the values that the engine computes with."""
    named = weights_of(engine.spec)
    schemes = {
        param: scheme
        for param, scheme in schemes_of(engine.config.quant, engine.spec).items()
        if scheme.group or not engine.share.cuts_rows(param, named[param])
    }
    program = build_program(engine.spec, dtype=engine.dtype, media=engine.media)
    weights = {}
    for v in program.params().values():
        scheme, parts = schemes.get(v.name), {"": partial(_values, engine, v)}
        if scheme:
            types = OPS["quantize"].infer_types((v.type,), scheme.attrs(engine.dtype))
            for suffix, t in zip((CODES, SCALES), types, strict=True):
                parts[suffix] = partial(_part, engine, Value(f"{v.name}{suffix}", t))
        shape = tuple(map(int, v.type.shape))
        weights[checkpoint_name(v.name)] = StoredWeight(shape, parts, scheme=scheme)
    defaults = {str(name): float(value) for name, value in engine.facts.notes.defaults.items()}
    dtype = torch_dtype(engine.dtype)
    return Checkpoint(engine.path, weights, dtype, defaults=defaults, opened=(engine,))


def _part(engine: Engine, part: Value, rows: torch.Tensor | None) -> torch.Tensor:
    return engine.share.join_parts(part, lambda rank, local: engine.unpacked(rank).part(local))


def _values(engine: Engine, v: Value, rows: torch.Tensor | None) -> torch.Tensor:
    """Return a weight, dequantised; with `rows`, these rows of a table, which are read alone if the
    engine stores the table row by row, as it is or quantised."""
    if rows is None:
        return engine.param(v.name)
    source, params = engine.unpacked().source, engine.program.params()
    parts = (f"{v.name}{CODES}", f"{v.name}{SCALES}")
    if v.name in params:
        return source.rows(v.name, rows)
    if all(part in params for part in parts):
        codes, scales = (source.rows(part, rows) for part in parts)
        return dequantize_codes(codes, scales, torch_dtype(engine.dtype))
    return engine.param(v.name)[rows]


def export(
    model: Engine | str | Path,
    out: str | Path,
    *,
    format: str = HF,
    spec: Spec | str | None = None,
    adapter: str | Path | Iterable[str | Path] = (),
    mmproj: str | Path | None = None,
    media: str | Sequence[str] = "all",
    dtype: str | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write a model to `out`, and return the path of the directory or GGUF file.

    out: an absent or empty directory; for `gguf` any directory, or an absent FILE.gguf.

    model: an engine or its directory, which need not run here; or a checkpoint directory, GGUF
    file, or Hugging Face id or variant whose weights are in the local cache, with the adapters and
    towers that `adapter` and `mmproj` give it, and a `spec` if its config is incomplete.
    format: `hf`, a directory that transformers loads, or `gguf`, a file of the text model, in the
    directory if `out` is one.
    media: for `hf`, kinds whose towers are written too: `all` that are there, `none`, or a list.
    dtype: of weights, by default the engine's, or the checkpoint's config's; of a GGUF file F32,
    F16, BF16 (default), Q8_0 or Q4_0.
    Quantised weights are dequantised, unless `dtype` is a GGUF type with the same quantised values.
    Raises a G4Error before anything is left at `out`.
    """
    if format not in FORMATS:
        raise InputError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    out, kind = Path(out), _checked_dtype(Path(out), format, dtype)
    adapters = (adapter,) if isinstance(adapter, str | Path) else tuple(adapter)
    media = media if format == HF else "none"
    if isinstance(model, Spec):
        raise InputError(f"spec {model.name} has no weights; give its checkpoint, with spec=")
    where = model.path if isinstance(model, Engine) else Path(model)
    if isinstance(model, Engine) or is_engine(where):
        flags = {"--spec": spec, "--adapter": adapters, "--mmproj": mmproj}
        refuse_options(where, [flag for flag, value in flags.items() if value])
        exported = _of_engine(model, media)
    else:
        exported = _of_checkpoint(model, spec, adapters, mmproj, media)
    if TOKENIZER not in exported.side_files:
        log.warning("%s has no %s: it is exported without a tokenizer", where, TOKENIZER)
    try:
        return _written(exported, out, format, kind, progress)
    finally:
        if not isinstance(model, Engine):
            exported.source.close()


def _checked_dtype(out: Path, format: str, dtype: str | None) -> str:
    """Return the requested dtype; by default "" (the model's own), or BF16 for a GGUF file.
    InputError for a dtype that the format does not support, and, for Hugging Face files, unless the
    directory is absent or empty."""
    if format == HF:
        check_empty(out)
        return find_dtype(dtype, DTYPES) if dtype else ""
    kind = (dtype or "BF16").upper()
    if kind not in WRITTEN:
        raise InputError(f"--dtype {dtype}: a GGUF file takes {', '.join(WRITTEN)}")
    return kind


def _written(exported: Exported, out: Path, format: str, kind: str, progress: Progress) -> Path:
    if format == GGUF:
        alone = out.suffix == GGUF_SUFFIX
        file = out if alone else out / f"{exported.spec.name}-{kind}{GGUF_SUFFIX}"
        write_gguf(file, exported.spec, exported.source, kind, exported.side_files, progress)
        if lost := [*_differences(exported.spec, exported.side_files, GgufFile(file))]:
            message = "%s: GGUF cannot express these generation defaults; set them at run time: %s"
            log.warning(message, file, "; ".join(lost))
        return file
    kind = kind or exported.dtype
    return write_checkpoint(
        out,
        replace(exported.spec, dtype=kind),
        exported.source,
        media=exported.kinds,
        dtype=torch_dtype(kind),
        side_files=exported.side_files,
        progress=progress,
    )


def _differences(spec: Spec, side_files: Mapping[str, bytes], file: GgufFile) -> Iterator[str]:
    """Yield a text for each generation default that differs in the exported GGUF file."""
    want = _settings(spec, side_files)
    got = _settings(file.spec(), file.side_files())
    for name in dict.fromkeys((*want, *got)):
        value, other = want.get(name), got.get(name)
        if value != other:
            yield f"{name} {_value_text(value)} (in the file: {_value_text(other)})"


def _settings(spec: Spec, side_files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return a model's generation defaults by the keys of generation_config.json."""
    raw = side_files.get(GENERATION)
    defaults = read_defaults(Path(GENERATION), spec.text.vocab_size, raw) if raw else Defaults()
    names = {name: key for key, (name, *_) in SETTINGS.items()}
    stop = spec.tokens.eos if defaults.stop is None else defaults.stop
    values = ((names[name], value) for name, value in defaults.sampling.items())
    return {
        # Rounded to six significant digits, since GGUF stores float32.
        **{k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values},
        **dict.fromkeys(defaults.unused, "set"),
        "eos_token_id": sorted({*stop}),
        "suppress_tokens": sorted({*defaults.suppress}),
    }


def _value_text(value: Any) -> str:
    return "none" if value in (None, []) else str(value)


def _of_engine(model: Engine | str | Path, media: str | Sequence[str]) -> Exported:
    engine = model if isinstance(model, Engine) else open_for_weights(model)
    kinds = engine.media.kinds if media == "all" else find_media(engine.spec, media).kinds
    if absent := [kind for kind in kinds if kind not in engine.media.kinds]:
        raise InputError(
            f"--media {','.join(absent)}: {engine.label} was built without it; leave it out"
        )
    paths = {name: engine.path / name for name in SIDE_FILES}
    side = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    spec = _of_kinds(engine.spec, kinds)
    program = build_program(engine.spec, dtype=engine.dtype, media=engine.media)
    params = {checkpoint_name(v.name): v for v in program.params().values()}
    for name in media_tensors(spec, kinds):
        engine.unpacked().check(params[name])
    return Exported(spec, engine_weights(engine), kinds, side, engine.dtype)


def _of_checkpoint(
    model: str | Path,
    spec: Spec | str | None,
    adapters: Iterable[str | Path],
    mmproj: str | Path | None,
    media: str | Sequence[str],
) -> Exported:
    variant, path = find_model(model, "its checkpoint")
    origin = existing_origin(path, mmproj)
    requested = load_spec(spec) if isinstance(spec, str) else spec or variant
    agreed = agreed_spec(requested, origin)
    kinds = find_media(agreed, origin.kinds(media, agreed), extractor=origin.extractor()).kinds
    exported_spec = _of_kinds(agreed, kinds)
    source = origin.open(agreed, kinds, agreed.dtype)
    source = with_adapters(source, agreed, map(Adapter.of, adapters))
    return Exported(exported_spec, source, kinds, checked_side_files(agreed, origin), agreed.dtype)


def _of_kinds(spec: Spec, kinds: Sequence[str]) -> Spec:
    """Return the spec restricted to these media kinds; warns about towers that are left out."""
    parts = {"vision": not {*PICTURES}.isdisjoint(kinds), "audio": AUDIO in kinds}
    absent = [part for part, present in parts.items() if getattr(spec, part) and not present]
    for part in absent:
        log.warning("the %s tower is not exported", part)
    tokens = spec.tokens if kinds else Tokens(spec.tokens.bos, spec.tokens.eos, spec.tokens.pad)
    removed: dict[str, Any] = dict.fromkeys(absent)
    return replace(spec, tokens=tokens, **removed)
