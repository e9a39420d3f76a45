"""A text encoder as a graph: the decoder's layers with bidirectional attention and without caches,
then the mean over the tokens of each text (transformers, models/gemma3 and models/embedding_gemma2;
sentence-transformers' modules)."""

from __future__ import annotations

from g4ir.ir.graph import Graph, Value
from g4ir.ops.types import Type
from g4ir.spec.parts import Layer

from .decoder import CHUNK, Decoder

#: name of an encoder's graph
ENCODE = "encode"
#: its result: f32 [1, B, embedding size], L2-normalised
EMBEDDING = "embedding"


class Encoder(Decoder):
    """Builds the `encode` graph.

    Inputs: `embeds` [1,S,hidden] of the tokens of all texts, one after another; `positions`
    i64[1,S], which start at 0 in each text; `ends` i64[B], cumulative lengths (ops/encoder.py).
    """

    ple_model, ple_layer, ple_norm = "ple.context", "ple_block", "ple_block.norm"

    def build(self) -> Graph:
        b, text = self.b, self.text
        h = b.input("embeds", Type(self.dtype, (1, CHUNK, text.hidden_size)))
        ple = self.per_layer_inputs(h, CHUNK) if text.ple else None
        self.positions = b.input("positions", Type("i64", (1, CHUNK)))
        self.ends = b.input("ends", Type("i64", ("B",)))
        for layer in self.spec.layers():
            h = self.block(layer, h, ple[layer.index] if ple else None)
        return b.graph(self.embedding(self.norm(h, "final.norm", "final.w")))

    def attend(self, layer: Layer, q: Value, x: Value, name: str) -> Value:
        k, v = self.keys_values(layer, x)
        window = layer.attention.window or 0
        return self.b.emit(
            "packed_attention", q, k, v, self.ends, window=window, scale=self.scale, name=name
        )

    def per_layer_inputs(self, embeds: Value, s: int | str) -> tuple[Value, ...]:
        """Return the per-layer embeddings, one [1,S,dim] per layer, from the token embeddings alone
        (rule 3): there is no table."""
        layers = self.text.num_hidden_layers
        x = self.b.emit("stack_layers", self.ple_context(embeds), name="ple.stacked")
        return self.b.emit_all("unstack_layers", x, name=[f"L{i}.ple" for i in range(layers)])

    def embedding(self, x: Value) -> Value:
        """Return the embeddings f32 [1,B,size] of final hidden states [1,S,hidden]."""
        head = self.spec.embedding
        assert head
        if head.projection:
            x = self.project(x, "head.projected", "head.projection", head.projection)
        x = self.b.emit("packed_mean", x, self.ends, name="head.mean")
        for i, width in enumerate(head.dense):
            x = self.project(x, f"head.dense{i}", f"dense.{i}.w", width)
        return self.b.emit("unit_norm", x, name=EMBEDDING)
