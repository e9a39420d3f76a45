"""GGUF files of models, written by the package `gguf` under the names of its own table.

    python -m tests.gguf_files VARIANT TYPE[,TYPE OF TABLES] FILE

writes one of a released size with random blocks, to measure speed with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from g4ir.chat.special_tokens import ALIASES, CONTROLS
from g4ir.model.tensors import text_tensors
from g4ir.ops.codecs import FORMATS, PAIRS_OF_INTEGERS
from g4ir.ops.layouts import LAYOUTS
from g4ir.spec.parts import SLIDING
from g4ir.spec.record import Spec
from g4ir.weights.gguf.blocks import CODED, REQUANTISED
from g4ir.weights.random import distribution, random_weights
from tests.cases import read_table

#: name and shape of a tensor -> its type in the file
Kind = Callable[[str, tuple[int, ...]], str]
CASES: dict[str, Any] = read_table("gguf_files.yaml")
BLOCKS: list[str] = CASES["blocks"]
DRAWN = [*BLOCKS, "Q8_0", "Q4_0"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def all_of(*kinds: str) -> Kind:
    """Matrices in the first of some types whose blocks divide their rows; the rest in F32."""

    def kind_of(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) < 2 or "router" in name:
            return "F32"
        fit = (k for k in kinds if shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[k]][0] == 0)
        return next(fit, "F32")

    return kind_of


def architecture(spec: Spec) -> str:
    return family(spec) + "-assistant" * (spec.drafter is not None)


def family(spec: Spec) -> str:
    return spec.model_type.partition("_")[0]


@cache
def _names(spec: Spec) -> gguf.TensorNameMap:
    kind = gguf.MODEL_ARCH[family(spec).upper()]
    return gguf.get_tensor_name_map(kind, spec.text.num_hidden_layers)


def stored_name(spec: Spec, bare: str) -> str:
    if bare.startswith("drafter."):
        return bare.replace("drafter.", "nextn.")
    if bare.startswith("dense."):
        return f"dense_{int(bare.split('.')[1]) + 2}.weight"
    layer = bare.split(".")[1] if bare.startswith("layers.") else ""
    if bare.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if bare.endswith("per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    base = bare.removesuffix(".weight")
    for name in (f"model.{base}", base):
        if found := _names(spec).get_name(name):
            return f"{found}.weight"
    raise AssertionError(f"{bare} has no name")


def stored(bare: str, t: torch.Tensor, kind: str, seed: int) -> tuple[Any, Any]:
    values = t.float().numpy()
    to = GGMLQuantizationType[kind]
    if kind in BLOCKS:
        data = blocks(kind, bare, values.shape, seed)
    elif kind == "F32":
        return values, values
    elif kind in (*REQUANTISED, "NVFP4"):  # the package only reads them: zeros
        data = np.zeros(gguf.quant_shape_to_byte_shape(values.shape, to), np.uint8)
    else:
        data = quants.quantize(values, to)
    return data, quants.dequantize(data, to).reshape(values.shape)


def offsets(kind: str) -> range:
    """Where the float16 of a block lie."""
    layout = LAYOUTS[kind]
    found = layout.split(torch.arange(layout.nbytes)).get("scales", torch.zeros(1))
    return range(int(found[0]), int(found[-1]), 2)


def blocks(kind: str, bare: str, shape: tuple[int, ...], seed: int) -> Any:
    """Random blocks of a type, whose values are about zero, as those of `random_weights` and as
    large: a mean of theirs would add the same vector to every product, whatever is computed."""
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape)) // block
    raw = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
    signs = rng.integers(0, 2, count) * 2 - 1
    d = signs * rng.uniform(0.75, 1.25, count) * distribution(bare, shape)[1] / 3**0.5
    d /= CASES["sizes"][kind]
    middle = CASES["middles"].get(kind)
    for at, scale in zip(offsets(kind), (d, d * (middle or 1)), strict=False):
        raw[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(count, 2)
    if middle and "integers" in LAYOUTS[kind].fields:  # a scale is that of the minimum too
        integers = LAYOUTS[kind].split(torch.from_numpy(raw))["integers"]
        unpack, pack = PAIRS_OF_INTEGERS[FORMATS[CODED[kind].scheme.form].shared]
        scales, _ = unpack(integers)
        integers[:] = pack(scales, scales)
    return raw.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    spec: Spec,
    tensors: Mapping[str, torch.Tensor],
    kind: Kind,
    *,
    change: Callable[[dict[str, Any]], Any] = lambda values: None,
    plus_one: bool = True,
    arch: str = "",
) -> dict[str, torch.Tensor]:
    """Write a model's tensors, by their names in a checkpoint without a prefix; return what the
    file's stand for. A draft model is written without its clusters, which llama.cpp's converter
    leaves out. `change` may alter the values of the metadata, by key; `plus_one`: norms about zero
    are written as converters do; `arch`: another architecture of the same names and metadata."""
    writer = gguf.GGUFWriter(path, arch or architecture(spec))
    own = f"{architecture(spec)}."
    values = {k.replace(own, f"{arch}.") if arch else k: v for k, v in metadata(spec).items()}
    change(values)
    write_values(writer, values)
    meant = {}
    for i, bare in enumerate(tensors if spec.drafter or arch else text_tensors(spec)):
        one = float(bare.endswith("norm.weight") and spec.text.norms_about_zero and plus_one)
        shape = tuple(tensors[bare].shape)
        data, dense = stored(bare, tensors[bare].float() + one, kind(bare, shape), i)
        meant[bare] = torch.from_numpy(np.ascontiguousarray(dense - one))
        to = GGMLQuantizationType[kind(bare, shape)]
        writer.add_tensor(stored_name(spec, bare), data, raw_dtype=to)
    if family(spec) == "gemma4" and not arch:
        writer.add_tensor("rope_freqs.weight", _frequencies(spec))
    finish(writer)
    return meant


def with_turns(values: dict[str, Any]) -> None:
    """Replace the last tokens of a vocabulary by the control tokens of a chat that it lacks."""
    words, kinds = (values[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    missing = [c for c in CONTROLS if c not in (*words, *ALIASES)]
    words[-len(missing) :], kinds[-len(missing) :] = missing, [3] * len(missing)


def bare_file(
    path: Path,
    spec: Spec,
    change: Callable[[dict[str, Any]], Any] = lambda values: None,
    kind: str = "F16",
) -> Path:
    source = random_weights(spec, 0, torch.float32)
    tensors = {name: source.tensor(name) for name in text_tensors(spec)}
    write_gguf(path, spec, tensors, all_of(kind), change=change)
    return path


@cache
def _tower_names() -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)


def stored_tower_name(bare: str) -> str:
    name = bare.replace("pos_embedding", "pos.weight")
    if name.endswith(("per_dim_scale", "position_embedding_table")):
        name += ".weight"
    name = name.replace(".linear.", ".")
    base, _, end = name.rpartition(".")
    if base in CASES["unified"]:
        return f"{CASES['unified'][base]}.{end}"
    part, _, rest = base.partition(".")
    place = {"vision": "model.vision_tower.", "audio": "conformer."}.get(part)
    base = f"{place}{rest}".rstrip(".") if place else f"model.{base}"
    base = base.replace("model.vision_tower.encoder.", "vision_model.model.")
    names = _tower_names()
    found = names.get_name(f"{base}.{end}") or names.get_name(base)
    assert found, f"{bare} has no name"
    return found if end.startswith("std_") else f"{found}.{end}"


def _as_converted(bare: str, t: torch.Tensor) -> torch.Tensor:
    if bare.endswith("per_dim_scale"):
        return torch.nn.functional.softplus(t)
    if bare.endswith("depthwise_conv1d.weight"):
        return t.squeeze(1)
    if bare.endswith("patch_embedder.input_proj.weight"):
        side = int((t.shape[1] // 3) ** 0.5)
        return t.reshape(-1, side, side, 3).permute(0, 3, 1, 2)
    if bare.endswith(("patch_dense.weight", "patch_ln1.weight", "patch_ln1.bias")):
        p = int((t.shape[-1] // 3) ** 0.5)
        i = torch.arange(p * p * 3)
        return t[..., (i % (p * p)) // p * p * 3 + i % p * 3 + i // (p * p)]
    return t.permute(1, 0, 2) if bare.endswith("pos_embedding") else t.reshape(t.shape or (1,))


def write_mmproj(
    path: Path,
    spec: Spec,
    tensors: Mapping[str, torch.Tensor],
    kind: str = "F32",
    *,
    change: Callable[[dict[str, Any]], Any] = lambda values: None,
    left_out: Iterable[str] = (),
) -> Path:
    """Write the towers of a model, by the names of their tensors in a checkpoint; matrices of
    layers in a type, where its blocks divide them."""
    unified = spec.model_type == "gemma4_unified"
    values: dict[str, Any] = {
        "clip.vision.projector_type": "gemma4uv" if unified else "gemma4v",
        "clip.audio.projector_type": "gemma4ua" if unified else "gemma4a",
        "clip.vision.attention.head_count": getattr(spec.vision, "num_attention_heads", 0),
        "clip.audio.attention.head_count": getattr(spec.audio, "num_attention_heads", 0),
        "clip.vision.image_mean": [0.0] * 3,
        "clip.vision.image_std": [1.0] * 3,
    }
    change(values)
    writer = gguf.GGUFWriter(path, "clip")
    write_values(writer, values)
    for i, (bare, t) in enumerate(tensors.items()):
        name, made = stored_tower_name(bare), _as_converted(bare, t).contiguous()
        if name not in left_out:
            fits = bare.endswith(".linear.weight") and made.shape[-1] % 32 == 0
            to = kind if fits else "F32"
            data, _ = stored(bare, made, to, i)
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[to])
    finish(writer)
    return path


def _frequencies(spec: Spec) -> Any:
    dim, fraction = spec.text.full.head_dim, spec.text.full.rope.rotary_fraction
    rotated = int(dim * fraction / 2)
    return np.array([1.0] * rotated + [1e30] * (dim // 2 - rotated), np.float32)


def write_random(path: Path, spec: Spec, kind: Kind) -> None:
    """Write a model of any size, one tensor at a time: blocks are random, the others those of
    `random_weights`."""
    writer = gguf.GGUFWriter(path, architecture(spec))
    write_values(writer, metadata(spec))
    kinds = {bare: kind(bare, shape) for bare, shape in text_tensors(spec).items()}
    for bare, shape in text_tensors(spec).items():
        to = GGMLQuantizationType[kinds[bare]]
        nbytes = int(np.prod(gguf.quant_shape_to_byte_shape(shape, to)))
        writer.add_tensor_info(stored_name(spec, bare), shape, np.dtype(np.float32), nbytes, to)
    freqs = _frequencies(spec) if family(spec) == "gemma4" else None
    if freqs is not None:
        writer.add_tensor_info("rope_freqs.weight", freqs.shape, freqs.dtype, freqs.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for seed, (bare, shape) in enumerate(text_tensors(spec).items()):
        writer.write_tensor_data(_drawn(spec, bare, shape, kinds[bare], seed))
    if freqs is not None:
        writer.write_tensor_data(freqs)
    writer.close()


def _drawn(spec: Spec, bare: str, shape: tuple[int, ...], kind: str, seed: int) -> Any:
    if kind in DRAWN:
        return blocks(kind, bare, shape, seed)
    values = random_weights(spec, 0, torch.bfloat16).tensor(bare)
    if bare.endswith("norm.weight") and spec.text.norms_about_zero:
        values = values.float() + 1
    return values.view(torch.uint8).numpy() if kind == "BF16" else values.float().numpy()


def write_values(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    kinds[np.float64] = "float64"
    for key, value in values.items():
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def values_of(reader: gguf.GGUFReader) -> dict[str, Any]:
    own = ("GGUF.", "general.architecture")
    return {k: v.contents() for k, v in reader.fields.items() if not k.startswith(own)}


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata(spec: Spec) -> dict[str, Any]:
    text, layers = spec.text, spec.layers()
    out: dict[str, Any] = {
        "block_count": text.num_hidden_layers,
        "context_length": text.max_position_embeddings,
        "embedding_length": text.hidden_size,
        "feed_forward_length": _alike([layer.intermediate_size for layer in layers]),
        "attention.head_count": text.num_attention_heads,
        "attention.head_count_kv": _alike([x.attention.num_key_value_heads for x in layers]),
        "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
        "attention.sliding_window": text.sliding.window,
        "attention.sliding_window_pattern": [x.kind == SLIDING for x in layers],
        "attention.shared_kv_layers": text.num_kv_shared_layers,
        "embedding_length_per_layer_input": text.ple.dim if text.ple else 0,
        "rope.freq_base": text.full.rope.theta,
        "rope.freq_base_swa": text.sliding.rope.theta,
    }
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        out |= {key: text.full.head_dim, f"{key}_swa": text.sliding.head_dim}
    if text.final_logit_softcapping:
        out["final_logit_softcapping"] = text.final_logit_softcapping
    if text.moe:
        out |= {
            "expert_count": text.moe.num_experts,
            "expert_used_count": text.moe.top_k_experts,
            "expert_feed_forward_length": text.moe.intermediate_size,
        }
    if spec.drafter:
        out["embedding_length_out"] = spec.drafter.backbone_hidden_size
        out["nextn_predict_layers"] = text.num_hidden_layers
    if family(spec) == "gemma3":  # whose converter leaves out the rest
        out = {k: v for k, v in out.items() if k not in UNSAID and not k.endswith("_swa")}
        if factor := text.full.rope.factor:
            out |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    made = {f"{architecture(spec)}.{k}": v for k, v in out.items()}
    return made | vocabulary(text.vocab_size)


UNSAID = (
    *("attention.sliding_window_pattern", "attention.shared_kv_layers"),
    *("embedding_length_per_layer_input", "rope.dimension_count"),
)


def _alike(values: list[int]) -> Any:
    return values if len(set(values)) > 1 else values[0]


def vocabulary(size: int) -> dict[str, Any]:
    """Special tokens, every byte, and a few words, with what joins characters to them."""
    merges = CASES["merges"]
    words = [*CASES["special"], *(f"<0x{i:02X}>" for i in range(256)), *CASES["letters"]]
    words += [merge.replace(" ", "") for merge in merges]
    words += [f"▁w{i}" for i in range(size - len(words))]
    values = {
        **CASES["tokenizer"],
        "tokens": words,
        "scores": [-1000.0] * size,
        "token_type": [*CASES["special"].values(), *[6] * 256, *[1] * (size - 256 - 7)],
        "merges": list(merges),
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return named | {"tokenizer.chat_template": TEMPLATE}


def main() -> None:
    from g4ir.spec.record import load_spec

    _, variant, kinds, path = sys.argv
    matrix, _, table = kinds.partition(",")
    of_matrices, of_tables = all_of(matrix), all_of(table or matrix)
    write_random(
        Path(path),
        load_spec(variant),
        lambda name, shape: (of_tables if "embed_tokens" in name else of_matrices)(name, shape),
    )


if __name__ == "__main__":
    main()
