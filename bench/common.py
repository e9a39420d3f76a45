"""What the benchmark scripts share: environment, floors, interleaved timing, the peer."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import g4ir
from g4ir.random_weights import RandomCheckpoint
from g4ir.spec import Spec

RESULTS = Path(__file__).resolve().parent / "results"


def environment() -> dict[str, Any]:
    """Machine and versions, as kept beside the numbers."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [x.partition(":")[2].strip() for x in info.splitlines() if x.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "g4ir": g4ir.__version__,
        "commit": commit.stdout.strip() or "uncommitted",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def read_floor(gib: float = 1.0) -> float:
    """GB/s of a plain read (a sum over fp32), the best of five."""
    x = torch.ones(int(gib * 2**30) // 4)
    return x.nbytes / 1e9 / min(seconds(x.sum) for _ in range(5))


def seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def interleave(rounds: int, **runs: Callable[[], float]) -> dict[str, list[float]]:
    """A-B-A-B: each round calls every run once; a run returns its own seconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return times


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def hf_model(spec: Spec, seed: int, dtype: torch.dtype) -> Any:
    """The transformers text model with the same random weights as `--random-weights SEED`."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = spec.to_hf()
    config = Gemma4TextConfig(**config.get("text_config", config))
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = Gemma4ForCausalLM(config)
    model = model.to(dtype).to_empty(device="cpu").eval()
    source = RandomCheckpoint(spec, seed, dtype)
    with torch.no_grad():
        for name, t in model.model.state_dict().items():
            t.copy_(source.tensor(name))
        _restore_buffers(model, config)
    model.tie_weights()
    return model


def _restore_buffers(model: Any, config: Any) -> None:
    """Constants that are no checkpoint tensors: rope frequencies and embedding scales."""
    from transformers.models.gemma4 import modeling_gemma4 as m

    model.model.rotary_emb = m.Gemma4TextRotaryEmbedding(config)
    for module in model.modules():
        if isinstance(module, m.Gemma4TextScaledWordEmbedding):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)


class Peer:
    """transformers in one of its modes, last logits only: `eager` and `compile` with a static
    cache, `dynamic` eager with a cache that grows."""

    def __init__(self, model: Any, max_seq: int, mode: str) -> None:
        from transformers import DynamicCache, StaticCache

        self.new_cache = lambda: (
            DynamicCache(config=model.config) if mode == "dynamic"
            else StaticCache(config=model.config, max_cache_len=max_seq)
        )  # fmt: skip
        self.forward = torch.compile(model.forward) if mode == "compile" else model.forward
        self.cache = self.new_cache()
        self.length = 0

    def prefill(self, tokens: torch.Tensor) -> torch.Tensor:
        self.cache, self.length = self.new_cache(), 0
        return self.step(tokens)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1]
        position = torch.arange(self.length, self.length + n)
        with torch.no_grad():
            out = self.forward(
                input_ids=tokens, past_key_values=self.cache, use_cache=True,
                position_ids=position[None], logits_to_keep=1,
            )  # fmt: skip
        self.length += n
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def save(name: str, report: dict[str, Any]) -> Path:
    """Write a report to bench/results and say where."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path.relative_to(RESULTS.parents[1])}")
    return path
