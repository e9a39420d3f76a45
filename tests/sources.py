"""The product's modules and their files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def name_of(path: Path) -> str:
    """Module name of a source file: passes/a.py -> g4ir.passes.a."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "g4ir" else ("g4ir", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TOPS = ("g4ir", "passes", "backends", "specs")
FILES = [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))]
MODULES = {name_of(path): path for path in FILES}
