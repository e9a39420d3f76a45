"""Programs that are run as the exporter would see them: all of an engine but torch's own compiler,
in a tenth of the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir.backends.inductor import compile as compiler
from g4ir.backends.inductor import runtime, workers
from g4ir.backends.inductor.device import find_compiler
from g4ir.backends.inductor.lower import SegmentModule
from g4ir.backends.inductor.target import Target
from g4ir.ir.text import parse_graph


def run_uncompiled(patch: pytest.MonkeyPatch) -> None:
    """Let engines be built and loaded so."""

    def compile_all(texts: Any, target: Target, out: Path, *_: Any) -> dict[str, str]:
        files = {text: f"{compiler.program_name(text, target)}.pt2" for text in texts}
        out.mkdir(parents=True, exist_ok=True)
        for text, name in files.items():
            (out / name).write_bytes(text.encode() + compiler.marker(text))
        return files

    def load_program(path: Path, device: str, *_: Any) -> Callable[[list[torch.Tensor]], Any]:
        text = path.read_bytes()[: -len(compiler.marker(""))].decode()
        module = SegmentModule(find_compiler(device).lowered(parse_graph(text), Target(device)))
        return torch.no_grad()(lambda given: module(*given))

    patch.setattr(workers, "compile_all", compile_all)
    patch.setattr(runtime, "_load_program", load_program)
