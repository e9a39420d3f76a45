"""Specs: the shipped files, the strict loader, extends, and Hugging Face configs both ways."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from g4ir.errors import SpecError
from g4ir.spec.parts import FULL, SLIDING, Audio, Moe, Ple, UnifiedAudio, UnifiedVision, Vision
from g4ir.spec.record import (
    Spec,
    check_spec,
    diff_specs,
    json_schema,
    load_spec,
    spec_names,
    spec_path,
)
from g4ir.spec.rules import problems, shortest_pattern

RELEASED = ("e2b", "e4b", "12b", "26b-a4b", "31b")
TINY = ("tiny-dense", "tiny-moe", "tiny-ple")

# --- the released configurations, as far as they differ ------------------------------------------

COMMON_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_experts": None,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "attention_k_eq_v": True,
}
SMALL = {  # E2B and E4B
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
    "dtype": "bfloat16",
}
TEXT: dict[str, dict[str, Any]] = {
    "e2b": SMALL
    | {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35}
    | {"num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    "e4b": SMALL
    | {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42}
    | {"num_key_value_heads": 2, "num_kv_shared_layers": 18},
    "12b": {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1}
    | {"model_type": "gemma4_unified_text"},
    "26b-a4b": {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
    | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
    | {"moe_intermediate_size": 704, "dtype": "bfloat16"},
    "31b": {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60}
    | {"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4}
    | {"dtype": "bfloat16"},
}
FULL_LAYERS = {
    "e2b": range(4, 35, 5),
    "e4b": range(5, 42, 6),
    "12b": range(5, 48, 6),
    "26b-a4b": range(5, 30, 6),
    "31b": range(5, 60, 6),
}
VISION_SMALL = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "default_output_length": 280,
    "dtype": "bfloat16",
    "global_head_dim": 64,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_vision",
    "num_attention_heads": 12,
    "num_hidden_layers": 16,
    "num_key_value_heads": 12,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "standardize": False,
    "use_clipped_linears": True,
}
VISION_LARGE = VISION_SMALL | {
    "global_head_dim": 72,
    "head_dim": 72,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "standardize": True,
    "use_clipped_linears": False,
}
AUDIO = {
    "attention_chunk_size": 12,
    "attention_context_left": 13,
    "attention_context_right": 0,
    "attention_invalid_logits_value": -1000000000.0,
    "attention_logit_cap": 50.0,
    "conv_kernel_size": 5,
    "dtype": "bfloat16",
    "gradient_clipping": 10000000000.0,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "model_type": "gemma4_audio",
    "num_attention_heads": 8,
    "num_hidden_layers": 12,
    "output_proj_dims": 1536,
    "residual_weight": 0.5,
    "rms_norm_eps": 1e-06,
    "subsampling_conv_channels": [128, 32],
    "use_clipped_linears": True,
}
UNIFIED_VISION = {
    "model_type": "gemma4_unified_vision",
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
    "model_patch_size": 48,
    "num_soft_tokens": 280,
    "output_proj_dims": 3840,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
}
UNIFIED_AUDIO = {
    "model_type": "gemma4_unified_audio",
    "audio_embed_dim": 640,
    "audio_samples_per_token": 640,
    "hidden_size": 640,
    "output_proj_dims": 640,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
}
TOWERS = {
    "e2b": (VISION_SMALL, AUDIO),
    "e4b": (VISION_SMALL, AUDIO),
    "12b": (UNIFIED_VISION, UNIFIED_AUDIO),
    "26b-a4b": (VISION_LARGE, None),
    "31b": (VISION_LARGE, None),
}
TOP = {
    "dtype": "bfloat16",
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "eoa_token_index": 258883,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "video_token_id": 258884,
}
TOP_GEMMA4 = TOP | {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "vision_soft_tokens_per_image": 280,
    "eos_token_id": [1, 106],
    "eoa_token_id": 258883,
}
TOP_UNIFIED = TOP | {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "model_type": "gemma4_unified",
    "transformers_version": "5.10.0.dev0",
}


def hub_config(name: str) -> dict[str, Any]:
    """The config.json that the hub has for a released variant."""
    text = COMMON_TEXT | TEXT[name]
    kinds = ["sliding_attention"] * text["num_hidden_layers"]
    for i in FULL_LAYERS[name]:
        kinds[i] = "full_attention"
    vision, audio = TOWERS[name]
    parts = {"text_config": text | {"layer_types": kinds}, "vision_config": vision}
    top = TOP_UNIFIED if name == "12b" else TOP_GEMMA4
    return deepcopy(top | parts | {"audio_config": audio})


def anonymous(spec: Spec) -> Spec:
    """Without what a config.json does not hold."""
    return replace(spec, name="x", hub=None)


# --- shipped files --------------------------------------------------------------------------------


def test_names() -> None:
    assert set(spec_names()) >= {*RELEASED, *TINY}
    assert spec_names() == tuple(sorted(spec_names()))


@pytest.mark.parametrize("name", spec_names())
def test_shipped_spec_is_legal_and_round_trips(name: str, tmp_path: Path) -> None:
    spec = load_spec(name)
    assert spec.name == name
    assert check_spec(spec) is spec
    file = tmp_path / "copy.yaml"
    file.write_text(spec.to_yaml())
    again = load_spec(file)
    assert again == spec
    assert again.digest() == spec.digest()
    assert json.loads(json.dumps(spec.to_dict())) == spec.to_dict()
    assert load_spec(spec_path(name)) == spec  # a path works like the name


@pytest.mark.parametrize("name", spec_names())
def test_shipped_spec_follows_the_json_schema(name: str) -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(yaml.safe_load(spec_path(name).read_text()))
    validator.validate(yaml.safe_load(load_spec(name).to_yaml()))


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"hubb": "a/b"},
        {"dtype": "int8"},
        {"text": {"hidden_size": "64"}},
        {"text": {"hidden_size": 0}},
        {"text": {"pattern": ["global"]}},
        {"text": {"sliding": {"windw": 3}}},
        {"extends": 3},
    ],
)
def test_json_schema_refuses(change: dict[str, Any]) -> None:
    good = {"schema": 1, "extends": "tiny-moe"}
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.validate(good)
    assert not validator.is_valid(good | change)


def test_json_schema_wants_a_whole_spec_without_extends() -> None:
    whole = yaml.safe_load(load_spec("tiny-moe").to_yaml())
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.validate(whole)
    for key in ("text", "tokens", "dtype", "schema"):
        assert not validator.is_valid({k: v for k, v in whole.items() if k != key})


def test_digest_follows_every_field() -> None:
    spec = load_spec("tiny-moe")
    changed = [
        replace(spec, dtype="bf16"),
        replace(spec, text=replace(spec.text, rms_norm_eps=1e-5)),
        replace(spec, text=replace(spec.text, sliding=replace(spec.text.sliding, window=9))),
        replace(spec, tokens=replace(spec.tokens, eos=(1, 3))),
    ]
    assert len({s.digest() for s in [spec, *changed]}) == 5
    assert load_spec("tiny-moe").digest() == spec.digest()


@pytest.mark.parametrize("name", RELEASED)
def test_layer_kinds(name: str) -> None:
    spec = load_spec(name)
    kinds = spec.text.layer_types
    assert [i for i, kind in enumerate(kinds) if kind == FULL] == list(FULL_LAYERS[name])
    assert len(spec.layers()) == len(kinds) == TEXT[name]["num_hidden_layers"]


@pytest.mark.parametrize("name, first, sliding, full", [("e2b", 15, 13, 14), ("e4b", 24, 22, 23)])
def test_donors(name: str, first: int, sliding: int, full: int) -> None:
    spec = load_spec(name)
    wide = 2 if name == "e2b" else 1
    for layer in spec.layers():
        donor = sliding if layer.kind == SLIDING else full
        assert layer.donor == (donor if layer.index >= first else None)
        factor = wide if layer.index >= first else 1
        assert layer.intermediate_size == factor * spec.text.intermediate_size


@pytest.mark.parametrize("name", ["12b", "26b-a4b", "31b"])
def test_geometry_of_the_large(name: str) -> None:
    layers = load_spec(name).layers()
    assert all(layer.donor is None for layer in layers)
    assert all(layer.has_moe == (name == "26b-a4b") for layer in layers)
    assert all(layer.attention.k_eq_v == (layer.kind == FULL) for layer in layers)
    assert {layer.attention.head_dim for layer in layers if layer.kind == FULL} == {512}
    assert load_spec(name).text.full.rope.pairs(512) == 64


def test_towers_are_data() -> None:
    kinds = {name: [type(load_spec(name).vision), type(load_spec(name).audio)] for name in RELEASED}
    assert kinds == {
        "e2b": [Vision, Audio],
        "e4b": [Vision, Audio],
        "12b": [UnifiedVision, UnifiedAudio],
        "26b-a4b": [Vision, type(None)],
        "31b": [Vision, type(None)],
    }


def test_tiny_specs_cover_the_structure() -> None:
    dense, moe, ple = (load_spec(name) for name in TINY)
    for spec in (dense, moe, ple):
        assert (spec.hub, spec.text.sliding.window, spec.text.max_position_embeddings) == (
            None,
            8,
            1024,
        )
        assert spec.text.sliding.head_dim != spec.text.full.head_dim
    assert dense.text.full.k_eq_v and dense.text.moe is None and dense.text.ple is None
    assert moe.text.moe == Moe(8, 2, 48)
    assert ple.text.ple == Ple(16, 512) and not ple.text.full.k_eq_v
    assert [layer.donor for layer in ple.layers()] == [None] * 4 + [2, 2, 2, 3]
    assert [layer.intermediate_size for layer in ple.layers()] == [96] * 4 + [192] * 4


def test_reading_specs_imports_no_torch() -> None:
    code = "import sys, g4ir.spec.record, g4ir.model.tensors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- conversion by field type ---------------------------------------------------------------------


def write(tmp_path: Path, text: str, name: str = "mine.yaml") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


def variant(tmp_path: Path, body: str) -> Spec:
    """tiny-moe with a changed text section."""
    indented = "".join(f"  {line}\n" for line in body.splitlines())
    return load_spec(write(tmp_path, f"schema: 1\nextends: tiny-moe\ntext:\n{indented}"))


@pytest.mark.parametrize(
    "written, eps",
    [("1e-6", 1e-6), ("1.0e-06", 1e-6), ("1E-3", 1e-3), (".5", 0.5), ("1", 1.0), ("+2.", 2.0)],
)
def test_numbers_that_yaml_reads_as_strings(tmp_path: Path, written: str, eps: float) -> None:
    got = variant(tmp_path, f"rms_norm_eps: {written}").text.rms_norm_eps
    assert got == eps and isinstance(got, float)


@pytest.mark.parametrize("written, value", [("on", True), ("No", False), ("TRUE", True)])
def test_booleans(tmp_path: Path, written: str, value: bool) -> None:
    assert variant(tmp_path, f"use_double_wide_mlp: {written}").text.use_double_wide_mlp is value


def test_words_stay_words(tmp_path: Path) -> None:
    file = write(tmp_path, "schema: 1\nextends: tiny-moe\nname: on\n")
    assert load_spec(file).name == "on"


@pytest.mark.parametrize("written", ["262_144", "+262144", "262144"])
def test_integers(tmp_path: Path, written: str) -> None:
    assert variant(tmp_path, f"vocab_size: {written}").text.vocab_size == 262144


@pytest.mark.parametrize("long, short", [("bfloat16", "bf16"), ("float16", "f16"), ("f32", "f32")])
def test_dtype_spellings(tmp_path: Path, long: str, short: str) -> None:
    assert load_spec(write(tmp_path, f"schema: 1\nextends: e2b\ndtype: {long}\n")).dtype == short


def test_patterns_compare_by_what_they_mean(tmp_path: Path) -> None:
    whole = variant(tmp_path, "pattern: [sliding, sliding, full, sliding, sliding, full]")
    short = variant(tmp_path, "pattern: [sliding, sliding, full]")
    assert whole == short
    assert whole.text.pattern == (SLIDING, SLIDING, FULL)


def test_pattern_is_cut(tmp_path: Path) -> None:
    text = variant(tmp_path, "num_hidden_layers: 2\npattern: [sliding, full, full, sliding]").text
    assert text.layer_types == (SLIDING, FULL)


@pytest.mark.parametrize(
    "kinds, pattern",
    [("f", "f"), ("ff", "f"), ("sf", "sf"), ("ssfssfsf", "ssfssfsf"), ("ssfss", "ssf")],
)
def test_shortest_pattern(kinds: str, pattern: str) -> None:
    assert shortest_pattern(tuple(kinds)) == tuple(pattern)


def test_last_sliding_layer_becomes_full(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        spec = variant(tmp_path, "pattern: [sliding]")
    assert spec.text.layer_types == (SLIDING,) * 5 + (FULL,)
    assert "becomes a full one" in caplog.text


def test_moe_on_all_layers_is_moe(tmp_path: Path) -> None:
    assert variant(tmp_path, "moe: {layers: [0, 1, 2, 3, 4, 5]}") == replace(
        load_spec("tiny-moe"), name="mine"
    )
    some = variant(tmp_path, "moe: {layers: [1, 5]}")
    assert [layer.has_moe for layer in some.layers()] == [False, True, False, False, False, True]


def test_everything_at_once_is_legal(tmp_path: Path) -> None:
    spec = variant(
        tmp_path,
        """num_hidden_layers: 8
pattern: [sliding, sliding, sliding, full]
num_kv_shared_layers: 4
use_double_wide_mlp: true
attn_logit_softcapping: 20
ple: {dim: 8, vocab_size: 300}
sliding: {k_eq_v: true, rope: {kind: proportional, rotary_fraction: 0.5, factor: 2}}
tie_word_embeddings: false""",
    )
    assert spec.text.moe and spec.text.ple and spec.layers()[-1].donor == 3
    assert spec.text.sliding.rope.factor == 2.0


# --- extends --------------------------------------------------------------------------------------


def test_extends_overrides_deeply(tmp_path: Path) -> None:
    file = write(
        tmp_path, "schema: 1\nextends: 26b-a4b\nvision: null\ntext: {moe: {num_experts: 64}}\n"
    )
    base, spec = load_spec("26b-a4b"), load_spec(file)
    assert [(key, b) for key, _, b in diff_specs(base, spec)][:3] == [
        ("name", "mine"),
        ("text.moe.num_experts", 64),
        ("hub", None),  # the weights of another model
    ]
    assert spec.vision is None


def test_extends_a_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path, "schema: 1\nextends: e2b\ndtype: f32\n", "base.yaml")
    assert load_spec(write(tmp_path, "schema: 1\nextends: base.yaml\n")).dtype == "f32"


@pytest.mark.parametrize(
    ("base", "own", "line", "said"),
    [
        ("tiny-dense", "  num_attention_heads: 3", 4, "text.sliding.num_key_value_heads: 2 does"),
        ("tiny-dense", "  vocab_size: 1", 4, "tokens.bos: 2 is outside"),
        ("tiny-moe", "  moe:\n    num_experts: 1", 5, "text.moe.top_k_experts"),
        ("tiny-ple", "  num_hidden_layers: 2", 4, "text.num_kv_shared_layers"),
    ],
)
def test_a_rule_is_broken_where_this_file_breaks_it(
    tmp_path: Path, base: str, own: str, line: int, said: str
) -> None:
    """Not in the file that it extends, which holds the other key and is right on its own."""
    file = write(tmp_path, f"schema: 1\nextends: {base}\ntext:\n{own}\n", "mine.yaml")
    with pytest.raises(SpecError, match=rf"mine\.yaml:{line}: {re.escape(said)}"):
        load_spec(file)


def test_extends_cycle(tmp_path: Path) -> None:
    write(tmp_path, "schema: 1\nextends: b.yaml\n", "a.yaml")
    write(tmp_path, "schema: 1\nextends: a.yaml\n", "b.yaml")
    with pytest.raises(SpecError, match=r"b\.yaml:2: extends: .*cut the chain"):
        load_spec(tmp_path / "a.yaml")


def test_extends_long_chain(tmp_path: Path) -> None:
    for i in range(12):
        write(tmp_path, f"schema: 1\nextends: s{i + 1}.yaml\n", f"s{i}.yaml")
    with pytest.raises(SpecError, match="too deep"):
        load_spec(tmp_path / "s0.yaml")


def test_error_names_the_line_of_the_override(tmp_path: Path) -> None:
    file = write(tmp_path, "schema: 1\nextends: e2b\n\ntext:\n  num_kv_shared_layers: 35\n")
    with pytest.raises(SpecError, match=r"mine\.yaml:5: text\.num_kv_shared_layers: "):
        load_spec(file)


def test_error_in_an_inherited_value_names_that_file(tmp_path: Path) -> None:
    write(tmp_path, "schema: 1\nextends: e2b\ntext:\n  hidden_size: x\n", "base.yaml")
    file = write(tmp_path, "schema: 1\nextends: base.yaml\n")
    with pytest.raises(SpecError, match=r"base\.yaml:4: text\.hidden_size: expected an integer"):
        load_spec(file)


# --- refusals -------------------------------------------------------------------------------------

# (line to change in tiny-moe with its line number below, new text, expected parts of the message)
WHOLE = """schema: 1
model_type: gemma4
dtype: f32
text:
  vocab_size: 512
  hidden_size: 64
  intermediate_size: 96
  num_hidden_layers: 6
  num_attention_heads: 4
  pattern: [sliding, sliding, full]
  num_kv_shared_layers: 0
  sliding:
    head_dim: 32
    num_key_value_heads: 2
    window: 8
    rope: {kind: default, theta: 10000.0}
  full:
    head_dim: 64
    num_key_value_heads: 1
    k_eq_v: true
    rope: {kind: proportional, theta: 1000000.0, rotary_fraction: 0.25}
  moe: {num_experts: 8, top_k_experts: 2, intermediate_size: 48}
  max_position_embeddings: 1024
  rms_norm_eps: 1e-6
tokens: {bos: 2, eos: [1], pad: 0}
"""

REFUSALS = [
    ("schema: 1", "schema: 2", ":1: schema: ", "schema 1"),
    ("schema: 1\n", "", "schema: is missing"),
    ("schema: 1", "schema: one", ":1: schema: expected an integer"),
    ("dtype: f32", "dtyp: f32", ":3: dtyp: unknown key", "did you mean dtype"),
    ("dtype: f32", "dtype: bf61", ":3: dtype: must be", "did you mean bf16"),
    ("model_type: gemma4\n", "", "model_type: is missing"),
    ("model_type: gemma4", "model_type: gemma3", ":2: model_type: must be", "mean gemma4"),
    ("tokens: {bos: 2, eos: [1], pad: 0}\n", "", "tokens: is missing"),
    ("tokens: {bos: 2, eos: [1], pad: 0}", "tokens: []", ":25: tokens: expected a mapping"),
    ("eos: [1]", "eos: 1", ":25: tokens.eos: expected a list"),
    ("eos: [1]", "eos: [1, x]", ":25: tokens.eos[1]: expected an integer"),
    ("eos: [1]", "eos: [1, 512]", ":25: tokens.eos: 512 is outside the vocabulary", "0..511"),
    ("pad: 0", "pad: 600", ":25: tokens.pad: 600 is outside"),
    ("pad: 0", "image: 258880", ":25: tokens.image: 258880 is outside"),
    ("pad: 0", "pad: -1", ":25: tokens.pad: must be at least 0"),
    ("vocab_size: 512", "vocab_size: 0", ":5: text.vocab_size: must be at least 1"),
    ("vocab_size: 512", "vocabsize: 512", ":5: text.vocabsize: unknown", "did you mean vocab_size"),
    ("vocab_size: 512", "vocab_size: 1e3", ":5: text.vocab_size: expected an integer"),
    ("vocab_size: 512", "vocab_size: 5.0", ":5: text.vocab_size: expected an integer"),
    ("vocab_size: 512", "vocab_size: '512'", "text.vocab_size", "leave the quotes out"),
    ("vocab_size: 512", "vocab_size: true", ":5: text.vocab_size: expected an integer"),
    ("vocab_size: 512", "vocab_size:", ":5: text.vocab_size: expected an integer, found nothing"),
    ("vocab_size: 512", "vocab_size: [512]", "text.vocab_size: expected an integer, found a list"),
    ("vocab_size: 512", "vocab_size: " + "9" * 5000, ":5: text.vocab_size: expected an integer"),
    ("vocab_size: 512", "vocab_size: 99999999999", ":5: text.vocab_size: must be at most"),
    (
        "vocab_size: 512",
        "vocab_size: 512\n  vocab_size: 512",
        ":6: vocab_size: is given twice",
        "line 5",
    ),
    ("hidden_size: 64", "hidden_size: &a 64", ":6: uses an anchor or alias"),
    ("hidden_size: 64", "hidden_size: *a", ":6: uses an anchor or alias"),
    ("hidden_size: 64", "hidden_size: !!int 64", ":6: has the tag"),
    ("hidden_size: 64", "hidden_size: !!python/object:os.system x", ":6: has the tag"),
    ("hidden_size: 64", "<<: {a: 1}", ":6: uses a merge key"),
    ("hidden_size: 64", "? [a]\n  : 1", ":6: a key must be a plain word"),
    ("hidden_size: 64", "hidden_size: 64 : 3", "is not valid YAML"),
    ("hidden_size: 64", "hidden_size: 64\n---\na: 1", "has a second document"),
    ("num_hidden_layers: 6", "num_hidden_layers: 100000", ":8: text.num_hidden_layers: must be at"),
    (
        "num_attention_heads: 4",
        "num_attention_heads: 5",
        ":14: text.sliding.num_key_value_heads",
        "does not divide text.num_attention_heads 5",
    ),
    ("num_attention_heads: 4", "attention_bias: true", ":9: text.attention_bias: unknown key"),
    ("[sliding, sliding, full]", "[]", ":10: text.pattern: must have"),
    ("[sliding, sliding, full]", "[slidng]", ":10: text.pattern[0]: must be", "mean sliding"),
    ("[sliding, sliding, full]", "sliding", ":10: text.pattern: expected a list"),
    (
        "num_kv_shared_layers: 0",
        "num_kv_shared_layers: 6",
        ":11: text.num_kv_shared_layers: 6 of 6",
        "at most 5",
    ),
    (
        "num_kv_shared_layers: 0",
        "num_kv_shared_layers: 4",
        ":11: text.num_kv_shared_layers",
        "no full layer below 2",
        "layer 2 needs one",
    ),
    ("num_kv_shared_layers: 0", "num_kv_shared_layers: -1", ":11: text.num_kv_shared_layers: must"),
    ("head_dim: 32", "head_dim: 33", ":13: text.sliding.head_dim: 33 is odd"),
    ("    head_dim: 32\n", "", "text.sliding.head_dim: is missing"),
    ("    window: 8\n", "", ":12: text.sliding.window: is missing"),
    ("window: 8", "window: 0", ":15: text.sliding.window: must be at least 1"),
    ("k_eq_v: true", "window: 8", ":20: text.full.window: a full layer has no window"),
    ("k_eq_v: true", "k_eq_v: 1", ":20: text.full.k_eq_v: expected true or false"),
    ("kind: default", "kind: linear", ":16: text.sliding.rope.kind: must be default"),
    ("theta: 10000.0", "theta: 0", ":16: text.sliding.rope.theta: must be above 0"),
    ("theta: 10000.0", "theta: -1", ":16: text.sliding.rope.theta: must be above 0"),
    ("theta: 10000.0", "theta: .nan", ":16: text.sliding.rope.theta: expected a finite number"),
    ("theta: 10000.0", "theta: 1e999", ":16: text.sliding.rope.theta: expected a finite number"),
    ("theta: 10000.0", "theta: 1e4, factor: 2", ":16: text.sliding.rope.factor: has no effect"),
    (
        "theta: 10000.0",
        "theta: 1e4, rotary_fraction: 0.5",
        ":16: text.sliding.rope.rotary_fraction",
        "has no effect",
    ),
    ("rotary_fraction: 0.25", "rotary_fraction: 0", ":21: text.full.rope.rotary_fraction: must be"),
    ("rotary_fraction: 0.25", "rotary_fraction: 1.5", "rotary_fraction: must be at most 1"),
    ("rotary_fraction: 0.25", "rotary_fraction: 0.01", "rotates no pair"),
    ("rotary_fraction: 0.25", "factor: 0", ":21: text.full.rope.factor: must be above 0"),
    ("top_k_experts: 2", "top_k_experts: 9", ":22: text.moe.top_k_experts: 9 of 8 experts"),
    ("top_k_experts: 2, ", "", ":22: text.moe.top_k_experts: is missing"),
    ("top_k_experts: 2", "num_experts_per_tok: 2", ":22: text.moe.num_experts_per_tok: unknown"),
    ("num_experts: 8", "num_experts: 8, layers: [6]", ":22: text.moe.layers: 6 is not a layer"),
    ("num_experts: 8", "num_experts: 8, layers: []", ":22: text.moe.layers: must be rising"),
    ("num_experts: 8", "num_experts: 8, layers: [2, 1]", ":22: text.moe.layers: must be rising"),
    ("rms_norm_eps: 1e-6", "rms_norm_eps: 0", ":24: text.rms_norm_eps: must be above 0"),
    ("rms_norm_eps: 1e-6", "final_logit_softcapping: 0", ":24: text.final_logit_softcapping: must"),
    ("rms_norm_eps: 1e-6", "use_bidirectional_attention: all", ":24: text.use_bidirectional_att"),
    ("rms_norm_eps: 1e-6", "hidden_activation: relu", ":24: text.hidden_activation: must be gelu"),
    ("rms_norm_eps: 1e-6", "ple: {dim: 0, vocab_size: 4}", ":24: text.ple.dim: must be at least 1"),
    ("dtype: f32", "dtype: f32\nname: a/b", ":4: name: must look like my-variant"),
    ("dtype: f32", "dtype: f32\nhub: ../x", ":4: hub: must look like google/"),
    ("dtype: f32", "dtype: f32\nextends: e2c", ":4: extends: no spec is called 'e2c'", "mean e2b"),
    ("dtype: f32", "dtype: f32\nextends: nothere.yaml", "nothere.yaml: cannot be read"),
    ("dtype: f32", "dtype: f32\nvision: {mm_embed_dim: 4}", ":4: vision.mm_embed_dim: unknown"),
    ("dtype: f32", "dtype: f32\nprefixes: {text: x}", ":4: prefixes.text: expected a list"),
    (
        "dtype: f32",
        "dtype: f32\nprefixes: {embed_vision: []}",
        ":4: prefixes.embed_vision: must have 1 to 16 items, has 0",
    ),
]


def test_the_base_of_the_refusals_loads(tmp_path: Path) -> None:
    assert load_spec(write(tmp_path, WHOLE)).text.moe == Moe(8, 2, 48)


@pytest.mark.parametrize("case", REFUSALS, ids=[f"{c[0]}->{c[1][:30]}" for c in REFUSALS])
def test_refusal(case: tuple[str, ...], tmp_path: Path) -> None:
    old, new, *parts = case
    assert WHOLE.count(old) >= 1
    with pytest.raises(SpecError) as caught:
        load_spec(write(tmp_path, WHOLE.replace(old, new, 1)))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    for part in (".yaml", *parts):
        assert part in message


GOOD_VISION = "vision: {hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, head_dim: 8, "
VISION_REFUSALS = [
    (
        "gemma4",
        GOOD_VISION + "num_attention_heads: 3, num_key_value_heads: 2, patch_size: 2, "
        "pooling_kernel_size: 1, position_embedding_size: 4}",
        "vision.num_key_value_heads",
    ),
    (
        "gemma4",
        GOOD_VISION.replace("head_dim: 8", "head_dim: 6") + "num_attention_heads: 1, "
        "num_key_value_heads: 1, patch_size: 2, pooling_kernel_size: 1, "
        "position_embedding_size: 4}",
        "vision.head_dim: 6 is not a multiple of 4",
    ),
    (
        "gemma4",
        "audio: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 3, "
        "output_proj_dims: 4}",
        "audio.num_attention_heads: 3 does not divide",
    ),
    (
        "gemma4",
        "audio: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1, "
        "output_proj_dims: 4, subsampling_conv_channels: [1]}",
        "must have 2 items, has 1",
    ),
    ("gemma4_unified", "vision: {mm_embed_dim: 4, mm_posemb_size: 4}", "vision.output_proj_dims"),
]


@pytest.mark.parametrize("model_type, line, part", VISION_REFUSALS)
def test_tower_refusal(model_type: str, line: str, part: str, tmp_path: Path) -> None:
    text = WHOLE.replace("model_type: gemma4", f"model_type: {model_type}") + line + "\n"
    with pytest.raises(SpecError, match=part) as caught:
        load_spec(write(tmp_path, text))
    assert ":26: " in str(caught.value)


@pytest.mark.parametrize(
    "data, part",
    [
        (b"", "must be a mapping"),
        (b"- 1\n", "must be a mapping"),
        (b"just text", "must be a mapping"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"schema: 1\n\x00", "not valid YAML"),
        (b"a" * 70_000, "larger than"),
        (b"[" * 60_000, "nested deeper"),
        (b"{a: " * 10_000, "nested deeper"),
        (b"- " * 20_000, "nested deeper"),
        (b"a: [" + b"1," * 20_000 + b"]", "more than"),
        (b"a: &a [x]\nb: *a\n", "anchor"),
        (b'a: "\\UFFFFFFFF"\n', "not valid YAML"),
        (b'"\\uD800": 1\nschema: 1\n', "unknown key"),
        (b"%YAML 9." + b"9" * 5000 + b"\n---\na: 1\n", "not valid YAML"),
        (b"a: 'unclosed", "not valid YAML"),
        (b"schema: 1\n\t- x", "not valid YAML"),
    ],
)
def test_bytes_that_are_no_spec(data: bytes, part: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(data)
    with pytest.raises(SpecError, match=part) as caught:
        load_spec(file)
    str(caught.value).encode()  # printable
    assert "\n" not in str(caught.value)


def test_paths_that_hold_no_spec(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.yaml", str(tmp_path / "a\0b.yaml")):
        with pytest.raises(SpecError, match="cannot be read"):
            load_spec(path)


@pytest.mark.parametrize(
    "name, part", [("e2", "did you mean e2b"), ("E4B", "e4b"), ("zzzz", "one of 12b"), ("", "path")]
)
def test_unknown_name(name: str, part: str) -> None:
    with pytest.raises(SpecError, match=part):
        load_spec(name)


def test_check_spec_guards_specs_built_in_python() -> None:
    spec = load_spec("tiny-ple")
    text = spec.text
    wrong: list[tuple[Any, str]] = [
        (replace(spec, dtype="bfloat16"), "dtype: must be bf16"),
        (replace(spec, text=replace(text, hidden_size=0)), "text.hidden_size"),
        (replace(spec, text=replace(text, hidden_size=6.5)), "text.hidden_size: must be int"),
        (replace(spec, text=replace(text, hidden_size=True)), "text.hidden_size: must be int"),
        (replace(spec, text=replace(text, rms_norm_eps=float("nan"))), "text.rms_norm_eps"),
        (replace(spec, text=replace(text, pattern=("globl",))), "text.pattern"),
        (replace(spec, text=replace(text, num_kv_shared_layers=8)), "text.num_kv_shared_layers"),
        (replace(spec, vision=UnifiedVision(8, 8)), "vision: a gemma4 spec has no UnifiedVision"),
        (replace(spec, tokens=None), "tokens: must be Tokens"),
    ]
    for bad, part in wrong:
        with pytest.raises(SpecError, match=part):
            check_spec(bad)


def test_diff_names_flat_keys() -> None:
    small, large = load_spec("e2b"), load_spec("e4b")
    keys = [key for key, _, _ in diff_specs(small, large)]
    assert "text.hidden_size" in keys and "text.sliding.num_key_value_heads" in keys
    assert not any(key.startswith(("vision", "audio", "tokens")) for key in keys)
    assert diff_specs(small, small) == []
    gone = {k: (a, b) for k, a, b in diff_specs(load_spec("31b"), load_spec("26b-a4b"))}
    assert gone["text.moe.num_experts"] == (None, 128)


# --- Hugging Face ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RELEASED)
def test_hub_config_is_the_shipped_spec(name: str) -> None:
    spec = load_spec(name)
    assert diff_specs(Spec.from_hf(hub_config(name), name=name), replace(spec, hub=None)) == []


@pytest.mark.parametrize("name", spec_names())
def test_hf_round_trip(name: str, tmp_path: Path) -> None:
    spec = load_spec(name)
    (tmp_path / "config.json").write_text(json.dumps(spec.to_hf()))
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path), spec.to_hf()):
        again = Spec.from_hf(source, name=name)
        assert diff_specs(again, replace(spec, hub=None)) == []
    assert Spec.from_hf(tmp_path / "config.json").name == Spec.from_hf(tmp_path).name


def test_reading_does_not_change_the_dict() -> None:
    config = hub_config("e2b")
    before = deepcopy(config)
    Spec.from_hf(config)
    assert config == before


def saved_by_transformers(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config.json that transformers writes after it has read this one."""
    from transformers import AutoConfig

    kind = config["model_type"]
    AutoConfig.for_model(
        kind, **{k: v for k, v in config.items() if k != "model_type"}
    ).save_pretrained(folder)
    out: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return out


@pytest.mark.parametrize("name", spec_names())
def test_transformers_reads_and_writes_what_we_do(name: str, tmp_path: Path) -> None:
    spec = load_spec(name)
    for i, config in enumerate([spec.to_hf(), *([hub_config(name)] if name in RELEASED else [])]):
        saved = saved_by_transformers(config, tmp_path / str(i))
        text = saved.get("text_config", saved)
        assert "per_layer_config" in text and "global_head_dim" not in text
        assert diff_specs(Spec.from_hf(saved, name=name), replace(spec, hub=None)) == []


@pytest.mark.parametrize("name", RELEASED)
def test_transformers_resolves_the_same_geometry(name: str) -> None:
    from transformers import AutoConfig

    spec, config = load_spec(name), load_spec(name).to_hf()
    hf = AutoConfig.for_model(config.pop("model_type"), **config).text_config
    for layer in spec.layers():
        other = hf.per_layer_config[layer.index]
        assert other.head_dim == layer.attention.head_dim
        assert other.num_key_value_heads == layer.attention.num_key_value_heads
    assert hf.layer_types == [f"{kind}_attention" for kind in spec.text.layer_types]
    assert hf.final_logit_softcapping == spec.text.final_logit_softcapping


def test_defaults_of_missing_keys_are_those_of_transformers(tmp_path: Path) -> None:
    for kind in ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"):
        bare: dict[str, Any] = {"model_type": kind}
        if not kind.endswith("_text"):
            bare |= {"vision_config": {}, "audio_config": {}}
        saved = saved_by_transformers(deepcopy(bare), tmp_path / kind)
        assert diff_specs(Spec.from_hf(bare, "x"), Spec.from_hf(saved, "x")) == []


def test_kv_heads_of_full_layers_without_k_eq_v(tmp_path: Path) -> None:
    spec = load_spec("tiny-ple")  # 2 and 1 heads, no K=V: only per_layer_config can say it
    config = spec.to_hf()
    assert config["per_layer_config"] == {
        "3": {"head_dim": 64, "num_key_value_heads": 1},
        "7": {"head_dim": 64, "num_key_value_heads": 1},
    }
    assert Spec.from_hf(config).text.full.num_key_value_heads == 1


def tiny_config(**changes: Any) -> dict[str, Any]:
    return load_spec("tiny-moe").to_hf() | changes


def test_global_kv_heads_count_only_with_k_eq_v() -> None:
    config = tiny_config(attention_k_eq_v=False)
    assert config["num_global_key_value_heads"] == 1
    full = Spec.from_hf(config).text.full
    assert (full.num_key_value_heads, full.k_eq_v) == (2, False)


def test_older_spellings() -> None:
    config = tiny_config(torch_dtype="bfloat16", num_experts_per_tok=3)
    del config["dtype"], config["top_k_experts"]
    spec = Spec.from_hf(config)
    assert spec.dtype == "bf16" and spec.text.moe and spec.text.moe.top_k_experts == 3
    assert Spec.from_hf(tiny_config(global_head_dim=None)).text.full.head_dim == 32
    homogeneous = tiny_config(per_layer_config={})
    assert Spec.from_hf(homogeneous).text.full.head_dim == 32


def test_rope_spellings(caplog: Any) -> None:
    rope = tiny_config()["rope_parameters"]
    rope["full_attention"] = {"type": "proportional", "rope_theta": 1e6, "factor": 4.0}
    spec = Spec.from_hf(tiny_config(rope_parameters=rope))
    assert (spec.text.full.rope.rotary_fraction, spec.text.full.rope.factor) == (1.0, 4.0)
    rope["full_attention"] = {"rope_type": "default", "rope_theta": 1e6, "factor": 4.0}
    with caplog.at_level(logging.WARNING):
        assert Spec.from_hf(tiny_config(rope_parameters=rope)).text.full.rope.factor is None
    assert "ignores" in caplog.text
    default = Spec.from_hf(tiny_config(rope_parameters=None)).text
    assert (default.sliding.rope.theta, default.full.rope.rotary_fraction) == (1e4, 0.25)


def test_last_sliding_layer_of_a_config(caplog: Any) -> None:
    kinds = ["sliding_attention"] * 6
    with caplog.at_level(logging.WARNING):
        spec = Spec.from_hf(tiny_config(layer_types=kinds))
    assert spec.text.layer_types == (SLIDING,) * 5 + (FULL,) and "full one" in caplog.text


def test_per_layer_config_of_a_forced_last_layer() -> None:
    config = tiny_config(
        layer_types=["sliding_attention"] * 6,
        per_layer_config={"5": {"head_dim": 64, "num_key_value_heads": 1}},
    )
    assert Spec.from_hf(config).text.full.head_dim == 64


def test_eos_and_media_ids() -> None:
    config = hub_config("12b")
    assert Spec.from_hf(config).tokens.eos == (1,)
    config["eos_token_id"] = [1, 106, 50]
    assert Spec.from_hf(config).tokens.eos == (1, 106, 50)
    config["image_token_id"] = None
    assert Spec.from_hf(config).tokens.image is None
    text_only = tiny_config(eos_token_id=None, pad_token_id=None)
    assert Spec.from_hf(text_only).tokens.eos == () and Spec.from_hf(text_only).tokens.pad is None


def test_composite_without_towers_drops_media_ids_outside_the_vocabulary() -> None:
    config = {"model_type": "gemma4", "text_config": load_spec("tiny-moe").to_hf()}
    config["text_config"].pop("architectures")
    spec = Spec.from_hf(config)
    assert spec.tokens.image is None and spec.vision is None
    config["vision_config"] = {}
    with pytest.raises(SpecError, match=r"tokens\.image: 258880 is outside the vocabulary"):
        Spec.from_hf(config)


def test_soft_tokens_of_either_place() -> None:
    config = hub_config("e2b")
    del config["vision_config"]["default_output_length"]
    config["vision_soft_tokens_per_image"] = 140
    vision = Spec.from_hf(config).vision
    assert isinstance(vision, Vision) and vision.default_output_length == 140


def nested(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split("/")
    part = config
    for key in parents:
        part = part[key]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return config


HF_REFUSALS: list[tuple[str, Any, str]] = [
    ("model_type", "gemma3", "model_type: 'gemma3' is not one of"),
    ("model_type", "gemma4_assistant", "model_type: 'gemma4_assistant'"),
    ("model_type", ..., "model_type: is missing"),
    ("model_type", 4, "model_type: '4' is not one of"),
    ("text_config", 5, "text_config: expected an object"),
    ("text_config/model_type", "gemma3_text", "text_config.model_type: 'gemma3_text'"),
    ("text_config/attention_bias", True, "text_config.attention_bias: 'True' is not supported"),
    ("text_config/attn_logit_softcapping", 50.0, "text_config.attn_logit_softcapping"),
    ("text_config/quantization_config", {"bits": 4}, "text_config.quantization_config"),
    ("quantization_config", {"quant_method": "fp8"}, "quantization_config: "),
    ("text_config/chunk_size_feed_forward", 4, "text_config.chunk_size_feed_forward"),
    ("text_config/rope_scaling", {"factor": 8}, "text_config.rope_scaling: unknown key"),
    ("text_config/rope_theta", 1e4, "text_config.rope_theta: unknown key"),
    (
        "text_config/hiden_size",
        4,
        "text_config.hiden_size: unknown key",
    ),
    ("surprise", 1, "surprise: unknown key"),
    ("vision_config/surprise", 1, "vision_config.surprise: unknown key"),
    ("audio_config/surprise", 1, "audio_config.surprise: unknown key"),
    ("text_config/hidden_size", "1536", "text_config.hidden_size: expected an integer"),
    ("text_config/hidden_size", 1536.0, "text_config.hidden_size: expected an integer"),
    ("text_config/hidden_size", None, "text_config.hidden_size: expected an integer"),
    ("text_config/hidden_size", True, "text_config.hidden_size: expected an integer"),
    ("text_config/hidden_size", 10**40, "text_config.hidden_size: expected an integer"),
    ("text_config/hidden_size", -1, "text_config.hidden_size: must be at least 1"),
    ("text_config/rms_norm_eps", 0.0, "text_config.rms_norm_eps: must be above 0"),
    ("text_config/rms_norm_eps", float("nan"), "text_config.rms_norm_eps: expected a finite"),
    ("text_config/hidden_activation", "silu", "text_config.hidden_activation: must be"),
    ("text_config/use_bidirectional_attention", "all", "use_bidirectional_attention: 'all'"),
    ("text_config/layer_types", ["full_attention"], "layer_types: has 1 entries for num_hidden"),
    ("text_config/layer_types", ["chunked_attention"] * 35, "'chunked_attention' is not one of"),
    ("text_config/layer_types", "full_attention", "text_config.layer_types: expected a list"),
    ("text_config/num_hidden_layers", 10**9, "text_config.num_hidden_layers: must be at most"),
    ("text_config/num_kv_shared_layers", 35, "text.num_kv_shared_layers: 35 of 35"),
    ("text_config/num_kv_shared_layers", 31, "no full layer below 4"),
    ("text_config/num_key_value_heads", 3, "text.sliding.num_key_value_heads (num_key"),
    ("text_config/global_head_dim", 511, "text.full.head_dim (global_head_dim): 511 is odd"),
    ("text_config/sliding_window", None, "text.sliding.window (sliding_window): is missing"),
    ("text_config/sliding_window", 0, "text_config.sliding_window: must be at least 1"),
    ("text_config/rope_parameters", {"rope_type": "default", "rope_theta": 1.0}, "is missing; add"),
    ("text_config/rope_parameters/full_attention/rope_type", "yarn", "'yarn' is not supported"),
    ("text_config/rope_parameters/full_attention/rope_theta", ..., "rope_theta: is missing"),
    ("text_config/rope_parameters/full_attention/beta_fast", 32, "beta_fast: unknown key"),
    ("text_config/rope_parameters/full_attention/partial_rotary_factor", 2.0, "must be at most"),
    ("text_config/rope_parameters/full_attention", None, "full_attention: is missing"),
    ("text_config/per_layer_config", {"40": {"head_dim": 4}}, "config.40: is not a layer"),
    ("text_config/per_layer_config", {"4": {"head_dim": 4}}, "full layers differ"),
    ("text_config/per_layer_config", {"4": {"rms_norm_eps": 1}}, "4.rms_norm_eps: unknown key"),
    ("text_config/per_layer_config", {"4": {"skip": ["mlp"]}}, "no layer part can be left out"),
    ("text_config/per_layer_config", {"4": 7}, "per_layer_config.4: expected an object"),
    ("text_config/per_layer_config", [1], "per_layer_config: expected an object"),
    ("text_config/enable_moe_block", True, "text_config.num_experts: is missing"),
    ("text_config/hidden_size_per_layer_input", -3, "hidden_size_per_layer_input: must be"),
    ("text_config/eos_token_id", "x", "eos"),
    ("eos_token_id", [1, -1], "eos_token_id[1]: must be at least 0"),
    ("eos_token_id", 300000, "tokens.eos: 300000 is outside the vocabulary"),
    ("eoa_token_id", 5, "eoa_token_index: contradicts another name"),
    ("image_token_id", "x", "image_token_id: expected an integer"),
    ("dtype", "int8", "dtype: 'int8' is not one of"),
    ("vision_soft_tokens_per_image", 70, "contradicts vision_config.default_output_length"),
    ("vision_config/rope_parameters/rope_type", "yarn", "vision_config.rope_parameters.rope_type"),
    ("vision_config/global_head_dim", 32, "vision_config.global_head_dim: '32'"),
    ("vision_config/attention_bias", True, "vision_config.attention_bias"),
    ("vision_config/model_type", "siglip", "vision_config.model_type"),
    ("vision_config", [], "vision_config: expected an object"),
    ("audio_config/subsampling_conv_channels", [1, 2, 3], "must have 2 items"),
    ("audio_config/num_attention_heads", 7, "audio.num_attention_heads: 7 does not divide"),
]


@pytest.mark.parametrize("path, value, part", HF_REFUSALS, ids=[str(c[:2]) for c in HF_REFUSALS])
def test_hf_refusal(path: str, value: Any, part: str) -> None:
    config = hub_config("e2b")
    if path.endswith("eos_token_id") and "/" in path:
        del config["eos_token_id"]
    with pytest.raises(SpecError) as caught:
        Spec.from_hf(nested(config, path, value))
    assert part in str(caught.value)


UNIFIED_REFUSALS: list[tuple[str, Any, str]] = [
    ("text_config/enable_moe_block", True, "gemma4_unified has no experts"),
    ("text_config/hidden_size_per_layer_input", 4, "gemma4_unified has no per-layer embeddings"),
    ("vision_config/model_patch_size", 40, "expected patch_size * pooling 48"),
    ("vision_config/output_proj_dims", 40, "vision.output_proj_dims: 40 is not"),
    ("audio_config/hidden_size", 320, "audio_config.audio_embed_dim: contradicts another name"),
]


@pytest.mark.parametrize("path, value, part", UNIFIED_REFUSALS)
def test_hf_refusal_of_a_unified_config(path: str, value: Any, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        Spec.from_hf(nested(hub_config("12b"), path, value))
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "path, value",
    [
        ("transformers_version", "9"),
        ("_name_or_path", "x"),
        ("text_config/temperature", 0.5),
        ("text_config/_attn_implementation_autoset", True),
        ("text_config/is_decoder", False),
        ("text_config/quantization_config", None),
        ("text_config/attn_logit_softcapping", None),
        ("text_config/sliding_window_pattern", 6),
        ("vision_config/rope_parameters/rope_type", "axial"),
        ("vision_config/per_layer_config", {}),
        ("vision_config/id2label", {"0": "LABEL_0"}),
    ],
)
def test_housekeeping_is_ignored(path: str, value: Any) -> None:
    spec = Spec.from_hf(nested(hub_config("e2b"), path, value), name="e2b")
    assert anonymous(spec) == anonymous(load_spec("e2b"))


@pytest.mark.parametrize(
    "data, part",
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "expected an object"),
        (b"{", "not valid JSON"),
        (b'{"model_type": "gemma4_text", "model_type": "gemma4_text"}', "is given twice"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"model_type": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b" " * (5 * 2**20), "larger than"),
    ],
)
def test_bytes_that_are_no_config(data: bytes, part: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(SpecError, match=part) as caught:
        Spec.from_hf(tmp_path)
    assert "config.json" in str(caught.value)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"config\.json: cannot be read .* checkpoint directory"):
        Spec.from_hf(tmp_path)


INEXPRESSIBLE = [
    ("moe: {layers: [1]}", "text.moe.layers"),
    ("attn_logit_softcapping: 20.0", "text.attn_logit_softcapping"),
    ("sliding: {k_eq_v: true}", "text.sliding.k_eq_v"),
]


@pytest.mark.parametrize("body, key", INEXPRESSIBLE)
def test_to_hf_names_what_it_cannot_say(body: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=key.replace(".", r"\.")):
        variant(tmp_path, body).to_hf()


def test_to_hf_of_a_unified_spec_with_experts(tmp_path: Path) -> None:
    file = write(tmp_path, "schema: 1\nextends: tiny-moe\nmodel_type: gemma4_unified\n")
    with pytest.raises(SpecError, match=r"text\.moe: .* use model_type gemma4"):
        load_spec(file).to_hf()


def test_problems_are_found_together() -> None:
    spec = load_spec("tiny-moe")
    full = replace(spec.text.full, head_dim=33, window=3)
    found = [p.path for p in problems(replace(spec, text=replace(spec.text, full=full)))]
    assert found == ["text.full.head_dim", "text.full.window"]
