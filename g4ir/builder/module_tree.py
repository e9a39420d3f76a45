"""The text model as a tree of torch modules, cut from its plain graphs.

Each op belongs to the module that transformers has for it: the module of its weight, or that of
its result's name. Every module's ops become one torch function, in which submodules are called as
modules, with the arguments and results of transformers' modules of that name. So hooks fire, and
what they return replaces a value, by construction.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from g4ir.errors import InputError
from g4ir.ir.flatten import parts
from g4ir.ir.graph import Graph, Node
from g4ir.ir.names import split_name
from g4ir.model.names import HEAD, TOKEN_TABLE, checkpoint_name, value_module
from g4ir.ops.attention import attention_weights, weighted_values
from g4ir.ops.mlp import activate
from g4ir.ops.moe import choose_experts, experts
from g4ir.spec.huggingface_tables import HF_KINDS, family
from g4ir.spec.record import Spec

MODEL = "model"
PREFIX = f"{MODEL}."
#: ends of names of tensors that transformers keeps as buffers, which no optimiser sees
BUFFERS = (".layer_scalar",)
#: keyword arguments of layers and attention: the rope table, the mask, positions, K and V of layers
#: that others read, and a list for attention weights or None
CONTEXT = (
    *("position_embeddings", "attention_mask", "position_ids", "shared_kv_states"),
    "attentions",
)
#: results of modules of a layer, if more than what others read
RESULTS = {
    "self_attn": ("attn.o", "attn.weights"),
    "router": ("moe.probabilities", "moe.weights", "moe.index"),
}
ATTENTION = "self_attn"
CALLED_WITH_CONTEXT = ("layers", ATTENTION)
#: ops on a KV cache, which the modules have not
CACHE_OPS = ("cache_write", "row_start")


def full_name(name: str) -> str:
    """Return the name of a checkpoint's tensor in the text model of transformers."""
    return name if name == HEAD else PREFIX + name


# --- modules ----------------------------------------------------------------------------------


class Submodule(nn.Module):
    """A module of the tree: its ops and calls of its submodules, as one function."""

    function: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Layers(nn.ModuleList):
    """The decoder layers. A list is never called, so that a hook on it would never fire."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise InputError(
            "model.layers is a list, which is never called; register the hook on a layer, as in "
            "module.model.layers[0], or on all: for layer in module.model.layers"
        )

    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = _refuse
    register_backward_hook = _refuse


class ScaledEmbedding(nn.Embedding):
    """A table whose rows are scaled; the row of padding gets no gradient, as in transformers."""

    scale = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.tensor(self.scale).to(self.weight.dtype)


class Activation(nn.Module):
    """An activation by its Hugging Face name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = activate(x, self.name)
        return result

    def extra_repr(self) -> str:
        return self.name


def add_tensor(root: nn.Module, name: str, tensor: nn.Parameter) -> None:
    """Add a parameter, or buffer, under its full name; modules on its path are added."""
    path, _, attribute = name.rpartition(".")
    module = module_at(root, path)
    if name.endswith(BUFFERS):
        module.register_buffer(attribute, tensor.detach())
    else:
        module.register_parameter(attribute, tensor)


def module_at(root: nn.Module, path: str, leaf: nn.Module | None = None) -> nn.Module:
    """Return the module at a path; missing modules are added, with `leaf` at the end."""
    names = path.split(".") if path else []
    for depth, name in enumerate(names, 1):
        if name not in root._modules:
            module = leaf if depth == len(names) else None
            root.add_module(name, module or (Layers() if name == "layers" else Submodule()))
        root = root.get_submodule(name)
    return root


# --- the graph as calls in modules ------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A call in the module at the path `module`; `function` None: a call of that module, a leaf.
    Inputs are names of values, and of params, by their full names."""

    module: str
    function: Callable[..., Any] | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any] = field(default_factory=dict)


class LayerContext(NamedTuple):
    """The values that an attention reads from its layer's context, by name."""

    #: cos, sin
    rope: tuple[str, str]
    mask: str
    #: K, V
    kv: tuple[str, str]


class Tree:
    """Builds the functions of a tree that has its tensors.

    `model` takes embeds, the rows of per-layer embeddings or None, position_ids, masks
    {window: bool [B or 1,1,S,S]}, a list or None for hidden states, and another for attention
    weights; it returns the state after the final norm, [B,S,hidden]. `root` makes logits of that.
    """

    def __init__(self, root: nn.Module, spec: Spec, graphs: Sequence[Graph]) -> None:
        self.root, self.spec = root, spec
        self.params = {v.name: full_name(checkpoint_name(v.name)) for g in graphs for v in g.params}
        self.heads_first = family(spec.model_type).heads_first
        self.tables: dict[str, tuple[str, str]] = {}  # arguments of a rope table -> (cos, sin)
        self.rotations: dict[str, tuple[str, str]] = {}  # attention -> (cos, sin)
        self.alias: dict[str, str] = {}  # values of a layer -> those of all
        self.context: dict[int, LayerContext] = {}
        self.donors = {x.donor for x in spec.layers()} - {None}
        self.has_shared_kv = bool(self.donors)
        self.steps: list[Step] = []
        self.weight_steps: dict[str, Step] = {}  # of weights alone, by result
        self.functions: dict[Any, Callable[..., Any]] = {}  # by source and what it calls

    def build(self, graph: Graph) -> None:
        """Give every module its function; `graph` is the plain prefill graph, with all logits."""
        for n in _unfused(graph.nodes):
            if n.op not in CACHE_OPS:
                for step in RULES.get(n.op, _reference)(self, n):
                    self._add(step)
        self.readers: dict[str, set[int]] = {}
        for i, step in enumerate(self.steps):
            for name in step.inputs:
                self.readers.setdefault(name, set()).add(i)
        steps = list(enumerate(self.steps))
        count = next(i for i, step in steps if not step.module.startswith(MODEL))
        self._build_model(steps[:count])
        self._build_plain("", steps[count:], graph.outputs[0].name)

    def name(self, value: str) -> str:
        return self.alias.get(value, self.params.get(value, value))

    def module_of(self, n: Node) -> str:
        """Return the module of a node: of its weight, or of its result's name."""
        for v in n.inputs:
            if (name := self._weight(v.name)) is not None:
                return name.rpartition(".")[0]
        if n.outputs[0].name.startswith(("logits", "head.")):
            return ""
        return f"{PREFIX}{value_module(n.outputs[0].name)}".rstrip(".")

    def _weight(self, value: str) -> str | None:
        step = self.weight_steps.get(value)
        return step.inputs[0] if step else self.params.get(value)

    def _add(self, step: Step) -> None:
        """Add a step; those of weights alone come right before their reader, in its module."""
        weights = self.params.values()
        if step.function and step.inputs and all(name in weights for name in step.inputs):
            self.weight_steps[step.outputs[0]] = step
            return
        for name in step.inputs:
            if name in self.weight_steps:
                self.steps.append(self.weight_steps.pop(name))
        self.steps.append(step)

    # --- functions ---

    def _build_model(self, steps: list[tuple[int, Step]]) -> None:
        """Build the decoder: layers get their context, and hidden states are collected."""
        names = ("embeds", "ple_rows", "position_ids", "masks", "states", "attentions")
        f = fx.Graph()
        env = {name: f.placeholder(name) for name in names}
        env["positions"] = env["position_ids"]
        env["shared_kv_states"] = f.call_function(dict)
        f.call_function(_append, (env["states"], env["embeds"]))
        for child, group in _group_by_child(MODEL, steps):
            if not child.startswith("layers."):
                self._add_calls(f, env, MODEL, child, group)
                continue
            context = self.context[int(child.removeprefix("layers."))]
            env["position_embeddings"] = tuple(env[name] for name in context.rope)  # type: ignore[assignment]
            window = int(context.mask.removeprefix("mask."))
            env["attention_mask"] = f.call_function(operator.getitem, (env["masks"], window))
            self._add_calls(f, env, MODEL, child, group)
            f.call_function(_append, (env["states"], env[group[-1][1].outputs[0]]))
        self._set_function(f, MODEL, env[steps[-1][1].outputs[0]])

    def _build_plain(self, path: str, steps: list[tuple[int, Step]], result: str) -> None:
        f = fx.Graph()
        env = {name: f.placeholder(f"x{i}") for i, name in enumerate(self._inputs(path, steps))}
        for child, group in _group_by_child(path, steps):
            self._add_calls(f, env, path, child, group)
        self._set_function(f, path, env[result])

    def _build_child(
        self,
        path: str,
        steps: list[tuple[int, Step]],
        inputs: list[str],
        outputs: tuple[str, ...],
    ) -> None:
        """Build a module of the decoder that is no leaf."""
        f, kind = fx.Graph(), _kind(path)
        names = ("hidden_states", "per_layer_input") if kind in CALLED_WITH_CONTEXT else ()
        env: dict[str, Any] = {}
        for i, name in enumerate(inputs):
            env[name] = f.placeholder(names[i] if names else "hidden_states" if i == 0 else f"x{i}")
        if kind in CALLED_WITH_CONTEXT:
            for name in self._context_names():
                env[name] = f.placeholder(name, default_value=None)
        if kind == ATTENTION:
            self._load_context(f, env, path)
        for child, group in _group_by_child(path, steps):
            self._add_calls(f, env, path, child, group)
        if kind == ATTENTION:
            self._store_kv(f, env, path)
        results = tuple(env[name] for name in outputs)
        self._set_function(f, path, results if len(results) > 1 else results[0])

    def _context_names(self) -> tuple[str, ...]:
        return tuple(name for name in CONTEXT if self.has_shared_kv or name != "shared_kv_states")

    def _load_context(self, f: fx.Graph, env: dict[str, Any], path: str) -> None:
        """Bind the values in an attention's keyword arguments."""
        layer = self.spec.layers()[_layer(path)]
        context = self.context[layer.index]
        env[context.mask] = env["attention_mask"]
        for i, name in enumerate(context.rope):
            env[name] = f.call_function(operator.getitem, (env["position_embeddings"], i))
        if layer.donor is not None:
            key = HF_KINDS[layer.kind]
            shared = f.call_function(operator.getitem, (env["shared_kv_states"], key))
            for i, name in enumerate(context.kv):
                heads_first = f.call_function(operator.getitem, (shared, i))
                env[name] = f.call_function(_swap_heads, (heads_first,))

    def _store_kv(self, f: fx.Graph, env: dict[str, Any], path: str) -> None:
        """Store K and V [B,heads,S,d] of an attention for layers that read them."""
        layer = self.spec.layers()[_layer(path)]
        if layer.index in self.donors:
            kv = tuple(
                f.call_function(_swap_heads, (env[x],)) for x in self.context[layer.index].kv
            )
            key = HF_KINDS[layer.kind]
            f.call_function(operator.setitem, (env["shared_kv_states"], key, kv))

    def _add_calls(
        self,
        f: fx.Graph,
        env: dict[str, Any],
        path: str,
        child: str,
        group: list[tuple[int, Step]],
    ) -> None:
        """Add steps of the module itself, or the call of a submodule."""
        if not child:
            for _, step in group:
                operands = tuple(self._value(f, env, path, name) for name in step.inputs)
                assert step.function
                _bind(f, env, f.call_function(step.function, operands, step.attrs), step.outputs)
            return
        child_path, kind = f"{path}.{child}".lstrip("."), _kind(child)
        inputs, outputs = self._inputs(child_path, group), self._outputs(child_path, group)
        args: tuple[Any, ...] = tuple(env[name] for name in inputs)
        if group[0][1].function is not None or len(group) > 1:
            module_at(self.root, child_path)
            self._build_child(child_path, group, inputs, outputs)
        kwargs: dict[str, Any] = {}
        if kind in CALLED_WITH_CONTEXT:
            kwargs = {name: env[name] for name in self._context_names()}
        if kind == ATTENTION:  # transformers calls it with names alone
            kwargs |= {"hidden_states": args[0]}
            args = ()
        _bind(f, env, f.call_module(child, args, kwargs), outputs)
        if kind == ATTENTION:
            f.call_function(_append, (env["attentions"], env[outputs[1]]))

    def _value(self, f: fx.Graph, env: dict[str, Any], path: str, name: str) -> Any:
        if name not in env:  # a param of this module
            env[name] = f.get_attr(name.removeprefix(f"{path}."))
        return env[name]

    def _inputs(self, path: str, group: list[tuple[int, Step]]) -> list[str]:
        """Return the values that a module reads from outside, in order of use, but those of its
        context."""
        outputs = {name for _, step in group for name in step.outputs}
        excluded = {*outputs, *self.params.values()}
        if _kind(path) in CALLED_WITH_CONTEXT:
            context = self.context[_layer(path)]
            excluded |= {*context.rope, context.mask, *context.kv}
        names = dict.fromkeys(name for _, step in group for name in step.inputs)
        return [name for name in names if name not in excluded]

    def _outputs(self, path: str, group: list[tuple[int, Step]]) -> tuple[str, ...]:
        """Return the values that others read, but K and V that go through the context."""
        kind = _kind(path)
        if kind in RESULTS:
            return tuple(f"L{_layer(path)}.{name}" for name in RESULTS[kind])
        indices = {i for i, _ in group}
        outputs = [name for _, step in group for name in step.outputs]
        shared = self.context[_layer(path)].kv if kind in CALLED_WITH_CONTEXT else ()
        external = [x for x in outputs if self.readers.get(x, set()) - indices and x not in shared]
        return tuple(external or outputs[-1:])

    def _set_function(self, f: fx.Graph, path: str, result: Any) -> None:
        f.output(result)
        module = self.root.get_submodule(path)
        code = f.python_code("self")
        key = (code.src, tuple(sorted((name, id(x)) for name, x in code.globals.items())))
        if key not in self.functions:  # layers of the same structure have one function
            self.functions[key] = type(fx.GraphModule(module, f)).forward
        module.function = self.functions[key]  # type: ignore[assignment]


# --- what ops are in transformers' modules ----------------------------------------------------


def _reference(tree: Tree, n: Node) -> Iterator[Step]:
    """Yield the call of an op's reference."""
    inputs, outputs = (tuple(tree.name(v.name) for v in x) for x in (n.inputs, n.outputs))
    yield Step(tree.module_of(n), n.definition.reference, inputs, outputs, dict(n.attrs))


def _linear(tree: Tree, n: Node) -> Iterator[Step]:
    """Yield the call of a projection's nn.Linear."""
    yield Step(linear_path(n), None, (tree.name(n["x"].name),), (n.out.name,))


def _unstack(tree: Tree, n: Node) -> Iterator[Step]:
    """Yield the call in the model, though its results are of layers."""
    for step in _reference(tree, n):
        yield replace(step, module=MODEL)


def _rope_table(tree: Tree, n: Node) -> Iterator[Step]:
    """Yield one table for all layers that have the same."""
    key, names = repr(sorted(n.attrs.items())), tuple(v.name for v in n.outputs)
    if key not in tree.tables:
        tree.tables[key] = f"cos.{len(tree.tables)}", f"sin.{len(tree.tables)}"
        step = Step(MODEL, n.definition.reference, ("positions",), tree.tables[key], dict(n.attrs))
        tree.steps.insert(0, step)
    tree.alias |= dict(zip(names, tree.tables[key], strict=True))
    yield from ()


def _norm(tree: Tree, n: Node) -> Iterator[Step]:
    """Yield a norm; in the layout that transformers has for it."""
    (step,) = _reference(tree, n)
    _, layer, suffix = split_name(n.out.name)
    name, path = n.out.name, f"{PREFIX}layers.{layer}"
    if suffix in ("moe.in", "moe.router_in"):  # experts see tokens, without sequences
        flat, (x, *w) = f"L{layer}.moe.flat", step.inputs
        if suffix == "moe.in":
            yield Step(path, _flatten_tokens, (x,), (flat,))
        yield replace(step, inputs=(flat, *w))
    elif suffix in ("attn.q.norm", "attn.k.norm") and tree.heads_first:
        module, (x, *w) = f"{path}.{ATTENTION}", step.inputs
        yield Step(module, _swap_heads, (x,), (f"{x}.first",))
        yield replace(step, inputs=(f"{x}.first", *w), outputs=(f"{name}.first",))
        yield Step(module, _swap_heads, (f"{name}.first",), (name,))
    else:
        yield step


def _rope(tree: Tree, n: Node) -> Iterator[Step]:
    (step,) = _reference(tree, n)
    tree.rotations[step.module] = (step.inputs[1], step.inputs[2])
    yield step


def _attention(tree: Tree, n: Node) -> Iterator[Step]:
    """Yield attention over the sequence, by the layer's mask; with its weights [B,heads,S,S]."""
    module, weights = tree.module_of(n), n.out.name.replace(".out", ".weights")
    mask, (k, v) = f"mask.{n.attrs['window']}", (x.name for x in n.chunk)
    tree.context[_layer(module)] = LayerContext(tree.rotations[module], mask, (k, v))
    attrs = {name: n.attrs[name] for name in ("scale", "softcap")}
    inputs = (n["q"].name, k, v, mask)
    yield Step(module, _attend, inputs, (n.out.name, weights), attrs)


def _glu(tree: Tree, n: Node) -> Iterator[Step]:
    """Yield the activation, a module, and the product."""
    module, (gate, up) = tree.module_of(n), (v.name for v in n.inputs)
    path = f"{module}.act_fn"
    module_at(tree.root, path, Activation(str(n.attrs["act"])))
    yield Step(path, None, (gate,), (f"{gate}.act",))
    yield Step(module, operator.mul, (f"{gate}.act", up), (n.out.name,))


def _router(tree: Tree, n: Node) -> Iterator[Step]:
    """Yield the scaled states, the projection, an nn.Linear, and the choice of experts."""
    x, scale, proj, per_expert = (tree.name(v.name) for v in n.inputs)
    module, prefix = tree.module_of(n), f"L{split_name(n.outputs[0].name)[1]}.moe"
    scaled, scores, names = f"{prefix}.scaled", f"{prefix}.scores", (v.name for v in n.outputs)
    yield Step(module, _scale, (x, scale), (scaled,), {"root": n.attrs["root"]})
    yield Step(proj.rpartition(".")[0], None, (scaled,), (scores,))
    outputs, attrs = (f"{prefix}.probabilities", *names), {"top_k": n.attrs["top_k"]}
    yield Step(module, choose_experts, (scores, per_expert), outputs, attrs)


def _experts(tree: Tree, n: Node) -> Iterator[Step]:
    x, weights, index, *tensors = (tree.name(v.name) for v in n.inputs)
    layer, flat = split_name(n.out.name)[1], f"{n.out.name}.flat"
    inputs = (x, index, weights, *tensors)
    yield Step(tree.module_of(n), _apply_experts, inputs, (flat,), {"act": n.attrs["act"]})
    inputs = (flat, f"L{layer}.mid")
    yield Step(f"{PREFIX}layers.{layer}", _unflatten_like, inputs, (n.out.name,))


RULES: dict[str, Callable[[Tree, Node], Iterator[Step]]] = {
    "linear": _linear,
    "unstack_layers": _unstack,
    "rope_table": _rope_table,
    "rms_norm": _norm,
    "rope": _rope,
    "attention": _attention,
    "glu": _glu,
    "router": _router,
    "experts": _experts,
}


def linear_path(n: Node) -> str:
    """Return the path of a projection's module; of a tied head too."""
    name = checkpoint_name(n["w"].name)
    return full_name(HEAD if name == TOKEN_TABLE else name).removesuffix(".weight")


def linear_modules(graphs: Iterable[Graph]) -> set[str]:
    """Return the paths of all projections, the routers' too."""
    nodes = [n for g in graphs for n in _unfused(g.nodes)]
    routers = (n["proj"].name for n in nodes if n.op == "router")
    names = {full_name(checkpoint_name(name)).removesuffix(".weight") for name in routers}
    return names | {linear_path(n) for n in nodes if n.op == "linear"}


def _unfused(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield nodes whose ops have a reference; fused nodes as their parts."""
    for n in nodes:
        yield from [n] if n.definition.reference else _unfused(parts(n))


# --- functions of the calls -------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    weights = attention_weights(q, k, mask[:, :, None], scale, softcap)
    return weighted_values(weights, v), weights.flatten(1, 2)


def _scale(x: Tensor, scale: Tensor, root: float) -> Tensor:
    return x * scale * root


def _apply_experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, act: str
) -> Tensor:
    result: Tensor = experts.reference(x, weights, index, gate_up, down, act=act)
    return result


def _swap_heads(x: Tensor) -> Tensor:
    """[B,S,heads,d] to [B,heads,S,d], or back."""
    return x.transpose(1, 2)


def _flatten_tokens(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _unflatten_like(x: Tensor, like: Tensor) -> Tensor:
    return x.view_as(like)


def _append(values: list[Tensor] | None, x: Tensor) -> None:
    if values is not None:
        values.append(x)


# --- names of steps and calls -----------------------------------------------------------------


def _group_by_child(
    path: str, steps: list[tuple[int, Step]]
) -> Iterator[tuple[str, list[tuple[int, Step]]]]:
    """Yield runs of steps by their submodule of `path`, "" for `path` itself."""
    for child, group in groupby(steps, lambda pair: _child(path, pair[1].module)):
        yield child, list(group)


def _child(path: str, module: str) -> str:
    names = module.removeprefix(path).lstrip(".").split(".")
    return ".".join(names[: 2 if names[0] == "layers" else 1])


def _kind(path: str) -> str:
    """Return the last name of a module's path; `layers` for a layer."""
    *parents, name = path.split(".")
    return parents[-1] if name.isdigit() else name


def _layer(path: str) -> int:
    return int(path.removeprefix(f"{PREFIX}layers.").partition(".")[0])


def _bind(f: fx.Graph, env: dict[str, Any], result: fx.Node, names: tuple[str, ...]) -> None:
    """Name the results of a call."""
    if len(names) == 1:
        env[names[0]] = result
        return
    for i, name in enumerate(names):
        env[name] = f.call_function(operator.getitem, (result, i))
