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
from types import FrameType
from typing import Any, NoReturn

from g4ir.errors import G4Error

#: (level, message, values) -> line
LineFormat = Callable[[str, str, Mapping[str, Any]], str]
QUIET_S = 2.0  # seconds before a Progress displays anything
PERIOD_S = 1.0  # seconds between two updates of a Progress
#: exit codes of bugs (sysexits.h) and of signals (shells)
INTERNAL, INTERRUPTED, PIPE_CLOSED = 70, 130, 141
#: signals that end a command after it has cleaned up; Windows has no SIGHUP
ENDING = tuple(s for s in signal.Signals if s.name in ("SIGTERM", "SIGHUP"))
#: logger of warnings about specs that are valid but unusual
SPEC_RULES = logging.getLogger("g4ir.spec.rules")
#: torch's messages of failed allocations
OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)


def say(message: str, level: str = "info", **values: Any) -> None:
    """Print one line on stderr, in place of a progress line if there is one."""
    Progress.clear()
    _write(f"{_format[0](level, message, values)}\n")


def plain_line(level: str, message: str, values: Mapping[str, Any]) -> str:
    """Return `g4ir: LEVEL: MESSAGE KEY=VALUE ...`; the level `info` is left out."""
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
    """Write lines on stderr in a format of FORMATS from now on; None: `plain_line`."""
    _format[0] = FORMATS[name] if name else plain_line


_format: list[LineFormat] = [plain_line]


def interactive() -> bool:
    """Whether questions can be asked: stdin and stderr are terminals."""
    return bool(sys.stdin and sys.stdin.isatty() and _on_terminal())


def confirm(question: str) -> bool:
    """Ask a question on stderr; return whether the answer, a line of stdin, begins with y."""
    Progress.clear()
    Progress.paused = True
    _write(f"g4ir: {question} [y/N] ")
    try:
        return sys.stdin.readline().strip().lower().startswith("y")
    finally:
        Progress.paused = False


class Progress:
    """Context manager that displays progress. On a terminal one line is rewritten every second;
    otherwise a line is printed when the message changes. A thread redraws it, so that the time of
    steps without messages is displayed too.
    """

    #: whether the terminal's last line shows progress
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
        """Stop the display and clear the progress line, before other output."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self.clear()

    @staticmethod
    def clear() -> None:
        """Clear the terminal's progress line, before other output."""
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
    """Write to stderr; errors of a closed stderr are ignored."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), record.levelname.lower())


@contextlib.contextmanager
def logs() -> Iterator[None]:
    """Context that prints the package's warnings on stderr. Those of the rules of specs
    (SPEC_RULES: the spec is accepted) stay hidden until a verb calls `spec_warnings`."""
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
    """Also print warnings about specs."""
    SPEC_RULES.setLevel(logging.NOTSET)


class Ended(BaseException):
    """Raised when a signal asks the process to end; like KeyboardInterrupt, no `except Exception`
    catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextlib.contextmanager
def handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Context with other signal handlers; does nothing outside the main thread, which alone may set
    them."""
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
    """Context in which the signals ENDING raise `Ended` in the main thread, so that temporary files
    and processes are removed. Ignored signals (nohup) and those with other handlers stay
    unchanged."""

    def end(number: int, frame: FrameType | None) -> None:
        for s in caught:
            signal.signal(s, signal.SIG_IGN)  # ignore further signals
        raise Ended(number)

    caught = [s for s in ENDING if signal.getsignal(s) is signal.SIG_DFL]
    return handled(dict.fromkeys(caught, end))


def leave(code: int) -> NoReturn:
    """Flush the output and exit, without waiting for threads of libraries."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def defer_signals(signals: Iterable[signal.Signals] = (signal.SIGINT, *ENDING)) -> Iterator[None]:
    """Context that defers signals that have a Python handler to its end; a second one of the same
    kind is handled at once."""
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


def tolerant_output() -> None:
    """Escape characters that the terminal's encoding lacks, and replace closed standard streams by
    /dev/null: neither is an error."""
    _reserve_descriptors()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _reserve_descriptors() -> None:
    """Open /dev/null as each of the descriptors 0 to 2 that is closed. A socket or file that got
    one of them would be written to as stderr, and libuv aborts when it closes one."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def report(error: BaseException, trace: bool) -> int:
    """Print an exception as one message; return the exit code."""
    if trace:
        traceback.print_exception(error)
    code, text = _verdict(error)
    with contextlib.suppress(OSError, ValueError):
        try:
            sys.stdout.flush()
        except OSError:  # discard the buffer: flushing it at exit would fail again
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
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
        return 3, (
            "error: not enough memory; build with a smaller --max-batch, a shorter --max-seq or "
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
