"""The draft model (MTP): a small decoder that predicts tokens from the target's hidden state.

It has no KV cache: each of its layers reads that of the target's last KV-owning layer of the same
kind. All draft steps before a verification use the same position, attend to the accepted tokens and
write nothing to the cache; each passes its token and hidden state to the next.

Rules 39 to 41 (transformers 5.17, `models/gemma4_assistant`).
"""

from __future__ import annotations

from collections.abc import Mapping

from g4ir.errors import SpecError
from g4ir.ir.graph import Graph, Value
from g4ir.ops.types import Type
from g4ir.spec.parts import ASSISTANT, FULL, SLIDING, AttentionKind, Layer
from g4ir.spec.record import DRAFTER, Spec, drafter_names, load_spec

from .decoder import HIDDEN, Decoder
from .names import DRAFTER_PREFIX as SCOPE

#: name of the graph
DRAFT = "draft"
#: its results: tokens, and the hidden state for the next step
TOKEN, NEXT_HIDDEN = "draft.token", "draft.hidden"


def build_draft(model: Spec, drafter: Spec, dtype: str | None = None) -> Graph:
    """Return the graph of one draft step. SpecError if the draft model does not fit the target.

    Inputs: `embeds` [B,1,hidden] (the scaled embedding of the newest token), `hidden` [B,1,hidden]
    (the state from which this token was sampled, or the previous step's), `positions` i64[B,1] (for
    RoPE, the same in all steps), `last` i64[B,1] (the position of the newest key) and `written`
    i64[B] (tokens in the caches). Outputs: `draft.token` i64[B], `draft.hidden` [B,1,hidden]. All
    hidden sizes are the target's; `dtype` defaults to the target's.
    """
    check_pair(model, drafter)
    return _Draft(drafter, model.owners(), dtype or model.dtype).build()


def drafter_alone(drafter: Spec) -> Graph:
    """Return a draft model's graph for no particular target; only its params are meaningful."""
    return _Draft(drafter, {SLIDING: 0, FULL: 1}, drafter.dtype).build()


class _Draft(Decoder):
    """A draft model's decoder; `owners` maps a layer kind to the target's layer whose KV cache it
    reads."""

    scope = SCOPE

    def __init__(self, drafter: Spec, owners: Mapping[str, int], dtype: str) -> None:
        super().__init__(drafter, DRAFT, True, dtype)
        self.owners = owners

    def build(self) -> Graph:
        assert self.spec.drafter
        b, size, width = self.b, self.text.hidden_size, self.spec.drafter.backbone_hidden_size
        row, at = Type(self.dtype, ("B", 1, width)), Type("i64", ("B", 1))
        embeds, hidden = (b.input(name, row) for name in ("embeds", HIDDEN))
        self.positions, self.last = b.input("positions", at), b.input("last", at)
        self.end = b.input("written", Type("i64", ("B",)))
        both = b.emit("concat", embeds, hidden, axis=2, name=f"{SCOPE}both")
        h = self.project(both, f"{SCOPE}in", f"{SCOPE}w_in", size)
        for layer in self.spec.layers():
            h = self.block(layer, h, None)
        x = self.norm(h, f"{SCOPE}final.norm", f"{SCOPE}final.w")
        return b.graph(self.token(x), self.project(x, NEXT_HIDDEN, f"{SCOPE}w_out", width))

    def seen(self, layer: Layer, x: Value) -> tuple[Value, ...]:
        """Return attention's operands after q: position of the newest key, number of cached tokens,
        and the target's caches."""
        a, owner = layer.attention, self.owners[layer.kind]
        cache = Type(self.dtype, ("C", "B", a.num_key_value_heads, a.head_dim))
        caches = (self.b.cache(f"L{owner}.{part}", cache) for part in "kv")
        return self.last, self.end, *caches

    def token(self, x: Value) -> Value:
        """Return the greedy token, of the full vocabulary or of the best clusters. The head's rows
        are sorted by cluster when weights are packed."""
        b, text, drafter = self.b, self.text, self.spec.drafter
        w = "embed.table" if text.tie_word_embeddings else "head.w"
        table = self.weight(f"{SCOPE}{w}", text.vocab_size, text.hidden_size)
        assert drafter
        clusters = drafter.centroids
        if clusters is None:
            logits = b.emit("linear", x, table, name=f"{SCOPE}logits")
            return b.emit("greedy", logits, name=TOKEN)
        order = b.param(f"{SCOPE}order", Type("i64", (text.vocab_size,)))
        rows = b.emit("by_cluster", table, order, count=clusters.count, name=f"{SCOPE}clusters")
        heads = self.weight(f"{SCOPE}centroids", clusters.count, text.hidden_size)
        names = [f"{SCOPE}logits", f"{SCOPE}ids"]
        top_k = clusters.top_k
        logits, ids = b.emit_all("cluster_head", x, heads, rows, order, top_k=top_k, name=names)
        return b.emit("pick_id", ids, b.emit("greedy", logits, name=f"{SCOPE}best"), name=TOKEN)


def layers_read(model: Spec, drafter: Spec | None) -> tuple[int, ...]:
    """Return the sorted indices of a model's layers whose KV caches its draft model reads."""
    kinds = set(drafter.text.layer_types) if drafter else set()
    return tuple(sorted(i for kind, i in model.owners().items() if kind in kinds))


def check_pair(model: Spec, drafter: Spec) -> None:
    """Raise SpecError, with every difference, unless the draft model fits the target."""
    if drafter.drafter is None:
        kind = f"expected a model_type *{ASSISTANT}, found {drafter.model_type}"
        raise SpecError(f"spec {drafter.name} is no drafter: {kind}")
    if rows := differences(model, drafter):
        lines = "\n".join(f"  {key}: drafter {b!r}, model {a!r}" for key, a, b in rows)
        raise SpecError(
            f"spec {drafter.name} is no drafter of {model.name}; give one that agrees in:\n{lines}"
        )


def differences(model: Spec, drafter: Spec) -> list[tuple[str, object, object]]:
    """Return (key, target's value, draft model's) of differing fields that must be equal."""
    return [(key, a, b) for key, a, b in _shared(model, drafter) if a != b]


def _shared(model: Spec, drafter: Spec) -> list[tuple[str, object, object]]:
    assert drafter.drafter
    rows: list[tuple[str, object, object]] = [
        ("model_type", f"{model.model_type}{ASSISTANT}", drafter.model_type),
        (
            "drafter.backbone_hidden_size",
            model.text.hidden_size,
            drafter.drafter.backbone_hidden_size,
        ),
        ("text.vocab_size", model.text.vocab_size, drafter.text.vocab_size),
    ]
    owners = model.owners()
    for kind in sorted(set(drafter.text.layer_types)):
        rows.append((f"has {kind} layers that store K and V", kind in owners, True))
        ours, theirs = (_kind(spec, kind) for spec in (model, drafter))
        for name in ("head_dim", "num_key_value_heads", "window", "rope"):
            rows.append((f"text.{kind}.{name}", getattr(ours, name), getattr(theirs, name)))
    return rows


def _kind(spec: Spec, kind: str) -> AttentionKind:
    return getattr(spec.text, kind)


def shipped_drafter(model: Spec) -> Spec:
    """Return the shipped draft model that is named after a variant, else the only one that fits it.
    SpecError if none or several fit."""
    names = drafter_names()
    name = f"{model.name}{DRAFTER}"
    if name in names:
        return load_spec(name)
    fitting = [d for d in map(load_spec, names) if d.hub and not differences(model, d)]
    if len(fitting) != 1:
        variants = ", ".join(n.removesuffix(DRAFTER) for n in names)
        others = f"{len(fitting) or 'none'} of those for {variants} fit"
        problem = f"no drafter is shipped for {model.name}, and {others}"
        raise SpecError(f"--drafter default: {problem}; give a drafter's directory or its spec")
    return fitting[0]
