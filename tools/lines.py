"""Lines of Python per room, beside how many each may have; with --check, exit 1 above."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: room -> the most lines that it may have; a commit that raises a cap says in docs/decisions.md why
MOST = {
    "g4ir/errors.py": 94,
    "g4ir/ui": 900,
    "g4ir/ops": 4029,
    "g4ir/ir": 1148,
    "passes": 1530,
    "g4ir/spec": 2468,
    "g4ir/model": 1836,
    "g4ir/parallel": 898,
    "g4ir/quant": 329,
    "g4ir/weights": 3205,
    "g4ir/weights/gguf": 1476,
    "g4ir/plan": 2776,
    "backends": 17931,
    # Beside what a reader needs: an emulator of TensorRT, and what no device has run.
    "backends/trt/recorder": 1849,
    "backends/experimental": 1152,
    "g4ir/media": 1400,
    "g4ir/engine/ranks": 253,
    "g4ir/engine": 5906,
    "g4ir/chat": 2591,
    "g4ir/check": 3261,
    "g4ir/bench": 1995,
    "g4ir/serve": 2709,
    "g4ir/cli": 2816,
    "g4ir-vllm": 758,
    "g4ir-vllm/tests": 811,
    "bench": 2291,
    "tests": 38847,
    "tools": 548,
}


def lines(room: str) -> int:
    """Count lines of a file, or of a folder's Python files; inner rooms count for themselves."""
    path = ROOT / room
    inner = [ROOT / other for other in MOST if other.startswith(f"{room}/")]
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    own = [file for file in files if not any(file.is_relative_to(other) for other in inner)]
    return sum(len(file.read_text().splitlines()) for file in own)


def main(words: list[str]) -> int:
    """Print the table, or what is above its budget; return 1 where something is."""
    check = "--check" in words
    found = {room: lines(room) for room in MOST}
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
