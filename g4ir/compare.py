"""An engine against a peer: the interpreter on the same weights, or transformers.

Both are given the same tokens in several turns and single steps; logits are compared at every
position that yields them, then 16 greedy tokens. Where fp32 logits are out of budget, the
rounding error of the interpreter on this very model is measured (against float64) and four times
that is allowed. In 16 bits the peer's own rounding is the budget (see distance.py); against
transformers each layer is also computed in float64 on what the engine gave it, which shows a
fault that is smaller than all rounding before it. Where something is out of budget, the values
inside are compared in the order in which they are made, and the first that differs is named.

The outputs of the layers at the end of each chunk are compared too: the curve shows where two
models part. Logits near the softcap are alike whatever made them, so their number is watched.
Of an engine that takes media, towers and a prompt with a picture are compared with the
interpreter's, whomever the rest is compared with (see compare_media.py).
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .backends.base import Runtime
from .backends.reference import ReferenceRuntime, Resident, WideRuntime
from .checkpoint import hub_snapshot, write_checkpoint
from .distance import (
    BUDGETS,
    GROUP,
    ROUNDED,
    Anchor,
    Budget,
    Errors,
    LocalError,
    float64_refusal,
    local_errors,
    local_text,
    median_of,
    row_errors,
    worst_of,
)
from .engine import Engine, Progress, agreed_spec, silent
from .errors import InputError, MissingError
from .finite import advice
from .ir import Program
from .media.choice import placeholders
from .params import text_tensors
from .random_weights import RandomCheckpoint
from .sampling import checked_ids
from .towers import is_tower
from .types import ITEMSIZE, torch_dtype
from .units import size_text
from .wide import other_attention, wide_model

if TYPE_CHECKING:
    import torch

    from .compare_media import MediaReport
    from .session import Session

AGAINST = ("reference", "hf")
#: single steps at the end of the given tokens
STEPS = 24
GREEDY = 16
#: names of what is compared layer by layer
LAYER_OUT, FINAL = re.compile(r"L\d+\.out"), "final.norm"
SEED = 0
#: random weights up to this many bytes are written to disk for transformers
TEMPORARY_BYTES = 1 << 30
#: a row is at the softcap where its largest logit is beyond this share of the cap
SATURATED = 0.99
#: share of rows at the softcap from which on there is an alarm: a sound model is seldom as sure
SATURATED_ROWS = 0.1
#: columns and levels of the curve
CURVE_WIDTH = 60
LEVELS = "_.:-=+*#@"
#: logits of every position are compared up to this many values, else those of each turn's end
EVERY_LOGITS = 1 << 28


@dataclass(frozen=True)
class Position:
    """The logits after one token."""

    at: int
    absolute: float
    relative: float
    cosine: float
    ok: bool
    #: to what the budget's rounding is measured from, or None
    distance: float | None = None


@dataclass(frozen=True)
class Greedy:
    """`differs` is the first token that differs without a close call of the peer, or None."""

    count: int
    equal: int
    differs: int | None


@dataclass(frozen=True)
class LayerError:
    """The output of a layer at the ends of the chunks: worst relative error and worst cosine.
    `value` is the output's name, or the final norm's where a backend shows only that of the last
    layer."""

    layer: int
    value: str
    relative: float
    cosine: float


@dataclass(frozen=True)
class Saturation:
    """Shares of rows, of the engine and of the peer, at the softcap."""

    cap: float
    engine: float
    peer: float

    @property
    def alarm(self) -> bool:
        """Too many: agreement says little, and the model or its weights are probably damaged."""
        return max(self.engine, self.peer) > SATURATED_ROWS

    def text(self) -> str:
        return (
            f"  ALARM: {self.engine:.0%} of the engine's rows and {self.peer:.0%} of the peer's "
            f"are at the softcap\n  (a logit beyond {SATURATED:.0%} of {self.cap:g}; up to "
            f"{SATURATED_ROWS:.0%} is normal): there, agreement says little"
        )


@dataclass(frozen=True)
class Report:
    """What was compared, and how far apart it was."""

    engine: str
    against: str
    budget: Budget
    turns: tuple[int, ...]
    positions: tuple[Position, ...] = field(repr=False)
    greedy: Greedy
    nll: tuple[float, float] | None
    first_difference: str | None
    layers: tuple[LayerError, ...]
    saturation: Saturation | None
    #: None for an engine that takes text alone
    media: MediaReport | None = None
    #: each layer on what the engine itself gave it; () where nothing was measured
    local: tuple[LocalError, ...] = ()

    @property
    def text_ok(self) -> bool:
        """Every position within the budget, their median and each layer too, and the greedy
        tokens the same."""
        whole = self.typical and all(e.ok for e in self.local)
        return whole and all(p.ok for p in self.positions) and self.greedy.differs is None

    @property
    def typical(self) -> bool:
        """Whether the positions as a whole are within the budget, where rounding is measured: all
        of them, and those of single tokens alone, whose graph is another."""
        rounding = self.budget.rounding
        if rounding is None:
            return True
        single = {sum(self.turns[:i]) for i, n in enumerate(self.turns) if n == 1}
        away = {p.at: math.nan if p.distance is None else p.distance for p in self.positions}
        steps = [d for at, d in away.items() if at in single]
        return rounding.fits([*away.values()]) and (len(steps) < GROUP or rounding.fits(steps))

    @property
    def median_distance(self) -> float:
        """Of the positions to what rounding is measured from; not a number where one is not."""
        return median_of([p.distance for p in self.positions if p.distance is not None])

    @property
    def ok(self) -> bool:
        """The text, and what was checked of media."""
        return self.text_ok and (self.media is None or self.media.ok)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        out = {**asdict(self), "ok": self.ok}
        if self.saturation:
            out["saturation"]["alarm"] = self.saturation.alarm
        if self.media:
            out["media"] = self.media.to_dict()
        return out

    def text(self) -> str:
        """A short table."""
        fine, count = sum(p.ok for p in self.positions), sum(self.turns)
        lines = [
            f"{self.engine} against {self.against}, {count} tokens in {_turns(self.turns)}",
            f"  {'logits':10}{'worst':>12}{'position':>10}",
            *(_row(self.positions, *row) for row in _ROWS),
            f"  {'positions':10}{fine:>12} of {len(self.positions)} within the budget: "
            f"{self.budget}",
            *self._rounding_lines(),
            f"  {'greedy':10}{_greedy_text(self.greedy):>12}",
        ]
        if self.nll:
            lines.append("  {:10}{:>12.6f} and {:.6f} of the peer".format("NLL", *self.nll))
        if self.layers:
            lines.append(f"  {'layers':10}{curve([e.relative for e in self.layers])}")
        lines += self.media.lines() if self.media else []
        if self.saturation and self.saturation.alarm:
            lines.append(self.saturation.text())
        if self.first_difference:
            lines.append(f"  first value out of budget: {self.first_difference}")
        return "\n".join([*lines, "ok" if self.ok else "FAILED"])


    def _rounding_lines(self) -> Iterator[str]:
        """The engine's distances beside the peer's, and each layer alone."""
        rounding = self.budget.rounding
        if rounding is None:
            return
        worst = worst_of([p.distance for p in self.positions if p.distance is not None])
        yield (
            f"  {'distance':10}{self.median_distance:>12.2e} in the median, worst {worst:.2e}; the "
            f"peer's {rounding.median:.2e} and {rounding.worst:.2e}"
        )
        if not self.typical:
            yield f"  {'':10}the positions as a whole are out of budget"
        if rounding.reason:
            yield f"  {'':10}{rounding.reason}"
        if self.local:
            yield f"  {'one layer':10}{local_text(self.local)}"
        if bad := [e.layer for e in self.local if not e.ok]:
            yield f"  {'':10}out of budget: {', '.join(bad)}"


#: label, field, whether large is bad
_ROWS = (("max abs", "absolute", 1), ("relative", "relative", 1), ("1 - cosine", "cosine", -1))


def _row(positions: Sequence[Position], label: str, key: str, sign: int) -> str:
    def badness(p: Position) -> float:
        value = sign * float(getattr(p, key))
        return math.inf if math.isnan(value) else value

    worst = max(positions, key=badness)
    value = getattr(worst, key)
    return f"  {label:10}{1 - value if sign < 0 else value:>12.2e}{worst.at:>10}"


def curve(errors: Sequence[float]) -> str:
    """`_.:-=+@`: one column per layer (the worst of several where they do not fit), its height by
    the logarithm; `_` is no error, `!` not a number. Then the first and the last error."""
    step = -(-len(errors) // CURVE_WIDTH)
    columns = [_worst(errors[i : i + step]) for i in range(0, len(errors), step)]
    sizes = sorted(e for e in columns if 0 < e < math.inf)
    if not sizes and not any(columns):
        return f"{len(errors)} layers, bit for bit"
    low, high = (sizes[0], sizes[-1]) if sizes else (1.0, 1.0)
    text = "".join(_level(e, low, high) for e in columns)
    return f"{text}  relative {errors[0]:.1e} at the first, {errors[-1]:.1e} at the last"


def _worst(errors: Sequence[float]) -> float:
    return max(math.inf if math.isnan(e) else e for e in errors)


def _level(error: float, low: float, high: float) -> str:
    if error == 0 or error == math.inf:
        return LEVELS[0] if error == 0 else "!"
    height = math.log(error / low) / math.log(high / low) if high > low else 0.0
    return LEVELS[1 + round(height * (len(LEVELS) - 2))]


def _turns(turns: Sequence[int]) -> str:
    long = [str(n) for n in turns if n > 1]
    steps = len(turns) - len(long)
    return " + ".join([*long, f"{steps} single steps"] if steps else long)


def _greedy_text(g: Greedy) -> str:
    if g.differs is None and g.equal < g.count:
        return f"{g.equal} of {g.count} equal, then a close call"
    return f"{g.equal} of {g.count} equal"


#: logits of a run, and the outputs of its layers
Shown = tuple["torch.Tensor", "Rows"]
#: value -> index of a token -> the value's row there, f32[hidden]
Rows = dict[str, dict[int, "torch.Tensor"]]


class Peer(Protocol):
    """What an engine is compared with, one row at a time."""

    def logits(
        self, tokens: torch.Tensor, turns: Sequence[int], every: bool, ends: Sequence[int] = (),
        layers: Rows | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """i64[T] -> f32[N, vocab] after every token, or at the end of each turn. The outputs of
        the layers at the tokens `ends`, the ends of the chunks, go into `layers`."""

    def wide(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
        """`logits` in float64 on the same weights."""

    def other(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
        """`logits` in another mode of the peer: the same sums in another order."""

    def greedy(
        self, prompt: torch.Tensor, count: int, readable: int
    ) -> tuple[list[int], torch.Tensor]:
        """(tokens, the logits f32[count, readable] that chose them), of the ids below `readable`
        alone."""


def verify_engine(
    engine: Engine,
    against: str = "reference",
    tokens: Sequence[int] | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress = silent,
) -> Report:
    """Compare an engine with `reference` (the interpreter on the engine's own weights) or with
    `hf` (transformers on the checkpoint: the argument, else the one that the engine refers to,
    else the local hub cache; random weights are written to a temporary one).

    tokens: ids to compare on, at least 2, none of them a placeholder of media; default: drawn from
    a fixed seed, enough for several chunks and, as far as max_seq goes, more than a window. Raises
    InputError for a wrong request and MissingError where transformers is missing; a failed
    comparison is in the report.
    """
    if against not in AGAINST:
        raise InputError(f"--against {against!r}: expected {' or '.join(AGAINST)}")
    ids = given_tokens(engine, tokens)
    if ids is None:
        ids = random_tokens(engine, _wanted(engine))
    turns = _plan(engine, len(ids))
    every = engine.all_logits and len(ids) * engine.spec.text.vocab_size <= EVERY_LOGITS
    with _peer(engine, against, checkpoint, progress) as peer:
        report = _compare(engine, peer, ids, turns, every, against, progress)
        if not report.ok:
            progress("looking for the first difference")
            odd = any(math.isnan(p.absolute) for p in report.positions)
            found = (odd and first_not_finite(engine, ids, turns)) or _first(
                engine, peer, ids, turns, report.budget.inside
            )
            report = replace(report, first_difference=found)
        reference = peer.engine if isinstance(peer, EnginePeer) else None
    if not engine.media.kinds:
        return report
    # Imported late: it compares with what is defined here.
    from .compare_media import check_media

    return replace(report, media=check_media(engine, reference, progress))


def _compare(
    engine: Engine, peer: Peer, ids: torch.Tensor, turns: list[int], every: bool, against: str,
    progress: Progress,
) -> Report:  # fmt: skip
    own = EnginePeer(engine)
    rounded = engine.dtype in ROUNDED
    ends = [*accumulate(_chunks(turns, engine.limits.prefill_chunk), initial=-1)][1:]
    shown = range(len(ids)) if rounded else ends
    mine: Rows = {}
    theirs: Rows = {}
    progress(f"{len(ids)} tokens through the engine")
    got = own.logits(ids, turns, every, shown, mine)
    progress(f"{len(ids)} tokens through {against}")
    want = peer.logits(ids, turns, every, shown, theirs)
    where = _positions(turns, every)
    errors = row_errors(got, want)
    budget = BUDGETS[engine.dtype, against]
    local: tuple[LocalError, ...] = ()
    if rounded:
        device = engine.device if against == "reference" else "cpu"
        refusal = float64_refusal(engine, len(ids), len(where), device)
        progress(f"{len(ids)} tokens through {against} {'again' if refusal else 'in float64'}")
        anchor = find_anchor(peer, [ids], turns, every, refusal)
        if anchor and refusal:
            anchor = replace(anchor, rows=want)
        if anchor:
            budget = Budget(rounding=anchor.rounding(want, engine.dtype))
            errors = anchor.errors(got, want)
        if isinstance(peer, HfPeer) and not refusal:
            progress("each layer in float64 on the engine's own inputs")
            local = peer.local(ids, turns, every, (got, mine), (want, theirs), engine.dtype)
    if budget.relative is not None and not bool(budget.holds(errors).all()):
        progress(f"{len(ids)} tokens through the reference in float64")
        budget = widened(budget, rounding_error(engine, ids, turns, every))
    parts = [errors.absolute, errors.relative, errors.cosine, budget.holds(errors)]
    parts += [errors.distance] * rounded
    rows = [Position(*row) for row in zip(where, *(t.tolist() for t in parts), strict=True)]
    progress("greedy tokens")
    text, room = engine.spec.text, engine.limits.max_seq
    greedy = _compare_greedy(own, peer, ids, room, text.readable_ids, budget)
    nll = _nll(got, ids, where), _nll(want, ids, where)
    return Report(
        engine_name(engine), against, budget, tuple(turns), tuple(rows), greedy,
        nll if len(where) > 1 else None, None,
        _layer_errors(engine.spec.text.num_hidden_layers, _only(mine, ends), theirs),
        _saturation(engine.spec.text.final_logit_softcapping, got, want), local=local,
    )  # fmt: skip


def find_anchor(
    peer: Peer, rows: Sequence[torch.Tensor], turns: Sequence[int], every: bool,
    refusal: str | None,
) -> Anchor | None:  # fmt: skip
    """Where distances of a batch of tokens i64[T] are measured from: the peer in float64, rows of
    logits one request after the other; where that is refused no rows, and the other mode alone.
    None where the other mode says nothing: the interpreter's makes nearly the same roundings."""
    import torch

    if refusal and isinstance(peer, EnginePeer):
        return None
    other = torch.cat([peer.other(ids, turns, every).cpu() for ids in rows])
    if refusal:
        return Anchor("its other mode", other[:0], [other], refusal)
    wide = torch.cat([peer.wide(ids, turns, every).cpu() for ids in rows])
    return Anchor("float64", wide, [other])


def _only(rows: Rows, at: Sequence[int]) -> Rows:
    """The rows of some tokens."""
    return {name: {i: t for i, t in held.items() if i in set(at)} for name, held in rows.items()}


def _layer_errors(count: int, mine: Rows, theirs: Rows) -> tuple[LayerError, ...]:
    """By layer, at the tokens that both sides show."""
    import torch

    out = []
    for layer in range(count):
        names = [f"L{layer}.out"] + [FINAL] * (layer + 1 == count)
        name = next((n for n in names if n in mine and n in theirs), None)
        at = sorted(mine[name].keys() & theirs[name].keys()) if name else []
        if name and at:
            errors = row_errors(*(torch.stack([x[name][i] for i in at]) for x in (mine, theirs)))
            relative, cosine = errors.relative.max(), errors.cosine.min()
            out.append(LayerError(layer, name, float(relative), float(cosine)))
    return tuple(out)


def _saturation(
    cap: float | None, got: torch.Tensor, want: torch.Tensor
) -> Saturation | None:
    if not cap:
        return None
    shares = [float((t.abs().amax(-1) > SATURATED * cap).float().mean()) for t in (got, want)]
    return Saturation(cap, *shares)


def widened(budget: Budget, rounding: float) -> Budget:
    """Room for four times the rounding error."""
    assert budget.relative is not None
    return Budget(relative=max(budget.relative, 4 * rounding))


def rounding_error(
    engine: Engine, ids: torch.Tensor, turns: Sequence[int], every: bool
) -> float:
    """How far rounding alone moves this model's logits (relative to the row's rms): the
    interpreter in fp32 against the interpreter in float64. Random weights can make a model in
    which it grows from layer to layer."""
    reference = EnginePeer(reference_engine(engine))
    narrow, wide = reference.logits(ids, turns, every), reference.wide(ids, turns, every)
    return float(row_errors(narrow, wide).relative.max())


def wide_engine(engine: Engine) -> Engine:
    """The text graphs through the interpreter in float64, on the params that the engine holds."""
    runtime = WideRuntime(
        text_graphs(engine.program), engine.limits, engine.device, Resident(engine.runtime)
    )
    return replace(engine, runtime=runtime)


def engine_name(engine: Engine) -> str:
    """The head of a report."""
    return f"{engine.spec.name} ({engine.manifest['backend']}, {engine.device}, {engine.dtype})"


# ---- tokens -----------------------------------------------------------------------------------


def given_tokens(engine: Engine, given: Sequence[int] | None) -> torch.Tensor | None:
    """i64[T], checked; None stays None."""
    import torch

    if given is None:
        return None
    limit = engine.limits.max_seq
    ids = checked_ids(list(given), engine.spec.text.readable_ids, "verify")
    if not 2 <= len(ids) <= limit:
        raise InputError(f"verify: {len(ids)} tokens; expected 2 to {limit} (--max-seq)")
    check_no_media(engine, ids, "verify: --tokens")
    return torch.tensor(ids)


def check_no_media(engine: Engine, ids: Sequence[int], what: str) -> None:
    """InputError on the first id that stands for a soft token: these are tokens of text."""
    kinds = {i: kind for kind, i in placeholders(engine.spec.tokens, engine.media.kinds).items()}
    for at, i in enumerate(ids):
        if i in kinds:
            raise InputError(
                f"{what}: token {i} at index {at} is the placeholder of {kinds[i]}, and no "
                f"{kinds[i]} is given; leave it out"
            )


def random_tokens(engine: Engine, count: int) -> torch.Tensor:
    """i64[count] from a fixed seed."""
    return random_ids(engine, (count,), SEED)


def random_ids(engine: Engine, shape: Sequence[int], seed: int) -> torch.Tensor:
    """i64 of this shape. Every table has a row for each id, and none is a placeholder of media,
    whichever of them an engine of this spec takes."""
    import torch

    top = engine.spec.text.readable_ids
    taken = sorted({i for i in placeholders(engine.spec.tokens).values() if i < top})
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, top - len(taken), tuple(shape), generator=generator)
    for i in taken:
        ids += ids >= i
    return ids


def _wanted(engine: Engine) -> int:
    limits = engine.limits
    return min(limits.max_seq, max(2 * limits.prefill_chunk, _window(engine)) + 2 * STEPS)


def _window(engine: Engine) -> int:
    return max((window for window, _ in engine.rings), default=1)


def _plan(engine: Engine, count: int) -> list[int]:
    """Tokens per turn: a long one, one a little longer than the window, single steps."""
    steps = min(STEPS, count // 3)
    turn = min(_window(engine) + 1, (count - steps) // 2)
    return [n for n in (count - steps - turn, turn, *[1] * steps) if n]


def _positions(turns: Sequence[int], every: bool) -> list[int]:
    """Index of the token after which each row of logits stands."""
    ends = [sum(turns[: i + 1]) - 1 for i in range(len(turns))]
    return list(range(sum(turns))) if every else ends


def _nll(logits: torch.Tensor, ids: torch.Tensor, where: Sequence[int]) -> float:
    """Mean of -log p(next token) over the positions that have a next token."""
    rows = [i for i, at in enumerate(where) if at + 1 < len(ids)]
    following = ids[[where[i] + 1 for i in rows]]
    chances = logits[rows].double().log_softmax(-1)
    return -float(chances.gather(1, following[:, None]).mean())


def _compare_greedy(
    own: Peer, peer: Peer, ids: torch.Tensor, room: int, readable: int, budget: Budget
) -> Greedy:
    prompt = ids[: max(1, room - GREEDY + 1)]
    count = min(GREEDY, room - len(prompt) + 1)
    got, _ = own.greedy(prompt, count, readable)
    want, logits = peer.greedy(prompt, count, readable)
    equal = next((i for i in range(count) if got[i] != want[i]), count)
    if equal == count or _is_close(logits[equal], budget):
        return Greedy(count, equal, None)
    return Greedy(count, equal, equal)


def _is_close(logits: torch.Tensor, budget: Budget) -> bool:
    """The two best logits lie within the budget, so that either may win."""
    best = logits.topk(2).values
    return bool(best[0] - best[1] <= budget.gap * logits.pow(2).mean().sqrt())


# ---- peers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnginePeer:
    """Any engine."""

    engine: Engine

    def logits(
        self, tokens: torch.Tensor, turns: Sequence[int], every: bool, ends: Sequence[int] = (),
        layers: Rows | None = None,
    ) -> torch.Tensor:  # fmt: skip
        import torch

        def keep(place: Place, name: str, t: torch.Tensor) -> None:
            if layers is not None and (name == FINAL or LAYER_OUT.fullmatch(name)):
                # After the last layer whose K and V are read later, a chunk goes on with its end.
                rows, first = t[0].float().cpu(), place.end + 1 - t.shape[1]
                kept = {first + i: row for i, row in enumerate(rows) if first + i in wanted}
                layers.setdefault(name, {}).update(kept)

        wanted = set(ends)

        session = _watched(self.engine, keep) if layers is not None else self.engine.session()
        rows = [session.prefill(t[None], all_logits=every)[0] for t in tokens.split(list(turns))]
        return torch.cat(rows) if every else torch.stack(rows)

    def wide(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
        return EnginePeer(wide_engine(self.engine)).logits(tokens, turns, every)

    def other(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
        """Token by token."""
        return self.logits(tokens, [1] * len(tokens), False)[_positions(turns, every)]

    def greedy(
        self, prompt: torch.Tensor, count: int, readable: int
    ) -> tuple[list[int], torch.Tensor]:
        import torch

        session = self.engine.session()
        rows = [session.prefill(prompt[None])[:, :readable]]
        while len(rows) < count:
            rows.append(session.decode(rows[-1].argmax(-1))[:, :readable])
        logits = torch.cat(rows)
        return logits.argmax(-1).tolist(), logits


@dataclass(frozen=True)
class HfPeer:
    """A transformers text model: one pass without a cache, greedy tokens with one."""

    model: Any

    def logits(
        self, tokens: torch.Tensor, turns: Sequence[int], every: bool, ends: Sequence[int] = (),
        layers: Rows | None = None,
    ) -> torch.Tensor:  # fmt: skip
        import torch

        device = self.model.device
        where = torch.tensor(_positions(turns, every), device=device)
        with torch.no_grad(), _hooked(self.model.get_decoder(), ends, layers):
            ids = tokens[None].to(device)
            out = self.model(input_ids=ids, use_cache=False, logits_to_keep=where)
        rows: torch.Tensor = out.logits[0]
        return rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows

    def wide(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
        with wide_model(self.model):
            return self.logits(tokens, turns, every)

    def other(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
        """The other attention: one product where eager has two, or the reverse."""
        with other_attention(self.model):
            return self.logits(tokens, turns, every)

    def local(
        self, tokens: torch.Tensor, turns: Sequence[int], every: bool, own: Shown, theirs: Shown,
        dtype: str,
    ) -> tuple[LocalError, ...]:  # fmt: skip
        """Each layer, and the head, in float64 on what the engine gave it, beside the same of the
        peer in 16 bits: what a layer adds of its own, whatever the ones before it added."""
        count = len(self.model.get_decoder().layers)
        names = [n for i in range(count) if (n := f"L{i}.out") in own[1] and n in theirs[1]]
        both = {n: own[1][n].keys() & theirs[1][n].keys() for n in names}
        both = {n: at for n, at in both.items() if at}
        if not both:
            return ()  # the engine shows none of its layers
        sides = []
        for logits, shown in (own, theirs):
            rows = {n: {i: shown[n][i] for i in sorted(at)} for n, at in both.items()}
            given = {i + 1: rows[n] for i in range(count) if (n := f"L{i}.out") in rows}
            margins: dict[int, torch.Tensor] = {}
            made: Rows = {}
            with wide_model(self.model, given, margins):
                head = self.logits(tokens, turns, every, range(len(tokens)), made)
            sides.append((logits, rows, head, made, margins))
        return local_errors(count, _positions(turns, every), *sides, dtype=dtype)

    def greedy(
        self, prompt: torch.Tensor, count: int, readable: int
    ) -> tuple[list[int], torch.Tensor]:
        import torch

        past, column, rows = None, prompt[None], []
        with torch.no_grad():
            for _ in range(count):
                out = self.model(
                    input_ids=column, past_key_values=past, use_cache=True, logits_to_keep=1
                )
                past = out.past_key_values
                rows.append(out.logits[0, -1, :readable].float())
                column = rows[-1].argmax()[None, None]
        logits = torch.stack(rows)
        return logits.argmax(-1).tolist(), logits


@contextmanager
def _hooked(decoder: Any, ends: Sequence[int], layers: Rows | None) -> Iterator[None]:
    """Keep the rows `ends` of what the layers and the final norm of a transformers model make."""

    def keeper(name: str) -> Callable[..., None]:
        def keep(module: Any, given: Any, made: Any) -> None:
            out = made[0] if isinstance(made, tuple) else made
            if layers is not None:
                layers[name] = {at: out[0, at].float().cpu() for at in ends}

        return keep

    named = {f"L{i}.out": layer for i, layer in enumerate(decoder.layers)} | {FINAL: decoder.norm}
    hooks = [module.register_forward_hook(keeper(name)) for name, module in named.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _peer(
    engine: Engine, against: str, checkpoint: str | Path | None, progress: Progress
) -> Iterator[Peer]:
    if against == "reference":
        yield EnginePeer(reference_engine(engine))
        return
    _need_transformers()
    with _temporary_folder() as folder:
        with _room_in(folder):
            directory = _checkpoint(engine, checkpoint, folder / "checkpoint", progress)
        agreed_spec(engine.spec, directory)
        progress(f"transformers loads {directory}")
        yield HfPeer(_load_hf(directory, engine.dtype))


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """One that vanishes at the end."""
    with _room_in("none that can be written to"):
        made = tempfile.TemporaryDirectory(prefix="g4ir-verify-", ignore_cleanup_errors=True)
    with made as folder:
        yield Path(folder)


@contextmanager
def _room_in(folder: str | Path) -> Iterator[None]:
    """MissingError where a temporary folder cannot take what is written."""
    try:
        yield
    except OSError as e:
        raise MissingError(
            f"temporary folder: {folder}: {e.strerror or e}; make room there, or set TMPDIR to "
            f"another folder"
        ) from e


def reference_engine(engine: Engine) -> Engine:
    """The same text graphs and params through the interpreter; it holds no towers."""
    runtime = ReferenceRuntime(
        text_graphs(engine.program), engine.limits, engine.device, engine.runtime.source
    )
    return replace(engine, runtime=runtime)


def text_graphs(program: Program) -> Program:
    """Without towers."""
    return Program({name: g for name, g in program.graphs.items() if not is_tower(name)})


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as e:
        raise MissingError("--against hf needs transformers: `pip install 'g4ir[hf]'`") from e


def _load_hf(directory: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch_dtype(dtype), attn_implementation="eager"
        )
        return model.eval()
    except (OSError, ValueError, RuntimeError, KeyError) as e:
        raise InputError(f"transformers cannot load {directory}: {e}") from e
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _checkpoint(
    engine: Engine, given: str | Path | None, temporary: Path, progress: Progress
) -> Path:
    """The directory that transformers loads."""
    kept = engine.manifest["weights"]
    if given is not None:
        return Path(given)
    if kept["kind"] == "random":
        return _write_random(engine, kept["seed"], temporary, progress)
    found = kept.get("directory") or (engine.spec.hub and hub_snapshot(engine.spec.hub))
    if not found:
        raise InputError(
            f"verify --against hf: {engine.path} does not say where its checkpoint is; give "
            f"--checkpoint DIR"
        )
    return Path(found)


def _write_random(engine: Engine, seed: int, directory: Path, progress: Progress) -> Path:
    count = sum(math.prod(shape) for shape in text_tensors(engine.spec).values())
    size = count * ITEMSIZE[engine.dtype]
    if size > TEMPORARY_BYTES:
        raise InputError(
            f"verify --against hf: the random weights are {size_text(size)}, and up to "
            f"{size_text(TEMPORARY_BYTES)} are written for transformers; use --against reference"
        )
    progress(f"writing {size_text(size)} of random weights")
    source = RandomCheckpoint(engine.spec, seed, torch_dtype(engine.dtype))
    return write_checkpoint(directory, engine.spec, source)


# ---- the first value that differs -------------------------------------------------------------


def _first(
    engine: Engine, peer: Peer, ids: torch.Tensor, turns: Sequence[int], budget: Budget
) -> str:
    """The first value inside that is out of budget, in the order in which the peer makes it."""
    if isinstance(peer, EnginePeer):
        return first_difference(engine, peer.engine, ids, turns, budget) or (
            "none inside; the logits differ"
        )
    reference = reference_engine(engine)
    inside = first_difference(engine, reference, ids, turns, budget)
    return f"{inside}, against reference" if inside else (
        "none against reference: the graph or the weights are not what transformers computes"
    )


@dataclass(frozen=True)
class Place:
    """A chunk of a session: the graph that runs it, the index of its first and last token."""

    phase: str
    start: int
    end: int


#: sees a chunk, the name of a value in it and the value
ChunkWatch = Callable[[Place, str, "torch.Tensor"], None]
#: what a session is asked for
Step = Callable[["Session"], object]


@dataclass(frozen=True)
class _Watched:
    """A runtime whose values are shown to `watch`, for one row without padding. On a GPU decode
    steps stay what they are for users, one replayed graph, of which nothing shows; `deep` runs
    them step by step."""

    runtime: Runtime
    watch: ChunkWatch
    cuda: bool
    deep: bool

    def new_state(self, batch: int) -> Any:
        return self.runtime.new_state(batch)

    def run(
        self, phase: str, feeds: dict[str, torch.Tensor], state: Any, context: int, logits: bool
    ) -> torch.Tensor | None:
        if self.cuda and phase == "decode" and not self.deep:
            return self.runtime.run(phase, feeds, state, context, logits)
        start, end = (int(feeds["positions"][0, i]) for i in (0, -1))
        watch = partial(self.watch, Place(phase, start, end))
        return self.runtime.run(phase, feeds, state, context, logits, watch)


def first_difference(
    engine: Engine, peer: Engine, ids: torch.Tensor, turns: Sequence[int], budget: Budget
) -> str | None:
    """Run both chunk by chunk; name the first value that both make and that is out of budget."""

    def feed(piece: torch.Tensor, session: Session) -> object:
        return session.prefill(piece[None])

    sizes = [*_chunks(turns, engine.limits.prefill_chunk)]
    steps = (partial(feed, piece) for piece in ids[: sum(sizes)].split(sizes))
    found = first_value(engine, peer, steps, budget)
    return found[1] if found else None


def first_value(
    engine: Engine, peer: Engine, steps: Iterable[Step], budget: Budget
) -> tuple[Place, str] | None:
    """Take both through the steps, one row without padding; where the first value lies that both
    make and that is out of budget, and what is to be said of it."""
    made: dict[tuple[Place, str], torch.Tensor] = {}
    found: list[tuple[Place, str]] = []

    def keep(place: Place, name: str, value: torch.Tensor) -> None:
        # A copy: the next chunk of the step may be made in the same memory.
        made[place, name] = value.clone()

    def compare(place: Place, name: str, want: torch.Tensor) -> None:
        got = made.get((place, name))
        if found or got is None or not want.is_floating_point():
            return
        errors = row_errors(got, want)
        if not bool(budget.holds(errors).all()):
            found.append((place, _described(name, place, errors)))

    one = _watched(engine, keep, deep=True)
    two = _watched(peer, compare, deep=True)
    for step in steps:
        made.clear()
        step(one)
        step(two)
        if found:
            return found[0]
    return None


def first_not_finite(engine: Engine, ids: torch.Tensor, turns: Sequence[int]) -> str | None:
    """The first value that is NaN or infinite where the interpreter runs the engine's graphs."""
    found: list[str] = []

    def look(place: Place, name: str, value: torch.Tensor) -> None:
        if not found and not bool(value.isfinite().all()):
            found.append(f"{_placed(name, place)}: NaN or infinite; {advice(engine.dtype)}")

    session = _watched(reference_engine(engine), look, deep=True)
    sizes = [*_chunks(turns, engine.limits.prefill_chunk)]
    for piece in ids[: sum(sizes)].split(sizes):
        session.prefill(piece[None])
        if found:
            return found[0]
    return None


def _watched(engine: Engine, watch: ChunkWatch, deep: bool = False) -> Session:
    runtime = _Watched(engine.runtime, watch, engine.device == "cuda", deep)
    return replace(engine, runtime=runtime).session()  # type: ignore[arg-type]


def _described(name: str, place: Place, errors: Errors) -> str:
    return (
        f"{_placed(name, place)}: relative error {float(errors.relative.max()):.1e}, cosine "
        f"{float(errors.cosine.min()):.6f}"
    )


def _placed(name: str, place: Place) -> str:
    layer = re.match(r"L(\d+)\.", name)
    where = f"layer {layer[1]}" if layer else "outside the layers"
    return f"%{name} ({where}) in the chunk at token {place.start}"


def _chunks(turns: Sequence[int], chunk: int) -> Iterator[int]:
    for n in turns:
        for start in range(0, n, chunk):
            yield min(chunk, n - start)
