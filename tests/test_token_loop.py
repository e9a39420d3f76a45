"""Recorded decode steps that choose their own tokens, against the host that chooses. Run here
without a CUDA graph, on the CPU's compiled programs, with everything else as on a GPU.

Step programs: every instruction against the op that it stands for. Whole steps are those of the
contract (tests/contract/test_torch.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import g4ir
from g4ir import Engine, Session, load_spec
from g4ir.backends.base import GraphRun
from g4ir.backends.cpu import pyops, runtime
from g4ir.backends.cpu.arena import Arena
from g4ir.backends.cpu.step_loop import Embedding, LoopProgram, StepLoop
from g4ir.backends.cpu.step_program import LOWERINGS, _recorded, record_step
from g4ir.backends.cuda.schedule import any_length, schedule
from g4ir.backends.cuda.token_loop import TokenLoop
from g4ir.backends.inductor.backend import BACKEND
from g4ir.backends.inductor.target import Target
from g4ir.backends.sampling import SamplingParams
from g4ir.engine import device_loop, speculative
from g4ir.engine.device_loop import TokenSteps
from g4ir.engine.inputs import row_prompt
from g4ir.engine.parts import embed_rows
from g4ir.engine.requests import PREFILLING, QUEUED, Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.speculative import AcceptanceStats, NgramProposer, StepCosts
from g4ir.errors import CheckError
from g4ir.ir.graph import Builder, Graph, Node, Program
from g4ir.ir.interpret import run_node
from g4ir.model.decoder import BLOCKS
from g4ir.ops import OPS
from g4ir.ops.base import Sample
from g4ir.ops.codecs import FORMATS
from g4ir.ops.kv_quant import to_comparable
from g4ir.ops.types import FLOATS, Type, torch_dtype
from g4ir.weights.pack import RowTable, StoredParams, split_program
from tests.cases import TABLES
from tests.configs import VARIANTS
from tests.contract import flows
from tests.contract.flows import in_a_loop
from tests.engines import some_tokens
from tests.runner import built_program
from tests.spies import spy
from tests.test_kernel_ops import program

PROMPTS = [some_tokens(1, n)[0].tolist() for n in (11, 3, 26)]


@pytest.fixture
def engine(engines: Any) -> Engine:
    """It has rings, lists and layers that only a prompt's last chunk runs."""
    return engines("torch", "tiny-ple")


def test_tables_in_host_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host gathers their rows, and so chooses."""
    assert engine.chooses_on_device
    monkeypatch.setattr(type(engine), "device", "cuda")
    assert not engine.embeds_on_device and not engine.chooses_on_device


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_nonfinite_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch, odd: float) -> None:
    """Found with the tokens that were chosen from them, and none of these is handed out."""
    in_a_loop(engine, monkeypatch)
    want, seen = engine.generate(PROMPTS[0], 20, stop_ids=()), list[int]()
    monkeypatch.setattr(engine, "_idle", None)
    whole, steps = engine.runtime._step, []

    def broken(phase: str, views: Any) -> Callable[[Any], Any]:
        def step(feeds: Any) -> Any:
            made = whole(phase, views)(feeds)
            steps.append(1)
            if len(steps) == 4:  # the third that counts: recording runs one
                made["logits"][..., 7] = odd
            return made

        return step

    monkeypatch.setattr(engine.runtime, "_step", broken)
    with pytest.raises(CheckError, match=r"logits after 1\d tokens: NaN or infinite"):
        engine.generate(PROMPTS[0], 20, stop_ids=(), on_token=seen.append)
    assert seen == want[:3] and len(steps) <= 1 + 4


def test_the_host_reads_a_step_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step has been started when tokens are handed out, and none beyond the last."""
    in_a_loop(engine, monkeypatch)
    started, ahead = list[int](), list[int]()
    spy(monkeypatch, TokenLoop, "advance", lambda *_: started.append(1))
    text = engine.generate(
        PROMPTS[0], 8, stop_ids=(), on_token=lambda _: ahead.append(len(started))
    )
    assert len(text) == 8 and ahead == [0, 2, 3, 4, 5, 6, 7, 7]


@pytest.mark.parametrize(
    ("late", "watches", "want"),
    [(1, False, 6 * [(1, 1, 4)]), (20, False, []), (20, True, 6 * [(1, 1, 3)])],
)
def test_steps_of_a_loop_are_timed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, late: int, watches: bool, want: Any
) -> None:
    """The cost of drafts is relative to them. The first one includes the loop's start; if the host
    is late, the time between two reads is its own. Of steps that run alone it does not count."""
    in_a_loop(engine, monkeypatch)
    watching = property(lambda _: watches, lambda *_: None)
    monkeypatch.setattr(TokenSteps, "watches", watching, raising=False)
    timed, clock = list[tuple[int, ...]](), Counter[str]()
    monkeypatch.setattr(StepCosts, "add", lambda _, *entry: timed.append(entry))
    monkeypatch.setattr(device_loop, "time", SimpleNamespace(perf_counter=clock.total))
    spy(monkeypatch, TokenLoop, "read", lambda *_: clock.update({"step": 3}))
    engine.generate(PROMPTS[0], 8, stop_ids=(), on_token=lambda _: clock.update({"host": late}))
    assert timed == want


@pytest.fixture
def programs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[LoopProgram]:
    """Those that are recorded for steps on the CPU; two looks are 8 steps apart."""
    made: list[LoopProgram] = []
    record = runtime.record_loop
    monkeypatch.setattr(runtime, "record_loop", lambda *a: (made.append(record(*a)), made[-1])[1])
    monkeypatch.setattr(StepLoop, "steps_per_call", 8)
    monkeypatch.setattr(engine, "_idle", None)
    return made


def on_the_host(engine: Engine, patch: pytest.MonkeyPatch, *asked: Any, **settings: Any) -> Any:
    with patch.context() as apart:
        flows.on_the_host(engine, apart)
        return engine.generate(*asked, stop_ids=(), **settings)


def test_rows_rest_within_a_program(
    engine: Engine, programs: list[LoopProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed behind a stop token, though the host looks later; the logits of a drawn
    sequence are exact."""
    want = on_the_host(engine, monkeypatch, PROMPTS[0], 40)
    held = next(i for i, t in enumerate(want) if i >= 10 and want.index(t) == i)
    assert engine.generate(PROMPTS[0], 40, stop_ids=(want[held],)) == want[: held + 1]
    p = programs[0]
    assert (int(p.lengths), int(p.active), int(p.exact)) == (len(PROMPTS[0]) + held, 0, 0)
    assert engine.generate(PROMPTS[0], 4, temperature=1.0, seed=1) and int(programs[-1].exact) == 1


def test_steps_without_drafts_are_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a pause of drafts, which pay nothing if they are wrong, and those after which a text
    has no draft; texts and counts are those of single steps."""
    limits: dict[str, Any] = {"max_seq": 64, "prefill_chunk": 16, "draft_tokens": 3}
    options: dict[str, Any] = {"backend": "torch", "random_weights": 0, "dtype": "bfloat16"}
    looped, widths = list[int](), list[int]()
    # Measured costs decide how many tokens are drafted: on a busy machine any number.
    monkeypatch.setattr(StepCosts, "add", lambda *_: None)
    monkeypatch.setattr(StepCosts, "is_measured", lambda *_: True)
    with g4ir.build("tiny-ple", tmp_path / "e", **options, **limits) as e:

        def drafted(propose: Any) -> AcceptanceStats:
            monkeypatch.setattr(NgramProposer, "propose", propose)
            tally = AcceptanceStats()
            assert e.generate(PROMPTS[0], 40, stop_ids=(), draft="ngram", tally=tally) == want
            assert tally.tokens == 39
            return tally

        want = e.generate(PROMPTS[0], 40, stop_ids=())
        wrong = next(t for t in range(500) if t not in want)
        spy(monkeypatch, TokenSteps, "step", lambda steps, **_: looped.append(steps.remaining))
        tally = drafted(lambda self, count: [wrong] * count)
        assert tally.rounds == 39 and 0 < tally.drafted[0] < 20
        assert looped[0] == speculative.FIRST_PAUSE and max(looped) <= speculative.LONGEST_PAUSE
        spy(monkeypatch, Session, "verify", lambda *given: widths.append(given[1].shape[1]))
        right = [*PROMPTS[0], *want]
        tally = drafted(lambda self, n: right[self._count :][: n * (self._count % 3 == 0)])
        assert widths and min(widths) > 1 and tally.rounds > len(widths)


def test_what_a_program_finds_not_finite(
    engine: Engine, programs: list[LoopProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens before are handed out, and no other; the next request starts anew."""
    want, seen = on_the_host(engine, monkeypatch, PROMPTS[0], 40), list[int]()
    norm = engine.runtime.weights["final.w"]
    kept = norm.clone()

    def spoil(token: int) -> None:
        seen.append(token)
        norm[:] = torch.nan if len(seen) == 9 else norm

    try:
        with pytest.raises(CheckError, match=r"logits after \d+ tokens: NaN or infinite"):
            engine.generate(PROMPTS[0], 40, stop_ids=(), on_token=spoil)
    finally:
        norm.copy_(kept)
    assert len(programs) == 1 and 9 <= len(seen) < 40 and seen == want[: len(seen)]
    assert engine.generate(PROMPTS[0], 40, stop_ids=()) == want


def test_a_prompt_has_the_cpu_to_itself(engine: Engine, programs: list[LoopProgram]) -> None:
    scheduler, unread = Scheduler(engine, SchedulerConfig(chunk_tokens=4)), []
    greedy = SamplingParams(ignore_eos=True)
    first = scheduler.submit(Request(tuple(PROMPTS[1]), 90, greedy, reuse=False))
    while not first.answers[0].tokens:
        scheduler.step()
    late = scheduler.submit(Request(tuple(PROMPTS[2]), 4, greedy, reuse=False))
    while late.state in (QUEUED, PREFILLING):
        scheduler.step()
        if scheduler._loop:
            unread.append(scheduler._loop.loop.unread)
    assert len(unread) > 3 and not any(unread[2:])
    scheduler.close()


def test_sessions_take_turns(engine: Engine, programs: list[LoopProgram]) -> None:
    """Steps of two sessions on two threads: neither waits for the whole text of the other."""
    written, seen, deadline = [0, 0], [0, 0], time.monotonic() + 60
    greedy, met = SamplingParams(ignore_eos=True), Barrier(2)

    def write(number: int) -> None:
        """Texts until both sessions saw 16 tokens of the other during one text of their own."""
        scheduler, other = Scheduler(engine), 1 - number
        met.wait(60)
        while min(seen) < 16 and time.monotonic() < deadline:
            scheduler.submit(Request(tuple(PROMPTS[number]), 90, greedy, reuse=False))
            scheduler.step()
            before = written[other]
            while scheduler.busy:
                written[number] += sum(event.token is not None for event in scheduler.step())
            seen[number] = max(seen[number], written[other] - before)
        scheduler.close()

    threads = [Thread(target=write, args=(n,)) for n in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(90)
    assert min(seen) >= 16


def test_a_program_maps_tables_that_are_read_row_by_row(
    engine: Engine, programs: list[LoopProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that lie in a file; where each is made, the host embeds and chooses."""
    want = engine.generate(PROMPTS[0], 12, stop_ids=())
    params = engine.program.graphs["embed"].params
    tables = {v.name: RowTable(engine.runtime.source, v) for v in params}
    monkeypatch.setattr(engine, "tables", tables)
    monkeypatch.setattr(engine, "_idle", None)
    assert len(programs) == 1 and engine.generate(PROMPTS[0], 12, stop_ids=()) == want
    assert len(programs) == (2 if isinstance(engine.runtime.source, StoredParams) else 1)


@pytest.mark.parametrize(("name", "form", "gpu", "same"), TABLES["token loop"]["any length"])
def test_steps_that_one_recording_serves(name: str, form: str, gpu: str, same: bool) -> None:
    """Those whose attention goes by what rows hold, in kernels of ours."""
    g = program(name, form).graphs["decode"]
    assert any_length(schedule(g, Target("cuda", gpu, 1))) == same


CASES = [(name, i) for name, op in OPS.items() for i in range(len(op.samples))]
#: those that stay in fp32 whatever the model's dtype is: weights of experts
FP32 = {("experts", 1)}
#: weights that stay codes until a product takes them, and bounds, which are read when recorded
WEIGHTS = {"dequantize", "dequantize_tiles", "dense", "fake_quantize", "clip"}
#: fused ops that are recorded by their parts, and views
EXPANDED = {"norm_rope", "norm_residual", "linear_glu", "glu_packed", "qkv_write", "moe_mlp"}
EXPANDED |= {"heads", "merge_heads", "split", "unstack_layers"}
ATTENTIONS = ("attention", "attention_latent")
#: samples that torch's ops compute: attention with a softcap, tensors that are no rows
BY_TORCH = {("attention", 2), ("attention_latent", 2), ("concat", 0)}
BY_TORCH |= {("encoder_attention", 0), ("encoder_attention", 1)}
RECORDED = [c for c in CASES if c[0] in (LOWERINGS.keys() | EXPANDED) - WEIGHTS]


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
    assert bool(program.code.torch_ops) == (case in BY_TORCH)
    made = program.run(feeds)
    # A row that is nearly between two codes may become either.
    wide = dtype == "f32" and all(v.type.dtype not in ("i8", "f8e4m3") for v in g.state)
    wants = [expected(g.nodes[0], given, exact) for exact in {wide, wide or name in ATTENTIONS}]
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
            step = GraphRun("prefill", feeds, 9 + length, watch=watch)
            outputs = engine.runtime.run(step, session.state)
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
    for phase, rows in product(("decode", "prefill", *media), (1, 9)):
        assert not _recorded(program.graphs[phase], B=rows).torch_ops


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
