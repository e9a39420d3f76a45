"""How long the network's decode step may take on a GPU that is not at hand: its bytes at the rate
of a copy, a gap before each kernel, and collectives by NCCL, as step_model.yaml has them.
Which layers become one kernel is a guess (recorder/network.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from g4ir.backends.primitives.network import FULL
from g4ir.backends.trt.build import Written, weight_bytes
from g4ir.backends.trt.experts import gathers
from g4ir.backends.trt.recorder import traffic
from g4ir.ir.graph import Graph, Node
from g4ir.parallel.shard import collectives
from g4ir.plan.engine_limits import Limits

from .step_model import message_us, read_constants

GPU = "h100"


def decode_step(w: Written, limits: Limits, experts: str) -> dict[str, Any]:
    """Return of a step of one token for each row, over full caches: bytes, kernels, and how many
    times as long it takes as to read weights and what windows see once."""
    io, chosen = w.interface, chosen_parts(w.graph)
    whole = io.of_phase("decode")[-1]
    shapes = {name: io.shapes(name, whole)[2] for name in io.dynamic()}
    sizes = {(_chosen(n), _routed(n)) for n in w.graph.find("experts", "moe_mlp")}
    few = all(gathers(experts, limits, *size) for size in sizes)
    moved, kernels = traffic(w.network, shapes, chosen if few else {})
    constants = read_constants()
    rate, gap = constants.gpus[GPU].copy, sum(constants.gap) / 2
    roof = roof_bytes(w.graph, limits, chosen)
    messages = [*collectives(w.graph)]
    dims = {"B": limits.max_batch, "S": 1, "R": 1}
    waits = sum(message_us(constants, n, dims) for n in messages)
    us = moved / rate + (kernels - len(messages)) * gap + waits
    return {
        "step_bytes": moved,
        "step_kernels": kernels,
        **({"step_messages": len(messages)} if messages else {}),
        "step_over_roof": round(us / (roof / rate), 2),
    }


def chosen_parts(g: Graph) -> dict[str, float]:
    """Return the part of each weight of experts that one token takes, by name."""
    return {
        n[w].name: _chosen(n) / _routed(n)
        for n in g.find("experts", "moe_mlp")
        for w in ("gate_up", "down")
    }


def _chosen(n: Node) -> int:
    return n.whole("top_k") if "top_k" in n.attrs else int(n["index"].type.shape[-1])


def _routed(n: Node) -> int:
    if n.op == "moe_mlp":
        return int(n["router_proj"].type.shape[0])
    return n.whole("total") if "total" in n.attrs else int(n["gate_up"].type.shape[0])


def roof_bytes(g: Graph, limits: Limits, parts: Mapping[str, float]) -> int:
    """Count the weights that one token takes, and the keys and values that it sees."""
    unread = sum((1 - parts.get(v.name, 1)) * v.type.nbytes() for v in g.params)
    dims = {"B": limits.max_batch, FULL: limits.max_seq}
    return int(weight_bytes(g) - unread) + sum(v.type.bind(dims).nbytes() for v in g.state)
