"""The examples of the README print what it says, where `...` stands for any lines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import g4ir
from tests.cli_tools import g4ir as command
from tests.media_tools import mp4, png, wav

README = Path(__file__).parent.parent / "README.md"
#: what needs a compiled engine, transformers, a checkpoint, or seconds
LONG = (
    "build ", "run ", "verify ", "bench ", "plan --variant 31b ", "plan --variant e2b --media ",
)  # fmt: skip
#: what prints measured times, what the files of the reader decide, and what lies elsewhere
UNLIKE = ("bench ", "run media ", "run engines/", "run engine-of-a-friend ", "show engine ",
          "sign ", "trust ")  # fmt: skip


def blocks(language: str) -> list[str]:
    """The code blocks of a language; without one, transcripts of a shell."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.M | re.S)


def examples() -> dict[str, str]:
    """Command -> what it prints."""
    found = {}
    for block in blocks(""):
        for part in re.split(r"^\$ g4ir ", block, flags=re.M)[1:]:
            line, _, printed = part.partition("\n")
            found[line] = printed
    return found


def matches(printed: str, shown: str) -> bool:
    """Whether the lines are those shown, of which `...` is any number."""
    lines = [r"(.*\n)*" if x == "..." else re.escape(x) + r"\n" for x in shown.splitlines()]
    return re.fullmatch("".join(lines), printed) is not None


def check(line: str, shown: str) -> None:
    outcome = command(*shlex.split(line, comments=True))
    assert outcome.code == 0, outcome.err
    summary = "".join(x for x in outcome.err.splitlines(True) if "note: " in x)
    assert matches(outcome.out, shown) or matches(outcome.out + summary, shown), outcome.out


SHORT = [line for line in examples() if not line.startswith((*LONG, *UNLIKE))]


@pytest.mark.parametrize("line", SHORT)
def test_examples_that_need_no_engine(line: str) -> None:
    check(line, examples()[line])


def test_no_example_is_forgotten() -> None:
    assert len(SHORT) >= 7 and len(examples()) >= 16


@pytest.mark.full
def test_examples_with_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, since some use what others build."""
    monkeypatch.chdir(tmp_path)
    for line, shown in examples().items():
        if line.startswith(LONG) and not line.startswith(UNLIKE):
            check(line, shown)


def python_example() -> str:
    """The one for users of the package."""
    (found,) = (block for block in blocks("python") if "import g4ir" in block)
    return found


def media_files() -> None:
    png(Path("photo.png"))
    wav(Path("speech.wav"))
    mp4(Path("clip.mp4"))


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the reference backend, which compiles nothing."""
    monkeypatch.chdir(tmp_path)
    media_files()
    limits = {"max_seq": 512, "prefill_chunk": 128, "audio_seconds": [5.0]}
    g4ir.build("tiny-media", "media", random_weights=0, backend="reference", **limits).close()
    text = python_example().replace("random_weights=0", 'random_weights=0, backend="reference"')
    names: dict[str, object] = {}
    exec(compile(text, "README.md", "exec"), names)
    tokens = names["tokens"]
    assert isinstance(tokens, list) and len(tokens) == 8


@pytest.mark.full
def test_the_python_example_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    media_files()
    for line, shown in examples().items():
        if line.endswith("--out media"):
            check(line, shown)
    exec(compile(python_example(), "README.md", "exec"), {})
