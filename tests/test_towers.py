"""The towers against transformers: every variant's structure, with every tensor random.

Checkpoints are written with random weights under the hub's names and loaded by both sides, so
that names, clip bounds and tables are compared too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from g4ir.errors import InputError
from g4ir.media.audio import Clip, Waveform, prepare_audio
from g4ir.media.images import prepare_image
from g4ir.model.audio import audio_settings
from g4ir.model.images import BUDGETS, image_settings
from g4ir.spec.record import Spec, load_spec
from g4ir.spec.shrink import shrink
from tests.media_tools import media_pair, noise
from tests.oracle import relative

TOWERS = ("e2b", "26b-a4b")  # clipped, 16 per head; plain and standardized, 20 per head
UNIFIED = "12b"
BUDGET = 1e-4  # of a row's rms


@cache
def small(variant: str) -> Spec:
    return shrink(load_spec(variant), media=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`pairs(variant)`: an engine of the reference backend and the transformers model."""

    @cache
    def pair(variant: str) -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp(variant)
        engine, model = media_pair(small(variant), folder, 3, max_seq=256, image_budgets=BUDGETS)
        return engine, model.model

    return pair


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float(relative(got, wanted).max())


# --- vision -----------------------------------------------------------------------------------


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
            wanted = model.get_image_features(
                torch.from_numpy(picture.patches)[None], torch.from_numpy(picture.positions)[None]
            )
        (rows,) = wanted.pooler_output
        assert soft.count == picture.soft_tokens and len(soft.pieces) == 1
        assert error(soft.pieces[0], rows) < BUDGET


# --- audio ------------------------------------------------------------------------------------

#: samples at 16 kHz: one frame, odd lengths, at and beside the sizes of towers, the longest
LENGTHS = (170, 7_777, 80_003, 160_000, 480_000)


def tone(samples: int, seed: int = 0) -> Waveform:
    t = np.arange(samples) / 16_000
    noise = np.random.default_rng(seed).standard_normal(samples)
    wave = 0.4 * np.sin(2 * np.pi * 330 * t) + 0.05 * noise
    return Waveform(wave.astype(np.float32), 16_000)


@pytest.mark.parametrize("samples", LENGTHS)
def test_sounds(pairs: Any, samples: int) -> None:
    engine, model = pairs("e2b")
    clip = prepare_audio(tone(samples), audio_settings(engine.spec))
    (soft,) = engine.encode("audio", clip).pieces
    for fill in (0, 150):  # padding, whatever is in it, is not heard
        assert error(soft, heard(model, clip, fill)) < BUDGET


def heard(model: Any, clip: Clip, fill: int = 0) -> torch.Tensor:
    """What the reference makes of a clip with `fill` frames of padding behind it."""
    features = np.pad(clip.features, ((0, fill), (0, 0)), constant_values=7.0)
    mask = np.pad(clip.mask, (0, fill))
    with torch.no_grad():
        out = model.get_audio_features(
            torch.from_numpy(features)[None], torch.from_numpy(mask)[None]
        )
    if out.attention_mask is None:
        return out.pooler_output[0]
    return out.pooler_output[0][out.attention_mask[0]]


@pytest.mark.parametrize("samples", (1, 41, 40 * 800 + 3))
def test_raw_sounds(pairs: Any, samples: int) -> None:
    """Also longer than any graph: frames stand alone."""
    engine, model = pairs(UNIFIED)
    clip = prepare_audio(tone(samples), audio_settings(engine.spec))
    (soft,) = engine.encode("audio", clip).pieces
    assert len(soft) == -(-samples // 40)
    assert error(soft, heard(model, clip)) < BUDGET


def test_a_sound_longer_than_built_for_is_refused(pairs: Any) -> None:
    engine, _ = pairs("e2b")
    longest = max(engine.media.lengths)
    frames = np.zeros((4 * longest + 4, 16), np.float32)
    clip = Clip(frames, np.ones(len(frames), np.bool_), longest + 1)
    with pytest.raises(InputError, match=f"{longest + 1} soft tokens.*audio-seconds"):
        engine.encode("audio", clip)
