"""Resolves choices of a user against a spec without loading torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from g4ir.errors import InputError
from g4ir.model.draft import check_pair, layers_read, shipped_drafter
from g4ir.model.media import Media
from g4ir.model.text import has_blocks
from g4ir.ops.codecs import ACTIVATIONS
from g4ir.ops.kv_quant import NARROW
from g4ir.ops.types import ITEMSIZE, TORCH_NAMES, dtype_name
from g4ir.passes import PassOptions
from g4ir.passes.latent_kv import FORMS, PLAIN, LatentOptions
from g4ir.passes.match import OFF
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.plan_cache import MAX_SLACK, RingOptions
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.quant.recipe import QuantConfig
from g4ir.spec.parts import ASSISTANT
from g4ir.spec.record import SUFFIXES, Spec, load_spec
from g4ir.weights.checkpoint import CONFIG, GGUF
from g4ir.weights.origin import find_origin
from g4ir.weights.pack import DEFAULT_PLACEMENT, PLACEMENTS

from .backend import PlannedBackend, checked_settings
from .engine_limits import Limits
from .formats import DTYPES, KV_DTYPES, KV_NAMES
from .options import BuildConfig, BuildOptions, flag_of, flags_of

log = logging.getLogger(__name__)

#: maximum draft tokens of a verification step
MAX_DRAFT_TOKENS = MAX_SLACK
#: default number of draft tokens of a draft model: later ones are rarely accepted
DRAFTED = 4
#: default max_batch of an encoder: texts packed into one chunk
PACKED_TEXTS = 64
#: values of --drafter: the draft model shipped for the variant, and none
DEFAULT, NO_DRAFTER = "default", (None, "none")
#: why --dtype float16 is refused (docs/numerics.md)
NO_FLOAT16 = (
    "activations of trained models exceed the range of float16, 65504 (the residual stream of "
    "Gemma 3 270M reaches 103,795), so no engine computes in it"
)


def _one_of(option: str, value: object, choices: Iterable[object]) -> None:
    if value not in choices:
        text = repr(value) if isinstance(value, str) else value
        raise InputError(f"{option} {text}: expected one of {', '.join(map(str, choices))}")


def find_dtype(name: str, allowed: Sequence[str] = DTYPES) -> str:
    """Return the IR name of a dtype: `float32`, `f32` -> f32. InputError for one that is not in
    `allowed`, by default the dtypes that engines compute in."""
    try:
        short = dtype_name(name)
    except ValueError:
        short = name
    if short in allowed:
        return short
    if short in ("f16", "fp16", "half"):
        raise InputError(f"--dtype {name}: {NO_FLOAT16}; give bfloat16 or float32")
    *some, last = (long for short, long in TORCH_NAMES.items() if short in allowed)
    raise InputError(f"--dtype {name!r}: expected {', '.join(some)} or {last}")


def device_of(backend: PlannedBackend, requested: str | None) -> str:
    """Return the device of a build: by default the backend's first. InputError for a device on
    which the backend does not run."""
    device = requested or backend.devices[0]
    if device not in backend.devices:
        runs = ", ".join(backend.devices)
        raise InputError(f"backend {backend.name} runs on {runs}, not {device!r}")
    return device


def dtype_of(backend: PlannedBackend, requested: str | None, spec: Spec) -> str:
    """Return the dtype of a build: by default the spec's, or the backend's first if it does not
    support that (with a warning for float16). InputError for an unsupported one."""
    if requested is None:
        chosen = spec.dtype if spec.dtype in backend.dtypes else backend.dtypes[0]
        if (spec.dtype, chosen) == ("f16", "bf16"):
            message = "%s is float16, and becomes bfloat16; --dtype float32 keeps its weights exact"
            log.warning(message, spec.name)
        return chosen
    kind = find_dtype(requested)
    if kind in backend.dtypes:
        return kind
    can = ", ".join(TORCH_NAMES[d] for d in backend.dtypes)
    raise InputError(f"--dtype {requested}: backend {backend.name} computes in {can}")


def check_backend(b: PlannedBackend, o: BuildOptions, options: PassOptions, limits: Limits) -> None:
    """Raise InputError for an option of a build that its backend lacks, and for draft tokens that
    do not fit in its verification step."""
    kv, count = options.of(NarrowOptions).to, options.of(RingOptions).slack
    if kv != OFF and kv not in b.kv_dtypes:
        other = " or ".join(KV_NAMES[d] for d in b.kv_dtypes)
        why = f"backend {b.name} does not support it: {b.kv_reason}"
        fix = f"give {other}" if other else "leave the option out"
        raise InputError(f"--kv-dtype {o.kv_dtype}: {why}; {fix}")
    if options.of(ActivationOptions).to != OFF and not b.rounds_activations:
        why = f"backend {b.name} does not quantise activations"
        flag = f"--quant-activations {o.quant_activations}"
        raise InputError(f"{flag}: {why}; leave the option out")
    if count and b.verifies_in_chunks and count >= limits.prefill_chunk:
        why = f"backend {b.name} verifies {count + 1} tokens as a prefill chunk"
        fix = f"give --prefill-chunk {count + 1} or more"
        raise InputError(f"--draft-tokens {count}: {why}; {fix}")
    if o.tp != 1 and not b.shares:
        why, fix = f"engines of backend {b.name} run as one rank", "build with --backend torch"
        raise InputError(f"--tp {o.tp}: {why}; leave the option out, or {fix}")


def find_kv_dtype(requested: str | None, dtype: str, can: Iterable[str] = NARROW) -> str:
    """Return the IR dtype of a quantised KV cache; OFF for None or the engine's `dtype`. InputError
    for an unknown one, or another of no fewer bits than `dtype`. can: dtypes of a quantised KV
    cache that the backend supports, which the error lists."""
    if requested is None:
        return OFF
    _one_of("--kv-dtype", requested, KV_DTYPES)
    to = KV_DTYPES[requested]
    if to != dtype and ITEMSIZE[to] >= ITEMSIZE[dtype]:
        smaller = [KV_NAMES[d] for d in can if ITEMSIZE[d] < ITEMSIZE[dtype]]
        raise InputError(
            f"--kv-dtype {requested}: takes as much memory as {TORCH_NAMES[dtype]}, the engine's "
            f"dtype; leave it out{', or take ' * bool(smaller)}{' or '.join(smaller)}"
        )
    return OFF if to == dtype else to


def find_draft_tokens(count: int | None, max_seq: int, drafter: bool = False) -> int:
    """Return the maximum draft tokens of a verification step: by default 4 with a draft model (or
    max_seq - 1 if less), else 0. InputError below 0, beyond MAX_DRAFT_TOKENS or max_seq - 1, and
    for 0 with a draft model."""
    limit = min(MAX_DRAFT_TOKENS, max_seq - 1)
    if drafter and (count == 0 or not limit):
        why = f"a draft model proposes at least 1, and less than --max-seq {max_seq}"
        raise InputError(f"--draft-tokens {count or 0}: {why}; leave --drafter out")
    if count is None:
        return min(DRAFTED, limit) if drafter else 0
    if not 0 <= count <= limit:
        most = f"{limit} (at most {MAX_DRAFT_TOKENS}, less than the context length)"
        raise InputError(f"--draft-tokens {count}: expected 0 (no speculative decoding) to {most}")
    return count


def drafter_spec(model: Spec, requested: str | Path | None) -> Spec:
    """Return the spec of a draft model: `default`, a spec FILE.yaml, a GGUF file or a checkpoint's
    directory. InputError or SpecError if there is none, or it is of another model."""
    drafter = (
        shipped_drafter(model)
        if requested == DEFAULT
        else _load_drafter(model, Path(str(requested)))
    )
    check_pair(model, drafter)
    return drafter


def _load_drafter(model: Spec, path: Path) -> Spec:
    if path.suffix in SUFFIXES:
        return load_spec(path)
    if path.suffix == GGUF or path.is_file():
        spec = find_origin(path).spec()
        # A GGUF file does not record whether the model is a unified one: take the target's type.
        return replace(spec, model_type=f"{model.model_type}{ASSISTANT}") if spec.drafter else spec
    if not (path / CONFIG).is_file():
        fix = "give a drafter's checkpoint, its GGUF file, its spec FILE.yaml, or `default`"
        raise InputError(f"--drafter {path}: no directory with {CONFIG}; {fix}")
    return Spec.from_hf(path / CONFIG)


def pass_options(
    latent: str, kv: str, activations: str | None = None, drafted: int = 0, keep: Sequence[int] = ()
) -> PassOptions:
    """Return the options of the passes. latent: form of the latent cache; kv: dtype of a quantised
    KV cache, or OFF; activations: their quantised format, None: not quantised; drafted:
    rejectable tokens, for which ring caches get extra slots; keep: layers that keep separate K and
    V. InputError for an unknown form or format."""
    if activations is not None:
        _one_of("--quant-activations", activations, ACTIVATIONS)
    layout = RingOptions(drafted), LatentOptions(latent, tuple(keep)), NarrowOptions(kv)
    return PassOptions((*layout, ActivationOptions(activations or OFF)))


def check_latent(layout: str, spec: Spec) -> str:
    """Return the layout of the K=V caches; warns if it has no effect. InputError if unknown."""
    _one_of("--latent-kv", layout, FORMS)
    if layout != PLAIN and not any(x.attention.k_eq_v for x in spec.layers()):
        message = "--latent-kv %s changes nothing: no layer of %s has K=V"
        log.warning(message, layout, spec.name)
    return layout


def resolved(
    spec: Spec,
    o: BuildOptions,
    backend: PlannedBackend,
    *,
    media: Media,
    quant: QuantConfig | None,
    drafter: Spec | None,
    limits: Limits | None = None,
) -> BuildConfig:
    """Return the BuildConfig of a spec and a user's options, for a build and a plan alike; `limits`
    replace those of the options. InputError for an option that the spec or the backend does not
    take.
    """
    device, dtype = device_of(backend, o.device), dtype_of(backend, o.dtype, spec)
    if spec.embedding:
        _check_encoder(spec, o)
    limits = limits or find_limits(spec, o, media)
    options = pass_options(
        check_latent(o.latent_kv, spec),
        find_kv_dtype(o.kv_dtype, dtype, backend.kv_dtypes),
        activations=o.quant_activations,
        drafted=find_draft_tokens(o.draft_tokens, limits.max_seq, drafter is not None),
        keep=layers_read(spec, drafter),
    )
    check_backend(backend, o, options, limits)
    return BuildConfig(
        spec=spec,
        drafter=drafter,
        backend=backend.name,
        settings=checked_settings(backend, o.settings or {}),
        device=device,
        dtype=dtype,
        ranks=o.tp,
        ep=o.ep,
        limits=limits,
        all_logits=o.all_logits,
        skip=tuple(o.skip),
        options=options,
        ple_placement=find_placement(o.ple_placement, spec, device),
        media=media,
        quant=quant,
    )


#: options of a build that do not apply to encoders
OF_DECODERS = ("drafter", "draft_tokens", "kv_dtype", "all_logits", "calibrate", "bits")


def _check_encoder(spec: Spec, o: BuildOptions) -> None:
    """Raise InputError for an option that does not apply to encoders."""
    for name in OF_DECODERS:
        value = getattr(o, name)
        if value and value != "none":
            flag = " ".join(flags_of({name: value}))
            why = f"{spec.name} is an encoder: it embeds texts and generates none"
            raise InputError(f"{why}; {flag} does not apply to it")
    if o.tp != 1:
        raise InputError(f"--tp {o.tp}: an encoder runs as one rank; leave the option out")


def find_limits(spec: Spec, o: BuildOptions, media: Media) -> Limits:
    """Return the limits. The prefill chunk is raised, with a warning, to the soft tokens of the
    largest image (at most max_seq) if those attend bidirectionally, since such an image is never
    cut (media/merge.py); for an encoder the chunk is max_seq. Warns of images longer than max_seq.
    InputError for a limit below 1 or a max_seq beyond the model's."""
    longest = spec.text.max_position_embeddings
    for name in ("max_batch", "max_seq", "prefill_chunk"):
        value = getattr(o, name)
        if value is not None and value < 1:
            raise InputError(f"{flag_of(name)} {value}: expected at least 1")
    if o.max_seq is not None and o.max_seq > longest:
        raise InputError(f"--max-seq {o.max_seq}: {spec.name} has {longest} positions")
    seq = min(Limits.max_seq, longest) if o.max_seq is None else o.max_seq
    if spec.embedding:  # a text is never cut; --max-batch counts the texts of a chunk
        texts = PACKED_TEXTS if o.max_batch == Limits.max_batch else o.max_batch
        return Limits(texts, seq, seq)
    chunk, largest = min(o.prefill_chunk, seq), max(media.grids, default=0)
    if largest > seq:
        message = (
            "--max-seq %d: an image of %d soft tokens, which the engine supports, does not fit"
        )
        log.warning(message, seq, largest)
    if has_blocks(spec) and chunk < min(largest, seq):
        message = "--prefill-chunk %d is raised to %d: an image's tokens are computed together"
        log.warning(message, chunk, min(largest, seq))
        chunk = min(largest, seq)
    return Limits(o.max_batch, seq, chunk)


def find_placement(requested: str | None, spec: Spec, device: str) -> str | None:
    """Return the memory of the per-layer embedding table, one of PLACEMENTS; None if there is none.
    Default: the device on CUDA (fit.py replaces it if that does not fit), else a memory-mapped
    file. InputError for an unknown placement, and for any if the spec has no such table."""
    if requested is not None:
        _one_of("--set ple_placement", requested, PLACEMENTS)
    if spec.text.ple is None or spec.text.ple.vocab_size is None:
        if requested is not None:
            why = "this spec has no table of per-layer embeddings"
            raise InputError(f"--set ple_placement={requested}: {why}; leave it out")
        return None
    return requested or ("device" if device == "cuda" else DEFAULT_PLACEMENT)
