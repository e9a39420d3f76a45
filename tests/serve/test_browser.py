"""The page in a real browser: what browser.yaml says is done and seen, and what no step of it can.
With --rewrite-golden the pictures of the docs are made anew."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
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
CASES = yaml.safe_load(Path(__file__).with_name("browser.yaml").read_text())
END, CALL, TOOL = CASES["words"][:3]
READY = "document.getElementById('status').textContent.includes('rows')"
#: what tells of its own answers: refusals, which Chromium writes down too
REFUSED = ("status of 400", "status of 401")
LAST = "globalThis.last = (s) => [...document.querySelectorAll(s)].at(-1)?.textContent ?? ''"


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
    tab.run(LAST)
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


class Steps:
    """The steps of browser.yaml, each a method of its name."""

    def __init__(self, page: Page, served: Running, patch: Any, folder: Path) -> None:
        self.page, self.served, self.patch, self.folder = page, served, patch, folder
        self.type, self.until = page.type, page.until
        for name in ("sun.png", "moon.png"):
            Image.new("RGB", (64, 48), (200, 120, 40)).save(folder / name)

    def dictate(self, words: list[str]) -> None:
        said = ["line\n" * 40 if word == "LINES" else word for word in words]
        self.served.dictate(self.patch, *said)

    def press(self, key: str) -> None:
        name = key.removeprefix("Shift+")
        self.page.press(name, SHIFT if name != key else 0)

    def say(self, text: str) -> None:
        say(self.page, text)

    def run(self, script: str) -> None:
        self.page.run(script.replace("SOUND", data("", sound()).partition(",")[2]))

    def is_(self, scripts: list[str]) -> None:
        for script in scripts:
            assert self.page.run(script), script

    def focused(self, name: str) -> None:
        assert self.page.focused() == name

    def tabs(self, names: list[str]) -> None:
        """Press the key until the last of some controls is reached; the others come before."""
        seen: list[str] = []
        while names[-1] not in seen and len(seen) < 8:
            self.page.press("Tab")
            seen.append(self.page.focused())
        assert {*names} <= {*seen}

    def last(self, texts: dict[str, str]) -> None:
        assert {selector: last(self.page, selector) for selector in texts} == texts

    def begins(self, texts: dict[str, str]) -> None:
        for selector, text in texts.items():
            assert last(self.page, selector).startswith(text)

    def quiet(self, _: bool) -> None:
        eventually(lambda: not self.served.busy)

    def choose(self, names: list[str]) -> None:
        self.page.choose_files("#files", *(self.folder / name for name in names))

    def drop(self, names: list[str]) -> None:
        self.page.drop_files(*(self.folder / name for name in names))

    def break_(self, most: int) -> None:
        pieces, left = app.Running._pieces, [most]

        async def broken(running: Any) -> AsyncIterator[Any]:
            async for text in pieces(running):
                left[0] -= 1
                if left[0] == -1:
                    raise later(503, "not_read", "the engine has a cold")
                yield text

        self.patch.setattr(app.Running, "_pieces", broken)


@pytest.mark.parametrize("name", CASES["tests"])
def test_the_page(
    page: Page, served: Running, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite"], origin=served.url)
    steps = Steps(page, served, monkeypatch, tmp_path)
    for step in CASES["tests"][name]:
        ((verb, given),) = step.items()
        act: Callable[[Any], None] = getattr(steps, f"{verb}_" if verb in ("is", "break") else verb)
        act(given)


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
    page.run(f"{TOOL}; find('thinking').checked = true; find('max_tokens').value = ''; keep()")
    words = "thought\nRain decides it. I can ask for the weather in Oslo."
    served.dictate(monkeypatch, "<|channel>", words, "<channel|>", *CALL)
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
