"""A model on several ranks, run side by side by the interpreter, against the same on one;
and in as many processes on this machine: as one rank computes, and what becomes of the others where
one dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from http import HTTPStatus
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

import g4ir
from g4ir.artefact.directory import open_artefact
from g4ir.builder.load import open_runtime
from g4ir.chat import Vocabulary
from g4ir.cli import main
from g4ir.errors import EngineError, InputError, MissingError, RankError
from g4ir.ir.graph import Builder, Graph, Program
from g4ir.ir.interpret import empty_state, interpret, run_node
from g4ir.ir.rewrite import split_prologue
from g4ir.model.decoder import BLOCKS
from g4ir.model.draft import shipped_drafter
from g4ir.model.media import find_media
from g4ir.model.text import build_graph, build_program, has_blocks
from g4ir.ops.codecs import dequantize_codes
from g4ir.ops.types import Type
from g4ir.parallel.group import Group, RankLaunch, RankProcess, join, launched
from g4ir.parallel.shard import collectives, rank_name, shard, shard_program, unroll
from g4ir.parallel.table import FIRST, Sharding, Share
from g4ir.passes import PassOptions, run_passes, run_program
from g4ir.passes.latent_kv import LatentOptions
from g4ir.passes.plan_cache import RingOptions
from g4ir.plan.plan import PLANNED, make_plan
from g4ir.quant.recipe import find_quant_config
from g4ir.quant.rewrite import codes_as_params, quantise
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.progress import no_progress
from g4ir.weights.pack import StoredParams, local_params, rank_files, split_program
from tests.cases import TABLES
from tests.cli_tools import refused
from tests.configs import TINY, VARIANTS, fewest_of, random_spec, short
from tests.engines import add_file, random_checkpoint
from tests.oracle import relative
from tests.rank_driver import BEGUN, PROMPTS, answers, logits
from tests.serve.running import chat_tokenizer
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
    said = (
        r"--tp 4: L0\.mlp\.w_down has rows of 96 values in groups or blocks of 32 or more, which 4"
    )
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
    with pytest.raises(ValueError, match="one of 2 ranks alone"):
        interpret(g, x, {}, {})


ROOT = Path(__file__).parents[1]
LIMITS: dict[str, Any] = {"max_seq": 64, "prefill_chunk": 8, "max_batch": 2}
#: groups that two ranks need not share, of tiny models too
RECIPE = TABLES["torchrun"]["recipe"]
#: seconds in which all processes have ended
ENDED_S = 60.0


def built(out: Path, name: str, ranks: int, backend: str, **more: Any) -> Path:
    """An engine of random weights, written into its folder."""
    checkpoint = kept_checkpoint(out.parent, load_spec(name))
    if "drafter" in more:
        more["drafter"] = kept_checkpoint(out.parent, shipped_drafter(load_spec(name)))
    options = {"backend": backend, "checkpoint": checkpoint, "media": "none", **LIMITS, **more}
    g4ir.build(name if "random_weights" in more else None, out, tp=ranks, **options).close()
    return out


def kept_checkpoint(folder: Path, spec: Spec) -> Path:
    path = folder / f"{spec.name}-checkpoint"
    return path if path.exists() else random_checkpoint(path, spec)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def surroundings(**more: str) -> dict[str, str]:
    """The environment of a process that talks on this machine alone."""
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": str(ROOT), **more}


@dataclass
class Started:
    """Processes by rank, each with the files that it writes to."""

    processes: list[subprocess.Popen[str]]

    def begun(self) -> None:
        """Wait until the first rank has something under way."""
        out = self.processes[0].stdout
        assert out and out.readline().strip() == BEGUN, self.said(0)

    def ended(self, within_s: float = ENDED_S) -> list[int]:
        """Exit codes, once all have ended."""
        until = time.monotonic() + within_s
        return [p.wait(max(0.1, until - time.monotonic())) for p in self.processes]

    def said(self, rank: int) -> str:
        err = self.processes[rank].stderr
        assert err
        return err.read()


@contextmanager
def started(
    ranks: int,
    *words: str | Path,
    places: Sequence[Path] = (),
    module: str = "tests.rank_driver",
    **more: str,
) -> Iterator[Started]:
    """The driver in so many processes, as torchrun would start them: but none is ended with
    another, and each has an exit code to look at. `places`: the folder of each."""
    command, pipe, made = [sys.executable, "-m", module, *map(str, words)], subprocess.PIPE, []
    more |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(ranks):
        env = surroundings(**more, RANK=str(rank), LOCAL_RANK=str(rank))
        cwd = places[rank] if places else ROOT
        made.append(
            subprocess.Popen(command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)
        )
    try:
        yield Started(made)
    finally:
        for p in made:
            p.kill()
            p.communicate()


def check_against_one(
    folder: Path,
    name: str,
    ranks: int,
    backend: str,
    ep: bool = False,
    task: str = "all",
    **options: Any,
) -> None:
    """Ranks choose what one does, whatever chooses; their logits differ by rounding alone."""
    one = built(folder / "one", name, 1, "reference", **options)
    several = built(folder / "several", name, ranks, backend, ep=ep, **options)
    with started(ranks, several, task, folder / "said.json") as all_of_them:
        assert all_of_them.ended(600) == [0] * ranks, all_of_them.said(0) + all_of_them.said(1)
    got = json.loads((folder / "said.json").read_text())
    with g4ir.load_engine(one) as engine, torch.no_grad():
        want, rows = answers(engine), logits(engine)
        want["again"] = engine.generate([2, 33], 4)
    asked = {k: v for k, v in options.items() if k in ("drafter", "latent_kv")}
    room = options.get("max_seq", LIMITS["max_seq"])
    planned = make_plan(load_spec(name), replace(PLANNED, tp=ranks, **asked), ctx=room)
    assert got.pop("cache") == planned.rows[0].planned < want.pop("cache")
    assert got == want
    for i, row in load_file(folder / "said.safetensors").items():
        assert float(relative(row, rows[i]).max()) < 1e-4


#: experts whole on a rank or cut, codes or floats, form of the latent cache, with a drafter
STARTED = [(*row,) for row in TABLES["torchrun"]["ranks"]]


@pytest.mark.parametrize("ep, quant, form, drafts", short(STARTED[0], of=STARTED))
def test_two_ranks(
    tmp_path: Path, full: bool, ep: bool, quant: bool, form: str, drafts: bool
) -> None:
    """Groups of 8 are whole on every rank, which then makes the codes that one would make."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    options = {"quant": recipe if quant else None, "latent_kv": form}
    options |= {"drafter": "default"} if drafts else {}
    task = "all" if full else "quick"
    check_against_one(tmp_path, "tiny-moe", 2, "torch", ep, task=task, **options)


@pytest.mark.full
def test_ranks_see_pictures(tmp_path: Path) -> None:
    """Towers are whole on every rank, and used on the first."""
    made = {"checkpoint": None, "random_weights": 0}
    check_against_one(tmp_path, "tiny-media", 2, "torch", media="all", max_seq=256, **made)


@pytest.mark.full
@pytest.mark.parametrize("name, ranks, backend", TABLES["torchrun"]["more"])
def test_more_ranks_are_as_one(tmp_path: Path, name: str, ranks: int, backend: str) -> None:
    check_against_one(tmp_path, name, ranks, backend)


# --- the engine -----------------------------------------------------------------------------------


def test_bytes_of_a_rank_are_those_of_the_plan(tmp_path: Path) -> None:
    """What all ranks hold alike lies in the folder once."""
    path = built(tmp_path / "engine", "tiny-moe", 2, "reference", drafter="default")
    found = open_artefact(path, check_weights=True)
    tables = {v.name for v in found.packing.program.graphs["embed"].params}
    files, parts = sorted(path.glob("*.safetensors")), ("00000", "rank0of2-00000", "rank1of2-00000")
    assert [f.name for f in files] == [f"weights-{part}.safetensors" for part in parts]
    options = replace(PLANNED, drafter="default", tp=2)
    planned = make_plan(load_spec("tiny-moe"), options, ctx=64).weights[0]
    assert found.config.ranks == 2
    sizes = [
        sum(params.tensor(name).nbytes for name in found.packing.program.params().keys() - tables)
        for params in (StoredParams.open(rank_files(files, rank)) for rank in range(2))
    ]
    assert sizes == [planned.device] * 2
    heads = [load_file(f)["head.w"] for f in files[1:]]
    whole = load_file(files[0])["embed.table"]
    assert torch.equal(torch.cat(heads), whole)


def test_one_process_can_only_look_at_it(tmp_path: Path) -> None:
    options = {"backend": "reference", "random_weights": 0, **LIMITS}
    engine = g4ir.build("tiny-dense", tmp_path / "engine", tp=2, **options)
    assert engine.ranks == 2 and "tiny-dense" in repr(engine)
    said = (
        "was built for 2 ranks, and 1 is running; start it by torchrun --nproc-per-node 2 "
        "-m g4ir ..., or build it again with --tp 1"
    )
    for asks in (engine.session, lambda: engine.generate([2], 2), lambda: engine.param("final.w")):
        with pytest.raises(InputError, match=re.escape(said)):
            asks()
    with pytest.raises(EngineError, match=re.escape(said)):
        g4ir.load_engine(engine.path)
    assert said in refused("run", engine.path, "--tokens", "2")
    assert main(["show", str(engine.path)]) == 0


@pytest.mark.full
def test_ranks_serve_rows_together(tmp_path: Path) -> None:
    """Requests that come together are rows of the same steps; SIGTERM to all ends the first, once
    it has answered, and then the others."""
    options, tokenizer = {"backend": "reference", "random_weights": 0, **LIMITS}, chat_tokenizer()
    with g4ir.build("tiny-moe", tmp_path / "one", **options) as engine:
        want = [Vocabulary(tokenizer).decode(engine.generate(p, 12, stop_ids=())) for p in PROMPTS]
    two = g4ir.build("tiny-moe", tmp_path / "two", tp=2, **options).path
    add_file(two, "tokenizer.json", tokenizer.to_str())
    port = free_port()
    with started(2, "serve", two, "--port", str(port), module="g4ir") as ranks:
        ask = partial(answer, f"http://127.0.0.1:{port}", ranks)
        with ThreadPoolExecutor() as pool:
            assert [*pool.map(ask, PROMPTS)] == want
        for p in ranks.processes:
            p.send_signal(signal.SIGTERM)
        assert ranks.ended() == [0, 0], ranks.said(0)


def answer(url: str, ranks: Started, prompt: list[int]) -> str:
    """The text that a server answers with, once it is up."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    until = time.monotonic() + ENDED_S
    while time.monotonic() < until and ranks.processes[0].poll() is None:
        try:
            made = httpx.post(f"{url}/v1/completions", json=body, timeout=ENDED_S)
            if made.status_code != HTTPStatus.SERVICE_UNAVAILABLE:  # it has loaded its engine
                return str(made.json()["choices"][0]["text"])
        except httpx.ConnectError:
            pass
        time.sleep(0.1)
    raise AssertionError(ranks.said(0))


# --- a rank that dies -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("two") / "engine", "tiny-dense", 2, "reference")


def check_that_all_end(engine: Path, out: Path, killed: int, how: int) -> str:
    """End a rank in the middle of an answer; returns what the other says."""
    with started(2, engine, "decode", out) as ranks:
        ranks.begun()
        ranks.processes[killed].send_signal(how)
        other = 1 - killed
        if how == signal.SIGSTOP:
            assert ranks.processes[other].wait(ENDED_S) == 4
            ranks.processes[killed].kill()
        codes = ranks.ended()
        assert codes[killed] == -signal.SIGKILL and codes[other] == 4, ranks.said(other)
        return ranks.said(other)


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_killed_rank_ends_the_others(engine_of_two: Path, tmp_path: Path, killed: int) -> None:
    said = check_that_all_end(engine_of_two, tmp_path / "out", killed, signal.SIGKILL)
    assert f"error: rank {1 - killed}: rank {killed} (process " in said and " ended; " in said


@pytest.mark.full
def test_a_rank_that_hangs_is_given_up(engine_of_two: Path, tmp_path: Path) -> None:
    said = check_that_all_end(engine_of_two, tmp_path / "out", 1, signal.SIGSTOP)
    assert "error: rank 0: no answer within 20 s (--set rank_timeout) from rank 1 (process" in said


@pytest.mark.full
def test_a_rank_without_memory(engine_of_two: Path, tmp_path: Path) -> None:
    """It says so, and the others name it."""
    with started(2, engine_of_two, "memory", tmp_path / "out") as ranks:
        assert ranks.ended() == [4, 3]
        assert "error: not enough memory; build with a smaller --max-batch" in ranks.said(1)
        assert "error: rank 0: rank 1 (process " in ranks.said(0)


# --- ranks that do not go together ----------------------------------------------------------------


def codes_and_words(*words: str | Path, **more: Any) -> tuple[list[int], str]:
    """Exit codes of two ranks, and what both say."""
    with started(2, *words, **more) as ranks:
        return ranks.ended(), ranks.said(0) + ranks.said(1)


@pytest.mark.full
def test_ranks_of_different_engines(engine_of_two: Path, tmp_path: Path) -> None:
    """Each machine has its own folder, of the same name."""
    words, folder = ("engine", "decode", tmp_path / "out"), tmp_path / "here"
    places = [folder / str(rank) for rank in range(2)]
    shutil.copytree(engine_of_two, places[0] / "engine")
    places[1].mkdir()
    codes, said = codes_and_words(*words, places=places)
    assert codes == [2, 0] and "error: rank 1: engine: no such file or directory" in said
    options = {"backend": "reference", "random_weights": 1, **LIMITS}
    g4ir.build("tiny-dense", places[1] / "engine", tp=2, **options)
    codes, said = codes_and_words(*words, places=places)
    assert codes == [2, 0] and "error: engine: rank 1 has another engine there, of digest" in said


def test_a_rank_without_a_gpu(engine_of_two: Path) -> None:
    found = open_artefact(engine_of_two)
    config = replace(found.config, device="cuda")
    on_cuda = replace(found, manifest=replace(found.manifest, config=config))
    alone = SimpleNamespace(rank=1, on_gpus=False)
    with pytest.raises(MissingError, match="rank 1 has no GPU of its own, or its torch no NCCL"):
        open_runtime(on_cuda, no_progress, alone, cuda_graph=True, trust=True)  # type: ignore[arg-type]


def test_a_group_that_was_left() -> None:
    group = object.__new__(Group)
    group.rank, group.ranks, group.broken, group.lost = 0, 2, True, None
    with pytest.raises(RankError, match="rank 0: an earlier call failed, or the group was left"):
        group.gather_values([])


# --- what starts them -----------------------------------------------------------------------------


def set_launch(patch: pytest.MonkeyPatch, rank: str, ranks: str) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": "0"}.items():
        patch.setenv(name, value)


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in (("0", "1"), ("", ""), ("a", "2")):
        set_launch(monkeypatch, *said)
        assert launched() is None
    with pytest.raises(InputError, match="this process is alone; start several"), join():
        pass
    set_launch(monkeypatch, "0", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(InputError, match=r"MASTER_ADDR expected.* correct it, or start the ranks"):
        join().__enter__()
    assert launched() == RankLaunch(0, 2, 0)
    with pytest.raises(InputError, match="--set rank_timeout=0: expected seconds"), join(0):
        pass
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(MissingError, match="this torch lacks gloo, which ranks need"), join():
        pass


def test_a_verb_of_one_process_is_not_run_by_several(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launch(monkeypatch, "1", "2")
    monkeypatch.setattr("g4ir.ui.console.leave", lambda code: None)  # it ends the process
    assert "this verb runs in one: call g4ir without" in refused("plan", "--variant", "e2b")


def test_an_end_is_known_of_processes_here_alone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    here = socket.gethostname()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert RankProcess(1, here, child.pid).ended  # nobody has asked for its code yet
    child.wait()
    assert RankProcess(1, here, child.pid).ended
    assert not RankProcess(1, here, os.getpid()).ended
    assert not RankProcess(1, "elsewhere", child.pid).ended


@pytest.mark.full
def test_the_example_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun prints there is what it prints."""
    text = (ROOT / "docs" / "parallel.md").read_text()
    found = re.search(r"^\$ torchrun (.*)\n(.*)$", text, re.M)
    assert found
    monkeypatch.chdir(tmp_path)
    options = {"backend": "reference", "random_weights": 0}
    g4ir.build("tiny-moe", "engine-of-two", tp=2, **options)
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": ENDED_S}
    done = subprocess.run([*command, *found[1].split()], env=surroundings(), **how)
    assert done.stdout == f"{found[2]}\n", done.stderr
