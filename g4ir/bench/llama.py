"""llama.cpp as a baseline: its Python binding on the GGUF file of an engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from g4ir.check.hf import hf_origin
from g4ir.engine.engine import Engine
from g4ir.errors import InputError, MissingError
from g4ir.ir.distance import Tolerance
from g4ir.weights.origin import GgufFile

from .runners import BenchRunner

LLAMA = "llama.cpp"
#: of GGML's levels of log lines
ERROR = 4


@cache
def binding() -> tuple[Any, list[str], Any]:
    """Return the binding, its errors, which are no longer printed, and what collects them.
    MissingError if it is not installed."""
    try:
        import llama_cpp as api
    except (ImportError, OSError, RuntimeError) as e:
        raise MissingError(
            f"--peer {LLAMA} needs llama-cpp-python: `pip install llama-cpp-python` ({e})"
        ) from e
    said: list[str] = []

    @api.llama_log_callback
    def hear(level: int, line: bytes, _: Any) -> None:
        if level == ERROR:
            said.append(line.decode(errors="replace").strip())

    api.llama_log_set(hear, None)
    api.llama_backend_init()
    return api, said, hear


def gguf_file(engine: Engine, checkpoint: str | Path | None) -> Path:
    """Return the GGUF file that llama.cpp reads; InputError if an engine is of none."""
    origin = hf_origin(engine, checkpoint, f"bench --peer {LLAMA}")
    if isinstance(origin, GgufFile):
        return origin.path
    what = origin.path if origin else f"{engine.path} has random weights, which"
    raise InputError(
        f"--peer {LLAMA}: {what} is no GGUF file; bench one as MODEL, or give --checkpoint FILE"
    )


class LlamaRunner(BenchRunner):
    """A GGUF file in llama.cpp with its defaults: KV cache in float16, rows of products rounded to
    8 bits; as many threads as torch has. `most`: tokens that each of `batch` sequences may hold.

    It computes on a thread of its own, as it sets a thread's AMX tiles once, and products of
    torch's reset them."""

    role = LLAMA
    #: enough to tell that model and tokens are the same: rows of Gemma 3 270M in Q4_K_M are at
    #: least 0.9923 of transformers' in bf16
    tolerance = Tolerance(cosine=0.98)

    def __init__(self, file: Path, batch: int, most: int, device: str = "cpu") -> None:
        self._api, said, _ = binding()
        api, self.label = self._api, f"llama-cpp-python {self._api.__version__} ({file.name})"
        if device != "cpu" and not api.llama_supports_gpu_offload():
            fix = "install one that was built for CUDA"
            raise MissingError(f"--peer {LLAMA}: this llama-cpp-python runs on CPUs alone; {fix}")
        how, given = api.llama_model_default_params(), api.llama_context_default_params()
        how.n_gpu_layers = 0 if device == "cpu" else 999
        given.n_ctx, given.n_seq_max, given.kv_unified = most * batch, batch, False
        given.n_batch = most * batch
        given.n_threads = given.n_threads_batch = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1)
        model = self._call(api.llama_model_load_from_file, str(file).encode(), how)
        self._context = model and self._call(api.llama_init_from_model, model, given)
        if not self._context:
            why = said[-1] if said else "no reason given"
            raise InputError(f"--peer {LLAMA}: it cannot load {file}: {why}")
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._batch = api.llama_batch_init(given.n_batch, 0, 1)
        self._length = 0

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._thread.submit(function, *args).result()

    def hold(self, tokens: torch.Tensor) -> None:
        super().hold(tokens)
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._length = 0
        if tokens.shape[1]:
            self.step(tokens)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        b, (rows, count) = self._batch, tokens.shape
        b.n_tokens = rows * count
        for at, token in enumerate(tokens.flatten().tolist()):
            row, place = divmod(at, count)
            b.token[at], b.pos[at], b.n_seq_id[at] = token, self._length + place, 1
            b.seq_id[at][0], b.logits[at] = row, place == count - 1
        if code := self._call(self._api.llama_decode, self._context, b):
            raise InputError(f"--peer {LLAMA}: llama_decode of {rows} x {count} tokens: {code}")
        self._length += count
        ends = range(count - 1, rows * count, count)
        found = (self._api.llama_get_logits_ith(self._context, at) for at in ends)
        logits = [np.ctypeslib.as_array(p, shape=(self._vocab,)) for p in found]
        return torch.from_numpy(np.stack(logits))
