"""A `llama_cpp` whose model is the interpreter: the calls of check/llama.py, checked."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from g4ir.engine.engine import Engine


class LlamaDouble:
    """The binding, whose logits are those of an engine's session; `off`: what they are away."""

    __version__ = "0.0"
    llama_log_callback = staticmethod(lambda f: f)
    llama_supports_gpu_offload = staticmethod(lambda: False)
    llama_model_default_params = llama_context_default_params = SimpleNamespace
    llama_get_model = llama_model_get_vocab = llama_get_memory = staticmethod(lambda x: x)

    def __init__(self, engine: Engine, off: float = 0.0) -> None:
        self.engine, self.off, self.said = engine, off, lambda *_: None
        self.rows: dict[int, list[int]] = defaultdict(list)
        self.threads = set[int]()

    def llama_backend_init(self) -> None:
        pass

    def llama_log_set(self, hear: Any, _: None) -> None:
        self.said = hear

    def llama_model_load_from_file(self, file: bytes, how: Any) -> Any:
        assert how.n_gpu_layers == 0
        if open(file, "rb").read(4) != b"GGUF":  # noqa: SIM115
            self.said(4, b"not GGUF\n", None)
            return None
        return self

    def llama_init_from_model(self, model: Any, given: Any) -> Any:
        self.room, self.most = given.n_ctx // given.n_seq_max, given.n_batch
        return self

    def llama_vocab_n_tokens(self, vocab: Any) -> int:
        return self.engine.spec.text.vocab_size

    def llama_batch_init(self, count: int, embd: int, ids: int) -> Any:
        fields = ("token", "pos", "n_seq_id", "logits")
        lists: dict[str, Any] = {name: [0] * count for name in fields}
        return SimpleNamespace(**lists, seq_id=[[0] for _ in range(count)], n_tokens=0)

    def llama_memory_clear(self, memory: Any, data: bool) -> None:
        self.rows.clear()

    def llama_decode(self, context: Any, b: Any) -> int:
        self.threads.add(threading.get_ident())
        assert b.n_tokens <= self.most
        for i in range(b.n_tokens):
            row = self.rows[b.seq_id[i][0]]
            assert b.n_seq_id[i] == 1 and b.pos[i] == len(row) < self.room
            row.append(b.token[i])
        self.ends = [i for i in range(b.n_tokens) if b.logits[i]]
        rows = [self.rows[i] for i in dict.fromkeys(b.seq_id[i][0] for i in self.ends)]
        every, ids = len(rows) < len(self.ends), torch.tensor(rows)
        logits = self.engine.session(len(rows)).prefill(ids, all_logits=every).float()
        logits = logits[0, -len(self.ends) :] if every else logits
        self.logits = (logits + self.off).contiguous()
        return 0

    def llama_get_logits_ith(self, context: Any, at: int) -> Any:
        row = self.logits[self.ends.index(at)]
        return ctypes.cast(row.data_ptr(), ctypes.POINTER(ctypes.c_float))
