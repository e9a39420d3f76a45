"""Draft models in GGUF files: beside their model in one folder, and named by --drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import g4ir
from g4ir.artefact.directory import read_manifest
from g4ir.builder import library
from g4ir.builder.library import find_engine
from g4ir.builder.sources import shipped_variant
from g4ir.engine.speculative import AcceptanceStats
from g4ir.errors import G4Error
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import Spec, diff_specs, load_spec
from g4ir.weights.origin import GgufFile, find_origin, read_folder
from tests.cli_tools import g4ir as command
from tests.configs import short
from tests.gguf_files import all_of, finish, write_drafter, write_gguf
from tests.test_drafter import Pair, copying, pair_of

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
    return write_drafter(path, pair.spec, drafter_tensors(pair), all_of(kind))


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
    write_drafter(swapped, pair.spec, drafter_tensors(pair), plain, names_swapped)
    refused(model, "token .* is .* there and .* in .*give the draft model", drafter=swapped)
    small = pair_of("e2b")
    write_drafter(other, small.spec, drafter_tensors(small), plain)
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
