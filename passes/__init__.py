"""The passes: one module, one function of the same name, `Graph -> Graph`.

A pass takes a second argument, `note(value, reason)`, to which it tells what it did and why it
left a candidate alone; `g4ir show --why PASS` prints that.
"""

from __future__ import annotations

from collections.abc import Callable

Note = Callable[[str, str], None]


def ignore(value: str, reason: str) -> None:
    """The note taker of somebody who does not ask."""
