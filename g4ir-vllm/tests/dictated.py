"""vLLM logits processor that forces the tokens that a test dictates."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

#: environment variable with the path of the script, a JSON list of token ids
VARIABLE = "G4IR_TEST_SCRIPT"


class Dictated(LogitsProcessor):
    """Forces each request to generate the script that was in the file when it was added to the
    batch; after the script it samples freely."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[list[int], Sequence[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        script = json.loads(Path(os.environ[VARIABLE]).read_text())

        def added(params: Any, prompt: Any, output: list[int]) -> Any:
            return (script, output) if script else None

        process_dict_updates(self.rows, batch_update, added)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (script, output) in self.rows.items():
            if len(output) < len(script):
                kept = logits[row, script[len(output)]].clone()
                logits[row] = float("-inf")
                logits[row, script[len(output)]] = kept
        return logits
