"""The weights of a model and, under names of their own, those of its drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from g4ir.model.names import OF_DRAFTER
from g4ir.quant.recipe import Scheme
from g4ir.spec.record import Spec

from .checkpoint import WeightSource
from .random import RandomCheckpoint

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


@dataclass(frozen=True)
class WithDrafter:
    """A WeightSource of two: `draft.NAME` is the drafter's tensor NAME."""

    model: WeightSource
    drafter: WeightSource

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def ignored(self) -> Mapping[str, str]:
        return {**self.model.ignored, **_scoped(self.drafter.ignored)}

    @property
    def defaults(self) -> Mapping[str, float]:
        return {**self.model.defaults, **_scoped(self.drafter.defaults)}

    @property
    def forms(self) -> Mapping[str, Scheme]:
        return self.model.forms

    def tensor(self, name: str) -> torch.Tensor:
        return self._of(name).tensor(name.removeprefix(OF_DRAFTER))

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        return self._of(name).rows(name.removeprefix(OF_DRAFTER), ids)

    def release(self, name: str) -> None:
        self._of(name).release(name.removeprefix(OF_DRAFTER))

    def close(self) -> None:
        self.model.close()
        self.drafter.close()

    def _of(self, name: str) -> WeightSource:
        return self.drafter if name.startswith(OF_DRAFTER) else self.model


def _scoped(values: Mapping[str, T]) -> dict[str, T]:
    return {f"{OF_DRAFTER}{name}": value for name, value in values.items()}


def random_weights(
    spec: Spec, drafter: Spec | None, seed: int, dtype: torch.dtype, device: str = "cpu"
) -> WeightSource:
    """Return the weights that a seed gives a model, and its drafter if it has one."""
    model = RandomCheckpoint(spec, seed, dtype, device)
    if drafter is None:
        return model
    return WithDrafter(model, RandomCheckpoint(drafter, seed, dtype, device))
