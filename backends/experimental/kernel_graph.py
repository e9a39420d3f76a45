"""Kernel graphs with programmatic dependent launch (PDL): recorded at build, run by the driver.

A segment of a decode step that consists of our kernels alone becomes a list of launches (a chain):
which kernel, its grid, and for each operand a number or an address within a tensor. Its file is a
safetensors file: the assembled kernels are the tensors, the list is the metadata, so loading
compiles nothing. The kernels may begin before the ones in front have ended (kernels/launch.py).

A chain is for one batch size and one number of cache slots. Segments with any other work remain
compiled regions; between a region and a chain nothing overlaps.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from g4ir.backends.cuda.kernels.launch import Launch, ahead, recorded
from g4ir.backends.cuda.kernels.resources import Assembled, assemble, signature
from g4ir.backends.cuda.schedule import schedule
from g4ir.backends.cuda.token_loop import end_by_torch
from g4ir.backends.inductor.compile import first_node
from g4ir.backends.inductor.lower import SegmentModule
from g4ir.backends.inductor.runtime import BY_PROGRAMS, BoundStep
from g4ir.backends.inductor.segment import Glue, Segment, Step
from g4ir.backends.inductor.target import Target
from g4ir.errors import EngineError, G4Error, LowerError
from g4ir.ir.rewrite import bind
from g4ir.ir.text import parse_graph
from g4ir.ops.base import nothing
from g4ir.ops.types import Type, parse_type, torch_dtype
from g4ir.plan.engine_limits import Limits
from g4ir.plan.formats import capacity, context_slots
from g4ir.spec.reader import Length, Range, Shaped, Where, build, tree_of
from g4ir.weights.tensorfile import (
    FileTensor,
    map_file,
    parse_json,
    read_header,
    view,
    write_tensors,
)

from .cuda_driver import CudaDriver
from .end_of_step import end_step

log = logging.getLogger(__name__)

#: where a tensor begins, in bytes: kernels read so much at a time
ALIGNED = 16
#: the metadata of a file
LIST, SEGMENT = "chain", "segment"
#: dtypes of the operands of `end_step`, of one element a row
END_TAKES = ("f32", "i64", "i64", "i64", "i64", "f32")
#: an operand in the file: bytes behind the begin of a tensor, or a number
OPERAND = re.compile(r"t(\d+)\+(\d+)|(i32|i64|fp32) (\S+)")
NUMBERS: Mapping[str, tuple[type, Callable[[str], Any]]] = {
    "i32": (ctypes.c_int32, int),
    "i64": (ctypes.c_int64, int),
    "fp32": (ctypes.c_float, float),
}
Operand = Annotated[str, Shaped(OPERAND.pattern, "t0+0 or i32 5")]
Size = Annotated[int, Range(0)]


@dataclass(frozen=True)
class Function:
    """A kernel as it was assembled: its name in its file, and bytes of shared memory."""

    name: str
    warps: Annotated[int, Range(1, 32)]
    shared: Size


@dataclass(frozen=True)
class Start:
    """A start of a kernel, by its place in the list of functions; whether it waits by itself for
    the kernels in front."""

    function: Size
    waits: bool
    grid: Annotated[tuple[int, ...], Length(3, 3)]
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Result:
    """A tensor that a chain returns."""

    at: Operand
    type: str


@dataclass(frozen=True)
class Chain:
    """The types of what it is given, in the segment's order; the bytes of the tensors that it
    makes, whose numbers follow; what it returns; and what it starts."""

    given: tuple[str, ...]
    made: tuple[Size, ...]
    results: tuple[Result, ...]
    functions: tuple[Function, ...]
    starts: tuple[Start, ...]


# --- made at build ----------------------------------------------------------------------------


class _Work(TorchDispatchMode):
    """Notes whether torch is asked for work of its own: more than room, or a view."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = func.namespace == "g4ir"
        self.found |= not (ours or func.is_view or "empty" in func.name())
        tensors = (x for x in args if isinstance(x, torch.Tensor))
        self.found |= ours and not all(t.is_contiguous() for t in tensors)
        return func(*args, **(kwargs or {}))


def recorded_chain(
    text: str,
    target: Target,
    dims: Mapping[str, int],
    how: Callable[[Launch], Assembled] = assemble,
) -> tuple[Chain, list[bytes]] | None:
    """Return a segment as a chain with its assembled kernels; None where it has other work."""
    g = bind(parse_graph(text), **dims)
    types = [v.type for v in g.sources()]
    given, work = _stand_ins(types), _Work()
    with ahead(), recorded() as launches, work:
        results = SegmentModule(schedule(g, target))(*given)
    if work.found or not launches:
        return None
    returned = [(t, v.type) for t, v in zip(results, g.outputs, strict=True)]
    return _listed(launches, given, types, returned, how)


def recorded_end(
    batch: int, how: Callable[[Launch], Assembled] = assemble
) -> tuple[Chain, list[bytes]]:
    """Return the end of a step (end_of_step.py) as a chain with its assembled kernel."""
    types = _end_types(batch)
    given = _stand_ins(types)
    with ahead(), recorded() as launches:
        end_step(given)
    return _listed(launches, given, types, [], how)


def end_text(batch: int) -> str:
    """Return what the file of `recorded_end` is checked against."""
    return f"the end of a step\nof {', '.join(map(str, _end_types(batch)))}\n\n"


def _end_types(batch: int) -> list[Type]:
    return [Type(dtype, (batch,)) for dtype in END_TAKES]


def _stand_ins(types: Iterable[Type]) -> list[torch.Tensor]:
    return [
        torch.empty([int(d) for d in t.shape], dtype=torch_dtype(t.dtype), device="meta")
        for t in types
    ]


def _listed(
    launches: Sequence[Launch],
    given: Sequence[torch.Tensor],
    types: Sequence[Type],
    returned: Sequence[tuple[torch.Tensor, Type]],
    how: Callable[[Launch], Assembled],
) -> tuple[Chain, list[bytes]]:
    places = _Places(given)
    functions, files, starts = dict[str, int](), list[Assembled](), list[Start]()
    for launch in launches:
        kernel, grid, _, meta = launch
        kinds = signature(launch)
        key = f"{kernel.__module__}.{kernel.__name__} {kinds} {sorted(meta.items(), key=str)}"
        if key not in functions:
            functions[key] = len(files)
            files.append(how(launch))
        operands = tuple(places.operand(value, kinds.of[i]) for i, value in kinds.operands)
        size = (*(int(n) for n in grid), 1, 1)[:3]
        starts.append(Start(functions[key], meta.get("AHEAD", False), size, operands))
    results = tuple(Result(places.operand(t, ""), str(kind)) for t, kind in returned)
    chain = Chain(
        tuple(map(str, types)),
        tuple(places.made),
        results,
        tuple(Function(f.name, f.warps, f.shared) for f in files),
        tuple(starts),
    )
    return chain, [f.cubin for f in files]


class _Places:
    """Where tensors lie: those that are given, and, as they are met, those that are made."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.known = {_memory(t): i for i, t in enumerate(given)}
        self.first, self.made = len(given), list[int]()

    def operand(self, value: Any, kind: str) -> str:
        if not isinstance(value, torch.Tensor):
            return f"{kind} {value!r}"
        memory = _memory(value)
        if memory not in self.known:
            self.known[memory] = self.first + len(self.made)
            self.made.append(value.untyped_storage().nbytes())
        return f"t{self.known[memory]}+{value.storage_offset() * value.element_size()}"


def _memory(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


# --- its file ---------------------------------------------------------------------------------


def write_chain(path: Path, text: str, chain: Chain, cubins: Sequence[bytes]) -> None:
    """Write a segment's chain, which says what it was made of."""
    held = (torch.frombuffer(bytearray(c), dtype=torch.uint8) for c in cubins)
    files = {str(i): FileTensor.of(t) for i, t in enumerate(held)}
    write_tensors(path, files, {LIST: json.dumps(asdict(chain)), SEGMENT: _digest(text)})


def read_chain(path: Path, text: str) -> tuple[Chain, list[bytes]]:
    """Return a segment's chain and its assembled kernels.

    EngineError for a file that is damaged, was made for another segment, or whose list reaches
    beyond what it has.
    """
    try:
        header = read_header(path)
        if header.metadata.get(SEGMENT) != _digest(text):
            raise EngineError(f"was made for another segment than {first_node(text)}")
        values = parse_json(path, header.metadata.get(LIST, "").encode())
        chain: Chain = build(Chain, tree_of(values, Where(str(path), 0), exact=True))
        _check(chain)
        names = [str(i) for i in range(len(chain.functions))]
        if sorted(header.entries) != sorted(names):
            raise EngineError(f"expected {len(names)} kernels, found {len(header.entries)}")
        mapped = map_file(header)
        return chain, [view(mapped, header.entries[n]).numpy().tobytes() for n in names]
    except G4Error as e:
        raise EngineError(f"{path}: {e}; build the engine again") from e


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check(chain: Chain) -> None:
    sizes = [*(parse_type(t).nbytes() for t in chain.given), *chain.made]
    if any(s.function >= len(chain.functions) for s in chain.starts):
        raise EngineError("a kernel is started that the file does not have")
    reach = [(o, 1) for s in chain.starts for o in s.operands]
    reach += [(r.at, parse_type(r.type).nbytes()) for r in chain.results]
    for operand, least in reach:
        tensor, offset, *_ = _parts(operand)
        if tensor and (int(tensor) >= len(sizes) or int(offset) + least > sizes[int(tensor)]):
            raise EngineError(f"operand {operand} lies outside of the tensors")


def _parts(operand: str) -> tuple[str, ...]:
    found = OPERAND.fullmatch(operand)
    assert found
    return found.groups()


# --- run --------------------------------------------------------------------------------------


class LoadedChain:
    """A chain whose kernels the driver has."""

    def __init__(
        self, chain: Chain, cubins: Sequence[bytes], driver: CudaDriver, device: str
    ) -> None:
        self.chain, self.driver, self.device = chain, driver, device
        self.types = [parse_type(t) for t in chain.given]
        self.functions = [
            driver.load(c, f.name, f.shared) for c, f in zip(cubins, chain.functions, strict=True)
        ]
        self.starts = [(s, [_reader(o) for o in s.operands]) for s in chain.starts]

    def fits(self, operands: Sequence[torch.Tensor]) -> bool:
        """Whether the chain was recorded for operands of these sizes."""
        return all(
            t.shape == v.shape and t.is_contiguous() and t.data_ptr() % ALIGNED == 0
            for t, v in zip(operands, self.types, strict=True)
        )

    def run(self, operands: Sequence[torch.Tensor], early: bool) -> tuple[torch.Tensor, ...]:
        """Start all kernels and return what they make; `early`: whether the first one may begin
        while the kernel in front of the chain runs, which has to be a chain's."""
        made = (room(size, self.device) for size in self.chain.made)
        tensors = [*operands, *made]
        at = [t.data_ptr() for t in tensors]
        for start, readers in self.starts:
            function = self.chain.functions[start.function]
            self.driver.start(
                self.functions[start.function],
                start.grid,
                32 * function.warps,
                function.shared,
                [read(at) for read in readers],
                early and start.waits,
            )
            early = True
        return tuple(_tensor(tensors, result) for result in self.chain.results)


def room(size: int, device: str) -> torch.Tensor:
    """Return memory of so many bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def _reader(operand: str) -> Callable[[Sequence[int]], Any]:
    """Return a function that computes an operand's value from the tensors' addresses."""
    tensor, offset, kind, number = _parts(operand)
    if tensor:
        i, n = int(tensor), int(offset)
        return lambda at: ctypes.c_uint64(at[i] + n)
    made, read = NUMBERS[kind]
    value = made(read(number))
    return lambda at: value


def _tensor(tensors: Sequence[torch.Tensor], result: Result) -> torch.Tensor:
    """Return what lies in one of `tensors`."""
    tensor, offset, *_ = _parts(result.at)
    kind, begin = parse_type(result.type), int(offset)
    part = tensors[int(tensor)].view(-1).view(torch.uint8)[begin : begin + kind.nbytes()]
    return part.view(torch_dtype(kind.dtype)).view([int(d) for d in kind.shape])


def chain_dims(limits: Limits) -> dict[str, int]:
    """Return the sizes that an engine's chains are recorded for: all its rows and slots."""
    slots = context_slots(limits.max_seq, capacity(limits.max_seq))
    return {"B": limits.max_batch, "C": slots}


def compile_chains(
    steps: Sequence[Step],
    target: Target,
    limits: Limits,
    out: Path,
    progress: Callable[[str], None],
) -> tuple[str | None, ...]:
    """Write the chains of a phase's segments; return the file of each step, None where it has
    none. LowerError with the compiler's message."""
    texts = [s.text if isinstance(s, Segment) else None for s in steps]
    files: dict[str | None, str | None] = {None: None}
    for text in dict.fromkeys(t for t in texts if t):
        progress(f"kernel graphs: segment {len(files)}")
        make = partial(recorded_chain, text, target, chain_dims(limits))
        files[text] = _compiled(make, text, out)
    return tuple(files[t or None] for t in texts)


def compile_end(batch: int, out: Path) -> str | None:
    """Write the chain of a step's end; return its file. LowerError with the compiler's message."""
    return _compiled(partial(recorded_end, batch), end_text(batch), out)


def _compiled(
    make: Callable[[], tuple[Chain, list[bytes]] | None], text: str, out: Path
) -> str | None:
    try:
        made = make()
    except (triton.TritonError, OSError) as e:
        raise LowerError(
            f"torch: a chain does not compile: {type(e).__name__}: {str(e)[:800]}\n"
            f"its first node: {first_node(text)}"
        ) from e
    if made is None:
        return None
    file = f"{_digest(text)[:24]}.chain"
    write_chain(out / file, text, *made)
    return file


def followers(steps: Sequence[Step], chains: Container[int]) -> set[int]:
    """Return the places of chains that only views lie between and the chain in front: kernels of
    theirs may begin early."""
    found, after = set[int](), False
    for i, s in enumerate(steps):
        if not (isinstance(s, Glue) and s.node.definition.traffic is nothing):
            if after and i in chains:
                found.add(i)
            after = i in chains
    return found


def chained(loaded: LoadedChain, early: bool, program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a chain: by the program where operands are of other sizes."""

    def call(operands: list[torch.Tensor]) -> Any:
        return loaded.run(operands, early) if loaded.fits(operands) else program(operands)

    return call


def load_end(file: str | None, folder: Path, limits: Limits) -> Callable[..., Any]:
    """Return the end of a step that chooses its own tokens: a kernel graph, or torch's kernels,
    with a warning if the driver refuses it."""
    if file is None:
        return end_by_torch
    try:
        made = read_chain(folder / file, end_text(limits.max_batch))
        return chained(LoadedChain(*made, CudaDriver(), "cuda"), False, end_by_torch)
    except EngineError as e:
        log.warning(BY_PROGRAMS, e)
        return end_by_torch


def load_step(
    plan: Sequence[BoundStep], steps: Sequence[Step], files: Sequence[str | None], folder: Path
) -> list[BoundStep]:
    """Return a decode step of kernel graphs; the plan itself, with a warning, if the driver refuses
    the kernels."""
    named = {f: s.text for s, f in zip(steps, files, strict=True) if f and isinstance(s, Segment)}
    try:
        driver = CudaDriver()
        loaded = {
            file: LoadedChain(*read_chain(folder / file, text), driver, "cuda")
            for file, text in named.items()
        }
    except EngineError as e:
        log.warning(BY_PROGRAMS, e)
        return [*plan]
    chains = {i: loaded[file] for i, file in enumerate(files) if file in loaded}
    early = followers(steps, chains)
    return [
        replace(b, call=chained(chains[i], i in early, b.call)) if i in chains else b
        for i, b in enumerate(plan)
    ]
