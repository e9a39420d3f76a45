"""Tokens that are drafted and verified: the text is that of single steps, whatever was drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import g4ir
from g4ir.backends.sampling import SamplingParams
from g4ir.engine.engine import Engine
from g4ir.engine.requests import Event, Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.session import Session, padded
from g4ir.engine.speculative import (
    COST,
    FIRST_PAUSE,
    LEAST_MATCH,
    LONGEST_PAUSE,
    MOST_MATCH,
    AcceptanceStats,
    NgramProposer,
    Pace,
    SpeculativeConfig,
    accepted,
    find_draft,
)
from g4ir.errors import InputError
from g4ir.passes import PassOptions, run_passes
from g4ir.passes.plan_cache import RingOptions
from tests.contract.flows import FLOWS
from tests.engines import agrees, some_tokens

MAX_SEQ, CHUNK, MOST = 96, 16, 8
#: dense; experts; per-layer embeddings and shared K and V; the unified text model. Rings of 8
VARIANTS = ("tiny-dense", "tiny-moe", "tiny-ple", "tiny-unified")
#: what caches hold, and how
FORMS: dict[str, dict[str, Any]] = {
    "value": {"latent_kv": "value"},
    "raw": {"latent_kv": "raw"},
    "int8": {"kv_dtype": "int8", "latent_kv": "value"},
    "unfused": {"skip": ("plan_cache", "fuse_qkv")},
}
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    folder, found = tmp_path_factory.mktemp("drafting"), dict[str, Engine]()

    def engine(variant: str, form: str = "", draft_tokens: int = MOST) -> Engine:
        name = f"{variant}-{form}-{draft_tokens}"
        if name not in found:
            limits = {"max_seq": MAX_SEQ, "prefill_chunk": CHUNK, "max_batch": 3}
            found[name] = g4ir.build(
                variant,
                folder / name,
                backend="reference",
                dtype="float32",
                random_weights=3,
                draft_tokens=draft_tokens,
                **limits,
                **FORMS.get(form, {}),
            )
        return found[name]

    yield engine
    for e in found.values():
        e.close()


def rounds(
    session: Session, first: Sequence[int], drafted: Callable[[int, int], list[int]], count: int
) -> list[list[int]]:
    """Greedy texts of `count` tokens: `drafted(row, length)` drafts what follows so many."""
    texts = [[token] for token in first]
    while going := [row for row, text in enumerate(texts) if len(text) < count]:
        drafts = {row: drafted(row, len(texts[row])) for row in going}
        held = session.length
        fed = {row: [texts[row][-1], *d] for row, d in drafts.items()}
        logits = session.verify(*padded(fed, session.batch))

        def choose(given: torch.Tensor, rows: Any) -> dict[int, int]:
            return {row: int(given[row].argmax()) for row in rows}

        made = accepted(logits, drafts, choose, lambda _, token, draft: token == draft)
        session.truncate(held + torch.tensor([len(made.get(r, ())) for r in range(len(texts))]))
        for row, tokens in made.items():
            texts[row] += tokens
    return [text[:count] for text in texts]


def mixed(want: Sequence[Sequence[int]], k: int, share: float, seed: int) -> Any:
    """Drafts of up to k tokens, this share of which is right."""
    rng = random.Random(seed)

    def drafted(row: int, length: int) -> list[int]:
        right = want[row][length : length + rng.randint(0, k)]
        return [t if rng.random() < share else rng.randrange(3, 500) for t in right]

    return drafted


def prompts(*lengths: int) -> list[list[int]]:
    return [some_tokens(1, n, n)[0].tolist() for n in lengths]


def begun(engine: Engine, texts: Sequence[Sequence[int]]) -> tuple[Session, list[int]]:
    """A session that holds the texts, and the greedy tokens that follow."""
    session = engine.session(len(texts))
    padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    logits = session.prefill(padded, torch.tensor([len(t) for t in texts]))
    return session, logits.argmax(-1).tolist()


# --- the text is that of single steps -----------------------------------------------------------


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=[pytest.mark.full] * (v in ("tiny-dense", "tiny-unified")))
        for v in VARIANTS
    ],
)
def test_text_is_that_of_single_steps(made: Make, variant: str) -> None:
    """Rows of different lengths, past three windows; drafts that are right, wrong and both."""
    engine, given = made(variant), prompts(5, 19, 31)
    want = [engine.generate(p, 40, stop_ids=()) for p in given]
    for k, share in ((1, 0.5), (3, 0.9), (MOST, 0.8), (MOST, 0.0)):
        session, first = begun(engine, given)
        assert rounds(session, first, mixed(want, k, share, k), 40) == want, (k, share)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("variant", ["tiny-dense", "tiny-ple"])
@pytest.mark.parametrize("backend", ["onnx", "trt"])
@pytest.mark.covering
def test_networks_verify_a_chunk(
    made: Make, tmp_path: Path, backend: str, variant: str, every: bool
) -> None:
    """One network, which is told of which rows there are logits, or makes those of all."""
    given = prompts(5, 19, 31)
    want = [made(variant).generate(p, 30, stop_ids=()) for p in given]
    limits = {"max_seq": MAX_SEQ, "prefill_chunk": CHUNK, "max_batch": 3, "random_weights": 3}
    options = {"dtype": "float32", "draft_tokens": 5, "all_logits": every, **limits}
    with FLOWS[backend].using(tmp_path):
        engine = g4ir.build(variant, tmp_path / "e", backend=backend, **options)
        session, first = begun(engine, given)
        assert rounds(session, first, mixed(want, 5, 0.8, 1), 30) == want
        assert engine.generate(given, 30, stop_ids=(), draft="ngram") == want


def test_a_network_verifies_no_more_than_a_chunk(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give --prefill-chunk 9 or more"):
        g4ir.build(
            "tiny-dense",
            tmp_path / "e",
            backend="onnx",
            random_weights=0,
            draft_tokens=8,
            prefill_chunk=8,
        )


@pytest.mark.full
@pytest.mark.parametrize("k", range(1, MOST + 1))
@pytest.mark.parametrize("variant", VARIANTS)
def test_text_with_every_length_of_draft(made: Make, variant: str, k: int) -> None:
    engine, given = made(variant, draft_tokens=k), prompts(5, 19, 31)
    want = [engine.generate(p, 48, stop_ids=()) for p in given]
    for share in (0.0, 0.5, 0.9, 1.0):
        session, first = begun(engine, given)
        assert rounds(session, first, mixed(want, k, share, k), 48) == want, share


@pytest.mark.parametrize("form", FORMS)
def test_text_over_other_caches(made: Make, form: str) -> None:
    engine, given = made("tiny-moe", form), prompts(5, 29)
    want = [engine.generate(p, 30, stop_ids=()) for p in given]
    session, first = begun(engine, given)
    assert rounds(session, first, mixed(want, MOST, 0.7, 1), 30) == want


def test_rings_of_less_slack_are_not_enough(made: Make) -> None:
    """That the text is right above is because of it: drafts of one token more than there is slack
    for overwrite what the next token sees."""
    engine, given = made("tiny-dense", draft_tokens=3), prompts(19)
    want = [engine.generate(p, 40, stop_ids=()) for p in given]
    lies = replace(engine, facts=replace(engine.facts, options=PassOptions((RingOptions(4),))))

    def text(k: int) -> list[list[int]]:
        session, first = begun(lies, given)
        session.truncate = lambda kept: vars(session).update(length=kept)  # type: ignore
        return rounds(session, first, lambda row, n: [7] * k, 40)

    assert text(3) == want
    assert text(4) != want


@pytest.mark.parametrize("slack", [0, 1, 5])
def test_rings_have_the_slack_that_is_asked_for(slack: int) -> None:
    g = g4ir.build_graph(g4ir.load_spec("tiny-ple"), "verify")
    state = run_passes(g, options=PassOptions((RingOptions(slack),))).state
    assert {v.type.shape[0] for v in state} == {"C", 8 + slack}


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.5, "seed": 4, "top_k": 3},
    {"temperature": 0.6, "seed": 5, "top_p": 0.7},
)


@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_the_same_seed_gives_the_same_text(
    made: Make, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """However much of the drafts is right: here half of each, as far as the text is known."""
    engine, given = made("tiny-ple"), prompts(9, 21)
    want = engine.generate(given, 40, stop_ids=(), **how)
    drafts = mixed([[*p, *w] for p, w in zip(given, want, strict=True)], 4, 0.7, 1)

    def propose(text: NgramProposer, count: int) -> list[int]:
        ids = text._ids[: text._count].tolist()
        row = 0 if ids[: len(given[0])] == given[0] else 1
        return list(drafts(row, len(ids))[:count])

    monkeypatch.setattr(NgramProposer, "propose", propose)
    monkeypatch.setattr(Pace, "count", lambda _: 4)
    tally, seen = AcceptanceStats(), list[tuple[int, int]]()
    options = {"stop_ids": (), "draft": "ngram", "tally": tally, **how}
    got = engine.generate(given, 40, on_token=lambda row, t: seen.append((row, t)), **options)
    assert got == want
    assert [[t for row, t in seen if row == i] for i in (0, 1)] == want
    assert tally.tokens == 2 * 39 and tally.rounds < 60
    assert engine.generate(given[0], 40, **options) == engine.generate(
        given[0], 40, stop_ids=(), **how
    )


def test_stop_ids_end_a_row_within_a_round(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, given = made("tiny-moe"), prompts(9, 21)
    plain = engine.generate(given, 30, stop_ids=())
    stops = {plain[0][7], plain[1][12]}
    want = engine.generate(given, 30, stop_ids=stops)
    whole = [[*p, *w] for p, w in zip(given, plain, strict=True)]

    def propose(text: NgramProposer, count: int) -> list[int]:
        row = 0 if text._ids[0] == given[0][0] else 1
        return whole[row][text._count : text._count + count]

    monkeypatch.setattr(NgramProposer, "propose", propose)
    assert engine.generate(given, 30, stop_ids=stops, draft="ngram") == want
    assert engine.generate(given, 30, stop_ids=(), draft="ngram", draft_tokens=5) == plain


def test_rows_as_slots(made: Make) -> None:
    """Penalties, seeds, masks and ends are by row; drafts are off while many rows decode."""
    engine, every = made("tiny-moe"), prompts(7, 12, 18, 9, 25)
    jobs = [
        Request(
            tuple(p * 2),
            40,
            SamplingParams(
                temperature=(0, 0.7, 0, 1.0, 0)[i],
                top_k=(None, 5, None, 4, None)[i],
                seed=i,
                presence_penalty=0.3 * (i == 2),
                min_tokens=12,
                ignore_eos=i != 4,
                logprobs=2 if i == 0 else None,
            ),
        )
        for i, p in enumerate(every)
    ]

    def texts(settings: SchedulerConfig) -> tuple[list[list[int]], Scheduler]:
        scheduler = Scheduler(engine, settings)
        handles = [scheduler.submit(job) for job in jobs]
        events = list[Event]()
        while scheduler.busy:
            events += scheduler.step()
        for t in handles:
            own = [e for e in events if e.handle is t]
            assert [e.token for e in own] == t.answers[0].tokens
            assert [bool(e.finish) for e in own] == [False] * (len(own) - 1) + [True]
        logprobs = [e.logprobs.chosen for e in events if e.logprobs]
        assert len(logprobs) == len(handles[0].answers[0].tokens)
        return [t.answers[0].tokens for t in handles], scheduler

    want, _ = texts(SchedulerConfig())
    got, scheduler = texts(SchedulerConfig(draft=SpeculativeConfig("ngram", 4), draft_rows=3))
    tally = scheduler.totals.tally
    assert got == want and tally.tokens > tally.rounds > 0
    off, scheduler = texts(SchedulerConfig(draft=SpeculativeConfig("ngram", 4), draft_rows=1))
    assert off == want and scheduler.totals.tally.rounds < tally.rounds


# --- sessions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["tiny-ple", "tiny-moe"])
@pytest.mark.parametrize(
    "seed", [0, *[pytest.param(i, marks=pytest.mark.full) for i in range(1, 12)]]
)
def test_sessions_in_any_order_equal_full_recomputation(
    made: Make, variant: str, seed: int
) -> None:
    """Prompts, steps, rounds, cuts and snapshots, of two sessions in turn."""
    engine, rng = made(variant), random.Random(seed)
    sessions = [engine.session(2) for _ in range(2)]
    held: list[list[list[int]]] = [[[], []] for _ in sessions]
    kept: list[Any] = [None, None]

    def new(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    def check(texts: list[list[int]], logits: torch.Tensor) -> None:
        """Logits [2, vocab] after the texts."""
        for text, got in zip(texts, logits, strict=True):
            agrees(got[None], engine.session(1).prefill([text]))

    for _ in range(40):
        i = rng.randrange(2)
        session, texts = sessions[i], held[i]
        room = MAX_SEQ - max(map(len, texts))
        what = rng.choice(["prefill", "decode", "round", "round", "round", "keep", "back", "reset"])
        if what == "prefill" and room > 20:
            more = [new(rng.randint(1, 20)) for _ in texts]
            width = max(map(len, more))
            rows = torch.tensor([[*m, *[0] * (width - len(m))] for m in more])
            logits = session.prefill(rows, torch.tensor([len(m) for m in more]))
            held[i] = [t + m for t, m in zip(texts, more, strict=True)]
            check(held[i], logits)
        elif what == "decode" and room > 1 and all(texts):
            more = [new(1) for _ in texts]
            logits = session.decode(torch.tensor([m[0] for m in more]))
            held[i] = [t + m for t, m in zip(texts, more, strict=True)]
            check(held[i], logits)
        elif what == "round" and room > MOST + 1 and all(texts):
            fed = {row: new(rng.randint(1, MOST + 1)) for row in rng.choice([(0, 1), (0,), (1,)])}
            held_before = session.length
            logits = session.verify(*padded(fed, 2))
            right = {row: rng.randint(1, len(m)) for row, m in fed.items()}
            session.truncate(held_before + torch.tensor([right.get(row, 0) for row in range(2)]))
            for row, m in fed.items():
                held[i][row] = texts[row] + m[: right[row]]
                want = engine.session(1).prefill([held[i][row]])
                agrees(logits[row, right[row] - 1][None].float(), want)
        elif what == "keep":
            kept[i] = session.snapshot(), [[*t] for t in texts]
        elif what == "back" and kept[i]:
            session.restore(kept[i][0])
            held[i] = [[*t] for t in kept[i][1]]
        elif what == "reset":
            session.reset([0])
            held[i][0] = []
        assert session.length.tolist() == [len(t) for t in held[i]]


def test_verify_gives_the_logits_of_single_steps(made: Make) -> None:
    engine, tokens = made("tiny-ple"), some_tokens(2, MOST + 1, 4)
    one, other = engine.session(2), engine.session(2)
    for session in (one, other):
        session.prefill(some_tokens(2, 29), torch.tensor([29, 11]))
    lengths = torch.tensor([MOST + 1, 3])
    got = one.verify(tokens, lengths)
    for i in range(MOST + 1):
        active = lengths > i
        agrees(got[active, i], other.decode(tokens[:, i], active)[active])
    assert one.length.tolist() == other.length.tolist()


def test_verify_refuses(made: Make, tmp_path: Path) -> None:
    session = made("tiny-ple").session(2)
    with pytest.raises(
        InputError, match="10 tokens; an engine of --draft-tokens 8 takes 9 at most"
    ):
        session.verify(some_tokens(2, 10))
    with pytest.raises(InputError, match="outside the vocabulary"):
        session.verify([[5, -1], [5, 6]])
    with pytest.raises(InputError, match="would hold 97 tokens"):
        session.prefill(some_tokens(2, 95))
        session.verify(some_tokens(2, 2))
    assert session.length.tolist() == [95, 95]
    plain = made("tiny-ple", draft_tokens=0)
    with pytest.raises(InputError, match="build the engine again with --draft-tokens K"):
        plain.session(1).verify([[5, 6]])


@pytest.mark.parametrize(
    "source, tokens, words",
    [
        ("magic", None, "draft 'magic': expected one of none, ngram"),
        ("none", 3, "nothing is drafted; give --draft too"),
        ("ngram", 0, "expected 1 to 8"),
        ("ngram", 9, "build it again with --draft-tokens 9 for more"),
    ],
)
def test_drafts_that_cannot_be(made: Make, source: str, tokens: int | None, words: str) -> None:
    engine = made("tiny-ple")
    with pytest.raises(InputError, match=words):
        engine.generate([2, 5, 7], 4, draft=source, draft_tokens=tokens)


def test_an_engine_that_verifies_nothing_says_how_to_build_one(made: Make) -> None:
    with pytest.raises(InputError, match=r"verifies no drafted tokens; .* with --draft-tokens K"):
        find_draft(made("tiny-ple", draft_tokens=0), "ngram")
    with pytest.raises(InputError, match=r"draft-tokens 33: expected 0 \(no drafting\) to 32"):
        made("tiny-ple", draft_tokens=33)


# --- drafts -------------------------------------------------------------------------------------

words = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(words, st.integers(1, 12), st.integers(0, 59))
def test_lookup_finds_the_longest_match(ids: list[int], count: int, cut: int) -> None:
    """As a search through every earlier place does; pieces make no difference."""
    text = NgramProposer(ids[:cut])
    text.extend(ids[cut:])
    matches = []
    for end in range(len(ids) - 1):
        size = 0
        while size <= end and size < MOST_MATCH and ids[end - size] == ids[-1 - size]:
            size += 1
        matches.append((size, end))
    size, end = max(matches, default=(0, 0))
    behind = ids[end + 1 :]
    want = [behind[i % len(behind)] for i in range(count)] if size >= LEAST_MATCH else []
    assert text.propose(count) == want
    assert NgramProposer(ids).propose(count) == want


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=80))
def test_pace(told: list[tuple[int, int]]) -> None:
    """It drafts as many tokens as there may be, or pauses; wrong drafts end in a pause, and no
    pause is longer than the longest."""
    pace, idle = Pace(8), 0
    for drafted, right in told:
        count = pace.count()
        assert 0 <= count <= 8
        idle = 0 if count else idle + 1
        assert idle <= LONGEST_PAUSE
        if count:
            pace.told(min(drafted, count), min(right, drafted, count))


def test_pace_of_drafts_that_are_always_wrong_or_right() -> None:
    wrong = Pace(8)
    drafted = [wrong.count() for _ in range(400) if wrong.told(wrong._count, 0) or True]
    assert sum(drafted) * COST < 0.1 * 400
    right = Pace(8)
    for _ in range(100):
        assert right.count() == 8
        right.told(8, 8)
    assert FIRST_PAUSE < LONGEST_PAUSE


def test_tally() -> None:
    tally = AcceptanceStats()
    for drafted, tokens in ((4, 5), (4, 1), (2, 2), (0, 1)):
        tally.add(drafted, tokens)
    want = {"rounds": 4, "tokens_per_round": 2.25, "accepted": [0.6667, 0.3333, 0.5, 0.5]}
    assert tally.to_dict() == want
    assert AcceptanceStats().to_dict() == {"rounds": 0, "tokens_per_round": None, "accepted": []}
    assert np.isfinite(tally.tokens)
