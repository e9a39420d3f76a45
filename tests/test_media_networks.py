"""Media through the ONNX and TensorRT backends: towers, and prompts with their soft tokens.

The reference backend, which is compared with transformers (test_towers.py, test_media_models.py),
says what should come out on the same weights. TensorRT is the recorder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import g4ir
from g4ir.backends.onnx_graph import export
from g4ir.backends.primitives import attention, vision
from g4ir.backends.primitives.graph import tower_graphs
from g4ir.backends.primitives.lowerings import LOWERINGS
from g4ir.backends.primitives.network import Network
from g4ir.backends.trt import build as builder
from g4ir.backends.trt import dry_run as dry
from g4ir.backends.trt.dry_run import emulator, one_thread
from g4ir.backends.trt.interface import networks
from g4ir.engine.build import prepare
from g4ir.engine.engine import Engine
from g4ir.errors import CheckError, EngineError
from g4ir.ir.interpret import run_node
from g4ir.media.audio import Waveform
from g4ir.ops import Sample
from g4ir.ops.types import parse_type
from g4ir.plan.engine_limits import Limits
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import Spec, load_spec
from g4ir.spec.shrink import shrink
from g4ir.weights.tensorfile import read_header
from tests.engines import BUDGET, agrees
from tests.media_tools import noise
from tests.oracle import cosine
from tests.test_media_models import Message
from tests.test_ops import node, tensors
from tests.trt.emulated import emulated, emulated_api, use
from tests.trt.running import computed, new_emitter
from tests.trt.test_signatures import distinct, fits_bindings

#: clipped vision with sound; patches and samples without layers; plain vision and pictures seen
#: both ways, with experts
NAMES = ("tiny-media", "tiny-unified", "26b-a4b")
MAX_SEQ, CHUNK, STEPS = 512, 90, 12
#: a picture's tokens see each other in these
BOTH_WAYS = ("tiny-unified", "26b-a4b")


@pytest.fixture(scope="module", autouse=True)
def thread() -> Iterator[None]:
    with one_thread():
        yield


@cache
def spec_of(name: str) -> Spec:
    return load_spec(name) if name.startswith("tiny") else shrink(load_spec(name), media=True)


def options(name: str, **given: Any) -> dict[str, Any]:
    """Random weights of one seed; sounds of two lengths."""
    sound = {} if spec_of(name).audio is None else {"audio_seconds": (0.5, 1.5)}
    return {
        "random_weights": 0,
        "dtype": "float32",
        "max_batch": 2,
        "max_seq": MAX_SEQ,
        "prefill_chunk": CHUNK,
        "all_logits": True,
        **sound,
        **given,
    }


def built(out: Path, backend: str, name: str, **given: Any) -> Engine:
    return g4ir.build(spec_of(name), out, backend=backend, **options(name, **given))


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """`made(backend, name, **options)`, each built once."""
    engines: dict[Any, Engine] = {}

    def engine(backend: str, name: str, version: str = "11.4.0", **given: Any) -> Engine:
        key = (backend, name, version, json.dumps(given, sort_keys=True))
        if key not in engines:
            folder = tmp_path_factory.mktemp(backend)
            with pytest.MonkeyPatch.context() as patch:
                use(patch, emulated(folder, version))
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


def same_soft_tokens(got: Engine, want: Engine, budget: float = BUDGET) -> None:
    for kind, item in items(want):
        pairs = zip(got.encode(kind, item).pieces, want.encode(kind, item).pieces, strict=True)
        for ours, theirs in pairs:
            agrees(ours.float(), theirs.float(), budget)


def message(engine: Engine) -> Message:
    """Pictures near each other, frames, and two sounds where they are heard."""
    m = Message(engine.spec).text(2).image(50, 70).text(1).image(90, 20).text(7).sound(5_001)
    return m.video(2).text(2).sound(7_001).text(3)


def logits(engine: Engine, m: Message, chunk: int) -> list[torch.Tensor]:
    """Of the prompt in chunks, of a ragged turn of text, and of a few steps."""
    session, limits = engine.session(2), engine.limits
    tokens, lengths = torch.tensor([m.tokens] * 2), [len(m.tokens), 0]
    media = {"images": m.media["image"], "videos": m.media["video"], "audio": m.media["audio"]}
    engine.limits = replace(limits, prefill_chunk=chunk)
    try:
        out = [session.prefill(tokens, lengths, all_logits=True, **media)[0]]
        out.append(session.prefill(torch.arange(20, 40).view(2, 10), [10, 7]))
        return out + [session.decode(torch.tensor([i, 2 * i])) for i in (30, 31, 32)]
    finally:
        engine.limits = limits


def same_logits(got: Engine, want: Engine, chunk: int, budget: float = BUDGET) -> None:
    pairs = zip(logits(got, message(got), chunk), logits(want, message(want), chunk), strict=True)
    for ours, theirs in pairs:
        agrees(ours, theirs, budget)


def continued(engine: Engine) -> list[int]:
    m = message(engine)
    return engine.generate(
        m.tokens,
        STEPS,
        stop_ids=(),
        images=m.media["image"],
        videos=m.media["video"],
        audio=m.media["audio"],
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["onnx", "trt"])
def test_networks_are_the_reference(made: Make, backend: str, name: str) -> None:
    """Soft tokens, logits of a prompt in chunks that would cut images, and greedy tokens."""
    got = trt(made, name) if backend == "trt" else made(backend, name)
    want = made("reference", name)
    same_soft_tokens(got, want)
    same_logits(got, want, 71)
    if backend == "onnx":
        assert continued(got) == continued(want)


# --- ONNX -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-media", pytest.param("26b-a4b", marks=pytest.mark.full)])
def test_onnx_in_f16(made: Make, name: str) -> None:
    """Bounds of clamps and masks fit the dtype."""
    got, want = (made(b, name, dtype="float16") for b in ("onnx", "reference"))
    for kind, item in items(want):
        pairs = zip(got.encode(kind, item).pieces, want.encode(kind, item).pieces, strict=True)
        for ours, theirs in pairs:
            assert ours.dtype == torch.float16 and ours.isfinite().all()
            assert cosine(ours, theirs).min() > 0.999


@pytest.mark.parametrize("name", NAMES)
def test_onnx_files(made: Make, name: str) -> None:
    """A model per tower; weights lie in the safetensors alone, and each is read by some model."""
    engine = made("onnx", name)
    towers = {f"{t}.onnx" for t in tower_graphs(engine.program)}
    files = {p.name for p in engine.path.glob("*.onnx")}
    assert files == {export.MODEL, export.EMBED, *towers} and towers
    weights = {
        k: h.path.name
        for h in map(read_header, engine.path.glob("*.safetensors"))
        for k in h.entries
    }
    used = set()
    for file in files:
        model = onnx.load(str(engine.path / file), load_external_data=False)
        assert model.ByteSize() < 1 << 20 and model.doc_string
        for t in model.graph.initializer:
            place = {e.key: e.value for e in t.external_data}
            if place and place["location"] != export.CONSTANTS:
                assert weights[t.name.split("[")[0]] == place["location"]
                used.add(t.name.split("[")[0])
    assert used == set(weights)
    model = onnx.load(str(engine.path / export.MODEL), load_external_data=False)
    assert ("block_ids" in {i.name for i in model.graph.input}) == (name in BOTH_WAYS)


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
    torch.testing.assert_close(computed(e, feeds)["y"], run_node(n, given)[0])
    assert sum(x._kind == "softmax" for x in e.network._layers) == parts


# --- TensorRT ---------------------------------------------------------------------------------

#: name -> version, settings
TRT: dict[str, tuple[str, dict[str, str]]] = {
    "tiny-media": ("11.4.0", {"weights": "refit"}),
    "tiny-unified": ("10.16.1", {"attention": "fused"}),
    "26b-a4b": ("11.4.0", {"weights": "streamed", "attention": "fused"}),
}


def trt(made: Make, name: str) -> Engine:
    version, settings = TRT[name]
    return made("trt", name, version, settings=settings)


def test_trt_in_bf16(made: Make) -> None:
    """Units in the last place, layers deep."""
    got, want = (made(b, "tiny-unified", dtype="bfloat16") for b in ("trt", "reference"))
    same_soft_tokens(got, want, 0.1)
    same_logits(got, want, CHUNK, 0.15)


@pytest.mark.parametrize("name", NAMES)
def test_trt_plans(made: Make, name: str) -> None:
    """One of the text model, one of each tower, each with what it is fed; none is read before it is
    needed."""
    engine = trt(made, name)
    kept = engine.manifest["compiled"]
    towers = tower_graphs(engine.program)
    assert kept["others"] == {t: f"{t}.plan" for t in towers} and towers
    for tower, graph in towers.items():
        described = json.loads((engine.path / f"{tower}.io.json").read_text())
        assert [x["name"] for x in described["inputs"]] == [v.name for v in graph.inputs]
        assert [x["name"] for x in described["outputs"]] == ["soft"] and not described["profiles"]
        assert f"{tower}.plan" in engine.manifest["files"]
    fed = {x["name"] for x in json.loads((engine.path / "engine.io.json").read_text())["inputs"]}
    assert ("block_ids" in fed) == (name in BOTH_WAYS)


@pytest.mark.parametrize(
    ("name", "version", "settings"),
    [
        ("tiny-unified", "10.16.1", {}),
        ("tiny-media", "11.4.0", {"attention": "fused"}),
        pytest.param("26b-a4b", "10.16.1", {"attention": "explicit"}, marks=pytest.mark.full),
        pytest.param("26b-a4b", "11.4.0", {"attention": "fused"}, marks=pytest.mark.full),
    ],
)
def test_trt_calls(
    name: str,
    version: str,
    settings: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What building and running towers and prompts asks, against the real bindings."""
    api = emulator(version)
    use(monkeypatch, emulated(tmp_path, version, api=lambda: api))
    engine = built(tmp_path / "engine", "trt", name, settings=settings)
    same_soft_tokens(engine, engine)
    logits(engine, message(engine), CHUNK)
    engine.close()
    calls = distinct(api.trt.calls)
    flags = {c.args[0].name for c in calls if c.member == "clear_flag"}
    assert flags == {"TF32"}, "what is fp32 in the ops is fp32"
    fits_bindings(calls, version)


def test_trt_bytes_on_disk(tmp_path: Path) -> None:
    """A tower of two sizes is in two plans."""
    p = prepare(
        spec_of("tiny-media"), BuildOptions(backend="trt", audio_seconds=(0.5, 1.5)), dry=True
    )
    program, settings = p.packing.program, dict(p.settings)
    every = networks(program)
    audio = [builder.weight_bytes(g) for name, g in every.items() if name.startswith("audio")]
    assert len(audio) == 2 and audio[0] == audio[1] > 0
    whole = sum(map(builder.weight_bytes, every.values()))
    assert p.backend.repeated_bytes(program, settings) == whole
    assert p.backend.repeated_bytes(program, {**settings, "weights": "refit"}) == 0


@pytest.mark.parametrize(
    "op", ["chunked_attention", pytest.param("pool_patches", marks=pytest.mark.full)]
)
def test_dry_run_finds_a_wrong_tower(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    p = prepare(load_spec("e2b"), BuildOptions(backend="trt"), dry=True)
    right = builder.lowerings

    def wrong(form: str) -> Any:
        found = right(form)
        return {**found, op: lambda net, n, *xs: net.e.add(found[op](net, n, *xs), 0.01)}

    monkeypatch.setattr(builder, "lowerings", wrong)
    with pytest.raises(CheckError, match=r"soft of .* differ from the reference"):
        dry.check_small(emulated_api(), p, "f32")


def test_dry_run_finds_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are looked at."""
    p = prepare(load_spec("12b"), BuildOptions(backend="trt"), dry=True)

    def own(net: Any, positions: Any, block_ids: Any) -> Any:
        return net.e.cast(net.operand(positions), "i32")

    monkeypatch.setattr(attention, "_last_seen", own)
    with pytest.raises(CheckError, match=r"logits of .* differ from the reference"):
        dry.check_small(emulated_api(), p, "f32")
