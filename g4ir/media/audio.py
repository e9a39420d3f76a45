"""Audio: a file or an array of samples -> the features that the audio path of a variant takes.

    audio = read_audio("speech.wav")                    # or Waveform(array, rate)
    clip = prepare_audio(audio, audio_settings(spec))   # features, mask, soft_tokens

Features are log-mel frames for the tower of `gemma4`, and raw frames of samples for
`gemma4_unified`. From decoded samples on, the arithmetic (numpy) equals that of the feature
extractors of transformers 5.17, which take 16 kHz. Other rates are resampled by the windowed sinc
of `torchaudio.functional.resample` with its defaults, after channels are averaged. The
reference's `load_audio` resamples by torchcodec if it is installed, else by librosa.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from g4ir.errors import InputError
from g4ir.model.audio import CUT, RATES, REFUSE, AudioSettings, MelSettings, RawSettings, round_up

from .files import is_cut, library, opened
from .limits import check_limit

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]

MAX_CHANNELS = 64
MAX_RESAMPLED = 1 << 26  # maximum samples of a clip at the model's rate: over an hour at 16 kHz
MAX_BYTES, MAX_VALUES = 1 << 28, 1 << 26  # max bytes of a file; max decoded samples x channels

log = logging.getLogger(__name__)


# --- clips ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Waveform:
    """Decoded samples: [N] or [N, channels], floats about [-1, 1]."""

    samples: NDArray[Any]
    rate: int  # Hz
    name: str = "audio"  # in errors and warnings; the file's name if there is one


@dataclass(frozen=True, eq=False)
class Clip:
    """Model inputs of an audio clip. `cut_samples`: samples (at the model's rate) that were cut
    because the clip was too long."""

    features: F32  # [T, F], frames of padding are zero
    mask: Mask  # bool [T]: whether a frame contains audio
    soft_tokens: int
    cut_samples: int = 0


def prepare_audio(audio: Waveform, settings: AudioSettings, too_long: str = CUT) -> Clip:
    """Return the features of one audio clip.

    `too_long`: `cut` keeps the beginning, as the reference does, and warns; `refuse` raises.
    InputError, naming the clip, for samples that `to_mono` refuses or that are too large, for a
    rate out of range, and for clips too short for one soft token, or too long.
    """
    if too_long not in (CUT, REFUSE):
        raise InputError(f"too_long {too_long!r}: expected {CUT} or {REFUSE}")
    rate, max_samples, source_rate = settings.sampling_rate, settings.max_samples, audio.rate
    is_integer = isinstance(source_rate, int | np.integer) and not isinstance(source_rate, bool)
    if not is_integer or not RATES[0] <= source_rate <= RATES[1]:
        expected = f"expected a whole number {RATES[0]}..{RATES[1]} Hz"
        raise InputError(f"{audio.name}: sample rate {source_rate!r}; {expected}")
    mono = to_mono(audio.samples, audio.name)
    length = resampled_length(len(mono), audio.rate, rate)
    used = length if max_samples is None else min(length, max_samples)
    _check_length(audio.name, length, used, settings, too_long)
    features, mask = extract_features(resample(mono, audio.rate, rate, used), settings)
    if not np.isfinite(features).all():
        loud = f"samples up to {np.abs(mono).max():g} overflow the spectrum"
        raise InputError(f"{audio.name}: {loud}; scale them into [-1, 1]")
    return Clip(features, mask, settings.soft_tokens(used), length - used)


def _check_length(
    name: str, length: int, used: int, settings: AudioSettings, too_long: str
) -> None:
    rate, fewest = settings.sampling_rate, settings.fewest_samples
    if length < fewest:
        short = f"{length} samples at {rate} Hz are too short for a soft token"
        raise InputError(f"{name}: {short}; at least {fewest}")
    if used < length:
        excess = f"{name}: {length / rate:g} s is longer than the limit of {used / rate:g} s"
        if too_long == REFUSE:
            raise InputError(f"{excess}; shorten it, or allow a cut (audio_too_long: {CUT})")
        log.warning("%s; the last %g s are left out", excess, (length - used) / rate)
    if used > MAX_RESAMPLED:
        limit = f"more than {MAX_RESAMPLED}"
        raise InputError(f"{name}: {used} samples at {rate} Hz, {limit}; send it in parts")


# --- samples ----------------------------------------------------------------------------------


def to_mono(samples: NDArray[Any], name: str = "audio") -> F32:
    """Average the channels: [N] or [N, channels] of floats -> f32 [N]. InputError for
    other types and shapes, no samples, too many channels, and NaN or infinity."""
    samples = np.asarray(samples)
    if samples.ndim not in (1, 2):
        raise InputError(f"{name}: shape {list(samples.shape)}; samples are [N] or [N, channels]")
    if samples.size == 0:
        raise InputError(f"{name}: no samples")
    if samples.ndim == 2 and samples.shape[1] > MAX_CHANNELS:
        many = f"{samples.shape[1]} channels, at most {MAX_CHANNELS}"
        raise InputError(f"{name}: {many}; samples are [N, channels], transpose them")
    if samples.dtype.kind != "f":
        kind = f"samples of type {samples.dtype.name}"
        raise InputError(f"{name}: {kind}; give floats about [-1, 1], int16 divided by 32768")
    with np.errstate(over="ignore"):
        values = samples.astype(np.float32, copy=False)  # no copy of an hour's samples
    if not np.isfinite(values).all():
        first = np.argwhere(~np.isfinite(values))[0]
        bad = f"sample {int(first[0])} is {values[tuple(first)]}"
        raise InputError(f"{name}: {bad}; samples must be finite in float32")
    return values if values.ndim == 1 else values.mean(axis=1, dtype=np.float64).astype(np.float32)


# The filter of torchaudio.functional.resample: zero crossings on each side, and the cut-off as a
# fraction of the lower of the two Nyquist frequencies.
ZERO_CROSSINGS, ROLLOFF = 6, 0.99
_BLOCK = 1 << 18  # outputs at a time, so that temporaries do not grow with the clip


def resampled_length(length: int, old: int, new: int) -> int:
    """Return the number of samples of a clip of `length` samples after resampling from `old` to
    `new` Hz."""
    return -(-length * int(new) // int(old))


def resample(samples: F32, old: int, new: int, first: int | None = None) -> F32:
    """Resample f32 [N] from `old` to `new` Hz; return the first `first` of the new samples (default
    all), f32.

    y[j] = sum_m x[m] h(m - j old/new) with h a sinc under a squared-cosine window; samples outside
    the clip are zero. Sums in float64.
    """
    total = resampled_length(len(samples), old, new)
    count = total if first is None else min(first, total)
    if old == new:
        return samples[:count]
    common = math.gcd(old, new)
    old, new = int(old) // common, int(new) // common
    taps = _taps(old, new)
    reach = taps.shape[1] // 2
    padded, out = np.pad(samples, (reach - 1, reach)), np.zeros(count, np.float32)
    for begin in range(0, count, _BLOCK):
        check_limit()
        at = np.arange(begin, min(begin + _BLOCK, count))
        start, phase = at * old // new, at % new
        out[at] = sum(padded[start + tap] * taps[phase, tap] for tap in range(taps.shape[1]))
    return out


@lru_cache(maxsize=8)
def _taps(old: int, new: int) -> F64:
    """Return the windowed sinc for each of the `new` phases of output samples: f64 [new, taps]."""
    cutoff = min(old, new) * ROLLOFF / old  # as a fraction of the Nyquist frequency of `old`
    reach = math.ceil(ZERO_CROSSINGS / cutoff) + 1
    phase = (np.arange(new) * old % new) / new
    crossings = (np.arange(1 - reach, reach + 1)[None, :] - phase[:, None]) * cutoff
    crossings = np.clip(crossings, -ZERO_CROSSINGS, ZERO_CROSSINGS)
    window = np.cos(crossings * math.pi / ZERO_CROSSINGS / 2) ** 2
    return frozen(np.sinc(crossings) * window * cutoff)


# --- features -----------------------------------------------------------------------------------


def extract_features(samples: F32, settings: AudioSettings) -> tuple[F32, Mask]:
    """Return features f32 [T, F], zero in frames of padding, and the mask bool [T] of frames that
    contain audio."""
    if isinstance(settings, RawSettings):
        fill = round_up(len(samples), settings.frame) - len(samples)
        frames = np.pad(samples, (0, fill)).reshape(-1, settings.frame)
        return frames, np.ones(len(frames), np.bool_)
    length = round_up(len(samples), settings.pad_multiple)
    mask = np.arange(settings.frames(length)) < settings.frames(len(samples))
    mel = log_mel(np.pad(samples, (0, length - len(samples))), settings)
    return mel * mask[:, None], mask


def log_mel(samples: F32, settings: MelSettings) -> F32:
    """Return log(mel + floor) of the magnitudes of each window's FFT, normalised by the mean and
    the standard deviation per bin if the settings have them: f32 [N] -> f32 [frames(N), bins] (rule
    32).

    The FFT is computed in float32 as in the reference: near the floor its rounding error decides
    the third decimal. Filters and logarithm are float64.
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
    """Apply pre-emphasis, if any: windows [T, frame + 1] -> [T, frame]."""
    share = np.float32(settings.preemphasis)
    if share <= 0:
        return windows[:, :-1]
    if not settings.preemphasis_htk_flavor:
        return windows[:, 1:] - share * windows[:, :-1]
    first = windows[:, :1] * np.float32(1.0 - settings.preemphasis)
    return np.concatenate([first, windows[:, 1:-1] - share * windows[:, :-2]], axis=1)


@lru_cache(maxsize=8)
def _hann(length: int) -> F32:
    return frozen(np.hanning(length + 1)[:-1].astype(np.float32))


@lru_cache(maxsize=8)
def mel_filters(settings: MelSettings) -> F64:
    """Return triangular filters on the HTK mel scale, not normalised: f64 [fft / 2 + 1, bins]. A
    narrow filter may fall between two FFT bins and be zero, as in the reference."""
    ends = np.array([settings.min_frequency, settings.max_frequency])
    low, high = 2595.0 * np.log10(1.0 + ends / 700.0)
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


# --- files ------------------------------------------------------------------------------------


def read_audio(path: str | Path) -> Waveform:
    """Decode an audio file by soundfile: WAV, FLAC, OGG and MP3, as float32.

    InputError, naming the file, if it is missing, empty, no supported audio, corrupt, truncated,
    without samples, too large or of too many channels; MissingError if soundfile cannot be
    imported.
    """
    path = Path(path)
    with opened(path, "audio", MAX_BYTES, "send it in parts") as file:
        head = file.read(4)
        if not MAGIC.match(head):  # libsndfile knows dozens more
            begins = f"it begins with {head!r}"
            raise InputError(f"{path}: no supported audio ({begins}); send WAV, FLAC, OGG or MP3")
        if is_cut(file, path.stat().st_size):
            raise InputError(f"{path}: truncated: its header announces more than the file has")
        file.seek(0)
        return _decode(file, path)


#: first bytes of the formats that are opened; MPEG audio begins with an ID3 tag or a frame header
#: of layer I, II or III
MAGIC = re.compile(rb"RIFF|fLaC|OggS|ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]")
#: libsndfile reports at least this many frames (2^63 - 1) for a file of unknown length, such as a
#: FLAC that was written to a pipe
UNKNOWN_FRAMES = 1 << 62


def _decode(file: BinaryIO, path: Path) -> Waveform:
    soundfile = library("soundfile", f"{path}: audio needs soundfile")
    try:
        with soundfile.SoundFile(file) as source:
            frames, channels, rate = source.frames, source.channels, source.samplerate
            has_length = frames < UNKNOWN_FRAMES
            if channels > MAX_CHANNELS:
                raise InputError(f"{path}: {channels} channels, at most {MAX_CHANNELS}")
            if has_length:
                _check_values(path, frames, channels)
            count = frames if has_length else MAX_VALUES // channels + 1
            source.seekable = lambda: False  # read() would seek, which needs a known length
            samples = source.read(count, dtype="float32", always_2d=True)
    except (RuntimeError, TypeError, ValueError) as e:
        reason = getattr(e, "error_string", e)  # of a LibsndfileError
        raise InputError(f"{path}: corrupt, or an unsupported format: {reason}") from e
    if not len(samples):
        raise InputError(f"{path}: no samples")
    if has_length and len(samples) < frames:
        raise InputError(f"{path}: truncated: it has {len(samples)} of {frames} samples")
    _check_values(path, len(samples), channels)
    return Waveform(samples, int(rate), str(path))


def _check_values(path: Path, frames: int, channels: int) -> None:
    if frames * channels > MAX_VALUES:
        many = f"{frames} samples of {channels} channels, more than {MAX_VALUES} values"
        raise InputError(f"{path}: {many}; send it in parts")
