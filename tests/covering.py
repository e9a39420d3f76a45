"""Short runs of tests with many parameters.

Of a test marked `covering` the short run keeps few cases, in which every value of every parameter
still appears. Which values meet is then left to `--full`, where all cases run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest

#: the names of a `parametrize`, and which objects they stand for
Value = tuple[Hashable, ...]


def left_out(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of marked tests that the short run can do without."""
    marked = [i for i in items if i.get_closest_marker("covering") and hasattr(i, "callspec")]
    for _, cases in groupby(marked, key=lambda i: i.nodeid.partition("[")[0]):
        yield from _spare(list(cases))


def _spare(cases: Sequence[Any]) -> list[Any]:
    kept = set(covering([set(_values(case)) for case in cases]))
    return [case for i, case in enumerate(cases) if i not in kept]


def _values(case: Any) -> Iterator[Value]:
    """What one `parametrize` gives to several names is one value."""
    given = dict(case.callspec.params)
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
        yield (*names, *(id(given.pop(n)) for n in names))
    yield from ((name, id(value)) for name, value in given.items())


def covering(cases: Sequence[set[Value]]) -> Iterator[int]:
    """Indices of cases that have all values of all cases between them. The next is the one with
    the most new values, the first of several."""
    missing = set[Value]().union(*cases)
    while missing:
        best = max(range(len(cases)), key=lambda i: len(cases[i] & missing))
        missing -= cases[best]
        yield best
