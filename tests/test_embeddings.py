"""Encoders: embeddings against transformers and sentence-transformers' definition, alone and in
company; files; bad input."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import g4ir
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.engine.embeddings import PACKED_TOKENS, pack, read_prompts
from g4ir.errors import CheckError, EngineError, G4Error, InputError, SpecError
from g4ir.media.audio import read_audio
from g4ir.media.prompt import marks
from g4ir.model.media import KINDS, placeholders
from g4ir.model.tensors import media_tensors, text_tensors
from g4ir.spec.parts import FULL, SLIDING, Ple, Tokens
from g4ir.spec.record import Spec, load_spec
from g4ir.spec.rules import canonical
from g4ir.spec.sentence_transformers import PROMPTS
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.gguf.container import read_container
from g4ir.weights.gguf.metadata import read_spec
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cli_tools import g4ir as command
from tests.cli_tools import ok, refused, tokenizer
from tests.configs import check_spec, short
from tests.engines import CASES, changed
from tests.gguf_files import all_of, write_gguf, write_mmproj
from tests.gpu_on_cpu import use_gpu_runtime
from tests.media_tools import media_files, media_tokenizer
from tests.test_media_models import inputs_of, medium
from tests.trt.emulated import emulated, use

NAMES = ("tiny-embedding", "tiny-embedding-2")
SEED, AGREES = 3, 1e-5
LENGTHS = (3, 17, 40, 1, 2, 5, 60, 9)
SEEDS = tuple(range(20))
#: transformers that have both models
HAS_SECOND = hasattr(transformers, "EmbeddingGemma2TextModel")


def random_encoder(name: str, seed: int) -> Spec:
    """An encoder of the kind of `name` with every size of its text drawn."""
    rng, base = random.Random(seed), load_spec(name)
    layers, heads, dim = rng.randint(2, 5), rng.choice((2, 4)), rng.choice((16, 32))
    kv = [rng.choice([n for n in (1, 2, 4) if heads % n == 0]) for _ in range(2)]
    alike = base.embedding is not None and bool(base.embedding.dense)
    text = replace(
        base.text,
        hidden_size=rng.choice((32, 48)),
        intermediate_size=rng.choice((48, 72)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        pattern=(*(SLIDING,) * rng.randint(1, 3), FULL),
        sliding=replace(
            base.text.sliding, head_dim=dim, num_key_value_heads=kv[0], window=rng.randint(2, 12)
        ),
        full=replace(
            base.text.full,
            head_dim=dim if alike else 2 * dim,
            num_key_value_heads=kv[0] if alike else kv[1],
        ),
        ple=None if alike else Ple(rng.choice((8, 16)), None),
    )
    size = text.hidden_size if alike else rng.choice((24, 40))
    assert base.embedding
    head = replace(
        base.embedding,
        dims=(size, 8),
        projection=None if alike else size,
        dense=(4 * size, size) if alike else (),
    )
    return check_spec(canonical(replace(base, name=f"{name}-{seed}", text=text, embedding=head)))


class Oracle:
    """The model by transformers, and what sentence-transformers does after it."""

    def __init__(self, spec: Spec, weights: Checkpoint) -> None:
        drop = ("architectures", "dtype", "model_type")
        values = spec.to_hf()
        config = {k: v for k, v in values.get("text_config", values).items() if k not in drop}
        kind = "Gemma3" if spec.model_type == "gemma3_embedding" else "EmbeddingGemma2"
        make, of = (getattr(transformers, f"{kind}Text{x}") for x in ("Model", "Config"))
        self.model = make(of(**config, attn_implementation="eager")).eval()
        names = [n for n in text_tensors(spec) if not n.startswith("dense.")]
        self.model.load_state_dict({n: weights.tensor(n) for n in names})
        self.dense = [
            weights.tensor(f"dense.{i}.linear.weight") for i in range(len(spec.embedding.dense))
        ]

    def __call__(self, ids: list[int]) -> torch.Tensor:
        x = self.model(input_ids=torch.tensor([ids])).last_hidden_state.mean(1)
        for w in self.dense:
            x = x @ w.T
        return torch.nn.functional.normalize(x, dim=-1)[0]


def drawn_ids(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(500) for _ in range(n)] for n in lengths]


def build(spec: Spec | str, out: Path, **options: Any) -> Any:
    return g4ir.build(spec, out=out, random_weights=SEED, **options)


@pytest.mark.parametrize("seed", short(0, 1, 6, of=SEEDS))
@pytest.mark.parametrize("name", NAMES[: 1 + HAS_SECOND])
def test_embeddings_are_those_of_transformers(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, emulated(tmp_path))
    spec, ids = random_encoder(name, seed), drawn_ids(seed)
    oracle = Oracle(spec, random_weights(spec, SEED, torch.float32))
    want = torch.stack([oracle(x) for x in ids])
    options: Any = {"random_weights": SEED, "media": "none", "max_batch": 3 + seed}
    check_backends(tmp_path, ids, want, spec=spec, **options)


def check_backends(folder: Path, inputs: list[Any], want: torch.Tensor, **options: Any) -> None:
    """Each backend's embeddings, together and alone, are those that are wanted."""
    for backend in ("reference", "torch", "onnx", "trt"):
        with g4ir.build(out=folder / backend, backend=backend, **options) as engine:
            got = engine.embed(inputs)
            assert got.dtype == torch.float32 and (got - want).abs().max() < AGREES
            alone = torch.cat([engine.embed([x]) for x in inputs])
            assert (alone - want).abs().max() < AGREES
            assert backend != "torch" or torch.equal(alone, got)


@pytest.mark.full
def test_compiled_programs_embed_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's programs, run by the runtime of GPUs."""
    spec, ids = random_encoder(NAMES[0], 0), drawn_ids(5)
    oracle = Oracle(spec, random_weights(spec, SEED, torch.float32))
    want = torch.stack([oracle(x) for x in ids])
    with build(spec, tmp_path / "e", settings={"programs": "inductor"}, max_batch=3) as engine:
        use_gpu_runtime(engine, monkeypatch)
        assert (engine.embed(ids) - want).abs().max() < AGREES


@pytest.mark.skipif(not HAS_SECOND, reason="transformers has no such model")
@pytest.mark.parametrize("seed", short(6, of=SEEDS))
def test_media_embeddings_are_those_of_transformers(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, emulated(tmp_path))
    spec = random_encoder(NAMES[1], seed)
    folder = media_checkpoint(tmp_path / "c", spec)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model, loading = transformers.AutoModel.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values())
    rng = np.random.default_rng(seed)
    sizes = (*(("image", (int(rng.integers(20, 90)), 60)) for _ in range(2)), ("video", 2))
    media = [medium(spec, kind, size, seed) for kind, size in (*sizes, ("audio", 7_001))]
    parts = [{"type": k, k: m} for (k, _), m in zip((*sizes, ("audio", 0)), media)]
    inputs = [*parts, "ab w7", ["a", parts[0], parts[1], " w7", parts[3]], [*parts[1:], "ab"]]
    want = torch.stack([media_oracle(model, words, spec.tokens, x) for x in inputs])
    options: Any = {"max_batch": 4, "audio_seconds": [2.0]}
    check_backends(tmp_path, inputs, want, spec=None, checkpoint=folder, **options)


def media_checkpoint(folder: Path, spec: Spec) -> Path:
    words, _ = media_tokenizer(spec.tokens, spec.text.vocab_size)
    words.post_processor = processor_of(words)
    weights, raw = random_weights(spec, SEED, torch.float32), words.to_str().encode()
    side = {"tokenizer.json": raw}
    return write_checkpoint(folder, spec, weights, media=KINDS, side_files=side)


@torch.no_grad()
def media_oracle(model: Any, words: Any, tokens: Tokens, content: Any) -> torch.Tensor:
    """The embedding of an input, whose text has its placeholders, by transformers."""
    lists: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    text, holders = "", placeholders(tokens)
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            text += part
            continue
        kind, item = part["type"], part[part["type"]]
        lists[kind].append(item)
        begin, end = (words.id_to_token(t) for t in marks(kind, tokens))
        soft = f"{begin}{words.id_to_token(holders[kind]) * item.soft_tokens}{end}"
        text += soft * (len(item.patches) if kind == "video" else 1)
    ids = torch.tensor([words.encode(text).ids])
    x = model(input_ids=ids, **inputs_of(model, lists)).last_hidden_state.mean(1)
    return torch.nn.functional.normalize(x, dim=-1)[0]


@pytest.mark.parametrize(
    ("dtype", "quant", "cosine"),
    [
        ("bfloat16", None, 0.999),
        ("float32", "int8", 0.999),
        ("bfloat16", "int8", 0.998),
        ("float32", "int8-g32", 0.998),
    ],
)
@pytest.mark.parametrize("seed", short(0, of=SEEDS))
@pytest.mark.parametrize("name", NAMES)
def test_narrow_engines_are_near_and_exact_in_company(
    name: str, seed: int, dtype: str, quant: str | None, cosine: float, tmp_path: Path
) -> None:
    spec, ids = random_encoder(name, seed), [*drawn_ids(seed), *drawn_ids(5, (100, 256))]
    options: Any = {"media": "none"}
    with build(spec, tmp_path / "wide", backend="reference", **options) as wide:
        want = wide.embed(ids)
    with build(spec, tmp_path / "narrow", dtype=dtype, quant=quant, **options) as engine:
        got = engine.embed(ids)
        assert (got * want).sum(-1).min() > cosine  # docs/embeddings.md
        assert torch.equal(torch.cat([engine.embed(x) for x in ids]), got)


def test_packing_computes_no_padding() -> None:
    lengths = [random.Random(1).randint(1, 256) for _ in range(500)]
    chunks = list(pack(lengths, 256 * 8, 64))
    assert sorted(row for chunk in chunks for row in chunk) == [*range(500)]
    sizes = [sum(lengths[row] for row in chunk) for chunk in chunks]
    assert max(sizes) <= PACKED_TOKENS and max(map(len, chunks)) <= 64
    full = [n for n, chunk in zip(sizes[:-1], chunks) if len(chunk) < 64]
    assert min(full) > PACKED_TOKENS - 256
    assert [*pack([5, 2000, 3], 2048, 8)] == [[1], [0, 2]]


# --- nn.Module, verify ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES[: 1 + HAS_SECOND])
def test_gradients_of_a_module_are_those_of_transformers(name: str) -> None:
    """Also of texts of unequal lengths, whose padding the mask excludes."""
    module, ids = g4ir.module(name, random_weights=SEED), drawn_ids(1, (9, 4))
    oracle = Oracle(module.spec, random_weights(module.spec, SEED, torch.float32))
    for p in (*oracle.model.parameters(), *oracle.dense):
        p.requires_grad_()
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    got = module(torch.tensor([ids[0], ids[1] + [0] * 5]), attention_mask=mask)
    with torch.enable_grad():
        want = torch.stack([oracle(x) for x in ids])
        (want[0] @ want[1]).backward()
    (got[0] @ got[1]).backward()
    assert (got - want).abs().max() < AGREES
    wanted = {n: p.grad for n, p in oracle.model.named_parameters()}
    wanted |= {f"dense.{i}.linear.weight": w.grad for i, w in enumerate(oracle.dense)}
    grads = {n: p.grad for n, p in module.model.named_parameters()}
    assert grads.keys() == wanted.keys()
    for n, g in grads.items():
        assert (g - wanted[n]).abs().max() <= AGREES * max(1.0, float(wanted[n].abs().max())), n


@pytest.mark.parametrize(
    ("against", "dtype"),
    [("reference", "float32"), *([("hf", d) for d in ("float32", "bfloat16")] * HAS_SECOND)],
)
def test_verify_with_media(
    against: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text with each kind of media; towers beside the interpreter's, or transformers' own."""
    with build(NAMES[1], tmp_path / "e", dtype=dtype) as engine:
        report: Any = verify_engine(engine, against)
        rows = dict(line.split(maxsplit=1) for line in report.text().splitlines()[1:-1])
        assert report.ok and {*KINDS} <= rows.keys() and report.kinds == KINDS
        assert len(report.positions) == 2 * (8 + 3) and report.turns[8:] == (70, 136, 58)
        if dtype == "float32":
            assert all(float(rows[kind].split()[0]) < AGREES for kind in KINDS)
        plain = engine.runtime.encode
        wrong = lambda tower, feeds: 1.2 * plain(tower, feeds)  # noqa: E731
        monkeypatch.setattr(engine.runtime, "encode", wrong)
        report = verify_engine(engine, against)
        assert not report.ok and "%soft" in report.first_difference


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.full)])
def test_verify(name: str, tmp_path: Path) -> None:
    against = "hf" if name == NAMES[0] or HAS_SECOND else "reference"
    with build(name, tmp_path / "narrow", dtype="bfloat16", quant="int8") as engine:
        report = verify_engine(engine, against)
        count = 2 * (8 + 3 * (name == NAMES[1]))
        assert report.ok and f"{count} of {count} within" in report.text()
        assert bool(report.float64) == (against == "hf")
    with build(name, tmp_path / "plain", dtype="float32", media="none") as engine:
        param = next(p for p in engine.program.params() if p.startswith("L1.norm_ffn"))
        report = verify_engine(changed(engine, {param: lambda t: t + 0.3 * t.flip(0)}))
        assert not report.ok
        stages = verify_each_pass(engine, tokens=[*range(5, 30)])
        assert stages.ok and stages.tokens == 25 and stages.stages[-1].values > 90


# --- folders of sentence-transformers, GGUF files -------------------------------------------------


def folder_of(folder: Path, spec: Spec | None = None, **files: str) -> Path:
    """A folder of sentence-transformers with a tokenizer that adds <bos> and <eos>."""
    spec, made = spec or load_spec(NAMES[0]), tokenizer()
    made.post_processor = processor_of(made)
    prompts = {"prompts": {"query": "q: ", "ours": "w3 "}, "default_prompt_name": "ours"}
    side = {
        "tokenizer.json": made.to_str(),
        "config_sentence_transformers.json": json.dumps(prompts),
    }
    raw = {n: text.encode() for n, text in (side | files).items()}
    return write_checkpoint(folder, spec, random_weights(spec, SEED, torch.float32), side_files=raw)


def processor_of(words: Any) -> Any:
    special = [(t, words.token_to_id(t)) for t in ("<bos>", "<eos>")]
    return TemplateProcessing(single="<bos> $A <eos>", special_tokens=special)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("encoder")
    with g4ir.build(None, out=folder / "e", checkpoint=folder_of(folder / "c")) as engine:
        yield engine


def test_texts_tasks_and_sizes(model: Any) -> None:
    ids = model.tokenizer().encode("w3 ab w7").ids
    assert ids[0] == 2 and ids[-1] == 1
    oracle = Oracle(model.spec, random_weights(model.spec, SEED, torch.float32))
    whole = model.embed("ab w7")  # the default task is `ours`
    assert (whole[0] - oracle(ids)).abs().max() < AGREES
    assert torch.equal(whole, model.embed(["w3 ab w7"], task="none"))
    assert not torch.equal(whole, model.embed("ab w7", task="document"))
    for size in (32, 16):
        cut = model.embed(["ab w7", "w9"], dims=size)
        assert cut.shape == (2, size)
        assert torch.allclose(cut[0], torch.nn.functional.normalize(whole[0, :size], dim=-1))
    assert torch.equal(model.embed(ids), whole)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("{", "is no JSON object"),
        ("[]", "found a list"),
        ('{"prompts": {"query": 3}}', "prompts must map names to texts"),
        ('{"prompts": {}, "default_prompt_name": "q"}', "'q' is none of its prompts; restore"),
        ('{"prompts": {}, "default_prompt_name": []}', "is none of its prompts; restore"),
    ],
)
def test_invalid_prompts_of_tasks(prompts: str, message: str, model: Any, tmp_path: Path) -> None:
    path = tmp_path / PROMPTS
    path.write_text(prompts)
    with pytest.raises(EngineError, match=re.escape(f"{path}: ") + f".*{message}"):
        read_prompts(tmp_path, model.spec)


def test_long_texts(model: Any) -> None:
    with pytest.raises(InputError, match="text 0: not UTF-8"):
        model.embed("\ud800")
    with pytest.raises(InputError, match=r"text 1: .* tokens, and this engine takes 256"):
        model.embed(["a", "ab " * 300], task="none")
    ids = model.tokenizer().encode("ab " * 300).ids
    cut = model.embed(["ab " * 300], task="none", truncate=True)
    assert torch.equal(cut, model.embed([*ids[:255], 1]))
    assert torch.equal(cut, model.embed("ab " * 100_000, task="none", truncate=True))


@pytest.mark.parametrize(("texts", "options", "message"), CASES["refused_texts"])
def test_refused_texts(texts: Any, options: Any, message: str, model: Any) -> None:
    with pytest.raises(InputError, match=message):
        model.embed(texts, **options)


def test_models_of_the_other_kind(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is an encoder"):
        model.session()
    with pytest.raises(InputError, match="is an encoder"):
        model.generate([1, 2])
    chat = build("tiny-moe", tmp_path / "chat", backend="reference")
    with chat, pytest.raises(InputError, match="generates text and is no embedding model"):
        chat.embed("a")
    options = {"bits": 4.0, "draft_tokens": 2, "kv_dtype": "int8", "all_logits": True, "tp": 2}
    for name, value in options.items():
        with pytest.raises(G4Error, match="encoder"):
            build(NAMES[0], tmp_path / "e", **{name: value})


def test_an_embedding_that_is_not_finite(tmp_path: Path) -> None:
    with build(NAMES[0], tmp_path / "e") as engine:
        engine.tables["embed.table"][9] = float("nan")
        with pytest.raises(CheckError, match=r"text 1 .*NaN"):
            engine.embed([[3, 4], [5, 9, 9, 9]])
        assert engine.embed([3, 4]).isfinite().all()


def test_a_folder_without_its_dense_layers(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c")
    assert Spec.from_hf(folder).embedding == load_spec(NAMES[0]).embedding
    exported = g4ir.export(folder, tmp_path / "again")
    for name in ("3_Dense/model.safetensors", "modules.json", "1_Pooling/config.json"):
        assert (exported / name).read_bytes() == (folder / name).read_bytes()
    pooling = folder / "1_Pooling/config.json"
    pooling.write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(SpecError, match=r"pooling cls.*only mean"):
        Spec.from_hf(folder)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:-1]))
    with pytest.raises(SpecError, match=r"expected modules .*Normalize \(any .*found .*Dense$"):
        Spec.from_hf(folder)
    (folder / "modules.json").write_text(json.dumps([modules[0] | {"path": "0_T"}, *modules[1:]]))
    with pytest.raises(SpecError, match="path '0_T' of the first module: expected an empty path"):
        Spec.from_hf(folder)
    (folder / "modules.json").unlink()
    with pytest.raises(G4Error, match=r"dense\.0\.linear\.weight.*missing(.|\n)*modules\.json"):
        g4ir.build(None, out=tmp_path / "e", checkpoint=folder)
    with pytest.raises(SpecError, match="query_pre_attn_scalar: 24 would be read back as 32"):
        g4ir.export(exported, tmp_path / "x.gguf", format="gguf")
    assert not (tmp_path / "x.gguf").exists()


def gguf_file(path: Path, spec: Spec, pooling: int = 1, bare: bool = False) -> Path:
    """A file as llama.cpp's converter writes one with the dense modules, or `bare` of them."""
    arch, text, words = "gemma-embedding", spec.text, tokenizer()
    tokens = [words.id_to_token(i) for i in range(text.vocab_size)]
    special = ("<pad>", "<eos>", "<bos>")
    kinds = [3 if t in special else 6 if t.startswith("<0x") else 1 for t in tokens]
    said = {**CASES["gguf_tokenizer"], "tokens": tokens, "token_type": kinds}
    said["scores"] = [-float(i) for i in range(len(tokens))]
    of = {"attention.sliding_window": both_sides(spec), "pooling_type": pooling}
    of["attention.sliding_window_pattern"] = [k == SLIDING for k in text.layer_types]

    def change(values: dict[str, Any]) -> None:
        for key in [k for k in values if k.startswith("tokenizer.")]:
            del values[key]
        values.update({f"{arch}.{k}": v for k, v in of.items()})
        values.update({f"tokenizer.ggml.{k}": v for k, v in said.items()})

    source = random_weights(spec, SEED, torch.float32)
    names = [n for n in text_tensors(spec) if not (bare and n.startswith("dense."))]
    tensors = {n: source.tensor(n) for n in names}
    write_gguf(path, spec, tensors, all_of("F32"), change=change, arch=arch)
    return path


def both_sides(spec: Spec) -> int:
    return 2 * ((spec.text.sliding.window or 0) - 1)


def test_gguf_files(model: Any, tmp_path: Path) -> None:
    spec = replace(model.spec, text=replace(model.spec.text, query_pre_attn_scalar=32))
    file = gguf_file(tmp_path / "e.gguf", spec)
    with g4ir.build(None, out=tmp_path / "g", checkpoint=file, dtype="float32") as engine:
        assert (engine.spec.embedding.dense, engine.spec.text) == ((256, 64), spec.text)
        assert engine.tokenizer().encode("ab w7").ids == model.tokenizer().encode("ab w7").ids
        oracle = Oracle(spec, random_weights(spec, SEED, torch.float32))
        ids = engine.tokenizer().encode("title: none | text: ab").ids
        assert (engine.embed("ab", task="document")[0] - oracle(ids)).abs().max() < AGREES
    folder = folder_of(tmp_path / "c", spec)
    again = g4ir.export(folder, tmp_path / "again.gguf", format="gguf", dtype="F32")
    ours, theirs = (read_container(f) for f in (again, file))
    assert ours.tensors.keys() == theirs.tensors.keys()
    said = {k: v for k, v in theirs.values.items() if k.startswith("gemma-embedding.")}
    assert said.keys() <= ours.values.keys()
    assert all(ours.values[k] == v for k, v in said.items() if not k.endswith("_pattern"))
    with g4ir.build(None, out=tmp_path / "a", checkpoint=again, dtype="float32") as engine:
        assert engine.tokenizer().encode("ab w7").ids == model.tokenizer().encode("ab w7").ids
        assert (engine.embed([ids])[0] - oracle(ids)).abs().max() < AGREES
    with pytest.raises(SpecError, match=r"pooling_type: '?2'? is not supported"):
        read_spec(read_container(gguf_file(tmp_path / "cls.gguf", spec, pooling=2)))
    bare = gguf_file(tmp_path / "b.gguf", spec, bare=True)
    with pytest.raises(G4Error, match=r"dense_2\.weight.*missing"):
        g4ir.build(None, out=tmp_path / "b", checkpoint=bare)


def second_gguf_file(path: Path, spec: Spec, **changes: Any) -> Path:
    """A file of version 2 as llama.cpp's converter writes it: Gemma 4's names, the window of both
    sides, no frequencies; `changes` of its keys."""
    arch, weights = "gemma-embedding2", random_weights(spec, SEED, torch.float32)
    assert spec.embedding
    said = {"attention.sliding_window": both_sides(spec), "attention.causal": False}
    said |= {"embedding_length_out": spec.embedding.projection, "pooling_type": 1} | changes

    def change(values: dict[str, Any]) -> None:
        values.update({f"{arch}.{k}": v for k, v in said.items()})
        values |= {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 1}
        for kind, i in placeholders(spec.tokens).items():
            values["tokenizer.ggml.tokens"][i] = f"<|{kind}|>"
            values["tokenizer.ggml.token_type"][i] = 3

    plain = {n: n.replace("ple_block.", "").removeprefix("ple.") for n in text_tensors(spec)}
    tensors = {plain[n]: weights.tensor(n) for n in plain}
    tensors["lm_head.weight"] = tensors.pop("embedding_projection.weight")
    like = replace(spec, model_type="gemma4")
    write_gguf(path, like, tensors, all_of("F32"), change=change, arch=arch)
    return path


def test_gguf_files_of_version_2(tmp_path: Path) -> None:
    """Text alone, with its towers, and what our writer says of the same model."""
    spec, ids = load_spec(NAMES[1]), drawn_ids(4)
    file = second_gguf_file(tmp_path / "e.gguf", spec)
    with build(spec, tmp_path / "w", media="none") as engine:
        want = engine.embed(ids)
    with g4ir.build(None, out=tmp_path / "g", checkpoint=file, dtype="float32") as engine:
        assert engine.spec.text == replace(spec.text, use_bidirectional_attention=None)
        assert engine.spec.embedding.dims[0] == 96 and not engine.media.kinds
        assert torch.equal(engine.embed(ids), want)
        start, *_, end = engine.tokenizer().encode("w7").ids
        assert (start, end) == (2, 1)
    folder = folder_of(tmp_path / "c", spec)
    again = g4ir.export(folder, tmp_path / "a.gguf", format="gguf", dtype="F32")
    ours, theirs = (read_container(f) for f in (again, file))
    assert ours.tensors.keys() == theirs.tensors.keys()
    said = {k: v for k, v in theirs.values.items() if k.startswith("gemma-embedding2.")}
    assert said.keys() == {k for k in ours.values if k.startswith("gemma-embedding2.")}
    assert read_spec(ours).text == read_spec(theirs).text
    towers = random_weights(spec, SEED, torch.float32)
    mmproj = write_mmproj(
        tmp_path / "mmproj.gguf", spec, {n: towers.tensor(n) for n in media_tensors(spec, KINDS)}
    )
    whole: Any = {"checkpoint": file, "mmproj": mmproj, "dtype": "float32"}
    pixels = np.full((24, 48, 3), 99, np.uint8)
    part = {"type": "image", "image": pixels}
    with (
        g4ir.build(spec, out=tmp_path / "m", **whole) as engine,
        build(spec, tmp_path / "n") as other,
    ):
        seen = [e.encode("image", pixels) for e in (engine, other)]
        assert torch.equal(seen[0].pieces[0], seen[1].pieces[0])
        assert engine.embed([part]).shape == (1, 96)


@pytest.mark.parametrize(("changes", "message"), CASES["refused_gguf_encoders"])
def test_refused_gguf_files_of_version_2(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = second_gguf_file(tmp_path / "e.gguf", load_spec(NAMES[1]), **changes)
    with pytest.raises(G4Error, match=message):
        g4ir.build(None, out=tmp_path / "e", checkpoint=file)


# --- the command line ------------------------------------------------------------------------


def test_embed_command(model: Any, tmp_path: Path) -> None:
    texts, want = ["ab", "w7 w9", "a"], model.embed(["ab", "w7 w9", "a"], "query", 32)
    words = [w for t in texts for w in ("--text", t)]
    values = json.loads(ok("embed", model.path, *words, *QUERY, "--json"))
    assert values["dims"] == 32 and values["embeddings"] == want.tolist()
    plain, lines = tmp_path / "in.txt", tmp_path / "in.jsonl"
    plain.write_text("\n".join(texts))
    lines.write_text("".join(json.dumps({"text": t, "id": 1}) + "\n\n" for t in texts))
    ok("embed", model.path, "--input", plain, *QUERY, "--out", tmp_path / "o.npy")
    assert np.array_equal(np.load(tmp_path / "o.npy"), want.numpy())
    ok("embed", model.path, "--input", lines, *QUERY, "--out", tmp_path / "o.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [r["index"] for r in rows] == [0, 1, 2]
    assert [r["embedding"] for r in rows] == want.tolist()
    plain.write_bytes("a\u2028b\x0cc\rd\r\nw7\n".encode())  # two lines
    values = json.loads(ok("embed", model.path, "--input", plain, "--json"))
    assert values["embeddings"] == model.embed(["a\u2028b\x0cc\rd", "w7"]).tolist()
    assert "packed_mean" in ok("show", "--variant", NAMES[0])
    assert json.loads(ok("cost", NAMES[0], "--json"))["phase"] == "encode"
    out = ok("embed", model.path, "--text", "ab", "--text", "ab")
    assert out.splitlines()[1].endswith("similarity +1.0000")


QUERY = ("--task", "query", "--dims", "32")


def test_embed_command_with_media(tmp_path: Path) -> None:
    """Files are embeddings of their own; a line of --input may combine them with text."""
    folder, files = media_checkpoint(tmp_path / "c", load_spec(NAMES[1])), media_files(tmp_path)
    options: Any = {"backend": "reference", "image_budgets": [70, 280], "audio_seconds": [2.0]}
    image, video, audio = (files / name for name in ("a.png", "c.mp4", "d.wav"))
    part = {"type": "image", "image": str(image), "image_budget": 70}
    with g4ir.build(None, out=tmp_path / "e", checkpoint=folder, **options) as engine:
        frames = engine.encode("video", video)  # 2.5 s at 2 frames per second
        assert len(frames.pieces) == 2 and not frames.times and engine.media.frame == 140
        clip = {"type": "audio", "audio": read_audio(audio)}
        want = engine.embed(["ab", part, {"type": "video", "video": video}, clip])
        both = engine.embed([["w7 ", part, part], "ab"])
        with pytest.raises(InputError, match=r"tokens; shorten its text, or give fewer media, or"):
            engine.embed([["w7 " * engine.limits.max_seq, part]], truncate=True)
        with pytest.raises(InputError, match=r"characters, .*; shorten its text, or give fewer"):
            engine.embed([["w7 " * engine.limits.max_seq * 30, part]], truncate=True)
    flags = ("--text", "ab", "--image", image, "--video", video, "--audio", audio)
    out = ok("embed", tmp_path / "e", *flags, "--set", "image_budget=70", "--json")
    assert json.loads(out)["embeddings"] == want.tolist()
    lines = tmp_path / "in.jsonl"
    content = ["w7 ", part, {"type": "image_url", "image_url": {"url": str(image)}} | SMALL]
    lines.write_text("\n".join(map(json.dumps, ({"content": content}, {"text": "ab"}))))
    out = ok("embed", tmp_path / "e", "--input", lines, "--json")
    assert json.loads(out)["embeddings"] == both.tolist()
    for content, message in CASES["refused_parts"]:
        lines.write_text(json.dumps({"content": content}))
        assert message in refused("embed", tmp_path / "e", "--input", lines), message


SMALL = {"image_budget": 70}


def test_refused_commands(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_text("ab\n\nw7\n")
    assert "in.txt: line 2 is empty" in refused("embed", model.path, "--input", file)
    for phase in ("verify", "draft"):
        assert " is an encoder" in refused("show", model.path, "--phase", phase)
    (blank := tmp_path / "in.jsonl").write_text("\n\n")
    assert "in.jsonl has no texts" in refused("embed", model.path, "--input", blank)
    assert "ends in .npy or .jsonl" in refused("embed", model.path, "--text", "a", "--out", "x.bin")
    file.write_text("ab\nw7 " + "ab " * 300)
    outcome = command("embed", model.path, "--input", file, "--out", tmp_path / "o.npy")
    assert outcome.code == 2 and not [*tmp_path.glob("*o.npy*")]
