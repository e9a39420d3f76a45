"""How many kernels a decode step starts on a GPU: in programs compiled without one.

Torch's compiler lowers each program for a device of which only the properties are there, and what
its wrapper starts is counted; nothing is compiled further. So a fusion that is lost shows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch._inductor import compile_fx as inductor
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget

from g4ir.backends.inductor.compile import exported, options_of
from g4ir.backends.inductor.programs import phase_steps
from g4ir.backends.inductor.segment import Segment
from g4ir.backends.inductor.target import Target
from g4ir.plan.engine_limits import Limits
from tests.cases import TABLES
from tests.test_kernel_ops import brackets_without_a_device, program

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
    steps = phase_steps(program(name), Limits(max_batch=1), embeds=True)[phase]
    return Counter(s.text for s in steps if isinstance(s, Segment))


def test_kernels_of_a_layer(device_of_properties: None) -> None:
    """Norms with rope are one kernel and cache writes another; each norm at the end of a block is
    one, whatever it adds; nothing is copied."""
    layer = next(t for t in programs_of("tiny-moe") if "moe_mlp" in t and "qkv_write" in t)
    ours = {"_skinny": 2, "_decode": 1, "_route": 1, "_gate_up": 1, "_down": 1}
    assert kernels_of(layer) == {**ours, "compiler": 4}


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
