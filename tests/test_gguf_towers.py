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
from g4ir.model.tensors import media_tensors
from g4ir.spec.record import Spec, load_spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.origin import existing_origin
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cases import read_table
from tests.cli_tools import g4ir as command
from tests.cli_tools import refused
from tests.gguf_files import bare_file, write_mmproj


def with_vision(**changes: bool) -> Spec:
    spec = load_spec("tiny-media")
    return replace(spec, vision=replace(spec.vision, **changes))  # type: ignore[type-var]


CASES = read_table("gguf_refused.yaml")


def changed(case: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values.update(case.get("set", {}))


SPECS: dict[str, Callable[[], Spec]] = {
    "tiny-media": lambda: load_spec("tiny-media"),
    "tiny-unified": lambda: load_spec("tiny-unified"),
    "standardised": lambda: with_vision(standardize=True),
}


@cache
def towers_of(spec: Spec) -> dict[str, torch.Tensor]:
    source = random_weights(spec, 0, torch.float32)
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
def test_tensors_are_the_checkpoints(opened: Any, name: str, kind: str, tmp_path: Path) -> None:
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
    source = random_weights(spec, 0, torch.float32)
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
    options = {"backend": "reference", "dtype": "float32", "max_seq": 640}
    want = g4ir.build(spec, tmp_path / "own", checkpoint=folder, **options)
    assert engine.program == want.program
    for name in want.program.params():
        got, held = engine.runtime.source.tensor(name), want.runtime.source.tensor(name)
        torch.testing.assert_close(got, held, rtol=1e-6, atol=1e-6, msg=name)
    assert verify_engine(engine).ok
    some = command(*words[:-1], tmp_path / "image", "--mmproj", towers, "--media", "image")
    assert some.code == 0 and g4ir.load_engine(tmp_path / "image").media.kinds == ("image",)


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
    folder = write_checkpoint(tmp_path / "hf", spec, random_weights(spec, 0, torch.float32))
    assert "has its own towers" in refused(*named, "--checkpoint", folder)
    absent = (*named[:-3], tmp_path / "absent.gguf", *named[-2:])
    assert "absent.gguf: no such file" in refused(*absent, "--checkpoint", text)
    other = (*named[:-3], text, *named[-2:])
    assert "general.architecture: expected 'clip'" in refused(*other, "--checkpoint", text)
