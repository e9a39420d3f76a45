"""What the command line says of GPUs without one: kernels of a variant, and what is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from g4ir.backends.cuda.schedule import OTHER
from g4ir.backends.cuda.target import gpu_name
from g4ir.backends.cuda.toolkit import check_toolkit, toolchain
from g4ir.backends.inductor.target import Target
from g4ir.errors import MissingError, check_all
from tests.cases import TABLES
from tests.cli_tools import ok


def shown(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ok("kernels", "--variant", "26b-a4b", "--json", *words))
    return found


def kernels(report: dict[str, Any]) -> dict[str, set[str]]:
    table: dict[str, set[str]] = {}
    for row in report["rows"]:
        table.setdefault(row["op"], set()).add(row["kernel"])
    return table


def test_kernels_of_weights_in_codes() -> None:
    """In decode no weight is dense, and codes and scales are what is counted."""
    plain, coded = shown(), shown("--quant", "int4")
    assert plain["starts"] == coded["starts"] and kernels(plain) == kernels(coded)
    read = {"skinny_linear", "moe_down"}
    forms = [r["shape"] for r in coded["rows"] if r["kernel"] in read]
    assert all(shape["int4"] == 32 for shape in forms[:-1]) and forms[-1]["int8"] == 2816
    (head,) = (r for r in coded["rows"] if r["shape"].get("n") == 262144)
    assert head["bytes"] == 262144 * (2816 + 2)
    sizes = [sum(r["bytes"] for r in x["rows"] if r["op"] == "linear") for x in (plain, coded)]
    rest = sizes[0] - 262144 * 2816 * 2
    assert sizes[1] - head["bytes"] == rest * 18 // 64  # 18 bytes hold 32 numbers
    many = kernels(shown("--quant", "int4", "--batch", "65"))
    assert many["linear"] == {OTHER}


def test_gpus_that_are_too_old_and_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    with pytest.raises(MissingError, match=r"Tesla V100 .* 7\.0.*8\.0 or newer.*--device cpu"):
        check_all(*toolchain(", or build with --device cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    with pytest.raises(MissingError, match="pip install triton"):
        check_all(*toolchain(", or build with --device cpu"))
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for home in (None, str(tmp_path)):
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", home)
        with pytest.raises(MissingError, match=f"CUDA_HOME is {home}.*install the toolkit"):
            check_toolkit()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    check_toolkit()


@pytest.mark.parametrize(("product", "capability", "name"), TABLES["gpu names"])
def test_gpu_names(product: str, capability: list[int], name: str) -> None:
    assert gpu_name(product, tuple(capability)) == name


def test_targets_differ_as_programs_do() -> None:
    hopper = [Target("cuda", "h100"), Target("cuda", "h200"), Target("cuda", "h200", 8)]
    assert len({*map(str, (Target("cpu"), Target("cuda"), *hopper))}) == 5
    assert str(Target("cuda", rows=8)) == str(Target("cuda"))
