"""Networks as TensorRT-RTX's builder compiles them, on any machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import yaml

from g4ir.backends.trt.host import Api, require_library
from g4ir.backends.trt.interface import SINGLE, networks, phase_of
from g4ir.backends.trt.target import RTX, TARGETS
from g4ir.backends.trt.trial import compile_once
from g4ir.builder.build import prepare
from g4ir.plan.options import BuildOptions
from tests.cases import read_table
from tests.configs import cut, spec_called

TABLE: Mapping[str, Mapping[str, Any]] = read_table("trt/compiled.yaml")
#: settings of the backend; other words are options of a build
SETTINGS = ("attention",)
#: of tiny networks; others have the limits of a build
TINY = {"max_batch": 2, "max_seq": 64, "prefill_chunk": 16}


def real() -> Api:
    """The library; MissingError where it is not installed."""
    return require_library(RTX)


def words_of(row: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """A variant, settings of the backend and options of the build."""
    variant, *words = row.split()
    given: dict[str, Any] = {
        k: int(v) if v.isdigit() else v for k, v in (w.split("=") for w in words)
    }
    return variant, {k: given.pop(k) for k in SETTINGS if k in given}, given


def planned(row: str) -> Any:
    """`tiny-moe quant=int4 layers=6` as a build that is not made."""
    variant, settings, given = words_of(row)
    spec, layers = spec_called(variant), given.pop("layers", 0)
    tiny = TINY if variant.startswith("tiny") else {}
    how = {"dtype": "bfloat16", "media": "none", **tiny, **given}
    options = BuildOptions(backend="trt", settings=settings, random_weights=0, **how)
    return prepare(cut(spec, layers) if layers else spec, options, dry=True)


def numbers(row: str) -> dict[str, dict[str, list[int]]]:
    """What compiled.yaml keeps of each network."""
    p, found = planned(row), {}
    for name, g in networks(p.packing.program).items():
        made = compile_once(real(), g, p.config.limits, p.config.settings, TARGETS["sm120"])
        kept: dict[str, list[int]] = {}
        for profile, m in made.profiles.items():
            kind = "step" if phase_of(profile) in SINGLE else "chunk"
            now = [m.kernels, m.copied_bytes, m.scratch_bytes >> 10]
            kept[kind] = [*map(max, now, kept.get(kind, now))]
        found[name] = {**kept, "plan": [made.plan_bytes >> 10]}
    return found


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(f"{each}:", flush=True)
        for network, kept in numbers(each).items():
            print(
                f"  {network}: {yaml.safe_dump(kept, default_flow_style=True).strip()}", flush=True
            )
