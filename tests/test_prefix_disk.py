"""Snapshots of prompts on disk: read after a restart and by other processes, never damaged."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from g4ir.engine import prefix_disk
from g4ir.engine.engine import Engine
from g4ir.engine.prefix_disk import PrefixDisk
from g4ir.engine.requests import Request, Totals
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.errors import InputError, MissingError, TrustError
from g4ir.media.soft import Soft
from tests.cli_tools import g4ir, ok, refused
from tests.test_scheduler import FREE, LIMITS, alone, prompt, ran

GIB = 1 << 30


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> Engine:
    return make_engine("tiny-ple", backend="torch", **LIMITS)


def restarted(engine: Engine, request: Request, limit: int = GIB, **config: Any) -> int:
    """Answer in a scheduler of its own, as after a restart; return how many tokens were cached."""
    scheduler = Scheduler(engine, SchedulerConfig(prefix_disk=limit, **config))
    handle = ran(scheduler, request)
    scheduler.close()
    assert handle.answers[0].tokens == alone(engine, request)
    return handle.counts.cached


def snapshot_of(engine: Engine) -> Any:
    """A snapshot behind prompt(30)."""
    session = engine.session()
    session.prefill(torch.tensor([prompt(30)]))
    return session.snapshot()


def files(home: Path) -> list[Path]:
    return sorted((home / "CACHE" / "g4ir" / "prefixes").glob("*/*"))


@pytest.mark.parametrize("memory", [None, 0])
def test_a_conversation_goes_on_after_a_restart(
    engine: Engine, make_engine: Any, own_home: Path, memory: int | None
) -> None:
    """Marks, the end of a prompt without any, the same prompt again; not for another API key, nor
    for another engine."""
    turn = Request(prompt(60), 6, FREE, marks=(20, 50))
    longer = replace(turn, tokens=(*turn.tokens[:55], *prompt(9, 1)), marks=())
    for request, cached in (
        (turn, 0),
        (turn, 50),
        (longer, 50),
        (longer, 63),
        (replace(longer, tokens=(*longer.tokens, 4, 5)), 64),
        (replace(turn, tokens=(*turn.tokens[:30], 7), marks=()), 20),
        (replace(turn, salt="key"), 0),
        (replace(turn, salt="key"), 50),
        (replace(turn, reuse=False), 0),
    ):
        assert restarted(engine, request, prefix_bytes=memory) == cached
    other = make_engine("tiny-ple", backend="torch", **LIMITS, random_weights=1)
    assert restarted(other, turn) == 0
    assert len({f.parent for f in files(own_home)}) == 3


def test_a_warm_up_leaves_no_trace(engine: Engine, own_home: Path) -> None:
    """It records what the first steps need, is not counted, and nothing of it is found later."""
    config = SchedulerConfig(prefix_disk=GIB, warm_up=True)
    scheduler = Scheduler(engine, config)
    assert scheduler.batch.sessions[1].length.tolist() == [0] and not scheduler.busy
    assert scheduler.totals == Totals() and not scheduler.prefixes.nbytes
    request = Request((engine.spec.tokens.bos or 0,) * 9, 6, FREE)
    handle = ran(scheduler, request)
    assert handle.answers[0].tokens == alone(engine, request) and not handle.counts.cached
    scheduler.close()
    assert len(files(own_home)) == 1


def picture(engine: Engine, seed: int) -> Soft:
    g = torch.Generator().manual_seed(seed)
    return Soft("image", (torch.randn(12, engine.spec.text.hidden_size, generator=g),))


def shown(*soft: Soft) -> Request:
    """Words, and before each run of them a picture."""
    tokens: list[int] = [2, 7]
    for i, s in enumerate(soft):
        tokens += [500] * s.count + [*prompt(5, i)]
    return Request(tuple(t if t != 501 else 3 for t in tokens), 5, FREE, soft)


def test_images_are_in_the_key(make_engine: Any, own_home: Path) -> None:
    """The same ids with other pixels are another prompt."""
    unified = make_engine("tiny-unified", max_seq=256, prefill_chunk=70, max_batch=4)
    a, b = picture(unified, 1), picture(unified, 2)
    first = replace(shown(a, b), marks=(35,))
    seen = [restarted(unified, r) for r in (first, first, replace(shown(a, a), marks=(19,)))]
    assert seen == [0, 35, 0]
    assert restarted(unified, shown(a, b, b)) == 35 and restarted(unified, shown(a, a, b)) == 19


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "other bytes": lambda p: p.write_bytes(p.read_bytes()[:-40] + b"x" * 40),
    "truncated": lambda p: os.truncate(p, p.stat().st_size - 64),
    "empty": lambda p: os.truncate(p, 0),
    "no file": lambda p: (p.unlink(), p.mkdir()),
}


def test_prompts_that_wait_are_looked_up_in_memory(
    engine: Engine, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler asks for each of them before every chunk."""
    disk, reads = PrefixDisk(engine, GIB), list[Path]()
    disk.store("", prompt(30), snapshot_of(engine))
    disk.close()
    read = prefix_disk._read
    monkeypatch.setattr(prefix_disk, "_read", lambda path: (reads.append(path), read(path))[1])
    assert [disk.lookup("", prompt(31), 0)[0] for _ in range(3)] == [30] * 3 and len(reads) == 1


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_not_used(
    engine: Engine, own_home: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    request = Request(prompt(40), 6, FREE, marks=(30,))
    restarted(engine, request)
    (path,) = files(own_home)
    DAMAGE[damage](path)
    assert restarted(engine, request) == 0
    assert "cannot be used and is removed" in caplog.text and str(path) in caplog.text
    if damage != "no file":
        assert restarted(engine, request) == 30  # written again


def test_a_snapshot_of_other_caches_is_not_used(engine: Engine, make_engine: Any) -> None:
    with pytest.raises(InputError, match="other shapes or dtypes than those of"):
        make_engine("tiny-moe", backend="torch", **LIMITS).session().restore(snapshot_of(engine))


def test_a_full_disk(engine: Engine, own_home: Path, caplog: Any, monkeypatch: Any) -> None:
    """Answers go on, nothing is kept, and it is logged once."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    scheduler = Scheduler(engine, SchedulerConfig(prefix_disk=GIB, prefix_bytes=0))
    for i in range(3):
        request = Request(prompt(40, i), 6, FREE, marks=(30,))
        assert ran(scheduler, request).answers[0].tokens == alone(engine, request)
        scheduler.prefixes.disk.close()  # type: ignore[union-attr]
    assert caplog.text.count("No space left on device; nothing more is written") == 1
    assert not files(own_home)


def test_the_least_recently_used_goes_first(engine: Engine, own_home: Path) -> None:
    """Within the limit, and not what was used since."""
    first, *more = (Request(prompt(40, i), 1, FREE, marks=(30,)) for i in range(4))
    restarted(engine, first)
    (oldest,) = files(own_home)
    limit = int(3.5 * oldest.stat().st_size)
    for request in (*more[:2], first, more[2]):
        assert restarted(engine, request, limit) == (30 if request is first else 0)
        os.sync()
        assert sum(f.stat().st_size for f in files(own_home)) <= limit
    assert oldest in files(own_home) and restarted(engine, more[0], limit) == 0
    disk = PrefixDisk(engine, 1000)
    disk.store("", prompt(30), snapshot_of(engine))
    disk.close()
    assert disk.too_large == 1


def test_killed_while_it_writes(engine: Engine, own_home: Path, full: bool) -> None:
    """No file of a killed process is accepted damaged, and the next writer removes its leavings."""
    rng, complete, snapshot = random.Random(0), 0, snapshot_of(engine)
    disk = PrefixDisk(engine, 1 << 20)
    for round_ in range(100 if full else 15):
        child = os.fork()
        if not child:
            for i in range(10_000):
                disk._write(disk._scope(""), prompt(30, 1000 * round_ + i), snapshot, 1)
            os._exit(0)
        before, until = {*files(own_home)}, time.monotonic() + 30
        while not {*files(own_home)} - before and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in files(own_home):
            if prefix_disk.NAME.fullmatch(path.name):
                got, complete = prefix_disk._read(path), complete + 1
                for name, t in snapshot.caches.tensors.items():
                    assert torch.equal(got.caches.tensors[name], t)
    assert complete
    disk.store("", prompt(30, 10**6), snapshot)
    disk.close()
    assert all(prefix_disk.NAME.fullmatch(path.name) for path in files(own_home))
    assert disk.lookup("", (*prompt(30, 10**6), 3))[0] == 30


def test_two_processes_in_one_folder(engine: Engine, own_home: Path) -> None:
    """What one writes the other finds, and both stay within the limit."""
    snapshot, limit = snapshot_of(engine), 1 << 20
    disk = PrefixDisk(engine, limit)
    children = []
    for offset in (0, 100):
        if not (child := os.fork()):
            for i in range(20):
                disk._write(disk._scope(""), prompt(30, offset + i), snapshot, 70_000)
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    assert sum(f.stat().st_size for f in files(own_home)) <= limit
    found = [disk.lookup("", prompt(30, o + i))[0] for o in (0, 100) for i in range(20)]
    assert found.count(30) == len(files(own_home)) > 5


def test_what_is_refused(engine: Engine, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_home / "CACHE" / "g4ir" / "prefixes").mkdir(parents=True)
    (own_home / "CACHE" / "g4ir" / "prefixes").chmod(0o777)
    with pytest.raises(TrustError, match="can be written by other users"):
        PrefixDisk(engine, GIB)
    monkeypatch.setattr(Engine, "ranks", 2)
    with pytest.raises(MissingError, match="runs on 2 ranks"):
        PrefixDisk(engine, GIB)


def test_at_the_command_line(engine: Engine, own_home: Path) -> None:
    words = ("run", engine.path, "--tokens", "2,5,7,8", "--max-new-tokens", "3")
    want = ok(*words)
    for counts in ("4 prompt tokens, ", "4 prompt tokens (3 cached), "):
        done = g4ir(*words, "--prefix-disk", "1GiB")
        assert (done.code, done.out) == (0, want) and counts in done.err
    for verb in ("run", "chat", "serve"):
        assert "--prefix-disk 'x': expected bytes" in refused(verb, "e", "--prefix-disk", "x")
