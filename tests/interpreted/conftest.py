"""Tests of the Triton kernels under Triton's interpreter.

They need TRITON_INTERPRET=1 before triton is imported, so tests/test_interpreted.py runs them in a
process of its own; elsewhere they are not collected. `--interleaved SEED --poison` runs all of them
with the programs of each grid in another order (see orders.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of orders: known where this folder is named on the command line."""
    parser.addoption("--interleaved", metavar="SEED", type=int, help="order of programs in a grid")
    parser.addoption("--poison", action="store_true", help="new tensors hold NaN")


@pytest.fixture(autouse=True)
def kernels_are_interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    from .language import interpreted
    from .orders import interleaved, poisoned
    from .quick import quick

    given = request.config.getoption
    seed = given("interleaved", None)
    with (
        interpreted(),
        quick(),
        nullcontext() if seed is None else interleaved(seed),
        poisoned() if given("poison", False) else nullcontext(),
    ):
        yield
