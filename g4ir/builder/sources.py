"""Locates a build's inputs: spec, checkpoint, draft model, adapters and side files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from g4ir.chat.tokenizer_file import read_tokenizer
from g4ir.engine.prompts import read_defaults
from g4ir.engine.tokenizer_index import INDEX, index_file
from g4ir.errors import InputError, SpecError
from g4ir.model.media import Media, find_media
from g4ir.ops.types import torch_dtype
from g4ir.plan import resolve
from g4ir.plan.options import BuildConfig, BuildOptions
from g4ir.spec.record import SUFFIXES, Spec, diff_specs, load_spec, need_model, spec_names
from g4ir.weights.adapter import Adapter, lies_in, with_adapters
from g4ir.weights.checkpoint import GENERATION, TOKENIZER, Checkpoint
from g4ir.weights.origin import (
    GgufFile,
    Origin,
    adjacent_drafter,
    existing_origin,
    find_origin,
    need_snapshot,
    snapshot_of,
)
from g4ir.weights.random import random_weights

log = logging.getLogger(__name__)

#: key paths of `Text` that only images use
OF_PICTURES = ("text.use_bidirectional_attention",)
_SEEN = ("vision.", "tokens.boi", "tokens.eoi", "tokens.pad")
#: kind of media -> spec keys on which its soft tokens depend
OF_MEDIA = {
    "image": (*_SEEN, "tokens.image"),
    "video": (*_SEEN, "tokens.video"),
    "audio": ("audio.", "tokens.audio", "tokens.boa", "tokens.eoa", "tokens.pad"),
}


@dataclass(frozen=True)
class DrafterSource:
    """A draft model's spec, and its checkpoint directory or GGUF file (`path`); None for random
    weights, for a spec in a dry run, and if the weights are not in the local hub cache."""

    spec: Spec
    path: Path | None


@dataclass(frozen=True)
class Sources:
    """Inputs of a build. `origin`, the checkpoint directory or GGUF file, is None for random
    weights (`seed`), and if the weights are not in the local hub cache. `side_files` are read in a
    thread while weights are packed, since a GGUF file's take seconds."""

    spec: Spec
    origin: Origin | None
    seed: int | None
    drafter: DrafterSource | None
    adapters: tuple[Adapter, ...]
    side_files: Future[Mapping[str, bytes]]

    def absent(self) -> list[Callable[[], object]]:
        """Return a check for each model whose weights are not in the local hub cache; it raises
        InputError, with the command that downloads them if there is one."""
        checks: list[Callable[[], object]] = []
        if self.seed is None and self.origin is None:
            checks.append(partial(need_snapshot, self.spec))
        if self.seed is None and self.drafter and self.drafter.path is None:
            checks.append(partial(need_snapshot, self.drafter.spec, "--drafter DIR"))
        return checks

    def media(self, o: BuildOptions) -> Media:
        """Return the media of the build; SpecError if the checkpoint's towers do not match the
        spec."""
        asked = o.media if isinstance(o.media, str) else tuple(o.media)
        sizes = o.image_budgets, o.audio_seconds
        if not self.origin:
            return find_media(self.spec, asked, *sizes)
        kinds = self.origin.kinds(asked, self.spec)
        media = find_media(self.spec, kinds, *sizes, self.origin.extractor())
        if media.kinds and self.origin.says_towers:
            keys = tuple(key for kind in media.kinds for key in OF_MEDIA[kind])
            _check_agreed(self.spec, self.origin, keys)
        return media

    def checkpoint(self, config: BuildConfig) -> Checkpoint | None:
        """Open the checkpoint, with the adapters merged; None without one."""
        if not self.origin:
            return None
        opened = self.origin.open(self.spec, config.media.kinds, config.dtype)
        return with_adapters(opened, self.spec, self.adapters)

    def weights(self, config: BuildConfig, opened: Checkpoint | None) -> Checkpoint:
        """Return the weights of the engine and its draft model; without a checkpoint random
        ones."""
        dtype, seed = torch_dtype(config.dtype), self.seed or 0
        weights = opened or random_weights(self.spec, seed, dtype)
        if not self.drafter:
            return weights
        spec, path = self.drafter.spec, self.drafter.path
        drafter = find_origin(path).open(spec, (), config.dtype) if path else None
        return weights.with_drafter(drafter or random_weights(spec, seed, dtype))


def find_sources(spec: Spec | None, o: BuildOptions, dry: bool) -> Sources:
    """Locate the inputs of a build; without a spec, it is read from the checkpoint. InputError or
    SpecError for options or files that contradict each other or cannot be read."""
    _check_exclusive(spec, o)
    origin = _origin(spec, o)
    agreed = agreed_spec(spec, origin) if origin else spec
    assert agreed
    return Sources(
        agreed,
        origin,
        o.random_weights,
        _drafter(agreed, origin, o, dry),
        _adapters(o, origin),
        _begin(partial(checked_side_files, agreed, origin, True) if origin else dict),
    )


def _check_exclusive(spec: Spec | None, o: BuildOptions) -> None:
    """Raise InputError for mutually exclusive weight options."""
    checkpoint, seed = o.checkpoint, o.random_weights
    if o.mmproj is not None and (checkpoint is None or spec is None):
        why = "it goes with --checkpoint FILE.gguf and, since no GGUF file has a tower's config"
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


def _origin(spec: Spec | None, o: BuildOptions) -> Origin | None:
    """Return the checkpoint; None for random weights, and if none is given and the local hub cache
    has none."""
    if o.random_weights is not None:
        return None
    if o.checkpoint is not None:
        return existing_origin(o.checkpoint, o.mmproj)
    snapshot = snapshot_of(spec) if spec else None
    return find_origin(snapshot) if snapshot else None


def agreed_spec(spec: Spec | None, origin: Origin, images: bool = True) -> Spec:
    """Return the spec, or without one the checkpoint's. SpecError if the text part differs from the
    checkpoint's config; image-only fields are compared if `images`."""
    if spec is None:
        return need_model(origin.spec())
    _check_agreed(spec, origin, ("text.",), origin.spec_only + (() if images else OF_PICTURES))
    return spec


def shipped_variant(origin: Origin) -> Spec | None:
    """Return the shipped variant with a vision tower whose text model is that of `origin`; None
    unless there is exactly one."""
    how = origin.spec(), ("text.",), origin.spec_only
    variants = (load_spec(name) for name in spec_names())
    fitting = [v for v in variants if v.vision and not _differing(v, *how)]
    return fitting[0] if len(fitting) == 1 else None


def _differing(
    spec: Spec, stated: Spec, keys: tuple[str, ...], free: tuple[str, ...]
) -> list[tuple[str, object, object]]:
    rows = diff_specs(spec, stated)
    return [r for r in rows if r[0].startswith(keys) and r[0] not in free]


def _check_agreed(
    spec: Spec, origin: Origin, keys: tuple[str, ...], free: tuple[str, ...] = ()
) -> None:
    """Raise SpecError if the checkpoint's config differs in these keys."""
    if rows := _differing(spec, origin.spec(), keys, free):
        lines = "\n".join(f"  {key}: spec {a!r}, checkpoint {b!r}" for key, a, b in rows)
        fix = "give a checkpoint of this spec, in a build leave the spec out, or correct one"
        raise SpecError(f"spec {spec.name} and {origin.stated} differ; {fix}:\n{lines}")


def _drafter(
    model: Spec, origin: Origin | None, o: BuildOptions, dry: bool
) -> DrafterSource | None:
    """Return the requested draft model; InputError or SpecError if it does not exist or belongs to
    another model. A `dry` run needs no weights."""
    if o.drafter in resolve.NO_DRAFTER:
        return None
    if o.drafter == resolve.DEFAULT and isinstance(origin, GgufFile):
        o = replace(o, drafter=adjacent_drafter(origin.path) or o.drafter)
    random, path = o.random_weights is not None, Path(str(o.drafter))
    default, is_spec = o.drafter == resolve.DEFAULT, path.suffix in SUFFIXES
    if is_spec and not random and not dry:
        fix = "give its checkpoint's directory, or --random-weights SEED for both models"
        raise InputError(f"--drafter {o.drafter}: a spec has no weights; {fix}")
    if random and not (is_spec or default):
        why = "with --random-weights the draft model's weights are random too"
        raise InputError(f"--drafter {o.drafter}: {why}; give `default` or its spec FILE.yaml")
    spec = resolve.drafter_spec(model, o.drafter)
    if random or is_spec:
        return DrafterSource(spec, None)
    if not default and origin:
        _check_vocabulary(origin, find_origin(path))
    return DrafterSource(spec, snapshot_of(spec) if default else path)


def _check_vocabulary(model: Origin, drafter: Origin) -> None:
    """Raise InputError if a draft model's tokenizer has another id for a token of the model's, or
    lacks most of its tokens."""
    ours, theirs = model.vocabulary(), drafter.vocabulary()
    other = next((t for t, i in theirs.items() if t in ours and ours[t] != i), None)
    if other is not None:
        ids = f"has id {theirs[other]} there and {ours[other]} in {model.path}"
        fix = "give the draft model of this model"
        raise InputError(f"--drafter {drafter.path}: token {other!r} {ids}; {fix}")
    if ours and theirs and len(ours.keys() & theirs.keys()) * 2 < len(ours):
        fix = f"most tokens of {model.path} are not in it; give the draft model of this model"
        raise InputError(f"--drafter {drafter.path}: another tokenizer: {fix}")


def _adapters(o: BuildOptions, origin: Origin | None) -> tuple[Adapter, ...]:
    """Return the adapters to merge; warns about one in the checkpoint's directory that is not
    merged."""
    paths = (o.adapter,) if isinstance(o.adapter, str | Path) else o.adapter
    adapters = tuple(map(Adapter.of, paths))
    folder = origin.path if origin and origin.path.is_dir() else None
    unmerged = lies_in(folder) if folder else None
    if unmerged and folder not in [a.path for a in adapters]:
        message = "%s: holds a LoRA adapter (%s), which is not merged; --adapter %s merges it"
        log.warning(message, folder, unmerged, folder)
    return adapters


def _begin(function: Callable[[], Mapping[str, bytes]]) -> Future[Mapping[str, bytes]]:
    """Start a function in a new thread; return its future result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


def checked_side_files(spec: Spec, origin: Origin, indexed: bool = False) -> dict[str, bytes]:
    """Return a checkpoint's side files by name (tokenizer, configs), with the tokenizer's index if
    `indexed` and it can be indexed; raises if tokenizer.json or generation_config.json is
    invalid."""
    side, index = origin.side_files(), None
    if TOKENIZER in side and indexed:
        index = index_file(side[TOKENIZER], spec.text.vocab_size)
    # A file that could be indexed has passed the checks of the tokenizers library.
    if TOKENIZER in side and not index:
        read_tokenizer(origin.stated_at(TOKENIZER), side[TOKENIZER])
    if GENERATION in side:
        path, keys = origin.stated_at(GENERATION), origin.generation_keys
        read_defaults(path, spec.text.vocab_size, side[GENERATION], keys)
    return side | ({INDEX: index} if index else {})
