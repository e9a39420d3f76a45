"""Opens a GGUF file as a checkpoint of a spec: a `Checkpoint` whose weights may be in codes.

Plain numbers are views of the mapped file. Blocks are converted when they are asked for, a piece at
a time; of a table only the rows in use are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from g4ir.errors import WeightsError
from g4ir.model.names import HEAD, checkpoint_name
from g4ir.model.tensors import Shape, dead_tensors, text_tensors
from g4ir.ops.finite import cast
from g4ir.ops.types import TORCH_NAMES
from g4ir.quant.rewrite import weights_of
from g4ir.spec.record import Spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.formats.base import CodedWeight, Files, MadeWeight
from g4ir.weights.match import Mismatch, absent_value, report
from g4ir.weights.tensorfile import DOWNLOAD, FLOATS, quoted

from .blocks import CODED, DENSE, by_pieces
from .container import Container, Tensor
from .tables import HALVES, ROPE, TOWERS, fused_parts, known_names

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
    problems += _missing(file, spec, [n for n in absent if n not in defaults])
    problems += [p for name, t in live.items() for p in _mismatches(t, shapes[name])]
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


def _missing(file: Container, spec: Spec, absent: list[str]) -> Iterator[Mismatch]:
    shapes, names = text_tensors(spec), known_names(spec.text.num_hidden_layers)
    stored = {bare: name for name, bare in reversed(names.items())}
    for bare in absent:
        text = f"missing: expected shape {list(shapes[bare])}"
        yield Mismatch(file.path.name, stored[bare], text, "tie" if bare == HEAD else "gguf")


def _mismatches(tensors: Tensors, shape: Shape) -> Iterator[Mismatch]:
    file, name = tensors[0].header.path.name, tensors[0].entry.name
    refused = [t for t in tensors if t.stored.name not in READ]
    if refused:
        text = f"type {refused[0].stored} is not read; {', '.join(READ)} are"
        yield Mismatch(file, refused[0].entry.name, text, "type")
    elif len(shape) == 1 and not _is_plain(tensors):
        text = f"expected {' or '.join(FLOATS)}, found {tensors[0].stored}"
        yield Mismatch(file, name, text, "type")
    elif _stacked(tensors) != shape:
        found = " and ".join(f"{t.stored} {list(t.shape)}" for t in tensors)
        text = f"expected shape {list(shape)}, found {quoted(found)}"
        yield Mismatch(file, name, text, "gguf")


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
        """Return the weight in codes and scales; None where its types have none."""
        kinds = {t.stored.name for t in self.tensors}
        coded = CODED.get(next(iter(kinds))) if len(kinds) == 1 else None
        if coded is None:
            return None
        codes = partial(self._joined, lambda t, rows: self._converted(t, coded.codes, rows))
        scales = partial(self._joined, lambda t, rows: self._converted(t, coded.scales, rows))
        return CodedWeight(coded.scheme, self.shape, codes, scales, self._release)

    def as_numbers(self, dtype: str) -> MadeWeight:
        """Return the weight as numbers of a dtype."""
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
            raise WeightsError(
                f"{t.header.path}: tensor {quoted(t.entry.name)}: a scale is NaN or infinite; "
                f"{DOWNLOAD}"
            )
        each = raw.shape[-1] // t.stored.nbytes
        return made.reshape(*raw.shape[:-1], each * made.shape[-1])

    def _raw(self, t: Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Return the stored numbers, or rows of bytes; of a table those of `rows`."""
        return self.files.rows((t.header, t.entry), rows)

    def _release(self) -> None:
        self.files.release((t.header, t.entry) for t in self.tensors)
