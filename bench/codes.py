"""Products of a few rows on the CPU with weights in codes, beside bf16 and a read of as many bytes.

    python bench/codes.py [--rounds 7] [--save]

Weights of one layer's sizes, so many that none stays in a cache, are multiplied one after the
other; all ways and the read take turns. A cell is the share of the rate at which torch reads as
many bytes. --save writes bench/results/codes.txt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import load_kernels, medians, save, seconds

from g4ir.backends.torch_compile import pyops
from g4ir.ops import OPS
from g4ir.ui.table import aligned

#: of a layer, and a part of a head
SIZES = ((12288, 1536), (1536, 6144), (1536, 12288), (32768, 1536))
ROWS = (1, 2, 4, 8)
#: name -> form, numbers that share a scale, dtype of the scales
FORMS = {
    "int8": ("int8", 0, "bf16"),
    "int8 by 32": ("int8", 32, "f16"),
    "int8 by 16": ("int8", 16, "f32"),
    "int6 by 256": ("int6", 256, "f16"),
    "uint5 by 256": ("uint5", 256, "f16"),
    "int4 by 32": ("int4", 32, "bf16"),
    "uint4 by 256": ("uint4", 256, "f16"),
    "fp8": ("fp8", 0, "bf16"),
}
#: bytes that pass before a weight comes again: more than any cache holds
BYTES = 200 << 20
Tensors = tuple[torch.Tensor, ...]


def copies(parts: Tensors) -> list[Tensors]:
    """Return so many copies of a weight that they fill BYTES."""
    count = max(2, BYTES // sum(t.nbytes for t in parts))
    return [tuple(t.clone() for t in parts) for _ in range(count)]


def weights(n: int, k: int) -> dict[str, list[Tensors]]:
    """Return copies of one weight in every form."""
    w, quantize = torch.randn(n, k), OPS["quantize"].reference
    made = {
        name: copies(quantize(w, form=form, group=group, scale=scale))
        for name, (form, group, scale) in FORMS.items()
    }
    return {"bf16": copies((w.bfloat16(),)), **made}


def multiply(x: torch.Tensor, held: list[Tensors]) -> None:
    product: Callable[..., Any] = pyops.linear if len(held[0]) == 1 else pyops.linear_coded
    for parts in held:
        product(x, *parts)


def row(held: dict[str, list[Tensors]], n: int, k: int, rows: int, rounds: int) -> list[str]:
    x = torch.randn(rows, k).bfloat16()
    plain = [t.view(torch.int64) for (t,) in held["bf16"]]
    runs: dict[str, Callable[[], float]] = {
        name: partial(seconds, partial(multiply, x, some)) for name, some in held.items()
    }
    runs["read"] = partial(seconds, lambda: [t.sum() for t in plain])
    times = medians(rounds, **runs)
    rate = {name: _nbytes(some) / times[name] for name, some in held.items()}
    read = _nbytes(held["bf16"]) / times["read"]
    return [f"{n}x{k}", str(rows), f"{read / 1e9:.1f}", *(f"{r / read:.2f}" for r in rate.values())]


def _nbytes(held: list[Tensors]) -> int:
    return sum(t.nbytes for parts in held for t in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    load_kernels()
    found = [["weight", "rows", "read GB/s", "bf16", *FORMS]]
    for n, k in SIZES:
        held = weights(n, k)
        found += [row(held, n, k, rows, args.rounds) for rows in ROWS]
    text = f"share of the read\n{aligned(found, indent=0)}"
    print(text, end="")
    if args.save:
        save("codes", text)


if __name__ == "__main__":
    main()
