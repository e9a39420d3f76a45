"""Presets of a build, and what a MODEL is that nothing is built of: plans beside the engine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from g4ir.cli import parse
from g4ir.plan.options import BuildOptions
from g4ir.plan.presets import PRESETS
from g4ir.spec.record import load_spec
from tests.cases import TABLES
from tests.cli_tools import built, g4ir, ok, refused
from tests.configs import short
from tests.engines import random_checkpoint
from tests.gguf_files import bare_file

SMALL = ("--max-seq", "64", "--max-batch", "2")
TINY = ("--variant", "tiny-moe", "--random-weights", "0")


def options(line: str) -> BuildOptions:
    parser, values = parse(shlex.split(line))
    verb: Any = parser.flags.make(values)
    return getattr(verb, "first_use", verb).options


# --- presets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", short(*({*PRESETS} - {"rtx"}), of=PRESETS))
def test_each_preset_builds_in_small(name: str, tmp_path: Path) -> None:
    """As far as that goes without its GPU."""
    words = ("build", "--preset", name, *TINY, *SMALL, "--out", tmp_path / "e", "--dry-run")
    found, preset = json.loads(ok(*words, "--json")), PRESETS[name].options
    assert (found["backend"], found["device"]) == (preset["backend"], preset["device"])
    assert (found["quant"], found["kv_dtype"]) == ("int8", preset.get("kv_dtype"))
    assert (found["max_seq"], found["max_batch"]) == (64, 2)


@pytest.mark.full
def test_the_laptop_s_engine_runs(tmp_path: Path) -> None:
    ok("build", "--preset", "laptop", *TINY, *SMALL, "--out", tmp_path / "e", "--verify")


@pytest.mark.parametrize("line", TABLES["presets"]["flags"])
def test_flags_win_wherever_they_stand(line: str) -> None:
    """Also one with the value that it has without a preset."""
    found, preset = options(line), PRESETS["h100-throughput"].options
    assert found.max_batch == (1 if "--max-batch" in line else preset["max_batch"])
    assert found.kv_dtype == ("bfloat16" if "--kv-dtype" in line else "int8")
    others = preset.keys() - {"max_batch", "kv_dtype"}
    assert {k: getattr(found, k) for k in others} == {k: preset[k] for k in others}


@pytest.mark.parametrize(("line", "backend", "target"), TABLES["presets"]["targets"])
def test_the_target_of_a_preset(line: str, backend: str, target: str | None) -> None:
    found = options(line)
    assert (found.backend, found.target, found.quant) == (backend, target, "int8")


def test_a_flag_of_another_meaning_is_no_option_of_a_preset() -> None:
    """`--draft-tokens` of run is a number of drafts at a time, and needs --draft."""
    assert PRESETS["h100-latency"].options["draft_tokens"] == 4
    assert options("build --preset h100-latency --variant x").draft_tokens == 4
    assert options("run m --preset h100-latency --tokens 2").draft_tokens is None


def test_a_quantised_file_keeps_its_codes(tmp_path: Path) -> None:
    file = bare_file(tmp_path / "tiny.gguf", load_spec("tiny-dense"), kind="Q8_0")
    words = ("--preset", "laptop", "--max-seq", "64", "--dry-run", "--out", tmp_path / "e")
    done = g4ir("build", "--checkpoint", file, *words)
    assert done.code == 0 and "quant          checkpoint\n" in done.out, done
    assert f"note: {file} is quantised already: --quant int8 is left out\n" in done.err
    assert "checkpoint" in g4ir("plan", file, "--preset", "laptop").out
    assert "is quantised already; leave" in refused("plan", file, "--quant", "int8")


# --- models -------------------------------------------------------------------------------------


def test_an_engine_is_planned_at_its_limits(tmp_path: Path) -> None:
    limits = ("--max-seq", "64", "--max-batch", "2", "--prefill-chunk", "16")
    words = ("--variant", "tiny-ple", "--random-weights", "0", "--quant", "int4", *limits)
    built(tmp_path / "e", *words)
    plan = json.loads(ok("plan", tmp_path / "e", "--gpu", "16GiB", "--json"))
    (row,), (most,) = plan["rows"], plan["largest"]
    assert (row["weights"], row["ctx"], row["batch"]) == ("int4", 64, 2)
    assert (most["max_context"], most["max_batch"]) == ({"2": 64}, {"64": 2})


def test_verbs_take_models(tmp_path: Path) -> None:
    file = bare_file(tmp_path / "tiny.gguf", load_spec("tiny-dense"), kind="Q8_0")
    assert "%embed.table.codes: i8[" in g4ir("show", file, "--phase", "embed").out
    assert "weights int8" in g4ir("cost", file).out
    assert "skinny_linear" in g4ir("kernels", file).out
    stated = json.loads(g4ir("inspect", file, "--json").out)
    assert stated["quantised"].endswith(" int8") and stated["takes"] == "text"
    assert stated["digest"] == json.loads(g4ir("plan", file, "--json").out)["spec_digest"]
    for verb in ("show", "cost", "kernels", "plan"):
        assert g4ir(verb, "tiny-moe").out == g4ir(verb, "--variant", "tiny-moe").out != ""
    both = g4ir("plan", "tiny-dense", file, "--gpu", "8GiB")
    assert "weights f32/int8/int4 or checkpoint" in both.out, both


def test_plan_of_a_cached_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "no model of this name in the local" in refused("plan", "some/tiny")
    folder = tmp_path / "models--some--tiny" / "snapshots" / "abc"
    random_checkpoint(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("abc")
    want = g4ir("plan", folder, "--json")
    assert g4ir("plan", "some/tiny", "--json").out == want.out and want.code == 0


def test_plan_of_a_hub_id_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    by_id, by_name = (g4ir("plan", model, "--json") for model in ("google/gemma-4-E2B-it", "e2b"))
    assert by_id.code == 0 and by_id.out == by_name.out
