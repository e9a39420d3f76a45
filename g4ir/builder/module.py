"""The model as an nn.Module: the plain graphs over whole sequences, for training and export.

The graphs become torch functions of the ops' references, one for each module that the text model of
transformers has, so autograd, `torch.compile` and `torch.export` see ordinary torch code, and hooks
see the values of transformers. Parameters have its names; projections are nn.Linear modules.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from g4ir.artefact.directory import MANIFEST
from g4ir.engine.engine import Engine
from g4ir.errors import InputError
from g4ir.model.names import HEAD, TOKEN_TABLE, checkpoint_name
from g4ir.model.tensors import dead_tensors
from g4ir.model.text import build_graph
from g4ir.ops.attention import visible
from g4ir.ops.types import torch_dtype
from g4ir.plan.resolve import find_dtype
from g4ir.spec.record import Spec, load_spec, spec_names
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.origin import existing_origin, find_model
from g4ir.weights.random import random_weights as drawn_weights

from .export import held_weights
from .load import open_held
from .module_tree import (
    ScaledEmbedding,
    Submodule,
    Tree,
    add_tensor,
    full_name,
    linear_modules,
    module_at,
)

#: labels that the loss leaves out, as in transformers
IGNORED = -100
INTEGERS = (torch.int64, torch.int32)


class ModuleOutput(NamedTuple):
    """logits [B, S, vocab] in the module's dtype; loss f32[], None without labels. As transformers
    has them, if requested, else None: hidden_states, the embeddings and each layer's result
    [B, S, hidden], the last one normed; attentions, each layer's weights [B, heads, S, S]."""

    logits: Tensor
    loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class ModelOutput(NamedTuple):
    """Result of `module.model`: the state after the final norm, else as ModuleOutput."""

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class ModuleConfig(SimpleNamespace):
    """The text model's config.json of transformers, as attributes; `to_dict()` for PEFT."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class TextModel(Submodule):
    """The decoder without its head: `module.model`."""

    embed_tokens: ScaledEmbedding
    embed_tokens_per_layer: ScaledEmbedding

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.windows = {layer.attention.window or 0 for layer in spec.layers()}

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        per_layer_inputs: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> ModelOutput:
        """Return the states after the final norm, [B, S, hidden]; arguments as of TextModule."""
        for name, flag in (
            ("output_hidden_states", output_hidden_states),
            ("output_attentions", output_attentions),
        ):
            if flag not in (None, False, True):
                raise InputError(f"{name}: expected True or False, found {flag!r}")
        embeds, rows = self._embed(input_ids, inputs_embeds, per_layer_inputs)
        size = (embeds.shape[0], embeds.shape[1])
        if attention_mask is not None:
            _check_rows("attention_mask", attention_mask, size, "1 for tokens, 0 for padding")
        if position_ids is not None:
            _check_rows("position_ids", position_ids, size, "the position of each token")
            position_ids = position_ids.long()
        masks = attention_masks(self.windows, embeds, attention_mask, position_ids)
        if position_ids is None:
            position_ids = torch.arange(size[1], device=embeds.device)[None]
        states: list[Tensor] | None = [] if output_hidden_states else None
        weights: list[Tensor] | None = [] if output_attentions else None
        last = self.function(self, embeds, rows, position_ids, masks, states, weights)
        every = None if states is None else (*states[:-1], last)
        return ModelOutput(last, every, None if weights is None else tuple(weights))

    def _embed(
        self, ids: Tensor | None, embeds: Tensor | None, ple: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return embeddings [B, S, hidden], and rows of the per-layer table if there is one."""
        table = self.embed_tokens
        if table.weight.dtype != self.dtype:
            what = f"parameters are {table.weight.dtype}, and the graphs compute in {self.dtype}"
            raise InputError(f"{what}; give dtype= to g4ir.module, and move to no other")
        if (ids is None) == (embeds is None):
            raise InputError("give either input_ids or inputs_embeds")
        if ids is not None:
            if ids.dim() != 2 or ids.dtype not in INTEGERS:
                raise _unexpected("input_ids", "int64 [batch, sequence]", ids)
            if ple is not None:
                raise InputError("per_layer_inputs goes with inputs_embeds; input_ids say them")
            ids = ids.long()
            rows = self.embed_tokens_per_layer(ids) if self.spec.text.ple else None
            return table(ids), rows
        assert embeds is not None
        width = self.spec.text.hidden_size
        if embeds.dim() != 3 or embeds.shape[2] != width or embeds.dtype != self.dtype:
            raise _unexpected("inputs_embeds", f"{self.dtype} [batch, sequence, {width}]", embeds)
        return embeds, self._per_layer_rows(embeds, ple)

    def _per_layer_rows(self, embeds: Tensor, rows: Tensor | None) -> Tensor | None:
        """Return per_layer_inputs [B, S, layers, dim] as the graph takes them."""
        text = self.spec.text
        if text.ple is None:
            if rows is not None:
                raise InputError("per_layer_inputs: the model has no per-layer embeddings")
            return None
        sizes = (*embeds.shape[:2], text.num_hidden_layers, text.ple.dim)
        if rows is None:
            raise InputError(
                "inputs_embeds: the model also reads per-layer embeddings of the token ids; give "
                f"per_layer_inputs=module.model.embed_tokens_per_layer(ids).view{sizes}, or "
                "input_ids with a hook on module.model.embed_tokens"
            )
        if rows.shape != sizes or rows.dtype != self.dtype:
            raise _unexpected("per_layer_inputs", f"{self.dtype} {[*sizes]}", rows)
        return rows.flatten(2)


class TextModule(nn.Module):
    """The text model over whole sequences, without a KV cache."""

    function: Callable[..., Any]

    def __init__(self, spec: Spec, source: Checkpoint, dtype: str, device: str) -> None:
        super().__init__()
        self.spec, kind = spec, torch_dtype(dtype)
        graphs = [build_graph(spec, phase, True, dtype) for phase in ("embed", "prefill")]
        self.model = TextModel(spec, kind)
        for path in sorted(linear_modules(graphs)):
            module_at(self, path, nn.Linear(1, 1, bias=False, device="meta"))
        for n in graphs[0].find("embedding"):
            path = full_name(checkpoint_name(n["table"].name)).removesuffix(".weight")
            rows, width = map(int, n["table"].type.shape)
            table = ScaledEmbedding(rows, width, spec.tokens.pad, device="meta")
            table.scale = n.number("scale")
            module_at(self, path, table)
        for name in dict.fromkeys(checkpoint_name(v.name) for g in graphs for v in g.params):
            tensor = source.tensor(name).to(device, kind, copy=True)
            add_tensor(self, full_name(name), nn.Parameter(tensor))
            source.release(name)
        if spec.text.tie_word_embeddings:
            add_tensor(self, HEAD, self.get_parameter(full_name(TOKEN_TABLE)))
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                linear.out_features, linear.in_features = linear.weight.shape
        Tree(self, spec, graphs).build(graphs[1])
        self._register_load_state_dict_pre_hook(self._drop_dead)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and computation, whatever that of the file."""
        return self.model.dtype

    @property
    def config(self) -> ModuleConfig:
        """The text model's config of transformers; SpecError names what it cannot express."""
        config = self.spec.to_hf()
        return ModuleConfig(**config.get("text_config", config))

    def extra_repr(self) -> str:
        return f"{self.spec.name}, dtype={self.dtype}"

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        per_layer_inputs: Tensor | None = None,
        past_key_values: None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> ModuleOutput | tuple[Any, ...]:
        """Return the logits after each token of input_ids i64[B, S], with the arguments of
        transformers.

        labels: i64[B, S], not shifted: also return the mean cross entropy of the next tokens,
            without labels of -100.
        attention_mask: integers or bool [B, S], 0 for padding, on either side. Without it there is
            no padding; on the right, that changes nothing before it.
        position_ids: i64[B or 1, S], of the rope; by default 0 to S - 1. Without attention_mask a
            sequence ends where they do not go up by 1: several may be packed in one row.
        inputs_embeds: [B, S, hidden], scaled, in place of input_ids; with per-layer embeddings also
            per_layer_inputs [B, S, layers, dim], scaled.
        logits_to_keep: the last so many positions alone, or those of a tensor of indices; 0: all.
        return_dict: False for a plain tuple in transformers' order: loss, logits, hidden states,
            attentions, without those that are None.

        Raises InputError for a KV cache, which the module has not, and for other shapes.
        """
        if past_key_values is not None or use_cache:
            name = "use_cache" if past_key_values is None else "past_key_values"
            raise InputError(
                f"{name}: g4ir.module has no KV cache; give whole sequences and use_cache=False, "
                "or decode with an engine (g4ir.load)"
            )
        out = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            per_layer_inputs=per_layer_inputs,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        last = out.last_hidden_state
        every = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if labels is not None:
            if labels.shape != last.shape[:2]:
                wanted = f"the shape of input_ids, {[*last.shape[:2]]}"
                raise InputError(f"labels: expected {wanted}; found {[*labels.shape]}")
            if not every:
                raise InputError(
                    "logits_to_keep: the loss needs all logits; leave it or labels out"
                )
        logits = self.function(self, last if every else last[:, _kept(logits_to_keep)])
        loss = None if labels is None else _loss(logits, labels)
        result = ModuleOutput(logits, loss, out.hidden_states, out.attentions)
        if return_dict is False:
            values = (loss, logits, out.hidden_states, out.attentions)
            return tuple(x for x in values if x is not None)
        return result

    def _drop_dead(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Ignore K and V of layers that read those of another layer: the hub's files hold them."""
        for name in dead_tensors(self.spec):
            state.pop(prefix + full_name(name), None)


def module(
    model: Spec | str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    random_weights: int | None = None,
) -> TextModule:
    """Return the text model as an nn.Module: `module(input_ids, labels=None)` has `.logits` and
    `.loss`. Quantised weights become the numbers that they stand for.

    model: an engine directory, a GGUF file, a checkpoint directory, a Hugging Face id or a shipped
    variant whose weights are in the local cache, or a Spec, whose weights are drawn from seed 0.
    dtype: float32 or bfloat16, of parameters and computation.
    random_weights: a seed for weights in place of those of a variant or spec.
    Raises InputError, SpecError or WeightsError that names what is wrong, and the fix.
    """
    kind = find_dtype(dtype)
    if isinstance(model, Engine):
        raise InputError(f"{model.path} is loaded; give its directory")
    if random_weights is not None and isinstance(model, str) and model in spec_names():
        model = load_spec(model)
    if isinstance(model, Spec):
        drawn = drawn_weights(model, random_weights or 0, torch_dtype(kind))
        return TextModule(model, drawn, kind, device)
    if random_weights is not None:
        raise InputError(f"random_weights goes with a variant or a spec; {model} has weights")
    spec, source = _with_weights(model, kind)
    try:
        return TextModule(spec, source, kind, device)
    finally:
        source.close()


def _with_weights(model: str | Path, dtype: str) -> tuple[Spec, Checkpoint]:
    _, path = find_model(model, "random_weights=SEED")
    if (path / MANIFEST).is_file():
        engine = open_held(path)
        return engine.spec, held_weights(engine)
    origin = existing_origin(path)
    spec = origin.spec()
    return spec, origin.open(spec, (), dtype)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    rows, wanted = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().long()
    return nn.functional.cross_entropy(rows, wanted, ignore_index=IGNORED)


def attention_masks(
    windows: set[int], embeds: Tensor, mask: Tensor | None, positions: Tensor | None
) -> dict[int, Tensor]:
    """Return bool [B or 1, 1, S, S] for each window, 0 for none: the keys that each query sees.

    Order and window are those of the tokens in the row, whatever their positions, as in
    transformers; padding, and without a mask other sequences of the row, are not seen.
    """
    index = torch.arange(embeds.shape[1], device=embeds.device)
    allowed = None
    if mask is not None:
        allowed = mask.bool()[:, None]
    elif positions is not None:
        steps = torch.diff(positions, prepend=positions[:, :1] - 1)
        sequence = (steps != 1).cumsum(-1)
        allowed = sequence[:, :, None] == sequence[:, None]
    masks = {}
    for window in sorted(windows):
        causal = visible(index[:, None], index[None], window)
        masks[window] = (causal if allowed is None else causal & allowed)[:, None]
    return masks


def _check_rows(name: str, tensor: Tensor, size: tuple[int, int], meaning: str) -> None:
    """Refuse a tensor that does not have an integer for each token."""
    fits = tensor.dim() == 2 and tensor.shape[1] == size[1]
    fits = fits and (
        tensor.shape[0] == size[0] or (tensor.shape[0] == 1 and name != "attention_mask")
    )
    if not fits or tensor.dtype not in (*INTEGERS, torch.bool):
        raise _unexpected(name, f"integers {[*size]}, {meaning}", tensor)


def _unexpected(name: str, expected: str, tensor: Tensor) -> InputError:
    return InputError(f"{name}: expected {expected}; found {tensor.dtype} {[*tensor.shape]}")


def _kept(logits_to_keep: int | Tensor) -> slice | Tensor:
    if isinstance(logits_to_keep, int):
        return slice(-logits_to_keep, None)
    return logits_to_keep
