"""Samples -> features: log-mel frames for the tower of `gemma4`, raw frames of samples for
`gemma4_unified`. Equal to the feature extractors of transformers 5.17."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4ir.model.audio import AudioSettings, MelSettings, RawSettings, round_up

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]


def find_features(samples: F32, settings: AudioSettings) -> tuple[F32, Mask]:
    """Return f32 [T, F], frames of padding zero, and the mask [T] of frames that hold sound."""
    if isinstance(settings, RawSettings):
        return _raw(samples, settings)
    length = round_up(len(samples), settings.pad_multiple)
    mask = np.arange(settings.frames(length)) < settings.frames(len(samples))
    mel = log_mel(np.pad(samples, (0, length - len(samples))), settings)
    return mel * mask[:, None], mask


def _raw(samples: F32, settings: RawSettings) -> tuple[F32, Mask]:
    """Cut samples into frames; the last frame is filled with zeros."""
    length = round_up(len(samples), settings.frame)
    frames = np.pad(samples, (0, length - len(samples))).reshape(-1, settings.frame)
    return frames, np.ones(len(frames), np.bool_)


def log_mel(samples: F32, settings: MelSettings) -> F32:
    """log(mel + floor) of each window's magnitudes: f32 [N] -> f32 [frames(N), bins] (rule 32).

    The transform runs on float32 as in the reference: near the floor its rounding decides the
    third decimal, so a wider one would differ. Filters and logarithm are float64.
    """
    frame, hop = settings.frame, settings.hop
    if not settings.frames(len(samples)):
        return np.zeros((0, settings.bins), np.float32)
    if settings.input_scale_factor != 1.0:
        samples = samples * np.float32(settings.input_scale_factor)
    padded = np.pad(samples, (frame // 2, 0))
    windows = np.lib.stride_tricks.sliding_window_view(padded, frame + 1)[::hop]
    frames = _emphasised(windows, settings) * _hann(frame)
    mel = np.abs(np.fft.rfft(frames, n=settings.fft, axis=-1)) @ mel_filters(settings)
    out = np.log(mel + settings.mel_floor)
    if settings.per_bin_mean is not None:
        out = out - np.asarray(settings.per_bin_mean)
    if settings.per_bin_stddev is not None:
        out = out / np.asarray(settings.per_bin_stddev)
    return out.astype(np.float32)


def _emphasised(windows: F32, settings: MelSettings) -> F32:
    """Return the analysed samples [T, frame] of windows [T, frame + 1]."""
    share = np.float32(settings.preemphasis)
    if share <= 0:
        return windows[:, :-1]
    if not settings.preemphasis_htk_flavor:
        return windows[:, 1:] - share * windows[:, :-1]
    first = windows[:, :1] * np.float32(1.0 - settings.preemphasis)
    return np.concatenate([first, windows[:, 1:-1] - share * windows[:, :-2]], axis=1)


@lru_cache(maxsize=8)
def _hann(length: int) -> F32:
    """Return the periodic window."""
    return frozen(np.hanning(length + 1)[:-1].astype(np.float32))


@lru_cache(maxsize=8)
def mel_filters(settings: MelSettings) -> F64:
    """Return triangles on the HTK mel scale, not normalised: f64 [fft / 2 + 1, bins].

    The uppermost may fall between two points and be zero, as in the reference.
    """
    low, high = (
        2595.0 * np.log10(1.0 + f / 700.0) for f in (settings.min_frequency, settings.max_frequency)
    )
    mels = np.linspace(low, high, settings.bins + 2)
    centers = 700.0 * (np.power(10, mels / 2595.0) - 1.0)
    points = np.linspace(0, settings.sampling_rate // 2, settings.fft // 2 + 1)
    away = centers[None, :] - points[:, None]
    widths = np.diff(centers)
    rising, falling = -away[:, :-2] / widths[:-1], away[:, 2:] / widths[1:]
    return frozen(np.maximum(0.0, np.minimum(rising, falling)))


def frozen(array: Any) -> Any:
    """Return the array made read-only, since every caller shares it."""
    array.setflags(write=False)
    return array
