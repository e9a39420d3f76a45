"""Build wheels of this tree for Linux, with the CPU kernels of every instruction set ready inside:
for x86-64, and for aarch64 if there is a cross compiler.

    python tools/wheels.py --out build/wheels
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from g4ir.backends.cpu.library import CALL_LIBRARY, READY, kernels
from g4ir.ui.processor import SETS, architecture

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("g4ir", "passes", "backends", "specs")
FILES = ("pyproject.toml", "README.md", "LICENSE")
#: what lies in the tree of a user, not in a wheel
IGNORED = shutil.ignore_patterns("__pycache__", READY.name)


def write_kernels(machine: str, folder: Path) -> None:
    """Compile the kernels of every instruction set of an architecture into a folder."""
    folder.mkdir(parents=True)
    libraries = [kernels(s) for s in SETS if s.machine == machine]
    for library in (*libraries, CALL_LIBRARY):
        library.compile(folder / library.file)


def glibc(folder: Path) -> int:
    """The newest minor version of glibc 2 that libraries need."""
    found = (re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes()) for file in folder.iterdir())
    return max(int(version) for versions in found for version in versions)


def write_wheel(machine: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as tree:
        for name in FOLDERS:
            shutil.copytree(ROOT / name, Path(tree, name), ignore=IGNORED)
        for name in FILES:
            shutil.copy(ROOT / name, tree)
        ready = Path(tree) / READY.relative_to(ROOT)
        write_kernels(machine, ready)
        platform = f"manylinux_2_{glibc(ready)}_{machine}"
        words = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", out, tree]
        words.append(f"--config-settings=--build-option=--plat-name={platform}")
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "wheels")
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    for machine in ("x86_64", "aarch64"):
        cross = "" if machine == architecture() else f"{machine}-linux-gnu-gcc"
        if cross and not shutil.which(cross):
            print(f"no {cross}: no wheel for {machine}")
            continue
        if cross:
            os.environ["CC"] = cross
        write_wheel(machine, out)
        print(*out.glob(f"*{machine}.whl"))


if __name__ == "__main__":
    main()
