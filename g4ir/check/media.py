"""Compares an engine on media with the interpreter: the towers, and a prompt with soft tokens.

The smallest tower of each kind runs once, on an item with some padding. A prompt with the
interpreter's soft tokens then goes through the text graphs of both, in chunks that would cut the
image, and single steps after it: a wrong tower fails alone, and so does `prefill_media`. Pixels and
samples are drawn from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch

from g4ir.backends.base import Tensors
from g4ir.engine.engine import Engine
from g4ir.ir.distance import TOLERANCES, Agreement, Anchor, Tolerance, compare_rows, row_errors
from g4ir.ir.interpret import interpret
from g4ir.ir.wide import in_float64
from g4ir.media.soft import Soft, counts
from g4ir.model.decoder import BLOCKS
from g4ir.model.media import PICTURES, placeholders
from g4ir.model.towers import is_tower
from g4ir.ui.progress import Progress, no_progress

from .compare import Step, first_difference
from .items import Item, smallest_items
from .reference import float64_engine, reference_engine, with_run
from .tokens import EVERY_LOGITS, SEED, random_ids

if TYPE_CHECKING:
    from g4ir.engine.session import Session

Tensor = torch.Tensor
#: tokens of text before the first medium of a prompt and after each; single steps at the end
HEAD, BETWEEN, STEPS = 7, 4, 4
#: a chunk is this much longer than the longest medium: less than HEAD, so that it would cut it
MORE = 3


@dataclass(frozen=True)
class Worst:
    """The worst rows of an Agreement, and the tolerance."""

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
class TowerReport(Worst):
    """A tower on one item: `rows` of its `size` soft tokens were compared."""

    tower: str
    kind: str
    rows: int
    size: int

    def text(self) -> str:
        rows = f"{self.kind}, {self.rows} of {self.size} soft tokens"
        return f"  {self.tower:12} {rows}: {self.verdict()}"


@dataclass(frozen=True)
class PromptReport(Worst):
    """A prompt of so many tokens in chunks of at most `chunk`, `soft` of them by kind, and single
    steps. phases: the graphs that ran; phase, first_difference: the first graph and the first
    value in it that are out of tolerance."""

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
    """The towers, the prompt (None if max_seq is too small for one), and the graphs for media that
    did not run."""

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
        """Return JSON values."""
        return {**asdict(self), "ok": self.ok, "failed": self.failed}

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        out = [t.text() for t in self.towers]
        none = f"  {'prompt':12} not checked: --max-seq has no room for one with media"
        out.append(self.prompt.text() if self.prompt else none)
        if self.not_run:
            out.append(f"  {'not checked':12} {', '.join(self.not_run)}")
        return out


def check_media(
    engine: Engine, reference: Engine | None = None, progress: Progress = no_progress
) -> MediaReport:
    """Compare an engine that takes media with the interpreter on its own weights; `reference`:
    `reference_engine(engine)`, if the caller has one already."""
    pairs = []
    for item in smallest_items(engine):
        progress(f"{item.tower} through the engine and through the interpreter")
        pairs.append(_compare_tower(engine, item))
    prompt, report = _plan_prompt(engine, [soft for _, soft in pairs]), None
    if prompt is not None:
        progress("a prompt with media through the engine and through the interpreter")
        report = _compare_prompt(engine, reference or reference_engine(engine), prompt)
    towers = tuple(t for t, _ in pairs)
    ran = {t.tower for t in towers} | set(report.phases if report else ())
    graphs = [name for name in engine.program.graphs if name == BLOCKS or is_tower(name)]
    return MediaReport(towers, report, tuple(name for name in graphs if name not in ran))


def _compare(dtype: str, got: Tensor, want: Tensor, exact: Callable[[], Tensor]) -> Agreement:
    """Compare rows with the interpreter's, within its own rounding, measured against `exact`, the
    same rows in float64."""
    (agreement,) = compare_rows(
        TOLERANCES[dtype, "reference"],
        dtype,
        [got],
        want,
        anchor=lambda: Anchor("float64", exact(), []),
        rounding=lambda: float(row_errors(want, exact()).relative.max()),
    )
    return agreement


def _compare_tower(engine: Engine, item: Item) -> tuple[TowerReport, Soft]:
    graph, source = engine.program.graphs[item.tower], engine.runtime.source
    params = {v.name: source.tensor(v.name).to(engine.device) for v in graph.params}
    want = interpret(graph, item.feeds, params, {})[0]["soft"][0, : item.rows]
    got = engine.runtime.encode(item.tower, dict(item.feeds))[0, : item.rows]

    def exact() -> Tensor:
        return in_float64(graph, item.feeds, params)["soft"][0, : item.rows]

    worst = _compare(engine.dtype, got, want, exact).worst()
    fields = {name: getattr(item, name) for name in ("tower", "kind", "rows", "size")}
    return TowerReport(**worst, **fields), Soft(item.kind, (want,), item.times)


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """Tokens i64[1, T] with placeholders for `soft`, tokens i64[n, 1] of single steps `after` them,
    and the chunk size."""

    tokens: Tensor
    soft: tuple[Soft, ...]
    after: Tensor
    chunk: int

    def steps(self, all_logits: bool = False) -> list[Step]:
        """Return the calls of a session."""

        def first(session: Session) -> Tensor:
            logits = session.prefill(self.tokens, all_logits=all_logits, soft=self.soft)
            return logits[0] if all_logits else logits

        return [first, *(methodcaller("decode", t) for t in self.after)]

    def logits(self, engine: Engine, every: bool) -> Tensor:
        """Return the logits of the prompt (of its last token unless `every`) and of the single
        steps."""
        session = engine.session()
        return torch.cat([step(session) for step in self.steps(every)])


def _plan_prompt(engine: Engine, softs: Sequence[Soft]) -> MediaPrompt | None:
    """Return a text with the media that fit into max_seq, or None if none does."""
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
    # The first chunk would end in the first medium.
    chunk = min(limits.prefill_chunk, max(s.count for s in media) + MORE)
    return MediaPrompt(torch.cat(parts)[None], tuple(media), text[-STEPS:, None], chunk)


def _compare_prompt(engine: Engine, reference: Engine, p: MediaPrompt) -> PromptReport:
    engine, reference = (
        e.configured(limits=replace(e.limits, prefill_chunk=p.chunk)) for e in (engine, reference)
    )
    tokens = p.tokens.shape[1]
    every = engine.all_logits and tokens * engine.spec.text.vocab_size <= EVERY_LOGITS
    phases: dict[str, None] = {}

    def run(phase: str, *args: Any) -> Tensors | None:
        phases[phase] = None
        return engine.runtime.run(phase, *args)

    got = p.logits(with_run(engine, run), every)
    want = p.logits(reference, every)

    def exact() -> Tensor:
        return p.logits(float64_engine(reference), every)

    agreement = _compare(engine.dtype, got, want, exact)
    count, soft = tokens + len(p.after), counts(p.soft)
    report = PromptReport(
        **agreement.worst(), tokens=count, chunk=p.chunk, soft=soft, phases=tuple(phases)
    )
    if report.ok:
        return report
    if difference := first_difference(engine, reference, p.steps(), count):
        return replace(report, phase=difference.phase, first_difference=difference.line())
    early = BLOCKS if BLOCKS in phases else "prefill"
    within = agreement.tolerance.holds(agreement.errors)[: -len(p.after)]
    phase = "decode" if bool(within.all()) else early
    return replace(report, phase=phase, first_difference="none inside; the logits differ")
