"""Hooks and arguments of g4ir.module beside those of transformers, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

import g4ir
from g4ir.builder.module import TextModule
from g4ir.errors import G4Error
from g4ir.spec.record import Spec, load_spec
from tests.configs import random_spec
from tests.oracle import hf_model, random_tokens
from tests.test_module import small

#: every shape of a family: K=V, experts, per-layer embeddings with shared K and V, Gemma 3, text
#: models of media; a softcap of attention, an untied head
SPECS = {
    name: load_spec(name)
    for name in ("tiny-dense", "tiny-moe", "tiny-ple", "tiny-gemma3", "tiny-media", "tiny-unified")
}
SPECS |= {f"random-{seed}": random_spec(seed) for seed in (2, 7, 1001)}
TOLERANCE = 1e-4
#: of transformers alone, or with records as results: not compared
NOT_COMPARED = ("", "model", "model.layers", "model.rotary_emb")
#: in transformers called for each expert; the module computes experts in one call
PER_EXPERT = ".experts.act_fn"


@cache
def pair(name: str) -> tuple[Any, TextModule]:
    """A model of transformers and the module with the same weights."""
    spec = SPECS[name]
    theirs, ours = hf_model(spec), g4ir.module(spec)
    state = theirs.state_dict()
    ours.load_state_dict({name: state[name] for name in ours.state_dict()})
    return theirs, ours


def ids_of(spec: Spec) -> torch.Tensor:
    """Ids [2, S] longer than a window."""
    return random_tokens(spec, 2, 2 * (spec.text.sliding.window or 8) + 5)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest of b."""
    a, b = a.detach().double(), b.detach().double()
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def tensors(values: Any) -> list[torch.Tensor]:
    """The tensors of positional arguments or of a result, in order."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [x for x in values or () if isinstance(x, torch.Tensor)]


Calls = dict[str, tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]]


def record(module: Any, run: Callable[[], Any]) -> Calls:
    """Inputs, results and keyword arguments of each submodule's last call."""
    calls: Calls = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_: Any, args: Any, kwargs: Any, out: Any) -> None:
            copies = [[t.detach().clone() for t in tensors(x)] for x in (args, out)]
            calls[name] = (copies[0], copies[1], dict(kwargs))

        return keep

    handles = [
        m.register_forward_hook(hook(name), with_kwargs=True)
        for name, m in module.named_modules()
        if name not in NOT_COMPARED and not name.endswith(PER_EXPERT)
    ]
    run()
    for handle in handles:
        handle.remove()
    return calls


@contextmanager
def hooked(module: Any, hook: Callable[..., Any], pre: bool = False) -> Iterator[None]:
    add = module.register_forward_pre_hook if pre else module.register_forward_hook
    handle = add(hook)
    yield
    handle.remove()


@pytest.mark.parametrize("name", SPECS)
def test_hooks_of_every_module_see_the_values_of_transformers(name: str) -> None:
    theirs, ours = pair(name)
    ids = ids_of(ours.spec)
    want = record(theirs, lambda: theirs(ids, use_cache=False))
    got = record(ours, lambda: ours(ids))
    assert got.keys() == want.keys()
    for module, (args, results, kwargs) in want.items():
        for mine, other in zip(got[module][:2], (args, results), strict=True):
            assert len(mine) == len(other), module
            for a, b in zip(mine, other, strict=True):
                assert distance(a, b) < TOLERANCE, module
        keys = {"hidden_states", "position_embeddings", "position_ids"} & kwargs.keys()
        for key in keys:
            for a, b in zip(tensors(got[module][2][key]), tensors(kwargs[key]), strict=True):
                assert distance(a, b) < TOLERANCE, (module, key)


def swap_first(values: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same result with its first tensor changed, as a hook returns it."""
    return change(values) if isinstance(values, torch.Tensor) else (change(values[0]), *values[1:])


#: modules of a layer, whatever the family
PATCHED = (
    *("model.embed_tokens", "model.norm", "lm_head", "model.layers.1", "model.layers.1.mlp"),
    *(f"model.layers.1.self_attn{x}" for x in ("", ".q_proj", ".k_proj", ".k_norm", ".o_proj")),
    *("model.layers.1.input_layernorm", "model.layers.1.mlp.act_fn"),
)


@pytest.mark.parametrize("name", ("tiny-moe", "tiny-ple", "tiny-gemma3"))
def test_what_hooks_return_replaces_values_as_in_transformers(name: str) -> None:
    """Results and inputs of modules, K and V that later layers read, and what experts choose."""
    theirs, ours = pair(name)
    ids, text = ids_of(ours.spec), ours.spec.text
    shared = text.first_kv_shared_layer - 1 if text.num_kv_shared_layers else 2
    router = ("model.layers.1.router.proj", "model.layers.1.experts") if text.moe else ()
    ple = ("model.layers.1.per_layer_input_gate", "model.embed_tokens_per_layer")
    modules = (
        *PATCHED,
        f"model.layers.{shared}.self_attn.v_proj",
        *router,
        *(ple * bool(text.ple)),
    )
    plain = ours(ids).logits
    with torch.no_grad():
        for module in modules:
            logits = []
            for model in (theirs, ours):
                at = model.get_submodule(module)
                with hooked(at, lambda m, args, out: swap_first(out, lambda x: x.flip(-1) * 0.7)):
                    logits.append(model(ids, use_cache=False).logits)
            assert distance(logits[1], logits[0]) < TOLERANCE, module
            assert not torch.equal(logits[1], plain), module
        for module in ("model.layers.1", "model.norm", "model.layers.1.mlp"):
            logits = []
            for model in (theirs, ours):
                at = model.get_submodule(module)
                with hooked(at, lambda m, args: (args[0] * 0.5, *args[1:]), pre=True):
                    logits.append(model(ids, use_cache=False).logits)
            assert distance(logits[1], logits[0]) < TOLERANCE, module
            assert not torch.equal(logits[1], plain), module


def test_hooks_with_keywords_prepended_removed_and_always_called() -> None:
    ours = pair("tiny-dense")[1]
    ids, seen = ids_of(ours.spec), []
    layer: Any = ours.model.layers[3]  # type: ignore[index]

    def hidden(_: Any, args: Any, kwargs: Any) -> Any:
        seen.append("pre")
        return args, kwargs | {"hidden_states": kwargs["hidden_states"] * 0}

    def fails(*_: Any) -> None:
        raise RuntimeError("stop here")

    handles = [
        layer.self_attn.register_forward_pre_hook(hidden, with_kwargs=True),
        layer.self_attn.o_proj.register_forward_hook(lambda *_: seen.append("second")),
        layer.self_attn.o_proj.register_forward_hook(lambda *_: seen.append("first"), prepend=True),
    ]
    zeroed = ours(ids).logits
    assert seen == ["pre", "first", "second"]
    for handle in handles:
        handle.remove()
    with hooked(layer.self_attn.o_proj, lambda m, args, out: out * 0):
        assert distance(zeroed, ours(ids).logits) < TOLERANCE
    layer.mlp.register_forward_hook(lambda *_: seen.append("always"), always_call=True)
    with hooked(layer.mlp.down_proj, fails), pytest.raises(RuntimeError, match="stop here"):
        ours(ids)
    assert seen[-1] == "always"


def gradients_of(
    model: Any, modules: tuple[str, ...], ids: torch.Tensor
) -> dict[str, list[torch.Tensor]]:
    """Gradients of inputs and results of each module, from full backward hooks."""
    seen: dict[str, list[torch.Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_: Any, inputs: Any, outputs: Any) -> None:
            seen[name] = [*tensors(inputs), *tensors(outputs)]

        return keep

    handles = [model.get_submodule(m).register_full_backward_hook(hook(m)) for m in modules]
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", ("tiny-moe", "tiny-ple", "tiny-gemma3"))
def test_backward_hooks_see_the_gradients_of_transformers(name: str) -> None:
    theirs, ours = pair(name)
    ids = ids_of(ours.spec)
    modules = ("model.layers.1.mlp", "model.layers.2.self_attn.q_proj", "model.norm", "lm_head")
    modules += ("model.layers.1.pre_feedforward_layernorm",)
    both = [gradients_of(model, modules, ids) for model in (theirs, ours)]
    assert both[0].keys() == both[1].keys() == {*modules}
    for module, gradients in both[0].items():
        for a, b in zip(both[1][module], gradients, strict=True):
            assert distance(a, b) < TOLERANCE, module


@pytest.mark.parametrize("name", ("tiny-moe", "tiny-ple", "tiny-gemma3"))
def test_every_module_is_called_or_refuses_hooks(name: str) -> None:
    ours = pair(name)[1]
    called, refused, handles = [], [], []
    for module in ours.modules():
        try:
            handles.append(module.register_forward_hook(lambda m, *_: called.append(m)))
        except G4Error as err:
            assert "model.layers is a list" in str(err)
            refused.append(module)
    ours(ids_of(ours.spec))
    for handle in handles:
        handle.remove()
    assert refused == [ours.model.layers]
    assert {*called} == {*ours.modules()} - {*refused}
    for kind in ("forward_pre", "full_backward", "full_backward_pre"):
        with pytest.raises(G4Error, match="never called"):
            getattr(ours.model.layers, f"register_{kind}_hook")(print)


def test_compiled_and_exported_programs_have_the_hooks() -> None:
    ours = g4ir.module(small("tiny-dense"))
    ids = ids_of(ours.spec)
    plain = ours(ids).logits
    with hooked(ours.model.layers[1], lambda m, args, out: out.flip(-1)):  # type: ignore[index]
        want = ours(ids).logits
        assert distance(want, plain) > 10 * TOLERANCE
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        assert distance(compiled(ids).logits, want) < TOLERANCE
        program = torch.export.export(ours, (ids,)).module()
        assert distance(program(ids).logits, want) < TOLERANCE
    torch.compiler.reset()


# --- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_hidden_states_and_attentions_are_those_of_transformers(name: str) -> None:
    theirs, ours = pair(name)
    ids, options = ids_of(ours.spec), {"output_hidden_states": True, "output_attentions": True}
    want, got = theirs(ids, use_cache=False, **options), ours(ids, use_cache=False, **options)
    layers = ours.spec.text.num_hidden_layers
    assert len(got.hidden_states) == len(want.hidden_states) == layers + 1
    assert len(got.attentions) == len(want.attentions) == layers
    for field in ("hidden_states", "attentions"):
        for a, b in zip(getattr(got, field), getattr(want, field), strict=True):
            assert distance(a, b) < TOLERANCE
    plain = ours(ids)
    assert plain.hidden_states is None and plain.attentions is None
    with hooked(ours.model.layers[0], lambda m, args, out: out * 2):  # type: ignore[index]
        patched = ours(ids, output_hidden_states=True)
    assert torch.equal(patched.hidden_states[1], got.hidden_states[1] * 2)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("side", ("left", "right"))
def test_padding_on_either_side_changes_no_logits(name: str, side: str) -> None:
    """Beside the unpadded module, and transformers with the same mask."""
    theirs, ours = pair(name)
    ids = ids_of(ours.spec)
    pad = 7
    left = side == "left"
    padded = torch.nn.functional.pad(ids, (pad, 0) if left else (0, pad), value=5)
    mask = torch.ones_like(padded)
    at = slice(pad, None) if left else slice(ids.shape[1])
    mask[:, : pad if left else None] = 0
    mask[:, at] = 1
    mask[1] = 1  # the other sequence of the batch has no padding
    with torch.no_grad():
        for kind in (torch.int64, torch.bool):
            got = ours(padded, attention_mask=mask.to(kind)).logits
            assert distance(got[0, at], ours(ids).logits[0]) < TOLERANCE
            assert distance(got[1], ours(padded).logits[1]) < TOLERANCE
        want = theirs(padded, attention_mask=mask, use_cache=False).logits
        rows = mask.bool()
        assert distance(got[rows], want[rows]) < TOLERANCE
        unmasked = ours(padded).logits
        assert left == (distance(unmasked[0, at], ours(ids).logits[0]) > 10 * TOLERANCE)


def test_gradients_with_padding_are_those_without() -> None:
    ours = g4ir.module(SPECS["tiny-ple"])
    ids = ids_of(ours.spec)
    labels = torch.nn.functional.pad(ids, (6, 0), value=-100)
    labels[:, 6] = -100  # predicted from padding
    padded, mask = torch.nn.functional.pad(ids, (6, 0)), labels.ne(-100)
    mask[:, 6] = True
    gradients = []
    for options in (
        {"input_ids": ids, "labels": ids},
        {"input_ids": padded, "labels": labels, "attention_mask": mask},
    ):
        ours(**options).loss.backward()
        gradients.append({n: p.grad for n, p in ours.named_parameters() if p.grad is not None})
        ours.zero_grad()
    for name, gradient in gradients[0].items():
        assert distance(gradients[1][name], gradient) < TOLERANCE, name


@pytest.mark.parametrize("name", ("tiny-dense", "tiny-ple", "tiny-gemma3"))
def test_positions_embeddings_and_kept_logits_as_in_transformers(name: str) -> None:
    theirs, ours = pair(name)
    ids = ids_of(ours.spec)
    length = ids.shape[1]
    packed = torch.cat((torch.arange(9), torch.arange(length - 9)))[None]
    shifted = (torch.arange(length) + torch.tensor([[3], [40]])).int()
    embeds = torch.randn(*ids.shape, ours.spec.text.hidden_size)
    arguments: list[dict[str, Any]] = [
        {"input_ids": ids, "position_ids": shifted},
        {"input_ids": ids, "position_ids": packed},
        {"input_ids": ids, "position_ids": packed, "attention_mask": torch.ones_like(ids)},
        {"input_ids": ids, "logits_to_keep": 3},
        {"input_ids": ids, "logits_to_keep": torch.tensor([0, 4])},
        {"inputs_embeds": embeds},
    ]
    if ple := ours.spec.text.ple:
        rows = torch.randn(*ids.shape, ours.spec.text.num_hidden_layers, ple.dim)
        arguments[-1]["per_layer_inputs"] = rows
    with torch.no_grad():
        for options in arguments:
            got, want = ours(**options).logits, theirs(**options, use_cache=False).logits
            assert distance(got, want) < TOLERANCE, options.keys()
        first = ours(ids[:, :9]).logits
        assert distance(ours(ids, position_ids=packed).logits[:, :9], first) < TOLERANCE
        alone = ours(ids[:, 9:]).logits
        assert distance(ours(ids, position_ids=packed).logits[:, 9:], alone) < TOLERANCE


def test_the_order_of_a_plain_tuple_and_the_decoder_alone() -> None:
    theirs, ours = pair("tiny-dense")
    ids = ids_of(ours.spec)
    options = {"labels": ids, "output_hidden_states": True, "return_dict": False}
    want, got = theirs(ids, use_cache=False, **options), ours(ids, **options)
    assert type(got) is tuple and len(got) == len(want) == 3
    assert distance(got[0], want[0]) < TOLERANCE and distance(got[1], want[1]) < TOLERANCE
    assert len(got[2]) == len(want[2])
    last = ours.model(ids)
    want_last = theirs.model(ids, use_cache=False)
    assert distance(last.last_hidden_state, want_last.last_hidden_state) < TOLERANCE
    assert last[0] is last.last_hidden_state


@pytest.mark.parametrize("name", ("tiny-moe", "tiny-ple", "tiny-gemma3"))
def test_config_and_dtype(name: str) -> None:
    theirs, ours = pair(name)
    config, same = ours.config.to_dict(), theirs.config.to_dict()
    names = ("model_type", "hidden_size", "num_hidden_layers", "layer_types", "vocab_size")
    assert all(config[name] == same[name] == getattr(ours.config, name) for name in names)
    assert ours.dtype == torch.float32 and "dtype=torch.float32" in repr(ours)
    half = g4ir.module(SPECS[name], dtype="bfloat16")
    assert half.dtype == torch.bfloat16 == half(ids_of(half.spec)).logits.dtype


IDS = torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    "options, says",
    (
        ({"use_cache": True}, "use_cache: g4ir.module has no KV cache"),
        ({"past_key_values": object()}, "past_key_values: g4ir.module has no KV cache"),
        (
            {"attention_mask": torch.ones(2, 4)},
            r"attention_mask: expected integers \[2, 3\], 1 for",
        ),
        ({"attention_mask": torch.zeros(2, 3)}, r"found torch.float32 \[2, 3\]"),
        ({"attention_mask": torch.ones(2, 1, 3, 3).long()}, r"attention_mask: .* \[2, 1, 3, 3\]"),
        ({"attention_mask": torch.ones(1, 3).long()}, "attention_mask: expected"),
        ({"position_ids": torch.ones(3).long()}, r"position_ids: expected integers \[2, 3\]"),
        ({"position_ids": torch.ones(2, 3)}, "position_ids: expected integers"),
        ({"inputs_embeds": torch.ones(2, 3, 64)}, "either input_ids or inputs_embeds"),
        ({"input_ids": None}, "either input_ids or inputs_embeds"),
        ({"input_ids": None, "inputs_embeds": torch.ones(2, 3, 64)}, "give per_layer_inputs="),
        (
            {"input_ids": None, "inputs_embeds": torch.ones(2, 3, 65)},
            r"inputs_embeds: expected torch.float32 \[batch, sequence, 64\]; found .* \[2, 3, 65\]",
        ),
        ({"per_layer_inputs": torch.ones(2, 3, 8, 16)}, "per_layer_inputs goes with inputs_embeds"),
        (
            {
                "input_ids": None,
                "inputs_embeds": torch.ones(2, 3, 64),
                "per_layer_inputs": torch.ones(2, 3, 128),
            },
            r"per_layer_inputs: expected torch.float32 \[2, 3, 8, 16\]",
        ),
        ({"output_hidden_states": [1, 2]}, "output_hidden_states: expected True or False"),
        ({"output_attentions": "all"}, "output_attentions: expected True or False"),
        ({"labels": IDS, "logits_to_keep": 1}, "logits_to_keep: the loss needs all logits"),
    ),
)
def test_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(G4Error, match=says):
        pair("tiny-ple")[1](**{"input_ids": IDS, **options})


def test_per_layer_inputs_need_per_layer_embeddings() -> None:
    with pytest.raises(G4Error, match="the model has no per-layer embeddings"):
        pair("tiny-dense")[1](inputs_embeds=torch.ones(2, 3, 64), per_layer_inputs=torch.ones(1))


@pytest.mark.parametrize("name", ("output_router_logits", "cache_position", "token_type_ids"))
def test_unknown_arguments_are_named(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        pair("tiny-ple")[1](IDS, **{name: None})
    with pytest.raises(TypeError):
        pair("tiny-ple")[1](IDS, IDS)  # transformers takes a mask here, not labels
