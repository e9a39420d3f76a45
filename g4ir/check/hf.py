"""The transformers text model on weights of any source, without the library that packed them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from g4ir.errors import InputError
from g4ir.model.names import HEAD
from g4ir.spec.record import Spec
from g4ir.weights.checkpoint import WeightSource


@contextmanager
def refusals_of_transformers(what: str) -> Iterator[None]:
    """A context that raises InputError if transformers refuses a config or a checkpoint; its
    strict config classes have errors of their own."""
    from huggingface_hub.errors import StrictDataclassError

    kinds = (OSError, ValueError, RuntimeError, KeyError, TypeError, StrictDataclassError)
    try:
        yield
    except kinds as e:
        raise InputError(f"transformers cannot load {what}: {' '.join(str(e).split())}") from e


def hf_model(
    spec: Spec,
    source: WeightSource,
    dtype: torch.dtype,
    device: str = "cpu",
    attention: str = "sdpa",
) -> Any:
    """Return the transformers text model of a spec with the weights of `source`; of weights in
    codes, what they mean."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = spec.to_hf()
    with refusals_of_transformers(f"the config of spec {spec.name}"), torch.device("meta"):
        config = AutoConfig.for_model(**values.get("text_config", values))
        config._attn_implementation = attention
        model = AutoModelForCausalLM.from_config(config)
    model = model.to(dtype).to_empty(device=device).eval()
    named = dict(model.model.state_dict())
    if not spec.text.tie_word_embeddings:
        named[HEAD] = model.lm_head.weight
    with torch.no_grad():
        for name, t in named.items():
            t.copy_(source.tensor(name))
            source.release(name)
        _restore_buffers(model, config)
    model.tie_weights()
    return model.to(device)


def cache_argument(f: Callable[..., Any]) -> str:
    """Return the name of the KV cache among a function's parameters: `cache`, or `past_key_values`
    before 5.24."""
    return "cache" if "cache" in inspect.signature(f).parameters else "past_key_values"


def rows_kept(model: Any) -> Any:
    """Return the `logits_to_keep` of the last row: 1, as in transformers' own `generate`.

    Given an int, 5.24 computes that row alone in layers that share K and V, and raises TypeError
    unless the model has per-layer embeddings: models without them get the row's index.
    """
    text = model.config.get_text_config()
    fails = text.num_kv_shared_layers and not text.hidden_size_per_layer_input
    return torch.tensor([-1]) if fails else 1


def _restore_buffers(model: Any, config: Any) -> None:
    """Restore constants that are no checkpoint tensors: rope frequencies and embedding scales."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    for module in model.modules():
        if type(module).__name__.endswith("ScaledWordEmbedding"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
