"""Config of a prepared folder (config.json), the placeholder model of vLLM's registry, and the
settings of `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

MODEL_TYPE = "g4ir"
ARCHITECTURE = "G4irEngine"


class EngineConfig(PretrainedConfig):
    """The config.json of a prepared folder.

    `engine`: path of the engine directory, relative to the prepared folder. `max_batch`,
    `prefill_chunk`: limits of the engine. `media_ids`: ids of media placeholders, which are refused
    in prompts.
    """

    model_type = MODEL_TYPE

    def __init__(
        self,
        engine: str = "",
        max_batch: int = 1,
        prefill_chunk: int = 1,
        media_ids: tuple[int, ...] = (),
        **others: Any,
    ) -> None:
        self.engine, self.max_batch, self.prefill_chunk = engine, max_batch, prefill_chunk
        self.media_ids = list(media_ids)
        super().__init__(**others)


class EngineModel(torch.nn.Module):
    """Placeholder that vLLM's registry requires: its interface declares a text model without media,
    LoRA, draft tokens or pooling. It is never called; the engine computes."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("the engine computes, not this module")

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        raise NotImplementedError("the engine computes, not this module")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        raise NotImplementedError("the engine computes, not this module")


def engine_folder(model: str, config: EngineConfig) -> Path:
    """Return the engine directory of a prepared folder."""
    return (Path(model) / config.engine).resolve()


@dataclass(frozen=True)
class Options:
    """Settings of `--additional-config`. `prefix_bytes`: maximum bytes of the prefix cache (None:
    the engine's default); `patience`: steps in which a smaller batch bucket suffices before the
    batch shrinks; `trust`: whether to run native code that this user did not build on this machine
    (`g4ir run --trust`)."""

    prefix_bytes: int | None = None
    patience: int = 16
    trust: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Return the settings, validated; ValueError names the key."""
        types = {f.name: bool if f.default is False else int for f in fields(cls)}
        for name, value in given.items():
            if name not in types:
                known = ", ".join(types)
                raise ValueError(f"--additional-config: {name!r}: expected one of {known}")
            if type(value) is not types[name] or value < 0:
                expected = "true or false" if types[name] is bool else "an integer of at least 0"
                what = f"expected {expected}, found {value!r}"
                raise ValueError(f"--additional-config: {name}: {what}")
        return cls(**given)
