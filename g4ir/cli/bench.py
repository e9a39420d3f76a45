"""`g4ir bench`. Imports of g4ir.bench are deferred, since they take seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from g4ir.artefact.directory import is_engine, read_manifest
from g4ir.errors import InputError
from g4ir.ui import console
from g4ir.ui.files import write_file
from g4ir.ui.plots import check_plot

from .common import Draft, FirstUse, Load, emit, strict
from .verb import ANY_MODEL, Counts, Verb, argument, flag, flag_of

if TYPE_CHECKING:
    from g4ir.bench.report import Values

STDOUT = "-"
TERMS = """\
TTFT: time to first token; ITL: time between two tokens; E2E: time of a request;
MFU, MBU: share of the measured FLOP/s and memory bandwidth; ±: where 95 % of further
rounds lie
An engine is built on first use for the largest of --batch, unless --max-batch is given."""


class Bench(Verb):
    """Measure engines and report the results, or print a table of earlier reports."""

    epilog = TERMS
    engines: list[str] = argument(f"{ANY_MODEL}; two are compared", "MODEL", "*")
    first_use: FirstUse
    input_len: Counts | None = flag("prompt lengths (default 512, or what fits)", None, "32,512")
    output_len: int | None = flag("tokens to generate (default 64, or what fits)", None, "N")
    batch: Counts | None = flag("batch sizes, such as 1,4 (default 1)", None, "N,..")
    context: int = flag("tokens already in the KV cache of each sequence (default 0)", 0, "N")
    peer: list[str] = flag("baseline: hf, hf-static, hf-compile or llama.cpp (GGUF)", (), "NAME")
    checkpoint: str | None = flag("checkpoint of the baseline (default: MODEL's)", None, "DIR|FILE")
    text: str | None = flag("take prompts from a text, not random tokens", None, "FILE")
    draft: str = flag("also measure speculative decoding: ngram or mtp", "none", "SOURCE")
    rounds: int = flag("measured rounds (default 5)", 5, "N")
    warmup: int = flag("warm-up requests (default 2)", 2, "N")
    json: str | None = flag(
        "print the report as JSON, or write it to FILE", None, "FILE", nargs="?", const="-"
    )
    table: bool = flag("print a Markdown table; of earlier reports if MODEL is A.json ..", False)
    plot: str | None = flag("plot the results, .png or .svg", None, "FILE")
    load: Load

    def __post_init__(self) -> None:
        if self.checkpoint is not None and not self.peer:
            raise InputError("--checkpoint is for a baseline: give --peer too")

    @property
    def file(self) -> Path | None:
        """The file to write the report to; None: no JSON, or JSON on stdout."""
        return None if self.json in (None, STDOUT) else Path(str(self.json))

    def __call__(self) -> int:
        from g4ir.bench.text import markdown, read_reports

        if self.table and self.engines and all(Path(m).suffix == ".json" for m in self.engines):
            if extra := ", ".join(map(flag_of, sorted(self.explicit - {"engines", "table"}))):
                raise InputError(f"{extra}: reports are printed as a table only; leave it out")
            print(markdown([report for m in self.engines for report in read_reports(m)]))
            return 0
        self._check_arguments()
        reports = self._measured(self._engine_paths())
        self._write(reports)
        return 0 if all(r["outputs_agree"] for r in reports) else 1

    def _engine_paths(self) -> list[str]:
        """Return the engine directories, built on first use; without --max-batch for the largest
        size of --batch."""
        use, options = self.first_use, self.first_use.options
        if "max_batch" not in self.explicit and not all(is_engine(Path(m)) for m in self.engines):
            largest = max(options.max_batch, *(self.batch or [1]))
            use = replace(use, options=replace(options, max_batch=largest))
        return use.engines(self.engines, Draft(draft=self.draft, draft_tokens=None))

    def _check_arguments(self) -> None:
        from g4ir.bench.run import check_options

        if not 1 <= len(self.engines) <= 2:
            raise InputError(f"bench takes one engine or two, not {len(self.engines)}")
        if self.file and not self.file.absolute().parent.is_dir():
            raise InputError(f"--json {self.file}: its directory does not exist")
        if self.file and self.file.exists() and self.file.suffix != ".json":
            raise InputError(f"--json {self.file}: exists; give FILE.json, or --json after MODEL")
        if self.plot:
            check_plot(self.plot)
        check_options(self.peer, self.rounds, self.warmup)

    def _measured(self, paths: Sequence[str]) -> list[Values]:
        from g4ir.bench.run import run_bench
        from g4ir.bench.runners import plan_workload

        sizes = {name: vars(self)[name] for name in ("output_len", "context", "text")}
        limits = [read_manifest(Path(path)).config.limits for path in paths]
        lengths: Sequence[int | None] = self.input_len or [None]
        pairs = product(self.batch or [1], lengths)
        workloads = [plan_workload(limits, n, batch=batch, **sizes) for batch, n in pairs]
        options = {name: vars(self)[name] for name in ("rounds", "warmup", "draft")}
        with console.Progress() as progress, ExitStack() as opened:
            engines = [
                opened.enter_context(closing(self.load.engine(path, progress))) for path in paths
            ]
            checkpoint = self.first_use.checkpoint(self.engines[0], self.checkpoint)
            options |= {"peers": self.peer, "checkpoint": checkpoint}
            return run_bench(engines, workloads, **options, progress=progress)

    def _write(self, reports: list[Values]) -> None:
        from g4ir.bench.report import SWEEP_KIND
        from g4ir.bench.text import markdown, plot_bench, text

        several = len(reports) > 1
        values = strict({"kind": SWEEP_KIND, "reports": reports} if several else reports[0])
        if self.json == STDOUT:
            emit(values)
        else:
            print(markdown(reports) if several or self.table else text(reports[0]))
        if self.file:
            write_file(self.file, [(json.dumps(values, indent=1) + "\n").encode()])
        if self.plot:
            plot_bench(self.plot, reports)
