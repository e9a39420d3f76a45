"""The kernels as torch sees them: their ops keep torch's rules, whole steps of a model export for
a GPU that is not there, and every kernel compiles for Hopper within what a block has.

How many kernels a decode step starts: torch's compiler lowers each program for a device of which
only the properties are there, and what its wrapper starts is counted; nothing is compiled further.
So a fusion that is lost shows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import triton
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.codegen.common import SizeArg
from torch._inductor.codegen.triton_utils import signature_of
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget

from bench.gpu.kernel_cases import Case, all_cases, find_cases, launches_of_case, operands, run_case
from g4ir.backends.cuda.kernels import KERNELS
from g4ir.backends.cuda.kernels.base import Kernel
from g4ir.backends.cuda.kernels.launch import Launch, recorded, start
from g4ir.backends.cuda.schedule import schedule
from g4ir.backends.inductor.compile import _TRACE as TRACE
from g4ir.backends.inductor.compile import INDUCTOR, exported, options_of
from g4ir.backends.inductor.programs import phase_steps
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Builder, Program
from g4ir.ops import OPS
from g4ir.ops.codecs import FORMATS
from g4ir.ops.types import Type
from g4ir.plan.engine_limits import Limits
from g4ir.weights.pack import split_program
from tests.cases import TABLES
from tests.configs import VARIANTS, short, spec_called
from tests.hopper import SHARED, SHARED_BYTES, Resources, resources
from tests.interpreted.samples import Try, budget_of
from tests.runner import built_program

MODELS = (("tiny-moe", "off"), ("tiny-ple", "off"), ("31b-small", "value"))
ROWS = (1, 3, 8)


#: names of models with weights in fewer bits
CODED = ("tiny-moe+int4", "tiny-ple+int8", "tiny-dense+fp8")


@cache
def program(name: str, form: str = "off") -> Program:
    """The program of a model; behind a + its recipe of weights in fewer bits, behind an @ what
    caches hold."""
    model, _, held = name.partition("@")
    model, _, quant = model.partition("+")
    how = {"latent_kv": form, "dtype": "bf16", "quant": quant}
    how["narrow_kv"] = held or "off"
    return split_program(built_program(spec_called(model), **how)).program


def tiny_cases(rows: int, models: tuple[tuple[str, str], ...] = MODELS) -> list[Case]:
    """Every kernel that the tiny models use, once."""
    found: dict[str, Case] = {}
    for name, form in models:
        for phase in ("decode", "prefill"):
            target = Target("cpu", "h200", rows)
            for case in find_cases(program(name, form), phase, target, 24, chunk=5):
                found.setdefault("+".join(case.choice.uses), case)
    return list(found.values())


# --- ops --------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Keeps the calls of our ops, with copies of what they may change."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "g4ir":
            self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


#: what `opcheck` looks at; differentiating, its slowest part by far, is nothing that engines do
RULES = ("test_schema", "test_faketensor")


def test_ops_keep_the_rules() -> None:
    """Schemas and fake tensors of every kernel's op, on its reference."""
    checked = set()
    coded = tuple((name, "off") for name in CODED[:2])
    for case in (*tiny_cases(1), *tiny_cases(8), *tiny_cases(1, coded)):
        with Calls() as calls:
            run_case(case, operands(case, "cpu"))
        for op, args, kwargs in calls.seen:
            held = op, any(isinstance(a, torch.Tensor) and a.element_size() == 1 for a in args)
            if held not in checked:
                torch.library.opcheck(op, args, kwargs, test_utils=RULES)
                checked.add(held)
    expected = {"moe_gate_up", *("decode_attention", "moe_route"), "skinny_linear", "moe_down"}
    names = {(op._schema.name.removeprefix("g4ir::"), coded) for op, coded in checked}
    assert {(name, False) for name in expected} <= names
    takers = {*("skinny_linear", "moe_gate_up", "moe_down")}
    assert {(name, True) for name in takers} <= names


def test_what_an_op_writes_is_always_given() -> None:
    """Torch 2.11 looks for it among what was given, without what was left to a default."""
    for case in (*tiny_cases(1), *tiny_cases(8)):
        run_case(case, operands(case, "cpu"))  # which defines the ops
    made = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("g4ir::")]
    written = {
        (s.name, a.name): a.has_default_value()
        for s in made
        for a in s.arguments
        if a.alias_info and a.alias_info.is_write
    }
    assert written and not any(written.values()), written


# --- export -----------------------------------------------------------------------------------


@pytest.fixture
def brackets_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without CUDA asks for the device in some methods: the same by their ops."""

    def get(x: torch.Tensor, index: Any) -> torch.Tensor:
        parts = list(index) if isinstance(index, tuple) else [index]
        used = sum(p is not None and p is not Ellipsis for p in parts)
        at = parts.index(Ellipsis) if any(p is Ellipsis for p in parts) else len(parts)
        parts[at : at + 1] = [slice(None)] * (x.dim() - used)
        tensors: list[torch.Tensor | None] = []
        for part in parts:
            axis = len(tensors)
            if part is None:
                x = x.unsqueeze(axis)
            elif isinstance(part, slice):
                x = torch.ops.aten.slice.Tensor(x, axis, part.start, part.stop, part.step or 1)
            elif isinstance(part, int):
                x = x.select(axis, part)
                continue
            tensors.append(part if isinstance(part, torch.Tensor) else None)
        if any(t is not None for t in tensors):
            x = torch.ops.aten.index.Tensor(x, tensors)
        return x

    def put(x: torch.Tensor, index: Any, value: float) -> None:
        torch.ops.aten.fill_.Scalar(get(x, index), value)

    monkeypatch.setattr(torch.Tensor, "__getitem__", get)
    monkeypatch.setattr(torch.Tensor, "__setitem__", put)
    for name in ("copy_", "contiguous"):
        op = getattr(torch.ops.aten, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *args, op=op: op(*args))


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.full), 8])
@pytest.mark.parametrize(
    ("name", "form"),
    [*short(of=MODELS), *short((CODED[0], "off"), of=[(name, "off") for name in CODED])],
)
def test_gpu_steps_export(brackets_without_a_device: None, name: str, form: str, rows: int) -> None:
    """Whole decode and prefill steps, dynamic sizes and all; kernels appear as themselves."""
    p = program(name, form)
    limits, target = Limits(max_batch=rows), Target("cuda", "h200", rows)
    steps = phase_steps(p, limits)
    texts = {s.text for many in steps.values() for s in many if s.text}
    called = set()
    for text in sorted(texts):
        with FakeTensorMode():
            graph = exported(text, target).graph
        called |= {str(n.target).split(".")[1] for n in graph.nodes if "g4ir" in str(n.target)}
    assert {"skinny_linear", "decode_attention"} <= called


WRITES = TABLES["graphs"]["chunk"]


@pytest.mark.parametrize("slots", [1024, "C"], ids=["ring", "list"])
def test_written_slots_of_a_chunk(brackets_without_a_device: None, slots: int | str) -> None:
    """By one op, and nothing that is made on the way is as long as the cache."""
    with FakeTensorMode():
        graph = exported(WRITES.format(slots=slots), Target("cuda", "h200", 8)).graph
    *_, cache = (n for n in graph.nodes if n.op == "placeholder")
    made = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    (write,) = (n for n in made if n.op == "call_function" and n.target._schema.is_mutable)
    assert write.target is torch.ops.aten.index_put_.default and write.args[0] is cache
    assert length(write.args[2]) == TRACE["S"]
    long = {n.name for n in made if length(n) == length(cache) and not is_view(n)}
    assert long == {cache.name, write.name}


def is_view(n: Any) -> bool:
    return n.op == "call_function" and n.target.is_view


def length(n: Any) -> int:
    """The first size of what a node makes, of the sizes at which it was traced."""
    size = n.meta["val"].shape[0]
    return size if isinstance(size, int) else int(size.node.hint)


def type_of_number(number: float) -> str:
    """The type that Inductor gives a kernel's operand of this value on CUDA."""
    arg = SizeArg("x", sympy.Float(number))
    with V.set_graph_handler(SimpleNamespace(current_device=torch.device("cuda"))):
        return str(signature_of(arg, size_dtype=None))


def test_a_launch_names_every_parameter() -> None:
    kernel = SimpleNamespace(arg_names=["x", "n", "BLOCK"])
    with recorded() as launches:
        start(kernel, (1,), (7, 3), BLOCK=16)
        for operands in ((7,), (7, 3, 5)):
            with pytest.raises(ValueError, match="zip"):
                start(kernel, (1,), operands, BLOCK=16)
    assert launches == [(kernel, (1,), {"x": 7, "n": 3}, {"BLOCK": 16})]


def test_numbers_reach_kernels_as_fp32() -> None:
    """Without the options of the build they are fp64, and no product of a kernel compiles."""
    launches = [x for case in tiny_cases(1) for x in launches_of_case(case)]
    numbers = {a for _, _, given, _ in launches for a in given.values() if isinstance(a, float)}
    assert len(numbers) > 2
    with inductor_config.patch(INDUCTOR):
        assert {type_of_number(a) for a in numbers} == {"fp32"}
    assert {type_of_number(a) for a in numbers} == {"fp64"}


# --- Hopper -----------------------------------------------------------------------------------


def latent(name: str) -> bool:
    return "+" not in name and bool(spec_called(name.partition("@")[0]).text.full.k_eq_v)


def real_cases(variants: tuple[str, ...], rows: tuple[int, ...]) -> Iterator[Case]:
    """Every kernel of the variants at their sizes, for decode over 4096 tokens."""
    for n in rows:
        programs = (
            program(name, form)
            for name in variants
            for form in (("off", "value") if latent(name) else ("off",))
        )
        yield from all_cases(programs, [Target("cuda", "h200", n)], 4096, chunk=1024)


#: kernel and constants -> what its compiled form takes, for all tests
RESOURCES: dict[str, Resources] = {}


def operand_types(launch: Launch) -> list[Any]:
    values = launch[2].values()
    return [a.dtype if isinstance(a, torch.Tensor) else (type(a), a == 1) for a in values]


def compiled(cases: Iterator[Case]) -> list[Resources]:
    """Each kernel with each set of constants once."""
    done: dict[str, Resources] = {}
    for case in cases:
        for launch in launches_of_case(case):
            key = f"{launch[0].__name__} {launch[3]} {operand_types(launch)}"
            if key not in done:
                done[key] = RESOURCES[key] = RESOURCES.get(key) or resources(launch)
    return list(done.values())


def check(found: list[Resources]) -> None:
    for r in found:
        assert r.spill_bytes <= 8, r  # ptxas moves two registers out of a loop of 8 steps
        assert r.shared_bytes <= SHARED_BYTES, r
        if "attention" in r.kernel or "attend" in r.kernel:
            assert r.tensor_cores and r.wide_loads, r


PRODUCTS = ("_skinny", "_gate_up", "_down")


@pytest.mark.parametrize("quant", short("@f8e4m3", of=("", "+int4", "@i8", "@f8e4m3")))
def test_kernels_fit_hopper(quant: str) -> None:
    """However few bits a weight or a row of a cache has, it is read in whole lines."""
    cases = list(real_cases((f"26b-a4b{quant}",), (1,)))
    if quant.startswith("@"):
        last = (c.graph.nodes[-1] for c in cases)
        over = [n.op in ("attention", "attention_latent") and not n.chunk for n in last]
        cases = [c for c, reads in zip(cases, over, strict=True) if reads]
    found = compiled(iter(cases))
    check(found)
    kernels = ("_decode",) if quant.startswith("@") else PRODUCTS
    assert {r.kernel for r in found if r.wide_loads} >= {*kernels}
    assert all(r.wide_loads for r in found if r.kernel in kernels)


def sample_launches(kernel: Kernel) -> list[Launch]:
    """Return what a kernel starts on one of its samples."""
    one = Try(kernel, budget_of(kernel).samples[0], "bf16")
    with recorded() as launches:
        kernel.call(*one.arguments(), *one.ours)
    return launches


def test_each_kernel_compiles_for_hopper() -> None:
    """Once for codes and once for bf16, with the constants of a layer of 26b-a4b, or of its
    first sample if such a layer has none; with the constants of every step: at length, above."""
    cases = [*real_cases(("26b-a4b+int4",), (1, 8)), *real_cases(("26b-a4b",), (1,))]
    every = [launch for case in cases for launch in launches_of_case(case)]
    done = {case.graph.nodes[-1].op for case in cases}
    every += [x for k in KERNELS if k.op not in done for x in sample_launches(k)]
    launches = {(x[0].__name__, torch.uint8 in operand_types(x)): x for x in every}
    found = {key: resources(launch) for key, launch in launches.items()}
    check([*found.values()])
    assert len({name for name, _ in found}) == 6
    assert all(found[name, True].wide_loads for name in PRODUCTS)
    for started, _, given, _ in launches.values():
        assert [p.name for p in started.params if not p.is_constexpr] == [*given]
        assert len(given) <= 16


FORMS = [f for f in FORMATS if FORMATS[f].block_values > 1]


@pytest.mark.parametrize(
    ("form", "capability"),
    [
        *(("uint4", capability) for capability in (80, 89, 120)),
        *(pytest.param(f, c, marks=pytest.mark.full) for f in FORMS for c in SHARED),
    ],
)
def test_every_format_on_every_gpu(form: str, capability: int) -> None:
    """Products of one and many rows, in the settings of such a GPU."""
    gpu = {90: "h100"}.get(capability, f"sm_{capability}")
    types = OPS["quantize"].infer(Type("f32", (4096, 4096)), form=form, group=256, scale="bf16")
    for rows in (1, 64):
        b = Builder()
        parts = [b.param(f"w.{i}", t) for i, t in enumerate(types)]
        w = b.emit("dequantize", *parts, to="bf16", name="w")
        y = b.emit("linear", b.input("x", Type("bf16", (rows, 1, 4096))), w, name="y")
        g = b.graph(y)
        s = schedule(g, Target("cpu", gpu, rows))
        choice = s.find(g.nodes[-1])
        assert choice and choice.name == "skinny_linear"
        with recorded() as launches:
            case = Case(choice, s, rows)
            run_case(case, operands(case, "meta"))
        for launch in launches:
            used = resources(launch, capability)
            assert used.spill_bytes == 0 and used.shared_bytes <= SHARED[capability], used


@pytest.mark.full
@pytest.mark.parametrize("quant", ["", "+int8", "+int4", "+fp8", "@i8", "@f8e4m3"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_kernel_fits_hopper(name: str, quant: str) -> None:
    check(compiled(real_cases((name + quant,), (*ROWS, 16, 32, 64))))


__all__ = ["brackets_without_a_device"]

H200 = SimpleNamespace(**TABLES["properties of an H200"])
#: of the compiler: what would run on the device is left out
WITHOUT_A_DEVICE = {"joint_graph_constant_folding": False, "force_disable_caches": True}


class Lowered(BaseException):
    """Ends a compilation with the text of its wrapper."""


@pytest.fixture
def device_of_properties(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch's compiler asks of a device; not what it was told without one."""
    has_triton.cache_clear()
    answers: dict[str, Any] = {
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "_lazy_init": None,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "_get_device_properties": H200,
        "get_device_properties": H200,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "is_available": True,
        "set_rng_state": None,
        "synchronize": None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer, raising=False)
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver, raising=False)
    monkeypatch.setattr(joint_graph, "lazy_init", lambda *_: None)  # patterns that it traces there
    yield
    has_triton.cache_clear()


def wrapper_of(program: Any, options: dict[str, Any]) -> str:
    """What would start a program's kernels, in Python."""
    inner = {"cpp_wrapper": False, "triton.autotune_at_compile_time": False}

    def lower(graph: GraphLowering) -> None:
        raise Lowered(graph.codegen()[0].value)

    def compile_inner(gm: Any, args: Any, **given: Any) -> Any:
        given |= {"cpp_wrapper": False, "aot_mode": False}
        with torch._inductor.config.patch(inner), V.set_aot_compilation(False):
            return inductor.compile_fx_inner(gm, args, **given)

    context = torch._guards.CompileContext(None)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), V.set_aot_compilation(True):
        patch.setattr(GraphLowering, "compile_to_module", lower)
        with pytest.raises(Lowered) as found, torch._guards.compile_context(context):
            module, args = program.module(check_guards=False), list(program.example_inputs[0])
            inductor.compile_fx(module, args, compile_inner, options)
    return str(found.value)


def starts(wrapper: str) -> Counter[str]:
    """Kernels that are started: of ours by name, of the compiler, of a library."""
    found: Counter[str] = Counter()
    for line in wrapper[wrapper.index("def call(") :].splitlines():
        if started := re.search(r"\b(\w+)\.run\(", line.partition("#")[0]):
            name = re.sub(r"_\d+$", "", started[1])
            found["compiler" if name.startswith("triton_") else name] += 1
        found["library"] += bool(re.match(r" *[^#]*(extern_kernels\.|torch\.ops\.|copy_\()", line))
    return +found


def kernels_of(text: str) -> Counter[str]:
    """Kernels that a program starts."""
    target = Target("cuda", "h200", 1)
    options = options_of(target) | WITHOUT_A_DEVICE | {"cpp_wrapper": True}
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        brackets_without_a_device._get_wrapped_function()(patch)
        exporting = exported(text, target)
    return starts(wrapper_of(exporting, options))


def programs_of(name: str, phase: str = "decode") -> Counter[str]:
    """Texts of the programs of a step of one row, and how often each is called."""
    steps = phase_steps(program(name), Limits(max_batch=1))[phase]
    return Counter(s.text for s in steps if s.text)


def test_kernels_of_a_layer(device_of_properties: None) -> None:
    """Norms with rope are one kernel and cache writes another; each norm at the end of a block is
    one, whatever it adds; nothing is copied."""
    layer = next(t for t in programs_of("tiny-moe") if "moe_mlp" in t and "qkv_write" in t)
    ours = {"_skinny": 2, "_decode": 1, "_route": 1, "_gate_up": 1, "_down": 1}
    assert kernels_of(layer) == {**ours, "compiler": 4}


@pytest.mark.full
def test_kernels_of_quantised_layers(
    device_of_properties: None, brackets_without_a_device: None, tmp_path: Path
) -> None:
    """As many as of others, whatever the formats; one gathers rows of a table. A prompt's weights
    are dequantised by one each, a layer at a time."""
    recipe = tmp_path / "mix.yaml"
    recipe.write_text(TABLES["rules of a mix"])
    name = f"tiny-moe+{recipe}"
    layer = next(t for t in programs_of(name) if "moe_mlp" in t and "qkv_write" in t)
    ours = {"_skinny": 2, "_decode": 1, "_route": 1, "_gate_up": 1, "_down": 1}
    assert kernels_of(layer) == {**ours, "compiler": 4}
    (table,) = programs_of(name, "embed")
    assert kernels_of(table) == {"_rows": 1}
    prompt = next(t for t in programs_of(name, "prefill") if "moe_mlp" in t)
    with FakeTensorMode():
        nodes = exported(prompt, Target("cuda", "h200", 1)).graph.nodes
    dequantized = sum("dequantized_rows" in str(n.target) for n in nodes)
    assert dequantized == prompt.count(" = dequantize(")


@pytest.mark.full
@pytest.mark.parametrize(("name", "whole"), [("e2b", 406), ("26b-a4b", 304)])
def test_kernels_of_a_step(name: str, whole: int, device_of_properties: None) -> None:
    """Without the choice of its token."""
    programs = programs_of(name).items()
    assert sum(calls * kernels_of(text).total() for text, calls in programs) == whole
