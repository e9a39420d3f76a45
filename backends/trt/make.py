"""A build from its graphs to its plans: what is tried first, and what is tried again."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from g4ir.ui.progress import Progress, no_progress
from g4ir.ui.subprocesses import python
from g4ir.ui.units import size_text
from g4ir.weights.pack import ParamSource, StoredParams, params_of_rank, rank_files

from . import build
from .build import Written
from .compiled import Made, compiled, summary
from .host import Api, Host, logger
from .interface import ENGINE, LOG, files, keep_log, networks
from .lowerings import AUTO
from .runtime import deserialize
from .target import HOPPER, TARGETS, Target

T = TypeVar("T")
#: form of attention -> what notes say of it, and what is tried where a whole network is refused
WORDS = {
    "fused": "TensorRT's own layer",
    "explicit": "products and a softmax",
    "plain": "products and the softmax in plain layers",
}
SIMPLER = {"fused": "explicit"}
#: what the child process is to do, beside its graphs and weights
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
    #: of attention, by head size, where it is chosen
    forms: dict[int, str] = field(default_factory=dict)
    #: of the text model's plan, by profile
    made: dict[str, Made] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.api, self.graphs = self.host.tensorrt(), networks(self.task.program)
        self.target = self.host.target

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
        self._try_attention()
        self.task.progress(f"TensorRT's builder: {build.estimate([*self.graphs.values()])}")
        layers = {name: self._or_simpler(partial(self._plans, name)) for name in self.graphs}
        scratch = self._check_memory()
        first = {name: files(name, 0, ranks_of(g))[0] for name, g in self.graphs.items()}
        return {
            "plan": first.pop(ENGINE),
            "tensors": files(ENGINE)[1],
            "target": self.target.name,
            "library": self.target.library.name,
            "version": self.api.version,
            "capabilities": [*self.target.capabilities],
            "gpu": "" if self.target.ahead_of_time else self.host.gpu(),
            "settings": self.settings,
            "layers": layers[ENGINE],
            "notes": self.notes,
            "scratch_bytes": scratch,
            "others": first,
        }

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.task.progress(text)

    def _try_attention(self) -> None:
        """Build the attentions of each size of heads alone, into plans that are thrown away, in one
        form after the other until one is taken."""
        for size, trials in build.attention_trials(self.graphs.values()).items():
            place = trials[0].outputs[0].name
            self.task.progress(f"trial build of the attention of {place}, heads of {size}")
            refused: LowerError | None = None
            for form in self._candidates():
                self.forms[size] = form
                try:
                    for g in trials:
                        self._or_plain(partial(self._build_alone, g))
                    break
                except LowerError as e:
                    refused = e
            else:
                said = f"a trial build of the attention of {place} alone: {refused}"
                raise LowerError(said) from refused
            if self.settings["attention"] == AUTO:
                self._note(f"attention of heads of {size}: {WORDS[self.forms[size]]}")

    def _candidates(self) -> tuple[str, ...]:
        """Return the forms of attention that may be tried, the best first."""
        chosen = self.settings["attention"]
        return ("fused", "explicit", "plain") if chosen == AUTO else (chosen,)

    def _build_alone(self, g: Graph) -> None:
        settings = {**self.settings, "weights": "baked"}
        with tempfile.TemporaryDirectory() as folder, printed_to(self.task.folder / LOG):
            trial = self.settings["attention"] == AUTO
            w = self._network(g, self.task.params, trial=trial)
            self._build(w, settings, Path(folder) / "plan", no_progress)

    def _or_plain(self, work: Callable[[], T]) -> T:
        """Build something; where a refusal names the wrapper that takes layers for attention, once
        more with attention in plain layers."""
        try:
            return work()
        except build.RefusedError as e:
            if self.settings["attention"] in ("plain", AUTO) or build.WRAPPER not in str(e):
                raise
        self.settings["attention"] = "plain"
        self._note(
            "attention: plain, since TensorRT takes the layers of the other form for an attention "
            "of its own and fails"
        )
        return work()

    def _or_simpler(self, work: Callable[[], T]) -> T:
        """Build a whole network; where it is refused in the forms of attention that were taken
        alone, in the next simpler ones."""
        while True:
            try:
                return self._or_plain(work)
            except build.RefusedError as e:
                if self.settings["attention"] != AUTO or {*self.forms.values()} <= {"plain"}:
                    raise
                simpler = SIMPLER if "fused" in self.forms.values() else {"explicit": "plain"}
                self.forms = {size: simpler.get(f, f) for size, f in self.forms.items()}
                forms = ", ".join(f"of {n}: {WORDS[form]}" for n, form in self.forms.items())
                self._note(f"attention once more, of heads {forms}, since TensorRT refused: {e}")

    def _network(self, g: Graph, params: ParamSource, trial: bool = False) -> Written:
        given = (self.api, g, self.task.limits, params, self.settings, self.log)
        return build.write_network(*given, self.forms, trial)

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

    def _build(self, w: Written, settings: dict[str, str], plan: Path, progress: Progress) -> None:
        config = build.configure(self.api, w, settings, self._memory(), self.target)
        timing = build.timing_file(self.host.timings(), self.host.machine(self.task.device))
        timed = None if self.target.ahead_of_time else timing
        build.build_plan(self.api, w, config, timed, plan, progress)

    def _memory(self) -> int | None:
        """Return the bytes of the device; None if it is another machine's and none were given."""
        here = not self.target.ahead_of_time
        return self.task.memory or (self.host.memory(self.task.device) if here else None)

    def _plans(self, name: str) -> int:
        """Write the plans of all ranks, one after the other: kernels are timed for the first.
        Return the number of its layers."""
        graph = self.graphs[name]
        layers, *_ = [self._plan_of(name, graph, rank) for rank in range(ranks_of(graph))]
        return layers

    def _plan_of(self, name: str, graph: Graph, rank: int) -> int:
        plan, tensors = files(name, rank, ranks_of(graph))
        self.task.progress(f"writing the network {plan.removesuffix('.plan')}")
        params = self.task.params
        if rank:
            params = params_of_rank(params, self.task.folder, rank)
        w = self._network(graph, params)
        for note in () if rank else w.notes:
            self._note(note)
        begun = (self.task.folder / LOG).stat().st_size
        self._build(w, self.settings, self.task.folder / plan, self.task.progress)
        if name == ENGINE and not rank:
            self._look(w, begun)
        text = json.dumps(w.interface.as_json(), indent=1) + "\n"
        write_file(self.task.folder / tensors, [text.encode()])
        if rank:
            params.close()
        return int(w.network.num_layers)

    def _check_memory(self) -> int:
        """Count the bytes of scratch memory of the text model's engine. PlanError where they do not
        fit the device beside weights and caches."""
        self.task.progress("checking the engine's memory")
        scratch, memory = self._scratch(), self._memory()
        if memory is None:
            return scratch
        streamed = self.settings["weights"] == "streamed"
        steps = [self.graphs[name] for name in (ENGINE, DRAFT) if name in self.graphs]
        parts = {
            "weights": 0 if streamed else sum(map(build.weight_bytes, steps)),
            "caches": stored_bytes(self.task.program.graphs["prefill"], self.task.limits),
            "scratch": scratch,
            "reserve": reserve(memory),
        }
        if sum(parts.values()) > memory:
            shares = ", ".join(f"{k} {size_text(v)}" for k, v in parts.items())
            raise PlanError(
                f"the engine that TensorRT made needs {size_text(sum(parts.values()))} on "
                f"{self.task.device} ({shares}), which has {size_text(memory)}: build with a "
                f"smaller --prefill-chunk, --max-batch or --max-seq, or with --set weights=streamed"
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


@contextmanager
def printed_to(log: Path) -> Iterator[None]:
    """A context in which what libraries print as an error is a line of the log: of a trial, a
    refusal is none."""
    before = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


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
    out, graphs = task.folder, task.program.graphs
    job = {
        "limits": asdict(task.limits),
        "device": task.device,
        "settings": dict(settings),
        "target": target.name,
        "memory": task.memory,
    }
    given = {JOB: json.dumps({**job, "graphs": [*graphs]})}
    given |= {_graph_file(name): str(g) for name, g in graphs.items()}
    for name, text in given.items():
        write_file(out / name, [text.encode()])
    try:
        return _listen(argv or python(__name__, f"main({str(out)!r})"), out, task.progress)
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
    texts = {name: (folder / _graph_file(name)).read_text() for name in job["graphs"]}
    program = Program({name: parse_graph(text) for name, text in texts.items()})
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
        return {"error": kind, "message": str(e)}
    except OSError as e:  # no space, or files that may not be written
        return {"errno": e.errno or 0, "message": e.strerror or str(e), "file": e.filename}
    return {"made": made}


def _say(line: Mapping[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main(folder: str) -> None:
    """Build what `job.json` in a folder asks for. Prints a JSON object a line: `progress`, and at
    the end `made` (what the manifest keeps), `error` or `errno`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGTERM)
    _say(run_job(Path(folder), Host()))
