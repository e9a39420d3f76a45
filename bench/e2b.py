"""The E2B shape at full width and depth, bf16, random weights: g4ir beside transformers.

    python bench/e2b.py [--engine build/bench/e2b] [--peers eager,dynamic,compile] [--rounds 3]
                        [--name e2b]

Both run in this process on the same threads, interleaved A-B-A-B. The peer computes the last
logits only, in three modes: eager and compiled with a static cache, eager with a cache that
grows. The per-layer-embedding vocabulary is cut to 8192 rows so that the peer's copy of that
table fits; it is read by row and does not change the work per token. Writes
bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from common import medians, random_model, save, seconds

import g4ir
from g4ir.bench.measure import interleave
from g4ir.bench.peers import HfRunner
from g4ir.bench.roof import Meter
from g4ir.bench.stats import median
from g4ir.bench.system import environment
from g4ir.plan.count import counts

SPEC = Path(__file__).with_name("e2b-ple8k.yaml")
PREFILL = (32, 512, 2048)
MAX_SEQ = 2560
#: modes of the peer as this script names them
MODES = {"eager": "hf-static", "dynamic": "hf", "compile": "hf-compile"}
Peers = dict[str, HfRunner]


def build_engine(path: Path) -> Any:
    if path.exists():
        shutil.rmtree(path)
    holder: list[Any] = []
    taken = seconds(
        lambda: holder.append(
            g4ir.build(
                SPEC, path, random_weights=0, max_seq=MAX_SEQ, prefill_chunk=2048, progress=print
            )
        )
    )
    print(f"build and load: {taken:.1f} s")
    return holder[0]


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of two logit rows."""
    return float(torch.nn.functional.cosine_similarity(a.float(), b.float(), -1).min())


def restart(peer: HfRunner, tokens: torch.Tensor) -> torch.Tensor:
    """A prompt on an empty cache."""
    peer.rewind()
    return peer.step(tokens)


def prefill_rows(session: Any, peers: Peers, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for n in PREFILL:
        tokens = torch.randint(3, 8000, (1, n), generator=torch.Generator().manual_seed(n))

        def ours(tokens: torch.Tensor = tokens) -> torch.Tensor:
            session.reset()
            out: torch.Tensor = session.prefill(tokens)
            return out

        first = ours()
        cosines = {name: agreement(first, restart(p, tokens)) for name, p in peers.items()}
        runs = {"g4ir": lambda f=ours: seconds(f)}
        runs |= {
            k: (lambda p=p, t=tokens: seconds(lambda: restart(p, t))) for k, p in peers.items()
        }
        rows.append(_row({"prefill": n}, medians(rounds, **runs), cosines))
    return rows


def decode_row(
    session: Any, peers: Peers, rounds: int, steps: int, step_bytes: int
) -> dict[str, Any]:
    """Seconds per token at one row, context 64 and up; the floor is one read of the weights."""
    prompt = torch.randint(3, 8000, (1, 64), generator=torch.Generator().manual_seed(1))
    session.reset()
    session.prefill(prompt)
    token = torch.tensor([5])
    ours = session.decode(token)
    cosines = {}
    for name, p in peers.items():
        restart(p, prompt)
        cosines[name] = agreement(ours, p.step(token[:, None]))
        p.step(token[:, None])
    session.decode(token)

    def run(step: Any) -> float:
        return seconds(lambda: [step() for _ in range(steps)]) / steps

    runs = {"g4ir": lambda: run(lambda: session.decode(token))}
    runs |= {k: (lambda p=p: run(lambda: p.step(token[:, None]))) for k, p in peers.items()}
    meter = Meter("cpu", torch.bfloat16)
    rates, times = interleave(rounds, meter.measure, runs)
    fastest = max(r.read for r in rates)
    row = _row({"decode": "1 row, context 64"}, {k: median(v) for k, v in times.items()}, cosines)
    floor = step_bytes / fastest
    row["read_floor_gb_per_s"] = fastest / 1e9
    row["floor_ms"] = floor * 1e3
    row["share_of_read_floor"] = floor / (row["ms"]["g4ir"] / 1e3)
    return row


def _row(
    what: dict[str, Any], times: dict[str, float], cosines: dict[str, float]
) -> dict[str, Any]:
    best = min((t for k, t in times.items() if k != "g4ir"), default=float("nan"))
    row = {
        **what,
        "ms": {k: t * 1e3 for k, t in times.items()},
        "speedup_over_best_peer": best / times["g4ir"],
        "logit_cosine": cosines,
    }
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, default=Path("build/bench/e2b"))
    parser.add_argument("--peers", default="eager,dynamic,compile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--name", default="e2b", help="of the report in bench/results")
    parser.add_argument("--reuse", action="store_true", help="load --engine instead of building it")
    args = parser.parse_args()
    engine = g4ir.load_engine(args.engine) if args.reuse else build_engine(args.engine)
    spec = engine.spec
    model = random_model(spec, 0, torch.bfloat16)
    peers = {k: HfRunner(model, MAX_SEQ, MODES[k]) for k in args.peers.split(",") if k}
    session = engine.session()
    step_bytes = counts(spec).active * 2
    decode = decode_row(session, peers, args.rounds, args.steps, step_bytes)
    prefill = prefill_rows(session, peers, args.rounds)
    command = f"python bench/e2b.py --peers {args.peers} --rounds {args.rounds}"
    save(
        args.name,
        {
            "environment": environment(),
            "command": command,
            "dtype": "bf16",
            "decode": decode,
            "prefill": prefill,
        },
    )


if __name__ == "__main__":
    main()
