"""Products of a few rows on the CPU: this project's, the library's, and the read of the weight.

    python bench/linear.py [--rounds 5] [--save]
    python bench/linear.py --codes [--rounds 7] [--save]

Weights of one layer's sizes, so many that none stays in a cache, are multiplied one after the
other; all ways take turns. `read` is the time that a plain read of the weight would take. With
--codes weights are int8, int4 and so on, and a cell is the share of the rate at which torch reads
as many bytes. --save writes bench/results/linear.txt or codes.txt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import arguments, finish, load_kernels, medians, seconds

from g4ir.backends.torch_compile import pyops
from g4ir.bench.roof import Meter
from g4ir.ops import OPS
from g4ir.ui.table import aligned

SIZES = ((12288, 1536), (1536, 12288))
ROWS = (1, 2, 4, 8, 16, 24, 32, 64)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
WEIGHTS = 12
WAYS = ("g4ir", "library", "in fp32")
#: with --codes: of a layer, and a part of a head
CODED_SIZES = ((12288, 1536), (1536, 6144), (1536, 12288), (32768, 1536))
CODED_ROWS = (1, 2, 4, 8)
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


def plain_row(name: str, n: int, k: int, rows: int, rounds: int, read: float) -> list[str]:
    dtype = DTYPES[name]
    weights = [torch.randn(n, k).to(dtype) for _ in range(WEIGHTS)]
    x = torch.randn(rows, k).to(dtype)
    ways: dict[str, Any] = {"g4ir": pyops.linear, "library": torch.nn.functional.linear}
    if dtype != torch.float32:
        ways["in fp32"] = pyops.wide_linear
    runs = {w: partial(seconds, lambda f=f: [f(x, w) for w in weights]) for w, f in ways.items()}
    times = medians(rounds, runs)
    cells = (f"{times[w] / WEIGHTS * 1e3:.2f}" if w in times else "" for w in WAYS)
    return [f"{name} {n}x{k}", str(rows), *cells, f"{weights[0].nbytes / read * 1e3:.2f}"]


def plain(rounds: int) -> str:
    read = Meter("cpu", torch.float32).measure().read
    rows = [plain_row(d, *size, r, rounds, read) for d in DTYPES for size in SIZES for r in ROWS]
    head = ("weight", "rows", "g4ir ms", *WAYS[1:], "read")
    return f"read {read / 1e9:.1f} GB/s\n{aligned([head, *rows], indent=0)}"


def copies(parts: Tensors) -> list[Tensors]:
    """Return so many copies of a weight that they fill BYTES."""
    count = max(2, BYTES // sum(t.nbytes for t in parts))
    return [tuple(t.clone() for t in parts) for _ in range(count)]


def multiply(x: torch.Tensor, held: list[Tensors]) -> None:
    product: Callable[..., Any] = pyops.linear if len(held[0]) == 1 else pyops.linear_coded
    for parts in held:
        product(x, *parts)


def coded(rounds: int) -> str:
    quantize = OPS["quantize"].reference
    assert quantize
    found = [["weight", "rows", "read GB/s", "bf16", *FORMS]]
    for n, k in CODED_SIZES:
        w = torch.randn(n, k)
        held = {"bf16": copies((w.bfloat16(),))}
        for name, (form, group, scale) in FORMS.items():
            held[name] = copies(quantize(w, form=form, group=group, scale=scale))
        size = {name: sum(t.nbytes for parts in many for t in parts) for name, many in held.items()}
        whole = [t.view(torch.int64) for (t,) in held["bf16"]]
        for rows in CODED_ROWS:
            x = torch.randn(rows, k).bfloat16()
            runs: dict[str, Callable[[], float]] = {
                name: partial(seconds, partial(multiply, x, many)) for name, many in held.items()
            }
            runs["read"] = partial(seconds, lambda whole=whole: [t.sum() for t in whole])
            times = medians(rounds, runs)
            read = size["bf16"] / times["read"]
            shares = (f"{size[name] / times[name] / read:.2f}" for name in held)
            found.append([f"{n}x{k}", str(rows), f"{read / 1e9:.1f}", *shares])
    return f"share of the read\n{aligned(found, indent=0)}"


def main() -> None:
    args = arguments(__doc__, rounds=5, codes=False)
    load_kernels()
    made = coded(args.rounds) if args.codes else plain(args.rounds)
    finish(args, "codes" if args.codes else "linear", made)


if __name__ == "__main__":
    main()
