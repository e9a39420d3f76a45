"""The table of launch settings: which entry counts, and what is no such table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from g4ir.backends.cuda import tunings
from g4ir.backends.cuda.kernels import KERNELS
from g4ir.backends.cuda.target import gpu_name
from g4ir.backends.cuda.tune import COPIES, ROOM, SPREAD, VALUES, copies
from g4ir.backends.cuda.tunings import Tuning, add_measured, find_tuning, read_tunings
from g4ir.backends.inductor.target import Target
from g4ir.errors import LowerError, SpecError
from tests.cases import TABLES

TEXT = TABLES["tunings"]["table"]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "tunings.yaml"
    path.write_text(TEXT)
    monkeypatch.setattr(tunings, "TABLE", path)
    read_tunings.cache_clear()
    yield path
    read_tunings.cache_clear()


@pytest.mark.parametrize(("gpu", "shape", "block", "measured"), TABLES["tunings"]["fits"])
def test_first_entry_that_fits(
    table: Path, gpu: str, shape: dict[str, int], block: int, measured: bool
) -> None:
    assert find_tuning("gemv", gpu, shape) == Tuning({"block": block}, measured)


def test_no_entry(table: Path) -> None:
    with pytest.raises(LowerError, match=r"strict has no entry for h200 and \{'n': 9\}"):
        find_tuning("strict", "h200", {"n": 9})
    with pytest.raises(LowerError, match="kernel unknown"):
        find_tuning("unknown", "h200", {})


def test_measured_entries_come_first_and_replace_older_ones(table: Path) -> None:
    add_measured("gemv", "h200", {"n": 8, "k": 64}, {"block": 16}, 2.25)
    add_measured("gemv", "h100", {"n": 8, "k": 64}, {"block": 32}, 2.0)
    add_measured("new", "h100", {"d": 3}, {"warps": 4}, 1.0)
    assert find_tuning("gemv", "h200", {"n": 8, "k": 64}) == Tuning({"block": 16}, True)
    assert find_tuning("gemv", "h100", {"n": 8, "k": 64}) == Tuning({"block": 32}, True)
    assert find_tuning("gemv", "h100", {"n": 8, "k": 63}) == Tuning({"block": 2}, False)
    assert find_tuning("new", "h100", {"d": 3}).measured
    assert table.read_text().count("us: ") == 3 and table.read_text().startswith("#")


@pytest.mark.usefixtures("table")
def test_settings_of_its_own_wherever_no_entry_fits() -> None:
    """One measured shape changes nothing for another shape or GPU."""
    kernel = next(k for k in KERNELS if k.use is not None)
    (name,), shape = kernel.starts, {"n": 8}
    own = {name: Tuning(kernel.use or {}, False)}
    assert kernel.settings("h200", shape) == own
    add_measured(name, "h200", shape, {"warps": 2}, 1.0)
    assert kernel.settings("h200", shape) == {name: Tuning({"warps": 2}, True)}
    assert kernel.settings("h200", {"n": 9}) == kernel.settings("h100", shape) == own


def test_a_shape_may_have_a_size_of_nothing(table: Path) -> None:
    """Full attention has a window of 0."""
    add_measured("attention", "h200", {"d": 512, "window": 0}, {"splits": 4}, 9.0)
    assert find_tuning("attention", "h200", {"d": 512, "window": 0}).measured
    with pytest.raises(SpecError, match="correct the entry"):
        add_measured("attention", "h200", {"d": 512, "window": 0}, {"splits": 0}, 9.0)
    assert find_tuning("attention", "h200", {"d": 512, "window": 0}).use == {"splits": 4}


@pytest.mark.parametrize("text", TABLES["tunings"]["no table"])
def test_no_such_table(table: Path, text: str) -> None:
    table.write_text(text)
    with pytest.raises(SpecError, match=table.name):
        read_tunings()


@pytest.mark.parametrize(("product", "capability", "name"), TABLES["tunings"]["gpus"])
def test_gpu_names(product: str, capability: list[int], name: str) -> None:
    assert gpu_name(product, tuple(capability)) == name


def test_targets_differ_as_programs_do() -> None:
    hopper = [Target("cuda", "h100"), Target("cuda", "h200"), Target("cuda", "h200", 8)]
    assert len({*map(str, (Target("cpu"), Target("cuda"), *hopper))}) == 5
    assert str(Target("cuda", rows=8)) == str(Target("cuda"))


def test_copies_of_small_operands_do_not_fit_the_cache_either() -> None:
    some = 800 << 10
    assert copies(some, some) * some > SPREAD - some > 100 << 20
    assert copies(1 << 30, 1 << 30) == 2 and copies(0, 0) == COPIES
    # One slot of a cache is touched, all of it is held.
    assert 2 < copies(300 << 10, 512 << 20) * (512 << 20) <= ROOM
    assert copies(1 << 10, 40 << 30) == 2


def test_a_search_tries_every_setting_of_the_table() -> None:
    """One that it does not know stays as it is in the entry."""
    entries = [entry for entries in read_tunings().values() for entry in entries]
    assert {name for entry in entries for name in entry["use"]} <= VALUES.keys()
    assert {1, 2} <= {*VALUES["parts"]} & {*VALUES["block_n"]} and 128 in VALUES["splits"]
