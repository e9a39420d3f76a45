"""Reads towers from a GGUF file of their own (`mmproj`), as llama.cpp's converter writes them, or
from the text model's, as ollama's does.

Such a file holds the tensors, and not all that says how a tower computes: a variant says that. Some
tensors lie otherwise there than in a checkpoint; they are put back when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import isqrt
from typing import TYPE_CHECKING, Any

from g4ir.errors import WeightsError
from g4ir.model.media import AUDIO, KINDS, PICTURES
from g4ir.model.names import checkpoint_name
from g4ir.model.tensors import CLIP_BOUNDS, Shape, media_tensors
from g4ir.spec.record import Spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.formats.base import Files, MadeWeight
from g4ir.weights.match import Mismatch, absent_value, report
from g4ir.weights.tensorfile import FLOATS, quoted

from .checkpoint import READ, Blocks
from .container import ARCHITECTURE, Array, Container, Tensor, shortest
from .tables import TABLES, TOWERS

if TYPE_CHECKING:
    import torch

#: model type -> projectors of pictures and of sound
PROJECTORS = {"gemma4": ("gemma4v", "gemma4a"), "gemma4_unified": ("gemma4uv", "gemma4ua")}
#: bound of a clipped linear -> its param's
_BOUNDS = {bound: bound.replace("put_", "_") for bound in CLIP_BOUNDS}
#: the bounds of all clipped linears of the vision tower once more, then four of the projector
CLAMPS = "v.clamp_data"


def holds_towers(file: Container) -> bool:
    """Whether a text model's file holds towers too."""
    return any(name.startswith(TOWERS) for name in file.tensors)


def with_towers(
    text: Checkpoint,
    file: Container,
    spec: Spec,
    kinds: Iterable[str],
    dtype: str,
    own: bool = False,
) -> Checkpoint:
    """Return a checkpoint that holds the towers of these kinds of media too; reads no tensor data.
    `own`: the file is the text model's.

    Raises WeightsError naming file, key or tensor, expected, found and the fix.
    """
    kinds = set(kinds)
    (_check_own_metadata if own else _check_metadata)(file, spec, kinds)
    shapes, known = media_tensors(spec, kinds), _known(spec)
    stored = _stored_names(file, own)
    clamps = _clamps(file, spec) if "vision.encoder" in " ".join(shapes) else {}
    places = {
        bare: name for n, name in stored.items() for bare in known.get(n, ()) if bare in shapes
    }
    absent = [bare for bare in shapes if bare not in places]
    values = {bare: clamps.get(bare, absent_value(bare)) for bare in absent}
    defaults = {bare: value for bare, value in values.items() if value is not None}
    possible = media_tensors(spec, KINDS).keys()
    unknown = [name for n, name in stored.items() if possible.isdisjoint(known.get(n, ()))]
    unknown += [CLAMPS] if clamps and shapes.keys().isdisjoint(clamps) else []
    missing = {bare: f"missing: expected shape {[*shapes[bare]]}" for bare in absent}
    texts = dict.fromkeys(unknown, "not in the spec")
    texts |= {bare: text for bare, text in missing.items() if bare not in defaults}
    problems = [Mismatch(file.path.name, name, text, "mmproj") for name, text in texts.items()]
    for bare, name in places.items():
        problems += _mismatch(file, file.tensors[name], bare, shapes[bare])
    if problems:
        raise WeightsError(report(file.path, spec, problems))
    files = Files(file.path.parent, {})
    made = {
        bare: _weight(files, file.tensors[name], bare, shapes[bare], dtype)
        for bare, name in places.items()
    }
    used = {*places.values(), CLAMPS}
    return replace(
        text,
        ignored={n: why for n, why in text.ignored.items() if n not in used},
        coded={**text.coded, **made},
        defaults={**text.defaults, **defaults},
        headers=(*text.headers, *(h for h in file.headers if h not in text.headers)),
    )


def _stored_names(file: Container, own: bool) -> dict[str, str]:
    """Return llama.cpp's name -> name in the file of the tensors of towers; `own`: beside the text
    model's."""
    top, layer = TABLES["other_audio"], TABLES["other_audio_layer"]
    other = next(iter(top)) in file.tensors

    def named(name: str) -> str:
        match = re.fullmatch(r"(a\.blk\.[^.]*\.)(.*)", name)
        if not other or match is None:
            return top.get(name, name) if other else name
        return match[1] + layer.get(match[2], match[2])

    out: dict[str, str] = {}
    for name in (n for n in file.tensors if n != CLAMPS and (not own or n.startswith(TOWERS))):
        if (first := out.setdefault(named(name), name)) != name:
            raise _contradiction(file, name, "one tensor of this meaning", first)
    return out


def _clamps(file: Container, spec: Spec) -> dict[str, float]:
    """Return name -> bound of the vision tower's clipped linears; empty where a file has none of
    CLAMPS. They must be those of the tensors that hold one bound each."""
    tensor = file.tensors.get(CLAMPS)
    if tensor is None:
        return {}
    names = [
        (f"v.blk.{i}.{name}.{bound}", checkpoint_name(f"vision.L{i}.{param}.{own}"))
        for i in range(getattr(spec.vision, "num_hidden_layers", 0))
        for name, param in TABLES["tower_layers"]["vision"]["linears"].items()
        for bound, own in _BOUNDS.items()
    ]
    count = len(names) + len(_BOUNDS)
    if tensor.stored.dtype != "F32" or tensor.shape != (count,):
        raise _contradiction(file, CLAMPS, f"F32 [{count}]", f"{tensor.stored} {[*tensor.shape]}")
    values = file.floats(tensor)
    for (name, _), value in zip(names, values, strict=False):
        own = file.tensors.get(name)
        if own is not None and own.stored.dtype == "F32" and file.floats(own) != [value]:
            raise _contradiction(file, name, value, file.floats(own)[0])
    return {bare: value for (_, bare), value in zip(names, values, strict=False)}


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


def _check_metadata(file: Container, spec: Spec, kinds: set[str]) -> None:
    """Raise WeightsError where keys contradict the spec or what towers compute with."""
    architecture = file.values.get("general.architecture")
    if architecture != "clip":
        raise _contradiction(file, "general.architecture", "clip", architecture)
    projectors = PROJECTORS[spec.model_type]
    asked = (("vision", PICTURES, spec.vision), ("audio", (AUDIO,), spec.audio))
    for (part, served, tower), projector in zip(asked, projectors, strict=True):
        if not kinds.intersection(served):
            continue
        expected: dict[str, Any] = {"projector_type": projector}
        if heads := getattr(tower, "num_attention_heads", None):
            expected |= {"attention.head_count": heads}
        for name, value in expected.items():
            key = f"clip.{part}.{name}"
            if file.values.get(key) != value:
                raise _contradiction(file, key, value, file.values.get(key))
    if kinds.intersection(PICTURES):
        for name, value in (("image_mean", 0), ("image_std", 1)):
            key = f"clip.vision.{name}"
            found = file.values.get(key)
            given = file.items(key) if isinstance(found, Array) and found.count == 3 else found
            if given not in (None, [value] * 3):
                raise _contradiction(file, key, [value] * 3, given)


def _check_own_metadata(file: Container, spec: Spec, kinds: set[str]) -> None:
    """Raise WeightsError where a text model's file says other of its towers than the spec."""
    for part, served in (("vision", PICTURES), ("audio", (AUDIO,))):
        tower, prefix = getattr(spec, part), f"{ARCHITECTURE}.{part}."
        if not kinds.intersection(served):
            continue
        said = {key: getattr(tower, field, None) for key, field in TABLES["said"][part].items()}
        said |= {"num_channels": 3} if part == "vision" else {}
        said |= {"feed_forward_length": 4 * tower.hidden_size} if part == "audio" else {}
        for key, found in file.values.items():
            name = key.removeprefix(prefix)
            if name != key and shortest(found) != said.get(name):
                raise _contradiction(
                    file, key, said.get(name), found, "give the variant of this file"
                )


def _contradiction(
    file: Container,
    key: str,
    expected: object,
    found: object,
    fix: str = "give the mmproj file of this variant",
) -> WeightsError:
    shown = "none" if found is None else quoted(found)
    wanted = "no such key" if expected is None else f"expected {quoted(expected)}"
    return WeightsError(f"{file.path}: {key}: {wanted}, found {shown}; {fix}")


# ---- how tensors lie --------------------------------------------------------------------------

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
    import torch

    if bare.endswith(_PIXELS):
        side = isqrt(shape[-1] // 3)
        return t.reshape(*shape[:-1], 3, side, side).movedim(-3, -1).reshape(shape)
    if bare.endswith("pos_embedding"):
        return t.movedim(0, 1)
    if bare.endswith("per_dim_scale"):  # y = softplus(x) there
        wide = t.double()
        return (wide + torch.log(-torch.expm1(-wide))).to(t.dtype)
    return t.reshape(shape)


def _mismatch(file: Container, t: Tensor, bare: str, shape: Shape) -> Iterator[Mismatch]:
    name, wanted = t.entry.name, _stored_shape(bare, shape)
    if t.stored.name not in READ or (len(wanted) == 1 and t.stored.dtype not in FLOATS):
        yield Mismatch(file.path.name, name, f"type {t.stored} is not read here", "type")
    elif t.shape != wanted:
        text = f"expected shape {list(wanted)}, found {quoted(list(t.shape))}"
        yield Mismatch(file.path.name, name, text, "mmproj")


def _weight(files: Files, t: Tensor, bare: str, shape: Shape, dtype: str) -> MadeWeight:
    stored = Blocks(files, (t,)).as_numbers(dtype)

    def numbers(rows: torch.Tensor | None) -> torch.Tensor:
        return _as_published(stored.numbers(rows), bare, shape)

    return MadeWeight(shape, numbers, stored.release)
