"""torchvision for the reference's processors, which use its Python half alone.

`make` puts it beside the environment, not into it: builds for the index's torch are CUDA's, whose
compiled half does not load beside a CPU torch. Then the import asks in vain for two operators, so
they are declared here without a body. Other processes, such as those that tests start, do without.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

#: where the Makefile puts it
BESIDE = Path(sys.prefix) / "reference"
_kept: list[Any] = []  # a torch library disappears with its last reference


def find_torchvision() -> bool:
    """Make torchvision importable where it lies in the environment or beside it. Called before
    anything of transformers is imported, which asks but once."""
    if BESIDE.is_dir() and str(BESIDE) not in sys.path:
        sys.path.append(str(BESIDE))
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return False
    if not _kept:
        _load_operators(Path(found.origin).parent)
    return True


def _load_operators(folder: Path) -> None:
    import torch

    try:
        for library in folder.glob("_C.*"):
            torch.ops.load_library(library)
            _kept.append(library)
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(declared)
