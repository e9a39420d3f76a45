"""Lets a transformers model round what an engine was asked to round: K and V as its narrowed caches
hold them, and what products with quantised weights take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from g4ir.engine.engine import Engine
from g4ir.ir.graph import Node
from g4ir.ir.names import layer_of
from g4ir.model.names import HEAD, TOKEN_TABLE, checkpoint_name
from g4ir.model.text import build_graph
from g4ir.ops import OPS
from g4ir.ops.codecs import fake_quantized
from g4ir.ops.kv_quant import numbers
from g4ir.ops.latent import keys_values_of_value
from g4ir.ops.rope import rotated_pairs
from g4ir.passes.match import OFF
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.passes.scale_residual import ScaleOptions
from g4ir.quant.rewrite import weights_of


def asked(engine: Engine, name: str) -> str:
    """Return the dtype or format that a pass was asked to round to, or OFF."""
    options = engine.facts.options
    if name in engine.facts.skipped_passes:
        return OFF
    if name == "narrow_kv":
        return options.of(NarrowOptions).to
    return options.of(ActivationOptions).to


def divisor(engine: Engine) -> int:
    """Return what the residual stream of an engine is divided by."""
    skipped = "scale_residual" in engine.facts.skipped_passes
    return 1 if skipped else engine.facts.options.of(ScaleOptions).divisor


def coarse(engine: Engine) -> tuple[str, ...]:
    """Return the grids that an engine was asked to round to."""
    found = (asked(engine, name) for name in ("narrow_kv", "quantize_activations"))
    return tuple(to for to in found if to != OFF)


def round_activations(engine: Engine, model: Any) -> None:
    """Have a transformers model round what its products take, for the quantised weights."""
    form = asked(engine, "quantize_activations")
    if form == OFF or engine.recipe is None:
        return
    held = engine.recipe.schemes(weights_of(engine.spec))
    graph = build_graph(engine.spec, "prefill", all_logits=True)
    names = {n["w"].name for n in graph.find("linear")} & held.keys()
    modules = dict(model.get_decoder().named_modules())
    head = dict.fromkeys((HEAD, TOKEN_TABLE), model.get_output_embeddings())
    for weight in map(checkpoint_name, names):
        module = head.get(weight) or modules[weight.removesuffix(".weight")]
        module.register_forward_pre_hook(lambda _, given: (fake_quantized(given[0], form),))


def rounding_caches(engine: Engine, model: Any) -> Callable[[], Any] | None:
    """Return what makes caches for a transformers model whose K and V are rounded as the engine's
    rows are; None for an engine that holds them in its dtype."""
    from transformers import DynamicCache

    to, layers = asked(engine, "narrow_kv"), model.get_decoder().layers
    if to == OFF:
        return None
    # Layer -> the node that attends to the caches that it owns.
    nodes = (n for n in engine.program.graphs["decode"].nodes if n.definition.held)
    readers = {layer_of(n.caches[0].name): n for n in nodes}

    class RoundingCache(DynamicCache):
        """Rounds what it is given, then keeps it."""

        def update(self, k: Any, v: Any, layer_idx: int, *more: Any, **named: Any) -> Any:
            attention = layers[layer_idx].self_attn
            k, v = _as_read(readers[layer_idx], k, v, attention, to)
            return super().update(k, v, layer_idx, *more, **named)

    return lambda: RoundingCache(config=model.config.get_text_config())


def rounded(x: torch.Tensor, to: str) -> torch.Tensor:
    """Return the numbers that rows [.., d] say once they are held in a dtype, in their own."""
    reference = OPS["narrow_row"].reference
    assert reference
    out: torch.Tensor = numbers(reference(x, to=to), x.dtype)
    return out


def _as_read(
    n: Node, k: torch.Tensor, v: torch.Tensor, attention: Any, to: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V [B,n,T,d] as a node reads them from its caches."""
    if n.op != "attention_latent":
        return rounded(k, to), rounded(v, to)
    pairs = rotated_pairs(n.word("kind"), k.shape[-1], n.number("fraction"))
    join = OPS["latent_row"].reference
    assert join
    row = join(v, k, pairs=pairs)
    return keys_values_of_value(rounded(row, to), attention.k_norm.weight.to(row.dtype))
