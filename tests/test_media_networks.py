"""Media through the ONNX and TensorRT backends: towers, and prompts with their soft tokens.

The reference backend, which is compared with transformers (test_media_models.py),
says what should come out on the same weights. tests/trt/fake.py stands for TensorRT.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.backends.primitives import vision
from g4ir.backends.primitives.graph import tower_graphs
from g4ir.backends.primitives.lowerings import LOWERINGS
from g4ir.backends.primitives.network import Network
from g4ir.backends.trt import build as builder
from g4ir.backends.trt.interface import networks
from g4ir.builder.build import prepare
from g4ir.engine.engine import Engine
from g4ir.errors import EngineError
from g4ir.ir.interpret import run_node
from g4ir.media.audio import Waveform
from g4ir.ops import Sample
from g4ir.ops.types import parse_type
from g4ir.plan.engine_limits import Limits
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import Spec, load_spec
from tests.configs import short
from tests.engines import agrees
from tests.media_tools import noise
from tests.shrink import shrink
from tests.test_media_models import message
from tests.test_ops import node, tensors
from tests.trt.emulated import emulated, use
from tests.trt.segments import new_emitter, outputs_of

#: clipped vision with sound; patches and samples without layers; plain vision and pictures seen
#: both ways, with experts
NAMES = ("tiny-media", "tiny-unified", "26b-a4b")
#: what the short run builds
QUICK = [*product(("onnx", "trt"), NAMES[:2])]
MAX_SEQ, CHUNK = 512, 90
#: a picture's tokens see each other in these
BOTH_WAYS = ("tiny-unified", "26b-a4b")


@cache
def spec_of(name: str) -> Spec:
    return load_spec(name) if name.startswith("tiny") else shrink(load_spec(name), media=True)


def built(out: Path, backend: str, name: str, **given: Any) -> Engine:
    """Random weights of one seed; sounds of two lengths."""
    limits = {"max_batch": 2, "max_seq": MAX_SEQ, "prefill_chunk": CHUNK}
    sound = {} if spec_of(name).audio is None else {"audio_seconds": (0.5, 1.5)}
    how = {"random_weights": 0, "dtype": "float32", "all_logits": True, **limits, **sound, **given}
    return g4ir.build(spec_of(name), out, backend=backend, **how)


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """`made(backend, name, **options)`, each built once."""
    engines: dict[Any, Engine] = {}

    def engine(backend: str, name: str, **given: Any) -> Engine:
        key = (backend, name, json.dumps(given, sort_keys=True))
        if key not in engines:
            folder = tmp_path_factory.mktemp(backend)
            with pytest.MonkeyPatch.context() as patch:
                use(patch, emulated(folder))
                engines[key] = built(folder / "engine", backend, name, **given)
        return engines[key]

    yield engine
    for e in engines.values():
        e.close()


# --- what is compared -------------------------------------------------------------------------


def items(engine: Engine) -> list[tuple[str, Any]]:
    """Wide and tall pictures, frames; sounds of one frame, of the first tower, of the second."""
    out: list[tuple[str, Any]] = [("image", noise(60, 90, 3)), ("image", noise(90, 20, 3, seed=1))]
    out += [("video", noise(2, 40, 60, 3))]
    sounds = [noise(n).astype("float32") / 128 - 1 for n in (200, 7_001, 23_000)]
    kinds = engine.media.kinds
    return [i for i in out if i[0] in kinds] + [
        ("audio", Waveform(s, 16_000)) for s in sounds if "audio" in kinds
    ]


#: numbers of text tokens, and media
PARTS: list[Any] = [2, ("image", (50, 70)), 1, ("image", (90, 20)), 7, ("audio", 5_001)]
PARTS += [("video", 2), 2, ("audio", 7_001), 3]


def logits(engine: Engine, chunk: int) -> list[torch.Tensor]:
    """Of a prompt in chunks, with pictures near each other, frames, and two sounds where they are
    heard; of a ragged turn of text, and of a few steps."""
    m = message(engine.spec, PARTS)
    session, facts = engine.session(2), engine.facts
    tokens, lengths = torch.tensor([m.tokens] * 2), [len(m.tokens), 0]
    limits = replace(engine.limits, prefill_chunk=chunk)
    engine.facts = engine.configured(limits=limits).facts
    try:
        out = [session.prefill(tokens, lengths, all_logits=True, **m.lists())[0]]
        out.append(session.prefill(torch.arange(20, 40).view(2, 10), [10, 7]))
        return out + [session.decode(torch.tensor([i, 2 * i])) for i in (30, 31, 32)]
    finally:
        engine.facts = facts


@pytest.mark.parametrize("backend, name", short(*QUICK, of=product(("onnx", "trt"), NAMES)))
def test_networks_are_the_reference(made: Make, backend: str, name: str) -> None:
    """Soft tokens, and logits of a prompt in chunks that would cut images."""
    got = trt(made, name) if backend == "trt" else made(backend, name)
    want = made("reference", name)
    for kind, item in items(want):
        pairs = zip(got.encode(kind, item).pieces, want.encode(kind, item).pieces, strict=True)
        for ours, theirs in pairs:
            agrees(ours, theirs)
    for ours, theirs in zip(logits(got, 71), logits(want, 71), strict=True):
        agrees(ours, theirs)


# --- ONNX -------------------------------------------------------------------------------------


def test_onnx_refuses_other_sizes(made: Make) -> None:
    """What a tower is not made for, with its name."""
    feeds = {"patches": torch.zeros(1, 9, 48), "positions": torch.zeros(1, 9, 2, dtype=torch.int64)}
    with pytest.raises(EngineError, match=r"vision_70\.onnx: onnxruntime .* failed on patches"):
        made("onnx", "tiny-media").runtime.encode("vision_70", feeds)


# --- primitives -------------------------------------------------------------------------------


@pytest.mark.parametrize("scores, parts", [(1 << 20, 1), (4 * 11 * 4, 3), (1, 11)])
def test_queries_in_parts(monkeypatch: pytest.MonkeyPatch, scores: int, parts: int) -> None:
    """As many parts as the scores need, the last one shorter."""
    monkeypatch.setattr(vision, "SCORES", scores)
    kinds = ("f32[1,11,4,8]", "f32[1,11,2,8]", "f32[1,11,2,8]", "bool[1,11]")
    types = tuple(map(parse_type, kinds))
    n = node("encoder_attention", types, {"scale": 1.0})
    given = tensors(types, Sample(kinds))
    feeds = {v.name: t for v, t in zip(n.inputs, given, strict=True)}
    e = new_emitter()
    net = Network(e, None, Limits(1, 64, 8), LOWERINGS)  # type: ignore[arg-type]
    net.env.update({v.name: e.input(v.name, v.type) for v in n.inputs})
    net.node(n)
    e.output("y", net.env[n.out.name])
    torch.testing.assert_close(outputs_of(e, feeds)["y"], run_node(n, given)[0])
    assert sum(x.op_type == "Softmax" for x in e.nodes) == parts


# --- TensorRT ---------------------------------------------------------------------------------

TRT: dict[str, dict[str, str]] = {
    "tiny-media": {},
    "tiny-unified": {"attention": "fused"},
    "26b-a4b": {"attention": "fused"},
}


def trt(made: Make, name: str) -> Engine:
    return made("trt", name, settings=TRT[name])


@pytest.mark.parametrize("name", short(*NAMES[:2], of=NAMES))
def test_trt_plans(made: Make, name: str) -> None:
    """One of the text model, one of each tower, each with what it is fed."""
    engine = trt(made, name)
    towers = tower_graphs(engine.program)
    assert towers
    for tower, graph in towers.items():
        described = json.loads((engine.path / f"{tower}.io.json").read_text())
        assert [x["name"] for x in described["inputs"]] == [v.name for v in graph.inputs]
        assert [x["name"] for x in described["outputs"]] == ["soft"] and not described["profiles"]
        assert f"{tower}.plan" in engine.manifest["files"]
    fed = {x["name"] for x in json.loads((engine.path / "engine.io.json").read_text())["inputs"]}
    assert ("block_ids" in fed) == (name in BOTH_WAYS)


def test_trt_bytes_on_disk(tmp_path: Path) -> None:
    """A tower of two sizes is in two plans."""
    options = BuildOptions(backend="trt", audio_seconds=(0.5, 1.5))
    p = prepare(spec_of("tiny-media"), options, dry=True)
    program, settings = p.packing.program, dict(p.config.settings)
    every = networks(program)
    audio = [builder.weight_bytes(g) for name, g in every.items() if name.startswith("audio")]
    assert len(audio) == 2 and audio[0] == audio[1] > 0
    whole = sum(map(builder.weight_bytes, every.values()))
    assert p.backend.repeated_bytes(program, settings) == whole
