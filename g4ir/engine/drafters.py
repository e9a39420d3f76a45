"""Finds the drafter of a build: its spec, and where its weights lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from g4ir.errors import InputError
from g4ir.model.draft import check_pair, shipped_drafter
from g4ir.ops.types import torch_dtype
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import SUFFIXES, Spec, load_spec
from g4ir.weights.checkpoint import CONFIG, GGUF, Checkpoint, WeightSource
from g4ir.weights.hub import hub_snapshot
from g4ir.weights.random import RandomCheckpoint

#: words for the drafter that belongs to the variant, and for none
DEFAULT, NONE = "default", "none"


@dataclass(frozen=True)
class FoundDrafter:
    """A drafter's spec, and the directory of its checkpoint; None: its weights are random."""

    spec: Spec
    path: Path | None

    def open(self, dtype: str, seed: int) -> WeightSource:
        """Return its weights, for an engine of this dtype."""
        if self.path is None:
            return RandomCheckpoint(self.spec, seed, torch_dtype(dtype))
        return Checkpoint.open(self.path, self.spec, (), dtype)


def find_drafter(model: Spec, o: BuildOptions, dry: bool = False) -> FoundDrafter | None:
    """Return the drafter that was asked for; InputError or SpecError where there is none such, or
    it drafts for another model. A `dry` run needs no weights."""
    if o.drafter is None or o.drafter == NONE:
        return None
    if o.link_weights:
        raise InputError(
            "--link-weights refers to one checkpoint, and --drafter is another; leave one out"
        )
    found = _found(model, o, dry)
    check_pair(model, found.spec)
    return found


def _found(model: Spec, o: BuildOptions, dry: bool) -> FoundDrafter:
    given, random = o.drafter, o.random_weights is not None
    if given == DEFAULT:
        spec = shipped_drafter(model)
        return FoundDrafter(spec, None if random else _cached(spec, dry))
    path = Path(str(given))
    if path.suffix in SUFFIXES:
        if not random and not dry:
            raise InputError(
                f"--drafter {given}: a spec has no weights; give its checkpoint's directory, or "
                f"--random-weights SEED"
            )
        return FoundDrafter(load_spec(path), None)
    if random:
        raise InputError(
            f"--drafter {given}: beside --random-weights the drafter's are random too; give "
            f"`default` or its spec FILE.yaml"
        )
    if path.suffix == GGUF:
        raise InputError(f"--drafter {given}: drafters are read from safetensors alone")
    if not (path / CONFIG).is_file():
        raise InputError(
            f"--drafter {given}: no directory with {CONFIG}; give a drafter's checkpoint, or "
            f"`default`"
        )
    return FoundDrafter(Spec.from_hf(path / CONFIG), path)


def _cached(spec: Spec, dry: bool) -> Path | None:
    found = hub_snapshot(spec.hub) if spec.hub else None
    if found is None and not dry:
        where = f"download them with `hf download {spec.hub}`, or " if spec.hub else ""
        raise InputError(
            f"--drafter default: no weights of {spec.hub or spec.name} in the local Hugging Face "
            f"cache; {where}give --drafter DIR"
        )
    return found
