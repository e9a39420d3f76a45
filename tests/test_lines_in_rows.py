"""JSON lines over the rows of an engine: in order, as they come, and with little memory."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from g4ir.engine.engine import Engine
from g4ir.generate.jsonl import ReadAhead
from g4ir.generate.offline import AHEAD, Failure, OfflineEngine, Result
from tests.engines import CASES, some_tokens

ROWS = 4


LIMITS = {"max_seq": 160, "prefill_chunk": 32}


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> Engine:
    return make_engine("tiny-ple", backend="torch", max_batch=ROWS, **LIMITS)


@pytest.fixture(scope="module")
def single(make_engine: Any) -> Engine:
    return make_engine("tiny-ple", backend="torch", max_batch=1, **LIMITS)


def tokens(count: int, seed: int = 0) -> list[int]:
    return some_tokens(1, count, seed)[0].tolist()


def requests(count: int) -> list[dict[str, Any]]:
    """Greedy and drawn, of many lengths."""
    drawn = {"temperature": 1.0, "top_k": 9}
    return [
        {"id": f"r{i}", "tokens": tokens(1 + 5 * i % 37, i), "max_new_tokens": 3 + 7 * i % 29}
        | ({**drawn, "seed": i} if i % 2 else {})
        for i in range(count)
    ]


def stream(lines: list[Any]) -> io.BytesIO:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    return io.BytesIO("\n".join(texts).encode())


def test_an_input_that_fails() -> None:
    torn = Mock(readline=Mock(side_effect=OSError("torn")))
    with pytest.raises(OSError, match="torn"):
        ReadAhead(torn).next(wait=True)


def answers(engine: Engine, lines: list[Any], **flags: Any) -> list[Result | Failure]:
    return [*OfflineEngine(engine, flags).answer_lines(stream(lines), "x")]


def test_answers_without_a_length(single: Engine) -> None:
    """64 tokens, or what fits the engine; the last one's keys are not stored."""
    offline, bias = OfflineEngine(single), {"logit_bias": {"5": 1e6}}
    for prompt, count in ((9, 64), (158, 3), (160, 1)):
        asked, seen = offline.request({"tokens": tokens(prompt), **bias}, "x"), list[int]()
        assert offline.answer(asked, seen.append).tokens == (5,) * count == tuple(seen)


def test_what_is_wrong_is_its_own_error(engine: Engine) -> None:
    """In its place."""
    good = requests(3)
    wrong = [{"id": None, "tokens": []}, {"id": "b", "tokens": [2], "min_p": 3}]
    wrong += [{"tokens": [2], "logprobs": 600}]
    got = answers(engine, [good[0], "{", good[1], *wrong, good[2]])
    assert [a.failed for a in got] == [False, True, False, True, True, True, False]
    assert [a.output().get("id") for a in got] == ["r0", None, "r1", 4, "b", 6, "r2"]
    failures = [a for a in got if isinstance(a, Failure)]
    assert [a.line for a in failures] == [2, 4, 5, 6]
    assert failures[2].error == "x:5: min_p 3: expected a share in [0, 1]"
    assert failures[3].error == "x:6: logprobs 600: expected at most 512, the vocabulary's size"
    assert [a.output() for a in got if not a.failed] == [a.output() for a in answers(engine, good)]


def test_an_error_that_is_no_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.runtime, "run", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        answers(engine, requests(2))


def test_settings_that_rows_have(engine: Engine, single: Engine) -> None:
    """On an engine of one row too."""
    asked = [{"tokens": tokens(9), "max_new_tokens": 12, **s} for s in CASES["lines"]]
    want, got = answers(single, asked), answers(engine, asked)
    texts = [a.tokens for a in got if isinstance(a, Result)]
    assert texts == [a.tokens for a in want if isinstance(a, Result)]
    assert texts[0] != texts[3] != texts[1] and {*texts[2]} == {77}
    told, other = (a[-1].output()["logprobs"] for a in (got, want))
    assert len(told) == 12 and all(len(p["top"]) == 2 for p in told)
    assert [p["top"][0][0] for p in told] == list(texts[3])
    assert all(p["logprob"] == p["top"][0][1] < 0 for p in told)
    read = [[p["logprob"] for p in a] for a in (told, other)]
    assert read[0] == pytest.approx(read[1], abs=1e-5)


def test_few_lines_are_read_ahead(engine: Engine) -> None:
    """No more than rows are there for, and a few; also where the first takes longest."""
    short = [{"tokens": tokens(3, i), "max_new_tokens": 2} for i in range(40)]
    lines = Mock(wraps=stream(short))
    for done, _ in enumerate(OfflineEngine(engine).answer_lines(lines, "x")):
        assert lines.readline.call_count - done <= ROWS + AHEAD + 2
    lines = Mock(wraps=stream([{"tokens": [2], "max_new_tokens": 150}, *short]))
    offline = OfflineEngine(engine)
    found = offline.answer_lines(lines, "x")
    next(found)
    assert lines.readline.call_count > ROWS + AHEAD  # they are answered, and wait for the first
    assert len([*found]) == 40


def test_lines_that_nobody_wants_to_the_end(engine: Engine) -> None:
    offline = OfflineEngine(engine)
    found = offline.answer_lines(stream([{"tokens": [2], "max_new_tokens": 100}] * 5), "x")
    next(found)
    found.close()
    (again,) = offline.answer_lines(stream([{"tokens": [2, 5], "max_new_tokens": 3}]), "x")
    assert list(again.output()["tokens"]) == engine.generate([2, 5], 3)
    assert offline.scheduler.totals.generated < 5 * 100


def test_answers_before_the_next_line(engine: Engine) -> None:
    """A program may wait for each answer before it asks again."""
    end, start = os.pipe()
    engine.generate([2], 2)  # starts the thread of the engine's steps
    before = {*threading.enumerate()}
    with os.fdopen(end, "rb") as read, os.fdopen(start, "wb") as write:
        found = OfflineEngine(engine).answer_lines(read, "x")
        for i in range(3):
            write.write(json.dumps({"tokens": [2, 5, i], "max_new_tokens": 3}).encode() + b"\n")
            write.flush()
            assert list(next(found).output()["tokens"]) == engine.generate([2, 5, i], 3)
        write.close()
        assert [*found] == []
    for thread in {*threading.enumerate()} - before:
        thread.join(5)
        assert not thread.is_alive()


def test_the_command_ends_while_a_pipe_is_open(engine: Engine) -> None:
    """As by Ctrl-C: no answer is lost, and Python does not stumble over the thread that reads."""
    words = ("run", str(engine.path), "--input-jsonl", "-")
    command = [sys.executable, "-m", "g4ir.cli", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b'{"tokens": [2, 5], "max_new_tokens": 3}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 1
        process.send_signal(signal.SIGINT)
        said = process.stderr.read().decode()
        assert process.wait(30) == 130, said
        assert "Fatal" not in said and "Traceback" not in said
