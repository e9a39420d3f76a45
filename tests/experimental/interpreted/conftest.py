"""Tests of the plugins' kernels under Triton's interpreter.

They need TRITON_INTERPRET=1 before triton is imported, so tests/test_interpreted.py runs them in a
process of its own; elsewhere they are not collected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def kernels_are_interpreted() -> Iterator[None]:
    from g4ir.backends.torch_compile.kernels.interpreter import interpreted
    from tests.interpreted.quick import quick

    with interpreted(), quick():
        yield
