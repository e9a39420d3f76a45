"""Building an engine directory, and what is loaded from it (artefact.py says what lies in one).

It is written under a temporary name and renamed at the end; the manifest is the last file, so
that a build killed at any moment leaves nothing that loads.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from . import packing as packings
from . import tensorfile
from .artefact import (
    BUILDING,
    MANIFEST,
    Artefact,
    LatentOptions,
    LinkedWeights,
    Manifest,
    Notes,
    PackedWeights,
    PassOptions,
    RandomWeights,
    StoredFile,
    Versions,
    graph_texts,
    make_packing,
    open_artefact,
    read_compiled,
    rebuild,
    require_readable,
)
from .backends import find_backend
from .backends.base import Backend, Limits, Runtime, checked_settings
from .cache_sizes import cache_bytes
from .checkpoint import (
    GENERATION,
    Checkpoint,
    WeightSource,
    hub_snapshot,
    read_side_files,
    sha256,
)
from .distance import ROUNDED
from .errors import EngineError, InputError, MissingError, PlanError, SpecError
from .fit import device_memory, fitting_placement, require_fit
from .ir import Program, Value
from .media.audio import read_extractor
from .media.choice import AUDIO, Media, find_media, listed
from .media.prompt import NO_TIMES, check_given, place_rows, times_left_out
from .media.soft import Soft
from .model import PLE_TABLE, has_blocks
from .pipeline import Dump, Options
from .random_weights import RandomCheckpoint
from .sampling import Defaults, Sampler, Sampling, checked_ids, checked_prompt, read_defaults
from .schema import Line, on_one_line
from .session import Session, embed_rows
from .settings import find_dtype, find_latent, find_placement
from .shrink import shrink, with_all_experts
from .spec import Spec, diff_specs, load_spec
from .trust import record_built, require_trust
from .types import TORCH_NAMES, torch_dtype
from .units import size_text

if TYPE_CHECKING:
    import torch

VERSION = "0.1.0"
SHARD_BYTES = 4 << 30
TOKENIZER = "tokenizer.json"
#: room for what an engine directory holds beside weights
OTHER_BYTES = 64 << 20

#: what a config.json cannot say: where only these differ, the spec is right
SPEC_ONLY = ("text.moe.layers", "text.attn_logit_softcapping", "text.sliding.k_eq_v")

Progress = Callable[[str], None]
F = TypeVar("F", bound=Callable[..., Any])
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
    #: one of artefact.WEIGHTS; None in a dry run without any
    weights: Any
    #: of the checkpoint, name -> content
    side_files: Mapping[str, bytes]
    #: of a dry run: why the engine does not fit its device, or nothing
    short: str = ""

    def param_bytes(self) -> int:
        """Bytes of the packed params, tables included."""
        return sum(v.type.nbytes() for v in self.packing.program.params().values())

    def disk_bytes(self) -> int:
        """Bytes of weights that the engine directory will hold."""
        if isinstance(self.weights, RandomWeights | LinkedWeights):
            return 0
        repeated = self.backend.repeated_bytes(self.packing.program, self.settings)
        return self.param_bytes() + repeated

    def cache_bytes(self) -> int:
        """Bytes of the caches of a session of max_batch rows."""
        return self.backend.cache_bytes(self.packing.program, self.limits)

    def in_small(self, dtype: str) -> tuple[packings.Packing, packings.ParamSource]:
        """The variant in small (shrink.py) through the same passes, with random weights: what a
        backend runs to check its lowering. It takes the same kinds of media, each in one size. In
        16 bits all experts are taken, so that rounding says how far two runs may lie apart."""
        kinds = self.media.kinds
        spec = shrink(self.spec, media=bool(kinds))
        if dtype in ROUNDED:
            spec = with_all_experts(spec)
        media = find_media(spec, kinds, seconds=(1.0,) if AUDIO in kinds else None)
        packing = make_packing(spec, self.all_logits, dtype, media, self.skip, self.options)
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
    dump: Dump | None = None,
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
    side = read_side_files(directory) if directory else {}
    if TOKENIZER in side:
        _read_tokenizer(Path(directory or "") / TOKENIZER, side[TOKENIZER])
    spec = agreed_spec(spec, directory)
    kind = _dtype(found, dtype, spec)
    kinds = media if isinstance(media, str) else tuple(media)
    taken = find_media(spec, kinds, image_budgets, audio_seconds, read_extractor(directory))
    _check_towers(spec, directory, taken)
    limits = _widened(_limits(spec, max_batch, max_seq, prefill_chunk), spec, taken)
    if not dry:
        found.check(device)
    options = {"latent_kv": {"form": find_latent(latent_kv, spec, device, kind, limits.max_seq)}}
    packing = make_packing(spec, all_logits, kind, taken, skip, options, dump)
    program = packing.program
    room = memory if memory is not None else _memory(device, dry)
    more = found.cache_bytes(program, limits)
    more -= cache_bytes(program, limits.max_batch, limits.max_seq)
    scratch = found.scratch_bytes(program, limits, chosen)
    placement, short = find_placement(ple_placement, spec, device), ""
    if ple_placement is None and placement == "device" and room is not None:
        placement = fitting_placement(
            spec, program, limits, dtype=kind, device=device, memory=room, more=more + scratch,
            media=taken,
        )  # fmt: skip
    if room is not None:
        try:
            require_fit(
                spec, program, limits, dtype=kind, device=device, ple_placement=placement,
                memory=room, more=more, scratch=scratch, all_logits=all_logits, skip=skip,
                options=options, media=taken,
            )  # fmt: skip
        except PlanError as e:
            if not dry:
                raise
            short = str(e)
    source, weights = _open_source(spec, directory, random_weights, kind, link_weights, taken)
    if found.packs_weights and isinstance(weights, RandomWeights):
        weights = PackedWeights("packed")
    return Prepared(
        spec, found, device, kind, limits, all_logits, skip, options, chosen, placement, taken,
        packing, source, weights, side, short,
    )  # fmt: skip


def _open_source(
    spec: Spec, directory: Path | None, seed: int | None, dtype: str, link: bool, media: Media
) -> tuple[WeightSource, Any]:
    """Where the weights come from, and what the manifest says of them."""
    if directory is None:
        source = RandomCheckpoint(spec, seed or 0, torch_dtype(dtype))
        return source, None if seed is None else RandomWeights("random", seed)
    checkpoint = Checkpoint.open(directory, spec, media.kinds)
    read_defaults(directory / GENERATION, spec.text.vocab_size)
    return checkpoint, _linked(checkpoint) if link else PackedWeights("packed")


def _shows_options_of(source: Callable[..., Any]) -> Callable[[F], F]:
    """A function that hands its `**options` on to `source` has their names, types and defaults in
    its signature, for help() and editors."""

    def shown(function: F) -> F:
        own = inspect.signature(function)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [p for p in inspect.signature(source).parameters.values()
                   if p.kind is p.KEYWORD_ONLY and p.name not in own.parameters]  # fmt: skip
        vars(function)["__signature__"] = own.replace(parameters=[*kept, *options])
        return function

    return shown


@_shows_options_of(prepare)
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
    the table of per-layer embeddings lies: `device`, `host` or `mmap` (default: on CUDA the device
    where it fits with the rest, else the file). memory: bytes that the
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
    written = write_engine(prepared, out, progress)
    prepared.source.close()
    # Where it is kept what was built, something else that lies there by now is not believed.
    return load_engine(out, trust=not written.known, progress=progress)


def check_absent(out: Path) -> None:
    """EngineError where something is at the output path."""
    if out.exists() or out.is_symlink():
        raise EngineError(f"{out} exists; remove it or choose another --out")


@dataclass(frozen=True)
class Written:
    """Of a build: the seconds that compiling took, which are not in the manifest, since that is the
    same for equal builds; and whether it could be kept that this user built the engine."""

    compile_s: float
    known: bool


def write_engine(p: Prepared, out: Path, progress: Progress) -> Written:
    """Write the directory under a temporary name, then rename it; returns what the manifest does
    not say."""
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
        if isinstance(p.weights, PackedWeights) and not p.backend.packs_weights:
            _pack(p, folder, progress)
        for name, text in graph_texts(p.packing).items():
            _write_text(folder / name, text)
        _write_text(folder / "spec.yaml", p.spec.to_yaml())
        for name, raw in p.side_files.items():
            tensorfile.write_file(folder / name, [raw])
        manifest = _manifest(p, folder, compiled)
        require_readable(manifest)
        _write_text(folder / MANIFEST, manifest.text())
    return Written(seconds, record_built(manifest, out))


def _pack(p: Prepared, folder: Path, progress: Progress) -> None:
    params = packings.MadeParams(p.packing, p.source)
    packings.write_params(p.packing, params, folder, SHARD_BYTES, progress)


def _params_of(p: Prepared, folder: Path) -> packings.ParamSource:
    """The params as they will be found at load."""
    files = sorted(folder.glob("*.safetensors"))
    return packings.StoredParams.open(files) if files else packings.MadeParams(p.packing, p.source)


def _manifest(p: Prepared, folder: Path, compiled: dict[str, Any]) -> Manifest:
    import torch

    files = sorted(f for f in folder.rglob("*") if f.is_file())
    form = p.options["latent_kv"]["form"]
    return Manifest(
        g4ir=VERSION,
        variant=p.spec.name,
        spec_digest=p.spec.digest(),
        backend=p.backend.name,
        device=p.device,
        machine=Line(p.backend.machine(p.device)),
        dtype=p.dtype,
        limits=p.limits,
        all_logits=p.all_logits,
        skipped_passes=p.skip,
        options=PassOptions(LatentOptions(form)),
        settings=dict(p.settings),
        ple_placement=p.ple_placement,
        media=p.media,
        graphs=tuple(p.packing.program.graphs),
        weights=p.weights,
        compiled=compiled,
        versions=Versions(torch.__version__, platform.python_version()),
        notes=Notes(
            {on_one_line(k): Line(v) for k, v in p.source.ignored.items()},
            {Line(k): f"{v:g}" for k, v in p.source.defaults.items()},
        ),
        files={
            f.relative_to(folder).as_posix(): StoredFile(sha256(f), f.stat().st_size)
            for f in files
        },
    )


class _Closed:
    """In the place of a runtime that was closed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getattr__(self, name: str) -> Any:
        raise InputError(f"{self.path}: this engine was closed; load it again")

    def close(self) -> None:
        """Nothing is left to free."""


@dataclass(repr=False)
class Engine:
    """A loaded engine directory; a context that closes it. It belongs to the process that loaded
    it."""

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
    _idle: Session | None = field(default=None, init=False)
    #: held while that one is taken
    _lending: threading.Lock = field(default_factory=threading.Lock, init=False)
    _process: int = field(default_factory=os.getpid, init=False)

    def __repr__(self) -> str:
        backend = self.manifest.get("backend")
        sizes = ", ".join(f"{k} {v}" for k, v in asdict(self.limits).items())
        return (
            f"<Engine {str(self.path)!r}: {self.spec.name}, {backend} on {self.device}, "
            f"{self.dtype}, {sizes}>"
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_process(self) -> None:
        """InputError in a forked child, where the runtime would wait for threads that only the
        parent has."""
        if os.getpid() != self._process:
            raise InputError(
                f"{self.path}: loaded by process {self._process}, of which this is a fork; load "
                f"the engine in the process that uses it"
            )

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
        self._check_process()
        return Session(self, batch)

    def embed(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Token ids -> the rows that the text graphs take, on the engine's device."""
        self._check_process()
        rows = embed_rows(self.program.graphs["embed"], self.tables, tokens)
        return {k: t.to(self.device) for k, t in rows.items()}

    def encode(self, kind: str, item: Any, **options: Any) -> Soft:
        """The soft tokens of one image, video or sound (see media/encode.py)."""
        from .media.encode import encode

        self._check_process()
        return encode(self, kind, item, **options)

    def defaults(self) -> Defaults:
        """What the checkpoint's generation_config.json says."""
        return read_defaults(self.path / GENERATION, self.spec.text.vocab_size)

    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a row: generation_config's, else the spec's."""
        stop = self.defaults().stop
        return self.spec.tokens.eos if stop is None else stop

    def suppressed(self) -> tuple[int, ...]:
        """Token ids that are never generated (matters for greedy decoding too): the checkpoint's,
        and those that a smaller per-layer table has no row for, which no step could read."""
        text = self.spec.text
        return (*self.defaults().suppress, *range(text.readable_ids, text.vocab_size))

    def tokenizer(self) -> Any:
        """The checkpoint's own tokenizer (library `tokenizers`)."""
        path = self.path / TOKENIZER
        if not path.is_file():
            raise EngineError(
                f"{self.path} has no tokenizer.json (the checkpoint had none): give token ids"
            )
        return _read_tokenizer(path, path.read_bytes())

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
        (list of lists -> list of lists, up to max_batch of different lengths). Tensors, arrays
        of integers and tuples do too.

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
        with self._lending:  # no two threads get the same one
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
        closed: Any = _Closed(self.path)
        self.runtime = closed


def _read_tokenizer(path: Path, raw: bytes) -> Any:
    """The tokenizer of a tokenizer.json; EngineError where it is none."""
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise MissingError("text prompts need `pip install tokenizers`") from e
    try:
        found = Tokenizer.from_str(raw.decode())
        # What a file says of these is for batches of training; prompts are never cut.
        found.no_truncation()
        found.no_padding()
        return found
    except Exception as e:  # the library raises nothing narrower
        raise EngineError(f"{path} is no tokenizer file: {e}; download or save it again") from e


def _prompts(given: Any) -> tuple[list[list[int]], bool]:
    """(prompts, whether it was a single one)."""
    import torch

    def plain(x: Any) -> Any:
        if isinstance(x, torch.Tensor | np.ndarray | np.integer):
            return x.tolist()
        return list(map(plain, x)) if isinstance(x, list | tuple) else x

    rows = plain(given)
    if isinstance(rows, str) or (isinstance(rows, list) and str in map(type, rows)):
        raise InputError("prompt tokens: found text; encode it with the engine's tokenizer first: "
                         "engine.tokenizer().encode(text).ids")  # fmt: skip
    if not isinstance(rows, list):
        raise InputError(f"prompt tokens: found {type(given).__name__}; expected a list of ids")
    many = {isinstance(x, list) for x in rows}
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
            session.append(padded, lengths, soft), count, sampler, stop
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
    cuda_graph: bool = True, trust: bool = False, progress: Progress = silent,
) -> Engine:  # fmt: skip
    """Load an engine directory; compiles nothing.

    Every file is compared with the manifest's digests before any compiled file is opened;
    check_weights=False leaves out the weight files, which take about a second per GiB.
    ple_placement puts the table of per-layer embeddings elsewhere than the build said;
    cuda_graph=False runs decode steps on CUDA launch by launch, not as one recorded graph.
    trust=True runs native code of an engine that this user did not build here (trust.py).
    Raises EngineError naming the file, or another machine, and the fix; TrustError for such code.
    """
    found = open_artefact(Path(path), check_weights)
    return load_artefact(
        found, ple_placement=ple_placement, cuda_graph=cuda_graph, trust=trust, progress=progress
    )


def load_artefact(
    found: Artefact, *, ple_placement: str | None = None, cuda_graph: bool = True,
    trust: bool = False, progress: Progress = silent,
) -> Engine:  # fmt: skip
    """Load a checked engine directory; arguments as those of `load_engine`."""
    m = found.manifest
    backend = _backend_of(found)
    kept = read_compiled(found, backend.record)
    _check_machine(found, backend)
    if backend.native and not trust:
        require_trust(found)
    params = _open_params(found)
    program = found.packing.program
    runtime = backend.load(
        program, m.limits, m.device, found.path, kept, params, _prefixed(progress, "load"),
        cuda_graph,
    )
    placed = find_placement(ple_placement or m.ple_placement, found.spec, m.device)
    tables = {
        v.name: _table(runtime, params, v, placed, m.device)
        for v in program.graphs["embed"].params
    }
    return Engine(
        found.path, json.loads(m.text()), found.spec, m.limits, m.all_logits, m.device,
        m.dtype, program, runtime, tables, m.media,
    )  # fmt: skip


def _backend_of(found: Artefact) -> Backend:
    """The backend, where it makes engines such as this one."""
    m = found.manifest
    try:
        backend = find_backend(m.backend)
        settings = checked_settings(backend, m.settings)
    except InputError as e:
        raise EngineError(f"{found.path / MANIFEST}: {e}; build the engine again") from None
    rules = {
        "device": m.device in backend.devices,
        "dtype": m.dtype in backend.dtypes,
        "settings": m.settings == settings,
        "weights": not backend.packs_weights or isinstance(m.weights, PackedWeights),
    }
    for key, holds in rules.items():
        if not holds:
            raise EngineError(
                f"{found.path / MANIFEST}: {key} is none of backend {m.backend}; build it again"
            )
    return backend


def _table(
    runtime: Runtime, params: packings.ParamSource, v: Value, ple: str | None, device: str
) -> Any:
    """The runtime's own copy of a table that it holds anyway (a tied head), or one placed as the
    engine says."""
    resident = runtime.resident(v.name)
    if resident is not None:
        return resident
    placement = ple if v.name == PLE_TABLE and ple else packings.DEFAULT_PLACEMENT
    if device == "cuda" and placement != "device" and find_spec("triton"):
        from .backends.torch_compile.host_table import open_host_table

        return open_host_table(params, v, placement, device)
    return packings.open_table(params, v, placement, device)


def _check_machine(found: Artefact, backend: Backend) -> None:
    import torch

    path, m = found.path, found.manifest
    # Not `backend.check`, which asks for what a build needs: loading needs no compiler.
    if m.device == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            f"{path} was built for cuda and this torch sees no CUDA device; build it again with "
            f"--device cpu, or run it where it was built"
        )
    built, here = m.machine, backend.machine(m.device)
    if not _runs_on(built, here):
        raise EngineError(
            f"{path} was built for another machine ({built}); this is {here}; "
            f"{rebuild(path, m, found.spec)}"
        )
    if built != "any" and m.versions.torch != torch.__version__:
        raise EngineError(
            f"{path} was built with torch {m.versions.torch}, this is {torch.__version__}; "
            f"{rebuild(path, m, found.spec)}"
        )


def _runs_on(built: str, here: str) -> bool:
    """Same kind of machine, with at least the extensions that the engine may use."""
    *kind, flags = built.split(" ")
    *kind_here, flags_here = here.split(" ")
    return kind == kind_here and set(flags.split(",")) <= set(flags_here.split(","))


def _open_params(found: Artefact) -> packings.ParamSource:
    m, kept = found.manifest, found.manifest.weights
    if found.stored is not None:
        return found.stored
    if isinstance(kept, RandomWeights):
        source: WeightSource = RandomCheckpoint(
            found.spec, kept.seed, torch_dtype(m.dtype), m.device
        )
        return packings.MadeParams(found.packing, source)
    for name, digest in kept.files.items():
        file = Path(kept.directory) / name
        if not file.is_file() or (found.whole and sha256(file) != digest):
            raise EngineError(
                f"{file} is missing or is not the file this engine was built from; restore it, or "
                f"build again without --link-weights"
            )
    checkpoint = Checkpoint.open(kept.directory, found.spec, m.media.kinds)
    if {*_names(checkpoint)} != kept.files.keys():
        raise EngineError(
            f"{kept.directory}: its weight files are not those that {found.path / MANIFEST} names; "
            f"restore them, or build again without --link-weights"
        )
    return packings.MadeParams(found.packing, checkpoint)


def _linked(source: Checkpoint) -> LinkedWeights:
    files = {name: sha256(p) for name, p in _names(source).items()}
    return LinkedWeights("linked", Line(source.directory.resolve()), files)


def _names(source: Checkpoint) -> dict[str, Path]:
    """Weight files by their paths inside the checkpoint's directory."""
    return {p.relative_to(source.directory).as_posix(): p for p, _ in source.files}


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
    weights, free = p.disk_bytes(), free_bytes(out)
    need = weights + OTHER_BYTES
    if weights and free < need:
        raise EngineError(
            f"{out.parent}: the engine needs {size_text(need)} ({size_text(weights)} of weights), "
            f"{size_text(free)} are free; make room, choose another --out, or use --link-weights"
        )


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A temporary sibling of `out` that becomes `out` at the end, or vanishes."""
    folder = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = tensorfile.new_folder(out.parent, f".{out.name}{BUILDING}")
        yield folder
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
