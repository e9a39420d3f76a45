"""Makes products in float64 on weights of 16 bits, without a copy of them: a weight is converted
block by block, everything else is promoted by the float64 that goes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .graph import Graph
from .interpret import run_node

Tensor = torch.Tensor
#: elements of a weight that are converted at once: 128 MiB in float64
BLOCK = 1 << 24
_linear = torch.nn.functional.linear


class WideProducts(TorchFunctionMode):
    """A mode of torch in which products with a weight are made in float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _linear:
            return _product(*args, **(kwargs or {}))
        if func is torch.matmul:  # with rows of a weight
            args = [t.double() for t in args]
        return func(*args, **(kwargs or {}))


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x, rows = input.double(), max(1, BLOCK // weight.shape[-1])
    y = torch.cat([_linear(x, w.double()) for w in weight.split(rows)], -1)
    return y if bias is None else y + bias.double()


def in_float64(
    g: Graph, feeds: Mapping[str, Tensor], params: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return every value of a graph without caches, computed without rounding; ops that say which
    dtype they make are overruled."""
    known = {k: _double(t) for k, t in {**feeds, **params}.items()}
    for n in g.nodes:
        made = run_node(n, [known[v.name] for v in n.inputs])
        known |= {v.name: _double(t) for v, t in zip(n.outputs, made, strict=True)}
    return known


def _double(t: Any) -> Any:
    return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t
