"""`g4ir verify`: compares an engine with a reference, or scores texts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from g4ir.errors import InputError
from g4ir.ui import console
from g4ir.ui.units import parse_count

from .common import OnEngine, Programs, output
from .score import report
from .verb import flag, json_flag, token_ids

UNQUANTISED = "the unquantised weights"


class Verify(OnEngine):
    """Compare an engine with a reference, or on texts."""

    against: str | None = flag("reference (default): interpreter; hf: transformers", None, "WHAT")
    checkpoint: str | None = flag("original checkpoint, before quantisation", None, "DIR")
    text: list[str] = flag(
        "perplexity and KL divergence on a text; engines need build --all-logits", (), "FILE"
    )
    tokens: str | None = flag(
        "token ids (default: random); with --text: how many to score", None, "2,5,7|N"
    )
    each_pass: bool = flag("compare pass by pass; name the first node that diverges", False)
    json: bool = json_flag()
    load: Programs

    def __post_init__(self) -> None:
        if self.each_pass and self.text:
            raise InputError("--each-pass is for token ids: leave out --text")
        if self.each_pass and self.against is not None:
            raise InputError("--each-pass compares with the interpreter: leave out --against")
        if self.text and self.against is not None:
            raise InputError("--against is for token ids: with --text leave it out")

    def __call__(self) -> int:
        from g4ir.check.logits import check_against

        if self.text:
            return self._on_texts()
        tokens = token_ids(self.tokens, "--tokens") if self.tokens is not None else None
        against = self.against or "reference"
        check_against(against)
        path, checkpoint = self.engine_path(encoder=None), self.checkpoint
        if against == "hf":
            checkpoint = self.first_use.checkpoint(self.engine, checkpoint)
        how = against, tokens, checkpoint, self.each_pass
        return compared(path, self.load, self.json, *how)

    def _on_texts(self) -> int:
        """Score texts with an engine and, if they are available, its unquantised weights."""
        from g4ir.chat.text_files import check_files
        from g4ir.check.reference import unquantised
        from g4ir.check.stage_report import engine_name

        max_tokens = None if self.tokens is None else parse_count(self.tokens, "--tokens")
        check_files(self.text, "--text")
        with self.opened(self.load, all_logits=True) as (engine, progress):
            progress("opening the unquantised weights")
            checkpoint = self.first_use.checkpoint(self.engine, self.checkpoint)
            with unquantised(engine, checkpoint) as other:
                engines, against = [engine], None
                if isinstance(other, str):
                    console.say(f"note: no KL divergence: {other}")
                else:
                    engines, against = [engine, other], UNQUANTISED
                head = {"engine": engine_name(engine), "against": against}
                return report(engines, self.json, progress, self.text, tokens=max_tokens, head=head)


def compared(
    path: str,
    load: Programs,
    as_json: bool,
    against: str = "reference",
    tokens: list[int] | None = None,
    checkpoint: str | Path | None = None,
    each_pass: bool = False,
) -> int:
    """Compare the logits of the engine directory `path` with the reference or Hugging Face
    (`against`), print the report, and return the exit code: 1 if they differ."""
    from g4ir.check.logits import verify_engine
    from g4ir.check.passes import verify_each_pass

    check: Callable[..., Any] = verify_each_pass
    check = check if each_pass else partial(verify_engine, against=against)
    with console.Progress() as progress, closing(load.engine(path, progress)) as engine:
        report = check(engine, tokens=tokens, checkpoint=checkpoint, progress=progress)
    output(as_json, report.to_dict(), f"{report.text()}\n")
    return 0 if report.ok else 1
