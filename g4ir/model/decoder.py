"""The decoder of Gemma 4 (and 3) as a graph, for each phase; also base of encoders and draft
models.

Rule numbers refer to the order of operations of the reference model (transformers 5.17,
`models/gemma4`); each op's docstring states what it rounds. The graph is not optimised: every layer
computes its RoPE tables and has a full-length cache, also KV-shared layers. Passes remove these.
"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Value
from g4ir.ops.types import Type
from g4ir.spec.parts import SLIDING, Layer, Rope
from g4ir.spec.record import Spec

#: phase that verifies draft tokens; its input is the last accepted token, then the draft tokens
VERIFY = "verify"
#: prefill with bidirectional attention between the tokens of an image or video frame
BLOCKS = "prefill_media"
#: phase -> dim of its tokens, if not CHUNK: phases of so few tokens that even a ring cache has a
#: slot for each
TOKENS: dict[str, int | str] = {"decode": 1, VERIFY: "M"}
#: dim of the tokens of a prefill chunk
CHUNK = "S"
#: result of a graph: the last hidden state
HIDDEN = "hidden"


class Decoder:
    """Builds the decoder of one phase; `scope` prefixes its names."""

    scope = ""
    #: names of the per-layer embeddings' params: prefix of those of the model, prefix of those of a
    #: layer, and the norm of a layer
    ple_model, ple_layer, ple_norm = "ple", "ple", "norm_ple"

    def __init__(
        self, spec: Spec, phase: str, all_logits: bool, dtype: str, hidden: bool = False
    ) -> None:
        self.spec, self.text, self.dtype = spec, spec.text, dtype
        #: hidden: whether the last hidden state is a result too
        self.phase, self.hidden = phase, hidden
        #: whether caches are updated before attention reads them
        self.writes_first = phase in ("decode", VERIFY)
        self.every = all_logits or self.writes_first
        self.b = Builder(phase)
        self.eps = spec.text.rms_norm_eps
        self.scale: float = (spec.text.query_pre_attn_scalar or 1) ** -0.5

    def build(self) -> Graph:
        b, text, s = self.b, self.text, TOKENS.get(self.phase, CHUNK)
        h = b.input("embeds", Type(self.dtype, ("B", s, text.hidden_size)))
        ple = self.per_layer_inputs(h, s) if text.ple else None
        self.positions = b.input("positions", Type("i64", ("B", s)))
        self.lengths = b.input("lengths", Type("i64", ("B",)))
        self.start = b.emit("row_start", self.positions, name="start")
        if self.writes_first:
            self.end = b.emit("add", self.start, self.lengths, name="end")
        if self.phase == BLOCKS:
            self.block_ids = b.input("block_ids", Type("i64", ("B", s)))
        self.fresh: dict[int, tuple[Value, Value]] = {}
        for layer in self.spec.layers():
            h = self.block(layer, h, ple[layer.index] if ple else None)
        return b.graph(*self.head(h))

    def at(self, layer: Layer) -> str:
        return f"{self.scope}L{layer.index}"

    def weight(self, name: str, *shape: int) -> Value:
        return self.b.param(name, Type(self.dtype, shape))

    def norm(self, x: Value, name: str, weight: str) -> Value:
        size = x.type.shape[-1]
        assert isinstance(size, int)
        w = self.weight(weight, size)
        if self.text.norms_about_zero:
            w = self.b.emit("one_plus", w, name=f"{weight}.one_plus")
        return self.b.emit("rms_norm", x, w, eps=self.eps, name=name)

    def project(self, x: Value, name: str, weight: str, out: int) -> Value:
        size = x.type.shape[-1]
        assert isinstance(size, int)
        return self.b.emit("linear", x, self.weight(weight, out, size), name=name)

    def per_layer_inputs(self, embeds: Value, s: int | str) -> tuple[Value, ...]:
        """Return the per-layer embeddings, one [B,S,dim] per layer: from a token's row of the table
        and its embedding (rules 2 to 4)."""
        b, layers, ple = self.b, self.text.num_hidden_layers, self.text.ple
        assert ple
        rows = b.input("ple_rows", Type(self.dtype, ("B", s, layers * ple.dim)))
        x = self.ple_context(embeds)
        x = b.emit("add", x, b.emit("heads", rows, n=layers, name="ple.tokens"), name="ple.sum")
        x = b.emit("scale", x, value=2**-0.5, name="ple.mean")
        x = b.emit("stack_layers", x, name="ple.stacked")
        names = [f"L{i}.ple" for i in range(layers)]
        return b.emit_all("unstack_layers", x, name=names)

    def ple_context(self, embeds: Value) -> Value:
        """Return the part of the per-layer embeddings that is projected from the token embeddings,
        [B,S,layers,dim] (rule 3)."""
        b, text, ple = self.b, self.text, self.text.ple
        assert ple
        width = text.num_hidden_layers * ple.dim
        x = self.project(embeds, "ple.proj", f"{self.ple_model}.w", width)
        x = b.emit("scale", x, value=text.hidden_size**-0.5, name="ple.scaled")
        x = b.emit("heads", x, n=text.num_hidden_layers, name="ple.heads")
        return self.norm(x, "ple.context", f"{self.ple_model}.norm")

    def block(self, layer: Layer, h: Value, ple: Value | None) -> Value:
        """Apply attention, MLP (with experts), then the per-layer embedding (rules 6 to 9)."""
        b, p = self.b, self.at(layer)
        # The first input norm follows no residual add, and cannot be fused with one: its name is
        # outside layer 0, so that all layers are isomorphic.
        first = f"{self.scope}pre.norm" if layer.index == 0 else f"{p}.in"
        x = self.attention(layer, self.norm(h, first, f"{p}.norm_in"))
        h = b.emit("add", h, self.norm(x, f"{p}.attn.post", f"{p}.norm_attn"), name=f"{p}.mid")
        y = self.norm(self.feed_forward(layer, h), f"{p}.ffn.post", f"{p}.norm_ffn")
        # A layer's result is called `out`, whichever op defines it.
        scaled = self.text.layer_scalar
        h = b.emit("add", h, y, name=f"{p}.ffn.out" if ple or scaled else f"{p}.out")
        if ple:
            y = self.norm(self.ple_gate(p, h, ple), f"{p}.ple.post", f"{p}.{self.ple_norm}")
            h = b.emit("add", h, y, name=f"{p}.ple.out" if scaled else f"{p}.out")
        if not scaled:
            return h
        return b.emit("mul", h, self.weight(f"{p}.scalar", 1), name=f"{p}.out")

    def attention(self, layer: Layer, x: Value) -> Value:
        """Return attention of x after the output projection, [B,S,hidden] (rules 12 to 17). K and V
        are this layer's, or the donor layer's."""
        b, p, a, text = self.b, f"{self.at(layer)}.attn", layer.attention, self.text
        self.tables = self.rope_tables(p, a.rope, a.head_dim)
        q = self.project(x, f"{p}.q", f"{p}.wq", text.num_attention_heads * a.head_dim)
        q = b.emit("heads", q, n=text.num_attention_heads, name=f"{p}.q.heads")
        q = self.rotate(self.norm(q, f"{p}.q.norm", f"{p}.norm_q"), f"{p}.q.rope")
        out = b.emit("merge_heads", self.attend(layer, q, x, f"{p}.out"), name=f"{p}.merged")
        return self.project(out, f"{p}.o", f"{p}.wo", text.hidden_size)

    def attend(self, layer: Layer, q: Value, x: Value, name: str) -> Value:
        return self.b.emit(
            "attention",
            q,
            *self.seen(layer, x),
            window=layer.attention.window or 0,
            scale=self.scale,
            softcap=self.text.attn_logit_softcapping or 0.0,
            name=name,
        )

    def keys_values(self, layer: Layer, x: Value) -> tuple[Value, Value]:
        """Return K after norm and RoPE, and V, normed without weight if the spec has `value_norm`;
        with K=V, V is K's projection before norm and RoPE. Both are [B,S,n,head_dim]."""
        b, p, a = self.b, f"{self.at(layer)}.attn", layer.attention
        n, width = a.num_key_value_heads, a.num_key_value_heads * a.head_dim
        k = b.emit("heads", self.project(x, f"{p}.k", f"{p}.wk", width), n=n, name=f"{p}.k.heads")
        v = k
        if not a.k_eq_v:
            v = self.project(x, f"{p}.v", f"{p}.wv", width)
            v = b.emit("heads", v, n=n, name=f"{p}.v.heads")
        k = self.rotate(self.norm(k, f"{p}.k.norm", f"{p}.norm_k"), f"{p}.k.rope")
        if self.text.value_norm:
            v = b.emit("rms_norm", v, eps=self.eps, name=f"{p}.v.norm")
        return k, v

    def seen(self, layer: Layer, x: Value) -> tuple[Value, ...]:
        """Return the operands of `attention` after q: positions, number of cached tokens, then the
        old cache and the chunk's K and V, or, in decode and verify, the updated cache. Blocks are
        bidirectional on sliding layers only (rule 19), so only these get `block_ids`."""
        b, p, a = self.b, self.at(layer), layer.attention
        if layer.donor is None:
            self.fresh[layer.index] = self.keys_values(layer, x)
        k, v = self.fresh[layer.index if layer.donor is None else layer.donor]
        cache = Type(self.dtype, ("C", "B", a.num_key_value_heads, a.head_dim))
        old = [b.cache(f"{p}.k", cache), b.cache(f"{p}.v", cache)]
        new = [
            b.emit("cache_write", c, x, self.start, self.lengths, name=f"{c.name}.next")
            for c, x in zip(old, (k, v), strict=True)
        ]
        b.next.update({c.name: n for c, n in zip(old, new, strict=True)})
        if self.writes_first:
            return self.positions, self.end, *new
        blocks = (self.block_ids,) if self.phase == BLOCKS and layer.kind == SLIDING else ()
        return self.positions, self.start, *old, k, v, *blocks

    def rope_tables(self, p: str, rope: Rope, dim: int) -> tuple[Value, ...]:
        """Return the RoPE tables (cos, sin), [B,S,dim] each."""
        return self.b.emit_all(
            "rope_table",
            self.positions,
            kind=rope.kind,
            theta=rope.theta,
            dim=dim,
            fraction=rope.rotary_fraction,
            factor=rope.factor or 1.0,
            dtype=self.dtype,
            name=[f"{p}.cos", f"{p}.sin"],
        )

    def rotate(self, x: Value, name: str) -> Value:
        return self.b.emit("rope", x, *self.tables, name=name)

    def feed_forward(self, layer: Layer, h: Value) -> Value:
        """Apply the dense MLP and, if the layer has them, the routed experts to the same residual
        (rule 7); return their sum."""
        b, p = self.b, self.at(layer)
        dense = self.mlp(layer, self.norm(h, f"{p}.mlp.in", f"{p}.norm_mlp"))
        if not layer.has_moe:
            return dense
        dense = self.norm(dense, f"{p}.mlp.post", f"{p}.norm_mlp_post")
        routed = self.norm(self.experts(layer, h), f"{p}.moe.post", f"{p}.norm_moe_post")
        return b.emit("add", dense, routed, name=f"{p}.ffn")

    def mlp(self, layer: Layer, x: Value) -> Value:
        """Return down(act(gate) * up) (rule 11)."""
        b, p, width, act = self.b, f"{self.at(layer)}.mlp", layer.intermediate_size, self.act()
        gate = self.project(x, f"{p}.gate", f"{p}.w_gate", width)
        up = self.project(x, f"{p}.up", f"{p}.w_up", width)
        x = b.emit("glu", gate, up, act=act, name=f"{p}.act")
        return self.project(x, f"{p}.down", f"{p}.w_down", self.text.hidden_size)

    def experts(self, layer: Layer, h: Value) -> Value:
        """Apply experts; the router's input is the residual normed without weight (rules 23 to
        25)."""
        b, p, moe, size = self.b, f"{self.at(layer)}.moe", self.text.moe, self.text.hidden_size
        assert moe
        x = self.norm(h, f"{p}.in", f"{self.at(layer)}.norm_moe")
        weights, index = b.emit_all(
            "router",
            b.emit("rms_norm", h, eps=self.eps, name=f"{p}.router_in"),
            self.weight(f"{p}.router_scale", size),
            self.weight(f"{p}.router", moe.num_experts, size),
            self.weight(f"{p}.expert_scale", moe.num_experts),
            top_k=moe.top_k_experts,
            root=size**-0.5,
            name=[f"{p}.weights", f"{p}.index"],
        )
        gate_up = self.weight(f"{p}.gate_up", moe.num_experts, 2 * moe.intermediate_size, size)
        down = self.weight(f"{p}.down", moe.num_experts, size, moe.intermediate_size)
        return b.emit("experts", x, weights, index, gate_up, down, act=self.act(), name=f"{p}.out")

    def ple_gate(self, p: str, h: Value, ple: Value) -> Value:
        """Return the branch that gates the per-layer embedding by the residual, which is not normed
        before, [B,S,hidden] (rule 8)."""
        assert self.text.ple
        gate = self.project(h, f"{p}.ple.gate", f"{p}.{self.ple_layer}.w_gate", self.text.ple.dim)
        x = self.b.emit("glu", gate, ple, act=self.act(), name=f"{p}.ple.act")
        return self.project(
            x, f"{p}.ple.proj", f"{p}.{self.ple_layer}.w_proj", self.text.hidden_size
        )

    def head(self, h: Value) -> tuple[Value, ...]:
        """Apply final norm, (tied) head and softcap (rule 22). Returns logits, of each sequence's
        last valid token or of all tokens, and with `hidden` the last hidden state, of all tokens in
        decode and verify, else of each last valid one."""
        b, last = self.b, not self.writes_first
        if not self.hidden:
            x = self.logits(self.norm(h, "final.norm", "final.w"), self.every)
            return (x if self.every else b.emit("last_row", x, self.lengths, name="logits"),)
        x = self.norm(h, "final.norm" if last else HIDDEN, "final.w")
        hidden = b.emit("last_row", x, self.lengths, name=HIDDEN) if last else x
        return self.logits(x if self.every else hidden, True), hidden

    def logits(self, x: Value, is_output: bool) -> Value:
        """Return the logits of x; `is_output`: they are the graph's result."""
        text, name = self.text, "logits" if is_output else "logits.all"
        w = "embed.table" if text.tie_word_embeddings else "head.w"
        cap = text.final_logit_softcapping
        x = self.project(x, "head.out" if cap else name, w, text.vocab_size)
        return self.b.emit("softcap", x, cap=cap, name=name) if cap else x

    def act(self) -> str:
        return self.text.hidden_activation
