"""Step programs: a decode step, a prefill chunk or a tower as instructions for kernels/step.c.

The session's KV caches, the weights and the memory of all values have fixed addresses, so a step is
recorded once, op by op, and then runs without torch or Python between its kernels, except ops that
have no instruction, which torch runs. Results of elementwise ops are rounded where their references
round. The program of a step of more than three tokens is extrapolated from those of two and of
three tokens (`of_tokens`), unless its values are watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from g4ir.backends.base import Tensors, Watch
from g4ir.backends.inductor.attention import encoder_attention
from g4ir.backends.inductor.lower import dense
from g4ir.backends.inductor.lowered import Coded
from g4ir.backends.inductor.segment import writes_last
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.interpret import Run, run_node
from g4ir.ir.rewrite import bind
from g4ir.model.decoder import BLOCKS
from g4ir.model.encoder import ENCODE
from g4ir.ops.base import as_tuple
from g4ir.ops.codecs import FORMAT_OF, fake_quantize_values
from g4ir.ops.collective import COLLECTIVES
from g4ir.ops.mlp import ACTIVATIONS
from g4ir.ops.rope import inverse_frequencies
from g4ir.ops.types import dtype_name, torch_dtype

from . import pyops
from .arena import Arena, storage_of
from .isa import multiplies_integers

Tensor = torch.Tensor

#: instructions, numbered as in kernels/step.c
KINDS = (
    *("copy", "rms_norm", "add", "mul", "scale", "softcap", "glu", "rope", "rope_table"),
    *("cache_write", "attention", "linear", "linear_coded", "row_start", "add_integers", "top_k"),
    *("experts", "narrow_row", "mul_integers", "mask_ids", "embed_rows", "greedy", "end_step"),
    *("attend_chunk", "last_row", "last_seen", "cluster_head", "pick_id", "attend_texts"),
    *("mean_texts", "unit_norm", "lora", "best_logits"),
)
#: instructions that need no fp32 scratch rows (`scratch` of kernels/step.c)
_WITHOUT_SCRATCH = {"softcap", "glu", "cache_write", "attention", "linear", "linear_coded"}
_WITHOUT_SCRATCH |= {"greedy", "attend_chunk", "last_row", "last_seen", "attend_texts", "lora"}
_INSTRUCTION = np.dtype([("kind", "i8"), ("first", "i8"), ("n", "i8", 4), ("f", "f8")])
_OPERAND = np.dtype([("at", "u8"), ("sizes", "i8", 7)])
#: instruction -> number of leading operands that may be strided; default: all
STRIDED = {"linear": 0, "linear_coded": 0, "attention": 0, "add_integers": 0, "experts": 0}
STRIDED |= {"cache_write": 1, "top_k": 0, "mul_integers": 0, "mask_ids": 0, "embed_rows": 0}
STRIDED |= {"greedy": 1, "end_step": 0, "attend_chunk": 0, "last_row": 0, "last_seen": 0}
STRIDED |= {"cluster_head": 0, "pick_id": 0, "attend_texts": 0, "mean_texts": 1, "lora": 0}
#: graphs whose steps are chunks of many tokens
CHUNKS = ("prefill", BLOCKS, ENCODE)
#: codes of a quantised weight without a C kernel -> the dense weight
_DENSE: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
_DENSE_LOCK = Lock()
#: GROUP: rows of a weight in a group of BEST_LOGITS (kernels/step.c). SCREENED_FROM: min rows of x
#: for which it is used: for fewer, products take the time in which the weight is read
GROUP, SCREENED_FROM = 256, 8
#: codes of a head -> norms of its groups (`_group_norms`)
_NORMS: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
#: ops that return views
_VIEWS = {"heads", "merge_heads", "split", "unstack_layers"}


class NoInstruction(Exception):
    """An op, a dtype or a layout that has no instruction."""


def _recorded(g: Graph, **dims: int) -> Recorder:
    """Record a graph on the meta device, to learn the sizes of its values; dims default to 2."""
    defaults = {d: 2 for v in g.sources() for d in v.type.shape if isinstance(d, str)}
    g = bind(g, **defaults | dims)
    r, env = Recorder(Arena("meta")), {}
    for v in g.sources():
        shape, dtype = _sizes(v)
        in_arena = v in g.inputs  # `record_step` allocates inputs there too
        env[v.name] = r.arena.empty(shape, dtype) if in_arena else _empty(shape, dtype)
    r.record(g, env)
    return r


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def step_arena(g: Graph, dims: Mapping[str, int], tokens: str, max_tokens: int) -> Arena:
    """Return an arena for steps of a graph in which the dim named `tokens` is at most `max_tokens`;
    `dims` binds other dims on which values depend."""
    two, three = (_recorded(g, **dims, **{tokens: n}).arena.sizes for n in (2, 3))
    sizes = [a + (max_tokens - 2) * (b - a) for a, b in zip(two, three, strict=True)]
    return Arena("cpu", sizes)


def _sizes(v: Value) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(int(d) for d in v.type.shape), torch_dtype(v.type.dtype)


@dataclass(frozen=True)
class Rounded:
    """Rows x with a pending `fake_quantize` to the format `fmt`, for matmuls that fuse it."""

    x: Any
    fmt: str


def _dense(value: Any) -> Any:
    return fake_quantize_values(value.x, value.fmt) if isinstance(value, Rounded) else dense(value)


#: in a program: (index of the next instruction, index of the next torch op)
Position = tuple[int, int]


@dataclass(frozen=True, eq=False)
class TorchOp:
    """An op that torch runs before instruction `at`: a function of dense operands, its operands,
    and the memory of its results."""

    at: int
    call: Callable[[list[Any]], Sequence[Tensor]]
    inputs: tuple[Any, ...]
    outputs: tuple[Tensor, ...]

    def run(self) -> None:
        results = self.call([_dense(x) for x in self.inputs])
        for t, result in zip(self.outputs, results, strict=True):
            t.copy_(result)


@dataclass(frozen=True, eq=False)
class Code:
    """Recorded instructions, their operands (addresses and sizes), and torch's ops between them;
    `buffers` keeps the operands' memory alive, except weights that `Recorder.code` leaves out."""

    instructions: Any
    operands: Any
    scratch: Tensor
    buffers: tuple[Tensor, ...]
    torch_ops: tuple[TorchOp, ...]

    def run(self, start: Position = (0, 0), end: Position | None = None, threads: int = 0) -> None:
        """Run the program from `start` to `end` on `threads` threads (0: torch's number)."""
        at, first = start
        stop, last = end or (len(self.instructions), len(self.torch_ops))
        for op in self.torch_ops[first:last]:
            self._run_instructions(at, op.at, threads)
            op.run()
            at = op.at
        self._run_instructions(at, stop, threads)

    def _run_instructions(self, start: int, end: int, threads: int) -> None:
        if start < end:
            some, threads = self.instructions[start:end], threads or torch.get_num_threads()
            pyops.run_instructions(some, self.operands, self.scratch, threads)

    def run_steps(self, pace: Tensor, threads: int) -> None:
        """Run steps of a program that ends with `end_step`, as long as more are requested
        (pyops.request_steps)."""
        pyops.run_instructions(self.instructions, self.operands, self.scratch, threads, pace)


class Recorder:
    """Records the nodes of graphs whose dims are all bound: as instructions, or as calls of `run`
    (torch) for nodes without an instruction."""

    def __init__(self, arena: Arena, run: Run = run_node) -> None:
        self.arena, self._run = arena, run
        self.env: dict[str, Any] = {}
        self.torch_ops: list[TorchOp] = []
        self.operands: list[tuple[int, tuple[int, ...]]] = []
        self.instructions: list[tuple[int, int, tuple[int, ...], float]] = []
        self.scratch_size = 1
        #: copies of operands, whose memory is free after the next instruction other than `copy`
        self._copies: list[Tensor] = []
        #: tensors that the program reads or writes
        self.tensors: list[Tensor] = []
        #: for each node the position at which its outputs are complete, and these outputs
        self.ends: list[tuple[Position, Tensors]] = []
        #: position after the last cache write, where a step without results may end
        self.state_end: Position = (0, 0)
        #: whether the graph is one of CHUNKS
        self.chunk = False

    def record(self, g: Graph, env: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Append the instructions of a graph; return its outputs, whose memory is not reused."""
        g, self.chunk = replace(g, nodes=tuple(writes_last(g, g.nodes))), g.name in CHUNKS
        for name, t in env.items():
            self._put(name, t)
        for i, n in enumerate(g.nodes):
            self.node(n)
            if n.definition.updated(n.inputs, n.outputs):
                self.state_end = self.position
            self.ends.append((self.position, dict(self._watched_values(n))))
            for name in g.last_uses.get(i, ()):
                self._drop(name)
        assert all(self.env[new.name] is self.env[old] for old, new in g.next.items())
        return {v.name: self.env[v.name] for v in g.outputs}

    @property
    def position(self) -> Position:
        return len(self.instructions), len(self.torch_ops)

    def _watched_values(self, n: Node) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, value) of a node's outputs, except caches and values that are not computed
        yet: quantised weights and `Rounded` rows."""
        updated = {new.name for _, new in n.definition.updated(n.inputs, n.outputs)}
        for v in n.outputs:
            if v.name not in updated and isinstance(value := self.env[v.name], Tensor):
                yield v.name, value

    def node(self, n: Node) -> None:
        """Append a node: its instructions, those of its expansion, or a call of torch's op."""
        expands = n.definition.expand and n.op not in (*LOWERINGS, *COLLECTIVES)
        inner, values = n.expanded if expands else ((), ())
        for m in inner:
            self.node(m)
        outputs = tuple(self.env[v.name] for v in values) if expands else self._outputs(n)
        for v, value in zip(n.outputs, outputs, strict=True):
            self._put(v.name, value)
        for m in inner:
            for v in m.outputs:
                self._drop(v.name)

    def _outputs(self, n: Node) -> tuple[Any, ...]:
        inputs = [self.env[v.name] for v in n.inputs]
        try:
            if n.op in _VIEWS:
                return self._view(n, *inputs)
            if n.op in LOWERINGS:
                return as_tuple(LOWERINGS[n.op](self, n, *inputs))
        except NoInstruction:
            pass
        caches = {new.name: old.name for old, new in n.definition.updated(n.inputs, n.outputs)}
        outputs = (
            self.env[caches[v.name]] if v.name in caches else self.arena.empty(*_sizes(v))
            for v in n.outputs
        )
        return self.by_torch(partial(self._run, n), inputs, *outputs)

    def by_torch(
        self, call: Callable[[list[Any]], Sequence[Tensor]], inputs: Sequence[Any], *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Append a call of torch: `call` gets the inputs, dequantised when it runs, and its results
        are copied to `outputs`, which are returned."""
        self.torch_ops.append(TorchOp(len(self.instructions), call, tuple(inputs), outputs))
        self.tensors += (*outputs, *(t for x in inputs for t in _tensors(x)))
        return outputs

    def _view(self, n: Node, x: Tensor) -> tuple[Tensor, ...]:
        assert n.definition.reference
        views = as_tuple(n.definition.reference(x, **n.attrs))
        if any(storage_of(t) != storage_of(x) for t in views):
            raise NoInstruction(f"{n.op} of rows that are not contiguous")
        return views

    def _put(self, name: str, value: Any) -> None:
        self.env[name] = value
        for t in _tensors(value):
            self.arena.use(t, 1)

    def _drop(self, name: str) -> None:
        for t in _tensors(self.env.pop(name)):
            self.arena.use(t, -1)

    def emit(
        self, kind: str, *operands: Tensor | None, n: tuple[int, ...] = (), f: float = 0
    ) -> Any:
        """Append an instruction with integers `n` and number `f`; operand None is a null pointer.
        Return its last operand; NoInstruction if an operand has another layout than required."""
        first, strided = len(self.operands), STRIDED.get(kind, len(operands))
        if any(t is not None and not t.is_contiguous() for t in operands[strided:]):
            raise NoInstruction(f"{kind} of an operand that is not contiguous")
        for t in operands:
            self.operands.append((0, (0,) * 7) if t is None else (t.data_ptr(), _rows(t)))
            self.tensors += [] if t is None else [t]
            if t is not None and kind not in _WITHOUT_SCRATCH:
                self.scratch_size = max(self.scratch_size, 3 * t.shape[-1])
        self.instructions.append((KINDS.index(kind), first, (*n, 0, 0, 0, 0)[:4], f))
        while self._copies and kind != "copy":
            self.arena.use(self._copies.pop(), 0)
        return operands[-1]

    def copy(self, x: Tensor, y: Tensor) -> None:
        """Append a copy of x to y; nothing for an empty tensor, whose address is null."""
        if x.numel():
            self.emit("copy", x, y)

    def of_chunk(self, x: Tensor) -> bool:
        """Whether x has all rows of a prefill chunk, not only the last of each sequence."""
        return self.chunk and x.dim() > 2 and x.shape[1] > 1

    def like(self, x: Tensor, width: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor of x's shape and dtype, or with `width` columns or of
        `dtype`."""
        shape = (*x.shape[:-1], x.shape[-1] if width is None else width)
        return self.arena.empty(shape, dtype or x.dtype)

    def greedy(self, logits: Tensor, never: Tensor) -> tuple[Tensor, Tensor]:
        """Append the argmax of logits [B, 1, vocab], except ids `never` i64[n], whose logits it
        overwrites. Return tokens i64[B], and flaws i64[B]: 1 if a logit is NaN or infinite."""
        _computes(logits)
        tokens, flaws = (self.arena.empty(logits.shape[:1], torch.int64) for _ in range(2))
        self.emit("greedy", logits, never, tokens, flaws)
        return tokens, flaws

    def screen_logits(self, never: Tensor, exact: Tensor) -> None:
        """Let the head, if it is quantised to tiles, compute only those logits exactly that may be
        the maximum of a row without ids `never`, while `exact` i64[1] is 0."""
        index = len(self.instructions) - 1
        (kind, first, n, f), cap = self.instructions[index], 0.0
        if KINDS[kind] == "softcap":
            index, cap = index - 1, f
            kind, first, n, _ = self.instructions[index]
        if KINDS[kind] != "linear_coded" or n[1:] != (True, False, False):  # tiles, exact, no chunk
            return
        operands = self.operands[first : first + 4]
        (_, x), (at, _), scales, _ = operands
        rows, bf16 = x[0] * x[2], x[-2] == pyops.DTYPES[torch.bfloat16]
        if not bf16 or not SCREENED_FROM <= rows <= pyops.kernel("screened_rows")(n[0]):
            return
        codes = next(t for t in self.tensors if t.data_ptr() == at)
        if codes not in _NORMS:
            _NORMS[codes] = _group_norms(n[0], codes, scales, x[-3])
        more = (never, _NORMS[codes], exact)
        self.instructions[index] = KINDS.index("best_logits"), len(self.operands), n, cap
        self.operands += (*operands, *((t.data_ptr(), _rows(t)) for t in more))
        self.tensors += more

    def code(self, weights: Iterable[Tensor]) -> Code:
        """Return the recorded program, which does not own the memory of `weights`."""
        loaded = {storage_of(t) for t in weights}
        buffers = {storage_of(t): t for t in self.tensors}
        operands = np.array(self.operands, _OPERAND)
        return Code(
            np.array(self.instructions, _INSTRUCTION),
            operands,
            torch.empty(self.scratch_size),
            tuple(t for key, t in buffers.items() if key not in loaded),
            tuple(self.torch_ops),
        )

    def contiguous(self, x: Tensor) -> Tensor:
        """Return x if it is contiguous, else a copy, whose memory is reused after the next
        instruction other than `copy`."""
        if x.is_contiguous():
            return x
        self._copies.append(self.like(x))
        self.copy(x, self._copies[-1])
        return self._copies[-1]


def _group_norms(form: int, codes: Tensor, scales: tuple[int, tuple[int, ...]], k: int) -> Tensor:
    """Return the largest norm of the rows of each GROUP of a tiled weight [n, k], and of all: f32;
    `scales`: its operand."""
    (at, sizes), norms = scales, list[Tensor]()
    for piece in codes.split(GROUP):
        rows = torch.empty(len(piece), k)
        how = (sizes[-2], rows.data_ptr(), pyops.DTYPES[rows.dtype], len(rows), k, sizes[-3])
        if pyops.kernel("decode")(piece.data_ptr(), form, 1, at, *how, torch.get_num_threads()):
            raise MemoryError(f"out of memory: {rows.nbytes} bytes")
        at += len(rows) * sizes[-3] * sizes[-1]
        norms.append(rows.norm(dim=-1).amax())
    return torch.stack([*norms, torch.stack(norms).amax()]) * (1 + 1e-5)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Rounded):
        yield value.x
    elif isinstance(value, Coded):
        yield from (value.codes, value.scales)
    else:
        yield value


def _rows(t: Tensor) -> tuple[int, ...]:
    """Return the sizes of an `operand` of kernels/step.c: outer, outer stride, inner, inner stride,
    width, dtype, bytes of an element. NoInstruction if rows need more than two strides, or a row's
    elements are apart."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(t.shape[:-1], t.stride()[:-1]):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 2 or (t.shape[-1] > 1 and t.stride(-1) != 1):
        raise NoInstruction(f"rows of {list(t.shape)} with strides {t.stride()}")
    outer, inner = [(1, 0), (1, 0), *merged][-2:]
    return (*outer, *inner, t.shape[-1], pyops.CACHE_DTYPES.get(t.dtype, -1), t.element_size())


def _computes(*tensors: Tensor) -> None:
    for t in tensors:
        if t.dtype not in (torch.bfloat16, torch.float32):
            raise NoInstruction(f"values in {t.dtype}")


# --- the instructions of each op ---------------------------------------------------------------


def _like_input(
    kind: str,
    number: str = "",
    integers: Callable[[Node, Tensor], tuple[int, ...]] = lambda n, x: (),
    dtype: torch.dtype | None = None,
) -> Callable[..., Tensor]:
    """Return the lowering of an op to one instruction whose result has the shape of its first input
    (and its dtype, if none is given). `number`: the attr that is the instruction's `f`; `integers`:
    (node, first input) -> its `n`."""

    def lower(r: Recorder, n: Node, *inputs: Tensor) -> Any:
        _computes(*inputs)
        x, f = inputs[0], n.number(number) if number else 0
        return r.emit(kind, *inputs, r.like(x, dtype=dtype), n=integers(n, x), f=f)

    return lower


def _norm(r: Recorder, n: Node, x: Tensor, w: Tensor | None = None) -> Any:
    _computes(x, *[] if w is None else [w])
    return r.emit("rms_norm", x, w, r.like(x), f=n.number("eps"))


def _add(r: Recorder, n: Node, a: Tensor, b: Tensor) -> Any:
    if a.dtype == torch.int64:
        return r.emit("add_integers", a, b, r.like(a))
    _computes(a)
    return r.emit("add", a, b, r.like(a))


#: cached, so that all programs share a table
_frequencies = cache(inverse_frequencies)


def _rope_table(r: Recorder, n: Node, positions: Tensor) -> tuple[Tensor, Tensor]:
    dim, dtype = n.integer("dim"), torch_dtype(n.word("dtype"))
    theta, fraction, factor = (n.number(name) for name in ("theta", "fraction", "factor"))
    frequencies = _frequencies(n.word("kind"), theta, dim, fraction, factor)
    tables = [r.arena.empty((*positions.shape, dim), dtype) for _ in range(2)]
    _computes(*tables)
    r.emit("rope_table", r.contiguous(positions), frequencies, *tables)
    return tables[0], tables[1]


def _stack_layers(r: Recorder, n: Node, x: Tensor) -> Tensor:
    by_layer = x.permute(2, 0, 1, 3)
    y = r.arena.empty(tuple(by_layer.shape), x.dtype)
    r.copy(by_layer, y)
    return y


def _row_start(r: Recorder, n: Node, positions: Tensor) -> Any:
    return r.emit("row_start", positions, r.arena.empty((positions.shape[0],), torch.int64))


def _narrow_row(r: Recorder, n: Node, x: Tensor) -> Any:
    _computes(x)
    to = torch_dtype(n.word("to"))
    y = r.like(x, int(n.out.type.shape[-1]), to)
    return r.emit("narrow_row", x, y, n=(pyops.CACHE_DTYPES[to],))


def _cache_write(
    r: Recorder, n: Node, cache: Tensor, new: Tensor, start: Tensor, lengths: Tensor
) -> Any:
    if new.dtype != cache.dtype:
        raise NoInstruction(f"rows in {new.dtype} of a cache in {cache.dtype}")
    return r.emit("cache_write", new, start, lengths, cache, n=tuple(new.shape[:3]))


def _attention(
    r: Recorder, n: Node, q: Tensor, positions: Tensor, written: Tensor, *kv: Tensor
) -> Any:
    if n.attrs["softcap"]:
        raise NoInstruction("attention with a softcap")
    _computes(q)
    out = r.like(q)
    how: Any = {"n": (*q.shape[:2], n.integer("window"), kv[0].shape[2]), "f": n.number("scale")}
    if len(kv) == 2:
        return r.emit("attention", r.contiguous(q), positions, written, *kv, out, **how)
    (k, v, *fresh), ids = kv[:4], kv[4:]
    if q.shape[-1] % 2:
        raise NoInstruction(f"attention over a chunk with an odd head dim, {q.shape[-1]}")
    last = r.like(positions) if ids else positions
    if ids:
        r.emit("last_seen", r.contiguous(positions), r.contiguous(ids[0]), last)
    rows = (r.contiguous(q), positions, last, written, k, v, *map(r.contiguous, fresh))
    r.emit("attend_chunk", *rows, out, **how)
    if ids:
        r.arena.use(last, 0)
    return out


def _latent_row(r: Recorder, n: Node, v: Tensor, k: Tensor) -> Tensor:
    pairs, half, d = n.integer("pairs"), k.shape[-1] // 2, v.shape[-1]
    y = r.like(v, d + 2 * pairs)
    parts = v, k[..., :pairs], k[..., half : half + pairs]
    for part, at in zip(parts, (0, d, d + pairs), strict=True):
        r.copy(part, y[..., at : at + part.shape[-1]])
    return y


def _attention_latent(
    r: Recorder,
    n: Node,
    q: Tensor,
    positions: Tensor,
    written: Tensor,
    w: Tensor,
    cache: Tensor,
    *chunk: Tensor,
) -> Tensor:
    """Attend over a latent cache, whose rows are both keys and values, with the query of
    `latent_query` (inductor/attention.py): q * w with zeros on K's rotated dims, then q's rotated
    dims."""
    _computes(q)
    pairs, d, fresh = n.integer("pairs"), q.shape[-1], chunk[:1]
    half, weighted, query = d // 2, r.like(q), r.like(q, d + 2 * pairs)
    r.emit("mul", q, w, weighted)
    for i, at in enumerate((0, half)):
        low, out = q[..., at : at + pairs], d + i * pairs
        r.emit("scale", low, query[..., at : at + pairs], f=0)
        r.copy(low, query[..., out : out + pairs])
        rest = slice(at + pairs, at + half)
        r.copy(weighted[..., rest], query[..., rest])
    summed = _attention(r, n, query, positions, written, cache, cache, *fresh, *fresh, *chunk[1:])
    y = r.like(q)
    r.copy(summed[..., :d], y)
    for t in (weighted, query, summed):
        r.arena.use(t, 0)
    return y


def _packed_attention(r: Recorder, n: Node, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Any:
    _computes(q)
    if q.shape[-1] % 2:
        raise NoInstruction(f"attention with an odd head dim, {q.shape[-1]}")
    rows, how = map(r.contiguous, (q, k, v)), (q.shape[1], n.integer("window"), k.shape[2])
    return r.emit("attend_texts", *rows, ends, r.like(q), n=how, f=n.number("scale"))


def _packed_mean(r: Recorder, n: Node, x: Tensor, ends: Tensor) -> Any:
    _computes(x)
    return r.emit("mean_texts", x, ends, r.arena.empty((1, len(ends), x.shape[-1]), x.dtype))


def _last_row(r: Recorder, n: Node, x: Tensor, lengths: Tensor) -> Any:
    y = r.arena.empty((x.shape[0], 1, *x.shape[2:]), x.dtype)
    return r.emit("last_row", r.contiguous(x), lengths, y, n=tuple(x.shape[:2]))


def _dequantize(r: Recorder, n: Node, codes: Tensor, scales: Tensor) -> Coded:
    tiles = n.op == "dequantize_tiles"
    return Coded(codes, scales, torch_dtype(n.word("to")), tiles)


def _fake_quantize(r: Recorder, n: Node, x: Tensor) -> Rounded:
    return Rounded(x, n.word("form"))


def _linear(r: Recorder, n: Node, x: Tensor | Rounded, w: Tensor | Coded) -> Tensor:
    fmt, rows = (x.fmt, x.x) if isinstance(x, Rounded) else ("", x)
    _computes(rows)
    if fmt and not (fmt == "int8" and rows.dtype == torch.bfloat16 and _multiplies_integers(w)):
        fmt, (rows,) = "", r.by_torch(tuple, [x], r.like(rows))
    y = r.like(rows, int(n["w"].type.shape[0]))
    if isinstance(w, Coded) and not _has_kernel(w):
        w = _dense_weight(w)
    if isinstance(w, Coded):
        use = (_format_id(w), w.tiles, bool(fmt), r.of_chunk(rows))
        r.scratch_size = max(r.scratch_size, bool(fmt) * rows.shape[-1])
        r.emit("linear_coded", r.contiguous(rows), w.codes, w.scales, y, n=use)
    elif w.dtype != rows.dtype:
        raise NoInstruction(f"a product of {rows.dtype} with a weight in {w.dtype}")
    else:
        r.emit("linear", r.contiguous(rows), w, y, n=(r.of_chunk(rows),))
    r.arena.use(rows, 0)
    return y


def _dense_weight(w: Coded) -> Tensor:
    """Return the dense weight of codes without a C kernel, at one address in all programs. The
    kernels for dense weights multiply it: in torch's matmul a row's result would depend on the
    other rows."""
    with _DENSE_LOCK:
        if w.codes not in _DENSE:
            _DENSE[w.codes] = dense(w)
        return _DENSE[w.codes]


def _multiplies_integers(w: Tensor | Coded) -> bool:
    if not isinstance(w, Coded) or not w.tiles:
        return False
    return multiplies_integers(FORMAT_OF[dtype_name(w.codes.dtype)])


@cache
def _part_sizes(sizes: tuple[int, ...]) -> Tensor:
    """Return the sizes as a cached operand: `of_tokens` needs the same address in all programs."""
    return torch.tensor(sizes)


def _lora(
    r: Recorder, n: Node, y: Tensor, x: Tensor, index: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """Add the adapter's product to y in place: no other node reads y."""
    _computes(x, y, a, b)
    sizes, low = n.integers("sizes"), r.arena.empty((*x.shape[:-1], a.shape[1]), torch.float32)
    how = (x.shape[1], len(sizes))
    r.emit("lora", r.contiguous(x), index, a, b, _part_sizes(sizes), low, y, n=how)
    r.arena.use(low, 0)
    return y


def _format_id(w: Coded) -> int:
    """Return the id of a weight's format; NoInstruction if the C kernels do not support it."""
    if not _has_kernel(w):
        raise NoInstruction(f"a weight in {w.codes.dtype} with {w.scales.shape[-1]} scales a row")
    return pyops.FORMAT_IDS[w.codes.dtype]


def _has_kernel(w: Coded) -> bool:
    return (
        w.codes.dtype in pyops.FORMAT_IDS
        and w.scales.dtype in pyops.DTYPES
        and pyops.takes_width(w.codes, w.scales.shape[-1])
    )


def _router(
    r: Recorder, n: Node, x: Tensor, scale: Tensor, proj: Tensor, per_expert: Tensor
) -> tuple[Tensor, Tensor]:
    _computes(x, per_expert)
    rows, scores = r.like(x), r.like(x, proj.shape[0])
    r.emit("mul", x, scale, rows)
    r.emit("scale", rows, rows, f=n.number("root"))
    r.emit("linear", rows, proj, scores, n=(r.of_chunk(x),))
    weights, index = (r.like(x, n.integer("top_k"), d) for d in (torch.float32, torch.int64))
    r.emit("top_k", scores, per_expert, weights, index)
    for t in (rows, scores):
        r.arena.use(t, 0)
    return weights, index


def _experts(
    r: Recorder,
    n: Node,
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    gate_up: Tensor | Coded,
    down: Tensor | Coded,
    *first: Tensor,
) -> Tensor:
    _computes(x)
    if weights.dtype != torch.float32:
        raise NoInstruction(f"router weights in {weights.dtype}")
    choices, inner = index.numel(), int(n["down"].type.shape[2])
    d, y = x.shape[-1], r.like(x)
    sizes = (d, 2 * inner, inner, d)
    scratch = [r.arena.empty((choices, size), x.dtype) for size in sizes]
    order = r.arena.empty((2, choices), torch.int64)
    operands: tuple[Tensor | None, ...] = (*_weight(gate_up), *_weight(down))
    format_ids = [_format_id(w) if isinstance(w, Coded) else -1 for w in (gate_up, down)]
    tiles = sum(isinstance(w, Coded) and w.tiles << i for i, w in enumerate((gate_up, down)))
    tiles += r.of_chunk(x) << 2
    act = ACTIVATIONS.index(n.word("act"))
    operands = (r.contiguous(x), weights, index, *operands, *scratch, order, y, *(first or (None,)))
    r.emit("experts", *operands, n=(act, *format_ids, tiles))
    for t in (*scratch, order):
        r.arena.use(t, 0)
    return y


def _weight(w: Tensor | Coded) -> tuple[Tensor, Tensor | None]:
    return (w.codes, w.scales) if isinstance(w, Coded) else (w, None)


def _concat(r: Recorder, n: Node, *parts: Tensor) -> Tensor:
    x, at = parts[0], 0
    if n.integer("axis") != x.dim() - 1:
        raise NoInstruction("concat along an axis other than the last")
    y = r.like(x, sum(t.shape[-1] for t in parts))
    for t in parts:
        r.copy(t, y[..., at : at + t.shape[-1]])
        at += t.shape[-1]
    return y


def _mask_ids(r: Recorder, n: Node, ids: Tensor) -> Any:
    y, masked = r.like(ids), torch.tensor(n.integers("ids"), dtype=torch.int64)
    return r.emit("mask_ids", r.contiguous(ids), masked, y, n=(n.integer("pad"),))


def _embedding(r: Recorder, n: Node, table: Tensor, *tensors: Tensor) -> Any:
    """Embedding lookup; `tensors`: optional scales, ids."""
    *scales, ids = tensors
    format_id, dtype = -1, table.dtype
    if scales:
        dtype = torch_dtype(n.word("to"))
        format_id = _format_id(Coded(table, scales[0], dtype, n.op == "embedding_tiles"))
    y = r.arena.empty((*ids.shape, int(n.out.type.shape[-1])), dtype)
    _computes(y)
    operands = r.contiguous(ids), table, scales[0] if scales else None, y
    how = format_id, n.op == "embedding_tiles"
    return r.emit("embed_rows", *operands, n=how, f=n.number("scale"))


def _cluster_head(
    r: Recorder, n: Node, x: Tensor, heads: Tensor, rows: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    _computes(x)
    k, scores = n.integer("top_k"), r.like(x, heads.shape[0])
    logits, ids = (r.like(x, k * rows.shape[1], dtype) for dtype in (x.dtype, torch.int64))
    r.emit("linear", r.contiguous(x), heads, scores)
    r.emit("cluster_head", r.contiguous(x), scores, rows, order, logits, ids, n=(k,))
    r.arena.use(scores, 0)
    return logits, ids


def _pick_id(r: Recorder, n: Node, ids: Tensor, at: Tensor) -> Any:
    return r.emit("pick_id", ids, at, r.like(at))


def _greedy(r: Recorder, n: Node, logits: Tensor) -> Tensor:
    return r.greedy(logits, torch.empty(0, dtype=torch.int64))[0]


def _clip(r: Recorder, n: Node, x: Any, low: Tensor, high: Tensor) -> Tensor:
    """Clamp by scalars: ten times as fast as by tensors."""
    limits = float(low), float(high)
    return r.by_torch(lambda operands: (operands[0].clamp(*limits),), [x], r.like(x))[0]


def _encoder_attention(r: Recorder, n: Node, q: Any, *rest: Any) -> Tensor:
    def attend(operands: list[Any]) -> Sequence[Tensor]:
        return (encoder_attention(n, *operands),)

    return r.by_torch(attend, [q, *rest], r.like(q))[0]


#: op -> its lowering (recorder, node, *inputs) -> outputs; other ops are views, expanded, or run by
#: torch
LOWERINGS: dict[str, Callable[..., Any]] = {
    "clip": _clip,
    "encoder_attention": _encoder_attention,
    "rms_norm": _norm,
    "add": _add,
    "mul": _like_input("mul"),
    "scale": _like_input("scale", "value"),
    "softcap": _like_input("softcap", "cap"),
    "glu": _like_input("glu", integers=lambda n, x: (ACTIVATIONS.index(n.word("act")),)),
    "rope": _like_input("rope", integers=lambda n, x: (x.shape[2],)),
    "rope_table": _rope_table,
    "stack_layers": _stack_layers,
    "row_start": _row_start,
    "narrow_row": _narrow_row,
    "cache_write": _cache_write,
    "attention": _attention,
    "attention_latent": _attention_latent,
    "latent_row": _latent_row,
    "last_row": _last_row,
    "packed_attention": _packed_attention,
    "packed_mean": _packed_mean,
    "unit_norm": _like_input("unit_norm", dtype=torch.float32),
    "dequantize": _dequantize,
    "dequantize_tiles": _dequantize,
    "fake_quantize": _fake_quantize,
    "linear": _linear,
    "lora": _lora,
    "router": _router,
    "experts": _experts,
    "concat": _concat,
    "mask_ids": _mask_ids,
    "embedding": _embedding,
    "embedding_quantized": _embedding,
    "embedding_tiles": _embedding,
    "greedy": _greedy,
    "cluster_head": _cluster_head,
    "pick_id": _pick_id,
}


@dataclass(frozen=True, eq=False)
class StepProgram:
    """A recorded step over a session's caches. Not safe for use from several threads at once."""

    code: Code
    #: memory of the graph's inputs, and of its outputs
    feeds: Tensors
    outputs: Tensors
    #: for each node the position at which its outputs are complete, and these outputs
    ends: Sequence[tuple[Position, Tensors]]
    #: position after the last cache write
    state_end: Position

    def run(self, feeds: Tensors, watch: Watch | None = None, results: bool = True) -> Tensors:
        """Copy the inputs and run the step; return copies of the graph's outputs. Without `results`
        it stops after the last cache write, does not call `watch`, and returns an empty dict."""
        for name, t in self.feeds.items():
            t.copy_(feeds[name])
        if not results:
            self.code.run(end=self.state_end)
            return {}
        if watch is None:
            self.code.run()
        else:
            at = (0, 0)
            for end, values in self.ends:
                self.code.run(at, end)
                for name, t in values.items():
                    watch(name, t)
                at = end
        return {name: t.clone() for name, t in self.outputs.items()}


def bound(g: Graph, shapes: Mapping[str, Sequence[int]]) -> Graph:
    """Return a graph with its dims bound by the shapes of its inputs and caches."""
    dims: dict[str, int] = {}
    for v in (*g.inputs, *g.state):
        sizes = zip(v.type.shape, shapes[v.name], strict=True)
        dims |= {d: size for d, size in sizes if isinstance(d, str)}
    return bind(g, **dims)


def record_step(
    g: Graph, weights: Tensors, caches: Tensors, feeds: Tensors, arena: Arena, run: Run = run_node
) -> StepProgram:
    """Record a graph for these caches and the shapes of `feeds`; `run` runs nodes that have no
    instruction. Programs that share an arena must not run at the same time."""
    g = bound(g, {name: t.shape for name, t in (*caches.items(), *feeds.items())})
    arena.begin(prod(_sizes(g.inputs[0])[0][:2]))
    r = Recorder(arena, run)
    inputs = {v.name: arena.empty(*_sizes(v)) for v in g.inputs}
    params = {v.name: weights[v.name] for v in g.params}
    outputs = r.record(g, {**inputs, **params, **{v.name: caches[v.name] for v in g.state}})
    return StepProgram(r.code(params.values()), inputs, outputs, r.ends, r.state_end)


def of_tokens(two: StepProgram, three: StepProgram, tokens: int) -> StepProgram:
    """Return the program of a step of `tokens` >= 2 tokens per sequence without recording it:
    addresses and sizes are linear in the number of tokens, so they are extrapolated from the
    programs of two and of three tokens. It cannot be watched."""
    if [*map(storage_of, two.code.buffers)] != [*map(storage_of, three.code.buffers)]:
        raise RuntimeError("no extrapolation: steps of 2 and of 3 tokens use different buffers")

    def extrapolate(a: Any, b: Any) -> Any:
        one, other = a.view(np.int64), b.view(np.int64)
        return (one + (tokens - 2) * (other - one)).view(a.dtype)

    def linear(one: Sequence[int], other: Sequence[int]) -> list[int]:
        return [n + (tokens - 2) * (more - n) for n, more in zip(one, other, strict=True)]

    def tensor(a: Tensor, b: Tensor) -> Tensor:
        (offset,) = linear([int(a.storage_offset())], [int(b.storage_offset())])
        return a.as_strided(linear(a.shape, b.shape), linear(a.stride(), b.stride()), offset)

    def operand(a: Any, b: Any) -> Any:
        if isinstance(a, Rounded):
            return replace(a, x=tensor(a.x, b.x))
        return a if isinstance(a, Coded) else tensor(a, b)

    def torch_op(a: TorchOp, b: TorchOp) -> TorchOp:
        inputs, outputs = map(operand, a.inputs, b.inputs), map(tensor, a.outputs, b.outputs)
        return replace(a, inputs=tuple(inputs), outputs=tuple(outputs))

    def tensors(a: Tensors, b: Tensors) -> Tensors:
        return {name: tensor(t, b[name]) for name, t in a.items()}

    instructions = extrapolate(two.code.instructions, three.code.instructions)
    operands = extrapolate(two.code.operands, three.code.operands)
    ops = map(torch_op, two.code.torch_ops, three.code.torch_ops)
    code = replace(two.code, instructions=instructions, operands=operands, torch_ops=tuple(ops))
    feeds, outputs = tensors(two.feeds, three.feeds), tensors(two.outputs, three.outputs)
    return StepProgram(code, feeds, outputs, (), two.state_end)
