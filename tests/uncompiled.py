"""Engines of the torch backend whose programs are run as the exporter would see them: all of it but
torch's own compiler, in a tenth of the time. `--full` compiles them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir.backends.inductor import compile as compiler
from g4ir.backends.inductor import runtime, workers
from g4ir.backends.inductor.device import find_device
from g4ir.backends.inductor.lower import SegmentModule
from g4ir.backends.inductor.target import Target
from g4ir.ir.text import parse_graph


def eager(text: str, device: str = "cpu") -> Callable[[list[torch.Tensor]], Any]:
    """What stands for the program of a graph."""
    module = SegmentModule(find_device(device).lowered(parse_graph(text), Target(device)))
    return torch.no_grad()(lambda given: module(*given))


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which engines are built and loaded so."""

    def compile_all(
        texts: Sequence[str], target: Target, out: Path, jobs: int, progress: Any
    ) -> dict[str, str]:
        files = {text: f"{compiler.program_name(text, target)}.pt2" for text in texts}
        out.mkdir(parents=True, exist_ok=True)
        for text, name in files.items():
            (out / name).write_bytes(text.encode() + compiler.marker(text))
        return files

    def load_program(path: Path, device: str, index: int) -> Callable[[list[torch.Tensor]], Any]:
        raw = path.read_bytes()
        text = raw[: len(raw) - len(compiler.marker(""))].decode()
        return eager(text, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "compile_all", compile_all)
        patch.setattr(runtime, "_load_program", load_program)
        yield
