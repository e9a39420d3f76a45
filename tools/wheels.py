"""Build wheels of this tree, with compiled CPU kernels of every instruction set: for Linux on
x86-64 and aarch64, macOS on ARM and Windows on x86-64. Wheels for other machines than this need a
cross compiler: for Linux Debian's, for macOS and Windows the package `ziglang`.

    python tools/wheels.py --out build/wheels
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from g4ir.backends.cpu.library import READY, Library, kernels
from g4ir.ui.paths import variable
from g4ir.ui.processor import SETS, architecture

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("g4ir", "passes", "backends", "specs")
FILES = ("pyproject.toml", "README.md", "LICENSE")
#: files of a checkout that are not copied into a wheel
IGNORED = shutil.ignore_patterns("__pycache__", READY.name)


@dataclass(frozen=True)
class Wheel:
    """A target of a wheel: its system, by sys.platform, and architecture. `tag`: platform tag of
    the wheel; empty: from the oldest glibc that its kernels need."""

    system: str
    machine: str
    tag: str = ""

    @property
    def compiler(self) -> str:
        """The command of its C compiler; empty: the default one."""
        if self.system != "linux":
            return f"{sys.executable} {ROOT / 'tools' / 'zig.py'} {self.system}"
        return "" if self.machine == architecture() else f"{self.machine}-linux-gnu-gcc"

    @property
    def lacks(self) -> str:
        """Return why its compiler cannot be used on this machine; empty if it can."""
        if self.system != "linux":
            return "" if importlib.util.find_spec("ziglang") else "package ziglang"
        return "" if not self.compiler or shutil.which(self.compiler) else self.compiler

    def libraries(self) -> list[Library]:
        """Its kernel libraries; without AMX on systems where a process cannot request it."""
        sets = [s for s in SETS if s.machine == self.machine]
        if self.system != "linux":
            sets = [s for s in sets if s.name != "amx"]
        return [kernels(s, self.system) for s in sets]


#: macOS 11 is the first on ARM (tools/zig.py)
WHEELS = (
    Wheel("linux", "x86_64"),
    Wheel("linux", "aarch64"),
    Wheel("darwin", "aarch64", "macosx_11_0_arm64"),
    Wheel("win32", "x86_64", "win_amd64"),
)


def glibc(folder: Path) -> int:
    """Return the minimum minor version of glibc 2 that the libraries in a folder need."""
    found = (re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes()) for file in folder.iterdir())
    return max(int(version) for versions in found for version in versions)


def write_wheel(wheel: Wheel, out: Path) -> None:
    with tempfile.TemporaryDirectory() as tree:
        for name in FOLDERS:
            shutil.copytree(ROOT / name, Path(tree, name), ignore=IGNORED)
        for name in FILES:
            shutil.copy(ROOT / name, tree)
        ready = Path(tree) / READY.relative_to(ROOT)
        ready.mkdir(parents=True)
        for library in wheel.libraries():
            library.compile(ready / library.file)
        platform = wheel.tag or f"manylinux_2_{glibc(ready)}_{wheel.machine}"
        words = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", out, tree]
        words.append(f"--config-settings=--build-option=--plat-name={platform}")
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "wheels")
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    for wheel in WHEELS:
        if wheel.lacks:
            print(f"no {wheel.lacks}: no wheel for {wheel.machine} on {wheel.system}")
            continue
        before = {*out.glob("*.whl")}
        with variable("CC", wheel.compiler or os.environ.get("CC", "")):
            write_wheel(wheel, out)
        print(*{*out.glob("*.whl")} - before)


if __name__ == "__main__":
    main()
