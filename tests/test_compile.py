"""Compiled programs: their cache and its keys, the processes that compile, what goes wrong."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock
from zipfile import ZipFile

import pytest
import torch

from g4ir.backends.inductor import compile as compiler
from g4ir.backends.inductor import program_cache, workers
from g4ir.backends.inductor.device import find_compiler
from g4ir.backends.inductor.target import Target
from g4ir.errors import LowerError
from g4ir.ui.progress import no_progress
from tests.cases import TABLES

TEXT = TABLES["graphs"]["linear"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(program_cache, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "cache"


def stub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiling writes the text; returns what was compiled."""
    done: list[str] = []

    def compile_program(text: str, target: Target, path: Path) -> None:
        done.append(text)
        path.write_text(text)

    monkeypatch.setattr(workers, "compile_program", compile_program)
    return done


def compiled(out: Path, *texts: str, jobs: int = 1) -> dict[str, str]:
    """The names of programs, compiled into a folder."""
    return workers.compile_all(texts or [TEXT], Target("cpu"), out, jobs, no_progress)


def name(text: str) -> str:
    return compiler.program_name(text, Target("cpu"))


def test_second_compile(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that cannot be written is no error."""
    done = stub(monkeypatch)
    first = compiled(tmp_path / "a", TEXT, TEXT)
    second = compiled(tmp_path / "b")
    assert done == [TEXT] and first == second == {TEXT: f"{name(TEXT)}.pt2"}
    kept = own_cache / first[TEXT]
    assert list(own_cache.iterdir()) == [kept]
    for folder in ("a", "b"):
        assert (tmp_path / folder / first[TEXT]).read_text() == TEXT
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(program_cache, "cache_dir", lambda: tmp_path / "file" / "cache")
    for folder in ("c", "d"):
        compiled(tmp_path / folder)
    assert done == 3 * [TEXT]


@pytest.mark.parametrize("damaged", ["program", "digest"])
def test_damaged_cache(damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = stub(monkeypatch)
    made = compiled(tmp_path / "a")
    kept = program_cache.cache_dir() / made[TEXT]
    files = {"program": kept, "digest": program_cache._digest_file(kept.name)}
    files[damaged].write_text("damaged")
    compiled(tmp_path / "b")
    assert done == [TEXT, TEXT] and (tmp_path / "b" / kept.name).read_text() == TEXT
    compiled(tmp_path / "c")
    assert len(done) == 2


def test_what_was_kept_first_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another process, which keeps nobody out, compiles the same at the same time."""
    first = tmp_path / "first" / f"{name(TEXT)}.pt2"

    def late(text: str, target: Target, path: Path) -> None:
        first.parent.mkdir()
        first.write_text("first")
        program_cache.keep_program(first)
        path.write_text("late")

    monkeypatch.setattr(workers, "compile_program", late)
    made = compiled(tmp_path / "late")
    assert [p.name for p in (tmp_path / "late").iterdir()] == [made[TEXT]] == [first.name]
    assert (tmp_path / "late" / first.name).read_text() == "first"


def test_key_covers_what_lowering_imports() -> None:
    """What the lowerings import of their room and of what all devices share, and the kernels."""
    device, folder = find_compiler("cuda"), Path(compiler.__file__).parent
    room = folder.with_name("cuda")
    files = {*device.sources()}
    named = {p.name for p in files if p.parent == room} | {"kernels.py"}
    assert imported(room, "lowerings.py") <= named
    assert {*(room / "kernels").glob("*.py")} <= files
    assert imported(folder, "lower.py") | {"compile.py"} <= {*compiler.SOURCES} | {"target.py"}


def imported(folder: Path, first: str) -> set[str]:
    """A module of a folder and what it imports of it, not looking into folders within."""
    found, queue = set[str](), [first]
    while queue:
        name = queue.pop()
        found.add(name)
        if not (folder / name).is_file():
            continue
        here = re.findall(r"^ *from \.(\w+)[.\w]* import", (folder / name).read_text(), re.M)
        queue += [f"{m}.py" for m in here if f"{m}.py" not in found]
    return found


def test_key_depends_on_all_that_the_code_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {name(TEXT), name(TEXT.replace("8", "6"))}
    keys |= {compiler.program_name(TEXT, Target("cpu", "h200", rows)) for rows in (1, 2)}
    monkeypatch.setattr(compiler, "_sources", lambda device: "changed")
    keys.add(name(TEXT))
    monkeypatch.setattr(type(find_compiler("cpu")), "machine", lambda device: "elsewhere")
    keys.add(name(TEXT))
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.add(name(TEXT))
    assert len(keys) == 7 and name(TEXT) == name(TEXT)


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(compiler, "_compile", Mock(side_effect=error))


def test_failing_segment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RuntimeError("the compiler is out of luck"))
    with pytest.raises(LowerError, match=r"(?s)out of luck.*%v0 = linear"):
        compiled(tmp_path / "a")
    assert not program_cache.cache_dir().exists()


@pytest.mark.full
def test_failing_segment_of_a_process(tmp_path: Path) -> None:
    """An op that nobody knows, in one of two processes."""
    texts = [TEXT.replace("linear", "unheard_of"), TEXT.replace("linear", "unseen")]
    with pytest.raises(LowerError, match=r"unheard_of|unseen"):
        compiled(tmp_path / "a", *texts, jobs=2)


def test_unknown_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would copy every operand and say so to its log only."""
    log = logging.getLogger("torch._dynamo")

    def grumble(*_: Any) -> None:
        log.warning(
            "Encountered an exception in identify_accessed_tensors, assuming every input is mutated"
        )

    before = log.level, log.propagate, list(log.handlers)
    monkeypatch.setattr(compiler, "_compile", grumble)
    with pytest.raises(LowerError, match="which operands a kernel writes"):
        compiled(tmp_path / "a")
    assert (log.level, log.propagate, list(log.handlers)) == before


TWO = (TEXT, TEXT.replace("8", "6"))


def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str) -> None:
    """Processes that run a shell script in the place of a compiling one."""
    script = tmp_path / "worker"
    script.write_text(f"#!/bin/sh\n{lines}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.parametrize(("script", "message"), TABLES["torch backend"]["children"])
def test_a_process_that_dies_is_an_error(
    script: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What it printed is the cause, and not on the terminal."""
    worker(monkeypatch, tmp_path, script)
    with pytest.raises(LowerError, match=message) as caught:
        compiled(tmp_path / "a", *TWO, jobs=2)
    assert ("frame 12 of a stack" in str(caught.value.__cause__)) == ("frame" in script)
    assert capfd.readouterr().err == ""


def test_an_interrupt_ends_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(monkeypatch, tmp_path, f"echo > {tmp_path}/started; exec sleep 300")

    def interrupt() -> None:
        while not (tmp_path / "started").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):  # which waits for them
        compiled(tmp_path / "a", *TWO, jobs=2)
    assert time.monotonic() - start < 60


@pytest.mark.full
def test_processes_compile(tmp_path: Path) -> None:
    """Each text once, in a process that knows how."""
    for text, name in compiled(tmp_path / "a", *TWO, jobs=2).items():
        compiler.check_program(tmp_path / "a" / name, text)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("g++: No space left on device"),
    ],
)
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    folder, usage = tmp_path / "a", shutil.disk_usage(tmp_path)
    temporary = Path(tempfile.gettempdir())
    failing(monkeypatch, error)
    for full, said in (
        (lambda p: p == folder, f"most likely that of {folder}; .*--out"),
        (lambda p: p != folder, r"a disk or quota is full, .*TORCHINDUCTOR_CACHE_DIR"),
        (lambda p: p == temporary, r"a disk or quota is full, .*TMPDIR"),
    ):
        disk = lambda p, full=full: usage._replace(free=int(not full(p)))  # noqa: E731
        monkeypatch.setattr(shutil, "disk_usage", disk)
        with pytest.raises(LowerError, match=said):
            compiled(tmp_path / "a")


def test_leftovers_of_a_killed_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's cache may hold an empty description of a program. The compiler's own writer of
    files would end the process on a full disk: it is given a buffer."""
    made: list[str | None] = []

    def package(program: Any, *, package_path: Any, inductor_configs: Any) -> None:
        made.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
        assert isinstance(package_path, io.BytesIO)
        with ZipFile(package_path, "w") as archive:
            archive.writestr("model/metadata.json", "" if len(made) == 1 else "{}")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", package)
    monkeypatch.setattr(compiler, "exported", lambda text, target: None)
    compiler.compile_program(TEXT, Target("cpu"), tmp_path / "a.pt2")
    compiler.check_program(tmp_path / "a.pt2", TEXT)
    with ZipFile(tmp_path / "a.pt2") as archive:
        assert archive.read("model/metadata.json") == b"{}"
    assert len(set(made)) == len(made) == 2
