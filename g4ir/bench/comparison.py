"""Compares weight formats of a model: bytes, quality on a text against a baseline, speed.

Each format has two engines: the logits of all positions, which a score needs, slow prompts. At most
two engines are loaded at once, the baseline and one format, and their timed rounds alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from g4ir.backends.reference import text_graphs
from g4ir.check.documents import Reader, Window
from g4ir.check.reference import plain_packing
from g4ir.check.score import (
    Scored,
    Sums,
    require_same_tokens,
    score_sessions,
    score_windows,
    window_chunk,
)
from g4ir.check.tokens import random_ids
from g4ir.engine.engine import TOKENIZER, Engine
from g4ir.ui.plots import figure
from g4ir.ui.progress import Progress
from g4ir.ui.table import markdown_table
from g4ir.ui.units import size_text
from g4ir.weights.origin import GgufFile

from .llama import LlamaRunner
from .measure import Stat, requests_per_round, speeds, timed_request
from .report import Values, plain
from .runners import (
    BenchRunner,
    EngineRunner,
    RequestTiming,
    Rounds,
    Workload,
    draw_tokens,
    plan_workload,
)
from .system import busy_text, environment, load_average
from .text import stat_text

#: text that is scored by default
SAMPLE = Path(__file__).with_name("sample.txt")
#: maximum tokens of the default workload, output and in the KV cache
MAX_OUTPUT = 32
ROUNDS = 3
MIB = 1 << 20
#: random tokens that a model without a tokenizer is compared on
RANDOM_TOKENS = 256
NO_TOKENIZER = (
    "the model has no tokenizer: it is compared on random tokens, whose perplexity means nothing"
)
NOISY = "rounds differ by more than 30 %: compare speeds on a quiet machine"
#: what a baseline has of quality
SCORES = ("nll", "ppl")
#: rate -> its key among `speeds`
RATES = {
    "prompt_tokens_per_s": "prefill_throughput",
    "decode_tokens_per_s": "decode_per_user_throughput",
}
Load = Callable[[str], Engine]


@dataclass(frozen=True)
class Format:
    """A row: directories of an engine with all_logits and of one without; or a GGUF file in
    llama.cpp. `other`: it may be of another model, with other tokens."""

    name: str
    scored: str = ""
    timed: str = ""
    file: Path | None = None
    other: bool = False


class Size(NamedTuple):
    """Bytes of the weights of the text model as stored, and their number of elements."""

    bytes: int
    elements: int


@dataclass(frozen=True)
class Text:
    """UTF-8 files, or the sample; `tokens`: how many of them at most."""

    files: Sequence[str] = ()
    tokens: int = 1 << 62

    def windows(self, engine: Engine, max_seq: int) -> list[Window]:
        """Return the text as windows; random tokens if the sample cannot be tokenised."""
        reader = Reader(engine, max_seq, self.tokens)
        if self.files or (engine.path / TOKENIZER).is_file():
            return [*reader.files(self.files or [str(SAMPLE)])]
        return [*reader.values(random_ids(engine, (min(RANDOM_TOKENS, max_seq),)).tolist())]


def compare_formats(
    formats: Sequence[Format], text: Text, load: Load, progress: Progress
) -> Values:
    """Measure formats, the first of which is the baseline; return the report.

    Rows have bytes, elements and bits_per_weight; NLL (nats a token) and perplexity of the text,
    KL(baseline || format) and the share of tokens with the same best token (null for the baseline);
    tokens per second of prompts and of one sequence's decode steps, as {value, spread}.
    """
    start = load_average()
    with closing(load(formats[0].scored)) as engine:
        max_seq = engine.limits.max_seq
        windows = text.windows(engine, max_seq)
        rows = [*_qualities(engine, formats, windows, load, progress)]
        env = environment(engine.device)
        facts: Values = {"kind": "g4ir compare", "model_id": engine.spec.name}
        notes = [] if text.files or (engine.path / TOKENIZER).is_file() else [NO_TOKENIZER]
    with closing(load(formats[0].timed)) as engine:
        w = plan_workload([engine.limits])
        w = replace(w, output_len=min(w.output_len, MAX_OUTPUT))
        for row, rates in zip(rows, _speeds(engine, formats, w, load, progress), strict=True):
            row |= rates
    stats = [row[rate] for row in rows for rate in RATES]
    busy = busy_text(start) or (NOISY if any(s.noisy for s in stats) else None)
    tokens = sum(len(window.ids) for window in windows)
    facts |= {"text": [*text.files] or SAMPLE.name, "tokens": tokens, "workload": vars(w)}
    facts |= {"env": env, "rows": rows, "notes": notes, "warnings": [busy] if busy else []}
    return dict(plain(facts))


def _qualities(
    engine: Engine,
    formats: Sequence[Format],
    windows: Sequence[Window],
    load: Load,
    progress: Progress,
) -> Iterator[Values]:
    """Yield size and quality of each format; `engine` is the baseline."""
    size, chunk = weight_size(engine), window_chunk([engine])
    for f in formats[1:]:
        progress(f"scoring {f.name}")
        with ExitStack() as stack:
            if f.file:
                longest = max(len(w.ids) for w in windows)
                other: Scored = LlamaRunner(f.file, 1, longest, engine.device)
                other_size, rows = Size(_tensor_bytes(f.file, engine), size.elements), chunk
            else:
                loaded = stack.enter_context(closing(load(f.scored)))
                if f.other:
                    require_same_tokens(engine, loaded, f.name)
                other, other_size = loaded.session(), weight_size(loaded)
                rows = window_chunk([engine, loaded])
            scores = score_sessions([other, engine.session()], windows, rows, progress)
            sums = sum((s.sums for s in scores), Sums())
        if f is formats[1]:
            yield _row(formats[0], size, {k: sums.means()[f"baseline_{k}"] for k in SCORES})
        yield _row(f, other_size, sums.means())
    if not formats[1:]:
        sums = sum((s.sums for s in score_windows([engine], windows, progress)), Sums())
        yield _row(formats[0], size, sums.means())


def _row(f: Format, size: Size, means: Values) -> Values:
    means = {"kl": None, "same_top": None, **means}
    row = {"name": f.name, **size._asdict(), "bits_per_weight": 8 * size.bytes / size.elements}
    return row | {key: means[key] for key in ("nll", "ppl", "kl", "same_top")}


def weight_size(engine: Engine) -> Size:
    """Return the size of the text model: bytes as stored, elements before quantisation."""
    stored = text_graphs(engine.program).params().values()
    elements = plain_packing(engine).program.params().values()
    return Size(sum(v.type.nbytes() for v in stored), sum(v.type.numel() for v in elements))


def _tensor_bytes(file: Path, engine: Engine) -> int:
    opened = GgufFile(file).open(engine.spec, (), engine.dtype)
    opened.close()
    return sum(e.nbytes for header in opened.headers for e in header.entries.values())


def _speeds(
    engine: Engine, formats: Sequence[Format], w: Workload, load: Load, progress: Progress
) -> list[dict[str, Stat]]:
    """Return the rates of each format; the baseline's rounds alternate with those of the others."""
    tokens = draw_tokens(w, engine)
    baseline = EngineRunner(engine, w.batch)
    first, *_ = (_timed(baseline, w, tokens, 1) for _ in range(2))
    count, measured = requests_per_round(first[0].e2e), list[Rounds]()
    baseline_rounds: list[list[RequestTiming]] = []
    for f in formats[1:]:
        progress(f"timing {f.name}")
        with ExitStack() as stack:
            if f.file:
                runner: BenchRunner = LlamaRunner(f.file, w.batch, w.max_len, engine.device)
            else:
                runner = EngineRunner(stack.enter_context(closing(load(f.timed))), w.batch)
            _timed(runner, w, tokens, 1)
            rounds = []
            for _ in range(ROUNDS):
                baseline_rounds.append(_timed(baseline, w, tokens, count))
                rounds.append(_timed(runner, w, tokens, count))
            measured.append(rounds)
    baseline_rounds = baseline_rounds or [_timed(baseline, w, tokens, count) for _ in range(ROUNDS)]
    by_name = [speeds(w, rounds) for rounds in (baseline_rounds, *measured)]
    return [{rate: rates[key] for rate, key in RATES.items()} for rates in by_name]


def _timed(
    runner: BenchRunner, w: Workload, tokens: torch.Tensor, count: int
) -> list[RequestTiming]:
    runner.set_context(tokens[:, : w.context])
    return [timed_request(runner, w, tokens) for _ in range(count)]


#: heading -> a row's cell
COLUMNS: dict[str, Callable[[Values], str]] = {
    "": lambda r: r["name"],
    "weights": lambda r: size_text(r["bytes"]),
    "bits a weight": lambda r: f"{r['bits_per_weight']:.2f}",
    "NLL": lambda r: _fixed(r["nll"], 4),
    "perplexity": lambda r: _fixed(r["ppl"], 2),
    "KL": lambda r: _fixed(r["kl"], 4),
    "same top token": lambda r: "-" if r["same_top"] is None else f"{r['same_top']:.1%}",
    "prompt, tokens/s": lambda r: stat_text(Stat(**r["prompt_tokens_per_s"])),
    "decode, tokens/s": lambda r: stat_text(Stat(**r["decode_tokens_per_s"])),
}


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def comparison_table(report: Values) -> str:
    """Return the report as a Markdown table."""
    rows = ([cell(row) for cell in COLUMNS.values()] for row in report["rows"])
    return markdown_table([[*COLUMNS], *rows])


def plot_comparison(path: str | Path, report: Values) -> None:
    """Plot NLL over bytes, and tokens per second of prompt and decode."""
    rows = report["rows"]
    with figure(path, 11, 4.2, columns=3) as axes:
        for i, row in enumerate(rows):
            axes[0].plot(row["bytes"] / MIB, row["nll"], "o", color=f"C{i}", label=row["name"])
            for panel, rate in zip(axes[1:], RATES):
                stat = row[rate]
                panel.bar(row["name"], stat["value"], yerr=stat["spread"], color=f"C{i}")
        axes[0].set(xlabel="weights, MiB", ylabel="NLL, nats a token", title="quality and size")
        axes[0].legend(fontsize="small")
        for panel, rate in zip(axes[1:], RATES):
            panel.tick_params(axis="x", rotation=30)
            panel.set(title=f"{rate.partition('_')[0]}, tokens/s", ylim=(0, None))
