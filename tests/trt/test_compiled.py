"""What NVIDIA's own builder makes of our networks: TensorRT-RTX's, which needs no GPU."""

from __future__ import annotations

import re
from enum import EnumMeta
from pathlib import Path
from typing import Any

import pytest

from g4ir.backends.trt import build
from g4ir.backends.trt.host import logger
from g4ir.backends.trt.interface import ENGINE, LOG, networks
from g4ir.backends.trt.target import TARGETS
from g4ir.errors import MissingError
from g4ir.ui.progress import no_progress
from g4ir.weights.pack import MadeParams
from tests.trt import fake
from tests.trt.compiled import TABLE, numbers, planned, real

try:
    real()
except MissingError as e:
    pytest.skip(f"TensorRT-RTX is not installed: {e}", allow_module_level=True)

FULL = [pytest.param(*row, marks=pytest.mark.full) for row in TABLE["full"].items()]


@pytest.mark.parametrize(("row", "kept"), [*TABLE["tiny"].items(), *FULL], ids=str)
def test_numbers_that_may_not_grow(row: str, kept: dict[str, Any]) -> None:
    found = numbers(row)
    assert {n: of.keys() for n, of in found.items()} == {n: of.keys() for n, of in kept.items()}
    grown = [
        f"{network} {kind}: {now}, at most {kept[network][kind]}"
        for network, of in found.items()
        for kind, now in of.items()
        if any(a > b for a, b in zip(now, kept[network][kind], strict=True))
    ]
    assert not grown, "\n".join(grown)


def weights_held(row: str, folder: Path) -> int:
    """Return the bytes of weights of a text model's plan."""
    p, api, log = planned(row), real(), folder / LOG
    graph, params = networks(p.packing.program)[ENGINE], MadeParams(p.packing, p.source)
    w = build.write_network(
        api, graph, p.config.limits, params, p.config.settings, logger(api.trt, log)
    )
    config = build.configure(api, w, None, TARGETS["sm120"])
    build.build_plan(api, w, config, None, folder / "plan", no_progress)
    said = re.findall(r"Total Weights Memory: (\d+) bytes", log.read_text(errors="replace"))
    return int(said[-1])


@pytest.mark.full
def test_experts_of_4_bits_are_in_a_plan_once(tmp_path: Path) -> None:
    """Also where a step gathers them and a chunk multiplies all: products of constants have a
    layout of their own."""
    row = "tiny-moe quant=int4 max_batch=1"
    assert weights_held(row, tmp_path) < 1.05 * weights_held(f"{row} experts=all", tmp_path)


def test_the_stand_in_has_the_names_of_the_library() -> None:
    """Classes, members of enums, methods; but for what tests look at."""
    own = set[str]()
    for part in fake.PARTS:
        names = [m.name for m in part] if isinstance(part, EnumMeta) else vars(part)
        known = getattr(real().trt, part.__name__)
        own |= {f"{part.__name__}.{n}" for n in names if n[0] != "_" and not hasattr(known, n)}
    assert own == {"INetworkDefinition.model", "ICudaEngine.parts", "IExecutionContext.capturing"}
