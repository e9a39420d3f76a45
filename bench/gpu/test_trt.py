"""The first contact with the real TensorRT: what does it refuse, what is wrong, how fast is it?

Tests are in the order of what stops all others. `test_tiny` builds an engine of each form that the
backend has, compares it with the reference, and times it; `test_cut` builds one repeat of a
variant's layers at full width (notes say where a form of attention was refused); `test_full` builds
the variants. Logs and tables of builds are copied to DIR, plans are not. In a dry run
tests/trt/fake.py stands for it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import g4ir
from bench.gpu.engines import Scale, decode_cell, prefill_cell, step_times, stepper
from g4ir.backends.trt.host import Host, require_library
from g4ir.backends.trt.interface import PLAN
from g4ir.backends.trt.lowerings import SETTINGS
from g4ir.bench.roof import Meter
from g4ir.builder.load import load_engine
from g4ir.check.logits import verify_engine
from g4ir.engine.engine import Engine
from g4ir.errors import MissingError
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.files import write_file

CARD = Scale(
    backend="trt", variants=("e2b", "26b-a4b", "31b"), contexts=(128, 1024, 8192), chunk=1024
)
DRY = replace(
    CARD,
    device="cpu",
    dtype="float32",
    variants=("tiny-moe",),
    contexts=(16, 32),
    prompts=(24,),
    chunk=16,
    warmup=1,
    steps=2,
)
#: maximum bytes of an engine's file that is copied to --out
SMALL = 4 << 20


@dataclass(frozen=True)
class Form:
    """A tiny engine: its variant, dtype (none: the scale's) and settings, and other options of its
    build."""

    variant: str
    dtype: str = ""
    settings: Mapping[str, str] | None = None
    options: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        given = {**(self.settings or {}), **(self.options or {})}
        return " ".join(
            (self.variant, *self.dtype.split(), *(f"{k}={v}" for k, v in given.items()))
        )


FORMS = (
    Form("tiny-dense"),
    Form("tiny-dense", "float32"),
    *(
        Form("tiny-dense", settings={"attention": kind})
        for kind in SETTINGS["attention"].choices[1:]
    ),
    Form("tiny-moe"),
    Form("tiny-moe", options={"latent_kv": "value"}),
    Form("tiny-ple"),
    Form("tiny-dense", options={"quant": "int8"}),
    *(Form(v, options={"media": "all"}) for v in ("tiny-media", "tiny-unified")),
    Form("tiny-ple", options={"drafter": "default"}),
)


@pytest.fixture(scope="module")
def host(out: Path, pytestconfig: pytest.Config) -> Iterator[Host]:
    """The machine's TensorRT; in a dry run `--backend trt` means its stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        host = Host()
        if pytestconfig.option.dry_run:
            from tests.trt.emulated import emulated, use

            backend = emulated(out)
            use(patch, backend)
            host = backend.host
        yield host


# --- what there is ----------------------------------------------------------------------------


@pytest.mark.limit(120)
def test_machine(measure: Any, host: Host) -> None:
    measure("features", partial(features, host))


def features(host: Host) -> dict[str, Any]:
    """Describe the installed TensorRT. MissingError if it lacks a required feature."""
    api = host.tensorrt()
    host.check_gpu()
    return {"tensorrt": api.version, "gpu": host.gpu()}


# --- small builds -----------------------------------------------------------------------------


@pytest.mark.limit(300)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_tiny(measure: Any, scale: Scale, host: Host, out: Path, form: Form) -> None:
    measure("engine", partial(tiny, out, scale, host, form))


def tiny(out: Path, scale: Scale, host: Host, form: Form) -> dict[str, Any]:
    limits = {"max_batch": 2, "max_seq": 64, "prefill_chunk": 16, "media": "none"}
    options = {**limits, "settings": form.settings, **(form.options or {})}
    path = out / "work" / re.sub(r"[^\w.-]+", "-", form.name)
    made = opened(
        out, scale, host, load_spec(form.variant), path, form.dtype or scale.dtype, **options
    )
    try:
        times, _ = step_times(stepper(made, 1, 32), scale)
        return {"step_ms": np.percentile(times, 50), **about(made, out), **compared(made)}
    finally:
        made.close()


def opened(
    out: Path, scale: Scale, host: Host, spec: Spec, path: Path, dtype: str, **options: Any
) -> Engine:
    """Return an engine, built if it is missing; its small files are kept in --out, also those of a
    build that was refused."""
    if path.exists():
        return load_engine(path)
    try:
        how: dict[str, Any] = {"backend": "trt", "device": scale.device, "random_weights": 0}
        return g4ir.build(spec, path, dtype=dtype, progress=print, **how, **options)
    finally:
        for file in (*path.parent.glob(f"{path.name}*.log"), *path.glob("*")):
            if file.is_file() and file.stat().st_size < SMALL:
                copy = out / "engines" / file.relative_to(path.parent)
                copy.parent.mkdir(parents=True, exist_ok=True)
                write_file(copy, [file.read_bytes()])


def about(engine: Engine, out: Path) -> dict[str, Any]:
    """Return the sizes of an engine's plan and scratch memory in MiB, whether its steps are
    recorded as CUDA graphs, notes, and on a GPU the number of TensorRT's layers."""
    compiled, record = engine.manifest["compiled"], engine.runtime.record
    found = {
        "plan_mb": (engine.path / PLAN).stat().st_size >> 20,
        "scratch_mb": compiled["scratch_bytes"] >> 20,
        "recorded": record is not None and record.record is not None,
        "notes": "; ".join(compiled["notes"]),
    }
    if engine.device == "cpu":
        return found
    trt = require_library().trt
    inspector = engine.runtime.engine.create_engine_inspector()
    layers = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    (out / "engines" / engine.path.name / "layers.json").write_text(json.dumps(layers, indent=1))
    return {**found, "fused_layers": len(layers["Layers"])}


def compared(engine: Engine) -> dict[str, Any]:
    """Compare an engine with the reference on its own weights."""
    report = verify_engine(engine)
    worst = max(p.relative for p in report.positions)
    return {"ok": report.ok, "worst": worst, "difference": report.first_difference or ""}


# --- at full width ----------------------------------------------------------------------------


@pytest.mark.limit(1800)
def test_cut(measure: Any, scale: Scale, host: Host, out: Path, variant: str) -> None:
    """Build and measure one repeat of the layer pattern at full width."""
    spec = load_spec(variant)
    if spec.text.num_kv_shared_layers:
        pytest.skip("one repeat of its layers is no model: they share the keys of others")
    text = replace(spec.text, num_hidden_layers=len(spec.text.pattern))
    spec = replace(spec, name=f"{spec.name}-cut", text=text)
    measure_engine(measure, scale, host, out, spec)


@pytest.mark.limit(5400)
def test_full(measure: Any, scale: Scale, host: Host, out: Path, variant: str) -> None:
    measure_engine(measure, scale, host, out, load_spec(variant))


def measure_engine(measure: Any, scale: Scale, host: Host, out: Path, spec: Spec) -> None:
    """Build an engine, time its steps and prompts, and compare it with the reference."""
    path = out / "work" / spec.name
    limits = {"max_seq": max(scale.contexts) + 2 * scale.steps, "prefill_chunk": scale.chunk}
    if "trtexec" in measure.found:  # the last measurement: the plan is gone
        return
    how = {**limits, "media": "none"}

    def built() -> dict[str, Any]:
        engine = opened(out, scale, host, spec, path, scale.dtype, **how)
        try:
            return about(engine, out)
        finally:
            engine.close()

    if "plan_mb" not in measure("engine", built):
        return
    engine = load_engine(path)
    rates = Meter(scale.device, torch.bfloat16).measure()
    for c in scale.contexts:
        measure(f"decode c{c}", partial(decode_cell, engine, scale, 1, c, rates))
    for n in scale.prompts:
        measure(f"prefill {n}", partial(prefill_cell, engine, n, rates))
    measure("compared", partial(compared, engine))
    engine.close()
    measure("trtexec", partial(trtexec, path, out / "engines" / path.name))
    shutil.rmtree(path)  # as large as the weights, twice


def trtexec(path: Path, out: Path) -> dict[str, Any]:
    """Time the plan's decode steps layer by layer with NVIDIA's trtexec."""
    if shutil.which("trtexec") is None:
        raise MissingError("no trtexec here: it comes with TensorRT's archive or container")
    out.mkdir(parents=True, exist_ok=True)
    words = [f"--loadEngine={path / PLAN}", "--useProfile=0", "--useCudaGraph"]
    words += [
        f"--exportLayerInfo={out / 'layers_0.json'}",
        f"--exportProfile={out / 'profile_0.json'}",
    ]
    done = subprocess.run(["trtexec", *words], capture_output=True, text=True, errors="replace")
    return {"ok": done.returncode == 0, "said": (done.stdout + done.stderr)[-1000:]}
