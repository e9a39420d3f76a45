"""The names of an engine's files."""

from __future__ import annotations

import shutil
from pathlib import Path

from g4ir.ir.graph import Graph, Program
from g4ir.model.draft import DRAFT

from ..primitives.graph import network_graph, tower_graphs

#: the network of the text model; those of towers and of a drafter's step are called as their graphs
ENGINE = "engine"
#: what the builder said, all of it
LOG = "trt.log"


def files(name: str, rank: int = 0, ranks: int = 1) -> tuple[str, str, str]:
    """Return the files of a network: its plan, what it is fed, and the constants of a plan without
    weights. Of several ranks each has a plan, and constants, of its own."""
    own = f"{name}.rank{rank}of{ranks}" if ranks > 1 else name
    return f"{own}.plan", f"{name}.io.json", f"{own}.constants"


PLAN, TENSORS, CONSTANTS = files(ENGINE)


def keep_log(folder: Path) -> str:
    """Return where the log of a build that fails is kept from now on: beside the engine that it
    would have been, of which `folder` is the unfinished directory `.NAME.building-...`."""
    name = folder.name.removeprefix(".").partition(".building-")[0]
    try:
        return f"TensorRT's log: {shutil.copy(folder / LOG, folder.parent / f'{name}.{LOG}')}"
    except OSError as e:
        return f"TensorRT's log could not be kept ({e.strerror})"


def networks(program: Program) -> dict[str, Graph]:
    """Return the graph of every network of an engine directory, by name."""
    return {ENGINE: network_graph(program), **draft_graph(program), **tower_graphs(program)}


def draft_graph(program: Program) -> dict[str, Graph]:
    """Return the graph of the drafter's step by its name, where there is one."""
    return {DRAFT: program.graphs[DRAFT]} if DRAFT in program.graphs else {}
