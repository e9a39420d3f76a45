"""Every use of TensorRT's API, against the signatures of the real bindings.

The recorder's classes write down what is asked of them. All of that must exist in the wheels of
both versions: members, arity, keywords, enum members, kinds of arguments. It says nothing of what a
layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from g4ir.backends.base import checked_settings
from g4ir.backends.primitives.graph import network_graph
from g4ir.backends.trt import log
from g4ir.backends.trt.build import write_network
from g4ir.backends.trt.dry_run import one_thread
from g4ir.backends.trt.probe import FEATURES, NEEDED, Api, probe
from g4ir.backends.trt.recorder import Call, recorder
from g4ir.ir.graph import split_prologue
from g4ir.plan.limits import Limits
from tests.configs import SMALL, spec_called
from tests.runner import built_program
from tests.trt.bindings import WHEELS, Bindings, overridden, parse_signature, real_api
from tests.trt.emulated import build, emulated, use

VERSIONS = tuple(WHEELS)
LIMITS = Limits(max_batch=3, max_seq=96, prefill_chunk=12)
#: every choice of every setting is in one of them
SETTINGS: tuple[dict[str, str], ...] = (
    {"attention": "explicit", "experts": "auto", "weights": "baked", "hardware": "exact"},
    {"attention": "fused", "experts": "gather", "weights": "streamed"},
    {"attention": "explicit", "experts": "all", "weights": "refit"},
    {"attention": "plugin", "experts": "plugin", "hardware": "same-capability"},
)


@pytest.fixture(autouse=True, scope="module")
def thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=VERSIONS)
def real(request: pytest.FixtureRequest) -> tuple[str, Bindings]:
    return request.param, real_api(request.param)


def distinct(calls: Iterable[Call]) -> list[Call]:
    """One of each use: arguments count by their kinds, enum members by themselves."""
    kept: dict[Any, Call] = {}
    for c in calls:
        named = tuple((k, _kind(v)) for k, v in (c.kwargs or {}).items())
        kept.setdefault((c.owner, c.member, c.kind, tuple(map(_kind, c.args)), named), c)
    return list(kept.values())


def _kind(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value), tuple(dict.fromkeys(map(_kind, value)))
    return (type(value), getattr(value, "name", "")) if hasattr(value, "__int__") else type(value)


def written(version: str, name: str, settings: dict[str, str]) -> list[Call]:
    """What writing the network asks; it is one for both phases."""
    api = probe(recorder(version))
    backend = emulated(Path(), version)
    program = built_program(spec_called(name), dtype="bf16")
    main = program.map(lambda g: split_prologue(g)[1])
    chosen = checked_settings(backend, settings)
    write_network(api, network_graph(main), LIMITS, None, chosen)
    return distinct(api.trt.calls)


def recorded(version: str, name: str, settings: dict[str, str], folder: Path) -> list[Call]:
    """What building, loading and running an engine asks: both phases, ragged rows."""
    api = probe(recorder(version))
    with pytest.MonkeyPatch.context() as patch:
        use(patch, emulated(folder, version, api=lambda: api))
        engine = build(folder / "engine", name, settings=settings)
        session = engine.session(2)
        session.prefill([[5, 6, 7], [8, 9, 0]], [3, 2])
        session.decode([4, 5])
        engine.close()
    return distinct(api.trt.calls)


def fits_bindings(calls: list[Call], version: str) -> None:
    wrong = [p for c in calls for p in real_api(version).problems(c)]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def alternating(names: Iterable[str]) -> list[Any]:
    """Every name with every setting; both versions with each only in a full run."""
    cases = []
    for i, name in enumerate(names):
        for j, settings in enumerate(SETTINGS):
            for k, version in enumerate(VERSIONS):
                marks = [pytest.mark.full] if (i + j + k) % 2 else []
                label = "-".join((name, version, *settings.values()))
                cases.append(pytest.param(name, version, settings, id=label, marks=marks))
    return cases


@pytest.mark.parametrize(("name", "version", "settings"), alternating(SMALL))
def test_networks_of_all_variants(name: str, version: str, settings: dict[str, str]) -> None:
    calls = written(version, name, settings)
    assert {"INetworkDefinition", "ITensor", "IShuffleLayer"} <= {c.owner for c in calls}
    fits_bindings(calls, version)


@pytest.mark.parametrize(("name", "version", "settings"), alternating(["tiny-ple"]))
def test_building_loading_and_running(
    name: str, version: str, settings: dict[str, str], tmp_path: Path
) -> None:
    calls = recorded(version, name, settings, tmp_path)
    owners = {
        "Builder",
        "IBuilderConfig",
        "IOptimizationProfile",
        "ITimingCache",
        "Runtime",
        "ICudaEngine",
        "IExecutionContext",
    }
    assert owners <= {c.owner for c in calls}
    fits_bindings(calls, version)


def test_the_recorder_has_nothing_of_its_own(real: tuple[str, Bindings]) -> None:
    """Classes, enums and their values, module by module."""
    version, bindings = real
    module = recorder(version)
    names = {n for n in vars(module) if not n.startswith("_") and n not in ("calls", "plugin")}
    assert names <= set(bindings.dump["names"])
    for name in names:
        members = getattr(getattr(module, name), "__members__", {})
        real_values = bindings.values(name) if members else {}
        assert {m: int(v) for m, v in members.items()}.items() <= real_values.items(), name
    severities = module.ILogger.Severity.__members__
    assert {m: int(v) for m, v in severities.items()} == bindings.values("ILogger.Severity")


def test_difference_table(real: tuple[str, Bindings]) -> None:
    """The probe sees in the recorder what it would see in the real module."""
    version, bindings = real
    api = Api(recorder(version), version)
    for name, (owner, member) in FEATURES.items():
        assert api.has(name) == bindings.has(owner, member), name
    assert all(bindings.has(owner, member) for owner, member in NEEDED)
    assert api.has("weak typing") == version.startswith("10.")


def test_what_tensorrt_calls_back(real: tuple[str, Bindings]) -> None:
    """Parameters of our logger and monitor are those of the real classes."""
    version, bindings = real
    module = recorder(version)
    for owner, ours in (
        ("ILogger", log.logger(module)),
        ("IProgressMonitor", log.progress_monitor(module, print)),
    ):
        assert not [*overridden(bindings, owner, type(ours))]
        required = bindings.dump["classes"][owner]["members"].keys() - {"__init__"}
        named = {m for m in required if bindings.signatures(owner, m)}
        assert named <= vars(type(ours)).keys()
    # The docstring names C++'s pointer and size. The binding hands over one object of type bytes
    # and takes an int back: NVIDIA/TensorRT, python/src/infer/pyCore.cpp, PyStreamWriter.
    assert bindings.signatures("IStreamWriter", "write")
    kept = BytesIO()
    assert log.stream_writer(module, kept).write(b"plan") == 4 and kept.getvalue() == b"plan"


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


def test_versions_differ() -> None:
    """A use that only one of the versions has is found with the other."""
    call = Call("INetworkDefinition", "add_attention_v2", "get")
    assert not real_api("10.16.1").has(call.owner, call.member)
    assert real_api("11.4.0").has(call.owner, call.member)


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


def test_probe_of_what_is_no_tensorrt() -> None:
    assert not Api(SimpleNamespace(), "0").has("causal kind")
