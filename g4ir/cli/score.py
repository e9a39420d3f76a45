"""`g4ir score`: log-probabilities of given texts."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError
from g4ir.ui import console
from g4ir.ui.table import Columns, aligned, cells

from .common import OnEngine, Programs, emit
from .verb import Count, flag, json_flag

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine

#: columns of the table; those of a baseline only if there is one
COLUMNS: Columns = {
    "document": ("name", str),
    "tokens": ("tokens", str),
    "NLL": ("nll", "{:.4f}".format),
    "perplexity": ("ppl", "{:.2f}".format),
    "baseline": ("baseline_nll", "{:.4f}".format),
    "KL": ("kl", "{:.6f}".format),
    "same top": ("same_top", "{:.1%}".format),
}


class ScoreTexts(OnEngine):
    """Print the log-probabilities of given texts."""

    text: list[str] = flag("UTF-8 text, one document", (), "FILE", one_of=True)
    jsonl: str | None = flag("JSON lines with text or tokens", None, "FILE", one_of=True)
    tokens: Count | None = flag("maximum number of tokens, such as 4K (default: all)", None, "N")
    json: bool = json_flag()
    load: Programs

    def __call__(self) -> int:
        from g4ir.chat.text_files import check_files

        check_files(*(([self.jsonl], "--jsonl") if self.jsonl else (self.text, "--text")))
        with self.opened(self.load, all_logits=True) as (engine, progress):
            return report([engine], self.json, progress, self.text, self.jsonl, self.tokens)


def report(
    engines: Sequence[Engine],
    as_json: bool,
    progress: console.Progress,
    text: Sequence[str],
    jsonl: str | None = None,
    tokens: int | None = None,
    head: Mapping[str, Any] | None = None,
) -> int:
    """Print the scores of text files, or of a file of JSON lines (at most `tokens` tokens), and the
    totals. With `head`, facts that are printed too, the scores of single tokens are left out. Exit
    code 1 if a total is not finite."""
    from g4ir.check.documents import Reader
    from g4ir.check.score import Sums, score_windows

    longest = min(e.limits.max_seq for e in engines)
    reader = Reader(engines[0], longest, tokens or sys.maxsize)
    windows = reader.lines(jsonl) if jsonl else reader.files(text)
    total, rows, table = Sums(), list[dict[str, Any]](), list[dict[str, Any]]()
    for one in score_windows(engines, windows, progress):
        total += one.sums
        means, scores = one.sums.means(), {"token_ids": one.ids, "logprobs": one.logprobs}
        rows.append({"id": one.document, "part": one.part, **means, **({} if head else scores)})
        table.append({"name": one.name, **means})
    if not rows:
        few = f"--tokens {tokens}: too few to score one; give at least 2"
        raise InputError(f"{jsonl}: no documents among its lines" if reader.max_tokens else few)
    if as_json:
        emit({"documents": rows, **(head or {}), **total.means()})
    else:
        console.Progress.clear()
        if head:
            against = f" against {head['against']}" if head["against"] else ""
            print(f"{head['engine']}{against}")
        table += [{"name": "all", **total.means()}] if len(table) > 1 else []
        columns = {heading: c for heading, c in COLUMNS.items() if c[0] in table[0]}
        print(aligned(cells(columns, table)), end="", flush=True)
    return 0 if all(math.isfinite(x) for x in (total.nll, *(total.against or ()))) else 1
