"""The page in a real browser. With --rewrite-golden the pictures of the docs are made anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.serve.chromium import SHIFT, Page, chromium, find_chromium
from tests.serve.running import Running, eventually

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not find_chromium(), reason="no Chromium: apt-get install chromium"),
]
DOCS = Path(__file__).parents[2] / "docs"
TOOL = (
    '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", '
    '"properties": {"city": {"type": "string"}}, "required": ["city"]}}}]'
)
CALL = ("<|tool_call>", "call:weather{city:", '<|"|>', "Oslo", '<|"|>', "}", "<tool_call|>")
THOUGHT = ("<|channel>", "thought\nA greeting, so greet.", "<channel|>")
END = "<turn|>"
READY = "document.getElementById('status').textContent.includes('rows')"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(tab: Page, served: Running) -> Iterator[Page]:
    """The page as somebody sees it first. Whatever a test does, nothing breaks and nothing is asked
    of anybody else."""
    tab.events.clear()
    tab.look(900, 760)
    tab.go(f"{served.url}/")
    tab.run("localStorage.clear(); sessionStorage.clear(); localStorage.max_tokens = 60")
    tab.go(f"{served.url}/")
    tab.until(READY)
    yield tab
    assert not tab.told("Runtime.exceptionThrown")
    said = [e["entry"]["text"] for e in tab.told("Log.entryAdded")]
    assert not [text for text in said if "status of 400" not in text]
    asked = [e["request"]["url"] for e in tab.told("Network.requestWillBeSent")]
    assert asked and all(url.startswith((served.url, "data:")) for url in asked)


def say(page: Page, text: str) -> None:
    count = page.run("document.querySelectorAll('.speed').length")
    page.type(text)
    page.press("Enter")
    page.until(f"document.querySelectorAll('.speed').length === {count + 1}")


def last(page: Page, selector: str) -> str:
    return str(page.run(f"[...document.querySelectorAll('{selector}')].at(-1)?.textContent ?? ''"))


def test_a_conversation(page: Page, served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are shown as they are, and the next message is sent after them."""
    served.dictate(monkeypatch, "Hi <b>you</b> & `code` and **bold**", END)
    assert page.focused() == "text"
    page.type("first line")
    page.press("Enter", SHIFT)
    page.run("document.execCommand('insertText', false, '\\nsecond')")
    say(page, "")
    assert "first line" in last(page, ".user .text") and "second" in last(page, ".user .text")
    assert last(page, ".assistant .text") == "Hi <b>you</b> & code and bold"
    assert page.run("document.querySelectorAll('#log b').length") == 0
    assert last(page, ".assistant code") == "code" and last(page, ".assistant strong") == "bold"
    assert "tokens/s" in last(page, ".speed")
    say(page, "again")
    assert page.run("state.messages.length") == 4
    roles = page.run("state.messages.map((m) => m.role).join(' ')")
    assert roles == "user assistant user assistant"
    page.run("find('new').click()")
    assert page.run("state.messages.length === 0 && log.children.length === 0")


def test_an_answer_comes_in_pieces_and_can_be_stopped(
    page: Page, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.run("find('max_tokens').value = 500; keep()")
    page.type("go on")
    page.press("Enter")
    page.until("document.querySelector('.assistant .text')?.textContent.length > 20")
    assert page.run("!stop.hidden && send.hidden")
    assert page.run("document.querySelector('.assistant').getAttribute('aria-busy')") == "true"
    page.press("Escape")
    page.until("document.querySelector('.speed')?.textContent.includes('stopped')")
    eventually(lambda: not served.slots.active)
    assert page.run("stop.hidden && !send.hidden && !state.abort")
    # The part that was said belongs to the conversation.
    served.dictate(monkeypatch, "ok", END)
    say(page, "and now?")
    assert last(page, ".assistant .text") == "ok" and page.run("state.messages.length") == 4


def test_thoughts_are_folded(page: Page, served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    served.dictate(monkeypatch, *THOUGHT, "Good day.", END)
    page.run("find('thinking').checked = true; keep()")
    say(page, "hello")
    assert last(page, "details .text").strip() == "A greeting, so greet."
    assert page.run("document.querySelector('details').open") is False
    assert last(page, ".assistant .body > .text") == "Good day."


def test_calls_are_shown_and_answered(
    page: Page, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.run(f"find('tools').value = {TOOL!r}; keep()")
    with monkeypatch.context() as patch:
        served.dictate(patch, *CALL, "<|tool_response>")
        say(page, "weather in Oslo?")
    page.until("document.querySelector('.call textarea') === document.activeElement")
    assert last(page, ".call h3") == "weather" and '"city": "Oslo"' in last(page, ".call pre")
    served.dictate(monkeypatch, "Seven degrees.", END)
    page.type('{"degrees": 7}')
    page.press("Tab")
    assert page.focused() == "answer-calls"
    page.press("Enter")
    page.until("document.querySelectorAll('.speed').length === 2")
    assert last(page, ".assistant .body > .text") == "Seven degrees."
    kinds = page.run("state.messages.map((m) => m.role).join(' ')")
    assert kinds == "user assistant tool assistant"
    # A call that nobody answers does not end the conversation.
    with monkeypatch.context() as patch:
        served.dictate(patch, *CALL, "<|tool_response>")
        say(page, "and in Rome?")
    page.run("text.focus()")
    say(page, "never mind")
    assert page.run("state.messages.at(-3).content") == "the call was not run"


def test_pictures_by_choice_and_by_drop(page: Page, served: Running, tmp_path: Path) -> None:
    path = tmp_path / "sun.png"
    Image.new("RGB", (64, 48), (200, 120, 40)).save(path)
    page.choose_files("#files", path)
    page.until("document.querySelectorAll('#attached li').length === 1")
    page.run("document.querySelector('#attached button').click()")
    assert page.run("document.querySelectorAll('#attached li').length") == 0
    page.run(
        """new Promise((done) => {
          const canvas = Object.assign(document.createElement('canvas'), { width: 64, height: 48 });
          canvas.getContext('2d').fillRect(0, 0, 64, 48);
          canvas.toBlob((blob) => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([blob], 'drawn.png', { type: 'image/png' }));
            document.dispatchEvent(new DragEvent('dragover', { dataTransfer, cancelable: true }));
            const shown = !document.getElementById('drop').hidden;
            document.dispatchEvent(new DragEvent('drop', { dataTransfer, cancelable: true }));
            done(shown);
          });
        })"""
    )
    page.until("document.querySelectorAll('#attached img').length === 1")
    say(page, "what is it?")
    assert page.run("document.querySelectorAll('.user img').length") == 1
    assert page.run("state.messages[0].content.map((p) => p.type).join(' ')") == "image_url text"
    page.run("attach([new File(['x'], 'notes.txt', { type: 'text/plain' })])")
    page.until("document.querySelector('.error')?.textContent.startsWith('notes.txt')")


def test_errors_are_said_and_the_message_is_kept(page: Page) -> None:
    page.run(f"text.value = {'word ' * 700!r}; text.focus()")
    page.press("Enter")
    page.until("document.querySelector('.error')")
    assert "640" in last(page, ".error") and page.run("state.messages.length") == 0
    assert page.run("text.value.length") == 3500
    page.run("text.value = ''; find('tools').value = '{'; keep()")
    page.type("hello")
    page.press("Enter")
    page.until("find('settings').open")
    assert last(page, "#asked").startswith("Tools:") and page.focused() == "tools"
    page.press("Escape")
    page.until("!find('settings').open")


def test_by_keyboard_alone(page: Page) -> None:
    """Every control is reached, shows that it is, and works."""
    seen = []
    for _ in range(8):
        page.press("Tab")
        seen.append(page.focused())
        if seen[-1] == "open-settings":
            break
    assert seen[-1] == "open-settings" and "send" in seen and "new" in seen
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.run(outline) == "solid"
    page.press("Enter")
    page.until("find('settings').open")
    assert page.focused() == "system"
    page.type("Be brief.")
    page.run("find('close-settings').focus()")
    page.press("Enter")
    page.until("!find('settings').open")
    page.until("localStorage.system === 'Be brief.' && document.activeElement === text")
    assert page.run("body().messages[0].content") == "Be brief."


@pytest.mark.parametrize("width", [320, 390, 1400])
def test_on_small_and_large_screens(page: Page, width: int) -> None:
    page.look(width, 640)
    say(page, "a" * 200)
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.run("find('text').getBoundingClientRect().bottom <= window.innerHeight")


def test_pictures_of_the_docs(
    page: Page, served: Running, monkeypatch: pytest.MonkeyPatch, rewrite_golden: bool
) -> None:
    """In light and dark, which differ."""
    page.run(f"find('tools').value = {TOOL!r}; find('thinking').checked = true; keep()")
    page.run("find('max_tokens').value = ''; keep()")
    with monkeypatch.context() as patch:
        words = "thought\nRain decides it. I can ask for the weather in Oslo."
        ended = (*CALL, "<|tool_response>")
        served.dictate(patch, "<|channel>", words, "<channel|>", *ended)
        page.type("Do I need an umbrella in Oslo today?")
        page.press("Enter")
        page.until("document.querySelector('.call textarea')")
    answer = (
        "**No umbrella today.** It is 7 °C in Oslo and stays dry.\n\n"
        "```\ncity   degrees  rain\nOslo         7  none\n```\nA warm coat will do."
    )
    served.dictate(monkeypatch, "Cool, and no rain.", "<channel|>", answer, END)
    page.type('{"degrees": 7, "rain": "none"}')
    page.press("Tab")
    page.press("Enter")
    page.until("document.querySelectorAll('.speed').length === 2")
    assert last(page, ".assistant .body > .text").startswith("No umbrella today.")
    shots = []
    for scheme in ("light", "dark"):
        page.look(820, 720, scheme)
        page.run("find('scroll').scrollTop = 1e6")
        shots.append(page.screenshot())
        if rewrite_golden:
            (DOCS / f"page-{scheme}.png").write_bytes(shots[-1])
    assert shots[0] != shots[1]
