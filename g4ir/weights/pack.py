"""Packs checkpoint tensors into params by running the weight prologue; and unpacks them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from g4ir.errors import EngineError, VerifyError
from g4ir.ir.graph import Graph, Node, Program, Value
from g4ir.ir.interpret import interpret, run_node
from g4ir.ir.rewrite import drop_dead, split_prologue
from g4ir.model.names import CODES, SCALES, checkpoint_name
from g4ir.ops.codecs import by_rows, from_tiles
from g4ir.ops.finite import cast
from g4ir.ops.quant import quantize
from g4ir.ops.types import TORCH_NAMES, dtype_name, is_float, torch, torch_dtype
from g4ir.parallel.table import Share

from . import tensorfile
from .checkpoint import Checkpoint
from .formats.base import Files

#: bytes; larger tables are read by rows: with placement `mmap`, and at build if no op but
#: `quantize` packs them
TABLE_BYTES = 256 << 20
#: bytes per piece of a larger param, packed piece by piece while it is written
PIECE_BYTES = 32 << 20
#: maximum number of recipes (`Packing.recipe`) of which some results are not fetched yet
MAX_PENDING = 8
_OF_RANK = re.compile(r"\w+[-.]rank(\d+)of\d+[-.]")


@dataclass(frozen=True)
class Packing:
    """The inference graphs, and the prologue that computes their params."""

    program: Program
    prologue: Graph
    _recipes: dict[str, Graph] = field(default_factory=dict, compare=False, repr=False)

    def recipe(self, param: str) -> Graph:
        """Return the part of the prologue that computes one param, and other outputs of the same
        inputs (codes and scales); without nodes if the param is a checkpoint tensor."""
        if param not in self._recipes:
            self._recipes[param] = self._recipe(self.program.params()[param])
        return self._recipes[param]

    def _recipe(self, v: Value) -> Graph:
        nodes, readers = self.prologue.nodes, self._readers
        if v.name not in self.prologue.producers:
            return Graph("prologue", (), (v,), (), (), (v,))
        names, pending = set[str](), [v.name]
        while pending:  # values that the param depends on
            names.add(name := pending.pop())
            if n := self.prologue.producers.get(name):
                pending += [x.name for x in n.inputs if x.name not in names]
        chosen, pending = set[int](), [*names]
        while pending:  # nodes computed from these values alone (codes and scales of one weight)
            for i in readers.get(pending.pop(), ()):
                if i not in chosen and all(x.name in names for x in nodes[i].inputs):
                    chosen.add(i)
                    results = {x.name for x in nodes[i].outputs}
                    names |= results
                    pending += results
        outputs = tuple(x for x in self.prologue.outputs if x.name in names)
        part = tuple(nodes[i] for i in sorted(chosen))
        return drop_dead(replace(self.prologue, nodes=part, outputs=outputs))

    @cached_property
    def _readers(self) -> dict[str, list[int]]:
        """Name of a value -> indices of the nodes of the prologue that read it."""
        readers: dict[str, list[int]] = {}
        for i, n in enumerate(self.prologue.nodes):
            for v in n.inputs:
                readers.setdefault(v.name, []).append(i)
        return readers


def split_program(program: Program) -> Packing:
    """Move the nodes that depend on params alone out of every graph of the program into one
    prologue (`split_prologue`). VerifyError if two graphs compute a param differently."""
    parts = {name: split_prologue(g) for name, g in program.graphs.items()}
    mains = Program({name: main for name, (_, main) in parts.items()})
    params: dict[str, Value] = {}
    nodes: dict[str, Node] = {}
    for prologue, _ in parts.values():
        params.update({v.name: v for v in prologue.params})
        for n in prologue.nodes:
            if nodes.setdefault(n.outputs[0].name, n) != n:
                raise VerifyError(f"{n.outputs[0]} is packed differently in two graphs")
    packed_names = {v.name for n in nodes.values() for v in n.outputs}
    packed = tuple(v for v in mains.params().values() if v.name in packed_names)
    prologue = Graph("prologue", (), tuple(params.values()), (), tuple(nodes.values()), packed)
    return Packing(mains, prologue)


class ParamSource(Protocol):
    """The source from which a runtime takes the params of the main graphs."""

    def tensor(self, param: str) -> torch.Tensor:
        """Return the full param, in its dtype; do not write to it: it may be memory-mapped."""

    def rows(self, param: str, ids: torch.Tensor) -> torch.Tensor: ...

    def release(self, param: str) -> None:
        """Hint that the pages of a param's tensor are not needed any more."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class MadeParams:
    """Params computed on demand from a checkpoint or a seed."""

    packing: Packing
    source: Checkpoint
    #: sharding, and the rank whose params these are; None: not sharded
    share: Share | None = None
    #: codes and scales of calibrated weights, by the name of the unsharded model's param
    calibrated: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    #: implementation of `quantize`, bit-identical to the definition
    quantized: Callable[..., tuple[Any, ...]] = quantize.reference
    #: results, not fetched yet, of recipes with several (codes and scales), by the name of the
    #: recipe's first result
    _pending: dict[str, dict[str, torch.Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )
    #: a lock for each such recipe, under the same name
    _locks: dict[str, threading.Lock] = field(default_factory=dict, compare=False, repr=False)

    def tensor(self, param: str) -> torch.Tensor:
        recipe = self.packing.recipe(param)
        if len(recipe.outputs) < 2:
            return self._results(recipe, self.source.tensor)[param]
        key = recipe.outputs[0].name
        with self._locks.setdefault(key, threading.Lock()):
            results = self._pending.pop(key, {})
            if param not in results:
                results = self._results(recipe, self.source.tensor)
            result = results.pop(param)
            if results:
                self._pending[key] = results
            for old in [*self._pending][:-MAX_PENDING]:
                self._pending.pop(old, None)
        return result

    def makes(self, param: str) -> list[Callable[[], tensorfile.TensorPieces]]:
        """Return functions that compute a param: usually one. A large table that no op but
        `quantize` packs is never fully in memory: several functions compute consecutive rows, or
        one yields them."""
        tables = {v.name: v for v in self.packing.program.graphs["embed"].params}
        v, ops = tables.get(param), {n.op for n in self.packing.recipe(param).nodes}
        if not v or v.type.nbytes() <= TABLE_BYTES or not ops <= {"quantize"}:
            return [partial(self.tensor, param)]
        rows = int(v.type.shape[0])
        parts = torch.arange(rows).split(rows * PIECE_BYTES // v.type.nbytes() + 1)
        if ops:
            return [partial(self._in_pieces, v, parts)]
        return [partial(self._rows_of, param, ids) for ids in parts]

    def _rows_of(self, param: str, ids: torch.Tensor) -> torch.Tensor:
        recipe = self.packing.recipe(param)
        return self._results(recipe, partial(self.source.rows, ids=ids))[param]

    def _in_pieces(self, v: Value, parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the rows `parts` of a param's codes; other results of its recipe (scales) are kept
        until they are fetched."""
        recipe = self.packing.recipe(v.name)
        extras: dict[str, list[torch.Tensor]] = {}
        for ids in parts:
            results = self._results(recipe, partial(self.source.rows, ids=ids))
            self.release(v.name)
            yield results.pop(v.name)
            for name, t in results.items():
                extras.setdefault(name, []).append(t)
        scales = {name: torch.cat(parts) for name, parts in extras.items()}
        self._pending[recipe.outputs[0].name] = scales

    def _results(
        self, recipe: Graph, read: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        inputs = {v.name: self._load_input(v, read) for v in recipe.params}
        results: dict[str, torch.Tensor] = interpret(recipe, {}, inputs, {}, run=self._run)[0]
        self._require_finite(recipe, results)
        return results

    def _run(self, n: Node, tensors: list[Any]) -> tuple[Any, ...]:
        """Run a node of a recipe; calibrated weights are quantised already."""
        if n.op != "quantize":
            return run_node(n, tensors)
        name = n.inputs[0].name
        full = self._full_name(name)
        if full is None or full not in self.calibrated:
            return self.quantized(*tensors, **dict[str, Any](n.attrs))
        return tuple(self._part(name, t) for t in self.calibrated[full])

    def _part(self, param: str, t: torch.Tensor) -> torch.Tensor:
        """Return a rank's part of `t`, the full codes or scales of a param."""
        return self.share.read_part(param, lambda _: t) if self.share else t

    def _full_name(self, param: str) -> str | None:
        """Return the unsharded model's name of a rank's param; None if that model has no such
        param."""
        return self.share.source(param) if self.share else param

    def _require_finite(self, recipe: Graph, results: Mapping[str, torch.Tensor]) -> None:
        for name, t in results.items():
            if name.endswith(SCALES) and not bool(t.isfinite().all()):
                names = ", ".join(checkpoint_name(v.name) for v in recipe.params)
                fix = "fix: download the checkpoint again, or build without --quant"
                msg = "NaN or infinite values, which cannot be quantised"
                raise tensorfile.broken(names, msg, fix)

    def rows(self, param: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of a table, or of its codes or scales; each depends on its own row only."""
        recipe = self.packing.recipe(param)
        read = partial(self.source.rows, ids=ids.reshape(-1))
        inputs = {v.name: self._load_input(v, read) for v in recipe.params}
        table_rows: torch.Tensor = interpret(recipe, {}, inputs, {})[0][param]
        return table_rows.view(*ids.shape, -1)

    def load_input(self, v: Value) -> torch.Tensor:
        return self._load_input(v, self.source.tensor)

    def _load_input(self, v: Value, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        def read_full(param: str) -> torch.Tensor:
            return read(checkpoint_name(param))

        tensor = self.share.read_part(v.name, read_full) if self.share else read_full(v.name)
        name = self._source(v) or v.name
        if not is_float(tensor) and dtype_name(tensor.dtype) != v.type.dtype:
            msg = f"codes are {tensor.dtype}, the engine expects {v.type.dtype}"
            raise tensorfile.broken(name, msg, "build the engine again")
        return cast(tensor, v.type.dtype, name)

    def _source(self, v: Value) -> str | None:
        """Return the name of a prologue param's checkpoint tensor; None if there is none."""
        param = self._full_name(v.name)
        return param and checkpoint_name(param)

    def release(self, param: str) -> None:
        for v in self.packing.recipe(param).params:
            if name := self._source(v):
                self.source.release(name)

    def close(self) -> None:
        self.source.close()


@dataclass(frozen=True)
class StoredParams:
    """Params packed into safetensors files of an engine directory."""

    headers: tuple[tensorfile.Header, ...]

    @cached_property
    def files(self) -> Files:
        names = {name: (h, e) for h in self.headers for name, e in h.entries.items()}
        return Files(self.headers[0].path.parent, names)

    @classmethod
    def open(cls, files: list[Path]) -> StoredParams:
        return cls(tuple(map(tensorfile.read_header, files)))

    def apart(self) -> StoredParams:
        """Return the same params with separate mappings of the files."""
        return StoredParams(self.headers)

    def check(self, program: Program) -> None:
        stored, params = self.files.names, program.params()
        for header in self.headers:
            for name in header.entries:
                if name not in params or stored[name][0] is not header:
                    raise _wrong(header.path, name, "is no param of the graphs, or in two files")
        for name, v in params.items():
            if name not in stored:
                raise _wrong(self.files.directory, name, "is missing")
            header, entry = stored[name]
            if (entry.dtype, entry.shape) != _stored_as(v):
                actual = f"{entry.dtype} {list(entry.shape)}"
                raise _wrong(header.path, name, f"expected {v.type}, found {actual}")

    def tensor(self, param: str) -> torch.Tensor:
        return self.files.rows(self.files.names[param])

    def rows(self, param: str, ids: torch.Tensor) -> torch.Tensor:
        rows = self.files.rows(self.files.names[param], ids.reshape(-1).cpu())
        return rows.view(*ids.shape, rows.shape[1])

    def release(self, param: str) -> None:
        self.files.release([self.files.names[param]])

    def close(self) -> None:
        self.files.close()


class RowTable:
    """A table of which only the requested rows are read; indexed like a tensor, by row."""

    def __init__(self, source: ParamSource, v: Value) -> None:
        self.source, self.name = source, v.name
        self.dtype = torch_dtype(v.type.dtype)

    def __getitem__(self, ids: Any) -> torch.Tensor:
        return self.source.rows(self.name, ids)

    def mapped(self) -> torch.Tensor | None:
        """Return the memory-mapped table; None if its rows must be computed."""
        return self.source.tensor(self.name) if isinstance(self.source, StoredParams) else None


#: placements of a gather-only table: the engine's device, host memory, or memory-mapped file
PLACEMENTS = ("device", "host", "mmap")
DEFAULT_PLACEMENT = "mmap"


def open_table(source: ParamSource, v: Value, placement: str, device: str) -> Any:
    """Open a table param for the embed graph, at one of PLACEMENTS. If the params are in files,
    `host` and `mmap` allocate nothing on the device: rows are gathered on the host, and only they
    are copied to the device."""
    if placement == "mmap":
        return source.tensor(v.name) if v.type.nbytes() <= TABLE_BYTES else RowTable(source, v)
    table = source.tensor(v.name).to(device if placement == "device" else "cpu", copy=True)
    source.release(v.name)
    return table


def local_params(packing: Packing, share: Share) -> set[str]:
    """Return the names of the params that differ between ranks."""
    recipes = ((name, packing.recipe(name)) for name in packing.program.params())
    return {name for name, recipe in recipes if any(share.cuts(v.name) for v in recipe.params)}


def rank_files(files: Iterable[Path], rank: int) -> list[Path]:
    """Return the engine files that a rank reads: its own, and those that all ranks share."""
    named = [(f, _OF_RANK.match(f.name)) for f in files]
    return sorted(f for f, match in named if match is None or int(match[1]) == rank)


def stored_params(folder: Path, rank: int) -> StoredParams:
    """Return the packed params of a rank of the engine in a folder."""
    return StoredParams.open(rank_files(folder.glob("*.safetensors"), rank))


def params_of_rank(params: ParamSource, folder: Path, rank: int) -> ParamSource:
    """Return the source of another rank's params, given that of one rank."""
    if isinstance(params, MadeParams):
        share = params.share and replace(params.share, rank=rank)
        return replace(params, share=share, _pending={})
    return stored_params(folder, rank)


def write_shares(
    packing: Packing, params: MadeParams, ranks: int, folder: Path, progress: Any
) -> dict[Path, str]:
    """Write replicated params once, and sharded params to separate files for each rank; return the
    SHA-256 of each file."""
    assert params.share
    local = local_params(packing, params.share)
    alike = packing.program.params().keys() - local
    files = write_params(packing, params, folder, progress, alike)
    for rank in range(ranks if local else 0):
        of_rank = replace(params, share=replace(params.share, rank=rank), _pending={})
        stem = f"weights-rank{rank}of{ranks}"
        files |= write_params(packing, of_rank, folder, progress, local, stem)
    return files


def write_params(
    packing: Packing,
    source: MadeParams,
    folder: Path,
    progress: Any,
    names: Collection[str] | None = None,
    stem: str = "weights",
) -> dict[Path, str]:
    """Write all params, or those in `names`, to safetensors shards; return the SHA-256 of each."""
    params = [v for n, v in packing.program.params().items() if names is None or n in names]
    done, total = 0, max(1, sum(v.type.nbytes() for v in params))

    def written(v: Value) -> None:
        nonlocal done
        source.release(v.name)
        tenths = (10 * done // total, 10 * (done := done + v.type.nbytes()) // total)
        if tenths[0] < tenths[1]:
            progress(f"weights {10 * tenths[1]} %")

    tensors = {
        v.name: tensorfile.FileTensor(*_stored_as(v), source.makes(v.name), partial(written, v))
        for v in params
    }
    shards = enumerate(tensorfile.in_shards(tensors))
    files = {folder / f"{stem}-{i:05d}.safetensors": shard for i, shard in shards}
    return {path: tensorfile.write_tensors(path, shard) for path, shard in files.items()}


def _stored_as(v: Value) -> tuple[str, tuple[int, ...]]:
    return tensorfile.CODES[TORCH_NAMES[v.type.dtype]], tuple(int(d) for d in v.type.shape)


def _wrong(path: Path, name: str, msg: str) -> EngineError:
    return EngineError(f"{path}: tensor {tensorfile.quoted(name)} {msg}; build the engine again")


@dataclass(frozen=True)
class UnpackedWeights:
    """A model's original weights, recovered from an engine's params: slices of packed ones, as
    codes and scales or dequantised."""

    source: ParamSource
    params: Mapping[str, Value]
    prologue: Graph
    path: Path

    def holds(self, v: Value) -> bool:
        after = (n for n in self.prologue.find(*UNDONE) if v in n.inputs)
        return v.name in self.params or any(self.holds(n.out) for n in after)

    def __call__(self, v: Value) -> torch.Tensor:
        """Return a param's original tensor; EngineError if it cannot be recovered from the stored
        params."""
        self.check(v)
        if isinstance(self.source, MadeParams):
            return self.source.load_input(v)
        if v.name in self.params:
            return self.source.tensor(v.name)
        after = (n for n in self.prologue.find(*UNDONE) if v in n.inputs and self.holds(n.out))
        n = next(after)
        return UNDONE[n.op](n, v, self(n.out))

    def check(self, v: Value) -> None:
        """Raise EngineError if a param's original values cannot be recovered from the stored
        ones."""
        if not isinstance(self.source, MadeParams) and not self.holds(v):
            msg = f"no longer holds %{v.name}, only params computed from it"
            raise EngineError(f"{self.path} {msg}: give --checkpoint DIR")

    def weight(self, v: Value) -> torch.Tensor:
        """Return a weight as the engine computes with it: dequantised if it is quantised."""
        parts = self._parts(v.name)
        if not parts:
            return self(v)
        codes = self._codes_of(parts)
        if codes is None:
            return self._dense(v, parts[0])
        dequantize = Node("dequantize", parts, (v,), {"to": v.type.dtype})
        (dense,) = run_node(dequantize, list(codes))
        return dense

    def _codes_of(self, parts: tuple[Value, ...]) -> tuple[torch.Tensor, ...] | None:
        """Return codes and scales; None if the engine stores values derived from them."""
        quantize = self.prologue.producers.get(parts[0].name)
        if isinstance(self.source, MadeParams):
            if quantize:
                return run_node(quantize, [self.source.load_input(quantize["w"])])
            return tuple(map(self.source.load_input, parts))
        if all(map(self.holds, parts)):
            return tuple(map(self, parts))
        for n in self.prologue.find("as_bytes"):
            if (cut := self._cut(n, parts[0])) and all(map(self.holds, n.outputs)):
                return tuple(cut(self(packed)) for packed in n.outputs)
        return None

    def part(self, v: Value) -> torch.Tensor:
        """Return the codes or the scales of a weight, `X.codes` or `X.scales`; EngineError if the
        engine stores values derived from them."""
        codes = self._codes_of(self._parts(v.name.removesuffix(CODES).removesuffix(SCALES)))
        if codes is None:
            raise EngineError(f"{self.path} no longer holds %{v.name}: give --checkpoint DIR")
        return codes[v.name.endswith(SCALES)]

    def _parts(self, weight: str) -> tuple[Value, ...]:
        """Return the values `X.codes` and `X.scales` of a weight X; () if it is not quantised."""
        packed = (x for n in self.prologue.nodes for x in n.outputs)
        values = dict(self.params) | {x.name: x for x in (*self.prologue.params, *packed)}
        return tuple(values[n] for end in (CODES, SCALES) if (n := f"{weight}{end}") in values)

    def _dense(self, v: Value, codes: Value) -> torch.Tensor:
        for n in self.prologue.find("dense"):
            if cut := self._cut(n, codes):
                return cut(self(n.out))
        raise EngineError(f"{self.path} no longer holds %{v.name}: give --checkpoint DIR")

    def _cut(self, n: Node, codes: Value) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function that slices a weight out of the one that `n` reads; None if `n` does
        not read it, alone or concatenated with others."""
        joined = self.prologue.producers.get(n["codes"].name)
        if n["codes"] == codes:
            return lambda t: t
        if joined and joined.op == "concat" and codes in joined.inputs:
            return partial(_slice, joined, codes)
        return None


def _slice(join: Node, v: Value, joined: torch.Tensor) -> torch.Tensor:
    axis = join.integer("axis")
    sizes = [int(x.type.shape[axis]) for x in join.inputs]
    return joined.split(sizes, axis)[join.inputs.index(v)]


#: op of the prologue -> function of its node, one of its inputs and its output's tensor, which
#: returns the input's tensor
UNDONE: dict[str, Callable[[Node, Value, torch.Tensor], torch.Tensor]] = {
    "concat": _slice,
    "columns": lambda n, v, packed: by_rows(packed),
    "tiles": lambda n, v, packed: from_tiles(packed),
    "scale": lambda n, v, packed: packed / n.number("value"),
    # Recovers the digits of w (bf16) that affect 1 + w.
    "one_plus": lambda n, v, packed: cast(packed - 1, v.type.dtype, v.name),
}
