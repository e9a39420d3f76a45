"""The page at /: what is sent, to whom, and that its parts fit together."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from g4ir.serve.app import Server
from g4ir.serve.http_errors import Refused
from g4ir.serve.page import ASSETS, HEADERS, read_assets
from g4ir.serve.prompts import Prompts
from tests.serve.running import NAME, Running

FOUND = {path: asset.content.decode() for path, asset in read_assets().items()}
HTML, STYLE = FOUND["/"], FOUND["/style.css"]
SCRIPTS = {path: text for path, text in FOUND.items() if path.endswith(".js")}
SCRIPT = "\n".join(SCRIPTS.values())


ELEMENTS = [
    (tag, {k: v for k, _, v in re.findall(r'([\w-]+)(="([^"]*)")?', rest)})
    for tag, rest in re.findall(r"<([a-z]\w*)([^>]*)>", HTML)
]
IDS = [a["id"] for _, a in ELEMENTS if "id" in a]
#: of the settings, which last longer than the tab
LISTS = re.findall(r"(?:NUMBERS|SAMPLING|FIELDS) = \[(.*?)\]", SCRIPT, re.DOTALL)
FIELDS = re.findall(r'"(\w+)"', " ".join(LISTS))


@pytest.mark.parametrize("path", ASSETS)
def test_assets(served: Running, path: str) -> None:
    with served.client() as client:
        answer = client.get(path)
        assert answer.status_code == 200 and answer.text == FOUND[path]
        assert answer.headers["content-type"] == ASSETS[path][1]
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content
        assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
        assert client.get(path, headers={"Host": "evil.example"}).status_code == 403


def test_it_can_be_left_out() -> None:
    paths = {route.path for route in Server("x", page=False).app().routes}  # type: ignore[attr-defined]
    assert not paths & ASSETS.keys() and "/health" in paths


def test_nothing_comes_from_elsewhere() -> None:
    """Neither by a link, nor by what a script or a style asks for."""
    links = [v for _, a in ELEMENTS for k, v in a.items() if k in ("src", "href", "action") and v]
    assert sorted(links) == sorted(path[1:] for path in ASSETS if path != "/")
    for text in (HTML, SCRIPT.replace("http://www.w3.org/1998/Math/MathML", ""), STYLE):
        assert not re.search(r"(https?:)?//[a-z]|@import|url\(|WebSocket|import\(", text)
    paths = {"v1/models", "metrics", "v1/chat/completions", "tokenize", "server_info"}
    assert set(re.findall(r"asked\(\"([^\"]+)\"", SCRIPT)) == paths


def test_a_base_model_is_called_one(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of `g4ir chat` and of the log; they name no path of the server's machine."""
    prompts = served.server.prompts
    assert prompts and "probably a base model" in str(prompts.template.note)
    assert str(prompts.engine.path) not in str(prompts.template.note)
    with served.client() as client:
        listed, named = (client.get(p).json() for p in ("/v1/models", f"/v1/models/{NAME}"))
        assert listed["data"][0]["note"] == named["note"] == prompts.template.note
        monkeypatch.setattr(prompts, "template", replace(prompts.template, note=None))
        assert "note" not in client.get("/v1/models").json()["data"][0]
    (assigned,) = re.findall(r'find\("model-note"\)\.textContent = (.*?);', SCRIPT)
    assert assigned == 'model.note ?? ""' and "model-note" in IDS


def test_texts_of_a_model_are_no_markup() -> None:
    unsafe = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|DOMParser"
    assert not re.search(unsafe, SCRIPT)
    assert not re.search(r"\bon[a-z]+=|<script(?! src)|<style|style=", HTML)


def test_the_key_is_kept_as_long_as_the_tab() -> None:
    """What lasts longer is written in one function, whose fields the key is not of."""
    assert re.findall(r'storage\("(\w+)"\)', SCRIPT) == ["localStorage", "sessionStorage"]
    assert SCRIPT.count("localStorage") == SCRIPT.count("sessionStorage") == 1
    assert "key" not in FIELDS
    assert re.findall(r'(\w+)\.[gs]etItem\("key"', SCRIPT) == ["session"] * 4


def test_script_style_and_page_fit() -> None:
    assert len({*IDS}) == len(IDS)
    used = {*re.findall(r'(?:find|getElementById)\("([\w-]+)"\)', SCRIPT)}
    listed = re.findall(r'"(\w+)"', re.search(r"\[(.*)\]\.map\(find\)", SCRIPT)[1])  # type: ignore[index]
    assert used | {*listed, *FIELDS} <= {*IDS}
    selectors = re.sub(r"light-dark\(.*?\)", "", STYLE)
    assert {*re.findall(r"#([a-z][\w-]*)(?=[ ,{:>])", selectors)} <= {*IDS}
    classes = {*re.findall(r"\.([a-z][\w-]*)(?=[ ,{:>])", STYLE)}
    for name in classes:
        assert re.search(rf"[\"' ]{name}[\"' ]", HTML + SCRIPT), name


@pytest.mark.parametrize(
    ("fields", "counts"), [({}, ("20", None, "8")), ({"max_tokens": 3}, ("20", "3", "8"))]
)
def test_the_page_knows_the_error_for_a_long_prompt(fields: Any, counts: Any) -> None:
    """Its expression is one of Python, too."""
    self: Any = SimpleNamespace(engine=SimpleNamespace(limits=SimpleNamespace(max_seq=8)))
    with pytest.raises(Refused) as e:
        Prompts._max_new(self, range(20), fields)
    expression = re.search("TOO_LONG = /(.*)/;", SCRIPT)[1]  # type: ignore[index]
    assert re.search(expression, e.value.message).groups() == counts  # type: ignore[union-attr]


def test_every_control_has_a_name() -> None:
    """For who does not see the page."""
    labelled = {*re.findall(r"<label[^>]*>[^<]*<\w+[^>]*id=\"([\w-]+)\"", HTML)}
    labelled |= {*re.findall(r"<label class=\"check\"><input[^>]*id=\"([\w-]+)\"", HTML)}
    for tag, a in ELEMENTS:
        if tag in ("input", "textarea") and "hidden" not in a:
            assert a["id"] in labelled or a.get("aria-label"), a
    assert dict(ELEMENTS)["html"]["lang"] == "en"
