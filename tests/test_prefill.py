"""Prompts computed in a row of their own, as far at a time as they are asked to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import g4ir
from g4ir.engine.engine import Engine
from g4ir.engine.prefill import Prefiller, PrefillInput
from g4ir.errors import InputError

CHUNK = 8
TOKENS = tuple(range(2, 42))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("prefiller") / "engine"
    limits = {"max_seq": 64, "prefill_chunk": CHUNK, "max_batch": 2}
    with g4ir.build("tiny-ple", folder, backend="reference", random_weights=0, **limits) as e:
        yield e


def wanted(engine: Engine, tokens: tuple[int, ...]) -> torch.Tensor:
    return engine.session().prefill(torch.tensor([tokens]))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they differ by no more than other sizes of chunks make."""
    return torch.allclose(a, b, rtol=0, atol=1e-4)


def computed(
    prefiller: Prefiller, prompt: PrefillInput, size: int
) -> tuple[list[int], torch.Tensor]:
    """How far each chunk went, and the logits."""
    held = []
    for logits in prefiller.chunks(prompt, lambda start: start + size):
        held.append(prefiller.held)
        if logits is not None:
            return held, logits.float()
    raise AssertionError("no logits")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 20), st.integers(1, len(TOKENS)), st.sets(st.integers(1, 39), max_size=3))
def test_any_size_of_chunks(engine: Engine, size: int, count: int, marks: set[int]) -> None:
    """The logits are those of the whole prompt; no chunk is longer than asked for, nor than what
    the engine was built for, and none goes over a mark."""
    prefiller, tokens = Prefiller(engine), TOKENS[:count]
    held, logits = computed(prefiller, PrefillInput(tokens, marks=tuple(marks)), size)
    assert close(logits, wanted(engine, tokens))
    assert held[-1] == count and {m for m in marks if m < count} <= {*held}
    assert all(b - a <= min(max(size, 1), CHUNK) for a, b in zip([0, *held], held, strict=False))
    assert len(prefiller.prefixes) == sum(m < count for m in marks)


def test_a_prompt_that_is_left_and_asked_for_again(engine: Engine) -> None:
    prefiller, prompt = Prefiller(engine), PrefillInput(TOKENS)
    chunks = prefiller.chunks(prompt, lambda start: start + CHUNK)
    assert [next(chunks), next(chunks)] == [None, None] and prefiller.held == 2 * CHUNK
    chunks.close()
    held, logits = computed(prefiller, prompt, 100)
    assert prefiller.known == 2 * CHUNK and held[0] == 3 * CHUNK
    assert close(logits, wanted(engine, TOKENS))


def test_what_a_broken_step_left_is_not_used(engine: Engine) -> None:
    prefiller, prompt = Prefiller(engine), PrefillInput(TOKENS)
    computed(prefiller, prompt, CHUNK)
    prefiller.forget()
    assert prefiller.held == 0
    _, logits = computed(prefiller, prompt, CHUNK)
    assert prefiller.known == 0 and close(logits, wanted(engine, TOKENS))


def test_a_prompt_that_is_refused_harms_no_other(engine: Engine) -> None:
    prefiller = Prefiller(engine)
    with pytest.raises(InputError, match="max-seq"):
        computed(prefiller, PrefillInput(TOKENS + TOKENS), 100)
    _, logits = computed(prefiller, PrefillInput(TOKENS), 100)
    assert close(logits, wanted(engine, TOKENS))
