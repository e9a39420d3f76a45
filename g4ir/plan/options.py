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
from g4ir.passes import PASSES, PassOptions
from g4ir.quant.recipe import Recipe
from g4ir.spec.record import Spec

from .engine_limits import Limits
from .gpus import gpu_names


def option(default: Any, help: str, **flag: Any) -> Any:
    """Return a field with its help; `flag` holds what argparse needs beside it (cli/common.py)."""
    return field(default=default, metadata={"help": help, "flag": flag})


@dataclass(frozen=True)
class BuildOptions:
    """The options of a build as they were given."""

    checkpoint: str | Path | None = option(
        None,
        "Hugging Face checkpoint directory or GGUF file (default: the local hub cache)",
        metavar="DIR|FILE",
    )
    mmproj: str | Path | None = option(
        None, "GGUF file of the vision and audio towers, for a GGUF checkpoint", metavar="FILE"
    )
    adapter: str | Path | Iterable[str | Path] = option(
        (),
        "merge a LoRA adapter (PEFT directory) into the checkpoint's weights, scaled by\nSCALE "
        "(default 1)",
        action="append",
        metavar="DIR[=SCALE]",
    )
    random_weights: int | None = option(
        None, "random weights from this seed, without a checkpoint", type=int, metavar="SEED"
    )
    backend: str = option("torch", "backend: reference, torch, onnx or trt", metavar="B")
    device: str | None = option(None, "device: cpu or cuda (default: by backend)", metavar="D")
    dtype: str | None = option(
        None, "model dtype: float32, bfloat16 or float16 (default: the spec's)", metavar="T"
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
        "weight quantisation: int8, int4, fp8, or a quantisation config FILE.yaml\n(default none)",
        metavar="Q",
    )
    quant_activations: str | None = option(
        None,
        "quantise activations before matmuls with quantised weights: int8 (groups of\n32) or fp8 "
        "(default none)",
        metavar="Q",
    )
    kv_dtype: str | None = option(
        None,
        "KV cache dtype: bfloat16, float8 or int8 (groups of 32)\n(default: the model dtype)",
        metavar="T",
    )
    max_batch: int = option(
        Limits.max_batch, f"maximum batch size (default {Limits.max_batch})", type=int, metavar="N"
    )
    max_seq: int | None = option(
        None,
        "maximum sequence length, prompt + generated\n"
        f"(default {Limits.max_seq}, or the model's limit)",
        metavar="N",
    )
    prefill_chunk: int = option(
        Limits.prefill_chunk,
        f"chunk size of chunked prefill, in tokens (default {Limits.prefill_chunk})",
        metavar="N",
    )
    all_logits: bool = option(
        False, "let prefill return the logits of every position", action="store_true"
    )
    drafter: str | Path | None = option(
        None,
        "draft model (MTP): its checkpoint, its spec FILE.yaml (random weights), or\n`default`: "
        "the variant's own (default none)",
        metavar="DIR|default",
    )
    draft_tokens: int | None = option(
        None,
        "maximum draft tokens per verification step (default 0: no speculative\ndecoding; "
        "4 with a draft model)",
        type=int,
        metavar="K",
    )
    tp: int = option(
        1,
        "tensor-parallel size: one process per rank, launched by\n"
        "torchrun --nproc-per-node N (default 1)",
        type=int,
        metavar="N",
    )
    ep: bool = option(
        False,
        "with --tp: expert parallelism (whole experts on each rank)",
        action="store_true",
    )
    skip: Iterable[str] = option(
        (),
        "disable a pass:\n" + fill(", ".join(PASSES), 76),
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
        "memory of the per-layer embedding table: device, host or mmap\n"
        "(default: on cuda the device if it fits, else mmap)",
        metavar="P",
    )
    media: str | Iterable[str] = option(
        "all",
        "modalities: all of the variant (default), none, or some of image,video,audio",
        metavar="KINDS",
    )
    image_budgets: Sequence[int] | None = option(
        None,
        "maximum soft tokens per image: 70, 140, 280, 560 or 1120; the first is the\n"
        "default of requests (default: the variant's own)",
        name="--image-budget",
        metavar="N,..",
    )
    audio_seconds: Sequence[float] | None = option(
        None,
        "audio lengths to compile; audio is padded to the next longer one\n(default 5,10,20,30)",
        metavar="N,..",
    )
    settings: Mapping[str, str] | None = option(
        None,
        "backend setting: decode_step (torch); experts (onnx); attention, experts, norms,\n"
        "weights, hardware (trt); "
        "an unknown value lists the legal ones",
        name="--set",
        metavar="NAME=VALUE",
        action="append",
    )
    memory: int | None = option(
        None,
        "memory limit: a size such as 24GiB, or a GPU's (default: all of the device):\n"
        + gpu_names(),
        metavar="GPU|BYTES",
    )
    link_weights: bool = option(
        False, "reference the checkpoint's files instead of copying them", action="store_true"
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
    options: PassOptions
    ple_placement: str | None
    media: Media
    recipe: Recipe | None
    drafter: Spec | None
    #: how many share the model, and whether each has some of the experts
    ranks: int
    ep: bool
