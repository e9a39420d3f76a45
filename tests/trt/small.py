"""Small engines on fake.py beside the interpreter: prompts in chunks, decode over each span,
verification, drafts, and the soft tokens of towers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir import Engine, Program, interpret
from g4ir.backends.base import GraphRun
from g4ir.backends.primitives.graph import MEDIA, tower_graphs
from g4ir.backends.primitives.network import BLOCK_IDS, NO_BLOCK
from g4ir.backends.reference import ReferenceRuntime
from g4ir.backends.trt import interface
from g4ir.ir.distance import row_errors
from g4ir.model.decoder import HIDDEN, VERIFY
from g4ir.model.draft import DRAFT, NEXT_HIDDEN
from tests.configs import spec_called
from tests.shrink import shrink
from tests.trt.compiled import words_of
from tests.trt.emulated import build, emulated, use

Tensor = torch.Tensor
#: tokens that each row is given, and tokens that are verified after steps
LENGTHS, VERIFIED = (29, 0, 17), 2
CHUNK, MAX_SEQ, MIN_SPAN = 11, 300, 64
#: largest difference of a row relative to its rms, which comes of the order of sums
BUDGET = 1e-4
#: width of models that are made small
LARGE = 256


@contextmanager
def one_thread() -> Iterator[None]:
    """A context of one thread: products this small are slower on several, by far where the machine
    is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(spec: Any, folder: Path, **options: Any) -> dict[str, float]:
    """The largest errors of a spec's engine: `logits`, `drafts`, `soft`; AssertionError beyond the
    budget."""
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setattr(interface, "MIN_SPAN", MIN_SPAN)
        use(patch, emulated(folder))
        limits = {"max_seq": MAX_SEQ, "prefill_chunk": CHUNK}
        engine = build(folder / "engine", spec, **{"media": "none", **limits, **options})
        found = errors_of(engine)
    assert max(found.values()) < BUDGET, found
    return found


def check_row(row: str, folder: Path) -> dict[str, float]:
    """Do `check` of `tiny-moe quant=int4`, of a large variant in small."""
    variant, settings, options = words_of(row)
    spec = spec_called(variant)
    if spec.text.hidden_size > LARGE:
        spec = shrink(spec)
    return check(spec, folder, settings=settings, **options)


def errors_of(engine: Engine) -> dict[str, float]:
    program, source = engine.program, engine.runtime.source
    reference = ReferenceRuntime(program, engine.limits, "cpu", source)
    got, want = (results(program, source, r) for r in (engine.runtime, reference))
    return {name: row_errors(got[name], want[name]).relative.max().item() for name in got}


def results(program: Program, params: Any, runtime: Any) -> dict[str, Tensor]:
    """`logits` [N, vocab] of rows of different lengths in chunks, one of them empty, then of decode
    steps; `drafts` [spans * B,1,hidden], by the state behind the last over each span; `soft`."""
    embed, lengths = program.graphs["embed"], torch.tensor(LENGTHS)
    tables = {v.name: params.tensor(v.name) for v in embed.params}
    state, generator = runtime.new_state(len(LENGTHS)), torch.Generator().manual_seed(0)
    plan, contexts = steps_of(program), [MIN_SPAN, 4 * MIN_SPAN, MAX_SEQ]
    tokens = torch.randint(3, 200, (len(LENGTHS), plan[-1][2]), generator=generator)
    held, found = torch.zeros_like(lengths), list[Tensor]()
    for phase, start, stop in plan:
        size, every = stop - start, start >= max(LENGTHS)
        valid = torch.full_like(lengths, size) if every else (lengths - start).clamp(0, size)
        feeds, _ = interpret(embed, {"tokens": tokens[:, start:stop]}, tables, {})
        feeds |= {"positions": held[:, None] + torch.arange(size), "lengths": valid}
        held = held + valid
        if phase == MEDIA:
            feeds[BLOCK_IDS] = blocks(valid, stop)
        least = contexts[start - max(LENGTHS)] if phase == "decode" else 0
        made = runtime.run(GraphRun(phase, feeds, max(least, int(held.max()))), state)
        asked = torch.arange(made["logits"].shape[1]) < valid[:, None]  # not behind padding
        found.append(made["logits"][asked].double())
    out = {"logits": torch.cat(found)}
    if DRAFT in program.graphs:
        feeds = {"embeds": feeds["embeds"][:, -1:], HIDDEN: made[HIDDEN][:, -1:], "written": held}
        feeds |= {"positions": held[:, None], "last": held[:, None] - 1}
        drafts = [runtime.run(GraphRun(DRAFT, feeds, n), state)[NEXT_HIDDEN] for n in contexts]
        out["drafts"] = torch.cat(drafts).double()
    soft = [runtime.encode(name, feeds)[0] for name, feeds in tower_feeds(program)]
    return {**out, "soft": torch.cat(soft)} if soft else out


def steps_of(program: Program) -> list[tuple[str, int, int]]:
    """The phases of steps, each with the tokens that it has, from .. to: the chunks of a prompt,
    single tokens, and, of a model with a drafter, tokens that are verified."""
    length, first = max(LENGTHS), MEDIA if MEDIA in program.graphs else "prefill"
    starts = range(0, length, CHUNK)
    steps = [("prefill" if i else first, i, min(i + CHUNK, length)) for i in starts]
    steps += [("decode", length + i, length + i + 1) for i in range(3)]
    end = length + 3
    return steps + ([(VERIFY, end, end + VERIFIED)] if VERIFY in program.graphs else [])


def blocks(valid: Tensor, width: int) -> Tensor:
    """i64[B, width]: blocks of three tokens, and every fourth in none."""
    at = torch.arange(width).expand(len(valid), width)
    return torch.where((at < valid[:, None]) & (at % 4 < 3), at // 4, NO_BLOCK)


def tower_feeds(program: Program) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Inputs of each tower, a fifth of them padding: numbers, a mask, or places of an image."""
    generator = torch.Generator().manual_seed(0)
    for name, g in tower_graphs(program).items():
        feeds = {}
        for v in g.inputs:
            shape = [int(d) for d in v.type.shape]
            at = torch.arange(shape[1])
            valid = at < shape[1] * 4 // 5
            if v.type.dtype == "bool":
                feeds[v.name] = valid[None]
            elif v.type.dtype == "i64":
                places = torch.stack((at % 24, at // 24), 1)
                feeds[v.name] = torch.where(valid[:, None], places, -1)[None]
            else:
                feeds[v.name] = torch.rand(shape, generator=generator)
        yield name, feeds
