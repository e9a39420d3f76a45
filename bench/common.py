"""What the benchmark scripts share beyond g4ir.bench: their results folder, and a stopwatch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from g4ir.bench.measure import interleave
from g4ir.bench.peers import hf_model
from g4ir.bench.stats import median
from g4ir.spec.record import Spec
from g4ir.weights.random import RandomCheckpoint

RESULTS = Path(__file__).resolve().parent / "results"


def seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def medians(rounds: int, **runs: Callable[[], float]) -> dict[str, float]:
    """A-B-A-B: each round calls every run once; a run returns its own seconds."""
    _, times = interleave(rounds, lambda: None, runs)
    return {name: median(values) for name, values in times.items()}


def random_model(spec: Spec, seed: int, dtype: torch.dtype) -> Any:
    """The transformers text model with the same random weights as `--random-weights SEED`."""
    return hf_model(spec, RandomCheckpoint(spec, seed, dtype), dtype)


def save(name: str, report: dict[str, Any]) -> Path:
    """Write a report to bench/results and say where."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path.relative_to(RESULTS.parents[1])}")
    return path
