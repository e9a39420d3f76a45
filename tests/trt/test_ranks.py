"""TensorRT engines of several ranks: what they exchange, and what each has, a stand-in in
TensorRT's place."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from g4ir.artefact.directory import Artefact, open_artefact
from g4ir.backends.onnx_graph.export import NullStorage
from g4ir.backends.trt.dialect import emitted
from g4ir.backends.trt.host import recorded_by_all
from g4ir.backends.trt.runtime import TrtRuntime
from g4ir.builder.load import open_runtime
from g4ir.cli import main
from g4ir.engine.engine import Engine
from g4ir.errors import EngineError, InputError, MissingError
from g4ir.ir.graph import Builder
from g4ir.ops.types import parse_type
from g4ir.parallel.group import Group
from g4ir.plan.engine_limits import Limits
from g4ir.ui.progress import no_progress
from tests.oracle import relative
from tests.test_torchrun import started
from tests.trt import fake
from tests.trt.emulated import build, emulated, use
from tests.trt.rank_driver import PROMPTS
from tests.trt.segments import outputs_of, side_by_side
from tests.trt.small import results

LIMITS = Limits(2, 64, 8)
SETTINGS = {"attention": "explicit"}
TINY = {"tp": 2, "ep": True, "media": "none"}


# --- what is written --------------------------------------------------------------------------


def exchanged(op: str, ranks: int, *parts: torch.Tensor) -> tuple[list[torch.Tensor], Counter[str]]:
    """What the first rank has of an op on [rank, B, S, n] parts, and the nodes of its network."""
    b = Builder()
    types = [parse_type(f"f32[B,S,{p.shape[-1]}]") for p in parts]
    inputs = [b.input(f"x{i}", t) for i, t in enumerate(types)]
    g = b.graph(*b.emit_all(op, *inputs, ranks=ranks, name=[f"y{i}" for i in range(len(parts))]))
    nets = [emitted(g, LIMITS, NullStorage(), SETTINGS)[0] for _ in range(ranks)]

    def run(rank: int, exchange: Any) -> list[torch.Tensor]:
        fed = {f"x{i}": p[rank] for i, p in enumerate(parts)}
        return [*outputs_of(nets[rank], fed, exchange).values()]

    return side_by_side(ranks, run)[0], Counter(n.op_type for n in nets[0].nodes)


def test_sums_are_one_message() -> None:
    """Both branches of a layer with experts in one."""
    one, two = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 6)
    made, nodes = exchanged("all_reduce", 2, one, two)
    assert torch.allclose(made[0], one.sum(0)) and torch.allclose(made[1], two.sum(0))
    assert nodes == {"DistCollective": 1, "Concat": 1, "Slice": 2}


@pytest.mark.parametrize(("ranks", "casts"), [(2, 0), (4, 2)])
def test_sums_of_many_are_rounded_once(ranks: int, casts: int) -> None:
    """Those of two ranks travel in the dtype that they have, others in fp32."""
    b = Builder()
    g = b.graph(b.emit("all_reduce", b.input("x", parse_type("bf16[B,S,4]")), ranks=ranks))
    nodes = Counter(n.op_type for n in emitted(g, LIMITS, NullStorage(), SETTINGS)[0].nodes)
    assert (nodes["DistCollective"], nodes["Cast"]) == (1, casts)


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_lie_behind_one_another_in_the_last_dim(ranks: int) -> None:
    parts = torch.randn(ranks, 2, 3, 5)
    made, nodes = exchanged("all_gather", ranks, parts)
    assert torch.equal(made[0], torch.cat([*parts], -1))
    assert nodes["DistCollective"] == 1


def test_networks_of_ranks_differ_in_weights_alone(two: Engine) -> None:
    """Which experts a rank has, too, is a weight."""
    one, other = (plan_of(two, rank).model.graph for rank in range(2))
    assert one.node == other.node and len(one.node) > 100
    differ = {a.name for a, b in zip(one.initializer, other.initializer, strict=True) if a != b}
    assert any(n.startswith("moe.first") for n in differ)
    assert not any(n.startswith("const/") for n in differ)


def plan_of(engine: Engine, rank: int) -> Any:
    return fake.Plan.read((engine.path / f"engine.rank{rank}of2.plan").read_bytes())


# --- dry runs ---------------------------------------------------------------------------------


def test_a_report_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = "build --variant tiny-dense --backend trt --media none --dtype float32 --tp 2 --dry-run"
    assert main(words.split()) == 0
    said = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert said["tp"] == "2" and int(said["network"].split()[0]) > 100


# --- engines ----------------------------------------------------------------------------------


@cache
def engine_of_two(folder: Path) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, emulated(folder))
        return build(folder / "engine", "tiny-moe", **TINY)


@pytest.fixture
def two(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine of two ranks, as one process may see it."""
    return engine_of_two(tmp_path_factory.getbasetemp() / "two-ranks")


def test_a_plan_for_each_rank(two: Engine) -> None:
    names = {n for n in two.manifest["files"] if n.startswith("engine.")}
    assert names == {"engine.io.json", *(f"engine.rank{i}of2.plan" for i in range(2))}
    with pytest.raises(InputError, match="built for 2 ranks, and 1 is running"):
        two.generate([2, 5], 3)


def test_a_rank_reads_its_own_plan_alone(two: Engine, tmp_path: Path) -> None:
    """That of another may be what it will, as its weights may."""
    copy = Path(shutil.copytree(two.path, tmp_path / "engine"))
    plan = copy / "engine.rank1of2.plan"
    plan.write_bytes(plan.read_bytes()[::-1])
    assert open_artefact(copy, rank=0).rank == 0
    for rank in (1, None):
        with pytest.raises(EngineError, match=r"rank1of2\.plan: its SHA-256"):
            open_artefact(copy, rank=rank)


def of_rank(path: Path, rank: int, exchange: Any) -> tuple[Artefact, Any]:
    """What a process of several has of an engine."""
    group: Any = SimpleNamespace(
        rank=rank, ranks=2, _all=exchange, gathered=lambda value: [value] * 2, on_gpus=False
    )
    found = open_artefact(path, rank=rank)
    return found, open_runtime(found, no_progress, group, cuda_graph=True, trust=True)


def test_ranks_compute_what_one_does(two: Engine, tmp_path: Path) -> None:
    """Each from its own plan and weights, chunks and single tokens."""
    one = build(tmp_path / "one", "tiny-moe", "reference", media="none")

    def run(rank: int, exchange: Any) -> torch.Tensor:
        found, runtime = of_rank(two.path, rank, exchange)
        assert isinstance(runtime, TrtRuntime)
        return results(found.packing.program, runtime.source, runtime)["logits"]

    with pytest.MonkeyPatch.context() as patch:
        use(patch, emulated(two.path.parent))
        made = side_by_side(2, run)
    want = results(one.program, one.runtime.source, one.runtime)["logits"]
    assert all(torch.equal(rows, made[0]) for rows in made)
    assert relative(made[0], want).max() < 1e-4


@pytest.mark.full
def test_processes_run_an_engine(tmp_path: Path) -> None:
    """Whole sessions in two processes with a drafter, as one on the reference; each builds the same
    engine first."""
    places = [tmp_path / f"{rank}" for rank in range(2)]
    for place in places:
        place.mkdir()
    one = build(tmp_path / "one", "tiny-moe", "reference", media="none")
    want = one.generate(PROMPTS, 8)
    with started(2, places=places, module="tests.trt.rank_driver") as run:
        assert run.ended() == [0, 0], [run.said(rank) for rank in range(2)]
        out = run.processes[0].stdout
        assert out and json.loads(out.read()) == {"tokens": want, "drafted": want, "verified": True}


# --- what ranks need --------------------------------------------------------------------------


def test_steps_are_recorded_by_all_or_none() -> None:
    def record(work: Any) -> Any:
        work()
        return work

    fails, made = Mock(side_effect=EngineError("no graph of it")), list[int]()
    work = partial(made.append, 1)
    assert recorded_by_all(record, lambda own: [own, True])(work) is work and made == [1]
    with pytest.raises(EngineError, match="another rank could not record the step"):
        recorded_by_all(record, lambda own: [own, False])(work)
    with pytest.raises(EngineError, match="no graph of it"):
        recorded_by_all(fails, lambda own: [True, own])(work)


def test_where_torch_has_its_communicator() -> None:
    group, address = object.__new__(Group), 0x7F00
    group.rank = 1
    nccl: Any = SimpleNamespace(_comm_ptr=lambda: address)
    group._nccl = SimpleNamespace(_get_backend=lambda device: nccl)
    assert group.communicator() == address
    nccl = SimpleNamespace()
    with pytest.raises(MissingError, match=r"rank 1: torch .* does not say where its NCCL"):
        group.communicator()
