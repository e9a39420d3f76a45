"""docs/extending.md: its examples are run, and what they add passes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import g4ir
from g4ir import backends, build_program, interpret, load_spec, parse_graph, passes, print_graph
from g4ir.backends.inductor import lower
from g4ir.backends.inductor.lowered import Lowering, lowered_by_op
from g4ir.ir.graph import Builder, Graph
from g4ir.ir.rewrite import bind
from g4ir.ops import OPS, Op, with_infer
from g4ir.ops.types import Type
from tests.spies import spy
from tests.test_docs import ROOT, blocks, read_spec
from tests.test_interpreted import run_pytest


def example(kind: str) -> str:
    """The block that begins with `# docs: KIND`."""
    every = [*blocks("extending.md", "python"), *blocks("extending.md", "yaml")]
    every += blocks("extending.md", "text")
    (found,) = [b for b in every if b.startswith(f"# docs: {kind}\n")]
    return found


def module(kind: str, name: str) -> ModuleType:
    """A module of the example's code; nobody else can import it."""
    made = ModuleType(name)
    exec(compile(example(kind), name, "exec"), made.__dict__)
    return made


def tree_with(folder: Path, files: dict[str, str]) -> None:
    """Copy this tree, and add files."""
    skip = shutil.ignore_patterns("__pycache__", ".*_cache")
    for name in ("g4ir", "passes", "backends", "specs", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "Makefile", "tools", "bench"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("passes", "backends", "specs"):
        (folder / "g4ir" / name).symlink_to(folder / name)
    for path, text in files.items():
        (folder / path).write_text(text)


@pytest.fixture
def softcap_op(monkeypatch: pytest.MonkeyPatch) -> Op:
    """The example's op, in the table while the test runs."""
    made = with_infer(module("op", "g4ir.ops.linear_softcap").linear_softcap)
    monkeypatch.setitem(OPS, made.name, made)
    return made


def one_node_graph(op: Op) -> Graph:
    """A graph of the op's first sample, whose inputs are x0, x1."""
    b, (s,) = Builder("one"), op.samples
    values = [b.input(f"x{i}", t) for i, t in enumerate(s.types())]
    return b.graph(b.emit(op.name, *values, **s.attrs))


def drawn(g: Graph, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {v.name: [int(d) for d in v.type.shape] for v in (*g.inputs, *g.params)}
    return {n: 9 * torch.randn(s, generator=random, dtype=dtype) for n, s in shapes.items()}


def defined(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What the example's op is in its sample, by hand."""
    return torch.tanh((x @ w.T) / 30.0) * 30.0


def test_the_example_of_an_op(softcap_op: Op) -> None:
    g = one_node_graph(softcap_op)
    assert parse_graph(print_graph(g)) == g
    assert g.outputs[0].type == Type("f32", (2, 3, 24))
    given = drawn(g, torch.float64)
    ((_, got),) = interpret(g, given, {}, {})[0].items()
    torch.testing.assert_close(got, defined(*given.values()), rtol=1e-13, atol=1e-13)
    with pytest.raises(ValueError, match="cap 0"):
        softcap_op.infer_types(softcap_op.samples[0].types(), {"cap": 0.0})


def test_the_example_of_a_lowering(softcap_op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    made = module("lowering linear_softcap", "lowering")
    calls: list[str] = []
    spy(monkeypatch, made, "lower_linear_softcap", lambda n, *_: calls.append(n.op))
    table = {**lower.COMMON, softcap_op.name: Lowering(made.lower_linear_softcap)}
    g = one_node_graph(softcap_op)
    given = drawn(g).values()
    (out,) = lower.SegmentModule(lowered_by_op(g, table))(*given)  # as the backend traces it
    torch.testing.assert_close(out, defined(*given))
    assert calls == [softcap_op.name]


#: tests of every kernel: its samples, whether nodes become it, and what it makes of a step
OF_KERNELS = "softcap or every_kernel_is_used or every_step and tiny-dense-off-decode-ragged"


def test_the_example_of_a_kernel(tmp_path: Path) -> None:
    """Its two files, and its samples, are all."""
    folder, tests = "backends/cuda/kernels", "tests/interpreted"
    files = {f"{folder}/{n}.py": example(f"kernel {n}") for n in ("softcap", "softcap_triton")}
    files[f"{tests}/cases/softcap.py"] = example("samples of kernel softcap")
    tree_with(tmp_path, files)
    words = [*(f"{tests}/test_{n}.py" for n in ("samples", "lowering")), "--full", "-k", OF_KERNELS]
    run_pytest(tmp_path, *words, TRITON_INTERPRET="1", PYTHONPATH=str(tmp_path))


@pytest.fixture
def softcap_pass(softcap_op: Op, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's pass at the end of the pipeline while the test runs."""
    made = module("pass fuse_softcap", "g4ir.passes.fuse_softcap")
    modules = passes._ordered({**passes._BY_NAME, "fuse_softcap": made})
    monkeypatch.setattr(passes, "_BY_NAME", modules)
    monkeypatch.setattr(passes, "PASSES", tuple(modules))
    return made


def test_the_example_of_a_pass(softcap_pass: ModuleType) -> None:
    """It takes the end of every graph of the text model, changes no result, and is held to what it
    must leave."""
    plain = build_program(load_spec("tiny-dense"))
    texts = {name: g for name, g in plain.graphs.items() if name != "embed"}
    notes: list[tuple[str, str, str]] = []
    for g in texts.values():
        out = passes.run_passes(g, note=lambda *told: notes.append(told))
        assert [n.op for n in out.find("softcap", "linear_softcap")] == ["linear_softcap"]
        assert passes.find_pass("fuse_softcap")(out) == out
    told = [n[2] for n in notes if n[0] == "fuse_softcap"]
    assert len(told) == len(texts) and all(x.startswith("fused with %") for x in told)
    g = bind(parse_graph(example("golden fuse_softcap")), B=2)
    given = drawn(g, torch.float64)
    out = passes.find_pass("fuse_softcap")(g)
    got, want = (interpret(x, given, given, {})[0]["logits"] for x in (out, g))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    left = parse_graph(example("golden fuse_softcap.refuse"))
    assert passes.find_pass("fuse_softcap")(left) == left


def test_the_example_of_a_variant(tmp_path: Path) -> None:
    """It is what it says, and runs."""
    spec = read_spec(tmp_path, example("variant"))
    assert spec.name == "tiny-narrow" and spec.text.moe and spec.text.moe.num_experts == 4
    assert spec.text.layer_types == ("sliding", "full") * 2
    limits = {"max_seq": 32, "prefill_chunk": 8}
    with g4ir.build(
        spec, tmp_path / "engine", random_weights=0, backend="reference", **limits
    ) as engine:
        assert len(engine.generate([2, 5, 7], max_new_tokens=4)) == 4


def test_the_example_of_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of it gives the interpreter's tokens, and it has counted its steps."""
    made = module("backend counting", "g4ir.backends.counting")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setitem(backends.BACKENDS, "counting", made.__name__)
    tokens = {}
    for name in ("reference", "counting"):
        with g4ir.build(
            "tiny-dense",
            tmp_path / name,
            random_weights=0,
            backend=name,
            max_seq=32,
            prefill_chunk=2,
        ) as engine:
            tokens[name] = engine.generate([2, 5, 7], max_new_tokens=4)
    assert tokens["counting"] == tokens["reference"]
    assert made.STEPS == {"prefill": 1, "decode": 4}  # a chunk of one token is a decode step
