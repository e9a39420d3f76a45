"""The recorder is a package of its own: it imports nothing of this project, nor do its tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "backends" / "trt" / "recorder"
NAME = "g4ir.backends.trt.recorder"

#: empty packages in the place of those that the recorder's name begins with; all else of the
#: project cannot be imported, neither from the checkout nor as it is installed
ALONE = f"""
import sys, types

class Nothing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        ours = name.split(".")[0] in ("g4ir", "backends", "passes", "specs")
        if ours and not f"{{name}}.".startswith("{NAME}."):
            raise ImportError(f"{{name}} is blocked")

for name in ("g4ir", "g4ir.backends", "g4ir.backends.trt"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{str(FOLDER.parent)!r}]
sys.meta_path.insert(0, Nothing)
"""


def run_alone(code: str) -> str:
    """Returns what `code` prints in a process that has no g4ir but the recorder."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE + code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_example_runs_without_the_project() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.S)
    assert run_alone(example).splitlines() == ["8.0", "INetworkDefinition mark_output"]


def test_every_file_is_described() -> None:
    text = (FOLDER / "README.md").read_text()
    named = set(re.findall(r"^\| `(\w+\.py)` \|", text, re.M))
    assert named == {path.name for path in FOLDER.glob("*.py")} - {"__init__.py"}
