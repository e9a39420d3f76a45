"""Python's modules that Linux and macOS have and Windows lacks: import them from here.

MissingError elsewhere, with what to do.
"""

from __future__ import annotations

from g4ir.errors import MissingError

try:
    import fcntl as fcntl
    import resource as resource
except ModuleNotFoundError as e:
    raise MissingError(
        f"g4ir runs on Linux (this Python has no module {e.name}): on Windows use WSL 2 "
        "(`wsl --install`) or Docker (docker/cpu.Dockerfile)"
    ) from e
