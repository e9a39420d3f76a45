"""Text reports of plans: of one variant, and of several models side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from g4ir.passes.latent_kv import PLAIN
from g4ir.ui.table import Line, aligned
from g4ir.ui.units import count_text, rounded_count, size_text

from .footprint import reserve
from .gpus import SIZE_RULE, Gpu
from .records import Largest, MemoryUse, Plan

#: share of the roofline that a decode step reaches, as measured with Gemma 3 270M in Q4_K_M on two
#: cores of a Xeon (bench/results/270m.json); no GPU has been measured
MEASURED_SHARE = 0.65


def _section(head: str, lines: Iterable[Line]) -> str:
    return f"{head}\n{aligned(lines, indent=2)}"


def plan_text(plan: Plan) -> str:
    """Describe one variant: parameters, weights, caches, and what fits."""
    batches = sorted({r.batch for r in plan.rows})
    parts = [_title(plan), _parameters(plan), _weights(plan)]
    parts += [_caches(plan, batch) for batch in batches]
    parts += [_needed(plan, batch) for batch in batches]
    parts += [_largest(plan, plan.gpu)] if plan.gpu else []
    if plan.rows[0].step_s is not None:
        parts += [f(plan, batch) for batch in batches for f in (_steps, _rates)]
    return "\n".join(parts)


def _title(plan: Plan) -> str:
    c, text = plan.config, plan.spec.text
    about = [
        f"{plan.spec.name}: {text.num_hidden_layers} layers",
        f"up to {count_text(text.max_position_embeddings)} tokens",
        f"{c.dtype} by {c.backend} on {c.device}",
        *([f"one of {c.ranks} ranks"] if c.ranks > 1 else []),
        f"latent KV {c.latent_kv}",
        *([f"KV cache {c.kv_dtype}"] if c.kv_dtype else []),
        *([f"{c.draft_tokens} draft tokens"] if c.draft_tokens else []),
        *([f"draft model {c.drafter.name}"] if c.drafter else []),
        f"prefill chunk {c.limits.prefill_chunk}",
    ]
    return f"{', '.join(about)}\n{_units(plan)}"


def _units(plan: Plan) -> str:
    """Explain GB and GiB if the plan has a device, whose memory may be given in either unit."""
    return f"{SIZE_RULE}\n" if plan.gpu else ""


def _parameters(plan: Plan) -> str:
    n = plan.counts
    rows = {
        "published": n.hub_parameters,
        "as loaded": n.loaded,
        "decoder": n.text,
        "active per token": n.active,
        "token table" if n.head or n.is_encoder else "token table, also the head": n.embed,
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


def _weights(plan: Plan) -> str:
    every, config = plan.weights, plan.config
    where = "in RAM" if config.device == "cpu" else "on the device"
    rows = {
        "decoder": [w.decoder for w in every],
        where: [w.device for w in every],
        "in host memory": [w.host for w in every],
        "in the file, by row": [w.mapped for w in every],
    }
    lines = [[k, *map(size_text, v)] for k, v in rows.items() if any(v)]
    text = _section("weights", [["", *(w.format for w in every)], *lines])
    upcast = dict(pair for w in every for pair in w.upcast.items())
    if not upcast:
        return text
    stored = ", ".join(f"{weight_format} as {to}" for weight_format, to in upcast.items())
    backend = f"backend {config.backend} on {config.device}"
    return f"{text}  {backend} stores these formats in more bits: {stored}\n"


def _by_context(
    plan: Plan, batch: int, head: str, lines: Iterable[tuple[str, str, Callable[[MemoryUse], str]]]
) -> str:
    """Return the lines of a table with a column per context; a line is given by label, weight
    format, and a function that returns a cell."""
    table: list[Line] = [["context", *map(count_text, sorted({r.ctx for r in plan.rows}))]]
    for label, weight_format, cell in lines:
        rows = (r for r in plan.rows if (r.weights, r.batch) == (weight_format, batch))
        table.append([label, *map(cell, rows)])
    return _section(f"{head}, batch {batch}", table)


def _caches(plan: Plan, batch: int) -> str:
    config, weight_format = plan.config, plan.rows[0].weights
    latent = f"latent KV {config.latent_kv}" if config.latent_kv != PLAIN else None
    names = {
        "naive": "naive: full context",
        "planned": ", ".join(filter(None, ("planned: windows", latent, config.kv_dtype))),
        "activations": "activations",
        "workspace": "workspace",
    }

    def cell(name: str, r: MemoryUse) -> str:
        return size_text(getattr(r, name))

    lines = ((label, weight_format, partial(cell, name)) for name, label in names.items())
    return _by_context(plan, batch, "KV cache", lines)


def _needed(plan: Plan, batch: int) -> str:
    def need(r: MemoryUse) -> str:
        spare = 0 if r.spare is None else r.spare
        return f"short {size_text(-spare)}" if spare < 0 else size_text(r.needed)

    memory = "RAM" if plan.config.device == "cpu" else "GPU memory"
    head = f"{memory} needed, by weight format"
    return _by_context(plan, batch, head, ((w.format, w.format, need) for w in plan.weights))


def _steps(plan: Plan, batch: int) -> str:
    def milliseconds(r: MemoryUse) -> str:
        return f"{1e3 * (r.step_s or 0):.2f} ms"

    head = "roofline time of a decode step, data sheet rates"
    head += ", without collectives" * (plan.config.ranks > 1)
    lines = ((w.format, w.format, milliseconds) for w in plan.weights)
    return _by_context(plan, batch, head, lines)


def _rates(plan: Plan, batch: int) -> str:
    def tokens(r: MemoryUse) -> str:
        rate = f"{MEASURED_SHARE * batch / (r.step_s or 1):.3g}"
        return f"{float(rate):.12g}"  # 1400, not 1.4e+03

    why = "as measured on a CPU"
    if plan.gpu and not plan.gpu.supported:
        why = "g4ir has no kernels for this card"
    head = f"estimated decode, tokens/s: {MEASURED_SHARE:.0%} of the roofline ({why})"
    return _by_context(plan, batch, head, ((w.format, w.format, tokens) for w in plan.weights))


def _largest(plan: Plan, gpu: Gpu) -> str:
    """Return the maximum contexts by batch, and the maximum batches by context, that fit the
    device."""
    memory, first = gpu.memory_bytes, plan.largest[0]
    heads = [f"context at batch {b}" for b in first.max_context]
    heads += [f"batch at {count_text(c)}" for c in first.max_batch]
    ranks = plan.config.ranks > 1
    heads += [f"cards needed at {count_text(max(first.max_batch))}"] * ranks
    lines: list[Line] = [["maximum", *heads]]
    for x in plan.largest:
        batches = (str(n or "-") for n in x.max_batch.values())
        cards = [str(x.cards or "-")] * ranks
        lines.append([x.weights, *map(rounded_count, x.max_context.values()), *batches, *cards])
    reserved = size_text(reserve(memory))
    return _section(f"{gpu.name}: {size_text(memory)}, of which {reserved} are reserved", lines)


def comparison_text(plans: Sequence[Sequence[Plan]]) -> str:
    """Compare models, each planned for the same devices: tables of sizes by model, and, if there
    are devices, a table of the maximum contexts with a line per device."""
    models = [model_plans[0] for model_plans in plans]
    batches = sorted({r.batch for r in models[0].rows})
    parts = [_totals(models), *(_cache_table(models, batch) for batch in batches)]
    return "\n".join([*parts, *([_matrix(plans)] if models[0].gpu else [])])


def _totals(models: Sequence[Plan]) -> str:
    forms = dict.fromkeys(w.format for p in models for w in p.weights)
    lines: list[Line] = [["", "loaded", "active", *forms]]
    for p in models:
        sizes = {w.format: size_text(w.decoder) for w in p.weights}
        counts = [f"{n / 1e9:.3f}B" for n in (p.counts.loaded, p.counts.active)]
        lines.append([p.spec.name, *counts, *(sizes.get(fmt, "-") for fmt in forms)])
    ranks = models[0].config.ranks
    whose = f", on one of {ranks} ranks" if ranks > 1 else ""
    head = f"parameters, and bytes of the decoder's weights{whose}"
    return _section(f"{_units(models[0])}{head}", lines)


def _cache_table(models: Sequence[Plan], batch: int) -> str:
    contexts = sorted({r.ctx for p in models for r in p.rows})
    lines: list[Line] = [["", *map(count_text, contexts)]]
    for p in models:
        rows = {r.ctx: r for r in reversed(p.rows) if r.batch == batch}
        for total in ("naive", "planned"):
            sizes = (size_text(getattr(rows[c], total)) if c in rows else "" for c in contexts)
            lines.append([f"{p.spec.name} {total}", *sizes])
    return _section(f"KV cache, batch {batch}", lines)


def _matrix(plans: Sequence[Sequence[Plan]]) -> str:
    """Return a table: the maximum context of every model on every device, by weight format."""
    lines: list[Line] = [["", "memory", *(group[0].spec.name for group in plans)]]
    for same in zip(*plans, strict=True):
        gpu, *_ = (p.gpu for p in same if p.gpu)
        cells = ("/".join(_longest(x) for x in p.largest) for p in same)
        lines.append([gpu.name, size_text(gpu.memory_bytes), *cells])
    forms = dict.fromkeys("/".join(x.weights for x in group[0].largest) for group in plans)
    batch, *_ = plans[0][0].largest[0].max_context
    return _section(f"maximum context at batch {batch}, weights {' or '.join(forms)}", lines)


def _longest(x: Largest) -> str:
    return rounded_count(next(iter(x.max_context.values())))
