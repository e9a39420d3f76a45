"""Functions that tests watch as they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def spy(patch: pytest.MonkeyPatch, owner: Any, name: str, see: Callable[..., Any]) -> None:
    """Let `see` have the arguments of each call of `owner.name` before the call is made."""
    call = getattr(owner, name)

    def watched(*args: Any, **named: Any) -> Any:
        see(*args, **named)
        return call(*args, **named)

    patch.setattr(owner, name, watched)
