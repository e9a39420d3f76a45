"""Code lines of each room and its cap; with --check, exit 1 if a room is above its cap.

Code lines have a token on them: blank lines, comments and docstrings are free. Of C, JavaScript,
CSS, HTML and YAML those lines count that are neither blank nor a comment. A cap has some slack, and
commits do not raise it: if a room is full, other code in it has to go.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: room -> maximum code lines; a file counts for the longest room name that its path begins with
CAPS = {
    "g4ir/errors.py": 40,
    "g4ir/ui": 715,
    "g4ir/ops": 2840,
    "g4ir/ir": 700,
    "passes": 860,
    "g4ir/spec": 1735,
    "g4ir/model": 1310,
    "g4ir/parallel": 590,
    "g4ir/quant": 365,
    "g4ir/weights": 5050,
    "g4ir/plan": 1530,
    "backends": 790,
    "backends/inductor": 1045,
    "backends/cpu": 1390,
    "backends/cuda": 2215,
    "backends/primitives": 1260,
    "backends/onnx_graph": 625,
    "backends/trt": 2025,
    "g4ir/media": 960,
    "g4ir/chat": 1980,
    "g4ir/artefact": 515,
    "g4ir/engine": 3620,
    "g4ir/builder": 1930,
    "g4ir/generate": 755,
    "g4ir/check": 2640,
    "g4ir/bench": 1000,
    "g4ir/serve": 3150,
    "g4ir/serve/protocols": 1050,
    "g4ir/cli": 3030,
    "g4ir-vllm": 1100,
    "bench": 1760,
    "examples": 260,
    "tests": 28350,
    "tools": 460,
}
#: other caps: name -> (maximum code lines, suffixes of the files)
OTHERS = {
    "C": (4300, (".c", ".h")),
    "page": (2300, (".js", ".css", ".html")),
    "YAML of the product": (1750, (".yaml",)),
}
PRODUCT = ("g4ir/", "passes/", "backends/", "specs/")
CODE = {tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING}
#: tokens after which a string is a docstring; those of FREE may stand between
BREAKS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
FREE = {tokenize.NL, tokenize.COMMENT}


def python_lines(text: str) -> int:
    """Count the lines of Python that have code."""
    lines, begins = set[int](), True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = begins and token.type == tokenize.STRING
        if token.type in CODE and not docstring:
            lines |= {*range(token.start[0], token.end[0] + 1)}
        begins = token.type in BREAKS or (begins and token.type in FREE)
    return len(lines)


def plain_lines(text: str) -> int:
    """Count the lines of another language that are neither blank nor a comment."""
    lines = (line.strip() for line in text.splitlines())
    return sum(1 for line in lines if line and not line.startswith(("//", "/*", "*", "#")))


def counted() -> Counter[str]:
    """Return room (or other entry with a cap) -> its code lines, of the files in git."""
    found: Counter[str] = Counter(dict.fromkeys((*CAPS, *OTHERS), 0))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        path = ROOT / name
        if not path.is_file():
            continue
        if name.endswith(".py"):
            room = max((r for r in CAPS if f"{name}/".startswith(f"{r}/")), key=len, default="")
            if room:
                found[room] += python_lines(path.read_text())
        elif name.startswith(PRODUCT):
            for other, (_, ends) in OTHERS.items():
                if name.endswith(ends) and not name.startswith("specs/"):
                    found[other] += plain_lines(path.read_text())
    return found


def main(words: list[str]) -> int:
    """Print the table, or the rooms above their caps; return 1 if there are any."""
    caps = CAPS | {name: cap for name, (cap, _) in OTHERS.items()}
    found = counted()
    over = {name: n for name, n in found.items() if n > caps[name]}
    check = "--check" in words
    for name, n in (over if check else found).items():
        print(f"{n:7d} code lines of {caps[name]:6d}  {name}")
    if not check:
        product = sum(n for room, n in found.items() if f"{room}/".startswith(PRODUCT))
        print(f"{product:7d} of the product, in Python")
    if over:
        print("more code than a room may have: delete some, or a feature", file=sys.stderr)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
