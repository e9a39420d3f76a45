"""Towers, and whole models with media, against transformers: all variants in small, every tensor
random. Checkpoints are written under the hub's names and loaded by both sides, so that names, clip
bounds and tables are compared too.

Pixels, positions and features are made once and go through both: towers, placeholders, the merge,
masks, chunks that would cut pictures, and decoding past three windows.

Engines that take media: verify, verify --each-pass and bench of them; what their builds raise,
compare, refuse and advise before anything is made.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import g4ir
from g4ir import Engine, Spec, load_spec
from g4ir.backends.primitives import vision
from g4ir.bench.runners import Workload, draw_tokens
from g4ir.builder.build import prepare
from g4ir.check.logits import verify_engine
from g4ir.check.media import HEAD, MediaReport, check_media
from g4ir.check.passes import verify_each_pass
from g4ir.check.tokens import random_ids
from g4ir.errors import InputError, PlanError, SpecError, WeightsError
from g4ir.media.audio import Clip, Waveform, prepare_audio
from g4ir.media.images import PreparedImage, prepare_image
from g4ir.media.videos import Footage, Video, prepare_video, video_settings
from g4ir.model.audio import MelSettings, audio_settings
from g4ir.model.images import BUDGETS, image_settings
from g4ir.model.media import KINDS, LISTS, supported_media
from g4ir.plan.footprint import reserve
from g4ir.plan.options import BuildOptions
from g4ir.spec.parts import UnifiedAudio
from tests import cli_tools as cli
from tests.cases import TABLES
from tests.configs import VARIANTS, short
from tests.engines import agrees, random_checkpoint
from tests.media_tools import UNIFIED, media_pair, noise, video_inputs
from tests.runner import with_chunk
from tests.shrink import WINDOW, shrink
from tests.test_verify import attrs, break_pass, nodes
from tests.trt.emulated import emulated, use

MAX_SEQ = 512
STEPS = 3 * WINDOW + 2
#: run by the torch backend, with `--full` compiled
TORCH = "tiny-media"
#: variants with the structure of another
ALIKE = ("e4b", "31b")
#: token types of the reference
TYPES = {"image": 1, "video": 2, "audio": 3}


@cache
def small(variant: str) -> Spec:
    spec = load_spec(variant)
    return spec if variant.startswith("tiny") else shrink(spec, media=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, full: bool) -> Any:
    """`pairs(variant)`: an engine for the logits of every token, and transformers' model."""

    @cache
    def pair(variant: str) -> tuple[Engine, Any]:
        options: dict[str, Any] = {"max_seq": MAX_SEQ, "all_logits": True}
        if variant == TORCH:
            options |= {"backend": "torch", "max_batch": 3, "audio_seconds": [2.0]}
        else:
            options |= {"image_budgets": BUDGETS}
        return media_pair(small(variant), tmp_path_factory.mktemp(variant), 5, **options)

    return pair


# --- what is sent -----------------------------------------------------------------------------


def medium(spec: Spec, kind: str, size: Any, seed: int) -> PreparedImage | Footage | Clip:
    """An image of (width, height), a video of so many frames, or a sound of so many samples: less
    of it where soft tokens are raw frames, which are short here."""
    rng = np.random.default_rng(seed)
    if kind == "audio":
        samples = size // 20 if isinstance(spec.audio, UnifiedAudio) else size
        wave = (0.3 * rng.standard_normal(samples)).astype(np.float32)
        return prepare_audio(Waveform(wave, 16_000), audio_settings(spec))
    if kind == "video":
        pixels = rng.integers(0, 256, (size, 40, 60, 3), dtype=np.uint8)
        return prepare_video(Video(pixels), video_settings(spec))
    pixels = rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return prepare_image(pixels, image_settings(spec))


@dataclass
class Message:
    """Token ids with their types, and the media in order."""

    tokens: list[int]
    types: list[int]
    media: dict[str, list[Any]]
    rng: np.random.Generator

    def lists(self) -> dict[str, list[Any]]:
        """What `prefill` takes."""
        return {name: self.media[kind] for name, kind in LISTS.items()}

    def add(self, ids: list[int], kind: str = "") -> None:
        self.tokens += ids
        self.types += [TYPES.get(kind, 0)] * len(ids)

    def text(self, count: int) -> list[int]:
        return self.rng.integers(4, 200, count).tolist()


#: numbers of text tokens, and media
SENT = TABLES["media models"]
CASES: dict[str, list[Any]] = SENT["prompts"]


def message(spec: Spec, parts: Sequence[Any]) -> Message:
    m = Message([spec.tokens.bos or 0], [0], {k: [] for k in TYPES}, np.random.default_rng(1))
    for part in parts:
        if isinstance(part, int):
            m.add(m.text(part))
        elif part[0] in supported_media(spec):
            kind, size = part
            made: Any = medium(spec, kind, size, len(m.tokens))
            m.media[kind].append(made)
            for _ in range(size if kind == "video" else 1):
                m.add(m.text(3 * (kind == "video")))  # the time of a frame
                m.add([getattr(spec.tokens, kind)] * made.soft_tokens, kind)
    return m


# --- what the reference says ------------------------------------------------------------------


def inputs_of(model: Any, media: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
    """The reference's arguments."""
    out: dict[str, Any] = {}
    if media["image"]:
        out["pixel_values"] = np.stack([i.patches for i in media["image"]])
        out["image_position_ids"] = np.stack([i.positions for i in media["image"]])
    if media["video"]:
        out |= video_inputs(model, media["video"])
    if media["audio"]:
        longest = max(len(c.mask) for c in media["audio"])
        fill = [((0, longest - len(c.mask)), (0, 0)) for c in media["audio"]]
        clips = [*zip(media["audio"], fill, strict=True)]
        out["input_features"] = np.stack([np.pad(c.features, n) for c, n in clips])
        out["input_features_mask"] = np.stack([np.pad(c.mask, n[:1]) for c, n in clips])
    return {k: torch.from_numpy(v) for k, v in out.items()}


def expected(
    model: Any, tokens: Sequence[int], types: Sequence[int], media: dict[str, list[Any]]
) -> torch.Tensor:
    """Logits of every token, [S, vocab], in one call without a cache, with `generate`'s masks."""
    ids, kinds = torch.tensor([tokens]), torch.tensor([types])
    mask = model.create_masks_for_generate(
        model.config,
        model.get_input_embeddings()(ids.clamp(max=99)),
        torch.ones_like(ids),
        None,
        torch.arange(len(tokens))[None],
        mm_token_type_ids=kinds,
    )
    with torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=False, **inputs_of(model, media))
    return out.logits[0]


# --- tests ------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", short(*({*VARIANTS} - {*ALIKE}), of=VARIANTS))
def test_model(pairs: Any, variant: str, case: str) -> None:
    """Logits of the whole prompt for chunks that would cut pictures, then token by token."""
    engine, model = pairs(variant)
    m = message(engine.spec, CASES[case])
    after = m.text(STEPS)
    wanted = expected(model, m.tokens + after, m.types + [0] * STEPS, m.media)
    for chunk in (70, MAX_SEQ):
        got = sent(with_chunk(engine, chunk).session(), m, all_logits=True)[0]
        agrees(got, wanted[: len(m.tokens)])
    session = with_chunk(engine, 83).session()
    agrees(sent(session, m), wanted[None, len(m.tokens) - 1])
    for i, token in enumerate(after):
        agrees(session.decode(torch.tensor([token])), wanted[None, len(m.tokens) + i])


def sent(session: Any, m: Message, all_logits: bool = False) -> torch.Tensor:
    tokens = torch.tensor([m.tokens])
    return session.prefill(tokens, all_logits=all_logits, **m.lists())


def test_values(pairs: Any) -> None:
    """Outputs of all layers of towers and text; padding of the towers is not compared."""
    engine, model = pairs(TORCH)
    m = message(engine.spec, [2, ("image", (50, 70)), ("audio", 7_001), ("image", (70, 50)), 2])
    parts, seen = model.model, dict[str, torch.Tensor]()
    layers = {"vision.": parts.vision_tower.encoder.layers, "audio.": parts.audio_tower.layers}
    for part, several in {**layers, "": parts.language_model.layers}.items():
        for i, layer in enumerate(several):
            name = f"{part}L{i}.out"
            layer.register_forward_hook(lambda *call, n=name: seen.update({n: call[2]}))
    expected(model, m.tokens, m.types, m.media)
    got = engine.values(m.tokens, ["L*.out", "vision.L*.out", "audio.L*.out"], **m.lists())
    valid = [torch.tensor(i.positions)[:, 0] >= 0 for i in m.media["image"]]
    soft = m.media["audio"][0].soft_tokens
    for name, want in seen.items():
        if name.startswith("vision"):
            several = [got.pop(name), got.pop(f"{name}[1]")]
            pairs_of = [(g[0, ok], w[ok]) for g, w, ok in zip(several, want, valid, strict=True)]
        else:
            count = soft if name.startswith("audio") else len(m.tokens)
            pairs_of = [(got.pop(name)[0, :count], want[0, :count])]
        for g, w in pairs_of:
            assert (g - w).abs().max() < 1e-4 * max(1.0, float(w.std())), name
    assert not got


# --- towers: vision ---------------------------------------------------------------------------


TOWERS = ("e2b", "26b-a4b")  # clipped, 16 per head; plain and standardized, 20 per head
#: attention over ten thousand patches takes its time
LARGE = [pytest.param(v, b, marks=pytest.mark.full) for v in TOWERS for b in BUDGETS[3:]]
SIZES = [(UNIFIED, b) for b in BUDGETS] + [(v, b) for v in TOWERS for b in BUDGETS[:3]]


@pytest.mark.parametrize("variant, budget", [*SIZES, *LARGE])
def test_images(pairs: Any, variant: str, budget: int) -> None:
    """All budgets, wide and tall, with and without padding."""
    engine, model = pairs(variant)
    settings = image_settings(engine.spec, budget)
    for size in ((120, 300), (260, 90)):
        picture = prepare_image(noise(*size, 3), settings)
        soft = engine.encode("image", picture)
        with torch.no_grad():
            wanted = model.model.get_image_features(
                torch.from_numpy(picture.patches)[None], torch.from_numpy(picture.positions)[None]
            )
        (rows,) = wanted.pooler_output
        assert soft.count == picture.soft_tokens and len(soft.pieces) == 1
        agrees(soft.pieces[0], rows)


# --- towers: audio ----------------------------------------------------------------------------

#: samples at 16 kHz: one frame, odd lengths, at and beside the sizes of towers, the longest; of raw
#: frames, which stand alone, also more than any graph takes
LENGTHS = [("e2b", n) for n in (170, 7_777, 80_003, 160_000, 480_000)]
LENGTHS += [(UNIFIED, n) for n in (1, 41, 40 * 800 + 3)]


@pytest.mark.parametrize("variant, samples", LENGTHS)
def test_sounds(pairs: Any, variant: str, samples: int) -> None:
    engine, model = pairs(variant)
    wave = 0.1 * np.random.default_rng(0).standard_normal(samples).astype(np.float32)
    clip = prepare_audio(Waveform(wave, 16_000), audio_settings(engine.spec))
    (soft,) = engine.encode("audio", clip).pieces
    assert len(soft) == clip.soft_tokens
    for fill in (0, 150):  # padding, whatever is in it, is not heard
        features = np.pad(clip.features, ((0, fill), (0, 0)), constant_values=7.0)
        sent = (torch.from_numpy(x)[None] for x in (features, np.pad(clip.mask, (0, fill))))
        with torch.no_grad():
            out = model.model.get_audio_features(*sent)
        heard = out.pooler_output[0]
        agrees(soft, heard if out.attention_mask is None else heard[out.attention_mask[0]])


def test_a_sound_longer_than_built_for_is_refused(pairs: Any) -> None:
    engine, _ = pairs("e2b")
    longest = max(engine.media.lengths)
    frames = np.zeros((4 * longest + 4, 16), np.float32)
    clip = Clip(frames, np.ones(len(frames), np.bool_), longest + 1)
    with pytest.raises(InputError, match=f"{longest + 1} soft tokens.*audio-seconds"):
        engine.encode("audio", clip)


# --- backends ---------------------------------------------------------------------------------

#: clipped vision with sound; patches and samples without layers; plain vision and pictures seen
#: both ways, with experts
NAMES = ("tiny-media", "tiny-unified", "26b-a4b")
#: what the short run builds
QUICK = [*product(("torch", "onnx", "trt"), NAMES[:2])]
OPTIONS: dict[str, Any] = {"dtype": "float32", "all_logits": True}
OPTIONS |= {"max_batch": 2, "max_seq": MAX_SEQ, "prefill_chunk": 90}
#: settings of TensorRT
TRT = {"tiny-unified": {"attention": "fused"}, "26b-a4b": {"attention": "fused"}}


def logits(engine: Engine, chunk: int) -> list[torch.Tensor]:
    """Of a prompt in chunks, with pictures near each other, frames, and two sounds where they are
    heard; of a ragged turn of text, and of a few steps."""
    m = message(engine.spec, SENT["all"])
    tokens, lengths = torch.tensor([m.tokens] * 2), [len(m.tokens), 0]
    session = with_chunk(engine, chunk).session(2)
    out = [session.prefill(tokens, lengths, all_logits=True, **m.lists())[0]]
    out.append(session.prefill(torch.arange(20, 40).view(2, 10), [10, 7]))
    return out + [session.decode(torch.tensor([i, 2 * i])) for i in (30, 31, 32)]


@pytest.mark.parametrize(
    "backend, name", short(*QUICK, of=product(("torch", "onnx", "trt"), NAMES))
)
def test_networks_are_the_reference(
    make_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, name: str
) -> None:
    """Soft tokens, and logits of a prompt in chunks that would cut images; those of the reference
    backend. In ONNX the queries of towers are in several parts."""
    if backend == "onnx":
        monkeypatch.setattr(vision, "SCORES", 1 << 17)
    use(monkeypatch, emulated(tmp_path))
    settings = {"settings": TRT.get(name, {})} if backend == "trt" else {}
    sound = {} if small(name).audio is None else {"audio_seconds": (0.5, 1.5)}
    build = partial(make_engine, small(name), **OPTIONS, **sound)
    got, want = build(backend=backend, **settings), build()
    for kind, size in (x for x in SENT["alone"] if x[0] in want.media.kinds):
        item = medium(want.spec, kind, size, 0)
        pairs = zip(got.encode(kind, item).pieces, want.encode(kind, item).pieces, strict=True)
        for ours, theirs in pairs:
            agrees(ours, theirs)
    for ours, theirs in zip(logits(got, 71), logits(want, 71), strict=True):
        agrees(ours, theirs)


LIMITS: Mapping[str, Any] = {"backend": "reference", "max_seq": 136, "prefill_chunk": 70}
WITH_MEDIA = ("tiny-media", "tiny-unified")
#: the graphs that nothing but media goes through, and of which the smallest of each part is run
SMALLEST = {
    "tiny-media": ("vision_70", "audio_125"),
    "tiny-unified": ("prefill_media", "vision_70", "audio_4000"),
}
HOLDERS = {"image": 500, "video": 501, "audio": 502}
#: of text, where it is not what is checked
FEW = (5, 6, 7, 8, 9, 10)


@pytest.fixture(scope="module")
def built(make_engine: Any) -> dict[str, Engine]:
    """Engines that take all media."""
    return {n: make_engine(n, random_weights=1, **LIMITS) for n in WITH_MEDIA}


@pytest.fixture(params=WITH_MEDIA)
def engine(request: pytest.FixtureRequest, built: dict[str, Engine]) -> Engine:
    return built[request.param]


def test_random_tokens_are_no_placeholders(engine: Engine, make_engine: Any) -> None:
    """All others are drawn; every engine of a spec is given the same."""
    ids = random_ids(engine, (3, 20_000), 0)
    assert set(ids.unique().tolist()) == set(range(512)) - set(HOLDERS.values())
    w = Workload(20_000, 2, batch=2)
    drawn = draw_tokens(w, engine)
    assert not torch.isin(drawn, torch.tensor([*HOLDERS.values()])).any()
    text = make_engine("tiny-media", random_weights=1, media="none", **LIMITS)
    assert torch.equal(drawn, draw_tokens(w, text))


def test_verify_against_transformers(built: dict[str, Engine]) -> None:
    """Media against the interpreter all the same."""
    said = cli.ok("verify", built["tiny-media"].path, "--against", "hf")
    assert all(name in said for name in SMALLEST["tiny-media"])


def test_report(engine: Engine) -> None:
    report = verify_engine(engine)
    media, name = report.media, engine.spec.name
    assert report.ok and media
    *towers, prompt = media.parts
    parts = {t.name for t in towers} | prompt.report.phases.keys()
    assert parts == {"prefill", "decode", *SMALLEST[name]}
    soft, chunk = (
        int(re.search(r, prompt.about)[1]) for r in (r"(\d+) of image", r"of (\d+), thr")
    )
    assert HEAD < chunk < HEAD + soft, "a chunk would cut the picture"
    longer = ("audio_250", "audio_500", "audio_750")
    assert media.not_run == (longer if name == "tiny-media" else ())
    plain = json.loads(json.dumps(report.to_dict()))["media"]
    assert plain["ok"] is True and plain["failed"] is None
    assert plain["parts"][0]["name"] == "vision_70" and "image, 60 of 70" in towers[0].text()
    assert "no medium fits into --max-seq and --prefill-chunk" in MediaReport((), ()).lines()[0]


def test_tolerance_of_16_bits(tmp_path: Path) -> None:
    options = {**LIMITS, "dtype": "bfloat16", "audio_seconds": [1]}
    media = check_media(g4ir.build("tiny-media", tmp_path / "e", random_weights=1, **options))
    assert media.ok and not media.not_run and media.parts[-1].name == "prompt"


@pytest.mark.parametrize("name, param, tower", TABLES["media checks"]["wrong towers"])
def test_a_wrong_tower_is_named(
    built: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, name: str, param: str, tower: str
) -> None:
    engine = built[name]
    weights = engine.runtime.params  # type: ignore[attr-defined]
    monkeypatch.setitem(weights, param, weights[param] + 0.3 * weights[param].flip(0))
    report = verify_engine(engine, tokens=FEW)
    assert not report.ok and report.text_ok and report.media
    assert report.media.failed == tower and report.to_dict()["media"]["failed"] == tower
    failed = [p.name for p in report.media.parts if p.failed]
    assert failed == [tower], "the prompt is given the interpreter's"
    (line,) = (x for x in report.text().splitlines() if "FAILED, " in x)
    assert tower in line and report.text().endswith("FAILED")


#: engines, their phases and towers, and a feed that these get wrong: padding that is seen, nothing
#: that is seen both ways, and caches that a picture left in disorder
WRONG_FEEDS = [
    ("tiny-media", "vision_70", "positions", lambda t: t.clamp(min=0)),
    ("tiny-media", "audio_125", "mask", torch.ones_like),
    ("tiny-unified", "prefill_media", "block_ids", lambda t: torch.full_like(t, -1)),
    ("tiny-media", "decode", "positions", lambda t: t + 1),
]


@pytest.mark.parametrize("case", WRONG_FEEDS, ids=lambda case: case[1])
def test_wrong_feeds_are_named(
    built: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, case: Any
) -> None:
    name, part, feed, change = case
    engine, method = built[name], "run" if part in ("prefill_media", "decode") else "encode"
    inner = getattr(engine.runtime, method)

    def changed(called: str, feeds: Any) -> Any:
        return {**feeds, feed: change(feeds[feed])} if called == part else feeds

    def blind(called: Any, fed: Any) -> Any:
        if method == "encode":
            return inner(called, changed(called, fed))
        return inner(replace(called, feeds=changed(called.phase, called.feeds)), fed)

    monkeypatch.setattr(engine.runtime, method, blind)
    report = verify_engine(engine, tokens=FEW)
    assert not report.ok and report.text_ok == (part != "decode")
    assert report.media and report.media.failed == part
    (wrong,) = (p for p in report.media.parts if p.failed)
    assert wrong.name == (part if method == "encode" else "prompt")
    if part == "prefill_media":
        assert "%L0.attn.out" in wrong.text() and wrong.text() in report.text()


def test_each_pass(engine: Engine) -> None:
    report = verify_each_pass(engine)
    assert report.ok and report.media == SMALLEST[engine.spec.name]
    longer = ("audio_250", "audio_500", "audio_750")
    assert report.left_out == (longer if engine.spec.name == "tiny-media" else ())
    assert report.to_dict()["left_out"] == report.left_out
    for name in (*report.media, *report.left_out):
        assert name in report.text().split("share_rope_tables")[0]


def test_each_pass_with_packed_weights(tmp_path: Path) -> None:
    """Of the towers too, with and without the checkpoint."""
    checkpoint = random_checkpoint(tmp_path / "c", "tiny-media", media=KINDS)
    engine = g4ir.build(None, tmp_path / "e", checkpoint=checkpoint, audio_seconds=[1], **LIMITS)
    report = verify_each_pass(engine, FEW, checkpoint)
    assert report.ok and report.media == ("vision_70", "audio_25") and not report.unknown
    report = verify_each_pass(engine, FEW)
    assert report.ok and report.media == ("vision_70",)
    assert report.unknown == ("audio_25",), "its relative keys are made when it is built"
    assert "without --checkpoint DIR: audio_25" in report.text()


def test_broken_pass_of_one_graph(
    built: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    worse = nodes(attrs("norm_residual", eps=0.5))
    broken = "fuse_norm_residual"
    break_pass(monkeypatch, broken, lambda g: worse(g) if g.name == "vision_70" else g)
    culprit = verify_each_pass(built["tiny-media"], FEW).culprit
    assert culprit and culprit.name == broken and culprit.first
    assert culprit.first.phase == "vision_70"


# --- builds --------------------------------------------------------------------------------------

BUILDS: dict[str, Any] = {"random_weights": 0, "backend": "reference", "max_seq": 256}


def prepared(variant: str, **options: Any) -> Any:
    return prepare(load_spec(variant), BuildOptions(**BUILDS | options))


# --- the prefill chunk ------------------------------------------------------------------------


def test_a_chunk_holds_the_largest_picture(caplog: pytest.LogCaptureFixture) -> None:
    """Where its tokens see each other; with a note."""
    with caplog.at_level(logging.WARNING):
        assert prepared("tiny-unified", prefill_chunk=16).config.limits.prefill_chunk == 70
        assert "prefill-chunk 16 is raised to 70" in caplog.text
        caplog.clear()
        assert prepared("tiny-unified", prefill_chunk=96).config.limits.prefill_chunk == 96
        assert prepared("tiny-media", prefill_chunk=16).config.limits.prefill_chunk == 16
        options = {"prefill_chunk": 16, "media": "audio"}
        assert prepared("tiny-unified", **options).config.limits.prefill_chunk == 16
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        short = prepared("tiny-unified", max_seq=64, prefill_chunk=16)
    assert short.config.limits.prefill_chunk == 64
    assert (
        "max-seq 64: an image of 70 soft tokens, which the engine supports, does not fit"
        in caplog.text
    )


# --- spec and checkpoint ----------------------------------------------------------------------


@pytest.mark.parametrize("key, value", [("vision.rope_theta", 50.0), ("tokens.eoa", 499)])
def test_towers_are_those_of_the_checkpoint(tmp_path: Path, key: str, value: Any) -> None:
    """What leaves shapes alone is compared too, as far as the media that are taken need it."""
    spec = load_spec("tiny-media")
    part, _, name = key.partition(".")
    other = replace(spec, **{part: replace(getattr(spec, part), **{name: value})})
    checkpoint = random_checkpoint(tmp_path / "c", spec, media=KINDS)
    check_without_media(other, checkpoint, SpecError, key)


def test_a_checkpoint_without_towers_says_so(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "c", "tiny-media")
    check_without_media(load_spec("tiny-media"), checkpoint, WeightsError, "--media none")


def check_without_media(spec: Spec, checkpoint: Path, error: type[Exception], says: str) -> None:
    given = {"checkpoint": checkpoint, "backend": "reference", "max_seq": 256}
    with pytest.raises(error, match=says):
        prepare(spec, BuildOptions(**given))
    prepare(spec, BuildOptions(media="none", **given)).source.close()


# --- sound ------------------------------------------------------------------------------------


@pytest.mark.parametrize("soft", (1, 2, 13, 63, 125, 250, 750))
def test_limits_of_sound_are_exact(soft: int) -> None:
    """The longest clip of so many soft tokens, to the padding's multiple."""
    settings = MelSettings(bins=128).limited_to(soft)
    assert settings.soft_tokens(settings.max_samples) <= soft
    if soft < 750:
        assert settings.soft_tokens(settings.max_samples + settings.pad_multiple) > soft


# --- memory -----------------------------------------------------------------------------------


def test_leaving_media_out_is_advised_where_that_fits() -> None:
    """The towers of e2b before a tiny text model."""
    spec = replace(load_spec("tiny-media"), vision=load_spec("e2b").vision)
    text = prepare(spec, BuildOptions(media="none", **BUILDS))
    memory = 1 << 30
    while memory - reserve(memory) < text.param_bytes() + (64 << 20):
        memory += 1 << 28
    with pytest.raises(PlanError, match="--media none"):
        prepare(spec, BuildOptions(memory=memory, media="image", image_budgets=[280], **BUILDS))


def test_a_chunk_that_would_be_raised_again_is_not_advised() -> None:
    spec = load_spec("tiny-unified")
    with pytest.raises(PlanError) as refused:
        prepare(spec, BuildOptions(memory=1 << 20, **BUILDS | {"prefill_chunk": 256}))
    assert "--prefill-chunk 64" not in str(refused.value)
