"""The recorder against the signatures of the real bindings, and the check of uses itself."""

from __future__ import annotations

import pytest

from g4ir.backends.trt.recorder import Call, recorder
from tests.recorder.bindings import WHEELS, Bindings, overridden, parse_signature, real_api


@pytest.fixture(scope="module", params=tuple(WHEELS))
def real(request: pytest.FixtureRequest) -> tuple[str, Bindings]:
    return request.param, real_api(request.param)


def test_the_recorder_has_nothing_of_its_own(real: tuple[str, Bindings]) -> None:
    """Classes, enums and their values, module by module."""
    version, bindings = real
    module = recorder(version)
    names = {n for n in vars(module) if not n.startswith("_") and n != "calls"}
    assert names <= set(bindings.dump["names"])
    for name in names:
        members = getattr(getattr(module, name), "__members__", {})
        real_values = bindings.values(name) if members else {}
        assert {m: int(v) for m, v in members.items()}.items() <= real_values.items(), name
    severities = module.ILogger.Severity.__members__
    assert {m: int(v) for m, v in severities.items()} == bindings.values("ILogger.Severity")


# --- the check itself -------------------------------------------------------------------------

WRONG = {
    "no class": Call("INetwork", "add_cast", "call"),
    "no method": Call("INetworkDefinition", "add_casting", "call"),
    "too few": Call("INetworkDefinition", "get_layer", "call"),
    "too many": Call("INetworkDefinition", "get_layer", "call", (1, 2)),
    "keyword": Call("INetworkDefinition", "get_layer", "call", (), {"which": 1}),
    "kind": Call("INetworkDefinition", "get_layer", "call", ("first",)),
    "float": Call("INetworkDefinition", "get_layer", "call", (1.0,)),
    "bool for int": Call("INetworkDefinition", "get_layer", "call", (True,)),
    "enum": Call("IBuilderConfig", "set_flag", "call", (3,)),
    "read-only": Call("INetworkDefinition", "num_layers", "set", (3,)),
    "no property": Call("INetworkDefinition", "get_layer", "get"),
    "set to another kind": Call("ILayer", "name", "set", (3,)),
    "property called": Call("INetworkDefinition", "num_layers", "call"),
    "none": Call("INetworkDefinition", "mark_output", "call", (None,)),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=list(WRONG))
def test_wrong_uses_are_found(call: Call, real: tuple[str, Bindings]) -> None:
    assert [*real[1].problems(call)]


def test_signatures_are_parsed() -> None:
    """Brackets, defaults and overloads."""
    text = "2. f(self: a.B, x: list[tuple[int, str]] = [1, 2], y: C = <D.E: 0>, z: F = None) -> G"
    assert [(p.name, p.kind, p.optional) for p in parse_signature(text) or ()] == [
        ("x", "list[tuple[int, str]]", True),
        ("y", "C", True),
        ("z", "F | None", True),
    ]
    assert parse_signature("f(*args, **kwargs)") is None
    assert parse_signature("Overloaded function.") is None


def test_derived_parameters_are_compared(real: tuple[str, Bindings]) -> None:
    """Another name of a parameter is found: TensorRT may pass it by keyword."""
    derived = type("Log", (), {"log": lambda self, severity, message: None})
    assert [*overridden(real[1], "ILogger", derived)]
