"""The model as an nn.Module: the plain graphs over whole sequences, for training and export.

The graphs become one torch function of the ops' references, so autograd, `torch.compile` and
`torch.export` see ordinary torch code. Parameters have the names and places that the text model of
transformers gives them; projections are nn.Linear modules, which can be hooked and replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from g4ir.errors import InputError
from g4ir.ir.flatten import parts
from g4ir.ir.graph import Graph, Node
from g4ir.model.names import HEAD, TOKEN_TABLE, checkpoint_name
from g4ir.model.tensors import dead_tensors
from g4ir.model.text import build_graph
from g4ir.ops.types import torch_dtype
from g4ir.plan.resolve import find_dtype
from g4ir.spec.record import Spec, load_spec, spec_names
from g4ir.weights.checkpoint import WeightSource
from g4ir.weights.origin import existing_origin, find_model
from g4ir.weights.random import RandomCheckpoint

from .artefact import MANIFEST
from .engine import Engine
from .export import HeldWeights
from .load import open_held

#: labels that the loss leaves out, as in transformers
IGNORED = -100
PREFIX = "model."
#: ends of names of tensors that transformers keeps as buffers, which no optimiser sees
BUFFERS = (".layer_scalar",)


class ModuleOutput(NamedTuple):
    """logits [B, S, vocab] in the module's dtype; loss f32[], None without labels."""

    logits: Tensor
    loss: Tensor | None


class TextModule(nn.Module):
    """The text model over whole sequences, without a KV cache."""

    def __init__(self, spec: Spec, source: WeightSource, dtype: str, device: str) -> None:
        super().__init__()
        self.spec, self._dtype = spec, torch_dtype(dtype)
        graphs = [build_graph(spec, phase, True, dtype) for phase in ("embed", "prefill")]
        linears = {_linear_weight(n) for g in graphs for n in g.find("linear")}
        for name in dict.fromkeys(checkpoint_name(v.name) for g in graphs for v in g.params):
            tensor = source.tensor(name).to(device, torch_dtype(dtype), copy=True)
            _place(self, full_name(name), nn.Parameter(tensor), name in linears)
            source.release(name)
        if HEAD in linears and spec.text.tie_word_embeddings:
            _place(self, HEAD, self.get_parameter(full_name(TOKEN_TABLE)), linear=True)
        self._run = _function(self, graphs, spec.tokens.pad)
        self._register_load_state_dict_pre_hook(self._drop_dead)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> ModuleOutput:
        """Return the logits after each token of input_ids i64[B, S]; with labels i64[B, S], which
        are not shifted, also the mean cross entropy of the next tokens, without labels of -100.
        Shorter sequences are padded on the right, with labels of -100 there."""
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            found = f"{input_ids.dtype} {[*input_ids.shape]}"
            raise InputError(f"input_ids: expected int64 [batch, sequence], found {found}")
        if labels is not None and labels.shape != input_ids.shape:
            wanted = f"the shape of input_ids, {[*input_ids.shape]}"
            raise InputError(f"labels: expected {wanted}; found {[*labels.shape]}")
        table = self.get_parameter(full_name(TOKEN_TABLE))
        if table.dtype != self._dtype:
            what = f"parameters are {table.dtype}, and the graphs compute in {self._dtype}"
            raise InputError(f"{what}; give dtype= to g4ir.module, and move to no other")
        logits = self._run(self, input_ids.long())
        return ModuleOutput(logits, None if labels is None else _loss(logits, labels))

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
    dtype: float32, bfloat16 or float16, of parameters and computation.
    random_weights: a seed for weights in place of those of a variant or spec.
    Raises InputError, SpecError or WeightsError that names what is wrong, and the fix.
    """
    kind = find_dtype(dtype)
    if isinstance(model, Engine):
        raise InputError(f"{model.path} is loaded; give its directory")
    if random_weights is not None and isinstance(model, str) and model in spec_names():
        model = load_spec(model)
    if isinstance(model, Spec):
        drawn = RandomCheckpoint(model, random_weights or 0, torch_dtype(kind))
        return TextModule(model, drawn, kind, device)
    if random_weights is not None:
        raise InputError(f"random_weights goes with a variant or a spec; {model} has weights")
    spec, source = _with_weights(model, kind)
    try:
        return TextModule(spec, source, kind, device)
    finally:
        source.close()


def _with_weights(model: str | Path, dtype: str) -> tuple[Spec, WeightSource]:
    _, path = find_model(model, "random_weights=SEED")
    if (path / MANIFEST).is_file():
        engine = open_held(path)
        return engine.spec, HeldWeights(engine)
    origin = existing_origin(path)
    spec = origin.spec()
    return spec, origin.open(spec, (), dtype)


def full_name(name: str) -> str:
    """Return the name of a checkpoint's tensor in the text model of transformers."""
    return name if name == HEAD else PREFIX + name


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    rows, wanted = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().long()
    return nn.functional.cross_entropy(rows, wanted, ignore_index=IGNORED)


# --- the tree of modules ----------------------------------------------------------------------


def _place(root: nn.Module, name: str, tensor: nn.Parameter, linear: bool) -> None:
    """Add a parameter, or buffer, under its name; `linear`: its module is an nn.Linear."""
    *path, last = name.split(".")
    for at, part in enumerate(path):
        if part not in root._modules:
            many = path[at + 1 : at + 2] and path[at + 1].isdigit()
            root.add_module(part, nn.ModuleList() if many else nn.Module())
        if linear and at == len(path) - 1:
            rows, columns = tensor.shape
            root.add_module(part, nn.Linear(columns, rows, bias=False, device="meta"))
        root = root.get_submodule(part)
    if name.endswith(BUFFERS):
        root.register_buffer(last, tensor.detach())
    else:
        root.register_parameter(last, tensor)


def _linear_weight(n: Node) -> str:
    """Return the name of a projection's weight; of a tied head too."""
    name = checkpoint_name(n["w"].name)
    return HEAD if name == TOKEN_TABLE else name


# --- graphs as a torch function ---------------------------------------------------------------


def _function(
    root: nn.Module, graphs: list[Graph], pad: int | None
) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return (module, ids [B, S]) -> logits [B, S, vocab]; each graph takes what those before it
    return. The embeddings of `pad` get no gradient, as in transformers."""
    f = fx.Graph()
    ids = f.placeholder("ids")
    env: dict[str, fx.Node] = {"tokens": ids}
    env["positions"] = f.call_function(_positions, (ids,))
    env["lengths"] = f.call_function(_lengths, (ids,))
    for g in graphs:
        projections = {n["w"].name for n in g.find("linear")}  # which nn.Linear holds
        for v in g.params:
            if v.name not in projections:
                env[v.name] = f.get_attr(full_name(checkpoint_name(v.name)))
        for v in g.state:
            shape = tuple(int(d) for d in v.type.shape[2:])
            env[v.name] = f.call_function(_no_slots, (env["embeds"], *shape))
        for n in _opened(g.nodes):
            if n.op != "cache_write":  # of tokens that no later call reads
                _call(f, n, env, pad)
    f.output(env[graphs[-1].outputs[0].name])
    made = fx.GraphModule(root, f)
    function: Callable[[nn.Module, Tensor], Tensor] = type(made).forward
    return function


def _call(f: fx.Graph, n: Node, env: dict[str, fx.Node], pad: int | None) -> None:
    """Add a node: a projection calls its nn.Linear, any other op its reference."""
    if n.op == "linear":
        name = full_name(_linear_weight(n)).removesuffix(".weight")
        env[n.out.name] = f.call_module(name, (env[n["x"].name],))
        return
    inputs = tuple(env[v.name] for v in n.inputs)
    function: Callable[..., Any] | None = n.definition.reference
    attrs: dict[str, Any] = dict(n.attrs)
    if n.op == "embedding":
        function, attrs = _embedding, attrs | {"pad": pad}
    assert function
    made = f.call_function(function, inputs, attrs)
    many = len(n.outputs) > 1
    for i, v in enumerate(n.outputs):
        env[v.name] = f.call_function(operator.getitem, (made, i)) if many else made


def _opened(nodes: tuple[Node, ...] | list[Node]) -> Iterator[Node]:
    """Yield nodes whose ops have a reference, in the place of fused ones."""
    for n in nodes:
        yield from [n] if n.definition.reference else _opened(parts(n))


def _embedding(table: Tensor, ids: Tensor, scale: float, pad: int | None) -> Tensor:
    return nn.functional.embedding(ids, table, pad) * torch.tensor(scale).to(table.dtype)


def _positions(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def _lengths(ids: Tensor) -> Tensor:
    return ids.new_full((ids.shape[0],), ids.shape[1])


def _no_slots(embeds: Tensor, heads: int, dim: int) -> Tensor:
    """Return an empty KV cache, [0, B, heads, dim]."""
    return embeds.new_empty((0, embeds.shape[0], heads, dim))
