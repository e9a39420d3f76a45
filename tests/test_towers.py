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

import g4ir
from g4ir.errors import InputError
from g4ir.media.audio import Clip, Waveform, prepare_audio
from g4ir.media.images import prepare_image
from g4ir.model.audio import audio_settings
from g4ir.model.images import BUDGETS, image_settings
from g4ir.model.media import KINDS
from g4ir.spec.record import Spec, load_spec
from g4ir.spec.shrink import shrink
from g4ir.weights.random import RandomCheckpoint
from g4ir.weights.write import write_checkpoint

TOWERS = ("e2b", "26b-a4b")  # clipped, 16 per head; plain and standardized, 20 per head
UNIFIED = "12b"
BUDGET = 1e-4  # of a row's rms


@cache
def small(variant: str) -> Spec:
    return shrink(load_spec(variant), media=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`pairs(variant)`: an engine of the reference backend and the transformers model."""
    from transformers import AutoModelForMultimodalLM

    @cache
    def pair(variant: str) -> tuple[Any, Any]:
        spec, folder = small(variant), tmp_path_factory.mktemp(variant)
        source = RandomCheckpoint(spec, 3, torch.float32)
        checkpoint = write_checkpoint(folder / "checkpoint", spec, source, media=KINDS)
        engine = g4ir.build(
            spec,
            folder / "engine",
            checkpoint=checkpoint,
            backend="reference",
            max_seq=256,
            image_budgets=BUDGETS,
        )
        model, loading = AutoModelForMultimodalLM.from_pretrained(
            checkpoint, dtype=torch.float32, output_loading_info=True
        )
        assert not loading["missing_keys"] and not loading["mismatched_keys"]
        return engine, model.model.eval()

    return pair


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference of a row, relative to its rms."""
    assert got.shape == wanted.shape
    rms = wanted.double().pow(2).mean(-1, keepdim=True).sqrt()
    return float(((got.double() - wanted.double()) / rms).abs().max())


def pixels(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


# --- vision -----------------------------------------------------------------------------------


#: attention over ten thousand patches takes its time
LARGE = [pytest.param(v, b, marks=pytest.mark.full) for v in TOWERS for b in BUDGETS[3:]]
SIZES = [(UNIFIED, b) for b in BUDGETS] + [(v, b) for v in TOWERS for b in BUDGETS[:3]]


@pytest.mark.parametrize("variant, budget", [*SIZES, *LARGE])
def test_images(pairs: Any, variant: str, budget: int) -> None:
    """All budgets, wide and tall, with and without padding."""
    engine, model = pairs(variant)
    settings = image_settings(engine.spec, budget)
    for size in ((300, 120), (90, 260)):
        picture = prepare_image(pixels(*size), settings)
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
