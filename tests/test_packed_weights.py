"""Engines of checkpoints: packed weights, and the layouts that a checkpoint may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir.builder.build import build, prepare
from g4ir.model.tensors import dead_tensors, numel, text_tensors
from g4ir.ops.types import ITEMSIZE
from g4ir.plan.options import BuildOptions
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.write import write_checkpoint
from tests.configs import NAMES, few, spec_called
from tests.oracle import find_oracle, save_checkpoint
from tests.parity import MAX_SEQ, agrees


@pytest.mark.parametrize("name", few(NAMES))
def test_packed_weights_have_no_padding(name: str) -> None:
    """What an engine stores is every tensor once: a layer with K=V packs Q and K alone."""
    spec = spec_called(name)
    prepared = prepare(spec, BuildOptions(random_weights=0))
    assert prepared.param_bytes() == numel(text_tensors(spec)) * ITEMSIZE[spec.dtype]
    packs = {
        n.out.name.split(".")[0]: n
        for n in prepared.packing.prologue.find("concat")
        if ".attn." in n.inputs[0].name
    }
    for layer in spec.layers():
        found = packs.get(f"L{layer.index}")
        parts = [v.name.rsplit(".", 1)[1] for v in found.inputs] if found else ["wq"]
        tied = layer.attention.k_eq_v
        assert parts == (
            ["wq"] if layer.donor is not None else ["wq", "wk"] if tied else ["wq", "wk", "wv"]
        )


#: how a checkpoint of KV-shared layers may look
FORMS: dict[str, dict[str, Any]] = {
    "without dead K and V": {},
    "with dead K and V": {"dead": True},
    "under the prefix of the hub": {"prefix": "model.language_model.", "dead": True},
    "under another prefix": {"prefix": "language_model."},
    "under no prefix": {"prefix": "", "dead": True},
    "in shards": {"shards": 3, "dead": True},
}


def test_all_forms_of_a_checkpoint_are_one_engine(tmp_path: Path) -> None:
    oracle = find_oracle(spec_called("tiny-ple"))
    spec, tokens = oracle.spec, oracle.tokens[:1]
    theirs = save_checkpoint(oracle, tmp_path / "theirs")
    found = {"as transformers writes it": reference_logits(theirs, tokens)}
    for i, (form, options) in enumerate(FORMS.items()):
        source = Checkpoint.open(theirs, spec)
        folder = write_checkpoint(tmp_path / f"form{i}", spec, source, **options)
        assert len(Checkpoint.open(folder, spec).ignored) == (
            len(dead_tensors(spec)) if options.get("dead") else 0
        )
        found[form] = reference_logits(folder, tokens)
    want = found["as transformers writes it"]
    agrees(want, oracle.logits[:1, -1], oracle)
    assert all(torch.equal(logits, want) for logits in found.values())


def reference_logits(checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The last logits of an engine of the reference backend."""
    out = checkpoint.with_name(f"{checkpoint.name}-engine")
    engine = build(None, out, checkpoint=checkpoint, backend="reference", max_seq=MAX_SEQ)
    return engine.session().prefill(tokens)
