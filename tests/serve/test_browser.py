"""The page in a real browser: what browser.yaml says is done and seen, and what no step of it can.
Markdown on it: which nodes it becomes, while it grows too, and that no text becomes a script.
With --rewrite-golden the pictures of the docs are made anew."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from g4ir.builder.load import load_engine
from g4ir.generate.conversation import ChatSession
from g4ir.serve import app
from g4ir.serve.auth import Auth
from g4ir.serve.http_errors import later
from tests.cases import read_table
from tests.serve.chromium import SHIFT, Page, chromium, find_chromium
from tests.serve.running import Running, chat_engine, eventually, ready, running
from tests.serve.test_media import data, sound

MISSING = "no Chromium: apt-get install chromium"
pytestmark = [pytest.mark.full, pytest.mark.skipif(not find_chromium(), reason=MISSING)]
ROOT = Path(__file__).parents[2]
DOCS, FRAMES = ROOT / "docs", Path(__file__).with_name("frames.js")
AXE = ROOT / "build/axe/node_modules/axe-core/axe.min.js"
CASES = read_table("serve/browser.yaml")
TABLE = read_table("serve/markdown.yaml")
END = CASES["words"][0]
READY = "/^(idle|busy)/.test(document.getElementById('status').textContent)"
#: what tells of its own answers: refusals, which Chromium writes down too
REFUSED = ("status of 400", "status of 401")
LAST = """globalThis.last = (s) => [...document.querySelectorAll(s)].at(-1)?.textContent ?? '';
globalThis.roles = () => state.messages.map((m) => m.role[0]).join('');
globalThis.click = (s, label) => [...document.querySelectorAll(`${s} button`)]
  .filter((b) => b.textContent === label).at(-1).click();
"""
#: what axe-core's report has of a violation
SEEN = "({ id, impact, nodes: [{ html }] }) => ({ id, impact, html })"


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow enough to be looked at while it answers."""
    return chat_engine(tmp_path_factory.mktemp("browser") / "engine", backend="reference")


@pytest.fixture(scope="session")
def served(engine_folder: Path) -> Iterator[Running]:
    with ready(engine_folder) as r:
        yield r


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
    tab.run("state.started.then(() => settled(indexedDB.deleteDatabase('g4ir'))).then(() => {})")
    tab.go(f"{served.url}/")
    tab.until(READY)
    tab.run(f"state.started.then(() => {{ {LAST} }})")
    yield tab
    nothing_broke(tab, served.url)


def nothing_broke(tab: Page, url: str) -> None:
    assert not tab.told("Runtime.exceptionThrown")
    said = [e["entry"]["text"] for e in tab.told("Log.entryAdded")]
    assert not [text for text in said if not any(refused in text for refused in REFUSED)]
    asked = [e["request"]["url"] for e in tab.told("Network.requestWillBeSent")]
    assert asked and all(found.startswith((url, "data:", f"blob:{url}")) for found in asked)


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
        self.type, self.until, self.rewrite = page.type, page.until, False
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

    def import_(self, names: list[str]) -> None:
        self.page.choose_files("#imported", *(self.folder / name for name in names))

    def write(self, texts: dict[str, str]) -> None:
        for name, text in texts.items():
            (self.folder / name).write_text(text)

    def downloaded(self, name: str) -> None:
        """Wait for a file that the page wrote."""
        eventually(lambda: (self.folder / name).is_file() and (self.folder / name).stat().st_size)

    def reload(self, _: bool) -> None:
        self.page.go(f"{self.served.url}/")
        self.page.until(READY)
        self.page.run(f"state.started.then(() => {{ {LAST} }})")

    def drop(self, names: list[str]) -> None:
        self.page.drop_files(*(self.folder / name for name in names))

    def look(self, size: list[int]) -> None:
        self.page.look(*size)
        self.page.run(f"globalThis.wide = {size[0]}")

    def forbid(self, stores: list[str]) -> None:
        forbidden = "get() { throw new DOMException('no', 'SecurityError'); }"
        made = [f"Object.defineProperty(window, '{s}', {{ {forbidden} }})" for s in stores]
        added = self.page.call("Page.addScriptToEvaluateOnNewDocument", source=";".join(made))
        self.page.go(f"{self.served.url}/")
        self.page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
        self.page.until(READY)

    def pictures(self, name: str) -> None:
        shots = []
        for scheme in ("light", "dark"):
            self.page.look(1080, 720, scheme)
            self.page.run("find('scroll').scrollTop = 0")
            shots.append(self.page.screenshot())
            if self.rewrite:
                seen = Image.open(io.BytesIO(shots[-1])).convert("RGB").quantize(64, dither=0)
                seen.save(DOCS / f"{name}-{scheme}.png", optimize=True)
        assert shots[0] != shots[1]

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
    page: Page,
    served: Running,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rewrite_golden: bool,
) -> None:
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite"], origin=served.url)
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.call("Browser.setDownloadBehavior", **where)
    steps = Steps(page, served, monkeypatch, tmp_path)
    steps.rewrite = rewrite_golden
    for step in CASES["tests"][name]:
        ((verb, given),) = step.items()
        kept = ("is", "break", "import")
        act: Callable[[Any], None] = getattr(steps, f"{verb}_" if verb in kept else verb)
        act(given)


@pytest.mark.skipif(
    not AXE.is_file(), reason=f"no {AXE}: npm install --prefix build/axe axe-core@4"
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe(page: Page, served: Running, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """axe-core finds nothing serious in a conversation, settings, the model's facts, on a phone."""
    served.dictate(monkeypatch, "<|channel>", "thought\nHm.", "<channel|>", TABLE["parts"], END)
    page.run("find('max_tokens').value = 300; find('thinking').checked = true; keep()")
    say(page, "hello")
    page.run("showError('broken', () => {}); showChats(true)")
    page.run(AXE.read_text())
    for step, width in (("", 1080), ("openSettings()", 1080), ("showModel()", 1080), ("", 390)):
        page.look(width, 720, scheme)
        page.run(f"{step or '0'}")
        found = page.run(f"axe.run().then((r) => r.violations.map({SEEN}))")
        assert not [v for v in found if v["impact"] in ("serious", "critical")], (step, width)
        page.run("for (const d of document.querySelectorAll('dialog')) d.close()")


def test_frames_of_a_long_answer(page: Page) -> None:
    """100 tokens/s into 16 KB: scripting and layout of a frame take a part of its 16 ms, and grow
    little with the text, so that a machine without other work draws 60 a second."""
    long, script = TABLE["parts"] * (16_000 // len(TABLE["parts"])), FRAMES.read_text()
    few, many = (page.run(f"({script})({json.dumps([x, TABLE['parts']])})") for x in ("", long))
    assert many["median"] < 16 and many["median"] < 4 * few["median"] + 4, (few, many)
    assert many["drawn"] > 20, many


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


def test_files_of_the_page_and_of_chat_are_the_same(
    page: Page,
    served: Running,
    engine_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What `g4ir chat` saves the page opens, and the other way round, with tools and pictures."""
    tools = [{"type": "function", "function": {"name": "weather"}}]
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    served.dictate(monkeypatch, "Fine.", END)
    page.run(f"find('tools').value = {json.dumps(json.dumps(tools))}; keep()")
    Image.new("RGB", (64, 48), (200, 120, 40)).save(tmp_path / "sun.png")
    page.choose_files("#files", tmp_path / "sun.png")
    page.until("document.querySelectorAll('#attached li').length === 1")
    page.run("text.focus()")
    say(page, "And today")
    page.run("state.saving.then(() => { drawChats(); click('#chat-list', 'Export'); })")
    file = tmp_path / "And-today.json"
    eventually(lambda: file.is_file() and file.stat().st_size)
    engine = load_engine(engine_folder)
    with contextlib.closing(engine), ChatSession(engine) as talk:
        talk.load(file)
        assert [m["role"] for m in talk.messages] == ["user", "assistant"]
        assert talk.messages[1]["content"] == "Fine." and talk.tools == tools
        talk.set_system("Be brief.")
        talk.save(tmp_path / "saved.json")
    page.choose_files("#imported", tmp_path / "saved.json")
    page.until("find('system').value === 'Be brief.'")
    assert page.run("roles()") == "ua" and page.run("tools()") == tools
    page.until("document.querySelector('.user img').naturalWidth === 64")


SCRIPT = Path(__file__).with_name("markdown.js").read_text()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory, served: Running) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        tab.go(f"{served.url}/")
        tab.run("state.started.then(() => 1)")
        tab.run(f"{SCRIPT};0")
        yield tab
        assert not tab.told("Runtime.exceptionThrown")


def call(scripted: Page, function: str, *given: Any) -> Any:
    return scripted.run(f"({function})({', '.join(json.dumps(g) for g in given)})")


@pytest.mark.parametrize("kind", ["cases", "live"])
def test_nodes(scripted: Page, kind: str) -> None:
    markup = "(source, live) => shown(source, live).innerHTML"
    for source, html in TABLE[kind]:
        assert call(scripted, markup, source, kind == "live") == html, source


def test_a_text_that_grows(scripted: Page) -> None:
    """It is what it would be at once, and blocks that are complete keep their nodes."""
    same, lost, kept = call(scripted, "growsAsWhole", TABLE["long"])
    assert same and kept > 8 and lost <= 1  # the head of a table is a paragraph at first


def test_a_long_answer_streams_within_a_frame(scripted: Page) -> None:
    """A piece of a long answer, of which many come in a second, takes less than half a frame."""
    assert call(scripted, "timeOfPiece", TABLE["long"] * 12) < 8


def test_code_that_grows_keeps_its_selection(scripted: Page) -> None:
    assert call(scripted, "codeThatGrows") == [True, "first\nsecond"]


def repeated(texts: str | list[str], size: int) -> str:
    parts = ["", texts] if isinstance(texts, str) else texts
    count = size // len("".join(parts[1::2]))
    return "".join(part * (count if i % 2 else 1) for i, part in enumerate(parts))


@pytest.mark.parametrize("texts", TABLE["repeated"])
def test_repeated_texts(scripted: Page, texts: str | list[str]) -> None:
    """What is quadratic takes 16 times as long for four times the text; what a text that is short
    takes counts as 20 ms."""
    short, long = (
        call(scripted, "timeOfShowing", repeated(texts, size)) for size in (10_000, 40_000)
    )
    assert long < 9 * max(short, 20)
    bold = "(text) => [...shown(text).querySelectorAll('strong')].at(-1)?.textContent"
    assert call(scripted, bold, repeated(texts, 10_000) + "\n\n**end**") == "end"


def test_a_list_with_many_blank_lines(scripted: Page) -> None:
    source = "- a" + "\n" * 200_000 + "  b"  # more than one call takes arguments
    assert call(scripted, "(text) => shown(text).textContent", source) == "ab"


def test_no_scripts_of_texts(scripted: Page) -> None:
    """As an answer, and everywhere in a conversation that is imported."""
    assert all(isinstance(text, str) for text in TABLE["xss"])
    for text in TABLE["xss"]:
        assert call(scripted, "(text) => unsafe(shown(text))", text) == [], text
        assert call(scripted, "(text) => unsafe(shown(text, true))", text) == [], text
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
    assert call(scripted, "afterImport", whole) == [count, count + 1, [], [], []]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1400])
def test_a_long_answer_fits(scripted: Page, width: int, scheme: str) -> None:
    """Nothing is wider than its column; what has to be scrolls in itself."""
    scripted.look(width, 700, scheme)
    assert call(scripted, "widthsOf", TABLE["long"]) == [width, 0, "auto", width]
    wide = f"|{'word ' * 30}|{'x' * 200}|\n|-|-|\n"
    assert call(scripted, "widthsOf", f"{TABLE['long']}\n\n{wide}")[:2] == [width, 0]
