"""What is built and installed is what lies in the tree, under one name each.

Files of docker/ for compose, systemd and Kubernetes: their commands are ours, their probes are
paths of the server, and nothing is killed while it drains.

Systems other than Linux: a Python that lacks what Windows lacks, processors as other systems name
them, and kernels that a cross compiler makes for macOS and Windows.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from configparser import RawConfigParser
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from setuptools.config.pyprojecttoml import load_file

from g4ir import cli
from g4ir.backends.cpu.library import LINKING, kernels
from g4ir.backends.trt.target import TENSORRT, version_tuple
from g4ir.cli.serve import Serve
from g4ir.ui import processor
from g4ir.ui.processor import SETS, select_set
from tests.cases import TABLES
from tests.engines import add_file
from tests.serve.running import LOADING, chat_engine, eventually
from tests.sources import FILES, ROOT
from tools.zig import in_zigs_words

MAPPED = ("passes", "backends", "specs")  # top-level folders that become g4ir.<folder>
PYPROJECT = load_file(ROOT / "pyproject.toml")
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def sources(suffix: str) -> list[Path]:
    """Files of the package with this suffix, relative to the root."""
    found = (path for top in ("g4ir", *MAPPED) for path in (ROOT / top).rglob(f"*{suffix}"))
    return sorted(path.relative_to(ROOT) for path in found if "__pycache__" not in path.parts)


def installed(path: Path) -> Path:
    """Where a file of the tree lies once installed: passes/a.py -> g4ir/passes/a.py."""
    return Path("g4ir", path) if path.parts[0] in MAPPED else path


def python(code: str, cwd: Path = ROOT) -> str:
    """Run `code` in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy: a stale build/ would leak files into it."""
    tree = tmp_path_factory.mktemp("tree")
    for top in ("g4ir", *MAPPED):
        shutil.copytree(ROOT / top, tree / top, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    code = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    return tree / python(code, cwd=tree).splitlines()[-1]


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    wanted = {installed(path) for path in sources("") if (ROOT / path).is_file()}
    assert names == wanted and Path("g4ir/backends/cpu/kernels/kernels.c") in wanted
    assert licences


def test_the_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import {', '.join(SETUPTOOLS['packages'])}\n"
        "print(*{sys.modules[name].__file__ for name in sys.modules if name.startswith('g4ir')})"
    )
    assert all(file.startswith(str(tmp_path)) for file in python(code, cwd=tmp_path).split())


def test_no_module_is_loaded_under_a_second_name() -> None:
    """From the root `import passes` would work too, and make every class exist twice."""
    code = f"import {', '.join(SETUPTOOLS['packages'])}, g4ir.cli, sys; print(*sys.modules)"
    assert not {"passes", "backends", "specs"} & set(python(code).split())


def test_two_checkouts_do_not_mix(tmp_path: Path) -> None:
    """A clone that is not installed would take passes/ of the installed checkout."""
    for name in ("g4ir", *MAPPED):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "g4ir", "specs", "list"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: g4ir is in {tmp_path}, but g4ir.passes is in {ROOT}; "
        f"run `pip install -e .` in the checkout that you mean to use"
    )


PRINT = (
    *(f"{verb} --help" for verb in ("run", "chat", "serve", "bench", "build", "verify")),
    *("--help", "show --ops", "kernels --variant e2b", "cost --variant 31b --gpu h100"),
    *("plan --variant 31b --ctx 256K", "plan --variant 31b --ctx 256K --gpu h100-80gb"),
)


HEAVY = ("transformers", "matplotlib", "g4ir.engine.engine", "g4ir.builder.build")


def test_what_only_prints_imports_nothing_heavy() -> None:
    """Nor does the room of chats. One verb after the other: the first that does is named."""
    code = f"""
import contextlib, io, sys
from g4ir import chat
def loaded(*names): return [name for name in ("torch", "numpy", *names) if name in sys.modules]
assert not loaded("jinja2", "tokenizers"), "chat"
from g4ir.cli import main
for words in {PRINT}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        assert main(words.split()) == 0
    print(words, len(out.getvalue()) > 500, *loaded(*{HEAVY}), sep="|")
"""
    assert python(code).splitlines() == [f"{words}|True" for words in PRINT]


def test_constraints_pin_every_dependency() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normal(line) for line in pins if "==" in line}
    project = PYPROJECT["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    assert not {normal(requirement) for requirement in asked} - pinned


def test_versions_that_are_tried() -> None:
    """`make test-versions` takes the lowest from pyproject.toml; the tests exist."""
    project = PYPROJECT["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    for package, listed in yaml.safe_load((ROOT / "tests" / "versions.yaml").read_text()).items():
        (found,) = (r for r in asked if normal(r) == package)
        assert re.match(rf"{package}>=[\d.]+(,<\d+)?(;|$)", found)
        assert all((ROOT / t.partition("::")[0]).exists() for t in listed["tests"])


def normal(requirement: str) -> str:
    """The distribution of a requirement in its normal form: `PyYAML>=6` -> `pyyaml`."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_the_container_has_what_was_compared() -> None:
    """A TensorRT that is supported, the triton of the tests."""
    text = (ROOT / "docker" / "cuda.Dockerfile").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    pins = dict(re.findall(r"(?<= )([\w-]+)==([\d.]+)", text))
    assert f"\ntriton=={pins['triton']}\n" in constraints
    least, beyond = TENSORRT.supported
    assert least <= version_tuple(pins["tensorrt-cu13"]) < beyond


def test_the_folder_for_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the plugin that runs without vLLM: its own tests are `make test-vllm`."""
    monkeypatch.syspath_prepend(ROOT / "g4ir-vllm")
    prepare = importlib.import_module("g4ir_vllm.prepare").prepare
    engine = chat_engine(tmp_path / "engine")
    said = {"eos_token_id": [1, 3], "do_sample": True, "top_k": 5, "temperature": 0.5}
    add_file(engine, "generation_config.json", json.dumps(said))
    made = json.loads((prepare(engine, tmp_path / "out") / "generation_config.json").read_text())
    assert made == {"eos_token_id": [1, 3], "top_k": 5, "temperature": 0.5}


DOCKER = ROOT / "docker"


@dataclass
class Deployment:
    """A command, its variables and its config file; what asks how it is, and what kills it."""

    words: Sequence[str]
    config: str
    kill_s: float
    variables: dict[str, str] = field(default_factory=dict)
    probes: set[str] = field(default_factory=set)

    def here(self, tmp_path: Path, patch: pytest.MonkeyPatch) -> list[str]:
        """Return the words after g4ir, with files of this machine in place of the deployment's."""
        (tmp_path / "serve.yaml").write_text(self.config)
        (tmp_path / "keys").write_text("a-key\n")
        for name, value in self.variables.items():
            patch.setenv(name, value)
        _, *words = self.words
        return [re.sub(r"^(/|\$\{).*/", f"{tmp_path}/", word) for word in words]


def in_seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)?", text).groups()  # type: ignore[union-attr]
    return float(number) * {"m": 60, "s": 1, None: 1}[unit]


def of_compose(name: str) -> Deployment:
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"][name]
    assert (DOCKER / ".." / service["build"]["dockerfile"]).is_file()
    assert service["volumes"][0] == "data:/data"
    variables = service["environment"]
    probes = {*re.findall(r"8000(/\w+)", service["healthcheck"]["test"][-1])}
    config, kill_s = (DOCKER / "serve.yaml").read_text(), in_seconds(service["stop_grace_period"])
    return Deployment(service["command"], config, kill_s, variables, probes)


def of_systemd() -> Deployment:
    unit = RawConfigParser(strict=False, delimiters="=")
    unit.optionxform = str  # type: ignore[method-assign, assignment]
    unit.read_string((DOCKER / "g4ir.service").read_text())
    service = unit["Service"]
    assert service["KillMode"] == "mixed" and "HUP" in service["ExecReload"]
    words, config = shlex.split(service["ExecStart"]), (DOCKER / "serve.yaml").read_text()
    return Deployment(words, config, in_seconds(service["TimeoutStopSec"]))


def of_kubernetes() -> Deployment:
    parts = {d["kind"]: d for d in yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())}
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["enableServiceLinks"] is False and pod["securityContext"]["runAsNonRoot"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert parts["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    config = parts["ConfigMap"]["data"]["serve.yaml"]
    assert yaml.safe_load(config) == yaml.safe_load((DOCKER / "serve.yaml").read_text())
    probes = {
        container[f"{n}Probe"]["httpGet"]["path"] for n in ("liveness", "readiness", "startup")
    }
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    kill_s = float(pod["terminationGracePeriodSeconds"])
    return Deployment(container["command"], config, kill_s, probes=probes)


ALL: dict[str, Callable[[], Deployment]] = {
    "compose": lambda: of_compose("cpu"),
    "compose cuda": lambda: of_compose("cuda"),
    "systemd": of_systemd,
    "kubernetes": of_kubernetes,
}


@pytest.mark.parametrize("name", ALL)
def test_a_deployment_is_a_server(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = ALL[name]()
    parser, values = cli.parse(d.here(tmp_path, monkeypatch))
    verb = parser.flags.make(values)
    assert isinstance(verb, Serve) and Path(d.words[0]).name == "g4ir"
    server, address = verb.make_server()
    assert (address.host, address.port) == ("0.0.0.0", 8000) and [*server.gate.keys] == [b"a-key"]
    assert address.drain_s + 10 <= d.kill_s
    assert d.probes <= {*server.handlers()} and verb.log_format == "json"
    assert verb.first_use.options.max_batch == int(d.variables.get("G4IR_MAX_BATCH", 8))


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[Path]:
    """The unit, with a command that exists."""
    path = tmp_path / "g4ir.service"
    text = (DOCKER / "g4ir.service").read_text()
    path.write_text(text.replace("/opt/g4ir/bin/g4ir", sys.executable))
    yield path


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_the_unit_is_one(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of compose.yaml with a small model, asked by its health check, and stopped."""
    d = of_compose("cpu")
    words = d.here(tmp_path, monkeypatch)
    engine = chat_engine(tmp_path / "engine", 64, spec="tiny-dense", image_budgets=None)
    monkeypatch.delenv("G4IR_MAX_BATCH")
    config: dict[str, Any] = yaml.safe_load(d.config)
    for key in ("backend", "max-batch", "max-seq", "download"):  # those of a build
        del config[key]
    config |= {"model": [f"e2b={engine}"], "port": 0, "host": "127.0.0.1"}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "g4ir.cli", *words], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    try:
        port = re.search(r"listening at http://127.0.0.1:(\d+)", process.stderr.readline())
        assert port
        test = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["cpu"]
        program = test["healthcheck"]["test"][-1].replace("8000", port[1])

        ready = re.search(r"http://[^']+", program)
        assert ready
        eventually(lambda: httpx.get(ready[0]).is_success, LOADING)
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
        headers = {"Authorization": "Bearer a-key"}
        listed = httpx.get(f"http://127.0.0.1:{port[1]}/v1/models", headers=headers).json()
        assert [m["id"] for m in listed["data"]] == ["e2b"]
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


# --- other systems ------------------------------------------------------------------------------

ROWS = TABLES["systems"]
BUILD = ("build", "--variant", "tiny-dense", "--random-weights", "0", "--max-seq", "64")


def like_windows(lines: Sequence[Sequence[str]]) -> list[object]:
    """Run command lines in a Python like that of Windows; return what it says in JSON: of locks
    and memory, and each line's exit code."""
    words = [sys.executable, "-m", "tests.like_windows", json.dumps(lines)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    said = [x.removeprefix("json ") for x in done.stdout.splitlines() if x.startswith("json ")]
    return [json.loads(x) for x in said]


@pytest.mark.parametrize(
    "backend", ["reference", *(pytest.param(b, marks=pytest.mark.full) for b in ("onnx", "torch"))]
)
def test_a_python_that_lacks_what_windows_lacks(own_home: Path, backend: str) -> None:
    """Every module is imported, one of two processes gets a lock, models are planned, built and
    run; by the C kernels too, with this machine's library in place of that of Windows."""
    out = str(own_home / "engine")
    lines = [
        ["plan", "--variant", "tiny-dense"],
        [*BUILD, "--backend", backend, "--prefill-chunk", "16", "--out", out],
        ["run", out, "--tokens", "2,5,7", "--max-new-tokens", "4"],
    ]
    if backend != "reference":
        lines.append(["verify", out])
    assert like_windows(lines) == [[True, False], *[0] * len(lines)]
    manifest = json.loads((own_home / "engine" / "manifest.json").read_text())
    assert manifest["files"] and not any("\\" in name for name in manifest["files"])


def test_relative_names_have_slashes() -> None:
    """Where a path below another becomes a name, of a manifest for example, it has the slashes of
    every system."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        named = {id(n.value.func) for n in calls if isinstance(n.value, ast.Call)}  # x.f().attr
        for n in calls:
            if n.attr == "relative_to":
                assert id(n) in named, f"{path}:{n.lineno}: .relative_to(...) without .as_posix()"


# --- processors


@pytest.mark.parametrize(("said", "name"), ROWS["macos"])
def test_cpus_of_macos(monkeypatch: pytest.MonkeyPatch, said: str, name: str) -> None:
    monkeypatch.setattr(processor.subprocess, "check_output", lambda *_, **__: said)
    assert select_set("aarch64", tuple(processor._flags_of_macos())).name == name


@pytest.mark.parametrize(("has", "name"), ROWS["windows"])
def test_cpus_of_windows(monkeypatch: pytest.MonkeyPatch, has: Sequence[str], name: str) -> None:
    named = {word for words, _ in ROWS["windows"] for word in words}
    known = {**dict.fromkeys(named, False), **dict.fromkeys(has, True), "cpu_name": "x"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert select_set("x86_64", tuple(processor._flags_of_windows())).name == name


@pytest.mark.skipif(
    not hasattr(torch.cpu, "get_capabilities") or processor.architecture() != "x86_64",
    reason="torch does not say",
)
def test_torch_finds_what_linux_says() -> None:
    needed = {f for s in SETS for f in s.flags if not f.startswith("amx")}
    assert needed & {*processor._flags_of_windows()} == needed & {*processor._flags_of_linux()}


# --- cross compilers


@pytest.mark.parametrize(("word", "zigs"), ROWS["zig"].items())
def test_processors_in_zigs_words(word: str, zigs: str) -> None:
    assert in_zigs_words(word) == zigs


def test_libraries_of_systems() -> None:
    """They have the names and flags of their system, and those of Linux what they had."""
    files = {system: kernels(SETS[-1], system).file for system in LINKING}
    assert {Path(f).suffix for f in files.values()} == {".so", ".dylib", ".dll"}
    assert len({Path(f).stem for f in files.values()}) == 3
    text = (ROOT / "backends" / "cpu" / "kernels" / "system.h").read_text()
    systems = ("__linux__", "__APPLE__", "_WIN32")
    assert all(word in text for word in systems)
    for file in (ROOT / "backends" / "cpu" / "kernels").glob("*.[ch]"):
        said = "" if file.name == "system.h" else file.read_text()
        assert not any(word in said for word in (*systems, "futex", "sched_", "aligned_alloc"))


needs_zig = pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="no ziglang")
ZIG = f"{sys.executable} {ROOT / 'tools' / 'zig.py'}"


@pytest.mark.full
@needs_zig
@pytest.mark.parametrize(("system", "name", "magic"), ROWS["kernels"])
def test_kernels_for_another_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, name: str, magic: str
) -> None:
    monkeypatch.setenv("CC", f"{ZIG} {system}")
    (isa,) = (s for s in SETS if s.name == name)
    library = kernels(isa, system)
    library.compile(tmp_path / library.file)
    data = (tmp_path / library.file).read_bytes()
    assert data.startswith(bytes.fromhex(magic)) and b"g4ir_run_steps" in data


@pytest.mark.full
@needs_zig
@pytest.mark.skipif(not shutil.which("wine"), reason="no wine")
def test_a_product_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By wine, on the threads of Windows' calls."""
    monkeypatch.setenv("CC", f"{ZIG} win32")
    (isa,) = (s for s in SETS if s.name == "v2")
    kernels(isa, "win32").compile(tmp_path / "kernels.dll")
    source, program = Path(__file__).with_name("windows_product.c"), tmp_path / "product.exe"
    subprocess.run([*ZIG.split(), "win32", "-O1", source, "-o", program], check=True)
    done = subprocess.run(
        ["wine", program, "kernels.dll"],
        cwd=tmp_path,
        env={**os.environ, "WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
