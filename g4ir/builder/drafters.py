"""Finds the drafter of a build: its spec, and where its weights lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from g4ir.errors import InputError
from g4ir.model.draft import shipped_drafter
from g4ir.ops.types import torch_dtype
from g4ir.plan.options import BuildOptions
from g4ir.plan.resolve import DEFAULT, NO_DRAFTER, drafter_spec
from g4ir.spec.record import SUFFIXES, Spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.origin import need_snapshot, snapshot_of
from g4ir.weights.random import random_weights


@dataclass(frozen=True)
class FoundDrafter:
    """A drafter's spec, and the directory of its checkpoint; None: its weights are random."""

    spec: Spec
    path: Path | None

    def open(self, dtype: str, seed: int) -> Checkpoint:
        """Return its weights, for an engine of this dtype."""
        if self.path is None:
            return random_weights(self.spec, seed, torch_dtype(dtype))
        return Checkpoint.open(self.path, self.spec, (), dtype)


def find_drafter(model: Spec, o: BuildOptions, dry: bool = False) -> FoundDrafter | None:
    """Return the drafter that was asked for; InputError or SpecError where there is none such, or
    it drafts for another model. A `dry` run needs no weights."""
    if o.drafter in NO_DRAFTER:
        return None
    if o.link_weights:
        raise InputError(
            "--link-weights refers to one checkpoint, and --drafter is another; leave one out"
        )
    random, path = o.random_weights is not None, Path(str(o.drafter))
    found: Path | None = path
    if o.drafter == DEFAULT:
        own = shipped_drafter(model)
        if random:
            found = None
        else:
            found = snapshot_of(own) if dry else need_snapshot(own, "--drafter DIR")
    elif path.suffix in SUFFIXES:
        if not random and not dry:
            raise InputError(
                f"--drafter {o.drafter}: a spec has no weights; give its checkpoint's directory, "
                f"or --random-weights SEED"
            )
        found = None
    elif random:
        raise InputError(
            f"--drafter {o.drafter}: beside --random-weights the drafter's are random too; give "
            f"`default` or its spec FILE.yaml"
        )
    return FoundDrafter(drafter_spec(model, o.drafter), found)
