"""Trial compilation of a network with fake weights, for the builder's log; the plan is
discarded."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from g4ir.ir.graph import Graph
from g4ir.ops.types import Type, torch_dtype
from g4ir.plan.engine_limits import Limits
from g4ir.ui.progress import no_progress
from g4ir.weights.pack import ParamSource

from . import build
from .compiled import CompiledProfile, compiled
from .host import Api, logger
from .interface import LOG
from .target import Target

#: a buffer repeats its values after this many
PERIOD = 1 << 22
#: offset in elements between params of different sizes
STRIDE = 64


@dataclass(frozen=True)
class Trial:
    """Result of a trial: number of layers, costs of the profiles, and bytes of the plan."""

    layers: int
    profiles: Mapping[str, CompiledProfile]
    plan_bytes: int


@dataclass(frozen=True)
class Repeated:
    """Fake params: views of one buffer per dtype, which is hardly larger than the largest param. A
    plan stores equal weights once, so it stays small too. Params of different sizes begin at
    different addresses, as the parser requires."""

    types: Mapping[str, Type]
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensor(self, name: str) -> torch.Tensor:
        t = self.types[name]
        sizes = sorted({x.numel() for x in self.types.values() if x.dtype == t.dtype})
        if t.dtype not in self._buffers:
            self._buffers[t.dtype] = _values(t.dtype, sizes[-1] + STRIDE * len(sizes))
        start = STRIDE * sizes.index(t.numel())
        return self._buffers[t.dtype][start : start + t.numel()].view([*map(int, t.shape)])


def _values(dtype: str, count: int) -> torch.Tensor:
    kind, g = torch_dtype(dtype), torch.Generator().manual_seed(0)
    size = min(count, PERIOD)
    if kind.is_floating_point:
        some = (torch.rand(size, generator=g) * 0.05 + 1e-3).to(kind)
    else:
        some = torch.randint(-7, 8, (size,), generator=g).to(kind)
    return some.repeat(-(-count // size))[:count]


def parse_once(api: Api, graph: Graph, limits: Limits, settings: Mapping[str, str]) -> int:
    """Return the number of layers of a parsed network with fake params. LowerError if it is
    refused."""
    return int(_written(api, graph, limits, settings, logger(api.trt)).network.num_layers)


def compile_once(
    api: Api, graph: Graph, limits: Limits, settings: Mapping[str, str], target: Target
) -> Trial:
    """Compile a network with fake params. LowerError if it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        log, plan = logger(api.trt, Path(folder) / LOG), Path(folder) / "plan"
        w = _written(api, graph, limits, settings, log)
        config = build.configure(api, w, None, target)
        build.build_plan(api, w, config, None, plan, no_progress)
        log.close()
        text = (Path(folder) / LOG).read_text(errors="replace")
        profiles = compiled(text, [*w.interface.profiles], [v.name for v in graph.state])
        return Trial(int(w.network.num_layers), profiles, plan.stat().st_size)


def _written(
    api: Api, graph: Graph, limits: Limits, settings: Mapping[str, str], log: Any
) -> build.Written:
    params = cast(ParamSource, Repeated({v.name: v.type for v in graph.params}))
    return build.write_network(api, graph, limits, params, settings, log)
