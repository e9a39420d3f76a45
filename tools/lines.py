"""Lines of Python per room, beside how many each may have; with --check, exit 1 above."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: room -> the most lines that it may have; a commit that raises a cap says in docs/decisions.md why
MOST = {
    "g4ir/errors.py": 94,
    "g4ir/ui": 1071,
    "g4ir/ops": 4133,
    "g4ir/ir": 1134,
    "passes": 1532,
    "g4ir/spec": 2490,
    "g4ir/model": 1854,
    "g4ir/parallel": 870,
    "g4ir/quant": 334,
    "g4ir/weights": 3923,
    "g4ir/weights/gguf": 2025,
    "g4ir/plan": 3194,
    "backends": 19726,
    # Beside what a reader needs: an emulator of TensorRT, and what no device has run.
    "backends/trt/recorder": 1900,
    "g4ir/media": 1509,
    "g4ir/engine/ranks": 253,
    "g4ir/engine": 8176,
    "g4ir/chat": 2701,
    "g4ir/check": 3203,
    "g4ir/bench": 2246,
    "g4ir/serve": 5125,
    "g4ir/cli": 3503,
    "g4ir-vllm": 758,
    "g4ir-vllm/tests": 811,
    "bench": 2458,
    "examples": 193,
    "tests": 46374,
    "tools": 549,
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
