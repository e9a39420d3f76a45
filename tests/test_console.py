"""What the command line says on stderr, its exit codes, and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from g4ir.backends.inductor.toolchain import cpp_compiler
from g4ir.errors import MissingError
from g4ir.ui import console
from g4ir.ui.paths import cache_root, private, state_root
from tests.cli_tools import BUILD, g4ir

ERRORS = [
    (KeyboardInterrupt(), 130, "g4ir: interrupted\n"),
    (MemoryError(), 3, "g4ir: error: not enough memory; build for fewer rows"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3, "g4ir: error: not enough"),
    (PermissionError(13, "Permission denied", "x"), 2, "g4ir: error: x: Permission denied\n"),
    (ValueError("odd\nmore"), 70, "g4ir: internal error: ValueError: odd; run again with --trace"),
]


@pytest.mark.parametrize(("error", "code", "words"), ERRORS)
def test_what_is_said_of_an_error(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    monkeypatch.setattr("g4ir.cli.specs.load_spec", Mock(side_effect=error))
    outcome = g4ir("specs", "show", "e2b")
    assert outcome.code == code and outcome.err.startswith(words)
    assert outcome.err.count("\n") == 1
    assert "Traceback" in g4ir("--trace", "specs", "show", "e2b").err


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each message that takes long; at a terminal one that is rewritten, and that other
    lines replace."""
    monkeypatch.setattr(console, "QUIET_S", 0.0)
    monkeypatch.setattr(console, "PERIOD_S", 0.01)
    monkeypatch.setattr(console, "_on_terminal", lambda: terminal)
    with console.Progress() as progress:
        for message in ("one", "two"):
            progress(message)
            time.sleep(0.2)
        if terminal:
            console.say("note: three")
    text = capsys.readouterr().err
    if terminal:
        assert text.startswith("\r\x1b[Kg4ir: one (0 s)\r\x1b[K")
        assert "\r\x1b[Kg4ir: note: three\n" in text and text.count("\n") == 1
    else:
        assert text == "g4ir: one (0 s)\ng4ir: two (0 s)\n"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """A shell line in which $G4IR is the tool; pipefail, so that its exit code counts."""
    line = f"set -o pipefail; {command}".replace("$G4IR", f"{sys.executable} -m g4ir.cli")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True)


def test_a_reader_that_goes_away_is_no_error() -> None:
    words = [sys.executable, "-m", "g4ir.cli", "show", "--variant", "tiny-ple"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout and command.stderr
        command.stdout.close()
        assert (command.wait(), command.stderr.read()) == (141, b"")


def test_a_full_or_closed_stdout() -> None:
    for setting in ("", "PYTHONUNBUFFERED=1"):
        done = shell(f"export {setting}; $G4IR specs > /dev/full")
        assert done.returncode == 74
        assert done.stderr == "g4ir: error: stdout: No space left on device\n"
    done = shell("$G4IR specs >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stderr() -> None:
    """What is opened later must not become descriptor 0 to 2: libuv aborts when it closes one."""
    code = (
        "import os, sys; from g4ir.ui.console import tolerant_output, say; tolerant_output(); "
        "say('unheard'); print(os.open(os.devnull, os.O_RDONLY) > 2, sys.stderr is not None)"
    )
    for closed in ("2>&-", "<&- 2>&-"):
        done = shell(f'"{sys.executable}" -c "{code}" {closed}')
        assert (done.returncode, done.stdout) == (0, "True True\n")
    assert shell("$G4IR specs no-such-verb 2>&-").returncode == 2


@pytest.mark.parametrize(
    ("variable", "folder"), [("XDG_CACHE_HOME", cache_root), ("XDG_STATE_HOME", state_root)]
)
def test_a_folder_of_the_user_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, folder: Callable[[], Path]
) -> None:
    """The error names the variable to set."""
    (tmp_path / "file").touch()
    for path in ("/proc/none", str(tmp_path / "file")):
        monkeypatch.setenv(variable, path)
        with pytest.raises(OSError, match=f"; set {variable} to a folder that you may write to"):
            private(folder() / "engines")


def test_python_without_docstrings() -> None:
    assert shell("export PYTHONOPTIMIZE=2; $G4IR plan tiny-moe").returncode == 0


def test_a_mac_is_refused_before_a_compiler_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(MissingError, match="compiled on Linux alone: use Docker"):
        cpp_compiler()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_build_that_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        assert [*tmp_path.iterdir()]
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr("g4ir.backends.reference.ReferenceBackend.compile", ended)
    words = ("--variant", "tiny-dense", "--random-weights", "0", "--out", tmp_path / "e")
    outcome = g4ir(*BUILD, *words)
    assert outcome.code == 128 + number and not [*tmp_path.iterdir()]
    said = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert outcome.err == f"g4ir: {said}\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
