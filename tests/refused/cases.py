"""The cases of a YAML file of refusals.

A file holds groups of cases: `way`, one of those in ways.py; what all its cases share; and `cases`
by name. `says` is the first line, whole: `{here}` is the folder of the case, and `[...]` any text
that is not ours, such as a library's. `also` are parts of the lines behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cases import LOADER


@dataclass(frozen=True)
class Case:
    """One input."""

    name: str
    way: str
    given: dict[str, Any]
    says: str
    also: tuple[str, ...] = ()


def cases(file: Path) -> Iterator[Case]:
    for group in yaml.load_all(file.read_text(), LOADER):
        way, own = group.pop("way"), group.pop("cases")
        for name, case in own.items():
            given = {**group, **case}
            says, also = given.pop("says"), tuple(given.pop("also", ()))
            yield Case(f"{file.stem}: {name}", way, given, says, also)


def fits(says: str, line: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, says.split("[...]"))), line) is not None


def put(value: Any, path: str, new: Any) -> None:
    """Set what lies under keys with slashes between them; `...` takes it away."""
    *steps, last = path.split("/")
    for step in steps:
        value = value[step]
    if new == "...":
        del value[last]
    else:
        value[last] = new
