"""Renders templates of strangers in a process of their own (`renderer`), under limits."""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import subprocess
from collections.abc import Mapping
from threading import Lock
from typing import Any

from g4ir.ui.subprocesses import python

#: characters of a prompt, seconds of processor time for it, bytes of the process
MOST_TEXT, MOST_SECONDS, MOST_MEMORY = 4 << 20, 10.0, 512 << 20


class TemplateError(Exception):
    """A template cannot be rendered, at this line of it if that is known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class Sandbox:
    """The process, started on first use and again after a template that ended it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, source: str, name: str, variables: Mapping[str, Any]) -> str:
        """Return the text of a template. TemplateError if it raises or exceeds a limit, TypeError
        or ValueError for variables that are not JSON."""
        request = {"source": source, "name": name, "variables": variables}
        limits = {"seconds": MOST_SECONDS, "most": MOST_TEXT}
        line = json.dumps(request | limits, allow_nan=False)
        with self._lock:
            answer = json.loads(self._answer(line))
        if "error" in answer:
            raise TemplateError(answer["error"], answer.get("line"))
        return str(answer["text"])

    def _answer(self, request: str) -> str:
        process, answer = self._process or _started(), ""
        self._process = process
        assert process.stdin and process.stdout
        try:
            with contextlib.suppress(BrokenPipeError):  # its end says why
                process.stdin.write(request + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
        finally:  # an interrupt too: the next request must not read this one's answer
            if not answer:
                self.close()
        if process.returncode == -signal.SIGPROF:
            raise TemplateError(f"it takes more than {MOST_SECONDS:g} seconds")
        if not answer:
            raise TemplateError(f"its process ended with status {process.returncode}")
        return answer

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _started() -> subprocess.Popen[str]:
    return subprocess.Popen(
        python("g4ir.chat.renderer", f"serve({MOST_MEMORY})"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process
    )


_SANDBOX = Sandbox()
atexit.register(_SANDBOX.close)
render = _SANDBOX.render
