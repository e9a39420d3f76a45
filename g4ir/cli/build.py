"""`g4ir build`: builds an engine directory from a spec and weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from g4ir.backends.base import Prepared
from g4ir.errors import EngineError, G4Error, InputError, check_all
from g4ir.ir.graph import Graph
from g4ir.passes import PASSES, Dump
from g4ir.plan.footprint import Footprint
from g4ir.plan.options import BuildOptions, words_of
from g4ir.spec.record import SUFFIXES, Spec, spec_names
from g4ir.ui import console
from g4ir.ui.files import free_bytes
from g4ir.ui.units import size_text
from g4ir.weights.origin import find_model

from .common import Programs, Source, emit, of_file, output
from .verb import PRESET, Verb, argument, flag, flag_of, options
from .verify import compared

#: title of --help -> options below it
GROUPS = {
    "model": "checkpoint mmproj adapter random_weights link_weights",
    "device": "backend device target dtype memory tp ep",
    "limits": "max_batch max_seq prefill_chunk all_logits",
    "quantisation": "quant bits requantize calibrate kv_dtype quant_activations",
    "media": "media image_budgets audio_seconds",
    "advanced": "drafter draft_tokens skip latent_kv ple_placement settings",
}


output_flag = partial(flag, title="output")


class Build(Verb):
    """Build an engine, or print what a build would write."""

    model: str | None = argument(
        "variant, spec, GGUF, checkpoint or hub id", "MODEL", "?", title="model"
    )
    source: Source = flag("", title="model")
    options: BuildOptions = options(GROUPS)
    preset: str | None = flag(PRESET, None, "NAME", title="device")
    dump_ir: str | None = flag("write the graphs after every pass", None, "DIR", title="advanced")
    out: str | None = output_flag("directory (default: engines/VARIANT-BACKEND)", None, "DIR")
    verify: bool = output_flag("verify the engine against the reference", False)
    dry_run: bool = output_flag("check everything up to compilation, write nothing", False)
    json: bool = output_flag("print the result as JSON", False)

    def __post_init__(self) -> None:
        if not self.explicit & {"backend", "preset"}:
            required = "the following arguments are required: --backend or --preset"
            raise InputError(f"{required} (see g4ir build --help)")
        if self.dry_run and self.verify:
            raise InputError("--dry-run builds nothing that --verify could check")
        if self.verify and (tp := self.options.tp) > 1:
            raise InputError(
                f"--verify runs the engine, which takes {tp} processes: build it, then verify it "
                f"by torchrun --nproc-per-node {tp} -m g4ir verify ENGINE"
            )

    def __call__(self) -> int:
        from g4ir.builder.build import check_absent, prepare, write_engine

        console.spec_warnings()
        source, options = self._sources()
        spec = source.load()
        if self.out or spec:
            check_absent(self._out(spec))
        with console.Progress() as progress:
            progress("checking the build")
            dump = _dump_to(Path(self.dump_ir)) if self.dump_ir else None
            options = of_file(options, self.preset)
            prepared = prepare(spec, options, dry=self.dry_run, dump=dump, progress=progress)
            here = prepared.backend.has_device(prepared.config.device)
            if self.verify and not (here or self.dry_run):
                raise InputError(f"--verify needs a GPU: verify it {prepared.backend.location}")
            out = self._out(prepared.config.spec)
            _tell_notes(prepared)
            if self.dry_run:
                return _dry_run(prepared, out, self.json, progress)
            written = write_engine(prepared, out, progress)
            prepared.source.close()
        seconds = written.compile_s
        if seconds >= console.QUIET_S:
            console.say(f"compiled in {seconds:.0f} s; loading the engine compiles nothing")
        if options.tp > 1:
            console.say(f"run it by torchrun --nproc-per-node {options.tp} -m g4ir run {out} ...")
        if not here:
            console.say(f"run it {prepared.backend.location}")
        if self.verify:
            load = Programs(trust=not written.recorded, threads=None, rank_timeout=None)
            return compared(str(out), load, self.json, checkpoint=options.checkpoint)
        result = {"engine": str(out), "compile_s": seconds}
        return output(self.json, result, f"{out}\n")

    def _sources(self) -> tuple[Source, BuildOptions]:
        """Return the spec flags and build options, with MODEL in place of --variant, --spec or
        --checkpoint."""
        if not (model := self.model):
            return self.source, self.options
        spec = "spec" if Path(model).suffix in SUFFIXES else "checkpoint"
        name = "variant" if model in spec_names() else spec
        if name in self.explicit:
            raise InputError(f"give MODEL or {flag_of(name)}, not both")
        if name == "checkpoint":
            return self.source, replace(self.options, checkpoint=find_model(model, "")[1])
        named: dict[str, Any] = {name: model}
        return replace(self.source, **named), self.options

    def _out(self, spec: Spec | None) -> Path:
        assert self.out or spec
        return Path(self.out or f"engines/{spec.name if spec else ''}-{self.options.backend}")


def _dump_to(folder: Path) -> Dump:
    """Return a callback that writes one file per phase and pass, in the order of the pipeline. It
    creates the folder with the first file, so a build that is refused before leaves none."""

    def dump(name: str, graph: Graph) -> None:
        file = folder / f"{PASSES.index(name) + 1:02}-{name}.{graph.name}.g4ir"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(str(graph))
        except OSError as e:
            message = f"--dump-ir {e.filename}: {e.strerror}"
            raise InputError(f"{message}; name a folder that can be written") from None

    return dump


def _tell_notes(p: Prepared) -> None:
    """Print notes on tensors of the checkpoint that the engine does not use, and on missing ones
    that get a default value."""
    whys = list(p.source.ignored.values())
    for why in dict.fromkeys(whys):
        console.say(f"note: {whys.count(why)} tensors not used: {why}")
    for value in dict.fromkeys(p.source.defaults.values()):
        first, *more = [name for name, v in p.source.defaults.items() if v == value]
        absent = f"{1 + len(more)} tensors absent ({first}{', ...' if more else ''})"
        console.say(f"note: {absent}: filled with {value:g}")


def _dry_run(p: Prepared, out: Path, as_json: bool, progress: console.Progress) -> int:
    from g4ir.builder.build import check_space

    short = [text for text in (p.short, p.backend.short(p.packing.program)) if text]
    try:
        check_space(p, out)
    except EngineError as e:
        short.append(str(e))
    plan = _plan(p, out) | p.backend.dry_run(p, progress)
    verdict = _verdict(p, short)
    if as_json:
        emit({"verdict": verdict, "short": short} | plan)
        return int(bool(short))
    print(verdict)
    for key, value in plan.items():
        size = key.endswith("_bytes") or key == "disk_free"
        if value not in (None, False, 0, "off", "none", [], (), {}):
            print(f"{key:<14} {size_text(value) if size else words_of(value)}")
    return int(bool(short))


def _verdict(p: Prepared, short: list[str]) -> str:
    """Return whether the build would succeed on this machine, and the reasons if not."""
    if short:
        return f"would not build here: {'; '.join(short)}"
    try:
        check_all(*p.backend.needs(p.config.device))
    except G4Error as e:
        return f"fits; to build it here: {e}"
    return "would build here" + ("" if p.weights else ", with weights")


def _plan(p: Prepared, out: Path) -> dict[str, Any]:
    from g4ir.builder.build import disk_bytes

    memory = Footprint(p.config, p.backend, p.packing).built
    return {
        "variant": p.config.spec.name,
        **p.config.as_options(),
        "weights": p.weights.kind if p.weights else "absent",
        "param_bytes": p.param_bytes(),
        "cache_bytes": p.cache_bytes(),
        "memory": memory,
        "needed_bytes": sum(memory.values()),
        "nodes": {name: len(g.nodes) for name, g in p.packing.program.graphs.items()},
        "disk_bytes": disk_bytes(p),
        "disk_free": free_bytes(out),
        "out": str(out),
    }
