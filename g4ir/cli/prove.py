"""`g4ir prove`: one report on a model's engines."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.artefact.directory import is_engine, refuse_options
from g4ir.errors import InputError
from g4ir.ui import console
from g4ir.ui.files import write_file
from g4ir.ui.plots import new_figure

from .common import Draft, OnEngine, Programs, strict
from .verb import Counts, flag

if TYPE_CHECKING:
    from g4ir.check.prove import Part

#: default --max-batch of engines that are built on first use
BATCH = 3


class Prove(OnEngine):
    """Check an engine against its definition, in every mode, and over long texts."""

    epilog = "defaults of engines built on first use: --max-batch 3, --max-seq the longest of --ctx"
    ctx: Counts | None = flag("context lengths (default 4K, or --max-seq if less)", None, "4K,32K")
    kv_formats: str | None = flag(
        "KV cache formats of engines built on first use: bfloat16, float8, int8",
        None,
        "T,T",
        name="--kv-dtype",
    )
    json: str | None = flag("write the report as JSON", None, "FILE")
    html: str | None = flag("write the report as a page with plots", None, "FILE")
    checkpoint: str | None = flag("original checkpoint, before quantisation", None, "DIR")
    time_limit: float = flag("seconds until no further part is started (default 900)", 900.0, "S")
    load: Programs

    def __post_init__(self) -> None:
        for name in ("json", "html"):
            path = vars(self)[name]
            if path is not None and not Path(path).absolute().parent.is_dir():
                raise InputError(f"--{name} {path}: its directory does not exist")
        if self.html:
            new_figure(1, 1)
        if not self.time_limit > 0:
            raise InputError(f"--time-limit {self.time_limit}: expected more than 0 seconds")
        if "kv_dtype" in self.explicit:
            raise InputError("--set kv_dtype: give --kv-dtype")
        if is_engine(Path(self.engine)) and self.kv_formats is not None:
            refuse_options(Path(self.engine), ["--kv-dtype"])

    def __call__(self) -> int:
        from g4ir.check.prove import Proof
        from g4ir.check.prove_report import report_html, report_text

        deadline = time.monotonic() + self.time_limit
        formats: list[str | None] = [*self.kv_formats.split(",")] if self.kv_formats else [None]
        paths = [self._engine(f) for f in formats]
        parts: list[Part] = []
        with console.Progress() as progress:
            for i, path in enumerate(paths):
                parts += self._parts(path, deadline, not i, progress)
        proof = Proof(self.engine, tuple(parts))
        if self.json:
            text = json.dumps(strict(proof.to_dict()), indent=1)
            write_file(Path(self.json), [text.encode()])
        if self.html:
            write_file(Path(self.html), [report_html(proof).encode()])
        print(report_text(proof), end="")
        return 0 if proof.ok else 1

    def _engine(self, kv: str | None) -> str:
        """Return the engine directory for the KV cache format `kv` (None: the default), built on
        first use; without --max-seq its maximum sequence length is the longest context."""
        if is_engine(Path(self.engine)):
            return self.engine
        options = self.first_use.options
        changes: dict[str, Any] = {"kv_dtype": kv}
        if "max_batch" not in self.explicit:
            changes["max_batch"] = BATCH
        if "max_seq" not in self.explicit:
            changes["max_seq"] = max(self.ctx or [4096])
        first_use = replace(self.first_use, options=replace(options, **changes))
        drafts = Draft(draft="ngram", draft_tokens=None)
        (path,) = first_use.engines([self.engine], drafts, all_logits=True)
        return path

    def _parts(
        self, path: str, deadline: float, first: bool, progress: console.Progress
    ) -> list[Part]:
        from g4ir.check.prove import Prover, check_contexts, proof_cache

        with closing(self.load.engine(path, progress)) as engine:
            contexts = self.ctx or [min(4096, engine.limits.max_seq)]
            check_contexts(engine, contexts)
            checkpoint = self.first_use.checkpoint(self.engine, self.checkpoint)
            prover = Prover(contexts, checkpoint, deadline, proof_cache(), progress)
            label = f"{engine.config.kv_dtype or engine.dtype} cache"
            return [*prover.parts(label, engine, first)]
