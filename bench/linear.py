"""Products of a few rows on the CPU: this project's, the library's, and the read of the weight.

    python bench/linear.py [--rounds 5] [--save]

A dozen weights of one layer's sizes, so that none stays in a cache, are multiplied one after the
other; all ways take turns. `read` is the time that a plain read of the weight would take. --save
writes bench/results/linear.txt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from common import load_kernels, medians, save, seconds

from g4ir.backends.torch_compile import pyops
from g4ir.bench.roof import Meter
from g4ir.ui.table import aligned

SIZES = ((12288, 1536), (1536, 12288))
ROWS = (1, 2, 4, 8, 16, 24, 32, 64)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
WEIGHTS = 12
WAYS = ("g4ir", "library", "in fp32")
HEAD = ("weight", "rows", "g4ir ms", *WAYS[1:], "read")
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ways(dtype: torch.dtype) -> dict[str, Product]:
    """Return the ways to multiply: `g4ir`, which programs call, and those that it chooses from."""
    found: dict[str, Product] = {"g4ir": pyops.linear, "library": torch.nn.functional.linear}
    return found if dtype == torch.float32 else {**found, "in fp32": pyops.wide_linear}


def row(name: str, n: int, k: int, rows: int, rounds: int, read: float) -> list[str]:
    dtype = DTYPES[name]
    weights = [torch.randn(n, k).to(dtype) for _ in range(WEIGHTS)]
    x = torch.randn(rows, k).to(dtype)
    found = ways(dtype)
    runs = {w: partial(seconds, lambda f=f: [f(x, w) for w in weights]) for w, f in found.items()}
    times = medians(rounds, **runs)
    cells = (f"{times[w] / WEIGHTS * 1e3:.2f}" if w in times else "" for w in WAYS)
    return [f"{name} {n}x{k}", str(rows), *cells, f"{weights[0].nbytes / read * 1e3:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    load_kernels()
    read = Meter("cpu", torch.float32).measure().read
    rows = [row(d, *size, r, args.rounds, read) for d in DTYPES for size in SIZES for r in ROWS]
    text = f"read {read / 1e9:.1f} GB/s\n{aligned([HEAD, *rows], indent=0)}"
    print(text, end="")
    if args.save:
        save("linear", text)


if __name__ == "__main__":
    main()
