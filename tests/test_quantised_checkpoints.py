"""Checkpoints that are in codes already: engines of them against transformers on the same files."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import g4ir
from g4ir.check.logits import verify_engine
from g4ir.check.passes import verify_each_pass
from g4ir.engine.engine import Engine
from g4ir.errors import EngineError, InputError
from g4ir.model.names import checkpoint_name
from g4ir.ops.codecs import unpacked
from g4ir.quant.rewrite import weights_of
from g4ir.spec.record import load_spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.origin import find_origin
from g4ir.weights.random import RandomCheckpoint
from g4ir.weights.write import write_checkpoint
from tests.cli_tools import g4ir as command
from tests.oracle import Oracle, find_oracle, relative, save_checkpoint
from tests.packing import Case, Tensors, e4m3_weight, is_linear, meaning, mobile_weight, rewrite

F32 = torch.float32
LIMITS: dict[str, Any] = {"max_seq": 64, "prefill_chunk": 16, "all_logits": True, "dtype": "f32"}
ROWS = yaml.safe_load(Path(__file__).with_name("quantised_checkpoints.yaml").read_text())
CASES, OTHERS = (
    {name: Case.of(row) for name, row in ROWS[kind].items()}
    for kind in ("read_by_transformers", "others")
)


@contextmanager
def packed_zero_points() -> Iterator[None]:
    """compressed-tensors 0.20 packs weights on the meta device and leaves zero points unpacked, so
    that transformers 5.24 refuses the packed ones of a checkpoint: here they are packed too."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    compress = PackedQuantizationCompressor.compress

    def packed(state: dict[str, torch.Tensor], scheme: Any) -> dict[str, torch.Tensor]:
        on_meta, found = state["weight"].is_meta, compress(state, scheme)
        point = found.get("weight_zero_point")
        if on_meta and point is not None and point.shape[0] == state["weight"].shape[0]:
            rows = -(-point.shape[0] * scheme.weights.num_bits // 32)
            found["weight_zero_point"] = point.new_empty(rows, *point.shape[1:], dtype=torch.int32)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedQuantizationCompressor, "compress", packed)
        yield


def theirs(folder: Path, oracle: Oracle) -> torch.Tensor:
    """The logits of transformers on a checkpoint."""
    pytest.importorskip("accelerate")
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with packed_zero_points():
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, dtype=F32, attn_implementation="eager", output_loading_info=True
        )
    assert not told["missing_keys"] and not told["mismatched_keys"], told
    with torch.no_grad():
        made: torch.Tensor = model(oracle.tokens[:1, :40], use_cache=False).logits
    return made


def built(folder: Path, out: Path, **options: Any) -> Engine:
    given = {"backend": "reference", **LIMITS, **options}
    return g4ir.build(None, out, checkpoint=folder, **given)


def logits(engine: Engine, oracle: Oracle) -> torch.Tensor:
    return engine.session().prefill(oracle.tokens[:1, :40], all_logits=True)


FULL = pytest.mark.full
#: every case on one model; on another, and some on the torch backend, with --full
FILES = [pytest.param(c, "tiny-ple", "reference", id=c) for c in CASES]
FILES += [pytest.param(c, "tiny-dense", "reference", marks=FULL) for c in CASES]
TORCH = ("int4 in groups", "fp8 in rows", "mobile")
FILES += [pytest.param(c, "tiny-ple", "torch", marks=FULL) for c in TORCH]


@pytest.mark.parametrize(("case", "model", "backend"), FILES)
def test_transformers_on_the_same_files(
    case: str, model: str, backend: str, tmp_path: Path
) -> None:
    oracle = find_oracle(load_spec(model))
    folder = CASES[case].write(oracle, tmp_path / "c")
    got = logits(built(folder, tmp_path / "e", backend=backend), oracle)
    assert relative(got, theirs(folder, oracle)).max().item() < oracle.budget


def moe_checkpoint(case: Case, oracle: Oracle, folder: Path) -> Oracle:
    """Write a checkpoint with all matrices in codes but tables, head and router; experts one by
    one. Returns the dense model that it means."""
    model = copy.deepcopy(oracle.model)
    dense = dict(model.named_parameters())

    def packed_as(name: str, w: torch.Tensor) -> Tensors:
        made = case.pack(name, w)
        means[name] = meaning(made, tuple(w.shape), *case.blocks)
        return made

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            module = name.removesuffix(".weight")
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors.update(experts(name, tensors.pop(name)))
            elif is_linear(module, tensors[name]) and "router" not in name:
                tensors.update(packed_as(module, tensors.pop(name)))
                dense[name].data.copy_(means[module])

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
        dense[name].data.copy_(torch.cat(made).view(w.shape))
        if not case.stacked:
            return out
        codes, scales = (
            torch.stack([t for n, t in out.items() if n.endswith(end)])
            for end in (".weight", case.stacked)
        )
        return {name: codes, f"{name}{case.stacked}": scales}

    means: Tensors = {}
    save_checkpoint(oracle, folder)
    config = copy.deepcopy(case.config)
    if "ignore" in config:
        config["ignore"] = ["lm_head", "re:.*router.*"]
    rewrite(folder, change, quantization_config=config)
    return replace(oracle, model=model)


@pytest.mark.parametrize("case", OTHERS)
def test_experts_and_blocks(case: str, tmp_path: Path) -> None:
    """Against the dense model: transformers leaves experts that lie one by one at random."""
    oracle = find_oracle(load_spec("tiny-moe"))
    dense = moe_checkpoint(OTHERS[case], oracle, tmp_path / "c")
    engine = built(tmp_path / "c", tmp_path / "e")
    assert engine.recipe and engine.recipe.held
    for name in ("L0.moe.gate_up", "L1.moe.down", "L2.attn.wq"):
        want = dense.tensors[f"model.{checkpoint_name(name)}"]
        assert torch.equal(engine.param(name), want), name
    got, want = logits(engine, oracle), dense.run(oracle.tokens[:1, :40])
    assert relative(got, want).max().item() < oracle.budget


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
        numbers = unpacked(codes) if codes.dtype == torch.uint8 else codes
        want = numbers.to(torch.bfloat16) * scales.to(torch.bfloat16)
        param = next(p for p in weights_of(engine.spec) if checkpoint_name(p) == name)
        assert torch.equal(engine.param(param), want), name
        dense = find_origin(folder).open(engine.spec, (), engine.dtype)
        assert torch.equal(dense.tensor(name).to(torch.bfloat16), want), name


def test_grids_of_a_tower_that_is_left_out(tmp_path: Path) -> None:
    oracle = find_oracle(load_spec("tiny-ple"))
    folder = CASES["mobile"].write(oracle, tmp_path / "c")
    module = f"{oracle.spec.prefixes.vision[0]}layer"
    spec = find_origin(folder).spec()

    def change(tensors: Tensors) -> None:
        tensors.update(mobile_weight({})(module, torch.ones(4, 32)))
        tensors[f"{module}.input_activation_scale"] = torch.tensor(0.5)

    ignored = Checkpoint.open(rewrite(folder, change), spec).ignored
    assert "grid of their own" in ignored[f"{module}.input_activation_scale"]
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
    source = RandomCheckpoint(spec, 3, F32)
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
    assert engine.recipe is None and not Checkpoint.open(folder, spec).forms


def test_quantised_twice(tmp_path: Path) -> None:
    oracle = find_oracle(load_spec("tiny-ple"))
    folder = CASES["int8 in words"].write(oracle, tmp_path / "c")
    with pytest.raises(InputError, match=r"--quant int4: .*c is quantised already; leave --quant"):
        built(folder, tmp_path / "e", quant="int4")
    assert not (tmp_path / "e").exists()
