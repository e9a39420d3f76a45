"""From logits to tokens: ties, draws, the settings of each sequence in any batch against their
formulas, and the defaults of a checkpoint."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import g4ir
from g4ir.backends import sampling
from g4ir.backends.sampling import Sampler, SamplingParams, choose, sample
from g4ir.engine.prompts import Defaults, read_defaults
from g4ir.errors import InputError
from tests.engines import CASES, random_checkpoint

DRAWS = 20_000
LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5, 0.0])


def chosen(logits: torch.Tensor, uniforms: torch.Tensor, **settings: Any) -> torch.Tensor:
    """The token of each row [B, vocab], all with the same settings."""
    params = SamplingParams(**settings)
    draws = torch.tensor([params.draw], dtype=torch.float64).expand(len(logits), -1)
    return choose(logits.float(), uniforms, draws, params.method)


def numbers(count: int, seed: int = 3) -> torch.Tensor:
    """The random numbers of a sequence's first tokens."""
    return torch.tensor([sampling.uniform(seed, i) for i in range(count)], dtype=torch.float64)


def test_random_numbers_of_a_seed_stay() -> None:
    """Otherwise a seed gives another text in another version."""
    found = [sampling.uniform(*x) for x in ((0, 0), (3, 0), (3, 1), (2**63 - 1, 1000))]
    assert found == [
        0.5241815285823275,
        0.07584083630058824,
        0.21913340434721562,
        0.8191408011477274,
    ]
    SamplingParams(seed=2**63 - 1)
    with pytest.raises(InputError, match=r"seed 9223372036854775808: expected 0 to 2\^63 - 1"):
        SamplingParams(seed=2**63)


def test_random_numbers_are_uniform() -> None:
    """Of one seed, of neighbouring seeds, and of both together; a function of seed and index."""
    for found in (
        numbers(DRAWS, 0),
        torch.tensor([sampling.uniform(seed, 0) for seed in range(DRAWS)]),
        torch.tensor([sampling.uniform(i, i) for i in range(DRAWS)]),
    ):
        assert found.min() >= 0 and found.max() < 1
        bins = torch.histc(found, 20, 0, 1)
        fits(bins, torch.full((20,), 1 / 20))
    a, b = numbers(DRAWS, 7), numbers(DRAWS, 8)
    assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 0.03
    assert abs(torch.corrcoef(torch.stack((a[1:], a[:-1])))[0, 1]) < 0.03
    largest = (1 << 63) - 1
    assert sampling.uniform(largest, 5) == sampling.uniform(largest, 5) != sampling.uniform(0, 5)


def fits(found: torch.Tensor, p: torch.Tensor) -> None:
    """Counts within five standard deviations of what the probabilities say; nothing else drawn."""
    assert not found[p == 0].any()
    spread = (DRAWS * p * (1 - p)).sqrt()
    assert ((found - DRAWS * p).abs() <= 5 * spread + 1).all(), f"{found.tolist()} of {p.tolist()}"


@pytest.mark.parametrize("given, keep", CASES["kept"], ids=str)
def test_draws_are_as_often_as_probable(given: dict[str, Any], keep: list[int]) -> None:
    found = chosen(LOGITS.expand(DRAWS, -1), numbers(DRAWS), **{"temperature": 1.0, **given})
    p = torch.zeros(len(LOGITS), dtype=torch.float64)
    p[keep] = (LOGITS[keep].double() / given.get("temperature", 1.0)).softmax(-1)
    fits(torch.bincount(found, minlength=len(LOGITS)), p)


@pytest.mark.parametrize("k", [0, 1, 7, 64, 300])
def test_largest_are_those_of_a_stable_sort(k: int) -> None:
    """With many equal ones, both zeros, and infinities."""
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(k)).bfloat16().float()
    logits[0, ::5], logits[0, 1::5] = 0.0, -0.0
    logits[1, 100:2000] = -float("inf")
    logits[2, 7:9] = float("inf")
    values, index = sampling.largest(logits, k)
    want = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(index, want.indices[:, :k]) and torch.equal(values, want.values[:, :k])
    assert torch.equal(sampling.greatest(logits), want.indices[:, 0])
    few = torch.tensor([[0.0, 5.0, 1.0, 5.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 1.0]])
    assert sampling.greatest(few).tolist() == [1, 0, 3]
    assert sampling.greatest(torch.zeros(2, 262_144)).tolist() == [0, 0]


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 50}, {"top_p": 0.7}, {"top_k": 1500, "top_p": 0.5}, {"top_p": 0.9999}],
)
def test_shortcuts_draw_the_same(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """As everything sorted, which is what a device does for top_p."""
    settings = {"temperature": 1.5, **settings}
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3000, generator=random) * 3
    uniforms = torch.rand(40, dtype=torch.float64, generator=random)
    got = chosen(logits, uniforms, **settings)
    order = logits.sort(dim=-1, descending=True, stable=True)
    if len(settings) > 1:
        draws = torch.tensor([SamplingParams(**settings).draw], dtype=torch.float64)
        want = sampling.draw(order.values, order.indices, uniforms, draws.expand(40, -1))
    else:  # tokens lie side by side in [0, 1) in the order of their ids
        edges = (logits.double() / 1.5).softmax(-1).cumsum(-1)
        want = (edges <= uniforms[:, None]).sum(-1)
    assert torch.equal(got, want)
    monkeypatch.setattr(sampling, "FEW", 3000)  # no short cut
    assert torch.equal(chosen(logits, uniforms, **settings), got)


@pytest.mark.parametrize("given", [{"top_p": 1}, {"top_p": 1.0, "top_k": 0}, {"top_k": -1}])
def test_no_limits_are_as_if_not_set(given: dict[str, Any]) -> None:
    """As many clients send them: the same draw, and no sort of the vocabulary."""
    assert SamplingParams(temperature=0.7, **given) == SamplingParams(temperature=0.7)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 3}])
def test_random_numbers_next_to_the_ends(settings: dict[str, Any]) -> None:
    """The last token that can be drawn, not one that cannot."""
    logits = torch.tensor([[0.0, 5.0, 4.0, -torch.inf], [-torch.inf, 5.0, 4.0, -torch.inf]])
    for number, allowed in ((0.0, {0, 1}), (1 - 2**-53, {0, 2})):
        uniforms = torch.full((2,), number, dtype=torch.float64)
        assert set(chosen(logits, uniforms, temperature=1.0, **settings).tolist()) <= allowed


@pytest.mark.parametrize("values, fields", CASES["defaults"])
def test_read_defaults(tmp_path: Path, values: Any, fields: dict[str, Any]) -> None:
    file = tmp_path / "generation_config.json"
    if values is not None:
        file.write_text(json.dumps(values))
    want = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    assert read_defaults(file, 512) == Defaults(**want)


def test_a_checkpoint_names_stop_ids_and_suppressed_ones(tmp_path: Path) -> None:
    """Among them its own first greedy token."""
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "tiny-dense")
    options: dict[str, Any] = {"checkpoint": checkpoint, "backend": "reference", "max_seq": 64}
    plain = g4ir.build(None, tmp_path / "plain", **options)
    assert plain.stop_ids() == plain.spec.tokens.eos and plain.suppressed() == ()
    first, second = plain.generate([2, 5, 7], 2, stop_ids=())
    config = {"eos_token_id": [1, second], "suppress_tokens": [first]}
    (checkpoint / "generation_config.json").write_text(json.dumps(config))
    engine = g4ir.build(None, tmp_path / "engine", **options)
    assert engine.stop_ids() == (1, second) and engine.suppressed() == (first,)
    drawn = {"temperature": 1.0, "seed": 5}
    text = engine.generate([2, 5, 7], 30, stop_ids=(), **drawn)
    ends = [i for i, t in enumerate(text) if t in (1, second)]
    want = text[: ends[0] + 1] if ends else text
    assert first not in text and engine.generate([2, 5, 7], 30, **drawn) == want


VOCAB = 50


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def numpy_shaped(
    row: np.ndarray, s: SamplingParams, prompt: Sequence[int], done: Sequence[int]
) -> Any:
    """Biases and penalties as they are defined, in float64."""
    out = row.astype(np.float64)
    for token, bias in s.logit_bias:
        out[token] += bias
    for token in s.suppress:
        out[token] = -np.inf
    for token in {*prompt, *done}:
        factor = s.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token, count in Counter(done).items():
        out[token] -= s.frequency_penalty * count + s.presence_penalty
    return out


TOKENS = st.integers(0, VOCAB - 1)
PENALISED = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
    logit_bias=st.dictionaries(TOKENS, st.floats(-5, 5, width=32)).map(lambda d: (*d.items(),)),
    suppress=st.just((VOCAB - 1,)),
)


@settings(max_examples=60)
@given(st.integers(0, 1000), st.lists(TOKENS, max_size=20), st.integers(0, 8), PENALISED)
def test_penalties(seed: int, tokens: list[int], cut: int, s: SamplingParams) -> None:
    prompt, done = tokens[:cut], tokens[cut:]
    logits, sampler = logits_of(seed)[0], Sampler(s, prompt)
    for token in done:  # counted one by one, as a row does
        sampler.shaped(logits)
        sampler.generated.append(token)
    want = numpy_shaped(logits.numpy(), s, prompt, done)
    np.testing.assert_allclose(sampler.shaped(logits).numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature, min_p", [(0.5, 0.02), (3.0, 0.3), (1.0, 1.0)])
def test_min_p_keeps_a_share_of_the_largest(temperature: float, min_p: float) -> None:
    logits = logits_of(4)[0]
    s = SamplingParams(temperature=temperature, min_p=min_p)
    p = np.exp(logits.numpy().astype(np.float64) / temperature)
    kept = np.isfinite(Sampler(s, []).shaped(logits).numpy())
    assert (kept == (p / p.sum() >= min_p * (p / p.sum()).max())).all() and kept.any()


def test_min_p_comes_before_top_k_and_top_p() -> None:
    """Two tokens are left by min_p: top_p is a share of these two."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.1]]))
    found = set()
    for seed in range(40):
        s = SamplingParams(temperature=1.0, min_p=0.5, top_p=0.6, seed=seed)
        found.add(sample(logits, {0: Sampler(s, [])})[0].token)
    assert found == {0}  # 0.5 of 0.8 is more than 0.6; of all it would be less


def packed(allowed: np.ndarray) -> np.ndarray:
    """int32 words, the lowest bit first, with a word more than is needed."""
    filled = np.zeros(32 * 3, dtype=np.uint8)
    filled[: len(allowed)] = allowed
    return np.packbits(filled, bitorder="little").view(np.int32)


@pytest.mark.parametrize("form", [torch.from_numpy, packed])
def test_a_mask_is_asked_before_each_token(form: Any) -> None:
    wanted, logits = [7, 31, 32, 49, 0], logits_of(2, 2)

    def mask(generated: Sequence[int]) -> Any:
        rest = wanted[len(generated) :]
        return form(np.arange(VOCAB) == rest[0]) if rest else None

    masked = SamplingParams(temperature=1.0, seed=1, allowed=Mock(mask=mask))
    rows = {0: Sampler(masked), 1: Sampler(SamplingParams())}
    for _ in wanted:
        sample(logits, rows)
    assert rows[0].generated == wanted
    assert rows[1].generated == [int(logits[1].argmax())] * len(wanted)
    assert isinstance(sample(logits, rows)[0], sampling.Choice)  # the mask says nothing any more


def test_masks_of_another_form() -> None:
    for mask in (np.ones(VOCAB - 1, dtype=bool), np.ones(1, dtype=np.int32), np.ones(VOCAB)):
        with pytest.raises(InputError, match=r"expected bool \[50\], or int32 \[2\]"):
            sampling.bits(mask, VOCAB)


def test_what_a_mask_does_is_its_own_rows_affair() -> None:
    """It allows nothing, or fails; the row beside it goes on."""

    broken = Mock(mask=Mock(side_effect=KeyError("x")))
    closed = Mock(mask=Mock(return_value=np.zeros(VOCAB, dtype=bool)))
    rows = {i: Sampler(SamplingParams(allowed=m)) for i, m in enumerate((broken, closed, None))}
    found = sample(logits_of(3, 3), rows)
    assert isinstance(found[0], KeyError) and isinstance(found[2], sampling.Choice)
    assert isinstance(found[1], InputError) and "no token is allowed" in str(found[1])


def test_stops_wait_for_min_tokens() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, 1.0]])
    row = Sampler(SamplingParams(min_tokens=2), [], stops=(1,))
    for _ in range(3):
        sample(logits, {0: row})
    assert row.generated == [2, 2, 1]


def test_rows_that_are_not_finite() -> None:
    logits = logits_of(5, 3)
    logits[0, 3], logits[2, 4] = math.nan, math.inf
    found = sample(logits, {i: Sampler(SamplingParams(), []) for i in range(3)})
    assert found[0] is None and found[2] is None and isinstance(found[1], sampling.Choice)


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Whatever is drawn from."""
    logits = logits_of(6)
    s = SamplingParams(temperature=2.0, seed=1, logit_bias=((3, 50.0),), logprobs=4, top_k=2)
    found = sample(logits, {0: Sampler(s, [1])})[0]
    row = logits[0].numpy().astype(np.float64)
    want = row - np.log(np.exp(row).sum())
    assert found.token == 3
    assert found.logprobs.chosen == pytest.approx(want[3], abs=1e-6)
    order = np.argsort(-want)[:4]
    assert [t for t, _ in found.logprobs.top] == order.tolist()
    assert [p for _, p in found.logprobs.top] == pytest.approx(want[order], abs=1e-6)
