"""Checks token ids of a prompt; reads a checkpoint's defaults of generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4ir.backends.row_sampling import RowSampling
from g4ir.backends.sampling import Sampling
from g4ir.errors import InputError, WeightsError
from g4ir.weights.tensorfile import parse_json, quoted


def checked_ids(ids: Sequence[int], vocab: int, what: str) -> list[int]:
    """Return token ids as ints; InputError names the first one outside the vocabulary."""
    for i, t in enumerate(ids):
        if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab:
            raise InputError(
                f"{what}: token {t!r} at index {i} is outside the vocabulary of {vocab}"
            )
    return list(ids)


def checked_prompt(ids: Sequence[int], count: int, vocab: int, room: int, what: str) -> list[int]:
    """Return a prompt's ids; InputError where one is no token, or where the prompt and `count` new
    tokens do not fit into `room`. The last new token is never written to a cache."""
    out = checked_ids(ids, vocab, what)
    if not out:
        raise InputError(f"{what} is empty; give at least one token")
    if count < 1:
        raise InputError(f"{what}: max_new_tokens {count}: expected at least 1")
    if len(out) + count - 1 > room:
        raise InputError(
            f"{what}: {len(out)} tokens and {count} new ones do not fit the engine's --max-seq "
            f"{room}; shorten it, ask for fewer, or build with a larger --max-seq"
        )
    return out


@dataclass(frozen=True)
class Defaults:
    """The values of a checkpoint's generation_config.json. `stop` None: it names no stop ids.

    temperature, top_k and top_p count only with its `do_sample`; without it decoding is greedy.
    """

    stop: tuple[int, ...] | None = None
    suppress: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


def read_defaults(path: Path, vocab: int, raw: bytes | None = None) -> Defaults:
    """Read a generation_config.json, whose content may be given; a missing file says nothing. Ids
    outside the vocabulary can never be drawn and are dropped. WeightsError names the file and the
    key."""
    if raw is None and not path.is_file():
        return Defaults()
    values = parse_json(path, path.read_bytes() if raw is None else raw)
    stop, suppress = (_ids(path, values, k, vocab) for k in ("eos_token_id", "suppress_tokens"))
    drawn: dict[str, Any] = {}
    if values.get("do_sample"):
        drawn = {"temperature": 1.0} | {
            k: values[k] for k in ("temperature", "top_k", "top_p") if values.get(k) is not None
        }
        drawn["top_k"] = drawn.get("top_k") or None  # 0 stands for no limit there
    try:
        Sampling(**drawn)
    except (InputError, TypeError) as e:
        raise WeightsError(f"{path}: {e}; fix: correct the file, or remove it") from e
    return Defaults(stop, suppress or (), **drawn)


def row_sampling(defaults: Defaults, given: Mapping[str, Any]) -> RowSampling:
    """Return the settings of a row: what the checkpoint says where `given` has nothing. A top_k of
    0 or less is no limit."""
    named = {k: getattr(defaults, k) for k in ("temperature", "top_k", "top_p")}
    found = {k: v for k, v in named.items() if v is not None} | dict(given)
    top_k = found.get("top_k") or 0
    return RowSampling(**{**found, "top_k": top_k if top_k > 0 else None})


def _ids(path: Path, values: dict[str, Any], key: str, vocab: int) -> tuple[int, ...] | None:
    given = values.get(key)
    if given is None:
        return None
    ids = given if isinstance(given, list) else [given]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise WeightsError(
                f"{path}: {key} must be a token id or a list of them, found {quoted(given)}; "
                f"fix: correct the file, or remove it"
            )
    return tuple(i for i in ids if 0 <= i < vocab)
