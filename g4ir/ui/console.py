"""Output of the command line on stderr: progress, warnings, and one-line errors."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from g4ir.errors import G4Error

#: (level, message, values) -> line
LineFormat = Callable[[str, str, Mapping[str, Any]], str]
QUIET_S = 2.0  # nothing is said about what takes no longer
PERIOD_S = 1.0  # between two lines of one stage
#: as sysexits.h and shells have them
INTERNAL, NO_OUTPUT, INTERRUPTED, PIPE_CLOSED = 70, 74, 130, 141
#: signals that end a command after it has cleaned up
ENDING = tuple(s for s in signal.Signals if s.name in ("SIGTERM", "SIGHUP"))  # Windows lacks one
#: logger of warnings on legal specs
SPEC_RULES = logging.getLogger("g4ir.spec.rules")
#: how torch words a failed allocation
OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)


def say(message: str, level: str = "info", **values: Any) -> None:
    """Print one line on stderr, in place of a progress line if there is one."""
    Progress.clear()
    _write(f"{_format[0](level, message, values)}\n")


def plain_line(level: str, message: str, values: Mapping[str, Any]) -> str:
    """Return a line for a terminal."""
    level = "" if level == "info" else f"{level}: "
    return " ".join([f"g4ir: {level}{message}", *(f"{k}={v}" for k, v in values.items())])


def text_line(level: str, message: str, values: Mapping[str, Any]) -> str:
    """Return a line with the time (UTC) and the level."""
    words = (f"{k}={v}" for k, v in values.items())
    return " ".join([f"{_now()} {level.upper():7} {message}", *words])


def json_line(level: str, message: str, values: Mapping[str, Any]) -> str:
    """Return a line of JSON."""
    return json.dumps({"time": _now(), "level": level, "message": message, **values}, default=str)


def _now() -> str:
    now = datetime.now(timezone.utc)
    return f"{now:%Y-%m-%dT%H:%M:%S}.{now.microsecond // 1000:03d}Z"


#: name -> format of lines on stderr
FORMATS: Mapping[str, LineFormat] = {"text": text_line, "json": json_line}


def use_format(name: str | None) -> None:
    """Write lines on stderr in a format of FORMATS from now on; None: for a terminal."""
    _format[0] = FORMATS[name] if name else plain_line


_format: list[LineFormat] = [plain_line]


def interactive() -> bool:
    """Whether somebody can answer a question: stdin and stderr are a terminal."""
    return bool(sys.stdin and sys.stdin.isatty() and _on_terminal())


def confirm(question: str) -> bool:
    """Ask on stderr; whether the answer begins with y."""
    Progress.clear()
    Progress.paused = True
    _write(f"g4ir: {question} [y/N] ")
    try:
        return sys.stdin.readline().strip().lower().startswith("y")
    finally:
        Progress.paused = False


class Progress:
    """Context manager that displays progress. On a terminal one line is rewritten every second;
    otherwise a line is printed when the message changes. A thread keeps the time, so that steps
    without messages are displayed too.
    """

    #: whether the terminal's last line is one of progress
    _on_line = False
    #: whether a question on that line waits for the user's answer
    paused = False

    def __init__(self) -> None:
        self._message = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __call__(self, message: str) -> None:
        self._message = message

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Say no more, and clear the terminal's line: something else is printed now."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self.clear()

    @staticmethod
    def clear() -> None:
        """Clear the terminal's progress line: something else is printed now."""
        if Progress._on_line:
            Progress._on_line = False
            _write("\r\x1b[K")

    def _watch(self) -> None:
        start, printed = time.monotonic(), ""
        while not self._stop.wait(PERIOD_S):
            seconds, message = time.monotonic() - start, self._message
            if seconds < QUIET_S or not message or Progress.paused:
                continue
            line = f"{message} ({seconds:.0f} s)"
            if _on_terminal():
                Progress._on_line = True
                _write(f"\r\x1b[Kg4ir: {line}"[: shutil.get_terminal_size().columns + 3])
            elif message != printed:
                say(line)
            printed = message


def _on_terminal() -> bool:
    return sys.stderr.isatty()


def _write(text: str) -> None:
    """Write to stderr; a closed one is no reason to stop working."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), record.levelname.lower())


@contextlib.contextmanager
def logs() -> Iterator[None]:
    """A context that prints warnings of the package as lines on stderr, but for those on a legal
    spec: `spec_warnings` turns them on in verbs that take in a spec."""
    logger, handler = logging.getLogger("g4ir"), _Warnings(logging.WARNING)
    logger.addHandler(handler)
    use_format(None)
    SPEC_RULES.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        spec_warnings()


def spec_warnings() -> None:
    """Print warnings on a spec, too."""
    SPEC_RULES.setLevel(logging.NOTSET)


class Ended(BaseException):
    """A signal asks the process to end; like KeyboardInterrupt, no error that anyone handles."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextlib.contextmanager
def handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """A context with other handlers of signals, in the main thread: others have none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def endings() -> contextlib.AbstractContextManager[None]:
    """A context in which the signals ENDING raise `Ended` in the main thread, so that temporary
    files and processes go. One that is ignored (nohup) or handled otherwise stays so."""

    def end(number: int, frame: FrameType | None) -> None:
        for s in caught:
            signal.signal(s, signal.SIG_IGN)  # once is enough
        raise Ended(number)

    caught = [s for s in ENDING if signal.getsignal(s) is signal.SIG_DFL]
    return handled(dict.fromkeys(caught, end))


def leave(code: int) -> NoReturn:
    """End the process without waiting for what a library does in a thread."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def defer_signals(signals: Iterable[signal.Signals] = (signal.SIGINT, *ENDING)) -> Iterator[None]:
    """A context at whose end signals are handled that came in it; a second one at once."""
    came: list[tuple[int, FrameType | None]] = []
    before = {s: h for s in signals if callable(h := signal.getsignal(s))}

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        signal.signal(number, before[signal.Signals(number)])

    try:
        with handled(dict.fromkeys(before, note)):
            yield
    finally:
        for number, frame in came:
            before[signal.Signals(number)](number, frame)


class OutputError(OSError):
    """stdout takes no more; a reader that went away is a BrokenPipeError instead."""


class _Output:
    """A stream whose errors can be distinguished from other files'."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stream, name)
        return partial(_named, method) if name in ("write", "flush") else method


def _named(method: Callable[..., Any], *args: str) -> Any:
    try:
        return method(*args)
    except BrokenPipeError:
        raise
    except OSError as e:
        raise OutputError(e.errno, e.strerror) from e


def output() -> Any:
    """A context in which what fails on stdout is an OutputError, or a BrokenPipeError."""
    stream: Any = _Output(sys.stdout)
    return contextlib.redirect_stdout(stream)


def tolerant_output() -> None:
    """Escape text that the terminal's encoding lacks, and take closed standard streams as empty
    ones: neither is an error."""
    _reserve_descriptors()
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _reserve_descriptors() -> None:
    """Open /dev/null as each of the descriptors 0 to 2 that is closed. A socket or file that got
    one of them would be written to as stderr, and libuv aborts when it closes one."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def report(error: BaseException, trace: bool) -> int:
    """Say what went wrong in one message; returns the exit code."""
    if trace:
        traceback.print_exception(error)
    code, text = _verdict(error)
    if code in (PIPE_CLOSED, NO_OUTPUT):
        # What is still buffered must not fail again at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if text:
        say(text.removeprefix("error: "), "error" if text.startswith("error: ") else "info")
    return code


def error_text(error: BaseException) -> str:
    """Return an error's text for a message that is not fatal."""
    return _verdict(error)[1].removeprefix("error: ")


def _verdict(error: BaseException) -> tuple[int, str]:
    if isinstance(error, G4Error):
        return error.exit_code, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, Ended):
        return 128 + error.number, f"ended by {signal.Signals(error.number).name}"
    if isinstance(error, BrokenPipeError):
        return PIPE_CLOSED, ""
    if isinstance(error, OutputError):
        return NO_OUTPUT, f"error: stdout: {error.strerror}"
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
        return 3, (
            "error: not enough memory; build for fewer rows (--max-batch), a shorter --max-seq or "
            "a smaller --dtype, or use a machine with more"
        )
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return 2, f"error: {where}{error.strerror or error}"
    first = (str(error).splitlines() or [""])[0]
    return INTERNAL, (
        f"internal error: {type(error).__name__}: {first}; run again with --trace and report what "
        "it prints"
    )
