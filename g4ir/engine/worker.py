"""Follows the first rank of an engine: makes the calls that it tells (leader.py), until it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.parallel.group import Group
from g4ir.ui.progress import no_progress

from .artefact import open_artefact
from .leader import LOAD, beside, opened
from .load import open_runtime
from .trace import shown, watch_slots

if TYPE_CHECKING:
    import torch

#: calls to a runtime, and to caches, that are made as they are told
CALLS = frozenset({"new_state", "close", "zero", "clear", "copy", "kept", "put"})
#: what ends the first rank, which then ends the others: a server answers what it has begun
NOT_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def follow(group: Group) -> None:
    """Do what the first rank tells, until it says that all is done. RankError where a rank ends
    before."""
    followed = _Followed(group)
    with _undisturbed():
        while followed.next():
            pass


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A context in which signals to all processes of a terminal or of torchrun are the leader's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.signal(s, signal.SIG_IGN) for s in NOT_OURS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Followed:
    """Keeps by number all that this rank has in common with the first."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.things: dict[int, Any] = {}

    def next(self) -> bool:
        """Make the next call; whether there was one."""
        call, tensors = self.group.heard()
        if not call:
            return False
        of, name, args, makes, gone = call
        for number in gone:
            self.things.pop(number, None)
        given = [self.things[a["thing"]] if _is_thing(a) else a for a in args]
        made = self._call(None if of is None else self.things[of], name, given, tensors)
        if makes is not None:
            self.things[makes] = made
        return True

    def _call(self, own: Any, name: str, args: list[Any], tensors: dict[str, torch.Tensor]) -> Any:
        if name == LOAD:
            return self._load(*args)
        if name in ("run", "run_watched"):
            placed = {name: t.to(own.device) for name, t in tensors.items()}
            watch = (True, shown(self.group)) if name == "run_watched" else ()
            own.run(args[0], placed, *args[1:], *watch)  # what comes out is the first rank's to use
            return None
        if name == "watch_held":
            cache, *held = args
            return watch_slots(own, cache, range(*held), shown(self.group))
        if name == "interpreter":
            return beside(args[0], own, self.group)
        assert name in CALLS, name
        return getattr(own, name)(*args)

    def _load(self, path: str, options: Mapping[str, Any]) -> Any:
        """Return this rank's runtime of an engine; None where it cannot be opened, of which the
        first rank is told."""

        def opens() -> tuple[str, Any]:
            found = open_artefact(Path(path), options["check_weights"], self.group.rank)
            how = options["cuda_graph"], options["trust"], no_progress, self.group
            return found.manifest.digest, open_runtime(found, *how)

        return opened(self.group, opens)[0]


def _is_thing(value: Any) -> bool:
    return isinstance(value, dict) and [*value] == ["thing"]
