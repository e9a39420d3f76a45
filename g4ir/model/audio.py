"""Audio framing of a variant: lengths, rates and counts of soft tokens, without samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from g4ir.errors import InputError
from g4ir.spec.parts import Audio, UnifiedAudio
from g4ir.spec.record import Spec

CUT, REFUSE = "cut", "refuse"  # treatment of a clip that is too long
RATES = (1_000, 768_000)  # Hz; a header with another rate is corrupt, or needs a large resampler


@dataclass(frozen=True)
class MelSettings:
    """Settings of log-mel features (rule 32). Defaults are those of the reference's feature
    extractor; `audio_settings` applies a checkpoint's values. Frequencies in Hz."""

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
    max_length: int = 480_000  # samples; longer clips are cut or refused
    pad_multiple: int = 128  # samples
    halvings: int = 2  # strided convolutions between frames and soft tokens (rule 33)

    def __post_init__(self) -> None:
        """Raise InputError for values out of range."""
        for name, right, rule in _MEL_RULES:
            if not right(self):
                raise InputError(f"audio settings: {name} {getattr(self, name)!r}: expected {rule}")

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
        """Points of the Fourier transform: `frame`, rounded up to a power of two; twice that with
        `fft_overdrive`."""
        return int(2 ** math.ceil(math.log2(self.frame))) * (2 if self.fft_overdrive else 1)

    @property
    def max_samples(self) -> int:
        """Longest clip in samples; the reference rounds it up to the padding's multiple."""
        return round_up(self.max_length, self.pad_multiple)

    @property
    def fewest_samples(self) -> int:
        """Shortest clip that gives a soft token, in samples."""
        return self.frame + 1 - self.frame // 2

    def frames(self, samples: int) -> int:
        """Count the windows that fit in `samples`. A window spans one sample more than it analyses;
        half a window of zeros is prepended."""
        return max(0, (samples + self.frame // 2 - self.frame - 1) // self.hop + 1)

    def limited_to(self, soft: int) -> MelSettings:
        """Return these settings with clips limited to at most `soft` soft tokens (at least 1)."""
        capacity = (soft << self.halvings) * self.hop + self.frame - self.frame // 2
        # Down to the padding's multiple, since the limit itself is rounded up to it.
        max_samples = max(self.fewest_samples, capacity - capacity % self.pad_multiple)
        return replace(self, max_length=min(self.max_length, max_samples))

    def soft_tokens(self, samples: int) -> int:
        """Count soft tokens of a clip of `samples` at `sampling_rate` that is not too long."""
        count = self.frames(samples)
        for _ in range(self.halvings):
            count = (count + 1) // 2
        return count


_MEL_RULES: tuple[tuple[str, Callable[[MelSettings], bool], str], ...] = (
    ("bins", lambda s: s.bins >= 1, "at least 1"),
    ("sampling_rate", lambda s: RATES[0] <= s.sampling_rate <= RATES[1], "1000..768000 Hz"),
    ("frame_length_ms", lambda s: 2 <= s.frame <= 1 << 16, "a frame of 2..65536 samples"),
    ("hop_length_ms", lambda s: s.hop >= 1, "at least one sample"),
    ("min_frequency", lambda s: 0 <= s.min_frequency < s.max_frequency, "0 to below max_frequency"),
    ("max_frequency", lambda s: s.max_frequency <= s.sampling_rate / 2, "at most half the rate"),
    ("mel_floor", lambda s: s.mel_floor > 0, "above 0, so that silence has a logarithm"),
    ("max_length", lambda s: s.max_length >= s.fewest_samples, "enough for one soft token"),
    ("pad_multiple", lambda s: s.pad_multiple >= 1, "at least 1"),
    ("per_bin_mean", lambda s: _per_bin(s.per_bin_mean, s.bins), "one number per bin"),
    ("per_bin_stddev", lambda s: _per_bin(s.per_bin_stddev, s.bins), "one number per bin"),
)


def _per_bin(values: tuple[float, ...] | None, bins: int) -> bool:
    return values is None or len(values) == bins


@dataclass(frozen=True)
class RawSettings:
    """Settings of raw features (rule 42): each soft token is `frame` samples, the last filled with
    zeros."""

    frame: int
    sampling_rate: int = 16_000
    max_tokens: int | None = None  # the reference has no limit here

    def __post_init__(self) -> None:
        """Raise InputError for values out of range."""
        if self.frame < 1 or not RATES[0] <= self.sampling_rate <= RATES[1]:
            why = f"{self}: expected a frame of at least 1, a rate of {RATES[0]}..{RATES[1]} Hz"
            raise InputError(f"audio settings: {why}")
        if self.max_tokens is not None and self.max_tokens < 1:
            why = f"max_tokens {self.max_tokens}: expected at least 1, or None"
            raise InputError(f"audio settings: {why}")

    @property
    def max_samples(self) -> int | None:
        """Longest clip in samples; None: unlimited."""
        return None if self.max_tokens is None else self.max_tokens * self.frame

    @property
    def fewest_samples(self) -> int:
        """Shortest clip that gives a soft token, in samples."""
        return 1

    def soft_tokens(self, samples: int) -> int:
        """Count soft tokens of a clip of `samples` at `sampling_rate` that is not too long."""
        return -(-samples // self.frame)


AudioSettings = MelSettings | RawSettings


def audio_settings(spec: Spec, extractor: Mapping[str, Any] | None = None) -> AudioSettings:
    """Return the settings of the input features of a variant's audio tower.

    `extractor` is a checkpoint's feature extractor config: `feature_extractor` of
    processor_config.json, or preprocessor_config.json; missing settings have the reference's
    defaults. InputError for a variant without audio and for values that do not fit the spec.
    """
    config = dict(extractor or {})
    if isinstance(spec.audio, Audio):
        return _mel_settings(spec.name, spec.audio, config)
    if isinstance(spec.audio, UnifiedAudio):
        return _raw_settings(spec.name, spec.audio, config)
    raise InputError(f"{spec.name} takes no audio; use a variant with an audio section")


def _mel_settings(name: str, audio: Audio, config: dict[str, Any]) -> MelSettings:
    # The tower's first linear takes channels[0] / 4 frequency bands, so this channel count fixes
    # the number of mel bins.
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
    return replace(settings, **_read_settings(config, MelSettings, ("bins", "halvings")))


def _raw_settings(name: str, audio: UnifiedAudio, config: dict[str, Any]) -> RawSettings:
    for key in ("audio_samples_per_token", "feature_size"):
        value = config.get(key, audio.audio_embed_dim)
        if value != audio.audio_embed_dim:
            raise InputError(
                f"{name}: feature extractor: {key} {value!r}: expected the spec's "
                f"audio.audio_embed_dim, {audio.audio_embed_dim}"
            )
    _check_plain(config)
    return RawSettings(audio.audio_embed_dim, **_read_settings(config, RawSettings, ("frame",)))


#: settings of a feature extractor -> their only supported value
PLAIN = {"dither": 0, "padding_side": "right", "padding_value": 0}


def _check_plain(config: dict[str, Any]) -> None:
    for key, value in PLAIN.items():
        if config.get(key, value) != value:
            found = f"feature extractor: {key} {config[key]!r}"
            raise InputError(f"{found} is not supported; expected {value}")


def _read_settings(config: dict[str, Any], cls: type, exclude: tuple[str, ...]) -> dict[str, Any]:
    """Return the entries of a config that are fields of `cls`, converted; null is ignored."""
    kinds = {f.name: str(f.type) for f in fields(cls) if f.name not in exclude}
    values = {k: v for k, v in config.items() if k in kinds and v is not None}
    return {k: _checked(k, v, _KINDS[kinds[k].split(" | ")[0]]) for k, v in values.items()}


_KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool, "tuple[float, ...]": tuple}
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", tuple: "a list"}


def _checked(key: str, value: Any, kind: type) -> Any:
    try:
        if kind is tuple:
            return tuple(_checked(key, v, float) for v in value)
        right = isinstance(value, bool) is (kind is bool) and math.isfinite(value)
        if right and kind(value) == value:
            return kind(value)
    except (TypeError, ValueError, OverflowError):
        pass
    found = str(value)[:40]
    raise InputError(f"feature extractor: {key} {found!r}: expected {_NAMES[kind]}")


def round_up(number: int, multiple: int) -> int:
    """Round a number up to the next multiple."""
    return -(-number // multiple) * multiple
