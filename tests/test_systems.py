"""Systems other than Linux: a Python that lacks what Windows lacks, processors as other systems
name them, and kernels that a cross compiler makes for macOS and Windows."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from g4ir.backends.cpu.library import LINKING, kernels
from g4ir.ui import processor
from g4ir.ui.processor import SETS, select_set
from tests.sources import FILES, ROOT
from tools.zig import in_zigs_words

BUILD = ("build", "--variant", "tiny-dense", "--random-weights", "0", "--max-seq", "64")


def like_windows(lines: Sequence[Sequence[str]]) -> list[object]:
    """Run command lines in a Python like that of Windows; return what it says in JSON: of locks
    and memory, and each line's exit code."""
    words = [sys.executable, "-m", "tests.like_windows", json.dumps(lines)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    said = [x.removeprefix("json ") for x in done.stdout.splitlines() if x.startswith("json ")]
    return [json.loads(x) for x in said]


@pytest.mark.parametrize(
    "backend", ["reference", *(pytest.param(b, marks=pytest.mark.full) for b in ("onnx", "torch"))]
)
def test_a_python_that_lacks_what_windows_lacks(own_home: Path, backend: str) -> None:
    """Every module is imported, one of two processes gets a lock, models are planned, built and
    run; by the C kernels too, with this machine's library in place of that of Windows."""
    out = str(own_home / "engine")
    lines = [
        ["plan", "--variant", "tiny-dense"],
        [*BUILD, "--backend", backend, "--prefill-chunk", "16", "--out", out],
        ["run", out, "--tokens", "2,5,7", "--max-new-tokens", "4"],
    ]
    if backend != "reference":
        lines.append(["verify", out])
    assert like_windows(lines) == [[True, False], *[0] * len(lines)]
    manifest = json.loads((own_home / "engine" / "manifest.json").read_text())
    assert manifest["files"] and not any("\\" in name for name in manifest["files"])


def test_relative_names_have_slashes() -> None:
    """Where a path below another becomes a name, of a manifest for example, it has the slashes of
    every system."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        named = {id(n.value.func) for n in calls if isinstance(n.value, ast.Call)}  # x.f().attr
        for n in calls:
            if n.attr == "relative_to":
                assert id(n) in named, f"{path}:{n.lineno}: .relative_to(...) without .as_posix()"


# --- processors


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\n", "dotprod"),  # M1
        (
            "hw.optional.floatingpoint: 1\nhw.optional.arm.FEAT_DotProd: 1\n"
            "hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_I8MM: 1\n",
            "i8mm",
        ),
        ("", "neon"),
    ],
)
def test_cpus_of_macos(monkeypatch: pytest.MonkeyPatch, said: str, name: str) -> None:
    monkeypatch.setattr(processor.subprocess, "check_output", lambda *_, **__: said)
    assert select_set("aarch64", tuple(processor._flags_of_macos())).name == name


#: as torch 2.13 names the extensions of Zen 4, and AMX
ZEN4 = (
    *("avx", "avx2", "bmi2", "f16c", "fma3", "sse4_2", "ssse3", "avx512_bf16", "avx512_bw"),
    *("avx512_cd", "avx512_dq", "avx512_f", "avx512_vbmi", "avx512_vl", "avx512_vnni"),
)
AMX = ("amx_bf16", "amx_int8", "amx_tile")


@pytest.mark.parametrize(
    ("has", "name"),
    [
        ((*ZEN4, *AMX), "avx512_bf16"),
        (("avx_vnni", *ZEN4[:7]), "avx_vnni"),
        (ZEN4[:7], "avx2"),
        (ZEN4[5:7], "v2"),
    ],
)
def test_cpus_of_windows(monkeypatch: pytest.MonkeyPatch, has: Sequence[str], name: str) -> None:
    known = {**dict.fromkeys((*ZEN4, *AMX), False), **dict.fromkeys(has, True), "cpu_name": "x"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert select_set("x86_64", tuple(processor._flags_of_windows())).name == name


@pytest.mark.skipif(
    not hasattr(torch.cpu, "get_capabilities") or processor.architecture() != "x86_64",
    reason="torch does not say",
)
def test_torch_finds_what_linux_says() -> None:
    needed = {f for s in SETS for f in s.flags if not f.startswith("amx")}
    assert needed & {*processor._flags_of_windows()} == needed & {*processor._flags_of_linux()}


# --- cross compilers


@pytest.mark.parametrize(
    ("word", "zigs"),
    [
        ("-march=x86-64-v3", "-mcpu=x86_64_v3"),
        ("-march=armv8-a", "-mcpu=generic+v8a"),
        ("-march=armv8.2-a+dotprod+i8mm", "-mcpu=generic+v8_2a+dotprod+i8mm"),
        ("-mavx512vnni", "-mavx512vnni"),
    ],
)
def test_processors_in_zigs_words(word: str, zigs: str) -> None:
    assert in_zigs_words(word) == zigs


def test_libraries_of_systems() -> None:
    """They have the names and flags of their system, and those of Linux what they had."""
    files = {system: kernels(SETS[-1], system).file for system in LINKING}
    assert {Path(f).suffix for f in files.values()} == {".so", ".dylib", ".dll"}
    assert len({Path(f).stem for f in files.values()}) == 3
    text = (ROOT / "backends" / "cpu" / "kernels" / "system.h").read_text()
    systems = ("__linux__", "__APPLE__", "_WIN32")
    assert all(word in text for word in systems)
    for file in (ROOT / "backends" / "cpu" / "kernels").glob("*.[ch]"):
        said = "" if file.name == "system.h" else file.read_text()
        assert not any(word in said for word in (*systems, "futex", "sched_", "aligned_alloc"))


needs_zig = pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="no ziglang")
ZIG = f"{sys.executable} {ROOT / 'tools' / 'zig.py'}"


@pytest.mark.full
@needs_zig
@pytest.mark.parametrize(
    ("system", "name", "magic"),
    [
        ("darwin", "neon", b"\xcf\xfa\xed\xfe"),
        ("darwin", "i8mm", b"\xcf\xfa\xed\xfe"),
        ("win32", "avx2", b"MZ"),
        ("win32", "avx512_bf16", b"MZ"),
    ],
)
def test_kernels_for_another_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, name: str, magic: bytes
) -> None:
    monkeypatch.setenv("CC", f"{ZIG} {system}")
    (isa,) = (s for s in SETS if s.name == name)
    library = kernels(isa, system)
    library.compile(tmp_path / library.file)
    data = (tmp_path / library.file).read_bytes()
    assert data.startswith(magic) and b"g4ir_run_steps" in data


@pytest.mark.full
@needs_zig
@pytest.mark.skipif(not shutil.which("wine"), reason="no wine")
def test_a_product_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By wine, on the threads of Windows' calls."""
    monkeypatch.setenv("CC", f"{ZIG} win32")
    (isa,) = (s for s in SETS if s.name == "v2")
    kernels(isa, "win32").compile(tmp_path / "kernels.dll")
    source, program = Path(__file__).with_name("windows_product.c"), tmp_path / "product.exe"
    subprocess.run([*ZIG.split(), "win32", "-O1", source, "-o", program], check=True)
    done = subprocess.run(
        ["wine", program, "kernels.dll"],
        cwd=tmp_path,
        env={**os.environ, "WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
