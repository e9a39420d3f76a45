"""Adapters that requests choose: each text is that of a model with the adapter merged, in any
company, while others are loaded and removed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.engine.engine import Engine
from g4ir.engine.requests import Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.errors import G4Error, InputError, MissingError
from g4ir.model.tensors import text_tensors
from g4ir.spec.record import load_spec
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cli_tools import refused
from tests.configs import short
from tests.test_adapter import STEM, of_text, write_adapter
from tests.test_scheduler import FREE, finished, prompt, texts

LIMITS = {"max_seq": 96, "prefill_chunk": 16, "max_batch": 4, "dtype": "float32"}
RANKS = (4, 8, 12)


@dataclass
class Lora:
    """An engine with three adapters, `a0` to `a2`, and the folders it came from."""

    folder: Path
    engine: Engine
    base: Engine
    names = ("", "a0", "a1", "a2")

    def merged(self, name: str) -> Engine:
        """The engine with an adapter merged at build."""
        if not name:
            return self.base
        out, adapter = self.folder / f"merged-{name}", [str(self.folder / name)]
        return g4ir.load_engine(out) if out.exists() else self.build(out, adapter=adapter)

    def build(self, out: Path, **options: Any) -> Engine:
        """Another engine of the checkpoint."""
        how = {"backend": self.base.config.backend, **LIMITS, **options}
        return g4ir.build(None, out, checkpoint=self.folder / "checkpoint", **how)


def targets(variant: str) -> list[str]:
    """All projections of the decoder's layers, experts and routers left out."""
    names = text_tensors(load_spec(variant)).items()
    of_layers = (n.removesuffix(".weight") for n, s in names if "layers." in n and len(s) == 2)
    return [n for n in of_layers if ("proj" in n and "router" not in n) or "input_gate" in n]


def made(folder: Path, variant: str, backend: str, **options: Any) -> Lora:
    spec = load_spec(variant)
    checkpoint = folder / "checkpoint"
    write_checkpoint(checkpoint, spec, random_weights(spec, 1, torch.float32))
    for i, rank in enumerate(RANKS):
        config = {"r": rank, "lora_alpha": 2 * rank}
        modules = of_text(targets(variant)[i:])
        write_adapter(folder / f"a{i}", spec, modules, config, rank=rank, seed=i)
    how = {"checkpoint": checkpoint, "backend": backend, **LIMITS, **options}
    base = g4ir.build(None, folder / "base", **how)
    folders = {f"a{i}": folder / f"a{i}" for i in range(len(RANKS))}
    return Lora(folder, g4ir.load_engine(base.path, adapters=folders, adapter_slots=5), base)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Lora:
    """Step programs; per-layer embeddings, shared K and V."""
    return made(tmp_path_factory.mktemp("lora"), "tiny-ple", "torch")


VARIANTS = [("tiny-dense", "reference"), ("tiny-moe", "torch"), ("tiny-moe", "reference")]


@pytest.mark.parametrize(("variant", "backend"), short(*VARIANTS[:2], of=VARIANTS))
def test_logits_are_those_of_the_merged_model(tmp_path: Path, variant: str, backend: str) -> None:
    """K=V layers, whose K term is V's too; the dense MLP beside experts."""
    check_logits(made(tmp_path, variant, backend))


def test_logits_of_step_programs(lora: Lora) -> None:
    check_logits(lora)


def logits(engine: Engine, adapter: str = "") -> torch.Tensor:
    """After a prompt of several chunks, and steps."""
    session = engine.session(adapter=adapter)
    rows = [session.prefill(torch.tensor([prompt(40)]))]
    return torch.cat([*rows, *(session.decode(torch.tensor([5 + i])) for i in range(3))])


def check_logits(lora: Lora) -> None:
    base = logits(lora.base)
    assert torch.equal(logits(lora.engine), base)
    for name in lora.names[1:]:
        got, want = logits(lora.engine, name), logits(lora.merged(name))
        assert (got - want).abs().max() < 1e-4 * want.std()
        assert (got - base).abs().max() > 0.1 * base.std()


@pytest.mark.parametrize("quant", short("int4", of=("int8", "int4")))
def test_a_quantised_base_stays_as_it_is(tmp_path: Path, quant: str) -> None:
    """Weights in bits, the adapter in the engine's dtype: as computed by the definition."""
    lora = made(tmp_path, "tiny-ple", "torch", quant=quant)
    other = lora.build(lora.folder / "reference", quant=quant, backend="reference")
    reference = g4ir.load_engine(other.path, adapters={"a1": lora.folder / "a1"})
    got, want = logits(lora.engine, "a1"), logits(reference, "a1")
    assert (got - want).abs().max() < 1e-3 * want.std()
    assert (got - logits(lora.engine)).abs().max() > 0.1 * want.std()


def requests(lora: Lora) -> list[Request]:
    """Different prompts and lengths, with marks, greedy, of each adapter in turn."""
    lengths = (33, 7, 20, 12, 17, 40, 9, 25)
    return [
        Request(prompt(n, i), 8 + i % 3, FREE, marks=(n // 2,), adapter=lora.names[i % 4])
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("config", [{}, {"prefill_first": True}, {"chunk_tokens": 5}])
def test_adapters_and_the_base_in_one_batch(lora: Lora, config: dict[str, Any]) -> None:
    """Equal to each alone, and to the merged model."""
    got = texts(Scheduler(lora.engine, SchedulerConfig(**config)), requests(lora))
    for request, text in zip(requests(lora), got, strict=True):
        given, how = [*request.tokens], {"stop_ids": (), "max_new_tokens": request.max_new_tokens}
        assert text == lora.merged(request.adapter).generate(given, **how)
        assert text == lora.engine.generate(given, adapter=request.adapter, **how)


def test_the_prefix_cache_tells_adapters_apart(lora: Lora, own_home: Path) -> None:
    seen = []
    for _ in range(2):
        scheduler = Scheduler(lora.engine, SchedulerConfig(prefix_disk=1 << 30))
        for name in lora.names:
            handle = scheduler.submit(Request(prompt(30), 3, FREE, marks=(20,), adapter=name))
            finished(scheduler)
            want = lora.merged(name).generate([*prompt(30)], 3, stop_ids=())
            assert handle.answers[0].tokens == want
            seen.append(handle.counts.cached)
        scheduler.close()
    assert seen == [0] * 4 + [20] * 4


def test_loads_and_removals_disturb_no_stream(lora: Lora, full: bool) -> None:
    """A removed adapter finishes its requests, and its slot is used again only after that."""
    adapters, rng = lora.engine.adapters, random.Random(0)
    assert adapters
    want = texts(Scheduler(lora.engine), requests(lora))
    scheduler = Scheduler(lora.engine)
    handles = [scheduler.submit(r) for r in requests(lora)]
    for name in range(50 if full else 12):
        for _ in range(rng.randint(0, 4)):
            scheduler.step()
        adapters.load(f"x{name}", lora.folder / f"a{name % 3}")
        if all(h.done for h in handles):
            assert [h.answers[0].tokens for h in handles] == want
            handles = [scheduler.submit(r) for r in requests(lora)]
        extra = scheduler.submit(Request(prompt(9), 3, FREE, adapter=f"x{name}"))
        adapters.unload(f"x{name}")
        with pytest.raises(InputError, match=f"adapter 'x{name}': not loaded"):
            scheduler.submit(Request(prompt(9), 3, FREE, adapter=f"x{name}"))
        while not extra.done:
            scheduler.step()
        merged = lora.merged(f"a{name % 3}").generate([*prompt(9)], 3, stop_ids=())
        assert extra.answers[0].tokens == merged
    finished(scheduler)
    assert [h.answers[0].tokens for h in handles] == want
    assert sorted(adapters.loaded) == ["a0", "a1", "a2"]
    assert sum(adapters._users.values()) == 3


def test_drafts_are_verified_with_the_adapter(lora: Lora) -> None:
    text = [*prompt(6), *prompt(6), *prompt(6)]
    drafted = lora.build(lora.folder / "drafts", draft_tokens=4)
    engine = g4ir.load_engine(drafted.path, adapters={"a0": lora.folder / "a0"})
    want = lora.merged("a0").generate(text, 20, stop_ids=())
    assert engine.generate(text, 20, stop_ids=(), adapter="a0", draft="ngram") == want


def test_what_is_refused(lora: Lora, tmp_path: Path) -> None:
    adapters, spec = lora.engine.adapters, load_spec("tiny-ple")
    assert adapters
    absent = {f"{STEM}layers.99.self_attn.q_proj": "layers.0.self_attn.q_proj.weight"}
    refused = {
        "fix: give an adapter of this model": write_adapter(tmp_path / "other", spec, absent),
        "rank 64 of layers.0.*_proj.weight; slots have room for 16": write_adapter(
            tmp_path / "rank", spec, of_text(targets("tiny-ple")[:3]), {"r": 64}, rank=64
        ),
        "has no adapter_config.json": tmp_path,
    }
    before = {n: t.clone() for n, t in adapters.slots.tensors.items()}
    for message, folder in refused.items():
        with pytest.raises(G4Error, match=message):
            adapters.load("new", folder)
    with pytest.raises(InputError, match="adapter 'a0' is loaded already, from"):
        adapters.load("a0", lora.folder / "a0")
    with pytest.raises(InputError, match="expected a name without"):
        adapters.load("a:b", lora.folder / "a0")
    assert all(torch.equal(t, before[n]) for n, t in adapters.slots.tensors.items())
    for name in ("b0", "b1"):
        adapters.load(name, lora.folder / "a0")
    with pytest.raises(InputError, match="no slot of 5 is free"):
        adapters.load("b2", lora.folder / "a0")
    replaced = adapters.loaded["b1"]
    adapters.unload("b0")
    assert adapters.load("b1", f"{lora.folder / 'a1'}=0.5", replace=True).slot != replaced.slot
    adapters.unload("b1")
    with pytest.raises(InputError, match="adapter 'a9': not loaded; loaded: a0, a1"):
        lora.engine.generate([2, 3], adapter="a9")
    with pytest.raises(InputError, match="was loaded without any; load the engine with adapters="):
        lora.base.generate([2, 3], adapter="a0")
    with pytest.raises(InputError, match="was loaded without any"):
        lora.base.session(adapter="a0")
    with pytest.raises(InputError, match="slots for adapters of rank 5000: expected"):
        g4ir.load_engine(lora.base.path, adapter_rank=5000)


def test_other_backends_say_so(tmp_path: Path) -> None:
    """Before a build and at load, with a way out."""
    engine = g4ir.build("tiny-dense", tmp_path / "e", random_weights=0, backend="onnx", **LIMITS)
    with pytest.raises(MissingError, match="programs that onnx compiles for cpu take no adapters"):
        g4ir.load_engine(engine.path, adapter_slots=1)
    serve = ("serve", "tiny-dense", "--random-weights", "0", "--set", "adapter_slots=1")
    for words in ("onnx",), ("torch", "--device", "cuda"), ("torch", "--set", "programs=inductor"):
        message = refused(*serve, "--backend", *words, code=3)
        assert f"programs that {words[0]} compiles for" in message
        assert "use --backend torch --device cpu, or merge one adapter" in message
