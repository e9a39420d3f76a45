"""Opens Hugging Face checkpoints: names, shapes and dtypes are checked against the spec before
weights are read; a tensor that is not quantised is a view of the mapped file. Never reads pickles.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from g4ir.errors import InputError, WeightsError
from g4ir.model.names import (
    CODES,
    DENSE,
    DRAFTER_PREFIX,
    FINAL_NORM,
    HEAD,
    NORM,
    ORDER,
    SCALES,
    TOKEN_TABLE,
)
from g4ir.model.tensors import CLIP_BOUNDS, media_tensors
from g4ir.ops.types import torch
from g4ir.quant.recipe import Scheme
from g4ir.spec.record import Spec
from g4ir.spec.sentence_transformers import MODULES, read_modules
from g4ir.weights import tensorfile
from g4ir.weights.formats import Files, read_coded
from g4ir.weights.formats.base import StoredWeight, TensorRef, by_plain_name, invalid
from g4ir.weights.match import FIXES, MAX_LISTED, TensorMatch, find_prefix, is_text, report
from g4ir.weights.tensorfile import (
    Header,
    broken,
    open_regular,
    parse_json,
    quoted,
    read_json,
    read_limited,
)

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
GGUF = ".gguf"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
SAVE = "load the model with transformers, where you trust it, and call save_pretrained(DIR)"
TIED_CHUNKS, TIED_BYTES = 256, 1 << 18  # samples of a tied head that are compared, bytes of each
INDEX_LIMIT = 100_000_000  # maximum bytes of the index
#: thresholds that distinguish norm weights 1 + w from w (measured on Gemma 3 270M, where 0.1 % of 1
#: + w and 10 % of w are negative): 1 + w has a mean above MIN_MEAN and a fraction below FEW of
#: negative values; w has more than MANY
MIN_MEAN, FEW, MANY = 0.5, 0.01, 0.05


def check_norms(spec: Spec, checkpoint: Checkpoint, path: Path, stored: float = 0.0) -> None:
    """Raise WeightsError if decoder norms that a file must store as w are stored as 1 + w; or, with
    `stored` (which the reader has subtracted), as w instead of w + `stored`. Ambiguous weights are
    accepted, as is every spec without `norms_about_zero`."""
    names = [n for n in checkpoint.weights if spec.text.norms_about_zero and NORM.fullmatch(n)]
    if not names:
        return
    values = torch.cat([checkpoint.tensor(name).float() for name in names]) + stored
    mean, below = values.mean().item(), (values < 0).float().mean().item()
    about_one = mean > MIN_MEAN and below < FEW and values.min() < values.max()
    if not (below > MANY if stored else about_one):
        return
    actual, expected = ("w", "1 + w") if stored else ("1 + w", "w")
    raise WeightsError(
        f"{path}: {names[0]} and {len(names) - 1} more norms must be stored as {expected}, but a "
        f"mean of {mean:.2f}, with {below:.1%} below zero, is typical of {actual}; fix: "
        f"{'add 1 to' if stored else 'subtract 1 from'} them, or use another conversion"
    )


class Closes(Protocol):
    """Protocol of a source of tensors that can be closed; tensors it returned stay valid."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """Weights that match a spec: from files, an engine, or random. Names are those of
    model/names.py: text tensors have no prefix."""

    directory: Path
    weights: Mapping[str, StoredWeight]  # stored tensors that the model uses
    #: dtype of the embedding table; of the final norm if the table is quantised
    dtype: torch.dtype
    headers: tuple[Header, ...] = ()
    #: stored but unused tensors -> why
    ignored: Mapping[str, str] = field(default_factory=dict)
    #: absent tensors -> the value used instead
    defaults: Mapping[str, float] = field(default_factory=dict)
    #: sources of the weights, closed by `close`
    opened: tuple[Closes, ...] = ()
    #: config.json if a weight that the model uses is quantised; None otherwise, and for GGUF files
    stated: Path | None = None

    @classmethod
    def open(
        cls, directory: Path | str, spec: Spec, media: Iterable[str] = (), dtype: str = "f32"
    ) -> Checkpoint:
        """Open a directory; WeightsError (SpecError for a wrong value in a config) unless config,
        index, headers, names, shapes and dtypes fit. The only tensor data read are quantisation
        parameters, activation ranges, norms that may be stored as 1 + w, and a draft model's token
        order. `media`: kinds whose towers are included; `dtype`: the engine's, for scales of
        formats that do not fix theirs.
        """
        directory = Path(directory)
        headers = (*read_headers(directory), *(_dense_headers(directory) if spec.embedding else ()))
        names = by_plain_name(directory, headers)
        prefix = find_prefix(directory, spec, names)
        files = Files(directory, names, partial(is_text, spec, prefix), dtype)
        tensors = read_coded(directory / CONFIG, files)
        match = TensorMatch(spec, directory, prefix, media_tensors(spec, media), tensors.names)
        live = match.live
        head = live.pop(HEAD, None) if spec.text.tie_word_embeddings else None
        if match.mismatches:
            raise WeightsError(report(directory, spec, match.mismatches))
        if ORDER in live:
            _check_order(files, live[ORDER])
        weights = {n: tensors.weights.get(at[1]) or files.weight(at) for n, at in live.items()}
        if fault := next((w.fault for w in weights.values() if w.fault), None):
            raise WeightsError(fault)
        if head:
            weights[TOKEN_TABLE] = _tied_table(files, live[TOKEN_TABLE], head)
        coded = not tensors.weights.keys().isdisjoint(entry for _, entry in live.values())
        checkpoint = cls(
            directory,
            weights,
            dtype_of({name: at for name, at in live.items() if at[1] not in tensors.weights}),
            headers,
            match.ignored | dict(tensors.ignored),
            match.defaults,
            (files,),
            directory / CONFIG if coded else None,
        )
        check_norms(spec, checkpoint, directory)
        return checkpoint

    @property
    def forms(self) -> Mapping[str, Scheme]:
        """Quantised weight -> scheme. A quantised weight X has the tensors `X.codes` and `X.scales`
        (layout: ops/codecs.py); X itself is read dequantised, in f32."""
        return {name: w.scheme for name, w in self._coded() if w.scheme}

    def _coded(self) -> list[tuple[str, StoredWeight]]:
        return [(name, w) for name, w in self.weights.items() if w.scheme]

    @property
    def files(self) -> tuple[tuple[Path, int], ...]:
        return tuple((header.path, header.size) for header in self.headers)

    def dequantised(self) -> Checkpoint:
        """Return the same weights, without codes and scales: quantised ones are read as f32."""
        plain = {n: replace(w, parts={"": w.parts[""]}, scheme=None) for n, w in self._coded()}
        return replace(self, weights={**self.weights, **plain}, stated=None)

    def with_drafter(self, drafter: Checkpoint) -> Checkpoint:
        """Return the weights of both: `draft.NAME` is the draft model's tensor NAME."""
        parts: dict[str, Any] = {}
        for part in ("weights", "ignored", "defaults"):
            scoped = {f"{DRAFTER_PREFIX}{name}": x for name, x in getattr(drafter, part).items()}
            parts[part] = {**getattr(self, part), **scoped}
        return replace(self, **parts, opened=(*self.opened, *drafter.opened))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, or its default if it is absent; do not write to it: it may be a view of
        the file. WeightsError for an unknown name."""
        if name in self.defaults:
            shape = () if name.endswith(CLIP_BOUNDS) else (1,)
            return torch.full(shape, self.defaults[name], dtype=self.dtype)
        weight, suffix = self._find(name)
        return weight.parts[suffix](None)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` (any shape, int32 or int64) of a 2-D tensor: [*ids.shape, columns].
        InputError for other ids or another rank; WeightsError for an unknown name."""
        weight, suffix = self._find(name)
        check_rows(name.removesuffix(suffix), weight.shape, ids)
        rows = weight.parts[suffix](ids.reshape(-1).cpu())
        return rows.view(*ids.shape, rows.shape[-1])

    def release(self, name: str) -> None:
        """Release a tensor's pages: the caller does not need it for now."""
        if weight := self.weights.get(_split(name)[0]):
            weight.release()

    def close(self) -> None:
        """Close all files; returned tensors stay valid."""
        for files in self.opened:
            files.close()

    def _find(self, name: str) -> tuple[StoredWeight, str]:
        stem, suffix = _split(name)
        weight = self.weights.get(stem)
        if weight is None or suffix not in weight.parts:
            raise WeightsError(f"{self.directory}: the model uses no tensor {quoted(name)}")
        return weight, suffix


def _split(name: str) -> tuple[str, str]:
    """Split the name of a weight, or of its codes or scales: (weight, suffix or "")."""
    suffix = next((s for s in (CODES, SCALES) if name.endswith(s)), "")
    return name.removesuffix(suffix), suffix


def dtype_of(plain: Mapping[str, TensorRef]) -> torch.dtype:
    """Return the dtype of the token table; of the final norm if the table is not in `plain`, the
    tensors that are not quantised."""
    name = TOKEN_TABLE if TOKEN_TABLE in plain else FINAL_NORM
    return tensorfile.torch_dtype(plain[name][1])


def _tied_table(files: Files, table: TensorRef, head: TensorRef) -> StoredWeight:
    """Return the token table; its first read compares evenly spaced samples with a stored head:
    WeightsError if they differ."""

    @cache
    def compare() -> None:
        (h1, e1), (h2, e2) = table, head
        one, two = files.map(h1), files.map(h2)
        for at in range(0, e1.nbytes, max(TIED_BYTES, e1.nbytes // TIED_CHUNKS)):
            size = min(TIED_BYTES, e1.nbytes - at)
            i, j = e1.start + at, e2.start + at
            if one[i : i + size] != two[j : j + size]:
                msg = "differs from the embedding it is tied to (tie_word_embeddings is true)"
                raise broken(h2.path, f"tensor {quoted(e2.name)} {msg}", f"fix: {FIXES['tie']}")
        tensorfile.drop_pages(two, e2)

    def read(rows: torch.Tensor | None) -> torch.Tensor:
        compare()
        return files.rows(table, rows)

    return replace(files.weight(table), parts={"": read})


def _check_order(files: Files, order: TensorRef) -> None:
    """Raise WeightsError unless `order`, a draft model's token ids by cluster, has every id
    once."""
    ids = files.rows(order).long().sort().values
    wrong = (ids != torch.arange(len(ids))).nonzero()
    if len(wrong):
        at = int(wrong[0])
        actual = f"the sorted ids have {int(ids[at])} at index {at}"
        msg = f"expected token ids 0 to {len(ids) - 1} once each, but {actual}"
        raise invalid(order, msg, f"fix: {FIXES['drafter']}")


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file in hex, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open_regular(file) as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def check_rows(name: str, shape: tuple[int, ...], ids: torch.Tensor) -> None:
    """Raise InputError unless `ids` are int32 or int64 and index the rows of a 2-D `shape`."""
    if len(shape) != 2:
        raise InputError(f"rows of {name}: expected a 2-D tensor, found shape {list(shape)}")
    if ids.is_floating_point() or ids.dtype.itemsize < 4:
        raise InputError(f"rows of {name}: ids must be int32 or int64, found {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < shape[0]:
        low, high = int(ids.min()), int(ids.max())
        raise InputError(f"rows of {name}: ids {low} to {high} are not all in 0..{shape[0] - 1}")


def read_headers(directory: Path) -> tuple[Header, ...]:
    """Return the headers of a checkpoint directory's weight files; WeightsError if there are none,
    or if headers and index disagree."""
    try:
        return _read_headers(directory)
    except OSError as error:
        raise WeightsError(f"{directory}: cannot be read ({error}); fix: check the path") from None


def _read_headers(directory: Path) -> tuple[Header, ...]:
    if not directory.is_dir():
        raise WeightsError(f"{directory}: no such checkpoint directory; fix: check the path")
    if not (directory / CONFIG).is_file():
        fix = f"fix: copy {CONFIG} from where the checkpoint came from"
        raise broken(directory, f"expected {CONFIG}, found none", fix)
    single, index = directory / SINGLE, directory / INDEX
    if not index.exists():
        if not single.exists():
            raise WeightsError(_no_weights(directory))
        return (tensorfile.read_header(_inside(directory, SINGLE, directory)),)
    shards = _read_index(directory, index)
    if single.exists() and SINGLE not in shards:
        msg = f"has both {SINGLE} and {INDEX}, which does not name it"
        raise broken(directory, msg, "fix: remove the one that does not belong to the checkpoint")
    paths = {file: _inside(directory, file, index) for file in sorted(shards)}
    return tuple(_read_shard(path, shards[file]) for file, path in paths.items())


def _dense_headers(directory: Path) -> Iterator[Header]:
    """Yield the headers of an encoder's dense layers, each a file in a separate folder, with the
    tensors' names changed to `dense.I.NAME`."""
    for i, layer in enumerate(read_modules(directory) or ()):
        where = directory / MODULES
        header = tensorfile.read_header(_inside(directory, f"{layer.folder}/{SINGLE}", where))
        named = {
            f"{DENSE}{i}.{n}": replace(e, name=f"{DENSE}{i}.{n}") for n, e in header.entries.items()
        }
        yield replace(header, entries=named)


def _no_weights(directory: Path) -> str:
    names = sorted(p.name for p in directory.iterdir() if p.is_file() and p.name != CONFIG)
    actual = ", ".join(map(quoted, names[:MAX_LISTED])) or "no weights"
    fix = "complete the download"
    if any(name.endswith(PICKLES) for name in names):
        actual += "; pickle files can run code and are never opened"
        fix = SAVE
    return f"{directory}: expected {SINGLE} or {INDEX}, found {actual}; fix: {fix}"


def _read_index(directory: Path, index: Path) -> dict[str, set[str]]:
    weight_map = read_json(_inside(directory, INDEX, index), INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        msg = "weight_map must map tensor names to files"
        raise broken(index, msg, "fix: download the index again")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            msg = f"weight_map {quoted(name)}: expected a file name, found {quoted(file)}"
            raise broken(index, msg, "fix: download the index again")
        if not file.endswith(".safetensors"):
            msg = f"weight_map names {quoted(file)}, expected only .safetensors files"
            raise broken(index, msg, f"fix: {SAVE}")
        shards.setdefault(file, set()).add(name)
    return shards


def _read_shard(path: Path, want: set[str]) -> Header:
    header = tensorfile.read_header(path)
    extra, missing = sorted(header.entries.keys() - want), sorted(want - header.entries.keys())
    if extra or missing:
        bad, state = (
            (extra, "not listed for it in") if extra else (missing, "absent, but listed in")
        )
        counts = f"({len(extra)} extra, {len(missing)} missing)"
        text = f"tensor {quoted(bad[0])} is {state} {INDEX} {counts}"
        raise broken(header.path, text, "fix: download shards and index again")
    return header


def _inside(directory: Path, name: str, source: Path) -> Path:
    """Return the path of the file `name` in `directory`. WeightsError, whose message begins with
    `source`, if it is absent, if its name is no plain path, or if its name or link leads elsewhere:
    its content could be copied into an engine. In the hub's cache, which stores files in `blobs`,
    links to there are allowed."""
    path, home, parts = directory / name, directory.resolve(), {*re.split(r"[/\\]", name)}
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    inside = name.isprintable() and not parts & {"", ".", ".."} and not Path(name).is_absolute()
    if inside and (len(name) > 1000 or not path.exists()):
        msg = f"{quoted(name)} is not in {directory}, or is a link to a file that is absent"
        raise broken(source, msg, "fix: complete the download")
    if not inside or not any(path.resolve().is_relative_to(h) for h in homes):
        msg = f"{quoted(name)} is no plain path, or leads outside the checkpoint directory"
        raise broken(source, msg, "fix: put the files themselves into the directory")
    return path


SIDE_FILES = {name: mib << 20 for name, mib in tensorfile.TABLES["side_files"].items()}


def read_side_files(directory: Path) -> dict[str, bytes]:
    """Return name -> content of the side files (SIDE_FILES) that exist; WeightsError for one that
    is too large or invalid, or leads outside the directory."""
    paths = {name: directory / name for name in (CONFIG, *SIDE_FILES)}
    present = {n: _inside(directory, n, p) for n, p in paths.items() if os.path.lexists(p)}
    return {n: _side_file(path, SIDE_FILES[n]) for n, path in present.items() if n != CONFIG}


def _side_file(path: Path, limit: int) -> bytes:
    raw = read_limited(path, limit)
    if path.suffix == ".json":
        parse_json(path, raw)
    try:
        raw.decode()
    except UnicodeDecodeError as e:
        raise broken(path, f"not UTF-8 at byte {e.start}") from None
    return raw


#: file with the audio feature extractor's settings -> their key in it; None: the whole file
EXTRACTORS = {"processor_config.json": "feature_extractor", "preprocessor_config.json": None}


def read_extractor(folder: Path | None) -> Mapping[str, Any] | None:
    """Return the audio feature extractor's settings from a checkpoint's or engine's folder; None
    without a file that has them."""
    for name, key in EXTRACTORS.items() if folder else ():
        file = Path(folder or "", name)
        values = parse_json(file, file.read_bytes()) if file.is_file() else {}
        config = values.get(key) if key else values
        if config and isinstance(config, dict):
            return config
    return None
