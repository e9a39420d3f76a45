"""Lowerings of a graph's nodes on a GPU: kernels of the table (kernels/), else mostly torch ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from g4ir.backends.inductor.lower import COMMON
from g4ir.backends.inductor.lowered import Coded, Lowered, Lowering
from g4ir.ir.graph import Node
from g4ir.ops.base import upcast
from g4ir.ops.codecs import FORMAT_OF, dequantize_codes
from g4ir.ops.mlp import activate
from g4ir.ops.moe import local_expert_index
from g4ir.ops.quant import embedding_quantized
from g4ir.ops.types import torch_dtype

from .kernels.base import PackedWeight, Schedule, codes_of

Tensor = torch.Tensor


def lowered(s: Schedule) -> Lowered:
    """Return the schedule's graph with the lowering of each node: by its kernel, else from
    LOWERINGS, else None: the op's reference or expansion."""

    def lowering(n: Node) -> Lowering | None:
        if (choice := s.find(n)) is None:
            return LOWERINGS.get(n.op)
        kernel = choice.kernel
        call = lambda n, *tensors: kernel.call(n, choice, *tensors)  # noqa: E731
        return Lowering(call, (Coded,) if kernel.coded else ())

    return Lowered(s.graph, lowering)


def _dequantize(n: Node, codes: Tensor, scales: Tensor) -> Any:
    """Return the weight quantised (PackedWeight) if kernels read its format, else dequantised."""
    weight = PackedWeight(codes.view(torch.uint8), scales, torch_dtype(n.word("to")), form=_form(n))
    return weight if codes_of(n) else dequantize_codes(_typed(n, codes), scales, weight.dtype)


def _embedding(n: Node, codes: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
    if not codes_of(n):
        attrs: dict[str, Any] = {**n.attrs}
        return embedding_quantized.reference(_typed(n, codes), scales, ids, **attrs)
    from .kernels.rows_triton import gathered_rows

    weight = codes.view(torch.uint8), scales, _form(n)
    return gathered_rows(*weight, ids, n.number("scale"), torch_dtype(n.word("to")))


def _form(n: Node) -> str:
    return FORMAT_OF[n["codes"].type.dtype]


def _typed(n: Node, codes: Tensor) -> Tensor:
    """Return codes, which programs take as bytes, viewed in the dtype of their format."""
    return codes.view(torch_dtype(n["codes"].type.dtype))


def grouped_experts(
    act: str,
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    gate_up: Tensor,
    down: Tensor,
    first: Tensor | None = None,
) -> Tensor:
    """Compute the op `experts` without data-dependent shapes: tokens sorted by expert, two grouped
    matmuls, weighting and sum in fp32 in top-k order. `first`: index of this rank's first expert;
    None: no other rank has experts."""
    experts = gate_up.shape[0]
    local = (
        index if first is None else local_expert_index(index, first, experts)
    )  # experts of other ranks come last
    tokens, slots = x.flatten(0, -2), local.flatten(0, -2)
    k = slots.shape[1]
    ids = slots.flatten().to(smallest(experts))
    order = ids.argsort(stable=True)
    bounds = torch.arange(1, experts + 1, device=x.device, dtype=ids.dtype)
    ends = torch.searchsorted(ids[order], bounds).to(torch.int32)
    rows = tokens[order // k]
    gate, up = torch.ops.g4ir.grouped_mm(rows, gate_up, ends).chunk(2, -1)
    rows = torch.ops.g4ir.grouped_mm(activate(gate, act) * up, down, ends)
    out = upcast(torch.empty_like(rows)).index_copy(0, order, upcast(rows))
    out = out.view(*slots.shape, -1) * weights.flatten(0, -2)[..., None]
    if first is not None:
        out = torch.where((slots < experts)[..., None], out, 0)  # other ranks' rows are undefined
    return out.sum(1).to(x.dtype).view_as(x)


def smallest(max_value: int) -> torch.dtype:
    """Return the smallest of uint8, int16 and int64 that represents 0 to `max_value`: radix sort
    does eight bits per pass."""
    return next(
        d for d in (torch.uint8, torch.int16, torch.int64) if max_value <= torch.iinfo(d).max
    )


def _grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows ends[e-1] to ends[e] (i32[E]) of x [rows, k] by w[e]^T, w [E, n, k]: [rows, n];
    rows from the last end on are undefined. A custom op, since compiled programs support torch's
    only from 2.12 on."""
    return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)


def _grouped_fake(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]))


_LIBRARY = torch.library.Library("g4ir", "FRAGMENT")
_SCHEMA = torch.library.infer_schema(_grouped_mm, mutates_args=(), op_name="grouped_mm")
_LIBRARY.define(_SCHEMA)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("grouped_mm", _grouped_mm, _key)
torch.library.register_fake("g4ir::grouped_mm", _grouped_fake)


#: op -> lowering of nodes without a kernel; default: the op's reference or expansion
LOWERINGS: Mapping[str, Lowering] = {
    **COMMON,
    "dequantize": Lowering(_dequantize),
    "embedding_quantized": Lowering(_embedding),
    "experts": Lowering(lambda n, *inputs: grouped_experts(n.word("act"), *inputs)),
}
