"""Sessions: chunks, turns, ragged rows, truncation, resets and refusals, the same on every flow.

What is expected comes from the reference backend, one row alone, in one call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir import Engine, Session
from g4ir.backends import find_backend
from g4ir.backends.primitives.network import TURNED
from g4ir.engine.inputs import padded
from g4ir.errors import InputError
from tests.contract.flows import Flow
from tests.engines import CHUNK, MAX_SEQ, agrees, some_tokens
from tests.refused.cases import Case, cases, fits

W = 8
REFUSED = [*cases(Path(__file__).with_name("refused.yaml"))]


def name_of(engine: Engine) -> str:
    return engine.spec.name.removesuffix("-checkpoint")


def caches(session: Session) -> dict[str, torch.Tensor]:
    """A copy of all slots."""
    return {name: t.clone() for name, t in session.state.views(MAX_SEQ).items()}


Caches = dict[str, torch.Tensor]


def same(a: Caches, b: Caches) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


class AnyOrder:
    """Acts on two sessions of two rows in turn, at random; what is held is known as a text, and
    logits are those of the text alone."""

    def __init__(self, engine: Engine, fresh: Callable[[torch.Tensor], torch.Tensor], seed: int):
        self.engine, self.fresh, self.rng = engine, fresh, random.Random(seed)
        self.sessions = [engine.session(2) for _ in range(2)]
        self.held: list[list[list[int]]] = [[[], []], [[], []]]
        self.kept: list[Any] = [None, None]

    def run(self, acts: int, kinds: Sequence[str] = ()) -> None:
        for _ in range(acts):
            self.at = self.rng.randrange(2)
            self.session, self.texts = self.sessions[self.at], self.held[self.at]
            self.room = self.engine.limits.max_seq - max(map(len, self.texts))
            getattr(self, self.rng.choice([*ACTS, *kinds]))()
            for session, texts in zip(self.sessions, self.held, strict=True):
                assert session.length.tolist() == [len(t) for t in texts]

    def new(self, *counts: int) -> list[list[int]]:
        return [[self.rng.randrange(3, 500) for _ in range(n)] for n in counts]

    def agree(self, row: int, logits: torch.Tensor) -> None:
        agrees(logits.float(), self.fresh(torch.tensor(self.texts[row])))

    def append(self, more: Sequence[list[int]], logits: torch.Tensor) -> None:
        for row, tokens in enumerate(more):
            self.texts[row] += tokens
            if tokens:
                self.agree(row, logits[row])
            else:
                assert not logits[row].any()

    def prefill(self) -> None:
        if self.room > 20:
            more = self.new(*(self.rng.randint(0, 20) for _ in range(2)))
            self.append(more, self.session.prefill(*padded(dict(enumerate(more)), 2)))

    def decode(self) -> None:
        if self.room > 1 and all(self.texts):
            column, active = self.new(2)[0], self.rng.choice([[1, 1], [1, 0], [0, 1]])
            logits = self.session.decode(column, torch.tensor(active).bool())
            self.append([[t] * on for t, on in zip(column, active, strict=True)], logits)

    def verify(self) -> None:
        """A token, drafts behind it, of which some are right."""
        most = self.engine.draft_tokens + 1
        if self.room > most and all(self.texts):
            rows = self.rng.choice([(0, 1), (0,), (1,)])
            fed = {row: self.new(self.rng.randint(1, most))[0] for row in rows}
            right = {row: self.rng.randint(1, len(fed[row])) for row in rows}
            before = self.session.length
            logits = self.session.verify(*padded(fed, 2))
            self.session.truncate(before + torch.tensor([right.get(row, 0) for row in range(2)]))
            for row, count in right.items():
                self.texts[row] += fed[row][:count]
                self.agree(row, logits[row, count - 1])

    def truncate(self) -> None:
        keep = [max(0, len(t) - self.rng.choice((0, 1, 1, 9, 99))) for t in self.texts]
        with suppress(InputError):  # rings
            self.session.truncate(torch.tensor(keep))
            self.held[self.at] = [t[:n] for t, n in zip(self.texts, keep, strict=True)]

    def reset(self) -> None:
        row = self.rng.randrange(2)
        self.session.reset([row])
        self.texts[row] = []

    def keep(self) -> None:
        self.kept[self.at] = self.session.snapshot(), [[*t] for t in self.texts]

    def back(self) -> None:
        if self.kept[self.at]:
            snapshot, texts = self.kept[self.at]
            self.session.restore(snapshot)
            self.held[self.at] = [[*t] for t in texts]

    def copy(self) -> None:
        other, start, row = (self.rng.randrange(2) for _ in range(3))
        self.session.copy_row(self.sessions[other], start, row)
        self.texts[row] = [*self.held[other][start]]


ACTS = ("prefill", "prefill", "decode", "decode", "truncate", "reset", "keep", "back", "copy")


@pytest.mark.parametrize("seed", [0, *[pytest.param(i, marks=pytest.mark.full) for i in (1, 2, 3)]])
def test_acts_in_any_order(engine: Engine, fresh: Any, flow: Flow, seed: int) -> None:
    """Turns, steps, cuts, resets, copies and snapshots of ragged rows, of two sessions in turn."""
    AnyOrder(engine, fresh, seed).run(30 if flow.emulated else 60)


@pytest.mark.parametrize("lengths", [[2 * CHUNK + 5] * 2, [2 * CHUNK + 5, 7]], ids=str)
def test_logits_of_every_token(every: Engine, fresh: Any, lengths: list[int]) -> None:
    """Zeros behind the tokens of a shorter row."""
    rows = min(2, every.limits.max_batch)
    tokens, lengths = some_tokens(rows, 2 * CHUNK + 5), lengths[-rows:]
    got = every.session(rows).prefill(tokens, lengths, all_logits=True)
    assert got.shape == (rows, 2 * CHUNK + 5, 512) and got.dtype == torch.float32
    for row, count in enumerate(lengths):
        for at in (0, 6, W - 1, W, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4):
            if at < count:
                agrees(got[row, at], fresh(tokens[row, : at + 1], name_of(every)))
            else:
                assert not got[row, at].any()


def test_truncate_past_a_ring_changes_nothing(any_engine: Engine, fresh: Any) -> None:
    """Nor may a second truncation go back further than the first, until the row has grown."""
    tokens, session = some_tokens(1, 31), any_engine.session()
    session.prefill(tokens[:, :30])
    for _ in range(2):
        before = caches(session)
        for keep in (28, 1):
            with pytest.raises(InputError, match=rf"row 0 to {keep}: its ring of 8 .* least 29"):
                session.truncate(keep)
        assert session.length.tolist() == [30] and same(before, caches(session))
        session.truncate(29)
        session.decode(tokens[:, 29])
    agrees(session.decode(tokens[:, 30])[0], fresh(tokens[0], name_of(any_engine)))
    session.truncate(0)
    agrees(session.prefill(tokens[:, :9])[0], fresh(tokens[0, :9], name_of(any_engine)))


def test_max_seq_can_be_filled(any_engine: Engine, fresh: Any) -> None:
    tokens, session = some_tokens(1, MAX_SEQ + 1), any_engine.session()
    session.prefill(tokens[:, : MAX_SEQ - 1])
    got = session.decode(tokens[:, MAX_SEQ - 1])
    agrees(got[0], fresh(tokens[0, :MAX_SEQ], name_of(any_engine)))
    before = caches(session)
    with pytest.raises(InputError, match=rf"would have {MAX_SEQ + 1} tokens .*--max-seq {MAX_SEQ}"):
        session.decode(tokens[:, MAX_SEQ])
    assert session.length.tolist() == [MAX_SEQ] and same(before, caches(session))
    with pytest.raises(InputError, match="would have 129"):
        any_engine.session().prefill(tokens)


def test_empty_turn(engine: Engine) -> None:
    session = engine.session(2)
    nothing = torch.empty(2, 0, dtype=torch.int64)
    for tokens, lengths in ((nothing, None), (some_tokens(2, 3), [0, 0])):
        assert not session.prefill(tokens, lengths).any()
    assert session.length.tolist() == [0, 0]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_session_refuses(engine: Engine, case: Case) -> None:
    """One message, and nothing is changed."""
    rows, held = case.given["rows"], case.given["held"]
    session = engine.session(rows)
    session.prefill(some_tokens(rows, held))
    with pytest.raises(InputError) as caught:
        getattr(session, case.way)(*case.given["args"])
    assert fits(case.says, str(caught.value)), caught.value
    assert session.length.tolist() == [held] * rows


def test_what_a_session_is_not_made_for(engine: Engine, last: Engine) -> None:
    with pytest.raises(InputError, match="found int32"):
        engine.session(2).prefill(torch.ones(2, 1, dtype=torch.int32))
    for batch in (0, 4, -1):
        with pytest.raises(InputError, match="built for 1 to 3 sequences"):
            engine.session(batch)
    with pytest.raises(InputError, match="all-logits"):
        last.session().prefill(some_tokens(1, 3), all_logits=True)


def test_steps_return_the_same_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as those of prefill and decode, which are copies for the caller to keep."""
    made, run = list[Any](), engine.runtime.run

    def kept(*args: Any) -> Any:
        out = run(*args)
        made.append(out)
        return out

    monkeypatch.setattr(engine.runtime, "run", kept)
    tokens = some_tokens(2, CHUNK + 3)
    own, plain = engine.session(2), engine.session(2)
    for step in (tokens, tokens[:, :1]):
        held, copy = [*own.prefill_steps(step)][-1], plain.prefill(step)
        assert held is not None
        assert torch.equal(held, copy)
        assert copy.data_ptr() != made[-1]["logits"].data_ptr() and copy.dtype == torch.float32
    assert held.data_ptr() == made[-2]["logits"].data_ptr()  # nothing is copied
    lengths, active = torch.tensor([1, 0]), torch.tensor([True, False])
    held, copy = own.verify(tokens[:, :1], lengths), plain.decode(tokens[:, 0], active)
    assert held.data_ptr() == made[-2]["logits"].data_ptr()
    assert torch.equal(held[0, 0], copy[0]) and not copy[1].any() and copy[0].any()


def test_a_snapshot_of_another_session(engine: Engine) -> None:
    with pytest.raises(InputError, match="the snapshot has 2 rows, the session 1"):
        engine.session(1).restore(engine.session(2).snapshot())


def test_bytes_of_the_caches(flow: Flow, engine: Engine) -> None:
    """As planned; zero empties all of them."""
    session, limits = engine.session(2), replace(engine.limits, max_batch=2)
    assert session.nbytes() == find_backend(flow.backend).cache_bytes(engine.program, limits)
    session.prefill(some_tokens(2, 20))
    assert all(t.any() for n, t in session.state.views(20).items() if n != TURNED)
    session.state.zero()
    assert not any(t.any() for t in session.state.views(20).values())


def test_a_row_is_cleared(engine: Engine, fresh: Any) -> None:
    """NaN in its caches is gone with it, and the others keep what they hold."""
    tokens, session = some_tokens(2, 30), engine.session(2)
    session.prefill(tokens)
    for t in session.state.row(1, MAX_SEQ).values():
        t.fill_(torch.nan if t.is_floating_point() else 0)
    session.reset([1], zero=True)
    assert session.length.tolist() == [30, 0]
    session.prefill(tokens[:, :9], [0, 9])
    got = session.decode(torch.stack((tokens[0, 0], tokens[1, 9])))
    agrees(got[0], fresh(torch.cat((tokens[0], tokens[0, :1]))))
    agrees(got[1], fresh(tokens[1, :10]))


def test_rows_that_cannot_be_copied(engine: Engine) -> None:
    session = engine.session(2)
    for act, says in (
        (lambda: session.copy_row(session, 0, 2), "copy to rows \\[2\\]: the session has 2 rows"),
        (lambda: session.copy_row(session, -1, 0), "copy from rows \\[-1\\]"),
        (lambda: session.reset([5], zero=True), "reset rows \\[5\\]"),
    ):
        with pytest.raises(InputError, match=says):
            act()


def test_a_prompt_chunk_by_chunk(engine: Engine, fresh: Any) -> None:
    """Other sessions run in between; what is left away is not held."""
    tokens, session = some_tokens(1, 3 * CHUNK + 1), engine.session(1)
    steps = session.prefill_steps(tokens)
    for held in (CHUNK, 2 * CHUNK, 3 * CHUNK):
        assert next(steps) is None and session.length.tolist() == [held]
        engine.session(1).prefill(tokens[:, :4])
    (last,) = steps
    agrees(last[0].float(), fresh(tokens[0]))
    with pytest.raises(InputError, match="outside the vocabulary"):
        session.prefill_steps([[2, 5, 10**6]])
