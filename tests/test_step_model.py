"""The predicted time of a decode step: `g4ir show --timeline`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml

from g4ir.backends.torch_compile.kernel_table import OTHER, kernel_rows
from g4ir.backends.torch_compile.kernels.base import Schedule
from g4ir.backends.torch_compile.schedule import schedule
from g4ir.backends.torch_compile.step_model import (
    AROUND,
    LIBRARY,
    TABLE,
    Prediction,
    measured_text,
    predict,
    read_constants,
)
from g4ir.backends.torch_compile.target import Target
from g4ir.errors import InputError, SpecError
from g4ir.ir.graph import split_prologue
from g4ir.ir.names import layer_of
from g4ir.model.text import build_graph
from g4ir.passes import run_passes
from g4ir.plan.cost import graph_costs
from g4ir.plan.settings import for_gpu
from g4ir.spec.record import load_spec
from tests.cli_tools import g4ir, refused


@cache
def scheduled(name: str, rows: int, fused: bool = True) -> Schedule:
    plain = build_graph(load_spec(name), "decode", dtype="bf16")
    g = run_passes(plain, options=for_gpu(rows * fused))
    return schedule(split_prologue(g)[1], Target("cuda", "h200", rows))


def moved(name: str, rows: int, context: int, fused: bool) -> dict[str, int]:
    costs = graph_costs(scheduled(name, rows, fused).graph, B=rows, S=1, C=context - 1)
    return {c.node: c.cost.needed_bytes for c in costs}


def predicted(
    name: str, rows: int = 1, context: int = 1024, path: Path = TABLE, fused: bool = True
) -> Prediction:
    given = moved(name, rows, context, fused)
    return predict(scheduled(name, rows, fused), given, context, path)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("name", ["e2b", "26b-a4b"])
def test_every_kernel_of_the_schedule(name: str, rows: int) -> None:
    """As many of each as the table of kernels has; the bytes are those of the step."""
    found = Counter(x.kernel for x in predicted(name, rows).launches)
    starts: Counter[str] = Counter()
    for row in kernel_rows(scheduled(name, rows)):
        starts[row.kernel] += row.starts
    del starts[OTHER]
    assert {k: n for k, n in found.items() if k not in (OTHER, LIBRARY, AROUND)} == starts
    assert found[AROUND] == read_constants().around and (found[LIBRARY] > 0) == (rows == 64)
    p = predicted(name, rows)
    assert sum(x.nbytes for x in p.launches) == pytest.approx(p.nbytes, rel=1e-6)
    assert all(0 < x.us[0] <= x.us[1] for x in p.launches)


def test_nothing_is_faster_than_the_roof() -> None:
    for name in ("31b", "12b", "e2b", "26b-a4b"):
        for rows, context in ((1, 1024), (8, 8192), (32, 1024)):
            low, high = predicted(name, rows, context).share
            assert 0.3 < low < high < 1


#: ms by an independent count of the kernels without fusions across ops, 1K tokens on an H200
COUNTED = {
    ("31b", 1): (16.5, 17.8),
    ("31b", 8): (17.6, 19.0),
    ("26b-a4b", 1): (2.88, 3.14),
    ("26b-a4b", 8): (7.9, 8.2),
    ("e4b", 1): (3.43, 3.94),
    ("e2b", 1): (2.13, 2.51),
}


@pytest.mark.parametrize(("name", "rows"), COUNTED)
def test_an_independent_count(name: str, rows: int) -> None:
    """The middles lie within a tenth of each other."""
    got = sum(predicted(name, rows, fused=False).us) / 2e3
    assert got == pytest.approx(sum(COUNTED[name, rows]) / 2, rel=0.1)


def test_the_table_of_the_docs() -> None:
    """As docs/hopper.md has it: per cent of the roof at 1 to 32 rows."""
    text = (Path(__file__).parents[1] / "docs" / "hopper.md").read_text()
    for name in ("31b", "12b", "26b-a4b", "e4b", "e2b"):
        shares = [predicted(name, rows).share for rows in (1, 8, 32)]
        cells = " | ".join(f"{100 * low:.0f} to {100 * high:.0f}" for low, high in shares)
        assert f"| {name} | {cells} |" in text


@pytest.mark.parametrize(
    ("name", "one", "more"), [("31b", 5, 7), ("12b", 5, 7), ("26b-a4b", 6, 8), ("e2b", 7, 10)]
)
def test_kernels_of_a_layer(name: str, one: int, more: int) -> None:
    """Of one in the middle; with fewer rows than experts need to be sorted."""
    for rows, want in ((1, one), (2, more)):
        made = Counter(layer_of(x.node) for x in predicted(name, rows).launches)
        assert made[3] == want, rows


def test_fewer_kernels_are_faster() -> None:
    for name in ("31b", "12b", "26b-a4b", "e4b", "e2b"):
        for rows in (1, 8, 32):
            both = [predicted(name, rows, fused=fused).us for fused in (True, False)]
            assert all(a < b for a, b in zip(*both, strict=True))


def test_more_context_takes_longer() -> None:
    times = [predicted("e2b", 1, c).us[0] for c in (1024, 4096, 16384, 131072)]
    assert times == sorted(times) and len(set(times)) == 4


def test_what_was_measured_takes_the_place(tmp_path: Path) -> None:
    """A card with half the rate and no gap at all."""
    path = tmp_path / "measured.yaml"
    path.write_text(measured_text("h200", 2.15e6, (0.7, 1.1)))
    made = read_constants(path)
    assert made.gpus["h200"].copy == 2.15e6 and made.gap == pytest.approx((0.0, 0.25))
    assert made.kernels == read_constants().kernels
    shipped, other = predicted("31b"), predicted("31b", path=path)
    assert other.roof_us == pytest.approx(2 * shipped.roof_us)
    assert other.share[0] > shipped.share[0]


def test_constants_refused(tmp_path: Path) -> None:
    values = yaml.safe_load(TABLE.read_text())
    path = tmp_path / "c.yaml"
    for change, said in (
        ({"gap": [0.9]}, "gap: must have 2 items, has 1"),
        ({"gap": "fast"}, "gap: expected a list"),
        ({"speed": 1}, "speed: unknown key"),
        ({"gpus": {}}, None),
    ):
        path.write_text(yaml.safe_dump(values | change))
        read_constants.cache_clear()
        if said is None:
            with pytest.raises(InputError, match="nothing on h200"):
                predicted("e2b", path=path)
        else:
            with pytest.raises(SpecError, match=said):
                read_constants(path)


# --- the command --------------------------------------------------------------------------------

WORDS = ("show", "--variant", "e2b", "--timeline")


def test_the_command(tmp_path: Path) -> None:
    told = json.loads(g4ir(*WORDS, "--batch", "8", "--context", "4K", "--json").out)
    want = predicted("e2b", 8, 4096)
    assert told["us"] == pytest.approx(want.us, abs=0.1) and told["batch"] == 8
    assert len(told["launches"]) == len(want.launches)
    drawn = tmp_path / "step.svg"
    text = g4ir(*WORDS, "--plot", str(drawn)).out
    assert "e2b decode on h200, 1 row of 1K tokens\n267 launches, predicted " in text
    assert "norm_linear" in text and "qkv_attention: " in drawn.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--phase prefill", "--timeline is of decode, not of prefill"),
        ("--kernels", "give --kernels or --timeline, not both"),
        ("--gpu a100-80gb", "the kernels are for h100 and h200"),
        ("--plot x.pdf", "expected a name that ends in .png or .svg"),
        ("--constants none.yaml", "none.yaml: cannot be read"),
        ("--chunk 4", "--chunk"),
    ],
)
def test_the_command_refuses(words: str, said: str) -> None:
    assert said in refused(*WORDS, *words.split())


@pytest.mark.parametrize("option", ["--plot", "--constants"])
def test_options_of_a_timeline_alone(option: str) -> None:
    assert f"{option} needs --timeline" in refused("show", "--variant", "e2b", option, "x.svg")


def test_it_needs_no_torch() -> None:
    import subprocess

    code = (
        "import sys; from g4ir.cli import main; "
        "main(['show', '--variant', 'tiny-moe', '--timeline', '--json']); "
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
