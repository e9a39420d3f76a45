"""Shared by the verbs: common flags, JSON output, and finding and loading engines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from g4ir.errors import InputError
from g4ir.generate.jsonl import named
from g4ir.model.media import KINDS, MEDIA_SETTINGS, check_file, check_supported
from g4ir.ops.types import torch
from g4ir.plan.options import BuildConfig, BuildOptions
from g4ir.plan.presets import find_preset
from g4ir.spec.record import SUFFIXES, Spec, load_spec
from g4ir.ui import console
from g4ir.weights.origin import find_model

from .verb import (
    ANY_MODEL,
    PRESET,
    Bytes,
    Part,
    Size,
    Verb,
    argument,
    flag,
    flag_of,
    options,
    setting,
)

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine

#: default --draft-tokens of an engine built on first use with --draft ngram
DRAFT_TOKENS = 4
#: maximum number of threads
MAX_THREADS = 1024
#: setting -> kind of media that it applies to
SETTING_KINDS = {setting: kind for kind, names in MEDIA_SETTINGS.items() for setting in names}
#: build options of engines built on first use: FIRST_USE by flags, FIRST_USE_SETTINGS by --set
FIRST_USE = "backend device dtype quant max_batch max_seq random_weights settings"
FIRST_USE_SETTINGS = "kv_dtype latent_kv quant_activations ple_placement prefill_chunk memory"


def emit(value: Any, indent: int | None = None) -> None:
    """Print `strict(value)` as JSON on stdout."""
    print(json.dumps(strict(value), indent=indent), flush=True)


def output(as_json: bool, value: Any, text: str) -> int:
    """Print a result, its values as JSON or a text; returns the exit code 0."""
    emit(value) if as_json else print(text, end="")
    return 0


def print_facts(as_json: bool, values: Mapping[str, Any], width: int = 0) -> int:
    """Print a line per value, or JSON; returns the exit code 0."""
    lines = [f"{key.replace('_', ' '):<{width}} {value}\n" for key, value in values.items()]
    return output(as_json, values, "".join(lines))


def strict(value: Any) -> Any:
    """Return a value as JSON can have it: dataclasses as dicts; NaN and infinities as None."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_model(label: str, spec: Spec, encoder: bool | None) -> None:
    """Raise InputError unless a model is an encoder (`encoder` True) or generates text (False);
    None: both are accepted."""
    from g4ir.engine.embeddings import need_decoder, need_encoder

    if encoder is not None:
        (need_encoder if encoder else need_decoder)(spec, label)


class Source(Part):
    """Flags that select a spec, by variant or by file."""

    variant: str | None = flag("shipped variant (see `g4ir specs`)", None, "N")
    spec: str | None = flag("spec file (YAML)", None, "F")

    def load(self) -> Spec | None:
        """Return the spec of --variant or --spec; None if neither is given."""
        if self.variant is not None and self.spec is not None:
            raise InputError("give either --variant or --spec, not both")
        if self.spec is not None:
            return load_spec(Path(self.spec))
        return None if self.variant is None else load_spec(self.variant)


class Programs(Part):
    """Flags of loading an engine: threads, trust in its native code, and ranks."""

    threads: int | None = flag("CPU threads (default: OMP_NUM_THREADS, else the cores)", None, "N")
    trust: bool = flag("run native code of an engine that was built elsewhere", False)
    rank_timeout: float | None = setting("seconds that ranks wait for each other (default 300)")

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise InputError(f"--threads {self.threads}: expected 1 to {MAX_THREADS}")

    def engine(self, path: str | Path, progress: Callable[[str], None], **how: Any) -> Engine:
        """Load an engine; `how`: further arguments of load_engine."""
        from g4ir.builder.load import load_engine

        if self.threads:
            torch.set_num_threads(self.threads)
        progress(f"loading {path}")
        return load_engine(path, progress=progress, trust=self.trust, **how)


class Load(Programs):
    """Flags of loading an engine for generation."""

    cuda_graph: bool = setting("off: launch kernel by kernel", True)
    huge_pages: bool = setting("copy the weights to huge pages, which a CPU reads faster", False)

    def engine(self, path: str | Path, progress: Callable[[str], None], **how: Any) -> Engine:
        how |= {"cuda_graph": self.cuda_graph, "huge_pages": self.huge_pages}
        return super().engine(path, progress, **how)

    def to_generate(
        self, path: str, progress: Callable[[str], None], encoder: bool = False, **how: Any
    ) -> Engine:
        """Load an engine and log its checkpoint's unsupported generation settings. InputError for
        an encoder, unless `encoder`."""
        engine = self.engine(path, progress, **how)
        check_model(engine.label, engine.spec, None if encoder else False)
        if note := engine.defaults().note:
            console.say(f"note: {note}")
        return engine


class Draft(Part, title="speculative decoding"):
    """Flags of speculative decoding."""

    draft: str = flag(
        "ngram, mtp (draft model; default for a folder of GGUF files with one) or none",
        "none",
        "SOURCE",
    )
    draft_tokens: int | None = flag(
        "maximum draft tokens per step (default: as built); 0: none", None, "K"
    )

    def __post_init__(self) -> None:
        if self.draft != "none":
            from g4ir.engine.speculative import DRAFTS

            if self.draft not in DRAFTS:
                raise InputError(f"--draft {self.draft}: expected one of {', '.join(DRAFTS)}")
            return
        if self.draft_tokens:
            fix = "leave it out, or give --draft ngram or mtp"
            raise InputError(f"--draft-tokens {self.draft_tokens}: nothing is drafted; {fix}")

    def check(self, label: str, config: BuildConfig) -> None:
        """Raise InputError if an engine of this config does not support these flags; `label`: its
        name in the error."""
        if self.draft != "none" and self.draft_tokens != 0:
            from g4ir.engine.speculative import resolve_draft

            resolve_draft(config, label, self.draft, self.draft_tokens)

    def scheduler(self) -> dict[str, Any]:
        """Return the fields of SchedulerConfig that these flags set; the scheduler checks them
        against an engine."""
        from g4ir.engine.speculative import NO_DRAFT, SpeculativeConfig

        off = self.draft_tokens == 0
        return {"draft": NO_DRAFT if off else SpeculativeConfig(self.draft, self.draft_tokens or 0)}


class OnDisk(Part):
    """Flag of the prefix cache on disk, which outlives the process."""

    prefix_disk: Size = flag("prefix cache on disk: size, such as 4GiB (default: none)", 0, "BYTES")


class MediaFlags(Part, title="media"):
    """Flags of media files and of their preprocessing."""

    files: list[tuple[str, str]] = flag("KIND file", (), "FILE", each=KINDS)
    image_budget: int | None = setting("maximum soft tokens per image")
    frames: int | None = setting("number of video frames to sample")
    fps: float | None = setting("video frames to sample per second")
    audio_too_long: Literal["cut", "refuse"] | None = setting(
        "audio beyond the limit: cut (default) or refuse"
    )

    def settings(self) -> dict[str, Any]:
        """Return the settings by name; None: the default."""
        return {name: vars(self)[name] for name in SETTING_KINDS}

    def check(self, lines: str | None, example: str) -> None:
        """Raise InputError for a missing file, and for a setting without a file of its kind.
        `lines`: the flag that gave a file of JSON lines, else None; each line names its own media,
        as in `example`, so files are refused and settings need none."""
        kinds = {kind for kind, _ in self.files}
        if lines and kinds:
            why = f"with {lines} each request names its own files, such as {example}"
            raise InputError(f"--{min(kinds)}: {why}")
        for name, kind in SETTING_KINDS.items():
            if vars(self)[name] is not None and not lines and kind not in kinds:
                raise InputError(f"{flag_of(name)} is for --{kind}, which is not given")
        for kind, path in self.files:
            with named(f"--{kind}"):
                check_file(kind, path)


class FirstUse(Part, title="build on first use, if MODEL is no engine"):
    """Flags of engines that are built on first use: build options, download, and cache size."""

    preset: str | None = flag(PRESET, None, "NAME")
    options: BuildOptions = options(FIRST_USE, FIRST_USE_SETTINGS)
    download: bool = flag("download missing weights (default: ask at a terminal)", False)
    revision: str | None = setting("branch, tag or commit of a Hugging Face model")
    engines_limit: Bytes | None = setting("maximum size of the cache of engines, such as 50GiB")

    def engines(
        self,
        models: Sequence[str],
        draft: Draft | None = None,
        all_logits: bool = False,
        progress: Callable[[str], None] | None = None,
        encoder: bool | None = False,
        media: Iterable[tuple[str, str]] = (),
    ) -> list[str]:
        """Return the engine directories of models, built on first use. Since a build may take
        minutes, checks come first: flags, `encoder` (as in `check_model`), support for `draft`, and
        for the kinds of `media`. `progress`: callback with messages, default: to stderr."""
        from g4ir.artefact.directory import is_engine, refuse_options
        from g4ir.builder.library import find_engine

        drafts = draft.draft_tokens if draft else None
        if drafts is None and draft and draft.draft == "ngram":
            drafts = DRAFT_TOKENS
        if drafts is None and self.preset:
            drafts = find_preset(self.preset).options.get("draft_tokens")
        needed = replace(self.options, all_logits=all_logits, draft_tokens=drafts)
        if draft and draft.draft == "none" and "draft" in draft.explicit:
            needed = replace(needed, drafter=needed.drafter or "none")
        build_options = {*f"{FIRST_USE} {FIRST_USE_SETTINGS} preset revision".split()}
        for engine in filter(is_engine, map(Path, models)):
            refuse_options(engine, [*map(flag_of, self.explicit & build_options)])
        how: dict[str, Any] = {"revision": self.revision, "download": self._consent()}
        how["settled"] = partial(of_file, preset=self.preset)
        display: Any = nullcontext(progress) if progress else console.Progress()
        with display as callback:
            how |= {"limit": self.engines_limit, "progress": callback}

            def checked(model: str, config: BuildConfig) -> None:
                check_model(model, config.spec, encoder)
                for kind, _ in media:
                    check_supported(kind, config.media, config.spec)
                if draft:
                    draft.check(model, config)

            requests = ((m, self.options if is_engine(Path(m)) else needed) for m in models)
            return [str(find_engine(m, o, check=partial(checked, m), **how)) for m, o in requests]

    def checkpoint(self, model: str, explicit: str | None) -> str | None:
        """Return the path of MODEL's original weights: --checkpoint (`explicit`), else MODEL's own;
        None for an engine, a spec file and random weights."""
        from g4ir.artefact.directory import is_engine

        random = self.options.random_weights is not None
        if explicit or random or is_engine(Path(model)) or Path(model).suffix in SUFFIXES:
            return explicit
        return str(find_model(model, "", self.revision)[1])

    def _consent(self) -> Callable[[Any], bool] | bool:
        """Return a function that prints what would be downloaded and returns whether to: yes with
        --download, else the user's answer; False with neither --download nor a terminal."""

        def agreed(download: Any) -> bool:
            console.say(str(download))
            return self.download or console.confirm("download it?")

        return agreed if self.download or console.interactive() else False


def of_file(options: BuildOptions, preset: str | None) -> BuildOptions:
    """Return the options, without the preset's `quant` if their checkpoint is quantised already; a
    note on stderr says so."""
    if not preset or options.checkpoint is None or options.quant is None:
        return options
    from .models import named_model, without_quant

    model = named_model(str(options.checkpoint))
    unquantised = without_quant(options, find_preset(preset), model)
    if unquantised != options:
        path, quant = options.checkpoint, options.quant
        console.say(f"note: {path} is quantised already: the preset's --quant {quant} is left out")
    return unquantised


def folder_drafts(model: str, draft: Draft) -> Draft:
    """Return the draft flags; without --draft they select the draft model of a MODEL folder, if it
    has one."""
    from g4ir.artefact.directory import is_engine
    from g4ir.weights.origin import DRAFTER_FILE, read_folder

    path = Path(model)
    if draft.draft != "none" or "draft" in draft.explicit or not path.is_dir() or is_engine(path):
        return draft
    folder = read_folder(path)
    return replace(draft, draft="mtp") if folder and folder.files[DRAFTER_FILE] else draft


class OnEngine(Verb):
    """Base class of verbs that run the engine of MODEL."""

    engine: str = argument(f"{ANY_MODEL}; an engine is built on first use", "MODEL")
    first_use: FirstUse

    def engine_path(self, draft: Draft | None = None, **how: Any) -> str:
        """Return the engine directory of MODEL, built on first use; `how`: arguments of
        FirstUse.engines."""
        (path,) = self.first_use.engines([self.engine], draft, **how)
        return path

    @contextmanager
    def opened(
        self, load: Programs, all_logits: bool = False, **how: Any
    ) -> Iterator[tuple[Engine, console.Progress]]:
        """Context with the loaded engine of MODEL and the progress display. `all_logits`: the
        engine must return logits at all positions; `how`: arguments of FirstUse.engines."""
        from g4ir.check.score import require_all_logits

        path = self.engine_path(all_logits=all_logits, **how)
        with console.Progress() as progress, closing(load.engine(path, progress)) as engine:
            if all_logits:
                require_all_logits(engine)
            yield engine, progress
