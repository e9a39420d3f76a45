"""Which part of each weight a rank has: a table by the tensor's place in the model.

Columns first, rows second (tensor parallel as in Megatron-LM): a layer needs one sum over ranks
after attention and one after its MLP. Heads are never cut; with fewer key heads than ranks, several
ranks hold the same one. Weights outside the table are whole on every rank: norms, scalars, routers,
embeddings. With expert parallelism (`ep`) a rank has some of the experts, and a number says which.
Quantised weights and scales are cut as the weights; a scale of a whole row is on every rank. Of a
draft model attention is cut, since it reads caches that are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.graph import Value
from g4ir.model.names import CODES, SCALES
from g4ir.ops.types import Type
from g4ir.spec.parts import Layer
from g4ir.spec.record import Spec

HEAD, TABLE = "head.w", "embed.table"
#: i64[1]: the first of a rank's experts, a param of graphs that are cut so
FIRST = "moe.first"
#: a layer's weight -> the axis that is cut, and what it is cut by
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
#: in the place of these, where experts are shared out
EXPERT_CUTS = {"moe.gate_up": (0, "experts"), "moe.down": (0, "experts")}
#: of a draft model attention alone: its heads read the caches of a rank, whose heads they go with
_WEIGHT = re.compile(r"L(\d+)\.(.+)|draft\.L(\d+)\.(attn\.w[qo])")


@dataclass(frozen=True)
class AxisShard:
    """A rank's part of `source` along `axis`, which is `blocks` blocks of `units` units each: its
    share of the units of every block, at least one. An axis of 1 is whole: a scale of a row."""

    source: str
    axis: int
    units: int
    blocks: int = 1

    def share(self, ranks: int) -> int:
        """Count the units of a block that a rank has."""
        return max(1, self.units // ranks)

    def divides(self, whole: int, ranks: int) -> bool:
        """Whether an axis of `whole` elements, of several values each, can be cut so."""
        return whole == 1 or whole * self.share(ranks) % (self.units * self.blocks) == 0

    def ranges(self, whole: int, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield (first, count) of the numbers along the axis that a rank has."""
        if whole == 1:
            yield 0, 1
            return
        units = self.blocks * self.units
        for block in range(self.blocks):
            first = block * self.units + rank * self.units // ranks
            yield first * whole // units, self.share(ranks) * whole // units

    def cut(self, tensor: Any, rank: int, ranks: int) -> Any:
        """Return a rank's part of a tensor: a view where it is one piece."""
        import torch

        whole = tensor.shape[self.axis]
        pieces = [tensor.narrow(self.axis, *r) for r in self.ranges(whole, rank, ranks)]
        return torch.cat(pieces, self.axis) if len(pieces) > 1 else pieces[0]

    def cut_type(self, t: Type, ranks: int) -> Type:
        """Return the type of a rank's part."""
        shape, whole = list(t.shape), int(t.shape[self.axis])
        if whole != 1:
            shape[self.axis] = whole * self.share(ranks) // self.units
        return t.with_shape(*shape)

    def joined(self, parts: Sequence[Any], whole: int) -> Any:
        """Return the tensor that ranks have these parts of, `whole` numbers along the axis."""
        shape = list(parts[0].shape)
        shape[self.axis] = whole
        made = parts[0].new_empty(shape)
        for rank, own in enumerate(parts):
            at = 0
            for first, size in self.ranges(whole, rank, len(parts)):
                made.narrow(self.axis, first, size).copy_(own.narrow(self.axis, at, size))
                at += size
        return made


@dataclass(frozen=True)
class Sharding:
    """A model that `ranks` share; with `ep` each has some of the experts, else a part of each."""

    spec: Spec
    ranks: int
    ep: bool = False

    def part(self, param: str) -> AxisShard | None:
        """Return a rank's part of a param of a sharded graph, or of its codes or scales; None: it
        is whole."""
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
        """Return the units of a block that may not be cut, and the blocks."""
        text, moe = self.spec.text, self.spec.text.moe
        expert, count = (moe.intermediate_size, moe.num_experts) if moe else (0, 0)
        return {
            "heads": (text.num_attention_heads, 1),
            "key heads": (layer.attention.num_key_value_heads, 1),
            "width": (layer.intermediate_size, 1),
            # gate and up lie one behind the other
            "expert widths": (expert, 2),
            "expert width": (expert, 1),
            "experts": (count, 1),
        }[by]

    def key_heads(self, layer: int) -> int:
        """Count the heads of keys and values whose caches a rank has."""
        return max(1, self.spec.layers()[layer].attention.num_key_value_heads // self.ranks)

    def check(self) -> None:
        """Raise InputError, naming the key and what would do, if a model cannot be cut so."""
        if self.ranks < 1:
            raise InputError(f"--tp {self.ranks}: expected at least 1")
        if self.ep and self.ranks == 1:
            raise InputError("--ep needs --tp N, of 2 at least: one rank has all experts")
        if self.ep and not self.spec.text.moe:
            raise InputError(f"--ep: {self.spec.name} has no experts to share out; leave it out")
        if uneven := self._uneven(self.ranks):
            most = self.spec.text.num_attention_heads
            fine = ", ".join(str(n) for n in range(1, most + 1) if not self._uneven(n))
            key, size = uneven
            what = f"{self.spec.name} has {key} {size}, which {self.ranks} ranks cannot share"
            raise InputError(f"--tp {self.ranks}: {what}; one of {fine}")

    def _uneven(self, ranks: int) -> tuple[str, int] | None:
        """Return a key and its number that ranks cannot divide; key heads may be replicated."""
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
    """The weights of one rank."""

    sharding: Sharding
    rank: int

    def cuts(self, param: str) -> bool:
        """Whether ranks have different parts of a param."""
        return self.sharding.ranks > 1 and (param == FIRST or self._part(param) is not None)

    def cuts_rows(self, param: str, t: Type) -> bool:
        """Whether ranks have parts of the same rows, each of which has a scale of its own."""
        part = self._part(param)
        return part is not None and part.axis == len(t.shape) - 1

    def source(self, param: str) -> str | None:
        """Return the param of the whole model that a param is cut from; None: a rank's own."""
        if param == FIRST:
            return None
        return part.source if (part := self._part(param)) else param

    def own(self, param: str, read: Callable[[str], Any]) -> Any:
        """Return the rank's part of a param; `read` gives those of the whole model."""
        if param == FIRST:
            import torch

            assert self.sharding.spec.text.moe
            return torch.tensor(
                [self.rank * self.sharding.spec.text.moe.num_experts // self.sharding.ranks]
            )
        part = self._part(param)
        made = read(part.source if part else param)
        return part.cut(made, self.rank, self.sharding.ranks).contiguous() if part else made

    def joined(self, v: Value, read: Callable[[int, Value], Any]) -> Any:
        """Return a weight of the whole model, of what the ranks have; `read` gives a rank's."""
        part = self._part(v.name)
        if part is None:
            return read(0, v)
        own = Value(v.name, part.cut_type(v.type, self.sharding.ranks))
        parts = [read(rank, own) for rank in range(self.sharding.ranks)]
        return part.joined(parts, int(v.type.shape[part.axis]))

    def _part(self, param: str) -> AxisShard | None:
        return self.sharding.part(param) if self.sharding.ranks > 1 else None
