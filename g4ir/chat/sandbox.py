"""Renders templates of strangers in a process of their own, under limits.

In it jinja2's immutable sandbox keeps a template from objects and files, and the system ends one
that takes too much processor time or memory, whatever it does meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from threading import Lock
from typing import Any

from g4ir.ui.posix import resource
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
        request = (source, name, variables, MOST_TEXT, MOST_SECONDS)
        line = json.dumps(request, allow_nan=False)
        with self._lock:
            answer = json.loads(self._answer(line) or self._answer(line, last=True))
        if "error" in answer:
            raise TemplateError(answer["error"], answer.get("line"))
        return str(answer["text"])

    def _answer(self, request: str, last: bool = False) -> str:
        """Return the process's answer; "" if it was killed, by whoever was short of memory say. The
        `last` try, in a new process, raises TemplateError then."""
        if self._process is None:
            self._process = subprocess.Popen(
                python("g4ir.chat.sandbox", f"serve({MOST_MEMORY})"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for this process
            )
        process, answer = self._process, ""
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
        if not answer and last:
            raise TemplateError(f"its process ended with status {process.returncode}")
        return answer

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_SANDBOX = Sandbox()
atexit.register(_SANDBOX.close)
render = _SANDBOX.render


def serve(memory: int) -> None:
    """Answer each line of stdin with a line, in a process of at most so many bytes. It ends by
    SIGPROF after the seconds of processor time that a line allows."""
    compiled = _compiler()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin:
        *request, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _rendered(compiled, *request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _rendered(
    compiled: Callable[[str, str], Any], source: str, name: str, variables: Any, most: int
) -> dict[str, Any]:
    """Return a `text` of at most so many characters, or its `error` and `line`."""
    pieces, length = list[str](), 0
    try:
        for piece in compiled(source, name).generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                return {"error": f"it prints more than {most} characters"}
        return {"text": "".join(pieces)}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as e:  # a template raises whatever its expressions do
        return {"error": str(e)[:400] or type(e).__name__, "line": getattr(e, "lineno", None)}


def _compiler() -> Callable[[str, str], Any]:
    """Return what compiles the source of a template under a name, with what transformers gives to
    templates."""
    from jinja2 import Template, TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`, with which training templates mark answers: its
        body, in a scope of its own."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: Any) -> Any:
        raise TemplateError(str(message))

    extensions = ["jinja2.ext.loopcontrols", Generation]
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    made.filters["tojson"] = _json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    @lru_cache(maxsize=8)
    def compiled(source: str, name: str) -> Template:
        code = made.compile(source, filename=name)
        return Template.from_code(made, code, made.make_globals(None))

    return compiled


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML that jinja2's own filter writes. The parameters, in
    this order, are those of transformers' filter: templates give them by place too."""
    form: Any = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)
