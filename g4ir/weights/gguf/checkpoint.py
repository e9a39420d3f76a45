"""Opens GGUF files as a checkpoint of a spec.

Plain tensors are views of the mapped file; blocks are converted when they are read, of a table only
the rows in use. Towers are in a file of their own (`mmproj`), as llama.cpp's converter writes it;
tensors of another layout are put back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import Any

from g4ir.errors import WeightsError
from g4ir.model.media import AUDIO, KINDS, PICTURES
from g4ir.model.names import HEAD, NORM, checkpoint_name
from g4ir.model.tensors import CLIP_BOUNDS, Shape, dead_tensors, media_tensors, text_tensors
from g4ir.ops.finite import cast
from g4ir.ops.types import TORCH_NAMES, torch
from g4ir.quant.rewrite import weights_of
from g4ir.spec.record import Spec
from g4ir.weights.checkpoint import Checkpoint, check_norms, dtype_of
from g4ir.weights.formats.base import Files, StoredWeight, quantised_weight
from g4ir.weights.match import Mismatch, absent_value, report
from g4ir.weights.tensorfile import FLOATS, broken, quoted

from .blocks import CODED, DENSE, Part, by_pieces
from .container import (
    HALVES,
    ROPE,
    TABLES,
    TOWERS,
    Array,
    Container,
    Tensor,
    architecture,
    known_names,
    shortest,
)

log = logging.getLogger(__name__)

READ = (*FLOATS, *CODED, *DENSE)
Tensors = tuple[Tensor, ...]  # whose rows follow each other in a weight


def open_gguf(file: Container, spec: Spec, dtype: str) -> Checkpoint:
    """Return the checkpoint that a file holds; reads no tensor data but norms. Weights that graphs
    do not take quantised have `dtype`."""
    live, ignored, problems = _sorted(file, spec)
    names = known_names(spec.text.num_hidden_layers)
    stored = {bare: name for name, bare in reversed(names.items())}
    defaults = _checked(file, spec, live, text_tensors(spec), problems, stored)
    dense = Counter(t.stored.name for ts in live.values() for t in ts if t.stored.name in DENSE)
    if dense:
        shown = ", ".join(f"{n} of {kind}" for kind, n in sorted(dense.items()))
        what = "%s: tensors with minima become %s, as no codes of a form say the same: %s"
        log.warning(what, file.path, TORCH_NAMES[dtype], shown)
    files = Files(file.path.parent)
    taken = {checkpoint_name(param) for param in weights_of(spec)}
    plain = {name: (t[0].header, t[0].entry) for name, t in live.items() if _is_plain(t)}
    weights = {name: files.weight(found) for name, found in plain.items()}
    for name in live.keys() - plain.keys():
        weights[name] = Blocks(files, live[name], dtype).weight(quantised=name in taken)
    added = architecture(file).get("norms", 0.0)
    for name in (n for n in weights if added and NORM.fullmatch(n)):
        weights[name] = _less(weights[name], added)
    made = Checkpoint(
        file.path.parent, weights, dtype_of(plain), file.headers, ignored, defaults, (files,)
    )
    check_norms(spec, made, file.path, added)
    return made


def _less(weight: StoredWeight, added: float) -> StoredWeight:
    """Return a weight of which a file holds the sum with a number, in fp32: exact where it fits."""
    read = weight.parts[""]
    return replace(weight, parts={"": lambda rows: read(rows).float() - added})


def _mismatch(file: Container, name: str, text: str, fix: str = "gguf") -> Mismatch:
    return Mismatch(file.path.name, name, text, fix)


def _checked(
    file: Container,
    spec: Spec,
    live: Mapping[str, Tensors],
    shapes: Mapping[str, Shape],
    problems: list[Mismatch],
    stored: Mapping[str, str],
    fix: str = "gguf",
) -> dict[str, float]:
    """Return the defaults of absent tensors. WeightsError for these problems, for tensors that are
    missing (under their `stored` names), and for types and shapes that differ."""
    absent = {n: absent_value(n) for n in shapes if n not in live}
    for bare in (name for name, value in absent.items() if value is None):
        text = f"missing: expected shape {[*shapes[bare]]}"
        own = "tie" if bare == HEAD else fix
        problems.append(_mismatch(file, stored.get(bare, bare), text, own))
    for bare, tensors in live.items():
        problems += _misfits(tensors, _stored_shape(bare, shapes[bare]), fix)
    if problems:
        raise WeightsError(report(file.path, spec, problems))
    return {name: value for name, value in absent.items() if value is not None}


def _sorted(
    file: Container, spec: Spec
) -> tuple[dict[str, Tensors], dict[str, str], list[Mismatch]]:
    """Sort the tensors into live (by the checkpoint's name), ignored (name -> why), and unknown."""
    known, dead = known_names(spec.text.num_hidden_layers), dead_tensors(spec)
    valid = text_tensors(spec)
    problems: list[Mismatch] = []
    places: dict[str, list[str]] = {}
    ignored: dict[str, str] = {}
    for name in file.tensors:
        bare = known.get(name, "")
        if bare in valid:
            places.setdefault(bare, []).append(name)
        elif bare in dead:
            ignored[name] = "K or V of a layer that reads another layer's K and V"
        elif name.startswith(TOWERS):
            ignored[name] = "part of a tower, which this engine leaves out"
        elif name != ROPE:
            problems.append(_mismatch(file, name, "not in the spec"))

    def second(name: str) -> bool:
        return name.endswith(HALVES[1])

    for names in places.values():
        if len(names) != len({second(n) for n in names}):
            problems.append(_mismatch(file, names[1], f"the same weight as {quoted(names[0])}"))
        names.sort(key=second)
    live = {bare: tuple(file.tensors[n] for n in names) for bare, names in places.items()}
    return live, ignored, problems


def _misfits(tensors: Tensors, wanted: Shape, fix: str) -> Iterator[Mismatch]:
    name = tensors[0].entry.name
    shape = _stacked(tensors)
    text, kind = "", "type"
    if refused := [t for t in tensors if t.stored.name not in READ]:
        name = refused[0].entry.name
        text = f"type {refused[0].stored} is not read; {', '.join(READ)} are"
    elif len(wanted) == 1 and not _is_plain(tensors):
        text = f"expected {' or '.join(FLOATS)}, found {tensors[0].stored}"
    elif shape != wanted:
        found = " and ".join(f"{t.stored} {list(t.shape)}" for t in tensors)
        text, kind = f"expected shape {list(wanted)}, found {quoted(found)}", fix
    if text:
        yield Mismatch(tensors[0].header.path.name, name, text, kind)


def _stacked(tensors: Tensors) -> Shape | None:
    """Return the shape of a weight; None where its tensors do not fit each other."""
    shapes = [t.shape for t in tensors]
    if len(shapes) == 1:
        return shapes[0]
    if min(map(len, shapes)) < 2 or len({(*s[:-2], s[-1]) for s in shapes}) > 1:
        return None
    return (*shapes[0][:-2], sum(s[-2] for s in shapes), shapes[0][-1])


def _is_plain(tensors: Tensors) -> bool:
    return len(tensors) == 1 and tensors[0].stored.dtype in FLOATS


@dataclass(frozen=True)
class Blocks:
    """The tensors of one weight; its values have the engine's `dtype`."""

    files: Files
    tensors: Tensors
    dtype: str

    def weight(self, quantised: bool) -> StoredWeight:
        shape = _stacked(self.tensors)
        assert shape is not None
        release = partial(self.files.release, [(t.header, t.entry) for t in self.tensors])
        kinds = {t.stored.name for t in self.tensors}
        coded = CODED.get(kinds.pop()) if quantised and len(kinds) == 1 else None
        if coded is None:
            return StoredWeight(shape, {"": partial(self._joined, None)}, release)
        codes, scales = (partial(self._joined, part) for part in (coded.codes, coded.scales))
        return quantised_weight(coded.scheme, shape, codes, scales, release)

    def _joined(self, part: Part | None, rows: torch.Tensor | None) -> torch.Tensor:
        """Return what `part` makes of the blocks, values for None."""
        made = [
            self._values(t, rows) if part is None else self._converted(t, part, rows)
            for t in self.tensors
        ]
        return made[0] if len(made) == 1 else torch.cat(made, -2)

    def _values(self, t: Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        kind, name = t.stored.name, t.entry.name
        if kind in FLOATS:
            return cast(self.files.rows((t.header, t.entry), rows), self.dtype, name)
        numbers = CODED[kind].numbers if kind in CODED else DENSE[kind]
        return self._converted(t, lambda b: cast(numbers(b), self.dtype, name), rows)

    def _converted(self, t: Tensor, convert: Part, rows: torch.Tensor | None) -> torch.Tensor:
        raw = self.files.rows((t.header, t.entry), rows)
        made = by_pieces(raw.reshape(-1, t.stored.nbytes), convert)
        if made.is_floating_point() and not bool(made.isfinite().all()):
            what = f"tensor {quoted(t.entry.name)}: a scale is NaN or infinite"
            raise broken(t.header.path, what)
        each = raw.shape[-1] // t.stored.nbytes
        return made.reshape(*raw.shape[:-1], each * made.shape[-1])


#: bound of a clipped linear -> its param's
_BOUNDS = {bound: bound.replace("put_", "_") for bound in CLIP_BOUNDS}


def with_towers(
    text: Checkpoint,
    file: Container,
    spec: Spec,
    kinds: Iterable[str],
    dtype: str,
) -> Checkpoint:
    """Return a checkpoint that holds the towers of these kinds of media too; reads no tensor
    data."""
    kinds = set(kinds)
    _check_metadata(file, spec, kinds)
    shapes, known = media_tensors(spec, kinds), _known(spec)
    live = {
        bare: (tensor,)
        for name, tensor in file.tensors.items()
        for bare in known.get(name, ())
        if bare in shapes
    }
    possible = media_tensors(spec, KINDS).keys()
    problems = [
        _mismatch(file, name, "not in the spec", "mmproj")
        for name in file.tensors
        if possible.isdisjoint(known.get(name, ()))
    ]
    defaults = _checked(file, spec, live, shapes, problems, {}, "mmproj")
    files = Files(file.path.parent)
    made = {
        bare: _published(Blocks(files, tensors, dtype), bare, shapes[bare])
        for bare, tensors in live.items()
    }
    return replace(
        text,
        weights={**text.weights, **made},
        defaults={**text.defaults, **defaults},
        headers=(*text.headers, *file.headers),
        opened=(*text.opened, files),
    )


def _known(spec: Spec) -> dict[str, tuple[str, ...]]:
    """Return name in a file -> names in a checkpoint, of which a spec has one."""
    known = {name: tuple(map(checkpoint_name, ps)) for name, ps in TABLES["towers"].items()}
    for tower, table in TABLES["tower_layers"].items():
        ends = dict(table["plain"])
        for name, param in table["linears"].items():
            ends[f"{name}.weight"] = param
            ends |= {f"{name}.{bound}": f"{param}.{own}" for bound, own in _BOUNDS.items()}
        for i in range(getattr(getattr(spec, tower), "num_hidden_layers", 0)):
            for end, param in ends.items():
                name = f"{table['prefix']}.{i}.{end}"
                known[name] = (checkpoint_name(f"{tower}.L{i}.{param}"),)
    return known


_PARTS = {"vision": PICTURES, "audio": (AUDIO,)}


def _check_metadata(file: Container, spec: Spec, kinds: set[str]) -> None:
    expected: dict[str, Any] = {"general.architecture": "clip"}
    projectors = TABLES["projectors"][spec.model_type]
    for (part, served), projector in zip(_PARTS.items(), projectors, strict=True):
        if kinds.intersection(served):
            expected[f"clip.{part}.projector_type"] = projector
            if heads := getattr(getattr(spec, part), "num_attention_heads", None):
                expected[f"clip.{part}.attention.head_count"] = heads
    for key, value in expected.items():
        if shortest(found := file.values.get(key)) != value:
            raise _contradiction(file, key, value, found)
    for name, value in (
        (("image_mean", 0), ("image_std", 1)) if kinds.intersection(PICTURES) else ()
    ):
        key = f"clip.vision.{name}"
        found = file.values.get(key)
        given = file.items(key) if isinstance(found, Array) and found.count == 3 else found
        if given not in (None, [value] * 3):
            raise _contradiction(file, key, [value] * 3, given)


def _contradiction(file: Container, key: str, expected: object, found: object) -> WeightsError:
    fix = "give the mmproj file of this variant"
    return file.wrong(key, f"expected {quoted(expected)}", found, fix)


#: rows of pixels: colours lie apart in the file, and side by side in a checkpoint
_PIXELS = (
    "patch_embedder.input_proj.weight",
    "patch_dense.weight",
    "patch_ln1.weight",
    "patch_ln1.bias",
)


def _stored_shape(bare: str, shape: Shape) -> Shape:
    if bare.endswith(CLIP_BOUNDS):
        return (1,)
    if bare.endswith("patch_embedder.input_proj.weight"):
        side = isqrt(shape[1] // 3)
        return (shape[0], 3, side, side)
    if bare.endswith("pos_embedding"):
        return (shape[1], shape[0], shape[2])
    return tuple(d for d in shape if d != 1) if bare.endswith("depthwise_conv1d.weight") else shape


def _as_published(t: torch.Tensor, bare: str, shape: Shape) -> torch.Tensor:
    if bare.endswith(_PIXELS):
        side = isqrt(shape[-1] // 3)
        return t.reshape(*shape[:-1], 3, side, side).movedim(-3, -1).reshape(shape)
    if bare.endswith("pos_embedding"):
        return t.movedim(0, 1)
    if bare.endswith("per_dim_scale"):  # y = softplus(x) there
        wide = t.double()
        return (wide + torch.log(-torch.expm1(-wide))).to(t.dtype)
    return t.reshape(shape)


def _published(stored: Blocks, bare: str, shape: Shape) -> StoredWeight:
    weight = stored.weight(quantised=False)

    def values(rows: torch.Tensor | None) -> torch.Tensor:
        return _as_published(weight.parts[""](rows), bare, shape)

    return StoredWeight(shape, {"": values}, weight.release)
