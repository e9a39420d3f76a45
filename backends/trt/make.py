"""A build from its graphs to its plans: what is tried first, and what is tried again."""

from __future__ import annotations

import ctypes
import json
import mmap
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from g4ir import errors
from g4ir.backends.base import Task
from g4ir.backends.primitives.network import stored_bytes
from g4ir.errors import G4Error, LowerError, PlanError
from g4ir.ir.graph import Graph, Program
from g4ir.ir.text import parse_graph
from g4ir.model.draft import DRAFT
from g4ir.parallel.shard import ranks_of
from g4ir.plan.engine_limits import Limits
from g4ir.plan.footprint import reserve
from g4ir.ui.files import write_file
from g4ir.ui.progress import Progress
from g4ir.ui.subprocesses import python
from g4ir.ui.units import size_text
from g4ir.weights.pack import StoredParams, params_of_rank, rank_files

from . import build
from .build import Written
from .compiled import Made, compiled, summary
from .host import Api, Host, logger
from .interface import ENGINE, LOG, files, keep_log, networks
from .lowerings import AUTO
from .runtime import deserialize
from .target import HOPPER, TARGETS, Target

T = TypeVar("T")
#: form of attention -> the one that is built where a network with it is refused
SIMPLER = {AUTO: "explicit", "explicit": "plain"}
#: what the child process is to do, beside its weights
JOB = "job.json"
#: how long a child that is asked to end may take
PATIENCE_S = 5.0
#: prctl's PR_SET_PDEATHSIG: the signal that a process gets when its parent ends
PARENT_DEATH = 1


@dataclass
class Make:
    """One build. `settings` become those that it ends with."""

    host: Host
    task: Task
    settings: dict[str, str]
    notes: list[str] = field(default_factory=list)
    #: of the text model's plan, by profile
    made: dict[str, Made] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.api, self.graphs = self.host.tensorrt(), networks(self.task.program)
        self.target, self.asked = self.host.target, self.settings["attention"]

    def run(self) -> dict[str, Any]:
        """Write the plans; return what the manifest keeps. Where it fails, TensorRT's log is kept
        beside the engine, and the error ends with its name."""
        self.log = logger(self.api.trt, self.task.folder / LOG)
        try:
            return self._made()
        except Exception as e:
            if e.args:
                e.args = (f"{e.args[0]}; {keep_log(self.task.folder)}", *e.args[1:])
            raise
        finally:
            self.log.close()

    def _made(self) -> dict[str, Any]:
        self.task.progress(f"TensorRT's builder: {build.estimate([*self.graphs.values()])}")
        for name in self.graphs:
            self._or_simpler(partial(self._plans, name))
        scratch = self._check_memory()
        return {
            "target": self.target.name,
            "version": self.api.version,
            "gpu": "" if self.target.ahead_of_time else self.host.gpu(),
            "settings": self.settings,
            "notes": self.notes,
            "scratch_bytes": scratch,
        }

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.task.progress(text)

    def _or_simpler(self, work: Callable[[], None]) -> None:
        """Do the work; where the builder refuses a whole network whose attention it chose the form
        of, or takes its layers for an attention of its own, once more in the next simpler form."""
        while True:
            form = self.settings["attention"]
            try:
                return work()
            except build.RefusedError as e:
                chosen = self.asked == AUTO or (form != "fused" and build.WRAPPER in str(e))
                if form not in SIMPLER or not chosen:
                    raise
                self.settings["attention"] = SIMPLER[form]
                self._note(f"attention: {SIMPLER[form]}, since TensorRT refused: {e}")

    def _look(self, w: Written, begun: int) -> None:
        """Note what the builder's log, from here on, says that it made of the text model; builders
        that time kernels may say it otherwise."""
        with (self.task.folder / LOG).open(errors="replace") as log:
            log.seek(begun)
            try:
                caches = [v.name for v in w.graph.state]
                self.made = compiled(log.read(), [*w.interface.profiles], caches)
            except ValueError as e:
                self.task.progress(str(e))
        for note in summary(self.made):
            self._note(note)

    def _memory(self) -> int | None:
        """Return the bytes of the device; None if it is another machine's and none were given."""
        here = not self.target.ahead_of_time
        return self.task.memory or (self.host.memory(self.task.device) if here else None)

    def _plans(self, name: str) -> None:
        """Write the plans of all ranks, one after the other: kernels are timed for the first."""
        graph = self.graphs[name]
        for rank in range(ranks_of(graph)):
            self._plan_of(name, graph, rank)

    def _plan_of(self, name: str, graph: Graph, rank: int) -> None:
        plan, tensors = files(name, rank, ranks_of(graph))
        self.task.progress(f"writing the network {plan.removesuffix('.plan')}")
        params = self.task.params
        if rank:
            params = params_of_rank(params, self.task.folder, rank)
        w = build.write_network(self.api, graph, self.task.limits, params, self.settings, self.log)
        for note in () if rank else w.notes:
            self._note(note)
        begun = (self.task.folder / LOG).stat().st_size
        config = build.configure(self.api, w, self._memory(), self.target)
        timing = build.timing_file(self.host.timings(), self.host.machine(self.task.device))
        timed = None if self.target.ahead_of_time else timing
        path, progress = self.task.folder / plan, self.task.progress
        build.build_plan(self.api, w, config, timed, path, progress)
        if name == ENGINE and not rank:
            self._look(w, begun)
        text = json.dumps(w.interface.as_json(), indent=1) + "\n"
        write_file(self.task.folder / tensors, [text.encode()])
        if rank:
            params.close()

    def _check_memory(self) -> int:
        """Count the bytes of scratch memory of the text model's engine. PlanError where they do not
        fit the device beside weights and caches."""
        self.task.progress("checking the engine's memory")
        scratch, memory = self._scratch(), self._memory()
        if memory is None:
            return scratch
        steps = [self.graphs[name] for name in (ENGINE, DRAFT) if name in self.graphs]
        parts = {
            "weights": sum(map(build.weight_bytes, steps)),
            "caches": stored_bytes(self.task.program.graphs["prefill"], self.task.limits),
            "scratch": scratch,
            "reserve": reserve(memory),
        }
        if sum(parts.values()) > memory:
            shares = ", ".join(f"{k} {size_text(v)}" for k, v in parts.items())
            raise PlanError(
                f"the engine that TensorRT made needs {size_text(sum(parts.values()))} on "
                f"{self.task.device} ({shares}), which has {size_text(memory)}: build with a "
                f"smaller --prefill-chunk, --max-batch or --max-seq"
            )
        return scratch

    def _scratch(self) -> int:
        """Return the bytes of scratch memory that the text model's engine says, or, where only its
        GPU could read it, the builder's log."""
        plan = files(ENGINE, 0, ranks_of(self.graphs[ENGINE]))[0]
        if self.target.ahead_of_time:
            return max((m.scratch_bytes for m in self.made.values()), default=0)
        engine = read_plan(self.task.folder / plan, self.api, self.log)
        return int(engine.device_memory_size_v2)


def read_plan(path: Path, api: Api, log: Any) -> Any:
    """Return the engine of a plan, mapped, not read: a plan is as large as the weights."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        return deserialize(api, plan, log)


# --- in a process of its own: where the builder crashes, this one goes on and says so -----------


def build_apart(
    task: Task,
    settings: Mapping[str, str],
    argv: Sequence[str] = (),
    target: Target = HOPPER,
) -> dict[str, Any]:
    """Return what the child process made in the task's folder. Its errors are raised here;
    LowerError where it ended without one, as when the builder crashes."""
    job = {
        "graphs": {name: str(g) for name, g in task.program.graphs.items()},
        "limits": asdict(task.limits),
        "device": task.device,
        "settings": dict(settings),
        "target": target.name,
        "memory": task.memory,
    }
    out, file = task.folder, task.folder / JOB
    write_file(file, [json.dumps(job).encode()])
    try:
        return _listen(argv or python(__name__, f"main({str(out)!r})"), out, task.progress)
    finally:
        file.unlink(missing_ok=True)


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
    if "error" in said:
        raise {**vars(errors), "OSError": OSError}[said["error"]](*said["of"])
    code = child.returncode
    ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    raise LowerError(
        f"TensorRT's builder crashed ({ending}); {keep_log(out)}; build again: "
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
    said = None
    with suppress(ValueError):
        said = json.loads(line)
    if not isinstance(said, dict):
        return {}
    if "progress" in said:
        progress(said.pop("progress"))
    return said


def run_job(folder: Path, host: Host) -> dict[str, Any]:
    """Do the job and return the last line of the child process."""
    job = json.loads((folder / JOB).read_text())
    program = Program({name: parse_graph(text) for name, text in job["graphs"].items()})
    params = StoredParams.open(rank_files(folder.glob("*.safetensors"), 0))

    def progress(message: str) -> None:
        _say({"progress": message})

    limits, memory = Limits(**job["limits"]), job["memory"]
    task = Task(program, limits, job["device"], folder, params, progress, memory=memory)
    try:
        aimed = host.aimed(TARGETS[job["target"]]) if job["target"] else host
        made = Make(aimed, task, job["settings"]).run()
    except G4Error as e:
        kind = next(c.__name__ for c in type(e).__mro__ if vars(errors).get(c.__name__) is c)
        return {"error": kind, "of": [str(e)]}
    except OSError as e:  # no space, or files that may not be written
        return {"error": "OSError", "of": [e.errno or 0, e.strerror or str(e), e.filename]}
    return {"made": made}


def _say(line: Mapping[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main(folder: str) -> None:
    """Build what `job.json` in a folder asks for. Prints a JSON object a line: `progress`, and at
    the end `made` (what the manifest keeps), or an `error` by name and what it is made `of`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGTERM)
    _say(run_job(Path(folder), Host()))
