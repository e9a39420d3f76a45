"""The predicted time of a decode step: `g4ir show --timeline`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from g4ir.backends.experimental.step_model import (
    AROUND,
    LIBRARY,
    TABLE,
    Prediction,
    measured_text,
    predict,
    read_constants,
)
from g4ir.backends.torch_compile.kernels.base import Schedule
from g4ir.backends.torch_compile.schedule import OTHER, kernel_rows, schedule
from g4ir.backends.torch_compile.target import Target
from g4ir.errors import InputError, SpecError
from g4ir.ir.graph import Builder
from g4ir.ir.rewrite import split_prologue
from g4ir.model.text import build_graph
from g4ir.ops.collective import COLLECTIVES
from g4ir.ops.types import Type
from g4ir.parallel.shard import shard
from g4ir.passes import PassOptions, run_passes
from g4ir.plan.cost import graph_costs
from g4ir.spec.record import load_spec
from tests.cases import TABLES
from tests.cli_tools import g4ir, refused
from tests.configs import short


@cache
def scheduled(name: str, rows: int, fused: bool = True) -> Schedule:
    plain = build_graph(load_spec(name), "decode", dtype="bf16")
    g = run_passes(plain, options=PassOptions(gpu_rows=rows * fused))
    return schedule(split_prologue(g)[1], Target("cuda", "h200", rows))


def moved(name: str, rows: int, context: int, fused: bool) -> dict[str, int]:
    costs = graph_costs(scheduled(name, rows, fused).graph, B=rows, S=1, C=context - 1)
    return {c.node: c.cost.needed_bytes for c in costs}


def predicted(
    name: str,
    rows: int = 1,
    context: int = 1024,
    path: Path = TABLE,
    fused: bool = True,
    early: bool = True,
) -> Prediction:
    given = moved(name, rows, context, fused)
    return predict(scheduled(name, rows, fused), given, context, path, early=early)


@pytest.mark.parametrize("rows", [1, 64, 65])
@pytest.mark.parametrize("name", ["e2b", "26b-a4b"])
def test_every_kernel_of_the_schedule(name: str, rows: int) -> None:
    """As many of each as the table of kernels has; the bytes are those of the step."""
    found = Counter(x.kernel for x in predicted(name, rows).launches)
    starts: Counter[str] = Counter()
    for row in kernel_rows(scheduled(name, rows)):
        starts[row.kernel] += row.starts
    del starts[OTHER]
    assert {k: n for k, n in found.items() if k not in (OTHER, LIBRARY, AROUND)} == starts
    assert found[AROUND] == read_constants().around and (found[LIBRARY] > 0) == (rows == 65)
    p = predicted(name, rows)
    assert sum(x.nbytes for x in p.launches) == pytest.approx(p.nbytes, rel=1e-6)
    assert all(0 < x.us[0] <= x.us[1] for x in p.launches)


#: ms by an independent count of the kernels without fusions across ops, of which each begins when
#: the one in front has ended; 1K tokens on an H200
COUNTED = {
    ("31b", 1): (16.5, 17.8),
    ("31b", 8): (17.6, 19.0),
    ("26b-a4b", 1): (2.88, 3.14),
    ("26b-a4b", 8): (7.9, 8.2),
    ("e4b", 1): (3.43, 3.94),
    ("e2b", 1): (2.13, 2.51),
}


@pytest.mark.parametrize(("name", "rows"), short(("e2b", 1), of=COUNTED))
def test_an_independent_count(name: str, rows: int) -> None:
    """The middles lie within a tenth of each other."""
    got = sum(predicted(name, rows, fused=False, early=False).us) / 2e3
    assert got == pytest.approx(sum(COUNTED[name, rows]) / 2, rel=0.1)


@pytest.mark.parametrize("name", short("e2b", of=("31b", "12b", "26b-a4b", "e4b", "e2b")))
def test_the_table_of_the_docs(name: str) -> None:
    """As docs/cuda.md has it: per cent of the roof at 1 to 64 rows, and at 1 to 32."""
    assert predicted(name, 8, 8192).share[0] > 0.3
    text = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text()
    for early in (True, False):
        many = (1, 8, 32, 64)[: 3 + early]
        shares = [predicted(name, rows, early=early).share for rows in many]
        assert all(0.3 < low < high < 1 for low, high in shares), "faster than the roof"
        cells = " | ".join(f"{100 * low:.0f} to {100 * high:.0f}" for low, high in shares)
        assert f"| {name} | {cells} |" in text


def test_what_was_measured_takes_the_place(tmp_path: Path) -> None:
    """A card with half the rate and no gap; 0.5 of a kernel that begins early are its own."""
    path = tmp_path / "measured.yaml"
    path.write_text(measured_text("h200", 2.15e6, (0.7, 1.1), (0.4, 0.8)))
    made = read_constants(path)
    assert made.gpus["h200"].copy == 2.15e6 and made.gap == pytest.approx((0.0, 0.25))
    assert made.early.gap == pytest.approx((0.0, 0.3))
    assert made.kernels == read_constants().kernels
    shipped, other = predicted("31b"), predicted("31b", path=path)
    assert other.roof_us == pytest.approx(2 * shipped.roof_us)
    assert other.share[0] > shipped.share[0]


def test_constants_refused(tmp_path: Path) -> None:
    values = yaml.safe_load(TABLE.read_text())
    path = tmp_path / "c.yaml"
    for change, said in TABLES["step model"]["constants"]:
        path.write_text(yaml.safe_dump(values | change))
        read_constants.cache_clear()
        if said is None:
            with pytest.raises(InputError, match="nothing on h200"):
                predicted("e2b", path=path)
        else:
            with pytest.raises(SpecError, match=said):
                read_constants(path)


# --- of several ranks -----------------------------------------------------------------------------


@cache
def of_ranks(name: str, ranks: int) -> Prediction:
    spec = load_spec(name)
    own = shard(build_graph(spec, "decode", dtype="bf16"), spec, ranks)
    g = run_passes(own, options=PassOptions(gpu_rows=1))
    costs = graph_costs(g, B=1, S=1, C=1023)
    s = schedule(split_prologue(g)[1], Target("cuda", "h200", 1))
    return predict(s, {c.node: c.cost.needed_bytes for c in costs}, 1024)


@pytest.mark.parametrize(
    ("name", "ranks"), short(("26b-a4b", 4), of=[("31b", 2), ("26b-a4b", 4), ("e2b", 8)])
)
def test_messages_are_launches(name: str, ranks: int) -> None:
    """As many as the graph has; the rest is a step that moves less."""
    found = of_ranks(name, ranks)
    sent = [x for x in found.launches if x.kernel in COLLECTIVES]
    assert len(sent) == 2 * load_spec(name).text.num_hidden_layers + 1
    assert all(x.us[0] == x.us[1] > 3 and x.nbytes == 0 for x in sent)
    rest = sum(sum(x.us) for x in found.launches if x not in sent)
    assert rest < sum(predicted(name).us)


def test_the_time_of_a_message() -> None:
    """As in the file, of more bytes in proportion; more ranks than a line of the file has take
    those of the next."""
    g = build_graph(load_spec("tiny-dense"), "decode")
    for ranks, size, want in ((2, 2, 15.0), (2, 1 << 20, 30.0), (3, 1 << 10, 18.0)):
        b = Builder()
        b.emit("all_reduce", b.input("x", Type("bf16", (size // 2, 1))), ranks=ranks, name="y")
        s = Schedule(replace(g, nodes=tuple(b.nodes)), Target("cuda", "h200", 1), {})
        (sent,) = (x for x in predict(s, {}, 1).launches if x.kernel == "all_reduce")
        assert sent.us == pytest.approx((want, want))


# --- the command --------------------------------------------------------------------------------

WORDS = ("show", "--variant", "e2b", "--timeline")


def test_the_command(tmp_path: Path) -> None:
    told = json.loads(g4ir(*WORDS, "--batch", "8", "--context", "4K", "--json").out)
    want = predicted("e2b", 8, 4096)
    assert told["time_us"] == pytest.approx(want.us, abs=0.1) and told["batch"] == 8
    assert len(told["launches"]) == len(want.launches)
    drawn = tmp_path / "step.svg"
    text = g4ir(*WORDS, "--plot", str(drawn)).out
    assert "e2b decode on h200, 1 row of 1K tokens\n263 launches, predicted " in text
    assert "norm_linear" in text and "qkv_attention: " in drawn.read_text()


@pytest.mark.parametrize(("words", "said"), TABLES["step model"]["refused"])
def test_the_command_refuses(words: str, said: str) -> None:
    assert said in refused(*WORDS, *words.split())


def test_the_command_of_ranks() -> None:
    words = ("show", "--variant", "26b-a4b", "--tp", "4", "--timeline")
    told, want = json.loads(g4ir(*words, "--json").out), of_ranks("26b-a4b", 4)
    assert told["time_us"] == pytest.approx(want.us, abs=0.1) and told["ranks"] == 4
    said = f"26b-a4b decode on one of 4 h200, 1 row of 1K tokens\n{len(want.launches)} launches"
    assert said in g4ir(*words).out
    kernels = json.loads(g4ir("kernels", *words[1:-1], "--json").out)["rows"]
    found = {r["op"]: (r["nodes"], r["starts"]) for r in kernels if "all_" in r["op"]}
    assert found == {"all_reduce": (60, 0), "all_gather": (1, 0)}
