"""From logits to tokens: whoever chooses them, prompts of any lengths have the same text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from g4ir.backends.sampling import SamplingParams
from g4ir.engine.engine import Engine
from g4ir.engine.requests import CANCELLED, FINISHED, Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.errors import InputError
from tests.cases import TABLES
from tests.engines import CHUNK, MAX_SEQ, some_tokens

#: by the reference, which is slow
TEXTS: dict[Any, list[list[int]]] = {}
PROMPTS = [some_tokens(1, n)[0].tolist() for n in (11, 3, 26)]
#: greedy, and each way to draw
SETTINGS: list[dict[str, Any]] = TABLES["ways to draw"]


@pytest.fixture
def plain(engines: Any, any_engine: Engine) -> Callable[..., Any]:
    """What the reference backend's engine of the same weights generates, where the host chooses."""
    engine = engines("reference", any_engine.spec.name.removesuffix("-checkpoint"))

    def text(count: int, **settings: Any) -> list[list[int]]:
        key = (engine.path, engine.suppressed(), count, *settings.items())
        if key not in TEXTS:
            TEXTS[key] = engine.generate(rows(engine), count, stop_ids=(), **settings)
        return TEXTS[key]

    return text


def rows(engine: Engine) -> list[list[int]]:
    """As many prompts as the engine has rows."""
    return PROMPTS[: engine.limits.max_batch]


@pytest.mark.parametrize("settings", SETTINGS)
def test_same_tokens_as_the_reference(
    any_engine: Engine, chooser: list[Any] | None, plain: Any, settings: dict[str, Any]
) -> None:
    """Ragged rows past three windows; a step that chooses is prepared once for a session."""
    want = plain(40, **settings)
    assert any_engine.generate(rows(any_engine), 40, stop_ids=(), **settings) == want
    assert chooser is None or len(chooser) == 1


@pytest.mark.usefixtures("chooser")
def test_generate_is_prefill_and_argmax(any_engine: Engine) -> None:
    session, want = any_engine.session(), list[int]()
    logits = session.prefill([PROMPTS[0]])
    for _ in range(12):
        want.append(int(logits.argmax()))
        logits = session.decode(torch.tensor(want[-1:]))
    for count in (1, 2, 3, 12):
        assert any_engine.generate(PROMPTS[0], count, stop_ids=()) == want[:count]
    prompt, seen = torch.tensor(PROMPTS[0]), list[int]()
    assert any_engine.generate(prompt, 4, stop_ids=(), on_token=seen.append) == want[:4] == seen


@pytest.mark.usefixtures("chooser")
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_k": 3, "seed": 1}])
def test_suppressed_tokens_are_not_generated(
    any_engine: Engine, plain: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    never = tuple({t for row in plain(9, **settings) for t in row})
    monkeypatch.setattr(Engine, "suppressed", lambda self: never)
    want = plain(9, **settings)
    assert any_engine.generate(rows(any_engine), 9, stop_ids=(), **settings) == want
    assert not set(never) & {t for row in want for t in row}


@pytest.mark.usefixtures("chooser")
def test_rows_end_at_their_stop_tokens(any_engine: Engine, plain: Any) -> None:
    """Each on its own; the token is part of the text."""
    free = plain(20)
    stops = {row[at] for row, at in zip(free, (9, 4, 7))}
    ends = [min(row.index(s) for s in stops if s in row) for row in free]
    want = [row[: end + 1] for row, end in zip(free, ends)]
    seen: list[tuple[int, int]] = []
    got = any_engine.generate(
        rows(any_engine), 20, stop_ids=iter(stops), on_token=lambda r, t: seen.append((r, t))
    )
    assert got == want and all(len(row) < 20 for row in got)
    assert [[t for r, t in seen if r == row] for row in range(len(want))] == want


@pytest.mark.usefixtures("chooser")
def test_a_request_that_joins_and_one_that_is_cancelled(engine: Engine) -> None:
    """Neither changes the text of another, whoever chooses; tokens come as they are read."""
    want = [engine.generate(p, 90, stop_ids=()) for p in PROMPTS]
    scheduler = Scheduler(engine, SchedulerConfig(patience=0))
    asked = [Request(tuple(p), 90, SamplingParams(ignore_eos=True)) for p in PROMPTS]
    handles, seen = [scheduler.submit(asked[0])], dict[Any, list[int]]()
    while scheduler.busy:
        for event in scheduler.step():
            if event.token is not None:
                seen.setdefault(event.handle, []).append(event.token)
        count = len(seen.get(handles[0], ()))
        if count >= 5 and len(handles) == 1:
            handles += [scheduler.submit(request) for request in asked[1:]]
        if len(handles) == 3 and len(seen.get(handles[2], ())) >= 4:
            handles[-1].cancel()
    assert [h.state for h in handles] == [FINISHED, FINISHED, CANCELLED]
    got = [seen[h] for h in handles]
    assert got == [h.answers[0].tokens for h in handles]
    assert got == [want[0], want[1], want[2][: len(got[2])]] and 4 <= len(got[2]) < 90


@pytest.mark.usefixtures("chooser")
def test_settings_in_one_batch(engine: Engine) -> None:
    """Greedy and each way to draw at a time, and one that needs the host: as each alone."""
    params = [SamplingParams(ignore_eos=True, **s) for s in SETTINGS]
    params.append(SamplingParams(ignore_eos=True, repetition_penalty=1.5))
    asked = [Request(tuple(PROMPTS[i % 3]), 12, s, reuse=False) for i, s in enumerate(params)]

    def texts(scheduler: Scheduler, requests: list[Request]) -> list[list[int]]:
        handles = [scheduler.submit(request) for request in requests]
        while scheduler.busy:
            scheduler.step()
        return [h.answers[0].tokens for h in handles]

    alone = [texts(Scheduler(engine), [request])[0] for request in asked]
    assert texts(Scheduler(engine), asked) == alone


@pytest.mark.usefixtures("chooser")
def test_generate_up_to_max_seq(engine: Engine) -> None:
    prompt = some_tokens(1, MAX_SEQ)[0].tolist()
    assert len(engine.generate(prompt, 1, stop_ids=())) == 1
    assert len(engine.generate(prompt[:-9], 10, stop_ids=())) == 10
    with pytest.raises(InputError, match=f"max-seq {MAX_SEQ}"):
        engine.generate(prompt, 2)


def test_generate_uses_its_caches_again(engine: Engine) -> None:
    """What a longer text left in them changes nothing; another number of rows, a call within a call
    and one after a call that its caller broke off have their own."""
    prompt, other = [2, 5, 7], some_tokens(1, 3 * CHUNK, seed=5)[0].tolist()
    first = engine.generate(prompt, 6, stop_ids=())
    kept, inner = engine._idle, list[Any]()
    engine.generate(other, 9, stop_ids=())
    assert engine.generate(prompt, 6, stop_ids=()) == first
    assert engine._idle is kept and not kept.num_running
    assert engine.generate([prompt, other], 6, stop_ids=())[0] == first
    assert engine._idle is not kept

    def within(token: int) -> None:
        inner.append(engine.generate(prompt, 6, stop_ids=()))

    assert engine.generate(prompt, 6, stop_ids=(), on_token=within) == first
    assert inner == [first] * 6

    def stop(token: int) -> None:
        raise KeyError(token)

    with pytest.raises(KeyError):
        engine.generate([9, 9], 4, stop_ids=(), on_token=stop)
    assert engine.generate(prompt, 6, stop_ids=()) == first
