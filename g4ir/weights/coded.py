"""A weight that a file holds in codes already, as its reader hands it on: for each format the codes
and scales of ops/codecs.py, and the names by which a source answers for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from g4ir.errors import WeightsError
from g4ir.model.names import CODES, SCALES
from g4ir.ops.codecs import dequantized
from g4ir.ops.types import torch_dtype
from g4ir.quant.recipe import Scheme

if TYPE_CHECKING:
    import torch

#: rows -> codes or scales of these rows of a table, in canonical form; None: of the whole weight
Part = Callable[["torch.Tensor | None"], "torch.Tensor"]


def _nothing() -> None:
    """Hold nothing that could be given back."""


@dataclass(frozen=True, eq=False)
class CodedWeight:
    """A weight of `shape` in a scheme. `rows` i64[n] are of a table, [rows, columns]; `release`
    gives back the pages of what was read; `fault`: why it may not be used."""

    scheme: Scheme
    shape: tuple[int, ...]
    codes: Part
    scales: Part
    release: Callable[[], None] = _nothing
    fault: str = ""
    #: dtype of the engine, which scales have where the scheme says none
    dtype: str = "f32"

    def part(self, suffix: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return codes or scales, by the suffix of their name; f32 numbers where it has none."""
        if suffix:
            return {CODES: self.codes, SCALES: self.scales}[suffix](rows)
        import torch

        scales = self.scales(rows).to(torch_dtype(self.scheme.scale or self.dtype))
        return dequantized(self.codes(rows), scales, torch.float32)


@dataclass(frozen=True, eq=False)
class MadeWeight:
    """A weight of `shape` that a file holds in a form with no codes times scales: `numbers` makes
    it, or rows of it, as CodedWeight's parts are made."""

    shape: tuple[int, ...]
    numbers: Part
    release: Callable[[], None] = _nothing

    def part(self, suffix: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the numbers; a weight of this kind has no suffix."""
        return self.numbers(rows)


def split_part(name: str) -> tuple[str, str]:
    """Split the name of a weight's codes or scales: (weight, suffix); no suffix for a weight."""
    suffix = next((s for s in (CODES, SCALES) if name.endswith(s)), "")
    return name.removesuffix(suffix), suffix


def forms_of(weights: Mapping[str, CodedWeight | MadeWeight]) -> dict[str, Scheme]:
    """Return how each weight in codes is held."""
    return {name: w.scheme for name, w in weights.items() if isinstance(w, CodedWeight)}


def checked_scales(scales: torch.Tensor, where: str) -> torch.Tensor:
    """Return scales; WeightsError naming `where` unless all are positive and finite."""
    good = (scales.float() > 0) & scales.isfinite()
    if not bool(good.all()):
        value = float(scales[~good].flatten()[0])
        raise WeightsError(
            f"{where}: a scale is {value:g}, expected positive and finite numbers; fix: download "
            f"the file again"
        )
    return scales
