"""Every use of TensorRT's API, against the signatures of the real bindings.

The recorder's classes write down what is asked of them. All of that must exist in the wheels of
both versions: members, arity, keywords, enum members, kinds of arguments. It says nothing of what a
layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from g4ir.backends.trt import host as log
from g4ir.backends.trt.dry_run import check_small, emulator
from g4ir.backends.trt.host import NEEDED
from g4ir.backends.trt.recorder import Call, recorder
from g4ir.builder.build import prepare
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import load_spec
from tests.recorder.bindings import WHEELS, Bindings, overridden, real_api
from tests.trt.emulated import build, emulated, use

VERSIONS = tuple(WHEELS)
#: every choice of every setting is in one of them
SETTINGS: tuple[dict[str, str], ...] = (
    {"attention": "auto", "experts": "auto", "weights": "baked", "hardware": "exact"},
    {"attention": "explicit"},
    {"attention": "fused", "experts": "gather", "weights": "streamed"},
    {"attention": "plain", "experts": "all", "weights": "baked", "hardware": "same-capability"},
)


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


def recorded(
    version: str, name: str, settings: dict[str, str], folder: Path, quant: str = "none"
) -> list[Call]:
    """What building, loading and running an engine asks: both phases, ragged rows."""
    api = emulator(version)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, emulated(folder, version, api=lambda: api))
        engine = build(folder / "engine", name, settings=settings, quant=quant)
        session = engine.session(2)
        session.prefill([[5, 6, 7], [8, 9, 0]], [3, 2])
        session.decode([4, 5])
        engine.close()
    return distinct(api.trt.calls)


def fits_bindings(calls: list[Call], version: str) -> None:
    wrong = [p for c in calls for p in real_api(version).problems(c)]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


@pytest.mark.parametrize("version", VERSIONS)
def test_towers_and_drafters(version: str) -> None:
    """What the small networks of a dry run ask: pictures, sounds, drafts, verified tokens."""
    api, options = emulator(version), BuildOptions(backend="trt", drafter="default")
    found = check_small(api, prepare(load_spec("tiny-media"), options, dry=True), "f32")
    assert found.keys() == {"logits", "soft", "drafts"}
    calls = distinct(api.trt.calls)
    flags = {c.args[0].name for c in calls if c.member == "clear_flag"}
    assert flags == {"TF32"}, "what is fp32 in the ops is fp32"
    fits_bindings(calls, version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: " ".join(s.values()))
def test_building_loading_and_running(
    version: str, settings: dict[str, str], tmp_path: Path
) -> None:
    refit = settings.get("weights") == "refit"
    name, quant = ("tiny-dense", "int8") if refit else ("tiny-ple", "none")
    calls = recorded(version, name, settings, tmp_path, quant)
    owners = {"Builder", "IBuilderConfig", "IOptimizationProfile", "ITimingCache", "Runtime"}
    owners |= {"ICudaEngine", "IExecutionContext", *(["IDequantizeLayer"] * refit)}
    assert owners <= {c.owner for c in calls}
    fits_bindings(calls, version)


def test_what_is_needed_exists(real: tuple[str, Bindings]) -> None:
    """The real module has what the probe asks for, and the parser."""
    _, bindings = real
    assert all(bindings.has(owner, member) for owner in NEEDED for member in NEEDED[owner])
    for member in ("load_model_proto", "load_initializer", "parse_model_proto", "get_error"):
        assert bindings.has("OnnxParser", member)


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
