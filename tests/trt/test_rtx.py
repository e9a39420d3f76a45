"""`--target`: engines of TensorRT-RTX, built by its own builder on this machine, without a GPU; and
what is said of them where they do not run. What a build with TensorRT needs of its environment, and
dry runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import g4ir
from g4ir import Engine, load_engine, load_spec
from g4ir.backends.trt import build as building
from g4ir.backends.trt import dry_run as dry
from g4ir.backends.trt import host, runtime
from g4ir.backends.trt.backend import BACKEND
from g4ir.backends.trt.host import Api, installed
from g4ir.backends.trt.interface import PLAN, networks
from g4ir.backends.trt.kernel_cache import DIGEST, KernelCache
from g4ir.backends.trt.target import RTX, TARGETS, find_target
from g4ir.builder.build import prepare
from g4ir.errors import EngineError, InputError, MissingError, PlanError
from g4ir.plan.options import BuildOptions
from g4ir.ui.progress import no_progress
from tests.cases import TABLES
from tests.cli_tools import g4ir as command_line
from tests.configs import VARIANTS, short
from tests.engines import resigned
from tests.trt.compiled import planned
from tests.trt.emulated import build, emulated, use

ROWS = TABLES["rtx"]
VERSION = installed(RTX)
builder = pytest.mark.skipif(not VERSION, reason="needs TensorRT-RTX: pip install -e '.[rtx]'")
SMALL = {"max_batch": 1, "max_seq": 64, "prefill_chunk": 16, "random_weights": 0}


def gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int], name: str) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    patch.setattr(torch.cuda, "get_device_name", lambda: name)


# --- targets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "runs", "not_on"), ROWS["capabilities"])
def test_capabilities(target: str, runs: list[Any], not_on: list[Any]) -> None:
    found = find_target(target)
    ours, others = ([tuple(each) for each in some] for some in (runs, not_on))
    assert all(map(found.runs_on, ours)) and not any(map(found.runs_on, others))


def test_the_gpu_of_this_machine_is_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BACKEND.aimed(None) is BACKEND
    gpu(monkeypatch, (8, 9), "NVIDIA GeForce RTX 4090")
    assert BACKEND.aimed(None).host.target == TARGETS["sm89"]
    assert BACKEND.aimed("rtx").host.target == TARGETS["rtx"]
    gpu(monkeypatch, (9, 0), "NVIDIA H100 80GB HBM3")
    assert BACKEND.aimed(None) is BACKEND


@pytest.mark.parametrize("version", ["1.7.1.116", ""])
def test_without_a_gpu_and_a_target(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets that can be built here; without the library, how to install it."""

    def load(name: str) -> Any:
        if name != RTX.module or not version:
            raise ImportError(name)
        return SimpleNamespace(__version__=version)

    monkeypatch.setattr(host.require_library, "__defaults__", (host.TENSORRT, load))
    with pytest.raises(MissingError) as e:
        prepare(load_spec("tiny-dense"), BuildOptions(backend="trt", random_weights=0))
    said = str(e.value)
    if version:
        assert "--target, one of rtx, sm80" in said
        assert f"TensorRT-RTX {version} builds without a GPU" in said
    else:
        assert RTX.install in said and "cannot be imported" in said


@pytest.mark.parametrize(("target", "kept"), [("sm120", True), ("rtx", False)])
def test_where_nvfp4_stays_so(target: str, kept: bool, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("rules: [{tensors: [L*.mlp.w_gate, L*.attn.wq], form: fp4}]")
    options = BuildOptions(backend="trt", target=target, random_weights=0, quant=recipe)
    program = prepare(load_spec("tiny-dense"), options, dry=True).packing.program
    assert any(v.type.dtype == "f4" for v in program.graphs["decode"].params) == kept


# --- an engine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """For `rtx`, by the builder; tests look at it or copy it."""
    out = tmp_path_factory.mktemp("rtx") / "engine"
    return g4ir.build("tiny-dense", out, backend="trt", target="rtx", **SMALL)


@pytest.fixture
def copy(engine: Engine, tmp_path: Path) -> Path:
    return Path(shutil.copytree(engine.path, tmp_path / "copy"))


@builder
def test_a_portable_engine(engine: Engine) -> None:
    m = engine.manifest
    kept = m["compiled"]
    assert m["machine"] == f"cuda tensorrt-rtx-{'.'.join(VERSION.split('.')[:2])}"
    assert (kept["target"], kept["version"], kept["gpu"]) == ("rtx", VERSION, "")
    assert (engine.path / PLAN).stat().st_size > 1 << 20
    assert kept["scratch_bytes"] > 1 << 20
    said = [n for n in kept["notes"] if "kernels" in n]
    assert len(said) == 2 and "0.00 KiB of caches copied" in said[0]
    with pytest.raises(InputError, match="no CUDA device; run it on a GPU of compute"):
        engine.session(1)


@builder
@pytest.mark.parametrize("case", ROWS["elsewhere"])
def test_where_it_does_not_run(copy: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    capability, name, changes, says = ROWS["elsewhere"][case]

    def change(m: dict[str, Any]) -> None:
        for key, value in changes.items():
            (m if key in m else m["compiled"])[key] = value

    resigned(copy, change)
    if capability:
        gpu(monkeypatch, tuple(capability), name)
    with pytest.raises((EngineError, MissingError), match=says) as e:
        load_engine(copy, trust=True)
    assert "\n" not in str(e.value)


@builder
def test_without_the_library(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (8, 9), "NVIDIA GeForce RTX 4090")
    missing = Mock(side_effect=ImportError)
    monkeypatch.setattr(host.require_library, "__defaults__", (host.TENSORRT, missing))
    with pytest.raises(MissingError, match=r"needs TensorRT-RTX, which cannot be imported .*pip"):
        load_engine(copy, trust=True)


@builder
def test_an_altered_plan(copy: Path) -> None:
    with (copy / PLAN).open("r+b") as file:
        file.seek(1 << 16)
        file.write(b"altered")
    with pytest.raises(EngineError, match=r"engine\.plan: its SHA-256 is not the manifest's"):
        load_engine(copy, trust=True)


def test_verify_runs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(BACKEND), "needs", lambda *_: ())
    words = ["--variant", "tiny-dense", "--backend", "trt", "--target", "sm86", "--verify"]
    said = command_line("build", *words, "--random-weights", "0", "--out", tmp_path / "e")
    assert said.code == 2
    assert "--verify needs a GPU: verify it on a GPU of compute capability 8.6" in said.err


# --- finished kernels -------------------------------------------------------------------------


class Cache:
    """A runtime cache whose content is a list of bytes; it takes none of another machine."""

    def __init__(self) -> None:
        self.kernels = b""

    def deserialize(self, raw: bytes) -> bool:
        self.kernels = raw
        return not raw.startswith(b"other")

    def serialize(self) -> bytes:
        return self.kernels

    def reset(self) -> bool:
        self.kernels = b""
        return True


class Config(SimpleNamespace):
    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> bool:
        self.cache = cache
        return True


class Compiled:
    """An engine that finishes a kernel for each context whose kernel is not in the cache."""

    def __init__(self) -> None:
        self.finished = 0

    def create_runtime_config(self) -> Config:
        return Config()

    def create_execution_context(self, config: Config) -> Config:
        kind = config.dynamic_shapes_kernel_specialization_strategy.encode() + b";"
        if kind not in config.cache.kernels:
            self.finished += 1
            config.cache.kernels += kind
        return config


NAMES = SimpleNamespace(
    ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="managed"),
    DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager", NONE="none"),
    CudaGraphStrategy=SimpleNamespace(DISABLED="disabled"),
)
FILE = "engine.kernels"


def finished(folder: Path, told: list[str], key: str = "engine GPU 1.7") -> int:
    """How many kernels a load finishes."""
    cache, made = KernelCache(Api(NAMES, "1.7.1", RTX), folder / FILE, key, told.append), Compiled()
    for recorded in (True, True, False):
        context = cache.context(made, "decode", recorded)
        assert (context.strategy, context.cuda_graph_strategy) == ("managed", "disabled")
    cache.keep()
    return made.finished


def test_kernels_are_finished_once(tmp_path: Path) -> None:
    told: list[str] = []
    assert finished(tmp_path, told) == 2
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    before = (tmp_path / FILE).stat().st_mtime_ns
    assert finished(tmp_path, told) == 0
    assert (tmp_path / FILE).stat().st_mtime_ns == before
    assert {*told} == {"preparing kernels for this GPU: decode"}


def _damaged(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[DIGEST] ^= 1
    file.write_bytes(raw)


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("harm", "key", "says"),
    [
        (_damaged, "engine GPU 1.7", "damaged, or of another"),
        (lambda file: file.write_bytes(b""), "engine GPU 1.7", "damaged, or of another"),
        (lambda file: None, "engine GPU 1.8", "damaged, or of another"),
        (lambda file: file.chmod(0o622), "engine GPU 1.7", "other users may write to it"),
        (_link, "engine GPU 1.7", "symbolic links"),
    ],
    ids=["damaged", "empty", "another library", "writable", "a link"],
)
def test_dropped_caches(tmp_path: Path, harm: Callable[[Path], Any], key: str, says: str) -> None:
    """Dropped, which is said once, and written anew."""
    told: list[str] = []
    finished(tmp_path, told)
    harm(tmp_path / FILE)
    assert finished(tmp_path, told, key) == 2
    (said,) = [line for line in told if "is not used, since" in line]
    assert says in said
    assert finished(tmp_path, told, key) == 0


def test_a_cache_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    finished(tmp_path, told)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert finished(tmp_path, told) == 2
    assert any("belongs to another user" in line for line in told)


def test_a_cache_of_another_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library itself refuses."""
    told: list[str] = []
    monkeypatch.setattr(Cache, "serialize", lambda self: b"other driver's")
    finished(tmp_path, told)
    monkeypatch.undo()
    assert finished(tmp_path, told) == 2
    assert any("TensorRT-RTX does not take it on this machine" in line for line in told)


def test_where_no_cache_can_be_written(tmp_path: Path) -> None:
    told: list[str] = []
    assert finished(tmp_path / "nowhere", told) == 2
    assert told[-1].endswith("cannot be written (No such file or directory): kernels are not kept")


# --- room -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "measured"), ROWS["host memory"].items())
def test_host_memory(row: str, measured: float) -> None:
    """As the builder was seen to take (GiB, bench/results/rtx-builds.txt)."""
    graphs = networks(planned(row).packing.program)
    found = building.estimate([*graphs.values()]).host_bytes
    assert found / building.GIB == pytest.approx(measured, rel=0.1)


def test_too_little_disk_and_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan holds the weights once more; the builder holds them in host memory."""
    backend = emulated(tmp_path)
    use(monkeypatch, backend)
    monkeypatch.setattr("g4ir.builder.build.free_bytes", lambda out: 65 << 20)
    with pytest.raises(EngineError, match=r"the engine needs 6.* MiB .*, 65.0 MiB are free; make"):
        build(tmp_path / "engine", "tiny-dense")
    monkeypatch.undo()
    use(monkeypatch, backend)
    monkeypatch.setattr(building, "device_memory", lambda device: 1 << 29)
    monkeypatch.setattr("g4ir.weights.pack.write_shares", None)  # nothing is packed before
    need = r"needs .* of host memory, this machine has 0.50 GiB: build"
    with pytest.raises(PlanError, match=f"{need} on a larger one, or with --quant int4$"):
        build(tmp_path / "engine", "tiny-dense")
    with pytest.raises(PlanError, match=f"{need} on a larger one$"):
        build(tmp_path / "engine", "tiny-dense", quant="int4")


# --- what the environment lacks ---------------------------------------------------------------


def test_tensorrt_without_its_libraries() -> None:
    """Bindings alone cannot be imported."""
    load = Mock(side_effect=OSError("libnvinfer.so.11: cannot open shared object file"))
    with pytest.raises(MissingError, match=r"libnvinfer\.so\.11.*the bindings alone"):
        host.require_library(load=load)


@pytest.mark.parametrize("version", ["8.6.1", "10.16.1", "12.0.0", "9", "x.y", "1.6.0.1", "2.0.0"])
def test_unsupported_versions(version: str) -> None:
    with pytest.raises(MissingError, match=r"not supported: `pip install 'tensorrt>=11,<12'`"):
        host.probe(SimpleNamespace(__version__=version))
    with pytest.raises(MissingError, match=rf"TensorRT-RTX {version} is not supported: `pip"):
        host.probe(SimpleNamespace(__version__=version), RTX)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """None, another architecture, and the target."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingError, match="no CUDA device"):
        host.require_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(MissingError, match=r"capability 9\.0 .*A100.*has 8\.0"):
        host.require_gpu()
    assert host.Host().architecture() == "sm_80"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    host.require_gpu()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    host.require_gpu(TARGETS["h200"])
    with pytest.raises(MissingError, match=r"9\.0 \(H100\).*NVIDIA H200"):
        host.require_gpu(TARGETS["h100"])


# --- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 100, 256, 1000, 8192, 262144])
def test_slots_of_a_step(most: int) -> None:
    """Enough, never more than there are, few sizes, and no more than half beyond what is held."""
    counts = [*range(1, min(most, 3000) + 1), most]
    sizes = [runtime.step_slots(n, most) for n in counts]
    assert all(n <= size <= most for n, size in zip(counts, sizes, strict=True))
    assert all(size <= max(256, 1.5 * n) for n, size in zip(counts, sizes, strict=True))
    assert all(a <= b for a, b in pairwise(sizes)) and len(set(sizes)) < 25


# --- dry runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", short("tiny-media", of=("tiny-media", *VARIANTS)))
def test_dry_run(variant: str, tmp_path: Path) -> None:
    """Without a GPU or weights; of a whole variant within a minute and 4 GiB."""
    words = f"build --variant {variant} --backend trt --drafter default --dry-run --json --out"
    argv = [sys.executable, "-m", "g4ir.cli", *words.split(), str(tmp_path / "engine")]
    done = subprocess.run(argv, capture_output=True, text=True)
    plan = json.loads(done.stdout)
    assert done.returncode == bool(plan["short"]), done.stderr
    nodes = int(plan["network"].removesuffix(" nodes"))
    assert plan["dry_run_s"] < 60 and nodes > 500
    if host.installed(RTX):
        assert int(plan["parsed"].split()[0]) > nodes / 2
        assert "compiled" not in plan or int(plan["compiled"][0].split()[1]) < nodes / 3
    assert plan["draft"].endswith(" nodes") and "hidden" in plan["outputs"]
    assert any(n.startswith("vision_") for n in plan["towers"])
    assert plan["inputs"]["positions"] == "i64[B,S]"
    assert plan["outputs"]["logits"].split(",")[1] == "R"
    assert "GiB of host memory" in plan["builder"]
    assert plan["peak_bytes"] < 4 << 30


def test_dry_run_of_what_is_made_dense() -> None:
    """The report says which weights a network does not hold in codes."""
    options = BuildOptions(backend="trt", quant="int8", media="none", dtype="float32")
    p = prepare(load_spec("tiny-ple"), options, dry=True)
    notes = dry.full_size(p)["notes"]
    assert "8 quantised weights are dequantised at build: gates of per-layer" in str(notes)


def test_dry_run_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepare(load_spec("tiny-dense"), BuildOptions(backend="trt"), dry=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnx" else name)
    said = r"--backend trt needs the library onnx: `pip install 'g4ir\[onnx\]'`"
    with pytest.raises(MissingError, match=said):
        dry.dry_run(p, no_progress)
