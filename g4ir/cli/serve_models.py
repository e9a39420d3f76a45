"""Several models of `serve`: their names, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.artefact.directory import is_engine, open_artefact
from g4ir.errors import InputError
from g4ir.parallel.group import launched
from g4ir.plan.fit import device_memory, fitted
from g4ir.plan.footprint import Footprint, usable
from g4ir.weights.checkpoint import CONFIG, GGUF

if TYPE_CHECKING:
    from g4ir.serve.app import Server
    from g4ir.serve.pool import ModelPool, PooledModel
    from g4ir.serve.router import Router
    from g4ir.serve.worker import WorkerHandle


def named_models(words: Sequence[str]) -> dict[str, str]:
    """Return name -> MODEL of a command line: NAME=MODEL, MODEL, or a folder of engines. InputError
    for two models of one name, and two names of one model."""
    named = dict[str, str]()
    for name, model in (pair for word in words for pair in _pairs(word)):
        if name in named:
            fix = "give other names: NAME=MODEL"
            raise InputError(f"{named[name]} and {model} both have the name {name}; {fix}")
        if twice := next(
            (n for n, m in named.items() if Path(m).resolve() == Path(model).resolve()), ""
        ):
            raise InputError(f"{model} has two names, {twice} and {name}; give it one")
        named[name] = model
    if not named:
        raise InputError("give MODEL: what is to be served (see g4ir serve --help)")
    return named


def _pairs(word: str) -> list[tuple[str, str]]:
    folder = Path(word)
    if folder.is_dir() and not is_engine(folder) and not (folder / CONFIG).is_file():
        engines = sorted(p for p in folder.iterdir() if is_engine(p))
        if engines and not [*folder.glob(f"*{GGUF}")]:
            return [(p.name, str(p)) for p in engines]
    name, sign, model = word.partition("=")
    if sign and name and model and not folder.exists():
        return [(name, model)]
    return [(folder.resolve().name.removesuffix(GGUF), word)]


def make_router(server: Server) -> Router:
    """Return a router with the settings of a server."""
    from g4ir.serve.router import Router

    if launched() is not None:
        raise InputError("torchrun started several processes, which serve one model: give one")
    router = Router(**{f.name: getattr(server, f.name) for f in fields(server)})
    router.read_keys()
    return router


def make_pool(
    router: Router,
    engines: Mapping[str, str],
    start: Callable[[PooledModel], WorkerHandle],
    memory: int | None,
    **limits: Any,
) -> ModelPool:
    """Return the models of a router, name -> engine. `start` starts a process; `memory`: bytes for
    all; `limits`: fields of ModelPool."""
    from g4ir.serve.pool import ModelPool
    from g4ir.serve.worker import warm_up

    devices = {open_artefact(Path(e)).config.device for e in engines.values()}
    if len(devices) > 1:
        raise InputError(
            f"the models run on {' and '.join(sorted(devices))}: serve each kind alone"
        )
    memory = memory or device_memory(*devices)
    prefixes = router.scheduler_config.prefix_bytes or 0
    models = [_pooled(n, Path(e), memory, prefixes) for n, e in engines.items()]
    warm_up()
    return ModelPool(models, start, usable(memory), **limits)


def _pooled(name: str, engine: Path, memory: int, prefixes: int) -> PooledModel:
    """Return a pooled model; its bytes are the plan's memory and the prefix cache."""
    from g4ir.backends import find_backend
    from g4ir.builder.load import described
    from g4ir.chat import Template
    from g4ir.serve.pool import PooledModel
    from g4ir.serve.protocols.ollama import tag

    artefact = open_artefact(engine)
    footprint = Footprint(artefact.config, find_backend(artefact.config.backend), artefact.packing)
    _, short = fitted(footprint, memory)
    e = described(artefact)
    facts: dict[str, Any] = {"max_model_len": e.limits.max_seq, "media": sorted(e.media.kinds)}
    if note := Template.open(engine, e.spec.chat).note:
        facts["note"] = note
    return PooledModel(name, engine, footprint.need + prefixes, facts, tag(name, e), short)
