"""Resolves choices of a user against a spec without loading torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from g4ir.errors import InputError
from g4ir.model.draft import check_pair, shipped_drafter
from g4ir.ops.quant import ACTIVATIONS
from g4ir.ops.reduce_norm import MOST_ROWS
from g4ir.ops.types import ITEMSIZE, TORCH_NAMES, dtype_name
from g4ir.passes import Options
from g4ir.passes.latent_kv import FORMS
from g4ir.passes.match import OFF
from g4ir.passes.scale_residual import DIVISORS
from g4ir.spec.record import SUFFIXES, Spec, load_spec
from g4ir.weights.checkpoint import CONFIG, GGUF
from g4ir.weights.pack import DEFAULT_PLACEMENT, PLACEMENTS

from .formats import DTYPES
from .latent import choose_form

DEVICES = ("cpu", "cuda")
#: what caches may hold, as a user says it -> dtype of their rows (ops/kv_quant.py)
KV_DTYPES = {"bfloat16": "bf16", "float8": "f8e4m3", "int8": "i8"}
#: a round costs about what its weights cost to read; of more tokens, products cost more than that
MOST_DRAFTED = 32
#: what a drafter drafts unless told: further ones are seldom right
DRAFTED = 4
#: words for the drafter that belongs to the variant, and for none
DEFAULT, NO_DRAFTER = "default", (None, "none")
KV_NAMES = {short: name for name, short in KV_DTYPES.items()}


def find_dtype(name: str) -> str:
    """`float32`, `f32` -> f32; InputError for what no engine computes in."""
    try:
        short = dtype_name(name)
    except ValueError:
        short = name
    if short not in DTYPES:
        raise InputError(f"dtype {name!r}: expected float32, bfloat16 or float16")
    return short


def find_kv_dtype(given: str | None, dtype: str) -> str:
    """Return what the caches of an engine of this dtype are narrowed to, or OFF; InputError for
    what would save nothing."""
    if given is None:
        return OFF
    if given not in KV_DTYPES:
        raise InputError(f"kv-dtype {given!r}: expected one of {', '.join(KV_DTYPES)}")
    to = KV_DTYPES[given]
    if to != dtype and ITEMSIZE[to] >= ITEMSIZE[dtype]:
        raise InputError(
            f"kv-dtype {given}: takes as much room as {TORCH_NAMES[dtype]}, the engine's dtype; "
            f"leave it out, or take float8 or int8"
        )
    return OFF if to == dtype else to


def find_activations(given: str | None) -> str:
    """Return what rows are rounded to before products with weights in codes, or OFF."""
    if given is not None and given not in ACTIVATIONS:
        expected = ", ".join(ACTIVATIONS)
        raise InputError(f"quant-activations {given!r}: expected one of {expected}")
    return given or OFF


def find_divisor(given: int) -> int:
    """Return the divisor of the residual stream; InputError if the pass has no such."""
    if given not in DIVISORS:
        expected = ", ".join(map(str, DIVISORS))
        raise InputError(f"--residual-scale {given}: expected one of {expected}")
    return given


def find_draft_tokens(given: int | None, max_seq: int, drafter: bool = False) -> int:
    """Return how many tokens are drafted at a time at most: with a drafter 4 unless told, else 0.
    InputError for what no round takes, or for none with a drafter."""
    most = min(MOST_DRAFTED, max_seq - 1)
    if given is None:
        return min(DRAFTED, most) if drafter else 0
    if drafter and given == 0:
        raise InputError("draft-tokens 0: a drafter drafts at least 1; leave --drafter out")
    if not 0 <= given <= most:
        raise InputError(f"draft-tokens {given}: expected 0 (no drafting) to {most}")
    return given


def drafter_spec(model: Spec, given: str | Path | None) -> Spec:
    """Return the spec of a drafter: of `default`, of FILE.yaml or of a checkpoint's directory.
    InputError or SpecError where there is none such, or it drafts for another model."""
    found = shipped_drafter(model) if given == DEFAULT else _given_drafter(Path(str(given)))
    check_pair(model, found)
    return found


def _given_drafter(path: Path) -> Spec:
    if path.suffix in SUFFIXES:
        return load_spec(path)
    if path.suffix == GGUF:
        raise InputError(f"--drafter {path}: drafters are read from safetensors alone")
    if not (path / CONFIG).is_file():
        raise InputError(
            f"--drafter {path}: no directory with {CONFIG}; give a drafter's checkpoint, its spec "
            f"FILE.yaml, or `default`"
        )
    return Spec.from_hf(path / CONFIG)


def for_gpu(rows: int) -> Options:
    """Return the arguments of passes for steps that are a chain of kernels on a GPU, of so many
    rows; 0: for all others."""
    most = {
        "fuse_norm_linear": 1,
        "fuse_norm_moe": 1,
        "fuse_attention": rows,
        "fuse_all_reduce": MOST_ROWS,
    }
    return {name: {"on": 0 < rows <= n} for name, n in most.items()}


def pass_options(
    latent: str,
    kv: str,
    activations: str = OFF,
    drafted: int = 0,
    keep: Sequence[int] = (),
    gpu_rows: int = 0,
    divisor: int = 1,
) -> Options:
    """Return the passes' own arguments: the form of K=V caches, what caches are narrowed to, what
    rows are rounded to, how many tokens rings can lose again, the layers that `keep` K and V, the
    rows of steps that are a chain of kernels on a GPU, 0 elsewhere, and the divisor of the residual
    stream."""
    return {
        "scale_residual": {"divisor": divisor},
        "plan_cache": {"slack": drafted},
        "latent_kv": {"form": latent, "keep": tuple(keep)},
        "narrow_kv": {"to": kv},
        "quantize_activations": {"to": activations},
        **for_gpu(gpu_rows),
    }


def find_latent(
    given: str, spec: Spec, device: str, dtype: str, max_seq: int, kv: str = OFF
) -> str:
    """Return the form of the K=V caches as asked, or for `auto` as measured. What `raw` holds is
    bounded by no norm: in a cache that is narrowed, `auto` takes `value` in its place."""
    if device not in DEVICES:
        raise InputError(f"device {device!r}: expected {' or '.join(DEVICES)}")
    if given not in ("auto", *FORMS):
        raise InputError(f"latent-kv {given!r}: expected one of auto, {', '.join(FORMS)}")
    form = choose_form(spec, device, dtype, max_seq) if given == "auto" else given
    if form != "raw" or kv == OFF:
        return form
    if given == "auto":
        return "value"
    raise InputError(
        f"latent-kv raw: it holds projections before their norm, which --kv-dtype "
        f"{KV_NAMES[kv]} has no range for; take value, off or auto"
    )


def find_placement(given: str | None, spec: Spec, device: str) -> str | None:
    """Return where the table of per-layer embeddings lies; None where there is none. Nothing given:
    on CUDA the device, if it has room for it."""
    if given is not None and given not in PLACEMENTS:
        raise InputError(f"ple-placement {given!r}: expected one of {', '.join(PLACEMENTS)}")
    if spec.text.ple is None:
        if given is not None:
            raise InputError(f"ple-placement {given}: this spec has no per-layer embeddings")
        return None
    return given or ("device" if device == "cuda" else DEFAULT_PLACEMENT)
