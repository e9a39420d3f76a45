"""Plans as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from g4ir.ops.types import ITEMSIZE
from g4ir.ui.table import Line, aligned
from g4ir.ui.units import count_text, rounded_count, size_text

from .drafting import gains_text
from .gpus import SIZE_RULE
from .records import TOTALS

if TYPE_CHECKING:
    from .count import Block
    from .records import DeviceUse, Fit, Plan


#: where no number of ranks that was tried is enough
MORE = "more than 8"


def _section(head: str, lines: Iterable[Line], indent: int = 2) -> str:
    return f"{head}\n{aligned(lines, indent=indent)}"


def plan_text(plan: Plan, nominal: bool = False) -> str:
    """Describe one variant: parameters, blocks, weights, caches, and what fits."""
    several = len({f.device for f in plan.fits}) > 1
    parts = [
        _title(plan),
        _parameters(plan),
        _attention(plan),
        _blocks(plan),
        _weights(plan, nominal),
        *(_caches(plan, batch) for batch in sorted({r.batch for r in plan.rows})),
        _ranks(plan),
        _drafts(plan),
        _media(plan),
        *([] if plan.fits and not several else _needed_in_all(plan)),
        _devices(plan) if several else _fit(plan),
    ]
    return "\n".join(filter(None, parts))


def _title(plan: Plan) -> str:
    c, text = plan.config, plan.spec.text
    about = [
        f"{plan.spec.name}: {text.num_hidden_layers} layers",
        f"up to {count_text(text.max_position_embeddings)} tokens",
        f"{c.dtype} by {c.backend} on {c.device}",
        f"latent KV {c.latent_kv}",
        *([f"KV cache {c.kv_dtype}"] if c.kv_dtype else []),
        f"prefill chunk {c.limits.prefill_chunk}",
    ]
    if c.ple_placement:
        places = dict.fromkeys(str(f.ple_placement) for f in plan.fits) or [c.ple_placement]
        about.append(f"per-layer table: {' or '.join(places)}")
    return f"{', '.join(about)}\n{_units(plan)}"


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
        "token table" if n.head else "token table, also the head": n.embed,
        "head": n.head,
        "per-layer table": n.ple_table,
        "per-layer embeddings, rest": n.ple_other,
        "layers without experts": n.layers,
        "experts": n.experts,
        "vision": n.vision,
        "audio": n.audio,
        "projections from both": n.embed_vision + n.embed_audio,
    }
    return _section("parameters", ([k, f"{v:,}"] for k, v in rows.items() if v))


def _attention(plan: Plan) -> str:
    """Describe heads and matrices of each kind of layer; RoPE rotates some dims of a head of Q and
    K, and not the others."""
    lines: list[Line] = [
        ["layers", "heads", "KV heads", "head dims", "rotated", "still", "q", "k", "v", "o"]
    ]
    for b in plan.blocks:
        sizes = b.heads, b.kv_heads, b.head_dim, b.rotated, b.head_dim - b.rotated
        k, v = (f"{n / 1e6:.1f}" if n else "-" for n in (b.k, b.v))
        v = "is k" if b.k_eq_v and b.k else v
        matrices = f"{b.q / 1e6:.1f}", k, v, f"{b.o / 1e6:.1f}"
        lines.append([_layers(b), *map(str, sizes), *matrices])
    return _section("attention, matrices of a layer in millions of parameters", lines)


def _layers(b: Block) -> str:
    shared = "" if b.donor is None else f", K and V of layer {b.donor}"
    return f"{len(b.layers)} {b.kind}{shared}"


def _blocks(plan: Plan) -> str:
    moe, ple = bool(plan.counts.experts), bool(plan.counts.ple_table)
    shown = {"experts": moe, "router": moe, "active": moe, "ple": ple}
    names = ("attention", "mlp", "experts", "router", "total", "active", "ple")
    chosen = [name for name in names if shown.get(name, True)]
    heads = {"total": "block", "ple": "per-layer"}
    lines: list[Line] = [["layers", *(heads.get(name, name) for name in chosen)]]
    for b in plan.blocks:
        lines.append([_layers(b), *(f"{getattr(b, name) / 1e6:.1f}" for name in chosen)])
    return _section("matrices of a layer in millions of parameters", lines)


def _weights(plan: Plan, nominal: bool) -> str:
    lines: list[Line] = [["", *(w.format for w in plan.weights)]]
    where = "in RAM" if plan.config.device == "cpu" else "on the device"
    rows = {
        "decoder": [w.total for w in plan.weights],
        where: [w.device for w in plan.weights],
        "in host memory": [w.host for w in plan.weights],
        "in the file, by row": [w.mapped for w in plan.weights],
    }
    lines += [[k, *map(size_text, v)] for k, v in rows.items() if any(v)]
    upcast = dict(pair for w in plan.weights for pair in w.upcast.items())
    if nominal:
        lines.append(["nominal", *(f"{w.nominal / 1e9:.1f} GB" for w in plan.weights)])
    text = _section("weights", lines)
    if not upcast:
        return text
    stored = ", ".join(f"{form} as {to}" for form, to in upcast.items())
    where = f"backend {plan.config.backend} on {plan.config.device}"
    return f"{text}  {where} stores these formats in more bits: {stored}\n"


def _caches(plan: Plan, batch: int) -> str:
    rows, c = [r for r in plan.rows if r.batch == batch], plan.config
    names = {
        "naive": "naive: full context",
        "planned": "planned: windows",
        "built": ", ".join(filter(None, (f"as built: latent KV {c.latent_kv}", c.kv_dtype))),
        "activations": "activations",
        "workspace": "workspace",
    }
    lines: list[Line] = [["context", *(count_text(r.ctx) for r in rows)]]
    lines += [[name, *(size_text(getattr(r, key)) for r in rows)] for key, name in names.items()]
    return _section(f"KV cache, batch {batch}", lines)


def _ranks(plan: Plan) -> str:
    r = plan.ranks
    if r is None:
        return ""
    drafter = f" and {size_text(r.drafter)} of the draft model's" if r.drafter else ""
    head = (
        f"each of {r.count} ranks: {size_text(r.weights)} of weights{drafter}, without tables "
        f"that are only gathered from\n"
        f"{r.messages} collectives in a decode step, {size_text(r.message_bytes)} per sequence"
    )
    lines: list[Line] = [("context", "batch", "KV cache of a rank")]
    lines += [(count_text(row.ctx), str(row.batch), size_text(row.cache)) for row in r.rows]
    return _section(head, zip(*lines, strict=True))


def _drafts(plan: Plan) -> str:
    d = plan.drafts
    if d is None:
        return ""
    weights = size_text(d.drafter_bytes)
    of = f"draft model {d.drafter}: {weights} of weights, one step per draft token\n"
    by = f"at the rates of {d.device}" if d.device else "by bytes of weights and KV cache"
    head = (
        f"speculative decoding, up to {d.tokens} draft tokens: {size_text(d.slack_bytes)} of ring "
        f"cache slack per sequence, included above\n{of if d.drafter else ''}speed-up by "
        f"acceptance rate; {count_text(d.context)} tokens, weights {d.weights}, {by}\n"
    )
    tables = (f"  batch {batch}\n{gains_text(found, indent=4)}" for batch, found in d.tables)
    return head + "".join(tables)


def _media(plan: Plan) -> str:
    if not plan.media:
        return ""
    counted = ", ".join(plan.config.media.kinds)
    about = f"included above: {counted}" if counted else "not included above (see --media)"
    lines: list[Line] = [["", "soft tokens", "input rows", "GFLOP"]]
    for part in plan.media:
        size = size_text(part.params * ITEMSIZE[plan.config.dtype])
        lines.append([f"{part.name}, {part.params / 1e6:.1f}M, {size}"])
        for s in part.sizes:
            lines.append([f"  {s.label}", str(s.soft_tokens), str(s.rows), f"{s.flops / 1e9:.1f}"])
    return _section(f"media, {about}", lines)


def _needed_in_all(plan: Plan) -> Iterable[str]:
    """Describe what each batch size needs, without a card to compare it with."""
    memory = "RAM" if plan.config.device == "cpu" else "GPU memory"
    rank = ", of each rank" if plan.ranks and plan.ranks.count > 1 else ""
    for batch in sorted({r.batch for r in plan.rows}):
        lines: list[Line] = [
            ["context", *(count_text(r.ctx) for r in plan.rows if r.batch == batch)]
        ]
        for form in dict.fromkeys(n.weights for n in plan.needed):
            own = [n for n in plan.needed if (n.weights, n.batch) == (form, batch)]
            lines.append([form, *(size_text(n.bytes) for n in own)])
        yield _section(f"{memory} needed by weights, batch {batch}{rank}", lines)


def _fit(plan: Plan) -> str:
    if not plan.fits:
        return ""
    first = plan.fits[0]
    each = "" if first.ranks == 1 else f"each of {first.ranks} ranks, on its own "
    out = [
        f"{each}{first.device}: {size_text(first.memory)}, of which "
        f"{size_text(first.reserve)} are reserved\n{_verdict(plan)}\n"
    ]
    for i, most in enumerate(first.max_context):
        lines = [["weights", "", "naive", "planned", "as built"]]
        lines += [[f.weights, size_text(f.weight_bytes), *_most(f, i)] for f in plan.fits]
        head = f"  maximum context at batch {most.at}"
        if i == 0:
            head += "; at the right the maximum batch as built"
            lines[0] += ["", *(count_text(m.at) for m in first.max_batch)]
            for line, f in zip(lines[1:], plan.fits, strict=True):
                line += ["", *(str(m.built or "-") for m in f.max_batch)]
        out.append(_section(head, lines, indent=4))
    out += [_needed(plan, most.at) for most in first.max_context]
    if first.cells[0].decode_floor_s is not None:
        where = ", on a rank, without collectives" if plan.ranks else ""
        batch = plan.rows[0].batch
        head = f"  roofline time of a decode step at batch {batch}, data sheet rates{where}"
        rows = _by_format(plan, batch, lambda c: f"{1e3 * (c.decode_floor_s or 0):.2f} ms")
        out.append(_section(head, rows, indent=4))
    return "".join(out)


def _verdict(plan: Plan) -> str:
    """Return whether the longest context fits, and on how many cards."""
    cells = {f.weights: _longest(f) for f in plan.fits}
    words = [f"{form} {'yes' if c.fits else 'no'}" for form, c in cells.items()]
    if plan.ranks:
        words = [f"{w} (cards needed: {c.cards or MORE})" for w, c in zip(words, cells.values())]
    elif not all(c.fits for c in cells.values()):
        words.append("several cards: see --tp")
    at = next(iter(cells.values()))
    return f"  fits with {count_text(at.ctx)} at batch {at.batch}: {', '.join(words)}"


def _longest(f: Fit) -> DeviceUse:
    return max(f.cells, key=lambda c: (c.ctx, -c.batch))


def _most(f: Fit, i: int = 0) -> list[str]:
    return [rounded_count(getattr(f.max_context[i], total)) for total in TOTALS]


def _by_format(
    plan: Plan, batch: int, cell: Callable[[DeviceUse], str], label: str = ""
) -> list[Line]:
    """Return a row of contexts, and a row of each weight format."""
    found = {f.weights: [c for c in f.cells if c.batch == batch] for f in plan.fits}
    heads: Line = ["context", *(count_text(c.ctx) for c in found[plan.fits[0].weights])]
    return [heads, *([f"{name}{label}", *map(cell, cells)] for name, cells in found.items())]


def _needed(plan: Plan, batch: int) -> str:
    first = plan.fits[0]
    room = first.memory - first.reserve

    def need(size: int) -> str:
        return size_text(size) if size <= room else f"short {size_text(size - room)}"

    lines = _by_format(plan, batch, lambda c: need(c.naive), ", naive")[:2]
    lines += _by_format(plan, batch, lambda c: need(c.built), ", as built")[1:]
    if plan.ranks:
        lines += _by_format(plan, batch, lambda c: str(c.cards or "-"), ", cards needed")[1:]
    where = "on each rank " if first.ranks > 1 else ""
    return _section(f"  needed {where}at batch {batch}", lines, indent=4)


def _devices(plan: Plan) -> str:
    first, *others = dict.fromkeys(f.weights for f in plan.fits)
    heads = [f"{first} naive", "planned", "as built", *(f"{form} as built" for form in others)]
    lines: list[Line] = [["", "memory", *heads]]
    for name, mine in _by_device(plan).items():
        built = [_most(f)[-1] for f in mine]
        lines.append([name, size_text(mine[0].memory), *_most(mine[0])[:-1], *built])
    text = _section(f"{_maximum(plan)} by weights", lines)
    if plan.ranks:
        rows = [[name, *map(_cards, mine)] for name, mine in _by_device(plan).items()]
        head = f"cards needed for {count_text(_longest(plan.fits[0]).ctx)}"
        text += _section(head, [["", first, *others], *rows])
    return text


def _by_device(plan: Plan) -> dict[str, list[Fit]]:
    devices = dict.fromkeys(f.device for f in plan.fits)
    return {name: [f for f in plan.fits if f.device == name] for name in devices}


def _maximum(plan: Plan) -> str:
    f = plan.fits[0]
    each = "" if f.ranks == 1 else f"{f.ranks} ranks, each on a card: "
    return f"{each}maximum context at batch {f.max_context[0].at}"


def comparison_text(plans: Sequence[Plan], nominal: bool = False) -> str:
    """Return one line per variant, then what fits each device."""
    batches = sorted({r.batch for r in plans[0].rows})
    parts = [_totals(plans, nominal), *(_cache_table(plans, batch) for batch in batches)]
    return "\n".join([*parts, *([_matrix(plans)] if plans[0].fits else [])])


def _totals(plans: Sequence[Plan], nominal: bool) -> str:
    forms = dict.fromkeys(w.format for p in plans for w in p.weights)
    lines: list[Line] = [["", "loaded", "active", *forms, *(["nominal"] if nominal else [])]]
    for p in plans:
        held = {w.format: size_text(w.total) for w in p.weights}
        sizes = [held.get(form, "-") for form in forms]
        quoted = [f"{p.weights_as(p.config.dtype).nominal / 1e9:.1f} GB"] if nominal else []
        counts = [f"{n / 1e9:.3f}B" for n in (p.counts.loaded, p.counts.active)]
        lines.append([p.spec.name, *counts, *sizes, *quoted])
    return _section(f"{_units(plans[0])}parameters, and bytes of the decoder's weights", lines)


def _cache_table(plans: Sequence[Plan], batch: int) -> str:
    contexts = sorted({r.ctx for p in plans for r in p.rows})
    lines: list[Line] = [["", *map(count_text, contexts)]]
    width = max(8, *(len(p.spec.name) for p in plans))
    for p in plans:
        found = {r.ctx: r for r in p.rows if r.batch == batch}
        built = ", ".join(filter(None, (p.config.latent_kv, p.config.kv_dtype)))
        labels = ("naive", "planned", f"as built ({built})")
        for key, label in zip(TOTALS, labels, strict=True):
            sizes = [size_text(getattr(found[c], key)) if c in found else "" for c in contexts]
            name = p.spec.name if key == TOTALS[0] else ""
            lines.append([f"{name:<{width}} {label}", *sizes])
    return _section(f"KV cache, batch {batch}", lines)


def _matrix(plans: Sequence[Plan]) -> str:
    first, by_plan = plans[0].fits, [_by_device(p) for p in plans]
    lines: list[Line] = [["", "memory", *(p.spec.name for p in plans)]]
    for name, own in by_plan[0].items():
        cells = ["/".join(_most(f)[-1] for f in fits[name]) for fits in by_plan]
        lines.append([name, size_text(own[0].memory), *cells])
        if plans[0].ranks:
            cards = ["/".join(map(_cards, fits[name])) for fits in by_plan]
            lines.append(["  cards needed", "", *cards])
    several = ("/".join(dict.fromkeys(f.weights for f in p.fits)) for p in plans)
    forms = " or ".join(dict.fromkeys(several))
    longest = count_text(max(c.ctx for c in first[0].cells))
    needed = f"; cards needed for {longest}" if plans[0].ranks else ""
    return _section(f"{_maximum(plans[0])} as built, weights {forms}{needed}", lines)


def _cards(fit: Fit) -> str:
    return str(_longest(fit).cards or "-")
