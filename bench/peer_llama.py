"""An engine beside llama.cpp, with the GGUF file that it was built from, on the CPU.

    python bench/peer_llama.py ENGINE FILE [--input-len 512] [--output-len 33] [--rounds 3] [--save]

An engine and llama.cpp's Python binding (`pip install llama-cpp-python`) hold the same file in one
process, with as many threads, and take turns with a read of the memory. `floor` is the share of
that read's rate at which an engine reads the bytes that its step needs. --save writes
bench/results/peer_llama.txt.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, finish, seconds

import g4ir
from g4ir.bench.agreement import logits_of
from g4ir.bench.measure import TAKE, interleave, median, over, speeds, timed_request, turn
from g4ir.bench.roof import Meter, middle
from g4ir.bench.runners import BenchRunner, EngineRunner, Workload, draw_tokens, plan_workload
from g4ir.bench.work import find_work
from g4ir.ui.table import aligned

HEAD = ["file", "", "load s", "prefill tokens/s", "decode ms", "read GB/s", "floor"]
HEAD += ["llama.cpp / g4ir: prefill, decode", "cosine"]


class LlamaRunner(BenchRunner):
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


def main() -> None:
    args = arguments(__doc__, "engine", "file", input_len=512, output_len=33, rounds=3)
    made: dict[str, Any] = {}
    loads = [seconds(lambda: made.update(engine=g4ir.load_engine(args.engine)))]
    engine = made["engine"]
    w = plan_workload([engine.limits], args.input_len, args.output_len)
    tokens = draw_tokens(w, engine)
    loads.append(seconds(lambda: made.update(llama=LlamaRunner(Path(args.file), w))))
    runners = {"g4ir": EngineRunner(engine, 1), "llama.cpp": made["llama"]}
    logits = [logits_of(r, w, tokens)[0] for r in runners.values()]
    for runner in runners.values():
        timed_request(runner, w, tokens)
    turns = {name: partial(turn, r, w, tokens, 1) for name, r in runners.items()}
    rates, found = interleave(args.rounds, Meter("cpu", torch.bfloat16).measure, turns)
    fastest = middle(rates).bandwidth
    lines = [HEAD]
    for (name, many), load_s in zip(found.items(), loads, strict=True):
        decode_s = median([x for round_ in many for request in round_ for x in request.itl])
        lines.append([Path(args.file).name, name, f"{load_s:.1f}"])
        lines[-1] += [f"{speeds(w, many)['prefill'].value:.0f}", f"{decode_s * 1e3:.1f}"]
        if name == "g4ir":
            nbytes = find_work(engine, w, tokens).decode.cost().needed_bytes
            pair = found["llama.cpp"], many
            ratios = (f"{over(*pair, TAKE[k]).value:.2f}" for k in ("ttft", "itl"))
            cosine = float(torch.nn.functional.cosine_similarity(*logits, dim=0))
            lines[-1] += [f"{fastest / 1e9:.0f}", f"{nbytes / fastest / decode_s:.2f}"]
            lines[-1] += [", ".join(ratios), f"{cosine:.6f}"]
    finish(args, "peer_llama", aligned(lines, indent=0))
    engine.close()


if __name__ == "__main__":
    main()
