"""Processes of ours beside this one."""

from __future__ import annotations

import sys


def python(module: str, call: str) -> list[str]:
    """Return the command of a process that makes a call to a function of a module, such as
    `serve(3)`. Modules are found where this process finds them: `python -m` would look in the
    current directory first, where files of strangers may lie."""
    code = f"import sys; sys.path[:] = {sys.path!r}; import {module} as module; module.{call}"
    return [sys.executable, "-c", code]
