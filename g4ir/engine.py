"""The built artefact: an engine directory, how it is written and how it is loaded.

    manifest.json            what it is, limits, versions, digest of every file and of itself
    spec.yaml                the variant
    graph.PHASE.g4ir         the graphs that run, and prologue.g4ir, which made their params
    weights-*.safetensors    packed params (or the manifest names a seed, or a checkpoint)
    programs/                compiled files of the backend
    tokenizer.json ...       copied from the checkpoint

It is written under a temporary name and renamed at the end; the manifest is the last file, so
that a build killed at any moment leaves nothing that loads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import packing as packings
from . import tensorfile
from .backends import find_backend
from .backends.base import Backend, Limits, Runtime, checked_settings
from .cache_sizes import cache_bytes
from .checkpoint import Checkpoint, WeightSource, hub_snapshot, sha256
from .errors import EngineError, G4Error, InputError, MissingError, PlanError, SpecError
from .fit import device_memory, require_fit
from .ir import Graph, Program, Value
from .media.audio import read_extractor
from .media.choice import AUDIO, Media, find_media, listed
from .media.prompt import NO_TIMES, check_given, place_rows, times_left_out
from .media.soft import Soft
from .model import PLE_TABLE, build_program, has_blocks
from .pipeline import Options, run_program
from .random_weights import RandomCheckpoint
from .sampling import Defaults, Sampler, Sampling, checked_ids, checked_prompt, read_defaults
from .session import Session, embed_rows
from .settings import find_dtype, find_latent, find_placement
from .shrink import shrink
from .spec import Spec, diff_specs, load_spec
from .text import parse_graph
from .types import TORCH_NAMES, torch_dtype

if TYPE_CHECKING:
    import torch

FORMAT = 4
VERSION = "0.1.0"
MANIFEST = "manifest.json"
GENERATION = "generation_config.json"
#: what an unfinished directory is called beside its final name
BUILDING = ".building-"
#: what loading needs of a manifest
KEYS: dict[str, type] = {
    "backend": str, "device": str, "machine": str, "dtype": str, "limits": dict,
    "all_logits": bool, "skipped_passes": list, "options": dict, "settings": dict, "graphs": list,
    "media": dict, "weights": dict, "compiled": dict, "versions": dict, "files": dict,
}  # fmt: skip
SHARD_BYTES = 4 << 30
#: copied from the checkpoint where they exist
SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    GENERATION, "chat_template.jinja", "processor_config.json", "preprocessor_config.json",
)  # fmt: skip

#: what a config.json cannot say: where only these differ, the spec is right
SPEC_ONLY = ("text.moe.layers", "text.attn_logit_softcapping", "text.sliding.k_eq_v")

Progress = Callable[[str], None]
log = logging.getLogger(__name__)


def silent(message: str) -> None:
    """Progress that nobody reads."""


@dataclass(frozen=True)
class Prepared:
    """A build up to compilation: everything is checked, nothing is written."""

    spec: Spec
    backend: Backend
    device: str
    dtype: str
    limits: Limits
    all_logits: bool
    skip: tuple[str, ...]
    options: Options
    settings: Mapping[str, str]
    ple_placement: str | None
    media: Media
    packing: packings.Packing
    source: WeightSource
    weights: dict[str, Any]
    side_files: tuple[Path, ...]
    #: of a dry run: why the engine does not fit its device, or nothing
    short: str = ""

    def param_bytes(self) -> int:
        """Bytes of the packed params, tables included."""
        return sum(v.type.nbytes() for v in self.packing.program.params().values())

    def disk_bytes(self) -> int:
        """Bytes of weights that the engine directory will hold."""
        if self.weights["kind"] not in ("packed", "absent"):
            return 0
        repeated = self.backend.repeated_bytes(self.packing.program, self.settings)
        return self.param_bytes() + repeated

    def cache_bytes(self) -> int:
        """Bytes of the caches of a session of max_batch rows."""
        return self.backend.cache_bytes(self.packing.program, self.limits)

    def in_small(self, dtype: str) -> tuple[packings.Packing, packings.ParamSource]:
        """The variant in small (shrink.py) through the same passes, with random weights: what a
        backend runs to check its lowering. It takes the same kinds of media, each in one size."""
        kinds = self.media.kinds
        spec = shrink(self.spec, media=bool(kinds))
        media = find_media(spec, kinds, seconds=(1.0,) if AUDIO in kinds else None)
        program = run_program(
            build_program(spec, self.all_logits, dtype, media), skip=self.skip,
            options=self.options,
        )
        packing = packings.split_program(program)
        source = RandomCheckpoint(spec, 0, torch_dtype(dtype))
        return packing, packings.MadeParams(packing, source)


def prepare(
    spec: Spec | None,
    *,
    checkpoint: str | Path | None = None,
    random_weights: int | None = None,
    backend: str = "torch",
    device: str | None = None,
    dtype: str | None = None,
    max_batch: int = 1,
    max_seq: int | None = None,
    prefill_chunk: int = 1024,
    all_logits: bool = False,
    skip: Iterable[str] = (),
    link_weights: bool = False,
    latent_kv: str = "auto",
    ple_placement: str | None = None,
    memory: int | None = None,
    settings: Mapping[str, str] | None = None,
    media: str | Iterable[str] = "all",
    image_budgets: Sequence[int] | None = None,
    audio_seconds: Sequence[float] | None = None,
    dry: bool = False,
    dump: Callable[[str, Graph], None] | None = None,
) -> Prepared:
    """Check a build as far as it goes without compiling. Arguments as `build`; `dry` also goes
    without what the environment lacks, a device or weights."""
    found, skip = find_backend(backend), tuple(skip)
    device = device or found.devices[0]
    if device not in found.devices:
        raise InputError(f"backend {backend} runs on {', '.join(found.devices)}, not {device!r}")
    chosen = checked_settings(found, settings or {})
    directory = _checkpoint_dir(spec, checkpoint, random_weights, dry)
    _check_link(link_weights, directory, found)
    spec = agreed_spec(spec, directory)
    kind = _dtype(found, dtype, spec)
    kinds = media if isinstance(media, str) else tuple(media)
    taken = find_media(spec, kinds, image_budgets, audio_seconds, read_extractor(directory))
    _check_towers(spec, directory, taken)
    limits = _widened(_limits(spec, max_batch, max_seq, prefill_chunk), spec, taken)
    if not dry:
        found.check(device)
    options = {"latent_kv": {"form": find_latent(latent_kv, spec, device, kind, limits.max_seq)}}
    program = run_program(
        build_program(spec, all_logits, kind, taken), skip=skip, dump=dump, options=options
    )
    placement = find_placement(ple_placement, spec)
    room = memory if memory is not None else _memory(device, dry)
    short = ""
    if room is not None:
        planned = cache_bytes(program, limits.max_batch, limits.max_seq)
        try:
            require_fit(
                spec, program, limits, dtype=kind, device=device, ple_placement=placement,
                memory=room, more=found.cache_bytes(program, limits) - planned,
                scratch=found.scratch_bytes(program, limits, chosen),
                all_logits=all_logits, skip=skip, options=options, media=taken,
            )  # fmt: skip
        except PlanError as e:
            if not dry:
                raise
            short = str(e)
    source, weights = _open_source(spec, directory, random_weights, kind, link_weights, taken)
    if found.packs_weights and weights["kind"] == "random":
        weights = {"kind": "packed"}
    side = [directory / n for n in SIDE_FILES if (directory / n).is_file()] if directory else []
    return Prepared(
        spec, found, device, kind, limits, all_logits, skip, options, chosen, placement, taken,
        packings.split_program(program), source, weights, tuple(side), short,
    )  # fmt: skip


def _open_source(
    spec: Spec, directory: Path | None, seed: int | None, dtype: str, link: bool, media: Media
) -> tuple[WeightSource, dict[str, Any]]:
    """Where the weights come from, and what the manifest says of them."""
    if directory is None:
        source = RandomCheckpoint(spec, seed or 0, torch_dtype(dtype))
        return source, {"kind": "absent"} if seed is None else {"kind": "random", "seed": seed}
    checkpoint = Checkpoint.open(directory, spec, media.kinds)
    read_defaults(directory / GENERATION, spec.text.vocab_size)
    return checkpoint, _linked(checkpoint) if link else {"kind": "packed"}


def build(
    spec: Spec | str | Path | None,
    out: str | Path,
    *,
    progress: Progress = silent,
    **options: Any,
) -> Engine:
    """Build an engine directory and load it.

    spec: a Spec, a name, a path, or None to take it from the checkpoint. checkpoint: a Hugging
    Face directory; random_weights: a seed instead; with neither, the local hub cache is searched
    for the spec's hub id. backend `torch` or `reference`; device `cpu` or `cuda`; dtype float32,
    bfloat16 or float16 (default: the spec's). Limits: max_batch rows, max_seq tokens a row
    (default 8192 or the model's own limit), prefill_chunk tokens. all_logits: prefill can return
    every row. skip: passes to leave out. link_weights: refer to the checkpoint's files by hash
    instead of copying. latent_kv: what layers with K=V cache: `off` (K and V), `value` or `raw`
    (see the pass), `auto` (what measured fastest for the device and max_seq). ple_placement: where
    the table of per-layer embeddings lies: `device`, `host` or `mmap`. memory: bytes that the
    engine may need of its device (default: all that the device has); a build that would need
    more is refused before anything is loaded. settings: what the backend lets a build choose,
    by name. media: `all` that the variant takes, `none`, or some of image, video, audio;
    image_budgets: soft tokens of images, of which the first is the default; audio_seconds: lengths
    of sound that towers are compiled for (a sound takes the next longer one).

    Raises a G4Error for anything wrong, before anything is left at `out`.
    """
    if isinstance(spec, str | Path):
        spec = load_spec(spec)
    out = Path(out)
    check_absent(out)
    prepared = prepare(spec, **options)
    write_engine(prepared, out, progress)
    prepared.source.close()
    return load_engine(out, progress=progress)


def check_absent(out: Path) -> None:
    """EngineError where something is at the output path."""
    if out.exists() or out.is_symlink():
        raise EngineError(f"{out} exists; remove it or choose another --out")


def write_engine(p: Prepared, out: Path, progress: Progress) -> float:
    """Write the directory under a temporary name, then rename it. Returns the seconds that
    compiling took; they are not in the manifest, which is the same for equal builds."""
    check_absent(out)
    check_space(p, out)
    with _new_directory(out) as folder:
        if p.backend.packs_weights:
            _pack(p, folder, progress)
        start = time.perf_counter()
        compiled = p.backend.compile(
            p.packing.program, p.limits, p.device, folder, _prefixed(progress, "build"),
            _params_of(p, folder), p.settings,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        # After compiling where that needs none of them: it fails sooner.
        if p.weights["kind"] == "packed" and not p.backend.packs_weights:
            _pack(p, folder, progress)
        for name, g in p.packing.program.graphs.items():
            _write_text(folder / f"graph.{name}.g4ir", str(g))
        _write_text(folder / "prologue.g4ir", str(p.packing.prologue))
        _write_text(folder / "spec.yaml", p.spec.to_yaml())
        for path in p.side_files:
            shutil.copyfile(path, folder / path.name)
        _write_text(folder / MANIFEST, _manifest_text(_manifest(p, folder, compiled)))
    return seconds


def _pack(p: Prepared, folder: Path, progress: Progress) -> None:
    params = packings.MadeParams(p.packing, p.source)
    packings.write_params(p.packing, params, folder, SHARD_BYTES, progress)


def _params_of(p: Prepared, folder: Path) -> packings.ParamSource:
    """The params as they will be found at load."""
    files = sorted(folder.glob("*.safetensors"))
    return packings.StoredParams.open(files) if files else packings.MadeParams(p.packing, p.source)


def _manifest(p: Prepared, folder: Path, compiled: dict[str, Any]) -> dict[str, Any]:
    import torch

    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return {
        "format": FORMAT,
        "g4ir": VERSION,
        "variant": p.spec.name,
        "spec_digest": p.spec.digest(),
        "backend": p.backend.name,
        "device": p.device,
        "machine": p.backend.machine(p.device),
        "dtype": p.dtype,
        "limits": asdict(p.limits),
        "all_logits": p.all_logits,
        "skipped_passes": list(p.skip),
        "options": p.options,
        "settings": dict(p.settings),
        "ple_placement": p.ple_placement,
        "media": p.media.to_dict(),
        "graphs": list(p.packing.program.graphs),
        "weights": p.weights,
        "compiled": compiled,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "notes": {"ignored": dict(p.source.ignored), "defaults": dict(p.source.defaults)},
        "files": {
            f.relative_to(folder).as_posix(): {"sha256": sha256(f), "bytes": f.stat().st_size}
            for f in files
        },
    }


def _manifest_text(manifest: dict[str, Any]) -> str:
    """JSON with a digest of its own content as the last key."""
    return json.dumps({**manifest, "digest": _digest(manifest)}, indent=1) + "\n"


def _digest(manifest: dict[str, Any]) -> str:
    body = {k: v for k, v in manifest.items() if k != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Engine:
    """A loaded engine directory."""

    path: Path
    manifest: dict[str, Any]
    spec: Spec
    limits: Limits
    all_logits: bool
    device: str
    dtype: str
    program: Program
    runtime: Runtime
    tables: dict[str, Any] = field(repr=False)
    #: what its towers were compiled for
    media: Media = field(default_factory=Media)
    #: of the last `generate`: its caches, and what was recorded over them, serve the next one
    _idle: Session | None = field(default=None, init=False, repr=False)

    @property
    def rings(self) -> tuple[tuple[int, int], ...]:
        """(window, slots) of every distinct ring cache."""
        found: set[tuple[int, int]] = set()
        for g in self.program.graphs.values():
            caches = {*g.state, *g.next.values()}
            for n in g.find("attention", "attention_latent"):
                slots = {v.type.shape[0] for v in n.inputs if v in caches}
                window = n.whole("window")
                found |= {(window, size) for size in slots if isinstance(size, int)}
        return tuple(sorted(found))

    @property
    def embeds_on_device(self) -> bool:
        """Whether the rows of the tables are gathered where the engine runs."""
        devices = {getattr(t, "device", None) for t in self.tables.values()}
        return {d.type if d else "host" for d in devices} == {self.device}

    def session(self, batch: int = 1) -> Session:
        """Empty caches for `batch` rows, at most max_batch."""
        return Session(self, batch)

    def embed(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Token ids -> the rows that the text graphs take, on the engine's device."""
        rows = embed_rows(self.program.graphs["embed"], self.tables, tokens)
        return {k: t.to(self.device) for k, t in rows.items()}

    def encode(self, kind: str, item: Any, **options: Any) -> Soft:
        """The soft tokens of one image, video or sound (see media/encode.py)."""
        from .media.encode import encode

        return encode(self, kind, item, **options)

    def defaults(self) -> Defaults:
        """What the checkpoint's generation_config.json says."""
        return read_defaults(self.path / GENERATION, self.spec.text.vocab_size)

    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a row: generation_config's, else the spec's."""
        stop = self.defaults().stop
        return self.spec.tokens.eos if stop is None else stop

    def suppressed(self) -> tuple[int, ...]:
        """Token ids that are never generated (matters for greedy decoding too)."""
        return self.defaults().suppress

    def tokenizer(self) -> Any:
        """The checkpoint's own tokenizer (library `tokenizers`)."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise EngineError(
                f"{self.path} has no tokenizer.json (the checkpoint had none): give token ids"
            )
        try:
            from tokenizers import Tokenizer
        except ImportError as e:
            raise MissingError("text prompts need `pip install tokenizers`") from e
        try:
            return Tokenizer.from_file(str(path))
        except Exception as e:
            raise EngineError(f"{path} is no tokenizer file: {e}") from e

    def generate(
        self,
        prompt_tokens: Any,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop_ids: Iterable[int] | None = None,
        on_token: Callable[..., None] | None = None,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audio: Sequence[Any] = (),
    ) -> Any:
        """New token ids for one prompt (list of ints -> list of ints) or for several
        (list of lists -> list of lists, up to max_batch of different lengths). Tensors and
        tuples do too.

        A row ends with its stop id, which is part of the result, or after max_new_tokens.
        `on_token(token)` sees each token of a single prompt, `on_token(row, token)` of several.

        images, videos, audio: lists of what `encode` takes. They belong to the placeholders of
        their kind in order, row by row: one placeholder for each medium, or one for each soft
        token (media/prompt.py).
        """
        prompts, single = _prompts(prompt_tokens)
        media = listed(self.media, self.spec, images=images, videos=videos, audio=audio)
        prompts, soft = _with_media(self, prompts, media)
        told = (lambda row, token: on_token(token)) if single and on_token else on_token
        sampling = Sampling(temperature, top_k, top_p, seed, self.suppressed())
        stop = set(self.stop_ids() if stop_ids is None else stop_ids)
        out = _generate(self, prompts, max_new_tokens, Sampler(sampling), stop, told, soft)
        return out[0] if single else out

    @contextmanager
    def lent_session(self, batch: int) -> Iterator[Session]:
        """An empty session that the engine keeps afterwards, in place of the one it kept."""
        session, self._idle = self._idle, None
        if session is None or session.batch != batch:
            session = self.session(batch)
        session.reset()
        try:
            yield session
        finally:
            self._idle = session

    def close(self) -> None:
        """Free what the runtime holds."""
        self._idle = None
        self.runtime.close()


def _prompts(given: Any) -> tuple[list[list[int]], bool]:
    """(prompts, whether it was a single one)."""
    import torch

    def plain(x: Any) -> Any:
        return x.tolist() if isinstance(x, torch.Tensor) else x

    rows = [plain(x) for x in plain(given)]
    many = {isinstance(x, list | tuple) for x in rows}
    if many == {True, False}:
        raise InputError("prompt tokens: expected a list of ids, or a list of such lists")
    return ([list(x) for x in rows], False) if many == {True} else ([rows], True)


def _with_media(
    engine: Engine, prompts: list[list[int]], media: Sequence[tuple[str, Any]]
) -> tuple[list[list[int]], list[Soft]]:
    """The prompts with a placeholder for each soft token, and the soft tokens of (kind, item)."""
    tokens, kinds = engine.spec.tokens, engine.media.kinds
    for i, p in enumerate(prompts):
        checked_ids(p, engine.spec.text.vocab_size, f"prompt {i}")
    check_given([t for p in prompts for t in p], [kind for kind, _ in media], tokens, kinds)
    soft = [engine.encode(kind, item) for kind, item in media]
    encode = _plain_encoder(engine)
    placed = place_rows(prompts, soft, tokens, encode, kinds)
    if not encode and times_left_out(prompts, placed, tokens):
        log.warning(NO_TIMES)
    return placed, soft


def _plain_encoder(engine: Engine) -> Callable[[str], list[int]] | None:
    """Text -> ids with nothing added, where there is a tokenizer; it is read when first needed."""
    if not (engine.path / "tokenizer.json").is_file():
        return None
    tokenizer = cache(engine.tokenizer)
    return lambda text: list(tokenizer().encode(text, add_special_tokens=False).ids)


def _generate(
    engine: Engine, prompts: list[list[int]], count: int, sampler: Sampler, stop: set[int],
    on_token: Callable[[int, int], None] | None, soft: Sequence[Soft] = (),
) -> list[list[int]]:  # fmt: skip
    import torch

    vocab, room = engine.spec.text.vocab_size, engine.limits.max_seq
    for i, p in enumerate(prompts):
        checked_prompt(p, count, vocab, room, f"prompt {i}")
    lengths = torch.tensor([len(p) for p in prompts])
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, p in zip(padded, prompts, strict=True):
        row[: len(p)] = torch.tensor(p)
    out: list[list[int]] = [[] for _ in prompts]
    running = [True] * len(prompts)
    with engine.lent_session(len(prompts)) as session:
        steps = session.stream(
            session.prefill(padded, lengths, soft=soft), count, sampler, stop
        )
        for tokens, going in steps:
            for row, token in enumerate(tokens):
                if running[row]:
                    out[row].append(token)
                    if on_token:
                        on_token(row, token)
            running = going
    return out


def load_engine(
    path: str | Path, *, check_weights: bool = True, ple_placement: str | None = None,
    cuda_graph: bool = True, progress: Progress = silent,
) -> Engine:  # fmt: skip
    """Load an engine directory; compiles nothing.

    Every file is compared with the manifest's digests before any compiled file is opened;
    check_weights=False leaves out the weight files, which take about a second per GiB.
    ple_placement puts the table of per-layer embeddings elsewhere than the build said;
    cuda_graph=False runs decode steps on CUDA launch by launch, not as one recorded graph.
    Raises EngineError naming the file, or another machine, and the fix.
    """
    path = Path(path)
    manifest, program = read_program(path, check_weights)
    backend = find_backend(manifest["backend"])
    _check_machine(path, manifest, backend)
    spec = load_spec(path / "spec.yaml")
    packing = packings.Packing(program, _read_graph(path / "prologue.g4ir"))
    media = Media.from_dict(manifest["media"])
    params = _open_params(path, manifest, spec, packing, media)
    limits = Limits(**manifest["limits"])
    runtime = backend.load(
        program, limits, manifest["device"], path, manifest["compiled"], params,
        _prefixed(progress, "load"), cuda_graph,
    )  # fmt: skip
    placed = find_placement(ple_placement or manifest.get("ple_placement"), spec)
    tables = {
        v.name: _table(runtime, params, v, placed, manifest["device"])
        for v in program.graphs["embed"].params
    }
    return Engine(
        path, manifest, spec, limits, manifest["all_logits"], manifest["device"],
        manifest["dtype"], program, runtime, tables, media,
    )  # fmt: skip


def read_program(path: Path, check_weights: bool = False) -> tuple[dict[str, Any], Program]:
    """The manifest of an engine directory and the graphs that run, after comparing every file
    with its digest (weight files on request). Needs neither the device nor the backend."""
    manifest = read_manifest(path)
    names = manifest["graphs"]
    for file in ("spec.yaml", "prologue.g4ir", *(f"graph.{n}.g4ir" for n in names)):
        if file not in manifest["files"]:
            raise EngineError(f"{path / MANIFEST}: {file} is not among its files; build it again")
    _check_files(path, manifest, check_weights)
    return manifest, Program({n: _read_graph(path / f"graph.{n}.g4ir") for n in names})


def _table(
    runtime: Runtime, params: packings.ParamSource, v: Value, ple: str | None, device: str
) -> Any:
    """The runtime's own copy of a table that it holds anyway (a tied head), or one placed as the
    engine says."""
    resident = runtime.resident(v.name)
    if resident is not None:
        return resident
    placement = ple if v.name == PLE_TABLE and ple else packings.DEFAULT_PLACEMENT
    return packings.open_table(params, v, placement, device)


def read_manifest(path: Path) -> dict[str, Any]:
    """The checked manifest of an engine directory."""
    file = path / MANIFEST
    unfinished = path.resolve().name.startswith(".") and BUILDING in path.resolve().name
    if unfinished or not file.is_file():
        found = "is unfinished" if unfinished else f"has no {MANIFEST}"
        raise EngineError(f"{path} is no engine directory: it {found}; run g4ir build")
    try:
        raw = file.read_bytes()
        manifest = tensorfile.parse_json(file, raw)
    except (G4Error, OSError) as e:
        raise EngineError(f"{file} is altered or damaged: {e}; build the engine again") from e
    # The whole text is compared, so that not even a space can change.
    if raw != _manifest_text({k: v for k, v in manifest.items() if k != "digest"}).encode():
        raise EngineError(f"{file}: its digest does not match its content; build the engine again")
    if manifest.get("format") != FORMAT:
        raise EngineError(
            f"{file}: format {manifest.get('format')!r}, this g4ir reads {FORMAT}; build it again"
        )
    for key, kind in KEYS.items():
        if not isinstance(manifest.get(key), kind):
            raise EngineError(f"{file}: {key} is missing or no {kind.__name__}; build it again")
    return manifest


def _check_files(path: Path, manifest: dict[str, Any], weights: bool) -> None:
    for name, kept in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise EngineError(f"{file} is missing; build the engine again")
        if file.stat().st_size != kept["bytes"]:
            raise EngineError(
                f"{file}: {file.stat().st_size} bytes, expected {kept['bytes']}; build it again"
            )
        if name.endswith(".safetensors") and not weights:
            continue
        if sha256(file) != kept["sha256"]:
            raise EngineError(f"{file}: its SHA-256 is not the manifest's; build the engine again")


def _check_machine(path: Path, manifest: dict[str, Any], backend: Backend) -> None:
    import torch

    # Not `backend.check`, which asks for what a build needs: loading needs no compiler.
    if manifest["device"] == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            f"{path} was built for cuda and this torch sees no CUDA device; build it again with "
            f"--device cpu, or run it where it was built"
        )
    built, here = manifest["machine"], backend.machine(manifest["device"])
    if not _runs_on(built, here):
        raise EngineError(
            f"{path} was built for another machine ({built}); this is {here}; build it again here"
        )
    version = manifest["versions"]["torch"]
    if built != "any" and version != torch.__version__:
        raise EngineError(
            f"{path} was built with torch {version}, this is {torch.__version__}; build it again"
        )


def _runs_on(built: str, here: str) -> bool:
    """Same kind of machine, with at least the extensions that the engine may use."""
    *kind, flags = built.split(" ")
    *kind_here, flags_here = here.split(" ")
    return kind == kind_here and set(flags.split(",")) <= set(flags_here.split(","))


def _open_params(
    path: Path, manifest: dict[str, Any], spec: Spec, packing: packings.Packing, media: Media
) -> packings.ParamSource:
    kept = manifest["weights"]
    if kept["kind"] == "packed":
        files = [path / n for n in manifest["files"] if n.endswith(".safetensors")]
        return packings.StoredParams.open(files)
    if kept["kind"] == "random":
        source: WeightSource = RandomCheckpoint(
            spec, kept["seed"], torch_dtype(manifest["dtype"]), manifest["device"]
        )
        return packings.MadeParams(packing, source)
    for name, digest in kept["files"].items():
        file = Path(kept["directory"]) / name
        if not file.is_file() or sha256(file) != digest:
            raise EngineError(
                f"{file} is missing or is not the file this engine was built from; restore it, or "
                f"build again without --link-weights"
            )
    return packings.MadeParams(packing, Checkpoint.open(kept["directory"], spec, media.kinds))


def _linked(source: Checkpoint) -> dict[str, Any]:
    return {
        "kind": "linked",
        "directory": str(source.directory.resolve()),
        "files": {p.name: sha256(p) for p, _ in source.files},
    }


def _read_graph(path: Path) -> Graph:
    try:
        return parse_graph(path.read_text())
    except (G4Error, UnicodeDecodeError) as e:
        raise EngineError(f"{path}: {e}") from e


def _checkpoint_dir(
    spec: Spec | None, checkpoint: str | Path | None, seed: int | None, dry: bool
) -> Path | None:
    """The checkpoint directory, or None for random weights, or where a dry run has none."""
    if checkpoint is not None and seed is not None:
        raise InputError("give either a checkpoint or --random-weights, not both")
    if seed is not None:
        if not 0 <= seed < 1 << 63:
            raise InputError(f"--random-weights {seed}: expected a seed from 0 to 2^63 - 1")
        return None
    if checkpoint is not None:
        if not Path(checkpoint).is_dir():
            raise InputError(f"--checkpoint {checkpoint}: no such directory")
        return Path(checkpoint)
    if spec is None:
        raise InputError("give a variant, a spec or a checkpoint")
    if dry and (spec.hub is None or hub_snapshot(spec.hub) is None):
        return None
    return _cached_checkpoint(spec)


def _check_link(link: bool, directory: Path | None, backend: Backend) -> None:
    """InputError where there is nothing to link to, or it could not be used."""
    if link and directory is None:
        raise InputError("--link-weights refers to a checkpoint's files; random weights have none")
    if link and backend.packs_weights:
        raise InputError(
            f"--link-weights: what backend {backend.name} writes refers to packed weights; leave "
            f"the option out"
        )


def _dtype(backend: Backend, given: str | None, spec: Spec) -> str:
    """As asked, else the spec's, else the backend's own where it cannot compute in the spec's."""
    kind = find_dtype(given or spec.dtype)
    if kind in backend.dtypes:
        return kind
    if given is None:
        return backend.dtypes[0]
    can = ", ".join(TORCH_NAMES[d] for d in backend.dtypes)
    raise InputError(f"--dtype {given}: backend {backend.name} computes in {can}")


def _memory(device: str, dry: bool) -> int | None:
    """Bytes that the device has; None in a dry run without one."""
    import torch

    absent = dry and device == "cuda" and not torch.cuda.is_available()
    return None if absent else device_memory(device)


def _cached_checkpoint(spec: Spec) -> Path:
    if spec.hub is None:
        raise InputError(
            f"variant {spec.name} has no hub id: give --checkpoint DIR or --random-weights SEED"
        )
    found = hub_snapshot(spec.hub)
    if found is None:
        raise InputError(
            f"no weights of {spec.hub} in the local Hugging Face cache; download them with "
            f"`hf download {spec.hub}`, or give --checkpoint DIR or --random-weights SEED"
        )
    return found


#: kind of media -> keys of a spec that its soft tokens follow from
OF_MEDIA = {
    "image": ("vision.", "tokens.image", "tokens.boi", "tokens.eoi", "tokens.pad"),
    "video": ("vision.", "tokens.video", "tokens.boi", "tokens.eoi", "tokens.pad"),
    "audio": ("audio.", "tokens.audio", "tokens.boa", "tokens.eoa", "tokens.pad"),
}


def _check_towers(spec: Spec, directory: Path | None, media: Media) -> None:
    """SpecError where a checkpoint's config.json says otherwise of the media that are taken."""
    if directory is None or not media.kinds:
        return
    keys = tuple(key for kind in media.kinds for key in OF_MEDIA[kind])
    found = Spec.from_hf(directory / "config.json")
    rows = [r for r in diff_specs(spec, found) if r[0].startswith(keys)]
    _refuse_differences(spec, directory, rows)


def agreed_spec(spec: Spec | None, directory: Path | None) -> Spec:
    """The spec, after comparing its text part with the checkpoint's config.json."""
    if directory is None:
        if spec is None:
            raise InputError("--random-weights needs --variant or --spec")
        return spec
    if not (directory / "config.json").is_file():
        raise InputError(
            f"{directory} has no config.json: not a Hugging Face checkpoint directory"
        )
    found = Spec.from_hf(directory / "config.json")
    if spec is None:
        return found
    rows = [
        r for r in diff_specs(spec, found) if r[0].startswith("text.") and r[0] not in SPEC_ONLY
    ]
    _refuse_differences(spec, directory, rows)
    return spec


def _refuse_differences(spec: Spec, directory: Path, rows: list[tuple[str, Any, Any]]) -> None:
    if rows:
        lines = "\n".join(f"  {key}: spec {a!r}, checkpoint {b!r}" for key, a, b in rows)
        raise SpecError(
            f"spec {spec.name} and {directory / 'config.json'} differ; leave out the variant to "
            f"build what the checkpoint says, or correct one of them:\n{lines}"
        )


def _limits(spec: Spec, max_batch: int, max_seq: int | None, prefill_chunk: int) -> Limits:
    longest = spec.text.max_position_embeddings
    for name, value in (
        ("max-batch", max_batch), ("max-seq", max_seq), ("prefill-chunk", prefill_chunk),
    ):  # fmt: skip
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: expected at least 1")
    if max_seq is not None and max_seq > longest:
        raise InputError(f"--max-seq {max_seq}: {spec.name} has {longest} positions")
    seq = min(Limits.max_seq, longest) if max_seq is None else max_seq
    return Limits(max_batch, seq, min(prefill_chunk, seq))


def _widened(limits: Limits, spec: Spec, media: Media) -> Limits:
    """With a prefill chunk that the largest image fits whose tokens see each other: they are never
    cut (see media/merge.py). Warns where it is another than asked for, and of images that no row
    has room for."""
    largest = max(media.grids, default=0)
    if largest > limits.max_seq:
        log.warning("max-seq %d: an image of %d soft tokens, as built for, does not fit",
                    limits.max_seq, largest)  # fmt: skip
    chunk = min(largest, limits.max_seq)
    if not has_blocks(spec) or limits.prefill_chunk >= chunk:
        return limits
    log.warning("prefill-chunk %d is raised to %d: an image's tokens are computed together",
                limits.prefill_chunk, chunk)  # fmt: skip
    return replace(limits, prefill_chunk=chunk)


def free_bytes(out: Path) -> int:
    """Free space where `out` will lie, bytes."""
    above = (p for p in out.absolute().parents if p.is_dir())
    return shutil.disk_usage(next(above)).free


def check_space(p: Prepared, out: Path) -> None:
    """EngineError where the weights do not fit the disk."""
    need, free = p.disk_bytes(), free_bytes(out)
    if need and free < need + (64 << 20):
        raise EngineError(
            f"{out.parent}: the weights need {need / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are "
            f"free; make room, choose another --out, or use --link-weights"
        )


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A temporary sibling of `out` that becomes `out` at the end, or vanishes."""
    folder = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}{BUILDING}", dir=out.parent))
        yield folder
        folder.chmod(0o755)
        os.rename(folder, out)
    except OSError as e:
        where = e.filename or folder or out
        raise EngineError(
            f"cannot write the engine: {where}: {e.strerror or e}; make room or choose another "
            f"--out"
        ) from e
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    tensorfile.write_file(path, [text.encode()])


def _prefixed(progress: Progress, stage: str) -> Progress:
    return lambda message: progress(f"{stage}: {message}")
