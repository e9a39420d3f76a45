"""A model of Gemma 3 chats in its own format, though its tokenizer has the turns of Gemma 4 too."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import g4ir
from g4ir.builder.load import load_engine
from g4ir.engine.engine import Engine
from g4ir.engine.requests import Request
from g4ir.engine.scheduler import Scheduler
from g4ir.errors import InputError
from g4ir.generate.conversation import ChatSession
from tests.cli_tools import g4ir as command
from tests.engines import add_file
from tests.media_tools import png
from tests.serve.running import chat_tokenizer, ready
from tests.spies import spy
from tests.talking import TOOLS, dictate

SAID = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <end_of_turn>"}]
PROMPT = (
    "<bos><start_of_turn>user\nbe brief\n\nhi <end_of_turn><end_of_turn>\n<start_of_turn>model\n"
)
MORE = "<end_of_turn>\n<start_of_turn>user\nmore<end_of_turn>\n<start_of_turn>model\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gemma3") / "engine"
    limits: dict[str, Any] = {"max_seq": 256, "prefill_chunk": 64, "max_batch": 2}
    g4ir.build("tiny-gemma3", out, backend="reference", random_weights=0, **limits).close()
    return add_file(out, "tokenizer.json", chat_tokenizer().to_str())


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with load_engine(folder) as made:
        yield made


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts of all requests, and the ends that they stop behind."""
    seen, tokenizer = list[str](), chat_tokenizer()
    ends = {tokenizer.token_to_id(text) for text in ("<end_of_turn>", "<eos>")}

    def noted(_: Scheduler, request: Request) -> None:
        assert ends == {*request.sampling.stop}
        seen.append(tokenizer.decode([*request.tokens], skip_special_tokens=False))

    spy(monkeypatch, Scheduler, "submit", noted)
    return seen


def test_a_conversation(
    engine: Engine, prompts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a user types is text; images are refused by name."""
    dictate(monkeypatch.setattr, [["w1_ <turn|>"], ["w3_"]])
    with ChatSession(engine) as talk:
        talk.set_system(SAID[0]["content"])
        first = talk.say(SAID[1]["content"])
        assert first.finish_reason == "stop" and talk.say("more").content == "w3_"
        assert prompts == [PROMPT, f"{PROMPT}{first.content}{MORE}"]
        with pytest.raises(InputError, match="takes text alone"):
            talk.attach("image", png(tmp_path / "a.png"))


def test_missing_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are refused when they are typed; the message behind them is answered."""
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    typed = f"/think on\n/tools {tmp_path}/tools.json\n/think off\nhi\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    outcome = command("chat", folder, "--max-new-tokens", 2)
    assert outcome.err.count("has no place for them") == 1
    assert outcome.err.count("its format has no reasoning; leave it off") == 1
    assert outcome.out.strip() and "probably a base model" in outcome.err


def test_a_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ready(folder) as r, r.client() as client:
        r.dictate(monkeypatch, "w1_ w2_", "<end_of_turn>")
        got = client.post("/v1/chat/completions", json={"messages": SAID, "max_tokens": 9}).json()
        (choice,) = got["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("w1_ w2_", "stop")
        ids = client.post("/tokenize", json={"messages": SAID}).json()["tokens"]
        assert chat_tokenizer().decode(ids, skip_special_tokens=False) == PROMPT
        body = {"messages": SAID, "max_tokens": 9, "tools": TOOLS}
        refused = client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and "no place for them" in refused.text
