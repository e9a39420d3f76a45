"""Each plugin in torch, for networks that are executed without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from g4ir.ir.graph import Builder, Value
from g4ir.ir.interpret import run_node
from g4ir.ops.base import as_tuple, wide
from g4ir.ops.mlp import activate
from g4ir.ops.types import Type, dtype_name, torch_dtype

from ...torch_compile.kernels.base import SHARE_KEYS, SHARES
from .table import NORMS, PLUGINS, Constants, Plan

Tensor = torch.Tensor


def meaning(plugin: str, attributes: Mapping[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Compute a plugin by `run`, as the recorder asks for it."""
    return run(Plan.parse(attributes["plan"]), *tensors)


def run(plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Compute the outputs of a plugin on these inputs."""
    made = _MEANING[plan.plugin](plan.constants, *tensors)
    kinds = PLUGINS[plan.plugin].kinds(plan.dtype)[-len(made) :]
    return tuple(t.to(torch_dtype(kind)) for t, kind in zip(made, kinds, strict=True))


def _per_slot(x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    """Multiply x [..., K or 1, k], w [E, n, k], index [..., K] -> [..., K, n], rounded once."""
    chosen = w[index.long()]
    return (wide(chosen) @ wide(x)[..., None])[..., 0].to(x.dtype)


def _glu(x: Tensor, index: Tensor, gate_up: Tensor, act: str) -> Tensor:
    gate, up = _per_slot(x[..., None, :], gate_up, index).chunk(2, -1)
    out: Tensor = activate(gate, act) * up
    return out


def _sort(c: Constants, index: Tensor) -> tuple[Tensor, ...]:
    flat = index.flatten()
    order = flat.argsort(stable=True).to(torch.int32).view_as(index)
    counts = torch.bincount(flat, minlength=c["EXPERTS"])
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)
    return order, offsets


def _index(order: Tensor, offsets: Tensor) -> Tensor:
    index = torch.empty_like(order).flatten()
    experts = torch.arange(len(offsets) - 1, dtype=torch.int32)
    index[order.flatten().long()] = experts.repeat_interleave(offsets.diff())
    return index.view_as(order)


def _gate_up_grouped(
    c: Constants, x: Tensor, order: Tensor, offsets: Tensor, gate_up: Tensor
) -> tuple[Tensor, ...]:
    return (_glu(x, _index(order, offsets), gate_up, c["ACT"]),)


def _down_grouped(
    c: Constants, act: Tensor, order: Tensor, offsets: Tensor, down: Tensor
) -> tuple[Tensor, ...]:
    return (_per_slot(act, down, _index(order, offsets)),)


def _combine(c: Constants, parts: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    return ((wide(parts) * weights[..., None]).sum(-2).to(parts.dtype),)


def _seen(c: Constants, positions: Tensor, slots: Tensor) -> Tensor:
    """Return [B, S, shares, SLOTS]: keys of each share of each token."""
    shares = -(-c["SPLITS"] // positions.shape[1])
    end = (positions.clamp(max=min(len(slots), c["SLOTS"]) - 1) + 1).clamp(min=1)
    first = (end - c["WINDOW"]).clamp(min=0) if c["WINDOW"] else torch.zeros_like(end)
    seen = end - first
    share = (-(-seen // shares)).clamp(min=c["N"])
    if shares > SHARES:
        share = share.maximum((-(-seen // SHARES)).clamp(max=SHARE_KEYS))
    low = first[..., None] + torch.arange(shares) * share[..., None]
    high = torch.minimum(low + share[..., None], end[..., None])
    j = torch.arange(c["SLOTS"])
    return (j >= low[..., None]) & (j < high[..., None])


def _parts(
    c: Constants, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor
) -> tuple[Tensor, ...]:
    query = wide(q).view(*q.shape[:2], c["HEADS"], 1, c["GROUP"], c["D"])
    s = query @ wide(keys)[:, None, :, None].transpose(-1, -2) * c["INNER"]
    s = c["OUTER"] * s.tanh() if c["CAPPED"] else s
    seen = _seen(c, positions, slots)[:, :, None, :, None]
    s = s.masked_fill(~seen, -torch.inf)
    top = s.amax(-1)
    p = torch.where(seen, torch.exp2(s - top[..., None].clamp(min=-1e30)), 0.0)
    rounded = wide(p.to(values.dtype))
    rows = wide(values)[:, None, :, None]
    return rounded @ rows, torch.stack((top, p.sum(-1)), 4)


def _merge(
    c: Constants, parts: Tensor, stats: Tensor, positions: Tensor, slots: Tensor
) -> tuple[Tensor, ...]:
    top, total = stats.unbind(4)
    gain = torch.exp2(top - top.amax(3, keepdim=True))
    out = (parts * gain[..., None]).sum(3) / (total * gain).sum(3)[..., None]
    return (out.flatten(2, 3),)


def _norms(name: str, c: Constants, *given: Tensor) -> tuple[Tensor, ...]:
    """Run the op of an end of a block."""
    op, scaled, weighted = NORMS[name]
    b = Builder()
    values = [
        Value(f"x{i}", Type(dtype_name(t.dtype), tuple(t.shape))) for i, t in enumerate(given)
    ]
    b.emit_all(op, *values, eps=c["EPS"], scaled=scaled, weighted=weighted)
    return as_tuple(run_node(b.nodes[0], [*given]))


_MEANING: Mapping[str, Callable[..., Any]] = {
    "moe_sort": _sort,
    "moe_gate_up_grouped": _gate_up_grouped,
    "moe_down_grouped": _down_grouped,
    "moe_combine": _combine,
    "decode_parts": _parts,
    "decode_merge": _merge,
    **{name: partial(_norms, name) for name in NORMS},
}
