"""Shell completion: bash's own, in a terminal; other shells where they are installed."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from g4ir.backends import BACKENDS
from g4ir.cli import _parser
from g4ir.cli.common import tables
from g4ir.cli.completion import rows
from g4ir.passes import PASSES
from g4ir.plan.gpus import GPUS
from g4ir.plan.presets import PRESETS
from tests.cli_tools import g4ir

MARK = "LINE="
#: typed -> the line after completion inserted every match
CASES = {
    "g4ir comp": "g4ir completion ",
    "g4ir completion ": "g4ir completion bash fish zsh ",
    "g4ir specs sc": "g4ir specs schema ",
    "g4ir specs show tiny-m": "g4ir specs show tiny-media tiny-moe ",
    "g4ir run --prom": "g4ir run --prompt ",
    "g4ir build --backend t": "g4ir build --backend torch trt ",
    "g4ir build --variant=e": "g4ir build --variant=e2b e4b ",
    "g4ir show --json --phase pre": "g4ir show --json --phase prefill prefill_media ",
    "g4ir plan --gpu h100-p": "g4ir plan --gpu h100-pcie-80gb ",
    "g4ir run two": r"g4ir run two\ words.gguf ",
    "g4ir run --image t": r"g4ir run --image two\ words.gguf ",
    "g4ir run --image=t": r"g4ir run --image=two\ words.gguf ",
    "g4ir build --out ": "g4ir build --out folder ",
    "g4ir build --max-seq t": "g4ir build --max-seq t",  # a number, which no file is
    "g4ir engines r": "g4ir engines rm ",
}


class Terminal:
    """An interactive bash that inserts all completions at Ctrl-T and prints its line at Ctrl-O."""

    def __init__(self, here: Path) -> None:
        (here / "settings").write_text(
            f"PS1=READY; source ./script; bind '\"\\C-t\": insert-completions'\n"
            f'bind -x \'"\\C-o": echo "{MARK}[$READLINE_LINE]"\'\n'
        )
        child, self._end = pty.fork()
        if not child:
            os.chdir(here)
            command = ["bash", "--noprofile", "--rcfile", "settings"]
            os.execvpe("bash", command, {**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"})
        self._child = child
        try:
            self._read("READY")
        except BaseException:
            self.close()
            raise

    def line(self, typed: str) -> str:
        """Type, complete, and return the line then, which is removed."""
        os.write(self._end, f"{typed}\x14\x0f\x15".encode())
        return self._read("]").rpartition(f"{MARK}[")[2]

    def _read(self, end: str) -> str:
        found, until = "", time.monotonic() + 60
        while end not in found:
            ready, _, _ = select.select([self._end], [], [], until - time.monotonic())
            assert ready, found
            found += os.read(self._end, 1 << 16).decode()
        return found.partition(end)[0]

    def close(self) -> None:
        os.close(self._end)  # which hangs up
        os.waitpid(self._child, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("completion")
    (made / "two words.gguf").touch()
    (made / "folder").mkdir()
    return made


@pytest.fixture(scope="module")
def bash(folder: Path) -> Iterator[Terminal]:
    (folder / "script").write_text(g4ir("completion", "bash").out)
    terminal = Terminal(folder)
    yield terminal
    terminal.close()


@pytest.mark.parametrize("typed", CASES)
def test_bash(typed: str, bash: Terminal) -> None:
    assert bash.line(typed) == CASES[typed]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize("typed", [t for t in CASES if "--out" not in t])
def test_fish(typed: str, folder: Path) -> None:
    (folder / "script.fish").write_text(g4ir("completion", "fish").out)
    command = ["fish", "--no-config", "-c", 'source script.fish; complete -C "$argv"', typed]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    offered = {line.partition("\t")[0].rpartition("=")[2] for line in done.stdout.splitlines()}
    last = typed.rpartition(" ")[2].rpartition("=")[2]
    wanted = shlex.split(CASES[typed].removeprefix(typed[: len(typed) - len(last)]))
    assert offered == set(wanted) - {last}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_verb_and_option_is_offered(shell: str) -> None:
    script = g4ir("completion", shell).out
    assert all("\t".join(row).replace("'", "'\\''") in script for row in rows(_parser(), ""))
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_offered_words_are_legal() -> None:
    """The help of an option names them."""
    table, used = tables()["completions"], set[str]()
    named = {"variants": (), "gpus": GPUS, "passes": PASSES, "presets": PRESETS}
    named |= {"file": (), "folder": ()}
    assert set(table["--backend"]) == set(BACKENDS)
    offered: dict[tuple[str, str], set[str]] = {}
    for path, option, word, _ in rows(_parser(), ""):
        offered.setdefault((path, option), set()).add(word)
    for (path, option), values in offered.items():
        words = {w for w in table.get(option, ()) if w not in named}
        if option in table and words <= values:
            used.add(option)
            help = g4ir(*path.split(), "--help").out
            assert [w for w in words if w not in help] == []
    assert used == {name for name in table if name.startswith("--")}
