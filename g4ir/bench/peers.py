"""transformers as a peer: the same weights, process and threads, last logits only."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from g4ir.backends.torch_compile.compile import toolchain
from g4ir.check.hf import cache_argument, hf_model, rows_kept
from g4ir.check.peers import known_checkpoint, need_transformers
from g4ir.engine.engine import Engine
from g4ir.engine.load import open_weights
from g4ir.engine.prepare import agreed_spec
from g4ir.errors import InputError, check_all
from g4ir.ops.types import torch_dtype
from g4ir.weights.checkpoint import WeightSource
from g4ir.weights.origin import existing_origin
from g4ir.weights.random import RandomCheckpoint


@dataclass(frozen=True)
class Mode:
    """How transformers runs."""

    label: str
    static: bool
    compiled: bool


MODES = {
    "hf": Mode("eager, growing cache", static=False, compiled=False),
    "hf-static": Mode("eager, static cache", static=True, compiled=False),
    "hf-compile": Mode("decode compiled, static cache", static=True, compiled=True),
}


class HfRunner:
    """A transformers model in one mode. A static cache has room for `max_len` tokens a row and no
    more, since its cost follows its size."""

    def __init__(self, model: Any, max_len: int, mode: str) -> None:
        import transformers

        self.role, self.mode, self.model, self.max_len = mode, MODES[mode], model, max_len
        self.label = f"transformers {transformers.__version__} {self.mode.label}"
        self.single = model.forward
        if self.mode.compiled:
            # As transformers' generate does: single tokens compiled, with CUDA graphs where there
            # are any, and prompts eager, since every length would be compiled anew.
            self.single = torch.compile(model.forward, mode="reduce-overhead")
        self.argument, self.kept = cache_argument(model.forward), rows_kept(model)
        self.cache = self._new_cache()
        self._kept: Any = None
        self._length = self._depth = 0

    def _new_cache(self) -> Any:
        from transformers import DynamicCache, StaticCache

        if self.mode.static:
            return StaticCache(config=self.model.config, max_cache_len=self.max_len)
        return DynamicCache(config=self.model.config)

    def hold(self, tokens: torch.Tensor) -> None:
        self._kept, self._depth = None, 0
        self.rewind()
        if tokens.shape[1]:
            self.step(tokens)
            self._depth = tokens.shape[1]
            self._kept = self._copied()

    def rewind(self) -> None:
        self._length = self._depth
        if not self.mode.static:
            self.cache = self._new_cache() if self._kept is None else copy.deepcopy(self._kept)
        elif self._kept is None:
            self.cache.reset()
        else:
            for layer, kept in zip(self.cache.layers, self._kept, strict=True):
                _put_back(layer, kept)

    def _copied(self) -> Any:
        """Copy the cache, of a static one its contents: compiled code is bound to its tensors."""
        if not self.mode.static:
            return copy.deepcopy(self.cache)
        return [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in vars(layer).items()}
            for layer in self.cache.layers
        ]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        device = self.model.device
        n = tokens.shape[1]
        position = torch.arange(self._length, self._length + n, device=device)
        with torch.no_grad():
            out = (self.single if n == 1 else self.model.forward)(
                input_ids=tokens.to(device),
                use_cache=True,
                position_ids=position[None].expand(len(tokens), -1),
                **{self.argument: self.cache, "logits_to_keep": self.kept},
            )
        self._length += n
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def _put_back(layer: Any, kept: dict[str, Any]) -> None:
    for name, value in kept.items():
        if isinstance(value, torch.Tensor):
            getattr(layer, name).copy_(value)
        else:
            setattr(layer, name, value)


def check_peers(names: Sequence[str]) -> None:
    """Raise InputError for an unknown peer, MissingError for one that is not installed."""
    for name in names:
        if name not in MODES:
            raise InputError(f"--peer {name!r}: expected one of {', '.join(MODES)}")
    if names:
        need_transformers(f"--peer {names[0]}")


def check_compiler(names: Sequence[str], device: str) -> None:
    """Raise MissingError where a peer is to be compiled and cannot be."""
    if any(MODES[name].compiled for name in names):
        check_all(*toolchain(device))


def peer_model(engine: Engine, checkpoint: str | Path | None = None) -> Any:
    """Return the transformers text model on an engine's weights, in its dtype and on its device."""
    seed = engine.facts.seed
    dtype = torch_dtype(engine.dtype)
    source: WeightSource
    if seed is not None and checkpoint is None:
        source = RandomCheckpoint(engine.spec, seed, dtype, engine.device)
    else:
        origin = existing_origin(known_checkpoint(engine, checkpoint, "bench --peer"))
        agreed_spec(engine.spec, origin)
        source = open_weights(engine, origin, ())
    try:
        return hf_model(engine.spec, source, dtype, engine.device)
    finally:
        source.close()
