"""Records of a plan; `Plan.to_dict` is the JSON of `g4ir plan --json`. Sizes are bytes, counts
elements.

Two totals of the KV cache. `naive`: every layer that owns K and V keeps both for the whole context,
as most calculators count. `planned`: what this engine allocates; sliding-window layers keep their
window, KV-shared layers have no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from g4ir.spec.record import Spec

from .count import ParameterCounts
from .gpus import Gpu
from .options import BuildConfig

#: version of the JSON layout; another number has other keys
SCHEMA = 5


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of an engine's weights in one format, by memory: device, host, or memory-mapped
    file."""

    format: str
    decoder: int  # text decoder: without towers and draft model
    device: int
    host: int
    mapped: int
    #: weight format of the config -> wider format in which the backend stores the weights
    upcast: Mapping[str, str]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes with weights in one format, at one batch and context."""

    weights: str
    batch: int
    ctx: int
    naive: int
    planned: int
    activations: int
    workspace: int
    #: total in the device's memory, with the planned KV cache
    needed: int
    #: bytes left of a device's memory without its reserve, negative: bytes short; None: no device
    spare: int | None
    #: roofline time of a decode step; None without a device of known bandwidth, and for an encoder
    step_s: float | None


@dataclass(frozen=True)
class Largest:
    """The largest sizes that fit a device with weights in one format; 0: nothing fits."""

    weights: str
    max_context: Mapping[int, int]  # by batch
    max_batch: Mapping[int, int]  # by context
    #: with several ranks: least number of cards, of 1, 2, 4, 8 and the plan's ranks, on which the
    #: longest of the planned contexts fits, at the smallest batch; None if none suffices, or for
    #: one rank
    cards: int | None = None


@dataclass(frozen=True)
class Plan:
    """Memory and speed of a variant (`make_plan`) or an engine (`plan_engine`). If there are
    several ranks, bytes and times are those of one."""

    config: BuildConfig  # its limits are the upper bounds of batch and context
    counts: ParameterCounts
    weights: tuple[WeightBytes, ...]  # one per weight format
    rows: tuple[MemoryUse, ...]  # one per weight format, batch and context
    gpu: Gpu | None
    largest: tuple[Largest, ...]  # one per weight format; empty without a device

    @property
    def spec(self) -> Spec:
        return self.config.spec

    def weights_as(self, fmt: str) -> WeightBytes:
        return next(w for w in self.weights if w.format == fmt)

    def to_dict(self) -> dict[str, Any]:
        c, n = self.config, self.counts
        sums = {"published": n.hub_parameters, "loaded": n.loaded, "text": n.text}
        parts = {k: v for k, v in asdict(n).items() if k != "is_encoder"}
        return {
            "schema": SCHEMA,
            "variant": c.spec.name,
            "hub": c.spec.hub,
            "spec_digest": c.spec.digest(),
            "dtype": c.dtype,
            "backend": c.backend,
            "device": c.device,
            "ranks": c.ranks,
            "latent": c.latent_kv,
            "kv_dtype": c.kv_dtype,
            "ple_placement": c.ple_placement,
            "prefill_chunk": c.limits.prefill_chunk,
            "skipped_passes": list(c.skip),
            "media": list(c.media.kinds),
            "max_context": c.spec.text.max_position_embeddings,
            "parameters": {**sums, "active": n.active, **parts},
            "weights": [asdict(w) for w in self.weights],
            "rows": [asdict(r) for r in self.rows],
            "gpu": self.gpu and asdict(self.gpu),
            "largest": [asdict(x) for x in self.largest],
        }
