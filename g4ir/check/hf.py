"""The transformers text model on an engine's weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from g4ir.engine.artefact import LinkedWeights, MergedWeights
from g4ir.engine.build import agreed_spec
from g4ir.engine.engine import Engine
from g4ir.engine.load import open_weights
from g4ir.errors import InputError, MissingError
from g4ir.model.names import HEAD, checkpoint_name
from g4ir.model.tensors import text_tensors
from g4ir.ops.types import ITEMSIZE, torch_dtype
from g4ir.plan.fit import device_memory
from g4ir.quant.rewrite import weights_of
from g4ir.spec.record import Spec
from g4ir.ui.progress import Progress
from g4ir.ui.units import size_text
from g4ir.weights.checkpoint import WeightSource
from g4ir.weights.formats import is_coded
from g4ir.weights.origin import CheckpointDirectory, Origin, find_origin, snapshot_of
from g4ir.weights.random import RandomCheckpoint

from .memory_check import param_bytes


def need_transformers(asked: str) -> None:
    """MissingError, which says what asked for it, where transformers does not know the model."""
    try:
        from transformers import Gemma4ForCausalLM  # noqa: F401
    except ImportError as e:
        raise MissingError(
            f"{asked} needs transformers 5.17 or newer: `pip install 'g4ir[hf]'`"
        ) from e


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


def known_checkpoint(engine: Engine, given: str | Path | None, asked: str) -> Path:
    """The given checkpoint, or the one that the engine refers to, or that of the local hub cache.
    InputError, which says what asked for it, where there is none."""
    kept = engine.facts.weights
    linked = kept.path if isinstance(kept, LinkedWeights) else None
    found = given or linked or snapshot_of(engine.spec)
    if not found:
        raise InputError(
            f"{asked}: {engine.path} does not say where its checkpoint is; give --checkpoint DIR, "
            f"or build it again if its weights were random"
        )
    return Path(found)


def hf_origin(engine: Engine, checkpoint: str | Path | None, asked: str) -> Origin | None:
    """Return the checkpoint for a transformers model; None for weights of the engine's seed."""
    if checkpoint is None and engine.facts.seed is not None:
        return None
    origin = find_origin(known_checkpoint(engine, checkpoint, asked))
    agreed_spec(engine.spec, origin, bool(engine.media.kinds))
    return origin


def hf_model(
    engine: Engine, origin: Origin | None, device: str = "cpu", attention: str = "sdpa"
) -> Any:
    """Return the transformers text model on weights of a checkpoint, or of the engine's seed,
    without the library that packed them; of quantised weights, what they mean."""
    dtype, seed = torch_dtype(engine.dtype), engine.facts.seed
    source: WeightSource
    if origin is not None:
        source = open_weights(engine, origin, ())
    else:
        assert seed is not None
        source = RandomCheckpoint(engine.spec, seed, dtype, device)
    try:
        return _filled(engine.spec, source, dtype, device, attention)
    finally:
        source.close()


def _filled(
    spec: Spec, source: WeightSource, dtype: torch.dtype, device: str, attention: str
) -> Any:
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
        # Constants that are no checkpoint tensors: rope frequencies and embedding scales.
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        for module in model.modules():
            if type(module).__name__.endswith("ScaledWordEmbedding"):
                module.embed_scale = torch.tensor(module.scalar_embed_scale)
    model.tie_weights()
    return model.to(device)


def verified_model(engine: Engine, checkpoint: str | Path | None, progress: Progress) -> Any:
    """Return the model that `verify` compares with: transformers loads the checkpoint itself where
    it can, and weights that the engine quantised are what their codes mean."""
    origin = hf_origin(engine, checkpoint, "verify --against hf")
    if origin is None:
        progress(f"transformers takes {size_text(_check_room(engine))} of random weights")
    else:
        progress(f"transformers loads {origin.path}")
    plain = (
        isinstance(origin, CheckpointDirectory)
        and not is_coded(origin.stated)
        and origin.published()
        and not isinstance(engine.facts.weights, MergedWeights)
    )
    if plain:
        assert origin
        model = _load_hf(origin.path, engine.dtype)
    else:
        model = hf_model(engine, origin, attention="eager")
    if engine.recipe and (plain or not engine.recipe.held):
        held = dict(model.get_decoder().named_parameters())
        held |= {HEAD: model.get_output_embeddings().weight}
        with torch.no_grad():
            for name in engine.recipe.schemes(weights_of(engine.spec)):
                held[checkpoint_name(name)].copy_(engine.param(name))
    return model


def _check_room(engine: Engine) -> int:
    """Return the bytes of the text model's weights; InputError if they do not fit the memory that
    the engine leaves."""
    size = text_bytes(engine)
    free = device_memory("cpu") - (param_bytes(engine) if engine.device == "cpu" else 0)
    if size > free:
        raise InputError(
            f"verify --against hf: transformers needs {size_text(size)} for the weights, and the "
            f"engine leaves {size_text(max(free, 0))} of memory; use --against reference"
        )
    return size


def text_bytes(engine: Engine) -> int:
    """Return the bytes of the text model's weights in the engine's dtype."""
    return sum(map(math.prod, text_tensors(engine.spec).values())) * ITEMSIZE[engine.dtype]


def _load_hf(directory: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with refusals_of_transformers(str(directory)):
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch_dtype(dtype), attn_implementation="eager"
            )
        return model.eval()
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
