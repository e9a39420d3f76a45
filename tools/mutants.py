"""The share of small wrong changes to the product that the tests notice.

    make mutants                      # coverage by test first, then 200 mutants, two at a time
    python tools/mutants.py --count 20 --seed 3
    python tools/mutants.py g4ir/plan/cost.py --tests tests/test_cost.py  # needs no coverage

Mutants are drawn at random, with a seed, from all places of the product, or of the modules named,
where a comparison, a sum, a condition or a number can be another one; samples of ops and kernels,
which tests alone read, are none. Each is written into a copy of the tree, where the tests run that
execute its line, those of small files first, to the first failure; with --tests, those named.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import coverage

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("g4ir", "passes", "backends")
COPIED = (*PRODUCT, "specs", "tests", "tools", "docs", "bench", "README.md", "pyproject.toml")
#: seconds that the tests of one mutant may take, and how many are tried
LIMIT_S, MOST_TESTS = 180, 40
NO_TESTS = 5  # exit code of pytest
#: kernels, and the tests of their numbers
KERNELS, INTERPRETED = "backends/cuda/kernels/", "tests/interpreted"
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
    """The `index`-th place of a file changed."""

    file: str
    index: int
    line: int
    what: str


def of_samples(tree: ast.Module) -> set[int]:
    """Return ids of the nodes that make samples: what a name or keyword `samples` is given, and the
    file's constants and functions that nothing else reads."""
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
    """Return the one name that a statement or a keyword gives a value, or nothing."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.keyword):
        return node.arg or ""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""


def changed(tree: ast.Module, index: int | None = None) -> Iterator[tuple[int, int, str]]:
    """Yield (index, line, change) of every place; the one of `index` is changed in the tree."""
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


def mutants(modules: Iterable[str] = PRODUCT) -> list[Mutant]:
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


def tests_of(data: coverage.CoverageData, mutant: Mutant) -> list[str]:
    """Return the tests that execute the mutant's line; where none is seen to (it runs at import, or
    in a kernel that Triton rewrites), those that execute any of its file, or of the file that
    launches the kernel. One of each test file in turn, small files first."""
    path = str(ROOT / mutant.file)
    lines = data.contexts_by_lineno(path)
    found = _running(lines.get(mutant.line, []))
    for near in (path, path.replace("_triton.py", ".py")):
        found = found or _running(c for cs in data.contexts_by_lineno(near).values() for c in cs)
    by_file: dict[str, list[str]] = {}
    for test in sorted(found):
        by_file.setdefault(test.split("::")[0], []).append(test)
    files = sorted(by_file.values(), key=lambda tests: _size(tests[0]))
    turns = [t for turn in zip_longest(*files) for t in turn if t]
    return turns[:MOST_TESTS]


def _running(contexts: Iterable[str]) -> set[str]:
    return {c.split("|")[0] for c in contexts if "|run" in c}


def _size(test: str) -> int:
    return (ROOT / test.split("::")[0]).stat().st_size


def failed(
    tree: Path, tests: list[str], limit_s: int | None = None, **environment: str
) -> list[str]:
    """Return those of the tests that fail in a copy of the tree: the first where time is limited;
    `TOO_LONG` where it is over."""
    cache = tree / ".failed"
    shutil.rmtree(cache, ignore_errors=True)
    stop = ["-p", "no:xdist"] if limit_s is None else ["-p", "no:xdist", "-x"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={cache}", *stop, *tests],
            cwd=tree,
            env={
                "PYTHONPATH": str(tree),
                "PATH": "/usr/bin:/bin",
                "HOME": str(Path.home()),
                **environment,
            },
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
    """Return the tests that fail on the mutant in a copy of the tree. Of a kernel those too that
    run in a process whose triton interprets, where coverage does not see them."""
    path = tree / mutant.file
    right = path.read_text()
    parsed = ast.parse(right)
    list(changed(parsed, mutant.index))
    path.write_text(ast.unparse(ast.fix_missing_locations(parsed)))
    try:
        found = failed(tree, tests, LIMIT_S)
        if not found and mutant.file.startswith(KERNELS):
            stem = Path(mutant.file).stem.removesuffix("_triton")
            found = failed(tree, [INTERPRETED, "-k", stem], LIMIT_S, TRITON_INTERPRET="1")
        return found
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


def read_coverage(path: str) -> coverage.CoverageData:
    import coverage

    data = coverage.CoverageData(path)
    data.read()
    return data


def told(mutant: Mutant, why: str) -> None:
    print(f"{mutant.file}:{mutant.line}: {mutant.what}: {why}", flush=True)


def main(words: list[str]) -> int:
    """Print each mutant that survives, and the share that is caught."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("modules", nargs="*", default=PRODUCT, help="files and folders to change")
    p.add_argument("--tests", nargs="+", help="tests for each mutant; else those that execute it")
    p.add_argument("--count", type=int, default=200)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--data", default=str(ROOT / "build/coverage"))
    args = p.parse_args(words)
    data = None if args.tests else read_coverage(args.data)
    places = mutants(args.modules)
    drawn = random.Random(args.seed).sample(places, min(args.count, len(places)))
    trees: Queue[Path] = Queue()
    for i in range(args.jobs):
        trees.put(copied(ROOT / f"build/mutants{i}"))

    def tried(mutant: Mutant) -> tuple[Mutant, list[str]]:
        tests = args.tests or tests_of(data, mutant)
        tree = trees.get()
        names = noticed(tree, mutant, tests) if tests else []
        trees.put(tree)
        if not names:
            told(mutant, "survives" if tests else "no test executes it")
        return mutant, names

    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(tried, drawn))
    # A test that fails on the right product too has noticed nothing.
    named = sorted({n for _, names in found for n in names if "::" in n})
    interpreted = [n for n in named if n.startswith(INTERPRETED)]
    others = [n for n in named if n not in interpreted]
    tree = trees.get()
    wrong = set(failed(tree, others)) if others else set()
    wrong |= set(failed(tree, interpreted, TRITON_INTERPRET="1")) if interpreted else set()
    caught = sum(bool(set(names) - wrong) for _, names in found)
    for mutant, names in found:
        if names and not set(names) - wrong:
            told(mutant, f"survives; {names[0]} fails without it")
    print(f"{caught} of {len(drawn)} caught: {caught / len(drawn):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
