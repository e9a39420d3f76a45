"""The tokens that two engines are compared on, and the turns in which they are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from g4ir.engine.engine import Engine
from g4ir.engine.prompts import checked_ids
from g4ir.errors import InputError
from g4ir.model.media import placeholders

SEED = 0
#: single steps at the end of the given tokens
STEPS = 24
#: logits of every position are compared up to this many values, else those of each turn's end
EVERY_LOGITS = 1 << 28


def given_tokens(engine: Engine, given: Sequence[int] | None) -> torch.Tensor | None:
    """Return the tokens as i64[T], checked; None stays None."""
    if given is None:
        return None
    limit = engine.limits.max_seq
    ids = checked_ids(list(given), engine.spec.text.readable_ids, "verify")
    if not 2 <= len(ids) <= limit:
        raise InputError(f"verify: {len(ids)} tokens; expected 2 to {limit} (--max-seq)")
    check_no_media(engine, ids, "verify: --tokens")
    return torch.tensor(ids)


def check_no_media(engine: Engine, ids: Sequence[int], what: str) -> None:
    """Raise InputError on the first id that stands for a soft token: these are tokens of text."""
    kinds = {i: kind for kind, i in placeholders(engine.spec.tokens, engine.media.kinds).items()}
    for at, i in enumerate(ids):
        if i in kinds:
            raise InputError(
                f"{what}: token {i} at index {at} is the placeholder of {kinds[i]}, and no "
                f"{kinds[i]} is given; leave it out"
            )


def random_tokens(engine: Engine, count: int) -> torch.Tensor:
    """Return i64[count] from a fixed seed."""
    return random_ids(engine, (count,), SEED)


def random_ids(engine: Engine, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return i64 of this shape. Every table has a row for each id, and none is a placeholder of
    media, whichever of them an engine of this spec takes."""
    top = engine.spec.text.readable_ids
    taken = sorted({i for i in placeholders(engine.spec.tokens).values() if i < top})
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, top - len(taken), tuple(shape), generator=generator)
    for i in taken:
        ids += ids >= i
    return ids


def wanted_tokens(engine: Engine) -> int:
    limits = engine.limits
    return min(limits.max_seq, max(2 * limits.prefill_chunk, _window(engine)) + 2 * STEPS)


def _window(engine: Engine) -> int:
    return max((window for window, _ in engine.rings), default=1)


def plan_turns(engine: Engine, count: int) -> list[int]:
    """Return tokens per turn: a long one, one a little longer than the window, single steps."""
    steps = min(STEPS, count // 3)
    turn = min(_window(engine) + 1, (count - steps) // 2)
    return [n for n in (count - steps - turn, turn, *[1] * steps) if n]


def split_steps(turns: Sequence[int]) -> tuple[list[int], int]:
    """Return the turns before the single steps at the end, and how many of these there are."""
    long = max((i for i, n in enumerate(turns, 1) if n > 1), default=0)
    return [*turns[:long]], len(turns) - long


def positions_of(turns: Sequence[int], every: bool) -> list[int]:
    """Return the index of the token after which each row of logits stands."""
    ends = [sum(turns[: i + 1]) - 1 for i in range(len(turns))]
    return list(range(sum(turns))) if every else ends


def chunks_of(turns: Sequence[int], chunk: int) -> Iterator[int]:
    for n in turns:
        for start in range(0, n, chunk):
            yield min(chunk, n - start)
