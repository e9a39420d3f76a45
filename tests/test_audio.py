"""Audio: features against the feature extractors of transformers, the resampler against its
formula, and files made here against what was written into them."""

from __future__ import annotations

import io
import logging
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
    Gemma4UnifiedAudioFeatureExtractor,
)

from g4ir.errors import InputError
from g4ir.media import audio
from g4ir.media.audio import Waveform, prepare_audio, read_audio
from g4ir.model.audio import MelSettings, RawSettings, audio_settings
from g4ir.spec.record import load_spec
from tests.cases import TABLES
from tests.media_tools import outlives_damage

RATE = 16_000
E2B, UNIFIED = load_spec("e2b"), load_spec("12b")
MEL, RAW = audio_settings(E2B), audio_settings(UNIFIED)
assert isinstance(MEL, MelSettings) and isinstance(RAW, RawSettings)
# one frame, one fewer and one more sample than a frame, hop, padding multiple or soft token takes;
# the longest clip
LENGTHS = (161, 162, 255, 256, 257, 320, 321, 480, 481, 640, 801, 1279, 1281, 4095, 16_000, 31_999)
LENGTHS += (479_999, 480_000, 480_001, 500_000)


def noise(length: int, seed: int = 0) -> np.ndarray:
    """Speech-like: a tone that glides and fades, noise, and a silent stretch."""
    rng = np.random.default_rng(seed)
    t = np.arange(length) / RATE
    tone = 0.6 * np.sin(2 * np.pi * (120 + 900 * t) * t) * np.exp(-2 * t)
    out = tone + rng.normal(0, rng.choice([1e-4, 0.02, 0.3]), length)
    out[length // 3 : length // 2] = 0
    return out.astype(np.float32)


# --- log-mel ----------------------------------------------------------------------------------


def check_mel(samples: np.ndarray, settings: Any = MEL, **config: Any) -> None:
    """Features, mask and count are those of the reference's extractor."""
    clip = prepare_audio(Waveform(samples, settings.sampling_rate), settings)
    want = Gemma4AudioFeatureExtractor(**config)([samples], return_tensors="np")
    features, mask = want["input_features"][0], want["input_features_mask"][0]
    assert clip.features.dtype == features.dtype == np.float32
    np.testing.assert_array_equal(clip.mask, mask)
    np.testing.assert_allclose(clip.features, features, rtol=0, atol=1e-5)
    # The tower's two convolutions keep every second frame, twice.
    assert clip.soft_tokens == int(mask[::2][::2].sum())
    assert clip.cut_samples == max(0, len(samples) - 480_000)


@pytest.mark.parametrize("length", LENGTHS)
def test_mel_equals_the_reference(length: int) -> None:
    check_mel(noise(length, length))


@pytest.mark.parametrize("case", TABLES["media"]["extractors"])
def test_what_a_checkpoint_says_of_its_extractor_counts(case: str) -> None:
    config = TABLES["media"]["extractors"][case]
    config = {k: v * (128 // len(v)) if isinstance(v, list) else v for k, v in config.items()}
    saved = Gemma4AudioFeatureExtractor(**config).to_dict()
    settings = audio_settings(E2B, {**saved, **config})
    for length in (700, 9_001):
        check_mel(noise(length, 3), settings, **config)


def test_the_bins_follow_the_towers_channels() -> None:
    assert E2B.audio is not None
    small = replace(E2B, audio=replace(E2B.audio, subsampling_conv_channels=(16, 8)))
    settings = audio_settings(small)
    assert isinstance(settings, MelSettings) and settings.bins == 16
    check_mel(noise(4_000), settings, feature_size=16)
    assert audio_settings(small, {"feature_size": 14}).bins == 14  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"feature_size 128 gives 32 bands .* takes 4; use 16"):
        audio_settings(small, {"feature_size": 128})


# --- raw frames -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 639, 640, 641, 16_000, 480_001])
def test_raw_frames_equal_the_reference(length: int) -> None:
    clip = prepare_audio(Waveform(noise(length), RATE), RAW)
    want = Gemma4UnifiedAudioFeatureExtractor()([noise(length)], return_tensors="np")
    np.testing.assert_array_equal(clip.features, want["input_features"][0])
    np.testing.assert_array_equal(clip.mask, want["input_features_mask"][0])
    count = int(want["input_features_mask"].sum())
    assert clip.soft_tokens == count == RAW.soft_tokens(length)


def test_raw_frames_are_cut_as_the_reference_cuts() -> None:
    settings, samples = replace(RAW, max_tokens=4), noise(3_000)
    want = Gemma4UnifiedAudioFeatureExtractor()([samples], max_length=4, return_tensors="np")
    clip = prepare_audio(Waveform(samples, RATE), settings)
    np.testing.assert_array_equal(clip.features, want["input_features"][0])
    assert clip.soft_tokens == 4 and clip.cut_samples == 3_000 - 4 * 640


# --- lengths, channels, types -----------------------------------------------------------------


def test_a_long_clip_is_cut_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    given = Waveform(noise(480_160), RATE, "talk.wav")
    with caplog.at_level(logging.WARNING):
        clip = prepare_audio(given, MEL)
    assert clip.cut_samples == 160 and clip.soft_tokens == 750
    assert "talk.wav: 30.01 s is longer than the limit of 30 s; the last 0.01 s" in caplog.text
    with pytest.raises(InputError, match="too_long 'split': expected cut or refuse"):
        prepare_audio(given, MEL, "split")
    with pytest.raises(InputError, match=r"30\.0001 s is longer than the limit of 30 s"):
        prepare_audio(Waveform(noise(480_001), RATE), MEL, "refuse")


def test_channels_are_averaged() -> None:
    half = noise(50).astype(np.float16)
    np.testing.assert_array_equal(audio.to_mono(half), half.astype(np.float32))
    stereo = np.stack([half, half[::-1]], axis=1)
    np.testing.assert_allclose(audio.to_mono(stereo), (half + half[::-1]) / 2, atol=1e-3)


#: samples, their rate, what is wrong
BAD_SAMPLES: dict[str, tuple[Any, Any, str]] = {
    "none": (np.zeros(0, np.float32), RATE, "no samples"),
    "scalar": (np.float32(1), RATE, r"shape \[\]"),
    "cube": (np.zeros((2, 2, 2), np.float32), RATE, r"shape \[2, 2, 2\]"),
    "lying": (np.zeros((2, 900), np.float32), RATE, "900 channels, at most 64; .* transpose"),
    "complex": (np.zeros(900, np.complex64), RATE, "samples of type complex64; give floats"),
    "int16": (np.zeros(900, np.int16), RATE, "samples of type int16; .* divided by 32768"),
    "nan": (np.array([0, 1, np.nan]), RATE, "sample 2 is nan; samples must be finite"),
    "inf": (np.array([[0, 1], [np.inf, 0]]), RATE, "sample 1 is inf"),
    "overflow": (np.array([1e300]), RATE, "sample 0 is inf"),
    "loud": (np.full(900, 9e37, np.float32), RATE, r"samples up to .*e\+37 overflow the spectrum"),
    "short": (noise(160), RATE, "160 samples at 16000 Hz .* at least 161"),
    **{
        f"rate {rate!r}": (noise(900), rate, r"sample rate .* 1000\.\.768000 Hz")
        for rate in (0, -16_000, 999, 768_001, 16_000.0, "16000", None, True)
    },
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("samples, rate, message", BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_bad_samples_are_refused(samples: Any, rate: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^x: {message}"):
        prepare_audio(Waveform(samples, rate, "x"), MEL)


# --- resampling -------------------------------------------------------------------------------


def sinc_formula(samples: np.ndarray, old: int, new: int) -> np.ndarray:
    """torchaudio.functional.resample with its defaults, every output by the whole sum."""
    base = min(old, new) * 0.99
    times = np.arange(audio.resampled_length(len(samples), old, new)) / new
    t = (np.arange(len(samples))[None, :] / old - times[:, None]) * base
    window = np.where(np.abs(t) < 6, np.cos(t * np.pi / 12) ** 2, 0)
    return (np.sinc(t) * window * base / old) @ samples.astype(np.float64)


@pytest.mark.parametrize("old", [8_000, 22_050, 44_100, 48_000, 16_001, 1_000, 192_000])
@pytest.mark.parametrize("length", [1, 161, 700])
def test_resampling_is_the_windowed_sinc(old: int, length: int) -> None:
    samples = noise(length, old)
    out = audio.resample(samples, old, RATE)
    assert out.dtype == np.float32 and len(out) == math.ceil(length * RATE / old)
    np.testing.assert_allclose(out, sinc_formula(samples, old, RATE), rtol=0, atol=1e-6)


def test_equal_rates_change_nothing_and_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = noise(5_000)
    np.testing.assert_array_equal(audio.resample(samples, RATE, RATE), samples)
    whole = audio.resample(samples, 44_100, RATE)
    monkeypatch.setattr(audio, "_BLOCK", 97)
    np.testing.assert_array_equal(audio.resample(samples, 44_100, RATE), whole)
    np.testing.assert_array_equal(audio.resample(samples, 44_100, RATE, 500), whole[:500])
    monkeypatch.setattr(audio, "MAX_RESAMPLED", 10_000)
    with pytest.raises(InputError, match="16000 samples at 16000 Hz, more than 10000"):
        prepare_audio(Waveform(noise(1_000), 1_000), RAW)


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


GOOD = (noise(400) * 9_000).astype("<i2").tobytes()


def test_chunks_of_all_kinds_and_unknown_sizes_are_read(tmp_path: Path) -> None:
    want = np.frombuffer(GOOD, "<i2")[:, None] / np.float32(1 << 15)
    list_chunk = b"LIST" + struct.pack("<I", 3) + b"abc\0"  # odd size, hence a byte of padding
    guid = b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
    extensible = struct.pack("<HHIIHH", 0xFFFE, 1, RATE, RATE * 2, 2, 16)
    extensible += struct.pack("<HHIH", 22, 16, 0, 1) + guid
    files = {
        "chunk before": wav_bytes(GOOD, before=list_chunk),
        "chunk after": wav_bytes(GOOD) + list_chunk,
        "extensible": wav_bytes(GOOD, fmt=extensible),
        "all ones": wav_bytes(GOOD, size=0xFFFFFFFF, riff=0xFFFFFFFF),
        "nearly 2^32": wav_bytes(GOOD, size=0xFFFFFFFF - 36, riff=0xFFFFFFFF),
        "2^31 less a page, and half a sample": wav_bytes(GOOD, size=0x7FFFF000, riff=0x7FFFF024)
        + b"\0",
    }
    for name, content in files.items():
        found = read_audio(saved(tmp_path, content))
        np.testing.assert_array_equal(found.samples, want, err_msg=name)


NAN = np.array([0.0, np.nan] * 400, "<f4").tobytes()
#: others are in refused/media.yaml
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "head": (wav_bytes(GOOD)[:7], "corrupt, or an unsupported format: Format not recognised"),
    "no data": (wav_bytes(GOOD)[:36], "truncated"),
    "channels": (wav_bytes(GOOD, channels=0, block=2), "corrupt, .* Channel count is zero"),
    "many": (wav_bytes(GOOD, channels=65), "65 channels, at most 64"),
    "wild rate": (wav_bytes(GOOD, rate=2**30), "sample rate 1073741824"),
    "no samples": (wav_bytes(b""), "no samples"),
    "aiff": (b"FORM\0\0\3\x46AIFF" + GOOD, "no supported audio .*send WAV, FLAC, OGG or MP3"),
    "nan": (wav_bytes(NAN, tag=3, bits=32), "sample 1 is nan"),
}


@pytest.mark.parametrize("data, message", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = saved(tmp_path, data)
    with pytest.raises(InputError, match=message) as caught:
        prepare_audio(read_audio(path), MEL)
    assert str(caught.value).startswith(f"{path}: ")


def test_limits_come_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, huge = saved(tmp_path, wav_bytes(GOOD)), tmp_path / "huge.wav"
    with huge.open("wb") as out:
        out.truncate(1 << 40)  # a file with a hole: nothing of it may be read
    with pytest.raises(InputError, match="1099511627776 bytes, at most"):
        read_audio(huge)
    monkeypatch.setattr(audio, "MAX_VALUES", 399)
    with pytest.raises(InputError, match="400 samples of 1 channels, more than 399 values"):
        read_audio(path)
    monkeypatch.setattr(audio, "MAX_BYTES", 843)
    with pytest.raises(InputError, match="844 bytes, at most 843"):
        read_audio(path)


# --- other formats ----------------------------------------------------------------------------


def encoded(kind: str, rate: int = 16_000, channels: int = 1) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    samples = np.stack([noise(4_000, c).clip(-0.9, 0.9) for c in range(channels)], axis=1)
    soundfile.write(out, samples, rate, format=kind)
    return out.getvalue()


def test_a_flac_that_went_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header says neither how many samples there are nor their sum."""
    data = bytearray(encoded("FLAC"))
    whole = read_audio(saved(tmp_path, bytes(data))).samples
    data[21] &= 0xF0
    data[22:42] = bytes(20)
    path = saved(tmp_path, bytes(data))
    np.testing.assert_array_equal(read_audio(path).samples, whole)
    monkeypatch.setattr(audio, "MAX_VALUES", 3_999)
    for content in (bytes(data), encoded("FLAC")):  # of unknown and of known length
        with pytest.raises(InputError, match="more than 3999 values"):
            read_audio(saved(tmp_path, content))


#: format and rate -> mean error; MP3 as MPEG 1, 2 and 2.5
FORMATS = {("WAV", RATE): 1e-4, ("FLAC", RATE): 1e-4, ("OGG", RATE): 0.2}
FORMATS |= {("MP3", rate): 0.2 for rate in (11_025, 24_000, 48_000)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # soundfile's seeks
@pytest.mark.parametrize("kind, rate", FORMATS)
def test_every_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rate: int
) -> None:
    data = encoded(kind, rate, channels=2)
    found = read_audio(saved(tmp_path, data, "whole"))
    wanted = np.stack([noise(4_000, c).clip(-0.9, 0.9) for c in range(2)], axis=1)
    assert found.rate == rate and np.abs(found.samples - wanted).mean() < FORMATS[kind, rate]
    if kind == "MP3":  # a tag may stand before it
        title = b"TIT2" + struct.pack(">IH", 5, 0) + b"\3talk"
        tagged = b"ID3\4\0\0\0\0\0" + bytes([len(title)]) + title + data
        assert len(read_audio(saved(tmp_path, tagged)).samples) == 4_000
    monkeypatch.setattr(audio, "MAX_VALUES", 1 << 20)
    outlives_damage(lambda path: read_audio(path).samples, data, tmp_path / f"damaged.{kind}")
    if kind in ("FLAC", "OGG"):  # which do not say how long they are
        return
    for end in (len(data) // 2, len(data) - (400 if kind == "MP3" else 40)):
        with pytest.raises(InputError, match="truncated"):
            read_audio(saved(tmp_path, data[:end], "cut"))
