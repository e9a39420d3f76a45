"""Log-probabilities of prompts: echo, prompt_logprobs and no new tokens, as evaluators ask them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import g4ir
from g4ir.engine import prefill
from tests.serve.running import NAME, Running, chat_engine, ready

TEXTS = ["some words of a text and more", "ünï🦩"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "engine"
    return chat_engine(folder, all_logits=True)


@pytest.fixture(scope="module")
def evaluated(folder: Path) -> Iterator[Running]:
    with ready(folder) as r:
        yield r


def complete(r: Running, **given: Any) -> Any:
    with r.client() as client:
        got = client.post("/v1/completions", json={"model": NAME, "max_tokens": 0, **given})
    assert got.status_code == 200, got.text
    return got.json()


def test_an_echo_has_the_scores_of_its_tokens(
    evaluated: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of `score`, in chunks of any size, with a generated token behind them or not,
    by text and by ids."""
    with g4ir.load_engine(folder) as engine:
        scores = g4ir.score(engine, TEXTS)
    ids = [list(s.ids) for s in scores]
    for most in (1 << 25, 512 * 5):
        monkeypatch.setattr(prefill, "CHUNK_LOGITS", most)
        for prompt in (TEXTS, ids):
            for count in (0, 1):
                got = complete(evaluated, prompt=prompt, echo=True, logprobs=2, max_tokens=count)
                assert got["usage"]["completion_tokens"] == count * 2
                for choice, s, text in zip(got["choices"], scores, TEXTS):
                    read = choice["logprobs"]
                    assert text in choice["text"] and choice["finish_reason"] == "length"
                    size = len(s.ids)
                    if not any(token.startswith("<0x") for token in read["tokens"]):
                        end = read["text_offset"][-1] + len(read["tokens"][-1])
                        assert end == len(choice["text"])
                    assert len(read["tokens"]) == len(read["text_offset"]) == size + count
                    found = read["token_logprobs"][:size]
                    assert found[0] is None and read["top_logprobs"][0] is None
                    assert found[1:] == pytest.approx(s.logprobs[1:], abs=1e-4)
                    assert all(len(top) == 2 for top in read["top_logprobs"][1:])


def test_prompt_logprobs(evaluated: Running) -> None:
    """By token id, as vLLM has them, in completions and in chats."""
    choice = complete(evaluated, prompt=TEXTS[0], prompt_logprobs=3)["choices"][0]
    assert choice["text"] == "" and choice["logprobs"] is None
    echoed = complete(evaluated, prompt=TEXTS[0], echo=True, logprobs=3)["choices"][0]
    rows, read = choice["prompt_logprobs"], echoed["logprobs"]
    assert rows[0] is None and len(rows) == len(read["tokens"])
    for row, token, value in zip(rows[1:], read["tokens"][1:], read["token_logprobs"][1:]):
        assert 3 <= len(row) <= 4
        assert [r["rank"] for r in row.values()][:3] == [1, 2, 3]
        assert any(r["decoded_token"] == token and r["logprob"] == value for r in row.values())
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "prompt_logprobs": 0}
    with evaluated.client() as client:
        got = client.post("/v1/chat/completions", json=body).json()
    assert len(got["prompt_logprobs"]) == got["usage"]["prompt_tokens"]
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_echo_of_a_text_alone(served: Running) -> None:
    """That needs no log-probabilities, and so no engine with --all-logits."""
    assert complete(served, prompt="some words", echo=True)["choices"][0]["text"] == "some words"
    got = complete(served, prompt="some words", echo=True, max_tokens=3, temperature=0)
    plain = complete(served, prompt="some words", max_tokens=3, temperature=0)
    assert got["choices"][0]["text"] == "some words" + plain["choices"][0]["text"]
