"""`--backend trt` from end to end, fake.py in the place of TensorRT.

What sessions should yield comes from the reference backend on the same weights.

TensorRT engines of several ranks: what they exchange, and what each has.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from g4ir import Engine, load_spec
from g4ir.artefact.directory import Artefact, open_artefact
from g4ir.backends.base import Task
from g4ir.backends.cuda.graph import Captured, WithFallback
from g4ir.backends.onnx_graph.export import NullStorage
from g4ir.backends.primitives.graph import network_graph
from g4ir.backends.trt import build as builder
from g4ir.backends.trt import host, runtime
from g4ir.backends.trt import interface as interfaces
from g4ir.backends.trt.dialect import emitted
from g4ir.backends.trt.host import recorded_by_all
from g4ir.backends.trt.interface import LOG, PLAN, TENSORS, interface
from g4ir.backends.trt.runtime import TrtRuntime
from g4ir.builder.build import prepare
from g4ir.builder.load import load_engine, open_runtime
from g4ir.check.logits import verify_engine
from g4ir.errors import EngineError, G4Error, InputError, LowerError, MissingError, PlanError
from g4ir.ir.graph import Builder
from g4ir.ops.types import parse_type
from g4ir.parallel.group import Group
from g4ir.plan.engine_limits import Limits
from g4ir.plan.options import BuildOptions
from g4ir.ui.progress import no_progress
from g4ir.weights.pack import MadeParams
from tests.cases import TABLES
from tests.configs import short
from tests.engines import agrees
from tests.oracle import relative
from tests.spies import spy
from tests.test_parallel import started
from tests.trt import fake
from tests.trt.emulated import CHUNK, MAX_SEQ, ROWS, build, emulated, emulated_api, use
from tests.trt.rank_driver import PROMPTS
from tests.trt.segments import side_by_side
from tests.trt.small import results

Build = Callable[..., Engine]


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    """Builds with a given backend in the place of the real one."""

    def run(spec: Any = "tiny-ple", backend: Any = None, **options: Any) -> Engine:
        use(monkeypatch, backend or emulated(tmp_path))
        return build(tmp_path / "engine", spec, **options)

    return run


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine that tests only look at or copy."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        use(patch, emulated(folder))
        return build(folder / "engine", "tiny-ple")


def tokens(rows: int, count: int) -> torch.Tensor:
    return torch.randint(3, 250, (rows, count), generator=torch.Generator().manual_seed(count))


# --- sessions ---------------------------------------------------------------------------------


def test_recorded_steps(trt: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """One recording per span; the same logits as without."""
    monkeypatch.setattr(interfaces, "MIN_SPAN", 64)
    engine = trt(max_seq=400, prefill_chunk=250)
    plain, made = engine.session(2), list[str]()

    def record(work: Callable[[], None]) -> Callable[[], None]:
        made.append("")
        work()
        work()
        return work

    t = tokens(2, 300)
    expected = [plain.prefill(t[:, :250])] + [plain.decode(t[:, i]) for i in range(250, 260)]
    engine.runtime.record = record  # type: ignore[attr-defined]
    s = engine.session(2)
    got = [s.prefill(t[:, :250])] + [s.decode(t[:, i]) for i in range(250, 260)]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    sizes = {key[1:] for key in s.state.captured.keys(Captured)}
    assert sizes == {(256, 1), (650, 1)}
    assert len(made) == 2


def test_steps_that_cannot_be_recorded(trt: Build, caplog: pytest.LogCaptureFixture) -> None:
    """Where a recording fails the step runs without, and that is said once."""
    engine = trt()
    made = cast(Any, engine.runtime)
    plain, s, t = engine.session(2), engine.session(2), tokens(2, 5)
    expected = [plain.decode(t[:, i]) for i in range(4)]
    made.record = WithFallback(Mock(side_effect=EngineError("it allocates memory")))
    with caplog.at_level("WARNING"):
        got = [s.decode(t[:, i]) for i in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert made.record.record is None
    (said,) = caplog.messages
    assert "launch by launch" in said and "it allocates memory" in said


def test_scratch_memory(trt: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode keeps what its profile needs; a chunk's is there while the chunk runs."""
    engine = trt()
    made = cast(Any, engine.runtime)
    sizes = [made.engine.get_device_memory_size_for_profile_v2(i) for i in range(2)]
    assert sizes[0] < sizes[1] and made.scratch.numel() == sizes[0]
    given: list[int] = []
    spy(monkeypatch, runtime, "lend", lambda _, scratch: given.append(scratch.numel()))
    s = engine.session(2)
    s.prefill(tokens(2, 7))
    s.decode(tokens(2, 1)[:, 0])
    assert given == sizes[1:]


def test_what_steps_are_given(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU tensors begin at multiples of 256 bytes; a context that answers -1, which the
    binding makes an exception of, is an engine that does not fit."""
    made = cast(Any, shared.runtime)
    context, room = made.contexts[made.io.of_phase("decode")[0]], torch.zeros(1024)
    odd = (-room.data_ptr() % host.Stream.alignment) // 4 + 1
    monkeypatch.setattr(made.stream, "alignment", host.Stream.alignment)
    with pytest.raises(EngineError, match=r"x lies at .* no multiple of 256"):
        made._bind(context, {}, {"x": room[odd:]})
    monkeypatch.undo()
    failing = Mock(side_effect=RuntimeError("Error in inferring shapes"))
    monkeypatch.setattr(fake.IExecutionContext, "infer_shapes", failing)
    with pytest.raises(EngineError, match=r"shape inference fails for this step.*build it again"):
        shared.session(1).prefill(tokens(1, 3))
    monkeypatch.setattr(made, "_bind", Mock())
    monkeypatch.setattr(fake.IExecutionContext, "execute_async_v3", lambda *_: False)
    for recording, fix in ((False, "build it again"), (True, "load .* cuda_graph=False")):
        monkeypatch.setattr(fake.IExecutionContext, "capturing", recording)
        with pytest.raises(EngineError, match=f"a step failed: .*; {fix}"):
            made._execute(context, dict.fromkeys(made.io.inputs, room), {})


def test_spans(trt: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a token looks at the least span that has room for every row, of one size: the
    profile's; the last is the whole cache, of which nothing is cut off."""
    monkeypatch.setattr(interfaces, "MIN_SPAN", 8)
    engine = trt(prefill_chunk=11)
    io = engine.runtime.io  # type: ignore[attr-defined]
    assert [*io.profiles] == ["decode.8", "decode.32", "decode.107", "prefill"]
    assert [io.span(p) for p in io.profiles] == [8, 32, 107, None]
    assert io.shapes("slots", "decode.32") == ((32,),) * 3
    held = [io.shape(n, {"B": 1})[2] for n in io.aliased.values() if n not in io.rings]
    assert set(held) == {107}
    ran: list[Any] = []

    def noted(_: Any, context: Any, feeds: Any, state: Any, slots: int, made: Any) -> None:
        ran.append((feeds["positions"].shape[1], slots))

    spy(monkeypatch, type(engine.runtime), "_step", noted)
    t = tokens(1, 36)
    whole = engine.session(1)
    s = engine.session(1)
    s.prefill(t[:, :5])
    got = [s.decode(t[:, i]) for i in range(5, 36)]
    assert [n for size, n in ran if size == 1] == [8] * 3 + [32] * 24 + [107] * 4
    agrees(got[-1], whole.prefill(t))


# --- the engine directory ---------------------------------------------------------------------


def test_documented_tensors(shared: Engine) -> None:
    """A step by engine.io.json alone, without the runtime: what it says is enough."""
    engine = shared
    described = json.loads((engine.path / TENSORS).read_text())
    t = tokens(2, 9)
    want = engine.session(2).prefill(t)
    sizes = {"B": 2, "S": 9, "C": 64}
    made = {x["name"]: _zeros(x, sizes) for x in described["inputs"]}
    for name, value in engine.embed_tokens(t).items():
        made[name].copy_(value)
    made["positions"].copy_(torch.arange(9).expand(2, 9))
    made["lengths"].fill_(9)
    made["slots"].copy_(torch.arange(64))
    for x in described["outputs"]:
        made[x["name"]] = made[x["aliased"]] if "aliased" in x else _zeros(x, sizes)
    plan = (engine.path / PLAN).read_bytes()
    api = emulated_api()
    loaded = api.trt.Runtime(host.logger(api.trt)).deserialize_cuda_engine(plan)
    run = loaded.create_execution_context()
    profile = next(p["index"] for p in described["profiles"] if p["phase"] == "prefill")
    assert run.set_optimization_profile_async(profile, 0)
    for x in described["inputs"]:
        assert run.set_input_shape(x["name"], tuple(made[x["name"]].shape))
    for name, tensor in made.items():
        assert run.set_tensor_address(name, tensor.data_ptr())
    assert run.execute_async_v3(0)
    agrees(made["logits"][:, 0], want)


def _zeros(described: dict[str, Any], sizes: dict[str, int]) -> torch.Tensor:
    dtypes = {"f32": torch.float32, "i64": torch.int64}
    shape = [sizes.get(d, d) for d in described["shape"]]
    return torch.zeros(shape, dtype=dtypes[described["dtype"]])


def test_foreign_plan(shared: Engine, tmp_path: Path) -> None:
    """What TensorRT itself refuses is said in its own words."""
    (tmp_path / PLAN).write_bytes(b"{}")
    with pytest.raises(EngineError, match=r"does not take the plan: .*not built by this library"):
        reload(replace(shared, path=tmp_path), emulated(tmp_path))


def reload(engine: Engine, backend: Any, **kept: Any) -> Any:
    """As `load_engine` does after its checks."""
    kept = {**engine.manifest["compiled"], **kept}
    source = engine.runtime.source
    task = Task(engine.program, engine.limits, "cpu", engine.path, source, print)
    return backend.load(task, kept)


def test_engines_of_others(shared: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"built on NVIDIA H100.*this is NVIDIA H200.*again"):
        reload(shared, emulated(tmp_path, gpu="NVIDIA H200"))
    reload(shared, emulated(tmp_path))
    with pytest.raises(EngineError, match="attention=old, which this backend lacks; build"):
        reload(shared, emulated(tmp_path), settings={"attention": "old"})
    api = replace(emulated_api(), version="11.4.1")
    with pytest.raises(EngineError, match=r"TensorRT 11\.4\.0, this is 11\.4\.1.*build the engine"):
        reload(shared, emulated(tmp_path, api=lambda: api))
    newer = replace(api, version="11.5.0")
    use(monkeypatch, emulated(tmp_path, api=lambda: newer))
    with pytest.raises(EngineError, match=r"another machine .*tensorrt-11\.4.*tensorrt-11\.5"):
        load_engine(shared.path)


def test_engine_of_other_tensors(shared: Engine) -> None:
    """A plan whose tensors are not the program's."""
    engine, made = shared, cast(Any, shared.runtime)
    graph = network_graph(engine.program)
    other = interface(graph, Limits(ROWS, MAX_SEQ, CHUNK))
    changed = {**other.inputs, "more": other.inputs["lengths"]}
    with pytest.raises(EngineError, match=r"its tensors are .*, expected .*more"):
        runtime.check_engine(made.api, made.engine, replace(other, inputs=changed))
    wider = {n: replace(t, dtype="bf16") if n == "embeds" else t for n, t in other.inputs.items()}
    with pytest.raises(EngineError, match="embeds is f32, expected bf16"):
        runtime.check_engine(made.api, made.engine, replace(other, inputs=wider))
    moved = dict.fromkeys(other.aliased, "lengths")
    with pytest.raises(EngineError, match=r"lies at the address of .*, expected lengths"):
        runtime.check_engine(made.api, made.engine, replace(other, aliased=moved))


# --- building ---------------------------------------------------------------------------------


def timing(folder: Path) -> Path:
    return folder / "timings" / "cpu-sm_90-tensorrt-11.4.timing"


def builds_in(folder: Path) -> int:
    return int(timing(folder).read_text().removeprefix("timed "))


def test_timing_cache(trt: Build, tmp_path: Path) -> None:
    """One file per GPU and TensorRT, with which the next build begins; something else in its place
    is left aside and replaced, and where it cannot be kept no build fails."""
    timing(tmp_path).parent.mkdir()
    timing(tmp_path).write_bytes(b"\x00no timing cache")
    trt("tiny-dense")
    first = builds_in(tmp_path)
    build(tmp_path / "second", "tiny-dense")
    assert builds_in(tmp_path) == 2 * first
    shutil.rmtree(timing(tmp_path).parent)
    timing(tmp_path).parent.write_text("a file in the way")
    assert build(tmp_path / "third", "tiny-dense").path.is_dir()


def test_interrupted_build(trt: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C stops the builder at its next step: nothing is left but the timing cache."""
    spy(monkeypatch, fake, "reported", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trt()
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "engine").exists() and not [*tmp_path.glob(".engine*")]
    assert builds_in(tmp_path) == 1


def test_no_space_for_a_plan(trt: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder takes no exception of its writer; of the engine nothing is left."""

    def full(api: Any, file: Any) -> Any:
        def write(data: bytes) -> int:
            file.write(data[:3])
            raise OSError(errno.ENOSPC, "No space left on device")

        return host.stream_writer(api, cast(Any, SimpleNamespace(write=write)))

    monkeypatch.setattr(builder, "stream_writer", full)
    with pytest.raises((OSError, G4Error), match="No space left"):
        trt()
    assert not (tmp_path / "engine").exists() and not [*tmp_path.glob(".engine*")]


def refusing(monkeypatch: pytest.MonkeyPatch, refused: Callable[[list[str]], str]) -> list[int]:
    """Have the builder refuse networks of which `refused` (of the layers' names) says something;
    return how many layers those had."""
    build_once, sizes = fake.Builder.build_serialized_network_to_stream, list[int]()

    def refuse(self: Any, network: Any, config: Any, writer: Any) -> bool:
        said = refused([n.name for n in network.model.graph.node])
        if not said:
            return bool(build_once(self, network, config, writer))
        sizes.append(network.num_layers)
        self.logger.log(fake.Severity.VERBOSE, "looked at everything")
        self.logger.log(fake.Severity.ERROR, said)
        return False

    monkeypatch.setattr(fake.Builder, "build_serialized_network_to_stream", refuse)
    return sizes


@pytest.mark.parametrize(
    ("asked", "layer", "chosen"),
    [("explicit", "attn.out/Softmax", "plain"), ("auto", "/TRT_Attention", "explicit")],
)
def test_attention_that_is_refused(
    trt: Build, monkeypatch: pytest.MonkeyPatch, asked: str, layer: str, chosen: str
) -> None:
    """A second try in other layers; what was chosen is in the manifest, and said."""
    said = "wrap_attention: it has a mask"
    refused = refusing(monkeypatch, lambda names: said * any(n.endswith(layer) for n in names))
    engine = trt("tiny-dense", dtype="bfloat16", settings={"attention": asked})
    kept = engine.manifest["compiled"]
    assert kept["settings"]["attention"] == chosen and len(refused) == 1
    (note,) = (n for n in kept["notes"] if "refused" in n)
    assert note.startswith(f"attention: {chosen}, since TensorRT refused: ")
    assert (engine.path / LOG).read_text().count(f"[ERROR] {said}") == 1


@pytest.mark.parametrize(
    ("attention", "tries", "advice"),
    [
        ("auto", 3, "backend torch"),
        ("explicit", 1, "set attention=plain, "),
        ("plain", 1, "backend"),
    ],
)
def test_network_that_is_refused(
    trt: Build, monkeypatch: pytest.MonkeyPatch, attention: str, tries: int, advice: str
) -> None:
    """In every form that may be chosen; the log is kept beside, and is not in the way later."""
    sizes = refusing(monkeypatch, lambda names: "no kernel for {attn.out/matmul}")
    with pytest.raises(LowerError, match=f"refuses the network.*; try --{advice}") as e:
        trt(settings={"attention": attention})
    assert len(sizes) == tries
    kept = Path(str(e.value).rpartition("TensorRT's log: ")[2])
    assert kept.name == "engine.trt.log"
    assert "[VERBOSE] looked at everything\n[ERROR] no kernel" in kept.read_text()
    assert not kept.with_name("engine").exists()


def test_engine_that_does_not_fit(trt: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory is known when the engine is made."""
    monkeypatch.setattr(fake.ICudaEngine, "device_memory_size_v2", 79 << 30)
    with pytest.raises(PlanError, match=r"scratch 79.*which has 80.*prefill-chunk"):
        trt()


@pytest.mark.parametrize(("said", "layer", "advice"), TABLES["trt backend"]["advice"])
def test_refusals(said: list[str], layer: str, advice: str) -> None:
    """Every message once, the longest name that occurs, advice by what they speak of."""
    names = ["", "L1.mlp.experts/linear", "L1.mlp.experts/linear.2", "L0.attn.out/reshape"]
    message = builder.refusal(said, names, "explicit")
    assert " | ".join(dict.fromkeys(said)) in message and advice in message
    assert (f"at layer {layer}:" if layer else "the network:") in message


def tiny_network() -> builder.Written:
    options = BuildOptions(backend="trt", media="none", random_weights=0)
    p = prepare(load_spec("tiny-ple"), options, dry=True)
    g = network_graph(p.packing.program)
    params = MadeParams(p.packing, p.source)
    w = builder.write_network(emulated_api(), g, p.config.limits, params, p.config.settings)
    builder.configure(emulated_api(), w, 1 << 33)
    return w


def test_a_call_that_only_logs_an_error_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT builds another network then: without the mask of an attention, say."""
    assert not tiny_network().log.errors

    def complain(parser: Any) -> None:
        parser.logger.log(fake.Severity.ERROR, "setMask: not beside\n    a causal kind")

    spy(monkeypatch, fake.OnnxParser, "parse_model_proto", complain)
    said = "a part of the network of prefill: setMask: not beside a causal kind$"
    with pytest.raises(LowerError, match=said):
        tiny_network()


def test_no_network_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated_api().trt.Builder, "create_network", lambda builder: None)
    with pytest.raises(LowerError, match="cannot create a network: "):
        tiny_network()


@pytest.mark.parametrize("quant", short("int8", of=("int8", "int4", "fp8")))
def test_weights_in_codes(quant: str, trt: Build) -> None:
    """Codes go to the network as they are, those of 4 bits by columns; rows of 48, which have no
    groups of 32, in 8 bits."""
    engine = trt("tiny-moe", quant=quant)
    held = Counter(v.type.dtype for v in engine.program.graphs["prefill"].params)
    counts = {"int8": (37, 0, 0), "int4": (7, 0, 30), "fp8": (0, 37, 0)}
    assert (held["i8"], held["f8e4m3"], held["u8"]) == counts[quant]
    assert verify_engine(engine).ok


LIMITS = Limits(2, 64, 8)
SETTINGS = {"attention": "explicit"}
TINY = {"tp": 2, "ep": True, "media": "none"}


# --- what is written --------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "casts"), [(2, 0), (4, 2)])
def test_sums_of_many_are_rounded_once(ranks: int, casts: int) -> None:
    """Those of two ranks travel in the dtype that they have, others in fp32."""
    b = Builder()
    g = b.graph(b.emit("all_reduce", b.input("x", parse_type("bf16[B,S,4]")), ranks=ranks))
    nodes = Counter(n.op_type for n in emitted(g, LIMITS, NullStorage(), SETTINGS)[0].nodes)
    assert (nodes["DistCollective"], nodes["Cast"]) == (1, casts)


def test_networks_of_ranks_differ_in_weights_alone(two: Engine) -> None:
    """Which experts a rank has, too, is a weight. A layer sums once after its attention, and once
    for both of its branches; the last collective gathers the logits."""
    one, other = (plan_of(two, rank).model.graph for rank in range(2))
    assert one.node == other.node and len(one.node) > 100
    kinds = Counter(n.op_type for n in one.node)
    assert kinds["DistCollective"] == 2 * two.spec.text.num_hidden_layers + 1
    differ = {a.name for a, b in zip(one.initializer, other.initializer, strict=True) if a != b}
    assert any(n.startswith("moe.first") for n in differ)
    assert not any(n.startswith("const/") for n in differ)


def plan_of(engine: Engine, rank: int) -> Any:
    return fake.Plan.read((engine.path / f"engine.rank{rank}of2.plan").read_bytes())


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
    with pytest.raises(MissingError, match=r"rank 1: torch .* does not expose its NCCL"):
        group.communicator()
