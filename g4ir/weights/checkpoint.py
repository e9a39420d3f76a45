"""Opens Hugging Face checkpoints: names, shapes and dtypes are checked against the spec.

Everything is checked before any tensor data is read; a tensor is then a view of the mapped
file, so that peak memory follows what is in use. Only safetensors are read here, never pickles.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from g4ir.errors import InputError, WeightsError
from g4ir.model.names import CODES, FINAL_NORM, HEAD, ORDER, SCALES, TOKEN_TABLE
from g4ir.model.tensors import CLIP_BOUNDS, media_tensors
from g4ir.quant.recipe import Scheme
from g4ir.spec.record import Spec
from g4ir.weights import tensorfile
from g4ir.weights.formats import Files, QuantisedTensors, read_coded
from g4ir.weights.formats.base import CodedWeight, MadeWeight, by_plain_name
from g4ir.weights.match import FIXES, SHOWN, Found, TensorMatch, find_prefix, is_text, report
from g4ir.weights.tensorfile import Entry, Header, open_regular, parse_json, quoted, read_limited

if TYPE_CHECKING:
    import torch

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION = "generation_config.json"
GGUF = ".gguf"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
TIED_CHUNKS, TIED_BYTES = 256, 1 << 18  # what is compared of a tied head: at most 64 MiB
INDEX_LIMIT = 100_000_000  # bytes


class WeightSource(Protocol):
    """Where parameters come from: a checkpoint, or random values."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding table; of the final norm if the table is quantised."""

    @property
    def ignored(self) -> Mapping[str, str]:
        """Tensors present and not used -> why."""

    @property
    def defaults(self) -> Mapping[str, float]:
        """Tensors absent -> the value used instead."""

    @property
    def forms(self) -> Mapping[str, Scheme]:
        """Weights in codes already -> how. `X.codes` and `X.scales` of such a weight X are tensors
        (ops/codecs.py says their layout); X itself is what they mean, in f32."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of a name (without the checkpoint's prefix); do not write to it."""

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` (any shape, int) of a 2-D tensor: shape [*ids.shape, columns]."""

    def release(self, name: str) -> None:
        """Give a tensor's memory back: the caller is done with it for now."""

    def close(self) -> None:
        """End all reads; tensors handed out stay valid."""


@dataclass
class Checkpoint:
    """An open checkpoint directory that fits its spec. Names carry no prefix."""

    directory: Path
    entries: Mapping[str, tuple[Header, Entry]]  # live tensors only
    headers: tuple[Header, ...]
    ignored: Mapping[str, str]
    defaults: Mapping[str, float]
    stored: Files
    coded: Mapping[str, CodedWeight | MadeWeight] = field(default_factory=dict)
    _tied: tuple[Header, Entry] | None = None  # a head stored although it is tied, not yet compared
    #: the file that says what codes mean, where it is not that of the weights
    stated: Path | None = None

    @classmethod
    def open(
        cls, directory: Path | str, spec: Spec, media: Iterable[str] = (), dtype: str = "f32"
    ) -> Checkpoint:
        """Check config, index, headers, names, shapes and dtypes; of tensors it reads those alone
        that say how codes are held: shapes, and ranges of activations.

        `media`: the kinds whose towers are wanted too; `dtype`: that of the engine, which scales
        have that a file holds wider. Raises WeightsError naming file, tensor, expected, found and
        the fix.
        """
        directory = Path(directory)
        headers = read_headers(directory)
        stored_names = ((name, (h, e)) for h in headers for name, e in h.entries.items())
        names = by_plain_name(directory, stored_names)
        prefix = find_prefix(directory, spec, names)
        stored = Files(directory, names, partial(is_text, spec, prefix))
        found = read_coded(directory / CONFIG, stored)
        match = TensorMatch(spec, directory, prefix, media_tensors(spec, media), dict(found.names))
        live = match.live
        tied = live.pop(HEAD, None) if spec.text.tie_word_embeddings else None
        if match.mismatches:
            raise WeightsError(report(directory, spec, match.mismatches))
        _check_order(stored, live.get(ORDER))
        coded = _coded(live, found, dtype)
        plain = {name: entry for name, entry in live.items() if name not in coded}
        ignored = match.ignored | dict(found.ignored)
        stated = directory / CONFIG if coded else None
        return cls(directory, plain, headers, ignored, match.defaults, stored, coded, tied, stated)

    @property
    def dtype(self) -> torch.dtype:
        name = FINAL_NORM if TOKEN_TABLE in self.coded else TOKEN_TABLE
        return tensorfile.torch_dtype(self.entries[name][1])

    @property
    def forms(self) -> Mapping[str, Scheme]:
        coded = self.coded.items()
        return {name: w.scheme for name, w in coded if isinstance(w, CodedWeight)}

    @property
    def files(self) -> tuple[tuple[Path, int], ...]:
        return tuple((header.path, header.size) for header in self.headers)

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        if name in self.defaults:
            shape = () if name.endswith(CLIP_BOUNDS) else (1,)
            return torch.full(shape, self.defaults[name], dtype=self.dtype)
        weight, suffix = _split_part(name)
        if weight in self.coded:
            return self.coded[weight].part(suffix)
        return self.stored.tensor(self._entry(name))

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        weight, suffix = _split_part(name)
        if weight in self.coded:
            check_rows(weight, self.coded[weight].shape, ids)
            made = self.coded[weight].part(suffix, ids.reshape(-1).cpu())
            return made.view(*ids.shape, -1)
        header, entry = self._entry(name)
        check_rows(name, entry.shape, ids)
        flat = self.stored.rows((header, entry), ids.reshape(-1).cpu())
        return flat.view(*ids.shape, entry.shape[1])

    def release(self, name: str) -> None:
        weight, _ = _split_part(name)
        if weight in self.coded:
            self.coded[weight].release()
        elif name in self.entries:
            self.stored.release([self.entries[name]])

    def close(self) -> None:
        self.stored.close()

    def _entry(self, name: str) -> tuple[Header, Entry]:
        if name not in self.entries:
            raise WeightsError(f"{self.directory}: no text tensor {quoted(name)} in the spec")
        if name == TOKEN_TABLE and self._tied:
            self._compare_tied(self._tied)
        return self.entries[name]

    def _compare_tied(self, head: tuple[Header, Entry]) -> None:
        """Compare a stored head with the embedding it is tied to, bit for bit (in even samples)."""
        (h1, e1), (h2, e2) = self.entries[TOKEN_TABLE], head
        one, two = self.stored.map(h1), self.stored.map(h2)
        for at in range(0, e1.nbytes, max(TIED_BYTES, e1.nbytes // TIED_CHUNKS)):
            size = min(TIED_BYTES, e1.nbytes - at)
            i, j = e1.start + at, e2.start + at
            if one[i : i + size] != two[j : j + size]:
                raise WeightsError(
                    f"{h2.path}: tensor {quoted(e2.name)} differs from the embedding it is tied "
                    f"to (tie_word_embeddings is true); fix: {FIXES['tie']}"
                )
        tensorfile.drop_pages(two, e2)
        self._tied = None


def _split_part(name: str) -> tuple[str, str]:
    """Split the name of a weight's codes or scales: (weight, suffix); no suffix for a weight."""
    suffix = next((s for s in (CODES, SCALES) if name.endswith(s)), "")
    return name.removesuffix(suffix), suffix


def sha256(file: Path) -> str:
    """Return the digest of a file, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open_regular(file) as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def check_rows(name: str, shape: tuple[int, ...], ids: torch.Tensor) -> None:
    """Raise InputError unless `ids` are integers that index the rows of a 2-D `shape`."""
    if len(shape) != 2:
        raise InputError(f"rows of {name}: expected a 2-D tensor, found shape {list(shape)}")
    if ids.is_floating_point() or ids.dtype.itemsize < 4:
        raise InputError(f"rows of {name}: ids must be int32 or int64, found {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < shape[0]:
        low, high = int(ids.min()), int(ids.max())
        raise InputError(f"rows of {name}: ids {low} to {high} are not all in 0..{shape[0] - 1}")


# ---- files of a directory -------------------------------------------------------------------


def read_headers(directory: Path) -> tuple[Header, ...]:
    """Find the weight files of a checkpoint directory and check their headers and index."""
    try:
        return _read_headers(directory)
    except OSError as error:
        raise WeightsError(f"{directory}: cannot be read ({error}); fix: check the path") from None


def _read_headers(directory: Path) -> tuple[Header, ...]:
    if not directory.is_dir():
        raise WeightsError(f"{directory}: no such checkpoint directory; fix: check the path")
    if not (directory / CONFIG).is_file():
        raise WeightsError(
            f"{directory}: expected {CONFIG} beside the weights, found none; "
            f"fix: copy {CONFIG} from where the checkpoint came from"
        )
    single, index = directory / SINGLE, directory / INDEX
    if not index.exists():
        if not single.exists():
            raise WeightsError(_no_weights(directory))
        return (tensorfile.read_header(_inside(directory, SINGLE, directory)),)
    shards = _read_index(directory, index)
    if single.exists() and SINGLE not in shards:
        raise WeightsError(
            f"{directory}: both {SINGLE} and {INDEX}, which does not name it; "
            "fix: remove the one that is left over"
        )
    paths = {file: _inside(directory, file, index) for file in sorted(shards)}
    return tuple(_read_shard(path, shards[file]) for file, path in paths.items())


def _no_weights(directory: Path) -> str:
    files = sorted(p.name for p in directory.iterdir() if p.is_file())
    pickles = [name for name in files if name.endswith(PICKLES)]
    tensors = [name for name in files if name.endswith(".safetensors")]
    wanted = f"{directory}: expected {SINGLE} or {INDEX}"
    if tensors:
        return f"{wanted}, found {', '.join(map(quoted, tensors[:SHOWN]))}; fix: add {INDEX}"
    if pickles:
        return (
            f"{wanted}, found only {', '.join(map(quoted, pickles[:SHOWN]))}: pickle files can run "
            "code and are never opened; fix: load the model where you trust it and call "
            "save_pretrained(DIR, safe_serialization=True)"
        )
    if gguf := [name for name in files if name.endswith(GGUF)]:
        place = directory / gguf[0]
        return f"{wanted}, found {quoted(gguf[0])}; fix: give --checkpoint {place}"
    return f"{wanted}, found no weights; fix: download the checkpoint again"


def _read_index(directory: Path, index: Path) -> dict[str, set[str]]:
    raw = read_limited(_inside(directory, INDEX, index), INDEX_LIMIT)
    weight_map = parse_json(index, raw).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: weight_map must map tensor names to files; fix: download it")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise WeightsError(
                f"{index}: weight_map {quoted(name)}: expected a file name, found {quoted(file)}; "
                "fix: download the index again"
            )
        if not file.endswith(".safetensors"):
            raise WeightsError(
                f"{index}: weight_map names {quoted(file)}, expected only .safetensors files; "
                "fix: save the checkpoint with safe_serialization=True"
            )
        shards.setdefault(file, set()).add(name)
    return shards


def _read_shard(path: Path, want: set[str]) -> Header:
    header = tensorfile.read_header(path)
    extra, missing = sorted(header.entries.keys() - want), sorted(want - header.entries.keys())
    if extra or missing:
        what, place = (extra, "not named for it in") if extra else (missing, "absent, but named in")
        raise WeightsError(
            f"{header.path}: tensor {quoted(what[0])} is {place} {INDEX} "
            f"({len(extra)} extra, {len(missing)} missing); fix: download shards and index again"
        )
    return header


def _inside(directory: Path, name: str, source: Path) -> Path:
    """Find the file `name` in `directory`; a name or link that leads elsewhere is refused.

    Links into the `blobs` folder of the same hub cache entry are how that cache stores files.
    """
    parts = re.split(r"[/\\]", name)
    if not name.isprintable() or len(name) > 1000 or any(p in ("", ".", "..") for p in parts):
        raise WeightsError(_outside(source, name))
    path = directory / name
    try:
        real, home = path.resolve(strict=True), directory.resolve()
    except (OSError, RuntimeError, ValueError):
        raise WeightsError(
            f"{source}: names {quoted(name)}, which is not in {directory}; "
            "fix: complete the download"
        ) from None
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if Path(name).is_absolute() or not any(real.is_relative_to(h) for h in homes):
        raise WeightsError(_outside(source, name))
    return path


def _outside(source: Path, name: str) -> str:
    return (
        f"{source}: {quoted(name)} leads outside the checkpoint directory, expected a plain file "
        "name; fix: put the weight files themselves into the directory"
    )


# ---- files beside the weights ---------------------------------------------------------------

#: what an engine copies where it exists -> most bytes
SIDE_FILES = {
    "tokenizer.json": 256 << 20,
    "tokenizer_config.json": 16 << 20,
    "special_tokens_map.json": 1 << 20,
    GENERATION: 1 << 20,
    "chat_template.jinja": 1 << 20,
    "processor_config.json": 1 << 20,
    "preprocessor_config.json": 1 << 20,
}


def read_side_files(directory: Path) -> dict[str, bytes]:
    """Read the side files of a checkpoint that are there, by name, each once.

    Raises WeightsError for one that is no ordinary file inside the directory, is too large, or is
    not what its name says.
    """
    _check_present(directory, CONFIG)
    return {n: _side_file(directory, n) for n in SIDE_FILES if _check_present(directory, n)}


def _check_present(directory: Path, name: str) -> bool:
    path = directory / name
    if not (path.exists() or path.is_symlink()):
        return False
    _inside(directory, name, path)
    return True


def _side_file(directory: Path, name: str) -> bytes:
    path = directory / name
    raw = read_limited(path, SIDE_FILES[name])
    if name.endswith(".json"):
        parse_json(path, raw)
    try:
        raw.decode()
    except UnicodeDecodeError as e:
        raise tensorfile.broken(path, f"not UTF-8 at byte {e.start}") from None
    return raw


# ---- tensors ----------------------------------------------------------------------------------


def _coded(live: Found, found: QuantisedTensors, dtype: str) -> dict[str, CodedWeight | MadeWeight]:
    kept = {name: found.weights[e] for name, (_, e) in live.items() if e in found.weights}
    for name, weight in kept.items():
        if isinstance(weight, CodedWeight):
            if weight.fault:
                raise WeightsError(weight.fault)
            kept[name] = replace(weight, dtype=dtype)
    return kept


def _check_order(stored: Files, order: tuple[Header, Entry] | None) -> None:
    """Raise WeightsError unless a drafter's clusters have every token once."""
    if order is None:
        return
    import torch

    header, entry = order
    found = stored.tensor(order).long().sort().values
    wrong = (found != torch.arange(len(found))).nonzero()
    if len(wrong):
        raise WeightsError(
            f"{header.path}: tensor {quoted(entry.name)}: expected every token from 0 to "
            f"{len(found) - 1} once, and {int(wrong[0])} is not; fix: {FIXES['drafter']}"
        )


# ---- how sounds are framed --------------------------------------------------------------------

#: where a checkpoint says how sounds are framed -> under which key
EXTRACTORS = {"processor_config.json": "feature_extractor", "preprocessor_config.json": None}


def read_extractor(folder: Path | None) -> Mapping[str, Any] | None:
    """Read the feature extractor of sounds from files of a checkpoint or engine, or None."""
    files = {folder / name: key for name, key in EXTRACTORS.items()} if folder else {}
    for file, key in files.items():
        whole = parse_json(file, file.read_bytes()) if file.is_file() else {}
        found = whole.get(key) if key else whole
        if found and isinstance(found, dict):
            return found
    return None
