"""The C compiler of the package `ziglang` for another system, called as gcc is.

CC='python tools/zig.py win32' python ...
"""

from __future__ import annotations

import subprocess
import sys

#: by sys.platform; macOS 11 is the first on ARM
TARGETS = {"darwin": "aarch64-macos.11.0", "win32": "x86_64-windows-gnu"}


def in_zigs_words(word: str) -> str:
    """Return an option of gcc in zig's spelling: zig has other names of processors and
    extensions."""
    march = word.removeprefix("-march=")
    if march == word:
        return word
    base, *extensions = march.replace("armv", "generic+v").split("+")
    if extensions:
        extensions[0] = extensions[0].replace(".", "_").replace("-", "")
    return f"-mcpu={'+'.join((base.replace('-', '_'), *extensions))}"


if __name__ == "__main__":
    words = ["-target", TARGETS[sys.argv[1]], *map(in_zigs_words, sys.argv[2:])]
    sys.exit(subprocess.call([sys.executable, "-m", "ziglang", "cc", *words]))
