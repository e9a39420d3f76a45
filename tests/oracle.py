"""The numeric oracle: tiny transformers models with every parameter and buffer randomised.

At their initial values (norm weights 1, scalars 1) most bugs are invisible. The budget of a
comparison comes from the reference itself: how far its own modes lie apart on the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from g4ir import Graph, Spec
from g4ir.check.hf import cache_argument
from g4ir.model.names import checkpoint_name
from g4ir.model.tensors import text_tensors
from g4ir.spec.parts import SLIDING

#: the reference's own modes: (attention implementation, token by token through a cache). Both at
#: once would allow hardly more and take half of the time of all.
MODES = (("eager", False), ("sdpa", False), ("eager", True))
SELF_DIFFERENCE = 1e-4  # of the row's rms; a seed with more is not used
SEEDS = range(16)
ROWS = 2
SELF_COSINE = 1 - 5e-4  # in bf16; a seed with less is not used


# --- models -----------------------------------------------------------------------------------


def hf_model(spec: Spec) -> Any:
    """A transformers text model of the spec's shape, in eval mode.

    What a config cannot say is set on the model: experts on some layers only, K=V on sliding
    layers, an attention softcap (eager attention only).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = _expressible(spec).to_hf()
    config = AutoConfig.for_model(**config.get("text_config", config))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    _set_rest(model, spec)
    return model


def cast(model: Any, dtype: torch.dtype) -> Any:
    """The model's weights in `dtype`; the rope frequencies stay fp32, as in a loaded model
    (`model.to` would round them)."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    for name, t in model.named_buffers():
        if name.endswith("layer_scalar"):
            t.data = t.data.to(dtype)
    return model


def _expressible(spec: Spec) -> Spec:
    text = spec.text
    moe = text.moe and replace(text.moe, layers=None)
    sliding = replace(text.sliding, k_eq_v=False)
    return replace(spec, text=replace(text, moe=moe, sliding=sliding, attn_logit_softcapping=None))


def _set_rest(model: Any, spec: Spec) -> None:
    for plan, layer in zip(spec.layers(), model.model.layers, strict=True):
        layer.enable_moe_block = plan.has_moe
        if plan.kind == SLIDING and plan.attention.k_eq_v and plan.donor is None:
            layer.self_attn.v_proj = None
    if spec.text.attn_logit_softcapping:
        model.set_attn_implementation(_capped_attention(spec.text.attn_logit_softcapping))


@cache
def _capped_attention(cap: float) -> str:
    """Registers the reference's eager attention with a softcap; returns the name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.gemma4.modeling_gemma4 import eager_attention_forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        return eager_attention_forward(*args, **kwargs, softcap=cap)

    name = f"eager_softcap_{cap:g}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)
    return name


def randomize(model: torch.nn.Module, seed: int, weights: Weights | None = None) -> None:
    """Fill every parameter and layer scalar; `weights` says how far the spread may carry."""
    weights = weights or LIVELY
    text = model.config.get_text_config()
    divided = getattr(text, "query_pre_attn_scalar", 1) ** 0.5
    zero = 1.0 if text.model_type == "gemma3_text" else 0.0  # of the norms' weights
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("token_ordering"):
                t.copy_(torch.randperm(len(t), generator=g))
                continue
            if "inv_freq" in name or "embed_scale" in name or name.endswith("softcap"):
                continue
            noise = torch.randn(t.shape, generator=g)
            if name.endswith("layer_scalar"):
                low = weights.scalar
                t.copy_(low + (1 - low) * torch.rand(t.shape, generator=g))
            elif t.dim() == 1:
                centre = weights.centre(name, t.shape[0])
                centre *= divided if name.endswith("q_norm.weight") else 1
                t.copy_((1 + 0.3 * noise) * centre - zero)
            else:
                t.copy_(noise * t.shape[-1] ** -0.5)


@dataclass(frozen=True)
class Weights:
    """Centres of the vectors of a random model. The rest centres on 1, with a spread of 0.3.

    They keep rounding from growing from layer to layer until any two ways to compute the model
    part. Attention scores are not divided by the root of the head dim, so that query norms of 1
    would make softmax a maximum. What a block adds to the residual stream should be smaller
    than the stream. Experts that score alike are chosen by rounding; sharper scores give the
    last chosen one less weight.
    """

    query: float  # of q_norm, times the root of the head dim
    post: float  # of the norms before each residual add
    scalar: float  # layer scalars lie between this and 1
    experts: float  # of the norm after the experts
    router: float  # of the router's scale

    def centre(self, name: str, size: int) -> float:
        """The centre of a vector of the model."""
        table = {
            "q_norm.weight": self.query * size**-0.5,
            "post_attention_layernorm.weight": self.post,
            "post_feedforward_layernorm.weight": self.post,
            "post_per_layer_input_norm.weight": self.post,
            "post_feedforward_layernorm_2.weight": self.experts,
            "router.scale": self.router,
        }
        return next((v for k, v in table.items() if name.endswith(k)), 1.0)


LIVELY = Weights(query=1.5, post=0.4, scalar=0.7, experts=1.0, router=1.0)
#: for bf16, whose rounding is 2^16 times coarser
CALM = Weights(query=1.0, post=0.05, scalar=0.9, experts=0.3, router=5.0)


def logits_of_directory(folder: Path, tokens: torch.Tensor, more: bool = False) -> torch.Tensor:
    """Logits of transformers' model of a directory, in fp32; it has all tensors, and others only if
    there may be `more`."""
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    keys = ("missing_keys", "mismatched_keys", *["unexpected_keys"] * (not more))
    assert not any(told[key] for key in keys), told
    with torch.no_grad():
        made: torch.Tensor = model(tokens, use_cache=False).logits
    return made


def save_checkpoint(oracle: Oracle, folder: Path) -> Path:
    """The model as transformers saves it, without experts of layers that have none."""
    spec = oracle.spec
    live = {"lm_head.weight", *(f"model.{name}" for name in text_tensors(spec))}
    state = {k: v for k, v in oracle.tensors.items() if k in live}
    oracle.model.save_pretrained(folder, state_dict=state)
    return folder


def expressible(spec: Spec) -> bool:
    """Whether a config.json can say all of the spec."""
    return _expressible(spec) == spec


def graph_params(graph: Graph, tensors: Mapping[str, torch.Tensor], prefix: str = "model."):
    """The graph's params out of a state dict."""
    out: dict[str, Any] = {}
    for v in graph.params:
        name = checkpoint_name(v.name)
        found = tensors.get(prefix + name, tensors.get(name))
        assert found is not None, f"no tensor for %{v.name}"
        assert tuple(found.shape) == v.type.shape, f"%{v.name}: {found.shape} is not {v.type}"
        out[v.name] = found
    return out


# --- what the reference says ------------------------------------------------------------------


def relative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[...]: the largest difference of each row of logits, relative to the rms of b's row."""
    a, b = a.double(), b.double()
    return (a - b).abs().amax(-1) / b.pow(2).mean(-1).sqrt()


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[...]: the cosine of the angle between rows."""
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


@dataclass(frozen=True)
class Oracle:
    """A reference model, random tokens for it, and how far it may be missed.

    `tokens` i64[ROWS, 4 W + 5]: a prompt of more than three windows, then what is decoded.
    """

    spec: Spec
    seed: int
    model: Any
    tokens: torch.Tensor

    @property
    def window(self) -> int:
        window = self.spec.text.sliding.window
        assert window
        return window

    @property
    def prompt(self) -> int:
        """Tokens of the prompt, not a multiple of anything."""
        return 3 * self.window + 2

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.model.embed_tokens.weight.dtype

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's state dict, as a checkpoint has it."""
        return dict(self.model.state_dict())

    @cached_property
    def logits(self) -> torch.Tensor:
        """f32[ROWS, T, vocab] for `tokens`: eager, without a cache."""
        return self.run(self.tokens)

    @cached_property
    def self_difference(self) -> float:
        """The largest difference between `logits` and another of the reference's own modes."""
        return max(relative(x, self.logits).max().item() for x in self._others())

    def _others(self) -> Iterator[torch.Tensor]:
        capped = self.spec.text.attn_logit_softcapping is not None
        for attn, cached in MODES[1:]:
            if not (capped and attn == "sdpa"):  # SDPA has no softcap
                yield self.run(self.tokens, attn, cached)

    @cached_property
    def self_cosine(self) -> float:
        """The smallest cosine of a position's logits between the reference's own modes."""
        return min(cosine(x, self.logits).min().item() for x in self._others())

    @property
    def budget(self) -> float:
        """Allowed difference relative to a row's rms."""
        return max(1e-4, 4 * self.self_difference)

    def run(self, tokens: torch.Tensor, attn: str = "eager", cached: bool = False) -> torch.Tensor:
        """Logits at every position; `cached` goes token by token through a DynamicCache."""
        from transformers import DynamicCache

        def logits(ids: torch.Tensor, **options: Any) -> torch.Tensor:
            keep = torch.arange(ids.shape[1])  # all rows, by index (see `last_row`)
            return self.model(ids, logits_to_keep=keep, **options).logits

        if self.spec.text.attn_logit_softcapping is None:
            self.model.set_attn_implementation(attn)
        with torch.no_grad():
            if not cached:
                return logits(tokens, use_cache=False)
            cache = {cache_argument(self.model.forward): DynamicCache(config=self.model.config)}
            columns = tokens.split(1, 1)
            return torch.cat([logits(column, use_cache=True, **cache) for column in columns], 1)

    def layers(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """The output of every decoder layer, eager and without a cache."""
        outputs: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda m, args, out: outputs.append(out.clone()))
            for layer in self.model.model.layers
        ]
        self.run(tokens)
        for hook in hooks:
            hook.remove()
        return outputs


def random_tokens(spec: Spec, rows: int, count: int, seed: int = 0) -> torch.Tensor:
    """Token ids that every table has a row for."""
    top = spec.text.readable_ids
    g = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, top, (rows, count), generator=g)


@cache
def find_oracle(spec: Spec) -> Oracle:
    """The first seed on which the reference agrees with itself; kept for the session.

    A model whose router scores lie nearly level, or whose softmax is nearly a maximum, answers
    rounding with another result; no implementation can be held to it.
    """
    return _search(spec, LIVELY, torch.float32, lambda o: o.self_difference < SELF_DIFFERENCE)


@cache
def find_bf16_oracle(spec: Spec) -> Oracle:
    """The same for a model in bf16, with weights that bear its rounding."""
    return _search(spec, CALM, torch.bfloat16, lambda o: o.self_cosine > SELF_COSINE)


def _search(
    spec: Spec, weights: Weights, dtype: torch.dtype, agrees: Callable[[Oracle], bool]
) -> Oracle:
    assert spec.text.sliding.window
    length = 4 * spec.text.sliding.window + 5
    for seed in SEEDS:
        model = hf_model(spec)
        randomize(model, seed, weights)
        tokens = random_tokens(spec, ROWS, length, seed)
        oracle = Oracle(spec, seed, cast(model, dtype), tokens)
        if agrees(oracle):
            return oracle
    raise AssertionError(f"{spec.name}: the reference disagrees with itself on every seed")


def close_calls(logits: torch.Tensor, budget: float) -> torch.Tensor:
    """[...] bool: rows whose two best logits lie within the budget (relative to the rms)."""
    best = logits.topk(2, -1).values
    rms = logits.pow(2).mean(-1).sqrt()
    return best[..., 0] - best[..., 1] <= 2 * budget * rms


def pieces(length: int, chunk: int) -> list[tuple[int, int]]:
    """[(start, end), ...] of the chunks of a prompt."""
    return list(pairwise([*range(0, length, chunk), length]))
