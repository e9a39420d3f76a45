"""llama.cpp as a baseline: llama-cpp-python on an engine's GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from g4ir.engine.engine import Engine
from g4ir.errors import InputError, MissingError
from g4ir.weights.origin import GgufFile

from .hf import hf_origin

LLAMA = "llama.cpp"
#: GGML's log level of errors
ERROR = 4


@cache
def binding() -> tuple[Any, list[str], Any]:
    """Return llama-cpp-python's module, the list to which llama.cpp's error messages are appended,
    and the log callback, which has to stay alive. MissingError if the module cannot be imported."""
    try:
        import llama_cpp as api
    except (ImportError, OSError, RuntimeError) as e:
        raise MissingError(
            f"--peer {LLAMA} needs llama-cpp-python: `pip install llama-cpp-python` ({e})"
        ) from e
    errors: list[str] = []

    @api.llama_log_callback
    def log(level: int, line: bytes, _: Any) -> None:
        if level == ERROR:
            errors.append(line.decode(errors="replace").strip())

    api.llama_log_set(log, None)
    api.llama_backend_init()
    return api, errors, log


def gguf_file(engine: Engine, checkpoint: str | Path | None) -> Path:
    """Return `checkpoint`, or the file that an engine was built from; InputError if that is no GGUF
    file."""
    origin = hf_origin(engine, checkpoint, f"bench --peer {LLAMA}")
    if isinstance(origin, GgufFile):
        return origin.path
    problem = f"{origin.path} is" if origin else f"{engine.label} has random weights,"
    fix = "bench one as MODEL, or give --checkpoint FILE"
    raise InputError(f"--peer {LLAMA}: {problem} no GGUF file; {fix}")


class LlamaSession:
    """A GGUF file in llama.cpp with its defaults (KV cache in float16; on a CPU, activations are
    quantised to 8 bits before quantised weights) and as many threads as torch has. `max_len`: max
    tokens of each of `batch` sequences.

    It computes on a separate thread: llama.cpp configures a thread's AMX tiles once, and torch
    would reset them."""

    def __init__(self, file: Path, batch: int, max_len: int, device: str = "cpu") -> None:
        api, errors, _ = binding()
        self.label = f"llama-cpp-python {api.__version__} ({file.name})"
        if device != "cpu" and not api.llama_supports_gpu_offload():
            fix = "install one that was built for CUDA"
            raise MissingError(f"--peer {LLAMA}: this llama-cpp-python runs on CPUs alone; {fix}")
        config, params = api.llama_model_default_params(), api.llama_context_default_params()
        config.n_gpu_layers = 0 if device == "cpu" else 999
        params.n_seq_max, params.kv_unified = batch, False
        params.n_ctx = params.n_batch = max_len * batch
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        self._api, self._thread = api, ThreadPoolExecutor(1)
        model = self._call(api.llama_model_load_from_file, str(file).encode(), config)
        self._context = model and self._call(api.llama_init_from_model, model, params)
        if not self._context:
            reason = errors[-1] if errors else "no reason given"
            raise InputError(f"--peer {LLAMA}: cannot load {file}: {reason}")
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._batch = api.llama_batch_init(params.n_batch, 0, 1)
        self.reset()

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._thread.submit(function, *args).result()

    def reset(self) -> None:
        """Empty the KV cache."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._length = 0

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens i64[B, n]; return the logits [B, vocab] after the last one."""
        return self.prefill(tokens)[:, -1]

    def prefill(self, tokens: torch.Tensor, *, all_logits: bool = False) -> torch.Tensor:
        """Append tokens i64[B, n]; return logits [B, n, vocab] of all tokens, or [B, 1, vocab] of
        the last."""
        b, (rows, count) = self._batch, tokens.shape
        b.n_tokens = rows * count
        for at, token in enumerate(tokens.flatten().tolist()):
            row, i = divmod(at, count)
            b.token[at], b.pos[at], b.n_seq_id[at] = token, self._length + i, 1
            b.seq_id[at][0], b.logits[at] = row, all_logits or i == count - 1
        if code := self._call(self._api.llama_decode, self._context, b):
            problem = f"llama_decode of {rows} x {count} tokens failed with code {code}"
            raise InputError(f"--peer {LLAMA}: {problem}")
        self._length += count
        ends = range(0 if all_logits else count - 1, rows * count, 1 if all_logits else count)
        pointers = (self._api.llama_get_logits_ith(self._context, at) for at in ends)
        logits = [np.ctypeslib.as_array(p, shape=(self._vocab,)) for p in pointers]
        return torch.from_numpy(np.stack(logits)).view(rows, -1, self._vocab)
