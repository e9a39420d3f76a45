"""Sound: a file or an array of samples -> the features that the audio path of a variant takes.

    sound = read_sound("speech.wav")                    # or Sound(array, rate)
    clip = prepare_sound(sound, audio_settings(spec))   # features, mask, soft_tokens
    features, mask = stack_clips([clip, other])         # as the reference pads a batch

Two kinds of features, told apart by the spec: log-mel frames for the tower of `gemma4`, and raw
frames of samples for `gemma4_unified`. From decoded samples onwards the arithmetic is ours (numpy)
and equal to the feature extractors of transformers 5.17; only the decoding of formats other than
plain WAV is a library's.

Sample rates. The reference's extractors take 16 kHz and do not resample; its `load_audio` does,
with whichever of three libraries is installed, so it has no single answer. We take the one with a
published formula: the windowed sinc of `torchaudio.functional.resample` with its defaults. As
there, channels are averaged first.
"""

from __future__ import annotations

import importlib
import logging
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from g4ir.errors import InputError, MissingError
from g4ir.spec import Audio, Spec, UnifiedAudio
from g4ir.tensorfile import parse_json

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]

CUT, REFUSE = "cut", "refuse"  # what to do with a clip that is too long
MAX_CHANNELS = 64
RATES = (1_000, 768_000)  # Hz; outside it a header is corrupt, and the resampler's table large
MAX_RESAMPLED = 1 << 26  # samples of a clip at the model's rate: over an hour at 16 kHz

log = logging.getLogger(__name__)


# --- what a clip is turned into ---------------------------------------------------------------


@dataclass(frozen=True)
class MelSettings:
    """Log-mel features (rule 32). The defaults are those of the reference's feature extractor
    class; a checkpoint's own numbers come in through `audio_settings`. Frequencies in Hz."""

    bins: int
    sampling_rate: int = 16_000
    frame_length_ms: float = 20.0
    hop_length_ms: float = 10.0
    min_frequency: float = 0.0
    max_frequency: float = 8_000.0
    mel_floor: float = 1e-3
    preemphasis: float = 0.0
    preemphasis_htk_flavor: bool = True
    fft_overdrive: bool = False
    input_scale_factor: float = 1.0
    per_bin_mean: tuple[float, ...] | None = None
    per_bin_stddev: tuple[float, ...] | None = None
    max_length: int = 480_000  # samples; what is longer is cut or refused
    pad_multiple: int = 128  # samples
    halvings: int = 2  # strided convolutions between frames and soft tokens (rule 33)

    def __post_init__(self) -> None:
        """InputError for numbers that no sound could be framed with."""
        for name, right, rule in _MEL_RULES:
            if not right(self):
                raise InputError(f"audio settings: {name} {getattr(self, name)!r}: {rule}")

    @property
    def frame(self) -> int:
        """Samples of an analysis window."""
        return round(self.sampling_rate * self.frame_length_ms / 1000.0)

    @property
    def hop(self) -> int:
        """Samples from one window to the next."""
        return round(self.sampling_rate * self.hop_length_ms / 1000.0)

    @property
    def fft(self) -> int:
        """Points of the Fourier transform: the next power of two, doubled on `fft_overdrive`."""
        return int(2 ** math.ceil(math.log2(self.frame))) * (2 if self.fft_overdrive else 1)

    @property
    def max_samples(self) -> int:
        """Longest clip in samples; the reference rounds it up to the padding's multiple."""
        return _round_up(self.max_length, self.pad_multiple)

    @property
    def fewest_samples(self) -> int:
        """Shortest clip that gives a soft token."""
        return self.frame + 1 - self.frame // 2

    def frames(self, samples: int) -> int:
        """Windows that lie wholly inside `samples`. A window spans one sample more than it
        analyses, and half of one lies in the zeros that are put in front."""
        return max(0, (samples + self.frame // 2 - self.frame - 1) // self.hop + 1)

    def at_most(self, soft: int) -> MelSettings:
        """These settings for clips of no more than this many soft tokens."""
        room = (soft << self.halvings) * self.hop + self.frame - self.frame // 2
        # Down to the padding's multiple, since the limit itself is rounded up to it.
        most = max(self.fewest_samples, room - room % self.pad_multiple)
        return replace(self, max_length=min(self.max_length, most))

    def soft_tokens(self, samples: int) -> int:
        """Soft tokens of a clip of `samples` at `sampling_rate` that is not too long."""
        count = self.frames(samples)
        for _ in range(self.halvings):
            count = (count + 1) // 2
        return count

    def features(self, samples: F32) -> tuple[F32, Mask]:
        """f32 [T, bins] and the mask [T] of the frames without padding; the others are zero."""
        length = _round_up(len(samples), self.pad_multiple)
        mask = np.arange(self.frames(length)) < self.frames(len(samples))
        mel = log_mel(np.pad(samples, (0, length - len(samples))), self)
        return mel * mask[:, None], mask


_MEL_RULES: tuple[tuple[str, Callable[[MelSettings], bool], str], ...] = (
    ("bins", lambda s: s.bins >= 1, "at least 1"),
    ("sampling_rate", lambda s: RATES[0] <= s.sampling_rate <= RATES[1], "1000..768000 Hz"),
    ("frame_length_ms", lambda s: 2 <= s.frame <= 1 << 16, "a frame has 2..65536 samples"),
    ("hop_length_ms", lambda s: s.hop >= 1, "frames are at least one sample apart"),
    ("min_frequency", lambda s: 0 <= s.min_frequency < s.max_frequency, "0..max_frequency"),
    ("max_frequency", lambda s: s.max_frequency <= s.sampling_rate / 2, "at most half the rate"),
    ("mel_floor", lambda s: s.mel_floor > 0, "above 0, or silence has no logarithm"),
    ("max_length", lambda s: s.max_length >= s.fewest_samples, "at least one frame"),
    ("pad_multiple", lambda s: s.pad_multiple >= 1, "at least 1"),
    ("per_bin_mean", lambda s: _per_bin(s.per_bin_mean, s.bins), "one number per bin"),
    ("per_bin_stddev", lambda s: _per_bin(s.per_bin_stddev, s.bins), "one number per bin"),
)


def _per_bin(values: tuple[float, ...] | None, bins: int) -> bool:
    return values is None or len(values) == bins


@dataclass(frozen=True)
class RawSettings:
    """Raw features (rule 42): each soft token is `frame` samples, the last filled with zeros."""

    frame: int
    sampling_rate: int = 16_000
    max_tokens: int | None = None  # the reference has no limit of its own here

    def __post_init__(self) -> None:
        """InputError for numbers that no sound could be framed with."""
        if self.frame < 1 or not RATES[0] <= self.sampling_rate <= RATES[1]:
            raise InputError(f"audio settings: {self}: a frame needs a sample and the rate "
                             f"{RATES[0]}..{RATES[1]} Hz")  # fmt: skip
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(f"audio settings: max_tokens {self.max_tokens}: at least 1, or None")

    @property
    def max_samples(self) -> int | None:
        """Longest clip in samples."""
        return None if self.max_tokens is None else self.max_tokens * self.frame

    @property
    def fewest_samples(self) -> int:
        """Shortest clip that gives a soft token."""
        return 1

    def soft_tokens(self, samples: int) -> int:
        """Soft tokens of a clip of `samples` at `sampling_rate` that is not too long."""
        return -(-samples // self.frame)

    def features(self, samples: F32) -> tuple[F32, Mask]:
        """f32 [T, frame] and a mask [T] that is all true."""
        length = _round_up(len(samples), self.frame)
        frames = np.pad(samples, (0, length - len(samples))).reshape(-1, self.frame)
        return frames, np.ones(len(frames), np.bool_)


AudioSettings = MelSettings | RawSettings


def audio_settings(spec: Spec, extractor: Mapping[str, Any] | None = None) -> AudioSettings:
    """The features that a variant's audio path takes.

    `extractor` is what a checkpoint says of its feature extractor: `feature_extractor` of
    processor_config.json, or preprocessor_config.json. What it leaves out is as in the reference.
    InputError for a variant without sound and for numbers that do not fit the spec.
    """
    config = dict(extractor or {})
    if isinstance(spec.audio, Audio):
        return _mel_settings(spec.name, spec.audio, config)
    if isinstance(spec.audio, UnifiedAudio):
        return _raw_settings(spec.name, spec.audio, config)
    raise InputError(f"{spec.name} takes no sound; use a variant with an audio section")


def _mel_settings(name: str, audio: Audio, config: dict[str, Any]) -> MelSettings:
    # The tower's first linear has a quarter of the first channel count as its bands, so that
    # count fixes the number of mel bins, whatever it is named after.
    bands = audio.subsampling_conv_channels[0] // 4
    halvings = len(audio.subsampling_conv_channels)
    bins = _checked("feature_size", config.get("feature_size", bands << halvings), int)
    if -(-bins // (1 << halvings)) != bands:
        raise InputError(
            f"{name}: feature_size {bins} gives {-(-bins // (1 << halvings))} bands after "
            f"{halvings} convolutions, the audio tower takes {bands}; use {bands << halvings}"
        )
    _check_plain(config)
    settings = MelSettings(bins=bins, halvings=halvings)
    return replace(settings, **_known(config, MelSettings, ("bins", "halvings")))


def _raw_settings(name: str, audio: UnifiedAudio, config: dict[str, Any]) -> RawSettings:
    for key in ("audio_samples_per_token", "feature_size"):
        found = config.get(key, audio.audio_embed_dim)
        if found != audio.audio_embed_dim:
            raise InputError(
                f"{name}: {key} {found!r} is not audio.audio_embed_dim {audio.audio_embed_dim}"
            )
    _check_plain(config)
    return RawSettings(audio.audio_embed_dim, **_known(config, RawSettings, ("frame",)))


#: where a checkpoint says how sounds are framed -> under which key
EXTRACTORS = {"processor_config.json": "feature_extractor", "preprocessor_config.json": None}


def read_extractor(folder: Path | None) -> Mapping[str, Any] | None:
    """What the files of a checkpoint or an engine say of the feature extractor, if they do."""
    for name, key in EXTRACTORS.items() if folder else ():
        if folder and (folder / name).is_file():
            whole = parse_json(folder / name, (folder / name).read_bytes())
            found = whole.get(key) if key else whole
            if isinstance(found, dict):
                return found
    return None


#: what a feature extractor may say but we have only one way of doing
PLAIN = {"dither": 0, "padding_side": "right", "padding_value": 0}


def _check_plain(config: dict[str, Any]) -> None:
    for key, value in PLAIN.items():
        if config.get(key, value) != value:
            raise InputError(f"feature extractor: {key} {config[key]!r} is not supported; {value}")


def _known(config: dict[str, Any], cls: type, own: tuple[str, ...]) -> dict[str, Any]:
    """The entries that are settings, of the right type; null counts as left out."""
    kinds = {f.name: str(f.type) for f in fields(cls) if f.name not in own}
    given = {k: v for k, v in config.items() if k in kinds and v is not None}
    return {k: _checked(k, v, _KINDS[kinds[k].split(" | ")[0]]) for k, v in given.items()}


_KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool, "tuple[float, ...]": tuple}


def _checked(key: str, value: Any, kind: type) -> Any:
    try:
        if kind is tuple:
            return tuple(_checked(key, v, float) for v in value)
        right = isinstance(value, bool) is (kind is bool) and math.isfinite(value)
        if right and kind(value) == value:
            return kind(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError(f"feature extractor: {key} {str(value)[:40]!r} is no {kind.__name__}")


# --- log-mel ----------------------------------------------------------------------------------


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
    """The analysed samples [T, frame] of windows [T, frame + 1]."""
    share = np.float32(settings.preemphasis)
    if share <= 0:
        return windows[:, :-1]
    if not settings.preemphasis_htk_flavor:
        return windows[:, 1:] - share * windows[:, :-1]
    first = windows[:, :1] * np.float32(1.0 - settings.preemphasis)
    return np.concatenate([first, windows[:, 1:-1] - share * windows[:, :-2]], axis=1)


@lru_cache(maxsize=8)
def _hann(length: int) -> F32:
    """The periodic window."""
    return _frozen(np.hanning(length + 1)[:-1].astype(np.float32))


@lru_cache(maxsize=8)
def mel_filters(settings: MelSettings) -> F64:
    """Triangles on the HTK mel scale, not normalised: f64 [fft / 2 + 1, bins].

    The uppermost may fall between two points and be zero, as in the reference.
    """
    low, high = (2595.0 * np.log10(1.0 + f / 700.0)
                 for f in (settings.min_frequency, settings.max_frequency))  # fmt: skip
    mels = np.linspace(low, high, settings.bins + 2)
    centers = 700.0 * (np.power(10, mels / 2595.0) - 1.0)
    points = np.linspace(0, settings.sampling_rate // 2, settings.fft // 2 + 1)
    away = centers[None, :] - points[:, None]
    widths = np.diff(centers)
    rising, falling = -away[:, :-2] / widths[:-1], away[:, 2:] / widths[1:]
    return _frozen(np.maximum(0.0, np.minimum(rising, falling)))


def _frozen(array: Any) -> Any:
    array.setflags(write=False)  # it is shared by every caller
    return array


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# --- clips ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sound:
    """Decoded samples: [N] or [N, channels], floats about [-1, 1] or whole numbers (see SCALES)."""

    samples: NDArray[Any]
    rate: int  # Hz
    name: str = "audio"  # for messages: the file's name


@dataclass(frozen=True, eq=False)
class Clip:
    """One sound as a variant takes it. `left_out` counts the samples (at the model's rate) that
    were cut because the clip was too long."""

    features: F32  # [T, F], frames of padding are zero
    mask: Mask  # [T], true where a frame holds sound
    soft_tokens: int
    left_out: int = 0


def prepare_sound(sound: Sound, settings: AudioSettings, too_long: str = CUT) -> Clip:
    """The features of one sound.

    `too_long`: `cut` keeps the beginning, as the reference does, and warns; `refuse` raises.
    InputError, naming the sound, for samples that are none, not finite or of an unknown type, for
    a rate out of range, and for clips too short for one soft token.
    """
    if too_long not in (CUT, REFUSE):
        raise InputError(f"too_long {too_long!r}: {CUT} or {REFUSE}")
    rate, most = settings.sampling_rate, settings.max_samples
    _check_rate(sound.rate, sound.name)
    mono = to_mono(sound.samples, sound.name)
    length = resampled_length(len(mono), sound.rate, rate)
    kept = length if most is None else min(length, most)
    _check_length(sound.name, length, kept, settings, too_long)
    features, mask = settings.features(resample(mono, sound.rate, rate, kept))
    if not np.isfinite(features).all():
        raise InputError(f"{sound.name}: samples up to {np.abs(mono).max():g} overflow the "
                         "spectrum; scale them into [-1, 1]")  # fmt: skip
    return Clip(features, mask, settings.soft_tokens(kept), length - kept)


def _check_length(
    name: str, length: int, kept: int, settings: AudioSettings, too_long: str
) -> None:
    rate, fewest = settings.sampling_rate, settings.fewest_samples
    if length < fewest:
        raise InputError(f"{name}: {length} samples at {rate} Hz are too short for a soft token; "
                         f"at least {fewest}")  # fmt: skip
    if kept < length:
        excess = f"{name}: {length / rate:.2f} s is longer than the limit of {kept / rate:g} s"
        if too_long == REFUSE:
            raise InputError(f"{excess}; cut it, or allow {CUT!r}")
        log.warning("%s; the last %.2f s are left out", excess, (length - kept) / rate)
    if kept > MAX_RESAMPLED:
        raise InputError(f"{name}: {kept} samples at {rate} Hz, more than {MAX_RESAMPLED}; "
                         "send it in parts")  # fmt: skip


def stack_clips(clips: Sequence[Clip]) -> tuple[F32, Mask]:
    """f32 [B, T, F] and bool [B, T], shorter clips filled with zeros and False.

    Equal to what the reference makes of a batch: it pads the samples, but then zeroes the frames
    that reach into the padding.
    """
    longest = max((len(clip.mask) for clip in clips), default=0)
    if not clips or len({clip.features.shape[1] for clip in clips}) > 1:
        raise InputError("a batch of sounds needs clips, all with the same settings")
    fill = [longest - len(clip.mask) for clip in clips]
    features = [np.pad(c.features, ((0, n), (0, 0))) for c, n in zip(clips, fill)]
    return np.stack(features), np.stack([np.pad(c.mask, (0, n)) for c, n in zip(clips, fill)])


# --- samples ----------------------------------------------------------------------------------

#: whole numbers -> (zero, full scale), as every decoder reads them
SCALES = {"uint8": (128, 1 << 7), "int16": (0, 1 << 15), "int32": (0, 1 << 31)}
FLOATS = ("float16", "float32", "float64")


def to_mono(samples: NDArray[Any], name: str = "audio") -> F32:
    """The mean of the channels: [N] or [N, channels] of any type in SCALES or FLOATS -> f32 [N].

    InputError for other types and shapes, no samples, too many channels, and NaN or infinity.
    """
    samples = np.asarray(samples)
    if samples.ndim not in (1, 2):
        raise InputError(f"{name}: shape {list(samples.shape)}; samples are [N] or [N, channels]")
    if samples.size == 0:
        raise InputError(f"{name}: no samples")
    if samples.ndim == 2 and samples.shape[1] > MAX_CHANNELS:
        raise InputError(f"{name}: {samples.shape[1]} channels, at most {MAX_CHANNELS}; "
                         "samples are [N, channels], transpose them")  # fmt: skip
    values = _floats(samples, name)
    if not np.isfinite(values).all():
        first = np.argwhere(~np.isfinite(values))[0]
        raise InputError(f"{name}: sample {int(first[0])} is {values[tuple(first)]}; "
                         "samples must be finite numbers")  # fmt: skip
    return values if values.ndim == 1 else values.mean(axis=1, dtype=np.float64).astype(np.float32)


def _floats(samples: NDArray[Any], name: str) -> F32:
    kind = samples.dtype.name
    if kind in FLOATS:
        with np.errstate(over="ignore"):  # infinity is found by the caller
            return samples.astype(np.float32, copy=False)
    if kind not in SCALES:
        raise InputError(f"{name}: samples of type {kind}; one of {', '.join((*FLOATS, *SCALES))}")
    zero, full = SCALES[kind]
    return ((samples.astype(np.float64) - zero) / full).astype(np.float32)


def _check_rate(rate: int, name: str) -> None:
    whole = isinstance(rate, int | np.integer) and not isinstance(rate, bool)
    if not whole or not RATES[0] <= rate <= RATES[1]:
        raise InputError(f"{name}: sample rate {rate!r}; a whole number {RATES[0]}..{RATES[1]} Hz")


# The filter of torchaudio.functional.resample: zero crossings on each side, and the cut-off as a
# share of the lower of the two Nyquist frequencies.
ZERO_CROSSINGS, ROLLOFF = 6, 0.99
_BLOCK = 1 << 18  # outputs at a time, so that memory does not grow with the clip


def resampled_length(length: int, old: int, new: int) -> int:
    """Samples of a clip of `length` after a change of rate from `old` to `new`."""
    return -(-length * int(new) // int(old))


def resample(samples: F32, old: int, new: int, first: int | None = None) -> F32:
    """f32 [N] at `old` Hz -> its first `first` samples (default all) at `new` Hz, f32.

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
    padded = np.pad(samples, (reach - 1, reach))
    blocks = (np.arange(i, min(i + _BLOCK, count)) for i in range(0, count, _BLOCK))
    return np.concatenate([_interpolated(padded, taps, at * old // new, at % new) for at in blocks])


def _interpolated(padded: F32, taps: F64, start: NDArray[Any], phase: NDArray[Any]) -> F32:
    """Each output's taps times the samples from `start` on."""
    out = np.zeros(len(start))
    for tap in range(taps.shape[1]):
        out += padded[start + tap] * taps[phase, tap]
    return out.astype(np.float32)


@lru_cache(maxsize=8)
def _taps(old: int, new: int) -> F64:
    """The filter around each of the `new` phases of an output between two samples: [new, taps]."""
    cutoff = min(old, new) * ROLLOFF / old  # in cycles per two samples
    reach = math.ceil(ZERO_CROSSINGS / cutoff) + 1
    phase = (np.arange(new) * old % new) / new
    crossings = (np.arange(1 - reach, reach + 1)[None, :] - phase[:, None]) * cutoff
    crossings = np.clip(crossings, -ZERO_CROSSINGS, ZERO_CROSSINGS)
    window = np.cos(crossings * math.pi / ZERO_CROSSINGS / 2) ** 2
    return _frozen(np.sinc(crossings) * window * cutoff)


# --- files ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeLimits:
    """Sizes that are looked at before anything is decoded."""

    max_bytes: int = 1 << 28  # of the file
    max_values: int = 1 << 26  # samples times channels


def read_sound(path: str | Path, limits: DecodeLimits | None = None) -> Sound:
    """The samples of a sound file: plain WAV by ourselves, other formats through soundfile.

    InputError, naming the file, for one that is missing, empty, no sound, corrupt, truncated,
    without samples or above the limits; MissingError where soundfile is needed and not installed.
    """
    path, limits = Path(path), limits or DecodeLimits()
    try:
        if not path.is_file():
            raise InputError(f"{path}: no such sound file")
        with path.open("rb") as file:
            return _read(file, path, path.stat().st_size, limits)
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror or e}") from e


def _read(file: BinaryIO, path: Path, size: int, limits: DecodeLimits) -> Sound:
    if size == 0:
        raise InputError(f"{path}: the file is empty")
    if size > limits.max_bytes:
        raise InputError(f"{path}: {size} bytes, at most {limits.max_bytes}; send it in parts")
    head = file.read(12)
    if head[:4] == b"RIFF":
        if len(head) < 12 or head[8:] != b"WAVE":
            raise InputError(f"{path}: a RIFF file without the mark WAVE; it holds no plain sound")
        wav = _wav(file, path, size)
        if wav.decoder is not None:
            return _decode_wav(file, path, wav, limits)
    file.seek(0)
    return _read_other(file, path, head, limits)


# --- WAV --------------------------------------------------------------------------------------

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
UNKNOWN_SIZE = 0xFFFFFFFF  # written by a program that could not seek back


def _pcm24(data: bytes) -> NDArray[Any]:
    """Three bytes a sample -> int32 with the same full scale."""
    out = np.zeros((len(data) // 3, 4), np.uint8)
    out[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
    return out.view("<i4")[:, 0]


#: (format tag, bits) -> bytes to samples
WAV_DECODERS: dict[tuple[int, int], Callable[[bytes], NDArray[Any]]] = {
    (PCM, 8): lambda data: np.frombuffer(data, np.uint8),
    (PCM, 16): lambda data: np.frombuffer(data, "<i2"),
    (PCM, 24): _pcm24,
    (PCM, 32): lambda data: np.frombuffer(data, "<i4"),
    (FLOAT, 32): lambda data: np.frombuffer(data, "<f4"),
    (FLOAT, 64): lambda data: np.frombuffer(data, "<f8"),
}


@dataclass(frozen=True)
class _Wav:
    """What a WAV file's chunks say; `start` and `size` are the bytes of its samples."""

    tag: int
    channels: int
    rate: int
    block: int  # bytes of one sample of every channel
    bits: int
    start: int = 0
    size: int = 0

    @property
    def decoder(self) -> Callable[[bytes], NDArray[Any]] | None:
        return WAV_DECODERS.get((self.tag, self.bits))


def _wav(file: BinaryIO, path: Path, total: int) -> _Wav:
    """The chunks up to the samples, which are checked against the file's size."""
    found: _Wav | None = None
    at = 12
    while at + 8 <= total:
        file.seek(at)
        mark, size = struct.unpack("<4sI", file.read(8))
        at += 8
        if mark == b"fmt ":
            found = _wav_format(file.read(min(size, 40)), path)
        if mark == b"data":
            return _wav_data(found, path, at, size, total)
        at += size + size % 2  # chunks begin at even places
    raise InputError(f"{path}: truncated: the WAV file ends before its samples (no data chunk)")


def _wav_format(data: bytes, path: Path) -> _Wav:
    if len(data) < 16:
        raise InputError(f"{path}: corrupt: the format chunk has {len(data)} bytes, at least 16")
    tag, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", data)
    if tag == EXTENSIBLE and len(data) >= 26:
        (tag,) = struct.unpack_from("<H", data, 24)
    wav = _Wav(tag, channels, rate, block, bits)
    if channels == 0 or (wav.decoder is not None and block != channels * bits // 8):
        raise InputError(f"{path}: corrupt: {channels} channels of {bits} bits in {block} bytes")
    if wav.decoder is None and tag in (PCM, FLOAT):
        raise InputError(f"{path}: {bits} bits a sample; PCM has 8, 16, 24 or 32, floats 32 or 64")
    if channels > MAX_CHANNELS:
        raise InputError(f"{path}: {channels} channels, at most {MAX_CHANNELS}")
    _check_rate(rate, str(path))
    return wav


def _wav_data(found: _Wav | None, path: Path, at: int, size: int, total: int) -> _Wav:
    if found is None:
        raise InputError(f"{path}: corrupt: samples come before the format chunk")
    left = total - at
    if size == UNKNOWN_SIZE:
        size = left - left % max(found.block, 1)
    if size > left:
        raise InputError(f"{path}: truncated: {size} bytes of samples announced, {left} there")
    return replace(found, start=at, size=size)


def _decode_wav(file: BinaryIO, path: Path, wav: _Wav, limits: DecodeLimits) -> Sound:
    if wav.size == 0:
        raise InputError(f"{path}: no samples")
    if wav.size % wav.block:
        raise InputError(f"{path}: corrupt: {wav.size} bytes of samples are no whole number of "
                         f"blocks of {wav.block}")  # fmt: skip
    _check_values(path, wav.size // wav.block, wav.channels, limits)
    file.seek(wav.start)
    data = file.read(wav.size)
    if len(data) != wav.size or wav.decoder is None:  # the file shrank while it was read
        raise InputError(f"{path}: truncated: {wav.size} bytes of samples, {len(data)} read")
    return Sound(wav.decoder(data).reshape(-1, wav.channels), wav.rate, str(path))


def _check_values(path: Path, frames: int, channels: int, limits: DecodeLimits) -> None:
    if frames * channels > limits.max_values:
        raise InputError(f"{path}: {frames} samples of {channels} channels, more than "
                         f"{limits.max_values} values; send it in parts")  # fmt: skip


# --- other formats ----------------------------------------------------------------------------

#: first bytes of formats that soundfile may know
MAGIC = (b"RIFF", b"RF64", b"RIFX", b"fLaC", b"OggS", b"FORM", b"caff", b".snd", b"ID3",
         b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2")  # fmt: skip


def _read_other(file: BinaryIO, path: Path, head: bytes, limits: DecodeLimits) -> Sound:
    """Through soundfile; its header is checked against the limits before it decodes.

    Of some truncated files (AIFF) the library corrects the header and gives what is there.
    """
    if not head.startswith(MAGIC):
        raise InputError(f"{path}: no sound file (it begins with {head[:4]!r}); "
                         "send WAV, FLAC, OGG or MP3")  # fmt: skip
    soundfile = _soundfile(path)
    try:
        with soundfile.SoundFile(file) as source:
            frames, channels, rate = source.frames, source.channels, source.samplerate
            _check_values(path, frames, channels, limits)
            samples = source.read(frames, dtype="float32", always_2d=True)
    except (RuntimeError, TypeError, ValueError) as e:  # soundfile's own are RuntimeErrors
        raise InputError(f"{path}: corrupt, or not a kind that soundfile reads: {e}") from e
    if len(samples) < frames:
        raise InputError(f"{path}: truncated: {frames} samples announced, {len(samples)} there")
    return Sound(samples, int(rate), str(path))


def _soundfile(path: Path) -> Any:
    try:
        return importlib.import_module("soundfile")
    except (ImportError, OSError) as e:  # OSError: its C library is not there
        raise MissingError(
            f"{path}: sound other than plain WAV needs soundfile: pip install 'g4ir[mm]'"
        ) from e
