"""One report on an engine: exactness against the interpreter, and recall over long contexts.

Parts: logits at every position of a short text against the interpreter; the same text in every mode
(modes.py); quantisation against the original weights; for each context length perplexity by
position and needles at ten depths, compared with the interpreter's. A part returns JSON values; one
that passed is not computed again for the same engine, sources of g4ir and instruction set.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from g4ir.artefact.digests import sources_digest
from g4ir.engine.engine import Engine
from g4ir.engine.session import Session
from g4ir.errors import InputError, TrustError
from g4ir.ui.files import write_file
from g4ir.ui.paths import cache_root, private
from g4ir.ui.processor import instruction_set
from g4ir.ui.progress import Progress, no_progress
from g4ir.ui.units import count_text

from .documents import Window
from .haystack import Haystack, Needle, haystack, text_of
from .logits import verify_engine
from .modes import compare_modes
from .reference import reference_engine, unquantised
from .report import VerifyReport
from .score import Sums, require_all_logits, score_chunks, score_rows, window_chunk
from .tokens import STEPS, window_of

Tensor = torch.Tensor
#: parts of a document whose mean perplexity and divergence are reported
BUCKETS = 10
#: max KL divergence of a bucket or needle from the interpreter, as a multiple of the first bucket's
GROWTH = 10.0
#: max logits of the short text: 256 tokens with a vocabulary of 262,144
LOGITS = 1 << 26


class OutOfTimeError(Exception):
    """The time limit ended a part."""


@dataclass(frozen=True)
class Part:
    """A part of the report. ok: None if it was not run, or has no verdict; `summary` says which;
    `data`: JSON values."""

    engine: str
    name: str
    ok: bool | None
    summary: str
    seconds: float = 0.0
    cached: bool = False
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Proof:
    """All parts of a report on one model."""

    model: str
    parts: tuple[Part, ...]

    @property
    def ok(self) -> bool:
        """Whether no part failed."""
        return all(p.ok is not False for p in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"schema": 1, "model": self.model, "ok": self.ok, **asdict(self)}


#: result of a part: ok, summary, data
Result = tuple[bool | None, str, dict[str, Any]]


@dataclass(frozen=True)
class Prover:
    """Runs the parts of a report on engines of one model, one per KV cache format. contexts:
    lengths in tokens; deadline: by time.monotonic(); cache: folder of the parts that passed, or
    None."""

    contexts: Sequence[int]
    checkpoint: str | Path | None = None
    deadline: float = float("inf")
    cache: Path | None = None
    progress: Progress = no_progress

    def parts(self, label: str, engine: Engine, first: bool) -> Iterator[Part]:
        """Run and yield the report's parts for one engine: logits, modes, quantisation (for the
        `first` engine only), then contexts. The tolerance of the logits also limits the differences
        of modes and contexts."""
        run = partial(self._part, label, engine)
        logits = run("logits", "", lambda: check_logits(engine, self.progress))
        yield logits
        limits = logits.data.get("limits")
        if limits is None:
            yield Part(label, "modes", None, "not run: the logits were not compared")
        else:
            yield run("modes", "", lambda: compare_modes(engine, limits))
        if first:
            weights = partial(compare_weights, engine, self.checkpoint)
            yield run("quantisation", str(self.checkpoint), weights)
        for length in self.contexts:
            name = f"context {count_text(length)}"
            read = partial(self._context, engine, length, limits or {"kl": 0.0})
            yield run(name, "", read)

    def _part(
        self, label: str, engine: Engine, name: str, options: str, run: Callable[[], Result]
    ) -> Part:
        """Return a part from the cache, or run it and store it if it passed."""
        facts = [engine.facts.digest, sources_digest(), instruction_set().name, name, options]
        file = self.cache and self.cache / sha256(json.dumps(facts).encode()).hexdigest()
        if file and file.is_file():
            with suppress(ValueError, TypeError, OSError):
                return Part(**{**json.loads(file.read_text()), "engine": label, "cached": True})
        if time.monotonic() >= self.deadline:
            return Part(label, name, None, "not run: the time limit is reached")
        self.progress(f"{label}: {name}")
        start = time.monotonic()
        try:
            ok, summary, data = run()
        except OutOfTimeError as e:
            return Part(label, name, None, f"not run to its end: {e}", time.monotonic() - start)
        part = Part(label, name, ok, summary, round(time.monotonic() - start, 1), data=data)
        if file and ok:
            with suppress(OSError, TrustError):
                private(file.parent)
                write_file(file, [json.dumps(asdict(part)).encode()])
        return part

    def _context(self, engine: Engine, length: int, limits: Mapping[str, Any]) -> Result:
        return read_context(engine, haystack(engine, length), limits, self.deadline, self.progress)


def proof_cache() -> Path:
    """Return the folder of earlier parts that passed."""
    return cache_root() / "prove"


def check_contexts(engine: Engine, contexts: Sequence[int]) -> None:
    """Raise InputError for a context that is longer than the engine's max_seq or too short for ten
    needles, and for an engine without all_logits."""
    require_all_logits(engine)
    for length in contexts:
        if length > engine.limits.max_seq:
            limit = f"{engine.label} was built with --max-seq {engine.limits.max_seq}"
            raise InputError(f"--ctx {count_text(length)}: {limit}; give a shorter one")
        haystack(engine, length)


def check_logits(engine: Engine, progress: Progress = no_progress) -> Result:
    """Compare logits with the interpreter's at every position of a text, in chunks, single steps
    and, if the engine has them, verification steps. The text is longer than the sliding window,
    unless that takes more than max_seq tokens or LOGITS logits (but at least 64 tokens)."""
    vocab, max_seq = engine.spec.text.vocab_size, engine.limits.max_seq
    count = min(max_seq, window_of(engine) + 2 * STEPS, max(LOGITS // vocab, 64))
    ids = text_of(engine, count)
    report = verify_engine(engine, "reference", ids, progress=progress)
    errors = [p.relative for p in report.positions]
    worst = max(range(len(errors)), key=errors.__getitem__)
    right, at = sum(p.ok for p in report.positions), report.positions[worst].at
    summary = f"{right} of {len(errors)} positions within {report.budget}"
    assert report.greedy
    summary += f"; worst {errors[worst]:.1e} at {at}; greedy tokens {report.greedy.text()}"
    if report.first_difference:
        summary += f"; first difference: {report.first_difference}"
    data = {"at": [p.at for p in report.positions], "relative": errors, "limits": limits_of(report)}
    return report.ok, summary, data


def limits_of(report: VerifyReport) -> dict[str, float]:
    """Return the differences that rounding alone explains: `row`: distance of a row of logits,
    relative to its RMS; `gap`: between two logits whose order may change, likewise; `kl`: a KL
    divergence."""
    row = report.budget.gap / 2
    return {"row": row, "gap": report.budget.gap, "kl": row**2}


def compare_weights(engine: Engine, checkpoint: str | Path | None) -> Result:
    """Measure NLL and KL divergence against the same model on its original weights, without any
    quantisation; a checkpoint that has only quantised weights is dequantised."""
    ids = torch.tensor(text_of(engine, min(engine.limits.max_seq, 512)))
    with unquantised(engine, checkpoint, dequantise=True) as other:
        if isinstance(other, str):
            return None, other, {}
        rows = torch.cat([*_scored(engine, [engine.session(), other.session()], ids)], 1)
    data = Sums.of(rows).means()
    summary = "NLL {nll:.4f} against {baseline_nll:.4f}, KL {kl:.5f}, same token {same_top:.1%}"
    summary += f"; against the values of {Path(checkpoint).absolute()}" if checkpoint else ""
    return None, summary.format(**data), data


def _scored(engine: Engine, sessions: Sequence[Session], ids: Tensor) -> Iterator[Tensor]:
    """Yield `score_rows` of each chunk of a text, for the tokens after its first."""
    text = Window("", 0, ids.tolist(), ids.tolist())
    return score_chunks(sessions, text, window_chunk([engine]))


def read_context(
    engine: Engine,
    text: Haystack,
    limits: Mapping[str, Any],
    deadline: float = float("inf"),
    progress: Progress = no_progress,
) -> Result:
    """Read a document; return perplexity by position, and whether a question at the end finds each
    needle. The interpreter reads it too, unless that would exceed the deadline: then nothing is
    compared.
    OutOfTimeError if the deadline passes while the document is read."""
    sessions = [engine.session(), reference_engine(engine).session()]
    rows, done, start = list[Tensor](), 0, time.monotonic()
    for chunk in _scored(engine, sessions, text.ids):
        rows.append(chunk)
        done += chunk.shape[1]
        progress(f"{done} of {len(text.ids)} tokens")
        elapsed = time.monotonic() - start
        if time.monotonic() > deadline:
            raise OutOfTimeError(f"the time limit is reached at token {done} of {len(text.ids)}")
        if len(sessions) > 1 and start + elapsed * len(text.ids) / done > deadline:
            del sessions[1]
    compared = len(sessions) > 1
    scores = torch.cat([r if compared else r[:1] for r in rows], 1)
    for s in sessions:  # the question follows the last token, which has no label
        s.prefill(text.ids[None, -1:])
    needles = [_question(sessions, n) for n in text.needles]
    data = {"buckets": _buckets(scores), "needles": needles, "tokens": len(text.ids)}
    num_found = sum(n["found"] for n in needles)
    summary = (
        f"perplexity {float(scores[0].mean().neg().exp()):.2f}, {num_found} of 10 needles found"
    )
    if not compared:
        return None, f"{summary}; not compared with the interpreter, which needs more time", data
    return _judged(summary, data, limits["kl"])


def _buckets(scores: Tensor) -> list[dict[str, Any]]:
    end, buckets = 0, list[dict[str, Any]]()
    for part in scores.tensor_split(BUCKETS, 1):
        start, end = end + 1, end + part.shape[1]
        nll, *pair = part.mean(1).tolist()
        buckets.append(
            {"start": start, "end": end, "nll": -nll, **({"kl": pair[1]} if pair else {})}
        )
    return buckets


def _question(sessions: Sequence[Session], needle: Needle) -> dict[str, Any]:
    """Ask for a needle at the end of the document; the sessions hold the document again
    afterwards."""
    ids = torch.tensor([*needle.key, *needle.value])
    at, outputs = len(needle.key) - 1, list[Tensor]()
    for s in sessions:
        before = s.snapshot()
        outputs.append(s.prefill(ids[None, :-1], all_logits=True)[0, at:])
        s.restore(before)
    labels = ids[at + 1 :]
    nll, *pair = score_rows(outputs[0], labels, *outputs[1:]).mean(1).tolist()
    found = bool((outputs[0].argmax(-1) == labels).all())
    out = {"depth": needle.depth, "nll": -nll, "found": found}
    if pair:
        out |= {"kl": pair[1], "baseline_nll": -pair[0]}
    return out


def _judged(summary: str, data: dict[str, Any], floor: float) -> Result:
    """Return the result: whether the divergences of buckets and needles are at most GROWTH times
    that of the first bucket (which is only rounding if the short text passed), or `floor` if that
    is larger."""
    limit = max(GROWTH * data["buckets"][0]["kl"], floor)
    worst = max(data["buckets"], key=lambda b: b["kl"])
    lost = [n for n in data["needles"] if not n["kl"] <= limit]
    data["limit"] = limit
    summary += f"; KL to the interpreter at most {worst['kl']:.1e}, limit {limit:.1e}"
    if not worst["kl"] <= limit:
        summary += f", tokens {worst['start']} to {worst['end']} differ"
    if lost:
        depths = ", ".join(f"{n['depth']:.0%}" for n in lost)
        summary += f", needles at {depths} differ (KL {max(n['kl'] for n in lost):.1e})"
    return worst["kl"] <= limit and not lost, summary, data
