"""Records of a plan; `Plan.to_dict` is the JSON of `g4ir plan --json`. Sizes are bytes, counts
elements.

Three totals of the KV cache everywhere. `naive`: every layer that owns K and V keeps both for the
whole context, as most calculators count. `planned`: sliding-window layers keep their window, layers
that share K and V have none. `built`: what this engine allocates, with the latent KV cache of K=V
layers and a quantised KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from g4ir.model.tensors import numel, tower_tensors
from g4ir.ops.types import ITEMSIZE
from g4ir.spec.record import Spec

from .count import Block, ParameterCounts
from .drafting import ACCEPTANCE, Gain
from .formats import nominal
from .media import MediaPart
from .options import BuildConfig

#: version of the JSON layout; another number has other keys
SCHEMA = 4
TOTALS = ("naive", "planned", "built")


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the decoder's weights in one format, as stored: by part, and by where they lie. A
    tied head is the token table and counted once."""

    format: str
    layers: int  # with norms and the shared parts of the per-layer embeddings
    token_table: int
    head: int  # 0 where it is tied
    ple_table: int
    device: int
    host: int
    mapped: int
    towers: int  # on the device, if the engine takes media
    nominal: int  # the usual estimate: bytes x the quoted count
    #: format of the file -> one with more bits that the backend stores it in
    upcast: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.layers + self.token_table + self.head + self.ple_table

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "total": self.total}


@dataclass(frozen=True)
class CacheRates:
    """KV cache bytes of one sequence, at a context not below the window: window + per_token *
    context."""

    naive_per_token: int
    per_token: int
    window: int
    built_per_token: int
    built_window: int


@dataclass(frozen=True)
class MemoryUse:
    """Bytes at one context and batch: the three KV cache totals, activations, workspace."""

    ctx: int
    batch: int
    naive: int
    planned: int
    built: int
    activations: int
    workspace: int


@dataclass(frozen=True)
class Need:
    """Bytes needed in the device's memory, as built, with weights in one format; with --tp, on each
    rank. What a device keeps free for itself (`Fit.reserve`) is not counted."""

    weights: str
    ctx: int
    batch: int
    bytes: int


@dataclass(frozen=True)
class DeviceUse:
    """Bytes needed on a device at one context and batch, with each KV cache total."""

    ctx: int
    batch: int
    naive: int
    planned: int
    built: int
    fits: bool  # as built
    spare: int  # as built; negative: bytes short
    decode_floor_s: float | None  # roofline time of a decode step; None: speed not known
    cards: int | None = None  # with --tp: the fewest ranks that fit, each on such a device


@dataclass(frozen=True)
class Largest:
    """The largest batch at a context, or the largest context at a batch (`at`); 0: nothing fits."""

    at: int
    naive: int
    planned: int
    built: int


@dataclass(frozen=True)
class Fit:
    """One device with weights in one format; with --tp, of one of `ranks` ranks."""

    device: str
    memory: int
    reserve: int
    weights: str  # format
    weight_bytes: int
    cells: tuple[DeviceUse, ...]
    max_context: tuple[Largest, ...]  # by batch
    max_batch: tuple[Largest, ...]  # by context
    ranks: int = 1
    ple_placement: str | None = None  # as a build for this device has it


@dataclass(frozen=True)
class Drafts:
    """Cost and gain of speculative decoding, by batch."""

    tokens: int  # maximum draft tokens per verification step
    slack_bytes: int  # of a sequence's ring caches, for rejected tokens
    context: int
    weights: str
    device: str | None  # None: costs are bytes
    tables: tuple[tuple[int, tuple[Gain, ...]], ...]
    drafter: str | None = None  # None: drafts cost nothing (n-gram proposer)
    drafter_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        tables = [{"batch": b, "rounds": [g.to_dict() for g in found]} for b, found in self.tables]
        return {**vars(self), "acceptance": list(ACCEPTANCE), "tables": tables}


@dataclass(frozen=True)
class RankRow:
    """KV cache bytes of a rank at one context and batch."""

    ctx: int
    batch: int
    cache: int


@dataclass(frozen=True)
class Ranks:
    """One of `count` equal ranks."""

    count: int
    weights: int  # without tables that are only gathered from
    drafter: int  # of the draft model's weights
    rows: tuple[RankRow, ...]
    messages: int  # collectives of a decode step
    message_bytes: int  # what a rank sends in them per sequence


@dataclass(frozen=True)
class Plan:
    """Memory and speed of a variant, by `make_plan`."""

    config: BuildConfig  # its limits are the most there is
    counts: ParameterCounts
    ple: Mapping[str, int]
    blocks: tuple[Block, ...]  # per kind of layer
    layers: tuple[Block, ...]
    weights: tuple[WeightBytes, ...]  # per format
    cache: CacheRates
    rows: tuple[MemoryUse, ...]
    needed: tuple[Need, ...]
    fits: tuple[Fit, ...]
    media: tuple[MediaPart, ...]
    drafts: Drafts | None = None
    ranks: Ranks | None = None  # None: one rank

    @property
    def spec(self) -> Spec:
        return self.config.spec

    def weights_as(self, form: str) -> WeightBytes:
        return next(w for w in self.weights if w.format == form)

    def to_dict(self) -> dict[str, Any]:
        c = self.config
        return {k: _json(v) for k, v in _without(self, "config", "counts", "ple").items()} | {
            "schema": SCHEMA,
            "variant": c.spec.name,
            "hub": c.spec.hub,
            "spec_digest": c.spec.digest(),
            "dtype": c.dtype,
            "backend": c.backend,
            "device": c.device,
            "latent": c.latent_kv,
            "kv_dtype": c.kv_dtype,
            "ple_placement": c.ple_placement,
            "prefill_chunk": c.limits.prefill_chunk,
            "skipped_passes": list(c.skip),
            "max_context": c.spec.text.max_position_embeddings,
            "parameters": _parameters(c.spec, self.counts),
            "ple_parameters": dict(self.ple),
            "media": {"kinds": list(c.media.kinds), "parts": _json(self.media)},
        }


def _without(record: Any, *names: str) -> dict[str, Any]:
    return {k: v for k, v in vars(record).items() if k not in names}


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json(v) for v in value]
    if isinstance(value, WeightBytes | Block | Drafts):
        return value.to_dict()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _parameters(spec: Spec, n: ParameterCounts) -> dict[str, int]:
    towers, moe = tower_tensors(spec), spec.text.moe

    def elements(*endings: str) -> int:
        return numel({k: v for k, v in towers.items() if k.endswith(endings)})

    return {
        "published": n.hub_parameters,
        "published_elements": n.hub,
        "published_tensors": n.hub_tensors,
        "published_bytes": n.hub * ITEMSIZE[spec.dtype],
        "loaded": n.loaded,
        "text": n.text,
        "active": n.active,
        "active_body": n.active - (n.head or n.embed),
        "nominal": nominal(n.hub_parameters),
        "one_expert": 3 * moe.intermediate_size * spec.text.hidden_size if moe else 0,
        **asdict(n),
        "vision_position_table": elements(".position_embedding_table"),
        "vision_buffers": elements(".std_bias", ".std_scale"),
    }
