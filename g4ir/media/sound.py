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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from g4ir.errors import InputError, MissingError
from g4ir.model.sounds import RATES, AudioSettings

from .containers import is_cut, is_unknown
from .mel import F32, F64, Mask, find_features, frozen

CUT, REFUSE = "cut", "refuse"  # what to do with a clip that is too long
MAX_CHANNELS = 64
MAX_RESAMPLED = 1 << 26  # samples of a clip at the model's rate: over an hour at 16 kHz

log = logging.getLogger(__name__)


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
    """Return the features of one sound.

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
    features, mask = find_features(resample(mono, sound.rate, rate, kept), settings)
    if not np.isfinite(features).all():
        raise InputError(
            f"{sound.name}: samples up to {np.abs(mono).max():g} overflow the "
            "spectrum; scale them into [-1, 1]"
        )
    return Clip(features, mask, settings.soft_tokens(kept), length - kept)


def _check_length(
    name: str, length: int, kept: int, settings: AudioSettings, too_long: str
) -> None:
    rate, fewest = settings.sampling_rate, settings.fewest_samples
    if length < fewest:
        raise InputError(
            f"{name}: {length} samples at {rate} Hz are too short for a soft token; "
            f"at least {fewest}"
        )
    if kept < length:
        excess = f"{name}: {length / rate:.2f} s is longer than the limit of {kept / rate:g} s"
        if too_long == REFUSE:
            raise InputError(f"{excess}; shorten it, or allow a cut (audio_too_long: {CUT})")
        log.warning("%s; the last %.2f s are left out", excess, (length - kept) / rate)
    if kept > MAX_RESAMPLED:
        raise InputError(
            f"{name}: {kept} samples at {rate} Hz, more than {MAX_RESAMPLED}; send it in parts"
        )


def stack_clips(clips: Sequence[Clip]) -> tuple[F32, Mask]:
    """Stack clips into f32 [B, T, F] and bool [B, T], shorter ones filled with zeros and False.

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
    """Average the channels: [N] or [N, channels] of any type in SCALES or FLOATS -> f32 [N].

    InputError for other types and shapes, no samples, too many channels, and NaN or infinity.
    """
    samples = np.asarray(samples)
    if samples.ndim not in (1, 2):
        raise InputError(f"{name}: shape {list(samples.shape)}; samples are [N] or [N, channels]")
    if samples.size == 0:
        raise InputError(f"{name}: no samples")
    if samples.ndim == 2 and samples.shape[1] > MAX_CHANNELS:
        raise InputError(
            f"{name}: {samples.shape[1]} channels, at most {MAX_CHANNELS}; "
            "samples are [N, channels], transpose them"
        )
    values = _floats(samples, name)
    if not np.isfinite(values).all():
        first = np.argwhere(~np.isfinite(values))[0]
        raise InputError(
            f"{name}: sample {int(first[0])} is {values[tuple(first)]}; "
            "samples must be finite numbers"
        )
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
    """Return the samples of a clip of `length` after a change of rate from `old` to `new`."""
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
    """Return each output's taps times the samples from `start` on."""
    out = np.zeros(len(start))
    for tap in range(taps.shape[1]):
        out += padded[start + tap] * taps[phase, tap]
    return out.astype(np.float32)


@lru_cache(maxsize=8)
def _taps(old: int, new: int) -> F64:
    """Return the filter around each of the `new` phases of an output: [new, taps]."""
    cutoff = min(old, new) * ROLLOFF / old  # in cycles per two samples
    reach = math.ceil(ZERO_CROSSINGS / cutoff) + 1
    phase = (np.arange(new) * old % new) / new
    crossings = (np.arange(1 - reach, reach + 1)[None, :] - phase[:, None]) * cutoff
    crossings = np.clip(crossings, -ZERO_CROSSINGS, ZERO_CROSSINGS)
    window = np.cos(crossings * math.pi / ZERO_CROSSINGS / 2) ** 2
    return frozen(np.sinc(crossings) * window * cutoff)


# --- files ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeLimits:
    """Sizes that are looked at before anything is decoded."""

    max_bytes: int = 1 << 28  # of the file
    max_values: int = 1 << 26  # samples times channels


def read_sound(path: str | Path, limits: DecodeLimits | None = None) -> Sound:
    """Read the samples of a sound file: plain WAV by ourselves, other formats through soundfile.

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
    if head[:4] in WAVES:
        if len(head) < 12 or head[8:] != b"WAVE":
            raise InputError(f"{path}: a RIFF file without the mark WAVE; it holds no plain sound")
        wav = _wav(file, path, size)
        if wav.decoder is not None:
            return _decode_wav(file, path, wav, limits)
    elif is_cut(file, size):
        raise InputError(f"{path}: truncated: its header announces more than the file has")
    file.seek(0)
    return _read_other(file, path, head, limits)


# --- WAV --------------------------------------------------------------------------------------

WAVES = (b"RIFF", b"RF64", b"BW64")  # the latter two have sizes of 64 bits
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE


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
    """The chunks of a WAV file; `start` and `size` are the bytes of its samples."""

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
    """Read the chunks up to the samples, which are checked against the file's size."""
    file.seek(4)
    (riff,) = struct.unpack("<I", file.read(4))
    found, large, at = None, 0, 12
    while at + 8 <= total:
        file.seek(at)
        mark, size = struct.unpack("<4sI", file.read(8))
        at += 8
        if mark == b"ds64":  # sizes of the file and of its samples
            (large,) = struct.unpack("<8xq", file.read(16).ljust(16, b"\0"))
        if mark == b"fmt ":
            found = _wav_format(file.read(min(size, 40)), path)
        if mark == b"data":
            size = large if large > 0 and size == 0xFFFFFFFF else size
            if is_unknown(size) or (size == 0 and riff + 8 != total):
                size = None
            return _wav_data(found, path, at, size, total - at)
        at += size + size % 2  # chunks begin at even places
    raise InputError(f"{path}: truncated: the WAV file ends before its samples (no data chunk)")


def _wav_format(data: bytes, path: Path) -> _Wav:
    if len(data) < 16:
        raise InputError(f"{path}: corrupt: the format chunk has {len(data)} bytes, at least 16")
    tag, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", data)
    if tag == EXTENSIBLE and len(data) >= 26:
        (tag,) = struct.unpack_from("<H", data, 24)
    if tag == PCM and channels and bits <= block // channels * 8 < bits + 8:
        bits = block // channels * 8  # 20 bits are the upper ones of 24
    wav = _Wav(tag, channels, rate, block, bits)
    if channels == 0 or (wav.decoder is not None and block != channels * bits // 8):
        raise InputError(f"{path}: corrupt: {channels} channels of {bits} bits in {block} bytes")
    if wav.decoder is None and tag in (PCM, FLOAT):
        raise InputError(f"{path}: {bits} bits a sample; PCM has 8, 16, 24 or 32, floats 32 or 64")
    if channels > MAX_CHANNELS:
        raise InputError(f"{path}: {channels} channels, at most {MAX_CHANNELS}")
    _check_rate(rate, str(path))
    return wav


def _wav_data(found: _Wav | None, path: Path, at: int, size: int | None, left: int) -> _Wav:
    """`size` None: to the end of the file."""
    if found is None:
        raise InputError(f"{path}: corrupt: samples come before the format chunk")
    if size is None:
        size = left - left % max(found.block, 1)
    if size > left:
        raise InputError(f"{path}: truncated: {size} bytes of samples announced, {left} there")
    return replace(found, start=at, size=size)


def _decode_wav(file: BinaryIO, path: Path, wav: _Wav, limits: DecodeLimits) -> Sound:
    if wav.size == 0:
        raise InputError(f"{path}: no samples")
    if wav.size % wav.block:
        raise InputError(
            f"{path}: corrupt: {wav.size} bytes of samples are no whole number of "
            f"blocks of {wav.block}"
        )
    _check_values(path, wav.size // wav.block, wav.channels, limits)
    file.seek(wav.start)
    data = file.read(wav.size)
    if len(data) != wav.size or wav.decoder is None:  # the file shrank while it was read
        raise InputError(f"{path}: truncated: {wav.size} bytes of samples, {len(data)} read")
    return Sound(wav.decoder(data).reshape(-1, wav.channels), wav.rate, str(path))


def _check_values(path: Path, frames: int, channels: int, limits: DecodeLimits) -> None:
    if frames * channels > limits.max_values:
        raise InputError(
            f"{path}: {frames} samples of {channels} channels, more than "
            f"{limits.max_values} values; send it in parts"
        )


# --- other formats ----------------------------------------------------------------------------

#: first bytes of formats that soundfile may know
MAGIC = (b"RIFF", b"RIFX", b"riff", b"fLaC", b"OggS", b"FORM", b"caff", b".snd", b"ID3")
UNKNOWN_FRAMES = 1 << 62  # or more: the number of samples of a FLAC that went through a pipe


def _read_other(file: BinaryIO, path: Path, head: bytes, limits: DecodeLimits) -> Sound:
    """Read through soundfile; its header is checked against the limits before it decodes."""
    if not head.startswith(MAGIC) and not _is_mpeg(head):
        raise InputError(
            f"{path}: no sound file (it begins with {head[:4]!r}); send WAV, FLAC, OGG or MP3"
        )
    soundfile = _soundfile(path)
    try:
        with soundfile.SoundFile(file) as source:
            frames, channels, rate = source.frames, source.channels, source.samplerate
            known = frames < UNKNOWN_FRAMES
            if known:
                _check_values(path, frames, channels, limits)
            most = frames if known else limits.max_values // channels + 1
            source.seekable = lambda: False  # it would look for the end of a FLAC that has none
            samples = source.read(most, dtype="float32", always_2d=True)
    except (RuntimeError, TypeError, ValueError) as e:  # soundfile's own are RuntimeErrors
        raise InputError(f"{path}: corrupt, or not a kind that soundfile reads: {e}") from e
    if not len(samples):
        raise InputError(f"{path}: no samples")
    if known and len(samples) < frames:
        raise InputError(f"{path}: truncated: {frames} samples announced, {len(samples)} there")
    _check_values(path, len(samples), channels, limits)
    return Sound(samples, int(rate), str(path))


def _is_mpeg(head: bytes) -> bool:
    """Whether a header of MPEG audio begins here: version 1, 2 or 2.5, layer I, II or III."""
    (word,) = struct.unpack(">I", head[:4].ljust(4, b"\0"))
    version, layer, bit_rate, rate = word >> 19 & 3, word >> 17 & 3, word >> 12 & 15, word >> 10 & 3
    return word >> 21 == 0x7FF and version != 1 and layer != 0 and bit_rate != 15 and rate != 3


def _soundfile(path: Path) -> Any:
    try:
        return importlib.import_module("soundfile")
    except (ImportError, OSError) as e:  # OSError: its C library is not there
        raise MissingError(
            f"{path}: sound other than plain WAV needs soundfile: pip install 'g4ir[mm]'"
        ) from e
