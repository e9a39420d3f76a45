"""One cache instead of two where K = V: decode time against context.

    python bench/latent.py [--contexts 2048,...] [--dtypes bf16,f32] [--rounds 5] [--save]

One layer of head dim 512 with 8 query heads per KV head (latent.yaml); three engines, with the
caches plain, `value` and `raw`, over caches of noise, in one process and interleaved A-B-C-A-B-C.
The rest of a step (embedding, small MLP, head) is the same in all and is timed at a context of one
token. How exact each is says `g4ir verify` of an engine.

--save writes bench/results/latent.txt, and from the times the table that `--latent-kv auto` reads.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import arguments, fill_with_noise, finish, seconds

import g4ir
from g4ir.bench.measure import interleave, median, stat
from g4ir.ops.rope import rotated_pairs
from g4ir.passes.latent_kv import FORMS
from g4ir.plan.latent import LatentMeasurement, read_table, write_table
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.table import aligned

BUILD = Path("build/bench/latent")
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536)
SHAPE = "one layer, head dim 512, 128 rotated, 8 query heads, 1 KV head, 1 row"
HEAD = ["decode", *(f"{f} ms" for f in FORMS), "fastest", "context 1"]
HEAD += [f"{f} bytes" for f in FORMS[1:]]


def opened(spec: Spec, form: str, dtype: str, room: int) -> Any:
    """Build an engine; return a session of it whose caches are noise."""
    out = BUILD / f"{dtype}-{form}"
    shutil.rmtree(out, ignore_errors=True)
    options: dict[str, Any] = {"random_weights": 0, "dtype": dtype, "latent_kv": form}
    engine = g4ir.build(spec, out, progress=print, max_seq=room, prefill_chunk=16, **options)
    session = engine.session()
    fill_with_noise(session)
    return session


def timed(session: Any, context: int, steps: int) -> list[float]:
    """Measure milliseconds of each of `steps` decode steps, the last of which has this context."""
    session.length.fill_(max(0, context - steps))
    step = partial(session.decode, torch.tensor([5]))
    return [seconds(step) * 1e3 for _ in range(steps)]


def measured(spec: Spec, dtype: str, args: Any) -> list[dict[str, Any]]:
    """Return a row for each context: time of each form, and its bytes."""
    room, rows = max(*args.contexts, 64), []
    sessions = {form: opened(spec, form, dtype, room) for form in FORMS}
    rest = median(timed(sessions["off"], 1, args.steps))
    for context in args.contexts:
        runs = {f: partial(timed, s, context, args.steps) for f, s in sessions.items()}
        _, times = interleave(args.rounds, lambda: None, runs)
        stats = {f: stat(many, median) for f, many in times.items()}
        best = min(stats, key=lambda f: stats[f].value)
        views = {f: s.state.views(context).values() for f, s in sessions.items()}
        size = {f: sum(t.nbytes for t in many) for f, many in views.items()}
        # The form that beats the plain caches by more than the spread of both, else `off`.
        fastest = best if stats[best].differs(stats["off"]) else "off"
        ms = (f"{s.value:.3f} ± {s.spread:.3f}" for s in stats.values())
        shares = (f"{size[f] / size['off']:.1%}" for f in FORMS[1:])
        line = [f"{dtype} {context}", *ms, fastest, f"{rest:.3f}", *shares]
        print(*line, flush=True)
        rows.append({"dtype": dtype, "context": context, "fastest": fastest, "line": line})
    return rows


def keep_table(spec: Spec, rows: list[dict[str, Any]]) -> None:
    """Replace this device's and shape's rows of the shipped table; rows of others stay."""
    full, heads = spec.text.full, spec.text.num_attention_heads
    rotated = 2 * rotated_pairs(full.rope.kind, full.head_dim, full.rope.rotary_fraction)
    shape = (full.head_dim, rotated, heads // full.num_key_value_heads)
    new = [LatentMeasurement("cpu", r["dtype"], *shape, r["context"], r["fastest"]) for r in rows]
    facts = {replace(r, form="off") for r in new}
    write_table([*new, *(r for r in read_table() if replace(r, form="off") not in facts)])


def main() -> None:
    args = arguments(__doc__, contexts=CONTEXTS, dtypes=("bf16", "f32"), rounds=5, steps=16)
    spec = load_spec(Path(__file__).with_suffix(".yaml"))
    rows = [row for dtype in args.dtypes for row in measured(spec, dtype, args)]
    table = aligned([HEAD, *(r["line"] for r in rows)], indent=0)
    finish(args, "latent", f"{SHAPE}\n\n{table}")
    if args.save:
        keep_table(spec, rows)


if __name__ == "__main__":
    main()
