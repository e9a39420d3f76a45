"""The text model as a transformers nn.Module, for autograd, hooks, PEFT and `generate`; weights
from a GGUF file, an engine directory, a checkpoint (also a quantised one), or a seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from g4ir.artefact.directory import MANIFEST
from g4ir.engine.engine import Engine
from g4ir.errors import InputError, MissingError
from g4ir.model.media import AUDIO, IMAGE, VIDEO
from g4ir.model.names import HEAD
from g4ir.ops.base import upcast
from g4ir.ops.types import torch_dtype
from g4ir.plan.resolve import find_dtype
from g4ir.spec.record import Spec, load_spec, need_model, spec_names
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.origin import existing_origin, find_model
from g4ir.weights.random import random_weights as drawn_weights

from .export import engine_weights
from .load import open_for_weights


def module(
    model: Spec | str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    random_weights: int | None = None,
) -> Any:
    """Return the text model as a transformers nn.Module: `module(input_ids, labels=None)` returns
    `.logits` and `.loss`; an encoder's `module(input_ids, attention_mask=None)` returns embeddings
    f32 [B, size], with padding masked. `module.spec` is its spec. Quantised weights are
    dequantised.

    model: an engine directory, a GGUF file, a checkpoint directory, a Hugging Face id or a shipped
    variant whose weights are in the local cache, or a Spec, whose weights are drawn from seed 0.
    dtype: float32 or bfloat16, of parameters and computation.
    random_weights: seed of random weights, for a variant (instead of its weights) or a Spec.
    Raises a G4Error that names what is wrong, and the fix.
    """
    need_transformers("g4ir.module")
    kind = find_dtype(dtype)
    if isinstance(model, Engine):
        raise InputError(
            f"expected a model, found a loaded engine; give its directory, {model.path}"
        )
    if random_weights is not None and isinstance(model, str) and model in spec_names():
        model = load_spec(model)
    if isinstance(model, Spec):
        spec, source = model, drawn_weights(model, random_weights or 0, torch_dtype(kind))
    elif random_weights is not None:
        raise InputError(f"random_weights goes with a variant or a Spec, and {model} is neither")
    else:
        spec, source = _with_weights(model, kind)
    try:
        model_module = text_model(need_model(spec), source, torch_dtype(kind), device, "eager")
    finally:
        source.close()
    model_module.spec, model_module.config.use_cache = spec, False
    return model_module


def _with_weights(model: str | Path, dtype: str) -> tuple[Spec, Checkpoint]:
    _, path = find_model(model, "random_weights=SEED")
    if (path / MANIFEST).is_file():
        engine = open_for_weights(path)
        return engine.spec, engine_weights(engine)
    origin = existing_origin(path)
    spec = origin.spec()
    return spec, origin.open(spec, (), dtype)


def need_transformers(asked: str) -> None:
    """Raise MissingError, naming the caller's feature, if transformers is missing or too old for
    the model."""
    try:
        from transformers import Gemma4ForCausalLM  # noqa: F401
    except ImportError as e:
        raise MissingError(
            f"{asked} needs transformers 5.17 or newer: `pip install 'g4ir[hf]'`"
        ) from e


@contextmanager
def refusals_of_transformers(name: str) -> Iterator[None]:
    """Convert transformers' errors about a config or checkpoint to InputError; strict config
    classes raise StrictDataclassError."""
    from huggingface_hub.errors import StrictDataclassError

    kinds = (OSError, ValueError, RuntimeError, KeyError, TypeError, StrictDataclassError)
    try:
        yield
    except kinds as e:
        raise InputError(f"transformers cannot load {name}: {' '.join(str(e).split())}") from e


def text_model(
    spec: Spec, source: Checkpoint, dtype: torch.dtype, device: str, attention: str
) -> Any:
    """Return the transformers text model with these weights, in eval mode; an EncoderModule for an
    encoder's spec. attention: attention implementation, `eager` or `sdpa`. MissingError if this
    transformers lacks the model, InputError if it refuses the config."""
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    values = spec.to_hf()
    values = values.get("text_config", values)
    if values["model_type"] not in transformers.CONFIG_MAPPING:
        version, kind = transformers.__version__, values["model_type"]
        fix = "install a newer one: `pip install -U transformers`"
        raise MissingError(f"transformers {version} has no {kind}, which {spec.name} is; {fix}")
    with refusals_of_transformers(f"the config of spec {spec.name}"), torch.device("meta"):
        config = AutoConfig.for_model(**values)
        config._attn_implementation = attention
        if spec.embedding:
            model: Any = EncoderModule(AutoModel.from_config(config), spec.embedding.dense)
        else:
            model = AutoModelForCausalLM.from_config(config)
    model = model.to(dtype).to_empty(device=device).eval()
    named = dict(model.model.state_dict())
    if not spec.embedding and not spec.text.tie_word_embeddings:
        named[HEAD] = model.lm_head.weight
    with torch.no_grad():
        for name, t in named.items():
            t.copy_(source.tensor(name))
            source.release(name)
        # Buffers that are not in checkpoints: RoPE frequencies and embedding scales.
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        for module in model.modules():
            if type(module).__name__.endswith("ScaledWordEmbedding"):
                module.embed_scale = torch.tensor(module.scalar_embed_scale)
    (model.model if spec.embedding else model).tie_weights()
    return model.to(device)


#: kind of media -> keyword of transformers' model -> input of the tower
MEDIA_ARGUMENTS = {
    IMAGE: {"pixel_values": "patches", "image_position_ids": "positions"},
    VIDEO: {"pixel_values_videos": "patches", "video_position_ids": "positions"},
    AUDIO: {"input_features": "features", "input_features_mask": "mask"},
}


class EncoderModule(torch.nn.Module):
    """transformers' text model (`model`), and what sentence-transformers computes after it: the
    mean over the tokens of a text, dense layers without bias (`model.dense`), L2 normalisation."""

    def __init__(self, model: Any, widths: Sequence[int]) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        sizes = zip((self.config.hidden_size, *widths), widths)
        layers = (torch.nn.Linear(*size, bias=False) for size in sizes)
        # A submodule, so that its tensors have the checkpoint's names.
        model.dense = torch.nn.ModuleList(torch.nn.ModuleDict({"linear": x}) for x in layers)

    def get_decoder(self) -> Any:
        """Return the text model; transformers' models have it under this name."""
        return self.model

    def get_output_embeddings(self) -> None:
        """Return None: there is no LM head."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> torch.Tensor:
        """Return embeddings f32 [B, size], L2-normalised. input_ids: i64 [B, S]; attention_mask:
        [B, S], 0 for padding, which is at the end of a text."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.pooled(hidden, mask)

    def with_media(self, with_towers: Any, input_ids: Any, kind: str, feeds: Any) -> torch.Tensor:
        """Return the embeddings of ids with placeholders for one medium; `with_towers`: the model
        of `encoder_with_towers`; `feeds`: inputs of the medium's tower."""
        names = {name: feeds[own] for name, own in MEDIA_ARGUMENTS[kind].items()}
        if kind == VIDEO:
            names["num_frames_per_video"] = torch.tensor([1])
        hidden = with_towers(input_ids=input_ids, **names).last_hidden_state
        return self.pooled(hidden, torch.ones_like(input_ids))

    def pooled(self, hidden: Any, mask: Any) -> torch.Tensor:
        """Return the embeddings f32 [B, size] of texts from their hidden states [B, S,
        hidden_size]; mask: [B, S], 0 for padding."""
        weights = mask.to(upcast(hidden).dtype).unsqueeze(-1)
        x = ((upcast(hidden) * weights).sum(1) / weights.sum(1)).to(hidden.dtype)
        for layer in self.model.dense:
            x = layer["linear"](x)
        return torch.nn.functional.normalize(upcast(x), dim=-1)
