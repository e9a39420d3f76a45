"""A segment as a torch function: the op's own reference unless the table has something better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from g4ir.ir.graph import Node, Value
from g4ir.model.decoder import TOKENS, VERIFY
from g4ir.ops.attention import slot_positions
from g4ir.ops.base import as_tuple, wide
from g4ir.ops.codecs import dequantized, fake_quantized, from_tiles, quantized
from g4ir.ops.mlp import activate
from g4ir.ops.moe import own_index
from g4ir.ops.types import Type, torch_dtype

from .attention import attention, attention_latent, encoder_attention
from .kernels.base import Coded, Run, Schedule, both_in_codes, codes_of
from .target import FROM

Tensor = torch.Tensor


def run_node(run: Run, n: Node) -> None:
    """Add what a node makes to the run: by its kernel, a lowering, its reference, or its parts."""
    choice = run.schedule.find(n)
    kept = TAKES.get(n.op, ()) if not choice else (Coded,) if choice.kernel.coded else ()
    given = (run.env[v.name] for v in n.inputs)
    tensors = (t if isinstance(t, kept) else dense(t) for t in given)
    if choice:
        results = as_tuple(choice.kernel.call(run, n, choice, *tensors))
    elif n.op in LOWERINGS:
        results = as_tuple(LOWERINGS[n.op](run, n, *tensors))
    elif n.definition.reference:
        results = as_tuple(n.definition.reference(*tensors, **n.attrs))
    else:
        nodes, values = n.expanded
        for inner in nodes:
            run_node(run, inner)
        results = tuple(run.env[v.name] for v in values)
    run.env.update({v.name: t for v, t in zip(n.outputs, results, strict=True)})


class SegmentModule(torch.nn.Module):
    """Inputs, params and caches in the segment's order -> outputs; caches are written in place."""

    def __init__(self, s: Schedule) -> None:
        super().__init__()
        self.schedule = s

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        g = self.schedule.graph
        run = Run(self.schedule, {v.name: t for v, t in zip(g.sources(), tensors, strict=True)})
        _unify_dims(g.sources(), run.env)
        for n in g.nodes:
            run_node(run, n)
        return tuple(dense(run.env[v.name]).contiguous() for v in g.outputs)


def _unify_dims(values: tuple[Value, ...], env: dict[str, Any]) -> None:
    """Tell the exporter that equal names are equal sizes."""
    sizes: dict[str, Any] = {}
    for v in values:
        for i, d in enumerate(v.type.shape):
            if isinstance(d, str):
                size = env[v.name].shape[i]
                torch._check(size == sizes.setdefault(d, size))


@dataclass(frozen=True)
class Rounded:
    """Rows before `fake_quantize` rounds them to a form, for products that take them so."""

    x: Tensor
    form: str


def dense(value: Any) -> Any:
    """Return the numbers that codes or rounded rows stand for; anything else as it is."""
    if isinstance(value, Rounded):
        return fake_quantized(value.x, value.form)
    if not isinstance(value, Coded):
        return value
    codes, scales = value.codes, value.scales
    if value.tiles:
        codes, scales = from_tiles(codes), from_tiles(scales)
    return dequantized(codes, scales, value.dtype)


def _dequantize(m: Run, n: Node, codes: Tensor, scales: Tensor) -> Any:
    """Return the quantised weight where something takes it so: a kernel, or a large product."""
    coded = Coded(codes, scales, torch_dtype(n.word("to")), n.op == "dequantize_tiles")
    if m.schedule.target.gpu:
        return coded if codes_of(m.graph, n.out) else dense(coded)
    return coded if m.device == "cpu" and n.out.type.numel() >= FROM else dense(coded)


def _fake_quantize(m: Run, n: Node, x: Tensor) -> Rounded:
    return Rounded(x, n.word("form"))


def _linear(m: Run, n: Node, x: Tensor | Rounded, w: Tensor | Coded) -> Any:
    if isinstance(x, Rounded) and isinstance(w, Coded):
        if m.device == "cpu" and x.form == "int8":
            return torch.ops.g4ir.linear_rounded(x.x, w.codes, w.scales, w.tiles)
        if m.schedule.target.gpu and both_in_codes(m.graph, n):
            return product_of_codes(x.x, w)
    rows = dense(x)
    if isinstance(w, Coded) and m.device == "cpu":
        return torch.ops.g4ir.linear_coded(rows, w.codes, w.scales, w.tiles)
    weight = dense(w)
    if m.device == "cpu" and weight.numel() >= FROM:
        return torch.ops.g4ir.linear(rows, weight)
    return torch.nn.functional.linear(rows, weight)


def product_of_codes(x: Tensor, w: Coded) -> Tensor:
    """Return fake_quantize(x) @ w^T: codes are multiplied, scales after the sum, which is fp32."""
    rows = x.flatten(0, -2)
    codes, scales = quantized(rows, "fp8", x.shape[-1], "f32")
    made = torch._scaled_mm(codes, w.codes.t(), scales, w.scales.float().t(), out_dtype=w.dtype)
    return made.unflatten(0, x.shape[:-1])


def _experts(
    m: Run,
    n: Node,
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    gate_up: Tensor | Coded,
    down: Tensor | Coded,
    first: Tensor | None = None,
) -> Any:
    act = n.word("act")
    if m.device == "cpu" and isinstance(gate_up, Coded) and isinstance(down, Coded):
        parts = (gate_up.codes, gate_up.scales, down.codes, down.scales)
        tiles = (gate_up.tiles, down.tiles)
        return torch.ops.g4ir.experts_coded(x, weights, index, *parts, act, *tiles, first)
    operands = (x, weights, index, dense(gate_up), dense(down), act, first)
    return torch.ops.g4ir.experts(*operands) if m.device == "cpu" else grouped_experts(*operands)


def grouped_experts(
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    gate_up: Tensor,
    down: Tensor,
    act: str,
    first: Tensor | None = None,
) -> Tensor:
    """Compute the op `experts` without data-dependent shapes: tokens sorted by expert, two grouped
    products, fp32 weighting and sum in rank order."""
    experts = gate_up.shape[0]
    own = index if first is None else own_index(index, first, experts)  # others come last
    tokens, slots = x.flatten(0, -2), own.flatten(0, -2)
    k = slots.shape[1]
    ids = slots.flatten().to(smallest(experts))
    order = ids.argsort(stable=True)
    bounds = torch.arange(1, experts + 1, device=x.device, dtype=ids.dtype)
    ends = torch.searchsorted(ids[order], bounds).to(torch.int32)
    rows = tokens[order // k]
    gate, up = torch.ops.g4ir.grouped_mm(rows, gate_up, ends).chunk(2, -1)
    rows = torch.ops.g4ir.grouped_mm(activate(gate, act) * up, down, ends)
    out = wide(torch.empty_like(rows)).index_copy(0, order, wide(rows))
    out = out.view(*slots.shape, -1) * weights.flatten(0, -2)[..., None]
    if first is not None:
        out = torch.where((slots < experts)[..., None], out, 0)  # no product wrote these
    return out.sum(1).to(x.dtype).view_as(x)


def smallest(most: int) -> torch.dtype:
    """Return the smallest type that holds 0 to `most`: a sort takes eight bits at a time."""
    return next(d for d in (torch.uint8, torch.int16, torch.int64) if most <= torch.iinfo(d).max)


def _cache_write(m: Run, n: Node, cache: Tensor, new: Tensor, *place: Tensor) -> Tensor:
    """Write in place. Floats in 8 bits move as bytes: the compiler chooses between no others."""
    bytewise = cache.dtype == torch.float8_e4m3fn
    held, rows = (t.view(torch.uint8) if bytewise else t for t in (cache, new))
    _write(m, n, held, rows, *place)
    return cache


def _write(m: Run, n: Node, cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor) -> None:
    """One token goes to its slot, and so do those of a chunk: on a GPU, of any; on the CPU, of one
    that may be rejected, for which every cache has slots. Other chunks on the CPU make the whole
    cache anew, where copying is what was measured."""
    if n["new"].type.shape[1] == 1:
        rows = torch.arange(new.shape[0], device=new.device)
        slot = torch.remainder(start, cache.shape[0])
        value = torch.where((lengths > 0)[:, None, None], new[:, 0], cache[slot, rows])
        cache.index_put_((slot, rows), value)
        return
    few = n["new"].type.shape[1] == TOKENS[VERIFY]
    ring = not isinstance(n["cache"].type.shape[0], str)  # a list has as many slots as tokens
    if few or (m.device != "cpu" and not ring):
        _list_write(cache, new, start, lengths)
    elif m.device != "cpu":
        _ring_write(cache, new, start, lengths)
    else:
        _rewrite(cache, new, start, lengths)


def _list_write(cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor) -> None:
    """Write slots start .. start + lengths - 1 of each row of the cache [C,B,n,d]. Padding writes
    what was there, to slots of its own: no chunk is longer than the cache."""
    torch._check(new.shape[1] <= cache.shape[0])
    tokens = torch.arange(new.shape[1], device=new.device)[:, None]
    rows = torch.arange(new.shape[0], device=new.device)[None].expand(new.shape[1], -1)
    slot = torch.remainder(start + tokens, cache.shape[0])
    real = (tokens < lengths)[:, :, None, None]
    cache.index_put_((slot, rows), torch.where(real, new.transpose(0, 1), cache[slot, rows]))


def _ring_write(cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor) -> None:
    """Write the newest tokens of each row to their slots of a ring [C,B,n,d], as many as a chunk
    and the ring both have: two older ones could share a slot. So each slot is written once; where a
    row has fewer tokens, those before its first write what was there."""
    count = torch.sym_min(new.shape[1], cache.shape[0])
    rows = torch.arange(new.shape[0], device=new.device)[None].expand(count, -1)
    tokens = lengths - count + torch.arange(count, device=new.device)[:, None]
    slot = torch.remainder(start + tokens, cache.shape[0])
    picked = new[rows, tokens.clamp(min=0)]
    real = (tokens >= 0)[:, :, None, None]
    cache.index_put_((slot, rows), torch.where(real, picked, cache[slot, rows]))


def _rewrite(cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor) -> None:
    """Write every slot of the cache [C,B,n,d]: its newest token of the chunk, or what it held."""
    rows = torch.arange(new.shape[0], device=new.device)
    source = slot_positions(start + lengths, cache.shape[0]) - start
    picked = new[rows, source.clamp(min=0)]
    cache.copy_(torch.where((source >= 0)[:, :, None, None], picked, cache))


#: op -> what its lowering takes that is no tensor
TAKES: dict[str, tuple[type, ...]] = {"linear": (Coded, Rounded), "experts": (Coded,)}
#: op -> (run, node, *tensors) -> result, for nodes that become no kernel; an op that is not here
#: runs its reference
LOWERINGS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "dequantize": _dequantize,
    "dequantize_tiles": _dequantize,
    "fake_quantize": _fake_quantize,
    "experts": _experts,
    "cache_write": _cache_write,
    "attention": attention,
    "attention_latent": attention_latent,
    "encoder_attention": encoder_attention,
}


def example(t: Type, device: str, dims: dict[str, int]) -> Tensor:
    """Make a contiguous tensor of the type. It is never read; untouched memory costs nothing."""
    shape = [int(d) for d in t.bind(dims).shape]
    return torch.empty(shape, dtype=torch_dtype(t.dtype), device=device)
