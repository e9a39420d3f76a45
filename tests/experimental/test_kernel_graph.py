"""Chains of kernels: assembled for Hopper and kept in files, and what CUDA's driver is told."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import triton

from g4ir.backends.cuda.choices import choice_texts
from g4ir.backends.cuda.kernels.resources import Assembled
from g4ir.backends.experimental import kernel_graph as module
from g4ir.backends.experimental.cuda_driver import EARLY, Attribute, Config, CudaDriver
from g4ir.backends.experimental.kernel_graph import (
    Chain,
    LoadedChain,
    chain_dims,
    chained,
    compile_chains,
    followers,
    read_chain,
    recorded_chain,
    write_chain,
)
from g4ir.backends.inductor import runtime
from g4ir.backends.inductor.backend import DECODE_STEP, TorchBackend, _check_programs
from g4ir.backends.inductor.compile import marker
from g4ir.backends.inductor.programs import CHAINS, END, phase_steps
from g4ir.backends.inductor.segment import Glue, Segment, Step
from g4ir.backends.inductor.target import Target
from g4ir.errors import EngineError
from g4ir.ir.graph import Program
from g4ir.plan.engine_limits import Limits
from g4ir.ui.progress import no_progress
from g4ir.weights.pack import split_program
from tests.configs import VARIANTS, spec_called
from tests.runner import built_program

LIMITS = Limits(max_batch=1, max_seq=64)
HOPPER = Target("cuda", "h200", 1)


def steps_of(name: str, rows: int = 1) -> list[Step]:
    built = built_program(spec_called(name), dtype="bf16", gpu_rows=rows)
    limits = replace(LIMITS, max_batch=rows)
    return phase_steps(split_program(built).program, limits, "cuda")["decode"]


def not_compiled(launch: Any) -> Assembled:
    return Assembled(launch[0].__name__, 4, 100, launch[0].__name__.encode())


def a_chain(name: str = "tiny-dense") -> tuple[str, Chain, list[bytes]]:
    for s in steps_of(name):
        made = recorded_chain(s.text, HOPPER, chain_dims(LIMITS), not_compiled)
        if made:
            return s.text, *made
    raise AssertionError


class Listening:
    """A driver that keeps what it is told."""

    def __init__(self) -> None:
        self.starts: list[tuple[Any, tuple[int, ...], list[Any], bool]] = []

    def load(self, cubin: bytes, name: str, shared: int) -> str:
        assert cubin == name.encode()
        return name

    def start(
        self,
        function: str,
        grid: Sequence[int],
        threads: int,
        shared: int,
        values: Sequence[Any],
        early: bool,
    ) -> None:
        assert (threads, shared) == (128, 100)
        self.starts.append((function, tuple(grid), [v.value for v in values], early))


def test_an_assembled_chain(tmp_path: Path) -> None:
    """The kernels of a layer for sm_90, each of which lets others begin and waits."""
    steps = steps_of("tiny-dense")
    layers = [s for s in steps if isinstance(s, Segment) and "attention" in s.text]
    steps = [steps[0], layers[0], layers[0]]
    files = compile_chains(steps, HOPPER, LIMITS, tmp_path, no_progress)
    assert len(files) == len(steps)
    found = {f: s for f, s in zip(files, steps) if f}
    assert {f.name for f in tmp_path.iterdir()} == found.keys()
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    for file, step in found.items():
        assert isinstance(step, Segment)
        chain, cubins = read_chain(tmp_path / file, step.text)
        assert len(chain.starts) == 5 and len(cubins) == len(chain.functions)
        for function, cubin in zip(chain.functions, cubins, strict=True):
            (tmp_path / "kernel").write_bytes(cubin)
            command = [str(disassembler), "-c", str(tmp_path / "kernel")]
            code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert f".text.{function.name}" in code
            lines = code.splitlines()
            (wait,) = (i for i, line in enumerate(lines) if "ACQBULK" in line)
            lets = [i for i, line in enumerate(lines) if "PREEXIT" in line]
            loads = [i for i, s in enumerate(lines) if "LDG" in s or "CCTL" in s or "LDGSTS" in s]
            assert lets and lets[0] < wait and loads[0] < wait, function.name
            if function.name != "_norm_linear":  # whose loop stands in front of what it begins with
                assert not any("STG" in line or "ATOM" in line for line in lines[:wait])


@pytest.mark.parametrize(
    "name", [v if v == "26b-a4b" else pytest.param(v, marks=pytest.mark.full) for v in VARIANTS]
)
def test_every_layer_is_a_chain(name: str) -> None:
    """Of one row and of more, but for what the library multiplies."""
    for rows in (1, 8):
        steps = steps_of(name, rows)
        dims = chain_dims(replace(LIMITS, max_batch=rows))
        target = Target("cuda", "h200", rows)
        kept: dict[str, Any] = {}
        for s in steps:
            if isinstance(s, Segment) and s.text not in kept:
                kept[s.text] = recorded_chain(s.text, target, dims, not_compiled)
        chains = {i for i, s in enumerate(steps) if isinstance(s, Segment) and kept[s.text]}
        layers = [
            i for i, s in enumerate(steps) if isinstance(s, Segment) and "attention" in s.text
        ]
        assert chains == {*layers}
        assert followers(steps, chains) == chains - {min(chains)}
        views = [s for s in steps if isinstance(s, Glue)]
        assert len(views) + len(layers) + 2 == len(steps)


def test_a_chain_and_what_it_is_given() -> None:
    _, chain, cubins = a_chain()
    driver = Listening()
    loaded = LoadedChain(chain, cubins, driver, "cpu")
    given = [torch.zeros(t.bind({}).shape, dtype=torch.bfloat16) for t in loaded.types]
    given = [
        t.to(torch.int64) if kind.dtype == "i64" else t for t, kind in zip(given, loaded.types)
    ]
    call = chained(loaded, True, lambda operands: "the program's")
    made = call(given)
    assert [t.dim() for t in made] == [len(r.type.split(",")) for r in chain.results]
    assert [early for *_, early in driver.starts] == [True] * len(chain.starts)
    at = {t.data_ptr() for t in given}
    assert all(at & {*values} for _, _, values, _ in driver.starts)
    wrong = [torch.zeros(*t.shape[:-1], t.shape[-1] + 1, dtype=t.dtype) for t in given]
    assert call(wrong) == "the program's"
    apart = [torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape) for t in given]
    assert call(apart) == "the program's"
    assert len(driver.starts) == len(chain.starts)


def test_a_kernel_that_does_not_wait_begins_behind_the_others() -> None:
    _, chain, cubins = a_chain()
    starts = [replace(s, waits=i != 2) for i, s in enumerate(chain.starts)]
    driver = Listening()
    loaded = LoadedChain(replace(chain, starts=tuple(starts)), cubins, driver, "cpu")
    loaded.run([torch.zeros(t.bind({}).shape, dtype=torch.bfloat16) for t in loaded.types], False)
    assert [early for *_, early in driver.starts] == [False, True, False, True, True]


def one_start(function: int = 0, grid: Any = (1, 1, 1), *operands: str) -> dict[str, Any]:
    start = {"function": function, "waits": True, "grid": [*grid], "operands": [*operands]}
    return {"starts": [start]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (one_start(99), "does not have"),
        (one_start(0, (1, 1, 1), "t99+0"), "outside"),
        (one_start(0, (1, 1, 1), "t0+999999"), "outside"),
        (one_start(0, (1, 1)), "grid"),
        (one_start(0, (1, 1, 1), "rm"), "operands"),
        ({"results": [{"at": "t0+2", "type": "bf16[1,1,4096]"}]}, "outside"),
        ({"functions": []}, "does not have"),
        ({"more": 1}, "more"),
    ],
)
def test_lists_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    text, chain, cubins = a_chain()
    write_chain(tmp_path / "a.chain", text, chain, cubins)
    assert read_chain(tmp_path / "a.chain", text) == (chain, cubins)
    monkeypatch.setattr(module, "asdict", lambda c: asdict(c) | changes)
    write_chain(tmp_path / "a.chain", text, chain, cubins)
    with pytest.raises(EngineError, match=f"a.chain.*{message}.*build the engine again"):
        read_chain(tmp_path / "a.chain", text)


def test_files_that_are_refused(tmp_path: Path) -> None:
    text, chain, cubins = a_chain()
    path = tmp_path / "a.chain"
    write_chain(path, text, chain, cubins)
    with pytest.raises(EngineError, match="made for another segment"):
        read_chain(path, text.replace("bf16", "f16"))
    write_chain(path, text, chain, cubins[1:])
    with pytest.raises(EngineError, match=f"expected {len(cubins)} kernels"):
        read_chain(path, text)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EngineError, match="build the engine again"):
        read_chain(path, text)


def test_an_end_of_other_operands_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may be older than the operands."""
    path, nothing = tmp_path / "a.chain", Chain((), (), (), (), ())
    with monkeypatch.context() as patch:
        patch.setattr(module, "END_TAKES", (*module.END_TAKES, "i64"))
        write_chain(path, module.end_text(3), nothing, [])
        assert read_chain(path, module.end_text(3)) == (nothing, [])
    with pytest.raises(EngineError, match="another segment than the end of a step;"):
        read_chain(path, module.end_text(3))


def cuda_task(program: Program) -> Any:
    """What a load checks programs for, without weights."""
    return SimpleNamespace(program=program, limits=LIMITS, device="cuda")


def test_an_engine_names_its_chains(tmp_path: Path) -> None:
    """One or none for each segment, by files that are there and called like a chain."""
    built = built_program(spec_called("tiny-dense"), dtype="bf16", gpu_rows=1)
    program = split_program(built).program
    steps, texts = phase_steps(program, LIMITS, "cuda"), choice_texts(program, LIMITS)
    task = cuda_task(program)
    segments = [s.text for many in steps.values() for s in many if isinstance(s, Segment)]
    names = {text: f"{i:024x}.pt2" for i, text in enumerate({*segments, *texts.values()})}
    for text, name in names.items():
        (tmp_path / name).write_bytes(marker(text))
    kept: dict[str, Any] = {
        phase: tuple(names[s.text] if isinstance(s, Segment) else None for s in many)
        for phase, many in steps.items()
    }
    kept |= {op: (names[text],) for op, text in texts.items()}
    chain = f"{0:024x}.chain"
    (tmp_path / chain).touch()
    many = steps["decode"]
    layer = next(i for i, s in enumerate(many) if isinstance(s, Segment) and "attention" in s.text)

    def check(chains: dict[int, str], count: int = len(many)) -> None:
        found = {CHAINS: tuple(chains.get(i) for i in range(count)), END: (chain,)}
        _check_programs(task, steps, tmp_path, kept | found)

    check({})
    check({layer: chain})
    for name in ("ffff.chain", f"{1:024x}.chain", names[many[layer].text]):
        with pytest.raises(EngineError, match=f"no program '{name}'; build the engine again"):
            check({layer: name})
    with pytest.raises(EngineError, match="not one for each segment"):
        check({}, len(many) - 1)
    with pytest.raises(EngineError, match="decode chains, end of a step expected"):
        _check_programs(task, steps, tmp_path, kept | {CHAINS: ()})


def test_a_plain_step_is_complete(tmp_path: Path) -> None:
    """By default no graph has an op that only fused passes make, each node is a kernel of its own
    or the compiler's, and an engine without a kernel graph loads all its programs."""
    spec, made = spec_called("26b-a4b-small"), {}
    for choice in ("plain", "fused", "early"):
        rows = TorchBackend().fused_rows(1, "cuda", {DECODE_STEP: choice})
        made[choice] = built_program(spec, dtype="bf16", gpu_rows=rows).graphs["decode"]
    assert TorchBackend().settings[DECODE_STEP].default == "plain"
    assert TorchBackend().fused_rows(1, "cpu", {DECODE_STEP: "early"}) == 0
    fused = {"qkv_attention", "q_attention", "norm_linear", "norm_router", "dual_norm_linear"}
    assert not {n.op for n in made["plain"].nodes} & fused
    assert {n.op for n in made["fused"].nodes} & fused and made["fused"] == made["early"]
    program = split_program(built_program(spec, dtype="bf16")).program
    (tmp_path / f"{0:024x}.pt2").write_bytes(b"")
    steps = phase_steps(program, LIMITS, "cuda")
    kept: dict[str, Any] = {
        phase: tuple("a" if isinstance(s, Segment) else None for s in many)
        for phase, many in steps.items()
    } | dict.fromkeys(choice_texts(program, LIMITS), ("a",))
    with pytest.raises(EngineError, match="no program 'a'"):  # its names are all that is expected
        _check_programs(cuda_task(program), steps, tmp_path, kept)


# --- the driver -------------------------------------------------------------------------------


def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    fields = {
        "CUlaunchConfig": "gridDimX blockDimX sharedMemBytes hStream attrs numAttrs",
        "CUlaunchAttribute": "id value.programmaticStreamSerializationAllowed",
    }
    wanted = [f"offsetof({s}, {f})" for s, names in fields.items() for f in names.split()]
    wanted += [f"sizeof({s})" for s in fields]
    wanted += ["CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"]
    lines = "".join(f'printf("%d\\n", (int)({w}));' for w in wanted)
    includes = "#include <cuda.h>\n#include <stdio.h>\n#include <stddef.h>\n"
    (tmp_path / "a.c").write_text(f"{includes}int main(void) {{ {lines} return 0; }}")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    program = tmp_path / "a"
    subprocess.run(["gcc", f"-I{headers}", f"{program}.c", "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    ours = [getattr(Config, name).offset for name, *_ in Config._fields_]
    ours += [Attribute.id.offset, Attribute.value.offset]
    ours += [ctypes.sizeof(Config), ctypes.sizeof(Attribute), EARLY]
    assert [int(n) for n in printed.split()] == ours


class Library:
    """What libcuda.so.1 has, with kernels as names."""

    def __init__(self, status: int = 0) -> None:
        self.said: list[Any] = []
        self.status = status

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        self.said.append(image)
        module._obj.value = len(self.said)
        return self.status

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 7 * module.value
        return 0

    def cuFuncSetAttribute(self, *words: Any) -> int:
        self.said.append((words[0].value, *words[1:]))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, given: Any, extra: None) -> int:
        c = config._obj
        values = [ctypes.c_uint32.from_address(given[i]).value for i in range(len(given))]
        early = [(a.id, a.value[0]) for a in c.attributes[: c.count]]
        self.said.append(([*c.grid], [*c.block], c.shared, c.stream, early, values))
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"no binary for this GPU"
        return 0


def test_what_the_driver_is_told() -> None:
    library = Library()
    driver = CudaDriver(library, stream=lambda: 99)
    function = driver.load(b"image", "_skinny", 60_000)
    assert library.said == [b"image", (7, 8, 60_000)]
    values = [ctypes.c_int32(5), ctypes.c_float(1.0)]
    for early in (True, False):
        driver.start(function, (3, 2, 1), 128, 60_000, values, early)
    first, second = library.said[2:]
    bits = 0x3F800000
    assert first == ([3, 2, 1], [128, 1, 1], 60_000, 99, [(EARLY, 1)], [5, bits, 0, 0])
    assert second == (*first[:4], [], first[5])
    with pytest.raises(EngineError, match="cuModuleLoadData returned 209, no binary"):
        CudaDriver(Library(209)).load(b"", "a", 0)


@pytest.mark.parametrize("other", [None, "no such driver"])
@pytest.mark.parametrize("fails", [False, True])
def test_chains_that_cannot_be_recorded(
    other: str | None,
    fails: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A step is recorded by its programs where its chains cannot be, on one rank or on all."""
    engine = object.__new__(runtime.TorchRuntime)
    engine.recorded_plans = {"decode": []}
    engine.group = cast(Any, SimpleNamespace(gathered=lambda said: [said, other]))
    work = list[int]().clear

    def record(work: Callable[[], None]) -> Callable[[], None]:
        if fails and engine.recorded_plans:
            raise EngineError("no such edges")
        return work

    monkeypatch.setattr(runtime, "recorded", record)
    assert engine._recorded(work) == work
    assert bool(engine.recorded_plans) == (other is None and not fails)
    said = ["no such edges"] * fails or [other] * (other is not None)
    assert all(f"which is slower: {text}" in caplog.text for text in said)
    monkeypatch.setattr(runtime, "recorded", Mock(side_effect=EngineError("no graph")))
    with pytest.raises(EngineError, match="no graph"):
        engine._recorded(work)


def test_steps_without_a_driver_run_by_their_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [s for s in steps_of("tiny-dense") if isinstance(s, Segment)]
    text, chain, cubins = a_chain()
    write_chain(tmp_path / "a.chain", text, chain, cubins)
    files = ["a.chain" if s.text == text else None for s in steps]
    plan = [runtime.BoundStep(lambda operands: (), (), (), ()) for _ in steps]
    driver = "g4ir.backends.experimental.kernel_graph.CudaDriver"
    monkeypatch.setattr(driver, lambda: CudaDriver(Library()))
    assert [a is b for a, b in zip(module.load_step(plan, steps, files, tmp_path), plan)] == [
        f is None for f in files
    ]
    monkeypatch.setattr(driver, lambda: CudaDriver(Library(209)))
    assert module.load_step(plan, steps, files, tmp_path) == plan
    assert "no binary for this GPU" in caplog.text
