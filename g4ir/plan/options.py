"""Options of a build: name, type, default and flag of each; help is in options.yaml.

Each is a flag of `g4ir build` and an argument of `g4ir.build`; those that decide memory are flags
of `g4ir plan` too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

from g4ir.errors import InputError
from g4ir.ir.graph import Program
from g4ir.model.media import Media, media_options
from g4ir.model.text import build_program
from g4ir.ops.types import TORCH_NAMES
from g4ir.parallel.shard import shard_program
from g4ir.parallel.table import Sharding
from g4ir.passes import PASSES, Dump, PassCounts, PassOptions, run_program
from g4ir.passes.latent_kv import LatentOptions
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.plan_cache import RingOptions
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.quant.recipe import QuantConfig
from g4ir.quant.rewrite import quantise
from g4ir.spec.reader import OneOf, Range
from g4ir.spec.record import Spec
from g4ir.ui.files import read_table
from g4ir.weights.pack import Packing, split_program

from .backend import PlannedBackend
from .engine_limits import Limits
from .formats import DEVICES, DTYPES, KV_NAMES
from .gpus import gpu_names

_HELP: dict[str, str] = read_table(Path(__file__).with_suffix(".yaml"))
#: type of a field -> accepted types of its values, and their name in errors
NUMERIC_TYPES = {"int": (Integral, "a whole number"), "float": (Real, "a number")}
_FILLED = {"limits": Limits(), "passes": fill(", ".join(PASSES), 76), "gpus": gpu_names()}


def option(name: str, default: Any, metavar: str | None = None, /, **flag: Any) -> Any:
    """Return a dataclass field with its help from options.yaml; a switch without `metavar`. `flag`:
    further arguments for argparse (cli/verb.py)."""
    flag |= {"metavar": metavar} if metavar else {"action": "store_true"}
    metadata = {"help": _HELP[name].format(**_FILLED), "flag": flag}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class BuildOptions:
    """The options of a build, before they are resolved."""

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
    bits: float | None = option("bits", None, "N", type=float)
    requantize: bool = option("requantize", False, setting=True)
    calibrate: str | Path | Iterable[str | Path] = option("calibrate", (), "TEXT", action="append")
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
    ple_placement: str | None = option("ple_placement", None, "P", setting=True)
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

    def __post_init__(self) -> None:
        """Raise InputError for a value that is no number where one is expected."""
        for f in fields(self):
            value, kind = getattr(self, f.name), NUMERIC_TYPES.get(str(f.type).partition(" ")[0])
            if kind and value is not None and not isinstance(value, kind[0]):
                raise InputError(f"{flag_of(f.name)} {value!r}: expected {kind[1]}")


def flag_of(name: str) -> str:
    """Return the flag of a build option, `--NAME` or `--set NAME`; of another argument `--NAME`."""
    f = BuildOptions.__dataclass_fields__.get(name)
    metadata = f.metadata["flag"] if f else {}
    default = f"--set {name}" if metadata.get("setting") else f"--{name.replace('_', '-')}"
    return metadata.get("name") or default


def options_text() -> str:
    """Return one line for each option: its name and help."""
    helps = ((f.name, " ".join(f.metadata["help"].split())) for f in fields(BuildOptions))
    return "\n".join(f"    {name}: {text}" for name, text in helps)


def words_of(value: Any) -> str:
    """Return an option's value as text for its flag."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={words_of(x)}" for key, x in value.items())
    return ",".join(map(words_of, value)) if isinstance(value, list | tuple) else str(value)


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Return build options as command-line arguments, without options that are off."""
    words = []
    for f in fields(BuildOptions):
        how, flag, value = f.metadata["flag"], flag_of(f.name), values.get(f.name)
        if value is None or (value in (False, "off", (), [], {}) and f.name != "random_weights"):
            continue
        if how.get("setting"):
            words += ["--set", f"{f.name}={'on' if value is True else words_of(value)}"]
            continue
        if value is True:
            words.append(flag)
        elif how.get("action") == "append" and not isinstance(value, str):
            items = value.items() if isinstance(value, Mapping) else value
            each = ("=".join(x) if isinstance(x, tuple) else str(x) for x in items)
            words += [word for x in each for word in (flag, x)]
        else:
            words += [flag, words_of(value)]
    return words


@dataclass(frozen=True)
class BuildConfig:
    """A spec and the resolved options of its engine, which determine graphs and sizes, and are
    recorded in the manifest. `ranks` is the option `tp`; `options` are those of the passes."""

    spec: Spec
    drafter: Spec | None
    backend: str
    #: every setting of the backend
    settings: dict[str, str] = field(hash=False)
    device: Annotated[str, OneOf(DEVICES)]
    dtype: Annotated[str, OneOf(DTYPES)]
    #: number of ranks (tensor parallelism)
    ranks: Annotated[int, Range(1, 1 << 16)]
    #: expert parallelism: whether each rank has whole experts instead of a part of every expert
    ep: bool
    limits: Limits
    all_logits: bool
    skip: tuple[str, ...]
    options: PassOptions
    ple_placement: str | None
    media: Media
    quant: QuantConfig | None

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.spec, self.ranks, self.ep)

    @property
    def draft_tokens(self) -> int:
        """Maximum draft tokens of a verification step; 0: no speculative decoding."""
        return self.options.of(RingOptions).slack

    @property
    def latent_kv(self) -> str:
        """The latent KV cache of K=V layers: off or value."""
        return self.options.of(LatentOptions).form

    @property
    def kv_dtype(self) -> str | None:
        """The --kv-dtype of a quantised KV cache; None if it is not quantised."""
        return KV_NAMES.get(self.options.of(NarrowOptions).to)

    @property
    def activations(self) -> str:
        """Format of activation quantisation, or `off`."""
        return self.options.of(ActivationOptions).to

    def as_options(self) -> dict[str, Any]:
        """Return the options of a build that resolves to this config, by name, without its weights;
        draft models and quantisation configs are given by their names."""
        values = vars(self) | asdict(self.limits) | media_options(self.media, self.spec)
        values |= {
            "tp": self.ranks,
            "dtype": TORCH_NAMES[self.dtype],
            "quant": self.quant and self.quant.name,
            "drafter": self.drafter and self.drafter.name,
        }
        values |= {name: getattr(self, name) for name in ("latent_kv", "kv_dtype", "draft_tokens")}
        values |= {"quant_activations": self.activations}
        return {f.name: values[f.name] for f in fields(BuildOptions) if f.name in values}

    def packing(
        self,
        backend: PlannedBackend,
        dump: Dump | None = None,
        acted: PassCounts | None = None,
        without: Collection[str] = (),
    ) -> Packing:
        """Return the graphs of its engine, or of one of its ranks, as a backend loads them, and the
        prologue of their params. `acted` counts what the passes did; `without`: graphs to leave
        out."""
        spec, verifies = self.spec, self.options.of(RingOptions).slack > 0
        program = build_program(
            spec, self.all_logits, self.dtype, self.media, verifies, self.drafter
        )
        graphs = {name: g for name, g in program.graphs.items() if name not in without}
        program = quantise(Program(graphs), spec, self.quant, self.dtype)
        program = shard_program(program, Sharding(spec, self.ranks, self.ep))
        program = run_program(program, skip=self.skip, dump=dump, options=self.options, acted=acted)
        return split_program(backend.stored(program, self.device))

    def to_dict(self) -> dict[str, Any]:
        """Return the values of a manifest; specs as their digests."""
        names = {
            "variant": self.spec.name,
            "spec_digest": self.spec.digest(),
            "drafter_digest": self.drafter.digest() if self.drafter else None,
        }
        settings = {k: v for k, v in asdict(self).items() if k not in ("spec", "drafter")}
        return {**names, **settings, "options": self.options.to_dict()}
