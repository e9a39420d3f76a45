"""Compares what an engine makes of media with what the interpreter makes of them.

The smallest tower of each part runs once: on a picture that leaves some of its budget to padding,
and on a sound that is shorter than its graph. Soft tokens of the interpreter then stand in a prompt
that goes through the engine's text graphs and through the interpreter's, in chunks that would cut
the picture, and single steps after it. So a tower that is wrong fails alone, and so does
`prefill_media`. Pixels and samples are drawn from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from g4ir.backends.base import Tensors
from g4ir.engine.engine import Engine
from g4ir.engine.multimodal import sound_settings
from g4ir.ir.distance import BUDGETS, Anchor, Errors, Tolerance, row_errors, widened
from g4ir.ir.graph import Graph, Program
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
from .watch import ChunkPosition, Step, first_value

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


# ---- what goes in -----------------------------------------------------------------------------


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
    media, out = engine.media, []
    sizes = [(n, IMAGE, {"budget": n}) for n in media.budgets]
    sizes += [(n, VIDEO, {}) for n in (media.frame,) if n is not None]
    if sizes:
        _, kind, options = min(sizes, key=lambda size: size[0])
        pixels = _rng().integers(0, 256, (*SIDES, 3), dtype=np.uint8)
        out.append(_item(engine, kind, pixels if kind == IMAGE else pixels[None], **options))
    if media.lengths:
        out.append(_with_noise(_item(engine, AUDIO, _sound(engine))))
    return tuple(out)


def _rng() -> np.random.Generator:
    return np.random.default_rng(SEED)


def _sound(engine: Engine) -> Waveform:
    settings = sound_settings(engine)
    rate = settings.sampling_rate
    wanted = min(max(1, int(SHARE * min(engine.media.lengths))), LONGEST)
    samples = max(settings.fewest_samples, wanted * rate // settings.soft_tokens(rate))
    return Waveform((0.3 * _rng().standard_normal(samples)).astype(np.float32), rate)


def _with_noise(sound: Item) -> Item:
    """Fill the sound's padding with noise: a tower that does not mask it hears it at the end."""
    mask = sound.feeds.get("mask")
    if mask is None:
        return sound
    features = sound.feeds["features"].where(mask[..., None], 1.0)
    return replace(sound, feeds={**sound.feeds, "features": features})


def _item(engine: Engine, kind: str, given: Any, **options: Any) -> Item:
    seen = _Seen(engine.program)
    soft = replace(engine, runtime=seen).encode(kind, given, **options)  # type: ignore[arg-type]
    ((tower, feeds),) = seen.runs
    _, size, _ = _shape(engine.program.graphs[tower])
    return Item(tower, kind, feeds, soft.count, size, soft.times)


class _Seen:
    """A runtime that keeps what towers are given, and makes zeros of it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.runs: list[tuple[str, Mapping[str, Tensor]]] = []

    def encode(self, tower: str, feeds: Mapping[str, Tensor]) -> Tensor:
        self.runs.append((tower, feeds))
        return torch.zeros(_shape(self.program.graphs[tower]))


def _shape(tower: Graph) -> list[int]:
    return [int(d) for d in tower.outputs[0].type.shape]


# ---- the report -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TowerReport:
    """A tower on one item: `rows` of its `size` soft tokens were compared."""

    tower: str
    kind: str
    rows: int
    size: int
    relative: float
    cosine: float
    budget: Tolerance
    ok: bool

    def text(self) -> str:
        what = f"{self.kind}, {self.rows} of {self.size} soft tokens"
        return f"  {self.tower:12} {what}: {_found(self)}"


@dataclass(frozen=True)
class PromptReport:
    """A prompt of so many tokens in chunks of at most `chunk`, `soft` of them by kind, and single
    steps: the graphs that ran it, the worst row of logits, and where that is out of tolerance the
    first graph that differs and the first value in it."""

    tokens: int
    chunk: int
    soft: Mapping[str, int]
    phases: tuple[str, ...]
    relative: float
    cosine: float
    budget: Tolerance
    ok: bool
    phase: str | None = None
    first_difference: str | None = None

    def text(self) -> str:
        soft = " and ".join(f"{n} of {kind}" for kind, n in self.soft.items())
        lines = [
            f"  {'prompt':12} {self.tokens} tokens: {_found(self)}",
            f"  {'':12} {soft}, chunks of {self.chunk}, through {', '.join(self.phases)}",
        ]
        if not self.ok:
            lines.append(
                f"  {'':12} first out of tolerance in {self.phase}: {self.first_difference}"
            )
        return "\n".join(lines)


def _found(r: TowerReport | PromptReport) -> str:
    verdict = "ok" if r.ok else f"FAILED ({r.budget})"
    # Rounding takes the cosine of equal rows to either side of 1.
    away = 0.0 if r.cosine > 1 else 1 - r.cosine
    return f"relative {r.relative:.1e}, 1 - cosine {away:.1e}, {verdict}"


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


# ---- the way through --------------------------------------------------------------------------


def check_media(
    engine: Engine, reference: Engine | None = None, progress: Progress = no_progress
) -> MediaReport:
    """Compare an engine that takes media with the interpreter on its own weights; `reference` is
    `reference_engine(engine)`, where there is one already."""
    items = smallest_items(engine)
    found = []
    for item in items:
        progress(f"{item.tower} through the engine and through the interpreter")
        found.append(_tower(engine, item))
    prompt = _prompt(engine, [soft for _, soft in found])
    report = None
    if prompt is not None:
        progress("a prompt with media through the engine and through the interpreter")
        report = _prompt_report(engine, reference or reference_engine(engine), prompt)
    ran = {i.tower for i in items} | set(report.phases if report else ())
    own = [name for name in engine.program.graphs if name == BLOCKS or is_tower(name)]
    towers = tuple(t for t, _ in found)
    return MediaReport(towers, report, tuple(name for name in own if name not in ran))


def _worst(errors: Errors) -> tuple[float, float]:
    return float(errors.relative.max()), float(errors.cosine.min())


def _judged(
    dtype: str, got: Tensor, want: Tensor, exact: Callable[[], Tensor]
) -> tuple[Tolerance, Errors]:
    """Return the fixed budget; where it is missed, the budget that the interpreter's own rounding
    allows, measured against `exact`, the same rows in float64."""
    budget, errors = BUDGETS[dtype, "reference"], row_errors(got, want)
    if budget.all_hold(errors):
        return budget, errors
    if budget.relative is not None:
        return widened(budget, float(row_errors(want, exact()).relative.max())), errors
    anchor = Anchor("float64", exact(), [])
    return Tolerance(rounding=anchor.rounding(want, dtype)), anchor.errors(got, want)


# ---- towers -----------------------------------------------------------------------------------


def _tower(engine: Engine, item: Item) -> tuple[TowerReport, Soft]:
    graph = engine.program.graphs[item.tower]
    params = _params(engine, graph)
    outputs, _ = interpret(graph, item.feeds, params, {})
    want = outputs["soft"][0, : item.rows]
    got = engine.runtime.encode(item.tower, dict(item.feeds))[0, : item.rows]

    def exact() -> Tensor:
        return in_float64(graph, item.feeds, params)["soft"][0, : item.rows]

    budget, errors = _judged(engine.dtype, got, want, exact)
    report = TowerReport(
        item.tower,
        item.kind,
        item.rows,
        item.size,
        *_worst(errors),
        budget,
        budget.all_hold(errors),
    )
    return report, Soft(item.kind, (want,), item.times)


def _params(engine: Engine, graph: Graph) -> dict[str, Tensor]:
    source = engine.runtime.source
    return {v.name: source.tensor(v.name).to(engine.device) for v in graph.params}


# ---- a prompt ---------------------------------------------------------------------------------


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

        return [first, *(lambda session, t=t: session.decode(t) for t in self.after)]


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
    parts = [text[:HEAD]]
    for i, soft in enumerate(kept):
        at = HEAD + i * BETWEEN
        parts += [_placeholders(engine, soft), text[at : at + BETWEEN]]
    # A session cuts chunks as long as they may be: this one would end in the first medium.
    chunk = min(limits.prefill_chunk, max(s.count for s in kept) + MORE)
    return MediaPrompt(torch.cat(parts)[None], tuple(kept), text[-STEPS:, None], chunk)


def _placeholders(engine: Engine, soft: Soft) -> Tensor:
    return torch.full((soft.count,), placeholders(engine.spec.tokens)[soft.kind])


def _prompt_report(engine: Engine, reference: Engine, p: MediaPrompt) -> PromptReport:
    engine, reference = (_in_chunks(e, p.chunk) for e in (engine, reference))
    tokens = p.tokens.shape[1]
    every = engine.all_logits and tokens * engine.spec.text.vocab_size <= EVERY_LOGITS
    phases = _Phases(engine.runtime)
    got = _logits(replace(engine, runtime=phases), p, every)  # type: ignore[arg-type]
    want = _logits(reference, p, every)
    budget, errors = _judged(
        engine.dtype, got, want, lambda: _logits(wide_engine(reference), p, every)
    )
    holds = budget.holds(errors)
    report = PromptReport(
        tokens + len(p.after),
        p.chunk,
        counts(p.soft),
        tuple(dict.fromkeys(phases.ran)),
        *_worst(errors),
        budget,
        budget.all_hold(errors),
    )
    if report.ok:
        return report
    place, first = _first(engine, reference, p, budget.inside)
    early = not bool(holds[: -len(p.after)].all())
    phase = place.phase if place else _media_phase(report.phases) if early else "decode"
    return replace(report, phase=phase, first_difference=first)


def _in_chunks(engine: Engine, chunk: int) -> Engine:
    return replace(engine, limits=replace(engine.limits, prefill_chunk=chunk))


def _logits(engine: Engine, p: MediaPrompt, every: bool) -> Tensor:
    session = engine.session()
    return torch.cat([step(session) for step in p.steps(every)])  # type: ignore[misc]


def _first(
    engine: Engine, reference: Engine, p: MediaPrompt, budget: Tolerance
) -> tuple[ChunkPosition | None, str]:
    found = first_value(engine, reference, p.steps(), budget)
    return found or (None, "none inside; the logits differ")


def _media_phase(phases: Sequence[str]) -> str:
    return BLOCKS if BLOCKS in phases else "prefill"


class _Phases:
    def __init__(self, runtime: Any) -> None:
        self.runtime, self.new_state = runtime, runtime.new_state
        self.ran: list[str] = []

    def run(self, phase: str, *rest: Any) -> Tensors | None:
        self.ran.append(phase)
        out: Tensors | None = self.runtime.run(phase, *rest)
        return out
