"""Opens GGUF files as a checkpoint of a spec: a `Checkpoint` whose weights may be quantised.

Plain tensors are views of the mapped file; blocks are converted when they are read, of a table only
the rows in use. Towers are in a file of their own (`mmproj`), as llama.cpp's converter writes it,
or in the text model's, as ollama's does; tensors of another layout are put back.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import isqrt
from typing import TYPE_CHECKING, Any

from g4ir.errors import WeightsError
from g4ir.model.media import AUDIO, KINDS, PICTURES
from g4ir.model.names import HEAD, checkpoint_name
from g4ir.model.tensors import CLIP_BOUNDS, Shape, dead_tensors, media_tensors, text_tensors
from g4ir.ops.finite import cast
from g4ir.ops.types import TORCH_NAMES
from g4ir.quant.rewrite import weights_of
from g4ir.spec.record import Spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.formats.base import CodedWeight, Files, MadeWeight
from g4ir.weights.match import Mismatch, absent_value, report
from g4ir.weights.tensorfile import FLOATS, broken, quoted

from .blocks import CODED, DENSE, by_pieces
from .container import ARCHITECTURE, Array, Container, Tensor, shortest
from .tables import HALVES, ROPE, TABLES, TOWERS, fused_parts, known_names

if TYPE_CHECKING:
    import torch

    from .blocks import Part

log = logging.getLogger(__name__)

#: types that are read
READ = (*FLOATS, *CODED, *DENSE)
#: tensors whose rows follow each other in a weight
Tensors = tuple[Tensor, ...]


def open_gguf(file: Container, spec: Spec, dtype: str) -> Checkpoint:
    """Return the checkpoint that a file holds; reads no tensor data.

    What graphs do not take in codes is made numbers of `dtype` when it is read. Raises WeightsError
    naming file, tensor, expected, found and the fix.
    """
    live, ignored, problems = _sorted(file, spec)
    shapes = text_tensors(spec)
    absent = [name for name in shapes if name not in live]
    defaults = {n: value for n in absent if (value := absent_value(n)) is not None}
    names = known_names(spec.text.num_hidden_layers)
    stored = {bare: name for name, bare in reversed(names.items())}
    for bare in (n for n in absent if n not in defaults):
        text = f"missing: expected shape {list(shapes[bare])}"
        fix = "tie" if bare == HEAD else "gguf"
        problems.append(Mismatch(file.path.name, stored[bare], text, fix))
    problems += [p for name, t in live.items() for p in _mismatch(t, shapes[name], "gguf")]
    if problems:
        raise WeightsError(report(file.path, spec, problems))
    plain = {n: (t[0].header, t[0].entry) for n, t in live.items() if _is_plain(t)}
    coded: dict[str, CodedWeight | MadeWeight] = {}
    files = Files(file.path.parent, plain)
    taken = {checkpoint_name(param) for param in weights_of(spec)}
    for name in live.keys() - plain.keys():
        blocks = Blocks(files, live[name])
        coded[name] = (name in taken and blocks.in_codes()) or blocks.as_numbers(dtype)
    _log_numbers(file, [live[n] for n, w in coded.items() if isinstance(w, MadeWeight)], dtype)
    return Checkpoint(file.path.parent, plain, file.headers, ignored, defaults, files, coded)


def _log_numbers(file: Container, weights: list[Tensors], dtype: str) -> None:
    kinds = Counter(t.stored.name for w in weights for t in w if t.stored.name in DENSE)
    if kinds:
        shown = ", ".join(f"{n} of {kind}" for kind, n in sorted(kinds.items()))
        log.warning(
            "%s: tensors with minima become %s, as no codes of a form say the same: %s",
            file.path,
            TORCH_NAMES[dtype],
            shown,
        )


# ---- names, shapes and types ------------------------------------------------------------------


def _sorted(
    file: Container, spec: Spec
) -> tuple[dict[str, Tensors], dict[str, str], list[Mismatch]]:
    """Sort the tensors into live (by the checkpoint's name), ignored (name -> why), and unknown."""
    known, dead = known_names(spec.text.num_hidden_layers), dead_tensors(spec)
    valid = text_tensors(spec)
    tensors, problems = _unfused(file, spec)
    places: dict[str, list[str]] = {}
    ignored: dict[str, str] = {}
    for name in tensors:
        bare = known.get(name, "")
        if bare in valid:
            places.setdefault(bare, []).append(name)
        elif bare in dead:
            ignored[name] = "K or V of a layer that reads another layer's K and V"
        elif name.startswith(TOWERS):
            ignored[name] = "part of a tower, which this engine leaves out"
        elif name != ROPE:
            problems.append(Mismatch(file.path.name, name, "not in the spec", "gguf"))

    def second(name: str) -> bool:
        return name.endswith(HALVES[1])

    for names in places.values():
        if len(names) != len({second(n) for n in names}):
            text = f"the same weight as {quoted(names[0])}"
            problems.append(Mismatch(file.path.name, names[1], text, "gguf"))
        names.sort(key=second)
    live = {bare: tuple(tensors[n] for n in names) for bare, names in places.items()}
    return live, ignored, problems


def _unfused(file: Container, spec: Spec) -> tuple[dict[str, Tensor], list[Mismatch]]:
    """Return the tensors, a fused one as the matrices whose rows it holds."""
    known = known_names(spec.text.num_hidden_layers)
    live, dead = text_tensors(spec), dead_tensors(spec)
    out: dict[str, Tensor] = {}
    problems = []
    for name, tensor in file.tensors.items():
        shapes = {part: (live | dead).get(known.get(part, "")) for part in fused_parts(name)}
        parts = {part: shape[0] for part, shape in shapes.items() if shape}
        if parts and tensor.shape[0] != sum(parts.values()):  # without K and V that none reads
            parts = {part: rows for part, rows in parts.items() if known[part] in live}
        if not parts:
            out[name] = tensor
        elif len(tensor.shape) != 2 or tensor.shape[0] != sum(parts.values()):
            rows = " and ".join(f"{rows} of {part}" for part, rows in parts.items())
            text = f"expected the rows of several matrices, {rows}, found {list(tensor.shape)}"
            problems.append(Mismatch(file.path.name, name, text, "gguf"))
        elif twice := next((part for part in parts if part in file.tensors), None):
            text = f"holds rows of {quoted(twice)}, which is there too"
            problems.append(Mismatch(file.path.name, name, text, "gguf"))
        else:
            starts = accumulate(parts.values(), initial=0)
            out |= {
                part: tensor.rows(name, start, rows)
                for (part, rows), start in zip(parts.items(), starts, strict=False)
            }
    return out, problems


def _mismatch(tensors: Tensors, wanted: Shape, fix: str) -> Iterator[Mismatch]:
    """Yield what is wrong with the type or the shape of a weight's tensors."""
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


# ---- blocks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The tensors of one weight, as what an engine holds is made of them."""

    files: Files
    tensors: Tensors

    @property
    def shape(self) -> Shape:
        shape = _stacked(self.tensors)
        assert shape is not None
        return shape

    def in_codes(self) -> CodedWeight | None:
        kinds = {t.stored.name for t in self.tensors}
        coded = CODED.get(next(iter(kinds))) if len(kinds) == 1 else None
        if coded is None:
            return None
        codes = partial(self._joined, lambda t, rows: self._converted(t, coded.codes, rows))
        scales = partial(self._joined, lambda t, rows: self._converted(t, coded.scales, rows))
        return CodedWeight(coded.scheme, self.shape, codes, scales, self._release)

    def as_numbers(self, dtype: str) -> MadeWeight:
        numbers = partial(self._joined, lambda t, rows: self._numbers(t, dtype, rows))
        return MadeWeight(self.shape, numbers, self._release)

    def _joined(
        self,
        make: Callable[[Tensor, torch.Tensor | None], torch.Tensor],
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        import torch

        made = [make(t, rows) for t in self.tensors]
        return made[0] if len(made) == 1 else torch.cat(made, -2)

    def _numbers(self, t: Tensor, dtype: str, rows: torch.Tensor | None) -> torch.Tensor:
        kind, name = t.stored.name, t.entry.name
        if kind in FLOATS:
            return cast(self._raw(t, rows), dtype, name)
        numbers = CODED[kind].numbers if kind in CODED else DENSE[kind]
        return self._converted(t, lambda b: cast(numbers(b), dtype, name), rows)

    def _converted(self, t: Tensor, convert: Part, rows: torch.Tensor | None) -> torch.Tensor:
        raw = self._raw(t, rows)
        blocks = raw.reshape(-1, t.stored.nbytes)
        made = by_pieces(blocks, convert)
        if made.is_floating_point() and not bool(made.isfinite().all()):
            what = f"tensor {quoted(t.entry.name)}: a scale is NaN or infinite"
            raise broken(t.header.path, what)
        each = raw.shape[-1] // t.stored.nbytes
        return made.reshape(*raw.shape[:-1], each * made.shape[-1])

    def _raw(self, t: Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        return self.files.rows((t.header, t.entry), rows)

    def _release(self) -> None:
        self.files.release((t.header, t.entry) for t in self.tensors)


# ---- towers -------------------------------------------------------------------------------------

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
        wanted = _stored_shape(bare, shapes[bare])
        problems += _mismatch((file.tensors[name],), wanted, "mmproj")
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
    wanted = "no such key" if expected is None else f"expected {quoted(expected)}"
    return file.wrong(key, wanted, found, fix)


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


def _weight(files: Files, t: Tensor, bare: str, shape: Shape, dtype: str) -> MadeWeight:
    stored = Blocks(files, (t,)).as_numbers(dtype)

    def numbers(rows: torch.Tensor | None) -> torch.Tensor:
        return _as_published(stored.numbers(rows), bare, shape)

    return MadeWeight(shape, numbers, stored.release)
