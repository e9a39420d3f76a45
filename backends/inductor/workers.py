"""Compiles programs in worker processes, or copies them from the cache."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO

from g4ir.errors import G4Error, LowerError
from g4ir.ui.paths import claimed
from g4ir.ui.subprocesses import python

from .compile import compile_program, program_name
from .device import find_device
from .program_cache import from_cache, keep_program
from .target import Target

#: lines of a worker's output in an error
PRINTED_LINES = 200
#: max texts that wait for a process, each in a thread
MAX_QUEUED = 64


def compile_all(
    texts: Sequence[str],
    target: Target,
    out: Path,
    jobs: int,
    progress: Callable[[str], None],
) -> dict[str, str]:
    """Compile each distinct text of a program into `out`; return text -> file name.

    Raises LowerError with the backend's message and the segment's first line.
    """
    files = {t: f"{program_name(t, target)}.pt2" for t in dict.fromkeys(texts)}
    if files:
        out.mkdir(parents=True, exist_ok=True)
    missing = {t: out / name for t, name in files.items() if not from_cache(name, out)}
    if missing:
        progress(f"compiling {len(missing)} of {len(files)} programs")
        with closing(_compiled(missing, target, min(jobs, len(missing)))) as done:
            for i, _ in enumerate(done):
                progress(f"compiled {i + 1}/{len(missing)}")
    return files


def _compiled(
    missing: Mapping[str, Path], target: Target, workers: int
) -> Generator[str, None, None]:
    """Compile each text to its file in `workers` processes; yield each as it completes."""
    if workers == 1:
        yield from _shared(missing, target)
        return
    # Longest first, so that all workers finish at about the same time.
    device = find_device(target.device)
    todo = sorted(missing, key=len, reverse=True)
    early = _early.pop(device.name, None)
    with early or Workers(workers, device.name) as started:
        futures = {started.submit(text, target, missing[text]): text for text in todo}
        for future in as_completed(futures):
            future.result()
            keep_program(missing[futures[future]])
            yield futures[future]


def _shared(missing: Mapping[str, Path], target: Target) -> Iterator[str]:
    """Compile one after the other; programs that another process is compiling come last."""
    todo, passed_over = deque(missing), 0
    while todo:
        text = todo.popleft()
        path = missing[text]
        with claimed(path.name, wait=passed_over > len(todo)) as alone:
            if not alone:
                todo.append(text)
                passed_over += 1
                continue
            if not from_cache(path.name, path.parent):
                compile_program(text, target, path)
                keep_program(path)
        passed_over = 0
        yield text


#: device -> workers started before the list of programs was known
_early: dict[str, Workers] = {}


@contextmanager
def compilers_started(count: int, device: str) -> Iterator[None]:
    """Context in which worker processes import the compiler, for the next `compile_all`, which
    reports their errors."""
    workers = _early[device] = Workers(count, device)
    try:
        yield
    finally:
        if _early.pop(device, None):
            workers.end()


class Workers:
    """A pool of compile workers, forked from a process that has imported the compiler. They form a
    separate process group: Ctrl-C reaches the main process only, and SIGTERM ends a compiler
    together with its worker, even if the main process ignores it. Output is captured. Not
    multiprocessing, whose processes would import the user's main script again.
    """

    def __init__(self, count: int, device: str) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [other.fileno() for _, other in pairs]
        self._pool, self._idle = ThreadPoolExecutor(MAX_QUEUED), SimpleQueue[IO[str]]()
        for ours, _ in pairs:
            self._idle.put(ours.makefile("rw"))
        self._printed = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._server = subprocess.Popen(
            python(__name__, f"serve({os.getpid()}, {theirs}, {device!r})"),
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=theirs,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL),  # for `kill`
        )
        for pair in pairs:  # the file objects keep these ends open
            for end in pair:
                end.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        self.kill()  # or the pool would wait for unneeded results
        self._pool.shutdown(cancel_futures=True)
        with self._printed:
            self._server.wait()

    def kill(self) -> None:
        """Terminate the workers and their compilers, which remove their files."""
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGTERM)

    def submit(self, text: str, target: Target, path: Path) -> Future[None]:
        """Queue `compile`; texts are compiled in order of submission."""
        return self._pool.submit(self.compile, text, target, path)

    def compile(self, text: str, target: Target, path: Path) -> None:
        """Compile a program in an idle worker; LowerError with its message, caused by the workers'
        output."""
        channel = self._idle.get()
        try:
            print(json.dumps([text, asdict(target), str(path)]), file=channel, flush=True)
            answer = channel.readline()
        except OSError:  # the worker has exited
            answer = ""
        finally:
            self._idle.put(channel)
        if not answer:
            raise LowerError(_end_of_worker(self._status())) from self._output()
        if error := json.loads(answer):
            raise LowerError(error) from self._output()

    def _status(self) -> int:
        """Return the first process's exit code as subprocess does; it stays a zombie for `kill`."""
        status = os.waitid(os.P_PID, self._server.pid, os.WEXITED | os.WNOWAIT)
        assert status
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def _output(self) -> Exception:
        size = os.fstat(self._printed.fileno()).st_size
        text = os.pread(self._printed.fileno(), size, 0).decode(errors="backslashreplace")
        lines = text.splitlines()[-PRINTED_LINES:]
        return RuntimeError("\n".join(["what the compiling processes printed:", *lines]))


def _end_of_worker(status: int) -> str:
    """Return why a worker ended without an answer."""
    if status == -signal.SIGKILL:
        why = "it was killed, most likely for memory: build again with fewer other programs running"
    else:
        why = "run again with --trace to see what it printed"
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    return f"torch: a compiling process ended {how}; {why}"


def serve(parent: int, channels: Sequence[int], device: str) -> None:
    """Fork a worker for each channel, which compiles the requests there. Exits with `parent`, or
    with the status of the first worker that ends. GPU workers import the compiler after the fork:
    it may open the GPU, which forks could not use."""
    gc.disable()  # saves a fifth of torch's time, costs 40 MB
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    importlib.import_module(find_device(device).preload)
    for i, channel in enumerate(channels):
        if not os.fork():
            for other in {*channels[i:]} - {channel}:
                os.close(other)
            _answer(channel)
            return
        os.close(channel)
    _, status = os.wait()
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)  # compilers too


def _answer(channel: int) -> None:
    """Compile the request of each line; respond with null or the error."""
    with socket.socket(fileno=channel) as connection, connection.makefile("rw") as lines:
        while line := lines.readline():
            text, target, path = json.loads(line)
            try:
                compile_program(text, Target(**target), Path(path))
                error = None
            except G4Error as e:
                error = str(e)
            print(json.dumps(error), file=lines, flush=True)
