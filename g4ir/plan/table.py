"""Plans as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from g4ir.ops.types import ITEMSIZE
from g4ir.ui.table import Line, aligned
from g4ir.ui.units import count_text, rounded_count, size_text

from .drafting import gains_text
from .gpus import SIZE_RULE

if TYPE_CHECKING:
    from .records import Fit, Largest, Plan, Ranks, RankStep


def plan_text(plan: Plan, nominal: bool = False) -> str:
    """Describe one variant: parameters, blocks, weights, caches, and what fits."""
    parts = [
        _title(plan),
        _parameters(plan),
        _blocks(plan),
        _weights(plan, nominal),
        *(_caches(plan, batch) for batch in sorted({r.batch for r in plan.rows})),
    ]
    parts += _ranks(plan)
    parts += _drafts(plan)
    parts += _media(plan)
    devices = list(dict.fromkeys(f.device for f in plan.fits))
    if len(devices) == 1:
        parts.append(_fit(plan))
    elif devices:
        parts.append(_devices(plan))
    return "\n".join(parts)


def _ranks(plan: Plan) -> list[str]:
    r = plan.ranks
    if r is None:
        return []
    drafter = f" and {size_text(r.drafter)} of the draft model's" if r.drafter else ""
    head = (
        f"each of {r.count} ranks: {size_text(r.weights)} of weights{drafter}, without tables "
        f"that are only gathered from\n"
        f"{r.messages} collectives in a decode step, {size_text(r.message_bytes)} per sequence\n"
    )
    lines: list[Line] = [["context", *(count_text(row.ctx) for row in r.rows)]]
    lines.append(["batch", *(str(row.batch) for row in r.rows)])
    lines.append(["KV cache of a rank", *(size_text(row.cache) for row in r.rows)])
    return [head + aligned(lines), *_steps(r)]


def _steps(r: Ranks) -> list[str]:
    """List predicted decode steps by number of ranks."""
    if not r.steps:
        return []
    head = f"predicted decode steps on {r.gpu}, ms with one-shot collectives (with NCCL)\n"
    tables = (_step_table([s for s in r.steps if s.batch == b]) for b in _batches(r))
    return [head + "".join(tables)]


def _step_table(steps: Sequence[RankStep]) -> str:
    contexts = dict.fromkeys(s.ctx for s in steps)
    lines: list[Line] = [["context", *map(count_text, contexts)]]
    for ranks in dict.fromkeys(s.ranks for s in steps):
        cells = [_step_text(s) for s in steps if s.ranks == ranks]
        lines.append(["1 rank" if ranks == 1 else f"{ranks} ranks", *cells])
    return f"  batch {steps[0].batch}\n{aligned(lines, indent=4)}"


def _step_text(s: RankStep) -> str:
    first, *others = (f"{sum(us) / 2e3:.2f}" for us in s.us.values())
    return first if s.ranks == 1 else f"{first} ({', '.join(others)})"


def _batches(r: Ranks) -> list[int]:
    return sorted({s.batch for s in r.steps})


def _drafts(plan: Plan) -> list[str]:
    d = plan.drafts
    if d is None:
        return []
    weights = size_text(d.drafter_bytes)
    of = f"draft model {d.drafter}: {weights} of weights, one step per draft token\n"
    by = f"at the rates of {d.device}" if d.device else "by bytes of weights and KV cache"
    head = (
        f"speculative decoding, up to {d.tokens} draft tokens: {size_text(d.slack_bytes)} of ring "
        f"cache slack per sequence, included above\n{of if d.drafter else ''}speed-up by "
        f"acceptance rate; {count_text(d.context)} tokens, weights {d.weights}, {by}\n"
    )
    tables = (f"  batch {batch}\n{gains_text(found, indent=4)}" for batch, found in d.tables)
    return [head + "".join(tables)]


def _media(plan: Plan) -> list[str]:
    if not plan.media:
        return []
    counted = ", ".join(plan.kinds)
    about = f"included above: {counted}" if counted else "not included above (see --media)"
    lines: list[Line] = [["", "soft tokens", "input rows", "GFLOP"]]
    for part in plan.media:
        size = size_text(part.params * ITEMSIZE[plan.dtype])
        lines.append([f"{part.name}, {part.params / 1e6:.1f}M, {size}", "", "", ""])
        lines += [
            [f"  {s.label}", str(s.soft_tokens), str(s.rows), f"{s.flops / 1e9:.1f}"]
            for s in part.sizes
        ]
    return [f"media, {about}\n{aligned(lines)}"]


def _title(plan: Plan) -> str:
    text = plan.spec.text
    about = [
        f"{plan.spec.name}: {text.num_hidden_layers} layers",
        f"up to {count_text(text.max_position_embeddings)} tokens",
        plan.dtype,
        f"latent KV {plan.latent}",
        *([f"KV cache {plan.kv_dtype}"] if plan.kv_dtype else []),
        f"prefill chunk {plan.prefill_chunk}",
    ]
    if plan.ple_placement:
        places = dict.fromkeys(str(f.ple_placement) for f in plan.fits) or [plan.ple_placement]
        about.append(f"per-layer table: {' or '.join(places)}")
    return ", ".join(about) + "\n" + _units(plan)


def _units(plan: Plan) -> str:
    """Explain GB and GiB in a plan with devices, whose memory may be given in either."""
    return f"{SIZE_RULE}\n" if plan.fits else ""


def _parameters(plan: Plan) -> str:
    n = plan.counts
    rows = {
        "published": n.hub_parameters,
        "as loaded": n.loaded,
        "decoder": n.text,
        "active per token": n.active,
        "token table": n.embed,
        "head": n.head,
        "per-layer table": n.ple_table,
        "per-layer embeddings, rest": n.ple_other,
        "layers without experts": n.layers,
        "experts": n.experts,
        "vision": n.vision,
        "audio": n.audio,
        "projections from both": n.embed_vision + n.embed_audio,
    }
    always = ("published", "as loaded", "decoder", "active per token", "token table")
    kept = {k: v for k, v in rows.items() if v or k in always}
    if not n.head:
        kept = {
            ("token table, also the head" if k == "token table" else k): v for k, v in kept.items()
        }
    return "parameters\n" + aligned([k, f"{v:,}"] for k, v in kept.items())


def _blocks(plan: Plan) -> str:
    moe, ple = bool(plan.counts.experts), bool(plan.counts.ple_table)
    head = ["layers", "attention", "mlp", *(("experts", "router") if moe else ()), "block"]
    head += ["active"] * moe + ["per-layer"] * ple
    lines: list[Line] = [head]
    for b in plan.blocks:
        shared = "" if b.donor is None else f", K and V of layer {b.donor}"
        numbers = [b.attention, b.mlp, *((b.experts, b.router) if moe else ()), b.total]
        numbers += [b.active] * moe + [b.ple] * ple
        lines.append([f"{len(b.layers)} {b.kind}{shared}", *(f"{n / 1e6:.1f}" for n in numbers)])
    return "matrices per layer, millions\n" + aligned(lines)


def _weights(plan: Plan, nominal: bool) -> str:
    lines: list[Line] = [["", *(w.sizes.format for w in plan.weights)]]
    rows = {
        "decoder": [w.sizes.total for w in plan.weights],
        "on the device": [w.device for w in plan.weights],
        "in host memory": [w.host for w in plan.weights],
        "in the file, by row": [w.mapped for w in plan.weights],
    }
    lines += [[k, *map(size_text, v)] for k, v in rows.items() if any(v)]
    if nominal:
        lines.append(["nominal", *(f"{w.nominal / 1e9:.1f} GB" for w in plan.weights)])
    return "weights\n" + aligned(lines)


NAMES = {"naive": "naive: full context", "planned": "planned: windows", "built": "as built"}


def _caches(plan: Plan, batch: int) -> str:
    rows = [r for r in plan.rows if r.batch == batch]
    lines: list[Line] = [["context", *(count_text(r.ctx) for r in rows)]]
    for key in ("naive", "planned", "built", "activations", "workspace"):
        lines.append([_name(plan, key), *(size_text(getattr(r, key)) for r in rows)])
    return f"KV cache, batch {batch}\n{aligned(lines)}"


def _name(plan: Plan, key: str) -> str:
    if key != "built":
        return NAMES.get(key, key)
    return f"as built: latent KV {plan.latent}" + (f", {plan.kv_dtype}" if plan.kv_dtype else "")


def _fit(plan: Plan) -> str:
    """Describe one device: the maximum context and batch by weight format."""
    first = plan.fits[0]
    out = [
        f"{_of_ranks(first)}{first.device}: {size_text(first.memory)}, of which "
        f"{size_text(first.reserve)} are reserved\n"
    ]
    contexts = [m.at for m in first.max_batch]
    for i, most in enumerate(first.max_context):
        lines = [["weights", "", "naive", "planned", "as built", "", *map(count_text, contexts)]]
        lines += [_fit_line(f, f.max_context[i], f.max_batch if i == 0 else ()) for f in plan.fits]
        if i:
            lines = [line[:5] for line in lines]
        head = f"  maximum context at batch {most.at}"
        out.append(head + ("; at the right the maximum batch as built\n" if i == 0 else "\n"))
        out.append(aligned(lines, indent=4))
    out += [_needed(plan, most.at) for most in first.max_context]
    out += _floors(plan)
    return "".join(out)


def _of_ranks(f: Fit) -> str:
    return "" if f.ranks == 1 else f"each of {f.ranks} ranks, on its own "


def _fit_line(f: Fit, most: Largest, batches: Sequence[Largest]) -> list[str]:
    contexts = [rounded_count(n) for n in (most.naive, most.planned, most.built)]
    return [f.weights, size_text(f.weight_bytes), *contexts, "", *(_rows_most(m) for m in batches)]


def _rows_most(most: Largest) -> str:
    return str(most.built) if most.built else "-"


def _needed(plan: Plan, batch: int) -> str:
    """List the bytes of each context, or how many are short."""
    cells = {f.weights: [c for c in f.cells if c.batch == batch] for f in plan.fits}
    first = plan.fits[0]
    room = first.memory - first.reserve
    naive = [_need(c.naive, room) for c in cells[first.weights]]
    lines: list[Line] = [["context", *(count_text(c.ctx) for c in cells[first.weights])]]
    lines.append([f"{first.weights}, naive", *naive])
    lines += [
        [f"{form}, as built", *(_need(c.built, room) for c in many)] for form, many in cells.items()
    ]
    if plan.ranks:
        cards = {form: [str(c.cards or "-") for c in many] for form, many in cells.items()}
        lines += [[f"{form}, cards needed", *many] for form, many in cards.items()]
    where = "on each rank " if first.ranks > 1 else ""
    return f"  needed {where}at batch {batch}\n{aligned(lines, indent=4)}"


def _need(size: int, room: int) -> str:
    return size_text(size) if size <= room else f"short {size_text(size - room)}"


def _floors(plan: Plan) -> list[str]:
    if plan.fits[0].cells[0].decode_floor_s is None:
        return []
    batch = plan.rows[0].batch
    cells = {f.weights: [c for c in f.cells if c.batch == batch] for f in plan.fits}
    lines: list[Line] = [["context", *(count_text(r.ctx) for r in plan.rows if r.batch == batch)]]
    lines += [
        [form, *(f"{1e3 * (c.decode_floor_s or 0):.2f} ms" for c in many)]
        for form, many in cells.items()
    ]
    return [
        f"  roofline time of a decode step at batch {batch}, data sheet rates"
        f"{', on a rank, without collectives' if plan.ranks else ''}\n",
        aligned(lines, indent=4),
    ]


def _devices(plan: Plan) -> str:
    batch = plan.fits[0].max_context[0].at
    forms = list(dict.fromkeys(f.weights for f in plan.fits))
    lines: list[Line] = [
        [
            "",
            "memory",
            f"{forms[0]} naive",
            "planned",
            "as built",
            *(f"{f} as built" for f in forms[1:]),
        ]
    ]
    for name in dict.fromkeys(f.device for f in plan.fits):
        mine = [f for f in plan.fits if f.device == name]
        most = [f.max_context[0] for f in mine]
        first = (most[0].naive, most[0].planned, *(m.built for m in most))
        lines.append([name, size_text(mine[0].memory), *map(rounded_count, first)])
    return f"{_each(plan.fits[0])}maximum context at batch {batch} by weights\n{aligned(lines)}"


def _each(f: Fit) -> str:
    return "" if f.ranks == 1 else f"{f.ranks} ranks, each on a card: "


# --- several variants --------------------------------------------------------------------------


def comparison_text(plans: Sequence[Plan], nominal: bool = False) -> str:
    """Return one line per variant, then what fits each device."""
    parts = [
        _totals(plans, nominal),
        *(_cache_table(plans, batch) for batch in sorted({r.batch for r in plans[0].rows})),
    ]
    if plans[0].fits:
        parts.append(_matrix(plans))
    return "\n".join(parts)


def _totals(plans: Sequence[Plan], nominal: bool) -> str:
    forms = [w.sizes.format for w in plans[0].weights]
    lines: list[Line] = [["", "loaded", "active", *forms, *(["nominal"] if nominal else [])]]
    for p in plans:
        sizes = [size_text(w.sizes.total) for w in p.weights]
        quoted = [f"{p.weights_as(p.dtype).nominal / 1e9:.1f} GB"] if nominal else []
        counts = [f"{n / 1e9:.3f}B" for n in (p.counts.loaded, p.counts.active)]
        lines.append([p.spec.name, *counts, *sizes, *quoted])
    head = f"{_units(plans[0])}parameters, and bytes of the decoder's weights\n"
    return head + aligned(lines)


def _cache_table(plans: Sequence[Plan], batch: int) -> str:
    contexts = sorted({r.ctx for p in plans for r in p.rows})
    lines: list[Line] = [["", *map(count_text, contexts)]]
    for p in plans:
        found = {r.ctx: r for r in p.rows if r.batch == batch}
        for key in ("naive", "planned", "built"):
            sizes = [size_text(getattr(found[c], key)) if c in found else "" for c in contexts]
            form = f"{p.latent}, {p.kv_dtype}" if p.kv_dtype else p.latent
            label = f"as built ({form})" if key == "built" else key
            lines.append([f"{p.spec.name if key == 'naive' else '':<8} {label}", *sizes])
    return f"KV cache, batch {batch}\n{aligned(lines)}"


def _matrix(plans: Sequence[Plan]) -> str:
    first = plans[0].fits
    batch = first[0].max_context[0].at
    forms = "/".join(dict.fromkeys(f.weights for f in first))
    lines: list[Line] = [["", "memory", *(p.spec.name for p in plans)]]
    for name in dict.fromkeys(f.device for f in first):
        cells = [
            "/".join(rounded_count(f.max_context[0].built) for f in p.fits if f.device == name)
            for p in plans
        ]
        memory = next(f.memory for f in first if f.device == name)
        lines.append([name, size_text(memory), *cells])
        if plans[0].ranks:
            lines.append(["  cards needed", "", *("/".join(_cards_of(p, name)) for p in plans)])
    head = f"{_each(first[0])}maximum context at batch {batch} as built, weights {forms}"
    longest = count_text(max(c.ctx for c in first[0].cells))
    needed = f"; cards needed for {longest}" if plans[0].ranks else ""
    return f"{head}{needed}\n{aligned(lines)}"


def _cards_of(plan: Plan, device: str) -> list[str]:
    """Return, for each format, the fewest cards that fit the longest context."""
    fits = [f for f in plan.fits if f.device == device]
    return [str(max(f.cells, key=lambda c: (c.ctx, -c.batch)).cards or "-") for f in fits]
