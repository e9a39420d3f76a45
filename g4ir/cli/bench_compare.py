"""`g4ir bench-compare`: two benchmark reports side by side."""

from __future__ import annotations

from g4ir.ui.plots import check_plot

from .common import emit
from .verb import Verb, argument, flag, json_flag


class Compare(Verb):
    """Set two reports side by side."""

    a: str = argument("report of the baseline", "A.json")
    b: str = argument("report to compare with it", "B.json")
    all: bool = flag("show every statistic", False)
    check: bool = flag("exit 1 if a metric differs by more than both spreads", False)
    plot: str | None = flag("plot both reports, .png or .svg", None, "FILE")
    json: bool = json_flag()

    def __call__(self) -> int:
        from g4ir.bench.report import plain
        from g4ir.bench.text import compare_reports, compare_text, plot_bench, read_report

        if self.plot:
            check_plot(self.plot)
        a, b = read_report(self.a), read_report(self.b)
        result = compare_reports(a, b, self.all)
        if self.json:
            emit(plain(result))
        else:
            print(compare_text(result))
        if self.plot:
            plot_bench(self.plot, {"A": a, "B": b})
        return 1 if self.check and result["differ"] else 0
