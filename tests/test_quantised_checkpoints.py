"""Checkpoints that are in codes already: engines of them against transformers on the same files."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir import Engine, load_spec
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.errors import EngineError, G4Error, WeightsError
from g4ir.model.names import checkpoint_name
from g4ir.ops.codecs import pack_codes, unpack_codes
from g4ir.quant.rewrite import weights_of
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.gguf.write import write_gguf
from g4ir.weights.origin import find_origin
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cases import read_table
from tests.cli_tools import g4ir as command
from tests.configs import widened
from tests.engines import rewrite
from tests.oracle import Oracle, find_oracle, logits_of_directory, relative, save_checkpoint

F32 = torch.float32
LIMITS: dict[str, Any] = {"max_seq": 64, "prefill_chunk": 16, "all_logits": True, "dtype": "f32"}
Tensors = dict[str, torch.Tensor]
#: a module's name and weight -> the tensors in its place
Pack = Callable[[str, torch.Tensor], Tensors]
E4M3 = torch.float8_e4m3fn
TABLES = ("embed_tokens", "embed_tokens_per_layer")
#: what a module packed in some forms means, beside its tensors
MEANING = ".meaning"


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K] as i32 [N, K * bits / 32], low bits first, each + 2^(bits - 1)."""
    stored = codes.to(torch.int64) + (1 << bits - 1)
    flat = (stored[..., None] >> torch.arange(bits) & 1).flatten(1)
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 32)).unflatten(1, (-1, 32))
    made = (flat << torch.arange(32)).sum(-1)
    return torch.where(made >= 1 << 31, made - (1 << 32), made).to(torch.int32)


def is_linear(module: str, w: torch.Tensor) -> bool:
    return w.dim() == 2 and not module.endswith(TABLES)


@dataclass(frozen=True)
class Case:
    """A way to store weights, a row of quantised_checkpoints.yaml."""

    config: dict[str, Any]
    pack: Pack
    blocks: tuple[int, int] = (0, 0)
    stacked: str = ""
    model: str = "tiny-moe"

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Case:
        name, *given = row["pack"]
        pack = globals()[name]
        config = row.get("config") or compressed(row["format"], row["weights"])
        blocks, stacked = row.get("blocks", (0, 0)), row.get("stacked", "")
        made = pack(*given) if given else pack
        return cls(config, made, blocks, stacked, row.get("model", "tiny-moe"))

    def write(self, oracle: Oracle, folder: Path) -> Path:
        """Write the oracle's checkpoint, quantised."""
        save_checkpoint(oracle, folder)
        return self.quantise(folder)

    def quantise(self, folder: Path) -> Path:
        """Pack the modules of a checkpoint: its linears, and a tied head is left out; in the mobile
        form tables too, and a head of its own."""
        mobile = self.config["quant_method"] == "gemma"
        kept = self.config.get("modules_to_not_convert", ()) if mobile else TABLES

        def change(tensors: Tensors) -> None:
            if mobile:
                table = next(t for n, t in tensors.items() if n.endswith("embed_tokens.weight"))
                tensors["lm_head.weight"] = table.clone()
            for name in [n for n in tensors if n.endswith(".weight")]:
                module = name.removesuffix(".weight")
                if tensors[name].dim() == 2 and not module.endswith(tuple(kept)):
                    tensors.update(without_meaning(self.pack(module, tensors.pop(name))))

        edited = {"tie_word_embeddings": False} if mobile else {}
        return rewrite(folder, change, quantization_config=self.config, **edited)


def without_meaning(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if not name.endswith(MEANING)}


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def grouped(w: torch.Tensor, group: int) -> torch.Tensor:
    return w.unflatten(-1, (-1, group or w.shape[-1]))


def helpers() -> Any:
    """compressed-tensors' functions that pack codes; its import takes a second."""
    return import_module("compressed_tensors.compressors.pack_quantized.helpers")


def packed_weight(bits: int, group: int, dtype: str = "float32") -> Pack:
    """pack-quantized, symmetric: scale = absmax / (2^b - 1) * 2."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        x, top = grouped(w, group), (1 << bits) / 2
        scale = (x.abs().amax(-1) / (top - 0.5)).to(getattr(torch, dtype))
        codes = (x / scale.float()[..., None]).round().clamp(-top, top - 1).flatten(-2)
        return {
            f"{module}.weight_packed": helpers().pack_to_int32(codes.to(torch.int8), bits),
            f"{module}.weight_scale": scale,
            f"{module}.weight_shape": torch.tensor(w.shape),
        }

    return pack


def bits_by_module(groups: Mapping[str, Any]) -> Pack:
    """pack-quantized by config_groups, each of which has one pattern as its target; of several
    that match, the first in the alphabet counts."""
    by_pattern = {g["targets"][0]: g["weights"] for g in groups.values()}

    def pack(module: str, w: torch.Tensor) -> Tensors:
        by = by_pattern[min(p for p in by_pattern if re.match(p[3:], module))]
        args = by["num_bits"], by.get("group_size", 0)
        return (packed_weight if by["symmetric"] else zeroed_weight)(*args)(module, w)

    return pack


def zeroed_weight(bits: int, group: int) -> Pack:
    """pack-quantized with zero points, which are packed along the output axis."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        x = grouped(w, group)
        low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
        top = 1 << bits - 1
        scale = (high - low) / (2 * top - 1)
        zero = (-top - low / scale).round().clamp(-top, top - 1)
        codes = (x / scale[..., None] + zero[..., None]).round().clamp(-top, top - 1).flatten(-2)
        return {
            f"{module}.weight_packed": helpers().pack_to_int32(codes.to(torch.int8), bits),
            f"{module}.weight_scale": scale,
            f"{module}.weight_zero_point": helpers().pack_to_int32(
                zero.to(torch.int8), bits, packed_dim=0
            ),
            f"{module}.weight_shape": torch.tensor(w.shape),
        }

    return pack


def e4m3_weight(
    rows: int, columns: int, name: str = "weight_scale", shape: Sequence[int] | None = None
) -> Pack:
    """e4m3 in blocks of rows x columns; 0: all of them. Scales are of `shape` if given."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        n, k = w.shape
        r, c = rows or n, columns or k
        full = torch.zeros(-(-n // r) * r, -(-k // c) * c)
        full[:n, :k] = w
        blocks = full.unflatten(0, (-1, r)).unflatten(-1, (-1, c))
        scale = blocks.abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(r, 0)[:n].repeat_interleave(c, 1)[:, :k]
        codes = (w / spread).clamp(-448, 448).to(E4M3)
        scale = scale if shape is None else scale.view(tuple(shape))
        return {f"{module}.weight": codes, f"{module}.{name}": scale}

    return pack


def e8m0_weight(module: str, w: torch.Tensor) -> Tensors:
    """e4m3 with one power of two for each 32 x 32 numbers."""
    made = e4m3_weight(32, 32)(module, w)
    scale = made.pop(f"{module}.weight_scale").log2().ceil().exp2()
    spread = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[: w.shape[0], : w.shape[1]]
    codes = (w / spread).to(E4M3)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scale.to(torch.float8_e8m0fnu)}


def int8_weight(module: str, w: torch.Tensor) -> Tensors:
    scale = w.abs().amax(-1, keepdim=True) / 127.5
    codes = (w / scale).round().clamp(-128, 127).to(torch.int8)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scale}


def mobile_weight(configs: Mapping[str, Any]) -> Pack:
    """2, 4 or 8 bits, a scale for each row; activations are not calibrated."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        own = (c["num_bits"] for pattern, c in configs.items() if re.search(pattern, module))
        b = next(own, 4)
        top = 1 << b - 1
        scale = w.abs().amax(-1, keepdim=True) / top
        codes = (w / scale).round().clamp(-top, top - 1)
        by = {2: four_in_a_byte, 4: lambda t: pack_codes(t, "int4"), 8: lambda t: t.to(torch.int8)}
        stored = by[b](codes)
        if module.endswith(TABLES):
            return {f"{module}.embedding_quantized": stored, f"{module}.embedding_scale": scale}
        ranges = ("input_activation_scale", "output_activation_scale")
        return {
            f"{module}.weight": stored,
            f"{module}.weight_scale": scale,
            **{f"{module}.{r}": torch.tensor(0.0) for r in ranges},
        }

    return pack


def _affine(w: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Integers 0.. [N, K], zero points [N, G] and scales f16 [N, G] of w."""
    x, most = grouped(w, group), (1 << bits) - 1
    zero = torch.full(x.shape[:2], float(1 << bits - 1))
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale = (x.abs().amax(-1) / (most // 2 + 0.5) if symmetric else (high - low) / most).half()
    if not symmetric:
        zero = (-low / scale.float()).round().clamp(1, most)
    q = (x / scale.float()[..., None] + zero[..., None]).round().clamp(0, most)
    return q.flatten(1), zero, scale


def gptq_weight(bits: int, group: int, symmetric: bool, form: str, act_order: bool = False) -> Pack:
    """GPTQ: everything lies transposed; with `act_order` columns have any group."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        k, each = w.shape[1], group if group > 0 else w.shape[1]
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
        order = order if act_order else torch.arange(k)
        q, zero, scale = _affine(w[:, order], bits, each, symmetric)
        q, index = q[:, order.argsort()], (torch.arange(k) // each)[order.argsort()]
        half, less = 1 << bits - 1, 1 if form == "gptq" else 0
        return {
            f"{module}.qweight": words(q - half, bits).t().contiguous(),
            f"{module}.qzeros": words((zero - less - half).t(), bits),
            f"{module}.scales": scale.t().contiguous(),
            f"{module}.g_idx": index.int(),
            f"{module}{MEANING}": (q - zero[:, index]) * scale.float()[:, index],
        }

    return pack


def awq_weight(group: int, symmetric: bool = False) -> Pack:
    """AWQ (gemm): columns 0, 2, 4, 6, 1, 3, 5, 7 in a word."""

    def in_words(t: torch.Tensor) -> torch.Tensor:
        return words(t.t().unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1) - 8, 4)

    def pack(module: str, w: torch.Tensor) -> Tensors:
        q, zero, scale = _affine(w, 4, group, symmetric)
        means = (grouped(q, group) - zero[..., None]) * scale.float()[..., None]
        return {
            f"{module}.qweight": in_words(q),
            f"{module}.qzeros": in_words(zero),
            f"{module}.scales": scale.t().contiguous(),
            f"{module}{MEANING}": means.flatten(1),
        }

    return pack


def _e2m1(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest e2m1 numbers of y [N, G, g], and their codes, two in a byte."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (y.abs()[..., None] - table).abs().argmin(-1)
    nibbles = (nearest + 8 * (y < 0)).flatten(1).to(torch.uint8)
    return table[nearest] * y.sign(), nibbles[:, ::2] | nibbles[:, 1::2] << 4


def nvfp4_weight(names: Sequence[str]) -> Pack:
    """Names of codes, scales, and of the number that divides (compressed-tensors) or multiplies."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        x, divisor = grouped(w, 16), 448 * 6 / w.abs().max()
        scale = (x.abs().amax(-1) / 6 * divisor).to(E4M3)
        numbers, codes = _e2m1(x / scale.float()[..., None] * divisor)
        number = divisor[None] if names[2] == "weight_global_scale" else 1 / divisor
        means = numbers * scale.float()[..., None] / divisor
        parts = zip((*names, MEANING[1:]), (codes, scale, number, means.flatten(1)), strict=True)
        return {f"{module}.{name}": t for name, t in parts}

    return pack


def mxfp4_weight(module: str, w: torch.Tensor) -> Tensors:
    x = grouped(w, 32 if w.shape[1] % 32 == 0 else 16)
    exponent = x.abs().amax(-1).log2().floor() - 2
    numbers, codes = _e2m1(x / exponent.exp2()[..., None])
    return {
        f"{module}.weight_packed": codes,
        f"{module}.weight_scale": (exponent + 127).to(torch.uint8),
        f"{module}{MEANING}": (numbers * exponent.exp2()[..., None]).flatten(1),
    }


def four_in_a_byte(codes: torch.Tensor) -> torch.Tensor:
    parts = (codes + 2).to(torch.uint8).unflatten(-1, (-1, 4)).unbind(-1)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6


def meaning(parts: Tensors, shape: tuple[int, ...], rows: int, columns: int) -> torch.Tensor:
    """The numbers [N, K] of a module packed as above, whose scales serve blocks of rows x columns;
    0: all of them."""
    if meant := [t for name, t in parts.items() if name.endswith(MEANING)]:
        return meant[0]
    named = {name.rpartition(".")[2]: t for name, t in parts.items()}
    (scale,) = (t.float() for name, t in named.items() if "scale" in name)
    codes = named.get("weight_packed")
    if codes is None:
        codes = named["weight"].float()
    else:
        codes = helpers().unpack_from_int32(codes, 32 * codes.shape[1] // shape[1], shape).float()
    scale = scale.view(-1, 1) if scale.dim() < 2 else scale
    spread = scale.repeat_interleave(rows or shape[0], 0)[: shape[0]]
    return codes * spread.repeat_interleave(columns or shape[1], 1)[:, : shape[1]]


ROWS = read_table("quantised_checkpoints.yaml")
READ_BY = ("read_by_transformers", "others")
CASES, OTHERS = ({name: Case.of(row) for name, row in ROWS[kind].items()} for kind in READ_BY)


@contextmanager
def packed_zero_points() -> Iterator[None]:
    """compressed-tensors 0.20 packs weights on the meta device and leaves zero points unpacked, so
    that transformers 5.24 refuses the packed ones of a checkpoint: here they are packed too."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    compress = PackedQuantizationCompressor.compress

    def pack_codes(state: dict[str, torch.Tensor], scheme: Any) -> dict[str, torch.Tensor]:
        on_meta, found = state["weight"].is_meta, compress(state, scheme)
        point = found.get("weight_zero_point")
        if on_meta and point is not None and point.shape[0] == state["weight"].shape[0]:
            rows = -(-point.shape[0] * scheme.weights.num_bits // 32)
            found["weight_zero_point"] = point.new_empty(rows, *point.shape[1:], dtype=torch.int32)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedQuantizationCompressor, "compress", pack_codes)
        yield


def theirs(folder: Path, oracle: Oracle) -> torch.Tensor:
    pytest.importorskip("accelerate")
    from transformers.utils import logging

    logging.disable_progress_bar()
    with packed_zero_points():
        return logits_of_directory(folder, oracle.tokens[:1, :40], more=True)


def built(folder: Path, out: Path, **options: Any) -> Engine:
    given = {"backend": "reference", **LIMITS, **options}
    return g4ir.build(None, out, checkpoint=folder, **given)


def logits(engine: Engine, oracle: Oracle) -> torch.Tensor:
    return engine.session().prefill(oracle.tokens[:1, :40], all_logits=True)


FULL = pytest.mark.full
#: every case on one model; on another, and on the other backends, with --full
FILES = [pytest.param(c, "tiny-ple", "reference", id=c) for c in CASES]
OTHER_ROWS = (("tiny-dense", "reference"), ("tiny-ple", "torch"), ("tiny-ple", "onnx"))
FILES += [pytest.param(c, *row, marks=FULL) for row in OTHER_ROWS for c in CASES]


@pytest.mark.parametrize(("case", "model", "backend"), FILES)
def test_against_transformers(case: str, model: str, backend: str, tmp_path: Path) -> None:
    oracle = find_oracle(load_spec(model))
    folder = CASES[case].write(oracle, tmp_path / "c")
    got = logits(built(folder, tmp_path / "e", backend=backend), oracle)
    assert relative(got, theirs(folder, oracle)).max().item() < oracle.budget


@pytest.mark.parametrize("case", ["NVFP4", "MXFP4"])
def test_four_bit_floats_as_their_library_writes_them(case: str) -> None:
    """transformers computes with them in bf16 alone, so codes are compared."""
    from compressed_tensors.compressors import mxfp4, nvfp4
    from compressed_tensors.quantization import QuantizationScheme

    w = torch.randn(48, 128, generator=torch.Generator().manual_seed(1))
    made = {n.removeprefix("x."): t for n, t in OTHERS[case].pack("x", w).items()}
    scale = made["weight_scale"]
    scale = scale.float() if scale.dtype == E4M3 else (scale.float() - 127).exp2()
    weights = OTHERS[case].config["config_groups"]["group_0"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    writers = {"NVFP4": nvfp4.NVFP4PackedCompressor, "MXFP4": mxfp4.MXFP4PackedCompressor}
    state = {"weight": w, "weight_scale": scale}
    if case == "NVFP4":
        state["weight_global_scale"] = made["weight_global_scale"]
    for name, want in writers[case].compress(state, scheme).items():
        assert torch.equal(made[name].view(torch.uint8), want.view(torch.uint8)), name


def moe_checkpoint(case: Case, oracle: Oracle, folder: Path) -> Oracle:
    """Write a checkpoint with quantised experts. Returns the dense model that it means."""
    model = copy.deepcopy(oracle.model)
    save_checkpoint(oracle, folder)
    dense = dict(model.named_parameters())
    for name, values in quantise_experts(case, folder).items():
        dense[name].data.copy_(values)
    return replace(oracle, model=model)


def quantise_experts(case: Case, folder: Path) -> Tensors:
    """Pack all matrices of a checkpoint but tables, head and router; experts one by one. Returns
    what those of each name mean."""

    def packed_as(name: str, w: torch.Tensor) -> Tensors:
        made = case.pack(name, w)
        means[name] = meaning(made, tuple(w.shape), *case.blocks)
        return without_meaning(made)

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            module = name.removesuffix(".weight")
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors.update(experts(name, tensors.pop(name)))
            elif is_linear(module, tensors[name]) and "router" not in name:
                tensors.update(packed_as(module, tensors.pop(name)))
                dense[name] = means[module]

    def experts(name: str, w: torch.Tensor) -> Tensors:
        prefix, _, last = name.rpartition(".")
        names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        out: Tensors = {}
        made = []
        for e, expert in enumerate(w):
            parts = [expert] if case.stacked else expert.chunk(len(names))
            for one, part in zip(names, parts, strict=False):
                out |= packed_as(f"{prefix}.{e}.{one}", part)
                made.append(means[f"{prefix}.{e}.{one}"])
        dense[name] = torch.cat(made).view(w.shape)
        if not case.stacked:
            return out
        ends = (".weight", case.stacked)
        codes, scales = (torch.stack([t for n, t in out.items() if n.endswith(e)]) for e in ends)
        return {name: codes, f"{name}{case.stacked}": scales}

    means: Tensors = {}
    dense: Tensors = {}
    config = copy.deepcopy(case.config)
    if "ignore" in config:
        config["ignore"] = ["lm_head", "re:.*router.*"]
    rewrite(folder, change, quantization_config=config)
    return dense


@pytest.mark.parametrize(
    "backend", ["reference", *(pytest.param(b, marks=FULL) for b in ("torch", "onnx"))]
)
@pytest.mark.parametrize("case", OTHERS)
def test_experts_and_blocks(case: str, backend: str, tmp_path: Path) -> None:
    """Against the dense model: transformers leaves experts that lie one by one at random, and reads
    GPTQ and AWQ with libraries of their own."""
    spec = widened("tiny-dense") if "128" in case else load_spec(OTHERS[case].model)
    oracle = find_oracle(spec)
    dense = moe_checkpoint(OTHERS[case], oracle, tmp_path / "c")
    engine = built(tmp_path / "c", tmp_path / "e", backend=backend)
    quant = engine.config.quant
    assert (quant is None) == ("act-order" in case) and (quant is None or quant.from_checkpoint)
    for name in {"L0.moe.gate_up", "L1.moe.down", "L2.attn.wq"} & {*weights_of(spec)}:
        want = dense.tensors[f"model.{checkpoint_name(name)}"]
        rtol = 3e-7 if "NVFP4" in case else 0  # two scales, multiplied in either order
        torch.testing.assert_close(engine.param(name), want, rtol=rtol, atol=0)
    got, want = logits(engine, oracle), dense.run(oracle.tokens[:1, :40])
    assert relative(got, want).max().item() < oracle.budget


def test_modelopt_describes_itself_beside_config_json(tmp_path: Path) -> None:
    oracle = find_oracle(load_spec("tiny-dense"))
    folder = OTHERS["NVFP4 of ModelOpt"].write(oracle, tmp_path / "c")
    forms = Checkpoint.open(folder, oracle.spec).forms
    assert {scheme.form for scheme in forms.values()} == {"fp4", "int8"}
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    stated = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": stated})
    (folder / "hf_quant_config.json").write_text(text)
    assert Checkpoint.open(folder, oracle.spec).forms == forms
    for other, says in (
        ({"quant_algo": "INT4_AWQ"}, r"quant_config.json: quantization.quant_algo: must be NVFP4"),
        ({"has_zero_point": True}, r"quant_config.json: quantization: has_zero_point True is not"),
    ):
        text = json.dumps({"quantization": {**stated, **other}})
        (folder / "hf_quant_config.json").write_text(text)
        with pytest.raises(G4Error, match=says):
            Checkpoint.open(folder, oracle.spec)
    (folder / "hf_quant_config.json").write_text('{"quantization": 3}')
    with pytest.raises(G4Error, match="quantization: quant_method None is not supported"):
        Checkpoint.open(folder, oracle.spec)


def test_what_an_engine_of_codes_knows(tmp_path: Path) -> None:
    """All that makes graphs again does: verify, pass by pass too, links, show and cost."""
    oracle = find_oracle(load_spec("tiny-moe"))
    moe_checkpoint(OTHERS["int4"], oracle, tmp_path / "c")
    seen = []
    for way in ({}, {"link_weights": True}, {"backend": "onnx"}):
        out = tmp_path / "-".join(("e", *way))
        engine = built(tmp_path / "c", out, **way)
        seen.append(logits(g4ir.load_engine(out), oracle))
        peer = "reference" if "link_weights" in way else "hf"
        assert verify_engine(engine, peer, checkpoint=tmp_path / "c").ok
    assert verify_engine(engine, against="reference").ok
    # The last, of networks, does not know where its checkpoint is.
    assert verify_each_pass(engine, [*range(5, 17)], checkpoint=tmp_path / "c").ok
    assert torch.equal(seen[0], seen[1])
    assert relative(seen[2], seen[0]).max().item() < oracle.budget
    prologue = (tmp_path / "e" / "prologue.g4ir").read_text()
    assert " quantize" not in prologue and "L0.attn.wq.codes" in prologue
    path = str(tmp_path / "e")
    assert "%L0.attn.wo.codes" in command("show", path).out
    assert command("cost", path).code == 0
    assert command("verify", path, "--each-pass").code == 0


def test_the_mobile_form_in_bf16(tmp_path: Path) -> None:
    """Scales are rounded before they are multiplied; all other weights once, after it."""
    oracle = find_oracle(load_spec("tiny-ple"))
    folder = CASES["mobile"].write(oracle, tmp_path / "c")
    engine = built(folder, tmp_path / "e", dtype="bf16")
    source = Checkpoint.open(folder, engine.spec)
    for name in ("layers.0.self_attn.q_proj.weight", "embed_tokens.weight", "lm_head.weight"):
        codes, scales = (source.tensor(name + part) for part in (".codes", ".scales"))
        numbers = unpack_codes(codes) if codes.dtype == torch.uint8 else codes
        want = numbers.to(torch.bfloat16) * scales.to(torch.bfloat16)
        param = next(p for p in weights_of(engine.spec) if checkpoint_name(p) == name)
        assert torch.equal(engine.param(param), want), name
        dense = find_origin(folder).open(engine.spec, (), engine.dtype)
        assert torch.equal(dense.tensor(name).to(torch.bfloat16), want), name


@pytest.mark.parametrize(("part", "kind"), [("_scale", "Q4_0"), ("", "Q8_0")])
def test_scales_beyond_float16_in_a_gguf_file(part: str, kind: str, tmp_path: Path) -> None:
    """A GGUF file's scales are float16: those of codes that are copied, and of values that are
    quantised."""
    spec, name = load_spec("tiny-ple"), f"layers.1.self_attn.q_proj.weight{part}"
    if part:
        folder = CASES["int4 in rows"].write(find_oracle(spec), tmp_path / "c")
    else:
        folder = write_checkpoint(tmp_path / "c", spec, random_weights(spec, 3, F32))

    def change(tensors: Tensors) -> None:
        tensors[next(n for n in tensors if n.endswith(name))] *= 1e9

    source = Checkpoint.open(rewrite(folder, change), spec)
    with pytest.raises(WeightsError, match=r"q_proj.*: a scale of .* does not fit float16"):
        write_gguf(tmp_path / "m.gguf", spec, source, kind, {})
    assert not (tmp_path / "m.gguf").exists()


def test_grids_of_a_tower_that_is_left_out(tmp_path: Path) -> None:
    oracle = find_oracle(load_spec("tiny-ple"))
    folder = CASES["mobile"].write(oracle, tmp_path / "c")
    module = f"{oracle.spec.prefixes.vision[0]}layer"
    spec = find_origin(folder).spec()

    def change(tensors: Tensors) -> None:
        tensors.update(mobile_weight({})(module, torch.ones(4, 32)))
        tensors[f"{module}.input_activation_scale"] = torch.tensor(0.5)

    ignored = Checkpoint.open(rewrite(folder, change), spec).ignored
    assert "quantises activations" in ignored[f"{module}.input_activation_scale"]
    assert "not rounded" in ignored[f"{module}.output_activation_scale"]


def test_links_keep_what_says_how_codes_are_held(tmp_path: Path) -> None:
    oracle = find_oracle(load_spec("tiny-ple"))
    folder = CASES["HF fp8"].write(oracle, tmp_path / "c")
    linked = built(folder, tmp_path / "e", link_weights=True)
    assert torch.equal(logits(g4ir.load_engine(linked.path), oracle), logits(linked, oracle))
    config = {**CASES["HF fp8"].config, "weight_block_size": [15, 16]}
    rewrite(folder, lambda tensors: None, quantization_config=config)
    with pytest.raises(EngineError, match=r"config\.json is missing or is not the file"):
        g4ir.load_engine(linked.path)


def test_towers_in_codes(tmp_path: Path) -> None:
    """They are made dense at build; what else is of a tower left out is not looked at."""
    spec = load_spec("tiny-media")
    source = random_weights(spec, 3, F32)
    folder = write_checkpoint(tmp_path / "c", spec, source, media=("image",))
    means: Tensors = {}

    def change(tensors: Tensors) -> None:
        linears = [n for n in tensors if n.endswith("_proj.linear.weight")]
        for name in (n for n in linears if "vision_tower" in n):
            module, w = name.removesuffix(".weight"), tensors.pop(name)
            means[name] = e4m3_weight(1, 0)(module, w)[name].float()
            tensors.update(e4m3_weight(1, 0, "weight_scale_inv")(module, w))
            means[name] *= tensors[f"{module}.weight_scale_inv"]

    config = {"quant_method": "fp8", "weight_block_size": [1, 1 << 16]}
    rewrite(folder, change, quantization_config=config)
    opened = Checkpoint.open(folder, spec, ("image",))
    assert means and len(opened.forms) == len(means)
    for name, want in means.items():
        bare = next(n for n in opened.forms if name.endswith(n.removeprefix("vision.")))
        assert torch.equal(opened.tensor(bare), want)
    engine = built(folder, tmp_path / "e", media=("image",))
    assert engine.config.quant is None and not Checkpoint.open(folder, spec).forms
