"""Opens GGUF files as a checkpoint of a spec.

Most plain tensors are views of the mapped file; blocks are converted on read, of a table only the
rows in use. Towers come from a separate file (`mmproj`), as llama.cpp's converter writes it; its
tensors are converted back to the layout of Hugging Face checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import Any

from g4ir.errors import WeightsError
from g4ir.model.media import AUDIO, KINDS, PICTURES
from g4ir.model.names import HEAD, NORM, checkpoint_name
from g4ir.model.tensors import CLIP_BOUNDS, Shape, dead_tensors, media_tensors, text_tensors
from g4ir.ops.codecs import FORMATS
from g4ir.ops.finite import cast
from g4ir.ops.types import torch
from g4ir.quant.rewrite import weights_of
from g4ir.spec.record import Spec
from g4ir.weights.checkpoint import Checkpoint, check_norms, dtype_of
from g4ir.weights.formats.base import Files, StoredWeight, checked_scales, quantised_weight
from g4ir.weights.match import FIXES, Mismatch, absent_value, report
from g4ir.weights.tensorfile import DOWNLOAD, FLOATS, broken, quoted

from .blocks import CODED, REQUANTISED, Part, by_pieces, relative_error
from .container import (
    CLIP,
    HALVES,
    KIND,
    ROPE,
    TABLES,
    TOWERS,
    Array,
    Container,
    Tensor,
    architecture,
    checkpoint_names,
    shortest,
)

log = logging.getLogger(__name__)

READ = (*FLOATS, *CODED)
#: maximum number of blocks on which the error of a type is measured
SAMPLE = 256
Tensors = tuple[Tensor, ...]  # concatenated by rows to one weight


def open_gguf(file: Container, spec: Spec, dtype: str) -> Checkpoint:
    """Open a file as a checkpoint; reads no tensor data but norms, and some blocks of types that
    are quantised again. Weights that graphs cannot read as codes are dequantised to `dtype`.
    WeightsError if the file does not fit the spec."""
    shapes = text_tensors(spec) | (media_tensors(spec, ()) if spec.drafter else {})
    live, ignored, problems = _sorted(file, spec, shapes)
    names = checkpoint_names(spec.text.num_hidden_layers, architecture(file))
    stored = {bare: name for name, bare in reversed(names.items())}
    defaults = _checked(file, spec, live, shapes, problems, stored)
    files = Files(file.path.parent)
    # A draft model's weights are dequantised.
    quantised = set() if spec.drafter else {checkpoint_name(param) for param in weights_of(spec)}
    _log_errors(file, {name: t for name, t in live.items() if name in quantised}, files)
    plain = {name: (t[0].header, t[0].entry) for name, t in live.items() if _is_plain(t)}
    weights = {name: files.weight(tensor) for name, tensor in plain.items()}
    for name in live.keys() - plain.keys():
        weights[name] = Blocks(files, live[name], dtype).weight(quantised=name in quantised)
    added = architecture(file).get("norms", 0.0)
    for name in (n for n in weights if added and NORM.fullmatch(n)):
        weights[name] = _less(weights[name], added)
    checkpoint = Checkpoint(
        file.path.parent, weights, dtype_of(plain), file.headers, ignored, defaults, (files,)
    )
    check_norms(spec, checkpoint, file.path, added)
    return checkpoint


def _log_errors(file: Container, live: Mapping[str, Tensors], files: Files) -> None:
    """Log, once for each type that is quantised again, the new format and the error on blocks of
    one tensor."""
    first = {t.stored.name: t for ts in live.values() for t in ts if t.stored.name in REQUANTISED}
    for kind, t in first.items():
        scheme = CODED[kind].scheme
        raw = files.rows((t.header, t.entry), None).reshape(-1, t.stored.nbytes)[:SAMPLE]
        fmt = FORMATS[scheme.form]
        bits = 8 * fmt.layout.nbytes / fmt.layout.values + 16 * fmt.scales / scheme.group
        message = "%s: %s is stored as %s in groups of %d (%.2f bits a weight), relative error %.3f"
        error = relative_error(kind, raw)
        log.warning(message, file.path, kind, scheme.form, scheme.group, bits, error)


def _less(weight: StoredWeight, added: float) -> StoredWeight:
    """Subtract `added` from a stored weight, in fp32: some files store norms as w + 1."""
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
    """Return the default values of absent tensors. WeightsError for `problems`, missing tensors
    (under their `stored` names), and wrong types and shapes."""
    absent = {n: absent_value(n) for n in shapes if n not in live}
    for bare in (name for name, value in absent.items() if value is None):
        text = f"missing: expected shape {[*shapes[bare]]}"
        name_fix = "tie" if bare == HEAD else fix
        problems.append(_mismatch(file, stored.get(bare, bare), text, name_fix))
    for bare, tensors in live.items():
        problems += _misfits(tensors, _stored_shape(bare, shapes[bare]), fix)
    if problems:
        raise WeightsError(report(file.path, spec, problems))
    return {name: value for name, value in absent.items() if value is not None}


def _sorted(
    file: Container, spec: Spec, valid: Mapping[str, Shape]
) -> tuple[dict[str, Tensors], dict[str, str], list[Mismatch]]:
    """Sort tensors into live (by checkpoint name), ignored (name -> reason), and mismatches: those
    that the spec does not have, or the file has twice."""
    rules, dead = architecture(file), dead_tensors(spec)
    names_of = checkpoint_names(spec.text.num_hidden_layers, rules)
    problems: list[Mismatch] = []
    by_weight: dict[str, list[str]] = {}
    ignored: dict[str, str] = {}
    factors: dict[str, Tensor] = {}
    for name in file.tensors:
        bare, (base, _, end) = names_of.get(name, ""), name.rpartition(".")
        weight = file.tensors.get(f"{base}.weight")
        if bare in valid:
            by_weight.setdefault(bare, []).append(name)
        elif bare in dead:
            ignored[name] = "K or V of a layer that reads another layer's K and V"
        elif name.startswith(TOWERS):
            ignored[name] = "part of a tower; only text is read from this file"
        elif weight and weight.stored.name == "NVFP4" and end == "scale":
            factors[weight.entry.name] = file.tensors[name]
        elif end == "input_scale":
            ignored[name] = "a scale of activations, which are not rounded"
        elif name != ROPE or "rope" in rules:
            problems.append(_mismatch(file, name, "not in the spec"))

    def second(name: str) -> bool:
        return name.endswith(HALVES[1])

    for names in by_weight.values():
        if len(names) != len({second(n) for n in names}):
            problems.append(_mismatch(file, names[1], f"the same weight as {quoted(names[0])}"))
        names.sort(key=second)
    live = {
        bare: tuple(replace(file.tensors[n], factor=factors.get(n)) for n in names)
        for bare, names in by_weight.items()
    }
    return live, ignored, problems


def _misfits(tensors: Tensors, expected: Shape, fix: str) -> Iterator[Mismatch]:
    name = tensors[0].entry.name
    shape = _stacked(tensors)
    text, kind = "", "type"
    if refused := [t for t in tensors if t.stored.name not in READ]:
        name = refused[0].entry.name
        text = f"type {refused[0].stored} is not supported, only {', '.join(READ)}"
    elif len(expected) == 1 and not _is_plain(tensors):
        text = f"expected {' or '.join(FLOATS)}, found {tensors[0].stored}"
    elif shape != expected:
        actual = " and ".join(f"{t.stored} {list(t.shape)}" for t in tensors)
        text, kind = f"expected shape {list(expected)}, found {quoted(actual)}", fix
    for t in (t.factor for t in tensors if t.factor):
        if t.stored.name != "F32" or t.shape not in ((1,), expected[:-2]):
            text = f"expected one F32 number, or one per expert, found {t.stored} {list(t.shape)}"
            name = t.entry.name
    if text:
        yield Mismatch(tensors[0].header.path.name, name, text, kind)


def _stacked(tensors: Tensors) -> Shape | None:
    """Return the shape of the concatenated weight; None if its tensors do not fit each other."""
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
    """A weight stored in one or more tensors, plain or in blocks; if it is not read as codes, its
    values have `dtype` (the engine's)."""

    files: Files
    tensors: Tensors
    dtype: str

    def weight(self, quantised: bool) -> StoredWeight:
        shape = _stacked(self.tensors)
        assert shape is not None
        release = partial(self.files.release, [(t.header, t.entry) for t in self.tensors])
        kinds = {t.stored.name for t in self.tensors}
        coded = CODED.get(kinds.pop()) if quantised and len(kinds) == 1 else None
        if coded and shape[-1] % coded.scheme.row_multiple:
            coded = None
        if coded is None:
            return StoredWeight(shape, {"": partial(self._concat, None)}, release)
        codes, scales = (partial(self._concat, part) for part in (coded.codes, coded.scales))
        return quantised_weight(coded.scheme, shape, codes, scales, release)

    def _concat(self, part: Part | None, rows: torch.Tensor | None) -> torch.Tensor:
        """Return codes or scales (`part`), or values for None, of all tensors, concatenated by
        rows."""
        pieces = [
            self._values(t, rows) if part is None else self._convert(t, part, rows)
            for t in self.tensors
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -2)

    def _values(self, t: Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        kind, name = t.stored.name, t.entry.name
        if kind in FLOATS:
            return cast(self.files.rows((t.header, t.entry), rows), self.dtype, name)
        dequantize = CODED[kind].dequantize
        if t.factor:
            return cast(self._convert(t, dequantize, rows), self.dtype, name)
        return self._convert(t, lambda b: cast(dequantize(b), self.dtype, name), rows)

    def _convert(self, t: Tensor, convert: Part, rows: torch.Tensor | None) -> torch.Tensor:
        raw = self.files.rows((t.header, t.entry), rows)
        nbytes = t.stored.nbytes * CODED[t.stored.name].together
        if raw.shape[-1] % nbytes:
            msg = f"tensor {quoted(t.entry.name)}: rows of {t.stored} must be multiples of 64"
            raise broken(t.header.path, f"{msg}, found {t.shape[-1]}", f"fix: {FIXES['type']}")
        values = by_pieces(raw.reshape(-1, nbytes), convert)
        floats = values.is_floating_point() and values.dtype.itemsize > 1  # codes have one byte
        if floats and not bool(values.isfinite().all()):
            msg = f"tensor {quoted(t.entry.name)}: a scale is NaN or infinite"
            fix = f"{DOWNLOAD}, or {FIXES['type']}"
            raise broken(t.header.path, f"{msg}{_REFUSED.get(t.stored.name, '')}", fix)
        each = raw.shape[-1] // nbytes
        values = values.reshape(*raw.shape[:-1], each * values.shape[-1])
        if convert is CODED[t.stored.name].scales and not CODED[t.stored.name].scheme.group:
            values = values[..., :1].contiguous()
        if floats and t.factor:
            ref = t.factor.header, t.factor.entry
            values = values * checked_scales(ref, self.files.rows(ref))[:, None, None].squeeze(0)
        return values


#: type -> scales that `blocks` returns as NaN
_REFUSED = {
    "MXFP4": ", or more than 2^17 times a neighbouring block's",
    "NVFP4": ", or negative",
}
#: bound of a clipped linear -> suffix of its param's name
_BOUNDS = {bound: bound.replace("put_", "_") for bound in CLIP_BOUNDS}


def with_towers(
    text: Checkpoint, file: Container, spec: Spec, kinds: Iterable[str], dtype: str
) -> Checkpoint:
    """Add the towers of these media kinds to a text checkpoint; reads no tensor data."""
    kinds = set(kinds)
    _check_metadata(file, spec, kinds)
    shapes, names_of = media_tensors(spec, kinds), _tower_names(spec)
    live = {
        bare: (tensor,)
        for name, tensor in file.tensors.items()
        for bare in names_of.get(name, ())
        if bare in shapes
    }
    possible = media_tensors(spec, KINDS).keys()
    problems = [
        _mismatch(file, name, "not in the spec", "mmproj")
        for name in file.tensors
        if possible.isdisjoint(names_of.get(name, ()))
    ]
    defaults = _checked(file, spec, live, shapes, problems, {}, "mmproj")
    files = Files(file.path.parent)
    towers = {
        bare: _published(Blocks(files, tensors, dtype), bare, shapes[bare])
        for bare, tensors in live.items()
    }
    return replace(
        text,
        weights={**text.weights, **towers},
        defaults={**text.defaults, **defaults},
        headers=(*text.headers, *file.headers),
        opened=(*text.opened, files),
    )


def _tower_names(spec: Spec) -> dict[str, tuple[str, ...]]:
    """Map tensor names in a file to candidate names in a checkpoint, of which the spec has at most
    one."""
    names = {name: tuple(map(checkpoint_name, ps)) for name, ps in TABLES["towers"].items()}
    for tower, table in TABLES["tower_layers"].items():
        ends = dict(table["plain"])
        for name, param in table["linears"].items():
            ends[f"{name}.weight"] = param
            ends |= {f"{name}.{bound}": f"{param}.{end}" for bound, end in _BOUNDS.items()}
        for i in range(getattr(getattr(spec, tower), "num_hidden_layers", 0)):
            for end, param in ends.items():
                name = f"{table['prefix']}.{i}.{end}"
                names[name] = (checkpoint_name(f"{tower}.L{i}.{param}"),)
    return names


_PARTS = {"vision": PICTURES, "audio": (AUDIO,)}


def _check_metadata(file: Container, spec: Spec, kinds: set[str]) -> None:
    expected: dict[str, Any] = {KIND: CLIP}
    projectors = TABLES["projectors"][spec.model_type]
    for (part, served), projector in zip(_PARTS.items(), projectors, strict=True):
        if kinds.intersection(served):
            expected[f"clip.{part}.projector_type"] = projector
            if heads := getattr(getattr(spec, part), "num_attention_heads", None):
                expected[f"clip.{part}.attention.head_count"] = heads
    for key, value in expected.items():
        if shortest(actual := file.values.get(key)) != value:
            raise _contradiction(file, key, value, actual)
    for name, value in (
        (("image_mean", 0), ("image_std", 1)) if kinds.intersection(PICTURES) else ()
    ):
        key = f"clip.vision.{name}"
        actual = file.values.get(key)
        values = file.items(key) if isinstance(actual, Array) and actual.count == 3 else actual
        if values not in (None, [value] * 3):
            raise _contradiction(file, key, [value] * 3, values)


def _contradiction(file: Container, key: str, expected: object, value: object) -> WeightsError:
    fix = "give the mmproj file of this variant"
    return file.error(key, f"expected {quoted(expected)}", value, fix)


#: weights over pixels: channels first in the file, channels last in a checkpoint
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
    if bare.endswith("per_dim_scale"):  # the file stores softplus(x)
        x = t.double()
        return (x + torch.log(-torch.expm1(-x))).to(t.dtype)
    return t.reshape(shape)


def _published(stored: Blocks, bare: str, shape: Shape) -> StoredWeight:
    weight = stored.weight(quantised=False)

    def values(rows: torch.Tensor | None) -> torch.Tensor:
        return _as_published(weight.parts[""](rows), bare, shape)

    return StoredWeight(shape, {"": values}, weight.release)
