"""Step programs: every instruction against the op that it stands for. Whole steps are those of the
contract (tests/contract/test_torch.py)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.backends.cpu import pyops
from g4ir.backends.cpu.arena import Arena
from g4ir.backends.cpu.step_loop import Embedding
from g4ir.backends.cpu.step_program import LOWERINGS, record_step, step_phases
from g4ir.backends.inductor.backend import BACKEND
from g4ir.engine.inputs import row_prompt
from g4ir.engine.parts import embed_rows
from g4ir.engine.session import Session
from g4ir.ir.graph import Builder, Graph, Node, Program
from g4ir.ir.interpret import run_node
from g4ir.model.decoder import BLOCKS
from g4ir.ops import OPS
from g4ir.ops.base import Sample
from g4ir.ops.codecs import FORMATS
from g4ir.ops.kv_quant import to_comparable
from g4ir.ops.types import FLOATS, Type, torch_dtype
from g4ir.plan.engine_limits import Limits
from g4ir.spec.record import load_spec
from g4ir.weights.pack import split_program
from tests.configs import VARIANTS
from tests.engines import some_tokens
from tests.runner import built_program

CASES = [(name, i) for name, op in OPS.items() for i in range(len(op.samples))]
#: those that stay in fp32 whatever the model's dtype is: weights of experts
FP32 = {("experts", 1)}
#: weights that stay codes until a product takes them
WEIGHTS = {"dequantize", "dequantize_tiles", "dense", "fake_quantize"}
#: fused ops that are recorded by their parts, and views
EXPANDED = {
    *("norm_rope", "norm_residual", "linear_glu", "glu_packed"),
    *("qkv_write", "moe_mlp", "heads", "merge_heads", "split", "unstack_layers"),
}
#: samples that torch's ops compute: attention with a softcap, experts of one rank, latent
#: caches, tensors that are no rows
SEGMENTS = {("attention", 2), ("experts", 2), ("moe_mlp", 2), ("qkv_write", 3), ("concat", 0)}
RECORDED = [
    c for c in CASES if c[0] in (LOWERINGS.keys() | EXPANDED) - WEIGHTS and c not in SEGMENTS
]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    pyops.load_kernels()


def graph_of(name: str, s: Sample, dtype: str) -> Graph:
    """A graph of one op, whose inputs are x0, x1, ...; those that it updates are caches."""
    b = Builder("decode")
    updated = {i for _, i in OPS[name].updates}
    values = []
    for i, t in enumerate(s.types()):
        kept = t.dtype != "f32" or (name, i) in FP32
        t = t if kept else Type(dtype, t.shape)
        values.append(b.cache(f"x{i}", t) if i in updated else b.input(f"x{i}", t))
    made = b.emit_all(name, *values, **s.attrs)
    n = b.nodes[-1]
    b.next = {old.name: new for old, new in OPS[name].updated(n.inputs, n.outputs)}
    return b.graph(*made)


def drawn(g: Graph, s: Sample) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    out = {}
    for i, v in enumerate(g.nodes[0].inputs):
        shape, dtype = [int(d) for d in v.type.shape], torch_dtype(v.type.dtype)
        if i in s.ints:
            ints = torch.randint(*s.ints[i], shape, generator=random)
            bytes_of_blocks = v.type.dtype in FORMATS
            out[v.name] = ints.to(torch.uint8).view(dtype) if bytes_of_blocks else ints.to(dtype)
        elif v.type.dtype in (*FLOATS, "f8e4m3"):
            out[v.name] = torch.randn(shape, generator=random).to(dtype)
        else:
            out[v.name] = torch.randint(1, 100, shape, generator=random).to(dtype)
    return out


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error, relative to the value or to the rms of its row."""
    a, b = to_comparable(got).double(), to_comparable(want).double()
    scale = torch.maximum(b.abs(), b.square().mean(-1, keepdim=True).sqrt()).clamp(min=1e-30)
    return float(((a - b).abs() / scale).max())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", RECORDED, ids=lambda c: f"{c[0]}-{c[1]}")
def test_an_instruction_is_its_op(case: tuple[str, int], dtype: str) -> None:
    name, at = case
    s = OPS[name].samples[at]
    g = graph_of(name, s, dtype)
    given = drawn(g, s)
    caches = {v.name: given[v.name].clone() for v in g.state}
    feeds = {v.name: given[v.name] for v in g.inputs}
    program = record_step(g, {}, caches, feeds, Arena("cpu"))
    made = program.run(feeds)
    # A row that is nearly between two codes may become either.
    wide = dtype == "f32" and all(v.type.dtype not in ("i8", "f8e4m3") for v in g.state)
    wants = [expected(g.nodes[0], given, exact) for exact in {wide, wide or name == "attention"}]
    for i, v in enumerate(g.nodes[0].outputs):
        got, budget = made[v.name], OPS[name].budget.at(dtype)
        assert got.dtype == torch_dtype(v.type.dtype)
        if got.dtype == torch.int64:
            assert torch.equal(got, wants[0][i])
        else:
            assert min(distance(got, want[i]) for want in wants) <= budget


def expected(n: Node, given: dict[str, torch.Tensor], exact: bool) -> tuple[torch.Tensor, ...]:
    """What the reference makes of a node's operands, or of these in float64."""
    operands = [given[v.name].clone() for v in n.inputs]
    floats = (torch.float32, torch.bfloat16)
    return run_node(n, [t.double() if exact and t.dtype in floats else t for t in operands])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["rms_norm", "softcap", "glu", "rope", "linear", "attention"])
def test_what_is_no_number_is_not_swallowed(name: str, bad: float) -> None:
    """NaN stays NaN; infinity ends in no number that looks right, but for what is bounded."""
    at = next(i for n, i in RECORDED if n == name)
    g = graph_of(name, OPS[name].samples[at], "bf16")
    given = drawn(g, OPS[name].samples[at])
    given["x0"].view(-1)[0] = bad
    feeds = {v.name: given[v.name] for v in g.inputs}
    caches = {v.name: given[v.name] for v in g.state}
    made = record_step(g, {}, caches, feeds, Arena("cpu")).run(feeds)
    got = made[g.outputs[0].name].flatten()
    if bad != bad or name != "softcap":
        assert not got.isfinite().all()


def test_a_step_whose_logits_nobody_reads(engines: Any) -> None:
    """Returns none: with logits the scheduler would take the prompt for read."""
    session = engines("torch", "tiny-moe").session()
    prompt = row_prompt(session.engine, [2, 5, 7, 9, 4])
    for piece in (prompt.piece(0, 3), prompt.piece(3, 4)):
        assert session.prefill_piece(prompt, piece) is None


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["tiny-ple", "tiny-moe"])
def test_a_chunk_of_any_length(tmp_path: Path, name: str, rows: int) -> None:
    """Is bit by bit what is recorded for its length, past a window too, and rows that end early
    are; a watch sees every value of it."""
    limits = {"max_batch": rows, "max_seq": 64, "prefill_chunk": 32}
    engine = g4ir.build(name, tmp_path / "e", random_weights=0, dtype="bfloat16", **limits)
    for length in (2, 4, 7, 16, 31):
        tokens, lengths = some_tokens(rows, length), [length, 1, length // 2][:rows]
        made = []
        for watch in (None, lambda name, value: None):
            session = engine.session(rows)
            session.prefill(some_tokens(rows, 9), [9] * rows)
            feeds = engine.embed_tokens(tokens) | {
                "positions": torch.arange(9, 9 + length).expand(rows, -1).contiguous(),
                "lengths": torch.tensor(lengths),
            }
            outputs = engine.runtime.run("prefill", feeds, session.state, 9 + length, True, watch)
            made.append([outputs["logits"], *held(session).values()])
        assert all(map(torch.equal, *made)), length


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"dtype": "float32"}])
@pytest.mark.parametrize("name", ["tiny-ple", "tiny-moe"])
def test_cuts_change_no_prompt(tmp_path: Path, name: str, options: dict[str, str]) -> None:
    """Bit by bit, logits and caches: chunks follow measured time, and texts do not."""
    limits = {"max_seq": 256, "prefill_chunk": 128}
    given = {"random_weights": 0, "dtype": "bfloat16"} | options
    engine = g4ir.build(name, tmp_path / "e", **given, **limits)
    tokens, found = some_tokens(1, 120), []
    for cuts in ((120,), (60, 60), (16, 104), (7, 9, 30, 2, 72), (2,) * 60):
        session = engine.session()
        for part in tokens.split(cuts, 1):
            logits = session.prefill(part)
        found.append([logits, *held(session, 256).values()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("name", ["tiny-ple", "tiny-moe"])
def test_a_verification_is_single_steps(tmp_path: Path, name: str) -> None:
    """Bit by bit, also past a window and in pieces: draft tokens never change a text."""
    limits = {"max_batch": 3, "max_seq": 64, "prefill_chunk": 16, "draft_tokens": 10}
    options = {"backend": "torch", "random_weights": 0, "dtype": "bfloat16"}
    with g4ir.build(name, tmp_path / "e", **options, **limits) as engine:
        for rows, widths in ((1, (2, 3, 5, 8, 11)), (3, (2, 11))):
            tokens, session = some_tokens(rows, 32), engine.session(rows)
            session.prefill(tokens[:, :21])
            drafts, counts = tokens[:, 21:], torch.tensor([11, 0, 5])[:rows]
            steps = [session.verify(drafts[:, i : i + 1], (counts > i).long()) for i in range(11)]
            want, caches = torch.cat(steps, 1), held(session)
            for width in widths:
                session.truncate(21)
                few = counts.clamp(max=width)
                got = session.verify(drafts[:, :width], few)
                for row, count in enumerate(few.tolist()):
                    assert torch.equal(got[row, :count], want[row, :count])
            assert all(torch.equal(t, caches[n]) for n, t in held(session).items())
            # one memory for steps of all widths, one for chunks
            assert session.state.captured.keys(Arena) == {"", ("prefill", 16)}


def held(session: Session, context: int = 64) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in session.state.views(context).items()}


RECIPES = ("none", "int8", "int4", "fp8")


@pytest.mark.covering
@pytest.mark.parametrize("quant", RECIPES)
@pytest.mark.parametrize("name", (*VARIANTS, "gemma3-1b"))
def test_steps_and_chunks_are_recorded(name: str, quant: str) -> None:
    """Chunks, and steps of many rows."""
    program = stored(name, quant)
    media = (BLOCKS,) if BLOCKS in program.graphs else ()
    for rows in (1, 9):
        assert step_phases(program, Limits(max_batch=rows)) == ("decode", "prefill", *media)


@pytest.mark.parametrize("quant", RECIPES)
def test_embedding_of_a_few_tokens(quant: str) -> None:
    """What torch's ops make, from several threads at once; the host embeds more."""
    program = stored("tiny-ple", quant)
    graph, random, tables = program.graphs["embed"], torch.Generator().manual_seed(3), {}
    for v in graph.params:
        numbers = 100 * torch.rand([int(d) for d in v.type.shape], generator=random)
        tables[v.name] = numbers.to(torch_dtype(v.type.dtype))
    embed = Embedding(program, tables)

    def same(tokens: torch.Tensor) -> bool:
        got, want = embed(tokens), embed_rows(graph, tables, tokens)
        return got is not None and all(torch.equal(t, got[name]) for name, t in want.items())

    with ThreadPoolExecutor(4) as pool:
        given = [some_tokens(rows, count) for rows, count in ((1, 1), (2, 3), (8, 1), (1, 8))]
        assert all(pool.map(same, given * 8))
    others = ([[graph.params[0].type.shape[0]]], [[3, -1]], [[]])
    assert embed(some_tokens(3, 3)) is None
    assert all(embed(torch.tensor(ids, dtype=torch.int64)) is None for ids in others)


def stored(name: str, quant: str) -> Program:
    """The program of an engine as the CPU takes it."""
    built = built_program(load_spec(name), dtype="bf16", quant=quant)
    return split_program(BACKEND.stored(built, "cpu")).program
