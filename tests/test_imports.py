"""Who may import whom, and what no module may use."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from g4ir.backends.inductor.toolchain import cpp_compiler
from tests.cases import TABLES
from tests.sources import FILES, MODULES, ROOT, name_of

RULES = TABLES["imports"]
ROOMS = tuple(RULES["rooms"])
NO_TORCH_ON_IMPORT = tuple(RULES["no torch on import"])
#: modules of these that compute
COMPUTE = {
    *("g4ir.ops.finite", "g4ir.ir.interpret", "g4ir.ir.wide", "g4ir.ir.distance"),
    "g4ir.quant.compensation",
}
BANNED_MODULES, BANNED_NAMES = {*RULES["banned modules"]}, {*RULES["banned names"]}
ALLOWED = {module: {*names} for module, names in RULES["allowed"].items()}


def inside(name: str, package: str) -> bool:
    """Whether `name` is `package` or lies in it."""
    return f"{name}.".startswith(f"{package}.")


def walk(node: ast.AST, top: bool) -> Iterator[ast.AST]:
    """The nodes below `node`; with `top` those that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if top and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if top and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from walk(child, top)


@cache
def imports(module: str, top: bool = False) -> frozenset[str]:
    """Absolute names that a module imports, anywhere or at its top; `from a import b` counts as
    `a.b`, and as `a` unless b is a module."""
    found: set[str] = set()
    package = module if MODULES[module].stem == "__init__" else module.rpartition(".")[0]
    for node in walk(ast.parse(MODULES[module].read_text()), top):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(part for part in (*(up if node.level else ()), node.module) if part)
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names | ({base} if names - MODULES.keys() else set())
    return frozenset(found)


def uses(module: str) -> set[str]:
    """Banned modules and names that a module uses."""
    tree = ast.parse(MODULES[module].read_text())
    named = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    brought = imports(module)
    loaded = {name.split(".")[0] for name in brought} & BANNED_MODULES
    return loaded | ((named | called | brought) & BANNED_NAMES)


def room(module: str) -> int:
    """Which room a module lies in; the package itself before all of them."""
    parts = module.split(".")
    return ROOMS.index(parts[1]) if len(parts) > 1 else -1


#: those in the rooms; the command line, once more, is beside them
IN_ROOMS = [m for m in MODULES if m not in ("g4ir.specs", "g4ir.__main__")]


@cache
def graph() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, wherever it does."""
    others = {"g4ir", "g4ir.specs"}
    return {m: {i for i in imports(m) if i in MODULES} - {m, *others} for m in IN_ROOMS}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import themselves through others."""
    left = {m: set(names) for m, names in graph.items()}
    while ends := {m for m, names in left.items() if not names & left.keys()}:
        left = {m: names for m, names in left.items() if m not in ends}
    return sorted(left)


KERNELS = ROOT / "backends" / "cpu" / "kernels"


def included() -> dict[str, set[str]]:
    """C file of the CPU kernels -> files of these that it includes."""
    found = re.compile(r'^ *# *include +"(.+?)"', re.MULTILINE)
    return {p.name: {*found.findall(p.read_text())} for p in sorted(KERNELS.glob("*.[ch]"))}


def test_a_room_imports_only_rooms_before_it() -> None:
    """The package itself sets OpenMP's variables, before any room loads torch."""
    assert graph()["g4ir"] == {"g4ir.ui.threads"}
    for module in {*IN_ROOMS} - {"g4ir"}:
        assert not {i for i in graph()[module] if room(i) > room(module)}, module
        tops = {name.split(".")[0] for name in imports(module)}
        assert not tops & {"passes", "backends", "specs"}, module


def test_a_backend_imports_only_those_before_it() -> None:
    order = RULES["rooms of backends"]

    def inner(module: str) -> int:
        parts = module.split(".")[1:3]
        folder = parts[1] if len(parts) == 2 and parts[0] == "backends" else ""
        return order.index(folder) if folder in order else -1

    for module in graph():
        if module.startswith("g4ir.backends."):
            assert not {i for i in graph()[module] if inner(i) > inner(module)}, module


def asks_for_device(tree: ast.AST) -> list[int]:
    """The lines of comparisons with the name of a device."""
    return [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.Compare)
        and any(isinstance(c, ast.Constant) and c.value in ("cpu", "cuda") for c in ast.walk(n))
    ]


def test_no_function_of_a_backend_asks_for_its_device() -> None:
    """Its room says which it is."""
    assert asks_for_device(ast.parse("x = 1 if 'cuda' == device else 2"))
    for module, path in MODULES.items():
        if module.split(".")[1:2] == ["backends"] and path.parent.name != "backends":
            assert not asks_for_device(ast.parse(path.read_text())), module


def test_no_module_imports_itself_through_others() -> None:
    assert not circles(graph())
    assert not circles(included())
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_every_module_is_used() -> None:
    """By an import of the product, by its name in a text, or since its folder is listed."""
    listed = tuple(RULES["listed folders"])
    kernels = {m.removesuffix("_triton") for m in MODULES if m.endswith("_triton")}
    imported = {name for module in MODULES for name in imports(module)}
    parsed = (node for path in FILES for node in ast.walk(ast.parse(path.read_text())))
    values = (node.value for node in parsed if isinstance(node, ast.Constant))
    texts = {value for value in values if isinstance(value, str)}
    inits = {name_of(path) for path in FILES if path.stem in ("__init__", "__main__")}
    left = MODULES.keys() - imported - inits - kernels
    assert not {m for m in left if not m.startswith(listed) and not {m, m[5:]} & texts}


@cache
def names_of(path: Path) -> set[str]:
    """What a module defines or imports, anywhere."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    imported = (n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))
    defined = (n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef))
    stored = (n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return {*defined, *stored, *(a.asname or a.name for n in imported for a in n.names)}


def test_tests_and_scripts_import_what_is_there() -> None:
    """Those too that `make test` does not run."""
    others = [p for top in ("tests", "bench", "tools") for p in (ROOT / top).rglob("*.py")]
    files = {p.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): p for p in others}
    files |= MODULES
    for path in [*others, *(ROOT / "g4ir-vllm").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module in files:
                known = names_of(files[node.module]) | {"*"}
                if "__getattr__" not in known:  # of the package itself
                    asked = {a.name for a in node.names if f"{node.module}.{a.name}" not in files}
                    assert asked <= known, (path, asked - known)


def test_a_header_of_the_kernels_includes_what_it_uses() -> None:
    """Each compiles by itself; every one belongs to a file that is compiled."""
    files = included()
    headers = {name for name in files if name.endswith(".h")}
    assert set().union(*files.values()) == headers
    for name in headers:
        words = ["-x", "c", "-fsyntax-only", "-w", "-march=native", "-DFORM=INT4"]
        words.append("-Werror=implicit-function-declaration")
        subprocess.run([cpp_compiler(), *words, KERNELS / name], check=True, capture_output=True)


def test_what_lies_outside_of_rooms() -> None:
    """Every folder is a room; beside them lie the package, its errors and `python -m g4ir`."""
    assert {p.stem for p in (ROOT / "g4ir").glob("*.py")} == {"__init__", "__main__", "errors"}
    assert {m.split(".")[1] for m in IN_ROOMS if "." in m} == {*ROOMS}


def test_no_torch_where_a_graph_is_only_read() -> None:
    for m in {*IN_ROOMS} - COMPUTE:
        if room(m) < 0 or ROOMS[room(m)] in NO_TORCH_ON_IMPORT:
            assert not {i for i in imports(m, top=True) if inside(i, "torch")}, m


def test_choosing_a_kernel_needs_no_torch() -> None:
    """The records of the kernels and what reads them, as far as their own files go."""
    room = "g4ir.backends.cuda"
    pairs = {m.removesuffix("_triton") for m in MODULES if m.endswith("_triton")} & MODULES.keys()
    assert f"{room}.kernels.linear" in pairs
    left, known = {f"{room}.schedule", *pairs}, set[str]()
    while left:
        known |= left
        found = {i for m in left for i in imports(m, top=True)}
        assert not {i for i in found if inside(i, "torch") or inside(i, "triton")}, left
        left = (found & MODULES.keys()) - known


def test_nothing_banned_is_used() -> None:
    for module in MODULES:
        assert not uses(module) - ALLOWED.get(module, set()), module
