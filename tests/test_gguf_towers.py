"""Towers and draft models in GGUF files of their own: tensors as a checkpoint has them, whole
engines, and files that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import g4ir
from g4ir import G4Error, Spec, diff_specs, load_spec
from g4ir.artefact.directory import read_manifest
from g4ir.builder import library
from g4ir.builder.library import find_engine
from g4ir.builder.sources import shipped_variant
from g4ir.check.logits import verify_engine
from g4ir.engine.speculative import AcceptanceStats
from g4ir.model.media import KINDS
from g4ir.model.tensors import media_tensors
from g4ir.plan.options import BuildOptions
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.origin import GgufFile, existing_origin, find_origin, read_folder
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cases import read_table
from tests.cli_tools import g4ir as command
from tests.cli_tools import refused
from tests.configs import short
from tests.gguf_files import all_of, bare_file, finish, write_gguf, write_mmproj
from tests.test_drafter import Pair, copying, pair_of


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


LIMITS: dict[str, Any] = {"max_seq": 96, "prefill_chunk": 16, "backend": "reference"}


def drafter_tensors(pair: Pair) -> dict[str, torch.Tensor]:
    """The assistant's tensors as a checkpoint of its spec names them, without clusters."""
    state = {k.removeprefix("model."): v for k, v in pair.assistant.state_dict().items()}
    names = {n: f"drafter.{n}" if "projection" in n else n for n in state}
    left_out = ("lm_head", "masked_embedding")
    return {names[n]: t for n, t in state.items() if not n.startswith(left_out)}


def write_folder(folder: Path, pair: Pair, kind: str = "F32") -> dict[str, torch.Tensor]:
    """A model and its drafter, as people have them; returns the drafter's weights."""
    folder.mkdir()
    tensors = {n.removeprefix("model."): t for n, t in pair.oracle.tensors.items()}
    write_gguf(folder / "model-F32.gguf", pair.oracle.spec, tensors, all_of("F32"))
    path = folder / f"model-assistant-{kind}.gguf"
    return write_gguf(path, pair.spec, drafter_tensors(pair), all_of(kind))


@pytest.mark.parametrize("name", ["e2b", "31b"])
def test_files_say_what_checkpoints_do(tmp_path: Path, name: str) -> None:
    """But for clusters, which the converter leaves out."""
    pair = pair_of(name)
    meant = write_folder(tmp_path / "m", pair, "Q8_0")
    origin = find_origin(tmp_path / "m" / "model-assistant-Q8_0.gguf")
    spec = origin.spec()
    assert spec.drafter and spec.drafter.centroids is None and pair.spec.drafter
    plain = replace(pair.spec, drafter=replace(pair.spec.drafter, centroids=None))
    rows = {key for key, *_ in diff_specs(spec, plain)}
    assert not {r for r in rows if r.startswith(("text.", "drafter.")) and "k_eq_v" not in r}
    weights = origin.open(spec, (), "f32")
    assert meant.keys() == weights.weights.keys()
    for bare, t in meant.items():
        assert torch.equal(weights.tensor(bare), t)


@pytest.mark.parametrize("kind", short("Q8_0", of=("F32", "Q8_0")))
def test_a_folder_drafts(tmp_path: Path, kind: str) -> None:
    """The text is that without drafts, and drafts are accepted."""
    write_folder(tmp_path / "m", copying("31b", 512), kind)
    engine = g4ir.load(tmp_path / "m", **LIMITS)
    prompt, tally = [300, 301, 302, 303], AcceptanceStats()
    text = engine.generate(prompt, 24, draft="mtp", tally=tally)
    assert text == engine.generate(prompt, 24)
    assert tally.to_dict()["tokens_per_round"] > 1.5
    engine.close()
    beside = BuildOptions(**LIMITS, drafter="default")
    named = find_engine(tmp_path / "m" / "model-F32.gguf", beside)
    assert read_manifest(named).config.drafter is not None
    drafted = ("run", tmp_path / "m", "--backend", "reference", "--max-seq", 96, "--json")
    tokens = ("--tokens", "300,301,302,303", "--max-new-tokens", 24)
    made, plain = command(*drafted, *tokens), command(*drafted, *tokens, "--draft", "none")
    assert (made.code, plain.code) == (0, 0), made.err + plain.err
    assert '"drafts"' in made.err and '"drafts"' not in plain.err
    assert made.out == plain.out


def names_swapped(values: dict[str, Any]) -> None:
    words = values["tokenizer.ggml.tokens"]
    words[-1], words[-2] = words[-2], words[-1]


def test_what_is_refused(tmp_path: Path) -> None:
    pair, folder = pair_of("31b"), tmp_path / "m"
    write_folder(folder, pair)
    model, drafter = sorted(folder.iterdir(), key=lambda p: "assistant" in p.name)

    def refused(path: Path, says: str, **options: Any) -> None:
        with pytest.raises(G4Error, match=says):
            find_engine(path, BuildOptions(**LIMITS, **options))

    refused(drafter, "is a drafter, which runs with its model alone")
    refused(model, "spec model-F32 is no drafter", drafter=model)
    plain, swapped, other = all_of("F32"), tmp_path / "s.gguf", tmp_path / "o.gguf"
    write_gguf(swapped, pair.spec, drafter_tensors(pair), plain, change=names_swapped)
    refused(model, "token .* is .* there and .* in .*give the draft model", drafter=swapped)
    small = pair_of("e2b")
    write_gguf(other, small.spec, drafter_tensors(small), plain)
    refused(model, "o is no drafter of model-F32; give the one of its own:\n", drafter=other)
    (folder / "second-assistant.gguf").write_bytes(drafter.read_bytes())
    both = "model-assistant-F32.gguf and second-assistant.gguf are both a draft model"
    refused(folder, both)
    refused(model, both, drafter="default")
    (folder / "second-assistant.gguf").write_bytes(drafter.read_bytes()[:-64])
    refused(folder, "second-assistant.gguf")


def test_towers_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They need a shipped variant of the same text model, as no file says how towers compute."""
    write_folder(tmp_path / "m", pair_of("31b"))
    finish(gguf.GGUFWriter(tmp_path / "m" / "mmproj-F16.gguf", "clip"))
    folder = read_folder(tmp_path / "m")
    assert folder
    spec, options = library._of_folder(folder, BuildOptions())
    assert spec is None and options.mmproj is None and "mmproj-F16.gguf: left out" in caplog.text
    monkeypatch.setattr(library, "shipped_variant", lambda origin: load_spec("31b"))
    spec, options = library._of_folder(folder, BuildOptions())
    assert spec == load_spec("31b") and Path(str(options.mmproj)).name == "mmproj-F16.gguf"
    assert library._of_folder(folder, BuildOptions(media="none"))[0] is None


@pytest.mark.parametrize("name", ["e2b", "e4b", "12b", "26b-a4b", "31b"])
def test_the_variant_of_a_text_model(name: str) -> None:
    spec = load_spec(name)
    stated = replace(spec, name="file", hub=None, vision=None, audio=None)
    assert shipped_variant(Stated(stated)) == spec  # type: ignore[arg-type]


@dataclass(frozen=True)
class Stated:
    """What a GGUF file of a text model says."""

    stated: Spec
    spec_only = GgufFile.spec_only

    def spec(self) -> Spec:
        return self.stated
