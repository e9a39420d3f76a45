"""Engines that several test modules use, built once per run, and how far logits may differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import g4ir
from g4ir import Engine, Spec, load_spec
from g4ir.artefact.directory import MANIFEST, manifest_text
from g4ir.check.reference import reference_engine
from g4ir.model.names import HEAD
from g4ir.model.tensors import dead_tensors, text_tensors
from g4ir.weights.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint, sha256
from g4ir.weights.random import random_tensor, random_weights
from g4ir.weights.tensorfile import FileTensor, write_tensors
from g4ir.weights.write import write_checkpoint
from tests.cases import read_table
from tests.contract.flows import CHUNK, FLOWS, MAX_SEQ
from tests.oracle import relative

Change = Callable[[torch.Tensor], torch.Tensor]

#: tables of several test modules
CASES = read_table("engine_cases.yaml")
#: of the row's rms
BUDGET = 1e-4
#: spec -> limits of its engines
OPTIONS: Mapping[str, dict[str, Any]] = {
    "tiny-ple": {"max_batch": 3, "all_logits": True},
    "tiny-moe": {"max_batch": 1, "all_logits": False},
}
#: those of the torch backend, which compiles 15 programs for the logits of every token of a
#: tiny-ple, and 10 for the last one's; a tiny-moe takes 8 for either
COMPILED: Mapping[str, dict[str, Any]] = {
    "tiny-ple": {"max_batch": 3, "all_logits": False},
    "tiny-moe": {"max_batch": 1, "all_logits": True},
}


def limits_of(backend: str, name: str) -> dict[str, Any]:
    """What an engine of `engines(backend, name)` is built for."""
    return (COMPILED if backend == "torch" else OPTIONS)[name]


def random_checkpoint(
    folder: Path, name: str | Spec = "tiny-ple", seed: int = 0, **options: Any
) -> Path:
    """A checkpoint directory of a spec, in fp32."""
    spec = load_spec(name) if isinstance(name, str) else name
    source = random_weights(spec, seed, torch.float32)
    if options.keys() & {"shards", "dead"}:
        return published_checkpoint(folder, spec, source, config=spec.to_hf(), **options)
    return write_checkpoint(folder, spec, source, **options)


def published_checkpoint(
    folder: Path,
    spec: Spec,
    source: Checkpoint,
    shards: int = 1,
    dead: bool = False,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """A text model in this many files; `dead`: with the unused K and V of shared layers, as the
    hub's files have them."""
    text, unused = text_tensors(spec), dead_tensors(spec) if dead else {}
    values = {name: source.tensor(name) for name in text}
    values |= {name: random_tensor(0, name, unused[name], source.dtype) for name in unused}
    prefix = "model." if config and "text_config" not in config else "model.language_model."
    tensors = {n if n == HEAD else prefix + n: FileTensor.of(t) for n, t in values.items()}
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(dict(config)))
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else SINGLE
        part = {n for k, n in enumerate(tensors) if k * shards // len(tensors) == i}
        write_tensors(folder / file, {n: tensors[n] for n in tensors if n in part})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Path:
    """A checkpoint directory of one file of weights with other tensors and another config."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


@dataclass
class Engines:
    """Builds on first use: `engines("torch", "tiny-ple")`."""

    folder: Path

    def __post_init__(self) -> None:
        self.built: dict[tuple[str, ...], Engine] = {}

    def checkpoint(self, name: str) -> Path:
        path = self.folder / f"{name}-checkpoint"
        return path if path.exists() else random_checkpoint(path, name)

    def __call__(self, backend: str, name: str, **options: str) -> Engine:
        key = (backend, name, *options.values())
        if key not in self.built:
            self.built[key] = self.build(*key, **options)
        return self.built[key]

    def build(self, backend: str, name: str, *words: str, **options: Any) -> Engine:
        """A new engine, in a folder that is called by all the words."""
        with FLOWS[backend].using(self.folder):
            out = self.folder / "-".join((backend, name, *words))
            limits = {"max_seq": MAX_SEQ, "prefill_chunk": CHUNK, **limits_of(backend, name)}
            given = {"checkpoint": self.checkpoint(name), "backend": backend, **limits, **options}
            return g4ir.build(None, out, **given)


class RandomEngines(ExitStack):
    """Engines of random weights on the reference backend, by variant and options, each once."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.found = folder, dict[str, Engine]()

    def __call__(self, variant: str, **options: Any) -> Engine:
        key = f"{variant} {options}"
        if key not in self.found:
            given = {"backend": "reference", "random_weights": 0, **options}
            made = g4ir.build(variant, self.folder / f"e{len(self.found)}", **given)
            self.found[key] = self.enter_context(made)
        return self.found[key]


def stored_manifest(folder: Path) -> dict[str, Any]:
    """The values of an engine's manifest, as they are in the file."""
    return json.loads((folder / MANIFEST).read_text())


def resigned(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The engine with another manifest, which has the digest of its new content and, where they
    changed too, those of its files."""
    values = stored_manifest(folder)
    del values["digest"]
    for name, kept in values["files"].items():
        if (file := folder / name).is_file():
            kept.update(sha256=sha256(file), bytes=file.stat().st_size)
    change(values)
    (folder / MANIFEST).write_text(manifest_text(values))
    return folder


def add_file(folder: Path, name: str, text: str) -> Path:
    """The engine with one more file, as if it had been built with it."""
    (folder / name).write_text(text)
    record = {"sha256": sha256(folder / name), "bytes": (folder / name).stat().st_size}
    return resigned(folder, lambda m: m["files"].update({name: record}))


def some_tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    """i64[rows, count] that every tiny spec has."""
    g = torch.Generator().manual_seed(77 + seed)
    return torch.randint(3, 500, (rows, count), generator=g)


def agrees(got: torch.Tensor, want: torch.Tensor, budget: float = BUDGET) -> None:
    """Each row of logits within the budget."""
    assert got.shape == want.shape, f"{got.shape}, expected {want.shape}"
    error = relative(got, want).max().item()
    assert error <= budget, f"{error:.2e} of rms, budget {budget:.0e}"


def changed(engine: Engine, edits: Mapping[str, Change]) -> Engine:
    """The engine with other weights after loading."""
    out = reference_engine(engine)
    held = out.runtime.params  # type: ignore[attr-defined]
    edited = {name: edit(held[name]) for name, edit in edits.items()}
    out.runtime.params = {**held, **edited}  # type: ignore[attr-defined]
    return out
