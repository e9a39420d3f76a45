"""Refusals as data: what is said of each input in the YAML files beside this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from g4ir.errors import G4Error
from tests.refused import ways
from tests.refused.cases import Case, cases, fits
from tests.refused.ways import Shared, World

FOLDER = Path(__file__).parent


CASES = [case for file in sorted(FOLDER.glob("*.yaml")) for case in cases(file)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    return Shared(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def world(shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, shared, monkeypatch)


def message_of(case: Case, world: World) -> str:
    """What is said of the input, with names for paths."""
    try:
        found = getattr(ways, case.way)(world, **world.fill(case.given))
    except G4Error as e:
        found = str(e)
    assert isinstance(found, str), f"taken: {found!r}"
    return world.strip(found).rstrip("\n")


def test_names_are_used_once() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) > 300


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case: Case, world: World) -> None:
    first, *rest = message_of(case, world).split("\n")
    first.encode()  # printable
    assert fits(case.says, first), f"{first!r}, expected {case.says!r}"
    assert bool(rest) == bool(case.also), rest
    assert all(part in "\n".join(rest) for part in case.also), rest
