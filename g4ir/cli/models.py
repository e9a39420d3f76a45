"""Resolves MODEL arguments for verbs that need no weights: nothing is built or loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from g4ir.artefact.directory import Artefact, is_engine, open_artefact
from g4ir.plan.options import BuildOptions
from g4ir.plan.presets import Preset
from g4ir.quant.recipe import QuantConfig
from g4ir.quant.rewrite import checkpoint_quant_config
from g4ir.spec.record import SUFFIXES, Spec, drafter_names, load_spec, spec_names
from g4ir.weights.checkpoint import CONFIG, GGUF
from g4ir.weights.origin import AbsentWeights, Origin, cached_config, existing_origin, find_model


@dataclass(frozen=True)
class Model:
    """A resolved MODEL: its spec; the GGUF file or checkpoint directory (`origin`); the
    quantisation config of its weights; for an engine its directory."""

    spec: Spec
    origin: Origin | None = None
    quant: QuantConfig | None = None
    engine: Artefact | None = None


def any_spec(source: str) -> Spec:
    """Return the spec of a variant, a draft model, a YAML file, a config.json, or a model."""
    return load_spec(source) if source in drafter_names() else _stated(source)[0]


def named_model(word: str) -> Model:
    """Return an engine, or the description of a variant, a spec file, a GGUF file, a checkpoint
    directory or a Hugging Face id (of a variant, or in the local cache); reads headers, not
    weights."""
    folder = Path(word)
    nothing = folder.is_dir() and not (folder / CONFIG).is_file() and not [*folder.glob(f"*{GGUF}")]
    if is_engine(folder) or (nothing and not (folder / "snapshots").is_dir()):
        artefact = open_artefact(folder)
        return Model(artefact.spec, quant=artefact.config.quant, engine=artefact)
    spec, origin = _stated(word)
    return Model(spec, origin, _checkpoint_quant(spec, origin) if origin else None)


def without_quant(options: BuildOptions, preset: Preset, model: Model) -> BuildOptions:
    """Return options without `quant` if it is the preset's and the model is quantised already."""
    quant = preset.options.get("quant")
    same = model.quant and quant is not None and options.quant == quant
    return replace(options, quant=None) if same else options


def _stated(source: str) -> tuple[Spec, Origin | None]:
    if source in spec_names() or Path(source).suffix in SUFFIXES:
        return load_spec(source), None
    if Path(source).suffix == ".json":
        return Spec.from_hf(source), None
    try:
        origin = existing_origin(find_model(source, "")[1])
    except AbsentWeights:
        shipped = (spec for spec in map(load_spec, spec_names()) if spec.hub == source)
        if spec := next(shipped, None):
            return spec, None
        if (config := cached_config(source)) is None:
            raise
        origin = existing_origin(config.parent)
    return origin.spec(), origin


def _checkpoint_quant(spec: Spec, origin: Origin) -> QuantConfig | None:
    """Return the quantisation config of a checkpoint's weights; None if they are not quantised, and
    for a directory without safetensors."""
    if origin.path.is_dir() and not [*origin.path.glob("*.safetensors")]:
        return None
    opened = origin.open(spec, (), spec.dtype)
    opened.close()
    return checkpoint_quant_config(spec, opened.forms)
