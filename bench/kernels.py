"""The resources that every kernel needs of a Hopper GPU, compiled for it here: no GPU needed.

    python bench/kernels.py [--variants e2b,...] [--save]

For each variant (e2b+int4: with weights in int4), batch (1, 8, 16, 64) and form of the caches: the
kernel of each node with its settings from the table of tunings, registers, spilled bytes and shared
memory of a block, whether it uses tensor cores and 16-byte loads. --save
writes bench/results/kernels.txt.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from common import arguments, finish
from gpu.cases import programs

from g4ir.backends.torch_compile.kernel_cases import all_cases, launches_of_case
from g4ir.backends.torch_compile.kernels.resources import SHARED_BYTES, resources
from g4ir.backends.torch_compile.target import Target
from g4ir.ui.table import aligned

ROWS = (1, 8, 16, 64)
CODED = [f"{name}+{form}" for name in ("e2b", "26b-a4b", "31b") for form in ("int8", "int4", "fp8")]
VARIANTS = ["e2b", "e4b", "12b", "26b-a4b", "31b", *CODED]
NOTE = """\
Products of more than 64 rows, and routed experts of more, are the library's (cuBLAS, grouped_mm):
their kernels are near the limit there. Everything else between these kernels is the compiler's.
"""


def rows_of(variants: list[str]) -> list[dict[str, Any]]:
    """Return one row for each different launch."""
    found: dict[str, dict[str, Any]] = {}
    cases = (
        case
        for n in ROWS
        for case in all_cases(programs(variants, n), [Target("cuda", "h200", n)], 4096, chunk=1024)
    )
    for case in cases:
        for launch in launches_of_case(case):
            kernel, grid, args, meta = launch
            types = [a.dtype if isinstance(a, torch.Tensor) else type(a) for a in args]
            key = f"{kernel.__name__} {sorted(meta.items(), key=str)} {types}"
            if key not in found:
                found[key] = {
                    "ops": "+".join(case.choice.tunings),
                    "shape": dict(case.choice.shape),
                    "blocks": [int(n) for n in grid],
                    "meta": {k: str(v) for k, v in meta.items()},
                    **asdict(resources(launch)),
                }
    return list(found.values())


def table(rows: list[dict[str, Any]]) -> str:
    head = ["kernel", "first at", "blocks", "warps", "registers", "spilled", "shared", "tensor"]
    lines = [
        (
            r["kernel"].strip("_"),
            " ".join(f"{k}={v}" for k, v in r["shape"].items()),
            "x".join(map(str, r["blocks"])),
            *(str(r[k]) for k in ("warps", "registers", "spill_bytes", "shared_bytes")),
            *("yes" if r[k] else "" for k in ("tensor_cores", "wide_loads")),
        )
        for r in rows
    ]
    return aligned([[*head, "16 B"], *lines], indent=0)


def main() -> None:
    args = arguments(__doc__, variants=tuple(VARIANTS))
    rows = rows_of(args.variants)
    assert all(r["spill_bytes"] == 0 and r["shared_bytes"] <= SHARED_BYTES for r in rows)
    finish(args, "kernels", f"{table(rows)}\n{NOTE}")


if __name__ == "__main__":
    main()
