"""`make test-wheel`: README's commands by an installed wheel, in an environment of its own and a
folder and home with nothing of the repository. Not part of `make test`: its packages come from the
index, and an engine is compiled. The CPU kernels are ready in the wheel: no compiler is at hand for
them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from g4ir.spec.record import load_spec
from tests.gguf_files import bare_file, with_turns

BIN = Path(__file__).parents[1] / "build" / "wheel-env" / "bin"
MODEL = ("tiny.gguf", "--max-seq", "64")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    bare_file(folder / "tiny.gguf", load_spec("tiny-dense"), with_turns)
    yield folder
    shutil.rmtree(folder)  # its engine


def begun(home: Path, *words: str) -> subprocess.Popen[str]:
    """A command of the wheel that has begun."""
    kept = {name: os.environ[name] for name in ("LANG", "OMP_NUM_THREADS") if name in os.environ}
    env = {"HOME": str(home), "PATH": f"{BIN}:{os.defpath}", "CC": "no-compiler", **kept}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(words, cwd=home, env=env, text=True, **pipes)


def said(home: Path, *words: str, typed: str = "") -> str:
    """stdout of a command that succeeds."""
    process = begun(home, *words)
    try:
        out, err = process.communicate(typed, timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def test_nothing_of_the_repository_is_imported(home: Path) -> None:
    code = "import sys, g4ir.cli.common, g4ir.passes; print(*sys.path[1:], g4ir.__path__)"
    assert str(BIN.parents[1] / "g4ir") not in said(home, "python", "-c", code)


def test_run(home: Path) -> None:
    words = ("--prompt", "ab w3", "--max-new-tokens", "4", "--json")
    assert len(json.loads(said(home, "g4ir", "run", *MODEL, *words))["tokens"]) == 4


def test_chat(home: Path) -> None:
    words = ("--json", "--max-new-tokens", "4")
    assert '"finish_reason"' in said(home, "g4ir", "chat", *MODEL, *words, typed="ab\n")
    assert said(home, "g4ir", "engines").count("\n") == 1  # that of `run`


def test_serve(home: Path) -> None:
    """The API, and the page with all that it names."""
    process = begun(home, "g4ir", "serve", *MODEL, "--port", "0")
    try:
        assert process.stderr is not None
        told = [process.stderr.readline()]
        while told[-1] and ": ready" not in told[-1]:
            told.append(process.stderr.readline())
        url = re.search(r"listening at (http://\S+)", "".join(told))
        assert url, told
        page = urlopen(f"{url[1]}/").read().decode()
        named = re.findall(r'(?:src|href)="/?([\w./-]+\.\w+)"', page)
        assert "<html" in page and named
        for path in (*named, "v1/models"):
            assert urlopen(f"{url[1]}/{path}").status == 200
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
