"""Whole models with media against transformers: all variants in small, every tensor random.

Pixels, positions and features are made once and go through both: towers, placeholders, the merge,
masks, chunks that would cut pictures, and decoding past three windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import g4ir
from g4ir.engine.engine import Engine
from g4ir.media.audio import Clip, Waveform, prepare_audio
from g4ir.media.images import PreparedImage, prepare_image
from g4ir.media.videos import Footage, Video, prepare_video, video_settings
from g4ir.model.audio import audio_settings
from g4ir.model.images import image_settings
from g4ir.model.media import KINDS, offered
from g4ir.spec.parts import UnifiedAudio
from g4ir.spec.record import Spec, load_spec
from g4ir.spec.shrink import WINDOW, shrink
from g4ir.weights.random import RandomCheckpoint
from g4ir.weights.write import write_checkpoint
from tests.configs import VARIANTS
from tests.media_tools import video_inputs
from tests.oracle import relative
from tests.runner import with_chunk
from tests.uncompiled import uncompiled

MAX_SEQ = 512
STEPS = 3 * WINDOW + 2
BUDGET = 1e-4  # of a row's rms
#: run by the torch backend, with `--full` compiled
TORCH = "tiny-media"
#: variants with the structure of another
ALIKE = ("e4b", "31b")
#: token types of the reference
TYPES = {"image": 1, "video": 2, "audio": 3}


@cache
def small(variant: str) -> Spec:
    spec = load_spec(variant)
    return spec if variant == TORCH else shrink(spec, media=True)


@dataclass(frozen=True)
class Trio:
    """Engines of one checkpoint, for the logits of every token and of the last, and transformers'
    model of it."""

    every: Engine
    last: Engine
    model: Any


@pytest.fixture(scope="module")
def trios(tmp_path_factory: pytest.TempPathFactory, full: bool) -> Any:
    """`trios(variant)`"""
    from transformers import AutoModelForMultimodalLM

    @cache
    def trio(variant: str) -> Trio:
        spec, folder = small(variant), tmp_path_factory.mktemp(variant)
        source = RandomCheckpoint(spec, 5, torch.float32)
        checkpoint = write_checkpoint(folder / "checkpoint", spec, source, media=KINDS)
        model = AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch.float32)

        def build(name: str, **options: Any) -> Engine:
            return g4ir.build(
                spec, folder / name, checkpoint=checkpoint, max_seq=MAX_SEQ, **options
            )

        if variant == TORCH:
            limits = {"max_batch": 3, "all_logits": True, "audio_seconds": [2.0]}
            with nullcontext() if full else uncompiled():
                every = last = build("engine", backend="torch", **limits)
        else:
            every = build("every", backend="reference", all_logits=True)
            last = build("last", backend="reference")
        return Trio(every, last, model.eval())

    return trio


# --- what is sent -----------------------------------------------------------------------------


def image(spec: Spec, width: int, height: int, seed: int) -> PreparedImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return prepare_image(pixels, image_settings(spec))


def video(spec: Spec, frames: int, seed: int) -> Footage:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (frames, 40, 60, 3), dtype=np.uint8)
    return prepare_video(Video(pixels), video_settings(spec))


def sound(spec: Spec, samples: int, seed: int) -> Clip:
    """Where soft tokens are raw frames, which are short here, less of it."""
    samples = samples // 20 if isinstance(spec.audio, UnifiedAudio) else samples
    wave = 0.3 * np.random.default_rng(seed).standard_normal(samples)
    return prepare_audio(Waveform(wave.astype(np.float32), 16_000), audio_settings(spec))


class Message:
    """A prompt in the making: token ids with their types, and the media in order."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.rng = spec, np.random.default_rng(1)
        self.tokens, self.types = [spec.tokens.bos or 0], [0]
        self.media: dict[str, list[Any]] = {kind: [] for kind in TYPES}

    def text(self, count: int) -> Message:
        self.tokens += self.rng.integers(4, 200, count).tolist()
        self.types += [0] * count
        return self

    def soft(self, kind: str, count: int) -> None:
        self.tokens += [getattr(self.spec.tokens, kind)] * count
        self.types += [TYPES[kind]] * count

    def image(self, width: int, height: int) -> Message:
        self.media["image"].append(image(self.spec, width, height, len(self.tokens)))
        self.soft("image", self.media["image"][-1].soft_tokens)
        return self

    def video(self, frames: int) -> Message:
        self.media["video"].append(video(self.spec, frames, len(self.tokens)))
        for _ in range(frames):
            self.text(3).soft("video", self.media["video"][-1].soft_tokens)
        return self

    def sound(self, samples: int) -> Message:
        if "audio" in offered(self.spec):
            self.media["audio"].append(sound(self.spec, samples, len(self.tokens)))
            self.soft("audio", self.media["audio"][-1].soft_tokens)
        return self


def messages(spec: Spec) -> dict[str, Message]:
    def new() -> Message:
        return Message(spec)

    return {
        "images": new().image(36, 60).text(1).image(90, 20).text(9).image(30, 30),
        "all": (
            new().text(2).sound(7_001).image(50, 70).text(11).video(2).text(2).image(70, 50).text(3)
        ),
    }


CASES = ("images", "all")


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


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    assert float(relative(got, wanted).max()) < BUDGET


# --- tests ------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[pytest.mark.full] * (v in ALIKE)) for v in VARIANTS],
)
def test_model(trios: Any, variant: str, case: str) -> None:
    """Logits of the whole prompt for chunks that would cut pictures, then token by token."""
    trio = trios(variant)
    m = messages(trio.every.spec)[case]
    after = m.rng.integers(4, 200, STEPS).tolist()
    wanted = expected(trio.model, m.tokens + after, m.types + [0] * STEPS, m.media)
    for chunk in (70, MAX_SEQ):
        check(
            sent(with_chunk(trio.every, chunk).session(), m, all_logits=True)[0],
            wanted[: len(m.tokens)],
        )
    session = with_chunk(trio.last, 83).session()
    check(sent(session, m), wanted[None, len(m.tokens) - 1])
    for i, token in enumerate(after):
        check(session.decode(torch.tensor([token])), wanted[None, len(m.tokens) + i])


def sent(session: Any, m: Message, all_logits: bool = False) -> torch.Tensor:
    media = m.media
    logits: torch.Tensor = session.prefill(
        torch.tensor([m.tokens]),
        all_logits=all_logits,
        images=media["image"],
        videos=media["video"],
        audio=media["audio"],
    )
    return logits


def test_the_torch_backend(trios: Any) -> None:
    """All kinds at once, and ragged rows."""
    trio = trios(TORCH)
    m, other = (messages(trio.every.spec)[case] for case in ("all", "images"))
    wanted = [expected(trio.model, x.tokens, x.types, x.media) for x in (m, other)]
    check(sent(with_chunk(trio.every, 83).session(), m, all_logits=True)[0], wanted[0])
    rows = torch.zeros(2, len(m.tokens), dtype=torch.int64)
    lengths = torch.tensor([len(m.tokens), len(other.tokens)])
    for row, x in zip(rows, (m, other), strict=True):
        row[: len(x.tokens)] = torch.tensor(x.tokens)
    logits = (
        with_chunk(trio.every, 64)
        .session(2)
        .prefill(
            rows,
            lengths,
            images=m.media["image"] + other.media["image"],
            videos=m.media["video"],
            audio=m.media["audio"],
        )
    )
    check(logits, torch.stack([w[-1] for w in wanted]))
