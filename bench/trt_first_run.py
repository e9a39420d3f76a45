"""The first contact with the real TensorRT: what it refuses, what it gets wrong, how fast it is.

    python bench/trt_first_run.py --out DIR [--budget MIN] [--variants e2b,...] [--carry DIR]

Stages, in the order of what stops all others (`--list`; bench/stages.py says what is kept of what
crashes or hangs, and where):

`machine`: what is installed. `names`: everything that the backend asks of TensorRT, as the recorder
wrote it down, against the signatures and the enums of the module at hand; what differs is listed.
`probe`: whether kernels of plugins get more than 48 KiB of shared memory. `tiny`: an engine of each
form that the backend has, built, compared with the reference, and timed. `attention`: each kind of
attention of a variant alone, at full width, in each form and for several lengths. `cut`: one repeat
of a variant's layers at full width, with the ways to keep weights. `full`: the variants.

Logs and tables of builds are copied to DIR, plans are not; the cache of timed kernels is, and
--carry takes it back. With --dry-run the recorder stands for TensorRT, and variants are tiny.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import EnumMeta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from stages import (
    SAID,
    Cells,
    Kind,
    Script,
    Stage,
    common_parser,
    copy_file,
    copy_folder,
    drive,
    parsed,
    write_json,
)
from steps import Scale, decode_cell, prefill_cell, step_times, stepper

import g4ir
from g4ir.backends.primitives.graph import network_graph
from g4ir.backends.trt import build as building
from g4ir.backends.trt import dry_run, trial
from g4ir.backends.trt.files import ENGINE, files
from g4ir.backends.trt.forms import ATTENTION, WEIGHTS, shared_memory
from g4ir.backends.trt.host import Host
from g4ir.backends.trt.log import logger
from g4ir.backends.trt.probe import COMPARED, FEATURES, require_tensorrt
from g4ir.backends.trt.recorder import Call
from g4ir.bench.roof import Meter
from g4ir.bench.stats import percentile
from g4ir.bench.system import environment
from g4ir.check.logits import verify_engine
from g4ir.engine.build import prepare
from g4ir.engine.engine import Engine
from g4ir.engine.load import load_engine
from g4ir.errors import MissingError
from g4ir.ir.graph import Graph
from g4ir.plan.engine_limits import Limits
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.memory import free_memory
from g4ir.ui.paths import private

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # the tests know how the bindings' signatures are read

CARD = Scale(
    *("cuda", "trt", "bfloat16", "", ("e2b", "26b-a4b", "31b")),
    *((128, 1024, 8192), (1024, 8192), 1024, 10, 64, 0, 0),
)
DRY = Scale(*("cpu", "trt", "float32", "", ("tiny-moe",)), *((16, 32), (24,), 16, 1, 2, 0, 0))
#: folder of --out for the cache of timed kernels; files of engines that are kept have fewer bytes
TIMINGS, SMALL = "timings", 4 << 20
#: variants whose networks together ask for all that the backend uses
ASKING = ("tiny-dense", "tiny-moe", "tiny-ple", "tiny-media")
#: values of settings that together are all of them
SETTINGS: tuple[dict[str, str], ...] = (
    {},
    {"attention": "plain", "experts": "all", "norms": "layers", "weights": "refit"},
    {"attention": "fused", "experts": "gather", "weights": "streamed"},
    {"attention": "plugin", "experts": "plugin", "norms": "plugin", "hardware": "same-capability"},
)


@dataclass(frozen=True)
class Form:
    """A tiny engine: its variant, dtype and settings, and other options of its build."""

    variant: str
    dtype: str = "bfloat16"
    settings: Mapping[str, str] | None = None
    options: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        given = {**(self.settings or {}), **(self.options or {})}
        return " ".join((self.variant, self.dtype, *(f"{k}={v}" for k, v in given.items())))


FORMS = (
    Form("tiny-dense"),
    Form("tiny-dense", "float32"),
    Form("tiny-dense", "float16"),
    *(Form("tiny-dense", settings={"attention": a}) for a in ATTENTION if a != "explicit"),
    *(Form("tiny-moe", settings={"experts": e}) for e in ("plugin", "gather", "all")),
    *(Form("tiny-moe", settings={"norms": n}) for n in ("plugin", "layers")),
    *(Form("tiny-moe", options={"latent_kv": form}) for form in ("value", "raw")),
    Form("tiny-ple"),
    Form("tiny-dense", options={"quant": "int8"}),
    *(Form("tiny-dense", settings={"weights": w}) for w in ("refit", "streamed")),
    Form("tiny-dense", settings={"hardware": "same-capability"}),
    *(Form(v, options={"media": "all"}) for v in ("tiny-media", "tiny-unified")),
    Form("tiny-ple", options={"drafter": "default"}),
)


def scale_of(args: argparse.Namespace) -> Scale:
    """Return the scale of a run; in a dry one the recorder is what `--backend trt` means from
    here on, on a CPU."""
    if not args.dry_run:
        return CARD
    import pytest

    from tests.trt.emulated import emulated, use

    use(pytest.MonkeyPatch(), emulated(args.out))
    return DRY


def host_of(args: argparse.Namespace) -> Host:
    if not args.dry_run:
        return Host()
    from tests.trt.emulated import emulated

    return emulated(args.out).host


# --- what there is ----------------------------------------------------------------------------


def machine(cells: Cells, args: argparse.Namespace, _: Mapping[str, Any]) -> None:
    for name in ("tensorrt", "triton"):
        cells.cell(name, partial(module_cell, name))
    cells.cell("features", partial(features_cell, host_of(args)))
    cells.cell("room", partial(room_cell, args))


def module_cell(name: str) -> dict[str, Any]:
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as e:
        raise MissingError(f"{name}: {e}") from e
    return {"version": module.__version__, "file": module.__file__}


def features_cell(host: Host) -> dict[str, Any]:
    """Describe the TensorRT at hand. MissingError where it lacks what every build needs."""
    api = host.tensorrt()
    host.check_gpu()
    return {"tensorrt": api.version, "gpu": host.gpu(), **{f: api.has(f) for f in FEATURES}}


def room_cell(args: argparse.Namespace) -> dict[str, Any]:
    device = 0 if args.dry_run else torch.cuda.mem_get_info()[0]
    free = {"device": device, "host": free_memory(), "disk": shutil.disk_usage(args.out).free}
    return {f"{name}_gb": size >> 30 for name, size in free.items()}


# --- names and signatures ---------------------------------------------------------------------


def names(cells: Cells, args: argparse.Namespace, _: Mapping[str, Any]) -> None:
    version, problems, values = asked_of(args)
    for variant in ASKING:
        for settings in SETTINGS if variant == "tiny-moe" else SETTINGS[:1]:
            name = " ".join((variant, *settings.values()))
            cells.cell(name, partial(calls_cell, variant, settings, version, problems))
    cells.cell("enums", partial(enums_cell, version, values))


def asked_of(
    args: argparse.Namespace,
) -> tuple[str, Callable[[Call], Iterable[str]], Callable[[str], Mapping[str, int]]]:
    """Return the recorder's version that is nearest to the TensorRT at hand; what lists the
    problems of a use of it; and what lists the values of an enum."""
    if not args.dry_run:
        from tests.recorder.bindings import read_api

        found = read_api("tensorrt")
        older = require_tensorrt().version.startswith("10.")
        return COMPARED[not older], found.problems, found.values
    trt = dry_run.emulator().trt

    def problems(call: Call) -> Iterator[str]:
        if not hasattr(getattr(trt, call.owner, None), call.member):
            yield f"{call.owner}.{call.member}: there is no such member"

    return COMPARED[-1], problems, lambda enum: _values(getattr(trt, enum))


def calls_cell(
    variant: str,
    settings: Mapping[str, str],
    version: str,
    problems: Callable[[Call], Iterable[str]],
) -> dict[str, Any]:
    """Have the recorder build, load and run the variant in small, and look at what it was asked."""
    api = dry_run.emulator(version)
    options = BuildOptions(backend="trt", settings=dict(settings), random_weights=0)
    dry_run.check_small(api, prepare(load_spec(variant), options, dry=True), "f32")
    calls = api.trt.calls
    wrong = list(dict.fromkeys(p for c in calls for p in problems(c)))
    return {"calls": len(calls), "problems": wrong, "ok": not wrong}


def enums_cell(version: str, values: Callable[[str], Mapping[str, int]]) -> dict[str, Any]:
    """List members of enums that are missing, or have another value than the recorder says."""
    trt, wrong = dry_run.emulator(version).trt, []
    enums = [n for n in dir(trt) if isinstance(getattr(trt, n), EnumMeta)]
    for name in enums:
        own, real = _values(getattr(trt, name)), values(name)
        differ = (k for k, v in own.items() if real.get(k) != v)
        wrong += [f"{name}.{k} is {real.get(k)}, not {own[k]}" for k in differ]
    return {"enums": len(enums), "problems": wrong, "ok": not wrong}


def _values(enum: Any) -> dict[str, int]:
    return {m.name: int(m) for m in enum}


# --- small builds -----------------------------------------------------------------------------


def probe(cells: Cells, args: argparse.Namespace, _: Mapping[str, Any]) -> None:
    def shared() -> dict[str, Any]:
        return {"bytes": shared_memory(host_of(args).tensorrt(), scale_of(args).device)}

    cells.cell("shared memory", shared)


def tiny(cells: Cells, args: argparse.Namespace, _: Mapping[str, Any]) -> None:
    scale = scale_of(args)
    for form in FORMS:
        cells.cell(form.name, partial(tiny_cell, args, scale, form))


def tiny_cell(args: argparse.Namespace, scale: Scale, form: Form) -> dict[str, Any]:
    limits = {"max_batch": 2, "max_seq": 64, "prefill_chunk": 16, "media": "none"}
    options = {**limits, "settings": form.settings, **(form.options or {})}
    path = args.work / re.sub(r"[^\w.-]+", "-", form.name)
    made = opened(args, load_spec(form.variant), path, form.dtype, **options)
    try:
        times, _ = step_times(stepper(made, 1, 32), scale)
        steps = {"step_ms": percentile(times, 50), **told(made, args.out)}
        return {**steps, **compared(made)}
    finally:
        made.close()


def opened(args: argparse.Namespace, spec: Spec, path: Path, dtype: str, **options: Any) -> Engine:
    """Return an engine, built unless it is there; what is small of it is kept in --out, also of
    one that is refused."""
    if path.exists():
        return load_engine(path)
    device, timings = scale_of(args).device, host_of(args).timings()
    try:
        how: dict[str, Any] = {"backend": "trt", "device": device, "random_weights": 0}
        return g4ir.build(spec, path, dtype=dtype, progress=print, **how, **options)
    finally:
        for log in path.parent.glob(f"{path.name}*.log"):
            copy_file(log, args.out / "engines" / log.name)
        for file in path.glob("*"):
            if file.is_file() and file.stat().st_size < SMALL:
                copy_file(file, args.out / "engines" / path.name / file.name)
        if timings.exists():
            copy_folder(timings, args.out / TIMINGS)


def told(engine: Engine, out: Path) -> dict[str, Any]:
    """Return what TensorRT made of an engine's network, and whether its steps are recorded."""
    compiled, record = engine.manifest["compiled"], engine.runtime.record
    found = {
        "layers": compiled["layers"],
        "plan_mb": (engine.path / compiled["plan"]).stat().st_size >> 20,
        "scratch_mb": compiled["scratch_bytes"]["engine"] >> 20,
        "recorded": record is not None and record.record is not None,
        "notes": "; ".join(compiled["notes"]),
    }
    if engine.device == "cpu":
        return found
    trt = require_tensorrt().trt
    inspector = engine.runtime.engine.create_engine_inspector()
    layers = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    write_json(out / "engines" / engine.path.name / "layers.json", layers)
    return {**found, "fused_layers": len(layers["Layers"])}


def compared(engine: Engine) -> dict[str, Any]:
    """Compare an engine with the reference on its own weights."""
    report = verify_engine(engine)
    worst = max(p.relative for p in report.positions)
    return {"ok": report.ok, "worst": worst, "difference": report.first_difference or ""}


def attention(cells: Cells, args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Build each kind of attention alone, for several lengths, in each form."""
    scale, host = scale_of(args), host_of(args)
    for length in scale.contexts:
        options = BuildOptions(
            backend="trt",
            random_weights=0,
            max_seq=length,
            prefill_chunk=min(length, scale.chunk),
            media="none",
        )
        prepared = prepare(load_spec(given["variant"]), options, dry=True)
        graphs = trial.attention_graphs(network_graph(prepared.packing.program))
        for g in graphs:
            for form in ATTENTION:
                settings = {**prepared.settings, "attention": form}
                measure = partial(alone_cell, host, scale, g, prepared.limits, settings)
                cells.cell(f"{g.outputs[0].name} max_seq={length} {form}", measure)


def alone_cell(
    host: Host, scale: Scale, g: Graph, limits: Limits, settings: Mapping[str, str]
) -> dict[str, Any]:
    api, begun = host.tensorrt(), time.monotonic()
    with TemporaryDirectory() as folder:
        log, plan = logger(api.trt, Path(folder) / "trt.log"), Path(folder) / "plan"
        w = building.write_network(api, g, limits, None, settings, log)
        config = building.configure(api, w, settings, host.memory(scale.device))
        timing = building.timing_file(host.timings(), host.machine(scale.device))
        building.build_plan(api, w, config, timing, plan, print)
        took = time.monotonic() - begun
        return {
            "layers": w.network.num_layers,
            "build_s": took,
            "plan_kb": plan.stat().st_size >> 10,
        }


# --- at full width ----------------------------------------------------------------------------


def cut(cells: Cells, args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Measure one repeat of a variant's layers, by the ways to keep weights, and with norms in
    layers."""
    spec = load_spec(given["variant"])
    text = replace(spec.text, num_hidden_layers=len(spec.text.pattern))
    spec = replace(spec, name=f"{spec.name}-cut", text=text)
    others = {"hardware": "same-capability"}, {"norms": "layers"}
    for settings in (*({"weights": w} for w in WEIGHTS), *others):
        measured(cells, args, spec, settings)


def full(cells: Cells, args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    measured(cells, args, load_spec(given["variant"]), {})


def measured(
    cells: Cells, args: argparse.Namespace, spec: Spec, settings: Mapping[str, str]
) -> None:
    """Build an engine, time its steps and prompts, and compare it with the reference."""
    scale, front = scale_of(args), " ".join((spec.name, *settings.values()))
    path = args.work / front.replace(" ", "-")
    limits = {"max_seq": max(scale.contexts) + 2 * scale.steps, "prefill_chunk": scale.chunk}
    how = {**limits, "media": "none", "settings": settings}
    make = partial(opened, args, spec, path, scale.dtype, **how)
    engine = cells.made(f"{front} build", make)
    if engine is None:
        return
    rates = Meter(scale.device, torch.bfloat16).measure()
    cells.cell(f"{front} engine", partial(told, engine, args.out))
    for c in scale.contexts:
        cells.cell(f"{front} decode c{c}", partial(decode_cell, engine, scale, 1, c, rates))
    for n in scale.prompts:
        cells.cell(f"{front} prefill {n}", partial(prefill_cell, engine, n, rates))
    cells.cell(f"{front} compared", partial(compared, engine))
    engine.close()
    cells.cell(f"{front} trtexec", partial(trtexec_cell, path, args.out / "engines" / path.name))
    if not cells.left:
        shutil.rmtree(path)  # as large as the weights, twice


def trtexec_cell(path: Path, out: Path) -> dict[str, Any]:
    """Have NVIDIA's own tool time the plan's decode steps, layer by layer."""
    if shutil.which("trtexec") is None:
        raise MissingError("no trtexec here: it comes with TensorRT's archive or container")
    out.mkdir(parents=True, exist_ok=True)
    words = [f"--loadEngine={path / files(ENGINE)[0]}", "--useProfile=0", "--useCudaGraph"]
    words += [
        f"--exportLayerInfo={out / 'layers_0.json'}",
        f"--exportProfile={out / 'profile_0.json'}",
    ]
    done = subprocess.run(["trtexec", *words], capture_output=True, text=True, errors="replace")
    return {"ok": done.returncode == 0, "said": (done.stdout + done.stderr)[-SAID:]}


# --- the stages -------------------------------------------------------------------------------

KINDS = {
    "machine": Kind(machine, 120),
    "names": Kind(names, 300),
    "probe": Kind(probe, 300),
    "tiny": Kind(tiny, 300, 1200),
    "attention": Kind(attention, 300, 900),
    "cut": Kind(cut, 1800),
    "full": Kind(full, 5400),
}
#: for each variant apart
EACH = ("attention", "cut", "full")
#: variants of which one repeat of the layers is a model: none shares another's keys
CUT = ("12b", "26b-a4b", "31b", "tiny-dense", "tiny-moe")


def stages(args: argparse.Namespace) -> list[Stage]:
    made = [Stage(kind, {}) for kind in KINDS if kind not in EACH]
    for kind in EACH:
        fitting = [v for v in args.variants if kind != "cut" or v in CUT]
        made += [Stage(kind, {"variant": v}) for v in fitting]
    return made


def about(args: argparse.Namespace) -> dict[str, Any]:
    return environment("cuda" if torch.cuda.is_available() else "cpu")


def main() -> int:
    parser = common_parser(__doc__)
    parser.add_argument("--work", type=Path, help="folder of engines and plans (OUT/work)")
    args = parsed(parser, CARD.variants, DRY.variants)
    args.work = args.work or args.out / "work"
    if args.carry and not args.run:
        copy_folder(args.carry / TIMINGS, private(host_of(args).timings()))
    return drive(Script(Path(__file__), KINDS, stages, about), args)


if __name__ == "__main__":
    sys.exit(main())
