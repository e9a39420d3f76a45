"""Which cases a short run keeps."""

from __future__ import annotations

from itertools import product

from tests.covering import covering


def test_every_value_appears() -> None:
    """As few cases as the longest parameter has values, and no two parameters in step."""
    cases = [{("a", a), ("b", b), ("c", c)} for a, b, c in product(range(2), range(3), range(7))]
    kept = [cases[i] for i in covering(cases)]
    assert len(kept) == 7
    assert set[tuple[str, int]]().union(*kept) == set().union(*cases)


def test_cases_of_their_own_stay() -> None:
    """Values that come together, as in a list of pairs, are cases each."""
    assert list(covering([{("a", i), ("b", i)} for i in range(4)])) == [0, 1, 2, 3]
    assert not [*covering([])]
