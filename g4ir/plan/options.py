"""Options of a build: name, type, default and flag of each; help is in options.yaml.

Each is a flag of `g4ir build` and an argument of `g4ir.build`; those that decide memory are flags
of `g4ir plan` too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from textwrap import fill
from typing import Any

from g4ir.model.media import Media
from g4ir.passes import PASSES, PassOptions
from g4ir.quant.recipe import Recipe
from g4ir.spec.record import Spec
from g4ir.ui.files import read_table

from .engine_limits import Limits
from .gpus import gpu_names
from .layout import Layout

_HELP: dict[str, str] = read_table(Path(__file__).with_suffix(".yaml"))
_FILLED = {"limits": Limits(), "passes": fill(", ".join(PASSES), 76), "gpus": gpu_names()}


def option(name: str, default: Any, metavar: str | None = None, /, **flag: Any) -> Any:
    """Return a field with its help; `flag` holds what else argparse needs (cli/common.py)."""
    flag |= {"metavar": metavar} if metavar else {"action": "store_true"}
    metadata = {"help": _HELP[name].format(**_FILLED), "flag": flag}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class BuildOptions:
    """The options of a build as they were given."""

    checkpoint: str | Path | None = option("checkpoint", None, "DIR|FILE")
    mmproj: str | Path | None = option("mmproj", None, "FILE")
    adapter: str | Path | Iterable[str | Path] = option(
        "adapter", (), "DIR[=SCALE]", action="append"
    )
    random_weights: int | None = option("random_weights", None, "SEED", type=int)
    backend: str = option("backend", "torch", "B")
    device: str | None = option("device", None, "D")
    target: str | None = option("target", None, "GPUS")
    dtype: str | None = option("dtype", None, "T")
    quant: str | Path | None = option("quant", None, "Q")
    calibrate: str | Path | None = option("calibrate", None, "FILE")
    quant_activations: str | None = option("quant_activations", None, "Q")
    kv_dtype: str | None = option("kv_dtype", None, "T")
    max_batch: int = option("max_batch", Limits.max_batch, "N", type=int)
    max_seq: int | None = option("max_seq", None, "N")
    prefill_chunk: int = option("prefill_chunk", Limits.prefill_chunk, "N")
    all_logits: bool = option("all_logits", False)
    drafter: str | Path | None = option("drafter", None, "DIR|default")
    draft_tokens: int | None = option("draft_tokens", None, "K", type=int)
    tp: int = option("tp", 1, "N", type=int)
    ep: bool = option("ep", False)
    skip: Iterable[str] = option("skip", (), "PASS", action="append")
    latent_kv: str = option("latent_kv", "off", "FORM")
    ple_placement: str | None = option("ple_placement", None, "P")
    media: str | Iterable[str] = option("media", "all", "KINDS")
    image_budgets: Sequence[int] | None = option(
        "image_budgets", None, "N,..", name="--image-budget"
    )
    audio_seconds: Sequence[float] | None = option("audio_seconds", None, "N,..")
    settings: Mapping[str, str] | None = option(
        "settings", None, "NAME=VALUE", name="--set", action="append"
    )
    memory: int | None = option("memory", None, "GPU|BYTES")
    link_weights: bool = option("link_weights", False)


def options_text() -> str:
    """Return one line for each option: its name and help."""
    helps = ((f.name, " ".join(f.metadata["help"].split())) for f in fields(BuildOptions))
    return "\n".join(f"    {name}: {text}" for name, text in helps)


@dataclass(frozen=True)
class Resolved:
    """A spec and the options of its engine, each resolved: what graphs, sizes and the manifest
    follow from."""

    spec: Spec
    device: str
    dtype: str
    limits: Limits
    all_logits: bool
    skip: tuple[str, ...]
    options: PassOptions
    ple_placement: str | None
    media: Media
    recipe: Recipe | None
    drafter: Spec | None
    #: how many share the model, and whether each has some of the experts
    ranks: int
    ep: bool
    #: how its backend stores weights and caches
    layout: Layout = field(default=Layout(), kw_only=True)

    def of_graphs(self) -> dict[str, Any]:
        """Return the arguments of `make_packing`."""
        others = ("device", "limits", "ple_placement", "layout")  # on which no plain graph depends
        own = {f.name: getattr(self, f.name) for f in fields(Resolved) if f.name not in others}
        return {**own, "stored": self.layout.stored}
