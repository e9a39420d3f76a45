"""`g4ir bench`; what it measures with takes seconds to import."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from g4ir.artefact.directory import is_engine, read_manifest
from g4ir.errors import InputError
from g4ir.spec.record import SUFFIXES
from g4ir.ui import console
from g4ir.ui.files import write_file
from g4ir.ui.plots import check_plot
from g4ir.weights.origin import find_model

from .common import Draft, FirstUse, Load, emit, strict
from .verb import ANY_MODEL, Verb, argument, flag, flag_of, setting

if TYPE_CHECKING:
    from g4ir.bench.report import Values
    from g4ir.engine.engine import Engine

STDOUT = "-"


class Bench(Verb):
    """Measure engines, and report; or print the table of reports."""

    engines: list[str] = argument(f"{ANY_MODEL}; two are compared", "MODEL", "*")
    first_use: FirstUse
    input_len: int | None = flag("prompt length in tokens (default 512, or what fits)", None, "N")
    output_len: int | None = flag("generated tokens per sequence (default 64)", None, "N")
    batch: int = flag("batch size (default 1)", 1, "N")
    context: int = flag("tokens already in the KV cache of each sequence (default 0)", 0, "N")
    peer: list[str] = flag("baseline: hf, hf-static, hf-compile or llama.cpp (GGUF)", (), "NAME")
    checkpoint: str | None = flag("checkpoint of the baseline (default: MODEL's)", None, "DIR|FILE")
    text: str | None = flag("take prompts from a text, not random tokens", None, "FILE")
    draft: str = flag("also measure drafts: ngram, or mtp (draft model)", "none", "SOURCE")
    rounds: int = flag("measured rounds (default 5)", 5, "N")
    warmup: int = flag("warm-up requests (default 2)", 2, "N")
    json: str | None = flag(
        "print the report as JSON, or write it to FILE", None, "FILE", nargs="?", const="-"
    )
    table: bool = flag("print a Markdown table; of reports A.json .. if they are MODEL", False)
    plot: str | None = flag("plot the results, .png or .svg", None, "FILE")
    seed: int = setting("seed of the random tokens", 0)
    load: Load

    def __post_init__(self) -> None:
        if self.checkpoint is not None and not self.peer:
            raise InputError("--checkpoint is of the baseline: name it with --peer")
        if self.seed and self.text is not None:
            raise InputError("--seed is of random tokens: leave it out with --text")

    @property
    def file(self) -> Path | None:
        """The file of the report."""
        return None if self.json in (None, STDOUT) else Path(str(self.json))

    def __call__(self) -> int:
        from g4ir.bench.text import markdown, read_report

        if self.table and self.engines and all(Path(m).suffix == ".json" for m in self.engines):
            if extra := ", ".join(map(flag_of, sorted(self.explicit - {"engines", "table"}))):
                raise InputError(f"{extra}: of reports the table alone is printed; leave it out")
            print(markdown([read_report(m) for m in self.engines]))
            return 0
        self._check_arguments()
        report = self._measured(
            self.first_use.engines(self.engines, Draft(draft=self.draft, draft_tokens=None))
        )
        self._write(report)
        return 0 if report["outputs_agree"] else 1

    def _check_arguments(self) -> None:
        from g4ir.bench.run import check_options

        if not 1 <= len(self.engines) <= 2:
            raise InputError(f"bench takes one engine or two, not {len(self.engines)}")
        if self.file and not self.file.absolute().parent.is_dir():
            raise InputError(f"{self.file}: no such directory to write the report to")
        if self.file and self.file.exists() and self.file.suffix != ".json":
            raise InputError(f"--json {self.file}: is there, and no report: give --json last")
        if self.text and not Path(self.text).is_file():
            raise InputError(f"--text {self.text}: no such file")
        if self.plot:
            check_plot(self.plot)
        check_options(self.peer, self.rounds, self.warmup)

    def _measured(self, paths: Sequence[str]) -> Values:
        from g4ir.bench.run import run_bench
        from g4ir.bench.runners import plan_workload

        names = ("input_len", "output_len", "batch", "context", "seed", "text")
        sizes = {name: vars(self)[name] for name in names}
        workload = plan_workload(
            [read_manifest(Path(path)).config.limits for path in paths], **sizes
        )
        engines: list[Engine] = []
        seconds = []
        with console.Progress() as progress, ExitStack() as opened:
            for path in paths:
                start = time.perf_counter()
                engines.append(self.load.engine(path, progress))
                opened.callback(engines[-1].close)
                seconds.append(time.perf_counter() - start)
            return run_bench(
                engines,
                workload,
                peers=self.peer,
                rounds=self.rounds,
                warmup=self.warmup,
                checkpoint=self._checkpoint(),
                load_s=seconds,
                draft=self.draft,
                progress=progress,
            )

    def _checkpoint(self) -> str | None:
        """Return the checkpoint of a baseline: --checkpoint, or the weights of the first MODEL."""
        model = self.engines[0]
        explicit = self.checkpoint or self.first_use.options.random_weights is not None
        if explicit or is_engine(Path(model)) or Path(model).suffix in SUFFIXES:
            return self.checkpoint
        return str(find_model(model, "", self.first_use.revision)[1])

    def _write(self, report: Values) -> None:
        from g4ir.bench.text import markdown, plot_bench, text

        values = strict(report)
        if self.json == STDOUT:
            emit(values)
        else:
            print(markdown([report]) if self.table else text(report))
        for warning in report["warnings"]:
            console.say(f"warning: {warning}")
        if self.file:
            write_file(self.file, [(json.dumps(values, indent=1) + "\n").encode()])
        if self.plot:
            plot_bench(self.plot, {"": report})
