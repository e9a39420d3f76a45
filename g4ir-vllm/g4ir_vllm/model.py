"""The model that vLLM's registry wants to see. It is never called: the engine computes."""

from __future__ import annotations

from typing import Any

import torch


class EngineModel(torch.nn.Module):
    """A model of texts, without media, adapters, drafts or pooling."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Refuse."""
        raise NotImplementedError("the engine computes, not this module")

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Refuse."""
        raise NotImplementedError("the engine computes, not this module")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Refuse."""
        raise NotImplementedError("the engine computes, not this module")
