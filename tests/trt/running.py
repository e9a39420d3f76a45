"""Graphs as networks of the recorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from g4ir.backends.primitives.graph import network_graph
from g4ir.backends.primitives.network import Network
from g4ir.backends.trt.dry_run import emulator
from g4ir.backends.trt.emitter import TrtEmitter
from g4ir.backends.trt.lowerings import lowerings
from g4ir.backends.trt.recorder import check, execute, recorder
from g4ir.ir.graph import Graph, Program
from g4ir.ir.rewrite import split_prologue
from g4ir.plan.engine_limits import Limits
from tests.recorder.networks import new_network


def new_emitter(weights: Callable[[str], torch.Tensor] | None = None) -> TrtEmitter:
    module = recorder()
    return TrtEmitter(module, new_network(module), weights)


def computed(e: TrtEmitter, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs of what was emitted; feeds that it has no input for are left out."""
    check(e.network)
    names = {t._name for t in e.network._inputs}
    return execute(e.network, {k: v for k, v in feeds.items() if k in names})


@dataclass
class Emitted:
    """A network and what it was made of."""

    module: Any
    network: Any
    emitter: TrtEmitter
    graph: Graph
    notes: list[str]


def emit(
    graph: Graph,
    limits: Limits,
    weights: Callable[[str], torch.Tensor] | None,
    version: str = "11.4.0",
    attention: str = "explicit",
    experts: str = "all",
) -> Emitted:
    module = emulator(version).trt
    network = new_network(module)
    emitter = TrtEmitter(module, network, weights)
    net = Network(emitter, graph, limits, lowerings(attention), experts)
    net.emit()
    check(network)
    return Emitted(module, network, emitter, graph, net.notes)


def prepared(program: Program) -> Graph:
    """The graph that a network is made of."""
    return network_graph(program.map(lambda g: split_prologue(g)[1]))
