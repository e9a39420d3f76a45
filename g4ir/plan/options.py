"""Everything that a build may be told: the name, default and help of each option.

Each is a flag of `g4ir build` and an argument of `g4ir.build`; those that decide memory are flags
of `g4ir plan` too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from textwrap import fill
from typing import Any

from g4ir.model.media import Media
from g4ir.passes import PASSES, Options
from g4ir.quant.recipe import Recipe
from g4ir.spec.record import Spec

from .gpus import gpu_names
from .limits import Limits


def option(default: Any, help: str, **flag: Any) -> Any:
    """Return a field with its help; `flag` holds what argparse needs beside it (cli/common.py)."""
    return field(default=default, metadata={"help": help, "flag": flag})


@dataclass(frozen=True)
class BuildOptions:
    """The options of a build as they were given."""

    checkpoint: str | Path | None = option(
        None,
        "a Hugging Face directory, or a GGUF file (default: the local hub cache)",
        metavar="DIR|FILE",
    )
    mmproj: str | Path | None = option(
        None, "the GGUF file of the towers, beside a GGUF checkpoint", metavar="FILE"
    )
    adapter: str | Path | Iterable[str | Path] = option(
        (),
        "merge a LoRA adapter (PEFT's directory) into the checkpoint's weights, SCALE\ntimes "
        "(default 1); may be repeated",
        action="append",
        metavar="DIR[=SCALE]",
    )
    random_weights: int | None = option(None, "weights made from a seed", type=int, metavar="SEED")
    backend: str = option("torch", "reference, torch, onnx or trt", metavar="B")
    device: str | None = option(None, "cpu or cuda (default: by backend)", metavar="D")
    dtype: str | None = option(
        None, "float32, bfloat16 or float16 (default: the spec's)", metavar="T"
    )
    residual_scale: int = option(
        1,
        "divide the residual stream by 2, 4, 8 or 16, which keeps it in the range of\nfloat16 "
        "(default 1: not); results stay the same",
        type=int,
        metavar="N",
    )
    quant: str | Path | None = option(
        None,
        "weights in fewer bits: int8, int4, fp8, or a recipe FILE.yaml\n(default none)",
        metavar="Q",
    )
    quant_activations: str | None = option(
        None,
        "round what products with quantised weights take: int8 (in groups of 32)\nor fp8 "
        "(default: not)",
        metavar="Q",
    )
    kv_dtype: str | None = option(
        None,
        "K and V in the caches: bfloat16, float8 or int8 (in groups of 32)\n(default: the dtype)",
        metavar="T",
    )
    max_batch: int = option(
        Limits.max_batch, f"maximum batch size (default {Limits.max_batch})", type=int, metavar="N"
    )
    max_seq: int | None = option(
        None,
        f"tokens of a row, new ones too (default {Limits.max_seq}, or the model's limit)",
        metavar="N",
    )
    prefill_chunk: int = option(
        Limits.prefill_chunk,
        f"tokens of a prompt at a time (default {Limits.prefill_chunk})",
        metavar="N",
    )
    all_logits: bool = option(
        False, "prefill can return the logits of every token", action="store_true"
    )
    drafter: str | Path | None = option(
        None,
        "a model that drafts tokens: its checkpoint, its spec FILE.yaml (for random\nweights), "
        "or `default`: the one that belongs to the variant (default none)",
        metavar="DIR|default",
    )
    draft_tokens: int | None = option(
        None,
        "tokens drafted at a time at most, which one step then verifies (default 0:\nno drafting; "
        "4 with a drafter)",
        type=int,
        metavar="K",
    )
    tp: int = option(
        1,
        "ranks that share the model, each a process with its part (default 1); it is\n"
        "run by torchrun --nproc-per-node N",
        type=int,
        metavar="N",
    )
    ep: bool = option(
        False,
        "with --tp: each rank has some of the experts, not a part of each",
        action="store_true",
    )
    skip: Iterable[str] = option(
        (),
        "leave a pass out:\n" + fill(", ".join(PASSES), 76),
        action="append",
        metavar="PASS",
    )
    latent_kv: str = option(
        "auto",
        "latent KV cache of layers with K=V: off, value, raw, or auto (default): by\nthe GPU "
        "and the context length",
        metavar="FORM",
    )
    ple_placement: str | None = option(
        None,
        "where the per-layer table lies: device, host or mmap (default:\n"
        "on cuda the device where it fits, else mmap)",
        metavar="P",
    )
    media: str | Iterable[str] = option(
        "all",
        "all that the variant takes (default), none, or some of image,video,audio",
        metavar="KINDS",
    )
    image_budgets: Sequence[int] | None = option(
        None,
        "soft tokens of an image at most: 70, 140, 280, 560 or 1120; the first is\n"
        "what images get unless asked otherwise (default: the variant's own)",
        name="--image-budget",
        metavar="N,..",
    )
    audio_seconds: Sequence[float] | None = option(
        None,
        "lengths of sound to compile for; the next longer one is used\n(default 5,10,20,30)",
        metavar="N,..",
    )
    settings: Mapping[str, str] | None = option(
        None,
        "a setting of the backend: onnx has experts; trt has attention, experts, norms,\nweights "
        "and hardware; a wrong value lists the right ones",
        name="--set",
        metavar="NAME=VALUE",
        action="append",
    )
    memory: int | None = option(
        None,
        "memory to fit: a size such as 24GiB, or that of a GPU (default: all of the\ndevice's):\n"
        + gpu_names(),
        metavar="GPU|BYTES",
    )
    link_weights: bool = option(
        False, "refer to the checkpoint's files instead of copying them", action="store_true"
    )


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
    options: Options
    ple_placement: str | None
    media: Media
    recipe: Recipe | None
    drafter: Spec | None
    #: how many share the model, and whether each has some of the experts
    ranks: int
    ep: bool
