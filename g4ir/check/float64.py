"""A transformers model in float64 on weights of 16 bits (ir/wide.py). Such a pass takes the memory
of its activations, whatever the size of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from g4ir.ir.wide import WideProducts

Tensor = torch.Tensor
ROUTER = re.compile(r"layers\.(\d+)\.router")


@contextmanager
def wide_model(
    model: Any,
    given: Mapping[int, Mapping[int, Tensor]] | None = None,
    margins: dict[int, Tensor] | None = None,
) -> Iterator[None]:
    """Make a transformers text model compute in float64 on its own weights. Rows of its tables are
    made as ever, then widened: their scale and its rounding belong to the model.

    given: by layer (the final norm after the last), by index of a token, what it takes instead of
    what it would be given.
    margins: by layer, how far the first expert that a router leaves out lies behind the last that
    it takes, relative to that, f32[T].
    """
    decoder = model.get_decoder()
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                hook = module.register_forward_hook(lambda module, args, made: made.double())
                stack.callback(hook.remove)
        for i, layer in enumerate([*decoder.layers, decoder.norm]):
            if rows := (given or {}).get(i):
                hook = layer.register_forward_pre_hook(_taker(rows), with_kwargs=True)
                stack.callback(hook.remove)
        for name, module in decoder.named_modules():
            if margins is not None and (found := ROUTER.fullmatch(name)):
                hook = module.register_forward_hook(_measurer(margins, int(found[1])))
                stack.callback(hook.remove)
        # Grouped products of experts have no float64.
        before = model.config._experts_implementation
        if before is not None:
            stack.callback(model.set_experts_implementation, before)
            model.set_experts_implementation("eager")
        stack.enter_context(WideProducts())
        yield


def _taker(rows: Mapping[int, Tensor]) -> Callable[..., Any]:
    """Return a hook that puts rows in the place of a layer's input."""
    at = torch.tensor(sorted(rows))
    values = torch.stack([rows[i] for i in at.tolist()])

    def take(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0].clone()
        hidden[0, at.to(hidden.device)] = values.to(hidden)
        return (hidden, *args[1:]), kwargs

    return take


def _measurer(margins: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def measure(router: Any, given: Any, made: Any) -> None:
        k = made[2].shape[-1]
        best = made[0].topk(min(k + 1, made[0].shape[-1]), -1).values.float().cpu()
        # All experts taken: no tie.
        left = best[:, -1] if best.shape[-1] > k else torch.zeros(len(best))
        margins[layer] = 1 - left / best[:, k - 1]

    return measure


@contextmanager
def other_attention(model: Any) -> Iterator[None]:
    """Put a model into its other mode of attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager" if before == "sdpa" else "sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
