"""Measurements on an H100 or H200 as tests, one file per question:

    python -m pytest -n 1 bench/gpu --out DIR [--budget MIN] [--variants e2b,...]

`-n 1` runs them in a worker process, which pytest-xdist replaces after a crash. A measurement that
takes longer than its limit ends the worker, with a traceback in DIR/hung.txt. Each result is a line
of DIR/results.jsonl as soon as it is measured, and the same command measures only what is missing:
runs of ten minutes add up. DIR/report.md has all of it in tables. `--dry-run` runs the same tests
on a CPU, with tiny variants and interpreted kernels.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from g4ir.errors import G4Error
from g4ir.spec.record import load_spec
from g4ir.ui.table import aligned

#: maximum characters of an error in the results
SAID = 1000
#: default time limit of a measurement in seconds; @pytest.mark.limit sets another
LIMIT = 240
#: the order of the files
FILES = ("preflight", "kernels", "decode", "peers", "trt")
#: keys of a result without values: BEGUN (the process died in it) and FAILED fail the test, REFUSED
#: (out of memory, unsupported) does not
BEGUN, REFUSED, FAILED = "begun", "refused", "failed"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("measurements")
    group.addoption("--out", type=Path, metavar="DIR", help="folder of the results")
    group.addoption("--budget", type=float, default=60.0, metavar="MIN", help="begin no test after")
    group.addoption("--variants", type=lambda text: text.split(","), metavar="V,...")
    group.addoption("--again", action="store_true", help="measure anew what DIR has")
    group.addoption("--dry-run", action="store_true", help="tiny variants, without a GPU")


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if not option.out:
        raise pytest.UsageError("--out DIR: name the folder of the results")
    for variant in option.variants or ():
        try:
            load_spec(variant.partition("+")[0])
        except G4Error as e:
            raise pytest.UsageError(f"--variants {variant}: {e}") from None
    option.out.mkdir(parents=True, exist_ok=True)
    option.results = option.out / "results.jsonl"
    if option.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    if is_worker(config):
        option.until = config.workerinput["until"]  # type: ignore[attr-defined]
        return
    option.until = time.time() + option.budget * 60
    if option.again:
        option.results.unlink(missing_ok=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the end of the time budget to each worker, also to replacements."""
    node.workerinput["until"] = node.config.option.until


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist."""
    return bool(getattr(config, "workerinput", None))


def scale_of(config: pytest.Config, module: Any) -> Any:
    return module.DRY if config.option.dry_run else module.CARD


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests by the requested variants, else those of their file."""
    scale = scale_of(metafunc.config, metafunc.module)
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", metafunc.config.option.variants or scale.variants)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order tests by groups of three variants, then by batch size (`rows`), then by file as in
    FILES."""

    def key(item: Any) -> tuple[int, int, int]:
        given = item.callspec.params if "callspec" in vars(item) else {}
        variants = config.option.variants or scale_of(config, item.module).variants
        at = variants.index(given["variant"]) // 3 if "variant" in given else 0
        return at, given.get("rows", 1), FILES.index(item.path.stem.removeprefix("test_"))

    items.sort(key=key)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.option.until:
        pytest.skip("the budget is over; the same command goes on here")


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return test -> measurement -> values, the latest of each."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        found.setdefault(record["test"], {})[record["name"]] = record["values"]
    return found


class Measure:
    """Measurements by name, each run once; if one is refused or fails, the others still run."""

    def __init__(self, path: Path, test: str, limit: float) -> None:
        self.path, self.test, self.limit = path, test, limit
        self.found = read_results(path).get(test, {})

    def __call__(self, name: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the values of a measurement: the stored ones, or what `make` returns.

        A process that dies in it leaves it `begun`, which counts as a failure and is not tried
        again.
        """
        if name in self.found:
            return self.found[name]
        self.keep(name, {BEGUN: time.strftime("%H:%M:%S")})
        started = time.monotonic()
        with open(self.path.with_name("hung.txt"), "a") as hung:
            faulthandler.dump_traceback_later(self.limit, exit=True, file=hung)
            try:
                values = dict(make())
            except G4Error as e:
                values = {REFUSED: str(e)}
            except Exception as e:
                kind = REFUSED if type(e).__name__ == "OutOfMemoryError" else FAILED
                values = {kind: repr(e)[:SAID]}
                if device_is_lost(e):
                    self.keep(name, values)
                    os._exit(1)  # every later call would fail; a new worker takes over
            finally:
                faulthandler.cancel_dump_traceback_later()
        self.keep(name, {**values, "seconds": round(time.monotonic() - started, 1)})
        return self.found[name]

    def keep(self, name: str, values: Mapping[str, Any]) -> None:
        self.found[name] = dict(values)
        record = {"test": self.test, "name": name, "values": values}
        with open(self.path, "a") as file:
            file.write(json.dumps(record, default=str) + "\n")

    def wrong(self) -> dict[str, Any]:
        """Return the measurements that failed, crashed or have wrong results."""
        return {
            n: v for n, v in self.found.items() if {BEGUN, FAILED} & v.keys() or not v.get("ok", 1)
        }


def device_is_lost(e: Exception) -> bool:
    """Whether the device is lost: after an illegal access every call fails, with any error."""
    torch = sys.modules.get("torch")
    if torch is None or isinstance(e, torch.OutOfMemoryError):
        return False
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return isinstance(e, torch.AcceleratorError)


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Iterator[Measure]:
    """`measure(name, make)` of this test; the test fails if one of its measurements did."""
    marker = request.node.get_closest_marker("limit")
    limit, test = marker.args[0] if marker else LIMIT, request.node.nodeid.split("/")[-1]
    measure = Measure(request.config.option.results, test, limit)
    yield measure
    assert not measure.wrong()


@pytest.fixture(scope="module")
def scale(request: pytest.FixtureRequest) -> Any:
    """The size of the run: CARD or DRY of the file."""
    return scale_of(request.config, request.module)


@pytest.fixture(scope="session")
def out(pytestconfig: pytest.Config) -> Any:
    return pytestconfig.option.out


@pytest.fixture(scope="session", autouse=True)
def small_rates(pytestconfig: pytest.Config) -> Iterator[None]:
    """In a dry run rates are measured on small operands: speed does not count."""
    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.option.dry_run:
            from tests.small_bench import small_bench

            small_bench(patch)
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write report.md: a table of each test's measurements."""
    option = session.config.option
    if not is_worker(session.config):
        found = read_results(option.results)
        parts = (f"## {test}\n\n```\n{table(values)}```\n" for test, values in found.items())
        (option.out / "report.md").write_text("\n".join(parts))


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each measurement, with a column for each key of their values."""
    flat = {name: flattened(values) for name, values in found.items()}
    names = list(dict.fromkeys(k for values in flat.values() for k in values))
    rows = [[name, *(values.get(k, "") for k in names)] for name, values in flat.items()]
    return aligned([["", *names], *rows])


def flattened(values: Mapping[str, Any], front: str = "") -> dict[str, str]:
    """Return values as text by name, those of inner tables after that table's name."""
    flat = dict[str, str]()
    for k, v in values.items():
        if isinstance(v, Mapping):
            flat |= flattened(v, f"{front}{k}.")
        else:
            text = f"{v:.4g}" if isinstance(v, float) else str(v)
            flat[front + k] = " ".join(text.split())[:60]
    return flat
