"""LoRA adapters: weights by PEFT's formula, whole engines, and adapters that are refused. Adapters
that requests choose: each text is that of a model with the adapter merged, in any company, while
others are loaded and removed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import g4ir
from g4ir import Engine, Spec, load_spec
from g4ir.check.logits import verify_engine
from g4ir.engine.requests import Request
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.errors import EngineError, G4Error, InputError, MissingError
from g4ir.model.media import KINDS
from g4ir.model.tensors import media_tensors, text_tensors
from g4ir.weights.adapter import Adapter, with_adapters
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.origin import find_origin
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint
from tests.cases import TABLES, read_table
from tests.cli_tools import g4ir as command
from tests.cli_tools import refused
from tests.configs import short
from tests.gguf_files import bare_file
from tests.test_scheduler import FREE, finished, prompt, texts

Tensors = dict[str, torch.Tensor]
CONFIG = read_table("adapter_config.yaml")
STEM = "base_model.model.model.language_model."
SPEC = load_spec("tiny-dense")
#: of the checkpoint's names; layer 5 of tiny-dense is a full one, with K=V
TARGETS = ("layers.0.self_attn.q_proj", "layers.5.self_attn.k_proj", "layers.2.mlp.down_proj")


def write_adapter(
    folder: Path,
    spec: Spec,
    modules: dict[str, str],
    config: dict[str, Any] | None = None,
    edit: Callable[[Tensors], Any] = lambda t: None,
    rank: int = 4,
    seed: int = 0,
) -> Path:
    """As PEFT's save_pretrained writes one; `modules`: name there -> the weight's bare name."""
    folder.mkdir(exist_ok=True)
    shapes = text_tensors(spec) | media_tensors(spec, KINDS)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, bare in modules.items():
        n, k = shapes[bare]
        a = torch.randn(rank, k, generator=draw) / k**0.5
        tensors[f"{module}.lora_A.weight"] = a
        tensors[f"{module}.lora_B.weight"] = torch.randn(n, rank, generator=draw) / 4
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    return folder


def of_text(names: Any = TARGETS, stem: str = STEM) -> dict[str, str]:
    return {f"{stem}{name}": f"{name}.weight" for name in names}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of tiny-dense in bfloat16; do not alter it."""
    source = random_weights(SPEC, 1, torch.bfloat16)
    return write_checkpoint(tmp_path_factory.mktemp("dense") / "c", SPEC, source)


def merged(checkpoint: Path, spec: Spec, *given: str | Path, media: Any = ()) -> Checkpoint:
    opened = Checkpoint.open(checkpoint, spec, media)
    return with_adapters(opened, spec, [Adapter.of(g) for g in given])


@pytest.mark.parametrize("case", TABLES["scales of adapters"])
def test_the_formula(dense: Path, tmp_path: Path, case: str) -> None:
    config, scale = TABLES["scales of adapters"][case]
    folder = write_adapter(tmp_path / "a", SPEC, of_text(TARGETS[:1]), config)
    parts = load_file(folder / "adapter_model.safetensors")
    a, b = (parts[f"{STEM}{TARGETS[0]}.lora_{x}.weight"].double() for x in "AB")
    name = f"{TARGETS[0]}.weight"
    base = Checkpoint.open(dense, SPEC).tensor(name).double()
    for given, factor in ((folder, 1.0), (f"{folder}=0.25", 0.25)):
        got = merged(dense, SPEC, given).tensor(name)
        want = base + factor * scale * b @ a
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    twice = merged(dense, SPEC, folder, f"{folder}=-1").tensor(name)
    torch.testing.assert_close(twice.double(), base, rtol=1e-5, atol=1e-5)
    other = "layers.1.self_attn.q_proj.weight"
    source = merged(dense, SPEC, folder)
    assert torch.equal(source.tensor(other), Checkpoint.open(dense, SPEC).tensor(other))


@pytest.mark.parametrize("stem", TABLES["stems of adapters"])
def test_names(dense: Path, tmp_path: Path, stem: str) -> None:
    folder = write_adapter(tmp_path / "a", SPEC, of_text(stem=stem))
    source, base = merged(dense, SPEC, folder), Checkpoint.open(dense, SPEC)
    changed = {n for n in base.weights if not torch.equal(source.tensor(n), base.tensor(n))}
    assert changed == {f"{name}.weight" for name in TARGETS}


@pytest.mark.parametrize("transposed", [False, True])
def test_experts(tmp_path: Path, transposed: bool) -> None:
    """PEFT names no parameter: wrappers lie one within the other, and shapes tell them apart."""
    spec = load_spec("tiny-moe")
    source = random_weights(spec, 1, torch.float32)
    folder = write_checkpoint(tmp_path / "c", spec, source)
    ranks = {"gate_up_proj": (4, f"{STEM}layers.0.experts.base_layer")}
    ranks["down_proj"] = (2, f"{STEM}layers.0.experts")
    want: Tensors = {}

    def edit(tensors: Tensors) -> None:
        for name, (rank, module) in ranks.items():
            bare = f"layers.0.experts.{name}"
            e, n, k = source.tensor(bare).shape
            n, k = (k, n) if transposed else (n, k)
            a, b = torch.randn(e * rank, k), torch.randn(n, rank * e)
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            parts = b.view(n, rank, e), a.view(e, rank, k)
            made = torch.einsum("nre,erk->enk", *parts)
            want[bare] = source.tensor(bare) + 16 / rank * (made.mT if transposed else made)

    config = {"target_parameters": [*ranks], "rank_pattern": {"experts.down_proj": 2}}
    got = merged(folder, spec, write_adapter(tmp_path / "a", spec, {}, config, edit))
    for bare, values in want.items():
        torch.testing.assert_close(got.tensor(bare), values, rtol=1e-5, atol=1e-4)
    down = "layers.1.experts.down_proj"
    assert torch.equal(got.tensor(down), source.tensor(down))


def test_towers(tmp_path: Path) -> None:
    """Merged where the engine has them, left out by name where not, as K and V that none reads."""
    spec = load_spec("tiny-media")
    source = random_weights(spec, 1, torch.float32)
    folder = write_checkpoint(tmp_path / "c", spec, source, media=KINDS)
    stem = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.linear"
    bare = "vision.encoder.layers.0.self_attn.q_proj.linear.weight"
    dead = f"{STEM}layers.7.self_attn.k_proj"
    names = {stem: bare, dead: "layers.3.self_attn.k_proj.weight", **of_text(TARGETS[:1])}
    adapter = write_adapter(tmp_path / "a", spec, names)
    whole = merged(folder, spec, adapter, media=KINDS)
    assert not torch.equal(whole.tensor(bare), source.tensor(bare))
    assert {*whole.ignored.values()} == {"K or V of a layer that reads another layer's K and V"}
    text = merged(folder, spec, adapter)
    assert bare not in text.weights and f"{TARGETS[0]}.weight" in text.weights
    alone = write_adapter(tmp_path / "v", spec, {stem: bare})
    with pytest.raises(
        G4Error, match=r"would change nothing: part of an adapter for a tower.*fix:"
    ):
        merged(folder, spec, alone)
    whys = [why for name, why in text.ignored.items() if "lora" in name and "vision" in name]
    assert whys == ["part of an adapter for a tower, which this engine leaves out"] * 2


WORDS = ("build", "--backend", "reference", "--dtype", "float32", "--max-seq", "64")


@pytest.mark.parametrize("quant", [None, "int8"])
def test_engine_equals_merged_checkpoint(dense: Path, tmp_path: Path, quant: str | None) -> None:
    """K=V: an adapter of K changes V too, as the merged weights do."""
    folder = write_adapter(tmp_path / "a", SPEC, of_text())
    source = merged(dense, SPEC, folder)

    whole = write_checkpoint(tmp_path / "whole", SPEC, source, dtype=torch.float32)
    shared = {"backend": "reference", "dtype": "float32", "max_seq": 64, "quant": quant}
    got = g4ir.build(None, tmp_path / "e", checkpoint=dense, adapter=folder, **shared)
    want = g4ir.build(None, tmp_path / "w", checkpoint=whole, **shared)
    for name in want.program.params():
        one, other = got.runtime.source.tensor(name), want.runtime.source.tensor(name)
        assert torch.equal(one, other), name
    kept = got.manifest["weights"]
    assert kept["kind"] == "merged" and kept["adapters"][0]["path"] == str(folder)
    if not quant:
        assert verify_engine(got, against="hf", checkpoint=dense).ok
    loaded = g4ir.load_engine(tmp_path / "e")
    assert verify_engine(loaded, checkpoint=dense).ok
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(EngineError, match=r"is not the adapter that .* was built with"):
        verify_engine(loaded, against="hf", checkpoint=dense)


def test_commands(dense: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", SPEC, of_text())
    words = (*WORDS, "--checkpoint", dense, "--out", tmp_path / "e")
    made = command(*words, "--adapter", f"{folder}=0.5", "--adapter", folder)
    assert made.code == 0, made.err
    shown = command("inspect", tmp_path / "e")
    assert f"with 0.5 x {folder}, with 1 x {folder}" in shown.out
    linked = (*words[:-1], tmp_path / "l", "--link-weights")
    assert "the checkpoint's own, without an adapter" in refused(*linked, "--adapter", folder)


def test_an_adapter_beside_a_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", SPEC, random_weights(SPEC, 1, torch.float32))
    write_adapter(folder, SPEC, of_text())
    words = (*WORDS, "--checkpoint", folder, "--out", tmp_path / "e", "--dry-run")
    said = f"{folder}: holds a LoRA adapter (adapter_config.json), which is not merged"
    left = command(*words)
    assert left.code == 0 and said in left.err
    assert said not in command(*words, "--adapter", folder).err


Q = f"{STEM}{TARGETS[0]}"
REFUSED: dict[str, dict[str, Any]] = read_table("adapter_refused.yaml")


@pytest.mark.parametrize("case", REFUSED)
def test_refused(dense: Path, tmp_path: Path, case: str) -> None:
    c = REFUSED[case]

    def edit(tensors: Tensors) -> None:
        for name, kind in c.get("tensors", {}).items():
            tensors.pop(name.format(q=Q), None)
            if kind:
                tensors[name.format(q=Q)] = torch.zeros(kind[1], dtype=getattr(torch, kind[0]))

    modules = {name.format(stem=STEM): bare for name, bare in c.get("modules", {}).items()}
    modules = modules or of_text(TARGETS[:1])
    folder = write_adapter(tmp_path / "a", SPEC, modules, c.get("config"), edit)
    with pytest.raises(G4Error) as e:
        merged(dense, SPEC, folder)
    assert c["says"] in str(e.value) and str(folder) in str(e.value) and "fix:" in str(e.value)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_gguf_files(tmp_path: Path, kind: str) -> None:
    name = f"{TARGETS[0]}.weight"
    base = find_origin(bare_file(tmp_path / "a.gguf", SPEC, kind=kind)).open(SPEC, (), "f32")
    adapter = Adapter(write_adapter(tmp_path / "a", SPEC, of_text(TARGETS[:1])))
    if kind == "Q8_0":
        with pytest.raises(G4Error, match=r"is quantised in .*; fix: give the bf16 weights"):
            with_adapters(base, SPEC, [adapter])
        return
    parts = load_file(adapter.weights)
    a, b = (parts[f"{Q}.lora_{x}.weight"] for x in "AB")
    got = with_adapters(base, SPEC, [adapter]).tensor(name)
    torch.testing.assert_close(got, base.tensor(name).float() + 4 * b @ a, rtol=1e-5, atol=1e-5)


def test_what_is_no_adapter(dense: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "r=4", SPEC, of_text())
    assert Adapter.of(folder) == Adapter(folder)
    assert Adapter.of(f"{folder}=5e-1") == Adapter(folder, 0.5)
    for given, words in (
        (tmp_path, "has no adapter_config.json; give the directory"),
        (f"{folder}=much", "no such path, and 'much' is no scale; give DIR=0.5"),
        (f"{folder}=nan", "is no scale"),
    ):
        with pytest.raises(G4Error, match=words):
            Adapter.of(given)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(G4Error, match=r"found only adapter_model.bin: pickles are never opened"):
        merged(dense, SPEC, folder)


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
    second = targets("tiny-ple")[1]

    def larger(tensors: Tensors) -> None:
        for part, by in (("A", (0, 0, 0, 16)), ("B", (0, 16))):
            name = f"{STEM}{second}.lora_{part}.weight"
            tensors[name] = torch.nn.functional.pad(tensors[name], by)

    ranks = {"r": 64, "rank_pattern": {second: 80}}
    refused = {
        "fix: give an adapter of this model": write_adapter(tmp_path / "other", spec, absent),
        "rank 80 of layers.0.*_proj.weight; slots have room for 16": write_adapter(
            tmp_path / "rank", spec, of_text(targets("tiny-ple")[:3]), ranks, larger, rank=64
        ),
        "has no adapter_config.json": tmp_path,
    }
    before = {n: t.clone() for n, t in adapters.slots.tensors.items()}
    for message, folder in refused.items():
        with pytest.raises(G4Error, match=message):
            adapters.load("new", folder)
    with pytest.raises(InputError, match="adapter 'a0' is loaded already, from"):
        adapters.load("a0", lora.folder / "a0")
    with pytest.raises(InputError, match="expected a name of printable characters"):
        adapters.load("a:b", lora.folder / "a0")
    with pytest.raises(InputError, match=r"adapter 'a\\x00': expected a name of printable"):
        adapters.load("a\0", lora.folder / "a0")
    assert all(torch.equal(t, before[n]) for n, t in adapters.slots.tensors.items())
    for name in ("b0", "b1"):
        adapters.load(name, lora.folder / "a0")
    with pytest.raises(InputError, match="none of the 5 slots is free"):
        adapters.load("b2", lora.folder / "a0")
    assert adapters.load("b1", lora.folder / "a2", replace=True) == adapters.loaded["b1"]
    replaced = adapters.loaded["b0"]
    adapters.unload("b1")
    assert adapters.load("b0", f"{lora.folder / 'a1'}=0.5", replace=True).slot != replaced.slot
    adapters.unload("b0")
    with pytest.raises(InputError, match="adapter 'a9': not loaded; loaded: a0, a1"):
        lora.engine.generate([2, 3], adapter="a9")
    with pytest.raises(InputError, match="was loaded without adapters; load the engine with"):
        lora.base.generate([2, 3], adapter="a0")
    with pytest.raises(InputError, match="was loaded without adapters"):
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
        assert "--device cpu without --set programs=inductor, or merge one (g4ir build" in message
