"""Compares what an engine makes of media with what the interpreter makes of them.

The smallest tower of each part runs once, on an item that leaves some of it to padding. The
interpreter's soft tokens then stand in a prompt that goes through both engines' text graphs, in
chunks that would cut the image, and single steps after it: a wrong tower fails alone, and so does
`prefill_media`. Pixels and samples are drawn from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch

from g4ir.backends.base import Tensors
from g4ir.engine.engine import Engine
from g4ir.ir.distance import BUDGETS, Anchor, Errors, Tolerance, judge, row_errors
from g4ir.ir.interpret import interpret
from g4ir.ir.wide import in_float64
from g4ir.media.soft import Soft, counts
from g4ir.model.decoder import BLOCKS
from g4ir.model.media import PICTURES, placeholders
from g4ir.model.towers import is_tower
from g4ir.ui.progress import Progress, no_progress

from .compare import Step, first_difference
from .items import Item, smallest_items
from .reference import reference_engine, wide_engine, with_run
from .tokens import EVERY_LOGITS, SEED, random_ids

if TYPE_CHECKING:
    from g4ir.engine.session import Session

Tensor = torch.Tensor
#: tokens of text before the first medium of a prompt, after each, and single steps after all
HEAD, BETWEEN, STEPS = 7, 4, 4
#: tokens that a chunk has more than the longest medium: fewer than the head, so that it is cut
MORE = 3


@dataclass(frozen=True)
class Judged:
    """The worst row of what was compared, and the budget that it was held to."""

    relative: float
    cosine: float
    budget: Tolerance
    ok: bool

    def verdict(self) -> str:
        verdict = "ok" if self.ok else f"FAILED ({self.budget})"
        # Rounding takes the cosine of equal rows to either side of 1.
        away = 0.0 if self.cosine > 1 else 1 - self.cosine
        return f"relative {self.relative:.1e}, 1 - cosine {away:.1e}, {verdict}"


@dataclass(frozen=True)
class TowerReport(Judged):
    """A tower on one item: `rows` of its `size` soft tokens were compared."""

    tower: str
    kind: str
    rows: int
    size: int

    def text(self) -> str:
        what = f"{self.kind}, {self.rows} of {self.size} soft tokens"
        return f"  {self.tower:12} {what}: {self.verdict()}"


@dataclass(frozen=True)
class PromptReport(Judged):
    """A prompt of so many tokens in chunks of at most `chunk`, `soft` of them by kind, and single
    steps: the graphs that ran it, and where it is out of tolerance the first graph that differs and
    the first value in it."""

    tokens: int
    chunk: int
    soft: Mapping[str, int]
    phases: tuple[str, ...]
    phase: str | None = None
    first_difference: str | None = None

    def text(self) -> str:
        soft = " and ".join(f"{n} of {kind}" for kind, n in self.soft.items())
        lines = [
            f"{'prompt':12} {self.tokens} tokens: {self.verdict()}",
            f"{'':12} {soft}, chunks of {self.chunk}, through {', '.join(self.phases)}",
        ]
        if not self.ok:
            first = f"{self.phase}: {self.first_difference}"
            lines.append(f"{'':12} first out of tolerance in {first}")
        return "\n".join(f"  {line}" for line in lines)


@dataclass(frozen=True)
class MediaReport:
    """Towers, the prompt (None where max_seq has no room for one), and the graphs for media that
    nothing was sent through."""

    towers: tuple[TowerReport, ...]
    prompt: PromptReport | None
    not_run: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.failed is None

    @property
    def failed(self) -> str | None:
        """The first graph that is out of tolerance."""
        tower = next((t.tower for t in self.towers if not t.ok), None)
        return tower or (self.prompt.phase if self.prompt else None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "ok": self.ok, "failed": self.failed}

    def lines(self) -> list[str]:
        """Return a line or a few for each part of the report."""
        out = [t.text() for t in self.towers]
        none = f"  {'prompt':12} not checked: --max-seq has no room for one with media"
        out.append(self.prompt.text() if self.prompt else none)
        if self.not_run:
            out.append(f"  {'not checked':12} {', '.join(self.not_run)}")
        return out


def check_media(
    engine: Engine, reference: Engine | None = None, progress: Progress = no_progress
) -> MediaReport:
    """Compare an engine that takes media with the interpreter on its own weights; `reference` is
    `reference_engine(engine)`, where there is one already."""
    found = []
    for item in smallest_items(engine):
        progress(f"{item.tower} through the engine and through the interpreter")
        found.append(_tower(engine, item))
    prompt, report = _prompt(engine, [soft for _, soft in found]), None
    if prompt is not None:
        progress("a prompt with media through the engine and through the interpreter")
        report = _prompt_report(engine, reference or reference_engine(engine), prompt)
    towers = tuple(t for t, _ in found)
    ran = {t.tower for t in towers} | set(report.phases if report else ())
    own = [name for name in engine.program.graphs if name == BLOCKS or is_tower(name)]
    return MediaReport(towers, report, tuple(name for name in own if name not in ran))


def _judged(
    dtype: str, got: Tensor, want: Tensor, exact: Callable[[], Tensor]
) -> tuple[Tolerance, Errors]:
    """Compare by what the interpreter's own rounding allows, measured against `exact`, the same
    rows in float64."""
    budget, (errors,) = judge(
        BUDGETS[dtype, "reference"],
        dtype,
        [got],
        want,
        anchor=lambda: Anchor("float64", exact(), []),
        rounding=lambda: float(row_errors(want, exact()).relative.max()),
    )
    return budget, errors


def _worst(budget: Tolerance, errors: Errors) -> dict[str, Any]:
    """Return the fields of Judged."""
    worst = {"relative": float(errors.relative.max()), "cosine": float(errors.cosine.min())}
    return {**worst, "budget": budget, "ok": budget.all_hold(errors)}


def _tower(engine: Engine, item: Item) -> tuple[TowerReport, Soft]:
    graph, source = engine.program.graphs[item.tower], engine.runtime.source
    params = {v.name: source.tensor(v.name).to(engine.device) for v in graph.params}
    want = interpret(graph, item.feeds, params, {})[0]["soft"][0, : item.rows]
    got = engine.runtime.encode(item.tower, dict(item.feeds))[0, : item.rows]

    def exact() -> Tensor:
        return in_float64(graph, item.feeds, params)["soft"][0, : item.rows]

    budget, errors = _judged(engine.dtype, got, want, exact)
    report = TowerReport(
        **_worst(budget, errors), tower=item.tower, kind=item.kind, rows=item.rows, size=item.size
    )
    return report, Soft(item.kind, (want,), item.times)


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """Tokens i64[1, T] with placeholders for `soft`, i64[n, 1] of single steps after them, and how
    many tokens a chunk takes."""

    tokens: Tensor
    soft: tuple[Soft, ...]
    after: Tensor
    chunk: int

    def steps(self, all_logits: bool = False) -> list[Step]:
        """Return the steps that a session of one row is asked for."""

        def first(session: Session) -> Tensor:
            logits = session.prefill(self.tokens, all_logits=all_logits, soft=self.soft)
            return logits[0] if all_logits else logits

        return [first, *(methodcaller("decode", t) for t in self.after)]

    def logits(self, engine: Engine, every: bool) -> Tensor:
        """Return the logits of the prompt, or of its end, and of the single steps."""
        session = engine.session()
        return torch.cat([step(session) for step in self.steps(every)])


def _prompt(engine: Engine, softs: Sequence[Soft]) -> MediaPrompt | None:
    """Return a text with the media that there is room for, or None without media."""
    limits, kept = engine.limits, list[Soft]()
    room = limits.max_seq - HEAD - STEPS
    for soft in softs:
        whole = BLOCKS in engine.program.graphs and soft.kind in PICTURES
        if soft.count + BETWEEN <= room and (soft.count <= limits.prefill_chunk or not whole):
            kept.append(soft)
            room -= soft.count + BETWEEN
    if not kept:
        return None
    text = random_ids(engine, (HEAD + BETWEEN * len(kept) + STEPS,), SEED)
    parts, ids = [text[:HEAD]], placeholders(engine.spec.tokens)
    for i, soft in enumerate(kept):
        at = HEAD + i * BETWEEN
        parts += [torch.full((soft.count,), ids[soft.kind]), text[at : at + BETWEEN]]
    # A session cuts chunks as long as they may be: this one would end in the first medium.
    chunk = min(limits.prefill_chunk, max(s.count for s in kept) + MORE)
    return MediaPrompt(torch.cat(parts)[None], tuple(kept), text[-STEPS:, None], chunk)


def _prompt_report(engine: Engine, reference: Engine, p: MediaPrompt) -> PromptReport:
    engine, reference = (
        e.configured(limits=replace(e.limits, prefill_chunk=p.chunk)) for e in (engine, reference)
    )
    tokens = p.tokens.shape[1]
    every = engine.all_logits and tokens * engine.spec.text.vocab_size <= EVERY_LOGITS
    phases: dict[str, None] = {}

    def run(phase: str, *rest: Any) -> Tensors | None:
        phases[phase] = None
        return engine.runtime.run(phase, *rest)

    got = p.logits(with_run(engine, run), every)
    want = p.logits(reference, every)
    budget, errors = _judged(
        engine.dtype, got, want, lambda: p.logits(wide_engine(reference), every)
    )
    count, soft = tokens + len(p.after), counts(p.soft)
    report = PromptReport(
        **_worst(budget, errors), tokens=count, chunk=p.chunk, soft=soft, phases=tuple(phases)
    )
    if report.ok:
        return report
    if found := first_difference(engine, reference, p.steps(), count):
        return replace(report, phase=found.phase, first_difference=found.place())
    early = BLOCKS if BLOCKS in phases else "prefill"
    phase = "decode" if bool(budget.holds(errors)[: -len(p.after)].all()) else early
    return replace(report, phase=phase, first_difference="none inside; the logits differ")
