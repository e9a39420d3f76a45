"""A model of Gemma 3 chats in its own format, though its tokenizer has the turns of Gemma 4 too;
the formats of FunctionGemma and TranslateGemma, by the built-in forms and by own templates."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import g4ir
from g4ir import Engine, load_engine
from g4ir.chat import Template, Vocabulary, make_prompt, render
from g4ir.chat.special_tokens import ALIASES, CALL, CONTROLS
from g4ir.chat.tools import read_tools
from g4ir.engine.requests import Request
from g4ir.engine.scheduler import Scheduler
from g4ir.errors import InputError
from g4ir.generate.conversation import ChatSession
from g4ir.serve.tool_grammar import called, grammar_of
from tests.cases import TABLES
from tests.cli_tools import bpe
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


OWN = Path(__file__).parent / "chat" / "functiongemma.jinja"
FUNCTIONS, HI = TABLES["functiongemma"]["tools"], TABLES["functiongemma"]["asked"]
SO = {"role": "model", "content": "So."}
SYSTEM = {"role": "developer", "content": "You call functions"}


def calls(*arguments: Any) -> dict[str, Any]:
    functions = ({"name": "weather", "arguments": json.dumps(a)} for a in arguments)
    made = [{"type": "function", "id": f"c{i}", "function": f} for i, f in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": made}


def answer(i: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{i}", "content": content}


CALLS = calls({"place": "Oslo", "count": 2}, {"place": "a{}b", "list": [1, True, {"x": "y"}]})
CONVERSATIONS: dict[str, tuple[list[Any], Any]] = {
    "no tools": ([HI], None),
    "system": ([SYSTEM, HI, {"role": "assistant", "content": "Yes."}, HI], None),
    "tools": ([SYSTEM, HI], FUNCTIONS),
    "tools alone": ([HI], FUNCTIONS[:1]),
    "calls": ([SYSTEM, HI, CALLS], FUNCTIONS),
    "results": ([SYSTEM, HI, CALLS, answer(0, "wet"), answer(1, "dry")], FUNCTIONS),
    "after": ([HI, CALLS, answer(1, "a"), answer(0, "b"), SO, HI], FUNCTIONS),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_functiongemma_by_its_template_and_without(name: str) -> None:
    """A template written from the published description, recognised among those of Gemma 3."""
    messages, tools = CONVERSATIONS[name]
    own = Template("functiongemma", "own", OWN.read_text())
    text = render(messages, tools, "functiongemma")
    assert text == render(messages, tools, own)
    with pytest.raises(InputError, match="no reasoning"):
        render(messages, tools, "functiongemma", enable_thinking=True)


def test_results_that_are_json_objects() -> None:
    result = answer(0, '{"temperature": 15, "sky": "grey"}')
    text = render([HI, calls({"place": "Oslo"}), result], FUNCTIONS, "functiongemma")
    end = "response:weather{sky:<escape>grey<escape>,temperature:15}<end_function_response>"
    assert text.endswith("<end_function_call><start_function_response>" + end)
    with pytest.raises(InputError, match="has no image"):
        image = {"type": "image_url", "image_url": {"url": "file:///a"}}
        render([{"role": "user", "content": [image]}], None, "functiongemma")


def tokenizer(*left_out: str) -> Any:
    controls = [c for c in CONTROLS if c not in left_out]
    return bpe([*controls, *(f"<0x{i:02X}>" for i in range(256))], [], controls)


def test_it_is_recognised_by_template_or_tokenizer(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    for folder, words in ((tmp_path, tokenizer()), (plain, tokenizer(*ALIASES))):
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(words.to_str())
    assert Template.open(tmp_path, "gemma3").form == "functiongemma"
    assert Template.open(plain, "gemma3").form == "gemma3"
    assert Template.open(tmp_path, "small").form == "small"
    (plain / "chat_template.jinja").write_text(OWN.read_text())
    opened = Template.open(plain, "gemma3")
    assert opened.form == "functiongemma" and opened.note is None
    words = Vocabulary(tokenizer(), "gemma3")
    names = {words.strings[i] for i in words.ends}
    assert names == {"<end_of_turn>", "<eos>", "<start_function_response>"}
    prompt = make_prompt([SYSTEM, HI], FUNCTIONS, opened)
    ids = words.encode(prompt)
    assert ids.count(words.controls["<end_of_turn>"]) == 2  # that of the user is text
    # Forced calls are written with its own tokens.
    assert words.controls[CALL] == words.controls["<start_function_call>"]
    grammar = grammar_of(called(read_tools(FUNCTIONS), None, False), words.controls)
    assert f"<[{words.controls['<start_function_call>']}]>" in grammar


def part(**fields: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": " Good day ", **fields}]}]


ASKED = part(source_lang_code="en", target_lang_code="pt_BR")


def test_translategemma(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(OWN.with_stem("translategemma").read_text())
    own = Template.open(tmp_path, "gemma3")
    assert own.form == "translategemma"
    for messages in (ASKED, [*ASKED, {"role": "assistant", "content": "Bom dia"}, *ASKED]):
        text = render(messages, form="translategemma")
        assert text == render(messages, form=own).rstrip("\n") + "\n"
        assert make_prompt(messages, form="translategemma").text == text
        assert make_prompt(messages, form=own).text.rstrip("\n") + "\n" == text
    assert "English (en) to Portuguese (pt-BR)" in text


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (part(), "give source_lang_code and target_lang_code"),
        ([{"role": "user", "content": "x"}], "give source_lang_code and target_lang_code"),
        (part(source_lang_code="en", target_lang_code="xx"), "language code xx is not known"),
        (part(source_lang_code="en", target_lang_code=3), "target_lang_code: must be text"),  # type: ignore[arg-type]
        ([{"role": "system", "content": "x"}, *ASKED], "must alternate"),
    ],
)
def test_languages_that_are_refused(messages: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        render(messages, form="translategemma")
    with pytest.raises(InputError, match="no place for them"):
        render(ASKED, FUNCTIONS, "translategemma")
