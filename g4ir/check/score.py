"""Log-probabilities of texts, and their KL divergence from a baseline's.

Files are read in blocks and windows computed in chunks: neither a long file nor the logits of a
long window are ever in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch

from g4ir.artefact.directory import rebuild
from g4ir.engine.embeddings import need_decoder
from g4ir.engine.engine import Engine
from g4ir.engine.prefill import CHUNK_LOGITS
from g4ir.errors import InputError
from g4ir.ui.progress import Progress, no_progress

from .documents import IGNORED, Reader, Window

Tensor = torch.Tensor
#: logits whose probabilities are computed together, in float64: more exceed the CPU's cache, and
#: their memory is mapped again each time (twice as slow with a vocabulary of 262,144)
BLOCK = 1 << 19


def score_rows(got: Tensor, labels: Tensor, want: Tensor | None = None) -> Tensor:
    """Return f64[1, N]: the log-probability (nats) of each label i64[N] by a row of logits
    [N, vocab]. With `want`, a baseline's logits: f64[4, N], also the baseline's log-probability,
    KL(baseline || engine), and 1.0 where both have the same top token."""
    parts = [torch.zeros(1 if want is None else 4, 0).double()]
    size = max(1, BLOCK // got.shape[-1])
    for start in range(0, len(labels), size):
        label = labels[start : start + size, None]
        logits = [t[start : start + size].cpu() for t in (got, want) if t is not None]
        log = [t.double().log_softmax(-1) for t in logits]
        rows = [x.gather(1, label)[:, 0] for x in log]
        if want is not None:
            (q, p), (best, baseline) = log, (t.argmax(-1) for t in logits)
            rows += [torch.linalg.vecdot(p.exp(), p - q), (best == baseline).double()]
        parts.append(torch.stack(rows))
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class Sums:
    """Sums over `tokens` scored tokens. `nll`: negative log-likelihood (nats); `against`: with a
    baseline, (the baseline's NLL, KL(baseline || engine), number of tokens at which both have the
    same top token)."""

    tokens: int = 0
    nll: float = 0.0
    against: tuple[float, ...] | None = None

    @classmethod
    def of(cls, rows: Tensor) -> Sums:
        """Return the sums of the rows of `score_rows`."""
        logprob, *pair = rows.sum(1).tolist()
        return cls(rows.shape[1], -logprob, (-pair[0], *pair[1:]) if pair else None)

    def __add__(self, other: Sums) -> Sums:
        pairs = zip(self.against or (0.0,) * 3, other.against) if other.against else None
        against = tuple(a + b for a, b in pairs) if pairs else self.against
        return Sums(self.tokens + other.tokens, self.nll + other.nll, against)

    def means(self) -> dict[str, Any]:
        """Return `tokens`, and the means `nll` (nats a token) and `ppl`, with a baseline
        `baseline_nll`, `baseline_ppl`, `kl` and `same_top`; without tokens the means are None."""
        mean = [x / self.tokens if self.tokens else None for x in (self.nll, *(self.against or ()))]
        names = ("nll", "baseline_nll", "kl", "same_top")[: len(mean)]
        means: dict[str, Any] = {"tokens": self.tokens, **dict(zip(names, mean))}
        for name, of in (("ppl", "nll"), ("baseline_ppl", "baseline_nll")):
            if of in means:
                means[name] = perplexity(means[of])
        return means


def perplexity(nll: float | None) -> float | None:
    """Return exp(nll); infinity on overflow, None for None."""
    return None if nll is None else math.exp(nll) if nll < 709 else math.inf


@dataclass(frozen=True)
class Score:
    """The scores of a document, or of one window of a document that is longer than a window:
    `logprobs[i]` is the log-probability (nats) of the label of `ids[i]`, None if it is not scored;
    `ids` include the <bos>, or the repeated token, with which each window begins."""

    document: str | int
    part: int
    ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float | None, ...] = field(repr=False)
    sums: Sums

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return self.sums.tokens

    @property
    def nll(self) -> float | None:
        """Mean negative log-likelihood (nats a token), the loss of transformers with these labels;
        None if every label is ignored."""
        return self.sums.means()["nll"]

    @property
    def ppl(self) -> float | None:
        """Perplexity: exp(nll)."""
        return perplexity(self.nll)

    @property
    def name(self) -> str:
        """Name of the document, with `#part` for its later windows."""
        return f"{self.document}{f'#{self.part}' if self.part else ''}"


def score(engine: Engine, texts: Any) -> list[Score]:
    """Return the score of each text: log-probabilities of given tokens.

    texts: one or several, each a string, a list of token ids, or a mapping with `text` or `tokens`,
    and optionally `bos` (False: no <bos> before a text) and `labels` (as many as tokens, -100:
    not scored). Strings begin with <bos>. Texts longer than the engine's max_seq are scored in
    windows. InputError for an encoder's engine or one without all_logits, and for a text of fewer
    than 2 tokens, <bos> included.
    """
    require_all_logits(engine)
    windows = Reader(engine, engine.limits.max_seq).values(texts)
    scores = score_windows([engine], windows)
    return [_joined([*parts]) for _, parts in groupby(scores, attrgetter("document"))]


def _joined(parts: list[Score]) -> Score:
    ids = tuple(i for p in parts for i in p.ids)
    logprobs = tuple(x for p in parts for x in p.logprobs)
    return replace(parts[0], ids=ids, logprobs=logprobs, sums=sum((p.sums for p in parts), Sums()))


def require_all_logits(engine: Engine) -> None:
    """Raise InputError for an encoder's engine, and for one without all_logits, with the command
    that builds it with them."""
    need_decoder(engine.spec, engine.label)
    if not engine.all_logits:
        again = rebuild(engine.path, engine.configured(all_logits=True).facts)
        why = f"{engine.label} was built without --all-logits, which scoring needs"
        raise InputError(f"{why}; {again}")


def score_windows(
    engines: Sequence[Engine], windows: Iterable[Window], progress: Progress = no_progress
) -> Iterator[Score]:
    """Yield the score of each window by the first engine, against the second if there is one.
    Both engines have all_logits, the same vocabulary, and a context of at least one window."""
    yield from score_sessions(
        [e.session() for e in engines], windows, window_chunk(engines), progress
    )


def window_chunk(engines: Sequence[Engine]) -> int:
    """Return how many tokens of a window engines of one vocabulary compute in one chunk."""
    max_rows = max(1, CHUNK_LOGITS // engines[0].spec.text.vocab_size)
    return min(max_rows, *(e.limits.prefill_chunk for e in engines))


def require_same_tokens(engine: Engine, other: Engine, name: str) -> None:
    """Raise InputError, which names the `other` engine, unless both have the same tokens."""
    if (sizes := [e.spec.text.vocab_size for e in (engine, other)])[0] != sizes[1]:
        problem = "vocabularies of {} and {} tokens, which must be the same".format(*sizes)
        raise InputError(f"{name}: {problem}")
    if engine.tokenizer().get_vocab() != other.tokenizer().get_vocab():
        raise InputError(f"{name}: its tokenizer has other tokens than that of {engine.label}")


def score_sessions(
    sessions: Sequence[Any], windows: Iterable[Window], size: int, progress: Progress
) -> Iterator[Score]:
    """Yield the score of each window, computed in chunks of `size` tokens; see score_windows.
    sessions: objects with `reset` and `prefill` as a Session has them."""
    total = 0
    for w in windows:
        rows = torch.cat([*score_chunks(sessions, w, size)], 1)
        values = iter(rows[0].tolist())
        scored = [i > 0 and label != IGNORED for i, label in enumerate(w.labels)]
        logprobs = tuple(next(values) if is_scored else None for is_scored in scored)
        yield Score(w.document, w.part, tuple(w.ids), logprobs, Sums.of(rows))
        total += len(w.ids)
        progress(f"{total} tokens scored")


def score_chunks(sessions: Sequence[Any], w: Window, size: int) -> Iterator[Tensor]:
    """Yield `score_rows` of each chunk of `size` tokens (without ignored labels), after resetting
    the sessions."""
    for s in sessions:
        s.reset()
    ids, labels = torch.tensor(w.ids[:-1]), torch.tensor(w.labels[1:])
    for tokens, label in zip(ids.split(size), labels.split(size)):
        at = (label != IGNORED).nonzero()[:, 0]
        # If nothing is scored, only the last token's logits are computed.
        outputs = [s.prefill(tokens[None], all_logits=len(at) > 0)[0] for s in sessions]
        logits = [t[at] for t in outputs] if len(at) < len(label) and len(at) else outputs
        yield score_rows(logits[0], label[at], *logits[1:])
