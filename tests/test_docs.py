"""The README and docs/: examples run, links and rule numbers resolve, tables are those of the code.

Old words do not come back: tests/glossary.yaml says which, what stands for them, and where each
may stand in another meaning.

In a transcript `...` stands for any lines, and within a line for anything.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from setuptools.config.pyprojecttoml import load_file

import g4ir
from g4ir import cli, passes
from g4ir.quant.recipe import find_quant_config
from g4ir.quant.rewrite import weights_of
from g4ir.spec.record import Spec, load_spec
from tests.cases import TABLES, read_table
from tests.cli_tools import g4ir as command
from tests.media_tools import mp4, png, wav
from tests.test_imports import ROOMS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FILES = {path.name: path for path in (README, *sorted((ROOT / "docs").glob("*.md")))}
#: what needs a compiled engine, transformers, or seconds
LONG = tuple(TABLES["docs"]["long"])
#: what needs a checkpoint, somebody else's engine or an hour, or changes whom the user trusts
PARSED = tuple(TABLES["docs"]["parsed"])
WITH_WEIGHTS = "# with weights"
COMMAND = r"^\$ (?:\.venv/bin/)?g4ir "


@dataclass(frozen=True)
class Example:
    """A command of a transcript, without `g4ir`, and what it prints."""

    file: str
    line: str
    shown: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    def __str__(self) -> str:
        return f"{self.file}: {self.line}"


# --- what the files hold ----------------------------------------------------------------------


def blocks(file: str, language: str) -> list[str]:
    """The code blocks of a language; without one, transcripts of a shell."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", FILES[file].read_text(), re.M | re.S)
    return [text for kind, text in found if kind == language]


def examples(file: str) -> list[Example]:
    """The commands of a file, in their order."""
    parts = [p for b in blocks(file, "") for p in re.split(COMMAND, b, flags=re.M)[1:]]
    return [Example(file, line, shown) for line, _, shown in (p.partition("\n") for p in parts)]


def matches(printed: str, shown: str) -> bool:
    """Whether the lines are those shown."""
    lines = [
        r"(.*\n)*" if x == "..." else re.escape(x).replace(r"\.\.\.", ".*") + r"\n"
        for x in shown.splitlines()
    ]
    return re.fullmatch("".join(lines), printed) is not None


def check(example: Example, *more: str) -> None:
    """The command succeeds and prints what is shown; notes of stderr may be shown after it."""
    outcome = command(*example.words, *more)
    # Whether a build fits is up to the machine.
    assert outcome.code == outcome.out.startswith("would not build here: "), outcome.err
    notes = "".join(x for x in outcome.err.splitlines(True) if "note: " in x)
    printed = outcome.out, outcome.out + notes
    assert any(matches(text, example.shown) for text in printed), outcome.out


ALL = [example for file in FILES for example in examples(file)]
RUN = [e for e in ALL if not (e.line.startswith(PARSED) or e.line.endswith(WITH_WEIGHTS))]
SHORT = [e for e in RUN if not e.line.startswith(LONG)]
BUILT = [e for e in RUN if e.line.startswith(LONG)]


# --- transcripts ------------------------------------------------------------------------------


@pytest.mark.parametrize("example", SHORT, ids=str)
def test_examples_that_need_no_engine(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check(example)


@pytest.mark.parametrize("example", ALL, ids=str)
def test_examples_are_of_the_command_line(example: Example) -> None:
    """Also those that are not executed. A word too many is refused, so a wrong one would be."""
    cli.parse(example.words)
    with pytest.raises(g4ir.G4Error):
        cli.parse([*example.words, "--no-such-option"])


def commands_in_text(file: str) -> list[str]:
    """The commands in running text and in indented blocks, without `g4ir`."""
    text = re.sub(r"^```.*?^```$", "", FILES[file].read_text(), flags=re.M | re.S)
    return re.findall(r"`g4ir ([^`]+)`", text) + re.findall(r"^    g4ir (.+)$", text, re.M)


@pytest.mark.parametrize("file", FILES)
def test_commands_in_the_text_are_of_the_command_line(file: str) -> None:
    """They may lack arguments and have placeholders, but each verb and option exists."""
    for line in commands_in_text(file):
        verb, *words = shlex.split(line.replace("VERB", "run"), comments=True)
        known = cli.verb_parser(verb).format_help()
        options = [word.strip("[]").partition("=")[0] for word in words if "--" in word]
        assert all(re.search(rf"{option}\b", known) for option in options), line


def inputs_of_examples() -> None:
    """The files that examples read, in the current folder."""
    png(Path("photo.png"))
    wav(Path("speech.wav"))
    mp4(Path("clip.mp4"))
    (requests,) = blocks("guide.md", "json")
    Path("requests.jsonl").write_text(requests)


def slow(e: Example) -> bool:
    """What the reference backend would not print, or what needs transformers."""
    verbs = ("verify ", "prove ", "show ", "inspect ", "plan ", "bench")
    return e.line.startswith(verbs) or e.file in ("onnx.md", "tensorrt.md")


@pytest.mark.parametrize("file", ["README.md", "guide.md", "media.md", "speculative-decoding.md"])
def test_runs_by_reference(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens without compiling."""
    monkeypatch.chdir(tmp_path)
    inputs_of_examples()
    some = [e for e in BUILT if e.file == file and not slow(e)]
    assert {e.words[0] for e in some} == {"build", "run"}
    for e in some:
        line = e.line.replace("--backend torch", "--backend reference")
        check(Example(e.file, line, e.shown))


@pytest.mark.full
@pytest.mark.parametrize("file", sorted({e.file for e in BUILT}))
def test_examples_with_engines(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, since some use what others build."""
    monkeypatch.chdir(tmp_path)
    inputs_of_examples()
    for e in BUILT:
        if e.file == file:
            check(e)


# --- Python examples --------------------------------------------------------------------------


def run_python(text: str, file: str) -> tuple[dict[str, Any], str]:
    """The names that a program defines, and what it prints."""
    names: dict[str, Any] = {}
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(text, file, "exec"), names)
    return names, out.getvalue()


def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the reference backend, which compiles nothing."""
    monkeypatch.chdir(tmp_path)
    inputs_of_examples()
    limits = {"max_seq": 512, "prefill_chunk": 128, "audio_seconds": [5.0]}
    g4ir.build("tiny-media", "media", random_weights=0, backend="reference", **limits).close()
    text, inside, hooks = blocks("python.md", "python")  # the last goes on from the first
    quick = text.replace("random_weights=0", 'random_weights=0, backend="reference"')
    names, printed = run_python(f"{quick}\n{inside}\n{hooks}", "python.md")
    check(*examples("python.md"))
    assert len(names["tokens"]) == 16 and "length" in printed
    assert len(names["out"].hidden_states) == 7 and names["states"]["out"].shape == (1, 4, 64)
    (text,) = blocks("README.md", "python")
    assert len(json.loads(run_python(text, "README.md")[1])) == 8
    (text,) = blocks("media.md", "python")
    names, _ = run_python(text, "media.md")
    assert len(names["tokens"]) == 8 and names["soft"].kind == "audio"


def test_an_onnx_engine_runs_without_g4ir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transcript's build, run and program give the same tokens."""
    monkeypatch.chdir(tmp_path)
    build, run = [e for e in examples("onnx.md") if "engine-onnx" in e.line]
    check(build)
    check(run)
    (text,) = blocks("onnx.md", "python")
    _, printed = run_python(text, "onnx.md")
    assert printed.split() == run.shown.split()


# --- rules, links, tables ---------------------------------------------------------------------

CITED = re.compile(r"\brules?\s+(\d+(?:(?:,| to| and)\s+\d+)*)", re.I)


def cited_rules(text: str) -> set[int]:
    """The numbers of `rule 14`, `rules 1, 2`, `rules 26 to 29, 42`."""
    found: set[int] = set()
    for numbers in CITED.findall(text):
        for first, last in re.findall(r"(\d+)(?:\s*to\s+(\d+))?", numbers):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def numbered_rules() -> list[int]:
    return [int(n) for n in re.findall(r"^(\d+)\. \*\*", FILES["semantics.md"].read_text(), re.M)]


@pytest.mark.parametrize("folder", ["g4ir", "passes", "backends"])
def test_cited_rules_exist(folder: str) -> None:
    sources = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".c", ".h", ".yaml")]
    cited = {path: rules for path in sources if (rules := cited_rules(path.read_text()))}
    assert cited or folder == "passes"
    wrong = {path.name: rules - {*numbered_rules()} for path, rules in cited.items()}
    assert not any(wrong.values()), wrong


def links(path: Path) -> Iterator[tuple[Path, str]]:
    """(file, anchor) of each link of a file that leads into the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield (path.parent / file if file else path), anchor


def anchors(path: Path) -> set[str]:
    """Of the headings of a Markdown file."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", FILES)
def test_links_lead_somewhere(name: str) -> None:
    for path, anchor in links(FILES[name]):
        assert path.is_file(), path
        assert not anchor or anchor in anchors(path), f"{path}#{anchor}"


def test_readme_table_is_that_of_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two columns of its."""
    monkeypatch.chdir(ROOT)
    line = re.search(r"`g4ir (bench \S+\.json --table)`", README.read_text())
    assert line
    printed = command(*line[1].split())
    cells = [line.split(" | ") for line in printed.out.splitlines()]
    columns = [cells[0].index(name) for name in ("prompt, tokens/s", "ITL, ms")]
    rows = re.findall(r"^\| (?:g4ir|transformers|llama).*?\| (.+) \|$", README.read_text(), re.M)
    assert [row.split(" | ") for row in rows] == [[row[i] for i in columns] for row in cells[2:]]


def test_the_readme_is_short_and_leads_to_every_document() -> None:
    assert len(README.read_text().splitlines()) <= 150
    others = {path for name, path in FILES.items() if name != "README.md"}
    assert {path.resolve() for path, _ in links(README)} >= others


@pytest.mark.parametrize("name", FILES)
def test_a_page_is_at_most_400_lines_and_says_for_whom_it_is(name: str) -> None:
    """In its first paragraph; the README in its second."""
    lines = FILES[name].read_text().splitlines()
    assert len(lines) <= 400
    assert any(re.match("For |It is for ", line) for line in lines[:8])


def section(name: str, title: str) -> str:
    """A document from a heading of the second level to the next."""
    return FILES[name].read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_design_lists_rooms_and_passes_as_they_are() -> None:
    first_cell = re.compile(r"^\| `(\w+)` \|", re.M)
    assert tuple(first_cell.findall(section("design.md", "Rooms"))) == ROOMS
    listed = first_cell.findall(section("design.md", "Passes"))
    assert listed == [*passes.PASSES]


def test_the_tour_is_twelve_short_files() -> None:
    files = section("design.md", "Read these twelve files first")
    tour = re.findall(r"^\d+\. \[`(.+?)`\]\(\.\./(.+?)\)", files, re.M)
    assert len(tour) == 12 and all(shown == target for shown, target in tour)
    lines = [len((ROOT / target).read_text().splitlines()) for _, target in tour]
    assert max(lines) <= 330 and sum(lines) <= 2000


RESULTS = {path.name: path.read_text() for path in (ROOT / "bench/results").iterdir()}
NAMED_RESULT = re.compile(r"`(?:bench/results/)?([\w-]+\.(?:json|txt|png))`")


@pytest.mark.parametrize("name", ["benchmarks.md", "numerics.md"])
def test_named_results_are_there(name: str) -> None:
    found = {*NAMED_RESULT.findall(FILES[name].read_text())}
    assert found and found <= RESULTS.keys()
    assert name != "benchmarks.md" or found == RESULTS.keys(), "each has a place"


def test_named_scripts_are_there() -> None:
    """In the documents and in the Makefile; a summary has the command of its own day."""
    texts = [p.read_text() for p in (*FILES.values(), ROOT / "Makefile")]
    found = {name for text in texts for name in re.findall(r"python (bench/\w+\.py)", text)}
    assert found and not {name for name in found if not (ROOT / name).is_file()}


def test_benchmarks_are_cut_out_of_the_summaries() -> None:
    """Each block, and every number of it."""
    found = blocks("benchmarks.md", "")
    assert len(found) >= 5
    for block in found:
        assert any(matches(text, f"...\n{block}...\n") for text in RESULTS.values()), block


# --- docs/chat.md -----------------------------------------------------------------------------


def test_the_example_of_the_chat_prints_what_is_shown() -> None:
    (*_, code), (shown,) = blocks("chat.md", "python"), blocks("chat.md", "")
    assert run_python(code, "chat.md")[1] == shown


# --- docs/speculative-decoding.md -----------------------------------------------------------------


def test_the_example_of_drafting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("speculative-decoding.md", "python")
    names, printed = run_python(code, "speculative-decoding.md")
    assert len(names["text"]) == 32 and "tokens_per_round" in printed


def test_the_counts_of_drafting_are_those_of_the_server() -> None:
    from g4ir.serve import metrics

    told = {name for part in ("counters", "labelled") for name, *_ in metrics.TABLE[part]}
    named = set(re.findall(r"g4ir_(draft_\w+)_total", FILES["speculative-decoding.md"].read_text()))
    assert named == {name for name in told if name.startswith("draft_")}


def read_spec(folder: Path, text: str) -> Spec:
    """The spec of an example, which `g4ir specs validate` takes."""
    path = folder / "example.yaml"
    path.write_text(text)
    outcome = command("specs", "validate", path, "--json")
    spec = load_spec(path)
    assert outcome.code == 0 and json.loads(outcome.out)["digest"] == spec.digest()
    return spec


def test_the_guide_s_example_of_a_variant(tmp_path: Path) -> None:
    (text,) = blocks("guide.md", "yaml")
    spec = read_spec(tmp_path, text)
    base = load_spec("26b-a4b")
    assert spec.text.num_hidden_layers == 12 and spec.text.sliding.window == 512
    assert spec.text.moe == base.text.moe and spec.hub is None


def test_the_example_of_a_quantisation_config(tmp_path: Path) -> None:
    (text,) = blocks("quantization.md", "yaml")
    (tmp_path / "own.yaml").write_text(text)
    recipe = find_quant_config(tmp_path / "own.yaml")
    schemes = recipe and recipe.schemes(weights_of(load_spec("26b-a4b")))
    assert schemes and {s.form for s in schemes.values()} == {"int4", "int8"}


def test_readme_names_the_extras() -> None:
    extras = load_file(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    assert {name for name, needs in extras.items() if needs} == {
        *re.findall(r"`\[(\w[\w-]*)\]`", README.read_text())
    }


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    project = load_file(ROOT / "pyproject.toml")["project"]
    assert first and first[1] == g4ir.__version__ == project["version"]


WORDS: list[dict[str, Any]] = read_table("glossary.yaml")
SUFFIXES = {".py", ".md", ".yaml", ".c", ".h", ".js", ".html"}


def lines() -> Iterator[tuple[str, int, str]]:
    """Every line of the product and its documentation, except the glossary itself."""
    for part in ("g4ir", "passes", "backends", "docs", "README.md"):
        for path in (ROOT / part, *sorted((ROOT / part).rglob("*"))):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in SUFFIXES and path.is_file() and name != "docs/glossary.md":
                for number, line in enumerate(path.read_text().splitlines(), 1):
                    yield name, number, line


LINES = [*lines()]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word["now"])
def test_an_old_word_stands_only_where_it_may(word: dict[str, Any]) -> None:
    old, may = re.compile(word["old"]), tuple(word.get("may", ()))
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, number, line in LINES
        if old.search(line) and not name.startswith(may)
    ]
    assert not found, f"write {word['now']}:\n" + "\n".join(found)
