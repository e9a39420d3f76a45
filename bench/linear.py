"""Products of a few rows on the CPU: this project's, the library's, and the read of the weight.

    python bench/linear.py [--rounds 5] [--save]

A dozen weights of one layer's sizes, so that none stays in a cache, are multiplied one after the
other; all ways take turns. `read` is the time that a plain read of the weight would take. --save
writes bench/results/linear.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import medians, save, seconds

from g4ir.backends.torch_compile import pyops
from g4ir.backends.torch_compile.compile import compile_kernels
from g4ir.bench.roof import Meter
from g4ir.bench.system import environment
from g4ir.ui.table import aligned

SIZES = ((12288, 1536), (1536, 12288))
ROWS = (1, 2, 4, 8, 16, 24, 32, 64)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
WEIGHTS = 12
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ways(dtype: torch.dtype) -> dict[str, Product]:
    """`g4ir` is what programs call; where it is one of the others is what is measured here."""
    found: dict[str, Product] = {"g4ir": pyops.linear, "library": torch.nn.functional.linear}
    return found if dtype == torch.float32 else {**found, "in fp32": pyops.wide_linear}


def row(name: str, n: int, k: int, rows: int, rounds: int, read: float) -> dict[str, Any]:
    dtype = DTYPES[name]
    weights = [torch.randn(n, k).to(dtype) for _ in range(WEIGHTS)]
    x = torch.randn(rows, k).to(dtype)
    runs = {
        way: partial(seconds, lambda f=f: [f(x, w) for w in weights])
        for way, f in ways(dtype).items()
    }
    times = medians(rounds, **runs)
    ms = {way: t / WEIGHTS * 1e3 for way, t in times.items()}
    return {
        "dtype": name,
        "n": n,
        "k": k,
        "rows": rows,
        "ms": ms,
        "read_ms": weights[0].nbytes / read * 1e3,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [("weight", "rows", "g4ir ms", "library", "in fp32", "read")]
    for r in rows:
        times = (
            f"{r['ms'][w]:.2f}" if w in r["ms"] else "" for w in ("g4ir", "library", "in fp32")
        )
        lines.append(
            (f"{r['dtype']} {r['n']}x{r['k']}", str(r["rows"]), *times, f"{r['read_ms']:.2f}")
        )
    return aligned(lines, indent=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compile_kernels(path := Path(folder) / "kernels.so")
        pyops.load_kernels(path)
    read = Meter("cpu", torch.float32).measure().read
    rows = [row(d, *size, r, args.rounds, read) for d in DTYPES for size in SIZES for r in ROWS]
    print(table(rows), end="")
    if args.save:
        command = f"python bench/linear.py --rounds {args.rounds} --save"
        save(
            "linear",
            {
                "environment": environment(),
                "command": command,
                "read_gb_per_s": read / 1e9,
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
