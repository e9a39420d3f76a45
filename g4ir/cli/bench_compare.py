"""`g4ir bench-compare`: two benchmark reports side by side."""

from __future__ import annotations

from g4ir.errors import InputError

from .common import output
from .verb import Verb, argument, flag, json_flag


class Compare(Verb):
    """Print the metrics of two benchmark reports side by side."""

    a: str = argument("report of the baseline", "A.json")
    b: str = argument("report to compare with it", "B.json")
    check: bool = flag("exit 1 if a metric differs by more than the sum of its spreads", False)
    json: bool = json_flag()

    def __call__(self) -> int:
        from g4ir.bench.text import compare_reports, compare_text, read_reports

        files = {f: read_reports(f) for f in (self.a, self.b)}
        if wrong := next((f for f, reports in files.items() if len(reports) != 1), None):
            raise InputError(f"{wrong}: expected one workload, found {len(files[wrong])}")
        result = compare_reports(*files[self.a], *files[self.b])
        output(self.json, result, f"{compare_text(result)}\n")
        return 1 if self.check and result["differ"] else 0
