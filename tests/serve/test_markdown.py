"""Markdown on the page, in a real browser: which nodes it becomes, while it grows too, and that no
text becomes a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serve.chromium import Page, chromium, find_chromium
from tests.serve.running import Running

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not find_chromium(), reason="no Chromium: apt-get install chromium"),
]
TABLE = yaml.safe_load(Path(__file__).with_name("markdown.yaml").read_text())
#: shows a text in an element of its own
SHOWN = """globalThis.shown = (source, live) => {
  const element = made('div', { class: 'text' });
  log.replaceChildren(made('li', { class: 'assistant' }, element));
  new Markdown(element).set(source, live);
  return element;
}"""
#: scripts that ran, and nodes, attributes and addresses that no text may become
UNSAFE = """(element) => {
  const tags = ('P H3 H4 H5 H6 HR UL OL LI BLOCKQUOTE DIV TABLE THEAD TBODY TR TH TD PRE CODE SPAN'
    + ' BUTTON EM STRONG DEL BR A DETAILS SUMMARY TEXTAREA LABEL SMALL').split(' ');
  const names = ('class tabindex role type href title target rel start aria-label aria-busy'
    + ' aria-current placeholder rows readonly').split(' ');
  const wrong = [...globalThis.ran];
  for (const e of element.querySelectorAll('*')) {
    if (!tags.includes(e.tagName.toUpperCase())) wrong.push(e.tagName);
    for (const { name, value } of e.attributes) {
      if (!names.includes(name)) wrong.push(`${e.tagName} ${name}`);
      if (name === 'href' && !/^https?:/.test(value)) wrong.push(value);
    }
  }
  return wrong;
}"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, served: Running) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        tab.go(f"{served.url}/")
        tab.run("state.started.then(() => 1)")
        tab.run(f"globalThis.ran = []; globalThis.pwned = () => ran.push('a script'); {SHOWN}")
        tab.run(f"globalThis.unsafe = {UNSAFE}")
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
    grown = """(source) => {
      const [element, first] = [made('div'), []];
      const markdown = new Markdown(element);
      for (let end = 0; end < source.length; end += 3) {
        markdown.set(source.slice(0, end), true);
        if (shown(source.slice(0, end), true).innerHTML !== element.innerHTML) return end;
        const { childNodes } = element;
        if (childNodes.length > first.length + 1) first.push(childNodes[first.length]);
      }
      markdown.set(source);
      const kept = first.filter((node, i) => node === element.childNodes[i]).length;
      return [element.innerHTML === shown(source).innerHTML, first.length - kept, first.length];
    }"""
    same, lost, kept = call(page, grown, TABLE["long"])
    assert same and kept > 8 and lost <= 1  # the head of a table is a paragraph at first


def test_code_that_grows_keeps_its_selection(page: Page) -> None:
    script = """() => {
      const markdown = new Markdown(made('div'));
      markdown.set('```py\\nfirst', true);
      const code = markdown.element.querySelector('code');
      markdown.set('```py\\nfirst\\nsecond\\n```\\n');
      return [code === markdown.element.querySelector('code'), code.textContent];
    }"""
    assert call(page, script) == [True, "first\nsecond"]


def repeated(texts: str | list[str], size: int) -> str:
    parts = ["", texts] if isinstance(texts, str) else texts
    count = size // len("".join(parts[1::2]))
    return "".join(part * (count if i % 2 else 1) for i, part in enumerate(parts))


@pytest.mark.parametrize("texts", TABLE["repeated"])
def test_repeated_texts(page: Page, texts: str | list[str]) -> None:
    """What is quadratic takes 16 times as long for four times the text; what a text that is short
    takes counts as 20 ms."""
    timed = """(text) => Math.min(...[1, 2, 3].map(() => {
      const start = performance.now();
      shown(text);
      return performance.now() - start;
    }))"""
    short, long = (call(page, timed, repeated(texts, size)) for size in (10_000, 40_000))
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
    script = """async (whole) => {
      await importFiles([new File([whole], 'talk.json')]);
      showError(whole);
      notice(whole);
      await new Promise((done) => setTimeout(done, 200));
      return [log.querySelectorAll('.assistant').length, shelf.list.size, unsafe(log),
        unsafe(find('chat-list')), unsafe(find('notices'))];
    }"""
    count = len(TABLE["xss"])
    assert call(page, script, whole) == [count, count + 1, [], [], []]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1400])
def test_a_long_answer_fits(page: Page, width: int, scheme: str) -> None:
    """Nothing is wider than its column; what has to be scrolls in itself."""
    page.look(width, 700, scheme)
    script = """(text) => {
      const width = shown(text).getBoundingClientRect().right + 1;
      const wide = [...log.querySelectorAll('*')].filter((e) => !e.closest('.table, pre')
        && e.getBoundingClientRect().right > width);
      const pre = log.querySelectorAll('pre')[1];
      return [document.documentElement.scrollWidth, wide.length,
        getComputedStyle(pre).overflowX, window.innerWidth];
    }"""
    assert call(page, script, TABLE["long"]) == [width, 0, "auto", width]
    wide = f"|{'word ' * 30}|{'x' * 200}|\n|-|-|\n"
    assert call(page, script, f"{TABLE['long']}\n\n{wide}")[:2] == [width, 0]
