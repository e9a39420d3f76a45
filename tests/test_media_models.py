"""Towers, and whole models with media, against transformers: all variants in small, every tensor
random. Checkpoints are written under the hub's names and loaded by both sides, so that names, clip
bounds and tables are compared too.

Pixels, positions and features are made once and go through both: towers, placeholders, the merge,
masks, chunks that would cut pictures, and decoding past three windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from g4ir.backends.primitives import vision
from g4ir.engine.engine import Engine
from g4ir.errors import InputError
from g4ir.media.audio import Clip, Waveform, prepare_audio
from g4ir.media.images import PreparedImage, prepare_image
from g4ir.media.videos import Footage, Video, prepare_video, video_settings
from g4ir.model.audio import audio_settings
from g4ir.model.images import BUDGETS, image_settings
from g4ir.model.media import LISTS, supported_media
from g4ir.spec.parts import UnifiedAudio
from g4ir.spec.record import Spec, load_spec
from tests.configs import VARIANTS, short
from tests.engines import agrees
from tests.media_tools import UNIFIED, media_pair, noise, video_inputs
from tests.runner import with_chunk
from tests.shrink import WINDOW, shrink
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
CASES: dict[str, list[Any]] = {
    "images": [("image", (36, 60)), 1, ("image", (90, 20)), 9, ("image", (30, 30))],
    "all": [
        *(2, ("audio", 7_001), ("image", (50, 70)), 11, ("video", 2), 2, ("image", (70, 50)), 3)
    ],
}


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
    logits: torch.Tensor = out.logits[0]
    return logits


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
    made: torch.Tensor = session.prefill(tokens, all_logits=all_logits, **m.lists())
    return made


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


#: wide and tall pictures, frames; sounds of one frame, of the first tower, of the second
SENT: list[Any] = [("image", (90, 60)), ("image", (20, 90)), ("video", 2)]
SENT += [("audio", samples) for samples in (200, 7_001, 23_000)]
#: numbers of text tokens, and media
PARTS: list[Any] = [2, ("image", (50, 70)), 1, ("image", (90, 20)), 7, ("audio", 5_001)]
PARTS += [("video", 2), 2, ("audio", 7_001), 3]


def logits(engine: Engine, chunk: int) -> list[torch.Tensor]:
    """Of a prompt in chunks, with pictures near each other, frames, and two sounds where they are
    heard; of a ragged turn of text, and of a few steps."""
    m = message(engine.spec, PARTS)
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
    for kind, size in (x for x in SENT if x[0] in want.media.kinds):
        item = medium(want.spec, kind, size, 0)
        pairs = zip(got.encode(kind, item).pieces, want.encode(kind, item).pieces, strict=True)
        for ours, theirs in pairs:
            agrees(ours, theirs)
    for ours, theirs in zip(logits(got, 71), logits(want, 71), strict=True):
        agrees(ours, theirs)
