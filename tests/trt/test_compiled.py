"""What NVIDIA's own builder makes of our networks: TensorRT-RTX's, which needs no GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from g4ir.backends.trt import build
from g4ir.backends.trt.dry_run import BUDGETS
from g4ir.backends.trt.host import logger
from g4ir.backends.trt.interface import ENGINE, LOG, networks
from g4ir.backends.trt.target import TARGETS
from g4ir.errors import MissingError
from g4ir.ui.progress import no_progress
from g4ir.weights.pack import MadeParams
from tests.trt.compiled import TABLE, numbers, planned, real
from tests.trt.replay import replayed

try:
    real()
except MissingError as e:
    pytest.skip(f"TensorRT-RTX is not installed: {e}", allow_module_level=True)

REPLAYS = {
    "tiny-moe quant=int4": {"logits"},
    "tiny-ple drafter=default attention=fused": {"logits", "drafts"},
    "tiny-media media=all": {"logits", "soft"},
    "tiny-dense quant=int8 tp=2": {"logits"},
}
MORE_REPLAYS = (
    *(
        "tiny-dense",
        "tiny-moe quant=fp8 attention=fused",
        "tiny-moe experts=gather latent_kv=value",
    ),
    *(
        "tiny-dense latent_kv=value attention=fused",
        "tiny-dense attention=plain",
        "tiny-ple quant=int8",
    ),
    *("e2b", "e2b quant=int4", "26b-a4b attention=fused", "26b-a4b quant=int4 experts=all"),
    *("31b latent_kv=value", "12b", "26b-a4b tp=2 quant=fp8"),
)
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


@pytest.mark.parametrize(
    "row", [*REPLAYS, *(pytest.param(r, marks=pytest.mark.full) for r in MORE_REPLAYS)]
)
def test_what_the_library_holds(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executed on a CPU, it computes what the interpreter does, in fp32."""
    found = replayed(planned(f"{row} dtype=float32"), monkeypatch)
    assert found.keys() >= REPLAYS.get(row, set())
    assert max(found.values()) < BUDGETS["f32"]


def weights_held(row: str, folder: Path) -> int:
    """Return the bytes of weights of a text model's plan."""
    p, api, log = planned(row), real(), folder / LOG
    graph, params = networks(p.packing.program)[ENGINE], MadeParams(p.packing, p.source)
    w = build.write_network(api, graph, p.limits, params, p.settings, logger(api.trt, log))
    config = build.configure(api, w, p.settings, None, TARGETS["sm120"])
    build.build_plan(api, w, config, None, folder / "plan", no_progress)
    said = re.findall(r"Total Weights Memory: (\d+) bytes", log.read_text(errors="replace"))
    return int(said[-1])


def test_experts_of_4_bits_are_in_a_plan_once(tmp_path: Path) -> None:
    """Also where a step gathers them and a chunk multiplies all: products of constants have a
    layout of their own."""
    row = "tiny-moe quant=int4 max_batch=1"
    assert weights_held(row, tmp_path) < 1.05 * weights_held(f"{row} experts=all", tmp_path)
