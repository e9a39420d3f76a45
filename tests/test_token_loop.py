"""Recorded decode steps that choose their own tokens, against the host that chooses. Run here
without a CUDA graph, on the CPU's compiled programs, with everything else as on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

import g4ir
from g4ir.backends.cpu import runtime
from g4ir.backends.cpu.step_loop import LoopProgram, StepLoop
from g4ir.backends.cuda.schedule import any_length, schedule
from g4ir.backends.cuda.token_loop import TokenLoop
from g4ir.backends.inductor.target import Target
from g4ir.backends.sampling import SamplingParams
from g4ir.engine import speculative
from g4ir.engine.device_loop import TokenSteps
from g4ir.engine.engine import Engine
from g4ir.engine.requests import PREFILLING, QUEUED, Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.engine.session import Session
from g4ir.engine.speculative import AcceptanceStats, NgramProposer, StepCosts
from g4ir.errors import CheckError
from g4ir.weights.pack import RowTable, StoredParams
from tests.cases import TABLES
from tests.contract import flows
from tests.contract.flows import in_a_loop
from tests.engines import some_tokens
from tests.spies import spy
from tests.test_kernel_ops import program

PROMPTS = [some_tokens(1, n)[0].tolist() for n in (11, 3, 26)]


@pytest.fixture
def engine(engines: Any) -> Engine:
    """It has rings, lists and layers that only a prompt's last chunk runs."""
    made: Engine = engines("torch", "tiny-ple")
    return made


def test_tables_in_host_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host gathers their rows, and so chooses."""
    assert engine.chooses_on_device
    monkeypatch.setattr(type(engine), "device", "cuda")
    assert not engine.embeds_on_device and not engine.chooses_on_device


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_nonfinite_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch, odd: float) -> None:
    """Found with the tokens that were chosen from them, and none of these is handed out."""
    in_a_loop(engine, monkeypatch)
    want, seen = engine.generate(PROMPTS[0], 20, stop_ids=()), list[int]()
    monkeypatch.setattr(engine, "_idle", None)
    whole, steps = engine.runtime._step, []

    def broken(phase: str, views: Any) -> Callable[[Any], Any]:
        def step(feeds: Any) -> Any:
            made = whole(phase, views)(feeds)
            steps.append(1)
            if len(steps) == 4:  # the third that counts: recording runs one
                made["logits"][..., 7] = odd
            return made

        return step

    monkeypatch.setattr(engine.runtime, "_step", broken)
    with pytest.raises(CheckError, match=r"logits after 1\d tokens: NaN or infinite"):
        engine.generate(PROMPTS[0], 20, stop_ids=(), on_token=seen.append)
    assert seen == want[:3] and len(steps) <= 1 + 4


def test_the_host_reads_a_step_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step has been started when tokens are handed out, and none beyond the last."""
    in_a_loop(engine, monkeypatch)
    started, ahead = list[int](), list[int]()
    spy(monkeypatch, TokenLoop, "advance", lambda *_: started.append(1))
    text = engine.generate(
        PROMPTS[0], 8, stop_ids=(), on_token=lambda _: ahead.append(len(started))
    )
    assert len(text) == 8 and ahead == [0, 2, 3, 4, 5, 6, 7, 7]


@pytest.fixture
def programs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[LoopProgram]:
    """Those that are recorded for steps on the CPU; two looks are 8 steps apart."""
    made: list[LoopProgram] = []
    record = runtime.record_loop
    monkeypatch.setattr(runtime, "record_loop", lambda *a: (made.append(record(*a)), made[-1])[1])
    monkeypatch.setattr(StepLoop, "steps_per_call", 8)
    monkeypatch.setattr(engine, "_idle", None)
    return made


def on_the_host(engine: Engine, patch: pytest.MonkeyPatch, *asked: Any, **settings: Any) -> Any:
    with patch.context() as apart:
        flows.on_the_host(engine, apart)
        return engine.generate(*asked, stop_ids=(), **settings)


def test_rows_rest_within_a_program(
    engine: Engine, programs: list[LoopProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed behind a stop token, though the host looks later."""
    want = on_the_host(engine, monkeypatch, PROMPTS[0], 40)
    stop = next(t for t in want[10:] if want.index(t) >= 10)
    held = want.index(stop)
    assert engine.generate(PROMPTS[0], 40, stop_ids=(stop,)) == want[: held + 1]
    assert programs[0].lengths.tolist() == [len(PROMPTS[0]) + held]
    assert programs[0].active.tolist() == [0]


def test_steps_without_drafts_are_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a pause of drafts, which pay nothing if they are wrong, and those after which a text
    has no draft; texts and counts are those of single steps."""
    limits: dict[str, Any] = {"max_seq": 64, "prefill_chunk": 16, "draft_tokens": 3}
    options: dict[str, Any] = {"backend": "torch", "random_weights": 0, "dtype": "bfloat16"}
    looped, widths = list[int](), list[int]()
    # Measured costs decide how many tokens are drafted: on a busy machine any number.
    monkeypatch.setattr(StepCosts, "add", lambda *_: None)
    monkeypatch.setattr(StepCosts, "known", lambda *_: True)
    with g4ir.build("tiny-ple", tmp_path / "e", **options, **limits) as e:

        def drafted(propose: Any) -> AcceptanceStats:
            monkeypatch.setattr(NgramProposer, "propose", propose)
            tally = AcceptanceStats()
            assert e.generate(PROMPTS[0], 40, stop_ids=(), draft="ngram", tally=tally) == want
            assert tally.tokens == 39
            return tally

        want = e.generate(PROMPTS[0], 40, stop_ids=())
        wrong = next(t for t in range(500) if t not in want)
        spy(monkeypatch, TokenSteps, "step", lambda steps, **_: looped.append(steps.remaining))
        tally = drafted(lambda self, count: [wrong] * count)
        assert tally.rounds == 39 and 0 < tally.drafted[0] < 20
        assert looped[0] == speculative.FIRST_PAUSE and max(looped) <= speculative.LONGEST_PAUSE
        spy(monkeypatch, Session, "verify", lambda *given: widths.append(given[1].shape[1]))
        right = [*PROMPTS[0], *want]
        tally = drafted(lambda self, n: right[self._count :][: n * (self._count % 3 == 0)])
        assert widths and min(widths) > 1 and tally.rounds > len(widths)


def test_what_a_program_finds_not_finite(
    engine: Engine, programs: list[LoopProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens before are handed out, and no other; the next request starts anew."""
    want, seen = on_the_host(engine, monkeypatch, PROMPTS[0], 40), list[int]()
    norm = engine.runtime.weights["final.w"]
    kept = norm.clone()

    def spoil(token: int) -> None:
        seen.append(token)
        norm[:] = torch.nan if len(seen) == 9 else norm

    try:
        with pytest.raises(CheckError, match=r"logits after \d+ tokens: NaN or infinite"):
            engine.generate(PROMPTS[0], 40, stop_ids=(), on_token=spoil)
    finally:
        norm.copy_(kept)
    assert len(programs) == 1 and 9 <= len(seen) < 40 and seen == want[: len(seen)]
    assert engine.generate(PROMPTS[0], 40, stop_ids=()) == want


def test_a_prompt_has_the_cpu_to_itself(engine: Engine, programs: list[LoopProgram]) -> None:
    scheduler, unread = Scheduler(engine, SchedulerConfig(chunk_tokens=4)), []
    greedy = SamplingParams(ignore_eos=True)
    first = scheduler.submit(Request(tuple(PROMPTS[1]), 90, greedy, reuse=False))
    while not first.answers[0].tokens:
        scheduler.step()
    late = scheduler.submit(Request(tuple(PROMPTS[2]), 4, greedy, reuse=False))
    while late.state in (QUEUED, PREFILLING):
        scheduler.step()
        if scheduler._loop:
            unread.append(scheduler._loop.loop.unread)
    assert len(unread) > 3 and not any(unread[2:])
    scheduler.close()


def test_sessions_take_turns(engine: Engine, programs: list[LoopProgram]) -> None:
    """Steps of two sessions on two threads: neither waits for the whole text of the other."""
    written, seen, deadline = [0, 0], [0, 0], time.monotonic() + 60
    greedy, met = SamplingParams(ignore_eos=True), Barrier(2)

    def write(number: int) -> None:
        """Texts until both sessions saw 16 tokens of the other during one text of their own."""
        scheduler, other = Scheduler(engine), 1 - number
        met.wait(60)
        while min(seen) < 16 and time.monotonic() < deadline:
            scheduler.submit(Request(tuple(PROMPTS[number]), 90, greedy, reuse=False))
            scheduler.step()
            before = written[other]
            while scheduler.busy:
                written[number] += sum(event.token is not None for event in scheduler.step())
            seen[number] = max(seen[number], written[other] - before)
        scheduler.close()

    threads = [Thread(target=write, args=(n,)) for n in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(90)
    assert min(seen) >= 16


def test_a_program_maps_tables_that_are_read_row_by_row(
    engine: Engine, programs: list[LoopProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that lie in a file; where each is made, the host embeds and chooses."""
    want = engine.generate(PROMPTS[0], 12, stop_ids=())
    params = engine.program.graphs["embed"].params
    tables = {v.name: RowTable(engine.runtime.source, v) for v in params}
    monkeypatch.setattr(engine, "tables", tables)
    monkeypatch.setattr(engine, "_idle", None)
    assert len(programs) == 1 and engine.generate(PROMPTS[0], 12, stop_ids=()) == want
    assert len(programs) == (2 if isinstance(engine.runtime.source, StoredParams) else 1)


@pytest.mark.parametrize(("name", "form", "gpu", "same"), TABLES["token loop"]["any length"])
def test_steps_that_one_recording_serves(name: str, form: str, gpu: str, same: bool) -> None:
    """Those whose attention goes by what rows hold, in kernels of ours."""
    g = program(name, form).graphs["decode"]
    assert any_length(schedule(g, Target("cuda", gpu, 1))) == same
