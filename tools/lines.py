"""Lines of Python per room, beside how many each may have; with --check, exit 1 above."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: room -> the most lines that it may have. Whoever needs more says so here, in the same commit
MOST = {
    "g4ir/errors.py": 70,
    "g4ir/ui": 765,
    "g4ir/ops": 3210,
    "g4ir/ir": 1220,
    "passes": 1460,
    "g4ir/spec": 2275,
    "g4ir/model": 1610,
    "g4ir/weights": 1500,
    "g4ir/plan": 2550,
    "backends": 18350,
    "g4ir/media": 1560,
    "g4ir/engine": 3210,
    "g4ir/check": 2700,
    "g4ir/bench": 2380,
    "g4ir/cli": 2165,
    "bench": 1260,
    "tests": 33230,
    "tools": 60,
}


def lines(path: Path) -> int:
    """Of a file, or of all Python files below a folder."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return sum(len(file.read_text().splitlines()) for file in files)


def main(words: list[str]) -> int:
    """Print the table, or what is above its budget; 1 where something is."""
    check = "--check" in words
    found = {room: lines(ROOT / room) for room in MOST}
    over = {room: n for room, n in found.items() if n > MOST[room]}
    for room, n in (over if check else found).items():
        print(f"{n:7d} lines of {MOST[room]:6d}  {room}")
    if not check:
        print(f"{sum(found.values()):7d} lines of {sum(MOST.values()):6d}")
    if over:
        print("more lines than a room may have: see tools/lines.py", file=sys.stderr)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
