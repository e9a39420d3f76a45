"""Engines beside llama.cpp, each with the GGUF file that it was built from, on the CPU.

    python bench/peer_llama.py --pair ENGINE FILE [--pair ...] [--input-len 512] [--output-len 33]
        [--rounds 3] [--save]

An engine and llama.cpp's Python binding (`pip install llama-cpp-python`) hold the same file in one
process, with as many threads, and take turns with a read of the memory. `floor` is the share of
that read's rate at which an engine reads the bytes that its step needs. --save writes
bench/results/peer_llama.txt.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save, seconds

import g4ir
from g4ir.bench.measure import TAKE, RequestTiming, interleave, over, speeds, timed_request, turn
from g4ir.bench.roof import Meter, middle
from g4ir.bench.runners import EngineRunner
from g4ir.bench.stats import median
from g4ir.bench.work import find_work
from g4ir.bench.workload import Workload, draw_tokens, plan_workload
from g4ir.ui.table import aligned

HEAD = (
    "file",
    "",
    "load s",
    "prefill tokens/s",
    "decode ms",
    "read GB/s",
    "floor",
    "llama.cpp / g4ir: prefill, decode",
    "cosine",
)


class LlamaRunner:
    """llama.cpp on a file, one row, as it comes: caches in float16, products of rounded rows."""

    role = "llama.cpp"

    def __init__(self, file: Path, w: Workload) -> None:
        import llama_cpp

        self._api, self.label = llama_cpp, f"llama-cpp-python {llama_cpp.__version__}"
        threads = torch.get_num_threads()
        self._model = llama_cpp.Llama(
            str(file),
            n_ctx=w.fed + 1,
            n_batch=w.input_len,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def hold(self, tokens: torch.Tensor) -> None:
        assert not tokens.shape[1], "its rows start empty"
        self.rewind()

    def rewind(self) -> None:
        self._model.reset()
        self._model._ctx.kv_cache_clear()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self._model.eval(tokens[0].tolist())
        logits = self._api.llama_get_logits_ith(self._model.ctx, -1)
        row = np.ctypeslib.as_array(logits, shape=(self._model.n_vocab(),))
        return torch.from_numpy(row)[None]


def loaded(make: Any) -> tuple[Any, float]:
    """Return what is made, and the seconds of it."""
    found: list[Any] = []
    taken = seconds(lambda: found.append(make()))
    return found[0], taken


def after_prompt(runner: Any, w: Workload, tokens: torch.Tensor) -> torch.Tensor:
    runner.rewind()
    return runner.step(tokens[:, : w.input_len]).flatten().float().clone()


def rows(path: str, file: Path, args: argparse.Namespace) -> list[list[str]]:
    """Return a line of the engine and one of llama.cpp."""
    engine, ours_s = loaded(lambda: g4ir.load_engine(path))
    w = plan_workload([engine], args.input_len, args.output_len)
    tokens = draw_tokens(w, engine)
    theirs, theirs_s = loaded(lambda: LlamaRunner(file, w))
    runners = {"g4ir": EngineRunner(engine, 1), "llama.cpp": theirs}
    logits = [after_prompt(r, w, tokens) for r in runners.values()]
    for runner in runners.values():
        timed_request(runner, w, tokens)
    meter = Meter("cpu", torch.bfloat16)
    turns = {name: partial(turn, r, w, tokens, 1) for name, r in runners.items()}
    rates, found = interleave(args.rounds, meter.measure, turns)
    nbytes = find_work(engine, w, tokens).decode_cost().needed_bytes
    fastest = middle(rates).bandwidth
    floor = nbytes / fastest / _decode_s(found["g4ir"])
    ratios = ", ".join(
        f"{over(found['llama.cpp'], found['g4ir'], TAKE[k]).value:.2f}" for k in ("ttft", "itl")
    )
    cosine = float(torch.nn.functional.cosine_similarity(*logits, dim=0))
    more = {
        "g4ir": [f"{fastest / 1e9:.0f}", f"{floor:.2f}", ratios, f"{cosine:.6f}"],
        "llama.cpp": [""] * 4,
    }
    engine.close()
    return [
        [
            file.name,
            name,
            f"{load_s:.1f}",
            f"{speeds(w, found[name])['prefill'].value:.0f}",
            f"{_decode_s(found[name]) * 1e3:.1f}",
            *more[name],
        ]
        for name, load_s in (("g4ir", ours_s), ("llama.cpp", theirs_s))
    ]


def _decode_s(rounds: list[list[RequestTiming]]) -> float:
    return median([x for many in rounds for request in many for x in request.itl])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", nargs=2, action="append", required=True)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    found = [line for path, file in args.pair for line in rows(path, Path(file), args)]
    text = aligned([HEAD, *found], indent=0)
    print(text, end="")
    if args.save:
        save("peer_llama", text)


if __name__ == "__main__":
    main()
