"""Compares weight formats of a model: bytes, quality on a text against a baseline, speed.

A format has two engines (or is a GGUF file), since all_logits, which scoring needs, slows prefill.
At most two are loaded at once, the baseline's and one format's, and their timed rounds alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from g4ir.backends.reference import text_graphs
from g4ir.check.documents import Reader, Window
from g4ir.check.llama import LlamaSession
from g4ir.check.reference import plain_packing
from g4ir.check.score import Sums, require_same_tokens, score_sessions, window_chunk
from g4ir.check.tokens import random_ids
from g4ir.engine.engine import TOKENIZER, Engine
from g4ir.ui.plots import figure
from g4ir.ui.progress import Progress
from g4ir.ui.table import Columns, cells, markdown_table
from g4ir.ui.units import size_text
from g4ir.weights.origin import GgufFile

from .measure import Stat, measure_rounds, speeds
from .report import Values, plain
from .runners import BenchRunner, EngineRunner, Workload, draw_tokens, plan_workload
from .system import environment
from .text import plot_bars, stat_text

#: text that is scored by default
SAMPLE = Path(__file__).with_name("sample.txt")
#: maximum output tokens of the timed workload, and number of timed rounds
MAX_OUTPUT = 32
ROUNDS = 3
MIB = 1 << 20
#: maximum random tokens that are scored for a model without a tokenizer
RANDOM_TOKENS = 256
NO_TOKENIZER = "no tokenizer: scored on random tokens, on which perplexity has no meaning"
#: quality metrics that need no baseline
SCORES = ("nll", "ppl")
#: rate in the report -> its key in `speeds`
RATES = {
    "prompt_tokens_per_s": "prefill_throughput",
    "decode_tokens_per_s": "decode_per_user_throughput",
}
Load = Callable[[str], Engine]


@dataclass(frozen=True)
class Format:
    """A row of the table: directories of an engine with all_logits (`scored`) and of one without
    (`timed`); or a GGUF file, run by llama.cpp. `other`: the row may be another model, whose
    tokenizer must be checked."""

    name: str
    scored: str = ""
    timed: str = ""
    file: Path | None = None
    other: bool = False

    @contextmanager
    def runner(self, load: Load, path: str, w: Workload, device: str) -> Iterator[BenchRunner]:
        """Context with a BenchRunner of the GGUF file, or else of the engine in the directory
        `path` (`scored` or `timed`), opened by `load`."""
        if self.file:
            session = LlamaSession(self.file, w.batch, w.max_len, device)
            yield BenchRunner(self.name, session.label, session)
            return
        with closing(load(path)) as engine:
            yield EngineRunner(engine, w.batch)


class Size(NamedTuple):
    """Bytes of the weights of the text model as stored, and their number of elements."""

    bytes: int
    elements: int


def compare_formats(
    formats: Sequence[Format], files: Sequence[str], tokens: int, load: Load, progress: Progress
) -> Values:
    """Measure formats, the first of which is the baseline, and return the report. Texts are `files`
    (default: the sample, or random tokens without a tokenizer), cut to `tokens` tokens in all;
    `load` opens an engine directory.

    Rows have bytes, elements and bits_per_weight; NLL (nats a token) and perplexity of the text,
    KL(baseline || format) and the share of tokens with the same best token (null for the baseline);
    tokens per second of prompts and of one sequence's decode steps, as {value, spread}.
    """
    others = formats[1:]
    with closing(load(formats[0].scored)) as engine:
        reader, notes = Reader(engine, engine.limits.max_seq, tokens), list[str]()
        if files or (engine.path / TOKENIZER).is_file():
            windows = [*reader.files(files or [str(SAMPLE)])]
        else:
            count, notes = min(RANDOM_TOKENS, engine.limits.max_seq), [NO_TOKENIZER]
            windows = [*reader.values(random_ids(engine, (count,)).tolist())]
        rows = _qualities(engine, formats, windows, load, progress)
        facts: Values = {"kind": "g4ir compare", "model_id": engine.spec.name}
        facts |= {"env": environment(engine.device), "text": [*files] or [*notes, SAMPLE.name][0]}
    with closing(load(formats[0].timed)) as engine:
        w = plan_workload([engine.limits])
        w = replace(w, output_len=min(w.output_len, MAX_OUTPUT))
        ids, baseline = draw_tokens(w, engine), EngineRunner(engine, w.batch)
        rounds = [baseline.rounds]
        for f in others:
            progress(f"timing {f.name}")
            with f.runner(load, f.timed, w, engine.device) as runner:
                measure_rounds([baseline, runner], w, ids, ROUNDS)
                rounds.append(runner.rounds)
        if not others:
            measure_rounds([baseline], w, ids, ROUNDS)
    for row, timings in zip(rows, rounds, strict=True):
        rates = speeds(w, timings)
        row |= {rate: rates[key] for rate, key in RATES.items()}
    facts |= {"tokens": sum(len(window.ids) for window in windows), "workload": vars(w)}
    return dict(plain(facts | {"rows": rows, "notes": notes}))


def _qualities(
    engine: Engine,
    formats: Sequence[Format],
    windows: Sequence[Window],
    load: Load,
    progress: Progress,
) -> list[Values]:
    """Return each format's row with name, size and quality; `engine` is the baseline's."""

    def score(sessions: Sequence[Any], engines: Sequence[Engine]) -> Values:
        scores = score_sessions(sessions, windows, window_chunk(engines), progress)
        return sum((s.sums for s in scores), Sums()).means()

    size, rows, means = weight_size(engine), list[Values](), Values()
    w = Workload(max((len(w.ids) for w in windows), default=1), 1)
    for f in formats[1:]:
        progress(f"scoring {f.name}")
        with f.runner(load, f.scored, w, engine.device) as runner:
            other = runner.engine
            if other and f.other:
                require_same_tokens(engine, other, f.name)
            engines = [engine, other] if other else [engine]
            means = score([runner.session, engine.session()], engines)
            stored = weight_size(other) if other else Size(_file_bytes(f, engine), size.elements)
            rows.append(_row(f, stored, means))
    if not rows:
        return [_row(formats[0], size, score([engine.session()], [engine]))]
    return [_row(formats[0], size, {k: means[f"baseline_{k}"] for k in SCORES}), *rows]


def _row(f: Format, size: Size, means: Values) -> Values:
    row = {"name": f.name, **size._asdict(), "bits_per_weight": 8 * size.bytes / size.elements}
    return row | {key: means.get(key) for key in (*SCORES, "kl", "same_top")}


def weight_size(engine: Engine) -> Size:
    """Return the text model's weight bytes as stored, and its number of elements."""
    stored = text_graphs(engine.program).params().values()
    elements = plain_packing(engine).program.params().values()
    return Size(sum(v.type.nbytes() for v in stored), sum(v.type.numel() for v in elements))


def _file_bytes(f: Format, engine: Engine) -> int:
    assert f.file
    opened = GgufFile(f.file).open(engine.spec, (), engine.dtype)
    opened.close()
    return sum(e.nbytes for header in opened.headers for e in header.entries.values())


COLUMNS: Columns = {
    "": ("name", str),
    "weights": ("bytes", size_text),
    "bits a weight": ("bits_per_weight", "{:.2f}".format),
    "NLL": ("nll", "{:.4f}".format),
    "perplexity": ("ppl", "{:.2f}".format),
    "KL": ("kl", "{:.4f}".format),
    "same top token": ("same_top", "{:.1%}".format),
    **{f"{rate.split('_')[0]}, tokens/s": (rate, lambda s: stat_text(Stat(**s))) for rate in RATES},
}


def comparison_table(report: Values) -> str:
    """Return the report as a Markdown table."""
    return markdown_table(cells(COLUMNS, report["rows"]))


def plot_comparison(path: str | Path, report: Values) -> None:
    """Plot NLL against weight bytes, and the rates of prompt and decode in tokens per second."""
    rows = report["rows"]
    with figure(path, 11, 4.2, columns=3) as axes:
        for i, row in enumerate(rows):
            axes[0].plot(row["bytes"] / MIB, row["nll"], "o", color=f"C{i}", label=row["name"])
        axes[0].set(xlabel="weights, MiB", ylabel="NLL, nats a token", title="quality and size")
        axes[0].legend(fontsize="small")
        for panel, rate in zip(axes[1:], RATES):
            panel.tick_params(axis="x", rotation=30)
            values = {row["name"]: Stat(**row[rate]) for row in rows}
            plot_bars(panel, f"{rate.partition('_')[0]}, tokens/s", values)
