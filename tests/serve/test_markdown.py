"""Markdown on the page, in a real browser: which nodes it becomes, while it grows too, and that no
text becomes a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases import read_table
from tests.serve.chromium import Page, chromium, find_chromium
from tests.serve.running import Running

MISSING = "no Chromium: apt-get install chromium"
pytestmark = [pytest.mark.full, pytest.mark.skipif(not find_chromium(), reason=MISSING)]
TABLE = read_table("serve/markdown.yaml")
SCRIPT = Path(__file__).with_name("markdown.js").read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, served: Running) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        tab.go(f"{served.url}/")
        tab.run("state.started.then(() => 1)")
        tab.run(f"{SCRIPT};0")
        yield tab
        assert not tab.told("Runtime.exceptionThrown")


def call(page: Page, function: str, *given: Any) -> Any:
    return page.run(f"({function})({', '.join(json.dumps(g) for g in given)})")


@pytest.mark.parametrize("kind", ["cases", "live"])
def test_nodes(page: Page, kind: str) -> None:
    markup = "(source, live) => shown(source, live).innerHTML"
    for source, html in TABLE[kind]:
        assert call(page, markup, source, kind == "live") == html, source


def test_a_text_that_grows(page: Page) -> None:
    """It is what it would be at once, and blocks that are complete keep their nodes."""
    same, lost, kept = call(page, "growsAsWhole", TABLE["long"])
    assert same and kept > 8 and lost <= 1  # the head of a table is a paragraph at first


def test_a_long_answer_streams_within_a_frame(page: Page) -> None:
    """A piece of a long answer, of which many come in a second, takes less than half a frame."""
    assert call(page, "timeOfPiece", TABLE["long"] * 12) < 8


def test_code_that_grows_keeps_its_selection(page: Page) -> None:
    assert call(page, "codeThatGrows") == [True, "first\nsecond"]


def repeated(texts: str | list[str], size: int) -> str:
    parts = ["", texts] if isinstance(texts, str) else texts
    count = size // len("".join(parts[1::2]))
    return "".join(part * (count if i % 2 else 1) for i, part in enumerate(parts))


@pytest.mark.parametrize("texts", TABLE["repeated"])
def test_repeated_texts(page: Page, texts: str | list[str]) -> None:
    """What is quadratic takes 16 times as long for four times the text; what a text that is short
    takes counts as 20 ms."""
    short, long = (call(page, "timeOfShowing", repeated(texts, size)) for size in (10_000, 40_000))
    assert long < 9 * max(short, 20)
    bold = "(text) => [...shown(text).querySelectorAll('strong')].at(-1)?.textContent"
    assert call(page, bold, repeated(texts, 10_000) + "\n\n**end**") == "end"


def test_a_list_with_many_blank_lines(page: Page) -> None:
    source = "- a" + "\n" * 200_000 + "  b"  # more than one call takes arguments
    assert call(page, "(text) => shown(text).textContent", source) == "ab"


def test_no_scripts_of_texts(page: Page) -> None:
    """As an answer, and everywhere in a conversation that is imported."""
    assert all(isinstance(text, str) for text in TABLE["xss"])
    for text in TABLE["xss"]:
        assert call(page, "(text) => unsafe(shown(text))", text) == [], text
        assert call(page, "(text) => unsafe(shown(text, true))", text) == [], text
    messages: list[dict[str, Any]] = []
    for i, text in enumerate(TABLE["xss"]):
        function = {"name": text, "arguments": json.dumps({text: text})}
        calls = [{"id": str(i), "type": "function", "function": function}]
        file = [{"type": "text", "text": f"{text}:\n{text}"}, {"type": "text", "text": text}]
        picture = {"type": "image_url", "image_url": {"url": text}}
        messages += [
            {"role": "user", "content": [picture, *file]},
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": calls},
            {"role": "tool", "tool_call_id": str(i), "content": text},
        ]
    talks = [{"title": text, "messages": messages[:1]} for text in TABLE["xss"]]
    whole = json.dumps({"conversations": [*talks, {"messages": messages}]})
    count = len(TABLE["xss"])
    assert call(page, "afterImport", whole) == [count, count + 1, [], [], []]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1400])
def test_a_long_answer_fits(page: Page, width: int, scheme: str) -> None:
    """Nothing is wider than its column; what has to be scrolls in itself."""
    page.look(width, 700, scheme)
    assert call(page, "widthsOf", TABLE["long"]) == [width, 0, "auto", width]
    wide = f"|{'word ' * 30}|{'x' * 200}|\n|-|-|\n"
    assert call(page, "widthsOf", f"{TABLE['long']}\n\n{wide}")[:2] == [width, 0]
