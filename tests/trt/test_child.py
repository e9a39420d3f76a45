"""The builder in a process of its own."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from g4ir.backends.base import Prepared, Task
from g4ir.backends.trt import build as trt_build
from g4ir.backends.trt import host as log
from g4ir.backends.trt import make as child
from g4ir.backends.trt.backend import BACKEND
from g4ir.backends.trt.interface import LOG, PLAN
from g4ir.builder.build import prepare
from g4ir.errors import LowerError, MissingError
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import load_spec
from g4ir.ui.console import Ended
from g4ir.weights import pack as packing
from tests.trt.emulated import emulated

Said = list[str]


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(
        load_spec("tiny-ple"),
        BuildOptions(backend="trt", random_weights=0, media="none", max_seq=64, prefill_chunk=16),
        dry=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An unfinished engine directory."""
    made = tmp_path / ".engine.building-x1"
    made.mkdir()
    return made


def run(p: Prepared, folder: Path, code: str, progress: Callable[[str], None]) -> dict[str, Any]:
    argv = [sys.executable, "-c", code]
    return child.build_apart(task(p, folder, "cpu", progress), p.config.settings, argv)


def task(p: Prepared, folder: Path, device: str, progress: Callable[[str], None] = print) -> Task:
    params = packing.MadeParams(p.packing, p.source)
    return Task(p.packing.program, p.config.limits, device, folder, params, progress)


def test_a_crash_is_one_error(prepared: Prepared, folder: Path) -> None:
    """What was told before it comes through; the log is kept, and of the job nothing is left."""
    said: Said = []
    code = (
        "import json, os, signal, pathlib; print('no json'); "
        "print(json.dumps({'progress': 'timing kernels'}), flush=True); "
        f"pathlib.Path({str(folder / LOG)!r}).write_text('[INFO] the last message'); "
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    with pytest.raises(LowerError, match=r"crashed \(signal SIGSEGV\).*engine\.trt\.log"):
        run(prepared, folder, code, said.append)
    assert said == ["timing kernels"]
    assert (folder.parent / "engine.trt.log").read_text() == "[INFO] the last message"
    assert [p.name for p in folder.iterdir()] == [LOG]


def test_its_errors_are_ours(prepared: Prepared, folder: Path) -> None:
    """The real child, which finds no TensorRT here, or no GPU."""
    with pytest.raises(MissingError, match="TensorRT"):
        child.build_apart(task(prepared, folder, "cuda"), prepared.config.settings)
    assert not [*folder.glob("*.json"), *folder.glob("*.g4ir")]
    assert BACKEND.host.apart


def test_what_it_makes(
    prepared: Prepared, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the files of a job alone, with fake.py as TensorRT."""
    params = packing.MadeParams(prepared.packing, prepared.source)
    packing.write_params(prepared.packing, params, folder, print)
    backend = emulated(tmp_path)
    kept: dict[str, Any] = {}

    def listen(argv: Any, out: Path, progress: Any) -> dict[str, Any]:
        kept.update(child.run_job(out, backend.host))
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "_listen", listen)
        run(prepared, folder, "", print)
    made = kept["made"]
    assert made["version"] == "11.4.0" and (folder / PLAN).is_file()
    assert json.loads(json.dumps(kept)) == kept
    lines = [json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("{")]
    assert any("writing the network" in line["progress"] for line in lines)


def test_no_space_for_a_plan(
    prepared: Prepared, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child says so, and the parent raises it as its own; of the plan nothing is left."""
    params = packing.MadeParams(prepared.packing, prepared.source)
    packing.write_params(prepared.packing, params, folder, print)

    def full(trt: Any, file: IO[bytes]) -> Any:
        def write(data: bytes) -> int:
            file.write(data[:3])
            raise OSError(errno.ENOSPC, "No space left on device")

        return log.stream_writer(trt, SimpleNamespace(write=write))  # type: ignore[arg-type]

    monkeypatch.setattr(trt_build, "stream_writer", full)
    before = {p.name for p in folder.iterdir()}
    monkeypatch.setattr(
        child, "_listen", lambda argv, out, progress: child.run_job(out, emulated(tmp_path).host)
    )
    said = run(prepared, folder, "", print)
    assert said == {"error": "OSError", "of": [errno.ENOSPC, "No space left on device", None]}
    assert {p.name for p in folder.iterdir()} - before == {LOG}
    monkeypatch.undo()
    code = f"import json; print(json.dumps({said}))".replace("None", "'engine.plan'")
    with pytest.raises(OSError, match="No space left") as e:
        run(prepared, folder, code, print)
    assert (e.value.errno, e.value.filename) == (errno.ENOSPC, "engine.plan")


def test_a_signal_does_not_wait_for_the_builder(
    prepared: Prepared, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that goes on is ended after a while."""
    monkeypatch.setattr(child, "PATIENCE_S", 0.5)
    code = (
        "import json, os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(json.dumps({'progress': str(os.getpid())}), flush=True); time.sleep(60)"
    )
    pids: list[int] = []

    def ended(message: str) -> None:
        pids.append(int(message))
        raise Ended(signal.SIGTERM)

    start = time.monotonic()
    with pytest.raises(Ended):
        run(prepared, folder, code, ended)
    assert time.monotonic() - start < 30
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
