"""Log-probabilities of prompts: echo, prompt_logprobs and no new tokens, as evaluators ask them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import g4ir
from g4ir.chat import TokenStream
from g4ir.engine import prefill
from tests.serve.running import NAME, Running, chat_engine, ready
from tests.serve.test_calls import vocabulary

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


def check_offsets(read: Any, text: str) -> None:
    """Each token begins in the text where its offset says; tokens of bytes, where their character
    does."""
    starts, tokens = read["text_offset"], read["tokens"]
    assert starts == sorted(starts) and starts[0] >= 0 and starts[-1] <= len(text)
    for i, (start, token) in enumerate(zip(starts, tokens)):
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            continue
        visible = text.startswith(token, start)
        hidden = token in vocabulary().controls and start == [*starts, len(text)][i + 1]
        assert visible or hidden, (token, start)


def test_scores_of_echo(evaluated: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
                    check_offsets(read, choice["text"])
                    assert len(read["tokens"]) == len(read["text_offset"]) == size + count
                    found = read["token_logprobs"][:size]
                    assert found[0] is None and read["top_logprobs"][0] is None
                    assert found[1:] == pytest.approx(s.logprobs[1:], abs=1e-4)
                    assert all(len(top) == 2 for top in read["top_logprobs"][1:])


NBSP = "a\u00a0b\u200dc\r\nd 🦩"


def units() -> st.SearchStrategy[tuple[str, list[int]]]:
    """One character, or none, and the tokens that it is of."""
    index = vocabulary().tokenizer.token_to_id
    letters = st.sampled_from([(c, [index(c)]) for c in "abc:{"])
    controls = st.sampled_from([("", [i]) for i in sorted(vocabulary().strings)])
    wholes = st.characters(exclude_categories=["Cs"]).map(str.encode)
    broken = st.sampled_from([b"\xc2", b"\xe2\x82", b"\xf0\x9f\xa6", b"\xff"])
    raw = st.one_of(wholes, broken)
    tokens = raw.map(lambda r: (r.decode(errors="replace"), [index(f"<0x{b:02X}>") for b in r]))
    return st.one_of(letters, controls, tokens)


@given(st.lists(units(), max_size=12))
def test_offsets_of_any_tokens(drawn: list[tuple[str, list[int]]]) -> None:
    """Each token begins where its character does; a control token of an answer has none."""
    stream, starts, expected, pieces = TokenStream(vocabulary()), [], [], []
    for i, (_, ids) in enumerate(drawn):
        expected += [sum(len(c) for c, _ in drawn[:i])] * len(ids)
        for token in ids:
            pieces += stream.push(token)
            starts.append(stream.start)
    text = "".join(p.text for p in [*pieces, *stream.flush()] if not p.control)
    assert starts == expected and text == "".join(c for c, _ in drawn)


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
