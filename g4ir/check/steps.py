"""The runs that `verify --each-pass` compares: one step is one run of a graph.

Text is given as chunks, one longer than the window after a shorter one, then single steps; also as
draft tokens, some of them wrong, and with blocks as media have, where the engine has those graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from g4ir.engine.engine import Engine
from g4ir.model.decoder import BLOCKS, HIDDEN, VERIFY
from g4ir.model.draft import DRAFT
from g4ir.ops.types import Type, torch_dtype

from .media import Item

#: single steps at the end of the tokens
STEPS = 4
#: invalid tokens at the end of each longer chunk: a pass must not take them for the last
PADDING = 2


@dataclass(frozen=True, eq=False)
class GraphStep:
    """One run of graph `phase`, after `at` tokens. end: tokens in the KV cache afterwards; padded:
    the dim, a name or of axis 1 a size, of which the first `valid` entries are no padding."""

    phase: str
    at: int
    end: int
    inputs: Mapping[str, torch.Tensor]
    valid: int = 1
    padded: str | int | None = None

    def feeds(self, device: str) -> dict[str, torch.Tensor]:
        """Return the inputs on a device; token ids stay on the host, with the embedding tables."""
        return {k: t if k == "tokens" else t.to(device) for k, t in self.inputs.items()}

    def without_padding(self, t: torch.Tensor, of: Type) -> torch.Tensor:
        if isinstance(self.padded, int):
            padded = of.rank > 1 and of.shape[1] == self.padded
            return t[:, : self.valid] if padded else t
        if self.padded not in of.shape:
            return t
        return t.narrow(of.shape.index(self.padded), 0, self.valid)


#: steps over the same KV cache
Series = Sequence[GraphStep]


def text_step(
    at: int,
    tokens: torch.Tensor,
    valid: int,
    block_ids: torch.Tensor | None = None,
    verify: bool = False,
) -> GraphStep:
    """Make the step of tokens i64[1, S], the first `valid` of them no padding; `block_ids`, i64[1,
    S]: blocks that attend to each other both ways; `verify`: as draft tokens."""
    count = tokens.shape[1]
    inputs = {
        "tokens": tokens,
        "positions": at + torch.arange(count)[None],
        "lengths": torch.tensor([valid]),
    }
    phase = VERIFY if verify else "decode" if count == 1 else "prefill"
    if block_ids is not None:
        inputs["block_ids"], phase = block_ids, BLOCKS
    return GraphStep(phase, at, at + valid, inputs, valid, "M" if verify else "S")


def series_of(
    engine: Engine, chunks: Sequence[GraphStep], items: Sequence[Item]
) -> Iterator[Series]:
    """Yield the text with a step of the draft model, then as the engine has them the text in
    verification steps, with blocks, and each tower."""
    drafted = [_draft_step(engine, chunks[-1].end)] if engine.drafter else []
    yield [*chunks, *drafted]
    if VERIFY in engine.program.graphs:
        yield [*rounds_of(chunks, engine.draft_tokens + 1, engine.limits.max_seq)]
    if BLOCKS in engine.program.graphs and (blocked := [*_blocked(chunks)]):
        yield blocked
    for item in items:
        yield [GraphStep(item.tower, 0, 1, item.feeds, item.rows, item.size)]


def _draft_step(engine: Engine, at: int) -> GraphStep:
    """Make a step of the draft model after `at` tokens, on a random embedding and state."""
    shape = (2, 1, 1, engine.spec.text.hidden_size)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(at))
    embeds, hidden = rows.to(torch_dtype(engine.dtype))
    position = torch.tensor([[at]])
    inputs = {"positions": position, "last": position - 1, "written": position[0]}
    return GraphStep(DRAFT, at, at, {**inputs, "embeds": embeds, HIDDEN: hidden})


def rounds_of(chunks: Sequence[GraphStep], width: int, room: int) -> Iterator[GraphStep]:
    """Yield the chunks before the single steps at the end, then these in two verification steps of
    up to `width` tokens, which end with wrong ones; the second has padding too."""
    begun = max((i for i, c in enumerate(chunks, 1) if c.phase != "decode"), default=0)
    yield from chunks[:begun]
    right = torch.cat([c.inputs["tokens"] for c in chunks[begun:]], 1)
    half = min(width, right.shape[1] + 1) // 2
    wrong = right.flip(1).repeat(1, width)
    for first, padding in ((0, 0), (half, 1)):
        at = chunks[begun].at + first
        given = torch.cat((right[:, first : first + half], wrong), 1)[:, : min(width, room - at)]
        yield text_step(at, given, max(1, given.shape[1] - padding), verify=True)


def _blocked(chunks: Sequence[GraphStep]) -> Iterator[GraphStep]:
    """Yield the longer chunks, each with a block of all but its first token."""
    at = 0
    for c in chunks:
        if c.phase == "prefill":
            ids = torch.full_like(c.inputs["tokens"], -1)
            ids[:, 1 : c.valid] = at + 1
            yield text_step(at, c.inputs["tokens"], c.valid, block_ids=ids)
            at += c.valid


def chunks_of_tokens(ids: torch.Tensor, window: int, limit: int) -> Iterator[GraphStep]:
    """Yield a chunk, one a little longer than the window, a short one, single steps; each cut where
    an engine would cut it."""
    padding = PADDING if limit > 2 * PADDING else 0
    at = 0
    for size in _turns(len(ids), window):
        for start in range(0, size, limit - padding):
            valid = min(limit - padding, size - start)
            tokens = ids[None, at : at + valid]
            if size > 1:
                tokens = torch.nn.functional.pad(tokens, (0, padding))
            yield text_step(at, tokens, valid)
            at += valid


def _turns(count: int, window: int) -> list[int]:
    steps = min(STEPS, count // 3)
    rest = count - steps
    short = min(3, rest // 4)
    long = min(window + 1, max(rest - short - 1, 0))
    return [n for n in (rest - short - long, long, short, *[1] * steps) if n]
