"""Tiny models, where overhead decides: decode beside transformers eager, in one run.

    python bench/tiny.py [--engine DIR ...] [--steps 64] [--rounds 5] [--save]

Without --engine, the three tiny variants are built into build/bench/.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import medians, random_model, save, seconds

import g4ir
from g4ir.bench.peers import HfRunner
from g4ir.bench.system import environment
from g4ir.ops.types import torch_dtype

VARIANTS = ("tiny-dense", "tiny-moe", "tiny-ple")


def engines(paths: list[Path]) -> list[Any]:
    if paths:
        return [g4ir.load_engine(p) for p in paths]
    out = []
    for name in VARIANTS:
        path = Path("build/bench") / name
        loaded = path.exists()
        out.append(
            g4ir.load_engine(path)
            if loaded
            else g4ir.build(name, path, random_weights=0, max_seq=256, prefill_chunk=32)
        )
    return out


def measure(engine: Any, steps: int, rounds: int) -> dict[str, Any]:
    seed = engine.manifest["weights"]["seed"]
    model = random_model(engine.spec, seed, torch_dtype(engine.dtype))
    peer = HfRunner(model, 256, "hf-static")
    session = engine.session()
    prompt, token = torch.arange(3, 27)[None], torch.tensor([5])
    worst = float((session.prefill(prompt) - peer.step(prompt)).abs().max())
    worst = max(worst, float((session.decode(token) - peer.step(token[:, None])).abs().max()))

    def run(step: Any) -> float:
        return seconds(lambda: [step() for _ in range(steps)]) / steps

    def ours() -> float:
        session.reset()
        session.prefill(prompt)
        return run(lambda: session.decode(token))

    def theirs() -> float:
        peer.rewind()
        peer.step(prompt)
        return run(lambda: peer.step(token[:, None]))

    times = medians(rounds, g4ir=ours, eager=theirs)
    return {
        "variant": engine.spec.name,
        "decode_us": {k: t * 1e6 for k, t in times.items()},
        "speedup": times["eager"] / times["g4ir"],
        "largest_logit_difference": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, action="append", default=[])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write bench/results/tiny.json")
    args = parser.parse_args()
    rows = [measure(e, args.steps, args.rounds) for e in engines(args.engine)]
    print(f"{'variant':12} {'g4ir us':>9} {'eager us':>9} {'speed-up':>9} {'logit diff':>11}")
    for r in rows:
        us = r["decode_us"]
        print(
            f"{r['variant']:12} {us['g4ir']:9.0f} {us['eager']:9.0f} {r['speedup']:8.1f}x "
            f"{r['largest_logit_difference']:11.1e}"
        )
    if args.save:
        save(
            "tiny",
            {
                "environment": environment(),
                "command": "python bench/tiny.py --save",
                "peer": "transformers eager, static cache",
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
