"""The libraries of the CPU kernels: which is chosen, where it comes from, and what is said if there
is none.

The kernels' tests with the compiler's sanitizers in them, for each instruction set of this CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from g4ir.backends.cpu import library as cpu_library
from g4ir.backends.cpu import pyops
from g4ir.backends.cpu.library import Library, kernels
from g4ir.backends.inductor.backend import BACKEND
from g4ir.errors import InputError, LowerError, MissingError, TrustError
from g4ir.ui import processor
from g4ir.ui.processor import (
    CAPS,
    ISA,
    SETS,
    architecture,
    cpu_flags,
    hold_libraries,
    instruction_set,
    select_set,
)
from tests.cases import TABLES

BY_NAME = {s.name: s for s in SETS}
ROWS = TABLES["isa"]["processors"].items()
PROCESSORS = {name: (machine, tuple(flags.split())) for name, (machine, flags) in ROWS}
SAPPHIRE_RAPIDS, ZEN3 = (PROCESSORS[name][1] for name in ("amx", "avx2"))


@pytest.mark.parametrize("name", [s.name for s in SETS])
def test_the_best_set_of_a_processor(name: str) -> None:
    machine, flags = PROCESSORS[name]
    assert select_set(machine, flags).name == name
    for s in SETS:  # which every better processor of the architecture may be held to
        if s.machine == machine and s.flags <= {*flags}:
            assert select_set(machine, flags, s.name) == s


def test_a_processor_without_any() -> None:
    with pytest.raises(MissingError, match=r"amx, .*neon, none of which .* this riscv64 CPU"):
        select_set("riscv64", ())
    with pytest.raises(MissingError, match="--backend reference"):
        select_set("x86_64", ("ssse3",))


@pytest.mark.parametrize(("name", "said"), TABLES["isa"]["lacks"])
def test_a_set_that_the_processor_lacks(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        select_set("x86_64", ZEN3, name)


def test_a_process_is_held_to_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process uses of its CPU follows: of AMX's, as on one that has AVX2 alone."""
    monkeypatch.setattr(processor, "_all_flags", lambda: SAPPHIRE_RAPIDS)
    monkeypatch.setattr(processor, "architecture", lambda: "x86_64")
    monkeypatch.delenv(ISA, raising=False)
    assert instruction_set().name == "amx" and processor.cpu_flags() == SAPPHIRE_RAPIDS
    monkeypatch.setenv(ISA, "avx2")
    assert instruction_set().name == "avx2"
    assert {*processor.cpu_flags()} == BY_NAME["avx2"].flags


def test_libraries_are_held_to_a_set() -> None:
    """torch's products too, before it is loaded; the user's own variables win."""
    environ = {ISA: "avx2", CAPS[1]: "AVX"}
    hold_libraries(environ)
    values = ("avx2", "AVX", "AVX2", "x86-64-v3")
    assert environ == {ISA: "avx2", **dict(zip(CAPS, values, strict=True))}
    for name in ("dotprod", "no set"):
        hold_libraries(environ := {ISA: name})
        assert environ == {ISA: name}
    code = "import g4ir, torch; print(torch.backends.cpu.get_cpu_capability())"
    if instruction_set().machine == "x86_64":
        env = {**os.environ, ISA: "v2"}
        assert subprocess.check_output([sys.executable, "-c", code], env=env) == b"DEFAULT\n"


# --- where a library comes from

SMALL = Library("small", (("team.c",),))


@pytest.fixture
def home(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without libraries, and a package without ready ones."""
    for programs in own_home.glob("*/g4ir/programs"):
        programs.unlink()
    monkeypatch.setattr(cpu_library, "READY", own_home / "ready")
    return own_home


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library.shutil, "which", lambda name: None)


def test_compiled_once_and_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = list[str]()
    with SMALL.opened(messages.append) as path:
        assert path.name == SMALL.file and path.read_bytes().startswith(b"\x7fELF")
    assert "about a minute" in "".join(messages)
    assert not path.exists()  # loaded, it is needed no more
    monkeypatch.setattr(Library, "compile", None)
    with SMALL.opened(messages.append) as again:
        assert again.read_bytes() and len(messages) == 1
    SMALL.check()


@pytest.mark.usefixtures("no_compiler")
def test_a_ready_library_needs_no_compiler(home: Path) -> None:
    (home / "ready").mkdir()
    (home / "ready" / SMALL.file).write_bytes(b"library")
    SMALL.check()
    with SMALL.opened() as path:
        assert path == home / "ready" / SMALL.file


@pytest.mark.usefixtures("no_compiler", "home")
def test_neither_ready_nor_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a build, and of a load."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    said = rf"no {SMALL.file}, and no compiler is found \(gcc, cc, clang, g\+\+\): install .*or a"
    with pytest.raises(MissingError, match=said):
        SMALL.check()
    with pytest.raises(MissingError, match=said), SMALL.opened():
        pass
    monkeypatch.setenv("CC", "my-cc -m64")
    with pytest.raises(MissingError, match=r"is found \(my-cc -m64\)"):
        SMALL.check()


def test_library_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of other sources, in the package or the cache, is another one."""
    names = [SMALL.file, replace(SMALL, options=("-O1",)).file]
    (tmp_path / "team.c").write_text("int x;\n")
    monkeypatch.setattr(cpu_library, "SOURCES", tmp_path)
    names.append(replace(SMALL).file)
    (tmp_path / "team.h").write_text("int y;\n")
    assert len({*names, replace(SMALL).file}) == 4


def test_a_compiler_that_fails_is_quoted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "SOURCES", home)
    (home / "team.c").write_text("int f(void) { return nothing; }\n")
    with pytest.raises(LowerError, match=r"(?s)do not compile: .*nothing"), replace(SMALL).opened():
        pass
    assert not list((home / "CACHE").rglob("*.so"))


def test_a_library_that_others_may_change_is_not_loaded(home: Path) -> None:
    with SMALL.opened():
        pass
    (kept,) = (home / "CACHE").rglob("*.so")
    kept.parent.chmod(0o777)
    with pytest.raises(TrustError, match="can be written by other users"), SMALL.opened():
        pass


OPENED = """
from g4ir.backends.cpu.library import Library
with Library("small", (("team.c",),)).opened() as path:
    print(path.stat().st_size)
"""


def test_two_processes_compile_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, script = home / "calls", home / "cc"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nsleep 0.5\nexec gcc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    words = [sys.executable, "-c", OPENED]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(2)]
    sizes = {p.communicate(timeout=120)[0] for p in both}
    assert len(sizes) == 1 and all(p.returncode == 0 for p in both)
    assert len(calls.read_text().splitlines()) == 3  # the header, the part, and the library


# --- what is compiled


def undefined(path: Path, prefixes: Sequence[str]) -> set[str]:
    """Undefined symbols of a library that begin so."""
    listed = subprocess.check_output(["nm", "-D", "--undefined-only", path], text=True)
    return {name for name in listed.split() if name.startswith(tuple(prefixes))}


@pytest.mark.skipif(instruction_set().machine != "x86_64", reason="needs another compiler")
@pytest.mark.parametrize(
    "isa",
    [pytest.param(s, marks=pytest.mark.full) for s in SETS if s.machine == "x86_64"],
    ids=lambda s: s.name,
)
def test_every_set_compiles(isa: processor.InstructionSet, tmp_path: Path) -> None:
    """Without torch, and without the instructions of this machine."""
    kernels(isa).compile(tmp_path / "kernels.so")
    assert not undefined(tmp_path / "kernels.so", ("aoti", "torch", "Py"))


def test_the_kernels_need_nothing_of_torch() -> None:
    with kernels().opened() as path:
        assert not undefined(path, ("aoti", "torch", "Py"))


def test_a_library_that_cannot_be_loaded(home: Path) -> None:
    (home / "ready").mkdir()
    (home / "ready" / SMALL.file).write_bytes(b"of another machine" * 99)
    with pytest.raises(MissingError, match=r"cannot be loaded: .*invalid ELF header; if the file"):
        pyops.load_kernels(SMALL)


def test_what_binds_an_engine_to_a_machine() -> None:
    """Compiled programs; weights and graphs run everywhere."""
    here = BACKEND.machine("cpu")
    assert BACKEND.machine_of("cpu", {"prefill": (None, "x.pt2"), "decode": ()}) == here
    assert BACKEND.machine_of("cpu", {"prefill": (None,)}) == "any"
    assert BACKEND.machine_of("cpu", {}) == "any"


#: what reads and writes at the edges of sizes: products, codes, attention, steps
FILES = ("kernels", "token_loop")
HERE = [s.name for s in SETS if s.machine == architecture() and s.flags <= {*cpu_flags()}]


@pytest.mark.full
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("kinds", ["address,undefined", "thread"])
def test_kernels_under_sanitizers(name: str, kinds: str) -> None:
    """Addresses and undefined behaviour; threads that read what others write."""
    words = ["-x", "-k", "not other_cpus and not test_other_threads"]
    words += [f"tests/test_{file}.py" for file in FILES]
    command = [sys.executable, "-m", "tests.sanitized", kinds, *words]
    done = subprocess.run(command, env=os.environ | {ISA: name}, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
