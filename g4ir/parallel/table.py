"""The sharding of each weight, by its name.

Column-parallel, then row-parallel, as in Megatron-LM: a layer needs one all-reduce after attention
and one after its MLP. Attention heads are never split; with fewer KV heads than ranks, they are
replicated. The LM head is split by vocabulary. Weights that are not in the table are replicated:
norms, scalars, routers, embeddings. With expert parallelism (`ep`) a rank has some of the experts,
and the param FIRST has the first one's index.
Codes and scales are sharded as their weight; if rows are split, a scale for a whole row is
replicated. Of a draft model only attention is sharded, since it reads sharded caches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.graph import Value
from g4ir.model.names import CODES, SCALES
from g4ir.ops.types import Type, torch
from g4ir.spec.parts import Layer
from g4ir.spec.record import Spec

HEAD, TABLE = "head.w", "embed.table"
#: i64[1]: index of the first local expert, a param of expert-parallel graphs
FIRST = "moe.first"
#: weight of a layer -> (sharded axis, unit that is never split)
CUTS = {
    "attn.wq": (0, "heads"),
    "attn.wk": (0, "key heads"),
    "attn.wv": (0, "key heads"),
    "attn.wo": (1, "heads"),
    "mlp.w_gate": (0, "width"),
    "mlp.w_up": (0, "width"),
    "mlp.w_down": (1, "width"),
    "moe.gate_up": (1, "expert widths"),
    "moe.down": (2, "expert width"),
}
#: replaces entries of CUTS with expert parallelism
EXPERT_CUTS = {"moe.gate_up": (0, "experts"), "moe.down": (0, "experts")}
#: sharded weights; of a draft model only attention's, whose heads read the rank's caches
_WEIGHT = re.compile(r"L(\d+)\.(.+)|draft\.L(\d+)\.(attn\.w[qo])")


@dataclass(frozen=True)
class AxisShard:
    """A rank's shard of the full model's param `source` along `axis`, which has `blocks` blocks of
    `units` units each: an equal number of units of every block; with more ranks than units, one
    unit, which several ranks have. An axis of size 1 (a scale for a whole row) is replicated."""

    source: str
    axis: int
    units: int
    blocks: int = 1

    def share(self, ranks: int) -> int:
        """Return a rank's number of units per block."""
        return max(1, self.units // ranks)

    def divides(self, size: int, ranks: int) -> bool:
        """Whether an axis of `size` elements can be sharded without splitting an element."""
        return size == 1 or size * self.share(ranks) % (self.units * self.blocks) == 0

    def ranges(self, size: int, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield (first, count) of a rank's elements along the axis."""
        if size == 1:
            yield 0, 1
            return
        units = self.blocks * self.units
        for block in range(self.blocks):
            first = block * self.units + rank * self.units // ranks
            yield first * size // units, self.share(ranks) * size // units

    def cut(self, tensor: Any, rank: int, ranks: int) -> Any:
        """Return a rank's shard of a tensor; a view if it is one range of the axis."""
        size = tensor.shape[self.axis]
        pieces = [tensor.narrow(self.axis, *r) for r in self.ranges(size, rank, ranks)]
        return torch.cat(pieces, self.axis) if len(pieces) > 1 else pieces[0]

    def cut_type(self, t: Type, ranks: int) -> Type:
        """Return the type of a rank's shard."""
        shape, size = list(t.shape), int(t.shape[self.axis])
        if size != 1:
            shape[self.axis] = size * self.share(ranks) // self.units
        return t.with_shape(*shape)

    def join_parts(self, parts: Sequence[Any], size: int) -> Any:
        """Return the full tensor from the shards of all ranks, in order; it has `size` elements
        along the axis."""
        shape = list(parts[0].shape)
        shape[self.axis] = size
        full = parts[0].new_empty(shape)
        for rank, part in enumerate(parts):
            at = 0
            for first, count in self.ranges(size, rank, len(parts)):
                full.narrow(self.axis, first, count).copy_(part.narrow(self.axis, at, count))
                at += count
        return full


@dataclass(frozen=True)
class Sharding:
    """Tensor parallelism of a model over `ranks`; with `ep`, expert parallelism of its experts."""

    spec: Spec
    ranks: int
    ep: bool = False

    def part(self, param: str) -> AxisShard | None:
        """Return the shard of a param of a sharded graph, or of a param's codes or scales; None if
        it is replicated."""
        for suffix in (CODES, SCALES):
            if param.endswith(suffix):
                part = self.part(param.removesuffix(suffix))
                return part and replace(part, source=f"{part.source}{suffix}")
        text = self.spec.text
        if param == HEAD:
            return AxisShard(TABLE if text.tie_word_embeddings else HEAD, 0, text.vocab_size)
        match, cuts = _WEIGHT.fullmatch(param), CUTS | EXPERT_CUTS if self.ep else CUTS
        index, name, *_ = [x for x in match.groups() if x] if match else ("", "")
        if name not in cuts:
            return None
        axis, by = cuts[name]
        return AxisShard(param, axis, *self._units(self.spec.layers()[int(index)], by))

    def _units(self, layer: Layer, by: str) -> tuple[int, int]:
        """Return (units per block, blocks) of an axis."""
        text, moe = self.spec.text, self.spec.text.moe
        expert, count = (moe.intermediate_size, moe.num_experts) if moe else (0, 0)
        return {
            "heads": (text.num_attention_heads, 1),
            "key heads": (layer.attention.num_key_value_heads, 1),
            "width": (layer.intermediate_size, 1),
            # gate rows, then up rows
            "expert widths": (expert, 2),
            "expert width": (expert, 1),
            "experts": (count, 1),
        }[by]

    def key_heads(self, layer: int) -> int:
        """Return the number of KV heads of a rank in a layer."""
        return max(1, self.spec.layers()[layer].attention.num_key_value_heads // self.ranks)

    def check(self) -> None:
        """Raise InputError if the model cannot be sharded like this."""
        if self.ranks < 1:
            raise InputError(f"--tp {self.ranks}: expected at least 1")
        if self.ep and self.ranks == 1:
            raise InputError("--ep needs --tp N, of 2 at least: one rank has all experts")
        if self.ep and not self.spec.text.moe:
            raise InputError(f"--ep: {self.spec.name} has no experts to divide; leave it out")
        if uneven := self._uneven(self.ranks):
            max_ranks = self.spec.text.num_attention_heads
            fine = ", ".join(str(n) for n in range(1, max_ranks + 1) if not self._uneven(n))
            key, size = uneven
            problem = f"{self.spec.name} has {key} {size}, which {self.ranks} ranks cannot share"
            raise InputError(f"--tp {self.ranks}: {problem}; expected one of {fine}")

    def _uneven(self, ranks: int) -> tuple[str, int] | None:
        """Return a config key and its value if the number of ranks does not divide it, else None;
        KV heads may also be a divisor of it, since they are replicated then."""
        text, moe = self.spec.text, self.spec.text.moe
        sizes = {
            "num_attention_heads": text.num_attention_heads,
            "intermediate_size": text.intermediate_size,
            "vocab_size": text.vocab_size,
        }
        if moe:
            key = "num_experts" if self.ep else "intermediate_size"
            sizes[f"moe.{key}"] = getattr(moe, key)
        layers = self.spec.layers()
        keys = {f"{x.kind}.num_key_value_heads": x.attention.num_key_value_heads for x in layers}
        uneven = (item for item in sizes.items() if item[1] % ranks)
        apart = (item for item in keys.items() if item[1] % ranks and ranks % item[1])
        return next(uneven, None) or next(apart, None)


@dataclass(frozen=True)
class Share:
    """One rank's shards of a model's weights."""

    sharding: Sharding
    rank: int

    def cuts(self, param: str) -> bool:
        """Whether a param may differ between ranks."""
        return self.sharding.ranks > 1 and (param == FIRST or self._part(param) is not None)

    def cuts_rows(self, param: str, t: Type) -> bool:
        """Whether a param is sharded along its last axis, that is, its rows are."""
        part = self._part(param)
        return part is not None and part.axis == len(t.shape) - 1

    def source(self, param: str) -> str | None:
        """Return the name of the full model's param that a rank's param is a shard of; None if
        there is none (FIRST)."""
        if param == FIRST:
            return None
        return part.source if (part := self._part(param)) else param

    def read_part(self, param: str, read: Callable[[str], Any]) -> Any:
        """Return the rank's shard of a param; `read` returns the full model's params."""
        if param == FIRST:
            assert self.sharding.spec.text.moe
            return torch.tensor(
                [self.rank * self.sharding.spec.text.moe.num_experts // self.sharding.ranks]
            )
        part = self._part(param)
        tensor = read(part.source if part else param)
        return part.cut(tensor, self.rank, self.sharding.ranks).contiguous() if part else tensor

    def join_parts(self, v: Value, read: Callable[[int, Value], Any]) -> Any:
        """Return a full weight `v` from all ranks' shards; `read(rank, value)` returns one, `value`
        having the shard's type."""
        part = self._part(v.name)
        if part is None:
            return read(0, v)
        local = Value(v.name, part.cut_type(v.type, self.sharding.ranks))
        parts = [read(rank, local) for rank in range(self.sharding.ranks)]
        return part.join_parts(parts, int(v.type.shape[part.axis]))

    def _part(self, param: str) -> AxisShard | None:
        return self.sharding.part(param) if self.sharding.ranks > 1 else None
