"""Ways to give the program an input of the YAML files beside this one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import g4ir
from g4ir import Engine, Spec, load_engine, load_spec, parse_graph
from g4ir.ops import OPS
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.random import random_weights
from g4ir.weights.tensorfile import read_header
from tests.cli_tools import BUILD, built, refused, text_checkpoint
from tests.cli_tools import g4ir as command_line
from tests.engines import published_checkpoint, random_checkpoint, resigned
from tests.hub_configs import hub_config
from tests.media_tools import broken_files, media_engine
from tests.oracle import find_oracle
from tests.refused.cases import put
from tests.test_ops import node
from tests.test_quantised_checkpoints import CASES, OTHERS

WEIGHTS = "weights-00000.safetensors"
Tensors = dict[str, torch.Tensor]


@dataclass
class Shared:
    """What all cases look at, and none alters; built on first use."""

    folder: Path

    @cached_property
    def engine(self) -> Path:
        """From a checkpoint with a tokenizer: it has every kind of file."""
        words = ("--checkpoint", text_checkpoint(self.folder / "c"), "--max-batch", "2")
        return built(self.folder / "engine", *words)

    @cached_property
    def loaded(self) -> Engine:
        return load_engine(self.engine)

    @cached_property
    def media(self) -> Engine:
        """Takes media of every kind."""
        return load_engine(media_engine(self.folder / "media"))

    @cached_property
    def files(self) -> Path:
        """Pictures, films and sounds, and what is left of some."""
        return broken_files(self.folder / "files")


@dataclass
class World:
    """Where one case runs."""

    here: Path
    shared: Shared
    patch: pytest.MonkeyPatch

    @property
    def names(self) -> dict[str, Callable[[], Path]]:
        """What stands for a path, in inputs and in messages."""
        return {
            "{here}": lambda: self.here,
            "{engine}": lambda: self.shared.engine,
            "{media}": lambda: self.shared.media.path,
        }

    def fill(self, value: Any) -> Any:
        """The input with paths for their names."""
        if isinstance(value, list):
            return [self.fill(v) for v in value]
        if isinstance(value, dict):
            return {k: self.fill(v) for k, v in value.items()}
        for name, path in self.names.items() if isinstance(value, str) else ():
            if name in value:
                value = value.replace(name, str(path()))
        return value

    def strip(self, message: str) -> str:
        """The message with names for paths."""
        for name, path in self.names.items():
            if name == "{here}" or name.strip("{}") in vars(self.shared):
                message = message.replace(str(path()), name)
        return message

    def write(self, files: Mapping[str, Any]) -> None:
        for name, text in files.items():
            (self.here / name).parent.mkdir(parents=True, exist_ok=True)
            (self.here / name).write_bytes(blob(text))


def blob(content: Any) -> bytes:
    """Text, a value as JSON, or {bytes: [[TEXT, COUNT], ...]} of characters below 256."""
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, dict) and [*content] == ["bytes"]:
        return b"".join(text.encode("latin-1") * count for text, count in content["bytes"])
    return json.dumps(content).encode()


def changed(text: Any, change: Any) -> Any:
    """A text in which the first of each is another."""
    for old, new in dict(change).items():
        assert old in text
        text = text.replace(old, new, 1)
    return text


def edited(tensors: Tensors, edits: Mapping[str, Any]) -> Tensors:
    """Tensors with others in their places: {zeros: SHAPE, dtype: D}, or {of: NAME, ...} changed as
    `CHANGES` says; null takes one away, `...` all of them."""
    made = {} if "..." in edits else dict(tensors)
    for name, edit in edits.items():
        made.pop(name, None)
        if edit is not None:
            dtype = getattr(torch, edit.get("dtype", "float32"))
            given = torch.zeros(edit.get("zeros", 0), dtype=dtype)
            t = tensors[edit["of"]].clone() if "of" in edit else given
            made[name] = CHANGES[edit.get("take", "all")](t, edit)
    return made


CHANGES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "all": lambda t, edit: t,
    "rows": lambda t, edit: t[: edit["count"]].clone(),
    "transposed": lambda t, edit: t.T.contiguous(),
    "flat": lambda t, edit: t.reshape(-1),
    "cast": lambda t, edit: t.to(getattr(torch, edit["dtype"])),
    "viewed": lambda t, edit: t.view(edit["shape"]),
    "with": lambda t, edit: _with(t, edit["value"]),
}


def _with(t: torch.Tensor, value: float) -> torch.Tensor:
    """The tensor with another first number."""
    t.view(-1)[:1] = torch.tensor([value]).to(t.dtype)
    return t


# --- specs and configs ------------------------------------------------------------------------


def spec(
    world: World, text: Any = "", change: Any = (), files: Any = (), then: str = "load"
) -> Any:
    """A file `spec.yaml`, in whose text some lines are others."""
    world.write({**dict(files), "spec.yaml": changed(text, change)})
    loaded = load_spec(world.here / "spec.yaml")
    return loaded.to_hf() if then == "to_hf" else loaded


def graph(world: World, text: str, change: Any = ()) -> Any:
    """A printed graph in which some lines are others."""
    return parse_graph(changed(text, change))


def op(world: World, op: str, attr: str, value: Any) -> Any:
    """A node of an op's first sample with another attribute; a list stands for a tuple."""
    s = OPS[op].samples[0]
    value = tuple(value) if isinstance(value, list) else value
    return node(op, s.types(), {**s.attrs, attr: value})


def named_spec(world: World, name: str) -> Any:
    return load_spec(name)


def config(world: World, of: str, set: Mapping[str, Any]) -> Any:
    """A released config.json with other values."""
    values = hub_config(of)
    for path, value in set.items():
        put(values, path, value)
    return Spec.from_hf(values)


def config_file(world: World, files: Mapping[str, Any]) -> Any:
    world.write(files)
    return Spec.from_hf(world.here)


# --- weights ----------------------------------------------------------------------------------


def header(world: World, header: Any, size: int = 0) -> Any:
    """The header of a safetensors file and the bytes behind it."""
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(size)
    (world.here / "model.safetensors").write_bytes(data)
    return read_header(world.here / "model.safetensors")


def weight_file(world: World, content: Any) -> Any:
    world.write({"model.safetensors": content})
    return read_header(world.here / "model.safetensors")


def checkpoint(
    world: World,
    variant: str = "tiny-dense",
    read: str | None = None,
    spec: Any = (),
    shards: int = 1,
    **changes: Any,
) -> Any:
    """A directory that is changed, read as a variant with other fields."""
    made = load_spec(variant)
    source = random_weights(made, 1, torch.bfloat16)
    folder = published_checkpoint(world.here / "c", made, source, shards)
    _change(folder, {}, **changes)
    values = yaml.safe_load(load_spec(read or variant).to_yaml())
    for path, value in dict(spec).items():
        put(values, path, value)
    file = folder.with_name("spec.yaml")
    file.write_text(yaml.safe_dump(values))
    return Checkpoint.open(folder, load_spec(file))


def build_of(world: World, variant: str, words: Any = (), **changes: Any) -> str:
    """A directory that is changed, built with copies of its weights and without."""
    folder = _change(random_checkpoint(world.here / "c", variant), {}, **changes)
    words = ["build", "--checkpoint", str(folder), *words]
    return command(world, [words, [*words, "--link-weights"]])


def codes(
    world: World,
    of: str,
    set: Mapping[str, Any] | None = None,
    tensors: Any = (),
    config: Any = (),
    **options: Any,
) -> Any:
    """A build of a checkpoint in codes, with other tensors and another config.json."""
    folder = (OTHERS | CASES)[of].write(find_oracle(load_spec("tiny-ple")), world.here / "c")
    file = folder / "config.json"
    values = json.loads(file.read_text())
    for path, value in (set or {}).items():
        put(values["quantization_config"], path, value)
    file.write_text(json.dumps({**values, **dict(config)}))
    _change(folder, {}, tensors=tensors)
    options = {"backend": "reference", "max_seq": 64, "prefill_chunk": 16, **options}
    try:
        return g4ir.build(None, world.here / "out", checkpoint=folder, **options)
    finally:
        assert not (world.here / "out").exists()


def _change(
    folder: Path,
    new: dict[str, Any],
    tensors: Any = (),
    header: Any = (),
    set: Any = (),
    files: Any = (),
    drop: Any = (),
    cut: int = 0,
) -> Path:
    """A checkpoint with other tensors, other entries of its header and its index, other files, or
    without its last bytes."""
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if tensors:
        save_file(edited(load_file(weights), tensors), weights)
    if header:
        raw = weights.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        values = json.loads(raw[8:end])
        for path, value in header.items():
            put(values, path, value)
        text = json.dumps(values).encode()
        weights.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
    if set:
        values = json.loads(index.read_text())
        named = {**values["weight_map"], **set}
        values["weight_map"] = {k: v for k, v in named.items() if v is not None}
        index.write_text(json.dumps(values))
    if cut:
        os.truncate(weights, weights.stat().st_size - cut)
    for name, content in {**new, **dict(files)}.items():
        (folder / name).write_bytes(blob(content))
    for name in drop:
        (folder / name).unlink()
    return folder


# --- engines ----------------------------------------------------------------------------------


def manifest(world: World, set: Mapping[str, Any]) -> Any:
    """An engine whose manifest is another, digest included."""

    def change(values: dict[str, Any]) -> None:
        for path, value in set.items():
            put(values, path, value)

    return load_engine(resigned(_copied(world), change), trust=True)


def engine_files(
    world: World,
    files: Any = (),
    change: Any = (),
    tensors: Any = (),
    links: Any = (),
    pipes: Any = (),
    drop: Any = (),
) -> Any:
    """An engine with other files, whose digests are right again."""
    folder = _copied(world)
    for name, edits in dict(change).items():
        (folder / name).write_text(changed((folder / name).read_text(), edits))
    if tensors:
        save_file(edited(load_file(folder / WEIGHTS), tensors), folder / WEIGHTS)
    for name in drop:
        (folder / name).unlink()
    world.write({f"copy/{k}": v for k, v in dict(files).items()})
    for name, target in dict(links).items():
        (folder / name).symlink_to(target)
    for name in pipes:
        os.mkfifo(folder / name)
    return load_engine(resigned(folder, lambda values: None), trust=True)


def _copied(world: World) -> Path:
    return Path(shutil.copytree(world.shared.engine, world.here / "copy"))


def build(world: World, spec: str, **options: Any) -> Any:
    """A build by the reference backend; nothing is left of it."""
    options = {"backend": "reference", "max_seq": 64, "prefill_chunk": 16, **options}
    try:
        return g4ir.build(spec, world.here / "out", **options)
    finally:
        assert not list(world.here.iterdir())


def generate(world: World, prompt: Any, **settings: Any) -> Any:
    return world.shared.loaded.generate(prompt, **settings)


def call(world: World, function: str, args: Any = (), files: Any = (), **named: Any) -> Any:
    """A function by its name, MODULE:NAME, on values, paths in `{here}` and {spec: NAME}."""
    world.write(dict(files))
    module, _, name = function.partition(":")
    here = str(world.here)
    given = [Path(a) if str(a).startswith(here) else a for a in args]
    given = [load_spec(a["spec"]) if isinstance(a, dict) and "spec" in a else a for a in given]
    return getattr(import_module(module), name)(*given, **named)


# --- the command line -------------------------------------------------------------------------


def command(
    world: World, words: list[Any], code: int = 2, files: Any = (), cuda: bool | None = None
) -> str:
    """What a command says, or each of a list; nothing is left where its output would be."""
    world.write(dict(files))
    out = world.here / "out"
    out.mkdir()
    if cuda is not None:
        world.patch.setattr(torch.cuda, "is_available", lambda: cuda)
    said = set()
    for verb, *rest in words if isinstance(words[0], list) else [words]:
        full = [*BUILD, *rest, "--out", str(out / "engine")] if verb == "build" else [verb, *rest]
        said.add(refused(*full, code=code))
    assert len(said) == 1 and not list(out.iterdir()), said
    return said.pop()


def media(world: World, words: list[str]) -> str:
    """`g4ir run` of an engine that takes media, beside their files."""
    return refused("run", _with_media(world), *words)


def _with_media(world: World) -> Path:
    """The engine; commands take the one that is loaded, which saves seconds."""
    world.patch.setattr("g4ir.builder.load.load_engine", lambda *_, **__: world.shared.media)
    world.patch.setattr(Engine, "close", lambda self: None)
    world.patch.chdir(world.shared.files)
    return world.shared.media.path


def line(world: World, line: Any, name: Any = None, engine: str = "engine") -> str:
    """A line of JSON between two that are answered; it gets its error in its place."""
    path = _with_media(world) if engine == "media" else world.shared.engine
    good = b'{"tokens": [2, 5], "max_new_tokens": 1, "id": "x"}\n'
    file = world.here / "in.jsonl"
    file.write_bytes(good + b"\n" + blob(line) + b"\n" + good)
    words = ("--max-new-tokens", "6", "--temperature", "0")
    outcome = command_line("run", path, "--input-jsonl", file, *words)
    first, second, third = map(json.loads, outcome.out.splitlines())
    assert outcome.code == 1 and first["tokens"] and first["tokens"] == third["tokens"]
    assert (second["line"], second["id"]) == (3, name)
    events = [json.loads(x) for x in outcome.err.splitlines() if x.startswith("{")]
    assert events[1] == {"event": "error", **second}  # a slow load has lines of its own
    return str(second["error"])
