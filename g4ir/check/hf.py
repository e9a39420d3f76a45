"""The transformers text model on an engine's weights, with the engine's roundings.

It rounds where the engine does: K and V to the quantised KV cache's format, activations of linears
with quantised weights. It can also compute in float64 (ir/wide.py) on the same weights, which are
upcast block by block, so that only activations take more memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from g4ir.artefact.directory import LinkedWeights, MergedWeights
from g4ir.builder.load import open_weights
from g4ir.builder.module import refusals_of_transformers, text_model
from g4ir.builder.sources import agreed_spec
from g4ir.engine.engine import Engine
from g4ir.errors import InputError
from g4ir.ir.graph import Node
from g4ir.ir.names import layer_of
from g4ir.ir.wide import Float64Matmuls
from g4ir.model.names import HEAD, TOKEN_TABLE, checkpoint_name
from g4ir.model.text import build_graph, complete_graphs
from g4ir.ops import OPS
from g4ir.ops.codecs import fake_quantize_values
from g4ir.ops.kv_quant import dequantize_rows
from g4ir.ops.latent import keys_values
from g4ir.ops.types import torch_dtype
from g4ir.passes.match import OFF
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.quant.rewrite import schemes_of
from g4ir.ui.progress import Progress
from g4ir.weights.formats import is_coded
from g4ir.weights.origin import CheckpointDirectory, GgufFile, Origin, find_origin, snapshot_of
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint

from .reference import acting

Tensor = torch.Tensor


class HfSession:
    """A transformers model with a KV cache; `forward`: function for steps of one token, by default
    the model's."""

    def __init__(
        self, model: Any, new_cache: Callable[[], Any], forward: Callable[..., Any] | None = None
    ) -> None:
        self.model, self.forward, self.new_cache = model, forward or model.forward, new_cache
        self.cache, self.length = new_cache(), 0
        self.argument, self.rows = cache_argument(model.forward), last_row(model)

    def reset(self) -> None:
        """Empty the cache; a static one in place, since compiled code is bound to its tensors."""
        self.length = 0
        if self.cache.is_compileable:
            self.cache.reset()
        else:
            self.cache = self.new_cache()

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens i64[B, n]; return the logits [B, vocab] after the last one."""
        device, (rows, n) = self.model.device, tokens.shape
        position = torch.arange(self.length, self.length + n, device=device)
        out = (self.forward if n == 1 else self.model.forward)(
            input_ids=tokens.to(device),
            use_cache=True,
            position_ids=position[None].expand(rows, -1),
            **{self.argument: self.cache, "logits_to_keep": self.rows},
        )
        self.length += n
        return out.logits[:, -1]


def cache_argument(f: Callable[..., Any]) -> str:
    """Return the name of the KV cache's parameter: `cache`, or `past_key_values` in transformers
    before 5.24."""
    return "cache" if "cache" in inspect.signature(f).parameters else "past_key_values"


def last_row(model: Any) -> Any:
    """Return the `logits_to_keep` of the last row: 1, as in transformers' own `generate`.

    For an int, transformers 5.24 computes that row alone in layers that share K and V, and raises
    TypeError unless the model has per-layer embeddings: for models that share K and V and have
    none, it is the row's index, [-1].
    """
    text = model.config.get_text_config()
    shares = getattr(text, "num_kv_shared_layers", 0)  # configs of Gemma 3 have no such keys
    fails = shares and not text.hidden_size_per_layer_input
    return torch.tensor([-1]) if fails else 1


def hf_origin(engine: Engine, checkpoint: str | Path | None, caller: str) -> Origin | None:
    """Return the checkpoint for a transformers model: `checkpoint`, or the one that the engine
    refers to, or that of the local hub cache; None for weights of the engine's seed. InputError,
    which names the caller, if there is none."""
    if checkpoint is None and engine.facts.seed is not None:
        return None
    weights = engine.facts.weights
    linked = weights.path if isinstance(weights, LinkedWeights) else None
    if not (path := checkpoint or linked or snapshot_of(engine.spec)):
        problem = f"{engine.label} does not say where its checkpoint is"
        raise InputError(f"{caller}: {problem}; give it with --checkpoint")
    origin = find_origin(path)
    agreed_spec(engine.spec, origin, bool(engine.media.kinds))
    return origin


def hf_model(
    engine: Engine, origin: Origin | None, device: str = "cpu", attention: str = "sdpa"
) -> Any:
    """Return the transformers text model on weights of a checkpoint, or of the engine's seed.
    Quantised weights are dequantised, without the library that quantised them."""
    dtype, seed = torch_dtype(engine.dtype), engine.facts.seed
    if origin is not None:
        source = open_weights(engine, origin, ())
    else:
        assert seed is not None
        source = random_weights(engine.spec, seed, dtype, device)
    try:
        return text_model(engine.spec, source, dtype, device, attention)
    finally:
        source.close()


def load_published(folder: Path, dtype: str, kind: str = "AutoModelForCausalLM") -> Any:
    """Load a checkpoint directory with the transformers class `kind`; return the model in eval
    mode. InputError if transformers refuses it."""
    import transformers
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with refusals_of_transformers(str(folder)):
            model = getattr(transformers, kind).from_pretrained(
                folder, dtype=torch_dtype(dtype), attn_implementation="eager"
            )
        return model.eval()
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def verified_model(engine: Engine, checkpoint: str | Path | None, progress: Progress) -> Any:
    """Return the model that `verify` compares with: transformers loads the checkpoint itself if it
    can; weights that the engine quantised have its dequantised values."""
    origin = hf_origin(engine, checkpoint, "verify --against hf")
    progress(f"transformers loads {origin.path if origin else 'random weights'}")
    plain = (
        not engine.spec.embedding
        and isinstance(origin, CheckpointDirectory)
        and not is_coded(origin.stated)
        and origin.published()
        and not isinstance(engine.facts.weights, MergedWeights)
    )
    if plain:
        assert origin
        model = load_published(origin.path, engine.dtype)
    else:
        model = hf_model(engine, origin, attention="eager")
    if engine.config.quant and (plain or not engine.config.quant.from_checkpoint):
        params = dict(model.get_decoder().named_parameters())
        if head := model.get_output_embeddings():
            params |= {HEAD: head.weight}
        with torch.no_grad():
            for name in schemes_of(engine.config.quant, engine.spec):
                params[checkpoint_name(name)].copy_(engine.param(name))
    return model


def encoder_with_towers(engine: Engine, origin: Origin | None, text: Any) -> Any:
    """Return the transformers model of an encoder's engine with its towers, around a text model; on
    weights of a checkpoint, or of the engine's seed. None for another engine, for one without
    media, and for a GGUF file."""
    if not (engine.spec.embedding and engine.media.kinds) or isinstance(origin, GgufFile):
        return None
    with TemporaryDirectory() as folder:
        path = origin.path if origin else Path(folder, "random")
        if not origin:
            source = random_weights(engine.spec, engine.facts.seed or 0, torch_dtype(engine.dtype))
            write_checkpoint(path, engine.spec, source, media=engine.media.kinds)
        model = load_published(path, engine.dtype, "AutoModel")
    model.language_model = text.model
    return model


def round_activations(engine: Engine, model: Any) -> None:
    """Add hooks that round the inputs of linears with quantised weights as the engine does, if it
    quantises activations."""
    dtype = acting(engine).of(ActivationOptions).to
    if dtype == OFF or engine.config.quant is None:
        return
    schemes = schemes_of(engine.config.quant, engine.spec)
    _, phase = complete_graphs(engine.spec)
    graph = build_graph(engine.spec, phase, all_logits=True)
    names = {n["w"].name for n in graph.find("linear")} & schemes.keys()
    modules = dict(model.get_decoder().named_modules())
    head = dict.fromkeys((HEAD, TOKEN_TABLE), model.get_output_embeddings())
    for weight in map(checkpoint_name, names):
        module = head.get(weight) or modules[weight.removesuffix(".weight")]
        module.register_forward_pre_hook(lambda _, args: (fake_quantize_values(args[0], dtype),))


def rounding_caches(engine: Engine, model: Any) -> Callable[[], Any] | None:
    """Return a factory of transformers caches that round K and V to the engine's KV cache format;
    None if that is not quantised."""
    from transformers import DynamicCache

    to, layers = acting(engine).of(NarrowOptions).to, model.get_decoder().layers
    if to == OFF:
        return None
    # Layer -> the attention node that reads its caches.
    nodes = (n for n in engine.program.graphs["decode"].nodes if n.definition.cache_range)
    readers = {layer_of(n.caches[0].name): n for n in nodes}

    class RoundingCache(DynamicCache):
        """Rounds K and V, then stores them."""

        def update(self, k: Any, v: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            attention = layers[layer_idx].self_attn
            k, v = _rounded_kv(readers[layer_idx], k, v, attention, to)
            return super().update(k, v, layer_idx, *args, **kwargs)

    return lambda: RoundingCache(config=model.config.get_text_config())


def rounded(x: Tensor, to: str) -> Tensor:
    """Return rows [.., d] after quantisation to a dtype and back."""
    reference = OPS["narrow_row"].reference
    assert reference
    return dequantize_rows(reference(x, to=to), x.dtype)


def _rounded_kv(n: Node, k: Tensor, v: Tensor, attention: Any, to: str) -> tuple[Tensor, Tensor]:
    """Return K and V [B,n,T,d] as an attention node reads them from its caches."""
    if n.op != "attention_latent":
        return rounded(k, to), rounded(v, to)
    join = OPS["latent_row"].reference
    assert join
    row = join(v, k, pairs=n.integer("pairs"))
    return keys_values(rounded(row, to), attention.k_norm.weight.to(row.dtype))


@contextmanager
def float64_model(model: Any) -> Iterator[None]:
    """A context in which a transformers text model computes in float64 on its own weights.
    Embedding rows are looked up in the model's dtype, then upcast: their scale and its rounding
    belong to the model."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                hook = module.register_forward_hook(lambda module, args, out: out.double())
                stack.callback(hook.remove)
        # torch's grouped matmul does not support float64.
        before = model.config._experts_implementation
        if before is not None:
            stack.callback(model.set_experts_implementation, before)
            model.set_experts_implementation("eager")
        stack.enter_context(Float64Matmuls())
        yield


@contextmanager
def other_attention(model: Any) -> Iterator[None]:
    """A context that switches a model's attention implementation: eager to sdpa, or the reverse."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager" if before == "sdpa" else "sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
