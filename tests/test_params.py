"""Parameter counts against the published ones, to the unit, and cache bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from g4ir.model.tensors import dead_tensors, numel, text_tensors, tower_tensors
from g4ir.plan.count import counts
from g4ir.plan.formats import kv_bytes, weight_sizes
from g4ir.spec.record import Spec, load_spec

RELEASED = ("e2b", "e4b", "12b", "26b-a4b", "31b")
GIB = 2**30

# part: counts of e2b, e4b, 12b, 26b-a4b, 31b; sums are those of the published files
PARTS = {
    "embed": (402_653_184, 671_088_640, 1_006_632_960, 738_197_504, 1_409_286_144),
    "ple_table": (2_348_810_240, 2_818_572_288, 0, 0, 0),
    "ple_other": (41_341_696, 82_683_136, 0, 0, 0),
    "layers": (1_835_762_723, 3_890_666_794, 10_900_713_520, 1_656_956_190, 29_288_053_820),
    "experts": (0, 0, 0, 22_837_985_280, 0),
    "final_norm": (1_536, 2_560, 3_840, 2_816, 5_376),
    "head": (0, 0, 0, 0, 0),
    "vision": (167_364_608, 167_364_608, 0, 569_548_080 + 2_304, 569_548_080 + 2_304),
    "vision_scalars": (448, 448, 0, 0, 0),
    "audio": (304_824_608, 304_824_608, 0, 0, 0),
    "audio_scalars": (480, 480, 0, 0, 0),
    "embed_vision": (1_179_648, 1_966_080, 49_922_304, 3_244_032, 6_193_152),
    "embed_audio": (2_359_296, 3_932_160, 2_457_600, 0, 0),
    "dead": (18_880_512, 55_055_616, 0, 0, 0),
    "dead_tensors": (60, 54, 0, 0, 0),
    "loaded": (5_104_298_467, 7_941_101_802, 11_959_730_224, 25_805_936_206, 31_273_088_876),
    "hub": (5_123_178_979, 7_996_157_418, 11_959_730_224, 25_805_936_206, 31_273_088_876),
    "hub_parameters": (
        *(5_123_178_051, 7_996_156_490, 11_959_730_224, 25_805_936_206, 31_273_088_876),
    ),
    "hub_tensors": (2011, 2130, 677, 1013, 1188),
    "active": (2_279_757_568, 4_644_438_528, 11_907_346_432, 3_822_527_744, 30_697_339_904),
}
HUB_BYTES = (10_246_357_958, 15_992_314_836, 23_919_460_448, 51_611_872_412, 62_546_177_752)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", RELEASED)
def test_published_counts(name: str, part: str) -> None:
    assert getattr(counts(load_spec(name)), part) == PARTS[part][RELEASED.index(name)]


@pytest.mark.parametrize("name, size", list(zip(RELEASED, HUB_BYTES)))
def test_published_bytes(name: str, size: int) -> None:
    assert counts(load_spec(name)).hub * 2 == size


@pytest.mark.parametrize("name", RELEASED)
def test_parts_are_the_tables(name: str) -> None:
    spec = load_spec(name)
    count = counts(spec)
    assert count.text == numel(text_tensors(spec)) == weight_sizes(spec, spec.dtype).total // 2
    assert count.loaded - count.text == numel(tower_tensors(spec))
    assert weight_sizes(spec, "f32").total == 4 * count.text


def test_one_expert() -> None:
    spec = load_spec("26b-a4b")
    shapes = {k: v for k, v in text_tensors(spec).items() if k.startswith("layers.0.experts.")}
    assert numel(shapes) // 128 == 5_947_392


# --- the public per-block tables, in millions --------------------------------------------------

BLOCKS = {  # layer: matrices of attention, MLP, whole layer without per-layer embeddings
    ("e2b", 0): (7.1, 28.3, 35.4),
    ("e2b", 4): (14.2, 28.3, 42.5),
    ("e2b", 15): (6.3, 56.6, 62.9),  # shared: no K and V, wide MLP
    ("e2b", 19): (12.6, 56.6, 69.2),
    ("31b", 0): (132.1, 346.8, 478.9),
    ("31b", 5): (187.2, 346.8, 534.0),
    ("26b-a4b", 0): (34.6, 17.8, 814.1),
    ("26b-a4b", 5): (49.0, 17.8, 828.5),
}


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_blocks(case: tuple[str, int]) -> None:
    name, index = case
    prefix = f"layers.{index}."
    live = text_tensors(load_spec(name)).items()
    mine = {k: v for k, v in live if k.startswith(prefix) and "per_layer_" not in k}
    layer = {k.removeprefix(prefix): v for k, v in mine.items() if len(v) > 1}
    parts = [{k: v for k, v in layer.items() if k.startswith(p)} for p in ("self_attn", "mlp", "")]
    assert tuple(round(numel(part) / 1e6, 1) for part in parts) == BLOCKS[case]


# --- against the reference's own modules --------------------------------------------------------


def shrunk(name: str) -> Spec:
    """The variant with few layers, all else kept."""
    spec = load_spec(name)
    shared = 5 if spec.text.num_kv_shared_layers else 0
    text = replace(
        spec.text, num_hidden_layers=len(spec.text.pattern) * 2, num_kv_shared_layers=shared
    )
    towers: dict[str, Any] = {}
    for part in ("vision", "audio"):
        tower = getattr(spec, part)
        if tower is not None and "num_hidden_layers" in tower.__dataclass_fields__:
            towers[part] = replace(tower, num_hidden_layers=2)
    return replace(spec, text=text, **towers)


UNIFIED_NAMES = {  # hub name -> name in the reference's module
    "model.embed_vision.embedding_projection": "model.embed_vision.multimodal_embedder"
    ".embedding_projection",
    "model.vision_embedder.": "model.embed_vision.",
}


def reference_name(name: str) -> str:
    for hub, module in UNIFIED_NAMES.items():
        if name.startswith(hub):
            return module + name.removeprefix(hub)
    return name


@pytest.mark.parametrize("name", RELEASED)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    spec = shrunk(name)
    config = spec.to_hf()
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config)
        )
    theirs = {k: tuple(v.shape) for k, v in model.state_dict().items() if k != "lm_head.weight"}
    text = {spec.prefixes.text[0] + k: v for k, v in text_tensors(spec).items()}
    towers = tower_tensors(spec)
    if name == "12b":
        towers = {reference_name(k): v for k, v in towers.items()}
    assert text | towers == theirs


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe", "tiny-ple"])
@pytest.mark.parametrize("tied", [True, False])
def test_text_names_are_those_of_the_causal_model(name: str, tied: bool) -> None:
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    spec = load_spec(name)
    spec = replace(spec, text=replace(spec.text, tie_word_embeddings=tied))
    with torch.device("meta"):
        model = Gemma4ForCausalLM(Gemma4TextConfig(**spec.to_hf()))
    theirs = {k.removeprefix("model."): tuple(v.shape) for k, v in model.state_dict().items()}
    if tied:
        del theirs["lm_head.weight"]
    assert text_tensors(spec) == theirs


def test_dead_tensors_are_k_and_v_of_shared_layers() -> None:
    spec = load_spec("tiny-ple")
    dead = dead_tensors(spec)
    assert {name.split(".")[1] for name in dead} == {"4", "5", "6", "7"}
    assert dead["layers.4.self_attn.k_proj.weight"] == (64, 64)
    assert dead["layers.7.self_attn.k_norm.weight"] == (64,)
    assert not dead.keys() & text_tensors(spec).keys()


# --- caches -------------------------------------------------------------------------------------

# bytes per token: all owning layers, full layers only; bytes of full windows
CACHE = {
    "e2b": (18_432, 6_144, 6_291_456),
    "e4b": (57_344, 16_384, 20_971_520),
    "12b": (344_064, 16_384, 335_544_320),
    "26b-a4b": (225_280, 20_480, 209_715_200),
    "31b": (901_120, 81_920, 838_860_800),
}
PLANNED_GIB = {  # at 4K, 32K, 128K, 256K tokens
    "e2b": (0.029, 0.193, 0.756),
    "e4b": (0.082, 0.520, 2.020),
    "12b": (0.375, 0.812, 2.312, 4.312),
    "26b-a4b": (0.273, 0.820, 2.695, 5.195),
    "31b": (1.094, 3.281, 10.781, 20.781),
}
NAIVE_GIB = {
    "31b": (3.4, 27.5, 110.0, 220.0),
    "26b-a4b": (0.9, 6.9, 27.5, 55.0),
    "e2b": (0.07, 0.6, 2.2),
}
CONTEXTS = (4096, 32768, 131072, 262144)


@pytest.mark.parametrize("name", RELEASED)
def test_cache_rates(name: str) -> None:
    kv = kv_bytes(load_spec(name), 8192)
    assert (kv.per_token, kv.per_token_full, kv.window) == CACHE[name]
    assert kv.naive == kv.per_token * 8192
    assert kv.planned == kv.window + kv.per_token_full * 8192


@pytest.mark.parametrize("name", PLANNED_GIB)
def test_planned_cache(name: str) -> None:
    spec = load_spec(name)
    for ctx, gib in zip(CONTEXTS, PLANNED_GIB[name], strict=False):
        assert kv_bytes(spec, ctx).planned / GIB == pytest.approx(gib, abs=5.1e-4)


@pytest.mark.parametrize("name", NAIVE_GIB)
def test_naive_cache(name: str) -> None:
    spec = load_spec(name)
    for ctx, gib in zip(CONTEXTS, NAIVE_GIB[name], strict=False):
        digits = 2 if gib < 0.1 else 1
        assert round(kv_bytes(spec, ctx).naive / GIB, digits) == gib


def test_cache_scales() -> None:
    spec = load_spec("tiny-ple")  # owners: three sliding (2 x 32, window 8), one full (64)
    assert kv_bytes(spec, 4).planned == 2 * 4 * (3 * 64 * 4 + 64 * 4)
    assert kv_bytes(spec, 100).planned == 2 * 4 * (3 * 64 * 8 + 64 * 100)
    assert kv_bytes(spec, 100, batch=3).planned == 3 * kv_bytes(spec, 100).planned
    assert 2 * kv_bytes(spec, 100, dtype="bf16").naive == kv_bytes(spec, 100).naive
    assert kv_bytes(spec, 0).planned == 0
