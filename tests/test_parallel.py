"""A model on several ranks, run side by side by the interpreter, against the same on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count, islice
from typing import Any

import pytest
import torch

from g4ir.errors import InputError
from g4ir.ir.graph import Builder, Graph, Program
from g4ir.ir.interpret import empty_state, interpret, run_node
from g4ir.ir.rewrite import split_prologue
from g4ir.ir.text import parse_graph
from g4ir.model.decoder import BLOCKS
from g4ir.model.media import find_media
from g4ir.model.text import build_graph, build_program, has_blocks
from g4ir.ops.codecs import dequantize_codes
from g4ir.ops.types import Type
from g4ir.parallel.shard import collectives, rank_name, shard, shard_program, unroll
from g4ir.parallel.table import FIRST, Sharding, Share
from g4ir.passes import PassOptions, run_passes, run_program
from g4ir.passes.latent_kv import LatentOptions
from g4ir.passes.plan_cache import RingOptions
from g4ir.quant.recipe import find_quant_config
from g4ir.quant.rewrite import codes_as_params, quantise
from g4ir.spec.record import Spec, load_spec
from g4ir.weights.pack import local_params, split_program
from tests.cases import TABLES
from tests.configs import TINY, VARIANTS, fewest_of, random_spec
from tests.oracle import relative
from tests.test_passes import random_weight

#: a sliding last layer, frequencies divided by 8, scores by odd numbers
GEMMA3 = ("tiny-gemma3", "random-1000", "random-1003")
RANKS = (2, 4)
#: chunks of two ragged rows past three windows of 8, one with a picture in each row where a variant
#: sees these both ways, one to be verified, and single tokens: (phase, size, valid tokens)
CHUNKS = TABLES["passes"]["chunks of ranks"]
PICTURES = torch.tensor([[-1, 0, 0, 0, -1, -1, -1, -1, -1], [-1, -1, -1, 1, 1, 1, 1, -1, -1]])
SLOTS = 40
#: room in rings for what is verified
SLACK = PassOptions((RingOptions(2),))


def can_share(spec: Spec, ranks: int, ep: bool = False) -> bool:
    try:
        Sharding(spec, ranks, ep).check()
    except InputError:
        return False
    return True


#: seeds of random specs that two or more ranks can share
SEEDS = tuple(islice((seed for seed in count() if can_share(random_spec(seed), 2)), 20))


@cache
def spec_of(name: str) -> Spec:
    return random_spec(int(name[7:])) if name.startswith("random-") else load_spec(name)


@cache
def plain(name: str) -> Program:
    return whole_program(spec_of(name))


def whole_program(spec: Spec, dtype: str | None = None) -> Program:
    p = build_program(spec, all_logits=True, dtype=dtype, verifies=True)
    blocks = {BLOCKS: build_graph(spec, BLOCKS, True, dtype)} if has_blocks(spec) else {}
    return Program(p.graphs | blocks)


@cache
def weights(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {n: random_weight(v).to(dtype) for n, v in plain(name).params().items()}


@cache
def chunks(name: str, dtype: torch.dtype) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """The phase of each chunk, and what it feeds."""
    g, held, out = torch.Generator().manual_seed(5), torch.zeros(2, dtype=torch.int64), []
    for phase, size, valid in CHUNKS:
        tokens = torch.randint(spec_of(name).text.vocab_size, (2, size), generator=g)
        rows, _ = interpret(
            plain(name).graphs["embed"], {"tokens": tokens}, weights(name, dtype), {}
        )
        places = {"positions": held[:, None] + torch.arange(size), "lengths": torch.tensor(valid)}
        if phase == BLOCKS:
            phase = BLOCKS if BLOCKS in plain(name).graphs else "prefill"
            places |= {"block_ids": PICTURES} if phase == BLOCKS else {}
        out.append((phase, {**rows, **places}))
        held = held + places["lengths"]
    return out


def valid_logits(inputs: dict[str, torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    return torch.cat([row[:n] for row, n in zip(logits, inputs["lengths"].tolist(), strict=True)])


@cache
def alone(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Logits of every valid token on one rank."""
    return of_one(plain(name), name, weights(name, dtype), dtype)


def of_one(
    p: Program, name: str, params: dict[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Those of a program with its params."""
    state, out = empty_state(p.graphs["prefill"], {"B": 2, "C": SLOTS}, dtype), []
    for phase, inputs in chunks(name, dtype):
        made, state = interpret(p.graphs[phase], inputs, params, state)
        out.append(valid_logits(inputs, made["logits"]))
    return torch.cat(out)


def together(
    p: Program,
    name: str,
    ranks: int,
    dtype: torch.dtype,
    params: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The same of all ranks of a sharded program, in one graph; `params` of the whole model."""
    given = params or weights(name, dtype)
    graphs = {phase: g for phase, g in p.graphs.items() if g.state}
    ep = any(v.name == FIRST for g in graphs.values() for v in g.params)
    shares = [Share(Sharding(spec_of(name), ranks, ep), rank) for rank in range(ranks)]
    own = [packed(graphs, lambda v, s=s: s.read_part(v, given.__getitem__)) for s in shares]
    packing = split_program(Program(graphs))
    local = local_params(packing, shares[0])
    each = {
        rank_name(n, r) if n in local else n: t for r, of in enumerate(own) for n, t in of.items()
    }
    return of_one(packing.program.map(lambda g: unroll(g, local, ranks)), name, each, dtype)


def packed(
    graphs: dict[str, Graph], read: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Params of all graphs, and what is made of them, once for all."""
    made: dict[str, torch.Tensor] = {}
    for g in graphs.values():
        (prologue, _), given = split_prologue(g), {v.name: read(v.name) for v in g.params}
        if not {v.name for v in prologue.outputs} <= made.keys():
            made |= interpret(prologue, {}, given, {})[0]
        made |= given
    return made


def sharded(name: str, ranks: int, ep: bool = False) -> Program:
    return shard_program(plain(name), Sharding(spec_of(name), ranks, ep))


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(relative(got, want).max())


#: name, ranks, and whether each has some of the experts
CASES = [
    (name, ranks, ep)
    for name in (*TINY, *GEMMA3, *fewest_of(SEEDS))
    for ranks in RANKS
    for ep in (False, True)
    if can_share(spec_of(name), ranks, ep)
]


@pytest.mark.covering
@pytest.mark.parametrize("name, ranks, ep", CASES)
@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_ranks_agree(name: str, ranks: int, ep: bool, dtype: torch.dtype, most: float) -> None:
    """With all passes and without any."""
    want = alone(name, dtype)
    own = sharded(name, ranks, ep)
    for p in (own, run_program(own, options=SLACK)):
        assert distance(together(p, name, ranks, dtype), want) < most


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
def test_latent_caches_of_ranks(name: str) -> None:
    """Those of a rank's key heads."""
    p = run_program(sharded(name, 2), options=SLACK.changed(LatentOptions("value")))
    assert any(p.graphs["decode"].find("attention_latent"))
    got = together(p, name, 2, torch.float64)
    assert distance(got, alone(name, torch.float64)) < 1e-12


@pytest.mark.parametrize("name", ["tiny-media", "tiny-unified"])
def test_towers_are_whole(name: str) -> None:
    """So are the rows of tables; text is of a rank."""
    spec = load_spec(name)
    p = build_program(spec, media=find_media(spec))
    own = shard_program(p, Sharding(spec, 2))
    alike = {phase for phase, g in p.graphs.items() if own.graphs[phase] == g}
    towers = {phase for phase in p.graphs if phase.startswith(("vision", "audio"))}
    assert towers and alike == {"embed", *towers}
    assert all(any(collectives(g)) for phase, g in own.graphs.items() if phase not in alike)


# --- weights in codes -------------------------------------------------------------------------

RECIPES = ("int8", "int4", "fp8")


def in_codes(name: str, recipe: str) -> Program:
    spec, found = spec_of(name), find_quant_config(recipe)
    assert found
    rules = tuple(replace(r, group=8) if r.form == "int4" else r for r in found.rules)
    return quantise(whole_program(spec, "f64"), spec, replace(found, rules=rules), "f64")


@pytest.mark.covering
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks, ep", [(2, False), (4, True)])
@pytest.mark.parametrize("held", [False, True])
def test_codes(recipe: str, ranks: int, ep: bool, held: bool) -> None:
    """Of the whole, as a checkpoint in codes has them: a rank has its part of the codes, and the
    scales of its rows or groups, which are a row's own where its columns are cut. Made at build: of
    rows and groups that is the same; of a row whose columns are cut, each rank's part has a scale
    of its own."""
    name, dtype = "tiny-moe", torch.float64
    made, to = in_codes(name, recipe), Sharding(spec_of(name), ranks, ep)
    params, codes = dict(weights(name, dtype)), dict[str, torch.Tensor]()
    for n in {n["w"].name: n for g in made.graphs.values() for n in g.find("quantize")}.values():
        w, part = params[n["w"].name], to.part(n["w"].name)
        codes |= {v.name: t for v, t in zip(n.outputs, run_node(n, [w]), strict=True)}
        apart = part is not None and part.axis == w.dim() - 1 and not held
        pieces = [part.cut(w, r, ranks) for r in range(ranks)] if part and apart else [w]
        back = (dequantize_codes(*run_node(n, [x]), dtype) for x in pieces)
        params[n["w"].name] = torch.cat(list(back), -1)
    want = of_one(plain(name), name, params, dtype)
    given = weights(name, dtype) | codes
    own = shard_program(made.map(codes_as_params) if held else made, to)
    for p in (own, run_program(own, options=SLACK)):
        assert distance(together(p, name, ranks, dtype, given), want) < 1e-12


@pytest.mark.parametrize("held", [False, True])
def test_groups_are_not_cut(held: bool) -> None:
    spec = spec_of("tiny-dense")
    p = quantise(build_program(spec), spec, find_quant_config("int4"), "f32")
    said = r"--tp 4: L0\.mlp\.w_down has rows of 96 in groups of 32, which 4 ranks cannot share"
    with pytest.raises(InputError, match=said):
        shard_program(p.map(codes_as_params) if held else p, Sharding(spec, 4))


#: messages of a decode step: two for each layer, and the head's
MESSAGES = {"e2b": 71, "e4b": 85, "12b": 97, "26b-a4b": 61, "31b": 121}


@pytest.mark.covering
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_messages_of_a_step(name: str, ranks: int) -> None:
    """Every matrix of the layers is cut but routers and per-layer embeddings."""
    spec = load_spec(name)
    for ep in (False, True) if spec.text.moe else (False,):
        to = Sharding(spec, ranks, ep)
        own = shard(build_graph(spec, "decode"), to)
        assert len(list(collectives(run_passes(own)))) == MESSAGES[name]
        whole = {v.name for v in own.params if v.type.rank > 1 and not to.part(v.name)}
        assert all(n.startswith("ple.") or ".ple." in n or n.endswith(".router") for n in whole)


@pytest.mark.parametrize("name", TINY)
def test_the_graph_is_text_and_the_same_for_all_ranks(name: str) -> None:
    g = shard(plain(name).graphs["decode"], Sharding(spec_of(name), 2))
    assert parse_graph(str(g)) == g
    one = Sharding(spec_of(name), 1)
    assert shard(plain(name).graphs["decode"], one) == plain(name).graphs["decode"]


def odd_spec(**text: Any) -> Spec:
    spec = load_spec("tiny-moe")
    return replace(spec, text=replace(spec.text, **text))


MOE, FULL = (getattr(load_spec("tiny-moe").text, x) for x in ("moe", "full"))
ODD_EXPERTS = odd_spec(moe=replace(MOE, num_experts=6))
ODD_HEADS = odd_spec(num_attention_heads=12, full=replace(FULL, num_key_value_heads=3))
#: spec, ranks, ep -> what is said
REFUSED: dict[str, tuple[Spec, int, bool]] = {
    r"--tp 16: .* num_attention_heads 8, .* one of 1, 2, 4, 8$": (load_spec("e2b"), 16, False),
    r"full\.num_key_value_heads 3": (ODD_HEADS, 4, False),
    r"--tp 4: .* moe\.num_experts 6, .* one of 1, 2$": (ODD_EXPERTS, 4, True),
}


@pytest.mark.parametrize("said", REFUSED)
def test_numbers_that_cannot_share_are_refused(said: str) -> None:
    spec, ranks, ep = REFUSED[said]
    with pytest.raises(InputError, match=said):
        shard(build_graph(spec, "decode"), Sharding(spec, ranks, ep))


def test_experts_cut_across_need_no_even_number() -> None:
    Sharding(ODD_EXPERTS, 2, ep=True).check()
    Sharding(ODD_EXPERTS, 4).check()


def test_ranks_of_another_number_are_refused() -> None:
    b = Builder()
    g = b.graph(b.emit("all_reduce", b.input("x", Type("f32", (1, 8))), ranks=2, name="y"))
    x = {"x": torch.zeros(1, 8)}
    with pytest.raises(ValueError, match="a rank of 2 alone"):
        interpret(g, x, {}, {})
