"""Models as recorded networks, with the interface of tests/runner.py's session."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.network_session import Feeds, NetworkSession, embed_with
from tests.oracle import Oracle
from tests.recorder.networks import new_network
from tests.runner import DTYPES, Session, built_program


def new_emitter(weights: Callable[[str], torch.Tensor] | None = None) -> TrtEmitter:
    module = recorder()
    return TrtEmitter(module, new_network(module), weights)


def computed(e: TrtEmitter, feeds: Feeds) -> dict[str, torch.Tensor]:
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
    Network(emitter, graph, limits, lowerings(attention), experts).emit()
    check(network)
    return Emitted(module, network, emitter, graph)


def prepared(program: Program) -> Graph:
    """The graph that a network is made of."""
    return network_graph(program.map(lambda g: split_prologue(g)[1]))


def recorded_session(
    oracle: Oracle,
    batch: int,
    chunk: int,
    max_seq: int = 64,
    latent_kv: str = "off",
    all_logits: bool = True,
    skip: tuple[str, ...] = (),
    **options: Any,
) -> tuple[NetworkSession, Emitted]:
    """A session on the oracle's weights that runs a recorded network, and that network."""
    program = built_program(oracle.spec, all_logits, skip, DTYPES[oracle.dtype], latent_kv)
    plain = Session(program, oracle.tensors, batch, chunk, max_seq, all_logits)
    limits = Limits(batch, max_seq, chunk)
    graph = prepared(program)
    made = emit(graph, limits, plain.params["prefill"].__getitem__, **options)

    def run(feeds: Feeds) -> Feeds:
        out = computed(made.emitter, feeds)
        # Caches of a layer that writes none.
        return {**{f"{k}.next": v for k, v in feeds.items()}, **out}

    embed = embed_with(plain.graphs["embed"], plain.params["embed"])
    session = NetworkSession(graph, embed, run, limits, batch, chunk, all_logits)
    for cache in session.caches.values():
        cache.fill_(7.0)  # what was never written must not count
    return session, made
