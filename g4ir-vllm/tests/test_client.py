"""The tests of clients of `g4ir serve`, over vLLM's server (see differences.py)."""

from differences import DIFFERENCES

from tests.serve.test_client import *  # noqa: F403


def test_differences_are_of_these_tests() -> None:
    """DIFFERENCES lists existing tests only."""
    assert {name.partition("[")[0] for name in DIFFERENCES} <= {*globals()}
