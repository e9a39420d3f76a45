"""`g4ir compare`: weight formats of a model in one table: size, quality on a text, speed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from g4ir.errors import InputError
from g4ir.plan.options import BuildOptions
from g4ir.quant.recipe import find_quant_config
from g4ir.ui import console
from g4ir.ui.plots import check_plot
from g4ir.weights.checkpoint import GGUF

from .common import FIRST_USE_SETTINGS, FirstUse, Load, emit
from .models import named_model
from .verb import ANY_MODEL, Count, Verb, argument, flag, json_flag, options

if TYPE_CHECKING:
    from g4ir.bench.comparison import Format


class FormatUse(FirstUse, title="build on first use, if MODEL is no engine"):
    """Build options that all compared engines share; --quant is a flag of the verb."""

    options: BuildOptions = options(
        "backend device dtype max_seq random_weights settings", FIRST_USE_SETTINGS
    )


class CompareFormats(Verb):
    """Compare weight formats of a model: size, quality on a text, and speed."""

    models: list[str] = argument(
        f"{ANY_MODEL}: the baseline; others with the same tokenizer are further rows", "MODEL", "+"
    )
    quant: str | None = flag("weight formats of the first MODEL: int8,FILE.yaml, ..", None, "Q,..")
    text: list[str] = flag("UTF-8 text to score (default: a short sample)", (), "FILE")
    tokens: Count | None = flag("maximum tokens to score, such as 4K (default: all)", None, "N")
    peer: Literal["llama.cpp"] | None = flag("also run GGUF files in llama.cpp", None, "llama.cpp")
    json: bool = json_flag()
    plot: str | None = flag("plot quality, size and speed, .png or .svg", None, "FILE")
    first_use: FormatUse
    load: Load

    def __call__(self) -> int:
        from g4ir.bench.comparison import compare_formats, comparison_table, plot_comparison
        from g4ir.chat.text_files import check_files

        check_files(self.text, "--text")
        if self.plot:
            check_plot(self.plot)
        formats = [*self._formats()]
        with console.Progress() as progress:
            load = partial(self.load.engine, progress=progress)
            tokens = self.tokens or sys.maxsize
            report = compare_formats(formats, self.text, tokens, load, progress)
        emit(report) if self.json else print(comparison_table(report))
        for note in report["notes"]:
            console.say(f"note: {note}")
        if self.plot:
            plot_comparison(self.plot, report)
        return 0

    def _formats(self) -> Iterator[Format]:
        """Yield the formats, one per row of the table; their engines are built on first use."""
        from g4ir.bench.comparison import Format
        from g4ir.check.llama import binding

        words = [w.strip() for w in (self.quant or "none").split(",")]
        quants = [w for w in dict.fromkeys(words) if find_quant_config(w)]
        first, *others = self.models
        files = [Path(m) for m in self.models if Path(m).suffix == GGUF]
        if self.peer and not files:
            raise InputError(f"--peer {self.peer}: runs GGUF files, and no MODEL is one")
        if self.peer:
            binding()
        requantize = bool(quants and named_model(first).quant)
        if requantize:
            console.say(f"note: {first} is quantised: --quant applies to its dequantised weights")
        yield Format(_name(first), *self._engines(first, None))
        for quant in quants:
            yield Format(quant, *self._engines(first, quant, requantize))
        for model in others:
            yield Format(_name(model), *self._engines(model, None), other=True)
        for file in files if self.peer else ():
            yield Format(f"llama.cpp, {file.stem}", file=file, other=file != Path(first))

    def _engines(self, model: str, quant: str | None, requantize: bool = False) -> tuple[str, str]:
        """Return two engine directories of a format: with all_logits, for quality, and without, for
        speed."""
        options = replace(self.first_use.options, quant=quant, requantize=requantize)
        explicit = self.first_use.explicit - (set() if quant else {"quant"})
        use = replace(self.first_use, options=options, explicit=explicit)
        return use.engines([model], all_logits=True)[0], use.engines([model])[0]


def _name(model: str) -> str:
    return Path(model).name.removesuffix(GGUF)
