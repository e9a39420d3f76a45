"""Tests chosen by what has changed in the repository.

`pytest --changed-since REV` (`make test`) leaves out the conditional tests of selection.yaml whose
paths are the same as in REV. `python -m tests.selection` (`make check`) prints the quickest test
files near the changes, as many as fit into a budget of CPU seconds.

Changes are those of the working tree, untracked files included, since REV. REV `auto` is the merge
base with the main branch; on the main branch itself, where it was before the pull or merge that
moved it last. Everything counts as changed with `CI=true`, and where neither is known: a fresh
clone (its first parent may be one of seventy commits of a landing), no git.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from tests.durations import known_seconds

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".yaml")
#: package of a top-level folder that the package mapping moves
MAPPED = {"passes": "g4ir.passes", "backends": "g4ir.backends", "specs": "g4ir.specs"}
TRUNKS = ("origin/HEAD", "origin/main", "main")
BUDGET_S = 75


# --- what has changed -------------------------------------------------------------------------


@dataclass(frozen=True)
class Repository:
    """A git working tree; every answer is None if git cannot tell."""

    root: Path

    def git(self, *args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(self.root), *args], capture_output=True, text=True
            )
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def base(self, revision: str = "auto") -> str | None:
        """Return the commit of a revision; of `auto`, what a change is compared with."""
        if revision != "auto":
            return self.git("rev-parse", "--verify", "-q", f"{revision}^{{commit}}")
        if os.environ.get("CI") == "true":
            return None
        head, last_move = self.git("rev-parse", "HEAD"), self.git("reflog", "-1", "--format=%gs")
        landed = (last_move or "").startswith(("merge", "pull"))
        for candidate in (*TRUNKS, *(["@{1}"] if landed else [])):
            base = self.git("merge-base", candidate, "HEAD")
            if base and base != head:
                return base
        return None

    def changed(self, base: str | None) -> frozenset[str] | None:
        """Return the paths that differ from `base` in the working tree."""
        top = self.git("rev-parse", "--show-toplevel")
        if base is None or top is None or Path(top).resolve() != self.root.resolve():
            return None
        tracked = self.git("diff", "--name-only", "--no-renames", base)
        untracked = self.git("ls-files", "--others", "--exclude-standard")
        if tracked is None or untracked is None:
            return None
        return frozenset((*tracked.splitlines(), *untracked.splitlines()))


# --- conditional tests ------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """selection.yaml."""

    conditional: Mapping[str, Mapping[str, Sequence[str]]]
    everything: Sequence[str]
    data: Mapping[str, Sequence[str]]

    def unchanged(self, changed: Iterable[str] | None) -> dict[str, Sequence[str]]:
        """Return the groups of tests that need not run, and their patterns."""
        if changed is None or any(matches(path, self.everything) for path in changed):
            return {}
        return {
            name: group["tests"]
            for name, group in self.conditional.items()
            if not any(matches(path, (*group["tests"], *group["paths"])) for path in changed)
        }


def read_table() -> Table:
    return Table(**yaml.safe_load(FILE.read_text()))


def matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


class LeaveOut:
    """Pytest plugin: does not collect the conditional tests whose paths are unchanged, and says
    which."""

    def __init__(self, since: str) -> None:
        repository = Repository(ROOT)
        self.base = repository.base(since)
        if self.base is None and since != "auto":
            raise SystemExit(f"--changed-since {since}: git knows no such commit here")
        self.table = read_table()
        self.groups = self.table.unchanged(repository.changed(self.base))

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        path = collection_path.relative_to(ROOT).as_posix()
        patterns = [p for tests in self.groups.values() for p in tests]
        return True if collection_path.is_file() and matches(path, patterns) else None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for name in self.groups:
            line = f"{name:24}left out, unchanged since {str(self.base)[:8]}"
            terminalreporter.write_line(line)


# --- tests near a change ----------------------------------------------------------------------


def near(root: Path, changed: Iterable[str], table: Table) -> set[str]:
    """Return the test files that have changed, those of the table's files, and those that import a
    changed module, themselves or by a helper of the tests."""
    imported = {
        path.relative_to(root).as_posix(): {*imports(root, path.relative_to(root).as_posix())}
        for path in (root / "tests").rglob("*.py")
    }
    names = {module_name(path) for path in changed if path.endswith(".py")}
    helpers = {f for f, modules in imported.items() if modules & names and not is_test(f)}
    names |= {module_name(file) for file in helpers}
    found = {f for f, modules in imported.items() if modules & names}
    data = [p for p in table.data if any(fnmatchcase(path, p) for path in changed)]
    found |= {test for pattern in data for test in table.data[pattern]}
    return {file for file in {*found, *changed} if is_test(file) and file in imported}


def is_test(path: str) -> bool:
    """Those of interpreted kernels run in a process of tests/test_interpreted.py."""
    own_process = Path(path).parent.name == "interpreted"
    return path.startswith("tests/") and Path(path).name.startswith("test_") and not own_process


def module_name(path: str) -> str:
    """`passes/fuse_qkv.py` -> `g4ir.passes.fuse_qkv`."""
    first, *rest = Path(path).with_suffix("").parts
    return ".".join(p for p in (MAPPED.get(first, first), *rest) if p != "__init__")


def imports(root: Path, file: str) -> Iterator[str]:
    """Yield the modules that a file imports, and each `module.name` of a `from` import."""
    package = module_name(str(Path(file).with_name("__init__.py"))).split(".")
    for node in ast.walk(ast.parse((root / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *filter(None, [node.module])])
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def fitting(files: Iterable[str], seconds: Mapping[str, float], budget: float) -> list[str]:
    """Return the quickest test files within a budget."""
    kept, spent = [], 0.0
    for file in sorted(files, key=lambda f: (seconds.get(f, 1), f)):
        spent += seconds.get(file, 1)
        if spent <= budget:
            kept.append(file)
    return kept


def main(words: Sequence[str]) -> int:
    """Print the test files near the changes; on stderr, what is left to `make test`."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--changed-since", default="auto", metavar="REV")
    p.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="CPU seconds")
    args = p.parse_args(words)
    repository = Repository(ROOT)
    # Without a known landing, what is being edited now is near.
    base = repository.base(args.changed_since) or repository.base("HEAD")
    changed = repository.changed(base)
    if changed is None:
        print("no base to compare with: git diff fails here; run make test", file=sys.stderr)
        return 1
    found = near(ROOT, changed, read_table())
    kept = fitting(found, known_seconds(), args.budget)
    left = sorted(found - {*kept})
    print(f"{len(changed)} files changed since {str(base)[:8]}", file=sys.stderr)
    if left:
        print(f"left to make test: {' '.join(left)}", file=sys.stderr)
    print(*kept, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
