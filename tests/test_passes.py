"""The passes: golden files, the laws that all of them keep, counts per variant, the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
import yaml

from g4ir import empty_state, interpret, parse_graph, print_graph, verify
from g4ir.errors import PassError
from g4ir.ir.graph import Graph, Program, Value
from g4ir.model.encoder import EMBEDDING, ENCODE
from g4ir.model.text import build_program, text_graphs
from g4ir.ops.codecs import ACTIVATIONS
from g4ir.ops.kv_quant import NARROW
from g4ir.parallel.shard import shard_program
from g4ir.parallel.table import Sharding
from g4ir.passes import (
    CHANGES_STATE,
    OPTIONS,
    PASSES,
    PassCounts,
    PassOptions,
    _ordered,
    find_pass,
    run_passes,
    run_program,
)
from g4ir.passes.latent_kv import LatentOptions
from g4ir.passes.match import ignore
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.quant.recipe import find_quant_config
from g4ir.quant.rewrite import quantise
from g4ir.spec.parts import Moe, Rope
from g4ir.spec.record import Spec, load_spec, spec_names
from tests.cases import TABLES
from tests.configs import check_spec
from tests.test_verify import break_pass

PHASES = ("prefill", "decode", ENCODE)


# --- golden files -----------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
GOLDEN = sorted((Path(__file__).parent / "passes").glob("*.g4ir"))
CUT = "// ----\n"
ASKS = "# options: "


def asked(name: str, text: str) -> PassOptions:
    """The pass's options, from a first line such as `# options: form=value`."""
    line = text.partition("\n")[0]
    pairs = line.removeprefix(ASKS).split() if line.startswith(ASKS) else []
    given: Any = dict(pair.split("=") for pair in pairs)
    given = {k: int(v) if v.isdigit() else v for k, v in given.items()}
    return PassOptions((replace(OPTIONS[name], **given),) if given else ())


def function(name: str, options: PassOptions) -> Any:
    """A pass as a function of a graph and a note."""
    if name not in OPTIONS:
        return find_pass(name)
    return partial(find_pass(name), options=options.of(type(OPTIONS[name])))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_golden(path: Path, rewrite_golden: bool) -> None:
    """A graph, the cut, what the pass says of each candidate, and the graph after the pass.

    In a `refuse` file the graph stays as it is. `pytest --rewrite-golden` writes the second part.
    """
    name, _, case = path.stem.partition(".")
    before, _, after = path.read_text().partition(CUT)
    g, notes = parse_graph(before), list[str]()
    run = function(name, asked(name, before))
    out = run(g, lambda value, reason: notes.append(f"# %{value}: {reason}\n"))
    verify(out)
    assert (out == g) == case.startswith("refuse")
    assert run(out, ignore) == out
    if rewrite_golden:
        path.write_text(before + CUT + "".join(notes) + print_graph(out))
    else:
        assert "".join(notes) + print_graph(out) == after


def test_every_pass_has_an_acceptance_and_a_refusal() -> None:
    stems = [p.stem.partition(".") for p in GOLDEN]
    assert {s for s, _, _ in stems} == set(PASSES)
    assert {s for s, _, case in stems if not case} == set(PASSES)
    assert {s for s, _, case in stems if case.startswith("refuse")} == set(PASSES)


# --- laws -------------------------------------------------------------------------------------


def combined() -> Spec:
    """Experts on some layers, per-layer embeddings, KV sharing, an attention softcap; K=V on rings
    that rotate half of their dims, on full layers, and on those that read them."""
    spec = load_spec("tiny-ple")
    rope = Rope("proportional", 1e4, 0.5, 2.0)
    text = replace(
        spec.text,
        sliding=replace(spec.text.sliding, k_eq_v=True, rope=rope),
        full=replace(spec.text.full, k_eq_v=True),
        moe=Moe(num_experts=6, top_k_experts=2, intermediate_size=24, layers=(1, 3, 6)),
        attn_logit_softcapping=20.0,
        tie_word_embeddings=False,
    )
    return check_spec(replace(spec, name="combined", text=text))


SPECS: dict[str, Callable[[], Spec]] = {
    **{n: partial(load_spec, n) for n in spec_names() if n.startswith("tiny-")},
    "combined": combined,
}
SKIPS = {
    "none": (),
    "all": PASSES,
    **{f"no {p}": (p,) for p in PASSES},
    **{f"only {p}": tuple(q for q in PASSES if q != p) for p in PASSES},
    "value": (),
    "value alone": tuple(q for q in PASSES if q != "latent_kv"),
    "value without plan_cache": ("plan_cache",),
}


def options(skip: str) -> PassOptions:
    """The options of a pipeline of SKIPS, which its first word says."""
    form = skip.partition(" ")[0]
    records: dict[str, Any] = {to: NarrowOptions(to) for to in NARROW}
    records |= {to: ActivationOptions(to) for to in ACTIVATIONS}
    records |= {"value": LatentOptions("value")}
    return PassOptions((records[form],) if form in records else ())


@cache
def program(spec: str) -> Program:
    return build_program(SPECS[spec]() if spec in SPECS else load_spec(spec))


@cache
def optimised(spec: str, skip: str) -> Program:
    return run_program(program(spec), skip=SKIPS[skip], options=options(skip))


def interface(g: Graph) -> tuple[Any, ...]:
    return g.name, g.inputs, g.outputs


def coded(spec: str) -> Program:
    """The program of a spec with weights in codes."""
    return quantise(program(spec), SPECS[spec](), find_quant_config("int8"), SPECS[spec]().dtype)


@pytest.mark.covering
@pytest.mark.parametrize("form", ["off", "value", "i8", "int8"])
@pytest.mark.parametrize(
    ("spec", "phase"), [(spec, g) for spec, make in SPECS.items() for g in text_graphs(make())]
)
def test_each_pass_keeps_the_laws_in_its_place(spec: str, phase: str, form: str) -> None:
    """A pass that says that it acted changed the graph, and no other did."""
    stages = [(coded if form in ACTIVATIONS else program)(spec).graphs[phase]]
    found = PassCounts()
    note = found.note(phase)
    run_passes(stages[0], dump=lambda _, g: stages.append(g), note=note, options=options(form))
    assert set(stages[-1].params) <= set(stages[0].params)
    assert run_passes(stages[-1], options=options(form)) == stages[-1]
    for name, before, after in zip(PASSES, stages[:-1], stages[1:], strict=True):
        assert interface(after) == interface(before)
        assert before.state == after.state or name in CHANGES_STATE
        run = function(name, options(form))
        assert run(after, ignore) == after
        assert (after != before) == bool(found.counts[phase][name]), f"{name} on {phase}"


# Chunks as (padded length, valid tokens of each row): longer than the window of 8, ragged, rows of
# length 0, single tokens, and a chunk after them.
CHUNKS = TABLES["passes"]["chunks"]


def random_weight(v: Value) -> torch.Tensor:
    g = torch.Generator().manual_seed(crc32(v.name.encode()))
    noise = torch.randn([int(d) for d in v.type.shape], generator=g, dtype=torch.float64)
    return 1 + 0.3 * noise if noise.dim() == 1 else noise * noise.shape[-1] ** -0.5


@cache
def chunk_inputs(spec: str) -> list[dict[str, torch.Tensor]]:
    """What each chunk feeds to the model, in float64."""
    embed, lengths_before = program(spec).graphs["embed"], torch.zeros(3, dtype=torch.int64)
    params = {v.name: random_weight(v) for v in embed.params}
    vocab = SPECS[spec]().text.vocab_size
    out = []
    for i, (size, lengths) in enumerate(CHUNKS):
        tokens = torch.randint(vocab, (3, size), generator=torch.Generator().manual_seed(i))
        rows, _ = interpret(embed, {"tokens": tokens}, params, {})
        positions = lengths_before[:, None] + torch.arange(size)
        out.append({**rows, "positions": positions, "lengths": torch.tensor(lengths)})
        lengths_before = lengths_before + torch.tensor(lengths)
    return out


@cache
def weights(spec: str) -> dict[str, torch.Tensor]:
    return {n: random_weight(v) for n, v in program(spec).params().items()}


def outputs(spec: str, p: Program) -> torch.Tensor:
    """Logits of all chunks from empty caches, rows with tokens only: [valid rows, vocab]. Of an
    encoder: the embeddings of three texts in one chunk, which ends with a token of none."""
    if ENCODE in p.graphs:
        rows, _ = interpret(
            program(spec).graphs["embed"],
            {"tokens": torch.arange(40)[None] % SPECS[spec]().text.vocab_size},
            weights(spec),
            {},
        )
        lengths = (20, 1, 18, 1)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        ends = torch.tensor(lengths[:-1]).cumsum(0)
        inputs = {**rows, "positions": positions, "ends": ends}
        return interpret(p.graphs[ENCODE], inputs, weights(spec), {})[0][EMBEDDING]
    state = empty_state(p.graphs["prefill"], {"B": 3, "C": 32}, torch.float64)
    out = []
    for inputs in chunk_inputs(spec):
        phase = "decode" if inputs["positions"].shape[1] == 1 else "prefill"
        results, state = interpret(p.graphs[phase], inputs, weights(spec), state)
        out.append(results["logits"][inputs["lengths"] > 0, -1])
    return torch.cat(out)


@cache
def plain_outputs(spec: str) -> torch.Tensor:
    return outputs(spec, program(spec))


@pytest.mark.covering
@pytest.mark.parametrize("skip", [s for s in SKIPS if s != "all"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_pipeline_changes_no_result(spec: str, skip: str) -> None:
    """Within 1e-12 of the rms in float64, over ragged chunks and single tokens."""
    want = plain_outputs(spec)
    worst = (outputs(spec, optimised(spec, skip)) - want).abs().max() / want.pow(2).mean().sqrt()
    assert want.isfinite().all() and worst < 1e-12


@pytest.mark.parametrize("skip", [s for s in SKIPS if s.startswith("value")])
def test_rows_of_values_change_no_result(skip: str) -> None:
    """Where K = V, of every kind of layer."""
    test_a_pipeline_changes_no_result("combined", skip)


# --- pipeline ---------------------------------------------------------------------------------


COUNTS = Path(__file__).parent / "golden" / "fusions.yaml"


def of_two_ranks(spec: str) -> Program:
    return shard_program(program(spec), Sharding(SPECS[spec](), 2))


#: kind of engine -> its program of a variant, its phases, its options
KINDS: dict[str, tuple[Callable[[str], Program], tuple[str, ...], PassOptions]] = {
    "cpu": (program, PHASES, PassOptions()),
    "value": (program, PHASES, PassOptions((LatentOptions("value"),))),
    "2 ranks": (of_two_ranks, ("decode",), PassOptions()),
    "int8 KV cache": (program, PHASES, PassOptions((NarrowOptions("i8"),))),
    "int8 weights and activations": (coded, PHASES, PassOptions((ActivationOptions("int8"),))),
}


def acted(g: Graph, options: PassOptions) -> dict[str, int]:
    """Pass -> how often it acted, of those that did."""
    found = PassCounts()
    run_passes(g, note=found.note(g.name), options=options)
    counts = found.counts[g.name]
    return {name: counts[name] for name in PASSES if counts[name]}


def counted() -> dict[str, dict[str, dict[str, int]]]:
    found: dict[str, dict[str, dict[str, int]]] = {}
    for spec in (*(n for n in spec_names() if n not in SPECS), *SPECS):
        for kind in KINDS if spec in SPECS else ("cpu", "value"):
            made, phases, options = KINDS[kind]
            every = text_graphs(SPECS[spec]() if spec in SPECS else load_spec(spec))
            rows = {
                f"{phase}, {kind}": acted(made(spec).graphs[phase], options)
                for phase in phases
                if phase in every
            }
            found.setdefault(spec, {}).update(rows)
    return found


def test_every_pass_acts_as_often_as_expected(rewrite_golden: bool) -> None:
    """A pass that stops matching, here or there, changes a number. `--rewrite-golden` writes them;
    derive one that changed by hand."""
    found = counted()
    if rewrite_golden:
        COUNTS.write_text(yaml.safe_dump(found, sort_keys=False, default_flow_style=None, width=99))
    assert found == yaml.safe_load(COUNTS.read_text())
    assert {p for rows in found.values() for row in rows.values() for p in row} == {*PASSES}


MISDEEDS: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "outputs": (lambda g: replace(g, outputs=()), "inputs or outputs"),
    "inputs": (lambda g: replace(g, inputs=g.inputs[::-1]), "inputs or outputs"),
    "state": (
        lambda g: replace(g, state=(*g.state, Value("more", g.state[0].type))),
        "changed the state",
    ),
    "validity": (lambda g: replace(g, nodes=g.nodes[1:]), "is not defined before its use"),
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_broken_contracts_are_caught(misdeed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f, message = MISDEEDS[misdeed]
    break_pass(monkeypatch, "fuse_qkv", f)
    with pytest.raises(PassError, match=r"fuse_qkv .*after .*share_rope_tables") as e:
        run_passes(program("tiny-dense").graphs["decode"])
    assert message in str(e.value)


@pytest.mark.parametrize(("after", "said"), TABLES["passes"]["no chain"])
def test_passes_are_one_chain(after: dict[str, str | None], said: str) -> None:
    modules: Any = {name: SimpleNamespace(AFTER=other) for name, other in after.items()}
    with pytest.raises(PassError, match=said):
        _ordered(modules)


def test_a_cache_read_with_two_windows_is_refused() -> None:
    golden = next(path for path in GOLDEN if path.stem == "plan_cache")
    text = golden.read_text().partition(CUT)[0].replace("window=4", "window=2", 1)
    with pytest.raises(PassError, match=r"plan_cache: %L0.k is read with windows \[2, 4\]"):
        run_passes(parse_graph(text))


def test_any_value_can_be_one_more_output() -> None:
    """A value that is asked for is kept, and fusions that would swallow it are left. Tables and
    caches are the exception: they get new names and sizes."""
    for phase, step in (("prefill", 7), ("decode", 5)):
        g = program("combined").graphs[phase]
        nodes = [n for n in g.nodes if n.op not in ("rope_table", "cache_write")]
        values = [v for n in nodes for v in n.outputs]
        for v in values[::step]:
            asked = replace(g, outputs=(*g.outputs, v))
            assert run_passes(asked).outputs == asked.outputs
