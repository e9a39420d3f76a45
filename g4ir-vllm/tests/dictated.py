"""A processor of logits, by vLLM's own hook for them: the words that a test dictates."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

#: names the file in which the script lies, a JSON list of token ids
VARIABLE = "G4IR_TEST_SCRIPT"


class Dictated(LogitsProcessor):
    """Allows a request the tokens of the script that lay there when it came, one by one."""

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
