"""Sampling settings of each sequence, in any batch, against their formulas in numpy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from g4ir.backends.sampling import (
    Choice,
    Sampler,
    SamplingParams,
    bits,
    read_logprobs,
    sample,
)
from g4ir.errors import InputError

VOCAB = 50
PLAIN: list[dict[str, Any]] = [
    {},
    {"suppress": (1, 4)},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_k": 5, "seed": 6},
    {"temperature": 1.3, "top_k": 5, "seed": 7},
    {"temperature": 0.7, "top_k": 5, "seed": 8, "suppress": (0, 2, 3)},
    {"temperature": 1.0, "top_p": 0.8, "seed": 9},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 7, "seed": 10},
]


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


# --- plain settings -----------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_plain_settings_draw_as_alone(vocab: int) -> None:
    """All in one call, in which equal ways to choose are drawn together; 20 steps."""
    rows = {2 * i: Sampler(SamplingParams(**given), [3]) for i, given in enumerate(PLAIN)}
    alone = [Sampler(SamplingParams(**given), [3]) for given in PLAIN]
    for step in range(20):
        logits = logits_of(step, 2 * len(PLAIN), vocab)
        want = [sample(logits[2 * i : 2 * i + 1], {0: s})[0] for i, s in enumerate(alone)]
        got = sample(logits, rows)
        assert [got[2 * i] for i in range(len(PLAIN))] == want
    assert all(len(r.generated) == 20 for r in rows.values())


def test_greedy_rows_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a copy")

    monkeypatch.setattr(Sampler, "shaped", refuse)
    logits = logits_of(0, 3)
    rows = {i: Sampler(SamplingParams(suppress=(int(logits[i].argmin()),)), []) for i in range(3)}
    found = sample(logits, rows)
    assert found == {i: Choice(int(logits[i].argmax())) for i in range(3)}


def test_a_row_is_the_same_beside_others() -> None:
    """Whatever they ask for."""
    given = {"temperature": 0.9, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.4}
    alone = Sampler(SamplingParams(**given), [1, 2])
    rows = {0: Sampler(SamplingParams(**given), [1, 2])}
    rows |= {i + 1: Sampler(SamplingParams(**p), [7]) for i, p in enumerate(PLAIN)}
    for step in range(15):
        logits = logits_of(step, 1 + len(PLAIN))
        assert sample(logits[:1], {0: alone})[0] == sample(logits, rows)[0]


# --- biases, penalties, min_p -------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.integers(0, 1000),
    st.lists(st.integers(0, VOCAB - 1), max_size=8),
    st.lists(st.integers(0, VOCAB - 1), max_size=12),
    st.sampled_from([0.0, 0.5, -1.5]),
    st.sampled_from([0.0, 0.25, -2.0]),
    st.sampled_from([1.0, 1.3, 0.6]),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32), max_size=4),
)
def test_penalties_are_their_formulas(
    seed: int,
    prompt: list[int],
    done: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
) -> None:
    s = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
        suppress=(VOCAB - 1,),
    )
    logits, sampler = logits_of(seed)[0], Sampler(s, prompt)
    for token in done:  # counted one by one, as a row does
        sampler.shaped(logits)
        sampler.generated.append(token)
    want = numpy_shaped(logits.numpy(), s, prompt, done)
    np.testing.assert_allclose(sampler.shaped(logits).numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
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


def test_greedy_ignores_the_filters_of_draws() -> None:
    logits = logits_of(1)
    s = SamplingParams(temperature=0.0, min_p=0.9, top_k=3, top_p=0.1)
    assert sample(logits, {0: Sampler(s, [])})[0] == Choice(int(logits.argmax()))


# --- what may be chosen -------------------------------------------------------------------------


class Grammar:
    """Allows one token after the other."""

    def __init__(self, tokens: Sequence[int], form: Any) -> None:
        self.tokens, self.form = tokens, form

    def mask(self, generated: Sequence[int]) -> Any:
        if len(generated) == len(self.tokens):
            return None
        allowed = np.zeros(VOCAB, dtype=bool)
        allowed[self.tokens[len(generated)]] = True
        return self.form(allowed)


def packed(allowed: np.ndarray) -> np.ndarray:
    """int32 words, the lowest bit first, with a word more than is needed."""
    filled = np.zeros(32 * 3, dtype=np.uint8)
    filled[: len(allowed)] = allowed
    return np.packbits(filled, bitorder="little").view(np.int32)


@pytest.mark.parametrize("form", [lambda a: a, torch.from_numpy, packed])
@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0, "seed": 1}])
def test_a_mask_is_asked_before_each_token(form: Any, drawn: dict[str, Any]) -> None:
    wanted, logits = [7, 31, 32, 49, 0], logits_of(2, 2)
    rows = {0: Sampler(SamplingParams(allowed=Grammar(wanted, form), **drawn), [])}
    rows[1] = Sampler(SamplingParams(), [])
    for _ in wanted:
        sample(logits, rows)
    assert rows[0].generated == wanted
    assert rows[1].generated == [int(logits[1].argmax())] * len(wanted)
    assert isinstance(sample(logits, rows)[0], Choice)  # the mask says nothing any more


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_bits_of_words(allowed: list[bool]) -> None:
    words = np.zeros(-(-len(allowed) // 32) * 32, dtype=np.uint8)
    words[: len(allowed)] = allowed
    read = np.packbits(words, bitorder="little").view(np.int32)
    assert bits(read, len(allowed)).tolist() == allowed


@pytest.mark.parametrize(
    "mask", [np.ones(VOCAB - 1, dtype=bool), np.ones(1, dtype=np.int32), np.ones(VOCAB)]
)
def test_masks_of_another_form(mask: Any) -> None:
    with pytest.raises(InputError, match=r"expected bool \[50\], or int32 \[2\]"):
        bits(mask, VOCAB)


def test_what_a_mask_does_is_its_own_rows_affair() -> None:
    """It allows nothing, or fails; the row beside it goes on."""

    class Broken:
        def mask(self, generated: Sequence[int]) -> Any:
            raise KeyError("x")

    class Closed:
        def mask(self, generated: Sequence[int]) -> Any:
            return np.zeros(VOCAB, dtype=bool)

    logits = logits_of(3, 3)
    found = sample(
        logits,
        {
            0: Sampler(SamplingParams(allowed=Broken()), []),
            1: Sampler(SamplingParams(allowed=Closed()), []),
            2: Sampler(SamplingParams(), []),
        },
    )
    assert isinstance(found[0], KeyError) and isinstance(found[2], Choice)
    assert isinstance(found[1], InputError) and "none may be chosen" in str(found[1])


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
    assert found[0] is None and found[2] is None and isinstance(found[1], Choice)


# --- log-probabilities --------------------------------------------------------------------------


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


def test_logprobs_of_equal_logits_and_of_few() -> None:
    found = read_logprobs(torch.zeros(4), 2, 3)
    assert [t for t, _ in found.top] == [0, 1, 2] and found.chosen == pytest.approx(-math.log(4))
    assert read_logprobs(torch.zeros(4), 2, 0).top == ()
    assert len(read_logprobs(torch.zeros(4), 2, 9).top) == 4


# --- settings that are wrong --------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, says",
    [
        ({"min_p": 1.5}, "min_p 1.5: expected a share"),
        ({"min_p": math.nan}, "min_p nan"),
        ({"presence_penalty": math.inf}, "presence_penalty: inf: expected -1e\\+09 to 1e\\+09"),
        ({"frequency_penalty": math.nan}, "frequency_penalty: nan"),
        ({"frequency_penalty": 10**400}, "frequency_penalty: 10000000000000000000: expected"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0: expected 1e-09 to"),
        ({"repetition_penalty": math.nan}, "repetition_penalty nan"),
        ({"logit_bias": ((4, math.inf),)}, "logit_bias of token 4: inf"),
        ({"min_tokens": -1}, "min_tokens -1"),
        ({"logprobs": -1}, "logprobs -1"),
        ({"temperature": -1.0}, "temperature -1.0"),
    ],
)
def test_settings_that_are_wrong(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        SamplingParams(**given)
