"""Inputs and outputs of an engine: all that is needed to use `engine.plan` without
Python. `engine.io.json` says it for one engine.

Inputs, all in device memory and contiguous:

    embeds, ple_rows   rows of the embedding tables for the chunk's tokens (the tables themselves
                       stay outside); `ple_rows` only where the variant has per-layer embeddings
    positions i64[B,S] of the chunk's tokens: row b's start at what the row holds
    lengths   i64[B]   how many of the S tokens of each row are valid; 0 leaves a row as it is
    turned    i64[B]   how far the rings of each row are turned; zeros at first
    slots     i64[C]   0, 1, 2, ...: C is how much of the full-length caches the step looks at, at
                       least as much as any row holds afterwards
    rows      i64[B,R] in an engine that verifies drafted tokens: of which rows of the chunk there
                       are logits, which are [B,R,vocab] then
    block_ids i64[B,S] where the variant sees pictures both ways: one number for all soft tokens of
                       a picture, which are in one chunk, and -1 for every other token
    NAME               one tensor per cache, zero at first

Outputs: `logits`, of which row b belongs to its last valid token (or of every token, in an engine
built with --all-logits), and `NAME.next` for each cache.

A cache is [B, heads, slots, head_dim] and is updated in place: `aliased` names the input whose
address the output must have. A ring of R slots has `turned` beside it: position p of a row lies in
slot (p + turned) mod R, and a chunk must not cross the end of a ring. Either `turned` stays zero,
and chunks end there, or the row's rings are turned by as many slots as `turned` changes by.
Optimisation profile 0 is decode, whose S is
1; profile 1 is prefill, whose S is 1 to prefill_chunk; profile 2, where there are `rows`, is
verification, which asks for all rows of a few tokens; the others ask for one.

Of several ranks each has an engine, with the same inputs but for its part of the caches' heads, and
the same outputs. Its context is given an NCCL communicator of all ranks before its first step, and
all ranks run the same steps.

A drafter's step is an engine of its own (`draft.plan` and `draft.io.json`), which reads caches of
the text model where they lie and has one profile: `embeds` of the newest or last drafted token,
`hidden` of the step that it came of, `positions` where drafts stand, `last` position and `written`
tokens of each row, to `draft.token` i64[B] and `draft.hidden`.

A tower is an engine of its own too (`vision_N.plan` and `vision_N.io.json`, `audio_N`), with static
shapes and without profiles: a picture's `patches` f32[1,P,D] of 0 to 1 and `positions` i64[1,P,2],
(-1, -1) for padding, or a sound's `features` f32[1,T,F] and `mask` bool[1,T], to `soft` [1,N,H].
Soft tokens take the place of the rows of `embeds` where the picture or sound stands; those of
padding come last and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from g4ir.ir.graph import Graph
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT
from g4ir.ops.types import Type
from g4ir.plan.limits import Limits

from ..primitives.network import FULL, ROWS, SLOTS, is_ring, network_inputs

#: profiles of the text model's engine in the order of their indices, by the phase that each serves
PROFILES = ("decode", "prefill", VERIFY)
#: tokens verified at a time at most, where no ring says for how many it has room
MOST_VERIFIED = 33
#: slots of the full-length caches that kernels are timed for, where rows may hold as many
TYPICAL_SLOTS = 2048

#: least, typical and largest size of a dim
Range = tuple[int, int, int]


@dataclass(frozen=True)
class Interface:
    """Tensors by name. Named dims: B rows, S tokens of a chunk, R of which there are logits, and C
    slots of a full-length cache."""

    inputs: Mapping[str, Type]
    outputs: Mapping[str, Type]
    #: output -> the input whose address it has: every cache
    aliased: Mapping[str, str]
    #: the inputs that are rings
    rings: frozenset[str]
    #: profile -> dim -> range; none of a tower, whose shapes are static
    profiles: Mapping[str, Mapping[str, Range]]

    def shapes(self, name: str, profile: str) -> tuple[tuple[int, ...], ...]:
        """Return the least, typical and largest shape of an input in a profile."""
        dims = self.profiles[profile]
        return tuple(
            tuple(d if isinstance(d, int) else dims[d][i] for d in self.inputs[name].shape)
            for i in range(3)
        )

    def dynamic(self) -> list[str]:
        """Return the inputs with a named dim."""
        return [n for n, t in self.inputs.items() if any(isinstance(d, str) for d in t.shape)]

    def shape(self, name: str, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of an input or output with these sizes."""
        t = self.inputs.get(name) or self.outputs[name]
        return tuple(d if isinstance(d, int) else dims[d] for d in t.shape)

    def as_json(self) -> dict[str, Any]:
        return {
            "inputs": [_tensor(n, t) for n, t in self.inputs.items()],
            "outputs": [
                _tensor(n, t) | ({"aliased": self.aliased[n]} if n in self.aliased else {})
                for n, t in self.outputs.items()
            ],
            "profiles": [
                {"index": i, "phase": name, "dims": {d: list(r) for d, r in dims.items()}}
                for i, (name, dims) in enumerate(self.profiles.items())
            ],
        }


def _tensor(name: str, t: Type) -> dict[str, Any]:
    return {"name": name, "dtype": t.dtype, "shape": list(t.shape)}


def interface(g: Graph, limits: Limits) -> Interface:
    """Return the tensors of the network that is written from this graph (primitives/network.py)."""
    inputs = network_inputs(g, limits)
    after = {f"{name}.next": name for name in g.next}
    return Interface(
        inputs,
        {v.name: v.type for v in g.outputs} | {o: inputs[i] for o, i in after.items()},
        after,
        frozenset(v.name for v in g.state if is_ring(v.type)),
        {profile: _ranges(profile, g, limits) for profile in profiles_of(g)},
    )


def profiles_of(g: Graph) -> tuple[str, ...]:
    """Return the profiles of a network, in order: a drafter's step reads caches and writes none, a
    tower has none."""
    if g.name == DRAFT:
        return (DRAFT,)
    given = {v.name for v in g.inputs}
    return tuple(p for p in PROFILES if g.state and (p != VERIFY or ROWS in given))


def _ranges(profile: str, g: Graph, limits: Limits) -> dict[str, Range]:
    rows, seq, inputs = limits.max_batch, limits.max_seq, network_inputs(g, limits)
    most = {"prefill": limits.prefill_chunk, VERIFY: _verified(g, limits)}
    tokens = most.get(profile, 1)
    ranges: dict[str, Range] = {"B": (1, rows, rows), "S": (1, tokens, tokens)}
    if any("R" in t.shape for t in inputs.values()):
        asked = most[VERIFY] if profile == VERIFY else 1
        ranges["R"] = (1, asked, asked)
    if SLOTS in inputs:
        ranges[FULL] = (1, min(seq, TYPICAL_SLOTS), seq)
    return ranges


def _verified(g: Graph, limits: Limits) -> int:
    """Return how many tokens are verified at a time at most: one more than rings have slack."""
    rings = (
        int(v.type.shape[0]) - n.whole("window")
        for n in g.nodes
        if n.definition.held
        for v in n.caches
        if is_ring(v.type)
    )
    return min(max(rings, default=MOST_VERIFIED - 1) + 1, limits.prefill_chunk)
