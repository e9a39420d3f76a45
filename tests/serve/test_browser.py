"""The page in a real browser. With --rewrite-golden the pictures of the docs are made anew."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from g4ir.engine.load import load_engine
from g4ir.serve import app
from g4ir.serve.auth import Auth
from g4ir.serve.http_errors import later
from tests.serve.chromium import SHIFT, Page, chromium, find_chromium
from tests.serve.running import Running, eventually, running
from tests.serve.test_media import data, sound

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
#: what tells of its own answers: refusals, which Chromium writes down too
REFUSED = ("status of 400", "status of 401")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(tab: Page, served: Running) -> Iterator[Page]:
    """The page as somebody sees it first. Whatever a test does, nothing breaks and nothing is asked
    of anybody else."""
    tab.leave()
    tab.look(900, 760)
    tab.go(f"{served.url}/")
    tab.run("localStorage.clear(); sessionStorage.clear(); localStorage.max_tokens = 60")
    tab.go(f"{served.url}/")
    tab.until(READY)
    yield tab
    nothing_broke(tab, served.url)


def nothing_broke(tab: Page, url: str) -> None:
    assert not tab.told("Runtime.exceptionThrown")
    said = [e["entry"]["text"] for e in tab.told("Log.entryAdded")]
    assert not [text for text in said if not any(refused in text for refused in REFUSED)]
    asked = [e["request"]["url"] for e in tab.told("Network.requestWillBeSent")]
    assert asked and all(found.startswith((url, "data:")) for found in asked)


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


AT_END = "find('scroll').scrollHeight - find('scroll').scrollTop - find('scroll').clientHeight < 80"


def test_ones_own_message_and_errors_are_in_sight(
    page: Page, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.dictate(monkeypatch, "line\n" * 40, END)
    page.run("find('max_tokens').value = 300; keep()")
    say(page, "go on")
    for act in ("text.value = 'again'; say()", "showError('broken')"):
        page.run("find('scroll').scrollTop = 0")
        assert not page.run(AT_END)
        page.run(act)
        page.until(AT_END)
        page.until("!state.abort")


def test_what_was_wrong_with_tools_goes_when_it_is_right(page: Page) -> None:
    typed = "; find('tools').dispatchEvent(new Event('input'))"
    page.run("find('tools').value = '{'; openSettings(wrongTools(), 'tools')")
    assert str(page.run("find('asked').textContent")).startswith("Tools:")
    page.run("find('tools').value = '[]'" + typed)
    assert page.run("find('asked').textContent") == ""
    page.run("find('tools').value = ''; find('settings').close()")


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
    eventually(lambda: not served.scheduler.active)
    assert page.run("stop.hidden && !send.hidden && !state.abort")
    # The part that was said belongs to the conversation.
    served.dictate(monkeypatch, "ok", END)
    say(page, "and now?")
    assert last(page, ".assistant .text") == "ok" and page.run("state.messages.length") == 4


def test_the_stop_button(page: Page, served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the place and the focus of the other one, and hands the focus on."""
    page.run("find('max_tokens').value = 500; keep()")
    page.type("go on")
    page.press("Tab")
    assert page.focused() == "send"
    page.press("Enter")
    page.until("document.querySelector('.assistant .text')?.textContent.length > 20")
    assert page.focused() == "stop"
    page.press("Enter")
    page.until("document.querySelector('.speed')?.textContent.includes('stopped')")
    eventually(lambda: not served.busy)
    assert page.focused() == "text"
    # Whoever is elsewhere when an answer ends stays there.
    served.dictate(monkeypatch, "ok", END)
    page.type("and now?")
    page.press("Enter")
    page.run("find('open-settings').focus()")
    page.until("document.querySelectorAll('.speed').length === 2")
    assert page.focused() == "open-settings"


def test_a_stream_that_breaks(page: Page, served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said stays, the error is said, and the conversation goes on."""
    pieces = app.Running._pieces

    async def broken(self: Any) -> AsyncIterator[str]:
        count = 0
        async for text in pieces(self):
            count += 1
            if count > 4:
                raise later(503, "not_read", "the engine has a cold")
            yield text

    with monkeypatch.context() as patch:
        patch.setattr(app.Running, "_pieces", broken)
        served.dictate(patch, "hello world", END)
        say(page, "hello")
    assert last(page, ".error") == "the engine has a cold"
    assert page.run("document.querySelector('.error').getAttribute('role')") == "alert"
    begun = last(page, ".assistant .text")
    assert begun and "hello world".startswith(begun) and page.run("!state.abort && stop.hidden")
    served.dictate(monkeypatch, "ok", END)
    say(page, "again")
    assert last(page, ".assistant .text") == "ok" and page.run("state.messages.length") == 4


@pytest.mark.parametrize("secure", [True, False])
def test_copying(
    page: Page, served: Running, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    """Also where the page has no clipboard, as one has that came without TLS."""
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite"], origin=served.url)
    page.run("globalThis.board = navigator.clipboard; board.writeText('other')")
    if not secure:
        page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    served.dictate(monkeypatch, "**Hi** you", END)
    say(page, "hello")
    page.run("document.querySelector('.meta button').focus()")
    page.press("Enter")
    page.until("document.querySelector('.meta button').textContent === 'Copied'")
    assert page.run("board.readText()") == "**Hi** you"
    assert page.run("document.activeElement.textContent") == "Copied"
    page.until("document.querySelector('.meta button').textContent === 'Copy'")


def test_where_nothing_can_be_kept(
    page: Page, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser that forbids storage chats too."""
    forbidden = "get() { throw new DOMException('no', 'SecurityError'); }"
    stores = ("localStorage", "sessionStorage")
    script = ";".join(f"Object.defineProperty(window, '{s}', {{ {forbidden} }})" for s in stores)
    added = page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    page.go(f"{served.url}/")
    page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
    page.until(READY)
    page.run("find('system').value = 'Be brief.'; keep(); restore()")
    assert page.run("body().messages[0].content") == "Be brief."
    served.dictate(monkeypatch, "ok", END)
    say(page, "hello")
    assert last(page, ".assistant .text") == "ok"


def test_the_key(tab: Page, engine_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for, asked with, and kept as long as the tab; nobody knocks while it is wrong."""
    gate = Auth((b"open-sesame",), ("localhost",))
    with running(lambda: load_engine(engine_folder), gate) as r:
        tab.leave()
        tab.look(900, 760)
        tab.go(f"{r.url}/")
        tab.until("find('settings').open")
        assert tab.focused() == "key" and last(tab, "#asked") == "This server asks for a key."
        tab.type("guessed")
        tab.press("Enter")
        tab.until("status.textContent === 'wrong API key'")
        knocks = len(tab.told("Network.requestWillBeSent"))
        time.sleep(2.5)  # more than LOOK_MS
        assert len(tab.told("Network.requestWillBeSent")) == knocks
        tab.run("openSettings('', 'key'); find('key').value = ''")
        tab.type("open-sesame")
        tab.press("Enter")
        eventually(lambda: r.server.service)
        tab.until(READY)
        knocks = len(tab.told("Network.requestWillBeSent"))
        eventually(lambda: len(tab.told("Network.requestWillBeSent")) > knocks)  # it looks again
        assert tab.run("sessionStorage.getItem('key')") == "open-sesame"
        assert "open-sesame" not in tab.run("JSON.stringify(localStorage)")
        r.dictate(monkeypatch, "Come in.", END)
        tab.run("text.focus()")
        say(tab, "hello")
        assert last(tab, ".assistant .text") == "Come in."
        nothing_broke(tab, r.url)
        tab.leave()


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
    assert page.run("document.querySelector('.call textarea').readOnly")
    # A call that nobody answers does not end the conversation.
    with monkeypatch.context() as patch:
        served.dictate(patch, *CALL, "<|tool_response>")
        say(page, "and in Rome?")
    page.run("text.focus()")
    say(page, "never mind")
    assert page.run("state.messages.at(-3).content") == "the call was not run"


def test_answers_of_tools_that_are_refused_can_be_sent_again(
    page: Page, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.run(f"find('tools').value = {TOOL!r}; keep()")
    with monkeypatch.context() as patch:
        served.dictate(patch, *CALL, "<|tool_response>")
        say(page, "weather in Oslo?")
    page.type("cold")
    page.run("find('temperature').value = '-1'; keep()")
    page.press("Tab")
    page.press("Enter")
    page.until("document.querySelector('.error')?.textContent.includes('temperature')")
    page.until("document.activeElement === document.querySelector('.call textarea')")
    assert page.run("document.activeElement.value === 'cold' && !document.activeElement.readOnly")
    assert page.run("state.messages.map((m) => m.role).join(' ')") == "user assistant"
    page.run("find('temperature').value = ''; keep()")
    served.dictate(monkeypatch, "Cold.", END)
    page.press("Tab")
    page.press("Enter")
    page.until("document.querySelectorAll('.speed').length === 2")
    assert page.run("state.messages.map((m) => m.content).slice(-2).join(' ')") == "cold Cold."


def test_pictures_and_sounds_by_paste(page: Page, served: Running) -> None:
    """Those pasted, and sent before they have been read."""
    page.run("text.value = 'what are they?'")
    page.run(
        f"""(async () => {{
          const clipboardData = new DataTransfer();
          const canvas = document.createElement('canvas');
          canvas.getContext('2d').fillRect(0, 0, 64, 48);
          const picture = await new Promise((done) => canvas.toBlob(done));
          const raw = atob({data("", sound()).partition(",")[2]!r});
          const wave = Uint8Array.from(raw, (c) => c.charCodeAt(0));
          clipboardData.items.add(new File([wave], 'hum.wav', {{ type: 'audio/wav' }}));
          clipboardData.items.add(new File([picture], 'drawn.png', {{ type: 'image/png' }}));
          text.dispatchEvent(new ClipboardEvent('paste', {{ clipboardData, cancelable: true }}));
          say();
        }})()"""
    )
    page.until("document.querySelectorAll('.speed').length === 1")
    kinds = page.run("state.messages[0].content.map((p) => p.type).join(' ')")
    assert kinds == "image_url text audio_url" and not last(page, ".error")
    assert last(page, ".user .media").startswith("hum.wav")


def test_pictures_by_choice_and_by_drop(page: Page, served: Running, tmp_path: Path) -> None:
    path = tmp_path / "sun.png"
    Image.new("RGB", (64, 48), (200, 120, 40)).save(path)
    page.choose_files("#files", path)
    page.until("document.querySelectorAll('#attached li').length === 1")
    page.run("document.querySelector('#attached button').click()")
    assert page.run("document.querySelectorAll('#attached li').length") == 0
    shown = "() => { globalThis.shown = !find('drop').hidden; }"
    page.run(f"document.addEventListener('dragover', {shown})")
    other = tmp_path / "moon.png"
    Image.new("RGB", (48, 64), (20, 40, 80)).save(other)
    page.drop_files(path, other)
    page.until("document.querySelectorAll('#attached img').length === 2")
    assert page.run("shown && find('drop').hidden")
    page.run("text.focus()")
    say(page, "what is it?")
    assert page.run("document.querySelectorAll('.user img').length") == 2
    kinds = page.run("state.messages[0].content.map((p) => p.type).join(' ')")
    assert kinds == "image_url image_url text"
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
    """Nothing is wider than the screen, and how full the batch is can be read."""
    page.look(width, 640)
    say(page, "a" * 200)
    # Not against innerWidth: a phone makes that as wide as what does not fit.
    assert page.run("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right"
    assert page.run(f"{wide} > {width}).map((e) => e.id || e.className)") == []
    assert page.run("window.innerWidth") == width
    told = "tell('128 of 256 rows busy, 31 waiting')"
    assert page.run(f"{told}, status.scrollWidth <= status.clientWidth")
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
