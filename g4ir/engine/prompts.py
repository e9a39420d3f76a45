"""Checks a prompt's token ids; reads a checkpoint's generation defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from g4ir.backends.sampling import SEEDS, SamplingParams
from g4ir.errors import InputError, WeightsError
from g4ir.ui.files import read_table
from g4ir.weights.tensorfile import parse_json, quoted


def checked_ids(ids: Sequence[int], vocab: int, name: str) -> list[int]:
    """Return token ids; InputError names the first that is not an int within the vocabulary."""
    ids = list(ids)
    if {*map(type, ids)} <= {int} and min(ids, default=0) >= 0 and max(ids, default=0) < vocab:
        return ids
    i, t = next((i, t) for i, t in enumerate(ids) if type(t) is not int or not 0 <= t < vocab)
    why = f"outside the vocabulary of {vocab}" if type(t) is int else "no int"
    raise InputError(f"{name}: token {t!r} at index {i} is {why}")


def checked_prompt(
    ids: Sequence[int], count: int, vocab: int, max_seq: int, name: str
) -> list[int]:
    """Return a prompt's token ids; InputError for an id outside the vocabulary, an empty prompt, a
    `count` of new tokens below 1, or if the prompt and `count` - 1 new tokens exceed max_seq: the
    last new token is never written to a KV cache."""
    out = checked_ids(ids, vocab, name)
    if not out:
        raise InputError(f"{name} is empty; give at least one token")
    if not isinstance(count, Integral) or count < 1:
        whole = "" if isinstance(count, Integral) else "a whole number, "
        raise InputError(f"{name}: max_new_tokens {count}: expected {whole}at least 1")
    if len(out) + count - 1 > max_seq:
        raise InputError(
            f"{name}: {len(out)} tokens and {count} new ones do not fit the engine's --max-seq "
            f"{max_seq}; shorten it, ask for fewer, or build with a larger --max-seq"
        )
    return out


TABLE = read_table(Path(__file__).with_name("generation_config.yaml"))
#: key of generation_config.json -> (setting, whether it applies only with do_sample, neutral value)
SETTINGS: Mapping[str, tuple[str, bool, Any]] = TABLE["settings"]
#: keys that do not affect sampling, or are read elsewhere; unsupported keys that affect
#: generation -> neutral value
_OTHERS, _NEUTRAL = frozenset(TABLE["others"]), TABLE["neutral"]


@dataclass(frozen=True)
class Defaults:
    """Defaults from a checkpoint's generation_config.json. `stop`: stop ids; None: the file has
    none. `suppress`: ids that are never sampled. `sampling`: the settings present, by names of
    SamplingParams; temperature, top_k, top_p and min_p only if `do_sample` is true, without which
    decoding is greedy. `unused`: unsupported or unknown keys with values that are not neutral.
    """

    stop: tuple[int, ...] | None = None
    suppress: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    @property
    def note(self) -> str | None:
        """A message for the user that names the keys left out; None without any."""
        if not self.unused:
            return None
        return f"generation_config.json: {', '.join(self.unused)}: not supported, left out"


def read_defaults(
    path: Path, vocab: int, raw: bytes | None = None, stated: Mapping[str, str] | None = None
) -> Defaults:
    """Read a generation_config.json; a missing file has no defaults. Ids outside the vocabulary can
    never be sampled and are dropped. `raw`: its content, if it does not come from `path` itself
    (GGUF); `stated`: its keys -> the keys in the file `path`, for errors. WeightsError names the
    file, and the key of a wrong value."""
    if raw is None and not path.is_file():
        return Defaults()
    values = parse_json(path, path.read_bytes() if raw is None else raw)
    keys = stated or {}
    stop, suppress = (
        _ids(path, values, key, vocab, keys) for key in ("eos_token_id", "suppress_tokens")
    )
    draws = bool(values.get("do_sample"))
    sampling: dict[str, Any] = {"temperature": 1.0} if draws else {}
    for key, (name, drawn, neutral) in SETTINGS.items():
        if values.get(key) not in (None, neutral) and draws >= drawn:
            sampling[name] = _checked(path, key, name, values[key], keys)
    unused = tuple(key for key, value in values.items() if _is_unused(key, value))
    return Defaults(stop, suppress or (), sampling, unused)


def _checked(path: Path, key: str, name: str, value: Any, stated: Mapping[str, str]) -> int | float:
    if type(value) not in (int, float):
        raise _wrong(path, key, f"must be a number, found {quoted(value)}", stated)
    try:
        SamplingParams(**{name: value})
    except InputError as e:
        reason = str(e).removeprefix(name).removeprefix(":")
        raise _wrong(path, key, reason.strip(), stated) from e
    return value


def _wrong(path: Path, key: str, problem: str, stated: Mapping[str, str]) -> WeightsError:
    fix = "correct the file, or remove it"
    if key in stated:
        fix = f"remove it with llama.cpp's gguf_new_metadata.py --remove-metadata {stated[key]}"
    return WeightsError(f"{path}: {stated.get(key, key)} {problem}; fix: {fix}")


def _is_unused(key: str, value: Any) -> bool:
    supported = key in SETTINGS or key in _OTHERS or key.startswith(("output_", "assistant_"))
    return not supported and value not in (None, False, [], {}, _NEUTRAL.get(key))


def _ids(
    path: Path, values: dict[str, Any], key: str, vocab: int, stated: Mapping[str, str]
) -> tuple[int, ...] | None:
    value = values.get(key)
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not {*map(type, ids)} <= {int}:
        problem = f"must be a token id or a list of them, found {quoted(value)}"
        raise _wrong(path, key, problem, stated)
    return tuple(i for i in ids if 0 <= i < vocab)


def sampling_params(defaults: Defaults, settings: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters: `settings`, else the checkpoint's defaults; seeds modulo
    SEEDS."""
    values = {**defaults.sampling, **settings}
    if values.get("seed") is not None:
        values["seed"] %= SEEDS
    return SamplingParams(**values)
