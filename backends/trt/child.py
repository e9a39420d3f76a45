"""The builder in a process of its own: where it crashes, this one goes on and says so.

`main` builds what `job.json` in a folder asks for, from the graphs and packed weights beside it. It
prints a JSON object a line: `progress`, and at the end `made` (what the manifest keeps), `error` or
`errno`.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from g4ir import errors
from g4ir.errors import G4Error, LowerError
from g4ir.ir.graph import Program
from g4ir.ir.text import parse_graph
from g4ir.plan.engine_limits import Limits
from g4ir.ui.files import write_file
from g4ir.ui.progress import Progress
from g4ir.ui.subprocesses import python
from g4ir.weights.pack import StoredParams, rank_files

from ..base import Task
from .host import Host
from .interface import keep_log
from .make import make

JOB = "job.json"
#: how long a child that is asked to end may take
PATIENCE_S = 5.0
#: prctl's PR_SET_PDEATHSIG: the signal that a process gets when its parent ends
PARENT_DEATH = 1


def command(folder: Path) -> list[str]:
    return python(__name__, f"main({str(folder)!r})")


def build_apart(
    task: Task, settings: Mapping[str, str], argv: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what the child process made in the task's folder. Its errors are raised here;
    LowerError where it ended without one, as when the builder crashes."""
    out, graphs = task.folder, task.program.graphs
    job = {"limits": asdict(task.limits), "device": task.device, "settings": dict(settings)}
    given = {JOB: json.dumps({**job, "graphs": [*graphs]})}
    given |= {_graph_file(name): str(g) for name, g in graphs.items()}
    for name, text in given.items():
        write_file(out / name, [text.encode()])
    try:
        return _listen(argv or command(out), out, task.progress)
    finally:
        for name in given:
            (out / name).unlink(missing_ok=True)


def _graph_file(name: str) -> str:
    return f"{name}.job.g4ir"


def _listen(argv: Sequence[str], out: Path, progress: Progress) -> dict[str, Any]:
    said: dict[str, Any] = {}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, errors="replace") as child:
        assert child.stdout
        try:
            for line in child.stdout:
                said |= _heard(line, progress)
        except BaseException as e:
            _end(child, patient=isinstance(e, KeyboardInterrupt))
            raise
    if "made" in said:
        made: dict[str, Any] = said["made"]
        return made
    if "errno" in said:
        raise OSError(said["errno"], said["message"], said["file"])
    if "error" in said:
        raise getattr(errors, said["error"], LowerError)(said["message"])
    raise LowerError(
        f"TensorRT's builder crashed ({_ending(child.returncode)}); {keep_log(out)}; build again: "
        f"kernels that were timed are not timed again, and --set attention=plain or --set "
        f"experts=all is another network"
    )


def _end(child: subprocess.Popen[str], patient: bool) -> None:
    """Ask the child to end, at the builder's next step; it keeps what was timed. Who pressed Ctrl-C
    sees it going on, and may press it again; others are not kept waiting."""
    try:
        child.send_signal(signal.SIGINT if patient else signal.SIGTERM)
        child.wait(None if patient else PATIENCE_S)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        pass
    finally:
        child.kill()


def _heard(line: str, progress: Progress) -> dict[str, Any]:
    """Return what a line says, beside progress; libraries may print lines of their own."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(said, dict):
        return {}
    if "progress" in said:
        progress(said.pop("progress"))
    return said


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def run_job(folder: Path, host: Host) -> dict[str, Any]:
    """Do the job and return the last line of the child process."""
    job = json.loads((folder / JOB).read_text())
    texts = {name: (folder / _graph_file(name)).read_text() for name in job["graphs"]}
    program = Program({name: parse_graph(text) for name, text in texts.items()})
    params = StoredParams.open(rank_files(folder.glob("*.safetensors"), 0))

    def progress(message: str) -> None:
        _say({"progress": message})

    task = Task(program, Limits(**job["limits"]), job["device"], folder, params, progress)
    try:
        made = make(host, task, job["settings"])
    except G4Error as e:
        kind = next(c.__name__ for c in type(e).__mro__ if vars(errors).get(c.__name__) is c)
        return {"error": kind, "message": str(e)}
    except OSError as e:  # no space, or files that may not be written
        return {"errno": e.errno or 0, "message": e.strerror or str(e), "file": e.filename}
    return {"made": made}


def _say(line: Mapping[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main(folder: str) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGTERM)
    _say(run_job(Path(folder), Host()))
