"""Evaluation in float64. `Float64Matmuls` runs a torch model with 16-bit weights without a float64
copy of them: a linear's weight is converted block by block, operands of a matmul for that matmul
only, and in other ops torch's type promotion converts weights, since activations are float64.
`in_float64` runs a graph, with all floating params converted at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from g4ir.ops.types import is_float

from .graph import Graph
from .interpret import run_node

Tensor = torch.Tensor
#: elements of a weight that are converted at once: 128 MiB in float64
BLOCK = 1 << 24
_linear, _softmax = torch.nn.functional.linear, torch.nn.functional.softmax


class Float64Matmuls(TorchFunctionMode):
    """A torch function mode that computes linears and `torch.matmul` in float64, leaves out casts
    of float64 to float32 (`Tensor.float`), and computes a softmax with `dtype` in float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _linear:
            return _product(*args, **(kwargs or {}))
        if func is torch.matmul:  # float64 activations times rows of a 16-bit weight
            args = [t.double() for t in args]
        if func is _softmax and "dtype" in (kwargs or {}):
            kwargs |= {"dtype": torch.float64}
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x, rows = input.double(), max(1, BLOCK // weight.shape[-1])
    y = torch.cat([_linear(x, w.double()) for w in weight.split(rows)], -1)
    return y if bias is None else y + bias.double()


def in_float64(
    g: Graph, feeds: Mapping[str, Tensor], params: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return name -> value, for every value of a graph without caches: floats in float64 (fp8 codes
    and results of ops with a fixed dtype are converted), integers and other quantised weights as
    they are."""
    env = {k: _double(t) for k, t in {**feeds, **params}.items()}
    for n in g.nodes:
        outputs = run_node(n, [env[v.name] for v in n.inputs])
        env |= {v.name: _double(t) for v, t in zip(n.outputs, outputs, strict=True)}
    return env


def _double(t: Any) -> Any:
    return t.double() if isinstance(t, Tensor) and is_float(t) else t
