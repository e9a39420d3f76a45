"""`g4ir presets`: options of a build by name, and what each needs for a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from g4ir.plan.options import BuildOptions
from g4ir.plan.plan import Plan
from g4ir.plan.presets import PRESETS, Preset
from g4ir.ui.table import Line, aligned
from g4ir.ui.units import count_text, size_text

from .common import output
from .models import Model, named_model, without_quant
from .plan import plan_model
from .verb import ANY_MODEL, Verb, argument, json_flag


class Presets(Verb):
    """List the presets; with MODEL also the memory that it needs with each."""

    model: str | None = argument(f"memory that it needs with each: {ANY_MODEL}", "MODEL", "?")
    json: bool = json_flag()

    def __call__(self) -> int:
        rows = [asdict(p) for p in PRESETS.values()]
        if self.model is None:
            text = "".join(f"{p.name}: {p.about}\n  {p.flags}\n" for p in PRESETS.values())
            return output(self.json, rows, text)
        model = named_model(self.model)
        head: Line = ["", "context", "batch", "weights", "KV cache", "in all", "memory"]
        plans = [(row, _planned(p, model)) for row, p in zip(rows, PRESETS.values())]
        return output(self.json, rows, aligned([head, *(_line(*p) for p in plans)], indent=0))


def _line(row: dict[str, Any], plan: Plan) -> Line:
    """Add a plan to the row of a preset; return the cells of its line."""
    use, weights = plan.rows[0], plan.weights[0].device + plan.weights[0].host
    facts = {"context": use.ctx, "batch": use.batch, "weights": weights}
    device = plan.config.device
    row["plan"] = {**facts, "kv_cache": use.planned, "needed": use.needed, "device": device}
    sizes = map(size_text, (weights, use.planned, use.needed))
    memory = "RAM" if device == "cpu" else "GPU"
    name = row["name"] + f" --max-seq {use.ctx}" * (use.ctx < row["options"].get("max_seq", 0))
    return [name, count_text(use.ctx), str(use.batch), *sizes, memory]


def _planned(preset: Preset, model: Model) -> Plan:
    """Plan a model as the preset builds it, without media; at its own limit if that is shorter."""
    options = without_quant(BuildOptions(**preset.options, media="none"), preset, model)
    longest = model.spec.text.max_position_embeddings
    ctx = min(options.max_seq or longest, longest)
    return plan_model(model, options, ctx=ctx, batch=options.max_batch)
