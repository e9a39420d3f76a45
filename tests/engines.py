"""Engines that several test modules use: built once per run, on well-conditioned weights.

Plain random weights let rounding grow from layer to layer (see `oracle.Weights`); these are the
same values with their vectors centred so that fp32 results can be held to a tight budget. The
final norm has both signs: with one, a tied head would mostly repeat the token that came in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import g4ir
from g4ir.checkpoint import write_checkpoint
from g4ir.engine import Engine
from g4ir.random_weights import RandomCheckpoint
from g4ir.spec import Spec, load_spec
from tests.oracle import LIVELY, relative

#: of the row's rms
BUDGET = 1e-4
MAX_SEQ = 128
CHUNK = 24
#: spec -> limits of its engines
OPTIONS: Mapping[str, dict[str, Any]] = {
    "tiny-ple": {"max_batch": 3, "all_logits": True},
    "tiny-moe": {"max_batch": 1, "all_logits": False},
}


@dataclass(frozen=True)
class Tame:
    """Random weights whose fp32 results are reproducible to a tight budget."""

    base: RandomCheckpoint

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def ignored(self) -> Mapping[str, str]:
        return {}

    @property
    def defaults(self) -> Mapping[str, float]:
        return {}

    def tensor(self, name: str) -> torch.Tensor:
        t = self.base.tensor(name)
        if name == "norm.weight":
            return t * torch.tensor([1.0, -1.0]).repeat(len(t))[: len(t)]
        return t * LIVELY.centre(name, t.shape[0]) if t.dim() == 1 else t

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        return self.base.rows(name, ids)

    def release(self, name: str) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


def tame_checkpoint(folder: Path, spec: Spec | str, seed: int = 0) -> Path:
    """A checkpoint directory of fp32 weights."""
    spec = load_spec(spec) if isinstance(spec, str) else spec
    return write_checkpoint(folder, spec, Tame(RandomCheckpoint(spec, seed, torch.float32)))


@dataclass
class Engines:
    """Builds on first use: `engines("torch", "tiny-ple")`."""

    folder: Path

    def __post_init__(self) -> None:
        self.built: dict[tuple[str, str], Engine] = {}

    def checkpoint(self, name: str) -> Path:
        path = self.folder / f"{name}-checkpoint"
        return path if path.exists() else tame_checkpoint(path, name)

    def __call__(self, backend: str, name: str) -> Engine:
        key = (backend, name)
        if key not in self.built:
            self.built[key] = g4ir.build(
                None, self.folder / "-".join(key), checkpoint=self.checkpoint(name),
                backend=backend, max_seq=MAX_SEQ, prefill_chunk=CHUNK, **OPTIONS[name],
            )  # fmt: skip
        return self.built[key]


def some_tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    """i64[rows, count] that every tiny spec has."""
    g = torch.Generator().manual_seed(77 + seed)
    return torch.randint(3, 500, (rows, count), generator=g)


def agrees(got: torch.Tensor, want: torch.Tensor, budget: float = BUDGET) -> None:
    """Each row of logits within the budget."""
    assert got.shape == want.shape, f"{got.shape}, expected {want.shape}"
    error = relative(got, want).max().item()
    assert error <= budget, f"{error:.2e} of rms, budget {budget:.0e}"
