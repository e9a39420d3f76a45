"""PEFT's LoRA adapters, merged into a checkpoint's weights: W + scale * B @ A. Other methods, and
modules stored in full (`modules_to_save`), are refused.

The sum is computed in float32 when a weight is read, before it is packed, quantised or sharded. If
a layer's K projection is V's too (`k_eq_v`), its LoRA changes both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from g4ir.errors import InputError, WeightsError
from g4ir.model.media import KINDS
from g4ir.model.names import HEAD, TOKEN_TABLE
from g4ir.model.tensors import Shape, dead_tensors, media_tensors, text_tensors
from g4ir.ops.types import torch
from g4ir.spec.record import Spec

from .checkpoint import PICKLES, Checkpoint
from .formats.base import (
    Files,
    Part,
    TensorRef,
    by_plain_name,
    compiled,
    invalid,
    plain_name,
    require,
    type_text,
)
from .match import tower_names
from .tensorfile import FLOATS, TABLES, broken, quoted, read_header, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PART = re.compile(r"(.+)\.lora_([AB])(?:\.default)?(?:\.weight)?")
#: name of a layer's experts: PEFT nests one wrapper (`base_layer`) per adapted parameter
#: (`target_parameters`); only shapes tell which parameter a wrapper's tensors belong to
_EXPERTS = re.compile(r"(.+\.experts)(?:\.base_layer)*")
SAVE = "fix: save the adapter as safetensors"
TIED = "the token table is the LM head too (tie_word_embeddings is true), and the adapter changes"
TIED += " one of them"
MERGE = (
    "fix: merge the adapter with PEFT (merge_and_unload, save_pretrained) and give that checkpoint"
)


@dataclass(frozen=True)
class Adapter:
    """An adapter's directory, and the factor by which its LoRA scale is multiplied."""

    path: Path
    factor: float = 1.0

    @classmethod
    def of(cls, text: str | Path) -> Adapter:
        """Parse `DIR` or `DIR=SCALE`; InputError if SCALE is no finite number, or DIR has no
        adapter_config.json."""
        path, factor = Path(text), 1.0
        stem, equals, number = str(text).rpartition("=")
        if equals and not path.exists():
            path = Path(stem)
            try:
                factor = float(number)
            except ValueError:
                factor = math.nan
            if not math.isfinite(factor):
                why = f"no such path, and {quoted(number)} is no scale"
                raise InputError(f"adapter {text}: {why}; give DIR=0.5")
        if not (path / CONFIG).is_file():
            fix = "give the directory that PEFT's save_pretrained wrote"
            raise InputError(f"adapter {text}: {path} has no {CONFIG}; {fix}")
        return cls(path, factor)

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG)

    def check(self) -> None:
        """Raise WeightsError, naming the key, unless the config describes a plain LoRA."""
        file, values = self.path / CONFIG, self.config
        keys = TABLES["adapter"]
        read_keys = {*keys["read"], *keys["training"]}
        other = {k: v for k, v in values.items() if k not in read_keys and v}
        for key, allowed in keys["allowed"].items():
            if values.get(key) not in allowed:
                other[key] = values.get(key)
        for key, value in other.items():
            raise WeightsError(f"{file}: {key}: {quoted(value)} is not supported; {MERGE}")

    @property
    def base(self) -> str:
        name = (self.path / CONFIG).is_file() and self.config.get("base_model_name_or_path")
        return str(name or "an unnamed model")

    @property
    def weights(self) -> Path:
        file = self.path / WEIGHTS
        if not file.is_file():
            pickle = next((p.name for p in self.path.iterdir() if p.name.endswith(PICKLES)), None)
            actual = f"only {pickle}: pickles are never opened" if pickle else "none"
            raise broken(self.path, f"expected {WEIGHTS}, found {actual}", SAVE)
        return file

    def scale(self, module: str, rank: int) -> float:
        """Return a module's factor of B @ A; WeightsError if the `rank` of its tensors differs from
        the config's."""
        configured = self._number("r", "rank_pattern", module)
        if configured != rank:
            msg = f"r or rank_pattern: {configured:g} for {module}, whose tensors have rank {rank}"
            raise broken(self.path / CONFIG, msg)
        alpha = self._number("lora_alpha", "alpha_pattern", module)
        return self.factor * alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _number(self, key: str, patterns: str, module: str) -> float:
        """Return the value of the first pattern under the config's key `patterns` that matches the
        end of a module's name, else the value of `key`; WeightsError unless it is above 0 and below
        2^31."""
        by_pattern, path = self.config.get(patterns) or {}, self.path / CONFIG
        if not isinstance(by_pattern, dict):
            raise broken(path, f"{patterns}: expected a table, found {quoted(by_pattern)}")
        starts = [0, *(m.end() for m in re.finditer(r"\.", module))]
        matches = (
            (patterns, value)
            for pattern, value in by_pattern.items()
            if any(compiled(pattern, str(path)).fullmatch(module, at) for at in starts)
        )
        value: Any
        name, value = next(matches, (key, self.config.get(key)))
        if type(value) not in (int, float) or not 0 < value < 1 << 31:
            expected = "expected a number above 0 and below 2^31"
            raise broken(path, f"{name}: {expected}, found {quoted(value)}")
        return float(value)

    @property
    def target_parameters(self) -> list[str]:
        """The config's `target_parameters` (parameters of experts); WeightsError unless they are a
        list of names."""
        names = self.config.get("target_parameters") or []
        if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
            msg = f"target_parameters: expected a list of names, found {quoted(names)}"
            raise broken(self.path / CONFIG, msg)
        return names


def max_rank(adapter: Adapter) -> int:
    """Return the largest rank that an adapter's config names; 1 if it names none."""
    patterns = adapter.config.get("rank_pattern")
    ranks = [adapter.config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    return max((r for r in ranks if type(r) is int), default=1)


def lies_in(directory: Path) -> str | None:
    """Return the name of an adapter file in a directory, or None."""
    return next((name for name in (CONFIG, WEIGHTS) if (directory / name).is_file()), None)


def with_adapters(model: Checkpoint, spec: Spec, adapters: Iterable[Adapter]) -> Checkpoint:
    """Return a checkpoint with these adapters merged in order; reads no tensor data. WeightsError
    for an adapter that does not fit, and for quantised weights that it changes."""
    for adapter in adapters:
        model = _merged(model, spec, adapter)
    return model


def _merged(model: Checkpoint, spec: Spec, adapter: Adapter) -> Checkpoint:
    adapter.check()
    file = adapter.weights
    names = by_plain_name(file, [read_header(file)])
    files, weights = Files(adapter.path, names), dict(model.weights)
    ignored: dict[str, str] = {}
    changes = [*_changes(spec, adapter, files)]
    for name in adapter.target_parameters:
        if not any(c.bare.endswith(name.rpartition(".")[2]) for c in changes):
            msg = f"target_parameters: {quoted(name)} has no tensors in {WEIGHTS}"
            raise broken(adapter.path / CONFIG, msg, "fix: save the adapter again")
    for change in changes:
        bare, why = change.bare, change.why
        if not why and bare not in weights:
            why = "part of an adapter for a tower, which this engine leaves out"
        if why:
            ignored |= {ref[1].name: why for ref in change.parts}
            continue
        if weights[bare].scheme:
            msg = f"{bare} is quantised in {model.directory}: nothing can be merged into it"
            fix = "fix: give the bf16 weights that it was quantised from, and --quant"
            raise invalid(change.parts[0], msg, fix)
        values = partial(change.values, weights[bare].parts[""])
        weights[bare] = replace(weights[bare], parts={"": values})
    if len(ignored) == len(names):
        msg = f"would change nothing: {', '.join(sorted({*ignored.values()}))}"
        fix = "fix: leave the adapter out, or if it is for a tower, build with that (--media)"
        raise broken(file, msg, fix)
    opened = (*model.opened, files)
    return replace(model, weights=weights, ignored={**model.ignored, **ignored}, opened=opened)


@dataclass(frozen=True)
class Factors:
    """The product that an adapter adds to one weight: scale * b [N, r] @ a [r, K]; `bare`: the
    weight's checkpoint name."""

    bare: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float


def read_factors(spec: Spec, adapter: Adapter) -> Iterator[Factors]:
    """Yield an adapter's terms, in fp32; those of weights that the model does not use are left out.
    WeightsError if it is no adapter of this model, or changes experts."""
    adapter.check()
    file = adapter.weights
    files = Files(adapter.path, by_plain_name(file, [read_header(file)]))
    for change in _changes(spec, adapter, files):
        if change.scale is None:
            raise invalid(
                change.parts[0],
                "changes experts, which adapters chosen by requests cannot change",
                MERGE,
            )
        if not change.why:
            a, b = (files.rows(part).float() for part in change.parts)
            yield Factors(change.bare, a, b, change.scale)


_Factors = tuple[TensorRef, TensorRef]  # B and A


@dataclass(frozen=True)
class _Change:
    """An adapter's change of the weight `bare` (checkpoint name). `why`: the reason if it is
    skipped, else ""; `parts`: the adapter's A and B; `values`: function of the weight's reader and
    of row indices (or None) that returns changed values."""

    bare: str
    why: str
    parts: tuple[TensorRef, ...]
    values: Callable[[Part, torch.Tensor | None], torch.Tensor]
    #: factor of B @ A; None for experts, which `read_factors` refuses
    scale: float | None = None


def _changes(spec: Spec, adapter: Adapter, files: Files) -> Iterator[_Change]:
    modules: dict[str, dict[str, TensorRef]] = {}
    for name, ref in files.names.items():
        match = _PART.fullmatch(name)
        if match is None:
            raise invalid(ref, "is neither A nor B of a plain LoRA", MERGE)
        modules.setdefault(match[1], {})[match[2]] = ref
    if not files.names:
        raise broken(adapter.weights, "has no tensor")
    for module, parts in modules.items():
        first = next(iter(parts.values()))
        if parts.keys() != {"A", "B"}:
            raise invalid(first, f"has no matching {'A' if 'B' in parts else 'B'}")
        a, b = parts["A"], parts["B"]
        if match := _EXPERTS.fullmatch(module):
            yield _change_of_experts(spec, adapter, files, match[1], (b, a))
            continue
        bare, shape, why = _target(spec, adapter, f"{module}.weight", first)
        _check_factors(a, b, shape)
        scale = adapter.scale(module, a[1].shape[0])
        yield _Change(bare, why, (a, b), partial(_sum, files, (b, a), scale), scale)


def _sum(
    files: Files,
    low: _Factors,
    scale: float,
    base: Part,
    rows: torch.Tensor | None,
    experts: int = 0,
    transposed: bool = False,
) -> torch.Tensor:
    """Return a weight [N, K] (or `rows` of it), which `base` reads, plus scale * B [N, r] @ A
    [r, K], in fp32; `low`: B and A. For `experts` > 0 the weight is [E, N, K], or [E, K, N] if
    `transposed`, and each expert has a product, stored as B [N, r E] and A [E r, K]."""
    b, a = (files.rows(part).float() for part in low)
    if experts:
        b, a = b.unflatten(1, (-1, experts)).permute(2, 0, 1), a.unflatten(0, (experts, -1))
    if rows is not None:
        b, a = b.index_select(0, rows), a.index_select(0, rows) if experts else a
    delta = b @ a
    return base(rows).float() + scale * (delta.mT if transposed else delta)


def _change_of_experts(
    spec: Spec, adapter: Adapter, files: Files, module: str, low: _Factors
) -> _Change:
    """Return the change of the expert parameter whose shape fits; WeightsError if none does."""
    b, a = low
    shapes_of = {}
    for name in ("gate_up_proj", "down_proj"):
        bare, shape, why = _target(spec, adapter, f"{module}.{name}", a)
        shapes_of[name] = shape
        rank = a[1].shape[0] // shape[0] if len(a[1].shape) == 2 else 0
        for transposed, (n, k) in ((False, shape[1:]), (True, shape[:0:-1])):
            if (b[1].shape, a[1].shape) == ((n, rank * shape[0]), (rank * shape[0], k)) and rank:
                require(a, FLOATS)
                require(b, FLOATS)
                scale = adapter.scale(f"{module}.{name}", rank)
                values = partial(_sum, files, low, scale, experts=shape[0], transposed=transposed)
                return _Change(bare, why, (a, b), values)
    shapes = " or ".join(f"{name} {list(shape)}" for name, shape in shapes_of.items())
    fix = "fix: give an adapter of this model"
    raise invalid(a, f"expected A and B of {shapes}, found {type_text(a)} and {type_text(b)}", fix)


def _target(spec: Spec, adapter: Adapter, name: str, ref: TensorRef) -> tuple[str, Shape, str]:
    """Return a weight's checkpoint name and shape, and why it is skipped (or ""). WeightsError if
    the spec does not have it, or ties it (token table and LM head)."""
    text, dead, towers = text_tensors(spec), dead_tensors(spec), media_tensors(spec, KINDS)
    name = plain_name(name)
    for prefix in dict.fromkeys(map(plain_name, (*spec.prefixes.text, ""))):
        bare = name.removeprefix(prefix) if name.startswith(prefix) else ""
        if bare in (TOKEN_TABLE, HEAD) and spec.text.tie_word_embeddings:
            raise invalid(ref, TIED, MERGE)
        if bare in dead:
            return bare, dead[bare], "K or V of a layer that reads another layer's K and V"
        if bare in text:
            return bare, text[bare], ""
    for bare, shape in towers.items():
        if name in tower_names(spec, bare):
            return bare, shape, ""
    more = " (a layer with K=V has none: its K is V too)" if name.endswith("v_proj.weight") else ""
    raise invalid(
        ref,
        f"spec {spec.name} has no weight {quoted(name)}{more}",
        f"fix: give an adapter of this model; this one is of {quoted(adapter.base)}",
    )


def _check_factors(a: TensorRef, b: TensorRef, shape: Shape) -> None:
    """Raise WeightsError unless A is [r, K] and B [N, r] of a weight [N, K]."""
    outer, inner = shape if len(shape) == 2 else (0, 0)
    rank = a[1].shape[0] if a[1].shape else 0
    for part, want in ((a, (rank, inner)), (b, (outer, rank))):
        if part[1].shape != want or part[1].dtype not in FLOATS or not rank:
            expected = f"expected {' or '.join(FLOATS)} {list(want)} for a weight {list(shape)}"
            fix = "fix: give an adapter of this model"
            raise invalid(part, f"{expected}, found {type_text(part)}", fix)
