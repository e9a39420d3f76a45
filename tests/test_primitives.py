"""Each op's decomposition into tensor primitives equals its reference, and so do whole models.

Targets (ONNX, TensorRT) are tested by themselves; here the primitives are computed by torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from g4ir.backends.primitives.graph import network_graph
from g4ir.backends.primitives.lowerings import LOWERINGS, OUTSIDE, missing
from g4ir.backends.primitives.network import EXPERTS, Network, turn
from g4ir.ir.graph import Program
from g4ir.ir.interpret import interpret
from g4ir.ir.rewrite import split_prologue
from g4ir.ops import OPS
from g4ir.plan.engine_limits import Limits
from tests.configs import spec_called
from tests.eager_emitter import EagerEmitter
from tests.engines import BUDGET
from tests.network_session import NetworkSession, embed_with
from tests.oracle import Oracle, find_oracle, graph_params, random_tokens, relative
from tests.runner import built_program, open_session

LIMITS = Limits(max_batch=3, max_seq=64, prefill_chunk=24)
#: all of SMALL run through the targets' own tests; these have every decomposition between them
NAMES = ("e2b-small", "combined", "random-1")
TIED = ("31b-small", "combined")


def test_every_op_is_lowered_or_expands() -> None:
    """An op without both would fail a build."""
    assert not missing()
    assert LOWERINGS.keys() | OUTSIDE <= OPS.keys()


def packed_params(program: Program, oracle: Oracle) -> dict[str, torch.Tensor]:
    """Params of every graph after its prologue."""
    params: dict[str, Any] = {}
    for g in program.graphs.values():
        prologue, _ = split_prologue(g)
        given = graph_params(g, oracle.tensors)
        params |= {**given, **interpret(prologue, {}, given, {})[0]}
    return params


def eager_session(
    oracle: Oracle, batch: int, chunk: int, experts: str = "auto", **options: Any
) -> NetworkSession:
    """The network of a spec, computed primitive by primitive."""
    program = built_program(oracle.spec, **options)
    params = packed_params(program, oracle)
    main = program.map(lambda g: split_prologue(g)[1])
    graph = network_graph(main)

    def run(feeds: Any) -> Any:
        e = EagerEmitter(feeds, params.__getitem__)
        Network(e, graph, LIMITS, LOWERINGS, experts).emit()
        return e.outputs

    embed = embed_with(main.graphs["embed"], params)
    return NetworkSession(graph, embed, run, LIMITS, batch, chunk)


CASES = [*((n, "off") for n in NAMES), *((n, f) for n in TIED for f in ("value", "raw"))]


@pytest.mark.parametrize(("name", "latent"), CASES)
def test_models(name: str, latent: str) -> None:
    """Prefill in chunks that wrap the rings, ragged rows and an empty one, then decode: as the
    interpreter, of which only the order of sums differs."""
    oracle = find_oracle(spec_called(name))
    tokens, lengths = random_tokens(oracle.spec, 3, 37), torch.tensor([37, 0, 21])
    want = open_session(oracle, 3, 11, latent_kv=latent)
    got = eager_session(oracle, 3, 11, latent_kv=latent)
    agree(got.prefill(tokens, lengths), want.prefill(tokens, lengths), rows=[0, 2])
    for step in tokens.t()[:6]:
        agree(got.decode(step), want.decode(step))


def test_rings_are_turned_before_a_chunk_crosses_their_end() -> None:
    """Each row by itself; every position stays in slot (p + turned) mod R. Single tokens fit."""
    held, turned = torch.tensor([5, 8, 14]), torch.tensor([0, 0, 2])
    slot = (torch.arange(40)[:, None] + turned) % 10
    ring = torch.zeros(3, 1, 10, 1)
    for row, count in enumerate(held.tolist()):
        for p in range(count):
            ring[row, 0, slot[p, row]] = p + 1
    turn(held[:, None] + 1, turned, [ring])
    assert turned.tolist() == [0, 0, 2]
    turn(held[:, None] + torch.arange(4), turned, [ring])
    assert turned.tolist() == [0, 2, 2]
    for row, count in enumerate(held.tolist()):
        assert (count + int(turned[row])) % 10 + 4 <= 10
        for p in range(max(0, count - 10), count):
            assert ring[row, 0, (p + int(turned[row])) % 10] == p + 1


@pytest.mark.parametrize("experts", EXPERTS)
def test_forms_of_experts(experts: str) -> None:
    """The same routed sum, whichever weights are multiplied."""
    oracle = find_oracle(spec_called("26b-a4b-small"))
    tokens = random_tokens(oracle.spec, 2, 9)
    want = open_session(oracle, 2, 9)
    got = eager_session(oracle, 2, 9, experts)
    agree(got.prefill(tokens), want.prefill(tokens))
    agree(got.decode(tokens[:, 0]), want.decode(tokens[:, 0]))


@pytest.mark.parametrize("name", ["combined", "31b-small"])
def test_without_passes(name: str) -> None:
    """Full-length caches behind a window, and no fused op."""
    oracle = find_oracle(spec_called(name))
    tokens = random_tokens(oracle.spec, 2, 30)
    skip = ("plan_cache", "fuse_norm_rope", "fuse_norm_residual", "last_token_only", "fuse_moe")
    want = open_session(oracle, 2, 24, skip=skip)
    got = eager_session(oracle, 2, 24, skip=skip)
    agree(got.prefill(tokens), want.prefill(tokens))


def agree(got: torch.Tensor, want: torch.Tensor, rows: Any = slice(None)) -> None:
    """Within the budget of fp32 engines."""
    assert relative(got, want)[rows].max() < BUDGET
