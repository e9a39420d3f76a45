"""Compares an engine on media with the interpreter: the towers, and a prompt with soft tokens.

The smallest tower of images or videos and the smallest of audio run once each, on an item with some
padding. A prompt with the interpreter's soft tokens then goes through the text graphs, forced by
the interpreter's values (compare.py), in chunks whose boundary may split a medium, then in decode
steps. So a wrong tower and a wrong `prefill_media` fail separately. Pixels and samples are drawn
from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import methodcaller
from typing import Any

import torch

from g4ir.engine.engine import Engine
from g4ir.media.soft import Soft, counts
from g4ir.model.decoder import BLOCKS
from g4ir.model.media import PICTURES, placeholders
from g4ir.model.towers import is_tower
from g4ir.ui.progress import Progress, no_progress
from g4ir.weights.pack import Packing

from .compare import Comparison, ForcedRuntime, Step, compare_session
from .items import Item, smallest_items
from .reference import reference_engine
from .stage_report import StageReport
from .stages import STORED, GraphStep, Stage, StageRun
from .tokens import SEED, random_ids

Tensor = torch.Tensor
#: name of the part that checks a prompt
PROMPT = "prompt"
#: text tokens before the first medium of a prompt, and after each; decode steps at the end
HEAD, BETWEEN, STEPS = 7, 4, 4
#: a chunk has this many tokens more than the longest medium, if prefill_chunk permits: fewer than
#: HEAD, so that a chunk boundary would split that medium if it is the first
MORE = 3


@dataclass(frozen=True)
class MediaPart:
    """Result for a tower on one item, or for the prompt; `about`: the input, `report`: the compared
    values."""

    name: str
    about: str
    report: StageReport

    @property
    def failed(self) -> str | None:
        """Name of the first graph with a value out of tolerance, or None."""
        return self.report.first.phase if self.report.first else None

    def text(self) -> str:
        first = self.report.first
        verdict = f"FAILED, {first.line()}" if first else f"{self.report.values} values, ok"
        return f"  {self.name:12} {self.about}: {verdict}"


@dataclass(frozen=True)
class MediaReport:
    """The towers and the prompt (none if max_seq or prefill_chunk is too small for one), and the
    graphs for media that did not run."""

    parts: tuple[MediaPart, ...]
    not_run: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.failed is None

    @property
    def failed(self) -> str | None:
        """Name of the first graph with a value out of tolerance, or None."""
        return next((p.failed for p in self.parts if p.failed), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, with `ok` and `failed`."""
        return {**asdict(self), "ok": self.ok, "failed": self.failed}

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        out = [p.text() for p in self.parts]
        if not any(p.name == PROMPT for p in self.parts):
            why = "no medium fits into --max-seq and --prefill-chunk"
            out.append(f"  {PROMPT:12} not checked: {why}")
        if self.not_run:
            out.append(f"  {'not checked':12} {', '.join(self.not_run)}")
        return out


def check_media(
    engine: Engine, reference: Engine | None = None, progress: Progress = no_progress
) -> MediaReport:
    """Compare an engine that takes media with the interpreter on its own weights; `reference`:
    `reference_engine(engine)`, if the caller has one already."""
    parts, softs = list[MediaPart](), list[Soft]()
    for item in smallest_items(engine):
        progress(f"{item.tower} through the engine and through the interpreter")
        part, soft = compare_tower(engine, item)
        parts.append(part)
        softs.append(soft)
    ran = {p.name for p in parts}
    if prompt := _plan_prompt(engine, softs):
        progress("a prompt with media through the engine and through the interpreter")
        parts.append(_compare_prompt(engine, reference or reference_engine(engine), prompt))
        ran |= parts[-1].report.phases.keys()
    graphs = [name for name in engine.program.graphs if name == BLOCKS or is_tower(name)]
    return MediaReport(tuple(parts), tuple(name for name in graphs if name not in ran))


def compare_tower(engine: Engine, item: Item) -> tuple[MediaPart, Soft]:
    """Compare a tower's soft tokens of an item with the interpreter's; return the result, and the
    interpreter's soft tokens."""
    graph, source = engine.program.graphs[item.tower], engine.runtime.source
    params = {v.name: source.tensor(v.name).to(engine.device) for v in graph.params}
    packing = Packing(engine.program, engine.prologue)
    step = GraphStep(item.tower, 0, 1, item.feeds, item.rows, item.size)
    trace = StageRun(Stage(STORED, packing, {item.tower: params}), 1, engine).trace(step)
    comparison = Comparison(StageReport(item.tower), engine.dtype)
    ForcedRuntime(trace, comparison).run(engine, None)
    about = f"{item.kind}, {item.rows} of {item.size} soft tokens"
    soft = trace.values["soft"][0, : item.rows]
    return MediaPart(item.tower, about, comparison.report), Soft(item.kind, (soft,), item.times)


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """Tokens i64[1, T] with placeholders for `soft`, tokens i64[n, 1] of single steps `after` them,
    and the chunk size."""

    tokens: Tensor
    soft: tuple[Soft, ...]
    after: Tensor
    chunk: int

    def steps(self) -> list[Step]:
        """Return the calls of a session."""
        first = methodcaller("prefill", self.tokens, soft=self.soft)
        return [first, *(methodcaller("decode", t) for t in self.after)]


def _plan_prompt(engine: Engine, softs: Sequence[Soft]) -> MediaPrompt | None:
    """Return a text with the media that fit into max_seq, an image that attends bidirectionally
    also into prefill_chunk; None if none does."""
    limits, media = engine.limits, list[Soft]()
    free = limits.max_seq - HEAD - STEPS
    for soft in softs:
        is_block = BLOCKS in engine.program.graphs and soft.kind in PICTURES
        if soft.count + BETWEEN <= free and (soft.count <= limits.prefill_chunk or not is_block):
            media.append(soft)
            free -= soft.count + BETWEEN
    if not media:
        return None
    text = random_ids(engine, (HEAD + BETWEEN * len(media) + STEPS,), SEED)
    parts, ids = [text[:HEAD]], placeholders(engine.spec.tokens)
    for i, soft in enumerate(media):
        at = HEAD + i * BETWEEN
        parts += [torch.full((soft.count,), ids[soft.kind]), text[at : at + BETWEEN]]
    chunk = min(limits.prefill_chunk, max(s.count for s in media) + MORE)
    return MediaPrompt(torch.cat(parts)[None], tuple(media), text[-STEPS:, None], chunk)


def _compare_prompt(engine: Engine, reference: Engine, p: MediaPrompt) -> MediaPart:
    engine, reference = (
        e.configured(limits=replace(e.limits, prefill_chunk=p.chunk)) for e in (engine, reference)
    )
    count = p.tokens.shape[1] + len(p.after)
    report = compare_session(engine, reference, p.steps(), count)
    soft = " and ".join(f"{n} of {kind}" for kind, n in counts(p.soft).items())
    about = f"{count} tokens, {soft}, in chunks of {p.chunk}, through {', '.join(report.phases)}"
    return MediaPart(PROMPT, about, report)
