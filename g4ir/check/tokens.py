"""Tokens on which two engines are compared, and their division into prefills and decode steps
(turns)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from g4ir.engine.engine import Engine
from g4ir.engine.prompts import checked_ids
from g4ir.errors import InputError
from g4ir.model.media import placeholders

SEED = 0
#: number of one-token decode steps at the end of the tokens (at most a third of them)
STEPS = 24
#: max total logits for a comparison at every position; beyond it only the logits at the end of each
#: turn are compared
EVERY_LOGITS = 1 << 28


def chosen_tokens(engine: Engine, tokens: Sequence[int] | None, count: int) -> torch.Tensor:
    """Return the tokens as i64[T]; for None `count` random ones of a fixed seed. InputError for
    invalid ids, placeholders of media, fewer than 2 tokens or more than max_seq."""
    if tokens is None:
        return random_ids(engine, (count,))
    limit = engine.limits.max_seq
    ids = checked_ids(list(tokens), engine.spec.text.readable_ids, "verify")
    if not 2 <= len(ids) <= limit:
        raise InputError(f"verify: {len(ids)} tokens; expected 2 to {limit} (--max-seq)")
    check_no_media(engine, ids, "verify: --tokens")
    return torch.tensor(ids)


def check_no_media(engine: Engine, ids: Sequence[int], source: str) -> None:
    """Raise InputError for the first id that is the placeholder of a medium that the engine
    takes."""
    kinds = {i: kind for kind, i in placeholders(engine.spec.tokens, engine.media.kinds).items()}
    for at, i in enumerate(ids):
        if i in kinds:
            raise InputError(
                f"{source}: token {i} at index {at} is the placeholder of {kinds[i]}, and no "
                f"{kinds[i]} is given; leave it out"
            )


def plain_ids(engine: Engine) -> torch.Tensor:
    """Return the ids i64[N] that have a row in every table and are no placeholders of media."""
    excluded = {*placeholders(engine.spec.tokens).values()}
    return torch.tensor([i for i in range(engine.spec.text.readable_ids) if i not in excluded])


def random_ids(engine: Engine, shape: Sequence[int], seed: int = SEED) -> torch.Tensor:
    """Return random `plain_ids` of this shape."""
    ids, generator = plain_ids(engine), torch.Generator().manual_seed(seed)
    return ids[torch.randint(0, len(ids), tuple(shape), generator=generator)]


def default_count(engine: Engine) -> int:
    """Return how many random tokens `verify` compares on."""
    limits = engine.limits
    return min(limits.max_seq, max(2 * limits.prefill_chunk, window_of(engine)) + 2 * STEPS)


def window_of(engine: Engine) -> int:
    """Return the longest sliding window of the engine's layers; 1 if none has one."""
    graphs = engine.program.graphs.values()
    windows = (n.attrs.get("window") for g in graphs for n in g.nodes)
    return max((w for w in windows if isinstance(w, int) and w), default=1)


@dataclass(frozen=True, eq=False)
class Turns:
    """Tokens i64[T] in turns of these `sizes`; logits are compared after every token (`every`), or
    at the end of each turn."""

    ids: torch.Tensor
    sizes: Sequence[int]
    every: bool = False

    @property
    def where(self) -> list[int]:
        """The index of the token of each row of logits."""
        return [*range(len(self.ids))] if self.every else [n - 1 for n in accumulate(self.sizes)]

    @property
    def steps(self) -> int:
        """Number of single steps at the end."""
        return len(self.sizes) - max((i for i, n in enumerate(self.sizes, 1) if n > 1), default=0)

    @property
    def joined(self) -> Turns:
        """The same tokens as one turn, if it returns the same rows: float64 results do not depend
        on how a text is cut."""
        return replace(self, sizes=[len(self.ids)]) if self.every else self

    def chunks(self, size: int) -> list[torch.Tensor]:
        """Return the prefill chunks of all turns."""
        return [chunk for turn in self.ids.split([*self.sizes]) for chunk in turn.split(size)]


def plan_turns(engine: Engine, ids: torch.Tensor) -> Turns:
    """Return the ids in turns of `turn_sizes` for the engine's window and STEPS single steps;
    logits of every token if the engine has them and they are not too many."""
    every = engine.all_logits and len(ids) * engine.spec.text.vocab_size <= EVERY_LOGITS
    return Turns(ids, turn_sizes(len(ids), window_of(engine), STEPS), every)


def turn_sizes(count: int, window: int, steps: int, short: int = 0) -> list[int]:
    """Return the sizes of turns of `count` tokens: two long ones (the second of window + 1 tokens
    if there are more, else half), one of `short` (at most a quarter of what the steps leave), and
    `steps` single steps (at most a third of all); empty turns are left out."""
    steps = min(steps, count // 3)
    prompt = count - steps
    short = min(short, prompt // 4)
    long = window + 1 if prompt - short > window + 1 else (prompt - short) // 2
    return [n for n in (prompt - short - long, long, short, *[1] * steps) if n]


def draft_rounds(
    ids: torch.Tensor, start: int, width: int, max_seq: int
) -> Iterator[tuple[int, torch.Tensor, int]]:
    """Yield the verification steps that decode ids i64[T] from `start` on: position, `width` draft
    tokens (fewer if fewer fit into max_seq), and how many of them, the first ones, are right (about
    half)."""
    size, wrong = max(1, min(width, len(ids) - start + 1) // 2), ids.flip(0).repeat(width)
    for at in range(start, len(ids), size):
        right = ids[at : at + size]
        yield at, torch.cat((right, wrong))[: min(width, max_seq - at)], len(right)
