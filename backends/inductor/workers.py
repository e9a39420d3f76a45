"""Compiles programs, several at a time in worker processes, or copies them from the cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO

from g4ir.errors import G4Error, LowerError
from g4ir.ui.subprocesses import python

from .compile import compile_program, program_name
from .program_cache import from_cache, keep_program
from .target import Target

#: maximum lines of the workers' output in an error: the last ones
PRINTED_LINES = 200


def compile_all(
    texts: Sequence[str], target: Target, out: Path, jobs: int, progress: Callable[[str], None]
) -> dict[str, str]:
    """Write a program for each distinct segment text into the folder `out`: copied from the cache,
    or compiled, in up to `jobs` processes; return text -> file name.

    Raises LowerError if a segment does not compile, a disk is full or a process ends early, and
    TrustError as `from_cache`.
    """
    files = {t: f"{program_name(t, target)}.pt2" for t in dict.fromkeys(texts)}
    if files:
        out.mkdir(parents=True, exist_ok=True)
    missing = [(t, out / name) for t, name in files.items() if not from_cache(name, out)]
    if missing:
        progress(f"compiling {len(missing)} of {len(files)} programs")
        # Longest first and in turn, so that all workers finish at about the same time.
        missing.sort(key=lambda program: -len(program[0]))
        shares = [missing[i::jobs] for i in range(min(jobs, len(missing)))]
        done = _in_this_process(missing, target) if jobs == 1 else _in_workers(shares, target)
        for i, path in enumerate(done):
            keep_program(path)
            progress(f"compiled {i + 1}/{len(missing)}")
    return files


def _in_this_process(programs: Sequence[tuple[str, Path]], target: Target) -> Iterator[Path]:
    for text, path in programs:
        compile_program(text, target, path)
        yield path


def _in_workers(shares: Sequence[Sequence[tuple[str, Path]]], target: Target) -> Iterator[Path]:
    """Compile each share in a process; yield each file when it is complete. Not by multiprocessing,
    whose processes would import the user's main script again."""
    results, write = os.pipe()
    with ExitStack() as stack:
        printed = stack.enter_context(tempfile.TemporaryFile())
        lines = stack.enter_context(open(results))
        workers = []
        for share in shares:
            request = stack.enter_context(tempfile.TemporaryFile("w+"))
            json.dump([asdict(target), [(text, str(path)) for text, path in share]], request)
            request.seek(0)
            command = python(__name__, f"serve({write})")
            files = request, printed, printed
            workers.append(subprocess.Popen(command, -1, None, *files, pass_fds=[write]))
            stack.callback(workers[-1].wait)
            stack.callback(workers[-1].terminate)
        os.close(write)
        for line in lines:
            path, error = json.loads(line)
            if error:
                raise LowerError(error) from _output(printed)
            yield Path(path)
        for worker in workers:
            if status := worker.wait():
                raise LowerError(_end_of_worker(status)) from _output(printed)


def _output(printed: IO[bytes]) -> Exception:
    size = os.fstat(printed.fileno()).st_size
    text = os.pread(printed.fileno(), size, 0).decode(errors="backslashreplace")
    lines = text.splitlines()[-PRINTED_LINES:]
    return RuntimeError("\n".join(["what the compiling processes printed:", *lines]))


def _end_of_worker(status: int) -> str:
    """Return the error message for a worker that ended with this status, not 0."""
    if status == -signal.SIGKILL:
        why = "it was killed, most likely because memory ran out: build again with more free memory"
    else:
        why = "run again with --trace to see what it printed"
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    return f"torch: a compiling process ended {how}; {why}"


def serve(results: int) -> None:
    """Compile the programs of the JSON request on stdin; write a JSON line [path, error or null]
    for each to the file descriptor `results`. A worker whose parent has ended fails to write, and
    ends."""
    target, programs = json.load(sys.stdin)
    with open(results, "w") as lines:
        for text, path in programs:
            error = None
            try:
                compile_program(text, Target(**target), Path(path))
            except G4Error as e:
                error = str(e)
            print(json.dumps([path, error]), file=lines, flush=True)
