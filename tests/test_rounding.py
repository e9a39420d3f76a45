"""16 bits: right engines pass whatever their rounding, and wrong ones fail by a stated margin. bf16
is that of transformers bit for bit where both run the same products, else by a cosine; ops are
given the reference module's own inputs, so nothing carries over from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir import Engine, build_graph, load_spec
from g4ir.backends.base import GraphRun
from g4ir.check import reference
from g4ir.check.logits import verify_engine
from g4ir.check.reference import reference_engine
from g4ir.check.report import VerifyReport
from g4ir.check.tokens import random_ids
from g4ir.ir import distance
from g4ir.ir.distance import Anchor
from g4ir.passes import PASSES
from g4ir.plan.resolve import check_latent
from tests.configs import SMALL, TINY, fewest, spec_called
from tests.engines import Change, changed, random_checkpoint, rewrite
from tests.oracle import Oracle, close_calls, cosine, find_bf16_oracle
from tests.runner import open_session, prefill_then_decode
from tests.test_ops import rand, run
from tests.test_verify import attrs, nodes


@pytest.fixture(scope="module")
def built(make_engine: Any) -> Callable[..., Engine]:
    """Engines of random weights, one of each kind."""

    def build(name: str, dtype: str, seed: int, backend: str = "reference") -> Engine:
        options = {"backend": backend, "dtype": dtype, "max_seq": 64, "prefill_chunk": 8}
        return make_engine(name, random_weights=seed, **options)

    return build


FULL = pytest.mark.full
SIDES = ("hf", "reference")


def sound(engine: Engine, against: str) -> VerifyReport:
    report = verify_engine(engine, against)
    assert report.ok, report.text()
    assert report.budget.rounding and report.budget.rounding.anchor == "float64"
    assert (report.float64 is not None) == (against == "hf") and report.graphs_ok
    return report


RIGHT = [
    *product((*TINY, "tiny-media"), ["bfloat16"], range(5), ["reference"], SIDES),
    *product(TINY, ["bfloat16"], range(5), ["torch"], SIDES),
]


@FULL
@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_right_engines(built: Callable[..., Engine], case: tuple[Any, ...]) -> None:
    """Compiled ones too, which round less than transformers does, and at other places."""
    *engine, against = case
    sound(built(*engine), against)


def test_the_report_states_the_budget(built: Callable[..., Engine]) -> None:
    report = sound(built("tiny-moe", "bfloat16", 0), "hf")
    rounding = report.budget.rounding
    assert rounding and 0.005 < rounding.median < rounding.worst < 1 and rounding.reason is None
    assert 0.005 < report.median_distance <= rounding.median_limit
    text = report.text()
    assert "2 and 4 times the reference's distance to float64" in text
    assert f"the reference's {rounding.median:.2e} and {rounding.worst:.2e}" in text
    assert "the graphs in float64: ok" in text and all(len(x) <= 100 for x in text.splitlines())
    assert report.to_dict()["budget"]["rounding"]["median"] == rounding.median


def swapped(w: torch.Tensor) -> torch.Tensor:
    """Gate and up change places."""
    return torch.cat(w.chunk(2, -2)[::-1], -2)


def one_expert(w: torch.Tensor) -> torch.Tensor:
    w = w.clone()
    w[1] *= 1.25
    return w


def narrowed(engine: Engine) -> Engine:
    """A window is one key short."""
    out = reference_engine(engine)
    narrow = nodes(attrs(window=7), "L0.attn.out")
    out.runtime.program = out.runtime.program.map(narrow)  # type: ignore[attr-defined]
    return out


#: param of layer 2, and what is wrong with it; smaller than the rounding of all layers
WRONG: dict[str, Change] = {
    "L2.mlp.w_gate_up": swapped,
    "L2.attn.norm_q": lambda w: w * 1.05,
    "L2.scalar": lambda w: w * 1.03,
    "L2.moe.expert_scale": one_expert,
}


@pytest.mark.parametrize("wrong", [*WRONG, "L0.attn.window"])
def test_wrong_engines(built: Callable[..., Engine], wrong: str) -> None:
    """Are told apart by their values inside."""
    engine = built("tiny-moe", "bfloat16", 0)
    engine = changed(engine, {wrong: WRONG[wrong]}) if wrong in WRONG else narrowed(engine)
    report = verify_engine(engine, "hf")
    assert not report.ok
    assert report.first_difference and f"%{wrong[:3]}" in report.first_difference


def silence(engine: Engine, phases: tuple[str, ...], patch: pytest.MonkeyPatch) -> Engine:
    """Let nothing show but logits, or only in some phases, as on a GPU."""
    run: Callable[..., Any] = engine.runtime.run

    def silent(step: GraphRun, state: Any) -> Any:
        return run(step if step.phase in phases else replace(step, watch=None), state)

    patch.setattr(engine.runtime, "run", silent)
    return engine


@pytest.mark.parametrize("phases", [(), ("prefill",)], ids=["nothing", "prefill"])
def test_engines_that_show_less(
    built: Callable[..., Engine], phases: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: their logits, and what shows, are those of right values."""
    engine = built("tiny-dense", "bfloat16", 0)
    wrong = changed(engine, {"L2.mlp.w_gate_up": swapped})
    report = verify_engine(silence(engine, phases, monkeypatch), "hf")
    assert report.ok, report.text()
    assert not verify_engine(silence(wrong, phases, monkeypatch), "hf").ok


def test_graphs_of_other_weights(built: Callable[..., Engine], tmp_path: Path) -> None:
    """A norm of one layer that is 1 % off is not what transformers computes."""
    engine, folder = built("tiny-dense", "bfloat16", 0), tmp_path / "c"
    random_checkpoint(folder, "tiny-dense", seed=0)
    name = "model.layers.2.self_attn.q_norm.weight"
    rewrite(folder, lambda tensors: tensors[name].mul_(1.01))
    report = verify_engine(engine, "hf", checkpoint=folder)
    assert not report.ok and not report.graphs_ok and "out of tolerance" in report.text()
    assert report.first_difference and "another graph or other weights" in report.first_difference


def test_without_room(built: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "device_memory", lambda device: 1 << 20)
    engine = built("tiny-dense", "bfloat16", 0)
    report = verify_engine(engine, "hf")
    assert report.ok, report.text()
    rounding = report.budget.rounding
    assert rounding and rounding.reason and "are free" in rounding.reason
    assert rounding.anchor != "float64" and report.float64 is None and "are free" in report.text()
    wrong = changed(engine, {"L2.mlp.w_gate_up": swapped})
    assert not verify_engine(wrong, "hf").ok
    # The interpreter's other mode makes the same roundings: of a right engine it says nothing.
    plain = verify_engine(engine, "reference")
    assert plain.ok and plain.budget.cosine and plain.budget.rounding is None


def test_distances_and_limits() -> None:
    rows = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    anchor = Anchor("float64", rows, [rows * 1.03])
    found = anchor.rounding(rows * torch.tensor([[1.01], [1.05]]), "bf16")
    assert (found.median, found.worst) == (pytest.approx(0.03), pytest.approx(0.05))
    budget = distance.Tolerance(rounding=found)
    good = anchor.errors(rows * 1.05, rows)
    assert budget.all_hold(good) and good.distance.tolist() == pytest.approx([0.05, 0.05])
    assert not budget.all_hold(anchor.errors(rows * 1.1, rows)), "the median"
    one = rows * torch.tensor([[1.0], [1.3]])
    assert budget.holds(anchor.errors(one, rows)).tolist() == [True, False]
    nan = anchor.errors(rows * float("nan"), rows)
    assert not budget.holds(nan).any() and not budget.typical(nan)
    exact = Anchor("float64", rows, []).rounding(rows, "f16")
    assert exact.row_limit == distance.WORST * 2.0**-11, "never less than a rounding"


def test_rows_of_something_else_do_not_hold() -> None:
    """However far a few rows of the peer lie: a router's near ties excuse no more rows than that,
    and no row that has nothing to do with the right one."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 64, generator=g)
    noise = torch.randn(500, 64, generator=g)
    size = torch.full((500, 1), 0.02)
    size[:6] = 0.45
    found = Anchor("float64", rows, []).rounding(rows + size * noise, "bf16")
    assert found.far == pytest.approx(6 / 500) and 0.4 < found.worst < 0.6
    anchor, budget = Anchor("float64", rows, []), distance.Tolerance(rounding=found)
    right = anchor.errors(rows + size.flip(0) * noise.flip(0), rows)
    assert budget.all_hold(right)
    for wrong in (rows.roll(1, 0), rows * 0, -rows):
        assert not budget.holds(anchor.errors(wrong, rows)).any()
    part = rows + 0.02 * noise
    part[:200] = rows[:200] + 0.4 * noise[:200]  # within the limit of a row, and too many
    assert budget.holds(anchor.errors(part, rows)).all()
    assert not budget.all_hold(anchor.errors(part, rows))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        pytest.param({"L2.moe.router": lambda t: t + 0.3 * t.flip(0)}, marks=FULL),
        pytest.param({"final.w": lambda t: t * torch.linspace(0.93, 1.07, len(t))}, marks=FULL),
    ],
)
def test_near_ties_of_routers(
    make_engine: Any, wrong: dict[str, Change], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows are far from float64 than the reference's, by luck: no value inside differs, and a
    fault is found there."""
    options: dict[str, Any] = {"max_seq": 96, "prefill_chunk": 32, "all_logits": True}
    engine = make_engine("tiny-moe", backend="torch", dtype="bfloat16", random_weights=0, **options)
    ids = random_ids(engine, (87,)).tolist()
    report = verify_engine(changed(engine, wrong) if wrong else engine, tokens=ids)
    assert not report.rows_ok and report.ok is not bool(wrong), report.text()
    assert ("experts   rows differ by near ties of a router" in report.text()) == report.ok
    if report.ok:
        silent = verify_engine(silence(engine, (), monkeypatch), tokens=ids)
        assert not silent.ok, "nothing excuses rows where values inside are not visible"


def test_single_tokens_are_judged_alone(built: Callable[..., Engine]) -> None:
    """Their graph is another, and with the logits of every token they are few among many."""
    report = verify_engine(built("tiny-dense", "bfloat16", 0), "reference")
    assert report.budget.rounding and report.typical
    steps = {sum(report.turns[:i]) for i, n in enumerate(report.turns) if n == 1}
    away = 1.5 * report.budget.rounding.median_limit
    worse = [replace(p, distance=away) if p.at in steps else p for p in report.positions]
    many = [replace(report.positions[0], at=1000 + i) for i in range(2000)]
    assert not replace(report, positions=(*worse, *many)).typical
    assert replace(report, positions=(*report.positions, *many)).typical


BF16 = torch.bfloat16
NAMES = (*SMALL, "combined")
COSINE = 0.999

#: largest difference of a layer, whose sums have a free order, of the output's rms.
#: One bf16 rounding is 2^-9 of a value; a value may be three times the rms.
LAYER = 2**-5


def oracle_of(name: str) -> Oracle:
    return find_bf16_oracle(spec_called(name))


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference relative to the rms."""
    return float((got.double() - want.double()).abs().max() / want.double().pow(2).mean().sqrt())


# --- ops that are exact -------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("size", [33, 256, 1536])
def test_rms_norm(size: int, weighted: bool) -> None:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    module = Gemma4RMSNorm(size, eps=1e-6, with_scale=weighted).to(BF16)
    w = [rand(size, seed=1)] if weighted else []
    if weighted:
        module.weight.data = w[0]
    x = rand(5, 7, size) * 3
    assert torch.equal(run("rms_norm", x, *w, eps=1e-6), module(x))


SCALES = {1536: 39.25, 2560: 50.5, 2816: 53.0, 3840: 62.0, 5376: 73.5, 256: 16.0}


@pytest.mark.parametrize("size", SCALES)
def test_embedding_scale_is_rounded_first(size: int) -> None:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding

    module = Gemma4TextScaledWordEmbedding(20, size, 0, embed_scale=size**0.5).to(BF16)
    ids = torch.arange(20)[None]
    got = run("embedding", module.weight.data, ids, scale=size**0.5)
    assert torch.equal(got, module(ids))
    assert torch.equal(got, module.weight.data[ids] * torch.tensor(SCALES[size], dtype=BF16))


@pytest.mark.parametrize("kind", ["sliding", "full"])
@pytest.mark.parametrize("variant", ["e2b", "31b"])
def test_rope_tables_of_real_sizes(variant: str, kind: str) -> None:
    """cos and sin from the start to position 300,000, and which dims are rotated at all."""
    model = oracle_of("e2b-small").model.model
    attention = getattr(spec_called(variant).text, kind)
    module = type(model.rotary_emb)(_real_config(variant))
    positions = torch.cat((torch.arange(40), torch.arange(0, 300_000, 977)))[None]
    rope, dim = attention.rope, attention.head_dim
    for dtype, name in ((torch.float32, "f32"), (BF16, "bf16")):
        want = module(torch.zeros(1, dtype=dtype), positions, f"{kind}_attention")
        attrs = {"kind": rope.kind, "theta": rope.theta, "fraction": rope.rotary_fraction}
        attrs |= {"factor": rope.factor or 1.0, "dim": dim, "dtype": name}
        got = run("rope_table", positions, **attrs)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    live = got[1][0].abs().amax(0).nonzero().flatten().tolist()
    pairs = rope.pairs(dim)
    assert live == [*range(pairs), *range(dim // 2, dim // 2 + pairs)]


def _real_config(variant: str) -> Any:
    from transformers import AutoConfig

    config = spec_called(variant).to_hf()
    return AutoConfig.for_model(**config.get("text_config", config))


def test_rope() -> None:
    from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

    x, cos, sin = rand(2, 5, 4, 64), rand(2, 5, 64, seed=1), rand(2, 5, 64, seed=2)
    assert torch.equal(run("rope", x, cos, sin), apply_rotary_pos_emb(x, cos, sin, 2))


def test_softcap_rounds_three_times() -> None:
    x = rand(7, 1000) * 40
    capped = torch.tanh((x / 30).to(BF16)).to(BF16) * 30
    assert torch.equal(run("softcap", x, cap=30.0), capped)
    assert run("softcap", torch.tensor(29.9, dtype=BF16), cap=30.0) == 22.875
    assert run("softcap", torch.tensor(1e4, dtype=BF16), cap=30.0) == 30.0


@pytest.mark.parametrize("name", fewest(n for n in NAMES if spec_called(n).text.ple))
def test_per_layer_inputs(name: str) -> None:
    """The chain from token ids to each layer's row: two tables, projection, norm, sum, mean."""
    oracle = oracle_of(name)
    text, tokens = oracle.model.model, oracle.tokens
    with torch.no_grad():
        embeds = text.embed_tokens(tokens)
        want = text.project_per_layer_inputs(embeds, text.get_per_layer_inputs(tokens, None))
    session = open_session(oracle, 2, 64, True, skip=PASSES)
    found: dict[str, torch.Tensor] = {}
    session.watch = lambda value, tensor: found.update({value.name: tensor})
    session.prefill(tokens, all_logits=True)
    for i in range(oracle.spec.text.num_hidden_layers):
        assert torch.equal(found[f"L{i}.ple"], want[:, :, i]), f"layer {i}"


@pytest.mark.parametrize("count", [1, 64])
def test_router(count: int) -> None:
    """The same experts and the same fp32 weights; the root of the size is not rounded."""
    layer = oracle_of("combined").model.model.layers[3]
    router, h = layer.router, rand(count, layer.hidden_size, seed=count)
    with torch.no_grad():
        _, weights, index = router(h)
        normed = run("rms_norm", h, eps=router.eps)
        held = router.scale, router.proj.weight, router.per_expert_scale
        root = layer.hidden_size**-0.5
        got, chosen = run("router", normed, *held, top_k=index.shape[-1], root=root)
    assert torch.equal(chosen, index)
    assert got.dtype == weights.dtype == torch.float32 and torch.equal(got, weights)


# --- ops whose sums have a free order -------------------------------------------------------------


LAYERS: dict[str, Callable[[Oracle], int]] = {
    "sliding": lambda o: 1,
    "full": lambda o: o.spec.text.layer_types.index("full"),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", fewest(NAMES))
def test_a_layer_alone(name: str, kind: str) -> None:
    """A layer that is given the reference's own input to it."""
    oracle = oracle_of(name)
    at = LAYERS[kind](oracle)
    outputs = oracle.layers(oracle.tokens)
    graph = build_graph(oracle.spec, "prefill", all_logits=True, dtype="bf16")
    start = next(i for i, n in enumerate(graph.nodes) if n.outputs[0].name == f"L{at}.in")
    found: dict[str, torch.Tensor] = {}
    session = open_session(oracle, 2, 64, True, skip=PASSES, max_seq=1)
    assert graph.nodes[start].inputs[0].name == f"L{at - 1}.out"
    session.watch = lambda value, tensor: (
        tensor.copy_(outputs[at - 1])
        if value.name == f"L{at - 1}.out"
        else found.update({value.name: tensor})
    )
    session.prefill(oracle.tokens, all_logits=True)
    assert apart(found[f"L{at}.out"], outputs[at]) <= LAYER


# --- one cache in the place of K and V (in float64: test_passes.py) -------------------------------


@pytest.mark.parametrize("name", ["combined", pytest.param("31b-small", marks=pytest.mark.full)])
def test_value_in_bf16(name: str) -> None:
    """As near to transformers in bf16 as the plain caches have to be."""
    oracle = find_bf16_oracle(spec_called(name))
    session = open_session(oracle, 2, 7, True, latent_kv="value")
    got = prefill_then_decode(session, oracle.tokens, oracle.prompt)
    assert cosine(got, oracle.logits).min() > COSINE
    clear = ~close_calls(oracle.logits.float(), oracle.self_difference)
    assert torch.equal(got.argmax(-1)[clear], oracle.logits.argmax(-1)[clear])


def test_a_form_that_no_layer_takes_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("tiny-dense", "tiny-ple"):
        assert check_latent("value", load_spec(name)) == "value"
    (warned,) = caplog.messages
    assert warned.startswith("--latent-kv value changes nothing: no layer of tiny-ple ")
