"""GGUF files as checkpoints: blocks to the bit, specs from metadata, engines against transformers
that hold what the file's numbers stand for, tokenizers, and files that are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from safetensors.torch import load_file

import g4ir
from g4ir import Engine, Spec, diff_specs, load_spec
from g4ir.builder.sources import agreed_spec
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.errors import G4Error, InputError, WeightsError
from g4ir.model.names import FINAL_NORM, HEAD, PLE_TABLE, TOKEN_TABLE
from g4ir.model.tensors import text_tensors
from g4ir.ops.codecs import FORMATS, dequantize_codes
from g4ir.quant.recipe import Scheme
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.gguf import blocks as block_forms
from g4ir.weights.gguf.blocks import CODED, REQUANTISED, relative_error
from g4ir.weights.gguf.checkpoint import open_gguf
from g4ir.weights.gguf.container import read_container
from g4ir.weights.gguf.metadata import SPEC_ONLY, read_spec
from g4ir.weights.origin import find_origin
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cases import TABLES, read_table
from tests.cli_tools import g4ir as command
from tests.cli_tools import refused
from tests.configs import NAMES, TINY, short, spec_called, widened
from tests.engines import rewrite
from tests.gguf_files import (
    BLOCKS,
    Kind,
    all_of,
    bare_file,
    finish,
    offsets,
    values_of,
    write_gguf,
    write_values,
)
from tests.oracle import Oracle, expressible, find_oracle, relative
from tests.runner import prefill_then_decode

EXACT = [k for k in CODED if k not in REQUANTISED]
KINDS = ("F32", "F16", "BF16", *EXACT)
LIMITS = {"max_seq": 128, "max_batch": 2, "prefill_chunk": 16, "all_logits": True}


@pytest.mark.parametrize("kind", EXACT)
def test_blocks_to_the_bit(kind: str) -> None:
    """Random bytes, float16 of either sign and of every size among them."""
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (600, nbytes), dtype=np.uint8)
    for at in offsets(kind):
        d = rng.integers(0, 0x7C00, 600) | rng.integers(0, 2, 600) << 15
        raw[:, at : at + 2] = d.astype(np.uint16).view(np.uint8).reshape(600, 2)
    if kind == "MXFP4":  # powers of blocks that are at most 17 apart
        raw[:, 0] = rng.integers(110, 128, 600)
        far = torch.zeros(2, 17, dtype=torch.uint8)
        far[:, 0] = torch.tensor([110, 128])
        assert CODED[kind].scales(far.flatten()[None]).isfinite().all()  # the codes are zeros
        far[0, 5] = 1
        assert CODED[kind].scales(far.flatten()[None]).isnan().all()
    if kind == "NVFP4":  # unsigned scales
        assert CODED[kind].scales(torch.full((1, 36), 0x80, dtype=torch.uint8)).isnan().all()
        raw[:, :4] &= 0x7F
    form = CODED[kind]
    want = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]))
    data, want = (x.reshape(600 // form.together, -1) for x in (torch.from_numpy(raw), want))
    codes, scales = form.codes(data), form.scales(data)
    group = form.together * block // scales.shape[-1] * FORMATS[form.scheme.form].scales
    assert group == (form.scheme.group or block)
    assert torch.equal(dequantize_codes(codes, scales, torch.float32), want)
    assert torch.equal(form.dequantize(data), want)


@pytest.mark.parametrize(("kind", "at", "most"), TABLES["gguf quantised again"])
def test_blocks_quantised_again(
    kind: str, at: int, most: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At most one bit more, with an error that is logged once; other tensors are as they were."""
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = np.random.default_rng(1).integers(0, 256, (600, nbytes), dtype=np.uint8)
    if kind == "TQ2_0":  # no code 3
        raw &= ~(raw >> 1 & raw & 0x55) & 0xFF
    raw[:, at : at + 2] = np.full((600, 1), 0.01, np.float16).view(np.uint8)
    coded, data = CODED[kind], torch.from_numpy(raw)
    want = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]))
    assert torch.equal(coded.dequantize(data), want)
    parts = coded.codes(data), coded.scales(data)
    assert 8 * sum(p.nbytes for p in parts) / want.numel() <= 8 * nbytes / block + 1
    assert relative_error(kind, data) <= most
    spec, name = widened("tiny-ple"), "layers.0.mlp.up_proj.weight"
    plain = bare_file(tmp_path / "plain.gguf", spec, kind="F32")
    file = rewritten(plain, tmp_path / "a.gguf", retyped("blk.0.ffn_up", kind))
    checkpoint = opened(file, spec, "f32")
    assert checkpoint.forms[name] == coded.scheme
    assert caplog.text.count(f"{kind} is stored as {coded.scheme.form}") == 1


def says(spec: Spec) -> bool:
    sliding, full = spec.text.sliding.rope, spec.text.full.rope
    if spec.model_type == "gemma3":
        period = ("sliding",) * 5 + ("full",)
        dims = {spec.text.query_pre_attn_scalar, spec.text.full.head_dim}
        return spec.text.pattern == period and len(dims) == 1
    ropes = sliding.kind == "default" and full.kind == "proportional" and full.factor is None
    wide = spec.text.use_double_wide_mlp and not spec.text.num_kv_shared_layers
    return expressible(spec) and ropes and not wide


GEMMA3 = ("gemma3-270m-small", "gemma3-4b-small")
NOT_TEXT = ("prefixes.", "name", "hub", "chat", "dtype", "tokens.", "vision", "audio", "model_type")
UNSAID = (*NOT_TEXT, *SPEC_ONLY)


def assert_says(file: Path, spec: Spec) -> Spec:
    found = read_spec(read_container(file))
    assert not [row for row in diff_specs(spec, found) if not row[0].startswith(UNSAID)]
    return found


@pytest.mark.parametrize("name", [n for n in (*TINY, *GEMMA3, *NAMES) if says(spec_called(n))])
def test_specs(tmp_path: Path, name: str) -> None:
    spec = spec_called(name)
    found = assert_says(bare_file(tmp_path / "a.gguf", spec), spec)
    assert found.name == "a" and found.dtype == "bf16"


#: changes of the metadata (see `changed`): what other converters write and says the same, and what
#: is refused, of tensors too
CASES = read_table("gguf_refused.yaml")
OTHER_KEYS, WRONG, TENSORS = CASES["same"], CASES["metadata"], CASES["tensors"]


@pytest.mark.parametrize("case", OTHER_KEYS)
def test_other_keys(tmp_path: Path, case: str) -> None:
    spec = load_spec("tiny-ple")
    file = bare_file(tmp_path / "a.gguf", spec, lambda v: changed(v, OTHER_KEYS[case]))
    found = assert_says(file, spec)
    if case.startswith("dims"):  # the tensor of frequencies may be left out then
        bare = rewritten(file, tmp_path / "b.gguf", without("rope_freqs"))
        assert read_spec(read_container(bare)).text == found.text


def test_what_files_of_gemma_3_leave_out(tmp_path: Path) -> None:
    """What divides the scores follows from the number of layers, unless a spec says it; a pattern
    may be its period."""
    spec = spec_called("gemma3-4b-small")
    period = (*("sliding",) * 5, "full")
    text = replace(spec.text, num_hidden_layers=62, query_pre_attn_scalar=168, pattern=period)
    many = replace(spec, text=text)
    file = bare_file(tmp_path / "a.gguf", many)
    assert assert_says(file, many).text.query_pre_attn_scalar == 168
    other = replace(many, text=replace(text, query_pre_attn_scalar=100))
    assert agreed_spec(other, find_origin(file)) is other
    key = "gemma3.attention.sliding_window_pattern"
    file = bare_file(tmp_path / "b.gguf", spec, lambda v: v.update({key: 3}))
    assert read_spec(read_container(file)).text.pattern == ("sliding", "sliding", "full")


def holding(oracle: Oracle, meant: dict[str, torch.Tensor]) -> Oracle:
    model = copy.deepcopy(oracle.model)
    state = {(k if k == HEAD else f"model.{k}"): v for k, v in meant.items()}
    state.setdefault("lm_head.weight", meant[TOKEN_TABLE])
    model.load_state_dict(state, strict=False)
    return replace(oracle, model=model)


def logits(engine: Engine, oracle: Oracle) -> torch.Tensor:
    """f32[rows, T, vocab]: a prompt, then token by token."""
    return prefill_then_decode(engine.session(batch=2), oracle.tokens, oracle.prompt)


def built(
    folder: Path, spec: Spec, kind: Kind, backend: str = "reference", **options: Any
) -> tuple[Engine, Oracle, dict[str, torch.Tensor]]:
    """An engine in fp32 from a file, the model that holds what the file says, and its weights."""
    oracle = find_oracle(spec)
    tensors = {name.removeprefix("model."): t for name, t in oracle.tensors.items()}
    meant = write_gguf(folder / "model.gguf", spec, tensors, kind)
    options = {"backend": backend, "dtype": "float32", **LIMITS, **options}
    engine = g4ir.build(None, folder / "engine", checkpoint=folder / "model.gguf", **options)
    return engine, holding(oracle, meant), meant


def mixed(name: str, shape: tuple[int, ...]) -> str:
    """As files that people have: most in 4 bits, tables in Q6_K, some of each layer otherwise, so
    that gate and up are held differently."""
    if "embed_tokens" in name:
        return all_of("Q6_K", "Q8_0")(name, shape)
    others = {"v_proj": "Q8_0", "up_proj": "BF16", "down_proj": "Q5_K", "o_proj": "Q4_K"}
    others["per_layer"] = "F16"
    kind = next((k for part, k in others.items() if part in name), "Q4_0")
    return all_of(kind, "Q8_0")(name, shape)


@pytest.mark.parametrize("backend", short("reference", of=("reference", "torch")))
@pytest.mark.parametrize("name", short("tiny-moe", GEMMA3[0], of=(*TINY, GEMMA3[0])))
def test_mixed_types(tmp_path: Path, name: str, backend: str) -> None:
    engine, peer, _ = built(tmp_path, widened(name), mixed, backend)
    assert relative(logits(engine, peer), peer.logits).max() <= peer.budget
    rules = engine.manifest["quant"]["rules"]
    forms = {(r["form"], r["group"], r["scale"]) for r in rules}
    wide = {(form, 256, "f16") for form in ("uint4", "uint5", "int6")}
    forms |= {("uint4", 256, "f16")} if name in GEMMA3 else set()  # heads of no 256 elements
    assert {("int4", 32, "f16"), ("int8", 32, "f16"), *wide} == forms
    report = verify_engine(engine, against="hf", checkpoint=tmp_path / "model.gguf")
    assert report.ok and report.against == "hf"


#: bytes of a number in codes, and with onnx, which has those of the head by columns for Q6_K
HELD = {"Q4_K": (144 / 256, 4), "Q5_K": (176 / 256, 4), "Q6_K": (210 / 256, 2 * 1.25)}
HELD |= {"Q2_K": (84 / 256, 4), "Q3_K": (114 / 256, 2 * 1.25), "Q4_1": (20 / 32, 4)}
HELD |= {"IQ4_XS": (20 / 32, 2 * 36 / 32), "Q5_1": (24 / 32, 4), "MXFP4": (20 / 32, 2.5)}


@pytest.mark.covering
@pytest.mark.parametrize("backend", ["reference", "torch", "onnx"])
@pytest.mark.parametrize("kind", HELD)
def test_k_blocks(tmp_path: Path, kind: str, backend: str) -> None:
    """Held in the file's own bytes, or where products take no such codes in those of int8 or as
    what they mean."""
    engine, peer, meant = built(tmp_path, widened("tiny-ple"), all_of(kind, "Q8_0"), backend)
    assert relative(logits(engine, peer), peer.logits).max() <= peer.budget
    names = {"L0.attn.wq": "layers.0.self_attn.q_proj.weight", "embed.table": TOKEN_TABLE}
    for param, name in names.items():
        assert torch.equal(engine.param(param), meant[name])
    sizes = {n: t.numel() * t.element_size() for n, t in packed_tensors(tmp_path / "engine")}
    table = sum(size for n, size in sizes.items() if n.startswith("embed.table"))
    numbers = meant[TOKEN_TABLE].numel()
    assert table == numbers * HELD[kind][backend == "onnx"]
    if backend != "reference":  # which would be compared with itself
        assert verify_engine(engine).ok
    if (kind, backend) == ("Q6_K", "reference"):
        assert verify_each_pass(engine, checkpoint=tmp_path / "model.gguf").ok


def packed_tensors(engine: Path) -> list[tuple[str, torch.Tensor]]:
    return [pair for file in engine.glob("*.safetensors") for pair in load_file(file).items()]


def test_an_engine_that_refers_to_its_file(tmp_path: Path) -> None:
    engine, peer, meant = built(tmp_path, load_spec("tiny-ple"), all_of("Q8_0"), link_weights=True)
    assert not [f for f in engine.manifest["files"] if f.endswith(".safetensors")]
    assert relative(logits(engine, peer), peer.logits).max() <= peer.budget
    assert torch.equal(engine.param("ple.table"), meant[PLE_TABLE])
    assert verify_engine(engine, against="hf").ok
    file = tmp_path / "model.gguf"
    for change in (lambda: file.write_bytes(b"GGUF"), file.unlink):
        change()
        with pytest.raises(G4Error, match=r"model\.gguf .* is not the file this engine was built"):
            g4ir.load_engine(tmp_path / "engine")


def test_norms_about_zero(tmp_path: Path) -> None:
    """Files hold 1 + w, in which w is to the bit what a checkpoint has; the reverse is refused, and
    1 + w in a checkpoint too."""
    spec = spec_called("gemma3-4b-small")
    source, zero = random_weights(spec, 0, torch.bfloat16), (FINAL_NORM, "q_norm.weight")
    tensors = {name: source.tensor(name) for name in text_tensors(spec)}
    write_gguf(tmp_path / "a.gguf", spec, tensors, all_of("F16"))
    found = open_gguf(read_container(tmp_path / "a.gguf"), spec, "bf16")
    for name in (n for n in tensors if n.endswith(zero)):
        assert torch.equal(found.tensor(name), tensors[name].float()), name
    write_gguf(tmp_path / "b.gguf", spec, tensors, all_of("F16"), plus_one=False)
    said = r"b\.gguf: .* norms must be stored as 1 \+ w, .* of w; fix"
    with pytest.raises(WeightsError, match=said):
        open_gguf(read_container(tmp_path / "b.gguf"), spec, "bf16")
    folder = write_checkpoint(tmp_path / "c", spec, source)
    Checkpoint.open(folder, spec)
    rewrite(folder, lambda tensors: [t.add_(n.endswith("norm.weight")) for n, t in tensors.items()])
    with pytest.raises(WeightsError, match=r"c: .* norms must be stored as w, .* of 1 \+ w"):
        Checkpoint.open(folder, spec)


def opened(path: Path, spec: Spec, dtype: str = "f32") -> Checkpoint:
    return open_gguf(read_container(path), spec, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_tables(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_forms, "PIECE", 100)
    spec = widened("tiny-ple") if kind in BLOCKS else load_spec("tiny-ple")
    tensors = {n: torch.randn(s) for n, s in text_tensors(spec).items()}
    meant = write_gguf(tmp_path / "a.gguf", spec, tensors, all_of(kind))
    source, ids = opened(tmp_path / "a.gguf", spec), torch.tensor([[3, 511], [0, 3]])
    assert torch.equal(source.tensor(PLE_TABLE).float(), meant[PLE_TABLE])
    assert torch.equal(source.rows(PLE_TABLE, ids).float(), meant[PLE_TABLE][ids])
    if kind in CODED:
        parts = [source.rows(f"{PLE_TABLE}.{part}", ids) for part in ("codes", "scales")]
        assert torch.equal(dequantize_codes(*parts, torch.float32), meant[PLE_TABLE][ids])
    with pytest.raises(InputError, match=r"ids 0 to 512 are not all in 0\.\.511"):
        source.rows(PLE_TABLE, torch.tensor([0, 512]))
    source.release(PLE_TABLE)
    source.close()
    with pytest.raises(WeightsError, match="closed"):
        source.tensor("layers.0.mlp.up_proj.weight")


def as_it_is(name: str, t: Any) -> dict[str, Any]:
    return {name: (t.data, t.tensor_type)}


def rewritten(
    path: Path, to: Path, edit: Callable[[str, Any], dict[str, Any]] = as_it_is, each: int = 0
) -> Path:
    """The file with other tensors: `edit` returns name -> (data, type) for each of its own; in
    files of `each` tensors."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, "gemma4", split_max_tensors=each)
    write_values(writer, values_of(reader))
    for t in reader.tensors:
        for name, (data, kind) in edit(t.name, t).items():
            writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    return to


@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_0"), ("Q4_0", "Q8_0"), ("F16", "F32")])
def test_halves_of_experts_that_lie_apart(tmp_path: Path, kinds: tuple[str, str]) -> None:
    spec = load_spec("tiny-moe")
    tensors = {n: torch.randn(s) for n, s in text_tensors(spec).items()}
    write_gguf(tmp_path / "a.gguf", spec, tensors, all_of("F32"))

    def apart(name: str, t: Any) -> dict[str, Any]:
        if not name.endswith("ffn_gate_up_exps.weight"):
            return as_it_is(name, t)
        halves = np.split(t.data, 2, axis=1)
        to = [GGMLQuantizationType[k] for k in kinds]
        names = [name.replace("gate_up", part) for part in ("gate", "up")]
        return {n: (quants.quantize(h, k), k) for n, h, k in zip(names, halves, to, strict=True)}

    source = opened(rewritten(tmp_path / "a.gguf", tmp_path / "b.gguf", apart), spec)
    name = "layers.0.experts.gate_up_proj"
    halves = [tensors[name].chunk(2, 1)[i].numpy() for i in range(2)]
    want = [
        quants.dequantize(quants.quantize(h, GGMLQuantizationType[k]), GGMLQuantizationType[k])
        for h, k in zip(halves, kinds, strict=True)
    ]
    assert torch.equal(source.tensor(name), torch.from_numpy(np.concatenate(want, 1)))
    assert (name in source.forms) == (kinds == ("Q4_0", "Q4_0"))


def test_other_names(tmp_path: Path) -> None:
    """Norms as other converters call them; a tower in the same file is left out."""
    spec = load_spec("tiny-ple")
    file = bare_file(tmp_path / "a.gguf", spec)
    names = {"post_attention_norm": "attn_post_norm", "post_ffw_norm.": "ffn_post_norm."}

    def rename(own: str, t: Any) -> dict[str, Any]:
        tower = as_it_is("v.patch_embd.weight", t) if own == "rope_freqs.weight" else {}
        for one, other in names.items():
            own = own.replace(one, other)
        return as_it_is(own, t) | tower

    got, want = opened(rewritten(file, tmp_path / "b.gguf", rename), spec), opened(file, spec)
    assert got.ignored == {
        "v.patch_embd.weight": "part of a tower; only text is read from this file"
    }
    assert all(torch.equal(got.tensor(n), want.tensor(n)) for n in text_tensors(spec))


def test_split_files(model: Path, tmp_path: Path) -> None:
    """Any file of them stands for the model; one that is missing, another's or renamed is named."""
    rewritten(model, tmp_path / "tiny.gguf", each=40)
    files = sorted(tmp_path.iterdir())
    count = len(files)
    assert count > 2 and files[0].name == f"tiny-00001-of-{count:05}.gguf"
    want = find_origin(model).open(load_spec("tiny-ple"), (), "f32")
    for file in (files[0], files[-1]):
        origin = find_origin(file)
        assert origin.spec().name == "tiny" and "tokenizer.json" in origin.side_files()
        got = origin.open(origin.spec(), (), "f32")
        assert [p for p, _ in got.files] == files and got.forms == want.forms
        for name in text_tensors(load_spec("tiny-ple")):
            assert torch.equal(got.tensor(name), want.tensor(name))
    options = {"backend": "reference", "link_weights": True, **LIMITS}
    engine = g4ir.build(None, tmp_path / "e", checkpoint=files[1], **options)
    assert engine.param("L0.attn.wq").shape and g4ir.load_engine(tmp_path / "e")
    second = files[1].read_bytes()
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(WeightsError, match=rf"{files[1].name}: split.no: expected 1, found 2"):
        find_origin(files[0]).spec()
    files[1].unlink()
    with pytest.raises(
        WeightsError, match=rf"files of a model, of which {files[1].name} is missing"
    ):
        find_origin(files[0]).spec()
    (tmp_path / "second.gguf").write_bytes(second)
    with pytest.raises(WeightsError, match=rf"second.gguf: is one of {count} files of a"):
        find_origin(tmp_path / "second.gguf").spec()


def test_a_head_of_its_own(tmp_path: Path) -> None:
    spec = load_spec("tiny-dense")
    spec = replace(spec, text=replace(spec.text, tie_word_embeddings=False))
    engine, peer, meant = built(tmp_path, spec, all_of("Q5_0"))
    assert torch.equal(engine.param("head.w"), meant[HEAD])
    assert relative(logits(engine, peer), peer.logits).max() <= peer.budget


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in Q8_0 of tiny-ple; do not alter it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    bare_file(path, load_spec("tiny-ple"), kind="Q8_0")
    return path


def test_a_variant_that_differs(model: Path, tmp_path: Path) -> None:
    words = ("build", "--backend", "reference", "--checkpoint", model, "--out", tmp_path / "e")
    message = refused(*words, "--variant", "tiny-dense")
    assert "text.num_hidden_layers: spec 6, checkpoint 8" in message and model.name in message
    assert "mmproj" in refused(*words, "--media", "image")
    assert command(*words, "--variant", "tiny-ple", "--media", "none").code == 0


def changed(v: dict[str, Any], case: Mapping[str, Any]) -> None:
    """Change metadata as a case of gguf_refused.yaml says."""
    for key, value in case.get("set", {}).items():
        v[key] = np.float64(value) if isinstance(value, float) and value > 1e38 else value
    for key in case.get("drop", ()):
        del v[key]
    for key, to in case.get("rename", {}).items():
        v[to] = v.pop(key)
    for key, value in case.get("append", {}).items():
        v[key].append(value)
    for key in case.get("cut", ()):
        v[key].pop()
    for key, (at, value) in case.get("item", {}).items():
        v[key][at] = value


@pytest.mark.parametrize("name", WRONG)
def test_refused_metadata(tmp_path: Path, name: str) -> None:
    case = WRONG[name]
    file = bare_file(tmp_path / "a.gguf", load_spec("tiny-ple"), lambda v: changed(v, case))
    with pytest.raises(G4Error) as error:
        g4ir.build(None, tmp_path / "e", backend="reference", checkpoint=file)
    assert case["says"] in str(error.value) and str(file) in str(error.value), error.value
    assert not (tmp_path / "e").exists()


def without(part: str) -> Callable[[str, Any], dict[str, Any]]:
    return lambda name, t: {} if part in name else as_it_is(name, t)


def test_nvfp4_with_scales_of_their_own(tmp_path: Path) -> None:
    """One number for a matrix, one for each expert; those of activations are left out."""
    spec, factors = widened("tiny-moe"), {}
    rng = np.random.default_rng(2)

    def edit(name: str, t: Any) -> dict[str, Any]:
        if not name.startswith(("blk.0.ffn_up.", "blk.0.ffn_gate_up_exps.")):
            return as_it_is(name, t)
        columns, *rows = (int(d) for d in t.shape)
        raw = rng.integers(0, 256, (*reversed(rows), columns // 64, 36), dtype=np.uint8)
        raw[..., :4] = rng.integers(1, 0x7F, raw[..., :4].shape)
        factors[name] = rng.uniform(0.5, 2, rows[1:] or 1).astype(np.float32), raw
        base, f32 = name.removesuffix("weight"), GGMLQuantizationType.F32
        nvfp4 = raw.reshape(*raw.shape[:-2], -1), GGMLQuantizationType["NVFP4"]
        one = np.ones(1, np.float32), f32
        return {name: nvfp4, f"{base}scale": (factors[name][0], f32), f"{base}input_scale": one}

    file = rewritten(bare_file(tmp_path / "a.gguf", spec), tmp_path / "b.gguf", edit)
    checkpoint = opened(file, spec)
    assert sorted(checkpoint.ignored) == sorted(f"{n[:-6]}input_scale" for n in factors)
    weights = ("layers.0.mlp.up_proj.weight", "layers.0.experts.gate_up_proj")
    for (name, (factor, raw)), weight in zip(factors.items(), weights, strict=True):
        want = quants.dequantize(raw, GGMLQuantizationType["NVFP4"]).reshape(*raw.shape[:-2], -1)
        want = torch.from_numpy(want) * torch.from_numpy(factor).view(-1, *[1] * (want.ndim - 1))
        torch.testing.assert_close(checkpoint.tensor(weight).float(), want, rtol=2e-7, atol=0)
        assert checkpoint.forms[weight] == Scheme("fp4", 0, "f32"), name

    def zeroed(name: str, t: Any) -> dict[str, Any]:
        return {name: (t.data * (name != "blk.0.ffn_up.scale"), t.tensor_type)}

    zero = rewritten(file, tmp_path / "c.gguf", zeroed)
    with pytest.raises(G4Error, match=r"blk\.0\.ffn_up\.scale.*a scale is 0"):
        opened(zero, spec).tensor(f"{weights[0]}.scales")


def retyped(part: str, kind: str) -> Callable[[str, Any], dict[str, Any]]:
    def edit(name: str, t: Any) -> dict[str, Any]:
        if part not in name:
            return as_it_is(name, t)
        block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        columns, *rows = (int(d) for d in t.shape)
        shape = (*reversed(rows), max(1, columns // block) * nbytes)
        return {name: (np.zeros(shape, np.uint8), GGMLQuantizationType[kind])}

    return edit


def added(name: str) -> Callable[[str, Any], dict[str, Any]]:
    return lambda own, t: (
        as_it_is(own, t) | (as_it_is(name, t) if own == "output_norm.weight" else {})
    )


def same_name(name: str, t: Any) -> dict[str, Any]:
    other = name.replace("post_attention_norm", "attn_post_norm")
    return dict.fromkeys((name, other), (t.data, t.tensor_type))


#: how a case changes tensors: a function of its words, and what is done without any
TENSOR_EDITS: dict[str, Any] = {"without": without, "added": added, "retyped": retyped}
WHOLE = {"same_name": same_name}


@pytest.mark.parametrize("name", TENSORS)
def test_refused_tensors(model: Path, tmp_path: Path, name: str) -> None:
    way, *words = TENSORS[name]["edit"]
    file = rewritten(model, tmp_path / "a.gguf", WHOLE.get(way) or TENSOR_EDITS[way](*words))
    with pytest.raises(G4Error) as error:
        g4ir.build(None, tmp_path / "e", backend="reference", checkpoint=file)
    assert TENSORS[name]["says"] in str(error.value) and "a.gguf" in str(error.value), error.value


def put_half(file: Path, name: str, value: float, at: int = 0) -> None:
    """Write a float16 in place of two bytes of a tensor."""
    start, data = read_container(file).tensors[name].entry.start + at, bytearray(file.read_bytes())
    data[start : start + 2] = np.float16(value).tobytes()
    file.write_bytes(data)


def test_scores_that_are_integers(tmp_path: Path) -> None:
    def change(v: dict[str, Any]) -> None:
        del v["tokenizer.ggml.merges"]
        v["tokenizer.ggml.model"] = "llama"
        v["tokenizer.ggml.scores"] = [7] * len(v["tokenizer.ggml.scores"])

    file = bare_file(tmp_path / "a.gguf", load_spec("tiny-ple"), change)
    with pytest.raises(WeightsError, match=r"scores: expected floats, found 7; fix"):
        g4ir.build(None, tmp_path / "e", backend="reference", checkpoint=file)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (
            "attn_q",
            r"or infinite, or more than 2\^17 times a neighbouring block's.*, or take a file",
        ),
        ("ffn_down", "rows of MXFP4 must be multiples of 64, found 96; fix: take a file in BF16"),
    ],
)
def test_pairs_of_mxfp4(model: Path, tmp_path: Path, tensor: str, says: str) -> None:
    """Whose powers are too far apart; rows without."""

    def edit(name: str, t: Any) -> dict[str, Any]:
        if name != f"blk.2.{tensor}.weight":
            return as_it_is(name, t)
        raw = np.zeros((int(t.shape[1]), int(t.shape[0]) // 32 * 17), np.uint8)
        raw[:, [0, 1, 17]] = 1, 1, 100
        return {name: (raw, GGMLQuantizationType["MXFP4"])}

    file = rewritten(model, tmp_path / "a.gguf", edit)
    with pytest.raises(WeightsError, match=says):
        g4ir.build(None, tmp_path / "e", backend="reference", checkpoint=file)


@pytest.mark.parametrize(("kind", "at"), [("Q8_0", 34), ("Q4_K", 0), ("Q5_K", 176 + 2)])
def test_scales_that_are_not_finite(tmp_path: Path, kind: str, at: int) -> None:
    spec = widened("tiny-ple")
    file = bare_file(tmp_path / "a.gguf", spec, kind=kind)
    put_half(file, "blk.2.attn_q.weight", np.nan, at)
    with pytest.raises(WeightsError, match=r"blk\.2\.attn_q\.weight.*NaN or infinite"):
        g4ir.build(None, tmp_path / "e", backend="reference", checkpoint=file)
