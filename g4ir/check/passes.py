"""Checks the pipeline pass by pass: each stage against the one before, then the backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from g4ir.engine.engine import Engine
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.encoder import ENCODE
from g4ir.model.text import TEXT_GRAPHS
from g4ir.model.towers import build_towers
from g4ir.passes import CHANGES_MEANING
from g4ir.ui.progress import Progress, no_progress

from . import stages as pipeline
from .compare import compare_stage
from .encoder import chosen_texts, encode_step
from .items import smallest_items
from .stage_report import StageReport, StagesReport, engine_name
from .tokens import chosen_tokens, window_of


def verify_each_pass(
    engine: Engine,
    tokens: Sequence[int] | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress = no_progress,
) -> StagesReport:
    """Run the engine's pipeline again, pass by pass, and compare each stage with the one before it,
    and the engine's backend with the last. Stops at the first stage that fails.

    tokens: ids to compare on, at least 2; default: drawn from a fixed seed, more than a window if
    max_seq permits.
    checkpoint: the weights before packing, if the engine does not refer to them. Raises InputError
    for wrong arguments, PassError if a pass breaks its contract, CheckError if the earlier one of
    two stages has NaN or infinite values.
    """
    plain, series = pipeline.plain_params(engine, checkpoint), list[pipeline.Series]()
    graphs: tuple[str, ...] = (ENCODE,)
    unknown: tuple[str, ...] = ()
    if engine.spec.embedding:
        texts = chosen_texts(engine, tokens)
        sizes, series = [*map(len, texts)], [[encode_step(engine, texts)]]
    else:
        window = window_of(engine)
        count = min(window // 2, 64) + 1 + window + 1 + 3 + pipeline.STEPS
        ids = chosen_tokens(engine, tokens, min(engine.limits.max_seq, count))
        chunks = [*pipeline.chunks_of_tokens(ids, window, engine.limits.prefill_chunk)]
        items, sizes = smallest_items(engine), [c.valid for c in chunks]
        unknown = tuple(i.tower for i in items if not _is_recoverable(plain, engine, i.tower))
        series = [*pipeline.series_of(engine, chunks, [i for i in items if i.tower not in unknown])]
        phases = (step.phase for part in series for step in part)
        graphs = tuple(dict.fromkeys((*TEXT_GRAPHS, *phases)))
    stages = pipeline.stages_of(engine, pipeline.StageWeights(plain, engine.device), graphs)
    reports = _compare_stages(engine, series, stages, progress)
    return StagesReport(
        engine_name(engine),
        sum(sizes),
        tuple(sizes),
        tuple(reports),
        media=tuple(g for g in graphs if g not in (*TEXT_GRAPHS, ENCODE, VERIFY, DRAFT)),
        rounds=tuple(step.valid for part in series for step in part if step.phase == VERIFY),
        unknown=unknown,
        left_out=tuple(g for g in engine.program.graphs if g not in ("embed", *graphs, *unknown)),
    )


def _is_recoverable(plain: pipeline.PlainParams, engine: Engine, tower: str) -> bool:
    """Whether the tower's weights before packing can be recovered."""
    if plain.unpacked is None:
        return True
    graph = build_towers(engine.spec, engine.media, engine.dtype)[tower]
    return all(map(plain.unpacked.holds, graph.params))


def _compare_stages(
    engine: Engine,
    series: Sequence[pipeline.Series],
    stages: Iterator[pipeline.Stage],
    progress: Progress,
) -> list[StageReport]:
    """Return a report of each stage after the first, then of the backend, up to the first that
    fails."""
    reports, old = list[StageReport](), next(stages)
    for new in stages:
        if new.packing == old.packing:
            reports.append(StageReport(new.name))
            continue
        if new.name in CHANGES_MEANING:
            reports.append(StageReport(new.name, meant=True))
        else:
            progress(f"{new.name}: against {old.name}")
            reports.append(compare_stage(old, new, series, engine))
        if not reports[-1].ok:
            return reports
        old = replace(new, traces=old.traces)
    progress(f"{engine.config.backend} backend")
    return [*reports, compare_stage(old, None, series, engine)]
