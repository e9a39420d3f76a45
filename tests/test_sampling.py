"""From logits to tokens: greedy ties, drawing, stop and suppressed ids, several prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.backends import sampling
from g4ir.backends.sampling import (
    Choice,
    Sampler,
    SamplingParams,
    choose,
    draw,
    largest,
    sample,
    uniform,
)
from g4ir.engine.engine import Engine
from g4ir.engine.prompts import Defaults, read_defaults
from tests.engines import random_checkpoint

DRAWS = 20_000
LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5, 0.0])


@pytest.fixture
def engine(engines: Any) -> Engine:
    return engines("reference", "tiny-ple")


def chosen(logits: torch.Tensor, uniforms: torch.Tensor, **settings: Any) -> torch.Tensor:
    """The token of each row [B, vocab], all with the same settings."""
    params = SamplingParams(**settings)
    draws = torch.tensor([params.draw], dtype=torch.float64).expand(len(logits), -1)
    return choose(logits.float(), uniforms, draws, params.way)


def numbers(count: int, seed: int = 3) -> torch.Tensor:
    """The random numbers of a sequence's first tokens."""
    return torch.tensor([uniform(seed, i) for i in range(count)], dtype=torch.float64)


def counts(**settings: Any) -> torch.Tensor:
    """How often each token of LOGITS is drawn in DRAWS draws."""
    found = chosen(LOGITS.expand(DRAWS, -1), numbers(DRAWS), **settings)
    return torch.bincount(found, minlength=len(LOGITS))


def test_random_numbers_are_uniform() -> None:
    """Of one seed, of neighbouring seeds, and of both together; a function of seed and index."""
    for found in (
        numbers(DRAWS, 0),
        torch.tensor([uniform(seed, 0) for seed in range(DRAWS)]),
        torch.tensor([uniform(i, i) for i in range(DRAWS)]),
    ):
        assert found.min() >= 0 and found.max() < 1
        bins = torch.histc(found, 20, 0, 1)
        fits(bins, torch.full((20,), 1 / 20))
    a, b = numbers(DRAWS, 7), numbers(DRAWS, 8)
    assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 0.03
    assert abs(torch.corrcoef(torch.stack((a[1:], a[:-1])))[0, 1]) < 0.03
    assert uniform((1 << 63) - 1, 5) == uniform((1 << 63) - 1, 5) != uniform(0, 5)


def fits(found: torch.Tensor, p: torch.Tensor) -> None:
    """Counts within five standard deviations of what the probabilities say; nothing else drawn."""
    assert not found[p == 0].any()
    spread = (DRAWS * p * (1 - p)).sqrt()
    assert ((found - DRAWS * p).abs() <= 5 * spread + 1).all(), f"{found.tolist()} of {p.tolist()}"


def only(p: torch.Tensor, keep: list[int]) -> torch.Tensor:
    """Probabilities of the kept tokens, adding up to 1."""
    out = torch.zeros_like(p)
    out[keep] = p[keep]
    return out / out.sum()


# --- greedy -----------------------------------------------------------------------------------


def greedy(logits: torch.Tensor, **settings: Any) -> list[int]:
    rows = {i: Sampler(SamplingParams(**settings)) for i in range(len(logits))}
    return [c.token for c in sample(logits, rows).values() if isinstance(c, Choice)]


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 1.0]])
    assert greedy(logits) == [1, 0, 3]
    assert greedy(logits.bfloat16()) == [1, 0, 3]
    assert greedy(torch.zeros(2, 262_144)) == [0, 0]


def test_greedy_leaves_the_logits_alone() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert greedy(logits, suppress=(1,)) == [2]
    assert logits.tolist() == [[0.0, 5.0, 1.0]]


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}])
def test_narrowest_draw_is_greedy(settings: dict[str, Any]) -> None:
    assert counts(**{"temperature": 1.0, **settings})[1] == DRAWS


# --- drawing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0, 50.0])
def test_temperature(temperature: float) -> None:
    fits(counts(temperature=temperature), (LOGITS / temperature).softmax(-1))


@pytest.mark.parametrize(
    "k, keep",
    [
        (2, [1, 4]),
        (3, [1, 4, 2]),
        (6, [*range(6)]),
        (99, [*range(6)]),
    ],
)
def test_top_k(k: int, keep: list[int]) -> None:
    fits(counts(temperature=1.0, top_k=k), only(LOGITS.softmax(-1), keep))


@pytest.mark.parametrize(
    "p, keep",
    [
        (0.3, [1]),
        (0.6, [1, 4]),
        (0.8, [1, 4, 2]),
        (1.0, [*range(6)]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_it(p: float, keep: list[int]) -> None:
    fits(counts(temperature=1.0, top_p=p), only(LOGITS.softmax(-1), keep))


def test_top_p_counts_within_top_k() -> None:
    """0.47, 0.28 and 0.17 of all are 0.50, 0.30 and 0.19 of the first three."""
    fits(counts(temperature=1.0, top_k=3, top_p=0.79), only(LOGITS.softmax(-1), [1, 4]))


def test_top_p_follows_the_temperature() -> None:
    fits(counts(temperature=0.2, top_p=0.9), only((LOGITS / 0.2).softmax(-1), [1]))


def test_same_seed_same_draws() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        for _ in range(40):
            sample(logits, {0: sampler})
        return sampler.generated

    assert draws(7) == draws(7) != draws(8)
    assert draws(None) != draws(None)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1}])
def test_suppressed_tokens_are_never_chosen(settings: dict[str, Any]) -> None:
    rows = {i: Sampler(SamplingParams(suppress=(1, 4), seed=i, **settings)) for i in range(1000)}
    sample(LOGITS.expand(1000, -1), rows)
    found = {row.generated[0] for row in rows.values()}
    assert 2 in found and not {1, 4} & found


@pytest.mark.parametrize("k", [1, 7, 64, 300])
def test_largest_are_those_of_a_stable_sort(k: int) -> None:
    """With many equal ones, both zeros, and infinities."""
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(k)).bfloat16().float()
    logits[0, ::5], logits[0, 1::5] = 0.0, -0.0
    logits[1, 100:2000] = -float("inf")
    logits[2, 7:9] = float("inf")
    values, index = largest(logits, k)
    want = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(index, want.indices[:, :k]) and torch.equal(values, want.values[:, :k])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 50},
        {"top_p": 0.7},
        {"top_k": 1500, "top_p": 0.5},
        {"top_p": 0.9999},
    ],
)
def test_short_cuts_draw_the_same(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """As everything sorted, which is what a device does for top_p."""
    settings = {"temperature": 1.5, **settings}
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3000, generator=random) * 3
    uniforms = torch.rand(40, dtype=torch.float64, generator=random)
    got = chosen(logits, uniforms, **settings)
    order = logits.sort(dim=-1, descending=True, stable=True)
    if len(settings) > 1:
        draws = torch.tensor([SamplingParams(**settings).draw], dtype=torch.float64)
        want = draw(order.values, order.indices, uniforms, draws.expand(40, -1))
    else:  # tokens lie side by side in [0, 1) in the order of their ids
        edges = (logits.double() / 1.5).softmax(-1).cumsum(-1)
        want = (edges <= uniforms[:, None]).sum(-1)
    assert torch.equal(got, want)
    monkeypatch.setattr(sampling, "FEW", 3000)  # no short cut
    assert torch.equal(chosen(logits, uniforms, **settings), got)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 3}])
def test_random_numbers_next_to_the_ends(settings: dict[str, Any]) -> None:
    """The last token that can be drawn, not one that cannot."""
    logits = torch.tensor([[0.0, 5.0, 4.0, -torch.inf], [-torch.inf, 5.0, 4.0, -torch.inf]])
    for number, allowed in ((0.0, {0, 1}), (1 - 2**-53, {0, 2})):
        uniforms = torch.full((2,), number, dtype=torch.float64)
        assert set(chosen(logits, uniforms, temperature=1.0, **settings).tolist()) <= allowed


def test_what_is_no_number_draws_a_token() -> None:
    """Which token does not matter: the step is refused. It has to be one that exists."""
    logits = torch.full((1, 9), torch.nan)
    for settings in ({}, {"top_k": 3}, {"top_p": 0.5}):
        found = chosen(logits, torch.tensor([0.5]).double(), temperature=1.0, **settings)
        assert 0 <= int(found) < 9


# --- generation_config.json -------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, expected",
    [
        (None, Defaults()),
        ({}, Defaults()),
        ({"eos_token_id": 5}, Defaults(stop=(5,))),
        ({"eos_token_id": [1, 106, 50]}, Defaults(stop=(1, 106, 50))),
        ({"eos_token_id": [1, 999_999]}, Defaults(stop=(1,))),
        ({"suppress_tokens": [7, 8]}, Defaults(suppress=(7, 8))),
        ({"suppress_tokens": None}, Defaults()),
        ({"temperature": 0.7, "top_k": 64}, Defaults()),
        (
            {"do_sample": True, "top_k": 64, "top_p": 0.95},
            Defaults(temperature=1.0, top_k=64, top_p=0.95),
        ),
        ({"do_sample": True, "top_k": 0}, Defaults(temperature=1.0)),
        ({"do_sample": True, "min_p": 0.05}, Defaults(temperature=1.0, min_p=0.05)),
        ({"min_p": 0.05, "repetition_penalty": 1.1}, Defaults(repetition_penalty=1.1)),
        (
            {"repetition_penalty": 1.0, "presence_penalty": 0.5, "min_new_tokens": 3},
            Defaults(presence_penalty=0.5, min_tokens=3),
        ),
        (
            {"no_repeat_ngram_size": 3, "typical_p": 1.0, "num_beams": 4, "xtc_probability": 0.5},
            Defaults(unused=("no_repeat_ngram_size", "num_beams", "xtc_probability")),
        ),
        ({"_from_model_config": True, "transformers_version": "5.0"}, Defaults()),
    ],
)
def test_read_defaults(tmp_path: Path, values: Any, expected: Defaults) -> None:
    file = tmp_path / "generation_config.json"
    if values is not None:
        file.write_text(json.dumps(values))
    assert read_defaults(file, 512) == expected


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine whose checkpoint names stop ids, and suppresses its own first greedy token."""
    folder = tmp_path_factory.mktemp("configured")
    checkpoint = random_checkpoint(folder / "checkpoint", "tiny-dense")
    options: dict[str, Any] = {"checkpoint": checkpoint, "backend": "reference", "max_seq": 64}
    plain = g4ir.build(None, folder / "plain", **options)
    first, second = plain.generate([2, 5, 7], 2, stop_ids=())
    config = {"eos_token_id": [1, second], "suppress_tokens": [first]}
    (checkpoint / "generation_config.json").write_text(json.dumps(config))
    engine = g4ir.build(None, folder / "engine", **options)
    assert engine.stop_ids() == (1, second) and engine.suppressed() == (first,)
    return engine


def test_suppressed_in_greedy_and_drawn_text(configured: Engine) -> None:
    (first,) = configured.suppressed()
    greedy = configured.generate([2, 5, 7], 20, stop_ids=())
    drawn = configured.generate([2, 5, 7], 60, temperature=3.0, seed=0, stop_ids=())
    assert first not in greedy and first not in drawn


def test_stop_ids_come_from_the_checkpoint(configured: Engine) -> None:
    text = configured.generate([2, 5, 7], 30, temperature=1.0, seed=5, stop_ids=())
    stop = configured.stop_ids()
    ends = [i for i, t in enumerate(text) if t in stop]
    want = text[: ends[0] + 1] if ends else text
    assert configured.generate([2, 5, 7], 30, temperature=1.0, seed=5) == want


def test_stop_ids_of_the_spec_without_a_config(engine: Engine) -> None:
    assert engine.stop_ids() == engine.spec.tokens.eos and engine.suppressed() == ()


# --- generate ---------------------------------------------------------------------------------
