"""Tests with a compiler's sanitizer in the CPU kernels: `python -m tests.sanitized KINDS [words of
pytest]`. What it finds ends the process with status 99."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from g4ir.backends.cpu import library

#: kind -> its library, which has to be loaded before all others
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=99",
}


def instrument(kinds: str) -> None:
    """Have libraries of kernels compiled with sanitizers, at a level at which that takes a minute.
    Words that no instruction minds are not aligned."""
    words = f"-DSANITIZED -fsanitize={kinds} -fno-sanitize-recover=all -fno-sanitize=alignment -g1"
    library.KERNEL_FLAGS = ("-O1", *library.KERNEL_FLAGS[1:], *words.split())
    end, flags, libraries = library.LINKING["linux"]
    flags = (*(f for f in flags if f != "-s"), f"-fsanitize={kinds}")
    library.LINKING["linux"] = (end, flags, libraries)


def main(kinds: str, *words: str) -> int:
    instrument(kinds)
    if "LD_PRELOAD" in os.environ:
        return pytest.main(["-q", "--capture=sys", "-p", "no:cacheprovider", *words])
    with library.kernels().opened():  # compilers run without what is loaded first
        pass
    names = (RUNTIMES[kind] for kind in kinds.split(","))
    asked = [["gcc", f"-print-file-name={name}"] for name in names]
    loaded = [subprocess.check_output(words, text=True).strip() for words in asked]
    environ = os.environ | OPTIONS | {"LD_PRELOAD": ":".join(loaded)}
    return subprocess.call([sys.executable, "-m", "tests.sanitized", kinds, *words], env=environ)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
