"""Stages of a script for a machine that is at hand for an hour.

Each stage is a process of its own, and a file of results in the folder --out, written anew as soon
as one of its cells is measured. A cell in which the process dies is kept as `crashed`, one that
takes longer than it may as `hung`; the stage is then started again for the cells behind it. What is
in the files is not measured again: runs of ten minutes add up. After each stage report.md and
report.json in the same folder say all that is known.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from g4ir.errors import G4Error
from g4ir.spec.record import load_spec
from g4ir.ui.files import write_file
from g4ir.ui.table import aligned

#: processes that a stage may lose before it is given up
MOST_LOST = 3
#: seconds between two looks at a process; how long a hung one may take to say where it is
LOOK_S, LAST_WORDS_S = 0.2, 1.0
#: characters of an error, and of the end of a log
SAID = 1000
#: states of a stage that is not begun again
ENDED = ("done", "given up")
#: what became of a cell instead of a result, and where its process died
LOST, WRONG = ("crashed", "hung"), ("crashed", "hung", "failed")
#: what became of it where the machine has no room, or lacks something
REFUSED = ("refused", "out_of_memory")
#: the cell of a process that died outside of its cells
OUTSIDE = "outside of cells"
#: the folder of what the processes print
LOGS = "logs"
T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """The work of one process: `args` are what its kind's function is given."""

    kind: str
    args: Mapping[str, Any]

    @property
    def name(self) -> str:
        values = (v if isinstance(v, str) else f"b{v}" for v in self.args.values())
        return "-".join((self.kind, *values)).replace(",", "+")


@dataclass(frozen=True)
class Kind:
    """A sort of stage: its function; seconds that a cell may take, unless it says otherwise; and
    seconds after which no other cell is begun."""

    run: Callable[[Cells, argparse.Namespace, Mapping[str, Any]], None]
    limit: float
    most: float = 3600.0


@dataclass(frozen=True)
class Script:
    """A script: its file, its kinds, its stages in order (what is most worth knowing first), and
    what its results say of the machine."""

    path: Path
    kinds: Mapping[str, Kind]
    stages: Callable[[argparse.Namespace], Sequence[Stage]]
    about: Callable[[argparse.Namespace], Mapping[str, Any]] = lambda args: {}


def common_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that every such script has."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--budget", type=float, default=60.0, metavar="MIN", help="begin nothing after these"
    )
    parser.add_argument("--only", default="", metavar="NAME", help="stages whose name begins so")
    parser.add_argument("--variants", type=lambda s: s.split(","), metavar="V,...")
    parser.add_argument("--carry", type=Path, metavar="DIR", help="what an earlier run compiled")
    parser.add_argument("--again", action="store_true", help="first forget what is in the files")
    parser.add_argument("--list", action="store_true", help="print the names of the stages")
    parser.add_argument("--dry-run", action="store_true", help="tiny variants, without a GPU")
    parser.add_argument("--run", metavar="STAGE", help="this stage alone, in this process")
    parser.add_argument("--seconds", type=float, help="with --run: begin no cell after these")
    return parser


def parsed(
    parser: argparse.ArgumentParser, card: Sequence[str], dry: Sequence[str]
) -> argparse.Namespace:
    """Return the options that were given; where no variants were, those of a run on a card or of a
    dry one. Ends the process with what is wrong."""
    args = parser.parse_args()
    args.variants = args.variants or (dry if args.dry_run else card)
    if args.carry and not args.carry.is_dir():
        parser.error(f"--carry {args.carry}: there is no such folder")
    for variant in args.variants:
        try:
            load_spec(variant.partition("+")[0])
        except G4Error as e:
            parser.error(f"--variants {variant}: {e}")
    return args


# --- in the process of a stage -----------------------------------------------------------------


class Cells:
    """The results of a stage in its file. A cell that is there is not measured again."""

    def __init__(self, path: Path, limit: float, seconds: float) -> None:
        self.path, self.limit = path, limit
        self.body = read_body(path)
        self.body.pop("begun", None)
        self.until = time.monotonic() + seconds
        self.left = False

    @property
    def found(self) -> dict[str, Any]:
        cells: dict[str, Any] = self.body["cells"]
        return cells

    def cell(
        self, name: str, measure: Callable[[], Mapping[str, Any]], limit: float | None = None
    ) -> None:
        """Measure a cell and keep it, or why there is none. What the device does not survive is
        raised, since nothing works in this process any more."""
        if not self.begin(name, limit):
            return
        started = time.monotonic()
        try:
            found = measure()
        except G4Error as e:
            found = {"refused": str(e)}
        except Exception as e:  # one cell must not cost the others
            if device_is_lost(e):
                self.keep(name, {"crashed": repr(e)[:SAID]})
                raise
            short = type(e).__name__ == "OutOfMemoryError"
            found = {"out_of_memory" if short else "failed": repr(e)[:SAID]}
        self.keep(name, {**found, "seconds": round(time.monotonic() - started, 1)})

    def begin(self, name: str, limit: float | None = None) -> bool:
        """Whether a cell is to be measured now; then the file says that it was begun."""
        if name in self.found:
            return False
        if time.monotonic() > self.until:
            self.left = True
            return False
        self.body["begun"] = {"cell": name, "limit": limit or self.limit}
        write_json(self.path, self.body)
        return True

    def made(self, name: str, make: Callable[[], T], limit: float | None = None) -> T | None:
        """Return what other cells need, which each process makes anew; None where it was refused,
        failed, or took the process with it before."""
        if any(word in self.found.get(name, {}) for word in LOST):
            return None
        self.found.pop(name, None)
        box: list[T] = []

        def measure() -> dict[str, Any]:
            box.append(make())
            return {}

        self.cell(name, measure, limit)
        self.left |= not box
        return box[0] if box else None

    def keep(self, name: str, found: Mapping[str, Any]) -> None:
        """Keep a cell; where it was begun, the process is outside of cells now."""
        self.found[name] = found
        if self.body.get("begun", {}).get("cell") == name:
            del self.body["begun"]
        write_json(self.path, self.body)
        print(name, json.dumps(found), flush=True)


def device_is_lost(e: Exception) -> bool:
    """Whether the device is lost: after an illegal access every call fails, with any error."""
    torch = sys.modules.get("torch")
    if torch is None or isinstance(e, torch.OutOfMemoryError | G4Error):
        return False
    if isinstance(e, torch.AcceleratorError):
        return True
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def run_here(script: Script, stage: Stage, args: argparse.Namespace) -> None:
    """Run a stage in this process."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    kind = script.kinds[stage.kind]
    seconds = kind.most if args.seconds is None else min(kind.most, args.seconds)
    cells = Cells(file_of(args.out, stage), kind.limit, seconds)
    cells.body |= {"args": dict(stage.args), "state": "begun", "about": dict(script.about(args))}
    kind.run(cells, args, stage.args)
    cells.body.pop("begun", None)
    cells.body["state"] = "partial" if cells.left else "done"
    write_json(cells.path, cells.body)


# --- files -------------------------------------------------------------------------------------


def file_of(out: Path, stage: Stage) -> Path:
    """Return the file of a stage's results; its log lies in the folder logs."""
    return out / f"{stage.name}.json"


def read_body(path: Path) -> dict[str, Any]:
    """Return what a stage's file holds; an empty one where there is none."""
    body: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cells": {}}
    return body


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Write a file whole."""
    write_file(path, [(json.dumps(body, indent=1, default=str) + "\n").encode()])


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files of a folder that `target` lacks or has an older version of; not those that
    somebody is writing, whose names begin with a dot."""
    for file in sorted(p for p in source.rglob("[!.]*") if p.is_file()):
        copy = target / file.relative_to(source)
        if not copy.exists() or copy.stat().st_mtime < file.stat().st_mtime:
            copy_file(file, copy)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, [source.read_bytes()])


# --- the process that starts them --------------------------------------------------------------


def drive(script: Script, args: argparse.Namespace) -> int:
    """Run the stages one after the other, as long as the budget lasts; return 1 where one of their
    cells is not as it should be."""
    every = script.stages(args)
    stages = [
        s for s in every if (s.name == args.run if args.run else s.name.startswith(args.only))
    ]
    if not stages:
        names = ", ".join(s.name for s in every)
        print(f"no stage {args.run or args.only}: there are {names}", file=sys.stderr)
        return 2
    if args.run:
        run_here(script, stages[0], args)
        return 0
    if args.list:
        print(*(s.name for s in stages), sep="\n")
        return 0
    (args.out / LOGS).mkdir(parents=True, exist_ok=True)
    for stage in stages if args.again else ():
        file_of(args.out, stage).unlink(missing_ok=True)
    end = time.monotonic() + args.budget * 60
    for stage in (*stages, *stages):  # what may not take all of the time at first, may in the end
        if time.monotonic() < end and read_body(file_of(args.out, stage)).get("state") not in ENDED:
            print(f"{stage.name} ...", flush=True)
            _run_apart(script, stage, args, end)
            write_report(args.out, stages)
    print(write_report(args.out, stages))
    return int(any(_is_wrong(c) for s in stages for c in _cells(args.out, s).values()))


def _run_apart(script: Script, stage: Stage, args: argparse.Namespace, end: float) -> None:
    """Run a stage in a process of its own, and again for what is behind a cell that was lost."""
    path, log = file_of(args.out, stage), args.out / LOGS / f"{stage.name}.log"
    for left in reversed(range(MOST_LOST)):
        seconds = max(0.0, end - time.monotonic())
        words = [*sys.argv[1:], "--run", stage.name, "--seconds", f"{seconds:.0f}"]
        with open(log, "ab") as file:
            begun = file.tell()
            process = subprocess.Popen(
                [sys.executable, str(script.path), *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            lost = _watched(process, path, script.kinds[stage.kind].limit)
        finally:
            _kill(process)
        if lost is None:
            return
        said = log.read_bytes()[begun:].decode(errors="replace")[-SAID:]
        if not _keep_lost(path, {**lost, "said": said}, final=not left):
            return


def _watched(process: subprocess.Popen[bytes], path: Path, limit: float) -> dict[str, Any] | None:
    """Wait for a process whose file says what it is at; return what became of it where it did not
    end by itself."""
    since, version, allowed = time.monotonic(), -1, limit
    while process.poll() is None:
        time.sleep(LOOK_S)
        found = path.stat().st_mtime_ns if path.exists() else 0
        if found != version:
            since, version = time.monotonic(), found
            allowed = read_body(path).get("begun", {}).get("limit", limit)
        elif time.monotonic() - since > allowed:
            process.send_signal(signal.SIGUSR1)  # it says where it is
            time.sleep(LAST_WORDS_S)
            return {"hung": allowed}
    code = process.returncode
    if code == 0:
        return None
    return {"crashed": signal.Signals(-code).name if code < 0 else f"exit status {code}"}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, in whatever state they are."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _keep_lost(path: Path, found: Mapping[str, Any], final: bool) -> bool:
    """Keep what became of the cell that a process was at; return whether the others may be
    tried."""
    body = read_body(path)
    kept = any(word in c for c in list(body["cells"].values())[-1:] for word in LOST)
    cell = body.pop("begun", {}).get("cell", OUTSIDE)
    if cell != OUTSIDE or not kept:
        body["cells"][cell] = found
    again = not final and (cell != OUTSIDE or kept)
    body["state"] = "partial" if again else "given up"
    write_json(path, body)
    return again


# --- the report --------------------------------------------------------------------------------


def write_report(out: Path, stages: Sequence[Stage]) -> str:
    """Write report.json and report.md; return a line on each stage."""
    bodies = {s.name: read_body(file_of(out, s)) for s in stages}
    write_json(out / "report.json", bodies)
    lines = [[n, b.get("state", "not begun"), *_counts(b["cells"])] for n, b in bodies.items()]
    summary = aligned([["stage", "state", "cells", "refused", "not right"], *lines])
    parts = [f"## {n}\n\n```\n{_table(b['cells'])}```\n" for n, b in bodies.items() if b["cells"]]
    about = next((b["about"] for b in bodies.values() if b.get("about")), {})
    head = "\n".join(f"- {k}: {v}" for k, v in about.items())
    text = f"# {out.name}\n\n{head}\n\n```\n{summary}```\n\n" + "\n".join(parts)
    write_file(out / "report.md", [text.encode()])
    return summary


def _cells(out: Path, stage: Stage) -> dict[str, Any]:
    cells: dict[str, Any] = read_body(file_of(out, stage))["cells"]
    return cells


def _counts(cells: Mapping[str, Any]) -> tuple[str, str, str]:
    refused = sum(any(word in c for word in REFUSED) for c in cells.values())
    return str(len(cells)), str(refused), str(sum(map(_is_wrong, cells.values())))


def _is_wrong(cell: Mapping[str, Any]) -> bool:
    return any(word in cell for word in WRONG) or not cell.get("ok", True)


def _table(cells: Mapping[str, Any]) -> str:
    """Return a line for each cell, with a column for each value that one of them has."""
    flat = {name: _flat(found) for name, found in cells.items()}
    names = list(dict.fromkeys(k for values in flat.values() for k in values))
    rows = [[name, *(values.get(k, "") for k in names)] for name, values in flat.items()]
    return aligned([["", *names], *rows])


def _flat(found: Mapping[str, Any], front: str = "") -> dict[str, str]:
    """Return values as text by their names, those of inner tables behind that table's name."""
    values = dict[str, str]()
    for k, v in found.items():
        if isinstance(v, Mapping):
            values |= _flat(v, f"{front}{k}.")
        else:
            text = f"{v:.4g}" if isinstance(v, float) else str(v)
            values[front + k] = " ".join(text.split())[:60]
    return values
