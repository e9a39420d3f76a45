"""Mixture of experts: router, routed experts, and both with the parallel dense MLP."""

from __future__ import annotations

from typing import Any

from .base import Traffic, cases, every_operand, op, require, upcast
from .budgets import Budget
from .mlp import activate
from .types import ITEMSIZE, Type, Types, torch

#: attributes of `moe_mlp`: activation of the dense MLP and of the experts; `top_k` and `root` as in
#: `router`
ROUTING = {"act": "str", "top_k": "int", "root": "float"}


@op
class router:
    """weights, indices of the top_k experts (rules 23, 24)

    scores = (x * scale) * root @ proj^T, each step rounded to x's dtype; softmax over the
    experts, top-k, division by their sum and the per-expert scale in fp32. `x` is already
    normalised; root = hidden_size^-0.5 is a Python float and stays unrounded.
    """

    budget = Budget(
        8, 256, "scores of up to 8 are rounded, and a weight is off by as much as they are"
    )
    kind = "experts"
    rows = (0,)

    @staticmethod
    def infer(
        x: Type, scale: Type, proj: Type, per_expert: Type, *, top_k: int, root: float
    ) -> tuple[Type, Type]:
        experts = proj.shape[0]
        require(scale.shape == x.shape[-1:], f"router: scale {scale} does not fit {x}")
        fits = proj.rank == 2 and proj.shape[1] == x.shape[-1]
        require(fits, f"router: proj {proj} does not fit {x}")
        for w in (scale, proj):
            require(w.dtype == x.dtype, f"router: {w} and {x} differ in dtype")
        require(per_expert.shape == (experts,), f"router: {per_expert} does not fit {proj}")
        fits = isinstance(experts, int) and 0 < top_k <= experts
        require(fits, f"router: top_k {top_k}: expected 1 to {experts}")
        lead = x.shape[:-1]
        out_dtype = "f64" if x.dtype == "f64" else "f32"
        return Type(out_dtype, (*lead, top_k)), Type("i64", (*lead, top_k))

    @staticmethod
    def reference(
        x: Any, scale: Any, proj: Any, per_expert: Any, *, top_k: int, root: float
    ) -> tuple[Any, Any]:
        scores = torch.nn.functional.linear(x * scale * root, proj)
        weights, index = torch.topk(upcast(scores).softmax(-1), top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights * per_expert[index], index

    @staticmethod
    def flops(ins: Types, outs: Types, **_: Any) -> int:
        return 2 * ins[0].numel() * int(ins[2].shape[0])

    samples = cases(
        "f32[2,3,16] f32[16] f32[8,16] f32[8] {top_k=2}",
        "f32[1,1,16] f32[16] f32[6,16] f32[6] {top_k=6}",
        root=0.25,
    )


def distinct_experts(count: int, top_k: int, tokens: int) -> float:
    """Return the expected number of distinct experts among `tokens` uniform choices of top_k of
    `count`: count * (1 - (1 - top_k / count)^tokens)."""
    return count * (1 - (1 - top_k / count) ** tokens)


def local_expert_index(index: Any, first: Any, count: int) -> Any:
    """Map global expert indices to local ones, of `count` experts from `first` on; `count` for
    experts of other ranks."""
    position = index - first
    return torch.where((position >= 0) & (position < count), position, count)


@op
class experts:
    """y = sum over top_k choices of weight * down[e] @ (act(gate) * up), gate, up = gate_up[e] @ x

    Products are rounded to x's dtype; weighting and the sum over the choices, in top-k rank
    order, are fp32 and cast once (rules 24, 25: the reference's grouped form).
    gate_up [E, 2I, D] holds the gate rows first; down [E, D, I]. With `first`, i64[1], they are
    experts first .. first + E - 1 of `total`; other experts contribute zero.
    """

    budget = Budget(2, 512, "two products and the activation between them, each rounded")
    kind = "experts"
    rows = (0, 1, 2)
    operands = "x weights index gate_up down first?"

    @staticmethod
    def infer(*inputs: Type, act: str, total: int = 0) -> Type:
        x, weights, index, gate_up, down, *first = inputs
        require(gate_up.rank == 3, f"experts: gate_up {gate_up} is not [E, 2I, D]; x {x}")
        experts, double, hidden = gate_up.shape
        require(hidden == x.shape[-1], f"experts: gate_up {gate_up} does not fit {x}")
        even = isinstance(double, int) and double % 2 == 0
        fits = even and down.shape == (experts, hidden, int(double) // 2)
        require(fits, f"experts: down {down} does not fit gate_up {gate_up}")
        for w in (gate_up, down):
            require(w.dtype == x.dtype, f"experts: {w} and {x} differ in dtype")
        fits = weights.shape == index.shape and weights.shape[:-1] == x.shape[:-1]
        fits = fits and index.dtype == "i64"
        require(fits, f"experts: weights {weights} and index {index} do not fit {x}")
        _require_part(gate_up, first, total)
        return x

    @staticmethod
    def reference(*inputs: Any, act: str, total: int = 0) -> Any:
        x, weights, index, gate_up, down, *first = inputs
        count = len(gate_up)
        local = local_expert_index(index, first[0], count) if first else index
        tokens, slots = x.flatten(0, -2), local.flatten(0, -2)
        if torch.compiler.is_compiling():
            rows = _every_expert(tokens, slots, gate_up, down, act)
            rows = upcast(rows) * weights.flatten(0, -2)[..., None]
            return rows.sum(1).to(x.dtype).view_as(x)
        out = upcast(tokens).new_zeros(*slots.shape, tokens.shape[-1])
        for e in slots[slots < count].unique().tolist():
            token, slot = torch.where(slots == e)
            gate, up = torch.nn.functional.linear(tokens[token], gate_up[e]).chunk(2, -1)
            y = torch.nn.functional.linear(activate(gate, act) * up, down[e])
            out[token, slot] = upcast(y) * weights.flatten(0, -2)[token, slot, None]
        return out.sum(1).to(x.dtype).view_as(x)

    @staticmethod
    def flops(ins: Types, outs: Types, **_: Any) -> int:
        double, hidden = ins[3].shape[1:]
        return 3 * ins[2].numel() * int(double) * int(hidden)

    @staticmethod
    def traffic(ins: Types, outs: Types, *, total: int = 0, **_: Any) -> Traffic:
        """Count the weights of `distinct_experts` only, an upper bound for skewed routers; with
        expert parallelism, the local fraction of them."""
        reads, writes = every_operand(ins, outs)
        count = total or int(ins[3].shape[0])
        k = int(ins[2].shape[-1])
        share = min(distinct_experts(count, k, ins[2].numel() // k) / count, 1)
        weights = (round(size * share) for size in reads[3:5])
        return (*reads[:3], *weights, *reads[5:]), writes

    @staticmethod
    def workspace(ins: Types, outs: Types, **_: Any) -> int:
        """Count the gathered rows, gate and up, their product, the result, and the result in fp32
        before and after weighting."""
        x, _weights, index, gate_up = ins[:4]
        double, hidden = map(int, gate_up.shape[1:])
        width = ITEMSIZE[x.dtype]
        return index.numel() * (2 * hidden * width + double * 3 // 2 * width + 2 * hidden * 4)

    samples = cases(
        "f32[2,3,16] f32[2,3,2] i64[2,3,2]@0:8 f32[8,24,16] f32[8,16,12] {act='gelu_pytorch_tanh'}",
        "f32[1,1,16] f32[1,1,2] i64[1,1,2]@1:2 f32[4,24,16] f32[4,16,12] {act='silu'}",
        "f32[2,3,16] f32[2,3,2] i64[2,3,2]@0:8 f32[3,24,16] f32[3,16,12] i64[1]@3:4 "
        "{act='silu', total=8}",
    )


def _every_expert(x: Any, slots: Any, gate_up: Any, down: Any, act: str) -> Any:
    """Return the outputs [T, k, D] of the experts in `slots` for x [T, D]; zero for experts of
    other ranks. Every expert computes every row, so that no shape depends on data, as compilers
    require."""
    gate, up = torch.matmul(x, gate_up.transpose(1, 2)).chunk(2, -1)
    outputs = torch.matmul(activate(gate, act) * up, down.transpose(1, 2)).transpose(0, 1)
    is_local = (slots < len(gate_up))[..., None]
    index = slots.clamp(max=len(gate_up) - 1)[..., None].expand(-1, -1, x.shape[-1])
    return torch.where(is_local, outputs.gather(1, index), 0)


def _require_part(gate_up: Type, first: list[Type], total: int) -> None:
    count = gate_up.shape[0]
    if not first:
        require(total == 0, f"experts: total {total} needs the operand `first`; {gate_up}")
    else:
        fits = first == [Type("i64", (1,))] and isinstance(count, int) and count <= total
        why = f"expected at most {total} experts and first i64[1]"
        require(fits, f"experts: {why}, found gate_up {gate_up}, first {first[0]}")


@op
class moe_mlp:
    """dense, moe: the gated MLP of x_dense; the experts routed by x_router on x_moe (rule 7)

    dense = linear(linear_glu(x_dense, w_dense), w_dense_down);
    moe = experts(x_moe, *router(x_router, router_scale, router_proj, per_expert), gate_up, down),
    with `first` as in `experts`. The inputs are norms of one residual, [B,S,D]. One op, so that a
    kernel can run both branches in one grid.
    """

    budget = Budget(9, 576, "as router, then as experts; the dense MLP is off by less")
    kind = "experts"
    rows = (0, 1, 2)
    operands = (
        "x_dense x_moe x_router router_scale router_proj per_expert w_dense w_dense_down"
        " gate_up down first?"
    )
    attrs = ROUTING

    @staticmethod
    def expand(b: Any, *inputs: Any, act: str, **routing: Any) -> tuple[Any, Any]:
        x_dense, x_moe, *router = inputs[:6]
        w_dense, w_dense_down, gate_up, down, *first = inputs[6:]
        total, count = router[2].type.shape[0], gate_up.type.shape[:1]
        fits = first or count == (total,)
        require(fits, f"router_proj {router[2].type} does not fit gate_up {gate_up.type}")
        y = b.emit("linear_glu", x_dense, w_dense, act=act)
        dense = b.emit("linear", y, w_dense_down)
        weights, index = b.emit_all("router", *router, **routing)
        part = {"total": total} if first else {}
        moe = b.emit("experts", x_moe, weights, index, gate_up, down, *first, act=act, **part)
        require(dense.type == moe.type, f"dense {dense.type} and moe {moe.type} differ")
        return dense, moe

    samples = cases(
        "3*f32[2,3,16] f32[16] f32[8,16] f32[8] f32[40,16] f32[16,20] f32[8,24,16] "
        "f32[8,16,12] {act='gelu_pytorch_tanh', top_k=2}",
        "3*f32[1,1,16] f32[16] f32[4,16] f32[4] f32[24,16] f32[16,12] f32[4,24,16] "
        "f32[4,16,12] {act='silu', top_k=4}",
        "3*f32[2,3,16] f32[16] f32[8,16] f32[8] f32[40,16] f32[16,20] f32[4,24,16] "
        "f32[4,16,12] i64[1]@4:5 {act='gelu_pytorch_tanh', top_k=3}",
        root=0.25,
    )
