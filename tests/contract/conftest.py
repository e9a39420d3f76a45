"""Fixtures of the contract.

A module `test_FLOW.py` names its flow and takes the tests of the three modules that hold them, so
that engines built for a flow stay with its tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from g4ir.engine.engine import Engine

pytest.register_assert_rewrite(
    *(f"tests.contract.{m}" for m in ("session", "generation", "directory"))
)
from tests.contract.flows import FLOWS, Flow  # noqa: E402


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whoever can choose tokens does, and each variant and dtype that the flow has time for."""
    flow = FLOWS[metafunc.module.FLOW]
    if "any_engine" in metafunc.fixturenames:
        marks = pytest.mark.covering if flow.covering else ()
        specs = [pytest.param(name, marks=marks) for name in flow.specs]
        metafunc.parametrize("any_engine", specs, indirect=True)
    if "half" in metafunc.fixturenames:
        marks = pytest.mark.full if flow.slow else ()
        metafunc.parametrize("half", [pytest.param(flow.half, marks=marks, id=flow.half[0])])
    if "chooser" in metafunc.fixturenames:
        choosers = flow.choosers
        metafunc.parametrize("chooser", choosers.values(), ids=choosers.keys(), indirect=True)


@pytest.fixture(scope="module")
def flow(request: pytest.FixtureRequest) -> Flow:
    return FLOWS[request.module.FLOW]


@pytest.fixture
def engine(flow: Flow, engines: Any) -> Engine:
    """Of up to three rows."""
    return engines(flow.backend, "tiny-ple")


@pytest.fixture
def single(flow: Flow, engines: Any) -> Engine:
    """Of one row."""
    return engines(flow.backend, "tiny-moe")


@pytest.fixture
def every(engine: Engine, single: Engine) -> Engine:
    """With the logits of every token."""
    return next(e for e in (engine, single) if e.all_logits)


@pytest.fixture
def last(engine: Engine, single: Engine) -> Engine:
    """With the logits of the last token."""
    return next(e for e in (engine, single) if not e.all_logits)


@pytest.fixture
def any_engine(request: pytest.FixtureRequest, flow: Flow, engines: Any) -> Engine:
    """For tests of one row."""
    return engines(flow.backend, request.param)


@pytest.fixture
def chooser(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, flow: Flow, engines: Any
) -> list[Any] | None:
    """Turns a way to choose tokens on for the engines of a test; the steps prepared for it."""
    used = {"any_engine", "engine"} & set(request.fixturenames)
    return request.param(request.getfixturevalue(min(used)), monkeypatch)


@pytest.fixture(scope="module")
def fresh(engines: Any) -> Any:
    """Logits after tokens i64[T], by a new session of the reference backend."""
    seen: dict[Any, torch.Tensor] = {}

    def run(tokens: torch.Tensor, spec: str = "tiny-ple") -> torch.Tensor:
        key = (spec, *tokens.tolist())
        if key not in seen:
            seen[key] = engines("reference", spec).session().prefill(tokens[None])[0]
        return seen[key]

    return run
