"""Towers of a GGUF file of their own: tensors as a checkpoint has them, whole engines, and files
that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import yaml

import g4ir
from g4ir.check.logits import verify_engine
from g4ir.errors import G4Error
from g4ir.model.media import KINDS
from g4ir.model.tensors import media_tensors
from g4ir.spec.record import Spec, load_spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.origin import existing_origin, find_origin
from g4ir.weights.random import RandomCheckpoint
from g4ir.weights.write import write_checkpoint
from tests.cli_tools import g4ir as command
from tests.cli_tools import refused
from tests.gguf_files import CASES as NAMES
from tests.gguf_files import bare_file, finish, values_of, write_mmproj, write_values


def with_vision(**changes: bool) -> Spec:
    spec = load_spec("tiny-media")
    return replace(spec, vision=replace(spec.vision, **changes))  # type: ignore[type-var]


CASES = yaml.safe_load(Path(__file__).with_name("gguf_refused.yaml").read_text())


def changed(case: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values.update(case.get("set", {}))


SPECS: dict[str, Callable[[], Spec]] = {
    "tiny-media": lambda: load_spec("tiny-media"),
    "tiny-unified": lambda: load_spec("tiny-unified"),
    "standardised": lambda: with_vision(standardize=True),
}


@cache
def towers_of(spec: Spec) -> dict[str, torch.Tensor]:
    source = RandomCheckpoint(spec, 0, torch.float32)
    return {name: source.tensor(name) for name in media_tensors(spec, KINDS)}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """`opened(folder, spec)`: towers of this folder, beside a text file that tests share."""
    texts = tmp_path_factory.mktemp("texts")

    @cache
    def text(spec: Spec) -> Path:
        return bare_file(texts / f"{len([*texts.iterdir()])}.gguf", spec, kind="F32")

    def run(folder: Path, spec: Spec, kind: str = "F32", **options: Any) -> Checkpoint:
        towers = write_mmproj(folder / "towers.gguf", spec, towers_of(spec), kind, **options)
        return existing_origin(text(spec), towers).open(spec, KINDS, "f32")

    return run


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_tensors_as_a_checkpoint_has_them(
    opened: Any, name: str, kind: str, tmp_path: Path
) -> None:
    """Bit for bit in F32, but for what the converter put through a softplus."""
    spec = SPECS[name]()
    found = opened(tmp_path, spec, kind)
    for bare, want in towers_of(spec).items():
        got = found.tensor(bare)
        assert got.shape == want.shape and got.dtype == torch.float32
        if kind == "F32" and not bare.endswith("per_dim_scale"):
            assert torch.equal(got, want), bare
        else:
            size = want.abs().max().clamp(min=1e-3)
            bound = {"F32": 2e-6, "F16": 2**-11, "Q8_0": 2**-7}[kind]
            assert (got - want).abs().max() <= bound * size, bare


def test_a_whole_engine(tmp_path: Path) -> None:
    spec = load_spec("tiny-media")
    source = RandomCheckpoint(spec, 0, torch.float32)
    folder = write_checkpoint(tmp_path / "hf", spec, source, media=KINDS)
    text, towers = bare_file(tmp_path / "text.gguf", spec, kind="F32"), tmp_path / "towers.gguf"
    write_mmproj(towers, spec, towers_of(spec))
    words = ("build", "--variant", "tiny-media", "--backend", "reference", "--dtype", "float32")
    words = (*words, "--checkpoint", text, "--max-seq", "640", "--out", tmp_path / "engine")
    assert "\nmedia " not in command(*words, "--dry-run").out
    outcome = command(*words, "--mmproj", towers)
    assert outcome.code == 0, outcome.err
    engine = g4ir.load_engine(tmp_path / "engine")
    assert engine.media.kinds == KINDS
    want = g4ir.build(
        spec, tmp_path / "own", checkpoint=folder, backend="reference", dtype="float32", max_seq=640
    )
    assert engine.program == want.program
    for name in want.program.params():
        got, held = engine.runtime.source.tensor(name), want.runtime.source.tensor(name)
        torch.testing.assert_close(got, held, rtol=1e-6, atol=1e-6, msg=name)
    assert verify_engine(engine).ok
    some = command(*words[:-1], tmp_path / "image", "--mmproj", towers, "--media", "image")
    assert some.code == 0 and g4ir.load_engine(tmp_path / "image").media.kinds == ("image",)


BOUNDS = tuple(NAMES["bounds"])


def ollama_name(name: str) -> str:
    if name.startswith("a.blk."):
        *layer, own, end = name.split(".")
        return ".".join((*layer, NAMES["ollama_layer"].get(own, own), end))
    return str(NAMES["ollama"].get(name, name))


def whole_file(
    path: Path,
    spec: Spec,
    change: Callable[[dict[str, Any]], Any] = lambda values: None,
    edit: Callable[[dict[str, Any]], Any] = lambda tensors: None,
) -> Path:
    """As ollama's converter writes a model: one file, its own names, all bounds once more."""
    text = gguf.GGUFReader(bare_file(path.with_suffix(".text"), spec, kind="F32"))
    towers = gguf.GGUFReader(write_mmproj(path.with_suffix(".towers"), spec, towers_of(spec)))
    vision, audio = spec.vision, spec.audio
    assert vision and audio
    values = values_of(text) | {
        "tokenizer.ggml.model": "llama",
        "gemma4.vision.num_channels": 3,
        "gemma4.audio.feed_forward_length": 4 * audio.hidden_size,
    }
    for part, keys in NAMES["said"].items():
        values[f"gemma4.{part}.attention.layer_norm_epsilon"] = 1e-6
        values |= {f"gemma4.{part}.{k}": getattr(getattr(spec, part), f) for k, f in keys.items()}
    change(values)
    writer = gguf.GGUFWriter(path, "gemma4")
    write_values(writer, values)
    tensors = {t.name: t.data for t in text.tensors}
    tensors |= {ollama_name(t.name): t.data for t in towers.tensors}
    if vision.use_clipped_linears:
        parts = product(range(vision.num_hidden_layers), NAMES["linears"], BOUNDS)
        bounds = [float(tensors[f"v.blk.{i}.{n}.{b}"][0]) for i, n, b in parts]
        tensors["v.clamp_data"] = np.array([*bounds, *[0.0] * 4], np.float32)
    edit(tensors)
    for name, data in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.F32)
    finish(writer)
    return path


#: the packed bounds of clipped linears alone
PACKED: dict[str, Any] = {
    "edit": lambda tensors: [
        tensors.pop(n) for n in [*tensors] if n.startswith("v.") and n.endswith(BOUNDS)
    ]
}


@pytest.mark.parametrize("own_bounds", [True, False])
def test_one_file_of_text_and_towers(tmp_path: Path, own_bounds: bool) -> None:
    spec = with_vision(use_clipped_linears=True)

    file = whole_file(tmp_path / "a.gguf", spec, **({} if own_bounds else PACKED))
    origin = find_origin(file)
    assert origin.spec().text == spec.text and "tokenizer.json" in origin.side_files()
    found = origin.open(spec, KINDS, "f32")
    want = existing_origin(file.with_suffix(".text"), file.with_suffix(".towers"))
    for bare in media_tensors(spec, KINDS):
        assert torch.equal(found.tensor(bare), want.open(spec, KINDS, "f32").tensor(bare)), bare
    assert [p for p, _ in found.files] == [file] and not found.ignored
    alone = origin.open(spec, (), "f32")
    assert set(alone.ignored) >= {"v.patch_embd.weight", "mm.a.fc.weight"}


def test_commands_of_one_file(tmp_path: Path) -> None:
    file = whole_file(tmp_path / "a.gguf", load_spec("tiny-media"))
    words = ("build", "--backend", "reference", "--checkpoint", file, "--max-seq", "640")
    words = (*words, "--dtype", "float32", "--link-weights", "--out", tmp_path / "e")
    text = command(*words, "--dry-run")
    assert text.code == 0 and "give --variant or --spec too" in text.err
    assert "give --variant or --spec too" in refused(*words, "--media", "image")
    named = (*words, "--variant", "tiny-media")
    assert "holds its own towers; leave the option out" in refused(
        *(word for word in named if word != "--link-weights"), "--mmproj", file
    )
    made = command(*named)
    assert made.code == 0, made.err
    engine = g4ir.load_engine(tmp_path / "e")
    assert engine.media.kinds == KINDS and verify_engine(engine).ok


def test_bounds_of_linears_that_are_not_clipped(tmp_path: Path) -> None:
    spec, plain = (with_vision(use_clipped_linears=clipped) for clipped in (True, False))
    for bounds in (True, False):
        file = whole_file(tmp_path / f"{bounds}.gguf", spec, **({} if bounds else PACKED))
        name = "v.blk.0.attn_q.input_min" if bounds else "v.clamp_data"
        with pytest.raises(G4Error, match=rf"'{name}': not in the spec"):
            find_origin(file).open(plain, KINDS, "f32")


@pytest.mark.parametrize("name", CASES["whole"])
def test_refused_in_one_file(name: str, tmp_path: Path) -> None:
    case = CASES["whole"][name]

    def edit(tensors: dict[str, Any]) -> None:
        for left in case.get("left_out", ()):
            del tensors[left]
        for tensor, value in case.get("first", {}).items():
            tensors[tensor][0] = value
        made = case.get("tensors", {}).items()
        tensors.update({tensor: np.array(values, np.float32) for tensor, values in made})

    spec = with_vision(use_clipped_linears=True)
    file = whole_file(tmp_path / "a.gguf", spec, changed(case), edit)
    with pytest.raises(G4Error) as e:
        find_origin(file).open(spec, KINDS, "f32")
    assert case["says"] in str(e.value) and "a.gguf" in str(e.value), e.value


@pytest.mark.parametrize("name", CASES["towers"])
def test_refused(opened: Any, name: str, tmp_path: Path) -> None:
    case = CASES["towers"][name]
    given = {"change": changed(case), "left_out": case.get("left_out", ())}
    with pytest.raises(G4Error) as e:
        opened(tmp_path, load_spec("tiny-media"), **given)
    assert case["says"] in str(e.value) and "towers.gguf" in str(e.value)
    assert "\n" not in str(e.value) or "fix: take the mmproj file" in str(e.value)


def test_options(tmp_path: Path) -> None:
    spec = load_spec("tiny-media")
    text, towers = bare_file(tmp_path / "text.gguf", spec, kind="F32"), tmp_path / "towers.gguf"
    write_mmproj(towers, spec, towers_of(spec))
    words = ("build", "--backend", "reference", "--out", tmp_path / "e", "--mmproj", towers)
    named = (*words, "--variant", "tiny-media")
    assert "with --variant or --spec" in refused(*words, "--checkpoint", text)
    assert "--checkpoint FILE.gguf" in refused(*named, "--random-weights", "0")
    assert "another" in refused(*named, "--checkpoint", text, "--link-weights")
    folder = write_checkpoint(tmp_path / "hf", spec, RandomCheckpoint(spec, 0, torch.float32))
    assert "has its own towers" in refused(*named, "--checkpoint", folder)
    absent = (*named[:-3], tmp_path / "absent.gguf", *named[-2:])
    assert "absent.gguf: no such file" in refused(*absent, "--checkpoint", text)
    other = (*named[:-3], text, *named[-2:])
    assert "general.architecture: expected 'clip'" in refused(*other, "--checkpoint", text)
