"""Opens Hugging Face checkpoints: names, shapes and dtypes are checked against the spec.

Everything is checked before any tensor data is read; a tensor is then a view of the mapped
file, so that peak memory follows what is in use. Only safetensors are read here, never pickles.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from g4ir.errors import InputError, WeightsError
from g4ir.model.names import FINAL_NORM, HEAD, ORDER, TOKEN_TABLE
from g4ir.model.tensors import (
    CLIP_BOUNDS,
    DRAFTER,
    Tensors,
    dead_tensors,
    media_tensors,
    text_tensors,
)
from g4ir.quant.recipe import Scheme
from g4ir.spec.record import Spec
from g4ir.weights import tensorfile
from g4ir.weights.coded import CodedWeight, MadeWeight, forms_of, split_part
from g4ir.weights.formats import Files, QuantisedTensors, read_coded
from g4ir.weights.formats.base import CODED
from g4ir.weights.layouts import ADAPTER, COMPUTED, MLX_EXPERTS, by_plain_name, plain_name
from g4ir.weights.tensorfile import Entry, Header, open_regular, parse_json, quoted

if TYPE_CHECKING:
    import torch

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION = "generation_config.json"
GGUF = ".gguf"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
SHOWN = 5  # problems listed in one message
WHOLE = ("I64", "I32")  # dtypes of token ids
TIED_CHUNKS, TIED_BYTES = 256, 1 << 18  # what is compared of a tied head: at most 64 MiB
INDEX_LIMIT = 100_000_000  # bytes


class WeightSource(Protocol):
    """Where parameters come from: a checkpoint, or random values."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding table (norms of a checkpoint may be wider); of the final norm
        where the table is in codes."""

    @property
    def ignored(self) -> Mapping[str, str]:
        """Tensors present and not used -> why."""

    @property
    def defaults(self) -> Mapping[str, float]:
        """Tensors absent -> the value used instead."""

    @property
    def forms(self) -> Mapping[str, Scheme]:
        """Weights in codes already -> how. `X.codes` and `X.scales` of such a weight X are tensors
        (ops/quant.py says their layout); X itself is what they mean, in f32."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of a name (without the checkpoint's prefix); do not write to it."""

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` (any shape, int) of a 2-D tensor: shape [*ids.shape, columns]. Of codes
        no other rows are converted."""

    def release(self, name: str) -> None:
        """Give a tensor's memory back: the caller is done with it for now."""

    def close(self) -> None:
        """End all reads; tensors handed out stay valid."""


@dataclass(frozen=True)
class Problem:
    """One mismatch of checkpoint and spec; `fix` is a key of FIXES."""

    file: str
    tensor: str
    text: str
    fix: str


FIXES = {
    "spec": "build with the spec of this checkpoint (its config.json), or complete the download",
    "adapter": "save the model with its adapter merged (PEFT: merge_and_unload), or the adapter "
    "alone and give it as --adapter DIR",
    "mlx": "take the checkpoint that MLX converted, or a compressed-tensors or GGUF file of it",
    "k_eq_v": "set k_eq_v of that attention kind as the checkpoint's config.json says",
    "dtype": "save the checkpoint in BF16, F16 or F32 (dequantise it first)",
    "drafter": "complete the download, or take the config.json that belongs to the drafter",
    "media": "complete the download, or leave the towers out (--media none)",
    "gguf": "take a file that llama.cpp's converter made of this variant, or the file's own spec",
    "mmproj": "take the mmproj file that llama.cpp's converter made of this variant, or name the "
    "kinds of media that it has (--media)",
    "type": "take a file in BF16, F16, Q8_0, Q6_K or Q4_0, or requantise it with llama-quantize",
    "tie": "set tie_word_embeddings to what the checkpoint's config.json says",
    "head": "leave the head out of the file, or set tie_word_embeddings to false",
}


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
        prefix = _find_prefix(directory, spec, names)
        towers = media_tensors(spec, media)
        stored = Files(directory, names, partial(_is_text, spec, prefix))
        found = read_coded(directory / CONFIG, stored)
        live, ignored, problems = _classify(spec, prefix, dict(found.names), towers)
        absent = [name for name in (*text_tensors(spec), *towers) if name not in live]
        defaults = {name: d for name in absent if (d := absent_value(name)) is not None}
        problems += _missing(
            spec, directory, problems, [n for n in absent if n not in defaults], towers
        )
        problems += _mismatches(spec, live, towers)
        tied = live.pop(HEAD, None) if spec.text.tie_word_embeddings else None
        if problems:
            raise WeightsError(report(directory, spec, problems))
        _check_order(stored, live.get(ORDER))
        coded = _coded(live, found, dtype)
        plain = {name: entry for name, entry in live.items() if name not in coded}
        ignored |= found.ignored
        stated = directory / CONFIG if coded else None
        return cls(directory, plain, headers, ignored, defaults, stored, coded, tied, stated)

    @property
    def dtype(self) -> torch.dtype:
        name = FINAL_NORM if TOKEN_TABLE in self.coded else TOKEN_TABLE
        return tensorfile.torch_dtype(self.entries[name][1])

    @property
    def forms(self) -> Mapping[str, Scheme]:
        return forms_of(self.coded)

    @property
    def files(self) -> tuple[tuple[Path, int], ...]:
        """Path and size in bytes of every weight file."""
        return tuple((header.path, header.size) for header in self.headers)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a read-only view of the mapped file; a default is a new tensor of one element."""
        import torch

        if name in self.defaults:
            shape = () if name.endswith(CLIP_BOUNDS) else (1,)
            return torch.full(shape, self.defaults[name], dtype=self.dtype)
        weight, suffix = split_part(name)
        if weight in self.coded:
            return self.coded[weight].part(suffix)
        return self.stored.tensor(self._entry(name))

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Gather rows from the mapped file: only their pages are read."""
        weight, suffix = split_part(name)
        if weight in self.coded:
            check_rows(weight, self.coded[weight].shape, ids)
            made = self.coded[weight].part(suffix, ids.reshape(-1).cpu())
            return made.view(*ids.shape, -1)
        header, entry = self._entry(name)
        check_rows(name, entry.shape, ids)
        flat = self.stored.rows((header, entry), ids.reshape(-1).cpu())
        return flat.view(*ids.shape, entry.shape[1])

    def release(self, name: str) -> None:
        weight, _ = split_part(name)
        if weight in self.coded:
            self.coded[weight].release()
        elif name in self.entries:
            self.stored.release([self.entries[name]])

    def sha256(self, file: Path) -> str:
        """Return the digest of one weight file, streamed."""
        return sha256(file)

    def close(self) -> None:
        """Forget the mappings; each is unmapped when the last tensor on it is gone."""
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
    paths = {file: _shard_path(directory, index, file) for file in sorted(shards)}
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
    """Return file name -> tensors that the index puts there, in the index's order."""
    path = _inside(directory, INDEX, index)
    if path.stat().st_size > INDEX_LIMIT:
        raise WeightsError(f"{index}: larger than {INDEX_LIMIT} bytes; fix: download it again")
    with open_regular(path) as file:
        weight_map = parse_json(index, file.read()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: weight_map must map tensor names to files; fix: download it")
    shards: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise WeightsError(
                f"{index}: weight_map {quoted(name)}: expected a file name, "
                f"found {quoted(file_name)}; fix: download the index again"
            )
        shards.setdefault(file_name, set()).add(name)
    return shards


def _shard_path(directory: Path, index: Path, name: str) -> Path:
    if not name.endswith(".safetensors"):
        raise WeightsError(
            f"{index}: weight_map names {quoted(name)}, expected only .safetensors files; "
            "fix: save the checkpoint with safe_serialization=True"
        )
    return _inside(directory, name, index)


def _read_shard(path: Path, want: set[str]) -> Header:
    """Read the header of a shard, which must hold exactly the tensors that the index puts there."""
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
    """Whether there is such a file; WeightsError where it lies elsewhere."""
    path = directory / name
    if not (path.exists() or path.is_symlink()):
        return False
    _inside(directory, name, path)
    return True


def _side_file(directory: Path, name: str) -> bytes:
    path, most = directory / name, SIDE_FILES[name]
    with open_regular(path) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise WeightsError(f"{path}: larger than {most} bytes; {tensorfile.DOWNLOAD}")
    if name.endswith(".json"):
        parse_json(path, raw)
    else:
        try:
            raw.decode()
        except UnicodeDecodeError as e:
            raise WeightsError(
                f"{path}: not UTF-8 at byte {e.start}; {tensorfile.DOWNLOAD}"
            ) from None
    return raw


# ---- names, shapes, dtypes ------------------------------------------------------------------

Found = dict[str, tuple[Header, Entry]]


def _heads(spec: Spec) -> list[str]:
    """Return the names that an untied head may have."""
    return [*dict.fromkeys(map(plain_name, spec.prefixes.head))]


def _find_prefix(directory: Path, spec: Spec, names: Mapping[str, tuple[Header, Entry]]) -> str:
    """Return the accepted prefix of this checkpoint's text tower: most hits win."""
    valid = text_tensors(spec).keys() - {HEAD}
    prefixes = dict.fromkeys(map(plain_name, spec.prefixes.text))
    hits = {p: sum(p + name in names for name in valid) for p in prefixes}
    best = max(hits, key=lambda p: hits[p])
    if not hits[best]:
        accepted = ", ".join(f"{p}{TOKEN_TABLE}" for p in hits)
        raise WeightsError(
            f"{directory}: no text tensor of spec {spec.name} under any accepted prefix "
            f"(expected {accepted}; found {', '.join(map(quoted, sorted(names)[:3])) or 'none'}); "
            f"fix: {FIXES['spec']}"
        )
    return best


def _tower(spec: Spec, name: str) -> str | None:
    """Return the part of the model, other than text, that a tensor belongs to."""
    parts = asdict(spec.prefixes)
    others = (part for part in parts if part not in ("text", "head", DRAFTER))
    return next((part for part in others if name.startswith(parts[part])), None)


def _is_text(spec: Spec, prefix: str, name: str) -> bool:
    """Whether a stored name is of the text model."""
    inside = name.startswith((prefix, *(h.removesuffix(".weight") for h in _heads(spec))))
    return inside and _tower(spec, name) is None


def _coded(live: Found, found: QuantisedTensors, dtype: str) -> dict[str, CodedWeight | MadeWeight]:
    """Return the weights in codes by bare name; WeightsError for one that may not be used."""
    kept: dict[str, CodedWeight | MadeWeight] = {}
    for name, (_, entry) in live.items():
        weight = found.weights.get(entry)
        if isinstance(weight, CodedWeight):
            if weight.fault:
                raise WeightsError(weight.fault)
            weight = replace(weight, dtype=dtype)
        if weight:
            kept[name] = weight
    return kept


def absent_value(name: str) -> float | None:
    """Return the reference's value for a tensor that a checkpoint lacks, or None."""
    if name.endswith(".layer_scalar"):
        return 1.0
    if name.endswith(CLIP_BOUNDS):
        return math.inf if name.endswith("_max") else -math.inf
    return None


def _stored(spec: Spec, towers: Tensors, names: Found) -> Iterator[tuple[str, str]]:
    """Yield (name in the files, `PART.NAME`) of tensors found outside the text model."""
    for bare in towers:
        part, _, rest = bare.partition(".")
        places = [place + rest for place in getattr(spec.prefixes, part)]
        stored = next((name for name in places if name in names), None)
        if stored is not None:
            yield stored, bare


def _classify(
    spec: Spec, prefix: str, names: Found, towers: Tensors
) -> tuple[Found, dict[str, str], list[Problem]]:
    """Sort the stored tensors into live (by bare name), ignored (name -> why) and unknown."""
    of_towers = dict(_stored(spec, towers, names))
    valid, dead = text_tensors(spec).keys() - {HEAD}, dead_tensors(spec)
    head = next((name for name in _heads(spec) if name in names), None)
    live: Found = {} if head is None else {HEAD: names[head]}
    ignored = {head: f"tied to {TOKEN_TABLE}"} if head and spec.text.tie_word_embeddings else {}
    problems: list[Problem] = []
    for name, found in names.items():
        bare = name.removeprefix(prefix) if name.startswith(prefix) else None
        tower = _tower(spec, name)
        if bare in valid:
            live[bare] = found
        elif name in of_towers:
            live[of_towers[name]] = found
        elif bare in dead:
            ignored[name] = "K or V of a layer that reads another layer's K and V"
        elif tower:
            ignored[name] = f"part of {tower}, which this engine leaves out"
        elif COMPUTED.search(name):
            ignored[name] = "a buffer that follows from the spec"
        elif name != head:
            problems.append(_unknown(spec, prefix, name, found, hint=len(problems) < SHOWN))
    return live, ignored, problems


def _unknown(
    spec: Spec, prefix: str, name: str, found: tuple[Header, Entry], hint: bool
) -> Problem:
    header, entry = found
    if ADAPTER.search(name):
        text = "part of an adapter that is not merged"
        return Problem(header.path.name, entry.name, text, "adapter")
    if MLX_EXPERTS in name:
        return Problem(header.path.name, entry.name, "experts in MLX's layout", "mlx")
    bare = name.removeprefix(prefix)
    kind = _kind_of(spec, bare) if bare.endswith("self_attn.v_proj.weight") else None
    if kind:
        text = f"unknown: expected no v_proj ({kind}.k_eq_v is true), found {_shape(entry)}"
        return Problem(header.path.name, entry.name, text, "k_eq_v")
    near = _nearest(bare, list(text_tensors(spec)), prefix) if hint else ""
    return Problem(header.path.name, entry.name, f"not in the spec{near}", "spec")


def _kind_of(spec: Spec, bare: str) -> str | None:
    """Return the attention kind of the layer in `bare`, if that layer exists."""
    match = re.match(r"layers\.(\d{1,6})\.", bare)
    layers = spec.layers()
    return layers[int(match[1])].kind if match and int(match[1]) < len(layers) else None


def _missing(
    spec: Spec, directory: Path, unknown: list[Problem], absent: list[str], towers: Tensors
) -> Iterator[Problem]:
    shapes = text_tensors(spec) | towers
    strays = [p.tensor for p in unknown[:200]]
    for name in absent:
        text = f"missing: expected shape {list(shapes[name])}"
        if name.endswith("self_attn.v_proj.weight") and name not in towers:
            yield Problem(
                directory.name, name, f"{text} ({_kind_of(spec, name)}.k_eq_v is false)", "k_eq_v"
            )
        elif name == HEAD:
            yield Problem(directory.name, name, f"{text} (tie_word_embeddings is false)", "tie")
        elif name in towers:
            fix = "drafter" if name.startswith(DRAFTER) else "media"
            yield Problem(directory.name, name, text, fix)
        else:
            hint = _nearest(name, strays, "") if len(absent) <= SHOWN else ""
            yield Problem(directory.name, name, text + hint, "spec")


def _mismatches(spec: Spec, live: Found, towers: Tensors) -> Iterator[Problem]:
    shapes = text_tensors(spec) | towers
    shapes.setdefault(HEAD, shapes[TOKEN_TABLE])
    for name, (header, entry) in live.items():
        dtypes = WHOLE if name == ORDER else tensorfile.FLOATS
        if entry.dtype not in dtypes and (entry.dtype != CODED or dtypes == WHOLE):
            text = f"expected dtype {' or '.join(dtypes)}, found {entry.dtype}"
            yield Problem(header.path.name, entry.name, text, "dtype")
        elif entry.shape != tuple(shapes[name]):
            text = f"expected shape {list(shapes[name])}, found {_shape(entry)}"
            moved = len(entry.shape) > 2 and sorted(entry.shape) == sorted(shapes[name])
            text += " (channels last, as MLX stores convolutions)" if moved else ""
            yield Problem(header.path.name, entry.name, text, "mlx" if moved else "spec")
        elif name == HEAD and spec.text.tie_word_embeddings and TOKEN_TABLE in live:
            yield from _tied_dtype(header, entry, live[TOKEN_TABLE][1])


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


def _tied_dtype(header: Header, head: Entry, embed: Entry) -> Iterator[Problem]:
    if CODED in (head.dtype, embed.dtype):
        text = f"stored although it is tied to {TOKEN_TABLE}, and codes are not compared"
        yield Problem(header.path.name, head.name, text, "head")
    elif head.dtype != embed.dtype:
        text = f"tied to {TOKEN_TABLE}: expected dtype {embed.dtype}, found {head.dtype}"
        yield Problem(header.path.name, head.name, text, "tie")


def _shape(entry: Entry) -> str:
    return quoted(f"{entry.dtype} {list(entry.shape)}")


def _nearest(name: str, candidates: list[str], prefix: str) -> str:
    """Return '; nearest: ...' of candidates of the same layer (all are too many to rank)."""
    if len(name) > 200:
        return ""
    same = [c for c in candidates if re.findall(r"\d+", c)[:1] == re.findall(r"\d+", name)[:1]]
    pool = [c for c in (same or candidates) if len(c) <= 200][:200]
    close = difflib.get_close_matches(name, pool, n=2, cutoff=0.5)
    return f"; nearest: {', '.join(quoted(prefix + c) for c in close)}" if close else ""


def report(place: Path, spec: Spec, problems: list[Problem]) -> str:
    """Return the message of an error that lists the first problems, and what mends them."""
    lines = [f"  {p.file}: {quoted(p.tensor)}: {p.text}" for p in problems[:SHOWN]]
    more = len(problems) - SHOWN
    lines += [f"  and {more} more"] * (more > 0)
    fixes = dict.fromkeys(FIXES[p.fix] for p in problems[:SHOWN])
    return (
        f"{place}: the weights do not fit spec {spec.name} ({len(problems)} tensors):\n"
        + "\n".join(lines)
        + f"\nfix: {'; or '.join(fixes)}"
    )


# ---- how sounds are framed --------------------------------------------------------------------

#: where a checkpoint says how sounds are framed -> under which key
EXTRACTORS = {"processor_config.json": "feature_extractor", "preprocessor_config.json": None}


def read_extractor(folder: Path | None) -> Mapping[str, Any] | None:
    """Read the feature extractor of sounds from files of a checkpoint or engine, or None."""
    for name, key in EXTRACTORS.items() if folder else ():
        if folder and (folder / name).is_file():
            whole = parse_json(folder / name, (folder / name).read_bytes())
            found = whole.get(key) if key else whole
            if isinstance(found, dict):
                return found
    return None
