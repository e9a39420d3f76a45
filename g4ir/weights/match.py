"""Matches the tensors of a checkpoint with its spec before weights are read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from g4ir.model.names import DENSE, HEAD, ORDER, TOKEN_TABLE
from g4ir.model.tensors import CLIP_BOUNDS, DRAFTER, Tensors, dead_tensors, text_tensors
from g4ir.spec.parts import FULL, SLIDING
from g4ir.spec.record import Spec

from . import tensorfile
from .formats.base import CODED, TensorRef, plain_name, type_text
from .tensorfile import TABLES, Entry, Header, quoted

MAX_LISTED = 5  # mismatches, or files, listed in one message
INTEGERS = ("I64", "I32")  # dtypes of token ids
V_PROJ = "self_attn.v_proj.weight"
COMPUTED = re.compile(r"(?:^|\.)(?:rotary_emb\w*\.\w*inv_freq|embed_scale|inv_timescales)$")
ADAPTER = re.compile(r"\.(?:base_layer|lora_\w+|modules_to_save)\.|\.lora_magnitude_vector")
MLX_EXPERTS = ".switch_glu."


@dataclass(frozen=True)
class Mismatch:
    """One mismatch of checkpoint and spec; `fix` is a key of FIXES."""

    file: str
    tensor: str
    text: str
    fix: str


FIXES: dict[str, str] = TABLES["fixes"]


def head_names(spec: Spec) -> list[str]:
    return [*dict.fromkeys(map(plain_name, spec.prefixes.head))]


def find_prefix(directory: Path, spec: Spec, names: Mapping[str, TensorRef]) -> str:
    """Return the prefix under which most tensors of the text model are stored; WeightsError if none
    of `spec.prefixes.text` has any."""
    valid = text_tensors(spec).keys() - {HEAD}
    prefixes = dict.fromkeys(map(plain_name, spec.prefixes.text))
    hits = {p: sum(p + name in names for name in valid) for p in prefixes}
    best = max(hits, key=lambda p: hits[p])
    if not hits[best]:
        accepted = ", ".join(f"{p}{TOKEN_TABLE}" for p in hits)
        examples = ", ".join(map(quoted, sorted(names)[:3])) or "none"
        msg = f"no text tensor of spec {spec.name} under any accepted prefix"
        msg += f" (expected {accepted}; found {examples})"
        raise tensorfile.broken(directory, msg, f"fix: {FIXES['spec']}")
    return best


def tower_names(spec: Spec, bare: str) -> list[str]:
    """Return the names that a tower's tensor `PART.NAME` may have in a checkpoint."""
    part, _, name = bare.partition(".")
    return [prefix + name for prefix in getattr(spec.prefixes, part)]


def tower_of(spec: Spec, name: str) -> str | None:
    """Return the tower (a field of Prefixes) that a tensor belongs to; None for other tensors."""
    parts = asdict(spec.prefixes)
    towers = (part for part in parts if part not in ("text", "head", DRAFTER))
    return next((part for part in towers if name.startswith(parts[part])), None)


def is_text(spec: Spec, prefix: str, name: str) -> bool:
    inside = name.startswith((prefix, *(h.removesuffix(".weight") for h in head_names(spec))))
    return inside and tower_of(spec, name) is None


def absent_value(name: str) -> float | None:
    """Return the value of a tensor that a checkpoint may lack, the reference's default; None for a
    tensor that it must have."""
    if name.endswith(".layer_scalar"):
        return 1.0
    if name.endswith(CLIP_BOUNDS):
        return math.inf if name.endswith("_max") else -math.inf
    return None


@dataclass
class TensorMatch:
    """Matches stored tensors (`names`, by plain name) with a spec in one walk: needed ones (`live`,
    by bare name, without prefix), unused ones (`ignored`, plain name -> why), defaults of absent
    ones, and every mismatch."""

    spec: Spec
    directory: Path
    prefix: str
    towers: Tensors
    names: Mapping[str, TensorRef]
    live: dict[str, TensorRef] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, float] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        invalid: list[Mismatch] = []
        for name, ref in self.names.items():
            role = self._role(name)
            if role is None:
                self.mismatches.append(self._unknown(name, *ref))
            elif role in self.shapes:
                self.live[role] = ref
                invalid += self._check(role, *ref)
            else:
                self.ignored[name] = role
        if self.spec.text.tie_word_embeddings and self.head:
            self.ignored[self.head] = f"tied to {TOKEN_TABLE}"
            if TOKEN_TABLE in self.live and all(w.tensor != self.head for w in invalid):
                invalid += _tied_dtype(*self.live[HEAD], self.live[TOKEN_TABLE][1])
        self.mismatches += [*self._missing(), *invalid]

    @cached_property
    def shapes(self) -> Tensors:
        shapes = text_tensors(self.spec) | self.towers
        return {HEAD: shapes[TOKEN_TABLE]} | shapes

    @cached_property
    def needed(self) -> dict[str, str]:
        """Needed tensors: plain name -> bare name."""
        text = (bare for bare in text_tensors(self.spec) if bare != HEAD)
        out = {bare if bare.startswith(DENSE) else self.prefix + bare: bare for bare in text}
        for bare in self.towers:
            names = (name for name in tower_names(self.spec, bare) if name in self.names)
            if stored := next(names, None):
                out[stored] = bare
        return out

    @cached_property
    def dead(self) -> set[str]:
        return {self.prefix + bare for bare in dead_tensors(self.spec)}

    @cached_property
    def head(self) -> str | None:
        return next((name for name in head_names(self.spec) if name in self.names), None)

    def _role(self, name: str) -> str | None:
        """Return the bare name of a needed tensor, or why it is ignored; None if unknown."""
        if name in self.needed:
            return self.needed[name]
        if name in self.dead:
            return "K or V of a layer that reads another layer's K and V"
        if tower := tower_of(self.spec, name):
            return f"part of {tower} that this engine does not use"
        if COMPUTED.search(name):
            return "a buffer that follows from the spec"
        return HEAD if name == self.head else None

    @property
    def _without_v(self) -> list[str]:
        text = self.spec.text
        return [kind for kind in (SLIDING, FULL) if getattr(text, kind).k_eq_v]

    def _unknown(self, name: str, header: Header, entry: Entry) -> Mismatch:
        bare = name.removeprefix(self.prefix)
        if ADAPTER.search(name):
            text, fix = "part of an adapter that is not merged", "adapter"
        elif MLX_EXPERTS in name:
            text, fix = "experts in MLX's layout", "mlx"
        elif bare.endswith(V_PROJ) and (kind := _kind_of(self.spec, bare)) in self._without_v:
            text = f"unknown: expected no v_proj ({kind}.k_eq_v is true)"
            text += f", found {quoted(type_text((header, entry)))}"
            fix = "k_eq_v"
        else:
            text, fix = "not in the spec", "spec"
        return Mismatch(header.path.name, entry.name, text, fix)

    def _check(self, name: str, header: Header, entry: Entry) -> Iterator[Mismatch]:
        shape = self.shapes[name]
        dtypes = INTEGERS if name == ORDER else tensorfile.FLOATS
        if entry.dtype not in dtypes and (entry.dtype != CODED or dtypes == INTEGERS):
            text = f"expected dtype {' or '.join(dtypes)}, found {entry.dtype}"
            fix = "order" if name == ORDER else "dtype"
            yield Mismatch(header.path.name, entry.name, text, fix)
        elif entry.shape != tuple(shape):
            text = f"expected shape {list(shape)}, found {quoted(type_text((header, entry)))}"
            yield Mismatch(header.path.name, entry.name, text, "spec")

    def _missing(self) -> Iterator[Mismatch]:
        needed = [*text_tensors(self.spec), *self.towers]
        absent = [name for name in needed if name not in self.live]
        self.defaults = {n: d for n in absent if (d := absent_value(n)) is not None}
        absent = [name for name in absent if name not in self.defaults]
        for name in absent:
            text, fix = f"missing: expected shape {list(self.shapes[name])}", "spec"
            if name in self.towers:
                fix = "drafter" if name.startswith(DRAFTER) else "media"
            elif name.endswith(V_PROJ):
                text, fix = f"{text} ({_kind_of(self.spec, name)}.k_eq_v is false)", "k_eq_v"
            elif name.startswith(DENSE):
                fix = "modules"
            elif name == HEAD:
                text, fix = f"{text} (tie_word_embeddings is false)", "tie"
            yield Mismatch(self.directory.name, name, text, fix)


def _kind_of(spec: Spec, bare: str) -> str | None:
    match = re.match(r"layers\.(\d{1,6})\.", bare)
    layers = spec.layers()
    return layers[int(match[1])].kind if match and int(match[1]) < len(layers) else None


def _tied_dtype(header: Header, head: Entry, embed: Entry) -> Iterator[Mismatch]:
    if CODED in (head.dtype, embed.dtype):
        text = f"stored although it is tied to {TOKEN_TABLE}, and one or both are quantised"
        yield Mismatch(header.path.name, head.name, text, "head")
    elif head.dtype != embed.dtype:
        text = f"tied to {TOKEN_TABLE}: expected dtype {embed.dtype}, found {head.dtype}"
        yield Mismatch(header.path.name, head.name, text, "tie")


def report(path: Path, spec: Spec, mismatches: list[Mismatch]) -> str:
    """Return an error message with the first mismatches and their fixes."""
    lines = [f"  {p.file}: {quoted(p.tensor)}: {p.text}" for p in mismatches[:MAX_LISTED]]
    more = len(mismatches) - MAX_LISTED
    lines += [f"  and {more} more"] * (more > 0)
    fixes = dict.fromkeys(FIXES[p.fix] for p in mismatches[:MAX_LISTED])
    return (
        f"{path}: the weights do not fit spec {spec.name} ({len(mismatches)} tensors):\n"
        + "\n".join(lines)
        + f"\nfix: {'; or '.join(fixes)}"
    )
