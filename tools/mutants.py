"""The share of small wrong changes to modules that tests notice.

    python tools/mutants.py g4ir/plan/cost.py --tests tests/test_cost.py --count 20 --seed 3

Mutants are drawn at random, with a seed, from all places of the modules where a comparison, an
operator, a condition or an integer can be changed; samples of ops and kernels, which only tests
read, are left out. Each is written into a copy of the tree, where the tests run to the first
failure.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]

COPIED = ("g4ir", "passes", "backends", "specs", "tests", "tools", "docs", "bench", "README.md")
COPIED += ("pyproject.toml",)
#: seconds that the tests of one mutant may take
LIMIT_S = 180
NO_TESTS = 5  # exit code of pytest
TOO_LONG = "the run ends otherwise"
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """A mutant of a file: its `index`-th place (in the order of `changed`) is changed."""

    file: str
    index: int
    line: int
    what: str


def of_samples(tree: ast.Module) -> set[int]:
    """Return ids of the nodes that build samples: values of a name or keyword `samples`, and the
    file's constants and functions that only these read."""
    given = (n for n in ast.walk(tree) if isinstance(n, ast.keyword | ast.Assign))
    found = {i for n in given if _name(n) == "samples" for i in _inside(n.value)}
    named = {_name(node): node for node in tree.body if _name(node)}
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    while True:
        inside = {n.id for n in reads if id(n) in found}
        more = [
            node
            for name, node in named.items()
            if name in inside and all(n.id != name or id(n) in found for n in reads)
        ]
        grown = found.union(*map(_inside, more))
        if grown == found:
            return found
        found = grown


def _inside(node: ast.AST) -> set[int]:
    return {id(n) for n in ast.walk(node)}


def _name(node: ast.AST) -> str:
    """Return the name that a function, an assignment to one name or a keyword argument binds; empty
    for other nodes."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.keyword):
        return node.arg or ""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""


def changed(tree: ast.Module, index: int | None = None) -> Iterator[tuple[int, int, str]]:
    """Yield (index, line, change) of every place that can be mutated; the one at `index` is mutated
    in the tree."""
    count = 0

    def here(wanted: int) -> bool:
        return index == wanted

    samples = of_samples(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if id(node) in samples:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            old, new = type(node.ops[0]), SWAPS[type(node.ops[0])]
            if here(count):
                node.ops[0] = new()  # type: ignore[call-overload]
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
            old, new = type(node.op), SWAPS[type(node.op)]
            if here(count):
                node.op = new()  # type: ignore[assignment]
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            old, new = type(node), ast.Not
            if here(count):
                node.test = ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            old, new = type(node), ast.Add
            if here(count):
                node.value += 1
        else:
            continue
        yield count, line, f"{old.__name__} -> {new.__name__}"
        count += 1


def mutants(modules: Iterable[str]) -> list[Mutant]:
    """Return every mutant of these files and folders."""
    paths = [ROOT / module for module in modules]
    if missing := [str(p) for p in paths if not p.exists()]:
        raise SystemExit(f"no such file or folder: {', '.join(missing)}")
    files = sorted({p for path in paths for p in (path.rglob("*.py") if path.is_dir() else [path])})
    return [
        Mutant(str(path.relative_to(ROOT)), *place)
        for path in files
        for place in changed(ast.parse(path.read_text()))
    ]


def failed(tree: Path, tests: list[str], limit_s: int | None = None) -> list[str]:
    """Return the tests that fail in a copy of the tree, with a time limit only the first;
    `TOO_LONG` if it is exceeded, or pytest ends with an error and no failed test."""
    cache = tree / ".failed"
    shutil.rmtree(cache, ignore_errors=True)
    stop = ["-p", "no:xdist"] if limit_s is None else ["-p", "no:xdist", "-x"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={cache}", *stop, *tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return [TOO_LONG]
    kept = cache / "v/cache/lastfailed"
    names = list(json.loads(kept.read_text())) if kept.exists() else []
    return names or ([] if done.returncode in (0, NO_TESTS) else [TOO_LONG])


def noticed(tree: Path, mutant: Mutant, tests: list[str]) -> list[str]:
    """Return the tests that fail with the mutant, in a copy of the tree."""
    path = tree / mutant.file
    right = path.read_text()
    parsed = ast.parse(right)
    list(changed(parsed, mutant.index))
    path.write_text(ast.unparse(ast.fix_missing_locations(parsed)))
    try:
        return failed(tree, tests, LIMIT_S)
    finally:
        path.write_text(right)


def copied(folder: Path) -> Path:
    """Return a copy of the tree in which the package is one folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.exists():
            shutil.copy(source, folder / name)
    for name in ("passes", "backends", "specs"):
        (folder / "g4ir" / name).symlink_to(folder / name)
    return folder


def told(mutant: Mutant, why: str) -> None:
    print(f"{mutant.file}:{mutant.line}: {mutant.what}: {why}", flush=True)


def main(words: list[str]) -> int:
    """Print each mutant that survives, and the share that is caught."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("modules", nargs="+", help="files and folders to change")
    p.add_argument("--tests", nargs="+", required=True)
    p.add_argument("--count", type=int, default=200)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--jobs", type=int, default=2)
    args = p.parse_args(words)
    places = mutants(args.modules)
    drawn = random.Random(args.seed).sample(places, min(args.count, len(places)))
    trees: Queue[Path] = Queue()
    for i in range(args.jobs):
        trees.put(copied(ROOT / f"build/mutants{i}"))

    def tried(mutant: Mutant) -> tuple[Mutant, list[str]]:
        tree = trees.get()
        names = noticed(tree, mutant, args.tests)
        trees.put(tree)
        if not names:
            told(mutant, "survives")
        return mutant, names

    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(tried, drawn))
    # A test that also fails on the unchanged module does not count.
    named = sorted({n for _, names in found for n in names if "::" in n})
    wrong = {*failed(trees.get(), named)} if named else set()
    caught = sum(bool(set(names) - wrong) for _, names in found)
    for mutant, names in found:
        if names and not set(names) - wrong:
            told(mutant, f"survives; {names[0]} fails without it")
    print(f"{caught} of {len(drawn)} caught: {caught / len(drawn):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
