"""LoRA adapters as PEFT saves them, merged into a checkpoint's weights: W + scale * B @ A.

The sum is made in float32 when a weight is read, before it is packed, quantised or sharded; a
projection K that serves as V too (`k_eq_v`) changes both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
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
from .formats.base import Files, Found, Part, by_plain_name, plain_name, shown, wrong
from .match import tower_names
from .tensorfile import FLOATS, TABLES, broken, quoted, read_header, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PART = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")
TIED = "the table of tokens is the head too (tie_word_embeddings is true), and an adapter changes"
TIED += " one of them"
MERGE = (
    "fix: merge the adapter with PEFT (merge_and_unload, save_pretrained) and give that checkpoint"
)
Parts = Mapping[str, Found]


@dataclass(frozen=True)
class Adapter:
    """A directory of an adapter, and the factor that the user gives it."""

    path: Path
    factor: float = 1.0

    @classmethod
    def of(cls, given: str | Path) -> Adapter:
        """Read `DIR` or `DIR=SCALE`; InputError where there is no adapter."""
        path, factor = Path(given), 1.0
        stem, equals, number = str(given).rpartition("=")
        if equals and not path.exists():
            path = Path(stem)
            try:
                factor = float(number)
            except ValueError:
                factor = math.nan
            if not math.isfinite(factor):
                raise InputError(f"--adapter {given}: {quoted(number)} is no scale; give DIR=0.5")
        if not (path / CONFIG).is_file():
            fix = "give the directory that PEFT's save_pretrained wrote"
            raise InputError(f"--adapter {given}: {path} has no {CONFIG}; {fix}")
        return cls(path, factor)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config; WeightsError for what is not a plain LoRA."""
        file = self.path / CONFIG
        values = read_json(file)
        keys = TABLES["adapter"]
        known = {*keys["read"], *keys["training"]}
        other = {k: v for k, v in values.items() if k not in known and v}
        for key, allowed in keys["allowed"].items():
            if values.get(key) not in allowed:
                other[key] = values.get(key)
        for key, value in other.items():
            raise WeightsError(f"{file}: {key}: {quoted(value)} is not applied; {MERGE}")
        return values

    @property
    def base(self) -> str:
        said = (self.path / CONFIG).is_file() and self.config.get("base_model_name_or_path")
        return str(said or "an unnamed model")

    @property
    def weights(self) -> Path:
        file = self.path / WEIGHTS
        if not file.is_file():
            pickle = next((p.name for p in self.path.iterdir() if p.name.endswith(PICKLES)), None)
            found = f"only {pickle}: pickles are never opened" if pickle else "none"
            raise broken(self.path, f"expected {WEIGHTS}, found {found}", "fix: save it again")
        return file

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of B @ A of a module; WeightsError for another rank than it says."""
        said = self._number("r", "rank_pattern", module)
        if said != rank:
            what = f"r: {said:g} for {module}, and its tensors have {rank}"
            raise broken(self.path / CONFIG, what)
        alpha = self._number("lora_alpha", "alpha_pattern", module)
        return self.factor * alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _number(self, key: str, patterns: str, module: str) -> float:
        own = self.config.get(patterns) or {}
        names = own if isinstance(own, dict) else {"": None}
        if odd := next((name for name in names if not re.fullmatch(r"[\w.]{1,200}", name)), None):
            what = f"{patterns}: {quoted(odd)} is no name of a module"
            raise broken(self.path / CONFIG, what, MERGE)
        ends = (v for name, v in names.items() if f".{module}".endswith(f".{name}"))
        value: Any = next(ends, self.config.get(key))
        if type(value) not in (int, float) or not 0 < value < 1 << 31:
            what = f"{key}: expected a number above 0, found {quoted(value)}"
            raise broken(self.path / CONFIG, what)
        return float(value)


def lies_in(directory: Path) -> str | None:
    """Return the name of a file of an adapter in a directory, or None."""
    return next((name for name in (CONFIG, WEIGHTS) if (directory / name).is_file()), None)


def with_adapters(model: Checkpoint, spec: Spec, adapters: Iterable[Adapter]) -> Checkpoint:
    """Return a checkpoint with these adapters merged, one after the other; reads no tensor data."""
    for adapter in adapters:
        model = _merged(model, spec, adapter)
    return model


def _merged(model: Checkpoint, spec: Spec, adapter: Adapter) -> Checkpoint:
    file = adapter.weights
    names = by_plain_name(file, [read_header(file)])
    files, weights = Files(adapter.path, names), dict(model.weights)
    ignored = dict(model.ignored)
    for (module, embedding), parts in _modules(file, names).items():
        found = next(iter(parts.values()))
        bare, shape, why = _target(spec, adapter, module, found)
        if not why and bare not in weights:
            why = "part of an adapter for a tower, which this engine leaves out"
        if why:
            ignored |= {plain: why for plain, at in names.items() if at in parts.values()}
            continue
        if weights[bare].scheme:
            what = f"{bare} is quantised in {model.directory}, and an adapter needs its numbers"
            fix = "fix: give the bf16 weights that it was quantised from, and --quant"
            raise wrong(found, what, fix)
        a, b = _factors(parts, embedding, shape)
        scale = adapter.scale(module, a[1].shape[0])
        low = (b, a) if not embedding else (a, b)
        values = partial(_sum, weights[bare].parts[""], files, low, embedding, scale)
        weights[bare] = replace(weights[bare], parts={"": values})
    return replace(model, weights=weights, ignored=ignored, opened=(*model.opened, files))


def _sum(
    own: Part,
    files: Files,
    low: tuple[Found, Found],
    embedding: bool,
    scale: float,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    """Return values, or `rows` of them, plus B [N, r] @ A [r, K]; transposed for a table [K, N]."""
    left, right = (files.rows(part).float() for part in low)
    left, right = (left.T, right.T) if embedding else (left, right)
    left = left if rows is None else left.index_select(0, rows)
    return own(rows).float() + scale * (left @ right)


def _modules(file: Path, names: Mapping[str, Found]) -> Mapping[tuple[str, bool], Parts]:
    """Return the A and B of each module, and whether it is an embedding's."""
    out: dict[tuple[str, bool], dict[str, Found]] = {}
    for name, found in names.items():
        match = _PART.fullmatch(name)
        if match is None:
            raise wrong(found, "no A or B of a plain LoRA", MERGE)
        out.setdefault((match[1], bool(match[2])), {})[match[3]] = found
    if not out:
        raise broken(file, "has no tensor")
    return out


def _target(spec: Spec, adapter: Adapter, module: str, found: Found) -> tuple[str, Shape, str]:
    """Return the checkpoint's name and shape of a module's weight, and why it is left out."""
    text, dead, towers = text_tensors(spec), dead_tensors(spec), media_tensors(spec, KINDS)
    name = plain_name(f"{module}.weight")
    for prefix in dict.fromkeys(map(plain_name, (*spec.prefixes.text, ""))):
        bare = name.removeprefix(prefix) if name.startswith(prefix) else ""
        if bare in (TOKEN_TABLE, HEAD) and spec.text.tie_word_embeddings:
            raise wrong(found, TIED, MERGE)
        if bare in dead:
            return bare, dead[bare], "K or V of a layer that reads another layer's K and V"
        if bare in text:
            return bare, text[bare], ""
    for bare, shape in towers.items():
        if name in tower_names(spec, bare):
            return bare, shape, ""
    more = " (a layer with K=V has none: its K is V too)" if name.endswith("v_proj.weight") else ""
    raise wrong(
        found,
        f"spec {spec.name} has no weight {quoted(name)}{more}",
        f"fix: give an adapter of this model; this one is of {quoted(adapter.base)}",
    )


def _factors(parts: Parts, embedding: bool, shape: Shape) -> tuple[Found, Found]:
    """Return A [r, K] and B [N, r] of a weight [N, K], of a table [K, N]; WeightsError if not."""
    first = next(iter(parts.values()))
    if parts.keys() != {"A", "B"}:
        raise wrong(first, f"is there without its {'A' if 'B' in parts else 'B'}")
    a, b = parts["A"], parts["B"]
    inner, outer = (shape if embedding else shape[::-1]) if len(shape) == 2 else (0, 0)
    rank = a[1].shape[0] if a[1].shape else 0
    for part, want in ((a, (rank, inner)), (b, (outer, rank))):
        if part[1].shape != want or part[1].dtype not in FLOATS or not rank:
            expected = f"expected {' or '.join(FLOATS)} {list(want)} for a weight {list(shape)}"
            fix = "fix: give an adapter of this model"
            raise wrong(part, f"{expected}, found {shown(part)}", fix)
    return a, b
