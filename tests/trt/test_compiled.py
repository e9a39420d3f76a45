"""What NVIDIA's own builder makes of our networks: TensorRT-RTX's, which needs no GPU."""

from __future__ import annotations

from enum import EnumMeta
from typing import Any

import pytest

from g4ir.errors import MissingError
from tests.trt import fake
from tests.trt.compiled import TABLE, numbers, real

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


def test_the_stand_in_has_the_names_of_the_library() -> None:
    """Classes, members of enums, methods; but for what tests look at."""
    own = set[str]()
    for part in fake.PARTS:
        names = [m.name for m in part] if isinstance(part, EnumMeta) else vars(part)
        known = getattr(real().trt, part.__name__)
        own |= {f"{part.__name__}.{n}" for n in names if n[0] != "_" and not hasattr(known, n)}
    assert own == {"INetworkDefinition.model", "ICudaEngine.parts", "IExecutionContext.capturing"}
