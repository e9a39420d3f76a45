"""Exported models: read by transformers and by g4ir, equal to the model that they came from.
Towers and draft models in GGUF files of their own: tensors as a checkpoint has them, whole
engines, and files that are refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

import g4ir
from g4ir import G4Error, Spec, diff_specs, load_spec
from g4ir.artefact.directory import read_manifest
from g4ir.builder import library
from g4ir.builder.export import engine_weights
from g4ir.builder.library import find_engine
from g4ir.builder.sources import shipped_variant
from g4ir.check.logits import verify_engine
from g4ir.engine.prompts import Defaults, read_defaults
from g4ir.engine.speculative import AcceptanceStats
from g4ir.errors import EngineError, InputError
from g4ir.model.media import KINDS
from g4ir.model.tensors import media_tensors
from g4ir.plan.options import BuildOptions
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.gguf import write as gguf_write
from g4ir.weights.origin import GgufFile, existing_origin, find_origin, read_folder
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cases import TABLES, read_table
from tests.cli_tools import g4ir as command
from tests.cli_tools import refused, text_checkpoint
from tests.configs import VARIANTS, short
from tests.gguf_files import all_of, bare_file, finish, write_gguf, write_mmproj
from tests.oracle import find_oracle, logits_of_directory, save_checkpoint
from tests.test_adapter import merged, of_text, write_adapter
from tests.test_drafter import Pair, copying, pair_of

F32 = torch.float32
DTYPES = {"F32": F32, "F16": torch.float16, "BF16": torch.bfloat16}
LIMITS: dict[str, Any] = {"backend": "reference", "max_seq": 64, "prefill_chunk": 64}
FULL = pytest.mark.full
MEDIA = load_spec("tiny-media")
MODELS = ("tiny-dense", "tiny-ple", "tiny-moe", "tiny-gemma3")


def weight_digests(engine: Path) -> dict[str, str]:
    files = json.loads((engine / "manifest.json").read_text())["files"]
    return {name: f["sha256"] for name, f in files.items() if name.endswith(".safetensors")}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same(name: str, tmp_path: Path) -> None:
    """From the checkpoint and from an engine of it, bit for bit; an engine of the export has the
    same weights."""
    oracle = find_oracle(load_spec(name))
    folder = save_checkpoint(oracle, tmp_path / "c")
    built = {**LIMITS, "dtype": "float32"}
    g4ir.build(None, tmp_path / "e", checkpoint=folder, **built)
    tokens = oracle.tokens[:1, :40]
    want = oracle.run(tokens)
    for source in (folder, tmp_path / "e"):
        out = g4ir.export(source, tmp_path / f"of-{source.name}")
        off = 0 if name != "tiny-gemma3" else 1e-5  # engines have 1 + w of norms
        torch.testing.assert_close(logits_of_directory(out, tokens), want, rtol=off, atol=off)
    g4ir.build(None, tmp_path / "again", checkpoint=out, **built)
    assert weight_digests(tmp_path / "again") == weight_digests(tmp_path / "e")


@pytest.mark.covering
@pytest.mark.parametrize("quant", ["int8", pytest.param("int4", marks=FULL), "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_codes(name: str, quant: str, tmp_path: Path) -> None:
    """What they mean: transformers computes what the engine does, and so does an engine of them."""
    kept = {**LIMITS, "dtype": "float32", "all_logits": True}
    engine = g4ir.build(name, tmp_path / "e", random_weights=0, quant=quant, **kept)
    tokens = torch.arange(3, 43)[None]
    want = engine.session().prefill(tokens, all_logits=True)
    dense = g4ir.export(engine, tmp_path / "dense")
    torch.testing.assert_close(logits_of_directory(dense, tokens), want, rtol=1e-4, atol=1e-4)
    again = g4ir.build(None, tmp_path / "again", checkpoint=dense, **kept)
    assert torch.equal(again.session().prefill(tokens, all_logits=True), want)


@pytest.mark.parametrize("name", ["tiny-media", "tiny-unified"])
def test_towers(name: str, tmp_path: Path) -> None:
    spec = load_spec(name)
    source = random_weights(spec, 1, torch.bfloat16)
    folder = write_checkpoint(tmp_path / "c", spec, source, media=KINDS)
    whole = load_file(folder / "model.safetensors")
    out = g4ir.export(folder, tmp_path / "all")
    found = load_file(out / "model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(t, whole[name]) for name, t in found.items())
    tokens = torch.arange(3, 23)[None]
    text = g4ir.export(folder, tmp_path / "text", media="none")
    assert "vision_config" not in json.loads((text / "config.json").read_text())
    assert torch.equal(logits_of_directory(text, tokens), logits_of_directory(out, tokens))


def test_an_engine_that_no_longer_has_a_tower(tmp_path: Path) -> None:
    """One holds what was made of a weight of the audio tower, not the weight."""
    source = random_weights(MEDIA, 1, torch.bfloat16)
    folder = write_checkpoint(tmp_path / "c", MEDIA, source, media=KINDS)
    g4ir.build(None, tmp_path / "e", checkpoint=folder, **LIMITS)
    with pytest.raises(EngineError, match=r"no longer holds %audio.*give --checkpoint DIR"):
        g4ir.export(tmp_path / "e", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    g4ir.export(tmp_path / "e", tmp_path / "out", media="image,video")
    whole = Checkpoint.open(tmp_path / "out", replace(MEDIA, audio=None), KINDS[:2])
    assert all(
        torch.equal(whole.tensor(n), source.tensor(n).to(whole.dtype)) for n in whole.weights
    )
    assert any(n.startswith("vision.") for n in whole.weights)


def test_adapters_are_merged(tmp_path: Path) -> None:
    spec = load_spec("tiny-dense")
    folder = write_checkpoint(tmp_path / "c", spec, random_weights(spec, 1, F32))
    adapter = write_adapter(tmp_path / "a", spec, of_text())
    out = g4ir.export(folder, tmp_path / "out", adapter=f"{adapter}=0.5", dtype="float32")
    want, got = merged(folder, spec, f"{adapter}=0.5"), Checkpoint.open(out, spec)
    assert all(torch.equal(got.tensor(name), want.tensor(name)) for name in want.weights)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards with their index, and what lies beside the weights; into an empty directory."""
    monkeypatch.setattr("g4ir.weights.tensorfile.SHARD_BYTES", 100_000)
    folder, out = text_checkpoint(tmp_path / "c"), tmp_path / "out"
    out.mkdir()
    outcome = command("export", folder, "--out", out, "--dtype", "float16", "--json")
    assert outcome.code == 0 and json.loads(outcome.out) == {"path": str(out), "format": "hf"}
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 3 and shards[-1].name.endswith(f"-of-{len(shards):05}.safetensors")
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    side = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    assert all((out / name).read_bytes() == (folder / name).read_bytes() for name in side)
    assert Checkpoint.open(out, load_spec("tiny-ple")).dtype == torch.float16
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert "the current directory cannot be replaced" in refused("export", folder, "--out", ".")
    below = ("--out", tmp_path / "file" / "x.gguf", "--format", "gguf")
    assert "is no directory" in refused("export", folder, *below)


def gguf_source(folder: Path, name: str, **given: Any) -> tuple[Path, Checkpoint]:
    """A GGUF file as converters write it, with a vocabulary, and its checkpoint."""
    file = bare_file(folder / "in.gguf", load_spec(name), **given)
    origin = find_origin(file)
    return file, origin.open(origin.spec(), (), "f32")


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("name", MODELS)
def test_gguf(name: str, kind: str, tmp_path: Path) -> None:
    """Metadata, vocabulary and weights, as we and the library of the format read them."""
    given, source = gguf_source(tmp_path, name)
    file = g4ir.export(given, tmp_path / "out", format="gguf", dtype=kind.lower())
    assert file == tmp_path / "out" / f"in-{kind}.gguf"
    first, again = find_origin(given), find_origin(file)
    assert not diff_specs(again.spec(), replace(first.spec(), name=again.spec().name))
    assert again.side_files() == first.side_files()
    opened, dtype = again.open(first.spec(), (), "f32"), DTYPES[kind]
    for bare in source.weights:
        want = source.tensor(bare).float()
        want = want.to(dtype).float() if want.dim() > 1 and "router" not in bare else want
        assert torch.equal(opened.tensor(bare).float(), want), bare
    theirs, ours = (gguf.GGUFReader(x) for x in (given, file))
    assert {t.name for t in ours.tensors} == {t.name for t in theirs.tensors}
    wide = {t.tensor_type.name for t in ours.tensors if len(t.shape) > 1 and "inp.w" not in t.name}
    assert wide == {kind}


def test_gguf_metadata_are_checked_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weights are written; the first tensor of Gemma 3 is its token table."""
    heads: list[int] = []
    check = gguf_write._check

    def checked(name: str, spec: Any, head: list[Any], size: int) -> None:
        heads.append(len(head))
        check(name, spec, head, size)

    monkeypatch.setattr(gguf_write, "_check", checked)
    given, _ = gguf_source(tmp_path, "tiny-gemma3")
    g4ir.export(given, tmp_path / "out", format="gguf")
    assert heads == [1]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf_blocks(kind: str, tmp_path: Path) -> None:
    """Codes of a file are kept; values are rounded to them, by steps of their groups at most."""
    given, source = gguf_source(tmp_path, "tiny-moe", kind=kind)
    whole = g4ir.export(given, tmp_path / "same.gguf", format="gguf", dtype=kind)
    dense = g4ir.export(given, tmp_path / "dense", dtype="float32")
    rounded = g4ir.export(dense, tmp_path / "rounded.gguf", format="gguf", dtype=kind)
    spec = find_origin(given).spec()
    same, near = (find_origin(x).open(spec, (), "f32") for x in (whole, rounded))
    assert len(source.forms) > 20
    for bare, scheme in source.forms.items():
        want = source.tensor(bare)
        if same.forms[bare] == scheme:
            assert torch.equal(same.tensor(bare), want), bare
        else:  # of tables, which have 8 bits at least
            assert (kind, bare) == ("Q4_0", "embed_tokens.weight")
        groups = want.unflatten(-1, (-1, 32))
        step = groups.abs().amax(-1, keepdim=True) / (127 if kind == "Q8_0" else 7)
        far = (near.tensor(bare).unflatten(-1, (-1, 32)) - groups).abs()
        assert (far < 0.52 * step).all(), bare


def exported(folder: Path, settings: Any) -> tuple[Defaults, Defaults]:
    """Defaults of a checkpoint with a generation_config.json, and of its GGUF file."""
    (folder / "generation_config.json").write_text(json.dumps(settings))
    file = folder.parent / "out.gguf"
    file.unlink(missing_ok=True)
    g4ir.export(folder, file, format="gguf", dtype="Q8_0")
    raw = find_origin(file).side_files()["generation_config.json"]
    return read_defaults(folder / "generation_config.json", 512), read_defaults(file, 512, raw)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("text") / "c")


SHARES = st.sampled_from([0.05, 0.3, 0.95, 1])
#: those that a file has keys for
SETTINGS = st.fixed_dictionaries(
    {
        "eos_token_id": st.one_of(
            st.just(107), st.lists(st.integers(0, 511), min_size=1, max_size=6)
        )
    },
    optional={
        "do_sample": st.booleans(),
        "temperature": st.sampled_from([0.1, 0.7, 1, 1.5]),
        "top_k": st.sampled_from([0, 1, 64, 511]),
        "top_p": SHARES,
        "min_p": SHARES,
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "suppress_tokens": st.one_of(st.just(7), st.lists(st.integers(0, 600), max_size=3)),
        "general.sampling.mirostat": st.just(2),
    },
)


@hypothesis.settings(max_examples=25)
@hypothesis.given(settings=SETTINGS)
def test_defaults_in_gguf(folder: Path, settings: Any) -> None:
    """An engine of the file draws as one of the checkpoint; nothing is said to be lost."""
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("g4ir.builder.export.log.warning", lambda text, *args: said.append(text))
        want, got = exported(folder, settings)
    assert {*(got.stop or ())} == {*(want.stop or ()), 1}  # <eos>, by its name
    assert {*got.suppress} == {*want.suppress} and got.unused == want.unused
    assert got.sampling == want.sampling
    assert bool(said) == (1 not in (want.stop or ()))


LOST = TABLES["export"]["lost"]


@pytest.mark.parametrize("key", LOST)
def test_defaults_without_gguf_key(
    folder: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    exported(folder, {"do_sample": True, "eos_token_id": [1, 17, 5, 498, 30, 31], key: LOST[key]})
    (message,) = caplog.messages
    assert "out.gguf: GGUF cannot express these generation defaults" in message
    assert f"{key} " in message and message.count("(in the file: ") == 1


@pytest.mark.parametrize("name", ["merges", "added_tokens"])
def test_a_tokenizer_without(name: str, tmp_path: Path) -> None:
    """Merges or added tokens: the file has none, and is read as such."""

    folder = text_checkpoint(tmp_path / "c")
    whole = json.loads((folder / "tokenizer.json").read_text())
    (whole["model"] if name == "merges" else whole)[name] = []
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    file = g4ir.export(folder, tmp_path / "out.gguf", format="gguf")
    got = Tokenizer.from_str(find_origin(file).side_files()["tokenizer.json"].decode())
    want = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "ab a ab é"
    assert got.encode(text, add_special_tokens=False).ids == want.encode(text).ids
    g4ir.build(None, tmp_path / "e", checkpoint=file, **LIMITS)


@pytest.mark.parametrize("name, text, says", TABLES["export"]["side files"])
def test_wrong_side_files(name: str, text: str, says: str, tmp_path: Path) -> None:
    folder = text_checkpoint(tmp_path / "c")
    (folder / name).write_text(text)
    with pytest.raises(G4Error, match=rf"{name}:? {says}"):
        g4ir.export(folder, tmp_path / "out.gguf", format="gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", ["out", "out.gguf"])
def test_a_full_disk(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = text_checkpoint(tmp_path / "c")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"are to be written, and 1.00 KiB are free; make room"):
        g4ir.export(folder, tmp_path / name, format="hf" if name == "out" else "gguf")
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
def test_a_sharded_engine_in_codes(name: str, tmp_path: Path) -> None:
    """Ranks have scales of their own for parts of the same rows: these weights are dequantised."""
    built = {**LIMITS, "random_weights": 0, "quant": "int8", "dtype": "float32"}
    g4ir.build(name, tmp_path / "e", tp=2, **built)
    spec = load_spec(name)
    want = random_weights(spec, 0, F32)
    file = g4ir.export(tmp_path / "e", tmp_path / "out.gguf", format="gguf", dtype="Q8_0")
    opened = find_origin(file).open(spec, (), "f32")
    for bare in opened.weights:
        value, made = want.tensor(bare).float(), opened.tensor(bare).float()
        assert (made - value).norm() <= 0.02 * value.norm(), bare


@pytest.mark.parametrize(
    "backend, quant, kind",
    [("reference", "int4", "Q4_0"), ("reference", "", "Q8_0"), ("onnx", "", "Q8_0")],
)
def test_an_engine_in_codes_as_gguf(backend: str, quant: str, kind: str, tmp_path: Path) -> None:
    """Those of 4 bits are written as they are; those of 5 in 8, and are in 8 where others of one
    product are."""
    recipe = tmp_path / "recipe.yaml"
    beside = {"tensors": ["L1.attn.wk"], "form": "int8", "group": 32, "scale": "f16"}
    rule = {"tensors": ["L0.mlp.w_*", "L1.attn.wq"], "form": "int5"}
    recipe.write_text(json.dumps({"rules": [rule, beside]}))
    kept = {**LIMITS, "dtype": "float32", "random_weights": 0, "backend": backend}
    engine = g4ir.build("tiny-moe", tmp_path / "e", quant=quant or recipe, **kept)
    held = engine_weights(engine)
    assert any(name.startswith("L1.attn.wqk") for name in engine.program.params())
    file = g4ir.export(engine, tmp_path / "c.gguf", format="gguf", dtype=kind)
    opened = find_origin(file).open(engine.spec, (), "f32")
    assert len(held.forms) > 1
    in_groups = [name for name, scheme in held.forms.items() if scheme.group]
    assert all(torch.equal(opened.tensor(n), held.tensor(n)) for n in in_groups)


CASES = read_table("gguf_refused.yaml")


def changed(case: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values.update(case.get("set", {}))


SPECS: dict[str, Spec] = {
    "tiny-media": MEDIA,
    "tiny-unified": load_spec("tiny-unified"),
    "standardised": replace(MEDIA, vision=replace(MEDIA.vision, standardize=True)),  # type: ignore[type-var]
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
    spec = SPECS[name]
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
    source = random_weights(MEDIA, 0, torch.float32)
    folder = write_checkpoint(tmp_path / "hf", MEDIA, source, media=KINDS)
    text, towers = bare_file(tmp_path / "text.gguf", MEDIA, kind="F32"), tmp_path / "towers.gguf"
    write_mmproj(towers, MEDIA, towers_of(MEDIA))
    words = ("build", "--variant", "tiny-media", "--backend", "reference", "--dtype", "float32")
    words = (*words, "--checkpoint", text, "--max-seq", "640", "--out", tmp_path / "engine")
    assert "\nmedia " not in command(*words, "--dry-run").out
    outcome = command(*words, "--mmproj", towers)
    assert outcome.code == 0, outcome.err
    engine = g4ir.load_engine(tmp_path / "engine")
    assert engine.media.kinds == KINDS
    options = {"backend": "reference", "dtype": "float32", "max_seq": 640}
    want = g4ir.build(MEDIA, tmp_path / "own", checkpoint=folder, **options)
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
        opened(tmp_path, MEDIA, **given)
    assert case["says"] in str(e.value) and "towers.gguf" in str(e.value)
    assert "\n" not in str(e.value) or "fix: take the mmproj file" in str(e.value)


def test_options(tmp_path: Path) -> None:
    text, towers = bare_file(tmp_path / "text.gguf", MEDIA, kind="F32"), tmp_path / "towers.gguf"
    write_mmproj(towers, MEDIA, towers_of(MEDIA))
    words = ("build", "--backend", "reference", "--out", tmp_path / "e", "--mmproj", towers)
    named = (*words, "--variant", "tiny-media")
    assert "with --variant or --spec" in refused(*words, "--checkpoint", text)
    assert "--checkpoint FILE.gguf" in refused(*named, "--random-weights", "0")
    assert "another" in refused(*named, "--checkpoint", text, "--link-weights")
    folder = write_checkpoint(tmp_path / "hf", MEDIA, random_weights(MEDIA, 0, torch.float32))
    assert "is for a GGUF file, and" in refused(*named, "--checkpoint", folder)
    absent = (*named[:-3], tmp_path / "absent.gguf", *named[-2:])
    assert "absent.gguf: no such file" in refused(*absent, "--checkpoint", text)
    other = (*named[:-3], text, *named[-2:])
    assert "general.architecture: expected 'clip'" in refused(*other, "--checkpoint", text)


TOWER_LIMITS: dict[str, Any] = {"max_seq": 96, "prefill_chunk": 16, "backend": "reference"}


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
    engine = g4ir.load(tmp_path / "m", **TOWER_LIMITS)
    prompt, tally = [300, 301, 302, 303], AcceptanceStats()
    text = engine.generate(prompt, 24, draft="mtp", tally=tally)
    assert text == engine.generate(prompt, 24)
    assert tally.to_dict()["tokens_per_round"] > 1.5
    engine.close()
    beside = BuildOptions(**TOWER_LIMITS, drafter="default")
    named = find_engine(tmp_path / "m" / "model-F32.gguf", beside)
    assert read_manifest(named).config.drafter is not None
    drafted = ("run", tmp_path / "m", "--backend", "reference", "--max-seq", 96, "--json")
    tokens = ("--tokens", "300,301,302,303", "--max-new-tokens", 24)
    made, plain = command(*drafted, *tokens), command(*drafted, *tokens, "--draft", "none")
    assert (made.code, plain.code) == (0, 0), made.err + plain.err
    assert '"drafts"' in made.err and '"drafts"' not in plain.err
    assert made.out == plain.out
    assert read_manifest(library.cached_engines()[0].path).config.drafter is None


def names_swapped(values: dict[str, Any]) -> None:
    words = values["tokenizer.ggml.tokens"]
    words[-1], words[-2] = words[-2], words[-1]


def test_what_is_refused(tmp_path: Path) -> None:
    pair, folder = pair_of("31b"), tmp_path / "m"
    write_folder(folder, pair)
    model, drafter = sorted(folder.iterdir(), key=lambda p: "assistant" in p.name)

    def refused(path: Path, says: str, **options: Any) -> None:
        with pytest.raises(G4Error, match=says):
            find_engine(path, BuildOptions(**TOWER_LIMITS, **options))

    refused(drafter, "is a drafter, which runs only with its target model")
    refused(model, "spec model-F32 is no drafter", drafter=model)
    plain, swapped, other = all_of("F32"), tmp_path / "s.gguf", tmp_path / "o.gguf"
    write_gguf(swapped, pair.spec, drafter_tensors(pair), plain, change=names_swapped)
    refused(model, "token .* has id .* there and .* in .*give the draft model", drafter=swapped)
    small = pair_of("e2b")
    write_gguf(other, small.spec, drafter_tensors(small), plain)
    refused(model, "o is no drafter of model-F32; give one that agrees in:\n", drafter=other)
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


@pytest.mark.parametrize("name", VARIANTS)
def test_the_variant_of_a_text_model(name: str) -> None:
    spec = load_spec(name)
    stated = replace(spec, name="file", hub=None, vision=None, audio=None)
    origin: Any = SimpleNamespace(spec=lambda: stated, spec_only=GgufFile.spec_only)
    assert shipped_variant(origin) == spec
