"""Cost follows use, not limits: ratios that should stay near one, each measured in one run.

    python bench/scaling.py [--save] [--layers]

--layers also builds a 12-layer and a 60-layer model of the same kinds with an empty program cache.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import medians, save, seconds

import g4ir
from g4ir.backends.torch_compile import compile as compiler
from g4ir.bench.system import environment

SPEC = "tiny-ple"


def wide_spec() -> Any:
    """tiny-ple wide enough that work, not call overhead, is what is compared."""
    spec = g4ir.load_spec(SPEC)
    text = replace(
        spec.text, hidden_size=512, intermediate_size=2048, max_position_embeddings=32768
    )
    return replace(spec, text=text)


def build(folder: Path, spec: Any, **limits: int) -> Any:
    path = folder / "-".join(f"{k}{v}" for k, v in limits.items())
    return g4ir.build(spec, path, random_weights=0, **limits)


def prefill(engine: Any, n: int) -> Callable[[], float]:
    session = engine.session()
    tokens = torch.arange(3, 3 + n)[None]

    def run() -> float:
        session.reset()
        return seconds(lambda: session.prefill(tokens))

    run()
    return run


def decode(engine: Any, length: int, steps: int = 16) -> Callable[[], float]:
    session = engine.session()
    session.prefill(torch.arange(3, 3 + length)[None])
    token = torch.tensor([5])

    def run() -> float:
        taken = seconds(lambda: [session.decode(token) for _ in range(steps)])
        session.reset()
        session.prefill(torch.arange(3, 3 + length)[None])
        return taken / steps

    run()
    return run


def compare(what: str, a: Callable[[], float], b: Callable[[], float], limit: float) -> dict:
    """Median of a over median of b, interleaved."""
    times = medians(15, a=a, b=b)
    row = {
        "what": what,
        "ms": {k: t * 1e3 for k, t in times.items()},
        "ratio": times["a"] / times["b"],
        "limit": limit,
    }
    print(f"{what}: {row['ratio']:.2f} (limit {limit})", flush=True)
    return row


def layers_row(folder: Path) -> dict:
    """Build time of 60 layers over 12 layers of the same kinds, nothing cached."""
    spec = g4ir.load_spec("tiny-dense")
    taken = {}
    kept = compiler.cache_dir
    for n in (12, 60):
        empty = folder / f"cache{n}"
        compiler.cache_dir = lambda empty=empty: empty
        text = replace(spec.text, num_hidden_layers=n)
        many = replace(spec, text=text)
        taken[n] = seconds(
            lambda many=many, n=n: g4ir.build(
                many, folder / f"layers{n}", random_weights=0, max_seq=128, prefill_chunk=32
            )
        )
    compiler.cache_dir = kept
    row = {
        "what": "build of 60 layers / 12 layers",
        "seconds": taken,
        "ratio": taken[60] / taken[12],
        "limit": 2.0,
    }
    print(f"{row['what']}: {row['ratio']:.2f} (limit 2.0)", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--layers", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="g4ir-scaling-"))
    spec = wide_spec()
    small = build(folder, spec, max_batch=1, max_seq=256, prefill_chunk=32)
    long = build(folder, spec, max_batch=1, max_seq=16384, prefill_chunk=512)
    many = build(folder, spec, max_batch=8, max_seq=256, prefill_chunk=32)
    rows = [
        compare("prompt of 32, chunk 512 / chunk 32", prefill(long, 32), prefill(small, 32), 1.5),
        compare("decode at 64, max-seq 16384 / 256", decode(long, 64), decode(small, 64), 1.1),
        compare("decode 1 row, max-batch 8 / 1", decode(many, 64), decode(small, 64), 1.3),
        compare("prefill 1 row, max-batch 8 / 1", prefill(many, 32), prefill(small, 32), 1.3),
    ]
    if args.layers:
        rows.append(layers_row(folder))
    shutil.rmtree(folder)
    if args.save:
        command = "python bench/scaling.py --save" + (" --layers" if args.layers else "")
        save("scaling", {"environment": environment(), "command": command, "rows": rows})


if __name__ == "__main__":
    main()
