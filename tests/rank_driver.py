"""A process of several: does with an engine what a test asks for, on the first rank; the others
follow. `python -m tests.rank_driver ENGINE TASK OUT`, started by torchrun or alike."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import g4ir
from g4ir.backends.reference import ReferenceRuntime
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.engine.engine import Engine
from g4ir.engine.requests import Request
from g4ir.engine.scheduler import Scheduler
from g4ir.ir.graph import Node, Value
from g4ir.ops.types import Type, dtype_name
from g4ir.parallel.group import FRAME, GATHERED, Group, rank_sum
from g4ir.ui import console

PROMPTS = [[2, 5, 7, 9, 11, 13, 4, 3, 8, 21, 34, 55, 89, 6], [2, 33]]
#: more than a chunk, in two rows of different length, then tokens one by one
STEPS = 5
#: weights that ranks have parts of, by rows, by columns and by both
PARAMS = ("L0.mlp.w_up", "L0.mlp.w_down", "L0.moe.gate_up", "L0.moe.down")
#: task -> how many tokens are verified (None: the default), and go through all passes
VERIFIED = {"all": (None, 12), "quick": (12, 3)}
#: said when a prompt or an answer is under way
BEGUN = "begun"


def check_exchanges(group: Group) -> None:
    """Sums are those that the definition makes, whichever way they take; a call arrives whole."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for size in (12, GATHERED):
            g = torch.Generator().manual_seed(size)
            parts = torch.randn(group.ranks, 2, size, generator=g, dtype=torch.float64).to(dtype)
            ours, words = parts[group.rank], {"ranks": group.ranks}
            values = [Value(f"x{i}", Type(dtype_name(dtype), (size,))) for i in range(2)]
            n = Node("all_reduce", tuple(values), tuple(values), words)
            wants = [rank_sum([*part]) for part in parts.unbind(1)]
            for got, want in zip(group.run_node(n, [*ours]), wants, strict=True):
                assert torch.equal(got, want) or size > 12, (dtype, size)
                assert torch.allclose(got, want, 2**-7 if dtype.itemsize == 2 else 1e-5, 1e-5)
            (joined,) = group.all_gather([ours])
            assert torch.equal(joined, torch.cat([*parts], -1))
    sent = {"a": torch.arange(FRAME), "b": torch.ones(2, 3, dtype=torch.bool), "c": torch.zeros(0)}
    if group.rank == 0:
        group.send(["x", 1, None], sent)
        return
    call, tensors = group.receive()
    assert call == ["x", 1, None, []] and tensors.keys() == sent.keys()
    assert all(torch.equal(t, sent[name]) for name, t in tensors.items())


def logits(engine: Engine) -> dict[str, torch.Tensor]:
    """Logits after a prompt and after single steps of two rows, one of which is taken back and
    replaced by a copy of the other."""
    session = engine.session(2)
    longest = max(map(len, PROMPTS))
    tokens = torch.tensor([p + [0] * (longest - len(p)) for p in PROMPTS])
    rows = [session.prefill(tokens, torch.tensor([len(p) for p in PROMPTS]))]
    for i in range(STEPS):
        rows.append(session.decode(torch.tensor([7 + i, 9 + i])))
    kept = session.snapshot()
    rows.append(session.decode(torch.tensor([1, 2])))
    session.restore(kept)
    session.reset([1], zero=True)
    session.copy_row(session, 0, 1)
    rows.append(session.decode(torch.tensor([3, 3])))
    weights = (n for n in PARAMS if n.startswith("L0.mlp") or engine.spec.text.moe)
    return {f"{i}": r for i, r in enumerate(rows)} | {n: engine.param(n) for n in weights}


def checked(engine: Engine, task: str) -> list[bool]:
    """Whether an engine of several ranks is sound: what `g4ir verify` does, and pass by pass."""
    if engine.ranks == 1:
        return [True, True]
    whole, passed = (n and [*range(5, 5 + n)] for n in VERIFIED[task])
    return [verify_engine(engine, tokens=whole).ok, verify_each_pass(engine, passed).ok]


def answers(engine: Engine, task: str = "quick") -> dict[str, Any]:
    """Tokens that are chosen in all ways, and what the engine says of itself."""
    slots = Scheduler(engine)
    handles = [slots.submit(Request(tuple(p), 6)) for p in (*PROMPTS, PROMPTS[0])]
    while slots.busy:
        slots.step()
    said = {
        "greedy": engine.generate(PROMPTS, 8),
        "drawn": engine.generate(PROMPTS, 8, temperature=0.9, top_p=0.95, seed=11),
        "rows": [t.answers[0].tokens for t in handles],
        "cache": engine.session(1).nbytes(),
        "checked": checked(engine, task),
    }
    if engine.drafter:
        session = engine.session(2)
        session.prefill(torch.tensor([PROMPTS[1]] * 2))
        said["drafts"] = [*session.draft({0: 5, 1: 6}, {0: 3, 1: 2}).values()]
        said["mtp"] = engine.generate(PROMPTS, 8, draft="mtp")
    if engine.media.kinds:
        tokens, picture = engine.spec.tokens, torch.arange(48 * 72 * 3).view(48, 72, 3) % 251
        prompt = [2, 5, tokens.image or 0, 7]
        said["seen"] = engine.generate(prompt, 6, images=[picture.to(torch.uint8).numpy()])
    slots.close()
    return said


def all_of_it(engine: Engine, out: Path, task: str) -> None:
    """Write the logits and the answers; load the engine again, as a second one."""
    with torch.no_grad():
        save_file(logits(engine), out.with_suffix(".safetensors"))
    said = answers(engine, task)
    with g4ir.load_engine(engine.path) as other:
        said["again"] = other.generate(PROMPTS[1], 4)
    out.write_text(json.dumps(said))


def no_memory(*_: Any) -> None:
    raise MemoryError


def decode(engine: Engine) -> None:
    """Answer until somebody dies."""
    while True:
        engine.generate([2, 5], 50, stop_ids=(), on_token=lambda token: print(BEGUN, flush=True))


def main(path: str, task: str, out: str) -> int:
    with g4ir.join(timeout_s=20) as group:
        if task in VERIFIED:
            check_exchanges(group)
        if task == "memory" and group.rank == 1:  # which finds no room for caches
            ReferenceRuntime.new_state = no_memory  # type: ignore[method-assign, assignment]
        if group.rank:
            g4ir.follow(group)
            return 0
        with g4ir.load_engine(path, trust=True) as engine:
            if task not in VERIFIED:
                decode(engine)
            all_of_it(engine, Path(out), task)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except Exception as e:
        console.leave(console.report(e, False))
