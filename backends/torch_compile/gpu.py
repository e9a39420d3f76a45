"""Nodes as kernels: what `select` chose, called with its settings.

Two values travel beside the graph's own, in the run's `env`: a product that is only summed up by
the norm after it stays a stack of partial sums, and the op that makes queries hands the attention
the counters in which its programs see who is last.
"""

from __future__ import annotations

from typing import Any

import torch

from g4ir.ir.graph import Node
from g4ir.ops.rope import inverse_frequencies, rotated_pairs

from .attention import keys_values_of_chunk
from .kernels import decode_attention, head, linear, moe, norms, prefill_attention, qkv
from .run import Lowering, Run
from .select import Choice, caches, choose, has_chunk, kv_heads, reader

Tensor = torch.Tensor


def _chosen(run: Run, n: Node) -> Choice:
    choice = choose(run.g, n, run.target)
    assert choice
    return choice


def _linear(run: Run, n: Node, x: Tensor, w: Tensor) -> Tensor:
    choice = _chosen(run, n)
    kernel = {
        "skinny_linear": linear.skinny_linear,
        "skinny_linear_parts": linear.skinny_linear_parts,
    }[choice.kernel]
    return kernel(x, w, **choice.use)


def _linear_glu(run: Run, n: Node, x: Tensor, w: Tensor, *up: Tensor) -> Tensor:
    act = n.word("act")
    use = _chosen(run, n).use
    return linear.skinny_linear_glu(x, w, up[0] if up else None, act, **use)


def _rms_norm(run: Run, n: Node, x: Tensor, w: Tensor | None = None) -> Tensor:
    return norms.rms_norm(x, w, n.number("eps"), **_chosen(run, n).use)


def _weights(n: Node, given: tuple[Tensor, ...]) -> tuple[Tensor | None, list[Tensor | None]]:
    """The scalar and the weights of the pre-norms among a norm's last inputs."""
    left = list(given)
    scalar = left.pop(0) if n.attrs["scaled"] else None
    weighted = n.attrs["weighted"]
    assert isinstance(weighted, tuple)
    return scalar, [left.pop(0) if has else None for has in weighted]


def _norm_residual(
    run: Run, n: Node, x: Tensor, residual: Tensor, w: Tensor, *rest: Tensor
) -> tuple[Tensor, ...]:
    scalar, weights = _weights(n, rest)
    use = _chosen(run, n).use
    eps = n.number("eps")
    return tuple(norms.norm_residual(x, residual, w, scalar, weights, eps, **use))


def _dual_norm_residual(
    run: Run,
    n: Node,
    a: Tensor,
    w_a: Tensor,
    b: Tensor,
    w_b: Tensor,
    w: Tensor,
    residual: Tensor,
    *rest: Tensor,
) -> tuple[Tensor, ...]:
    scalar, weights = _weights(n, rest)
    use = _chosen(run, n).use
    eps = n.number("eps")
    return tuple(norms.dual_norm_residual(a, w_a, b, w_b, w, residual, scalar, weights, eps, **use))


def _arrivals(name: str) -> str:
    return f"{name}/arrivals"


def _qkv_write(
    run: Run,
    n: Node,
    x: Tensor,
    norm_q: Tensor,
    norm_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    lengths: Tensor,
    *held: Tensor,
) -> tuple[Tensor, ...]:
    """The queries and the caches, which the kernel wrote in place."""
    q, arrivals = qkv.qkv_write(
        x,
        norm_q,
        norm_k,
        cos,
        sin,
        start,
        lengths,
        list(held),
        **n.attrs,
        **_chosen(run, n).use,
    )
    run.env[_arrivals(n.outputs[0].name)] = arrivals
    return (q, *held)


def _queries(run: Run, n: Node, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    user = reader(run.g, n)
    assert user
    q, arrivals = qkv.q_heads(
        x.flatten(-2),
        w,
        cos,
        sin,
        x.shape[-2],
        kv_heads(user),
        n.number("eps"),
        **_chosen(run, n).use,
    )
    run.env[_arrivals(n.out.name)] = arrivals
    return q


def _counters(run: Run, n: Node, q: Tensor) -> Tensor:
    """Zeros that came with the queries, or fresh ones."""
    made = run.env.get(_arrivals(n.inputs[0].name))
    if made is not None:
        return made
    return torch.zeros((q.shape[0], kv_heads(n)), dtype=torch.int64, device=q.device)


def _masking(n: Node) -> dict[str, Any]:
    return {k: n.attrs[k] for k in ("window", "scale", "softcap")}


def _attention(
    run: Run, n: Node, q: Tensor, positions: Tensor, written: Tensor, *held: Tensor
) -> Tensor:
    use = _chosen(run, n).use
    if has_chunk(n):
        return prefill_attention.prefill_attention(
            q, positions, written, *held, **_masking(n), **use
        )
    return decode_attention.decode_attention(
        q, written, *held, _counters(run, n, q), **_masking(n), **use
    )


def _attention_latent(
    run: Run, n: Node, q: Tensor, positions: Tensor, written: Tensor, w: Tensor, *held: Tensor
) -> Tensor:
    use, parts = _chosen(run, n).use, caches(n)
    if not has_chunk(n):
        return decode_attention.decode_attention_latent(
            q,
            written,
            w,
            list(held),
            _counters(run, n, q),
            _frequencies(n, q),
            n.word("form"),
            **_masking(n),
            **use,
        )
    if n.attrs["form"] == "value":
        return prefill_attention.prefill_attention_latent(
            q, positions, written, w, *held, **_masking(n), **use
        )
    old, fresh = keys_values_of_chunk(n, positions, written, w, held[:parts], held[parts:])
    return prefill_attention.prefill_attention(
        q, positions, written, *old, *fresh, **_masking(n), **use
    )


def _frequencies(n: Node, q: Tensor) -> Tensor:
    """f32 [p], of the rotated pairs."""
    kind, d = n.word("kind"), int(q.shape[-1])
    theta, fraction, factor = (n.number(a) for a in ("theta", "fraction", "factor"))
    pairs = rotated_pairs(kind, d, fraction)
    with torch.device(q.device):  # made there: a recorded step may copy nothing from the host
        return inverse_frequencies(kind, theta, d, fraction, factor)[:pairs]


def _greedy(run: Run, n: Node, logits: Tensor) -> Tensor:
    return head.block_argmax(logits.flatten(0, 1))


def _candidates(run: Run, n: Node, logits: Tensor) -> tuple[Tensor, ...]:
    return tuple(head.top_candidates(logits.flatten(0, 1), n.whole("k")))


def _moe(
    run: Run,
    n: Node,
    x_dense: Tensor,
    x: Tensor,
    x_router: Tensor,
    scale: Tensor,
    proj: Tensor,
    per_expert: Tensor,
    w_dense: Tensor,
    w_dense_down: Tensor,
    gate_up: Tensor,
    down: Tensor,
) -> tuple[Tensor, Tensor]:
    """(dense, experts): the dense MLP in the grids of the experts."""
    use = {name: t.use for name, t in _chosen(run, n).tunings.items()}
    act, top_k, root = n.word("act"), n.whole("top_k"), n.number("root")
    scores = moe.router_logits(x_router, scale, proj, root, **use["router_logits"])
    if "moe_sort" not in use:
        inner = moe.moe_gate_up(
            x_dense, x, scores, w_dense, gate_up, top_k, act, **use["moe_gate_up"]
        )
        return moe.moe_down(inner, scores, per_expert, w_dense_down, down, top_k, **use["moe_down"])
    weights, index, listed = moe.moe_sort(scores, per_expert, top_k, **use["moe_sort"])
    inner = moe.moe_gate_up_sorted(
        x_dense, x, index, listed, w_dense, gate_up, act, **use["moe_gate_up_sorted"]
    )
    return moe.moe_down_sorted(
        inner, weights, index, listed, w_dense_down, down, **use["moe_down_sorted"]
    )


#: op -> (run, node, *tensors) -> results, for the nodes that `select` chose
LOWERINGS: dict[str, Lowering] = {
    "linear": _linear,
    "linear_glu": _linear_glu,
    "rms_norm": _rms_norm,
    "norm_residual": _norm_residual,
    "dual_norm_residual": _dual_norm_residual,
    "qkv_write": _qkv_write,
    "norm_rope": _queries,
    "attention": _attention,
    "attention_latent": _attention_latent,
    "moe_mlp": _moe,
    "greedy": _greedy,
    "candidates": _candidates,
}


def find_kernel(run: Run, n: Node) -> Lowering | None:
    """The lowering of a node that a kernel was chosen for."""
    return LOWERINGS[n.op] if choose(run.g, n, run.target) else None
