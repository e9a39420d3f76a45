"""`g4ir verify`: compares an engine with a reference, or scores texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError
from g4ir.ui import console
from g4ir.ui.units import parse_count

from .common import OnEngine, Programs, output
from .score import Documents, loaded, means, report
from .verb import flag, json_flag, token_ids

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine

UNQUANTISED = "the unquantised weights"


class Verify(OnEngine):
    """Compare an engine with a reference, or on texts."""

    against: str | None = flag("reference (default), hf; with --text another engine", None, "WHAT")
    checkpoint: str | None = flag("original checkpoint, before quantisation", None, "DIR")
    text: list[str] = flag("perplexity and KL divergence on a text (--all-logits)", (), "FILE")
    tokens: str | None = flag("token ids (default: random); with --text: maximum", None, "2,5,7")
    each_pass: bool = flag("compare pass by pass; name the first node that diverges", False)
    json: bool = json_flag()
    load: Programs

    def __post_init__(self) -> None:
        if self.each_pass and self.text:
            raise InputError("--each-pass is for token ids: leave out --text")
        if self.each_pass and self.against is not None:
            flag_text = f"leave out --against {self.against}"
            raise InputError(f"--each-pass compares with the interpreter: {flag_text}")
        if self.text and self.against is not None and self.checkpoint is not None:
            raise InputError("--checkpoint is not read beside --against ENGINE")

    def __call__(self) -> int:
        from g4ir.check.logits import check_against

        if self.text:
            return self._on_texts()
        tokens = token_ids(self.tokens, "--tokens") if self.tokens is not None else None
        against = self.against or "reference"
        check_against(against)
        engine = self.with_engine().engine
        return compared(
            engine, self.load, self.json, against, tokens, self.checkpoint, self.each_pass
        )

    def _on_texts(self) -> int:
        """Compare an engine with its unquantised weights, or another engine, on texts."""
        from g4ir.artefact.directory import read_manifest
        from g4ir.check.logits import AGAINST
        from g4ir.check.stage_report import engine_name

        if self.against in AGAINST:
            raise InputError(
                f"--against {self.against} is for token ids: with --text give an engine directory, "
                f"or leave it out to compare with {UNQUANTISED}"
            )
        max_tokens = None if self.tokens is None else parse_count(self.tokens, "--tokens")
        documents = Documents(self.text, tokens=max_tokens)
        documents.check()
        if self.against is not None:
            read_manifest(Path(self.against))
        path = self.with_engine(all_logits=True).engine
        with (
            console.Progress() as progress,
            closing(loaded(self.load, path, progress)) as engine,
            self._baseline(engine, progress) as (other, name),
        ):
            if other is None:
                console.say(f"note: no KL divergence: {name}")
            head = {"engine": engine_name(engine), "against": name if other else None}
            engines = [engine, other] if other else [engine]
            return report(documents, engines, self.json, means, progress, head)

    @contextmanager
    def _baseline(
        self, engine: Engine, progress: console.Progress
    ) -> Iterator[tuple[Engine | None, str]]:
        """A context with what an engine is compared with, and its name; or None, and why not."""
        from g4ir.check.reference import is_quantised, param_bytes, unquantised
        from g4ir.check.score import require_same_tokens

        with ExitStack() as stack:
            if self.against is None and not is_quantised(engine):
                yield None, "nothing is quantised; --against ENGINE compares with another engine"
            elif self.against is None:
                progress("opening the unquantised weights")
                param_size = param_bytes(engine)
                baseline = stack.enter_context(unquantised(engine, self.checkpoint, param_size))
                yield (None, baseline) if isinstance(baseline, str) else (baseline, UNQUANTISED)
            else:
                other = stack.enter_context(loaded(self.load, self.against, progress))
                require_same_tokens(engine, other, f"--against {self.against}")
                yield other, self.against


def compared(
    path: str,
    load: Programs,
    as_json: bool,
    against: str = "reference",
    tokens: list[int] | None = None,
    checkpoint: str | Path | None = None,
    each_pass: bool = False,
) -> int:
    """Compare the logits of an engine directory; `build --verify` does this too."""
    from g4ir.check.logits import verify_engine
    from g4ir.check.passes import verify_each_pass

    check: Callable[..., Any] = verify_each_pass
    check = check if each_pass else partial(verify_engine, against=against)
    with console.Progress() as progress, closing(load.engine(path, progress)) as engine:
        report = check(engine, tokens=tokens, checkpoint=checkpoint, progress=progress)
    output(as_json, report.to_dict(), f"{report.text()}\n")
    return 0 if report.ok else 1
