"""Who may import whom, and what no module of the package may use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# types <- ops <- ir <- passes;  ir, spec <- model;  ir, ops <- backends;  cli sees all. A row says
# what a module, or a package with all that is in it, never imports, not even inside a function.
BELOW_CLI = ("g4ir.cli",)
BELOW_ENGINE = ("g4ir.engine", "g4ir.session", "g4ir.bench", *BELOW_CLI)
BELOW_PASSES = ("g4ir.passes", "g4ir.pipeline", "g4ir.backends", "g4ir.model", *BELOW_ENGINE)
BELOW_IR = ("g4ir.ir", "g4ir.text", "g4ir.interpret", "g4ir.spec", *BELOW_PASSES)
NEVER = {
    "g4ir.errors": ("g4ir",),
    "g4ir.types": ("g4ir.ops", *BELOW_IR),
    "g4ir.ops": BELOW_IR,
    "g4ir.ir": ("g4ir.spec", "g4ir.weights", *BELOW_PASSES),
    "g4ir.text": ("g4ir.spec", "g4ir.weights", *BELOW_PASSES),
    "g4ir.interpret": ("g4ir.spec", *BELOW_PASSES),
    "g4ir.spec": ("torch", "g4ir.ops", "g4ir.ir", "g4ir.weights", *BELOW_PASSES),
    "g4ir.passes": ("g4ir.spec", "g4ir.model", "g4ir.weights", "g4ir.backends", *BELOW_ENGINE),
    "g4ir.model": ("g4ir.passes", "g4ir.pipeline", "g4ir.backends", *BELOW_ENGINE),
    "g4ir.backends": ("g4ir.model", "g4ir.passes", "g4ir.pipeline", *BELOW_CLI),
    "g4ir.weights": BELOW_CLI,
    "g4ir.engine": BELOW_CLI,
    "g4ir.session": BELOW_CLI,
}
# Reading, building, rewriting and printing a graph needs no torch, and `--help` stays fast.
NO_TORCH_ON_IMPORT = (
    "g4ir.types", "g4ir.ops", "g4ir.ir", "g4ir.text", "g4ir.errors", "g4ir.spec", "g4ir.model",
    "g4ir.cost", "g4ir.passes", "g4ir.pipeline", "g4ir.cli", "g4ir.params", "g4ir.blocks",
    "g4ir.graph_diff", "g4ir.budgets", "g4ir.flatten",
    "g4ir.weight_sizes", "g4ir.cache_sizes", "g4ir.memory", "g4ir.gpus", "g4ir.units",
    "g4ir.settings", "g4ir.latent_forms", "g4ir.packing", "g4ir.plan", "g4ir.plan_text",
    "g4ir.fit", "g4ir.plots",
)  # fmt: skip

# Pickle runs code from a file; the environment must not steer behaviour; hasattr hides the type.
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
BANNED_NAMES = {"torch.load", "torch.save", "os.environ", "os.getenv", "os.putenv", "hasattr",
                "eval", "exec"}  # fmt: skip
ALLOWED = {
    "g4ir.places": {"os.environ"},  # where caches and decisions of the user lie is said there alone
}


def name_of(path: Path) -> str:
    """Module name of a source file: passes/a.py -> g4ir.passes.a."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "g4ir" else ("g4ir", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = [path for top in ("g4ir", "passes", "backends", "specs")
         for path in sorted((ROOT / top).rglob("*.py"))]  # fmt: skip
MODULES = {name_of(path): path for path in FILES}


def inside(name: str, package: str) -> bool:
    """Whether `name` is `package` or lies in it."""
    return f"{name}.".startswith(f"{package}.")


def walk(node: ast.AST, functions: bool) -> Iterator[ast.AST]:
    """The nodes below `node`, type-checking blocks left out, function bodies on request."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from walk(child, functions)


def imports(module: str, functions: bool = True) -> set[str]:
    """Absolute names that a module imports; `from a import b` counts as `a` and as `a.b`."""
    found: set[str] = set()
    package = module if MODULES[module].stem == "__init__" else module.rpartition(".")[0]
    for node in walk(ast.parse(MODULES[module].read_text()), functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(part for part in (*(up if node.level else ()), node.module) if part)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def uses(module: str) -> set[str]:
    """Banned modules and names that a module uses."""
    tree = ast.parse(MODULES[module].read_text())
    named = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    brought = imports(module)
    loaded = {name.split(".")[0] for name in brought} & BANNED_MODULES
    return loaded | ((named | called | brought) & BANNED_NAMES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    never = [name for row, names in NEVER.items() if inside(module, row) for name in names]
    wrong = {i for i in imports(module) for name in never if inside(i, name)}
    assert not {i for i in wrong if not inside(i, module)}
    assert not {i.split(".")[0] for i in imports(module)} & {"passes", "backends", "specs"}


@pytest.mark.parametrize("module", MODULES)
def test_no_torch_where_a_graph_is_only_read(module: str) -> None:
    if module == "g4ir" or any(inside(module, row) for row in NO_TORCH_ON_IMPORT):
        assert not {i for i in imports(module, functions=False) if inside(i, "torch")}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_banned_is_used(module: str) -> None:
    assert not uses(module) - ALLOWED.get(module, set())
