"""`make test-real`: LoRA adapters that PEFT itself makes, and its logits with them.

Not part of `make test`, whose environment has no PEFT; tests/test_adapter.py has the formula.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model

import g4ir
from g4ir.errors import WeightsError
from g4ir.spec.record import load_spec
from g4ir.weights.checkpoint import Checkpoint
from tests.oracle import Oracle, find_oracle, relative, save_checkpoint
from tests.test_adapter import merged

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def trained(oracle: Oracle, folder: Path, seed: int = 0, **config: Any) -> Any:
    """PEFT's model, its adapter filled as by training and saved."""
    known = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "task_type": "CAUSAL_LM"}
    model = get_peft_model(copy.deepcopy(oracle.model), LoraConfig(**{**known, **config}))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in model.named_parameters():
            if "lora_" in name:
                t.copy_(torch.randn(t.shape, generator=draw) / 20)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("case", CASES["cases"])
def test_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    """An engine's, within the budget of the model, and the weights of `merge_and_unload`."""
    variant, config = CASES["cases"][case]
    spec = load_spec(variant)
    oracle = find_oracle(spec)
    folder = save_checkpoint(oracle, tmp_path / "c")
    model, tokens = trained(oracle, tmp_path / "a", **config), oracle.tokens[:1, :40]
    with torch.no_grad():
        want = model(input_ids=tokens, use_cache=False).logits
    given: dict[str, Any] = {"backend": "reference", "dtype": "float32", "all_logits": True}
    engine = g4ir.build(
        None, tmp_path / "e", checkpoint=folder, adapter=tmp_path / "a", max_seq=64, **given
    )
    got = engine.session().prefill(tokens, all_logits=True)
    assert relative(got, want).max().item() < oracle.budget
    assert relative(want, oracle.run(tokens)).max().item() > 100 * oracle.budget
    theirs, ours = model.merge_and_unload().state_dict(), merged(folder, spec, tmp_path / "a")
    for name in ours.weights:
        wanted = theirs.get(f"model.{name}", theirs.get(name))
        torch.testing.assert_close(ours.tensor(name).float(), wanted, rtol=1e-6, atol=1e-6)


def test_two_adapters_of_different_dtypes(tmp_path: Path) -> None:
    """Their sums add up in float32, each with its scale."""
    spec = load_spec("tiny-dense")
    oracle = find_oracle(spec)
    folder = save_checkpoint(oracle, tmp_path / "c")
    first, other = (trained(oracle, tmp_path / n, seed) for seed, n in enumerate("ab"))
    with torch.no_grad():
        for name, t in other.named_parameters():
            if "lora_" in name:
                t.data = t.data.bfloat16()
    other.save_pretrained(tmp_path / "b")
    other = other.float()
    one, two = (m.merge_and_unload().state_dict() for m in (first, other))
    got = merged(folder, spec, tmp_path / "a", f"{tmp_path / 'b'}=0.5")
    base = Checkpoint.open(folder, spec)
    for name in got.weights:
        stored = base.tensor(name)
        want = one[f"model.{name}"] + 0.5 * (two[f"model.{name}"] - stored)
        torch.testing.assert_close(got.tensor(name).float(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("config", "says"), CASES["refused"])
def test_refused(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    spec = load_spec("tiny-dense")
    oracle = find_oracle(spec)
    folder = save_checkpoint(oracle, tmp_path / "c")
    trained(oracle, tmp_path / "a", **config)
    with pytest.raises(WeightsError, match=says):
        merged(folder, spec, tmp_path / "a")


def test_another_base(tmp_path: Path) -> None:
    spec = load_spec("tiny-dense")
    folder = save_checkpoint(find_oracle(spec), tmp_path / "c")
    trained(find_oracle(load_spec("tiny-gemma3")), tmp_path / "a")
    with pytest.raises(WeightsError, match=r"fix: give an adapter of this model"):
        merged(folder, spec, tmp_path / "a")
