"""Sound: features against the feature extractors of transformers, the resampler against its
formula, and files made here against what was written into them."""

from __future__ import annotations

import io
import logging
import math
import random
import struct
import sys
import types
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma4.configuration_gemma4 import Gemma4AudioConfig
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioSubSampleConvProjection
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
    Gemma4UnifiedAudioFeatureExtractor,
)

from g4ir.errors import InputError, MissingError
from g4ir.media.mel import find_features, mel_filters
from g4ir.media.sound import (
    MAX_CHANNELS,
    REFUSE,
    DecodeLimits,
    Sound,
    prepare_sound,
    read_sound,
    resample,
    resampled_length,
    stack_clips,
    to_mono,
)
from g4ir.model.audio import MelSettings, RawSettings, audio_settings
from g4ir.spec.record import load_spec
from tests.media_tools import damaged

RATE = 16_000
E2B, UNIFIED = load_spec("e2b"), load_spec("12b")
MEL, RAW = audio_settings(E2B), audio_settings(UNIFIED)
assert isinstance(MEL, MelSettings) and isinstance(RAW, RawSettings)
# one frame, one fewer and one more sample than a frame, hop, padding multiple or soft token takes
LENGTHS = (161, 162, 255, 256, 257, 320, 321, 480, 481, 640, 801, 1279, 1281, 4095, 16_000, 31_999)
LONGEST = (479_999, 480_000, 480_001, 500_000)


def noise(length: int, seed: int = 0) -> np.ndarray:
    """Speech-like: a tone that glides and fades, noise, and a silent stretch."""
    rng = np.random.default_rng(seed)
    t = np.arange(length) / RATE
    tone = 0.6 * np.sin(2 * np.pi * (120 + 900 * t) * t) * np.exp(-2 * t)
    out = tone + rng.normal(0, rng.choice([1e-4, 0.02, 0.3]), length)
    out[length // 3 : length // 2] = 0
    return out.astype(np.float32)


def reference(samples: list[np.ndarray], **config: Any) -> tuple[np.ndarray, np.ndarray]:
    """The mel extractor's features [B, T, F] and mask [B, T]."""
    out = Gemma4AudioFeatureExtractor(**config)(samples, return_tensors="np")
    return out["input_features"], out["input_features_mask"]


def placeholders(mask: np.ndarray) -> int:
    """The frames that the tower's two convolutions keep: every second one, twice."""
    return int(mask[::2][::2].sum())


# --- log-mel ----------------------------------------------------------------------------------


def test_the_settings_of_the_spec_are_the_references() -> None:
    theirs = Gemma4AudioFeatureExtractor()
    assert (MEL.bins, MEL.frame, MEL.hop, MEL.fft) == (128, 320, 160, 512)
    assert MEL.bins == theirs.feature_size and MEL.sampling_rate == theirs.sampling_rate
    assert (MEL.frame, MEL.hop, MEL.fft) == (
        theirs.frame_length,
        theirs.hop_length,
        theirs.fft_length,
    )
    np.testing.assert_array_equal(mel_filters(MEL), theirs.mel_filters)
    assert (RAW.frame, RAW.sampling_rate) == (640, 16_000)


@pytest.mark.parametrize("length", (*LENGTHS, *LONGEST))
def test_mel_equals_the_reference(length: int) -> None:
    samples = noise(length, length)
    clip = prepare_sound(Sound(samples, RATE), MEL)
    features, mask = reference([samples])
    assert clip.features.dtype == features.dtype == np.float32
    assert clip.features.shape == features[0].shape and clip.mask.shape == mask[0].shape
    np.testing.assert_array_equal(clip.mask, mask[0])
    np.testing.assert_allclose(clip.features, features[0], rtol=0, atol=1e-5)
    assert clip.soft_tokens == placeholders(mask[0])
    assert clip.left_out == max(0, length - 480_000)


def test_mel_equals_the_reference_on_random_lengths(full: bool) -> None:
    rng = np.random.default_rng(7)
    for length in rng.integers(161, 40_000, 400 if full else 60):
        samples = noise(int(length), int(length)) * np.float32(rng.choice([1e-3, 1, 30]))
        clip = prepare_sound(Sound(samples, RATE), MEL)
        features, mask = reference([samples])
        np.testing.assert_array_equal(clip.mask, mask[0])
        np.testing.assert_allclose(clip.features, features[0], rtol=0, atol=1e-5)
        assert clip.soft_tokens == placeholders(mask[0]) == MEL.soft_tokens(len(samples))


@pytest.mark.parametrize("lengths", [(161, 1_000), (5_000, 161, 4_999, 16_001), (300, 490_000)])
def test_a_batch_equals_the_reference(lengths: tuple[int, ...]) -> None:
    batch = [noise(n, n) for n in lengths]
    features, mask = stack_clips([prepare_sound(Sound(x, RATE), MEL) for x in batch])
    want, want_mask = reference(batch)
    assert features.shape == want.shape
    np.testing.assert_array_equal(mask, want_mask)
    np.testing.assert_allclose(features, want, rtol=0, atol=1e-5)


CONFIGS: dict[str, dict[str, Any]] = {
    "emphasis": {"preemphasis": 0.97},
    "plain emphasis": {"preemphasis": 0.97, "preemphasis_htk_flavor": False},
    "overdrive": {"fft_overdrive": True, "input_scale_factor": 0.25},
    "frames": {"frame_length_ms": 32.0, "hop_length_ms": 8.0, "mel_floor": 1e-5},
    "odd frames": {"frame_length_ms": 20.0625, "hop_length_ms": 7.3},
    "band": {"min_frequency": 125.0, "max_frequency": 7500.0},
    "rate": {"sampling_rate": 22_050, "max_frequency": 11_000.0},
    "normalised": {"per_bin_mean": [i / 9 for i in range(128)], "per_bin_stddev": [3.0] * 128},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_a_checkpoint_says_of_its_extractor_counts(config: dict[str, Any]) -> None:
    saved = Gemma4AudioFeatureExtractor(**config).to_dict()
    settings = audio_settings(E2B, {**saved, **config})
    for length in (700, 9_001):
        samples = noise(length, 3)
        clip = prepare_sound(Sound(samples, settings.sampling_rate), settings)
        features, mask = reference([samples], **config)
        np.testing.assert_array_equal(clip.mask, mask[0])
        np.testing.assert_allclose(clip.features, features[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [161, 481, 1_281, 7_777, 16_000])
def test_soft_tokens_are_what_the_towers_convolutions_leave(length: int) -> None:
    config = Gemma4AudioConfig(hidden_size=8, num_attention_heads=2)
    clip = prepare_sound(Sound(noise(length), RATE), MEL)
    layer = Gemma4AudioSubSampleConvProjection(config)
    with torch.no_grad():
        rows, mask = layer(torch.from_numpy(clip.features)[None], torch.from_numpy(clip.mask)[None])
    assert rows.shape[1] == mask.shape[1] >= clip.soft_tokens
    assert int(mask.sum()) == clip.soft_tokens


def test_soft_tokens_are_the_processors_placeholders() -> None:
    pytest.importorskip("torchvision")  # which the processor's module imports
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    marks = types.SimpleNamespace(boa_token="", audio_token="a", eoa_token="")
    for length in (*LENGTHS, *LONGEST):
        clip = prepare_sound(Sound(noise(length), RATE), MEL)
        inputs = {"input_features_mask": [clip.mask]}
        text = Gemma4Processor.replace_audio_token(marks, inputs, 0)  # type: ignore[arg-type]
        assert clip.soft_tokens == len(text)


def test_the_bins_follow_the_towers_channels() -> None:
    assert E2B.audio is not None
    small = replace(E2B, audio=replace(E2B.audio, subsampling_conv_channels=(16, 8)))
    settings = audio_settings(small)
    assert isinstance(settings, MelSettings) and settings.bins == 16
    samples = noise(4_000)
    features, _ = reference([samples], feature_size=16)
    clip = prepare_sound(Sound(samples, RATE), settings)
    np.testing.assert_allclose(clip.features, features[0], rtol=0, atol=1e-5)
    assert audio_settings(small, {"feature_size": 14}).bins == 14  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"feature_size 128 gives 32 bands .* takes 4; use 16"):
        audio_settings(small, {"feature_size": 128})


def test_a_clip_of_the_longest_length_has_the_known_number_of_tokens() -> None:
    assert MEL.max_samples == 480_000 and MEL.soft_tokens(480_000) == 750
    assert MEL.soft_tokens(160) == 0 and MEL.soft_tokens(161) == 1


# --- raw frames -------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(1,), (639,), (640,), (641,), (16_000, 3, 1_921), (480_001,)])
def test_raw_frames_equal_the_reference(lengths: tuple[int, ...]) -> None:
    batch = [noise(n, n) for n in lengths]
    clips = [prepare_sound(Sound(x, RATE), RAW) for x in batch]
    want = Gemma4UnifiedAudioFeatureExtractor()(batch, return_tensors="np")
    features, mask = stack_clips(clips)
    assert features.dtype == np.float32 and mask.dtype == np.bool_
    np.testing.assert_array_equal(features, want["input_features"])
    np.testing.assert_array_equal(mask, want["input_features_mask"])
    counts = [int(row.sum()) for row in want["input_features_mask"]]
    assert [c.soft_tokens for c in clips] == counts == [RAW.soft_tokens(n) for n in lengths]


def test_raw_frames_are_cut_as_the_reference_cuts() -> None:
    settings, samples = replace(RAW, max_tokens=4), noise(3_000)
    want = Gemma4UnifiedAudioFeatureExtractor()([samples], max_length=4, return_tensors="np")
    clip = prepare_sound(Sound(samples, RATE), settings)
    np.testing.assert_array_equal(clip.features, want["input_features"][0])
    assert clip.soft_tokens == 4 and clip.left_out == 3_000 - 4 * 640


# --- too long, too short ----------------------------------------------------------------------


def test_a_long_clip_is_cut_with_a_warning_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    sound = Sound(noise(480_160), RATE, "talk.wav")
    with caplog.at_level(logging.WARNING):
        clip = prepare_sound(sound, MEL)
    assert clip.left_out == 160 and clip.soft_tokens == 750
    assert "talk.wav: 30.01 s is longer than the limit of 30 s; the last 0.01 s" in caplog.text
    with pytest.raises(InputError, match=r"talk\.wav: 30\.01 s is longer than the limit of 30 s"):
        prepare_sound(sound, MEL, REFUSE)
    with pytest.raises(InputError, match="too_long 'split': cut or refuse"):
        prepare_sound(sound, MEL, "split")


def test_cutting_before_resampling_changes_nothing() -> None:
    settings, samples = replace(MEL, max_length=1_280), noise(9_000)
    clip = prepare_sound(Sound(samples, 44_100), settings)
    whole = resample(samples, 44_100, RATE)[:1_280]
    np.testing.assert_array_equal(clip.features, find_features(whole, settings)[0])
    assert clip.left_out == resampled_length(9_000, 44_100, RATE) - 1_280


@pytest.mark.parametrize("length", [1, 100, 160])
def test_a_clip_without_a_soft_token_is_refused(length: int) -> None:
    with pytest.raises(InputError, match=rf"x: {length} samples at 16000 Hz .* at least 161"):
        prepare_sound(Sound(noise(length), RATE, "x"), MEL)


# --- channels and types -----------------------------------------------------------------------

TYPES: dict[str, tuple[float, float]] = {  # zero, full scale
    "uint8": (128, 128),
    "int16": (0, 32_768),
    "int32": (0, 2**31),
}


@pytest.mark.parametrize("kind", TYPES)
def test_whole_numbers_are_scaled(kind: str) -> None:
    info = np.iinfo(kind)
    samples = np.array([info.min, info.max, info.max // 2 + 1, info.max // 3], kind)
    zero, full = TYPES[kind]
    want = (samples.astype(np.float64) - zero) / full
    np.testing.assert_allclose(to_mono(samples), want, rtol=1e-7, atol=0)
    assert to_mono(samples)[0] == -1.0


def test_channels_are_averaged() -> None:
    left, right = noise(500, 1), noise(500, 2)
    stereo = np.stack([left, right], axis=1)
    np.testing.assert_allclose(to_mono(stereo), (left + right) / 2, atol=1e-7)
    ints = (stereo * 9_000).astype(np.int16)
    assert to_mono(ints).dtype == np.float32
    np.testing.assert_allclose(to_mono(ints), ints.mean(axis=1) / 32_768, atol=1e-7)
    np.testing.assert_array_equal(to_mono(left[:, None]), left)
    half = left.astype(np.float16)
    np.testing.assert_array_equal(to_mono(half), half.astype(np.float32))


BAD_SAMPLES: dict[str, tuple[Any, str]] = {
    "none": (np.zeros(0, np.float32), "no samples"),
    "no channels": (np.zeros((5, 0), np.float32), "no samples"),
    "scalar": (np.float32(1), r"shape \[\]"),
    "cube": (np.zeros((2, 2, 2), np.float32), r"shape \[2, 2, 2\]"),
    "lying": (np.zeros((2, 900), np.float32), "900 channels, at most 64; .* transpose"),
    "complex": (np.zeros(900, np.complex64), "samples of type complex64; one of float16"),
    "bool": (np.zeros(900, np.bool_), "samples of type bool"),
    "text": (np.array(["a", "b"]), "samples of type str"),
    "nan": (np.array([0, 1, np.nan]), "sample 2 is nan; samples must be finite"),
    "inf": (np.array([[0, 1], [np.inf, 0]]), "sample 1 is inf"),
    "overflow": (np.array([1e300]), "sample 0 is inf"),
}


@pytest.mark.parametrize("samples,message", BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_bad_samples_are_refused(samples: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^x: {message}"):
        prepare_sound(Sound(samples, RATE, "x"), MEL)


@pytest.mark.parametrize("rate", [0, -16_000, 999, 768_001, 16_000.0, "16000", None, True])
def test_bad_rates_are_refused(rate: Any) -> None:
    with pytest.raises(InputError, match=r"x: sample rate .* 1000\.\.768000 Hz"):
        prepare_sound(Sound(noise(900), rate, "x"), MEL)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_samples_that_overflow_the_spectrum_are_refused() -> None:
    with pytest.raises(InputError, match=r"samples up to .*e\+37 overflow the spectrum"):
        prepare_sound(Sound(np.full(900, 9e37, np.float32), RATE), MEL)


# --- settings ---------------------------------------------------------------------------------


# --- resampling -------------------------------------------------------------------------------


def sinc_formula(samples: np.ndarray, old: int, new: int) -> np.ndarray:
    """torchaudio.functional.resample with its defaults, every output by the whole sum."""
    base = min(old, new) * 0.99
    times = np.arange(resampled_length(len(samples), old, new)) / new
    t = (np.arange(len(samples))[None, :] / old - times[:, None]) * base
    window = np.where(np.abs(t) < 6, np.cos(t * np.pi / 12) ** 2, 0)
    return (np.sinc(t) * window * base / old) @ samples.astype(np.float64)


PAIRS = [
    (8_000, 16_000),
    (22_050, 16_000),
    (44_100, 16_000),
    (48_000, 16_000),
    (11_025, 16_000),
    (16_001, 16_000),
    (1_000, 16_000),
    (192_000, 16_000),
    (16_000, 22_050),
]


@pytest.mark.parametrize("old,new", PAIRS)
@pytest.mark.parametrize("length", [1, 2, 161, 700])
def test_resampling_is_the_windowed_sinc(old: int, new: int, length: int) -> None:
    samples = noise(length, old)
    out = resample(samples, old, new)
    assert out.dtype == np.float32 and len(out) == math.ceil(length * new / old)
    np.testing.assert_allclose(out, sinc_formula(samples, old, new), rtol=0, atol=1e-6)


@pytest.mark.parametrize("old", [8_000, 44_100, 48_000, 96_000])
def test_a_tone_stays_a_tone_and_what_lies_above_goes(old: int) -> None:
    t_old, t_new = np.arange(old) / old, np.arange(RATE) / RATE
    tone = resample(np.sin(2 * np.pi * 1_000 * t_old).astype(np.float32), old, RATE)
    error = np.abs(tone - np.sin(2 * np.pi * 1_000 * t_new))[200:-200].max()
    assert error < 5e-3
    if old > 2 * 12_000:
        high = resample(np.sin(2 * np.pi * 12_000 * t_old).astype(np.float32), old, RATE)
        assert np.abs(high[200:-200]).max() < 5e-3


def test_equal_rates_change_nothing_and_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = noise(5_000)
    assert resample(samples, RATE, RATE) is not None
    np.testing.assert_array_equal(resample(samples, RATE, RATE), samples)
    whole = resample(samples, 44_100, RATE)
    monkeypatch.setattr("g4ir.media.sound._BLOCK", 97)
    np.testing.assert_array_equal(resample(samples, 44_100, RATE), whole)
    np.testing.assert_array_equal(resample(samples, 44_100, RATE, 500), whole[:500])


def test_a_clip_that_would_be_too_large_after_resampling_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("g4ir.media.sound.MAX_RESAMPLED", 10_000)
    with pytest.raises(InputError, match="16000 samples at 16000 Hz, more than 10000"):
        prepare_sound(Sound(noise(1_000), 1_000), RAW)


# --- WAV files --------------------------------------------------------------------------------


def wav_bytes(
    data: bytes, tag: int = 1, channels: int = 1, bits: int = 16, rate: int = RATE, **other: Any
) -> bytes:
    """A WAV file around `data`; `size`, `riff`, `block`, `before`, `fmt` override what is right."""
    block = other.get("block", channels * bits // 8)
    fmt = struct.pack("<HHIIHH", tag, channels, rate, rate * block, block, bits)
    fmt = other.get("fmt", fmt)
    body = b"WAVE" + other.get("before", b"")
    body += b"fmt " + struct.pack("<I", len(fmt)) + fmt
    body += b"data" + struct.pack("<I", other.get("size", len(data))) + data
    return b"RIFF" + struct.pack("<I", other.get("riff", len(body))) + body


def saved(folder: Path, data: bytes, name: str = "a.wav") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def steps(values: np.ndarray, bits: int, zero: int = 0) -> np.ndarray:
    """The nearest whole numbers of `bits` for values in [-1, 1]."""
    full = 1 << bits - 1
    return np.round(values * full).clip(-full, full - 1) + zero


ENCODINGS: dict[str, tuple[int, int, Callable[[np.ndarray], bytes], float]] = {  # tag, bits, error
    "pcm8": (1, 8, lambda x: steps(x, 8, 128).astype(np.uint8).tobytes(), 1.01 / 2**7),
    "pcm16": (1, 16, lambda x: steps(x, 16).astype("<i2").tobytes(), 1.01 / 2**15),
    "pcm24": (
        1,
        24,
        lambda x: steps(x, 24).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes(),
        1.01 / 2**23,
    ),
    "pcm32": (1, 32, lambda x: steps(x, 32).astype("<i4").tobytes(), 1e-7),
    "float32": (3, 32, lambda x: x.astype("<f4").tobytes(), 1e-7),
    "float64": (3, 64, lambda x: x.astype("<f8").tobytes(), 1e-7),
}


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_is_read(tmp_path: Path, encoding: str, channels: int) -> None:
    tag, bits, encode, error = ENCODINGS[encoding]
    values = np.clip(np.stack([noise(701, c) for c in range(channels)], axis=1), -1, 1)
    values = values.astype(np.float64)
    data = encode(values.reshape(-1))
    sound = read_sound(saved(tmp_path, wav_bytes(data, tag, channels, bits, 8_000)))
    assert sound.rate == 8_000 and sound.samples.shape == (701, channels)
    np.testing.assert_allclose(to_mono(sound.samples), values.mean(axis=1), rtol=0, atol=error)


def test_a_file_of_the_standard_library_is_read(tmp_path: Path) -> None:
    samples = (noise(8_000) * 20_000).astype("<i2")
    with wave.open(str(tmp_path / "b.wav"), "wb") as out:
        out.setparams((2, 2, 44_100, 0, "NONE", ""))
        out.writeframes(np.repeat(samples, 2).tobytes())
    clip = prepare_sound(read_sound(tmp_path / "b.wav"), MEL)
    want = resample((samples / 32_768).astype(np.float32), 44_100, RATE)
    np.testing.assert_array_equal(clip.features, prepare_sound(Sound(want, RATE), MEL).features)


def extensible(tag: int, bits: int, channels: int = 1) -> bytes:
    block = channels * bits // 8
    fmt = struct.pack("<HHIIHH", 0xFFFE, channels, RATE, RATE * block, block, bits)
    guid = b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
    return fmt + struct.pack("<HHIH", 22, bits, 0, tag) + guid


def large(data: bytes, size: int, kind: bytes = b"RF64") -> bytes:
    """A WAV file with sizes of 64 bits."""
    ds64 = b"ds64" + struct.pack("<IQQQI", 28, 0, size, 0, 0)
    return kind + wav_bytes(data, size=0xFFFFFFFF, riff=0xFFFFFFFF, before=ds64)[4:]


#: sizes of data and of the file that recorders and pipes leave in a header
UNKNOWN = {
    "all ones": (0xFFFFFFFF, 0xFFFFFFFF),
    "nearly 2^32": (0xFFFFFFFF - 36, 0xFFFFFFFF),
    "2^32 less a header": (0xFFFFFFFF - 44, 0xFFFFFFFF - 8),
    "2^31 - 1": (0x7FFFFFFF, 0x7FFFFFFF + 36),
    "2^31": (0x80000000, 0x80000024),
    "2^31 less a page": (0x7FFFF000, 0x7FFFF024),
    "zeros": (0, 0),
    "an empty file's": (0, 36),
}


@pytest.mark.parametrize("bits", [8, 16, 24])
@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_sizes_mean_to_the_end(tmp_path: Path, case: str, bits: int) -> None:
    size, riff = UNKNOWN[case]
    for rest in (b"", b"\0"):  # the last sample may be half there
        path = saved(tmp_path, wav_bytes(GOOD[:768] + rest, bits=bits, size=size, riff=riff))
        assert len(read_sound(path).samples) == (768 + (bits == 8) * len(rest)) * 8 // bits


def test_an_empty_recording_has_no_samples(tmp_path: Path) -> None:
    for after in (b"", b"LIST" + struct.pack("<I4s", 4, b"INFO")):
        content = wav_bytes(b"", riff=36 + len(after)) + after
        with pytest.raises(InputError, match="no samples"):
            read_sound(saved(tmp_path, content))


@pytest.mark.parametrize("bits, container", [(12, 16), (20, 24), (25, 32), (4, 8)])
def test_bits_of_a_wider_container_are_its_upper_ones(
    tmp_path: Path, bits: int, container: int
) -> None:
    wide, narrow = (
        read_sound(saved(tmp_path, wav_bytes(GOOD[:600], bits=n, block=container // 8))).samples
        for n in (container, bits)
    )
    np.testing.assert_array_equal(wide, narrow)


def test_chunks_of_all_kinds_and_unknown_sizes_are_read(tmp_path: Path) -> None:
    data = (noise(900) * 9_000).astype("<i2").tobytes()
    want = np.frombuffer(data, "<i2")[:, None] / np.float32(1 << 15)
    list_chunk = b"LIST" + struct.pack("<I", 3) + b"abc\0"  # odd size, hence a byte of padding
    files = {
        "chunk before": wav_bytes(data, before=list_chunk),
        "chunk after": wav_bytes(data) + list_chunk,
        "extensible": wav_bytes(data, fmt=extensible(1, 16)),
        "streamed": wav_bytes(data, size=0xFFFFFFFF) + b"\0",
        "64 bits": large(data, len(data)) + list_chunk,
        "64 bits, broadcast": large(data, len(data), b"BW64"),
        "64 bits, streamed": large(data, 0),
    }
    for name, content in files.items():
        sound = read_sound(saved(tmp_path, content))
        np.testing.assert_array_equal(sound.samples, want, err_msg=name)


GOOD = (noise(400) * 9_000).astype("<i2").tobytes()
NAN = np.array([0.0, np.nan] * 400, "<f4").tobytes()
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "head": (wav_bytes(GOOD)[:7], "corrupt, or an unsupported format: Format not recognised"),
    "avi": (b"RIFF\0\0\0\0AVI \0\0\0\0", "corrupt, or an unsupported format: Format not rec"),
    "no chunk": (wav_bytes(GOOD)[:12], "truncated: .*no data chunk"),
    "no data": (wav_bytes(GOOD)[:36], "truncated: .*no data chunk"),
    "half": (wav_bytes(GOOD)[:500], "truncated: 800 bytes of samples announced, 456 there"),
    "half of 64 bits": (large(GOOD, 800)[:500], "truncated: 800 bytes of samples announced, 420"),
    "short format": (wav_bytes(GOOD, fmt=b"\1\0\1\0"), "corrupt, .* Short 'fmt ' chunk"),
    "channels": (wav_bytes(GOOD, channels=0, block=2), "corrupt, .* Channel count is zero"),
    "many": (wav_bytes(GOOD, channels=MAX_CHANNELS + 1), "65 channels, at most 64"),
    "rate": (wav_bytes(GOOD, rate=0), "corrupt, or an unsupported format"),
    "wild rate": (wav_bytes(GOOD, rate=2**30), "sample rate 1073741824"),
    "no samples": (wav_bytes(b""), "no samples"),
    "order": (b"RIFF\0\0\0\0WAVEdata\2\0\0\0ab", "corrupt, .* No 'data' chunk"),
    "png": (b"\x89PNG\r\n\x1a\n" + GOOD, "not an audio file"),
    "text": (b"hello", "not an audio file"),
    "aac": (b"\xff\xf1\x50\x80" + GOOD, "not an audio file"),
    "nan": (wav_bytes(NAN, tag=3, bits=32), "sample 1 is nan"),
}


@pytest.mark.parametrize("data,message", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = saved(tmp_path, data)
    with pytest.raises(InputError, match=message) as caught:
        prepare_sound(read_sound(path), MEL)
    assert str(caught.value).startswith(f"{path}: ")


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.wav", tmp_path):
        with pytest.raises(InputError, match="no such audio file"):
            read_sound(path)


def test_sizes_are_looked_at_before_decoding(tmp_path: Path) -> None:
    path = saved(tmp_path, wav_bytes(GOOD))
    with pytest.raises(InputError, match="844 bytes, at most 843"):
        read_sound(path, DecodeLimits(max_bytes=843))
    with pytest.raises(InputError, match="400 samples of 1 channels, more than 399 values"):
        read_sound(path, DecodeLimits(max_values=399))
    huge = tmp_path / "huge.wav"
    with huge.open("wb") as out:
        out.truncate(1 << 40)  # a file with a hole: nothing of it may be read
    with pytest.raises(InputError, match="1099511627776 bytes, at most"):
        read_sound(huge)


@given(st.binary(max_size=80), st.integers(0, 60), st.integers(0, 255))
def test_damaged_files_give_one_clear_error_or_sound(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, at: int, byte: int
) -> None:
    data = bytearray(wav_bytes(GOOD[:64] + tail))
    data[at] = byte
    path = saved(tmp_path_factory.getbasetemp(), bytes(data), "damaged.wav")
    try:
        assert read_sound(path).samples.size
    except (InputError, MissingError) as e:
        assert str(e).startswith(f"{path}: ")


# --- other formats ----------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"fLaC" + GOOD, b"OggS" + GOOD, wav_bytes(GOOD)])
def test_without_soundfile_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)  # as if it were not installed
    with pytest.raises(MissingError, match=r"needs soundfile: pip install 'g4ir\[mm\]'"):
        read_sound(saved(tmp_path, data, "a.flac"))


FORMATS = ("WAV", "RF64", "W64", "FLAC", "OGG", "AIFF", "CAF", "AU", "MP3")


def encoded(kind: str, rate: int = 16_000, samples: int = 4_000) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    soundfile.write(out, noise(samples).clip(-0.9, 0.9), rate, format=kind)
    return out.getvalue()


@pytest.mark.parametrize("rate", [8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000])
def test_mp3_of_every_version(tmp_path: Path, rate: int) -> None:
    """MPEG 1, 2 and 2.5, as recorders write it; a tag in front of it or not."""
    data = encoded("MP3", rate)
    title = b"TIT2" + struct.pack(">IH", 5, 0) + b"\3talk"
    for content in (data, b"ID3\4\0\0\0\0\0" + bytes([len(title)]) + title + data):
        sound = read_sound(saved(tmp_path, content, "a.mp3"))
        assert sound.rate == rate and len(sound.samples) == 4_000


def test_a_flac_that_went_through_a_pipe(tmp_path: Path) -> None:
    """Its header says neither how many samples there are nor their sum."""
    data = bytearray(encoded("FLAC"))
    whole = read_sound(saved(tmp_path, bytes(data))).samples
    data[21] &= 0xF0
    data[22:42] = bytes(20)
    path = saved(tmp_path, bytes(data))
    np.testing.assert_array_equal(read_sound(path).samples, whole)
    for content in (bytes(data), encoded("FLAC")):  # of unknown and of known length
        with pytest.raises(InputError, match="more than 3999 values"):
            read_sound(saved(tmp_path, content), DecodeLimits(max_values=3_999))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # soundfile's seeks
@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files_of_every_format(tmp_path: Path, kind: str) -> None:
    """250 copies, cut or with other bytes: one InputError, or sound."""
    data, draw = encoded(kind), random.Random(kind)
    for _ in range(250):
        path = saved(tmp_path, damaged(data, draw), "damaged")
        try:
            assert read_sound(path, DecodeLimits(max_values=1 << 20)).samples.size
        except InputError as e:
            assert str(e).startswith(f"{path}: ")


@pytest.mark.parametrize("kind", ["WAV", "RF64", "W64", "AIFF", "AU", "MP3"])
def test_files_that_are_cut_off_are_called_truncated(tmp_path: Path, kind: str) -> None:
    data = encoded(kind)
    for end in (len(data) // 2, len(data) - (400 if kind == "MP3" else 40)):
        with pytest.raises(InputError, match="truncated"):
            read_sound(saved(tmp_path, data[:end], "cut"))


@pytest.mark.parametrize("kind,error", [("FLAC", 1e-4), ("OGG", 0.2), ("AIFF", 1e-4)])
def test_real_files_of_other_formats(tmp_path: Path, kind: str, error: float) -> None:
    soundfile = pytest.importorskip("soundfile")
    samples = np.stack([noise(8_000, 1), noise(8_000, 2)], axis=1).clip(-0.9, 0.9)
    path = tmp_path / f"a.{kind.lower()}"
    soundfile.write(path, samples, 22_050, format=kind)
    sound = read_sound(path)
    assert sound.rate == 22_050 and sound.samples.shape == samples.shape
    assert np.abs(sound.samples - samples).mean() < error
    with pytest.raises(InputError, match=r"corrupt, or an unsupported format|truncated"):
        read_sound(saved(tmp_path, path.read_bytes()[:60], "cut"))
