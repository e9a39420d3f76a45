"""Worker loop of ranks above 0: execute the calls that rank 0 sends (engine/ranks.py) until it
closes the group."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from g4ir.artefact.directory import open_artefact
from g4ir.engine.ranks import LOAD, opened, perform
from g4ir.parallel.group import Group
from g4ir.ui.console import ENDING, handled
from g4ir.ui.progress import no_progress

from .load import open_runtime

#: signals that workers ignore: rank 0 handles them and then ends the workers, after a server has
#: finished its running requests
NOT_OURS = (signal.SIGINT, *ENDING)


def follow(group: Group) -> None:
    """Execute the calls of rank 0 until it closes the group. RankError if a rank ends before
    that."""
    things: dict[int, Any] = {}  # runtimes and states by id
    with handled(dict.fromkeys(NOT_OURS, signal.SIG_IGN)):
        while True:
            call, feeds = group.receive()
            if not call:
                return
            of, name, args, makes, dropped = call
            for number in dropped:
                things.pop(number, None)
            if name == LOAD:
                result = _load(group, *args)
            else:
                call_args = [things[a["number"]] if isinstance(a, dict) else a for a in args]
                result = perform(group, things[of], name, call_args, feeds)
            if makes is not None:
                things[makes] = result


def _load(group: Group, path: str, options: dict[str, Any]) -> Any:
    def opens() -> tuple[str, Any]:
        artefact = open_artefact(Path(path), options["check_weights"], group.rank)
        how = {name: value for name, value in options.items() if name != "check_weights"}
        return artefact.manifest.digest, open_runtime(artefact, no_progress, group, **how)

    return opened(group, opens)[0]
