"""The thread team of the CPU kernels, and how many threads a process uses and how they wait.

Sessions of one engine in several threads. `python -m tests.test_team DIR` exits with 1 where a
thread gets other results than it gets alone: a process of its own, since what goes wrong between
threads can end the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import g4ir
from g4ir.backends.cpu import pyops
from g4ir.engine.engine import Engine
from g4ir.engine.scheduler import Scheduler
from g4ir.engine.speculative import NO_DRAFT
from g4ir.ui import threads
from g4ir.ui.memory import memory_limits
from tests.cases import TABLES
from tests.step_ops import linear

#: tolerances of logits: attention is split by the number of threads
NEAR = {"float32": 1e-4, "bfloat16": 0.05}
PRODUCTS = [(512, 96), (64, 1024), (1000, 256), (37, 9216)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    pyops.load_kernels()


@pytest.fixture(autouse=True)
def any_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def products(rounds: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    made = []
    for i in range(rounds):
        n, k = PRODUCTS[i % len(PRODUCTS)]
        x, w = (torch.randn(s, k, generator=g).bfloat16() for s in (1 + i % 3, n))
        made.append(linear(x, w))
    return made


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_same_results_on_any_number_of_threads(count: int) -> None:
    """More than there are cores, too: what a thread that is not running would have computed is
    computed by another."""
    torch.set_num_threads(1)
    alone = products(40)
    torch.set_num_threads(count)
    assert all(map(torch.equal, products(40), alone))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["tiny-ple", "tiny-moe", "tiny-embedding-2"])
def test_same_values_of_models_on_any_number_of_threads(variant: str, dtype: str) -> None:
    """A prompt after another one, whose rows are what a thread reads that reads too early."""
    engine = g4ir.load(variant, backend="torch", random_weights=0, max_seq=512, dtype=dtype)
    ids = torch.randint(5, 200, (2, 200), generator=torch.Generator().manual_seed(1))

    def values(row: int, count: int) -> torch.Tensor:
        torch.set_num_threads(count)
        if "embedding" in variant:
            return torch.as_tensor(engine.embed([ids[row].tolist()]))
        return engine.session(batch=1).prefill(ids[row : row + 1])

    alone = values(0, 1)
    for count in (2, 3):
        values(1, count)
        torch.testing.assert_close(values(0, count), alone, atol=NEAR[dtype], rtol=1e-4)


@pytest.mark.parametrize(
    ("variant", "quant"), [("tiny-ple", "none"), ("tiny-ple", "int8"), ("tiny-moe", "int4")]
)
def test_same_bits_of_a_sequence_in_any_batch(variant: str, quant: str) -> None:
    """On as many threads; the others' contexts are longer and shorter."""
    how = {"backend": "torch", "random_weights": 0, "max_batch": 5, "dtype": "bfloat16"}
    engine = g4ir.load(variant, quant=quant, **how)
    ids = torch.randint(5, 200, (5, 150), generator=torch.Generator().manual_seed(1))

    def logits(batch: int, count: int) -> torch.Tensor:
        torch.set_num_threads(count)
        session = engine.session(batch=batch)
        session.prefill(ids[:batch], lengths=[90, *(150, 20, 90, 60)[: batch - 1]])
        return torch.stack([session.decode(ids[:batch, t])[0] for t in range(4)])

    for count in (2, 3, 8):
        alone = logits(1, count)
        assert all(torch.equal(logits(batch, count), alone) for batch in (2, 5))


def test_callers_at_the_same_time() -> None:
    """One of them has the team, the others compute alone."""
    torch.set_num_threads(3)
    alone = products(60)
    with ThreadPoolExecutor(4) as pool:
        for made in pool.map(lambda _: products(60), range(8)):
            assert all(map(torch.equal, made, alone))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_a_team_of_its_own() -> None:
    """It uses the kernels alone: OpenMP's threads do not outlive a fork."""
    torch.set_num_threads(2)
    x, w = torch.randn(1, 1024), torch.randn(512, 1024)
    alone = linear(x, w)
    if (child := os.fork()) == 0:
        os._exit(0 if linear(x, w).eq(alone).numpy().all() else 1)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
    assert done == (child, 0)


def test_threads_do_not_wait_for_busy_cores() -> None:
    """Beside as many busy processes as cores, all threads are no slower than one: those that spin
    for each other are ten times as slow."""
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(1, 1024, generator=g), torch.randn(4096, 1024, generator=g)
    cores = max(2, threads.visible_cores())
    spinning = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spinning) for _ in range(cores)]
    taken: dict[int, list[float]] = {1: [], cores: []}
    try:
        for threads_used in (1, cores) * 4:
            torch.set_num_threads(threads_used)
            start = time.perf_counter()
            for _ in range(150):
                linear(x, w)
            taken[threads_used].append(time.perf_counter() - start)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert median(taken[cores]) < 3 * median(taken[1]), taken


@pytest.mark.full
def test_threads_stay_on_the_cores_of_the_process() -> None:
    """Beside a busy process, on one core."""
    code = """
import os, torch, sys, subprocess
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from tests.step_ops import linear
torch.set_num_threads(2)
busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
for _ in range(300):
    linear(torch.randn(1, 1024), torch.randn(2048, 1024))
busy.kill()
cores = {frozenset(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")}
assert cores == {frozenset(os.sched_getaffinity(0))}, cores
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr


#: of version 1 and 2
GROUPS = {"v1": "4:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n", "v2": "0::/user/job\n"}
QUOTAS: dict[str, tuple[str, dict[str, str], float | None]] = TABLES["threads"]["quotas"]


def container(root: Path, groups: str, files: dict[str, str]) -> None:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name if name.startswith("proc") else root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_peak_of_memory_is_not_the_parent_s() -> None:
    """As `ru_maxrss` is on Linux."""
    child = "from g4ir.ui.memory import peak_resident_bytes; print(peak_resident_bytes())"
    code = f"""
import subprocess, sys
held = b"x" * (400 << 20)
subprocess.run([sys.executable, "-c", {child!r}])
"""
    peak = int(subprocess.check_output([sys.executable, "-c", code]))
    assert 1 << 20 < peak < 300 << 20


def test_memory_of_a_container(tmp_path: Path) -> None:
    files = {"user/job/memory.max": "max\n", "user/memory.max": "5\n", "memory.max": "7\n"}
    files |= {f"{group}memory.current": "3\n" for group in ("user/job/", "user/", "")}
    for some, limits in (({}, []), (files, [(5, 3), (7, 3)])):
        assert [*memory_limits(tmp_path)] == []
        container(tmp_path, GROUPS["v2"], some)
        assert [*memory_limits(tmp_path)] == limits


@pytest.mark.parametrize(("groups", "files", "quota"), QUOTAS.values(), ids=QUOTAS.keys())
def test_quota_of_a_container(
    groups: str,
    files: dict[str, str],
    quota: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    container(tmp_path, GROUPS.get(groups, groups), files)
    for visible in (1, 2, 8):
        monkeypatch.setattr(threads, "visible_cores", lambda n=visible: n)
        wanted = visible if quota is None else max(1, min(visible, int(quota)))
        assert threads.usable_cores(tmp_path) == wanted


@pytest.mark.parametrize(("given", "usable", "added"), TABLES["threads"]["variables"])
def test_variables_of_the_user_win(
    given: dict[str, str], usable: int, added: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(threads, "visible_cores", lambda: 8)
    monkeypatch.setattr(threads, "usable_cores", lambda: usable)
    threads.configure_openmp(environ := dict(given))
    assert environ == given | {k: v.replace("SPIN", threads.SPIN) for k, v in added.items()}


def test_set_before_torch_is_loaded() -> None:
    """In any process that imports g4ir first, the CLI's among them."""
    code = "import os, g4ir; import torch; print(os.environ['GOMP_SPINCOUNT'])"
    free = {k: v for k, v in os.environ.items() if k not in threads.WAIT_VARIABLES}
    done = subprocess.run([sys.executable, "-c", code], env=free, capture_output=True, text=True)
    assert done.stdout.strip() == threads.SPIN


# --- sessions in several threads ----------------------------------------------------------------


def test_no_scheduler_is_lent_twice(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though both threads look for it at the same time."""
    engine = engines("reference", "tiny-ple")

    class Slow(Engine):
        @property
        def _idle(self) -> Any:
            time.sleep(0.05)
            return vars(self)["kept"]

        @_idle.setter
        def _idle(self, scheduler: Any) -> None:
            vars(self)["kept"] = scheduler

    def lend(_: int) -> Scheduler:
        with engine.lent_scheduler(1, NO_DRAFT) as scheduler:
            both.wait()
            return scheduler

    with engine.lent_scheduler(1, NO_DRAFT) as kept:
        monkeypatch.setitem(vars(engine), "kept", kept)
    monkeypatch.setattr(engine, "__class__", Slow)
    both = threading.Barrier(2, timeout=20)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lend, range(2))
    assert one is not other


THREADS, STEPS, ROUNDS = 8, 6, 2


def work(engine: Engine, steps: int, i: int) -> tuple[list[torch.Tensor], list[int]]:
    """Logits of the steps of an own session, and what `generate` makes, which lends one."""
    session = engine.session()
    seen = [session.prefill(torch.tensor([[5 + 7 * i, *range(3, 6 + i)]]))]
    seen += [session.decode(seen[-1].argmax(-1)) for _ in range(steps)]
    return seen, engine.generate([5 + 7 * i], 4, stop_ids=())


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    return all(map(torch.equal, a[0], b[0])) and a[1] == b[1]


def disturbed(engine: Engine, steps: int = STEPS, rounds: int = ROUNDS) -> set[int]:
    """Threads that got other results than alone."""
    alone = [work(engine, steps, i) for i in range(THREADS)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    wrong = set()
    for _ in range(rounds):
        with ThreadPoolExecutor(THREADS) as pool:
            together = list(pool.map(partial(work, engine, steps), range(THREADS)))
        wrong |= {i for i in range(THREADS) if not same(alone[i], together[i])}
    sys.setswitchinterval(before)
    return wrong


if __name__ == "__main__":
    wrong = disturbed(g4ir.load_engine(sys.argv[1]))
    print(f"threads with other results: {wrong}" if wrong else "same results")
    sys.exit(bool(wrong))
