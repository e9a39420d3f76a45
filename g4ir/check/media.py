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
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from g4ir.backends.base import Tensors
from g4ir.engine.engine import Engine
from g4ir.engine.multimodal import sound_settings
from g4ir.ir.distance import BUDGETS, Anchor, Tolerance, row_errors, widened
from g4ir.ir.interpret import interpret
from g4ir.ir.wide import in_float64
from g4ir.media.audio import Waveform
from g4ir.media.soft import Soft, counts
from g4ir.model.decoder import BLOCKS
from g4ir.model.media import AUDIO, IMAGE, PICTURES, VIDEO, placeholders
from g4ir.model.towers import is_tower
from g4ir.ui.progress import Progress, no_progress

from .reference import reference_engine, wide_engine
from .tokens import EVERY_LOGITS, SEED, random_ids
from .watch import Step, first_value

if TYPE_CHECKING:
    from g4ir.engine.session import Session

Tensor = torch.Tensor
#: of an audio clip's graph, what the audio takes at most, and its soft tokens at most
SHARE, LONGEST = 0.6, 48
#: pixels of an image, height and width: no budget is filled by sides of these proportions
SIDES = (48, 72)
#: tokens of text before the first medium of a prompt, after each, and single steps after all
HEAD, BETWEEN, STEPS = 7, 4, 4
#: tokens that a chunk has more than the longest medium: fewer than the head, so that it is cut
MORE = 3


@dataclass(frozen=True, eq=False)
class Item:
    """One medium as its tower takes it, `feeds` by input. The first `rows` of the `size` soft
    tokens that come out are its own, the others padding; `times` are those of frames."""

    tower: str
    kind: str
    feeds: Mapping[str, Tensor]
    rows: int
    size: int
    times: tuple[str, ...]


def smallest_items(engine: Engine) -> tuple[Item, ...]:
    """An item for the smallest tower of each part that the engine has."""
    media, out, rng = engine.media, [], np.random.default_rng(SEED)
    sizes = [(n, IMAGE, {"budget": n}) for n in media.budgets]
    sizes += [(n, VIDEO, {}) for n in (media.frame,) if n is not None]
    if sizes:
        _, kind, options = min(sizes, key=lambda size: size[0])
        pixels = rng.integers(0, 256, (*SIDES, 3), dtype=np.uint8)
        out.append(_item(engine, kind, pixels if kind == IMAGE else pixels[None], **options))
    if media.lengths:
        out.append(_sound(engine))
    return tuple(out)


def _sound(engine: Engine) -> Item:
    """Its padding is noise: a tower that does not mask it hears it at the end."""
    settings = sound_settings(engine)
    rate = settings.sampling_rate
    wanted = min(max(1, int(SHARE * min(engine.media.lengths))), LONGEST)
    count = max(settings.fewest_samples, wanted * rate // settings.soft_tokens(rate))
    samples = 0.3 * np.random.default_rng(SEED).standard_normal(count)
    sound = _item(engine, AUDIO, Waveform(samples.astype(np.float32), rate))
    if "mask" not in sound.feeds:
        return sound
    features = sound.feeds["features"].where(sound.feeds["mask"][..., None], 1.0)
    return replace(sound, feeds={**sound.feeds, "features": features})


def _item(engine: Engine, kind: str, given: Any, **options: Any) -> Item:
    """Prepare an item: its tower's inputs, as they come to a runtime."""
    runs: list[tuple[str, Mapping[str, Tensor], int]] = []

    def encode(tower: str, feeds: Mapping[str, Tensor]) -> Tensor:
        shape = [int(d) for d in engine.program.graphs[tower].outputs[0].type.shape]
        runs.append((tower, feeds, shape[1]))
        return torch.zeros(shape)

    seen: Any = SimpleNamespace(encode=encode)
    soft = replace(engine, runtime=seen).encode(kind, given, **options)
    ((tower, feeds, size),) = runs
    return Item(tower, kind, feeds, soft.count, size, soft.times)


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
) -> tuple[dict[str, Any], Tensor]:
    """Return the fields of Judged, and which rows hold, by the fixed budget; where it is missed, by
    the budget that the interpreter's own rounding allows, measured against `exact`, the same rows
    in float64."""
    budget, errors = BUDGETS[dtype, "reference"], row_errors(got, want)
    if not budget.all_hold(errors) and budget.relative is not None:
        budget = widened(budget, float(row_errors(want, exact()).relative.max()))
    elif not budget.all_hold(errors):
        anchor = Anchor("float64", exact(), [])
        budget, errors = Tolerance(rounding=anchor.rounding(want, dtype)), anchor.errors(got, want)
    worst = {"relative": float(errors.relative.max()), "cosine": float(errors.cosine.min())}
    return {**worst, "budget": budget, "ok": budget.all_hold(errors)}, budget.holds(errors)


def _tower(engine: Engine, item: Item) -> tuple[TowerReport, Soft]:
    graph, source = engine.program.graphs[item.tower], engine.runtime.source
    params = {v.name: source.tensor(v.name).to(engine.device) for v in graph.params}
    want = interpret(graph, item.feeds, params, {})[0]["soft"][0, : item.rows]
    got = engine.runtime.encode(item.tower, dict(item.feeds))[0, : item.rows]

    def exact() -> Tensor:
        return in_float64(graph, item.feeds, params)["soft"][0, : item.rows]

    judged, _ = _judged(engine.dtype, got, want, exact)
    report = TowerReport(**judged, tower=item.tower, kind=item.kind, rows=item.rows, size=item.size)
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

    own = engine.runtime
    noted: Any = SimpleNamespace(run=run, new_state=own.new_state, embed=own.embed)
    got = p.logits(replace(engine, runtime=noted), every)
    want = p.logits(reference, every)
    judged, holds = _judged(
        engine.dtype, got, want, lambda: p.logits(wide_engine(reference), every)
    )
    count, soft = tokens + len(p.after), counts(p.soft)
    report = PromptReport(**judged, tokens=count, chunk=p.chunk, soft=soft, phases=tuple(phases))
    if report.ok:
        return report
    if found := first_value(engine, reference, p.steps(), report.budget.inside):
        return replace(report, phase=found[0].phase, first_difference=found[1])
    early = BLOCKS if BLOCKS in phases else "prefill"
    phase = "decode" if bool(holds[: -len(p.after)].all()) else early
    return replace(report, phase=phase, first_difference="none inside; the logits differ")
