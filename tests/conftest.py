"""Options of the test suite.

`--full` adds the tests marked `full` (minutes each), all cases of those marked `covering`, and
draws eighty times as many hypothesis examples; without it those tests are deselected, not skipped,
so a skip always means that something is missing on this machine. `--rewrite-golden` writes the
golden files of the passes and transcripts anew; read the difference before you keep it.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.covering import left_out

# What runs in the background of a shell, or under nohup, ignores signals that tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Graphs, traces and sessions are many small objects: at the default, looking for dead ones among
# them takes a twentieth of the run.
gc.set_threshold(200_000, 20, 100)

# Read when torch is imported, by processes that tests start too. The workers of the suite share the
# cores already, and threads of small models wait for each other. What lies between the kernels of a
# compiled program need not be fast here, and takes most of its compile time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# Vector instructions are those that the processor names; torch would compile a program for each.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
_HEADERS = [str(Path(__file__).parent / "headers"), os.environ.get("CPLUS_INCLUDE_PATH", "")]
os.environ["CPLUS_INCLUDE_PATH"] = os.pathsep.join(filter(None, _HEADERS))

# An example that takes longer than this counts as a hang. Tests whose examples are costly (they
# build a model) set their own, smaller `max_examples`.
_COMMON = {"deadline": timedelta(seconds=10), "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=100, derandomize=True, **_COMMON)
settings.register_profile("full", max_examples=20_000, print_blob=True, **_COMMON)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options above."""
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write tests/passes and tests/golden anew"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the hypothesis profile before any test module is imported; find what transformers
    looks for when it is imported first."""
    settings.load_profile("full" if config.getoption("--full") else "ci")
    from tests.torchvision_half import find_torchvision

    find_torchvision()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `full` unless they were asked for."""
    if config.getoption("--full"):
        return
    kept = [item for item in items if not item.get_closest_marker("full")]
    spare = set(left_out(kept))
    kept = [item for item in kept if item not in spare]
    config.hook.pytest_deselected(items=[*set(items) - set(kept)])
    items[:] = kept


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the run was started with `--full`: for tests that only scale their size."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def rewrite_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written, not compared."""
    return bool(request.config.getoption("--rewrite-golden"))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whatever ran before it in its process."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Looking for dead objects passes over what the modules before have imported and kept, which
    else takes most of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_compiler_a_worker() -> Iterator[None]:
    """The test workers share the cores already, and a process to compile in takes seconds to
    start."""
    from g4ir.backends.inductor import backend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "JOBS", 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def each_once() -> Iterator[None]:
    """Graphs of a build and random tensors are functions of their arguments, and most tests ask for
    the same ones: a worker computes them once."""
    from g4ir import passes
    from g4ir.ops import OPS
    from g4ir.plan.options import BuildConfig
    from g4ir.weights import random

    new_packing, new_tensor = BuildConfig.packing, random.random_tensor
    tensor = lru_cache(4096)(new_tensor)

    @lru_cache(64)
    def packing(config: Any, backend: Any, without: frozenset[str], *_: Any) -> Any:
        acted = passes.PassCounts()
        return new_packing(config, backend, acted=acted, without=without), acted.counts

    def one_packing(config: Any, backend: Any, **how: Any) -> Any:
        if how.get("dump"):
            return new_packing(config, backend, **how)
        patched = (passes.find_pass, passes.PASSES, *map(id, OPS.values()))
        found, counts = packing(config, backend, frozenset(how.get("without", ())), *patched)
        if acted := how.get("acted"):
            acted.counts.update(counts)
        return found

    def one_tensor(*args: Any) -> Any:
        return tensor(*args).clone() if math.prod(args[2]) <= 1 << 16 else new_tensor(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BuildConfig, "packing", one_packing)
        patch.setattr(random, "random_tensor", one_tensor)
        yield


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folders with nothing in them but the kernels, which take a minute to compile."""
    from g4ir.ui import paths

    for name, root in (("CACHE", paths.cache_root()), ("STATE", paths.state_root())):
        folder = paths.private(tmp_path / name / "g4ir") / "programs"
        folder.symlink_to(paths.private(root / "programs"))
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    return tmp_path


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`engines(backend, spec)`: see tests/engines.py."""
    from tests.engines import Engines

    return Engines(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`make_engine(variant, **options)`: see tests/engines.py."""
    from tests.engines import RandomEngines

    with RandomEngines(tmp_path_factory.mktemp("random")) as made:
        yield made
