"""Command lines of Python subprocesses."""

from __future__ import annotations

import sys


def python(module: str, call: str) -> list[str]:
    """Return the command line of a process that makes a call of a module, such as `serve(3)`.

    Modules are found on this process's path: `python -m` would look in the current directory first,
    which may contain files of other users.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; import {module} as module; module.{call}"
    return [sys.executable, "-c", code]
