"""Towers of a GGUF file of their own: tensors as a checkpoint has them, whole engines, and files
that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.check.logits import verify_engine
from g4ir.errors import G4Error
from g4ir.model.media import KINDS
from g4ir.model.tensors import media_tensors, text_tensors
from g4ir.spec.record import Spec, load_spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.origin import existing_origin
from g4ir.weights.random import RandomCheckpoint
from g4ir.weights.write import write_checkpoint
from tests.cli_tools import g4ir as command
from tests.cli_tools import refused
from tests.gguf_files import all_of, write_gguf, write_mmproj


def standardised() -> Spec:
    spec = load_spec("tiny-media")
    return replace(spec, vision=replace(spec.vision, standardize=True))  # type: ignore[type-var]


SPECS: dict[str, Callable[[], Spec]] = {
    "tiny-media": lambda: load_spec("tiny-media"),
    "tiny-unified": lambda: load_spec("tiny-unified"),
    "standardised": standardised,
}


@cache
def towers_of(spec: Spec) -> dict[str, torch.Tensor]:
    source = RandomCheckpoint(spec, 0, torch.float32)
    return {name: source.tensor(name) for name in media_tensors(spec, KINDS)}


def text_file(path: Path, spec: Spec) -> Path:
    source = RandomCheckpoint(spec, 0, torch.float32)
    write_gguf(path, spec, {n: source.tensor(n) for n in text_tensors(spec)}, all_of("F32"))
    return path


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """`opened(folder, spec)`: towers of this folder, beside a text file that tests share."""
    texts = tmp_path_factory.mktemp("texts")

    @cache
    def text(spec: Spec) -> Path:
        return text_file(texts / f"{len([*texts.iterdir()])}.gguf", spec)

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
    """From two files: the towers of the Hugging Face checkpoint, through the command line."""
    spec = load_spec("tiny-media")
    source = RandomCheckpoint(spec, 0, torch.float32)
    folder = write_checkpoint(tmp_path / "hf", spec, source, media=KINDS)
    text, towers = text_file(tmp_path / "text.gguf", spec), tmp_path / "towers.gguf"
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


# --- refusals ----------------------------------------------------------------------------------


def of(key: str, value: Any) -> dict[str, Any]:
    return {"change": lambda values: values.update({key: value})}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no towers": (of("general.architecture", "gemma4"), "general.architecture: expected 'clip'"),
    "another projector": (
        of("clip.vision.projector_type", "gemma3"),
        "clip.vision.projector_type: expected 'gemma4v', found 'gemma3'; give the mmproj file",
    ),
    "heads": (of("clip.audio.attention.head_count", 7), "clip.audio.attention.head_count: expect"),
    "other pixels": (of("clip.vision.image_mean", [0.5] * 3), "clip.vision.image_mean: expected"),
    "pixels in words": (of("clip.vision.image_std", "one"), "clip.vision.image_std: expected"),
    "missing": ({"left_out": ["v.blk.1.attn_q.weight"]}, "missing: expected shape [32, 32]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(opened: Any, case: str, tmp_path: Path) -> None:
    options, words = REFUSED[case]
    with pytest.raises(G4Error) as e:
        opened(tmp_path, load_spec("tiny-media"), **options)
    assert words in str(e.value) and "towers.gguf" in str(e.value)
    assert "\n" not in str(e.value) or "fix: take the mmproj file" in str(e.value)


def test_another_tensor_and_another_shape(opened: Any, tmp_path: Path) -> None:
    spec = load_spec("tiny-media")
    assert spec.vision
    other = replace(spec, vision=replace(spec.vision, intermediate_size=64, num_hidden_layers=3))
    towers = write_mmproj(tmp_path / "towers.gguf", other, towers_of(other))
    with pytest.raises(G4Error) as e:
        existing_origin(text_file(tmp_path / "text.gguf", spec), towers).open(spec, KINDS, "f32")
    assert "'v.blk.2.ln1.weight': not in the spec" in str(e.value)
    opened(tmp_path, spec)  # a file of its own is fine


def test_options(tmp_path: Path) -> None:
    spec = load_spec("tiny-media")
    text, towers = text_file(tmp_path / "text.gguf", spec), tmp_path / "towers.gguf"
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
