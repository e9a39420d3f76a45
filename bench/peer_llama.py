"""An engine beside llama.cpp, with the GGUF file that it was built from, on the CPU.

    python bench/peer_llama.py ENGINE FILE [--sequences 1,2,4,8] [--input-len 256] [--steps 12]
                               [--rounds 6] [--busy 0] [--program DIR] [--huge-pages] [--save]

An engine (`--max-batch` at least the largest of --sequences) and llama.cpp's Python binding (`pip
install llama-cpp-python`) load the same file in one process, with the same number of threads, and
are measured in turn: a prompt of one sequence, then decode steps of each batch size, after short
prompts. The memory's read rate is measured before and after each; where memory has two
speeds, rounds are grouped by it. `share`: bytes that a step must read / its time / read rate.
`--program DIR` adds `llama-batched-bench` of that folder (of ik_llama.cpp), run twice a round in a
process of its own with weights repacked at load; `--busy N` runs N busy processes at the same time.
Logits whose cosine is below 0.98 end the run with exit code 1. --save writes
bench/results/peer_llama.txt.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import g4ir  # before torch: it sets how threads wait

import torch  # isort: skip
from common import arguments, finish, process, seconds

from g4ir.backends.sampling import SamplingParams
from g4ir.bench.report import request_costs
from g4ir.bench.roof import Meter
from g4ir.bench.runners import draw_tokens, plan_workload
from g4ir.check.llama import LlamaSession
from g4ir.engine.requests import Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.ui.table import aligned

HEAD = ["memory", "read GB/s", "rounds", "what", "g4ir", "share", "llama.cpp", "g4ir is faster by"]
#: factor between the highest and the lowest read rate from which on rounds are two groups
STATES = 1.25
#: minimum cosine between the logits of g4ir and of llama.cpp on the same quantised weights
AGREE = 0.98
#: key of the prompt's times (those of steps have their batch size); prompt tokens before decode
#: steps
PROMPT, HELD = 0, 32


class Ours:
    """The engine: a session for prompts, a scheduler for decode steps."""

    def __init__(self, engine: Any, sequences: tuple[int, ...]) -> None:
        most = engine.limits.max_batch
        config = SchedulerConfig(tuple(sorted({*sequences, most})), prefill_first=True)
        self.session, self._scheduler = engine.session(1), Scheduler(engine, config)

    def prompt(self, tokens: torch.Tensor) -> torch.Tensor:
        """Prefill tokens i64[1,T] in an empty session; return the last token's logits
        f32[1,vocab]."""
        self.session.reset()
        logits: torch.Tensor = self.session.prefill(tokens)
        return logits.float()

    def steps(self, tokens: torch.Tensor, count: int) -> float:
        """Return the mean seconds of `count` decode steps after prompts i64[B,T]."""
        scheduler, params = self._scheduler, SamplingParams(ignore_eos=True)
        for row in tokens.tolist():
            scheduler.submit(Request(tuple(row), count + 1, params, reuse=False))
        scheduler.step()  # all prompts, and the first step
        start, before = time.perf_counter(), scheduler.totals.steps[len(tokens)]
        while scheduler.busy:
            scheduler.step()
        taken = time.perf_counter() - start
        return taken / (scheduler.totals.steps[len(tokens)] - before)


class Llama:
    """llama.cpp on a file, as `g4ir bench --peer llama.cpp` has it."""

    def __init__(self, file: str, room: int, sequences: int) -> None:
        self._session = LlamaSession(Path(file), sequences, room)
        self.label = self._session.label

    def prompt(self, tokens: torch.Tensor) -> torch.Tensor:
        self._session.reset()
        return self._session.step(tokens)

    def steps(self, tokens: torch.Tensor, count: int) -> float:
        """As `Ours.steps`."""
        chosen, start = self.prompt(tokens).argmax(-1), time.perf_counter()
        for _ in range(count):
            chosen = self._session.step(chosen[:, None]).argmax(-1)
        return (time.perf_counter() - start) / count


def by_program(folder: str, file: str, args: Any) -> Iterator[tuple[int, float]]:
    """Run llama-batched-bench; yield (batch size, seconds of a decode step) and (PROMPT,
    seconds)."""
    program, file = f"{Path(folder).resolve()}/llama-batched-bench", str(Path(file).resolve())
    words = [program, "-m", file, "-rtr", "-c", str(args.room)]
    words += ["-t", str(torch.get_num_threads()), "-ntg", str(args.steps)]
    pipe, runs = subprocess.PIPE, {HELD: ",".join(map(str, args.sequences)), args.input_len: "1"}
    for tokens, many in runs.items():
        given = [*words, "-npp", str(tokens), "-npl", many]
        with TemporaryDirectory() as logs:  # it writes one beside itself
            made = subprocess.run(
                given, cwd=logs, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=True
            )
        for cells in (line.split("|")[1:-1] for line in made.stdout.splitlines()):
            if len(cells) == 10 and cells[0].strip().isdigit():
                _, count, sequences, _, prompt_s, _, steps_s, *_ = map(float, cells)
                if tokens == HELD:
                    yield int(sequences), steps_s / count
                else:
                    yield PROMPT, prompt_s


def states(reads: list[float]) -> dict[str, list[int]]:
    """Return the indices of rounds with slow and with fast memory, by read rate; one group if the
    rates are within STATES."""
    low, high = min(reads), max(reads)
    if high < STATES * low:
        return {"one state": [*range(len(reads))]}
    fast = [i for i, r in enumerate(reads) if r > (low * high) ** 0.5]
    return {"slow": [i for i in range(len(reads)) if i not in fast], "fast": fast}


#: g4ir, llama.cpp or program -> batch size of a decode step, or PROMPT -> seconds, one per round
Found = dict[str, defaultdict[int, list[float]]]


def measure(args: Any, ours: Ours, llama: Llama, tokens: torch.Tensor) -> tuple[list[float], Found]:
    """Run the rounds; return the median read rate of each in GB/s, and the seconds."""
    meter, reads = Meter("cpu", torch.bfloat16), []
    found: Found = {name: defaultdict(list) for name in ("g4ir", "llama.cpp", "program")}
    for n in args.sequences:
        ours.steps(tokens[:n, :HELD], 2)  # records its programs
    for _ in range(args.rounds):
        rates = [meter.measure().read]
        for n in (PROMPT, *args.sequences):
            for name, runner in (("g4ir", ours), ("llama.cpp", llama)):
                if n == PROMPT:
                    taken = seconds(lambda r=runner: r.prompt(tokens[:1]))  # type: ignore[misc]
                else:
                    gc.collect()
                    taken = runner.steps(tokens[:n, :HELD], args.steps)
                found[name][n].append(taken)
            rates.append(meter.measure().read)
        if args.program:
            for what, took in by_program(args.program, args.file, args):
                found["program"][what].append(took)
            rates.append(meter.measure().read)
        reads.append(median(rates) / 1e9)
    return reads, found


def rows(
    args: Any, reads: list[float], found: Found, nbytes: Callable[[int], int]
) -> Iterator[list[str]]:
    """Yield the table's lines: for slow and fast memory, the prompt and the steps of each batch
    size; `nbytes`: bytes that a step of a batch size must read."""
    yield HEAD + (["program", "g4ir is faster by"] if args.program else [])
    for state, at in states(reads).items():
        for what in (PROMPT, *args.sequences):
            taken = {
                name: median([by[what][i] for i in at]) for name, by in found.items() if by[what]
            }
            own = taken["g4ir"]
            rate = args.input_len if what == PROMPT else 0
            texts = {k: f"{rate / s:.0f}" if rate else f"{s * 1e3:.1f}" for k, s in taken.items()}
            share = nbytes(what) / own / 1e9 / median([reads[i] for i in at]) if what else 0
            name = f"step of {what}, ms" if what else f"prompt of {args.input_len}, tokens/s"
            cells = [state, f"{median([reads[i] for i in at]):.0f}", str(len(at)), name]
            cells += [texts["g4ir"], f"{share:.2f}" if what else ""]
            for peer in ("llama.cpp", "program")[: len(taken) - 1]:
                cells += [texts[peer], f"{taken[peer] / own:.2f}"]
            yield cells


def disagreement(cosine: float) -> str | None:
    """Return why the two are not comparable; None if their outputs agree up to rounding. NaN never
    agrees."""
    if cosine >= AGREE:
        return None
    what = f"the logits' cosine to llama.cpp's is {cosine:.6f}, expected {AGREE} or more"
    return f"{what}: build the engine from this file; if it is, one of them is wrong"


def main() -> str | None:
    """Run the benchmark; return an error text if the logits disagree, None otherwise."""
    flags: dict[str, Any] = {"sequences": (1,), "input_len": 256, "steps": 12, "rounds": 6}
    args = arguments(__doc__, "engine", "file", **flags, busy=0, program=None, huge_pages=False)
    with g4ir.load_engine(args.engine, huge_pages=args.huge_pages) as engine, ExitStack() as busy:
        most = max(args.sequences)
        w = plan_workload([engine.limits], args.input_len, args.steps + 1, most)
        args.room = most * w.max_len + 1
        drawn = draw_tokens(w, engine)
        tokens = drawn[:, : args.input_len]
        ours = Ours(engine, args.sequences)
        llama = Llama(args.file, w.max_len + 1, most)
        logits = [r.prompt(tokens[:1]).flatten() for r in (ours, llama)]
        cosine = float(torch.nn.functional.cosine_similarity(*logits, dim=0))
        if refused := disagreement(cosine):
            return refused
        for _ in range(args.busy):
            busy.enter_context(process(sys.executable, "-c", "while True: pass"))
        reads, found = measure(args, ours, llama, tokens)

        def nbytes(sequences: int) -> int:
            size = plan_workload([engine.limits], HELD, args.steps + 1, sequences)
            return request_costs(engine, size)["decode"].needed_bytes

        table = aligned(rows(args, reads, found, nbytes), indent=0)
    label = f"beside {llama.label}; cosine of logits {cosine:.6f}"
    finish(args, "peer_llama", f"{label}\n\n{table}")
    return None


if __name__ == "__main__":
    sys.exit(main())
