"""The requests that every runner is asked: the same tokens, whatever anybody would have chosen.

A request is a prompt of `input_len` tokens on rows that hold `context` tokens already, then
`output_len - 1` single steps: `output_len` choices of a token. The tokens of the single steps are
given too, so that end-of-sequence ends nothing, all runners do the same work, and a stream cannot
loop. They are drawn from a seed, or taken from a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch

from g4ir.chat.prompt import text_ids
from g4ir.check.tokens import check_no_media, random_ids
from g4ir.errors import InputError
from g4ir.plan.engine_limits import Limits
from g4ir.spec.reader import Range

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine

DEFAULT_INPUT, DEFAULT_OUTPUT = 512, 64


@dataclass(frozen=True)
class Workload:
    """input_len, output_len: tokens of a prompt, and choices per row, exactly; batch: rows;
    context: tokens held before the prompt; seed: of the tokens; text: the file they come from."""

    input_len: Annotated[int, Range(1)]
    output_len: Annotated[int, Range(2)]
    batch: Annotated[int, Range(1)] = 1
    context: Annotated[int, Range(0)] = 0
    seed: Annotated[int, Range(0)] = 0
    text: str | None = None

    @property
    def fed(self) -> int:
        """Tokens that a row holds after a request."""
        return self.context + self.input_len + self.output_len - 1


def plan_workload(
    limits: Sequence[Limits],
    input_len: int | None = None,
    output_len: int | None = None,
    batch: int = 1,
    context: int = 0,
    seed: int = 0,
    text: str | None = None,
) -> Workload:
    """Return a workload within every engine's limits; lengths left open become 512 and 64, or what
    fits. InputError names the size that is out of range and the limit."""
    room, rows = min(x.max_seq for x in limits), min(x.max_batch for x in limits)
    for flag, size, least, most, limit in (
        ("--context", context, 0, room - 2, f"--max-seq {room}"),
        ("--batch", batch, 1, rows, f"--max-batch {rows}"),
        ("--input-len", input_len, 1, room, f"--max-seq {room}"),
        ("--output-len", output_len, 2, room, f"--max-seq {room}"),
        ("--seed", seed, 0, 2**63 - 1, "63 bits"),
    ):
        if size is not None and not least <= size <= most:
            raise InputError(f"bench: {flag} {size}: expected {least} to {most} ({limit})")
    free = room - context
    outputs = output_len or max(2, min(DEFAULT_OUTPUT, free // 4, free - (input_len or 1) + 1))
    inputs = input_len or max(1, min(DEFAULT_INPUT, free - outputs + 1))
    w = Workload(inputs, outputs, batch, context, seed, text)
    if w.fed > room:
        raise InputError(
            f"bench: --context {context}, --input-len {inputs} and --output-len {outputs} are "
            f"{w.fed} tokens a row; the engine was built with --max-seq {room}"
        )
    return w


def draw_tokens(w: Workload, engine: Engine) -> torch.Tensor:
    """Return i64[batch, fed]: the context, the prompt, then the token of each single step."""
    if w.text is None:
        return random_ids(engine, (w.batch, w.fed), w.seed)
    try:
        ids = text_ids(engine.tokenizer(), [Path(w.text).read_text(encoding="utf-8")])[0]
    except UnicodeDecodeError as e:
        raise InputError(f"bench: --text {w.text}: not UTF-8 text: {e}") from e
    wanted = w.batch * w.fed
    if len(ids) < wanted:
        raise InputError(f"bench: --text {w.text}: {len(ids)} tokens; {wanted} are needed")
    check_no_media(engine, ids[:wanted], f"bench: --text {w.text}")
    return torch.tensor(ids[:wanted]).view(w.batch, w.fed)
