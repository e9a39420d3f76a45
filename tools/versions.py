"""Run tests with other versions of the packages that they depend on: `make test-versions`.

    python tools/versions.py [PACKAGE ...] [--save]

tests/versions.yaml lists packages and tests. Each version has an environment of its own,
build/versions-PACKAGE-VERSION, which sees this one's packages behind its own and so holds little
else; delete build/versions-*-newest to have the newest again. One line is printed for each; the
exit status is 1 if a test failed. --save also writes bench/results/versions.txt.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import yaml
from setuptools.config.pyprojecttoml import load_file

from g4ir.bench.system import environment
from g4ir.bench.text import machine

ROOT = Path(__file__).resolve().parents[1]
LISTED = yaml.safe_load((ROOT / "tests" / "versions.yaml").read_text())
NEWEST = "newest"
#: packages whose versions each line lists
SHOWN = ("torch", "triton", "transformers", "tokenizers", "onnx", "onnxruntime")
VERSIONS = (
    "import json, importlib.metadata as m; "
    f"print(json.dumps({{p: m.version(p) for p in {SHOWN!r}}}))"
)


def required(package: str) -> str:
    """Return pyproject.toml's requirement of a package, such as `>=5.17,<6`."""
    project = load_file(ROOT / "pyproject.toml")["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    (found,) = (r for r in asked if re.match(rf"{package}\b", r))
    return found.removeprefix(package).partition(";")[0].strip()


def versions(package: str) -> Iterator[tuple[str, str]]:
    """Yield (version, pip requirement) of each environment of a package: oldest, those between,
    newest."""
    asked = required(package)
    (lowest,) = re.findall(r">=([\d.]+)", asked)
    for version in (f"{lowest}.*", *LISTED[package]["between"]):
        yield version.removesuffix(".*"), f"{package}=={version}"
    yield NEWEST, f"{package}{asked}"


def made(name: str, requirement: str) -> Path:
    """Return the python of an environment with the requirement, created on first use."""
    folder = ROOT / "build" / f"versions-{name}"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        venv.create(folder, with_pip=False)
        sites = sysconfig.get_path("purelib", vars={"base": str(folder)})
        behind = sysconfig.get_path("purelib")
        Path(sites, "behind.pth").write_text(f"import site; site.addsitedir({behind!r})\n")
        (folder / "reference").symlink_to(Path(sys.prefix, "reference"))  # torchvision_half.py
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
        subprocess.run(
            [*pip, "install", "-q", "--no-compile", "--upgrade", requirement],
            check=True,
            stdout=sys.stderr,
        )
        (folder / ".ready").touch()
    return python


def tried(python: Path, tests: list[str]) -> tuple[bool, str]:
    """Run the tests; return whether all passed, and pytest's last line. Failures go to stderr."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:xdist", "--show-capture=no", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    last = done.stdout.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return done.returncode == 0, last[0].strip("= ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"{', '.join(LISTED)}")
    parser.add_argument("--save", action="store_true", help="write bench/results/versions.txt")
    args = parser.parse_args()
    lines, right = [], True
    for package in args.packages or LISTED:
        for name, requirement in versions(package):
            python = made(f"{package}-{name}", requirement)
            found = json.loads(subprocess.check_output([str(python), "-c", VERSIONS]))
            ok, counts = tried(python, LISTED[package]["tests"])
            right &= ok
            beside = ", ".join(f"{p} {v}" for p, v in found.items() if p != package)
            lines.append(f"{package} {found[package]}: {counts} (with {beside})")
            print(lines[-1], flush=True)
    if args.save:
        command = f"$ python tools/versions.py {shlex.join(sys.argv[1:])}"
        text = "\n".join([command, machine(environment("cpu")), "", *lines])
        (ROOT / "bench" / "results" / "versions.txt").write_text(f"{text}\n")
    return not right


if __name__ == "__main__":
    sys.exit(main())
