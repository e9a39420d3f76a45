"""Runs a short text through a float16 engine's graphs before they are compiled.

Weights that fit float16 can make values that do not: the residual stream of trained models may
exceed 65504, and what follows is NaN.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from g4ir.backends.base import Prepared, Tensors, Watch
from g4ir.backends.reference import ReferenceRuntime, text_graphs
from g4ir.errors import WeightsError
from g4ir.ir.names import layer_of
from g4ir.ops.finite import TOO_LARGE, advice
from g4ir.ops.narrow import comparable
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.drafter import WithDrafter
from g4ir.weights.pack import ParamSource, open_table

from .engine import TOKENIZER, Engine, read_tokenizer

TEXT = (
    "The quick brown fox jumps over the lazy dog. def area(r): return 3.14159 * r ** 2\n"
    "Die Donau fließt nach Osten; 2024 年に東京で。 <b>Total:</b> $1,299.00"
)
MOST_TOKENS = 48
MOST = 65504.0
#: a peak above this share of MOST is reported
NEAR = 0.5

log = logging.getLogger(__name__)


def why_untried(p: Prepared) -> str | None:
    """Return why no text can be tried on a float16 build; None if one can, or for other dtypes."""
    if p.dtype != "f16":
        return None
    source = p.source.model if isinstance(p.source, WithDrafter) else p.source
    if not isinstance(source, Checkpoint):
        return "the weights are random"
    if p.ranks > 1:
        return "several ranks share the model"
    return None if TOKENIZER in p.side_files else "the checkpoint has no tokenizer.json"


def try_float16(p: Prepared, folder: Path, params: ParamSource) -> None:
    """Interpret the text graphs on a few dozen tokens of text. WeightsError names the first value
    that is NaN or infinite; a peak near the end of the range is logged as a warning."""
    runtime = _Trial(text_graphs(p.packing.program), p.limits, "cpu", params)
    program = runtime.program
    facts = {"backend": p.backend.name, "ranks": 1, "ep": False, "options": p.options}
    tables = {v.name: open_table(params, v, "mmap", "cpu") for v in program.graphs["embed"].params}
    fixed = (p.spec, p.limits, p.all_logits, "cpu", p.dtype)
    engine = Engine(folder, facts, *fixed, program, runtime, tables)
    engine.session().prefill(_tokens(p))
    name, peak = runtime.peak
    if peak > NEAR * MOST:
        log.warning(
            "float16: %%%s reaches %.0f on a text of %d tokens, and %s; other texts may exceed it: "
            "--dtype bfloat16 has the range of float32",
            *(name, peak, MOST_TOKENS, TOO_LARGE),
        )


def _tokens(p: Prepared) -> Any:
    import torch

    tokenizer = read_tokenizer(Path(TOKENIZER), p.side_files[TOKENIZER])
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    bos = [] if p.spec.tokens.bos is None else [p.spec.tokens.bos]
    known = [i for i in (*bos, *ids) if i < p.spec.text.readable_ids]
    return torch.tensor([known[: min(MOST_TOKENS, p.limits.max_seq)]])


class _Trial(ReferenceRuntime):
    """An interpreter that refuses a value out of range and keeps the largest."""

    peak = ("", 0.0)

    def run(
        self,
        phase: str,
        feeds: dict[str, Any],
        state: Any,
        context: int,
        logits: bool,
        watch: Watch | None = None,
    ) -> Tensors | None:
        return super().run(phase, feeds, state, context, logits, self._look)

    def _look(self, name: str, value: Any) -> None:
        if not value.is_floating_point():
            return
        largest = float(comparable(value).abs().max())
        if not largest <= MOST:
            layer = layer_of(name)
            where = "outside the layers" if layer is None else f"layer {layer}"
            raise WeightsError(
                f"float16, tried on a text of {MOST_TOKENS} tokens: %{name} ({where}): NaN or "
                f"infinite; {advice('f16')}"
            )
        self.peak = max(self.peak, (name, largest), key=lambda x: x[1])
