"""bf16 against transformers in bf16: bit for bit where both run the same products, else a cosine.

Ops are given the reference module's own inputs, so nothing carries over from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from g4ir.model.text import build_graph
from g4ir.ops import OPS
from g4ir.passes import PASSES
from g4ir.plan.resolve import check_latent
from g4ir.spec.record import load_spec
from tests.configs import SMALL, fewest, spec_called
from tests.oracle import Oracle, close_calls, cosine, find_bf16_oracle
from tests.runner import open_session, prefill_then_decode

BF16 = torch.bfloat16
NAMES = (*SMALL, "combined")
COSINE = 0.999

#: largest difference of a layer, whose sums have a free order, of the output's rms.
#: One bf16 rounding is 2^-9 of a value; a value may be three times the rms.
LAYER = 2**-5


def oracle_of(name: str) -> Oracle:
    return find_bf16_oracle(spec_called(name))


def apply(op: str, *tensors: torch.Tensor, **attrs: Any) -> Any:
    reference = OPS[op].reference
    assert reference
    return reference(*tensors, **attrs)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference relative to the rms."""
    return float((got.double() - want.double()).abs().max() / want.double().pow(2).mean().sqrt())


# --- ops that are exact -------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("size", [33, 256, 1536])
def test_rms_norm(size: int, weighted: bool) -> None:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    module = Gemma4RMSNorm(size, eps=1e-6, with_scale=weighted).to(BF16)
    w = [noise(size, seed=1)] if weighted else []
    if weighted:
        module.weight.data = w[0]
    x = noise(5, 7, size) * 3
    assert torch.equal(apply("rms_norm", x, *w, eps=1e-6), module(x))


SCALES = {1536: 39.25, 2560: 50.5, 2816: 53.0, 3840: 62.0, 5376: 73.5, 256: 16.0}


@pytest.mark.parametrize("size", SCALES)
def test_embedding_scale_is_rounded_first(size: int) -> None:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding

    module = Gemma4TextScaledWordEmbedding(20, size, 0, embed_scale=size**0.5).to(BF16)
    ids = torch.arange(20)[None]
    got = apply("embedding", module.weight.data, ids, scale=size**0.5)
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
        got = apply("rope_table", positions, **attrs)
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

    x, cos, sin = noise(2, 5, 4, 64), noise(2, 5, 64, seed=1), noise(2, 5, 64, seed=2)
    assert torch.equal(apply("rope", x, cos, sin), apply_rotary_pos_emb(x, cos, sin, 2))


def test_softcap_rounds_three_times() -> None:
    x = noise(7, 1000) * 40
    capped = torch.tanh((x / 30).to(BF16)).to(BF16) * 30
    assert torch.equal(apply("softcap", x, cap=30.0), capped)
    assert apply("softcap", torch.tensor(29.9, dtype=BF16), cap=30.0) == 22.875
    assert apply("softcap", torch.tensor(1e4, dtype=BF16), cap=30.0) == 30.0


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
    router, h = layer.router, noise(count, layer.hidden_size, seed=count)
    with torch.no_grad():
        _, weights, index = router(h)
        normed = apply("rms_norm", h, eps=router.eps)
        held = router.scale, router.proj.weight, router.per_expert_scale
        root = layer.hidden_size**-0.5
        got, chosen = apply("router", normed, *held, top_k=index.shape[-1], root=root)
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
