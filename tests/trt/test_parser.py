"""Exported ONNX files, and what our networks become, in NVIDIA's parser and builder:
TensorRT-RTX's, which need no GPU."""

from __future__ import annotations

from enum import EnumMeta
from pathlib import Path
from typing import Any

import pytest

import g4ir
from g4ir.backends.trt import build
from g4ir.errors import MissingError
from tests.cases import TABLES
from tests.configs import short
from tests.trt import fake
from tests.trt.compiled import TABLE, numbers, real

onnx = pytest.importorskip("onnx")
try:
    TRT = real().trt
except MissingError as e:
    pytest.skip(f"TensorRT-RTX is not installed: {e}", allow_module_level=True)

CHUNK, SLOTS = 16, 64
#: dim -> sizes of single tokens, and of chunks: least, typical, most
SIZES = {"B": (1, 1), "S": (1, CHUNK), "R": (1, 1), "C": (SLOTS, SLOTS)}
#: variant and options -> exported files
EXPORTS: dict[str, dict[str, Any]] = {"tiny-moe int8": {"quant": "int8"}}
MORE = TABLES["trt parser"]["more"]
CASES = short(*EXPORTS.items(), of=[*EXPORTS.items(), *MORE.items()])


def taken(file: Path) -> str:
    """What parser or builder say against a file."""
    log = build.logger(TRT)
    builder = TRT.Builder(log)
    network = builder.create_network(0)
    parser = TRT.OnnxParser(network, log)
    if not parser.parse_from_file(str(file)):
        return f"parser: {log.reason()}"
    config = builder.create_builder_config()
    inputs = onnx.load(file, load_external_data=False).graph.input
    dims = {i.name: i.type.tensor_type.shape.dim for i in inputs}
    dynamic = {n: d for n, d in dims.items() if any(x.dim_param for x in d)}
    for phase in (0, 1) if dynamic else ():
        profile = builder.create_optimization_profile()
        for name, sizes in dynamic.items():
            least, most = (
                [x.dim_value or SIZES[x.dim_param][phase and i] for x in sizes] for i in (0, 1)
            )
            profile.set_shape(name, least, most, most)
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    return "" if plan is not None else f"builder: {log.reason()}"


@pytest.mark.parametrize(("name", "options"), CASES)
def test_exports(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    given = {"media": "none", "random_weights": 0, "max_seq": SLOTS - CHUNK, **options}
    variant, out = name.split()[0], tmp_path / "engine"
    g4ir.build(variant, out, backend="onnx", device="cpu", prefill_chunk=CHUNK, **given)
    refused = {f.name: said for f in sorted(out.glob("*.onnx")) if (said := taken(f))}
    assert not refused


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


def test_the_stand_in_has_the_names_of_the_library() -> None:
    """Classes, members of enums, methods; but for what tests look at."""
    own = set[str]()
    for part in fake.PARTS:
        names = [m.name for m in part] if isinstance(part, EnumMeta) else vars(part)
        known = getattr(TRT, part.__name__)
        own |= {f"{part.__name__}.{n}" for n in names if n[0] != "_" and not hasattr(known, n)}
    assert own == {"INetworkDefinition.model", "ICudaEngine.parts", "IExecutionContext.capturing"}
